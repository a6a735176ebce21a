"""NVIDIA GPUs through CuPy. Kernels are compiled by NVRTC to machine code of the device at hand.

What CuPy gives alike on AMD GPUs, `backends.hip` takes from here.
"""

import ctypes
import functools
from collections.abc import Callable

import numpy as np

from kernelbook import toolchain
from kernelbook.backends.source import BackendUnavailable, Source

DEFAULT_SHARED = 48 << 10
"""Bytes of dynamic shared memory that a kernel may have without being told so before its launch."""
MAX_DYNAMIC_SHARED_SIZE_BYTES, PREFERRED_SHARED_MEMORY_CARVEOUT = 8, 9  # of CUfunction_attribute in cuda.h

TENSOR_MAP_BYTES, TENSOR_MAP_ALIGN = 128, 64  # of CUtensorMap in cuda.h; below, values of its enumerations
TENSOR_MAP_TYPES = {"uint8": 0, "uint16": 1, "float16": 6, "float32": 7}
SWIZZLE_128B, L2_PROMOTION_256B = 3, 3
PROGRAMMATIC_STREAM_SERIALIZATION = 6  # of CUlaunchAttributeID


class CupyBackend:
    """The current device of CuPy: memory, copies, and kernels kept once they are compiled.

    A backend gives `_module(source)` and, beside what is set here, `wave`, `matrix` and `arch`. See backends.Backend.
    """

    simulated = False

    def __init__(self, cupy):
        self.xp = cupy
        self._id = cupy.cuda.Device().id
        self._properties = cupy.cuda.runtime.getDeviceProperties(self._id)
        self.device = self._properties["name"].decode()
        self.multiprocessors = self._properties["multiProcessorCount"]
        self.l2_bytes = self._properties["l2CacheSize"]
        self._modules = {}

    def compile(self, source, defines=None):
        source = source if isinstance(source, Source) else Source(source, defines or {})
        if source.hash not in self._modules:
            self._modules[source.hash] = self._module(source)
        return self._modules[source.hash]

    def array(self, host):
        return self.xp.array(host, order="C")

    def empty(self, shape, dtype):
        array = self.xp.empty(shape, dtype)
        if array.nbytes:
            array.data.memset_async(0xFF, array.nbytes)
        return array

    def numpy(self, array):
        return self.xp.asnumpy(array)

    def synchronize(self):
        self.xp.cuda.get_current_stream().synchronize()

    def owns(self, array) -> bool:
        """Whether `array` lies on this device."""
        return isinstance(array, self.xp.ndarray) and array.device.id == self._id

    def pointer(self, array) -> int:
        return array.data.ptr

    def pinned(self, shape, dtype):
        """A NumPy array in page-locked memory, from which copies need no staging by the driver."""
        import cupyx
        return cupyx.empty_pinned(shape, dtype)

    def copy_in(self, device, host):
        """Queue a copy from the host. From pinned memory it returns at once; the host array must live on."""
        self.xp.cuda.runtime.memcpyAsync(device.data.ptr, host.ctypes.data, host.nbytes,
                                         self.xp.cuda.runtime.memcpyHostToDevice,
                                         self.xp.cuda.get_current_stream().ptr)

    def copy_out(self, host, device):
        """Queue a copy to the host; into pinned memory it returns at once."""
        self.xp.cuda.runtime.memcpyAsync(host.ctypes.data, device.data.ptr, host.nbytes,
                                         self.xp.cuda.runtime.memcpyDeviceToHost,
                                         self.xp.cuda.get_current_stream().ptr)

    def copy_out_blocking(self, host, device):
        """Copy to the host and return when it is there (cudaMemcpy)."""
        self.xp.cuda.runtime.memcpy(host.ctypes.data, device.data.ptr, host.nbytes,
                                    self.xp.cuda.runtime.memcpyDeviceToHost)


