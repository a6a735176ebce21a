"""What a run leaves in the process table: who belongs to it, how all of it ends, and who may run at a time."""

import contextlib
import fcntl
import os
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import psutil

MARK = "KERNELBOOK_RUN"
"""Environment variable whose value all processes of one run share.

A kernel leads a session of its own and outlives its parent, and so may what a cell starts: neither process groups
nor parents tell who belongs to a run, and what a process was started with does.
"""
GRACE_S = 10
"""How long a notebook that is told to end may take to save what it has."""


def end(mark: str) -> None:
    """Kill every process of a run but this one, and return when they are gone."""
    while found := [process for process in psutil.process_iter() if _marked(process, mark)]:  # they may still fork
        for process in found:
            with contextlib.suppress(psutil.Error):
                process.kill()
        _, alive = psutil.wait_procs(found, timeout=5)
        if alive:
            return  # in a driver's call that no signal ends


def _marked(process: psutil.Process, mark: str) -> bool:
    try:
        return (process.pid != os.getpid() and process.environ().get(MARK) == mark
                and process.status() != psutil.STATUS_ZOMBIE)
    except (psutil.Error, OSError):  # gone, or someone else's
        return False


@contextlib.contextmanager
def locked(path: Path, wait_s: float, stop: threading.Event | None = None) -> Iterator[int]:
    """Hold the lock of a file, made if need be; gives its descriptor, to be passed to processes that hold it too.

    It is free again when the last process that has the descriptor has ended, in whatever way. The file stays: who
    removes it takes it from under the next one. Raises BlockingIOError where another holds it after `wait_s`
    seconds, or `stop` is set before; OSError where the file cannot be made or its file system knows no locks.
    """
    descriptor = _open(path)
    try:
        deadline = time.monotonic() + wait_s
        while True:
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() >= deadline or (stop and stop.is_set()):
                    raise
                time.sleep(0.1)
        yield descriptor
    finally:
        os.close(descriptor)


def _open(path: Path) -> int:
    try:
        return os.open(path, os.O_RDONLY | os.O_CREAT, 0o666)
    except PermissionError:  # in /tmp, Linux lets nobody "create" the file that another user has made
        return os.open(path, os.O_RDONLY)


def is_locked(path: Path) -> bool:
    """Whether some process holds the lock of a file."""
    if not path.exists():
        return False
    try:
        with locked(path, wait_s=0):
            return False
    except BlockingIOError:
        return True
