"""Which design a product takes: by a measured table, by what can run, and as records have it."""

from dataclasses import dataclass
from types import SimpleNamespace

import numpy as np
import pytest
import yaml

from kernelbook import packing, readme, stats, tables
from kernelbook.ops import gemm_dispatch, packed_gemm
from kernelbook.ops.gemm_dispatch import Choice, Dispatched, Weight, choices_from_record, choose, converted
from kernelbook.ops.grouped_gemm import reference


@dataclass(frozen=True)
class Design:
    """What choosing asks of a design."""

    bound: float
    max_rows: int | None = None
    device: str | None = None
    activations: str = "float32"
    stands_in: bool = True

    def why_not(self, backend, weights, m):
        assert (weights.n, weights.k, weights.precision) == Weight(*weights)
        if self.device not in (None, backend.device):
            return f"needs {self.device}"
        if self.max_rows and m > self.max_rows:
            return f"takes at most {self.max_rows} rows"


LADDER = {"wide": Design(2e-6), "ring": Design(2e-6, 32), "ring_f16": Design(5e-4, 32),
          "special": Design(2e-6, 8, stands_in=False),
          "wgmma_f16": Design(5e-4, device="an H200"), "wgmma_bf16": Design(4e-3, device="an H200")}
MEASURED = {"an H200": {"int8": {
    "accurate": {"4096 x 4096": {2: "ring", 64: "wide"}},
    "f16": {"4096 x 4096": {1: "ring", 32: "ring_f16", 2048: "wgmma_f16"}, "64 x 4096": {2048: "wide"}}}}}
H200, OTHER = SimpleNamespace(device="an H200"), SimpleNamespace(device="an RTX")


@pytest.fixture
def fake(monkeypatch):
    monkeypatch.setattr(gemm_dispatch.packed_gemm, "DESIGNS", LADDER)


@pytest.mark.parametrize("n, k, m, accuracy, expected", [
    (4096, 4096, 1, "f16", "ring"), (4096, 4096, 2, "f16", "ring_f16"), (4096, 4096, 32, "f16", "ring_f16"),
    (4096, 4096, 33, "f16", "wgmma_f16"), (4096, 4096, 10**6, "f16", "wgmma_f16"),
    (4096, 4096, 2, "accurate", "ring"), (4096, 4096, 3, "accurate", "wide"),
    (2048, 2048, 33, "f16", "wgmma_f16"), (128, 2048, 33, "f16", "wide"),  # the nearest shape
])
def test_a_measured_device_takes_what_was_fastest(fake, n, k, m, accuracy, expected):
    found = choose((n, k, "int8"), m, H200, accuracy, MEASURED)
    assert found.design == expected and found.reason.startswith("fastest at ") and found.reason.endswith("an H200")


def test_panels_and_weights_are_chosen_for_alike(fake):
    panels = packing.random_panels(np.random.default_rng(0), 48, 64, "int8")
    assert choose(panels, 1, H200, "f16", MEASURED) == choose((48, 64, "int8"), 1, H200, "f16", MEASURED)


def test_another_device_falls_back_and_says_why(fake):
    found = choose((4096, 4096, "int8"), 16, OTHER, "f16", MEASURED)
    assert found == Choice("ring_f16", "fastest at 4096 x 4096, M up to 32, on an H200; this device was not measured",
                           16)
    found = choose((4096, 4096, "int8"), 512, OTHER, "f16", MEASURED)
    assert found.design == "wide" and found.reason.endswith("not measured; wgmma_f16: needs an H200")


def test_what_was_not_measured_takes_the_last_that_can_run(fake):
    for measured in ({}, {"an H200": {"int4": MEASURED["an H200"]["int8"]}}):
        assert choose((64, 64, "int8"), 8, H200, "bf16", measured).design == "wgmma_bf16"
        assert choose((64, 64, "int8"), 8, OTHER, "bf16", measured).design == "ring_f16"
        assert choose((64, 64, "int8"), 33, OTHER, "bf16", measured).design == "wide"
        assert "no product of this kind was measured" in choose((64, 64, "int8"), 8, OTHER, "f16", measured).reason


def test_rows_that_nothing_takes_at_once_are_as_few_launches_as_can_be(monkeypatch):
    monkeypatch.setattr(gemm_dispatch.packed_gemm, "DESIGNS", {"ring": Design(2e-6, 32), "ranges": Design(2e-6, 4)})
    assert choose((64, 64, "int8"), 4, OTHER, "accurate", {}).design == "ranges"
    found = choose((64, 64, "int8"), 100, OTHER, "accurate", {})
    assert (found.design, found.rows) == ("ring", 32)


