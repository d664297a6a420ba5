"""Rotation by several positions a token is that of transformers' Qwen2-VL."""

import torch
from transformers.models.qwen2_vl.configuration_qwen2_vl import Qwen2VLTextConfig
from transformers.models.qwen2_vl.modeling_qwen2_vl import (
    Qwen2VLRotaryEmbedding,
    apply_rotary_pos_emb,
)

from engines.torch_backend.layers.rotary import RotaryTable, rotate
from tests.factories_torch import make_text_config

CPU = torch.device("cpu")
SECTIONS = (2, 1, 1)


def test_each_section_of_channels_is_turned_by_its_own_row_of_positions():
    theirs = Qwen2VLRotaryEmbedding(
        Qwen2VLTextConfig(
            hidden_size=32,
            num_attention_heads=4,
            rope_parameters={
                "rope_type": "default",
                "rope_theta": 10000.0,
                "mrope_section": [*SECTIONS],
            },
        )
    )
    positions = torch.tensor([[0, 1, 1, 1, 4], [0, 1, 1, 2, 4], [0, 1, 2, 1, 4]])
    x = torch.randn(5, 4, 8, generator=torch.Generator().manual_seed(0))
    by_head = x.transpose(0, 1)[None]
    expected, _ = apply_rotary_pos_emb(by_head, by_head, *theirs(x, positions[:, None]))

    table = RotaryTable(make_text_config(rope_sections=SECTIONS), 64, torch.float32, CPU)

    assert torch.allclose(rotate(x, *table.at(positions)), expected[0].transpose(0, 1), atol=1e-6)
    assert table.num_rows == 3


def test_equal_rows_of_positions_turn_as_one_does():
    sections = make_text_config(rope_sections=SECTIONS)
    positions = torch.arange(9)
    several = RotaryTable(sections, 64, torch.float32, CPU).at(positions.expand(3, -1))
    one = RotaryTable(make_text_config(), 64, torch.float32, CPU).at(positions)
    assert all(torch.equal(a, b) for a, b in zip(several, one, strict=True))
