"""Helpers without knowledge of pairs: files, formatting, progress, HTML, signals."""
