"""The built-in data set: drawn scenes with captions."""
