"""The ladder at small sizes on the simulator, and with made-up times: faults are seen, missed goals are said."""

import sys
from dataclasses import replace

import numpy as np
import pytest
import torch

from kernelbook import experiments, notebooks, records, runner, shapes
from kernelbook.backends import BackendUnavailable
from kernelbook.backends.cpu import CpuBackend
from kernelbook.experiments import gemm_ladder as study
from kernelbook.measure import Ceiling
from kernelbook.ops import gemm_dispatch, packed_gemm
from kernelbook.peers import gemm as gemm_peers

CASES = {"rows": (1, 3), "columns": (1, 17), "k_group": ((32, 32), (160, 32), (64, 64))}


class Timed(CpuBackend):
    """Claims to be timed, so that times can be made up."""
    simulated = False
    l2_bytes = 1 << 10


@pytest.fixture
def lab(simulator, environment):
    return experiments.Lab(simulator, records.Record("1_grouped_gemm", {}, environment))


@pytest.fixture
def timed(environment, made_up_times, monkeypatch):
    monkeypatch.setattr(gemm_peers, "activations", lambda peer, x: torch.from_numpy(x))
    monkeypatch.setattr(gemm_peers, "all_peers", lambda: [])
    record = records.Record("1_grouped_gemm", {}, {**environment, "simulated": False})
    ceilings = {name: Ceiling(name, 4000.0, "GB/s", 1, 9e9, 9, "how") for name in ("read", "bf16_matmul")}
    return experiments.Lab(Timed(), record, ceilings=ceilings)


def measured(lab, metric, **fields):
    return [m for m in lab.record.measurements if m["kernel"] == study.KERNEL and m["metric"] == metric
            and all(m[key] == value for key, value in fields.items())]


def projection(n, k, name="q"):
    return shapes.Projection(name, n, k, 1, "x")


def planted(monkeypatch, fault):
    """Every design's output goes through `fault` before it is seen."""
    real = packed_gemm.PackedGemm.prepare

    def prepare(self, x, out=None, **options):
        call = real(self, x, out=out, **options)

        def faulty():
            fault(call(), self)
            return out
        return faulty
    monkeypatch.setattr(packed_gemm.PackedGemm, "prepare", prepare)


# ---- parameters and rungs

@pytest.mark.parametrize("profile", ["smoke", "cpu", "gpu"])
def test_parameters_of_profiles_can_be_used(profile):
    defaults = {name: p.default for name, p in notebooks.parameters(notebooks.FOLDER / "1_grouped_gemm.ipynb").items()}
    job, = runner.plan(profile, ["1_grouped_gemm"])
    study.check_parameters(**{name: value for name, value in (defaults | job.parameters).items()
                              if name.startswith("ladder_")})


@pytest.mark.parametrize("given, message", [
    ({"ladder_rows": []}, "ladder_rows is empty"), ({"ladder_rows": [1, 0]}, "ladder_rows: 0; expected 1 to 65536"),
    ({"ladder_peer_shapes": 11}, "ladder_peer_shapes: 11; expected 0 to 10"),
    ({"ladder_peer_shapes": -1}, "ladder_peer_shapes: -1")])
def test_parameters_that_cannot_be_used_are_named(given, message):
    with pytest.raises(ValueError, match=message):
        study.check_parameters(**{"ladder_rows": [1], "ladder_peer_shapes": 1} | given)


def test_projections_are_the_named_shapes_once_each():
    found = [(p.n, p.k) for p in study.projections()]
    assert found[:5] == [(17408, 5120), (10240, 5120), (12288, 5120), (5120, 17408), (5120, 6144)]
    assert set(found[5:]) == {(p.n, p.k) for p in shapes.QWEN3_VL_2B} and len(set(found)) == len(found)


def test_rungs_tell_what_their_files_say():
    found = study.rungs()
    assert found[0].designs == (study.ARTICLE,)
    assert sum(len(rung.designs) for rung in found[1:]) == len(packed_gemm.DESIGNS)
    for rung in found[1:]:
        assert rung.idea.endswith(".") and len(rung.idea) > 20 and rung.prediction, rung.path
    assert {study.design_of(name) for rung in found[1:] for name in rung.designs} == packed_gemm.DESIGNS.keys()


