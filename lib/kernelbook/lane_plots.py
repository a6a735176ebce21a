"""Figures of the lane maps in `kernelbook.fragments`: who holds, loads and multiplies what.

They are drawn narrow, so that the numbers in their cells can still be read on a phone. A cell's colour never stands
alone: its number, its place or its two halves say the same.
"""

import matplotlib
import numpy as np
from matplotlib.colors import to_rgb
from matplotlib.patches import Patch, Polygon, Rectangle

from kernelbook.fragments import LOADS, Instruction, Tokens
from kernelbook.plots import _INK, Figure, _figure

STEP_COLOURS = ("#56b4e9", "#e69f00", "#b3678f", "#f6eda0")
"""One for each step that a round of loads can feed: apart for every kind of colour vision, light enough for dark
figures on either kind of page."""
GROUPINGS = ("fragment", "logical")
_DARK, _LIGHT = "#08090b", "#fefefe"  # ink in a cell, whose fill is the same on every page
_ABSENT = {"fill": False, "ec": _INK, "lw": 0.7, "ls": (0, (2, 2))}
_CELL = 0.24  # height in inches


def ranges(numbers) -> str:
    """Ascending integers in words: "0-7, 16-23" for runs, "0, 4, ..., 28" where they lie evenly apart."""
    numbers = np.asarray(numbers)
    gaps = np.diff(numbers)
    if len(numbers) > 3 and gaps[0] > 1 and (gaps == gaps[0]).all():
        return f"{numbers[0]}, {numbers[1]}, ..., {numbers[-1]}"
    runs = np.split(numbers, np.flatnonzero(gaps != 1) + 1)
    return ", ".join(f"{run[0]}-{run[-1]}" if len(run) > 1 else f"{run[0]}" for run in runs)


def describe(tokens: Tokens) -> str:
    """The tokens that each step multiplies, in words."""
    return "; ".join(f"step {step} multiplies tokens {ranges(owned)}" for step, owned in enumerate(tokens.sets()))


def ownership(tokens: Tokens, grouping: str = "logical") -> Figure:
    """Which step multiplies each token of a tile, and with which scale its weight would be quantized.

    A row is one load of a lane, named by the lanes that load it for their columns. Above, colour is the step. Below,
    a cell's upper half is the scale that the weight's code is made with under `grouping`, its lower half the one that
    the step's sum is multiplied with; where they differ the product is wrong.
    grouping: "logical", scales of K neighbouring tokens (the article's bug, section 4), or "fragment", scales of the
    tokens that a step multiplies. Raises ValueError for another.
    """
    if grouping not in GROUPINGS:
        raise ValueError(f"grouping is one of {', '.join(map(repr, GROUPINGS))}, got {grouping!r}")
    token = np.arange(tokens.tile)
    step, _ = tokens.place(token)
    K = tokens.instruction.K
    scale = token // K if grouping == "logical" else step
    wrong = scale != step

    def draw(axes):
        for ax, name, group in zip(axes, ("step", "scale"), (step, scale), strict=True):
            _tile(ax, tokens, [STEP_COLOURS[i] for i in group])
            _legend(ax, [Patch(fc=STEP_COLOURS[i], label=f"{name} {i}") for i in range(tokens.steps)])
        for t in token[wrong]:
            y, x = divmod(t, tokens.load)
            axes[1].add_patch(Polygon([(x, y + 1), (x + 1, y), (x + 1, y + 1)], fc=STEP_COLOURS[step[t]], lw=0))
        axes[0].set_title("Multiplied by", loc="left")
        axes[1].set_title("Quantized with", loc="left")
        axes[0].set_xlabel("")
        if wrong.any():
            axes[1].set_xlabel("byte of the load\ntwo colours: quantized with one scale, multiplied with another")

    groups = f"{K} neighbouring tokens" if grouping == "logical" else "the tokens that a step multiplies"
    verdict = (f"{wrong.sum()} of {tokens.tile} weights are quantized with one scale and multiplied with another"
               if wrong.any() else "every weight is multiplied with the scale that it is quantized with")
    rows = tokens.tile // tokens.load
    return _figure(draw, f"{_loading(tokens)}: {describe(tokens)}. With a scale for {groups}, {verdict}.",
                   rows=2, width=5.0, height=2 * rows * _CELL + (1.5 if wrong.any() else 1.3), sharex=True)


