import math

import numpy as np
import pytest

from kernelbook import formats, shapes, stats, toolchain
from kernelbook.backends.cpu import CpuBackend
from kernelbook.ops import prefill_gemm as op

BOUND = 1e-6
OURS = ("tiled_fp32", "int8_dot", "int8_matrix")
"""Designs A and B; test files of other designs have their own."""
CASES = [(1, 4, 32), (2, 48, 64), (17, 132, 288), (128, 128, 96), (129, 196, 160)]
"""(M, N, K): fewer rows than anything, a row more than a block or than 16, several blocks; one group of k, an odd and
an even number of them."""


def rng(*key):
    return np.random.default_rng(key)


def tiles(n, k, seed=0):
    return formats.random_tiles(rng(seed, n, k), n, k)


def normal(m, k, seed=1):
    return rng(seed, m, k).standard_normal((m, k), np.float32)


def inputs(backend, design, x):
    """x on the device as `design` takes it, and what the reference takes."""
    if op.DESIGNS[design].activations == "float32":
        return backend.array(x), (x,)
    pair = formats.quantize_activations(x)
    return tuple(map(backend.array, pair)), pair


def reference(x, weights):
    return op.reference(*x, weights) if len(x) == 1 else op.reference_int8(*x, weights)


def multiply(backend, weights, x, design, *, matrix=None, **options):
    """The product and what it has to match; x is float32 [M, K], quantized first where the design takes codes."""
    gemm = op.PrefillGemm(backend, weights, design, matrix=matrix)
    given, known = inputs(backend, design, x)
    return backend.numpy(gemm.prepare(given, **options)()), reference(known, weights)


def relative(out, ref):
    return stats.errors(out, ref).relative_frobenius


# ---- results

@pytest.mark.parametrize("design", OURS)
def test_every_design_against_float64(backend, design):
    for m, n, k in CASES:
        assert relative(*multiply(backend, tiles(n, k), normal(m, k), design)) <= BOUND, (m, n, k)


@pytest.mark.parametrize("m", [16, 32, 64])
def test_every_number_of_tokens_a_block_takes(backend, m):
    assert op.DESIGNS["tiled_fp32"].tokens_for(m) == m
    for design in ("tiled_fp32", "int8_matrix"):
        assert relative(*multiply(backend, tiles(144, 96), normal(m - 1, 96), design)) <= BOUND


def test_matrix_instructions_of_another_kind_give_the_same_bits():
    """All sums of a group are exact integers, and what follows is done in one order."""
    backend, weights, x = CpuBackend(wave=64), tiles(132, 96), normal(20, 96)
    first, ref = multiply(backend, weights, x, "int8_matrix", matrix="mfma")
    assert relative(first, ref) <= BOUND
    assert np.array_equal(first, multiply(backend, weights, x, "int8_matrix", matrix="mmac")[0])
    assert np.array_equal(first, multiply(CpuBackend(), weights, x, "int8_matrix")[0])
    assert np.array_equal(first, multiply(backend, weights, x, "int8_dot")[0])


@pytest.mark.parametrize("design", OURS)
def test_slices_of_k(backend, design):
    """As many slices as there are groups, and a number that does not divide them; the rest of `scratch` stays."""
    weights, x = tiles(132, 256), normal(18, 256)
    for splits in (8, 3, 1):
        scratch = backend.array(np.full(8 * 18 * 132 + 5, 7, np.float32))
        out, ref = multiply(backend, weights, x, design, splits=splits, scratch=scratch)
        assert relative(out, ref) <= BOUND
        assert (backend.numpy(scratch)[splits * 18 * 132 if splits > 1 else 0:] == 7).all()


def test_a_long_sum_does_not_drift(simulator):
    """K of the model's down projection: one running float sum would be off by more than 2e-6."""
    for design in OURS:
        assert relative(*multiply(simulator, tiles(4, 17408), normal(4, 17408), design)) <= BOUND


@pytest.mark.parametrize("design", OURS)
def test_the_identity_gives_the_weights_back(backend, design):
    """One activation at a time: every nibble is where formats.Tiles says, in every column of every row."""
    codes = rng(2).integers(-8, 8, (148, 64), np.int8)
    codes[:4, :16] = np.arange(-8, 8)
    scales = np.full((148, 2), 0.5, np.float32)
    weights = formats.tiles_from_blocks(formats.blocks_from_strips(formats.pack(codes, scales, 32, "int4")))
    one = np.eye(64, dtype=np.float32) * 127  # quantized without loss
    assert np.array_equal(multiply(backend, weights, one, design)[0], codes.T * np.float32(63.5))


