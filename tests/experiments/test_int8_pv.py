"""Each experiment at small sizes on the simulator; with faults planted, every verdict can come out otherwise."""

import re
from dataclasses import replace

import numpy as np
import pytest

from kernelbook import experiments, notebooks, pv_model, records, runner, stats, toolchain
from kernelbook.backends import BackendUnavailable
from kernelbook.experiments import int8_pv as study
from kernelbook.ops import int8_pv as op
from kernelbook.ops.int8_pv import Form

NOTEBOOK = "3_int8_pv"
pytestmark = pytest.mark.filterwarnings("ignore:.*replaces the one recorded before")  # an experiment run once more


@pytest.fixture(scope="module")
def environment(simulator):
    return records.environment(simulator)


@pytest.fixture
def lab(simulator, environment):
    return experiments.Lab(simulator, records.Record(NOTEBOOK, {}, environment))


@pytest.fixture(scope="module")
def places(simulator, environment):
    return study.places(experiments.Lab(simulator, records.Record(NOTEBOOK, {}, environment)), ["mmac"])


@pytest.fixture
def problems(lab):
    """Two partitions, the second part of a tile; a row that sees less than the others."""
    return [study.random_inputs(lab, 300, 3, 1), study.random_inputs(lab, 300, 3, 1, queries=2, octaves=3)]


def judged(lab, finding, claim, verdict):
    """The finding is on `claim`, came out as `verdict`, and the record takes it."""
    assert (finding.claim, finding.verdict) == (claim, verdict), finding.evidence
    lab.judge(finding)
    return finding


def values(lab, metric):
    return [m["value"] for m in lab.record.measurements if m["metric"] == metric]


# ---- parameters

DEFAULTS = {name: p.default for name, p in notebooks.parameters(notebooks.FOLDER / f"{NOTEBOOK}.ipynb").items()
            if name not in ("record", "seed")}


@pytest.mark.parametrize("profile", ["smoke", "cpu", "gpu"])
def test_profiles_can_be_used(profile):
    job, = runner.plan(profile, [NOTEBOOK])
    study.check_parameters(**DEFAULTS | {name: v for name, v in job.parameters.items() if name in DEFAULTS})


@pytest.mark.parametrize("given, message", [
    ({"maps": ["mma", "wmma"]}, "maps: wmma; expected some of mma, mfma, mmac"),
    ({"layers": [0, 30]}, "layers: 30; expected 0 to 29"),
    ({"tokens": 63}, "tokens: 63; expected 64 to 8192"),
    ({"error_histories": []}, "error_histories is empty; expected at least one value from 64 to 131072"),
    ({"accuracy_history": 0}, "accuracy_history: 0; expected 64 to 131072"),
    ({"partitions": [256, 300, 512]}, "partitions: 300; expected some of 128, 256, 512, 1024, with 256 and 512"),
    ({"partitions": [256]}, "partitions: no 512; expected some of 128"),
    ({"scale_tokens": [32, 512, 256]}, "scale_tokens: 512; expected some of 32, 64, 128, 256, with 32 and 256"),
    ({"error_heads": [9, 3]}, "error_heads: [9, 3]; expected query heads, KV heads and head_dim"),
    ({"error_heads": [9, 2, 64]}, "error_heads: heads = 9; expected a multiple of kv_heads = 2"),
    ({"error_heads": [9, 3, 80]}, "error_heads: head_dim = 80; expected one of 64, 96, 128, 256"),
    ({"settings": [[1, 24, 4]]}, "settings: [1, 24, 4]; expected batch, heads, kv_heads and head_dim"),
    ({"compared": [[0, 24, 4, 64]]}, "compared: batch = 0; expected an integer from 1"),
    ({"peer_settings": []}, "peer_settings is empty; expected at least one batch"),
])
def test_parameters_that_cannot_be_used_are_named(given, message):
    with pytest.raises(ValueError, match=f"^{re.escape(message)}"):
        study.check_parameters(**DEFAULTS | given)


# ---- where kernels run, and on what

def test_the_devices_own_map_comes_first_and_others_run_in_waves_of_theirs(lab, places):
    assert [(p.matrix, p.backend.wave) for p in places] == [("mma", 32), ("mmac", 64)]
    assert places[0].backend is lab.backend and all("simulator" in p.name for p in places)
    assert len(study.places(lab, ["mma"])) == 1


