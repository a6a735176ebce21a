"""Nsight Systems' SQLite export: `nsys export --type sqlite REPORT.nsys-rep`."""

import contextlib
import sqlite3
from collections.abc import Iterator
from pathlib import Path

from kernelbook.buckets.trace import COPY, GRAPH, KERNEL, SET, Activity, Gpu, Mark, Trace

FORMAT = "Nsight Systems SQLite export"
MAGIC = b"SQLite format 3\0"
_COPY_KINDS = {1: "HtoD", 2: "DtoH", 3: "HtoA", 4: "AtoH", 5: "AtoA", 6: "AtoD", 7: "DtoA", 8: "DtoD", 9: "HtoH",
               10: "PtoP"}  # as CUPTI numbers them


def read(path: Path, source: str) -> Trace | None:
    """The trace in a database; None where it is no export of Nsight Systems.

    Raises ValueError for a damaged database, an export without CUDA activity, and an activity that ends before it
    starts or never.
    """
    try:
        with contextlib.closing(sqlite3.connect(f"{path.resolve().as_uri()}?mode=ro", uri=True)) as database:
            database.row_factory = sqlite3.Row
            tables = {row["name"] for row in database.execute("SELECT name FROM sqlite_master WHERE type = 'table'")}
            if not ("StringIds" in tables or any(name.startswith("CUPTI_ACTIVITY_") for name in tables)):
                return None
            return _trace(_Export(database, tables, source))
    except sqlite3.DatabaseError as error:
        raise ValueError(f"{source}: the SQLite database is damaged or cut ({error}); export it again") from None


class _Export:
    """The database's tables, of which any may be missing: Nsight Systems writes those that have rows."""

    def __init__(self, database: sqlite3.Connection, tables: set[str], source: str):
        self.database, self.tables, self.source = database, tables, source

    def rows(self, table: str) -> Iterator[dict]:
        if table in self.tables:
            yield from map(dict, self.database.execute(f'SELECT * FROM "{table}"'))

    def activities(self, table: str, kind: str, name) -> Iterator[Activity]:
        for row in self.rows(f"CUPTI_ACTIVITY_KIND_{table}"):
            start, end = row["start"], row["end"]
            if start is None or end is None or end < start:
                raise ValueError(f"{self.source}: {name(row)} in CUPTI_ACTIVITY_KIND_{table} runs from {start} to "
                                 f"{end} ns; the recording was cut short or damaged")
            yield Activity(name(row), end - start, 1, start, row.get("deviceId"), row.get("streamId"), kind)


def _trace(export: _Export) -> Trace:
    strings = {row["id"]: row["value"] for row in export.rows("StringIds")}

    def kernel(row):
        name = row.get("demangledName", row.get("shortName"))
        return strings.get(name, f"kernel of unknown name {name}")

    activities = [
        *export.activities("KERNEL", KERNEL, kernel),
        *export.activities("MEMCPY", COPY, lambda row: f"Memcpy {_COPY_KINDS.get(row['copyKind'], row['copyKind'])}"),
        *export.activities("MEMSET", SET, lambda row: "Memset"),
        *export.activities("GRAPH_TRACE", GRAPH, lambda row: f"CUDA graph {row.get('graphId', '')}".strip()),
    ]
    if not activities:
        raise ValueError(f"{export.source}: an export of Nsight Systems without CUDA kernels, copies or graphs; record "
                         "with --trace=cuda. Its tables: " + (", ".join(sorted(export.tables)) or "none"))
    marks = []
    for row in export.rows("NVTX_EVENTS"):
        name = row.get("text") or strings.get(row.get("textId"))
        if name and row["end"] is not None:  # else a point in time, or a range that was still open
            marks.append(Mark(name, row["start"], row["end"]))
    gpus = {row["id"]: Gpu(row["name"], row.get("smCount")) for row in export.rows("TARGET_INFO_GPU")}
    return Trace(export.source, FORMAT, tuple(activities), tuple(marks), gpus, warnings=_graph_warning(activities))


def _graph_warning(activities: list[Activity]) -> tuple[str, ...]:
    graphs = [activity for activity in activities if activity.kind == GRAPH]
    if not graphs:
        return ()
    time_ms = sum(graph.total_ns for graph in graphs) / 1e6
    return (f"{len(graphs)} launches of CUDA graphs ({time_ms:.4g} ms in all) were traced whole: the kernels in them "
            "are in no bucket and are not counted; record with --cuda-graph-trace=node",)
