"""The C++ kernels for linear layers equal their reference implementations, with any fused operation."""

from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from engines.torch_backend.layers import linear as module
from engines.torch_backend.layers.linear import METHODS, Linear, empty_linear
from engines.torch_backend.layers.linear_group import LinearGroup, Stream
from engines.torch_backend.layers.norm import RMSNorm
from engines.torch_backend.ops import native
from engines.torch_backend.ops.cpu_level import CpuLevel
from engines.torch_backend.ops.linear.cpu import pack
from engines.torch_backend.ops.linear.reference import Prologue, ReferenceKernel
from engines.torch_backend.ops.registry import CpuKernels, Ops, choose
from tests.cpu_levels import COMPILED, ops_of

FORMS = ["float32", "bfloat16", "float16", *METHODS, "int4 of bfloat16"]
SHAPES = [(96, 128), (33, 64), (64, 96), (5, 640)]
TOKENS = [1, 2, 3, 4, 5, 11, 100]


@pytest.fixture(params=["fast", "exact"])
def mode(request: pytest.FixtureRequest) -> CpuKernels:
    return request.param


def make_numbers(rows: int, columns: int, seed: int = 0) -> Tensor:
    return torch.randn(rows, columns, generator=torch.Generator().manual_seed(seed))


def make_linear(form: str, shape: tuple[int, int], *, bias: bool = True, seed: int = 0) -> Linear:
    linear = Linear(shape[1], shape[0], bias=bias).requires_grad_(False)
    linear.weight.copy_(make_numbers(*shape, seed))
    if form in ("float32", "bfloat16", "float16"):
        linear.weight = nn.Parameter(linear.weight.to(getattr(torch, form)), requires_grad=False)
        return linear
    name, _, of = form.partition(" of ")
    dtype = getattr(torch, of or "float32")
    scheme = METHODS[name]
    linear.quantize(scheme, dtype)
    pack(linear)
    return linear


def weight_of(linear: nn.Module) -> Tensor:
    weight = linear.weight
    assert isinstance(weight, Tensor)
    return weight.float()


def meant(linear: nn.Module, x: Tensor) -> Tensor:
    return F.linear(x, weight_of(linear), linear.bias)


def make_map(
    ops: Ops,
    parts: Sequence[nn.Module],
    before: Prologue = Prologue(),
    dtype: torch.dtype = torch.float32,
) -> LinearGroup:
    """Returns a bound group of the layers."""
    group = LinearGroup(*parts, before=before)
    group.bind(ops, dtype)
    return group


def tolerance(form: str, ops: Ops) -> float:
    if form.startswith("int"):
        return {8: 1.5e-2, 16: 5e-5}[ops.site.bits]
    return 2e-6


def assert_near(found: Tensor, expected: Tensor, limit: float) -> None:
    assert found.shape == expected.shape
    assert (found - expected).norm() <= limit * expected.norm()


def with_level(ops: Ops, **changes: int) -> Ops:
    site = replace(ops.site, level=replace(ops.site.level, **changes))
    names = ("linear_float", "linear_int8", "linear_int4")
    built = {name: ops.registered[name].candidates[0].build(site) for name in names}
    return replace(ops, functions={**ops.functions, **built})


def forbid(*_: object) -> Tensor:
    pytest.fail("somebody else computed it")


@torch.inference_mode()
def test_a_kernel_reads_a_product_of_torch(ops: Ops):
    """torch's product is in the precision of the engine."""
    ops = with_level(ops, max_float_tokens=4, max_rounded_tokens=4)
    first, second = make_linear("bfloat16", (64, 96)), make_linear("int8", (33, 64))
    widen, narrow = (make_map(ops, [each], dtype=torch.bfloat16) for each in (first, second))
    x = make_numbers(5, 96)
    expected = meant(second, meant(first, x.bfloat16().float()))
    assert_near(narrow(widen(x)).float(), expected, 3e-2)


@pytest.mark.parametrize("form", FORMS)
def test_a_linear_kernel_equals_its_reference(ops: Ops, form: str, monkeypatch: pytest.MonkeyPatch):
    """Includes more tokens than the level passes to the kernel, and float weights of any width."""
    monkeypatch.setattr(ReferenceKernel, "__call__", forbid)
    for shape in SHAPES + ([] if form.startswith("int") else [(19, 7), (19, 100), (19, 3101)]):
        linear = make_linear(form, shape)
        fused = make_map(with_level(ops, max_float_tokens=1 << 30), [linear])
        for num_tokens in TOKENS:
            x = make_numbers(num_tokens, shape[1], seed=1)
            assert_near(fused(x), meant(linear, x), tolerance(form, ops))


@pytest.mark.parametrize("form", FORMS)
def test_products_of_infinite_activations_are_not_finite(ops: Ops, form: str):
    """The results of other tokens are unchanged."""
    linear = make_linear(form, (96, 640))
    fused = make_map(ops, [linear])
    expected = fused(make_numbers(5, 640, seed=1))
    for value in (torch.nan, torch.inf, -torch.inf):
        x = make_numbers(5, 640, seed=1)
        x[2, 639] = x[3, 0] = value
        found = fused(x)
        assert torch.equal(found[[0, 1, 4]], expected[[0, 1, 4]])
        assert not found[2:4].isfinite().any()


