import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import nbformat
import psutil
import pytest

from kernelbook import backends, notebooks, records, runner

PARAMETERS = 'draws: int = 3  # how many\nscale: float = 1.0  # of weights\nrecord: str = ""  # where it goes'
SAVE = """import json
document["parameters"] = {"draws": draws, "scale": scale}
json.dump(document, open(record, "w"))"""
ENVIRONMENT = records.environment(SimpleNamespace(name="cpu", device="a test", simulated=True))


def make(folder, name, *cells, save=SAVE):
    """A small notebook: parameters, `cells`, and a record written without importing what takes a second to import."""
    document = {"notebook": name, "parameters": {}, "started": "2026-01-01T00:00:00+00:00", "duration_s": 0,
                "environment": ENVIRONMENT, "measurements": [], "verdicts": []}
    sources = [PARAMETERS, f"document = {document!r}", *cells, save]
    node = nbformat.v4.new_notebook(metadata=notebooks.METADATA, cells=[
        nbformat.v4.new_code_cell(source, id=f"c{i}") for i, source in enumerate(sources)])
    node.cells[0].metadata["tags"] = ["parameters"]
    nbformat.write(node, folder / f"{name}.ipynb")


@pytest.fixture(scope="module")
def book(tmp_path_factory):
    """A folder with notebooks and profiles, used as the project's own."""
    folder = tmp_path_factory.mktemp("a book, with ü")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(notebooks, "FOLDER", folder)
        patch.setattr(runner, "PROFILES", folder)
        make(folder, "0_fine", "print('draws', draws, scale)")
        make(folder, "1_raises", "print('before')\nraise ValueError('bad <b>')", "print('after')")
        make(folder, "2_killed", "print('before')\nopen(record + 'l', 'w').write('{}')\n"
             "import os, signal\nos.kill(os.getpid(), signal.SIGKILL)")
        make(folder, "3_exits", "import sys\nsys.exit(0)")
        make(folder, "4_endless",
             "import time\nprint('before', flush=True)\nopen('begun', 'w').close()\ntime.sleep(600)")
        make(folder, "5_floods", "for _ in range(300): print('x' * 1_000_000)", "b'x' * 30_000_000",
             "import os\nfor _ in range(30): os.write(1, b'y' * 1_000_000)", "raise ValueError('z' * 10_000_000)")
        make(folder, "6_no_record", save="pass")
        make(folder, "7_half_a_record", save="open(record, 'w').write('{')")
        profile(folder, "smoke", {"0_fine": {"scale": 2}})
        yield folder


def profile(folder, name, values, timeout=6):
    (folder / f"{name}.yaml").write_text(f"cell_timeout_s: {timeout}\nnotebooks: {json.dumps(values)}\n")


@pytest.fixture(scope="module")
def batch(book, tmp_path_factory):
    """Every notebook but the one that takes long, run in one batch."""
    out = tmp_path_factory.mktemp("runs") / "not there yet" / "ü"
    names = [path.stem for path in notebooks.find() if path.stem != "5_floods"]
    return runner.run(runner.plan("smoke", names, ["draws=4"]), "smoke", out)


def printed(folder, name):
    cells = nbformat.read(folder / f"{name}.ipynb", 4).cells
    return "".join(output.text for cell in cells for output in cell.get("outputs", [])
                   if output.output_type == "stream")


def test_the_committed_profiles_fit_the_committed_notebooks():
    for path in sorted((runner.ROOT / "notebooks" / "profiles").glob("*.yaml")):
        assert [job.name for job in runner.plan(path.stem)] == [p.stem for p in notebooks.find()]


def test_profile_and_command_line_set_parameters(book):
    jobs = {job.name: job for job in runner.plan("smoke", overrides=["draws=5"])}
    assert jobs["0_fine"].parameters == {"scale": 2.0, "draws": 5}
    assert jobs["1_raises"].parameters == {"draws": 5}
    assert [job.name for job in runner.plan("smoke", ["1_raises", "0_fine"])] == ["0_fine", "1_raises"]


