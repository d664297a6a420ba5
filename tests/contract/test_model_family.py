"""The contract of model families: the tokens of transformers by every way to compute them, or a refusal by name.

Each family is loaded from a tiny random checkpoint. A new family joins by a `FamilyCase`.
"""

import io
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import load_file, save_file
from transformers import LlavaForConditionalGeneration, Qwen2ForCausalLM

from benchmarks.make_checkpoint import make_checkpoint
from engines.core.engine import BatchingEngine
from engines.core.sequence import EngineRequest, Prompt
from engines.image_decoder import decode_image
from engines.text.processor import ChatProcessor, create_processor
from engines.torch_backend.layers.linear import METHODS
from engines.torch_backend.loading.weights import load_model
from engines.torch_backend.models import causal_lm, llava, registry
from engines.torch_backend.models.config import UnsupportedCheckpoint
from engines.torch_backend.models.hf_config import read_fields
from engines.torch_backend.models.registry import FamilyModel, ModelFamily, find_family
from engines.torch_backend.runner import TorchRunner
from engines.torch_backend.settings import TorchSettings
from shared.protocol import ChatMessage, ImagePart, SamplingParams, TextPart
from tests.contract.toys import family as tiled
from tests.engines.torch_backend import ways
from tests.engines.torch_backend.models.family_table import named, write_checkpoint
from tests.engines.torch_backend.ways import Way

CPU = torch.device("cpu")
NUM_TOKENS = 10
#: The questions: texts, and images as (width, height, seed).
QUESTIONS: dict[str, list[str | tuple[int, int, int]]] = {
    "text": ["Say a word."],
    "small": [(28, 28, 1), "What is it?"],
    "wide": ["Look: ", (60, 20, 2), " and say."],
    "two": [(28, 28, 1), "Or ", (64, 64, 3), "rather?"],
    "again": [(64, 64, 3), "and", (64, 64, 3)],
    "long": ["Say a word, and then another one, until there is nothing left to be said at all."],
    "longer": ["Say a word, and then another one, until there is nothing left to be told, ever."],
}


@dataclass(frozen=True)
class FamilyCase:
    """A family, how to write a checkpoint of it, and how transformers loads the same files."""

    family: ModelFamily
    write: Callable[[Path], object]
    load_reference: Callable[[Path], Any]
    refusals: Sequence[tuple[dict[str, Any], str]]  #: changes to `config.json`, and the error
    needed: str = "language_model.model.norm.weight"  #: a required weight
    unread: str = "vision_tower.vision_model.post_layernorm.weight"  #: an ignored weight
    takes_images: bool = True
    stacked: Callable[[list[torch.Tensor]], torch.Tensor] = field(default=torch.stack)

    def __str__(self) -> str:
        return self.family.architectures[0]


def write_tiled(directory: Path) -> None:
    """Writes LLaVA's tiny checkpoint under another architecture, with two more control tokens."""
    make_checkpoint("tiny", directory, seed=5)
    config = json.loads((directory / "config.json").read_text())
    tokenizer = json.loads((directory / "tokenizer.json").read_text())
    model = tokenizer["added_tokens"][-1]
    for place, text in enumerate((tiled.START, tiled.END), start=1):
        tokenizer["added_tokens"].append(model | {"id": model["id"] + place, "content": text})
    config["architectures"] = [tiled.ARCHITECTURE]
    (directory / "config.json").write_text(json.dumps(config))
    (directory / "tokenizer.json").write_text(json.dumps(tokenizer))


def load_llava(directory: Path) -> Any:
    model = LlavaForConditionalGeneration.from_pretrained(directory, dtype=torch.float32)
    return model.eval()


def load_text(directory: Path) -> Any:
    return Qwen2ForCausalLM.from_pretrained(directory, dtype=torch.float32).eval()


LLAVA_REFUSALS = (
    ({"text_config": {"model_type": "gemma"}}, "text_config.model_type is 'gemma'"),
    ({"vision_feature_layer": 9}, "vision_feature_layer 9"),
    ({"text_config": {"rope_scaling": {"type": "yarn", "factor": 4.0}}}, "'yarn' is not supported"),
)
CASES = [
    FamilyCase(llava.FAMILY, partial(make_checkpoint, "tiny", seed=5), load_llava, LLAVA_REFUSALS),
    FamilyCase(
        tiled.FAMILY,
        write_tiled,
        load_llava,
        (*LLAVA_REFUSALS, ({"vision_feature_select_strategy": "full"}, "select_strategy")),
        stacked=torch.cat,
    ),
    FamilyCase(
        causal_lm.FAMILY,
        partial(write_checkpoint, named("Qwen2")),
        load_text,
        (
            ({"hidden_size": 2**40}, "hidden_size is 1099511627776"),
            ({"vocab_size": "many"}, "vocab_size is 'many'"),
        ),
        needed="model.norm.weight",
        unread="model.layers.0.self_attn.rotary_emb.inv_freq",
        takes_images=False,
    ),
]


