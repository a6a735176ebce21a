import gzip
import json

import pytest

from kernelbook.buckets import kineto, read
from kernelbook.buckets.trace import COPY, KERNEL, SET, Gpu


def event(**fields):
    return {"ph": "X", "cat": "kernel", "name": "gemm", "ts": 10, "dur": 5, "args": {"device": 0, "stream": 7}} | fields


def parse(*events, **more):
    return kineto.read(json.dumps({"traceEvents": list(events), **more}), "trace.json")


def test_kernels_copies_sets_and_marks(data):
    trace = read(data / "two_streams.json")
    kinds = [activity.kind for activity in trace.activities]
    assert (kinds.count(KERNEL), kinds.count(COPY), kinds.count(SET)) == (6, 2, 1)
    assert {activity.name for activity in trace.activities if activity.kind == SET} == {"Memset"}
    assert [(mark.name, mark.device) for mark in trace.marks] == [("pass", None)] * 2 + [("pass", 0)] * 2
    assert trace.gpus == {0: Gpu("NVIDIA H200", 132)}


def test_times_of_17_digits_keep_their_nanoseconds(data):
    first = read(data / "two_streams.json").activities[0]
    assert (first.start_ns, first.total_ns) == (1_700_000_000_000_010_125, 40_000)  # a float would be off by 125 ns


def test_gzip_and_a_bare_list_of_events_are_the_same(data, tmp_path):
    text = (data / "two_streams.json").read_text()
    packed = tmp_path / "trace.json.gz"
    packed.write_bytes(gzip.compress(text.encode()))
    bare = tmp_path / "anything"
    bare.write_text(json.dumps(json.loads(text)["traceEvents"][:0] + [event()]))
    assert read(packed).activities == read(data / "two_streams.json").activities
    assert [a.name for a in read(bare).activities] == ["gemm"]


def test_categories_of_older_versions():
    assert [a.kind for a in parse(event(cat="Kernel"), event(cat="Memcpy"), event(cat="Memset")).activities] == [
        KERNEL, COPY, SET]


def test_a_trace_without_gpu_work_is_an_error():
    with pytest.raises(ValueError, match=r"1 events, none of them a kernel.*: cpu_op.*ProfilerActivity\.CUDA"):
        parse(event(cat="cpu_op"))
    with pytest.raises(ValueError, match="0 events, none of them"):
        parse()


def test_a_cut_file_is_an_error(data, tmp_path):
    text = (data / "two_streams.json").read_text()
    with pytest.raises(ValueError, match="trace.json: JSON that is cut or damaged"):
        kineto.read(text[:len(text) // 2], "trace.json")
    packed = tmp_path / "trace.json.gz"
    packed.write_bytes(gzip.compress(text.encode())[:-30])
    with pytest.raises(ValueError, match="gzip file is cut or damaged"):
        read(packed)


@pytest.mark.parametrize("fields, message", [
    ({"dur": None}, "'dur' is None"), ({"dur": -1}, "duration is -1 us"), ({"ts": "soon"}, "'ts' is 'soon'"),
    ({"dur": float("nan")}, "'dur' is nan"), ({"name": None}, "without a name")])
def test_a_damaged_event_is_named(fields, message):
    with pytest.raises(ValueError, match=f"trace.json, event 1.*{message}"):
        parse(event(), event(**fields))
