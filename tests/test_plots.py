import html
import re
from xml.etree import ElementTree

import numpy as np
import pytest

from kernelbook import plots
from kernelbook.measure import Ceiling, Timing
from kernelbook.ops import grouped_gemm as op

rng = np.random.default_rng(0)


def timing(median, spread=0.1):
    return Timing(median, median * (1 - spread), median * (1 + spread), 9)


CEILINGS = [Ceiling("read", 4100.0, "GB/s", 4000.0, 4200.0, 20, "own kernel"),
            Ceiling("bf16_matmul", 700.0, "TFLOP/s", 690.0, 710.0, 20, "torch"),
            Ceiling("round_trip_pinned", 12.0, "us", 11.0, 15.0, 200, "wall clock")]
SWEEP = [{"projection": p, "N": 2048, "K": 64, "M": m, "codes": "int8", "variant": v, "cache": c, "nbytes": 1 << 17,
          "flop": 2 * m * 2048 * 64, "timing": timing(10 * m)}
         for p in ("q", "k") for m in (1, 16) for v in ("2_float_activations", "humming_int8")
         for c in ("cold", "warm")]
ROWS = [{"projection": "q", "codes": c, "activations": a, "arithmetic": 1e-7, "total": 2e-7 if a == "float" else 6e-3,
         "differences": rng.standard_normal(50) * 1e-3} for c in ("int8", "int4") for a in ("float", "int8")]
GATE = [{"projection": p, "flop": f, "cpu": timing(f / 1e5), "device": timing(40)}
        for p, f in (("q", 8e6), ("o", 8e6), ("gate", 3e7))]

FIGURES = {
    "ceilings": lambda: plots.ceilings(CEILINGS),
    "ceilings of a host alone": lambda: plots.ceilings(
        [Ceiling("host_copy", 20.0, "GB/s", 19.0, 21.0, 9, "torch")]),
    "mapping": lambda: plots.mapping(64, 4, 4, remap=False),
    "mapping, one row": lambda: plots.mapping(64, 4, 4, remap=True),
    "selftest": lambda: plots.selftest({(a, c, m): 1e-7 for a in ("float", "int8") for c in ("int8", "int4")
                                        for m in (1, 33)}, 5e-7),
    "ulps": lambda: plots.ulps({1: np.zeros(40, int), 2: rng.integers(0, 30, 40), 64: rng.integers(0, 3, 40)}),
    "occupancy": lambda: plots.occupancy([{"projection": "q", "N": 2048, "K": 2048, "blocks": 2, "nsplit": 64,
                                           "blocks with split": 128}], 512),
    "split sweep": lambda: plots.split_sweep({p: {"times": {1: timing(30), 8: timing(9), 64: timing(12)}, "rule": 8,
                                                  "N": 2048, "K": 2048} for p in ("q", "k", "v", "o", "gate")}),
    "row sweep": lambda: plots.row_sweep(SWEEP),
    "roofline": lambda: plots.roofline(SWEEP, {c.name: c for c in CEILINGS}),
    "roofline without matmul": lambda: plots.roofline(SWEEP, {"read": CEILINGS[0]}),
    "call anatomy": lambda: plots.call_anatomy({"q": {"kernel": timing(5), "pinned": timing(30),
                                                      "pageable": timing(45), "fixed share": 5 / 6}}),
    "flop gate": lambda: plots.flop_gate(GATE, op.FLOP_GATE),
    "flop gate, CPU alone": lambda: plots.flop_gate([{k: v for k, v in r.items() if k != "device"} for r in GATE],
                                                    op.FLOP_GATE),
    "error distribution": lambda: plots.error_distribution(ROWS),
    "perplexity": lambda: plots.perplexity({
        "float32 weights": {"perplexity": 20.0, "delta": 0.0, "standard error": 0.0},
        "Q8_0 weights, int8 activations": {"perplexity": 20.5, "delta": 0.025, "standard error": 0.004}}),
}


@pytest.fixture(scope="module")
def figures():
    return {name: draw() for name, draw in FIGURES.items()}


def test_every_figure_is_drawn_here():
    drawn = {word for name in FIGURES for word in [name.split(",")[0].replace(" ", "_")]}
    public = {name for name, value in vars(plots).items()
              if callable(value) and getattr(value, "__annotations__", {}).get("return") is plots.Figure
              and not name.startswith("_")}
    assert public and public <= drawn, "a new figure needs data above"


