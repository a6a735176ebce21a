"""Compiles for GPUs that are not there, and what the machine code says without being run.

    source = Source("grouped_gemm/2_float_activations.cu", {"GROUP": 32, "REMAP": 1})
    cubin, log = nvrtc_compile(source, "90a")
    rows = evidence(source)             # registers, spills, instructions per MAC on every target
    rows = survey(sources)              # the same of many
    kernel = compile_cuda(source, "90a").kernels["grouped_gemm_float"]
    kernel.opcodes["FFMA"], kernel.hot_loop.span, per_mac(kernel).instructions

NVIDIA code is compiled by NVRTC through CuPy and disassembled by nvdisasm, AMD code by the clang in the wheel
ziglang, Hygon's by the hipcc of its DTK or, without one, by that clang as far as instructions as text. Results are
kept in the cache of compiled objects.

A MAC here is one multiply-accumulate of one lane. The lanes of a wave (or warpgroup) share a matrix
instruction, so each counts its part of it: IMMA.16832 does 16 * 8 * 32 / 32 = 128 MACs a lane.
"""

import contextlib
import functools
import hashlib
import importlib.metadata
import importlib.util
import math
import os
import re
import shutil
import struct
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import NamedTuple

import yaml

from kernelbook.backends import cache, compiler
from kernelbook.backends.source import BackendUnavailable, CompileError, Source

NVIDIA = ("80", "89", "90a", "100", "120")
"""Ampere, Ada, Hopper, datacenter Blackwell, consumer Blackwell."""

AMD = ("gfx90a", "gfx942", "gfx950")
"""CDNA2, CDNA3, CDNA4."""

HYGON = ("gfx936", "gfx928")
"""DCUs. kernels/portable/hip.h gives both the same code, and the first stands for both in tables."""

HYGON_STAND_IN = "gfx906"
"""The target of public LLVM whose instructions the DCUs share, apart from v_mmac, which is inline assembly."""

DTK = Path("/opt/dtk")
"""Where Hygon's DTK is installed, unless its environment says otherwise in DTKROOT."""


# -------------------------------------------------------------------------------------------------- compilers

def targets() -> dict[str, str | None]:
    """Every target, "sm_80" to "gfx936", with None where this machine can compile for it and read the result,
    else with the reason why not."""
    def reason(*tools: Callable) -> str | None:
        try:
            for tool in tools:
                tool()
        except BackendUnavailable as error:
            return str(error)
        return None

    nvidia, amd = reason(_nvrtc, _nvdisasm), reason(_ziglang)
    return ({f"sm_{arch}": nvidia for arch in NVIDIA} | {arch: amd for arch in AMD}
            | {HYGON[0]: None if dtk_hipcc() else amd})


def nvrtc_version() -> tuple[int, int]:
    """Version of the NVRTC that CuPy has loaded, (12, 9). Raises BackendUnavailable."""
    return _nvrtc().getVersion()


def nvrtc_compile(source: Source, arch: str, extra_options: Iterable[str] = ()) -> tuple[bytes, str]:
    """A cubin of `source` for `arch` ("80", "90a", ...), and NVRTC's log, for `resources` to read.

    Needs no GPU. Raises CompileError with the source line, BackendUnavailable without CuPy or NVRTC, and
    ValueError where this NVRTC does not know the architecture.
    """
    nvrtc = _nvrtc()
    version = ".".join(map(str, nvrtc.getVersion()))
    known = nvrtc.getSupportedArchs()
    if not re.fullmatch(r"\d+[af]?", arch) or int(arch.rstrip("af")) not in known:
        raise ValueError(f"NVRTC {version} has no architecture {arch!r}; it has "
                         f"{', '.join(map(str, known))}, some with the suffix 'a'")
    options = [f"--gpu-architecture=sm_{arch}", "--std=c++20", "--device-as-default-execution-space",
               "--generate-line-info", "--ptxas-options=-v",
               *(f"--include-path={folder}" for folder in _cuda_includes()), *source.flags, *extra_options]

    def build() -> tuple[bytes, bytes]:
        headers, names = ([text.encode() for text in part] for part in (source.headers.values(), source.headers))
        program = nvrtc.createProgram(source.text, source.path, headers, names)
        try:
            nvrtc.compileProgram(program, options)
            cubin = nvrtc.getCUBIN(program)
            # CuPy takes the last byte for a string's terminator and drops it. It is a zero, the end of the
            # last 8-byte field of the ELF file; the driver does not miss it, nvdisasm does.
            return cubin + bytes(-len(cubin) % 8), nvrtc.getProgramLog(program).encode()
        except nvrtc.NVRTCError as error:
            log = nvrtc.getProgramLog(program)
            raise CompileError(source, f"NVRTC {version}", log or str(error)) from error
        finally:
            nvrtc.destroyProgram(program)

    cubin, log = _cached(_key(source.hash, version, *options), (".cubin", ".log"), build)
    return cubin, log.decode()


@dataclass(frozen=True)
class CodeObject:
    """What a compiler made of one source for one target.

    target: "sm_90a", "gfx942". compiler: its name and version. binary: cubin or HSA code object; empty where the
    compiler cannot assemble for the target. assembly: its instructions as text. resources: by kernel, see `resources`
    and `compile_hip`.
    """

    target: str
    compiler: str
    binary: bytes
    assembly: str
    resources: dict[str, dict[str, int]]
    kernels: dict[str, "Kernel"]


