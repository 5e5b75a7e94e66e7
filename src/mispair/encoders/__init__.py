"""From raw images and captions to embeddings."""
