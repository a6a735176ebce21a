import json
from dataclasses import replace

import pytest

from kernelbook.buckets import Activity, Mark, Trace, amdahl, analyze, compare, read, rules, side_by_side

MS = 1_000_000


def timeline(*launches, marks=(), **more):
    """A trace of (name, start, end[, stream[, device]]) in ms."""
    activities = []
    for name, start, end, *place in launches:
        stream, device = (*place, *(7, 0)[len(place):])
        activities.append(Activity(name, round((end - start) * MS), 1, round(start * MS), device, stream))
    spans = tuple(Mark("pass", round(start * MS), round(end * MS)) for start, end in marks)
    return Trace("t.json", "test", tuple(activities), spans, **more)


def one(trace, *arguments, **options):
    part, = analyze(trace, rules(), *arguments, **options)
    return part


def times(part):
    return {bucket.name: bucket.time_ms for bucket in part.buckets}


def test_the_buckets_of_an_h200_come_out(data):
    part = one(read(data / "h200_llama_cpp_kern_sum.csv"))
    table = {bucket.name: (round(bucket.time_ms, 1), bucket.launches) for bucket in part.buckets}
    assert table == {"GEMM": (130.7, 1474), "GDN": (29.1, 96), "norm/act": (10.8, 849), "copies": (3.6, 251),
                     "attention": (1.0, 48)}
    assert part.passes.count == 3 and round(part.sum_ms, 1) == 175.1 and not part.unbucketed.kernels
    assert part.wall_ms is part.idle_ms is part.closes is None


def test_a_profile_of_several_passes_is_not_read_as_one(data):
    trace = read(data / "h200_llama_cpp_kern_sum.csv")
    assert one(trace, "1").sum_ms == pytest.approx(3 * one(trace).sum_ms)
    assert any("passes were not counted but assumed" in warning for warning in one(trace).warnings)
    assert not any("assumed" in warning for warning in one(trace, "kernel:mul_mat_vec_q").warnings)


def test_overlapping_streams_are_counted_once_with_the_sum_beside():
    part = one(timeline(("q4_a", 0, 4), ("q4_b", 2, 6, 13), ("gated_delta_x", 5, 8, 13), ("odd", 8, 9)), "1")
    assert times(part) == {"GEMM": 6, "GDN": 3}
    assert [bucket.sum_ms for bucket in part.buckets] == [8, 3]
    assert (part.sum_ms, part.busy_ms, part.overlap_ms, part.idle_ms, part.wall_ms) == (12, 9, 1, 0, 9)
    assert part.closes and part.residual_ms == 0
    assert sum(part.parts.values()) == part.wall_ms and part.parts["overlap"] == -1


def test_idle_time_lies_between_kernels_and_up_to_the_marks():
    part = one(timeline(("q4_a", 2, 4), ("q4_a", 5, 6), ("q4_a", 12, 14), ("q4_a", 15, 16), marks=[(0, 8), (10, 18)]))
    assert (part.passes.count, part.wall_ms, part.busy_ms, part.idle_ms) == (2, 8, 3, 5) and part.closes
    whole = one(timeline(("q4_a", 2, 4), ("q4_a", 5, 6), ("q4_a", 12, 14), ("q4_a", 15, 16)), "2")
    assert (whole.wall_ms, whole.idle_ms) == (7, 4)


def test_unbucketed_kernels_are_listed_with_their_times():
    part = one(timeline(("q4_a", 0, 4), ("odd", 4, 5), ("odd", 5, 6), ("odder", 6, 9)), "1")
    assert [(k.name, k.sum_ms, k.launches) for k in part.unbucketed.kernels] == [("odder", 3, 1), ("odd", 2, 2)]
    assert part.closes and part.parts["unbucketed"] == 5


def test_kernels_that_run_beyond_their_marks_do_not_close():
    part = one(timeline(("q4_a", 1, 9), ("q4_a", 11, 24), marks=[(0, 10), (10, 20)]))
    assert part.closes is False and part.residual_ms == 2
    assert any("2 ms, 20.0%, above the wall time of 10 ms a pass; kernels ran beyond" in w for w in part.warnings)


def test_within_one_percent_it_closes():
    assert one(timeline(("q4_a", 0, 10.09), marks=[(0, 10)])).closes
    assert one(timeline(("q4_a", 0, 10.11), marks=[(0, 10)])).closes is False


def test_work_outside_the_marks_is_said_and_in_no_bucket():
    part = one(timeline(("q4_a", 0, 1), ("q4_a", 2, 4), ("q4_a", 9, 12), marks=[(2, 5)]))
    assert times(part) == {"GEMM": 2} and part.outside.sum_ms == 4 and part.closes
    assert any("2 launches (4 ms in all) lie in none of the marks 'pass'" in warning for warning in part.warnings)


def test_nothing_within_the_marks_is_an_error():
    with pytest.raises(ValueError, match="nothing ran on a GPU within the 1 marks 'pass'.*synchronize"):
        one(timeline(("q4_a", 6, 7), marks=[(2, 5)]))


