"""Each experiment at small sizes on the simulator; made-up times and planted faults bring out the other verdicts."""

import numpy as np
import pytest
import torch

from kernelbook import claims, experiments, measure, records
from kernelbook.backends.cpu import CpuBackend
from kernelbook.experiments import int8_pv_speed as study
from kernelbook.measure import Ceiling
from kernelbook.ops import int8_pv as op
from kernelbook.peers import attention as attention_peers

KINDS = {claim.id: claim.kind for claim in claims.load("int8_pv")}
CEILINGS = {name: Ceiling(name, value, unit, value - 1, value + 1, 9, "how")
            for name, value, unit in (("read", 100.0, "GB/s"), ("int8_matmul", 50.0, "TFLOP/s"))}
SETTING = (1, 2, 1, 64)
SMALL = {"settings": [SETTING], "histories": [300], "accuracy": (*SETTING, 600)}
ARTICLE = [1024, 2048, 4096]  # instead of 4K, 8K, 16K, to be quick


@pytest.fixture
def lab(simulator, environment):
    return experiments.Lab(simulator, records.Record("3_int8_pv", {}, environment))


class Timed(CpuBackend):
    """Claims to be timed, so that times can be made up; two copies of a cache are more than its L2."""
    simulated = False
    l2_bytes = 1 << 12
    multiprocessors = 2


@pytest.fixture
def timed(environment, made_up_times):
    record = records.Record("3_int8_pv", {}, {**environment, "simulated": False})
    return experiments.Lab(Timed(), record, ceilings=dict(CEILINGS))


def judged(lab, finding, claim, verdict):
    """The finding is on `claim`, came out as `verdict`, and the record takes it; its data are rows of plain values."""
    assert (finding.claim, finding.verdict) == (claim, verdict), finding.evidence
    lab.judge(finding)
    if not lab.timed and claim != "P14":
        assert "GPU" in finding.missing
    for row in finding.data:
        assert all(isinstance(v, str | int | float | list | None) for v in row.values())
    return finding


def performance(lab):
    return [m for m in lab.record.measurements if m["value"] is not None and records.is_performance(m["metric"])]


def wrong(lab):
    return [m for m in lab.record.measurements if m["status"] == "wrong_result"]


def values(lab, metric, **case):
    return [m["value"] for m in lab.record.measurements
            if m["metric"] == metric and all(m["case"].get(name) == value for name, value in case.items())]


@pytest.fixture
def break_form(monkeypatch):
    """Make decode wrong in the forms that a condition holds for: every output `factor` times what it should be."""
    def plant(condition, factor=1.1):
        real = op.Attention.decode

        def decode(self, q, **options):
            launch = real(self, q, **options)
            if not condition(self.form):
                return launch

            def broken():
                out = launch()
                out *= np.float32(factor)
                return out
            return broken
        monkeypatch.setattr(op.Attention, "decode", decode)
    return plant


@pytest.fixture
def quick_gate(monkeypatch):
    """Instead of the gate, which is run in other tests, its known judgement."""
    monkeypatch.setattr(study, "_gate", lambda lab, form, head_dim: [study.READS_ALL] if form.read == 8 else [])


# ---- sizes and caches

def test_sizes_of_a_call():
    decode = study.Shape(16, 24, 4, 128, 4096)
    assert (decode.length, decode.group) == (4096, 6)
    assert decode.cache_bytes == 16 * 4096 * 4 * (128 + 128 + 4 + 4)
    assert decode.flop == 4 * 16 * 24 * 128 * 4096
    assert decode.blocks(132) == pytest.approx(16 * 16 * 4 / 132)
    assert decode.label == "batch 16, 24/4 heads of 128, 4K"
    prefill = study.Shape(1, 2, 1, 64, 10, queries=3)
    assert prefill.length == 13 and prefill.flop == 4 * 2 * 64 * (11 + 12 + 13)


