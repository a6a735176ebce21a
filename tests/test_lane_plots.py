import html
import re
from xml.etree import ElementTree

import numpy as np
import pytest
from matplotlib.colors import to_rgb

from kernelbook import lane_plots, plots
from kernelbook.fragments import INSTRUCTIONS, LOADS, Tokens

MMAC = Tokens(INSTRUCTIONS["mmac_i32_16x16x32_i8"])
BF16 = Tokens(INSTRUCTIONS["mma_m16n8k16_bf16"], 16, "A")  # four steps, and two columns of V a lane
NARROW = Tokens(INSTRUCTIONS["mfma_i32_16x16x32_i8"], 4)  # two loads a step
MMA = Tokens(INSTRUCTIONS["mma_m16n8k32_s8"])

FIGURES = {
    "ownership": lambda: lane_plots.ownership(MMAC),
    "ownership, fragment": lambda: lane_plots.ownership(MMAC, "fragment"),
    "ownership, four steps": lambda: lane_plots.ownership(BF16),
    "ownership, one step": lambda: lane_plots.ownership(NARROW),
    "narrow load": lambda: lane_plots.narrow_load(MMAC),
    "narrow load, nothing missing": lambda: lane_plots.narrow_load(NARROW, 4),
    "load path": lambda: lane_plots.load_path(MMAC, 17),
    "load path, two columns": lambda: lane_plots.load_path(BF16, 5),
    "load path, two loads": lambda: lane_plots.load_path(NARROW, 63),
    "operand map": lambda: lane_plots.operand_map(MMAC.instruction, "A"),
    "operand map, upright": lambda: lane_plots.operand_map(MMA.instruction, "B"),
    "operand map, by element": lambda: lane_plots.operand_map(MMAC.instruction, "D", by="element"),
}


@pytest.fixture(scope="module")
def figures():
    return {name: draw() for name, draw in FIGURES.items()}


def test_every_figure_is_drawn_here():
    drawn = {name.split(",")[0].replace(" ", "_") for name in FIGURES}
    assert drawn == {name for name, value in vars(lane_plots).items()
                     if getattr(value, "__annotations__", {}).get("return") is plots.Figure and name[0] != "_"}


@pytest.mark.parametrize("name", FIGURES)
def test_a_figure_is_a_figure_like_the_others(figures, name):
    """Scales, takes the page's ink, refers to nothing outside and says what it shows."""
    figure = figures[name]
    root = ElementTree.fromstring(figure.svg)
    assert "viewBox" in root.attrib and "max-width: 100%" in root.attrib["style"]
    assert int(re.search(r"width: (\d+)px", root.attrib["style"])[1]) <= 480, "hardly smaller on a phone"
    assert "currentColor" in figure.svg and plots._INK not in figure.svg
    for element in root.iter():
        if element.tag.endswith("}text"):
            assert re.search("fill: (#|currentColor)", element.attrib["style"]), element.text
            assert float(re.search(r"([\d.]+)px", element.attrib["style"])[1]) >= 7, element.text
        for value in element.attrib.values():
            assert not re.search(r"url\((?!#)", value)
    assert not re.search(r"(fill|stroke): ?(#000000|#ffffff|black|white)", figure.svg)
    assert not re.search(r"<script|<image|@import", figure.svg)
    assert len(figure.alt) > 30 and figure.alt.endswith(".")
    assert html.escape(figure.alt, quote=True) in figure._repr_html_()


def test_what_figures_of_one_page_call_by_one_name_is_the_same(figures):
    defined = {}
    for figure in figures.values():
        own = {e.attrib["id"]: ElementTree.tostring(e).strip()
               for e in ElementTree.fromstring(figure.svg).iter() if "id" in e.attrib}
        for name in set(re.findall(r'(?:url\(|href=")#([^)"]+)', figure.svg)):
            assert defined.setdefault(name, own[name]) == own[name]


# ---- what the cells hold

