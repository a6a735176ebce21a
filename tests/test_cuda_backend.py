"""The CUDA backend where it cannot run, which every machine can test, and its interface where it can."""

import ctypes
import sys
import types

import numpy as np
import pytest

from kernelbook import backends
from kernelbook.backends import BackendUnavailable, cuda
from kernelbook.backends.cpu import CpuBackend

NO_GPU = backends.available()["cuda"]


class CUDARuntimeError(RuntimeError):
    pass


def install(monkeypatch, count, **answers):
    """A cupy module whose driver answers the question for devices with `count()`, and others with `answers`."""
    runtime = types.SimpleNamespace(is_hip=False, getDeviceCount=count, CUDARuntimeError=CUDARuntimeError, **answers)
    cupy = types.ModuleType("cupy")
    cupy.cuda = types.SimpleNamespace(runtime=runtime)
    monkeypatch.setitem(sys.modules, "cupy", cupy)


def broken(monkeypatch, folder, line):
    """A package cupy whose import does `line`."""
    for name in [name for name in sys.modules if name.split(".")[0] == "cupy"]:
        monkeypatch.delitem(sys.modules, name)
    (folder / "cupy.py").write_text(line)
    monkeypatch.syspath_prepend(folder)


def no_driver():
    raise CUDARuntimeError("cudaErrorInsufficientDriver: CUDA driver version is insufficient")


@pytest.mark.skipif(NO_GPU is None, reason="there is a GPU")
def test_without_a_gpu_it_says_so():
    with pytest.raises(BackendUnavailable, match="no NVIDIA|cupy does not import"):
        backends.get("cuda")
    assert backends.get().name == "cpu"


def broken_driver():
    raise CUDARuntimeError("cudaErrorSystemDriverMismatch: system has unsupported display driver")


@pytest.mark.parametrize("count, words", [
    (broken_driver, "no NVIDIA GPU: cudaErrorSystemDriverMismatch"),
    (lambda: 0, "no NVIDIA GPU: the driver lists none"),
])
def test_no_device(monkeypatch, count, words):
    install(monkeypatch, count)
    with pytest.raises(BackendUnavailable, match=words):
        backends.get("cuda")


@pytest.mark.parametrize("driver, words", [
    (lambda: 11040, "driver is too old: it runs CUDA up to 11.4, and CuPy is built for CUDA 12.9; update the driver, "
                    "or install the CuPy of CUDA 11"),
    (lambda: 0, "no NVIDIA driver is installed; CuPy, built for CUDA 12.9"),
    (no_driver, "no NVIDIA driver, or one older than the CUDA that CuPy is built for: cudaErrorInsufficientDriver"),
])
def test_a_driver_that_is_missing_or_too_old(monkeypatch, driver, words):
    install(monkeypatch, no_driver, driverGetVersion=driver, runtimeGetVersion=lambda: 12090)
    with pytest.raises(BackendUnavailable, match=words):
        backends.get("cuda")


@pytest.mark.parametrize("line, words", [
    ("import a_module_that_is_not_there", "No module named 'a_module_that_is_not_there'"),
    ("raise ImportError('libcuda.so.1: cannot open shared object file')", "libcuda.so.1"),
    ("raise RuntimeError('built for another NumPy')", "built for another NumPy"),
    ("import ctypes; ctypes.CDLL('libnothing.so')", "libnothing.so"),
])
def test_a_cupy_that_does_not_import(monkeypatch, tmp_path, line, words):
    broken(monkeypatch, tmp_path, line)
    with pytest.raises(BackendUnavailable, match=f"cupy does not import .*{words}.*pip install cupy-cuda12x") as error:
        backends.get("cuda")
    assert "cupy-cuda13x" in str(error.value)
    found = backends.available()
    assert found["cuda"] == str(error.value) and found["cpu"] is None and "cupy does not import" in found["hip"]
    assert backends.get().name == "cpu", "the simulator takes its place"


def test_no_cupy_at_all(monkeypatch):
    monkeypatch.setitem(sys.modules, "cupy", None)
    with pytest.raises(BackendUnavailable, match="pip install cupy-cuda12x"):
        backends.get("cuda")