def test_a_header_is_read_as_it_stands(tmp_path):
    path = tmp_path / "9_idea.cu"
    path.write_text("// 9. One idea (kernelbook.formats),\n// in two lines. More of it.\n//\n// Prediction: 30 us,\n"
                    "// more.\n// Outcome: 29.5 us.\n// Taught: less is\n// more.\n//\n//   GROUP  of codes\n"
                    "#include <x>\n// Outcome: not this\n")
    rung = study._rung(str(path), ("9_a",))
    assert (rung.idea, rung.prediction, rung.outcome, rung.lesson) == (
        "One idea (kernelbook.formats), in two lines.", "30 us, more.", "29.5 us.", "less is more.")
    path.write_text("// 9. Idea.\n//\n// Predicted: fast.\n//\n// There is no more.\nint x;\n")
    rung = study._rung(str(path), ())
    assert (rung.idea, rung.prediction, rung.outcome, rung.lesson) == ("Idea.", "fast.", "", "")
    path.write_text("// 9. Idea.\n//\n// Predicted: fast.\n// Outcome (a card, cold;\n// W8): slow.\nint x;\n")
    rung = study._rung(str(path), ())
    assert (rung.prediction, rung.outcome) == ("fast.", "a card, cold; W8: slow.")


# ---- the selftest

def test_selftest_runs_every_design_that_can_run_twice(lab):
    found = study.selftest(lab, **CASES)
    able = {name for name, design in packed_gemm.DESIGNS.items()
            if design.why_not(lab.backend, gemm_dispatch.Weight(64, 64, "int8"), 1) is None}
    assert {study.design_of(name) for name, _, _ in found.worst} == able and len(able) > 2
    assert {study.design_of(name) for name in found.skipped} == packed_gemm.DESIGNS.keys() - able
    assert found.failures == found.unequal == 0 and found.cases >= len(able) * 12
    assert all(0 <= error <= found.bounds[name] for (name, _, _), error in found.worst.items())
    kept = measured(lab, "selftest_relative_frobenius", status="passed")
    assert {(m["variant"], m["case"]["codes"], m["case"]["M"]) for m in kept} == found.worst.keys()
    assert all(m["reason"] for m in measured(lab, "selftest_relative_frobenius", status="skipped"))
    assert "0 beyond their bound" in str(found)


def unwritten(out, gemm):
    if out.shape[1] > 1:
        out[:, -1] = np.nan


def coarse(out, gemm):
    out *= np.float32(1.005)


@pytest.mark.parametrize("fault", [unwritten, coarse])
def test_a_wrong_design_fails_the_selftest(lab, monkeypatch, fault):
    planted(monkeypatch, fault)
    found = study.selftest(lab, **CASES)
    assert found.failures >= len({name for name, _, _ in found.worst})
    wrong = measured(lab, "selftest_relative_frobenius", status="wrong_result")
    assert {m["variant"] for m in wrong} == {name for name, _, _ in found.worst}
    goal = study.correctness(found, study.Ladder())[0]
    assert goal.met is False and goal.figure == found.failures and goal.worst
    assert study.correctness(found, study.Ladder())[1].met is None


def test_bits_that_differ_between_runs_are_counted(lab, monkeypatch):
    count = iter(range(10**6))

    def shaky(out, gemm):
        out[0, 0] = np.nextafter(out[0, 0], np.float32(np.inf if next(count) % 2 else -np.inf), dtype=np.float32)
    planted(monkeypatch, shaky)
    found = study.selftest(lab, **CASES)
    assert found.unequal > 0 and found.failures == 0
    assert measured(lab, "repeats_with_other_bits")[0]["value"] == found.unequal
    assert study.correctness(found, study.Ladder())[2].met is False


def test_a_design_that_finds_something_missing_when_it_prepares_is_skipped(lab, timed, monkeypatch):
    real = packed_gemm.PackedGemm.prepare

    def prepare(self, x, **given):
        if self.design.startswith("ring"):
            raise BackendUnavailable("the driver has no tensor maps")
        return real(self, x, **given)
    monkeypatch.setattr(packed_gemm.PackedGemm, "prepare", prepare)
    tested, found = study.selftest(lab, **CASES), study.ladder(timed, SHAPES[:1], [1], precisions=["int8"])
    ring = {study.variant(name) for name in packed_gemm.DESIGNS if name.startswith("ring")}
    assert {name for name in ring if tested.skipped[name] == "the driver has no tensor maps"} == ring
    assert not ring & {p.variant for p in found.points} and len(found.points) > 2
    assert {m["variant"] for m in measured(timed, "time_us", status="skipped")} == ring


