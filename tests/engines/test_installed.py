"""`--engine auto` chooses an installed server only where it suits."""

from pathlib import Path

import pytest

from engines import registry
from engines.registry import kind_of
from tests import factories_gguf


@pytest.fixture
def programs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder of programs, the only one in PATH."""
    folder = tmp_path / "env" / "bin"
    folder.mkdir(parents=True)
    monkeypatch.setenv("PATH", str(folder))
    registry.find_server.cache_clear()
    return folder


def install(program: Path) -> None:
    program.write_text("#!/bin/sh\n")
    program.chmod(0o755)


def write_gguf(file: Path, architecture: str) -> str:
    model = factories_gguf.make_model("llama")
    factories_gguf.write_text(file, model, architecture if architecture == "llama" else "gemma3")
    return str(file)


@pytest.mark.parametrize(
    ("architecture", "is_installed", "kind"),
    [("gemma3", True, "llama-server"), ("gemma3", False, "torch"), ("llama", True, "torch")],
)
def test_llama_server_runs_files_that_the_torch_engine_does_not_read(
    architecture: str, is_installed: bool, kind: str, programs: Path, tmp_path: Path
):
    if is_installed:
        install(programs / "llama-server")
    assert kind_of({"model": write_gguf(tmp_path / "model.gguf", architecture)}) == kind


@pytest.mark.parametrize(
    ("version", "has_gpu", "kind"),
    [
        ("0.33.0", True, "vllm"),
        ("0.33.0", False, "torch"),
        ("0.18.2", True, "torch"),
        (None, True, "torch"),
    ],
)
def test_vllm_runs_models_on_a_gpu_if_its_version_is_tested(
    version: str | None,
    has_gpu: bool,
    kind: str,
    programs: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
):
    driver = tmp_path / "version"
    monkeypatch.setattr(registry, "GPU_DRIVER", driver)
    if has_gpu:
        driver.touch()
    if version is not None:
        install(programs / "vllm")
        packages = tmp_path / "env" / "lib" / "python3.12" / "site-packages"
        (packages / f"vllm-{version}.dist-info").mkdir(parents=True)
    assert kind_of({"model": "org/name"}) == kind
    assert kind_of({"model": "shapes"}) == "torch"
    assert kind_of({"model": "org/name", "kind": "mock"}) == "mock"
