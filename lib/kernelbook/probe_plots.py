"""Figures of the prefill_breakdown notebook about its probe, its candidates and the gated delta net."""

from collections.abc import Sequence

import matplotlib
import numpy as np
from matplotlib.patches import Patch

from kernelbook.experiments.prefill_candidates import BASE
from kernelbook.experiments.prefill_probe import ARTICLE_FORMS, VARIANTS
from kernelbook.plots import _COLOURS, _INK, Figure, _figure, _grid, _hide_rest

_NAMES = {"baseline": "baseline", "explicit_fma": "explicit FMA", "int8_dot": "dp4a"}
_FORMS = {(variant, r): f"{_NAMES[variant]}, R = {r}" for variant, r in ARTICLE_FORMS}
_CROSS = {"marker": "x", "ls": "none", "ms": 7, "mew": 1.6, "color": "#c03434", "zorder": 3}
_CANDIDATES = {BASE: _COLOURS[5], "A": _COLOURS[2], "B": _COLOURS[1], "C": _COLOURS[0], "peer": _COLOURS[3]}


def _article_forms(rows: Sequence[dict], cache: str) -> dict[str, dict[tuple[str, int], dict]]:
    """Projection to form to row, at the article's M, where each of its three forms was timed."""
    found: dict[str, dict[tuple[str, int], dict]] = {}
    for row in rows:
        if row["M"] == 16 and row.get("cache") == cache and (row["variant"], row["R"]) in _FORMS:
            found.setdefault(row["projection"], {})[row["variant"], row["R"]] = row
    return {name: forms for name, forms in found.items() if len(forms) == len(_FORMS)}


def times(rows: Sequence[dict]) -> Figure:
    """The article's three kernels at M = 16: time over that of the baseline on each shape, warm and cold, with the
    article's own ratios. rows: of experiments.prefill_probe.times on a GPU."""
    panels = {cache: _article_forms(rows, cache) for cache in ("warm", "cold")}
    base = ARTICLE_FORMS[0]

    def draw(axes):
        for ax, (cache, shapes) in zip(axes, panels.items(), strict=True):
            place = np.arange(len(shapes))
            for offset, (form, label), colour in zip((-0.27, 0, 0.27), _FORMS.items(), _COLOURS, strict=False):
                ours, theirs = ([found[form][key] / found[base][key] for found in shapes.values()]
                                for key in ("us", "article us"))
                bars = ax.bar(place + offset, ours, 0.25, color=colour, label=label)
                ax.bar_label(bars, [f"{found[form]['us']:.0f}" for found in shapes.values()], fontsize=6.5)
                if form != base:
                    ax.plot(place + offset, theirs, **_CROSS, label="article" if form == ARTICLE_FORMS[1] else None)
            ax.set_xticks(place, [name.replace("_", "+") for name in shapes])
            ax.set_title(f"{cache}; above bars us")
            ax.grid(axis="x", visible=False)
        axes[0].set_ylabel("time / time of baseline")
        handles, labels = axes[0].get_legend_handles_labels()
        axes[0].figure.legend(handles, labels, loc="outside lower center", ncols=4, fontsize=8)

    words = "; ".join(f"{cache}: " + ", ".join(
        f"{name} " + "/".join(f"{found[form]['us']:.0f}" for form in _FORMS) for name, found in shapes.items())
        for cache, shapes in panels.items())
    return _figure(draw, f"Times in us of {' / '.join(_FORMS.values())} at M = 16, {words}.", columns=2, sharey=True,
                   height=3.4)


