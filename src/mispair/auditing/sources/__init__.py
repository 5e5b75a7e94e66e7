"""Where the pairs of an audit come from."""
