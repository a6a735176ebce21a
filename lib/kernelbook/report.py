"""HTML from runs and records: an index that starts with the claims, and a page for each notebook.

The index has a column for each device, so that a user's card and the simulator stand beside the committed records.
Pages open offline and load nothing: style and pictures inline, formulas rendered ahead to MathML, and a content
security policy that forbids the rest. The one script, which sorts and filters the claims, stands in the index.
"""

import base64
import csv
import hashlib
import io
import json
import re
import shutil
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from urllib.parse import quote

import markupsafe
import nbformat
from nbconvert.filters.ansi import strip_ansi

from kernelbook import claims, compare, pages, records, runner, static, summary_plots, sweep, tables
from kernelbook.plots import Figure, standalone

OUT = runner.RUNS / "report"
"""Where a report of what is found goes."""
MACHINE_CODE = "static.json"
"""The copy of the record on machine code that the index links to."""
CLAIMS_CSV = "claims.csv"
LOG_LINES = 25
"""How much of a failed notebook's log the index shows."""
CHANGES_SHOWN = 40
"""How many of the speeds that changed the index lists; the file beside it has all."""
NO_VERDICT, NOT_RUN = "no verdict", "not run"
ORDER = (*records.VERDICTS, NO_VERDICT, NOT_RUN)
"""Of verdicts, where claims are counted and sorted."""

IN_URL = " /:;=,.()-!*@$+~?&[]|"  # of a figure, as it is: shorter than base64
_MEASURED = ("kernel", "variant", "metric", "value", "unit", "p10", "p90", "n", "cache", "host", "status", "reason")


@dataclass
class Entry:
    """One run of a notebook, as the index shows it. URLs are relative to the index."""

    name: str
    folder: Path
    prefix: str  # of its URLs: "" or a folder, ending in a slash
    label: str  # tells it from others of its column
    status: str = "passed"
    reason: str | None = None
    record: dict | None = None
    page: str | None = None
    files: dict[str, str] = field(default_factory=dict)

    @property
    def key(self) -> str:
        return f"{self.prefix}{self.name}"

    @cached_property
    def notebook(self) -> nbformat.NotebookNode | None:
        """The executed notebook, if the run got so far as to write it whole."""
        path = self.folder / f"{self.name}.ipynb"
        try:
            return nbformat.read(path, 4) if path.exists() else None
        except (ValueError, nbformat.reader.NotJSONError):
            return None

    @property
    def title(self) -> str:
        cells = self.notebook.cells if self.notebook else []
        text = "\n".join(cell.source for cell in cells if cell.cell_type == "markdown")
        heading = re.search(r"^# +(.+)$", text, re.M)
        return heading[1].strip() if heading else self.name

    @property
    def verdicts(self) -> dict[str, dict]:
        return {verdict["claim"]: verdict for verdict in self.record["verdicts"]} if self.record else {}

    @property
    def log_tail(self) -> str:
        path = self.folder / f"{self.name}.log"
        if not path.exists():
            return ""
        lines = path.read_text(encoding="utf-8", errors="replace")[-20_000:].splitlines()
        return strip_ansi("\n".join(lines[-LOG_LINES:]))


@dataclass
class Column:
    """A run folder, a sweep or a folder of records: one column of the claims."""

    place: str  # the folder's name
    entries: list[Entry]

    @property
    def environments(self) -> list[dict]:
        return [entry.record["environment"] for entry in self.entries if entry.record]

    @property
    def devices(self) -> list[str]:
        return _distinct(environment["device"] for environment in self.environments)

    @property
    def simulated(self) -> bool:
        return any(environment["simulated"] for environment in self.environments)

    @property
    def title(self) -> str:
        return ", ".join(self.devices) or self.place

    @property
    def started(self) -> str:
        """The day of its first record."""
        return min((entry.record["started"][:10] for entry in self.entries if entry.record), default="")

    def runs(self, notebook: str) -> list[Entry]:
        return [entry for entry in self.entries if entry.name == notebook and entry.status != NOT_RUN]


