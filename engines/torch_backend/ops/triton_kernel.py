"""Triton candidates of operators. Triton is imported only when a candidate is built."""

from collections.abc import Callable
from importlib import import_module  # noqa: TID251 - names the modules of its own table
from importlib.util import find_spec
from typing import Any

from engines.torch_backend.ops.registry import Candidate, Site


def lacks(site: Site) -> str:
    if site.device.type != "cuda" and not site.interprets:
        return "Triton's kernels are for GPUs"
    return "" if find_spec("triton") else "triton is not installed"


def triton_candidate(
    operator: str, function: str, adapt: Callable[[Any], Any] = lambda kernel: kernel
) -> Candidate:
    """The candidate that `function` in the operator's `triton.py` implements."""

    def build(site: Site) -> Any:
        module = import_module(f"engines.torch_backend.ops.{operator}.triton")
        return adapt(getattr(module, function))

    return Candidate("triton", build, lacks)
