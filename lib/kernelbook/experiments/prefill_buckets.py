"""A prefill pass taken apart: claims B01, B02, B11, B12, B13 and B15 of the prefill_breakdown article.

Counts, bytes and bounds follow from shapes and from the article's own tables, and are judged on every machine. Times
are those of a whole pass of Qwen3.5-27B in several designs, and of a live llama.cpp on the same weights, each taken
apart by one profiler in one process; the simulator runs the same designs on a tiny model of the same kinds of layer,
which gives errors and launches.

    model = make_model(lab)
    runs = passes(lab, model)
    peer = llama(lab, model, runs)
    slower, first = gap(lab, runs, peer)
"""

import math
import os
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from kernelbook import buckets, formats, qwen3_5
from kernelbook.backends import BackendUnavailable
from kernelbook.buckets import Breakdown, amdahl, article, predictions
from kernelbook.buckets.predictions import Expected, Launches
from kernelbook.experiments import NEEDS_GPU, Finding, Lab, not_timed
from kernelbook.measure import Timing
from kernelbook.peers import llama_cpp
from kernelbook.qwen3_5 import DESIGNS, TINY, Model, Outcome, Pass
from kernelbook.shapes import QWEN3_5_27B, Inventory

KERNEL = "pass"
ARTICLE, LLAMA = "article", "llama.cpp"
COMPARED = ("article", "tiled_fp32", "int8_dot", "int8_matrix", "tensor_cores", "wgmma", "packed_wgmma")
"""Designs of qwen3_5 that a run compares."""
BOUNDS = {"float32": 2e-4, "bf16": 0.1, "int8": 0.25}
"""Of the relative error of logits and of each layer's stream, by activations. A tiny model of 64 layers is at 3e-5,
0.03 and 0.08; a design that computes something else is above 1."""
TINY_BOUNDS = {"float32": 2e-5, "bf16": 0.02, "int8": 0.03}
"""The same of the tiny model's four layers, against float64."""
TINY_TOKENS = 130  # two chunks of the gated delta net and a bit
KEPT = 64
"""Last tokens whose residual streams are compared: what went wrong earlier has reached them through the recurrence."""
SPACE, PEER_SPACE = 6 << 30, 1 << 30
"""Bytes of device memory beside the weights: for a pass of each design and all streams of one; for llama.cpp."""
SLOW_US, SLOW_REPEATS, PROFILED = 5e5, 4, 3
"""A pass of SLOW_US or more is timed SLOW_REPEATS times at most, and profiled once instead of PROFILED times."""

RATIO = 15.3
"""Of the times of the article's engine and of llama.cpp (section 3)."""
SHARES = {"GEMM": 0.84, "GDN": 0.123}
"""Of the engine's kernels, by bucket."""
ARTICLE_BOUND = 4.7
"""What cheap paths can give at most (section 1)."""
BITS = formats.BITS_PER_WEIGHT["Q4_0"]
COUNTED = {"products, unchecked instance": 400, "activations quantized": 496, "stream-k fixups": 320}
"""Launches a pass of llama.cpp on an RTX 5090 (section 3), by the names of `predictions`."""
ARTICLE_MULTIPROCESSORS, ARTICLE_TOKENS, ARTICLE_TILE = 170, 512, 16
FACTOR = 2
"""Within which a figure counts as reproduced."""
GOAL = 0.66
"""Of llama.cpp's time, that our best design should take at most."""


# ---------------------------------------------------------------- parameters and inputs

def check_parameters(*, layers: int, pass_tokens: int, designs: Sequence[str], repeats: int) -> None:
    """Raise ValueError, naming the first value that no experiment can use and what was expected, before any runs."""
    if layers % qwen3_5.INTERVAL or not 1 <= layers <= QWEN3_5_27B.layers:
        raise ValueError(f"layers: {layers}; expected a multiple of {qwen3_5.INTERVAL} up to {QWEN3_5_27B.layers}")
    for name, value, low, high in (("pass_tokens", pass_tokens, predictions.VECTOR_ROWS + 1, 8192),
                                   ("repeats", repeats, 3, 1000)):
        if not low <= value <= high:
            raise ValueError(f"{name}: {value}; expected {low} to {high}")
    for name in designs:
        if name not in DESIGNS:
            raise ValueError(f"designs: {name!r}; expected some of {', '.join(DESIGNS)}")
    if ARTICLE not in designs or len(set(designs)) < len(designs):
        raise ValueError(f"designs: {', '.join(designs) or 'none'}; expected {ARTICLE!r}, with which the others are "
                         "compared, and each once")


def make_model(lab: Lab, layers: int = QWEN3_5_27B.layers, designs: Sequence[str] = COMPARED) -> Model:
    """Random weights of Qwen3.5-27B on a GPU, of the tiny model in the simulator.

    layers: a multiple of 4; fewer, as many as fit, where the device's memory is short: the model's inventory tells.
    designs: in which passes are to be run.
    Raises BackendUnavailable where not even four layers fit.
    """
    if not lab.timed:
        return Model.random(lab.backend, TINY, seed=lab.seed)
    free = _free_bytes(lab)

    def needed(count):
        few = qwen3_5.first_layers(QWEN3_5_27B, count)
        return qwen3_5.weight_bytes(few) + _panel_bytes(lab, designs, few) + SPACE
    fitting = [n for n in range(qwen3_5.INTERVAL, layers + 1, qwen3_5.INTERVAL) if needed(n) <= free]
    if not fitting:
        raise BackendUnavailable(f"{lab.backend.device} has {free / 2**30:.1f} GiB free; four layers of "
                                 f"{QWEN3_5_27B.name} and their passes take more")
    return Model.random(lab.backend, QWEN3_5_27B, seed=lab.seed, layers=fitting[-1])


