"""Whole passes of the tiny model on the simulator; made-up times, traces and planted faults bring out every verdict."""

import re
from collections import Counter
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest

from kernelbook import ROOT, buckets, claims, experiments, formats, plots, qwen3_5, records
from kernelbook.backends import BackendUnavailable
from kernelbook.backends.cpu import CpuBackend
from kernelbook.buckets import Activity, Mark, Trace, predictions
from kernelbook.experiments import prefill_buckets as study
from kernelbook.measure import Ceiling, Timing
from kernelbook.qwen3_5 import DESIGNS, TINY, Model, Outcome, Pass
from kernelbook.shapes import QWEN3_5_27B

KINDS = {claim.id: claim.kind for claim in claims.load("prefill_breakdown")}
TOKENS = 17  # a tile of 16 and one more
ON_HOPPER = ("wgmma", "packed_wgmma")
HERE = [name for name in study.COMPARED if name not in ON_HOPPER]
MS = 1_000_000
NAMES = {"GEMM": "q4_explicit_fma", "GDN": "sequential", "attention": "rotary_heads", "norm/act": "add_norm"}


@pytest.fixture
def lab(simulator, environment):
    return experiments.Lab(simulator, records.Record("2_prefill_breakdown", {}, environment))


class Timed(CpuBackend):
    """Claims to be timed, so that times can be made up."""
    simulated = False
    l2_bytes = 50 << 20


@pytest.fixture(scope="module")
def fake():
    return Timed()


def timed_lab(fake, environment, patch, pace):
    """A lab whose passes run on the simulator, take the times of `pace` and are profiled as `trace` has it."""
    def named(call):
        return call.design.name if isinstance(call, Pass) else study.LLAMA

    def clocked(lab, call):
        ms = pace.get(named(call), 20.0)
        return 1e3 * ms, 0.9e3 * ms

    def profile(call, passes, *, warmup):
        ms = pace.get((named(call), "profiled"), pace.get(named(call), 20.0))
        if isinstance(ms, Exception):
            raise ms
        return trace({"GEMM": 0.84 * ms, "GDN": 0.12 * ms, "attention": 0.02 * ms}, ms, passes)

    for place, name, value in ((study, "_clocked", clocked), (buckets, "profile", profile),
                               (study, "_free_bytes", lambda lab: 1 << 40), (study, "TINY_TOKENS", 9)):
        patch.setattr(place, name, value)
    record = records.Record("2_prefill_breakdown", {}, {**environment, "simulated": False})
    ceilings = {"read": Ceiling("read", 4000.0, "GB/s", 3999, 4001, 9, "how")}
    return experiments.Lab(fake, record, ceilings=ceilings)


@pytest.fixture
def pace():
    """Milliseconds of a pass by design, 20 for others; by (design, "profiled") what its profile has instead."""
    return {}


@pytest.fixture
def timed(fake, environment, monkeypatch, pace):
    return timed_lab(fake, environment, monkeypatch, pace)


@pytest.fixture(scope="module")
def tiny(fake):
    return Model.random(fake, TINY)


def trace(parts, wall, passes=1, spill=0.0):
    """Passes of `wall` ms whose buckets take turns, the last one running `spill` ms beyond its mark."""
    activities, marks = [], []
    for i in range(passes):
        at = i * (wall + 1)
        marks.append(Mark("pass", round(at * MS), round((at + wall) * MS)))
        for name, ms in parts.items():
            activities.append(Activity(NAMES.get(name, name), round(ms * MS), 1, round(at * MS), 0, 7))
            at += ms
    if spill:
        activities.append(Activity("add_norm", round(spill * MS), 1, marks[-1].end_ns - 1, 0, 7))
    return Trace("live", "test", tuple(activities), tuple(marks))


def breakdown(parts, wall=None, **more):
    part, = buckets.analyze(trace(parts, wall or sum(parts.values()), **more), buckets.rules())
    return part


def timing(ms, spread=0.01):
    return Timing(1e3 * ms, 1e3 * ms * (1 - spread), 1e3 * ms * (1 + spread), 7)


def fabricated(layers=64, **ms):
    """Passes with given times by design, as if measured on Qwen3.5-27B."""
    runs = study.Passes(qwen3_5.first_layers(QWEN3_5_27B, layers).name, layers, 512, "article design", np.ones(4))
    for name, value in ms.items():
        runs.times[name] = value if isinstance(value, Timing) else timing(value)
        runs.rows.append({"design": name, "logits, error": 0.0, "ms": runs.times[name].median / 1e3})
    return runs


def peer(ms=20.0, beside=10.0, part=None, **more):
    return study.Peer(None, timing(ms, **more), timing(beside), 0.03, part)


