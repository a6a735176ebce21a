"""Each experiment at small sizes on the simulator; made-up times and planted faults bring out the other verdicts."""

import numpy as np
import pytest

from kernelbook import backends, claims, counters, experiments, formats, measure, records, smollm2, toolchain
from kernelbook.backends.cpu import CpuBackend
from kernelbook.buckets import article
from kernelbook.experiments import prefill_probe as study
from kernelbook.measure import Ceiling
from kernelbook.ops import q4_probe as op

KINDS = {claim.id: claim.kind for claim in claims.load("prefill_breakdown")}
WARM, COLD = "warm", "cold"
TWO = ("gate_up", "o")


@pytest.fixture
def lab(simulator, environment):
    return experiments.Lab(simulator, records.Record("2_prefill_breakdown", {}, environment))


class Timed(CpuBackend):
    """Claims to be timed, so that times can be made up; two copies of a weight are more than its L2."""
    simulated = False
    l2_bytes = 1 << 12
    multiprocessors = 2


@pytest.fixture
def timed(environment, monkeypatch, made_up_times):
    monkeypatch.setattr(study, "SHAPES", dict.fromkeys(study.SHAPES, (64, 64)))
    clocks = {"before": {"sm_max_mhz": 1000.0}, "after": None}
    record = records.Record("2_prefill_breakdown", {}, {**environment, "simulated": False, "clocks": clocks})
    return experiments.Lab(Timed(), record, ceilings={"read": Ceiling("read", 10.0, "GB/s", 9, 11, 9, "how")})


def judged(lab, finding, claim, verdict):
    """The finding is on `claim`, came out as `verdict`, and the record takes it; its data are rows of plain values."""
    assert (finding.claim, finding.verdict) == (claim, verdict), finding.evidence
    lab.judge(finding)
    for row in finding.data:
        assert all(isinstance(v, str | int | float | None) for v in row.values()), row
    return finding


def untimed(lab, finding, claim):
    judged(lab, finding, claim, "not testable here")
    assert "GPU" in finding.missing
    assert not any(m["value"] is not None and records.is_performance(m["metric"]) for m in lab.record.measurements)
    return finding


def spoil(monkeypatch, condition, factor=1.1):
    """Make the probe wrong in the forms that a condition on (variant, R) holds for."""
    real = op.Q4Probe.prepare

    def prepare(self, x, **options):
        launch = real(self, x, **options)
        if not condition(self.variant, self.wave_rows):
            return launch

        def broken():
            out = launch()
            out *= np.float32(factor)
            return out
        return broken
    monkeypatch.setattr(op.Q4Probe, "prepare", prepare)


# ---- parameters

GOOD = {"projections": ["o"], "wave_rows": [1], "batches": [16], "layers": [0], "columns": 64}


@pytest.mark.parametrize("given, message", [
    ({"projections": []}, "projections is empty; expected some of gate_up, qkv, q, down, o"),
    ({"projections": ["lm_head"]}, "projections: 'lm_head'; expected some of gate_up"),
    ({"wave_rows": [3]}, "wave_rows: 3; expected some of 1, 2, 4"),
    ({"batches": [2]}, "batches: 2; expected some of 1, 4, 8, 16, 32"),
    ({"layers": [30]}, "layers: 30; expected layers from 0 to 29"),
    ({"columns": 6}, "columns: 6; expected a multiple of 4"), ({"columns": 0}, "columns: 0; expected"),
])
def test_values_that_no_experiment_can_use_are_named(lab, given, message):
    with pytest.raises(ValueError, match=f"^{message}"):
        study.check_parameters(**GOOD | given)
    if not given.keys() & {"layers", "columns"}:
        with pytest.raises(ValueError, match=f"^{message}"):
            study.times(lab, **{name: value for name, value in given.items()})
    assert not lab.record.measurements
    study.check_parameters(**GOOD)


# ---- the article's table (B03)

def test_without_a_gpu_the_articles_forms_are_checked(lab):
    found = untimed(lab, study.times(lab, TWO, columns=8), "B03")
    assert [(row["projection"], row["variant"], row["R"]) for row in found.data] == [
        (name, *form) for name in TWO for form in study.ARTICLE_FORMS]
    assert all(0 < row["error"] < study.BOUND and row["M"] == 16 for row in found.data)
    assert [row["article us"] for row in found.data] == pytest.approx([150, 104, 107, 52, 61, 84])


