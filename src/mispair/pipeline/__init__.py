"""From files to a model, and a model on new files: what joins encoding, audit, training and search."""
