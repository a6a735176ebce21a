import base64
import csv
import hashlib
import json
import re
from types import SimpleNamespace
from urllib.parse import unquote

import nbformat
import pytest
from bs4 import BeautifulSoup

from kernelbook import claims, cli, notebooks, pages, records, report, runner, tables

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
    (folder / "3_int8_pv.jsonl").write_text("{}\n")
    (folder / "run.json").write_text(json.dumps({"notebooks": {
        "1_grouped_gemm": {"status": "passed", "reason": None},
        "2_prefill_breakdown": {"status": "not run"},
        "3_int8_pv": {"status": "failed", "reason": f"code cell 3: {XSS}"}}}))
    report.build(folder)
    return folder


def html(folder):
    return {path.name: BeautifulSoup(path.read_text(encoding="utf-8"), "html.parser")
            for path in folder.rglob("*.html")}


def digest(script):
    return base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()


def test_the_pages_are_there(run):
    assert html(run).keys() == {"index.html", "1_grouped_gemm.html", "3_int8_pv.html"}


@pytest.mark.parametrize("name", ["index.html", "1_grouped_gemm.html", "3_int8_pv.html"])
def test_no_page_loads_anything_or_runs_what_is_not_ours(run, name):
    page = html(run)[name]
    assert page.find_all(["iframe", "object", "embed", "link", "base"]) == []
    policy = page.find("meta", attrs={"http-equiv": "Content-Security-Policy"})["content"]
    rules = dict(rule.strip().split(" ", 1) for rule in policy.split(";"))
    ours = {"script-src": f"'sha256-{digest(page.find('script').string)}'"} if name == "index.html" else {}
    assert rules == {"default-src": "'none'", "style-src": "'unsafe-inline'", "img-src": "data:",
                     "form-action": "'none'", "base-uri": "'none'"} | ours
    assert len(page.find_all(["script", "form"])) == 2 * len(ours)
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
    found = html(run)
    for name, page in found.items():
        ids = [element["id"] for element in page.find_all(id=True)]
        assert len(ids) == len(set(ids)), "an id used twice"
        for link in page.find_all("a", href=True):
            target, _, anchor = link["href"].partition("#")
            if target.startswith("https://arxiv.org"):
                continue
            assert not target or (run / unquote(target)).exists(), link
            if anchor:
                assert found[unquote(target) or name].find(id=unquote(anchor)) is not None, link


def claim_rows(page):
    return {row["id"]: row for row in page.find("table", class_="claims").find("tbody").find_all("tr", class_=None)}


def test_the_index_has_every_claim_and_links_every_verdict(run):
    index = html(run)["index.html"]
    rows = claim_rows(index)
    assert list(rows) == [claim.id for article in claims.articles() for claim in article.claims]
    for claim in claims.of_notebook("1_grouped_gemm"):
        assert rows[claim.id].find("a", class_="label")["href"] == f"1_grouped_gemm.html#{claim.id}"
        assert rows[claim.id]["data-article"] == "grouped_gemm"
    g08, g10, b01 = rows["G08"], rows["G10"], rows["B01"]
    assert "PPL delta 3.0% -> 0.19%" in g08.text and f"3.1e-7 {XSS}" in g08.text and "reproduced" in g08.text
    assert "RTX 5090" in g10.text and "not testable here" in g10.text and "Missing: a GPU" in g10.text
    assert g10["data-verdicts"] == "not testable here|" and b01["data-verdicts"] == "not run|"
    assert [row.find_all("td")[3]["data-order"] for row in (g08, g10, b01)] == ["0", "4", "6"]
    counts = " ".join(index.find("p", class_="counts").text.split())
    assert counts == "9 reproduced 6 not testable here 16 no verdict 15 not run"
    assert "is not timed" in index.find("header").text
    assert [o.text for o in index.find("select", attrs={"name": "verdict"}).find_all("option")] == [
        "all", "reproduced", "not testable here", "no verdict", "not run"]


def test_failures_and_what_did_not_run_are_called_out(run):
    index = html(run)["index.html"]
    failed = index.find("section", class_="failed")
    assert "3_int8_pv: failed" in failed.text and f"code cell 3: {XSS}" in failed.text
    assert failed.find("a", string="log")["href"] == "3_int8_pv.log"
    assert failed.find("a", string="measured so far")["href"] == "3_int8_pv.jsonl"
    assert XSS in failed.find("pre").text and "\x1b" not in failed.text
    rows = claim_rows(index)
    assert "no verdict" in rows["P01"].text and rows["P01"].find("a", string="why")["href"] == "#failed-3_int8_pv"
    assert "not run" in rows["B01"].text and "To test:" in rows["B01"].text


