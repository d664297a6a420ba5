"""A model's name becomes an engine whose answers are those of transformers."""

import io
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image
from transformers import AutoProcessor, LlavaForConditionalGeneration

from benchmarks.make_checkpoint import make_checkpoint
from engines.base import EngineStartError, LoadedEngine
from engines.core.sequence import EngineRequest
from engines.image_decoder import decode_image
from engines.registry import create_engine
from engines.torch_backend.loading import load as module
from engines.torch_backend.loading.load import choose_dtype
from engines.torch_backend.memory import free_bytes, limit_memory
from engines.torch_backend.models.config import UnsupportedCheckpoint
from engines.torch_backend.ops import cpu_level
from engines.torch_backend.ops.cpu_level import CpuLevel
from shared.protocol import ChatMessage, ImagePart, SamplingDefaults, SamplingParams, TextPart
from tests.factories_images import encoded

CONFIG = {"kv_cache_bytes": 4 * 1024 * 1024, "device": "cpu", "dtype": "float32"}
QUESTION = "What color is the star?"


def load(model: Path | str, **changes: Any) -> LoadedEngine:
    return create_engine({**CONFIG, "model": str(model), **changes})


def make_image(seed: int = 0) -> bytes:
    return encoded(seed, size=(28, 28))


def answer(loaded: LoadedEngine, image_files: list[bytes], num_tokens: int = 12) -> list[int]:
    """Greedy tokens for the question about the images."""
    engine = loaded.engine
    processor = engine.processor
    parts = (*(ImagePart(i) for i in range(len(image_files))), TextPart(QUESTION))
    images = [
        (f"image {i}", processor.process_image(decode_image(data, (28, 28))))
        for i, data in enumerate(image_files)
    ]
    prompt = processor.build_prompt([ChatMessage("user", parts)], images)
    sampling = SamplingParams(max_tokens=num_tokens, temperature=0, ignore_eos=True)
    engine.add(EngineRequest("r", prompt.token_ids, sampling, prompt.images))
    token_ids: list[int] = []
    while engine.has_work():
        for output in engine.step():
            assert output.error is None
            token_ids += output.token_ids
    return token_ids


def reference(directory: Path, image_files: list[bytes], num_tokens: int = 12) -> list[int]:
    model = LlavaForConditionalGeneration.from_pretrained(directory, dtype=torch.float32).eval()
    processor: Any = AutoProcessor.from_pretrained(directory)
    content = [{"type": "image", "image": Image.open(io.BytesIO(data))} for data in image_files]
    inputs = processor.apply_chat_template(
        [{"role": "user", "content": [*content, {"type": "text", "text": QUESTION}]}],
        tokenize=True,
        add_generation_prompt=True,
        return_dict=True,
        return_tensors="pt",
    )
    output = model.generate(
        **inputs, do_sample=False, max_new_tokens=num_tokens, min_new_tokens=num_tokens
    )
    return output[0, inputs["input_ids"].shape[1] :].tolist()


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("load") / "tiny"
    make_checkpoint("tiny", directory, seed=5)
    return directory


@pytest.mark.parametrize("num_images", [0, 1, 2])
def test_a_checkpoint_answers_as_in_transformers(tiny: Path, num_images: int) -> None:
    image_files = [make_image(seed) for seed in range(num_images)]
    expected = reference(tiny, image_files)
    assert 2 not in expected  # EOS, which transformers suppresses up to `min_new_tokens`
    assert answer(load(tiny), image_files) == expected


def test_the_card_says_what_is_served(tiny: Path) -> None:
    card = load(tiny).card
    assert (card.name, card.max_model_len, card.vocab_size) == ("tiny", 512, 384)
    assert (card.supports_images, card.image_tokens) == (True, 16)
    assert (card.dtype, card.quantization, card.format) == ("float32", "", "safetensors")
    other = load(tiny, quantization="int8", served_name="other", max_model_len=100)
    assert (other.card.name, other.card.quantization) == ("other", "int8")
    assert other.card.max_model_len == other.engine.processor.max_model_len == 100


def test_the_card_says_how_the_makers_sample(tiny: Path, tmp_path: Path) -> None:
    (tmp_path / "generation_config.json").write_text('{"temperature": 0.5, "top_k": 3}')

    assert load(tiny).card.sampling == SamplingDefaults()
    suggested = load(tiny, generation_config=str(tmp_path)).card.sampling
    assert suggested == SamplingDefaults(0.5, top_k=3)


@pytest.mark.parametrize("quantization", ["none", "int8"])
def test_start_up_is_told_by_phase(tiny: Path, quantization: str) -> None:
    told: list[tuple[str, float]] = []
    values = {**CONFIG, "model": str(tiny), "quantization": quantization}
    loaded = create_engine(values, lambda *step: told.append(step))
    phases = ["download", "compile", "load", "warmup"]
    assert list(dict.fromkeys(phase for phase, _ in told)) == phases
    shares = [share for phase, share in told if phase == "load"]
    assert shares == sorted(shares)
    assert shares[-1] == 1.0
    startup_s = loaded.engine.stats().startup_s
    assert startup_s.keys() == {*phases, *(["quantize"] if quantization == "int8" else [])}
    assert all(seconds > 0 for seconds in startup_s.values())


def test_a_checkpoint_without_template_gets_that_of_llava(tmp_path: Path) -> None:
    make_checkpoint("tiny", tmp_path / "t")
    with_own = load(tmp_path / "t").engine.processor
    (tmp_path / "t" / "chat_template.jinja").unlink()
    without = load(tmp_path / "t").engine.processor

    messages = [ChatMessage("user", (ImagePart(0), TextPart(QUESTION)))]
    images = [("hash", "pixels")]
    assert without.build_prompt(messages, images) == with_own.build_prompt(messages, images)


@pytest.mark.parametrize("content", [None, "{", "{}"])
def test_a_directory_that_is_no_checkpoint_is_refused(tmp_path: Path, content: str | None) -> None:
    if content is not None:
        (tmp_path / "config.json").write_text(content)

    with pytest.raises(UnsupportedCheckpoint):
        load(tmp_path)


def test_memory_that_it_may_take_bounds_what_is_loaded(tiny: Path) -> None:
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


@pytest.mark.parametrize(
    ("asked", "bfloat16_flags", "dtype"),
    [
        ("auto", {"fast"}, torch.bfloat16),
        ("auto", {"other"}, torch.float32),
        ("float16", {"fast"}, torch.float16),
    ],
)
def test_auto_takes_bfloat16_where_the_processor_has_instructions_for_it(
    monkeypatch: pytest.MonkeyPatch, asked: Any, bfloat16_flags: set[str], dtype: torch.dtype
) -> None:
    level = CpuLevel("some", bfloat16_flags=frozenset(bfloat16_flags))
    monkeypatch.setattr(cpu_level, "cpu_flags", lambda: frozenset({"fast", "slow"}))
    monkeypatch.setattr(module, "choose_level", lambda: level)
    assert choose_dtype(asked, torch.device("cpu")) is dtype
