"""torchvision and packages that need it can be imported with any build of torch."""

from engines.torch_backend.multimodal.torchvision_stub import declare_missing_operators

import torchvision  # isort: skip - behind the backend package
from timm.layers import trunc_normal_  # isort: skip


def test_timm_imports_after_the_backend_package():
    declare_missing_operators()
    assert torchvision.__version__
    assert trunc_normal_.__module__ == "timm.layers.weight_init"
