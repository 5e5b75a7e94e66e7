"""Comparisons of methods: suites of trainings, and their tables and figures."""
