"""Robust training for encoders that mispair does not know: a loss, a sampler, and adapters for training libraries."""
