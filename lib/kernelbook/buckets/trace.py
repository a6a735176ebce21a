"""One form for the traces of every profiler: what ran on which GPU, how often, and for how long."""

from collections.abc import Iterable
from dataclasses import dataclass, field

KERNEL, COPY, SET, GRAPH = "kernel", "copy", "set", "graph"
"""Kinds of activity. A GRAPH is a whole CUDA graph of which the trace does not say what ran in it."""


@dataclass(frozen=True, slots=True)
class Activity:
    """Work on a GPU: one launch where the trace has a timeline, else all launches of one name.

    total_ns: of all `count` launches, as a plain sum.
    start_ns: on the trace's own clock; None in tables that only add up.
    device, stream: None where the trace does not say.
    """

    name: str
    total_ns: int
    count: int = 1
    start_ns: int | None = None
    device: int | None = None
    stream: int | None = None
    kind: str = KERNEL

    @property
    def end_ns(self) -> int | None:
        return None if self.start_ns is None else self.start_ns + self.total_ns


@dataclass(frozen=True, slots=True)
class Mark:
    """A span that the program named (record_function, NVTX): on the host, or, with a `device`, from the start of the
    first to the end of the last kernel that was launched in it."""

    name: str
    start_ns: int
    end_ns: int
    device: int | None = None


@dataclass(frozen=True)
class Gpu:
    name: str
    multiprocessors: int | None = None


@dataclass(frozen=True)
class Trace:
    """What a profiler saw.

    source: the file, or "live".   format: whose, in words.
    gpus: by the number that activities have as `device`, where the trace describes them.
    limits: what traces of this format cannot know.   warnings: what is wrong with this one.
    unprofiled_ns: a pass without the profiler, by the host's clock, where that was measured.
    """

    source: str
    format: str
    activities: tuple[Activity, ...]
    marks: tuple[Mark, ...] = ()
    gpus: dict[int, Gpu] = field(default_factory=dict)
    limits: tuple[str, ...] = ()
    warnings: tuple[str, ...] = ()
    unprofiled_ns: float | None = None

    @property
    def timeline(self) -> bool:
        """Whether it says when each activity ran; without, overlap and idle time cannot be told."""
        return all(activity.start_ns is not None for activity in self.activities)

    @property
    def devices(self) -> list[int | None]:
        found = {activity.device for activity in self.activities}
        return sorted(found, key=lambda device: -1 if device is None else device)


def union(spans: Iterable[tuple[int, int]]) -> list[tuple[int, int]]:
    """The spans (start, end) with those that overlap or touch made one, in order."""
    merged: list[tuple[int, int]] = []
    for start, end in sorted(spans):
        if merged and start <= merged[-1][1]:
            merged[-1] = merged[-1][0], max(end, merged[-1][1])
        else:
            merged.append((start, end))
    return merged


def length(spans: Iterable[tuple[int, int]]) -> int:
    return sum(end - start for start, end in spans)


def short_name(name: str) -> str:
    """A kernel's bare name: "mul_mat_q" of "void mul_mat_q<(ggml_type)2, (int)128, (bool)0>(char const*, int)"."""
    bare = name.replace("(anonymous namespace)::", "")
    for bracket in "<(":
        bare = bare.split(bracket, 1)[0]
    return bare.strip().split(" ")[-1].split("::")[-1] or name
