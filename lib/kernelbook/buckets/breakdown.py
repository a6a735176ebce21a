"""A trace taken apart: per pass and GPU, time in buckets, unbucketed and idle, which must add up to the wall time.

Overlapping kernels on several streams make a plain sum of times exceed the time that passed. So a bucket's time is the
length of the union of its launches' intervals, with the plain sum beside it, and what buckets share is taken off once:

    buckets + unbucketed + idle - overlap = wall

A table without a timeline has only plain sums; then idle time is known only against a wall time measured apart.
"""

import math
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace

from kernelbook.buckets import passes as counting
from kernelbook.buckets.passes import Passes
from kernelbook.buckets.rules import Rules
from kernelbook.buckets.trace import Activity, Gpu, Trace, length, union

TOLERANCE = 0.01
"""Of the wall time, by which the parts may miss it."""
UNBUCKETED = "unbucketed"


@dataclass(frozen=True)
class KernelTime:
    """One name's plain sum of times, ms a pass, and its launches a pass."""

    name: str
    sum_ms: float
    launches: float


@dataclass(frozen=True)
class Bucket:
    """time_ms: of the union of intervals, sum_ms: of the plain sum, both a pass; equal without a timeline.
    launches: kernels and copies a pass. kernels: the longest first."""

    name: str
    time_ms: float
    sum_ms: float
    launches: float
    kernels: tuple[KernelTime, ...]


@dataclass(frozen=True)
class Breakdown:
    """One GPU's part of a trace; times in ms a pass.

    buckets: those with any time, the longest first.   outside: what ran in none of the marked passes, in all.
    busy_ms: of the union of everything, or the plain sum where there is no timeline.
    overlap_ms: what the times of buckets share, to be taken off once.
    wall_ms, idle_ms: None where neither the trace nor the caller knows.
    unprofiled_ms: a pass without the profiler, where that was measured.
    """

    source: str
    format: str
    device: int | None
    gpu: Gpu | None
    passes: Passes
    timeline: bool
    buckets: tuple[Bucket, ...]
    unbucketed: Bucket
    outside: Bucket
    busy_ms: float
    overlap_ms: float
    wall_ms: float | None
    idle_ms: float | None
    unprofiled_ms: float | None
    limits: tuple[str, ...]
    warnings: tuple[str, ...]

    @property
    def sum_ms(self) -> float:
        """Plain sum of all times."""
        return self.unbucketed.sum_ms + sum(bucket.sum_ms for bucket in self.buckets)

    @property
    def residual_ms(self) -> float | None:
        """By how much the parts exceed the wall time; None where that is not known."""
        return None if self.wall_ms is None else self.busy_ms + self.idle_ms - self.wall_ms

    @property
    def closes(self) -> bool | None:
        """Whether the parts are the wall time within 1%. None where nothing can tell: without a wall time; without a
        timeline, since idle is then what the kernels leave of it, unless they exceed it."""
        if self.wall_ms is None:
            return None
        if abs(self.residual_ms) > TOLERANCE * self.wall_ms:
            return False
        return True if self.timeline else None

    @property
    def parts(self) -> dict[str, float]:
        """ms a pass by name, overlap as a negative part: what adds up to the wall time, or to busy_ms without one."""
        parts = {bucket.name: bucket.time_ms for bucket in self.buckets}
        if self.unbucketed.kernels:
            parts[UNBUCKETED] = self.unbucketed.time_ms
        if self.idle_ms is not None:
            parts["idle"] = self.idle_ms
        if self.overlap_ms:
            parts["overlap"] = -self.overlap_ms
        return parts

    @property
    def kernels(self) -> list[KernelTime]:
        """Every name of every bucket and of none, the longest first."""
        return sorted((kernel for bucket in (*self.buckets, self.unbucketed) for kernel in bucket.kernels),
                      key=lambda kernel: -kernel.sum_ms)

    def to_dict(self) -> dict:
        """All figures as plain data for JSON."""
        return {**asdict(self), "sum_ms": self.sum_ms, "residual_ms": self.residual_ms, "closes": self.closes}