@pytest.mark.parametrize("given, message", [
    ({"settings": []}, "settings is empty"), ({"histories": []}, "histories is empty"),
    ({"settings": [(1, 24, 4)]}, r"setting \(1, 24, 4\); expected batch, heads, kv_heads and head_dim"),
    ({"settings": [(0, 24, 4, 128)]}, "batch = 0; expected an integer from 1"),
    ({"histories": [1.5]}, "history = 1.5; expected an integer"),
    ({"settings": [(1, 24, 5, 128)]}, "heads = 24; expected a multiple of kv_heads = 5"),
    ({"settings": [(1, 24, 4, 100)]}, "head_dim = 100; expected one of"),
])
def test_sizes_that_cannot_be_used_are_named(lab, given, message):
    for experiment in (study.decode_speed, study.narrow_load, study.partitions, study.scale_groups, study.dequantized,
                       study.unsigned):
        with pytest.raises(ValueError, match=f"^{message}"):
            experiment(lab, **SMALL | given)
    assert not lab.record.measurements


def test_what_a_claim_compares_must_be_there(lab):
    with pytest.raises(ValueError, match=r"lengths = \(256,\); expected 256 and 512"):
        study.partitions(lab, **SMALL, lengths=(256,))
    with pytest.raises(ValueError, match=r"tokens = \(32, 64\); expected 32 and 256"):
        study.scale_groups(lab, **SMALL, tokens=(32, 64))


def test_random_caches_are_valid_seeded_and_out_of_order(lab):
    shape = study.Shape(2, 6, 3, 64, 100)
    cache = op.on_host(lab.backend, study.random_cache(lab, shape)).check()
    assert cache.lengths.tolist() == [100, 100] and cache.blocks == 2 * 7
    assert sorted(cache.block_tables.ravel()) == list(range(14)) and np.any(np.diff(cache.block_tables) != 1)
    for codes, scales in ((cache.k_codes, cache.k_scales), (cache.v_codes, cache.v_scales)):
        assert (codes.min(), codes.max()) == (-127, 127) and abs(codes.mean()) < 2
        assert 2.5 < scales.max() / scales.min() <= 3
    k, v = cache.dequantize(1)
    assert 0.8 < k.std() < 1.3 and 0.8 < v.std() < 1.3
    again, other = (op.on_host(lab.backend, study.random_cache(lab, s)) for s in (shape, study.Shape(2, 6, 3, 64, 101)))
    assert np.array_equal(again.k_codes, cache.k_codes) and not np.array_equal(other.k_codes, cache.k_codes)


def test_the_sample_is_checked_against_its_own_sequence_query_and_head(timed):
    """Every place of the sample is right in a right output and wrong where just that place is not."""
    for shape in (study.Shape(3, 4, 2, 64, 90), study.Shape(2, 4, 2, 64, 90, queries=5)):
        problem = study._Problem(timed, shape, "test")
        cache = op.on_host(timed.backend, problem.caches[0])
        exact = op.reference(problem.host_q, cache, causal_offset=shape.length - shape.queries)
        assert len(problem.places) >= 3
        assert problem.check("right", shape.case, exact, 1e-12)
        for sequence, query, head in problem.places:
            out = exact.copy()
            out[sequence, query, 2 * head] += 1
            at = {"at": f"{sequence}, {query}, {head}"}
            assert not problem.check("wrong", shape.case | at, out, 1e-12)
        out = exact.copy()
        untouched = next(p for p in np.ndindex(shape.batch, shape.queries, 2) if p not in problem.places)
        out[untouched[0], untouched[1], 2 * untouched[2], 3] = np.nan
        assert not problem.check("not finite", shape.case, out, 1e-12), "outside the sample too"


def test_a_long_history_is_checked_at_one_place(timed, monkeypatch):
    monkeypatch.setattr(study, "LONG", 100)
    assert study._Problem(timed, study.Shape(2, 2, 1, 64, 101), "test").places == [(1, 0, 0)]


# ---- on the simulator: errors, and no times