def _panel_bytes(lab, designs, inventory) -> int:
    """Bytes of what passes in `designs` that are there at the same time lay out anew."""
    return sum(qwen3_5.panel_bytes(lab.backend, DESIGNS[name], inventory) for name in designs)


def _free_bytes(lab) -> int:
    import torch
    torch.cuda.empty_cache()
    lab.backend.xp.get_default_memory_pool().free_all_blocks()
    return lab.backend.xp.cuda.runtime.memGetInfo()[0]


def prompt(lab: Lab, inventory: Inventory, tokens: int) -> np.ndarray:
    """Token numbers, uniform over the vocabulary: the same for the same seed."""
    return lab.rng(30).integers(0, inventory.vocabulary, tokens)


# ---------------------------------------------------------------- the article's own tables

def article_tables(lab: Lab) -> dict[str, list[dict]]:
    """The article's two tables of buckets added up again, as rows.

    "totals": an engine's buckets against the total that they are parts of. "buckets": a bucket's share as printed and
    as its time gives it, what the article calls normalized, share times wall time, and the time over the passes of the
    trace. "gap": the two engines side by side, with the ratios and the shares of the gap that follow.
    """
    tables, totals, rows = article.tables(), [], []
    for side in (tables.engine, tables.peer):
        totals.append({"engine": side.name, "buckets, ms": side.bucket_sum_ms, "all kernels, ms": side.kernels_ms,
                       "excess, ms": side.excess_ms, "printed shares, %": sum(side.shares.values()),
                       "passes in the trace": side.trace_passes, "a pass, ms": side.wall_ms})
        lab.record.measure(kernel="article's table", variant=side.name, case={"passes": side.trace_passes}, unit="1",
                           metric="buckets_over_total", value=side.bucket_sum_ms / side.kernels_ms)
        shares, walls, passes_ms = side.recomputed_shares(), side.share_of_wall_ms(), side.per_pass_ms()
        rows += [{"engine": side.name, "bucket": name, "ms in the trace": ms, "printed, %": side.shares[name],
                  "of all kernels, %": shares[name], "normalized, ms": side.normalized.get(name),
                  "share x wall, ms": walls[name], "time / passes, ms": passes_ms[name]}
                 for name, ms in side.buckets.items()]
    gap_rows = [{"bucket": line.name, f"{tables.engine.name}, ms": line.a, f"{tables.peer.name}, ms": line.b,
                 "ratio": line.ratio, "share of the gap": line.share} for line in tables.comparison()]
    return {"totals": totals, "buckets": rows, "gap": gap_rows}


# ---------------------------------------------------------------- whole passes

@dataclass(frozen=True)
class Passes:
    """What `passes` measured.

    rows: a design each. growth: the error of a design's residual stream after each layer. buckets: a design's buckets,
    ms a pass. expected: the logits that those of others are compared with; reference: whose they are.
    times: by the host's clock, of designs that are right. breakdowns: of those that could be profiled. launches: of
    each design that ran, by the kernel's name. left_out: designs that have no time, with the reason; not_profiled: the
    same of those without a breakdown, llama.cpp among them.
    """

    model: str
    layers: int
    tokens: int
    reference: str
    expected: np.ndarray
    rows: list[dict] = field(default_factory=list)
    growth: list[dict] = field(default_factory=list)
    buckets: list[dict] = field(default_factory=list)
    times: dict[str, Timing] = field(default_factory=dict)
    breakdowns: dict[str, Breakdown] = field(default_factory=dict)
    launches: dict[str, Counter] = field(default_factory=dict)
    left_out: dict[str, str] = field(default_factory=dict)
    not_profiled: dict[str, str] = field(default_factory=dict)

    @property
    def case(self) -> dict:
        return {"model": self.model, "layers": self.layers, "tokens": self.tokens}

    @property
    def best(self) -> str | None:
        """The fastest design; None where none was timed."""
        return min(self.times, key=lambda name: self.times[name].median, default=None)


def passes(lab: Lab, model: Model, tokens: int = 512, designs: Sequence[str] = COMPARED, repeats: int = 7) -> Passes:
    """A whole pass in each design: its logits and residual streams against the first design on float32 activations (in
    the simulator, and on a GPU for the tiny model, against float64), and where there is a GPU its time, all designs in
    turns, and its buckets.

    A design that does not run here, or whose results are wrong, is recorded with the reason and has no time.
    Raises ValueError where no design has float32 activations, and the error of the one to compare with where it fails.
    """
    if not any(DESIGNS[name].activations == "float32" for name in designs):
        raise ValueError(f"designs {', '.join(designs)}: none has float32 activations, with which to compare")
    ids = prompt(lab, model.inventory, tokens)
    if not lab.timed:
        return _compare(lab, model, ids, designs, TINY_BOUNDS)
    tiny = Model.random(lab.backend, TINY, seed=lab.seed)
    checked = _compare(lab, tiny, prompt(lab, TINY, TINY_TOKENS), designs, TINY_BOUNDS)
    right = [name for name in designs if name not in checked.left_out]
    exact = next((name for name in right if DESIGNS[name].activations == "float32"), None)
    if exact is None:
        return checked
    runs = _compare(lab, model, ids, right, BOUNDS, exact)
    runs.left_out.update(checked.left_out)
    _time(lab, model, ids, [name for name in right if name not in runs.left_out], repeats, runs)
    return runs


