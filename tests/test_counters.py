import os
import stat
import sys
import time

import psutil
import pytest

from kernelbook import counters
from kernelbook.backends import BackendUnavailable

HEADER = '"ID","Process ID","Kernel Name","Metric Name","Metric Unit","Metric Value"'
GOOD = f"""==PROF== Connected to process 7 (/usr/bin/python3)
==PROF== Profiling "gemm": 0%....100% - 1 pass
a line that the program printed itself, "with quotes"
==PROF== Disconnected from process 7
{HEADER}
"0","7","gemm","a.ratio","","2.5"
"0","7","gemm","b.sum","byte","4,194,304"
"1","7","reduce","a.ratio","","1"
"1","7","reduce","b.sum","byte","8"
"2","7","gemm","a.ratio","","3.5"
and one at its end, of, several, parts
"""


def fake_ncu(folder, monkeypatch, body):
    """An `ncu` alone on PATH that keeps its arguments in folder/arguments and does `body` (Python)."""
    program = folder / "ncu"
    program.write_text(f"#!{sys.executable}\nimport sys, time, subprocess\n"
                       f"open({str(folder / 'arguments')!r}, 'w').write('\\n'.join(sys.argv[1:]))\n{body}\n")
    program.chmod(program.stat().st_mode | stat.S_IXUSR)
    monkeypatch.setenv("PATH", str(folder))


def test_parse_skips_chatter_and_reads_thousands():
    assert counters.parse(GOOD) == {"gemm": {"a.ratio": 3.5, "b.sum": 4194304.0},
                                    "reduce": {"a.ratio": 1.0, "b.sum": 8.0}}, "a kernel's last launch counts"


@pytest.mark.parametrize("text", ["", "==ERROR== nothing\n", f"{HEADER}\n", "gemm,a.ratio,1\n"])
def test_parse_finds_nothing_where_there_is_nothing(text):
    assert counters.parse(text) == {}


def test_parse_leaves_out_what_is_no_number():
    text = f'{HEADER}\n"0","7","gemm","a.ratio","","n/a"\n"0","7","gemm","b.sum","","2"\n'
    assert counters.parse(text) == {"gemm": {"b.sum": 2.0}}


def test_without_ncu_the_error_says_where_it_comes_from(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(BackendUnavailable, match="ncu.*not on PATH.*CUDA toolkit"):
        counters.read("pass", ["a.ratio"])


def test_read_asks_ncu_about_the_code(tmp_path, monkeypatch):
    fake_ncu(tmp_path, monkeypatch, f"print({GOOD!r})")
    assert counters.read("launch()", ["a.ratio"])["gemm"]["a.ratio"] == 3.5
    arguments = (tmp_path / "arguments").read_text().splitlines()
    assert arguments[arguments.index("--metrics") + 1] == "a.ratio"
    assert arguments[arguments.index("--clock-control") + 1] == "none", "clocks are left alone"
    assert arguments[-3:] == [sys.executable, "-c", "launch()"]


@pytest.mark.parametrize("body, words", [
    ("print('==PROF== x\\n==ERROR== ERR_NVGPUCTRPERM - The user does not have permission'); sys.exit(1)",
     "ERR_NVGPUCTRPERM"),
    ("print('==ERROR== ERR_NVGPUCTRPERM to stderr', file=sys.stderr)", "ERR_NVGPUCTRPERM to stderr"),
    ("print('no such option', file=sys.stderr); sys.exit(3)", "no such option"),
    (f"print({GOOD!r}); print('==ERROR== the program crashed'); sys.exit(1)", "the program crashed"),
    ("sys.exit(9)", "exit code 9"),
    ("pass", "exit code 0"),
    (f"print({HEADER!r}); print('\"0\",\"7\",\"gemm\",\"a.ratio\",\"\",\"n/a\"')", "no value of a.ratio for gemm"),
])
def test_a_failing_ncu_is_quoted(tmp_path, monkeypatch, body, words):
    fake_ncu(tmp_path, monkeypatch, body)
    with pytest.raises(BackendUnavailable, match=words):
        counters.read("pass", ["a.ratio"])


def test_an_ncu_that_hangs_is_ended_with_the_program_it_watches(tmp_path, monkeypatch):
    sleeper = tmp_path / "pid"
    fake_ncu(tmp_path, monkeypatch,
             f"child = subprocess.Popen([{sys.executable!r}, '-c', 'import time; time.sleep(600)'])\n"
             f"open({str(sleeper)!r}, 'w').write(str(child.pid))\ntime.sleep(600)")
    start = time.monotonic()
    with pytest.raises(BackendUnavailable, match="did not end within 2 s"):
        counters.read("pass", ["a.ratio"], timeout_s=2)
    assert time.monotonic() - start < 30
    child = int(sleeper.read_text())
    deadline = time.monotonic() + 10
    while running(child) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not running(child), "it would keep the GPU"


def running(pid):
    try:
        return os.getpgid(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except (ProcessLookupError, psutil.NoSuchProcess):
        return False