@pytest.mark.parametrize("design", ["int8_dot", "int8_matrix"])
def test_the_largest_sums_of_a_group_are_exact(backend, design):
    codes = rng(3).integers(-8, 8, (16, 256), np.int8)
    x = rng(4).integers(-127, 128, (17, 256), np.int8)
    codes[0], x[0] = -8, 127
    codes[1], x[1] = -8, -128  # which no quantization makes
    weights = formats.tiles_from_blocks(
        formats.blocks_from_strips(formats.pack(codes, np.ones((16, 8), np.float32), 32, "int4")))
    pair = backend.array(x), backend.array(np.ones((17, 8), np.float32))
    out = backend.numpy(op.PrefillGemm(backend, weights, design)(pair))
    assert np.array_equal(out, x.astype(np.int64) @ codes.T.astype(np.int64))


@pytest.mark.parametrize("scale", [6e-8, 65504.0])
def test_the_smallest_and_the_largest_scales(backend, scale):
    """float16 subnormals and its largest number, of either sign."""
    data = tiles(8, 64).data.copy()
    data[..., :8] = np.array([scale, -scale, scale, -scale], "<f2").view(np.uint8)
    for design in OURS:
        assert relative(*multiply(backend, formats.Tiles(data), normal(3, 64), design)) <= BOUND


def test_order_of_lanes_waves_and_blocks_changes_no_bit():
    weights, x = tiles(132, 160), normal(40, 160)
    for design in OURS:
        outs = [multiply(CpuBackend(order=order), weights, x, design, splits=2)[0] for order in (0, 1, 2)]
        assert np.array_equal(outs[0], outs[1]) and np.array_equal(outs[0], outs[2])


@pytest.mark.parametrize("design", OURS)
def test_what_lies_around_the_output_is_left_alone(backend, design):
    for m, n in [(3, 12), (17, 140)]:
        memory = backend.array(np.full((m + 2, n), 7, np.float32))
        out, ref = multiply(backend, tiles(n, 96), normal(m, 96), design, out=memory[1:m + 1])
        assert relative(out, ref) <= BOUND
        assert (backend.numpy(memory)[[0, m + 1]] == 7).all()


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_activations_that_are_not_finite_spoil_their_row_only(backend, value):
    """The last row of a block, whose neighbours in memory the padding rows are; every group, the last one too."""
    x = normal(17, 96)
    x[16, [0, 95]] = value
    finite = np.arange(17) != 16
    for design in OURS:
        given = backend.array(x)
        if design != "tiled_fp32":
            given = op.quantize(backend, given)
        out = backend.numpy(op.PrefillGemm(backend, tiles(12, 96), design)(given))
        assert np.isfinite(out[finite]).all() and not np.isfinite(out[16]).any()


def test_memory_behind_the_inputs_is_not_used(backend):
    """Rows after the last one hold NaN, in x and in its scales: M = 5 of 8 rows gives what 5 rows alone give."""
    weights, x = tiles(12, 96), normal(5, 96)
    for design in OURS:
        given, known = inputs(backend, design, x)
        arrays = given if isinstance(given, tuple) else (given,)
        parts = []
        for array in arrays:
            memory = np.full((8, array.shape[1]), -1 if array.dtype == np.int8 else np.nan, array.dtype)
            memory[:5] = backend.numpy(array)
            parts.append(backend.array(memory)[:5])
        out = backend.numpy(op.PrefillGemm(backend, weights, design)(tuple(parts) if len(parts) > 1 else parts[0]))
        assert relative(out, reference(known, weights)) <= BOUND


def test_no_rows(backend):
    for design in OURS:
        out, _ = multiply(backend, tiles(8, 64), normal(0, 64), design)
        assert out.shape == (0, 8)
    assert [a.shape for a in op.quantize(backend, backend.array(normal(0, 64)))] == [(0, 64), (0, 2)]


