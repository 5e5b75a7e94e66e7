"""The layouts of data sets: one module for each way to store images, captions and vectors.

A layout is a `Source`: it reads its pairs, and writes an edited copy of them (`Edits`) with the same files and columns.
"""

SUBSET = "subset.npy"  # DataComp's list of the uids to keep
