"""What all experiments share: recording of errors, times and verdicts."""

import numpy as np
import pytest

from kernelbook import experiments, records
from kernelbook.measure import Ceiling, Timing
from kernelbook.peers import gemm


@pytest.fixture
def lab(simulator):
    return experiments.Lab(simulator, records.Record("1_grouped_gemm", {}, records.environment(simulator)), seed=3)


def figures(lab, **wanted):
    return {m["metric"]: m for m in lab.record.measurements if all(m[key] == value for key, value in wanted.items())}


def test_errors_within_the_bound_pass(lab):
    e = lab.errors("k", "v", {"M": 1}, [1.0, 2.0], [1.0, 2.0 + 1e-7], 5e-7)
    assert 0 < e.relative_frobenius < 1e-7
    found = figures(lab)
    assert found.keys() == {"relative_frobenius", "max_abs", "rms", "cosine", "nonfinite"}
    assert {m["status"] for m in found.values()} == {"passed"}
    assert found["relative_frobenius"]["value"] == e.relative_frobenius


def test_errors_beyond_the_bound_are_a_wrong_result_with_its_reason(lab):
    lab.errors("k", "v", {}, [1.0, 2.0], [1.0, 2.1], 5e-7)
    assert {m["status"] for m in figures(lab).values()} == {"wrong_result"}
    assert "exceeds 5e-07" in figures(lab)["rms"]["reason"]


def test_an_output_that_is_not_finite_is_wrong_and_counted(lab):
    lab.errors("k", "v", {}, [np.nan, 2.0, np.inf], [1.0, 2.0, 3.0], 1e9)
    found = figures(lab)
    assert {m["status"] for m in found.values()} == {"wrong_result"}
    assert found["nonfinite"]["value"] == 2 and found["relative_frobenius"]["value"] is None


def test_what_is_not_finite_beside_the_compared_part_is_wrong_and_counted(lab):
    e = lab.errors("k", "v", {}, [1.0, np.nan], [1.0, 2.0], 1e9, nonfinite_elsewhere=3)
    assert (e.relative_frobenius, e.nonfinite) == (np.inf, 4)
    e = lab.errors("k", "w", {}, [1.0, 2.0], [1.0, 2.0], 1e9, nonfinite_elsewhere=1)
    assert (e.relative_frobenius, e.nonfinite) == (np.inf, 1), "the compared part alone is right"
    found = figures(lab, variant="w")
    assert {m["status"] for m in found.values()} == {"wrong_result"}
    assert found["nonfinite"]["value"] == 1 and found["relative_frobenius"]["value"] is None


CEILINGS = {"read": Ceiling("read", 400.0, "GB/s", 390, 410, 9, "how"),
            "bf16_matmul": Ceiling("bf16_matmul", 8.0, "TFLOP/s", 7, 9, 9, "how")}


def test_rates_and_fractions_follow_from_a_time(lab):
    lab.ceilings = CEILINGS
    lab.record.environment["simulated"] = False
    timing = Timing(median=20.0, p10=10.0, p90=40.0, n=7)
    lab.time("k", "v", {"M": 1}, timing, "cold", nbytes=2_000_000, flop=40_000_000)
    found = figures(lab)
    expected = {"time_us": (20, 10, 40), "bandwidth_gbs": (100, 50, 200), "throughput_tflops": (2, 1, 4),
                "fraction_of_read": (0.25, 0.125, 0.5), "fraction_of_bf16_matmul": (0.25, 0.125, 0.5)}
    assert found.keys() == expected.keys()
    for metric, (value, low, high) in expected.items():
        m = found[metric]
        assert (m["value"], m["p10"], m["p90"]) == pytest.approx((value, low, high)), metric
        assert (m["n"], m["cache"], m["host"]) == (7, "cold", False)


