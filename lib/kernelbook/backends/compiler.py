"""Compilers that are programs of their own, called so that none of them is waited for without end."""

import contextlib
import os
import signal
import subprocess

from kernelbook.backends import cache

TIMEOUT_S = 300
"""How long one call may take: several times zig's first link, which builds a C++ library."""


def call(command: list[str], folder: str | os.PathLike | None = None,
         timeout_s: float = TIMEOUT_S) -> subprocess.CompletedProcess[str]:
    """Run `command` in `folder` to its end; what it printed as text, whatever its exit code.

    Raises TimeoutError, naming the command, where it has not ended after `timeout_s`: it is killed, with the
    processes it started. Raises PermissionError where zig is called and the cache cannot be written.
    """
    environment = None
    if "ziglang" in command:
        # zig keeps objects in the user's home, and where that cannot be written it waits, in silence.
        objects = str(cache.folder() / "zig")
        environment = {**os.environ, "ZIG_GLOBAL_CACHE_DIR": objects, "ZIG_LOCAL_CACHE_DIR": objects}
    # In a session of their own, since what a compiler has started would outlive it and hold its pipes open.
    with subprocess.Popen(command, cwd=folder, env=environment, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
                          stderr=subprocess.PIPE, text=True, errors="replace", start_new_session=True) as process:
        try:
            out, errors = process.communicate(timeout=timeout_s)
        except BaseException as error:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            if isinstance(error, subprocess.TimeoutExpired):
                raise TimeoutError(f"`{' '.join(command[:4])}` did not end within {timeout_s:g} s and was killed; "
                                   "see whether it runs by hand, and whether memory and disk are left") from None
            raise
    return subprocess.CompletedProcess(command, process.returncode, out, errors)
