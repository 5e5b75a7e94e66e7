"""The training loop and its files."""
