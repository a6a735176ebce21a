"""The figures of int8_pv show the numbers that they are given."""

import numpy as np
import pytest

from kernelbook import pv_plots
from kernelbook.plots import Figure

STEP = np.arange(64) // 8 % 2
TOGETHER = STEP[:, None] == STEP
LOGICAL = np.arange(64)[:, None] // 32 == np.arange(64) // 32


def inside(figure, *texts):
    assert isinstance(figure, Figure) and figure.svg.startswith("<svg") and "#010203" not in figure.svg
    for text in texts:
        assert text in figure.svg or text in figure.alt, text
    return figure


def sizes(**more):
    return {"batch": 16, "heads": 24, "kv_heads": 4, "head_dim": 128, "history": 4096, "queries": 1} | more


def test_excerpt_of_a_kernel():
    text = pv_plots.excerpt("int8_pv/2_decode.cu", "// ---- weights", "// ---- P V").data
    assert text.startswith("```cpp\n// ---- weights") and text.endswith("__syncthreads();\n```")
    assert "P V: this wave" not in text
    with pytest.raises(ValueError, match="2_decode.cu has no part from a line 'nothing' to a line '// ---- P V'"):
        pv_plots.excerpt("int8_pv/2_decode.cu", "nothing", "// ---- P V")
    with pytest.raises(ValueError, match="has no part"):
        pv_plots.excerpt("int8_pv/2_decode.cu", "// ---- P V", "// ---- weights")


def test_shared_scales_counts_the_tokens_that_fit():
    inside(pv_plots.shared_scales(TOGETHER, LOGICAL, STEP), "for 64 of 64 tokens", "with logical groups for 0",
           "two scales, one step")
    other = TOGETHER.copy()
    other[:2] = True
    inside(pv_plots.shared_scales(other, TOGETHER, STEP), "for 62 of 64 tokens", "with logical groups for 64")


def test_error_terms():
    rows = [{"inputs": "random, unit variance", "tokens": 512, "V cache": 0.005, "weights": 0.009, "O - O'": 0.0103}]
    inside(pv_plots.error_terms(rows), "random, unit variance 0.50% and 0.90%", "codes of the weights", "512 tokens")


def test_wrong_groups():
    rows = [{"inputs": name, "tokens": 300, "right, error": right, "wrong, error": wrong}
            for name, right, wrong in (("a", 0.002, 0.6), ("b", 0.009, 1.5))]
    inside(pv_plots.wrong_groups(rows), "0.2% to 0.9% with the right groups, 60% to 150% with logical", "150.0%")


def test_history():
    rows = [{"history": n, "P V in": pv, "reference": reference, "max_abs": 4e-2 / n, "rms": 1e-2 / n}
            for n in (1024, 3000) for pv, reference in (("int8", "BF16"), ("int8", "float64, query as quantized"),
                                                        ("bf16", "float64, query as quantized"))]
    inside(pv_plots.history(rows, {4096: (1e-5, 3e-6)}), "1024 tokens 3.9e-05 and 9.8e-06", "INT8 P V to BF16",
           "BF16 P V to float64, query as quantized", ">3000<", ">4K<", "article")


def test_gains_are_the_cold_ones():
    rows = [sizes(history=n, cache=cache, gain=g, **{"gain p10": g - 0.02, "gain p90": g + 0.02})
            for n, cache, g in ((4096, "cold", 1.25), (16384, "cold", 1.29), (4096, "warm", 9.0))]
    inside(pv_plots.gains(rows, {4096: 1.1}), "batch 16, 24/4 heads of 128 1.25 to 1.29", ">16K<")
    inside(pv_plots.gains([], {4096: 1.1}), "article")


def test_forms_with_and_without_times():
    errors = [{"form": name, "of P V": error} for name, error in (("32", 0.0099), ("256", 0.025))]
    untimed = inside(pv_plots.forms(errors, "32", "tokens under a scale"), "32 0.99%, 256 2.50%.")
    timed = [row | sizes(cache=cache, us=us) for row, us in zip(errors, (50.0, 60.0), strict=True)
             for cache in ("cold", "warm")]
    figure = inside(pv_plots.forms(timed, "32", "tokens under a scale"), "time over that of 32: 256 1.20 to 1.20",
                    "batch 16, 24/4 x 128, 4K")
    assert "time over" not in untimed.alt and len(figure.svg) > len(untimed.svg)


def test_peers_by_case():
    rows = [sizes(phase="decode", variant=name, cache="cold", us=us, peer=peer)
            for name, us, peer in (("2_decode_int8", 37.1, False), ("fa3_bf16", 120.0, True))]
    rows += [row | {"history": 16384, "us": 200 - row["us"]} for row in rows]
    inside(pv_plots.peers(rows + [rows[0] | {"cache": "warm", "us": 1.0}]), "on 2 problems; ours is the fastest on 1",
           "37.1", "fa3 bf16")
