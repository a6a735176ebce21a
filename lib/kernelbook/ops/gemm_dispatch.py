"""One product for every number of rows: which design of `packed_gemm` multiplies, by a measured table.

    choose(weights, m, backend, accuracy)    the design for a product, and why that one
    Dispatched(backend, panels, accuracy)    a weight whose calls each go where `choose` sends them

The table, gemm_choices.yaml, holds for each device that was measured, for each precision of the codes, class of
accuracy and shape, the design up to each M. It is drawn from the records below results/ (`choices_from_record`) by
`python -m kernelbook readme`, and is not written by hand.
"""

import math
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import NamedTuple

import numpy as np
import yaml

from kernelbook.backends import Backend
from kernelbook.ops import packed_gemm
from kernelbook.ops.checks import check_array
from kernelbook.packing import Panels

TABLE = Path(__file__).with_name("gemm_choices.yaml")

ACCURACY = {"accurate": 2e-6, "f16": 5e-4, "bf16": 4e-3}
"""Classes of accuracy, and the relative Frobenius error against float64 that a design of each stays within."""

SLACK = 1.02
"""A design may take so many times the fastest one's time: that much is noise, and a table with few changes is read."""


class Weight(NamedTuple):
    """What a choice depends on of a weight [n, k]. precision: of its codes, "int8" or "int4"."""

    n: int
    k: int
    precision: str


@dataclass(frozen=True)
class Choice:
    """A design by its name, and why that one. rows: at most so many a launch."""

    design: str
    reason: str
    rows: int


def accuracy_of(bound: float) -> str:
    """The strictest class that an error of at most `bound` keeps. Raises ValueError where it keeps none."""
    for name, most in ACCURACY.items():
        if bound <= most:
            return name
    raise ValueError(f"an error of {bound:g} keeps no class of accuracy: {_classes()}")


def _classes() -> str:
    return ", ".join(f"{name!r} ({most:g})" for name, most in ACCURACY.items())


# ---------------------------------------------------------------- choosing

@cache
def table() -> dict:
    """The measured table: device to precision to class to "N x K" to {M: design}, each up to that M, the last for all
    above too."""
    return yaml.safe_load(TABLE.read_text(encoding="utf-8")) or {}


def choose(weights, m: int, backend: Backend, accuracy: str = "f16", measured: dict | None = None) -> Choice:
    """The design for `m` rows times `weights`, within the error of a class.

    weights: Panels, a PackedGemm or (n, k, precision). accuracy: one of `ACCURACY`.
    measured: a table as `table` has it, which is the default.
    The shape measured that is nearest (by the ratios of N and of K) decides. A device that was not measured does as the
    first one that was. A design that cannot run here, for this shape or with so many rows, gives its place to the last
    one of the ladder that can, one that stands in for others before one that does not; where none takes so many rows,
    some at a time go to the one that takes most.
    Raises ValueError for an unknown class, and where no design of the class can run, with every reason.
    """
    if accuracy not in ACCURACY:
        raise ValueError(f"accuracy {accuracy!r}; expected one of {_classes()}")
    weight = Weight(*weights) if isinstance(weights, tuple) else Weight(weights.n, weights.k, weights.precision)
    first, reason = _measured(weight, m, backend, accuracy, table() if measured is None else measured)
    kept = {name: design for name, design in packed_gemm.DESIGNS.items() if design.bound <= ACCURACY[accuracy]}
    order = sorted([*kept][::-1], key=lambda name: (name != first, not kept[name].stands_in))
    refusals = {name: kept[name].why_not(backend, weight, m) for name in order}
    taken = next((name for name in order if refusals[name] is None), None)
    if taken:
        return Choice(taken, reason + _instead(first, taken, refusals, accuracy), m)
    for name in sorted(order, key=lambda name: -(kept[name].max_rows or 0)):
        rows = kept[name].max_rows
        if rows and rows < m and kept[name].why_not(backend, weight, rows) is None:
            return Choice(name, f"{reason}; {rows} rows at a time, since no design of the class takes {m}", rows)
    raise ValueError(f"no {accuracy} design multiplies {m} rows by {weight.n} x {weight.k} of {weight.precision} on "
                     f"{backend.device}: " + "; ".join(f"{name}: {why}" for name, why in refusals.items()))