def build(folders: Path | Sequence[Path] = (), out: Path | None = None, machine_code: Path | None = None,
          against: Path | str | None = None) -> Path:
    """Write the report of run folders, sweeps or folders of records; returns the path of its index.html.

    folders: a column each, in this order; none takes those of `found`, or, to compare, the newest run.
    out: where the pages go, with copies of the records and logs they link to; None takes OUT, emptied before, but for
    a single run folder or sweep, which gets its own pages. machine_code: the record of `static`, if there is one, for
    a section of its own. against: a folder, or the name of one below results/, that the others are compared with; it
    becomes the first column.

    Raises ValueError for a folder that is not there or holds neither a run nor records, for one named twice, for a
    committed record that is not valid, and for a folder that `out` would mix with.
    """
    folders = [Path(folders)] if isinstance(folders, str | Path) else [Path(folder) for folder in folders]
    if not folders:
        folders, out = found() if against is None else [newest_run()], out or OUT
    if against is not None:
        folders.insert(0, _base(against))
    folders = [folder.resolve() for folder in folders]
    for folder in folders:
        if not folder.is_dir():
            raise ValueError(f"there is no folder {folder}; a report is made of run folders (runs/latest) or of "
                             "folders of records (results/nvidia-h200)")
        if folders.count(folder) > 1:
            raise ValueError(f"{folder} is named twice; a report has it once")
    out = Path(out or (folders[0] if len(folders) == 1 and _is_run(folders[0]) else OUT)).resolve()
    if inside := [folder for folder in folders if folder.is_relative_to(out) and (folders != [out])]:
        raise ValueError(f"{inside[0]} lies in {out}, where the report goes; say another place (--out)")
    names = Counter(folder.name for folder in folders)
    columns = []
    for folder in folders:
        place = folder.name if names[folder.name] == 1 else f"{folder.parent.name}-{folder.name}"
        if place in [column.place for column in columns]:
            raise ValueError(f"two folders are called {place!r}; their pages would mix")
        columns.append(Column(place, _entries(folder, f"{place}/" if len(folders) > 1 else "")))
    if out == OUT.resolve():
        shutil.rmtree(out, ignore_errors=True)  # pages of runs that are no longer part of it
    for column in columns:
        for entry in column.entries:
            _publish(entry, out)
    compiled = records.load(machine_code) if machine_code and Path(machine_code).exists() else None
    if compiled:
        out.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(machine_code, out / MACHINE_CODE)
    records.write(out / CLAIMS_CSV, _claims_csv(columns))
    comparisons = _comparisons(columns, out) if against is not None else []
    index = out / "index.html"
    records.write(index, _index(columns, comparisons, compiled).encode())
    return index


def _base(against: Path | str) -> Path:
    """The folder that `against` is or names."""
    for folder in (Path(against), tables.RESULTS / against):
        if folder.is_dir():
            return folder
    known = sorted(path.name for path in tables.RESULTS.iterdir() if path.is_dir()) if tables.RESULTS.exists() else []
    raise ValueError(f"nothing to compare with: there is no folder {against}, and no such device in results/, which "
                     f"has {', '.join(known) or 'none'}")


def found(results: Path | None = None, runs: Path | None = None) -> list[Path]:
    """Every folder of committed records, and for each device that own runs were made on the newest of them.

    results, runs: the folders looked through, the project's own if None. A run that left no record, so that its
    device is not known, counts if it is the newest of all. Raises ValueError where there is nothing.
    """
    committed = sorted({path.parent for path in (results or tables.RESULTS).glob("*/*.json")})
    own: dict[tuple[str, ...], Path] = {}
    newest = _own_runs(runs or runner.RUNS)
    for folder in newest:
        devices = tuple(_devices(folder))
        if devices or folder == newest[0]:
            own.setdefault(devices, folder)
    if not committed and not own:
        raise ValueError("there is nothing to report: neither records below results/ nor a run below runs/ "
                         "(make reproduce)")
    return [*committed, *own.values()]


