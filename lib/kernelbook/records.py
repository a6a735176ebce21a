"""What a notebook run leaves behind: one strict JSON document of environment, measurements and verdicts.

    record = Record("1_grouped_gemm", parameters, environment(backend), path)
    record.measure(kernel="grouped_gemm", variant="2_float_activations", case={"M": 1, "N": 2048, "K": 2048},
                   metric="relative_frobenius", value=3.1e-7)
    record.verdict("G03", "reproduced", "partial sums equal for nsplit 1 .. 64", measured="0 of 12288 differ")
    record.save(path)
"""

import json
import math
import os
import re
import tempfile
import time
import warnings
from dataclasses import dataclass
from datetime import UTC, datetime
from html import escape
from pathlib import Path
from typing import Any

import jsonschema

from kernelbook import claims
from kernelbook.environment import environment, gpu

__all__ = ["Record", "Verdict", "check", "environment", "is_performance", "load", "write"]

STATUSES = ("passed", "wrong_result", "compile_error", "runtime_error", "skipped")
VERDICTS = ("reproduced", "direction holds", "not reproduced", "contradicted", "not testable here")
COLOURS = dict(zip(VERDICTS, ("#1a7f37", "#2a78b8", "#b7791f", "#c03434", "#7a7f87"), strict=True))

_PERFORMANCE = re.compile(r"(time|bandwidth|throughput|fraction_of|speedup|tokens_per)(_|$)")

_TEXT = {"type": "string", "minLength": 1}
_TEXT_OR_NULL = {"type": ["string", "null"]}
_NUMBER_OR_NULL = {"type": ["number", "null"]}
_DEFAULTS = {"unit": "", "p10": None, "p90": None, "n": 1, "cache": None, "host": False, "status": "passed",
             "reason": None}
"""What a measurement's field is that a file does not name: most figures of a record have most of these."""
_DIGITS = 6
"""Significant ones, of the numbers that a file holds: far more than a time or an error means."""
SCHEMA = {
    "$schema": "https://json-schema.org/draft/2020-12/schema",
    "type": "object",
    "required": ["notebook", "parameters", "started", "duration_s", "environment", "measurements",
                 "verdicts"],
    "additionalProperties": False,
    "properties": {
        "notebook": _TEXT,
        "parameters": {"type": "object"},
        "started": {"type": "string", "pattern": r"^\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\+00:00$"},
        "duration_s": {"type": "number", "minimum": 0},
        "environment": {
            "type": "object",
            "required": ["device", "backend", "simulated", "driver", "cuda", "compilers", "packages",
                         "python", "platform", "cpu", "clocks", "commit", "dirty", "kernels"],
            "properties": {"device": _TEXT, "backend": _TEXT_OR_NULL, "simulated": {"type": "boolean"},
                           "driver": _TEXT_OR_NULL, "commit": _TEXT_OR_NULL, "python": _TEXT,
                           "kernels": {"type": "object", "additionalProperties": _TEXT}},
        },
        "measurements": {"type": "array", "items": {
            "type": "object",
            "required": ["kernel", "variant", "case", "metric", "value", "unit", "p10", "p90", "n", "cache",
                         "host", "status", "reason"],
            "additionalProperties": False,
            "properties": {
                "kernel": _TEXT, "variant": _TEXT, "metric": _TEXT, "unit": {"type": "string"},
                "case": {"type": "object",
                         "additionalProperties": {"type": ["string", "number", "boolean", "null"]}},
                "value": _NUMBER_OR_NULL, "p10": _NUMBER_OR_NULL, "p90": _NUMBER_OR_NULL,
                "n": {"type": "integer", "minimum": 1}, "cache": {"enum": ["cold", "warm", None]},
                "host": {"type": "boolean"}, "status": {"enum": list(STATUSES)}, "reason": _TEXT_OR_NULL,
            }}},
        "verdicts": {"type": "array", "items": {
            "type": "object",
            "required": ["claim", "verdict", "evidence", "measured", "missing", "host"],
            "additionalProperties": False,
            "properties": {
                "claim": _TEXT, "verdict": {"enum": list(VERDICTS)}, "evidence": _TEXT,
                "measured": {"type": "string"}, "missing": _TEXT_OR_NULL, "host": {"type": "boolean"},
            },
        }},
    },
}


