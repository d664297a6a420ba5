"""Levels of the CPU, for tests that compute on every one that this machine can run."""

import pytest

from engines.torch_backend.ops.cpu_level import LEVELS, CpuLevel
from engines.torch_backend.ops.registry import CpuKernels, Ops, cpu_ops
from tests.long import few

COMPILED = [level for level in LEVELS if level.compiler_flags is not None]
RUNNABLE = [level for level in COMPILED if not level.lacks()]
#: Those between differ in products by integers alone.
OUTERMOST = few(RUNNABLE, RUNNABLE[:1] + RUNNABLE[-1:])
on_outermost_levels = pytest.mark.parametrize(
    "ops", OUTERMOST, indirect=True, ids=lambda level: level.name
)


def ops_of(mode: CpuKernels, level: CpuLevel) -> Ops:
    """Skips what this machine cannot run, and says why."""
    if reason := level.lacks():
        pytest.skip(reason)
    ops = cpu_ops(mode, level)
    if not ops.is_native:
        pytest.skip("no C++ compiler")
    return ops
