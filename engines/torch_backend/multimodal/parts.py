"""Run an image encoder as a generator, so that engine steps run between parts of bounded work.

The encoder's own forward pass runs in a greenlet of the engine's thread. A torch function mode sees each of its
operations, splits large ones into pieces, and returns control when a part has taken long enough.
"""

import time
from collections.abc import Callable, Generator, Mapping
from dataclasses import dataclass
from functools import partial
from itertools import cycle
from math import prod
from typing import Any, TypeVar

import greenlet
import torch
from torch import Tensor
from torch._C._functorch import peek_interpreter_stack
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from engines.torch_backend.layers.linear_group import LinearGroup

#: Floating-point operations per thread in the first and smallest pieces, enough for an efficient matrix product.
PIECE_FLOPS_PER_THREAD = 500_000_000
#: Elementwise operations are limited by memory, so each element counts as this many floating-point operations.
_FLOPS_PER_ELEMENT = 500
#: A part ends with the first piece after this time. A piece takes at most twice as long, unless it has minimum size.
PART_S = 0.005

T = TypeVar("T")
_Arguments = Any  #: positional arguments of an operation


def in_parts(compute: Callable[[], T]) -> Generator[None, None, T]:
    """Call `compute`, yielding before each part. Closing the generator cancels the call."""
    mode = _Parts()

    def run() -> T:
        with mode:
            return compute()

    # Only the generator references the greenlet, so the call ends when the generator is deleted, in any thread.
    call = greenlet.greenlet(run)
    while True:
        yield
        call.parent = greenlet.getcurrent()
        mode.began_at = time.perf_counter()
        result = call.switch()
        if call.dead:
            return result


@dataclass(frozen=True, slots=True)
class _Cut:
    """How an operation is split along one dimension. Dimensions are counted from the end."""

    narrowed: Mapping[Any, int]  #: dimension to split, by the argument's index or name
    out_dim: int
    length: int
    flops: int  #: of the complete operation