@pytest.mark.parametrize("form", FORMS)
def test_a_token_has_the_same_product_in_any_batch(ops: Ops, form: str):
    """Bit by bit for integers, because answers must not depend on other requests in the step."""
    fused = make_map(ops, [make_linear(form, (96, 128))])
    x = make_numbers(11, 128, seed=1)
    alone = torch.cat([fused(row) for row in x.split(1)])
    assert_near(alone, fused(x), 0.0 if form.startswith("int") else 1e-6)


@pytest.mark.parametrize("shape", [(96, 128), (33, 100), (3, 2100)])
def test_only_a_bfloat16_engine_rounds_activations(
    ops: Ops, shape: tuple[int, int], monkeypatch: pytest.MonkeyPatch
):
    """Widths that are not a multiple of a vector or need several passes; a token has the same result in any batch."""
    linear, rounding = make_linear("bfloat16", shape), with_level(ops, max_rounded_tokens=1 << 30)
    fused = make_map(rounding, [linear], dtype=torch.bfloat16)
    x = make_numbers(5, shape[1], seed=1)
    assert_near(make_map(rounding, [linear])(x), meant(linear, x), 2e-6)
    monkeypatch.setattr(ReferenceKernel, "__call__", forbid)
    x = make_numbers(53, shape[1], seed=1)
    alone = torch.cat([fused(row) for row in x.split(1)])
    assert_near(alone, meant(linear, x.bfloat16().float()), 2e-6)
    for count in (2, 3, 7, 16, 53):
        assert_near(alone[:count], fused(x[:count]), 0.0)


@pytest.mark.parametrize("form", ["float32", "bfloat16", *METHODS])
def test_many_tokens_go_to_torch(ops: Ops, form: str, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(module, "STRIP_WEIGHTS", 640)
    linear, is_integer = make_linear(form, (33, 64)), form in METHODS
    norm = RMSNorm(64, 1e-5).requires_grad_(False)
    ops = replace(ops, site=replace(ops.site, cpu_kernels="fast"))
    ops = with_level(ops, max_float_tokens=4, max_integer_tokens=4)
    dtype = torch.bfloat16 if is_integer else torch.float32
    fused = make_map(ops, [linear], Prologue(norm=norm), dtype)
    monkeypatch.setattr(type(fused.kernel), "__call__", forbid)
    x, before = make_numbers(5, 64, seed=1), make_numbers(5, 33, seed=2)
    expected = before + meant(linear, norm(x))
    stream = Stream(before.clone(), is_own=True)

    fused(x, add_to=stream)

    assert_near(stream.tensor(), expected, 1e-2 if is_integer else 2e-6)


@pytest.mark.parametrize("form", ["float32", "bfloat16", "float16", "int8"])
def test_results_can_exceed_the_range_of_float16(ops: Ops, form: str):
    """In a float16 engine, weights and activations fit into float16, but sums of their products do not."""
    linear = make_linear(form, (33, 64))
    if not form.startswith("int"):
        linear.bias = nn.Parameter(linear.bias.half(), requires_grad=False)
    for max_tokens in (0, 4, 1 << 30):
        fused = make_map(
            with_level(ops, max_float_tokens=max_tokens), [linear], dtype=torch.float16
        )
        for num_tokens in (1, 4, 5, 100):
            x = 20_000 * make_numbers(num_tokens, 64, seed=1).half().float()
            expected = F.linear(x, weight_of(linear), linear.bias.float())
            assert expected.abs().max() > torch.finfo(torch.float16).max
            assert_near(fused(x), expected, tolerance(form, ops))


def test_layers_of_different_formats_are_computed_by_torch(ops: Ops):
    parts = [make_linear("int8", (48, 64)), make_linear("float32", (16, 64))]
    x = make_numbers(3, 64, seed=1)
    expected = torch.cat([meant(part, x) for part in parts], dim=1)

    assert_near(make_map(ops, parts)(x), expected, 2e-6)


@pytest.mark.parametrize("form", METHODS)
def test_packing_keeps_the_dequantized_values(form: str):
    weight = make_numbers(33, 96)
    packed = make_linear(form, (33, 96))
    plain = empty_linear(96, 33)
    plain.weight = nn.Parameter(weight, requires_grad=False)
    plain.quantize(METHODS[form], torch.float32)

    torch.testing.assert_close(packed.weight, plain.weight)
    found = packed.method.apply(packed, torch.eye(96, dtype=torch.bfloat16)) - packed.bias
    torch.testing.assert_close(found.t(), plain.weight, atol=0.05, rtol=0.01)


def test_kernels_with_wrong_results_are_not_used(ops: Ops, monkeypatch: pytest.MonkeyPatch):
    chain = ops.registered["decoder_chain"]
    assert not chain.complaint(chain.candidates[0], ops.site)
    library = native.load(ops.site.level)
    monkeypatch.setattr(library, "layers", lambda *_: None)
    assert chain.complaint(chain.candidates[0], ops.site)
    for name in ("linear", "attention", "dense_attention", "dequantize"):
        monkeypatch.setattr(library, name, lambda *_: None)
    assert not choose(ops.site).is_native


@pytest.mark.parametrize("level", COMPILED, ids=lambda level: level.name)
def test_all_kernels_are_used_on_this_machine(level: CpuLevel, mode: CpuKernels):
    """Skipped for a level that this machine cannot run; only this test reports such a level."""
    ops = ops_of(mode, level)

    assert native.load(level).file.name.startswith(level.name)
    assert {name for name in ops.chosen if ops.uses(name, "cpu")} == {
        op.name for op in ops.registered.values() if any(c.name == "cpu" for c in op.candidates)
    }
