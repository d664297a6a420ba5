"""A real vLLM on a CPU, where `make test-vllm` has installed one."""

from contextlib import AbstractContextManager
from pathlib import Path

import pytest
import torch

from benchmarks.make_checkpoint import make_checkpoint
from engines.upstream.server import ServerProcess
from engines.upstream.settings import VllmSettings
from engines.upstream.vllm import Vllm
from tests.engines.upstream.build_vllm import BINARY
from tests.engines.upstream.serving import run_server
from tests.long import IS_LONG

CONTEXT = 512
IMAGE_ID = 320
START_S = 400.0
PLUGIN = "--logits-processors vlm_fleet_vllm:ContinueAnswer"
#: Without compilation, which takes minutes. Answers after a takeover are equal in float32 alone.
ARGUMENTS = f"--enforce-eager {PLUGIN} --enable-lora --max-lora-rank 8"
ENVIRONMENT = {
    "VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_NO_USAGE_STATS": "1", "VLLM_ALLOW_RUNTIME_LORA_UPDATING": "1",
    "HF_HUB_OFFLINE": "1", "OMP_WAIT_POLICY": "PASSIVE",
}  # fmt: skip
#: vLLM's attention on CPUs has heads of at least 32 numbers.
CHANGES = {"text_config": {"num_attention_heads": 2, "num_key_value_heads": 2}}


def write_model(directory: Path) -> Path:
    """A tiny LLaVA."""
    make_checkpoint("tiny", directory, seed=6, dtype=torch.float32, changes=CHANGES)
    return directory


def make_settings(model: Path, **changes: object) -> VllmSettings:
    """Settings that start the server."""
    values = {
        "model": str(model), "command": f"{BINARY} serve", "dtype": "float32", "max_num_seqs": 8, "max_model_len": CONTEXT,
        "arguments": ARGUMENTS, "start_s": START_S, **changes,
    }  # fmt: skip
    return VllmSettings.model_validate(values)


def run_vllm(model: Path, **changes: object) -> AbstractContextManager[tuple[str, ServerProcess]]:
    """Its address and process."""
    if not IS_LONG or not BINARY.is_file():
        pytest.skip("vLLM is not installed: make test-vllm")
    settings = make_settings(model, **changes)
    return run_server(settings, Vllm(settings), ENVIRONMENT)
