"""Each experiment at small sizes on the simulator; with faults planted, every verdict can come out otherwise."""

import re
from dataclasses import replace
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch

from kernelbook import (
    backends,
    claims,
    counters,
    experiments,
    formats,
    measure,
    notebooks,
    records,
    runner,
    shapes,
    smollm2,
)
from kernelbook.backends.cpu import CpuBackend, CpuKernel
from kernelbook.backends.source import KERNELS
from kernelbook.experiments import grouped_gemm as study
from kernelbook.measure import Ceiling, Timing
from kernelbook.ops import grouped_gemm as op
from kernelbook.peers import gemm as gemm_peers

KINDS = {claim.id: claim.kind for claim in claims.load("grouped_gemm")}
CEILINGS = {name: Ceiling(name, value, "us", value - 1, value + 1, 9, "how")
            for name, value in (("round_trip_pinned", 20.0), ("launch_and_synchronize", 7.0))}


def projection(name, n=64, k=64):
    return shapes.Projection(name, n, k, 1, "x")


def inventory(**sizes):
    return shapes.Inventory("a model", 64, 1, 1, 1, 64, 64, 100,
                            tuple(projection(name, n) for name, n in sizes.items()))


SMALL, ODD = projection("q"), projection("odd", 65)
LAYER = inventory(q=64, k=32, v=33, gate=96, up=96)


@pytest.fixture(scope="module")
def environment(simulator):
    return records.environment(simulator)


@pytest.fixture
def lab(simulator, environment):
    return experiments.Lab(simulator, records.Record("1_grouped_gemm", {}, environment))


@pytest.fixture
def small_inputs(lab):
    rng = lab.rng(0)
    w, x = rng.standard_normal((40, 64), np.float32), rng.standard_normal((3, 64), np.float32)
    blocks = {f"w as {kind}": (kind, gguf.quants.quantize(w, gguf.GGMLQuantizationType[kind]))
              for kind in ("Q8_0", "Q4_0")}
    return study.Inputs("made-up inputs", {"w": (w, x)}, blocks)


def measured(lab, performance=False):
    return [m for m in lab.record.measurements
            if m["value"] is not None and records.is_performance(m["metric"]) == performance]


def wrong(lab):
    return [m for m in lab.record.measurements if m["status"] == "wrong_result"]


def judged(lab, finding, claim, verdict):
    """The finding is on `claim`, came out as `verdict`, and the record takes it."""
    assert (finding.claim, finding.verdict) == (claim, verdict), finding.evidence
    assert finding.verdict in records.VERDICTS and finding.evidence
    lab.judge(finding)
    if KINDS[claim] == "speed" and not lab.timed:
        assert finding.verdict == "not testable here" and "GPU" in finding.missing
    return finding


@pytest.fixture
def plant(monkeypatch, tmp_path):
    """Compile the kernels with a piece of their source replaced."""

    def plant(old, new, files=("1_int8_activations.cu", "2_float_activations.cu", "split.h")):
        found = 0
        for file in (KERNELS / "grouped_gemm").iterdir():
            text = file.read_text()
            if file.name in files:
                found += text.count(old)
                text = text.replace(old, new)
            (tmp_path / file.name).write_text(text)
        assert found, f"{old!r} stands in none of {files}"
        real = op.source

        def source(*arguments, **options):
            path, defines = real(*arguments, **options)
            return str(tmp_path / Path(path).name), defines
        monkeypatch.setattr(op, "source", source)
    return plant


FLOAT, INT8 = ["2_float_activations.cu"], ["1_int8_activations.cu"]
TAIL = "if (n >= N || m >= M) return;", "if (n + kColumns > N || m >= M) return;"


# ---- parameters and inputs

DEFAULTS = {name: p.default for name, p in notebooks.parameters(notebooks.FOLDER / "1_grouped_gemm.ipynb").items()
            if name not in ("record", "seed", "selftest_deep") and not name.startswith("ladder_")}


@pytest.mark.parametrize("given", [
    {}, {"rows": 1}, {"rows": 8192}, {"layers": [0, 29]}, {"selftest_rows": [1]}, {"selftest_columns": [1 << 20]},
    {"perplexity_tokens": 0}, {"perplexity_tokens": 16}, {"sweep_rows": [1, 4096]}])
def test_parameters_that_can_be_used(given):
    study.check_parameters(**DEFAULTS | given)


@pytest.mark.parametrize("profile", ["smoke", "cpu", "gpu"])
def test_profiles_can_be_used(profile):
    job, = runner.plan(profile, ["1_grouped_gemm"])
    study.check_parameters(**DEFAULTS | {name: v for name, v in job.parameters.items() if name in DEFAULTS})


@pytest.mark.parametrize("given, message", [
    ({"rows": 0}, "rows: 0; expected 1 to 8192"),
    ({"rows": 8193}, "rows: 8193; expected 1 to 8192"),
    ({"selftest_rows": [1, -3]}, "selftest_rows: -3; expected 1 to 4096"),
    ({"selftest_rows": []}, "selftest_rows is empty; expected at least one value from 1 to 4096"),
    ({"selftest_columns": [64, 0]}, "selftest_columns: 0; expected 1 to 1048576"),
    ({"selftest_columns": []}, "selftest_columns is empty"),
    ({"sweep_rows": [4097]}, "sweep_rows: 4097; expected 1 to 4096"),
    ({"sweep_rows": []}, "sweep_rows is empty"),
    ({"layers": [0, 30]}, "layers: 30; expected 0 to 29"),
    ({"layers": [-1]}, "layers: -1; expected 0 to 29"),
    ({"layers": []}, "layers is empty; expected at least one value from 0 to 29"),
    ({"perplexity_tokens": 15}, "perplexity_tokens: 15; expected 0 for none, or at least 16"),
    ({"perplexity_tokens": -16}, "perplexity_tokens: -16; expected 0 for none"),
])
def test_parameters_that_cannot_be_used_are_named(given, message):
    with pytest.raises(ValueError, match=f"^{re.escape(message)}"):
        study.check_parameters(**DEFAULTS | given)