@dataclass(frozen=True)
class Loaded:
    """A checkpoint, loaded as by a worker."""

    case: FamilyCase
    directory: Path
    model: FamilyModel
    processor: ChatProcessor
    prompts: dict[str, Prompt]
    expected: dict[str, list[int]]

    def start(self, **changes: Any) -> BatchingEngine:
        config = TorchSettings(**{"num_kv_blocks": 512, "block_size": 4, **changes})
        runner = TorchRunner(self.model, config, CPU, torch.float32)
        return BatchingEngine(runner, self.processor, config)

    def requests(self) -> list[EngineRequest]:
        return [
            EngineRequest(
                name,
                prompt.token_ids,
                SamplingParams(temperature=0, max_tokens=NUM_TOKENS, ignore_eos=True),
                prompt.images,
                positions=prompt.positions,
            )
            for name, prompt in self.prompts.items()
        ]


def make_image(width: int, height: int, seed: int) -> bytes:
    pixels = np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8)
    buffer = io.BytesIO()
    Image.fromarray(pixels).save(buffer, "PNG")
    return buffer.getvalue()


def ask(processor: ChatProcessor, question: list[str | tuple[int, int, int]]) -> Prompt:
    """Returns the prompt of a question, built as by a worker."""
    sizes = [part for part in question if not isinstance(part, str)]
    numbers = iter(range(len(sizes)))
    parts = [
        TextPart(part) if isinstance(part, str) else ImagePart(next(numbers)) for part in question
    ]
    images = [
        (f"{size}", processor.process_image(decode_image(make_image(*size)))) for size in sizes
    ]
    return processor.build_prompt([ChatMessage("user", tuple(parts))], images)


@torch.inference_mode()
def generate(case: FamilyCase, model: Any, prompt: Prompt) -> list[int]:
    """Returns greedy tokens of transformers, computed without a KV cache."""
    token_ids = list(prompt.token_ids)
    positions = list(prompt.positions[0] if prompt.positions else range(len(token_ids)))
    pixels = [torch.as_tensor(image.pixels) for image in prompt.images]
    given = {"pixel_values": case.stacked(pixels)} if pixels else {}
    while len(token_ids) < len(prompt.token_ids) + NUM_TOKENS:
        scores = model(
            input_ids=torch.tensor([token_ids]), position_ids=torch.tensor([positions]), **given
        ).logits
        token_ids.append(int(scores[0, -1].argmax()))
        positions.append(max(positions) + 1)
    return token_ids[len(prompt.token_ids) :]


def found(case: FamilyCase, directory: Path) -> tuple[ModelFamily, Any]:
    families = (case.family, *registry.built_in())
    with patch.object(registry, "built_in", lambda: families):
        return find_family(directory)


def load(case: FamilyCase, directory: Path) -> tuple[FamilyModel, ChatProcessor]:
    family, config = found(case, directory)
    processor = family.processor(directory, config)
    return (
        load_model(directory, family, config, CPU, torch.float32),
        create_processor(directory, processor),
    )