# ---- the ladder

SHAPES = [projection(48, 96), projection(80, 64), projection(70, 64, "lm_head")]


def test_without_a_gpu_there_are_errors_and_no_times(lab):
    found = study.ladder(lab, SHAPES, [1, 4, 2048])
    assert found.points == [] and found.wrong == [] and found.unequal == 0
    assert {row["M"] for row in found.errors} == {1, 4} and study.ARTICLE in {r["variant"] for r in found.errors}
    assert {row["shape"] for row in found.errors} == {"48 x 96", "64 x 64"}  # at most 64 columns, each K once
    assert measured(lab, "time_us") == [] and study.empty_launch(lab) is None
    assert all(row["within it"] for row in found.worst_errors())
    assert study.compile_peers(lab, SHAPES, [1]) == []


def peer(name, compute, bits=8):
    def prepare(weights, group, copies):
        assert isinstance(weights, torch.Tensor) and group == 32
        return [lambda x: compute(x, weights)] * copies
    return gemm_peers.Peer(name, bits, "float32", None, prepare)


def broken(x, w):
    raise RuntimeError("no kernel image for this device")


@pytest.fixture
def peers(monkeypatch):
    known = [peer("right", lambda x, w: x @ w.T), peer("wrong", lambda x, w: x @ w.T * 1.05), peer("broken", broken),
             peer("of 16 bits", lambda x, w: x @ w.T, bits=16), peer("of 4 bits", lambda x, w: x @ w.T, bits=4),
             gemm_peers.Peer("unprepared", 8, "float32", None, broken),
             gemm_peers.Peer("absent", 8, "float16", "it does not import", None)]
    monkeypatch.setattr(gemm_peers, "all_peers", lambda: known)


def test_all_that_is_right_is_timed_together_with_its_peers(timed, peers, pace):
    pace |= {"right": 20, "of 16 bits": 7}
    found = study.ladder(timed, SHAPES, [1, 33, 65], peer_shapes=2)
    assert found.wrong and all(words.startswith("wrong on ") for words in found.wrong)
    by = {key: {p.variant for p in cell} for key, cell in study._cells(found.points).items()}
    assert {"right", "of 16 bits"} <= by["48 x 96", "int8", 1] and "right" not in by["48 x 96", "int4", 1]
    assert study.ARTICLE in by["48 x 96", "int8", 1] and study.ARTICLE not in by["48 x 96", "int8", 33]
    assert "right" not in by["70 x 64", "int8", 1] and ("70 x 64", "int8", 33) not in by, "few peers, lm_head"
    reasons = {m["variant"]: (m["status"], m["reason"]) for m in measured(timed, "time_us") if m["value"] is None}
    assert reasons == {"absent": ("skipped", "it does not import"),
                       "broken": ("runtime_error", "RuntimeError: no kernel image for this device"),
                       "unprepared": ("runtime_error", reasons["unprepared"][1])}
    assert {p.accuracy for p in found.points if p.variant == "right"} == {None}
    # bandwidth for few rows, operations for many
    assert {m["case"]["M"] for m in measured(timed, "bandwidth_gbs")} == {1, 33}
    assert {m["case"]["M"] for m in measured(timed, "throughput_tflops")} == {65}
    one = next(p for p in found.points if (p.variant, p.shape, p.m) == ("right", "48 x 96", 1))
    assert one.us == 20 and one.gbs == pytest.approx((48 * 96 + 48 * 3 * 2 + 2 * (48 + 96)) / 20e3)
    ours = next(p for p in found.points if p.accuracy == "accurate" and p.variant != study.ARTICLE
                and (p.shape, p.codes, p.m) == ("48 x 96", "int4", 1))
    assert ours.gbs == pytest.approx((48 * 96 / 2 + 48 * 3 * 2 + 4 * (48 + 96)) / 10e3)
    # what a record keeps gives the same points
    kept = study.points({"measurements": timed.record.measurements})
    assert sorted(map(repr, kept)) == sorted(map(repr, found.points))


