"""The decoder's logits are those of transformers' LlamaForCausalLM."""

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F
from torch.testing import assert_close

from engines.torch_backend.layers.rotary import RotaryTable, rotate
from engines.torch_backend.models.config import RopeScaling, TextConfig
from tests.factories_torch import LLAMA3_SCALING, make_model_pair, make_vlm_config


class PlainAttention:
    """Causal attention over one sequence, as simple as can be."""

    def __init__(self, config: TextConfig, rotation: tuple[Tensor, Tensor]) -> None:
        self.sizes = [config.num_heads, config.num_kv_heads, config.num_kv_heads]
        self.group = config.num_heads // config.num_kv_heads
        self.rotation = rotation

    def __call__(self, layer: int, qkv: Tensor) -> Tensor:
        query, key, value = qkv.unflatten(1, (sum(self.sizes), -1)).split(self.sizes, dim=1)
        query, key = (rotate(x, *self.rotation) for x in (query, key))
        key, value = (x.repeat_interleave(self.group, dim=1) for x in (key, value))
        out = F.scaled_dot_product_attention(
            query.transpose(0, 1), key.transpose(0, 1), value.transpose(0, 1), is_causal=True
        )
        return out.transpose(0, 1).flatten(1)


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"num_kv_heads": 4},
        {"num_kv_heads": 1},
        {"head_dim": 16},
        {"attention_bias": True, "attention_output_bias": True},
        {"mlp_bias": True},
        {"tie_word_embeddings": True},
        {"rope_theta": 500000.0, "rms_norm_eps": 1e-4},
        {"rope_scaling": RopeScaling("linear", 4.0)},
        {"rope_scaling": LLAMA3_SCALING},
        {"hidden_act": "gelu_pytorch_tanh"},
    ],
    ids=str,
)
@torch.inference_mode()
def test_logits_equal_those_of_transformers(changes):
    pair = make_model_pair(make_vlm_config(text=changes))
    token_ids = torch.randint(0, 90, (120,))
    expected = pair.theirs(input_ids=token_ids[None]).logits[0]
    text = pair.config.text
    rotary = RotaryTable(text, 256, torch.float32, torch.device("cpu"))
    decoder = pair.ours.language_model
    attend = PlainAttention(text, rotary.at(torch.arange(120)))
    hidden = decoder(decoder.embed(token_ids), attend)
    assert_close(decoder.logits(hidden), expected, rtol=1e-3, atol=1e-3)
