"""Which layers the vision tower has, and what of a CLIP model it refuses; `test_equivalence` compares what it computes."""

import pytest
import torch

from engines.torch_backend.models.config import UnsupportedCheckpoint
from engines.torch_backend.models.vision import (
    VisionTower,
    num_blocks_needed,
    open_clip_name,
)
from tests.factories_torch import make_vision_config


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
