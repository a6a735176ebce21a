"""Beyond the article: a ladder of kernels for weights in groups of 32, from the article's own to the fastest one,
beside every peer that imports, at M from one to thousands.

A design has a time where its output, on the very weights that are timed, stays within the design's own bound of
float64. All times are cold and of one run, contenders of a shape and M take turns, and none of them includes rounding
activations to what a kernel or a peer takes. Bandwidths count each input and each output once. A design that can is
timed twice: launched one after the other, as every peer is, and with launches that overlap (backends.Kernel), as
products of a model follow each other; each figure says which.
"""

import contextlib
import itertools
import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace

import numpy as np

from kernelbook import formats, measure, packing, shapes, stats
from kernelbook.backends import BackendUnavailable, Source
from kernelbook.experiments import Lab, made_ahead
from kernelbook.experiments import grouped_gemm as article
from kernelbook.ops import packed_gemm as op
from kernelbook.ops.gemm_dispatch import ACCURACY, Weight, accuracy_of, choose, converted
from kernelbook.ops.grouped_gemm import GroupedGemm, reference
from kernelbook.peers import gemm as gemm_peers

KERNEL = "gemm_ladder"
ARTICLE = article.VARIANTS["float"]
"""The bottom of the ladder: the article's kernel on float activations."""
EMPTY = "empty_launch"
MOST_ROWS = {ARTICLE: 32, "tinygemm_int4": 32}
"""M up to which a variant is timed that is tens of times behind from there on."""
LM_HEAD_ROWS = 32
"""M up to which lm_head is multiplied: a prefill runs it on the last row of a sequence only."""
BANDWIDTH_ROWS = 64
"""M up to which a speed is recorded as a bandwidth; beyond, as operations a second."""
COMPILING_PEERS = ("humming_int8", "humming_int4")
"""Peers that compile at their first call for a shape, for seconds, and keep what they have compiled on disk."""
SIMULATED_COLUMNS = 128
SIMULATED_ROWS = (1, 3, 4)
"""N up to which, and M for which, a simulator has the time for every design: a form of each kernel is built for each
power of two in M, and tests/ops builds them all."""
ACTIVATION_BYTES = {"float32": 4, "float16": 2, "bfloat16": 2}


def projections() -> list[shapes.Projection]:
    """The shapes of the ladder, each once: the large ones of Qwen3.5-27B, then Qwen3-VL-2B's."""
    large = [shapes.QWEN3_5_27B[name] for name in ("gate", "gdn_qkv", "q", "down", "o")]
    return large + shapes.distinct(shapes.QWEN3_VL_2B)


def check_parameters(*, ladder_rows: Sequence[int], ladder_peer_shapes: int) -> None:
    """Raise ValueError, naming the first value that no experiment can use and what was expected, before any runs."""
    if not len(ladder_rows):
        raise ValueError("ladder_rows is empty; expected at least one value from 1 to 65536")
    for value in ladder_rows:
        if not 1 <= value <= 1 << 16:
            raise ValueError(f"ladder_rows: {value}; expected 1 to 65536")
    if not 0 <= ladder_peer_shapes <= len(projections()):
        raise ValueError(f"ladder_peer_shapes: {ladder_peer_shapes}; expected 0 to {len(projections())}")


def variant(name: str) -> str:
    """What records call a design: by the number of its file, and its name."""
    file = op.DESIGNS[name].sources()[0].file.name
    return f"{file.partition('_')[0]}_{name}"


def design_of(name: str) -> str:
    """The design that a variant's name stands for."""
    return name.partition("_")[2]


# ---------------------------------------------------------------- the rungs, as their files tell them

@dataclass(frozen=True)
class Rung:
    """A kernel of the ladder. idea: its header's first sentence. prediction, outcome, lesson: what the header says
    behind such a word, empty where that is nothing. designs: those that run on it, by their variants' names."""

    path: str
    idea: str
    prediction: str
    outcome: str
    lesson: str
    designs: tuple[str, ...]


def rungs() -> list[Rung]:
    """The files of the ladder from the bottom up: the article's kernel, then those of every design."""
    designs: dict[str, list[str]] = {"grouped_gemm/2_float_activations.cu": [ARTICLE]}
    for name, design in op.DESIGNS.items():
        designs.setdefault(design.sources()[0].path, []).append(variant(name))
    return [_rung(path, tuple(names)) for path, names in designs.items()]


def _rung(path: str, designs: tuple[str, ...]) -> Rung:
    lines = itertools.takewhile(lambda line: line.startswith("//"), Source(path).text.splitlines())
    text = "\n".join(line.removeprefix("//").strip() for line in lines)

    def told(*words):  # up to the next blank line, or the next such word; it may say in parentheses of what
        of = r"(?: \(([^)]*)\))?:"
        found = re.search(rf"^(?:{'|'.join(words)}){of} *(.*?)(?=\n\n|\n[A-Z]\w+{of}|\Z)", text, re.M | re.S)
        return " ".join(((found[1] + ": " if found[1] else "") + found[2]).split()) if found else ""
    idea = re.match(r"(?:\d+\. )?(.*?\.)(?=\s|\Z)", text, re.S)
    return Rung(path, " ".join(idea[1].split()) if idea else "", told("Prediction", "Predicted"),
                told("Outcome", "Measured"), told("Taught"), designs)


