"""A trace from a file of any known format, told by what the file holds and not by what it is called."""

import gzip
import zlib
from pathlib import Path

from kernelbook.buckets import csv_tables, kineto, nsys_sqlite
from kernelbook.buckets.trace import Trace

FORMATS = {
    csv_tables.NSYS: "nsys stats --report cuda_gpu_kern_sum --format csv FILE.nsys-rep",
    nsys_sqlite.FORMAT: "nsys export --type sqlite FILE.nsys-rep",
    kineto.FORMAT: "torch.profiler's export_chrome_trace, plain or gzip",
    csv_tables.NCU: "ncu --csv --page details",
    csv_tables.ROCPROF: "rocprof --stats",
}
"""Each format that `read` knows, and how such a file is made."""


def read(path: str | Path) -> Trace:
    """The trace in a file: CSV, SQLite, or JSON, the text ones also compressed by gzip.

    Raises OSError where the file cannot be read; ValueError, naming the file and what was found in it, for one that is
    empty, cut, damaged, without GPU activity, or of no known format.
    """
    path, source = Path(path), str(path)
    with path.open("rb") as file:
        head = file.read(len(nsys_sqlite.MAGIC))
    if not head:
        raise ValueError(f"{source} is empty")
    if head == nsys_sqlite.MAGIC:
        trace = nsys_sqlite.read(path, source)
        found = "an SQLite database of something else"
    else:
        text = _text(path, source)
        start = text.lstrip()[:1]
        trace = kineto.read(text, source) if start in ("{", "[") else csv_tables.read(text, source)
        line = next((line for line in text.splitlines() if line.strip()), "")
        found = f"{'JSON of something else' if start in ('{', '[') else 'text'} that starts with {line[:60]!r}"
    if trace is None:
        raise _unknown(source, found)
    return trace


def _text(path: Path, source: str) -> str:
    data = path.read_bytes()
    if data[:2] == b"\x1f\x8b":
        try:
            data = gzip.decompress(data)
        except (OSError, EOFError, zlib.error) as error:
            raise ValueError(f"{source}: the gzip file is cut or damaged: {error}") from None
    try:
        # PowerShell redirects into UTF-16 with a byte order mark
        return data.decode("utf-16" if data[:2] in (b"\xff\xfe", b"\xfe\xff") else "utf-8-sig")
    except UnicodeDecodeError:
        raise _unknown(source, f"binary data that starts with {data[:12]!r}") from None


def _unknown(source: str, found: str) -> ValueError:
    known = "\n".join(f"  {name}: {how}" for name, how in FORMATS.items())
    return ValueError(f"{source} holds no trace of a known format: {found}. Known are:\n{known}")
