import json

import numpy as np
import pytest

from kernelbook import ROOT, backends, formats, stats
from kernelbook.backends.cpu import CpuBackend
from kernelbook.experiments import grouped_gemm as study
from kernelbook.ops import grouped_gemm as op

BOUND = study.BOUND


def rng(*key):
    return np.random.default_rng(key)


def strips(n, k, group=32, precision="int8", seed=0):
    return study.random_strips(rng(seed, n, k, group), n, k, group, precision)


def normal(m, k, seed=1):
    return rng(seed, m, k).standard_normal((m, k), np.float32)


def run(backend, s, x, activations="float", **options):
    gemm = op.GroupedGemm(backend, s, activations)
    args = tuple(map(backend.array, x)) if activations == "int8" else backend.array(x)
    return backend.numpy(gemm(args, **options))


def relative(out, ref):
    return stats.errors(out, ref).relative_frobenius


# ---- results

@pytest.mark.parametrize("precision", ["int8", "int4"])
@pytest.mark.parametrize("k,group", [(32, 32), (64, 64), (96, 32), (256, 128)])
@pytest.mark.parametrize("n", [1, 3, 64, 65, 300])
def test_both_kernels_against_float64(backend, precision, k, group, n):
    s = study.random_strips(rng(n, k), n, k, group, precision, skewed=True)
    for m in (1, 2, 5):
        x = normal(m, k) + np.float32(2)
        codes, scales = formats.quantize_activations(x, group)
        assert relative(run(backend, s, x), op.reference(x, s)) <= BOUND
        assert relative(run(backend, s, (codes, scales), "int8"), op.reference_int8(codes, scales, s)) <= BOUND


def test_thousands_of_groups_lose_nothing(backend):
    """Down of Qwen3.5-27B has 544 groups; a plain float32 sum over them is near the bound."""
    s, x = strips(64, 17408), normal(8, 17408)
    assert relative(run(backend, s, x, nsplit=1), op.reference(x, s)) <= 2e-7


@pytest.mark.parametrize("m,n,k", [(1, 32, 1024), (1, 96, 1024), (3, 64, 128)])
def test_no_tail_of_the_grid_is_left_unwritten(backend, m, n, k):
    s, x = strips(n, k), normal(m, k)
    assert relative(run(backend, s, x), op.reference(x, s)) <= BOUND


@pytest.mark.parametrize("m", [1, 8, 9])
def test_what_lies_behind_the_last_row_does_not_count(backend, m):
    s, x = strips(64, 64), normal(16, 64)
    x[m:] = np.nan
    out = backend.array(np.full((16, 64), 7, np.float32))
    op.GroupedGemm(backend, s)(backend.array(x)[:m], out=out[:m])
    out = backend.numpy(out)
    assert relative(out[:m], op.reference(x[:m], s)) <= BOUND
    assert (out[m:] == 7).all()


def test_integer_sums_do_not_depend_on_nsplit(backend):
    s = strips(65, 512)
    codes = rng(2).integers(-127, 128, (3, 512), np.int8)
    args = backend.array(codes), backend.array(np.ones((3, 16), np.float32))
    gemm = op.GroupedGemm(backend, s, "int8", keep_sums=True)
    for nsplit in (1, 3, 7, 16):
        gemm(args, nsplit=nsplit)
        assert np.array_equal(backend.numpy(gemm.sums), op.integer_sums(codes, s))


def test_a_group_whose_sum_may_not_fit_int32_is_refused(backend):
    def weights(group):
        return formats.Strips(np.zeros((group, 128), np.int8), np.ones((1, 128), np.float32), 128, group, group, "int8")
    words = r"group of 131072 .* = 2147483648, more than an int32's 2147483647; take groups of at most 131071"
    with pytest.raises(ValueError, match=words):
        op.GroupedGemm(backend, weights(131072), "int8")
    with pytest.raises(ValueError, match=words):
        op.Linear(weights(131072), backend, activations="int8")
    op._check_activations("int8", 131071)
    op._check_activations("float", 131072)


