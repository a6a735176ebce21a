"""Designs of `packed_gemm` on Hopper's warpgroup instructions: weights in panels, copied in bulk, become f16 or bf16 in
registers.

out is float32, or of 16 bits as the activations are. Which tile of the product is taken, and which tiles are cut, is
chosen by what it costs (`nanoseconds`): tokens that do not exist, multiprocessors without work, what memory and power
give, and sums that blocks leave to each other (kernels/portable/handover.h).

There is no simulated form of these instructions; who takes which steps is checked in the simulator, and the arithmetic
by the designs on mma.sync.
"""

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import numpy as np

from kernelbook.backends import Backend, Source
from kernelbook.packing import CHUNK_BYTES, CODE_BITS, COLUMNS, ROWS

STEP = 64  # columns of a box of x
BAND = 64  # rows of w of one product
SHARED, HALF_SHARED = 227 << 10, 113 << 10  # bytes of shared memory that a block may have, and each of two
ALIGN = 1024  # of stages of x
MANY = 128  # tokens of a warp's sums that copies bring from others; of more, copies store outputs of 16 bits
WIDE = 128  # tokens of a stage of x that has a chunk's columns
MOST_AHEAD = 16  # chunks that are copied ahead: more hide nothing
APART = 32  # of counters, kApart of handover.h
INT32_MAX = 2**31 - 1


