"""Attention on a paged INT8 KV cache (`kernelbook.kv_cache`).

    out[query, head] = sum over tokens t of  softmax_t(softmax_scale * q . K[t]) * V[t]

    write_tokens    quantizes new tokens' K and V into the cache's pages on a device
    Attention       decode and prefill on such a cache, in a Form: what P V multiplies, by which instruction
    reference       the attention in float64 on the dequantized cache

Source: int8_pv article, sections 1 to 3.
"""

from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from numbers import Real

import numpy as np

from kernelbook.backends import Backend, Source
from kernelbook.fragments import INSTRUCTIONS, Tokens
from kernelbook.kv_cache import DTYPES, HEAD_DIMS, PagedCache, check_geometry
from kernelbook.ops.checks import check_apart, check_array, check_count

# The geometry compiled into kernels/int8_pv/1_quantize_kv.cu and 2_decode.cu.
WAVES = 4
TILE = 64
PREFILL_WAVES = (4, 8, 12, 16)
PREFILL_ROWS = 16  # of a wave
WGMMA_ALIGN = 1024  # bytes that a stage of tiles is a multiple of, as 6_prefill_wgmma.cu lays it out
LARGEST_SOFTMAX_SCALE = 1e30  # so that scores stay far from the largest float
MERGE_THREADS = 256
MERGE_PARTS = 16  # of a row, that the threads of one slice go through
MAX_SPLITS = 16
PART_COST = 4  # tiles that take as long as beginning and ending a part
PV = ("int8", "uint8", "uint8_offset", "bf16", "bf16_dequantized", "bf16_pages")
"""What P V multiplies: see enum Pv in kernels/int8_pv/attention.h."""
MATRIX = {"mma": ("mma_m16n8k32_s8", 32), "mfma": ("mfma_i32_16x16x32_i8", 64), "mmac": ("mmac_i32_16x16x32_i8", 64)}
"""Matrix instructions by the name that kernels take: the integer one in `fragments`, and the lanes of its wave."""


@dataclass(frozen=True)
class Form:
    """What an attention kernel is compiled as.

    pv: one of `PV`. matrix: one of `MATRIX`; None takes the backend's first.
    swapped: both products transposed, cache x rows; None takes what a target is fastest with (decode: True on mma).
    scale_tokens: tokens under one scale of integer weights: 32, one step's, or 64, 128, ... up to a partition.
    partition: tokens of a decode partition, a multiple of 64 and of scale_tokens, or 128 .. 1024.
    And, wrong on purpose: grouping "logical" (scales over tokens 0-31 and 32-63 instead of a step's own), read 8 (of
    each 16 bytes of V), common_scale (one scale of V taken out of the sum).
    trace: keep weights, codes and integer sums of a decode: see Attention.trace.
    Raises ValueError for values that do not exist or do not go together.
    """

    pv: str = "int8"
    matrix: str | None = None
    swapped: bool | None = None
    scale_tokens: int = 32
    partition: int = 256
    grouping: str = "fragment"
    read: int = 16
    common_scale: bool = False
    trace: bool = False

    def __post_init__(self):
        for name, known in (("pv", PV), ("matrix", (None, *MATRIX)), ("grouping", ("fragment", "logical")),
                            ("read", (8, 16)), ("scale_tokens", (32, 64, 128, 256, 512, 1024)),
                            ("partition", (128, 256, 512, 1024)), ("swapped", (None, False, True)),
                            ("common_scale", (False, True)), ("trace", (False, True))):
            _check_known(name, getattr(self, name), known)
        if self.scale_tokens > self.partition:
            raise ValueError(f"scale_tokens = {self.scale_tokens}; a scale covers at most a partition, "
                             f"{self.partition}")
        if self.grouping == "logical" and self.scale_tokens != 32:
            raise ValueError(f"grouping 'logical' with scale_tokens = {self.scale_tokens}; it is another cut into 32")
        if not self.is_integer and (self.scale_tokens, self.grouping, self.common_scale) != (32, "fragment", False):
            raise ValueError(f"pv {self.pv!r} has no integer weights, and so none of scale_tokens, grouping and "
                             "common_scale")
        if self.pv == "bf16_pages" and self.read != 16:
            raise ValueError("read = 8 reads half of the INT8 pages; pv 'bf16_pages' does not read them")
        if self.pv == "uint8" and self.matrix not in (None, "mma"):
            raise ValueError(f"pv 'uint8' needs a mixed-sign instruction, which {self.matrix} has not; take "
                             "'uint8_offset'")

    @property
    def is_integer(self) -> bool:
        return self.pv in ("int8", "uint8", "uint8_offset")

    @property
    def largest(self) -> int:
        """The largest code of a weight."""
        return 127 if self.pv == "int8" else 255

    def on(self, backend: Backend) -> "Form":
        """This form with matrix and swapped chosen for a backend. Raises ValueError where it cannot run there."""
        matrix = self.matrix or next(iter(backend.matrix), None)
        if matrix is None:
            raise ValueError(f"{backend.device} has none of the matrix instructions {', '.join(MATRIX)}")
        if MATRIX[matrix][1] != backend.wave:
            raise ValueError(f"matrix {matrix!r} takes waves of {MATRIX[matrix][1]} lanes; {backend.device} has "
                             f"{backend.wave}")
        if matrix not in backend.matrix:
            raise ValueError(f"matrix is {matrix!r}; {backend.device} has {', '.join(backend.matrix)}")
        swapped = matrix == "mma" if self.swapped is None else self.swapped
        return replace(self, matrix=matrix, swapped=swapped)

    @property
    def tokens(self) -> Tokens:
        """Which tokens each step multiplies; of a form whose matrix and swapped are chosen."""
        return Tokens(INSTRUCTIONS[MATRIX[self.matrix][0]], 16, "A" if self.swapped else "B")

    def defines(self, head_dim: int) -> dict:
        """Constants that the kernels are compiled with."""
        chosen = {"MATRIX": self.matrix} if self.matrix else {}
        return chosen | {"HEAD_DIM": head_dim, "PV": self.pv.upper(), "SWAPPED": self.swapped, "READ": self.read,
                         "SCALE_TOKENS": self.scale_tokens, "LOGICAL_GROUPS": self.grouping == "logical",
                         "COMMON_SCALE": self.common_scale}


