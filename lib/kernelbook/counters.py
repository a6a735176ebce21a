"""Hardware counters of kernels on an NVIDIA GPU, read by Nsight Compute (ncu) in a process of its own.

Optional: many machines lack ncu, or the right to read counters; `read` says which. Clocks are left alone.
"""

import contextlib
import csv
import os
import shutil
import signal
import subprocess
import sys

from kernelbook.backends.source import BackendUnavailable

SECTORS_PER_REQUEST = "l1tex__average_t_sectors_per_request_pipe_lsu_mem_global_op_ld.ratio"
LOAD_EFFICIENCY = "smsp__sass_average_data_bytes_per_sector_mem_global_op_ld.pct"


def read(code: str, metrics: list[str], timeout_s: float = 120) -> dict[str, dict[str, float]]:
    """Run Python `code` under ncu; by kernel name, the metrics of its last launch, in ncu's base units.

    Raises BackendUnavailable where ncu is missing, may not read counters, or does not end within `timeout_s`.
    """
    ncu = shutil.which("ncu")
    if ncu is None:
        raise BackendUnavailable("ncu, NVIDIA's counter reader, is not on PATH; it comes with the CUDA toolkit")
    command = [ncu, "--csv", "--print-units", "base", "--clock-control", "none", "--metrics", ",".join(metrics),
               sys.executable, "-c", code]
    # a session of their own, so that an ncu that hangs does not leave the program it watches on the GPU
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
                          start_new_session=True) as process:
        try:
            out, errors = process.communicate(timeout=timeout_s)
        except subprocess.TimeoutExpired as error:
            raise BackendUnavailable(f"ncu did not end within {timeout_s:g} s") from error
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
    found = parse(out)
    if process.returncode or not found:
        named = [line for line in (out + errors).splitlines() if "==ERROR==" in line]
        words = named[0] if named else errors.strip() or f"exit code {process.returncode}, and no figures"
        raise BackendUnavailable(f"ncu could not read counters: {words[:200]}")
    for kernel, values in found.items():
        for metric in metrics:
            if metric not in values:
                raise BackendUnavailable(f"ncu gave no value of {metric} for {kernel}")
    return found


def parse(text: str) -> dict[str, dict[str, float]]:
    """ncu's --csv output, with whatever chatter stands around it, as {kernel: {metric: value}}.

    Where ncu has no figure ("n/a", which it gives for a metric that the GPU lacks), neither has the result.
    """
    lines = text.splitlines()
    start = next((i for i, line in enumerate(lines) if line.startswith('"ID"')), len(lines))
    found: dict[str, dict[str, float]] = {}
    for row in csv.DictReader(line for line in lines[start:] if line.startswith('"')):
        figures = found.setdefault(row["Kernel Name"], {})
        with contextlib.suppress(ValueError):
            figures[row["Metric Name"]] = float(row["Metric Value"].replace(",", ""))
    return found