def test_random_strips_are_valid_and_spend_the_whole_range(lab):
    for precision, (low, high) in formats.CODES.items():
        s = study.random_strips(lab.rng(0), 65, 512, 32, precision).check()
        assert (s.codes[:, :65].min(), s.codes[:, :65].max()) == (low, high) and not s.codes[:, 65:].any()
        assert 0.3 < s.dequantize().std() * 512**0.5 < 2, "weights of about 1/sqrt(K)"


def test_skewed_strips_are_no_cancellation(lab):
    for precision, (low, _) in formats.CODES.items():
        s = study.random_strips(lab.rng(0), 1, 64, 32, precision, skewed=True).check()
        assert s.codes[0, 0] == low
        out = op.reference(np.ones((1, 64)), s)
        assert abs(out).item() > 0.2 * np.abs(s.dequantize()).sum()


def test_random_inputs_have_the_models_shapes(lab):
    inputs = study.random_inputs(lab, 2)
    assert {name: w.shape for name, (w, _) in inputs.projections.items()} == {
        p.name: (p.n, p.k) for p in shapes.SMOLLM2_135M.projections}
    assert all(x.shape == (2, w.shape[1]) for w, x in inputs.projections.values())
    assert sorted(kind for kind, _ in inputs.blocks.values()) == ["Q4_0", "Q8_0"] and "random" in inputs.source


# ---- every experiment on the simulator

def test_selftest_passes(lab):
    g01, g14 = study.selftest(lab, (1, 3, 33), (1, 65), ((32, 32), (64, 64)))
    judged(lab, g01, "G01", "reproduced")
    judged(lab, g14, "G14", "reproduced")
    assert g14.measured == "48 of 48 cases pass"
    assert g01.data.keys() == {(a, c, m) for a in ("float", "int8") for c in ("int8", "int4") for m in (1, 3, 33)}
    assert wrong(lab) == []


FULL = {"rows": (1, 33), "columns": (5,), "precisions": ("int8", "int4")}
M1, PREFILL, ODD_N = "M = 1", "an M of at least 32", "an N that is no multiple of 4"


@pytest.mark.parametrize("given, missing, g01", [
    ({"rows": (1, 4)}, PREFILL, "not testable here"),
    ({"rows": (2, 33)}, M1, "not testable here"),
    ({"columns": (4, 64)}, ODD_N, "reproduced"),
    ({"precisions": ("int4",)}, "int8 and int4 codes", "reproduced"),
    ({"rows": (2, 4), "columns": (4,)}, f"{M1}, {PREFILL}, {ODD_N}", "not testable here"),
    ({}, None, "reproduced"),
])
def test_a_selftest_of_part_of_the_cases_says_what_it_lacks(lab, given, missing, g01):
    one_mapping, every_shape = study.selftest(lab, k_group=((32, 32),), **FULL | given)
    judged(lab, one_mapping, "G01", g01)
    assert g01 == "reproduced" or PREFILL in one_mapping.missing
    judged(lab, every_shape, "G14", "not testable here" if missing else "reproduced")
    assert every_shape.missing == (f"{missing} among the cases of the selftest" if missing else None)
    assert f"({' and '.join((FULL | given)['precisions'])} codes x" in every_shape.evidence


@pytest.mark.parametrize("old, new, files", [
    (*TAIL, FLOAT),
    (*TAIL, INT8),
    ("fmaf(q.w, v, dot[3])", "fmaf(q.w, M == 1 ? 0.f : v, dot[3])", FLOAT),
    ("const float v = ag[k];", "const float v = M == 1 ? ag[k] : ag[k] * 1.000002f;", FLOAT),
    ("a_scales[(size_t)m * groups + g]", "a_scales[g]", INT8),
    ("(size_t)g * Npad + n", "n", FLOAT),
], ids=["tail", "int8 tail", "decode", "rounding in prefill", "scale of row 0", "scale of group 0"])
def test_a_kernel_with_a_fault_contradicts_the_selftest(lab, plant, old, new, files):
    plant(old, new, files)
    g01, g14 = study.selftest(lab, (1, 3, 33), (4, 65), ((64, 32),), ("int8",))
    judged(lab, g01, "G01", "contradicted")
    judged(lab, g14, "G14", "contradicted")
    assert g14.missing is None, "a fault found is a fault, whatever else was not looked at"
    cases, total = map(int, g14.measured.removesuffix(" cases pass").split(" of "))
    assert 0 < cases < total == 12 and wrong(lab)
    assert all("exceeds 5e-07" in m["reason"] for m in wrong(lab))


def test_a_reference_that_is_not_met_contradicts_the_selftest(lab, monkeypatch):
    real = op.reference
    monkeypatch.setattr(op, "reference", lambda x, strips: real(x, strips) * (1 + 1e-6))
    g01, g14 = study.selftest(lab, (1, 33), (4,), ((32, 32),), ("int8",))
    judged(lab, g01, "G01", "contradicted")
    judged(lab, g14, "G14", "contradicted")


def test_partition_is_exact(lab):
    found = judged(lab, study.partition(lab, 2, 5, 256), "G03", "reproduced")
    assert set(found.data["wrong"]) == {1, 2, 3, 4, 7, 8} and set(found.data["wrong"].values()) == {0}
    assert found.data["extremes"] == {(127, 127): 516128, (127, -127): -516128, (-128, 127): -520192}
    checksum, = (m for m in measured(lab) if m["metric"] == "group_sums_checksum")
    assert checksum["value"] == int(found.data["digest"], 16)
    assert {m["case"]["nsplit"]: m["value"] for m in measured(lab) if m["metric"] == "group_sums_wrong"} == (
        found.data["wrong"])
    assert {(m["case"]["weight"], m["case"]["activation"]): m["value"] for m in measured(lab)
            if m["metric"] == "group_sum"} == found.data["extremes"]