def _check_known(name, value, known):
    """ValueError where `value` is none of `known`, of the same type."""
    if not any(value == one and type(value) is type(one) for one in known):
        raise ValueError(f"{name} is {value!r}; expected one of {', '.join(map(str, known))}")


def sources() -> list[Source]:
    """The kernels of the family for static evidence: the producer at every head_dim, the attention at 128 with P V in
    INT8 and in BF16, on each target's own matrix instructions."""
    size = {"HEAD_DIM": 128, "SCALE_TOKENS": 32, "READ": 16, "LOGICAL_GROUPS": 0, "COMMON_SCALE": 0}
    forms = [size | {"PV": pv} for pv in ("INT8", "BF16")]
    return [*(Source("int8_pv/1_quantize_kv.cu", {"HEAD_DIM": head_dim}) for head_dim in HEAD_DIMS),
            *(Source("int8_pv/2_decode.cu", form | {"PARTITION": 256, "TRACE": 0}) for form in forms),
            *(Source("int8_pv/3_prefill.cu", form | {"WAVES": 8, "STAGES": 3}) for form in forms),
            Source("int8_pv/4_merge_partitions.cu", {"HEAD_DIM": 128, "SLICES": 8}),
            Source("int8_pv/5_dequantize_v.cu"),
            Source("int8_pv/6_prefill_wgmma.cu", forms[0] | {"SWAPPED": 0, "GROUPS": 2, "TILE": 64, "STAGES": 4})]


def on_device(backend: Backend, cache: PagedCache) -> PagedCache:
    """A copy of a cache in host memory, on the device."""
    return PagedCache(*(backend.array(getattr(cache, f.name)) for f in fields(cache)))


def on_host(backend: Backend, cache: PagedCache) -> PagedCache:
    """A copy of a cache on the device, in host memory."""
    return PagedCache(*(backend.numpy(getattr(cache, f.name)) for f in fields(cache)))


