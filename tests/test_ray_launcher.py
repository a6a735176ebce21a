"""On CPU workers of a cluster that each test starts; skipped where Ray is not installed."""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from importlib.util import find_spec
from types import SimpleNamespace

import nbformat
import psutil
import pytest

from kernelbook import ROOT, cli, notebooks, processes, records, sweep

SCRIPT = """import sys
from pathlib import Path
from kernelbook import ROOT, cli, notebooks, runner
notebooks.FOLDER = runner.PROFILES = Path(sys.argv[1])
sys.exit(cli.main(sys.argv[2:]))"""
needs_ray = pytest.mark.skipif(find_spec("ray") is None, reason="no Ray: pip install -r requirements-ray.txt")


@pytest.fixture
def book(tmp_path):
    """A notebook that leaves its process in `begun` and waits, once, if it is told to; and a grid of four runs."""
    environment = records.environment(SimpleNamespace(name="cpu", device="a test", simulated=True))
    record = json.dumps({"notebook": "0_waits", "parameters": {}, "started": "2026-01-01T00:00:00+00:00",
                         "duration_s": 0, "environment": environment, "measurements": [], "verdicts": []})
    folder = tmp_path / "book ü"
    folder.mkdir()
    sources = ['draws: int = 3  # how many\nfolder: str = ""  # of notes\nrecord: str = ""  # where it goes',
               "import os, time\nfrom pathlib import Path\nprint('before', flush=True)\n"
               "begun = Path(folder, f'begun{draws}')\nnew = not begun.exists()\n"
               "begun.open('a').write(f'{os.getpid()}\\n')\nif new and Path(folder, 'wait').exists():\n"
               "    time.sleep(600 if draws else 0)",
               f"open(record, 'w').write({record!r})"]
    node = nbformat.v4.new_notebook(metadata=notebooks.METADATA, cells=[
        nbformat.v4.new_code_cell(source, id=f"c{i}") for i, source in enumerate(sources)])
    node.cells[0].metadata["tags"] = ["parameters"]
    nbformat.write(node, folder / "0_waits.ipynb")
    (folder / "grid.yaml").write_text(f"""cell_timeout_s: 600
notebooks: {{0_waits: {{draws: {{each: [0, 1, 2, 3]}}, folder: "{folder}"}}}}""", encoding="utf-8")
    return folder


@pytest.fixture
def checkout(tmp_path):
    """A copy of the package, which nobody edits while a batch runs."""
    for part in ("lib/kernelbook", "notebooks/claims"):
        shutil.copytree(ROOT / part, tmp_path / "checkout" / part, ignore=shutil.ignore_patterns("__pycache__"))
    return tmp_path / "checkout"


def start(checkout, book, out, *arguments):
    variables = {**os.environ, "PYTHONPATH": str(checkout / "lib"), "KERNELBOOK_CACHE": str(checkout / "cache"),
                 "RAY_AUTH_MODE": "disabled"}
    command = [sys.executable, "-c", SCRIPT, book, "sweep", book / "grid.yaml", "--out", out, *arguments]
    return subprocess.Popen(list(map(str, command)), env=variables, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
                            text=True, start_new_session=True)


def until(condition, process):
    deadline = time.monotonic() + 120
    while not condition():
        if time.monotonic() > deadline or process.poll() is not None:
            process.kill()
            pytest.fail("\n".join(process.communicate()))
        time.sleep(0.1)


def kernels(book):
    pids = [int(line) for path in book.glob("begun*") for line in path.read_text().split()]
    return [psutil.Process(pid) for pid in pids if psutil.pid_exists(pid)]


def statuses(out):
    return [row.status for row in sweep.standings(out)]


def test_without_ray_it_says_what_to_install(book, tmp_path, monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "ray", None)
    monkeypatch.setattr(notebooks, "FOLDER", book)
    assert cli.main(["sweep", str(book / "grid.yaml"), "--out", str(tmp_path / "out"), "--ray", "local"]) == 2
    assert "pip install -r requirements-ray.txt" in capsys.readouterr().err


@needs_ray
def test_a_worker_killed_in_the_middle_loses_no_run_and_a_batch_told_to_end_keeps_its_output(checkout, book, tmp_path):
    out = tmp_path / "out"
    (book / "wait").touch()
    process = start(checkout, book, out, "--ray", "local", "--workers", "2")
    until(lambda: (book / "begun1").exists() and (book / "begun2").exists(), process)
    assert statuses(out) == ["passed", "running", "running", "not run"]
    workers = [row.entry["pid"] for row in sweep.standings(out)[1:3]]
    assert len({process.pid, *workers}) == 3, "workers of Ray, one for each run"
    lost = kernels(book)
    os.kill(workers[0], signal.SIGKILL)
    until(lambda: statuses(out)[1] == "passed" and (book / "begun3").exists(), process)
    assert len(kernels(book)) == 2 and len(set(lost) & set(kernels(book))) == 1
    process.send_signal(signal.SIGTERM)
    output, errors = process.communicate(timeout=60)
    assert process.returncode == 130
    assert "its Ray worker was lost" in errors and "tried again" in errors
    assert statuses(out) == ["passed", "passed", "interrupted", "interrupted"]
    assert [len((book / f"begun{i}").read_text().split()) for i in range(4)] == [1, 2, 1, 1]
    assert printed_before(sweep.standings(out)[2])
    assert psutil.wait_procs(kernels(book), timeout=5)[1] == []


@needs_ray
def test_a_batch_that_is_killed_leaves_no_process_and_goes_on_without_ray(checkout, book, tmp_path):
    out = tmp_path / "out"
    (book / "wait").touch()
    process = start(checkout, book, out, "--ray", "local", "--workers", "2")
    until(lambda: (book / "begun1").exists() and (book / "begun2").exists(), process)
    until(lambda: printed_before(sweep.standings(out)[1]), process)  # and saved: Ray kills without asking
    workers = [psutil.Process(row.entry["pid"]) for row in sweep.standings(out)[1:3]]  # they hold the runs' locks
    started = workers + kernels(book)
    process.kill()
    process.communicate(timeout=60)
    assert psutil.wait_procs(started, timeout=processes.GRACE_S + 20)[1] == []
    assert statuses(out) == ["passed", "interrupted", "interrupted", "not run"]
    assert printed_before(sweep.standings(out)[1])
    (book / "wait").unlink()
    process = start(checkout, book, out, "--workers", "2")
    output, errors = process.communicate(timeout=120)
    assert process.returncode == 0, errors
    assert "0_waits draws=0: skipped" in output and statuses(out) == ["passed"] * 4


def printed_before(row):
    saved = row.folder / "0_waits.ipynb"
    cells = nbformat.read(saved, 4).cells if saved.exists() else []
    return any(output.get("text") == "before\n" for cell in cells for output in cell.get("outputs", []))