def test_a_notebook_page_keeps_what_matters(run):
    page = html(run)["1_grouped_gemm.html"]
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
    page = html(run)["1_grouped_gemm.html"]
    lines = {details.find("summary").text: details.find("summary").find("code") for details in page.find_all("details")}
    assert lines["Every nsplit, against <float64>"] is None, "words, not code"
    assert lines["x = '</summary><script>alert(1)</script>'"] is not None


def test_a_label_stands_only_before_something(run):
    for row in claim_rows(html(run)["index.html"]).values():
        _, _, article, here = row.find_all("td")
        figure = article.find(string=lambda text: text.strip(), recursive=False)
        assert (article.get("data-head") == "article:") == bool(figure)
        assert here.get("data-head") is None, "one column needs no name"


def declarations(css, selector, value):
    """What rules of exactly that selector say of a property, in order."""
    css = re.sub(r"/\*.*?\*/", "", css, flags=re.S)
    rules = re.findall(r"([^{};]+)\{([^{}]*)\}", css)
    return [found[1].strip() for selectors, body in rules if selector in [s.strip() for s in selectors.split(",")]
            for found in [re.search(rf"(?:^|[\s;]){value}:([^;]*)", body)] if found]


def test_kernels_are_shown_whole_and_nothing_is_cut_in_print():
    css = (pages.TEMPLATES / "style.css").read_text(encoding="utf-8")
    assert declarations(css, ".output .highlight pre", "max-height") == ["none"]
    screen, _, printed = css.partition("@media print")
    for rule in re.findall(r"([^{};]+)\{[^{}]*max-height: \d", screen):
        assert declarations(printed.partition("{")[2], rule.strip(), "max-height") == ["none"], rule


def test_devices_stand_side_by_side(environment, tmp_path):
    for device in ("a100", "h200 #1"):
        (tmp_path / device).mkdir()
        grouped_gemm(tmp_path / device, {**environment, "device": f"NVIDIA {device} {XSS}"})
    (tmp_path / "h200 #1" / "1_grouped_gemm.ipynb").unlink()  # records alone are enough
    index = report.build([tmp_path / "a100", tmp_path / "h200 #1"], tmp_path / "out")
    assert index == tmp_path / "out" / "index.html"
    assert {p.relative_to(tmp_path / "out").as_posix() for p in (tmp_path / "out").rglob("*.*")} == {
        "index.html", "claims.csv", "a100/1_grouped_gemm.html", "a100/1_grouped_gemm.json", "a100/1_grouped_gemm.csv",
        "h200 #1/1_grouped_gemm.json", "h200 #1/1_grouped_gemm.csv"}
    page = BeautifulSoup(index.read_text(encoding="utf-8"), "html.parser")
    heads = [th.find(string=True).strip() for th in page.find("thead").find_all("th")]
    assert heads[3:] == [f"NVIDIA a100 {XSS}", f"NVIDIA h200 #1 {XSS}"]
    g05 = claim_rows(page)["G05"].find_all("td")
    assert [cell.get("data-head") for cell in g05[3:]] == [f"{head}:" for head in heads[3:]]
    assert g05[3].find("a")["href"] == "a100/1_grouped_gemm.html#G05" and g05[4].find("a") is None
    assert page.find("a", href="h200%20%231/1_grouped_gemm.json") is not None, "a URL, not a path"
    back = (tmp_path / "out" / "a100" / "1_grouped_gemm.html").read_text(encoding="utf-8")
    assert 'href="../index.html"' in back


def measured(folder, environment, *timings, judged="reproduced", draws=3):
    """A record of simulated kernels with times of real CPU code. timings: (variant, p10, median, p90)."""
    record = records.Record("1_grouped_gemm", {"draws": draws}, environment)
    for variant, p10, value, p90 in timings:
        record.measure(kernel="host", variant=variant, case={"M": 1, "=N": "=1"}, metric="time_us", value=value,
                       p10=p10, p90=p90, n=9, unit="us", host=True)
        record.measure(kernel="host", variant=variant, case={"M": 1, "=N": "=1"}, metric="bandwidth_gbs",
                       value=1e3 / value, p10=1e3 / p90, p90=1e3 / p10, n=9, unit="GB/s", host=True)
    for claim in claims.of_notebook("1_grouped_gemm"):
        speed = claim.kind == "speed"
        record.verdict(claim.id, "not testable here" if speed else judged, "words", missing="a GPU" if speed else None)
    folder.mkdir(parents=True)
    record.save(folder / "1_grouped_gemm.json")
    return folder


