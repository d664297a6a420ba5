"""The real arithmetic: a LLaVA (CLIP vision tower, projector, LLaMA decoder) run with PyTorch.

Importing the package imports no torch, so that its settings can be listed without. It sees to it that torchvision can
be imported (see `torchvision_stub`), before open_clip or transformers do so.
"""

import sys
from importlib.abc import MetaPathFinder


class _BeforeTorchvision(MetaPathFinder):
    """Declares what torchvision's import needs, when somebody first imports it."""

    def find_spec(self, fullname: str, path: object, target: object = None) -> None:
        """Find nothing, and be asked no more once torchvision was."""
        if fullname == "torchvision":
            sys.meta_path.remove(self)
            from engines.torch_backend.multimodal.torchvision_stub import (  # noqa: PLC0415
                declare_missing_operators,
            )

            declare_missing_operators()


if "torchvision" not in sys.modules:
    sys.meta_path.insert(0, _BeforeTorchvision())