class CudaBackend(CupyBackend):
    """The current CUDA device. Raises BackendUnavailable where there is none. See backends.Backend."""

    name = "cuda"
    wave = 32
    matrix = ("mma",)

    def __init__(self):
        try:
            import cupy
        except Exception as error:  # a CuPy that does not fit the machine may fail in any way it likes
            raise BackendUnavailable(f"cupy does not import ({error}); pip install cupy-cuda12x, or cupy-cuda13x "
                                     "beside a CUDA 13 driver") from error
        if cupy.cuda.runtime.is_hip:
            raise BackendUnavailable("no NVIDIA GPU for this CuPy, which is built for ROCm; the backend 'hip' takes it")
        try:
            count = cupy.cuda.runtime.getDeviceCount()
        except cupy.cuda.runtime.CUDARuntimeError as error:
            raise BackendUnavailable(_without_devices(cupy.cuda.runtime, error)) from error
        if count == 0:
            raise BackendUnavailable("no NVIDIA GPU: the driver lists none")
        super().__init__(cupy)
        capability = f"{self._properties['major']}{self._properties['minor']}"
        self.arch = capability + ("a" if capability == "90" else "")

    def _module(self, source) -> "CudaModule":
        return CudaModule(self, source)

    def tensor_map(self, array, box: tuple[int, int], *, swizzled: bool = True) -> np.void:
        """How bulk copies are told of a matrix on the device: a CUtensorMap, for a kernel's parameter of 128 bytes.

        array: [rows, columns], contiguous, of uint8, uint16, float16 or float32; it must live as long as launches use
        the map. box: rows and columns that a copy moves, at most 256 each; beyond the matrix it reads 0.
        swizzled: in shared memory the 16-byte parts of the box's rows, which then have at most 128 bytes, are exchanged
        as warpgroup instructions read them.
        Raises ValueError where the driver refuses: a row, or the address, that is no multiple of 16 bytes, or such a
        box. BackendUnavailable where it is too old for Hopper.
        """
        rows, columns = array.shape
        room = (ctypes.c_uint8 * (TENSOR_MAP_BYTES + TENSOR_MAP_ALIGN))()
        at = -(-ctypes.addressof(room) // TENSOR_MAP_ALIGN) * TENSOR_MAP_ALIGN

        def numbers(kind, *values):
            return (kind * len(values))(*values)
        answer = _driver("cuTensorMapEncodeTiled")(
            ctypes.c_void_p(at), ctypes.c_int(TENSOR_MAP_TYPES[str(array.dtype)]), ctypes.c_uint32(2),
            ctypes.c_void_p(self.pointer(array)), numbers(ctypes.c_uint64, columns, rows),
            numbers(ctypes.c_uint64, columns * array.itemsize), numbers(ctypes.c_uint32, box[1], box[0]),
            numbers(ctypes.c_uint32, 1, 1), ctypes.c_int(0), ctypes.c_int(SWIZZLE_128B if swizzled else 0),
            ctypes.c_int(L2_PROMOTION_256B), ctypes.c_int(0))
        if answer:
            raise ValueError(f"the driver makes no map of boxes {box} of a {array.dtype} matrix {array.shape} at "
                             f"{self.pointer(array):#x}: cuTensorMapEncodeTiled gives CUresult {answer}; rows and the "
                             "address must be multiples of 16 bytes, and a box's sizes at most 256")
        return np.frombuffer(ctypes.string_at(at, TENSOR_MAP_BYTES), f"V{TENSOR_MAP_BYTES}")[0]


@functools.cache
def _driver(name: str) -> Callable:
    """A function of the driver that CuPy does not have."""
    try:
        return getattr(ctypes.CDLL("libcuda.so.1"), name)
    except (OSError, AttributeError) as error:
        raise BackendUnavailable(f"the NVIDIA driver has no {name} ({error}), which kernels from sm_90 on need; it "
                                 "must be one of CUDA 12 or later") from error


class _LaunchAttribute(ctypes.Structure):
    """CUlaunchAttribute of cuda.h, whose value is a union of 64 bytes at a multiple of 8."""
    _fields_ = [("id", ctypes.c_int), ("_gap", ctypes.c_int), ("value", ctypes.c_int), ("_rest", ctypes.c_int * 15)]

    def __init__(self, number: int, value: int):
        super().__init__(number, 0, value)


class _LaunchConfig(ctypes.Structure):
    """CUlaunchConfig of cuda.h."""
    _fields_ = [("grid", ctypes.c_uint * 3), ("block", ctypes.c_uint * 3), ("shared", ctypes.c_uint),
                ("stream", ctypes.c_void_p), ("attributes", ctypes.POINTER(_LaunchAttribute)),
                ("count", ctypes.c_uint)]


def _without_devices(runtime, error) -> str:
    """Why the driver lists no devices. CUDA has one error for a driver that is too old and for none at all."""
    if "cudaErrorInsufficientDriver" not in str(error):
        return f"no NVIDIA GPU: {error}"
    try:
        driver, built_for = (f"{version // 1000}.{version % 1000 // 10}"
                             for version in (runtime.driverGetVersion(), runtime.runtimeGetVersion()))
    except Exception:  # with such a driver the question itself may fail, in any way it likes
        return f"no NVIDIA driver, or one older than the CUDA that CuPy is built for: {error}"
    if driver == "0.0":
        return f"no NVIDIA driver is installed; CuPy, built for CUDA {built_for}, needs one (and a GPU)"
    return (f"the NVIDIA driver is too old: it runs CUDA up to {driver}, and CuPy is built for CUDA {built_for}; "
            f"update the driver, or install the CuPy of CUDA {driver.partition('.')[0]}")


class CudaModule:
    def __init__(self, backend: CudaBackend, source: Source):
        self.source = source
        self.backend = backend
        cubin, self.log = toolchain.nvrtc_compile(source, backend.arch)
        self._module = backend.xp.cuda.function.Module()
        self._module.load(cubin)
        self._kernels = {}

    def kernel(self, name: str) -> "CudaKernel":
        """The same one each time: what a function's launches may take is the function's, and must not be less for one
        weight than another one's launches need."""
        if name not in self._kernels:
            self._kernels[name] = CudaKernel(self, name)
        return self._kernels[name]


class CupyKernel:
    def __init__(self, cupy, function, name: str):
        self.name = name
        # a launch is called often: which device an array lies on is for the caller to check
        self._accepted = (cupy.ndarray, np.generic, type(None))
        self._function = function

    def __call__(self, grid, block, args, shared=0, overlap=False):
        for i, value in enumerate(args):
            if not isinstance(value, self._accepted):
                raise TypeError(f"{self.name}: argument {i} is a {type(value).__name__}; expected an array on the "
                                "device, a NumPy scalar such as np.int32(4), or None")
        self._allow(shared)
        self._launch(grid, block, [_launchable(value) for value in args], shared, overlap)

    def _launch(self, grid, block, args, shared, overlap):
        """Without attributes, and so with no overlap."""
        self._function(tuple(grid), tuple(block), args, shared_mem=shared)


def _launchable(value):
    """An argument as CuPy takes it, which knows structures by value as arrays of NumPy."""
    if value is None:
        return np.uint64(0)
    return np.asarray(value) if isinstance(value, np.void) else value


class CudaKernel(CupyKernel):
    def __init__(self, module: CudaModule, name: str):
        cupy = module.backend.xp
        super().__init__(cupy, module._module.get_function(name), name)
        self._set_attribute = cupy.cuda.driver.funcSetAttribute
        self._array, self._stream = cupy.ndarray, cupy.cuda.get_current_stream
        self._allowed_shared = DEFAULT_SHARED
        self._overlaps = int(module.backend.arch.rstrip("a")) >= 90
        self._has_carveout = False

    def _allow(self, shared: int):
        if shared > self._allowed_shared:
            self._set_attribute(self._function.ptr, MAX_DYNAMIC_SHARED_SIZE_BYTES, shared)
            self._allowed_shared = shared

    def _launch(self, grid, block, args, shared, overlap):
        """An overlapping one by cuLaunchKernelEx, as CuPy launches without attributes."""
        if not (overlap and self._overlaps):
            return super()._launch(grid, block, args, shared, overlap)
        if shared and not self._has_carveout:  # so that there is room for blocks of two launches
            self._set_attribute(self._function.ptr, PREFERRED_SHARED_MEMORY_CARVEOUT, 100)
            self._has_carveout = True
        held = [np.asarray(value.data.ptr if isinstance(value, self._array) else value) for value in args]
        parameters = (ctypes.c_void_p * len(held))(*(value.ctypes.data for value in held))
        attribute = _LaunchAttribute(PROGRAMMATIC_STREAM_SERIALIZATION, 1)
        sizes = [(*numbers, 1, 1, 1)[:3] for numbers in (grid, block)]
        config = _LaunchConfig((ctypes.c_uint * 3)(*sizes[0]), (ctypes.c_uint * 3)(*sizes[1]), shared,
                               self._stream().ptr, ctypes.pointer(attribute), 1)
        launch = _driver("cuLaunchKernelEx")
        answer = launch(ctypes.byref(config), ctypes.c_void_p(self._function.ptr), parameters, None)
        if answer:
            raise RuntimeError(f"{self.name}: cuLaunchKernelEx gives CUresult {answer} for a grid of {tuple(grid)} "
                               f"blocks of {tuple(block)} threads with {shared} bytes of dynamic shared memory")
