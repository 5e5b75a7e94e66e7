"""Review: people decide on the doubtful pairs of an audit, on a local web page."""
