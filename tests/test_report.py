import json
import re
from types import SimpleNamespace

import nbformat
import pytest
from bs4 import BeautifulSoup

from kernelbook import claims, notebooks, records, report

XSS = "<script>alert(1)</script><img src=x onerror=alert(1)>"
PNG = "iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAYAAAAfFcSJAAAADUlEQVR42mNk+M9QDwADhgGAWjR9awAAAABJRU5ErkJggg=="
HOSTILE = ("<b>kept</b><script src='https://cdn.example/x.js'></script><img src='https://example.com/pixel.png'>"
           "<style>@import 'https://example.com/a.css'; p { background: url(https://example.com/b.png) }</style>"
           "<p style='background: url(//example.com/c.png)' onclick='alert(1)'>text</p>"
           "<iframe src='https://example.com'></iframe><link rel=stylesheet href='https://example.com/d.css'>"
           "<a href='javascript:alert(1)'>bad</a><meta http-equiv=refresh content='0; url=https://example.com'>")


def executed(folder, name, verdicts=(), outputs=()):
    """An executed notebook as the runner leaves it, without running anything."""
    v4 = nbformat.v4
    shown = [v4.new_output("display_data", {"text/html": verdict._repr_html_()}) for verdict in verdicts]
    cells = [
        v4.new_markdown_cell("# A small & short story\nWith $a_i \\le b$, [a paper](https://arxiv.org/abs/1), and\n\n"
                             "$$\\sum_{k \\in g} q_k$$\n\n\\begin{align}x &= y\\end{align}", id="story"),
        v4.new_code_cell("# Parameters\ndraws = 3", id="p", metadata={"tags": ["injected-parameters"]}),
        v4.new_code_cell("# Every nsplit, against <float64>\ntry:\n    pass\nfinally:\n    pass", id="sweep"),
        v4.new_code_cell("x = '</summary><script>alert(1)</script>'", id="G01", execution_count=1, outputs=[
            v4.new_output("stream", text=f"{XSS} step 1\rstep 2\n"),
            v4.new_output("display_data", {"image/png": PNG, "text/plain": "no"},
                          metadata={"image/png": {"alt": 'time "against" nsplit'}}),
            v4.new_output("display_data", {"image/svg+xml": "<svg><script>1</script></svg>"}),
            v4.new_output("display_data", {"text/latex": "$\\alpha$", "text/plain": "alpha"}),
            v4.new_output("display_data", {"text/html": HOSTILE}),
            v4.new_output("display_data", {"application/javascript": "alert(1)", "text/plain": "plain words"}),
            v4.new_output("error", ename="E", evalue=XSS, traceback=[XSS]), *outputs, *shown])]
    nbformat.write(v4.new_notebook(cells=cells, metadata=notebooks.METADATA), folder / f"{name}.ipynb")


@pytest.fixture(scope="module")
def environment():
    backend = SimpleNamespace(name="cpu", device=f"a test {XSS}", simulated=True)
    return records.environment(backend)


def grouped_gemm(folder, environment):
    """A record with a verdict on every claim, and its notebook."""
    record = records.Record("1_grouped_gemm", {"draws": 3, "name": XSS}, environment)
    boxes = []
    for claim in claims.of_notebook("1_grouped_gemm"):
        if claim.kind == "speed":
            boxes.append(record.verdict(claim.id, "not testable here", "none", missing=f"a GPU {XSS}"))
        else:
            boxes.append(record.verdict(claim.id, "reproduced", f"evidence {XSS}", measured=f"3.1e-7 {XSS}"))
    record.save(folder / "1_grouped_gemm.json")
    executed(folder, "1_grouped_gemm", boxes)


@pytest.fixture(scope="module")
def run(environment, tmp_path_factory):
    """A run folder: one notebook passed, one failed without a record, one was never reached."""
    folder = tmp_path_factory.mktemp("a run ü")
    grouped_gemm(folder, environment)
    executed(folder, "3_int8_pv")
    (folder / "3_int8_pv.log").write_text(f"started\n\x1b[31m{XSS}\x1b[0m\n")
    (folder / "run.json").write_text(json.dumps({"notebooks": {
        "1_grouped_gemm": {"status": "passed", "reason": None},
        "2_prefill_breakdown": {"status": "not run"},
        "3_int8_pv": {"status": "failed", "reason": f"code cell 3: {XSS}"}}}))
    report.build(folder)
    return folder