def heat_maps(rows: Sequence[dict], projection: str, cache: str = "warm") -> Figure:
    """TFLOP/s of each variant by R and M on one projection. rows: of experiments.prefill_probe.times on a GPU."""
    of = {(row["variant"], row["R"], row["M"]): row["TFLOP/s"] for row in rows
          if row["projection"] == projection and row.get("cache") == cache}
    rs, ms = (sorted({key[i] for key in of}) for i in (1, 2))
    grids = {variant: np.array([[of.get((variant, r, m), np.nan) for m in ms] for r in rs]) for variant in VARIANTS}
    top = max(of.values())

    def draw(axes):
        for ax, (variant, grid) in zip(axes, grids.items(), strict=True):
            ax.imshow(grid, cmap="viridis", vmin=0, vmax=top, aspect="auto")
            for (i, j), value in np.ndenumerate(grid):
                if np.isfinite(value):
                    ax.text(j, i, f"{value:.1f}", ha="center", va="center", fontsize=8,
                            color="white" if value < 0.6 * top else "black")
            ax.set(title=_NAMES[variant], xlabel="M, rows of activations")
            ax.set_xticks(range(len(ms)), ms)
            ax.set_yticks(range(len(rs)), rs)
            ax.grid(False)
        axes[0].set_ylabel("R, rows a wave")

    (variant, r, m), best = max(of.items(), key=lambda item: item[1])
    return _figure(draw, f"TFLOP/s on {projection}, {cache}, by R and M: the most is {best:.1f} of {_NAMES[variant]} "
                   f"at R = {r} and M = {m}.", columns=3, sharey=True, height=2.4)


def issue(rows: Sequence[dict]) -> Figure:
    """Time against instructions a MAC, each over the baseline's, a line a shape: where issue binds, points lie on the
    diagonal. rows: of experiments.prefill_probe.issue on a GPU."""
    shapes: dict[str, list[dict]] = {}
    for row in rows:
        shapes.setdefault(row["projection"], []).append(row)

    def draw(axes):
        ax = axes[0]
        for i, (name, part) in enumerate(shapes.items()):
            base = part[0]
            x, y = ([row[key] / base[key] for row in part] for key in ("instructions a MAC", "us"))
            ax.plot(x, y, "o-", color=_COLOURS[i % len(_COLOURS)], label=name)
        ax.plot([0, 1.05], [0, 1.05], "--", color=_INK, lw=0.8, label="bound by issue")
        for row in next(iter(shapes.values())):
            ax.axvline(row["instructions a MAC"] / rows[0]["instructions a MAC"], color="#88888855", lw=0.8)
            ax.annotate(_NAMES[row["variant"]], (row["instructions a MAC"] / rows[0]["instructions a MAC"], 0.02),
                        rotation=90, fontsize=8, ha="right", va="bottom", xycoords=("data", "axes fraction"))
        ax.set(xlabel="instructions a MAC / baseline's", ylabel="time / baseline's", xlim=(0, 1.1), ylim=(0, None))
        ax.legend(fontsize=8, loc="center left", bbox_to_anchor=(1, 0.5))

    words = "; ".join(f"{name} " + ", ".join(f"{_NAMES[row['variant']]} {row['us']:.1f} us at "
                                             f"{row['instructions a MAC']:.2f}" for row in part)
                      for name, part in shapes.items())
    return _figure(draw, f"Time against instructions a MAC: {words}.", height=3.4, width=6.4)


def wave_rows(rows: Sequence[dict]) -> Figure:
    """Time by R without and with fmaf at M = 16, a panel a shape. rows: of experiments.prefill_probe.wave_rows on a
    GPU."""
    shapes = list(dict.fromkeys(row["projection"] for row in rows))

    def draw(axes):
        for ax, name in zip(axes, shapes, strict=False):
            for variant, colour in (("baseline", _COLOURS[0]), ("explicit_fma", _COLOURS[1])):
                part = [row for row in rows if (row["projection"], row["variant"]) == (name, variant)]
                us = np.array([row["us"] for row in part])
                spread = [us - [row["p10"] for row in part], [row["p90"] for row in part] - us]
                ax.errorbar([row["R"] for row in part], us, spread, fmt="o-", capsize=2, color=colour,
                            label="with fmaf" if variant == "explicit_fma" else "without")
            ax.set(title=name, xlabel="R", ylim=(0, None))
            ax.set_xticks([1, 2, 4])
        axes[0].set_ylabel("us")
        axes[0].legend(fontsize=8)
        _hide_rest(axes, len(shapes))

    fours = {name: {row["variant"]: row["of R = 2"] for row in rows if row["projection"] == name and row["R"] == 4}
             for name in shapes}
    words = "; ".join(f"{name} {of['baseline']:.2f} and {of['explicit_fma']:.2f}" for name, of in fours.items())
    return _figure(draw, f"Time at M = 16 by rows of weights a wave; R = 4 over R = 2 without and with fmaf: {words}.",
                   **_grid(len(shapes), across=5))


