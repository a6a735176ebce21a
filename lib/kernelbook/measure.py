"""Times and ceilings. On a GPU: CUDA events around replays of a graph; on the host: a monotonic clock.

Contenders of one comparison take turns within one run, so that a drift of clocks or of a neighbour's load meets all of
them. Times are medians with the 10th and 90th percentile and the number of samples.
"""

import math
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass

import numpy as np

from kernelbook.backends import Backend

COLD_L2_MULTIPLE = 4
"""A rotation over this many times the L2 leaves nothing of an input there when its turn comes again."""
REST = 3
"""Rest after a sample, in its own lengths, where contenders draw all the power there is. Without one each has the clock
that those before it have left: on an H200 a kernel that then took 1.07 times another's time took 1.03 after rests of
3 ms, of 10 and of 30, and 0.98 where each ran by itself, all the time."""


@dataclass(frozen=True)
class Timing:
    """Microseconds a call: median, 10th and 90th percentile over n samples."""

    median: float
    p10: float
    p90: float
    n: int

    @classmethod
    def of(cls, samples_us) -> "Timing":
        p10, median, p90 = np.percentile(samples_us, [10, 50, 90])
        return cls(float(median), float(p10), float(p90), len(samples_us))

    def __str__(self):
        return f"{self.median:.1f} us [{self.p10:.1f}, {self.p90:.1f}]"


def rotation(nbytes: int, l2_bytes: int) -> int:
    """Copies of an input of `nbytes` that a cold measurement goes through in turn."""
    return max(2, math.ceil(COLD_L2_MULTIPLE * l2_bytes / nbytes))


def device_times(contenders: dict[str, Sequence[Callable]], *, rounds: int = 20, sample_us: float = 2000.0,
                 budget_s: float = 2.0, rest: float = 0.0) -> dict[str, Timing]:
    """In-graph times of several contenders, interleaved.

    contenders: name to the calls gone through in turn; each only launches work on the current stream and allocates
    nothing after its first run. Many calls over different copies of an input measure cold, one call measures warm.
    A sample is one replay of a graph that goes through the calls at least once, and as often as about `sample_us`
    microseconds hold (so that a graph's start does not count), divided by the number of calls. There are `rounds`
    samples of each contender, fewer (not below 7) where they would take more than `budget_s` seconds together. After
    each the device rests, `rest` times as long as it took.
    """
    import cupy
    graphs = {name: _Graph(list(calls), sample_us) for name, calls in contenders.items()}
    samples: dict = {name: [] for name in graphs}
    begin = time.perf_counter()
    for round_ in range(rounds):
        for name, graph in graphs.items():
            us = graph.sample()
            samples[name].append(us)
            time.sleep(rest * us * graph.calls / 1e6)
        if round_ >= 6 and time.perf_counter() - begin > budget_s:
            break
    cupy.cuda.Device().synchronize()
    return {name: Timing.of(s) for name, s in samples.items()}


class _Graph:
    """Calls captured once, on a stream that CuPy and (where it has CUDA) PyTorch both take for the current one."""

    def __init__(self, calls: list[Callable], sample_us: float):
        import cupy
        import torch
        self._torch_stream = torch.cuda.Stream() if torch.cuda.is_available() else None
        self._stream = _as_cupy(self._torch_stream) if self._torch_stream else cupy.cuda.Stream(non_blocking=True)
        self._events = cupy.cuda.Event(), cupy.cuda.Event()
        self._warm = len(calls) == 1
        cupy.cuda.Device().synchronize()  # inputs were made on another stream
        with self._current():
            for call in calls:  # compiles and allocates what the capture must not
                call()
            self._replay = self._capture(calls)
            self._replay()  # the first replay uploads the graph
            repeats = max(1, math.ceil(sample_us / self._elapsed(self._replay)))
            if repeats > 1:
                self._replay = self._capture(calls * repeats)
                self._replay()
        self.calls = repeats * len(calls)

    def _capture(self, calls: list[Callable]) -> Callable:
        """What replays `calls` as one graph on the current stream."""
        import torch
        if self._torch_stream:
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, stream=self._torch_stream):
                for call in calls:
                    call()
            return graph.replay
        self._stream.begin_capture()
        for call in calls:
            call()
        return self._stream.end_capture().launch

    @contextmanager
    def _current(self):
        import torch
        with ExitStack() as stack:
            if self._torch_stream:
                stack.enter_context(torch.cuda.stream(self._torch_stream))
            stack.enter_context(self._stream)
            yield

    def _elapsed(self, work: Callable) -> float:
        """Microseconds between events around `work`."""
        import cupy
        start, end = self._events
        start.record()
        work()
        end.record()
        end.synchronize()
        return cupy.cuda.get_elapsed_time(start, end) * 1e3

    def sample(self) -> float:
        """Microseconds a call, of one replay."""
        with self._current():
            if self._warm:
                self._replay()  # the contender before may have emptied the cache
            return self._elapsed(self._replay) / self.calls


