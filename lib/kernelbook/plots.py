"""Figures of the notebooks.

Each function returns a Figure: an inline SVG with a description for those who cannot see it, whose text takes the
page's own colour, so that it reads on a light and on a dark page.
"""

import io
import re
from collections.abc import Iterable
from dataclasses import dataclass
from html import escape

import matplotlib
import numpy as np
from IPython.display import Markdown
from matplotlib.figure import Figure as Canvas

from kernelbook.backends import Source

_INK = "#010203"  # stands for the page's text colour until the SVG is written
_COLOURS = ("#2a78b8", "#d9822b", "#3a9a5b", "#b5499a", "#8a6d3b", "#7a7f87")
_STYLE = {
    "svg.fonttype": "none", "svg.hashsalt": "kernelbook", "font.family": "sans-serif", "font.size": 9,
    "font.sans-serif": ["DejaVu Sans", "Verdana"],  # every text of an SVG names them all
    "axes.titlesize": 9.5, "axes.titleweight": "bold", "legend.frameon": False,
    "text.color": _INK, "axes.labelcolor": _INK, "axes.edgecolor": _INK, "xtick.color": _INK, "ytick.color": _INK,
    "axes.spines.top": False, "axes.spines.right": False,
    "axes.grid": True, "grid.alpha": 0.25, "grid.color": "#888888", "axes.axisbelow": True,
    "figure.facecolor": "none", "axes.facecolor": "none", "savefig.facecolor": "none",
    "axes.prop_cycle": matplotlib.cycler(color=_COLOURS), "lines.linewidth": 1.6, "lines.markersize": 4,
}


@dataclass(frozen=True)
class Figure:
    """A finished figure. alt: what it shows, in a sentence with its figures."""

    svg: str
    alt: str

    def __repr__(self):
        return f"[figure: {self.alt}]"

    def _repr_html_(self):
        return (f'<figure style="margin: .8em 0"><div role="img" aria-label="{escape(self.alt, quote=True)}">{self.svg}'
                f'</div><figcaption style="font-size: .85em; opacity: .8">{escape(self.alt)}</figcaption></figure>')


def _compact(svg: str) -> str:
    """Without indentation, and with places to hundredths of a point."""
    svg = re.sub(r"\n +", "\n", svg)
    return re.sub(r' (?:d|x|y)="[^"]*"', lambda places: re.sub(r"(\.\d\d)\d+", r"\1", places[0]), svg)


def _figure(draw, alt: str, columns: int = 1, rows: int = 1, width: float = 7.6, height: float = 3.0,
            **options) -> Figure:
    """Run `draw(axes)` on a grid of axes in the common style."""
    with matplotlib.rc_context(_STYLE):
        canvas = Canvas(figsize=(width, height), layout="constrained")
        draw(canvas.subplots(rows, columns, squeeze=False, **options).ravel())
        buffer = io.StringIO()
        canvas.savefig(buffer, format="svg", metadata={"Date": None})
    svg = buffer.getvalue()
    svg = _compact(svg[svg.index("<svg"):]).replace(_INK, "currentColor")
    svg = re.sub(r'(<svg[^>]*?) width="[^"]*" height="[^"]*"',
                 rf'\1 style="width: {width * 96:.0f}px; max-width: 100%; height: auto"', svg, count=1)
    return Figure(svg, alt)


def standalone(figure: Figure) -> str:
    """A figure as an SVG file that chooses its text colour by the reader's colour scheme, for use outside a page."""
    style = "<style>svg { color: #1f2328 } @media (prefers-color-scheme: dark) { svg { color: #e6edf3 } }</style>"
    return re.sub(r"(<svg[^>]*>)", rf"\1{style}", figure.svg, count=1) + "\n"


