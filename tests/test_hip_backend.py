"""The HIP backend on a stand-in for CuPy: its options, which source and compiler it takes, what it reads back from the
code object, and its refusals. The kernels in it are compiled for real, offline; none of it has run on a GPU."""

import stat
import sys
import types

import numpy as np
import pytest

from kernelbook import backends, toolchain
from kernelbook.backends import BackendUnavailable, CompileError, Source, hip

amd = pytest.mark.skipif(toolchain.targets()["gfx942"] is not None, reason=str(toolchain.targets()["gfx942"]))
GEMM = Source("grouped_gemm/1_int8_activations.cu", {"GROUP": 32, "CARRY": 1, "GROUP_SUMS": 0})
ATTENTION = Source("int8_pv/2_decode.cu", {"HEAD_DIM": 64, "SCALE_TOKENS": 32, "READ": 16, "LOGICAL_GROUPS": 0,
                                           "COMMON_SCALE": 0, "PV": "INT8", "PARTITION": 256, "TRACE": 0})


class CUDARuntimeError(RuntimeError):
    pass


class Rtc:
    """Stands in for CuPy's binding to hiprtc: compiles with the clang in ziglang, drops the last byte as CuPy does."""

    class NVRTCError(RuntimeError):
        pass

    def __init__(self):
        self.programs, self.options, self.destroyed = {}, None, 0

    def createProgram(self, text, name, headers, names):
        self.programs[1] = (text, name, headers, names)
        return 1

    def compileProgram(self, program, options):
        self.options = options

    def getPTX(self, program):
        arch = self.options[0].removeprefix("--offload-arch=")
        path = self.programs[program][1]
        source = next(source for source in (GEMM, ATTENTION) if source.path == path)
        return toolchain.compile_hip(source, arch).binary[:-1]

    def getCUBIN(self, program):
        raise self.NVRTCError("HIPRTC_ERROR_COMPILATION")

    def getProgramLog(self, program):
        return "1_int8_activations.cu:7:1: error: planted"

    def destroyProgram(self, program):
        self.destroyed += 1


class Module:
    loaded: list = []

    def load(self, binary):
        self.binary = binary
        Module.loaded.append(binary)

    def get_function(self, name):
        return lambda grid, block, args, shared_mem: self.launches.append((name, grid, block, args, shared_mem))

    launches: list = []


def install(monkeypatch, arch=b"gfx942:sramecc+:xnack-", wave=64, count=lambda: 1, is_hip=True):
    properties = {"name": b"a card", "multiProcessorCount": 304, "l2CacheSize": 4 << 20, "warpSize": wave,
                  "gcnArchName": arch, "sharedMemPerBlock": 64 << 10, "major": 9, "minor": 4}
    cupy = types.ModuleType("cupy")
    cupy.ndarray = np.ndarray
    cupy.cuda = types.SimpleNamespace(
        runtime=types.SimpleNamespace(is_hip=is_hip, getDeviceCount=count, CUDARuntimeError=CUDARuntimeError,
                                      getDeviceProperties=lambda device: properties),
        Device=lambda: types.SimpleNamespace(id=0), nvrtc=Rtc(), function=types.SimpleNamespace(Module=Module))
    monkeypatch.setitem(sys.modules, "cupy", cupy)
    monkeypatch.setenv("DTKROOT", "/nowhere")
    Module.loaded, Module.launches = [], []
    return cupy


# ---- what the device is

@pytest.mark.parametrize("name, arch", [(b"gfx942:sramecc+:xnack-", "gfx942"), (b"gfx90a:xnack-\0\0", "gfx90a"),
                                        ("gfx936", "gfx936"), (b"gfx928:xnack-", "gfx928")])
def test_features_are_no_part_of_an_architecture(name, arch):
    assert hip.architecture(name) == arch


@pytest.mark.parametrize("name", [b"", b"sm_90", b"gfx", b"gfx 942"])
def test_an_unknown_name_of_an_architecture_is_shown(name):
    with pytest.raises(BackendUnavailable, match="expected a name such as 'gfx942"):
        hip.architecture(name)


