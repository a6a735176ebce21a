"""A paged INT8 KV cache: symmetric codes and one float32 scale for every token's vector of every KV head.

    K[token, head, :] = k_scales[page, head, offset] * k_codes[page, head, offset, :]
    V[token, head, :] = v_scales[page, head, offset] * v_codes[page, head, :, offset]

A token of a sequence lies in the page that the sequence's block table names for token // block_size, at the
offset token % block_size. Pages may lie in any order, and sequences with a common beginning may share them.

Both layouts put the dimension that their matrix product sums over into neighbouring bytes, so that 16 bytes of a page
are 16 neighbouring steps of the sum, loaded at once: QK sums over head_dim, hence K [block, kv_head, block_size,
head_dim]; PV sums over tokens, hence V [block, kv_head, head_dim, block_size].

Source: int8_pv article, sections 1 and 3.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np

HEAD_DIMS = (64, 96, 128, 256)
LOAD = 16
"""Bytes, and so tokens of V, of one vector load: a block is a whole number of them."""
LARGEST_CODE = 127
DTYPES = {"k_codes": np.int8, "k_scales": np.float32, "v_codes": np.int8, "v_scales": np.float32,
          "block_tables": np.int32, "lengths": np.int32}
"""Of the arrays of a cache."""
STALE_CODE = -128
"""What `empty` fills pages with. No quantized vector has it."""


@dataclass(frozen=True, eq=False)
class PagedCache:
    """The keys and values of `batch` sequences; the arrays are NumPy's, or a device's (ops.int8_pv.on_device).

    k_codes: int8 [blocks, kv_heads, block_size, head_dim].  k_scales: float32 [blocks, kv_heads, block_size].
    v_codes: int8 [blocks, kv_heads, head_dim, block_size].  v_scales: float32 [blocks, kv_heads, block_size].
    block_tables: int32 [batch, max_blocks], the page of each block of a sequence.
    lengths: int32 [batch], tokens in each sequence, from 0.

    What lies behind a sequence's length, codes, scales and entries of the block table, has no meaning and is never
    looked at.
    """

    k_codes: Any
    k_scales: Any
    v_codes: Any
    v_scales: Any
    block_tables: Any
    lengths: Any

    @property
    def blocks(self) -> int:
        return self.k_codes.shape[0]

    @property
    def kv_heads(self) -> int:
        return self.k_codes.shape[1]

    @property
    def block_size(self) -> int:
        return self.k_codes.shape[2]

    @property
    def head_dim(self) -> int:
        return self.k_codes.shape[3]

    @property
    def batch(self) -> int:
        return self.lengths.shape[0]

    def check(self, codes: bool = True) -> "PagedCache":
        """This cache, in host memory, once every rule of the layout has been found to hold.

        codes: whether the codes are looked at too; if not, k_codes and v_codes may lie on a device.
        Raises TypeError for arrays of another kind or dtype; ValueError for another shape, strided arrays, a head_dim
        or block_size that the kernels do not take, a length below 0 or beyond the block table, an entry of the block
        table that a length reaches and that names no page, and, below the lengths, a scale that is NaN, infinite or
        negative or the code -128, naming the first bad place.
        """
        dimensions = {"k_codes": 4, "k_scales": 3, "v_codes": 4, "v_scales": 3, "block_tables": 2, "lengths": 1}
        for name, dtype in DTYPES.items():
            array = getattr(self, name)
            if not codes and dtype is np.int8:
                continue
            if not isinstance(array, np.ndarray) or array.dtype != dtype:
                found = getattr(array, "dtype", None) if isinstance(array, np.ndarray) else type(array).__name__
                raise TypeError(f"{name} must be a NumPy array of {np.dtype(dtype)}, not {found}")
            if array.ndim != dimensions[name]:
                raise ValueError(f"{name} has shape {array.shape}; expected {dimensions[name]} dimensions")
            if not array.flags.c_contiguous:
                raise ValueError(f"{name} has strides {array.strides}; expected a C-contiguous array: pass "
                                 "np.ascontiguousarray of it")
        blocks, heads, block_size, head_dim = self.k_codes.shape
        check_geometry(heads, head_dim, block_size)
        expected = {"k_scales": (blocks, heads, block_size), "v_codes": (blocks, heads, head_dim, block_size),
                    "v_scales": (blocks, heads, block_size), "block_tables": (self.batch, self.block_tables.shape[1])}
        for name, shape in expected.items():
            if getattr(self, name).shape != shape:
                raise ValueError(f"{name} has shape {getattr(self, name).shape}; k_codes of {self.k_codes.shape} and "
                                 f"lengths of {self.lengths.shape} take {shape}")
        _check_tables(self.block_tables, self.lengths, block_size, blocks)
        for sequence in range(self.batch):
            self._check_scales(sequence)
            if codes:
                self._check_codes(sequence)
        return self

    def _check_scales(self, sequence):
        pages, offsets = self.slots(sequence, 0, int(self.lengths[sequence])).T
        for name in ("k_scales", "v_scales"):
            scales = getattr(self, name)[pages, :, offsets]
            bad = ~(np.isfinite(scales) & (scales >= 0))
            if bad.any():
                token, head = np.argwhere(bad)[0]
                page, offset = self.slots(sequence, int(token), 1)[0]
                raise ValueError(f"{name}[{page}, {head}, {offset}], of token {token} and KV head {head} of sequence "
                                 f"{sequence}, is {scales[token, head]}; a scale must be finite and not negative")

    def _check_codes(self, sequence):
        k_codes, _, v_codes, _ = self.tokens(sequence)
        for name, codes in (("k_codes", k_codes), ("v_codes", v_codes)):
            if codes.size and codes.min() < -LARGEST_CODE:
                token, head, d = np.argwhere(codes < -LARGEST_CODE)[0]
                raise ValueError(f"{name} has the code {codes[token, head, d]} at token {token}, KV head {head}, "
                                 f"dimension {d} of sequence {sequence}; symmetric codes are {-LARGEST_CODE} to "
                                 f"{LARGEST_CODE} (is the token written?)")

    def slots(self, sequence: int, first: int, count: int) -> np.ndarray:
        """Where tokens first .. first + count - 1 of a sequence lie: int32 [count, 2], each a page and an offset.

        They may be tokens still to be written, behind the length. Raises ValueError where the block table has no
        place for them.
        """
        capacity = self.block_tables.shape[1] * self.block_size
        if first < 0 or count < 0 or first + count > capacity:
            raise ValueError(f"tokens {first} to {first + count - 1} of sequence {sequence}; its block table has "
                             f"places for 0 to {capacity - 1}")
        tokens = np.arange(first, first + count)
        pages = self.block_tables[sequence][tokens // self.block_size]
        return np.stack([pages, tokens % self.block_size], axis=1).astype(np.int32)

    def tokens(self, sequence: int) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
        """K codes, K scales, V codes and V scales of a sequence in the order of its tokens: codes
        [length, kv_heads, head_dim], scales [length, kv_heads]."""
        pages, offsets = self.slots(sequence, 0, int(self.lengths[sequence])).T
        return (self.k_codes[pages, :, offsets], self.k_scales[pages, :, offsets],
                self.v_codes[pages, :, :, offsets], self.v_scales[pages, :, offsets])

    def dequantize(self, sequence: int) -> tuple[np.ndarray, np.ndarray]:
        """K and V of a sequence in the order of its tokens, each float64 [length, kv_heads, head_dim]; exact."""
        k_codes, k_scales, v_codes, v_scales = self.tokens(sequence)
        return (k_codes * k_scales[:, :, None].astype(np.float64),
                v_codes * v_scales[:, :, None].astype(np.float64))


def quantize_vectors(x: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Codes int8 [..., head_dim] and scales float32 [...] of vectors x, float32 [..., head_dim].

    scale = amax / 127, code = x / scale to the nearest, half to even; both divisions in float32, as the kernel has
    them. A zero vector, and one so small that its scale underflows, has scale 0 and codes 0. A vector with a NaN or an
    infinity has a scale that is neither finite, which `PagedCache.check` names, and codes 0.
    Raises TypeError for another dtype.
    """
    if not isinstance(x, np.ndarray) or x.dtype != np.float32:
        raise TypeError(f"vectors are a {type(x).__name__} of {getattr(x, 'dtype', 'no dtype')}; expected a NumPy "
                        "array of float32")
    scales = np.abs(x).max(axis=-1, initial=0) / np.float32(LARGEST_CODE)
    usable = (scales > 0) & np.isfinite(scales)
    quotients = np.zeros_like(x)
    np.divide(x, scales[..., None], out=quotients, where=usable[..., None])
    # Only a subnormal scale, which has few bits, can be so far from amax / 127 that a quotient passes 127.
    codes = np.rint(np.clip(quotients, -LARGEST_CODE, LARGEST_CODE)).astype(np.int8)
    return codes, scales