def shapes(figure, corners):
    """Filled shapes of so many corners: (middle x, middle y, fill)."""
    for path in ElementTree.fromstring(figure.svg).iter("{http://www.w3.org/2000/svg}path"):
        fill = re.search(r"fill: (#\w+)", path.attrib.get("style", ""))
        points = np.array(re.findall(r"[ML] (-?[\d.]+) (-?[\d.]+)", path.attrib["d"]), float)
        if fill and len(points) == corners:
            yield *((points.min(0) + points.max(0)) / 2), fill[1]


def texts(figure):
    """Texts as (x, y near the middle, text), the lines of one joined, in the order they are drawn."""
    found = []
    for group in ElementTree.fromstring(figure.svg).iter("{http://www.w3.org/2000/svg}g"):
        if group.attrib.get("id", "").startswith("text_"):
            lines = list(group.iter("{http://www.w3.org/2000/svg}text"))
            at = lines[0].attrib
            x, y = (at["x"], at["y"]) if "x" in at else re.findall(r"-?[\d.]+", at["transform"])[:2]
            found.append((float(x), float(y) - 3, "".join(line.text.strip() for line in lines)))
    return found


def cells(figure):
    """The cells of a figure in reading order: (number, fill, whether a triangle of another colour lies in it)."""
    squares = sorted(shapes(figure, 4), key=lambda c: (round(c[1]), c[0]))
    numbers, corners = texts(figure), list(shapes(figure, 3))
    for x, y, fill in squares:
        near = [n for a, b, n in numbers if abs(a - x) < 3 and abs(b - y) < 4 and n.isdigit()]
        if near:
            half = [c for a, b, c in corners if abs(a - x) < 1 and abs(b - y) < 1]
            yield int(near[0]), fill, (half or [None])[0]


ALL = [pytest.param(Tokens(i, load, operand), id=f"{i.name}-{operand}-{load}") for i in INSTRUCTIONS.values()
       for operand in "AB" if getattr(i, operand).dtype is not np.uint8 for load in LOADS
       if i.name in ("mmac_i32_16x16x32_i8", "mma_m16n8k32_s8", "mma_m16n8k16_bf16")]


@pytest.mark.parametrize("tokens", ALL)
def test_ownership_colours_the_sets_and_marks_what_a_logical_scale_gets_wrong(tokens):
    shown = list(cells(lane_plots.ownership(tokens)))
    above, below = shown[:tokens.tile], shown[tokens.tile:]
    assert [t for t, *_ in above] == [t for t, *_ in below] == list(range(tokens.tile))
    sets = tokens.sets()
    for step, owned in enumerate(sets):
        colour = lane_plots.STEP_COLOURS[step]
        assert [t for t, fill, _ in above if fill == colour] == list(owned)
        logical = range(step * len(owned), (step + 1) * len(owned))
        assert [t for t, fill, _ in below if fill == colour] == list(logical)
        assert [t for t, fill, half in below if half == colour] == sorted(set(owned) - set(logical))
    assert not any(half for *_, half in above)


def test_the_articles_bug_is_seen():
    figure = lane_plots.ownership(MMAC)
    assert [t for t, _, half in list(cells(figure))[64:] if half] == [*range(8, 16), *range(24, 40), *range(48, 56)]
    assert ("step 0 multiplies tokens 0-7, 16-23, 32-39, 48-55; step 1 multiplies tokens 8-15, 24-31, 40-47, 56-63. "
            "With a scale for 32 neighbouring tokens, 32 of 64 weights are") in figure.alt
    assert [t for _, _, t in texts(figure) if t.startswith("lanes")] == [
        "lanes 0-15", "lanes 16-31", "lanes 32-47", "lanes 48-63"] * 2
    right = lane_plots.ownership(MMAC, "fragment")
    assert not any(half for *_, half in cells(right)) and "every weight is multiplied with the scale" in right.alt