@pytest.mark.parametrize("arch, matrix", [(b"gfx942:sramecc+", ("mfma",)), (b"gfx90a", ("mfma",)),
                                          (b"gfx936", ("mmac",)), (b"gfx928", ("mmac",)), (b"gfx908", ())])
def test_the_device_is_asked_for_its_wave_and_architecture(monkeypatch, arch, matrix):
    install(monkeypatch, arch)
    backend = backends.get("hip")
    assert (backend.name, backend.wave, backend.matrix, backend.simulated) == ("hip", 64, matrix, False)
    assert (backend.device, backend.multiprocessors) == ("a card", 304)
    assert backends.get().name == "hip", "the device at hand comes before the simulator"


def test_waves_of_32_lanes_are_refused(monkeypatch):
    install(monkeypatch, b"gfx1100", wave=32)
    with pytest.raises(BackendUnavailable, match=r"a card \(gfx1100\) has waves of 32 lanes; .* is written for 64"):
        backends.get("hip")


# ---- where there is none

def broken_driver():
    raise CUDARuntimeError("hipErrorNoDevice: no ROCm-capable device is detected")


@pytest.mark.parametrize("changes, words", [
    ({"count": lambda: 0}, "the driver lists none .*HIP_VISIBLE_DEVICES"),
    ({"count": broken_driver}, "hipErrorNoDevice.*rocminfo.*/dev/kfd"),
    ({"is_hip": False}, "built for CUDA; install one built for ROCm, or for DTK"),
])
def test_no_device(monkeypatch, changes, words):
    install(monkeypatch, **changes)
    with pytest.raises(BackendUnavailable, match=words):
        backends.get("hip")


def test_no_cupy_at_all(monkeypatch):
    monkeypatch.setitem(sys.modules, "cupy", None)
    with pytest.raises(BackendUnavailable, match="cupy does not import.*built for it"):
        backends.get("hip")


def test_a_cupy_for_rocm_is_no_cuda(monkeypatch):
    install(monkeypatch)
    with pytest.raises(BackendUnavailable, match="built for ROCm; the backend 'hip' takes it"):
        backends.get("cuda")


# ---- compiling and launching

def test_options_name_the_architecture_and_leave_sums_uncontracted():
    assert hip.options(GEMM, "gfx942") == ["--offload-arch=gfx942", "-O3", "-std=c++20", "-ffp-contract=off",
                                           "-DGROUP=32", "-DCARRY=1", "-DGROUP_SUMS=0"]


@amd
def test_a_kernel_goes_through_hiprtc_and_is_launched(monkeypatch):
    cupy = install(monkeypatch)
    module = backends.get("hip").compile(GEMM)
    text, path, headers, names = cupy.cuda.nvrtc.programs[1]
    assert (text, path) == (GEMM.text, GEMM.path) and b"hip.h" in names and len(headers) == len(names)
    assert cupy.cuda.nvrtc.options == hip.options(GEMM, "gfx942") and cupy.cuda.nvrtc.destroyed == 1
    assert Module.loaded == [toolchain.compile_hip(GEMM, "gfx942").binary], "the byte that CuPy drops is back"
    assert module.code.symbols == {"grouped_gemm_int8.kd"}

    kernel = module.kernel("grouped_gemm_int8")
    x = np.zeros(4)
    kernel((2, 1, 1), (64, 4, 1), [x, None, np.int32(3)], shared=1 << 10)
    assert Module.launches == [("grouped_gemm_int8", (2, 1, 1), (64, 4, 1), [x, 0, 3], 1 << 10)]
    with pytest.raises(TypeError, match="argument 0 is a int"):
        kernel((1, 1, 1), (64, 4, 1), [3])
    with pytest.raises(ValueError, match=r"no kernel 'gemm' on gfx942; there are: grouped_gemm_int8"):
        module.kernel("gemm")


