"""The report as a browser shows it: Chromium without a window, pages from disk, no network."""

import re
import shutil
from types import SimpleNamespace

import nbformat
import pytest

from kernelbook import claims, notebooks, plots, records, report, summary_plots

XSS = "<script>document.title = 'broken into'</script><img src=x onerror=\"document.title = 'broken into'\">"
EVERY = [claim.id for article in claims.articles() for claim in article.claims]
GEMM = [claim.id for claim in claims.of_notebook("1_grouped_gemm")]
BROWSERS = ("chromium", "chromium-browser", "google-chrome", "chrome")


@pytest.fixture(scope="module")
def chromium():
    """A running browser; skips where there is none."""
    sync_api = pytest.importorskip(
        "playwright.sync_api", reason="playwright drives the browser: pip install -r requirements-browser.txt")
    path = next(filter(None, map(shutil.which, BROWSERS)), None)
    if path is None:
        pytest.skip("no Chromium on this machine: apt-get install chromium, or the like")
    with sync_api.sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=path, args=["--no-sandbox", "--disable-dev-shm-usage"])
        yield browser
        browser.close()


def device(folder, name, simulated, verdicts, executed=True):
    """A record of the first article with timings to draw and compare, and its executed notebook."""
    environment = records.environment(SimpleNamespace(name="cpu", device=name, simulated=simulated))
    record = records.Record("1_grouped_gemm", {"draws": 3, "note": XSS}, environment)
    if not simulated:
        record.measure(kernel="ceilings", variant="read", case={"how": XSS}, metric="bandwidth_gbs", value=4e3,
                       unit="GB/s")
        for m in (1, 4, 16, 64):
            for variant, us in (("1_ours", 10 + m), (f"peer {XSS}", 20)):
                case = {"kernel": "grouped_gemm", "variant": variant, "cache": "cold", "case": {"M": m, "N": 64}}
                record.measure(**case, metric="time_us", value=us, p10=us - 1, p90=us + 1, n=9, unit="us")
                record.measure(**case, metric="bandwidth_gbs", value=900 / us, unit="GB/s")
                record.measure(**case, metric="throughput_tflops", value=m / us, unit="TFLOP/s")
    boxes = []
    for claim, verdict in zip(claims.of_notebook("1_grouped_gemm"), verdicts, strict=True):
        absent = XSS if verdict == "not testable here" else None
        boxes.append(record.verdict(claim.id, verdict, f"evidence {XSS}", f"3.1 [3.0, 3.2] {XSS}", missing=absent))
    folder.mkdir()
    record.save(folder / "1_grouped_gemm.json")
    if executed:
        v4 = nbformat.v4
        figures = [*summary_plots.figures(record.__dict__), plots.mapping(64, 4, 4, True)]
        shown = [*figures, *boxes, SimpleNamespace(_repr_html_=lambda: XSS)]
        cells = [v4.new_markdown_cell("# A GEMM\n\n$$\\sum_{k \\in g} q_k$$\n\n" + "words " * 200, id="story"),
                 v4.new_code_cell("# A long line\n" + "x = 1; " * 60, id="long", execution_count=1, outputs=[
                     v4.new_output("display_data", {"text/html": output._repr_html_()}) for output in shown])]
        nbformat.write(v4.new_notebook(cells=cells, metadata=notebooks.METADATA), folder / "1_grouped_gemm.ipynb")
    return folder


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    """The report of two devices, one compared with the other."""
    place = tmp_path_factory.mktemp("a report ü")
    speeds = [claim.kind == "speed" for claim in claims.of_notebook("1_grouped_gemm")]
    card = device(place / "my card #1", "A card", False,
                  ["contradicted" if claim == "G04" else "reproduced" for claim in GEMM])
    simulator = device(place / "simulator", "The simulator", True,
                       ["not testable here" if speed else "reproduced" for speed in speeds])
    return report.build([simulator], place / "out", against=card).parent