def test_speeds_are_not_testable_on_the_simulator(lab):
    for experiment, claim, more in ((study.decode_speed, "P08", {}), (study.narrow_load, "P10", {}),
                                    (study.partitions, "P11", {"lengths": (256, 512)}),
                                    (study.scale_groups, "P12", {"tokens": (32, 256)}), (study.dequantized, "P13", {})):
        found = judged(lab, experiment(lab, **SMALL, **more), claim, "not testable here")
        assert found.data and all("us" not in row for row in found.data)
    judged(lab, study.unsigned(lab, **SMALL), "P14", "reproduced")
    assert performance(lab) == [] and not values(lab, "apparent_time_us")
    assert {m["case"].get("read") for m in wrong(lab)} == {8}


def test_errors_are_those_of_the_forms(lab):
    error = {row["form"]: row["of P V"] for row in study.scale_groups(lab, **SMALL, tokens=(32, 256)).data}
    assert error["256"] > 1.5 * error["32"]
    rows = {row["form"]: row for row in study.dequantized(lab, **SMALL).data}
    assert rows["bf16_pages, made"]["error"] == rows["bf16_pages"]["error"]
    assert rows["bf16"]["of P V"] < rows["bf16_dequantized"]["of P V"] < rows["int8"]["of P V"] < rows["int8"]["error"]


def test_the_gate_tells_the_narrow_load(lab):
    right, narrow = study.narrow_load(lab, **SMALL).data
    assert right["caught by"] == [] and study.READS_ALL in narrow["caught by"] and narrow["error"] > 10 * right["error"]
    assert values(lab, "checks_failed", read=8) == [len(narrow["caught by"])]


@pytest.mark.parametrize("broken, verdict", [(("uint8",), "reproduced"), (("uint8", "uint8_offset"), "not reproduced")])
def test_a_passing_path_decides_on_unsigned_weights(lab, break_form, broken, verdict):
    break_form(lambda form: form.pv in broken, 1.04)  # within the bound, but not the gate's
    found = judged(lab, study.unsigned(lab, **SMALL), "P14", verdict)
    passing = [row["form"] for row in found.data if row["form"] != "int8" and not row["caught by"]]
    assert f"The gate passes {' and '.join(passing) or 'no unsigned path'};" in found.evidence


@pytest.mark.parametrize("gain, verdict", [(0.5, "reproduced"), (0.9, "not reproduced"), (1.1, "contradicted")])
def test_the_bit_decides_on_unsigned_weights(lab, monkeypatch, quick_gate, gain, verdict):
    monkeypatch.setattr(study, "_accuracy", lambda lab, experiment, forms, size: [
        {"form": name, "error": 0.01 * (1 if name == "int8" else gain), "of P V": 0.01, "max_abs": 0.0, "rms": 0.0}
        for name in forms])
    judged(lab, study.unsigned(lab, **SMALL), "P14", verdict)


def test_without_a_mixed_sign_instruction_the_offset_remains(environment):
    lab = experiments.Lab(CpuBackend(wave=64), records.Record("3_int8_pv", {}, environment))
    found = judged(lab, study.unsigned(lab, **SMALL), "P14", "reproduced")
    assert {row["form"] for row in found.data} == {"int8", "uint8_offset"} and "No mixed-sign path" in found.evidence


# ---- INT8 against BF16 P V (P08)

ON_A_FULL_DEVICE = {"settings": [(1, 2, 1, 64), (1, 4, 2, 64)], "accuracy": (*SETTING, 600)}


@pytest.fixture(autouse=True)
def short_article(monkeypatch):
    monkeypatch.setattr(study, "ARTICLE_GAIN", dict(zip(ARTICLE, study.ARTICLE_GAIN.values(), strict=True)))


@pytest.fixture
def full_second(monkeypatch):
    """At 1K the first setting has 2 blocks for each of 2 multiprocessors, the second 4."""
    monkeypatch.setattr(study, "FULL", 4)


