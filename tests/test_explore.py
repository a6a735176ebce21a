import html
import re
import threading
from types import SimpleNamespace

import nbformat
import pytest
from bs4 import BeautifulSoup

from kernelbook import (
    buckets,
    experiments,
    explore,
    lane_plots,
    measure,
    notebooks,
    plots,
    records,
    report,
    runner,
    shapes,
)
from kernelbook.backends.cpu import CpuBackend
from kernelbook.experiments import prefill_buckets
from kernelbook.fragments import INSTRUCTIONS, Tokens
from kernelbook.ops import grouped_gemm as op

WIDGET = "application/vnd.jupyter.widget-view+json"


@pytest.fixture
def pictures():
    """For a test that looks at more than words."""


@pytest.fixture(autouse=True)
def words_alone(request, monkeypatch):
    """Figures without their drawing, which takes most of a second, but for a test that asks for `pictures`."""
    if "pictures" not in request.fixturenames:
        for module in (explore, lane_plots):
            monkeypatch.setattr(module, "_figure", lambda draw, alt, **_: plots.Figure("<svg/>", alt))


def shown(explorer):
    """What the pictures of an explorer say, in words."""
    return [html.unescape(alt) for alt in re.findall(r'aria-label="([^"]*)"', explorer.picture.value)]


def expected(name, load, operand, lane):
    tokens = Tokens(INSTRUCTIONS[name], load, operand)
    return [lane_plots.ownership(tokens).alt, lane_plots.load_path(tokens, lane).alt]


def test_it_opens_on_the_articles_kernel(pictures):
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


# ---- slices of K

Q = shapes.QWEN3_VL_2B["q"]  # 2048 x 2048
SMALL = shapes.Projection("small", 64, 128, 1, "")


@pytest.fixture(scope="module")
def environment(simulator):
    return records.environment(simulator)


@pytest.fixture
def lab(simulator, environment):
    return experiments.Lab(simulator, records.Record("1_grouped_gemm", {}, environment))


def said(explorer):
    """The one sentence of an explorer with one picture."""
    words, = shown(explorer)
    return words


def test_slices_open_on_a_decode_product_as_the_rule_splits_it(lab):
    explorer = explore.split_k(lab, Q)
    words = said(explorer)
    assert "M = 1, N = 2048, K = 2048, groups of 32, nsplit 64, as the split rule has it" in words
    assert "2 x 1 x 64 = 128 blocks, 0.16 waves on an H200, whose 132 multiprocessors hold 6 blocks each" in words
    assert "longest slice has 1 of 64 groups" in words and "simulated, not timed" in words
    assert (explorer.nsplit.max, explorer.nsplit.disabled) == (64, True)


@pytest.mark.parametrize("control, value, words", [
    ("m", 64, "M = 64, N = 2048, K = 2048, groups of 32, nsplit 4, as the split rule has it: 8 x 16 x 4 = 512 blocks"),
    ("n", 5000, "nsplit 64, as the split rule has it: 5 x 1 x 64 = 320 blocks"),
    ("k", 96, "nsplit 3, as the split rule has it: 2 x 1 x 3 = 6 blocks"),
    ("group", 128, "groups of 128, nsplit 16, as the split rule has it: 2 x 1 x 16 = 32 blocks"),
])
def test_the_rule_follows_the_shape(lab, control, value, words):
    explorer = explore.split_k(lab, Q)
    getattr(explorer, control).value = value
    assert words in said(explorer)


def test_another_nsplit_than_the_rules(lab):
    explorer = explore.split_k(lab, Q)
    explorer.rule.value = False
    assert not explorer.nsplit.disabled
    explorer.m.value, explorer.nsplit.value = 64, 7
    words = said(explorer)
    assert "nsplit 7 (the split rule has 4): 8 x 16 x 7 = 896 blocks, 1.13 waves" in words
    assert "the longest slice has 10 of 64 groups, which with 2 waves makes 20 one after another" in words
    explorer.k.value = 96
    assert (explorer.nsplit.value, explorer.nsplit.max) == (3, 3), "no more slices than groups"
    explorer.rule.value = True
    explorer.k.value = 2048
    assert explorer.nsplit.value == 4


def test_partial_sums_stay_within_the_rules_cap(lab):
    explorer = explore.split_k(lab, Q)
    explorer.m.value, explorer.n.value = 512, 8192
    assert explorer.nsplit.max == op.PARTIAL_CAP_BYTES // (512 * 8192 * 4) == 4


