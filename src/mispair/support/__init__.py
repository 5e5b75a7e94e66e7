"""Helpers that know nothing about pairs: files, formatting, progress, HTML, signals."""