def bandwidth(rows: Sequence[dict], band: tuple[float, float] = (0.19, 0.26)) -> Figure:
    """Weight bandwidth as a share of the read ceiling, cold, M = 1 and 16, with the article's band. rows: of
    experiments.prefill_probe.bandwidth on a GPU."""
    batches = sorted({row["M"] for row in rows})
    shapes = list(dict.fromkeys(row["projection"] for row in rows))

    def draw(axes):
        for ax, m in zip(axes, batches, strict=True):
            for offset, (form, label), colour in zip((-0.27, 0, 0.27), _FORMS.items(), _COLOURS, strict=False):
                part = {row["projection"]: row["of read"] for row in rows
                        if (row["variant"], row["R"]) == form and row["M"] == m}
                place = [shapes.index(name) + offset for name in part]
                ax.bar(place, [100 * share for share in part.values()], 0.25, color=colour, label=label)
            if m == 16:
                ax.axhspan(*(100 * share for share in band), color="#c03434", alpha=0.18, label="article")
            ax.set_xticks(range(len(shapes)), [name.replace("_", "+") for name in shapes])
            ax.set_title(f"M = {m}")
            ax.grid(axis="x", visible=False)
        axes[0].set_ylabel("% of the read ceiling")
        handles, labels = axes[-1].get_legend_handles_labels()
        axes[0].figure.legend(handles, labels, loc="outside lower center", ncols=4, fontsize=8)

    words = "; ".join(f"M = {m} {min(of):.0%} to {max(of):.0%}" for m, of in (
        (m, [row["of read"] for row in rows if row["M"] == m]) for m in batches))
    return _figure(draw, f"Bytes of weights over time as a share of the read ceiling, cold: {words}.",
                   columns=len(batches), sharey=True, height=3.2)


def errors(rows: Sequence[dict]) -> Figure:
    """Relative RMS, meanrel and maxrel of the three kernels, a point a product. rows: of
    experiments.prefill_probe.errors."""
    metrics = {"relative Frobenius": "relative RMS", "meanrel": "meanrel", "maxrel": "maxrel"}

    def draw(axes):
        ax = axes[0]
        for i, (variant, name) in enumerate(_NAMES.items()):
            for j, metric in enumerate(metrics):
                values = [row[metric] for row in rows if row["variant"] == variant]
                at = j + 0.22 * (i - 1) + np.linspace(-0.06, 0.06, len(values))
                ax.plot(at, values, "o", color=_COLOURS[i], label=name if j == 0 else None)
        ax.set(yscale="log", ylabel="error against float64")
        ax.set_xticks(range(len(metrics)), metrics.values())
        ax.legend(fontsize=8, loc="center left", bbox_to_anchor=(1, 0.5))
        ax.grid(axis="x", visible=False)

    words = "; ".join(f"{name} " + ", ".join(
        f"{label} {min(of):.1e} to {max(of):.1e}" for metric, label in metrics.items()
        for of in [[row[metric] for row in rows if row["variant"] == variant]]) for variant, name in _NAMES.items())
    return _figure(draw, f"Errors against float64 on the float activations: {words}.", height=3.2, width=6.4)


