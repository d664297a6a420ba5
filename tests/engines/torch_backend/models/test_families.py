"""The table: every family gives the tokens of transformers by every way that the engine has.

Each row is a tiny random checkpoint of the family's own configuration class, loaded as a worker loads it. `make test` runs
some of them, `make families` all, and each is compared with its row of `docs/models.md`.
"""

import contextlib
import io
import random
import warnings
from collections.abc import Callable
from collections.abc import Sequence as Several
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from PIL import Image
from torch.utils.flop_counter import FlopCounterMode
from transformers import AutoModelForCausalLM, AutoProcessor

from engines.core.engine import BatchingEngine
from engines.core.runner import PixelLimits
from engines.core.sequence import EngineRequest, ImageInput, Prompt
from engines.image_decoder import decode_image
from engines.text.processor import ChatProcessor, create_processor
from engines.torch_backend.layers.linear import QuantizedMethod
from engines.torch_backend.loading.weights import load_model
from engines.torch_backend.models.generic.family import FAMILY, GenericFamily
from engines.torch_backend.models.generic.tested import TESTED
from engines.torch_backend.models.hf_config import read_fields
from engines.torch_backend.models.registry import FamilyModel, ModelFamily, find_family
from engines.torch_backend.multimodal import parts
from engines.torch_backend.multimodal.transformers_images import TAKES_VIDEO
from engines.torch_backend.ops.registry import Ops, cpu_ops
from engines.torch_backend.runner import TorchRunner
from engines.torch_backend.settings import TorchSettings
from shared.protocol import SamplingParams
from tests.contract.test_model_family import ask, make_image
from tests.engines.torch_backend import ways
from tests.engines.torch_backend.models import family_table
from tests.engines.torch_backend.models.family_table import FAMILIES, Family
from tests.engines.torch_backend.ways import Way
from tests.factories_torch import run_to_end
from tests.long import IS_LONG

CPU = torch.device("cpu")
NUM_TOKENS = 16
QUICK = frozenset({
    "Mistral, window", "Gemma 3n, text", "GPT-2", "GPT-OSS", "DeepSeek V3", "Qwen3-Next",
    "Idefics3", "Qwen2.5-VL", "Qwen3-VL",
})  # fmt: skip
PAGE = Path(__file__).parents[4] / "docs" / "models.md"
NO_PREFIXES = "*"  #: after the name of a family without a prefix cache
CROWDED = (ways.run_preempted, ways.run_overlapped, ways.run_with_drafts_under_all_of_it)
NEED_PREFIXES = (ways.run_prefix_cached, ways.run_under_all_of_it)
#: of the ways, those that are made of the others
QUICK_WAYS: list[Way] = [ways.run_prefix_cached, ways.run_overlapped, ways.run_under_all_of_it]
#: What families of images are asked: texts, and images as (width, height, seed).
QUESTIONS: dict[str, list[str | tuple[int, int, int]]] = {
    "text": ["Say a word."],
    "small": [(28, 28, 1), "What is it?"],
    "wide": ["Look: ", (60, 20, 2), " and say."],
    "more": ["Say another word, and one more, and the last."],
    "less": ["Say it again, please."],
    "two": [(28, 28, 1), "Or ", (64, 64, 3), "?"],
}
#: of models with audio, which `test_media.py` tests; the last have no images
AUDIO = ("Gemma 3n", "Gemma 4 E", "Qwen2.5-Omni")
AUDIO_ALONE = ("Qwen2-Audio", "GLM-ASR", "Audio Flamingo 3", "Voxtral")
RUN = [family for family in FAMILIES if IS_LONG or family.name in QUICK]


@dataclass(frozen=True)
class Loaded:
    """A family's checkpoint, loaded as a worker loads it, and what transformers answers."""

    family: Family
    directory: Path
    model: FamilyModel
    processor: ChatProcessor
    requests: list[EngineRequest]
    expected: dict[str, list[int]]

    def start(self, ops: Ops | None = None, **changes: Any) -> BatchingEngine:
        settings = TorchSettings(**{"num_kv_blocks": 256, "block_size": 4, **changes})
        runner = TorchRunner(self.model, settings, CPU, torch.float32, ops=ops)
        return BatchingEngine(runner, self.processor, settings)


@cache
def prompts() -> dict[str, list[int]]:
    """Of several lengths, two with one beginning."""
    draw = random.Random(0)
    long = [draw.randrange(5, 290) for _ in range(18)]
    return {
        "short": long[3:9],
        "middle": [draw.randrange(5, 290) for _ in range(16)],
        "long": long,
        "like long": [*long[:-5], 7, 8, 9],
        "other": [draw.randrange(5, 290) for _ in range(14)],
    }


def load_processor(directory: Path, family: ModelFamily = FAMILY) -> ChatProcessor:
    config = family.check(read_fields(directory))
    multimodal = family.processor(directory, config)
    return create_processor(directory, multimodal)


def load_only(
    directory: Path,
    family: ModelFamily = FAMILY,
    dtype: torch.dtype = torch.float32,
    scheme: QuantizedMethod | None = None,
    **how: Any,
) -> Any:
    config = family.check(read_fields(directory))
    return load_model(directory, family, config, CPU, dtype, scheme, **how)


