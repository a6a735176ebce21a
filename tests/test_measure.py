import numpy as np
import pytest

from kernelbook import measure
from kernelbook.backends.cpu import CpuBackend
from kernelbook.measure import Timing


class Clock:
    """Stands in for the time module: time passes only where a call spends it."""

    def __init__(self):
        self.now = 100.0

    def perf_counter(self):
        return self.now

    def spends(self, *seconds, calls=None, name=None):
        """A contender whose calls last `seconds`, the last of them from then on; its name goes to `calls`."""
        left = list(seconds)

        def call():
            self.now += left.pop(0) if len(left) > 1 else left[0]
            if calls is not None:
                calls.append(name)
        return call


@pytest.fixture
def clock(monkeypatch):
    clock = Clock()
    monkeypatch.setattr(measure, "time", clock)
    return clock


def test_timing_of_samples():
    t = Timing.of(np.arange(101)[::-1])
    assert (t.median, t.p10, t.p90, t.n) == (50, 10, 90, 101)
    assert [type(v) for v in (t.median, t.p10, t.p90, t.n)] == [float, float, float, int], "a record takes these"
    assert str(t) == "50.0 us [10.0, 90.0]"


def test_timing_is_not_moved_by_an_outlier():
    assert Timing.of([2.0] * 19 + [1e6]).median == 2
    assert Timing.of([3.0]) == Timing(3, 3, 3, 1)


@pytest.mark.parametrize("nbytes, l2, copies", [
    (50, 100, 8), (400, 100, 2), (399, 100, 2), (1000, 100, 2), (133, 100, 4), (1, 100, 400)])
def test_a_rotation_pushes_an_input_out_of_the_cache(nbytes, l2, copies):
    assert measure.rotation(nbytes, l2) == copies
    assert copies * nbytes >= measure.COLD_L2_MULTIPLE * l2


def test_host_times_are_microseconds(clock):
    times = measure.host_times({"a": clock.spends(1e-3), "b": clock.spends(5e-6)}, rounds=7)
    assert times["a"].median == pytest.approx(1000) and times["b"].median == pytest.approx(5)
    assert times["a"].n == times["b"].n == 7


def test_host_contenders_take_turns(clock):
    calls = []
    measure.host_times({n: clock.spends(1e-3, calls=calls, name=n) for n in "abc"}, rounds=4, warmup=0)
    assert calls == list("abc") * 4


def test_warm_up_does_not_count(clock):
    slow_at_first = clock.spends(1, 1, 1, 1e-3)
    t = measure.host_times({"a": slow_at_first}, rounds=6, warmup=3)["a"]
    assert t.p90 == pytest.approx(1000) and t.n == 6
    cold = clock.spends(1, 1, 1, 1e-3)
    assert measure.host_times({"a": cold}, rounds=6, warmup=2)["a"].p90 > 1000


@pytest.mark.parametrize("budget, rounds, expected", [
    (3.5, 30, 5),    # spent within 5 rounds, which there are all the same
    (14.5, 30, 8),   # rounds of 2 s: the eighth passes the budget
    (100, 12, 12),
    (0, 3, 3),
])
def test_host_times_end_when_the_budget_is_spent(clock, budget, rounds, expected):
    times = measure.host_times({"a": clock.spends(1.5), "b": clock.spends(0.5)}, rounds=rounds, warmup=2,
                               budget_s=budget)
    assert [t.n for t in times.values()] == [expected, expected]


def test_a_slow_time_is_a_low_rate():
    c = measure._rate("read", "GB/s", 8e9, Timing(median=2e6, p10=1e6, p90=4e6, n=9), "how")
    assert (c.p10, c.value, c.p90) == pytest.approx((2, 4, 8)) and (c.name, c.unit, c.n) == ("read", "GB/s", 9)
    c = measure._rate("mm", "TFLOP/s", 3e12, Timing(median=1e6, p10=1e6, p90=3e6, n=9), "how")
    assert (c.p10, c.value, c.p90) == pytest.approx((1, 3, 3))


def test_ceilings_of_this_host():
    found = {c.name: c for c in measure.host_ceilings(nbytes=1 << 22, size=128)}
    assert found.keys() == {"host_copy", "host_float32_matmul"}
    for c in found.values():
        assert 0 < c.p10 <= c.value <= c.p90 and c.n >= 5
    assert 0.1 < found["host_copy"].value < 5000, "GB/s"
    assert 1e-4 < found["host_float32_matmul"].value < 500, "TFLOP/s"


def test_matrix_ceilings_need_a_gpu(monkeypatch):
    import torch
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert measure.matmul_ceilings() == []


# ---- the words that memory is measured on

def filled(backend, n, seed=0, size=None, grid=3, block=64):
    """`size` words (n if not given), the first n of them written by fill_words."""
    words = backend.array(np.zeros(size or n, np.uint32))
    backend.compile("ceilings/memory.cu").kernel("fill_words")((grid, 1, 1), (block, 1, 1),
                                                               [words, np.uint64(n), np.uint32(seed)])
    return backend.numpy(words)


def murmur3(h):
    """The finalizer of MurmurHash3 in Python's integers."""
    h = ((h ^ h >> 16) * 0x85EBCA6B) & 0xFFFFFFFF
    h = ((h ^ h >> 13) * 0xC2B2AE35) & 0xFFFFFFFF
    return h ^ h >> 16