def test_maps_that_nothing_can_run_are_left_out(lab, monkeypatch):
    def no_compiler(wave):
        raise BackendUnavailable("no compiler")
    monkeypatch.setattr(study, "CpuBackend", no_compiler)
    assert [p.matrix for p in study.places(lab, ["mfma", "mmac"])] == ["mma"]


def test_what_is_compiled_ahead_is_what_is_run(places, monkeypatch):
    """The experiments on speed add forms on the first place only."""
    seen = []
    monkeypatch.setattr(study.op.Attention, "decode",
                        lambda self, q: seen.append((self.backend.wave, self.cache.head_dim, self.form)))
    monkeypatch.setattr(study.op.Attention, "prefill", lambda self, q: None)
    study.compile_ahead(places, 96, [512], [64])
    forms = {(wave, head_dim): {f for w, h, f in seen if (w, h) == (wave, head_dim)} for wave, head_dim, _ in seen}
    assert forms.keys() == {(32, 64), (32, 96), (64, 64)}
    assert len(forms[32, 64]) == len(forms[64, 64]) == 6
    assert {f.pv for f in forms[32, 96]} == set(op.PV)
    assert {f.partition for f in forms[32, 96]} == {256, 512} and {f.scale_tokens for f in forms[32, 96]} == {32, 64}


def test_inputs_are_the_last_tokens_of_their_sequence(lab):
    inputs = study.random_inputs(lab, 100, 6, 2, queries=3)
    assert (inputs.causal_offset, inputs.cache.batch, int(inputs.cache.lengths[0])) == (97, 1, 100)
    k, v = inputs.cache.dequantize(0)
    assert np.abs(k - inputs.k).max() < 0.03 and np.abs(v - inputs.v).max() < 0.03
    assert stats.errors(inputs.exact, inputs.exact_of_real_q).relative_frobenius < 0.02
    # by_kv_head's probabilities are those of the reference
    out = np.empty(inputs.q.shape)
    for p, _, codes, scales, place in inputs.by_kv_head():
        assert np.allclose(p.sum(axis=1), 1) and (p.reshape(3, 3, 100)[0, :, 98:] == 0).all()
        out[place] = ((p * scales) @ codes.T).reshape(3, 3, 64)
    assert np.allclose(out, inputs.exact, rtol=1e-12, atol=1e-14)


def test_random_inputs_follow_the_seed_and_their_sizes_only(lab):
    again = replace(lab, record=None)
    study.random_inputs(lab, 64)
    assert np.array_equal(study.random_inputs(lab, 100).k, study.random_inputs(again, 100).k)
    assert not np.array_equal(study.random_inputs(lab, 100).k[:64], study.random_inputs(lab, 64).k)
    assert 6 < study.spread(study.random_inputs(lab, 400, octaves=3)) / study.spread(study.random_inputs(lab, 400)) < 12


# ---- the scale inside the sum (P01, P02, P04)

def test_folding_is_exact_and_one_scale_is_not(lab, problems):
    found = judged(lab, study.folding(lab, problems), "P01", "reproduced")
    assert all(row["folded"] < 1e-15 and 0.05 < row["one scale, the best"] < 0.8 for row in found.data)


def test_one_scale_would_do_where_all_tokens_have_it(lab, problems):
    v = np.sign(problems[0].v)
    judged(lab, study.folding(lab, [replace(problems[0], v=v)]), "P01", "contradicted")


def test_both_terms_add_up_to_the_error(lab, problems):
    found = judged(lab, study.error_terms(lab, problems), "P02", "reproduced")
    for row in found.data:
        assert 0.002 < row["V cache"] < row["weights"] < row["O - O'"] < 0.02 and row["left over"] < 1e-4
    assert values(lab, "integer_sums_wrong") == [0, 0]