def _instead(first: str | None, taken: str, refusals: dict, accuracy: str) -> str:
    """Why the design that the table names was not taken, where it was not."""
    if first in (None, taken):
        return ""
    return f"; {first}: {refusals.get(first, f'no design of the class {accuracy!r}')}"


def _measured(weight: Weight, m: int, backend: Backend, accuracy: str, measured: dict) -> tuple[str | None, str]:
    """The design that the table names and what it was measured on; None and the reason where it names none."""
    device = backend.device if backend.device in measured else next(iter(measured), None)
    shapes = measured.get(device, {}).get(weight.precision, {}).get(accuracy, {})
    if not shapes:
        return None, "no product of this kind was measured, so the last design of the ladder"
    nearest = min(shapes, key=lambda shape: math.hypot(*(math.log(size / of) for size, of in
                                                         zip(_sizes(shape), (weight.n, weight.k), strict=True))))
    upto = next((rows for rows in sorted(shapes[nearest]) if m <= rows), max(shapes[nearest]))
    there = f"fastest at {nearest}, M up to {upto}, on {device}"
    return shapes[nearest][upto], there if device == backend.device else f"{there}; this device was not measured"


def _sizes(shape: str) -> tuple[int, int]:
    n, k = map(int, shape.split(" x "))
    return n, k


class Dispatched:
    """A weight on a device, for float32 activations of any number of rows; each call goes where `choose` sends it.

    backend, panels: as PackedGemm takes them. accuracy: one of `ACCURACY`. measured: see `choose`.
    A design on float16 or bfloat16 gets activations rounded to that, ties to even, by the array library: beyond
    float16's 65504 they become infinite. Who has such activations already calls PackedGemm with the design of `choose`.
    `routes` counts the calls by Choice.
    Raises ValueError for an unknown class, and what PackedGemm raises.
    """

    def __init__(self, backend: Backend, panels: Panels, accuracy: str = "f16", *, measured: dict | None = None):
        self.backend, self.accuracy, self.measured = backend, accuracy, measured
        self.weight = Weight(panels.n, panels.k, panels.precision)
        self.routes: Counter[Choice] = Counter()
        first = self.choose(1).design
        self._gemms = {first: packed_gemm.PackedGemm(backend, panels, first)}

    def choose(self, m: int) -> Choice:
        return choose(self.weight, m, self.backend, self.accuracy, self.measured)

    def __call__(self, x, *, out=None):
        """x float32 [M, K] on the device -> float32 [M, N] on it, in `out` where that is given.

        Raises TypeError or ValueError, before anything is launched, on a wrong dtype, device, shape, stride or
        alignment, where `out` shares memory with the weights, and where no design of the class takes M rows.
        """
        shape = tuple(getattr(x, "shape", ()))
        m = shape[0] if len(shape) == 2 else 1  # anything but a matrix is refused
        check_array(self.backend, x, "x", (m, self.weight.k), np.float32, 16)
        if m == 0:
            return self.backend.empty((0, self.weight.n), np.float32) if out is None else out
        taken = self.choose(m)
        if taken.design not in self._gemms:
            self._gemms[taken.design] = next(iter(self._gemms.values())).using(taken.design)
        self.routes[taken] += 1
        given = converted(x, packed_gemm.DESIGNS[taken.design].activations)
        if not self.backend.owns(given):  # NumPy's results are in no memory of the simulator
            given = self.backend.array(given)
        if out is None:
            out = self.backend.empty((m, self.weight.n), np.float32)
        check_array(self.backend, out, "out", (m, self.weight.n), np.float32, 16)
        for part in (slice(row, row + taken.rows) for row in range(0, m, taken.rows)):
            self._gemms[taken.design].prepare(given[part], out=out[part])()
        return out