def newest_run(runs: Path | None = None) -> Path:
    """The run folder or sweep below `runs` (runs/) that was started last. Raises ValueError where there is none."""
    folders = _own_runs(runs or runner.RUNS)
    if not folders:
        raise ValueError(f"there is no run below {runs or runner.RUNS} to compare; make one with `make reproduce`, or "
                         "name a folder")
    return folders[0]


def _own_runs(runs: Path) -> list[Path]:
    """Run folders and sweeps, the newest first."""
    started = {}
    for path in [*runs.glob("*/run.json"), *runs.glob("*/sweep.json")]:
        try:
            started[path.parent.resolve()] = json.loads(path.read_text(encoding="utf-8"))["started"]
        except (ValueError, KeyError, TypeError):
            continue  # damaged; named in a command it would be an error
    return sorted(started, key=lambda folder: (started[folder], folder.name), reverse=True)


def _devices(folder: Path) -> list[str]:
    """The devices that a run folder or sweep has records of, read without checking them."""
    devices = set()
    for row in sweep.standings(folder):
        try:
            text = (row.folder / f"{row.notebook}.json").read_text(encoding="utf-8")
            devices.add(str(json.loads(text)["environment"]["device"]))
        except (OSError, ValueError, KeyError, TypeError):
            continue
    return sorted(devices)


def _is_run(folder: Path) -> bool:
    return (folder / "run.json").exists() or (folder / "sweep.json").exists()


def _entries(folder: Path, prefix: str) -> list[Entry]:
    if _is_run(folder):
        return [Entry(row.notebook, row.folder,
                      prefix if row.folder == folder else f"{prefix}{row.folder.relative_to(folder).as_posix()}/",
                      row.label, row.status, row.entry.get("reason"), _run_record(row.folder, row.notebook))
                for row in sweep.standings(folder)]
    paths = sorted(folder.glob("*.json"))
    if not paths:
        raise ValueError(f"{folder} holds neither a run (run.json, sweep.json) nor records (*.json)")
    return [Entry(path.stem, folder, prefix, path.stem, record=records.load(path)) for path in paths]


def _run_record(folder: Path, name: str) -> dict | None:
    try:
        return records.load(folder / f"{name}.json")
    except (FileNotFoundError, ValueError):
        return None  # the run's state says that it failed, and why


def _publish(entry: Entry, out: Path) -> None:
    """Write an entry's page and put the files it links to beside it, but for the executed notebook: its page says
    the same, and it stays where it was run."""
    for label, suffix in (("record", ".json"), ("measured so far", ".jsonl"), ("log", ".log"),
                          ("executed notebook", ".ipynb")):
        source = entry.folder / f"{entry.name}{suffix}"
        target = out / f"{entry.prefix}{source.name}"
        if source.exists() and (suffix != ".ipynb" or target == source):
            entry.files[label] = f"{entry.prefix}{source.name}"
            if target != source:
                target.parent.mkdir(parents=True, exist_ok=True)
                shutil.copyfile(source, target)
    if entry.record:
        entry.files["measurements as CSV"] = f"{entry.prefix}{entry.name}.csv"
        records.write(out / entry.files["measurements as CSV"], measurements_csv(entry.record))
    if entry.notebook:
        entry.page = f"{entry.prefix}{entry.name}.html"
        back = "../" * entry.prefix.count("/")
        html = pages.page(entry.notebook, entry.title, list(entry.verdicts.values()), f"{back}index.html")
        records.write(out / entry.page, html.encode())


def measurements_csv(record: dict) -> bytes:
    """The measurements of a record as CSV, a column for each entry of their cases. Text that a spreadsheet would
    take for a formula has an apostrophe before it."""
    cases = _distinct(name for m in record["measurements"] for name in m["case"])
    rows = [[*(m[name] for name in _MEASURED), *(m["case"].get(name) for name in cases)]
            for m in record["measurements"]]
    return _csv([*_MEASURED, *(f"case: {name}" for name in cases)], rows)