def judged(lab, finding, claim, verdict):
    """The finding is on `claim`, came out as `verdict`, and the record takes it; its rows make a table."""
    assert (finding.claim, finding.verdict) == (claim, verdict), finding.evidence
    record = records.Record("2_prefill_breakdown", {}, lab.record.environment)  # others hold one on other data
    replace(lab, record=record).judge(finding)
    assert re.fullmatch(r"[^ ].*[^ ]", finding.evidence) and "  " not in finding.evidence
    for row in finding.data:
        assert all(isinstance(v, str | int | float | None) for v in row.values()), row
    assert plots.table(finding.data)._repr_html_()
    return finding


def performance(lab):
    return [m for m in lab.record.measurements if m["value"] is not None and records.is_performance(m["metric"])]


def measured(lab, **fields):
    return [m for m in lab.record.measurements if all(m[name] == value for name, value in fields.items())]


@pytest.fixture(scope="module")
def simulated(simulator, environment):
    """A lab, its tiny model and its passes in every design, for tests that only look at them."""
    lab = experiments.Lab(simulator, records.Record("2_prefill_breakdown", {}, environment))
    model = study.make_model(lab)
    return lab, model, study.passes(lab, model, TOKENS)


@pytest.fixture
def spoil(monkeypatch):
    """Change what a design's passes compute."""
    def plant(design, change):
        real = Pass.outcome

        def outcome(self):
            found = real(self)
            return change(found) if self.design.name == design else found
        monkeypatch.setattr(Pass, "outcome", outcome)
    return plant


def wrong_logits(outcome):
    return Outcome(outcome.logits[::-1], outcome.streams)


def nan_in_streams(outcome):
    outcome.streams[2, -1, 0] = np.nan
    return outcome


# ---- parameters and inputs

GOOD = {"layers": 64, "pass_tokens": 512, "designs": ["article", "wgmma"], "repeats": 7}


def test_parameters_that_can_be_used():
    study.check_parameters(**GOOD)
    study.check_parameters(**GOOD | {"layers": 4, "pass_tokens": 9, "designs": list(DESIGNS), "repeats": 3})


@pytest.mark.parametrize("change, message", [
    ({"layers": 6}, "layers: 6; expected a multiple of 4 up to 64"), ({"layers": 0}, "layers: 0"),
    ({"layers": 68}, "layers: 68"), ({"pass_tokens": 8}, "pass_tokens: 8; expected 9 to 8192"),
    ({"repeats": 2}, "repeats: 2; expected 3"),
    ({"designs": ["article", "fp8"]}, "designs: 'fp8'; expected some of article, "),
    ({"designs": ["wgmma"]}, "designs: wgmma; expected 'article'"),
    ({"designs": []}, "designs: none; expected 'article'"),
    ({"designs": ["article", "article"]}, "designs: article, article; .* each once"),
])
def test_bad_parameters_are_named(change, message):
    with pytest.raises(ValueError, match=f"^{message}"):
        study.check_parameters(**GOOD | change)


def test_as_many_layers_as_fit(timed, monkeypatch):
    asked = []
    monkeypatch.setattr(Model, "random", lambda backend, inventory, **how: asked.append((inventory, how)))
    for free, layers in ((1 << 40, 64), (12 << 30, 20), (7 << 30, None)):
        monkeypatch.setattr(study, "_free_bytes", lambda lab, free=free: free)
        if layers:
            study.make_model(timed, 64)
            inventory, how = asked.pop()
            assert inventory is QWEN3_5_27B and how == {"seed": 0, "layers": layers}
            assert qwen3_5.weight_bytes(qwen3_5.first_layers(inventory, layers)) + study.SPACE <= free
        else:
            with pytest.raises(BackendUnavailable, match="7.0 GiB free; four layers of Qwen3.5-27B"):
                study.make_model(timed, 64)
    monkeypatch.setattr(study, "_free_bytes", lambda lab: 1 << 40)
    study.make_model(timed, 8)
    assert asked.pop()[1]["layers"] == 8


def test_panels_take_room_where_they_are_made(environment, hopper_in_numpy, monkeypatch):
    """Half the layers then fit; without such a design, or elsewhere, all do."""
    asked = []
    monkeypatch.setattr(type(hopper_in_numpy), "simulated", False)
    monkeypatch.setattr(Model, "random", lambda backend, inventory, **how: asked.append(how["layers"]))
    weights = qwen3_5.weight_bytes(QWEN3_5_27B)
    monkeypatch.setattr(study, "_free_bytes", lambda lab: weights + study.SPACE)
    lab = experiments.Lab(hopper_in_numpy, records.Record("2_prefill_breakdown", {}, environment))
    for designs in (study.COMPARED, ["article", "wgmma"]):
        study.make_model(lab, 64, designs)
    assert asked == [28, 64]
    panels = qwen3_5.panel_bytes(hopper_in_numpy, DESIGNS["packed_wgmma"], QWEN3_5_27B)
    model = SimpleNamespace(inventory=QWEN3_5_27B)
    for best, needed in (("wgmma", weights + study.PEER_SPACE), ("packed_wgmma", weights + panels + study.PEER_SPACE)):
        for free in (needed, needed - 1):
            monkeypatch.setattr(study, "_free_bytes", lambda lab, free=free: free)
            assert (study._no_room(lab, model, fabricated(**{best: 5.0})) is None) == (free == needed)


