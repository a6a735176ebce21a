"""The real notebooks, run as users run them, at the smoke profile: what they record, and the report of it."""

import functools
import hashlib
from urllib.parse import unquote, urlsplit

import nbformat
import numpy as np
import pytest
from bs4 import BeautifulSoup

from kernelbook import claims, notebooks, records, report, runner, shapes
from kernelbook.experiments import gemm_ladder, int8_pv
from kernelbook.experiments import grouped_gemm as study
from kernelbook.ops import grouped_gemm as op
from kernelbook.ops import packed_gemm

pytestmark = pytest.mark.timeout(600)  # the first test waits for the run that serves them all
CLAIMS = [claim.id for claim in claims.of_notebook("1_grouped_gemm")]


@pytest.fixture(scope="session")
def run(tmp_path_factory):
    """The folder of one run of every notebook, with its report."""
    jobs = runner.plan("smoke")
    folder = runner.run(jobs, "smoke", tmp_path_factory.mktemp("runs"))
    report.build(folder)
    assert runner.failures(folder) == {}
    return folder


def record(run, name):
    """A notebook's record, once it is that of a run that shows no error and every cell's output."""
    cells = [c for c in nbformat.read(run / f"{name}.ipynb", 4).cells if c.cell_type == "code"]
    assert all(cell.execution_count for cell in cells)
    assert not [o for cell in cells for o in cell.outputs if o.output_type == "error" or o.get("name") == "stderr"]
    return records.load(run / f"{name}.json")


def values(document, metric):
    return [m["value"] for m in document["measurements"] if m["metric"] == metric]


def test_every_notebook_has_a_test_here():
    assert {path.stem for path in notebooks.find()} == {
        name.removeprefix("test_run_of_") for name in globals() if name.startswith("test_run_of_")}


def test_run_of_0_machine(run):
    document = record(run, "0_machine")
    assert document["parameters"] == {"matmul_size": 1024, "memory_mib": 64} and document["verdicts"] == []
    ceilings = {m["variant"]: m for m in document["measurements"] if m["metric"] != "wrong_words"}
    assert {"host_copy", "host_float32_matmul"} <= ceilings.keys()
    if not document["environment"]["simulated"]:
        assert {"read", "copy", "bf16_matmul", "round_trip_pinned"} <= ceilings.keys()
    assert all(0 < m["p10"] <= m["value"] <= m["p90"] for m in ceilings.values())
    assert values(document, "wrong_words") == [0]


def test_run_of_1_grouped_gemm(run):
    document = record(run, "1_grouped_gemm")
    simulated = document["environment"]["simulated"]
    verdicts = {v["claim"]: v for v in document["verdicts"]}
    assert list(verdicts) == CLAIMS and len(CLAIMS) == 15

    # what does not depend on the machine holds on every machine
    for claim in ("G01", "G03", "G04", "G11", "G13", "G14", "G15"):
        assert verdicts[claim]["verdict"] == "reproduced", verdicts[claim]["evidence"]
    assert verdicts["G02"]["verdict"] in ("reproduced", "not testable here"), verdicts["G02"]["evidence"]
    for claim in claims.of_notebook("1_grouped_gemm"):
        if claim.kind == "speed":
            assert (verdicts[claim.id]["verdict"] == "not testable here") == simulated

    # what a claim was judged by is on record, not its verdict alone
    for metric in ("bytes_changed_by_round_trip", "group_sums_wrong", "repeats_with_other_bits"):
        assert set(values(document, metric)) == {0}, metric
    places = {m["case"]["where"]: m["variant"] for m in document["measurements"] if "where" in m["case"]}
    assert places.keys() >= {"wave simulator, 32 lanes", "wave simulator, 64 lanes", "CPU path (PyTorch)"}
    assert {v for where, v in places.items() if where != "CPU path (PyTorch)"} == {study.VARIANTS["float"]}
    mflop = {p.name: p.flops(1) / 1e6 for p in shapes.QWEN3_VL_2B}
    assert verdicts["G11"]["measured"] == ", ".join(f"{name} {f:.1f}" for name, f in mflop.items()) + " MFLOP"
    products = [m for m in document["measurements"] if m["kernel"] == study.KERNEL]
    assert {m["cache"] for m in products if m["metric"] in ("bandwidth_gbs", "fraction_of_read")} <= {"cold"}

    # the integers of G03, computed here without a kernel
    rng = np.random.default_rng
    strips = study.random_strips(rng([0, 5]), 65, 2048)
    exact = op.integer_sums(rng([0, 6]).integers(-127, 128, (3, 2048), np.int8), strips)
    assert exact.shape == (3, 64, 65)
    assert values(document, "group_sums_checksum") == [
        int(hashlib.sha256(exact.astype("<i4").tobytes()).hexdigest()[:12], 16)]

    # every kernel within its bound, on every case
    assert {m["status"] for m in document["measurements"]} <= {"passed", "skipped"}
    worst = values(document, "worst_relative_frobenius")
    assert len(worst) == 2 * 2 * 3, "activations, codes, rows"
    errors = [m["value"] for m in products if m["metric"] == "relative_frobenius"
              and m["variant"].removesuffix("_without_remap") in study.VARIANTS.values()]
    assert len(errors) > 20 and 0 < max(worst + errors) <= study.BOUND
    assert set(values(document, "nonfinite")) == {0}

    # rounding activations to int8 costs what 8 bits cost
    rounded = [m["value"] for m in document["measurements"] if m["metric"] == "relative_frobenius_to_float_activations"
               and m["variant"] == study.VARIANTS["int8"]]
    assert rounded and 1e-4 < min(rounded) <= max(rounded) < 0.1

    # the ladder: what runs here is right on every case, and what does not says why
    ladder = [m for m in document["measurements"] if m["kernel"] == gemm_ladder.KERNEL]
    tested = [m for m in ladder if m["metric"] == "selftest_relative_frobenius"]
    assert {gemm_ladder.design_of(m["variant"]) for m in tested} == packed_gemm.DESIGNS.keys()
    assert len([m for m in tested if m["status"] == "passed"]) >= 2 * 2 * 3, "designs, codes, rows"
    assert all(m["reason"] for m in tested if m["status"] == "skipped")
    measured = {(m["case"]["N"], m["case"]["K"]) for m in ladder if m["metric"] == "relative_frobenius"}
    assert measured == {(64 if simulated else p.n, p.k) for p in gemm_ladder.projections()}

    assert (document["parameters"]["rows"], document["parameters"]["selftest_rows"]) == (2, [1, 3, 33])
    assert [m for m in document["measurements"]
            if simulated and records.is_performance(m["metric"]) and m["value"] is not None and not m["host"]] == []


