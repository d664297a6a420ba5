"""Generated checkpoints load with transformers and have the shape of their name."""

import json
import math
from pathlib import Path
from typing import Any

import engines.torch_backend  # noqa: F401  isort: skip  before transformers imports torchvision
import pytest
import torch
from safetensors import safe_open
from transformers import AutoModelForImageTextToText, LlavaConfig, LlavaForConditionalGeneration

from benchmarks.make_checkpoint import (
    LLAVA_SHAPES,
    list_parameters,
    make_checkpoint,
    smolvlm_config,
)


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"vision_feature_layer": [-2, -3], "vision_feature_select_strategy": "full"},
        {"text_config": {"tie_word_embeddings": True, "num_key_value_heads": 4}},
        {"text_config": {"attention_bias": True, "mlp_bias": True}},
        {"text_config": {"model_type": "qwen2"}},
        {"multimodal_projector_bias": False},
    ],
)
def test_transformers_loads_every_tiny_variant_without_unused_keys(
    tmp_path: Path, changes: dict[str, Any]
) -> None:
    make_checkpoint("tiny", tmp_path / "tiny", changes=changes)

    _, info = LlavaForConditionalGeneration.from_pretrained(
        tmp_path / "tiny", output_loading_info=True
    )

    assert not any(info.values())


def test_a_large_checkpoint_is_sharded_and_indexed(tmp_path: Path) -> None:
    make_checkpoint("tiny", tmp_path / "t", max_shard_bytes=100_000)

    index = json.loads((tmp_path / "t/model.safetensors.index.json").read_text())
    files = set(index["weight_map"].values())
    assert len(files) > 1
    for file in files:
        with safe_open(tmp_path / "t" / file, "pt") as shard:
            assert set(shard.keys()) == {n for n, f in index["weight_map"].items() if f == file}


@pytest.mark.parametrize(
    ("shape", "billions"), [("llava-1b", 1.41), ("llava-1.5-7b", 7.06), ("smolvlm2-500m", 0.507)]
)
def test_shapes_have_the_parameters_of_their_models(shape: str, billions: float) -> None:
    if shape in LLAVA_SHAPES:
        config = LlavaConfig(**LLAVA_SHAPES[shape])
    else:
        config = smolvlm_config(None, torch.bfloat16)

    count = sum(math.prod(size) for _, size in list_parameters(config))
    assert count / 1e9 == pytest.approx(billions, rel=0.02)


def test_a_shape_of_transformers_can_have_fewer_layers(tmp_path: Path) -> None:
    make_checkpoint("smolvlm2-500m", tmp_path / "t", num_layers=1)

    loaded: Any = AutoModelForImageTextToText.from_pretrained(
        tmp_path / "t", output_loading_info=True
    )
    model, info = loaded
    assert not any(info.values())
    assert len(model.model.text_model.layers) == len(model.model.vision_model.encoder.layers) == 1