def test_what_is_for_some_shapes_only_is_taken_where_it_was_measured_or_nothing_else_can(fake, monkeypatch):
    measured = {"an H200": {"int8": {"accurate": {"64 x 64": {4: "special", 64: "ring"}}}}}
    assert choose((64, 64, "int8"), 4, H200, "accurate", measured).design == "special"
    assert choose((64, 64, "int8"), 8, H200, "accurate", measured).design == "ring"
    assert choose((64, 64, "int8"), 4, H200, "accurate", {}).design == "ring"
    monkeypatch.setattr(gemm_dispatch.packed_gemm, "DESIGNS", {"special": LADDER["special"]})
    assert choose((64, 64, "int8"), 4, H200, "accurate", {}).design == "special"


def test_a_table_cannot_name_a_design_that_breaks_the_class(fake):
    loose = {"an H200": {"int8": {"accurate": {"64 x 64": {1: "ring_f16"}}}}}
    found = choose((64, 64, "int8"), 1, H200, "accurate", loose)
    assert found.design == "ring" and "ring_f16: no design of the class 'accurate'" in found.reason


def test_more_rows_than_any_takes_go_some_at_a_time(fake, monkeypatch):
    monkeypatch.setattr(gemm_dispatch.packed_gemm, "DESIGNS", {name: LADDER[name] for name in ("ring", "wgmma_f16")})
    for accuracy in ("accurate", "f16"):
        found = choose((4096, 4096, "int8"), 100, OTHER, accuracy, MEASURED)
        assert (found.design, found.rows) == ("ring", 32)
        assert found.reason.endswith("; 32 rows at a time, since no design of the class takes 100")
    assert choose((4096, 4096, "int8"), 100, H200, "f16", MEASURED).rows == 100


def test_a_class_that_is_none_and_products_that_none_takes_are_refused(fake, monkeypatch):
    with pytest.raises(ValueError, match=r"accuracy 'fp8'; expected one of 'accurate' \(2e-06\), 'f16'"):
        choose((64, 64, "int8"), 1, H200, "fp8", MEASURED)
    monkeypatch.setattr(gemm_dispatch.packed_gemm, "DESIGNS", {"wgmma_f16": LADDER["wgmma_f16"]})
    for accuracy, reasons in (("accurate", ""), ("f16", "wgmma_f16: needs an H200")):
        with pytest.raises(ValueError, match=f"no {accuracy} design multiplies 33 rows by 64 x 96 of int8 on an RTX: "
                                             f"{reasons}$"):
            choose((64, 96, "int8"), 33, OTHER, accuracy, MEASURED)


def test_classes_of_accuracy():
    assert [gemm_dispatch.accuracy_of(b) for b in (5e-7, 2e-6, 5e-4, 4e-3)] == ["accurate", "accurate", "f16", "bf16"]
    with pytest.raises(ValueError, match="0.01"):
        gemm_dispatch.accuracy_of(0.01)


def test_every_design_has_a_class():
    assert all(gemm_dispatch.accuracy_of(design.bound) for design in packed_gemm.DESIGNS.values())


# ---- activations

def test_conversions_round_to_nearest_even_and_keep_what_is_no_number():
    x = np.array([[1.0, -2.5, 1 + 2**-8, 1 + 3 * 2**-8, 3e38, np.inf, -np.inf, 0.0, -0.0, 1e-40]], np.float32)
    bits = converted(x, "bfloat16")
    assert bits.dtype == np.uint16 and bits.shape == x.shape
    back = (bits.astype(np.uint32) << 16).view(np.float32)
    # halfway cases go to even; the largest numbers may round to infinity
    assert np.array_equal(back[0, :4], np.array([1, -2.5, 1, 1 + 2**-6], np.float32))
    assert np.array_equal(back[0, 5:9], x[0, 5:9]) and np.signbit(back[0, 8])
    nan = np.array([0x7FC00000, 0x7FFFFFFF, 0xFFFFFFFF, 0x7F800001], np.uint32).view(np.float32)
    assert np.isnan((converted(nan, "bfloat16").astype(np.uint32) << 16).view(np.float32)).all()
    assert converted(np.array([7e4, 1.0], np.float32), "float16").tolist() == [np.inf, 1.0]
    assert converted(x, "float32") is x


# ---- the product

def weight(precision="int8", n=40, k=96):
    return packing.random_panels(np.random.default_rng(3), n, k, precision)


@pytest.mark.parametrize("accuracy", gemm_dispatch.ACCURACY)
@pytest.mark.parametrize("precision", ["int8", "int4"])
def test_a_product_keeps_its_class_whatever_the_rows(backend, precision, accuracy):
    panels = weight(precision)
    gemm = Dispatched(backend, panels, accuracy)
    strips, rng = packing.unpack(panels), np.random.default_rng(4)
    for m in (1, 5, 33, 1):
        x = rng.standard_normal((m, 96), np.float32)
        out = backend.numpy(gemm(backend.array(x)))
        error = stats.errors(out, reference(x, strips)).relative_frobenius
        assert error <= gemm_dispatch.ACCURACY[accuracy], (m, gemm.choose(m))
    assert sum(gemm.routes.values()) == 4 and all(choice.reason for choice in gemm.routes)
    assert backend.numpy(gemm(backend.empty((0, 96), np.float32))).shape == (0, 40)