def pages(folder):
    return {path.name: BeautifulSoup(path.read_text(encoding="utf-8"), "html.parser")
            for path in folder.rglob("*.html")}


def test_the_pages_are_there(run):
    assert pages(run).keys() == {"index.html", "1_grouped_gemm.html", "3_int8_pv.html"}


@pytest.mark.parametrize("name", ["index.html", "1_grouped_gemm.html", "3_int8_pv.html"])
def test_no_page_runs_or_loads_anything(run, name):
    page = pages(run)[name]
    assert page.find_all(["script", "iframe", "object", "embed", "link", "base", "form"]) == []
    policy = page.find("meta", attrs={"http-equiv": "Content-Security-Policy"})["content"]
    assert policy == "default-src 'none'; style-src 'unsafe-inline'; img-src data:"
    assert page.find("meta", attrs={"http-equiv": re.compile("refresh", re.I)}) is None
    for element in page.find_all(True):
        for attribute, value in element.attrs.items():
            assert not attribute.startswith("on"), element
            if attribute in ("src", "srcset", "data", "poster"):
                assert value.startswith("data:"), element
            if attribute == "href":
                assert element.name == "a" and not value.startswith("javascript:"), element
            if attribute == "style":
                assert "url(" not in value, element
    for style in page.find_all("style"):
        assert "@import" not in style.text and "url(" not in style.text


def test_links_lead_somewhere(run):
    found = pages(run)
    for name, page in found.items():
        ids = [element["id"] for element in page.find_all(id=True)]
        assert len(ids) == len(set(ids)), "an id used twice"
        for link in page.find_all("a", href=True):
            target, _, anchor = link["href"].partition("#")
            if target.startswith("https://arxiv.org"):
                continue
            assert not target or (run / target).exists(), link
            if anchor:
                assert found[target or name].find(id=anchor) is not None, link


def test_the_index_begins_with_the_claims_and_links_every_verdict(run):
    index = pages(run)["index.html"]
    rows = index.find("table", class_="claims").find("tbody").find_all("tr")
    assert [row.find("td").text.strip() for row in rows] == [f"G{i:02}" for i in range(1, 16)]
    for row in rows:
        claim = row.find("td").text.strip()
        assert row.find("a", class_="label")["href"] == f"1_grouped_gemm.html#{claim}"
    g08, g10 = rows[7], rows[9]
    assert "PPL delta 3.0% -> 0.19%" in g08.text and f"3.1e-7 {XSS}" in g08.text and "reproduced" in g08.text
    assert "RTX 5090" in g10.text and "not testable here" in g10.text and "Missing: a GPU" in g10.text
    counts = " ".join(index.find("p", class_="counts").text.split())
    assert counts == "9 reproduced 6 not testable here 16 no verdict"
    assert "is not timed" in index.find("header").text


def test_failures_and_what_did_not_run_are_called_out(run):
    index = pages(run)["index.html"]
    failed = index.find("section", class_="failed")
    assert "3_int8_pv: failed" in failed.text and f"code cell 3: {XSS}" in failed.text
    assert failed.find("a", string="log")["href"] == "3_int8_pv.log"
    assert XSS in failed.find("pre").text and "\x1b" not in failed.text
    p01 = next(row for row in index.find_all("tr") if row.find("span", class_="id", string="P01"))
    assert "no verdict" in p01.text
    untested = [d for d in index.find_all("details") if "not run" in d.find("summary").text]
    assert len(untested) == 1 and "B01" in untested[0].text and "B15" in untested[0].text


def test_a_notebook_page_keeps_what_matters(run):
    page = pages(run)["1_grouped_gemm.html"]
    assert page.title.text == "A small & short story"
    assert [m.get("display") for m in page.find_all("math")] == ["inline", "block", "block", "inline"]
    assert page.find("img", alt='time "against" nsplit')["src"] == f"data:image/png;base64,{PNG}"
    assert page.find("a", href="index.html") is not None
    assert page.find("a", href="https://arxiv.org/abs/1") is not None
    assert "kept" in page.text and "plain words" in page.text
    assert f"{XSS} step 1" not in page.text and "step 2" in page.text, "a carriage return starts the line over"
    assert page.find("div", class_="verdict", id="G05") is not None
    assert page.find("summary", string="parameters of this run").parent.has_attr("open")