@pytest.mark.parametrize("sizes, reason", [
    ({"k": 2000}, "K = 2000 is no multiple of the group of 32: the kernels take whole groups only"),
    ({"k": 65536, "n": 32768}, "N x K = 2,147,483,648 weights; expected at most 1,073,741,824"),
])
def test_a_shape_that_cannot_be_says_why(lab, sizes, reason):
    explorer = explore.split_k(lab, Q)
    for name, value in sizes.items():
        getattr(explorer, name).value = value
    assert explorer.text == reason and explorer.picture.value == f'<p role="alert">{reason}</p>'


@pytest.mark.parametrize("registers, arch, blocks", [
    (32, "90a", 8),  # 64 warps of 32 lanes
    (33, "90a", 6),  # handed out as 40: 51.2 warps
    (255, "90a", 1), (32, "89", 6), (40, "120", 6), (48, "80", 5)])
def test_blocks_that_a_multiprocessor_holds(registers, arch, blocks):
    assert explore.resident_blocks(registers, arch) == blocks


class Timed(CpuBackend):
    """A backend that claims to be timed, so that times can be made up."""
    simulated = False
    l2_bytes = 1 << 10
    arch, multiprocessors = "80", 10


@pytest.fixture
def timed(environment, monkeypatch):
    monkeypatch.setattr(op.GroupedGemm, "clone", lambda self: self)  # array.copy leaves the simulator's memory

    def times(contenders, **_):
        for calls in contenders.values():
            calls[0]()
        return {s: measure.Timing(100.0 / s, 90.0 / s, 110.0 / s, 9) for s in contenders}
    monkeypatch.setattr(measure, "device_times", times)
    return experiments.Lab(Timed(), records.Record("1_grouped_gemm", {}, {**environment, "simulated": False}))


def test_where_there_is_a_clock_right_results_are_timed(timed, monkeypatch):
    made = []
    monkeypatch.setattr(explore.grouped_gemm, "random_strips",
                        lambda *a, original=explore.grouped_gemm.random_strips: made.append(a) or original(*a))
    explorer = explore.split_k(timed, SMALL)
    words = said(explorer)
    assert "nsplit 4, as the split rule has it" in words and "on CPU" in words
    assert "whose 10 multiprocessors hold 8 blocks each" in words
    assert "100.0 us [90.0, 110.0] at nsplit 1, 50.0 us [45.0, 55.0] at nsplit 2, 25.0 us [22.5, 27.5] at nsplit 4." \
        in words
    assert "not timed" not in words
    explorer.m.value = 2
    assert len(made) == 1, "the weights are kept while their shape stays"
    explorer.n.value = 65
    assert len(made) == 2
    assert timed.record.measurements == [], "what is tried out is not the run's"


def test_weights_that_the_cache_would_hold_are_not_timed(timed):
    timed.backend.l2_bytes = 128 * 128 * explore.COPIES
    assert "not timed, since so few weights would be read from the L2" in said(explore.split_k(timed, SMALL))


def test_a_wrong_result_has_no_time(timed, monkeypatch):
    prepare = op.GroupedGemm.prepare

    def spoilt(self, x, *, nsplit=None, out=None, **options):
        call = prepare(self, x, nsplit=nsplit, out=out, **options)
        return (lambda: call().fill(0)) if nsplit == 4 else call
    monkeypatch.setattr(op.GroupedGemm, "prepare", spoilt)
    words = said(explore.split_k(timed, SMALL))
    assert "wrong result at nsplit 4" in words and "us [" in words and "] at nsplit 4" not in words


def test_waves_and_groups_are_drawn_and_times_beside_them_where_there_are_any(pictures, lab, timed):
    explorer = explore.split_k(lab, SMALL)
    drawn = [explorer.picture.value]
    explorer.m.value, explorer.k.value = 512, 32  # the one nsplit there is
    drawn += [explorer.picture.value, explore.split_k(timed, SMALL).picture.value]
    for picture in drawn:
        assert "waves of blocks" in picture and "groups one after another" in picture
    assert ["us a call, cold" in picture for picture in drawn] == [False, False, True]


# ---- Amdahl's ceiling

PARTS = {"GEMM": 600.0, "GDN": 200.0, "attention": 100.0, "idle": 110.0, "overlap": -10.0}