def compile_cuda(source: Source, arch: str, extra_options: Iterable[str] = ()) -> CodeObject:
    """Compile as `nvrtc_compile` does, and disassemble. Raises what that and `disassemble` raise."""
    cubin, log = nvrtc_compile(source, arch, extra_options)
    version = ".".join(map(str, nvrtc_version()))
    listing = disassemble(cubin)
    return CodeObject(f"sm_{arch}", f"NVRTC {version}", cubin, listing, resources(log), _parse_sass(listing))


HIP_OPTIONS = ("-O3", "-std=c++20", "-ffp-contract=off")
"""For every compiler of HIP. No contraction: clang would also contract __fmul_rn and __fadd_rn, which CUDA leaves
apart."""


def compile_hip(source: Source, arch: str, extra_options: Iterable[str] = ()) -> CodeObject:
    """A code object of `source` for `arch` ("gfx942", "gfx936", ...), made without ROCm by the clang in ziglang or, for
    one of `HYGON`, by the hipcc of Hygon's DTK where there is one.

    Its resources, by kernel: registers (VGPRs with AGPRs), agprs, sgprs, spill_bytes (4 a spilled VGPR),
    sgpr_spills, stack_bytes, shared_bytes (static LDS), kernarg_bytes, block_limit (threads). Bytes are per
    thread, those of LDS per block, of kernarg per launch.
    Without DTK, code for `HYGON` ends as assembly for `HYGON_STAND_IN` with v_mmac in it: there is no binary, and
    registers, spills and stack are None, being those of another target.
    Raises CompileError with the source line, BackendUnavailable without a compiler.
    """
    hipcc = dtk_hipcc() if arch in HYGON else None
    assembled = arch not in HYGON or hipcc is not None
    if hipcc:
        name = f"{hipcc} ({_dtk_version(hipcc)})"
    else:
        name = f"clang of ziglang {_ziglang()}" + ("" if assembled else f", as for {HYGON_STAND_IN} and not assembled")
    commands = hip_commands(Path(source.path).name, arch, (*source.flags, *extra_options), hipcc)

    def build() -> tuple[bytes, bytes]:
        with tempfile.TemporaryDirectory() as folder:
            for file, text in {**{f"include/{h}": text for h, text in source.headers.items()},
                               Path(source.path).name: source.text}.items():
                path = Path(folder, file)
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_text(text, encoding="utf-8")
            for command in commands:
                try:
                    done = compiler.call(command, folder)
                except TimeoutError as error:
                    raise CompileError(source, f"{name} for {arch}", str(error)) from error
                if done.returncode:
                    raise CompileError(source, f"{name} for {arch}", done.stderr)
            return (Path(folder, "kernel.hsaco").read_bytes() if assembled else b"",
                    Path(folder, "kernel.s").read_bytes())

    binary, assembly = _cached(_key(source.hash, name, *(word for command in commands for word in command)),
                               (".hsaco", ".s"), build)
    text = assembly.decode()
    used = _amd_resources(_metadata_of_assembly(text))
    if not assembled:
        unknown = dict.fromkeys(("registers", "agprs", "sgprs", "spill_bytes", "sgpr_spills", "stack_bytes"))
        used = {kernel: figures | unknown for kernel, figures in used.items()}
    return CodeObject(arch, name, binary, text, used, _parse_amdgcn(text, used))


def hip_commands(file: str, arch: str, options: Iterable[str] = (), hipcc: str | None = None) -> list[list[str]]:
    """The commands that make kernel.s and kernel.hsaco of `file`, whose headers lie in include/.

    hipcc: that of Hygon's DTK; None takes the clang in ziglang, which makes no kernel.hsaco for one of `HYGON`.
    """
    options = ["-Iinclude", *HIP_OPTIONS, *options]
    if hipcc:
        hip = [hipcc, "-x", "hip", f"--offload-arch={arch}", "--offload-device-only", *options]
        return [[*hip, "-S", file, "-o", "kernel.s"],
                [*hip, "--no-gpu-bundle-output", "-c", file, "-o", "kernel.hsaco"]]
    zig = [sys.executable, "-m", "ziglang"]
    known, itself = (HYGON_STAND_IN, [f"-D__{arch}__"]) if arch in HYGON else (arch, [])
    compiles = [*zig, "clang", "-x", "hip", f"--offload-arch={known}", "--offload-device-only", "-nogpulib",
                "-nogpuinc", "-nostdinc", *itself, *options, "-S", file, "-o", "kernel.s"]
    if arch in HYGON:
        return [compiles]
    return [compiles,
            [*zig, "clang", "--target=amdgcn-amd-amdhsa", f"-mcpu={arch}", "-c", "kernel.s", "-o", "kernel.o"],
            [*zig, "ld.lld", "-m", "elf64_amdgpu", "--no-undefined", "-shared", "kernel.o", "-o", "kernel.hsaco"]]


def dtk_hipcc() -> str | None:
    """The hipcc of Hygon's DTK, None where there is none."""
    hipcc = Path(os.environ.get("DTKROOT") or DTK, "bin", "hipcc")
    return str(hipcc) if os.access(hipcc, os.X_OK) else None


@functools.cache
def _dtk_version(hipcc: str) -> str:
    """What hipcc says of its version, in a line."""
    answer = compiler.call([hipcc, "--version"], timeout_s=60)
    return next(iter(answer.stdout.splitlines()), "it names no version").strip()


