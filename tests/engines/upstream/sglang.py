"""A real SGLang on a CPU. `make test-sglang` installs it into its own environment, `.cache/sglang`.

HTTP server, tokenizer manager, scheduler, detokenizer, radix cache, sampler and model are those of the published wheel.
Attention is its backend `torch_native`; torch and torchvision are those of this environment, without CUDA packages.
`sgl_kernel`, its CPU kernels, is not on PyPI but is imported even if torch computes everything, so the tests install a
module whose functions raise. GPU kernels, graphs and the overlapped schedule are not tested.
"""

import importlib.util
import re
import shutil
import subprocess
import sysconfig
import venv
from contextlib import AbstractContextManager
from pathlib import Path

import pytest

import engines.torch_backend  # noqa: F401  # lets transformers import torchvision
from engines.upstream.server import ServerProcess
from engines.upstream.settings import SglangSettings
from engines.upstream.sglang import Sglang
from tests.engines.torch_backend.models.family_table import named, write_checkpoint
from tests.engines.upstream.serving import run_server
from tests.engines.upstream.test_wheels import WHEELS
from tests.engines.upstream.vllm import requirements
from tests.long import IS_LONG

FOLDER = Path(__file__).parents[3] / ".cache" / "sglang"
PYTHON = FOLDER / "bin" / "python"
_LEFT_OUT = re.compile(
    r"torch|cuda|flash|humming|kernels|nvidia|nvshmem|quack|sgl|smg|tilelang|tml|deepseek|build"
)
VIDEO_DECODER = "decord2"  #: SGLang prefers torchcodec, whose wheel needs CUDA
#: The kernels that SGLang's Qwen models import.
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
CONTEXT = 512
IMAGE_ID = 302
ARGUMENTS = (
    "--device cpu --attention-backend torch_native --max-total-tokens 4096 --skip-server-warmup "
    "--log-level warning"
)
ENVIRONMENT = {
    "SGLANG_USE_CPU_ENGINE": "1", "TORCH_COMPILE_DISABLE": "1", "HF_HUB_OFFLINE": "1", "OMP_WAIT_POLICY": "PASSIVE",
}  # fmt: skip


def write_model(directory: Path) -> Path:
    write_checkpoint(named("Qwen2.5-VL"), directory)
    return directory


def make_settings(model: Path, **changes: object) -> SglangSettings:
    """Returns settings that start the server."""
    values = {
        "model": str(model), "command": f"{PYTHON} -m sglang.launch_server", "dtype": "float32",
        "max_num_seqs": 8, "max_model_len": CONTEXT, "arguments": ARGUMENTS, "start_s": 400.0, **changes,
    }  # fmt: skip
    return SglangSettings.model_validate(values)


def run_sglang(model: Path, **changes: object) -> AbstractContextManager[tuple[str, ServerProcess]]:
    """Runs a server; yields its URL and process. Skips the test if SGLang is not installed."""
    if not IS_LONG or not PYTHON.is_file():
        pytest.skip("SGLang is not installed: make test-sglang")
    settings = make_settings(model, **changes)
    return run_server(settings, Sglang(settings), ENVIRONMENT)


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
    subprocess.run([*pip, "install", *needed, VIDEO_DECODER], check=True)
    _copy_torchvision(packages)
    (packages / "sgl_kernel.py").write_text(_STUB)


def _copy_torchvision(packages: Path) -> None:
    """Copies torchvision without its operators, which can be built for another torch."""
    spec = importlib.util.find_spec("torchvision")
    assert spec is not None
    assert spec.origin is not None
    shutil.copytree(Path(spec.origin).parent, packages / "torchvision")
    (packages / "torchvision" / "_meta_registrations.py").write_text("")


if __name__ == "__main__":
    main()