@pytest.fixture
def visit(chromium, site):
    """Opens a page of the report; afterwards nothing may have been logged or loaded, and no script of a record run."""
    contexts, faults = [], []

    def open_page(path="index.html", width=1280, scheme="light", script=True):
        contexts.append(chromium.new_context(viewport={"width": width, "height": 900}, color_scheme=scheme,
                                             java_script_enabled=script))
        page = contexts[-1].new_page()
        page.on("console", lambda message: faults.append(f"console: {message.text}"))
        page.on("pageerror", lambda error: faults.append(f"error: {error}"))
        page.on("request", lambda request: request.is_navigation_request() or request.url.startswith("data:")
                or faults.append(request.url))
        page.goto((site / path).as_uri())
        return page

    yield open_page
    for context in contexts:
        assert [page.title() for page in context.pages if "broken into" in page.title()] == []
        context.close()
    assert faults == []


def ids(page):
    """The claims as they stand, but for those that a filter hides."""
    return page.locator("table.claims tbody tr:not(.article):visible .id").all_inner_texts()


def head(page, name):
    return page.locator("table.claims thead th", has_text=name)


def test_the_index_sorts(visit):
    page = visit()
    assert ids(page) == EVERY and page.locator("tr.article:visible").count() == len(claims.articles())
    head(page, "A card").get_by_role("button").click()
    assert ids(page) == [*(g for g in GEMM if g != "G04"), "G04", *(c for c in EVERY if c not in GEMM)]
    assert page.locator("tr.article:visible").count() == 0
    assert head(page, "A card").get_attribute("aria-sort") == "ascending"
    head(page, "A card").get_by_role("button").click()
    assert ids(page) == [*(c for c in EVERY if c not in GEMM), "G04", *(g for g in GEMM if g != "G04")]
    assert page.locator("[aria-sort]").evaluate_all("all => all.map(th => th.ariaSort)") == ["descending"]
    head(page, "Its figure").get_by_role("button").press("Enter")
    figures = {claim.id: claim.value or claim.where for article in claims.articles() for claim in article.claims}
    with_figure = [claim for claim in ids(page) if figures[claim]]
    assert ids(page)[:len(with_figure)] == with_figure, "claims without a figure stay behind"
    head(page, "Claim").get_by_role("button").click()
    assert ids(page) == EVERY and page.locator("tr.article:visible").count() == len(claims.articles())


def test_the_index_filters(visit):
    page = visit()
    page.get_by_label("Article").select_option(label="Group-quantized GEMM for decode and prefill")
    assert ids(page) == GEMM and page.get_by_role("status").inner_text() == f"15 of {len(EVERY)} claims"
    assert page.locator("tr.article:visible").count() == 1
    page.get_by_label("Verdict").select_option("contradicted")
    assert ids(page) == ["G04"]
    page.get_by_label("Verdict").select_option("not testable here")
    assert ids(page) == [claim.id for claim in claims.of_notebook("1_grouped_gemm") if claim.kind == "speed"]
    page.get_by_label("Article").select_option("")
    page.get_by_label("Verdict").select_option("not run")
    assert ids(page) == [claim for claim in EVERY if claim not in GEMM]
    page.locator(".changes a.id", has_text="G04").click()
    assert page.locator("#G04").is_visible(), "a link finds its claim, whatever a filter hides"


def test_without_script_the_table_stands_whole(visit):
    page = visit(script=False)
    assert ids(page) == EVERY and page.locator(".controls").is_hidden()


