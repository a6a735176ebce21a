"""Kernels on the CPU: compiled by the host's C++ compiler and run by the wave simulator in kernels/portable.

The simulator gives a kernel the waves, barriers and shared memory of a GPU. Its results count; its times do not.
A launch that a GPU would let hang, fault or silently go wrong ends in a KernelFault, and the next launch works.
"""

import ctypes
import hashlib
import mmap
import os
import re
import shlex
import shutil
import sys
import tempfile
import weakref
from pathlib import Path

import numpy as np

from kernelbook.backends import cache, compiler
from kernelbook.backends.source import BackendUnavailable, CompileError, Source

# Limits of an NVIDIA GPU of compute capability 9.0, the same for every block and launch.
MAX_THREADS = 1024
MAX_BLOCK = (1024, 1024, 64)
MAX_GRID = (2**31 - 1, 65535, 65535)
MAX_DYNAMIC_SHARED = 227 * 1024


class KernelFault(RuntimeError):
    """A kernel did what it must not; the launch has ended and its arrays hold whatever it had written.

    kernel: its name. reason: what it did. file, line: where, or None where that is not known.
    block, thread: (x, y, z), or None.
    """

    def __init__(self, kernel, reason, file=None, line=None, block=None, thread=None):
        self.kernel, self.reason, self.file, self.line = kernel, reason, file, line
        self.block, self.thread = block, thread
        where = f" in {file}:{line}" if line else ""
        if block:
            where += f", block {block}"
        if thread:
            where += f", thread {thread}"
        super().__init__(f"{kernel}{where}: {reason}")


# ---- device arrays ----

_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *3 * [ctypes.c_int], ctypes.c_long]
_libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
_libc.mprotect.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]