def test_what_changed_beyond_the_noise(environment, tmp_path):
    before = measured(tmp_path / "before", environment, ("same", 9, 10, 11), ("faster", 9, 10, 11),
                      ("slower", 9, 10, 11), ("touching", 9, 10, 11), ("gone", 1, 2, 3))
    after = measured(tmp_path / "after", environment, ("same", 9.5, 10.5, 12), ("faster", 4, 5, 8.9),
                     ("slower", 11.1, 20, 21), ("touching", 11, 12, 13), judged="contradicted", draws=4)
    index = report.build([after], tmp_path / "out", against=before)
    page = BeautifulSoup(index.read_text(encoding="utf-8"), "html.parser")
    section = page.find("section", class_="changes")
    words = " ".join(section.text.split())
    assert "1 faster, 1 slower, 2 within the noise; 2 measurements only before, 0 only after." in words
    assert "Parameters differ: draws 3 → 4." in words
    assert [a.text for a in section.find_all("a", class_="id")] == [
        claim.id for claim in claims.of_notebook("1_grouped_gemm") if claim.kind != "speed"]
    changes = list(csv.DictReader((tmp_path / "out" / "changes-after.csv").open(encoding="utf-8")))
    assert [(row["variant"], row["times as fast"]) for row in changes] == [("slower", "0.5"), ("faster", "2")]
    assert "2x" in words and "0.5x" in words


def test_runs_of_other_parameters_are_paired_with_their_like(environment, tmp_path):
    def entry(draws):
        return report.Entry("1_grouped_gemm", tmp_path, "", "x", record={"parameters": {"draws": draws}})

    a3, a4, b3, b5 = entry(3), entry(4), entry(3), entry(5)
    assert report._pairs([a3, a4], [b3, b5]) == [(a3, b3)]
    assert report._pairs([a4], [b5]) == [(a4, b5)], "the only one of each"


def test_records_as_csv(environment, tmp_path):
    folder = measured(tmp_path / "x", environment, ("1_fast", 9, 10, 11))
    report.build(folder, tmp_path / "out")
    rows = list(csv.DictReader((tmp_path / "out" / "1_grouped_gemm.csv").open(encoding="utf-8")))
    assert rows[0] == {"kernel": "host", "variant": "1_fast", "metric": "time_us", "value": "10", "unit": "us",
                       "p10": "9", "p90": "11", "n": "9", "cache": "", "host": "True", "status": "passed", "reason": "",
                       "case: M": "1", "case: =N": "'=1"}, "a spreadsheet must not take text for a formula"
    verdicts = list(csv.DictReader((tmp_path / "out" / "claims.csv").open(encoding="utf-8")))
    assert [row["claim"] for row in verdicts] == [claim.id for claim in claims.of_notebook("1_grouped_gemm")]
    assert verdicts[9]["article's figure"] == "about 100 us" and verdicts[9]["where"] == "RTX 5090"
    assert verdicts[9]["verdict"] == "not testable here" and verdicts[9]["missing"] == "a GPU"


def test_a_sweep_is_one_column(environment, tmp_path):
    sweep, runs = tmp_path / "seeds", []
    for seed in (1, 2, 3):
        folder = sweep / f"1_grouped_gemm-{seed}"
        measured(folder, environment, judged="reproduced" if seed < 3 else "contradicted", draws=seed)
        (folder / "run.json").write_text(json.dumps({"notebooks": {"1_grouped_gemm": {"status": "passed"}}}))
        runs.append({"label": f"1_grouped_gemm seed={seed} {XSS}", "folder": folder.name, "notebook": "1_grouped_gemm"})
    (sweep / "sweep.json").write_text(json.dumps({"started": "2026-01-01", "runs": runs}))
    page = BeautifulSoup(report.build(sweep).read_text(encoding="utf-8"), "html.parser")
    g01 = claim_rows(page)["G01"].find_all("td")[3]
    assert [" ".join(label.text.split()) for label in g01.find_all(class_="label", recursive=False)] == [
        "2 reproduced", "1 contradicted"]
    assert len(g01.find_all(class_="run")) == 3 and f"seed=3 {XSS}" in g01.text
    assert (sweep / "1_grouped_gemm-2" / "1_grouped_gemm.csv").exists()


@pytest.fixture
def project(environment, tmp_path, monkeypatch):
    """results/ of two devices and runs/ with two runs on a third, one that left nothing, and a report."""
    for place, name in ((tables, "RESULTS"), (runner, "RUNS")):
        monkeypatch.setattr(place, name, tmp_path / name.lower())
    monkeypatch.setattr(report, "OUT", tmp_path / "runs" / "report")
    measured(tmp_path / "results" / "h200", {**environment, "device": "H200"}, ("1", 9, 10, 11))
    measured(tmp_path / "results" / "a100", {**environment, "device": "A100"}, ("1", 9, 10, 11))
    for day, timing in ((1, (19, 20, 21)), (2, (29, 30, 31))):
        own_run(tmp_path / "runs" / f"2026010{day}-smoke", {**environment, "device": "mine"}, day, ("1", *timing))
    (tmp_path / "runs" / "20260101-broken").mkdir()
    (tmp_path / "runs" / "20260101-broken" / "run.json").write_text(json.dumps({
        "started": "2026-01-01T01:00:00", "notebooks": {"1_grouped_gemm": {"status": "failed", "reason": "why"}}}))
    return tmp_path


