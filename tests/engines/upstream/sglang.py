"""A real SGLang on a CPU, where `make test-sglang` has installed one.

HTTP front, tokenizer manager, scheduler, detokenizer, radix cache, sampler and model are SGLang's own; attention is its
backend `torch_native`. What runs on GPUs alone is not tested: its kernels, graphs and overlapping schedule.
"""

from contextlib import AbstractContextManager
from pathlib import Path

import pytest

import engines.torch_backend  # noqa: F401  # lets transformers import torchvision
from engines.upstream.server import ServerProcess
from engines.upstream.settings import SglangSettings
from engines.upstream.sglang import Sglang
from tests.engines.torch_backend.models.family_table import named, write_checkpoint
from tests.engines.upstream.build_sglang import PYTHON
from tests.engines.upstream.serving import run_server
from tests.long import IS_LONG

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
    """A tiny Qwen2.5-VL."""
    write_checkpoint(named("Qwen2.5-VL"), directory)
    return directory


def make_settings(model: Path, **changes: object) -> SglangSettings:
    """Settings that start the server."""
    values = {
        "model": str(model), "command": f"{PYTHON} -m sglang.launch_server", "dtype": "float32",
        "max_num_seqs": 8, "max_model_len": CONTEXT, "arguments": ARGUMENTS, "start_s": 400.0, **changes,
    }  # fmt: skip
    return SglangSettings.model_validate(values)


def run_sglang(model: Path, **changes: object) -> AbstractContextManager[tuple[str, ServerProcess]]:
    """Its address and process."""
    if not IS_LONG or not PYTHON.is_file():
        pytest.skip("SGLang is not installed: make test-sglang")
    settings = make_settings(model, **changes)
    return run_server(settings, Sglang(settings), ENVIRONMENT)
