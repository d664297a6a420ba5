"""Hostile checkpoints: the loader refuses each with an error that names file and field, in little time and memory."""

import json
import shutil
import time
import tracemalloc
from collections.abc import Callable
from itertools import product
from pathlib import Path
from typing import Any

import pytest

from engines.text.processor import create_processor
from engines.torch_backend.loading.formats import detect
from engines.torch_backend.loading.stored_tensors import list_tensors
from engines.torch_backend.models.config import UnsupportedCheckpoint
from engines.torch_backend.models.hf_config import read_fields
from engines.torch_backend.models.registry import find_family
from engines.upstream.media import find_media_tokens
from tests.engines.torch_backend.models.family_table import named, write_checkpoint
from tests.long import few

WITHIN_S = 5.0
MAX_BYTES = 64 * 1024 * 1024
DEEP = "[" * 100_000 + "]" * 100_000
DOUBLING = {
    "type": "Sequence",
    "normalizers": [{"type": "Replace", "pattern": {"String": "a"}, "content": "aa"}] * 40,
}


def change(file: Path, path: str, value: Any) -> None:
    """Sets the value at the path `a.b.c` of a JSON file; an empty path replaces the whole file."""
    content = json.loads(file.read_text()) if file.is_file() else {}
    *parents, last = path.split(".")
    section = content
    for name in parents:
        section = section[name]
    section[last] = value
    file.write_text(json.dumps(content))


def look_at(directory: Path) -> None:
    """Runs all steps of the loader before it reads weights."""
    family, config = find_family(directory)
    create_processor(directory, family.processor(directory, config))
    detect(read_fields(directory))
    list_tensors(directory)


def refusal(directory: Path) -> str:
    """Returns the error with which a checkpoint is refused, and checks time and memory."""
    tracemalloc.start()
    started = time.process_time()
    try:
        with pytest.raises(UnsupportedCheckpoint) as caught:
            look_at(directory)
        assert time.process_time() - started < WITHIN_S
        assert tracemalloc.get_traced_memory()[1] < MAX_BYTES
    finally:
        tracemalloc.stop()
    sentence = str(caught.value)
    assert "\n" not in sentence
    assert len(sentence) < 500
    return sentence


JSON_FILES = (
    "config.json", "generation_config.json", "preprocessor_config.json", "processor_config.json", "tokenizer.json",
    "tokenizer_config.json", "model.safetensors.index.json",
)  # fmt: skip


NO_OBJECTS = ("[]", "5", DEEP, '{"a": ' + DEEP + "}", "{", "\ufffd")


@pytest.mark.parametrize(
    ("file", "content"),
    few(
        product(JSON_FILES, NO_OBJECTS),
        [
            (file, NO_OBJECTS[(place + n) % 6])
            for place, file in enumerate(JSON_FILES)
            for n in (0, 3)
        ],
    ),
)
def test_a_file_that_is_not_a_json_object_is_refused(file: str, content: str, tiny: Path) -> None:
    if file == "processor_config.json":  # read because there is no other template
        (tiny / "chat_template.jinja").unlink()
    (tiny / file).write_text(content)
    assert file in refusal(tiny)


PREFIX = "model.continuing_subword_prefix", "a longer one than a token"  #: makes tokenizers panic
#: Wrong values by file and field. The error contains the last part of the field, or the given words.
FIELDS: dict[str, list[tuple[Any, ...]]] = {
    "config.json": [
        ("architectures", 5), ("image_token_index", "x"), ("model_type", ["llava"]), ("multimodal_projector_bias", "yes"),
        ("projector_hidden_act", {}), ("quantization_config", [1]), ("text_config", [], "text"),
        ("text_config.attention_bias", 3), ("text_config.head_dim", 10**9), ("text_config.hidden_size", 10**30),
        ("text_config.hidden_size", True), ("text_config.max_position_embeddings", 10**12),
        ("text_config.model_type", {}), ("text_config.num_hidden_layers", 100_000),
        ("text_config.num_hidden_layers", 1e308), ("text_config.rms_norm_eps", "small"),
        ("text_config.rms_norm_eps", float("nan")), ("text_config.rope_scaling", {"type": []}, "rope_"),
        ("text_config.rope_scaling", {"type": "linear", "factor": "x"}, "rope_"),
        ("text_config.rope_scaling", {"type": "linear", "factor": 0}, "rope_"), ("text_config.rope_theta", -1),
        ("text_config.sliding_window", "x"), ("text_config.vocab_size", 10**10), ("vision_config.hidden_size", 0),
        ("text_config.num_attention_heads", 7, "attention heads (7)"), ("vision_config.image_size", 31_623),
        ("vision_config.image_size", []), ("vision_config.layer_norm_eps", "x"),
        ("vision_config.num_hidden_layers", 100_001), ("vision_config.patch_size", 1000),
        ("vision_config.patch_size", None), ("vision_feature_layer", [True]), ("vision_feature_layer", "last"),
        ("vision_feature_select_strategy", 1),
    ],
    "preprocessor_config.json": [
        ("crop_size", 10**9), ("crop_size", "x"), ("do_resize", "x"), ("image_mean", "a"), ("image_mean", [None] * 3),
        ("image_std", 0), ("resample", 99), ("rescale_factor", "x"), ("size", {"height": 31_623, "width": 31_623}),
        ("size", {"shortest_edge": 10**9}), ("size", "x"),
    ],
    "tokenizer_config.json": [
        ("added_tokens_decoder", {"x": {"content": "a"}}), ("added_tokens_decoder", {"5": {"content": 5}}),
        ("added_tokens_decoder", []), ("bos_token", 7), ("bos_token", {"content": None}), ("extra_special_tokens", "x"),
        ("additional_special_tokens", [5]), ("chat_template", ["x"]), ("chat_template", [5, {"name": []}]),
    ],
    "tokenizer.json": [
        ("normalizer", DOUBLING, ""), ("normalizer", {"type": "Sequence", "normalizers": [DOUBLING] * 2}, ""),
        ("normalizer", {"type": "Replace", "pattern": {"Regex": ""}, "content": "a" * 1000}, ""),
        ("decoder", {"type": "Sequence", "decoders": DOUBLING["normalizers"]}, ""), ("model", 5, ""),
        ("model.vocab", {"<image>": 4_000_000_000}, ""), ("model.type", "Unigram", ""),
        ("pre_tokenizer", {"type": "Surprise"}, ""), ("added_tokens", [{"content": 5}], ""),
        ("added_tokens", "9" * 5000, ""), ("post_processor.special_tokens", {}, ""),
        (*PREFIX, ""),
    ],
    "model.safetensors.index.json": [("weight_map", value, "") for value in (5, {"a": 5}, {"a": "../b"})],
}  # fmt: skip


