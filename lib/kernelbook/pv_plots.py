"""Figures of the int8_pv notebook: who shares a scale, how large errors are, how long kernels take."""

from collections.abc import Sequence

import matplotlib
import numpy as np
from IPython.display import Markdown
from matplotlib.colors import ListedColormap
from matplotlib.patches import Patch

from kernelbook.backends import Source
from kernelbook.lane_plots import STEP_COLOURS
from kernelbook.plots import _COLOURS, _INK, Figure, _figure, _grid, _hide_rest

_ARTICLE = {"marker": "x", "ls": "none", "ms": 7, "mew": 1.6, "color": "#c03434", "label": "article", "zorder": 3}


def excerpt(path: str, first: str, behind: str) -> Markdown:
    """A part of a kernel file as highlighted code: from the line that begins with `first`, but for blanks, up to the
    one that begins with `behind`. path: below kernels/. Raises ValueError where there is no such part."""
    lines = Source(path).text.splitlines()
    starts = [next((i for i, line in enumerate(lines) if line.lstrip().startswith(text)), None)
              for text in (first, behind)]
    if None in starts or starts[0] >= starts[1]:
        raise ValueError(f"{path} has no part from a line {first!r} to a line {behind!r}")
    part = lines[slice(*starts)]
    indent = part[0][:len(part[0]) - len(part[0].lstrip())]  # directives of the preprocessor have none
    code = "\n".join(line.removeprefix(indent) for line in part)
    return Markdown(f"```cpp\n{code.rstrip()}\n```")


def shared_scales(right: np.ndarray, wrong: np.ndarray, step: np.ndarray) -> Figure:
    """Which tokens of a tile kernels were found to quantize with one scale, against those that a step multiplies.

    right, wrong: bool [64, 64], of a kernel with its steps' groups and of one with logical groups. step: int [64].
    """
    together = step[:, None] == step
    panels = [("scales of the step's tokens", right), ("scales of tokens 0-31, 32-63", wrong)]
    names = ("apart", "one scale and one step", "one scale, two steps", "two scales, one step")
    colours = ("#88888822", STEP_COLOURS[0], STEP_COLOURS[1], "#c03434")

    def draw(axes):
        for ax, (title, shared) in zip(axes, panels, strict=True):
            kind = np.where(shared & together, 1, np.where(shared, 2, np.where(together, 3, 0)))
            ax.imshow(kind, cmap=ListedColormap(colours), vmin=0, vmax=3, interpolation="nearest",
                      extent=(0, len(step), len(step), 0))
            ax.set(title=title, xlabel="token", xticks=range(0, len(step) + 1, 16), yticks=range(0, len(step) + 1, 16))
            ax.grid(False)
        axes[0].set_ylabel("token")
        axes[0].figure.legend(handles=[Patch(fc=c, label=n) for c, n in zip(colours[1:], names[1:], strict=True)],
                              loc="outside lower center", ncols=3, fontsize=8)

    counts = [int(((shared != together).any(axis=1)).sum()) for _, shared in panels]
    return _figure(draw, "Pairs of tokens that kernels were found to quantize with one scale and to multiply in one "
                   f"step. With the step's groups both are the same for {len(step) - counts[0]} of {len(step)} tokens, "
                   f"with logical groups for {len(step) - counts[1]}.", columns=2, sharey=True, width=6.4, height=3.7)


def error_terms(rows: Sequence[dict]) -> Figure:
    """The two terms of the error and their sum, as parts of the output's size. rows: of
    experiments.int8_pv.error_terms."""
    series = {"V cache": "sum P eV: codes of V", "weights": "sum eW Vq: codes of the weights", "O - O'": "O - O', both"}

    def draw(axes):
        place = np.arange(len(rows))
        for offset, (key, label) in zip((-0.26, 0, 0.26), series.items(), strict=True):
            axes[0].bar(place + offset, [100 * row[key] for row in rows], 0.24, label=label)
        axes[0].set_xticks(place, [_two_lines(row) for row in rows])
        axes[0].set_ylabel("% of the output's size")
        axes[0].margins(y=0.25)
        axes[0].legend(ncols=3, loc="upper center", fontsize=8)
        axes[0].grid(axis="x", visible=False)

    words = "; ".join(f"{row['inputs']} {row['V cache']:.2%} and {row['weights']:.2%}" for row in rows)
    return _figure(draw, f"What the codes of V and the codes of the weights add to the error: {words}.", height=3.0)


def _two_lines(row: dict) -> str:
    return row["inputs"].replace(", ", ",\n") + f"\n{row['tokens']} tokens"