def test_a_product_takes_out_and_refuses_what_it_cannot_take(simulator):
    gemm, x = Dispatched(simulator, weight(), "accurate"), simulator.array(np.ones((2, 96), np.float32))
    out = simulator.empty((2, 40), np.float32)
    assert gemm(x, out=out) is out and np.isfinite(out).all()
    for bad, error, message in [
            (np.ones((2, 96), np.float64), TypeError, "float64; expected float32"),
            (np.ones((2, 95), np.float32), ValueError, r"shape \(2, 95\); expected \(2, 96\)"),
            (np.ones(96, np.float32), ValueError, "shape")]:
        with pytest.raises(error, match=message):
            gemm(simulator.array(bad))
    with pytest.raises(TypeError, match="expected an array on"):
        gemm([[1.0] * 96])


def test_the_table_decides(simulator):
    name, other = accurate_designs(simulator)[:2]
    table = {simulator.device: {"int8": {"accurate": {"40 x 96": {1: name, 64: other}}}}}
    gemm = Dispatched(simulator, weight(), "accurate", measured=table)
    for m in (1, 2):
        gemm(simulator.array(np.ones((m, 96), np.float32)))
    assert [choice.design for choice in gemm.routes] == [name, other]


def accurate_designs(backend):
    return [name for name, design in packed_gemm.DESIGNS.items()
            if design.bound <= 2e-6 and design.why_not(backend, Weight(40, 96, "int8"), 2) is None]


# ---- the table from a record

def timed(variant, accuracy, m, us, codes="int8", n=64, k=128, **fields):
    return {"kernel": "gemm_ladder", "variant": variant, "metric": "time_us", "cache": "cold", "value": us,
            "case": {"M": m, "N": n, "K": k, "group": 32, "codes": codes, "accuracy": accuracy}} | fields


def record(*measurements, device="NVIDIA H200"):
    return {"measurements": list(measurements), "environment": {"device": device}}


def test_a_table_keeps_a_design_as_long_as_it_is_near_the_fastest():
    found = choices_from_record(record(
        timed("6_ring", "accurate", 1, 10.1), timed("5_direct", "accurate", 1, 10.0),
        timed("6_ring", "accurate", 2, 10.0), timed("5_direct", "accurate", 2, 20.0),
        timed("6_ring", "accurate", 4, 15.0), timed("5_direct", "accurate", 4, 12.0),
        timed("7_wgmma_f16", "f16", 4, 11.0), timed("7_wgmma_f16", "f16", 2, 11.0),
        timed("7_wgmma_bf16", "bf16", 4, 10.9)))
    assert found == {"int8": {"accurate": {"64 x 128": {2: "ring", 4: "direct"}},
                              "f16": {"64 x 128": {2: "ring", 4: "wgmma_f16"}},
                              "bf16": {"64 x 128": {2: "ring", 4: "wgmma_bf16"}}}}


def test_only_cold_times_of_ours_that_passed_count():
    peer = timed("humming_int8", None, 1, 1.0)
    del peer["case"]["accuracy"]
    assert choices_from_record(record(
        peer, timed("6_ring", "accurate", 1, None), timed("6_ring", "accurate", 1, 5, cache="warm"),
        timed("6_ring", "accurate", 1, 5, kernel="grouped_gemm"), timed("6_ring", "accurate", 1, 5, metric="max_abs"))
    ) == {}


def test_text_is_yaml_that_choosing_reads(fake):
    measured = [timed("6_ring", "accurate", 1, 10.0), timed("4_wide", "accurate", 64, 10.0),
                timed("7_wgmma_f16", "f16", 64, 5.0, codes="int4", n=32)]
    text = gemm_dispatch.text([record(*measured), record(device="no ladder"), record(*measured, device="AMD: x")])
    assert all(len(line) <= 120 for line in text.splitlines())
    table = yaml.safe_load(text)
    assert list(table) == ["NVIDIA H200", "AMD: x"] and table["AMD: x"] == choices_from_record(record(*measured))
    assert choose((64, 128, "int8"), 2, OTHER, "accurate", table).design == "wide"
    assert yaml.safe_load(gemm_dispatch.text([])) is None


def test_the_committed_table_is_what_the_committed_records_give():
    results = tables.load()
    assert gemm_dispatch.TABLE.read_text(encoding="utf-8") == readme.choices(results), \
        "run `python -m kernelbook readme`"
    if not gemm_dispatch.table():
        pytest.skip("no committed record holds a ladder yet")
    for device in gemm_dispatch.table().values():
        for classes in device.values():
            for accuracy, shapes in classes.items():
                names = {name for runs in shapes.values() for name in runs.values()}
                assert names <= packed_gemm.DESIGNS.keys()
                assert all(packed_gemm.DESIGNS[name].bound <= gemm_dispatch.ACCURACY[accuracy] for name in names)
