"""Figures of the prefill_breakdown notebook on whole passes: buckets side by side, the way from the article's design to
the best one, launches, errors through layers, and the products of a pass under the machine's ceilings."""

from collections.abc import Sequence

import numpy as np
from matplotlib.ticker import FuncFormatter, LogLocator, MaxNLocator, NullFormatter

from kernelbook.plots import _COLOURS, _INK, Figure, _figure

_BUCKETS = dict(zip(("GEMM", "GDN", "attention", "norm/act", "copies", "idle"), _COLOURS, strict=True))
_OTHER, _SAVED, _ADDED = "#c9a227", "#3a9a5b", "#c03434"


def buckets(rows: Sequence[dict], what: str = "a pass") -> Figure:
    """Stacked buckets of several engines: in milliseconds, and as shares of each one's pass.

    rows: {engine, bucket, ms}, as Passes.buckets, Peer.buckets and article_buckets of experiments.prefill_buckets have
    them. Overlap, which buckets share, has no bar.
    """
    engines: dict[str, dict[str, float]] = {}
    for row in rows:
        parts = engines.setdefault(row["engine"], {})
        if row["ms"] > 0:
            parts[row["bucket"]] = row["ms"]
    names = list(dict.fromkeys(bucket for parts in engines.values() for bucket in parts))
    totals = {engine: sum(parts.values()) for engine, parts in engines.items()}

    def draw(axes):
        for ax, whole in zip(axes, (dict.fromkeys(engines, 1.0), {e: t / 100 for e, t in totals.items()}),
                             strict=True):
            left = np.zeros(len(engines))
            for bucket in names:
                width = np.array([parts.get(bucket, 0.0) / whole[engine] for engine, parts in engines.items()])
                ax.barh([engine.replace("_", " ") for engine in engines], width, left=left, height=0.65, label=bucket,
                        color=_BUCKETS.get(bucket, _OTHER))
                left += width
            ax.grid(axis="y", visible=False)
        for i, total in enumerate(totals.values()):
            axes[0].annotate(f" {total:,.0f}" if total >= 100 else f" {total:.1f}", (total, i), va="center", fontsize=8)
        axes[0].margins(x=0.18)
        axes[0].invert_yaxis()  # and with it the other's
        axes[0].set_xlabel("ms")
        axes[1].set(xlabel="% of the pass", xlim=(0, 100))
        axes[0].figure.legend(*axes[0].get_legend_handles_labels(), loc="outside upper center", ncols=len(names),
                              fontsize=8)

    words = "; ".join(f"{engine} {total:,.4g} ms, " + " and ".join(
        f"{bucket} {parts[bucket] / total:.0%}" for bucket in ("GEMM", "GDN") if bucket in parts)
        for (engine, parts), total in zip(engines.items(), totals.values(), strict=True))
    return _figure(draw, f"Where the time of {what} goes: {words}.", columns=2, sharey=True,
                   height=1.3 + 0.34 * len(engines))


def waterfall(rows: Sequence[dict]) -> Figure:
    """From one pass to a faster one, a step a bucket. rows: of experiments.prefill_buckets.waterfall, {step, ms}: the
    first and the last are whole passes, those between what a bucket takes off (negative) or adds."""
    first, *steps, last = rows

    def draw(axes):
        ax, level = axes[0], first["ms"]
        ax.bar(0, level, color=_COLOURS[0], width=0.65)
        for i, row in enumerate(steps, 1):
            ax.bar(i, row["ms"], bottom=level, color=_SAVED if row["ms"] <= 0 else _ADDED, width=0.65)
            ax.plot([i - 1.33, i + 0.33], [level, level], color=_INK, lw=0.6)
            ax.annotate(f"{row['ms']:+,.1f}", (i, max(level, level + row["ms"])), ha="center", va="bottom", fontsize=8)
            level += row["ms"]
        ax.bar(len(steps) + 1, last["ms"], color=_COLOURS[0], width=0.65)
        for i, row in ((0, first), (len(steps) + 1, last)):
            ax.annotate(f"{row['ms']:,.0f}" if row["ms"] >= 100 else f"{row['ms']:.1f}", (i, row["ms"]), ha="center",
                        va="bottom", fontsize=8)
        ax.set_xticks(range(len(rows)), [row["step"].replace("_", " ").replace(" ", "\n") for row in rows])
        ax.set_ylabel("ms a pass")
        ax.set_ylim(0, 1.12 * max(first["ms"], last["ms"]))
        ax.grid(axis="x", visible=False)

    words = ", ".join(f"{row['step']} {row['ms']:+,.1f}" for row in steps)
    return _figure(draw, f"From {first['step']} with {first['ms']:,.0f} ms to {last['step']} with {last['ms']:,.1f} ms "
                   f"a pass, by bucket: {words}.", height=3.4)