def wrong_groups(rows: Sequence[dict]) -> Figure:
    """Errors of the kernel with right and with logical groups on one lane map. rows: of
    experiments.int8_pv.wrong_groups."""
    def draw(axes):
        place = np.arange(len(rows))
        for offset, how, colour in ((-0.2, "right", _COLOURS[0]), (0.2, "wrong", "#c03434")):
            bars = axes[0].bar(place + offset, [row[f"{how}, error"] for row in rows], 0.38, color=colour,
                               label={"right": "scales of the step's tokens", "wrong": "logical groups"}[how])
            axes[0].bar_label(bars, [f"{row[f'{how}, error']:.1%}" for row in rows], fontsize=8)
        axes[0].set_xticks(place, [_two_lines(row) for row in rows])
        axes[0].set(yscale="log", ylabel="relative error, float64")
        axes[0].yaxis.set_major_formatter(matplotlib.ticker.FuncFormatter(lambda x, _: f"{100 * x:g}%"))
        axes[0].margins(y=0.15)
        axes[0].legend(loc="lower right", bbox_to_anchor=(1, 1), ncols=2, fontsize=8)
        axes[0].grid(axis="x", visible=False)

    right, wrong = ([row[f"{how}, error"] for row in rows] for how in ("right", "wrong"))
    return _figure(draw, f"Relative Frobenius error against float64 attention: {min(right):.1%} to {max(right):.1%} "
                   f"with the right groups, {min(wrong):.0%} to {max(wrong):.0%} with logical ones.", height=3.2)


def history(rows: Sequence[dict], article: dict[int, tuple[float, float]]) -> Figure:
    """Errors against the history's length, max_abs and RMS, by reference. rows: of experiments.int8_pv.history.
    article: history to its max_abs and RMS."""
    lines = {}
    for row in rows:
        if row["P V in"] == "int8" or "quantized" in row["reference"]:
            lines.setdefault((row["P V in"], row["reference"]), []).append(row)

    def draw(axes):
        for ax, metric, which in zip(axes, ("max_abs", "rms"), (0, 1), strict=True):
            for (pv, reference), part in lines.items():
                ax.loglog([row["history"] for row in part], [row[metric] for row in part],
                          "o-" if pv == "int8" else "o--", label=f"{pv.upper()} P V to {reference}")
            ax.plot(list(article), [figures[which] for figures in article.values()], **_ARTICLE)
            ticks = sorted({row["history"] for row in rows} | set(article))
            ax.set(title={"max_abs": "largest error", "rms": "RMS error"}[metric], xlabel="tokens")
            ax.set_xticks(ticks, [f"{t // 1024}K" if t % 1024 == 0 else str(t) for t in ticks])
            ax.set_xticks([], minor=True)
            ax.tick_params(axis="x", rotation=60 if len(ticks) > 6 else 0)
        handles, labels = axes[0].get_legend_handles_labels()
        axes[0].figure.legend(handles, labels, loc="outside lower center", ncols=2, fontsize=8)

    first = [row for row in rows if row["P V in"] == "int8" and row["reference"] == rows[0]["reference"]]
    words = ", ".join(f"{row['history']} tokens {row['max_abs']:.2g} and {row['rms']:.2g}" for row in first)
    return _figure(draw, f"Largest and RMS error of INT8 P V with unit variance against BF16 P V in the same kernel: "
                   f"{words}.", columns=2, height=3.8)


def gains(rows: Sequence[dict], article: dict[int, float]) -> Figure:
    """How many times as fast as BF16 P V the kernel is with INT8 P V, cold, against the history. rows: of
    experiments.int8_pv_speed.decode_speed. article: history to its gain."""
    lines = {}
    for row in rows:
        if row["cache"] == "cold":
            name = f"batch {row['batch']}, {row['heads']}/{row['kv_heads']} heads of {row['head_dim']}"
            lines.setdefault(name, []).append(row)

    def draw(axes):
        ax = axes[0]
        for i, (name, part) in enumerate(lines.items()):
            at, gain = [row["history"] for row in part], np.array([row["gain"] for row in part])
            spread = [gain - [row["gain p10"] for row in part], [row["gain p90"] for row in part] - gain]
            ax.errorbar(at, gain, spread, fmt="o-", capsize=2, label=name, color=_COLOURS[i % len(_COLOURS)])
        ax.plot(list(article), list(article.values()), **_ARTICLE)
        ax.axhline(1, color=_INK, lw=0.8)
        ticks = sorted({row["history"] for row in rows})
        ax.set(xscale="log", xlabel="tokens of history", ylabel="BF16 time / INT8 time")
        ax.set_xticks(ticks, [f"{t // 1024}K" if t % 1024 == 0 else str(t) for t in ticks])
        ax.set_xticks([], minor=True)
        ax.legend(fontsize=8)

    words = "; ".join(f"{name} {min(r['gain'] for r in part):.2f} to {max(r['gain'] for r in part):.2f}"
                      for name, part in lines.items())
    return _figure(draw, f"Time of decode with BF16 P V over that with INT8 P V, cold; bars from the 10th to the 90th "
                   f"percentiles: {words}.", height=3.6)