# ---------------------------------------------------------------- every design on every shape

@dataclass
class Selftest:
    """Outcome of `selftest`. worst: relative Frobenius by (variant, codes, M). unequal: repeats that differ in a bit.
    skipped: variant to the reason why it cannot run here."""

    worst: dict[tuple[str, str, int], float] = field(default_factory=dict)
    cases: int = 0
    failures: int = 0
    unequal: int = 0
    skipped: dict[str, str] = field(default_factory=dict)

    @property
    def bounds(self) -> dict[str, float]:
        """Of each variant tested."""
        return {name: op.DESIGNS[design_of(name)].bound for name, _, _ in self.worst}

    def __str__(self):
        return (f"{self.cases} cases, {self.failures} beyond their bound; {self.unequal} of as many repeats differ in "
                f"some bit.{''.join(f' {name} not run: {why}.' for name, why in self.skipped.items())}")


def selftest(lab: Lab, rows: Iterable[int] = article.SELFTEST_ROWS, columns: Iterable[int] = article.SELFTEST_COLUMNS,
             k_group: Iterable[tuple[int, int]] = article.SELFTEST_K_GROUP,
             precisions: Iterable[str] = article.PRECISIONS) -> Selftest:
    """Every design that can run here, twice on each case, against float64 within the design's own bound.

    The cases are those of the article's selftest: of its K and N most are no whole chunk or panel, and strips in groups
    of 64 and 128 repeat their scales. In a simulator, which takes minutes to build and run the others, those
    of N up to SIMULATED_COLUMNS and of SIMULATED_ROWS.
    """
    rows, columns, precisions, found = tuple(rows), tuple(columns), tuple(precisions), Selftest()
    if not lab.timed:
        columns = tuple(n for n in columns if n <= SIMULATED_COLUMNS) or (min(columns),)
        rows = tuple(m for m in rows if m in SIMULATED_ROWS) or (min(rows),)
    _compile_designs(lab)
    for name, design in op.DESIGNS.items():
        if why_not := _refusals(lab, design, precisions, rows):
            found.skipped[variant(name)] = why_not
    for precision in precisions:
        for k, group in k_group:
            for n in columns:
                strips = article.random_strips(lab.rng(3, n, k, group), n, k, group, precision, skewed=True)
                x = lab.rng(4, n, k).standard_normal((max(rows), k), np.float32) + np.float32(2)
                _test(lab, found, strips, x, rows, reference(x, strips))
    for (name, codes, m), error in found.worst.items():
        bound = found.bounds[name]
        status = {} if error <= bound else {"status": "wrong_result", "reason": f"exceeds {bound:g}"}
        lab.record.measure(kernel=KERNEL, variant=name, metric="selftest_relative_frobenius",
                           case={"selftest": "over N, K and group", "M": m, "codes": codes},
                           value=error if np.isfinite(error) else None, unit="1", **status)
    for name, why_not in found.skipped.items():
        lab.record.measure(kernel=KERNEL, variant=name, case={}, metric="selftest_relative_frobenius", value=None,
                           unit="1", status="skipped", reason=why_not)
    lab.record.measure(kernel=KERNEL, variant="all", case={"cases": found.cases}, metric="repeats_with_other_bits",
                       value=found.unequal, unit="1")
    return found


def _compile_designs(lab: Lab) -> None:
    """On an NVIDIA GPU, have the forms of all designs that can run compiled, several at once."""
    if lab.backend.name == "cuda":
        able = [design for design in op.DESIGNS.values() if not _refusals(lab, design, article.PRECISIONS, [1])]
        lab.compile_ahead([source for design in able for source in design.sources()])


def _refusals(lab, design, precisions, rows) -> str | None:
    """Why a design runs for no precision and M here; None where it runs for some."""
    why_not = [design.why_not(lab.backend, Weight(1024, 1024, p), m) for p in precisions for m in rows]
    return why_not[0] if all(why_not) else None


def _test(lab, found: Selftest, strips, x, rows, exact) -> None:
    """One weight of the selftest, on the first so many rows of x, in every design."""
    panels = packing.pack(strips)
    for name, design in op.DESIGNS.items():
        able = [m for m in rows if design.why_not(lab.backend, panels, m) is None]
        if not able or variant(name) in found.skipped:
            continue
        gemm = op.PackedGemm(lab.backend, panels, name)
        given = lab.backend.array(converted(x, design.activations))
        for m in able:
            outs = [lab.backend.empty((m, strips.n), np.float32) for _ in range(2)]
            try:
                first, again = (lab.backend.numpy(gemm.prepare(given[:m], out=out)()) for out in outs)
            except BackendUnavailable as missing:
                found.skipped[variant(name)] = str(missing)
                break
            error = stats.errors(first, exact[:m]).relative_frobenius
            key = variant(name), strips.precision, m
            found.worst[key] = max(found.worst.get(key, 0.0), error)
            found.cases += 1
            found.failures += error > design.bound
            found.unequal += not np.array_equal(first.view(np.uint32), again.view(np.uint32))