@pytest.mark.parametrize("old, new, broken", [
    ("begin + base + (z < rest ? 1 : 0)", "begin + base", {3, 7}),
    ("begin + base + (z < rest ? 1 : 0)", "begin + base + (z < rest ? 1 : 0) - (z == 7)", {8}),
    ("const float as =", "for (int &d : dot) d = min(d, 516000); const float as =", set()),
    ("dot[1] += q.y * v;", "dot[1] += k < 31 ? q.y * v : 0;", {1, 2, 3, 4, 7, 8}),
], ids=["groups left over", "an eighth slice ends early", "the largest sum", "the last code of a group"])
def test_a_partition_with_a_fault_is_contradicted(lab, plant, old, new, broken):
    plant(old, new)
    # the simulator's memory is poisoned, so that a sum nobody writes cannot be one of an earlier run
    found = judged(lab, study.partition(lab, 2, 5, 256), "G03", "contradicted")
    assert {nsplit for nsplit, count in found.data["wrong"].items() if count} == broken
    assert {m["case"]["nsplit"] for m in measured(lab) if m["metric"] == "group_sums_wrong" and m["value"]} == broken


def test_order_is_repeatable_and_matters(lab):
    found = judged(lab, study.order(lab, 1, 50, 512, repeats=3), "G04", "reproduced")
    assert found.data["changed"][1] == 0 and max(found.data["changed"].values()) > 0
    assert found.measured.startswith("0 of 10 repeats differ")


def test_every_run_for_the_order_has_partial_sums_of_its_own(lab, monkeypatch):
    """Those of the run before are right ones: a slice that writes nothing would go unseen."""
    given = []

    class Recorder(op.GroupedGemm):
        def __call__(self, x, **options):
            given.append((options["nsplit"], options["partial"]))  # kept, so that no two can lie at one address
            assert np.isnan(options["partial"]).all()
            return super().__call__(x, **options)
    monkeypatch.setattr(op, "GroupedGemm", Recorder)
    study.order(lab, 1, 50, 64, repeats=3)
    assert [nsplit for nsplit, _ in given] == [1, 1, 1, 2, 2, 2]
    assert len({id(partial) for _, partial in given}) == 6


def test_order_that_changes_nothing_holds_in_direction_only(lab):
    """One group has one order."""
    judged(lab, study.order(lab, 1, 50, 32, repeats=2), "G04", "direction holds")


def test_runs_that_differ_contradict_a_fixed_order(lab, monkeypatch):
    class Unsteady(op.GroupedGemm):
        calls = 0

        def __call__(self, x, **options):
            out = super().__call__(x, **options)
            Unsteady.calls += 1
            if Unsteady.calls == 5:
                out.view(np.int32)[0, -1] += 1
            return out
    monkeypatch.setattr(op, "GroupedGemm", Unsteady)
    found = judged(lab, study.order(lab, 1, 50, 64, repeats=3), "G04", "contradicted")
    assert found.measured.startswith("1 of 4 repeats differ")


def test_one_artifact_for_every_backend(lab, small_inputs):
    found = judged(lab, study.artifact(lab, small_inputs), "G15", "reproduced")
    assert len(found.data) == 2 * 3, "two tensors on two simulators and the CPU path"
    assert all(row["round trip exact"] and row["values as gguf's"] for row in found.data)
    assert "equal to the bit" in found.evidence and "not each" not in found.evidence
    assert changed(lab, "bytes_changed_by_round_trip") == {"Q8_0": [0], "Q4_0": [0]}
    errors = {(m["variant"], m["case"]["where"]) for m in measured(lab) if m["metric"] == "relative_frobenius"}
    assert errors == {(study.VARIANTS["float"], "wave simulator, 32 lanes"),
                      (study.VARIANTS["float"], "wave simulator, 64 lanes"), ("cpu_path", "CPU path (PyTorch)")}
    assert changed(lab, "outputs_with_other_bits")[study.VARIANTS["float"]] == [0] * 4


def changed(lab, metric):
    """Values of a metric by variant."""
    found = {}
    for m in measured(lab):
        if m["metric"] == metric:
            found.setdefault(m["variant"], []).append(m["value"])
    return found


def lossy_blocks(strips, real=formats.blocks_from_strips):
    blocks = real(strips)
    blocks[-1, -1] ^= 1
    return blocks


def other_scale(blocks, kind, real=formats.strips_from_blocks):
    strips = real(blocks, kind)
    strips.scales[0, 0] *= 2
    return strips


@pytest.mark.parametrize("name, fault", [
    ("blocks_from_strips", lossy_blocks),
    ("strips_from_blocks", other_scale),
])
def test_an_artifact_that_is_not_exact_is_contradicted(lab, small_inputs, monkeypatch, name, fault):
    monkeypatch.setattr(formats, name, fault)
    found = judged(lab, study.artifact(lab, small_inputs), "G15", "contradicted")
    assert "loses bytes" in found.evidence
    counts = changed(lab, "bytes_changed_by_round_trip")
    assert counts.keys() == {"Q8_0", "Q4_0"} and all(1 <= count <= 2 for count, in counts.values()), "one scale or code"


def test_one_backend_that_disagrees_contradicts_the_artifact(lab, small_inputs, monkeypatch):
    class Deviant(op.GroupedGemm):
        def __call__(self, x, **options):
            out = super().__call__(x, **options)
            if self.backend.wave == 64:
                out *= np.float32(1.000002)
            return out
    monkeypatch.setattr(op, "GroupedGemm", Deviant)
    found = judged(lab, study.artifact(lab, small_inputs), "G15", "contradicted")
    assert "not each within its bound" in found.evidence and "not all equal to the bit" in found.evidence
    assert {(m["variant"], m["case"]["where"]) for m in wrong(lab)} == {
        (study.VARIANTS["float"], "wave simulator, 64 lanes")}
    assert [(m["value"] > 0) for m in measured(lab) if m["metric"] == "outputs_with_other_bits"
            and m["variant"] != "cpu_path"] == [False, True] * 2


def test_a_wrong_cpu_path_contradicts_the_artifact(lab, small_inputs, monkeypatch):
    monkeypatch.setattr(op.CpuGemm, "__call__", lambda self, x: op.reference(x, self.strips).astype("f4") * 1.00001)
    judged(lab, study.artifact(lab, small_inputs), "G15", "contradicted")
    assert {(m["variant"], m["case"]["where"]) for m in wrong(lab)} == {("cpu_path", "CPU path (PyTorch)")}


# ---- static evidence (G02)

