"""A complete operator: doubling. Only the contract test registers it."""

from collections.abc import Callable

import torch
from torch import Tensor

from engines.torch_backend.ops.registry import Candidate, Op, Site

Double = Callable[[Tensor], Tensor]


def double(x: Tensor) -> Tensor:
    """Shapes: any; returns the same."""
    return 2 * x


def _example(double: Double, site: Site) -> list[Tensor]:
    return [double(site.numbers(3, site.text.hidden_size))]


def make(**candidates: Double | str) -> Op:
    """The operator with these candidates: a function, or the reason why the candidate is not supported."""
    return Op("double", double, tuple(_candidate(*item) for item in candidates.items()), _example)


def _candidate(name: str, way: Double | str) -> Candidate:
    reason = way if isinstance(way, str) else ""
    return Candidate(name, build=lambda site: way, lacks=lambda site: reason)


def by_adding(x: Tensor) -> Tensor:
    """A correct candidate."""
    return torch.add(x, x)
