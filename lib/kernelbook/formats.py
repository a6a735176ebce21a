"""Weights and activations as groups of integers with one scale a group, and the files they come from.

Four forms of the same weight W[N, K]:

    blocks   rows of Q8_0 or Q4_0 blocks as a GGUF file stores them, uint8 [N, bytes]
    strips   int8 codes transposed to [K, Npad] and float32 scales [groups, Npad]: what grouped_gemm reads
    tiles    72 bytes for each 4 rows x 32 columns of 4-bit codes: what q4_probe reads
    floats   W[n, k] = codes[k, n] * scales[k // group, n]

Blocks become strips or, of Q4_0, tiles, and these become blocks, without the loss of a bit; floats become either
by the rounding rules of Q8_0 and Q4_0. The strips are those of grouped_gemm, sections 2 and 3.2, the tiles those
of prefill_breakdown, section 2.
"""

import difflib
import math
import os
from collections.abc import Sequence
from dataclasses import dataclass

import gguf
import numpy as np

CODES = {"int8": (-128, 127), "int4": (-8, 7)}
"""The smallest and largest code of each precision. Quantizing to int8 never gives -128, but a Q8_0 block in
a file may hold it: a group of G codes times int8 activations can reach G * 128 * 127, not G * 127 * 127."""

BLOCK = 32  # weights in a Q8_0 or Q4_0 block
BLOCK_BYTES = {"Q8_0": 2 + BLOCK, "Q4_0": 2 + BLOCK // 2}  # a float16 scale, then the codes
BITS_PER_WEIGHT = {kind: 8 * size / BLOCK for kind, size in BLOCK_BYTES.items()}
"""8.5 for Q8_0, 4.5 for Q4_0; `Strips.bits_per_weight` says what strips take."""

TILE_ROWS = 4
TILE_BYTES = TILE_ROWS * BLOCK_BYTES["Q4_0"]  # of a q4 tile: 72

LINE = 128  # bytes that the 32 lanes of a warp read at 4 each: columns are padded to whole lines
_BLOCKS_OF = {"int8": "Q8_0", "int4": "Q4_0"}
_PRECISION_OF = {kind: precision for precision, kind in _BLOCKS_OF.items()}


@dataclass(frozen=True, eq=False)
class Strips:
    """A weight W[n, k] as the kernels read it (grouped_gemm, 3.2): neighbouring n in neighbouring bytes.

    codes: int8 [k, npad], one byte a code for both precisions.
    scales: float32 [groups, npad]; the last group is a partial one where k is no multiple of `group`.
    precision: "int8" or "int4", the range of the codes (see CODES).

    `npad` is n rounded up to 128, so that every row starts on a 128-byte line; the codes and scales of the
    columns from n on are zero.
    """

    codes: np.ndarray
    scales: np.ndarray
    n: int
    k: int
    group: int
    precision: str

    @property
    def npad(self) -> int:
        return padded(self.n)

    @property
    def groups(self) -> int:
        return math.ceil(self.k / self.group)

    @property
    def nbytes(self) -> int:
        """Bytes of codes and scales, padding included."""
        return self.codes.nbytes + self.scales.nbytes

    @property
    def bits_per_weight(self) -> float:
        """Bits that a real weight takes, padding and scales included."""
        return 8 * self.nbytes / (self.n * self.k)

    def check(self) -> "Strips":
        """These strips, once every rule of the layout has been found to hold.

        Raises TypeError for arrays of another kind or dtype; ValueError for an unknown precision, a size
        below 1, another shape, strided arrays, a code out of range, a scale that is NaN or infinite, or
        padding that is not zero, naming the first bad place.
        """
        _check_precision(self.precision)
        for name in ("n", "k", "group"):
            _check_positive(name, getattr(self, name))
        expected = {"codes": (np.int8, (self.k, self.npad)),
                    "scales": (np.float32, (self.groups, self.npad))}
        for name, (dtype, shape) in expected.items():
            array = getattr(self, name)
            if not isinstance(array, np.ndarray) or array.dtype != dtype:
                found = getattr(array, "dtype", type(array).__name__)
                raise TypeError(f"{name} must be a NumPy array of {np.dtype(dtype)}, not {found}")
            if array.shape != shape:
                raise ValueError(f"{name} has shape {array.shape}; n={self.n}, k={self.k}, "
                                 f"group={self.group} take {shape}")
            if not array.flags.c_contiguous:
                raise ValueError(f"{name} must be contiguous with n as the inner axis; it has strides "
                                 f"{array.strides}: pass np.ascontiguousarray of it")
        low, high = CODES[self.precision]
        if self.codes.min() < low or self.codes.max() > high:
            k, n = np.argwhere((self.codes < low) | (self.codes > high))[0]
            raise ValueError(f"code {self.codes[k, n]} at k={k}, column {n} is outside {low}..{high}, "
                             f"the range of {self.precision}")
        finite = np.isfinite(self.scales)
        if not finite.all():
            g, n = np.argwhere(~finite)[0]
            raise ValueError(f"the scale of group {g}, column {n} is {self.scales[g, n]}; "
                             "scales must be finite")
        for name in expected:
            padding = getattr(self, name)[:, self.n:]
            if padding.any():
                row, column = np.argwhere(padding)[0]
                raise ValueError(f"{name}[{row}, {self.n + column}] is {padding[row, column]}; columns from "
                                 f"n={self.n} on are padding and must be 0")
        return self

    def dequantize(self, dtype=np.float32) -> np.ndarray:
        """The weight [n, k], each value one product code * scale in `dtype`. Scales that float16 holds, as
        those of `quantize` and of blocks, make float32 products exact: 8 bits times 11 bits fit its 24."""
        w = np.empty((self.n, self.k), dtype)
        for line in _lines(self.n):
            scales = np.repeat(self.scales[:, line], self.group, axis=0)[:self.k]
            w[line] = (self.codes[:, line].astype(dtype) * scales).T
        return w


@dataclass(frozen=True, eq=False)
class Tiles:
    """A 4-bit weight W[n, k] in tiles of 4 rows x 32 columns (prefill_breakdown, section 2).

    data: uint8 [n / 4, k / 32, 72]. A tile is the float16 scales of its 4 rows, then 16 words of 4 bytes: word
    4 * quarter + row holds 8 columns of that row, byte j column 4 * quarter + j in its low nibble and
    16 + 4 * quarter + j in its high one. A nibble is the code -8..7 in two's complement: that of a Q4_0 block, which
    is code + 8, with the top bit flipped. (The article's way from nibble to int8 has nibble 8 stand for -8.)

    So tiles hold the bytes of four rows of Q4_0 blocks in another order, at the same 4.5 bits a weight.
    """

    data: np.ndarray

    @property
    def n(self) -> int:
        return TILE_ROWS * self.data.shape[0]

    @property
    def k(self) -> int:
        return BLOCK * self.data.shape[1]

    @property
    def nbytes(self) -> int:
        return self.data.nbytes

    @property
    def bits_per_weight(self) -> float:
        """Bits that a weight takes, scales included."""
        return 8 * self.nbytes / (self.n * self.k)

    @property
    def scales(self) -> np.ndarray:
        """float16 [n, k / 32]."""
        halves = np.ascontiguousarray(self.data[..., :2 * TILE_ROWS]).view("<f2")
        return halves.transpose(0, 2, 1).reshape(self.n, -1)

    @property
    def codes(self) -> np.ndarray:
        """int8 [n, k] in -8..7."""
        words = _tile_words(self.data)
        nibbles = np.stack([words & 15, words >> 4], axis=3).reshape(self.n, self.k)
        return (nibbles ^ np.uint8(8)).view(np.int8) - np.int8(8)

    def nonfinite(self) -> tuple[int, int]:
        """How many scales are NaN or infinite, and how many tiles have such a scale."""
        bad = ~np.isfinite(self.scales).reshape(-1, TILE_ROWS, self.data.shape[1])
        return int(bad.sum()), int(bad.any(axis=1).sum())

    def check(self, finite: bool = True) -> "Tiles":
        """These tiles, once their layout and, with `finite`, every scale has been found to be right.

        Raises TypeError for an array of another kind or dtype; ValueError for another shape, a strided array, and a
        scale that is NaN or infinite, naming the first one's row and group.
        """
        if not isinstance(self.data, np.ndarray) or self.data.dtype != np.uint8:
            raise TypeError("data must be a NumPy array of uint8, not "
                            f"{getattr(self.data, 'dtype', type(self.data).__name__)}")
        if self.data.ndim != 3 or self.data.size == 0 or self.data.shape[2] != TILE_BYTES:
            raise ValueError(f"data has shape {self.data.shape}; expected [N / {TILE_ROWS}, K / {BLOCK}, "
                             f"{TILE_BYTES}] with no 0")
        if not self.data.flags.c_contiguous:
            raise ValueError(f"data must be C-contiguous; it has strides {self.data.strides}: pass "
                             "np.ascontiguousarray of it")
        if finite and self.nonfinite()[0]:
            row, group = np.argwhere(~np.isfinite(self.scales))[0]
            raise ValueError(f"the scale of row {row}, group {group} is {self.scales[row, group]}; "
                             "scales must be finite")
        return self

    def dequantize(self, dtype=np.float32) -> np.ndarray:
        """The weight [n, k], each value one product code * scale in `dtype`; exact in float32 and wider."""
        w = self.codes.astype(dtype)
        groups = w.reshape(self.n, -1, BLOCK)  # a view
        groups *= self.scales.astype(dtype)[..., None]
        return w


def padded(n: int) -> int:
    """Columns that strips of n columns are stored with: n rounded up to whole 128-byte lines."""
    return math.ceil(n / LINE) * LINE


def pack(codes: np.ndarray, scales: np.ndarray, group: int, precision: str) -> Strips:
    """Checked strips of integer codes [N, K] and scales [N, groups], both by row of the weight; scales are
    stored as float32.

    Raises what `Strips.check` raises, codes out of range being named by row; TypeError for codes that are no
    integers.
    """
    codes, scales = np.asarray(codes), np.asarray(scales)
    if codes.ndim != 2 or scales.ndim != 2 or len(codes) != len(scales):
        raise ValueError(f"codes must be [N, K] and scales [N, groups]; they have shapes {codes.shape} and "
                         f"{scales.shape}")
    if not np.issubdtype(codes.dtype, np.integer):
        raise TypeError(f"codes must be integers, not {codes.dtype}")
    _check_precision(precision)
    low, high = CODES[precision]
    if codes.size and (codes.min() < low or codes.max() > high):
        n, k = np.argwhere((codes < low) | (codes > high))[0]
        raise ValueError(f"code {codes[n, k]} at row {n}, k={k} is outside {low}..{high}, "
                         f"the range of {precision}")
    strips = _empty(*codes.shape, group, precision)
    if scales.shape[1] != strips.groups:
        raise ValueError(f"scales has shape {scales.shape}; codes of shape {codes.shape} in groups of "
                         f"{group} take {(strips.n, strips.groups)}")
    for line in _lines(strips.n):
        strips.codes[:, line] = codes[line].T
        strips.scales[:, line] = scales[line].T
    return strips.check()


def fuse(parts: Sequence[Strips]) -> Strips:
    """One weight of all columns of `parts` in order, as for q, k, v or gate and up (grouped_gemm, 3.5): real
    columns side by side, padding once at the end.

    Raises ValueError where there are no parts or where K, group or precision differ.
    """
    if not parts:
        raise ValueError("fuse needs at least one weight")
    first = parts[0]
    for i, part in enumerate(parts):
        for name in ("k", "group", "precision"):
            if getattr(part, name) != getattr(first, name):
                raise ValueError(f"weights of different {name} cannot be fused: part 0 has "
                                 f"{getattr(first, name)!r}, part {i} has {getattr(part, name)!r}")
    fused = _empty(sum(part.n for part in parts), first.k, first.group, first.precision)
    start = 0
    for part in parts:
        columns = slice(start, start + part.n)
        fused.codes[:, columns] = part.codes[:, :part.n]
        fused.scales[:, columns] = part.scales[:, :part.n]
        start += part.n
    return fused.check()


# ---------------------------------------------------------------- tiles

def quantize_tiles(w: np.ndarray) -> Tiles:
    """Tiles of the float weight w[N, K], rounded as `quantize` rounds to "int4": the numbers of gguf's Q4_0.

    Raises what `quantize` and `tiles_from_blocks` raise, and ValueError for K no multiple of 32.
    """
    return tiles_from_blocks(blocks_from_strips(quantize(w, "int4")))


def tiles_from_blocks(blocks: np.ndarray) -> Tiles:
    """Tiles of Q4_0 blocks, uint8 [N, bytes] as gguf's reader gives them.

    Raises ValueError for rows that are no whole blocks, for N no multiple of 4, and for a scale that is NaN or
    infinite, naming row and block; TypeError for a dtype other than uint8.
    """
    blocks = _whole_blocks(blocks, "Q4_0")
    n, groups, _ = blocks.shape
    _check_tile_rows(n)
    rows = blocks.reshape(-1, TILE_ROWS, groups, BLOCK_BYTES["Q4_0"])
    data = np.empty((len(rows), groups, TILE_BYTES), np.uint8)
    data[..., :2 * TILE_ROWS] = rows[..., :2].transpose(0, 2, 1, 3).reshape(len(rows), groups, -1)
    _tile_words(data)[...] = rows[..., 2:].reshape(*rows.shape[:3], -1, 4) ^ np.uint8(0x88)
    return Tiles(data).check()


def blocks_from_tiles(tiles: Tiles) -> np.ndarray:
    """The Q4_0 blocks, uint8 [N, bytes], with the same scales and codes. Raises what `Tiles.check` raises."""
    tiles.check()
    data = tiles.data
    blocks = np.empty((len(data), TILE_ROWS, data.shape[1], BLOCK_BYTES["Q4_0"]), np.uint8)
    blocks[..., :2] = data[..., :2 * TILE_ROWS].reshape(*data.shape[:2], TILE_ROWS, 2).transpose(0, 2, 1, 3)
    blocks[..., 2:] = _tile_words(data).reshape(*blocks.shape[:3], -1) ^ np.uint8(0x88)
    return blocks.reshape(tiles.n, -1)


def random_tiles(rng: np.random.Generator, n: int, k: int) -> Tiles:
    """Valid random tiles of a weight [n, k]: uniform codes, scales uniform in 0.002..0.020, as the article's repaired
    filling has them. Raises ValueError for n no multiple of 4 and k no multiple of 32."""
    data = rng.integers(0, 256, _tiles_shape(n, k), np.uint8)
    scales = rng.uniform(0.002, 0.020, (*data.shape[:2], TILE_ROWS)).astype("<f2")
    data[..., :2 * TILE_ROWS] = scales.view(np.uint8)
    return Tiles(data)


def random_byte_tiles(seed: int, n: int, k: int) -> Tiles:
    """Tiles of a weight [n, k] filled with random bytes, scales and all, as the article's first filling did it: the low
    bytes of a 32-bit xorshift (13, 17, 5) that starts from `seed`. `Tiles.nonfinite` counts what that spoils.

    Raises ValueError for a seed outside 1..2**32 - 1, n no multiple of 4 and k no multiple of 32.
    """
    if isinstance(seed, bool) or not isinstance(seed, int | np.integer) or not 1 <= seed < 2**32:
        raise ValueError(f"seed must be a whole number from 1 to 2**32 - 1, not {seed!r}")
    shape = _tiles_shape(n, k)
    return Tiles(_xorshift_bytes(int(seed), math.prod(shape)).reshape(shape))


def _xorshift_bytes(seed, count):
    """The generator's first `count` low bytes. A step is linear over the bits of its state, so many steps are too:
    65536 states in a row, once found, all move on by 65536 steps at once, by what that does to each bit."""
    bits = np.uint32(1) << np.arange(32, dtype=np.uint32)
    images, states = _xorshift(bits), _xorshift(np.array([seed], np.uint32))
    while len(states) < 1 << 16:
        states = np.concatenate([states, _apply(images, states)])
        images = _apply(images, images)
    out = np.empty((math.ceil(count / len(states)), len(states)), np.uint8)
    for chunk in out:
        chunk[:] = states.astype(np.uint8)
        states = _apply(images, states)
    return out.reshape(-1)[:count]


def _xorshift(x):
    x = x ^ x << np.uint32(13)
    x = x ^ x >> np.uint32(17)
    return x ^ x << np.uint32(5)


def _apply(images, x):
    """The linear map that takes bit i to images[i], for every x: a table look-up for each byte."""
    result = np.zeros_like(x)
    for shift in range(0, 32, 8):
        table = np.zeros(1, np.uint32)
        for image in images[shift:shift + 8]:
            table = np.concatenate([table, table ^ image])
        result ^= table[x >> np.uint32(shift) & np.uint32(255)]
    return result


def _tile_words(data):
    """A view [N / 4, row, K / 32, quarter, byte] of the words in tiles' data."""
    words = data[..., 2 * TILE_ROWS:].reshape(*data.shape[:2], -1, TILE_ROWS, 4)
    return words.transpose(0, 3, 1, 2, 4)


def _tiles_shape(n, k):
    _check_positive("n", n)
    _check_positive("k", k)
    _check_tile_rows(n)
    if k % BLOCK:
        raise ValueError(f"K = {k} is no multiple of {BLOCK}, the columns of a tile")
    return n // TILE_ROWS, k // BLOCK, TILE_BYTES


def _check_tile_rows(n):
    if n % TILE_ROWS:
        raise ValueError(f"N = {n} rows are no multiple of {TILE_ROWS}, the rows of a tile: add rows of zeros")


# ---------------------------------------------------------------- floats to codes

def quantize(w: np.ndarray, precision: str, group: int = BLOCK) -> Strips:
    """Strips of the float weight w[N, K], rounded by the rule of Q8_0 ("int8") or Q4_0 ("int4").

    With group 32 and K a multiple of it, codes and scales are those of gguf.quants to the bit: the scale is
    float16, while codes are rounded against the float32 scale before that. Other groups, and a last partial
    one, follow the same rule. Wider floats are first rounded to float32, as gguf does.

    Raises TypeError for weights that are no floats; ValueError for an unknown precision, a shape other than
    [N, K], group < 1, NaN or infinite weights (naming row and column), and weights whose scale is beyond
    float16 (naming row and group).
    """
    _check_precision(precision)
    _check_positive("group", group)
    w = _finite_matrix(w, "w")
    strips = _empty(*w.shape, group, precision)
    rule = _round_q8_0 if precision == "int8" else _round_q4_0
    for line in _lines(strips.n):  # a line at a time: temporaries that stay in cache
        codes, scales = rule(_in_groups(w[line], group))
        with np.errstate(over="ignore"):  # reported below
            scales = scales.astype(np.float16)
        if not np.isfinite(scales).all():
            row, g = np.argwhere(~np.isfinite(scales))[0]
            row += line.start
            peak = np.abs(w[row, g * group:(g + 1) * group]).max()
            raise ValueError(f"row {row}, group {g} of w reaches {peak:g}, and its scale is beyond the "
                             f"float16 of {_BLOCKS_OF[precision]}: scale the weights down")
        strips.codes[:, line] = codes.reshape(len(codes), -1)[:, :strips.k].T
        strips.scales[:, line] = scales.T
    return strips.check()


def quantize_activations(x: np.ndarray, group: int = BLOCK) -> tuple[np.ndarray, np.ndarray]:
    """Codes int8 [M, K] in -127..127 and scales float32 [M, groups] of the activations x[M, K].

    Symmetric, one scale a row and group: scale = max |x| / 127, code = x / scale rounded half to even. A
    group of zeros has scale 0. This is the activation path of grouped_gemm, 3.1 (first generation).

    Raises TypeError where x holds no floats; ValueError for a shape other than [M, K], group < 1, and NaN or
    infinite values, naming row and column.
    """
    _check_positive("group", group)
    x = _finite_matrix(x, "x")
    m, k = x.shape
    grouped = _in_groups(x, group)
    scales = np.abs(grouped).max(axis=-1) / np.float32(127)
    step = np.where(scales == 0, np.float32(1), scales)[..., None]  # values this small round to code 0
    # Only a denormal scale, rounded to a few bits itself, could take a code beyond 127.
    codes = np.rint(grouped / step).clip(-127, 127).astype(np.int8)
    return np.ascontiguousarray(codes.reshape(m, scales.shape[1] * group)[:, :k]), scales


def _round_q8_0(w):
    """Codes [rows, groups, group], rounded half away from zero, and float32 scales [rows, groups]."""
    scale = np.abs(w).max(axis=-1, keepdims=True) / 127
    q = w * _reciprocal(scale)
    size = np.abs(q)
    whole = np.floor(size)
    return np.copysign(whole + (size - whole >= 0.5), q).astype(np.int8), scale[..., 0]


def _round_q4_0(w):
    """As _round_q8_0, but the value of largest size, sign included, becomes -8, so that no code is wasted."""
    peak = np.take_along_axis(w, np.abs(w).argmax(axis=-1, keepdims=True), axis=-1)
    scale = peak / -8
    q = np.trunc(w * _reciprocal(scale) + 8.5).clip(0, 15)
    return (q - 8).astype(np.int8), scale[..., 0]


def _reciprocal(scale):
    """1 / scale; 0 where that is infinite: there the scale is 0, or becomes 0 as float16."""
    with np.errstate(divide="ignore", over="ignore"):
        inverse = 1 / scale
    return np.where(np.isfinite(inverse), inverse, 0)


def _in_groups(x, group):
    """x[rows, K] as [rows, groups, group], the last group filled up with zeros, which change no maximum."""
    rows, k = x.shape
    groups = math.ceil(k / group)
    if groups * group != k:
        x = np.pad(x, ((0, 0), (0, groups * group - k)))
    return x.reshape(rows, groups, group)


# ---------------------------------------------------------------- blocks and back

def strips_from_blocks(blocks: np.ndarray, kind: str) -> Strips:
    """Strips of Q8_0 or Q4_0 blocks, uint8 [N, bytes] as gguf's reader gives them.

    Q8_0: 34 bytes a block, a float16 scale and 32 int8. Q4_0: 18 bytes, a float16 scale and 16 bytes whose
    low nibbles are weights 0..15 and whose high nibbles are 16..31, each 8 above its code.

    Raises ValueError for another kind, for rows that are no whole blocks, and for a scale that is NaN or
    infinite (about 1 in 32 of random bytes is), naming row and block; TypeError for a dtype other than uint8.
    """
    if kind not in BLOCK_BYTES:
        raise ValueError(f"blocks of kind {kind!r} make no strips; those of {' and '.join(BLOCK_BYTES)} do")
    blocks = _whole_blocks(blocks, kind)
    n, scales = len(blocks), _block_scales(blocks).astype(np.float32)
    if kind == "Q8_0":
        codes = blocks[..., 2:].view(np.int8)
    else:
        nibbles = np.concatenate([blocks[..., 2:] & 15, blocks[..., 2:] >> 4], axis=-1)
        codes = nibbles.view(np.int8) - np.int8(8)
    return pack(codes.reshape(n, -1), scales, BLOCK, _PRECISION_OF[kind])


def blocks_from_strips(strips: Strips) -> np.ndarray:
    """The blocks, uint8 [N, bytes], that the strips were made from: Q8_0 for int8, Q4_0 for int4.

    Raises ValueError where no blocks hold the same numbers: a group other than 32, K no multiple of 32, or a
    scale that float16 does not hold, naming row and block.
    """
    strips.check()
    n, k = strips.n, strips.k
    kind = _BLOCKS_OF[strips.precision]
    if strips.group != BLOCK or k % BLOCK:
        raise ValueError(f"{kind} blocks hold {BLOCK} weights; strips with group {strips.group} and K={k} "
                         "have no such form")
    scales = strips.scales[:, :n].T
    with np.errstate(over="ignore"):
        halves = scales.astype("<f2")
    if (halves.astype(np.float32) != scales).any():
        row, block = np.argwhere(halves.astype(np.float32) != scales)[0]
        raise ValueError(f"the scale of row {row}, block {block} is {scales[row, block]:.9g}, which "
                         f"float16 does not hold; those from {kind} blocks or from quantize() are held")
    codes = strips.codes[:, :n].T.reshape(n, -1, BLOCK)
    if kind == "Q4_0":
        nibbles = (codes + np.int8(8)).view(np.uint8)
        codes = nibbles[..., :BLOCK // 2] | nibbles[..., BLOCK // 2:] << 4
    scale_bytes = np.ascontiguousarray(halves)[..., None].view(np.uint8)
    return np.concatenate([scale_bytes, codes.view(np.uint8)], axis=-1).reshape(n, -1)


# ---------------------------------------------------------------- GGUF files

class _Reader(gguf.GGUFReader):
    """gguf's reader, which takes a file cut short for a shorter array, made to measure before it reads."""

    def _get(self, offset, dtype, count=1, override_order=None):
        # A plain array of the mapped file: slicing an np.memmap is most of the time that a vocabulary takes.
        self.data = np.asarray(self.data)
        end = offset + np.dtype(dtype).itemsize * int(count)
        if end > self.data.size:
            raise ValueError(f"its header goes on to byte {end}, the file ends at {self.data.size}: "
                             "it is truncated")
        return super()._get(offset, dtype, count, override_order)

    def _build_tensors(self, start, fields):
        for field in fields:
            _, _, _, dims, kind, offset = field.parts
            block, size = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType(kind[0])]
            end = start + int(offset[0]) + math.prod(map(int, dims)) // block * size
            if end > self.data.size:
                raise ValueError(f"tensor {field.name!r} ends at byte {end}, the file at {self.data.size}: "
                                 "it is truncated")
        super()._build_tensors(start, fields)


def open_gguf(path: str | os.PathLike) -> gguf.GGUFReader:
    """The package gguf's reader of a file, its tensors mapped and not yet read.

    Raises ValueError, with the path and the reason, for a file that is empty, truncated (every tensor's end
    is compared to the file's size), of another format, or big-endian; OSError where it cannot be opened.
    """
    with open(path, "rb") as file:
        magic = file.read(4)
    if magic != b"GGUF":
        raise ValueError(f"{path} is no GGUF file: it starts with {magic!r}, not b'GGUF'" if magic else
                         f"{path} is no GGUF file: it is empty")
    try:
        reader = _Reader(path)
    except (ValueError, KeyError, IndexError) as error:
        raise ValueError(f"{path} cannot be read as a GGUF file: {error}") from error
    if reader.byte_order != "I":
        raise ValueError(f"{path} has the other byte order than this machine; convert it first")
    return reader


def gguf_tensor(source: str | os.PathLike | gguf.GGUFReader, name: str) -> gguf.ReaderTensor:
    """The tensor called `name` of a GGUF file (a path, or what open_gguf gave).

    Raises ValueError with the nearest names where there is none, and what open_gguf raises.
    """
    reader = source if isinstance(source, gguf.GGUFReader) else open_gguf(source)
    tensors = {tensor.name: tensor for tensor in reader.tensors}
    if name not in tensors:
        near = difflib.get_close_matches(name, tensors, n=5, cutoff=0.4) or list(tensors)[:5]
        raise ValueError(f"no tensor {name!r} among the {len(tensors)} of the file; "
                         f"nearest: {', '.join(near)}")
    return tensors[name]


def gguf_strips(source: str | os.PathLike | gguf.GGUFReader, name: str) -> Strips:
    """Strips of one Q8_0 or Q4_0 tensor of a GGUF file, bit for bit. Opening a model's file takes a second:
    for several tensors pass what open_gguf gave.

    Raises ValueError for a tensor that is missing or of another type, and what open_gguf raises.
    """
    tensor = gguf_tensor(source, name)
    kind = tensor.tensor_type.name
    if kind not in BLOCK_BYTES:
        raise ValueError(f"tensor {name!r} is {kind}; only {' and '.join(BLOCK_BYTES)} are strips as they "
                         "stand. With tensor = gguf_tensor(...), round it anew by "
                         "quantize(gguf.quants.dequantize(tensor.data, tensor.tensor_type), 'int8')")
    if tensor.data.ndim != 2:
        raise ValueError(f"tensor {name!r} has {tensor.data.ndim} dimensions; strips are made from [N, K]")
    return strips_from_blocks(tensor.data, kind)


# ---------------------------------------------------------------- shared checks and layout

def _check_precision(precision):
    if precision not in CODES:
        raise ValueError(f"precision {precision!r} has no strips; there are {' and '.join(map(repr, CODES))}")


def _check_positive(name, value):
    if isinstance(value, bool) or not isinstance(value, int | np.integer) or value < 1:
        raise ValueError(f"{name} must be a whole number of at least 1, not {value!r}")


def _finite_matrix(array, name):
    """`array` as float32 [rows, K], free of NaN and infinities."""
    array = np.asarray(array)
    if not np.issubdtype(array.dtype, np.floating):
        raise TypeError(f"{name} must hold floats, not {array.dtype}")
    if array.ndim != 2:
        raise ValueError(f"{name} must be a matrix, not of shape {array.shape}")
    with np.errstate(over="ignore"):
        array = array.astype(np.float32, copy=False)
    finite = np.isfinite(array)
    if not finite.all():
        row, column = np.argwhere(~finite)[0]
        raise ValueError(f"{name}[{row}, {column}] is {array[row, column]} as float32; {name} must be finite")
    return array


def _whole_blocks(blocks, kind):
    """Blocks [N, bytes] as [N, blocks, bytes of one], once their form and scales have been found to be right."""
    blocks = np.asarray(blocks)
    if blocks.dtype != np.uint8:
        raise TypeError(f"blocks must be uint8 [N, bytes], not {blocks.dtype}")
    size = BLOCK_BYTES[kind]
    if blocks.ndim != 2 or blocks.size == 0 or blocks.shape[1] % size:
        raise ValueError(f"{kind} blocks must be [N, bytes], bytes a multiple of {size}, neither 0; "
                         f"their shape is {blocks.shape}")
    blocks = blocks.reshape(len(blocks), -1, size)
    scales = _block_scales(blocks)
    if not np.isfinite(scales).all():
        row, block = np.argwhere(~np.isfinite(scales))[0]
        raise ValueError(f"the scale of row {row}, block {block} is {scales[row, block]}; "
                         "scales must be finite")
    return blocks


def _block_scales(blocks):
    return np.ascontiguousarray(blocks[..., :2]).view("<f2")[..., 0]


def _empty(n, k, group, precision):
    """Strips of zeros, to be filled and then checked."""
    _check_positive("group", group)
    npad = padded(n)
    return Strips(np.zeros((k, npad), np.int8), np.zeros((math.ceil(k / group), npad), np.float32),
                  n, k, group, precision)


def _lines(n):
    """The columns 0..n as slices of one line each: transposing by lines touches every cache line once."""
    return [slice(start, min(start + LINE, n)) for start in range(0, n, LINE)]
