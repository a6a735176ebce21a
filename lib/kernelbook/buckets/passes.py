"""How many passes a trace covers: counted from it wherever it can be, and never assumed without saying so."""

import math
import re
from collections import Counter
from dataclasses import dataclass

from kernelbook.buckets.trace import KERNEL, Activity, Mark, Trace, union

PASS = "pass"
"""The mark that `buckets.profile` sets around each pass."""
AUTOMATIC = PASS, "ProfilerStep"
"""Marks that count passes without being asked for; torch.profiler's step() sets the second."""


@dataclass(frozen=True)
class Passes:
    """`count` passes; `how` says in words what that rests on.

    assumed: whether it is an inference from launch counts rather than a count of passes.
    mark: the name of the marks that bound the passes, where it has some.
    """

    count: int
    how: str
    assumed: bool = False
    mark: str | None = None


def count(trace: Trace, how: str | None = None) -> Passes:
    """The passes of a trace.

    how: a number that the user states; "mark:NAME", one pass a mark; "kernel:REGEX", one pass a launch of the kernels
    with the regular expression in their name, and "kernel*16:REGEX" one pass 16 launches; None takes the marks of
    `profile` or of torch.profiler's steps, and else the greatest common divisor of all launch counts, as an assumption.

    Raises ValueError for another `how`, marks or kernels that are not there, and launches that are not so many a pass.
    """
    if how is None:
        names = {mark_name(mark) for mark in trace.marks}
        automatic = next((name for name in AUTOMATIC if name in names), None)
        return _by_mark(trace, automatic) if automatic else _by_common_divisor(trace)
    if re.fullmatch(r"\d+", how):
        if int(how) < 1:
            raise ValueError(f"{how} passes; expected at least 1")
        return Passes(int(how), "as stated, not counted")
    if match := re.fullmatch(r"mark:(.+)", how):
        return _by_mark(trace, match[1])
    if match := re.fullmatch(r"kernel(?:\*([1-9]\d*))?:(.+)", how):
        return _by_kernel(trace, match[2], int(match[1] or 1))
    raise ValueError(f"passes {how!r}; expected a number, mark:NAME, kernel:REGEX, or kernel*N:REGEX for N launches a "
                     "pass")


def windows(trace: Trace, passes: Passes, device: int | None) -> list[tuple[int, int]]:
    """When the passes ran on a GPU, (start, end) in ns each, as its marks say.

    The program's own span of a pass, which includes what it waits for, where the GPU's work of that span lies within
    it; else, where the host ran ahead, the span of the GPU's work. Raises ValueError where marks overlap.
    """
    named = [mark for mark in trace.marks if mark_name(mark) == passes.mark]
    host = sorted((mark.start_ns, mark.end_ns) for mark in named if mark.device is None)
    # a mark has a span on each stream that it launched to; together they are the pass
    gpu = union((mark.start_ns, mark.end_ns) for mark in named if mark.device == device and device is not None)
    if host and (not gpu or all(any(a <= start and end <= b for a, b in host) for start, end in gpu)):
        for before, after in zip(host, host[1:], strict=False):
            if after[0] < before[1]:
                raise ValueError(f"{trace.source}: marks {passes.mark!r} overlap (one from {before[0]} to {before[1]} "
                                 f"ns, the next from {after[0]}), so they are not passes; count by another mark "
                                 "or by a kernel")
        return host
    if gpu and len(gpu) != passes.count:
        raise ValueError(f"{trace.source}: {passes.count} marks {passes.mark!r}, but {len(gpu)} stretches of their "
                         f"work on GPU {device}: passes overlap there; synchronize between passes, or count by "
                         "a kernel")
    return gpu


def mark_name(mark: Mark) -> str:
    """A mark's name without a number of its own: "ProfilerStep" of "ProfilerStep#12"."""
    return re.sub(r"#\d+$", "", mark.name)


def _by_mark(trace: Trace, name: str) -> Passes:
    spans = Counter(mark.device for mark in trace.marks if mark_name(mark) == name)
    found = spans[None] or max(spans.values(), default=0)  # the GPU's alone where the host was not traced
    if not found:
        names = sorted({mark_name(mark) for mark in trace.marks})
        listed = f"it has {', '.join(names[:12])}{', ...' if len(names) > 12 else ''}" if names else "it has no marks"
        raise ValueError(f"{trace.source}: no mark {name!r}; {listed}")
    return Passes(found, f"marks {name!r}", mark=name)


def _by_kernel(trace: Trace, pattern: str, per_pass: int) -> Passes:
    try:
        regex = re.compile(pattern)
    except re.error as error:
        raise ValueError(f"the pattern {pattern!r} to count passes by is no regular expression: {error}") from None
    launches = Counter()
    for activity in trace.activities:
        if regex.search(activity.name):
            launches[activity.device] += activity.count
    if not launches:
        raise ValueError(f"{trace.source}: no kernel has {pattern!r} in its name; the longest running are "
                         f"{', '.join(_longest(trace))}")
    if len(set(launches.values())) > 1:
        raise ValueError(f"{trace.source}: {pattern!r} ran a different number of times on its GPUs: "
                         f"{dict(sorted(launches.items()))}; count by another kernel")
    total = next(iter(launches.values()))
    if total % per_pass:
        raise ValueError(f"{trace.source}: {total} launches of {pattern!r} are no multiple of the {per_pass} a pass; "
                         "the trace holds part of a pass, or another number is right")
    return Passes(total // per_pass, f"{total} launches of {pattern!r}, {per_pass} a pass")


def _by_common_divisor(trace: Trace) -> Passes:
    launches: Counter = Counter()
    for activity in trace.activities:
        if activity.kind == KERNEL:
            launches[activity.device, activity.name] += activity.count
    if not launches:
        return Passes(1, "assumed, since no kernel is in the trace to count by", assumed=True)
    divisor = math.gcd(*launches.values())
    if divisor == 1:
        return Passes(1, f"assumed, since the launch counts of {len(launches)} kernels have no common divisor; if the "
                         "trace covers several passes, say how to count them", assumed=True)
    how = (f"assumed, being the greatest common divisor of the launch counts of {len(launches)} kernels; right if one "
           "of them runs once a pass")
    if trace.timeline:
        repeated = all(_repeats([a.name for a in sorted(_kernels(trace, device), key=lambda a: a.start_ns)], divisor)
                       for device in trace.devices)
        how += f"; their order {'repeats' if repeated else 'does not repeat'} {divisor} times"
    return Passes(divisor, how, assumed=True)


def _kernels(trace: Trace, device: int | None) -> list[Activity]:
    return [a for a in trace.activities if a.device == device and a.kind == KERNEL]


def _repeats(names: list[str], times: int) -> bool:
    """Whether the names are one sequence `times` over."""
    period, rest = divmod(len(names), times)
    return not rest and names == names[:period] * times


def _longest(trace: Trace, n: int = 5) -> list[str]:
    totals: Counter = Counter()
    for activity in trace.activities:
        totals[activity.name] += activity.total_ns
    return [name[:60] for name, _ in totals.most_common(n)]
