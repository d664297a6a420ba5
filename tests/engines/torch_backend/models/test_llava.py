"""LLaVA configs are read as transformers reads them, and every naming of the weights is supported."""

from typing import Any

import pytest
import torch
from torch.testing import assert_close
from transformers import LlavaConfig

from engines.packages.checkpoint_json import Fields
from engines.torch_backend.models.config import RopeScaling, UnsupportedCheckpoint
from engines.torch_backend.models.generic.config import GenericConfig
from engines.torch_backend.models.llava import FAMILY, VLMConfig
from engines.torch_backend.models.registry import rename_weights, resolve_config
from engines.torch_backend.models.vision import VisionTower
from tests.factories_torch import (
    TEXT_FIELDS,
    VISION_FIELDS,
    fields_of,
    load_ours,
    make_model_pair,
    make_vision_config,
    make_vlm_config,
)

# The published config of llava-1.5-7b-hf, in which most keys are absent.
LLAVA_15_7B = {
    "architectures": ["LlavaForConditionalGeneration"],
    "image_token_index": 32000,
    "model_type": "llava",
    "projector_hidden_act": "gelu",
    "text_config": {
        "max_position_embeddings": 4096,
        "model_type": "llama",
        "rms_norm_eps": 1e-05,
        "vocab_size": 32064,
    },
    "tie_word_embeddings": False,
    "vision_config": {
        "hidden_size": 1024,
        "image_size": 336,
        "intermediate_size": 4096,
        "model_type": "clip_vision_model",
        "num_attention_heads": 16,
        "num_hidden_layers": 24,
        "patch_size": 14,
    },
    "vision_feature_layer": -2,
    "vision_feature_select_strategy": "default",
}


def vlm_config_from_hf(content: dict[str, Any]) -> VLMConfig:
    return resolve_config(Fields("config.json", content))[1]


def make_config(**changes: Any) -> dict[str, Any]:
    return LLAVA_15_7B | changes


def with_text(**changes: Any) -> dict[str, Any]:
    return make_config(text_config=LLAVA_15_7B["text_config"] | changes)


#: Fields that every decoder config of transformers has.
SHAPE = {name: TEXT_FIELDS[name] for name in (
    "hidden_size", "intermediate_size", "num_layers", "num_heads", "num_kv_heads", "vocab_size", "rms_norm_eps",
)}  # fmt: skip


def check_equal(ours: VLMConfig, theirs: LlavaConfig) -> None:
    text, vision = theirs.text_config, theirs.vision_config
    for config, reference, names in (
        (ours.text, text, SHAPE),
        (ours.vision, vision, VISION_FIELDS),
    ):
        expected = fields_of(config, names)
        assert expected == {name: getattr(reference, name) for name in expected}
    assert ours.text.rope_theta == text.rope_parameters["rope_theta"]
    assert ours.text.tie_word_embeddings == theirs.tie_word_embeddings
    assert ours.image_token_id == theirs.image_token_index
    layers = theirs.vision_feature_layer
    assert ours.vision_feature_layers == ((layers,) if isinstance(layers, int) else tuple(layers))
    assert ours.vision_feature_select_strategy == theirs.vision_feature_select_strategy


@pytest.mark.parametrize(
    "config",
    [
        LLAVA_15_7B,
        {"model_type": "llava", "image_token_index": 5},
        make_config(vision_config={"hidden_size": 384, "num_attention_heads": 6}),
        make_config(vision_feature_layer=[-2, -5], vision_feature_select_strategy="full"),
        with_text(tie_word_embeddings=True),
        with_text(rope_theta=500000.0, num_key_value_heads=8),
        with_text(rope_parameters={"rope_type": "default", "rope_theta": 1e6}),
        with_text(model_type="mistral", sliding_window=None),
        with_text(model_type="qwen2"),
    ],
)
def test_absent_keys_have_the_defaults_of_transformers(config: dict[str, Any]) -> None:
    check_equal(vlm_config_from_hf(config), LlavaConfig(**config))


def test_shapes_equal_those_of_the_published_models() -> None:
    config = vlm_config_from_hf(LLAVA_15_7B)
    assert (config.text.hidden_size, config.text.head_dim) == (4096, 128)
    assert (config.text.max_position_embeddings, config.tokens_per_image) == (4096, 576)
    full = vlm_config_from_hf(make_config(vision_feature_select_strategy="full"))
    assert full.tokens_per_image == 577  # including the class token
    linear = vlm_config_from_hf(with_text(rope_scaling={"type": "linear", "factor": 2.0})).text
    assert linear.rope_scaling == RopeScaling("linear", 2.0)
    window = with_text(model_type="mistral", max_position_embeddings=32768)
    assert vlm_config_from_hf(window).text.max_position_embeddings == 4096


