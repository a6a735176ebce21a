import pytest

from kernelbook import ROOT, readme, tables

MEASUREMENTS = [
    {"metric": "time_us", "variant": "ours", "case": {"M": 1, "N": 64}, "value": 12.3456},
    {"metric": "time_us", "variant": "peer|1", "case": {"M": 1, "N": 64}, "value": 20.0},
    {"metric": "time_us", "variant": "ours", "case": {"M": 1, "N": 128}, "value": None},
    {"metric": "max_abs", "variant": "ours", "case": {"M": 1, "N": 64}, "value": 0.5},
    {"metric": "time_us", "variant": "ours", "case": {"M": 2, "N": 64}, "value": 13.0},
]
README = "# Title\n<!-- results:decode -->\nold\n<!-- /results -->\nend\n"


@pytest.fixture
def decode(monkeypatch):
    monkeypatch.setattr(tables, "TABLES", {})

    @tables.table("decode")
    def decode(results):
        chosen = tables.select(results["a"]["1"], metric="time_us", case={"M": 1})
        return tables.pivot(chosen, row=lambda m: m["case"]["N"], column=lambda m: m["variant"], corner="N")

    return {"a": {"1": {"measurements": MEASUREMENTS}}}


def test_a_marked_table_is_drawn_and_stays_put(decode, tmp_path):
    path = tmp_path / "README.md"
    path.write_text(README)
    assert tables.update(path, decode)
    assert path.read_text() == ("# Title\n<!-- results:decode -->\n| N | ours | peer\\|1 |\n| --- | ---: | ---: |\n"
                                "| 64 | 12.3 | 20 |\n| 128 |  |  |\n<!-- /results -->\nend\n")
    assert not tables.update(path, decode)


def test_two_measurements_on_one_place_are_refused():
    with pytest.raises(ValueError, match="row 64, column 'ours'"):
        tables.pivot(MEASUREMENTS, row=lambda m: m["case"]["N"], column=lambda m: m["variant"])


@pytest.mark.parametrize("text, message", [
    (README.replace("decode", "prefill"), "no table 'prefill'; there are: decode"),
    (README.replace("<!-- /results -->", ""), "without <!-- /results -->"),
])
def test_faulty_markers(decode, text, message):
    with pytest.raises(ValueError, match=message):
        tables.redraw(text, decode)


@pytest.mark.parametrize("page", readme.PAGES)
def test_a_page_is_current(page):
    text, results = (ROOT / page).read_text(encoding="utf-8"), tables.load()
    if not results:
        pytest.skip("no committed records")
    assert tables.redraw(text, results) == text, "run `python -m kernelbook readme`"
    assert len(text.splitlines()) < (150 if page == "README.md" else 250), "it is to be read"


def test_the_picture_is_current():
    results = tables.load()
    if not results:
        pytest.skip("no committed records")
    drawn = (tables.RESULTS / readme.DEVICE / readme.PICTURE).read_text(encoding="utf-8")
    assert readme.picture(results) == drawn, "run `python -m kernelbook readme`"
