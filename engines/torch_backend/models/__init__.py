"""Model code: configuration, vision tower, projector, decoder and the LLaVA that joins them."""