def cancellation(rows: Sequence[dict]) -> Figure:
    """Largest relative differences by the size of the exact output, a line a product and comparison. rows: of
    experiments.prefill_probe.cancellation."""
    lines: dict[tuple[str, str], list[dict]] = {}
    for row in rows:
        lines.setdefault((row["comparison"], row["inputs"]), []).append(row)
    comparisons = list(dict.fromkeys(name for name, _ in lines))
    bins = [f"{row['from %']:g} to {row['to %']:g}" for row in max(lines.values(), key=len)]

    def draw(axes):
        for (comparison, _), part in lines.items():
            colour = _COLOURS[comparisons.index(comparison)]
            at = [bins.index(f"{row['from %']:g} to {row['to %']:g}") for row in part]
            axes[0].semilogy(at, [row["maxrel"] for row in part], "o-", color=colour, lw=0.9, ms=3)
        axes[0].set_xticks(range(len(bins)), bins)
        axes[0].set(xlabel="percentiles of |exact output|", ylabel="maxrel there")
        axes[0].legend(handles=[Patch(fc=_COLOURS[i], label=name) for i, name in enumerate(comparisons)], fontsize=8,
                       loc="upper right")

    ends = {comparison: [max(part[i]["maxrel"] for (name, _), part in lines.items() if name == comparison)
                         for i in (0, -1)] for comparison in comparisons}
    words = "; ".join(f"{comparison} {first:.1e} and {last:.1e}" for comparison, (first, last) in ends.items())
    return _figure(draw, "Largest relative difference among the outputs nearest to 0 and among the largest half: "
                   f"{words}.", height=3.2, width=6.4)


def candidates(rows: Sequence[dict], ceiling: float | None = None) -> Figure:
    """TFLOP/s of every design against M, a panel a shape. rows: of experiments.prefill_candidates.candidates on a GPU.
    ceiling: TFLOP/s of this machine's bf16 products."""
    shapes = list(dict.fromkeys((row["N"], row["K"]) for row in rows))
    variants = dict.fromkeys((row["variant"], row["candidate"]) for row in rows)
    styles = {}
    for candidate, colour in _CANDIDATES.items():
        of = [variant for variant, whose in variants if whose == candidate]
        for variant, style in zip(of, ("-", "--", ":"), strict=False):
            styles[variant] = {"color": colour, "ls": style, "label": _label(variant, candidate)}

    def draw(axes):
        for ax, (n, k) in zip(axes, shapes, strict=False):
            for variant, style in styles.items():
                part = sorted((row for row in rows if (row["N"], row["K"], row["variant"]) == (n, k, variant)),
                              key=lambda row: row["M"])
                ax.loglog([row["M"] for row in part], [row["TFLOP/s"] for row in part], marker="o", ms=3, **style)
            if ceiling:
                ax.axhline(ceiling, color=_INK, lw=0.8)
            ticks = sorted({row["M"] for row in rows})
            ax.set(title=f"{n} x {k}", xlabel="M")
            ax.set_xticks(ticks, ticks, fontsize=7)
            ax.set_xticks([], minor=True)
        _hide_rest(axes, len(shapes))
        axes[0].set_ylabel("TFLOP/s")
        handles, labels = axes[0].get_legend_handles_labels()
        axes[0].figure.legend(handles, labels, loc="outside lower center", ncols=4, fontsize=8)

    largest = max((row["N"] * row["K"], row["M"]) for row in rows)
    there = sorted((row for row in rows if (row["N"] * row["K"], row["M"]) == largest), key=lambda row: -row["TFLOP/s"])
    words = ", ".join(f"{row['variant']} {row['TFLOP/s']:,.0f}" for row in there)
    options = _grid(len(shapes))
    return _figure(draw, f"TFLOP/s against M; on {there[0]['N']} x {there[0]['K']} at M = {largest[1]}: {words}.",
                   **options | {"height": options["height"] + 0.5})


