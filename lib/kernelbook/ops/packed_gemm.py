"""The ladder above the article's grouped GEMM: few rows of activations times weights in panels, at the memory's speed.

    out[m, n] = sum over groups g of  scale[n, g] * (sum over k in g of  x[m, k] * code[n, k])

The weights are `kernelbook.packing.Panels`: exact codes, a float16 scale for 32 columns. The designs, whose names end
in what activations are on the device, where that is not float32:

    wide_loads                          kernel 4: the article's strips and float arithmetic, enough bytes in flight
    panels, panels_f16, panels_bf16     kernel 5: matrix instructions on weights in their operands' order; up to 4 rows
    ring, ring_f16, ring_bf16           kernel 6: one block a multiprocessor, weights come by themselves
    ranges, ranges_f16, ranges_bf16     kernel 7: no warp waits for another; up to 4 rows
    ahead, ahead_f16, ahead_bf16        kernel 8: small weights, all asked for before x is there; up to 8 rows
    wgmma_f16, wgmma_bf16               many rows, on Hopper: see `packed_wgmma`

    PackedGemm      a weight on a device, in one of the designs
    reference       the product in float64 on the same codes

Float32 activations are multiplied as two float16 parts and are as accurate as float sums, see
kernels/grouped_gemm/panels.h; float16 and bfloat16 activations take half of the products.

Source: grouped_gemm article, sections 2 and 3, and what it left on the table.
"""

import math
from collections.abc import Callable
from copy import copy
from dataclasses import dataclass, field, replace

import numpy as np

from kernelbook import formats, packing
from kernelbook.backends import Backend, Source
from kernelbook.ops import grouped_gemm, packed_wgmma
from kernelbook.ops.checks import check_apart, check_array

DTYPES = {"float32": np.float32, "float16": np.float16, "bfloat16": np.uint16}
"""What activations are on the device; those of bfloat16 are its bits."""

BOUNDS = {"float32": 2e-6, "float16": 5e-4, "bfloat16": 4e-3}
"""On the relative Frobenius error against float64 on the codes and the float32 activations, by what these become."""

SUFFIXES = {"float32": "", "float16": "_f16", "bfloat16": "_bf16"}
MAX_ROWS = 32
WARPS = 8
INT32_MAX = 2**31 - 1
ADDERS = 4  # warps of kernel 7 that do not multiply, as compiled into 7_ranges.cu
READ_MEANWHILE = 64 << 10  # bytes that a multiprocessor reads while blocks add up what they have of a panel, 2 us
SLICES_END = 30    # What it takes a block of kernel 7 to add up slices, and to leave the sums of a panel of its slice:
SLICES_PANEL = 11  # as long as that many pieces of x, of 128 columns of a row, at 16 ns each on the H200.

WARPS_AHEAD = 16  # of kernel 8, as compiled into 8_ahead.cu, and chunks that each of them has at most: K up to 2048,
CHUNKS_AHEAD = 1, 3  # and up to 6144

SHARED = {"80": 163, "86": 99, "87": 163, "89": 99, "90a": 227, "100": 227, "103": 227, "120": 99, "121": 99}
"""KiB of shared memory that a block may have, by compute capability."""


def shared_limit(backend: Backend) -> int:
    """Bytes of shared memory that a block may have on a backend."""
    return SHARED.get(getattr(backend, "arch", "90a"), 99) << 10


def _no_mma(backend: Backend) -> str | None:
    return None if "mma" in backend.matrix else f"it is written for mma.sync, which {backend.device} does not have"


def _too_many(m: int, most: int) -> str | None:
    return f"it takes at most {most} rows, not {m}" if m > most else None


# ---------------------------------------------------------------- 4: wide loads

