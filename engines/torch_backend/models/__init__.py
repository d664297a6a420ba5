"""Models: configuration, vision tower, projector and decoder."""
