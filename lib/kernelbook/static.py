"""What the compilers make of every kernel for every target, no device needed: the table, record and report section of
`make static`.
"""

from collections.abc import Iterable
from itertools import groupby
from pathlib import Path

from kernelbook import ROOT, records, toolchain
from kernelbook.backends import Source
from kernelbook.ops import (
    gated_delta_net,
    grouped_gemm,
    int8_pv,
    layer,
    packed_gemm,
    panel_gemm,
    prefill_gemm,
    q4_probe,
)

RECORD = ROOT / "runs" / "static.json"
"""Where `make static` leaves its record, and where the report finds it."""

FAMILIES = (grouped_gemm, packed_gemm, q4_probe, prefill_gemm, panel_gemm, gated_delta_net, layer, int8_pv)

FIGURES = {"registers": "1", "spill_bytes": "B", "stack_bytes": "B", "shared_bytes": "B", "fused": "1",
           "dots_per_mac": "1", "instructions": "1"}
"""Of a kernel on a target, and the unit of each: rows of `toolchain.survey` under the same names."""


def sources() -> list[Source]:
    """Every kernel, in the forms that its family names for this."""
    return [*(source for family in FAMILIES for source in family.sources()), Source("ceilings/memory.cu")]


def record(rows: Iterable[dict], targets: Iterable[str]) -> records.Record:
    """Rows of `toolchain.survey` of `sources()` as a record, with the reason where a source has nothing on one of
    `targets`, or where a compiler does not tell a figure."""
    targets = list(targets)
    found = records.Record("static", {"targets": targets}, records.environment())
    for row in rows:
        entry = {"kernel": row["kernel"], "variant": row["source"]}
        case = {"target": row["target"], **row["defines"], "compiler": row["compiler"]}
        for name, unit in FIGURES.items():
            unknown = {"status": "skipped", "reason": f"not told by {row['compiler']}"} if row[name] is None else {}
            if name != "dots_per_mac":
                found.measure(**entry, case=case, metric=name, value=row[name], unit=unit, **unknown)
            elif row[name]:
                found.measure(**entry, case=case, metric=name, value=row[name], unit=unit)
        for opcode, of in row["matrix"].items():
            each = case | {"instruction": opcode}
            found.measure(**entry, case=each, metric="matrix_instructions", value=of["count"], unit="1")
            found.measure(**entry, case=each, metric="macs_of_a_matrix_instruction", value=of["macs"], unit="1")
    for path, absent, reason in absences(targets):
        for target in absent:
            found.measure(kernel=Path(path).stem, variant=path, case={"target": target}, metric="registers", value=None,
                          status="skipped", reason=reason)
    return found


def absences(targets: Iterable[str]) -> list[tuple[str, list[str], str]]:
    """(path, targets, reason) of each kernel that is not for all of `targets`."""
    found: dict[tuple[str, str], list[str]] = {}
    for target in targets:
        for path, reason in dict.fromkeys((source.path, toolchain.absence(source, target)) for source in sources()):
            if reason:
                found.setdefault((path, reason), []).append(target)
    return [(path, absent, reason) for (path, reason), absent in found.items()]


def save(found: records.Record, path: Path | None = None) -> Path:
    """Write the record, in place of an earlier one; None takes RECORD."""
    path = Path(path or RECORD)
    path.unlink(missing_ok=True)
    return found.save(path)


def sections(document: dict) -> list[dict]:
    """A saved record as the report shows it: a section a family, with a row for each kernel, form and target.

    A section: family, rows, kernels and targets (how many), spilled (rows that spill), absent ([(source, targets,
    reason)]). A row: kernel, source, form (its defines), target, compiler, matrix ([(opcode, count, macs)]) and the
    FIGURES, None where there is none.
    """
    rows: dict[tuple, dict] = {}
    absent: dict[tuple, list[str]] = {}
    for m in document["measurements"]:
        case = dict(m["case"])
        target, compiler, opcode = case.pop("target"), case.pop("compiler", None), case.pop("instruction", None)
        if compiler is None:
            absent.setdefault((m["variant"], m["reason"]), []).append(target)
            continue
        form = " ".join(f"{name}={value}" for name, value in case.items())
        row = rows.setdefault((m["variant"], m["kernel"], form, target), {
            "source": m["variant"], "kernel": m["kernel"], "form": form, "target": target, "compiler": compiler,
            "matrix": {}, **dict.fromkeys(FIGURES)})
        if opcode is None:
            row[m["metric"]] = m["value"]
        else:
            row["matrix"].setdefault(opcode, {})[m["metric"]] = m["value"]
    found = []
    for family, of_family in groupby(rows.values(), key=lambda row: row["source"].partition("/")[0]):
        members = list(of_family)
        found.append({
            "family": family, "rows": members, "kernels": len({(r["source"], r["kernel"], r["form"]) for r in members}),
            "targets": list(dict.fromkeys(row["target"] for row in members)),
            "spilled": [row for row in members if row["spill_bytes"]],
            "absent": [(source, targets, reason) for (source, reason), targets in absent.items()
                       if source.startswith(f"{family}/")]})
    return found
