"""Levels of the CPU, for tests that compute on every one that this machine can run."""

import pytest

from engines.torch_backend.ops.cpu.kernels import CpuKernels, Mode, load_kernels
from engines.torch_backend.ops.cpu_level import LEVELS, CpuLevel

COMPILED = [level for level in LEVELS if level.compiler_flags is not None]
RUNNABLE = [level for level in COMPILED if not level.lacks()]


def kernels_of(mode: Mode, level: CpuLevel) -> CpuKernels:
    """Skips what this machine cannot run, and says why."""
    if reason := level.lacks():
        pytest.skip(reason)
    kernels = load_kernels(mode, level)
    if kernels is None:
        pytest.skip("no C++ compiler")
    return kernels
