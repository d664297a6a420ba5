"""torchvision, and what is built on it, can be imported whichever build of torch is there."""

from engines.torch_backend.multimodal.torchvision_stub import declare_missing_operators

import torchvision  # isort: skip - behind the backend package
from open_clip.transformer import VisionTransformer  # isort: skip


def test_open_clip_imports_after_the_backend_package():
    declare_missing_operators()
    assert torchvision.__version__
    assert VisionTransformer.__module__ == "open_clip.transformer"
