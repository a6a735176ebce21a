"""A live profile of whatever runs on the GPU in this process, by torch.profiler.

It listens to CUPTI, which is process-wide: kernels of CuPy, or of a llama.cpp loaded by ctypes, are seen like PyTorch's
own.
"""

import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from statistics import median

from kernelbook.backends.source import BackendUnavailable
from kernelbook.buckets import kineto
from kernelbook.buckets.passes import PASS
from kernelbook.buckets.trace import Trace


def profile(fn: Callable[[], object], passes: int = 3, *, warmup: int = 2) -> Trace:
    """A trace of `passes` calls of fn, each marked as a pass and waited for.

    fn: runs one pass; whatever library launches its work. It runs `warmup` times before, which compiles and allocates,
    then `passes` times by the clock alone (Trace.unprofiled_ns is their median), once for the profiler to warm up, and
    `passes` times profiled.
    Raises ValueError for passes or warmup below 1; BackendUnavailable without a GPU that PyTorch can use, and where
    the profiler saw nothing of it; and whatever fn raises.
    """
    if passes < 1 or warmup < 1:
        raise ValueError(f"passes = {passes}, warmup = {warmup}; expected at least 1 of each")
    import torch
    if not torch.cuda.is_available():
        raise BackendUnavailable("a live profile needs an NVIDIA GPU that PyTorch can use, and "
                                 "torch.cuda.is_available() is False; buckets.read(FILE) takes recorded traces")

    def run():
        fn()
        torch.cuda.synchronize()

    for _ in range(warmup):
        run()
    unprofiled = []
    for _ in range(passes):
        start = time.perf_counter()
        run()
        unprofiled.append(1e9 * (time.perf_counter() - start))

    activities = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
    schedule = torch.profiler.schedule(wait=0, warmup=1, active=1, repeat=1)
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "trace.json"
        with torch.profiler.profile(activities=activities, schedule=schedule,
                                    on_trace_ready=lambda p: p.export_chrome_trace(str(file))) as profiler:
            run()
            profiler.step()
            for _ in range(passes):
                with torch.profiler.record_function(PASS):
                    run()
            profiler.step()
        text = file.read_text(encoding="utf-8")
    try:
        trace = kineto.read(text, "live")
    except ValueError as error:
        raise BackendUnavailable("torch.profiler saw nothing on the GPU: another profiler may hold CUPTI, or fn "
                                 f"launches nothing. {error}") from error
    return replace(trace, unprofiled_ns=median(unprofiled))