def narrow_load(tokens: Tokens, read: int = 8) -> Figure:
    """Which tokens of a tile are never read where a lane reads `read` bytes in place of each load.

    Raises ValueError where `read` is not from 1 to the bytes of the load.
    """
    if read not in range(1, tokens.load + 1):
        raise ValueError(f"a lane reads 1 to {tokens.load} bytes of a load of {tokens.load}, got read={read!r}")
    missing = tokens.missing(read)
    step, _ = tokens.place(np.arange(tokens.tile))

    def draw(axes):
        _tile(axes[0], tokens, [None if t in missing else STEP_COLOURS[step[t]] for t in range(tokens.tile)])
        _legend(axes[0], [Patch(fc=STEP_COLOURS[s], label=f"step {s}") for s in range(tokens.steps)]
                + [Patch(label="never read", **_ABSENT)] * bool(len(missing)))
        axes[0].set_title(f"{read} of {tokens.load} bytes read", loc="left")

    lost = f"tokens {ranges(missing)} are never read" if len(missing) else "every token is read"
    hit = ", ".join(f"{int((step[missing] == s).sum())} of the {tokens.instruction.K} of step {s}"
                    for s in range(tokens.steps))
    return _figure(draw, f"{_loading(tokens)}, of which {read} are read: {lost}, {len(missing)} of {tokens.tile}"
                   + (f" ({hit})." if len(missing) else "."),
                   width=5.0, height=tokens.tile // tokens.load * _CELL + 0.8)


def load_path(tokens: Tokens, lane: int) -> Figure:
    """What one lane loads of a column of V, and to which step and which k each byte goes.

    Raises ValueError where the instruction has no such lane.
    """
    instruction, operand = tokens.instruction, getattr(tokens.instruction, tokens.operand)
    if lane not in range(instruction.lanes):
        raise ValueError(f"{instruction.name} has lanes 0 to {instruction.lanes - 1}, got lane={lane!r}")
    place = operand.place(np.full(operand.elements, lane), np.arange(operand.elements))
    k, columns = place if tokens.operand == "B" else place[::-1]
    k = k[columns == columns[0]]  # a lane that holds several columns of V loads the same tokens of each
    owned = np.sort(tokens.token(np.arange(tokens.steps)[:, None], k), axis=None)
    step, k = tokens.place(owned)

    def draw(axes):
        ax = axes[0]
        for i, t in enumerate(owned):
            x = i + 0.3 * (i // tokens.load)  # loads stand apart
            _cell(ax, x, 0, STEP_COLOURS[step[i]], t)
            ax.annotate("", (x + 0.5, 1.95), (x + 0.5, 1.05),
                        arrowprops={"arrowstyle": "->", "color": _INK, "lw": 0.6, "shrinkA": 0, "shrinkB": 0})
            _cell(ax, x, 2, STEP_COLOURS[step[i]], step[i])
            _cell(ax, x, 3, STEP_COLOURS[step[i]], k[i])
        _bare(ax, (0, max(LOADS)), (4, 0))
        ax.set_yticks([0.5, 2.5, 3.5], ["token", "step", "at k"])
        ax.set_xticks([])
        ax.set_title(f"Lane {lane}, V as {tokens.operand} of {instruction.name}", loc="left")

    held = np.unique(columns)
    went = "; ".join(f"tokens {ranges(owned[step == s])} go to step {s} at k {ranges(k[step == s])}"
                     for s in range(tokens.steps))
    return _figure(draw, f"Lane {lane} loads tokens {ranges(owned)} of column{'s'[:len(held) - 1]} {ranges(held)} of "
                   f"V, {tokens.load} bytes at a time: {went}.", width=5.0, height=4 * _CELL + 0.4)


def operand_map(instruction: Instruction, operand: str, by: str = "lane") -> Figure:
    """The matrix of one operand with the lane and, after a colon, the elements of that lane that hold each part.

    operand: "A", "B" or "D". by: what colours stand for, "lane" or "element". Neighbouring elements of one lane are
    drawn as one block. Raises ValueError for another operand or `by`.
    """
    if operand not in ("A", "B", "D"):
        raise ValueError(f"operand is 'A', 'B' or 'D', got {operand!r}")
    if by not in ("lane", "element"):
        raise ValueError(f"colours stand for 'lane' or 'element', got {by!r}")
    o = getattr(instruction, operand)
    lane, element = o.owner(*np.indices(o.shape))
    high, wide = int((lane[:, 0] == lane[0, 0]).cumprod().sum()), int((lane[0] == lane[0, 0]).cumprod().sum())
    value, top = (lane, o.lanes) if by == "lane" else (element, o.elements)
    shades = matplotlib.colormaps["cividis"](np.linspace(0.1, 1, top))

    def draw(axes):
        ax = axes[0]
        for y, x in np.ndindex(o.shape):
            ax.add_patch(Rectangle((x, y), 1, 1, fc=shades[value[y, x]], ec="#88888866", lw=0.3))
        for y in range(0, o.shape[0], high):
            for x in range(0, o.shape[1], wide):
                middle = shades[value[y:y + high, x:x + wide].flat[high * wide // 2]]
                held = ranges(np.sort(element[y:y + high, x:x + wide], axis=None))
                ax.text(x + wide / 2, y + high / 2, f"{lane[y, x]}:{held}" if high == 1 else f"{lane[y, x]}:\n{held}",
                        ha="center", va="center", fontsize=7, color=_ink_on(middle))
                ax.add_patch(Rectangle((x, y), wide, high, fill=False, ec=_INK, lw=0.4))
        _bare(ax, (0, o.shape[1]), (o.shape[0], 0))
        names = {"A": ("row m", "k"), "B": ("k", "column n"), "D": ("row m", "column n")}[operand]
        for axis, name, size in ((ax.yaxis, names[0], o.shape[0]), (ax.xaxis, names[1], o.shape[1])):
            shown = np.arange(0, size, 1 if size <= 16 else 4)
            axis.set_ticks(shown + 0.5, shown)
            axis.set_label_text(name)
        ax.set_title(f"{operand} of {instruction.name}, lane:element", loc="left")

    blocks = f", blocks of {high} x {wide} in one lane" if high * wide > 1 else ""
    return _figure(draw, f"{operand} of {instruction.name}, {o.shape[0]} x {o.shape[1]}, in {o.lanes} lanes of "
                   f"{o.elements} elements{blocks}, coloured by {by}. Bits of lane and element, least significant "
                   f"first: row {o.row}, column {o.column}.",
                   width=5.0, height=max(o.shape[0], 8) * (0.2 if high == 1 else 0.15) + 0.7)


def _loading(tokens: Tokens) -> str:
    return f"V as {tokens.operand} of {tokens.instruction.name}, loaded {tokens.load} bytes at a time"


def _loaders(tokens: Tokens) -> list[np.ndarray]:
    """The lanes that load tokens r * load .. (r + 1) * load - 1 of the tile, for each r."""
    operand = getattr(tokens.instruction, tokens.operand)
    step, lane, element = np.ogrid[:tokens.steps, :operand.lanes, :operand.elements]
    load = tokens.held(tokens.operand, step, lane, element) // tokens.load
    return [np.flatnonzero((load == r).any(axis=(0, 2))) for r in range(tokens.tile // tokens.load)]


def _tile(ax, tokens: Tokens, colours) -> None:
    """The tokens of a tile, a row for each load, in the colour of each; None for a token that is not there."""
    for t, colour in enumerate(colours):
        y, x = divmod(t, tokens.load)
        if colour:
            _cell(ax, x, y, colour, t)
        else:
            ax.add_patch(Rectangle((x + 0.06, y + 0.06), 0.88, 0.88, **_ABSENT))
            ax.text(x + 0.5, y + 0.5, t, ha="center", va="center", fontsize=8, alpha=0.7)
    rows = tokens.tile // tokens.load
    _bare(ax, (0, tokens.load), (rows, 0))
    ax.set_yticks(np.arange(rows) + 0.5, [f"lanes {ranges(lanes)}" for lanes in _loaders(tokens)], fontsize=8)
    ax.set_xticks(np.arange(tokens.load) + 0.5, range(tokens.load), fontsize=8)
    ax.set_xlabel("byte of the load")


def _cell(ax, x, y, colour, text) -> None:
    ax.add_patch(Rectangle((x, y), 1, 1, fc=colour, ec=_DARK, lw=0.4))
    ax.text(x + 0.5, y + 0.5, text, ha="center", va="center", fontsize=8, color=_DARK)


def _ink_on(colour) -> str:
    """The ink with the greater contrast on a fill: both have 4.4 where its luminance is 0.184."""
    linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in to_rgb(colour)]
    return _DARK if np.dot(linear, (0.2126, 0.7152, 0.0722)) > 0.184 else _LIGHT


def _bare(ax, xlim, ylim) -> None:
    ax.set(xlim=xlim, ylim=ylim)
    ax.grid(False)
    ax.spines[:].set_visible(False)
    ax.tick_params(length=0)


def _legend(ax, handles) -> None:
    ax.legend(handles=handles, loc="lower right", bbox_to_anchor=(1, 1), borderaxespad=0.3, ncols=len(handles),
              fontsize=8, handlelength=0.9, handleheight=0.9, handletextpad=0.4, columnspacing=1)
