"""Install SGLang for CPUs into an environment of its own in `.cache/sglang`: `make test-sglang`.

SGLang and all of its Python are the published wheel. torch and torchvision are those of this environment, and what needs
CUDA is left out. Its kernels for CPUs, `sgl_kernel`, are not on PyPI: SGLang imports them also where it computes by
torch alone, so `sgl_kernel` is a module whose functions raise.
"""

import importlib.util
import re
import shutil
import subprocess
import sysconfig
import venv
from pathlib import Path

from tests.engines.upstream.build_vllm import requirements
from tests.engines.upstream.test_wheels import WHEELS

FOLDER = Path(__file__).parents[3] / ".cache" / "sglang"
PYTHON = FOLDER / "bin" / "python"
_LEFT_OUT = re.compile(
    r"torch|cuda|flash|humming|kernels|nvidia|nvshmem|quack|sgl|smg|tilelang|tml|deepseek|build"
)
#: The kernels that SGLang's models of Qwen bind when they are imported.
_STUB = """
import torch

for name in ("sigmoid_mul", "qk_gemma_rmsnorm", "qk_gemma_rmsnorm_with_gate", "qkvzba_split_reshape_cat_contiguous"):
    torch.library.define(f"sgl_kernel::fused_{name}_cpu", "() -> ()")


def __getattr__(name):
    if name.startswith("__"):
        raise AttributeError(name)

    def missing(*_, **__):
        raise NotImplementedError(name)

    return missing
"""


def main() -> None:
    if list(FOLDER.glob("lib/*/site-packages/sgl_kernel.py")):
        return
    venv.create(FOLDER, with_pip=True, clear=True)
    packages = next(FOLDER.glob("lib/python*/site-packages"))
    (packages / "torch.pth").write_text(sysconfig.get_path("purelib") + "\n")
    pip = [PYTHON, "-m", "pip", "--disable-pip-version-check", "--quiet"]
    subprocess.run([*pip, "install", "--no-deps", WHEELS["sglang"]], check=True)
    metadata = next(packages.glob("sglang-*.dist-info")) / "METADATA"
    needed = requirements(metadata.read_text(), _LEFT_OUT)
    subprocess.run([*pip, "install", *needed], check=True)
    _copy_torchvision(packages)
    (packages / "sgl_kernel.py").write_text(_STUB)


def _copy_torchvision(packages: Path) -> None:
    """Without its operators, which may be built for another torch."""
    spec = importlib.util.find_spec("torchvision")
    assert spec is not None
    assert spec.origin is not None
    shutil.copytree(Path(spec.origin).parent, packages / "torchvision")
    (packages / "torchvision" / "_meta_registrations.py").write_text("")


if __name__ == "__main__":
    main()