# ---------------------------------------------------------------- times at every M, peers beside

@dataclass(frozen=True)
class Point:
    """A time of one product, cold: microseconds, with the 10th and 90th percentile.

    accuracy: the class of `gemm_dispatch.ACCURACY` of ours; None of a peer's, which all round activations to 16 bits.
    overlapped: whether each launch could begin while the one before it ended.
    gbs: GB/s of each input and output once, at M up to BANDWIDTH_ROWS.
    """

    n: int
    k: int
    m: int
    codes: str
    variant: str
    accuracy: str | None
    us: float
    p10: float
    p90: float
    gbs: float | None = None
    overlapped: bool = False

    @property
    def label(self) -> str:
        """The variant in words."""
        return self.variant.replace("_", " ") + (", overlapped" if self.overlapped else "")

    @property
    def ours(self) -> bool:
        return self.accuracy is not None

    @property
    def shape(self) -> str:
        return f"{self.n} x {self.k}"

    @property
    def tflops(self) -> float:
        return 2 * self.m * self.n * self.k / 1e6 / self.us

    @property
    def speed(self) -> str:
        return f"{self.gbs / 1e3:.2f} TB/s" if self.gbs else f"{self.tflops:.0f} TFLOP/s"


@dataclass
class Ladder:
    """Outcome of `ladder`. points: the times. errors: rows of {shape, codes, M, variant, error, bound}, those of
    results that are wrong among them; `wrong` names these. unequal: results of ours that differ in a bit when repeated.
    """

    points: list[Point] = field(default_factory=list)
    errors: list[dict] = field(default_factory=list)
    unequal: int = 0

    @property
    def wrong(self) -> list[str]:
        return [f"{row['variant']} on {row['shape']}, {row['codes']}, M = {row['M']}" for row in self.errors
                if not row["error"] <= row["bound"]]

    def worst_errors(self) -> list[dict]:
        """Rows of {variant, results, worst error, where, bound, within it}: one a variant."""
        rows = []
        for name in dict.fromkeys(row["variant"] for row in self.errors):
            of = [row for row in self.errors if row["variant"] == name]
            worst = max(of, key=lambda row: row["error"] / row["bound"])
            rows.append({"variant": name, "results": len(of), "worst error": worst["error"],
                         "where": f"{worst['shape']}, {worst['codes']}, M = {worst['M']}", "bound": worst["bound"],
                         "within it": worst["error"] <= worst["bound"]})
        return rows


@dataclass
class _Contender:
    """accuracy: the class of one of ours. nbytes: of each input and output of a call. out: the first call's output, as
    a tensor. overlapped: as a Point has it."""

    variant: str
    accuracy: str | None
    calls: list[Callable]
    bound: float
    nbytes: int
    out: Callable
    overlapped: bool = False

    @property
    def labels(self) -> dict:
        """What of it a record's case says."""
        known = {"accuracy": self.accuracy, "overlapped": self.overlapped}
        return {name: value for name, value in known.items() if value}


class _Weights:
    """One random weight matrix, on the device in enough copies to be measured cold, and some of its columns as float64
    on the host. Nothing is put on the device before it is asked for."""

    def __init__(self, lab: Lab, p: shapes.Projection, precision: str):
        self.lab, self.backend = lab, lab.backend
        n = p.n if lab.timed else min(p.n, 64)
        self.panels = packing.random_panels(lab.rng(50, n, p.k, packing.CODE_BITS[precision]), n, p.k, precision)
        self.strips = packing.unpack(self.panels)
        self.columns, sample = article._outer_columns(self.strips)
        self.sample = sample.dequantize(np.float64)
        self._packed, self._article = [], []

    def case(self, m: int) -> dict:
        return {"M": m, "N": self.panels.n, "K": self.panels.k, "group": formats.BLOCK, "codes": self.panels.precision}

    def copies(self, nbytes: int) -> int:
        return measure.rotation(nbytes, self.backend.l2_bytes) if self.lab.timed else 1

    def packed(self, name: str, rows: int) -> list[op.PackedGemm]:
        if not self._packed:
            first = op.PackedGemm(self.backend, self.panels, name)
            for other, design in op.DESIGNS.items():  # each puts its form of the weights on the device; copies have all
                if design.why_not(self.backend, self.panels, rows) is None:
                    first.using(other)
            self._packed = [first] + [first.clone() for _ in range(self.copies(self.panels.nbytes) - 1)]
        return [gemm.using(name) for gemm in self._packed]

    def article(self) -> list[GroupedGemm]:
        if not self._article:
            first = GroupedGemm(self.backend, self.strips)
            self._article = [first] + [first.clone() for _ in range(self.copies(self.strips.nbytes) - 1)]
        return self._article

    def dense(self):
        """The weights as a float32 tensor [N, K] on the device, for peers."""
        return article.dense(self.lab, self.strips)


