"""Runs notebooks in batch: parameters checked first, then each notebook in a process and a folder of its own.

A run folder, never used twice, holds for each notebook NAME the executed NAME.ipynb, its record NAME.json, NAME.log
and its working directory work/NAME; run.json says how each of them ended.
"""

import contextlib
import json
import os
import shlex
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import nbformat
import psutil
import yaml
from tqdm import tqdm

from kernelbook import ROOT, backends, notebooks, records
from kernelbook.backends import cache

RUNS = ROOT / "runs"
PROFILES = ROOT / "notebooks" / "profiles"
GRACE_S = 10
"""How long a notebook that is told to end may take to save what it has."""


@dataclass(frozen=True)
class Job:
    """One notebook to run, with the values it gets in place of its parameters' defaults."""

    notebook: Path
    parameters: dict[str, Any]
    cell_timeout_s: float

    @property
    def name(self) -> str:
        return self.notebook.stem


def default_profile() -> str:
    """gpu where there is a device, cpu elsewhere."""
    return "gpu" if backends.available()["cuda"] is None else "cpu"


def plan(profile: str, names: Iterable[str] = (), overrides: Iterable[str] = ()) -> list[Job]:
    """The jobs of a batch, every parameter checked against its notebook's own parameters cell.

    profile: the name of a file in notebooks/profiles. names: notebooks to run, all if none are named.
    overrides: "name=value" texts, each for every chosen notebook that has such a parameter.

    Raises ValueError for an unknown profile, notebook or parameter (with the nearest name) and for a value
    that is not of the parameter's type or not finite; BackendUnavailable where no backend can run, and
    PermissionError where compiled kernels cannot be kept.
    """
    settings = _profile(profile)
    jobs, unused = [], dict(_split(override) for override in overrides)
    texts = dict(unused)
    paths = notebooks.find(names)
    for path in paths:
        known = notebooks.parameters(path)
        _require(notebooks.RECORD, known, path)
        values = {}
        for name, value in settings["notebooks"].get(path.stem, {}).items():
            _require(name, known, f"profile {profile}: {path.stem}")
            values[name] = _located(f"profile {profile}: {path.stem}", notebooks.fit_yaml, known[name], value)
        for name in texts.keys() & known.keys():
            values[name] = _located(path.stem, notebooks.parse, known[name], texts[name])
            unused.pop(name, None)
        jobs.append(Job(path, values, settings["cell_timeout_s"]))
    for name in unused:
        _require(name, sorted({p for path in paths for p in notebooks.parameters(path)}),
                 ", ".join(path.stem for path in paths))
    _check_machine()
    return jobs


def run(jobs: list[Job], profile: str, out: Path | None = None) -> Path:
    """Run every job, one after the other, in a new folder below `out` (runs/); returns the folder.

    A notebook that fails does not stop the others; `failures` names it. KeyboardInterrupt and SIGTERM end the
    running notebook with all its processes, keep its partial output, mark the rest as not run, and are raised on.
    Raises OSError where the folder cannot be made.
    """
    folder = _new_folder(out or RUNS, profile)
    state = {"profile": profile, "started": _now(), "command": shlex.join(sys.argv[1:]),
             "notebooks": {job.name: {"status": "not run"} for job in jobs}}
    with _sigterm_interrupts(), _Progress(jobs) as progress:
        for job in jobs:
            progress.start(job)
            entry = state["notebooks"][job.name] = {"status": "running", "parameters": job.parameters}
            _save_state(folder, state)
            try:
                reason = _execute(job, folder, progress)
                entry["status"] = "failed" if reason else "passed"
                entry["reason"] = reason
            except BaseException as error:
                entry.update(status="interrupted", reason=type(error).__name__)
                raise
            finally:
                entry["seconds"] = progress.seconds
                _save_state(folder, state)
                progress.end(job, entry)
    return folder


def failures(folder: Path) -> dict[str, str]:
    """The notebooks of a run folder that did not pass, with the reason."""
    entries = read_state(folder)["notebooks"]
    return {name: entry.get("reason") or entry["status"]
            for name, entry in entries.items() if entry["status"] != "passed"}


