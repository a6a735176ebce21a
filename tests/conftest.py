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
    """The CUDA backend; skips where there is none."""
    reason = backends.available()["cuda"]
    if reason:
        pytest.skip(reason)
    return backends.get("cuda")


@pytest.fixture(scope="session")
def simulator():
    return CpuBackend()
