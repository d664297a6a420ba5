"""The registry: engines are found by name and validate their own settings."""

import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from engines import registry
from engines.base import LoadedEngine
from engines.mock.engine import MockEngineSettings, load_mock_engine
from engines.registry import (
    EngineKind,
    create_engine,
    kind_of,
    prepare_process,
    read_settings,
    settings_classes,
)
from engines.settings import BadEngineSettings, EngineSettings
from tests import factories_gguf


def test_engines_import_only_what_they_need():
    """The mock engine and the list of settings import no torch; the built-in model imports no transformers models."""
    program = (
        "import sys; from engines.registry import create_engine, settings_classes;"
        "create_engine({'kind': 'mock'}); settings_classes(); assert 'torch' not in sys.modules;"
        "import engines.torch_backend;"
        "create_engine({'kind': 'torch', 'model': 'shapes', 'num_kv_blocks': 64, 'max_model_len': 512});"
        "assert 'transformers.modeling_utils' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", program], check=True)


@pytest.mark.parametrize(
    ("values", "sentence"),
    [
        ({"kind": "tgi"}, "KIND: there is no engine 'tgi'; choose one of .*mock, .*torch"),
        ({"quantization": "int3"}, "QUANTIZATION: Input should be 'none', 'int8'"),
        ({"kind": "mock", "dtype": "float16"}, "DTYPE: the mock engine has no such"),
        ({"kind": "mock", "mock": {"decode_s": "fast"}}, "MOCK__DECODE_S: .*number"),
        ({"kind": "mock", "max_num_seqs": "0"}, "MAX_NUM_SEQS: .*greater than"),
        ({"disabled_gpu_kernels": "gate"}, ".*did you mean VLM_ENGINE__DISABLED_OPS"),
    ],
)
def test_the_error_of_an_invalid_setting_names_its_variable(values, sentence):
    with pytest.raises(BadEngineSettings, match=f"^VLM_ENGINE__{sentence}") as refused:
        read_settings(values)
    assert "\n" not in str(refused.value)


def test_an_installed_package_can_register_an_engine(monkeypatch):
    class Settings(EngineSettings):
        url: str = ""

    events: list[object] = []

    def create(settings, progress) -> LoadedEngine:
        events.append(settings)
        return load_mock_engine(MockEngineSettings(), progress)

    kind = EngineKind(
        Settings, create, models=("org/theirs",), prepare_process=lambda: events.append("prepared")
    )
    point = SimpleNamespace(name="remote", load=lambda: kind)
    monkeypatch.setattr("engines.registry.entry_points", lambda group: [point])
    assert settings_classes()[-1] is Settings
    values = {"kind": "auto", "model": "org/theirs", "url": "http://there"}
    assert kind_of(values) == "remote"
    prepare_process(values)
    prepare_process({"kind": "mock"})
    create_engine(values)
    assert events == ["prepared", Settings(model="org/theirs", url="http://there")]


@pytest.fixture
def programs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder for programs that is the only one in PATH."""
    folder = tmp_path / "env" / "bin"
    folder.mkdir(parents=True)
    monkeypatch.setenv("PATH", str(folder))
    registry.find_server.cache_clear()
    return folder


def install(program: Path) -> None:
    program.write_text("#!/bin/sh\n")
    program.chmod(0o755)


@pytest.mark.parametrize(
    ("architecture", "is_installed", "kind"),
    [("gemma3", True, "llama-server"), ("gemma3", False, "torch"), ("llama", True, "torch")],
)
def test_llama_server_runs_files_that_the_torch_engine_does_not_read(
    architecture: str, is_installed: bool, kind: str, programs: Path, tmp_path: Path
):
    if is_installed:
        install(programs / "llama-server")
    file = tmp_path / "model.gguf"
    factories_gguf.write_text(file, factories_gguf.make_model("llama"), architecture)
    assert kind_of({"model": str(file)}) == kind


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
    version: str | None, has_gpu: bool, kind: str, programs: Path, monkeypatch: pytest.MonkeyPatch
):
    driver = programs / "version"
    monkeypatch.setattr(registry, "GPU_DRIVER", driver)
    if has_gpu:
        driver.touch()
    if version is not None:
        install(programs / "vllm")
        packages = programs.parent / "lib" / "python3.12" / "site-packages"
        (packages / f"vllm-{version}.dist-info").mkdir(parents=True)
        file = packages / f"vllm-{version}.dist-info" / "METADATA"
        file.write_text(f"Name: vllm\nVersion: {version}\n")
    assert kind_of({"kind": "auto", "model": "org/name"}) == kind
    for values, named in (
        ({}, "torch"),
        ({"model": "shapes"}, "torch"),
        ({"model": "shapes-clip"}, "pooling"),
        ({"model": "shapes-clip", "kind": "mock"}, "mock"),
    ):
        assert kind_of(values) == named