@pytest.mark.parametrize("overrides, message", [
    (["drows=3"], "no parameter 'drows'; did you mean 'draws'"),
    (["draws=3.5"], "0_fine: parameter draws: expected int, got 3.5"),
    (["draws=None"], "expected int, got None"),
    (["scale=nan"], r"expected float, got 'nan' \(str\)$"),
    (["draws=nan"], r"expected int, got 'nan' \(str\)$"),
    (["scale=NaN"], "nan is not a finite number"),
    (["scale=1e999"], "inf is not a finite number"),
    (["draws"], "expected name=value"),
    (["record=/elsewhere"], "'record' is set by the run"),
])
def test_bad_parameters_are_refused_before_anything_runs(book, overrides, message):
    with pytest.raises(ValueError, match=message):
        runner.plan("smoke", overrides=overrides)


@pytest.mark.parametrize("text, message", [
    ("cell_timeout_s: 6\nnotebooks: {0_fin: {}}", "no notebook '0_fin'; did you mean '0_fine'"),
    ("cell_timeout_s: 6\nnotebooks: {0_fine: {drows: 1}}", "no parameter 'drows'; did you mean 'draws'"),
    ("cell_timeout_s: 6\nnotebooks: {0_fine: {scale: 1e-3}}", "takes 1e-3 for a string, write 0.001"),
    ("cell_timeout_s: 6\nnotebooks: {0_fine: {scale: .nan}}", "nan is not a finite number"),
    ("cell_timeout_s: 6\nnotebooks: {0_fine: {scale: nan}}", r"expected float, got 'nan' \(str\)$"),
    ("cell_timeout_s: 6\nnotebooks: {0_fine: 3}", "expected parameters and their values, got 3"),
    ("cell_timeout_s: -1\nnotebooks: {}", "cell_timeout_s is -1"),
    ("cell_timeout: 6\nnotebooks: {}", "expected the keys cell_timeout_s and notebooks"),
    ("cell_timeout_s: [", "is not YAML"),
])
def test_bad_profiles_are_refused(book, text, message):
    (book / "bad.yaml").write_text(text)
    with pytest.raises(ValueError, match=message):
        runner.plan("bad")
    (book / "bad.yaml").unlink()


def test_unknown_profile_and_notebook_name_the_nearest(book):
    with pytest.raises(ValueError, match="no profile 'smoky'.*did you mean 'smoke'"):
        runner.plan("smoky")
    with pytest.raises(ValueError, match="no notebook '0_fin'.*did you mean '0_fine'"):
        runner.plan("smoke", ["0_fin"])


def test_a_machine_that_can_run_no_kernel_is_found_out_before_anything_runs(book, monkeypatch, tmp_path):
    with monkeypatch.context() as patch:
        patch.setattr(backends, "available", lambda: {"cuda": "no NVIDIA GPU", "cpu": "needs a C++20 compiler"})
        with pytest.raises(backends.BackendUnavailable, match="(?s)cuda: no NVIDIA GPU.*cpu: needs a C"):
            runner.plan("smoke")
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("KERNELBOOK_CACHE", str(tmp_path / "file"))
    with pytest.raises(PermissionError, match="cannot write compiled kernels to .*; set KERNELBOOK_CACHE"):
        runner.plan("smoke")


def test_what_passes_leaves_notebook_record_log_and_status(batch):
    assert printed(batch, "0_fine") == "draws 4 2.0\n"
    assert records.load(batch / "0_fine.json")["parameters"] == {"draws": 4, "scale": 2.0}
    assert "code cell" not in (batch / "0_fine.log").read_text()
    state = runner.read_state(batch)["notebooks"]["0_fine"]
    assert (state["status"], state["reason"], state["parameters"]) == ("passed", None, {"draws": 4, "scale": 2.0})
    assert (batch.parent / "latest").resolve() == batch.resolve()


