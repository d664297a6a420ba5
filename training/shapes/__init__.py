"""Training of `shapes`, the built-in chat model."""
