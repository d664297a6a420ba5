"""The real arithmetic: a LLaVA (CLIP vision tower, projector, LLaMA decoder) run with PyTorch.

Importing the package makes torchvision importable (see `torchvision_stub`), before any of its modules needs
open_clip or transformers.
"""

from engines.torch_backend.multimodal.torchvision_stub import declare_missing_operators

declare_missing_operators()