def test_sectors_of_a_warp():
    lanes = np.arange(32)
    assert study.sectors(lanes * 4) == 4 and study.sectors(lanes * 0) == 1
    assert study.sectors(lanes * 32) == 32 and study.sectors(lanes * 4 + 16) == 5, "misaligned by half a sector"
    assert study.sectors(lanes * 16, 16) == 16 and study.sectors([30], 4) == 2


@pytest.fixture
def one_target(monkeypatch):
    if study.toolchain.targets()["sm_90a"]:
        pytest.skip(study.toolchain.targets()["sm_90a"])
    monkeypatch.setattr(study.toolchain, "targets", lambda: {"sm_90a": None, "gfx942": "left out of this test"})


def test_loads_are_full_transactions(lab, one_target):
    found = judged(lab, study.transactions(lab), "G02", "reproduced")
    assert {row["target"] for row in found.data} == {"sm_90a"} and "no GPU" in found.evidence
    assert any(m["metric"] == "registers" for m in measured(lab))


@pytest.mark.parametrize("files", [FLOAT, INT8], ids=["float", "int8"])
def test_narrow_loads_contradict_full_transactions(lab, one_target, plant, files):
    plant("const char4 q = *reinterpret_cast<const char4 *>(wg + (size_t)k * Npad);",
          "const volatile int8_t *b = wg + (size_t)k * Npad; const char4 q = {b[0], b[1], b[2], b[3]};", files)
    found = judged(lab, study.transactions(lab), "G02", "contradicted")
    assert "no 4-byte loads on sm_90a" in found.evidence


def test_another_mapping_contradicts_full_transactions(lab, one_target, monkeypatch):
    monkeypatch.setattr(op, "COLUMNS", 8)
    judged(lab, study.transactions(lab), "G02", "contradicted")


def test_without_a_compiler_machine_code_is_not_testable(lab, monkeypatch):
    monkeypatch.setattr(study.toolchain, "targets", lambda: {"sm_80": "no NVRTC", "gfx942": "no ziglang"})
    found = judged(lab, study.transactions(lab), "G02", "not testable here")
    assert "no NVRTC" in found.missing


@pytest.mark.parametrize("off, verdict", [(0.0, "reproduced"), (0.5, "contradicted")])
def test_counters_can_contradict_the_mapping(timed, one_target, monkeypatch, off, verdict):
    ratios = {"grouped_gemm_float": (32 * 5 + 16) / 65, "grouped_gemm_int8": (32 * 5 + 17) / 66}
    monkeypatch.setattr(counters, "read", lambda code, metrics: {
        kernel: {counters.SECTORS_PER_REQUEST: ratio + off, counters.LOAD_EFFICIENCY: 90.0}
        for kernel, ratio in ratios.items()})
    found = judged(timed, study.transactions(timed), "G02", verdict)
    assert "Hardware counters: " in found.evidence


# ---- speed claims where nothing is timed

def untimed(lab):
    yield "G05", study.split_sweep(lab, [SMALL, ODD])
    yield "G06", study.launch_per_slice(lab, projection("q", 64, 128))
    yield "G07", study.remap(lab, [SMALL])
    g09, g10 = study.host_paths(lab, [SMALL])
    yield "G09", g09
    yield "G10", g10
    yield "G12", study.fusion(lab, LAYER)


def test_speed_claims_are_not_testable_on_the_simulator(lab):
    for claim, finding in untimed(lab):
        assert KINDS[claim] == "speed"
        judged(lab, finding, claim, "not testable here")
        assert "DIFFERENT" not in finding.evidence and "not all" not in finding.evidence
    assert measured(lab, performance=True) == []


def test_not_even_faults_make_a_speed_claim_testable(lab, plant):
    plant(*TAIL)
    for claim, finding in untimed(lab):
        judged(lab, finding, claim, "not testable here")
    assert "are not all within 5e-07" in finding.evidence
    assert measured(lab, performance=True) == []
    assert {m["variant"] for m in wrong(lab)} == {"host_separate", "host_fused"}


def test_occupancy():
    first, last = study.occupancy(1, [projection("q", 2048, 2048), projection("lm_head", 151936, 2048)])
    assert first == {"projection": "q", "N": 2048, "K": 2048, "blocks": 2, "nsplit": 64, "blocks with split": 128}
    assert (last["blocks"], last["nsplit"], last["blocks with split"]) == (149, 4, 596)
    assert study.occupancy(32, [projection("q", 2048, 2048)])[0]["blocks"] == 64, "8 along N, 8 along M"


# ---- a backend that claims to be timed, so that times can be made up

class Timed(CpuBackend):
    simulated = False
    l2_bytes = 1 << 14


@pytest.fixture
def pace():
    """Microseconds of contenders by name, or by (where they are launched from: "graph" or "host", name); 10 for others.
    A list gives one time after the other."""
    return {}


@pytest.fixture
def timed(environment, monkeypatch, pace):
    def clock(where):
        def times(contenders, **_):
            found = {}
            for name, calls in contenders.items():
                for call in calls if isinstance(calls, list) else [calls]:
                    call()
                median = pace.get((where, name), pace.get(name, 10))
                median = float(median.pop(0) if isinstance(median, list) else median)
                found[name] = Timing(median, median * 0.9, median * 1.1, 9)
            return found
        return times
    monkeypatch.setattr(measure, "device_times", clock("graph"))
    monkeypatch.setattr(measure, "host_times", clock("host"))
    monkeypatch.setattr(op.GroupedGemm, "clone", lambda self: self)  # array.copy leaves the simulator's memory
    monkeypatch.setattr(gemm_peers, "all_peers", lambda: [
        gemm_peers.Peer("humming_int8", 8, "float16", "humming does not import", None)])
    record = records.Record("1_grouped_gemm", {}, {**environment, "simulated": False})
    return experiments.Lab(Timed(), record, ceilings=dict(CEILINGS))


def no_time_of_a_wrong_result(lab):
    """No performance figure stands for a kernel and shape that some check found wrong."""
    def shape(m):
        return m["variant"], *(m["case"].get(key) for key in ("M", "N", "K", "codes"))
    assert wrong(lab), "the fault was seen"
    assert not {shape(m) for m in wrong(lab)} & {shape(m) for m in measured(lab, performance=True)}