def test_where_power_is_the_limit_the_device_rests_after_each_sample(timed, peers, monkeypatch):
    rests, made_up = [], study.measure.device_times

    def times(contenders, **options):
        rests.append(options["rest"])
        return made_up(contenders, **options)
    monkeypatch.setattr(study.measure, "device_times", times)
    study.ladder(timed, SHAPES[:1], [1, 64, 65, 512], precisions=["int8"])
    assert rests == [0, 0, study.measure.REST, study.measure.REST]


def test_a_wrong_design_has_no_time_and_is_named(timed, monkeypatch):
    planted(monkeypatch, unwritten)
    found = study.ladder(timed, SHAPES[:1], [1, 2], precisions=["int8"])
    assert {p.variant for p in found.points} == {study.ARTICLE}
    assert {words.split(" on ")[0] for words in found.wrong} == {
        study.variant(name) + how for name, d in packed_gemm.DESIGNS.items()
        if d.why_not(timed.backend, gemm_dispatch.Weight(48, 96, "int8"), 1) is None
        for how in ("", ", overlapped")[:1 + d.overlaps]}
    assert all(m["value"] is None for m in measured(timed, "relative_frobenius", status="wrong_result"))
    assert study.correctness(study.Selftest(), found)[1].met is False


def test_what_another_contender_left_is_no_result(timed, monkeypatch):
    monkeypatch.setattr(packed_gemm.PackedGemm, "prepare", lambda self, x, *, out, overlap: lambda: out)
    found = study.ladder(timed, SHAPES[:1], [1], precisions=["int8"])
    assert {p.variant for p in found.points} == {study.ARTICLE} and len(found.wrong) == len(found.errors) - 1


def test_a_column_beyond_those_compared_must_be_finite(timed, monkeypatch):
    def middle(out, gemm):
        out[:, 300] = np.nan
    planted(monkeypatch, middle)
    found = study.ladder(timed, [projection(600, 32)], [1], precisions=["int8"])
    assert found.wrong and {p.variant for p in found.points} == {study.ARTICLE}


def test_an_empty_launch_is_timed(timed, pace):
    pace[study.EMPTY] = 1.5
    assert study.empty_launch(timed).median == 1.5
    assert measured(timed, "time_us", variant=study.EMPTY)[0]["value"] == 1.5


def test_peers_that_compile_do_so_in_processes_of_their_own(timed, monkeypatch):
    monkeypatch.setattr(gemm_peers, "all_peers", lambda: [
        gemm_peers.Peer("humming_int8", 8, "float16", None, None), gemm_peers.Peer("cublas_bf16", 16, "x", None, None),
        gemm_peers.Peer("humming_int4", 4, "float16", "absent", None)])
    started = []

    def run(command, **options):
        started.append(command)
        if "80, 64" in command[-1]:
            raise study.subprocess.CalledProcessError(1, "it")
    monkeypatch.setattr(study.subprocess, "run", run)
    failures = study.compile_peers(timed, SHAPES, [1, 64])
    assert sorted(command[-1].partition("g.")[2] for command in started) == [
        f"call_peer('humming_int8', {n}, {k}, {rows})" for n, k, rows in
        ((48, 96, [1, 64]), (70, 64, [1]), (80, 64, [1, 64]))]
    assert {command[0] for command in started} == {sys.executable}
    assert len(failures) == 1 and "humming_int8 for 80 x 64" in failures[0]


# ---- what it comes to

def point(us, variant="6_ring", accuracy="accurate", n=17408, k=5120, m=1, codes="int8", gbs=None, overlapped=False):
    return study.Point(n, k, m, codes, variant, accuracy, us, us * 0.99, us * 1.01, gbs, overlapped)


def beside(us, variant="humming_int8", **of):
    return point(us, variant, None, **of)