def test_the_prompt_follows_from_the_seed(lab):
    ids = study.prompt(lab, TINY, 50)
    assert np.array_equal(ids, study.prompt(lab, TINY, 50)) and ids.min() >= 0 and ids.max() < TINY.vocabulary
    assert not np.array_equal(ids, study.prompt(replace(lab, seed=1), TINY, 50))


# ---- the article's own tables

def test_the_articles_tables_added_up_again(lab):
    found = study.article_tables(lab)
    engine, llama = found["totals"]
    assert (engine["buckets, ms"], engine["all kernels, ms"], engine["excess, ms"]) == (9213, 9093, 120)
    assert (llama["buckets, ms"], llama["all kernels, ms"]) == (pytest.approx(106.5), 113.9)
    gemm = found["buckets"][0]
    assert gemm["share x wall, ms"] == pytest.approx(gemm["normalized, ms"], abs=0.5)
    assert gemm["time / passes, ms"] == pytest.approx(1273.2, abs=0.1)
    assert found["gap"][0]["share of the gap"] == pytest.approx(0.851, abs=5e-4)
    ratios = [m["value"] for m in measured(lab, metric="buckets_over_total")]
    assert ratios == pytest.approx([9213 / 9093, 106.5 / 113.9])


# ---- passes in the simulator

def test_every_design_against_float64(simulated):
    lab, _, runs = simulated
    assert runs.reference == "float64" and [row["design"] for row in runs.rows] == HERE
    errors = {row["design"]: row["logits, error"] for row in runs.rows}
    assert errors["article"] < 1e-6 < errors["tiled_fp32"] < 1e-5 < 1e-3 < errors["tensor_cores"] < errors["int8_dot"]
    assert tuple(runs.left_out) == ON_HOPPER
    for name in ON_HOPPER:
        assert "warpgroup instructions" in runs.left_out[name]
        skipped, = measured(lab, variant=name)
        assert (skipped["status"], skipped["value"]) == ("skipped", None)
    assert not performance(lab) and not runs.times and runs.best is None and not runs.breakdowns


def test_a_pass_in_panels(environment, hopper_in_numpy):
    lab = experiments.Lab(hopper_in_numpy, records.Record("2_prefill_breakdown", {}, environment))
    runs = study.passes(lab, study.make_model(lab), TOKENS, ["article", "packed_wgmma"])
    assert not runs.left_out and 1e-3 < runs.rows[1]["logits, error"] < study.TINY_BOUNDS["bf16"]
    rows = {row["engine"]: row for row in judged(lab, study.launches(lab, runs), "B11", "reproduced").data}
    row = rows["packed_wgmma"]
    assert (row["launches"], row["predicted"], row["counted"]) == ("products, packed_wgmma", 17, 17)


def test_errors_grow_layer_by_layer(simulated):
    lab, _, runs = simulated
    for design in HERE:
        grown = [row["error"] for row in runs.growth if row["design"] == design]
        assert len(grown) == TINY.layers + 1 and grown[0] == 0 and 0 < grown[1] < grown[-1]
        recorded = measured(lab, variant=design, metric="relative_frobenius_of_stream")
        assert [m["value"] for m in recorded] == [grown[0], grown[4]]


def test_what_a_simulated_run_says(lab, simulated):
    _, model, runs = simulated
    none = study.llama(lab, model, runs)
    assert none.reason == experiments.NEEDS_GPU and not none.rows
    ratio, order = study.gap(lab, runs, none)
    judged(lab, ratio, "B01", "not testable here")
    assert "15.25 times as long" in ratio.evidence and "article 1.9e-07" in ratio.evidence
    assert "Left out is wgmma" in ratio.evidence and "Left out is packed_wgmma" in ratio.evidence
    judged(lab, order, "B02", "not testable here")
    assert "GEMM is 85% of the gap and GDN 12%" in order.evidence
    assert order.data[0]["ratio"] == pytest.approx(1576 / 85)
    judged(lab, study.launches(lab, runs, none), "B11", "reproduced")
    judged(lab, study.traffic(lab, runs), "B12", "reproduced")
    judged(lab, study.headroom(lab), "B13", "direction holds")
    judged(lab, study.bits(lab), "B15", "direction holds")
    assert not performance(lab)