def _compare(lab, model, ids, designs, bounds, exact=None) -> Passes:
    """Errors and launches of every design, against the design `exact` or, without one, against float64."""
    sizes, ran = model.inventory, {}
    if exact:
        ran[exact] = _outcome(model, exact, ids)
        expected = ran[exact][0]
    else:
        expected = _last_tokens(qwen3_5.reference(model, ids))
    runs = Passes(sizes.name, sizes.layers, len(ids), f"{exact} design" if exact else "float64", expected.logits)
    case = runs.case | {"reference": runs.reference}
    for name in designs:
        try:
            found, runs.launches[name] = ran.get(name) or _outcome(model, name, ids)
        except Exception as error:  # one design that fails must not cost the others
            expected_here = isinstance(error, ValueError)  # a design for other devices says so before it launches
            _leave_out(lab, name, runs, "skipped" if expected_here else "runtime_error",
                       (str(error) if expected_here else f"{type(error).__name__}: {error}")[:300])
            continue
        design = DESIGNS[name]
        bound = bounds[design.activations]
        of_logits = lab.errors(KERNEL, name, case, found.logits, expected.logits, bound).relative_frobenius
        grown = qwen3_5.growth(found, expected)
        for layer, value in enumerate(grown):
            finite = value if math.isfinite(value) else None
            runs.growth.append({"design": name, "activations": design.activations, "layer": layer, "error": finite,
                                "reference": runs.reference})
            if layer % qwen3_5.INTERVAL == 0:
                lab.record.measure(kernel=KERNEL, variant=name, case=case | {"after layer": layer}, unit="1",
                                   metric="relative_frobenius_of_stream", value=finite)
        worst = max(of_logits, *grown)
        if worst > bound:
            _leave_out(lab, name, runs, "wrong_result",
                       f"its relative error against {runs.reference} is {worst:.3g}, more than {bound:g}")
        runs.rows.append({"design": name, "activations": design.activations,
                          "reads of weights": design.reads(len(ids)), "launches": sum(runs.launches[name].values()),
                          "logits, error": of_logits, "last stream, error": grown[-1]})
    return runs


def _outcome(model, name, ids) -> tuple[Outcome, Counter]:
    run = Pass(model, DESIGNS[name], len(ids), keep_streams=True)
    run.feed(ids)
    run()
    return _last_tokens(run.outcome()), run.launches


def _last_tokens(outcome: Outcome) -> Outcome:
    return Outcome(outcome.logits, outcome.streams[:, -KEPT:].copy())


def _leave_out(lab, name, runs, status, reason) -> None:
    runs.left_out[name] = reason
    lab.no_time(KERNEL, name, runs.case, status, reason)


def _time(lab, model, ids, names, repeats, runs) -> None:
    """Times of designs that take turns, then a profile of each, into `runs` and the record."""
    calls = {}
    for name in names:
        calls[name] = Pass(model, DESIGNS[name], len(ids))
        calls[name].feed(ids)
    flop = model.inventory.flops(len(ids))
    for name, (host, device) in _in_turns(lab, calls, repeats).items():
        runs.times[name] = host
        for clock, timing in (("host", host), ("device", device)):
            lab.time(KERNEL, name, runs.case | {"clock": clock}, timing, "cold", flop=flop)
        row = next(row for row in runs.rows if row["design"] == name)
        row |= _time_row(host, device, runs)
    for name, call in calls.items():
        part = _profiled(lab, name, call, runs, host=runs.times[name])
        if part:
            runs.breakdowns[name] = part
            runs.buckets.extend(_bucket_rows(name, part))


def _time_row(host: Timing, device: Timing | None, runs: Passes) -> dict:
    row = {"ms": host.median / 1e3, "p10": host.p10 / 1e3, "p90": host.p90 / 1e3,
           "on the device, ms": device.median / 1e3 if device else None, "tokens/s": runs.tokens / host.median * 1e6}
    if runs.layers != QWEN3_5_27B.layers:
        row["ms, 64 layers"] = host.median / 1e3 * QWEN3_5_27B.layers / runs.layers
    return row


def _in_turns(lab, calls: Mapping[str, Callable], repeats) -> dict[str, tuple[Timing, Timing]]:
    """Times of passes by the host's clock and between events on their stream, after one pass to warm up each."""
    samples: dict = {name: [_clocked(lab, call)][:0] for name, call in calls.items()}
    for _ in range(repeats):
        for name, call in calls.items():
            if len(samples[name]) < SLOW_REPEATS or samples[name][-1][0] < SLOW_US:
                samples[name].append(_clocked(lab, call))
    return {name: tuple(map(Timing.of, zip(*found, strict=True))) for name, found in samples.items()}


def _clocked(lab, call) -> tuple[float, float]:
    """Microseconds of a call: until the device is done, and between its first and its last work there."""
    cupy = lab.backend.xp
    start, end = cupy.cuda.Event(), cupy.cuda.Event()
    cupy.cuda.Device().synchronize()
    begin = time.perf_counter()
    start.record()
    call()
    end.record()
    end.synchronize()
    return 1e6 * (time.perf_counter() - begin), 1e3 * cupy.cuda.get_elapsed_time(start, end)


def _profiled(lab, name, call, runs, host: Timing) -> Breakdown | None:
    """The breakdown of a pass, recorded; None, with the reason, where the profiler does not work."""
    try:
        parts = buckets.analyze(buckets.profile(call, 1 if host.median >= SLOW_US else PROFILED, warmup=1),
                                buckets.rules())
    except (BackendUnavailable, ValueError) as error:
        runs.not_profiled[name] = str(error)[:300]
        lab.no_time(KERNEL, name, runs.case | {"bucket": "wall"}, "runtime_error", runs.not_profiled[name])
        return None
    part = max(parts, key=lambda part: part.busy_ms)
    case = runs.case | {"profiled passes": part.passes.count}
    for bucket, ms in [*part.parts.items(), ("wall", part.wall_ms)]:
        lab.record.measure(kernel=KERNEL, variant=name, case=case | {"bucket": bucket}, metric="time_us",
                           value=1e3 * ms, unit="us", cache="cold")
    for bucket in (*part.buckets, part.unbucketed):
        lab.record.measure(kernel=KERNEL, variant=name, case=case | {"bucket": bucket.name}, metric="launches",
                           value=bucket.launches, unit="1")
    open_ = {} if part.closes else {"status": "wrong_result", "reason": "the parts do not add up to the wall time"}
    lab.record.measure(kernel=KERNEL, variant=name, case=case, metric="parts_over_wall",
                       value=1 + part.residual_ms / part.wall_ms, unit="1", **open_)
    return part


