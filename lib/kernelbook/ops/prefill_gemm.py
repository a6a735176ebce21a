"""GEMMs for prefill: many rows of activations times weights in q4 tiles, in the designs that the article left open.

    out[m, n] = sum over k of  x[m, k] * w[n, k]

The weights are 72-byte q4 tiles (`kernelbook.formats.Tiles`), read as they are. The designs, by name:

    tiled_fp32      A: tiles in shared memory, one fused multiply-add a MAC
    int8_dot        B: the same on activations quantized to int8, four MACs an instruction
    int8_matrix     B: int8 matrix instructions
    tensor_cores    C: weights become bf16 in registers, on matrix instructions
    wgmma           C: the same on Hopper's warpgroup instructions

    PrefillGemm     a weight on a device, in one of the designs
    quantize        activations to int8, on the device
    reference       the product in float64 on the same codes;  reference_int8: on quantized activations

Source: prefill_breakdown article, section 4 (candidates A, B and C).
"""

import math
from collections.abc import Callable, Iterable
from copy import copy
from dataclasses import dataclass, field

import numpy as np

from kernelbook import formats
from kernelbook.backends import Backend, Source
from kernelbook.ops.checks import check_apart, check_array, check_count, given_scratch
from kernelbook.ops.prefill_tensor import TENSOR_DESIGNS, Plan, TensorDesign, plan, tensor_launch
from kernelbook.ops.q4_probe import reference, reference_int8

__all__ = ["DESIGNS", "Design", "PrefillGemm", "prepare_quantize", "quantize", "reference", "reference_int8", "sources"]

MATRIX = {"mma": 32, "mfma": 64, "mmac": 64}
"""Matrix instructions by the lanes of a wave; where two have the same, the first is taken."""

MAX_COLUMNS = 2**23  # of w: offsets within a block's rows are 32-bit numbers
MAX_ROWS = 2**31 - 128  # of x: so is the number of a row
MAX_GRID_Y = 65535
MAX_SLICES = 2**14  # slices times groups of 32 k are a 32-bit number too
MAX_SPLITS = 16  # where this module chooses the number of slices, and
SPLIT_GROUPS = 16  # the groups that a slice then has at least
QUANTIZE_BLOCK = 256  # threads, as compiled into 6_quantize_activations.cu


