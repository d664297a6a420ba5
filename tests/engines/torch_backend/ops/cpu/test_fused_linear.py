"""Products by C++ kernels equal those of their reference implementations, whatever is before and after them."""

from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from engines.torch_backend.layers.activation import quick_gelu
from engines.torch_backend.layers.quantization import SCHEMES
from engines.torch_backend.layers.quantized_linear import QuantizedLinear
from engines.torch_backend.models.llama import RMSNorm
from engines.torch_backend.ops.cpu import fused_linear as module
from engines.torch_backend.ops.cpu.fused_linear import FusedLinear
from engines.torch_backend.ops.cpu.kernels import CpuKernels, Mode
from engines.torch_backend.ops.cpu.library import Kind, Library
from engines.torch_backend.ops.cpu.packed_linear import PackedLinear
from engines.torch_backend.ops.cpu.probe import attention_is_right, right_kinds
from engines.torch_backend.ops.cpu_level import CpuLevel
from tests.cpu_levels import COMPILED, kernels_of

FORMS = ["float32", "bfloat16", "float16", *SCHEMES, "int4 of bfloat16"]
SHAPES = [(96, 128), (33, 64), (64, 96), (5, 640)]
TOKENS = [1, 2, 3, 4, 5, 11, 100]


def make_numbers(rows: int, columns: int, seed: int = 0) -> Tensor:
    return torch.randn(rows, columns, generator=torch.Generator().manual_seed(seed))


def make_linear(
    form: str, shape: tuple[int, int], *, bias: bool = True, seed: int = 0
) -> nn.Module:
    """As a loaded model holds it."""
    linear = nn.Linear(shape[1], shape[0], bias=bias).requires_grad_(False)
    linear.weight.copy_(make_numbers(*shape, seed))
    if form in ("float32", "bfloat16", "float16"):
        linear.weight = nn.Parameter(linear.weight.to(getattr(torch, form)), requires_grad=False)
        return linear
    name, _, of = form.partition(" of ")
    dtype = getattr(torch, of or "float32")
    scheme = SCHEMES[name]
    quantized = scheme._create_linear(shape, linear.bias, dtype)
    assert isinstance(quantized, QuantizedLinear)
    quantized.load_state_dict(scheme.quantize(linear.weight, dtype), assign=True, strict=False)
    return PackedLinear(quantized)


def weight_of(linear: nn.Module) -> Tensor:
    weight = linear.dequantized() if isinstance(linear, PackedLinear) else linear.weight.float()
    assert isinstance(weight, Tensor)
    return weight


def meant(linear: nn.Module, x: Tensor) -> Tensor:
    return F.linear(x, weight_of(linear), linear.bias)


def tolerance(form: str, kernels: CpuKernels) -> float:
    if form.startswith("int"):
        return {8: 1.5e-2, 16: 5e-5}[kernels.bits]
    return 2e-6


def assert_near(found: Tensor, expected: Tensor, limit: float) -> None:
    assert found.shape == expected.shape
    assert (found - expected).norm() <= limit * expected.norm()


def with_max_float_tokens(kernels: CpuKernels, max_tokens: int) -> CpuKernels:
    return replace(kernels, level=replace(kernels.level, max_float_tokens=max_tokens))


def forbid_torch(*_: object) -> Tensor:
    pytest.fail("torch computed it")


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("shape", SHAPES)
def test_a_product_equals_its_twin(
    kernels: CpuKernels, form: str, shape: tuple[int, int], monkeypatch: pytest.MonkeyPatch
):
    """Also of more tokens than the level leaves to it."""
    linear = make_linear(form, shape)
    fused = FusedLinear(with_max_float_tokens(kernels, 1 << 30), [linear], torch.float32)
    monkeypatch.setattr(FusedLinear, "_by_torch", forbid_torch)
    for num_tokens in TOKENS:
        x = make_numbers(num_tokens, shape[1], seed=1)
        assert_near(fused(x), meant(linear, x), tolerance(form, kernels))


@pytest.mark.parametrize("form", FORMS)
def test_a_token_is_computed_alike_in_any_company(kernels: CpuKernels, form: str):
    """Bit by bit for integers, whose answers would otherwise depend on who else asks."""
    fused = FusedLinear(kernels, [make_linear(form, (96, 128))], torch.float32)
    x = make_numbers(11, 128, seed=1)
    alone = torch.cat([fused(row) for row in x.split(1)])
    assert_near(alone, fused(x), 0.0 if form.startswith("int") else 1e-6)