def own_run(folder, environment, day, *timings):
    measured(folder, environment, *timings)
    (folder / "run.json").write_text(json.dumps({
        "started": f"2026-01-0{day}T00:00:00", "notebooks": {"1_grouped_gemm": {"status": "passed"}}}))


def test_what_is_found_is_results_and_the_newest_run_of_each_device(project, capsys):
    newest = (project / "runs" / "20260102-smoke").resolve()
    assert report.found() == [project / "results" / "a100", project / "results" / "h200", newest]
    h200 = records.load(project / "results" / "h200" / "1_grouped_gemm.json")["environment"]
    own_run(project / "runs" / "20260103-gpu", h200, 3, ("1", 9, 10, 11))
    assert report.found()[2:] == [(project / "runs" / "20260103-gpu").resolve(), newest], "an H200 of one's own"
    (project / "runs" / "report").mkdir()
    (project / "runs" / "report" / "stale.html").write_text("")
    assert cli.main(["report"]) == 0
    assert f"report: {project / 'runs' / 'report' / 'index.html'}" in capsys.readouterr().out
    assert not (project / "runs" / "report" / "stale.html").exists()
    assert (project / "runs" / "report" / "20260102-smoke" / "1_grouped_gemm.json").exists()


def test_the_published_report_is_drawn_from_the_committed_records(tmp_path):
    index = report.build(report.found(runs=tmp_path / "no runs"), tmp_path / "out")
    page = BeautifulSoup(index.read_text(encoding="utf-8"), "html.parser")
    assert "NVIDIA H200" in page.find("thead").text
    assert any("Roofline" in image["alt"] for image in page.find_all("img"))
    assert sum(path.stat().st_size for path in (tmp_path / "out").rglob("*.*")) < 15e6


def test_records_alone_get_no_pages_beside_them(project):
    assert report.build(project / "results" / "h200") == project / "runs" / "report" / "index.html"
    assert [path.name for path in (project / "results" / "h200").iterdir()] == ["1_grouped_gemm.json"]


def test_a_run_that_left_nothing_counts_if_it_is_the_last(project):
    state = project / "runs" / "20260101-broken" / "run.json"
    state.write_text(state.read_text().replace("2026-01-01T01", "2026-01-09T01"))
    assert report.found()[2:] == [state.parent.resolve(), (project / "runs" / "20260102-smoke").resolve()]


def test_the_newest_run_against_a_device_of_results(project):
    assert cli.main(["report", "--against", "h200"]) == 0
    index = (project / "runs" / "report" / "index.html").read_text(encoding="utf-8")
    page = BeautifulSoup(index, "html.parser")
    assert "From H200 (h200) to mine (20260102-smoke)" in " ".join(page.text.split())
    assert "0 faster, 1 slower" in " ".join(page.find("section", class_="changes").text.split())


def test_what_is_no_report_is_an_error(run, tmp_path):
    with pytest.raises(ValueError, match="there is no folder .*latest; .*run folders"):
        report.build(tmp_path / "latest")
    with pytest.raises(ValueError, match="holds neither a run"):
        report.build(tmp_path, tmp_path / "out")
    (tmp_path / "1_grouped_gemm.json").write_text("{}")
    with pytest.raises(ValueError, match="1_grouped_gemm.json"):
        report.build(tmp_path, tmp_path / "out")
    with pytest.raises(ValueError, match=f"{tmp_path.name} is named twice"):
        report.build([tmp_path, tmp_path], tmp_path / "out")
    with pytest.raises(ValueError, match="no folder h300, and no such device .* has nvidia-h200"):
        report.build(tmp_path, tmp_path / "out", against="h300")
    with pytest.raises(ValueError, match="lies in .*, where the report goes"):
        report.build([run, tmp_path], run.parent)
    with pytest.raises(ValueError, match="there is no run below"):
        report.newest_run(tmp_path)
    with pytest.raises(ValueError, match="nothing to report"):
        report.found(tmp_path / "none", tmp_path / "none")


def test_folders_of_one_name_are_told_apart(environment, tmp_path):
    folders = [measured(tmp_path / parent / "x", environment) for parent in ("a", "b")]
    report.build(folders, tmp_path / "out")
    assert {path.name for path in (tmp_path / "out").iterdir() if path.is_dir()} == {"a-x", "b-x"}
