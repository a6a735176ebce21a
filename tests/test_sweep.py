import errno
import json
import os
import signal
import subprocess
import sys
import threading
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import nbformat
import psutil
import pytest

from kernelbook import backends, cli, launch, notebooks, processes, records, report, runner, scheduler, sweep
from kernelbook.progress import Progress

PARAMETERS = """draws: int = 3  # how many
scale: float = 1.0  # of weights
limit: int | None = None  # most draws
label: str = ""  # printed
ledger: str = ""  # file that gets a line when the notebook starts
record: str = ""  # where it goes"""
START = "if ledger:\n    open(ledger, 'a').write(f'{draws}\\n')\nprint(draws, scale, limit, label)"
SCRIPT = """import sys
from dataclasses import replace
from pathlib import Path
from kernelbook import backends, cli, launch, notebooks, runner
notebooks.FOLDER = runner.PROFILES = Path(sys.argv[1])
launch.CODE = []
sys.exit(cli.main(sys.argv[2:]))"""


ENVIRONMENT = records.environment(SimpleNamespace(name="cpu", device="a test", simulated=True))


def make(folder, name, *cells):
    """A notebook of `cells` that leaves a record, without importing what takes a second to import."""
    record = json.dumps({"notebook": name, "parameters": {}, "started": "2026-01-01T00:00:00+00:00", "duration_s": 0,
                         "environment": ENVIRONMENT, "measurements": [], "verdicts": []})
    sources = [PARAMETERS, START, *cells, f"open(record, 'w').write({record!r})"]
    node = nbformat.v4.new_notebook(metadata=notebooks.METADATA, cells=[
        nbformat.v4.new_code_cell(source, id=f"c{i}") for i, source in enumerate(sources)])
    node.cells[0].metadata["tags"] = ["parameters"]
    nbformat.write(node, folder / f"{name}.ipynb")


@pytest.fixture
def book(tmp_path, monkeypatch):
    """A folder with one notebook, used as the project's own."""
    folder = tmp_path / "a book, with ü"
    folder.mkdir()
    (folder / "code").mkdir()
    (folder / "code" / "code.py").write_text("x = 1")
    monkeypatch.setattr(notebooks, "FOLDER", folder)
    monkeypatch.setattr(runner, "PROFILES", folder)
    monkeypatch.setattr(launch, "CODE", [folder / "code"])
    make(folder, "0_fine")
    return folder


@pytest.fixture
def no_gpu(monkeypatch):
    monkeypatch.setattr(launch, "devices", lambda: [])


def grid(folder, notebook="0_fine", timeouts="cell_timeout_s: 60", **values):
    path = folder / "grid.yaml"
    path.write_text(f"{timeouts}\nnotebooks: {{{notebook}: {json.dumps(values)}}}\n", encoding="utf-8")
    return path


def go(path, out, workers=2, overrides=()):
    """Plan and run a sweep here; the labels of the runs it skipped."""
    jobs = runner.plan(path, runner.listed(path), overrides)
    with scheduler.Local.of(workers) as launcher:
        return sweep.sweep(jobs, path, out, launcher)


def statuses(out):
    return {row.label: row.status for row in sweep.standings(out)}


def printed(row):
    cells = nbformat.read(row.folder / f"{row.notebook}.ipynb", 4).cells
    return "".join(output.text for cell in cells for output in cell.get("outputs", [])
                   if output.output_type == "stream")


def start(book, *arguments, **variables):
    """The command line in a process of its own, which finds its notebooks in `book`."""
    package = str(Path(records.__file__).parents[1])
    environment = {**os.environ, "LC_ALL": "C", "PYTHONPATH": package, **variables}
    return subprocess.Popen([sys.executable, "-c", SCRIPT, book, *map(str, arguments)], env=environment,
                            stdout=subprocess.PIPE, stderr=subprocess.PIPE, encoding="utf-8", start_new_session=True)


def until(condition, process=None, seconds=60):
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline
        assert process is None or process.poll() is None, process.communicate()
        time.sleep(0.1)


def passed(out):
    if not (out / "sweep.json").exists():
        return {}
    return {row.label: (row.folder / "run.json").read_bytes() for row in sweep.standings(out) if row.status == "passed"}


# what is planned

def plan(path, overrides=()):
    return [job.parameters for job in runner.plan(path, runner.listed(path), overrides)]


