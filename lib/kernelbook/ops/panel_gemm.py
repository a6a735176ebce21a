"""A GEMM for prefill on weights that come in q4 tiles and are multiplied in panels: one more way of candidate C.

    out[m, n] = sum over k of  x[m, k] * w[n, k]

Tiles (`kernelbook.formats.Tiles`) become int4 panels (`kernelbook.packing`) on the device, once, bit for bit as
`packing.panels_from_tiles` has them; the kernel is 7_packed_wgmma.cu, on bf16 activations, as `packed_wgmma` plans it.
It needs Hopper's warpgroup instructions, and takes every N and K that tiles have; there is no other way that it falls
back to.

    PanelGemm       a weight on a device, in panels
    pack            the panels of tiles, both on the device

Source: prefill_breakdown article, section 4 (candidate C); the layout: see `kernelbook.packing`.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from kernelbook import formats
from kernelbook.backends import Backend, Source
from kernelbook.ops.checks import check_apart, check_array, given_scratch
from kernelbook.ops.packed_wgmma import DESIGNS
from kernelbook.packing import CHUNK_BYTES, COLUMNS, ROWS

NAME = "packed_wgmma"
"""Of the design, of its file below kernels/prefill_gemm after its number, and of the kernel in there."""
FILE = "7_packed_wgmma"
ACTIVATIONS = "bf16"
PRECISION = "int4"
THREADS = 256  # as compiled into 8_panels_of_tiles.cu
LANES = 32

_DESIGN = DESIGNS["wgmma_bf16"]
_PACK = Source("prefill_gemm/8_panels_of_tiles.cu")


def sources() -> list[Source]:
    """The kernel that packs, for static evidence; `packed_gemm` has every form of the product."""
    return [_PACK]


def product_sources() -> list[Source]:
    """Every form that a product into float32 may launch."""
    return [_DESIGN.source(PRECISION, form) for form in _DESIGN.forms]


def panel_bytes(n: int, k: int) -> int:
    """Bytes of the panels of a weight [n, k]."""
    return math.ceil(n / ROWS) * math.ceil(k / COLUMNS) * CHUNK_BYTES[PRECISION]


@dataclass(frozen=True)
class _Weight:
    """What plans are made of."""

    n: int
    k: int
    precision: str = PRECISION


def why_not(backend: Backend, n: int, k: int) -> str | None:
    """Why weights [n, k] cannot be multiplied on a backend; None where they can."""
    return _DESIGN.why_not(backend, _Weight(n, k), 1)


def pack(backend: Backend, tiles):
    """Panels, uint8 [ceil(N / 16), ceil(K / 128), 1152] on the device, of the weight [N, K] in tiles, uint8 [N / 4,
    K / 32, 72] on the device; nothing is synchronized. Scales are not looked at: one that is NaN stays one.

    Raises TypeError or ValueError, before anything is launched, on a wrong dtype, device, shape, stride or alignment.
    """
    n, k = _sizes(backend, tiles)
    panels = backend.empty((math.ceil(n / ROWS), math.ceil(k / COLUMNS), CHUNK_BYTES[PRECISION]), np.uint8)
    lanes = LANES * panels.shape[0] * panels.shape[1]
    backend.compile(_PACK).kernel("q4_panels")(
        (math.ceil(lanes / THREADS), 1, 1), (THREADS, 1, 1),
        [tiles, panels, np.uint64(lanes), *map(np.int32, tiles.shape[:2])])
    return panels


def _sizes(backend, tiles) -> tuple[int, int]:
    shape = tuple(getattr(tiles, "shape", ()))
    if backend.owns(tiles) and (len(shape) != 3 or 0 in shape or shape[2] != formats.TILE_BYTES):
        raise ValueError(f"tiles has shape {shape}; expected [N / {formats.TILE_ROWS}, K / {formats.BLOCK}, "
                         f"{formats.TILE_BYTES}] with no 0")
    check_array(backend, tiles, "tiles", shape, np.uint8, 8)
    return formats.TILE_ROWS * shape[0], formats.BLOCK * shape[1]


class PanelGemm:
    """One weight matrix on a device, in panels that are made of its tiles.

    backend: where it runs. tiles: the weight [N, K], uint8 [N / 4, K / 32, 72] on the device; not needed any longer
    once this is made.
    `data` is the panels on the device, and `n` and `k` are the weight's sizes.
    Raises what `pack` raises, and ValueError where the kernel does not run on this backend.
    """

    def __init__(self, backend: Backend, tiles):
        self.n, self.k = _sizes(backend, tiles)
        reason = why_not(backend, self.n, self.k)
        if reason:
            raise ValueError(f"design {NAME!r}: {reason}")
        self.backend, self.data = backend, pack(backend, tiles)

    def scratch(self, m: int) -> int:
        """Float32 numbers that a product of `m` rows needs beside `out`: for sums of tiles that are cut."""
        return _DESIGN.plan(self.backend, _Weight(self.n, self.k), m).scratch if m else 0

    def prepare(self, x, *, out=None, scratch=None) -> Callable:
        """A call of no arguments that launches the product [M, N] of what `x` then holds and returns `out`. Everything
        is checked and compiled here, once; the call only launches. Nothing is synchronized.

        x: bits of bf16 on the device, uint16 [M, K]. No rows are no launch.
        out: float32 [M, N], or uint16 for bf16; made, as float32, where it is not given.
        scratch: float32 of one dimension, at least `self.scratch(M)` of them; made where it is not given. Calls that
        run one after the other can share it.
        Raises TypeError or ValueError, before anything is launched, on a wrong dtype, device, shape, stride or
        alignment, and where `out` or `scratch` shares memory with another array.
        """
        backend, shape = self.backend, tuple(getattr(x, "shape", ()))
        m = shape[0] if len(shape) == 2 else 1  # anything but a matrix is refused
        check_array(backend, x, "x", (m, self.k), np.uint16, 16)
        if out is None:
            out = backend.empty((m, self.n), np.float32)
        bf16_out = getattr(out, "dtype", None) == np.uint16
        check_array(backend, out, "out", (m, self.n), np.uint16 if bf16_out else np.float32, 16)
        size = self.scratch(m)
        scratch = given_scratch(backend, scratch, size, (m, self.n))
        check_apart(backend, {"out": out, "scratch": scratch}, {"x": x, "the weights": self.data})
        return _DESIGN.prepare(backend, _Weight(self.n, self.k), self.data, x, out, sums=scratch if size else None)