@pytest.mark.parametrize("bf16, verdict", [
    ([11.1, 11.1, 12.6], "reproduced"), ([13, 13, 13.1], "reproduced"),
    ([13, 13, 12.9], "direction holds"),  # no growth
    ([10.4, 11.1, 12.6], "direction holds"),  # half of 0.1049 is more
    ([11.1, 10, 12.6], "direction holds"), ([10, 10, 12.6], "not reproduced"), ([10, 10, 10], "not reproduced"),
    ([9, 9, 9], "contradicted")])
def test_decode_speed_follows_the_times(timed, pace, full_second, bf16, verdict):
    pace["bf16", "cold"] = [5, 5, 5, *bf16]  # of the first setting, which is not asked, then of the second
    found = judged(timed, study.decode_speed(timed, **ON_A_FULL_DEVICE, histories=ARTICLE), "P08", verdict)
    assert "Judged at batch 1, 4/2 heads of 64, the first that has at least 4 blocks" in found.evidence
    assert found.measured == ", ".join(f"{b / 10:.2f}x at {h}" for b, h in zip(bf16, ("1K", "2K", "4K"), strict=True)
                                       ) + " (batch 1, 4/2 heads of 64)"
    cold = [row for row in found.data if row["cache"] == "cold"]
    assert [row["gain"] for row in cold] == [b / 10 for b in (5, 5, 5, *bf16)] and len(found.data) == 12
    assert cold[3]["gain p10"] == pytest.approx(bf16[0] * 0.99 / 10.1) and cold[3]["blocks"] == 4
    nbytes = study.Shape(1, 4, 2, 64, 1024).cache_bytes + 2 * 4 * 4 * 64
    assert cold[3]["int8 of read"] == pytest.approx(nbytes / 1e4 / 100)
    assert all(row["int8 of read"] is None for row in found.data if row["cache"] == "warm")


def test_decode_speed_says_where_it_is_hidden(timed, pace, full_second):
    timed.ceilings["read"] = Ceiling("read", 1e-3, "GB/s", 1e-4, 1, 9, "how")
    pace["bf16", "cold"] = [10, 13, 10, 13]
    found = study.decode_speed(timed, **ON_A_FULL_DEVICE, histories=ARTICLE[:2])
    assert "hidden (below 1.05 times, or within the noise) in 2 of 4 cases: in 1 there are fewer" in found.evidence
    assert "in 1 memory does" in found.evidence
    assert "batch 1, 2/1 heads of 64: 1.00 to 1.30 times, 1K to 2K, 2.0 to 4.0 blocks" in found.evidence


def test_the_gain_in_prefill_stands_beside(timed, pace, lab):
    pace["bf16", "warm"] = [13, 14]
    rows = study.prefill_gain(timed, (1, 4, 2, 64), (90, 150), queries=20)
    assert [(row["history"], row["queries"], row["gain"]) for row in rows] == [(90, 20, 1.3), (150, 20, 1.4)]
    pace["bf16", "warm"] = 10
    found = study.decode_speed(timed, **SMALL | {"histories": ARTICLE}, prefill=rows)
    assert ("In prefill of 20 queries, batch 1, 4/2 heads of 64, where reading hides nothing: 1.30x at 90, "
            "1.40x at 150.") in found.evidence
    assert not study.prefill_gain(lab, (1, 4, 2, 64), (90,), queries=20), "no time without a GPU"


def test_decode_speed_without_a_full_setting_takes_the_fullest(timed, pace, monkeypatch):
    monkeypatch.setattr(study, "FULL", 1000)
    pace["bf16", "cold"] = [5, 5, 5, 11.1, 11.1, 12.6]
    found = judged(timed, study.decode_speed(timed, **ON_A_FULL_DEVICE, histories=ARTICLE), "P08", "reproduced")
    assert "No setting has 1000 blocks" in found.evidence and "judged at batch 1, 4/2 heads of 64" in found.evidence


def test_decode_speed_on_part_of_the_histories_is_not_reproduced_in_full(timed, pace):
    pace["bf16", "cold"] = [13, 13.1]
    judged(timed, study.decode_speed(timed, **SMALL | {"histories": ARTICLE[:2]}), "P08", "direction holds")


