"""The audit: finds the mismatched pairs of a data set from any two embeddings, and better partners for them."""