class _Activations:
    """Activations for a K and the most rows, on the device in every form that a design takes."""

    def __init__(self, lab: Lab, rows: int, k: int):
        self.host = lab.rng(51, rows, k).standard_normal((rows, k), np.float32)
        self._backend, self._forms = lab.backend, {}

    def __call__(self, form: str, m: int):
        if form not in self._forms:
            self._forms[form] = self._backend.array(converted(self.host, form))
        return self._forms[form][:m]


def ladder(lab: Lab, shapes_: Sequence[shapes.Projection], rows: Sequence[int], peer_shapes: int = 99,
           precisions: Sequence[str] = article.PRECISIONS, budget_s: float = 0.15) -> Ladder:
    """Every design that can run here, the article's kernel and every peer that imports, on every shape and M.

    rows: M. peer_shapes: how many of the shapes, the first ones, peers are measured on. budget_s: seconds of measuring
    a shape, precision and M, see measure.device_times.
    Without a GPU on 64 columns of the first shape of each K, at M of 1 and 4, without times and peers.
    """
    found, inputs = Ladder(), {}
    rows = sorted(set(rows) if lab.timed else {1 if m == 1 else 4 for m in rows})
    if not lab.timed:
        shapes_ = [p for i, p in enumerate(shapes_) if p.k not in {q.k for q in shapes_[:i]}]
    peers = lab.able(KERNEL, gemm_peers.all_peers()) if lab.timed else []
    _compile_designs(lab)
    cases = [(lab, p, precision) for p in shapes_ for precision in precisions]
    for (_, p, _), weights in zip(cases, made_ahead(_Weights, cases), strict=True):
        few = [m for m in rows if p.name != "lm_head" or m <= LM_HEAD_ROWS]
        if not few:
            continue
        if p.k not in inputs:
            inputs[p.k] = _Activations(lab, rows[-1], p.k)
        x, beside = inputs[p.k], peers if p in shapes_[:peer_shapes] else []
        ready = lab.prepare_peers(KERNEL, beside, weights.panels.precision, weights.dense, weights.copies,
                                  {"N": weights.panels.n, "K": p.k, "codes": weights.panels.precision})
        exact = lab.tensor(x.host[:few[-1]]).double() @ lab.tensor(weights.sample).T
        exact = exact.cpu().numpy()
        outs = {dtype: lab.backend.empty((few[-1], weights.panels.n), dtype) for dtype in op.DTYPES.values()}
        for m in few:
            contenders = _ours(weights, x, {dtype: out[:m] for dtype, out in outs.items()}, m)
            contenders += _of_peers(weights, x, m, ready)
            _measure(lab, found, weights, m, contenders, exact[:m], budget_s)
    lab.record.measure(kernel=KERNEL, variant="all", case={"results": len(found.errors)}, unit="1",
                       metric="repeats_with_other_bits", value=found.unequal)
    return found


def _ours(weights: _Weights, x: _Activations, outs, m: int) -> list[_Contender]:
    """The article's kernel and the designs that take these rows here. outs: by dtype; a design that can, writes what
    peers do, 16 bits. Bytes of weights are those of panels for all: a kernel that reads codes of 4 bits from a byte
    each reads more than it would have to."""
    lab, panels = weights.lab, weights.panels
    codes = packing.CODE_BITS[panels.precision] * panels.n * panels.k // 8
    scales = 2 * panels.n * panels.k // formats.BLOCK
    found = []

    def add(name, accuracy, calls, bound, form, out, overlapped=False):
        def run():
            out.view(np.uint8).fill(0xFF)  # NaN: what is not written must not pass
            return _floats(calls[0](), lab)
        nbytes = codes + scales + m * (panels.k * ACTIVATION_BYTES[form] + panels.n * out.itemsize)
        found.append(_Contender(name, accuracy, calls, bound, nbytes, run, overlapped))

    if m <= MOST_ROWS[ARTICLE]:
        calls = [gemm.prepare(x("float32", m), out=outs[np.float32]) for gemm in weights.article()]
        add(ARTICLE, "accurate", calls, ACCURACY["accurate"], "float32", outs[np.float32])
    for name, design in op.DESIGNS.items():
        if design.why_not(lab.backend, panels, m) is None:
            out = outs[op.DTYPES[design.narrow or "float32"]]
            for overlap in (False, True) if design.overlaps and lab.timed else (False,):
                try:
                    calls = [gemm.prepare(x(design.activations, m), out=out, overlap=overlap)
                             for gemm in weights.packed(name, m)]
                except BackendUnavailable as missing:
                    lab.no_time(KERNEL, variant(name), weights.case(m), "skipped", str(missing))
                    break
                add(variant(name), accuracy_of(design.bound), calls, design.bound, design.activations, out, overlap)
    return found


def _floats(out, lab: Lab):
    """An output as a tensor: of 16-bit integers are bits of bfloat16."""
    import torch
    return lab.tensor(out.view(np.int16)).view(torch.bfloat16) if out.dtype == np.uint16 else lab.tensor(out)


