"""Tables in CSV: Nsight Systems' cuda_gpu_kern_sum, Nsight Compute's details, rocprof's stats.

A profiler prints such a table among other lines, so a table starts where a known header stands; what neither belongs
to a header nor looks like a row is chatter.
"""

import csv
import re
from collections.abc import Iterator
from dataclasses import dataclass, field

from kernelbook.buckets.trace import COPY, KERNEL, SET, Activity, Trace

_UNITS_NS = {
    **dict.fromkeys(("ns", "nsec", "nsecond", "nanosecond", "nanoseconds"), 1),
    **dict.fromkeys(("us", "usec", "usecond", "microsecond", "microseconds", "\u00b5s", "\u03bcs"), 10**3),
    **dict.fromkeys(("ms", "msec", "msecond", "millisecond", "milliseconds"), 10**6),
    **dict.fromkeys(("s", "sec", "second", "seconds"), 10**9),
}
_NUMBER = re.compile(r"(\d+|\d{1,3}(,\d{3})+)(\.\d+)?(e[+-]?\d+)?", re.I)
_ROW = re.compile(r'\s*["\d]')
_COPY = re.compile(r"\[CUDA (?:(?P<set>memset)|memcpy (?P<cuda>.*))\]|(?:MEMORY_COPY_|Copy)(?P<rocm>\w+To\w+)", re.I)
_KERNEL_DESCRIPTOR = re.compile(r"( \[clone \.kd\]|\.kd)$")  # which rocprof appends to a kernel's name
NCU_DURATION = ("Duration", "gpu__time_duration.sum")

NSYS = "Nsight Systems cuda_gpu_kern_sum CSV"
NCU = "Nsight Compute details CSV"
ROCPROF = "rocprof stats CSV"


@dataclass
class _Table:
    kind: str
    columns: list[str]
    line: int
    rows: list[tuple[int, dict[str, str]]] = field(default_factory=list)


def read(text: str, source: str) -> Trace | None:
    """The trace in `text`; None where no known table is in it.

    Raises ValueError, naming the line, for a table without rows, a row that is cut or has no number where one
    belongs, an unknown unit, and two tables that both list all kernels.
    """
    found: dict[str, list[_Table]] = {}
    for table in _tables(text, source):
        found.setdefault(table.kind, []).append(table)
    if not found:
        return None
    for kind, tables in found.items():
        if len(tables) > 1:
            raise ValueError(f"{source}: lines {' and '.join(str(t.line) for t in tables)} each start a table of all "
                             f"{'copies' if kind == 'copies' else 'kernels'}, which would count them twice; keep one")
    profilers = [kind for kind in found if kind != "copies"]
    if not profilers:
        raise ValueError(f"{source}: a table of copies (line {found['copies'][0].line}) and none of kernels; add the "
                         "report cuda_gpu_kern_sum")
    if len(profilers) > 1:
        raise ValueError(f"{source}: tables of {' and of '.join(profilers)} in one file; keep one")
    main = found[profilers[0]][0]
    if not main.rows:
        raise ValueError(f"{source}: the header in line {main.line} has no rows below it: no kernel was traced, or the "
                         "file is cut")
    return {NSYS: _nsys, NCU: _ncu, ROCPROF: _rocprof}[main.kind](main, found.get("copies", []), source)


def _tables(text: str, source: str) -> Iterator[_Table]:
    table = None
    for number, line in enumerate(text.splitlines(), 1):
        try:
            fields = next(csv.reader([line], strict=True, skipinitialspace=True), [])
        except csv.Error:
            if table is not None and _ROW.match(line):
                raise ValueError(f"{source}, line {number}: cut in the middle of a field: {line[-60:]!r}") from None
            continue
        kind = _kind(set(fields))
        if kind:
            if table is not None:
                yield table
            table = _Table(kind, fields, number)
        elif table is not None and _ROW.match(line):
            if len(fields) != len(table.columns):
                raise ValueError(f"{source}, line {number}: {len(fields)} fields where the header in line {table.line} "
                                 f"has {len(table.columns)}; the table is cut or damaged: {line[:60]!r}")
            table.rows.append((number, dict(zip(table.columns, fields, strict=True))))
    if table is not None:
        yield table


def _kind(columns: set[str]) -> str | None:
    total = any(re.match(r"Total Time\b", column) for column in columns)
    if total and {"Instances", "Name"} <= columns:
        return NSYS
    if total and {"Count", "Operation"} <= columns:
        return "copies"
    if {"ID", "Kernel Name", "Metric Name", "Metric Unit", "Metric Value"} <= columns:
        return NCU
    if {"Name", "Calls", "TotalDurationNs"} <= columns:
        return ROCPROF
    return None