def _claims_csv(columns: list[Column]) -> bytes:
    rows = []
    for article in claims.articles():
        for claim in article.claims:
            for column in columns:
                for entry in column.runs(article.notebook):
                    verdict = entry.verdicts.get(claim.id, {"verdict": NO_VERDICT})
                    rows.append([claim.id, article.name, claim.kind, claim.says, claim.value, claim.where,
                                 column.title, column.place, entry.label,
                                 *(verdict.get(name) for name in ("verdict", "measured", "evidence", "missing"))])
    return _csv(["claim", "article", "kind", "says", "article's figure", "where", "device", "folder", "run",
                 "verdict", "measured", "evidence", "missing"], rows)


def _changes_csv(changes: Iterable[tuple[str, compare.Change]]) -> bytes:
    rows = [[notebook, m["kernel"], m["variant"], json.dumps(m["case"], ensure_ascii=False), m["metric"], m["unit"],
             m["cache"], c.speedup, *(side[name] for side in (c.before, c.after) for name in ("value", "p10", "p90"))]
            for notebook, c in changes for m in [c.before]]
    return _csv(["notebook", "kernel", "variant", "case", "metric", "unit", "cache", "times as fast",
                 *(f"{name} {when}" for when in ("before", "after") for name in ("value", "p10", "p90"))], rows)


def _csv(header: list[str], rows: Iterable[list]) -> bytes:
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    for row in [header, *rows]:
        writer.writerow(map(_csv_cell, row))
    return text.getvalue().encode()


def _csv_cell(value):
    if isinstance(value, float):
        return int(value) if value.is_integer() else f"{value:.7g}"
    return f"'{value}" if isinstance(value, str) and value.startswith(("=", "+", "-", "@", "\t", "\r")) else value


def _comparisons(columns: list[Column], out: Path) -> list[dict]:
    """What changed from the first column to each of the others, as the index shows it."""
    base, *others = columns
    shown = []
    for column in others:
        pairs = [(before, after, compare.compare(before.record, after.record))
                 for before, after in _pairs(base.entries, column.entries)]
        file = f"changes-{column.place}.csv"
        changed = [(before.name, change) for before, _, found in pairs for change in [*found.slower, *found.faster]]
        records.write(out / file, _changes_csv(changed))
        paired = {id(entry) for before, after, _ in pairs for entry in (before, after)}
        shown.append({
            "base": base, "column": column, "pairs": pairs, "file": file, "most": CHANGES_SHOWN,
            "alone": [(side, entry) for side in (base, column) for entry in side.entries
                      if entry.record and id(entry) not in paired]})
    return shown


def _pairs(before: list[Entry], after: list[Entry]) -> list[tuple[Entry, Entry]]:
    """Runs of the same notebook: those of the same parameters, or the only one of each side."""
    pairs = []
    for entry in (entry for entry in after if entry.record):
        candidates = [other for other in before if other.record and other.name == entry.name]
        same = [other for other in candidates if other.record["parameters"] == entry.record["parameters"]]
        rivals = [other for other in after if other.record and other.name == entry.name]
        if same or len(candidates) == len(rivals) == 1:
            pairs.append(((same or candidates)[0], entry))
    return pairs


