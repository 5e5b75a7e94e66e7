"""A trained model: score, evaluate, search."""