def test_standings_and_words():
    found = [point(10.0), point(12.0, "4_wide"), beside(20.0), beside(30.0, "cublas_bf16"), point(9.0, m=2),
             point(11.0, m=4), beside(10.0, m=4), beside(5.0, m=8)]
    rows = study.standings(found)
    assert [(row.ours.variant, row.peer.variant, row.ratio) for row in rows] == [
        ("6_ring", "humming_int8", 0.5), ("6_ring", "humming_int8", 1.1)]
    assert study.standing_table(found) == [{"N x K": "17408 x 5120", "codes": "int8", "M = 1": 0.5, "M = 4": 1.1}]
    words = study.against_peers(found)
    assert "0.50 to 1.10 times" in words and words.endswith(
        "It is slower on 1: 17408 x 5120, int8, M = 4, 1.10 times humming int8.")
    assert "slower nowhere" in study.against_peers(found[:4]) and "No peer" in study.against_peers(found[:2])
    many = [p for m in range(1, 13) for p in (point(10.0 + m, m=m), beside(10.0, m=m))]
    assert study.against_peers(many).endswith("; on the others by at most 40%.")
    assert study.best_table([point(10.0, gbs=3000.0), point(20.0, m=512)]) == [{
        "N x K": "17408 x 5120", "codes": "int8", "M = 1": "6 ring: 3.00 TB/s",
        "M = 512": f"6 ring: {2 * 512 * 17408 * 5120 / 20e6:.0f} TFLOP/s"}]


def test_launches_that_overlap_stand_beside_those_that_do_not():
    found = [point(12.0, gbs=2500.0), point(8.0, gbs=4000.0, overlapped=True), beside(10.0)]
    words = study.against_peers(found)
    assert words.startswith("With launches that overlap: our fastest design takes 0.80 to 0.80")
    assert words.endswith("It is slower on 1: 17408 x 5120, int8, M = 1, 1.20 times humming int8.")
    assert "one after the other: our fastest design takes 1.20 to 1.20" in words
    assert study.overlap_table(found) == [{"N x K": "17408 x 5120", "codes": "int8", "M = 1": "8 of 12 us"}]
    assert study.overlap_table(found[:1]) == []
    assert study.best_table(found)[0]["M = 1"] == "6 ring, overlapped: 4.00 TB/s"
    assert [row["design"] for row in study.rung_table([point(12.0), point(8.0, overlapped=True), beside(10.0)])] == [
        "6 ring", "6 ring, overlapped", "humming int8"]
    goal = study.goals(found, 4000.0, 2.0)[0]
    assert (goal.met, goal.figure, goal.alone) == (True, 4.0, 2.5)
    assert goal.row()["with no overlap"] == "NO, 2.5" and "6 ring, overlapped" in goal.worst


def test_every_variant_on_one_shape():
    found = [beside(9.0), point(10.0, gbs=3000.0), point(9.0, "4_wide", codes="int4"), point(5.0, n=64)]
    assert [(row["design"], row["codes"]) for row in study.rung_table(found)] == [
        ("6 ring", "int8"), ("humming int8", "int8"), ("4 wide", "int4")]
    assert study.rung_table(found)[0]["M = 1"] == "3.00 TB/s"


def test_the_price_of_accuracy():
    found = [point(12.0), point(10.0, "6_ring_f16", "f16"), point(15.0, n=64),
             point(10.0, "7_wgmma_bf16", "bf16", n=64), point(3.0, m=2), beside(1.0)]
    assert study.price_of_accuracy(found) == [
        {"codes": "int8", "M": 1, "shapes": 2, "least": 1.2, "median": 1.35, "most": 1.5}]


def all_met():
    """Points by which every goal is met."""
    found = []
    for p in study.projections():
        for codes in ("int8", "int4"):
            for m in (1, 2, 32, 64, 512, 2048):
                if p.name == "lm_head" and m > 32:
                    continue
                us = 2 * m * p.n * p.k / 1e6 / 730 if m > 64 else p.n * p.k / 3.6e6
                at = {"n": p.n, "k": p.k, "m": m, "codes": codes}
                found += [point(us, gbs=3600.0 if m <= 64 else None, **at),
                          beside(us * 1.1, f"humming_{codes}", gbs=3000.0 if m <= 64 else None, **at)]
    return found


def test_goals_that_are_met():
    goals = study.goals(all_met(), 4000.0, 2.0)
    assert [goal.met for goal in goals] == [True] * 10, [goal.row() for goal in goals]
    assert goals[0].row()["worst case"] == "3.6 TB/s" and goals[0].row()["met"] == "yes"
    assert goals[0].span == "5 of 5; 3.6 to 3.6" and "lm_head" not in goals[0].worst


