"""Hardware counters of kernels on an NVIDIA GPU, read by Nsight Compute (ncu) in a process of its own.

Optional: many machines lack ncu, or the right to read counters; `read` says which. Clocks are left alone.
"""

import csv
import shutil
import subprocess
import sys

from kernelbook.backends import BackendUnavailable

SECTORS_PER_REQUEST = "l1tex__average_t_sectors_per_request_pipe_lsu_mem_global_op_ld.ratio"
LOAD_EFFICIENCY = "smsp__sass_average_data_bytes_per_sector_mem_global_op_ld.pct"
DRAM_BYTES_READ = "dram__bytes_read.sum"


def read(code: str, metrics: list[str], timeout_s: float = 120) -> dict[str, dict[str, float]]:
    """Run Python `code` under ncu; by kernel name, the metrics of its last launch, in ncu's base units.

    Raises BackendUnavailable where ncu is missing, may not read counters, or does not end within `timeout_s`.
    """
    ncu = shutil.which("ncu")
    if ncu is None:
        raise BackendUnavailable("ncu, NVIDIA's counter reader, is not on PATH; it comes with the CUDA toolkit")
    command = [ncu, "--csv", "--print-units", "base", "--clock-control", "none", "--metrics", ",".join(metrics),
               sys.executable, "-c", code]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=timeout_s)
    except subprocess.TimeoutExpired as error:
        raise BackendUnavailable(f"ncu did not end within {timeout_s:g} s") from error
    found = parse(done.stdout)
    if done.returncode or not found:
        words = [line for line in (done.stdout + done.stderr).splitlines() if "==ERROR==" in line] or [done.stderr.strip()]
        raise BackendUnavailable(f"ncu could not read counters: {words[0][:200]}")
    return found


def parse(text: str) -> dict[str, dict[str, float]]:
    """ncu's --csv output, with whatever chatter stands before its header, as {kernel: {metric: value}}."""
    lines = text.splitlines()
    start = next((i for i, line in enumerate(lines) if line.startswith('"ID"')), len(lines))
    found: dict[str, dict[str, float]] = {}
    for row in csv.DictReader(lines[start:]):
        found.setdefault(row["Kernel Name"], {})[row["Metric Name"]] = float(row["Metric Value"].replace(",", ""))
    return found
