"""Runs kept by what they depend on: one that has passed is not repeated, and a sweep that was stopped goes on.

A sweep's folder holds sweep.json, which lists its runs, and for each the run folder NOTEBOOK-KEY (of `launch`). The
key is the hash of notebook, code, parameters and environment: whatever of them changes makes another run.
"""

import json
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from kernelbook import launch, processes, records, runner
from kernelbook.launch import Job, Run
from kernelbook.progress import Progress
from kernelbook.scheduler import Launcher, schedule

KEY_DIGITS = 12


@dataclass(frozen=True)
class Standing:
    """How a run of a folder stands."""

    label: str
    folder: Path
    notebook: str
    status: str  # passed, failed, interrupted, running, waiting for its GPU, not run
    entry: dict[str, Any]  # of the folder's run.json

    @property
    def log(self) -> Path:
        return self.folder / f"{self.notebook}.log"


def sweep(jobs: list[Job], profile: str | Path, folder: Path, launcher: Launcher) -> list[str]:
    """Run in `folder` all jobs that have not passed there with the same inputs; returns the labels of the others.

    How each of them ended, `standings` tells. Raises ValueError where another batch is at work in the folder or two
    jobs are the same run, OSError where the folder cannot be made or written; what is raised while runs go on is
    `schedule`'s.
    """
    folder = runner.writable(folder)
    try:
        with processes.locked(folder / ".lock", wait_s=0):
            runs = _runs(jobs, folder, launcher.machine())
            _list(runs, profile, folder)
            finished = [run for run in runs if _has_passed(run)]
            durations: dict[str, list[float]] = {}
            for run in finished:
                durations.setdefault(run.job.name, []).append(run.entry()["seconds"])
            rest = [run for run in runs if run not in finished]
            with Progress(rest, launcher.slots(), durations) as progress:
                schedule(rest, launcher, progress)
    except BlockingIOError:
        raise ValueError(f"another batch is at work in {folder}; wait for it, or choose another folder with --out"
                         ) from None
    return [run.label for run in finished]


def standings(folder: Path) -> list[Standing]:
    """How each run of a sweep's folder, or each notebook of a run folder, stands at the moment.

    Raises ValueError for a folder that is neither.
    """
    folder = Path(folder)
    if not (folder / "sweep.json").exists():
        return [_standing(name, folder, name) for name in launch.read_state(folder)["notebooks"]]
    runs = json.loads((folder / "sweep.json").read_text(encoding="utf-8"))["runs"]
    return [_standing(run["label"], folder / run["folder"], run["notebook"]) for run in runs]


def table(rows: list[Standing]) -> str:
    """Standings as text, a line each."""
    width = max((len(row.label) for row in rows), default=0)
    return "".join(f"{row.label:{width}}  {_words(row)}\n" for row in rows)


def summary(rows: list[Standing]) -> str:
    """How many runs stand how, and for each that has not passed why, and where its log is."""
    counts = {}
    for row in rows:
        counts[row.status] = counts.get(row.status, 0) + 1
    lines = [f"{len(rows)} runs: {', '.join(f'{count} {status}' for status, count in counts.items())}"]
    for row in rows:
        if row.status != "passed":
            lines.append(f"{row.label}: {_words(row)}")
            lines += [f"  log: {row.log}"] if row.log.exists() else []
    return "\n".join(lines) + "\n"


def _runs(jobs: list[Job], folder: Path, machine: dict) -> list[Run]:
    texts = [{name: json.dumps(value, ensure_ascii=False) for name, value in job.parameters.items()} for job in jobs]
    values: dict[tuple[str, str], set[str]] = {}
    for job, text in zip(jobs, texts, strict=True):
        for name, value in text.items():
            values.setdefault((job.name, name), set()).add(value)
    runs: dict[Path, Run] = {}
    code = launch.code_hash()
    for job, text in zip(jobs, texts, strict=True):
        job = replace(job, inputs=launch.inputs(job, code, machine))
        label = " ".join([job.name, *(f"{name}={value}" for name, value in text.items()
                                      if len(values[job.name, name]) > 1)])
        place = folder / f"{job.name}-{job.key[:KEY_DIGITS]}"
        if place in runs:
            raise ValueError(f"{label} and {runs[place].label} are the same run: their parameters are equal")
        runs[place] = Run(job, place, label)
    return list(runs.values())


def _list(runs: list[Run], profile: str | Path, folder: Path) -> None:
    """Write sweep.json, and run.json in the folder of every run that has none."""
    for run in runs:
        if not (run.folder / "run.json").exists():
            state = runner.new_state(profile, [run.job.name])
            hashes = {name: value if name in ("notebook", "code") else launch.digest(value)
                      for name, value in run.job.inputs.items()}
            state["notebooks"][run.job.name].update(parameters=run.job.parameters, key=run.job.key, inputs=hashes)
            launch.write_state(run.folder, state)
    content = {"profile": str(profile), "started": datetime.now(UTC).isoformat(timespec="seconds"), "runs": [
        {"label": run.label, "folder": run.folder.name, "notebook": run.job.name, "parameters": run.job.parameters}
        for run in runs]}
    records.write(folder / "sweep.json", (json.dumps(content, indent=1, ensure_ascii=False) + "\n").encode())


def _has_passed(run: Run) -> bool:
    files = (run.folder / f"{run.job.name}{suffix}" for suffix in (".ipynb", ".json"))
    return run.entry()["status"] == "passed" and all(path.exists() for path in files)


def _standing(label: str, folder: Path, notebook: str) -> Standing:
    entry = launch.read_state(folder)["notebooks"][notebook]
    status = entry["status"]
    if status in launch.GOING_ON and not processes.is_locked(folder / ".lock"):
        status = "interrupted"  # with no chance to say so
    return Standing(label, folder, notebook, status, entry)


def _words(row: Standing) -> str:
    words = row.status
    if row.status in launch.GOING_ON and "cells" in row.entry:
        words += f", cell {row.entry['cell']} of {row.entry['cells']}"
    if row.status not in launch.GOING_ON and row.entry.get("seconds") is not None:
        words += f" after {row.entry['seconds']:.0f} s"
    return f"{words}: {row.entry['reason']}" if row.entry.get("reason") else words
