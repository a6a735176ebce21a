"""Markdown tables drawn from records, and the README that holds them.

A table stands in the README between `<!-- results:NAME -->` and `<!-- /results -->`, and is drawn by the function
registered for NAME:

    @table("decode")
    def decode(results):
        measurements = select(results["nvidia-h200"]["1_grouped_gemm"], metric="time_us", case={"M": 1})
        return pivot(measurements, row=lambda m: m["case"]["N"], column=lambda m: m["variant"])
"""

import re
from collections.abc import Callable, Iterable
from pathlib import Path

from kernelbook import ROOT, records

RESULTS = ROOT / "results"
TABLES: dict[str, Callable[[dict], str]] = {}

_MARKED = re.compile(r"<!-- results:(?P<name>\S+) -->\n(?P<table>.*?)<!-- /results -->", re.S)


def table(name: str) -> Callable:
    """Register a function that draws the table `name` as Markdown from the results that `load` returns."""

    def register(function):
        TABLES[name] = function
        return function

    return register


def load(folder: Path | None = None) -> dict[str, dict[str, dict]]:
    """The committed records by device and notebook: load()["nvidia-h200"]["1_grouped_gemm"]["measurements"]."""
    results: dict[str, dict[str, dict]] = {}
    for path in sorted((folder or RESULTS).glob("*/*.json")):
        results.setdefault(path.parent.name, {})[path.stem] = records.load(path)
    return results


def select(record: dict, case: dict | None = None, **fields) -> list[dict]:
    """The measurements of a record whose fields, and whose case's entries, have the values given."""
    return [m for m in record["measurements"]
            if all(m[name] == value for name, value in fields.items())
            and all(m["case"].get(name) == value for name, value in (case or {}).items())]


def pivot(measurements: Iterable[dict], row: Callable[[dict], object], column: Callable[[dict], object],
          cell: Callable[[dict], str] | None = None, corner: str = "") -> str:
    """A Markdown table with a line for each `row` and a column for each `column`, in the order they appear.

    cell: the text of a measurement; by default its value in three digits. A place without a measurement stays
    empty. Raises ValueError where two measurements fall on one place, since one would hide the other.
    """
    cell = cell or (lambda m: "" if m["value"] is None else f"{m['value']:.3g}")
    rows: dict[object, dict] = {}
    columns: dict[object, None] = {}
    for m in measurements:
        line = rows.setdefault(row(m), {})
        if column(m) in line:
            raise ValueError(f"two measurements for row {row(m)!r}, column {column(m)!r}; select or split further")
        line[column(m)] = cell(m)
        columns[column(m)] = None
    lines = [[corner, *columns], ["---"] + ["---:"] * len(columns)]
    lines += [[name, *(line.get(entry, "") for entry in columns)] for name, line in rows.items()]
    return "".join("| " + " | ".join(str(text).replace("|", "\\|") for text in line) + " |\n" for line in lines)


def redraw(text: str, results: dict) -> str:
    """`text` with every marked table drawn from `results`; ValueError for a marker that no table answers to."""

    def draw(match):
        name = match["name"]
        if name not in TABLES:
            raise ValueError(f"no table {name!r}; there are: {', '.join(TABLES) or 'none'}")
        return f"<!-- results:{name} -->\n{TABLES[name](results).rstrip()}\n<!-- /results -->"

    if text.count("<!-- results:") != len(_MARKED.findall(text)):
        raise ValueError("a marker <!-- results:NAME --> without <!-- /results --> after it")
    return _MARKED.sub(draw, text)


def update(path: Path, results: dict) -> bool:
    """Redraw the tables of a file; whether that changed it."""
    before = path.read_text(encoding="utf-8")
    after = redraw(before, results)
    if after != before:
        records.write(path, after.encode())
    return after != before