@pytest.mark.gpu
@pytest.mark.parametrize("design", OURS)
def test_every_projection_of_the_model(gpu, design):
    """All rows of x, and 64 tiles of rows of w, the first and the last among them."""
    projections = {(p.n, p.k) for p in (*shapes.QWEN3_5_27B.projections, *shapes.QWEN3_5_27B.fused())}
    for n, k in sorted(projections):
        weights = tiles(n, k)
        some = np.unique([0, *rng(n, k).integers(0, n // 4, 62), n // 4 - 1])
        columns = (4 * some[:, None] + np.arange(4)).reshape(-1)
        for m in (1, 100, 513):
            given, known = inputs(gpu, design, normal(m, k))
            out = gpu.numpy(op.PrefillGemm(gpu, weights, design)(given))
            assert np.isfinite(out).all()
            ref = reference(known, formats.Tiles(np.ascontiguousarray(weights.data[some])))
            assert relative(out[:, columns], ref) <= BOUND, (m, n, k)


# ---- activations

@pytest.mark.parametrize("m,k", [(1, 32), (3, 96), (17, 1056)])
def test_quantizing_is_that_of_formats_to_the_bit(backend, m, k):
    x = normal(m, k)
    x[0, :32] = 0
    x[-1, -32:] = 1e-42  # a subnormal scale
    codes, scales = op.quantize(backend, backend.array(x))
    expected_codes, expected_scales = formats.quantize_activations(x)
    assert np.array_equal(backend.numpy(scales), expected_scales)
    assert np.array_equal(backend.numpy(codes), expected_codes)


def test_quantizing_again_reads_what_x_then_holds(backend):
    x = backend.array(normal(3, 64))
    codes, scales = backend.empty((3, 64), np.int8), backend.empty((3, 2), np.float32)
    run = op.prepare_quantize(backend, x, codes=codes, scales=scales)
    for seed in (1, 2):
        new = normal(3, 64, seed)
        backend.copy_in(x, new)
        assert run() == (codes, scales) or run()[0] is codes
        assert np.array_equal(backend.numpy(codes), formats.quantize_activations(new)[0])


# ---- the same weights elsewhere

def test_other_designs_and_other_addresses_share_or_copy_the_weights(backend):
    weights, x = tiles(20, 96), normal(4, 96)
    gemm = op.PrefillGemm(backend, weights)
    clone, other = gemm.clone(), gemm.using("int8_dot")
    assert backend.pointer(clone.data) != backend.pointer(gemm.data) == backend.pointer(other.data)
    assert np.array_equal(backend.numpy(clone(backend.array(x))), backend.numpy(gemm(backend.array(x))))
    given, known = inputs(backend, "int8_dot", x)
    assert relative(backend.numpy(other(given)), reference(known, weights)) <= BOUND
    assert gemm.design == "tiled_fp32"


def test_weights_that_are_on_the_device_already(backend):
    """A part of an array that holds several weights is used where it is, and what it then holds."""
    first, second = tiles(8, 64), tiles(12, 64, seed=5)
    memory = backend.array(np.concatenate([first.data, second.data]))
    gemm = op.PrefillGemm(backend, memory[2:])
    x = normal(3, 64)
    assert (gemm.n, gemm.k) == (12, 64) and backend.pointer(gemm.data) == backend.pointer(memory[2:])
    run = gemm.prepare(backend.array(x))
    assert relative(backend.numpy(run()), op.reference(x, second)) <= BOUND
    other = tiles(12, 64, seed=6)
    backend.copy_in(memory[2:], other.data)
    assert relative(backend.numpy(run()), op.reference(x, other)) <= BOUND


def test_a_prepared_product_reads_what_x_holds_when_it_is_called(backend):
    weights, x = tiles(20, 96), backend.array(normal(4, 96))
    product = op.PrefillGemm(backend, weights).prepare(x, splits=2)
    for seed in (1, 2):
        new = normal(4, 96, seed)
        backend.copy_in(x, new)
        assert relative(backend.numpy(product()), op.reference(new, weights)) <= BOUND


# ---- the launch

class Wide(CpuBackend):
    multiprocessors = 132


@pytest.mark.parametrize("m", [1, 16, 128, 512, 2048])
def test_slices_are_chosen_for_every_projection(m):
    """A model's smallest weight alone would leave most of a GPU without work, its largest fill it anyhow."""
    for p in shapes.QWEN3_5_27B.projections:
        for design in OURS:
            gemm = op.PrefillGemm(Wide(), tiles(4, 32), design)
            gemm.n, gemm.k = p.n, p.k
            splits, form = gemm.splits(m), op.DESIGNS[design]
            blocks = math.ceil(m / form.tokens_for(m)) * math.ceil(p.n / form.rows)
            assert 1 <= splits <= p.k // formats.BLOCK // op.SPLIT_GROUPS
            if blocks * op.MAX_SPLITS <= 132:
                assert splits > 1
            if blocks >= 16 * 132:
                assert splits == 1


def test_one_multiprocessor_takes_one_slice(simulator):
    assert op.PrefillGemm(simulator, tiles(4, 8192)).splits(1) == 1


# ---- bad input

def test_bad_input_is_refused_before_a_launch(backend):
    weights = tiles(8, 64)
    gemm, dot = op.PrefillGemm(backend, weights), op.PrefillGemm(backend, weights, "int8_dot")
    x, untouched = backend.array(normal(4, 64)), backend.array(np.full((4, 8), 7, np.float32))
    codes, scales = backend.array(np.ones((4, 64), np.int8)), backend.array(np.ones((4, 2), np.float32))
    memory = backend.array(np.full(512, 7, np.float32))
    shared, overlapping = memory[:256].reshape(4, 64), memory[240:272].reshape(4, 8)
    bytes_ = backend.array(np.zeros(4096, np.uint8))
    cases = [
        (TypeError, "x is a list; expected an array on", lambda: gemm([[0.0] * 64])),
        (TypeError, "x has dtype float64; expected float32", lambda: gemm(backend.array(np.ones((4, 64))))),
        (ValueError, r"x has shape \(4, 32\); expected \(4, 64\)", lambda: gemm(backend.array(normal(4, 32)))),
        (ValueError, r"x has shape \(64,\)", lambda: gemm(x[0], out=untouched)),
        (ValueError, "strides", lambda: gemm(backend.array(normal(4, 128))[:, ::2], out=untouched)),
        (ValueError, "multiple of 16", lambda: gemm(memory[1:257].reshape(4, 64), out=untouched)),
        (ValueError, r"out has shape \(4, 9\); expected \(4, 8\)", lambda: gemm(x, out=backend.empty((4, 9), "f4"))),
        (TypeError, "out has dtype int32", lambda: gemm(x, out=backend.empty((4, 8), np.int32))),
        (ValueError, "out overlaps x", lambda: gemm(shared, out=overlapping)),
        (ValueError, "out overlaps the weights",
         lambda: gemm(x, out=gemm.data.reshape(-1).view(np.float32)[:32].reshape(4, 8))),
        (ValueError, "scratch overlaps x", lambda: gemm.prepare(shared, splits=2, scratch=memory[:64])),
        (ValueError, "scratch has 63 elements; 2 slices of 4 x 8 take 64",
         lambda: gemm.prepare(x, out=untouched, splits=2, scratch=memory[:63])),
        (TypeError, "scratch has dtype int8", lambda: gemm.prepare(x, splits=2, scratch=codes)),
        (ValueError, "splits = 3; K = 64, in groups of 32, makes at most 2 slices", lambda: gemm.prepare(x, splits=3)),
        (ValueError, "splits = 0; expected at least 1", lambda: gemm.prepare(x, splits=0)),
        (TypeError, "splits is 2.0", lambda: gemm.prepare(x, splits=2.0)),
        (TypeError, r"x is a \w+; int8_dot takes a pair \(codes, scales\)", lambda: dot(x, out=untouched)),
        (TypeError, "x codes has dtype float32; expected int8", lambda: dot((x, scales), out=untouched)),
        (TypeError, "x scales has dtype int8", lambda: dot((codes, codes), out=untouched)),
        (ValueError, r"x scales has shape \(1, 2\); expected \(4, 2\)", lambda: dot((codes, scales[:1]))),
        (ValueError, "design 'dp4a'; expected 'tiled_fp32', 'int8_dot'",
         lambda: op.PrefillGemm(backend, weights, "dp4a")),
        (ValueError, "matrix is 'wmma'; .* take", lambda: op.PrefillGemm(backend, weights, matrix="wmma")),
        (ValueError, "design None", lambda: gemm.using(None)),
        (ValueError, r"data has shape \(2, 2, 71\)",
         lambda: op.PrefillGemm(backend, formats.Tiles(np.zeros((2, 2, 71), np.uint8)))),
        (ValueError, "the scale of row", lambda: op.PrefillGemm(backend, formats.random_byte_tiles(1, 64, 64))),
        (TypeError, "weights is a ndarray|weights is a list", lambda: op.PrefillGemm(backend, [weights])),
        (TypeError, "weights has dtype float32; expected uint8",
         lambda: op.PrefillGemm(backend, backend.empty((2, 2, 72), np.float32))),
        (ValueError, r"weights has shape \(2, 2, 71\); expected \[N / 4, K / 32, 72\]",
         lambda: op.PrefillGemm(backend, backend.empty((2, 2, 71), np.uint8))),
        (ValueError, r"weights has shape \(144,\); expected \[N / 4, K / 32, 72\]",
         lambda: op.PrefillGemm(backend, bytes_[:144])),
        (ValueError, "weights starts at address .*; expected a multiple of 8 bytes",
         lambda: op.PrefillGemm(backend, bytes_[4:4 + 288].reshape(2, 2, 72))),
        (ValueError, "weights has strides",
         lambda: op.PrefillGemm(backend, bytes_[:1152].reshape(4, 4, 72)[:, ::2])),
        (ValueError, r"x has shape \(4, 40\); expected \[M, K\], K a multiple of 32",
         lambda: op.quantize(backend, backend.empty((4, 40), np.float32))),
        (TypeError, "x has dtype int8", lambda: op.quantize(backend, codes)),
        (ValueError, r"scales has shape \(4, 3\)",
         lambda: op.prepare_quantize(backend, x, scales=backend.empty((4, 3), np.float32))),
        (ValueError, "codes overlaps x", lambda: op.prepare_quantize(
            backend, shared, codes=memory.view(np.int8)[:256].reshape(4, 64))),
    ]
    for kind, words, call in cases:
        with pytest.raises(kind, match=words):
            call()
    assert (backend.numpy(untouched) == 7).all() and (backend.numpy(memory) == 7).all()


def test_more_columns_than_an_offset_counts(simulator):
    with pytest.raises(ValueError, match="K = 8388640; the kernels take at most .* and 8388608"):
        op.PrefillGemm(simulator, simulator.empty((1, 2**18 + 1, 72), np.uint8))


# ---- static evidence

missing = toolchain.targets()
nvidia = pytest.mark.skipif(missing["sm_90a"] is not None, reason=str(missing["sm_90a"]))
amd = pytest.mark.skipif(missing["gfx942"] is not None, reason=str(missing["gfx942"]))


def rows_of(design, targets, tokens=128):
    return toolchain.evidence(op.DESIGNS[design].source(tokens), targets)


@nvidia
@pytest.mark.parametrize("design", OURS)
def test_nothing_is_spilled_on_nvidia(design):
    for row in rows_of(design, [f"sm_{arch}" for arch in toolchain.NVIDIA]):
        assert row["spill_bytes"] == 0 and row["registers"] <= 128


@amd
@pytest.mark.parametrize("design", OURS)
def test_nothing_is_spilled_on_amd_and_shared_memory_is_enough(design):
    for row in rows_of(design, ["gfx90a", "gfx942"]):
        assert row["spill_bytes"] == row["sgpr_spills"] == 0
        assert row["shared_bytes"] + op.DESIGNS[design].shared(128, 64) <= 64 << 10


@nvidia
def test_what_a_mac_takes_on_hopper():
    """A: 16 multiply-adds a read of 16 bytes. B: two for the sum of a group, which is 8 dots, or one of the 4 sums of a
    lane that a matrix instruction gives."""
    fp32, dot, matrix = (rows_of(design, ["sm_90a"])[0] for design in OURS)
    assert fp32["opcodes"]["FFMA"] == 16 * fp32["opcodes"]["LDS"] and fp32["instructions_per_mac"] < 1.1
    assert dot["opcodes"]["FFMA"] == dot["opcodes"]["IDP.4A"] / 4 and dot["instructions_per_mac"] < 0.45
    assert matrix["opcodes"]["FFMA"] == 8 * matrix["opcodes"]["IMMA.16832"] and matrix["instructions_per_mac"] < 0.125


@nvidia
@pytest.mark.parametrize("arch", ["80", "90a"])
@pytest.mark.parametrize("design", OURS)
def test_weights_are_on_their_way_while_others_are_multiplied(design, arch):
    """Compilers move a load to its use, and a conversion to its load, where the source leaves them a reason to: either
    would have every step wait for memory."""
    kernel, = toolchain.compile_cuda(op.DESIGNS[design].source(128), arch).kernels.values()
    names = [instruction.opcode.split(".")[0] for instruction in kernel.instructions]
    names = names[names.index("BAR"):]
    stored = names.index("STS")
    loads = [i for i, name in enumerate(names[:stored]) if name == "LDG"]
    conversion = next(i for i, name in enumerate(names) if name in ("HADD2", "F2F") and i > loads[0])
    assert 3 - (design == "tiled_fp32") <= len(loads) <= 7
    for use in (stored, conversion):
        assert sum(name in ("FFMA", "IDP") for name in names[loads[-1]:use]) >= 64