@dataclass(frozen=True)
class Design:
    """A kernel, and what launching it takes.

    file: below kernels/prefill_gemm, without its suffix. kernel: its name in there.
    activations: what x is: "float32", or "int8", a pair (codes, scales).
    tokens, rows: of the block's part of the product: one of the compiled TOKENS, and rows of w.
    threads: of a block.
    matrix: whether it runs on matrix instructions: blocks are then lanes x waves, and MATRIX may be chosen.
    shared: bytes of dynamic shared memory, from TOKENS and the lanes of a wave.
    macs_per_byte: MACs that a multiprocessor makes in the time in which its share of the memory's bandwidth moves a
    byte, roughly: what slices of K must save to be worth their traffic.
    defines: constants of the build besides TOKENS.
    """

    file: str
    kernel: str
    activations: str
    macs_per_byte: float
    tokens: tuple[int, ...] = (16, 32, 64, 128)
    rows: int = 128
    threads: int = 256
    matrix: bool = False
    shared: Callable[[int, int], int] = lambda tokens, wave: 0
    defines: dict = field(default_factory=dict)

    def tokens_for(self, m: int) -> int:
        """TOKENS of the kernel for M = `m` rows: the fewest that hold them, or the most there are."""
        return next((tokens for tokens in self.tokens if tokens >= m), self.tokens[-1])

    def source(self, tokens: int, matrix: str | None = None) -> Source:
        """The kernel for TOKENS = `tokens`. matrix: one of `MATRIX`, for designs that run on it; None is the target's.
        """
        chosen = {"MATRIX": matrix} if self.matrix and matrix else {}
        return Source(f"prefill_gemm/{self.file}.cu", {"TOKENS": tokens} | self.defines | chosen)

    def block(self, wave: int) -> tuple[int, int, int]:
        return (wave, self.threads // wave, 1) if self.matrix else (self.threads, 1, 1)


def _int8_matrix_shared(tokens: int, wave: int) -> int:
    """Two steps of 3_int8_matrix.cu, each of 4 groups (2, where a wave has 64 lanes): codes, a gap, scales."""
    return 2 * (128 // wave) * (32 * (64 + tokens + 1) + 8 * 64 + 4 * tokens)


DESIGNS = {
    "tiled_fp32": Design("1_tiled_fp32", "prefill_tiled_fp32", "float32", macs_per_byte=8),
    "int8_dot": Design("2_int8_dot", "prefill_int8_dot", "int8", macs_per_byte=16, rows=64),
    "int8_matrix": Design("3_int8_matrix", "prefill_int8_matrix", "int8", macs_per_byte=80, rows=64, matrix=True,
                          shared=_int8_matrix_shared),
} | TENSOR_DESIGNS
"""Every design by its name."""

_QUANTIZE = Source("prefill_gemm/6_quantize_activations.cu")
_REDUCE = Source("grouped_gemm/3_reduce_splits.cu")


def sources(tokens: Iterable[int] = (128,)) -> list[Source]:
    """Every design for each TOKENS named, and the kernel that quantizes, for static evidence."""
    return [*(design.source(t) for design in DESIGNS.values() for t in tokens), _QUANTIZE]


def _design(name) -> Design:
    if name not in DESIGNS:
        raise ValueError(f"design {name!r}; expected {_listed(map(repr, DESIGNS))}")
    return DESIGNS[name]


def _listed(values):
    *rest, last = map(str, values)
    return f"{', '.join(rest)} or {last}" if rest else last


class PrefillGemm:
    """One weight matrix in tiles on a device, and the design that multiplies by it.

    backend: where it runs.
    weights: [N, K], N a multiple of 4 and K of 32: `formats.Tiles`, which are checked and copied to the device, or
    their bytes on the device already, uint8 [N / 4, K / 32, 72], which are used where they are and whose scales are
    not looked at.
    design: one of `DESIGNS`.
    matrix: one of `MATRIX`, for designs on matrix instructions; None takes the backend's first.
    `data` is the device array, and `n` and `k` are the weight's sizes.
    Raises TypeError or ValueError for another design, for matrix instructions that cannot run here, for more rows or
    columns than the kernels count, for a device array of another dtype, shape, stride or alignment, and what
    `Tiles.check` raises.
    """

    def __init__(self, backend: Backend, weights, design: str = "tiled_fp32", *, matrix: str | None = None):
        _design(design)
        known = backend.matrix
        if matrix not in (None, *known):
            raise ValueError(f"matrix is {matrix!r}; {backend.device} has waves of {backend.wave} lanes, which take "
                             f"{_listed(known) if known else 'no matrix instructions of ours'}")
        if isinstance(weights, formats.Tiles):
            weights = backend.array(weights.check().data)
        shape = tuple(getattr(weights, "shape", ()))
        if backend.owns(weights) and (len(shape) != 3 or 0 in shape or shape[2] != formats.TILE_BYTES):
            raise ValueError(f"weights has shape {shape}; expected [N / {formats.TILE_ROWS}, K / {formats.BLOCK}, "
                             f"{formats.TILE_BYTES}] with no 0")
        check_array(backend, weights, "weights", shape, np.uint8, 8)
        self.backend, self.design, self.matrix = backend, design, matrix or next(iter(known), None)
        self.n, self.k = formats.TILE_ROWS * shape[0], formats.BLOCK * shape[1]
        most = MAX_GRID_Y * min(d.rows for d in DESIGNS.values())
        if self.n > most or self.k > MAX_COLUMNS:
            raise ValueError(f"N = {self.n}, K = {self.k}; the kernels take at most {most} and {MAX_COLUMNS}")
        self.data = weights
        self._check_design()

    def _check_design(self):
        """ValueError where the weights cannot be multiplied in the design."""
        design = DESIGNS[self.design]
        if isinstance(design, TensorDesign):
            why_not = design.why_not(self.backend, self.k)
            if why_not:
                raise ValueError(f"design {self.design!r}: {why_not}; take 'tensor_cores'")
            check_array(self.backend, self.data, "weights", self.data.shape, np.uint8, design.align)

    def using(self, design: str) -> "PrefillGemm":
        """The same weights, at the same place on the device, in another design."""
        _design(design)
        other = copy(self)
        other.design = design
        other._check_design()
        return other

    def clone(self) -> "PrefillGemm":
        """The same weights at another address on the device, for measurements that must miss the cache."""
        other = copy(self)
        other.data = self.backend.array(self.data)
        return other

    def splits(self, m: int) -> int:
        """Slices of K that `prepare` takes for M = `m` rows: more than 1 where otherwise multiprocessors would have
        nothing to do, and where that is worth writing the slices' outputs and adding them up."""
        design = DESIGNS[self.design]
        if isinstance(design, TensorDesign):
            return 1  # it cuts tiles itself
        tokens, processors = design.tokens_for(m), self.backend.multiprocessors
        blocks = math.ceil(m / tokens) * math.ceil(self.n / design.rows)
        groups = self.k // formats.BLOCK

        def cost(splits):  # in MACs of a multiprocessor
            rounds = math.ceil(blocks * splits / processors)
            traffic = 8 * splits * m * self.n / processors if splits > 1 else 0  # bytes, written and read
            macs = tokens * design.rows * formats.BLOCK * math.ceil(groups / splits)
            return rounds * macs + traffic * design.macs_per_byte
        costs = {splits: cost(splits) for splits in range(1, max(1, min(MAX_SPLITS, groups // SPLIT_GROUPS)) + 1)}
        return next(splits for splits in costs if costs[splits] <= 1.05 * min(costs.values()))

    def scratch(self, m: int) -> int:
        """Float32 numbers that `prepare` takes as its scratch for M = `m` rows; 0 where it takes none."""
        if isinstance(DESIGNS[self.design], TensorDesign):
            return self._plan(m).scratch if m else 0
        splits = self.splits(max(m, 1))
        return splits * m * self.n if splits > 1 else 0

    def _plan(self, m: int) -> Plan:
        return plan(DESIGNS[self.design], m, self.n, self.k, self.backend.multiprocessors)

    def __call__(self, x, *, out=None):
        """The product [M, N], float32 on the device; arguments and errors as `prepare` has them."""
        return self.prepare(x, out=out)()

    def prepare(self, x, *, out=None, splits: int | None = None, scratch=None) -> Callable:
        """A call of no arguments that launches the product [M, N] of what `x` then holds and returns `out`, float32 on
        the device. Everything is checked and compiled here, once; the call only launches. Nothing is synchronized.

        x: on the device. Float32 [M, K]; for designs on int8 a pair (codes int8 [M, K], scales float32 [M, K / 32]),
        as `quantize` makes it; for designs on bf16 its bits, uint16 [M, K]. No rows are no launch.
        out: float32 [M, N] to write into; made where it is not given. Designs on bf16 also take uint16, for bf16.
        splits: slices of K, each by blocks of its own; None takes `self.splits(M)`.
        scratch: float32, at least splits * M * N of them in one dimension, where the slices' outputs go if there is
        more than one slice; made where it is not given. Calls that run one after the other can share it.
        Raises TypeError or ValueError, before anything is launched, on a wrong dtype, device, shape, stride or
        alignment, where `out` or `scratch` shares memory with another array, and for splits that are not 1..K / 32.
        """
        design, n, k = DESIGNS[self.design], self.n, self.k
        if isinstance(design, TensorDesign):
            return self._prepare_tensor(x, out, splits, scratch)
        inputs = self._check_activations(x, design)
        m = next(iter(inputs.values())).shape[0]
        if out is None:
            out = self.backend.empty((m, n), np.float32)
        check_array(self.backend, out, "out", (m, n), np.float32, 4)
        if splits is None:
            splits = self.splits(max(m, 1))
        check_count("splits", splits)
        most = min(k // formats.BLOCK, MAX_SLICES)
        if splits > most:
            raise ValueError(f"splits = {splits}; K = {k}, in groups of {formats.BLOCK}, makes at most {most} slices")
        if m > MAX_ROWS:
            raise ValueError(f"M = {m} rows; the kernels take at most {MAX_ROWS}")
        written = {"out": out}
        if splits > 1:
            if scratch is None:
                scratch = self.backend.empty(splits * m * n, np.float32)
            size = math.prod(getattr(scratch, "shape", ()))
            check_array(self.backend, scratch, "scratch", (size,), np.float32, 4)
            if size < splits * m * n:
                raise ValueError(f"scratch has {size} elements; {splits} slices of {m} x {n} take {splits * m * n}")
            written["scratch"] = scratch
        check_apart(self.backend, written, inputs | {"the weights": self.data})
        if m == 0:
            return lambda: out

        tokens = design.tokens_for(m)
        kernel = self.backend.compile(design.source(tokens, self.matrix)).kernel(design.kernel)
        shared = design.shared(tokens, self.backend.wave)
        grid, block = (math.ceil(m / tokens), math.ceil(n / design.rows), splits), design.block(self.backend.wave)
        args = [self.data, *inputs.values(), scratch if splits > 1 else out, *map(np.int32, (m, n, k))]
        if splits == 1:
            def launch():
                kernel(grid, block, args, shared)
                return out
            return launch

        reduce = self.backend.compile(_REDUCE).kernel("reduce_splits")
        reduce_args = [scratch, out, np.uint64(m * n), np.int32(splits)]

        def launch_slices():
            kernel(grid, block, args, shared)
            reduce((math.ceil(m * n / 256), 1, 1), (256, 1, 1), reduce_args)
            return out
        return launch_slices

    def _prepare_tensor(self, x, out, splits, scratch) -> Callable:
        design, backend = DESIGNS[self.design], self.backend
        if splits not in (None, 1):
            raise ValueError(f"splits = {splits}; design {self.design!r} cuts tiles itself: leave splits out")
        inputs = self._check_activations(x, design)
        shape = len(inputs["x"]), self.n
        if out is None:
            out = backend.empty(shape, np.float32)
        bf16_out = getattr(out, "dtype", None) == np.uint16
        check_array(backend, out, "out", shape, np.uint16 if bf16_out else np.float32, 16)
        size = self.scratch(shape[0])
        scratch = given_scratch(backend, scratch, size, shape)
        check_apart(backend, {"out": out, "scratch": scratch}, inputs | {"the weights": self.data})
        if shape[0] == 0:
            return lambda: out
        kernel = tensor_launch(backend, design, self._plan(shape[0]), [self.data, *inputs.values(), out, scratch],
                               (*shape, self.k), self.matrix, bf16_out)

        def launch():
            kernel()
            return out
        return launch

    def _check_activations(self, x, design: Design | TensorDesign) -> dict:
        """The arrays that x consists of, by their names in errors."""
        k = self.k
        if design.activations == "int8":
            if not (isinstance(x, tuple | list) and len(x) == 2):
                raise TypeError(f"x is a {type(x).__name__}; {self.design} takes a pair (codes, scales)")
            arrays = {"x codes": (x[0], k, np.int8, 16), "x scales": (x[1], k // formats.BLOCK, np.float32, 4)}
        else:
            arrays = {"x": (x, k, np.uint16 if design.activations == "bf16" else np.float32, 16)}
        shape = getattr(next(iter(arrays.values()))[0], "shape", ())
        m = shape[0] if len(shape) == 2 else 1  # anything but a matrix is refused below
        for what, (array, columns, dtype, align) in arrays.items():
            check_array(self.backend, array, what, (m, columns), dtype, align)
        return {what: array for what, (array, *_) in arrays.items()}


def quantize(backend: Backend, x) -> tuple:
    """`prepare_quantize`, launched once."""
    return prepare_quantize(backend, x)()


def prepare_quantize(backend: Backend, x, *, codes=None, scales=None) -> Callable:
    """A call of no arguments that quantizes what `x` then holds and returns (codes int8 [M, K], scales float32
    [M, K / 32]), rounded as `formats.quantize_activations` does it; nothing is synchronized.

    x: float32 [M, K] on the device, K a multiple of 32. A group with a NaN or an infinity gets such a scale.
    codes, scales: to write into; made where they are not given.
    Raises TypeError or ValueError, before anything is launched, on a wrong dtype, device, shape, stride or alignment,
    and where an array to write shares memory with another.
    """
    shape = tuple(getattr(x, "shape", ()))
    if backend.owns(x) and (len(shape) != 2 or shape[1] % formats.BLOCK):
        raise ValueError(f"x has shape {shape}; expected [M, K], K a multiple of {formats.BLOCK}")
    check_array(backend, x, "x", shape, np.float32, 16)
    m, k = shape
    codes = backend.empty((m, k), np.int8) if codes is None else codes
    scales = backend.empty((m, k // formats.BLOCK), np.float32) if scales is None else scales
    check_array(backend, codes, "codes", (m, k), np.int8, 16)
    check_array(backend, scales, "scales", (m, k // formats.BLOCK), np.float32, 4)
    check_apart(backend, {"codes": codes, "scales": scales}, {"x": x})
    kernel = backend.compile(_QUANTIZE).kernel("quantize_activations")
    blocks, args = math.ceil(m * k / (4 * QUANTIZE_BLOCK)), [x, codes, scales, np.uint64(m * k)]

    def launch():
        if blocks:
            kernel((blocks, 1, 1), (QUANTIZE_BLOCK, 1, 1), args)
        return codes, scales
    return launch