def _bucket_rows(name, part: Breakdown) -> list[dict]:
    launches = {bucket.name: bucket.launches for bucket in (*part.buckets, part.unbucketed)}
    return [{"engine": name, "bucket": bucket, "ms": ms, "of the pass": ms / part.wall_ms,
             "launches": launches.get(bucket)} for bucket, ms in part.parts.items()]


# ---------------------------------------------------------------- llama.cpp

@dataclass(frozen=True)
class Peer:
    """A live llama.cpp on the same weights. reason: why it has no times; None where it has.

    timing: of its pass by the host's clock. beside: of our best design, in turns with it. error: of its logits.
    """

    reason: str | None = None
    timing: Timing | None = None
    beside: Timing | None = None
    error: float | None = None
    breakdown: Breakdown | None = None
    rows: list[dict] = field(default_factory=list)
    buckets: list[dict] = field(default_factory=list)


def llama(lab: Lab, model: Model, runs: Passes, repeats: int = 7, file: str = "") -> Peer:
    """A pass of llama.cpp over the weights of `model` and the tokens of `runs`: its logits against the same reference,
    its time in turns with the best of our designs, and its buckets.

    file: where the weights are written to as GGUF, and stay; empty: a temporary folder, which needs 15 GB. Whatever
    fails is recorded with the reason, and costs nothing that was measured before.
    """
    reason = (llama_cpp.missing() or _no_room(lab, model, runs)) if lab.timed else NEEDS_GPU
    if reason:
        return _no_peer(lab, runs, "skipped", reason)
    try:
        with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor() as pool:
            path = llama_cpp.write_gguf(file or Path(folder, "model.gguf"), model.inventory,
                                        _in_blocks(llama_cpp.model_weights(model), pool),
                                        origin=f"ours, seed {lab.seed}")
            with llama_cpp.Session(path, tokens=runs.tokens) as session:
                return _measured(lab, model, runs, session, repeats)
    except Exception as error:  # a peer's own failure must not cost the run
        return _no_peer(lab, runs, "runtime_error", f"{type(error).__name__}: {error}"[:300])


def _no_room(lab, model, runs) -> str | None:
    """Why the device cannot hold the weights a second time, and what our best design lays out anew; None where it can.
    """
    ours = _panel_bytes(lab, [runs.best] if runs.best else [], model.inventory)
    needed, free = qwen3_5.weight_bytes(model.inventory) + ours + PEER_SPACE, _free_bytes(lab)
    if needed <= free:
        return None
    return (f"it takes {needed / 2**30:.1f} GiB beside our own weights, and {lab.backend.device} has "
            f"{free / 2**30:.1f} GiB free; run fewer layers")


def _in_blocks(weights: Callable, pool: ThreadPoolExecutor) -> Callable:
    """The weights with tiles turned into blocks by all cores: one alone would take minutes."""
    def convert(part):
        return formats.blocks_from_tiles(formats.Tiles(part))

    def blocks(name, layer):
        found = weights(name, layer)
        if not isinstance(found, formats.Tiles):
            return found
        parts = np.array_split(found.data, min(len(found.data), 4 * (os.cpu_count() or 1)))
        return np.concatenate(list(pool.map(convert, parts)))
    return blocks


def _measured(lab, model, runs, session, repeats) -> Peer:
    ids = prompt(lab, model.inventory, runs.tokens)
    session.prefill(ids)
    bound = BOUNDS["int8"]  # the form that it rounds activations to
    error = lab.errors(KERNEL, LLAMA, runs.case | {"reference": runs.reference}, session.logits, runs.expected, bound)
    if not error.relative_frobenius <= bound:
        return _no_peer(lab, runs, "wrong_result", f"its logits are {error.relative_frobenius:.3g} from those of "
                        f"{runs.reference}, more than {bound:g}")
    calls = {LLAMA: lambda: session.prefill(ids)}
    if runs.best:
        ours = Pass(model, DESIGNS[runs.best], runs.tokens)
        ours.feed(ids)
        calls[runs.best] = ours
    times = _in_turns(lab, calls, repeats)
    host, _ = times[LLAMA]  # it has streams of its own, on which no event of ours lies
    lab.time(KERNEL, LLAMA, runs.case | {"clock": "host"}, host, "cold", flop=model.inventory.flops(runs.tokens))
    part = _profiled(lab, LLAMA, calls[LLAMA], runs, host)
    row = {"design": LLAMA, "activations": "int8", "reads of weights": 1,
           "launches": sum(kernel.launches for kernel in part.kernels) if part else None,
           "logits, error": error.relative_frobenius}
    return Peer(None, host, times[runs.best][0] if runs.best else None, error.relative_frobenius, part,
                [row | _time_row(host, None, runs)], _bucket_rows(LLAMA, part) if part else [])


def _no_peer(lab, runs, status, reason) -> Peer:
    lab.no_time(KERNEL, LLAMA, runs.case, status, reason)
    return Peer(reason)


# ---------------------------------------------------------------- the gap (B01, B02)

def gap(lab: Lab, runs: Passes, peer: Peer) -> tuple[Finding, Finding]:
    """The article's design against llama.cpp, as a whole and bucket by bucket; the findings on B01 and B02.

    Data: of B01 a row for each design, its time over llama.cpp's; of B02 a row for each bucket of the two, with ratio
    and share of the gap. Where llama.cpp is not there, our best design takes its place, and the ratio has no verdict.
    """
    return _ratio(lab, runs, peer), _order(lab, runs, peer)


