"""What the notebooks do, one module an article: each experiment runs kernels, records what it measures and returns
a Finding, its data for the notebook's plots and its judgement of a claim.

A claim with a figure is "reproduced" where the figure comes out within a factor of two, and "direction holds" where
only its sign does. A claim without a figure is reproduced where it holds on every case, and its direction holds where
it does on most.
"""

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from kernelbook import formats, measure, stats, toolchain
from kernelbook.backends import Backend, Source
from kernelbook.records import Record, Verdict

NEEDS_GPU = "a GPU: the wave simulator checks results and is not timed"


@dataclass(frozen=True)
class Finding:
    """An experiment's outcome. claim, verdict, evidence, measured, missing, host: as Record.verdict takes them.
    data: what the notebook plots."""

    claim: str
    verdict: str
    evidence: str
    measured: str = ""
    missing: str | None = None
    host: bool = False
    data: Any = None


def made_ahead(make: Callable, cases: Sequence[tuple]) -> Iterator:
    """make(*case) of each case in turn, the next one made in a thread while one is used."""
    with ThreadPoolExecutor(1) as pool:
        following = pool.submit(make, *cases[0]) if cases else None
        for case in [*cases[1:], None]:
            made = following.result()
            following = pool.submit(make, *case) if case else None
            yield made
            del made  # its arrays on the device


@dataclass
class Lab:
    """Where experiments run and what they write to.

    ceilings: measure.Ceiling by name, measured in this run; empty where the backend is simulated.
    """

    backend: Backend
    record: Record
    seed: int = 0
    ceilings: dict[str, measure.Ceiling] = field(default_factory=dict)

    @property
    def timed(self) -> bool:
        """Whether times on the backend mean anything."""
        return not self.backend.simulated

    def rng(self, *key: int) -> np.random.Generator:
        """A generator that depends on the seed and the key only, not on what ran before."""
        return np.random.default_rng([self.seed, *key])

    def tensor(self, array):
        """An array of NumPy or of the device as PyTorch's, where the lab computes."""
        import torch
        found = torch.from_dlpack(array)
        return found.cuda() if self.timed and torch.cuda.is_available() else found

    def compile_ahead(self, sources: Sequence[Source]) -> None:
        """On an NVIDIA GPU, have several compiled at once, which is most of what the first run on a machine takes.
        What the compiler makes stays on disk, where a launch finds it."""
        if self.backend.name == "cuda":
            with ThreadPoolExecutor() as pool:
                list(pool.map(lambda source: toolchain.nvrtc_compile(source, self.backend.arch), sources))

    def measure_ceilings(self, memory_mib: int = 1024, matmul_size: int = 8192) -> list[measure.Ceiling]:
        """Measure this machine's ceilings, record them, and keep them for the fractions that follow."""
        if self.timed:
            found = (measure.memory_ceilings(self.backend, memory_mib << 20) + measure.matmul_ceilings(matmul_size)
                     + measure.round_trips(self.backend))
        else:
            found = []
        host = measure.host_ceilings()
        self.ceilings = {c.name: c for c in found + host}
        metrics = {"GB/s": "bandwidth_gbs", "TFLOP/s": "throughput_tflops", "us": "time_us"}
        for c in found + host:
            self.record.measure(kernel="ceilings", variant=c.name, case={"how": c.how}, metric=metrics[c.unit],
                                value=c.value, unit=c.unit, p10=c.p10, p90=c.p90, n=c.n, host=c in host)
        return found + host

    def errors(self, kernel: str, variant: str, case: dict, out, reference, bound: float,
               nonfinite_elsewhere: int = 0) -> stats.Errors:
        """Record every error figure of `out`; the case has passed where relative Frobenius is within `bound`.

        nonfinite_elsewhere: NaN and infinite values of the output in a part that is not compared; none may be there.
        """
        e = stats.errors(out, reference)
        if nonfinite_elsewhere:
            e = replace(e, relative_frobenius=np.inf, nonfinite=e.nonfinite + nonfinite_elsewhere)
        passed = e.relative_frobenius <= bound
        status = {} if passed else {"status": "wrong_result", "reason": f"relative Frobenius "
                                    f"{e.relative_frobenius:.3g} exceeds {bound:g}"}
        for metric in ("relative_frobenius", "max_abs", "rms", "cosine", "nonfinite"):
            value = float(getattr(e, metric))
            self.record.measure(kernel=kernel, variant=variant, case=case, metric=metric,
                                value=value if np.isfinite(value) else None, unit="1", **status)
        return e

    def time(self, kernel: str, variant: str, case: dict, timing: measure.Timing, cache: str | None, *,
             nbytes: int = 0, flop: int = 0, host: bool = False) -> None:
        """Record a time and, from the FLOP and bytes of a call, its rates and their fractions of the ceilings.

        nbytes counts each input and each output once. Only a cold time gives a bandwidth: what a cache holds was not
        read from memory.
        """
        def put(metric, value, p10, p90, unit):
            self.record.measure(kernel=kernel, variant=variant, case=case, metric=metric, value=value, p10=p10, p90=p90,
                                unit=unit, n=timing.n, cache=cache, host=host)

        put("time_us", timing.median, timing.p10, timing.p90, "us")
        rates = [("bandwidth_gbs", nbytes / 1e3 if cache == "cold" else 0, "GB/s", "read"),
                 ("throughput_tflops", flop / 1e6, "TFLOP/s", "bf16_matmul")]
        for metric, amount, unit, ceiling in rates:
            if amount:
                rate = [amount / t for t in (timing.median, timing.p90, timing.p10)]
                put(metric, *rate, unit)
                if ceiling in self.ceilings and not host:
                    put(f"fraction_of_{ceiling}", *(r / self.ceilings[ceiling].value for r in rate), "1")

    def no_time(self, kernel: str, variant: str, case: dict, status: str, reason: str | Exception) -> None:
        """Record that a variant has no time, and why. status: as Record.measure takes it."""
        if isinstance(reason, Exception):
            reason = f"{type(reason).__name__}: {reason}"[:300]
        self.record.measure(kernel=kernel, variant=variant, case=case, metric="time_us", value=None, unit="us",
                            status=status, reason=reason)

    def able(self, kernel: str, peers: Sequence, case: dict | None = None) -> list:
        """Those of some peers that can run here; that the others are skipped, and why, is recorded."""
        for peer in peers:
            if peer.missing:
                self.no_time(kernel, peer.name, case or {}, "skipped", peer.missing)
        return [peer for peer in peers if not peer.missing]

    def prepare_peers(self, kernel: str, peers: Sequence, precision: str, make_weights: Callable,
                      copies: Callable[[int], int], case: dict) -> dict:
        """Peer, of those that serve codes of a precision, to its calls of a product: one for each of so many copies of
        what it makes of the weights, whose bytes `copies` is given. make_weights() gives these, float32 [N, K] in
        groups of 32, if there is a peer for them. That one fails is recorded."""
        serving, ready = [peer for peer in peers if peer.serves(precision)], {}
        weights = make_weights() if serving else None
        for peer in serving:
            try:
                nbytes = peer.weight_bytes(*weights.shape, formats.BLOCK)
                ready[peer] = peer.prepare(weights, formats.BLOCK, copies(nbytes))
            except Exception as error:  # a peer's own failure must not cost the run
                self.no_time(kernel, peer.name, case, "runtime_error", error)
        return ready

    def judge(self, finding: Finding) -> Verdict:
        """Record a finding's verdict; returns the box to display."""
        return self.record.verdict(finding.claim, finding.verdict, finding.evidence, measured=finding.measured,
                                   missing=finding.missing, host=finding.host)