def test_run_of_2_prefill_breakdown(run):
    document = record(run, "2_prefill_breakdown")
    simulated = document["environment"]["simulated"]
    verdicts = {v["claim"]: v for v in document["verdicts"]}
    assert list(verdicts) == [claim.id for claim in claims.of_notebook("2_prefill_breakdown")] and len(verdicts) == 15

    # what does not depend on the machine holds on every machine
    for claim in ("B06", "B09", "B11", "B12"):
        assert verdicts[claim]["verdict"] == "reproduced", verdicts[claim]["evidence"]
    for claim in ("B05", "B07", "B13", "B15"):
        assert verdicts[claim]["verdict"] == "direction holds", verdicts[claim]["evidence"]
    for claim in ("B01", "B02", "B03", "B04", "B08", "B10", "B14"):
        assert (verdicts[claim]["verdict"] == "not testable here") == simulated, verdicts[claim]["evidence"]

    # every design was right, one product at a time and as a whole pass
    for kernel in ("q4_probe", "prefill_gemm", "pass"):
        found = [m for m in document["measurements"] if m["kernel"] == kernel and m["metric"] == "relative_frobenius"]
        assert found and all(m["status"] == "passed" and m["value"] > 0 for m in found), kernel
    assert verdicts["B12"]["measured"] == "32x: 438 against 13.7 GB"


def test_run_of_3_int8_pv(run):
    document = record(run, "3_int8_pv")
    simulated = document["environment"]["simulated"]
    verdicts = {v["claim"]: v for v in document["verdicts"]}
    assert list(verdicts) == [claim.id for claim in claims.of_notebook("3_int8_pv")] and len(verdicts) == 16

    # what does not depend on the machine holds on every machine
    for claim in ("P01", "P02", "P03", "P04", "P06", "P16"):
        assert verdicts[claim]["verdict"] == "reproduced", verdicts[claim]["evidence"]
    for claim in ("P07", "P09", "P14"):
        assert verdicts[claim]["verdict"] in ("reproduced", "direction holds"), verdicts[claim]["evidence"]
    assert verdicts["P05"]["verdict"] in ("reproduced", "not testable here"), verdicts["P05"]["evidence"]
    assert verdicts["P15"]["verdict"] == "not testable here"
    for claim in claims.of_notebook("3_int8_pv"):
        if claim.kind == "speed":
            assert (verdicts[claim.id]["verdict"] == "not testable here") == simulated

    # the device's own lane map, and gfx936's in the simulator
    kernels = [m for m in document["measurements"] if m["kernel"] == "int8_pv"]
    assert {m["case"]["matrix"] for m in kernels if m["case"].get("experiment") == "wrong groups"} == {"mma", "mmac"}
    for metric in ("integer_sums_wrong", "tokens_multiplied_elsewhere", "pairs_quantized_otherwise"):
        assert set(values(document, metric)) == {0}, metric
    assert values(document, "largest_step_sum") == [32 * 127 * 127]
    assert [n > 0 for m in ("mma", "mmac") for n in (found["value"] for found in kernels if
            found["metric"] == "checks_failed" and found["case"].get("matrix") == m)] == 2 * [False, True, True, True]

    # wrong are the kernels that are wrong on purpose, and by far
    wrong = [m for m in kernels if m["status"] == "wrong_result"]
    assert all(m["case"].get("grouping") == "logical" or m["case"].get("read") == 8 for m in wrong)
    errors = {status: [m["value"] for m in kernels if m["status"] == status and m["metric"] == "relative_frobenius"]
              for status in ("passed", "wrong_result")}
    assert len(errors["passed"]) > 20 and max(errors["passed"]) < 0.03 < 0.1 < min(errors["wrong_result"])
    at_4096 = [m["value"] for m in kernels if m["metric"] == "rms" and m["variant"] == "2_decode_int8"
               and (m["case"]["history"], m["case"].get("reference")) == (4096, int8_pv.REFERENCES[0])]
    assert len(at_4096) == 1 and 2e-4 < at_4096[0] < 2.6e-4
    assert [m for m in kernels if simulated and records.is_performance(m["metric"]) and m["value"] is not None] == []