def converted(x, activations: str):
    """x float32, as an array of the device or of NumPy, as a design takes it: itself, float16, or bits of bfloat16 as
    uint16; rounded to nearest, ties to even. NaN stays NaN, and what float16 cannot hold becomes infinite."""
    if activations == "float32":
        return x
    if activations == "float16":
        with np.errstate(over="ignore"):
            return x.astype(np.float16)
    bits = x.view(np.uint32)
    half = (bits + np.uint32(0x7FFF) + (bits >> np.uint32(16) & np.uint32(1))) >> np.uint32(16)
    # a carry may leave a NaN's exponent: what is above infinity stays as it is, and quiet
    nan = (bits & np.uint32(0x7FFFFFFF)) > np.uint32(0x7F800000)
    quiet = bits >> np.uint32(16) | np.uint32(0x40)
    return (nan * quiet + ~nan * half).astype(np.uint16)


# ---------------------------------------------------------------- the table from a record

def choices_from_record(record: dict) -> dict:
    """The table's entry for a record's device: precision to class to "N x K" to {M: design}, from the cold times that
    the ladder measured there without overlapping launches; empty where it holds none. The ladder's designs of many rows
    write 16 bits, half of what `Dispatched` has them write.

    A class may use a stricter class's designs. Of the designs that stay within `SLACK` of the fastest, one is kept over
    as many M as it can be; each M stands for those from the M before to itself.
    """
    times: dict[tuple, dict[int, dict[str, float]]] = {}
    for e in record["measurements"]:
        if (e["kernel"], e["metric"], e["cache"]) == ("gemm_ladder", "time_us", "cold") and e["value"]:
            case = e["case"]
            if case.get("accuracy") in ACCURACY and not case.get("overlapped"):
                for accuracy in list(ACCURACY)[list(ACCURACY).index(case["accuracy"]):]:
                    key = case["codes"], accuracy, f"{case['N']} x {case['K']}"
                    of = times.setdefault(key, {}).setdefault(case["M"], {})
                    of[e["variant"].partition("_")[2]] = e["value"]
    found: dict = {}
    for (codes, accuracy, shape), by_rows in times.items():
        found.setdefault(codes, {}).setdefault(accuracy, {})[shape] = _fewest_changes(by_rows)
    return found


def _fewest_changes(times: dict[int, dict[str, float]]) -> dict[int, str]:
    """M to design, for the last M of each run of M over which one design stays within SLACK of the fastest."""
    rows = sorted(times)
    good = [{name for name, t in times[m].items() if t <= SLACK * min(times[m].values())} for m in rows]
    runs, first = {}, 0
    while first < len(rows):
        last, kept = first, good[first]
        while last + 1 < len(rows) and kept & good[last + 1]:
            last += 1
            kept = kept & good[last]
        of_run = rows[first:last + 1]
        runs[rows[last]] = min(sorted(kept), key=lambda name: sum(times[m][name] / min(times[m].values())
                                                                  for m in of_run))
        first = last + 1
    return runs


def text(records: Iterable[dict]) -> str:
    """The table as a YAML file, from the records of one notebook on several devices."""
    lines = ["# The fastest design by device, precision of the codes, class of accuracy, shape N x K, and M: each name",
             "# holds up to its M, the last one above too. Drawn from results/ by `python -m kernelbook readme`."]
    for record in records:
        entry = choices_from_record(record)
        if entry:
            lines.append(f"{_key(record['environment']['device'])}:")
            for codes, classes in entry.items():
                lines.append(f"  {codes}:")
                for accuracy, shapes in classes.items():
                    lines.append(f"    {accuracy}:")
                    lines += [f"      {shape}: {{{', '.join(f'{m}: {name}' for m, name in runs.items())}}}"
                              for shape, runs in shapes.items()]
    return "\n".join(lines) + "\n"


def _key(device: str) -> str:
    return yaml.safe_dump(device).splitlines()[0]
