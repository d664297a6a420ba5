import pytest

from engines.torch_backend.kernels_cpp.kernels import CpuKernels, Mode, load_kernels


@pytest.fixture(params=["fast", "exact"])
def kernels(request: pytest.FixtureRequest) -> CpuKernels:
    mode: Mode = request.param
    found = load_kernels(mode)
    if found is None:
        pytest.skip("no C++ compiler")
    return found