def test_a_wall_time_of_another_run_does_not_close():
    trace = timeline(("q4_a", 0, 183))
    assert one(trace, "1", wall_ms=182).closes
    part = one(trace, "1", wall_ms=177)
    assert part.closes is False and part.residual_ms == 6
    warning, = part.warnings
    assert "3.4%, above the wall time of 177 ms" in warning and "another run" in warning


def test_a_table_closes_only_against_a_wall_time_and_never_below_its_sum(data):
    trace = read(data / "h200_llama_cpp_kern_sum.csv")
    assert one(trace, "3", wall_ms=177).idle_ms == pytest.approx(177 - 175.057)
    assert one(trace, "3", wall_ms=177).closes is None  # idle is what is left, so nothing is checked
    short = one(trace, "3", wall_ms=123)
    assert short.closes is False and short.residual_ms == pytest.approx(52.057) and short.idle_ms == 0


@pytest.mark.parametrize("wall_ms", [0, -1, float("nan"), float("inf")])
def test_a_wall_time_is_above_0(wall_ms):
    with pytest.raises(ValueError, match="expected one above 0"):
        one(timeline(("q4_a", 0, 1)), "1", wall_ms=wall_ms)


def test_several_gpus_each_on_its_own():
    zero, two = analyze(timeline(("q4_a", 0, 4, 7, 0), ("q4_a", 1, 3, 7, 2), ("odd", 3, 9, 7, 2)), rules(), "1")
    assert (zero.device, zero.wall_ms, two.device, two.wall_ms) == (0, 4, 2, 8)
    assert times(two) == {"GEMM": 2} and two.unbucketed.time_ms == 6 and two.overlap_ms == 0


def test_a_gpu_without_work_in_the_marks_does_not_hide_the_other():
    zero, one_ = analyze(timeline(("q4_a", 1, 2, 7, 0), ("q4_a", 7, 8, 7, 1), marks=[(0, 4)]), rules())
    assert zero.closes and not one_.kernels and one_.outside.launches == 1


def test_kernels_that_do_not_divide_by_the_passes_are_said():
    part = one(timeline(("q4_a", 0, 1), ("q4_a", 1, 2), ("q4_b", 2, 3)), "2")
    assert any("1 kernels did not run equally often in 2 passes (such as q4_b, 0.5 a pass)" in w for w in part.warnings)


def test_what_the_trace_warns_of_stays():
    assert one(replace(timeline(("q4_a", 0, 1)), warnings=("rows are missing",)), "1").warnings == ("rows are missing",)


def test_all_figures_go_into_json():
    plain = json.loads(json.dumps(one(timeline(("q4_a", 0, 4), ("odd", 4, 5)), "1").to_dict(), allow_nan=False))
    assert plain["buckets"][0]["kernels"] == [{"name": "q4_a", "sum_ms": 4, "launches": 1}] and plain["closes"] is True


def test_side_by_side_adds_up_to_the_gap():
    slow = one(timeline(("q4_a", 0, 150), ("gated_delta_x", 150, 180), marks=[(0, 200)]))
    fast = one(timeline(("q4_a", 0, 10), ("gated_delta_x", 10, 15), ("odd", 15, 16), marks=[(0, 20)]))
    lines = {line.name: line for line in side_by_side(slow, fast)}
    assert list(lines) == ["GEMM", "GDN", "idle", "unbucketed", "total"]
    assert (lines["GEMM"].ratio, lines["GEMM"].share) == pytest.approx((15, 140 / 180))
    assert (lines["total"].ratio, lines["total"].share) == (10, 1)
    assert sum(line.share for name, line in lines.items() if name != "total") == pytest.approx(1)
    assert lines["unbucketed"].ratio == 0 and lines["unbucketed"].share == pytest.approx(-1 / 180)


def test_side_by_side_of_a_table_and_a_timeline_leaves_idle_out(data):
    table = one(read(data / "h200_llama_cpp_kern_sum.csv"))
    live = one(timeline(("q4_a", 1, 100), marks=[(0, 200)]))
    lines = {line.name: line for line in side_by_side(live, table)}
    assert "idle" not in lines and lines["total"].a == 99 and lines["total"].b == pytest.approx(175.057)


def test_totals_known_apart_leave_a_rest():
    lines = {line.name: line for line in compare({"GEMM": 9}, {"GEMM": 3}, totals=(10, 3))}
    assert (lines["rest"].a, lines["rest"].b, lines["rest"].ratio) == (1, 0, None)
    assert lines["GEMM"].share == pytest.approx(6 / 7)
    assert [line.share for line in compare({"a": 1}, {"a": 1})] == [None, None]


def test_amdahl():
    parts = {"GEMM": 84.0, "GDN": 12.0, "rest": 4.0}
    assert amdahl(parts, {"GEMM": 2}) == pytest.approx(100 / 58)
    assert amdahl(parts, {"GEMM": 1.7, "rest": float("inf")}) == pytest.approx(100 / (84 / 1.7 + 12))
    for speedups, message in (({"gemm": 2}, "no part 'gemm'"), ({"GEMM": 0}, "a speedup of 0"),
                              ({"GEMM": float("nan")}, "a speedup of nan"),
                              (dict.fromkeys(parts, float("inf")), "no bound")):
        with pytest.raises(ValueError, match=message):
            amdahl(parts, speedups)
