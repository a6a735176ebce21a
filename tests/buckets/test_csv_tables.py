import pytest

from kernelbook.buckets import csv_tables, read
from kernelbook.buckets.trace import COPY, KERNEL, SET

HEADER = "Time (%),Total Time (ns),Instances,Avg (ns),Med (ns),Min (ns),Max (ns),StdDev (ns),Name"
ROWS = ['75.0,"3,000",2,"1,500.0","1,500.0","1,500","1,500",0.0,"void mul_mat_q<(int)2, (bool)0>(const char *, int)"',
        "25.0,1000,1,1000.0,1000.0,1000,1000,0.0,rms_norm_f32"]


def table(*lines, header=HEADER):
    return csv_tables.read("\n".join([header, *lines]) + "\n", "report.csv")


def figures(trace):
    return {activity.name: (activity.total_ns, activity.count) for activity in trace.activities}


def test_a_nsight_systems_table_among_chatter(data):
    trace = read(data / "h200_llama_cpp_kern_sum.csv")
    found = figures(trace)
    assert len(found) == 22 and not trace.warnings and not trace.timeline
    gated = next(activity for activity in trace.activities if "gated_delta_net" in activity.name)
    assert (gated.total_ns, gated.count, gated.kind) == (84_300_000, 144, KERNEL)
    assert found["Memcpy Device-to-Device"] == (780_000, 72)
    assert {activity.kind for activity in trace.activities} == {KERNEL, COPY}
    assert any("granularity" in limit for limit in trace.limits)


def test_thousands_are_quoted_and_names_hold_commas():
    assert figures(table(*ROWS)) == {"void mul_mat_q<(int)2, (bool)0>(const char *, int)": (3000, 2),
                                     "rms_norm_f32": (1000, 1)}


@pytest.mark.parametrize("unit, ns", [("ns", 1), ("us", 10**3), ("\u03bcs", 10**3), ("ms", 10**6), ("s", 10**9)])
def test_the_header_gives_the_unit(unit, ns):
    trace = table("100.0,1.5,3,0.5,gemm", header=f"Time (%),Total Time ({unit}),Instances,Avg ({unit}),Name")
    assert figures(trace) == {"gemm": (round(1.5 * ns), 3)}


@pytest.mark.parametrize("column", ["Total Time (fortnights)", "Total Time"])
def test_an_unknown_unit_is_an_error(column):
    with pytest.raises(ValueError, match=r"report\.csv, line 1, column 'Total Time.*none of ns, us, ms, s"):
        table("100.0,1.5,3,0.5,gemm", header=f"Time (%),{column},Instances,Avg (ns),Name")


def test_a_header_without_rows_is_an_error():
    with pytest.raises(ValueError, match="header in line 1 has no rows"):
        table()
    with pytest.raises(ValueError, match="header in line 1 has no rows"):
        table("", "SKIPPED: report.sqlite holds no more kernels")


@pytest.mark.parametrize("cut", [12, 20, 60, len(ROWS[0]) - 4])
def test_a_line_that_is_cut_is_an_error(cut):
    with pytest.raises(ValueError, match=r"report\.csv, line 3: .*(cut|damaged)"):
        table(ROWS[1], ROWS[0][:cut])


def test_a_table_that_lost_whole_rows_says_how_much_is_missing():
    assert table(*ROWS).warnings == ()
    assert table(ROWS[0]).warnings == ("the shares in 'Time (%)' add up to 75.0%: rows are missing, and with them "
                                       "25.0% of the time",)
    many = [f"0.0,1,1,1.0,1.0,1,1,0.0,k{i}" for i in range(100)]  # shares that rounding took
    assert table(*(f"0.9{line[3:]}" for line in many)).warnings
    assert not table("96.0,2400,1,1.0,1.0,1,1,0.0,gemm", *many).warnings


@pytest.mark.parametrize("field", ["", "n/a", "1.234.567", "12,34", "-5", "nan"])
def test_a_time_that_is_no_number_is_an_error(field):
    with pytest.raises(ValueError, match=r"line 2, Total Time \(ns\): .* is no number"):
        table(f'100.0,"{field}",1,1.0,1.0,1,1,0.0,gemm')


@pytest.mark.parametrize("field", ["0", "2.5"])
def test_a_number_of_launches_is_whole_and_above_0(field):
    with pytest.raises(ValueError, match=f"line 2: Instances is '{field}'"):
        table(f"100.0,10,{field},1.0,1.0,1,1,0.0,gemm")


def test_two_tables_of_kernels_would_count_twice():
    with pytest.raises(ValueError, match="lines 1 and 5 each start a table of all kernels"):
        table(*ROWS, "", HEADER, *ROWS)


def test_copies_alone_are_an_error_and_sets_have_their_kind():
    copies = ["Time (%),Total Time (us),Count,Avg (us),Operation", "60.0,6,2,3,[CUDA memcpy HtoD]",
              "40.0,4,1,4,[CUDA memset]"]
    found = table(*ROWS, "", *copies).activities[2:]
    assert [(a.name, a.total_ns, a.kind) for a in found] == [("Memcpy HtoD", 6000, COPY), ("Memset", 4000, SET)]
    with pytest.raises(ValueError, match="table of copies .* none of kernels; add the report cuda_gpu_kern_sum"):
        table(*copies[1:], header=copies[0])


def test_nsight_compute_gives_a_launch_for_each_id(data):
    trace = read(data / "ncu_details.csv")
    assert [(a.name.split("(")[0], a.total_ns, a.stream) for a in trace.activities] == [
        ("q4_gemm", 1_250_500, 7), ("gated_delta_net", 72_100, 7), ("q4_gemm", 1_250_000, 13)]
    assert trace.devices == [0] and not trace.timeline


def test_a_launch_without_a_duration_is_an_error():
    with pytest.raises(ValueError, match=r"1 of 1 launches \(first: ID 0\) have no duration.*gpu__time_duration\.sum"):
        table('"0","gemm","Registers Per Thread","register/thread","32"',
              header='"ID","Kernel Name","Metric Name","Metric Unit","Metric Value"')


def test_rocprof_names_lose_what_rocprof_appends(data):
    assert figures(read(data / "rocprof_stats.csv")) == {
        "void mul_mat_q<(ggml_type)2, 64, false>(char const*, int const*, float*)": (6_000_000, 300),
        "gated_delta_net_cuda(float const*, float*)": (3_000_000, 48),
        "quantize_kv": (500_000, 48), "Memcpy HostToDevice": (500_000, 12)}