@pytest.mark.parametrize("change, figure", [(wrong_logits, r"1\.\d+"), (nan_in_streams, "inf")])
def test_a_wrong_design_is_left_out(lab, spoil, change, figure):
    spoil("tensor_cores", change)
    runs = study.passes(lab, study.make_model(lab), 9, ["tiled_fp32", "tensor_cores"])
    assert re.search(f"against float64 is {figure}.*more than 0.02", runs.left_out["tensor_cores"])
    assert [m["status"] for m in measured(lab, variant="tensor_cores", metric="time_us")] == ["wrong_result"]
    assert "tiled_fp32" not in runs.left_out


def test_a_design_that_fails_costs_only_itself(lab, monkeypatch):
    real = Pass.__call__

    def call(self):
        if self.design.name == "article":
            raise RuntimeError("no more of that")
        return real(self)
    monkeypatch.setattr(Pass, "__call__", call)
    runs = study.passes(lab, study.make_model(lab), 9, ["article", "tiled_fp32"])
    assert runs.left_out == {"article": "RuntimeError: no more of that"} and runs.rows[0]["design"] == "tiled_fp32"
    assert [m["status"] for m in measured(lab, variant="article")] == ["runtime_error"]


def test_something_exact_is_needed(lab):
    with pytest.raises(ValueError, match="designs wgmma: none has float32 activations"):
        study.passes(lab, study.make_model(lab), 9, ["wgmma"])


# ---- passes with times

def test_designs_are_timed_and_taken_apart(timed, tiny, pace):
    pace.update(article=300.0, tiled_fp32=40.0)
    runs = study.passes(timed, tiny, 9, ["article", "tiled_fp32"], repeats=3)
    assert runs.reference == "article design" and runs.best == "tiled_fp32"
    assert [(row["design"], row["ms"]) for row in runs.rows] == [("article", 300), ("tiled_fp32", 40)]
    assert runs.rows[1]["on the device, ms"] == pytest.approx(36) and runs.rows[1]["tokens/s"] == pytest.approx(225)
    assert runs.rows[1]["ms, 64 layers"] == 40 * 64 / TINY.layers
    assert 0 < runs.rows[1]["logits, error"] < 1e-4 and runs.rows[0]["logits, error"] == 0
    # also against float64, which the article's design cannot be by comparing it with itself
    errors = {(m["variant"], m["case"]["reference"]): m["value"] for m in measured(timed, metric="relative_frobenius")}
    assert 0 < errors["article", "float64"] < 1e-6 and errors["article", "article design"] == 0

    times = {(m["variant"], m["case"]["clock"]): (m["value"], m["n"], m["cache"])
             for m in measured(timed, metric="time_us") if "clock" in m["case"]}
    assert times["article", "host"] == (pytest.approx(3e5), 3, "cold")
    assert times["tiled_fp32", "device"][0] == pytest.approx(3.6e4)
    parts = {m["case"]["bucket"]: m["value"] for m in measured(timed, metric="time_us", variant="article")
             if "bucket" in m["case"]}
    assert parts == pytest.approx({"GEMM": 252e3, "GDN": 36e3, "attention": 6e3, "idle": 6e3, "wall": 300e3})
    assert [(m["value"], m["status"]) for m in measured(timed, metric="parts_over_wall", variant="article")] == [
        (pytest.approx(1), "passed")]
    assert [row["of the pass"] for row in runs.buckets if row["engine"] == "article"] == pytest.approx(
        [0.84, 0.12, 0.02, 0.02])


def test_wrong_designs_are_not_timed(timed, tiny, spoil):
    spoil("tiled_fp32", wrong_logits)
    runs = study.passes(timed, tiny, 9, ["article", "tiled_fp32"], repeats=3)
    assert list(runs.times) == ["article"] and not [m for m in performance(timed) if m["variant"] == "tiled_fp32"]
    assert runs.left_out["tiled_fp32"].startswith("its relative error against float64")


def test_nothing_right_to_compare_with(timed, tiny, spoil):
    spoil("article", wrong_logits)
    runs = study.passes(timed, tiny, 9, ["article", "int8_dot"], repeats=3)
    assert not runs.times and not performance(timed)
    found, _ = study.gap(timed, runs, study.Peer("not built"))
    judged(timed, found, "B01", "not reproduced")
    assert "its relative error" in found.evidence


def test_a_profiler_that_fails_leaves_the_times(timed, tiny, pace):
    pace["article", "profiled"] = BackendUnavailable("another profiler may hold CUPTI")
    runs = study.passes(timed, tiny, 9, ["article"], repeats=3)
    assert runs.times["article"].median == 2e4 and not runs.breakdowns
    assert runs.not_profiled == {"article": "another profiler may hold CUPTI"}
    _, order = study.gap(timed, runs, study.Peer("not built"))
    judged(timed, order, "B02", "not testable here")
    assert order.missing == "a profile of the article's design: another profiler may hold CUPTI"


