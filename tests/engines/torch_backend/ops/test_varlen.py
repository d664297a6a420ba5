"""torch's varlen attention is used on a GPU if torch has it and its results are right.

A stand-in computes what torch's kernel computes on a GPU, with the interfaces of torch 2.11 and 2.12.
"""

import sys
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.nn import functional as F
from torch.testing import assert_close

from engines.torch_backend.layers.rotary import RotaryTable
from engines.torch_backend.ops.paged_attention import OP
from engines.torch_backend.ops.paged_attention.reference import Heads
from engines.torch_backend.ops.registry import Ops, Site, choose
from tests.engines.torch_backend.paged import make_inputs, make_pool
from tests.factories_torch import make_text_config
from tests.triton_device import DEVICE, import_kernels

import_kernels("paged_attention")
pytestmark = pytest.mark.skipif(DEVICE.type == "cuda", reason="it has torch's own")


def of_2_11(query: torch.Tensor, key: torch.Tensor, *given: Any, window_size=(-1, -1)):
    if query.shape[1] != key.shape[1]:
        raise ValueError("Expect query and key/value to have the same number of heads")
    return of_2_12(query, key, *given, window_size=window_size)


def of_2_12(
    query, key, value, cu_seq_q, cu_seq_k, max_q, max_k, *, window_size=(-1, -1), enable_gqa=False
):
    before, after = window_size
    assert after == 0
    new, context = cu_seq_q.diff().tolist(), cu_seq_k.diff().tolist()
    assert (max(new), max(context)) == (max_q, max_k)
    window = None if before < 0 else before + 1
    return attend_one_by_one(query, key, value, new, context, window)


def attend_one_by_one(
    query, key, value, new: list[int], context: list[int], window: int | None = None
) -> torch.Tensor:
    parts = []
    for x, k, v in zip(query.split(new), key.split(context), value.split(context), strict=True):
        offset = len(k) - len(x)
        mask = torch.ones(len(x), len(k), dtype=torch.bool).tril(offset)
        mask = mask.triu(offset - (window or len(k)) + 1)
        heads = (each.transpose(0, 1)[None] for each in (x, k, v))
        out = F.scaled_dot_product_attention(*heads, attn_mask=mask, enable_gqa=True)
        parts.append(out[0].transpose(0, 1))
    return torch.cat(parts)


def aligned_to_the_left(*args: Any, **options: Any) -> torch.Tensor:
    """A wrong kernel that ignores the context of a continued sequence."""
    query, key, value, new_ends, *_ = args
    new = new_ends.diff().tolist()
    return attend_one_by_one(query, key[: len(query)], value[: len(query)], new, new)


def find(
    function: Any, monkeypatch: pytest.MonkeyPatch, num_heads: int = 2, num_kv_heads: int = 1
) -> Ops:
    """Returns the chosen ops with the other GPU kernel disabled. The interpreter computes head by head."""
    module = SimpleNamespace(varlen_attn=function) if function else SimpleNamespace()
    monkeypatch.setitem(sys.modules, "torch.nn.attention.varlen", module)
    text = make_text_config(num_heads=num_heads, num_kv_heads=num_kv_heads)
    site = Site(DEVICE, text=text, interprets=True)
    return choose(site, disabled=["paged_attention.triton"], ops=[OP])


@pytest.mark.parametrize(
    ("function", "num_heads", "num_kv_heads"), [(of_2_11, 2, 1), (of_2_12, 4, 2)]
)
@torch.inference_mode()
def test_prompts_and_decodes_of_a_step_equal_the_reference(
    function: Any, num_heads: int, num_kv_heads: int, monkeypatch: pytest.MonkeyPatch
):
    ops = find(function, monkeypatch, num_heads, num_kv_heads)
    assert ops.uses("paged_attention", "triton_varlen")
    rotary = RotaryTable.create(
        make_text_config(num_kv_heads=num_kv_heads), 64, torch.float32, DEVICE
    )
    mixed = [(1, 9), (1, 2), (7, 0), (6, 5), (2, 12)]
    for window, shares in ((None, mixed), (4, mixed), (None, [(9, 0), (4, 0)]), (4, [(1, 3)])):
        inputs = make_inputs(shares)
        qkv = torch.randn(len(inputs.slots), (num_heads + 2 * num_kv_heads) * 8)
        found = []
        for create in (ops["paged_attention"], OP.reference):
            pool = make_pool(num_kv_heads=num_kv_heads)
            attend = create(num_heads, pool, inputs, rotary.at(inputs.indices))
            found.append(attend(1, qkv, Heads(window=window)))
        assert_close(*found)


@pytest.mark.parametrize(
    ("function", "complaint"),
    [
        (aligned_to_the_left, "differs from the reference by"),
        (None, "ImportError"),
        (lambda query, key, value: query, "TypeError"),
    ],
    ids=["wrong", "missing", "another interface"],
)
def test_a_wrong_or_missing_kernel_is_not_used(
    function: Any, complaint: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    assert not find(function, monkeypatch).uses("paged_attention")
    assert complaint in caplog.text