def launches(rows: Sequence[dict]) -> Figure:
    """Launches predicted and counted, a line each; red where they differ. rows: of the finding of
    experiments.prefill_buckets.launches."""
    shown = [row for row in rows if row["counted"] is not None]

    def draw(axes):
        ax, place = axes[0], np.arange(len(shown))
        ax.barh(place, [row["predicted"] for row in shown], height=0.6, color=_COLOURS[0], alpha=0.45,
                label="predicted")
        for differs, name in ((False, "counted"), (True, "counted, differs")):
            at = [i for i, row in enumerate(shown) if (row["agrees"] is False) == differs]
            if at:
                ax.plot([shown[i]["counted"] for i in at], at, "D", color=_ADDED if differs else _INK, label=name)
        ax.set_yticks(place, [f"{row['engine']}: {row['launches']} ({row['where']})".replace("_", " ")
                              for row in shown], fontsize=7.5)
        ax.set(xscale="log", xlabel="launches a pass")
        ax.xaxis.set_major_formatter(FuncFormatter(lambda x, _: f"{x:,.0f}"))
        ax.invert_yaxis()
        ax.grid(axis="y", visible=False)
        ax.figure.legend(loc="outside upper right", ncols=3, fontsize=8)

    differ = [row for row in shown if row["agrees"] is False]
    told = sum(row["agrees"] is not None for row in shown)
    words = f"{told - len(differ)} of {told} counts are as predicted" + "".join(
        f"; {row['engine']}, {row['launches']}: {row['counted']:,g} instead of {row['predicted']:,}" for row in differ)
    return _figure(draw, f"Launches predicted from shapes and counted: {words}.", height=1.0 + 0.24 * len(shown))


def growth(rows: Sequence[dict]) -> Figure:
    """Relative error of the residual stream after each layer, a line a design. rows: Passes.growth of
    experiments.prefill_buckets, {design, activations, layer, error, reference}."""
    lines: dict[str, list[dict]] = {}
    for row in rows:
        if row["error"]:  # 0 of the design that is compared with has no place on this axis
            lines.setdefault(row["design"], []).append(row)
    activations = list(dict.fromkeys(row["activations"] for row in rows))

    def draw(axes):
        for i, (design, part) in enumerate(lines.items()):
            axes[0].semilogy([row["layer"] for row in part], [row["error"] for row in part],
                             ("-", "--", ":")[activations.index(part[0]["activations"]) % 3],
                             color=_COLOURS[i % len(_COLOURS)],
                             label=f"{design.replace('_', ' ')} ({part[0]['activations']} activations)")
        axes[0].set(xlabel="layers", ylabel="relative error of the stream")
        axes[0].xaxis.set_major_locator(MaxNLocator(integer=True))
        if lines:
            axes[0].legend(fontsize=8, loc="center left", bbox_to_anchor=(1, 0.5))

    words = ", ".join(f"{design} {part[0]['error']:.1e} after layer {part[0]['layer']} and {part[-1]['error']:.1e} "
                      f"after layer {part[-1]['layer']}" for design, part in lines.items())
    return _figure(draw, f"Relative Frobenius error of the residual stream against {rows[0]['reference']}: "
                   f"{words or 'none differs'}.", height=3.2)


def roofline(rows: Sequence[dict], ceilings: dict) -> Figure:
    """All products of a pass as a point a design, under the machine's ceilings of memory and matrix unit. rows: of
    experiments.prefill_buckets.roofline. ceilings: Lab.ceilings."""
    read, peak = ceilings["read"].value, ceilings["bf16_matmul"].value

    def draw(axes):
        ax = axes[0]
        ends = min(row["FLOP / byte"] for row in rows) / 3, max(row["FLOP / byte"] for row in rows) * 3
        x = np.geomspace(*ends)
        ax.loglog(x, np.minimum(x * read / 1e3, peak), color=_INK, lw=1)
        ax.annotate(f"bf16 matmul {peak:,.0f} TFLOP/s", (x[-1], peak), ha="right", va="bottom")
        ax.annotate(f"read {read:,.0f} GB/s", (x[0], x[0] * read / 1e3), va="bottom")
        for i, row in enumerate(rows):
            again, colour = divmod(i, len(_COLOURS))
            ax.loglog(row["FLOP / byte"], row["TFLOP/s"], "os"[again % 2], ms=6, color=_COLOURS[colour],
                      label=f"{row['design'].replace('_', ' ')}, {row['TFLOP/s']:,.3g}")
        ax.set(xlabel="FLOP a byte of weights that launches read", ylabel="TFLOP/s")
        for axis in (ax.xaxis, ax.yaxis):
            axis.set_major_locator(LogLocator(subs=(1, 3)))
            axis.set_major_formatter(FuncFormatter(lambda x, _: f"{x:,g}"))
            axis.set_minor_formatter(NullFormatter())
        ax.legend(fontsize=8, loc="center left", bbox_to_anchor=(1, 0.5))

    words = ", ".join(f"{row['design']} {row['TFLOP/s']:,.3g} TFLOP/s, {row['TFLOP/s'] / peak:.0%}" for row in rows)
    return _figure(draw, f"All products of a pass by design, and their share of the measured bf16 ceiling: {words}.",
                   height=3.4)
