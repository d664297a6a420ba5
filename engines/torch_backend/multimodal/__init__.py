"""Converts images to features: processors, encoder, cache."""
