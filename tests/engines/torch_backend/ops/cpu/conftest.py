import pytest

from engines.torch_backend.ops.cpu.kernels import CpuKernels, Mode
from tests.cpu_levels import RUNNABLE, kernels_of


@pytest.fixture(params=RUNNABLE, ids=lambda level: level.name)
def kernels(request: pytest.FixtureRequest, mode: Mode) -> CpuKernels:
    """Of every level that this machine can run."""
    return kernels_of(mode, request.param)


@pytest.fixture(params=["fast", "exact"])
def mode(request: pytest.FixtureRequest) -> Mode:
    return request.param