def only_cold_times_have_a_bandwidth(lab):
    rates = [m for m in measured(lab, performance=True) if m["metric"] in ("bandwidth_gbs", "fraction_of_read")]
    assert rates and {m["cache"] for m in rates} == {"cold"}


@pytest.mark.parametrize("times, verdict", [
    ({1: 20, 2: 10}, "reproduced"), ({1: 5, 2: 10}, "contradicted"), ({1: 10, 2: 10}, "not reproduced"),
    ({1: 11.5, 2: 10}, "not reproduced"), ({1: 13, 2: 10}, "reproduced")])  # 10% to either side: 11 overlaps 10.35
def test_split_sweep_follows_the_times(timed, pace, times, verdict):
    pace.update(times)
    found = judged(timed, study.split_sweep(timed, [SMALL]), "G05", verdict)
    entry, = found.data["times"].values()
    assert entry["rule"] == 2 and {s: t.median for s, t in entry["times"].items()} == times
    assert {m["case"]["nsplit"] for m in measured(timed, performance=True)} == {1, 2}


@pytest.mark.parametrize("graph, host, verdict", [
    (30, 10, "reproduced"), (12, 10, "direction holds"), (10, 1000, "not reproduced"), (9.5, 10, "not reproduced"),
    (8, 1000, "contradicted")])
def test_launch_per_slice_follows_the_times_in_a_graph(timed, pace, graph, host, verdict):
    """From the host, Python's work at each launch would decide."""
    pace["graph", "a launch a slice"], pace["host", "a launch a slice"] = graph, host
    found = judged(timed, study.launch_per_slice(timed, SMALL), "G06", verdict)
    assert found.measured == f"{host / 10:.1f}x from the host, {graph / 10:.1f}x in a graph"
    assert "an empty launch with its synchronize takes 7.0 us" in found.evidence
    assert {(m["case"]["launches"], m["case"].get("launched"), m["cache"], m["value"])
            for m in measured(timed, performance=True) if m["metric"] == "time_us"} == {
        ("one launch", None, "cold", 10), ("a launch a slice", None, "cold", graph),
        ("one launch", "from the host", "warm", 10), ("a launch a slice", "from the host", "warm", host)}
    only_cold_times_have_a_bandwidth(timed)


@pytest.mark.parametrize("own, verdict", [
    (30, "reproduced"), (11.5, "not reproduced"), (10, "not reproduced"), (5, "contradicted")])
def test_remap_follows_the_times(timed, pace, own, verdict):
    pace["no remap, own nsplit"] = own
    judged(timed, study.remap(timed, [SMALL]), "G07", verdict)


@pytest.mark.parametrize("times, g09, g10", [
    ({"pinned": 100, "pageable": 115, "kernel": 10}, "reproduced", "reproduced"),
    ({"pinned": 100, "pageable": 104, "kernel": 60}, "direction holds", "not reproduced"),
    ({"pinned": 30, "pageable": 30, "kernel": 10}, "not reproduced", "direction holds"),
    ({"pinned": 100, "pageable": 90, "kernel": 95}, "contradicted", "not reproduced"),
])
def test_host_paths_follow_the_times(timed, pace, times, g09, g10):
    pace.update(times)
    transfers, fixed = study.host_paths(timed, [SMALL])
    judged(timed, transfers, "G09", g09)
    judged(timed, fixed, "G10", g10)
    for finding in (transfers, fixed):
        assert "an empty launch with its synchronize takes 7.0 us" in finding.evidence
    kernel, = (m for m in measured(timed, performance=True) if m["metric"] == "time_us"
               and m["case"].get("experiment") == "host paths")
    assert (kernel["value"], kernel["cache"]) == (times["kernel"], "cold"), "what G10 subtracts is on record"
    only_cold_times_have_a_bandwidth(timed)


@pytest.mark.parametrize("times, verdict", [
    ({"cpu": 20, "separate": 30, "fused": 10}, "reproduced"),
    ({"cpu": 50, "separate": 30, "fused": 10}, "direction holds"),
    ({"cpu": 50, "separate": 10, "fused": 10}, "not reproduced"),
])
def test_fusion_follows_the_times(timed, pace, times, verdict):
    pace.update(times)
    found = judged(timed, study.fusion(timed, LAYER), "G12", verdict)
    assert found.data.keys() == {"q+k+v", "gate+up"}
    assert "an empty launch with its synchronize takes 7.0 us" in found.evidence


SPEEDS = {"G05": study.split_sweep, "G07": study.remap, "G09": lambda *given: study.host_paths(*given)[0],
          "G10": lambda *given: study.host_paths(*given)[1]}


@pytest.mark.parametrize("faulty", [False, True])
@pytest.mark.parametrize("claim", SPEEDS)
def test_a_wrong_product_is_named_and_caps_the_verdict(timed, pace, plant, claim, faulty):
    """Times that speak for the claim on every product; a fault makes the product of 65 columns wrong."""
    pace.update({1: 20, "no remap, own nsplit": 20, "pinned": 100, "pageable": 115})
    if faulty:
        plant(*TAIL)
    finding = SPEEDS[claim](timed, [SMALL, ODD])
    judged(timed, finding, claim, "direction holds" if faulty else "reproduced")
    assert finding.evidence.endswith(" Left out, since their results are wrong: odd 65 x 64.") == faulty
    assert ("Left out" in finding.evidence) == faulty


def test_a_wrong_product_caps_the_verdict_on_fusion(timed, pace, plant):
    pace.update({"cpu": 20, "separate": 30, "fused": 10})
    plant(*TAIL)
    found = judged(timed, study.fusion(timed, LAYER), "G12", "direction holds")
    assert found.evidence.endswith(" Left out, since their results are wrong: q+k+v.")


@pytest.mark.parametrize("unwritten, count", [("n == 300", 4), ("n == 300 || n == 8", 8)])
def test_columns_beyond_those_compared_must_be_finite(timed, plant, unwritten, count):
    """Of 600 columns the outer 256 on each side are compared; a thread writes four."""
    plant(TAIL[0], f"if (n >= N || m >= M || {unwritten}) return;")
    found = judged(timed, study.split_sweep(timed, [projection("wide", 600)]), "G05", "not reproduced")
    assert "times" not in found.data and not measured(timed, performance=True)
    counts = [m for m in timed.record.measurements if m["metric"] == "nonfinite"]
    assert counts and {(m["value"], m["status"], m["case"]["columns compared"]) for m in counts} == {
        (count, "wrong_result", 512)}


