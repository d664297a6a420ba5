"""Inference: scheduler, paged KV cache, model runners. Knows no Redis, HTTP, settings or metrics library."""
