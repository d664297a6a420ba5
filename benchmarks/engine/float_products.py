"""How many tokens C++ products with floating-point weights beat torch's for: `max_float_tokens` of a CPU's level.

Run as `python -m benchmarks.engine.float_products`. Both are timed in turn, over weights that no cache holds.
"""

import statistics
import time
from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import nn

from engines.torch_backend.ops.cpu_level import choose_level
from engines.torch_backend.ops.native.products import native_candidate
from engines.torch_backend.ops.products import Before, PlainProduct, Product
from engines.torch_backend.ops.registry import Site

SHAPES = [(768, 768), (3072, 768), (2048, 2048), (5632, 2048), (4096, 4096)]
TOKENS = (8, 16, 24, 32, 48, 64, 96, 128)
ROUNDS = 7
_COLD_BYTES = 192 * 2**20


def make_weights(shape: tuple[int, int], dtype: torch.dtype) -> list[nn.Module]:
    """So many alike that the first is out of every cache when its turn comes again."""
    linears = []
    for _ in range(max(2, _COLD_BYTES // (shape[0] * shape[1] * dtype.itemsize))):
        linear = nn.Linear(shape[1], shape[0], bias=False, device="meta")
        linear.weight = nn.Parameter(torch.randn(shape).to(dtype), requires_grad=False)
        linears.append(linear)
    return linears


def measure(products: Sequence[Product], x: torch.Tensor, turn: int) -> float:
    """Seconds of one product."""
    product = products[turn % len(products)]
    started = time.perf_counter()
    product(x)
    return time.perf_counter() - started


@torch.inference_mode()
def main() -> None:
    """Prints a table: the time of a C++ product as a share of torch's."""
    level = replace(choose_level(), max_float_tokens=1 << 30)
    site = Site(torch.device("cpu"), cpu_kernels="fast", level=level)
    bind = native_candidate(lambda site: 0.0).build(site)
    print(f"{level.name}, {torch.get_num_threads()} threads; C++ time as a share of torch's\n")
    print("| outputs x inputs | weights | " + " | ".join(map(str, TOKENS)) + " |")
    print("|---" * (len(TOKENS) + 2) + "|")
    turn = 0
    for shape in SHAPES:
        for dtype in (torch.float32, torch.bfloat16):
            linears = make_weights(shape, dtype)
            ours = [bind([linear], Before(), torch.float32) for linear in linears]
            torchs = [PlainProduct(lambda part=part: [part], torch.float32) for part in linears]
            shares = []
            for num_tokens in TOKENS:
                x = torch.randn(num_tokens, shape[1])
                times: tuple[list[float], list[float]] = [], []
                for _ in range(ROUNDS + 1):
                    for kept, products in zip(times, (ours, torchs), strict=True):
                        kept.append(measure(products, x, turn))
                        turn += 1
                a, b = (statistics.median(kept[1:]) for kept in times)
                shares.append(f"{a / b:.2f}")
            kind = str(dtype).removeprefix("torch.")
            print(f"| {shape[0]} x {shape[1]} | {kind} | " + " | ".join(shares) + " |", flush=True)


if __name__ == "__main__":
    main()
