"""Embeddings and scores: one vector or one number per input."""
