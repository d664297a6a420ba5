"""Models of transformers over the paged KV cache."""
