"""The designs of packed_gemm on warpgroup instructions: as compiled, as planned and, on a Hopper GPU, multiplying."""

import itertools
import re
from types import SimpleNamespace

import numpy as np
import pytest

from kernelbook import packing, stats, toolchain
from kernelbook.ops import grouped_gemm
from kernelbook.ops import packed_wgmma as op

OWN_BOUND = 2e-5  # on the operands as they are multiplied: what is left is how the tensor cores add
SHAPES = [(1, 16, 128), (5, 40, 96), (8, 1000, 1312), (9, 37, 1312), (13, 592, 416), (33, 2064, 1024), (70, 299, 640),
          (24, 1030, 4096), (130, 144, 2048), (300, 2064, 1536), (513, 1040, 1024)]
"""(M, N, K): ends within a panel, a tile, a cluster and a chunk; N no multiple of 4 or 2; tiles that are cut."""

CASES = list(itertools.product(op.DESIGNS, packing.CHUNK_BYTES))


def weight(n, k, precision):
    return SimpleNamespace(n=n, k=k, precision=precision)


# ---- compiled

@pytest.mark.parametrize("name, precision, tokens, kind, narrow", [
    ("wgmma_f16", "int4", 256, "", False), ("wgmma_bf16", "int4", 256, "", True),
    ("wgmma_f16", "int8", 176, "", True), ("wgmma_bf16", "int4", 128, "", False),
    ("wgmma_f16", "int8", 8, "", False), ("wgmma_f16", "int8", 32, "room", True),
    ("wgmma_bf16", "int8", 256, "", True), ("wgmma_bf16", "int8", 64, "", False),
    ("wgmma_bf16", "int4", 16, "room", False), ("wgmma_f16", "int8", 64, "slices", True),
    ("wgmma_bf16", "int4", 128, "slices", True), ("wgmma_bf16", "int8", 128, "three", True),
    ("wgmma_f16", "int8", 16, "parts", True), ("wgmma_bf16", "int4", 128, "parts", False),
    ("wgmma_f16", "int4", 128, "parts three", True), ("wgmma_bf16", "int8", 128, "parts slices", True)])
def test_machine_code(name, precision, tokens, kind, narrow):
    """No spills, products that follow each other without a wait of the compiler's and addresses that stay in registers
    of a warp, copies by the copy engine; outputs of 16 bits are transposed and stored by 8 bytes, or of many tokens, at
    the end, by a copy. A lane stores half of its sums to the block that has the other part of K, by 16 bytes."""
    if toolchain.targets()["sm_90a"]:
        pytest.skip(toolchain.targets()["sm_90a"])
    room, slices, parts = kind == "room", 1 + ("slices" in kind), 1 + ("parts" in kind)
    form = next(form for form in op.FORMS if (form.tokens, form.room, form.slices, form.parts) ==
                (tokens, room, slices, parts) and ("three" not in kind or form.groups == 3))
    source = op.DESIGNS[name].source(precision, form, narrow)
    _, log = toolchain.nvrtc_compile(source, "90a")
    compiled = toolchain.compile_cuda(source, "90a")
    resources, = compiled.resources.values()
    assert resources["spill_bytes"] == resources["stack_bytes"] == 0
    assert "serialized" not in log
    assert len(re.findall(rf"HGMMA\.64x{tokens}x16\.F32", compiled.assembly)) == 8 * form.bands
    products = compiled.assembly[compiled.assembly.index("HGMMA"):compiled.assembly.rindex("HGMMA")]
    assert products.count("R2UR") <= 4  # from registers of a lane, which may be two for each product
    assert len(re.findall(r"UBLKCP", compiled.assembly)) == 1 + (form.kept >= op.MANY)  # of w; of sums
    boxes = re.findall(r"UTMALDG\.2D\S*", compiled.assembly)
    assert boxes == [("UTMALDG.2D.MULTICAST" if form.cluster > 1 else "UTMALDG.2D")] * form.boxes
    # the next launch may begin; this one asks for x when the one before has ended
    assert compiled.assembly.index("PREEXIT") < compiled.assembly.index("ACQBULK") < compiled.assembly.index(boxes[0])
    assert compiled.assembly.count("ACQBULK") == 1
    eights = form.bands * form.kept // 8 + room  # and those that all add up
    assert len(re.findall(r"STAS\.128", compiled.assembly)) == (parts > 1) * form.kept // 8
    assert len(re.findall(r"MOVM\.16\.MT88", compiled.assembly)) == narrow * 2 * eights
    assert len(re.findall(r"STG\.E\.64 ", compiled.assembly)) == narrow * eights
    by_copy = narrow and tokens > op.MANY  # which no slices are
    assert len(re.findall(r"STSM\.16\.MT88\.4 ", compiled.assembly)) == by_copy * tokens // 16
    assert len(re.findall(r"UTMASTG\.2D ", compiled.assembly)) == by_copy
    assert resources["registers"] * form.threads * (1 + room) <= 65536


