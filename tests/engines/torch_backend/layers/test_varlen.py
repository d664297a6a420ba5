"""Varlen attention is used where torch has it and it is right; it says the same as run by run.

A stand-in computes here what torch's kernel does on a GPU, behind the interfaces of torch 2.11 and of 2.12.
"""

import sys
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.testing import assert_close

from engines.torch_backend.layers.attention import (
    Heads,
    paged_attention_by_sequence,
    plan_attention,
)
from engines.torch_backend.layers.rotary import RotaryTable, rotate
from engines.torch_backend.layers.step_attention import StepAttention
from engines.torch_backend.layers.visible_attention import Windows
from engines.torch_backend.ops.registry import Ops, Site, choose, discover, references
from engines.torch_backend.ops.varlen_attention.reference import attend_one_by_one
from tests.engines.torch_backend.layers.test_attention import CPU, make_pool
from tests.factories_torch import BLOCK_SIZE, make_spans, make_text_config


def of_2_11(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    cu_seq_q: torch.Tensor,
    cu_seq_k: torch.Tensor,
    max_q: int,
    max_k: int,
    *,
    window_size: tuple[int, int] = (-1, -1),
) -> torch.Tensor:
    if query.shape[1] != key.shape[1]:
        raise ValueError("Expect query and key/value to have the same number of heads")
    return of_2_12(query, key, value, cu_seq_q, cu_seq_k, max_q, max_k, window_size=window_size)


def of_2_12(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    cu_seq_q: torch.Tensor,
    cu_seq_k: torch.Tensor,
    max_q: int,
    max_k: int,
    *,
    window_size: tuple[int, int] = (-1, -1),
    enable_gqa: bool = False,
) -> torch.Tensor:
    before, after = window_size
    assert after == 0
    new, context = cu_seq_q.diff().tolist(), cu_seq_k.diff().tolist()
    assert (max(new), max(context)) == (max_q, max_k)
    shares = list(zip(new, context, strict=True))
    window = None if before < 0 else before + 1
    return attend_one_by_one(query, key, value, shares, window).to(query.dtype)


def aligned_to_the_left(*args: Any, **options: Any) -> torch.Tensor:
    """Forgets that a run may go on."""
    query, key, value, new_ends, *_ = args
    shares = [(n, n) for n in new_ends.diff().tolist()]
    return attend_one_by_one(query, key[: len(query)], value[: len(query)], shares)


def find(function: Any, monkeypatch: pytest.MonkeyPatch, num_kv_heads: int = 2) -> Ops:
    module = SimpleNamespace(varlen_attn=function) if function else SimpleNamespace()
    monkeypatch.setitem(sys.modules, "torch.nn.attention.varlen", module)
    text = make_text_config(num_kv_heads=num_kv_heads)
    [op] = [op for op in discover() if op.name == "varlen_attention"]
    ops = choose(Site(CPU, text=text, interprets=True), ops=[op])
    return replace(
        references(ops.site),
        functions={**references(ops.site).functions, **ops.functions},
        chosen={**references(ops.site).chosen, **ops.chosen},
    )


@pytest.mark.parametrize("window", [None, 4])
@pytest.mark.parametrize("num_kv_heads", [1, 2, 4])
@pytest.mark.parametrize("function", [of_2_11, of_2_12])
@torch.inference_mode()
def test_prompts_and_decodes_of_a_step_agree_with_the_plain_form(
    function: Any, num_kv_heads: int, window: int | None, monkeypatch: pytest.MonkeyPatch
):
    ops = find(function, monkeypatch, num_kv_heads)
    assert ops.uses("varlen_attention")
    text = make_text_config(num_kv_heads=num_kv_heads)
    rotary = RotaryTable(text, 64, torch.float32, CPU)
    for shares in ([(9, 0), (4, 0)], [(1, 9), (1, 2), (7, 0), (6, 5), (2, 12)], [(1, 3)]):
        plan = plan_attention(make_spans(shares), BLOCK_SIZE, torch.float32, CPU)
        num_tokens = sum(num_new for num_new, _ in shares)
        qkv = torch.randn(num_tokens, 4 + 2 * num_kv_heads, 8)
        query, key, value = qkv.split([4, num_kv_heads, num_kv_heads], dim=1)
        positions = torch.cat([torch.arange(s.num_computed, s.num_context) for s in plan.spans])
        query, key = (rotate(x, *rotary.at(positions)) for x in (query, key))
        pool = make_pool(num_kv_heads=num_kv_heads)
        expected = paged_attention_by_sequence(pool, plan, 1, query, key, value)
        if window is not None:
            windows = Windows(plan, BLOCK_SIZE)
            expected = windows.attend(pool, 1, window, query, key, value)
        for each in (ops, ops.without("varlen_attention")):
            found = StepAttention(each, pool, plan, rotary, positions)(
                1, qkv.flatten(1), Heads(window=window)
            )
            assert_close(found, expected)


@pytest.mark.parametrize(
    ("function", "complaint"),
    [
        (aligned_to_the_left, "off by"),
        (None, "ImportError"),
        (lambda query, key, value: query, "TypeError"),
    ],
    ids=["wrong", "missing", "another interface"],
)
def test_what_is_wrong_or_missing_is_not_used(
    function: Any, complaint: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    assert not find(function, monkeypatch).uses("varlen_attention")
    assert complaint in caplog.text
