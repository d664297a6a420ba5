"""Images to features: processors, encoder, cache."""