def test_a_grid_gives_every_combination_in_order(book):
    path = grid(book, draws={"each": [1, -2]}, scale={"each": [1, 0.5]}, label="x")
    assert plan(path) == [{"draws": d, "scale": s, "label": "x"} for d in (1, -2) for s in (1.0, 0.5)]
    assert plan(path, ["draws=7"]) == [{"draws": 7, "scale": s, "label": "x"} for s in (1.0, 0.5)]
    assert plan(grid(book, limit={"each": [None, -1]})) == [{"limit": None}, {"limit": -1}]


@pytest.mark.parametrize("content, message", [
    ("{0_fine: {drows: {each: [1]}}}", "no parameter 'drows'; did you mean 'draws'"),
    ("{0_fin: {}}", "no notebook '0_fin'; did you mean '0_fine'"),
    ("{0_fine: {draws: {each: [1, x]}}}", r"parameter draws: expected int, got 'x' \(str\)"),
    ("{0_fine: {draws: {each: [1, null]}}}", r"expected int, got None"),
    ("{0_fine: {draws: {each: [1, true]}}}", r"expected int, got True"),
    ("{0_fine: {scale: {each: [1.0, .nan]}}}", "nan is not a finite number"),
    ("{0_fine: {scale: {each: [-.inf]}}}", "-inf is not a finite number"),
    ("{0_fine: {scale: {each: [1e-3]}}}", "takes 1e-3 for a string, write 0.001"),
    ("{0_fine: {scale: {each: [1, 1.0]}}}", "parameter scale: 1.0 is listed twice"),
    ("{0_fine: {draws: {each: []}}}", "expected a value, or several as {each: "),
    ("{0_fine: {draws: {each: 3}}}", "expected a value, or several as {each: "),
    ("{0_fine: {draws: {every: [3]}}}", "expected a value, or several as {each: "),
    ("{0_fine: {record: {each: [a, b]}}}", "'record' is set by the run itself"),
    ("[0_fine]", "expected their names and parameters"),
    ("{}\nretries: -1", "retries is -1, expected a count"),
    ("{}\nrun_timeout_s: .inf", "run_timeout_s is inf, expected a number of seconds above 0"),
    ("{}\nrun_timeout: 3", "expected the keys cell_timeout_s and notebooks, perhaps run_timeout_s and retries"),
])
def test_a_bad_grid_is_refused_before_anything_is_written(book, capsys, content, message):
    path = book / "grid.yaml"
    path.write_text(f"cell_timeout_s: 60\nnotebooks: {content}\n")
    with pytest.raises(ValueError, match=message):
        plan(path)
    assert cli.main(["sweep", str(path), "--out", str(book / "out")]) == 2
    assert not (book / "out").exists() and "Traceback" not in capsys.readouterr().err


def test_a_grid_that_is_not_there(book):
    with pytest.raises(ValueError, match="cannot read .*none.yaml: No such file"):
        runner.plan(book / "none.yaml")
    with pytest.raises(ValueError, match="parameter 'draws' is set twice"):
        plan(grid(book), ["draws=1", "draws=2"])


