"""One call for all layers gives the same results as one call per part."""

from copy import deepcopy
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from engines.torch_backend.kv_cache import KVCachePool
from engines.torch_backend.layers.linear import INT8
from engines.torch_backend.layers.rotary import RotaryTable
from engines.torch_backend.models.llama import Llama
from engines.torch_backend.ops import native
from engines.torch_backend.ops.paged_attention.cpu import build
from engines.torch_backend.ops.paged_attention.reference import Heads
from engines.torch_backend.ops.registry import Ops, choose, cpu_ops
from engines.torch_backend.step import StepInputs
from tests.engines.torch_backend.ops.native.test_attention import make_heads
from tests.engines.torch_backend.paged import BLOCK_SIZE, CPU, make_inputs
from tests.factories_torch import make_model_pair, make_vlm_config

CONFIG = make_vlm_config()
DECODES, MIXED = [(1, 3), (1, 17), (1, 30)], [(1, 9), (1, 2), (7, 0), (6, 5)]


def make_decoder(ops: Ops, heads: Heads | None = None) -> Llama:
    decoder = deepcopy(make_model_pair(CONFIG).ours).language_model
    for layer in decoder.model.layers if heads is not None else ():
        layer.self_attn.heads = heads
    decoder.bind(ops, torch.float32)
    return decoder


def pass_step(
    ops: Ops, decoder: Llama, inputs: StepInputs, x: Tensor, dtype: torch.dtype = torch.float32,
    rows: list[int] | None = None,
) -> Tensor:  # fmt: skip
    """Runs a step on a cache that always has the same random context."""
    pool = KVCachePool(CONFIG.text, 128, BLOCK_SIZE, dtype, CPU)
    pool.data.normal_(generator=torch.Generator().manual_seed(1))
    rotation = RotaryTable.create(CONFIG.text, 64, torch.float32, CPU).at(inputs.indices)
    attend = ops["paged_attention"](CONFIG.text.num_heads, pool, inputs, rotation)
    return decoder(x.clone(), attend, rows)


def make_stream(num_tokens: int) -> Tensor:
    generator = torch.Generator().manual_seed(2)
    return torch.randn(num_tokens, CONFIG.text.hidden_size, generator=generator)


@pytest.mark.parametrize(
    ("shares", "has_heads"),
    [([(1, 0)], False), (DECODES, True), (MIXED, True), (MIXED, False), ([(9, 0)], True)],
    ids=str,
)
@torch.inference_mode()
def test_one_call_equals_a_call_for_each_part(
    ops: Ops, shares: list[tuple[int, int]], has_heads: bool, monkeypatch: pytest.MonkeyPatch
):
    """Bit by bit, also with several threads of which some have no work."""
    heads = make_heads(CONFIG.text.head_dim, 3) if has_heads else None
    decoder, inputs = make_decoder(ops, heads), make_inputs(shares)
    x = make_stream(len(inputs.slots))
    with monkeypatch.context() as patch:
        patch.setattr(native.load(ops.site.level), "attention", lambda *_: pytest.fail("in parts"))
        found = pass_step(ops, decoder, inputs, x)
        before = torch.get_num_threads()
        try:
            for num_threads in (2, 3, 5) * 5:
                torch.set_num_threads(num_threads)
                assert torch.equal(pass_step(ops, decoder, inputs, x), found)
        finally:
            torch.set_num_threads(before)

    decoder.bind(choose(ops.site, {"decoder_chain"}), torch.float32)
    assert torch.equal(found, pass_step(ops, decoder, inputs, x))


@pytest.mark.parametrize("kernels", ["off", "fast"])
@pytest.mark.parametrize("num_levels", [0, 1, 2])  # of features; the model has two layers
@torch.inference_mode()
def test_selected_rows_equal_those_of_a_complete_step(ops: Ops, kernels: str, num_levels: int):
    ops = cpu_ops(kernels, ops.site.level)
    decoder, inputs = make_decoder(ops), make_inputs(MIXED)
    x = torch.cat([make_stream(len(inputs.slots))] * (1 + num_levels), dim=1)
    whole = pass_step(ops, decoder, inputs, x)
    for rows in ([0], [1, 8, 9], [*range(len(x))]):
        torch.testing.assert_close(pass_step(ops, decoder, inputs, x, rows=rows), whole[rows])


@torch.inference_mode()
def test_an_int8_head_does_not_round_logits(ops: Ops):
    decoder = deepcopy(make_model_pair(CONFIG).ours).language_model
    decoder.lm_head.quantize(INT8, torch.float32)
    level = replace(ops.site.level, max_integer_tokens=2)
    decoder.bind(cpu_ops(ops.site.cpu_kernels, level), torch.bfloat16)
    assert decoder.logits(make_stream(5)).dtype is torch.float32


@torch.inference_mode()
def test_a_step_with_prompt_attention_by_torch_gives_the_same(ops: Ops):
    level = replace(ops.site.level, min_fused_tokens=2)
    attention = build(replace(ops.site, level=level))
    by_torch = replace(ops, functions={**ops.functions, "paged_attention": attention})
    decoder, inputs = make_decoder(ops), make_inputs(MIXED)
    x = make_stream(len(inputs.slots))
    expected = pass_step(ops, decoder, inputs, x, torch.bfloat16)
    found = pass_step(by_torch, decoder, inputs, x, torch.bfloat16)
    assert (found - expected).norm() <= 0.01 * expected.norm()