@dataclass(frozen=True)
class Verdict:
    """A verdict as a notebook shows it: a box that links of the report can jump to, or a line of text."""

    claim: claims.Claim
    verdict: str
    evidence: str
    measured: str

    def __repr__(self):
        return f"{self.claim.id} {self.verdict}: {self.evidence}"

    def _repr_html_(self):
        colour = COLOURS[self.verdict]
        measured = f"<br><strong>{escape(self.measured)}</strong>" if self.measured else ""
        return (f'<div class="verdict" id="{escape(self.claim.id)}" '
                f'style="border-left: 4px solid {colour}; padding: .4em .9em; margin: .5em 0">'
                f'<span style="color: {colour}; font-weight: 600">{escape(self.claim.id)} · '
                f"{escape(self.verdict)}</span><br><em>{escape(self.claim.says)}</em>{measured}<br>"
                f"{escape(self.evidence)}</div>")


class Record:
    """The record of one notebook run, filled while the notebook runs and saved in its last cell.

    notebook: its name without .ipynb; the claims it must judge follow from the name.
    parameters: name to value, of JSON's types. environment: from `environment(backend)`.
    path: the file that it will be saved to. Until then every figure is a line of the file beside it that ends in .jsonl
    instead, so that a run which is killed leaves what it has measured; empty keeps figures in memory alone.
    Raises ValueError for a value that JSON cannot hold (NaN, infinity), TypeError for a foreign type.
    """

    def __init__(self, notebook: str, parameters: dict, environment: dict, path: str | Path = ""):
        self.claims = {claim.id: claim for claim in claims.of_notebook(notebook)}
        self.started = datetime.now(UTC)
        self._clock = time.perf_counter()
        self.notebook = notebook
        self.parameters = _plain(parameters, "parameters")
        self.environment = _plain(environment, "environment")
        self.measurements: list[dict] = []
        self.verdicts: list[dict] = []
        self._places: dict[tuple, int] = {}  # of measurements and verdicts in their lists, by what names them
        self._written: bytes | None = None
        self._journal = _Journal(Path(path).with_suffix(".jsonl")) if str(path) else None
        self._note(notebook=notebook, parameters=self.parameters, environment=self.environment,
                   started=self.started.isoformat(timespec="seconds"))

    def measure(self, *, kernel: str, variant: str, case: dict, metric: str, value: float | None,
                unit: str = "", p10: float | None = None, p90: float | None = None, n: int = 1,
                cache: str | None = None, host: bool = False, status: str = "passed",
                reason: str | None = None) -> None:
        """Add one figure; measuring a case again replaces it, with a warning, so that a cell can be re-run.

        value: in `unit`; None where there is none. p10 and p90: the spread of `n` samples around a median.
        cache: "cold" or "warm". host: True for a time of real CPU code, which counts where the backend is
        simulated too. status: one of STATUSES; every status but "passed" takes a reason.

        Raises ValueError naming the measurement for: NaN or infinity; a performance figure of a run that
        did not pass, or timed on a simulated backend without host=True; any figure of a run that did not
        end; a missing reason; a median outside p10 .. p90.
        """
        entry = dict(kernel=kernel, variant=variant, case=case, metric=metric, value=value, unit=unit,
                     p10=p10, p90=p90, n=n, cache=cache, host=host, status=status, reason=reason)
        name = _name(entry)
        entry = _plain(entry, name)
        _validate(entry, SCHEMA["properties"]["measurements"]["items"], name)
        _check_measurement(entry, self.environment["simulated"])
        self._put(self.measurements, entry, ("kernel", "variant", "case", "metric", "cache"), name)
        self._note(measurement=_short(entry))

    def verdict(self, claim: str, verdict: str, evidence: str, measured: str = "",
                missing: str | None = None, host: bool = False) -> Verdict:
        """Judge one claim of the notebook's article; returns the box to display.

        verdict: one of VERDICTS. evidence: words with figures. measured: the short figure, with its spread,
        for the report's table. missing: for "not testable here", the part that this machine lacks.
        host: True where a speed claim on a simulated backend was judged by times of real CPU code, measured
        with host=True.

        Raises ValueError for a claim of another article, an unknown verdict, empty evidence, a missing part
        not named (or named for another verdict), or a speed claim judged from simulated times.
        """
        if claim not in self.claims:
            known = ", ".join(self.claims) or "none, since it tests no article"
            raise ValueError(f"{self.notebook} has no claim {claim!r}; its claims are: {known}")
        entry = dict(claim=claim, verdict=verdict, evidence=evidence, measured=measured, missing=missing,
                     host=host)
        _validate(entry, SCHEMA["properties"]["verdicts"]["items"], f"verdict on {claim}")
        _check_verdict(entry, self.claims[claim], self.environment["simulated"], self.measurements)
        self._put(self.verdicts, entry, ("claim",), f"verdict on {claim}")
        self._note(verdict=entry)
        return Verdict(self.claims[claim], verdict, evidence, measured)

    def save(self, path: str | Path) -> Path | None:
        """Check the record and write it to `path` in one step; an empty path checks only.

        Raises ValueError naming the claims that have no verdict yet, FileExistsError where `path` holds
        anything that this record did not write itself.
        """
        missing = self.claims.keys() - {entry["claim"] for entry in self.verdicts}
        if missing:
            raise ValueError(f"{self.notebook}: no verdict on {', '.join(sorted(missing))}; every claim "
                             "needs one, 'not testable here' where the machine lacks a part")
        clocks = {**self.environment["clocks"], "after": gpu(self.environment.get("pci_bus"))["clocks"]}
        document = {
            "notebook": self.notebook,
            "parameters": self.parameters,
            "started": self.started.isoformat(timespec="seconds"),
            "duration_s": round(time.perf_counter() - self._clock, 3),
            "environment": {**self.environment, "clocks": clocks},
            "measurements": self.measurements,
            "verdicts": sorted(self.verdicts, key=lambda entry: entry["claim"]),
        }
        check(document)
        if not str(path):
            return None
        path = Path(path)
        content = _text(document).encode()
        if path.exists() and path.read_bytes() not in (content, self._written):
            raise FileExistsError(f"{path} holds another record; remove it or save under another name")
        write(path, content)
        self._written = content
        if self._journal:
            self._journal.end()
        return path

    def _put(self, entries: list[dict], entry: dict, key: tuple[str, ...], name: str) -> None:
        """Append, or replace the entry that has the same key."""
        place = tuple(json.dumps(entry[part]) for part in key)
        if place not in self._places:
            self._places[place] = len(entries)
            entries.append(entry)
        elif entries[self._places[place]] != entry:
            warnings.warn(f"{name}: replaces the one recorded before", stacklevel=3)
            entries[self._places[place]] = entry

    def _note(self, **what) -> None:
        if self._journal:
            self._journal.add(what)