def write_tokens(backend: Backend, cache: PagedCache, k, v, slots: np.ndarray) -> None:
    """Quantize new tokens' keys and values into the pages of a cache on the device. Nothing is synchronized.

    k, v: float32 [tokens, kv_heads, head_dim] on the device.
    slots: integers [tokens, 2] in host memory: the page and the offset in it that a token goes to, as
    `PagedCache.slots` gives them. Block tables and lengths stay as they are.
    The bits are those of `kv_cache.quantize_vectors`; values are not looked at, and a vector with a NaN or an infinity
    gets a scale that is not finite.
    Raises TypeError or ValueError, before anything is launched, on a wrong dtype, device, shape, stride or alignment,
    on a slot outside the cache or given twice, and where k, v and the cache share memory.
    """
    if getattr(cache.k_codes, "ndim", None) != 4:
        raise ValueError(f"k_codes has shape {getattr(cache.k_codes, 'shape', None)}; expected "
                         "[blocks, kv_heads, block_size, head_dim]")
    blocks, heads, block_size, head_dim = cache.k_codes.shape
    check_geometry(heads, head_dim, block_size)
    pages = {"k_codes": (np.int8, (blocks, heads, block_size, head_dim)),
             "k_scales": (np.float32, (blocks, heads, block_size)),
             "v_codes": (np.int8, (blocks, heads, head_dim, block_size)),
             "v_scales": (np.float32, (blocks, heads, block_size))}
    for name, (dtype, shape) in pages.items():
        check_array(backend, getattr(cache, name), name, shape, dtype, 16)
    slots = _check_slots(slots, blocks, block_size)
    for name, array in (("k", k), ("v", v)):
        check_array(backend, array, name, (len(slots), heads, head_dim), np.float32, 4)
    written = {name: getattr(cache, name) for name in pages}
    check_apart(backend, written, {"k": k, "v": v})
    if len(slots) == 0:
        return
    kernel = backend.compile("int8_pv/1_quantize_kv.cu", {"HEAD_DIM": head_dim}).kernel("quantize_kv")
    numbers = map(np.int32, (len(slots), heads, block_size))
    kernel((-(-len(slots) * heads // WAVES), 1, 1), (backend.wave, WAVES, 1),
           [k, v, backend.array(slots), *written.values(), *numbers])


def _check_slots(slots, blocks, block_size) -> np.ndarray:
    """The slots as the kernel reads them, int32 [tokens, 2], once each is a place in the cache and no two are one."""
    if not isinstance(slots, np.ndarray) or not np.issubdtype(slots.dtype, np.integer):
        raise TypeError(f"slots is a {type(slots).__name__} of {getattr(slots, 'dtype', 'no dtype')}; expected a NumPy "
                        "array of integers [tokens, 2]")
    if slots.ndim != 2 or slots.shape[1] != 2:
        raise ValueError(f"slots has shape {slots.shape}; expected [tokens, 2], a page and an offset for each token")
    bad = np.flatnonzero(((slots < 0) | (slots >= (blocks, block_size))).any(axis=1))
    if bad.size:
        page, offset = slots[bad[0]]
        raise ValueError(f"slots[{bad[0]}] is page {page}, offset {offset}; the cache has the pages 0 to {blocks - 1} "
                         f"of {block_size} tokens")
    places = slots[:, 0].astype(np.int64) * block_size + slots[:, 1]
    order = np.argsort(places, kind="stable")
    twice = np.flatnonzero(np.diff(places[order]) == 0)
    if twice.size:
        first, second = order[twice[0]:twice[0] + 2]
        raise ValueError(f"slots[{first}] and slots[{second}] are both page {slots[first, 0]}, offset "
                         f"{slots[first, 1]}; a place takes one token")
    return np.ascontiguousarray(slots, np.int32)


@dataclass(frozen=True)
class Trace:
    """What a decode computed on its way, in host memory.

    weights: float32 [batch, queries, heads, tokens], W before it is quantized. codes: int32, the same shape, W's codes.
    sums: int32 [batch, queries, heads, scales, head_dim], of codes times V for every scale of the weights, in order.
    Places of tokens that a sequence does not have hold no meaning.
    """

    weights: np.ndarray
    codes: np.ndarray
    sums: np.ndarray


class Attention:
    """Attention on a cache on the device, in a form.

    The lengths and block tables are read once, here, and checked with the scales: a cache that has grown takes a new
    Attention. bf16_pages: the form "bf16_pages" attends to V that `dequantize` has put into pages of its own.
    Raises what `PagedCache.check` raises but for codes, which are not looked at, and ValueError for a form that the
    backend cannot run.
    """

    def __init__(self, backend: Backend, cache: PagedCache, form: Form = Form()):
        self.backend, self.cache, self.form = backend, cache, form.on(backend)
        self._given_swapped = form.swapped
        for name, dtype in DTYPES.items():
            array = getattr(cache, name)
            check_array(backend, array, name, getattr(array, "shape", ()), dtype, 4 if dtype is np.int32 else 16)
        on_host = {f.name: backend.numpy(getattr(cache, f.name)) for f in fields(cache) if "codes" not in f.name}
        self._host = replace(cache, **on_host).check(codes=False)
        self.value_pages = cache.v_codes
        self.trace = None
        if self.form.pv == "bf16_pages":
            self.value_pages = backend.empty(cache.v_codes.shape, np.uint16)
            self.dequantize()

    def dequantize(self) -> None:
        """Write V of every page as bf16 into the pages that the form "bf16_pages" attends to."""
        runs = self.cache.v_codes.size // 16
        if runs == 0:
            return
        kernel = self.backend.compile("int8_pv/5_dequantize_v.cu").kernel("dequantize_v")
        kernel((-(-runs // 256), 1, 1), (256, 1, 1),
               [self.cache.v_codes, self.cache.v_scales, self.value_pages, np.uint64(runs),
                np.int32(self.cache.head_dim), np.int32(self.cache.block_size)])

    def decode(self, q, *, softmax_scale: float | None = None, causal_offset=None, out=None) -> Callable:
        """A call of no arguments that launches the attention of what `q` then holds and returns `out`.

        q: float32 [batch, queries, heads, head_dim] on the device. out: the same, to write into; made where not given.
        softmax_scale, causal_offset: as `reference` takes them.
        Everything is checked here, once; the call only launches, and nothing is synchronized. Values of q are not
        looked at: a NaN or infinite one makes the rows that hold it meaningless and leaves others alone.
        Raises TypeError or ValueError, before anything is launched, on a wrong dtype, device, shape, stride or
        alignment, on heads that are no multiple of the cache's, and where `out` shares memory with what is read.
        """
        queries, heads, scale, offsets, out = self._check(q, softmax_scale, causal_offset, out)
        form, cache, backend = self.form, self.cache, self.backend
        partitions = max(1, -(-int(self._host.lengths.max(initial=0)) // form.partition))
        rows = cache.batch * queries * heads
        if rows == 0:
            return lambda: out
        parts = out if partitions == 1 else backend.empty((rows, partitions, cache.head_dim), np.float32)
        stats = backend.empty((rows, partitions, 2), np.float32)
        trace = [None] * 3
        if form.trace:
            tokens, scales = partitions * form.partition, partitions * form.partition // form.scale_tokens
            shape = (cache.batch, queries, heads)
            trace = [backend.empty((*shape, tokens), np.float32), backend.empty((*shape, tokens), np.int32),
                     backend.empty((*shape, scales, cache.head_dim), np.int32)]
        defines = form.defines(cache.head_dim) | {"PARTITION": form.partition, "TRACE": form.trace}
        kernel = backend.compile("int8_pv/2_decode.cu", defines).kernel("decode")
        merge = self._merge(parts, stats, cache.lengths, out, rows, partitions, form.partition, queries * heads)
        row_tiles = -(-queries * heads // cache.kv_heads // self._rows)
        args = [q, cache.k_codes, cache.k_scales, self.value_pages, cache.v_scales, cache.block_tables, cache.lengths,
                offsets, parts, stats, *trace,
                *map(np.int32, (queries, heads // cache.kv_heads, cache.kv_heads, partitions, cache.block_size,
                                cache.block_tables.shape[1])), np.float32(scale)]

        def launch():
            kernel((row_tiles * partitions, cache.kv_heads, cache.batch), (backend.wave, WAVES, 1), args)
            if partitions > 1:
                merge()
            if form.trace:
                self.trace = Trace(*map(backend.numpy, trace))
            return out
        return launch

    def prefill(self, q, *, softmax_scale: float | None = None, causal_offset=None, out=None, waves: int | None = None,
                splits: int | None = None, wgmma: bool | None = None) -> Callable:
        """The same for many query rows: see `decode`. An offset of length - queries makes the queries the last of
        their sequence.

        waves: of a block, 16 rows each: 4, 8, 12 or 16. splits: parts that each history is cut into.
        wgmma: on Hopper's warpgroup instructions (kernels/int8_pv/6_prefill_wgmma.cu), which take head_dim 64, 128 and
        256, "int8" and "uint8". None chooses, each.
        Raises also ValueError for a form that prefill does not have: scales above a tile (64 tokens, 128 for wgmma with
        head_dim 64), the wrong ones, a trace, `swapped` other than the one in which scores stay in registers (True for
        mfma, False for mma and mmac), and wgmma where there is none.
        """
        form, cache, backend = _prefill_form(self.form, self._given_swapped), self.cache, self.backend
        queries, heads, scale, offsets, out = self._check(q, softmax_scale, causal_offset, out)
        rows, kv_rows = cache.batch * queries * heads, queries * heads // cache.kv_heads
        no_wgmma = _no_wgmma(form, backend, cache.head_dim)
        if wgmma and no_wgmma:
            raise ValueError(f"wgmma = {wgmma}: {no_wgmma}")
        wgmma = no_wgmma is None if wgmma is None else bool(wgmma)
        tile = _wgmma_tile(cache.head_dim, form.scale_tokens) if wgmma else TILE
        if form.scale_tokens > tile:
            raise ValueError(f"scale_tokens = {form.scale_tokens}; a scale covers at most a tile of prefill, {tile} "
                             f"tokens here")
        known_waves = PREFILL_WAVES[:3] if wgmma else PREFILL_WAVES
        _check_known("waves", waves, (None, *known_waves))
        if splits is not None:
            check_count("splits", splits)
        if rows == 0:
            return lambda: out
        waves = waves or _choose_waves(kv_rows, _most_waves(cache.head_dim))
        row_blocks = -(-kv_rows // (waves * PREFILL_ROWS))
        tiles = max(1, -(-int(self._host.lengths.max(initial=0)) // tile))
        if splits is None:
            splits = choose_splits(row_blocks * cache.kv_heads * cache.batch, tiles, backend.multiprocessors)
        splits = min(splits, tiles)
        parts = out if splits == 1 else backend.empty((rows, splits, cache.head_dim), np.float32)
        stats = None if splits == 1 else backend.empty((rows, splits, 2), np.float32)
        stage = tile * (cache.head_dim * (3 if form.pv == "bf16_pages" else 2) + 8)
        if wgmma:
            stage += 4 * tile  # a third array of scales
            stage += -stage % WGMMA_ALIGN
        stages = min(4, (112 << 10) // stage)
        shared = stages * stage + waves * PREFILL_ROWS * cache.head_dim
        if wgmma:
            shared += 2 * WGMMA_ALIGN  # to align it; barriers
        file, size = "3_prefill", {"WAVES": waves}
        if wgmma:
            file, size = "6_prefill_wgmma", {"GROUPS": waves // 4, "TILE": tile}
        defines = form.defines(cache.head_dim) | size | {"STAGES": stages}
        kernel = backend.compile(f"int8_pv/{file}.cu", defines).kernel("prefill")
        merge = self._merge(parts, stats, None, out, rows, splits, 1, queries * heads)
        args = [q, cache.k_codes, cache.k_scales, self.value_pages, cache.v_scales, cache.block_tables, cache.lengths,
                offsets, parts, stats,
                *map(np.int32, (queries, heads // cache.kv_heads, cache.kv_heads, splits, cache.block_size,
                                cache.block_tables.shape[1])), np.float32(scale)]
        grid, block = (row_blocks, cache.kv_heads * splits, cache.batch), (backend.wave, waves + 4 * wgmma, 1)

        def launch():
            kernel(grid, block, args, shared)
            if splits > 1:
                merge()
            return out
        return launch

    def _merge(self, parts, stats, lengths, out, rows, partitions, tokens, rows_of_sequence) -> Callable:
        """What launches kernels/int8_pv/4_merge_partitions.cu."""
        groups = MERGE_THREADS // (self.cache.head_dim // 4)
        slices = groups if partitions > MERGE_PARTS else 1
        kernel = self.backend.compile("int8_pv/4_merge_partitions.cu",
                                      {"HEAD_DIM": self.cache.head_dim, "SLICES": slices}).kernel("merge_partitions")
        args = [parts, stats, lengths, out, *map(np.int32, (rows, partitions, tokens, rows_of_sequence))]
        blocks = -(-rows // (groups // slices))
        return lambda: kernel((blocks, 1, 1), (MERGE_THREADS, 1, 1), args)

    @property
    def _rows(self) -> int:
        """Rows of Q that one product takes."""
        instruction = INSTRUCTIONS[MATRIX[self.form.matrix][0]]
        return instruction.N if self.form.swapped else instruction.M

    def _check(self, q, softmax_scale, causal_offset, out):
        """The numbers and arrays of a launch: queries, heads, softmax_scale with log2(e), offsets, out."""
        cache, backend = self.cache, self.backend
        shape = getattr(q, "shape", ())
        queries, heads = shape[1:3] if len(shape) == 4 else (1, cache.kv_heads)  # any other is refused below
        check_array(backend, q, "q", (cache.batch, queries, heads, cache.head_dim), np.float32, 16)
        _check_heads(heads, cache)
        scale = _softmax_scale(softmax_scale, cache.head_dim)
        out = backend.empty(shape, np.float32) if out is None else out
        check_array(backend, out, "out", shape, np.float32, 16)
        read = {"q": q} | {f.name: getattr(cache, f.name) for f in fields(cache)}
        check_apart(backend, {"out": out}, read)
        offsets = None
        if causal_offset is not None:
            # beyond these, every token or none is seen, and the kernels' integers stay far from their ends
            capacity = cache.block_tables.shape[1] * cache.block_size
            offsets = np.clip(_offsets(causal_offset, cache), -queries - 1, capacity)
            offsets = backend.array(offsets.astype(np.int32))
        return queries, heads, scale * np.log2(np.e), offsets, out


def reference(q, cache: PagedCache, *, softmax_scale: float | None = None, causal_offset=None) -> np.ndarray:
    """Attention in float64 on a cache in host memory: q [batch, queries, heads, head_dim] -> float64 of that shape.

    Query heads h * group .. h * group + group - 1 read KV head h, group = heads / kv_heads.
    softmax_scale: None takes 1 / sqrt(head_dim).
    causal_offset: None lets every query see its whole sequence (decode); an integer, or one for each sequence, lets
    query i see the tokens 0 .. causal_offset + i, so that the history's length makes a prefill that follows it.
    A query that sees nothing, for it is masked or its sequence has length 0, is exactly 0.
    Raises what `PagedCache.check` raises; TypeError or ValueError on a q, softmax_scale or causal_offset that does not
    fit.
    """
    cache.check()
    q = np.asarray(q)
    if not np.issubdtype(q.dtype, np.floating):
        raise TypeError(f"q has dtype {q.dtype}; expected floats")
    if q.ndim != 4 or (q.shape[0], q.shape[3]) != (cache.batch, cache.head_dim):
        raise ValueError(f"q has shape {q.shape}; expected [{cache.batch}, queries, heads, {cache.head_dim}]")
    _, queries, heads, head_dim = q.shape
    _check_heads(heads, cache)
    softmax_scale = _softmax_scale(softmax_scale, head_dim)
    last = _last_seen(causal_offset, cache, queries)
    out = np.zeros(q.shape, np.float64)
    for sequence in range(cache.batch):
        k, v = cache.dequantize(sequence)
        seen = np.arange(len(k)) <= last[sequence][:, None]  # [queries, tokens]
        grouped = q[sequence].astype(np.float64).reshape(queries, cache.kv_heads, -1, head_dim)
        scores = np.einsum("qhgd,thd->hgqt", grouped, k, optimize=True) * softmax_scale
        attended = np.einsum("hgqt,thd->qhgd", _softmax(scores, seen), v, optimize=True)
        out[sequence] = attended.reshape(queries, heads, head_dim)
    return out


def choose_partition(length: int, blocks: int, multiprocessors: int) -> int:
    """Tokens of a decode partition for histories of `length` tokens and `blocks` blocks a partition (KV heads times
    sequences): 128 where even such partitions do not give every multiprocessor a block, else the usual 256."""
    return 128 if -(-length // 128) * blocks <= multiprocessors else Form().partition


def choose_splits(blocks: int, tiles: int, multiprocessors: int) -> int:
    """Parts to cut histories of `tiles` tiles into, so that `blocks` blocks a part fill the multiprocessors evenly.

    The time is that of the rounds of blocks, each a part of a history, and a cost of merging that grows with the parts.
    """
    def cost(splits):
        rounds = -(-blocks * splits // multiprocessors)
        return rounds * (-(-tiles // splits) + PART_COST)
    return min(range(1, min(MAX_SPLITS, tiles) + 1), key=cost)


def _choose_waves(kv_rows: int, most: int) -> int:
    """Waves of a prefill block: as many as the rows need, and no more than `most`."""
    return next(w for w in PREFILL_WAVES if w * PREFILL_ROWS >= kv_rows or w == most)


def _most_waves(head_dim: int) -> int:
    """Waves of a block that registers allow."""
    return 12 if head_dim <= 128 else 8


def _wgmma_tile(head_dim: int, scale_tokens: int) -> int:
    """Tokens of a tile of 6_prefill_wgmma.cu: as many as a scale covers, where registers allow."""
    return 128 if head_dim == 64 and scale_tokens > TILE else TILE


def _no_wgmma(form: Form, backend: Backend, head_dim: int) -> str | None:
    """Why a prefill cannot run on Hopper's warpgroup instructions; None where it can."""
    if getattr(backend, "arch", None) != "90a":
        return f"{backend.device} has no warpgroup instructions of Hopper"
    if head_dim % 64 or form.pv not in ("int8", "uint8"):
        return f"the kernel takes head_dim 64, 128 or 256 and pv 'int8' or 'uint8', not {head_dim} and {form.pv!r}"
    return None


def _prefill_form(form: Form, swapped: bool | None) -> Form:
    """The form with the orientation in which prefill's scores stay in registers."""
    chained = form.matrix == "mfma"
    if swapped not in (None, chained):
        raise ValueError(f"swapped = {swapped} with matrix {form.matrix!r}: prefill keeps its scores in registers, "
                         f"which takes swapped = {chained}")
    if form.grouping != "fragment" or form.read != 16 or form.common_scale or form.trace:
        raise ValueError(f"prefill has no form {form}; grouping, read, common_scale and trace are decode's")
    return replace(form, swapped=chained)


def _check_heads(heads, cache):
    if heads < 1 or heads % cache.kv_heads:
        raise ValueError(f"q has {heads} heads; expected a multiple of the cache's {cache.kv_heads} KV heads")


def _softmax_scale(softmax_scale, head_dim) -> float:
    if softmax_scale is None:
        return head_dim ** -0.5
    if isinstance(softmax_scale, bool) or not isinstance(softmax_scale, Real):
        raise TypeError(f"softmax_scale is {softmax_scale!r} of type {type(softmax_scale).__name__}; expected a number")
    if not 0 <= softmax_scale < LARGEST_SOFTMAX_SCALE:
        raise ValueError(f"softmax_scale = {softmax_scale}; expected a number from 0 to {LARGEST_SOFTMAX_SCALE:g}")
    return float(softmax_scale)


def _offsets(causal_offset, cache) -> np.ndarray:
    """The last token that query 0 of each sequence sees, int64 [batch]."""
    offsets = np.asarray(causal_offset)
    if not np.issubdtype(offsets.dtype, np.integer):
        raise TypeError(f"causal_offset has dtype {offsets.dtype}; expected integers")
    if offsets.shape not in ((), (cache.batch,)):
        raise ValueError(f"causal_offset has shape {offsets.shape}; expected one integer or {cache.batch}, one for "
                         "each sequence")
    return np.broadcast_to(offsets, cache.batch).astype(np.int64)


def _last_seen(causal_offset, cache, queries) -> np.ndarray:
    """The last token that each query sees, [batch, queries]; below 0 where it sees none."""
    if causal_offset is None:
        return np.repeat(cache.lengths[:, None] - 1, queries, axis=1)
    return _offsets(causal_offset, cache)[:, None] + np.arange(queries)


def _softmax(scores, seen) -> np.ndarray:
    """Softmax over the last axis of the scores that are seen; 0 for the others, and for all of a row that sees none."""
    some = seen.any(axis=-1, keepdims=True)
    top = np.max(scores, axis=-1, keepdims=True, initial=-np.inf, where=seen)
    weights = np.exp(np.where(seen, scores - np.where(some, top, 0), -np.inf))
    return weights / np.where(some, weights.sum(axis=-1, keepdims=True), 1)