@pytest.mark.parametrize("precision", packing.CHUNK_BYTES)
@pytest.mark.parametrize("form", op.FORMS, ids=str)
def test_stages_fit(precision, form):
    x, w = form.stages(precision)
    assert w >= 2 and 64 * form.boxes * x >= 128 * min(w, 2) and x % form.slices == w % form.slices == 0
    assert (form.shared(precision) + 1024) * (1 + form.room) <= 228 << 10
    assert form.tokens % (8 * form.cluster) == 0 and form.kept % 8 == 0


LAYOUT = """
#include "wgmma.h"
extern "C" __global__ void layout(int *at) {
  at[threadIdx.y * 32 + threadIdx.x] = transposed_row(threadIdx.y, threadIdx.x);
}
GPU_KERNEL(layout)
"""


def test_outputs_lie_in_shared_memory_as_a_copy_takes_them(simulator, tmp_path):
    """What warps store of [tokens][64 rows], 16 tokens at a time, is what the copy of a swizzled box reads."""
    (tmp_path / "layout.cu").write_text(LAYOUT)
    places = simulator.array(np.full((4, 32), -1, np.int32))
    simulator.compile(str(tmp_path / "layout.cu")).kernel("layout")((1, 1, 1), (32, 4, 1), [places])
    at = simulator.numpy(places).reshape(4, 4, 8)  # warp, matrix, row of the transposed one
    assert (np.sort(at % 128 // 16) == np.arange(8)).all()  # rows of a matrix are in different banks
    tokens = 32
    out, memory = np.arange(tokens * 64).reshape(tokens, 64), np.full(tokens * 64, -1)
    for warp, matrix, row, of_16 in np.ndindex(4, 4, 8, tokens // 16):
        token, first = 16 * of_16 + matrix // 2 * 8 + row, 16 * warp + matrix % 2 * 8
        place = (at[warp, matrix, row] + 16 * 128 * of_16) // 2
        memory[place:place + 8] = out[token, first:first + 8]
    token, chunk = np.ogrid[:tokens, :8]
    assert np.array_equal(memory.reshape(tokens, 8, 8)[token, chunk ^ token % 8].reshape(tokens, 64), out)


# ---- shared out

WALK = """
#include "handover.h"
// works [ranges][room][7]: tile, first, end, whether given, the first of the ranges that have a part of the tile, part
// if all are given, whether it is the last; ranges are blocks
extern "C" __global__ void walk(int *works, int tiles, int steps, int whole, int evenly, int tail, int room) {
  if (threadIdx.x) return;
  Ranges range(tiles, steps, blockIdx.x, gridDim.x, whole, evenly, tail);
  int *to = works + blockIdx.x * room * 7;
  for (Work work; range.next(work); to += 7) {
    const int of_row = work.tile - whole * range.ranges;
    to[0] = work.tile, to[1] = work.first, to[2] = work.end, to[3] = range.is_given(work);
    to[4] = !evenly ? range.first_giver(work) : of_row >= 0 ? range.range_of(of_row * range.cut) : -1;
    to[5] = range.part(range.range, work.tile), to[6] = range.is_last();
  }
}
GPU_KERNEL(walk)
"""
WALKS = [(1, 1, 1, 0), (1, 40, 7, 0), (4, 16, 16, 0), (3, 5, 7, 0), (68, 20, 66, 0), (68, 40, 66, 1), (136, 40, 132, 0),
         (120, 48, 120, 1), (5, 3, 4, 2), (80, 48, 66, 1), (80, 48, 66, 0), (272, 9, 132, 1)]


def walk(simulator, tmp_path, tiles, steps, ranges, whole, evenly, tail=0):
    """Of each range its works: tile, first, end, is given, the first range that has a part of the tile, part."""
    (tmp_path / "walk.cu").write_text(WALK)
    room = tiles + 2
    works = simulator.array(np.full((ranges, room, 7), -7, np.int32))
    args = [works, *map(np.int32, (tiles, steps, whole, evenly, tail, room))]
    simulator.compile(str(tmp_path / "walk.cu")).kernel("walk")((ranges, 1, 1), (32, 1, 1), args)
    found = [[tuple(map(int, work)) for work in own if work[0] != -7] for own in simulator.numpy(works)]
    if tiles > whole * ranges:  # or the last may be a tile that is not there
        assert all([work[6] for work in own] == [0] * (len(own) - 1) + [1] for own in found)
    done, lengths = np.zeros((tiles, steps), int), []
    for own in found:
        of_row = [work for work in own if work[0] >= whole * ranges]
        lengths.append(sum(end - first - tail * (end == steps) for _, first, end, *_ in of_row))
        for tile, first, end, *_ in own:
            assert end > first
            done[tile, first:end] += 1
    assert (done == 1).all()
    assert max(lengths) - min(lengths) <= 1
    return found


@pytest.mark.parametrize("tail", [0, 1, 4])
@pytest.mark.parametrize("tiles, steps, ranges, whole", WALKS)
def test_ranges_have_every_step_once_and_wait_for_those_before(simulator, tmp_path, tiles, steps, ranges, whole, tail):
    if tail and max(tiles - whole * ranges, 0) * (steps - tail) < ranges:
        pytest.skip("not a step for each range without the tails")
    given = {}
    for own, walked in enumerate(walk(simulator, tmp_path, tiles, steps, ranges, whole, False, tail)):
        for i, (tile, first, end, is_given, giver, *_) in enumerate(walked):
            if is_given:  # once, and before it waits for others
                assert own not in given and i <= whole
                given[own] = tile, first, end
            elif first:  # waits last, and for those before
                assert i == len(walked) - 1 and giver < own
                parts = [given[r] for r in range(giver, own)]
                assert all(of == tile for of, _, _ in parts)
                assert parts[0][1] == 0 and [part[2] for part in parts] == [part[1] for part in parts[1:]] + [first]
            else:
                assert giver == own


@pytest.mark.parametrize("tiles, steps, ranges, whole", [walk for walk in WALKS if walk[0] > walk[2] * walk[3]])
def test_evenly_all_of_the_row_is_left_first(simulator, tmp_path, tiles, steps, ranges, whole):
    parts = {}
    for own, walked in enumerate(walk(simulator, tmp_path, tiles, steps, ranges, whole, True)):
        assert [work[3] for work in walked] == sorted((work[3] for work in walked), reverse=True)
        assert sum(not work[3] for work in walked) == whole
        for tile, first, end, is_given, giver, part, _ in walked:
            assert is_given == (tile >= whole * ranges)
            if is_given:
                assert part not in parts and 0 <= part < ranges + tiles - whole * ranges
                parts[part] = tile, first, end, own, giver
    form = next(form for form in op.FORMS if form.room)
    scratch = op.Plan(form, tiles, steps, ranges, whole, evenly=True).scratch
    assert max(parts) < scratch // (form.rows * form.tokens)
    by_tile = {}
    for part in sorted(parts):
        by_tile.setdefault(parts[part][0], []).append(parts[part])
    for of_tile in by_tile.values():  # the ranges from the first on, in one order
        assert [first for _, first, *_ in of_tile] == [0] + [end for _, _, end, *_ in of_tile[:-1]]
        assert [own for *_, own, _ in of_tile] == list(range(of_tile[0][4], of_tile[0][4] + len(of_tile)))


PART = """
#include "handover.h"
extern "C" __global__ void share(int *steps, int first, int end, int parts) {  // of each of the parts: first, end
  const Work own = Work{0, first, end}.part(blockIdx.x, parts);
  if (threadIdx.x == 0) steps[2 * blockIdx.x] = own.first, steps[2 * blockIdx.x + 1] = own.end;
}
GPU_KERNEL(share)
"""


@pytest.mark.parametrize("first, end, parts", [(0, 16, 2), (3, 4, 2), (7, 12, 2), (0, 40, 1), (5, 7, 3)])
def test_blocks_of_a_cluster_have_even_parts_of_a_works_steps(simulator, tmp_path, first, end, parts):
    (tmp_path / "part.cu").write_text(PART)
    steps = simulator.array(np.full((parts, 2), -7, np.int32))
    args = [steps, *map(np.int32, (first, end, parts))]
    simulator.compile(str(tmp_path / "part.cu")).kernel("share")((parts, 1, 1), (32, 1, 1), args)
    found = simulator.numpy(steps).tolist()
    assert [begin for begin, _ in found] == [first] + [stop for _, stop in found[:-1]] and found[-1][1] == end
    lengths = [stop - begin for begin, stop in found]
    assert max(lengths) - min(lengths) <= 1


@pytest.mark.parametrize("multiprocessors", [132, 114, 78, 1])
def test_plans_are_what_the_kernel_can_do(multiprocessors):
    for n, k in [(17408, 5120), (5120, 17408), (48, 5120), (16, 128), (1000, 32), (2**20, 2**17)]:
        for m in (1, 8, 9, 64, 512, 513, 2048, 100_000):
            for plan in op.plans(m, n, k, multiprocessors):
                assert 1 <= plan.blocks <= multiprocessors and plan.steps * 128 >= k
                assert plan.tiles * plan.form.cluster * plan.form.rows * plan.form.tokens >= m * n
                assert plan.cut_steps == 0 or plan.ranges <= plan.cut_steps <= (2**31 - 1) // plan.ranges
                assert not plan.evenly or plan.cut_steps and plan.form.room
                assert not plan.form.room or plan.ranges == min(multiprocessors, plan.tiles * plan.steps)
                assert plan.tail < plan.steps and not (plan.evenly and plan.tail)
                assert (plan.cut_steps > 0) == (plan.cut_tiles > 0)


@pytest.mark.parametrize("precision", packing.CHUNK_BYTES)
def test_what_is_chosen(precision):
    """By tokens and blocks, as measured on an H200."""
    def chosen(m, n, k):
        plan = op.DESIGNS["wgmma_f16"].plan(SimpleNamespace(multiprocessors=132), weight(n, k, precision), m)
        return plan.form.tokens, plan.blocks, plan.cut_steps > 0
    assert chosen(512, 17408, 5120) == (256, 132, True)
    assert chosen(512, 5120, 6144) == (176, 120, False)
    assert chosen(8, 17408, 5120)[0] == 8
    assert chosen(256, 2048, 2048) == chosen(512, 2048, 2048) == (128, 128, False)
    assert chosen(256, 6144, 2048) == chosen(512, 6144, 2048) == (128, 128, False)


def test_warpgroups_share_rows_where_there_are_few():
    def form(m, n, k, precision="int8"):
        return op.DESIGNS["wgmma_f16"].plan(SimpleNamespace(multiprocessors=132), weight(n, k, precision), m).form
    assert all(form(m, 2048, 2048).slices == 2 for m in (64, 128, 256))
    assert form(512, 2048, 2048, "int4").slices == 2
    assert all(form(m, 17408, 5120).slices == 1 for m in (8, 32, 64, 512))
    assert form(512, 6144, 2048).groups == 3


def test_two_blocks_have_parts_of_a_tile_where_there_are_few_or_handing_over_costs_more():
    def form(m, n, k):
        return op.DESIGNS["wgmma_f16"].plan(SimpleNamespace(multiprocessors=132), weight(n, k, "int4"), m, True).form
    few = (32, 10240, 5120), (16, 12288, 5120), (128, 12288, 5120), (256, 6144, 2048), (512, 2048, 6144)
    assert all(form(*shape).parts == 2 for shape in few)
    assert all(form(m, n, k).parts == 1 for m in (8, 256, 512, 2048) for n, k in ((17408, 5120), (5120, 17408)))


@pytest.mark.parametrize("precision", packing.CHUNK_BYTES)
def test_every_form_is_compiled_that_may_be_chosen_and_no_other(precision):
    served = [form for form in op.FORMS if form.serves(precision)]
    assert [form for form in op.FORMS if not form.room] == [form for form in served if not form.room]
    assert [form.tokens for form in served if form.room] == ([8, 16, 32] * 2 if precision == "int4" else [8, 16, 32, 8])
    bits = packing.CODE_BITS[precision]
    sources = [s for s in op.DESIGNS["wgmma_bf16"].sources() if s.defines["CODE_BITS"] == bits]
    assert len(sources) == 2 * len(served)


def test_all_add_up_evenly_what_many_have_parts_of():
    def plan(m, n, k):
        return op.DESIGNS["wgmma_f16"].plan(SimpleNamespace(multiprocessors=132), weight(n, k, "int4"), m, True)
    assert plan(16, 5120, 17408).evenly and plan(8, 5120, 6144).evenly and not plan(16, 17408, 5120).evenly
    assert not any(plan(m, 5120, 17408).evenly for m in (64, 128, 512))


def test_room_is_for_launches_that_overlap():
    def plan(m, overlap, precision="int4"):
        backend = SimpleNamespace(multiprocessors=132)
        return op.DESIGNS["wgmma_f16"].plan(backend, weight(17408, 5120, precision), m, overlap)
    assert not any(plan(m, False).form.room for m in (1, 8, 16, 32, 64, 512))
    assert all(plan(m, True).form.room for m in (1, 8, 16, 32))
    assert plan(512, True) == plan(512, False)
    assert all(plan(m, True, "int8").form.room for m in (8, 16, 32))
    assert all(plan(m, True, "int8").form.bands == 1 for m in (16, 32))  # of two bands there would be two stages


def test_no_tile_has_twice_the_tokens_that_are_needed():
    """But each part has 8 to add up."""
    for m, most, parts in ((1, 8, 16), (8, 8, 16), (9, 16, 16), (32, 32, 32), (33, 64, 64), (64, 96, 64),
                           (65, 128, 128), (512, 256, 128)):
        found = list(op.plans(m, 4096, 4096, 132))
        assert max(plan.form.tokens for plan in found if plan.form.parts == 1) == most
        assert max(plan.form.tokens for plan in found if plan.form.parts == 2) == parts


def test_says_why_not(simulator):
    design = op.DESIGNS["wgmma_bf16"]
    assert "Hopper" in design.why_not(simulator, weight(64, 128, "int4"), 8)
    hopper = SimpleNamespace(arch="90a", multiprocessors=132, device="one")
    assert design.why_not(hopper, weight(64, 128, "int4"), 8) is None
    assert design.why_not(hopper, weight(64, 128, "int8"), 8) is None
    assert "K a multiple of 8, not 100" in design.why_not(hopper, weight(64, 100, "int4"), 8)


def test_blocks_that_all_wait_for_each_other_must_fit():
    room, other = (next(form for form in op.FORMS if form.room == has and form.tokens == 16) for has in (True, False))
    backend, x, w = SimpleNamespace(multiprocessors=132), np.zeros((16, 5120), np.float16), weight(17408, 5120, "int4")
    for plan in (op.Plan(room, 68, 40, 264, 0, evenly=True), op.Plan(other, 68, 40, 132, 0, evenly=True),
                 op.Plan(room, 132, 40, 132, 1, evenly=True)):
        with pytest.raises(ValueError, match="wait for each other.*132 multiprocessors"):
            op.DESIGNS["wgmma_f16"].launch(backend, w, None, x, x, plan)


# ---- multiplied

@pytest.fixture(scope="module")
def hopper(gpu):
    if getattr(gpu, "arch", None) != "90a":
        pytest.skip(f"{gpu.device} is no Hopper GPU")
    return gpu


def to_bf16(x):
    bits = np.asarray(x, np.float32).view(np.uint32)
    return ((bits + 0x7fff + (bits >> 16 & 1)) >> 16).astype(np.uint16)


def narrowed(name, x):
    """float32 as a design's own 16 bits."""
    return to_bf16(x) if op.DESIGNS[name].narrow == "bfloat16" else x.astype(np.float16)


def widened(x):
    """A design's 16 bits as float64."""
    return ((x.astype(np.uint32) << 16).view(np.float32) if x.dtype == np.uint16 else x).astype(np.float64)


def multiplied(name, panels):
    """The weights [N, K] that a design multiplies: code * scale, rounded; to bf16 the scale is, too."""
    scales = np.repeat(panels.scales.astype(np.float32), 32, axis=1)
    if op.DESIGNS[name].narrow == "bfloat16":
        scales = widened(to_bf16(scales)).astype(np.float32)
    return widened(narrowed(name, panels.codes * scales))[:panels.n, :panels.k]


def product(backend, name, panels, x, narrow=False):
    given = backend.array(narrowed(name, x))
    out = backend.empty((len(x), panels.n), given.dtype if narrow else np.float32)
    op.DESIGNS[name].prepare(backend, panels, backend.array(panels.data), given, out)()
    return backend.numpy(out)


@pytest.mark.gpu
@pytest.mark.parametrize("name, precision", CASES)
@pytest.mark.parametrize("m, n, k", SHAPES)
def test_against_float64(hopper, name, precision, m, n, k):
    rng = np.random.default_rng((m, n, k))
    panels = packing.random_panels(rng, n, k, precision)
    x = rng.standard_normal((m, k), np.float32)
    out = product(hopper, name, panels, x)
    reference = grouped_gemm.reference(x, packing.unpack(panels))
    assert stats.errors(out, reference).relative_frobenius <= op.DESIGNS[name].bound
    assert np.array_equal(out, product(hopper, name, panels, x))
    assert np.array_equal(product(hopper, name, panels, x, narrow=True), narrowed(name, out))
    own = widened(narrowed(name, x)) @ multiplied(name, panels).T
    assert stats.errors(out, own).relative_frobenius <= OWN_BOUND


@pytest.mark.gpu
@pytest.mark.parametrize("narrow, more", [(False, 8), (True, 8), (True, 4), (True, 5)])
@pytest.mark.parametrize("precision", packing.CHUNK_BYTES)
@pytest.mark.parametrize("form", op.FORMS, ids=str)
def test_every_plan_of_a_form(hopper, form, precision, narrow, more):
    """Launches follow each other in the same scratch, on other activations each time: nothing of the one before is left
    there, and nothing is written beside out."""
    m, n, k = 2 * form.tokens + 3, 2 * form.rows * form.cluster + more, 1376
    design, rng = op.DESIGNS["wgmma_f16"], np.random.default_rng((form.tokens, n))
    counters = []

    class Watched:  # the backend; its last array is what blocks tell each other
        def __getattr__(self, name):
            return getattr(hopper, name)

        def array(self, numbers):
            counters.append(hopper.array(np.concatenate([numbers, np.full(guard, 7, numbers.dtype)])))
            return counters[-1][:-guard]
    panels = packing.random_panels(rng, n, k, precision)
    w = packing.unpack(panels).dequantize(np.float64).astype(np.float16).astype(np.float64)
    data, given = hopper.array(panels.data), hopper.empty((m, k), np.float16)
    guard = 64  # numbers on either side, so that what is between is at a multiple of 16 bytes
    room = hopper.empty(m * n + 2 * guard, np.float16 if narrow else np.float32)
    out = room[guard:-guard].reshape(m, n)
    # as of few multiprocessors, too: whole tiles before those that are cut, and ranges with parts of two tiles
    for plan in {plan for few in (hopper.multiprocessors, 14, 8) for plan in op.plans(m, n, k, few, [form])}:
        sums = hopper.empty(max(plan.scratch, 4) + 2 * guard, np.float32)
        sums.fill(7)
        call = design.launch(Watched(), panels, data, given, out, plan, overlap=True, sums=sums[guard:-guard])
        for turn in range(3):
            x = rng.standard_normal((m, k)).astype(np.float16)
            given[...] = hopper.array(x)
            room.fill(7), out.fill(np.nan)
            found = hopper.numpy(call()).astype(np.float64)
            bound = design.bound if narrow else OWN_BOUND
            assert stats.errors(found, x.astype(np.float64) @ w.T).relative_frobenius <= bound, plan
            for around in (hopper.numpy(room), hopper.numpy(sums)):
                assert (around[:guard] == 7).all() and (around[-guard:] == 7).all()
            there = hopper.numpy(counters[-1])
            assert (there[-guard:] == 7).all()
            assert set(there[:-guard]) == ({0, plan.ranges} if plan.evenly and turn % 2 == 0 else {0})


@pytest.mark.gpu
@pytest.mark.parametrize("form", op.FORMS, ids=str)
def test_products_follow_each_other_with_nothing_between(hopper, form):
    """Each output, of 16 bits, is the next one's activations, and what that writes over."""
    m, size, design = form.tokens, 2048, op.DESIGNS["wgmma_f16"]
    panels = packing.random_panels(np.random.default_rng(5), size, size, "int4")
    panels.data[..., -128:].view(np.float16)[...] = 2.0**-9  # half a code, which all of w has, doubles each time
    data, x = hopper.array(panels.data), np.random.default_rng(m).standard_normal((m, size)).astype(np.float16)
    for plan in op.plans(m, size, size, hopper.multiprocessors, [form]):
        ends = []
        for overlap in (False, True):
            turns = [hopper.array(x), hopper.empty((m, size), np.float16)]
            calls = [design.launch(hopper, panels, data, turns[i], turns[1 - i], plan, overlap=overlap) for i in (0, 1)]
            for turn in range(10):
                calls[turn % 2]()
            ends.append(hopper.numpy(turns[0]))
        assert np.isfinite(ends[0]).all() and np.abs(ends[0]).max() > 0 and np.array_equal(*ends), plan


@pytest.mark.gpu
@pytest.mark.parametrize("precision", packing.CHUNK_BYTES)
@pytest.mark.parametrize("form", op.FORMS, ids=str)
def test_copies_may_come_in_any_order(hopper, form, precision):
    """A weight from memory, many times: a stage that is taken for full before it is gives other bits, or a fault."""
    m, n, k = form.tokens, 16384, 4096
    data = hopper.xp.random.randint(0, 256, (n // 16, k // 128, packing.CHUNK_BYTES[precision]), dtype=np.uint8)
    data[..., -128:].view(np.float16)[...] = np.float16(0.01)
    x = hopper.array(np.random.default_rng(m).standard_normal((m, k)).astype(np.float16))
    design, out, shape = op.DESIGNS["wgmma_f16"], hopper.empty((m, n), np.float32), SimpleNamespace(
        n=n, k=k, precision=precision)
    plan = min(op.plans(m, n, k, hopper.multiprocessors, [form]), key=lambda p: op.nanoseconds(p, m, n, k, precision))
    call = design.launch(hopper, shape, data, x, out, plan, overlap=True)
    first = call().copy()
    for _ in range(10):
        for _ in range(30):
            call()
        assert bool((out == first).all())


@pytest.mark.gpu
@pytest.mark.parametrize("precision", packing.CHUNK_BYTES)
def test_every_weight_is_its_product_rounded_once(hopper, precision):
    """One activation at a time gives the weights back, as the f16 nearest to code * scale."""
    panels = packing.random_panels(np.random.default_rng(3), 40, 256, precision)
    out = product(hopper, "wgmma_f16", panels, np.eye(256, dtype=np.float32))
    w = packing.unpack(panels).dequantize(np.float64).astype(np.float16).astype(np.float32)
    assert np.array_equal(out, w.T)


@pytest.mark.gpu
def test_what_is_not_a_number_stays_in_its_row_and_column(hopper):
    panels = packing.random_panels(np.random.default_rng(4), 200, 384, "int8")
    x = np.random.default_rng(5).standard_normal((70, 384), np.float32)
    clean = product(hopper, "wgmma_f16", panels, x)
    x[[7, 40], 300] = np.nan
    out = product(hopper, "wgmma_f16", panels, x)
    assert np.isnan(out[[7, 40]]).all()
    assert np.array_equal(np.delete(out, [7, 40], 0), np.delete(clean, [7, 40], 0))


@pytest.mark.gpu
@pytest.mark.parametrize("form", [form for form in op.FORMS if form.cluster > 1], ids=str)
def test_what_an_earlier_tile_left_is_in_no_output(hopper, form):
    """The second tile has one row, and the other block's box none: where it would lie no stage has a number."""
    m, n, k, design = form.tokens + 1, form.rows * form.cluster, 4096, op.DESIGNS["wgmma_f16"]
    panels = packing.random_panels(np.random.default_rng(7), n, k, "int4")
    x = np.random.default_rng(8).standard_normal((m, k)).astype(np.float16)
    plan = next(plan for plan in op.plans(m, n, k, form.cluster, [form]) if not plan.cut_steps)
    assert plan.ranges == 1 and plan.tiles == 2
    outs = []
    for rows in (slice(0, 0), slice(form.tokens // form.cluster, form.tokens)):
        x[rows] = np.nan
        data, given, out = hopper.array(panels.data), hopper.array(x), hopper.empty((m, n), np.float32)
        outs.append(hopper.numpy(design.launch(hopper, panels, data, given, out, plan)()))
    assert np.isfinite(outs[0]).all() and np.isnan(outs[1][rows]).all()
    assert np.array_equal(np.delete(outs[1], rows, 0), np.delete(outs[0], rows, 0))


@pytest.mark.gpu
def test_no_rows(hopper):
    panels = packing.random_panels(np.random.default_rng(6), 16, 128, "int4")
    assert product(hopper, "wgmma_f16", panels, np.empty((0, 128), np.float32)).shape == (0, 16)


@pytest.mark.gpu
def test_the_driver_refuses_a_map(hopper):
    with pytest.raises(ValueError, match="multiples of 16 bytes"):
        hopper.tensor_map(hopper.empty((4, 12), np.float16), (4, 64))
    with pytest.raises(ValueError, match="at most 256"):
        hopper.tensor_map(hopper.empty((512, 64), np.float16), (512, 64))