@pytest.mark.parametrize("name", FIGURES)
def test_a_figure_is_one_svg_that_scales(figures, name):
    figure = figures[name]
    assert isinstance(figure, plots.Figure)
    root = ElementTree.fromstring(figure.svg)
    assert root.tag == "{http://www.w3.org/2000/svg}svg" and "viewBox" in root.attrib
    assert "width" not in root.attrib and "max-width" in root.attrib["style"]
    assert list(root.iter("{http://www.w3.org/2000/svg}text")), "text stays text, so that it can be read and found"


@pytest.mark.parametrize("name", FIGURES)
def test_ink_is_the_pages_own(figures, name):
    svg = figures[name].svg
    assert "currentColor" in svg
    assert plots._INK not in svg
    for colour in ("#000000", "#ffffff", "black", "white"):
        assert not re.search(rf"(fill|stroke|color): ?{colour}", svg), f"{colour} vanishes on one kind of page"
    # text without a fill of its own is black, whatever the page
    for element in ElementTree.fromstring(svg).iter():
        if element.tag.endswith(("}text", "}tspan")) and (element.text or "").strip():
            assert "fill: " in element.attrib["style"], element.text


@pytest.mark.parametrize("name", FIGURES)
def test_a_figure_refers_to_nothing_outside(figures, name):
    svg = figures[name].svg
    for element in ElementTree.fromstring(svg).iter():
        for attribute, value in element.attrib.items():
            if attribute.endswith("href"):
                assert value.startswith(("#", "data:")), value
            for target in re.findall(r"url\(([^)]*)\)", value):
                assert target.strip("'\"").startswith("#"), value
    assert not re.search(r"<script|<image[^>]*http|@import|<!DOCTYPE", svg)


@pytest.mark.parametrize("name", FIGURES)
def test_a_figure_says_what_it_shows(figures, name):
    page = figures[name]._repr_html_()
    label = re.search(r'role="img" aria-label="([^"]+)"', page)
    assert html.unescape(label[1]) == figures[name].alt
    assert len(figures[name].alt) > 30 and figures[name].alt.endswith(".")
    assert repr(figures[name]) == f"[figure: {figures[name].alt}]"


def test_the_description_has_the_figures():
    assert "read 4.1e+03 GB/s" in plots.ceilings(CEILINGS).alt
    assert "1.0e-07" in FIGURES["selftest"]().alt and "5e-07" in FIGURES["selftest"]().alt
    assert "q 83%" in FIGURES["call anatomy"]().alt
    assert "int8 activations +2.50%" in FIGURES["perplexity"]().alt
    assert "6.0e-03 with int8" in FIGURES["error distribution"]().alt
    assert FIGURES["flop gate"]().alt == (
        "Time of 3 decode products against their FLOP, with the article's gate of 1e+07.")
    changed = plots.ulps({1: np.zeros(4, int), 2: np.array([0, 3, 0, 0]), 4: np.array([9, 9, 9, 0])}).alt
    assert changed.endswith("changes up to 75% of the outputs.")


def texts(figure):
    """Content to x of a figure's texts (formulas, which have none, left out)."""
    return {e.text.strip(): float(e.attrib["x"]) for e in ElementTree.fromstring(figure.svg).iter()
            if e.tag.endswith("}text") and "x" in e.attrib}


def bars(figure):
    """The solid coloured lines of a figure, which are its error bars: x and y of one end, x and y of the other."""
    return [tuple(float(word) for word in re.findall(r"[\d.]+", path)) for path in re.findall(
        r'd="([^"]*)" clip-path="[^"]*" style="fill: none; stroke: #[^;]*; stroke-width: 1.6[";]', figure.svg)
            if path]


def test_a_ceilings_figure_stands_clear_of_its_error_bar():
    figure = plots.ceilings([Ceiling("wide", 10.0, "us", 9.0, 20.0, 9, "how"),
                             Ceiling("narrow", 15.0, "us", 14.0, 15.5, 9, "how")])
    ends = [right for _, _, right, _ in bars(figure)]
    assert len(ends) == 2 and ends[0] > ends[1]
    assert [texts(figure)[value] for value in ("10", "15")] == ends


