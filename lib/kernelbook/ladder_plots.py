"""Figures of the ladder of kernels in the grouped_gemm notebook: bandwidth and operations a second against M, and the
worst errors of its selftest."""

from collections.abc import Callable, Iterable, Mapping, Sequence

from IPython.display import Markdown
from matplotlib.ticker import NullLocator

from kernelbook.experiments.gemm_ladder import Point, Rung
from kernelbook.plots import _INK, Figure, Table, _figure, _grid, _hide_rest, table

_OURS = ("#2a78b8", "#d9822b", "#3a9a5b", "#b5499a", "#c03434", "#8a6d3b", "#17a2a2", "#6b5fc7", "#9aa31f", "#e377a2")
_PEERS = ("#7a7f87", "#9aa0a8", "#5f646b", "#b4b9bf")


def rungs(found: Iterable[Rung]) -> Table:
    """The ladder from the bottom up: a row a kernel file."""
    return table({"file": rung.path, "the one idea": rung.idea, "designs": ", ".join(rung.designs)} for rung in found)


def rung(found: Rung) -> Markdown:
    """What a file's header says of its idea, its prediction, the outcome and what that taught, to head its source."""
    told = {"Prediction": found.prediction, "Outcome": found.outcome, "Taught": found.lesson}
    lines = [f"**{found.path}**: {found.idea}", *(f"*{word}*: {text}" for word, text in told.items() if text)]
    return Markdown("\n\n".join(lines))


def _styles(names: Iterable[tuple[str, bool]]) -> dict[str, dict]:
    """Variant to its line: ours coloured and solid, peers grey and dashed, told apart by their marks."""
    marks, styles, ours, peers = "s^Dv", {}, 0, 0
    for name, mine in dict.fromkeys(names):
        if mine:
            styles[name] = {"color": _OURS[ours % len(_OURS)], "ls": "-", "marker": "o"}
            ours += 1
        else:
            styles[name] = {"color": _PEERS[peers % len(_PEERS)], "ls": "--", "marker": marks[peers % len(marks)]}
            peers += 1
    return styles


def _against_rows(found: Sequence[Point], value: Callable[[Point], float], ceiling: float | None, unit: str,
                  alt: str) -> Figure:
    """A panel a shape, a line a variant, the faster of its times at an M; ceiling: of `value`, as a line."""
    shapes = list(dict.fromkeys(p.shape for p in found))
    styles = _styles((p.variant, p.ours) for p in found)
    top = 1.08 * max([ceiling or 0] + [value(p) for p in found])
    rows = sorted({p.m for p in found})
    ticks = rows if len(rows) < 8 else rows[::-2]

    def draw(axes):
        for ax, shape in zip(axes, shapes, strict=False):
            for name, style in styles.items():
                line = sorted({p.m: value(p) for p in sorted(found, key=value)
                               if (p.shape, p.variant) == (shape, name)}.items())
                if line:
                    ax.plot(*zip(*line, strict=True), **style, label=name.replace("_", " "))
            if ceiling:
                ax.axhline(ceiling, color=_INK, lw=0.8, ls=":")
            ax.set(title=shape, xscale="log", ylim=(0, top))
            ax.set_xticks(ticks, [f"{m:g}" for m in ticks], rotation=45)
            ax.xaxis.set_minor_locator(NullLocator())
        _hide_rest(axes, len(shapes))
        axes[0].set_ylabel(f"{unit}, cold")
        _legend(axes, 4)

    grid = _grid(len(shapes), across=5 if len(shapes) > 8 else 4)
    return _figure(draw, alt, sharey=True, width=9.6 if len(shapes) > 3 else 7.6,
                   **grid | {"height": grid["height"] + 0.5})


def _legend(axes, columns: int) -> None:
    """One below all axes, with what any of them has."""
    handles = {label: line for ax in axes for line, label in zip(*ax.get_legend_handles_labels(), strict=True)}
    axes[0].figure.legend(handles.values(), handles, loc="outside lower center", ncols=columns, fontsize=8)


