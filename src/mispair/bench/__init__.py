"""Measuring: how fast the code is, beside plain code that does the same."""