@dataclass(frozen=True)
class Form:
    """A tile of the product that the kernel is compiled for.

    tokens: of x. groups: warpgroups that multiply. bands: of 64 rows of w, that each of them has. cluster: blocks that
    share activations, of neighbouring tiles.
    room: for two blocks on a multiprocessor, so that those of the next launch bring weights while this one ends.
    slices: of K: 2 warpgroups that have the same rows, and take chunks in turns.
    parts: of K: 2 blocks that have the same tile, and a half each; such share no activations.
    """

    tokens: int
    groups: int
    bands: int = 1
    cluster: int = 1
    room: bool = False
    slices: int = 1
    parts: int = 1

    @property
    def rows(self) -> int:
        """Of w."""
        return BAND * self.bands * self.groups // self.slices

    @property
    def threads(self) -> int:
        return 128 * (self.groups + 1)

    @property
    def kept(self) -> int:
        """Tokens whose sums a warp has at the end."""
        return self.tokens // self.slices // self.parts

    @property
    def blocks(self) -> int:
        """Of a cluster."""
        return self.cluster * self.parts

    def serves(self, precision: str) -> bool:
        """Whether shared memory holds three stages of x and of w: room that leaves two costs more than it saves."""
        return not self.room or min(self.stages(precision)) > 2

    @property
    def boxes(self) -> int:
        """Of 64 columns, of a stage of x: all of a chunk, of up to 128 tokens; of more too few stages would be left."""
        return COLUMNS // STEP if self.tokens <= WIDE else 1

    def stage_bytes(self, precision: str) -> tuple[int, int]:
        """Of a stage of x and one of w."""
        return 2 * STEP * self.boxes * self.tokens, self.rows // ROWS * CHUNK_BYTES[precision]

    def stages(self, precision: str) -> tuple[int, int]:
        """Of x and of w in shared memory: as many where each has a chunk, else for about as many columns."""
        x, w = self.stage_bytes(precision)
        free = HALF_SHARED if self.room else SHARED
        free -= self.given_bytes + ALIGN + 2 * ALIGN  # to align it all, barriers
        if self.boxes == COLUMNS // STEP:
            both = min(free // (x + w), MOST_AHEAD) // self.slices * self.slices
            return both, both
        of_x = COLUMNS // STEP  # stages of x for one of w
        of_w = next(count for count in range(free // w, 0, -1) if count * w + (of_x * count - 1) * x <= free)
        return min((free - of_w * w) // x, of_x * of_w + 2), of_w

    @property
    def given_bytes(self) -> int:
        """Of shared memory, for half of its sums that each slice gives to the other, and that the other part gives."""
        sums = 4 * self.rows * self.tokens
        return (self.slices > 1) * sums + (self.parts > 1) * sums // 2

    def shared(self, precision: str) -> int:
        """Bytes of dynamic shared memory, as struct Block of 7_packed_wgmma.cu has them, and what aligns it."""
        (x, w), (of_x, of_w) = self.stage_bytes(precision), self.stages(precision)
        barriers = 16 * (of_x + of_w + 2 + 4 * self.groups)  # and what is there where nothing is given
        return math.ceil((of_x * x + of_w * w + self.given_bytes + barriers) / ALIGN) * ALIGN + ALIGN

    def source(self, precision: str, bf16: bool, narrow: bool = False) -> Source:
        of_x, of_w = self.stages(precision)
        return Source("prefill_gemm/7_packed_wgmma.cu", {
            "CODE_BITS": CODE_BITS[precision], "BF16": bf16, "GROUPS": self.groups,
            "BANDS": self.bands, "TILE_TOKENS": self.tokens, "X_BOXES": self.boxes, "X_STAGES": of_x, "W_STAGES": of_w,
            "CLUSTER": self.cluster, "ROOM": self.room, "SLICES": self.slices, "PARTS": self.parts,
            "NARROW_OUT": narrow, "SHARED_BYTES": self.shared(precision)})


FEW = (8, 16, 32)  # tokens
FORMS = (*(Form(tokens, 2) for tokens in FEW),
         *(Form(tokens, 2, bands, room=True) for bands in (1, 2) for tokens in FEW),
         Form(64, 2, cluster=2), Form(64, 3, cluster=2), Form(96, 2, cluster=2), Form(128, 2, cluster=2),
         Form(128, 3, cluster=2), Form(176, 2, cluster=2), Form(256, 2, cluster=2),
         *(Form(tokens, 2, cluster=2, slices=2) for tokens in (64, 128)),
         *(Form(tokens, 2, parts=2) for tokens in (16, 32, 128)),
         *(Form(tokens, 3, parts=2) for tokens in (16, 32, 64, 128)),
         *(Form(tokens, 2, slices=2, parts=2) for tokens in (64, 128)))


# ---------------------------------------------------------------- which form, and how its tiles are cut

@dataclass(frozen=True)
class Plan:
    """form: of the tiles. tiles: of the product, each of all blocks of a cluster. steps: chunks along K. ranges:
    clusters of the launch. whole: tiles that each of them has; the rest is cut, if there is one. tail: steps at the end
    of a tile that are not cut. evenly: all ranges add up the sums of what is cut, not just those that have the end of
    a tile."""

    form: Form
    tiles: int
    steps: int
    ranges: int
    whole: int
    evenly: bool = False
    tail: int = 0

    @property
    def blocks(self) -> int:
        return self.ranges * self.form.blocks

    @property
    def cut_tiles(self) -> int:
        return max(self.tiles - self.whole * self.ranges, 0)

    @property
    def is_added_up(self) -> bool:
        """Whether blocks leave sums to others."""
        return self.cut_tiles > 0 and (self.evenly or self.cut_tiles % self.ranges > 0)

    @property
    def cut_steps(self) -> int:
        """Of the tiles that are cut, one after the other, without their tails."""
        return self.cut_tiles * (self.steps - self.tail)

    @property
    def steps_of_range(self) -> int:
        """Of the range that has most."""
        return self.whole * self.steps + math.ceil(self.cut_steps / self.ranges) + self.tail

    @property
    def scratch(self) -> int:
        """Float32 numbers that blocks need to leave sums in."""
        parts = (self.ranges + (self.cut_tiles if self.evenly else 0)) * self.form.cluster
        return parts * self.form.rows * self.form.tokens if self.is_added_up else 0

    @property
    def flags(self) -> int:
        """Whole numbers of what is there, as handover.h has them."""
        return 4 * self.form.groups * self.form.blocks * (APART if self.evenly else self.ranges)


# Nanoseconds on an H200, and bytes and products in one, as far as plans are to be compared, fitted to 1,725 launches
# that overlap; those that do not take some 2 us more whatever the plan.
OF_A_LAUNCH, ROOM_SAVES = 1644, 490  # to begin and to end; where the next one has room meanwhile, at most
OF_A_STEP, OF_A_CLOCK = 96, 0.406  # what waits for what, of a chunk; of the tensor cores, while all multiply
IDLE_GAINS, MULTIPROCESSORS = 0.31, 132  # what clocks would gain if none did: those that have no block draw no power
TOKENS_MORE = 75  # that a product takes: to make its weights
IN_BYTES, W_BYTES = 90, 43.8  # to one multiprocessor; of w
MEMORY_BYTES = 4290  # asked for by all
POWER = 824_000 / 2  # products, of all, while power lets them be
SUMS_BYTES = 141  # sums left or written
OF_A_GIFT, UNALIGNED = 1214, 642  # sums that are left; more where ranges begin and end within tiles
OF_A_GIVER = 101  # each time that some are taken
OF_A_MEETING, OF_A_SHARE = 2257, 44  # of all ranges, and to begin to add up; of each whose sums are read then
OF_PARTS, PART_BYTES = 146, 57  # to add up what two blocks have; sums that either gives
TAIL = 2  # steps at the end of a tile of many tokens that are not cut, where ranges are shorter than tiles
L2_HOLDS = 32 << 20  # bytes of x that blocks may read at different columns of K


def plans(m: int, n: int, k: int, multiprocessors: int, forms: Iterable[Form] = FORMS) -> Iterable[Plan]:
    """Every way to share a product [m, n] over k that is worth a thought."""
    steps = math.ceil(k / COLUMNS)
    for form in forms:
        tiles = math.ceil(m / form.tokens) * math.ceil(n / (form.rows * form.cluster))
        most = multiprocessors // form.blocks
        if not most or form.room and m > form.tokens:  # which reads the weights again
            continue
        if form.tokens >= 2 * max(m, FEW[0] * form.parts):  # a smaller tile has them all
            continue
        if form.room:  # a multiprocessor without a block gets two of the next launch, while others have none
            counts = {min(most, tiles * steps)}
        else:
            yield Plan(form, tiles, steps, min(tiles, most), math.ceil(tiles / most))  # nothing is cut
            counts = {most, *range(2 * tiles, most + 1, tiles)}
        for ranges in counts:
            for whole in {tiles // ranges, max(tiles // ranges - 1, 0)}:
                tail = TAIL if form.kept >= MANY and 0 < tiles - whole * ranges < ranges and steps > TAIL else 0
                for evenly in (False, True) if form.room else (False,):
                    plan = Plan(form, tiles, steps, ranges, whole, evenly, tail)
                    if ranges <= plan.cut_steps <= INT32_MAX // ranges:
                        yield plan


def nanoseconds(plan: Plan, m: int, n: int, k: int, precision: str) -> float:
    """What a plan takes, roughly."""
    form, idle = plan.form, plan.tiles % plan.ranges and not plan.cut_tiles  # at the end some ranges have no tile
    sums = 4 * form.rows * form.tokens / SUMS_BYTES
    x, w = 2 * COLUMNS * form.tokens, form.rows // ROWS * CHUNK_BYTES[precision]
    clock = OF_A_CLOCK * (1 - IDLE_GAINS * (1 - plan.blocks / MULTIPROCESSORS))
    step = max(OF_A_STEP + form.rows * (form.tokens + TOKENS_MORE) / 16 * clock, (x + w) / IN_BYTES, w / W_BYTES)
    power = COLUMNS * form.rows * form.tokens * plan.blocks / POWER  # a step of all
    steps = math.ceil(plan.steps_of_range / form.parts)
    last = plan.steps / form.parts if idle else 0
    multiplied = (steps - last) * max(step, power) + last * max(step, power * (plan.tiles % plan.ranges) / plan.ranges)
    read = n / ROWS * plan.steps * CHUNK_BYTES[precision]
    if 2 * m * k > L2_HOLDS:  # ranges of cut tiles are at different columns
        read += plan.cut_tiles * plan.steps * x
    read /= MEMORY_BYTES
    given = 0
    if form.parts > 1:
        given = math.ceil(plan.tiles / plan.ranges) * (OF_PARTS + 2 * form.rows * form.tokens / PART_BYTES)
    if plan.is_added_up:
        givers = math.ceil(plan.ranges / plan.cut_tiles)  # ranges that have a part of a tile
        if plan.evenly:
            parts = (plan.ranges + plan.cut_tiles) / plan.ranges
            given += OF_A_MEETING + givers * OF_A_SHARE + (2 * parts + plan.cut_tiles / plan.ranges) * sums
        else:
            gift = OF_A_GIFT + (plan.ranges % plan.cut_tiles > 0) * UNALIGNED
            given += sums + gift + givers * (sums + OF_A_GIVER)
    written = (plan.whole if plan.evenly else math.ceil(plan.tiles / plan.ranges)) * sums
    saved = min(ROOM_SAVES, read) if form.room else 0  # weights can be there, no more
    return OF_A_LAUNCH - saved + max(multiplied, read) + given + written


# ---------------------------------------------------------------- the designs

@dataclass(frozen=True)
class WgmmaDesign:
    """name: in `packed_gemm.DESIGNS`. activations: "float16" or "bfloat16", what x is on the device. bound: on the
    relative Frobenius error against float64 on the codes and the float32 activations, for out of either dtype: f16
    rounds by up to 2^-11, bf16 by 2^-8 of a number. max_rows: none. forms: from which the shape chooses."""

    name: str
    activations: str
    bound: float
    forms: tuple[Form, ...] = FORMS
    max_rows = None
    overlaps = True
    stands_in = True

    @property
    def narrow(self) -> str:
        """What out may be on the device beside float32: "float16" or "bfloat16". f16 ends at 65504; what is beyond
        becomes infinite."""
        return self.activations

    def source(self, precision: str, form: Form, narrow: bool = False) -> Source:
        """narrow: out is of 16 bits."""
        return form.source(precision, self.activations == "bfloat16", narrow)

    def sources(self) -> list[Source]:
        """Every form, for static evidence."""
        return [self.source(precision, form, narrow) for precision in CODE_BITS for form in self.forms
                if form.serves(precision) for narrow in (False, True)]

    def why_not(self, backend: Backend, weights, m: int) -> str | None:
        """Why `m` rows cannot be multiplied by weights (their n, k and precision) on a backend; None where they can."""
        if getattr(backend, "arch", None) != "90a":
            return f"it needs Hopper's warpgroup instructions, and {backend.device} has none"
        if weights.k * 2 % 16:
            return f"it takes K a multiple of 8, not {weights.k}: bulk copies of x have rows of whole 16 bytes"
        return None

    def plan(self, backend: Backend, weights, m: int, overlap=False) -> Plan:
        """The cheapest for `m` rows, at least one. Only launches that overlap gain from room for each other."""
        shape = m, weights.n, weights.k
        forms = [form for form in self.forms if (overlap or not form.room) and form.serves(weights.precision)]
        return min(plans(*shape, backend.multiprocessors, forms),
                   key=lambda plan: nanoseconds(plan, *shape, weights.precision))

    def prepare(self, backend: Backend, weights, data, x, out, overlap=False, *, sums=None) -> Callable:
        """A call of no arguments that launches the product [M, N] of what `x` then holds and returns `out`.

        weights: their n, k and precision. data: the panels on the device, uint8 at a multiple of 16 bytes. x: [M, K] on
        the device, float16, or bits of bfloat16 as uint16, at a multiple of 16 bytes. out: [M, N], float32 or as x, at
        a multiple of 16 bytes. sums: float32, as many as the plan's scratch has, at a multiple of 16 bytes, which calls
        that run one after the other can share; made where it is not given. overlap: see `PackedGemm.prepare`. All
        checked by the caller. Raises BackendUnavailable where the driver has no tensor maps.
        """
        m = len(x)
        if m == 0:
            return lambda: out
        return self.launch(backend, weights, data, x, out, self.plan(backend, weights, m, overlap), overlap=overlap,
                           sums=sums)

    def launch(self, backend: Backend, weights, data, x, out, plan: Plan, *, overlap=False, sums=None) -> Callable:
        """`prepare` for a plan of the caller's, which must be one of `plans` of this shape; M is at least 1. Raises
        ValueError where all blocks have to run at once and do not."""
        m, n, k, form = len(x), weights.n, weights.k, plan.form
        if plan.evenly and not (form.room and plan.cut_steps and plan.blocks <= backend.multiprocessors):
            raise ValueError(f"all blocks of {plan} wait for each other: that takes a form with room, tiles that are "
                             f"cut, and no more blocks than {backend.multiprocessors} multiprocessors")
        narrow = out.dtype != np.float32
        source = self.source(weights.precision, form, narrow)
        kernel = backend.compile(source).kernel("packed_wgmma")
        boxes = backend.tensor_map(x, (form.tokens // form.cluster, STEP))
        has_boxes = narrow and form.kept > MANY and n % 8 == 0  # rows at multiples of 16 bytes
        out_boxes = backend.tensor_map(out, (form.tokens, BAND)) if has_boxes else np.void(boxes.nbytes)
        if sums is None:
            sums = backend.empty(max(plan.scratch, 4), np.float32)
        there = backend.array(np.zeros(plan.flags, np.int32))
        args = [data, boxes, out, sums, there, *map(np.int32, (m, n, k, plan.whole, plan.evenly, plan.tail)), out_boxes]
        block, size = (32, form.threads // 32, 1), form.shared(weights.precision)

        def launch():
            kernel((plan.blocks, 1, 1), block, args, size, overlap)
            return out
        launch.keeps = x  # its map has its address only
        return launch


DESIGNS = {design.name: design for design in (
    WgmmaDesign("wgmma_bf16", "bfloat16", 4e-3),
    WgmmaDesign("wgmma_f16", "float16", 5e-4))}
