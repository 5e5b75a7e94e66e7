"""From files to `Pairs` to batches. Nothing here knows a model."""
