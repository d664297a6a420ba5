"""The contract of operators: a candidate equals the reference, or it is not used and the log names the reason."""

import logging
from collections.abc import Callable
from dataclasses import replace
from typing import Literal

import pytest
import torch
from torch import Tensor

from engines.base import EngineStartError
from engines.torch_backend.ops.cpu_level import LEVELS
from engines.torch_backend.ops.registry import (
    EXAMPLE_TEXT,
    REFERENCE,
    Candidate,
    Op,
    Site,
    check_disabled,
    choose,
    cpu_ops,
    discover,
)
from engines.torch_backend.settings import TorchSettings
from tests.contract.toys import op as toy
from tests.cpu_levels import RUNNABLE
from tests.long import few
from tests.triton_device import DEVICE

OPS = [*discover(), toy.make(adding=toy.by_adding)]
PAIRS = [(op, candidate) for op in OPS for candidate in op.candidates]
CPU = torch.device("cpu")
#: Numbers of heads and widths that differ from those of the examples.
SHAPES = [(4, 4, 8, 64, 96), (6, 2, 24, 32, 160), (2, 1, 16, 96, 33)]


def make_sites(shape: tuple[int, ...], seed: int) -> list[Site]:
    """Returns all sites of this machine: each CPU level, and its GPU or the stand-in for one."""
    heads, kv_heads, head_dim, hidden, inner = shape
    text = replace(
        EXAMPLE_TEXT, num_heads=heads, num_kv_heads=kv_heads, head_dim=head_dim,
        hidden_size=hidden, intermediate_size=inner,
    )  # fmt: skip
    modes: list[Literal["fast", "exact"]] = ["fast", "exact"]
    native = [
        Site(CPU, text=text, cpu_kernels=mode, level=level, seed=seed)
        for level in RUNNABLE
        for mode in modes
    ]
    fused = [
        Site(DEVICE, dtype, text, 8, joins=True, interprets=True, seed=seed)
        for dtype in (torch.float32, torch.bfloat16)
    ]
    return native + fused


@pytest.mark.parametrize(
    ("seed", "shape"), few(enumerate(SHAPES, start=1), [(3, SHAPES[2])]), ids=str
)
@pytest.mark.parametrize(("op", "candidate"), PAIRS, ids=lambda each: each.name)
@torch.inference_mode()
def test_a_candidate_equals_the_reference(
    op: Op, candidate: Candidate, shape: tuple[int, ...], seed: int
):
    sites = [site for site in make_sites(shape, seed) if not candidate.lacks(site)]
    if not sites or (candidate.name == "triton_varlen" and DEVICE.type != "cuda"):
        pytest.skip("torch's flash attention needs a GPU" if sites else "not for this machine")
    for site in sites:
        assert op.complaint(candidate, site) == ""


@pytest.mark.parametrize(("op", "candidate"), PAIRS, ids=lambda each: each.name)
def test_an_unsupported_candidate_names_the_reason(op: Op, candidate: Candidate):
    """A bare machine lacks the requirements of the candidate, if it has any."""
    bare = Site(CPU, level=LEVELS[-1])
    assert candidate.lacks(bare) or not candidate.lacks(replace(bare, joins=True))
    assert op.complaint(candidate, bare) == candidate.lacks(bare)


def fail(x: Tensor) -> Tensor:
    raise RuntimeError("no such device function")


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        (lambda x: 2.1 * x, "differs from the reference by"),
        (lambda x: x / 0, "differs from the reference by"),
        (fail, "no such device function"),
        ("it needs another machine", "it needs another machine"),
    ],
    ids=["wrong", "not a number", "fails", "missing"],
)
def test_a_wrong_or_missing_candidate_is_replaced_by_the_next_one(
    wrong: Callable[[Tensor], Tensor] | str, words: str, caplog: pytest.LogCaptureFixture
):
    with caplog.at_level(logging.INFO):
        alone = choose(Site(CPU), ops=[toy.make(first=wrong)])
        behind = choose(Site(CPU), ops=[toy.make(first=wrong, second=toy.by_adding)])

    assert (alone.chosen["double"], behind.chosen["double"]) == (REFERENCE, "second")
    assert behind["double"] is toy.by_adding
    assert torch.equal(alone["double"](torch.ones(3)), torch.full((3,), 2.0))
    assert words in caplog.text
    assert "double.first" in caplog.text
    assert "double second" in caplog.text


@pytest.mark.parametrize(
    ("disabled", "left"), [("double", REFERENCE), ("double.first", "second"), ("first", "second")]
)
def test_disabled_candidates_are_not_tried(
    disabled: str, left: str, caplog: pytest.LogCaptureFixture
):
    calls = []

    def note(x: Tensor) -> Tensor:
        calls.append(x)
        return 2 * x

    with caplog.at_level(logging.INFO):
        ops = choose(Site(CPU), [disabled], [toy.make(first=note, second=toy.by_adding)])

    assert ops.chosen["double"] == left
    assert not calls
    assert "double.first: switched off" in caplog.text or "double.first, " in caplog.text


def test_candidates_are_disabled_by_their_names_in_the_log():
    given = {"disabled_ops": "gate, linear_int8.triton, triton, cuda_graph"}
    disabled = TorchSettings.read("torch", given).disabled_ops
    assert disabled == ("gate", "linear_int8.triton", "triton", "cuda_graph")
    check_disabled(disabled)


def test_the_error_of_an_unknown_name_lists_the_known_ones():
    with pytest.raises(EngineStartError, match=r"unknown name 'matmul'; .*linear_int8\.triton"):
        check_disabled(["matmul"])


def test_without_kernels_a_cpu_uses_the_references():
    assert not cpu_ops("fast", disabled=frozenset(["cpu"])).is_native
