"""One run: a notebook in a process and a folder of its own, watched, timed, and ended with all that belongs to it.

A run's folder holds for each notebook NAME the executed NAME.ipynb, its record NAME.json, NAME.log and its working
directory work/NAME; run.json says how each of them ended. What an earlier try left lies in earlier/1, earlier/2, ...
"""

import contextlib
import hashlib
import json
import os
import selectors
import socket
import subprocess
import sys
import tempfile
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import cache
from pathlib import Path
from typing import Any, BinaryIO

import nbformat

from kernelbook import ROOT, backends, notebooks, processes, records
from kernelbook.environment import environment

CODE = [ROOT / "lib" / "kernelbook", ROOT / "kernels", ROOT / "notebooks" / "claims", ROOT / "notebooks" / "data"]
"""What a notebook imports, compiles and reads."""
VISIBLE = {"cuda": "CUDA_VISIBLE_DEVICES", "hip": "HIP_VISIBLE_DEVICES"}
GOING_ON = ("waiting for its GPU", "running")
"""Statuses of a run that has a process."""
TICK_S = 0.2
LOGGED = 1_000_000
"""Bytes that a log may have before its middle is dropped: what libraries print reaches it past the notebook."""


@dataclass(frozen=True)
class Job:
    """One notebook to run, with the values it gets in place of its parameters' defaults."""

    notebook: Path
    parameters: dict[str, Any]
    cell_timeout_s: float
    run_timeout_s: float | None = None
    retries: int = 0  # after a run that failed
    inputs: dict[str, Any] | None = None  # of `inputs`, where the run must have these and no others

    @property
    def name(self) -> str:
        return self.notebook.stem

    @property
    def key(self) -> str:
        """Hash of `inputs`: two runs of the same key would be the same run."""
        return digest(self.inputs)


@dataclass(frozen=True, eq=False)
class Run:
    """A job and the folder that it runs in, which lists it in run.json."""

    job: Job
    folder: Path
    label: str  # in progress and summary

    def entry(self) -> dict:
        """What the folder's run.json says of it."""
        return read_state(self.folder)["notebooks"][self.job.name]

    def update(self, **changes) -> dict:
        """Change what run.json says of it, where the process that ran it no longer can."""
        state = read_state(self.folder)
        state["notebooks"][self.job.name].update(changes)
        write_state(self.folder, state)
        return state["notebooks"][self.job.name]


@dataclass(frozen=True)
class Device:
    """A GPU that one run at a time may have."""

    variable: str  # of the environment, which says what GPUs a process sees
    visible: str  # as that names it
    bus: str  # its PCI address, which no two GPUs of a machine share
    model: str


def devices() -> list[Device]:
    """The GPUs that this process may use; none where runs are simulated."""
    found = backends.available()
    variable = next((VISIBLE[name] for name in VISIBLE if found.get(name, "unknown") is None), None)
    if variable is None:
        return []
    import cupy

    count = cupy.cuda.runtime.getDeviceCount()
    chosen = os.environ.get(variable)
    names = chosen.split(",") if chosen else [str(i) for i in range(count)]
    return [Device(variable, names[i].strip(), cupy.cuda.Device(i).pci_bus_id,
                   cupy.cuda.runtime.getDeviceProperties(i)["name"].decode()) for i in range(count)]


def gpu_lock(device: Device) -> Path:
    """The file whose lock a run holds as long as it uses a GPU, whatever batch it belongs to."""
    return Path(tempfile.gettempdir(), f"kernelbook-gpu-{device.bus}.lock")


def inputs(job: Job, code: str, environment: dict[str, Any]) -> dict[str, Any]:
    """All that a run's result depends on: hash of the notebook, `code_hash`, every parameter, and the `machine`."""
    values = {name: parameter.default for name, parameter in notebooks.parameters(job.notebook).items()}
    values.update(job.parameters)
    values.pop(notebooks.RECORD, None)
    return {"notebook": _hash(notebooks.clean(job.notebook).encode()), "code": code, "parameters": values,
            "environment": environment}


def code_hash() -> str:
    """Hash of every file below CODE, in about 10 ms."""
    total = hashlib.sha256()
    for folder in CODE:
        for path in sorted(folder.rglob("*")):
            hidden = any(part.startswith(".") or part == "__pycache__" for part in path.relative_to(folder).parts)
            if path.is_file() and not hidden:  # an editor's own files, and what Python compiles
                total.update(f"{path.relative_to(folder.parent)} {_hash(path.read_bytes())}\n".encode())
    return total.hexdigest()