def test_every_kind_of_failure_is_seen_and_none_stops_the_others(batch):
    failed = runner.failures(batch)
    assert failed.keys() == {"1_raises", "2_killed", "3_exits", "4_endless", "6_no_record", "7_half_a_record"}
    assert failed["1_raises"] == "code cell 4: ValueError: bad <b>"
    assert "Kernel died" in failed["2_killed"]
    assert failed["3_exits"] == "it stopped early: code cell 5 of 5 did not run"
    assert "more than 6 s" in failed["4_endless"]
    assert failed["6_no_record"] == "it wrote no record"
    assert "record is not valid" in failed["7_half_a_record"]


def test_a_failure_keeps_its_partial_output_and_log(batch):
    assert printed(batch, "1_raises") == "before\n"
    assert printed(batch, "4_endless") == "before\n"
    assert "ValueError" in (batch / "1_raises.log").read_text()
    assert (batch / "2_killed.jsonl").read_text() == "{}", "what its record would have held"


def test_a_flood_of_output_is_cut(book, tmp_path):
    """Of 300 MB printed, a value of 30 MB, 30 MB past Python's streams, and an error of 10 MB."""
    profile(book, "patient", {}, timeout=120)
    folder = runner.run(runner.plan("patient", ["5_floods"]), "patient", tmp_path)
    text = printed(folder, "5_floods")
    assert len(text) < 101_000 and text.endswith("the rest is not kept]\n")
    cells = [cell for cell in nbformat.read(folder / "5_floods.ipynb", 4).cells if cell.cell_type == "code"]
    value, error = cells[4].outputs[0], cells[6].outputs[0]
    assert "not kept" in value.data["text/plain"] and len(error.evalue) < 101_000
    assert (folder / "5_floods.ipynb").stat().st_size < 1_000_000
    log = (folder / "5_floods.log").read_text()
    assert len(log) < 3_000_000 and "dropped" in log and "ValueError: zzz" in log
    reason = runner.failures(folder)["5_floods"]
    assert reason.startswith("code cell 7: ValueError: zzz") and len(reason) <= 500


def test_runs_in_the_same_second_get_folders_of_their_own(tmp_path):
    folders = [runner._new_folder(tmp_path, "smoke") for _ in range(3)]
    assert len(set(folders)) == 3
    assert (tmp_path / "latest").resolve() == folders[-1].resolve()


def test_a_folder_that_cannot_be_made_is_an_error(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(OSError, match="cannot write runs to .*file"):
        runner.run([], "smoke", tmp_path / "file")


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT], ids=lambda number: number.name)
def test_a_signal_ends_all_processes_and_keeps_what_there_is(book, tmp_path, number):
    """Under LC_ALL=C too, which must not trip over the folder's name."""
    profile(book, "long", {}, timeout=600)
    script = ("import sys; from pathlib import Path; from kernelbook import cli, notebooks, runner\n"
              f"notebooks.FOLDER = runner.PROFILES = Path({str(book)!r})\n"
              "sys.exit(cli.main(sys.argv[1:]))")
    environment = {**os.environ, "LC_ALL": "C", "PYTHONPATH": str(Path(records.__file__).parents[1])}
    command = [sys.executable, "-c", script, "reproduce", "--profile", "long", "--out", tmp_path / "a ü",
               "--notebook", "4_endless", "6_no_record"]
    process = subprocess.Popen(command, env=environment, stderr=subprocess.PIPE, text=True, start_new_session=True)
    folder = tmp_path / "a ü" / "latest"
    deadline = time.monotonic() + 60
    while not (folder / "work" / "4_endless" / "begun").exists():
        assert process.poll() is None and time.monotonic() < deadline
        time.sleep(0.2)
    time.sleep(0.5)  # for what was printed to arrive
    family = psutil.Process(process.pid).children(recursive=True)
    assert len(family) >= 2, "the notebook's process and its kernel"
    process.send_signal(number)
    _, errors = process.communicate(timeout=30)
    assert process.returncode == 130 and "interrupted" in errors
    _, alive = psutil.wait_procs(family, timeout=5)
    assert alive == []
    state = runner.read_state(folder)["notebooks"]
    assert {name: entry["status"] for name, entry in state.items()} == {
        "4_endless": "interrupted", "6_no_record": "not run"}
    assert printed(folder, "4_endless") == "before\n"
