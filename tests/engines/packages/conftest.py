"""A hub on this machine. The package must be imported before transformers, which imports torchvision."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from huggingface_hub import constants
from tqdm import tqdm

import engines.torch_backend  # noqa: F401
from tests.factories_hub import REPO, Hub, Repository, serve_hub, use_hub

tqdm.monitor_interval = 0  # its thread fails where a bar ends while it looks


@pytest.fixture
def hub(checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    """It has the checkpoint of the test's module."""
    with serve_hub() as server:
        server.repositories[REPO] = Repository({"main": checkpoint})
        use_hub(monkeypatch, server.url)
        monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
        monkeypatch.setattr(constants, "HF_TOKEN_PATH", str(tmp_path / "token"))
        monkeypatch.delenv("HF_TOKEN", raising=False)
        yield server
