"""torchvision, and what is built on it, can be imported whichever build of torch is there."""

import subprocess
import sys


def test_open_clip_imports_after_the_backend_package():
    code = (
        "import engines.torch_backend\n"
        "import torchvision\n"
        "from open_clip.transformer import VisionTransformer\n"
        "from engines.torch_backend.multimodal.torchvision_stub import declare_missing_operators\n"
        "declare_missing_operators()\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=100)