def standings(runs: Passes, peer: Peer) -> list[dict]:
    """Rows of every design and llama.cpp; of those with a time, how many times faster than the article's design, and
    the time over llama.cpp's."""
    slow, rows = runs.times.get(ARTICLE), []
    for row in runs.rows + peer.rows:
        if "ms" in row and slow:
            row = row | {"article's / this": slow.median / 1e3 / row["ms"]}
        if "ms" in row and peer.timing:
            row = row | {"over llama.cpp": row["ms"] / (peer.timing.median / 1e3)}
        rows.append(row)
    return rows


def _ratio(lab, runs, peer) -> Finding:
    rows, tables = standings(runs, peer), article.tables()
    says = (f"The article's own figures are {tables.engine.wall_ms:g} and {tables.peer.wall_ms:g} ms, "
            f"{tables.engine.wall_ms / tables.peer.wall_ms:.2f} times as long.")
    if not lab.timed:
        return not_timed("B01", f"{says} {_agreement(runs)}{_missing(runs)}", rows)
    if ARTICLE not in runs.times:
        return Finding("B01", "not reproduced", "The article's design has no time here: "
                       f"{runs.left_out.get(ARTICLE, 'it is not among the designs')}.", data=rows)
    slow, best = runs.times[ARTICLE], runs.times[runs.best]
    ours = (f"Our best design, {runs.best}, takes {best.median / 1e3:.1f} ms, {slow.median / best.median:.1f} times "
            f"less than the article's with {slow.median / 1e3:.0f} ms")
    if peer.timing is None:
        return Finding("B01", "not testable here", f"{ours}. The ratio to llama.cpp is not testable here."
                       f"{_scaled(runs)}{_missing(runs)}", missing=f"llama.cpp: {peer.reason}", data=rows)
    fast, beside = peer.timing, peer.beside
    ratio, low, high = slow.median / fast.median, slow.p10 / fast.p90, slow.p90 / fast.p10
    standing = beside.median / fast.median
    verdict = ("contradicted" if high < 1 else "not reproduced" if low <= 1 else
               "reproduced" if _near(ratio, RATIO) else "direction holds")
    return Finding("B01", verdict, f"For {runs.tokens} tokens the article's design takes {slow.median / 1e3:.0f} ms "
                   f"and llama.cpp {fast.median / 1e3:.1f} ms on {lab.backend.device}: {ratio:.1f} times as long. "
                   f"{says} {ours}; in turns with llama.cpp it takes {standing:.2f} of its time, "
                   f"{'within' if standing <= GOAL else 'above'} the goal of {GOAL}.{_scaled(runs)}{_missing(runs)}",
                   f"{ratio:.1f}x [{low:.1f}, {high:.1f}]; best design {standing:.2f} of llama.cpp's time", data=rows)


def _near(value: float, figure: float) -> bool:
    return figure / FACTOR <= value <= figure * FACTOR


def _agreement(runs) -> str:
    """How far the designs are apart, in words."""
    words = ", ".join(f"{row['design']} {row['logits, error']:.1e}" for row in runs.rows)
    return f"On {runs.model} with {runs.tokens} tokens the designs' logits differ from {runs.reference} by: {words}."


def _missing(runs) -> str:
    """The sentence that an evidence ends with where designs have no time, or no place in a comparison."""
    return "".join(f" Left out is {name}: {reason}." for name, reason in runs.left_out.items())


def _scaled(runs) -> str:
    """The sentence that times end with where not all layers ran."""
    whole = QWEN3_5_27B.layers
    if runs.layers == whole:
        return ""
    return (f" These are times of {runs.layers} of {whole} layers; the whole model takes {whole / runs.layers:.3g} "
            "times as long, but for embedding and lm_head, which run once.")


def _order(lab, runs, peer) -> Finding:
    printed = {line.name: line for line in article.tables().comparison()}
    says = (f"In the article's own table GEMM is {printed['GEMM'].share:.0%} of the gap and GDN "
            f"{printed['GDN'].share:.0%}")
    part = runs.breakdowns.get(ARTICLE)
    if part is None:
        missing = NEEDS_GPU if not lab.timed else "a profile of the article's design: " + (
            runs.left_out.get(ARTICLE) or runs.not_profiled.get(ARTICLE) or "it is not among the designs")
        return Finding("B02", "not testable here", f"{says}, of buckets that are shares times wall time.",
                       missing=missing, data=_comparison_rows(article.tables().comparison(), "article's engine", LLAMA))
    name, other = (LLAMA, peer.breakdown) if peer.breakdown else (runs.best, runs.breakdowns.get(runs.best, part))
    lines = buckets.side_by_side(part, other)
    steps = sorted((line for line in lines if line.name in {bucket.name for bucket in part.buckets}),
                   key=lambda line: line.b - line.a)
    shares = {bucket.name: bucket.time_ms / part.wall_ms for bucket in part.buckets}
    against = "; ".join(f"{line.name} {line.a:.1f} and {line.b:.1f} ms" + ("" if line.ratio is None else
                        f", {line.ratio:.1f}x") + ("" if line.share is None else f", {line.share:.0%} of the gap")
                        for line in steps[:3])
    without = "" if peer.breakdown else (" The ratios to llama.cpp are not testable here: "
                                         f"{peer.reason or runs.not_profiled.get(LLAMA)}.")
    closing = "; ".join(f"{who} by {of.residual_ms / of.wall_ms:+.2%} of {of.wall_ms:.1f} ms, of which "
                        f"{of.idle_ms:.1f} idle and {of.unbucketed.time_ms:.2f} unbucketed"
                        for who, of in ((ARTICLE, part), (name, other)))
    measured = ", ".join(f"{bucket} {share:.1%}" for bucket, share in list(shares.items())[:3])
    return Finding("B02", _order_verdict(part, peer.breakdown),
                   f"Of a pass in the article's design, in order: {measured} (article: GEMM {SHARES['GEMM']:.0%}, GDN "
                   f"{SHARES['GDN']:.1%}). Against {name}: {against}.{without} {says}. The parts miss the wall time: "
                   f"{closing}.", measured, data=_comparison_rows(lines, "article's design", name))


