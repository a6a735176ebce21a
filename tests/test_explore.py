import html
import re
import threading

import nbformat
import pytest
from bs4 import BeautifulSoup

from kernelbook import explore, lane_plots, notebooks, plots, report, runner
from kernelbook.fragments import INSTRUCTIONS, Tokens

WIDGET = "application/vnd.jupyter.widget-view+json"


def shown(explorer):
    """What the pictures of an explorer say, in words."""
    return [html.unescape(alt) for alt in re.findall(r'aria-label="([^"]*)"', explorer.picture.value)]


def expected(name, load, operand, lane):
    tokens = Tokens(INSTRUCTIONS[name], load, operand)
    return [lane_plots.ownership(tokens).alt, lane_plots.load_path(tokens, lane).alt]


def test_it_opens_on_the_articles_kernel():
    words = shown(explore.lane_map())
    assert words == expected("mmac_i32_16x16x32_i8", 16, "B", 0)
    assert "step 0 multiplies tokens 0-7, 16-23, 32-39, 48-55; step 1" in words[0]


@pytest.mark.parametrize("control, value, described", [
    ("instruction", "mma_m16n8k16_bf16", ("mma_m16n8k16_bf16", 16, "B", 0)),
    ("operand", "A", ("mmac_i32_16x16x32_i8", 16, "A", 0)),
    ("load", 4, ("mmac_i32_16x16x32_i8", 4, "B", 0)),
    ("lane", 63, ("mmac_i32_16x16x32_i8", 16, "B", 63)),
])
def test_every_control_changes_the_picture(control, value, described):
    explorer = explore.lane_map()
    getattr(explorer, control).value = value
    assert shown(explorer) == expected(*described)


def test_it_offers_all_there_is():
    explorer = explore.lane_map()
    assert explorer.instruction.options == tuple(INSTRUCTIONS)
    assert explorer.load.options == (4, 8, 16)
    assert (explorer.lane.min, explorer.lane.max) == (0, 63)


def test_a_lane_that_the_next_instruction_has_not_becomes_its_last():
    explorer = explore.lane_map()
    explorer.lane.value = 50
    explorer.instruction.value = "mma_m16n8k32_s8"
    assert (explorer.lane.value, explorer.lane.max) == (31, 31)
    assert shown(explorer) == expected("mma_m16n8k32_s8", 16, "B", 31)
    explorer.instruction.value = "mmac_i32_16x16x32_i8"
    assert (explorer.lane.value, explorer.lane.max) == (31, 63)


def test_what_cannot_be_says_why_in_place_of_the_picture():
    explorer = explore.lane_map()
    explorer.instruction.value = "mma_m16n8k32_u8s8"
    explorer.operand.value = "A"
    assert shown(explorer) == []
    assert explorer.picture.value == (
        '<p role="alert">operand A of mma_m16n8k32_u8s8 is unsigned and cannot hold V</p>')
    explorer.lane.value = 3
    explorer.operand.value = "B"
    assert shown(explorer) == expected("mma_m16n8k32_u8s8", 16, "B", 3)


def test_a_front_end_may_choose_the_widget_or_the_picture():
    explorer = explore.lane_map()
    bundle = explorer._repr_mimebundle_()
    assert bundle[WIDGET]["model_id"] == explorer.model_id
    assert bundle["text/html"] == explorer.picture.value
    assert bundle["text/plain"] == "\n".join(f"[figure: {alt}]" for alt in shown(explorer))
    explorer.instruction.value, explorer.operand.value = "mma_m16n8k32_u8s8", "A"
    assert explorer._repr_mimebundle_()["text/plain"] == (
        "operand A of mma_m16n8k32_u8s8 is unsigned and cannot hold V")


def test_of_two_changes_at_once_the_later_is_shown(monkeypatch):
    explorer = explore.lane_map()
    second = threading.Thread(target=lambda: setattr(explorer.operand, "value", "A"))

    def slowly(tokens):
        if tokens.operand == "B":
            second.start()
            second.join(0.3)
        return plots.Figure("<svg/>", tokens.operand)

    monkeypatch.setattr(lane_plots, "ownership", slowly)
    monkeypatch.setattr(lane_plots, "load_path", lambda tokens, lane: plots.Figure("<svg/>", tokens.operand))
    explorer.instruction.value = "mma_m16n8k32_s8"
    second.join()
    assert shown(explorer) == ["A", "A"]


# ---- without a live front end

@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """A notebook with an explorer, run and rendered as the project does it."""
    folder = tmp_path_factory.mktemp("explorer")
    record = ("from types import SimpleNamespace\nfrom kernelbook import explore, records\n"
              'rec = records.Record("explorer", {}, records.environment('
              'SimpleNamespace(name="cpu", device="a test", simulated=True)))')
    cells = [nbformat.v4.new_code_cell(source, id=f"c{i}") for i, source in enumerate(
        ['record: str = ""  # where it goes', record, "explore.lane_map()", "rec.save(record)"])]
    cells[0].metadata["tags"] = ["parameters"]
    path = folder / "explorer.ipynb"
    nbformat.write(nbformat.v4.new_notebook(metadata=notebooks.METADATA, cells=cells), path)
    done = runner.run([runner.Job(path, {}, 60)], "test", folder / "runs")
    assert runner.failures(done) == {}
    report.build(done)
    return done


def test_the_executed_notebook_holds_both(run):
    output, = next(cell for cell in nbformat.read(run / "explorer.ipynb", 4).cells if cell.id == "c2").outputs
    assert {WIDGET, "text/html", "text/plain"} == output.data.keys()


def test_the_page_shows_the_picture_and_needs_nobody_to_answer(run):
    text = (run / "explorer.html").read_text(encoding="utf-8")
    page = BeautifulSoup(text, "html.parser").find(id="cell-c2")
    pictures = page.find_all(attrs={"role": "img"})
    assert [picture["aria-label"] for picture in pictures] == expected("mmac_i32_16x16x32_i8", 16, "B", 0)
    assert all(picture.svg for picture in pictures)
    assert not re.search(r"widget|model_id|<script|Loading|LaneMap\(", re.sub(r"<details>.*?</details>", "", text,
                                                                            flags=re.S))
