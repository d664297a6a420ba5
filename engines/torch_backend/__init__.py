"""The real arithmetic: a LLaVA (CLIP vision tower, projector, LLaMA decoder) run with PyTorch."""
