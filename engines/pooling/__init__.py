"""Embeddings and scores: one number or one vector for an input, and no tokens."""
