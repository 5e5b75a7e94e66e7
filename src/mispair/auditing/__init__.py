"""The audit: finds the wrong pairs of a data set from any two embeddings, and better partners for them."""
