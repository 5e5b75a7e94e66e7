"""Public data sets: which files they have, and a check of a download."""
