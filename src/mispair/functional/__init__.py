"""Pure functions: losses, metrics, mixtures, rank correlation."""