@dataclass(frozen=True)
class WideDesign:
    """Kernel 4, on strips. splits: slices of K; None takes as many as run at once."""

    name: str = "wide_loads"
    splits: int | None = None
    activations = "float32"
    bound = BOUNDS["float32"]
    max_rows = MAX_ROWS
    overlaps = False
    stands_in = True
    narrow = None

    def source(self, m: int) -> Source:
        return Source("grouped_gemm/4_wide_loads.cu", {"GROUP": formats.BLOCK, "ROWS": min(_power(m), 4)})

    def sources(self) -> list[Source]:
        """Every form, for static evidence."""
        return [self.source(m) for m in (1, 2, 4)]

    def why_not(self, backend: Backend, weights, m: int) -> str | None:
        """Why `m` rows cannot be multiplied by weights (their n, k and precision) on a backend; None where they can."""
        return _too_many(m, self.max_rows)

    def prepare(self, backend: Backend, weights, data, x, out, overlap=False) -> Callable:
        """A call of no arguments that launches the product and returns `out`; all is checked. data: codes and scales of
        strips on the device."""
        m, n, k = len(x), weights.n, weights.k
        source = self.source(m)
        rows = source.defines["ROWS"]
        tiles, row_tiles = math.ceil(n / formats.LINE), math.ceil(m / rows)
        at_once = (2 if rows == 1 else 1) * backend.multiprocessors
        splits = self.splits or max(1, min(at_once // (tiles * row_tiles), k // formats.BLOCK // WARPS))
        kernel = backend.compile(source).kernel("grouped_gemm_wide")
        tiles_of_out = tiles * row_tiles
        pieces, counters = _fixup(backend, 2 * tiles_of_out * splits * 4 * 256 if splits > 1 else 0, tiles_of_out)
        args = [x, *data, out, pieces, counters, *map(np.int32, (m, n, formats.padded(n), k))]

        def launch():
            kernel((tiles, row_tiles, splits), (256, 1, 1), args)
            return out
        return launch


# ---------------------------------------------------------------- 5: panels

@dataclass(frozen=True)
class _OnPanels:
    """What designs on mma.sync have alike. kernel: its name. activations: what x is on the device."""

    activations: str
    overlaps = True
    stands_in = True
    narrow = None

    @property
    def name(self) -> str:
        return self.kernel + SUFFIXES[self.activations]

    @property
    def bound(self) -> float:
        return BOUNDS[self.activations]

    def why_not(self, backend: Backend, weights, m: int) -> str | None:
        """Why `m` rows cannot be multiplied by weights (their n, k and precision) on a backend; None where they can."""
        return _too_many(m, self.max_rows) or _no_mma(backend)


@dataclass(frozen=True)
class _Planned(_OnPanels):
    """Those whose `plan` raises ValueError for a product that the kernel cannot do."""

    def why_not(self, backend: Backend, weights, m: int) -> str | None:
        reason = super().why_not(backend, weights, m)
        if reason is None:
            try:
                self.plan(backend, weights, m)
            except ValueError as error:
                return str(error)
        return reason


@dataclass(frozen=True)
class PanelsDesign(_OnPanels):
    """Kernel 5. activations: what x is on the device. splits: slices of K; None takes as many as run at once."""

    splits: int | None = None
    kernel = "panels"
    max_rows = 4

    def source(self, precision: str, m: int) -> Source:
        return Source("grouped_gemm/5_panels.cu", _constants(precision, self.activations, _power(m)))

    def sources(self) -> list[Source]:
        """Every form, for static evidence."""
        return [self.source(precision, m) for precision in packing.CODE_BITS for m in (1, 2, 4)]

    def prepare(self, backend: Backend, weights, data, x, out, overlap=False) -> Callable:
        """A call of no arguments that launches the product and returns `out`; all is checked. data: the panels."""
        m, n, k = len(x), weights.n, weights.k
        panels, chunks = math.ceil(n / packing.ROWS), math.ceil(k / packing.COLUMNS)
        # a warp has at least two chunks: the second is on its way while the first is multiplied
        splits = self.splits or max(1, min(3 * backend.multiprocessors // panels, chunks // (2 * WARPS)))
        kernel = backend.compile(self.source(weights.precision, m)).kernel("grouped_gemm_panels")
        pieces, counters = _fixup(backend, 2 * panels * splits * 32 * 4 if splits > 1 else 0, panels)
        args = [data, x, out, pieces, counters, *map(np.int32, (m, n, k))]

        def launch():
            kernel((panels, splits, 1), (32, WARPS, 1), args, overlap=overlap)
            return out
        return launch


# ---------------------------------------------------------------- 6: the ring

@dataclass(frozen=True)
class RingForm:
    """How kernel 6 is compiled, but for codes and activations.

    rows: of x. warps: of a block, a panel each. chunks: that a warp takes at a time. slots: of a warp's ring.
    """

    rows: int
    warps: int
    chunks: int
    slots: int


@dataclass(frozen=True)
class RingPlan:
    """tiles, steps: of the product. blocks: of the launch."""

    form: RingForm
    tiles: int
    steps: int
    blocks: int


@dataclass(frozen=True)
class RingDesign(_Planned):
    """Kernel 6. activations: what x is on the device.

    form: how it is compiled; None chooses by shape. blocks: of the launch; None takes one a multiprocessor, or fewer.
    """

    form: RingForm | None = None
    blocks: int | None = None
    kernel = "ring"
    max_rows = MAX_ROWS

    def source(self, precision: str, form: RingForm) -> Source:
        return _source("grouped_gemm/6_ring.cu", precision, self.activations, form)

    def sources(self) -> list[Source]:
        """Every form, for static evidence."""
        return [self.source(precision, self._form(precision, m, SHARED["90a"] << 10))
                for precision in packing.CODE_BITS for m in (1, 2, 4, 8, 16, 32)]

    def plan(self, backend: Backend, weights, m: int) -> RingPlan:
        """Raises ValueError for a product of more steps than the kernel counts."""
        form = self.form or self._form(weights.precision, m, shared_limit(backend))
        tiles = math.ceil(weights.n / (packing.ROWS * form.warps))
        steps = math.ceil(weights.k / (packing.COLUMNS * form.chunks))
        blocks = self.blocks or self._blocks(tiles, steps, backend.multiprocessors)
        if 2 * blocks * max(tiles, blocks) * steps > INT32_MAX:
            raise ValueError(f"weights {weights.n} x {weights.k} take {tiles} tiles of {steps} steps; {blocks} blocks "
                             f"count to {INT32_MAX}")
        return RingPlan(form, tiles, steps, min(blocks, tiles * steps))

    @staticmethod
    def _blocks(tiles, steps, multiprocessors):
        """Of few tiles, as many as make whole ones where that takes no block longer than an even cut, and a step."""
        if tiles <= multiprocessors:
            each = multiprocessors // tiles
            if math.ceil(steps / each) <= math.ceil(tiles * steps / multiprocessors) + 1:
                return tiles * min(each, steps)
        return min(multiprocessors, tiles * steps)

    def _form(self, precision: str, m: int, limit: int) -> RingForm:
        """The form for `m` rows, as measured on the H200: two chunks at a time, but one for 16 rows of 16 bits, and for
        32 times int4, where two gain little and spill on some targets. Where shared memory is small, one, and fewer
        warps, so that there are two slots."""
        rows = _power(m)
        one = rows == 16 and self.activations != "float32" or rows == 32 and precision == "int4"
        forms = []
        for warps, chunks in ((16, 1 if one else 2), (16, 1), (8, 1)):
            form = RingForm(rows, warps, chunks, 0)
            fit = max(0, limit - self.shared(precision, form)) // _slot_bytes(precision, form)
            forms.append(replace(form, slots=min(fit, 6 if chunks == 1 else {16: 3, 32: 2}.get(rows, 4))))
        return next((form for form in forms if form.slots > 1), forms[-1])

    def shared(self, precision: str, form: RingForm) -> int:
        """Bytes of dynamic shared memory, as struct Shared of 6_ring.cu has them."""
        return (_aligned(form.slots * _slot_bytes(precision, form) + 4, 16)
                + 2 * form.chunks * _slice_bytes(self.activations, form.rows))

    def prepare(self, backend: Backend, weights, data, x, out, overlap=False) -> Callable:
        """A call of no arguments that launches the product and returns `out`; all is checked. data: the panels."""
        plan = self.plan(backend, weights, len(x))
        form = plan.form
        kernel = backend.compile(self.source(weights.precision, form)).kernel("grouped_gemm_ring")
        shared = self.shared(weights.precision, form)
        of_block = 32 * form.warps * max(4, form.rows // 2)  # of a tile of 8 rows of x a lane has four sums
        pieces, counters = _fixup(backend, 2 * plan.blocks * of_block, plan.tiles)
        args = [data, x, out, pieces, counters, *map(np.int32, (len(x), weights.n, weights.k))]

        def launch():
            kernel((plan.blocks, 1, 1), (32, form.warps, 1), args, shared, overlap)
            return out
        return launch


# ---------------------------------------------------------------- 7: ranges

@dataclass(frozen=True)
class RangesForm:
    """How kernel 7 is compiled, but for codes and activations.

    rows: of x. warps: that multiply, at least 2. chunks: that a warp asks for at a time. slots: of a warp's ring.
    """

    rows: int
    warps: int
    chunks: int
    slots: int


@dataclass(frozen=True)
class RangesPlan:
    """slices: of K. blocks: of the launch, for each slice. whole: panels of a block that are not cut."""

    form: RangesForm
    slices: int
    blocks: int
    whole: int


@dataclass(frozen=True)
class RangesDesign(_Planned):
    """Kernel 7. activations: what x is on the device.

    form: how it is compiled. slices: of K. blocks: of the launch, for each slice. None chooses by shape.
    """

    form: RangesForm | None = None
    slices: int | None = None
    blocks: int | None = None
    kernel = "ranges"
    max_rows = 4

    def source(self, precision: str, form: RangesForm, sliced: bool) -> Source:
        return _source("grouped_gemm/7_ranges.cu", precision, self.activations, form, SLICED=int(sliced))

    def sources(self) -> list[Source]:
        """Every form, for static evidence."""
        return [self.source(precision, self._form(precision, m), sliced)
                for precision in packing.CODE_BITS for m in (1, 2, 4) for sliced in (False, True)]

    def plan(self, backend: Backend, weights, m: int) -> RangesPlan:
        """Raises ValueError for more slices than K has chunks, where a slice of x and the rings do not fit into shared
        memory, and for a product of more chunks than the kernel counts."""
        form = self.form or self._form(weights.precision, m)
        panels, chunks = math.ceil(weights.n / packing.ROWS), math.ceil(weights.k / packing.COLUMNS)
        limit = shared_limit(backend)
        room = (limit - self.shared(weights.precision, form, 0)) // _slice_bytes(self.activations, form.rows)
        slices = self.slices or self._slices(panels, chunks, room, form.rows, backend.multiprocessors)
        if slices > chunks:
            raise ValueError(f"{slices} slices of K = {weights.k}, which has {chunks} chunks of {packing.COLUMNS}")
        if (most := math.ceil(chunks / slices)) > room:
            needed = self.shared(weights.precision, form, most)
            raise ValueError(f"x of {m} x {weights.k} in {slices} slices of K and the rings take {needed} bytes of "
                             f"shared memory; a block has {limit}")
        if panels * chunks * form.warps > INT32_MAX:
            raise ValueError(f"weights {weights.n} x {weights.k} have more chunks than the kernel counts")
        if self.blocks or slices > 1:
            blocks = self.blocks or max(1, backend.multiprocessors // slices)
        else:
            blocks = self._blocks(panels, chunks, packing.CHUNK_BYTES[weights.precision], backend.multiprocessors)
        blocks = min(blocks, panels * (chunks // slices))
        # Panels that are left over are cut, and where these are few, whose pieces would be many, one more a block.
        whole, left_over = divmod(panels, blocks)
        return RangesPlan(form, slices, blocks, whole - (whole > 0 and 0 < 2 * left_over < blocks))

    @staticmethod
    def _slices(panels, chunks, room, rows, multiprocessors):
        """The more there are, the less of x a block brings and the more sums it leaves to others: up to four, or as few
        as fit. No more than these where blocks have a panel each, of which they leave nothing to others."""
        least = min(math.ceil(chunks / max(room, 1)), chunks)
        if panels <= multiprocessors:
            return least

        def cost(slices):
            sums = SLICES_END + SLICES_PANEL * slices * panels / multiprocessors
            return rows * chunks / slices + (sums if slices > 1 else 0)
        return min([slices for slices in (1, 2, 4) if least <= slices <= chunks] or [least], key=cost)

    @staticmethod
    def _blocks(panels, chunks, chunk_bytes, multiprocessors):
        """Of few panels, one for each, unless adding up pieces takes less time than cutting them saves; then as many as
        make equal parts, where that takes no block much longer."""
        if panels <= multiprocessors:
            even = panels * chunks / multiprocessors
            if (chunks - even) * chunk_bytes <= READ_MEANWHILE:
                return panels
            each = multiprocessors // panels
            if math.ceil(chunks / each) <= math.ceil(even * 1.1):
                return panels * min(each, chunks)
        return multiprocessors

    @staticmethod
    def _form(precision: str, m: int) -> RangesForm:
        """The form for `m` rows, as measured on the H200: two slots of about 2 KB a warp are the fastest throughout."""
        return RangesForm(_power(m), 16, 2 if precision == "int4" else 1, 2)

    def shared(self, precision: str, form: RangesForm, chunks: int) -> int:
        """Bytes of dynamic shared memory, as struct Shared of 7_ranges.cu has them. chunks: of a slice of K."""
        pieces, starts, firsts = 16 * form.warps * packing.ROWS * form.rows, 16 * form.warps, 8 * (form.warps + 1)
        return (_aligned(form.slots * _slot_bytes(precision, form) + pieces + starts + firsts + 4, 16)
                + chunks * _slice_bytes(self.activations, form.rows))

    def prepare(self, backend: Backend, weights, data, x, out, overlap=False) -> Callable:
        """A call of no arguments that launches the product and returns `out`; all is checked. data: the panels."""
        plan = self.plan(backend, weights, len(x))
        form, slices, blocks = plan.form, plan.slices, plan.blocks
        panels, chunks = math.ceil(weights.n / packing.ROWS), math.ceil(weights.k / packing.COLUMNS)
        kernel = backend.compile(self.source(weights.precision, form, slices > 1)).kernel("grouped_gemm_ranges")
        shared = self.shared(weights.precision, form, math.ceil(chunks / slices))
        left = ADDERS * blocks * slices + (panels * slices if slices > 1 else 0)
        pieces, counters = _fixup(backend, left * packing.ROWS * form.rows, panels)
        args = [data, x, out, pieces, counters, *map(np.int32, (len(x), weights.n, weights.k, plan.whole))]

        def launch():
            kernel((blocks, slices, 1), (32, form.warps + ADDERS, 1), args, shared, overlap)
            return out
        return launch


# ---------------------------------------------------------------- 8: ahead of x

@dataclass(frozen=True)
class AheadDesign(_Planned):
    """Kernel 8. activations: what x is on the device."""

    kernel = "ahead"
    max_rows = 8
    stands_in = False  # every block reads all of x, which large weights have too many for

    def source(self, precision: str, m: int, chunks: int) -> Source:
        """chunks: that a warp has at most."""
        constants = _constants(precision, self.activations, _power(m))
        return Source("grouped_gemm/8_ahead.cu", constants | {"CHUNKS": chunks})

    def sources(self) -> list[Source]:
        """Every form that Hopper has the memory for, for static evidence."""
        return [self.source(precision, m, chunks) for precision in packing.CODE_BITS for m in (1, 2, 4, 8)
                for chunks in CHUNKS_AHEAD if self.shared(precision, m, chunks) <= SHARED["90a"] << 10]

    def plan(self, backend: Backend, weights, m: int) -> int:
        """Chunks of a warp that the kernel is compiled for. Raises ValueError for a K that it has no form for, and
        where a block has not the memory for a panel and x."""
        chunks = math.ceil(weights.k / (packing.COLUMNS * WARPS_AHEAD))
        form = next((most for most in CHUNKS_AHEAD if chunks <= most), None)
        if form is None:
            raise ValueError(f"it takes K up to {CHUNKS_AHEAD[-1] * WARPS_AHEAD * packing.COLUMNS}, not {weights.k}")
        shared, limit = self.shared(weights.precision, m, form), shared_limit(backend)
        if shared > limit:
            raise ValueError(f"a panel of K = {weights.k}, and x of {m} rows, take {shared} bytes of shared memory; a "
                             f"block has {limit}")
        return form

    def shared(self, precision: str, m: int, chunks: int) -> int:
        """Bytes of dynamic shared memory, as struct Shared of 8_ahead.cu has them."""
        rows, of_block = _power(m), WARPS_AHEAD * chunks
        return (_aligned(of_block * packing.CHUNK_BYTES[precision] + 8 * WARPS_AHEAD, 16)
                + of_block * _slice_bytes(self.activations, rows) + 4 * WARPS_AHEAD * (packing.ROWS * rows + 2))

    def prepare(self, backend: Backend, weights, data, x, out, overlap=False) -> Callable:
        """A call of no arguments that launches the product and returns `out`; all is checked. data: the panels."""
        m, chunks = len(x), self.plan(backend, weights, len(x))
        kernel = backend.compile(self.source(weights.precision, m, chunks)).kernel("grouped_gemm_ahead")
        grid, shared = (math.ceil(weights.n / packing.ROWS), 1, 1), self.shared(weights.precision, m, chunks)
        args = [data, x, out, *map(np.int32, (m, weights.n, weights.k))]

        def launch():
            kernel(grid, (32, WARPS_AHEAD, 1), args, shared, overlap)
            return out
        return launch


# As panels.h, schedule.h and struct Shared of kernels 6 to 8 have them.

def _source(file, precision, activations, form, **more):
    return Source(file, _constants(precision, activations, form.rows) | {
        "WARPS": form.warps, "CHUNKS": form.chunks, "SLOTS": form.slots} | more)


def _constants(precision, activations, rows):
    return {"BITS": packing.CODE_BITS[precision], "ACTIVATIONS": list(DTYPES).index(activations), "ROWS": rows}


def _power(m: int) -> int:
    """The least power of two that is at least `m`: rows that a kernel is compiled for."""
    return 1 << max(m - 1, 0).bit_length()


def _slice_bytes(activations, rows):
    return _aligned(rows * (packing.COLUMNS * (4 if activations == "float32" else 2) + 4), 16)


def _slot_bytes(precision, form):
    """Of a slot of every warp, and the barriers."""
    return form.warps * (form.chunks * packing.CHUNK_BYTES[precision] + 8)


def _fixup(backend, floats, tiles):
    """Memory for the pieces of tiles, and a counter each, which kernels leave as they find it: 0."""
    return backend.empty(max(floats, 4), np.float32), backend.array(np.zeros(tiles, np.int32))


def _aligned(size, to):
    return math.ceil(size / to) * to


# ---------------------------------------------------------------- the op

DESIGNS = {design.name: design for design in (
    WideDesign(), *(kind(dtype) for kind in (PanelsDesign, RingDesign, RangesDesign, AheadDesign) for dtype in DTYPES))
    } | packed_wgmma.DESIGNS
"""Every design by its name; each has name, activations, bound, max_rows, overlaps, narrow, why_not, prepare and
sources, as here, and stands_in: whether it is a choice for every shape that it takes."""


def sources() -> list[Source]:
    """Every kernel of the ladder in every form, for static evidence."""
    return [source for design in DESIGNS.values() for source in design.sources()]


@dataclass
class _OnDevice:
    """What designs read of a weight, each put on the device when a design first needs it."""

    backend: Backend
    panels: packing.Panels
    held: dict = field(default_factory=dict)

    def get(self, design):
        form = "strips" if isinstance(design, WideDesign) else "panels"
        if form not in self.held:
            if form == "strips":
                strips = packing.unpack(self.panels)
                self.held[form] = self.backend.array(strips.codes), self.backend.array(strips.scales)
            else:
                self.held[form] = self.backend.array(self.panels.data)
        return self.held[form]

    def clone(self):
        def again(arrays):
            return tuple(map(self.backend.array, arrays)) if isinstance(arrays, tuple) else self.backend.array(arrays)
        return _OnDevice(self.backend, self.panels, {form: again(arrays) for form, arrays in self.held.items()})


class PackedGemm:
    """One weight matrix on a device, and the design that multiplies by it.

    backend: where it runs.  panels: the weight [N, K], checked and copied to the device.
    design: one of `DESIGNS`, or an object like those.
    `n`, `k` and `precision` are the weight's.
    Raises ValueError for an unknown design and one that cannot run here or with this weight, and what `Panels.check`
    raises.
    """

    def __init__(self, backend: Backend, panels: packing.Panels, design="ring"):
        panels.check()
        self.backend, self.panels = backend, panels
        self.n, self.k, self.precision = panels.n, panels.k, panels.precision
        self._choose(design)
        self._device = _OnDevice(backend, panels)
        self._device.get(self._design)

    def _choose(self, design):
        if isinstance(design, str):
            if design not in DESIGNS:
                raise ValueError(f"design {design!r}; expected one of {', '.join(map(repr, DESIGNS))}")
            design = DESIGNS[design]
        self._design, self.design = design, design.name
        self._check_rows(1)

    def _check_rows(self, m):
        why_not = self._design.why_not(self.backend, self, m)
        if why_not:
            able = [name for name, design in DESIGNS.items() if design.why_not(self.backend, self, m) is None]
            raise ValueError(f"design {self.design!r}: {why_not}; {', '.join(able) or 'no design'} can do it here")

    def using(self, design) -> "PackedGemm":
        """The same weights, at the same place on the device where the form is the same, in another design."""
        other = copy(self)
        other._choose(design)
        other._device.get(other._design)
        return other

    def clone(self) -> "PackedGemm":
        """The same weights at other addresses on the device, for measurements that must miss the cache."""
        other = copy(self)
        other._device = self._device.clone()
        return other

    def __call__(self, x, *, out=None):
        """The product [M, N] on the device; arguments and errors as `prepare` has them."""
        return self.prepare(x, out=out)()

    def prepare(self, x, *, out=None, overlap=False) -> Callable:
        """A call of no arguments that launches the product [M, N] of what `x` then holds and returns `out`, on the
        device. Everything is checked and compiled here, once; the call only launches. Nothing is synchronized, and
        calls of one preparation must not run side by side: they share memory for what blocks leave each other.

        x: [M, K] on the device, of the dtype that the design's activations have (`DTYPES`): float32, float16, or the
        bits of bfloat16 as uint16. No rows are no launch.
        out: float32 [M, N] to write into; made where it is not given. Where the design has a `narrow` form, float16 or
        bfloat16, it may be of that: half of the bytes, and a rounding more, within the design's bound.
        overlap: the call may begin while the launch before it in its stream still ends (programmatic dependent launch,
        on NVIDIA GPUs from sm_90; elsewhere it changes nothing): it then reads weights, which no launch shortly before
        may have written, and waits with all else. Blocks of such a call may wait until all of them run: at most two
        streams at a time may have such calls, with every multiprocessor free for them. A design that is not made for
        that is a ValueError.
        Values are not looked at: a NaN or an infinity in a row of x makes outputs of that row NaN or infinite.
        Raises TypeError or ValueError, before anything is launched, on a wrong dtype, device, shape, stride or
        alignment, for more rows than the design takes, and where `out` shares memory with `x` or the weights.
        """
        backend, design = self.backend, self._design
        shape = tuple(getattr(x, "shape", ()))
        m = shape[0] if len(shape) == 2 else 1  # anything but a matrix is refused
        check_array(backend, x, "x", (m, self.k), DTYPES[design.activations], 16)
        if out is None:
            out = backend.empty((m, self.n), np.float32)
        narrow = design.narrow and getattr(out, "dtype", None) == DTYPES[design.narrow]
        check_array(backend, out, "out", (m, self.n), DTYPES[design.narrow] if narrow else np.float32, 16)
        data = self._device.get(design)
        arrays = data if isinstance(data, tuple) else (data,)
        check_apart(backend, {"out": out}, {"x": x} | {f"the weights ({i})": a for i, a in enumerate(arrays)})
        if m == 0:
            return lambda: out
        self._check_rows(m)
        if overlap and not design.overlaps:
            able = [name for name, other in DESIGNS.items() if other.overlaps]
            raise ValueError(f"design {self.design!r} cannot overlap the launch before it; {', '.join(able)} can")
        return design.prepare(backend, self, data, x, out, overlap)


def reference(x, panels: packing.Panels) -> np.ndarray:
    """The product in float64 on the same codes and scales. x [M, K] -> float64 [M, N]."""
    return grouped_gemm.reference(x, packing.unpack(panels))
