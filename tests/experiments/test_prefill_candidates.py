"""The candidates and the gated delta net at small sizes on the simulator; made-up times and planted faults bring out
the other verdicts."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from kernelbook import experiments, measure, records, shapes
from kernelbook.backends.cpu import CpuBackend
from kernelbook.experiments import prefill_candidates as study
from kernelbook.measure import Ceiling
from kernelbook.ops import gated_delta_net as gdn
from kernelbook.ops import prefill_gemm as op
from kernelbook.peers import delta_net as delta_net_peers
from kernelbook.peers import gemm as gemm_peers

HERE = ("tiled_fp32", "int8_dot", "int8_matrix", "tensor_cores")
"""Designs that the simulator runs."""
MODEL = replace(shapes.QWEN3_5_27B, projections=(
    shapes.Projection("q", 64, 64, 3, "norm"), shapes.Projection("k", 16, 96, 2, "norm"),
    shapes.Projection("o", 64, 64, 4, "attention")))


@pytest.fixture
def lab(simulator, environment):
    return experiments.Lab(simulator, records.Record("2_prefill_breakdown", {}, environment))


class Timed(CpuBackend):
    """Claims to be timed, so that times can be made up."""
    simulated = False
    l2_bytes = 1 << 10
    multiprocessors = 2


@pytest.fixture
def timed(environment, made_up_times):
    record = records.Record("2_prefill_breakdown", {}, {**environment, "simulated": False})
    return experiments.Lab(Timed(), record,
                           ceilings={"bf16_matmul": Ceiling("bf16_matmul", 100.0, "TFLOP/s", 99, 101, 9, "how")})


def judged(lab, finding, verdict):
    assert (finding.claim, finding.verdict) == ("B14", verdict), finding.evidence
    lab.judge(finding)
    for row in finding.data:
        assert all(isinstance(v, str | int | float | None) for v in row.values()), row
    return finding


def performance(lab):
    return [m for m in lab.record.measurements if m["value"] is not None and records.is_performance(m["metric"])]


def spoil(monkeypatch, condition, factor=1.1):
    """Make products wrong in designs that a condition on (design, K) holds for."""
    real = op.PrefillGemm.prepare

    def prepare(self, x, **options):
        launch = real(self, x, **options)
        if not condition(self.design, self.k):
            return launch

        def broken():
            out = launch()
            out *= np.float32(factor)
            return out
        return broken
    monkeypatch.setattr(op.PrefillGemm, "prepare", prepare)


# ---- parameters

GOOD = {"rows": [16], "designs": ["wgmma"], "pass_rows": 16, "tokens": [1], "layers": 1}


@pytest.mark.parametrize("given, message", [
    ({"rows": []}, "rows is empty; expected at least one value from 1 to 65536"), ({"rows": [0]}, "rows: 0; expected"),
    ({"designs": ["fp8"]}, "designs: 'fp8'; expected some of tiled_fp32, int8_dot"),
    ({"pass_rows": 512}, "pass_rows: 512; expected one of the rows 16"), ({"tokens": []}, "tokens is empty"),
    ({"layers": 0}, "layers: 0; expected 1 to 1024"),
])
def test_values_that_no_experiment_can_use_are_named(lab, given, message):
    with pytest.raises(ValueError, match=f"^{message}"):
        study.check_parameters(**GOOD | given)
    study.check_parameters(**GOOD)
    with pytest.raises(ValueError, match="pass_rows: 512"):
        study.candidates(lab, MODEL, rows=[16])
    assert not lab.record.measurements


def test_bf16_rounds_to_even():
    x = np.array([1, 1 + 2**-8, 1 + 3 * 2**-8, -1 - 2**-7, 0, -0.0, 3e38], np.float32)
    rounded = study.from_bf16(study.to_bf16(x))
    assert rounded[:6].tolist() == [1, 1, 1 + 2**-6, -1 - 2**-7, 0, 0]
    assert np.array_equal(rounded, torch.from_numpy(x).to(torch.bfloat16).float().numpy())


# ---- candidates (B14)

def test_without_a_gpu_results_are_checked(lab):
    found = judged(lab, study.candidates(lab, MODEL, rows=(1, 20, 512)), "not testable here")
    assert "GPU" in found.missing and not performance(lab)
    assert {(row["projection"], row["M"], row["variant"]) for row in found.data} == {
        (p, m, v) for p in "qk" for m in (1, 20, 32) for v in (study.BASE, *HERE)}
    for row in found.data:
        form = op.DESIGNS[row["variant"]].activations if row["variant"] in HERE else "float32"
        assert row["error"] <= study.BOUND[form]
        assert (1e-3 < row["error to float"] < 2e-2) == (form != "float32")
        assert row["candidate"] == {study.BASE: study.BASE, **study.CANDIDATES}[row["variant"]]
    for variant in ("5_wgmma", "7_packed_wgmma"):
        skipped = [m for m in lab.record.measurements if m["variant"] == variant]
        assert len(skipped) == 6 and {m["status"] for m in skipped} == {"skipped"}
        assert all("needs Hopper's warpgroup instructions" in m["reason"] for m in skipped)


def test_products_in_panels(environment, hopper_in_numpy, peers):
    """On every shape, the narrowest too, against the same reference and with the same activations as other designs on
    bf16."""
    lab = experiments.Lab(hopper_in_numpy, records.Record("2_prefill_breakdown", {}, environment))
    model = replace(MODEL, projections=(*MODEL.projections, shapes.Projection("b", 12, 160, 3, "norm")))
    found = study.candidates(lab, model, (1, 20), ("tensor_cores", "packed_wgmma"), pass_rows=20)
    rows = [row for row in found.data if row["variant"] == "packed_wgmma"]
    assert [(row["projection"], row["M"]) for row in rows] == [(p, m) for p in "qkb" for m in (1, 20)]
    assert all(1e-3 < row["error"] <= study.BOUND["bf16"] and row["candidate"] == "C" for row in rows)
    assert {m["variant"] for m in lab.record.measurements} == {
        "q4_probe_tiles_of_16", "4_tensor_cores", "7_packed_wgmma"}
    assert len({id(call["data"]) for call in hopper_in_numpy.launches}) == 3  # packed once a shape


def test_a_wrong_design_shows_without_a_gpu(lab, monkeypatch):
    spoil(monkeypatch, lambda design, k: (design, k) == ("int8_matrix", 96))
    found = judged(lab, study.candidates(lab, MODEL, (16,), pass_rows=16), "not testable here")
    assert found.evidence.endswith("wrong: int8_matrix on 16 x 96 at M = 16.") and found.measured == (
        "some results are wrong")
    assert ("int8_matrix", "q") in {(r["variant"], r["projection"]) for r in found.data}
    assert ("int8_matrix", "k") not in {(r["variant"], r["projection"]) for r in found.data}


def test_where_all_is_wrong_the_finding_says_so(lab, monkeypatch):
    monkeypatch.setattr(study, "BOUND", dict.fromkeys(study.BOUND, 0.0))
    found = judged(lab, study.candidates(lab, MODEL, (16,), pass_rows=16), "not testable here")
    assert found.data == [] and found.measured == "some results are wrong"


@pytest.mark.parametrize("pacing, verdict, ahead", [
    ({"tensor_cores": 5}, "reproduced", 4), ({"tensor_cores": [11, 5, 5, 5]}, "direction holds", 3),
    ({"tensor_cores": 10}, "not reproduced", 0), ({"tensor_cores": 12}, "contradicted", 0),
    ({"tensor_cores": 8, "int8_matrix": 6}, "contradicted", 0),
    ({"tensor_cores": 8, "tiled_fp32": [20, 6, 20, 20]}, "direction holds", 3)])
def test_the_pass_decides(timed, pace, pacing, verdict, ahead):
    """Cases come as M = 16 and 20 of one shape, then of the other; 20 is the pass."""
    pace.update({name: list(us) if isinstance(us, list) else us for name, us in pacing.items()})
    found = judged(timed, study.candidates(timed, MODEL, (16, 20), pass_rows=20), verdict)
    if verdict != "contradicted" or ahead:
        assert f"C is the fastest on {ahead}" in found.evidence
    row = next(row for row in found.data if row["variant"] == "tiled_fp32" and row["M"] == 20)
    assert row["TFLOP/s"] == pytest.approx(2 * 20 * row["N"] * row["K"] / row["us"] / 1e6)
    assert row["of bf16 matmul"] == pytest.approx(row["TFLOP/s"] / 100)


def test_int8_activations_are_rounded_in_every_timed_call(timed, monkeypatch):
    rounded = []
    real = op.prepare_quantize

    def prepare(backend, x, **options):
        launch = real(backend, x, **options)
        return lambda: rounded.append(1) or launch()
    monkeypatch.setattr(op, "prepare_quantize", prepare)
    model = replace(MODEL, projections=MODEL.projections[:1])
    study.candidates(timed, model, (16,), ("int8_dot",), pass_rows=16)
    assert len(rounded) == 1 + 2  # a check and, of two copies, the times


def test_the_articles_engine_multiplies_every_tile_of_tokens(timed, monkeypatch):
    """33 tokens are three tiles of 16; its products are right, or it would have no row."""
    called = []
    real = study.qwen3_5.tile_by_tile

    def tile_by_tile(backend, design, tiles, x, out):
        called.append((design.tile, design.gemm, len(x), len(out)))
        return real(backend, design, tiles, x, out)
    monkeypatch.setattr(study.qwen3_5, "tile_by_tile", tile_by_tile)
    model = replace(MODEL, projections=MODEL.projections[:1])
    found = study.candidates(timed, model, (33,), HERE, pass_rows=33)
    assert called == 2 * [(16, "explicit_fma", 48, 48)]
    assert any(row["variant"] == "article" and row["us"] > 0 for row in found.data)


def test_a_wrong_design_has_no_time_and_no_pass(timed, pace, monkeypatch):
    pace.update({"tensor_cores": 5, "int8_matrix": 9})
    spoil(monkeypatch, lambda design, k: (design, k) == ("int8_matrix", 96))
    found = judged(timed, study.candidates(timed, MODEL, (16,), pass_rows=16), "direction holds")
    assert "Left out, since their results are wrong: int8_matrix on 16 x 96 at M = 16." in found.evidence
    assert "int8_matrix" not in {row["variant"] for row in study.whole_pass(found.data, MODEL, 16)}
    assert not [m for m in performance(timed) if m["variant"] == "3_int8_matrix" and m["case"].get("K") == 96]


def test_without_a_right_c_nothing_is_reproduced(timed, monkeypatch):
    spoil(monkeypatch, lambda design, k: (design, k) == ("tensor_cores", 96))
    found = judged(timed, study.candidates(timed, MODEL, (16,), pass_rows=16), "not reproduced")
    assert "no pass to compare" in found.evidence
    spoil(monkeypatch, lambda design, k: design == "tensor_cores")
    found = study.candidates(timed, MODEL, (32,), pass_rows=32)
    assert found.verdict == "not reproduced" and "No right product of candidate C" in found.evidence


def test_a_candidate_that_is_not_asked_for_is_missing(timed):
    found = judged(timed, study.candidates(timed, MODEL, (16,), ("tiled_fp32", "int8_dot"), 16), "not testable here")
    assert found.missing.startswith("a design of candidate C that runs here")


def test_an_output_that_is_not_finite_anywhere_is_wrong(timed, monkeypatch):
    monkeypatch.setattr(study, "SAMPLE", 1)
    real = op.PrefillGemm.prepare

    def prepare(self, x, **options):
        launch = real(self, x, **options)

        def broken():
            launch()[-1, 8] = np.nan  # no column that is compared
        return broken
    monkeypatch.setattr(op.PrefillGemm, "prepare", prepare)
    found = study.candidates(timed, MODEL, (16,), pass_rows=16)
    assert {row["variant"] for row in found.data} == {study.BASE}


def test_a_case_too_large_is_skipped_with_its_reason(timed):
    found = study.candidates(timed, MODEL, (16, 4000), pass_rows=16, memory_gib=0.005)
    assert {row["M"] for row in found.data} == {16}
    skipped = [m for m in timed.record.measurements if m["status"] == "skipped" and m["case"].get("M") == 4000]
    assert len(skipped) == 2 and "GiB, more than the 0.005 allowed" in skipped[0]["reason"]


def times_of(variant, candidate, q, k):
    return [{"N": n, "K": kk, "M": 512, "variant": variant, "candidate": candidate, "us": us, "p10": us - 1,
             "p90": us + 1} for (n, kk), us in (((64, 64), q), ((16, 96), k)) if us]


def test_a_whole_pass_counts_every_projection():
    rows = times_of("article", "article", 100, 50) + times_of("wgmma", "C", 10, 5) + times_of("tiled_fp32", "A", 20, 0)
    best, base = study.whole_pass(rows, MODEL)
    assert (best["variant"], base["variant"]) == ("wgmma", "article")
    assert best["ms"] == pytest.approx((7 * 10 + 2 * 5) / 1e3) and best["p90"] == pytest.approx((7 * 11 + 2 * 6) / 1e3)
    assert best["article / this"] == pytest.approx(10) and base["article / this"] == 1
    flop = MODEL.flops(512)
    assert best["of the FLOP"] == 1 and best["TFLOP/s"] == pytest.approx(flop / 1e9 / best["ms"])
    part = study.whole_pass(times_of("wgmma", "C", 10, 0), MODEL)[0]
    assert part["article / this"] is None and part["of the FLOP"] == pytest.approx(
        7 * 64 * 64 / (7 * 64 * 64 + 2 * 16 * 96))
    assert study.whole_pass(rows, MODEL, 16) == []


def test_a_peer_may_lack_a_small_shape_of_a_pass():
    small = replace(MODEL, projections=(*MODEL.projections, shapes.Projection("b", 4, 32, 1, "norm")))
    rows = [row for name, letter in (("wgmma", "C"), ("tiled_fp32", "A"), ("humming_int4", "peer"))
            for row in times_of(name, letter, 10, 5)]
    rows += [row | {"N": 4, "K": 32} for row in times_of("wgmma", "C", 1, 0)]
    found = study.whole_pass(rows, small)
    assert [row["variant"] for row in found] == ["humming_int4", "wgmma"]
    assert 0.99 < found[0]["of the FLOP"] < found[1]["of the FLOP"] == 1


def peer(name, give, bits=16):
    def prepare(weights, group, copies):
        w = torch.from_numpy(weights)
        return [lambda x: give(x @ w.T)] * copies
    return gemm_peers.Peer(name, bits, "float32", None, prepare)


def fails(out):
    raise RuntimeError("no such kernel")


@pytest.fixture
def peers(monkeypatch):
    """A list of those there are."""
    known = []
    monkeypatch.setattr(gemm_peers, "all_peers", lambda: known)
    monkeypatch.setattr(gemm_peers, "activations", lambda peer, x: torch.from_numpy(x))
    return known


def test_peers_stand_beside_and_may_fail(timed, pace, peers):
    peers += [peer("cublas_bf16", lambda out: out), peer("humming_int4", fails, 4),
              peer("tinygemm_int4", lambda out: out, 4)]
    pace.update({"cublas_bf16": 2, "tensor_cores": 5})
    found = judged(timed, study.candidates(timed, MODEL, (16,), pass_rows=16), "reproduced")
    assert {row["variant"] for row in found.data if row["candidate"] == "peer"} == {"cublas_bf16"}
    assert "peers: cublas_bf16 0.0 ms" in found.evidence
    assert [m["reason"] for m in timed.record.measurements if m["variant"] == "humming_int4"] == 2 * [
        "RuntimeError: no such kernel"]


def test_a_wrong_peer_has_no_time(timed, peers):
    peers.append(peer("cublas_bf16", lambda out: out * 1.1))
    found = study.candidates(timed, MODEL, (16,), pass_rows=16)
    assert "peer" not in {row["candidate"] for row in found.data} and "Left out" not in found.evidence


def test_copies_are_as_many_as_a_cache_cannot_hold(timed, monkeypatch):
    """Four times this L2 are 57 weights of 2304 bytes, less what a call reads and writes besides."""
    timed.backend.l2_bytes = 1 << 15
    model = replace(MODEL, projections=MODEL.projections[:1])
    counts = []
    real = measure.device_times

    def times(contenders, **options):
        counts.append({len(calls) for calls in contenders.values()})
        return real(contenders, **options)
    monkeypatch.setattr(measure, "device_times", times)
    found = study.candidates(timed, model, (16, 200), HERE, pass_rows=16)
    assert counts == [{54}, {13}] and {row["cache"] for row in found.data} == {"cold"}
    monkeypatch.setattr(study, "MAX_COPIES", 20)
    found = study.candidates(timed, model, (1, 200), HERE, pass_rows=1)
    assert counts[2:] == [{20}, {13}]
    assert {(row["M"], row["cache"]) for row in found.data} == {(1, "warm"), (200, "cold")}


# ---- the gated delta net

def test_delta_net_without_a_gpu(lab):
    rows = study.delta_net(lab, (70, 512, 2048), 2, 4)
    assert [(row["tokens"], row["key heads"], row["value heads"]) for row in rows] == 3 * [(70, 1, 2)] + 3 * [
        (130, 1, 2)]
    bounds = [bound for *_, bound in study.GDN_WAYS]
    assert all(row["error"] <= bound for row, bound in zip(rows, 2 * bounds, strict=True))
    assert not performance(lab) and all("us" not in row for row in rows)


def gdn_peer(factor=1.0, fault=None):
    def prepare(inputs):
        def call():
            if fault:
                raise fault
            return torch.from_numpy(gdn.recurrence(inputs)[0] * factor)
        return call
    return delta_net_peers.DeltaNetPeer("fla_chunk_bf16", None, prepare)


def test_delta_net_beside_a_peer(timed, pace, monkeypatch):
    monkeypatch.setattr(delta_net_peers, "all_peers", lambda: [gdn_peer(1.01)])
    pace.update({"fla_chunk_bf16": 20, "chunked, 1 term": 15, "sequential": 100})
    rows = {row["variant"]: row for row in study.delta_net(timed, (65,), 1, 2)}
    assert {name: row["of FLA"] for name, row in rows.items()} == {
        "sequential": 5, "chunked, 2 terms": 0.5, "chunked, 1 term": 0.75, "fla_chunk_bf16": 1}
    assert rows["fla_chunk_bf16"]["error"] == pytest.approx(0.01)
    assert {(m["variant"], m["case"].get("terms")) for m in performance(timed)} == {
        ("2_sequential", 1), ("4_chunk_scan", 2), ("4_chunk_scan", 1), ("fla_chunk_bf16", None)}
    assert all(m["cache"] == "warm" for m in performance(timed))


@pytest.mark.parametrize("other, status, reason", [
    (gdn_peer(1.1), "wrong_result", "exceeds 0.03"), (gdn_peer(fault=RuntimeError("none")), "runtime_error", "none"),
    (delta_net_peers.DeltaNetPeer("fla_chunk_bf16", "not here", None), "skipped", "not here")])
def test_a_delta_net_peer_may_be_wrong_fail_or_lack(timed, monkeypatch, other, status, reason):
    monkeypatch.setattr(delta_net_peers, "all_peers", lambda: [other])
    rows = study.delta_net(timed, (65,), 1, 2)
    assert len(rows) == 3 and all(row["of FLA"] is None for row in rows)
    found = [m for m in timed.record.measurements if m["variant"] == "fla_chunk_bf16"]
    assert {m["status"] for m in found} == {status} and reason in found[0]["reason"]


def test_a_wrong_recurrence_has_no_row(timed, monkeypatch):
    real = gdn.GatedDeltaNet.prepare_recurrence

    def prepare(self, inputs, **options):
        launch = real(self, inputs, **options)
        return (lambda: launch() * np.float32(1.1)) if self.design == "chunked" else launch
    monkeypatch.setattr(gdn.GatedDeltaNet, "prepare_recurrence", prepare)
    assert [row["variant"] for row in study.delta_net(timed, (65,), 1, 2)] == ["sequential"]


def test_delta_net_too_large_is_skipped(timed):
    assert study.delta_net(timed, (65,), memory_gib=1e-3) == []
    assert any("more than the 0.001 allowed" in (m["reason"] or "") for m in timed.record.measurements)


def test_errors_grow_through_layers(lab):
    rows = study.through_layers(lab, layers=3, tokens=20)
    assert [row["layer"] for row in rows] == 5 * [1, 2, 3]
    last = {(row["recurrence"], row["activations"]): row["error"] for row in rows if row["layer"] == 3}
    assert last["sequential", "float"] < 1e-6 < last["chunked, 2 terms", "float"] < 2e-4
    assert 1e-3 < last["chunked, 2 terms", "bf16"] < last["chunked, 2 terms", "int8"] < 0.1
    assert {m["status"] for m in lab.record.measurements} == {"passed"}
    assert {m["case"]["activations"] for m in lab.record.measurements} == {"float", "bf16", "int8"}