class _Journal:
    """A file that gets a line of JSON for each thing as it happens. One that cannot be written is given up with a
    warning: what has been measured is still in memory, and may be saved."""

    def __init__(self, path: Path):
        self._path = path
        self._own = not path.exists()  # else it holds what another run left
        self._gone = False

    def add(self, what: dict) -> None:
        if self._gone:
            return
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            with open(self._path, "a", encoding="utf-8") as file:
                file.write(json.dumps(what, ensure_ascii=False, allow_nan=False) + "\n")
        except OSError as error:
            self._gone = True
            warnings.warn(f"figures are kept in memory alone from here on: {self._path} cannot be written ({error})",
                          stacklevel=4)

    def end(self) -> None:
        """All that it holds is safe elsewhere."""
        self._gone = True
        if self._own:
            self._path.unlink(missing_ok=True)


def _text(document: dict) -> str:
    """A record as JSON, with a line for each of its measurements and verdicts: short, and readable in a diff."""
    document = document | {"measurements": [_short(entry) for entry in document["measurements"]]}

    def lines(value):
        if isinstance(value, list) and value:
            return "[\n" + ",\n".join(map(line, value)) + "\n]"
        return line(value)

    def line(value):
        return json.dumps(value, ensure_ascii=False, allow_nan=False, separators=(",", ":"))

    return "{\n" + ",\n".join(f"{line(name)}:{lines(value)}" for name, value in document.items()) + "\n}\n"


def _short(entry: dict) -> dict:
    """A measurement without the fields that have their default, and floats to _DIGITS digits, which keeps their order.
    """
    return {key: float(f"{value:.{_DIGITS}g}") if isinstance(value, float) else value for key, value in entry.items()
            if key not in _DEFAULTS or value != _DEFAULTS[key]}


def write(path: Path, content: bytes) -> None:
    """Write a file so that a reader sees the old content or the new, never a part; folders are made."""
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, aside = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(content)
        os.chmod(aside, 0o644)  # mkstemp's 0600 would hide a shared result from its readers
        os.replace(aside, path)
    except BaseException:
        Path(aside).unlink(missing_ok=True)
        raise


def load(path: str | Path) -> dict:
    """A saved record as a dict of SCHEMA's form, every field of every measurement in it. Raises ValueError naming file,
    entry and fault."""

    def refuse(literal):
        raise ValueError(f"{literal} is no JSON value")

    try:
        document = json.loads(Path(path).read_text(encoding="utf-8"), parse_constant=refuse)
        _complete(document)
        check(document)
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from None
    return document


def _complete(document: Any) -> None:
    """Give measurements the fields that a file leaves out, as far as it has measurements; the rest is for `check`."""
    if isinstance(document, dict) and isinstance(document.get("measurements"), list):
        document["measurements"] = [{**_DEFAULTS, **entry} if isinstance(entry, dict) else entry
                                    for entry in document["measurements"]]