def _comparison_rows(lines, a, b) -> list[dict]:
    return [{"bucket": line.name, f"{a}, ms": line.a, f"{b}, ms": line.b, "ratio": line.ratio,
             "share of the gap": line.share} for line in lines]


def _order_verdict(part: Breakdown, peer: Breakdown | None) -> str:
    """Of GEMM first and GDN second, in the article's design and, where llama.cpp is there, in the gap to it; tables
    that do not close say nothing."""
    if not part.closes or (peer and not peer.closes):
        return "not reproduced"
    orders = [[bucket.name for bucket in part.buckets]]
    if peer:
        lines = {line.name: line for line in buckets.side_by_side(part, peer) if line.name in orders[0]}
        orders.append(sorted(lines, key=lambda name: lines[name].b - lines[name].a))
    if all(order[0] == "GDN" for order in orders):
        return "contradicted"
    if any(order[0] != "GEMM" for order in orders):
        return "not reproduced"
    second = all(order[1:2] == ["GDN"] for order in orders)
    figures = {name: next((b.time_ms / part.wall_ms for b in part.buckets if b.name == name), 0.0) for name in SHARES}
    near = peer and all(_near(figures[name], share) for name, share in SHARES.items()) and all(
        lines[name].ratio and _near(lines[name].ratio, figure) for name, figure in article.tables().ratios.items()
        if name in lines)
    return "reproduced" if second and near else "direction holds"


# ---------------------------------------------------------------- rows for plots

def article_buckets() -> list[dict]:
    """The article's two engines as rows {engine, bucket, ms}: normalized to a pass as it does, what is left as "rest".
    """
    tables, rows = article.tables(), []
    for line in tables.comparison()[:-1]:
        rows += [{"engine": tables.engine.name, "bucket": line.name, "ms": line.a},
                 {"engine": tables.peer.name, "bucket": line.name, "ms": line.b}]
    return rows


def waterfall(runs: Passes) -> list[dict]:
    """From the article's design to our best one, rows {step, ms}: the whole pass, what each bucket takes off it
    (negative) or adds, the whole pass. Without profiles of the two, from the article's engine to llama.cpp."""
    slow, fast = runs.breakdowns.get(ARTICLE), runs.breakdowns.get(runs.best)
    if slow and fast and runs.best != ARTICLE:
        lines, first, last = buckets.side_by_side(slow, fast), f"{ARTICLE} design", runs.best
    else:
        tables = article.tables()
        lines, first, last = tables.comparison(), tables.engine.name, tables.peer.name
    *parts, total = lines
    return [{"step": first, "ms": total.a}, *({"step": line.name, "ms": line.b - line.a} for line in parts),
            {"step": last, "ms": total.b}]


def roofline(runs: Passes, peer: Peer | None = None) -> list[dict]:
    """All products of a pass as one point a design, rows {design, "FLOP / byte", "TFLOP/s"}: by its bucket of GEMM and
    the bytes of weights that its launches ask for."""
    sizes = _inventory(runs)
    flop, once = sizes.flops(runs.tokens), sizes.weights * BITS / 8
    parts = runs.breakdowns | ({LLAMA: peer.breakdown} if peer and peer.breakdown else {})
    times = {name: sum(bucket.time_ms for bucket in part.buckets if bucket.name == "GEMM")
             for name, part in parts.items()}
    return [{"design": name, "FLOP / byte": flop / (once if name == LLAMA else
                                                    DESIGNS[name].bytes_read(sizes, runs.tokens)),
             "TFLOP/s": flop / ms / 1e9} for name, ms in times.items() if ms]


def _inventory(runs) -> Inventory:
    return TINY if runs.model == TINY.name else qwen3_5.first_layers(QWEN3_5_27B, runs.layers)


# ---------------------------------------------------------------- launches (B11)