@pytest.mark.parametrize(
    ("file", "path", "value", "words"),
    [
        *(
            (file, path, value, words[0] if words else path.rpartition(".")[2])
            for file, fields in FIELDS.items()
            for path, value, *words in fields
        ),
        *(
            (file, "eos_token_id", value, f"{file}: eos_token_id")
            for file in ("generation_config.json", "config.json")
            for value in ("x", [[]], {"a": 1}, 10**12, True, 1.5)
        ),
    ],
)
def test_invalid_fields_are_named(file: str, path: str, value: Any, words: str, tiny: Path) -> None:
    if path == "eos_token_id":
        (tiny / "generation_config.json").unlink()
    if path == "chat_template":
        (tiny / "chat_template.jinja").unlink()
    change(tiny / file, path, value)
    sentence = refusal(tiny)
    assert "tokenizer" in sentence if file == "tokenizer.json" else file in sentence
    assert words in sentence
    if path == "added_tokens":  # also read for engines behind HTTP
        with pytest.raises(UnsupportedCheckpoint, match=r"tokenizer\.json"):
            find_media_tokens(tiny, "")


def _hold(kind: str, num_bytes: int) -> Callable[[Path], object]:
    """Returns a function that writes one weight of a type."""

    def write(directory: Path) -> None:
        entry = {"dtype": kind, "shape": [4], "data_offsets": [0, num_bytes]}
        header = json.dumps({"w": entry}).encode()
        for file in directory.glob("*.safetensors*"):
            file.unlink()
        content = len(header).to_bytes(8, "little") + header + bytes(num_bytes)
        (directory / "model.safetensors").write_bytes(content)

    return write


def _of(family: str, file: str, path: str, value: Any) -> Callable[[Path], object]:
    """Returns a function that writes a checkpoint of transformers with one changed field."""

    def write(directory: Path) -> None:
        shutil.rmtree(directory)
        write_checkpoint(named(family), directory)
        change(directory / file, path, value)

    return write


def _tower(field: str, value: Any) -> Callable[[Path], object]:
    """Returns a function that writes a checkpoint with one changed field of its timm tower."""
    return _of("Gemma 3", "config.json", f"vision_config.{field}", value)


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (lambda d: (d / "config.json").unlink(), ""),
        (lambda d: (d / "config.json").write_text("{}"), ""),
        (lambda d: (d / "chat_template.jinja").write_text("{{ messages[0].role }}"), "does not render images"),
        (lambda d: (d / "chat_template.jinja").write_bytes(b"{{ messages }} \xff"), "chat_template.jinja is not UTF-8"),
        (_hold("F8_E5M2", 4), "F8_E5M2"),
        (_hold("C64", 32), "C64"),
        (_hold("F3", 4), "F3"),
        (_tower("architecture", "hf-hub:timm/resnet18"), "vision_config.architecture is "),
        (_tower("architecture", "local-dir:/tmp"), "vision_config.architecture is "),
        (_tower("model_args", {"checkpoint_path": "/tmp/weights.pth"}), "vision_config.model_args is "),
        (_tower("model_args", {"pretrained_cfg": {"url": "http://x"}}), "vision_config.model_args is "),
        (_tower("model_args", "x"), "vision_config.model_args is "),
        (_of("Qwen2.5-VL", "config.json", "text_config.hidden_act", ""), "ForConditionalGeneration fails"),
        (_of("Qwen2.5-VL", "tokenizer.json", *PREFIX), "ForConditionalGeneration fails"),
        *((_of("Qwen2.5-VL", "processor_config.json", f"image_processor.{name}", value), "number of tokens of an image")
          for name, value in (("size.longest_edge", "x"), ("merge_size", 0))),
    ],
)  # fmt: skip
def test_an_invalid_checkpoint_is_refused_with_the_reason(
    damage: Callable[[Path], object], words: str, tiny: Path
) -> None:
    damage(tiny)
    assert words in refusal(tiny)
