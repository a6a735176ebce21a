"""Experiments behind the claim of the prefill_breakdown article about its candidates, B14: A a tiled batched GEMM, B
int8 activations, C tensor cores, on every shape of the model and as parts of a whole pass. Beside them the second of
the article's buckets, the gated delta net, which has no claim of its own here.

A product is checked against float64 on a sample of its outputs before it is timed, cold: each call reads another copy
of the weights. Where a design takes int8 activations, rounding them is part of the call.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from kernelbook import formats, measure, qwen3_5, shapes, stats
from kernelbook.backends import Source
from kernelbook.experiments import Finding, Lab, not_timed, omitted
from kernelbook.ops import gated_delta_net as gdn
from kernelbook.ops import layer, panel_gemm
from kernelbook.ops import prefill_gemm as op
from kernelbook.ops.prefill_tensor import TensorDesign
from kernelbook.peers import delta_net as delta_net_peers
from kernelbook.peers import gemm as gemm_peers

KERNEL = "prefill_gemm"
CANDIDATES = {"tiled_fp32": "A", "int8_dot": "B", "int8_matrix": "B", "tensor_cores": "C", "wgmma": "C",
              panel_gemm.NAME: "C"}
"""The article's letter of each design: of those of `prefill_gemm`, which read tiles, and of the one on panels."""
ACTIVATIONS = {name: design.activations for name, design in op.DESIGNS.items()} | {
    panel_gemm.NAME: panel_gemm.ACTIVATIONS}
FILES = {name: design.file for name, design in op.DESIGNS.items()} | {panel_gemm.NAME: panel_gemm.FILE}
BASE = "article"
"""The article's engine: its probe, explicit FMA with R = 4, on tiles of 16 tokens one after the other."""
ENGINE = qwen3_5.DESIGNS[BASE]
BOUND = {"float32": 1e-6, "int8": 1e-6, "bf16": 4e-3}
"""Relative Frobenius against float64 that a design must stay within, by its activations; those on int8 against float64
on the quantized activations."""
PEERS = ("cublas_bf16", "humming_int4")
ROWS = (16, 64, 256, 512, 2048)
SAMPLE = 32
"""Rows of tiles at either end of the weights that outputs are compared on."""
MAX_COPIES = 100
"""Of a weight, that a cold measurement goes through. Weights so small that this many do not fill the cache are measured
warm."""
SMALL = 0.01
"""Share of a pass's FLOP that a peer may lack and still be added up."""


def check_parameters(*, rows: Sequence[int], designs: Sequence[str], pass_rows: int, tokens: Sequence[int],
                     layers: int) -> None:
    """Raise ValueError, naming the first value that no experiment can use and what was expected, before any runs."""
    for name, values, low, high in (("rows", rows, 1, 1 << 16), ("tokens", tokens, 1, 1 << 16),
                                    ("layers", [layers], 1, 1024)):
        if not len(values):
            raise ValueError(f"{name} is empty; expected at least one value from {low} to {high}")
        for value in values:
            if not low <= value <= high:
                raise ValueError(f"{name}: {value}; expected {low} to {high}")
    for design in designs:
        if design not in CANDIDATES:
            raise ValueError(f"designs: {design!r}; expected some of {', '.join(CANDIDATES)}")
    if pass_rows not in rows:
        raise ValueError(f"pass_rows: {pass_rows}; expected one of the rows {', '.join(map(str, rows))}")


# ---------------------------------------------------------------- one product in every design

@dataclass
class _Bench:
    """What is timed: a call for each copy of the weights, with everything allocated before.

    reference: float64's outputs on the sample, from the activations as the design gets them. out: what the first call
    has given, as NumPy.
    """

    name: str
    candidate: str
    calls: list[Callable]
    reference: np.ndarray
    bound: float
    out: Callable[[], np.ndarray]