def test_available_names_every_backend_with_a_reason(monkeypatch):
    install(monkeypatch, no_driver)
    found = backends.available()
    assert list(found) == ["cuda", "hip", "cpu"]
    assert found["cpu"] is None and found["cuda"].startswith("no NVIDIA driver")


def test_an_unknown_backend_names_the_known():
    with pytest.raises(ValueError, match="no backend 'rocm'; there are 'cuda', 'hip' and 'cpu'"):
        backends.get("rocm")


def test_a_missing_simulator_does_not_hide_behind_a_missing_gpu(monkeypatch):
    install(monkeypatch, no_driver)

    def no_compiler(self):
        raise BackendUnavailable("no C++ compiler")
    monkeypatch.setattr(CpuBackend, "__init__", no_compiler)
    assert backends.available()["cpu"] == "no C++ compiler"
    with pytest.raises(BackendUnavailable, match="no C"):
        backends.get()


# ---- on a GPU

@pytest.mark.gpu
def test_arrays_go_there_and_back(gpu):
    host = np.arange(12, dtype=np.float32).reshape(3, 4)[:, ::2]
    device = gpu.array(host)
    assert gpu.owns(device) and not gpu.owns(host) and device.flags.c_contiguous
    assert np.array_equal(gpu.numpy(device), host) and gpu.pointer(device) == device.data.ptr
    assert np.isnan(gpu.numpy(gpu.empty((2, 3), np.float32))).all(), "poisoned"
    assert gpu.numpy(gpu.empty(0, np.float32)).shape == (0,)


@pytest.mark.gpu
def test_copies_between_pinned_memory_and_the_device(gpu):
    source, sink = gpu.pinned((100,), np.int32), gpu.pinned((100,), np.int32)
    source[:] = np.arange(100)
    device = gpu.empty(100, np.int32)
    gpu.copy_in(device, source)
    gpu.copy_out(sink, device)
    gpu.synchronize()
    assert np.array_equal(sink, source)
    blocking = np.zeros(100, np.int32)
    gpu.copy_out_blocking(blocking, device)
    assert np.array_equal(blocking, source)


@pytest.mark.gpu
def test_arguments_that_are_no_device_arrays_are_refused(gpu):
    kernel = gpu.compile("ceilings/memory.cu").kernel("copy_bytes")
    device = gpu.empty(16, np.uint8)
    for value in (np.zeros(16, np.uint8), 1, [1]):
        with pytest.raises(TypeError, match="argument 1 .*expected an array on the device"):
            kernel((1, 1, 1), (32, 1, 1), [device, value, np.uint64(1)])
    assert (gpu.numpy(device) == 0xFF).all()


# ---- launches that overlap the one before

class StandIn:
    """An array of CuPy."""
    def __init__(self, address):
        self.data = types.SimpleNamespace(ptr=address)


def kernel_of(arch, plain=None, attributes=None):
    """A kernel on no device, whose launches without attributes go to `plain`, and what is set of it to `attributes`."""
    def function(*args, **shared):
        plain.append((args, shared))
    function.ptr = 0x77
    def set_attribute(*of):
        attributes.append(of)
    driver = types.SimpleNamespace(funcSetAttribute=set_attribute)
    stream = types.SimpleNamespace(ptr=0x55)
    cupy = types.SimpleNamespace(ndarray=StandIn, cuda=types.SimpleNamespace(
        driver=driver, get_current_stream=lambda: stream))
    backend = types.SimpleNamespace(xp=cupy, arch=arch)
    module = types.SimpleNamespace(backend=backend, _module=types.SimpleNamespace(get_function=lambda name: function))
    return cuda.CudaKernel(module, "it")


