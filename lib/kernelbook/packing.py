"""Weights in the order in which matrix instructions take them: panels, a fifth form beside those of `formats`.

A panel is 16 rows of the weight W[n, k], a chunk 128 columns of it: its codes, then its scales, without a gap.
Lane l = 4 g + t of a warp reads 16 bytes of codes at once, and they are what its fragments of operand A of
mma.m16n8k16 are made of (as each warp's of wgmma m64nNk16), columns in their natural order:

    register   a0              a1                  a2              a3
    row        g               g + 8               g               g + 8
    columns    2 t, 2 t + 1    2 t, 2 t + 1        2 t + 8, + 9    2 t + 8, + 9

    int8    [4 groups of 32 columns][32 lanes][2 steps of 16 columns][a0, a1, a2, a3][2], a byte a code: code + 128
    int4    [2 pairs of groups][32 lanes][4 steps], a word of 4 bytes a step: nibble p is the first code of a_p, nibble
            p + 4 the second one, code + 8 each
    scales  [8 rows g][4 groups][rows g, g + 8], float16

Columns of a chunk are contiguous, and so are a panel's chunks: any run of K of 16 rows is one copy. Strips become
panels, and these become strips of group 32, without the loss of a bit.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from kernelbook.formats import BLOCK, CODES, Strips, Tiles
from kernelbook.formats import pack as pack_strips

ROWS = 16
"""Of a panel."""
COLUMNS = 128
"""Of a chunk."""
SCALE_BYTES = 2 * ROWS * COLUMNS // BLOCK
CODE_BITS = {"int8": 8, "int4": 4}
CHUNK_BYTES = {precision: ROWS * COLUMNS * bits // 8 + SCALE_BYTES for precision, bits in CODE_BITS.items()}
"""2176 and 1152."""

_AT_ONCE = 128  # rows that are packed at once: temporaries that stay in cache


@dataclass(frozen=True, eq=False)
class Panels:
    """A weight W[n, k] in panels of 16 rows, each a row of chunks of 128 columns.

    data: uint8 [panels, chunks, chunk bytes], as this module's head has them.
    precision: "int8" or "int4".

    k is a multiple of 32. Rows from n on and columns from k on are padding: codes 0 and scales 0.
    """

    data: np.ndarray
    n: int
    k: int
    precision: str

    @property
    def panels(self) -> int:
        return math.ceil(self.n / ROWS)

    @property
    def chunks(self) -> int:
        """Of each panel."""
        return math.ceil(self.k / COLUMNS)

    @property
    def nbytes(self) -> int:
        """Bytes of codes and scales, padding included."""
        return self.data.nbytes

    @property
    def bits_per_weight(self) -> float:
        """Bits that a real weight takes, padding and scales included: 8.5 and 4.5 without padding."""
        return 8 * self.nbytes / (self.n * self.k)

    @property
    def scales(self) -> np.ndarray:
        """float16 [panels * 16, chunks * 4], padding included."""
        return _scales_of(self.data)

    @property
    def codes(self) -> np.ndarray:
        """int8 [panels * 16, chunks * 128], padding included."""
        return _codes_of(self.data, self.precision)

    def check(self) -> "Panels":
        """These panels, once every rule of the layout has been found to hold.

        Raises TypeError for an array of another kind or dtype; ValueError for an unknown precision, a size below 1, K
        no multiple of 32, another shape, a strided array, a scale that is NaN or infinite, or padding that is not
        zero, naming the first bad place.
        """
        shape = _shape(self.n, self.k, self.precision)
        if not isinstance(self.data, np.ndarray) or self.data.dtype != np.uint8:
            raise TypeError("data must be a NumPy array of uint8, not "
                            f"{getattr(self.data, 'dtype', type(self.data).__name__)}")
        if self.data.shape != shape:
            raise ValueError(f"data has shape {self.data.shape}; {self.precision} panels of n={self.n}, k={self.k} "
                             f"take {shape}")
        if not self.data.flags.c_contiguous:
            raise ValueError(f"data must be C-contiguous; it has strides {self.data.strides}: pass "
                             "np.ascontiguousarray of it")
        scales = self.scales
        if not np.isfinite(scales).all():
            row, group = np.argwhere(~np.isfinite(scales))[0]
            raise ValueError(f"the scale of row {row}, group {group} is {scales[row, group]}; scales must be finite")
        self._check_padding("scale", scales, 0, self.k // BLOCK)
        last_panel = slice(self.n // ROWS, None)  # empty where all its rows are real
        self._check_padding("code", _codes_of(self.data[last_panel], self.precision), last_panel.start * ROWS, self.k)
        last_chunk = self.k // COLUMNS
        if last_chunk < self.chunks:
            codes = _codes_of(self.data[:, last_chunk:], self.precision)
            self._check_padding("code", codes, 0, self.k - last_chunk * COLUMNS, last_chunk * COLUMNS)
        return self

    def _check_padding(self, what, values, first_row, real_columns, first_column=0):
        padding = values != 0
        padding[:max(self.n - first_row, 0), :real_columns] = False
        if padding.any():
            row, column = np.argwhere(padding)[0]
            place = f"row {first_row + row}, {'group' if what == 'scale' else 'column'} {first_column + column}"
            raise ValueError(f"the {what} of {place} is {values[row, column]}; it is padding of n={self.n}, k={self.k} "
                             "and must be 0")


def pack(strips: Strips) -> Panels:
    """Panels of the same weight. Groups of 64, 96, ... columns repeat their scale for each 32 columns.

    Raises what `Strips.check` raises, and ValueError for K no multiple of 32, for a group that is no multiple of 32,
    and for a scale that float16 does not hold exactly, naming row and group.
    """
    strips.check()
    if strips.group % BLOCK:
        raise ValueError(f"panels have a scale for {BLOCK} columns; strips in groups of {strips.group} do not fit: "
                         f"take a multiple of {BLOCK}")

    def rows(part):
        scales = strips.scales[:, part].T
        with np.errstate(over="ignore"):  # reported below
            halves = scales.astype(np.float16)
        if (halves.astype(np.float32) != scales).any():
            row, group = np.argwhere(halves.astype(np.float32) != scales)[0]
            raise ValueError(f"the scale of row {part.start + row}, group {group} is {scales[row, group]:.9g}, which "
                             "float16 does not hold; those of blocks, of tiles and of quantize() are held")
        return strips.codes[:, part].T, np.repeat(halves, strips.group // BLOCK, axis=1)[:, :strips.k // BLOCK]

    return _build(strips.n, strips.k, strips.precision, rows)


def unpack(panels: Panels) -> Strips:
    """Strips of the same weight, in groups of 32. Raises what `Panels.check` raises."""
    panels.check()
    return pack_strips(panels.codes[:panels.n, :panels.k],
                       panels.scales[:panels.n, :panels.k // BLOCK], BLOCK, panels.precision)


def panels_from_tiles(tiles: Tiles) -> Panels:
    """int4 panels of the same weight. Raises what `Tiles.check` raises."""
    codes, scales = tiles.check().codes, tiles.scales
    return _build(tiles.n, tiles.k, "int4", lambda part: (codes[part], scales[part]))


def random_panels(rng: np.random.Generator, n: int, k: int, precision: str) -> Panels:
    """Valid random panels of a weight [n, k]: uniform codes, scales uniform in 0.002..0.020, as of `random_tiles`.

    Raises ValueError for an unknown precision, a size below 1 and K no multiple of 32.
    """
    def rows(part):
        low, high = CODES[precision]
        count = part.stop - part.start
        return (rng.integers(low, high, (count, k), np.int8, endpoint=True),
                rng.uniform(0.002, 0.020, (count, k // BLOCK)).astype(np.float16))
    return _build(n, k, precision, rows)


def _shape(n, k, precision):
    if precision not in CODES:
        raise ValueError(f"precision {precision!r}; expected {' or '.join(map(repr, CODES))}")
    for name, value in (("n", n), ("k", k)):
        if value < 1:
            raise ValueError(f"{name} = {value}; expected at least 1")
    if k % BLOCK:
        raise ValueError(f"K = {k} is no multiple of {BLOCK}, the columns that share a scale")
    return math.ceil(n / ROWS), math.ceil(k / COLUMNS), CHUNK_BYTES[precision]


def _build(n, k, precision, rows: Callable[[slice], tuple]) -> Panels:
    """Panels of what `rows` gives for a range of rows: codes [rows, k] and float16 scales [rows, k / 32]."""
    data = np.empty(_shape(n, k, precision), np.uint8)
    for first in range(0, n, _AT_ONCE):
        part = slice(first, min(first + _AT_ONCE, n))
        codes, scales = rows(part)
        to = data[first // ROWS:math.ceil(part.stop / ROWS)]
        height = ROWS * len(to) - len(codes)
        _set_codes(to, np.pad(codes, ((0, height), (0, -k % COLUMNS))), precision)
        _set_scales(to, np.pad(scales, ((0, height), (0, -k % COLUMNS // BLOCK))))
    return Panels(data, n, k, precision)


# Axes of codes as a matrix: panel, row / 8, row % 8 = g; chunk, group, step, column / 8 % 2, column / 2 % 4 = t,
# column % 2. Each list says which of them the axes of the stored form are.
_CODE_AXES = {"int8": [0, 3, 4, 2, 7, 5, 6, 1, 8],  # ... lane, step, half of columns and rows: a0 to a3, code
              "int4": [0, 3, 4, 2, 8, 5, 6, 9, 7, 1]}  # groups as pair and member; nibbles: code, then a0 to a3
_SCALE_AXES = [0, 3, 2, 4, 1]  # panel, row / 8, g, chunk, group as panel, chunk, g, group, row / 8


def _set_codes(data, codes, precision):
    panels, chunks, _ = data.shape
    groups = (2, 2) if precision == "int4" else (4,)
    codes = codes.reshape(panels, 2, 8, chunks, *groups, 2, 2, 4, 2)
    codes = codes.transpose(_CODE_AXES[precision])
    if precision == "int8":
        stored = codes.view(np.uint8) ^ np.uint8(128)  # code + 128
    else:
        nibbles = (codes + np.int8(8)).view(np.uint8)
        stored = nibbles[..., 0] | nibbles[..., 1] << 4
    data[..., :-SCALE_BYTES] = stored.reshape(panels, chunks, -1)


def _codes_of(data, precision):
    panels, chunks, _ = data.shape
    stored = data[..., :-SCALE_BYTES]
    if precision == "int8":
        codes = (stored ^ np.uint8(128)).view(np.int8).reshape(panels, chunks, 4, 8, 4, 2, 2, 2, 2)
    else:
        nibbles = np.stack([stored & 15, stored >> 4], axis=-1).view(np.int8) - np.int8(8)
        codes = nibbles.reshape(panels, chunks, 2, 8, 4, 2, 2, 2, 2, 2)
    order = np.argsort(_CODE_AXES[precision])
    return codes.transpose(order).reshape(panels * ROWS, chunks * COLUMNS)


def _set_scales(data, scales):
    panels, chunks, _ = data.shape
    halves = scales.astype("<f2").reshape(panels, 2, 8, chunks, 4).transpose(_SCALE_AXES)
    data[..., -SCALE_BYTES:] = np.ascontiguousarray(halves).reshape(panels, chunks, -1).view(np.uint8)


def _scales_of(data):
    panels, chunks, _ = data.shape
    halves = np.ascontiguousarray(data[..., -SCALE_BYTES:]).view("<f2").reshape(panels, chunks, 8, 4, 2)
    return halves.transpose(np.argsort(_SCALE_AXES)).reshape(panels * ROWS, chunks * COLUMNS // BLOCK)