GATED = inventory(q=64, odd=65)
"""With lm_head, 100 x 64: of 8192, 8320 and 12800 FLOP."""


@pytest.fixture
def article(monkeypatch):
    """Small products in place of the article's, with a gate between odd's FLOP and lm_head's."""
    monkeypatch.setattr(study, "ARTICLE_MFLOP", {p.name: p.flops(1) / 1e6 for p in GATED})
    monkeypatch.setattr(study, "ARTICLE_DEVICE", {"lm_head"})
    monkeypatch.setattr(op, "FLOP_GATE", 1e4)


@pytest.mark.parametrize("device, words", [
    ([5, 5, 5], "the device is the faster at every size"),
    ([50, 50, 50], "the CPU is the faster at every size"),
    ([50, 50, 5], "the CPU is the faster up to 0.0 MFLOP and the device from 0.0: this machine's own gate lies between,"
                  " as the article's"),
    ([50, 5, 5], "lies between, other than the article's"),
    ([5, 50, 5], "neither is the faster on one side of any size"),
    ([5, 5, 50], "neither is the faster on one side of any size"),
])
def test_flop_gate_measures_where_it_can(timed, pace, article, device, words):
    pace["device"] = list(device)
    found = judged(timed, study.flop_gate(timed, GATED), "G11", "reproduced")
    assert words in found.evidence
    assert [(r["projection"], r["cpu"].median, r["device"].median) for r in found.data] == [
        (p.name, 10, us) for p, us in zip(GATED, device, strict=True)]
    assert {(m["variant"], m["host"]) for m in measured(timed, performance=True)} == {
        ("cpu_path", True), ("host_device", False)}


def test_wrong_results_get_no_time(timed, plant):
    """The planted fault leaves the last column of 65 unwritten and does no harm to 64."""
    plant(*TAIL)
    assert list(study.split_sweep(timed, [SMALL, ODD]).data["times"]) == [study.label(SMALL)]
    judged(timed, study.launch_per_slice(timed, ODD), "G06", "not reproduced")
    assert list(study.remap(timed, [SMALL, ODD]).data) == [study.label(SMALL)]
    assert list(study.host_paths(timed, [SMALL, ODD])[0].data) == [study.label(SMALL)]
    found = study.flop_gate(timed, GATED)
    assert [row["projection"] for row in found.data] == [SMALL.name, "lm_head"]
    assert found.evidence.endswith(" Left out, since their results are wrong: odd 65 x 64.")
    assert list(study.fusion(timed, LAYER).data) == ["gate+up"], "v has 33 columns"
    assert {row["N"] for row in study.row_sweep(timed, [SMALL, ODD], [1, 2], ["int8"])} == {64}
    assert measured(timed, performance=True)
    no_time_of_a_wrong_result(timed)


def test_a_fault_in_one_split_takes_its_times_away(timed, plant):
    plant("begin + base + (z < rest ? 1 : 0)", "begin + base - (nsplit == 2 && z == 1)")
    judged(timed, study.split_sweep(timed, [SMALL]), "G05", "not reproduced")
    assert not measured(timed, performance=True) and {m["case"]["nsplit"] for m in wrong(timed)} == {2}


def test_where_all_is_wrong_there_are_verdicts_and_no_times(timed, plant, article):
    plant("const float v = ag[k];", "const float v = ag[k] * 1.00001f;", FLOAT)
    judged(timed, study.split_sweep(timed, [SMALL]), "G05", "not reproduced")
    judged(timed, study.launch_per_slice(timed, SMALL), "G06", "not reproduced")
    judged(timed, study.remap(timed, [SMALL]), "G07", "not reproduced")
    for claim, finding in zip(("G09", "G10"), study.host_paths(timed, [SMALL]), strict=True):
        judged(timed, finding, claim, "not reproduced")
    assert "none is timed" in judged(timed, study.flop_gate(timed, GATED), "G11", "reproduced").evidence
    judged(timed, study.fusion(timed, LAYER), "G12", "not reproduced")
    assert not measured(timed, performance=True)
    no_time_of_a_wrong_result(timed)


def test_a_path_from_the_host_that_loses_rows_gets_no_time(timed, monkeypatch):
    monkeypatch.setattr(op.HostGemm, "pageable", lambda self, x: self(x) * 0)
    g09, g10 = study.host_paths(timed, [SMALL])
    assert g09.verdict == g10.verdict == "not reproduced" and not measured(timed, performance=True)


@pytest.mark.parametrize("steps, differing", [(0, 0), (1, 8)])
def test_selftest_compares_a_device_with_the_simulator(timed, monkeypatch, steps, differing):
    real = timed.backend.numpy
    monkeypatch.setattr(timed.backend, "numpy", lambda array: (real(array).view(np.int32) + steps).view(np.float32))
    _, g14 = study.selftest(timed, k_group=((32, 32),), **FULL)
    evidence = judged(timed, g14, "G14", "reproduced").evidence
    assert f"differ from the GPU's in some bit in {differing} cases" in evidence


# ---- the sweep with peers

def peer(name, compute, bits=8):
    def prepare(weights, group, copies):
        return [lambda x: compute(x, weights)] * copies
    return gemm_peers.Peer(name, bits, "float32", None, prepare)


def broken(x, w):
    raise RuntimeError("no kernel image for this device")


