"""The figures of whole passes show the numbers that they are given."""

import re

from kernelbook import prefill_plots
from kernelbook.measure import Ceiling
from kernelbook.plots import Figure


def inside(figure, *texts):
    assert isinstance(figure, Figure) and figure.svg.startswith("<svg") and "#010203" not in figure.svg
    for text in texts:
        assert text in figure.svg or text in figure.alt, text
    return figure


def rows(**engines):
    return [{"engine": engine, "bucket": bucket, "ms": ms} for engine, parts in engines.items()
            for bucket, ms in parts.items()]


def test_buckets_side_by_side():
    given = rows(article={"GEMM": 1200.0, "GDN": 180.0, "mine": 120.0}, wgmma={"GEMM": 30.0, "idle": 10.0})
    figure = inside(prefill_plots.buckets(given), ">GEMM<", ">mine<", ">idle<", "1,500", "40.0",
                    "article 1,500 ms, GEMM 80% and GDN 12%; wgmma 40 ms, GEMM 75%.", "of a pass goes")
    heights = [float(re.search(rf'y="([\d.]+)"[^>]*>{name}<', figure.svg)[1])
               for name in ("article", "wgmma")]
    assert heights[0] < heights[1]  # the first engine at the top


def test_overlap_is_no_bucket():
    given = rows(article={"GEMM": 10.0, "overlap": -1.0})
    figure = inside(prefill_plots.buckets(given, "one pass"), "10 ms, GEMM 100%", "of one pass goes")
    assert "overlap" not in figure.svg


def test_waterfall():
    given = [{"step": step, "ms": ms} for step, ms in (("article design", 1500.0), ("GEMM", -1440.0), ("GDN", -20.0),
                                                       ("idle", 8.5), ("tensor_cores", 48.5))]
    inside(prefill_plots.waterfall(given), "-1,440.0", "+8.5", ">1,500<", ">48.5<", ">design<", ">cores<",
           "From article design with 1,500 ms to tensor_cores with 48.5 ms a pass, by bucket: GEMM -1,440.0, GDN")


def launch(engine="llama.cpp", what="norms", predicted=305, counted=305, agrees=True):
    return {"engine": engine, "launches": what, "predicted": predicted, "counted": counted, "where": "live",
            "agrees": agrees}


def test_launches_that_agree_and_differ():
    given = [launch(), launch(what="fixups", predicted=320, counted=480, agrees=False),
             launch("article's engine", "apart", 15872, 9000, None), launch(what="not told", counted=None, agrees=None)]
    figure = inside(prefill_plots.launches(given), "llama.cpp: norms (live)", "counted, differs",
                    "1 of 2 counts are as predicted; llama.cpp, fixups: 480 instead of 320.")
    assert "not told" not in figure.svg and "#c03434" in figure.svg
    good = inside(prefill_plots.launches([launch()]), "1 of 1 counts are as predicted.")
    assert "differs" not in good.svg and "#c03434" not in good.svg


def test_growth_by_layer():
    given = [{"design": name, "activations": form, "layer": layer, "error": error * layer, "reference": "float64"}
             for name, form, error in (("article", "float32", 0.0), ("int8_dot", "int8", 5e-3)) for layer in range(5)]
    figure = inside(prefill_plots.growth(given), "int8 dot (int8 activations)", "against float64",
                    "int8_dot 5.0e-03 after layer 1 and 2.0e-02 after layer 4")
    assert "article" not in figure.svg
    given[-1]["error"] = None  # not finite
    inside(prefill_plots.growth(given), "1.5e-02 after layer 3")
    inside(prefill_plots.growth(given[:5]), "none differs")


def test_roofline():
    ceilings = {name: Ceiling(name, value, unit, value, value, 9, "how")
                for name, value, unit in (("read", 4200.0, "GB/s"), ("bf16_matmul", 800.0, "TFLOP/s"))}
    given = [{"design": "article", "FLOP / byte": 57.0, "TFLOP/s": 16.0},
             {"design": "tensor_cores", "FLOP / byte": 1820.0, "TFLOP/s": 400.0}]
    inside(prefill_plots.roofline(given, ceilings), "read 4,200 GB/s", "bf16 matmul 800 TFLOP/s", "tensor cores, 400",
           "article 16 TFLOP/s, 2%, tensor_cores 400 TFLOP/s, 50%")