def _label(variant: str, candidate: str) -> str:
    name = variant.replace("_", " ")
    return f"{candidate}: {name}" if candidate in "ABC" else "the article's tiles of 16" if candidate == BASE else name


def whole_pass(rows: Sequence[dict]) -> Figure:
    """Times of all projections of a pass, a bar a design. rows: of experiments.prefill_candidates.whole_pass."""
    def draw(axes):
        ax = axes[0]
        bars = ax.barh([_label(row["variant"], row["candidate"]) for row in rows], [row["ms"] for row in rows],
                       color=[_CANDIDATES[row["candidate"]] for row in rows], height=0.65)
        gains = [f", {row['article / this']:.1f}x" if row["article / this"] else "" for row in rows]
        ax.bar_label(bars, [f" {row['ms']:,.1f} ms{gain}" for row, gain in zip(rows, gains, strict=True)], fontsize=8)
        ax.set(xscale="log", xlabel="ms a pass, projections only")
        ax.xaxis.set_major_formatter(matplotlib.ticker.FuncFormatter(lambda x, _: f"{x:g}"))
        ax.margins(x=0.3)
        ax.invert_yaxis()
        ax.grid(axis="y", visible=False)

    words = ", ".join(f"{row['variant']} {row['ms']:.1f}" for row in rows)
    return _figure(draw, f"Projections of a whole pass in ms, sums of products: {words}.",
                   height=0.9 + 0.3 * len(rows))


def delta_net(rows: Sequence[dict]) -> Figure:
    """Time of the recurrence of one layer, by design and tokens. rows: of experiments.prefill_candidates.delta_net on a
    GPU."""
    counts = list(dict.fromkeys(row["tokens"] for row in rows))

    def draw(axes):
        for ax, tokens in zip(axes, counts, strict=True):
            part = sorted((row for row in rows if row["tokens"] == tokens), key=lambda row: row["us"])
            ours = [row["variant"].startswith(("sequential", "chunked")) for row in part]
            bars = ax.barh([row["variant"].replace("_", " ") for row in part], [row["us"] for row in part], height=0.6,
                           color=[_COLOURS[0] if own else _COLOURS[3] for own in ours])
            ax.bar_label(bars, [f" {row['us']:,.0f}" for row in part], fontsize=8)
            ax.set(title=f"{tokens} tokens", xlabel="us a layer")
            ax.margins(x=0.25)
            ax.invert_yaxis()
            ax.grid(axis="y", visible=False)

    words = "; ".join(f"{tokens} tokens " + ", ".join(f"{row['variant']} {row['us']:.0f}" for row in rows
                                                      if row["tokens"] == tokens) for tokens in counts)
    return _figure(draw, f"Time of the gated delta net's recurrence in one layer, us: {words}.", columns=len(counts),
                   height=2.2)


def through_layers(rows: Sequence[dict]) -> Figure:
    """Error of the stream after each layer. rows: of experiments.prefill_candidates.through_layers."""
    lines: dict[str, list[dict]] = {}
    for row in rows:
        lines.setdefault(f"{row['recurrence']}; {row['activations']} activations", []).append(row)

    def draw(axes):
        for i, (name, part) in enumerate(lines.items()):
            axes[0].semilogy([row["layer"] for row in part], [row["error"] for row in part], label=name,
                             color=_COLOURS[i % len(_COLOURS)])
        axes[0].set(xlabel="layers", ylabel="relative error, float64")
        axes[0].legend(fontsize=8, loc="center left", bbox_to_anchor=(1, 0.5))

    words = "; ".join(f"{name} {part[0]['error']:.1e} to {part[-1]['error']:.1e}" for name, part in lines.items())
    return _figure(draw, f"Error of a stream after one and after {rows[-1]['layer']} layers of gated delta net: "
                   f"{words}.", height=3.0)