def test_peers_are_checked_before_they_are_timed(timed, monkeypatch):
    known = [peer("right", lambda x, w: x @ w.T), peer("wrong", lambda x, w: x @ w.T * 1.05),
             peer("nan", lambda x, w: x @ w.T * torch.nan), peer("broken", broken),
             peer("for 4 bits", lambda x, w: x @ w.T, bits=4),
             gemm_peers.Peer("unprepared", 8, "float32", None, broken),
             gemm_peers.Peer("absent", 8, "float16", "it does not import", None)]
    monkeypatch.setattr(gemm_peers, "all_peers", lambda: known)
    monkeypatch.setattr(gemm_peers, "activations", lambda peer, x: torch.from_numpy(x))
    table = study.row_sweep(timed, [SMALL], [1, 2], ["int8"])
    assert {row["variant"] for row in table} == {*study.VARIANTS.values(), "right"}
    assert {(row["variant"], row["cache"]) for row in table if row["variant"] == "right"} == {("right", "cold")}
    status = {m["variant"]: (m["status"], m["reason"]) for m in timed.record.measurements if m["metric"] == "time_us"}
    assert status["absent"] == ("skipped", "it does not import")
    assert status["broken"] == ("runtime_error", "RuntimeError: no kernel image for this device")
    assert status["unprepared"][0] == "runtime_error" and status["right"][0] == "passed"
    assert {m["variant"] for m in wrong(timed)} == {"wrong", "nan"}
    only_cold_times_have_a_bandwidth(timed)
    assert {m["cache"] for m in measured(timed, performance=True)} == {"cold", "warm"}
    no_time_of_a_wrong_result(timed)


def test_a_four_bit_peer_may_err_more(timed, monkeypatch):
    known = [peer("coarse", lambda x, w: x @ w.T * 1.1, bits=4), peer("too coarse", lambda x, w: x @ w.T * 1.2, bits=4)]
    monkeypatch.setattr(gemm_peers, "all_peers", lambda: known)
    monkeypatch.setattr(gemm_peers, "activations", lambda peer, x: torch.from_numpy(x))
    table = study.row_sweep(timed, [SMALL], [1], ["int4"])
    assert "coarse" in {row["variant"] for row in table} and {m["variant"] for m in wrong(timed)} == {"too coarse"}


def row(variant, median, cache="cold", m=1, codes="int8"):
    return {"projection": "q", "N": 64, "K": 64, "M": m, "codes": codes, "variant": variant, "cache": cache,
            "timing": Timing(median, median, median, 9), "nbytes": 8000, "flop": 100}


def test_standings():
    ours, other = study.VARIANTS["float"], study.VARIANTS["int8"]
    found = study.standings([
        row(ours, 20), row(other, 30), row("slow peer", 50), row("fast peer", 10), row("fast peer", 1, cache="warm"),
        row(other, 7, m=2), row("fast peer", 5, codes="int4")])
    assert found == [
        {"projection": "q", "N": 64, "K": 64, "codes": "int8", "M": 1, "ours": ours, "ours us": 20, "ours GB/s": 0.4,
         "best peer": "fast peer", "best peer us": 10, "best peer GB/s": 0.8, "ours / peer": 2.0},
        {"projection": "q", "N": 64, "K": 64, "codes": "int8", "M": 2, "ours": other, "ours us": 7,
         "ours GB/s": pytest.approx(8 / 7)},
        {"projection": "q", "N": 64, "K": 64, "codes": "int4", "M": 1, "best peer": "fast peer", "best peer us": 5,
         "best peer GB/s": 1.6}]
    assert study.standings([]) == []


# ---- the gate (G11)

def test_flop_gate(lab, article):
    found = judged(lab, study.flop_gate(lab, GATED), "G11", "reproduced")
    assert [(r["projection"], r["flop"]) for r in found.data] == [("q", 8192), ("odd", 8320), ("lm_head", 12800)]
    assert all(r["cpu"].median > 0 and "device" not in r for r in found.data)
    assert {m["host"] for m in measured(lab, performance=True)} == {True}, "real CPU code is timed everywhere"


QWEN = shapes.QWEN3_VL_2B


def changed_model(name, **sizes):
    return replace(QWEN, projections=tuple(replace(p, **sizes) if p.name == name else p for p in QWEN.projections))


@pytest.mark.parametrize("model, verdict", [
    (QWEN, "reproduced"),
    (changed_model("q", n=2080), "contradicted"),  # 1.6% more FLOP, on the same side of the gate
    (changed_model("gate", n=2048), "contradicted"),  # to the CPU
    (changed_model("k", n=6144), "contradicted"),  # to the GPU
    (replace(QWEN, vocabulary=32000), "contradicted"),
    (replace(QWEN, projections=QWEN.projections[1:]), "contradicted"),
    (replace(QWEN, projections=(*QWEN.projections, projection("extra"))), "contradicted"),
    (shapes.SMOLLM2_135M, "contradicted"),
], ids=["the article's", "another q", "gate below", "k above", "another vocabulary", "no q", "one more", "SmolLM2"])
def test_the_gate_is_judged_by_the_articles_figures(lab, monkeypatch, model, verdict):
    monkeypatch.setattr(shapes, "distinct", lambda projections: [])  # nothing of that size is computed here
    found = judged(lab, study.flop_gate(lab, model), "G11", verdict)
    assert ("not all as the article has them" in found.evidence) == (verdict == "contradicted")


def test_another_gate_is_contradicted(lab, monkeypatch):
    monkeypatch.setattr(shapes, "distinct", lambda projections: [])
    monkeypatch.setattr(op, "FLOP_GATE", 8e6)
    found = judged(lab, study.flop_gate(lab, QWEN), "G11", "contradicted")
    assert "sends q, o, gate, up, down, lm_head to the GPU" in found.evidence


def test_a_cpu_path_that_is_wrong_gets_no_time(lab, article, monkeypatch):
    real = op.CpuGemm.__call__
    monkeypatch.setattr(op.CpuGemm, "__call__", lambda self, x: real(self, x) * np.float32(1.0001))
    found = judged(lab, study.flop_gate(lab, GATED), "G11", "reproduced")  # its FLOP are right all the same
    assert found.data == [] and found.evidence.endswith("wrong: q 64 x 64, odd 65 x 64, lm_head 100 x 64.")
    assert measured(lab, performance=True) == []
    no_time_of_a_wrong_result(lab)


# ---- what int8 activations cost (G08)

@pytest.fixture
def errors(lab, small_inputs):
    return study.activation_errors(lab, small_inputs)