def test_a_breakdown_that_does_not_close_is_recorded_so(timed, tiny, monkeypatch):
    monkeypatch.setattr(buckets, "profile", lambda call, passes, warmup: trace({"GEMM": 19.0}, 20.0, spill=1.0))
    study.passes(timed, tiny, 9, ["article"], repeats=3)
    entry, = measured(timed, metric="parts_over_wall")
    assert entry["value"] == pytest.approx(1.05) and entry["status"] == "wrong_result"


def test_slow_passes_are_timed_and_profiled_less_often(timed, pace, monkeypatch):
    calls = Counter()
    slow, fast = (SimpleNamespace(design=SimpleNamespace(name=name)) for name in ("slow", "fast"))
    monkeypatch.setattr(study, "_clocked", lambda lab, call: calls.update([call.design.name]) or (
        (6e5, 6e5) if call is slow else (1e3, 1e3)))
    times = study._in_turns(timed, {"slow": slow, "fast": fast}, 9)
    assert calls == {"slow": 1 + study.SLOW_REPEATS, "fast": 1 + 9}  # one to warm up
    assert times["slow"][0].n == study.SLOW_REPEATS and times["fast"][0].n == 9


# ---- llama.cpp

@pytest.fixture
def llama(timed, monkeypatch):
    """A llama.cpp that gives the logits it is told to."""
    state = SimpleNamespace(logits=None, missing=None, write=None, closed=0)

    class Session:
        def __init__(self, path, tokens):
            state.path, state.tokens = path, tokens

        def __enter__(self):
            return self

        def __exit__(self, *_):
            state.closed += 1

        def prefill(self, ids):
            state.ids = ids

        @property
        def logits(self):
            return state.logits

    def write(path, inventory, weights, origin):
        if state.write:
            raise state.write
        state.origin, state.weights = origin, weights
        return path
    for name, value in (("missing", lambda: state.missing), ("write_gguf", write), ("Session", Session)):
        monkeypatch.setattr(study.llama_cpp, name, value)
    return state


@pytest.fixture(scope="module")
def timed_runs(fake, environment, tiny):
    """Passes of two designs, of 300 and 10 ms."""
    with pytest.MonkeyPatch.context() as patch:
        lab = timed_lab(fake, environment, patch, {"article": 300.0, "tiled_fp32": 10.0})
        return study.passes(lab, tiny, 9, ["article", "tiled_fp32"], repeats=3)


def test_llama_cpp_beside_ours(timed, tiny, timed_runs, llama, pace):
    pace["tiled_fp32"] = 10.0
    llama.logits = timed_runs.expected + 1e-3
    found = study.llama(timed, tiny, timed_runs, repeats=3)
    assert (found.reason, found.timing.median, found.beside.median) == (None, 20e3, 10e3) and llama.closed == 1
    assert np.array_equal(llama.ids, study.prompt(timed, TINY, 9))
    assert (llama.tokens, llama.origin, found.rows[0]["design"]) == (9, "ours, seed 0", "llama.cpp")
    assert found.buckets[0] == {"engine": "llama.cpp", "bucket": "GEMM", "ms": pytest.approx(16.8),
                                "of the pass": pytest.approx(0.84), "launches": 1}
    assert study.LLAMA not in timed_runs.times and timed_runs.best == "tiled_fp32"
    ratio, order = study.gap(timed, timed_runs, found)
    judged(timed, ratio, "B01", "reproduced")
    assert ratio.measured == "15.0x [15.0, 15.0]; best design 0.50 of llama.cpp's time"
    assert ratio.data[-1]["over llama.cpp"] == 1 and ratio.data[1]["over llama.cpp"] == pytest.approx(0.5)
    judged(timed, order, "B02", "reproduced")


def test_the_file_for_llama_cpp_has_the_same_blocks(timed, tiny, timed_runs, llama):
    llama.logits = timed_runs.expected
    study.llama(timed, tiny, timed_runs, repeats=3)
    with study.ThreadPoolExecutor() as pool:
        weights = study._in_blocks(study.llama_cpp.model_weights(tiny), pool)
        for name, layer in (("lm_head", None), ("up", 1), ("o", 3)):
            tiles = study.llama_cpp.model_weights(tiny)(name, layer)
            assert np.array_equal(weights(name, layer), formats.blocks_from_tiles(tiles))
        assert np.array_equal(weights("output_norm", None), timed.backend.numpy(tiny.norm))