def analyze(trace: Trace, rules: Rules, passes: str | Passes | None = None,
            wall_ms: float | None = None) -> list[Breakdown]:
    """A breakdown for each GPU of a trace.

    passes: how to count them, as `passes.count` takes it, or already counted.
    wall_ms: of one pass, measured apart (without the profiler); takes the place of the trace's own in the closure.
    Raises ValueError where passes cannot be counted so, for a wall time that is not above 0, and where nothing ran on
    any GPU within the marked passes.
    """
    if not isinstance(passes, Passes):
        passes = counting.count(trace, passes)
    if wall_ms is not None and not 0 < wall_ms < math.inf:
        raise ValueError(f"a wall time of {wall_ms!r} ms; expected one above 0")
    found = [_device(trace, rules, passes, wall_ms, device) for device in trace.devices]
    if not any(breakdown.kernels for breakdown in found):
        raise ValueError(f"{trace.source}: nothing ran on a GPU within the {passes.count} marks {passes.mark!r}: the "
                         "host did not wait for it; synchronize at the end of a pass, or count by a kernel")
    return found


def _device(trace: Trace, rules: Rules, passes: Passes, given_ms: float | None, device: int | None) -> Breakdown:
    activities = [activity for activity in trace.activities if activity.device == device]
    spans, outside = [], []
    if passes.mark:
        spans = counting.windows(trace, passes, device)
        activities, outside = _split(activities, spans)
    elif trace.timeline:
        spans = [(min(a.start_ns for a in activities), max(a.end_ns for a in activities))]

    in_ms = 1 / 1e6 / passes.count
    groups: dict[str, list[Activity]] = defaultdict(list)
    for name, group in _by_name(activities).items():
        groups[rules.bucket(name) or UNBUCKETED] += group
    busy_ns = _time_ns(activities, trace.timeline)
    overlap_ns = sum(_time_ns(group, trace.timeline) for group in groups.values()) - busy_ns
    unbucketed = _bucket(UNBUCKETED, groups.pop(UNBUCKETED, []), trace.timeline, passes.count)
    buckets = [_bucket(name, group, trace.timeline, passes.count) for name, group in groups.items()]

    if trace.timeline:
        wall_ms = in_ms * length(spans) if given_ms is None else given_ms
        covered = union([*spans, *((a.start_ns, a.end_ns) for a in activities)])
        idle_ms = in_ms * (length(covered) - busy_ns)
    else:
        wall_ms = given_ms
        idle_ms = None if given_ms is None else max(0.0, given_ms - in_ms * busy_ns)

    found = Breakdown(
        source=trace.source, format=trace.format, device=device, gpu=trace.gpus.get(device), passes=passes,
        timeline=trace.timeline, buckets=tuple(sorted(buckets, key=lambda bucket: -bucket.time_ms)),
        unbucketed=unbucketed, outside=_bucket("outside", outside, trace.timeline, passes=1), busy_ms=in_ms * busy_ns,
        overlap_ms=in_ms * overlap_ns, wall_ms=wall_ms, idle_ms=idle_ms,
        unprofiled_ms=None if trace.unprofiled_ns is None else trace.unprofiled_ns / 1e6, limits=trace.limits,
        warnings=())
    return replace(found, warnings=(*trace.warnings, *_warnings(found, given_ms)))


def _split(activities: list[Activity], spans: list[tuple[int, int]]) -> tuple[list[Activity], list[Activity]]:
    """Activities that start in one of the ordered spans, and the others."""
    starts = [start for start, _ in spans]
    inside, outside = [], []
    for activity in activities:
        before = bisect_right(starts, activity.start_ns) - 1
        (inside if before >= 0 and activity.start_ns < spans[before][1] else outside).append(activity)
    return inside, outside


def _by_name(activities: list[Activity]) -> dict[str, list[Activity]]:
    groups = defaultdict(list)
    for activity in activities:
        groups[activity.name].append(activity)
    return groups


def _bucket(name: str, activities: list[Activity], timeline: bool, passes: int) -> Bucket:
    in_ms = 1 / 1e6 / passes
    kernels = [KernelTime(kernel, in_ms * sum(a.total_ns for a in group), sum(a.count for a in group) / passes)
               for kernel, group in _by_name(activities).items()]
    return Bucket(name, in_ms * _time_ns(activities, timeline), in_ms * _time_ns(activities, timeline=False),
                  sum(kernel.launches for kernel in kernels),
                  tuple(sorted(kernels, key=lambda kernel: -kernel.sum_ms)))


