"""Kernel sources: found below kernels/, hashed with all they include, shown where a compiler complains."""

import hashlib
import re
from dataclasses import dataclass, field
from functools import cache, cached_property
from pathlib import Path

from kernelbook import ROOT, fragments

KERNELS = ROOT / "kernels"
_INCLUDE = re.compile(r'^\s*#\s*include\s*"([^"]+)"', re.M)


def _text(file: Path) -> str:
    """Of a source as it is now: who edits a kernel runs what it then says. Launches ask for it over and over."""
    now = file.stat()
    return _read(file, now.st_mtime_ns, now.st_size)


@cache
def _read(file: Path, changed: int, size: int) -> str:
    return file.read_text(encoding="utf-8")


@cache
def _includes(text: str) -> list[str]:
    return _INCLUDE.findall(text)


class BackendUnavailable(RuntimeError):
    """What was asked for cannot run here; the message says which part is missing and how to get it."""


class CompileError(RuntimeError):
    """A kernel did not compile. `log` holds the compiler's own words, `line` the first line it names."""

    def __init__(self, source: "Source", compiler: str, log: str):
        self.log = log
        place = re.search(rf"{re.escape(Path(source.path).name)}[:(](\d+)", log)
        self.line = int(place[1]) if place else None
        text = f"{source.path} does not compile with {compiler}"
        if source.defines:
            text += " (" + " ".join(source.flags) + ")"
        lines = source.text.splitlines()
        if self.line and self.line <= len(lines):
            text += f"\n  line {self.line}: {lines[self.line - 1].strip()}"
        super().__init__(f"{text}\n{log.strip()}")


@dataclass(frozen=True)
class Source:
    """A kernel file and the constants it is compiled with.

    path: relative to kernels/, such as "grouped_gemm/2_float_activations.cu", or absolute.
    defines: preprocessor constants, name to value.
    Raises FileNotFoundError with the files that do exist where `path` does not.
    """

    path: str
    defines: dict = field(default_factory=dict)

    def __post_init__(self):
        if not self.file.is_file():
            known = ", ".join(sorted(str(f.relative_to(KERNELS)) for f in KERNELS.rglob("*.cu")))
            raise FileNotFoundError(f"no kernel source {self.path!r} below {KERNELS}; there are: {known}")

    @property
    def file(self) -> Path:
        return KERNELS / self.path

    @cached_property
    def text(self) -> str:
        return _text(self.file)

    @property
    def flags(self) -> list[str]:
        return [f"-D{name}={int(v) if isinstance(v, bool) else v}" for name, v in self.defines.items()]

    @cached_property
    def headers(self) -> dict[str, str]:
        """Every header that the source includes in quotes, directly or through another: name to text.

        Names resolve against kernels/portable, then the source's own folder. `fragments.h` is no file:
        it is generated from the lane maps in `kernelbook.fragments`.
        """
        found: dict[str, str] = {}

        def visit(text):
            for name in _includes(text):
                if name in found:
                    continue
                if name == "fragments.h":
                    found[name] = fragments.header()
                    continue
                places = [KERNELS / "portable" / name, self.file.parent / name]
                file = next((p for p in places if p.is_file()), None)
                if file is None:
                    raise FileNotFoundError(f"{self.path} includes {name!r}, found neither in "
                                            + " nor in ".join(str(p.parent) for p in places))
                found[name] = _text(file)
                visit(found[name])

        visit(self.text)
        return found

    @cached_property
    def hash(self) -> str:
        """Hex digest of the text, of every header and of the constants: the same hash, the same kernel."""
        digest = hashlib.sha256(self.text.encode())
        for name, text in sorted(self.headers.items()):
            digest.update(f"\0{name}\0{text}".encode())
        digest.update("\0".join(self.flags).encode())
        return digest.hexdigest()
