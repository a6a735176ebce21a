"""Explorers for use in JupyterLab that remain still pictures where nothing is live.

An explorer displays itself as the widget and, in the same output, as a picture in HTML. A live front end shows the
first; a page made of the notebook (`kernelbook.report`) has nobody to answer a widget and shows the second.
"""

import html
import math
import threading
from collections.abc import Mapping, Sequence

import ipywidgets as widgets
import numpy as np
from matplotlib.ticker import FormatStrFormatter, NullFormatter

from kernelbook import formats, lane_plots, measure, records, toolchain
from kernelbook.backends import Backend, Source
from kernelbook.buckets import Breakdown, amdahl, article
from kernelbook.experiments import Lab, grouped_gemm, prefill_buckets
from kernelbook.fragments import INSTRUCTIONS, LOADS, Tokens
from kernelbook.ops import grouped_gemm as op
from kernelbook.plots import _COLOURS, Figure, _figure
from kernelbook.prefill_plots import _BUCKETS, _OTHER
from kernelbook.shapes import Projection

FIRST = "mmac_i32_16x16x32_i8"  # the article's instruction, which the still picture shows


class Explorer(widgets.VBox):
    """Controls, and below them the picture of what they describe.

    A kind of explorer gives `_figures`, which raises ValueError for a choice that cannot be: the reason is then shown
    in place of the picture. Where one control bounds or sets another, `_settle` does that first.
    """

    def __init__(self, controls: Sequence[widgets.Widget]):
        self._drawing = threading.RLock()
        self._controls = controls
        self._drawn = None
        self.picture = widgets.HTML()
        super().__init__([*controls, self.picture])
        for control in controls:
            control.observe(self._draw, "value")
        self._draw()

    def _settle(self) -> None:
        """Bring controls in line with one another."""

    def _figures(self) -> Sequence[Figure]:
        raise NotImplementedError

    def _draw(self, change=None):
        # JupyterLab may have two changes handled at once, in threads: the later picture must be of the later choice.
        with self._drawing:
            self._settle()  # draws where it changes a control
            choice = [control.value for control in self._controls]
            if choice == self._drawn:
                return
            try:
                figures = self._figures()
            except ValueError as refusal:
                self.text = str(refusal)
                self.picture.value = f'<p role="alert">{html.escape(self.text)}</p>'
            else:
                self.text = "\n".join(map(repr, figures))
                self.picture.value = "".join(figure._repr_html_() for figure in figures)
            self._drawn = choice

    def _repr_mimebundle_(self, **kwargs):
        return {**super()._repr_mimebundle_(**kwargs), "text/html": self.picture.value, "text/plain": self.text}


# ---------------------------------------------------------------- lane maps

class LaneMap(Explorer):
    """Made by `lane_map`."""

    def __init__(self):
        self.instruction = widgets.Dropdown(options=list(INSTRUCTIONS), value=FIRST, description="instruction")
        self.operand = widgets.Dropdown(options=["A", "B"], value="B", description="V is")
        self.load = widgets.Dropdown(options=LOADS, value=max(LOADS), description="load, bytes")
        self.lane = widgets.IntSlider(value=0, min=0, description="lane", continuous_update=False)
        super().__init__([self.instruction, self.operand, self.load, self.lane])

    def _settle(self):
        self.lane.max = INSTRUCTIONS[self.instruction.value].lanes - 1  # a lane beyond it becomes the last

    def _figures(self):
        tokens = Tokens(INSTRUCTIONS[self.instruction.value], self.load.value, self.operand.value)
        return lane_plots.ownership(tokens), lane_plots.load_path(tokens, self.lane.value)


def lane_map() -> LaneMap:
    """An explorer of who loads and who multiplies which token of V.

    Choose the instruction, the operand that V is, the bytes a lane loads at once and a lane: above the tokens of each
    step and the scales that grouping neighbouring tokens would give them, below what the lane loads. A choice that
    cannot be (V in an unsigned operand) shows why in place of the picture.
    """
    return LaneMap()


# ---------------------------------------------------------------- slices of K