def test_links_land(visit, site):
    page = visit()
    links = page.locator("a[href]").evaluate_all("all => all.map(a => [a.getAttribute('href'), a.href, a.hash])")
    assert {name.rpartition(".")[2].partition("#")[0] for name, _, _ in links if "#" not in name[:1]} == {
        "html", "json", "csv"}
    for name, _, anchor in links:
        if name.startswith("#"):
            assert page.evaluate("id => document.getElementById(decodeURIComponent(id)) !== null", anchor[1:]), name
    for url in {url.partition("#")[0] for _, url, _ in links}:
        assert page.evaluate("url => new URL(url).protocol", url) == "file:"
    verdict = page.locator("#G04 a.label", has_text="contradicted")
    verdict.click()
    box = page.locator(".verdict#G04")
    assert page.title() == "A GEMM" and "my%20card%20%231/" in page.url
    place = box.bounding_box()
    assert place["y"] >= 0 and place["y"] + place["height"] <= 900, "in view"
    assert box.evaluate("box => getComputedStyle(box).outlineStyle") == "solid", "the box that is meant is marked"
    page.get_by_role("link", name="← all claims").click()
    assert page.locator("table.claims").is_visible()
    for suffix, start in ((".json", "{"), (".csv", "kernel,")):
        link = page.locator(f"a[href$='1_grouped_gemm{suffix}']").first
        path = site / link.evaluate("a => decodeURIComponent(new URL(a.href).pathname)").removeprefix(f"{site}/")
        assert path.read_text(encoding="utf-8").startswith(start)


def test_changes_and_figures_are_shown(visit):
    page = visit()
    assert page.locator(".changes .faster").inner_text() == "0 faster"
    figures = page.locator("figure img")
    assert figures.count() == 2, "latency and roofline of the device that is timed"
    for figure in figures.all():
        assert figure.evaluate("img => img.complete && img.naturalWidth > 0")
        assert figure.bounding_box()["width"] > 400 and figure.bounding_box()["height"] > 150
        assert re.search("Time of a call|Roofline", figure.get_attribute("alt"))


@pytest.mark.parametrize("path", ["index.html", "my card #1/1_grouped_gemm.html"])
def test_a_phone_shows_all_of_it(visit, path):
    page = visit(path, width=390)
    assert page.evaluate("document.documentElement.scrollWidth") <= 390
    wide = page.locator("svg:visible, img:visible").evaluate_all(
        "all => all.filter(e => e.getBoundingClientRect().right > innerWidth).length")
    assert wide == 0
    if path == "index.html":
        assert page.locator("#G01").evaluate("row => getComputedStyle(row).display") == "block"
        head(page, "A card").get_by_role("button").click()
        assert ids(page)[:3] == ["G01", "G02", "G03"] and "G04" in ids(page)[14:15]
        page.get_by_label("Verdict").select_option("contradicted")
        assert ids(page) == ["G04"]


CONTRAST = """selector => {
  const rgb = (text) => text.match(/[\\d.]+/g).slice(0, 3).map(Number);
  const light = (c) => { const [r, g, b] = c.map((v) => (v /= 255) <= .03928 ? v / 12.92 : ((v + .055) / 1.055) ** 2.4);
                         return .2126 * r + .7152 * g + .0722 * b; };
  const paper = light(rgb(getComputedStyle(document.body).backgroundColor));
  return [...document.querySelectorAll(selector)].map((element) => {
    const ink = light(rgb(getComputedStyle(element).color));
    return (Math.max(ink, paper) + .05) / (Math.min(ink, paper) + .05);
  });
}"""


@pytest.mark.parametrize("path", ["index.html", "my card #1/1_grouped_gemm.html"])
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_light_and_dark_can_be_read(visit, path, scheme):
    page = visit(path, scheme=scheme)
    paper = page.evaluate("getComputedStyle(document.body).backgroundColor")
    assert (max(map(int, re.findall(r"\d+", paper))) < 60) == (scheme == "dark")
    contrasts = page.evaluate(CONTRAST, "body, h1, h2, a, .label, .evidence, .where, td, th, select, math, summary")
    assert len(contrasts) > 10 and min(contrasts) >= 4.5, "WCAG's contrast of text"


def test_print_shows_the_evidence_and_no_controls(visit):
    page = visit()
    page.emulate_media(media="print")
    assert page.locator(".controls").is_hidden()
    closed = page.locator("#G01 details.evidence").first
    assert not closed.evaluate("d => d.open") and closed.evaluate("d => d.getBoundingClientRect().height") > 30