def _grid(count: int, across: int = 4) -> dict:
    columns = min(across, count)
    rows = -(-count // columns)
    return {"columns": columns, "rows": rows, "height": 2.3 * rows + 0.4}


def _hide_rest(axes, used: int):
    for ax in axes[used:]:
        ax.set_visible(False)


def ceilings(found: Iterable) -> Figure:
    """Bandwidths, matrix rates and fixed costs of a machine (measure.Ceiling), a panel a unit."""
    found = list(found)
    units = [u for u in ("GB/s", "TFLOP/s", "us") if any(c.unit == u for c in found)]

    def draw(axes):
        for ax, unit in zip(axes, units, strict=True):
            part = [c for c in found if c.unit == unit]
            ax.barh([c.name.replace("_", " ") for c in part], [c.value for c in part], color=_COLOURS[0], height=0.6,
                    xerr=[[c.value - c.p10 for c in part], [c.p90 - c.value for c in part]], ecolor="#7a7f87")
            for i, c in enumerate(part):
                ax.annotate(f" {c.value:,.3g}" if c.value < 1000 else f" {c.value:,.0f}", (c.p90, i), va="center")
            ax.set_title(unit)
            ax.margins(x=0.25)
            ax.invert_yaxis()
            ax.grid(axis="y", visible=False)

    words = "; ".join(f"{c.name.replace('_', ' ')} {c.value:,.3g} {c.unit}" for c in found)
    return _figure(draw, f"Measured ceilings: {words}.", columns=len(units),
                   height=0.9 + 0.3 * max(sum(c.unit == u for c in found) for u in units), width=2.8 * len(units))


def mapping(threads_n: int, threads_m: int, columns: int, remap: bool) -> Figure:
    """Which threads of a block own which outputs, as a map of threadIdx.y over rows and columns."""
    rows = 1 if remap else threads_m
    width = threads_n * columns * (threads_m if remap else 1)
    owner = np.zeros((rows, width))
    for y in range(threads_m):
        for x in range(threads_n):
            first = (y * threads_n + x) * columns if remap else x * columns
            owner[0 if remap else y, first:first + columns] = y * threads_n + x

    def draw(axes):
        ax = axes[0]
        ax.imshow(owner // 32, aspect="auto", cmap="tab10", vmin=0, vmax=10, interpolation="nearest",
                  extent=(0, width, rows, 0), alpha=0.75)
        for warp in range(threads_n * threads_m // 32):
            y, x = np.argwhere(owner // 32 == warp)[0]
            ax.text(x + 16 * columns, y + 0.5, f"warp {warp}", ha="center", va="center")
        ax.set(xlabel="output column n within the block", ylabel="row m", yticks=range(rows + 1),
               xticks=range(0, width + 1, 32 * columns))
        ax.grid(False)

    text = (f"A block of {threads_n} x {threads_m} threads, {columns} columns a thread"
            + (": with one row, all eight warps lie along the columns." if remap else
               ": two warps side by side along the columns, four rows deep."))
    return _figure(draw, text, height=1.2 if remap else 2.0)


def selftest(worst: dict[tuple, float], bound: float) -> Figure:
    """Worst error of each kernel and precision against M. worst: by (activations, codes, M)."""
    def draw(axes):
        for ax, activations in zip(axes, ("float", "int8"), strict=True):
            for codes in sorted({c for _, c, _ in worst}, reverse=True):
                points = sorted((m, e) for (a, c, m), e in worst.items() if a == activations and c == codes)
                ax.loglog(*zip(*points, strict=True), "o-", label=f"{codes} codes")
            ax.axhline(bound, ls="--", color="#c03434", lw=1)
            ax.annotate(f"bound {bound:g}", (1, bound), va="bottom", color="#c03434")
            ax.set(title=f"{activations} activations", xlabel="M",
                   ylim=(min(worst.values()) / 1.5, bound * 4))
        axes[0].set_ylabel("worst relative Frobenius error")
        axes[0].legend()

    return _figure(draw, f"Worst relative Frobenius error against float64 over all N, K and groups: "
                   f"{max(worst.values()):.1e}; the bound is {bound:g}.", columns=2, sharey=True)


def ulps(data: dict[int, np.ndarray]) -> Figure:
    """How far outputs at other nsplit lie from those at nsplit 1. data: nsplit to distances in ulp."""
    def draw(axes):
        edges = [0, 1, 2, 3, 5, 9, 17, np.inf]
        names = ["0", "1", "2", "3-4", "5-8", "9-16", "> 16"]
        shares = {s: np.histogram(d, edges)[0] / d.size for s, d in data.items() if s != 1}
        left = np.zeros(len(shares))
        shades = matplotlib.colormaps["viridis"](np.linspace(0.15, 0.95, len(names)))
        for i, name in enumerate(names):
            part = np.array([share[i] for share in shares.values()])
            axes[0].barh([str(s) for s in shares], part, left=left, label=name, color=shades[i], height=0.7)
            left += part
        axes[0].legend(title="ulp", ncols=len(names), loc="lower center", bbox_to_anchor=(0.5, 1))
        axes[0].set(xlabel="share of outputs", ylabel="nsplit", xlim=(0, 1))
        axes[0].grid(False)

    changed = max(float((d > 0).mean()) for d in data.values())
    return _figure(draw, f"Distance in ulp from the output at nsplit 1: another split changes up to {changed:.0%} of "
                   "the outputs.", height=2.8)


def occupancy(table: list[dict], target: int) -> Figure:
    """Blocks of each projection's grid at M = 1, without and with the split rule."""
    def draw(axes):
        names = [f"{r['projection']}\n{r['N']}\nx {r['K']}" for r in table]
        place = np.arange(len(names))
        axes[0].bar(place - 0.2, [r["blocks"] for r in table], 0.4, label="x-y grid alone")
        axes[0].bar(place + 0.2, [r["blocks with split"] for r in table], 0.4, label="with the split rule")
        for i, r in enumerate(table):
            axes[0].annotate(f"x{r['nsplit']}", (i + 0.2, r["blocks with split"]), ha="center", va="bottom")
        axes[0].axhline(target, ls="--", lw=1, color="#7a7f87")
        axes[0].set(yscale="log", ylabel="blocks", xticks=place, xticklabels=names)
        axes[0].legend(loc="lower right", bbox_to_anchor=(1, 1), ncols=2)

    return _figure(draw, f"Grid size at M = 1 (computed, not timed): the x-y grid alone has as few as "
                   f"{min(r['blocks'] for r in table)} blocks, the split rule aims for {target}.", height=3.2)


def split_sweep(times: dict[str, dict]) -> Figure:
    """Time against nsplit, a panel a projection, the rule's choice marked."""
    def draw(axes):
        for ax, (name, entry) in zip(axes, times.items(), strict=False):
            splits, timings = zip(*sorted(entry["times"].items()), strict=True)
            ax.errorbar(splits, [t.median for t in timings], yerr=[[t.median - t.p10 for t in timings],
                                                                   [t.p90 - t.median for t in timings]], fmt="o-")
            ax.plot(entry["rule"], entry["times"][entry["rule"]].median, "D", ms=8, mfc="none", color="#c03434")
            ax.set(xscale="log", yscale="log", title=name, xticks=splits)
            ax.set_xticks([], minor=True)
            ax.set_xticklabels([str(s) for s in splits], rotation=60)
            ax.yaxis.set_major_formatter(matplotlib.ticker.FormatStrFormatter("%g"))
            ax.yaxis.set_minor_formatter(matplotlib.ticker.NullFormatter())
        _hide_rest(axes, len(times))
        axes[0].set_ylabel("us a call, cold")

    return _figure(draw, "Time of a decode product (M = 1) against nsplit; the diamond is the split rule's choice.",
                   **_grid(len(times)))


def _by_variant(table):
    return {v: [r for r in table if r["variant"] == v] for v in dict.fromkeys(r["variant"] for r in table)}


def row_sweep(table: list[dict]) -> Figure:
    """Cold time against M, a panel a projection, ours and every peer."""
    cold = [r for r in table if r["cache"] == "cold"]
    shapes = list(dict.fromkeys((r["projection"], r["N"], r["K"]) for r in cold))

    def draw(axes):
        for ax, shape in zip(axes, shapes, strict=False):
            for i, (variant, rows) in enumerate(_by_variant(cold).items()):
                points = sorted((r["M"], r["timing"].median) for r in rows
                                if (r["projection"], r["N"], r["K"]) == shape)
                if points:
                    ax.loglog(*zip(*points, strict=True), "o-" if variant[0].isdigit() else "s--",
                              label=variant.replace("_", " "), color=_COLOURS[i % len(_COLOURS)])
            ax.set(title=f"{shape[0]} {shape[1]} x {shape[2]}", xlabel="M")
        _hide_rest(axes, len(shapes))
        axes[0].set_ylabel("us a call, cold")
        axes[0].legend(fontsize=7)

    return _figure(draw, f"Time against M on {len(shapes)} projections, {cold[0]['codes']} codes: kernels of this "
                   "collection with solid lines, peers dashed.", sharey=True,
                   **_grid(len(shapes), across=3 if len(shapes) <= 6 else 4))


def roofline(table: list[dict], ceilings_: dict) -> Figure:
    """Rate against arithmetic intensity under the measured ceilings of memory and matrix unit."""
    cold = [r for r in table if r["cache"] == "cold"]
    read = ceilings_["read"].value
    peak = ceilings_["bf16_matmul"].value if "bf16_matmul" in ceilings_ else None

    def draw(axes):
        ax = axes[0]
        x = np.geomspace(min(r["flop"] / r["nbytes"] for r in cold) / 2, max(r["flop"] / r["nbytes"] for r in cold) * 2)
        roof = x * read / 1e3
        ax.loglog(x, np.minimum(roof, peak) if peak else roof, color=_INK, lw=1)
        ax.annotate(f"read {read:,.0f} GB/s", (x[0], roof[0]), rotation=0, va="bottom")
        if peak:
            ax.annotate(f"bf16 matmul {peak:,.0f} TFLOP/s", (x[-1], peak), ha="right", va="bottom")
        for i, (variant, rows) in enumerate(_by_variant(cold).items()):
            ax.loglog([r["flop"] / r["nbytes"] for r in rows], [r["flop"] / r["timing"].median / 1e6 for r in rows],
                      "o" if variant[0].isdigit() else "s", mfc="none" if not variant[0].isdigit() else None, alpha=0.8,
                      label=variant.replace("_", " "), color=_COLOURS[i % len(_COLOURS)])
        ax.set(xlabel="FLOP a byte (each input and output once)", ylabel="TFLOP/s")
        ax.legend(fontsize=7.5)

    return _figure(draw, "Roofline with this machine's measured ceilings; each point is one shape and M.", height=3.8)


def call_anatomy(table: dict[str, dict]) -> Figure:
    """Where a call from the host spends its time. table: projection to {"kernel", "pinned", "pageable"} timings."""
    def draw(axes):
        names = list(table)
        kernel = np.array([r["kernel"].median for r in table.values()])
        for offset, path, colour in ((-0.2, "pinned", _COLOURS[1]), (0.2, "pageable", _COLOURS[3])):
            whole = np.array([r[path].median for r in table.values()])
            place = np.arange(len(names)) + offset
            axes[0].bar(place, kernel, 0.36, color=_COLOURS[0], label="kernel" if path == "pinned" else None)
            axes[0].bar(place, whole - kernel, 0.36, bottom=kernel, color=colour,
                        label=f"copies, launch, synchronize: {path}")
        axes[0].set(xticks=range(len(names)), xticklabels=[n.replace(" ", "\n", 1) for n in names],
                    ylabel="us a call")
        axes[0].legend()

    shares = ", ".join(f"{name} {r['fixed share']:.0%}" for name, r in table.items())
    return _figure(draw, f"A decode product called from host memory: the kernel and all that is not the kernel. "
                   f"Share that is not, pinned: {shares}.", height=3.2)


def flop_gate(rows: list[dict], gate: float) -> Figure:
    """Time of the CPU path and, where measured, of a device call against the size of the product."""
    def draw(axes):
        for offset, how, name in ((0.97, "cpu", "CPU path"), (1.03, "device", "device call")):
            timings = [r[how] for r in rows if how in r]
            if timings:  # two products of one size are told apart by a little shift, not joined by a line
                axes[0].errorbar([r["flop"] * offset for r in rows], [t.median for t in timings],
                                 yerr=[[t.median - t.p10 for t in timings], [t.p90 - t.median for t in timings]],
                                 fmt="o", capsize=2, label=name)
        for flop in dict.fromkeys(r["flop"] for r in rows):
            names = ", ".join(r["projection"] for r in rows if r["flop"] == flop)
            top = max(r[how].p90 for r in rows if r["flop"] == flop for how in ("cpu", "device") if how in r)
            axes[0].annotate(names, (flop, top), xytext=(0, 6), textcoords="offset points", ha="center")
        axes[0].axvline(gate, ls="--", lw=1, color="#7a7f87", label=f"article's gate {gate:g}")
        axes[0].set(xscale="log", yscale="log", xlabel="FLOP at M = 1", ylabel="us a call, host memory to host memory")
        axes[0].margins(x=0.12, y=0.2)
        axes[0].legend()

    return _figure(draw, f"Time of {len(rows)} decode products against their FLOP, with the article's gate of "
                   f"{gate:g}.", height=3.2)


def error_distribution(rows: list[dict]) -> Figure:
    """Elementwise errors over the output's RMS, both kernels, a panel a precision of the codes."""
    precisions = list(dict.fromkeys(r["codes"] for r in rows))

    def draw(axes):
        edges = np.linspace(-10, 0.5, 64)
        for ax, codes in zip(axes, precisions, strict=True):
            for activations in ("float", "int8"):
                d = np.concatenate([np.abs(r["differences"]) for r in rows
                                    if r["codes"] == codes and r["activations"] == activations])
                share, _ = np.histogram(np.log10(np.maximum(d, 1e-10)), edges)
                ax.stairs(share / d.size, 10**edges, fill=True, alpha=0.6, label=f"{activations} activations")
            ax.set(title=f"{codes} codes", xscale="log", xlabel="|error| over the output's RMS")
        axes[0].set_ylabel("share of outputs")
        axes[0].legend(loc="upper center")

    medians = {a: np.median([r["total"] for r in rows if r["activations"] == a]) for a in ("float", "int8")}
    return _figure(draw, "Errors against float64 on unrounded activations: median relative Frobenius over the products "
                   f"{medians['float']:.1e} with float activations, {medians['int8']:.1e} with int8.",
                   columns=len(precisions), sharey=True)


def perplexity(table: dict[str, dict]) -> Figure:
    """Change of perplexity against float32 weights, with twice the standard error."""
    shown = {name: t for name, t in table.items() if t["standard error"] > 0}

    def draw(axes):
        axes[0].barh(list(shown), [100 * t["delta"] for t in shown.values()], height=0.5,
                     xerr=[200 * t["standard error"] for t in shown.values()], ecolor="#7a7f87", capsize=3)
        axes[0].axvline(0, color=_INK, lw=0.8)
        axes[0].set_xlabel("change of perplexity, % (bars: twice the standard error)")
        axes[0].invert_yaxis()

    words = "; ".join(f"{name} {100 * t['delta']:+.2f}%" for name, t in shown.items())
    return _figure(draw, f"Perplexity against float32 weights: {words}.", height=1.6)


@dataclass(frozen=True)
class Table:
    """Rows as an HTML table; text where there is no HTML."""

    rows: list[dict]
    columns: list[str]

    def __repr__(self):
        lines = [self.columns] + [[_cell(row.get(c)) for c in self.columns] for row in self.rows]
        return "\n".join("  ".join(line) for line in lines)

    def _repr_html_(self):
        head = "".join(f"<th>{escape(c.replace('_', ' '))}</th>" for c in self.columns)
        body = "".join("<tr>" + "".join(
            f'<td style="text-align: {"right" if _is_number(row.get(c)) else "left"}">{escape(_cell(row.get(c)))}</td>'
            for c in self.columns) + "</tr>" for row in self.rows)
        return (f'<div style="overflow-x: auto"><table class="dataframe"><thead><tr>{head}</tr></thead>'
                f"<tbody>{body}</tbody></table></div>")


def table(rows: Iterable[dict], columns: list[str] | None = None) -> Table:
    """A table of `rows`, all of their keys or only `columns`, in that order."""
    rows = list(rows)
    return Table(rows, columns or list(dict.fromkeys(key for row in rows for key in row)))


def _is_number(value) -> bool:
    return isinstance(value, int | float | np.number) and not isinstance(value, bool)


def _cell(value) -> str:
    if value is None:
        return ""
    if isinstance(value, bool | np.bool_):
        return "yes" if value else "no"
    if isinstance(value, int | np.integer):
        return f"{value:,}"
    if isinstance(value, float | np.floating):
        return f"{value:.3g}" if abs(value) < 1e3 else f"{value:,.0f}"
    if isinstance(value, dict):
        return ", ".join(f"{n} x {key}" for key, n in value.items())
    return str(value)


def source(path: str) -> Markdown:
    """A kernel file as highlighted code. path: below kernels/."""
    return Markdown(f"```cpp\n{Source(path).text.rstrip()}\n```")
