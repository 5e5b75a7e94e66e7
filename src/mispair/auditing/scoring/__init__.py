"""How an audit scores pairs."""