@pytest.mark.parametrize("key", ["rope_scaling", "rope_parameters"])
@pytest.mark.parametrize("kind_key", ["rope_type", "type"])
def test_rope_scaling_is_read_in_both_generations(key: str, kind_key: str) -> None:
    scaling = {
        kind_key: "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }  # fmt: skip
    text = vlm_config_from_hf(with_text(**{key: scaling}, rope_theta=5e5)).text
    assert text.rope_scaling == RopeScaling("llama3", 8.0, 1.0, 4.0, 8192)
    assert text.rope_theta == 5e5


def test_llama_attention_bias_covers_the_output_and_qwen2_bias_does_not() -> None:
    for changes, expected in (
        ({"attention_bias": True, "mlp_bias": True}, (True, True, True)),
        ({"model_type": "qwen2"}, (True, False, False)),
    ):
        text = vlm_config_from_hf(with_text(**changes)).text
        assert (text.attention_bias, text.attention_output_bias, text.mlp_bias) == expected


@pytest.mark.parametrize(
    ("config", "reason"),
    [
        (make_config(model_type="llava_next"), "llava_next"),
        *((make_config(vision_feature_layer=n), f"vision_feature_layer {n}") for n in (0, 25, -26)),
        (make_config(image_token_index=40000), "image_token_index 40000"),
        (make_config(projector_hidden_act="tanh"), "projector_hidden_act 'tanh'"),
        (with_text(rope_scaling={"type": "llama3", "factor": 4.0}), "low_freq_factor"),
        (with_text(partial_rotary_factor=0.5), "partial_rotary_factor"),
        (with_text(hidden_act="relu"), "hidden_act 'relu'"),
        (with_text(num_key_value_heads=5), "num_key_value_heads"),
        (with_text(num_hidden_layers="many"), "num_hidden_layers"),
        (make_config(text_config="llama"), "text_config"),
        (make_config(vision_config={"image_size": [336, 224]}), "not square"),
    ],
)
def test_configs_that_our_program_cannot_run_are_refused_by_name(
    config: dict[str, Any], reason: str
) -> None:
    with pytest.raises(UnsupportedCheckpoint, match=reason):
        FAMILY.check(Fields("config.json", config))


@pytest.mark.parametrize(
    ("config", "reason"),
    [
        (make_config(vision_config={"model_type": "siglip_vision_model"}), "siglip_vision_model"),
        (make_config(text_config={"model_type": "gemma"}), "gemma.*llama, mistral, qwen2"),
        (with_text(rope_scaling={"type": "yarn", "factor": 4.0}), "yarn"),
    ],
)
def test_other_configs_are_left_to_transformers(config: dict[str, Any], reason: str) -> None:
    with pytest.raises(UnsupportedCheckpoint, match=reason):
        FAMILY.check(Fields("config.json", config))
    assert isinstance(vlm_config_from_hf(config), GenericConfig)


def rename_to_published(name: str) -> str:
    """Renames weights to the names of the published llava-hf files."""
    name = name.replace("model.language_model.", "language_model.model.")
    name = name.replace("model.vision_tower.", "vision_tower.vision_model.")
    name = name.replace("model.multi_modal_projector.", "multi_modal_projector.")
    return name.replace("lm_head.", "language_model.lm_head.")


def rename_to_transformers_4(name: str) -> str:
    """Renames weights to the in-memory names of transformers 4.52 and later."""
    return name.replace("model.vision_tower.", "model.vision_tower.vision_model.")


def rename_to_transformers_5(name: str) -> str:
    """Renames weights to those that transformers 5 saves: the published names, except for the vision tower."""
    return rename_to_published(name).replace("vision_model.", "")


@pytest.mark.parametrize(
    "rename", [rename_to_published, rename_to_transformers_4, rename_to_transformers_5]
)
def test_every_naming_of_a_checkpoint_gives_the_same_model(rename):
    pair = make_model_pair(make_vlm_config())
    renamed = {rename(name): tensor for name, tensor in pair.theirs.state_dict().items()}
    expected = dict(pair.ours.state_dict())
    found = load_ours(pair.config, renamed).state_dict()
    assert_close(dict(found), expected)


def test_derived_weights_are_ignored():
    config = make_vlm_config(text={"tie_word_embeddings": True})
    mapped = rename_weights(
        {
            "language_model.lm_head.weight": torch.zeros(1),
            "language_model.model.layers.0.self_attn.rotary_emb.inv_freq": torch.zeros(1),
            "vision_tower.vision_model.embeddings.position_ids": torch.zeros(1),
        },
        FAMILY,
        config,
    )
    assert mapped == {}


def test_layers_after_the_last_one_read_are_not_built():
    config = make_vision_config()
    with torch.device("meta"):
        tower = VisionTower(config, (-2, 1), with_class_token=False)
    assert len(tower.blocks) == config.num_layers - 1
