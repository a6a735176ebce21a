import pytest

from kernelbook.buckets import FORMATS, read


@pytest.mark.parametrize("content, found", [
    (b"Time (%),Total Time (ns),Num Calls,Name\n100,5,1,cudaLaunchKernel\n", "text that starts with 'Time"),
    (b'{"answer": 42}', "JSON of something else"),
    (b"\x7fELF\x02\x01\x01\x00\xff\xfe", "binary data that starts with"),
    (b"   \n\n", "text that starts with ''"),
])
def test_an_unknown_file_says_what_was_found_and_what_is_known(tmp_path, content, found):
    path = tmp_path / "report.csv"  # its name says nothing
    path.write_bytes(content)
    with pytest.raises(ValueError) as error:
        read(path)
    assert str(path) in str(error.value) and found in str(error.value)
    assert all(name in str(error.value) for name in FORMATS)


def test_an_empty_file_is_an_error(tmp_path):
    (tmp_path / "empty.csv").touch()
    with pytest.raises(ValueError, match="empty.csv is empty"):
        read(tmp_path / "empty.csv")


def test_the_name_of_the_file_does_not_matter(data, tmp_path):
    for name in ("rocprof_stats.csv", "two_streams.json"):
        copy = tmp_path / "report.txt"
        copy.write_bytes((data / name).read_bytes())
        assert read(copy).activities == read(data / name).activities


@pytest.mark.parametrize("encoding", ["utf-16", "utf-8-sig"])
def test_what_windows_shells_write(data, tmp_path, encoding):
    path = tmp_path / "report.csv"
    path.write_text((data / "h200_llama_cpp_kern_sum.csv").read_text(), encoding=encoding, newline="\r\n")
    assert read(path).activities == read(data / "h200_llama_cpp_kern_sum.csv").activities


def test_a_missing_file(tmp_path):
    with pytest.raises(FileNotFoundError):
        read(tmp_path / "nowhere.csv")
