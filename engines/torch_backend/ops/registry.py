"""Operators: their references, faster candidates, and the selection of a candidate.

An operator is a folder of this package with an `OP`: a reference in plain torch, candidates for some devices, and
an example on which a candidate must agree with the reference. `choose` tests the candidates at startup.
"""

import logging
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import cache
from importlib import import_module  # noqa: TID251 - names the modules of its own table
from pkgutil import iter_modules
from typing import Any, Literal

import torch
from torch import Tensor

from engines.base import EngineStartError
from engines.torch_backend import ops as package
from engines.torch_backend.kv_cache import KVCachePool
from engines.torch_backend.models.config import TextConfig
from engines.torch_backend.ops.cpu_level import CpuLevel, choose_level

logger = logging.getLogger(__name__)

#: `fast` rounds activations for int8 and int4 weights to 8 bits, `exact` to 16; `off` disables C++ kernels.
CpuKernels = Literal["fast", "exact", "off"]
REFERENCE = "reference"
#: Name that disables CUDA graphs in the setting `disabled_ops`.
CUDA_GRAPH = "cuda_graph"

#: Shapes of the examples if no model determines them.
EXAMPLE_TEXT = TextConfig(
    vocab_size=8, hidden_size=64, intermediate_size=96, num_layers=2, num_heads=8, num_kv_heads=2,
    head_dim=16, max_position_embeddings=128,
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Site:
    """The device and dtype of operators, and the shapes of their examples."""

    device: torch.device
    dtype: torch.dtype = torch.float32
    text: TextConfig = EXAMPLE_TEXT
    block_size: int = 16
    cpu_kernels: CpuKernels = "off"
    level: CpuLevel = field(default_factory=choose_level)
    stored: torch.dtype | None = None  #: dtype of floating-point weights; None: `dtype`
    joins: bool = False  #: whether weights with a common input can be copied into one tensor
    interprets: bool = False  #: whether kernels can run in Triton's interpreter
    seed: int = 0  #: seed of the examples' numbers

    @property
    def bits(self) -> int:
        """Bits to which C++ kernels round activations before products with integer weights."""
        return 16 if self.cpu_kernels == "exact" else 8

    @property
    def tolerance(self) -> float:
        """Allowed difference relative to the largest number."""
        return 16 * torch.finfo(self.dtype).eps

    def numbers(self, *shape: int, seed: int = 1) -> Tensor:
        """Random numbers in -1..1. Does not change torch's random state."""
        generator = torch.Generator().manual_seed(1000 * self.seed + seed)
        values = 2 * torch.rand(shape, generator=generator) - 1
        return values.to(self.device, self.dtype)

    def pool(self, num_blocks: int = 8) -> KVCachePool:
        """A KV cache pool of one layer, filled with numbers."""
        text = replace(self.text, num_layers=1)
        pool = KVCachePool(text, num_blocks, self.block_size, self.dtype, self.device)
        num_slots = num_blocks * self.block_size
        heads = (num_slots, text.num_kv_heads, text.head_dim)
        slots = torch.arange(num_slots, device=self.device)
        pool.write(0, slots, self.numbers(*heads), self.numbers(*heads, seed=2))
        return pool


@dataclass(frozen=True, slots=True)
class Candidate:
    name: str
    #: Returns a function with the reference's signature. Can raise any exception.
    build: Callable[[Site], Any]
    lacks: Callable[[Site], str]  #: why the candidate cannot run on a site; empty if it can
    #: Allowed difference relative to the largest number.
    tolerance: Callable[[Site], float] = lambda site: site.tolerance
    #: Variants of a site for which the candidate must be correct.
    variants: Callable[[Site], Iterable[Site]] = lambda site: (site,)


@dataclass(frozen=True, slots=True)
class Op:
    """An operator. `example` calls an implementation, and returns its results and the tensors that it changes."""

    name: str
    reference: Any
    candidates: tuple[Candidate, ...]
    example: Callable[[Any, Site], list[Tensor]]

    def complaint(self, candidate: Candidate, site: Site) -> str:
        """The reason why a candidate cannot be used; empty if it can."""
        return candidate.lacks(site) or next(
            filter(None, (self._try(candidate, each) for each in candidate.variants(site))), ""
        )

    def _try(self, candidate: Candidate, site: Site) -> str:
        try:
            found = self.example(candidate.build(site), site)
        except Exception as error:  # compilers and drivers raise any type
            return f"{type(error).__name__}: {error}"[:500]
        expected = self.example(self.reference, site)
        for ours, theirs in zip(found, expected, strict=True):
            difference = (ours.float() - theirs.float()).abs().max().item()
            if not difference <= candidate.tolerance(site) * theirs.float().abs().max().item():
                return f"differs from the reference by {difference:.3g}"
        return ""


@dataclass(frozen=True, slots=True)
class Ops:
    """The selected implementation of each operator."""

    site: Site
    chosen: Mapping[str, str]  #: names of candidates, or `REFERENCE`, by operator
    functions: Mapping[str, Any]
    registered: Mapping[str, Op]

    def __getitem__(self, name: str) -> Any:
        return self.functions[name]

    @property
    def is_native(self) -> bool:
        """Whether C++ kernels are used. Linear kernels take and return float32 for all weights."""
        return "cpu" in self.chosen.values()

    def product_dtype(self, dtype: torch.dtype) -> torch.dtype:
        """Dtype of torch's products. With C++ kernels, float16 becomes float32: their stream can exceed float16."""
        return torch.float32 if self.is_native and dtype is torch.float16 else dtype

    def uses(self, name: str, candidate: str | None = None) -> bool:
        """Whether this candidate (None: any candidate) replaces an operator's reference."""
        found = self.chosen[name]
        return found != REFERENCE if candidate is None else found == candidate


@cache
def discover() -> tuple[Op, ...]:
    folders = sorted(module.name for module in iter_modules(package.__path__) if module.ispkg)
    modules = [import_module(f"{package.__name__}.{folder}") for folder in folders]
    return tuple(
        op for m in modules for op in getattr(m, "OPS", (m.OP,) if hasattr(m, "OP") else ())
    )


def choose(site: Site, disabled: Collection[str] = (), ops: Iterable[Op] | None = None) -> Ops:
    """For each operator the first candidate that is supported, correct and enabled, else the reference.

    `disabled`: names of operators, of one candidate (`linear_int8.triton`), or of all candidates of a kind (`triton`).
    """
    registered = {op.name: op for op in (discover() if ops is None else ops)}
    chosen = dict.fromkeys(registered, REFERENCE)
    functions = {name: op.reference for name, op in registered.items()}
    reasons: dict[str, list[str]] = {}
    for op in registered.values():
        for candidate in op.candidates:
            names = _names(op, candidate)
            reason = "switched off" if names & set(disabled) else op.complaint(candidate, site)
            if not reason:
                chosen[op.name], functions[op.name] = candidate.name, candidate.build(site)
                break
            reasons.setdefault(reason, []).append(f"{op.name}.{candidate.name}")
            if reason != "switched off" and not candidate.lacks(site):
                logger.warning("operator %s.%s is not used: %s", op.name, candidate.name, reason)
    found = ", ".join(f"{name} {chosen[name]}" for name in chosen)
    left = "; ".join(f"{', '.join(names)}: {reason}" for reason, names in reasons.items())
    logger.info("operators on %s: %s%s", site.device, found, f" ({left})" if left else "")
    return Ops(site, chosen, functions, registered)


def _names(op: Op, candidate: Candidate) -> set[str]:
    """The names that disable a candidate. `triton` also disables `triton_varlen`."""
    kind = candidate.name.partition("_")[0]
    return {op.name, kind, candidate.name, f"{op.name}.{candidate.name}"}


def check_disabled(names: Collection[str]) -> None:
    """Raises: EngineStartError for an unknown name."""
    known = {CUDA_GRAPH}.union(*(_names(op, c) for op in discover() for c in op.candidates))
    if unknown := sorted(set(names) - known):
        raise EngineStartError(
            f"VLM_ENGINE__DISABLED_OPS: unknown name {unknown[0]!r}; supported names: "
            f"{', '.join(sorted(known))}"
        )


@cache
def cpu_ops(
    mode: CpuKernels, level: CpuLevel | None = None, disabled: frozenset[str] = frozenset()
) -> Ops:
    """Operators for a CPU level, by default this machine's; tested once per process."""
    site = Site(torch.device("cpu"), cpu_kernels=mode, level=level or choose_level())
    ops = choose(site, disabled)
    if mode != "off" and "cpu" not in disabled and not ops.is_native:
        native = [c for op in ops.registered.values() for c in op.candidates if c.name == "cpu"]
        reasons = sorted({candidate.lacks(site) for candidate in native})
        logger.warning("no CPU kernels, torch computes instead: %s", "; ".join(reasons))
    return ops