def disassemble(cubin: bytes) -> str:
    """nvdisasm's listing of a cubin's code.

    Raises BackendUnavailable without nvdisasm, ValueError where it refuses the cubin, TimeoutError where it hangs.
    """
    nvdisasm = _nvdisasm()

    def build() -> tuple[bytes]:
        with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
            file.write(cubin)
            file.flush()
            done = compiler.call([nvdisasm, "--print-code", file.name])
        if done.returncode:
            raise ValueError(f"{nvdisasm}: {done.stderr.strip()}")
        return (done.stdout.encode(),)

    listing, = _cached(hashlib.sha256(cubin).hexdigest(), (".sass",), build)
    return listing.decode()


def sass(cubin: bytes) -> dict[str, "Kernel"]:
    """The kernels in a cubin, by name, as instructions. Raises what `disassemble` raises."""
    return _parse_sass(disassemble(cubin))


def _key(*parts: str) -> str:
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()


def _cached(key: str, suffixes: tuple[str, ...], build: Callable[[], tuple[bytes, ...]]) -> list[bytes]:
    """The cached files `key + suffix`; where one is missing, one call of `build` makes all."""
    once = functools.cache(build)
    return [cache.get(key + suffix, lambda path, i=i: path.write_bytes(once()[i])).read_bytes()
            for i, suffix in enumerate(suffixes)]


def _nvrtc():
    """CuPy's binding to NVRTC, with the library loaded."""
    try:
        from cupy.cuda import nvrtc
        nvrtc.getVersion()
    except (ImportError, RuntimeError, OSError) as error:
        why = str(error).partition("\n")[0]
        raise BackendUnavailable(
            f"NVRTC, the CUDA compiler, does not load ({why}); pip install cupy-cuda12x "
            "'nvidia-cuda-nvrtc-cu12==12.9.*' 'nvidia-cuda-runtime-cu12==12.9.*' or, for CUDA 13, "
            "cupy-cuda13x nvidia-cuda-nvrtc nvidia-cuda-runtime") from error
    return nvrtc


@functools.cache
def _cuda_includes() -> tuple[str, ...]:
    """Where <cuda_fp16.h> and its like are: in a wheel, a conda environment or a CUDA toolkit."""
    with contextlib.suppress(ImportError):
        from cuda.pathfinder import find_nvidia_header_directory
        found = find_nvidia_header_directory("cudart")
        return (found,) if found else ()
    home = os.environ.get("CUDA_HOME") or os.environ.get("CUDA_PATH")
    return (f"{home}/include",) if home else ()


@functools.cache
def _nvdisasm() -> str:
    """nvdisasm in a wheel, a conda environment or a CUDA toolkit."""
    with contextlib.suppress(ImportError):
        from cuda.pathfinder import find_nvidia_binary_utility
        if found := find_nvidia_binary_utility("nvdisasm"):
            return found
    nvcc = shutil.which("nvcc")
    beside_nvcc = str(Path(nvcc).resolve().parent) if nvcc else None
    for folders in (None, beside_nvcc):
        if found := shutil.which("nvdisasm", path=folders):
            return found
    raise BackendUnavailable("nvdisasm, which reads NVIDIA machine code, is in no wheel, no CUDA_HOME and not on "
                             "PATH; pip install nvidia-cuda-nvdisasm")


def _ziglang() -> str:
    """Version of the wheel ziglang."""
    if importlib.util.find_spec("ziglang") is None:
        raise BackendUnavailable("clang for AMD GPUs is missing; pip install ziglang==0.17.1")
    return importlib.metadata.version("ziglang")


# -------------------------------------------------------------------------------------------------- resources

def resources(log: str) -> dict[str, dict[str, int]]:
    """What each kernel takes, from the log of ptxas -v (NVRTC's, or nvcc's).

    By kernel: registers, spill_bytes (the sum of the next two), spill_store_bytes, spill_load_bytes,
    stack_bytes, shared_bytes (static), barriers. Bytes are per thread, those of shared memory per block.
    Raises ValueError where a kernel is named without its figures.
    """
    found = {}
    for block in log.split("Compiling entry function '")[1:]:
        name = block[:block.index("'")]
        # ptxas also lists the functions a kernel calls: take the lines under the kernel's own name.
        frame = re.search(rf"Function properties for {re.escape(name)}\s[^\n]*?(\d+) bytes stack frame, "
                          r"(\d+) bytes spill stores, (\d+) bytes spill loads", block.replace("\n", " "))
        used = re.search(r"Used (\d+) registers.*", block)
        if not (frame and used):
            raise ValueError(f"ptxas names kernel {name} without its registers and spills:\n{block.strip()}")
        stack, stores, loads = map(int, frame.groups())
        barriers = re.search(r"used (\d+) barriers", used[0])
        shared = re.search(r"(\d+) bytes smem", used[0])
        found[name] = {"registers": int(used[1]), "spill_bytes": stores + loads, "spill_store_bytes": stores,
                       "spill_load_bytes": loads, "stack_bytes": stack,
                       "shared_bytes": int(shared[1]) if shared else 0,
                       "barriers": int(barriers[1]) if barriers else 0}
    return found


def _metadata_of_assembly(assembly: str) -> dict:
    return yaml.safe_load(re.search(r"\.amdgpu_metadata\n---\n(.*?)\n\.\.\.\n", assembly, re.S)[1])


