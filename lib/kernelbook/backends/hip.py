"""AMD and Hygon GPUs through a CuPy built for ROCm, whose calls are the same. Not yet run on hardware.

Kernels are compiled for the device's architecture by hiprtc, which that CuPy reaches under NVRTC's name; for Hygon's
gfx936 and gfx928 by the hipcc of DTK where `toolchain.dtk_hipcc` finds it. Which instructions a build takes is decided
in kernels/portable/hip.h, by the macro that the compiler defines for its target.
"""

from kernelbook import toolchain
from kernelbook.backends.cuda import CupyBackend, CupyKernel
from kernelbook.backends.source import BackendUnavailable, CompileError, Source

MATRIX = {"gfx90a": ("mfma",), "gfx942": ("mfma",), "gfx950": ("mfma",)} | dict.fromkeys(toolchain.HYGON, ("mmac",))
"""Matrix instructions of an architecture that kernels are written for, as hip.h has them."""


class HipBackend(CupyBackend):
    """The current HIP device. Raises BackendUnavailable where there is none, or where its waves have not 64 lanes.
    See backends.Backend."""

    name = "hip"

    def __init__(self):
        try:
            import cupy
        except Exception as error:  # a CuPy that does not fit the machine may fail in any way it likes
            raise BackendUnavailable(f"cupy does not import ({error}); on a machine with ROCm or DTK install the CuPy "
                                     "built for it") from error
        runtime = cupy.cuda.runtime
        if not runtime.is_hip:
            raise BackendUnavailable("no AMD or Hygon GPU for this CuPy, which is built for CUDA; install one built "
                                     "for ROCm, or for DTK, in an environment of its own")
        try:
            count = runtime.getDeviceCount()
        except runtime.CUDARuntimeError as error:
            raise BackendUnavailable(f"no AMD or Hygon GPU: {error}; see whether rocminfo lists one and whether this "
                                     "user may open /dev/kfd") from error
        if count == 0:
            raise BackendUnavailable("no AMD or Hygon GPU: the driver lists none (HIP_VISIBLE_DEVICES may hide it)")
        super().__init__(cupy)
        self.wave = self._properties["warpSize"]
        self.arch = architecture(self._properties["gcnArchName"])
        self.matrix = MATRIX.get(self.arch, ())
        self.shared_limit = self._properties["sharedMemPerBlock"]
        if self.wave != 64:
            raise BackendUnavailable(f"{self.device} ({self.arch}) has waves of {self.wave} lanes; "
                                     f"kernels/portable/hip.h is written for 64, as {', '.join(MATRIX)} have them")

    def _module(self, source) -> "HipModule":
        return HipModule(self, source)


def architecture(name: bytes | str) -> str:
    """What a compiler calls the device: gcnArchName without the features that are switched on or off.

    b"gfx942:sramecc+:xnack-" is "gfx942". Raises BackendUnavailable for a name of another kind.
    """
    text = (name.decode() if isinstance(name, bytes) else name).strip("\0 ")
    arch = text.partition(":")[0]
    if not arch.startswith("gfx") or not arch[3:].isalnum():
        raise BackendUnavailable(f"the device calls its architecture {text!r}; expected a name such as "
                                 "'gfx942:sramecc+:xnack-'")
    return arch


def options(source: Source, arch: str) -> list[str]:
    """What hiprtc is told."""
    return [f"--offload-arch={arch}", *toolchain.HIP_OPTIONS, *source.flags]


class HipModule:
    def __init__(self, backend: HipBackend, source: Source):
        self.source, self.backend = source, backend
        if backend.arch in toolchain.HYGON and toolchain.dtk_hipcc():
            binary = toolchain.compile_hip(source, backend.arch).binary
        else:
            binary = _hiprtc(backend.xp.cuda.nvrtc, source, backend.arch)
        self.code = toolchain.read_amd_binary(binary)
        for name, resources in self.code.resources.items():
            if resources["wave"] != backend.wave:
                raise CompileError(source, f"the compiler for {backend.arch}", f"{name} is compiled for waves of "
                                   f"{resources['wave']} lanes, and the device has {backend.wave}")
        self._module = backend.xp.cuda.function.Module()
        self._module.load(binary)

    def kernel(self, name: str) -> "HipKernel":
        if name not in self.code.resources:
            raise ValueError(f"{self.source.path} has no kernel {name!r} on {self.backend.arch}; "
                             f"there are: {', '.join(self.code.resources) or 'none'}")
        return HipKernel(self, name)


def _hiprtc(nvrtc, source: Source, arch: str) -> bytes:
    """A code object, from CuPy's binding to hiprtc."""
    headers, names = ([text.encode() for text in part] for part in (source.headers.values(), source.headers))
    program = nvrtc.createProgram(source.text, source.path, headers, names)
    try:
        nvrtc.compileProgram(program, options(source, arch))
        code = nvrtc.getPTX(program)  # hiprtcGetCode
        return code + bytes(-len(code) % 8)  # CuPy drops the last byte, as `toolchain.nvrtc_compile` says
    except nvrtc.NVRTCError as error:
        raise CompileError(source, f"hiprtc for {arch}", nvrtc.getProgramLog(program) or str(error)) from error
    finally:
        nvrtc.destroyProgram(program)


class HipKernel(CupyKernel):
    def __init__(self, module: HipModule, name: str):
        super().__init__(module.backend.xp, module._module.get_function(name), name)
        self._static = module.code.resources[name]["shared_bytes"]
        self._limit = module.backend.shared_limit

    def _allow(self, shared: int):
        if self._static + shared > self._limit:
            raise ValueError(f"{self.name} would take {self._static} + {shared} bytes of shared memory; a block has "
                             f"{self._limit} here")