@cache
def machine() -> dict[str, Any]:
    """What of the machine and its software a run's result depends on, without what varies from run to run."""
    found = environment(backends.get())
    kept = ("device", "backend", "driver", "cuda", "compilers", "packages", "python", "platform")
    found["packages"].pop("kernelbook", None)  # `code_hash` says more than its version
    return {**{name: found[name] for name in kept}, "cpu": found["cpu"]["model"]}


def digest(value: Any) -> str:
    """Hash of a value of JSON's types."""
    return _hash(json.dumps(value, sort_keys=True).encode())


def _hash(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


def read_state(folder: Path) -> dict:
    """A run folder's run.json. Raises ValueError where there is none."""
    try:
        return json.loads((folder / "run.json").read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ValueError(f"{folder} is no run folder: it has no run.json") from None
    except ValueError as error:
        raise ValueError(f"{folder / 'run.json'} is damaged ({error}); remove the folder and run again") from None


def write_state(folder: Path, state: dict) -> None:
    """Replace a run folder's run.json. Raises OSError where that is impossible."""
    try:
        records.write(folder / "run.json", (json.dumps(state, indent=1, ensure_ascii=False) + "\n").encode())
    except OSError as error:
        raise OSError(f"cannot write {folder / 'run.json'}: {error.strerror or error}; what had ended before is "
                      "kept") from error


def perform(run: Run, device: Device | None = None, stop: threading.Event | None = None) -> dict:
    """Run a job once in its folder; returns its entry of the folder's run.json, which says how it goes and ended.

    device: the GPU it runs on, which no other run of this machine uses meanwhile; None where runs are simulated.
    stop: ends the run early, its output kept, with status "interrupted"; KeyboardInterrupt does so too
    and is raised on. Raises OSError where the folder cannot be written, BlockingIOError where another process runs
    something in it.
    """
    job, folder = run.job, run.folder
    stop = stop or threading.Event()
    with contextlib.ExitStack() as held:
        # A run of a batch that was killed may still be saving what it has.
        locks = [held.enter_context(processes.locked(folder / ".lock", 2 * processes.GRACE_S, stop))]
        state = read_state(folder)
        _set_aside(job, folder)
        before = state["notebooks"][job.name]
        entry = state["notebooks"][job.name] = {
            **{name: before[name] for name in ("key", "inputs") if name in before}, "status": GOING_ON[0],
            "reason": None, "parameters": job.parameters, "attempt": before.get("attempt", 0) + 1, "started": _now(),
            "host": socket.gethostname(), "pid": os.getpid()}
        if device:
            entry["gpu"] = device.bus
            write_state(folder, state)
            try:
                locks.append(held.enter_context(processes.locked(gpu_lock(device), float("inf"), stop)))
            except BlockingIOError:
                entry.update(status="interrupted", reason="told to end while it waited for its GPU")
                write_state(folder, state)
                return entry
        entry.update(status="running", started=_now())
        started = time.monotonic()

        def tell(cell: int, cells: int) -> None:
            entry.update(cell=cell, cells=cells)
            write_state(folder, state)

        try:
            write_state(folder, state)
            reason = _changed(job) or _execute(job, folder, device, stop, locks, tell) or _changed(job)
            entry["status"] = "interrupted" if stop.is_set() and reason else "failed" if reason else "passed"
            entry["reason"] = reason
        except BaseException as error:
            entry.update(status="interrupted", reason=type(error).__name__)
            raise
        finally:
            entry["seconds"] = round(time.monotonic() - started, 1)
            write_state(folder, state)
    return entry


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="seconds")


def _changed(job: Job) -> str | None:
    """What of a job's inputs is no longer as it was when the batch was planned, or is otherwise on this machine."""
    if job.inputs is None:
        return None
    found = inputs(job, code_hash(), machine())
    for part in ("notebook", "code", "parameters"):
        if found[part] != job.inputs[part]:
            what = {"code": "lib or kernels", "notebook": job.notebook.name, "parameters": "a default"}[part]
            return f"{what} changed since the batch was planned; start it again"
    for name, value in found["environment"].items():
        if value != job.inputs["environment"][name]:
            there, here = job.inputs["environment"][name], value
            if isinstance(value, dict) and isinstance(there, dict):
                name += f" {next(key for key in {**there, **here} if there.get(key) != here.get(key))}"
            return f"{socket.gethostname()} differs in {name} from where the batch was planned"
    return None


def _set_aside(job: Job, folder: Path) -> None:
    """Move what an earlier try has left out of the way."""
    left = [path for path in (*(folder / f"{job.name}{suffix}" for suffix in (".ipynb", ".json", ".jsonl", ".log")),
                              folder / "work" / job.name) if path.exists()]
    if left:
        number = next(i for i in range(1, sys.maxsize) if not (folder / "earlier" / str(i)).exists())
        target = folder / "earlier" / str(number)
        target.mkdir(parents=True)
        for path in left:
            path.rename(target / path.name)


def _execute(job: Job, folder: Path, device: Device | None, stop: threading.Event, locks: list[int],
             tell: Callable[[int, int], None]) -> str | None:
    """Run one notebook; None if it passed, else the reason why not."""
    output, record, log = (folder / f"{job.name}{suffix}" for suffix in (".ipynb", ".json", ".log"))
    work = folder / "work" / job.name
    work.mkdir(parents=True)
    mark = uuid.uuid4().hex
    # A short path of its own: sockets are named by at most 107 bytes, and a home may be long, shared or read-only.
    with (tempfile.TemporaryDirectory(prefix="kernelbook-") as scratch, open(log, "ab") as log_file,
          _pipe() as (lifeline_end, lifeline), _pipe() as (events, events_end)):
        command = [sys.executable, "-m", "kernelbook.execute", json.dumps({
            "notebook": str(job.notebook), "output": str(output), "folder": str(work),
            # Relative, so that a published page does not tell where it was made.
            "parameters": {**job.parameters, notebooks.RECORD: os.path.relpath(record, work)},
            "cell_timeout_s": job.cell_timeout_s}), str(events_end.fileno())]
        package = str(Path(records.__file__).parents[1])
        variables = {
            **os.environ, "JUPYTER_RUNTIME_DIR": scratch, "IPYTHONDIR": f"{scratch}/ipython", "PYTHONUTF8": "1",
            "PYTHONPATH": os.pathsep.join(filter(None, [package, os.environ.get("PYTHONPATH")])),
            "JUPYTER_PREFER_ENV_PATH": "1",  # else a kernel of the same name in the user's home comes first
            processes.MARK: mark, **({device.variable: device.visible} if device else {})}
        process = subprocess.Popen(command, cwd=work, env=variables, stdin=lifeline_end, stdout=log_file,
                                   stderr=log_file, pass_fds=[events_end.fileno(), *locks], start_new_session=True)
        try:
            lifeline_end.close()
            events_end.close()
            cell, reason = _watch(job, events, lifeline, log_file, stop, tell)
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(processes.GRACE_S)
        finally:
            lifeline.close()  # after an exception it saves what it has
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(processes.GRACE_S)
            processes.end(mark)
            _trim(log_file)
        code = process.wait()
    if reason:
        return f"code cell {cell}: {' '.join(reason.split())}"[:500] if cell else reason[:500]
    if code:
        return f"its process ended with signal {-code}" if code < 0 else f"its process ended with code {code}"
    return _incomplete(job, output, record)


@contextlib.contextmanager
def _pipe() -> Iterator[tuple[BinaryIO, BinaryIO]]:
    """A pipe's end to read from and its end to write to."""
    read, write = os.pipe()
    with os.fdopen(read, "rb", buffering=0) as read_end, os.fdopen(write, "wb", buffering=0) as write_end:
        yield read_end, write_end


def _trim(log: BinaryIO) -> None:
    """Drop what is too much of a log that others append to: all but its beginning, and what comes from now on."""
    if os.fstat(log.fileno()).st_size > 2 * LOGGED:
        os.ftruncate(log.fileno(), LOGGED)
        os.write(log.fileno(), b"\n[more than is kept of a log; the rest up to here is dropped]\n")


def _watch(job: Job, events: BinaryIO, lifeline: BinaryIO, log: BinaryIO, stop: threading.Event,
           tell: Callable[[int, int], None]) -> tuple[int, str | None]:
    """Follow a run's events to their end, which closing the lifeline brings about where it must not go on.

    Returns the code cell it came to, and why the run failed if that is known.
    """
    deadline = time.monotonic() + (job.run_timeout_s or float("inf"))
    cell, failed, ended, text = 0, None, None, b""
    with selectors.DefaultSelector() as selector:
        selector.register(events, selectors.EVENT_READ)
        while True:
            if not ended and (stop.is_set() or time.monotonic() > deadline):
                ended = ("told to end" if stop.is_set() else
                         f"the run took more than {job.run_timeout_s} s, the profile's run_timeout_s")
                lifeline.close()
                deadline = time.monotonic() + processes.GRACE_S + 2
            elif ended and time.monotonic() > deadline:
                return cell, ended
            _trim(log)
            if not selector.select(TICK_S):
                continue
            part = events.read(1 << 16)
            if not part:
                return cell, ended or failed
            *lines, text = (text + part).split(b"\n")
            for event in map(json.loads, lines):
                failed = event.get("failed", failed)
                if "cell" in event:
                    cell = event["cell"]
                    tell(cell, event["cells"])


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
