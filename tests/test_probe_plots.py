"""The figures of the probe, the candidates and the gated delta net show the numbers that they are given."""

from itertools import product

from kernelbook import probe_plots
from kernelbook.experiments.prefill_probe import ARTICLE_FORMS
from kernelbook.plots import Figure

FORMS = tuple(product(("baseline", "explicit_fma", "int8_dot"), (1, 2, 4)))


def inside(figure, *texts):
    assert isinstance(figure, Figure) and figure.svg.startswith("<svg") and "#010203" not in figure.svg
    for text in texts:
        assert text in figure.svg or text in figure.alt, text
    return figure


def grid(projections=("gate_up", "o"), ms=(1, 16)):
    """Rows as prefill_probe.times gives them; a time is 100 R + M, plus 5 where it is cold."""
    for name, (variant, r), m, cache in product(projections, FORMS, ms, ("warm", "cold")):
        us = 100.0 * r + m + 5 * (cache == "cold")
        yield {"projection": name, "variant": variant, "R": r, "M": m, "cache": cache, "us": us, "p10": us - 1,
               "p90": us + 1, "TFLOP/s": m / r, "of read": 0.01 * m,
               "article us": 90.0 if m == 16 and (variant, r) in ARTICLE_FORMS else None}


def test_times():
    inside(probe_plots.times(list(grid())), "warm: gate_up 216/416/416, o 216/416/416; cold: gate_up 221/421/421",
           "article", "gate+up", "explicit FMA, R = 4")


def test_a_shape_without_one_of_the_forms_is_left_out():
    rows = [row for row in grid() if (row["projection"], row["variant"]) != ("o", "int8_dot")]
    assert "o 216" not in probe_plots.times(rows).alt


def test_heat_maps():
    rows = list(grid())
    inside(probe_plots.heat_maps(rows, "o"), "on o, warm", "the most is 16.0 of baseline at R = 1 and M = 16")
    rows = [row for row in rows if (row["variant"], row["R"]) != ("baseline", 1)]  # one that gave a wrong result
    inside(probe_plots.heat_maps(rows, "o", "cold"), "on o, cold", "the most is 16.0 of explicit FMA")


def test_issue():
    rows = [{"projection": "o", "variant": variant, "R": r, "instructions a MAC": each, "us": us}
            for (variant, r), each, us in zip(ARTICLE_FORMS, (2.6, 1.64, 0.95), (20.0, 10.0, 12.5), strict=True)]
    inside(probe_plots.issue(rows), "o baseline 20.0 us at 2.60, explicit FMA 10.0 us at 1.64, dp4a 12.5 us at 0.95",
           "bound by issue")


def test_wave_rows():
    rows = [row | {"of R = 2": row["us"] / 216} for row in grid() if (row["M"], row["cache"]) == (16, "warm")
            and row["variant"] != "int8_dot"]
    inside(probe_plots.wave_rows(rows), "gate_up 1.93 and 1.93; o 1.93", "with fmaf", "without")


def test_bandwidth():
    rows = [row for row in grid() if row["cache"] == "cold" and (row["variant"], row["R"]) in ARTICLE_FORMS]
    inside(probe_plots.bandwidth(rows), "M = 1 1% to 1%; M = 16 16% to 16%", "article")
    inside(probe_plots.bandwidth([row for row in rows if row["M"] == 16]), "cold: M = 16 16% to 16%.")


def test_errors():
    rows = [{"inputs": name, "variant": variant, "relative Frobenius": e, "meanrel": 3 * e, "maxrel": 1e4 * e}
            for name, factor in (("a", 1), ("b", 2)) for variant, e in (
                ("baseline", 1e-7 * factor), ("explicit_fma", 1e-7 * factor), ("int8_dot", 5e-3 * factor))]
    inside(probe_plots.errors(rows), "dp4a relative RMS 5.0e-03 to 1.0e-02, meanrel 1.5e-02 to 3.0e-02, maxrel")


def test_cancellation():
    rows = [{"inputs": name, "comparison": comparison, "from %": low, "to %": high, "maxrel": top}
            for name in "ab" for comparison in ("another order", "dp4a")
            for low, high, top in ((0, 0.1, 1e-3), (0.1, 1, 1e-4), (50, 100, 1e-6))]
    rows = [row for row in rows if (row["inputs"], row["from %"]) != ("b", 0)]  # too few outputs for it
    inside(probe_plots.cancellation(rows), "another order 1.0e-03 and 1.0e-06; dp4a 1.0e-03", "0 to 0.1", "50 to 100")


def candidates():
    for n, m, (variant, candidate, us) in product((64, 128), (16, 512), (
            ("article", "article", 100.0), ("tiled_fp32", "A", 50.0), ("int8_dot", "B", 40.0),
            ("int8_matrix", "B", 9.0), ("tensor_cores", "C", 8.0), ("wgmma", "C", 4.0), ("cublas_bf16", "peer", 3.5))):
        yield {"projection": "q", "N": n, "K": 64, "M": m, "variant": variant, "candidate": candidate,
               "TFLOP/s": m / us}


def test_candidates():
    figure = inside(probe_plots.candidates(list(candidates()), 780.0),
                    "on 128 x 64 at M = 512: cublas_bf16 146, wgmma 128", "C: wgmma", "A: tiled fp32", "the article",
                    "64 x 64")
    assert figure.alt.endswith("article 5.")


def test_whole_pass():
    rows = [{"variant": variant, "candidate": candidate, "ms": ms, "article / this": gain}
            for variant, candidate, ms, gain in (
                ("wgmma", "C", 45.2, 30.1), ("tiled_fp32", "A", 800.0, 1.7), ("article", "article", 1360.5, 1.0))]
    inside(probe_plots.whole_pass(rows), "wgmma 45.2, tiled_fp32 800.0", "30.1x", "1,360.5 ms")
    rows = [row | {"article / this": None} for row in rows[:2]]
    assert "x</text>" not in inside(probe_plots.whole_pass(rows), "45.2 ms").svg


def test_delta_net():
    rows = [{"tokens": tokens, "variant": variant, "us": us * tokens / 512} for tokens in (512, 2048)
            for variant, us in (("sequential", 310.0), ("chunked, 1 term", 70.0), ("fla_chunk_bf16", 72.0))]
    inside(probe_plots.delta_net(rows), "512 tokens sequential 310, chunked, 1 term 70, fla_chunk_bf16 72; 2048 tokens",
           "1,240", "fla chunk bf16")


def test_through_layers():
    rows = [{"recurrence": "sequential", "activations": activations, "layer": layer, "error": e * layer}
            for activations, e in (("float", 1e-7), ("int8", 5e-3)) for layer in (1, 2, 48)]
    inside(probe_plots.through_layers(rows), "after one and after 48 layers",
           "sequential; int8 activations 5.0e-03 to 2.4e-01")