@pytest.mark.parametrize("plant, status, reason", [
    (dict(missing="llama.cpp is not built"), "skipped", "llama.cpp is not built"),
    (dict(write=OSError("the disk is full")), "runtime_error", "OSError: the disk is full"),
    (dict(logits=np.full(TINY.vocabulary, 3.0)), "wrong_result", r"its logits are \d\.\d+ from those of article d"),
])
def test_a_llama_cpp_that_fails_costs_nothing_else(timed, tiny, timed_runs, llama, plant, status, reason):
    before = len(performance(timed))
    vars(llama).update(plant)
    found = study.llama(timed, tiny, timed_runs, repeats=3)
    assert re.match(reason, found.reason) and found.timing is None and len(performance(timed)) == before
    assert [m["status"] for m in measured(timed, variant="llama.cpp", metric="time_us")] == [status]
    ratio, order = study.gap(timed, timed_runs, found)
    judged(timed, ratio, "B01", "not testable here")
    assert ratio.missing == f"llama.cpp: {found.reason}" and "30.0 times less" in ratio.evidence
    judged(timed, order, "B02", "direction holds")
    assert "Against tiled_fp32" in order.evidence and "not testable here: " + found.reason in order.evidence


def test_llama_cpp_needs_room_for_a_second_copy(timed, tiny, timed_runs, llama, monkeypatch):
    monkeypatch.setattr(study, "_free_bytes", lambda lab: 1 << 29)
    assert "0.5 GiB free; run fewer layers" in study.llama(timed, tiny, timed_runs).reason


# ---- the gap

@pytest.mark.parametrize("article, llama, verdict", [
    (300.0, 20.0, "reproduced"), (160.0, 20.0, "reproduced"), (140.0, 20.0, "direction holds"),
    (640.0, 20.0, "direction holds"), (20.1, 20.0, "not reproduced"), (10.0, 20.0, "contradicted"),
])
def test_the_ratio(timed, article, llama, verdict):
    found, _ = study.gap(timed, fabricated(article=article, wgmma=13.0), peer(llama, 13.1))
    judged(timed, found, "B01", verdict)
    assert f"{article / llama:.1f} times as long" in found.evidence
    assert f"it takes {13.1 / llama:.2f} of its time" in found.evidence and "layers" not in found.evidence


def test_the_goal_is_missed_above_it(timed):
    for beside, words in ((13.1, "within the goal of 0.66"), (13.3, "above the goal of 0.66")):
        found, _ = study.gap(timed, fabricated(article=300.0, wgmma=13.0), peer(20.0, beside))
        assert words in found.evidence


def test_fewer_layers_are_said(timed):
    found, _ = study.gap(timed, fabricated(layers=16, article=300.0, wgmma=13.0), peer())
    assert "times of 16 of 64 layers; the whole model takes 4 times as long, but for embedding" in found.evidence


def test_without_the_articles_design(timed):
    judged(timed, study.gap(timed, fabricated(wgmma=13.0), peer())[0], "B01", "not reproduced")


ENGINE = {"GEMM": 84.0, "GDN": 12.0, "attention": 3.0}
FAST = {"GEMM": 4.5, "GDN": 1.0, "attention": 0.1}


@pytest.mark.parametrize("engine, llama, verdict", [
    (ENGINE, FAST, "reproduced"),
    (ENGINE, FAST | {"GDN": 3.0}, "direction holds"),                       # 4 times, not 11.6
    (ENGINE | {"GDN": 2.0}, FAST, "direction holds"),                       # attention before GDN
    ({"GEMM": 75.0, "attention": 14.0, "GDN": 11.0}, FAST, "direction holds"),  # the same, at the article's figures
    (ENGINE, None, "direction holds"),                                      # no ratio
    (ENGINE | {"GEMM": 10.0}, FAST, "contradicted"),                        # GDN first, in the pass and in the gap
    (ENGINE | {"attention": 90.0}, FAST, "not reproduced"),
    (ENGINE, FAST | {"GEMM": 80.0}, "not reproduced"),                      # the gap is GDN's
])
def test_the_order_of_buckets(timed, engine, llama, verdict):
    runs = fabricated(article=sum(engine.values()), wgmma=5.0)
    runs.breakdowns.update(article=breakdown(engine), wgmma=breakdown(FAST))
    other = peer(part=breakdown(llama)) if llama else study.Peer("not built")
    _, found = study.gap(timed, runs, other)
    judged(timed, found, "B02", verdict)
    name = "llama.cpp" if llama else "wgmma"
    assert f"Against {name}: " in found.evidence and found.data[-1]["bucket"] == "total"
    assert sum(row["share of the gap"] for row in found.data[:-1]) == pytest.approx(1)


@pytest.mark.parametrize("open_engine", [True, False])
def test_tables_that_do_not_close_say_nothing(timed, open_engine):
    runs = fabricated(article=99.0)
    runs.breakdowns["article"] = breakdown(ENGINE, spill=5.0 if open_engine else 0.0)
    part = breakdown(FAST, spill=0.0 if open_engine else 5.0)
    _, found = study.gap(timed, runs, peer(part=part))
    judged(timed, found, "B02", "not reproduced")
    assert "+5" in found.evidence or "+89" in found.evidence