def launches(lab: Lab, runs: Passes | None = None, peer: Peer | None = None,
             recorded: Sequence[tuple[str, Breakdown, int]] = ()) -> Finding:
    """Launches predicted from shapes beside those that the article counted, that our passes made, and that traces
    hold; the finding on B11.

    recorded: traces of llama.cpp on Qwen3.5-27B and 512 tokens taken apart, each with a name and the GPU's
    multiprocessors. Rows {engine, launches, predicted, counted, where, agrees, because}.
    """
    printed = _article_launches()
    engine = article.tables().engine
    tiled = predictions.tiled_engine(QWEN3_5_27B, ARTICLE_TOKENS, ARTICLE_TILE)
    rows = printed + [row | {"counted": engine.launches_a_pass, "agrees": None}  # of the one, the other or between
                      for row in _launch_rows(engine.name, "article", [Launches(line, None) for line in tiled])]
    ours = _our_launches(runs) if runs else []
    if peer and peer.breakdown:
        expected = predictions.llama_cpp(_inventory(runs), lab.backend.multiprocessors, runs.tokens)
        ours += _launch_rows(LLAMA, f"live, {lab.backend.multiprocessors} multiprocessors",
                             predictions.beside(peer.breakdown, expected))
    for name, part, multiprocessors in recorded:
        expected = predictions.llama_cpp(QWEN3_5_27B, multiprocessors, ARTICLE_TOKENS)
        ours += _launch_rows(LLAMA, f"{name}, {multiprocessors} multiprocessors", predictions.beside(part, expected))
    ours = [row for row in ours if row["counted"] is not None]
    for row in ours:
        lab.record.measure(kernel="launches", variant=row["engine"], unit="1", metric="launches", value=row["counted"],
                           case={"what": row["launches"], "where": row["where"], "predicted": row["predicted"]})

    apart, fused = (line.launches for line in tiled)
    within = fused <= engine.launches_a_pass <= apart
    differ = [f"{row['launches']} of {row['engine']}, {row['where']}: {row['counted']:g} instead of {row['predicted']}"
              for row in ours if not row["agrees"]]
    verdict = ("not reproduced" if not within or not all(row["agrees"] for row in printed) else
               "direction holds" if differ else "reproduced")
    others = {line.what: line.launches for line in predictions.llama_cpp(QWEN3_5_27B, 132)}
    counts = ", ".join(f"{row['predicted']} {row['launches']} (counted {row['counted']})" for row in printed)
    beside = (f"Of {len(ours)} counts of passes run or recorded here, {len(ours) - len(differ)} are as predicted"
              + (f"; not {'; '.join(differ)}." if differ else ".")) if ours else "No pass was counted here."
    return Finding("B11", verdict, f"The shapes predict for llama.cpp on {ARTICLE_MULTIPROCESSORS} multiprocessors "
                   f"{counts}; on 132 they predict {others['stream-k fixups']} fixups, and on any GPU "
                   f"{others['norms']} norms, {others['gated units']} gated units and "
                   f"{others['sums and products of elements']} sums and products of elements. In tiles of "
                   f"{ARTICLE_TILE} tokens the engine's products take {apart:,} launches apart and {fused:,} with "
                   f"those of one source fused; the article's {engine.launches_a_pass:,} {'' if within else 'do not '}"
                   "lie between. Its 22 is that number over the 400 of one template instance: product by product it is "
                   f"{apart // QWEN3_5_27B.gemms} launches against one. {beside}",
                   "; ".join(f"{row['launches']} {row['predicted']}" for row in printed), data=rows + ours)


def _article_launches() -> list[dict]:
    expected = {line.what: line
                for line in predictions.llama_cpp(QWEN3_5_27B, ARTICLE_MULTIPROCESSORS, ARTICLE_TOKENS)}
    return _launch_rows(LLAMA, "article", [Launches(expected[what], count) for what, count in COUNTED.items()])


def _our_launches(runs: Passes) -> list[dict]:
    """Products of each design as launched, and, where it was profiled, as traced."""
    sizes, rows = _inventory(runs), []
    for name, launched in runs.launches.items():
        design = DESIGNS[name]
        kernel = design.kernel
        products = sum(p.count for p in sizes.fused()) if design.fused else sizes.gemms
        tiles = design.reads(runs.tokens)
        expected = Expected(f"products, {kernel}", kernel, products * tiles + 1,
                            f"{products} for each of {tiles} tiles of tokens, and lm_head")
        rows += _launch_rows(name, f"launched, {runs.model}", [Launches(expected, launched[kernel])])
        if name in runs.breakdowns:
            rows += _launch_rows(name, f"traced, {runs.model}", predictions.beside(runs.breakdowns[name], [expected]))
    return rows


def _launch_rows(engine, where, lines: Sequence[Launches]) -> list[dict]:
    return [{"engine": engine, "launches": line.expected.what, "predicted": line.expected.launches,
             "counted": line.counted, "where": where, "agrees": line.agrees, "because": line.expected.why}
            for line in lines]


# ---------------------------------------------------------------- bytes (B12)

def traffic(lab: Lab, runs: Passes | None = None, tiles: Sequence[int] = (16, 32, 64, 128, 512)) -> Finding:
    """Bytes that the projections of a pass of Qwen3.5-27B move, by tokens of a tile; the finding on B12. Where there
    are passes with times, at what rate each design would have to read its weights."""
    read, rows = lab.ceilings.get("read"), []
    for tile in sorted({ARTICLE_TILE, *tiles, ARTICLE_TOKENS}):
        moved = predictions.traffic(QWEN3_5_27B, ARTICLE_TOKENS, tile, BITS)
        rows.append({"tokens a tile": tile, "reads of weights": predictions.rereads(ARTICLE_TOKENS, tile),
                     "weights, GB": moved.weights / 1e9, "activations, GB": moved.activations / 1e9,
                     "at the read ceiling, ms": moved.total / 1e6 / read.value if read else None})
        lab.record.measure(kernel="traffic", variant="computed", case={"tokens": ARTICLE_TOKENS, "tile": tile},
                           metric="weight_bytes", value=moved.weights, unit="B")
    weights = {row["tokens a tile"]: row["weights, GB"] for row in rows}
    tiled, whole = weights[ARTICLE_TILE], weights[ARTICLE_TOKENS]
    factor = tiled / whole
    rates = [f"{name} {DESIGNS[name].bytes_read(_inventory(runs), runs.tokens) / timing.median / 1e3:,.0f} GB/s"
             for name, timing in (runs.times if runs else {}).items()]
    apparent = f" Spread over the passes measured, that is {', '.join(rates)}." if rates else ""
    return Finding("B12", "reproduced" if math.isclose(factor, 32) else "not reproduced",
                   f"At {BITS:g} bits a weight a pass of {ARTICLE_TOKENS} tokens reads {tiled:.1f} GB of weights in "
                   f"tiles of {ARTICLE_TILE} tokens and {whole:.1f} GB at once, {factor:g} times as much. These are "
                   "bytes that launches ask for; what a cache has kept of the tile before does not come from memory."
                   f"{_cached(lab)}{apparent}", f"{factor:g}x: {tiled:.0f} against {whole:.1f} GB", data=rows)


