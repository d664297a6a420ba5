"""Loading a model by name gives an engine whose answers equal those of transformers."""

from pathlib import Path
from typing import Any

import pytest
import torch

from engines.base import EngineStartError, LoadedEngine
from engines.registry import create_engine
from engines.torch_backend.loading import load as module
from engines.torch_backend.loading.load import choose_dtype
from engines.torch_backend.memory import free_bytes, limit_memory
from engines.torch_backend.ops import cpu_level
from engines.torch_backend.ops.cpu_level import CpuLevel
from shared.protocol import ChatMessage, ImagePart, SamplingDefaults, TextPart

CONFIG = {"kv_cache_bytes": 4 * 1024 * 1024, "device": "cpu", "dtype": "float32"}
QUESTION = "What color is the star?"


def load(model: Path | str, **changes: Any) -> LoadedEngine:
    return create_engine({**CONFIG, "model": str(model), **changes})


def test_the_model_card_describes_the_model(tiny: Path, tmp_path: Path) -> None:
    card = load(tiny).card
    assert (card.name, card.max_model_len, card.vocab_size) == ("tiny", 512, 384)
    assert (card.supports_images, card.image_tokens) == (True, 16)
    assert (card.dtype, card.quantization, card.format) == ("float32", "", "safetensors")
    assert card.sampling == SamplingDefaults()
    (tmp_path / "generation_config.json").write_text('{"temperature": 0.5, "top_k": 3}')
    changes = {"quantization": "int8", "served_name": "other", "max_model_len": 100}
    other = load(tiny, generation_config=str(tmp_path), **changes)
    assert (other.card.name, other.card.quantization) == ("other", "int8")
    assert other.card.max_model_len == other.engine.max_model_len == 100
    assert other.card.sampling == SamplingDefaults(0.5, top_k=3)


def test_startup_times_are_reported_by_phase(tiny: Path) -> None:
    told: list[tuple[str, float]] = []
    values = {**CONFIG, "model": str(tiny), "quantization": "int8"}
    loaded = create_engine(values, lambda *step: told.append(step))
    phases = ["download", "compile", "load", "warmup"]
    assert list(dict.fromkeys(phase for phase, _ in told)) == phases
    shares = [share for phase, share in told if phase == "load"]
    assert shares == sorted(shares)
    assert shares[-1] == 1.0
    startup_s = loaded.engine.stats().startup_s
    assert startup_s.keys() == {*phases, "quantize"}
    assert all(seconds > 0 for seconds in startup_s.values())


def test_a_checkpoint_without_a_template_uses_that_of_llava(tiny: Path) -> None:
    with_own = load(tiny).engine.processor
    (tiny / "chat_template.jinja").unlink()
    without = load(tiny).engine.processor

    messages = [ChatMessage("user", (ImagePart(0), TextPart(QUESTION)))]
    images = [("hash", "pixels")]
    assert without.build_prompt(messages, images) == with_own.build_prompt(messages, images)


def test_the_memory_limit_bounds_the_loaded_model(tiny: Path) -> None:
    with pytest.raises(EngineStartError, match=r"0\.0 GiB available"):
        create_engine({"model": str(tiny), "device": "cpu", "memory_bytes": 1})
    limit_memory(0)
    whole = free_bytes(torch.device("cpu"))
    try:
        limit_memory(2**30)
        assert free_bytes(torch.device("cpu")) < min(2**30, whole)
        limit_memory(1 << 60)
        assert free_bytes(torch.device("cpu")) > whole // 2
    finally:
        limit_memory(0)


def test_auto_selects_bfloat16_if_the_processor_supports_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(cpu_level, "cpu_flags", lambda: frozenset({"fast", "slow"}))
    for asked, flag, dtype in (
        ("auto", "fast", torch.bfloat16),
        ("auto", "other", torch.float32),
        ("float16", "fast", torch.float16),
    ):
        level = CpuLevel("some", bfloat16_flags=frozenset({flag}))
        monkeypatch.setattr(module, "choose_level", lambda level=level: level)
        assert choose_dtype(asked, torch.device("cpu")) is dtype