def test_what_the_driver_is_told_of_an_overlapping_launch(monkeypatch):
    told = []

    def launch(config, function, parameters, extra):
        config = config._obj
        told.append((list(config.grid), list(config.block), config.shared, config.stream, function.value,
                     [config.attributes[i].id for i in range(config.count)], config.attributes[0].value,
                     ctypes.cast(parameters[0], ctypes.POINTER(ctypes.c_uint64))[0],
                     ctypes.cast(parameters[1], ctypes.POINTER(ctypes.c_int32))[0],
                     ctypes.cast(parameters[2], ctypes.POINTER(ctypes.c_uint64))[0]))
        return 0
    monkeypatch.setattr(cuda, "_driver", {"cuLaunchKernelEx": launch}.__getitem__)
    kernel_of("90a", attributes=[])((3, 2), (32, 4, 1), [StandIn(0x1234), np.int32(-5), None], 64, overlap=True)
    assert told == [([3, 2, 1], [32, 4, 1], 64, 0x55, 0x77, [6], 1, 0x1234, -5, 0)]
    # as cuda.h lays them out
    assert (ctypes.sizeof(cuda._LaunchAttribute), ctypes.sizeof(cuda._LaunchConfig)) == (72, 56)
    assert (cuda._LaunchAttribute.value.offset, cuda._LaunchConfig.stream.offset) == (8, 32)


def test_an_overlapping_launch_hands_structures_over_by_value(monkeypatch):
    told = []
    monkeypatch.setattr(cuda, "_driver", lambda name: lambda config, function, parameters, extra: told.append(
        ctypes.string_at(parameters[0], 128)))
    kernel_of("90a")((1,), (32,), [np.frombuffer(bytes(range(128)), "V128")[0]], overlap=True)
    assert told == [bytes(range(128))]


def test_shared_memory_is_made_room_for_once(monkeypatch):
    attributes = []
    monkeypatch.setattr(cuda, "_driver", lambda name: lambda *of: 0)
    kernel = kernel_of("90a", attributes=attributes)
    for shared in (0, 48 << 10, 100 << 10, 100 << 10):
        kernel((1,), (32,), [], shared, overlap=True)
    assert attributes == [(0x77, 9, 100), (0x77, 8, 100 << 10)]  # all of it to shared memory; at most so much a block


def test_what_one_launch_needs_is_not_taken_from_another(monkeypatch):
    """A function's limit of shared memory is the last that is set."""
    limits, function = [], types.SimpleNamespace(ptr=0x77)
    monkeypatch.setattr(cuda, "_driver", lambda name: lambda *of: 0)
    monkeypatch.setattr(cuda.toolchain, "nvrtc_compile", lambda source, arch: (b"", ""))
    loaded = types.SimpleNamespace(load=lambda cubin: None, get_function=lambda name: function)
    driver = types.SimpleNamespace(funcSetAttribute=lambda _, what, value: limits.append(value) if what == 8 else None)
    cupy = types.SimpleNamespace(ndarray=StandIn, cuda=types.SimpleNamespace(
        driver=driver, function=types.SimpleNamespace(Module=lambda: loaded),
        get_current_stream=lambda: types.SimpleNamespace(ptr=0x55)))
    module = cuda.CudaModule(types.SimpleNamespace(xp=cupy, arch="90a"), None)
    large, small = module.kernel("it"), module.kernel("it")
    for kernel, shared in ((large, 100 << 10), (small, 60 << 10), (large, 100 << 10), (small, 120 << 10)):
        kernel((1,), (32,), [], shared, overlap=True)
    assert limits == [100 << 10, 120 << 10]
    assert module.kernel("other") is not large


def test_a_device_that_overlaps_nothing_launches_as_ever(monkeypatch):
    plain = []
    monkeypatch.setattr(cuda, "_driver", {}.__getitem__)
    kernel_of("89", plain)((1,), (32,), [np.int32(1)], overlap=True)
    assert len(plain) == 1


def test_a_launch_that_the_driver_refuses_says_what_was_asked(monkeypatch):
    monkeypatch.setattr(cuda, "_driver", lambda name: lambda *of: 1)
    with pytest.raises(RuntimeError, match=r"it: cuLaunchKernelEx gives CUresult 1 for a grid of \(1, 1, 1\) blocks of "
                       r"\(4096, 1, 1\) threads with 0 bytes"):
        kernel_of("90a")((1, 1, 1), (4096, 1, 1), [], overlap=True)