def read_state(folder: Path) -> dict:
    """A run folder's run.json. Raises ValueError where there is none."""
    try:
        return json.loads((folder / "run.json").read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ValueError(f"{folder} is no run folder: it has no run.json") from None


def _check_machine() -> None:
    """Raise now what would else stop every notebook at its first kernel."""
    cache.folder()
    reasons = backends.available()
    if None not in reasons.values():
        raise backends.BackendUnavailable("no kernel can run here:\n" + "\n".join(
            f"  {name}: {reason}" for name, reason in reasons.items()))


def _profile(name: str) -> dict:
    known = {path.stem: path for path in sorted(PROFILES.glob("*.yaml"))}
    if name not in known:
        raise ValueError(f"no profile {name!r} in {PROFILES}{notebooks.nearest(name, known)}")
    try:
        content = yaml.safe_load(known[name].read_text(encoding="utf-8"))
    except yaml.YAMLError as error:
        raise ValueError(f"{known[name]} is not YAML: {error}") from None
    if not isinstance(content, dict) or content.keys() != {"cell_timeout_s", "notebooks"}:
        raise ValueError(f"{known[name]}: expected the keys cell_timeout_s and notebooks, and no others")
    timeout = content["cell_timeout_s"]
    if isinstance(timeout, bool) or not isinstance(timeout, int | float) or not 0 < timeout < float("inf"):
        raise ValueError(f"{known[name]}: cell_timeout_s is {timeout!r}, expected a number of seconds above 0")
    content["notebooks"] = content["notebooks"] or {}
    stems = [path.stem for path in notebooks.find()]
    for notebook, values in content["notebooks"].items():
        _require(notebook, stems, known[name], "notebook")
        if not isinstance(values, dict):
            raise ValueError(f"{known[name]}: {notebook}: expected parameters and their values, got {values!r}")
    return content


def _require(name: str, known: Iterable[str], where: Any, kind: str = "parameter") -> None:
    if name not in known:
        raise ValueError(f"{where}: no {kind} {name!r}{notebooks.nearest(name, known)}")


def _located(where: str, function, *arguments) -> Any:
    try:
        return function(*arguments)
    except ValueError as error:
        raise ValueError(f"{where}: {error}") from None


def _split(override: str) -> tuple[str, str]:
    name, equals, value = override.partition("=")
    if not equals:
        raise ValueError(f"parameter {override!r}: expected name=value")
    if name == notebooks.RECORD:
        raise ValueError(f"parameter {name!r} is set by the run itself: records go to its folder")
    return name, value


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="seconds")


def _new_folder(parent: Path, profile: str) -> Path:
    """A folder that no other run has, though it start in the same second, and the link `latest` to it."""
    name = f"{datetime.now(UTC):%Y%m%dT%H%M%SZ}-{profile}"
    parent = parent.absolute()
    try:
        parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=parent):
            pass
    except OSError as error:
        raise OSError(f"cannot write runs to {parent} ({error.strerror}); choose another folder with --out") from error
    for suffix in ["", *(f"-{i}" for i in range(2, 100))]:
        folder = parent / f"{name}{suffix}"
        try:
            folder.mkdir()
            break
        except FileExistsError:
            continue
    else:
        raise FileExistsError(f"{folder} and 98 like it exist")
    with tempfile.TemporaryDirectory(dir=parent, prefix=".latest") as aside:
        link = Path(aside) / "latest"
        link.symlink_to(folder.name)
        with contextlib.suppress(OSError):  # someone's own folder of that name stays
            os.replace(link, parent / "latest")
    return folder


def _save_state(folder: Path, state: dict) -> None:
    records.write(folder / "run.json", (json.dumps(state, indent=1, ensure_ascii=False) + "\n").encode())


def _execute(job: Job, folder: Path, progress: "_Progress") -> str | None:
    """Run one notebook; None if it passed, else the reason why not."""
    output, record, log = (folder / f"{job.name}{suffix}" for suffix in (".ipynb", ".json", ".log"))
    work = folder / "work" / job.name
    work.mkdir(parents=True)
    read_end, write_end = os.pipe()
    # A short path of its own: sockets are named by at most 107 bytes, and a home may be long, shared or read-only.
    with tempfile.TemporaryDirectory(prefix="kernelbook-") as scratch, open(log, "wb") as log_file:
        command = [sys.executable, "-m", "kernelbook.execute", json.dumps({
            "notebook": str(job.notebook), "output": str(output), "folder": str(work),
            # Relative, so that a published page does not tell where it was made.
            "parameters": {**job.parameters, notebooks.RECORD: os.path.relpath(record, work)},
            "cell_timeout_s": job.cell_timeout_s}), str(write_end)]
        package = str(Path(records.__file__).parents[1])
        environment = {
            **os.environ, "JUPYTER_RUNTIME_DIR": scratch, "IPYTHONDIR": f"{scratch}/ipython", "PYTHONUTF8": "1",
            "PYTHONPATH": os.pathsep.join(filter(None, [package, os.environ.get("PYTHONPATH")])),
            "JUPYTER_PREFER_ENV_PATH": "1"}  # else a kernel of the same name in the user's home comes first
        process = subprocess.Popen(command, cwd=work, env=environment, stdin=subprocess.DEVNULL, stdout=log_file,
                                   stderr=log_file, pass_fds=[write_end], start_new_session=True)
        os.close(write_end)
        cell, failed = 0, None
        try:
            with os.fdopen(read_end, encoding="utf-8") as events:
                for line in events:
                    event = json.loads(line)
                    failed = event.get("failed", failed)
                    if "cell" in event:
                        cell = event["cell"]
                        progress.cell(job, cell, event["cells"])
            code = process.wait()
        finally:
            _end(process)
    if failed:
        return f"code cell {cell}: {' '.join(failed.split())}"[:500]
    if code:
        return f"its process ended with signal {-code}" if code < 0 else f"its process ended with code {code}"
    return _incomplete(job, output, record)


