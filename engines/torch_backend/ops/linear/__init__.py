"""Matrix products of linear layers with float, int8 and int4 weights."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from engines.torch_backend.layers.linear import (
    INT4,
    INT8,
    Linear,
    apply,
    choose_group_size,
    empty_linear,
)
from engines.torch_backend.layers.norm import RMSNorm
from engines.torch_backend.ops import native
from engines.torch_backend.ops.linear.cpu import PackedMethod, build
from engines.torch_backend.ops.linear.joined import JOINED, Multiply, bind_joined
from engines.torch_backend.ops.linear.reference import (
    Bind,
    LinearKernel,
    Prologue,
    ReferenceKernel,
    bind,
)
from engines.torch_backend.ops.native.library import FLOAT_KINDS
from engines.torch_backend.ops.registry import Candidate, Op, Site
from engines.torch_backend.ops.triton_kernel import triton_candidate

#: Creates a layer of shape (outputs, inputs) for an example.
Make = Callable[[Site, tuple[int, int]], Linear]


def make_float(site: Site, shape: tuple[int, int]) -> Linear:
    layer = empty_linear(shape[1], shape[0])
    weight = site.numbers(*shape).to(site.stored or site.dtype)
    layer.weight = nn.Parameter(weight, requires_grad=False)
    return layer


def _make_int8(site: Site, shape: tuple[int, int]) -> Linear:
    layer = empty_linear(shape[1], shape[0])
    integers = (site.numbers(*shape).float() * 127).to(torch.int8)
    scale = site.numbers(shape[0], seed=3) / 127  # weights of at most 1, so products fit float16
    layer.hold(INT8, {"integers": integers, "scale": scale})
    return layer


def _make_int4(site: Site, shape: tuple[int, int], is_narrow: bool) -> Linear:
    """`is_narrow`: whether bfloat16 represents the scales exactly."""
    layer = empty_linear(shape[1], shape[0])
    size = choose_group_size(shape[1]) or shape[1]
    pairs = (site.numbers(shape[0], shape[1] // 2).float().abs() * 255).to(torch.uint8)
    scale_zero = site.numbers(shape[1] // size, shape[0], 2, seed=3)
    if is_narrow:
        scale_zero = scale_zero.bfloat16().to(site.dtype)
    layer.hold(INT4, {"pairs": pairs, "scale_zero": scale_zero}, size)
    return layer


def _example(makes: Sequence[Make], bind: Bind, site: Site) -> list[Tensor]:
    return [y for make in makes for y in _products(bind, site, make)]


def _products(bind: Bind, site: Site, make: Make) -> list[Tensor]:
    """Products of one layer; then, for each prologue, products of two joined layers, added to a tensor."""
    stream = site.dtype if site.cpu_kernels == "off" else torch.float32

    def numbers(*shape: int, seed: int) -> Tensor:
        return site.numbers(*shape, seed=seed).to(stream)

    def kernel(layers: list[Linear], prologue: Prologue) -> LinearKernel:
        return bind(layers, prologue, site.dtype) or ReferenceKernel(layers, site.dtype)

    width = 3 * site.text.hidden_size  # several blocks of inputs, and an incomplete one
    layer = make(site, (50, width))
    alone = kernel([layer], Prologue())
    found = [alone(numbers(rows, width, seed=rows)) for rows in (1, 3, 6, 64)]
    if site.cpu_kernels == "fast":  # steps of many tokens call `apply`
        x = numbers(64, width, seed=64)
        is_packed = isinstance(layer.method, PackedMethod)
        found.append(apply(layer, x.bfloat16() if is_packed else x))
    norm = RMSNorm(width, 1e-5).to(site.device, stream).requires_grad_(False)
    norm.weight.copy_(site.numbers(width, seed=5))
    for prologue in (Prologue(norm=norm), Prologue(gate=F.silu)):
        pair = kernel([make(site, (48, width)), make(site, (17, width))], prologue)
        x = 3 * numbers(5, width * (2 if prologue.gate else 1), seed=1)
        x = x if pair.fuses_prologue else prologue(x)
        added = numbers(5, 65, seed=4)
        found.append(pair(x, added) if pair.adds else added.add_(pair(x)))
    return found


def _float_variants(site: Site) -> list[Site]:
    """Sites with every dtype of stored weights, and one with a bfloat16 engine if kernels round to bfloat16."""
    stored = [replace(site, stored=dtype) for dtype in FLOAT_KINDS]
    is_rounded = site.level.max_rounded_tokens > 0
    return [*stored, replace(site, dtype=torch.bfloat16)] if is_rounded else stored


def _integer_op(name: str, multiply: Callable[..., Multiply], *makes: Make) -> Op:
    """An operator for integer weights. `multiply` adapts Triton's kernel to joined layers."""
    candidates: tuple[Candidate, ...] = (
        Candidate("cpu", build, native.lacks, lambda site: {8: 2e-2, 16: 1e-4}[site.bits]),
        replace(
            triton_candidate(
                "linear", name.replace("linear", "multiply"), lambda f: bind_joined(multiply(f))
            ),
            # float32 sums of thousands of products depend on their order
            tolerance=lambda site: max(1e-5, site.tolerance),
        ),
        JOINED,
    )
    return Op(name, bind, candidates, partial(_example, makes))


_NATIVE_FLOAT = Candidate(
    "cpu",
    build,
    native.lacks,
    # in bfloat16 the reference rounds its result
    lambda site: 1e-5 if site.dtype is torch.float32 else 2**-7,
    _float_variants,
)
OPS = (
    Op("linear_float", bind, (_NATIVE_FLOAT, JOINED), partial(_example, (make_float,))),
    _integer_op(
        "linear_int8", lambda f: lambda x, layer: f(x, layer.integers, layer.scale), _make_int8
    ),
    _integer_op(
        "linear_int4",
        lambda f: lambda x, layer: f(x, layer.pairs, layer.scale_zero),
        lambda site, shape: _make_int4(site, shape, is_narrow=False),
        lambda site, shape: _make_int4(site, shape, is_narrow=True),
    ),
)