@amd
def test_shared_memory_beyond_the_device_is_refused_before_the_launch(monkeypatch):
    install(monkeypatch)
    kernel = backends.get("hip").compile(ATTENTION).kernel("decode")
    own = toolchain.compile_hip(ATTENTION, "gfx942").resources["decode"]["shared_bytes"]
    assert own > 0
    kernel((1, 1, 1), (64, 4, 1), [], shared=(64 << 10) - own)
    with pytest.raises(ValueError, match=rf"decode would take {own} \+ {(64 << 10) - own + 1} bytes .* has 65536 here"):
        kernel((1, 1, 1), (64, 4, 1), [], shared=(64 << 10) - own + 1)
    assert len(Module.launches) == 1


def test_an_error_of_hiprtc_shows_the_line(monkeypatch):
    cupy = install(monkeypatch)

    def fail(program, options):
        raise Rtc.NVRTCError("HIPRTC_ERROR_COMPILATION (6)")
    monkeypatch.setattr(cupy.cuda.nvrtc, "compileProgram", fail)
    with pytest.raises(CompileError, match="hiprtc for gfx942") as caught:
        backends.get("hip").compile(GEMM)
    assert caught.value.line == 7 and "error: planted" in str(caught.value) and cupy.cuda.nvrtc.destroyed == 1


@amd
def test_code_for_another_wave_is_refused(monkeypatch):
    install(monkeypatch)
    read = toolchain.read_amd_binary

    def narrow(binary):
        code = read(binary)
        for resources in code.resources.values():
            resources["wave"] = 32
        return code
    monkeypatch.setattr(toolchain, "read_amd_binary", narrow)
    with pytest.raises(CompileError, match="compiled for waves of 32 lanes, and the device has 64"):
        backends.get("hip").compile(GEMM)


@amd
def test_hygons_compiler_is_taken_where_it_is_found(monkeypatch, tmp_path):
    """A stand-in for DTK's hipcc, which notes what it is told and answers with a code object for gfx942."""
    cupy = install(monkeypatch, b"gfx936")
    made = toolchain.compile_hip(GEMM, "gfx942")
    (tmp_path / "made.s").write_text(made.assembly)
    (tmp_path / "made.hsaco").write_bytes(made.binary)
    hipcc = tmp_path / "bin" / "hipcc"
    hipcc.parent.mkdir()
    hipcc.write_text(f"""#!/bin/sh
if [ "$1" = --version ]; then echo "DCC version 26.04, a stand-in"; exit; fi
echo "$@" >> {tmp_path}/told
for last; do :; done
cp {tmp_path}/made.${{last#kernel.}} $last
""")
    hipcc.chmod(hipcc.stat().st_mode | stat.S_IXUSR)
    monkeypatch.setenv("DTKROOT", str(tmp_path))
    monkeypatch.setenv("KERNELBOOK_CACHE", str(tmp_path / "cache"))
    backends.get("hip").compile(GEMM)
    assert cupy.cuda.nvrtc.programs == {} and Module.loaded == [made.binary]
    hip_line = ("-x hip --offload-arch=gfx936 --offload-device-only -Iinclude -O3 -std=c++20 -ffp-contract=off "
                "-DGROUP=32 -DCARRY=1 -DGROUP_SUMS=0")
    assert (tmp_path / "told").read_text().splitlines() == [
        f"{hip_line} -S 1_int8_activations.cu -o kernel.s",
        f"{hip_line} --no-gpu-bundle-output -c 1_int8_activations.cu -o kernel.hsaco"]
    assert toolchain.compile_hip(GEMM, "gfx936").compiler == f"{hipcc} (DCC version 26.04, a stand-in)"
    assert toolchain.targets()["gfx936"] is None


def test_without_hygons_compiler_hiprtc_is_asked(monkeypatch):
    cupy = install(monkeypatch, b"gfx936")
    monkeypatch.setattr(Rtc, "getPTX", lambda self, program: b"not an ELF file")
    with pytest.raises(ValueError, match="no code object of an AMD GPU .*: it begins with b'not an ELF"):
        backends.get("hip").compile(GEMM)
    assert cupy.cuda.nvrtc.options[0] == "--offload-arch=gfx936"