def load(directory: Path, family: GenericFamily = FAMILY) -> tuple[FamilyModel, ChatProcessor]:
    return load_only(directory, family), load_processor(directory, family)


def made(family: Family, directory: Path, *how: Any, **more: Any) -> Any:
    """The model of a family, written and loaded."""
    family_table.write_checkpoint(family, directory)
    return load_only(directory, *how, **more)


def load_reference(directory: Path, auto: Any = AutoModelForCausalLM) -> Any:
    """Transformers' own model."""
    return auto.from_pretrained(directory, attn_implementation="eager").eval()


@torch.inference_mode()
def generate(model: Any, token_ids: list[int], **inputs: Any) -> list[int]:
    """Greedy tokens of transformers."""
    ids = torch.tensor([token_ids])
    if hasattr(model.base_model, "rope_deltas"):
        model.base_model.rope_deltas = None
    model.generation_config.eos_token_id = None
    out = model.generate(
        input_ids=ids, max_new_tokens=NUM_TOKENS, do_sample=False, pad_token_id=0,
        **{"attention_mask": torch.ones_like(ids), **inputs},
    )  # fmt: skip
    return out[0, len(token_ids) :].tolist()


def make_request(name: str, prompt: Prompt, **sampling: Any) -> EngineRequest:
    params = {"temperature": 0.0, "max_tokens": NUM_TOKENS, "ignore_eos": True, **sampling}
    return EngineRequest(
        name, prompt.token_ids, SamplingParams(**params), prompt.images, positions=prompt.positions
    )


def make_requests(**sampling: Any) -> list[EngineRequest]:
    return [make_request(name, Prompt(ids), **sampling) for name, ids in prompts().items()]


#: What transformers answers, computed once in a process.
_answers: dict[Family, dict[str, list[int]]] = {}


def load_for_text(
    family: Family, directory: Path, model: FamilyModel | None = None, **sampling: Any
) -> Loaded:
    """A checkpoint that is there, and prompts of text, without answers."""
    model, processor = model or load_only(directory), load_processor(directory)
    return Loaded(family, directory, model, processor, make_requests(**sampling), {})


def load_family(family: Family, directory: Path) -> Loaded:
    family_table.write_checkpoint(family, directory)
    model, processor = load(directory)
    asked = {name: Prompt(ids) for name, ids in prompts().items()}
    if family.create_processor is not None:
        asked = {name: ask(processor, question) for name, question in QUESTIONS.items()}
    if family not in _answers:
        _answers[family] = _ask_transformers(family, directory, asked)
    requests = [make_request(name, prompt) for name, prompt in asked.items()]
    return Loaded(family, directory, model, processor, requests, _answers[family])


def _ask_transformers(
    family: Family, directory: Path, asked: dict[str, Prompt]
) -> dict[str, list[int]]:
    theirs = load_reference(directory, family.auto)
    if family.create_processor is None:
        return {name: generate(theirs, prompt.token_ids) for name, prompt in asked.items()}
    process = load_their_processor(family, directory)
    answers = {}
    for name, prompt in asked.items():
        inputs = process(QUESTIONS[name])
        assert inputs.pop("input_ids")[0].tolist() == prompt.token_ids
        answers[name] = generate(theirs, prompt.token_ids, **inputs)
    return answers


def load_their_processor(family: Family, directory: Path) -> Callable[..., dict[str, Any]]:
    """What transformers' own processor makes of a question, all images at once."""
    processor: Any = AutoProcessor.from_pretrained(directory)

    def process(question: Several[Any]) -> dict[str, Any]:
        images = [
            Image.open(io.BytesIO(make_image(*part)))
            for part in question
            if not isinstance(part, str)
        ]
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of its own ways with numpy
            if family.read is not None:
                spoken = "".join(part for part in question if isinstance(part, str))
                return dict(family.read(processor, images, spoken))
            parts = [part if isinstance(part, str) else family.placeholder for part in question]
            text = "".join([family.opening, *parts, "\n"])
            bos = {"add_special_tokens": False} if family.opening else {}
            # this one counts the images of a prompt, which lie in their own list
            is_counted = isinstance(processor, transformers.LlavaOnevisionProcessor)
            given: Any = [images] if is_counted and images else images or None
            try:
                made = processor(images=given, text=[text], return_tensors="pt", **bos)
            except ValueError:  # some are of no use without an image
                made = processor.tokenizer([text], return_tensors="pt", **bos)
        return {
            name: value.float() if value.is_floating_point() else value
            for name, value in made.items()
        }

    return process


def page_rows() -> dict[str, list[str]]:
    """Input, video, audio and speed path of each family in docs/models.md."""
    lines = [line for line in PAGE.read_text().splitlines() if line.startswith("| text")]
    rows = [line.strip("| ").split(" | ") for line in lines]
    return {name: cells for *cells, names in rows for name in names.split("; ")}