def _incomplete(job: Job, output: Path, record: Path) -> str | None:
    """What a notebook that ended without an error left undone.

    A cell that calls sys.exit, or a kernel that dies, raises nothing, and papermill marks the cells after it as
    completed; only execution counts and the record tell.
    """
    cells = [cell for cell in nbformat.read(output, 4).cells if cell.cell_type == "code" and cell.source.strip()]
    undone = [number for number, cell in enumerate(cells, 1) if cell.execution_count is None]
    if undone:
        return f"it stopped early: code cell {undone[0]} of {len(cells)} did not run"
    if not record.exists():
        return "it wrote no record"
    try:
        name = records.load(record)["notebook"]
    except ValueError as error:
        return f"its record is not valid: {error}"
    return None if name == job.name else f"its record is that of notebook {name!r}"


def _end(process: subprocess.Popen) -> None:
    """End a notebook's process and all below it: first asked, so that it saves its output, then killed."""
    if process.poll() is not None:
        return
    family = psutil.Process(process.pid).children(recursive=True)  # the kernel leads a session of its own
    process.terminate()
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(GRACE_S)
    for member in family:
        with contextlib.suppress(psutil.NoSuchProcess):
            member.kill()
    process.kill()
    process.wait()


@contextlib.contextmanager
def _sigterm_interrupts():
    """Let SIGTERM, which batch systems send before they kill, end a run as Ctrl-C does."""

    def interrupt(number, frame):
        raise KeyboardInterrupt(signal.Signals(number).name)

    before = signal.signal(signal.SIGTERM, interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


class _Progress:
    """One bar over all notebooks on a terminal, a line for each step elsewhere."""

    def __init__(self, jobs: list[Job]):
        self.total = {job.name: self._code_cells(job.notebook) for job in jobs}
        self.done = 0  # cells of the notebooks that have ended
        self.bar = tqdm(total=sum(self.total.values()), unit="cell", disable=not sys.stderr.isatty(),
                        bar_format="{desc} {percentage:3.0f}%|{bar}| {elapsed} {postfix}", dynamic_ncols=True)

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.bar.close()

    @staticmethod
    def _code_cells(path: Path) -> int:
        return sum(cell.cell_type == "code" for cell in notebooks.read(path).cells)

    @property
    def seconds(self) -> float:
        return round(time.monotonic() - self._started, 1)

    def start(self, job: Job) -> None:
        self._started = time.monotonic()
        position = list(self.total).index(job.name) + 1
        self.bar.set_description(f"{job.name} ({position}/{len(self.total)})")
        if self.bar.disable:
            self._say(f"{job.name}: started ({position} of {len(self.total)}, {self.total[job.name]} cells)")

    def cell(self, job: Job, cell: int, cells: int) -> None:
        self.bar.n = self.done + min(cell - 1, self.total[job.name])  # papermill adds a cell with the parameters
        self.bar.set_postfix_str(f"cell {cell} of {cells}")

    def end(self, job: Job, entry: dict) -> None:
        self.done += self.total[job.name]
        self.bar.n = self.done
        self.bar.refresh()
        reason = f": {entry['reason']}" if entry.get("reason") else ""
        self._say(f"{job.name}: {entry['status']} after {entry['seconds']:.0f} s{reason}")

    def _say(self, line: str) -> None:
        if self.bar.disable:
            print(line, file=sys.stderr, flush=True)
        else:
            self.bar.write(line, file=sys.stderr)
