"""The machine and the software that a measurement depends on. Read only: nothing here sets a clock."""

import hashlib
import os
import platform
import re
import subprocess
import sys
from importlib import metadata
from pathlib import Path
from typing import Any

from kernelbook import ROOT

SOURCES = (".cu", ".cuh", ".h", ".hip", ".cpp")
CLOCKS = {"sm_mhz": "clocks.sm", "memory_mhz": "clocks.mem", "sm_max_mhz": "clocks.max.sm",
          "memory_max_mhz": "clocks.max.mem", "power_limit_w": "power.limit",
          "temperature_c": "temperature.gpu"}
"""What is read of a GPU's state: our name, and nvidia-smi's."""


def environment(backend=None) -> dict:
    """The machine and the software a run depends on, as a record keeps them.

    backend: the kernelbook.backends.Backend in use; None where none can run here. Clocks are read, never set;
    `Record.save` adds those after the run.
    """
    commit = _output("git", "-C", str(ROOT), "rev-parse", "HEAD")
    changes = _output("git", "-C", str(ROOT), "status", "--porcelain") if commit else None
    pci_bus, cuda = _cuda(backend)
    state = gpu(pci_bus)
    return {
        "device": backend.device if backend else "none",
        "backend": backend.name if backend else None,
        "simulated": bool(backend and backend.simulated),
        "driver": state["driver"],
        "pci_bus": pci_bus,
        "cuda": cuda,
        "compilers": {name: _version(name) for name in ("g++", "clang++", "nvcc")},
        "packages": dict(sorted((dist.name, dist.version) for dist in metadata.distributions())),
        "python": platform.python_version(),
        "platform": " ".join((platform.system(), platform.machine(), *platform.libc_ver())),
        "cpu": {"model": _cpu_model(), "cores": len(os.sched_getaffinity(0))},
        "clocks": {"before": state["clocks"]},
        "commit": commit,
        "dirty": None if changes is None else changes != "",
        "kernels": kernel_hashes(),
    }


def kernel_hashes() -> dict[str, str]:
    """SHA-256 of every source below kernels/, by its path there."""
    folder = ROOT / "kernels"
    return {path.relative_to(folder).as_posix(): hashlib.sha256(path.read_bytes()).hexdigest()
            for path in sorted(folder.rglob("*")) if path.suffix in SOURCES}


def gpu(pci_bus: str | None) -> dict:
    """`driver` version and present `clocks` (named as in CLOCKS) of one GPU; None where there is none."""
    text = pci_bus and _output("nvidia-smi", "-i", pci_bus, "--format=csv,noheader,nounits",
                               f"--query-gpu=driver_version,{','.join(CLOCKS.values())}")
    if not text:
        return {"driver": None, "clocks": None}
    driver, *values = (part.strip() for part in text.splitlines()[0].split(","))
    clocks = {name: _number(value) for name, value in zip(CLOCKS, values, strict=True)}
    return {"driver": driver, "clocks": clocks}


def _output(*command: str) -> str | None:
    """What a program prints, or None where it is missing or fails."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=30, errors="replace")
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() if done.returncode == 0 else None


def _version(program: str) -> str | None:
    """The line in which a compiler names its version."""
    lines = (_output(program, "--version") or "").splitlines()
    return next((line for line in lines if re.search(r"\d+\.\d+", line)), None)


def _number(text: str) -> float | None:
    try:
        return float(text)
    except ValueError:  # "[N/A]", which some GPUs answer for some fields
        return None


def _cuda(backend) -> tuple[str | None, dict]:
    """PCI address of the device in use, and the CUDA versions CuPy works with.

    NVRTC is asked, not deduced from the package's name: cupy-cuda12x loads CUDA 13's library where that is
    the only one around.
    """
    versions: dict[str, Any] = {"nvrtc": None, "runtime": None, "driver_api": None}
    try:
        import cupy
        from cupy.cuda import nvrtc
        versions["nvrtc"] = "{}.{}".format(*nvrtc.getVersion())
    except Exception:  # whatever a machine without CUDA's libraries raises, it has no version to record
        return None, versions
    if backend is None or backend.name != "cuda":
        return None, versions
    versions["runtime"] = cupy.cuda.runtime.runtimeGetVersion()
    versions["driver_api"] = cupy.cuda.runtime.driverGetVersion()
    return cupy.cuda.Device().pci_bus_id, versions


def _cpu_model() -> str:
    if sys.platform == "linux":
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    return platform.processor() or platform.machine()
