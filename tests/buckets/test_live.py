import json

import pytest
import torch

from kernelbook.backends.source import BackendUnavailable
from kernelbook.buckets import Trace, analyze, kineto, profile, rules


def test_without_a_gpu_the_error_says_so(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(BackendUnavailable, match=r"needs an NVIDIA GPU .* buckets\.read\(FILE\)"):
        profile(lambda: None)


@pytest.mark.parametrize("options", [{"passes": 0}, {"passes": 1, "warmup": 0}])
def test_passes_and_warmup_are_at_least_1(options):
    with pytest.raises(ValueError, match="expected at least 1 of each"):
        profile(lambda: None, **options)


@pytest.fixture
def without_cuda(monkeypatch):
    """Lets `profile` run where there is no GPU; the profiler then traces the host alone."""
    if torch.cuda.is_available():
        pytest.skip("there is a GPU, which the profiler would see")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)


def test_a_profile_that_saw_no_gpu_is_an_error(without_cuda):
    with pytest.raises(BackendUnavailable, match="torch.profiler saw nothing on the GPU"):
        profile(lambda: None, passes=1, warmup=1)


def test_each_profiled_pass_is_marked(without_cuda, monkeypatch):
    calls, texts = [], []
    monkeypatch.setattr(kineto, "read", lambda text, source: texts.append(text) or Trace(source, "test", ()))
    trace = profile(lambda: calls.append(torch.ones(3).neg()), passes=3, warmup=2)
    events = json.loads(texts[0])["traceEvents"]
    assert len(calls) == 2 + 3 + 1 + 3  # to warm up, by the clock, for the profiler to warm up, profiled
    assert sum(event.get("name") == "pass" and event["cat"] == "user_annotation" for event in events) == 3
    assert sum(event.get("name") == "aten::neg" for event in events) == 3
    assert trace.source == "live" and trace.unprofiled_ns > 0


@pytest.mark.gpu
def test_passes_on_a_gpu(gpu):
    a = torch.randn(2048, 2048, device="cuda", dtype=torch.bfloat16)
    memory = gpu.compile("ceilings/memory.cu").kernel("empty")  # another library's kernel in the same process

    def one_pass():
        torch.relu_(a @ a)
        memory((1, 1, 1), (32, 1, 1), [])

    trace = profile(one_pass, passes=4)
    part, = analyze(trace, rules())
    assert part.passes.count == 4 and not part.passes.assumed and part.closes
    assert {bucket.name: bucket.launches for bucket in part.buckets} == {"GEMM": 1, "norm/act": 1}
    assert [(kernel.name, kernel.launches) for kernel in part.unbucketed.kernels] == [("empty", 1)]
    assert part.unprofiled_ms > 0 and part.gpu.multiprocessors == gpu.multiprocessors
