import math
import re
from dataclasses import replace
from itertools import product

import numpy as np
import pytest

from kernelbook import formats, packing, stats, toolchain
from kernelbook.backends import CompileError
from kernelbook.backends.cpu import CpuBackend
from kernelbook.ops import packed_gemm as op
from kernelbook.ops.gemm_dispatch import converted

DESIGNS = [name for name in op.DESIGNS if "wgmma" not in name]  # those have a test file of their own
ACCURATE = [name for name in DESIGNS if op.DESIGNS[name].activations == "float32"]
CASES = [(1, 1, 32), (2, 65, 96), (3, 3, 2048), (4, 16, 160), (7, 63, 64), (16, 17, 128), (32, 130, 288)]
"""(M, N, K): every number of rows that kernels are compiled for, fewer rows of w than a panel and more than a tile, K
that ends within a chunk, at its end and behind it."""
RINGS = [op.RingForm(1, 3, 1, 3), op.RingForm(4, 4, 3, 3), op.RingForm(16, 2, 1, 2), op.RingForm(32, 3, 2, 2)]
RANGES = [op.RangesForm(1, 3, 2, 2), op.RangesForm(4, 5, 1, 3), op.RangesForm(2, 2, 3, 2)]
"""Rows that share products' sums between groups and rows that do not, with more chunks of x than warps and with fewer;
one chunk and more at a time."""


