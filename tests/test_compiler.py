import sys
import time

import psutil
import pytest

from kernelbook.backends import compiler


def test_a_call_gives_back_what_a_program_printed(tmp_path):
    done = compiler.call(["sh", "-c", "pwd; echo oh >&2; exit 3"], tmp_path)
    assert (done.returncode, done.stdout, done.stderr) == (3, f"{tmp_path}\n", "oh\n")


def test_a_program_that_hangs_is_killed_with_what_it_started(tmp_path):
    """As compilers do, it leaves the work, and its pipes, to another process."""
    start = time.monotonic()
    with pytest.raises(TimeoutError, match="`sh -c .*did not end within 0.5 s and was killed"):
        compiler.call(["sh", "-c", "sleep 600 & echo $! > child; wait"], tmp_path, timeout_s=0.5)
    assert time.monotonic() - start < 20
    child = int((tmp_path / "child").read_text())
    while running(child) and time.monotonic() < start + 30:
        time.sleep(0.05)
    assert not running(child)


def running(pid):
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def test_zig_keeps_its_objects_below_the_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("KERNELBOOK_CACHE", str(tmp_path))
    show = "import os; print(os.environ.get('ZIG_GLOBAL_CACHE_DIR'), os.environ.get('ZIG_LOCAL_CACHE_DIR'))"
    assert compiler.call([sys.executable, "-c", show, "ziglang"]).stdout == f"{tmp_path}/zig {tmp_path}/zig\n"
    assert compiler.call([sys.executable, "-c", show]).stdout == "None None\n"


def test_zig_needs_no_home(tmp_path, monkeypatch):
    """With no home to write to, zig of its own accord fails or, where it may not look, waits for ever."""
    pytest.importorskip("ziglang")
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("HOME", str(tmp_path / "file"))
    monkeypatch.setenv("KERNELBOOK_CACHE", str(tmp_path / "cache"))
    done = compiler.call([sys.executable, "-m", "ziglang", "c++", "--version"], tmp_path, timeout_s=60)
    assert done.returncode == 0 and "clang version" in done.stdout