@pytest.mark.parametrize("n", [1, 191, 192, 193, 1000])
def test_every_word_is_filled_and_none_beyond(backend, n):
    """By 192 threads, with and without a rest."""
    seed = 0x9E3779B9  # with bits in its upper half, which an index of a small buffer has not
    words = filled(backend, n, seed, size=n + 7)
    assert words[:n].tolist() == [murmur3(i ^ seed) for i in range(n)] and not words[n:].any()


def test_filled_words_look_random(backend):
    n = 1 << 14
    words = filled(backend, n, grid=8, block=256)
    assert len(np.unique(words)) == n, "no word twice"
    bits = np.unpackbits(words.view(np.uint8)).reshape(n, 32)
    deviation = 0.5 / n**0.5
    assert np.abs(bits.mean(axis=0) - 0.5).max() < 5 * deviation, "each bit is set in half of the words"
    flips = (bits[1:] != bits[:-1]).mean(axis=0)
    assert np.abs(flips - 0.5).max() < 5 * deviation, "and says nothing about the next word's"
    assert (filled(backend, n, seed=1, grid=8, block=256) != words).all(), "two buffers do not hold the same"


def test_memory_ceilings_are_measured_on_filled_buffers(monkeypatch):
    class Recorder(CpuBackend):
        multiprocessors, made = 1, []

        def empty(self, shape, dtype):
            self.made.append(super().empty(shape, dtype))
            return self.made[-1]

    def times(contenders, **_):
        a, b = (backend.numpy(array).copy() for array in backend.made if array.nbytes == nbytes)
        assert a.tolist() == [murmur3(i) for i in range(nbytes // 4)]
        assert (a != b).all() and len(np.unique(b)) == b.size, "each buffer has words of its own"
        for calls in contenders.values():
            for call in calls:
                call()
        return {"read": Timing(2.0, 1.0, 4.0, 9), "copy": Timing(4.0, 2.0, 8.0, 9)}
    monkeypatch.setattr(measure, "device_times", times)
    backend, nbytes = Recorder(), 1 << 16
    read, copy = measure.memory_ceilings(backend, nbytes)
    assert (read.value, read.p10, read.p90) == pytest.approx((nbytes / 2e3, nbytes / 4e3, nbytes / 1e3))
    assert copy.value == pytest.approx(2 * nbytes / 4e3), "a copy reads and writes every byte"
    source, sink = (backend.numpy(array) for array in backend.made if array.nbytes == nbytes)
    assert np.array_equal(source, sink), "the copy was one from the first to the second"


# ---- on a GPU

@pytest.mark.gpu
def test_device_times_are_those_of_the_calls(gpu):
    import cupy
    a, b = (cupy.zeros(1 << 26, np.uint8) for _ in range(2))
    one = measure.device_times({"half": [lambda: cupy.copyto(b[:1 << 25], a[:1 << 25])],
                                "whole": [lambda: cupy.copyto(b, a)]}, rounds=20)
    assert all(7 <= t.n <= 20 and 0 < t.p10 <= t.median <= t.p90 for t in one.values())
    assert 1.5 < one["whole"].median / one["half"].median < 2.7
    # a call in a list of several is timed by itself, not the list
    two = measure.device_times({"twice": [lambda: cupy.copyto(b, a)] * 2})
    assert two["twice"].median == pytest.approx(one["whole"].median, rel=0.3)


@pytest.mark.gpu
def test_a_warm_time_is_warm_whoever_came_before(gpu):
    """4 MiB stay in any L2 cache of the GPUs that this runs on, unless another contender's 256 MiB push them out."""
    import cupy
    small, sink = (cupy.ones(1 << 22, np.uint8) for _ in range(2))
    large = cupy.ones(1 << 28, np.uint8)
    warm = [lambda: cupy.copyto(sink, small)]
    alone = measure.device_times({"warm": warm})["warm"]
    beside = measure.device_times({"flush": [lambda: large.fill(1)], "warm": warm})["warm"]
    assert beside.median == pytest.approx(alone.median, rel=0.2)


@pytest.mark.gpu
def test_device_times_end_when_the_budget_is_spent(gpu):
    import cupy
    a = cupy.zeros(1 << 26, np.uint8)
    t = measure.device_times({"fill": [lambda: a.fill(1)]}, rounds=100_000, sample_us=5000, budget_s=0.1)
    assert 7 <= t["fill"].n < 1000


@pytest.mark.gpu
def test_the_device_rests_after_each_sample(gpu, monkeypatch):
    import cupy
    a, rests = cupy.zeros(1 << 26, np.uint8), []
    monkeypatch.setattr(measure.time, "sleep", rests.append)
    measure.device_times({"fill": [lambda: a.fill(1)]}, rounds=8, sample_us=3000, rest=5)
    assert len(rests) == 8 and 15e-3 <= np.median(rests) <= 45e-3


@pytest.mark.gpu
def test_ceilings_of_the_device(gpu):
    read, copy = measure.memory_ceilings(gpu, 1 << 28)
    assert (read.name, copy.name) == ("read", "copy")
    for c in (read, copy):
        assert 50 < c.p10 <= c.value <= c.p90 < 50_000
    trips = {c.name: c for c in measure.round_trips(gpu)}
    assert 1 < trips["launch_and_synchronize"].value < trips["round_trip_pinned"].value < 10_000