@pytest.mark.parametrize("form", FORMS)
def test_norms_come_before_and_sums_after(kernels: CpuKernels, form: str):
    parts = [make_linear(form, (48, 64), seed=1), make_linear(form, (17, 64), bias=False, seed=2)]
    norm = RMSNorm(64, 1e-5).requires_grad_(False)
    norm.weight.copy_(make_numbers(1, 64, seed=3)[0])
    fused = FusedLinear(kernels, parts, torch.float32, norm=norm)
    x, stream = make_numbers(5, 64, seed=4), make_numbers(5, 65, seed=5)
    expected = stream + torch.cat([meant(part, norm(x)) for part in parts], dim=1)

    found = fused(x, add_to=stream)

    assert found is stream
    assert_near(found, expected, tolerance(form, kernels))


@pytest.mark.parametrize("form", ["float32", "int8"])
@pytest.mark.parametrize("gate", [F.silu, quick_gelu])
def test_gates_come_before(kernels: CpuKernels, form: str, gate):
    linear = make_linear(form, (48, 64))
    x = 8 * make_numbers(5, 128, seed=1)
    expected = meant(linear, gate(x[:, :64]) * x[:, 64:])

    assert_near(
        FusedLinear(kernels, [linear], torch.float32, gate=gate)(x),
        expected,
        tolerance(form, kernels),
    )


@pytest.mark.parametrize("form", ["float32", "bfloat16"])
def test_many_tokens_go_to_torch(kernels: CpuKernels, form: str, monkeypatch: pytest.MonkeyPatch):
    kernels = with_max_float_tokens(kernels, 4)
    monkeypatch.setattr(module, "_STRIP_WEIGHTS", 640)
    linear = make_linear(form, (33, 64))
    norm = RMSNorm(64, 1e-5).requires_grad_(False)
    fused = FusedLinear(kernels, [linear], torch.float32, norm=norm)
    monkeypatch.setattr(fused, "_product", forbid_torch)
    x, stream = make_numbers(5, 64, seed=1), make_numbers(5, 33, seed=2)
    expected = stream + meant(linear, norm(x))

    assert_near(fused(x, add_to=stream), expected, 2e-6)


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("form", ["float32", "bfloat16", "float16", "int8"])
@pytest.mark.parametrize("max_tokens", [0, 4, 1 << 30])
def test_results_may_be_larger_than_float16_holds(
    kernels: CpuKernels, form: str, max_tokens: int, bias: bool
):
    """Whoever computes them, in an engine of float16: weights and activations fit it, their products' sums do not."""
    linear = make_linear(form, (33, 64), bias=bias)
    if linear.bias is not None and not form.startswith("int"):
        linear.bias = nn.Parameter(linear.bias.half(), requires_grad=False)
    fused = FusedLinear(with_max_float_tokens(kernels, max_tokens), [linear], torch.float16)
    for num_tokens in (1, 4, 5, 100):
        x = 20_000 * make_numbers(num_tokens, 64, seed=1).half().float()
        expected = F.linear(
            x, weight_of(linear), None if linear.bias is None else linear.bias.float()
        )
        assert expected.abs().max() > torch.finfo(torch.float16).max
        assert_near(fused(x), expected, tolerance(form, kernels))


def test_unlike_parts_are_computed_by_torch(kernels: CpuKernels):
    parts = [make_linear("int8", (48, 64)), make_linear("float32", (16, 64))]
    x = make_numbers(3, 64, seed=1)
    expected = torch.cat([meant(part, x) for part in parts], dim=1)

    assert_near(FusedLinear(kernels, parts, torch.float32)(x), expected, 2e-6)


@pytest.mark.parametrize("form", SCHEMES)
def test_packing_keeps_what_the_integers_stand_for(form: str):
    weight = make_numbers(33, 96)
    packed = make_linear(form, (33, 96))
    assert isinstance(packed, PackedLinear)
    scheme = SCHEMES[form]
    plain = scheme._create_linear((33, 96), None, torch.float32)
    assert isinstance(plain, QuantizedLinear)
    plain.load_state_dict(scheme.quantize(weight, torch.float32), assign=True)

    torch.testing.assert_close(packed.dequantized(), plain.dequantized())


class Idle(Library):
    """Functions that compute nothing."""

    def __init__(self) -> None:
        self.linear = lambda *_: None
        self.attention = lambda *_: None


def test_a_kernel_that_computes_something_else_is_found_out():
    assert right_kinds(Idle(), 8) == frozenset()
    assert not attention_is_right(Idle())


@pytest.mark.parametrize("level", COMPILED, ids=lambda level: level.name)
def test_all_kernels_are_right_here(level: CpuLevel, mode: Mode):
    """Skipped for a level that this machine cannot run; no other test mentions it."""
    kernels = kernels_of(mode, level)

    assert kernels.library.level == level.name
    assert kernels.kinds == set(Kind)
    assert kernels.has_attention
    assert kernels.has_full_attention
    assert kernels.has_layers
