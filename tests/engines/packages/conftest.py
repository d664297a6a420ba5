"""A local hub. Imports the package before transformers, which imports torchvision."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from huggingface_hub import constants
from tqdm import tqdm

import engines.torch_backend  # noqa: F401
from benchmarks.make_checkpoint import make_checkpoint
from tests.factories_hub import REPO, Hub, Repository, serve_hub, use_hub

tqdm.monitor_interval = 0  # its thread raises if a bar ends at the same time


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint with extra files that the engine does not load."""
    directory = tmp_path_factory.mktemp("hub") / "tiny"
    make_checkpoint("tiny", directory)
    (directory / "onnx").mkdir()
    for name in ("README.md", "pytorch_model.bin", "onnx/model.safetensors"):
        (directory / name).write_text("not needed")
    return directory


@pytest.fixture
def hub(checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    """A hub that serves the checkpoint."""
    with serve_hub() as server:
        server.repositories[REPO] = Repository({"main": checkpoint})
        use_hub(monkeypatch, server.url)
        monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
        monkeypatch.setattr(constants, "HF_TOKEN_PATH", str(tmp_path / "token"))
        monkeypatch.delenv("HF_TOKEN", raising=False)
        yield server