def test_a_wrong_form_shows_without_a_gpu(lab, monkeypatch):
    spoil(monkeypatch, lambda variant, _: variant == "int8_dot")
    assert "NOT all within" in study.times(lab, ["o"], columns=8).evidence
    assert {m["variant"] for m in lab.record.measurements if m["status"] == "wrong_result"} == {"3_int8_dot"}


def paced(*us):
    return dict(zip(((variant, r, WARM) for variant, r in study.ARTICLE_FORMS), us, strict=True))


def test_the_whole_grid_is_timed_and_the_table_has_the_articles_form(timed, pace):
    pace.update(paced(150, 104, 107) | {("explicit_fma", 4, COLD): 200})
    found = study.times(timed, ["gate_up"], (2,), (1, 16))
    assert [(row["variant"], row["R"], row["M"], row["cache"]) for row in found.data] == [
        (v, r, m, c) for m in (1, 16) for v, r in [*((v, 2) for v in op.FILES), *study.ARTICLE_FORMS[1:][:m // 8]]
        for c in (COLD, WARM)]
    row = next(row for row in found.data if (row["variant"], row["R"], row["M"], row["cache"]) == (
        "explicit_fma", 4, 16, COLD))
    assert row["weights GB/s"] == pytest.approx(64 * 64 * 4.5 / 8 / 200e3) and row["of read"] == pytest.approx(
        row["weights GB/s"] / 10)
    assert row["TFLOP/s"] == pytest.approx(2 * 16 * 64 * 64 / 200e6)
    assert all(row["of read"] is None for row in found.data if row["cache"] == WARM)
    line, = study.in_articles_form(found.data)
    assert (line["baseline R=2"], line["explicit FMA R=4"], line["dp4a R=4"]) == pytest.approx((0.15, 0.104, 0.107))
    assert line["baseline / best"] == line["baseline / best, article"] == pytest.approx(150 / 104)


def test_cold_calls_go_through_more_than_a_cache(timed, monkeypatch):
    seen = {}
    real = measure.device_times

    def times(contenders, **options):
        seen.update({name: len(calls) for name, calls in contenders.items()})
        return real(contenders, **options)
    monkeypatch.setattr(measure, "device_times", times)
    study.times(timed, ["o"], (2,), (16,))
    needed = -(-4 * Timed.l2_bytes // (64 * 64 * 72 // 128))
    assert {(name[-1], count) for name, count in seen.items()} == {(COLD, needed), (WARM, 1)}


def test_the_articles_forms_are_timed_whatever_the_grid(timed):
    found = study.times(timed, ["o"], wave_rows=(2,), batches=(1,))
    assert {(row["variant"], row["R"]) for row in found.data if row["M"] == 16} == set(study.ARTICLE_FORMS)
    assert {(row["variant"], row["R"]) for row in found.data if row["M"] == 1} == {(v, 2) for v in op.FILES}


@pytest.mark.parametrize("gate_up, o, verdict, same", [
    ((150, 104, 107), (52, 61, 84), "reproduced", 6), ((15, 10, 11), (5, 6, 8), "reproduced", 6),
    ((150, 104, 104), (52, 61, 84), "direction holds", 5),  # two within the noise
    ((150, 104, 90), (52, 61, 50), "not reproduced", 3), ((100, 104, 107), (84, 61, 52), "not reproduced", 1),
    ((100, 120, 110), (84, 61, 52), "contradicted", 0)])
def test_the_order_is_judged_warm(timed, pace, gate_up, o, verdict, same):
    pace.update({(*form, WARM): list(us) for form, us in zip(study.ARTICLE_FORMS, zip(gate_up, o, strict=True),
                                                            strict=True)})
    found = judged(timed, study.times(timed, TWO, (2,), (16,)), "B03", verdict)
    assert found.measured == f"{same} of 6 comparisons as in the article"


def test_a_wrong_form_has_no_time_and_is_named(timed, pace, monkeypatch):
    pace.update(paced(150, 104, 107))
    spoil(monkeypatch, lambda variant, r: (variant, r) == ("explicit_fma", 2))
    found = judged(timed, study.times(timed, ["gate_up"], (2,), (16,)), "B03", "direction holds")
    assert "Left out, since their results are wrong: explicit_fma with R = 2 on gate_up at M = 16." in found.evidence
    assert len(found.data) == 2 * 4
    spoil(monkeypatch, lambda variant, r: variant == "int8_dot")
    found = study.times(timed, ["o"], (2,), (16,))
    assert found.verdict == "not reproduced" and "no time counts" in found.evidence


def test_an_output_that_is_not_finite_anywhere_is_wrong(timed, monkeypatch):
    monkeypatch.setattr(study, "SAMPLE", 1)
    real = op.Q4Probe.prepare

    def prepare(self, x, **options):
        launch = real(self, x, **options)

        def broken():
            launch()[0, 32] = np.nan  # no column that is compared
        return broken
    monkeypatch.setattr(op.Q4Probe, "prepare", prepare)
    assert study.times(timed, ["o"], (2,), (16,)).data == []


# ---- machine code (B09), issue (B04), rows of a wave (B10)

needs_compiler = pytest.mark.skipif(toolchain.targets()["sm_90a"] is not None, reason="no compiler for NVIDIA")


@pytest.fixture(scope="module")
def code(simulator, environment):
    return study.machine_code(experiments.Lab(simulator, records.Record("2_prefill_breakdown", {}, environment)),
                              ("sm_90a",))


@needs_compiler
def test_a_mac_in_machine_code(lab, code):
    assert [(row["variant"], row["R"]) for row in code] == [(v, r) for v in op.FILES for r in op.WAVE_ROWS]
    found = judged(lab, study.contraction(lab, code), "B09", "reproduced")
    assert {row["variant"] for row in found.data} == {"baseline", "explicit_fma"}
    assert found.measured == "FMUL + FADD against one FFMA, 2.39 against 1.64 instructions a MAC in all"


@needs_compiler
def test_contraction_in_the_baseline_is_noticed(lab, code):
    """In all builds of it, half of all kernels; in one of them; and where fmaf is two instructions too."""
    contracted = {"FMUL": 0.0625, "FADD": 0.25, "FFMA": 1.0}
    judged(lab, study.contraction(lab, [row | contracted for row in code]), "B09", "contradicted")
    one = [row | contracted if (row["variant"], row["R"]) == ("baseline", 1) else row for row in code]
    assert study.contraction(lab, one).verdict == "direction holds"
    apart = [row | {"FMUL": 1.0625, "FADD": 1.0, "FFMA": 0.0} for row in code]
    assert study.contraction(lab, apart).verdict == "contradicted"


def test_without_a_compiler_static_claims_say_so(lab, monkeypatch):
    monkeypatch.setattr(toolchain, "targets", lambda: dict.fromkeys(("sm_90a", "sm_120"), "no NVRTC"))
    code = study.machine_code(lab)
    assert code == []
    for found, claim in ((study.contraction(lab, code), "B09"), (study.issue(lab, [], code, "no GPU"), "B04")):
        judged(lab, found, claim, "not testable here")
        assert "no NVRTC" in found.missing
    assert "No machine code could be made" in untimed(lab, study.wave_rows(lab, [], code), "B10").evidence


@needs_compiler
def test_without_a_gpu_machine_code_is_what_issue_and_rows_have(lab, code):
    found = untimed(lab, study.issue(lab, [], code, study.hardware_counters(lab)), "B04")
    assert [(row["variant"], row["R"]) for row in found.data] == list(study.ARTICLE_FORMS)
    assert "dp4a has 0.36 of the baseline's and 0.58 of explicit FMA's" in found.evidence
    found = untimed(lab, study.wave_rows(lab, [], code), "B10")
    assert "no bytes are spilled" in found.evidence and all(row["registers"] for row in found.data)


def grid(times, projections=TWO, cache=WARM, shapes=None):
    """Rows as `times` gives them: (variant, R) to us, or to one for each projection."""
    return [{"projection": name, "N": 64, "K": 64, "MiB": 1.0, "variant": v, "R": r, "M": 16, "cache": cache, "us": us,
             "p10": us * 0.99, "p90": us * 1.01, "of read": 0.1, "weights GB/s": 1.0, "TFLOP/s": 1.0}
            for (v, r), of in times.items()
            for name, us in zip(projections, of if isinstance(of, tuple) else [of] * len(projections), strict=True)]


@needs_compiler
@pytest.mark.parametrize("fma, dot, verdict", [
    (10, 12, "reproduced"), (10, (12, 9.9), "direction holds"), (10, (9, 9), "direction holds"),
    (10, (6, 12), "not reproduced"), (10, (6, 5), "contradicted")])
def test_issue_follows_the_times(timed, code, fma, dot, verdict):
    rows = grid({("baseline", 2): 20, ("explicit_fma", 4): fma, ("int8_dot", 4): dot})
    found = judged(timed, study.issue(timed, rows, code, "no ncu"), "B04", verdict)
    assert "Counters were not read (no ncu)" in found.evidence
    row = found.data[1]
    assert row["slots needed"] == pytest.approx(row["instructions a MAC"] * 16 * 64 * 64 / 32 / (2 * 4 * 1000) / 10)


@needs_compiler
@pytest.mark.parametrize("us, verdict", [(10, "reproduced"), ((5, 10), "direction holds"), (5, "contradicted")])
def test_slots_that_are_full_are_a_bound_whatever_dp4a_takes(timed, code, monkeypatch, us, verdict):
    """At 700 an us, explicit FMA's 1.64 instructions for 16 x 64 x 64 MACs, 32 a warp, are 4.8 us."""
    monkeypatch.setattr(study, "_slots_per_us", lambda lab: 700)
    rows = grid({("baseline", 2): 20, ("explicit_fma", 4): us, ("int8_dot", 4): 12})
    found = judged(timed, study.issue(timed, rows, code, "no ncu"), "B04", verdict)
    assert "of the issue slots at the highest clock" in found.evidence
    monkeypatch.setattr(study, "_slots_per_us", lambda lab: None)
    assert study.issue(timed, rows, code, "no ncu").verdict == "reproduced"


@needs_compiler
def test_counters_are_read_in_a_process_of_their_own(timed, code, monkeypatch):
    asked = []

    def read(text, metrics):
        asked.append(text)
        return {f"q4_{variant}": dict.fromkeys(metrics, 50.0) for variant in op.FILES}
    monkeypatch.setattr(counters, "read", read)
    counted = study.hardware_counters(timed, "o")
    assert asked == ["from kernelbook.experiments import prefill_probe as p; p.launch_each(0, 'o')"]
    assert [row["variant"] for row in counted] == list(op.FILES) and counted[0]["occupancy, %"] == 50
    rows = grid({("baseline", 2): 20, ("explicit_fma", 4): 10, ("int8_dot", 4): 12})
    assert "explicit_fma uses 50% of the issue slots" in study.issue(timed, rows, code, counted).evidence

    def cannot(text, metrics):
        raise backends.BackendUnavailable("no rights")
    monkeypatch.setattr(counters, "read", cannot)
    assert study.hardware_counters(timed) == "no rights"


def test_what_a_profiler_looks_at_runs(monkeypatch, simulator):
    monkeypatch.setattr(backends, "get", lambda name: simulator)
    monkeypatch.setitem(study.SHAPES, "o", (8, 64))
    study.launch_each(0, "o")


FORMS = {("baseline", 1): 30, ("baseline", 2): 20, ("explicit_fma", 1): 18, ("explicit_fma", 2): 14}


@needs_compiler
@pytest.mark.parametrize("four, fused, verdict", [
    (36, 10, "reproduced"), ((36, 90), 10, "direction holds"),  # 4.5 times, more than twice what the article has
    ((36, 19), 10, "not reproduced"), (36, 14, "not reproduced"), (18, 10, "not reproduced"), (18, 20, "contradicted")])
def test_rows_of_a_wave_follow_the_times(timed, code, four, fused, verdict):
    rows = grid(FORMS | {("baseline", 4): four, ("explicit_fma", 4): fused})
    found = judged(timed, study.wave_rows(timed, rows, code), "B10", verdict)
    assert len(found.data) == 2 * 6 and all(row["registers"] > 0 for row in found.data)


@needs_compiler
def test_spills_are_a_register_wall(timed, code):
    rows = grid(FORMS | {("baseline", 4): 36, ("explicit_fma", 4): 10})
    spilled = [row | {"spill bytes": 8} for row in code]
    judged(timed, study.wave_rows(timed, rows, spilled), "B10", "not reproduced")


@needs_compiler
def test_claims_on_forms_without_times_are_not_reproduced(timed, code):
    some = grid({("baseline", 2): 20})
    for found, claim in ((study.issue(timed, some, code, "no ncu"), "B04"),
                         (study.wave_rows(timed, some, code), "B10"), (study.bandwidth(timed, some), "B08")):
        judged(timed, found, claim, "not reproduced")


# ---- weight bandwidth (B08)

def test_the_articles_bandwidths_are_added_up_again(lab):
    found = untimed(lab, study.bandwidth(lab, []), "B08")
    assert found.measured == "article, re-added: 334 and 482 GB/s"
    assert "takes the MiB for MB (460)" in found.evidence
    theirs = {(row["projection"], row["variant"]): row["article GB/s"] for row in found.data}
    assert theirs["qkv", "explicit_fma"] == pytest.approx(28.1 * 2**20 / 53e3)


@pytest.mark.parametrize("base, fma, verdict", [
    ((0.2, 0.1), (0.25, 0.5), "reproduced"), ((0.08, 0.08), (0.2, 0.2), "direction holds"),
    ((0.2, 0.2), (0.6, 0.7), "not reproduced"), ((0.5, 0.6), (0.7, 0.8), "contradicted")])
def test_bandwidth_is_judged_by_cold_medians(timed, base, fma, verdict):
    rows = grid(dict.fromkeys(study.ARTICLE_FORMS, 10), cache=COLD)
    for (v, _), shares in zip(study.ARTICLE_FORMS, (base, fma, (9, 9)), strict=True):
        for row, share in zip([row for row in rows if row["variant"] == v], shares, strict=True):
            row["of read"] = share
    rows += [row | {"M": 1, "of read": 0.03} for row in rows] + [row | {"cache": WARM, "of read": None} for row in rows]
    found = judged(timed, study.bandwidth(timed, rows), "B08", verdict)
    assert "At M = 1 3.0% to 3.0%" in found.evidence
    assert len(found.data) == 2 * 3 * 2 and {row["M"] for row in found.data} == {1, 16}
    timed.ceilings.clear()
    with pytest.raises(ValueError, match="read ceiling has not been measured"):
        study.bandwidth(timed, rows)


# ---- random bytes (B07)

def test_random_bytes_are_counted(lab):
    found = judged(lab, study.random_bytes(lab, columns=16), "B07", "direction holds")
    of = {row["what"]: row for row in found.data}
    for row in found.data[:4]:
        assert row["share"] == pytest.approx(row["expected"], abs=0.002) and row["spoiled"] <= row["of"]
    assert of["scales"]["of"] == 5120 * 6144 // 32 and of["tiles"]["of"] == 5120 * 6144 // 128
    assert of["pairs of scales of a tile"]["expected"] == pytest.approx(0.0615, abs=1e-4)
    assert of["outputs of a kernel"]["share"] > 0.9
    assert "no such scale" in found.evidence


def test_bytes_that_spoil_nothing_contradict(lab, monkeypatch):
    monkeypatch.setattr(formats, "random_byte_tiles", lambda seed, n, k: formats.random_tiles(lab.rng(seed), n, k))
    judged(lab, study.random_bytes(lab, columns=16), "B07", "contradicted")


def test_six_percent_of_scales_would_reproduce(lab, monkeypatch):
    def six(seed, n, k):
        tiles = formats.random_tiles(lab.rng(seed), n, k)
        words = tiles.data[..., :8].view("<u2")
        words[lab.rng(seed).random(words.shape) < 0.06] = 0x7e00
        return tiles
    monkeypatch.setattr(formats, "random_byte_tiles", six)
    judged(lab, study.random_bytes(lab, columns=16), "B07", "reproduced")


# ---- errors (B05, B06)

@pytest.fixture(scope="module")
def inputs(simulator, environment):
    lab = experiments.Lab(simulator, records.Record("2_prefill_breakdown", {}, environment))
    return study.random_inputs(lab, ("qkv", "o"), columns=256)


def test_inputs(inputs):
    assert [(i.name, i.tiles.n, i.tiles.k, i.x.shape) for i in inputs] == [
        ("random, qkv", 256, 5120, (16, 5120)), ("random, o", 256, 6144, (16, 6144))]


def test_real_inputs_are_products_of_the_model():
    class Model:
        weights = {f"blk.0.{name}.weight": type("W", (), {"numpy": lambda self: np.full((8, 64), 0.5, np.float32)})()
                   for name in ("attn_q", "attn_k", "ffn_down")}

        def tokenize(self, text):
            return list(range(100))

        def activations(self, tokens, layers):
            assert len(tokens) == 64 and layers == [0]
            return {name: np.arange(64 * 64, dtype=np.float32).reshape(64, 64) for name in self.weights}
    found = study.real_inputs(Model(), [0], columns=4)
    assert [i.name for i in found] == ["SmolLM2, blk.0.attn_q", "SmolLM2, blk.0.ffn_down"]
    assert found[0].tiles.n == 4 and found[0].x.shape == (16, 64) and found[0].x[-1, -1] == 64 * 64 - 1
    assert smollm2.Model.activations  # the name that it is called by


def test_int8_activations_cost_orders_of_magnitude(lab, inputs):
    found = judged(lab, study.errors(lab, inputs), "B05", "direction holds")
    assert [row["variant"] for row in found.data] == 2 * list(op.FILES)
    assert found.measured == "4.7 to 4.7 orders of magnitude"
    for row in found.data:
        assert row["maxrel"] > row["meanrel"] > 0
        low, high = (3e-3, 1e-2) if row["variant"] == "int8_dot" else (5e-8, 3e-7)
        assert low < row["relative Frobenius"] < high
    assert found.data[0]["maxrel to baseline"] == 0 < found.data[1]["maxrel to baseline"]
    totals = [m for m in lab.record.measurements if m["metric"] == "relative_frobenius_to_float_activations"]
    assert len(totals) == 2 and {m["status"] for m in lab.record.measurements} == {"passed"}


@pytest.mark.parametrize("variant, factor, verdict", [
    ("explicit_fma", 1 + 1e-6, "reproduced"), ("explicit_fma", 1.01, "not reproduced"),
    ("int8_dot", 1.01, "not reproduced"), ("int8_dot", np.nan, "not reproduced")])
def test_errors_follow_what_kernels_give(lab, inputs, monkeypatch, variant, factor, verdict):
    monkeypatch.setattr(study, "BOUND", 2e-6)
    spoil(monkeypatch, lambda v, _: v == variant, factor)
    judged(lab, study.errors(lab, inputs), "B05", verdict)


def test_cancellation_inflates_maxrel(lab, inputs):
    found = judged(lab, study.cancellation(lab, inputs), "B06", "reproduced")
    for comparison in ("another order", "explicit FMA", "dp4a"):
        for name in ("random, qkv", "random, o"):
            part = [row for row in found.data if (row["comparison"], row["inputs"]) == (comparison, name)]
            assert [(row["from %"], row["to %"]) for row in part] == [(0, 0.1), (0.1, 1), (1, 10), (10, 50), (50, 100)]
            assert part[0]["maxrel"] > 10 * part[-1]["maxrel"]


def test_differences_that_are_no_cancellation_contradict(lab, inputs, monkeypatch):
    """Every second call is off by a like part of each output."""
    monkeypatch.setattr(study, "BOUND", 0.1)
    real, calls = study._multiply, []

    def multiply(lab, given, variant, r):
        calls.append(variant)
        off = variant == "explicit_fma" and calls.count(variant) % 2 == 0
        return real(lab, given, variant, r) * np.float32(1.05 if off else 1)
    monkeypatch.setattr(study, "_multiply", multiply)
    judged(lab, study.cancellation(lab, inputs), "B06", "contradicted")


@pytest.mark.parametrize("factor", [1.01, np.nan])
def test_a_wrong_kernel_shows_nothing_about_cancellation(lab, inputs, monkeypatch, factor):
    spoil(monkeypatch, lambda variant, _: variant == "explicit_fma", factor)
    found = judged(lab, study.cancellation(lab, inputs), "B06", "not reproduced")
    assert "NOT all within 1e-06" in found.evidence


def test_outputs_that_are_exactly_zero_are_left_out():
    assert study._relative([1.0, 3.0, 0.0], [0.0, 2.0, -4.0]).tolist() == [0.5, 1.0]


def test_another_order_is_the_same_product(lab, inputs, monkeypatch):
    seen = []
    real = study._multiply
    monkeypatch.setattr(study, "_multiply", lambda lab, given, *form: seen.append(given) or real(lab, given, *form))
    study.cancellation(lab, inputs[:1])
    first, second = seen[:2]
    assert not np.array_equal(first.x, second.x)
    assert np.allclose(first.reference, second.reference, rtol=1e-12)


def test_the_articles_figures_are_its_own():
    tables = article.tables()
    assert tables.probe_ms.keys() == tables.weights_mb.keys() == study.SHAPES.keys()
    assert tables.probe_ms["down"] == (0.138, 0.133, 0.234)
    assert KINDS["B03"] == KINDS["B08"] == "speed" and KINDS["B09"] == "static"
