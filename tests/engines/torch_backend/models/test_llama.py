"""The decoder's logits are those of transformers' LlamaForCausalLM."""

import pytest
import torch
from torch.testing import assert_close

from engines.torch_backend.models.config import RopeScaling
from tests.factories_torch import LLAMA3_SCALING, make_model_pair, make_vlm_config, plain_logits


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
    found = plain_logits(pair.ours, token_ids)
    assert_close(found, expected, rtol=1e-3, atol=1e-3)