def _time_ns(activities: list[Activity], timeline: bool) -> int:
    """Length of the union of intervals, or the plain sum where there are none."""
    if timeline:
        return length(union((a.start_ns, a.end_ns) for a in activities))
    return sum(a.total_ns for a in activities)


def _warnings(b: Breakdown, given_ms: float | None) -> list[str]:
    warnings = []
    if b.closes is False:
        far = f"{abs(b.residual_ms):.4g} ms, {100 * abs(b.residual_ms) / b.wall_ms:.1f}%"
        side = "above" if b.residual_ms > 0 else "below"
        why = ("the wall time given is of another run, or the profiler slowed this one" if b.timeline and given_ms
               else "kernels overlapped, or the wall time given is of another run" if not b.timeline
               else "kernels ran beyond the marks of their passes")
        warnings.append(f"the parts do not close: they are {far}, {side} the wall time of {b.wall_ms:.4g} ms a "
                        f"pass; {why}")
    if b.outside.kernels:
        warnings.append(f"{b.outside.launches:g} launches ({b.outside.sum_ms:.4g} ms in all) lie in none of the marks "
                        f"{b.passes.mark!r} and are in no bucket")
    if b.passes.assumed:
        warnings.append(f"passes were not counted but {b.passes.how}")
    uneven = [kernel for kernel in b.kernels if kernel.launches != int(kernel.launches)]
    if uneven:
        warnings.append(f"{len(uneven)} kernels did not run equally often in {b.passes.count} passes (such as "
                        f"{uneven[0].name[:60]}, {uneven[0].launches:.4g} a pass): another number of passes is right, "
                        "or there was work besides them")
    return warnings


@dataclass(frozen=True)
class Comparison:
    """One line of two tables side by side. ratio: a / b, None where b is 0. share: (a - b) over the difference of the
    totals, None where the totals do not differ."""

    name: str
    a: float
    b: float
    ratio: float | None
    share: float | None


def compare(a: Mapping[str, float], b: Mapping[str, float],
            totals: tuple[float, float] | None = None) -> list[Comparison]:
    """Two engines' times by bucket side by side, in the order of a, the total last.

    totals: of a and b where they are known apart from the parts; what the parts then leave, or exceed, is the line
    "rest". Breakdown.parts gives such tables; compare only those of equal work.
    """
    total_a, total_b = totals or (sum(a.values()), sum(b.values()))
    rest = total_a - sum(a.values()), total_b - sum(b.values())
    lines = {name: (a.get(name, 0.0), b.get(name, 0.0)) for name in (*a, *(name for name in b if name not in a))}
    if any(abs(r) > 1e-9 * abs(total) for r, total in zip(rest, (total_a, total_b), strict=True)):
        lines["rest"] = rest
    lines["total"] = total_a, total_b
    gap = total_a - total_b
    return [Comparison(name, x, y, x / y if y else None, (x - y) / gap if gap else None)
            for name, (x, y) in lines.items()]


def side_by_side(a: Breakdown, b: Breakdown) -> list[Comparison]:
    """`compare` of two breakdowns: of their wall times where both are known, else of their time on the GPU."""
    walls = a.wall_ms is not None and b.wall_ms is not None
    parts = [{name: ms for name, ms in x.parts.items() if walls or name != "idle"} for x in (a, b)]
    return compare(*parts, totals=(a.wall_ms, b.wall_ms) if walls else (a.busy_ms, b.busy_ms))


def amdahl(parts: Mapping[str, float], speedups: Mapping[str, float]) -> float:
    """How much faster the whole gets where parts get faster by `speedups` (infinity: free), the others staying.

    Raises ValueError for a part that is not there, a speedup that is not above 0, and where everything is free.
    """
    for name, speedup in speedups.items():
        if name not in parts:
            raise ValueError(f"no part {name!r} to speed up; there are {', '.join(parts)}")
        if not speedup > 0:
            raise ValueError(f"a speedup of {speedup!r} for {name!r}; expected one above 0")
    left = sum(time / speedups.get(name, 1.0) for name, time in parts.items())
    if left <= 0:
        raise ValueError("with every part free no time is left, and no bound")
    return sum(parts.values()) / left