def test_decode_speed_needs_a_history_of_the_article(timed):
    found = judged(timed, study.decode_speed(timed, **SMALL), "P08", "not testable here")
    assert found.missing.startswith("a history of 1024, 2048, 4096")


def test_a_wrong_form_has_no_time(timed, break_form):
    """Nor do right ones beside it: there is nothing to compare."""
    break_form(lambda form: form.pv == "bf16")
    found = judged(timed, study.decode_speed(timed, **SMALL), "P08", "not reproduced")
    assert "No case fits in memory and passes its error check" in found.evidence
    assert performance(timed) == [] and {m["variant"] for m in wrong(timed)} == {"2_decode_bf16"}


def test_a_case_that_is_wrong_is_left_out_and_named(timed, pace, monkeypatch):
    real = study._Problem.check
    monkeypatch.setattr(study._Problem, "check", lambda self, variant, case, out, bound: real(
        self, variant, case, out * (2 if self.shape.history == 2048 else 1), bound))
    pace["bf16"] = 15
    found = judged(timed, study.decode_speed(timed, **SMALL | {"histories": ARTICLE}), "P08", "direction holds")
    assert found.evidence.endswith("Left out, since their results are wrong: batch 1, 2/1 heads of 64, 2K.")
    assert not any(m["case"]["history"] == 2048 for m in performance(timed))


def test_a_case_too_large_is_skipped_with_its_reason(timed):
    found = study.decode_speed(timed, **SMALL | {"histories": [300, 4096]}, memory_gib=0.0005)
    assert {row["history"] for row in found.data} == {300}
    skipped, = (m for m in timed.record.measurements if m["status"] == "skipped")
    assert skipped["case"]["history"] == 4096 and "GiB, more than the 0.0005 allowed" in skipped["reason"]


# ---- variants beside

@pytest.mark.parametrize("half, verdict", [([7, 7], "reproduced"), ([7, 10], "not reproduced"),
                                           ([12, 12], "not reproduced")])
def test_narrow_load_follows_the_times(timed, pace, quick_gate, half, verdict):
    pace["8 bytes", "cold"] = list(half)
    found = judged(timed, study.narrow_load(timed, **SMALL | {"histories": [300, 301]}), "P10", verdict)
    apparent = [m for m in timed.record.measurements if m["metric"] == "apparent_time_us" and m["cache"] == "cold"]
    assert [m["value"] for m in apparent] == half and {m["status"] for m in apparent} == {"wrong_result"}
    assert not any(m["case"].get("read") for m in performance(timed)), "a wrong kernel has no time"
    assert {row["caught by"][0] for row in found.data if row["form"] == "8 bytes"} == {study.READS_ALL}
    assert len(found.data) == 8


def test_a_narrow_load_that_errs_little_contradicts(timed, pace, monkeypatch, quick_gate):
    pace["8 bytes"] = 7
    monkeypatch.setattr(study, "_accuracy", lambda lab, experiment, forms, size: [
        {"form": name, "error": 0.01, "of P V": 0.01, "max_abs": 0.0, "rms": 0.0} for name in forms])
    judged(timed, study.narrow_load(timed, **SMALL), "P10", "contradicted")


def test_a_narrow_load_that_the_gate_finds_to_read_all_contradicts(timed, pace, monkeypatch):
    pace["8 bytes"] = 7
    monkeypatch.setattr(study, "_gate", lambda lab, form, head_dim: [])
    judged(timed, study.narrow_load(timed, **SMALL), "P10", "contradicted")


def test_a_right_load_that_is_wrong_reproduces_nothing(timed, pace, break_form):
    pace["8 bytes"] = 7
    break_form(lambda form: form.read == 16, 1.04)  # within the bound, but not the gate's
    judged(timed, study.narrow_load(timed, **SMALL), "P10", "not reproduced")