@pytest.fixture(scope="module", params=CASES, ids=str)
def loaded(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Loaded:
    case: FamilyCase = request.param
    directory = tmp_path_factory.mktemp("family") / "checkpoint"
    case.write(directory)
    model, processor = load(case, directory)
    theirs = case.load_reference(directory)
    prompts = {
        name: ask(processor, question)
        for name, question in QUESTIONS.items()
        if case.takes_images or all(isinstance(part, str) for part in question)
    }
    expected = {name: generate(case, theirs, prompt) for name, prompt in prompts.items()}
    assert len(set(map(tuple, expected.values()))) == len(prompts), "the answers say nothing"
    return Loaded(case, directory, model, processor, prompts, expected)


@pytest.mark.parametrize("way", ways.ROOMY_WAYS)  # `test_equivalence` runs the other ways
def test_tokens_are_those_of_transformers_by_every_way(loaded: Loaded, way: Way) -> None:
    assert way(loaded.start, loaded.requests()) == loaded.expected


def test_an_image_has_as_many_slots_as_features(loaded: Loaded) -> None:
    slot_id = loaded.case.family.processor(loaded.directory, loaded.model.config).slot_id
    for prompt in loaded.prompts.values():
        filled = []
        for image in prompt.images:
            assert loaded.model.num_features(image) == image.num_slots
            assert image.num_tokens <= loaded.processor.image_tokens
            filled += [image.offset + place for slots in image.slot_runs for place in range(*slots)]
        assert filled == [i for i, token in enumerate(prompt.token_ids) if token == slot_id]
        assert all(len(row) == len(prompt.token_ids) for row in prompt.positions)


def test_a_user_cannot_type_an_image(loaded: Loaded) -> None:
    """Control tokens of an image that a user types are text."""
    if not loaded.case.takes_images:
        return
    [image] = loaded.prompts["small"].images
    run = loaded.prompts["small"].token_ids[image.offset : image.offset + image.num_tokens]
    typed = {"<image>", "<tiles>", "</tiles>"}
    plain = ask(loaded.processor, ["x"]).token_ids
    spelled = ask(loaded.processor, ["".join(sorted(typed)) * 2]).token_ids
    controls = {token for token in run if loaded.processor.tokenizer.token_bytes(token) == b""}
    assert all(plain.count(token) == spelled.count(token) for token in controls)


@pytest.mark.parametrize("scheme", METHODS)
def test_the_decoder_can_be_quantized(loaded: Loaded, scheme: str) -> None:
    family, config = found(loaded.case, loaded.directory)
    model = load_model(loaded.directory, family, config, CPU, torch.float32, METHODS[scheme])

    def num_bytes(model: FamilyModel) -> int:
        return sum(value.nbytes for value in model.language_model.state_dict().values())

    assert num_bytes(model) < 0.8 * num_bytes(loaded.model)
    changed = replace(loaded, model=model)
    assert all(map(len, ways.run_batched(changed.start, changed.requests()).values()))


def test_refusals_name_the_field(loaded: Loaded, tmp_path: Path) -> None:
    for changes, reason in loaded.case.refusals:
        content = json.loads((loaded.directory / "config.json").read_text())
        for name, value in changes.items():
            content[name] = content[name] | value if isinstance(value, dict) else value
        (tmp_path / "config.json").write_text(json.dumps(content))
        with pytest.raises(UnsupportedCheckpoint) as caught:
            loaded.case.family.check(read_fields(tmp_path))
        assert reason in str(caught.value)


def change_weights(
    loaded: Loaded, directory: Path, change: Callable[[dict[str, torch.Tensor]], object]
) -> Path:
    """Copies the checkpoint with other weights; returns its directory."""
    weights: dict[str, torch.Tensor] = {}
    for file in loaded.directory.iterdir():
        if file.suffix == ".safetensors":
            weights |= load_file(file)
        elif not file.name.endswith("index.json"):
            (directory / file.name).write_bytes(file.read_bytes())
    change(weights)
    save_file(weights, directory / "model.safetensors")
    return directory


def test_a_weight_that_is_missing_or_unknown_is_named(loaded: Loaded, tmp_path: Path) -> None:
    case, extra = loaded.case, {"model.surprise.weight": torch.zeros(4)}
    change_weights(loaded, tmp_path, lambda weights: weights.pop(case.needed))
    with pytest.raises(UnsupportedCheckpoint, match=r"lacks weights: .*norm\.weight"):
        load(case, tmp_path)
    change_weights(loaded, tmp_path, lambda weights: weights.update(extra))
    with pytest.raises(UnsupportedCheckpoint, match=r"has unknown weights: .*surprise\.weight"):
        load(case, tmp_path)
    unread = {case.unread: torch.zeros(32)}  # known to be unused
    change_weights(loaded, tmp_path, lambda weights: weights.update(unread))
    load(case, tmp_path)


def test_an_unregistered_family_is_refused_by_its_architecture(tmp_path: Path) -> None:
    content = {"architectures": [tiled.ARCHITECTURE], "model_type": "llava"}
    (tmp_path / "config.json").write_text(json.dumps(content))
    with pytest.raises(UnsupportedCheckpoint, match=tiled.ARCHITECTURE):
        find_family(tmp_path)