def _measure(lab, found: Ladder, weights, m, contenders, exact, budget_s) -> None:
    """Check contenders of one product, time those that are right, and record both."""
    case, right = weights.case(m), {}
    for c in contenders:
        labelled = case | c.labels
        try:
            out = c.out()
        except Exception as error:  # a peer's own failure must not cost the run
            if c.accuracy:
                raise
            lab.no_time(KERNEL, c.variant, labelled, "runtime_error", error)
            continue
        error = _error(out, weights.columns, exact)
        if c.accuracy:
            first = out.clone()
            found.unequal += not bool((_bits(first) == _bits(c.out())).all())
        wrong = {} if error <= c.bound else {"status": "wrong_result",
                                             "reason": f"relative Frobenius {error:.3g} exceeds {c.bound:g}"}
        lab.record.measure(kernel=KERNEL, variant=c.variant, case=labelled, metric="relative_frobenius",
                           value=error if np.isfinite(error) else None, unit="1", **wrong)
        found.errors.append({"shape": f"{case['N']} x {case['K']}", "codes": case["codes"], "M": m,
                             "variant": c.variant + ", overlapped" * c.overlapped, "error": error, "bound": c.bound})
        if not wrong:
            right[c.variant, c.overlapped] = c, labelled
    if not (lab.timed and right):
        return
    few = m <= BANDWIDTH_ROWS
    timings = measure.device_times({name: c.calls for name, (c, _) in right.items()}, rounds=12, sample_us=1000,
                                   budget_s=budget_s, rest=0 if few else measure.REST)
    for key, t in timings.items():
        c, labelled = right[key]
        lab.time(KERNEL, c.variant, labelled, t, "cold", **({"nbytes": c.nbytes} if few else
                                                           {"flop": 2 * m * case["N"] * case["K"]}))
        found.points.append(Point(case["N"], case["K"], m, case["codes"], c.variant, c.accuracy, t.median, t.p10, t.p90,
                                  c.nbytes / 1e3 / t.median if few else None, c.overlapped))


def _bits(out):
    import torch
    return out.view(torch.int32 if out.itemsize == 4 else torch.int16)


def _error(out, columns: np.ndarray, exact: np.ndarray) -> float:
    """Relative Frobenius of some columns of `out`; infinite where any of its values is not finite."""
    if not bool(out.isfinite().all()):
        return float("inf")
    return stats.errors(out[:, columns].double().cpu().numpy(), exact).relative_frobenius


def empty_launch(lab: Lab) -> measure.Timing | None:
    """What an empty kernel takes in a graph of many: the least that any product can. None without a GPU."""
    if not lab.timed:
        return None
    empty = lab.backend.compile("ceilings/memory.cu").kernel("empty")
    timing = measure.device_times({EMPTY: [lambda: empty((1, 1, 1), (32, 1, 1), [])]})[EMPTY]
    lab.time(KERNEL, EMPTY, {}, timing, "warm")
    return timing


def points(record: dict) -> list[Point]:
    """The times of a saved record's ladder."""
    found = {}
    for e in record["measurements"]:
        if e["kernel"] == KERNEL and e["cache"] == "cold" and e["value"]:
            c = e["case"]
            key = c["N"], c["K"], c["M"], c["codes"], e["variant"], c.get("accuracy"), c.get("overlapped", False)
            found.setdefault(key, {})[e["metric"]] = e
    return [Point(*key, of["time_us"]["value"], of["time_us"]["p10"], of["time_us"]["p90"],
                  of.get("bandwidth_gbs", {}).get("value"), overlapped)
            for (*key, overlapped), of in found.items() if "time_us" in of]


# ---------------------------------------------------------------- peers

def _of_peers(weights: _Weights, x: _Activations, m: int, ready) -> list[_Contender]:
    found, n, k = [], weights.panels.n, weights.panels.k
    for peer, calls in ready.items():
        if m <= MOST_ROWS.get(peer.name, m):
            given = gemm_peers.activations(peer, x.host[:m])
            bound = [lambda call=call, given=given: call(given) for call in calls]
            nbytes = peer.weight_bytes(n, k, formats.BLOCK) + 2 * m * (k + n)
            found.append(_Contender(peer.name, None, bound, gemm_peers.BOUND[peer.bits], nbytes, bound[0]))
    return found


def compile_peers(lab: Lab, shapes_: Sequence[shapes.Projection], rows: Sequence[int],
                  timeout_s: float = 120) -> list[str]:
    """Have peers that compile at their first call for a shape do so now, several processes at once. Returns those that
    failed, in words; what they have not compiled, the first call will."""
    present = {peer.name for peer in gemm_peers.all_peers() if not peer.missing}
    jobs = [(name, p) for name in COMPILING_PEERS if lab.timed and name in present for p in shapes_]

    def compile_one(name, p):
        few = [m for m in rows if p.name != "lm_head" or m <= LM_HEAD_ROWS]
        code = f"from kernelbook.experiments import gemm_ladder as g; g.call_peer({name!r}, {p.n}, {p.k}, {few})"
        try:
            subprocess.run([sys.executable, "-c", code], timeout=timeout_s, check=True, capture_output=True)
        except subprocess.SubprocessError as error:
            return f"{name} for {p.n} x {p.k}: {error}".splitlines()[0][-200:]
    with ThreadPoolExecutor(max(1, len(os.sched_getaffinity(0)))) as pool:
        return [failure for failure in pool.map(lambda job: compile_one(*job), jobs) if failure]