@pytest.mark.parametrize("of_512, verdict", [
    ([10, 10], "reproduced"), ([9, 11], "reproduced"), ([11, 11], "reproduced"), ([9, 9], "contradicted"),
    ([9, 10], "reproduced"), ([9, 9, 10], "direction holds"), ([9, 9, 11], "reproduced")])
def test_partitions_follow_the_times(timed, pace, of_512, verdict):
    pace["512", "cold"] = list(of_512)
    histories = [600 + i for i in range(len(of_512))]
    found = judged(timed, study.partitions(timed, **SMALL | {"histories": histories}, lengths=(256, 512)), "P11",
                   verdict)
    assert f"faster in {of_512.count(9)} of {len(of_512)} cases" in found.measured
    assert {m["case"].get("partition") for m in performance(timed)} == {None, 512}


@pytest.mark.parametrize("whole, verdict", [([12, 12], "reproduced"), ([12, 10], "direction holds"),
                                            ([8, 8], "direction holds")])
def test_scale_groups_follow_times_and_errors(timed, pace, whole, verdict):
    pace["256", "cold"] = list(whole)
    found = judged(timed, study.scale_groups(timed, **SMALL | {"histories": [300, 301]}, tokens=(32, 256)), "P12",
                   verdict)
    assert ("saves time" in found.evidence) == (whole == [8, 8])


@pytest.mark.parametrize("whole, verdict", [(12, "direction holds"), (10, "not reproduced"), (8, "contradicted")])
def test_scale_groups_without_a_loss(timed, pace, monkeypatch, whole, verdict):
    pace["256"] = whole
    monkeypatch.setattr(study, "_accuracy", lambda lab, experiment, forms, size: [
        {"form": name, "error": 0.01, "of P V": 0.01 if name == "32" else 0.008, "max_abs": 0.0, "rms": 0.0}
        for name in forms])
    judged(timed, study.scale_groups(timed, **SMALL, tokens=(32, 256)), "P12", verdict)


@pytest.mark.parametrize("registers, made, verdict", [
    ([19, 19], [40, 40], "reproduced"), ([12, 19], [40, 40], "direction holds"), ([12, 12], [12, 40], "not reproduced"),
    ([12, 12], [12, 12], "contradicted")])
def test_dequantized_follows_the_times(timed, pace, registers, made, verdict):
    pace.update({("bf16_dequantized", "cold"): list(registers), ("bf16_pages, made", "cold"): list(made), "bf16": 20})
    found = judged(timed, study.dequantized(timed, **SMALL | {"histories": [300, 301]}), "P13", verdict)
    assert {row["form"] for row in found.data} == {"int8", "bf16", "bf16_dequantized", "bf16_pages", "bf16_pages, made"}
    assert values(timed, "time_us", history=300)


def test_dequantized_without_a_gain_gives_nothing_back(timed):
    found = judged(timed, study.dequantized(timed, **SMALL), "P13", "not reproduced")
    assert found.measured == "no gain to give back"


def test_pages_are_made_in_every_timed_call(timed, monkeypatch):
    made = []
    monkeypatch.setattr(op.Attention, "dequantize",
                        lambda self, real=op.Attention.dequantize: made.append(self) or real(self))
    study.dequantized(timed, **SMALL)
    # of three Attentions with pages, errors and both forms on both copies, the last two remake them: a check and
    # a cold run of both and a warm one
    assert len(made) == (1 + 2 + 2) + (1 + 2 + 1)


def test_unsigned_is_timed_where_it_passes(timed, pace, break_form):
    break_form(lambda form: form.pv == "uint8")
    pace["uint8_offset"] = 13
    found = judged(timed, study.unsigned(timed, **SMALL), "P14", "reproduced")
    assert {m["variant"] for m in performance(timed)} == {"2_decode_int8", "2_decode_uint8_offset"}
    assert found.measured.endswith("; uint8_offset up to 1.30x the time")
    untimed, = (row for row in found.data if "us" not in row)
    assert untimed["form"] == "uint8" and untimed["caught by"] and untimed["error"] > study.BOUND


