import os
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from kernelbook.backends import cache


@pytest.fixture
def folder(tmp_path, monkeypatch):
    folder = tmp_path / "not there yet" / "ü"
    monkeypatch.setenv("KERNELBOOK_CACHE", str(folder))
    return folder


def files(folder):
    return sorted(path.name for path in folder.iterdir())


def test_a_miss_builds_and_a_hit_does_not(folder):
    built = []

    def build(path):
        built.append(path)
        path.write_bytes(b"object")
    assert cache.get("a.bin", build) == cache.get("a.bin", build) == folder / "a.bin"
    assert len(built) == 1 and built[0].name != "a.bin", "it is written beside and renamed"
    assert (folder / "a.bin").read_bytes() == b"object" and files(folder) == ["a.bin"]


def test_a_build_that_fails_leaves_nothing_and_may_be_tried_again(folder):
    def fail(path):
        path.write_bytes(b"half of it")
        raise RuntimeError("the compiler said no")
    with pytest.raises(RuntimeError, match="the compiler said no"):
        cache.get("a.bin", fail)
    assert files(folder) == []
    cache.get("a.bin", lambda path: path.write_bytes(b"whole"))
    assert (folder / "a.bin").read_bytes() == b"whole"


def test_an_interrupted_build_leaves_nothing(folder):
    def interrupt(path):
        raise KeyboardInterrupt
    with pytest.raises(KeyboardInterrupt):
        cache.get("a.bin", interrupt)
    assert files(folder) == []


def test_concurrent_builds_of_one_name_each_see_a_whole_file(folder):
    together, seen = threading.Barrier(8), []

    def work(number):
        def build(path):
            together.wait(10)  # all miss before any has built
            with open(path, "wb") as file:
                for _ in range(50):
                    file.write(bytes([number]) * 1000)
                    time.sleep(0.0005)
        content = cache.get("a.bin", build).read_bytes()
        seen.append((len(content), len(set(content))))

    threads = [threading.Thread(target=work, args=(i,)) for i in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert seen == [(50_000, 1)] * 8
    assert files(folder) == ["a.bin"]


def test_concurrent_builds_in_processes(folder):
    code = ("import sys, time\nfrom kernelbook.backends import cache\n"
            "def build(path):\n    time.sleep(0.2)\n    path.write_bytes(sys.argv[1].encode() * 100_000)\n"
            "content = cache.get('a.bin', build).read_bytes()\n"
            "assert len(content) == 100_000 and len(set(content)) == 1")
    environment = {**os.environ, "PYTHONPATH": str(Path(cache.__file__).parents[2])}
    processes = [subprocess.Popen([sys.executable, "-c", code, str(i)], env=environment) for i in range(3)]
    assert [process.wait(60) for process in processes] == [0, 0, 0]
    assert files(folder) == ["a.bin"]


def test_an_empty_variable_means_the_checkout(monkeypatch):
    monkeypatch.setenv("KERNELBOOK_CACHE", "")
    assert cache.folder() == cache.ROOT / ".cache" / "kernelbook"


def test_a_folder_that_cannot_be_written_says_what_to_do(tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    places = [tmp_path / "file", tmp_path / "file" / "below"]
    if os.geteuid():  # root writes anywhere
        (tmp_path / "closed").mkdir(mode=0o500)
        places.append(tmp_path / "closed")
    for place in places:
        monkeypatch.setenv("KERNELBOOK_CACHE", str(place))
        expected = r"cannot write compiled kernels to .*; set KERNELBOOK_CACHE"
        with pytest.raises(PermissionError, match=expected) as raised:
            cache.get("a.bin", lambda path: pytest.fail("nothing is built that cannot be kept"))
        assert str(place) in str(raised.value)
