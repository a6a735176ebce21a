"""The figures of the ladder show the numbers that they are given, and say them."""

from kernelbook import ladder_plots
from kernelbook.experiments.gemm_ladder import Point, Rung
from kernelbook.plots import Figure

POINTS = [Point(64 * i, 128, m, codes, variant, accuracy, us, us, us, gbs if m <= 64 else None)
          for i in (1, 2) for codes in ("int8", "int4") for m in (1, 64, 512)
          for variant, accuracy, us, gbs in (("6_ring_f16", "f16", 2.0, 3700.0), ("humming_int8", None, 4.0, 2800.0))]


def inside(figure, *texts):
    assert isinstance(figure, Figure) and figure.svg.startswith("<svg") and "#010203" not in figure.svg
    for text in texts:
        assert text in figure.svg or text in figure.alt, text
    return figure


def test_bandwidth_against_rows():
    figure = inside(ladder_plots.bandwidth(POINTS, "int8", 4250.0), ">64 x 128<", ">128 x 128<", ">6 ring f16<",
                    ">humming int8<", "int8 codes", "measured read ceiling, 4.25 TB/s",
                    "On 64 x 128 at M = 1 6 ring f16 3.7 TB/s and humming int8 2.8 TB/s, at M = 64 6 ring f16 3.7 TB/s")
    assert figure.svg.count(">512<") == 0, "no bandwidth there"
    assert "ceiling" not in ladder_plots.bandwidth(POINTS, "int4").alt


def test_operations_against_rows():
    rate = 2 * 512 * 64 * 128 / 1e6 / 2.0
    inside(ladder_plots.throughput(POINTS, "int4", 780.0), "int4 codes", "bf16 products, 780 TFLOP/s",
           f"at M = 512 6 ring f16 {rate:.3g} TFLOP/s and humming int8 {rate / 2:.3g} TFLOP/s.", ">512<")


def test_only_one_of_ours_or_of_the_peers():
    inside(ladder_plots.throughput([p for p in POINTS if p.ours], "int8"), "at M = 1 6 ring f16")
    inside(ladder_plots.throughput([p for p in POINTS if not p.ours], "int8"), "at M = 1 humming int8")


def test_ours_are_solid_and_coloured_and_peers_dashed():
    styles = ladder_plots._styles([("4_wide", True), ("a", False), ("5_b", True), ("c", False), ("4_wide", True)])
    assert [style["ls"] for style in styles.values()] == ["-", "--", "-", "--"]
    assert len({(style["color"], style["marker"]) for style in styles.values()}) == 4


def test_selftest_over_its_bounds():
    worst = {("6_ring", "int8", 1): 1e-6, ("6_ring", "int8", 33): 5e-7, ("6_ring_f16", "int4", 1): 3e-4}
    inside(ladder_plots.selftest(worst, {"6_ring": 2e-6, "6_ring_f16": 5e-4}), ">int8 codes<", ">int4 codes<",
           "6 ring f16, bound 0.0005", "nearest to it is 6 ring f16 on int4 codes at M = 1, 3.0e-04 of 0.0005.")


def test_rungs_as_a_table_and_as_heads():
    rung = Rung("grouped_gemm/6_ring.cu", "One idea.", "30 us.", "", "Ends.", ("6_ring", "6_ring_f16"))
    assert ladder_plots.rungs([rung]).rows == [{"file": "grouped_gemm/6_ring.cu", "the one idea": "One idea.",
                                               "designs": "6_ring, 6_ring_f16"}]
    assert ladder_plots.rung(rung).data == (
        "**grouped_gemm/6_ring.cu**: One idea.\n\n*Prediction*: 30 us.\n\n*Taught*: Ends.")