def _as_cupy(torch_stream):
    """PyTorch's stream as CuPy's: by the protocol of CuPy 14 where both have it, else by its address."""
    import cupy
    if hasattr(cupy.cuda.Stream, "from_external") and hasattr(torch_stream, "__cuda_stream__"):
        return cupy.cuda.Stream.from_external(torch_stream)
    return cupy.cuda.ExternalStream(torch_stream.cuda_stream)


def host_times(contenders: dict[str, Callable], *, rounds: int = 30, warmup: int = 3,
               budget_s: float = 10.0) -> dict[str, Timing]:
    """Wall-clock times of several contenders, interleaved; each call returns when its result is on the host.

    Stops early, but not before 5 rounds, once `budget_s` seconds are spent.
    """
    for call in contenders.values():
        for _ in range(warmup):
            call()
    samples = {name: [] for name in contenders}
    begin = time.perf_counter()
    for round_ in range(rounds):
        for name, call in contenders.items():
            start = time.perf_counter()
            call()
            samples[name].append((time.perf_counter() - start) * 1e6)
        if round_ >= 4 and time.perf_counter() - begin > budget_s:
            break
    return {name: Timing.of(s) for name, s in samples.items()}


@dataclass(frozen=True)
class Ceiling:
    """What this machine can do at most at one thing, measured: `value` with its 10th and 90th percentile over n."""

    name: str
    value: float
    unit: str
    p10: float
    p90: float
    n: int
    how: str


def _rate(name, unit, amount, timing, how):
    """Amount a call (bytes or FLOP) to a rate: GB/s or TFLOP/s. Slow percentiles are the low ones of a rate."""
    scale = {"GB/s": 1e-3, "TFLOP/s": 1e-6}[unit]
    low, mid, high = (amount / t * scale for t in (timing.p90, timing.median, timing.p10))
    return Ceiling(name, mid, unit, low, high, timing.n, how)