BLOCK_THREADS = op.THREADS_N * op.THREADS_M
WEIGHTS = 1 << 30  # at most, a byte each: what two copies of leave room for on any GPU that the notebook runs on
COPIES = 512  # of the weights, at most, that a cold measurement goes through
H200 = {"name": "an H200", "arch": "90a", "multiprocessors": 132}
_REGISTERS = 1 << 16  # of a multiprocessor
_THREADS = {"75": 1024} | dict.fromkeys(("86", "87", "89", "120", "121"), 1536)  # of a multiprocessor, else 2048


def resident_blocks(registers: int, arch: str = H200["arch"], threads: int = BLOCK_THREADS) -> int:
    """Blocks of `threads` threads, `registers` each, that a multiprocessor of an NVIDIA GPU holds at once.

    No shared memory is counted: the kernels of grouped_gemm have none. arch: as NVRTC calls it, such as "90a".
    """
    a_warp = 32 * (-(-registers // 8) * 8)  # handed out in units of 8 for each of 32 lanes
    warps = threads // 32
    return min(_REGISTERS // (a_warp * warps), _THREADS.get(arch, 2048) // threads)


class SplitK(Explorer):
    """Made by `split_k`."""

    def __init__(self, lab: Lab, first: Projection):
        self._lab = lab
        self._weights = None  # on the device, of the shape that was timed last
        self.m = widgets.SelectionSlider(options=[2**i for i in range(10)], description="M", continuous_update=False)
        self.n = widgets.BoundedIntText(value=first.n, min=1, max=1 << 18, description="N")
        self.k = widgets.BoundedIntText(value=first.k, min=1, max=1 << 16, description="K")
        self.group = widgets.Dropdown(options=[16, 32, 64, 128], value=32, description="group")
        self.rule = widgets.Checkbox(value=True, description="nsplit by the split rule")
        self.nsplit = widgets.IntSlider(min=1, max=1, description="nsplit", continuous_update=False)
        super().__init__([self.m, self.n, self.k, self.group, self.rule, self.nsplit])

    def _settle(self):
        m, n, groups = self.m.value, self.n.value, self.k.value // self.group.value
        self.nsplit.max = max(1, min(groups, op.PARTIAL_CAP_BYTES // (4 * m * n)))
        self.nsplit.disabled = self.rule.value
        if self.rule.value:
            self.nsplit.value = op.choose_nsplit(m, n, groups)

    def _figures(self):
        m, n, k, group = self.m.value, self.n.value, self.k.value, self.group.value
        if k % group:
            raise ValueError(f"K = {k} is no multiple of the group of {group}: the kernels take whole groups only")
        if n * k > WEIGHTS:
            raise ValueError(f"N x K = {n * k:,} weights; expected at most {WEIGHTS:,}")
        name, multiprocessors, resident = self._device(group)
        most = "up to " if self._lab.backend.name == "hip" else ""
        x, y = op.blocks_xy(m, n, remap=True)
        groups = k // group
        nsplit, rule = self.nsplit.value, op.choose_nsplit(m, n, groups)
        every = range(1, self.nsplit.max + 1)
        waves = {s: x * y * s / (multiprocessors * resident) for s in every}
        longest = {s: -(-groups // s) for s in every}  # groups of the longest slice, in turn in each of its threads
        in_turn = {s: math.ceil(waves[s]) * longest[s] for s in every}
        times, clock = self._times(m, n, k, group, {nsplit, rule} | {2**i for i in range(12) if 2**i in every})
        panels = {"waves of blocks": waves, "groups one after another": in_turn}
        if times:
            panels["us a call, cold"] = {s: t.median for s, t in times.items()}

        def draw(axes):
            for ax, (title, values) in zip(axes, panels.items(), strict=True):
                ax.plot(list(values), list(values.values()), "o-" if len(values) < 20 else "-")
                for marked, style in ((nsplit, {"marker": "o", "ms": 8, "color": _COLOURS[1]}),
                                      (rule, {"marker": "D", "ms": 9, "mfc": "none", "color": "#c03434"})):
                    if marked in values:
                        ax.plot(marked, values[marked], **style)
                ax.set(title=title, xscale="log", yscale="log", xlabel="nsplit")
                for axis in (ax.xaxis, ax.yaxis):
                    axis.set_major_formatter(FormatStrFormatter("%g"))
                    axis.set_minor_formatter(NullFormatter())
            axes[0].axhline(1, ls="--", lw=1, color="#7a7f87")
            if times:
                axes[2].fill_between(list(times), [t.p10 for t in times.values()], [t.p90 for t in times.values()],
                                     alpha=0.3, lw=0)

        told = f" (the split rule has {rule})" if nsplit != rule else ", as the split rule has it"
        rounds = math.ceil(waves[nsplit])
        return [_figure(draw, (
            f"M = {m}, N = {n}, K = {k}, groups of {group}, nsplit {nsplit}{told}: {x} x {y} x {nsplit} = "
            f"{x * y * nsplit:,} blocks, {waves[nsplit]:.2f} waves on {name}, whose {multiprocessors} multiprocessors "
            f"hold {most}{resident} blocks each; the longest slice has {longest[nsplit]} of {groups} groups, which "
            f"with {rounds} wave{'s'[:rounds > 1]} makes {in_turn[nsplit]} one after another; {clock}. Dot: this "
            "nsplit. Diamond: the rule's. Dashed: one full wave."), columns=len(panels), height=2.8)]

    def _device(self, group: int) -> tuple[str, int, int]:
        """Whose waves are counted: its name, its multiprocessors, and the blocks that each of them holds."""
        backend: Backend = self._lab.backend
        if backend.name == "hip":  # a compute unit holds 2048 lanes; registers may leave room for fewer
            return backend.device, backend.multiprocessors, 2048 // BLOCK_THREADS
        name, arch, multiprocessors = ((backend.device, backend.arch, backend.multiprocessors) if self._lab.timed else
                                       H200.values())
        log = toolchain.nvrtc_compile(Source(*op.source("float", group)), arch)[1]
        return name, multiprocessors, resident_blocks(toolchain.resources(log)["grouped_gemm_float"]["registers"], arch)

    def _times(self, m: int, n: int, k: int, group: int,
               nsplits: set[int]) -> tuple[dict[int, measure.Timing], str]:
        """Cold times by nsplit, of those whose result is right, and what is to be said of them."""
        if not self._lab.timed:
            return {}, "simulated, not timed"
        backend = self._lab.backend
        if measure.rotation(formats.padded(n) * k, backend.l2_bytes) > COPIES:
            return {}, "not timed, since so few weights would be read from the L2"
        # What is tried out is of the moment and not of the run: it goes into a record that nobody saves.
        record = records.Record(self._lab.record.notebook, {}, self._lab.record.environment)
        lab = Lab(backend, record, self._lab.seed)
        kept = self._weights and self._weights.strips
        if kept is None or (kept.n, kept.k, kept.group) != (n, k, group):
            self._weights = None  # the last ones go before the next ones come
            self._weights = grouped_gemm._Weights(lab, grouped_gemm.random_strips(lab.rng(9, n, k), n, k, group))
        self._weights.lab = lab
        bench = grouped_gemm._Bench(self._weights, m)
        right = [s for s in sorted(nsplits) if bench.check(nsplit=s)]
        times = measure.device_times({s: bench.calls(nsplit=s) for s in right}, rounds=10, budget_s=0.5)
        told = [f"{times[s]} at nsplit {s}" if s in times else f"wrong result at nsplit {s}" for s in sorted(nsplits)]
        return times, ", ".join(told)


def split_k(lab: Lab, first: Projection) -> SplitK:
    """An explorer of how M, N, K, the group and nsplit make the grid of a product on float activations.

    first: the shape that it opens on, with one row (M = 1).
    Beside each other against nsplit: the waves in which a device takes the blocks, the groups that are then multiplied
    one after another, and on a GPU the time, cold, of those nsplits whose result is right. Without a GPU the waves are
    those of an H200, simulated and not timed. A shape that the kernels do not take shows why in place of the picture.
    """
    return SplitK(lab, first)


# ---------------------------------------------------------------- Amdahl's ceiling

class Amdahl(Explorer):
    """Made by `amdahl_ceiling`."""

    def __init__(self, breakdown: Breakdown | None):
        printed = {line.name: line.a for line in article.tables().comparison() if line.name != "total"}
        self._tables: dict[str, Mapping[str, float]] = {"the article": printed}
        if breakdown:
            self._tables["this machine"] = breakdown.parts
        style = {"continuous_update": False, "base": 10, "min": 0, "max": 2, "step": 0.02, "readout_format": ".2f"}
        self.gemm = widgets.FloatLogSlider(value=prefill_buckets.probe_gain(), description="GEMM, x", **style)
        self.gdn = widgets.FloatLogSlider(value=1, description="GDN, x", **style)
        self.free = widgets.Checkbox(value=True, description="everything else is free")
        super().__init__([self.gemm, self.gdn, self.free])

    def _bound(self, parts: Mapping[str, float], gemm: float) -> float:
        rest = {part: math.inf for part in parts if part not in ("GEMM", "GDN")} if self.free.value else {}
        return amdahl(parts, rest | {"GEMM": gemm, "GDN": self.gdn.value})

    def _left(self, parts: Mapping[str, float]) -> dict[str, float]:
        """What each part takes once it is sped up, in the unit of `parts`."""
        faster = {"GEMM": self.gemm.value, "GDN": self.gdn.value}
        return {name: time / faster.get(name, math.inf if self.free.value else 1) for name, time in parts.items()}

    def _figures(self):
        gains = np.geomspace(1, 100, 80)
        bounds = {name: self._bound(parts, self.gemm.value) for name, parts in self._tables.items()}
        ceilings = {name: self._bound(parts, math.inf) for name, parts in self._tables.items()}

        def draw(axes):
            bars = {f"{name},\n{what}": (table, sum(parts.values())) for name, parts in self._tables.items()
                    for what, table in (("as it is", parts), ("sped up", self._left(parts)))}
            names = list(dict.fromkeys(part for table, _ in bars.values() for part, ms in table.items() if ms > 0))
            left = np.zeros(len(bars))
            for part in names:  # what buckets share, the overlap, is negative and has no bar
                width = np.array([100 * table.get(part, 0) / whole for table, whole in bars.values()])
                axes[0].barh(list(bars), width, left=left, height=0.65, label=part, color=_BUCKETS.get(part, _OTHER))
                left += width
            for i, gain in enumerate(bounds.values()):
                axes[0].annotate(f"{gain:.2f}x", (left[2 * i + 1] + 2, 2 * i + 1), va="center")
            axes[0].invert_yaxis()
            axes[0].grid(axis="y", visible=False)
            axes[0].set(xlabel="% of the pass as it is")
            for (name, parts), colour in zip(self._tables.items(), _COLOURS, strict=False):
                axes[1].plot(gains, [self._bound(parts, gain) for gain in gains], color=colour, label=name)
                axes[1].axhline(ceilings[name], ls="--", lw=1, color=colour)
                axes[1].plot(self.gemm.value, bounds[name], "o", ms=8, color=colour)
            axes[1].axhline(prefill_buckets.ARTICLE_BOUND, ls=":", lw=1, color="#7a7f87")
            axes[1].set(xscale="log", ylim=(0, None), xlabel="GEMM, times faster", ylabel="the pass, times faster")
            axes[1].xaxis.set_major_formatter(FormatStrFormatter("%g"))
            for ax, across in zip(axes, (len(names), 2), strict=True):
                ax.legend(loc="lower left", bbox_to_anchor=(0, 1), ncols=min(across, 3), fontsize=8)

        words = "; ".join(f"{name} {bounds[name]:.2f}x, and {ceilings[name]:.2f}x were GEMM free"
                          for name in self._tables)
        return [_figure(draw, f"GEMM {self.gemm.value:.2f} times as fast, GDN {self.gdn.value:.2f} times, everything "
                        f"else {'free' if self.free.value else 'as it is'}. The whole pass by Amdahl's law: {words}. "
                        f"Dashed: those ceilings. Dotted: the article's {prefill_buckets.ARTICLE_BOUND}x.",
                        columns=2, height=2.2 + 0.6 * len(self._tables))]


def amdahl_ceiling(breakdown: Breakdown | None = None) -> Amdahl:
    """An explorer of what a faster bucket does for the whole pass, by Amdahl's law.

    Choose how many times as fast GEMM and GDN get, and whether everything else is free: on the left the buckets before
    and after, on the right the pass's gain against GEMM's, and the ceiling that it nears. On the article's table, and
    on this machine's where `breakdown` has it. It opens on the best gain of the article's probe.
    """
    return Amdahl(breakdown)
