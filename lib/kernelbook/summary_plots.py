"""Figures of the report's index, drawn from a record alone: latencies, and rates under the measured ceilings."""

from collections.abc import Iterable

import numpy as np
from matplotlib.ticker import LogLocator, NullFormatter, StrMethodFormatter

from kernelbook.plots import _COLOURS, _INK, Figure, _figure, _grid, _hide_rest

AXES = ("M", "history", "tokens")
"""What latencies are drawn against, the first that a case has."""
PANELS, POINTS = 16, 3
"""At most so many panels of latencies, of lines of at least so many points."""
_MARKS = "os^Dv<>PX*"


def figures(record: dict) -> list[Figure]:
    """Latency and roofline of a record, each where there is anything timed to draw."""
    timed = [m for m in record["measurements"] if m["value"] is not None and not m["host"] and m["case"]]
    if any("experiment" not in m["case"] and set(AXES) & set(m["case"]) for m in timed if m["metric"] == "time_us"):
        # what it tried out with a kernel's parameters is in the notebook
        timed = [m for m in timed if "experiment" not in m["case"]]
    return [figure for figure in (_latency(timed), _roofline(timed)) if figure]


def _latency(timed: list[dict]) -> Figure | None:
    panels: dict[tuple, dict[str, list[dict]]] = {}
    for m in timed:
        axis = next((name for name in AXES if name in m["case"]), None)
        if m["metric"] == "time_us" and axis:
            rest = tuple((name, value) for name, value in m["case"].items() if name != axis)
            panels.setdefault((m["kernel"], m["cache"], axis, rest), {}).setdefault(m["variant"], []).append(m)
    drawn = {key: {name: points for name, points in lines.items() if len(points) >= POINTS}
             for key, lines in panels.items()}
    drawn = {key: lines for key, lines in drawn.items() if lines}
    most = sorted(drawn, key=lambda key: (key[1] != "cold", -len(drawn[key])))[:PANELS]
    drawn = {key: lines for key, lines in drawn.items() if key in most}
    if not drawn:
        return None
    names = list(dict.fromkeys(name for lines in drawn.values() for name in lines))

    def draw(axes):
        for ax, ((kernel, cache, axis, rest), lines) in zip(axes, drawn.items(), strict=False):
            for variant, points in lines.items():
                points = sorted(points, key=lambda m: m["case"][axis])
                low, value, high = ([m[name] if m[name] is not None else m["value"] for m in points]
                                    for name in ("p10", "value", "p90"))
                x, ours = [m["case"][axis] for m in points], variant[0].isdigit()
                colour = _COLOURS[names.index(variant) % len(_COLOURS)]
                ax.loglog(x, value, "-" if ours else "--", marker=_mark(names, variant), color=colour, ms=3, lw=1.2,
                          label=variant.replace("_", " "))
                ax.fill_between(x, low, high, color=colour, alpha=0.2, lw=0)
            ax.set_title(_words(kernel, cache, rest), fontsize=7)
            ax.set_xlabel(axis, fontsize=8)
            places = sorted({m["case"][axis] for points in lines.values() for m in points})
            ax.set_xticks(places[::-(-len(places) // 5)])
            ax.xaxis.set_major_formatter(lambda x, _: f"{x / 1024:g}K" if x >= 1024 and x % 1024 == 0 else f"{x:g}")
            ax.yaxis.set_major_formatter(StrMethodFormatter("{x:g}"))
            for scale in (ax.xaxis, ax.yaxis):
                scale.set_minor_formatter(NullFormatter())
            low, high = ax.get_ylim()
            ax.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5) if high < 30 * low else (1,)))
            ax.tick_params(labelsize=7)
        _hide_rest(axes, len(drawn))
        axes[0].set_ylabel("us")
        handles = {label: handle for ax in axes for handle, label in zip(*ax.get_legend_handles_labels(), strict=True)}
        axes[0].figure.legend(handles.values(), handles.keys(), loc="outside lower center", ncols=4, fontsize=7.5)

    grid = _grid(len(drawn))
    return _figure(draw, f"Time of a call in {len(drawn)} settings, ours with solid lines, others dashed, bands from "
                   f"p10 to p90: {_ranges(drawn)}.", **grid, width=max(4.8, 2.4 * grid["columns"]))


