"""What somebody does who explores: changes a kernel, interrupts a cell, opens JupyterLab, moves a slider."""

import contextlib
import os
import re
import shutil
import subprocess
import sys
import tempfile
import threading
import time
import urllib.error
import urllib.request
from pathlib import Path
from types import SimpleNamespace

import nbformat
import psutil
import pytest
from jupyter_client import KernelManager
from papermill.iorw import load_notebook_node
from papermill.parameterize import parameterize_notebook

from kernelbook import ROOT, notebooks, runner

FAULTS = Path(__file__).parent / "data" / "simulator" / "faults.cu"
CELL_S = 120
NOTEBOOK_S = 420  # with every kernel to compile, beside other tests
LAB_S = 60


class Session:
    """A notebook's kernel, without the notebook."""

    def __init__(self, folder):
        # Its sockets' names are those of this file, and must be short.
        self.connection = tempfile.TemporaryDirectory()
        self.manager = KernelManager(kernel_name="python3", transport="ipc",
                                     connection_file=str(Path(self.connection.name) / "kernel.json"))
        self.manager.start_kernel(cwd=str(folder))
        self.client = self.manager.client()
        self.client.start_channels()
        try:
            self.client.wait_for_ready(timeout=CELL_S)
        except RuntimeError:
            self.end()
            raise

    def run(self, cell, on_text=None):
        """What a cell prints, and its error as a notebook shows it, "" for none. on_text is called with each print."""
        text, error = "", ""

        def hear(message):
            nonlocal text, error
            content = message["content"]
            if message["msg_type"] == "stream" and content["name"] == "stdout":
                text += content["text"]
                if on_text:
                    on_text(content["text"])
            elif message["msg_type"] == "error":
                error = re.sub(r"\x1b\[[\d;]*m", "", "\n".join(content["traceback"]))

        self.client.execute_interactive(cell, timeout=CELL_S, output_hook=hear)
        return text, error

    def end(self):
        self.client.stop_channels()
        self.manager.shutdown_kernel(now=True)
        self.connection.cleanup()


@pytest.fixture(scope="module")
def session(tmp_path_factory):
    started = Session(tmp_path_factory.mktemp("elsewhere"))
    yield started
    started.end()


# ---- changing a kernel

@pytest.fixture(scope="module")
def kernels(tmp_path_factory, session):
    """A copy of kernels/, which the session compiles from, with the product that a cell multiplies and checks."""
    folder = tmp_path_factory.mktemp("ü kernels") / "kernels"
    shutil.copytree(ROOT / "kernels", folder)
    assert session.run(f"""
from pathlib import Path
import numpy as np
from kernelbook import backends, experiments, records
from kernelbook.backends import source
from kernelbook.experiments import grouped_gemm as study
from kernelbook.ops import grouped_gemm as op
source.KERNELS = Path({str(folder)!r})
backend = backends.get("cpu")
lab = experiments.Lab(backend, records.Record("1_grouped_gemm", {{}}, records.environment(backend)))
strips = study.random_strips(lab.rng(), 70, 64)
x = lab.rng(1).standard_normal((2, 64), np.float32)
other = backend.compile("ceilings/memory.cu")
built = []
build = type(backend._compiler).build
type(backend._compiler).build = lambda self, s, *rest: built.append(Path(s.path).name) or build(self, s, *rest)
""") == ("", "")
    return folder


MULTIPLY = """
built.clear()
gemm = op.GroupedGemm(backend, strips)
e = lab.errors("grouped_gemm", "2_float_activations", {}, backend.numpy(gemm(backend.array(x))),
               op.reference(x, strips), study.BOUND)
assert backend.compile("ceilings/memory.cu") is other
print(e.relative_frobenius <= study.BOUND, [name for name in built if name != "simulator.cpp"])
"""

FILE = "2_float_activations.cu"
RIGHT, WRONG = "const float v = ag[k];", "const float v = 2.f * ag[k];"


def change(file, old, new):
    text = file.read_text(encoding="utf-8")
    assert old in text
    file.write_text(text.replace(old, new), encoding="utf-8")


def test_running_a_cell_again_compiles_and_measures_what_was_changed(session, kernels):
    file = kernels / "grouped_gemm" / FILE
    assert session.run(MULTIPLY) == (f"True {[FILE, '3_reduce_splits.cu']}\n", "")
    assert session.run(MULTIPLY) == ("True []\n", "")
    change(file, RIGHT, WRONG)
    assert session.run(MULTIPLY) == (f"False {[FILE]}\n", "")
    change(file, WRONG, RIGHT)
    assert session.run(MULTIPLY) == ("True []\n", ""), "it is known already"


