"""Training of `shapes-clip`, the built-in model of embeddings."""
