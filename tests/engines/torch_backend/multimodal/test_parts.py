"""Computation in parts: equal results, other torch work between the parts, and a clean end after any part."""

import threading
import time
from collections.abc import Callable, Generator
from itertools import count
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode

from engines.torch_backend.layers.linear import Linear
from engines.torch_backend.layers.linear_group import LinearGroup
from engines.torch_backend.multimodal import parts
from engines.torch_backend.multimodal.parts import in_parts


def numbers(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape)))


def attend(*shape: int, **options: Any) -> Tensor:
    x = numbers(*shape)
    return F.scaled_dot_product_attention(x, x, x, **options)


OPERATIONS: dict[str, Callable[[], Tensor]] = {
    "linear": lambda: F.linear(numbers(1, 50, 8), numbers(6, 8), numbers(6)),
    "linear by name": lambda: F.linear(numbers(50, 8), weight=numbers(6, 8)),
    "convolution of patches": lambda: F.conv3d(numbers(40, 3, 2, 4, 4), numbers(5, 3, 2, 4, 4)),
    "convolution of an image": lambda: F.conv2d(
        numbers(1, 3, 28, 28), numbers(8, 3, 7, 7), numbers(8), stride=7
    ),
    "convolution of sound": lambda: F.conv1d(
        numbers(1, 4, 40), numbers(8, 4, 3), numbers(8), stride=2, padding=1
    ),
    "padded convolution": lambda: F.conv2d(
        numbers(2, 4, 16, 16), numbers(8, 4, 3, 3), None, (2, 2), (1, 1)
    ),
    "convolution in groups": lambda: F.conv2d(numbers(1, 4, 9, 9), numbers(4, 1, 3, 3), groups=4),
    "attention": lambda: attend(2, 3, 20, 8, scale=0.3),
    "attention with a mask": lambda: attend(2, 3, 20, 8, attn_mask=numbers(2, 1, 20, 20)),
    "causal attention": lambda: attend(1, 2, 20, 8, is_causal=True),
    "matrices": lambda: numbers(2, 3, 20, 8) @ numbers(2, 3, 8, 20),
    "rows by a matrix": lambda: torch.matmul(numbers(2, 20, 8), numbers(8, 20)),
    "broadcast matrices": lambda: numbers(1, 3, 20, 8) @ numbers(2, 1, 8, 20),
    "norm": lambda: F.layer_norm(numbers(1, 40, 8), (8,), numbers(8)),
    "elementwise": lambda: F.gelu(numbers(1, 90, 8), approximate="tanh") * numbers(90, 1) + 1.0,
    "broadcast to the left": lambda: numbers(8) + numbers(30, 8),
    "a result that is given": lambda: torch.add(numbers(40, 8), 1.0, out=torch.empty(40, 8)),
    "vmap": lambda: torch.vmap(lambda row: (row * 2).sum())(numbers(6, 8)) + numbers(6),
    "a module of the model": lambda: nn.Sequential(nn.Linear(8, 8), nn.GELU(), nn.LayerNorm(8))(
        numbers(1, 40, 8)
    ).detach(),
}


@pytest.fixture
def smallest(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parts, "PIECE_FLOPS_PER_THREAD", 1)
    monkeypatch.setattr(parts, "PART_S", 0.0)


def run(generator: Generator[None, None, Any]) -> tuple[int, Any]:
    """Returns the number of parts and the result; uses torch between the parts."""
    num_parts = 0
    while True:
        try:
            next(generator)
        except StopIteration as stop:
            return num_parts, stop.value
        num_parts += 1
        assert torch.ones(3, 3).matmul(torch.ones(3)).tolist() == [3, 3, 3]
        assert torch.rand(3, generator=torch.Generator()).max() <= 1  # vmap would refuse this


@pytest.mark.parametrize("name", OPERATIONS)
@torch.inference_mode()
def test_an_operation_in_pieces_has_the_same_result(name: str, smallest: None):
    torch.manual_seed(0)
    expected = OPERATIONS[name]()
    torch.manual_seed(0)

    num_parts, found = run(in_parts(OPERATIONS[name]))

    assert num_parts > 1
    assert (found.shape, found.dtype) == (expected.shape, expected.dtype)
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)


@torch.inference_mode()
def test_a_layer_with_a_kernel_is_split_into_rows(smallest: None):
    layer, x = Linear(8, 6), numbers(40, 8)
    expected = layer(x)
    layer.group = LinearGroup(layer)

    num_parts, found = run(in_parts(lambda: layer(x)))

    assert num_parts >= 40 // torch.get_num_threads()
    torch.testing.assert_close(found, expected)


class CountedProducts(TorchDispatchMode):
    num_products = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.num_products += func is torch.ops.aten.linear.default
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize(("num_parts_per_call", "num_products"), [(10.0, 20), (0.001, 11)])
def test_pieces_are_as_large_as_their_speed_allows(
    num_parts_per_call: float, num_products: int, monkeypatch: pytest.MonkeyPatch
):
    ticks = count(0.0, num_parts_per_call * parts.PART_S)
    monkeypatch.setattr(parts, "time", SimpleNamespace(perf_counter=lambda: next(ticks)))
    monkeypatch.setattr(torch, "get_num_threads", lambda: 1)
    monkeypatch.setattr(parts, "PIECE_FLOPS_PER_THREAD", 4 * 2 * 8 * 8)  # four rows
    with torch.inference_mode(), CountedProducts() as counted:
        run(in_parts(lambda: [F.linear(numbers(40, 8), numbers(8, 8)) for _ in range(2)]))
    assert counted.num_products == num_products


def test_a_part_of_a_long_computation_ends_soon():
    """Tokens of other requests wait for the end of each part."""

    def compute() -> None:
        until = time.thread_time() + 0.5
        while time.thread_time() < until:
            F.linear(numbers(64, 64), numbers(64, 64))

    assert run(in_parts(compute))[0] > 20


def test_an_error_ends_the_computation(smallest: None):
    def fail() -> None:
        torch.ones(3).add(1)
        raise ValueError("no image")

    with pytest.raises(ValueError, match="no image"):
        run(in_parts(fail))
    assert run(in_parts(lambda: float(torch.ones(2).sum())))[1] == 2


@pytest.mark.parametrize("is_closed", [True, False], ids=["closed", "collected by another thread"])
def test_an_abandoned_computation_ends_after_its_part(smallest: None, is_closed: bool):
    ended: list[int] = []

    def compute() -> None:
        try:
            for _ in range(10):
                torch.ones(3).add(1)
            ended.append(0)
        finally:
            ended.append(threading.get_ident())

    generators = [in_parts(compute)]
    for _ in range(3):
        next(generators[0])
    if is_closed:
        generators[0].close()
        assert ended
    thread = threading.Thread(target=generators.clear)
    thread.start()
    thread.join()

    assert run(in_parts(lambda: float(torch.ones(2).sum())))[1] == 2
    assert ended == [threading.get_ident()]


def test_closing_before_the_first_part_computes_nothing():
    generator = in_parts(lambda: pytest.fail("it was computed"))
    next(generator)
    generator.close()


def test_two_computations_are_independent(smallest: None):
    first, second = (
        in_parts(lambda x=x: (torch.full((4, 4), x) @ torch.ones(4, 4)).sum()) for x in (1.0, 2.0)
    )
    next(first)
    next(second)
    next(first)
    assert run(second)[1] == 128
    assert run(first)[1] == 64
