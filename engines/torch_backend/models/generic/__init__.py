"""Transformers models over the paged KV cache."""