def change(found, where, **to):
    changed = [replace(p, **to) if where(p) else p for p in found]
    assert changed != found
    return changed


@pytest.mark.parametrize("number, where, to, worst", [
    (0, lambda p: p.ours and p.m == 1 and p.codes == "int8" and p.n == 10240, {"gbs": 3400.0}, "10240 x 5120, int8"),
    (0, lambda p: p.ours and p.m == 1 and p.codes == "int8" and p.n == 10240, {"accuracy": "f16"}, "none of ours"),
    (1, lambda p: p.ours and p.m == 1 and p.codes == "int4" and p.n == 151936, {"gbs": 2900.0}, "151936 x 2048, int4"),
    (2, lambda p: p.ours and p.m == 1 and p.n == 1024, {"us": 1e3}, "1024 x 2048"),
    (2, lambda p: p.ours and p.m == 1 and p.n == 1024, {"accuracy": "f16"}, "none of ours"),
    (3, lambda p: p.ours and p.m == 32 and p.codes == "int8", {"gbs": 3200.0}, "M = 32"),
    (4, lambda p: p.ours and p.m == 2 and p.codes == "int4", {"gbs": 2600.0}, "M = 2"),
    (5, lambda p: not p.ours and p.m == 32 and p.n == 2048, {"us": 0.1}, "2048 x "),
    (6, lambda p: p.ours and p.m == 512 and p.k == 17408, {"us": 1e3}, "5120 x 17408"),
    (7, lambda p: not p.ours and p.m == 512 and p.n == 6144, {"us": 0.1}, "against humming"),
    (8, lambda p: not p.ours and p.m == 2048 and p.n == 6144, {"us": 1.0, "variant": "cublas_bf16"}, "cublas bf16"),
    (9, lambda p: p.ours and p.m == 1 and p.n == 1024, {"us": 99.0, "gbs": 36.0}, "1024 x 2048"),
])
def test_a_goal_that_is_missed_names_its_worst_case(number, where, to, worst):
    goal = study.goals(change(all_met(), where, **to), 4000.0, 2.0)[number]
    assert goal.met is False and goal.row()["met"] == "NO" and worst in goal.worst, goal


def test_three_percent_are_no_miss_from_64_rows_on():
    found = change(all_met(), lambda p: not p.ours and p.m == 64, us=1.0)
    found = change(found, lambda p: p.ours and p.m == 64, us=1.025)
    assert study.goals(found, 4000.0, 2.0)[8].met and not study.goals(
        change(found, lambda p: p.us == 1.025, us=1.035), 4000.0, 2.0)[8].met


def test_what_was_not_measured_is_neither_met_nor_missed(timed):
    goals = study.goals([], None, None) + study.correctness(study.Selftest(), study.Ladder())
    assert {goal.met for goal in goals} == {None} and {goal.row()["met"] for goal in goals} == {"-"}
    study.record_goals(timed, goals)
    assert measured(timed, "goal_met") == []


def test_goals_are_kept_and_come_back_from_a_record(timed, peers, pace):
    pace |= {study.EMPTY: 1.5}
    found = study.ladder(timed, SHAPES, [1, 2])
    empty = study.empty_launch(timed)
    goals = study.goals(found.points, 4000.0, empty.median)
    study.record_goals(timed, goals + [study.Goal("a", 1.0, False, "x", float("inf"))])
    timed.record.measure(kernel="ceilings", variant="read", case={}, metric="bandwidth_gbs", value=4000.0, cache=None)
    assert study.goals_of_record({"measurements": timed.record.measurements}) == goals
    assert len(measured(timed, "goal_met")) == 1 + sum(goal.met is not None for goal in goals)
    assert study.goals_of_record({"measurements": []}) == []


def test_choices_tell_designs_by_rows_and_why(lab):
    found = study.choices(lab, [projection(64, 64)], [1, 64, 4096])
    assert {(row["codes"], row["class"]) for row in found} == {
        (codes, accuracy) for codes in ("int8", "int4") for accuracy in gemm_dispatch.ACCURACY}
    assert all("up to " in row["designs by M"] and row["why, at the first M"] for row in found)