def call_peer(name: str, n: int, k: int, rows: Sequence[int]) -> None:
    """Call a peer for each M once, on random weights [n, k]."""
    import torch
    peer = next(peer for peer in gemm_peers.all_peers() if peer.name == name)
    call, = peer.prepare(torch.randn(n, k, device="cuda"), formats.BLOCK, 1)
    for m in rows:
        call(gemm_peers.activations(peer, np.ones((m, k), np.float32)))
    torch.cuda.synchronize()


# ---------------------------------------------------------------- what it comes to

def _cells(found: Iterable[Point]) -> dict[tuple[str, str, int], list[Point]]:
    """Points by shape, precision and M."""
    cells: dict[tuple[str, str, int], list[Point]] = {}
    for point in found:
        cells.setdefault((point.shape, point.codes, point.m), []).append(point)
    return cells


def _fastest(cell: Iterable[Point]) -> Point | None:
    return min(cell, key=lambda point: point.us, default=None)


@dataclass(frozen=True)
class Standing:
    """Our fastest design and the fastest peer on one shape, precision and M; a peer of this precision or cuBLAS on
    weights of 16 bits."""

    ours: Point
    peer: Point

    @property
    def ratio(self) -> float:
        """Our time over the peer's: above 1 the peer is ahead."""
        return self.ours.us / self.peer.us

    @property
    def where(self) -> str:
        return f"{self.ours.shape}, {self.ours.codes}, M = {self.ours.m}"


def alone(found: Iterable[Point]) -> list[Point]:
    """Those that overlap no other launch, as no peer's does."""
    return [p for p in found if not p.overlapped]


def standings(found: Iterable[Point], peers: Callable[[str], bool] = lambda name: True,
              accuracy: Sequence[str] = tuple(ACCURACY)) -> list[Standing]:
    """Where both one of ours of these classes and a peer that `peers` takes by its name were measured."""
    rows = []
    for cell in _cells(found).values():
        ours = _fastest(p for p in cell if p.accuracy in accuracy)
        peer = _fastest(p for p in cell if not p.ours and peers(p.variant))
        if ours and peer:
            rows.append(Standing(ours, peer))
    return rows


def against_peers(found: Sequence[Point], named: int = 8) -> str:
    """In words, where our fastest design is behind the fastest peer: how often, and the worst so many by name; with
    launches that overlap, and with none."""
    if not standings(found):
        return "No peer was measured."
    words = f"Launched one after the other: {_against_peers(alone(found), named)}"
    if any(p.overlapped for p in found):
        words = f"With launches that overlap: {_against_peers(found, named)} {words}"
    return words


def _against_peers(found, named):
    rows = standings(found)
    behind = sorted((row for row in rows if row.ratio > 1), key=lambda row: -row.ratio)
    ratios = [row.ratio for row in rows]
    words = (f"our fastest design takes {min(ratios):.2f} to {max(ratios):.2f} times the time of the fastest peer, "
             f"median {float(np.median(ratios)):.2f}, over {len(rows)} shapes, precisions and M. ")
    if not behind:
        return words + "It is slower nowhere."
    worst = "; ".join(f"{row.where}, {row.ratio:.2f} times {row.peer.label}" for row in behind[:named])
    rest = f"; on the others by at most {behind[named].ratio - 1:.0%}" if len(behind) > named else ""
    return f"{words}It is slower on {len(behind)}: {worst}{rest}."


def standing_table(found: Iterable[Point]) -> list[dict]:
    """Our time over the fastest peer's: a row a shape and precision, a column an M."""
    table: dict[tuple[str, str], dict] = {}
    for row in standings(found):
        of = table.setdefault((row.ours.shape, row.ours.codes), {"N x K": row.ours.shape, "codes": row.ours.codes})
        of[f"M = {row.ours.m}"] = round(row.ratio, 2)
    return list(table.values())


def best_table(found: Iterable[Point]) -> list[dict]:
    """Our fastest design at each M, with its speed: a row a shape and precision."""
    table: dict[tuple[str, str], dict] = {}
    for (shape, codes, m), cell in _cells(found).items():
        best = _fastest(p for p in cell if p.ours)
        if best:
            of = table.setdefault((shape, codes), {"N x K": shape, "codes": codes})
            of[f"M = {m}"] = f"{best.label}: {best.speed}"
    return list(table.values())


def rung_table(found: Iterable[Point], shape: str = "17408 x 5120") -> list[dict]:
    """Every variant's speed on one shape: a row a variant and precision, a column an M; ours from the bottom up, then
    peers."""
    table: dict[tuple[str, str], dict] = {}
    for p in sorted((p for p in found if p.shape == shape), key=lambda p: not p.ours):
        of = table.setdefault((p.codes, p.label), {"design": p.label, "codes": p.codes})
        of[f"M = {p.m}"] = p.speed
    return [row for codes in article.PRECISIONS for row in table.values() if row["codes"] == codes]