class _Parts(TorchFunctionMode):
    """Splits operations, and returns control between parts. While other code has control, the mode is off."""

    def __init__(self) -> None:
        super().__init__()
        self.began_at = 0.0  #: start of the current part
        self._smallest_piece = PIECE_FLOPS_PER_THREAD * torch.get_num_threads()
        self._flops_per_s: dict[Any, float] = {}  # speed of the last pieces, by `find_cut`

    def __torch_function__(
        self, func: Any, types: Any, args: _Arguments = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        find_cut = _CUTS.get(func)
        if isinstance(getattr(func, "__self__", None), LinearGroup):
            find_cut = _cut_group
        cut = find_cut(func, args, kwargs) if find_cut and "out" not in kwargs else None
        speed = self._flops_per_s.get(find_cut, 0.0)
        most = max(self._smallest_piece, int(speed * 2 * PART_S))
        if cut is None or cut.flops <= most:
            started_at = time.perf_counter()
            result = func(*args, **kwargs)
            ended_at = time.perf_counter()
            if cut is not None and 2 * cut.flops > self._smallest_piece:
                self._flops_per_s[find_cut] = cut.flops / max(ended_at - started_at, 1e-6)
            # Do not switch inside vmap, which builds masks: torch would vectorize the other code too.
            if ended_at - self.began_at >= PART_S and peek_interpreter_stack() is None:
                parent = greenlet.getcurrent().parent
                assert parent is not None
                parent.switch()
            return result
        num_pieces = -(-cut.flops // most)
        return self._in_pieces(func, args, kwargs, cut, -(-cut.length // num_pieces))

    def _in_pieces(
        self, func: Any, args: _Arguments, kwargs: dict[str, Any], cut: _Cut, size: int
    ) -> Tensor:
        out = torch.empty(0)
        for start in range(0, cut.length, size):
            count = min(size, cut.length - start)
            narrow = partial(_narrow, cut=cut, start=start, count=count)
            given = tuple(narrow(place, arg) for place, arg in enumerate(args))
            named = {name: narrow(name, arg) for name, arg in kwargs.items()}
            piece = self.__torch_function__(func, (), given, named)
            if start == 0:
                shape = list(piece.shape)
                shape[cut.out_dim] = cut.length
                out = piece.new_empty(shape)
            out.narrow(cut.out_dim, start, count).copy_(piece)
        return out


def _narrow(key: int | str, argument: Any, cut: _Cut, start: int, count: int) -> Any:
    return argument.narrow(cut.narrowed[key], start, count) if key in cut.narrowed else argument


def _first_dim(x: Tensor, num_dims: int) -> int | None:
    """The first of the leading `num_dims` dimensions that is longer than 1, as a negative index."""
    return next((d - x.ndim for d in range(num_dims) if x.shape[d] > 1), None)


def _cut_rows(x: Tensor, flops: int, num_inner: int = 1) -> _Cut | None:
    """An operation on rows; the last `num_inner` dimensions belong to a row."""
    dim = _first_dim(x, x.ndim - num_inner)
    return None if dim is None else _Cut({0: dim}, dim, x.shape[dim], flops)


def _cut_linear(func: Any, args: _Arguments, kwargs: dict[str, Any]) -> _Cut | None:
    x, weight = args[0], args[1] if len(args) > 1 else kwargs["weight"]
    return _cut_rows(x, 2 * x.numel() * weight.shape[0])


def _cut_group(func: Any, args: _Arguments, kwargs: dict[str, Any]) -> _Cut | None:
    """Linear layers that a kernel computes."""
    num_outputs = sum(layer.out_features for layer in func.__self__.layers)
    return _cut_rows(args[0], 2 * args[0].numel() * num_outputs)


def _cut_norm(func: Any, args: _Arguments, kwargs: dict[str, Any]) -> _Cut | None:
    shape = args[1] if len(args) > 1 else kwargs["normalized_shape"]
    return _cut_rows(args[0], _FLOPS_PER_ELEMENT * args[0].numel(), len(shape))


def _cut_elementwise(func: Any, args: _Arguments, kwargs: dict[str, Any]) -> _Cut | None:
    x, other = args[0], args[1] if len(args) > 1 else None
    if not isinstance(x, Tensor) or (dim := _first_dim(x, x.ndim)) is None:
        return None
    narrowed: dict[Any, int] = {0: dim}
    if isinstance(other, Tensor):
        # not by torch.broadcast_shapes, which imports sympy
        pairs = zip(other.shape[::-1], x.shape[::-1], strict=False)
        if other.ndim > x.ndim or any(count not in (1, length) for count, length in pairs):
            return None
        if other.ndim >= -dim and other.shape[dim] > 1:
            narrowed[1] = dim
    return _Cut(narrowed, dim, x.shape[dim], _FLOPS_PER_ELEMENT * x.numel())


def _cut_matmul(func: Any, args: _Arguments, kwargs: dict[str, Any]) -> _Cut | None:
    if len(args) < 2 or min(args[0].ndim, args[1].ndim) < 2:
        return None
    left, right = args[:2]
    if right.ndim == 2:
        return _cut_rows(left, 2 * left.numel() * right.shape[1])
    if left.shape[:-2] != right.shape[:-2] or (dim := _first_dim(left, left.ndim - 1)) is None:
        return None
    narrowed = {0: dim} if dim == -2 else {0: dim, 1: dim}
    return _Cut(narrowed, dim, left.shape[dim], 2 * left.numel() * right.shape[-1])


def _cut_convolution(func: Any, args: _Arguments, kwargs: dict[str, Any]) -> _Cut | None:
    """Split by images, or by channels of one image."""
    x, weight = args[:2]
    spatial = weight.ndim - 2
    if x.ndim != weight.ndim or x.shape[1] != weight.shape[1]:  # no batch, or grouped channels
        return None
    stride = args[3] if len(args) > 3 else kwargs.get("stride", 1)
    steps = cycle((stride,) if isinstance(stride, int) else stride)
    # approximate number of output positions of one image
    made = prod(max(1, n // step) for n, step in zip(x.shape[2:], steps, strict=False))
    flops = 2 * x.shape[0] * made * weight.numel()
    if x.shape[0] > 1:
        return _Cut({0: -x.ndim}, -x.ndim, x.shape[0], flops)
    if weight.shape[0] == 1:
        return None
    narrowed = {1: -weight.ndim} | ({2: -1} if len(args) > 2 and args[2] is not None else {})
    return _Cut(narrowed, -spatial - 1, weight.shape[0], flops)


def _cut_attention(func: Any, args: _Arguments, kwargs: dict[str, Any]) -> _Cut | None:
    """Split by images, then heads, then queries."""
    if len(args) != 3 or args[0].ndim != 4 or kwargs.get("is_causal") or kwargs.get("enable_gqa"):
        return None
    query, key, _ = args
    if query.shape[:2] != key.shape[:2] or (dim := _first_dim(query, 3)) is None:
        return None
    narrowed: dict[Any, int] = {0: dim} if dim == -2 else {0: dim, 1: dim, 2: dim}
    mask = kwargs.get("attn_mask")
    if mask is not None and mask.ndim >= -dim and mask.shape[dim] > 1:
        narrowed["attn_mask"] = dim
    return _Cut(narrowed, dim, query.shape[dim], 4 * query.numel() * key.shape[2])


_CUTS: dict[Any, Callable[[Any, _Arguments, dict[str, Any]], _Cut | None]] = {
    F.linear: _cut_linear,
    F.layer_norm: _cut_norm,
    F.rms_norm: _cut_norm,
    F.scaled_dot_product_attention: _cut_attention,
    **dict.fromkeys((F.conv1d, F.conv2d, F.conv3d), _cut_convolution),
    **dict.fromkeys((torch.matmul, torch.bmm, Tensor.matmul, Tensor.bmm), _cut_matmul),
    **dict.fromkeys((F.gelu, F.silu, F.relu, torch.sigmoid, Tensor.sigmoid), _cut_elementwise),
    **dict.fromkeys((torch.add, torch.mul, Tensor.add, Tensor.mul), _cut_elementwise),
}