def _index(columns: list[Column], comparisons: list[dict], compiled: dict | None) -> str:
    articles = [(article, [(claim, [_cell(column, article.notebook, claim.id) for column in columns])
                           for claim in article.claims]) for article in claims.articles()]
    cells = [cell for _, rows in articles for _, row in rows for cell in row]
    script = (pages.TEMPLATES / "index.js").read_text(encoding="utf-8")
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    templates = pages.templates()
    templates.filters["url"] = lambda text: quote(text, safe="/")
    templates.filters["json"] = lambda value: json.dumps(value, ensure_ascii=False)
    templates.filters["case"] = lambda case: ", ".join(f"{name} {value}" for name, value in case.items())
    return templates.get_template("index.html.j2").render(
        style=pages.style(), script=markupsafe.Markup(script), script_hash=digest,
        columns=columns, articles=articles,
        verdicts=[name for name in ORDER if any(name in cell["verdicts"] for cell in cells)],
        counts=[(column, _counts(rows[place] for _, of in articles for _, rows in of))
                for place, column in enumerate(columns)],
        failed=[(column, entry) for column in columns for entry in column.entries
                if entry.status not in ("passed", NOT_RUN)],
        devices=_distinct(device for column in columns for device in column.devices),
        simulated=_distinct(e["device"] for column in columns for e in column.environments if e["simulated"]),
        figures=[(column, entry, [_picture(figure) for figure in shown])
                 for column in columns for entry in column.entries
                 if entry.record and _first(entry, column) and (shown := summary_plots.figures(entry.record))],
        comparisons=comparisons, compiled=compiled and _machine_code(compiled), claims_csv=CLAIMS_CSV,
        environments=[(column, _distinct(_facts(environment) for environment in column.environments))
                      for column in columns])


def _first(entry: Entry, column: Column) -> bool:
    """Whether an entry is its column's first of its notebook with a record: of a sweep, one run's figures do."""
    return entry is next(other for other in column.entries if other.record and other.name == entry.name)


def _cell(column: Column, notebook: str, claim: str) -> dict:
    """What a column has on a claim: its runs with their verdicts, and how often each verdict occurs."""
    runs = [(entry, entry.verdicts.get(claim)) for entry in column.runs(notebook)]
    counts = Counter(verdict["verdict"] if verdict else NO_VERDICT for _, verdict in runs)
    counts = {name: counts[name] for name in ORDER if counts[name]} or {NOT_RUN: 1}
    return {"runs": runs, "verdicts": counts, "rank": min(map(ORDER.index, counts))}


def _counts(cells: Iterable[dict]) -> list[tuple[str, int]]:
    total = sum((Counter(cell["verdicts"]) for cell in cells), Counter())
    return [(name, total[name]) for name in ORDER if total[name]]


def _picture(figure: Figure) -> dict:
    """A figure as an image that follows the reader's colour scheme, its size in pixels."""
    svg = standalone(figure)
    width, height = (float(points) * 96 / 72 for points in re.search(r'viewBox="0 0 (\S+) (\S+)"', svg).groups())
    return {"alt": figure.alt, "width": round(width), "height": round(height),
            "url": "data:image/svg+xml," + quote(svg, safe=IN_URL)}


def _machine_code(document: dict) -> dict:
    families = static.sections(document)
    return {"started": document["started"], "commit": document["environment"]["commit"], "file": MACHINE_CODE,
            "families": families,
            "compilers": _distinct(row["compiler"] for family in families for row in family["rows"])}


def _facts(environment: dict) -> dict[str, str]:
    """An environment in the words of the index; facts that a machine does not have are left out."""
    packages, cuda, commit = environment["packages"], environment["cuda"] or {}, environment["commit"]
    facts = {
        "device": environment["device"],
        "backend": f"{environment['backend']}{', simulated, not timed' if environment['simulated'] else ''}",
        "driver": environment["driver"],
        "NVRTC": cuda.get("nvrtc"),
        "compilers": ", ".join(version for version in environment["compilers"].values() if version),
        "CPU": "{model}, {cores} cores".format(**environment["cpu"]),
        "Python": ", ".join([environment["python"], *(f"{name} {packages[name]}" for name in ("numpy", "torch")
                                                      if name in packages)]),
        "commit": commit and f"{commit}{' with changes that are not committed' if environment['dirty'] else ''}",
    }
    return {name: value for name, value in facts.items() if value}


def _distinct(items: Iterable) -> list:
    distinct = []
    for item in items:
        if item not in distinct:
            distinct.append(item)
    return distinct
