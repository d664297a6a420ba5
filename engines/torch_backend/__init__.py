"""The PyTorch engine.

Importing the package does not import torch, so that its settings can be listed without it. It lets torchvision be
imported (see `torchvision_stub`) before transformers or timm import it.
"""

import sys
from importlib.abc import MetaPathFinder


class _BeforeTorchvision(MetaPathFinder):
    """Applies the stub when torchvision is first imported."""

    def find_spec(self, fullname: str, path: object, target: object = None) -> None:
        """Finds nothing, and removes itself once torchvision is imported."""
        if fullname == "torchvision":
            sys.meta_path.remove(self)
            from engines.torch_backend.multimodal import torchvision_stub  # noqa: PLC0415

            torchvision_stub.declare_missing_operators()


if "torchvision" not in sys.modules:
    sys.meta_path.insert(0, _BeforeTorchvision())