def overlap_table(found: Iterable[Point]) -> list[dict]:
    """The fastest design's time with launches that overlap, of that of the fastest one with none: a row a shape and
    precision, a column an M."""
    table: dict[tuple[str, str], dict] = {}
    for (shape, codes, m), cell in _cells(p for p in found if p.ours).items():
        overlapped, one = _fastest(p for p in cell if p.overlapped), _fastest(alone(cell))
        if overlapped and one:
            of = table.setdefault((shape, codes), {"N x K": shape, "codes": codes})
            of[f"M = {m}"] = f"{overlapped.us:.3g} of {one.us:.3g} us"
    return list(table.values())


def price_of_accuracy(found: Iterable[Point]) -> list[dict]:
    """The fastest accurate design's time over that of the fastest one on 16-bit activations, over the shapes: rows of
    {codes, M, shapes, least, median, most}."""
    ratios: dict[tuple[str, int], list[float]] = {}
    for (_, codes, m), cell in _cells(found).items():
        exact = _fastest(p for p in cell if p.accuracy == "accurate")
        rounded = _fastest(p for p in cell if p.ours and p.accuracy != "accurate")
        if exact and rounded:
            ratios.setdefault((codes, m), []).append(exact.us / rounded.us)
    return [{"codes": codes, "M": m, "shapes": len(of), "least": min(of), "median": float(np.median(of)),
             "most": max(of)} for (codes, m), of in sorted(ratios.items(), key=lambda item: (item[0][0], item[0][1]))]


# ---------------------------------------------------------------- goals

BIG_CODES = 50e6
"""Weights of a shape that counts as big: as many bytes of 8-bit codes."""
SMALL = ("2048 x 2048", "1024 x 2048")
LONG = ("17408 x 5120", "5120 x 17408")


@dataclass(frozen=True)
class Goal:
    """What the ladder was built to reach. asked: in words. figure: the worst case's, in `unit`. least: whether `limit`
    is a least figure rather than a most one. worst: where that is. span: over all cases, in words. alone: the worst
    case's figure where no launches overlap."""

    asked: str
    limit: float
    least: bool
    unit: str
    figure: float | None = None
    worst: str = ""
    span: str = ""
    alone: float | None = None

    @property
    def met(self) -> bool | None:
        """None where nothing was measured."""
        return self._reached(self.figure)

    def _reached(self, figure):
        return None if figure is None else figure >= self.limit if self.least else figure <= self.limit

    def row(self) -> dict:
        def said(figure):
            return "-" if figure is None else "yes" if self._reached(figure) else "NO"
        alone = said(self.alone) + ("" if self.alone is None else f", {self.alone:.3g}")
        return {"goal": self.asked, "worst case": "not measured" if self.figure is None else
                f"{self.figure:.3g} {self.unit}", "where": self.worst, "all cases": self.span,
                "met": said(self.figure), "with no overlap": alone}


def goals(found: Sequence[Point], read_gbs: float | None, empty_us: float | None) -> list[Goal]:
    """Every goal with the figure that its worst case has, met or not: with launches that overlap, and with none.

    read_gbs, empty_us: the ceiling of reading and the time of an empty launch, of the same run.
    """
    pairs = zip(_goals(found, read_gbs, empty_us), _goals(alone(found), read_gbs, empty_us), strict=True)
    return [replace(goal, alone=of_one.figure) for goal, of_one in pairs]