def _nsys(table: _Table, copies: list[_Table], source: str) -> Trace:
    activities, warnings = _sums(table, "Name", "Instances", _total_column(table, source), "Time (%)", source)
    for extra in copies:
        more, _ = _sums(extra, "Operation", "Count", _total_column(extra, source), None, source)
        activities += more
    limits = ["times are sums over launches: overlap and idle time are not in it", "GPUs are not told apart",
              "CUDA graphs traced at graph granularity (Nsight Systems' default) leave their kernels out of the table"]
    if not copies:
        limits.append("copies are not in it: the report cuda_gpu_mem_time_sum has them")
    return Trace(source, NSYS, tuple(activities), limits=tuple(limits), warnings=tuple(warnings))


def _total_column(table: _Table, source: str) -> tuple[str, int]:
    """The column of total times and the nanoseconds of its unit."""
    column = next(name for name in table.columns if name.startswith("Total Time"))
    unit = re.fullmatch(r"Total Time \((.*)\)", column)
    return column, _unit_ns(unit[1] if unit else "", f"{source}, line {table.line}, column {column!r}")


def _rocprof(table: _Table, copies: list[_Table], source: str) -> Trace:
    activities, warnings = _sums(table, "Name", "Calls", ("TotalDurationNs", 1), "Percentage", source)
    return Trace(source, ROCPROF, tuple(activities), warnings=tuple(warnings), limits=(
        "times are sums over launches: overlap and idle time are not in it", "GPUs are not told apart"))


def _sums(table, name, count, total, share, source) -> tuple[list[Activity], list[str]]:
    """One activity a row; a warning where the rows' shares say that rows are missing."""
    column, unit_ns = total
    activities, shares = [], []
    for number, row in table.rows:
        where = f"{source}, line {number}"
        launches = _number(row[count], f"{where}, {count}")
        if launches < 1 or launches != int(launches):
            raise ValueError(f"{where}: {count} is {row[count]!r}; expected a whole number of at least 1")
        called, kind = _copy(row[name]) or (_KERNEL_DESCRIPTOR.sub("", row[name]), KERNEL)
        total_ns = round(_number(row[column], f"{where}, {column}") * unit_ns)
        activities.append(Activity(called, total_ns, int(launches), kind=kind))
        if share in row:
            shares.append(_number(row[share].rstrip("%"), f"{where}, {share}"))
    # shares are rounded to a decimal, so that each may be off by half of one
    if shares and sum(shares) < 99.9 - 0.05 * len(shares):
        return activities, [f"the shares in {share!r} add up to {sum(shares):.1f}%: rows are missing, and with them "
                            f"{100 - sum(shares):.1f}% of the time"]
    return activities, []


def _copy(name: str) -> tuple[str, str] | None:
    """The name that copies and sets have in every trace, and their kind; None for a kernel's name."""
    match = _COPY.fullmatch(name)
    if match is None:
        return None
    return ("Memset", SET) if match["set"] else (f"Memcpy {match['cuda'] or match['rocm'] or ''}".strip(), COPY)


def _ncu(table: _Table, copies: list[_Table], source: str) -> Trace:
    launches: dict[str, Activity | None] = {}
    for number, row in table.rows:
        launches.setdefault(row["ID"], None)
        if row["Metric Name"] in NCU_DURATION:
            where = f"{source}, line {number}"
            unit_ns = _unit_ns(row["Metric Unit"], f"{where}, Metric Unit")
            device, stream = (int(row[key]) if row.get(key, "").isdigit() else None for key in ("Device", "Stream"))
            launches[row["ID"]] = Activity(row["Kernel Name"], round(_number(row["Metric Value"], where) * unit_ns),
                                           device=device, stream=stream, kind=KERNEL)
    without = [name for name, activity in launches.items() if activity is None]
    if without:
        raise ValueError(f"{source}: {len(without)} of {len(launches)} launches (first: ID {without[0]}) have no "
                         f"duration; record with --section SpeedOfLight or --metrics {NCU_DURATION[1]}")
    return Trace(source, NCU, tuple(launches.values()), limits=(
        "ncu runs kernels one at a time and, unless told otherwise, at a fixed clock: overlap and idle time are not in "
        "it, and times compare only with others of ncu", "copies are not in it"))


def _unit_ns(unit: str, where: str) -> int:
    try:
        return _UNITS_NS[unit.strip()]
    except KeyError:
        raise ValueError(f"{where}: the unit of time {unit!r} is none of ns, us, ms, s") from None


def _number(text: str, where: str) -> float:
    """A number that may have its thousands grouped by commas."""
    text = text.strip()
    if not _NUMBER.fullmatch(text):
        raise ValueError(f"{where}: {text!r} is no number such as 1234.5 or 1,234.5")
    return float(text.replace(",", ""))
