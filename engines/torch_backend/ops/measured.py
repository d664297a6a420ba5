"""Selects the fastest product with bfloat16 weights by measurement, once a day.

A processor may support an instruction and be slow at it, or torch may use a faster one (AMX). The times are stored
beside the compiled kernels, as JSON, by library, torch, processor and number of threads.
"""

import fcntl
import hashlib
import json
import logging
import os
import time
from collections.abc import Callable, Mapping
from contextlib import ExitStack, suppress
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import TypeVar

import torch
from torch import nn

from engines.torch_backend.ops import native
from engines.torch_backend.ops.cpu_level import CpuLevel, cpu_model
from engines.torch_backend.ops.linear.cpu import to_weights
from engines.torch_backend.ops.linear.reference import ReferenceKernel
from engines.torch_backend.ops.native.compiler import CannotCompile
from engines.torch_backend.ops.native.library import (
    BFLOAT16_BITS,
    FLOAT_BITS,
    Library,
    NativeKernel,
)

logger = logging.getLogger(__name__)

T = TypeVar("T")

#: Seconds of a product, by its name and number of tokens.
Timings = Mapping[str, Mapping[int, float]]

FEW, MANY = (1, 8), 512  # tokens
_NUM_COPIES, _WIDTH, _ROUNDS = 5, 2048, 5  # 42 MB of weights: larger than most caches
_MARGIN = 1.1  # a smaller difference is noise
_MAX_AGE_S = 86_400.0  # of a measurement, which may be wrong on a busy machine


def decide(level: CpuLevel, timings: Timings) -> CpuLevel:
    """The level with the fastest products by these times: `rounded` and `float` kernels, or `torch`."""
    rounded, plain, by_torch = (timings[name] for name in ("rounded", "float", "torch"))
    if all(rounded[count] > _MARGIN * plain[count] for count in FEW):
        return replace(level, max_rounded_tokens=0)
    if rounded[MANY] > _MARGIN * by_torch[MANY]:
        return replace(level, max_rounded_tokens=level.max_float_tokens)
    return level


@cache
def measured(level: CpuLevel, num_threads: int) -> CpuLevel:
    """The level after `decide` on this machine; unchanged without alternatives or if the measurement fails."""
    if not level.max_rounded_tokens:
        return level
    try:
        library = native.load(level)
        timings = recall(library, str(num_threads), _parse, lambda: measure(library))
    except (CannotCompile, OSError):
        return level
    found = decide(level, timings)
    ways = {0: "never", level.max_rounded_tokens: "always"}
    logger.info(
        "activations are rounded to bfloat16 beside such weights %s: ms by tokens: %s",
        ways.get(found.max_rounded_tokens, f"up to {found.max_rounded_tokens} tokens"),
        "; ".join(
            f"{name} " + ", ".join(f"{count}: {1e3 * s:.2f}" for count, s in times.items())
            for name, times in timings.items()
        ),
    )
    return found


def recall(library: Library, key: str, parse: Callable[[str], T], measure: Callable[[], T]) -> T:
    """The last day's measurement with this library, torch and processor, or a new one.

    One process of a machine measures at a time, because workers that start together would slow each other down.
    `parse` reads the JSON of the result of `measure`, and raises for other content.
    """
    key = f"{library.file.name} {torch.__version__} {cpu_model()} {key}"
    file = library.file.with_name(f"times-{hashlib.sha256(key.encode()).hexdigest()[:32]}.json")
    found = _read_fresh(file, parse)
    if found is not None:
        return found
    with ExitStack() as stack:
        with suppress(OSError):
            lock = stack.enter_context(open(file.with_name("times.lock"), "w", encoding="utf-8"))
            fcntl.flock(lock, fcntl.LOCK_EX)
            found = _read_fresh(file, parse)  # another process may have measured meanwhile
        if found is not None:
            return found
        found = measure()
        scratch = file.with_suffix(f".{os.getpid()}")
        with suppress(OSError):  # a result that cannot be stored is used all the same
            scratch.write_text(json.dumps(found), encoding="utf-8")
            scratch.replace(file)
    return found


def _read_fresh(file: Path, parse: Callable[[str], T]) -> T | None:
    """A stored measurement; None if there is none, or it is damaged or too old."""
    try:
        age_s = time.time() - file.stat().st_mtime  # noqa: TID251 - of a file
        return parse(file.read_text(encoding="utf-8")) if age_s < _MAX_AGE_S else None
    except (OSError, ValueError, LookupError, TypeError, AttributeError, ArithmeticError):
        return None


def _parse(text: str) -> Timings:
    """Raises: ValueError, LookupError, TypeError, AttributeError for other content."""
    stored = json.loads(text)
    return {
        name: {count: float(stored[name][str(count)]) for count in (*FEW, MANY)}
        for name in ("rounded", "float", "torch")
    }


@torch.inference_mode()
def measure(library: Library) -> Timings:
    """Measure all products, interleaved, so that other work on the machine slows them equally."""
    parts = [_make_linear() for _ in range(_NUM_COPIES)]
    weights = [found for part in parts if (found := to_weights(part)) is not None]
    ways: dict[str, list[Callable[[torch.Tensor], torch.Tensor]]] = {
        "rounded": [NativeKernel(library, [each], BFLOAT16_BITS) for each in weights],
        "float": [NativeKernel(library, [each], FLOAT_BITS) for each in weights],
        "torch": [ReferenceKernel([part], torch.bfloat16) for part in parts],
    }
    seconds: dict[str, dict[int, list[float]]] = {
        name: {count: [] for count in (*FEW, MANY)} for name in ways
    }
    turn = 0
    for count in (*FEW, MANY):
        x = torch.randn(count, _WIDTH)
        for _ in range(_ROUNDS):
            for name, products in ways.items():
                turn += 1
                started = time.perf_counter()
                products[turn % _NUM_COPIES](x)
                seconds[name][count].append(time.perf_counter() - started)
    return {
        name: {count: min(tries) for count, tries in by_count.items()}  # noise only adds time
        for name, by_count in seconds.items()
    }


def _make_linear() -> nn.Linear:
    linear = nn.Linear(_WIDTH, _WIDTH, bias=False, device="meta")
    linear.weight = nn.Parameter(
        torch.full((_WIDTH, _WIDTH), 0.5, dtype=torch.bfloat16), requires_grad=False
    )
    return linear
