import pytest

from kernelbook import backends
from kernelbook.backends.cpu import CpuBackend


@pytest.fixture(scope="session", params=["cpu-32", "cpu-64", pytest.param("cuda", marks=pytest.mark.gpu)])
def backend(request):
    """Every backend that a kernel must give the same result on."""
    if request.param == "cuda":
        return request.getfixturevalue("gpu")
    return CpuBackend(wave=int(request.param.removeprefix("cpu-")))


@pytest.fixture(scope="session")
def gpu():
    """The backend of the GPU at hand, CUDA or HIP; skips where there is none."""
    found = backends.available()
    if found["cuda"] and found["hip"]:
        pytest.skip(found["cuda"])
    return backends.get()


@pytest.fixture(scope="session")
def simulator():
    return CpuBackend()