@pytest.fixture(scope="module", params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def backend(request):
    return request.getfixturevalue("gpu" if request.param == "cuda" else "simulator")


def panels(n, k, precision="int8", seed=0):
    return packing.random_panels(np.random.default_rng((seed, n, k)), n, k, precision)


def normal(m, k, seed=1):
    return np.random.default_rng((seed, m, k)).standard_normal((m, k), np.float32)


def bf16(x):
    bits = x.view(np.uint32)
    return ((bits + 0x7FFF + (bits >> 16 & 1)) >> 16).astype(np.uint16)


def given(x, design):
    """x as a design takes it, and what that is as float32."""
    if design.activations == "float32":
        return x, x
    if design.activations == "float16":
        return x.astype(np.float16), x.astype(np.float16).astype(np.float32)
    return bf16(x), (bf16(x).astype(np.uint32) << 16).view(np.float32)


def multiply(backend, weight, x, design):
    """The product by a design, or by a name, into an output of NaN."""
    gemm = op.PackedGemm(backend, weight, design)
    x, _ = given(x, op.DESIGNS[design] if isinstance(design, str) else design)
    return backend.numpy(gemm(backend.array(x), out=backend.empty((len(x), weight.n), np.float32)))


def relative(out, ref):
    return stats.errors(out, ref).relative_frobenius


# ---- results

@pytest.mark.parametrize("precision", ["int8", "int4"])
@pytest.mark.parametrize("name", DESIGNS)
def test_every_design_against_float64(backend, name, precision):
    """Activations of 16 bits are multiplied as accurately as those of 32: what is lost is lost before."""
    for m, n, k in CASES:
        if m > op.DESIGNS[name].max_rows:
            continue
        weight, x = panels(n, k, precision), normal(m, k)
        _, known = given(x, op.DESIGNS[name])
        assert relative(multiply(backend, weight, x, name), op.reference(known, weight)) <= 1e-6, (m, n, k)


@pytest.mark.parametrize("name", DESIGNS)
def test_the_designs_own_bound(simulator, name):
    weight, x = panels(33, 2048, "int4"), normal(4, 2048)
    assert relative(multiply(simulator, weight, x, name), op.reference(x, weight)) <= op.DESIGNS[name].bound


@pytest.mark.parametrize("precision", ["int8", "int4"])
@pytest.mark.parametrize("form", RINGS, ids=str)
def test_every_form_of_the_ring_and_every_cut(backend, form, precision):
    """Blocks that have whole tiles, parts of them, and parts of a single one; runs repeat to the bit."""
    for m, n, k in [(form.rows, 200, 1056), (max(1, form.rows - 1), 20, 4096 if form.rows < 8 else 640)]:
        weight, x = panels(n, k, precision), backend.array(normal(m, k))
        ref = op.reference(normal(m, k), weight)
        for blocks in (1, 2, 7, 13):
            call = op.PackedGemm(backend, weight, op.RingDesign("float32", form, blocks)).prepare(x)
            out = backend.numpy(call())
            assert relative(out, ref) <= 1e-6, blocks
            assert np.array_equal(backend.numpy(call()), out), blocks


@pytest.mark.parametrize("precision", ["int8", "int4"])
@pytest.mark.parametrize("form", RANGES, ids=str)
def test_every_form_of_the_ranges_and_every_cut(backend, form, precision):
    """Ranges of less than a panel, of a panel's end and beginning, and of several; blocks with cut panels alone, with
    whole ones too, and with a single chunk; all of K, slices of unequal length, and of a single chunk."""
    for m, n, k in [(form.rows, 200, 1056), (max(1, form.rows - 1), 20, 4096), (1, 700, 96)]:
        weight, x = panels(n, k, precision), backend.array(normal(m, k))
        ref = op.reference(normal(m, k), weight)
        for slices, blocks in [(1, 1), (1, 2), (1, 7), (1, 13), (2, 7), (4, 1), (9, 3)]:
            if slices > math.ceil(k / 128):
                continue
            gemm, outs = op.PackedGemm(backend, weight, op.RangesDesign("float32", form, slices, blocks)), []
            out = backend.empty((m, n), np.float32)
            call = gemm.prepare(x, out=out)
            for _ in range(2):
                out[...] = np.nan
                outs.append(backend.numpy(call()).copy())
            assert relative(outs[0], ref) <= 1e-6, (m, n, k, slices, blocks)
            assert np.array_equal(*outs), (m, n, k, slices, blocks)


@pytest.mark.parametrize("name, precision", [("ahead", "int4"), ("ahead_f16", "int8")])
def test_panels_ahead(backend, name, precision):
    """Warps without a chunk, with one and with several; activations of all chunks read at once, or of one at a time."""
    design = op.DESIGNS[name]
    for m, n, k in [(1, 200, 1056), (2, 20, 3072), (3, 70, 96), (4, 33, 3040), (7, 16, 2048)]:
        weight, (x, known) = panels(n, k, precision), given(normal(m, k), design)
        call, outs = op.PackedGemm(backend, weight, name).prepare(backend.array(x)), []
        for _ in range(2):
            out = call()
            outs.append(backend.numpy(out).copy())
            out[...] = np.nan
        assert relative(outs[0], op.reference(known, weight)) <= 1e-6, (m, n, k)
        assert np.array_equal(*outs), (m, n, k)


def test_one_warp_has_too_few_places_for_its_pieces(simulator):
    form = op.RangesForm(1, warps=1, chunks=1, slots=2)
    with pytest.raises(CompileError, match="a warp leaves two pieces"):
        op.PackedGemm(simulator, panels(40, 256), op.RangesDesign("float32", form)).prepare(
            simulator.array(normal(1, 256)))


@pytest.mark.parametrize("design", [op.WideDesign(splits=3), op.PanelsDesign("float32", splits=3)],
                         ids=lambda design: design.name)
def test_slices_of_k(backend, design):
    weight, x = panels(200, 1056), normal(3, 1056)
    call = op.PackedGemm(backend, weight, design).prepare(backend.array(x))
    out = backend.numpy(call())
    assert relative(out, op.reference(x, weight)) <= 1e-6
    assert np.array_equal(backend.numpy(call()), out)


@pytest.mark.parametrize("name", ["wide_loads", "panels", "ring", "ranges", "ranges of slices", "ahead"])
def test_order_of_lanes_waves_and_blocks_changes_no_bit(name):
    weight, x = panels(72, 1056, "int4"), normal(4, 1056)
    forms = {"ring": op.RingDesign("float32", RINGS[1], 5), "ranges": op.RangesDesign("float32", RANGES[1], 1, 4),
             "ranges of slices": op.RangesDesign("float32", RANGES[1], 2, 4)}
    design = forms.get(name) or op.DESIGNS[name]
    if hasattr(design, "splits"):
        design = replace(design, splits=2)
    outs = [multiply(CpuBackend(order=order), weight, x, design) for order in (0, 1, 2)]
    assert np.array_equal(outs[0], outs[1]) and np.array_equal(outs[0], outs[2])


@pytest.mark.parametrize("name", DESIGNS)
def test_the_identity_gives_the_weights_back(simulator, name):
    """One activation at a time: every code is where packing says, the extreme ones too."""
    for precision, (low, high) in formats.CODES.items():
        codes = np.random.default_rng(2).integers(low, high, (20, 32), np.int8, endpoint=True)
        codes[0, :2] = low, high
        weight = packing.pack(formats.pack(codes, np.full((20, 1), 0.5), 32, precision))
        one, most = np.eye(32, dtype=np.float32), op.DESIGNS[name].max_rows
        found = [multiply(simulator, weight, one[first:first + most], name) for first in range(0, 32, most)]
        assert np.array_equal(np.concatenate(found), codes.T / np.float32(2))


def test_a_long_sum_does_not_drift(simulator):
    for name in ACCURATE:
        k = 6144 if name == "ahead" else 17408  # the longest that it takes
        weight, x = panels(8, k), np.abs(normal(1, k))
        assert relative(multiply(simulator, weight, x, name), op.reference(x, weight)) <= 1e-6


# ---- values

@pytest.mark.parametrize("name", ACCURATE)
@pytest.mark.parametrize("size", [1e38, 3e4, 1e-30, 1e-38, 1e-42])
def test_activations_of_every_size(simulator, name, size):
    """Powers of two take huge and subnormal activations to where f16 is exact, and sums back."""
    weight = packing.pack(formats.pack(np.eye(32, 64, dtype=np.int8), np.ones((32, 2)), 32, "int8"))
    x = (normal(3, 64) * np.float32(0.5)).clip(-1, 1) * np.float32(size)
    out = multiply(simulator, weight, x, name)
    assert np.allclose(out, x[:, :32], rtol=2e-7, atol=2e-45)


def test_what_a_huge_activation_leaves_of_small_ones(simulator):
    """Those of its 128 columns keep 2^-39 of it; those of the next 128 all they have, and other rows too."""
    weight = packing.pack(formats.pack(np.eye(256, dtype=np.int8), np.ones((256, 8)), 32, "int8"))
    x = normal(2, 256)
    x[0, 5] = 2.0**40
    for name in ("panels", "ring", "ranges", "ahead"):
        error = np.abs(multiply(simulator, weight, x, name).astype(np.float64) - x)
        assert error[0, :128].max() <= 2.0**(40 - 39) and error[0, 128:].max() < 1e-6 and error[1].max() < 1e-6


@pytest.mark.parametrize("name", [*DESIGNS, "ranges of slices"])
def test_a_row_that_is_no_number_leaves_the_others_alone(simulator, name):
    design = op.DESIGNS.get(name) or op.RangesDesign("float32", slices=2)
    for m in {4, min(design.max_rows, 5)}:
        weight, x = panels(20, 160), normal(m, 160)
        x[0], x[1, 3], x[2, (7, 150)[m % 2]] = 0, np.nan, (np.inf, -np.inf)[m % 2]
        out = multiply(simulator, weight, x, design)
        assert not out[0].any()
        assert np.isnan(out[1]).all() and not np.isfinite(out[2]).any()
        assert relative(out[3:], op.reference(given(x[3:], design)[1], weight)) <= 1e-6


@pytest.mark.parametrize("name", ACCURATE)
def test_an_infinity_keeps_its_sign(simulator, name):
    codes = np.array([[1], [-3]], np.int8) * np.ones((1, 128), np.int8)
    weight = packing.pack(formats.pack(codes, np.ones((2, 4)), 32, "int8"))
    x = np.zeros((2, 128), np.float32)
    x[:, 40] = np.inf, 1
    assert np.array_equal(multiply(simulator, weight, x, name), [[np.inf, -np.inf], [1, -3]])


@pytest.mark.parametrize("name", DESIGNS)
@pytest.mark.parametrize("scale", [6e-8, 65504.0])
def test_the_smallest_and_the_largest_scales(simulator, name, scale):
    codes = np.random.default_rng(3).integers(-128, 128, (20, 64)).astype(np.int8)
    weight = packing.pack(formats.pack(codes, np.full((20, 2), scale, np.float16), 32, "int8"))
    x = normal(3, 64)
    _, known = given(x, op.DESIGNS[name])
    assert relative(multiply(simulator, weight, x, name), op.reference(known, weight)) <= 1e-6


# ---- memory

@pytest.mark.parametrize("name", DESIGNS)
def test_what_lies_around_the_output_is_left_alone(simulator, name):
    for m, n in [(3, 20), (min(9, op.DESIGNS[name].max_rows), 36)]:
        memory = simulator.array(np.full((m + 2, n), 7, np.float32))
        x, known = given(normal(m, 96), op.DESIGNS[name])
        op.PackedGemm(simulator, panels(n, 96), name)(simulator.array(x), out=memory[1:m + 1])
        assert (memory[0] == 7).all() and (memory[m + 1] == 7).all()
        assert relative(memory[1:m + 1], op.reference(known, panels(n, 96))) <= 1e-6


def test_a_call_sees_what_x_then_holds(simulator):
    weight, x = panels(20, 64), simulator.array(normal(2, 64))
    for name in ACCURATE:
        call = op.PackedGemm(simulator, weight, name).prepare(x)
        for seed in (4, 5):
            x[...] = normal(2, 64, seed)
            assert relative(call(), op.reference(x, weight)) <= 1e-6


def test_using_and_clone(simulator):
    weight, x = panels(20, 64), normal(2, 64)
    first = op.PackedGemm(simulator, weight, "ring")
    other, wide = first.using("panels"), first.using("wide_loads")
    assert other.design == "panels" and wide.design == "wide_loads" and first.design == "ring"
    assert other._device.get(other._design) is first._device.get(first._design)
    copy = wide.clone()
    for at, mine in zip(copy._device.get(copy._design), wide._device.get(wide._design), strict=True):
        assert simulator.pointer(at) != simulator.pointer(mine) and np.array_equal(at, mine)
    assert np.array_equal(copy(simulator.array(x)), wide(simulator.array(x)))
    assert (first.n, first.k, first.precision) == (20, 64, "int8")


def test_no_rows_are_no_launch(simulator):
    for name in DESIGNS:
        x, _ = given(np.empty((0, 64), np.float32), op.DESIGNS[name])
        assert op.PackedGemm(simulator, panels(20, 64), name)(simulator.array(x)).shape == (0, 20)


# ---- errors

def test_bad_weights_and_designs_are_refused(simulator):
    weight = panels(20, 64)
    with pytest.raises(ValueError, match="design 'rings'; expected one of 'wide_loads', 'panels'"):
        op.PackedGemm(simulator, weight, "rings")
    with pytest.raises(ValueError, match="'panels': it is written for mma.sync, .* wide_loads can do it here"):
        op.PackedGemm(CpuBackend(wave=64), weight, "panels")
    with pytest.raises(ValueError, match="'wgmma_f16': it needs Hopper"):
        op.PackedGemm(simulator, weight, "ring").using("wgmma_f16")
    with pytest.raises(ValueError, match="K = 100"):
        op.PackedGemm(simulator, packing.Panels(weight.data, 20, 100, "int8"))


def test_the_wide_loads_run_on_waves_of_64():
    weight, x = panels(150, 320), normal(5, 320)
    assert relative(multiply(CpuBackend(wave=64), weight, x, "wide_loads"), op.reference(x, weight)) <= 1e-6


def test_bad_arrays_are_refused_before_anything_is_written(simulator):
    weight = panels(20, 64)
    gemm = op.PackedGemm(simulator, weight, "ring")
    x, out = simulator.array(normal(4, 64)), simulator.array(np.full((4, 20), 7, np.float32))
    held = gemm._device.get(gemm._design)
    for arguments, error, message in [
            ((normal(4, 64), out), TypeError, "x is a ndarray; expected an array on"),
            ((x[:, :32], out), ValueError, r"x has shape \(4, 32\); expected \(4, 64\), for any M"),
            ((x[0], out), ValueError, r"x has shape \(64,\)"),
            ((simulator.array(x.astype(np.float16)), out), TypeError, "x has dtype float16; expected float32"),
            ((simulator.array(normal(4, 128))[:, ::2], out), ValueError, "x has strides"),
            ((simulator.array(normal(5, 64)).reshape(-1)[2:258].reshape(4, 64), out), ValueError, "multiple of 16"),
            ((simulator.array(normal(33, 64)), None), ValueError, "at most 32 rows, not 33; no design can do it here"),
            ((x, out[:3]), ValueError, r"out has shape \(3, 20\); expected \(4, 20\)"),
            ((x, out.astype(np.float64)), TypeError, "out is a ndarray"),
            ((x, x.reshape(-1)[:80].reshape(4, 20)), ValueError, "out overlaps x"),
            ((x, held.reshape(-1)[:320].view(np.float32).reshape(4, 20)), ValueError, "out overlaps the weights")]:
        with pytest.raises(error, match=message):
            gemm.prepare(arguments[0], out=arguments[1])
    assert (out == 7).all()


# ---- plans

def test_a_block_that_is_not_there_is_not_launched():
    def blocks(n, k, multiprocessors=132, precision="int8"):
        backend = CpuBackend()
        backend.multiprocessors = multiprocessors
        return op.DESIGNS["ring"].plan(backend, packing.Panels(None, n, k, precision), 1)
    assert blocks(16, 32).blocks == 1
    assert blocks(17408, 5120).blocks == 132
    small = blocks(2048, 2048)  # tiles of 256 rows in equal parts
    assert (small.tiles, small.steps, small.blocks) == (8, 8, 64)
    assert blocks(2048, 2176).blocks == 72  # a step more


@pytest.mark.parametrize("limit", [99, 163, 227])
def test_every_form_fits_into_shared_memory(limit):
    for design in (op.DESIGNS[name] for name in DESIGNS if name.startswith("ring")):
        for precision, m in product(("int8", "int4"), (1, 2, 4, 8, 16, 32)):
            form = design._form(precision, m, limit << 10)
            assert form.slots > 1 and form.rows >= m
            assert design.shared(precision, form) <= limit << 10


def test_few_panels_stay_whole_unless_cutting_them_saves_more_than_it_costs():
    def blocks(n, k, precision):
        chunk_bytes = packing.CHUNK_BYTES[precision]
        return op.DESIGNS["ranges"]._blocks(math.ceil(n / 16), math.ceil(k / 128), chunk_bytes, 132)
    assert [blocks(1024, 2048, precision) for precision in ("int8", "int4")] == [64, 64]  # 18 KB more than an even cut
    assert blocks(1024, 17408, "int8") == 128  # 150 KB more: in halves
    assert blocks(1600, 17408, "int8") == 132  # 72 KB more, and too many for halves: cut evenly
    assert blocks(17408, 5120, "int4") == 132 and blocks(16, 128, "int8") == 1


def test_the_launch_of_ranges_has_the_adders_that_are_compiled():
    design = op.DESIGNS["ranges"]
    assert f"kAdders = {op.ADDERS};" in design.source("int8", design._form("int8", 1), False).text


@pytest.mark.parametrize("arch", ["89", "80", "90a"])
def test_slices_of_x_fit_into_shared_memory(arch):
    backend = CpuBackend()
    backend.arch, backend.multiprocessors = arch, 132
    for design in (op.DESIGNS[name] for name in DESIGNS if name.startswith("ranges")):
        for precision, m, n, k in product(("int8", "int4"), (1, 2, 3, 4), (16, 5120), (32, 5120, 17408)):
            plan = design.plan(backend, packing.Panels(None, n, k, precision), m)
            chunks = math.ceil(math.ceil(k / 128) / plan.slices)
            assert plan.form.rows >= m and plan.slices * plan.blocks <= 132
            assert design.shared(precision, plan.form, chunks) <= op.shared_limit(backend)


def test_slices_of_k_begin_where_x_no_longer_fits():
    """On a device with little shared memory: x of 4 rows of 8 chunks, and one of 32 columns more."""
    backend, design = CpuBackend(), op.DESIGNS["ranges"]
    backend.arch, backend.multiprocessors = "89", 132
    room = (99 * 1024 - design.shared("int8", design._form("int8", 4), 0)) // 2064
    for k, slices in ((room * 128, 1), (room * 128 + 32, 2)):
        weight, x = panels(100, k), normal(4, k)
        assert design.plan(backend, weight, 4).slices == slices
        assert relative(multiply(backend, weight, x, "ranges"), op.reference(x, weight)) <= 1e-6


def test_slices_and_blocks_of_known_shapes():
    """As was the fastest on an H200: slices are for long K, few panels and several rows; with a panel a block there are
    none."""
    backend = CpuBackend()
    backend.multiprocessors = 132

    def grid(m, n, k):
        plan = op.DESIGNS["ranges"].plan(backend, packing.Panels(None, n, k, "int4"), m)
        return plan.blocks, plan.slices
    assert [grid(m, 5120, 17408) for m in (1, 2, 4)] == [(132, 1), (33, 4), (33, 4)]
    assert [grid(m, 5120, 6144) for m in (1, 2, 4)] == [(132, 1), (132, 1), (66, 2)]
    for n, k, blocks in [(17408, 5120, 132), (12288, 5120, 132), (10240, 5120, 132), (2048, 6144, 128),
                         (2048, 2048, 128), (1024, 2048, 64)]:
        assert [grid(m, n, k) for m in (1, 2, 4)] == 3 * [(blocks, 1)]


def test_panels_that_are_cut_are_less_than_two_a_block():
    """And none where all come out even, as many adders of a block as have part of one being enough."""
    backend, design = CpuBackend(), op.DESIGNS["ranges"]
    backend.multiprocessors = 132
    for count, whole in [(264, 2), (265, 1), (329, 1), (330, 2), (131, 0), (133, 0)]:
        plan = replace(design, blocks=132).plan(backend, packing.Panels(None, 16 * count, 5120, "int4"), 1)
        assert plan.whole == whole and count - whole * plan.blocks < 2 * plan.blocks


@pytest.mark.parametrize("arch", ["89", "90a"])
def test_what_is_asked_for_ahead_fits_into_shared_memory_or_is_refused(arch):
    backend = CpuBackend()
    backend.arch, backend.multiprocessors = arch, 132
    taken = 0
    for name, precision, m, k in product(("ahead", "ahead_bf16"), ("int8", "int4"), (1, 3, 8), (32, 2048, 4096, 6144)):
        design, weight = op.DESIGNS[name], packing.Panels(None, 2048, k, precision)
        why_not = design.why_not(backend, weight, m)
        if why_not:
            assert re.search(rf"a panel of K = {k}, and x of {m} rows, take \d+ bytes of shared memory", why_not)
            continue
        taken += 1
        chunks = design.plan(backend, weight, m)
        assert 16 * chunks >= k / 128 and design.shared(precision, m, chunks) <= op.shared_limit(backend)
    assert taken >= (44 if arch == "90a" else 20)
    assert "it takes K up to 6144, not 6176" in op.DESIGNS["ahead"].why_not(
        backend, packing.Panels(None, 16, 6176, "int4"), 1)
    assert f"kWarps = {op.WARPS_AHEAD}," in op.DESIGNS["ahead"].sources()[0].text


def test_slices_that_cannot_be_are_refused():
    for design, k, message in [
            (op.RangesDesign("float32", slices=1), 17408, "x of 4 x 17408 in 1 slices of K and the rings take .* by"),
            (op.RangesDesign("float32", slices=9), 1024, "9 slices of K = 1024, which has 8 chunks of 128")]:
        assert re.search(message, design.why_not(CpuBackend(), packing.Panels(None, 5120, k, "int8"), 4))


def test_a_product_beyond_the_kernels_integers_is_refused():
    for name, k, message in [("ring", 2**16, "count to 2147483647"), ("ranges", 2**14, "more chunks than")]:
        assert message in op.DESIGNS[name].why_not(CpuBackend(), packing.Panels(None, 2**30, k, "int8"), 1)


# ---- launches that overlap

@pytest.mark.parametrize("name", [name for name in op.DESIGNS if op.DESIGNS[name].overlaps])
def test_an_overlapping_launch_reads_what_the_launch_before_wrote(backend, name):
    """A chain in which each product multiplies what the array library has just made of the one before. wgmma's tiles
    are cut in another way where launches overlap, and round otherwise; what came too early would be another number."""
    design = op.DESIGNS[name]
    size = 512 if backend.simulated else 2048
    weight = panels(size, size, "int4")
    if design.why_not(backend, weight, 2) is not None:
        pytest.skip("cannot run here")
    gemm, ends = op.PackedGemm(backend, weight, design), []
    for overlap in (False, True):
        x, out = backend.array(given(normal(2, size), design)[0]), backend.empty((2, size), np.float32)
        call = gemm.prepare(x, out=out, overlap=overlap)
        for _ in range(4 if backend.simulated else 60):
            call()
            x[...] = backend.array(converted(out / abs(out).max(), design.activations))
        ends.append(backend.numpy(out))
    assert np.isfinite(ends[0]).all() and np.abs(ends[0]).max() > 0
    assert relative(*ends) <= 0.1 if "wgmma" in name else np.array_equal(*ends)


@pytest.mark.parametrize("name", ["panels", "ring", "ranges"])
def test_products_follow_each_other_with_nothing_between(backend, name):
    """Each output is the next one's activations, and what that writes over."""
    gemm, ends = op.PackedGemm(backend, panels(512, 512), name), []
    for overlap in (False, True):
        x = [backend.array(normal(2, 512) * np.float32(2**-40)) for _ in range(2)]
        calls = [gemm.prepare(x[turn], out=x[1 - turn], overlap=overlap) for turn in range(2)]
        for turn in range(12):
            calls[turn % 2]()
        ends.append(backend.numpy(x[0]))
    assert np.isfinite(ends[0]).all() and np.abs(ends[0]).max() > 0 and np.array_equal(*ends)


@pytest.mark.parametrize("name", ["panels", "ring", "ranges"])
def test_before_the_launch_before_has_ended_only_weights_are_asked_for(name):
    """In machine code: a compiler might move loads of const memory over the instruction that waits."""
    if toolchain.targets()["sm_90a"]:
        pytest.skip(toolchain.targets()["sm_90a"])
    assembly = toolchain.compile_cuda(op.DESIGNS[name].sources()[0], "90a").assembly
    before, after = assembly.split("ACQBULK")
    assert "PREEXIT" in before  # lets the next launch begin
    accesses = r"\b(?:LDG|STG|ATOMG?|RED|UBLKCP|CCTL\.E\.PF2)\b[.\w]*"
    weights = {"UBLKCP.S.G", "CCTL.E.PF2", "LDG.E.NA.128.CONSTANT", "LDG.E.EF"}  # what no cache keeps
    assert re.findall(accesses, before) and set(re.findall(accesses, before)) <= weights
    # x, and not by way of what nobody writes: the launch before may, while this one runs
    assert re.search(r"\bLDG\.E\.64 ", after) and "CONSTANT" not in "".join(re.findall(r"LDG[.\w]*64[.\w]*", after))


def test_a_design_that_cannot_overlap_says_so(simulator):
    gemm = op.PackedGemm(simulator, panels(16, 64), "wide_loads")
    with pytest.raises(ValueError, match="'wide_loads' cannot overlap the launch before it; panels, .* can"):
        gemm.prepare(simulator.array(normal(1, 64)), overlap=True)
