"""The layouts of data sets: one module for each way in which people store images, captions and vectors.

A layout reads its pairs and writes an edited copy of them (`sources.edits.Edits`) with the same files and columns.
"""

SUBSET = "subset.npy"  # DataComp's list of the uids to keep
