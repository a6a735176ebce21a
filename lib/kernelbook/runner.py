"""Runs notebooks in batch: parameters checked first, then each notebook in a process and a folder of its own."""

import contextlib
import itertools
import math
import os
import shlex
import sys
import tempfile
from collections.abc import Iterable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import yaml

from kernelbook import ROOT, backends, launch, notebooks
from kernelbook.backends import cache
from kernelbook.launch import Job, Run, read_state
from kernelbook.progress import Progress
from kernelbook.scheduler import Local, schedule

RUNS = ROOT / "runs"
PROFILES = ROOT / "notebooks" / "profiles"
EACH = "each"
"""Key under which a profile lists several values of a parameter: {each: [1, 2, 4]}."""


def default_profile() -> str:
    """gpu where there is a device, cpu elsewhere."""
    return "gpu" if launch.devices() else "cpu"


def plan(profile: str | Path, names: Iterable[str] = (), overrides: Iterable[str] = ()) -> list[Job]:
    """The jobs of a batch, every parameter checked against its notebook's own parameters cell.

    profile: the name of a file in notebooks/profiles, or the path of one elsewhere, ending in .yaml.
    names: notebooks to run, all if none are named. overrides: "name=value" texts, each for every chosen notebook
    that has such a parameter. A notebook whose parameters have several values ({each: [...]}) gives a job for each
    combination, the last parameter's values varying fastest.

    Raises ValueError for an unknown profile, notebook or parameter (with the nearest name), for a value
    that is not of the parameter's type or not finite, and for a combination that occurs twice; BackendUnavailable
    where no backend can run, and PermissionError where compiled kernels cannot be kept.
    """
    settings = _profile(profile)
    texts = [_split(override) for override in overrides]
    unused = dict(texts)
    for name in unused:
        if [name for name, _ in texts].count(name) > 1:
            raise ValueError(f"parameter {name!r} is set twice")
    jobs, texts = [], dict(texts)
    paths = notebooks.find(names)
    for path in paths:
        known = notebooks.parameters(path)
        _require(notebooks.RECORD, known, path)
        axes = {}
        for name, value in settings["notebooks"].get(path.stem, {}).items():
            where = f"profile {profile}: {path.stem}"
            _require(name, known, where)
            if name == notebooks.RECORD:
                raise ValueError(f"{where}: parameter {name!r} is set by the run itself: records go to its folder")
            axes[name] = [_located(where, notebooks.fit_yaml, known[name], item)
                          for item in _values(value, name, where)]
        for name in texts.keys() & known.keys():
            axes[name] = [_located(path.stem, notebooks.parse, known[name], texts[name])]
            unused.pop(name, None)
        for name, values in axes.items():
            for twice in (value for i, value in enumerate(values) if value in values[:i]):
                raise ValueError(f"profile {profile}: {path.stem}: parameter {name}: {twice!r} is listed twice")
        jobs += [Job(path, dict(zip(axes, values, strict=True)), settings["cell_timeout_s"],
                     settings["run_timeout_s"], settings["retries"]) for values in itertools.product(*axes.values())]
    for name in unused:
        _require(name, sorted({p for path in paths for p in notebooks.parameters(path)}),
                 ", ".join(path.stem for path in paths))
    _check_machine()
    return jobs


def listed(profile: str | Path) -> list[str]:
    """The notebooks that a profile has parameters for."""
    return list(_profile(profile)["notebooks"])


def run(jobs: list[Job], profile: str, out: Path | None = None) -> Path:
    """Run every job, one after the other, in a new folder below `out` (runs/); returns the folder.

    A notebook that fails does not stop the others; `failures` names it. KeyboardInterrupt and SIGTERM end the
    running notebook with all its processes, keep its partial output, mark the rest as not run, and are raised on.
    Raises ValueError for several jobs of one notebook, whose files would mix; OSError where the folder cannot be
    made or written.
    """
    names = [job.name for job in jobs]
    for name in names:
        if names.count(name) > 1:
            raise ValueError(f"profile {profile} gives {names.count(name)} runs of {name}, whose files would mix; "
                             "`python -m kernelbook sweep` has a folder for each")
    folder = _new_folder(out or RUNS, Path(profile).stem)
    launch.write_state(folder, new_state(profile, names))
    runs = [Run(job, folder, job.name) for job in jobs]
    with Local(launch.devices()[:1] or [None]) as launcher, Progress(runs, 1) as progress:
        schedule(runs, launcher, progress)
    return folder