@pytest.fixture(scope="module", params=RUN, ids=str)
def loaded(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Loaded:
    directory = tmp_path_factory.mktemp("family")
    loaded = load_family(request.param, directory)
    assert len({tuple(tokens) for tokens in loaded.expected.values()}) >= len(loaded.expected) - 1
    assert len({token for tokens in loaded.expected.values() for token in tokens}) > 3
    family = loaded.family
    path = loaded.model.speed_path if find_family(directory)[0] is FAMILY else "native"
    name = family.name + ("" if loaded.model.shares_prefixes else NO_PREFIXES)
    takes = ["no", "yes"]
    row = ["text, images" if family.create_processor else "text"]
    row += [takes[family.architecture in TAKES_VIDEO], takes[family.name in AUDIO], path]
    assert page_rows()[name] == row
    return loaded


@pytest.mark.parametrize("way", ways.WAYS if IS_LONG else QUICK_WAYS)
def test_tokens_are_those_of_transformers_by_every_way(loaded: Loaded, way: Way) -> None:
    if way in NEED_PREFIXES and not loaded.model.shares_prefixes:
        way = ways.run_preempted
    if way is ways.run_under_all_of_it and loaded.family.create_processor:
        way = ways.run_preempted  # prompts too unlike for blocks to be few and shared at once
    assert run(way, loaded) == loaded.expected


def run(way: Way, loaded: Loaded) -> ways.Tokens:
    """With as few blocks as make the way happen, where it is for few: images have many tokens."""
    if way not in CROWDED or loaded.family.create_processor is None:
        return way(loaded.start, loaded.requests)
    largest = max(len(r.prompt_token_ids) for r in loaded.requests) + NUM_TOKENS
    for num_more in (1, 4, 8, 12, 16, 24, 32):
        num_blocks = -(-largest // 4) + num_more

        def start(num_blocks: int = num_blocks, **changes: Any) -> BatchingEngine:
            few = {"num_kv_blocks": num_blocks} if "num_kv_blocks" in changes else {}
            return loaded.start(**{**changes, **few})

        with contextlib.suppress(AssertionError):
            return way(start, loaded.requests)
    raise AssertionError(f"{way.__name__} does not happen")


def test_the_models_that_share_no_prefixes_are_known(loaded: Loaded) -> None:
    assert loaded.model.shares_prefixes == loaded.family.shares_prefixes
    if not loaded.family.shares_prefixes:
        engine = loaded.start()
        for _ in range(2):
            assert ways.run_batched(lambda: engine, loaded.requests) == loaded.expected
        assert engine.stats().num_prefix_hit_tokens == 0


@torch.inference_mode()
def test_an_image_is_encoded_in_parts_of_bounded_work(
    loaded: Loaded, monkeypatch: pytest.MonkeyPatch
) -> None:
    if loaded.family.create_processor is None:
        pytest.skip("it takes no images")
    image = next(r.images[-1] for r in loaded.requests if r.request_id == "two")
    [expected] = loaded.model.encode([image], CPU, torch.float32)
    piece = 60_000
    monkeypatch.setattr(parts, "PIECE_FLOPS_PER_THREAD", piece // torch.get_num_threads())
    monkeypatch.setattr(parts, "PART_S", 0.0)
    encoding = loaded.model.encode_in_parts(image, CPU, torch.float32)
    flops = []
    while True:
        with FlopCounterMode(display=False) as counter:
            try:
                next(encoding)
            except StopIteration as stop:
                torch.testing.assert_close(stop.value, expected, rtol=1e-4, atol=1e-4)
                break
        flops.append(counter.get_total_flops())
    # one channel of one convolution is not split
    assert max(flops) <= max(2 * piece, sum(flops) / 8)


def test_larger_images_are_scaled_to_the_limit(loaded: Loaded) -> None:
    if loaded.family.create_processor is None:
        pytest.skip("it takes no images")
    config = loaded.model.config
    free, limited = (FAMILY.processor(loaded.directory, config) for _ in range(2))
    limited.limit(56 * 56)
    for size in ((64, 64), (150, 100), (60, 200)):
        data = make_image(*size, seed=4)
        made = limited.process(decode_image(data, size))
        assert made.num_slots <= limited.image_tokens <= free.image_tokens
        assert made.num_slots <= free.process(decode_image(data, size)).num_slots
        asked = free.process(decode_image(data, size), PixelLimits(most=56 * 56))
        assert asked.text == made.text  # a request's own limit does the same
        image = ImageInput(0, made.num_slots, "image", made)
        [features] = loaded.model.encode([image], CPU, torch.float32)
        assert len(features) == made.num_slots


def test_kernels_give_the_same_tokens(loaded: Loaded) -> None:
    assert run_to_end(loaded.start(cpu_ops("fast")), loaded.requests) == loaded.expected


def test_every_tested_architecture_is_in_the_table() -> None:
    paths = {name.removesuffix(NO_PREFIXES): row[-1] for name, row in page_rows().items()}
    assert {family.kind for family in FAMILIES if paths[family.name] == "generic"} == TESTED


def test_the_page_names_every_family() -> None:
    listed = sorted(name.removesuffix(NO_PREFIXES) for name in page_rows())
    assert listed == sorted((*AUDIO_ALONE, *(family.name for family in FAMILIES)))
