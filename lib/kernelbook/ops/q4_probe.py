"""The q4 probe: a GEMV of a few rows at once, in three arithmetics on one mapping of lanes to weights.

    out[m, n] = sum over k of  x[m, k] * w[n, k]

The weights are 72-byte q4 tiles (`kernelbook.formats.Tiles`). The kernels, by variant:

    baseline        a multiplication and an addition a MAC
    explicit_fma    one fused multiply-add a MAC
    int8_dot        four MACs an instruction, on activations quantized to int8 beforehand

Source: prefill_breakdown article, section 2.
"""

from collections.abc import Callable, Iterable
from copy import copy
from itertools import product

import numpy as np

from kernelbook import formats
from kernelbook.backends import Backend, Source
from kernelbook.ops.checks import check_apart, check_array, check_count

FILES = {"baseline": "q4_probe/1_baseline.cu", "explicit_fma": "q4_probe/2_explicit_fma.cu",
         "int8_dot": "q4_probe/3_int8_dot.cu"}
WAVE_ROWS = (1, 2, 4)
"""Rows of weights that a wave may own (the article's R)."""
BATCHES = (1, 4, 8, 16, 32)
"""Rows of activations that a kernel may be compiled for (the article's M)."""

WAVES = 4  # of a block, as compiled into kernels/q4_probe/probe.h
INT32_MAX = 2**31 - 1


def source(variant: str, wave_rows: int, m: int) -> tuple[str, dict]:
    """File below kernels/ and constants of the kernel `variant` for M = `m` rows. Raises what Q4Probe raises."""
    _check_form(variant, wave_rows)
    check_count("M", m)
    if m not in BATCHES:
        raise ValueError(f"M = {m} rows; the probe is compiled for {_listed(BATCHES)}")
    return FILES[variant], {"WAVE_ROWS": wave_rows, "BATCH": m}


def sources(wave_rows: Iterable[int] = WAVE_ROWS, batches: Iterable[int] = (16,)) -> list[Source]:
    """Every variant for each R and M named, for static evidence; the article's table has M = 16."""
    return [Source(*source(variant, r, m)) for variant, r, m in product(FILES, wave_rows, batches)]


def _check_form(variant, wave_rows):
    if variant not in FILES:
        raise ValueError(f"variant {variant!r}; expected {_listed(map(repr, FILES))}")
    check_count("wave_rows", wave_rows)
    if wave_rows not in WAVE_ROWS:
        raise ValueError(f"wave_rows = {wave_rows}; a wave owns {_listed(WAVE_ROWS)} of a tile's 4 rows")


def _listed(values):
    *first, last = map(str, values)
    return f"{', '.join(first)} or {last}"


class Q4Probe:
    """One weight matrix in tiles on a device, and a kernel that multiplies by it.

    backend: where it runs.  tiles: the weights [N, K]; N a multiple of 4 and K of 32, as tiles have it.
    variant: "baseline", "explicit_fma" or "int8_dot".  wave_rows: rows of weights a wave, 1, 2 or 4 (R).
    finite: refuse scales that are NaN or infinite; False takes them, to show what they do to a comparison.
    Raises TypeError or ValueError for another variant or wave_rows, ValueError for more rows or columns than an int32
    counts, and what `Tiles.check` raises.
    """

    def __init__(self, backend: Backend, tiles: formats.Tiles, variant: str = "explicit_fma", wave_rows: int = 4, *,
                 finite: bool = True):
        tiles.check(finite)
        _check_form(variant, wave_rows)
        if max(tiles.n, tiles.k) > INT32_MAX:
            raise ValueError(f"N = {tiles.n}, K = {tiles.k}; the kernels take at most {INT32_MAX} of each")
        self.backend, self.tiles = backend, tiles
        self.variant, self.wave_rows = variant, wave_rows
        self._data = backend.array(tiles.data)

    def using(self, variant: str, wave_rows: int) -> "Q4Probe":
        """The same weights, at the same place on the device, for another kernel."""
        _check_form(variant, wave_rows)
        other = copy(self)
        other.variant, other.wave_rows = variant, wave_rows
        return other

    def clone(self) -> "Q4Probe":
        """The same weights at another address on the device, for measurements that must miss the cache."""
        other = copy(self)
        other._data = self.backend.array(self._data)
        return other

    def __call__(self, x, *, out=None):
        """The product [M, N], float32 on the device; arguments and errors as `prepare` has them."""
        return self.prepare(x, out=out)()

    def prepare(self, x, *, out=None) -> Callable:
        """A call of no arguments that launches the product [M, N] of what `x` then holds and returns `out`, float32 on
        the device. Everything is checked and compiled here, once; the call only launches. Nothing is synchronized.

        x: float32 [M, K] on the device, M in `BATCHES`; for "int8_dot" a pair (codes int8 [M, K], scales float32
        [M, K / 32]), as `formats.quantize_activations` makes it.
        out: float32 [M, N] to write into; made where it is not given.
        Raises TypeError or ValueError, before anything is launched, on a wrong dtype, device, shape, stride or
        alignment, and where `out` shares memory with an input or with the weights.
        """
        n, k = self.tiles.n, self.tiles.k
        if self.variant == "int8_dot":
            if not (isinstance(x, tuple | list) and len(x) == 2):
                raise TypeError(f"x is a {type(x).__name__}; int8_dot takes a pair (codes, scales)")
            read = {"x codes": (x[0], k, np.int8, 4), "x scales": (x[1], k // formats.BLOCK, np.float32, 4)}
        else:
            read = {"x": (x, k, np.float32, 16)}
        shape = getattr(next(iter(read.values()))[0], "shape", ())
        m = shape[0] if len(shape) == 2 else 1  # anything but a matrix is refused below
        for what, (array, columns, dtype, align) in read.items():
            check_array(self.backend, array, what, (m, columns), dtype, align)
        form = source(self.variant, self.wave_rows, m)
        if out is None:
            out = self.backend.empty((m, n), np.float32)
        check_array(self.backend, out, "out", (m, n), np.float32, 4)
        inputs = {what: array for what, (array, *_) in read.items()}
        check_apart(self.backend, {"out": out}, inputs | {"the weights": self._data})

        kernel = self.backend.compile(*form).kernel(f"q4_{self.variant}")
        grid, block = (-(-n // (WAVES * self.wave_rows)), 1, 1), (self.backend.wave, WAVES, 1)
        args = [self._data, *inputs.values(), out, np.int32(n), np.int32(k)]

        def launch():
            kernel(grid, block, args)
            return out
        return launch


def reference(x, tiles: formats.Tiles) -> np.ndarray:
    """The product in float64 on the same codes and scales. x [M, K] -> float64 [M, N]."""
    return np.asarray(x, np.float64) @ tiles.dequantize(np.float64).T


def reference_int8(codes, scales, tiles: formats.Tiles) -> np.ndarray:
    """The product in float64 on quantized activations, which "int8_dot" has to match: against it an error is one of
    arithmetic, and its own distance from `reference` is the cost of quantizing. codes int8 [M, K], scales
    [M, K / 32] -> float64 [M, N].
    """
    return reference(np.asarray(codes, np.float64) * np.repeat(scales, formats.BLOCK, axis=1), tiles)
