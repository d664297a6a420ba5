"""Inference: scheduler, paged KV cache, model runners."""