def test_a_header_counts_as_part_of_every_kernel_that_includes_it(session, kernels):
    session.run(MULTIPLY)
    header = kernels / "grouped_gemm" / "split.h"
    change(header, "value = t;", "value = 2.f * t;")
    assert session.run(MULTIPLY)[0] == f"False {[FILE]}\n"
    change(header, "value = 2.f * t;", "value = t;")
    assert session.run(MULTIPLY)[0] == "True []\n"


def test_a_compile_error_shows_file_and_line_and_the_cell_runs_once_it_is_mended(session, kernels):
    file = kernels / "grouped_gemm" / FILE
    change(file, RIGHT, "const float v = ag[kk];")
    line = file.read_text(encoding="utf-8").partition("ag[kk]")[0].count("\n") + 1
    words, error = session.run(MULTIPLY)
    assert words == "" and f"CompileError: grouped_gemm/{FILE} does not compile with" in error
    assert f"\n  line {line}: const float v = ag[kk];\n" in error
    assert re.search(rf"^{re.escape(FILE)}:{line}:\d+: error: .*kk", error, re.M), "the compiler's own words"
    change(file, "const float v = ag[kk];", RIGHT)
    assert session.run(MULTIPLY) == ("True []\n", "")


def test_a_compile_error_in_a_header_shows_its_file_and_line(session, kernels):
    header = kernels / "grouped_gemm" / "split.h"
    change(header, "value = t;", "value = tt;")
    line = header.read_text(encoding="utf-8").partition("value = tt;")[0].count("\n") + 1
    words, error = session.run(MULTIPLY)
    assert re.search(rf"^split\.h:{line}:\d+: error: .*tt", error, re.M) and "    value = tt;" in error
    change(header, "value = tt;", "value = t;")
    assert session.run(MULTIPLY) == ("True []\n", "")


# ---- interrupting a cell

def test_an_interrupted_launch_leaves_the_session_usable(session):
    assert session.run(f"""
import numpy as np
from kernelbook import backends
backend = backends.get("cpu")
waits = backend.compile({str(FAULTS)!r}).kernel("waits_forever")
flag = backend.array(np.zeros(1, np.int32))
kept = 17""") == ("", "")
    words, error = session.run("""
print("launching", flush=True)
waits(2, 2, [flag, np.int32(0)])
print("ended")""", on_text=lambda text: threading.Timer(0.5, session.manager.interrupt_kernel).start())
    assert words == "launching\n" and error.rstrip().endswith("KeyboardInterrupt:")
    assert session.run("""
flag[0] = 1
waits(2, 2, [flag, np.int32(0)])
print(kept)""") == ("17\n", "")


# ---- from any folder

def test_a_notebook_runs_from_top_to_bottom_in_any_folder(tmp_path):
    """As Restart and Run All does it, on a copy that lies somewhere else; 0_machine measures least."""
    folder = tmp_path / "a folder ü"
    folder.mkdir()
    session = Session(folder)
    try:
        for cell in nbformat.read(next(path for path in notebooks.find() if path.stem == "0_machine"), 4).cells:
            if cell.cell_type == "code":
                source = cell.source
                for name, value in {"matmul_size": 256, "memory_mib": 16}.items():
                    source = re.sub(rf"^({name}: int) = \d+", rf"\1 = {value}", source, flags=re.M)
                assert session.run(source)[1] == "", source
    finally:
        session.end()
    assert list(folder.iterdir()) == [], "nothing is left behind"


# ---- JupyterLab

@contextlib.contextmanager
def jupyterlab(folder, arguments=""):
    """`make lab` with settings of its own in `folder`: its process, address and token."""
    settings = {name: str(folder / name) for name in ("JUPYTER_CONFIG_DIR", "JUPYTER_DATA_DIR", "JUPYTER_RUNTIME_DIR",
                                                      "JUPYTERLAB_SETTINGS_DIR", "JUPYTERLAB_WORKSPACES_DIR")}
    for path in settings.values():
        Path(path).mkdir()
    environment = {name: value for name, value in os.environ.items()
                   if not name.startswith(("MAKE", "MFLAGS", "JUPYTER"))}
    root = "--allow-root" if os.geteuid() == 0 else ""
    log = folder / "log"
    with open(log, "wb") as out, subprocess.Popen(
            ["make", "-C", str(ROOT), "lab", f"PY={sys.executable}", f"ARGS=--no-browser --port=0 {root} {arguments}"],
            env=environment | settings, stdin=subprocess.DEVNULL, stdout=out, stderr=subprocess.STDOUT) as process:
        try:
            yield SimpleNamespace(process=process, **started(process, log))
        finally:
            with contextlib.suppress(psutil.NoSuchProcess):  # of one that has ended by itself
                everything = [make := psutil.Process(process.pid), *make.children(recursive=True)]
                for each in reversed(everything):
                    each.terminate()
                for late in psutil.wait_procs(everything, timeout=20)[1]:
                    late.kill()


