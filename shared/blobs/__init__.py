"""Bytes by their SHA-256, beside the queue."""