def check(document: Any) -> None:
    """Raise ValueError with the first rule that a record breaks: SCHEMA's, or those of `Record`'s methods."""
    _validate(document, SCHEMA, "record")
    simulated = document["environment"]["simulated"]
    for entry in document["measurements"]:
        _check_measurement(entry, simulated)
    known = {claim.id: claim for claim in claims.of_notebook(document["notebook"])}
    judged = [entry["claim"] for entry in document["verdicts"]]
    for entry in document["verdicts"]:
        if entry["claim"] not in known:
            raise ValueError(f"{document['notebook']} has no claim {entry['claim']!r}")
        if judged.count(entry["claim"]) > 1:
            raise ValueError(f"more than one verdict on {entry['claim']}")
        _check_verdict(entry, known[entry["claim"]], simulated, document["measurements"])


def is_performance(metric: str) -> bool:
    """Whether a metric is a speed (`time_us`, `bandwidth_gbs`, ...), kept only for results that passed."""
    return _PERFORMANCE.match(metric) is not None


def _name(entry: dict) -> str:
    case = ", ".join(f"{key}={value}" for key, value in entry["case"].items())
    return f"{entry['kernel']} / {entry['variant']} ({case}) {entry['metric']}"


def _plain(value: Any, where: str) -> Any:
    """`value` with NumPy (and torch) scalars as Python's own; `where` names it in an error."""
    if hasattr(value, "item") and getattr(value, "ndim", None) == 0:
        value = value.item()
    if isinstance(value, float) and not math.isfinite(value):
        raise ValueError(f"{where} is {value}, which JSON cannot hold; record None instead, and count values "
                         "that are not finite under the metric 'nonfinite'")
    if isinstance(value, dict):
        return {str(key): _plain(item, f"{where}: {key}") for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item, f"{where}[{index}]") for index, item in enumerate(value)]
    if isinstance(value, os.PathLike):
        return os.fspath(value)
    if value is None or isinstance(value, str | int | float):
        return value
    raise TypeError(f"{where} is a {type(value).__name__}, which JSON cannot hold")


def _validate(value: Any, schema: dict, name: str) -> None:
    error = jsonschema.exceptions.best_match(jsonschema.Draft202012Validator(schema).iter_errors(value))
    if error:
        path = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in error.absolute_path)
        raise ValueError(f"{name}{path and ': '}{path.lstrip('.')}: {error.message}")


def _check_measurement(entry: dict, simulated: bool) -> None:
    name, status = _name(entry), entry["status"]
    if status != "passed" and not entry["reason"]:
        raise ValueError(f"{name}: status {status!r} needs a reason")
    figures = [entry[key] for key in ("value", "p10", "p90") if entry[key] is not None]
    if figures and status not in ("passed", "wrong_result"):
        raise ValueError(f"{name}: value {figures[0]} with status {status!r}; only a run that ended has one")
    if figures and status == "wrong_result" and is_performance(entry["metric"]):
        raise ValueError(f"{name}: value {figures[0]} of a wrong result, whose speed counts for nothing; "
                         "record None")
    if figures and simulated and is_performance(entry["metric"]) and not entry["host"]:
        raise ValueError(f"{name}: value {figures[0]} from a simulated backend, which is not timed; record "
                         "None, or host=True if this is the time of real CPU code")
    low, value, high = entry["p10"], entry["value"], entry["p90"]
    if (low is not None or high is not None) and value is None:
        raise ValueError(f"{name}: a spread without a value")
    if (low is not None and low > value) or (high is not None and high < value):
        raise ValueError(f"{name}: value {value} lies outside p10 {low} .. p90 {high}")


def _check_verdict(entry: dict, claim: claims.Claim, simulated: bool, measurements: list[dict]) -> None:
    untestable = entry["verdict"] == "not testable here"
    if untestable and not entry["missing"]:
        raise ValueError(f"{claim.id}: 'not testable here' must name the part that is missing (missing=...)")
    if entry["missing"] and not untestable:
        raise ValueError(f"{claim.id}: {entry['verdict']!r} with a missing part ({entry['missing']}); a "
                         "claim that lacks a part is 'not testable here'")
    if claim.kind == "speed" and simulated and not untestable:
        timed = any(m["host"] and m["value"] is not None and is_performance(m["metric"])
                    for m in measurements)
        if not (entry["host"] and timed):
            raise ValueError(f"{claim.id}: {entry['verdict']!r} on a speed claim from a simulated backend; "
                             "only times of real CPU code, measured with host=True, allow that (and then "
                             "host=True here)")