def _amd_resources(metadata: dict) -> dict[str, dict[str, int]]:
    return {kernel[".name"]: {"registers": kernel[".vgpr_count"], "agprs": kernel.get(".agpr_count", 0),
                              "sgprs": kernel[".sgpr_count"], "spill_bytes": 4 * kernel[".vgpr_spill_count"],
                              "sgpr_spills": kernel[".sgpr_spill_count"],
                              "stack_bytes": kernel[".private_segment_fixed_size"],
                              "shared_bytes": kernel[".group_segment_fixed_size"],
                              "kernarg_bytes": kernel[".kernarg_segment_size"],
                              "block_limit": kernel[".max_flat_workgroup_size"]}
            for kernel in metadata.get("amdhsa.kernels") or []}


# ------------------------------------------------------------------------------------- AMD's code objects, read back

@dataclass(frozen=True)
class AmdBinary:
    """What an HSA code object says of itself, whichever compiler made it.

    target: "gfx942". symbols: of the kernels' descriptors, by which a driver finds them ("decode.kd").
    resources: by kernel, as `compile_hip` has them, with wave, the lanes it is compiled for.
    """

    target: str
    symbols: frozenset[str]
    resources: dict[str, dict[str, int]]


def read_amd_binary(binary: bytes) -> AmdBinary:
    """Read a code object as hipModuleLoadData takes it. Raises ValueError where it is none."""
    if binary[:6] != b"\x7fELF\x02\x01" or len(binary) < 64 or binary[18:20] != b"\xe0\0":
        raise ValueError(f"no code object of an AMD GPU (a 64-bit ELF file): it begins with {binary[:24]!r}")
    try:
        sections = _elf_sections(binary)
        notes = next(binary[offset:offset + size] for kind, _, offset, size, _ in sections if kind == _SHT_NOTE)
        names, kind = notes[:12], struct.unpack_from("<I", notes, 8)[0]
        if kind != _NT_AMDGPU_METADATA:
            raise ValueError(f"its note is of kind {kind}, not AMD's metadata ({names!r})")
        name_size, size = struct.unpack_from("<II", notes)
        start = 12 + -(-name_size // 4) * 4
        metadata, _ = _unpack_message(notes[start:start + size])
        symbols = frozenset(_elf_symbols(binary, sections))
    except (struct.error, StopIteration, IndexError, KeyError, UnicodeDecodeError) as error:
        raise ValueError(f"a damaged code object: {type(error).__name__} {error}") from error
    waves = {kernel[".name"]: {"wave": kernel[".wavefront_size"]} for kernel in metadata["amdhsa.kernels"]}
    target = metadata["amdhsa.target"].rpartition("--")[2].partition(":")[0]
    return AmdBinary(target, frozenset(s for s in symbols if s.endswith(".kd")),
                     {name: figures | waves[name] for name, figures in _amd_resources(metadata).items()})


_SHT_NOTE, _SHT_DYNSYM, _NT_AMDGPU_METADATA = 7, 11, 32


def _elf_sections(binary: bytes) -> list[tuple[int, int, int, int, int]]:
    """(type, link, offset, size, size of an entry) of each section."""
    start, = struct.unpack_from("<Q", binary, 40)
    size, count = struct.unpack_from("<HH", binary, 58)
    sections = []
    for i in range(count):
        _, kind, _, _, offset, length, link, _, _, entry = struct.unpack_from("<IIQQQQIIQQ", binary, start + i * size)
        sections.append((kind, link, offset, length, entry))
    return sections


def _elf_symbols(binary: bytes, sections) -> Iterable[str]:
    for kind, link, offset, size, entry in sections:
        if kind == _SHT_DYNSYM:
            names = sections[link][2]
            for at in range(offset, offset + size, entry):
                begin = names + struct.unpack_from("<I", binary, at)[0]
                yield binary[begin:binary.index(b"\0", begin)].decode()


def _unpack_message(data: bytes, at: int = 0):
    """One MessagePack value, of the kinds that AMD's metadata has, and the place behind it."""
    head, at = data[at], at + 1

    def sized(letter):
        return struct.unpack_from(">" + letter, data, at)[0], at + struct.calcsize(letter)

    def several(n, at):
        values = []
        for _ in range(n):
            value, at = _unpack_message(data, at)
            values.append(value)
        return values, at

    if head < 0x80 or head >= 0xe0:                                     # small integers
        return head - (head >= 0xe0) * 256, at
    if head in (0xc0, 0xc2, 0xc3):
        return {0xc0: None, 0xc2: False, 0xc3: True}[head], at
    if head in _MESSAGE_NUMBERS:
        return sized(_MESSAGE_NUMBERS[head])
    if 0xa0 <= head < 0xc0 or head in (0xd9, 0xda, 0xdb):               # strings
        n, at = (head & 31, at) if head < 0xc0 else sized("BHI"[head - 0xd9])
        return data[at:at + n].decode(), at + n
    if 0x90 <= head < 0xa0 or head in (0xdc, 0xdd):                     # arrays
        n, at = (head & 15, at) if head < 0xa0 else sized("HI"[head - 0xdc])
        return several(n, at)
    if 0x80 <= head < 0x90 or head in (0xde, 0xdf):                     # maps
        n, at = (head & 15, at) if head < 0x90 else sized("HI"[head - 0xde])
        values, at = several(2 * n, at)
        return dict(zip(values[::2], values[1::2], strict=True)), at
    raise ValueError(f"metadata with a MessagePack value of kind {head:#x}, which AMD's has not")


_MESSAGE_NUMBERS = {0xca: "f", 0xcb: "d", 0xcc: "B", 0xcd: "H", 0xce: "I", 0xcf: "Q",
                    0xd0: "b", 0xd1: "h", 0xd2: "i", 0xd3: "q"}


# ----------------------------------------------------------------------------------------------- instructions

class Instruction(NamedTuple):
    address: int        # bytes from the kernel's first instruction; AMD assembly has none: the ordinal
    opcode: str         # with all modifiers: "LDG.E.128.CONSTANT", "v_fmac_f32"
    operands: str
    predicate: str      # "@!P0", or ""
    target: int | None  # index of the instruction that a branch or call names


@dataclass(frozen=True)
class Loop:
    """A natural loop. span: addresses of its first and last instruction, with whatever lies between.
    depth: loops around it. instructions: its own, without those of loops inside it, in order of address."""

    span: tuple[int, int]
    depth: int
    instructions: tuple[Instruction, ...]


@dataclass(frozen=True)
class Isa:
    """How to read one instruction set. The regular expressions match an opcode's beginning."""

    arithmetic: re.Pattern
    conversion: re.Pattern      # between integers and floats, and between floats
    load: re.Pattern            # from global, shared, local and scalar memory; no constants
    global_load: re.Pattern
    global_store: re.Pattern
    mnemonic: Callable[[str], str]                          # an opcode without the modifiers that tell little
    bits: Callable[[str], int]                              # width of a lane's memory access
    macs: Callable[[Iterable[Instruction]], int | None]     # of a lane; None where none can be told
    matrix_macs: Callable[[str], int]                       # a matrix instruction's, of all its lanes; 0 of any other
    fused: re.Pattern           # multiply-adds of floats, contracted or fmaf
    dot: re.Pattern             # dot products of bytes or halves
    successors: Callable[[int, Instruction], list[int]]     # indices of what can run next


@dataclass(frozen=True)
class Kernel:
    """The instructions of one kernel, without the padding behind them."""

    name: str
    isa: Isa
    instructions: tuple[Instruction, ...]

    @cached_property
    def opcodes(self) -> Counter:
        """How often each mnemonic stands in the kernel ("FFMA", "IDP.4A", "IMMA.16832", "v_dot4c_i32_i8")."""
        return self.count(self.instructions)

    def count(self, instructions: Iterable[Instruction]) -> Counter:
        return Counter(self.isa.mnemonic(i.opcode) for i in instructions)

    @cached_property
    def global_loads(self) -> dict[int, int]:
        """How many loads from global memory of each width, in bits a lane: {128: 4, 32: 1}."""
        return self._widths(self.isa.global_load)

    @cached_property
    def global_stores(self) -> dict[int, int]:
        """How many stores to global memory of each width, in bits a lane."""
        return self._widths(self.isa.global_store)

    def _widths(self, pattern: re.Pattern) -> dict[int, int]:
        found = Counter(self.isa.bits(i.opcode) for i in self.instructions if pattern.match(i.opcode))
        return dict(sorted(found.items(), reverse=True))

    @cached_property
    def loops(self) -> list[Loop]:
        """Its natural loops, in order of address."""
        return _loops(self)

    @cached_property
    def hot_loop(self) -> Loop | None:
        """The loop whose own instructions do the most MACs or, where none does any, the most arithmetic. A trip
        through a loop is taken to make ten through a loop inside it, as compilers do that know no better."""
        def work(loop):
            arithmetic = sum(bool(self.isa.arithmetic.match(i.opcode)) for i in loop.instructions)
            return (self.isa.macs(loop.instructions) or 0) * 10**loop.depth, arithmetic * 10**loop.depth
        return max(self.loops, key=work, default=None)


def _loops(kernel: Kernel) -> list[Loop]:
    """Natural loops of the control flow graph. Backward branches alone would not do: compilers move rare
    paths behind the kernel's end, and the jump back from there spans code that belongs to no loop."""
    code = kernel.instructions
    after = [[s for s in kernel.isa.successors(i, instruction) if s < len(code)]
             for i, instruction in enumerate(code)]

    # Depth first from the entry. An edge back to an instruction on the path walked closes a loop.
    before: dict[int, list[int]] = {}
    closing = []
    seen, on_path = {0}, {0}
    path = [(0, iter(after[0]))] if code else []
    while path:
        i, rest = path[-1]
        for s in rest:
            before.setdefault(s, []).append(i)
            if s in on_path:
                closing.append((i, s))
            elif s not in seen:
                seen.add(s)
                on_path.add(s)
                path.append((s, iter(after[s])))
                break
        else:
            on_path.discard(i)
            path.pop()

    # A loop is its head and all from which the closing edge is reached without passing the head.
    members: dict[int, set[int]] = {}
    for tail, head in closing:
        inside = members.setdefault(head, {head})
        queue = [tail]
        while queue:
            i = queue.pop()
            if i not in inside:
                inside.add(i)
                queue += before.get(i, [])

    loops = []
    bodies = [inside for inside in members.values() if len(inside) > 1]     # 1: the trap behind a kernel's end
    for inside in bodies:
        nested = set().union(*(other for other in bodies if other < inside))
        order = sorted(inside)
        loops.append(Loop(span=(code[order[0]].address, code[order[-1]].address),
                          depth=sum(inside < other for other in bodies),
                          instructions=tuple(code[i] for i in order if i not in nested)))
    return sorted(loops, key=lambda loop: loop.span)


# NVIDIA

_SASS_LINE = re.compile(r"\s*/\*([0-9a-f]{4,})\*/\s+(?:(@!?\w+)\s+)?([A-Z][\w.]*)\s*([^;]*?)\s*;")
_SASS_LABEL = re.compile(r"(\S+):\s*$")
_SASS_SHAPE = re.compile(r"(16|8)(8)(\d+)|(\d+)x(\d+)x(\d+)")    # IMMA.16832, IGMMA.64x128x32
_SASS_BITS = {"U8": 8, "S8": 8, "U16": 16, "S16": 16, "64": 64, "128": 128, "256": 256}


def _parse_sass(listing: str) -> dict[str, Kernel]:
    kernels = {}
    for section in re.split(r"^\s*\.section\s+\.text\.", listing, flags=re.M)[1:]:
        name = section[:section.index(",")]
        lines, labels = [], {}
        for line in section.splitlines():
            if match := _SASS_LINE.match(line):
                lines.append(match.groups(default=""))
            elif match := _SASS_LABEL.match(line):
                labels[match[1]] = len(lines)
        while lines and lines[-1][2] == "NOP":
            lines.pop()
        code = []
        for address, predicate, opcode, operands in lines:
            label = re.search(r"`\(([^)]+)\)", operands)
            target = labels.get(label[1]) if label else None
            code.append(Instruction(int(address, 16), opcode, operands, predicate, target))
        kernels[name] = Kernel(name, SASS, tuple(code))
    return kernels


def _sass_mnemonic(opcode: str) -> str:
    """IMAD.WIDE.U32 is an IMAD, but IDP.4A and IMMA.16832 keep the modifier their MACs depend on."""
    name, *modifiers = opcode.split(".")
    kept = []
    if name == "IDP":
        kept = modifiers[:1]
    elif name.endswith("MMA"):
        kept = [m for m in modifiers if _SASS_SHAPE.fullmatch(m)][:1]
    return ".".join([name, *kept])


def _sass_macs(instructions: Iterable[Instruction]) -> int | None:
    """MACs of a lane. Matrix instructions count before dot products and those before scalars: beside the
    wider ones, the narrower scale and convert. Multiplies and adds that nobody contracted count as pairs."""
    count = Counter(_sass_mnemonic(i.opcode) for i in instructions if not _is_move(i))
    matrix = sum(n * _sass_matrix_macs(name) // (128 if "GMMA" in name else 32) for name, n in count.items())
    dots = 4 * count["IDP.4A"] + 2 * count["IDP.2A"]
    scalars = max(count["FFMA"] + 2 * count["FFMA2"], 2 * count["HFMA2"], count["DFMA"], count["IMAD"],
                  min(count["FMUL"] + 2 * count["FMUL2"], count["FADD"] + 2 * count["FADD2"]))
    return matrix or dots or scalars or None


def _is_move(i: Instruction) -> bool:
    """Multiply-adds that move a constant or compute an address: IMAD.MOV, IMAD.WIDE, an IMAD with a factor
    that is no register, an HFMA2 of zeros."""
    factors = [operand.strip().lstrip("-").split(".")[0] for operand in i.operands.split(",")[1:3]]
    if i.opcode.startswith("IMAD"):
        return i.opcode != "IMAD" or not all(re.fullmatch(r"R\d+", factor) for factor in factors)
    return i.opcode.startswith("HFMA2") and "RZ" in factors


def _sass_matrix_macs(opcode: str) -> int:
    """MACs of one matrix instruction; 0 of another, or where its name has no shape."""
    name, _, shape = _sass_mnemonic(opcode).partition(".")
    if not (name.endswith("MMA") and shape):
        return 0
    return math.prod(int(n) for n in _SASS_SHAPE.fullmatch(shape).groups() if n)


def _sass_successors(index: int, i: Instruction) -> list[int]:
    following, name = [index + 1], i.opcode.split(".")[0]
    if i.opcode.startswith(("BRA.DIV", "BRA.CONV")):
        return following                    # the way round for a diverged warp: out of line, and rare
    if name in ("BRA", "JMP", "CALL") and i.target is not None:
        conditional = i.predicate or "," in i.operands or name == "CALL"
        return [i.target, *(following if conditional else [])]
    if name in ("EXIT", "RET", "BRA", "BRX", "JMP", "JMX") and not i.predicate:
        return []
    return following


SASS = Isa(arithmetic=re.compile(r"[FHD](FMA|MUL|ADD)|IMAD(?!\.MOV)|IDP|I2F|F2F|F2I|[A-Z]*MMA\."),
           conversion=re.compile(r"I2F|F2F|F2I|I2I|HADD2\.F32"),     # the last widens a half to a float
           load=re.compile(r"LD(G|GSTS|S|SM|L)?(\.|$)"),
           global_load=re.compile(r"LD(G|GSTS)?(\.|$)"), global_store=re.compile(r"STG?(\.|$)"),
           mnemonic=_sass_mnemonic,
           bits=lambda opcode: next((_SASS_BITS[m] for m in opcode.split(".") if m in _SASS_BITS), 32),
           macs=_sass_macs, matrix_macs=_sass_matrix_macs, fused=re.compile(r"[FD]FMA"), dot=re.compile(r"IDP"),
           successors=_sass_successors)


# AMD


def _parse_amdgcn(assembly: str, names: Iterable[str]) -> dict[str, Kernel]:
    kernels = {}
    for name in names:
        body = re.search(rf"^{re.escape(name)}:.*?$(.*?)^\.Lfunc_end\d+:", assembly, re.M | re.S)[1]
        lines, labels = [], {}
        for line in body.splitlines():
            line = line.partition(";")[0].strip()
            if line.endswith(":"):
                labels[line[:-1]] = len(lines)
            elif re.match(r"[a-z]", line):
                opcode, *operands = line.split(maxsplit=1)
                lines.append((opcode, "".join(operands)))
        kernels[name] = Kernel(name, AMDGCN, tuple(
            Instruction(n, re.sub(r"_e(32|64)$", "", opcode), operands, "", labels.get(operands))
            for n, (opcode, operands) in enumerate(lines)))
    return kernels


def _amd_macs(instructions: Iterable[Instruction]) -> int | None:
    """MACs of a lane, by the rules of `_sass_macs`."""
    opcodes = [i.opcode for i in instructions]

    def count(pattern):
        return sum(bool(re.match(pattern, opcode)) for opcode in opcodes)
    matrix = sum(map(_amd_matrix_macs, opcodes)) // 64
    dots = 8 * count("v_dot8") + 4 * count("v_dot4") + 2 * count("v_dot2")
    floats = count("v_(fma|fmac|fmaak|fmamk|mac|mad|fma_mix)_f32") + 2 * count("v_pk_fma_f32")
    integers = count("v_mad_[iu]32_[iu](24|16)")
    float_pairs = min(count("v_mul_f32") + 2 * count("v_pk_mul_f32"),
                      count("v_add_f32") + 2 * count("v_pk_add_f32"))
    integer_pairs = min(count("v_mul_([iu]32_[iu]24|lo_u32)"), count("v_add_u32") + 2 * count("v_add3_u32"))
    scalars = max(floats, 2 * count("v_pk_fma_f16"), integers, float_pairs, integer_pairs)
    return matrix or dots or scalars or None


def _amd_matrix_macs(opcode: str) -> int:
    """MACs of one matrix instruction (v_mfma_i32_16x16x32_i8, ..._4x4x4_16b_f16 with its 16 blocks); 0 of another."""
    shape = re.match(r"v_s?mf?mac?_(?:scale_)?[a-z]+\d+_(\d+)x(\d+)x(\d+)(?:_(\d+)b_)?", opcode)
    return math.prod(int(n) for n in shape.groups() if n) if shape else 0


def _amd_bits(opcode: str) -> int:
    if "byte" in opcode:
        return 8
    if "short" in opcode:
        return 16
    words = re.search(r"dwordx(\d+)", opcode)
    return 32 * int(words[1]) if words else 32


def _amd_successors(index: int, i: Instruction) -> list[int]:
    if i.opcode in ("s_endpgm", "s_setpc_b64"):
        return []
    if i.opcode == "s_branch":
        return [i.target]
    return [index + 1] + ([i.target] if i.opcode.startswith("s_cbranch") else [])


AMDGCN = Isa(arithmetic=re.compile(r"v_(pk_)?(fma|mac|mad|mul|add|dot|mfma|smfmac|cvt)"),
             conversion=re.compile(r"v_cvt_"),
             load=re.compile(r"(global|flat|buffer|scratch|s)_(buffer_)?load|ds_(read|load)"),
             global_load=re.compile(r"(global|flat|buffer)_load"),
             global_store=re.compile(r"(global|flat|buffer)_store"),
             mnemonic=lambda opcode: opcode, bits=_amd_bits, macs=_amd_macs, matrix_macs=_amd_matrix_macs,
             fused=re.compile(r"v_(pk_)?(fma|mac|mad_f)"), dot=re.compile(r"v_dot"), successors=_amd_successors)


# --------------------------------------------------------------------------------------------------- evidence

@dataclass(frozen=True)
class PerMac:
    """A hot loop's instructions for each MAC. macs: MACs a lane in one trip, by which all else is divided.
    opcodes: by mnemonic. loads: from global, shared and local memory, of any width. conversions: between
    integers and floats, or between floats. dots: dot products of bytes or halves."""

    macs: int
    opcodes: dict[str, float]
    instructions: float
    loads: float
    conversions: float
    dots: float


def per_mac(kernel: Kernel, macs_per_iteration: int | None = None) -> PerMac | None:
    """Instructions per MAC in the hot loop or, where there is no loop, in the whole kernel.

    macs_per_iteration: MACs of one lane in one trip, as compiled (so times the unrolling); None derives them
    from the instructions (FFMA 1, IDP.4A 4, IMMA.16832 128, a FMUL with a FADD 1, ...).
    Returns None where there is nothing to derive them from. Raises ValueError for a number below 1.
    """
    if macs_per_iteration is not None and macs_per_iteration < 1:
        raise ValueError(f"macs_per_iteration is {macs_per_iteration}; expected at least 1")
    isa = kernel.isa
    body = kernel.hot_loop.instructions if kernel.hot_loop else kernel.instructions
    macs = macs_per_iteration or isa.macs(body)
    if macs is None:
        return None

    def share(pattern):
        return sum(bool(pattern.match(i.opcode)) for i in body) / macs
    return PerMac(macs, {name: n / macs for name, n in kernel.count(body).most_common()}, len(body) / macs,
                  share(isa.load), share(isa.conversion), share(isa.dot))


def evidence(source: Source, names: Iterable[str] | None = None,
             extra_options: Iterable[str] = ()) -> list[dict]:
    """`survey` of one source."""
    return survey([source], names, extra_options)


def survey(sources: Iterable[Source], names: Iterable[str] | None = None,
           extra_options: Iterable[str] = ()) -> list[dict]:
    """What the machine code of each kernel of `sources` shows on each target, one JSON-ready row a pair.

    names: targets such as "sm_90a" and "gfx942"; None takes all that this machine can compile for.
    extra_options: for the compilers of all targets named.
    A row: source, defines, target, compiler, kernel; its resources (see `resources` and `compile_hip`);
    instructions, loops, global_loads and global_stores (accesses by width in bits), fused (multiply-adds of floats) and
    matrix ({opcode: {count, macs}}, MACs being those of one instruction) of the whole kernel;
    hot_loop_instructions (None without a loop); macs, instructions_per_mac, loads_per_mac, conversions_per_mac and
    dots_per_mac (None where no MACs can be told); opcodes, the mnemonics counted in the hot loop or, without one, in
    the kernel.
    A source that has nothing on a target (see `absence`) gives no row there.
    Raises CompileError, BackendUnavailable, and ValueError for an unknown target.
    """
    extra_options = tuple(extra_options)
    names = [name for name, reason in targets().items() if reason is None] if names is None else list(names)
    for name in names:
        if not re.match(r"sm_\d|gfx\d", name):
            raise ValueError(f"no target {name!r}; there are {', '.join(targets())}")

    def rows(source: Source, target: str) -> list[dict]:
        if target.startswith("sm_"):
            compiled = compile_cuda(source, target.removeprefix("sm_"), extra_options)
        else:
            compiled = compile_hip(source, target, extra_options)
        return [_row(source, compiled, name) for name in compiled.resources]

    # One thread more than cores: while this process reads a listing, compilers run on all of them.
    with ThreadPoolExecutor((os.cpu_count() or 1) + 1) as pool:
        jobs = [pool.submit(rows, source, target) for source in sources for target in names
                if absence(source, target) is None]
        return [row for job in jobs for row in job.result()]


def absence(source: Source, target: str) -> str | None:
    """Why `source` has no kernel on `target`; None where it has."""
    if "wgmma.h" in source.headers and target != "sm_90a":
        return "written for wgmma, the instructions of a warpgroup, which sm_90a alone has"
    if "panels.h" in source.headers and target.startswith("gfx"):
        return "written for mma.sync, whose operands panels are laid out for; AMD's matrix instructions take others"
    return None


def _row(source: Source, compiled: CodeObject, name: str) -> dict:
    kernel = compiled.kernels[name]
    each = per_mac(kernel)
    body = kernel.hot_loop.instructions if kernel.hot_loop else kernel.instructions
    matrix = {opcode: {"count": n, "macs": kernel.isa.matrix_macs(opcode)}
              for opcode, n in kernel.opcodes.items() if kernel.isa.matrix_macs(opcode)}
    return {"source": source.path, "defines": dict(source.defines), "target": compiled.target,
            "compiler": compiled.compiler, "kernel": name, **compiled.resources[name],
            "instructions": len(kernel.instructions), "loops": len(kernel.loops),
            "global_loads": {str(bits): n for bits, n in kernel.global_loads.items()},
            "global_stores": {str(bits): n for bits, n in kernel.global_stores.items()},
            "fused": sum(bool(kernel.isa.fused.match(i.opcode)) for i in kernel.instructions), "matrix": matrix,
            "hot_loop_instructions": len(kernel.hot_loop.instructions) if kernel.hot_loop else None,
            "macs": each and each.macs, "instructions_per_mac": each and each.instructions,
            "loads_per_mac": each and each.loads, "conversions_per_mac": each and each.conversions,
            "dots_per_mac": each and each.dots, "opcodes": dict(kernel.count(body).most_common())}


def table(rows: Iterable[dict]) -> str:
    """Rows of `survey` as a Markdown table."""
    head = ("kernel", "target", "registers", "spill B", "shared B", "matrix instructions", "MACs of one", "FMAs",
            "dots/MAC", "global loads", "loop", "MAC", "instr/MAC", "loads/MAC", "conv/MAC",
            "most frequent in the loop")

    def number(value):
        return "" if value is None else f"{value:.2f}" if isinstance(value, float) else str(value)

    lines = ["| " + " | ".join(head) + " |", "|" + "---|" * len(head)]
    for row in rows:
        kernel = " ".join([row["kernel"], *(f"{name}={value}" for name, value in row["defines"].items())])
        widths = ", ".join(f"{n} x {bits}" for bits, n in row["global_loads"].items())
        frequent = ", ".join(f"{n} {opcode}" for opcode, n in list(row["opcodes"].items())[:4])
        matrix = ", ".join(f"{of['count']} {opcode}" for opcode, of in row["matrix"].items())
        macs = ", ".join(dict.fromkeys(str(of["macs"]) for of in row["matrix"].values()))
        cells = (kernel, row["target"], row["registers"], row["spill_bytes"], row["shared_bytes"], matrix, macs,
                 row["fused"], row["dots_per_mac"], widths, row["hot_loop_instructions"], row["macs"],
                 row["instructions_per_mac"], row["loads_per_mac"], row["conversions_per_mac"], frequent)
        lines.append("| " + " | ".join(map(number, cells)) + " |")
    return "\n".join(lines) + "\n"