def test_a_waterfall_adds_up(timed):
    runs = fabricated(article=99.0, wgmma=5.6)
    for profiled in (False, True):
        if profiled:
            runs.breakdowns.update(article=breakdown(ENGINE), wgmma=breakdown(FAST, wall=7.0))
        first, *steps, last = study.waterfall(runs)
        assert first["ms"] + sum(step["ms"] for step in steps) == pytest.approx(last["ms"])
        assert (first["step"], last["step"]) == (("article design", "wgmma") if profiled else
                                                 ("article's engine", "llama.cpp"))
    assert {step["step"]: step["ms"] for step in steps}["idle"] == pytest.approx(1.4)


def test_the_articles_buckets_add_up_to_a_pass():
    rows = study.article_buckets()
    assert {name: sum(row["ms"] for row in rows if row["engine"] == name)
            for name in ("article's engine", "llama.cpp")} == {"article's engine": 1876, "llama.cpp": 123}


def test_roofline_points():
    runs = fabricated(article=99.0, wgmma=5.6)
    runs.breakdowns.update(article=breakdown(ENGINE), wgmma=breakdown(FAST))
    rows = {row["design"]: row for row in study.roofline(runs, peer(part=breakdown({"GEMM": 130.0})))}
    assert rows["wgmma"]["FLOP / byte"] == pytest.approx(32 * rows["article"]["FLOP / byte"])
    assert rows["llama.cpp"]["FLOP / byte"] == rows["wgmma"]["FLOP / byte"] == pytest.approx(1820, rel=1e-3)
    assert rows["llama.cpp"]["TFLOP/s"] == pytest.approx(24.93e12 / 0.130 / 1e12, rel=1e-3)


# ---- launches

def test_launches_predicted_and_counted(lab, simulated):
    _, _, runs = simulated
    found = judged(lab, study.launches(lab, runs), "B11", "reproduced")
    rows = {(row["engine"], row["launches"]): row for row in found.data}
    for what, count in (("products, unchecked instance", 400), ("activations quantized", 496),
                        ("stream-k fixups", 320)):
        assert (rows["llama.cpp", what]["predicted"], rows["llama.cpp", what]["counted"]) == (count, count)
    article = rows["article", "products, q4_explicit_fma"]
    assert article["predicted"] == article["counted"] == 2 * TINY.gemms + 1
    assert "15,872 launches apart and 8,192" in found.evidence and "the article's 9,000 lie between" in found.evidence
    assert "305 norms, 128 gated units and 224" in found.evidence
    assert "Of 5 counts of passes run or recorded here, 5 are as predicted." in found.evidence
    assert "No pass was counted here." in study.launches(lab).evidence


def test_a_count_that_differs(lab, simulated):
    _, _, runs = simulated
    off = replace(runs, launches=runs.launches | {"article": Counter(q4_explicit_fma=60)})
    found = judged(lab, study.launches(lab, off), "B11", "direction holds")
    assert "products, q4_explicit_fma of article, launched, Qwen3.5, tiny: 60 instead of 63" in found.evidence


@pytest.mark.parametrize("plant", [("COUNTED", study.COUNTED | {"stream-k fixups": 480}),
                                   ("ARTICLE_MULTIPROCESSORS", 132), ("ARTICLE_TILE", 64)])
def test_figures_of_the_article_that_do_not_follow(lab, monkeypatch, plant):
    monkeypatch.setattr(study, *plant)
    judged(lab, study.launches(lab), "B11", "not reproduced")


def test_traces_recorded_and_live(timed, monkeypatch):
    monkeypatch.setattr(timed.backend, "multiprocessors", 132)
    file = ROOT / "tests" / "data" / "buckets" / "h200_llama_cpp_kern_sum.csv"
    part, = buckets.analyze(buckets.read(file), buckets.rules(), "3")
    found = judged(timed, study.launches(timed, recorded=[("H200", part, 132)]), "B11", "reproduced")
    expected = predictions.llama_cpp(QWEN3_5_27B, 132)
    assert len(found.data) == 5 + len(expected) and f"{len(expected)} are as predicted" in found.evidence
    found = judged(timed, study.launches(timed, recorded=[("H200", part, 170)]), "B11", "direction holds")
    assert "480 instead of 320" in found.evidence
    runs = fabricated(article=99.0)
    runs.launches["article"] = Counter(q4_explicit_fma=15_873)
    names = ["q4_explicit_fma"] * 3
    runs.breakdowns["article"], = buckets.analyze(Trace("live", "test", tuple(
        Activity(name, MS, 5_291, None, 0) for name in names)), buckets.rules(), "1")
    found = judged(timed, study.launches(timed, runs, peer(part=part)), "B11", "reproduced")
    assert [row["counted"] for row in found.data if row["engine"] == "article"] == [15_873, 15_873]
    assert any(row["where"] == "live, 132 multiprocessors" for row in found.data)