def test_largest_codes_fill_no_int32(backend):
    s = formats.Strips(np.full((128, 128), -128, np.int8), np.ones((1, 128), np.float32), 128, 128, 128, "int8")
    out = run(backend, s, (np.full((1, 128), 127, np.int8), np.ones((1, 1), np.float32)), "int8")
    assert (out == -128 * 128 * 127).all()


def test_runs_repeat_to_the_bit_and_slices_may_be_launched_alone(backend):
    s, x = strips(500, 2048), normal(2, 2048)
    first = run(backend, s, x, nsplit=16)
    assert np.array_equal(first, run(backend, s, x, nsplit=16))
    assert np.array_equal(first, run(backend, s, x, nsplit=16, launch_per_slice=True))


def test_remap_changes_no_bit(backend):
    s, x = strips(1500, 256), normal(1, 256)
    outs = [backend.numpy(op.GroupedGemm(backend, s, remap=remap)(backend.array(x), nsplit=4))
            for remap in (True, False)]
    assert np.array_equal(*outs)


def test_order_of_lanes_waves_and_blocks_changes_no_bit():
    s, x = strips(300, 256), normal(5, 256)
    outs = [run(CpuBackend(order=order), s, x, nsplit=4) for order in (0, 1, 2)]
    assert np.array_equal(outs[0], outs[1]) and np.array_equal(outs[0], outs[2])


def test_more_rows_than_the_grid_has(backend, monkeypatch):
    monkeypatch.setattr(op, "MAX_GRID_Y", 2)  # 8 rows a launch, so 3 launches
    s, x = strips(8, 64), normal(19, 64)
    codes, scales = formats.quantize_activations(x)
    assert relative(run(backend, s, x, nsplit=1), op.reference(x, s)) <= BOUND
    assert relative(run(backend, s, (codes, scales), "int8", nsplit=1), op.reference_int8(codes, scales, s)) <= BOUND
    with pytest.raises(ValueError, match="take nsplit = 1"):
        run(backend, s, x, nsplit=2)


