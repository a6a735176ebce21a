"""One interface over the places where a kernel can run: an NVIDIA GPU (`cuda`), an AMD or Hygon GPU (`hip`) or the CPU
wave simulator (`cpu`).

    backend = backends.get()                        # cuda or hip where there is a device, else cpu
    module = backend.compile("grouped_gemm/2_float_activations.cu", {"GROUP": 32})
    x, y = backend.array(host), backend.empty((4, 8), "float32")
    module.kernel("gemm")(grid=(8, 1, 1), block=(64, 4, 1), args=[x, y, np.int32(4)])
    backend.numpy(y)
"""

from typing import Any, Protocol

from kernelbook.backends.source import BackendUnavailable, CompileError, Source

__all__ = ["Backend", "BackendUnavailable", "CompileError", "Kernel", "Module", "Source", "available", "get"]


class Kernel(Protocol):
    """A compiled kernel, launched like cuLaunchKernel."""

    name: str

    def __call__(self, grid: tuple, block: tuple, args: list, shared: int = 0, overlap: bool = False) -> None:
        """Launch with `grid` blocks of `block` threads (1 to 3 numbers each) and `shared` bytes of dynamic
        shared memory. `args`: device arrays of this backend, None (a null pointer), and NumPy scalars (np.int32(4));
        a plain Python number is a TypeError, since its width would be a guess.

        overlap: it may begin while the launch before it ends, where the device can do that (programmatic dependent
        launch, NVIDIA from sm_90); the kernel itself awaits that launch before it reads what launches write.
        """


class Module(Protocol):
    """The kernels of one compiled source file."""

    source: Source

    def kernel(self, name: str) -> Kernel: ...


class Backend(Protocol):
    name: str  # "cuda", "hip" or "cpu"
    simulated: bool  # True: results count, times do not
    device: str  # what it runs on, in words
    wave: int  # lanes in a wave
    matrix: tuple[str, ...]  # families of matrix instructions: "mma", "mfma", "mmac"; the first is taken by default
    multiprocessors: int  # that blocks spread over

    def compile(self, source: str | Source, defines: dict | None = None) -> Module:
        """The kernels of a file; kept, so that compiling the same text again costs nothing. Raises CompileError."""

    def array(self, host: Any) -> Any:
        """A contiguous copy on the device of a NumPy array, of anything np.asarray takes, or of a device array."""

    def empty(self, shape: tuple | int, dtype: Any) -> Any:
        """An array on the device with every byte 0xFF: NaN as a float, -1 as an integer."""

    def numpy(self, array: Any) -> Any:
        """A copy of a device array as a NumPy array, once all launches before it have ended."""

    def synchronize(self) -> None:
        """Return once everything queued has ended."""

    def owns(self, array: Any) -> bool:
        """Whether `array` is an array on this device."""

    def pointer(self, array: Any) -> int:
        """Address of the array's first byte."""

    def pinned(self, shape: tuple, dtype: Any) -> Any:
        """A NumPy array in memory that the device copies from and to without staging."""

    def copy_in(self, device: Any, host: Any) -> None:
        """Queue a copy of a contiguous host array into a device array; `host` must live until it has ended."""

    def copy_out(self, host: Any, device: Any) -> None:
        """Queue a copy of a device array into a contiguous host array."""

    def copy_out_blocking(self, host: Any, device: Any) -> None:
        """The same, returning when the bytes are there."""


def get(name: str | None = None) -> Backend:
    """The backend called `name` ("cuda", "hip", "cpu"), or, for None, that of the device at hand and cpu without one.

    Raises BackendUnavailable where it cannot run, ValueError where there is no such backend.
    """
    if name is None:
        name = next((gpu for gpu in ("cuda", "hip") if available()[gpu] is None), "cpu")
    if name == "cuda":
        from kernelbook.backends.cuda import CudaBackend
        return CudaBackend()
    if name == "hip":
        from kernelbook.backends.hip import HipBackend
        return HipBackend()
    if name == "cpu":
        from kernelbook.backends.cpu import CpuBackend
        return CpuBackend()
    raise ValueError(f"no backend {name!r}; there are 'cuda', 'hip' and 'cpu'")


def available() -> dict[str, str | None]:
    """Every backend's name with None where it can run here, else with the reason why not."""
    reasons: dict[str, str | None] = {}
    for name in ("cuda", "hip", "cpu"):
        try:
            get(name)
            reasons[name] = None
        except BackendUnavailable as error:
            reasons[name] = str(error)
    return reasons
