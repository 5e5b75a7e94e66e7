"""Robust training for any encoders: a loss, a sampler, and adapters for training libraries."""
