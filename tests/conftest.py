import numpy as np
import pytest

from kernelbook import backends, packing
from kernelbook.backends.cpu import CpuBackend
from kernelbook.ops import packed_wgmma


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


class _InPlaceOfHopper(CpuBackend):
    """The simulator, where 7_packed_wgmma.cu has no form: its products are NumPy's, rounded as the kernel rounds."""
    arch, multiprocessors, l2_bytes = "90a", 132, 50 << 20


@pytest.fixture
def hopper_in_numpy(monkeypatch):
    """A backend on which `packed_wgmma` designs on bf16 run, weights of int4. `launches` of it are their arguments."""
    backend = _InPlaceOfHopper()
    backend.launches = []

    def launch(self, on, weights, data, x, out, plan, *, overlap=False, sums=None):
        on.launches.append({"weights": weights, "data": data, "x": x, "out": out, "plan": plan, "sums": sums})
        panels = packing.Panels(data, weights.n, weights.k, weights.precision)
        scales = _floats(_bf16(panels.scales.astype(np.float32)))
        w = _floats(_bf16(panels.codes * np.repeat(scales, 32, axis=1)))[:weights.n, :weights.k]

        def call():
            products = _floats(x) @ w.T
            out[...] = products if out.dtype == np.float32 else _bf16(products)
            return out
        return on.counted("packed_wgmma", call) if hasattr(on, "counted") else call  # as a pass counts its kernels
    monkeypatch.setattr(packed_wgmma.WgmmaDesign, "launch", launch)
    return backend


def _bf16(x):
    bits = np.ascontiguousarray(x, np.float32).view(np.uint32)
    return ((bits + 0x7FFF + (bits >> 16 & 1)) >> 16).astype(np.uint16)


def _floats(bits):
    return (bits.astype(np.uint32) << 16).view(np.float32)