def memory_ceilings(backend: Backend, nbytes: int = 1 << 30) -> list[Ceiling]:
    """Read and copy bandwidth of the device's memory, with kernels/ceilings/memory.cu over `nbytes` of random data."""
    module = backend.compile("ceilings/memory.cu")
    fill, read, copy = (module.kernel(name) for name in ("fill_words", "read_bytes", "copy_bytes"))
    # two buffers read in turn, so that a warm cache holds nothing of the one whose turn it is
    a = [backend.empty(nbytes // 4, np.uint32) for _ in range(2)]
    out = backend.empty(1, np.uint32)
    count, grid, block = np.uint64(nbytes // 16), (backend.multiprocessors * 4, 1, 1), (512, 1, 1)
    for seed, buffer in enumerate(a):
        fill(grid, block, [buffer, np.uint64(nbytes // 4), np.uint32(seed)])
    times = device_times({
        "read": [lambda x=x: read(grid, block, [x, out, count]) for x in a],
        "copy": [lambda: copy(grid, block, [a[0], a[1], count])],
    })
    how = f"own kernel, {nbytes >> 20} MiB, in a graph"
    return [_rate("read", "GB/s", nbytes, times["read"], how),
            _rate("copy", "GB/s", 2 * nbytes, times["copy"], how + ", bytes read plus bytes written")]


def matmul_ceilings(size: int = 8192) -> list[Ceiling]:
    """Rates of PyTorch's square matrix products on random data: bf16, int8 and, where the device has it, fp8."""
    import torch
    if not torch.cuda.is_available():
        return []
    a = torch.randn(size, size, device="cuda", dtype=torch.bfloat16)
    b = torch.randn(size, size, device="cuda", dtype=torch.bfloat16)
    out = torch.empty_like(a)
    i8 = [torch.randint(-127, 128, (size, size), device="cuda", dtype=torch.int8) for _ in range(2)]
    out32 = torch.empty(size, size, device="cuda", dtype=torch.int32)
    calls = {"bf16": lambda: torch.mm(a, b, out=out),
             "int8": lambda: torch._int_mm(i8[0], i8[1].T, out=out32)}
    if torch.cuda.get_device_capability() >= (8, 9):
        f8 = [x.to(torch.float8_e4m3fn) for x in (a, b)]
        one = torch.ones((), device="cuda")
        calls["fp8"] = lambda: torch._scaled_mm(f8[0], f8[1].T, one, one, out_dtype=torch.bfloat16)
    times = device_times({name: [call] for name, call in calls.items()}, rest=REST)
    how = f"torch, {size} x {size} x {size}, random data, in a graph, with a rest after each sample"
    return [_rate(f"{name}_matmul", "TFLOP/s", 2 * size**3, t, how) for name, t in times.items()]


def round_trips(backend: Backend, nbytes: int = 8192) -> list[Ceiling]:
    """What a call costs before it computes anything: `nbytes` in, an empty launch, `nbytes` out, one synchronize."""
    empty = backend.compile("ceilings/memory.cu").kernel("empty")
    device = backend.empty(nbytes, np.uint8)
    pinned = [backend.pinned((nbytes,), np.uint8) for _ in range(2)]
    pageable = [np.zeros(nbytes, np.uint8) for _ in range(2)]

    def trip(source, sink):
        backend.copy_in(device, source)
        empty((1, 1, 1), (32, 1, 1), [])
        backend.copy_out(sink, device)
        backend.synchronize()

    def launch():
        empty((1, 1, 1), (32, 1, 1), [])
        backend.synchronize()

    times = host_times({"round_trip_pinned": lambda: trip(*pinned), "round_trip_pageable": lambda: trip(*pageable),
                        "launch_and_synchronize": launch}, rounds=200)
    how = f"{nbytes} bytes in, empty launch, {nbytes} bytes out, synchronize; wall clock"
    hows = {"launch_and_synchronize": "empty launch and synchronize; wall clock"}
    return [Ceiling(name, t.median, "us", t.p10, t.p90, t.n, hows.get(name, how)) for name, t in times.items()]


def host_ceilings(nbytes: int = 1 << 28, size: int = 2048) -> list[Ceiling]:
    """The host's own: copy bandwidth of memory and float32 matrix product, both by PyTorch on all its threads."""
    import torch
    a, b = torch.zeros(nbytes, dtype=torch.uint8), torch.ones(nbytes, dtype=torch.uint8)
    x, y = torch.randn(size, size), torch.randn(size, size)
    times = host_times({"copy": lambda: a.copy_(b), "matmul": lambda: x @ y}, rounds=10, budget_s=5)
    threads = torch.get_num_threads()
    return [_rate("host_copy", "GB/s", 2 * nbytes, times["copy"],
                  f"torch, {nbytes >> 20} MiB, {threads} threads, bytes read plus bytes written"),
            _rate("host_float32_matmul", "TFLOP/s", 2 * size**3, times["matmul"],
                  f"torch, {size} x {size} x {size}, {threads} threads")]