def test_products_of_one_size_are_neither_joined_nor_on_top_of_each_other():
    both, alone = (FIGURES[name]() for name in ("flop gate", "flop gate, CPU alone"))
    assert {"q, o", "gate", "CPU path", "device call"} <= texts(both).keys()
    assert "CPU path" in texts(alone) and "device call" not in texts(alone)
    for figure, contenders in ((both, 2), (alone, 1)):
        intervals = bars(figure)
        assert len(intervals) == 3 * contenders, "an interval a time, and no line from one time to another"
        assert all(len(ends) == 4 and ends[0] == ends[2] and ends[1] != ends[3] for ends in intervals), "upright"
    cpu, device = bars(both)[:3], bars(both)[3:]
    assert not {x for x, *_ in cpu} & {x for x, *_ in device}


def test_a_description_is_escaped():
    page = plots.Figure("<svg/>", 'a "<b>" & c')._repr_html_()
    assert 'aria-label="a &quot;&lt;b&gt;&quot; &amp; c"' in page and "<b>" not in page


def test_what_figures_of_one_page_call_by_one_name_is_the_same(figures):
    """A page takes the first element of a name, whichever figure it stands in."""
    defined = {}
    for figure in figures.values():
        own = {e.attrib["id"]: ElementTree.tostring(e).strip()
               for e in ElementTree.fromstring(figure.svg).iter() if "id" in e.attrib}
        for name in set(re.findall(r'(?:url\(|href=")#([^)"]+)', figure.svg)):
            assert defined.setdefault(name, own[name]) == own[name]
    assert defined


# ---- tables

def cells(page):
    return [html.unescape(re.sub("<[^>]+>", "", cell)) for cell in re.findall(r"<td[^>]*>(.*?)</td>", page)]


@pytest.mark.parametrize("value, text", [
    (None, ""), (True, "yes"), (False, "no"), (np.bool_(True), "yes"),
    (1234567, "1,234,567"), (np.int64(4096), "4,096"), (0, "0"), (-3, "-3"),
    (0.12345, "0.123"), (3.1e-7, "3.1e-07"), (9999.4, "9,999"), (12345.6, "12,346"), (np.float32(2.5), "2.5"),
    (float("nan"), "nan"), (float("inf"), "inf"),
    ({"32": 33, "128": 1}, "33 x 32, 1 x 128"), ({}, ""), ("text", "text"), (timing(10), "10.0 us [9.0, 11.0]"),
])
def test_a_cell_is_written_for_readers(value, text):
    table = plots.table([{"a": value}])
    assert cells(table._repr_html_()) == [text]
    assert repr(table) == f"a\n{text}"


def test_numbers_stand_right_and_words_left():
    page = plots.table([{"n": 1, "x": np.float64(2), "b": True, "s": "1"}])._repr_html_()
    assert re.findall(r"text-align: (\w+)", page) == ["right", "right", "left", "left"]


def test_a_table_escapes_html():
    page = plots.table([{"<i>name</i>": "<script>alert(1)</script> & more"}])._repr_html_()
    assert "<script>" not in page and "<i>" not in page
    assert "&lt;script&gt;alert(1)&lt;/script&gt; &amp; more" in page
    ElementTree.fromstring(page)


def test_columns_are_all_keys_or_those_asked_for():
    rows = [{"a_b": 1}, {"a_b": 2, "c": 3}]
    assert plots.table(rows).columns == ["a_b", "c"]
    page = plots.table(rows)._repr_html_()
    assert re.findall("<th>(.*?)</th>", page) == ["a b", "c"] and cells(page) == ["1", "", "2", "3"]
    assert plots.table(rows, ["c"]).columns == ["c"] and cells(plots.table(rows, ["c"])._repr_html_()) == ["", "3"]
    assert cells(plots.table([])._repr_html_()) == []
    assert plots.table(row for row in rows).rows == rows


def test_source_shows_a_kernel():
    shown = plots.source("grouped_gemm/3_reduce_splits.cu").data
    assert shown.startswith("```cpp\n//") and shown.endswith("\n```")
    assert "__global__ void reduce_splits(" in shown and shown.count("```") == 2


def test_source_names_the_kernels_there_are():
    with pytest.raises(FileNotFoundError, match="3_reduce_splits.cu"):
        plots.source("grouped_gemm/none.cu")