def _mark(names: list[str], variant: str) -> str:
    return _MARKS[names.index(variant) % len(_MARKS)]


def _words(kernel: str, cache: str | None, rest: tuple) -> str:
    words = [f"{name} {value}" for name, value in rest if name not in ("experiment", "group", "queries")]
    lines = [" ".join([kernel.replace("_", " "), *([cache] if cache else [])])]
    for word in words:
        if len(lines) == 1 or len(lines[-1]) + len(word) > 30:
            lines.append(word)
        else:
            lines[-1] += f", {word}"
    return "\n".join(lines)


def _ranges(panels: dict) -> str:
    spans = []
    for (kernel, cache, axis, _), lines in panels.items():
        values = [m["value"] for points in lines.values() for m in points]
        spans.append((kernel, cache, axis, min(values), max(values)))
    kinds = dict.fromkeys(span[:3] for span in spans)
    return "; ".join(
        f"{kernel.replace('_', ' ')}{f' {cache}' if cache else ''} {min(s[3] for s in spans if s[:3] == kind):,.3g} to "
        f"{max(s[4] for s in spans if s[:3] == kind):,.3g} us over {axis}"
        for kind in kinds for kernel, cache, axis in [kind])


def _roofline(timed: list[dict]) -> Figure | None:
    """Both rates of a cold timing give its intensity: FLOP a second over bytes a second."""
    rates: dict[tuple, dict[str, float]] = {}
    for m in timed:
        if m["cache"] == "cold" and m["metric"] in ("bandwidth_gbs", "throughput_tflops"):
            key = m["kernel"], m["variant"], tuple(m["case"].items())
            rates.setdefault(key, {})[m["metric"]] = m["value"]
    points: dict[str, list[tuple[float, float]]] = {}
    for (_, variant, _), rate in rates.items():
        if len(rate) == 2 and rate["bandwidth_gbs"] > 0 and rate["throughput_tflops"] > 0:
            points.setdefault(variant, []).append((1e3 * rate["throughput_tflops"] / rate["bandwidth_gbs"],
                                                   rate["throughput_tflops"]))
    ceilings = {m["variant"]: m["value"] for m in timed if m["kernel"] == "ceilings"}
    if not points or "read" not in ceilings:
        return None
    every = [x for of in points.values() for x, _ in of]
    matrix = {name: ceilings[name] for name in ("bf16_matmul", "int8_matmul", "fp8_matmul") if name in ceilings}

    def draw(axes):
        ax = axes[0]
        x = np.geomspace(min(every) / 2, max(every) * 2)
        ax.loglog(x, x * ceilings["read"] / 1e3, color=_INK, lw=1)
        ax.annotate(f"read {ceilings['read']:,.0f} GB/s ", (x[16], x[16] * ceilings["read"] / 1e3), ha="right",
                    va="bottom", fontsize=7.5)
        for i, (name, value) in enumerate(sorted(matrix.items(), key=lambda item: item[1])):
            ax.axhline(value, color=_INK, lw=0.8, ls=":")
            ax.annotate(f"{name.replace('_', ' ')} {value:,.0f}", (x[0], value), va="top" if i == 0 else "bottom",
                        fontsize=7.5)
        for i, (variant, of) in enumerate(points.items()):
            ours = variant[0].isdigit()
            ax.loglog(*zip(*of, strict=True), _mark(list(points), variant), mfc=None if ours else "none", alpha=0.7,
                      ms=3.5, label=variant.replace("_", " "), color=_COLOURS[i % len(_COLOURS)])
        ax.set(xlabel="FLOP a byte", ylabel="TFLOP/s", ylim=(None, 2.5 * max([*matrix.values(), 1e-9, *(
            y for of in points.values() for _, y in of)])))
        ax.figure.legend(loc="outside right center", fontsize=7.5)

    return _figure(draw, f"Roofline of {len(every)} cold timings under this device's measured ceilings: read "
                   f"{ceilings['read']:,.0f} GB/s; best of ours {_best(points, True)}, of others "
                   f"{_best(points, False)}.", height=3.8, width=9.6)


def _best(points: dict[str, list[tuple]], ours: bool) -> str:
    rates: Iterable[float] = [y for variant, of in points.items() if variant[0].isdigit() is ours for _, y in of]
    return f"{max(rates):,.3g} TFLOP/s" if rates else "not measured"
