from itertools import product

import numpy as np
import pytest

from kernelbook import formats, stats, toolchain
from kernelbook.backends.cpu import CpuBackend
from kernelbook.backends.source import KERNELS
from kernelbook.ops import q4_probe as op

BOUND = 5e-7
FORMS = [("baseline", 2, 1), ("baseline", 1, 4), ("baseline", 4, 16),
         ("explicit_fma", 4, 4), ("explicit_fma", 1, 8), ("explicit_fma", 2, 32),
         ("int8_dot", 4, 8), ("int8_dot", 2, 16), ("int8_dot", 1, 1)]
"""(variant, wave_rows, M): every R and M, and every R in every variant. All 45 forms run on a GPU only."""


def rng(*key):
    return np.random.default_rng(key)


def tiles(n, k, seed=0):
    return formats.random_tiles(rng(seed, n, k), n, k)


def normal(m, k, seed=1):
    return rng(seed, m, k).standard_normal((m, k), np.float32)


def exact(codes, scale=1.0):
    """Tiles of integers, at one scale."""
    scales = np.full((len(codes), codes.shape[1] // 32), scale, np.float32)
    return formats.tiles_from_blocks(formats.blocks_from_strips(formats.pack(codes, scales, 32, "int4")))


def multiply(backend, weights, x, variant, wave_rows, **options):
    """The product, and what it has to match: x is float32 [M, K], quantized first where the variant takes codes."""
    probe = op.Q4Probe(backend, weights, variant, wave_rows, **options)
    if variant != "int8_dot":
        return backend.numpy(probe(backend.array(x))), op.reference(x, weights)
    pair = formats.quantize_activations(x)
    return backend.numpy(probe(tuple(map(backend.array, pair)))), op.reference_int8(*pair, weights)


def relative(out, ref):
    return stats.errors(out, ref).relative_frobenius


# ---- results

@pytest.mark.parametrize("variant,wave_rows,m", FORMS)
def test_every_variant_against_float64(backend, variant, wave_rows, m):
    """Fewer tiles than a step of the wave, one more than a step, many; rows that end within a block and a whole one."""
    for n, k in [(4, 32), (20, 288), (52, 1056), (16, 4096)]:
        assert relative(*multiply(backend, tiles(n, k), normal(m, k), variant, wave_rows)) <= BOUND


def test_every_form_on_a_gpu(gpu):
    for variant, wave_rows, m in product(op.FILES, op.WAVE_ROWS, op.BATCHES):
        assert relative(*multiply(gpu, tiles(1028, 5152), normal(m, 5152), variant, wave_rows)) <= BOUND


@pytest.mark.parametrize("variant", op.FILES)
def test_the_identity_gives_the_weights_back(backend, variant):
    """One activation at a time: every nibble is where formats.Tiles says, in every column of every row."""
    codes = rng(2).integers(-8, 8, (20, 32), np.int8)
    codes[:4, :16] = np.arange(-8, 8)
    probe = op.Q4Probe(backend, exact(codes, 0.5), variant, 2)
    one = backend.array(np.eye(32, dtype=np.int8 if variant == "int8_dot" else np.float32))
    x = (one, backend.array(np.ones((32, 1), np.float32))) if variant == "int8_dot" else one
    assert np.array_equal(backend.numpy(probe(x)), codes.T / np.float32(2))


@pytest.mark.parametrize("wave_rows,m", [(4, 8), (2, 16)])
def test_integers_of_the_dot_are_exact(backend, wave_rows, m):
    """Scales of 1 leave sums of integers below 2^24, which a float holds: any wrong product shows."""
    codes = rng(3).integers(-8, 8, (8, 2048), np.int8)
    x = rng(4).integers(-127, 128, (m, 2048), np.int8)
    codes[0], x[0] = -8, 127  # the largest sum there can be
    codes[1], x[1] = 7, -127
    assert 8 * 127 * 2048 < 2**24
    probe = op.Q4Probe(backend, exact(codes), "int8_dot", wave_rows)
    out = backend.numpy(probe((backend.array(x), backend.array(np.ones((m, 64), np.float32)))))
    assert np.array_equal(out, x.astype(np.int64) @ codes.T.astype(np.int64))


def test_quantizing_activations_is_the_error_of_the_dot(backend):
    """Its arithmetic is as good as that of floats; against the activations it did not see it is 4 orders worse."""
    weights, x = tiles(20, 1056), normal(8, 1056)
    out, quantized = multiply(backend, weights, x, "int8_dot", 4)
    assert relative(out, quantized) <= BOUND
    assert 1e-3 < relative(out, op.reference(x, weights)) < 1e-2


def test_runs_repeat_to_the_bit(backend):
    for variant, wave_rows, m in FORMS:
        weights, x = tiles(20, 1056), normal(m, 1056)
        first, _ = multiply(backend, weights, x, variant, wave_rows)
        assert np.array_equal(first, multiply(backend, weights, x, variant, wave_rows)[0])


def test_rows_of_a_wave_change_no_bit(backend):
    """R decides who adds, not what is added in which order."""
    weights, x = tiles(20, 1056), normal(4, 1056)
    outs = [multiply(backend, weights, x, "baseline", wave_rows)[0] for wave_rows in op.WAVE_ROWS]
    assert np.array_equal(outs[0], outs[1]) and np.array_equal(outs[0], outs[2])


def test_order_of_lanes_waves_and_blocks_changes_no_bit():
    weights, x = tiles(20, 544), normal(4, 544)
    outs = [multiply(CpuBackend(order=order), weights, x, "explicit_fma", 4)[0] for order in (0, 1, 2)]
    assert np.array_equal(outs[0], outs[1]) and np.array_equal(outs[0], outs[2])


def test_what_lies_around_the_output_is_left_alone(backend):
    memory = backend.array(np.full((6, 20), 7, np.float32))
    weights, x = tiles(20, 288), normal(4, 288)
    op.Q4Probe(backend, weights, "explicit_fma", 4)(backend.array(x), out=memory[1:5])
    memory = backend.numpy(memory)
    assert relative(memory[1:5], op.reference(x, weights)) <= BOUND
    assert (memory[[0, 5]] == 7).all()


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_activations_that_are_not_finite_spoil_their_row_only(backend, value):
    x = normal(4, 288)
    x[2, 259] = value
    for variant, wave_rows in [("baseline", 1), ("explicit_fma", 4)]:
        out = backend.numpy(op.Q4Probe(backend, tiles(20, 288), variant, wave_rows)(backend.array(x)))
        assert np.isfinite(out[[0, 1, 3]]).all() and not np.isfinite(out[2]).any()


def test_random_bytes_spoil_every_output_of_a_row(backend):
    weights = formats.random_byte_tiles(1, 16, 64)
    with pytest.raises(ValueError, match="the scale of row .*, group .* is"):
        op.Q4Probe(backend, weights)
    bad = ~np.isfinite(weights.scales).all(axis=1)
    assert 0 < bad.sum() < 16
    with np.errstate(invalid="ignore"):
        out, ref = multiply(backend, weights, normal(4, 64), "explicit_fma", 4, finite=False)
    assert not np.isfinite(out[:, bad]).any()
    assert relative(out[:, ~bad], ref[:, ~bad]) <= BOUND


# ---- the same weights elsewhere

def test_other_kernels_and_other_addresses_give_the_same_product(backend):
    weights, x = tiles(20, 288), normal(4, 288)
    probe, x = op.Q4Probe(backend, weights, "explicit_fma", 4), backend.array(x)
    clone, other = probe.clone(), probe.using("baseline", 1)
    assert backend.pointer(clone._data) != backend.pointer(probe._data) == backend.pointer(other._data)
    assert np.array_equal(backend.numpy(clone(x)), backend.numpy(probe(x)))
    expected = backend.numpy(op.Q4Probe(backend, weights, "baseline", 1)(x))
    assert np.array_equal(backend.numpy(other(x)), expected)
    assert (probe.variant, probe.wave_rows) == ("explicit_fma", 4)


def test_a_prepared_product_reads_what_x_holds_when_it_is_called(backend):
    weights, x = tiles(20, 288), backend.array(normal(4, 288))
    product = op.Q4Probe(backend, weights, "explicit_fma", 4).prepare(x)
    for seed in (1, 2):
        new = normal(4, 288, seed)
        backend.copy_in(x, new)
        assert relative(backend.numpy(product()), op.reference(new, weights)) <= BOUND


# ---- bad input

def test_bad_input_is_refused_before_a_launch(backend):
    weights = tiles(8, 64)
    probe, dot = op.Q4Probe(backend, weights), op.Q4Probe(backend, weights, "int8_dot")
    x, untouched = backend.array(normal(4, 64)), backend.array(np.full((4, 8), 7, np.float32))
    codes, scales = backend.array(np.ones((4, 64), np.int8)), backend.array(np.ones((4, 2), np.float32))
    memory = backend.array(np.full(512, 7, np.float32))
    shared, overlapping = memory[:256].reshape(4, 64), memory[240:272].reshape(4, 8)
    cases = [
        (TypeError, "x is a list; expected an array on", lambda: probe([[0.0] * 64])),
        (TypeError, "x has dtype float64; expected float32", lambda: probe(backend.array(np.ones((4, 64))))),
        (ValueError, r"x has shape \(4, 32\); expected \(4, 64\)", lambda: probe(backend.array(normal(4, 32)))),
        (ValueError, r"x has shape \(64,\)", lambda: probe(x[0], out=untouched)),
        (ValueError, "M = 3 rows; the probe is compiled for 1, 4, 8, 16 or 32", lambda: probe(x[:3])),
        (ValueError, "M = 0; expected at least 1", lambda: probe(x[:0])),
        (ValueError, "strides", lambda: probe(backend.array(normal(4, 128))[:, ::2], out=untouched)),
        (ValueError, "multiple of 16", lambda: probe(memory[1:257].reshape(4, 64), out=untouched)),
        (ValueError, r"out has shape \(4, 9\); expected \(4, 8\)", lambda: probe(x, out=backend.empty((4, 9), "f4"))),
        (ValueError, "out overlaps x", lambda: probe(shared, out=overlapping)),
        (ValueError, "out overlaps the weights",
         lambda: probe(x, out=probe._data.reshape(-1).view(np.float32)[:32].reshape(4, 8))),
        (TypeError, r"int8_dot takes a pair \(codes, scales\)", lambda: dot(x, out=untouched)),
        (TypeError, "x codes has dtype float32; expected int8", lambda: dot((x, scales), out=untouched)),
        (TypeError, "x scales has dtype int8", lambda: dot((codes, codes), out=untouched)),
        (ValueError, r"x scales has shape \(1, 2\); expected \(4, 2\)", lambda: dot((codes, scales[:1]))),
        (ValueError, "variant 'dp4a'; expected 'baseline', 'explicit_fma' or 'int8_dot'",
         lambda: op.Q4Probe(backend, weights, "dp4a")),
        (ValueError, "wave_rows = 3; a wave owns 1, 2 or 4 of a tile's 4 rows",
         lambda: op.Q4Probe(backend, weights, "baseline", 3)),
        (TypeError, "wave_rows is 2.0", lambda: probe.using("baseline", 2.0)),
        (TypeError, "wave_rows is True", lambda: op.source("baseline", True, 1)),
        (TypeError, "M is 16.0", lambda: op.source("baseline", 1, 16.0)),
        (ValueError, r"data has shape \(2, 2, 71\)",
         lambda: op.Q4Probe(backend, formats.Tiles(np.zeros((2, 2, 71), np.uint8)))),
    ]
    for kind, words, call in cases:
        with pytest.raises(kind, match=words):
            call()
    assert (backend.numpy(untouched) == 7).all() and (backend.numpy(memory) == 7).all()


def test_more_rows_than_an_int_counts():
    class Tall(formats.Tiles):
        n = 2**31

        def check(self, finite=True):
            return self
    with pytest.raises(ValueError, match="N = 2147483648, K = 32; the kernels take at most 2147483647"):
        op.Q4Probe(CpuBackend(), Tall(np.zeros((1, 1, 72), np.uint8)))


# ---- static evidence

missing = toolchain.targets()
nvidia = pytest.mark.skipif(missing["sm_90a"] is not None, reason=str(missing["sm_90a"]))
amd = pytest.mark.skipif(missing["gfx942"] is not None, reason=str(missing["gfx942"]))


def test_every_kernel_is_a_source():
    sources = op.sources()
    assert {s.path for s in sources} == {str(f.relative_to(KERNELS)) for f in (KERNELS / "q4_probe").glob("*.cu")}
    assert [(s.defines["WAVE_ROWS"], s.defines["BATCH"]) for s in sources] == [(r, 16) for r in op.WAVE_ROWS] * 3


def per_mac(variant, target, wave_rows=4, m=16):
    """The machine code's row, and instructions of each kind for a MAC in its hot loop."""
    row, = toolchain.evidence(op.sources([wave_rows], [m])[list(op.FILES).index(variant)], [target])
    return row, {name: count / row["macs"] for name, count in row["opcodes"].items()}


@nvidia
@pytest.mark.parametrize("target", ["sm_90a", "sm_120"])
def test_a_mac_is_two_instructions_one_or_a_quarter(target):
    rows = {}
    for variant in op.FILES:
        rows[variant], each = per_mac(variant, target)
        assert rows[variant]["macs"] % (8 * 4 * 16) == 0  # of a lane in a trip
        unpacking = 1 / 16  # a weight is converted, and multiplied by its scale, once for all M rows
        if variant == "baseline":
            assert (each["FMUL"], each["FADD"], each["I2FP"]) == (1 + unpacking, 1, unpacking) and "FFMA" not in each
        elif variant == "explicit_fma":
            assert (each["FFMA"], each["FADD"], each["FMUL"], each["I2FP"]) == (1, 1 / 4, unpacking, unpacking)
        else:
            assert (each["IDP.4A"], each["I2FP"], each["FMUL"], each["FFMA"]) == (1 / 4, 1 / 8, 1 / 8, 1 / 8)
    instructions = {variant: row["instructions_per_mac"] for variant, row in rows.items()}
    assert 2.2 < instructions["baseline"] < 2.6
    assert 1.4 < instructions["explicit_fma"] < 1.8
    assert 0.6 < instructions["int8_dot"] < 1.1


@nvidia
@pytest.mark.parametrize("variant,wave_rows", [(variant, 4) for variant in op.FILES] + [("int8_dot", 1)])
def test_the_largest_forms_spill_nothing(variant, wave_rows):
    for target in ("sm_90a", "sm_120"):
        row, _ = per_mac(variant, target, wave_rows, 32)
        assert row["spill_bytes"] == 0 and row["registers"] <= 255


@nvidia
@pytest.mark.parametrize("wave_rows,scales,words", [(1, "16", {"32": 1}), (2, "32", {"64": 1}), (4, "64", {"64": 2})])
def test_tiles_are_loaded_at_their_full_width(wave_rows, scales, words):
    """A lane takes the scales in one load and its words in one or, where 16 bytes are not aligned, two."""
    row, _ = per_mac("explicit_fma", "sm_90a", wave_rows)
    expected = {"128": 2 * 16}  # activations
    for width, count in [(scales, 1), *words.items()]:
        expected[width] = expected.get(width, 0) + count
    assert row["global_loads"] == expected


@amd
def test_the_dot_product_is_an_instruction_on_amd_too():
    _, each = per_mac("int8_dot", "gfx942")
    assert sum(count for name, count in each.items() if name.startswith("v_dot4")) == 1 / 4
