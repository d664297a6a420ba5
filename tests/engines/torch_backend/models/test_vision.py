"""The vision tower gives the hidden states of transformers' CLIPVisionModel."""

import pytest
import torch
from torch.testing import assert_close
from transformers import CLIPVisionModel

from engines.torch_backend.models.config import UnsupportedCheckpoint, VisionConfig
from engines.torch_backend.models.llava import FAMILY
from engines.torch_backend.models.registry import rename_weights
from engines.torch_backend.models.vision import (
    VisionTower,
    num_blocks_needed,
    open_clip_name,
)
from tests.factories_torch import make_transformers_config, make_vision_config, make_vlm_config


def make_towers(
    config: VisionConfig, layers: tuple[int, ...], with_class_token: bool
) -> tuple[CLIPVisionModel, VisionTower]:
    torch.manual_seed(1)
    hf_config = make_transformers_config(make_vlm_config()).vision_config
    for name in ("hidden_size", "intermediate_size", "hidden_act", "layer_norm_eps"):
        setattr(hf_config, name, getattr(config, name))
    theirs = CLIPVisionModel(hf_config).eval()
    with torch.no_grad():
        for parameter in theirs.parameters():
            parameter.normal_(std=0.3)
    with torch.device("meta"):
        ours = VisionTower(config, layers, with_class_token)
    whole = make_vlm_config(vision_feature_layers=layers)
    stored = {f"vision_tower.{name}": weight for name, weight in theirs.state_dict().items()}
    weights = rename_weights(stored, FAMILY, whole)
    ours.load_state_dict(
        {name.removeprefix("vision_tower."): weight for name, weight in weights.items()},
        assign=True,
    )
    return theirs, ours.eval()


@pytest.mark.parametrize("hidden_act", ["quick_gelu", "gelu"])
@pytest.mark.parametrize("with_class_token", [False, True])
@pytest.mark.parametrize("layers", [(-1,), (-2,), (1,), (-2, -1), (3, 1, -3)])
@torch.inference_mode()
def test_hidden_states_equal_those_of_transformers(layers, with_class_token, hidden_act):
    config = make_vision_config(hidden_act=hidden_act, layer_norm_eps=1e-3)
    theirs, ours = make_towers(config, layers, with_class_token)
    pixels = torch.randn(2, 3, 24, 24)
    states = theirs(pixels, output_hidden_states=True).hidden_states
    expected = torch.cat([states[layer] for layer in layers], dim=-1)
    assert_close(ours(pixels), expected if with_class_token else expected[:, 1:])


def test_layers_after_the_last_one_read_are_not_built():
    config = make_vision_config()
    with torch.device("meta"):
        tower = VisionTower(config, (-2, 1), with_class_token=False)
    assert len(tower.clip.transformer.resblocks) == config.num_layers - 1


@pytest.mark.parametrize(("hidden", "inner"), [(1152, 4304), (96, 257), (48, 191)])
def test_an_inner_width_that_is_no_simple_multiple_is_kept(hidden, inner):
    config = make_vision_config(hidden_size=hidden, intermediate_size=inner)
    with torch.device("meta"):
        tower = VisionTower(config, (-1,), with_class_token=False)
    assert tower.clip.transformer.resblocks[0].mlp.c_fc.out_features == inner


@pytest.mark.parametrize("layer", [0, 4, -4])
def test_a_layer_that_the_tower_does_not_have_is_refused(layer):
    with pytest.raises(UnsupportedCheckpoint, match=f"vision_feature_layer {layer}"):
        num_blocks_needed(make_vision_config(), (layer,))


def test_a_parameter_unknown_to_clip_is_refused_by_name():
    with pytest.raises(UnsupportedCheckpoint, match=r"embeddings\.register_tokens"):
        open_clip_name("embeddings.register_tokens")
