import pytest

from kernelbook.buckets import Activity, Mark, Trace, passes


def trace(*names, marks=(), device=0):
    """A timeline of one launch a microsecond."""
    launches = tuple(Activity(name, 900, 1, 1000 * i, device) for i, name in enumerate(names))
    return Trace("t.json", "test", launches, marks)


def table(**counts):
    return Trace("t.csv", "test", tuple(Activity(name, 1000, count) for name, count in counts.items()))


def test_the_marks_of_profile_count_without_being_asked():
    found = passes.count(trace("a", "b", "a", "b", marks=(Mark("pass", 0, 1900), Mark("pass", 2000, 3900),
                                                         Mark("other", 0, 3900))))
    assert (found.count, found.assumed, found.mark) == (2, False, "pass")


def test_steps_of_torch_profiler_are_one_kind_of_mark():
    marks = tuple(Mark(f"ProfilerStep#{i}", 1000 * i, 1000 * i + 950) for i in range(3))
    found = passes.count(trace("a", "a", "a", marks=marks))
    assert (found.count, found.assumed, found.mark) == (3, False, "ProfilerStep")


def test_a_number_is_stated_and_not_counted():
    found = passes.count(table(a=7), "6")
    assert found.count == 6 and "not counted" in found.how


def test_by_a_kernel_that_runs_so_often_a_pass():
    assert passes.count(table(lm_head=3, gemm=1488), "kernel:^lm_head$").count == 3
    assert passes.count(table(lm_head=3, attention=48), "kernel*16:attention").count == 3


@pytest.mark.parametrize("how, message", [
    ("0", "0 passes; expected at least 1"), ("many", "'many'; expected a number, mark:NAME"),
    ("kernel*0:a", "expected a number"), ("-1", "expected a number"),
    ("kernel:(", r"'\(' to count passes by is no regular expression"),
    ("kernel:nothing", "no kernel has 'nothing' in its name; the longest running are attention"),
    ("kernel*5:attention", "48 launches of 'attention' are no multiple of the 5 a pass"),
    ("mark:pass", "no mark 'pass'; it has no marks"),
])
def test_what_cannot_count_is_an_error(how, message):
    with pytest.raises(ValueError, match=message):
        passes.count(table(attention=48), how)


def test_marks_that_are_not_there_are_named_beside_those_that_are():
    with pytest.raises(ValueError, match="no mark 'pass'; it has decode, prefill"):
        passes.count(trace("a", marks=(Mark("prefill", 0, 1), Mark("decode", 2, 3))), "mark:pass")


def test_the_common_divisor_is_called_an_assumption():
    found = passes.count(table(gemm=1488, gdn=144, lm_head=3))
    assert (found.count, found.assumed) == (3, True)
    assert "greatest common divisor of the launch counts of 3 kernels" in found.how
    one = passes.count(table(gemm=7, gdn=3))
    assert (one.count, one.assumed) == (1, True) and "no common divisor" in one.how


def test_whether_the_order_of_kernels_repeats_is_said():
    assert "their order repeats 2 times" in passes.count(trace("a", "b", "b", "a", "b", "b")).how
    assert "their order does not repeat 2 times" in passes.count(trace("a", "a", "b", "b", "b", "b")).how


def test_copies_do_not_count():
    activities = (Activity("gemm", 1, 6), Activity("Memcpy HtoD", 1, 7, kind="copy"))
    assert passes.count(Trace("t", "test", activities)).count == 6
    assert passes.count(Trace("t", "test", activities[1:])).count == 1


def test_gpus_must_agree_on_a_kernel():
    both = Trace("t", "test", (Activity("a", 1, 4, device=0), Activity("a", 1, 6, device=1)))
    with pytest.raises(ValueError, match="different number of times on its GPUs: {0: 4, 1: 6}"):
        passes.count(both, "kernel:a")
    assert passes.count(both).count == 2


def test_windows_are_the_hosts_where_it_waited_and_the_gpus_where_it_ran_ahead():
    host = Mark("pass", 0, 2000), Mark("pass", 3000, 5000)
    waited = trace("a", marks=(*host, Mark("pass", 500, 1500, 0), Mark("pass", 3500, 4500, 0)))
    ahead = trace("a", marks=(*host, Mark("pass", 500, 2500, 0), Mark("pass", 3500, 5500, 0)))
    two_streams = trace("a", marks=(Mark("pass", 500, 2000, 0), Mark("pass", 600, 2500, 0), Mark("pass", 3500, 5500, 0),
                                    Mark("pass", 0, 1, 1), *host))
    assert passes.windows(waited, passes.count(waited), 0) == [(0, 2000), (3000, 5000)]
    assert passes.windows(ahead, passes.count(ahead), 0) == [(500, 2500), (3500, 5500)]
    assert passes.windows(two_streams, passes.count(two_streams), 0) == [(500, 2500), (3500, 5500)]


def test_marks_that_overlap_are_no_passes():
    nested = trace("a", marks=(Mark("pass", 0, 900), Mark("pass", 100, 200)))
    with pytest.raises(ValueError, match="overlap .*so they are not passes"):
        passes.windows(nested, passes.count(nested), 0)
    merged = trace("a", marks=(Mark("pass", 0, 100), Mark("pass", 200, 300), Mark("pass", 50, 250, 0),
                               Mark("pass", 240, 400, 0)))
    with pytest.raises(ValueError, match="2 marks 'pass', but 1 stretches of their work on GPU 0"):
        passes.windows(merged, passes.count(merged), 0)