def test_rows_are_named_by_the_lanes_that_load_them():
    assert {t for _, _, t in texts(lane_plots.ownership(MMA)) if t.startswith("lanes")} == {
        "lanes 0, 4, ..., 28", "lanes 1, 5, ..., 29", "lanes 2, 6, ..., 30", "lanes 3, 7, ..., 31"}


def test_a_narrow_load_shows_what_it_misses():
    figure = lane_plots.narrow_load(MMAC)
    read = [*range(8), *range(16, 24), *range(32, 40), *range(48, 56)]
    assert [t for t, *_ in cells(figure)] == read
    assert {int(t) for _, _, t in texts(figure) if t.isdigit()} == set(range(64)), "the missing are named too"
    assert "tokens 8-15, 24-31, 40-47, 56-63 are never read, 32 of 64 (0 of the 32 of step 0, 32 of" in figure.alt
    whole = lane_plots.narrow_load(MMAC, 16)
    assert [t for t, *_ in cells(whole)] == list(range(64)) and "every token is read" in whole.alt


@pytest.mark.parametrize("tokens", ALL)
def test_a_load_path_is_what_the_lane_holds(tokens):
    operand = getattr(tokens.instruction, tokens.operand)
    lane = operand.lanes - 3
    held = {}
    for step in range(tokens.steps):
        for element in range(operand.elements):
            k = int(operand.place(lane, element)[tokens.operand == "A"])
            held[int(tokens.held(tokens.operand, step, lane, element))] = step, k
    numbers = [number for number, *_ in cells(lane_plots.load_path(tokens, lane))]
    token, step, k = np.reshape(numbers, (3, -1)).tolist()
    assert len(token) % tokens.load == 0
    assert dict(zip(token, zip(step, k, strict=True), strict=True)) == held and token == sorted(held)


def test_a_load_path_says_what_goes_where():
    assert lane_plots.load_path(MMAC, 17).alt == (
        "Lane 17 loads tokens 16-31 of column 1 of V, 16 bytes at a time: tokens 16-23 go to step 0 at k 8-15; "
        "tokens 24-31 go to step 1 at k 8-15.")
    assert "of columns 1, 9 of V" in lane_plots.load_path(BF16, 5).alt


@pytest.mark.parametrize("name", INSTRUCTIONS)
@pytest.mark.parametrize("operand", "ABD")
def test_an_operand_map_names_every_element_once_and_in_its_place(name, operand):
    o = getattr(INSTRUCTIONS[name], operand)
    figure = lane_plots.operand_map(INSTRUCTIONS[name], operand)
    labels = [t for t in texts(figure) if re.fullmatch(r"\d+:\d+(-\d+)?", t[2])]
    shown = [label for _, _, label in sorted(labels, key=lambda t: (round(t[1]), t[0]))]
    expected = {}
    for row, column in np.ndindex(o.shape):
        lane, element = map(int, o.owner(row, column))
        # a block begins where the element before it, along either side, is not in this lane
        first = all(r < 0 or c < 0 or int(o.owner(r, c)[0]) != lane for r, c in ((row - 1, column), (row, column - 1)))
        if first:
            start = expected[row, column] = [lane, element, element]
        else:
            start = next(b for b in reversed(expected.values()) if b[0] == lane and b[2] == element - 1)
            start[2] = element
    assert shown == [f"{lane}:{a}" if a == b else f"{lane}:{a}-{b}" for _, (lane, a, b) in sorted(expected.items())]


def test_an_operand_map_says_the_whole_map_in_words():
    assert lane_plots.operand_map(MMAC.instruction, "A").alt == (
        "A of mmac_i32_16x16x32_i8, 16 x 32, in 64 lanes of 8 elements, blocks of 1 x 8 in one lane, coloured by lane. "
        "Bits of lane and element, least significant first: row l0 l1 l2 l3, column e0 e1 e2 l4 l5.")