def test_a_profile_with_several_values_is_for_sweeps_only(book, tmp_path):
    path = grid(book, draws={"each": [1, 2]})
    with pytest.raises(ValueError, match="gives 2 runs of 0_fine, whose files would mix; .* sweep"):
        runner.run(runner.plan(path, ["0_fine"]), path, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_the_committed_grid_fits_the_committed_notebooks():
    for path in sorted((runner.ROOT / "notebooks" / "sweeps").glob("*.yaml")):
        assert len(runner.plan(path, runner.listed(path))) > 1


def test_a_key_hangs_on_notebook_code_parameters_and_environment(book):
    job, = runner.plan(grid(book), ["0_fine"])
    machine = {"packages": {"numpy": "1"}, "device": "a"}

    def key(job=job, machine=machine):
        return replace(job, inputs=launch.inputs(job, launch.code_hash(), machine)).key

    first = key()
    assert key() == first
    assert key(machine={**machine, "device": "b"}) != first
    assert key(machine={**machine, "packages": {"numpy": "2"}}) != first
    assert key(replace(job, parameters={"draws": 4})) != first
    assert key(replace(job, parameters={"draws": 3})) == first, "the default, said aloud"
    (book / "code" / ".code.py.swp").write_text("an editor's")
    assert key() == first
    (book / "code" / "code.py").write_text("x = 2")
    assert key() != first


# what is run

def test_what_has_passed_is_skipped_and_what_has_not_is_run_again(book, no_gpu, tmp_path):
    """Failed runs, runs whose record has gone, and runs of a notebook that was edited."""
    make(book, "1_flaky", "if draws == 2 and not open(label).read():\n    raise ValueError('not yet')")
    flag, ledger, out = tmp_path / "flag", tmp_path / "ledger", tmp_path / "not there yet" / "ü"
    flag.write_text("")
    path = book / "grid.yaml"
    path.write_text(f"""cell_timeout_s: 60
notebooks:
  0_fine: {{scale: 2, ledger: {ledger}}}
  1_flaky: {{draws: {{each: [1, 2]}}, label: {flag}, ledger: {ledger}}}""")
    assert go(path, out) == []
    assert statuses(out) == {"0_fine": "passed", "1_flaky draws=1": "passed", "1_flaky draws=2": "failed"}
    first, _, bad = sweep.standings(out)
    assert printed(first) == "3 2.0 None \n"
    assert bad.entry["reason"] == "code cell 4: ValueError: not yet" and "not yet" in bad.log.read_text()
    assert sorted(ledger.read_text().split()) == ["1", "2", "3"]
    ledger.unlink()

    flag.write_text("now")
    (first.folder / "0_fine.json").unlink()
    assert go(path, out) == ["1_flaky draws=1"]
    assert set(statuses(out).values()) == {"passed"}
    assert sorted(ledger.read_text().split()) == ["2", "3"]
    assert sweep.standings(out)[2].entry["attempt"] == 2
    assert "not yet" in (bad.folder / "earlier" / "1" / "1_flaky.log").read_text()
    ledger.unlink()

    make(book, "0_fine", "print('edited')")
    assert go(path, out) == ["1_flaky draws=1", "1_flaky draws=2"]
    assert ledger.read_text().split() == ["3"]
    assert "1_flaky draws=2" in report.build(out, tmp_path / "report").read_text()
    assert first.folder.exists() and printed(sweep.standings(out)[0]).endswith("edited\n")


def test_failed_runs_are_tried_again_and_a_run_that_takes_too_long_is_ended(book, no_gpu, tmp_path):
    make(book, "1_third_time", "n = len(open(ledger).readlines())\nassert n == 3, n")
    make(book, "2_endless", "import time\nfor i in range(600):\n    print('tick')\n    time.sleep(0.5)")
    ledger, out = tmp_path / "ledger", tmp_path / "out"
    go(grid(book, "1_third_time", "cell_timeout_s: 60\nretries: 2", ledger=str(ledger)), out)
    row, = sweep.standings(out)
    assert (row.status, row.entry["attempt"]) == ("passed", 3)
    assert "AssertionError: 2" in (row.folder / "earlier" / "2" / "1_third_time.log").read_text()
    go(grid(book, "2_endless", "cell_timeout_s: 60\nrun_timeout_s: 6", ledger=str(ledger)), out)
    row, = sweep.standings(out)
    assert row.status == "failed" and printed(row).startswith("3 1.0 None \ntick\n")
    assert row.entry["reason"] == "code cell 4: the run took more than 6 s, the profile's run_timeout_s"


def test_inputs_that_change_while_a_batch_runs_are_noticed(book, no_gpu, tmp_path, monkeypatch):
    make(book, "1_editor", f"open({str(book / 'code' / 'code.py')!r}, 'a').write('# edited')")
    path = book / "grid.yaml"
    path.write_text("cell_timeout_s: 60\nnotebooks: {0_fine: {}, 1_editor: {}}")
    jobs = runner.plan(path, ["1_editor"]) + runner.plan(path, ["0_fine"])
    with scheduler.Local.of() as launcher:
        sweep.sweep(jobs, path, tmp_path / "out", launcher)
    reasons = [row.entry["reason"] for row in sweep.standings(tmp_path / "out")]
    assert reasons == ["lib or kernels changed since the batch was planned; start it again"] * 2
    job = replace(jobs[0], inputs=launch.inputs(jobs[0], launch.code_hash(), launch.machine()))
    assert launch._changed(job) is None
    monkeypatch.setattr(launch, "machine", lambda: {**job.inputs["environment"], "packages": {"numpy": "0"}})
    assert "differs in packages " in launch._changed(job)


def test_nothing_that_a_run_starts_outlives_it(book, no_gpu, tmp_path):
    """Neither what a cell leaves running, nor the kernel whose parent was killed."""
    make(book, "1_daemon", "import subprocess\nprocess = subprocess.Popen(['sleep', '600'], start_new_session=True)\n"
                           "open(label, 'w').write(str(process.pid))")
    make(book, "2_alone", "import os, signal, time\nopen(label, 'w').write(str(os.getpid()))\n"
                          "print('before', flush=True)\ntime.sleep(2.5)\n"
                          "os.kill(os.getppid(), signal.SIGKILL)\ntime.sleep(600)")
    out = tmp_path / "out"
    go(grid(book, "1_daemon", label=str(tmp_path / "daemon")), out)
    assert statuses(out) == {"1_daemon": "passed"}
    go(grid(book, "2_alone", label=str(tmp_path / "kernel")), out)
    row, = sweep.standings(out)
    assert row.entry["reason"] == "its process ended with signal 9" and printed(row).endswith("before\n")
    for name in ("daemon", "kernel"):
        assert not psutil.pid_exists(int((tmp_path / name).read_text()))


def test_two_batches_on_one_folder(book, no_gpu, tmp_path):
    path, out = grid(book), tmp_path / "out"
    out.mkdir()
    with (processes.locked(out / ".lock", wait_s=0),
          pytest.raises(ValueError, match="another batch is at work in .*out; wait for it, or choose another folder")):
        go(path, out)
    assert not (out / "sweep.json").exists()


def test_a_run_waits_for_what_an_earlier_one_still_does_in_its_folder(book, no_gpu, tmp_path):
    go(grid(book), tmp_path)
    row, = sweep.standings(tmp_path)
    run = launch.Run(runner.plan(grid(book), ["0_fine"])[0], row.folder, "again")
    with processes.locked(row.folder / ".lock", wait_s=0), pytest.raises(BlockingIOError):
        stop = threading.Event()
        stop.set()
        launch.perform(run, stop=stop)
    assert (row.folder / "0_fine.json").exists()


def test_a_full_disk_ends_the_batch_and_keeps_what_had_ended(book, no_gpu, tmp_path, monkeypatch, capsys):
    path, out = grid(book, draws={"each": [1, 2, 3]}), tmp_path / "out"
    write, full = records.write, threading.Event()

    def fails(file, content):
        if full.is_set():
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        write(file, content)
        if b'"passed"' in content:
            full.set()

    monkeypatch.setattr(records, "write", fails)
    assert cli.main(["sweep", str(path), "--out", str(out)]) == 2
    assert "run.json: No space left on device; what had ended before is kept" in capsys.readouterr().err
    assert statuses(out) == {"0_fine draws=1": "passed", "0_fine draws=2": "not run", "0_fine draws=3": "not run"}
    full.clear()
    monkeypatch.setattr(records, "write", write)
    assert go(path, out) == ["0_fine draws=1"]
    assert set(statuses(out).values()) == {"passed"}


MOUNTS = ["unshare", "-rm", "sh", "-ec", 'mount -t tmpfs -o size=${SIZE}k disk "$DISK"; exec "$@"', "sh"]


def may_mount(tmp_path):
    variables = {**os.environ, "SIZE": "100", "DISK": str(tmp_path)}
    try:
        return subprocess.run([*MOUNTS, "true"], env=variables, capture_output=True).returncode == 0
    except OSError:
        return False


def test_a_disk_that_is_really_full_and_then_read_only(book, tmp_path):
    """On a small disk of its own: a run fills it, space is made, the sweep goes on; then it turns read-only."""
    disk = tmp_path / "disk"
    disk.mkdir()
    if not may_mount(disk):
        pytest.skip("this user may not mount a file system")
    make(book, "1_fills", "import os\nif draws == 2 and not os.path.exists('../../../freed'):\n"
                          "    print('before', flush=True)\n    import time; time.sleep(1.5)\n"
                          "    open('../../../big', 'wb').write(bytes(10_000_000))")
    path = grid(book, "1_fills", draws={"each": [1, 2, 3]})
    script = SCRIPT.replace("sys.exit(cli.main(sys.argv[2:]))", f"""
import subprocess, psutil
from kernelbook import sweep
disk = Path({str(disk)!r})
def go():
    code = cli.main(['sweep', {str(path)!r}, '--out', str(disk / 'out')])
    print('CODE', code, [row.status for row in sweep.standings(disk / 'out')], flush=True)
go()
(disk / 'out' / 'big').unlink()
(disk / 'out' / 'freed').touch()
go()
subprocess.run(['mount', '-o', 'remount,ro', disk], check=True)
go()
print('LEFT', len(psutil.Process().children(recursive=True)))""")
    package = str(Path(records.__file__).parents[1])
    done = subprocess.run([*MOUNTS, sys.executable, "-c", script, book], capture_output=True, text=True, timeout=120,
                          env={**os.environ, "SIZE": "2000", "DISK": str(disk), "PYTHONPATH": package})
    lines = [line for line in done.stdout.splitlines() if line.startswith(("CODE", "LEFT"))]
    assert lines[1:] == ["CODE 0 ['passed', 'passed', 'passed']", "CODE 2 ['passed', 'passed', 'passed']", "LEFT 0"]
    assert lines[0].startswith("CODE 2 ['passed', "), done.stderr
    assert "No space left on device" in done.stderr and "(Read-only file system)" in done.stderr


# several at a time

def test_each_gpu_has_one_run_at_a_time(book, tmp_path, monkeypatch):
    make(book, "1_timed", "import os, time\nt = time.time()\ntime.sleep(0.5)\n"
                          "print(os.environ['CUDA_VISIBLE_DEVICES'], t, time.time())")
    fake = [launch.Device("CUDA_VISIBLE_DEVICES", f"GPU-{i}", f"test-{os.getpid()}-{i}", "H200") for i in range(2)]
    other = launch.Device("CUDA_VISIBLE_DEVICES", "GPU-2", f"test-{os.getpid()}-2", "L4")
    monkeypatch.setattr(launch, "devices", lambda: [*fake, other])
    with pytest.raises(ValueError, match="3 workers for 2 H200: timed runs never share a GPU"):
        scheduler.Local.of(3)
    with pytest.raises(ValueError, match="0 workers; expected 1 or more"):
        scheduler.Local.of(0)
    go(grid(book, "1_timed", draws={"each": [1, 2, 3, 4]}), tmp_path, workers=None)
    spans = {}
    for row in sweep.standings(tmp_path):
        gpu, begin, end = printed(row).split()[-3:]
        spans.setdefault(gpu, []).append((float(begin), float(end)))
    assert spans.keys() == {"GPU-0", "GPU-1"}
    for times in map(sorted, spans.values()):
        assert all(end < begin for (_, end), (begin, _) in zip(times, times[1:], strict=False))
    assert any(a < d and c < b for a, b in spans["GPU-0"] for c, d in spans["GPU-1"]), "both at once"


def test_gpus_are_named_as_this_process_sees_them(monkeypatch):
    runtime = SimpleNamespace(getDeviceCount=lambda: 2, getDeviceProperties=lambda i: {"name": b"H200"})
    cuda = SimpleNamespace(runtime=runtime, Device=lambda i: SimpleNamespace(pci_bus_id=f"0000:{i}"))
    monkeypatch.setitem(sys.modules, "cupy", SimpleNamespace(cuda=cuda))
    for name, variable in launch.VISIBLE.items():
        monkeypatch.setattr(backends, "available", lambda name=name: {"cuda": "none", "hip": "none", name: None})
        monkeypatch.delenv(variable, raising=False)
        assert [device.visible for device in launch.devices()] == ["0", "1"]
        monkeypatch.setenv(variable, "5, GPU-6e1c,-1,2")
        assert launch.devices() == [launch.Device(variable, "5", "0000:0", "H200"),
                                    launch.Device(variable, "GPU-6e1c", "0000:1", "H200")]
    monkeypatch.setattr(backends, "available", lambda: {"cuda": "no GPU", "cpu": None})
    assert launch.devices() == []


def test_a_gpu_that_another_batch_uses_is_waited_for(book, tmp_path):
    device = launch.Device("CUDA_VISIBLE_DEVICES", "GPU-0", f"test-{os.getpid()}-busy", "H200")
    job, = runner.plan(grid(book), ["0_fine"])
    launch.write_state(tmp_path, runner.new_state("x", ["0_fine"]))
    run, entry = launch.Run(job, tmp_path, "x"), {}
    thread = threading.Thread(target=lambda: entry.update(launch.perform(run, device)))
    with processes.locked(launch.gpu_lock(device), wait_s=0):
        thread.start()
        until(lambda: run.entry()["status"] == "waiting for its GPU")
        assert sweep.table(sweep.standings(tmp_path)) == "0_fine  waiting for its GPU\n"
    thread.join()
    assert entry["status"] == "passed"


# what a batch survives

def test_a_sweep_killed_at_half_is_resumed_with_nothing_lost_or_repeated(book, tmp_path):
    """24 runs, two at a time; under LC_ALL=C, with Unicode in folders and parameters."""
    ledger, out = tmp_path / "led ger ü", tmp_path / "out ü"
    path = grid(book, draws={"each": list(range(24))}, label="größer")
    arguments = ["sweep", path, "--out", out, "--workers", 2, "-p", f"ledger={ledger}"]
    process = start(book, *arguments)
    batch = psutil.Process(process.pid)
    until(lambda: len(passed(out)) >= 12 and len(batch.children(recursive=True)) >= 3, process)  # two runs, a kernel
    batch.suspend()  # so that it starts no more
    family = batch.children(recursive=True)
    process.kill()
    process.communicate()
    _, alive = psutil.wait_procs(family, timeout=processes.GRACE_S + 5)
    assert alive == []
    half = passed(out)
    assert 12 <= len(half) < 24 and "running" not in statuses(out).values()

    process = start(book, *arguments)
    output, errors = process.communicate(timeout=90)
    assert process.returncode == 0, errors
    whole = passed(out)
    assert len(whole) == 24 and all(whole[label] == state for label, state in half.items())
    assert output.count("skipped, it had passed before") == len(half)
    started = [int(line) for line in ledger.read_text().split()]
    assert set(started) == set(range(24)) and len(started) <= 24 + 2
    assert len(list(out.glob("*/0_fine.json"))) == 24
    assert printed(sweep.standings(out)[23]) == "23 1.0 None größer\n"


def test_a_signal_ends_a_sweep_which_then_goes_on(book, tmp_path):
    make(book, "1_slow", "import os, time\nif not os.path.exists(label):\n    open(f'{label}{draws}', 'w').close()\n"
                         "    time.sleep(600 if draws else 0)")
    flag, out = tmp_path / "flag", tmp_path / "out"
    path = grid(book, "1_slow", "cell_timeout_s: 600", draws={"each": [0, 1, 2, 3]}, label=str(flag))
    process = start(book, "sweep", path, "--out", out, "--workers", 2)
    until(lambda: Path(f"{flag}1").exists() and Path(f"{flag}2").exists(), process)
    assert sweep.standings(out)[1].status == "running" and "cell 4 of" in sweep.table(sweep.standings(out))
    family = psutil.Process(process.pid).children(recursive=True)
    process.send_signal(signal.SIGTERM)
    output, errors = process.communicate(timeout=30)
    assert process.returncode == 130 and "interrupted" in errors
    _, alive = psutil.wait_procs(family, timeout=5)
    assert alive == []
    assert list(statuses(out).values()) == ["passed", "interrupted", "interrupted", "not run"]
    assert "4 runs: 1 passed, 2 interrupted, 1 not run" in output
    assert printed(sweep.standings(out)[1]).startswith("1 1.0 None")

    flag.touch()
    process = start(book, "run", "1_slow", "--profile", path, "--out", out, "-p", "draws=1")
    output, errors = process.communicate(timeout=60)
    assert process.returncode == 0, errors
    assert "1 runs: 1 passed" in output
    assert (next(out.glob("*/earlier")) / "1" / "1_slow.ipynb").exists(), "what the interrupted try has left"


def test_status_tells_of_flat_run_folders_too(book, no_gpu, tmp_path, capsys):
    make(book, "1_bad", "1 / 0")
    path = grid(book)
    folder = runner.run(runner.plan(path), path, tmp_path)
    assert cli.main(["status", str(folder)]) == 1
    assert "1_bad   failed after" in capsys.readouterr().out
    assert cli.main(["status", str(tmp_path)]) == 2
    assert "is no run folder" in capsys.readouterr().err


def test_time_left_is_guessed_from_what_has_ended(book, tmp_path, capsys):
    launch.write_state(tmp_path, runner.new_state("x", ["0_fine"]))
    runs = [launch.Run(launch.Job(book / "0_fine.ipynb", {}, 60), tmp_path, str(i)) for i in range(5)]
    with Progress(runs, slots=2) as progress:
        progress.start(runs[0])
        assert progress.left() is None
        progress.end(runs[0], {"status": "passed", "seconds": 100}, again=False)
        assert "about 3:20 left" in capsys.readouterr().err
        progress.start(runs[1])
        assert 199 < progress.left() <= 200, "four runs of 100 s on two slots"
        progress.end(runs[1], {"status": "failed", "seconds": 3, "reason": "x"}, again=True)
        assert "1: failed after 3 s: x; tried again" in capsys.readouterr().err
        assert progress.left() == 200