def _cached(lab) -> str:
    """How many weights of a pass the device's L2 could hold from one tile to the next, in words."""
    if not lab.timed:
        return ""
    size = lab.backend.l2_bytes
    fit = sum(p.count for p in QWEN3_5_27B.projections if p.weights * BITS / 8 <= size)
    return f" This device's L2 of {size >> 20} MiB could hold {fit} of the {QWEN3_5_27B.gemms} weights, each alone."


# ---------------------------------------------------------------- bounds (B13)

CHEAP, ALL_FREE = "cheap paths, small buckets free", "cheap paths, GDN and small buckets free"


def headroom(lab: Lab, breakdown: Breakdown | None = None, speedups: Mapping[str, float] | None = None) -> Finding:
    """What cheap paths can give at most by Amdahl's law; the finding on B13.

    breakdown: of the article's design on this machine. speedups: by bucket what cheap paths give there, such as
    {"GEMM": the best gain of the probe}; by default the article's. Every bucket but GEMM and GDN is taken as free.
    Rows {table, scenario, "GEMM, times faster", bound}. Raises ValueError for a bucket that is not there.
    """
    gain = probe_gain()
    printed = {line.name: line.a for line in article.tables().comparison() if line.name != "total"}
    tables = {"the article's table": (printed, {"GEMM": gain})}
    if breakdown:
        tables["this machine's table"] = breakdown.parts, speedups or {"GEMM": gain}
    rows = []
    for name, (parts, faster) in tables.items():
        small = {part: math.inf for part in parts if part not in SHARES}
        for scenario, free in ((CHEAP, small), (ALL_FREE, small | {"GDN": math.inf})):
            bound = amdahl(parts, free | faster)
            rows.append({"table": name, "scenario": scenario, "GEMM, times faster": faster.get("GEMM", 1.0),
                         "bound": bound})
            lab.record.measure(kernel="amdahl", variant=name, case={"scenario": scenario}, unit="1", metric="bound",
                               value=bound)
    highest = rows[-1]["bound"]
    verdict = ("contradicted" if highest > ARTICLE_BOUND * FACTOR else
               "reproduced" if _near(highest, ARTICLE_BOUND) else "direction holds")
    words = "; ".join(f"{name}: {cheap['bound']:.2f}x with small buckets free, {free['bound']:.2f}x with GDN free too"
                      for name, cheap, free in zip(tables, rows[::2], rows[1::2], strict=True))
    left = sum(printed.values()) / ARTICLE_BOUND - printed["GDN"]
    return Finding("B13", verdict, f"Cheap paths, which make GEMM {rows[-1]['GEMM, times faster']:.2f} times as fast "
                   f"at best, give at most, by {words}. The article's {ARTICLE_BOUND}x is "
                   f"{'above' if highest <= ARTICLE_BOUND else 'below'} that. To reach it in its own table with small "
                   f"buckets free, GEMM would have to be {printed['GEMM'] / left:.1f} times as fast; the figure does "
                   "not follow from its tables.", f"{rows[-2]['bound']:.2f}x, with GDN free {highest:.2f}x", data=rows)


def probe_gain() -> float:
    """The best gain over the baseline of any variant on any projection in the article's probe at M = 16."""
    return max(base / min(others) for base, *others in article.tables().probe_ms.values())


# ---------------------------------------------------------------- bits a weight (B15)

def bits(lab: Lab) -> Finding:
    """What the two formats take a weight, and what each of the article's figures counts; the finding on B15. Rows
    {what, "bits a weight", article, counts}."""
    tables = article.tables()
    tile, file = article.tile_bits_per_weight(), article.q4_0_file_bits_per_weight(QWEN3_5_27B)
    printed = list(article.printed_bits_per_weight().values())
    engine, peer = tables.engine.claimed_bits_per_weight, tables.peer.claimed_bits_per_weight
    rows = [{"what": "the engine's tile", "bits a weight": tile, "article": engine,
             "counts": "72 bytes for 4 x 32 weights: 4 float16 scales, 64 bytes of codes"},
            {"what": "sizes in the probe's table", "bits a weight": float(np.mean(printed)), "article": engine,
             "counts": f"as MiB over N x K, from {min(printed):.3f} to {max(printed):.3f}"},
            {"what": "Q4_0 block", "bits a weight": BITS, "article": None,
             "counts": "18 bytes for 32 weights: a float16 scale, 16 bytes of codes"},
            {"what": "Q4_0 file", "bits a weight": file, "article": peer,
             "counts": "the whole model: products and embedding in Q4_0, lm_head in Q6_K, convolutions in float32"}]
    for row in rows:
        lab.record.measure(kernel="formats", variant=row["what"], case={"model": QWEN3_5_27B.name}, unit="bit",
                           metric="bits_per_weight", value=row["bits a weight"])
    right = [round(found, 2) == said for found, said in ((tile, engine), (file, peer))]
    verdict = ("reproduced" if all(right) else "direction holds" if (file - tile) * (peer - engine) > 0 else
               "contradicted")
    return Finding("B15", verdict, f"A tile of the engine takes {tile:g} bits a weight, not {engine:g}, and so do the "
                   "sizes in the article's own probe table. A Q4_0 block takes as many: the products of both engines "
                   f"read the same bytes. {peer:.2f} is that of a whole file with lm_head in Q6_K ({file:.4f} "
                   f"computed). So the two differ by {file / tile - 1:.1%} as files and not at all in what a product "
                   f"reads, against the {peer / engine - 1:.1%} printed.",
                   f"tile {tile:g}, Q4_0 block {BITS:g}, Q4_0 file {file:.2f} bits", data=rows)
