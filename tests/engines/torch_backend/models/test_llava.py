"""LLaVA joins its parts as transformers does, and reads every naming of its checkpoints; its tower has the layers that are read."""

import pytest
import torch
from torch.testing import assert_close

from engines.torch_backend.models.llava import FAMILY
from engines.torch_backend.models.registry import rename_weights
from engines.torch_backend.models.vision import VisionTower
from tests.factories_torch import load_ours, make_model_pair, make_vision_config, make_vlm_config


def rename_to_published(name: str) -> str:
    """The names of the published llava-hf files."""
    name = name.replace("model.language_model.", "language_model.model.")
    name = name.replace("model.vision_tower.", "vision_tower.vision_model.")
    name = name.replace("model.multi_modal_projector.", "multi_modal_projector.")
    return name.replace("lm_head.", "language_model.lm_head.")


def rename_to_transformers_4(name: str) -> str:
    """The names that transformers 4.52 and later had in memory."""
    return name.replace("model.vision_tower.", "model.vision_tower.vision_model.")


def rename_to_transformers_5(name: str) -> str:
    """The names that transformers 5 writes: the published ones, but for the vision tower."""
    return rename_to_published(name).replace("vision_model.", "")


@pytest.mark.parametrize(
    "rename", [rename_to_published, rename_to_transformers_4, rename_to_transformers_5]
)
def test_every_naming_of_a_checkpoint_is_read_alike(rename):
    pair = make_model_pair(make_vlm_config())
    renamed = {rename(name): tensor for name, tensor in pair.theirs.state_dict().items()}
    expected = dict(pair.ours.state_dict())
    found = load_ours(pair.config, renamed).state_dict()
    assert_close(dict(found), expected)


def test_weights_that_are_derived_from_others_are_left_out():
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