def new_state(profile: str, names: list[str]) -> dict:
    """The run.json of a folder in which nothing has run yet."""
    return {"profile": str(profile), "started": datetime.now(UTC).isoformat(timespec="seconds"),
            "command": shlex.join(sys.argv[1:]), "notebooks": {name: {"status": "not run"} for name in names}}


def failures(folder: Path) -> dict[str, str]:
    """The notebooks of a run folder that did not pass, with the reason."""
    entries = read_state(folder)["notebooks"]
    return {name: entry.get("reason") or entry["status"]
            for name, entry in entries.items() if entry["status"] != "passed"}


def _check_machine() -> None:
    """Raise now what would else stop every notebook at its first kernel."""
    cache.folder()
    reasons = backends.available()
    if None not in reasons.values():
        raise backends.BackendUnavailable("no kernel can run here:\n" + "\n".join(
            f"  {name}: {reason}" for name, reason in reasons.items()))


def _profile(profile: str | Path) -> dict:
    """The content of a profile, checked as far as that goes without its notebooks' parameters."""
    path = _profile_path(profile)
    try:
        content = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ValueError(f"{path} is not YAML: {error}") from None
    except OSError as error:
        raise ValueError(f"cannot read {path}: {error.strerror}") from None
    required, optional = ("cell_timeout_s", "notebooks"), ("run_timeout_s", "retries")
    if not isinstance(content, dict) or not set(required) <= content.keys() <= {*required, *optional}:
        raise ValueError(f"{path}: expected the keys cell_timeout_s and notebooks, perhaps run_timeout_s and retries, "
                         "and no others")
    for name in [name for name in ("cell_timeout_s", "run_timeout_s") if name in content]:
        seconds = content[name]
        if isinstance(seconds, bool) or not isinstance(seconds, int | float) or not 0 < seconds < math.inf:
            raise ValueError(f"{path}: {name} is {seconds!r}, expected a number of seconds above 0")
    content = {"run_timeout_s": None, "retries": 0, **content}
    if type(content["retries"]) is not int or content["retries"] < 0:
        raise ValueError(f"{path}: retries is {content['retries']!r}, expected a count: how often a run that failed "
                         "is tried again")
    content["notebooks"] = {} if content["notebooks"] is None else content["notebooks"]
    if not isinstance(content["notebooks"], dict):
        raise ValueError(f"{path}: notebooks: expected their names and parameters, got {content['notebooks']!r}")
    stems = [path.stem for path in notebooks.find()]
    for notebook, values in content["notebooks"].items():
        _require(notebook, stems, path, "notebook")
        if values is None:
            content["notebooks"][notebook] = {}
        elif not isinstance(values, dict):
            raise ValueError(f"{path}: {notebook}: expected parameters and their values, got {values!r}")
    return content


def _profile_path(profile: str | Path) -> Path:
    if str(profile).endswith((".yaml", ".yml")):
        return Path(profile)
    known = {path.stem: path for path in sorted(PROFILES.glob("*.yaml"))}
    if profile not in known:
        raise ValueError(f"no profile {profile!r} in {PROFILES}{notebooks.nearest(profile, known)}")
    return known[profile]


def _values(value: Any, name: str, where: str) -> list:
    """The values that a profile gives a parameter, one or `each` of several."""
    if not isinstance(value, dict):
        return [value]
    values = value.get(EACH)
    if value.keys() != {EACH} or not isinstance(values, list) or not values:
        raise ValueError(f"{where}: parameter {name}: expected a value, or several as {{each: [...]}}, got {value!r}")
    return values


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


def writable(folder: Path) -> Path:
    """The absolute path of a folder, made if need be. Raises OSError where it cannot be made or written."""
    folder = folder.absolute()
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        raise OSError(f"cannot write runs to {folder} ({error.strerror}); choose another folder with --out") from error
    return folder


def _new_folder(parent: Path, profile: str) -> Path:
    """A folder that no other run has, though it start in the same second, and the link `latest` to it."""
    name = f"{datetime.now(UTC):%Y%m%dT%H%M%SZ}-{profile}"
    parent = writable(parent)
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
