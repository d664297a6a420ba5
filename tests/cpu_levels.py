"""CPU levels for tests that run on every level of this machine."""

import pytest

from engines.torch_backend.ops.cpu_level import LEVELS, CpuLevel
from engines.torch_backend.ops.registry import CpuKernels, Ops, cpu_ops
from tests.long import few

COMPILED = [level for level in LEVELS if level.compiler_flags is not None]
RUNNABLE = [level for level in COMPILED if not level.lacks()]
#: The levels between them differ only in integer products.
OUTERMOST = few(RUNNABLE, RUNNABLE[:1] + RUNNABLE[-1:])
on_outermost_levels = pytest.mark.parametrize(
    "ops", OUTERMOST, indirect=True, ids=lambda level: level.name
)


def ops_of(mode: CpuKernels, level: CpuLevel) -> Ops:
    """Returns the kernels of a level. Skips the test with the reason if this machine cannot run it."""
    if reason := level.lacks():
        pytest.skip(reason)
    ops = cpu_ops(mode, level)
    if not ops.is_native:
        pytest.skip("no C++ compiler")
    return ops
