"""The PyTorch engine.

Importing this package does not import torch, so its settings can be listed without torch. It installs an import hook
that makes torchvision importable by transformers and timm (see `torchvision_stub`).
"""

import sys
from importlib.abc import MetaPathFinder


class _BeforeTorchvision(MetaPathFinder):
    """Import hook that applies the stub on the first import of torchvision."""

    def find_spec(self, fullname: str, path: object, target: object = None) -> None:
        """Always returns None. For torchvision, first removes this hook and applies the stub."""
        if fullname == "torchvision":
            sys.meta_path.remove(self)
            from engines.torch_backend.multimodal import torchvision_stub  # noqa: PLC0415

            torchvision_stub.declare_missing_operators()


if "torchvision" not in sys.modules:
    sys.meta_path.insert(0, _BeforeTorchvision())