@pytest.mark.parametrize("override, message", [
    ("selftest_rows=[1, 0]", "selftest_rows: 0; expected 1 to 4096"), ("layers=[30]", "layers: 30; expected 0 to 29")])
def test_a_value_that_nothing_can_use_ends_the_run_before_anything_is_measured(tmp_path, override, message):
    folder = runner.run(runner.plan("smoke", ["1_grouped_gemm"], [override]), "smoke", tmp_path)
    assert message in runner.failures(folder)["1_grouped_gemm"]
    ran = [c for c in nbformat.read(folder / "1_grouped_gemm.ipynb", 4).cells
           if c.cell_type == "code" and c.execution_count]
    assert "check_parameters" in ran[-1].source and not (folder / "1_grouped_gemm.json").exists()


# ---- the report

@functools.cache
def page(run, name):
    return BeautifulSoup((run / name).read_text(encoding="utf-8"), "html.parser")


def test_the_index_leads_to_every_verdict(run):
    verdicts = {v["claim"]: v for v in records.load(run / "1_grouped_gemm.json")["verdicts"]}
    notebook = page(run, "1_grouped_gemm.html")
    links = {unquote(a["href"]): a for a in page(run, "index.html").find_all("a", href=True)}
    for claim in CLAIMS:
        assert f"1_grouped_gemm.html#{claim}" in links
        box, = notebook.find_all(id=claim)
        assert verdicts[claim]["verdict"] in box.text and verdicts[claim]["evidence"] in box.text
        row = links[f"1_grouped_gemm.html#{claim}"].find_parent("tr")
        assert verdicts[claim]["verdict"] in row.text and verdicts[claim]["measured"] in row.text


@pytest.mark.parametrize("name", ["index.html", "0_machine.html", "1_grouped_gemm.html", "3_int8_pv.html"])
def test_no_page_loads_anything_and_every_link_leads_somewhere(run, name):
    soup = page(run, name)
    assert soup.find_all(["iframe", "object", "embed", "link", "base"]) == []
    scripts = soup.find_all("script")  # the index has one of its own, in the page, which sorts and filters
    assert len(scripts) == (name == "index.html") and not any(script.get("src") for script in scripts)
    for element in soup.find_all(True):
        for attribute in ("src", "srcset", "data", "poster", "xlink:href", "action"):
            assert element.get(attribute, "#").startswith(("#", "data:")), element
        assert "url(http" not in element.get("style", "") and "url(//" not in element.get("style", "")
    assert not [s for s in soup.find_all("style") if "@import" in s.text or "url(" in s.text]
    for anchor in soup.find_all("a", href=True):
        target = urlsplit(anchor["href"])
        if target.scheme:
            assert target.scheme == "https"
            continue
        file = run / unquote(target.path) if target.path else run / name
        assert file.is_file(), anchor["href"]
        if target.fragment:
            assert page(run, file.name).find(id=unquote(target.fragment)), anchor["href"]


def test_figures_and_formulas_are_in_the_page(run):
    soup = page(run, "1_grouped_gemm.html")
    figures = soup.find_all(attrs={"role": "img"})
    assert len(figures) >= 6 and all(len(f["aria-label"]) > 30 and f.find("svg") for f in figures)
    assert soup.find("math") and "$$" not in soup.text
    assert "grouped_gemm_float" in soup.text, "kernels are shown"


def test_no_page_tells_where_it_was_made(run):
    for path in [*run.glob("*.html"), *run.glob("*.json"), *run.glob("*.ipynb")]:
        assert str(run) not in path.read_text(encoding="utf-8"), path.name