def test_code_is_summed_up_by_its_comment_or_its_first_line(run):
    page = pages(run)["1_grouped_gemm.html"]
    lines = {details.find("summary").text: details.find("summary").find("code") for details in page.find_all("details")}
    assert lines["Every nsplit, against <float64>"] is None, "words, not code"
    assert lines["x = '</summary><script>alert(1)</script>'"] is not None


def test_a_label_stands_only_before_something(run):
    rows = pages(run)["index.html"].find("tbody").find_all("tr")
    labels = [[cell.get("data-head") for cell in row.find_all("td")] for row in rows]
    verdicts = {v["claim"]: v for v in records.load(run / "1_grouped_gemm.json")["verdicts"]}
    for row, (*_, article, here, _) in zip(rows, labels, strict=True):
        cells, claim = row.find_all("td"), row.find("td").text.strip()
        assert (here == "here:") == bool(verdicts[claim]["measured"]) == bool(cells[3].find(class_="measured"))
        assert (article == "article:") == bool(cells[2].find(string=True, recursive=False))
    assert {here for *_, here, _ in labels} == {"here:", None}


def declarations(css, selector, value):
    """What rules of exactly that selector say of a property, in order."""
    css = re.sub(r"/\*.*?\*/", "", css, flags=re.S)
    rules = re.findall(r"([^{};]+)\{([^{}]*)\}", css)
    return [found[1].strip() for selectors, body in rules if selector in [s.strip() for s in selectors.split(",")]
            for found in [re.search(rf"(?:^|[\s;]){value}:([^;]*)", body)] if found]


def test_kernels_are_shown_whole_and_nothing_is_cut_in_print():
    css = (report.TEMPLATES / "style.css").read_text(encoding="utf-8")
    assert declarations(css, ".output .highlight pre", "max-height") == ["none"]
    screen, _, printed = css.partition("@media print")
    for rule in re.findall(r"([^{};]+)\{[^{}]*max-height: \d", screen):
        assert declarations(printed.partition("{")[2], rule.strip(), "max-height") == ["none"], rule


def test_results_of_several_devices_share_one_index(environment, tmp_path):
    for device in ("a100", "h200"):
        (tmp_path / device).mkdir()
        grouped_gemm(tmp_path / device, environment)
    (tmp_path / "h200" / "1_grouped_gemm.ipynb").unlink()  # records alone are enough
    index = report.build([tmp_path / "a100", tmp_path / "h200"], tmp_path / "out")
    assert index == tmp_path / "out" / "index.html"
    assert {p.relative_to(tmp_path / "out").as_posix() for p in (tmp_path / "out").rglob("*.*")} == {
        "index.html", "a100/1_grouped_gemm.html", "a100/1_grouped_gemm.json", "a100/1_grouped_gemm.ipynb",
        "h200/1_grouped_gemm.json"}
    page = BeautifulSoup(index.read_text(encoding="utf-8"), "html.parser")
    assert len(page.find("tbody").find_all("tr")) == 30
    assert page.find("a", href="a100/1_grouped_gemm.html#G05") is not None
    back = (tmp_path / "out" / "a100" / "1_grouped_gemm.html").read_text(encoding="utf-8")
    assert 'href="../index.html"' in back


def test_what_is_no_report_is_an_error(environment, tmp_path):
    with pytest.raises(ValueError, match="there is no folder .*latest; .*run folders"):
        report.build(tmp_path / "latest")
    with pytest.raises(ValueError, match="say where the report goes"):
        report.build(tmp_path)
    with pytest.raises(ValueError, match="holds neither a run"):
        report.build(tmp_path, tmp_path / "out")
    (tmp_path / "1_grouped_gemm.json").write_text("{}")
    with pytest.raises(ValueError, match="1_grouped_gemm.json"):
        report.build(tmp_path, tmp_path / "out")
    (tmp_path / "a" / "x").mkdir(parents=True)
    (tmp_path / "b" / "x").mkdir(parents=True)
    with pytest.raises(ValueError, match="two folders are called 'x'"):
        report.build([tmp_path / "a" / "x", tmp_path / "b" / "x"], tmp_path / "out")