@pytest.mark.parametrize("cache", ["warm", None])
def test_only_what_memory_gave_has_a_bandwidth(lab, cache):
    lab.ceilings = CEILINGS
    lab.record.environment["simulated"] = False
    lab.time("k", "v", {}, Timing(20.0, 10.0, 40.0, 7), cache, nbytes=2_000_000, flop=40_000_000)
    assert figures(lab, cache=cache).keys() == {"time_us", "throughput_tflops", "fraction_of_bf16_matmul"}
    lab.time("k", "v", {}, Timing(20.0, 10.0, 40.0, 7), "cold", nbytes=2_000_000)
    assert figures(lab, cache="cold").keys() == {"time_us", "bandwidth_gbs", "fraction_of_read"}


def test_a_time_of_the_host_has_no_fraction_of_a_devices_ceiling(lab):
    lab.ceilings = {"bf16_matmul": Ceiling("bf16_matmul", 8.0, "TFLOP/s", 7, 9, 9, "how")}
    lab.time("k", "v", {}, Timing(20.0, 10.0, 40.0, 7), "warm", flop=40_000_000, host=True)
    assert figures(lab).keys() == {"time_us", "throughput_tflops"}


def test_the_simulators_own_times_are_refused(lab):
    assert not lab.timed
    with pytest.raises(ValueError, match="not timed"):
        lab.time("k", "v", {}, Timing(20.0, 10.0, 40.0, 7), "warm")


def test_random_numbers_depend_on_seed_and_key_alone(lab):
    first = lab.rng(1, 2).integers(0, 1 << 30, 5)
    lab.rng(7).random(100)
    assert np.array_equal(lab.rng(1, 2).integers(0, 1 << 30, 5), first)
    assert not np.array_equal(lab.rng(1, 3).integers(0, 1 << 30, 5), first)
    other = experiments.Lab(lab.backend, lab.record, seed=4)
    assert not np.array_equal(other.rng(1, 2).integers(0, 1 << 30, 5), first)


def test_a_finding_becomes_a_verdict(lab):
    box = lab.judge(experiments.not_timed("G05", "blocks counted", measured="2 blocks"))
    entry, = lab.record.verdicts
    assert entry == {"claim": "G05", "verdict": "not testable here", "evidence": "blocks counted",
                     "measured": "2 blocks", "missing": experiments.NEEDS_GPU, "host": False}
    assert (box.claim.id, box.verdict) == ("G05", "not testable here")


def around(median, spread=0.1):
    return Timing(median, median * (1 - spread), median * (1 + spread), 9)


FASTER, SLOWER = (around(20), around(10)), (around(10), around(20))
CLOSE = (around(11), around(10))
WIDE = (around(20, 0.6), around(10)), (around(10), around(20, 0.6))
"""Twice the median, and yet within reach of each other."""
TOUCHING = Timing(5, 4, 6, 9), Timing(7, 6, 8, 9)
"""One's 90th percentile is the other's 10th."""


@pytest.mark.parametrize("pairs, verdict", [
    ([FASTER], "reproduced"), ([FASTER, FASTER], "reproduced"),
    ([FASTER, FASTER, CLOSE], "direction holds"), ([FASTER, FASTER, SLOWER], "direction holds"),
    ([FASTER, CLOSE], "not reproduced"), ([FASTER, SLOWER], "not reproduced"), ([CLOSE], "not reproduced"),
    ([WIDE[0]], "not reproduced"), ([WIDE[1]], "not reproduced"),
    ([TOUCHING], "not reproduced"), ([TOUCHING[::-1]], "not reproduced"),
    ([SLOWER], "contradicted"), ([SLOWER, SLOWER], "contradicted"),
    ([SLOWER, SLOWER, CLOSE], "not reproduced"), ([SLOWER, SLOWER, FASTER], "not reproduced"),
])
def test_verdict_on_a_speed(pairs, verdict):
    assert experiments.speed_verdict(pairs) == verdict
    capped = "direction holds" if verdict == "reproduced" else verdict
    assert experiments.speed_verdict(pairs, ["q 64 x 64"]) == capped, "a wrong result takes the full verdict away"