def test_offsets_past_two_to_the_31(simulator):
    """Weights of more than 2^31 codes, looked at where offsets are largest: the last columns of the last group. The
    simulator would report an int that overflows, or an access outside."""
    n, k, group = 1 << 20, 2176, 128
    module = simulator.compile(*op.source("float", group))
    codes = simulator.empty((k, n), np.int8)
    assert codes.size > 2**31
    codes[-group:, -4:] = 3
    scales, x = simulator.array(np.ones((k // group, n), np.float32)), simulator.array(np.ones((1, k), np.float32))
    out = simulator.empty((k // group, 1, n), np.float32)
    last_slice = k // group - 1
    module.kernel("grouped_gemm_float")((n // 1024, 1, 1), (64, 4, 1), [
        x, codes, scales, out, *map(np.int32, (1, n, n, k, k // group, last_slice))])
    assert (simulator.numpy(out[last_slice, 0, -4:]) == 3 * group).all()


def test_nothing_to_do(backend):
    s = strips(8, 64)
    gemm = op.GroupedGemm(backend, s)
    assert backend.numpy(gemm(backend.empty((0, 64), np.float32))).shape == (0, 8)
    out = backend.empty((0, 8), np.float32)
    assert gemm(backend.empty((0, 64), np.float32), out=out) is out
    with pytest.raises(ValueError, match=r"out has shape \(1, 8\); expected \(0, 8\)"):
        gemm(backend.empty((0, 64), np.float32), out=backend.empty((1, 8), np.float32))
    x = normal(1, 64)
    assert relative(backend.numpy(gemm(backend.array(x))), op.reference(x, s)) <= BOUND


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_activations_that_are_not_finite_come_out(backend, value):
    x = normal(2, 64)
    x[1, 5] = value
    out = run(backend, strips(8, 64), x)
    assert np.isfinite(out[0]).all() and not np.isfinite(out[1]).any()


def kinds(values):
    """Of each value: 0 finite, 1 and -1 infinite, 2 NaN."""
    return np.where(np.isnan(values), 2, np.where(np.isinf(values), np.sign(values), 0))


@pytest.mark.parametrize("nsplit", [1, 3])
def test_values_that_are_not_finite_come_out_as_in_float64(backend, nsplit):
    """In the first group, the middle and the last, alone and against each other, in one group and in two."""
    s, rows = strips(8, 160), []
    for values in [{5: np.inf}, {70: -np.inf}, {159: np.inf}, {3: np.nan}, {3: np.inf, 4: np.inf},
                   {3: np.inf, 90: np.inf}, {3: np.inf, 90: -np.inf}, {3: -np.inf, 159: np.nan}, {}]:
        rows.append(normal(1, 160)[0])
        rows[-1][list(values)] = list(values.values())
    with np.errstate(over="ignore", invalid="ignore"):
        rows.append(np.full(160, 7e4).astype(np.float16).astype(np.float32))  # past float16's 65504: infinite
        x = np.stack(rows)
        expected = kinds(op.reference(x, s))
    assert {-1, 0, 1, 2} <= set(expected.ravel())
    assert np.array_equal(kinds(run(backend, s, x, nsplit=nsplit)), expected)

    codes, scales = rng(3).integers(-127, 128, (4, 160), np.int8), np.ones((4, 5), np.float32)
    scales[0, 2], scales[1, 0], scales[2, 4] = np.nan, np.inf, -np.inf
    with np.errstate(invalid="ignore"):
        expected = kinds((op.integer_sums(codes, s) * scales[:, :, None].astype(np.float64)).sum(axis=1))
    assert set(expected.ravel()) == {-1, 0, 1, 2}
    assert np.array_equal(kinds(run(backend, s, (codes, scales), "int8", nsplit=nsplit)), expected)


def test_a_sum_past_float32_stays_infinite(backend):
    """What an addition that overflows has lost is infinite, and no carry."""
    s = formats.Strips(np.ones((128, 128), np.int8), np.ones((4, 128), np.float32), 128, 128, 32, "int8")
    out = run(backend, s, np.full((1, 128), 6e36, np.float32), nsplit=1)
    assert np.isposinf(out).all()


def test_simulator_gives_the_integers_that_were_recorded_on_a_gpu(simulator):
    paths = sorted(ROOT.glob("results/*/1_grouped_gemm.json"))
    if not paths:
        pytest.skip("no record of a real device")
    for path in paths:
        entry, = (m for m in json.loads(path.read_text())["measurements"] if m["metric"] == "group_sums_checksum")
        from kernelbook import experiments, records
        lab = experiments.Lab(simulator, records.Record("1_grouped_gemm", {}, records.environment(simulator)))
        assert int(study.partition(lab).data["digest"], 16) == entry["value"]


# ---- the split rule

@pytest.mark.parametrize("m,n,groups,expected", [
    (1, 2048, 64, 64),        # 2 blocks, one slice a group at most
    (1, 17408, 160, 31),      # 17 blocks
    (1, 151936, 64, 4),       # 149 blocks
    (32, 17408, 160, 1),      # 544 blocks: filled
    (1, 4, 3, 3),
    (1000, 128, 64, 3),       # 250 blocks
    (4096, 512, 64, 1),
])
def test_split_rule(m, n, groups, expected):
    assert op.choose_nsplit(m, n, groups) == expected


def test_split_rule_keeps_partial_sums_within_64_mib():
    m, n = 4, 5_000_000
    assert op.choose_nsplit(m, 60_000, 64) * m * 60_000 * 4 <= op.PARTIAL_CAP_BYTES
    assert op.choose_nsplit(m, n, 64) == 1


# ---- from the host

def test_host_paths_give_equal_bits(backend):
    for activations in ("float", "int8"):
        host = op.HostGemm(op.GroupedGemm(backend, strips(300, 256), activations), 4)
        for m in (4, 1, 0, 3):
            x = normal(m, 256)
            assert host(x).shape == (m, 300)
            assert np.array_equal(host(x), host.pageable(x))


def test_host_results_live_on():
    host = op.HostGemm(op.GroupedGemm(backends.get("cpu"), strips(8, 64)), 2)
    first = host(normal(2, 64))
    kept = first.copy()
    host(normal(2, 64, seed=9))
    assert np.array_equal(first, kept)


def test_fused_is_the_parts_side_by_side(backend):
    parts = [strips(n, 256, seed=n) for n in (192, 64, 64)]
    x = normal(1, 256)
    together = run(backend, formats.fuse(parts), x, nsplit=8)
    assert np.array_equal(together, np.concatenate([run(backend, p, x, nsplit=8) for p in parts], axis=1))


def test_cpu_path_takes_any_k():
    for k in (100, 31, 64):
        s, x = strips(40, k), normal(3, k)
        assert relative(op.CpuGemm(s)(x), op.reference(x, s)) <= 1e-6


def test_linear_goes_where_the_rule_says_and_says_why(backend):
    x = normal(1, 100)
    ragged = op.Linear(strips(8, 100), backend, gate=0)
    assert relative(ragged(x), op.reference(x, ragged.strips)) <= 1e-6
    assert {r.path for r in ragged.routes} == {"cpu"} and "K = 100" in next(iter(ragged.routes)).reason
    small = op.Linear(strips(64, 64), backend, gate=2 * 64 * 64 * 2)
    for m in (1, 1, 2, 40):
        x = normal(m, 64)
        assert relative(small(x), op.reference(x, small.strips)) <= 1e-6
    assert sorted((r.path, n) for r, n in small.routes.items()) == [("cpu", 2), ("device", 1), ("device", 1)]


# ---- bad input

def test_bad_input_is_refused_before_a_launch(backend):
    s = strips(8, 64)
    gemm, x = op.GroupedGemm(backend, s), backend.array(normal(2, 64))
    untouched = backend.array(np.full((2, 8), 7, np.float32))
    cases = [
        (TypeError, "list", lambda: gemm([[0.0] * 64])),
        (TypeError, "float64", lambda: gemm(backend.array(np.ones((2, 64))), out=untouched)),
        (ValueError, r"\(2, 32\)", lambda: gemm(backend.array(normal(2, 32)), out=untouched)),
        (ValueError, "strides", lambda: gemm(backend.array(normal(2, 128))[:, ::2], out=untouched)),
        (ValueError, "nsplit = 3", lambda: gemm(x, nsplit=3, out=untouched)),
        (ValueError, "nsplit = 0", lambda: gemm(x, nsplit=0, out=untouched)),
        (TypeError, "nsplit is 1.5 of type float; expected an integer", lambda: gemm(x, nsplit=1.5, out=untouched)),
        (TypeError, "nsplit is '2' of type str", lambda: gemm(x, nsplit="2", out=untouched)),
        (TypeError, "nsplit is True of type bool", lambda: gemm(x, nsplit=True, out=untouched)),
        (ValueError, r"out has shape \(1, 8\)", lambda: gemm(x, out=untouched[:1])),
        (ValueError, "partial has shape",
         lambda: gemm(x, nsplit=2, out=untouched, partial=backend.empty((1, 2, 8), "f4"))),
        (ValueError, "multiple of 16", lambda: gemm(x, out=backend.empty(17, np.float32)[1:].reshape(2, 8))),
        (TypeError, "a pair", lambda: op.GroupedGemm(backend, s, "int8")(x)),
        (TypeError, "x codes", lambda: op.GroupedGemm(backend, s, "int8")((x, x))),
        (ValueError, "'int2'|int2", lambda: op.GroupedGemm(backend, s, "int2")),
        (ValueError, "K = 100", lambda: op.GroupedGemm(backend, strips(8, 100))),
        (ValueError, "keep_sums", lambda: op.GroupedGemm(backend, s, keep_sums=True)),
        (ValueError, "max_rows = 0; expected at least 1", lambda: op.HostGemm(gemm, 0)),
        (TypeError, "max_rows is 2.5", lambda: op.HostGemm(gemm, 2.5)),
        (TypeError, "x is a float with dtype float64; expected float32", lambda: op.Linear(s, backend)(3.0)),
        (ValueError, r"x has shape \(64,\); expected \[M, 64\]", lambda: op.Linear(s, backend)(normal(1, 64)[0])),
        (ValueError, "'fp8'", lambda: op.Linear(s, backend, activations="fp8")),
        (ValueError, "gate = nan; expected", lambda: op.Linear(s, backend, gate=np.nan)),
        (ValueError, "gate = -1; expected", lambda: op.Linear(s, backend, gate=-1)),
        (TypeError, "gate is '1e7'", lambda: op.Linear(s, backend, gate="1e7")),
        (ValueError, "max_rows = 0", lambda: op.Linear(s, backend, max_rows=0)),
        (ValueError, "M = 3", lambda: op.HostGemm(gemm, 2)(normal(3, 64))),
        (TypeError, "float64", lambda: op.HostGemm(gemm, 2)(np.ones((2, 64)))),
        (TypeError, "float64", lambda: op.CpuGemm(s)(np.ones((2, 64)))),
    ]
    for kind, words, call in cases:
        with pytest.raises(kind, match=words):
            call()
    assert (backend.numpy(untouched) == 7).all()


def test_outputs_that_share_memory_with_what_is_read_are_refused(backend):
    s = strips(64, 64)
    gemm, int8 = op.GroupedGemm(backend, s), op.GroupedGemm(backend, s, "int8")
    memory = backend.array(np.full(1024, 7, np.float32))
    x, out = memory[:128].reshape(2, 64), backend.empty((2, 64), np.float32)
    codes, scales = backend.array(np.ones((2, 64), np.int8)), memory[128:132].reshape(2, 2)
    overlapping = memory[124:252].reshape(2, 64)
    partial = memory[124:380].reshape(2, 2, 64)
    cases = [
        ("out overlaps x", lambda: gemm(x, out=x)),
        ("out overlaps x", lambda: gemm(x, out=overlapping)),
        ("out overlaps x scales", lambda: int8((codes, scales), out=overlapping)),
        ("out overlaps x codes", lambda: int8((memory.view(np.int8)[:128].reshape(2, 64), scales), out=x)),
        ("partial overlaps x", lambda: gemm(x, nsplit=2, out=out, partial=partial)),
        ("out overlaps partial", lambda: gemm(out, nsplit=2, out=overlapping, partial=partial)),
        ("out overlaps the weights' scales", lambda: gemm(x, out=gemm._scales[:1].reshape(2, 64))),
    ]
    for words, call in cases:
        with pytest.raises(ValueError, match=words):
            call()
    assert (backend.numpy(memory) == 7).all()
    gemm(x, out=memory[128:256].reshape(2, 64))  # side by side is apart


def test_weights_are_checked_before_they_are_sent(backend):
    s = strips(8, 64)
    scales = s.scales.copy()
    scales[1, 3] = np.nan
    with pytest.raises(ValueError, match="group 1, column 3"):
        op.GroupedGemm(backend, formats.Strips(s.codes, scales, 8, 64, 32, "int8"))
    codes = np.zeros_like(s.codes)
    codes[5, 2] = 9
    with pytest.raises(ValueError, match="code 9 at k=5, column 2"):
        op.GroupedGemm(backend, formats.Strips(codes, s.scales, 8, 64, 32, "int4"))


def test_more_columns_than_an_int_counts():
    class Wide(formats.Strips):
        def check(self):
            return self
    wide = Wide(np.zeros((32, 128), np.int8), np.zeros((1, 128), np.float32), 2**31 - 1, 32, 32, "int8")
    with pytest.raises(ValueError, match="2147483647 columns"):
        op.GroupedGemm(backends.get("cpu"), wide)


def test_a_prepared_product_reads_what_x_holds_when_it_is_called(backend):
    s = strips(300, 256)
    x = backend.array(normal(2, 256))
    product = op.GroupedGemm(backend, s).prepare(x, nsplit=4)
    for seed in (1, 2):
        new = normal(2, 256, seed=seed)
        backend.copy_in(x, new)
        assert relative(backend.numpy(product()), op.reference(new, s)) <= BOUND