# ---- beside peers

def peer(name, attend=None, bits=16, missing=None, refuses=lambda *case: None):
    """A peer that gives what `attend` makes of the exact attention."""
    def bind(q, k, v, causal, copies):
        assert causal
        tokens, queries = k.shape[1], q.shape[1]
        k, v = (x.repeat_interleave(q.shape[2] // k.shape[2], 2).double() for x in (k, v))
        scores = torch.einsum("bqhd,bthd->bhqt", q.double(), k) * q.shape[3] ** -0.5
        behind = torch.arange(tokens) > tokens - queries + torch.arange(queries)[:, None]
        out = torch.einsum("bhqt,bthd->bqhd", scores.masked_fill(behind, -torch.inf).softmax(-1), v)
        return [lambda: attend(out)] * copies
    return attention_peers.AttentionPeer(name, bits, False, missing, refuses, bind)


def fails(out):
    raise RuntimeError("no such kernel")


@pytest.fixture
def peers(monkeypatch):
    known = [peer("right", lambda out: out), peer("wrong", lambda out: out * 1.1),
             peer("coarse", lambda out: out * 1.1, bits=8), peer("fails", fails),
             peer("absent", missing="it does not import"),
             peer("decodes", lambda out: out, refuses=lambda head_dim, queries, causal: queries > 1 and "one query")]
    monkeypatch.setattr(attention_peers, "all_peers", lambda: known)
    prepare = attention_peers.AttentionPeer.prepare
    monkeypatch.setattr(attention_peers.AttentionPeer, "prepare",
                        lambda self, *args, **options: prepare(self, *args, **options, device="cpu"))


BESIDE = {"decode_settings": [(2, 4, 2, 64)], "decode_histories": [300], "prefill_settings": [(1, 4, 2, 64)],
          "prefill_histories": [90], "queries": 20}


def test_peers_stand_beside_ours(timed, pace, peers):
    pace.update({"right": 8, ("2_decode_int8", "cold"): 12, ("decodes", "cold"): 14, "3_prefill_int8_64": 5})
    table = study.beside_peers(timed, **BESIDE)
    ours = {"decode": {"2_decode_int8", "2_decode_bf16"},
            "prefill": {"3_prefill_int8", "3_prefill_int8_64", "3_prefill_bf16"}}
    for phase, caches in (("decode", {"cold", "warm"}), ("prefill", {"warm"})):
        rows = [row for row in table if row["phase"] == phase]
        theirs = {"right", "coarse"} | ({"decodes"} if phase == "decode" else set())
        assert {row["variant"] for row in rows} == ours[phase] | theirs
        assert {row["variant"] for row in rows if row["peer"]} == theirs
        assert {row["cache"] for row in rows} == caches
        assert {row["fastest"] for row in rows} == {"right" if phase == "decode" else "3_prefill_int8_64"}
    row = next(row for row in table if row["phase"] == "prefill" and row["variant"] == "right")
    assert row["TFLOP/s"] == pytest.approx(study.Shape(1, 4, 2, 64, 90, 20).flop / 8e6)
    assert row["of int8 matmul"] == pytest.approx(row["TFLOP/s"] / 50)
    decode, prefill = study.standings(table)
    assert (decode["ours"], decode["best peer"], decode["faster"]) == ("2_decode_int8", "right", "peer")
    assert decode["ours / peer"] == 1.5
    assert (prefill["ours"], prefill["faster"], prefill["ours / peer"]) == ("3_prefill_int8_64", "ours", 5 / 8)


def test_peers_that_cannot_be_timed_are_recorded(timed, peers):
    study.beside_peers(timed, **BESIDE)
    status = {(m["variant"], m["case"].get("queries")): (m["status"], m["reason"])
              for m in timed.record.measurements if m["metric"] == "time_us"}
    assert status["absent", None] == ("skipped", "it does not import")
    assert status["decodes", 20] == ("skipped", "one query") and status["decodes", 1][0] == "passed"
    assert status["fails", 1] == status["fails", 20] == ("runtime_error", "RuntimeError: no such kernel")
    assert {m["variant"] for m in wrong(timed)} == {"wrong"} and ("wrong", 1) not in status


def test_a_peer_that_no_graph_holds_is_recorded(timed, monkeypatch, peers):
    real = measure.device_times

    def times(contenders, **options):
        if "right" in contenders:  # the trial of this peer alone
            raise RuntimeError("operation not permitted when stream is capturing")
        return real(contenders, **options)
    monkeypatch.setattr(measure, "device_times", times)
    table = study.beside_peers(timed, **BESIDE)
    assert "right" not in {row["variant"] for row in table} and "coarse" in {row["variant"] for row in table}
    assert any(m["variant"] == "right" and m["status"] == "runtime_error" for m in timed.record.measurements)


def test_a_wrong_kernel_of_ours_does_not_stand_beside_peers(timed, peers, break_form):
    break_form(lambda form: form.pv == "int8")
    table = study.beside_peers(timed, **BESIDE)
    assert "2_decode_int8" not in {row["variant"] for row in table}
    decode, _ = study.standings(table)
    assert "ours" not in decode and decode["best peer"] and "faster" not in decode


def test_warpgroup_kernels_are_timed_where_there_are_some(timed, monkeypatch):
    monkeypatch.setattr(attention_peers, "all_peers", lambda: [])
    real = op.Attention.prefill

    def prefill(self, q, *, wgmma, **options):
        if wgmma and self.form.pv != "int8":
            raise ValueError("no bf16")
        return real(self, q, **options)
    monkeypatch.setattr(op.Attention, "prefill", prefill)
    table = study.beside_peers(timed, **BESIDE)
    assert {row["variant"] for row in table if row["phase"] == "prefill"} == {
        "3_prefill_int8", "3_prefill_int8_64", "3_prefill_bf16", "6_prefill_wgmma_int8", "6_prefill_wgmma_int8_64"}


@pytest.mark.parametrize("given, phase", [("decode_settings", "prefill"), ("prefill_settings", "decode")])
def test_either_phase_may_be_left_out(timed, peers, given, phase):
    assert {row["phase"] for row in study.beside_peers(timed, **BESIDE | {given: []})} == {phase}


def test_nothing_is_timed_beside_peers_on_the_simulator(lab, peers):
    assert study.beside_peers(lab, **BESIDE) == [] and study.standings([]) == []
    skipped, = lab.record.measurements
    assert (skipped["variant"], skipped["status"]) == ("absent", "skipped")


def test_what_peers_get_is_what_the_cache_stands_for(lab):
    shape = study.Shape(2, 4, 2, 64, 37)
    cache = study.random_cache(lab, shape)
    k, v = study._floats(cache, shape)
    for sequence in range(2):
        exact = op.on_host(lab.backend, cache).dequantize(sequence)
        for x, expected in ((k, exact[0]), (v, exact[1])):
            assert x.dtype == np.float32 and np.allclose(x[sequence], expected, rtol=1e-6)


def test_pages_of_every_size_are_timed(timed, pace):
    table = study.page_sizes(timed, (1, 4, 2, 64), 90, (16, 32), queries=20)
    assert [row["tokens a page"] for row in table] == [16, 32]
    assert all({"2_decode_int8", "3_prefill_int8"} <= row.keys() for row in table)
    cases = {(e["case"]["block_size"], e["case"]["queries"]) for e in timed.record.measurements
             if e["case"].get("experiment") == "pages"}
    assert cases == {(16, 1), (16, 20), (32, 1), (32, 20)}


def test_a_page_holds_what_the_shape_says(lab):
    cache = study.random_cache(lab, study.Shape(1, 4, 2, 64, 90, block_size=32))
    assert cache.k_codes.shape == (3, 2, 32, 64) and cache.v_codes.shape == (3, 2, 64, 32)


def test_pages_are_not_timed_on_the_simulator(lab):
    assert study.page_sizes(lab) == []