def test_activation_errors(lab, errors):
    assert [(r["codes"], r["activations"]) for r in errors] == [
        (c, a) for c in ("int8", "int4") for a in ("float", "int8")]
    assert all(r["arithmetic"] <= study.BOUND for r in errors), "each kernel computes what it is given"
    for r in errors:
        assert r["differences"].size == 3 * 40
        assert (r["total"] <= study.BOUND) == (r["activations"] == "float")
        # over the output's RMS, so that their own RMS is the relative error
        assert np.sqrt(np.mean(r["differences"]**2)) == pytest.approx(r["total"], rel=1e-6)
    assert all(1e-3 < r["total"] < 2e-2 for r in errors if r["activations"] == "int8"), "8 bits of an activation"


class FakeModel:
    """Scripted likelihoods: `float` and `int8` percent more perplexity than float32, with some noise a token."""

    def __init__(self, float, int8, noise=1e-4):
        self.shifts = {"base": 0.0, "float": np.log1p(float / 100), "int8": np.log1p(int8 / 100)}
        self.noise, self.seen = noise, []

    def tokenize(self, text):
        assert len(text) > 10_000
        return list(range(5000))

    def perplexity(self, tokens, context, linear):
        self.tokens, self.context = len(tokens), context
        rng = np.random.default_rng(0)
        x, w = (torch.from_numpy(rng.standard_normal(s, np.float32)) for s in ((4, 64), (8, 64)))
        out, exact = linear("a weight", x, w), x @ w.T
        stored = torch.from_numpy(formats.quantize(w.numpy(), "int8").dequantize())
        kind = "base" if torch.equal(out, exact) else "float" if torch.equal(out, x @ stored.T) else "int8"
        codes, scales = formats.quantize_activations(x.numpy())
        if kind == "int8":
            rounded = torch.from_numpy(codes * np.repeat(scales, 32, axis=1))
            assert torch.allclose(out, rounded @ stored.T)
        self.seen.append(kind)
        tokens = np.random.default_rng(len(self.seen)).standard_normal(len(tokens) - 1)
        return smollm2.Perplexity.of(3 + self.shifts[kind] + self.noise * tokens)


@pytest.mark.parametrize("float_, int8, noise, verdict", [
    (0.19, 3.0, 1e-4, "reproduced"),
    (0.19, 0.9, 1e-4, "direction holds"),
    (1.0, 3.0, 1e-4, "direction holds"),
    (0.19, 0.19, 1e-4, "not testable here"),
    (0.19, 3.0, 10.0, "not testable here"),
    (3.0, 0.19, 1e-4, "contradicted"),
    (-0.19, 3.0, 1e-4, "direction holds"),  # as far from 0, and a gain where the article has a loss
])
def test_perplexity_follows_the_likelihoods(lab, errors, float_, int8, noise, verdict):
    model = FakeModel(float_, int8, noise)
    found = judged(lab, study.perplexity(lab, model, errors, tokens=400, context=128), "G08", verdict)
    assert sorted(model.seen) == ["base", "float", "int8"], "three paths, each its own arithmetic"
    assert (model.tokens, model.context) == (400, 128)
    assert ("enough tokens" in (found.missing or "")) == (verdict == "not testable here")
    if noise < 1:
        assert found.data["Q8_0 weights, int8 activations"]["delta"] == pytest.approx(int8 / 100, abs=1e-4)
        assert found.data["Q8_0 weights, float activations"]["delta"] == pytest.approx(float_ / 100, abs=1e-4)
    assert {m["n"] for m in measured(lab) if m["metric"] == "perplexity"} == {399}


def test_without_a_model_perplexity_is_not_testable_and_errors_are(lab, errors):
    found = judged(lab, study.perplexity(lab, None, errors, tokens=64), "G08", "not testable here")
    assert smollm2.INSTALL in found.missing and found.data is None
    assert "On 2 products int8 activations cost" in found.evidence


def test_no_tokens_mean_no_perplexity(lab, errors):
    found = judged(lab, study.perplexity(lab, FakeModel(0, 0), errors, tokens=0), "G08", "not testable here")
    assert "0 were asked for" in found.missing


# ---- refusals (G13)

def test_refusals(lab):
    found = judged(lab, study.refusals(lab), "G13", "reproduced")
    assert len(found.data) == 7 and all(message.split(":")[0] in ("TypeError", "ValueError")
                                        for message in found.data.values())


def no_check(self):
    return self


@pytest.mark.parametrize("place, name, fault, accepted", [
    (formats.Strips, "check", no_check, {"precision 'int2'", "a NaN scale"}),
    (op, "check_array", lambda *_: None, {"x of float64", "x of another width"}),
])
def test_bad_input_that_is_accepted_contradicts(lab, monkeypatch, place, name, fault, accepted):
    monkeypatch.setattr(place, name, fault)
    if place is op:  # what a kernel does with bad input is not asked here
        monkeypatch.setattr(op, "check_apart", lambda *_: None)
        monkeypatch.setattr(CpuKernel, "__call__", lambda *_: None)
    found = judged(lab, study.refusals(lab), "G13", "contradicted")
    assert {name for name, message in found.data.items() if message is None} >= accepted


def test_a_wrong_fallback_contradicts(lab, monkeypatch):
    monkeypatch.setattr(op.CpuGemm, "__call__", lambda self, x: np.zeros((len(x), self.strips.n), np.float32))
    judged(lab, study.refusals(lab), "G13", "contradicted")
    assert {m["variant"] for m in wrong(lab)} == {"cpu_path"}


def test_an_error_of_another_kind_is_no_refusal(lab, monkeypatch):
    def crash(self):
        raise KeyError("int2")
    monkeypatch.setattr(formats.Strips, "check", crash)
    with pytest.raises(KeyError):
        study.refusals(lab)


def test_the_profiled_launches_are_both_kernels(monkeypatch):
    launched = []

    class Recorder(CpuBackend):
        def compile(self, source, defines=None):
            module = super().compile(source, defines)
            real = module.kernel
            return type("Module", (), {"kernel": lambda _, name: launched.append(name) or real(name)})()
    monkeypatch.setattr(backends, "get", lambda name=None: Recorder())
    monkeypatch.setattr(study, "random_strips", lambda rng, n, k: formats.quantize(
        rng.standard_normal((64, k), np.float32), "int8"))
    study.launch_each(0)
    assert {"grouped_gemm_float", "grouped_gemm_int8"} <= set(launched)