def started(process, log):
    """Address and token of a server once it says that it runs."""
    for _ in range(10 * LAB_S):
        text = log.read_text(encoding="utf-8")
        if found := re.search(r"(http://127\.0\.0\.1:\d+)/lab\?token=(\w+)", text):
            return {"address": found[1], "token": found[2]}
        assert process.poll() is None, text
        time.sleep(0.1)
    raise TimeoutError(text)


def status(url):
    try:
        with urllib.request.urlopen(url, timeout=LAB_S) as answer:
            return answer.status
    except urllib.error.HTTPError as error:
        return error.code


def test_jupyterlab_listens_on_this_machine_alone_and_asks_for_its_token(tmp_path):
    with jupyterlab(tmp_path) as lab:
        server = psutil.Process(lab.process.pid)
        listening = {c.laddr.ip for p in (server, *server.children(recursive=True))
                     for c in p.net_connections("tcp") if c.status == psutil.CONN_LISTEN}
        assert listening and listening <= {"127.0.0.1", "::1"}
        assert len(lab.token) >= 32
        contents = f"{lab.address}/api/contents"
        notebook = f"{contents}/notebooks/1_grouped_gemm.ipynb?content=0"
        assert status(notebook) == status(f"{notebook}&token=guess") == 403
        assert status(f"{notebook}&token={lab.token}") == 200
        assert status(f"{contents}/kernels/grouped_gemm?token={lab.token}") == 200, "kernels are edited there"


@pytest.fixture
def page():
    """A page of a browser without a window, and afterwards no request of it has left the machine; skips where there
    is no browser."""
    sync_api = pytest.importorskip(
        "playwright.sync_api", reason="playwright drives the browser: pip install -r requirements-browser.txt")
    path = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome", "chrome"))), None)
    if path is None:
        pytest.skip("no Chromium on this machine: apt-get install chromium, or the like")
    asked = []
    with sync_api.sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=path, args=["--no-sandbox", "--disable-dev-shm-usage"])
        page = browser.new_page(viewport={"width": 1300, "height": 1000})
        page.set_default_timeout(1000 * LAB_S)
        page.on("request", lambda request: asked.append(request.url))
        yield page
        browser.close()
    assert [url for url in asked if not re.match(r"(http|ws)://127\.0\.0\.1[:/]|data:|blob:", url)] == []


def smoke(folder):
    """1_grouped_gemm.ipynb with the smoke profile's parameters and, below all, a kernel with a planted error."""
    job, = runner.plan("smoke", ["1_grouped_gemm"])
    node = parameterize_notebook(load_notebook_node(str(job.notebook)), job.parameters)
    broken = Path(__file__).parent / "data" / "simulator" / "broken.cu"
    node.cells.append(nbformat.v4.new_code_cell(f'backends.get("cpu").compile({str(broken)!r})', id="planted"))
    nbformat.write(node, folder / "1_grouped_gemm.ipynb")


@pytest.mark.timeout(NOTEBOOK_S + LAB_S)
def test_in_a_browser_a_notebook_runs_a_widget_moves_its_plot_and_a_compile_error_shows_its_line(page, tmp_path):
    copy = tmp_path / "copy"
    (copy / "notebooks").mkdir(parents=True)
    smoke(copy / "notebooks")
    with jupyterlab(tmp_path, f"--ServerApp.root_dir={copy}") as lab:
        page.goto(f"{lab.address}/lab/tree/notebooks/1_grouped_gemm.ipynb?token={lab.token}")
        page.get_by_text("Python 3 (ipykernel) | Idle").wait_for()
        page.get_by_role("menuitem", name="Run", exact=True).click()
        page.get_by_role("menuitem", name="Run All Cells", exact=True).click()
        error = page.locator(".jp-OutputArea-output", has_text="CompileError")
        error.wait_for(timeout=1000 * NOTEBOOK_S)
        words = error.inner_text()  # while it is in sight
        failed = page.locator(".jp-OutputArea-output[data-mime-type*=stderr], .jp-RenderedText[data-mime-type*=error]")
        assert failed.count() == 1, failed.all_inner_texts()
        figure = page.locator("figure [role=img]")
        before = figure.and_(page.locator("[aria-label*='M = 1, N = 2048, K = 2048']"))
        before.wait_for()
        number = page.locator(".widget-text:has(label:text-is('N')) input").first
        number.fill("5000")
        number.press("Enter")
        after = figure.and_(page.locator("[aria-label*='M = 1, N = 5000, K = 2048']"))
        after.wait_for()
        assert "5 x 1 x 64 = 320 blocks" in after.get_attribute("aria-label") and before.count() == 0
        page.locator(".widget-slider:has(label:text-is('M')) .noUi-handle").first.press("ArrowRight")
        figure.and_(page.locator("[aria-label*='M = 2, N = 5000, K = 2048']")).wait_for()
        assert "broken.cu:3" in words and "line 3: out[threadIdx.x] = undeclared;" in words