class _Problem:
    """One projection's weights on the device, in enough copies to be measured cold. n: rows of them at most, where a
    simulator has no time for all. matrix: the number of the random weights."""

    def __init__(self, lab: Lab, p: shapes.Projection, matrix: int, n: int | None = None):
        self.lab, self.projection, self.backend = lab, p, lab.backend
        self.n, self.k = min(p.n, n or p.n), p.k
        data = layer.random_tiles(self.backend, self.n, self.k, seed=lab.seed % 2**32, matrix=matrix)
        self.tiles = formats.Tiles(self.backend.numpy(data))
        copies = self.copies(self.tiles.nbytes)
        first = op.PrefillGemm(self.backend, data)
        self.gemms = [first] + [first.clone() for _ in range(copies - 1)]
        ends = np.unique(np.r_[:min(SAMPLE, self.n // 4), max(0, self.n // 4 - SAMPLE):self.n // 4])
        self.sample = formats.Tiles(np.ascontiguousarray(self.tiles.data[ends]))
        self.columns = (ends[:, None] * 4 + np.arange(4)).ravel()

    @cached_property
    def in_panels(self) -> list[panel_gemm.PanelGemm]:
        """As many copies once more. Raises ValueError where they cannot be multiplied."""
        return [panel_gemm.PanelGemm(self.backend, gemm.data) for gemm in self.gemms]

    def copies(self, nbytes: int) -> int:
        """Of weights of so many bytes, that are made."""
        return min(MAX_COPIES, measure.rotation(nbytes, self.backend.l2_bytes)) if self.lab.timed else 1

    def case(self, m: int) -> dict:
        return {"projection": self.projection.name, "M": m, "N": self.n, "K": self.k}


class _Rows:
    """Activations of a problem in every form, and float64's products of some of them on the sample.

    copies: of the weights, that a measurement goes through. What a call reads and writes besides them leaves the cache
    only so much of them. cache: what such a measurement is.
    """

    def __init__(self, problem: _Problem, m: int):
        self.problem, self.m, backend = problem, m, problem.backend
        self.host = problem.lab.rng(40, m, problem.k).standard_normal((m, problem.k), np.float32)
        tall = -(-m // ENGINE.tile) * ENGINE.tile  # the article's tiles, the last filled up
        padded = np.zeros((tall, problem.k), np.float32)
        padded[:m] = self.host
        self.x = backend.array(padded)
        self.bf16 = backend.array(to_bf16(self.host))
        self.out = backend.empty((tall, problem.n), np.float32)
        if problem.lab.timed:
            missing = measure.COLD_L2_MULTIPLE * backend.l2_bytes - 4 * m * (problem.n + problem.k)
            needed = max(2, -(-missing // problem.tiles.nbytes))
            self.copies = min(needed, len(problem.gemms))
            self.cache = "cold" if self.copies == needed else "warm"
        else:
            self.copies, self.cache = 1, None
        self.rows = np.unique(np.r_[:min(16, m), m // 2:min(m // 2 + 16, m), max(0, m - 16):m])
        self.exact = op.reference(self.host[self.rows], problem.sample)
        self.exact_int8 = op.reference_int8(*formats.quantize_activations(self.host[self.rows]), problem.sample)

    def article(self) -> _Bench:
        calls = [qwen3_5.tile_by_tile(self.problem.backend, ENGINE, gemm.data, self.x, self.out)
                 for gemm in self.problem.gemms[:self.copies]]
        return _Bench(BASE, BASE, calls, self.exact, BOUND["float32"], self._own_out)

    def design(self, name: str) -> _Bench:
        """Raises ValueError where the design cannot run on this backend or shape."""
        backend, form = self.problem.backend, ACTIVATIONS[name]
        gemms = (self.problem.in_panels if name == panel_gemm.NAME else
                 [gemm.using(name) for gemm in self.problem.gemms])[:self.copies]
        size = gemms[0].scratch(self.m)
        scratch = backend.empty(size, np.float32) if size else None
        out, x = self.out[:self.m], self.x[:self.m]
        if form == "int8":
            codes = backend.empty((self.m, self.problem.k), np.int8)
            scales = backend.empty((self.m, self.problem.k // formats.BLOCK), np.float32)
            quantize = op.prepare_quantize(backend, x, codes=codes, scales=scales)
            given = (codes, scales)
        else:
            given = self.bf16 if form == "bf16" else x
        launches = [gemm.prepare(given, out=out, scratch=scratch) for gemm in gemms]

        def with_quantization(launch):
            def call():
                quantize()
                launch()
            return call
        calls = [with_quantization(launch) for launch in launches] if form == "int8" else launches
        reference = self.exact_int8 if form == "int8" else self.exact
        return _Bench(name, CANDIDATES[name], calls, reference, BOUND[form], self._own_out)

    def peer(self, peer: gemm_peers.Peer, calls: list[Callable]) -> _Bench:
        given = gemm_peers.activations(peer, self.host)
        bound = [lambda call=call: call(given) for call in calls[:self.copies]]
        return _Bench(peer.name, "peer", bound, self.exact, gemm_peers.BOUND[peer.bits],
                      lambda: bound[0]().float().cpu().numpy())

    def _own_out(self) -> np.ndarray:
        return self.problem.backend.numpy(self.out)[:self.m]

    def error(self, bench: _Bench) -> tuple[float, float]:
        """Relative Frobenius on the activations as the design gets them, recorded, and on the float ones."""
        self.out.fill(np.nan)
        bench.calls[0]()
        out = bench.out()
        found = out[np.ix_(self.rows, self.problem.columns)]
        elsewhere = int(np.count_nonzero(~np.isfinite(out)) - np.count_nonzero(~np.isfinite(found)))
        lab, variant = self.problem.lab, _variant(bench.name)
        case = self.problem.case(self.m) | {"outputs compared": found.size}
        own = lab.errors(KERNEL, variant, case, found, bench.reference, bench.bound, elsewhere)
        total = stats.errors(found, self.exact).relative_frobenius
        if bench.reference is not self.exact and np.isfinite(total):
            lab.record.measure(kernel=KERNEL, variant=variant, case=case, value=total, unit="1",
                               metric="relative_frobenius_to_float_activations")
        return own.relative_frobenius, total


def to_bf16(x: np.ndarray) -> np.ndarray:
    """Bits of the bf16 nearest to finite float32, ties to even: uint16 of x's shape."""
    bits = np.ascontiguousarray(x, np.float32).view(np.uint32)
    return ((bits + 0x7FFF + (bits >> 16 & 1)) >> 16).astype(np.uint16)


def from_bf16(bits: np.ndarray) -> np.ndarray:
    return (bits.astype(np.uint32) << 16).view(np.float32)


def _variant(name: str) -> str:
    """What records call a design: ours by its file."""
    return FILES.get(name, "q4_probe_tiles_of_16" if name == BASE else name)


# ---------------------------------------------------------------- the candidates (B14)

def candidates(lab: Lab, model: shapes.Inventory = shapes.QWEN3_5_27B, rows: Sequence[int] = ROWS,
               designs: Sequence[str] = tuple(CANDIDATES), pass_rows: int = 512, memory_gib: float = 16.0,
               budget_s: float = 0.4) -> Finding:
    """Candidates A, B and C, the article's engine and peers on every projection's shape; the finding on B14.

    rows: M. pass_rows: the M of the whole pass that decides. memory_gib: what a case may take on the device; one that
    takes more is recorded as skipped. budget_s: seconds of measuring a shape and M, see measure.device_times.
    Data: rows of {projection, N, K, M, candidate, variant, cache, us, p10, p90, TFLOP/s, "of bf16 matmul", error,
    "error to float"}: candidate is A, B, C, "article" or "peer"; the errors are relative Frobenius on the activations
    as the design gets them and, where it gets int8 ones, on the float ones. Without a GPU on at most 64 rows of weights
    and 32 of activations, without times. `whole_pass` adds them up.
    Raises what check_parameters raises.
    """
    check_parameters(rows=rows, designs=designs, pass_rows=pass_rows, tokens=[1], layers=1)
    peers = lab.able(KERNEL, [peer for peer in gemm_peers.all_peers() if peer.name in PEERS])
    lab.compile_ahead([source for name in designs for source in _sources(lab, name)])
    table, left_out = [], []
    for i, p in enumerate(shapes.distinct(model.projections)):
        problem = _Problem(lab, p, i, None if lab.timed else 64)
        ready = lab.prepare_peers(KERNEL, peers, "int4", problem.tiles.dequantize, problem.copies,
                                  {"N": p.n, "K": p.k}) if lab.timed else {}
        for m in rows if lab.timed else sorted({min(m, 32) for m in rows}):
            if _fits(problem, m, memory_gib):
                found, wrong = _measure(_Rows(problem, m), designs, ready, budget_s)
                table += found
                left_out += wrong
    if not lab.timed:
        return _untimed(lab, table, left_out)
    return _judge(lab, table, model, designs, pass_rows, left_out)


def _sources(lab, name) -> list[Source]:
    """Every form of a design that a product may launch here."""
    matrix, is_hopper = lab.backend.matrix[0], getattr(lab.backend, "arch", None) == "90a"
    if name == panel_gemm.NAME:
        return panel_gemm.product_sources() if is_hopper else []
    design = op.DESIGNS[name]
    if not isinstance(design, TensorDesign):
        return [design.source(tokens, matrix) for tokens in design.tokens]
    if design.wgmma and not is_hopper:
        return []
    return [design.source(tile.tokens, matrix) for tile in design.tiles]


def _measure(given: _Rows, designs, ready, budget_s) -> tuple[list[dict], list[str]]:
    """Rows of one shape and M, and the designs that are wrong there, which have no times."""
    problem, lab, case = given.problem, given.problem.lab, given.problem.case(given.m)
    benches, wrong = [given.article()], []
    for name in designs:
        try:
            benches.append(given.design(name))
        except ValueError as cannot:
            lab.no_time(KERNEL, _variant(name), case, "skipped", str(cannot))
    for peer, calls in ready.items():
        try:
            benches.append(given.peer(peer, calls))
            benches[-1].out()
        except Exception as error:  # a peer's own failure must not cost the run
            benches = [bench for bench in benches if bench.name != peer.name]
            lab.no_time(KERNEL, peer.name, case, "runtime_error", error)
    rows = []
    for bench in benches:
        own, total = given.error(bench)
        if own <= bench.bound:
            rows.append(case | {"candidate": bench.candidate, "variant": bench.name, "error": own,
                                "error to float": total})
        elif bench.candidate != "peer":
            wrong.append(f"{bench.name} on {case['N']} x {case['K']} at M = {given.m}")
    if not lab.timed:
        return rows, wrong
    right = {row["variant"] for row in rows}
    timings = measure.device_times({bench.name: bench.calls for bench in benches if bench.name in right},
                                   sample_us=1000, budget_s=budget_s, rest=measure.REST) if right else {}
    flop = 2 * given.m * problem.n * problem.k
    ceiling = lab.ceilings.get("bf16_matmul")
    for row in rows:
        t = timings[row["variant"]]
        lab.time(KERNEL, _variant(row["variant"]), case, t, given.cache, flop=flop)
        rate = flop / 1e6 / t.median
        row |= {"cache": given.cache, "us": t.median, "p10": t.p10, "p90": t.p90, "TFLOP/s": rate,
                "of bf16 matmul": rate / ceiling.value if ceiling else None}
    return rows, wrong


def _fits(problem: _Problem, m: int, memory_gib: float) -> bool:
    if not problem.lab.timed:
        return True
    n, k = problem.n, problem.k
    # tiles, panels, and a peer's, of 4 bits
    weights = 3 * len(problem.gemms) * problem.tiles.nbytes + problem.copies(2 * n * k) * 2 * n * k
    # activations in three forms and two peers'; outputs of ours, a slice of K more or two, and of peers
    needed = (weights + m * k * (4 + 2 + 1 + 4) + m * n * 4 * 6) / 2**30
    if needed > memory_gib:
        problem.lab.no_time(KERNEL, _variant(BASE), problem.case(m), "skipped",
                            f"the case takes {needed:.1f} GiB, more than the {memory_gib:g} allowed")
    return needed <= memory_gib


def _untimed(lab, table, left_out) -> Finding:
    worst = {name: max(row["error"] for row in table if row["variant"] == name)
             for name in dict.fromkeys(row["variant"] for row in table)}
    to_float = [row["error to float"] for row in table if row["candidate"] == "B"]
    rounding = (f" Against the float activations those on int8 are {min(to_float):.1e} to {max(to_float):.1e} off."
                if to_float else "")
    return not_timed(
        "B14", f"On {len({(row['N'], row['K'], row['projection']) for row in table})} shapes of the model, cut to "
        f"{max((row['N'] for row in table), default=0)} rows of weights, against float64: "
        + ", ".join(f"{name} {error:.1e}" for name, error in worst.items())
        + f".{rounding} Which of them is a way out needs a clock.{omitted(left_out)}", table,
        f"{len(worst)} designs give right results" if not left_out else "some results are wrong")


def _judge(lab, table, model, designs, pass_rows, left_out) -> Finding:
    lacking = [letter for letter in "ABC" if letter not in {row["candidate"] for row in table}]
    if lacking:
        words = f"No right product of candidate {', '.join(lacking)} was timed.{omitted(left_out)}"
        if {CANDIDATES.get(wrong.split()[0]) for wrong in left_out} & set(lacking):
            return Finding("B14", "not reproduced", words, data=table)
        return Finding("B14", "not testable here", words, data=table,
                       missing=f"a design of candidate {', '.join(lacking)} that runs here, among "
                       f"{', '.join(designs)}, or memory for it")
    best, cases = [], {}
    for row in table:
        cases.setdefault((row["N"], row["K"], row["M"]), []).append(row)
    for case in cases.values():
        of = {letter: min((row for row in case if row["candidate"] == letter), key=lambda row: row["us"], default=None)
              for letter in "ABC"}
        if all(of.values()):
            best.append(of)
    ahead = sum(of["C"]["p90"] < min(of["A"]["p10"], of["B"]["p10"]) for of in best)
    totals = {row["variant"]: row for row in whole_pass(table, model, pass_rows)}
    for row in totals.values():
        lab.record.measure(kernel=KERNEL, variant=_variant(row["variant"]), metric="time_us", value=row["ms"] * 1e3,
                           p10=row["p10"] * 1e3, p90=row["p90"] * 1e3, unit="us", cache="cold",
                           case={"whole pass": "sum of the projections", "M": pass_rows})
    fastest = {letter: min((row for row in totals.values() if row["candidate"] == letter), key=lambda row: row["ms"],
                           default=None) for letter in "ABC"}
    if not all(fastest.values()):
        return Finding("B14", "not reproduced", "Not each candidate has a right product on every shape at M = "
                       f"{pass_rows}, so there is no pass to compare.{omitted(left_out)}", data=table)
    c, others = fastest["C"], [fastest["A"], fastest["B"]]
    if c["p90"] < min(row["p10"] for row in others):
        verdict = "reproduced" if ahead == len(best) and not left_out else "direction holds"
    else:
        verdict = "contradicted" if any(row["p90"] < c["p10"] for row in others) else "not reproduced"
    words = "; ".join(f"{row['candidate']} {row['variant']} {row['ms']:.1f} ms, {row['TFLOP/s']:.0f} TFLOP/s"
                      + (f", {row['article / this']:.1f} times as fast as the article's tiles of 16"
                         if row["article / this"] else "")
                      for row in sorted(totals.values(), key=lambda row: row["ms"]) if row["candidate"] in "ABC")
    peers = ", ".join(f"{row['variant']} {row['ms']:.1f} ms" for row in totals.values() if row["candidate"] == "peer")
    return Finding(
        "B14", verdict,
        f"All projections of {model.name} at M = {pass_rows}, cold, added up: {words}"
        f"{'; peers: ' + peers if peers else ''}. Over {len(best)} shapes and M from {min(r['M'] for r in table)} to "
        f"{max(r['M'] for r in table)} C is the fastest on {ahead}. Rounding activations to int8 is part of B's time."
        f"{omitted(left_out)}",
        ", ".join(f"{letter} {row['ms']:.1f} ms" for letter, row in fastest.items()), data=table)


def whole_pass(rows: Sequence[dict], model: shapes.Inventory = shapes.QWEN3_5_27B, m: int = 512) -> list[dict]:
    """What all projections of a model's layers take together in one pass over m rows, from the rows of `candidates`,
    for every variant that has all shapes that were measured there; of a peer, all but SMALL.

    Rows of {variant, candidate, ms, p10, p90, TFLOP/s, "of the FLOP", "article / this"}, the fastest first. p10 and p90
    are sums of the projections', which is more spread than a sum has. "of the FLOP": the share of the pass that the
    variant's shapes make.
    """
    times: dict[str, dict[tuple[int, int], dict]] = {}
    for row in rows:
        if row["M"] == m and "us" in row:
            times.setdefault(row["variant"], {})[row["N"], row["K"]] = row

    def parts(measured):
        return [p for p in model.projections if (p.n, p.k) in measured]

    def flop(measured):
        return sum(p.count * p.flops(m) for p in parts(measured))

    whole, found = flop({shape for of in times.values() for shape in of}), []
    for variant, of in times.items():
        candidate = next(iter(of.values()))["candidate"]
        if flop(of) >= whole * (1 - SMALL if candidate == "peer" else 1):
            ms, p10, p90 = (sum(p.count * of[p.n, p.k][key] for p in parts(of)) / 1e3 for key in ("us", "p10", "p90"))
            found.append({"variant": variant, "candidate": candidate, "ms": ms, "p10": p10, "p90": p90,
                          "TFLOP/s": flop(of) / 1e9 / ms, "of the FLOP": flop(of) / model.flops(m)})
    base = next((row["ms"] for row in found if row["variant"] == BASE), None)
    return sorted((row | {"article / this": base / row["ms"] if base else None} for row in found),
                  key=lambda row: row["ms"])


# ---------------------------------------------------------------- the gated delta net (no claim of its own)

GDN = "gated_delta_net"
GDN_WAYS = (("sequential", 1, 2e-6), ("chunked", 2, 2e-5), ("chunked", 1, 6e-3))
"""Design, terms, and the relative Frobenius error that its arithmetic may have: float32's, where it adds up over
thousands of tokens one after another, is several roundings."""
GDN_FILES = {"sequential": "2_sequential", "chunked": "4_chunk_scan"}
GDN_PEER_BOUND = 0.03


def _gdn_weights(lab: Lab, key_heads: int, value_heads: int) -> gdn.Weights:
    """Value heads that forget within a token, and others that keep for thousands."""
    rng = lab.rng(41, key_heads, value_heads)
    conv = 0.5 * rng.standard_normal(((2 * key_heads + value_heads) * gdn.HEAD_DIM, gdn.TAPS), np.float32)
    a_log = np.log(np.geomspace(1e-3, 16, value_heads)).astype(np.float32)
    return gdn.Weights(conv.astype(np.float32), a_log, rng.standard_normal(value_heads, np.float32),
                       1 + np.float32(0.1) * rng.standard_normal(gdn.HEAD_DIM, np.float32)).check()


def _way(design: str, terms: int) -> str:
    return design if design == "sequential" else f"chunked, {terms} term{'s' * (terms > 1)}"


def delta_net(lab: Lab, tokens: Sequence[int] = (512, 2048), key_heads: int = 16, value_heads: int = 48,
              memory_gib: float = 8.0, budget_s: float = 0.5) -> list[dict]:
    """The recurrence of one layer, token by token as in the article's engine and in chunks, beside FLA: the same work
    for each, on normalized q and k.

    memory_gib: what a case may take on the device; one that takes more is recorded as skipped. Rows of {tokens, heads,
    variant, error, us, p10, p90, "of FLA"}, warm, since the layer has just written what the recurrence reads; without a
    GPU at most 130 tokens of one key head, without times. A wrong design or peer has no row.
    """
    known = lab.able(GDN, delta_net_peers.all_peers())
    if not lab.timed:
        value_heads, key_heads, known = max(1, value_heads // key_heads), 1, []
    weights, table = _gdn_weights(lab, key_heads, value_heads), []
    for count in tokens if lab.timed else sorted({min(n, 130) for n in tokens}):
        case = {"tokens": count, "key heads": key_heads, "value heads": value_heads}
        # x and its parts in float64 on the host are no device memory; on it inputs, factors of two terms and outputs
        needed = 4 * gdn.HEAD_DIM * count * (6 * key_heads + 6 * value_heads) / 2**30
        if needed > memory_gib:
            lab.no_time(GDN, GDN_FILES["chunked"], case, "skipped",
                        f"the case takes {needed:.1f} GiB, more than the {memory_gib:g} allowed")
            continue
        table += _delta_net_case(lab, weights, case, known, budget_s)
    return table


def _delta_net_case(lab, weights, case, known, budget_s) -> list[dict]:
    rng, count = lab.rng(42, *case.values()), case["tokens"]
    x, a, b = (rng.standard_normal((count, width), np.float32)
               for width in (weights.channels, weights.value_heads, weights.value_heads))
    made, _ = gdn.inputs_reference(x, a, b, weights, np.zeros((gdn.TAPS - 1, weights.channels)))
    host = gdn.Inputs(*(array.astype(np.float32) for array in vars(made).values()))
    expected, _ = gdn.chunked_recurrence(host)
    device = gdn.Inputs(*map(lab.backend.array, vars(host).values()))
    calls, rows = {}, []
    for design, terms, bound in GDN_WAYS:
        net = gdn.GatedDeltaNet(lab.backend, weights, design, terms=terms)
        final = lab.backend.empty((weights.value_heads, gdn.HEAD_DIM, gdn.HEAD_DIM), np.float32)
        call = net.prepare_recurrence(device, final=final)
        error = lab.errors(GDN, GDN_FILES[design], case | {"terms": terms}, lab.backend.numpy(call()), expected, bound)
        if error.relative_frobenius <= bound:
            calls[_way(design, terms)] = (call, GDN_FILES[design], case | {"terms": terms})
            rows.append(case | {"variant": _way(design, terms), "error": error.relative_frobenius})
    for peer in known:
        try:
            call = peer.prepare(host)
            out = call().float().cpu().numpy()
            # what no graph can hold fails here, alone, and not in the run of all
            measure.device_times({peer.name: [call]}, rounds=1, sample_us=0)
        except Exception as error:  # a peer's own failure must not cost the run
            lab.no_time(GDN, peer.name, case, "runtime_error", error)
            continue
        error = lab.errors(GDN, peer.name, case, out, expected, GDN_PEER_BOUND)
        if error.relative_frobenius <= GDN_PEER_BOUND:
            calls[peer.name] = (call, peer.name, case)
            rows.append(case | {"variant": peer.name, "error": error.relative_frobenius})
    if not (lab.timed and calls):
        return rows
    timings = measure.device_times({name: [call] for name, (call, *_) in calls.items()}, budget_s=budget_s)
    fla = next((timings[peer.name].median for peer in known if peer.name in timings), None)
    for row in rows:
        t, (_, variant, of) = timings[row["variant"]], calls[row["variant"]]
        lab.time(GDN, variant, of, t, "warm")
        row |= {"us": t.median, "p10": t.p10, "p90": t.p90, "of FLA": t.median / fla if fla else None}
    return rows


def through_layers(lab: Lab, layers: int = 48, tokens: int = 66) -> list[dict]:
    """Errors of a stream after each of many layers of one head, whose output, through a random matrix, is added to what
    the next is given: what a rounding that looks small in one product comes to. tokens: at least one.

    Each way of the recurrence with products on float activations, and the chunked one with activations rounded to bf16
    and to int8 before each product. Rows of {recurrence, activations, layer, error}: relative Frobenius against
    float64.
    """
    weights = _gdn_weights(lab, 1, 1)
    widths = (weights.channels, gdn.HEAD_DIM, 1, 1)  # x, z, a, b
    rng = lab.rng(43, tokens)
    start, into = (rng.standard_normal((rows, columns)) * scale for rows, columns, scale in (
        (tokens, gdn.HEAD_DIM, 1), (gdn.HEAD_DIM, sum(widths), gdn.HEAD_DIM ** -0.5)))
    outs = rng.standard_normal((layers, gdn.HEAD_DIM, gdn.HEAD_DIM)) * gdn.HEAD_DIM ** -0.5

    def streams(net, rounded):
        stream, found = start, []
        for out in outs:
            normed = stream / np.sqrt((stream ** 2).mean(axis=1, keepdims=True))
            arrays = np.split((rounded(normed) @ into).astype(np.float32), np.cumsum(widths)[:-1], axis=1)
            stream = stream + rounded(net(*arrays)) @ out
            found.append(stream)
        return found

    def on_device(design, terms):
        net = gdn.GatedDeltaNet(lab.backend, weights, design, terms=terms)
        return lambda *arrays: lab.backend.numpy(net(*(lab.backend.array(np.ascontiguousarray(x)) for x in arrays)))

    rounding = {"float": lambda x: x, "bf16": lambda x: from_bf16(to_bf16(x)).astype(np.float64), "int8": _through_int8}
    exact = streams(lambda *arrays: gdn.reference(*arrays, weights)[0], rounding["float"])
    ways = [(design, terms, "float") for design, terms, _ in GDN_WAYS]
    ways += [("chunked", 2, activations) for activations in ("bf16", "int8")]
    rows = []
    for design, terms, activations in ways:
        bound = 8 * next(b for d, t, b in GDN_WAYS if (d, t) == (design, terms)) if activations == "float" else 1.0
        for i, (found, expected) in enumerate(zip(streams(on_device(design, terms), rounding[activations]), exact,
                                                  strict=True), 1):
            error = stats.errors(found, expected).relative_frobenius
            rows.append({"recurrence": _way(design, terms), "activations": activations, "layer": i, "error": error})
        case = {"tokens": tokens, "layers": layers, "terms": terms, "activations": activations}
        lab.errors(GDN, GDN_FILES[design], case, found, expected, bound)
    return rows


def _through_int8(x: np.ndarray) -> np.ndarray:
    codes, scales = formats.quantize_activations(np.asarray(x, np.float32))
    return codes * np.repeat(scales, formats.BLOCK, axis=1).astype(np.float64)