def not_timed(claim: str, evidence: str, data: Any = None, measured: str = "") -> Finding:
    """The finding on a speed claim where there is no GPU; `evidence` says what could be shown all the same."""
    return Finding(claim, "not testable here", evidence, measured, missing=NEEDS_GPU, data=data)


def speed_verdict(pairs: Sequence[tuple[measure.Timing, measure.Timing]], left_out: Sequence[str] = ()) -> str:
    """On a claim that something is faster: pairs of the time without it and with it, one a case.

    A case counts for or against only where the two do not overlap between their 10th and 90th percentiles. left_out:
    cases that gave a wrong result; with any, a claim is not reproduced in full.
    """
    if not pairs:
        raise ValueError("no case gives no verdict on a speed")
    for_it = sum(without.p10 > with_it.p90 for without, with_it in pairs)
    against = sum(without.p90 < with_it.p10 for without, with_it in pairs)
    if for_it == len(pairs):
        return "direction holds" if left_out else "reproduced"
    if against == len(pairs):
        return "contradicted"
    return "direction holds" if for_it > len(pairs) / 2 else "not reproduced"


def omitted(left_out: Sequence[str]) -> str:
    """The sentence that an evidence ends with where cases gave a wrong result."""
    return f" Left out, since their results are wrong: {', '.join(left_out)}." if left_out else ""


def summary(environment: dict) -> dict[str, str]:
    """The lines of a record's environment that a reader wants first."""
    e = environment
    clocks = e["clocks"]["before"]
    versions = ", ".join(f"{name} {e['packages'][name]}" for name in ("numpy", "torch", "cupy-cuda12x", "cupy-cuda13x")
                         if name in e["packages"])
    return {"device": e["device"] + (" (simulated, not timed)" if e["simulated"] else ""),
            "driver": e["driver"] or "none",
            "clocks": ", ".join(f"{k} {v}" for k, v in clocks.items()) if clocks else "-",
            "NVRTC": e["cuda"]["nvrtc"] or "none", "CPU": f"{e['cpu']['model']}, {e['cpu']['cores']} cores",
            "Python": f"{e['python']}; {versions}",
            "commit": f"{(e['commit'] or 'unknown')[:12]}{', with local changes' if e['dirty'] else ''}"}


def check_copy(lab: Lab, words: int = 1003) -> str:
    """Whether the memory kernels do what their bandwidths are measured for: every word copied, none written by a read.
    """
    data = lab.rng(0).integers(0, 2**32, (words, 4), np.uint32)
    module = lab.backend.compile("ceilings/memory.cu")
    source, sink = lab.backend.array(data), lab.backend.empty((words, 4), np.uint32)
    guard = lab.backend.empty(1, np.uint32)
    module.kernel("copy_bytes")((2, 1, 1), (64, 1, 1), [source, sink, np.uint64(words)])
    module.kernel("read_bytes")((2, 1, 1), (64, 1, 1), [source, guard, np.uint64(words)])
    wrong = int(np.count_nonzero(lab.backend.numpy(sink) != data))
    written = int(lab.backend.numpy(guard)[0] != 0xFFFFFFFF)
    good = wrong == written == 0
    lab.record.measure(kernel="ceilings", variant="copy_bytes", case={"words": 4 * words}, metric="wrong_words",
                       value=wrong, unit="1", status="passed" if good else "wrong_result",
                       reason=None if good else f"{wrong} words differ, read_bytes wrote {written}")
    return f"{wrong} of {4 * words} words differ after a copy; reading wrote {written} words"