def test_terms_of_another_grouping_do_not_add_up(lab, problems, monkeypatch):
    monkeypatch.setattr(study.pv_model, "groups", lambda tokens, n, size: np.arange(n) // size)
    found = judged(lab, study.error_terms(lab, problems), "P02", "contradicted")
    assert min(values(lab, "integer_sums_wrong")) > 0 and min(row["left over"] for row in found.data) > 0.1


def test_the_largest_sum_is_reached_and_not_passed(lab, problems, monkeypatch):
    found = judged(lab, study.largest_sum(lab, problems[:1]), "P04", "reproduced")
    assert found.data["extreme"] == 32 * 127 * 127 > found.data["others"] > 0
    traced = study.traced
    monkeypatch.setattr(study, "traced", lambda *args: replace(traced(*args), largest=32 * 128 * 127))
    judged(lab, study.largest_sum(lab), "P04", "contradicted")


# ---- two paths (P03)

def test_prefill_and_decode_give_the_same_rows(lab, problems):
    problems = [problems[1], study.rising_inputs(lab, 300, 3, 1)]
    found = judged(lab, study.two_paths(lab, problems), "P03", "reproduced")
    assert {row["path"] for row in found.data} == {study.DECODE, study.PREFILL} and len(found.data) == 4
    assert max(row["to its model"] for row in found.data) < 1e-5 < 1e-3 < min(row["to float64"] for row in found.data)


@pytest.mark.parametrize("change", [
    lambda m: m.setattr(study.pv_model, "prefill", lambda *args: 1.01 * pv_model.decode(*args[:3])),
    lambda m: m.setattr(study, "_partition_sums", lambda *args: np.full(3, 0.99)),
    lambda m: m.setattr(study, "BOUND", 1e-4)])
def test_paths_that_are_not_what_they_are_said_to_be(lab, problems, monkeypatch, change):
    change(monkeypatch)
    judged(lab, study.two_paths(lab, problems[:1]), "P03", "contradicted")


def test_weights_relative_to_another_maximum_do_not_add_up_to_one(simulator, problems):
    attention = op.Attention(simulator, op.on_device(simulator, problems[1].cache), Form(trace=True))
    attention.decode(simulator.array(problems[1].q), causal_offset=problems[1].causal_offset)()
    sums = study._partition_sums(problems[1], attention.trace.weights, 256)
    assert sums.size == 2 * 2 * 3 and np.allclose(sums, 1, atol=1e-6)
    assert not np.allclose(study._partition_sums(problems[1], attention.trace.weights, 128), 1, atol=0.1)


# ---- instructions and tokens (P05, P06)

def test_bf16_takes_twice_as_many_instructions(lab, monkeypatch):
    targets = toolchain.targets()
    if all(targets[target] for target in study.MATRIX_INSTRUCTIONS):
        pytest.skip("no compiler for GPU targets")
    found = judged(lab, study.instructions(lab), "P05", "reproduced")
    assert {(row["P V in"], row["for 32 tokens"]) for row in found.data} == {("int8", 1), ("bf16", 2)}
    monkeypatch.setattr(study.op, "WAVES", 2)
    assert study.instructions(lab).verdict == "contradicted"


def test_without_compilers_nothing_is_counted(lab, monkeypatch):
    monkeypatch.setattr(study.toolchain, "targets", lambda: dict.fromkeys(study.MATRIX_INSTRUCTIONS, "no tool"))
    found = judged(lab, study.instructions(lab), "P05", "not testable here")
    assert "no tool" in found.missing


def test_kernels_tell_which_tokens_they_group(places):
    for place in places:
        step = place.form(Form()).tokens.place(np.arange(64))[0]
        right = study.probe(place.backend, place.form(Form(trace=True)))
        assert np.array_equal(right.step, step) and np.array_equal(right.shared, step[:, None] == step)
        wrong = study.probe(place.backend, place.form(Form(grouping="logical")))
        half = np.arange(64) // 32
        assert wrong.step is None and np.array_equal(wrong.shared, half[:, None] == half)


def test_the_articles_sets_follow_from_the_maps(lab, places, monkeypatch):
    found = judged(lab, study.token_sets(lab, places), "P06", "reproduced")
    assert [row["map"] for row in found.data["rows"]] == list(op.MATRIX)
    assert [row["map"] for row in found.data["rows"] if row.get("multiplied so")] == ["mma", "mmac"]
    assert set(values(lab, "tokens_multiplied_elsewhere") + values(lab, "pairs_quantized_otherwise")) == {0}
    monkeypatch.setattr(study, "ARTICLE_SETS", study.ARTICLE_SETS[::-1])
    judged(lab, study.token_sets(lab, places), "P06", "contradicted")


@pytest.mark.parametrize("probe", [study.Probe(np.arange(64) // 32, np.eye(64, dtype=bool)),
                                   study.Probe(np.arange(64) // 8 % 2, np.eye(64, dtype=bool))])
def test_a_kernel_that_groups_otherwise_contradicts(lab, places, monkeypatch, probe):
    monkeypatch.setattr(study, "probe", lambda *args: probe)
    judged(lab, study.token_sets(lab, places), "P06", "contradicted")


# ---- the wrong groups (P07) and the error against history (P09)

def test_wrong_groups_are_finite_and_wrong_on_every_map(lab, places):
    found = judged(lab, study.wrong_groups(lab, places, [study.random_inputs(lab, 4096)]), "P07", "reproduced")
    assert len(found.data) == 2
    for row in found.data:
        assert row["finite"] and row["ratio"] > 20 and row["wrong, error"] > 0.3 > 0.02 > row["right, error"]
        assert max(row["right, to its model"], row["wrong, to its model"]) < study.SAME
    wrong = {m["case"].get("grouping") for m in lab.record.measurements if m["status"] == "wrong_result"}
    assert wrong == {"logical"}


def test_verdicts_on_wrong_groups(lab, places, problems, monkeypatch):
    monkeypatch.setattr(study, "ARTICLE_WRONG", 10.0)
    judged(lab, study.wrong_groups(lab, places[:1], problems[:1]), "P07", "direction holds")
    attend = study.attend
    monkeypatch.setattr(study, "attend", lambda backend, inputs, form: attend(
        backend, inputs, replace(form, grouping="fragment")))
    judged(lab, study.wrong_groups(lab, places[:1], problems[:1]), "P07", "contradicted")
    monkeypatch.setattr(study, "attend", lambda backend, inputs, form: attend(backend, inputs, form)
                        * np.float32(np.nan if form.grouping == "logical" else 1))
    judged(lab, study.wrong_groups(lab, places[:1], problems[:1]), "P07", "contradicted")


def test_errors_fall_with_the_history(lab):
    found = judged(lab, study.history(lab, (study.random_inputs(lab, n) for n in (512, 4096))), "P09", "reproduced")
    of = {(row["history"], row["P V in"], row["reference"]): row for row in found.data}
    assert len(of) == 2 * (3 + 2)
    to_bf16, quantized, real = (of[4096, "int8", reference] for reference in study.REFERENCES)
    assert 1e-4 < to_bf16["rms"] < 2.6e-4 and abs(quantized["rms"] / to_bf16["rms"] - 1) < 0.1
    assert real["rms"] > 1.1 * quantized["rms"] and of[4096, "bf16", study.REFERENCES[1]]["rms"] < quantized["rms"] / 3


def test_verdicts_on_the_history(lab, monkeypatch):
    small, large = study.random_inputs(lab, 256), study.random_inputs(lab, 1024)
    judged(lab, study.history(lab, [small, large]), "P09", "direction holds")
    grown = replace(large, v=8 * large.v)
    judged(lab, study.history(lab, [small, grown]), "P09", "contradicted")
    monkeypatch.setattr(study, "ARTICLE_ERRORS", {256: (1e-5, 1e-5)})
    judged(lab, study.history(lab, [small, large]), "P09", "direction holds")


# ---- the gate (P16) and the service (P15)

def test_the_gate_tells_right_from_wrong(lab, places, monkeypatch):
    found = judged(lab, study.gate(lab, places[1:]), "P16", "reproduced")
    assert [row["kernel"] for row in found.data["rows"]] == ["right", *study.WRONG_FORMS]
    assert all(row["finite"] for row in found.data["rows"])
    assert [v > 0 for v in values(lab, "checks_failed")] == [False, True, True, True]
    monkeypatch.setattr(study, "WRONG_FORMS", {"right under another name": Form()})
    judged(lab, study.gate(lab, places[1:]), "P16", "contradicted")


def test_the_service_is_left_to_a_model_that_ends_its_answers(lab):
    assert "trained" in judged(lab, study.service(), "P15", "not testable here").missing