def test_the_ceiling_opens_on_the_bound_of_the_notebooks_table(lab):
    words = said(explore.amdahl_ceiling())
    first, *_ = prefill_buckets.headroom(lab).data
    assert first["scenario"] == prefill_buckets.CHEAP
    assert f"the article {first['bound']:.2f}x, and" in words
    assert f"GEMM {prefill_buckets.probe_gain():.2f} times as fast, GDN 1.00 times, everything else free" in words
    assert "this machine" not in words


@pytest.mark.parametrize("gemm, gdn, free", [(10, 1, True), (10, 4, False), (1, 1, False), (100, 100, True)])
def test_controls_reach_both_tables(gemm, gdn, free):
    explorer = explore.amdahl_ceiling(SimpleNamespace(parts=PARTS))
    explorer.gemm.value, explorer.gdn.value, explorer.free.value = gemm, gdn, free
    rest = 0 if free else 200
    bound, ceiling = 1000 / (600 / gemm + 200 / gdn + rest), 1000 / (200 / gdn + rest)
    assert f"this machine {bound:.2f}x, and {ceiling:.2f}x were GEMM free" in said(explorer)
    printed = {line.name: line.a for line in buckets.article.tables().comparison() if line.name != "total"}
    faster = {"GEMM": gemm, "GDN": gdn} | ({"rest": float("inf")} if free else {})
    assert f"the article {buckets.amdahl(printed, faster):.2f}x" in said(explorer)


def test_buckets_are_drawn_before_and_after(pictures):
    picture = explore.amdahl_ceiling(SimpleNamespace(parts=PARTS)).picture.value
    for word in ("the article,", "this machine,", "as it is", "sped up", "GEMM", "GDN", "rest", "attention", "idle"):
        assert f">{word}<" in picture, word
    assert ">overlap<" not in picture


def test_a_table_without_gemm_says_so():
    assert "no part 'GEMM' to speed up" in explore.amdahl_ceiling(SimpleNamespace(parts={"GDN": 3.0})).text


# ---- without a live front end

@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """A notebook with an explorer, run and rendered as the project does it."""
    folder = tmp_path_factory.mktemp("explorer")
    record = ("from kernelbook import backends, experiments, explore, records, shapes\n"
              'backend = backends.get("cpu")\n'
              'rec = records.Record("explorer", {}, records.environment(backend))\n'
              "lab = experiments.Lab(backend, rec)")
    cells = [nbformat.v4.new_code_cell(source, id=f"c{i}") for i, source in enumerate(
        ['record: str = ""  # where it goes', record, "explore.lane_map()",
         'explore.split_k(lab, shapes.QWEN3_VL_2B["q"])', "explore.amdahl_ceiling()", "rec.save(record)"])]
    cells[0].metadata["tags"] = ["parameters"]
    path = folder / "explorer.ipynb"
    nbformat.write(nbformat.v4.new_notebook(metadata=notebooks.METADATA, cells=cells), path)
    done = runner.run([runner.Job(path, {}, 60)], "test", folder / "runs")
    assert runner.failures(done) == {}
    report.build(done)
    return done


def alone(lab):
    """By cell, what each explorer of that notebook says in the session that made it."""
    return {"c2": expected("mmac_i32_16x16x32_i8", 16, "B", 0), "c3": shown(explore.split_k(lab, Q)),
            "c4": shown(explore.amdahl_ceiling())}


def test_the_executed_notebook_holds_both(run):
    for cell in nbformat.read(run / "explorer.ipynb", 4).cells:
        if cell.id in ("c2", "c3", "c4"):
            output, = cell.outputs
            assert {WIDGET, "text/html", "text/plain"} == output.data.keys()


def test_the_page_shows_the_pictures_and_needs_nobody_to_answer(run, lab):
    text = (run / "explorer.html").read_text(encoding="utf-8")
    page = BeautifulSoup(text, "html.parser")
    for cell, words in alone(lab).items():
        pictures = page.find(id=f"cell-{cell}").find_all(attrs={"role": "img"})
        assert [picture["aria-label"] for picture in pictures] == words
        assert all(picture.svg for picture in pictures)
    assert not re.search(r"widget|model_id|<script|Loading|(LaneMap|SplitK|Amdahl)\(",
                         re.sub(r"<details>.*?</details>", "", text, flags=re.S))