def _goals(found, read_gbs, empty_us) -> list[Goal]:
    big = [p for p in found if p.n * p.k > BIG_CODES]
    exact = ("accurate",)
    rows = []

    def speed(asked, points_, unit, value, limit, accuracy=tuple(ACCURACY)):
        best = {cell: _fastest(p for p in of if p.accuracy in accuracy) for cell, of in _cells(points_).items()}
        rows.append(_worst(asked, limit, True, unit, [
            (value(p) if p else 0.0, f"{shape}, {codes}, M = {m}, {p.label if p else 'none of ours'}")
            for (shape, codes, m), p in best.items()]))

    def ahead(asked, points_, limit=1.0, peers=lambda name: True, accuracy=tuple(ACCURACY)):
        cases = [(s.ratio, f"{s.where}, {s.ours.label} against {s.peer.label}")
                 for s in standings(points_, peers, accuracy)]
        lacking = [(float("inf"), f"{shape}, {codes}, M = {m}, none of ours")
                   for (shape, codes, m), of in _cells(points_).items() if not any(p.accuracy in accuracy for p in of)]
        rows.append(_worst(asked, limit, False, "of the peer's time", cases + lacking))

    def terabytes(p):
        return p.gbs / 1e3

    def at(low, high, codes=None, part=found):
        return [p for p in part if low <= p.m <= high and codes in (None, p.codes)]

    for codes, limit in (("int8", 3.5), ("int4", 3.0)):
        speed(f"M = 1, {codes}, accurate: at least {limit} TB/s on shapes of over 50 million weights",
              at(1, 1, codes, big), "TB/s", terabytes, limit, exact)
    ahead("M = 1, accurate: ahead of the best peer on every shape", at(1, 1), accuracy=exact)
    for codes, limit in (("int8", 3.3), ("int4", 2.7)):
        speed(f"M = 2 to 32, {codes}: at least {limit} TB/s on the same shapes", at(2, 32, codes, big), "TB/s",
              terabytes, limit)
    ahead("M = 2 to 32: ahead of the best peer on every shape", at(2, 32))
    speed("M = 512: at least 720 TFLOP/s on 17408 x 5120 and 5120 x 17408, both precisions",
          [p for p in at(512, 512) if p.shape in LONG], "TFLOP/s", lambda p: p.tflops, 720)
    ahead("M = 512: ahead of Humming on every shape", at(512, 512), peers=lambda name: name.startswith("humming"))
    ahead("M = 64 to 2048: at most 3% slower than the best peer anywhere", at(64, 2048), 1.03)
    small = [p for p in at(1, 1) if p.shape in SMALL]
    if read_gbs and empty_us:
        best = [_fastest(p for p in cell if p.ours) for cell in _cells(small).values()]
        cases = [(p.us / (empty_us + p.gbs * p.us / read_gbs), f"{p.shape}, {p.codes}, {p.label}")
                 for p in best if p]
    else:
        cases = []
    rows.append(_worst("2048 x 2048 and 1024 x 2048, M = 1: within 1.5 times an empty launch and the bytes at the read "
                       "ceiling", 1.5, False, "times that", cases))
    return rows


def _worst(asked, limit, least, unit, cases: list[tuple[float, str]]) -> Goal:
    if not cases:
        return Goal(asked, limit, least, unit)
    figures = [figure for figure, _ in cases]
    figure, worst = (min if least else max)(cases)
    reached = sum(f >= limit if least else f <= limit for f in figures)
    span = f"{reached} of {len(cases)}; {min(figures):.3g} to {max(figures):.3g}"
    return Goal(asked, limit, least, unit, figure, worst, span)


def record_goals(lab: Lab, found: Sequence[Goal]) -> None:
    """Keep the figures of goals that were measured, and whether they are met."""
    for goal in found:
        if goal.figure is not None:
            case = {"goal": goal.asked, "limit": goal.limit}
            if np.isfinite(goal.figure):
                lab.record.measure(kernel=KERNEL, variant="goal", case=case, metric="goal_worst_case",
                                   value=goal.figure, unit=goal.unit)
            lab.record.measure(kernel=KERNEL, variant="goal", case=case, metric="goal_met", value=int(goal.met),
                               unit="1")


def goals_of_record(record: dict) -> list[Goal]:
    """The goals, from a saved record; empty where it has no ladder."""
    found = points(record)
    if not found:
        return []

    def value(kernel, name, metric):
        return next((e["value"] for e in record["measurements"]
                     if (e["kernel"], e["variant"], e["metric"]) == (kernel, name, metric)), None)
    return goals(found, value("ceilings", "read", "bandwidth_gbs"), value(KERNEL, EMPTY, "time_us"))


def correctness(tested: Selftest, measured: Ladder) -> list[Goal]:
    """The goals that need no clock."""
    wrong = [f"{name}, {codes}, M = {m}" for (name, codes, m), error in tested.worst.items()
             if not error <= tested.bounds[name]]
    rows = []
    for asked, unit, of, cases, names in (
            ("selftest: every design within its bound on every case", "beyond", tested.failures, tested.cases, wrong),
            ("real shapes: every result within its bound", "beyond", len(measured.wrong), len(measured.errors),
             measured.wrong),
            ("repeated, every result has the same bits", "differ", tested.unequal + measured.unequal,
             tested.cases + len(measured.errors), [])):
        if cases:
            rows.append(Goal(asked, 0, False, unit, float(of), next(iter(names), ""), f"{cases - of} of {cases}"))
        else:
            rows.append(Goal(asked, 0, False, unit))
    return rows


def choices(lab: Lab, shapes_: Iterable[shapes.Projection], rows: Sequence[int],
            precisions: Sequence[str] = article.PRECISIONS) -> list[dict]:
    """What `gemm_dispatch` chooses on this device: rows of {N x K, codes, class, designs by M, why, at the first M}."""
    table = []
    for p in shapes_:
        for precision in precisions:
            for accuracy in ACCURACY:
                chosen = {}
                for m in rows:
                    with contextlib.suppress(ValueError):  # no design of the class takes so many rows
                        chosen[m] = choose((p.n, p.k, precision), m, lab.backend, accuracy)
                runs = itertools.groupby(chosen, key=lambda m: chosen[m].design)
                words = ", ".join(f"{name} up to {list(of)[-1]}" for name, of in runs)
                table.append({"N x K": f"{p.n} x {p.k}", "codes": precision, "class": accuracy,
                              "designs by M": words or "none",
                              "why, at the first M": next(iter(chosen.values())).reason if chosen else ""})
    return table
