"""An engine is found by its name, and checks its own settings."""

import subprocess
import sys

import pytest

from engines.base import EngineCall, LoadedEngine
from engines.mock.engine import MockEngineSettings, load_mock_engine
from engines.registry import (
    EngineKind,
    create_engine,
    engine_kinds,
    kind_of,
    prepare_process,
    read_settings,
    register,
    settings_classes,
)
from engines.settings import BadEngineSettings, EngineSettings
from shared.protocol import ChatMessage, Generate, SamplingParams, TextPart
from tests.factories_engine import run_all

INSTANT = {"vision_s": 0, "prefill_s_per_token": 0, "decode_s": 0}


def test_the_mock_engine_is_made_as_its_settings_say():
    mock = {**INSTANT, "tokens_per_image": "7", "num_output_tokens": "3"}
    loaded = create_engine({"kind": "mock", "max_model_len": "100", "mock": mock})
    assert loaded.card.name == "mock"
    assert (loaded.card.max_model_len, loaded.card.image_tokens) == (100, 7)
    task = Generate((ChatMessage("user", (TextPart("hi"),)),), SamplingParams())
    answer = run_all(loaded.engine, loaded.engine.prepare(EngineCall("r", task), []))["r"]
    assert len(answer.token_ids) == 3


@pytest.mark.parametrize(
    ("values", "kind"),
    [
        ({}, "torch"),
        ({"kind": "auto", "model": "org/name"}, "torch"),
        ({"kind": "auto", "model": "shapes-clip"}, "pooling"),
        ({"kind": "mock", "model": "shapes-clip"}, "mock"),
    ],
)
def test_the_engine_is_the_models_unless_one_is_named(values, kind):
    assert kind_of(values) == kind


def test_neither_the_mock_engine_nor_a_look_at_all_settings_needs_torch():
    program = (
        "import sys; from engines.registry import create_engine, settings_classes;"
        "create_engine({'kind': 'mock'}); settings_classes(); assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", program], check=True, timeout=60)


def test_an_engine_with_a_model_of_ours_starts_without_the_models_of_transformers():
    """Their import takes a second."""
    program = (
        "import sys; import engines.torch_backend; from engines.registry import create_engine;"
        "create_engine({'kind': 'torch', 'model': 'shapes', 'num_kv_blocks': 64, 'max_model_len': 512});"
        "assert 'transformers.modeling_utils' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", program], check=True, timeout=60)


@pytest.mark.parametrize(
    ("values", "sentence"),
    [
        (
            {"kind": "tgi"},
            "VLM_ENGINE__KIND: there is no engine 'tgi'; there are .*mock, .*torch",
        ),
        ({"quantization": "int3"}, "VLM_ENGINE__QUANTIZATION: Input should be 'none', 'int8'"),
        ({"kind": "mock", "dtype": "float16"}, "VLM_ENGINE__DTYPE: the mock engine has no such"),
        ({"kind": "mock", "mock": {"decode_s": "fast"}}, "VLM_ENGINE__MOCK__DECODE_S: .*number"),
        ({"kind": "mock", "max_num_seqs": "0"}, "VLM_ENGINE__MAX_NUM_SEQS: .*greater than"),
        ({"kind": "mock", "num_kv_blocks": "0"}, "VLM_ENGINE__NUM_KV_BLOCKS: .*greater than"),
        (
            {"kind": "torch", "max_images_per_step": "-1"},
            "VLM_ENGINE__MAX_IMAGES_PER_STEP: .*greater",
        ),
        (
            {"disabled_gpu_kernels": "gate"},
            "VLM_ENGINE__DISABLED_GPU_KERNELS: .*did you mean VLM_ENGINE__DISABLED_OPS",
        ),
    ],
)
def test_a_wrong_setting_is_one_sentence_that_names_its_variable(values, sentence):
    with pytest.raises(BadEngineSettings, match=f"^{sentence}") as refused:
        read_settings(values)
    assert "\n" not in str(refused.value)


def test_another_engine_needs_settings_and_what_makes_it(monkeypatch):
    class Settings(EngineSettings):
        url: str = ""

    made: list[EngineSettings] = []

    def create(settings, progress) -> LoadedEngine:
        made.append(settings)
        return load_mock_engine(MockEngineSettings(), progress)

    monkeypatch.setattr("engines.registry.kinds", {})
    register("remote", EngineKind(Settings, create))
    create_engine({"kind": "remote", "url": "http://there"})
    assert made == [Settings(url="http://there")]
    assert settings_classes() == [Settings]


def test_an_engine_says_which_models_it_runs_and_what_its_process_needs(monkeypatch):
    calls: list[str] = []
    kind = EngineKind(
        EngineSettings,
        lambda settings, progress: create_engine({"kind": "mock"}),
        models=("org/theirs",),
        prepare_process=lambda: calls.append("prepared"),
    )
    monkeypatch.setattr("engines.registry.kinds", dict(engine_kinds()))
    register("remote", kind)
    values = {"kind": "auto", "model": "org/theirs"}
    assert kind_of(values) == "remote"
    prepare_process(values)
    prepare_process({"kind": "mock"})
    assert calls == ["prepared"]


def test_an_installed_package_brings_an_engine(monkeypatch):
    class Point:
        name = "other"

        def load(self) -> EngineKind:
            return EngineKind(
                EngineSettings, lambda settings, progress: create_engine({"kind": "mock"})
            )

    monkeypatch.setattr("engines.registry.entry_points", lambda group: [Point()])
    assert create_engine({"kind": "other"}).card.name == "mock"