def _ends(found: Sequence[Point], value: Callable[[Point], float], unit: str) -> str:
    """The fastest of ours and of the peers at the first and at the last M, on the first shape, in words."""
    shape = found[0].shape
    words = []
    for m in dict.fromkeys([min(p.m for p in found), max(p.m for p in found if p.shape == shape)]):
        there = [p for p in found if (p.shape, p.m) == (shape, m)]
        best = [max(part, key=value) for part in ([p for p in there if p.ours], [p for p in there if not p.ours])
                if part]
        words.append(f"at M = {m} " + " and ".join(f"{p.label} {value(p):.3g} {unit}"
                                                   for p in best))
    return f"On {shape} " + ", ".join(words) + "."


def bandwidth(found: Iterable[Point], codes: str, read_gbs: float | None = None) -> Figure:
    """TB/s of each input and output once against M. read_gbs: the measured ceiling."""
    shown = [p for p in found if p.codes == codes and p.gbs]
    ceiling = read_gbs / 1e3 if read_gbs else None
    under = f"; the dotted line is the measured read ceiling, {ceiling:.2f} TB/s" if ceiling else ""
    return _against_rows(shown, lambda p: p.gbs / 1e3, ceiling, "TB/s",
                         f"Bandwidth against M, {codes} codes, kernels of this collection with solid lines, peers "
                         f"dashed{under}. {_ends(shown, lambda p: p.gbs / 1e3, 'TB/s')}")


def throughput(found: Iterable[Point], codes: str, matmul_tflops: float | None = None) -> Figure:
    """TFLOP/s against M. matmul_tflops: the measured ceiling of bf16 products."""
    shown = [p for p in found if p.codes == codes]
    under = (f"; the dotted line is the measured ceiling of bf16 products, {matmul_tflops:,.0f} TFLOP/s"
             if matmul_tflops else "")
    return _against_rows(shown, lambda p: p.tflops, matmul_tflops, "TFLOP/s",
                         f"Operations a second against M, {codes} codes, kernels of this collection with solid lines, "
                         f"peers dashed{under}. {_ends(shown, lambda p: p.tflops, 'TFLOP/s')}")


def selftest(worst: Mapping[tuple[str, str, int], float], bounds: Mapping[str, float]) -> Figure:
    """Worst error of each design over N, K and groups, as a share of its own bound, against M. worst: by (variant,
    codes, M). bounds: by variant."""
    precisions = list(dict.fromkeys(codes for _, codes, _ in worst))
    names = list(dict.fromkeys(name for name, _, _ in worst))
    rows = sorted({m for _, _, m in worst})

    def draw(axes):
        for ax, codes in zip(axes, precisions, strict=True):
            for i, name in enumerate(names):
                line = sorted((m, error / bounds[name]) for (of, c, m), error in worst.items()
                              if (of, c) == (name, codes))
                if line:
                    ax.loglog(*zip(*line, strict=True), "o-", color=_OURS[i % len(_OURS)],
                              label=f"{name.replace('_', ' ')}, bound {bounds[name]:g}")
            ax.axhline(1, ls="--", color="#c03434", lw=1)
            ax.set(title=f"{codes} codes", xlabel="M")
            ax.set_xticks(rows, [f"{m:g}" for m in rows], rotation=45)
            ax.xaxis.set_minor_locator(NullLocator())
        axes[0].set_ylabel("worst error over the bound")
        _legend(axes, 3)

    nearest = max(worst, key=lambda key: worst[key] / bounds[key[0]])
    return _figure(draw, "Worst relative Frobenius error of each design against float64, over the bound that it keeps: "
                   f"nearest to it is {nearest[0].replace('_', ' ')} on {nearest[1]} codes at M = {nearest[2]}, "
                   f"{worst[nearest]:.1e} of {bounds[nearest[0]]:g}.", columns=len(precisions), sharey=True, height=3.6)
