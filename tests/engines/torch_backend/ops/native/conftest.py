import pytest

from engines.torch_backend.ops.registry import CpuKernels, Ops
from tests.cpu_levels import RUNNABLE, ops_of


@pytest.fixture(params=RUNNABLE, ids=lambda level: level.name)
def ops(request: pytest.FixtureRequest, mode: CpuKernels) -> Ops:
    """The kernels of every level that this machine can run."""
    return ops_of(mode, request.param)


@pytest.fixture
def mode() -> CpuKernels:
    """The default mode. In other modes, only integer products differ."""
    return "fast"