class _Memory:
    """`size` bytes of 0xFF that end, but for alignment to 16, at 1 MiB which cannot be touched, as before them."""

    GUARD = 1 << 20

    live: "dict[int, _Memory]" = {}  # by start address, as long as an array uses it

    def __init__(self, size: int):
        self.size = size
        pages = -(-size // mmap.PAGESIZE) * mmap.PAGESIZE
        self.mapped = pages + 2 * self.GUARD
        self.base = _libc.mmap(None, self.mapped, 0, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS, -1, 0)
        first = (self.base or 0) + self.GUARD
        if self.base == ctypes.c_void_p(-1).value or _libc.mprotect(
                first, pages, mmap.PROT_READ | mmap.PROT_WRITE):
            raise MemoryError(f"no memory for an array of {size} bytes ({os.strerror(ctypes.get_errno())})")
        self.start = first + pages - -(-size // 16) * 16
        self.end = self.start + size
        ctypes.memset(first, 0xFF, pages)
        self.slack = [np.ctypeslib.as_array((ctypes.c_uint8 * n).from_address(at))
                      for at, n in ((first, self.start - first), (self.end, first + pages - self.end)) if n]

    @classmethod
    def array(cls, shape, dtype) -> np.ndarray:
        """An array in memory of its own, which is given back with the last array that uses it."""
        dtype = np.dtype(dtype)
        memory = cls(int(np.prod(shape, dtype=np.int64)) * dtype.itemsize)
        buffer = (ctypes.c_uint8 * memory.size).from_address(memory.start)
        cls.live[memory.start] = memory
        # At the process's end there may still be arrays, and the memory goes anyway.
        weakref.finalize(buffer, memory.free).atexit = False
        return np.ndarray(shape, dtype, buffer=buffer)

    def free(self):
        del self.live[self.start]
        _libc.munmap(self.base, self.mapped)

    @classmethod
    def of(cls, array: np.ndarray) -> "_Memory | None":
        """The memory that an array lies in, None where it is not this backend's."""
        start = array.ctypes.data
        if start in cls.live:
            return cls.live[start]
        return next((m for m in cls.live.values() if m.start <= start and start + array.nbytes <= m.end), None)

    def damage(self) -> int | None:
        """Offset from the start of a byte outside that something has written, None if there is none; mends it."""
        damaged = None
        for slack in self.slack:
            where = np.flatnonzero(slack != 0xFF)
            if where.size:
                damaged = slack.ctypes.data + int(where[0]) - self.start
                slack[:] = 0xFF
        return damaged


# ---- the compiler ----

_BASE_FLAGS = ("-std=c++20", "-g1", "-fPIC", "-pthread", "-ffp-contract=off", "-fno-strict-aliasing",
               "-Wno-unknown-pragmas")


class _Compiler:
    """The host's C++ compiler. Raises BackendUnavailable where there is none, or none that answers."""

    def __init__(self):
        self.command, self.version = self._find()
        clang = re.search(r"clang version (\S+)", self.version)
        number = clang[1] if clang else self.version.splitlines()[0].split()[-1]
        zig = "ziglang" in self.command
        name = "zig c++" if zig else Path(self.command[0]).name
        self.name = f"{name} {number}"
        # Only what ends in a call of the simulator: clang's other bounds check ends in a trap. (Of alignment clang
        # checks single numbers, g++ whole vectors too.)
        bounds = "array-bounds" if clang else "bounds"
        self.checks = ["-fno-sanitize-recover=all",
                       f"-fsanitize=signed-integer-overflow,integer-divide-by-zero,shift-exponent,alignment,{bounds}"]
        self.flags = [*_BASE_FLAGS]
        if clang:
            self.flags.append("-fno-sanitize=all")  # zig turns checks on by itself
        else:
            # Else two builds of one source with other constants would share the statics of its templates.
            self.flags.append("-fno-gnu-unique")
        if _has_avx2():
            self.flags.append("-march=x86_64_v3" if zig else "-march=x86-64-v3")

    @staticmethod
    def _find() -> tuple[list[str], str]:
        """The compiler's command and what it says of its version."""
        chosen, found = os.environ.get("CXX"), None
        if chosen:
            command = shlex.split(chosen)
            if not shutil.which(command[0]):
                raise BackendUnavailable(f"CXX is {chosen!r}, which is no program here; "
                                         "set it to a C++20 compiler or unset it")
        else:
            found = next((name for name in ("g++", "clang++") if shutil.which(name)), None)
            command = [found] if found else [sys.executable, "-m", "ziglang", "c++"]
        try:
            answer = compiler.call([*command, "--version"], timeout_s=60)
        except (TimeoutError, PermissionError) as error:
            raise BackendUnavailable(str(error)) from error
        if answer.returncode == 0 and answer.stdout.strip():
            return command, answer.stdout
        if chosen or found:
            raise BackendUnavailable(f"`{' '.join(command)} --version` tells no version: "
                                     f"{answer.stderr.strip() or f'exit code {answer.returncode}'}; "
                                     "set CXX to a C++20 compiler")
        raise BackendUnavailable("the CPU simulator needs a C++20 compiler and finds neither g++ nor clang++ nor the "
                                 "package ziglang; install one (apt install g++, or pip install ziglang) or set CXX")

    def build(self, source: Source, flags: list[str], libraries: list[Path] = ()) -> Path:
        """The shared object of a source, from the cache or compiled now. Raises CompileError."""
        compile = [*self.flags, *flags, *source.flags, "-I.", "-c", "-o", "kernel.o", "-x", "c++", source.file.name]
        # Linked apart from -fsanitize, so that its checks call the simulator and not a library of the compiler's
        # (zig adds one unless it is asked to optimize).
        link = ["-shared", "-O2", "-pthread", "kernel.o", "-Wl,-rpath,$ORIGIN"]
        key = [source.hash, self.version, *self.command, *compile, *link, *(p.name for p in libraries)]
        digest = hashlib.sha256("\0".join(key).encode()).hexdigest()[:32]
        name = f"{source.file.stem}-{digest}.so"

        def build(path: Path):
            with tempfile.TemporaryDirectory() as folder:
                # The compiler sees exactly the text that was hashed, under its own name.
                for file, text in {**source.headers, source.file.name: source.text}.items():
                    place = Path(folder, file)
                    place.parent.mkdir(parents=True, exist_ok=True)
                    place.write_text(text, encoding="utf-8")
                self._run(source, folder, compile)
                self._run(source, folder, [*link, *map(str, libraries), f"-Wl,-soname,{name}", "-o", str(path)])

        return cache.get(name, build)

    def _run(self, source, folder, arguments):
        try:
            done = compiler.call([*self.command, *arguments], folder)
        except TimeoutError as error:
            raise CompileError(source, self.name, str(error)) from error
        if done.returncode:
            raise CompileError(source, self.name, done.stderr)


def _has_avx2() -> bool:
    """Whether this machine has all of x86-64-v3 (AVX2, FMA, F16C), as most since 2013."""
    try:
        features = set(Path("/proc/cpuinfo").read_text().split())
    except OSError:
        return False
    return {"avx2", "fma", "bmi2", "f16c", "movbe", "abm"} <= features


# ---- the simulator's interface, as kernels/portable/sim_runtime.h and simulator.cpp declare it ----

class _Dim3(ctypes.Structure):
    _fields_ = [(axis, ctypes.c_uint) for axis in "xyz"]

    def __iter__(self):
        return iter((self.x, self.y, self.z))


class _Launch(ctypes.Structure):
    _fields_ = [("grid", _Dim3), ("block", _Dim3), ("shared", ctypes.c_uint), ("wave", ctypes.c_int),
                ("threads", ctypes.c_int), ("order", ctypes.c_uint)]


class _Fault(ctypes.Structure):
    _fields_ = [("kind", ctypes.c_int), ("line", ctypes.c_int), ("in_block", ctypes.c_int),
                ("block", _Dim3), ("thread", _Dim3), ("address", ctypes.c_uint64), ("code", ctypes.c_uint64),
                ("file", ctypes.c_char * 256), ("text", ctypes.c_char * 1024)]


class _Parameter(ctypes.Structure):
    _fields_ = [("size", ctypes.c_int), ("kind", ctypes.c_int)]


class _Description(ctypes.Structure):
    _fields_ = [("call", ctypes.c_void_p), ("count", ctypes.c_int), ("parameters", ctypes.POINTER(_Parameter))]


_FAULT_ACCESS = 2
_KINDS = ("a pointer", "an integer", "a floating-point number", "a structure")


# ---- the backend ----

class CpuBackend:
    """The wave simulator as a backend.

    Every kernel is built with the compiler's checks of integer overflow, alignment and array bounds; they cost little
    (a matrix instruction takes 1.7 times as long, everything else about the same).

    wave: lanes in a wave, 32 or 64.
    threads: OS threads that run blocks, by default one a core.
    order: 0 runs lanes, waves and blocks in their natural order, any other number in a random one with that seed.
        With one thread, or blocks that share nothing, a launch gives the same bits every time.
    Raises BackendUnavailable where there is no C++ compiler.
    """

    name = "cpu"
    simulated = True
    multiprocessors = 1  # more blocks are no faster

    def __init__(self, wave: int = 32, threads: int | None = None, order: int = 0):
        if wave not in (32, 64):
            raise ValueError(f"wave is {wave}; a wave has 32 or 64 lanes")
        if threads is not None and threads < 1:
            raise ValueError(f"threads is {threads}; at least one OS thread must run the blocks")
        self.wave = wave
        self.matrix = {32: ("mma",), 64: ("mfma", "mmac")}[wave]
        self.threads = threads or len(os.sched_getaffinity(0))
        self.order = order
        self._compiler = _Compiler()
        self.device = (f"CPU wave simulator, {wave} lanes, {self._compiler.name}, "
                       f"{self.threads} thread{'s' * (self.threads > 1)}")
        self._modules: dict[str, CpuModule] = {}

    @staticmethod
    def _simulator_source() -> Source:
        return Source("portable/simulator.cpp")

    def compile(self, source: str | Source, defines: dict | None = None) -> "CpuModule":
        """Raises CompileError with the compiler's words, FileNotFoundError for a source that is not there."""
        if isinstance(source, str):
            source = Source(source, defines or {})
        if source.hash in self._modules:
            return self._modules[source.hash]
        simulator = self._compiler.build(self._simulator_source(), ["-O2"])
        # Much of the time goes into building many kernels, which -O2 takes half as long again for; they run as fast.
        path = self._compiler.build(source, ["-O1", *self._compiler.checks], [simulator])
        self._modules[source.hash] = CpuModule(self, source, path)
        return self._modules[source.hash]

    def array(self, host) -> np.ndarray:
        host = np.asarray(host)
        device = self.empty(host.shape, host.dtype)
        device[...] = host
        return device

    def empty(self, shape, dtype) -> np.ndarray:
        return _Memory.array(shape, dtype)

    def numpy(self, array: np.ndarray) -> np.ndarray:
        return np.array(array)

    def synchronize(self) -> None:
        """Nothing to wait for: a launch returns when it has ended."""

    def owns(self, array) -> bool:
        return isinstance(array, np.ndarray) and _Memory.of(array) is not None

    def pointer(self, array: np.ndarray) -> int:
        return array.ctypes.data

    def pinned(self, shape, dtype) -> np.ndarray:
        return np.empty(shape, dtype)

    def copy_in(self, device: np.ndarray, host: np.ndarray) -> None:
        device[...] = host

    def copy_out(self, host: np.ndarray, device: np.ndarray) -> None:
        host[...] = device

    copy_out_blocking = copy_out


class CpuModule:
    """The kernels of one compiled source."""

    def __init__(self, backend: CpuBackend, source: Source, path: Path):
        self.backend, self.source, self.path = backend, source, path
        # The simulator's functions are looked up through the module, which gives those that it is linked to: where the
        # cache folder has changed, the process may hold a second copy of the simulator, with another state.
        self.symbols = ctypes.CDLL(path)
        self.symbols.sim_start.restype = ctypes.c_void_p
        self.symbols.sim_wait.argtypes = [ctypes.c_void_p, ctypes.c_int]
        self.symbols.sim_finish.argtypes = [ctypes.c_void_p, ctypes.c_void_p]

    def kernel(self, name: str) -> "CpuKernel":
        """Raises ValueError, with the names there are, for a kernel that the source does not register."""
        try:
            describe = self.symbols[f"gpu_kernel_{name}"]
        except AttributeError:
            known = ", ".join(re.findall(r"GPU_KERNEL\((\w+)\)", self.source.text)) or "none"
            raise ValueError(f"{self.source.path} registers no kernel {name!r} with GPU_KERNEL; "
                             f"there are: {known}") from None
        describe.restype = ctypes.POINTER(_Description)
        return CpuKernel(self, name, describe())


class CpuKernel:
    """A kernel of a CpuModule."""

    def __init__(self, module: CpuModule, name: str, description):
        self.module, self.name = module, name
        self._description = description
        count = description.contents.count
        self._parameters = [(p.size, p.kind) for p in description.contents.parameters[:count]]

    def __call__(self, grid, block, args, shared: int = 0, overlap: bool = False) -> None:
        """Launch and wait for the end; arguments as `backends.Kernel` has them.

        Arrays must come from this backend's `array` or `empty` (or be contiguous views of one).
        Raises TypeError for an argument that the kernel does not take, ValueError for a launch beyond a GPU's
        limits, KernelFault for what the kernel then does wrong.
        """
        backend = self.module.backend
        self._launch(grid, block, args, shared, backend.threads, backend.order)

    def check_races(self, grid, block, args, shared: int = 0, orders=range(8)) -> None:
        """Launch from the same arrays once for each order of lanes, waves and blocks, and compare the results.

        Raises KernelFault, naming the first array and index that differ, where a result depends on the order: a
        missing barrier or two threads that write one place, or atomics on floats. Leaves the arrays as the first
        order left them. Runs on one OS thread, so that a result depends on the order only.
        """
        arrays = {i: a for i, a in enumerate(args) if isinstance(a, np.ndarray)}
        before = {i: a.copy() for i, a in arrays.items()}
        results = {}
        for order in orders:
            for i, array in arrays.items():
                array[...] = before[i]
            self._launch(grid, block, args, shared, threads=1, order=order)
            if not results:
                first, results = order, {i: a.copy() for i, a in arrays.items()}
            for i, array in arrays.items():
                self._compare(f"args[{i}]", results[i], array, first, order)
        for i, array in arrays.items():
            array[...] = results[i]

    def _compare(self, name, expected, got, first, order):
        itemsize = expected.dtype.itemsize
        differs = (_bytes(expected) != _bytes(got)).reshape(-1, itemsize).any(axis=1)
        if differs.any():
            flat = int(np.argmax(differs))
            index = ", ".join(str(int(i)) for i in np.unravel_index(flat, expected.shape))
            raise KernelFault(self.name, f"race: {name}[{index}] is {expected.flat[flat]} in order {first} and "
                                         f"{got.flat[flat]} in order {order}; {int(differs.sum())} of {got.size} "
                                         "elements depend on the order of threads")

    def _launch(self, grid, block, args, shared, threads, order):
        backend = self.module.backend
        launch = _Launch(_dimensions("grid", grid, MAX_GRID), _dimensions("block", block, MAX_BLOCK),
                         shared, backend.wave, threads, order)
        count = launch.block.x * launch.block.y * launch.block.z
        if count > MAX_THREADS:
            raise ValueError(f"block {tuple(block)} has {count} threads; a block has at most {MAX_THREADS}")
        if not 0 <= shared <= MAX_DYNAMIC_SHARED:
            raise ValueError(f"shared is {shared} bytes; a block has at most {MAX_DYNAMIC_SHARED} bytes of dynamic "
                             "shared memory")
        values = self._arguments(args)
        pointers = (ctypes.c_void_p * len(values))(*(ctypes.addressof(v) for v in values))
        fault = _Fault()
        simulator = self.module.symbols
        run = simulator.sim_start(self._description, ctypes.byref(launch), pointers)
        try:
            while not simulator.sim_wait(run, 50):  # between waits Python hears of Ctrl-C
                pass
        finally:
            simulator.sim_finish(run, ctypes.byref(fault))
        damage = self._damage(args)
        if fault.kind:
            raise self._fault(fault, args)
        if damage:
            raise KernelFault(self.name, damage)

    def _arguments(self, args) -> list:
        if len(args) != len(self._parameters):
            raise TypeError(f"{self.name} takes {len(self._parameters)} arguments, got {len(args)}")
        return [self._argument(f"{self.name}: args[{i}]", value, *parameter)
                for i, (value, parameter) in enumerate(zip(args, self._parameters, strict=True))]

    @staticmethod
    def _argument(name, value, size, kind):
        expected = f"the kernel takes {_KINDS[kind]}" + (f" of {size} bytes" if kind else "")
        if value is None or isinstance(value, np.ndarray):
            if _KINDS[kind] != "a pointer":
                raise TypeError(f"{name} is {'None' if value is None else 'an array'}; {expected}")
            if value is None:
                return ctypes.c_void_p(None)
            if not value.flags.c_contiguous:
                raise TypeError(f"{name} is an array of shape {value.shape} with strides {value.strides}; "
                                "a kernel takes contiguous arrays")
            if _Memory.of(value) is None:
                raise TypeError(f"{name} is an array in the host's memory; copy it to the device with backend.array")
            return ctypes.c_void_p(value.ctypes.data)
        if not isinstance(value, np.generic):
            raise TypeError(f"{name} is {value!r} of type {type(value).__name__}; pass a device array, None or a NumPy "
                            "scalar of the parameter's width, such as np.int32(4)")
        kinds = {"i": "an integer", "u": "an integer", "b": "an integer", "f": "a floating-point number"}
        if kinds.get(value.dtype.kind) != _KINDS[kind] or value.dtype.itemsize != size:
            raise TypeError(f"{name} is a NumPy {value.dtype} ({value!r}); {expected}")
        return (ctypes.c_uint8 * size).from_buffer_copy(value.tobytes())

    @staticmethod
    def _damage(args) -> str | None:
        """Words for the first array of a launch that something wrote beside, None if there is none."""
        found = None
        for i, array in enumerate(args):
            if isinstance(array, np.ndarray):
                memory = _Memory.of(array)
                offset = memory.damage()
                if offset is not None and found is None:
                    found = "wrote " + _outside(i, array, memory, offset)
        return found

    def _fault(self, fault, args) -> KernelFault:
        reason = fault.text.decode()
        if fault.kind == _FAULT_ACCESS:
            reason = _describe_access(fault.address, args) or reason
        file, line = fault.file.decode() or None, fault.line or None
        if fault.code:
            file, line = self._line(fault.code)
        return KernelFault(self.name, reason, file, line, tuple(fault.block) if fault.in_block else None,
                           tuple(fault.thread) if fault.in_block == 2 else None)

    def _line(self, code):
        """File and line of an instruction, (None, None) where addr2line (of binutils, as g++ is) does not answer."""
        if not shutil.which("addr2line"):
            return None, None
        try:
            text = compiler.call(["addr2line", "-i", "-e", str(self.module.path), hex(code)], timeout_s=60).stdout
        except TimeoutError:
            return None, None
        # The innermost inlined function first; what matters is the line in the kernel's own file.
        places = re.findall(r"([^/\n]+):(\d+)", text)
        own = [p for p in places if p[0] == self.module.source.file.name]
        return next(((file, int(line)) for file, line in own + places if int(line)), (None, None))


def _dimensions(name, value, limits) -> _Dim3:
    numbers = tuple(value) if np.iterable(value) else (value,)
    if not 1 <= len(numbers) <= 3 or not all(isinstance(n, int | np.integer) for n in numbers):
        raise TypeError(f"{name} is {value!r}; it takes one to three integers")
    for axis, number, limit in zip("xyz", numbers, limits, strict=False):
        if not 1 <= number <= limit:
            raise ValueError(f"{name}.{axis} is {number}; it must be from 1 to {limit}")
    return _Dim3(*(int(n) for n in numbers), *(1,) * (3 - len(numbers)))


def _bytes(array) -> np.ndarray:
    return np.frombuffer(array.tobytes(), np.uint8)


def _outside(i, array, memory, offset) -> str:
    far = f"{-offset} bytes before its start" if offset < 0 else f"{offset - memory.size} bytes past its end"
    return (f"outside an array: byte {offset} of args[{i}] ({array.dtype} of shape {array.shape}, {memory.size} "
            f"bytes), {far}")


def _describe_access(address, args) -> str | None:
    """Words for an access to `address`, by the array whose guard it hit; None where it hit none."""
    for i, array in enumerate(args):
        if isinstance(array, np.ndarray):
            memory = _Memory.of(array)
            if memory.base <= address < memory.base + memory.mapped:
                return "access " + _outside(i, array, memory, address - memory.start)
    if address < mmap.PAGESIZE:
        null = ", ".join(f"args[{i}]" for i, value in enumerate(args) if value is None)
        return "access through a null pointer" + (f" ({null} is None)" if null else "")
    return f"access to address {address:#x}, which lies in none of the launch's arrays"