# ---- bytes, bounds, bits

def test_bytes_of_a_pass(timed):
    runs = fabricated(article=2000.0, wgmma=50.0)
    found = judged(timed, study.traffic(timed, runs), "B12", "reproduced")
    assert [row["reads of weights"] for row in found.data] == [32, 16, 8, 4, 1]
    assert found.data[0]["weights, GB"] == pytest.approx(438.3, abs=0.1)
    assert found.data[0]["at the read ceiling, ms"] == pytest.approx(
        (found.data[0]["weights, GB"] + found.data[0]["activations, GB"]) / 4)
    assert "article 219 GB/s, wgmma 274 GB/s" in found.evidence
    assert "L2 of 50 MiB could hold 496 of the 496 weights" in found.evidence


def test_other_rereads_are_another_verdict(lab, monkeypatch):
    monkeypatch.setattr(study, "ARTICLE_TILE", 32)
    found = judged(lab, study.traffic(lab), "B12", "not reproduced")
    assert found.measured == "16x: 219 against 13.7 GB"


def test_bounds_of_the_articles_table(lab):
    found = judged(lab, study.headroom(lab), "B13", "direction holds")
    assert [round(row["bound"], 2) for row in found.data] == [1.62, 2.02]
    assert "9.4 times as fast" in found.evidence and found.measured == "1.62x, with GDN free 2.02x"
    assert [m["value"] for m in measured(lab, metric="bound")] == [row["bound"] for row in found.data]


@pytest.mark.parametrize("parts, speedups, verdict, bound", [
    ({"GEMM": 60.0, "GDN": 30.0, "idle": 10.0}, {"GEMM": 2.0}, "reproduced", 100 / 30),
    ({"GEMM": 95.0, "GDN": 3.0, "idle": 2.0}, {"GEMM": 2.0}, "direction holds", 200 / 95),
    ({"GEMM": 60.0, "GDN": 30.0, "idle": 10.0}, {"GEMM": 6.0}, "contradicted", 10.0),
    ({"GEMM": 95.0, "GDN": 3.0, "idle": 2.0}, None, "direction holds", 100 / 95 * 0.09 / 0.053),
])
def test_bounds_of_this_machine(timed, parts, speedups, verdict, bound):
    wall = sum(parts.values())
    part = breakdown({name: ms for name, ms in parts.items() if name != "idle"}, wall)
    found = judged(timed, study.headroom(timed, part, speedups), "B13", verdict)
    assert found.data[-1]["bound"] == pytest.approx(bound) and found.data[-1]["table"] == "this machine's table"
    gain = found.data[2]["GEMM, times faster"]
    assert found.data[2]["bound"] == pytest.approx(wall / (parts["GEMM"] / gain + parts["GDN"]))


def test_a_speedup_of_no_bucket(timed):
    with pytest.raises(ValueError, match="no part 'gemm' to speed up"):
        study.headroom(timed, breakdown(ENGINE), {"gemm": 2.0})


def test_bits_a_weight(lab):
    found = judged(lab, study.bits(lab), "B15", "direction holds")
    assert [round(row["bits a weight"], 2) for row in found.data] == [4.5, 4.5, 4.5, 4.6]
    assert [row["article"] for row in found.data] == [4.25, 4.25, None, 4.6]
    assert "2.2% as files" in found.evidence and "8.2% printed" in found.evidence


@pytest.mark.parametrize("tile, verdict", [(4.25, "reproduced"), (4.75, "contradicted")])
def test_other_tiles_are_another_verdict(lab, monkeypatch, tile, verdict):
    monkeypatch.setattr(study.article, "tile_bits_per_weight", lambda: tile)
    judged(lab, study.bits(lab), "B15", verdict)


def test_claims_that_counts_alone_can_judge():
    assert {KINDS[claim] for claim in ("B11", "B12", "B13", "B15")} == {"count", "bound"} and KINDS["B01"] == "speed"


# ---- on a GPU

@pytest.mark.gpu
def test_on_a_gpu(gpu):
    record = records.Record("2_prefill_breakdown", {}, records.environment(gpu))
    lab = experiments.Lab(gpu, record)
    runs = study.passes(lab, study.make_model(lab, 4), 128, ["article", "tiled_fp32", "tensor_cores"], repeats=3)
    assert not runs.left_out and set(runs.breakdowns) == set(runs.times) == {"article", "tiled_fp32", "tensor_cores"}
    for part in runs.breakdowns.values():
        assert part.closes and part.unbucketed.time_ms < 0.01 * part.wall_ms, part.unbucketed
    found = judged(lab, study.launches(lab, runs), "B11", "reproduced")
    assert "Of 6 counts" in found.evidence
    for finding in study.gap(lab, runs, study.Peer("not asked for")):
        lab.judge(finding)
