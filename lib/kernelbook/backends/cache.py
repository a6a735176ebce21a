"""Compiled objects kept on disk by the hash of what they were compiled from."""

import os
import tempfile
from pathlib import Path

from kernelbook import ROOT


def folder() -> Path:
    """Where compiled objects are kept: $KERNELBOOK_CACHE, else .cache/kernelbook in the checkout.

    Raises PermissionError, with what to do, where the folder cannot be made or written.
    """
    path = Path(os.environ.get("KERNELBOOK_CACHE") or ROOT / ".cache" / "kernelbook")
    try:
        path.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=path):
            pass
    except OSError as error:
        raise PermissionError(f"cannot write compiled kernels to {path} ({error.strerror}); "
                              "set KERNELBOOK_CACHE to a folder that can be written") from error
    return path


def get(name: str, build) -> Path:
    """Path of the cached file `name`; on a miss `build(path)` writes it, beside and then renamed in one step,
    so that two processes may compile the same kernel at once."""
    path = folder() / name
    if not path.exists():
        handle, aside = tempfile.mkstemp(dir=path.parent, prefix=f".{name}.")
        os.close(handle)
        try:
            build(Path(aside))
            os.replace(aside, path)
        finally:
            Path(aside).unlink(missing_ok=True)
    return path