def test_an_operand_map_may_be_coloured_by_element():
    fills = [{fill for *_, fill in shapes(lane_plots.operand_map(MMAC.instruction, "D", by), 4)}
             for by in ("lane", "element")]
    assert [len(f) for f in fills] == [64, 4]


@pytest.mark.parametrize("numbers, words", [
    ([0], "0"), ([3, 4], "3-4"), (range(8), "0-7"), ([0, 1, 4, 5, 9], "0-1, 4-5, 9"), ([1, 9], "1, 9"),
    ([0, 4, 8], "0, 4, 8"), (range(0, 32, 4), "0, 4, ..., 28"), ([0, 2, 4, 7], "0, 2, 4, 7")])
def test_ranges(numbers, words):
    assert lane_plots.ranges(list(numbers)) == words


@pytest.mark.parametrize("draw, message", [
    (lambda: lane_plots.ownership(MMAC, "tokens"), "'fragment', 'logical', got 'tokens'"),
    (lambda: lane_plots.narrow_load(MMAC, 0), "1 to 16 bytes of a load of 16, got read=0"),
    (lambda: lane_plots.narrow_load(NARROW, 8), "1 to 4 bytes of a load of 4, got read=8"),
    (lambda: lane_plots.load_path(MMA, 32), "mma_m16n8k32_s8 has lanes 0 to 31, got lane=32"),
    (lambda: lane_plots.load_path(MMA, 1.5), "got lane=1.5"),
    (lambda: lane_plots.operand_map(MMA.instruction, "C"), "'A', 'B' or 'D', got 'C'"),
    (lambda: lane_plots.operand_map(MMA.instruction, "A", "k"), "'lane' or 'element', got 'k'"),
])
def test_what_cannot_be_drawn_is_refused(draw, message):
    with pytest.raises(ValueError, match=message):
        draw()


# ---- colours

def linear(colour):
    return np.array([c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in to_rgb(colour)])


# Machado, Oliveira and Fernandes 2009, full severity, on linear RGB
VISION = {
    "usual": np.eye(3),
    "protanopia": np.array([[0.152286, 1.052583, -0.204868], [0.114503, 0.786281, 0.099216],
                            [-0.003882, -0.048116, 1.051998]]),
    "deuteranopia": np.array([[0.367322, 0.860646, -0.227968], [0.280085, 0.672501, 0.047413],
                              [-0.011820, 0.042940, 0.968881]]),
    "tritanopia": np.array([[1.255528, -0.076749, -0.178779], [-0.078411, 0.930809, 0.147602],
                            [0.004733, 0.691367, 0.303900]]),
}


def lab(rgb):
    xyz = np.array([[0.4124, 0.3576, 0.1805], [0.2126, 0.7152, 0.0722], [0.0193, 0.1192, 0.9505]]) @ rgb.clip(0, 1)
    f = np.cbrt(xyz / (0.9505, 1, 1.089))
    return np.array([116 * f[1] - 16, 500 * (f[0] - f[1]), 200 * (f[1] - f[2])])


@pytest.mark.parametrize("vision", VISION)
def test_steps_are_told_apart_by_every_eye(vision):
    seen = [lab(VISION[vision] @ linear(colour)) for colour in lane_plots.STEP_COLOURS]
    apart = [np.linalg.norm(a - b) for i, a in enumerate(seen) for b in seen[:i]]
    assert min(apart) > 20, apart


def test_numbers_are_read_on_every_fill(figures):
    def contrast(a, b):
        high, low = sorted((linear(c) @ (0.2126, 0.7152, 0.0722) + 0.05 for c in (a, b)), reverse=True)
        return high / low

    fills = {fill for figure in figures.values() for *_, fill in shapes(figure, 4)}
    assert len(fills) > 60
    assert min(contrast(fill, lane_plots._ink_on(fill)) for fill in fills) > 4.4
    assert {lane_plots._ink_on(colour) for colour in lane_plots.STEP_COLOURS} == {lane_plots._DARK}