def empty(kv_heads: int, head_dim: int, block_size: int, block_tables: np.ndarray, lengths: np.ndarray,
          blocks: int) -> PagedCache:
    """A cache whose pages hold the code -128 and NaN scales, so that reading what nobody wrote shows itself.

    Raises TypeError or ValueError for what `PagedCache.check` refuses of the geometry, tables and lengths.
    """
    check_geometry(kv_heads, head_dim, block_size)
    lengths = _int32("lengths", lengths, 1)
    tables = _tables(block_tables, len(lengths))
    _check_tables(tables, lengths, block_size, blocks)
    return PagedCache(np.full((blocks, kv_heads, block_size, head_dim), STALE_CODE, np.int8),
                      np.full((blocks, kv_heads, block_size), np.nan, np.float32),
                      np.full((blocks, kv_heads, head_dim, block_size), STALE_CODE, np.int8),
                      np.full((blocks, kv_heads, block_size), np.nan, np.float32), tables, lengths)


def quantize(keys: list[np.ndarray], values: list[np.ndarray], block_size: int,
             block_tables: np.ndarray | None = None, blocks: int | None = None) -> PagedCache:
    """The cache of sequences given by their keys and values, one float32 array [length, kv_heads, head_dim] each.

    block_tables: [batch, max_blocks]; None lays the pages in order, none shared.
    blocks: pages of the cache; None takes as many as the block table names within the lengths.
    Raises TypeError or ValueError for what `PagedCache.check` refuses, arrays that do not fit each other, values that
    are not finite, and a page that two sequences share but want to hold different vectors.
    """
    _check_sequences(keys, values)
    lengths = np.array([len(k) for k in keys], np.int32)
    _, kv_heads, head_dim = keys[0].shape
    check_geometry(kv_heads, head_dim, block_size)
    if block_tables is None:
        needed = -(-lengths // block_size)
        first = np.cumsum(needed) - needed
        block_tables = first[:, None] + np.arange(needed.max())
        block_tables[np.arange(needed.max()) >= needed[:, None]] = -1
    block_tables = _tables(block_tables, len(lengths))
    if blocks is None:
        blocks = int(block_tables[_reached(block_tables, lengths, block_size)].max(initial=-1)) + 1
    cache = empty(kv_heads, head_dim, block_size, block_tables, lengths, blocks)
    quantized = [(*quantize_vectors(k), *quantize_vectors(v)) for k, v in zip(keys, values, strict=True)]
    for sequence, (k_codes, k_scales, v_codes, v_scales) in enumerate(quantized):
        pages, offsets = cache.slots(sequence, 0, int(lengths[sequence])).T
        cache.k_codes[pages, :, offsets], cache.k_scales[pages, :, offsets] = k_codes, k_scales
        cache.v_codes[pages, :, :, offsets], cache.v_scales[pages, :, offsets] = v_codes, v_scales
    cache.check()
    for sequence, wanted in enumerate(quantized):
        if not all(map(np.array_equal, cache.tokens(sequence), wanted)):
            raise ValueError(f"sequence {sequence} shares a page with a sequence, or a block of its own, whose vectors "
                             "differ there; only blocks of equal tokens can be shared")
    return cache


def check_geometry(kv_heads: int, head_dim: int, block_size: int) -> None:
    """Raises ValueError for sizes that no kernel takes."""
    if kv_heads < 1:
        raise ValueError(f"kv_heads = {kv_heads}; expected at least 1")
    if head_dim not in HEAD_DIMS:
        raise ValueError(f"head_dim = {head_dim}; expected one of {', '.join(map(str, HEAD_DIMS))}")
    if block_size < LOAD or block_size % LOAD:
        raise ValueError(f"block_size = {block_size}; expected a multiple of {LOAD}, since V is loaded {LOAD} tokens "
                         "at a time")


def _check_tables(tables, lengths, block_size, blocks):
    """Lengths that the tables hold and, as far as the lengths reach, entries that name pages."""
    capacity = tables.shape[1] * block_size
    bad = np.flatnonzero((lengths < 0) | (lengths > capacity))
    if bad.size:
        raise ValueError(f"lengths[{bad[0]}] = {lengths[bad[0]]}; expected 0 to {capacity}, which "
                         f"{tables.shape[1]} blocks of {block_size} tokens hold")
    bad = np.argwhere(_reached(tables, lengths, block_size) & ((tables < 0) | (tables >= blocks)))
    if bad.size:
        sequence, block = bad[0]
        raise ValueError(f"block_tables[{sequence}, {block}] = {tables[sequence, block]}; the cache has the pages 0 to "
                         f"{blocks - 1}, and sequence {sequence} of {lengths[sequence]} tokens reaches that block")


def _reached(tables, lengths, block_size) -> np.ndarray:
    """Which entries of the block tables a length reaches."""
    return np.arange(tables.shape[1]) * block_size < lengths[:, None]


def _tables(block_tables, batch) -> np.ndarray:
    tables = _int32("block_tables", block_tables, 2)
    if len(tables) != batch:
        raise ValueError(f"block_tables has {len(tables)} rows; expected {batch}, one for each sequence")
    return tables


def _check_sequences(keys, values):
    if not keys or len(keys) != len(values):
        raise ValueError(f"{len(keys)} arrays of keys and {len(values)} of values; expected one of both for each "
                         "sequence, and at least one sequence")
    for sequence, pair in enumerate(zip(keys, values, strict=True)):
        for name, array in zip(("keys", "values"), pair, strict=True):
            if not isinstance(array, np.ndarray) or array.dtype != np.float32:
                raise TypeError(f"{name}[{sequence}] is a {type(array).__name__} of "
                                f"{getattr(array, 'dtype', 'no dtype')}; expected a NumPy array of float32")
            if array.ndim != 3 or array.shape != (len(pair[0]), *keys[0].shape[1:]):
                raise ValueError(f"{name}[{sequence}] has shape {array.shape}; expected [length, kv_heads, head_dim], "
                                 f"as keys[{sequence}] has {pair[0].shape} and keys[0] {keys[0].shape}")
            if not np.isfinite(array).all():
                token, head, d = np.argwhere(~np.isfinite(array))[0]
                raise ValueError(f"{name}[{sequence}][{token}, {head}, {d}] is {array[token, head, d]}; only finite "
                                 "values can be quantized")


def _int32(name, array, dimensions) -> np.ndarray:
    array = np.asarray(array)
    if not np.issubdtype(array.dtype, np.integer):
        raise TypeError(f"{name} has dtype {array.dtype}; expected integers")
    if array.ndim != dimensions:
        raise ValueError(f"{name} has shape {array.shape}; expected {dimensions} dimensions")
    if array.size and (array.min() < -2**31 or array.max() >= 2**31):
        raise ValueError(f"{name} holds {array.min()} to {array.max()}; expected numbers of 32 bits")
    return np.ascontiguousarray(array, np.int32)
