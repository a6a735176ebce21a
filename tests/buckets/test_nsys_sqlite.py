import pytest

from kernelbook.buckets import analyze, read, rules
from kernelbook.buckets.trace import GRAPH, Gpu, Mark


def test_names_come_from_the_strings_and_gpus_stay_apart(database):
    trace = read(database())
    assert trace.timeline and trace.devices == [0, 1] and trace.warnings == ()
    first = trace.activities[0]
    assert first.name == "void mul_mat_q<(ggml_type)2, (int)128, (bool)0>(const char *, float *)"
    assert (first.start_ns, first.end_ns, first.device, first.stream) == (1_000_000, 1_600_000, 0, 7)
    assert sorted({a.name for a in trace.activities if a.kind != "kernel"}) == ["Memcpy DtoH", "Memset"]
    assert trace.gpus[1] == Gpu("NVIDIA GeForce RTX 5090", 170)
    assert trace.marks == (Mark("prefill 512", 500_000, 2_000_000), Mark("prefill 512", 2_500_000, 4_000_000))


def test_each_gpu_closes_on_its_own(database):
    zero, one = analyze(read(database()), rules(), "mark:prefill 512")
    assert (zero.device, one.device) == (0, 1) and zero.closes and one.closes
    assert {bucket.name: bucket.time_ms for bucket in zero.buckets} == pytest.approx(
        {"GEMM": 0.6, "norm/act": 0.1, "copies": 0.1})
    assert (zero.idle_ms, one.idle_ms, one.busy_ms) == pytest.approx((0.7, 1.05, 0.45))


def test_graphs_traced_whole_are_said_to_undercount(database):
    trace = read(database("CREATE TABLE CUPTI_ACTIVITY_KIND_GRAPH_TRACE (start, \"end\", deviceId, streamId, graphId)",
                          "INSERT INTO CUPTI_ACTIVITY_KIND_GRAPH_TRACE VALUES (1810000, 1910000, 0, 7, 3), "
                          "(3810000, 3910000, 0, 7, 3)"))
    assert [a.name for a in trace.activities if a.kind == GRAPH] == ["CUDA graph 3"] * 2
    zero, _ = analyze(trace, rules(), "mark:prefill 512")
    assert zero.closes and zero.unbucketed.time_ms == pytest.approx(0.1)
    warning, = zero.warnings
    assert "2 launches of CUDA graphs (0.2 ms in all)" in warning and "--cuda-graph-trace=node" in warning


def test_an_export_without_cuda_work_is_an_error(database):
    drop = [f"DROP TABLE CUPTI_ACTIVITY_KIND_{table}" for table in ("KERNEL", "MEMCPY", "MEMSET")]
    with pytest.raises(ValueError, match=r"without CUDA kernels.*--trace=cuda.*NVTX_EVENTS, StringIds"):
        read(database(*drop))
    with pytest.raises(ValueError, match="without CUDA kernels"):
        read(database(*(line.replace("DROP TABLE", "DELETE FROM") for line in drop)))


def test_a_kernel_that_ends_before_it_starts_is_an_error(database):
    with pytest.raises(ValueError, match=r"rms_norm_f32.* runs from 5 to 4 ns"):
        read(database("INSERT INTO CUPTI_ACTIVITY_KIND_KERNEL VALUES (5, 4, 0, 7, 9, 3, 4, 1, 1)"))


def test_a_name_that_is_nowhere_keeps_its_time(database):
    trace = read(database("INSERT INTO CUPTI_ACTIVITY_KIND_KERNEL VALUES (1800000, 1900000, 0, 7, 9, 77, 77, 1, 1)"))
    zero, _ = analyze(trace, rules(), "mark:prefill 512")
    assert [kernel.name for kernel in zero.unbucketed.kernels] == ["kernel of unknown name 77"]


def test_a_cut_database_and_one_of_something_else(database, tmp_path):
    whole = database("CREATE TABLE filler AS WITH RECURSIVE n(i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM n WHERE i < "
                     "20000) SELECT i FROM n").read_bytes()
    cut = tmp_path / "cut.sqlite"
    cut.write_bytes(whole[:len(whole) // 8 // 4096 * 4096 + 100])
    with pytest.raises(ValueError, match="damaged or cut"):
        read(cut)
    with pytest.raises(ValueError, match="SQLite database of something else"):
        read(database("CREATE TABLE other (x)", base=None).rename(tmp_path / "other.sqlite"))