def forms(rows: Sequence[dict], base: str, what: str) -> Figure:
    """Error of P V of each form of a kernel and, where it was timed, its cold time over that of the form `base`, a
    point a case. rows: of an experiment of int8_pv_speed. what: names the forms, in words."""
    errors = {row["form"]: row["of P V"] for row in rows}
    cases: dict[tuple, dict[str, float]] = {}
    for row in rows:
        if row.get("cache") == "cold":
            case = tuple(row[key] for key in ("batch", "heads", "kv_heads", "head_dim", "history"))
            cases.setdefault(case, {})[row["form"]] = row["us"]
    names = list(errors)

    def draw(axes):
        place = np.arange(len(names))
        bars = axes[0].barh(place, [100 * errors[name] for name in names], height=0.6)
        axes[0].bar_label(bars, [f" {errors[name]:.2%}" for name in names], fontsize=8)
        axes[0].set_yticks(place, names)
        axes[0].set(xlabel="relative error of P V, %", title=what)
        axes[0].margins(x=0.25)
        axes[0].invert_yaxis()
        axes[0].grid(axis="y", visible=False)
        if cases:
            for i, ((batch, heads, kv_heads, head_dim, tokens), times) in enumerate(cases.items()):
                at = [n for n, name in enumerate(names) if name in times]
                axes[1].plot([times[names[n]] / times[base] for n in at], at, "o", color=_COLOURS[i % len(_COLOURS)],
                             label=f"batch {batch}, {heads}/{kv_heads} x {head_dim}, {tokens // 1024}K")
            axes[1].axvline(1, color=_INK, lw=0.8)
            axes[1].set(xlabel=f"time / time of {base}, cold")
            axes[1].legend(fontsize=7.5, loc="center left", bbox_to_anchor=(1, 0.5))
            axes[1].tick_params(labelleft=False)

    words = ", ".join(f"{name} {error:.2%}" for name, error in errors.items())
    ratios = {name: [times[name] / times[base] for times in cases.values() if name in times] for name in names}
    timed = "; time over that of " + base + ": " + ", ".join(
        f"{name} {min(r):.2f} to {max(r):.2f}" for name, r in ratios.items() if r and name != base) if cases else ""
    return _figure(draw, f"Relative error of P V against float64 by {what}: {words}{timed}.",
                   columns=2 if cases else 1, width=7.6 if cases else 5.0, height=0.9 + 0.32 * len(names),
                   **({"sharey": True} if cases else {}))


def peers(rows: Sequence[dict]) -> Figure:
    """Times of our kernels and of others' on the same problems, decode cold and prefill warm, a panel a case. rows: of
    experiments.int8_pv_speed.beside_peers."""
    cases: dict[str, list[dict]] = {}
    for row in rows:
        if row["cache"] == ("cold" if row["phase"] == "decode" else "warm"):
            what = f"{row['queries']} queries" if row["queries"] > 1 else row["phase"]
            name = (f"{what}, {row['history'] // 1024}K\nbatch {row['batch']}, "
                    f"{row['heads']}/{row['kv_heads']} x {row['head_dim']}")
            cases.setdefault(name, []).append(row)

    def draw(axes):
        for ax, (name, part) in zip(axes, cases.items(), strict=False):
            part = sorted(part, key=lambda row: row["us"])
            bars = ax.barh([row["variant"].replace("_", " ") for row in part], [row["us"] for row in part], height=0.65,
                           color=[_COLOURS[1] if row["peer"] else _COLOURS[0] for row in part])
            ax.bar_label(bars, [f" {row['us']:,.0f}" if row["us"] >= 100 else f" {row['us']:.1f}" for row in part],
                         fontsize=7)
            ax.set_title(name, fontsize=8)
            ax.margins(x=0.25)
            ax.invert_yaxis()
            ax.tick_params(axis="y", labelsize=7)
            ax.grid(axis="y", visible=False)
        _hide_rest(axes, len(cases))
        axes[0].figure.supxlabel("us a call, decode cold, prefill warm", fontsize=8)
        axes[0].figure.legend(handles=[Patch(fc=_COLOURS[0], label="ours"), Patch(fc=_COLOURS[1], label="peers")],
                              loc="outside upper right", ncols=2, fontsize=8)

    ahead = sum(not min(part, key=lambda row: row["us"])["peer"] for part in cases.values())
    return _figure(draw, f"Times of our kernels and others' on {len(cases)} problems; ours is the fastest on "
                   f"{ahead}.", **_grid(len(cases), across=3))