def test_evidence_names_what_was_left_out():
    assert experiments.omitted([]) == ""
    assert experiments.omitted(["q 64 x 64", "k 8 x 64"]) == (
        " Left out, since their results are wrong: q 64 x 64, k 8 x 64.")


def test_ceilings_without_a_gpu_are_the_hosts_own(lab, monkeypatch):
    c = Ceiling("host_copy", 20.0, "GB/s", 19.0, 21.0, 9, "how")
    monkeypatch.setattr(experiments.measure, "host_ceilings", lambda: [c])
    assert lab.measure_ceilings() == [c] and lab.ceilings == {"host_copy": c}
    m, = lab.record.measurements
    assert (m["metric"], m["value"], m["host"]) == ("bandwidth_gbs", 20.0, True)


def test_copies_are_checked(lab):
    assert experiments.check_copy(lab, 100) == "0 of 400 words differ after a copy; reading wrote 0 words"
    assert figures(lab)["wrong_words"]["status"] == "passed"


def test_a_copy_that_loses_words_is_a_wrong_result(lab, monkeypatch):
    real = lab.backend.numpy

    def lossy(array):
        out = real(array)
        if out.ndim == 2:
            out[-1, 0] ^= 1
        return out
    monkeypatch.setattr(lab.backend, "numpy", lossy)
    assert experiments.check_copy(lab, 100).startswith("1 of 400 words differ")
    found = figures(lab)["wrong_words"]
    assert (found["status"], found["value"]) == ("wrong_result", 1) and "1 words differ" in found["reason"]


def test_the_summary_names_what_a_reader_wants_first(lab):
    found = experiments.summary(lab.record.environment)
    assert "simulated, not timed" in found["device"] and found["Python"].count("numpy") == 1
    assert all(isinstance(value, str) and value for value in found.values())


def test_no_case_gives_no_verdict():
    with pytest.raises(ValueError, match="no case"):
        experiments.speed_verdict([])


def test_what_has_no_time_says_why(lab):
    lab.no_time("k", "one", {"M": 1}, "skipped", "it is not here")
    lab.no_time("k", "two", {"M": 1}, "runtime_error", ValueError("no " * 200))
    one, two = lab.record.measurements
    assert (one["variant"], one["status"], one["reason"], one["value"]) == ("one", "skipped", "it is not here", None)
    assert two["reason"].startswith("ValueError: no no") and len(two["reason"]) == 300


def test_peers_that_are_missing_or_fail_are_recorded_and_left_out(lab):
    def prepare(weights, group, copies):
        if fails:
            raise RuntimeError("no kernel image")
        return [(weights.shape, group)] * copies

    peers = [gemm.Peer("here", 8, "float16", None, prepare), gemm.Peer("for 4 bits", 4, "float16", None, prepare),
             gemm.Peer("absent", 8, "float16", "no module", prepare)]
    here = lab.able("k", peers, {"experiment": "e"})
    assert here == peers[:2]
    assert lab.prepare_peers("k", here[1:], "int8", None, None, {}) == {}  # nobody asks for weights
    weights, fails, asked = np.zeros((16, 64), np.float32), False, []
    ready = lab.prepare_peers("k", here, "int8", lambda: weights, lambda nbytes: asked.append(nbytes) or 3, {"N": 16})
    assert ready == {here[0]: [((16, 64), 32)] * 3} and asked == [16 * 64 + 2 * 16 * 64 // 32]
    fails = True
    assert lab.prepare_peers("k", here, "int8", lambda: weights, lambda nbytes: 3, {"N": 16}) == {}
    assert [(m["variant"], m["case"], m["status"], m["reason"]) for m in lab.record.measurements] == [
        ("absent", {"experiment": "e"}, "skipped", "no module"),
        ("here", {"N": 16}, "runtime_error", "RuntimeError: no kernel image")]
