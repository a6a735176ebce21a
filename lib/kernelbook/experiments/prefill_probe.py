"""Experiments behind the claims of the prefill_breakdown article about its probe, B03 to B10, in the order of the
notebook: three arithmetics on one mapping, R rows of weights a wave and M rows of activations.

`times` measures once; what it found is judged again by `issue` (B04), `wave_rows` (B10) and `bandwidth` (B08). On the
simulator it has no times, and they say what errors and machine code can. The article's table is its probe at M = 16,
each variant with one R, on weights that stay in the L2 of its GPU: "warm" here. Cold, each call reads another copy of
the weights.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import combinations

import numpy as np

from kernelbook import backends, counters, formats, measure, shapes, smollm2, stats, toolchain
from kernelbook.buckets import article
from kernelbook.experiments import Finding, Lab, not_timed, omitted
from kernelbook.ops import q4_probe as op

KERNEL = "q4_probe"
VARIANTS = {name: file.removeprefix("q4_probe/").removesuffix(".cu") for name, file in op.FILES.items()}
"""What records call the variants."""
BOUND = 1e-6
"""Relative Frobenius against float64 on the activations as a kernel gets them."""
SHAPES = {name: (n, k) for name, (n, k, _) in article.tables().weights_mb.items()}
"""The article's projections: N and K."""
M = 16
ARTICLE_FORMS = (("baseline", 2), ("explicit_fma", 4), ("int8_dot", 4))
"""The variant and R of each column of the article's table."""
TARGETS = ("sm_90a", "sm_120")
"""Whose machine code is counted besides that of the device: Hopper's, and that of the article's RTX 5090."""
SAMPLE = 32
"""Rows of tiles at either end of the weights that outputs are compared on, where weights are large."""
ISSUE_BOUND = 0.8
"""Share of the issue slots from which on issue sets the time."""
SCHEDULERS = 4
"""Of a multiprocessor; each issues one instruction of a warp a clock."""


# ---------------------------------------------------------------- inputs

def check_parameters(*, projections: Sequence[str], wave_rows: Sequence[int], batches: Sequence[int],
                     layers: Sequence[int], columns: int) -> None:
    """Raise ValueError, naming the first value that no experiment can use and what was expected, before any runs."""
    depth = shapes.SMOLLM2_135M.layers
    _check_known("projections", projections, tuple(SHAPES))
    _check_known("wave_rows", wave_rows, op.WAVE_ROWS)
    _check_known("batches", batches, op.BATCHES)
    _check_known("layers", layers, range(depth), f"layers from 0 to {depth - 1}")
    if columns < formats.TILE_ROWS or columns % formats.TILE_ROWS:
        raise ValueError(f"columns: {columns}; expected a multiple of {formats.TILE_ROWS}, the rows of a tile")


def _check_known(name, values, known, expected=None) -> None:
    expected = expected or f"some of {', '.join(map(str, known))}"
    if not len(values):
        raise ValueError(f"{name} is empty; expected {expected}")
    for value in values:
        if value not in known:
            raise ValueError(f"{name}: {value!r}; expected {expected}")


@dataclass(frozen=True, eq=False)
class Inputs:
    """A product for error figures. name: for tables and records. x: float32 [16, K]."""

    name: str
    tiles: formats.Tiles
    x: np.ndarray

    @cached_property
    def reference(self) -> np.ndarray:
        """float64 on the same tiles and the float activations."""
        return op.reference(self.x, self.tiles)

    @cached_property
    def quantized(self) -> tuple[np.ndarray, np.ndarray]:
        """Codes and scales of x."""
        return formats.quantize_activations(self.x)

    @property
    def case(self) -> dict:
        return {"inputs": self.name, "M": len(self.x), "N": self.tiles.n, "K": self.tiles.k}


def random_inputs(lab: Lab, projections: Iterable[str] = tuple(SHAPES), columns: int = 512) -> list[Inputs]:
    """Random tiles and normal activations in the article's shapes; of N the first `columns` at most."""
    return [Inputs(f"random, {name}", formats.random_tiles(lab.rng(30, n, k), min(n, columns), k), _normal(lab, M, k))
            for name, (n, k) in ((name, SHAPES[name]) for name in projections)]


def real_inputs(model: smollm2.Model, layers: Sequence[int], columns: int = 512) -> list[Inputs]:
    """SmolLM2's weights in `layers`, rounded to tiles, and its activations on the last 16 of 64 tokens of prose; of
    each N the first `columns` at most. One a layer and shape of K: what reads the norm, and what reads the FFN."""
    tokens = model.tokenize(smollm2.prose())[:64]
    found = []
    for name, x in model.activations(tokens, layers).items():
        if name.endswith(("attn_q.weight", "ffn_down.weight")):
            weight = model.weights[name].numpy()[:columns]
            found.append(Inputs(f"SmolLM2, {name.removesuffix('.weight')}", formats.quantize_tiles(weight), x[-M:]))
    return found


def _normal(lab: Lab, m: int, k: int) -> np.ndarray:
    return lab.rng(31, m, k).standard_normal((m, k), np.float32)


def _multiply(lab: Lab, inputs: Inputs, variant: str, wave_rows: int, finite: bool = True) -> np.ndarray:
    probe = op.Q4Probe(lab.backend, inputs.tiles, variant, wave_rows, finite=finite)
    return lab.backend.numpy(probe(_on_device(lab, variant, inputs.x)))


def _on_device(lab, variant, x):
    if variant == "int8_dot":
        return tuple(map(lab.backend.array, formats.quantize_activations(x)))
    return lab.backend.array(x)


# ---------------------------------------------------------------- a MAC in machine code (B09)

def machine_code(lab: Lab, targets: Sequence[str] = TARGETS, wave_rows: Sequence[int] = op.WAVE_ROWS) -> list[dict]:
    """What the compiler makes of every variant at M = 16, for the device's own target first and then for `targets`.

    Rows of {target, variant, R, registers, spill bytes, instructions a MAC} and the counts a MAC of the instructions
    that matter; empty where this machine cannot compile for NVIDIA.
    """
    own = [f"sm_{lab.backend.arch}"] if lab.timed else []
    known = toolchain.targets()
    names = [name for name in dict.fromkeys([*own, *targets]) if known.get(name) is None]
    rows = []
    for source in op.sources(wave_rows, (M,)) if names else ():
        for found in toolchain.evidence(source, names):
            variant = found["kernel"].removeprefix("q4_")
            case = {"target": found["target"], "R": source.defines["WAVE_ROWS"], "M": M}
            each = {name: count / found["macs"] for name, count in found["opcodes"].items()}
            row = {"target": found["target"], "variant": variant, "R": case["R"], "registers": found["registers"],
                   "spill bytes": found["spill_bytes"], "instructions a MAC": found["instructions_per_mac"]}
            for metric in ("registers", "spill_bytes", "instructions_per_mac"):
                lab.record.measure(kernel=KERNEL, variant=VARIANTS[variant], case=case, metric=metric,
                                   value=found[metric], unit="1")
            rows.append(row | {name: each.get(name, 0.0) for name in ("FMUL", "FADD", "FFMA", "IDP.4A", "I2FP")})
    return rows


def no_compiler(claim: str, rows: list[dict]) -> Finding:
    """The finding on a static claim where no machine code could be made."""
    return Finding(claim, "not testable here", "No machine code could be made.", data=rows,
                   missing=f"a compiler for NVIDIA targets: {toolchain.targets()['sm_90a']}")


def contraction(lab: Lab, code: list[dict]) -> Finding:
    """Multiplications, additions and fused ones a MAC, without contraction and with fmaf; the finding on B09.

    code: of `machine_code`, which the data are, without the dp4a variant.
    """
    rows = [row for row in code if row["variant"] != "int8_dot"]
    if not rows:
        return no_compiler("B09", rows)

    def as_claimed(row):
        unpacking = 1 / M  # a weight is multiplied by its scale once for all rows of activations
        if row["variant"] == "baseline":
            return abs(row["FMUL"] - 1 - unpacking) < 0.01 and abs(row["FADD"] - 1) < 0.01 and row["FFMA"] == 0
        return abs(row["FFMA"] - 1) < 0.01 and abs(row["FMUL"] - unpacking) < 0.01 and row["FADD"] <= 0.25

    good = [as_claimed(row) for row in rows]
    without, fused = (max((row for row in rows if row["target"] == rows[0]["target"] and row["variant"] == variant),
                          key=lambda row: row["R"]) for variant in ("baseline", "explicit_fma"))
    return Finding(
        "B09", "reproduced" if all(good) else "direction holds" if sum(good) > len(good) / 2 else "contradicted",
        f"Counted in the hot loop on {', '.join(dict.fromkeys(row['target'] for row in rows))} at R = "
        f"{', '.join(map(str, dict.fromkeys(row['R'] for row in rows)))}: {sum(good)} of {len(good)} kernels are as "
        f"the article has them. Without contraction {without['FMUL']:.3f} FMUL, {without['FADD']:.3f} FADD and "
        f"{without['FFMA']:g} FFMA a MAC, with fmaf {fused['FFMA']:.3f} FFMA, {fused['FADD']:.3f} FADD and "
        f"{fused['FMUL']:.3f} FMUL. Of FMUL 1/16 is the weight's product with its scale, once for 16 rows of "
        "activations; of FADD a quarter adds up runs of four.",
        f"FMUL + FADD against one FFMA, {without['instructions a MAC']:.2f} against {fused['instructions a MAC']:.2f} "
        "instructions a MAC in all", data=rows)


# ---------------------------------------------------------------- the article's table (B03)

class _Problem:
    """One projection's weights on the device, in enough copies to be measured cold, and activations of some M."""

    def __init__(self, lab: Lab, projection: str, columns: int | None = None):
        self.lab, self.projection = lab, projection
        n, self.k = SHAPES[projection]
        self.n = min(n, columns or n)
        self.tiles = formats.random_tiles(lab.rng(30, self.n, self.k), self.n, self.k)
        first = op.Q4Probe(lab.backend, self.tiles)
        copies = measure.rotation(self.tiles.nbytes, lab.backend.l2_bytes) if lab.timed else 1
        self.probes = [first] + [first.clone() for _ in range(copies - 1)]
        ends = np.unique(np.r_[:min(SAMPLE, self.n // 4), max(0, self.n // 4 - SAMPLE):self.n // 4])
        self.sample = formats.Tiles(np.ascontiguousarray(self.tiles.data[ends]))
        self.columns = (ends[:, None] * 4 + np.arange(4)).ravel()

    def case(self, wave_rows: int, m: int) -> dict:
        return {"projection": self.projection, "N": self.n, "K": self.k, "M": m, "R": wave_rows}


class _Activations:
    """Rows of activations on the device for every variant, an output, and float64's products on the sample."""

    def __init__(self, problem: _Problem, m: int):
        lab = problem.lab
        self.problem, self.m = problem, m
        x = _normal(lab, m, problem.k)
        self.given = {variant: _on_device(lab, variant, x) for variant in op.FILES}
        self.out = lab.backend.empty((m, problem.n), np.float32)
        exact = op.reference(x, problem.sample)
        self.expected = {variant: op.reference_int8(*formats.quantize_activations(x), problem.sample)
                         if variant == "int8_dot" else exact for variant in op.FILES}

    def calls(self, variant: str, wave_rows: int) -> list:
        """One for each copy of the weights."""
        return [probe.using(variant, wave_rows).prepare(self.given[variant], out=self.out)
                for probe in self.problem.probes]

    def error(self, variant: str, wave_rows: int, call) -> float:
        """Relative Frobenius of what a call gives, infinite where a value is not finite; recorded."""
        self.out.fill(np.nan)
        call()
        out = self.problem.lab.backend.numpy(self.out)
        found = out[:, self.problem.columns]
        elsewhere = int(np.count_nonzero(~np.isfinite(out)) - np.count_nonzero(~np.isfinite(found)))
        case = self.problem.case(wave_rows, self.m) | {"columns compared": found.shape[1]}
        return self.problem.lab.errors(KERNEL, VARIANTS[variant], case, found, self.expected[variant], BOUND,
                                       elsewhere).relative_frobenius

    def weights_rate(self, us: float) -> float:
        """GB/s at which the weights alone were read."""
        return self.problem.tiles.nbytes / 1e3 / us


def times(lab: Lab, projections: Sequence[str] = tuple(SHAPES), wave_rows: Sequence[int] = op.WAVE_ROWS,
          batches: Sequence[int] = op.BATCHES, columns: int = 64, budget_s: float = 0.5) -> Finding:
    """Every variant, R and M on the article's shapes, warm and cold; the finding on B03, which is judged by which
    variant is the faster at M = 16 with the article's R, warm as there.

    projections: some of SHAPES. wave_rows, batches: R and M; the article's own are measured in any case.
    budget_s: seconds of measuring a projection and M, see measure.device_times.
    Data: rows of {projection, N, K, MiB, variant, R, M, cache, us, p10, p90, "weights GB/s", "of read", TFLOP/s,
    "article us"}. Without a GPU, of the article's forms on the first `columns` columns: rows of {projection, N, K,
    variant, R, M, error, "article us"}.
    Raises ValueError for values that there are not.
    """
    _check_known("projections", projections, tuple(SHAPES))
    _check_known("wave_rows", wave_rows, op.WAVE_ROWS)
    _check_known("batches", batches, op.BATCHES)
    if not lab.timed:
        rows = [row for name in projections for row in _errors_of_article_forms(_Problem(lab, name, columns))]
        worst = max(row["error"] for row in rows)
        return not_timed("B03", f"The three kernels of the article's table on {columns} columns of {len(projections)} "
                         f"of its shapes at M = {M}, against float64: relative Frobenius at most {worst:.1e}, "
                         f"{'all' if worst <= BOUND else 'NOT all'} within {BOUND:g}. Which is the faster needs a "
                         "clock.", rows, f"errors up to {worst:.1e}")
    forms = {m: [(variant, r) for variant in op.FILES for r in wave_rows] for m in batches}
    forms[M] = list(dict.fromkeys([*forms.get(M, ()), *ARTICLE_FORMS]))
    lab.compile_ahead([backends.Source(*op.source(*form, m)) for m, of_m in forms.items() for form in of_m])
    rows, left_out = [], []
    for name in projections:
        problem = _Problem(lab, name)
        for m, of_m in forms.items():
            found, wrong = _time_forms(_Activations(problem, m), of_m, budget_s)
            rows += found
            left_out += wrong
    return _judge_order(lab, rows, left_out)


def _errors_of_article_forms(problem: _Problem) -> list[dict]:
    given = _Activations(problem, M)
    return [{"projection": problem.projection, "N": problem.n, "K": problem.k, "variant": variant, "R": r, "M": M,
             "error": given.error(variant, r, given.calls(variant, r)[0]),
             "article us": _article_us(problem.projection, variant, r, M)} for variant, r in ARTICLE_FORMS]


def _article_us(projection, variant, wave_rows, m) -> float | None:
    """The article's time in microseconds, of its own forms."""
    if m != M or (variant, wave_rows) not in ARTICLE_FORMS:
        return None
    return 1e3 * article.tables().probe_ms[projection][ARTICLE_FORMS.index((variant, wave_rows))]


def _time_forms(given: _Activations, forms: Iterable[tuple[str, int]], budget_s: float) -> tuple[list[dict], list[str]]:
    """Rows of times, and the forms that are wrong, which have none."""
    lab, problem, m = given.problem.lab, given.problem, given.m
    contenders, wrong = {}, []
    for variant, r in forms:
        calls = given.calls(variant, r)
        if given.error(variant, r, calls[0]) <= BOUND:
            contenders |= {(variant, r, "cold"): calls, (variant, r, "warm"): calls[:1]}
        else:
            wrong.append(f"{variant} with R = {r} on {problem.projection} at M = {m}")
    rows, read = [], lab.ceilings.get("read")
    for (variant, r, cache), t in (measure.device_times(contenders, sample_us=1000, budget_s=budget_s).items()
                                   if contenders else ()):
        flop = 2 * m * problem.n * problem.k
        activations = m * problem.k * (1 if variant == "int8_dot" else 4)
        lab.time(KERNEL, VARIANTS[variant], problem.case(r, m), t, cache,
                 nbytes=problem.tiles.nbytes + activations + given.out.nbytes, flop=flop)
        rate = given.weights_rate(t.median)
        rows.append({"projection": problem.projection, "N": problem.n, "K": problem.k,
                     "MiB": problem.tiles.nbytes / 2**20, "variant": variant, "R": r, "M": m, "cache": cache,
                     "us": t.median, "p10": t.p10, "p90": t.p90, "weights GB/s": rate,
                     "of read": rate / read.value if read and cache == "cold" else None,
                     "TFLOP/s": flop / 1e6 / t.median,
                     "article us": _article_us(problem.projection, variant, r, m)})
    return rows, wrong


def _at(rows: list[dict], cache: str, m: int = M) -> dict[str, dict[tuple[str, int], dict]]:
    """Rows of one M and state of the cache: projection to (variant, R) to row."""
    found: dict[str, dict[tuple[str, int], dict]] = {}
    for row in rows:
        if row["M"] == m and row.get("cache") == cache:
            found.setdefault(row["projection"], {})[row["variant"], row["R"]] = row
    return found


def _complete(rows: list[dict], cache: str, forms: Iterable[tuple[str, int]], m: int = M) -> dict[str, dict]:
    """As `_at`, but only projections on which every one of `forms` was timed."""
    forms = set(forms)
    return {name: found for name, found in _at(rows, cache, m).items() if forms <= found.keys()}


def _slower(a: dict, b: dict) -> int:
    """1 where a took longer than b, -1 where b did, 0 where the two overlap between 10th and 90th percentile."""
    return (a["p10"] > b["p90"]) - (a["p90"] < b["p10"])


def _none_timed(claim: str, rows: list[dict], left_out: Sequence[str] = ()) -> Finding:
    return Finding(claim, "not reproduced", "Not one shape has right results in all the forms that this compares, so "
                   f"no time counts.{omitted(left_out)}", data=rows)


def _judge_order(lab, rows, left_out) -> Finding:
    warm, cold = (_complete(rows, cache, ARTICLE_FORMS) for cache in ("warm", "cold"))
    if not warm:
        return _none_timed("B03", rows, left_out)
    signs = {cache: [(np.sign(found[a]["article us"] - found[b]["article us"]), _slower(found[a], found[b]))
                     for found in shapes.values() for a, b in combinations(ARTICLE_FORMS, 2)]
             for cache, shapes in (("warm", warm), ("cold", cold))}
    same = {cache: sum(theirs == ours for theirs, ours in pairs) for cache, pairs in signs.items()}
    reverse = sum(theirs == -ours for theirs, ours in signs["warm"])
    total = len(signs["warm"])
    fastest = {name: [min(ARTICLE_FORMS, key=lambda form, found=found, key=key: found[form][key])[0]
                      for key in ("article us", "us")] for name, found in warm.items()}
    if same["warm"] == total:
        verdict = "direction holds" if left_out else "reproduced"
    else:
        verdict = ("contradicted" if reverse == total else "direction holds" if same["warm"] > total / 2 else
                   "not reproduced")
    words = "; ".join(f"{name} " + "/".join(f"{found[form]['us']:.1f}" for form in ARTICLE_FORMS)
                      for name, found in warm.items())
    best = ", ".join(f"{name} {theirs} and {ours}" for name, (theirs, ours) in fastest.items())
    l2 = lab.backend.l2_bytes / 2**20
    large = [name for name, found in warm.items() if found["baseline", 2]["MiB"] > l2]
    too_large = f" Even warm, {', '.join(large)} do not fit into this device's {l2:.0f} MiB of L2." if large else ""
    return Finding(
        "B03", verdict,
        f"At M = {M}, warm, baseline R=2 / explicit FMA R=4 / dp4a R=4 in us: {words}. Of the {total} comparisons in "
        f"the article's table {same['warm']} come out the same way here, {reverse} the other way, the others within "
        f"the noise; cold {same['cold']} the same way. Fastest there and here: {best}.{too_large}{omitted(left_out)}",
        f"{same['warm']} of {total} comparisons as in the article", data=rows)


def in_articles_form(rows: list[dict], cache: str = "warm") -> list[dict]:
    """The article's table with this machine's figures beside: a row a projection, times in ms at M = 16."""
    names = {("baseline", 2): "baseline R=2", ("explicit_fma", 4): "explicit FMA R=4", ("int8_dot", 4): "dp4a R=4"}
    table = []
    for name, found in _complete(rows, cache, ARTICLE_FORMS).items():
        row = {"projection": f"{name} {SHAPES[name][0]} x {SHAPES[name][1]}", "MiB": found["baseline", 2]["MiB"]}
        for whose, key in (("", "us"), (", article", "article us")):
            ms = {form: found[form][key] / 1e3 for form in ARTICLE_FORMS}
            row |= {names[form] + whose: value for form, value in ms.items()}
            row["baseline / best" + whose] = ms["baseline", 2] / min(ms.values())
        table.append(row)
    return table


# ---------------------------------------------------------------- not bound by issue (B04)

COUNTERS = {
    "smsp__issue_active.avg.pct_of_peak_sustained_active": "issue slots used, %",
    "sm__warps_active.avg.pct_of_peak_sustained_active": "occupancy, %",
    "dram__bytes_read.sum": "bytes read from memory",
    "smsp__average_warps_issue_stalled_long_scoreboard_per_issue_active.ratio": "stalled on memory",
    "smsp__average_warps_issue_stalled_lg_throttle_per_issue_active.ratio": "stalled on the load queue",
    "smsp__average_warps_issue_stalled_wait_per_issue_active.ratio": "stalled on a fixed latency",
    "smsp__average_warps_issue_stalled_math_pipe_throttle_per_issue_active.ratio": "stalled on an arithmetic pipe",
    "smsp__average_warps_issue_stalled_not_selected_per_issue_active.ratio": "ready, another was issued",
}
"""Hardware counters by Nsight Compute's names, and what a table calls them; stalls are warps an issued instruction."""


def hardware_counters(lab: Lab, projection: str = "o") -> list[dict] | str:
    """What the hardware counts in each of the article's kernels on a projection at M = 16, a row each, by
    Nsight Compute in a process of its own; or, in words, why nothing could be read."""
    if not lab.timed:
        return "no GPU"
    code = f"from kernelbook.experiments import prefill_probe as p; p.launch_each({lab.seed}, {projection!r})"
    try:
        found = counters.read(code, list(COUNTERS))
    except backends.BackendUnavailable as unavailable:
        return str(unavailable)
    rows = []
    for variant, r in ARTICLE_FORMS:
        values = found[f"q4_{variant}"]
        for metric, words in COUNTERS.items():
            lab.record.measure(kernel=KERNEL, variant=VARIANTS[variant], value=values[metric], unit="1",
                               case={"projection": projection, "M": M, "R": r, "counter": metric}, metric=words)
        rows.append({"projection": projection, "variant": variant, "R": r}
                    | {words: values[metric] for metric, words in COUNTERS.items()})
    return rows


def launch_each(seed: int, projection: str) -> None:
    """Launch the article's three kernels once on a projection: what a profiler looks at."""
    backend, rng, (n, k) = backends.get("cuda"), np.random.default_rng(seed), SHAPES[projection]
    probe = op.Q4Probe(backend, formats.random_tiles(rng, n, k))
    x = rng.standard_normal((M, k), np.float32)
    for variant, r in ARTICLE_FORMS:
        given = formats.quantize_activations(x) if variant == "int8_dot" else (x,)
        device = tuple(map(backend.array, given))
        probe.using(variant, r)(device if variant == "int8_dot" else device[0])
    backend.synchronize()


def issue(lab: Lab, rows: list[dict], code: list[dict], counted: list[dict] | str) -> Finding:
    """Instructions a MAC beside the times of dp4a and explicit FMA; the finding on B04.

    A kernel that issue binds takes time in proportion to its instructions. Were FMA's so bound, dp4a's, with fewer,
    would be the faster by as much. rows: of `times`. code: of `machine_code`. counted: of `hardware_counters`.
    Data: rows of {projection, variant, R, "instructions a MAC", us, "slots needed"}: the least share of the issue
    slots of this device, at its highest clock, that the instructions of the loop take in that time. Without times the
    rows of `code` for the article's forms.
    """
    code = [row for row in code if (row["variant"], row["R"]) in ARTICLE_FORMS]
    if not code:
        return no_compiler("B04", code)
    target = code[0]["target"]
    each = {row["variant"]: row["instructions a MAC"] for row in code if row["target"] == target}
    words = (f"Instructions a MAC on {target}: " + ", ".join(f"{name} {value:.2f}" for name, value in each.items())
             + f", so dp4a has {each['int8_dot'] / each['baseline']:.2f} of the baseline's and "
             f"{each['int8_dot'] / each['explicit_fma']:.2f} of explicit FMA's.")
    if not lab.timed:
        return not_timed("B04", f"{words} Whether it is slower all the same needs a clock.", code,
                         f"{each['baseline'] / each['int8_dot']:.1f} times fewer instructions")
    fma, dot = ("explicit_fma", 4), ("int8_dot", 4)
    cases = _complete(rows, "warm", ARTICLE_FORMS)
    if not cases:
        return _none_timed("B04", code)
    cut = each["explicit_fma"] / each["int8_dot"]
    gains = {name: found[fma]["us"] / found[dot]["us"] for name, found in cases.items()}
    slower = [name for name, found in cases.items() if _slower(found[dot], found[fma]) > 0]
    in_proportion = [name for name, gain in gains.items() if gain > (1 + cut) / 2]
    slots = _slots_per_us(lab)

    def macs(projection):
        n, k = SHAPES[projection]
        return M * n * k

    table = [{"projection": name, "variant": variant, "R": r, "instructions a MAC": each[variant],
              "us": found[variant, r]["us"],
              "slots needed": each[variant] * macs(name) / 32 / slots / found[variant, r]["us"] if slots else None}
             for name, found in cases.items() for variant, r in ARTICLE_FORMS]
    needed = [row["slots needed"] for row in table if row["variant"] == "explicit_fma" and slots]
    bound = [share for share in needed if share >= ISSUE_BOUND]
    if len(cases) in (len(in_proportion), len(bound)):
        verdict = "contradicted"
    elif in_proportion or len(bound) > len(cases) / 2:
        verdict = "not reproduced"
    else:
        verdict = "reproduced" if len(slower) == len(cases) and not bound else "direction holds"
    shares = (f" Explicit FMA's instructions alone take {min(needed):.0%} to {max(needed):.0%} of the issue slots at "
              "the highest clock." if needed else "")
    counters_say = (f" Counters were not read ({counted})." if isinstance(counted, str) else " Counters: " + "; ".join(
        f"{row['variant']} uses {row['issue slots used, %']:.0f}% of the issue slots at {row['occupancy, %']:.0f}% "
        f"occupancy" for row in counted) + ".")
    return Finding(
        "B04", verdict,
        f"{words} Warm at M = {M}, explicit FMA's time over dp4a's: "
        + ", ".join(f"{name} {gain:.2f}" for name, gain in gains.items())
        + f"; in proportion to instructions it would be {cut:.2f}. dp4a is the slower on {len(slower)} of {len(cases)} "
        f"shapes, and gains more than half of what it has fewer instructions on {len(in_proportion)}."
        f"{shares}{counters_say}",
        f"{cut:.2f} times fewer instructions, {min(gains.values()):.2f}x to {max(gains.values()):.2f}x the speed",
        data=table)


def _slots_per_us(lab: Lab) -> float | None:
    """Instructions of a warp that the device can issue in a microsecond at its highest clock."""
    clocks = lab.record.environment["clocks"]["before"]
    mhz = clocks and clocks.get("sm_max_mhz")
    return lab.backend.multiprocessors * SCHEDULERS * mhz if mhz else None


# ---------------------------------------------------------------- rows of a wave and fmaf (B10)

ARTICLE_SLOWER = (1.7, 2.0)
"""How much slower R = 4 is than R = 2 without fmaf (section 2)."""


def wave_rows(lab: Lab, rows: list[dict], code: list[dict]) -> Finding:
    """R = 1, 2, 4 without and with fmaf at M = 16, warm; the finding on B10. rows: of `times`. code: of `machine_code`.

    Data: rows of {projection, variant, R, us, p10, p90, "of R = 2", registers, "spill bytes"}, the last two of the
    device's own target. Without a GPU the rows of `code` without dp4a.
    """
    code = [row for row in code if row["variant"] != "int8_dot"]
    target = code[0]["target"] if code else None
    registers = {(row["variant"], row["R"]): row for row in code if row["target"] == target}
    spills = max((row["spill bytes"] for row in code), default=0)
    words = (f"Registers at M = {M} on {target} for R = 1, 2, 4: " + "; ".join(
        f"{variant} " + ", ".join(str(row["registers"]) for (v, _), row in sorted(registers.items()) if v == variant)
        for variant in ("baseline", "explicit_fma")) + f"; {spills or 'no'} bytes are spilled on any target."
        if code else "No machine code could be made.")
    if not lab.timed:
        return not_timed("B10", f"{words} Which R is the faster needs a clock.", code)
    forms = [(variant, r) for variant in ("baseline", "explicit_fma") for r in op.WAVE_ROWS]
    cases = _complete(rows, "warm", forms)
    if not cases:
        return _none_timed("B10", code)
    ratio = {name: found["baseline", 4]["us"] / found["baseline", 2]["us"] for name, found in cases.items()}
    slower = {name: _slower(found["baseline", 4], found["baseline", 2]) for name, found in cases.items()}
    fastest = {name: all(_slower(found[form], found["explicit_fma", 4]) > 0 for form in forms
                         if form != ("explicit_fma", 4)) for name, found in cases.items()}
    holds = [name for name in cases if slower[name] > 0 and fastest[name]]
    low, high = ARTICLE_SLOWER
    close = [name for name in holds if low / 2 <= ratio[name] <= 2 * high]
    if len(close) == len(cases) and not spills:
        verdict = "reproduced"
    elif len(holds) > len(cases) / 2 and not spills:
        verdict = "direction holds"
    else:
        verdict = "contradicted" if all(s < 0 for s in slower.values()) and not any(fastest.values()) else (
            "not reproduced")
    table = [{"projection": name, "variant": variant, "R": r,
              **{key: found[variant, r][key] for key in ("us", "p10", "p90")},
              "of R = 2": found[variant, r]["us"] / found[variant, 2]["us"],
              **{key: registers[variant, r][key] if registers else None for key in ("registers", "spill bytes")}}
             for name, found in cases.items() for variant, r in forms]
    return Finding(
        "B10", verdict,
        f"Warm at M = {M}. Without fmaf R = 4 takes " + ", ".join(f"{value:.2f}" for value in ratio.values())
        + f" of the time of R = 2 on {', '.join(ratio)}, slower beyond the noise on "
        f"{sum(s > 0 for s in slower.values())} of {len(cases)}; with fmaf R = 4 is the fastest of all six on "
        f"{sum(fastest.values())}. {words}",
        f"{min(ratio.values()):.2f}x to {max(ratio.values()):.2f}x without fmaf, the fastest with it on "
        f"{sum(fastest.values())} of {len(cases)}", data=table)


# ---------------------------------------------------------------- weight bandwidth (B08)

def bandwidth(lab: Lab, rows: list[dict]) -> Finding:
    """Bytes of weights over cold time as a share of this machine's read ceiling; the finding on B08, on the median of
    the shapes at M = 16 for the baseline and for explicit FMA. rows: of `times`.

    Data: rows of {projection, variant, R, M, us, "weights GB/s", "of read", "article GB/s", "article of peak"}, at
    M = 1 and 16 where they were measured; without a GPU only the article's figures, from its own sizes and times.
    """
    tables = article.tables()
    printed = dict(zip(ARTICLE_FORMS, zip(*(tables.probe_bandwidth[key] for key in ("gbs", "percent")), strict=True),
                       strict=False))
    peak = float(np.mean([100 * gbs / percent for gbs, percent in printed.values()]))
    theirs = {(name, form): tables.weights_mb[name][2] * 2**20 / 1e6 / tables.probe_ms[name][i]
              for name in SHAPES for i, form in enumerate(ARTICLE_FORMS)}
    gate_up = [theirs["gate_up", form] for form in printed]
    mixed = tables.weights_mb["gate_up"][2] / tables.probe_ms["gate_up"][1]
    all_shapes = [theirs[name, form] for name in SHAPES for form in printed]
    words = (f"The article's sizes are MiB. Its {printed['baseline', 2][0]:g} GB/s is gate_up's {gate_up[0]:.0f}; its "
             f"{printed['explicit_fma', 4][0]:g} takes the MiB for MB ({mixed:.0f}) and should be {gate_up[1]:.0f}. "
             f"Over all its shapes these two forms come to {min(all_shapes):.0f} to {max(all_shapes):.0f} GB/s. Its "
             "weights lie in the L2 of its GPU, so the share of a memory's peak is a comparison of sizes, not of "
             "traffic.")
    if not lab.timed:
        table = [{"projection": name, "variant": variant, "R": r, "M": M, "article GB/s": rate,
                  "article of peak": rate / peak} for (name, (variant, r)), rate in theirs.items()]
        return not_timed("B08", f"{words} The bandwidth here needs a clock.", table,
                         f"article, re-added: {gate_up[0]:.0f} and {gate_up[1]:.0f} GB/s")
    if "read" not in lab.ceilings:
        raise ValueError("this machine's read ceiling has not been measured; call lab.measure_ceilings() first")
    table = [{key: row[key] for key in ("projection", "variant", "R", "M", "us", "weights GB/s", "of read")}
             | ({"article GB/s": theirs[row["projection"], (row["variant"], row["R"])],
                 "article of peak": theirs[row["projection"], (row["variant"], row["R"])] / peak} if row["M"] == M
                else {"article GB/s": None, "article of peak": None})
             for row in rows if row["cache"] == "cold" and row["M"] in (1, M)
             and (row["variant"], row["R"]) in ARTICLE_FORMS]
    cases = _complete(rows, "cold", printed)
    if not cases:
        return _none_timed("B08", table)
    shares = {form: [found[form]["of read"] for found in cases.values()] for form in printed}
    middle = {form: float(np.median(of)) for form, of in shares.items()}
    of_article = {form: percent / 100 for form, (_, percent) in printed.items()}
    if all(of_article[form] / 2 <= middle[form] <= 2 * of_article[form] for form in printed):
        verdict = "reproduced"
    elif max(middle.values()) < 0.5:
        verdict = "direction holds"
    else:
        verdict = "contradicted" if min(middle.values()) >= 0.5 else "not reproduced"
    figures = "; ".join(f"{form[0]} {middle[form]:.1%} in the median of {len(cases)} shapes ({min(of):.1%} to "
                        f"{max(of):.1%})" for form, of in shares.items())
    ones = [row["of read"] for row in table if row["M"] == 1]
    alone = f" At M = 1 {min(ones):.1%} to {max(ones):.1%}." if ones else ""
    return Finding(
        "B08", verdict,
        f"Cold at M = {M}, bytes of weights over time, of this machine's read ceiling of "
        f"{lab.ceilings['read'].value:,.0f} GB/s: {figures}; the article has "
        f"{' and '.join(f'{share:.0%}' for share in of_article.values())} of its peak.{alone} {words}",
        " and ".join(f"{share:.1%}" for share in middle.values()) + " of the read ceiling", data=table)


# ---------------------------------------------------------------- random bytes as weights (B07)

ARTICLE_SPOILED = 0.06
"""Share of scales that are NaN or infinite where tiles hold random bytes (section 2)."""


def random_bytes(lab: Lab, projections: Sequence[str] = ("o",), columns: int = 64, seed: int = 1) -> Finding:
    """Tiles filled with random bytes: scales, tiles and rows that this spoils, counted; the finding on B07.

    The first `columns` rows of weights also go through the kernels, to see what a comparison between them makes of it.
    Data: rows of {projection, what, spoiled, of, share, expected}: of a random f16 1/32 are NaN or infinite, of two
    1 - (31/32)^2, of a tile's four 1 - (31/32)^4, of a row's K / 32 nearly all have such a one.
    """
    rows, spoiled_outputs, finite = [], [], True
    for name in projections:
        n, k = SHAPES[name]
        tiles = formats.random_byte_tiles(seed, n, k)
        bad = ~np.isfinite(tiles.scales)
        of_tiles = bad.reshape(n // 4, 4, k // 32)
        counts = {"scales": (bad, 1), "pairs of scales of a tile": (of_tiles.reshape(-1, 2, 2, k // 32).any(axis=2), 2),
                  "tiles": (of_tiles.any(axis=1), 4), "rows of weights": (bad.any(axis=1), k // 32)}
        for what, (spoiled, scales) in counts.items():
            share = float(spoiled.mean())
            rows.append({"projection": name, "what": what, "spoiled": int(spoiled.sum()), "of": spoiled.size,
                         "share": share, "expected": 1 - (31 / 32) ** scales})
            lab.record.measure(kernel="formats", variant="random_byte_tiles", metric="share_not_finite", value=share,
                               case={"projection": name, "N": n, "K": k, "of": what, "seed": seed}, unit="1")
        valid = formats.random_tiles(lab.rng(30, columns, k), columns, k).nonfinite()[0]
        finite &= valid == 0
        part = formats.Tiles(np.ascontiguousarray(tiles.data[:columns // 4]))
        bad_outputs, outputs, largest = _compare_spoiled(lab, Inputs(name, part, _normal(lab, M, k)))
        spoiled_outputs.append((bad_outputs, outputs, largest))
        rows.append({"projection": name, "what": "outputs of a kernel", "spoiled": bad_outputs, "of": outputs,
                     "share": bad_outputs / outputs, "expected": 1 - (31 / 32) ** (k // 32)})
    scales = [row for row in rows if row["what"] == "scales"]
    share = sum(row["spoiled"] for row in scales) / sum(row["of"] for row in scales)
    deviation = (ARTICLE_SPOILED - 1 / 32) / (1 / 32 * 31 / 32 / sum(row["of"] for row in scales)) ** 0.5
    bad_outputs, outputs = (sum(counts) for counts in list(zip(*spoiled_outputs, strict=True))[:2])
    largest = max(largest for _, _, largest in spoiled_outputs)
    spoils = all(spoiled > total / 2 and maximum < 0.01 for spoiled, total, maximum in spoiled_outputs)
    exact = abs(share / ARTICLE_SPOILED - 1) < 0.1
    pair = 1 - (31 / 32) ** 2
    return Finding(
        "B07", "reproduced" if exact and spoils else "direction holds" if spoils else "contradicted",
        f"Of {sum(row['of'] for row in scales):,} scales that the article's generator fills {share:.3%} are NaN or "
        f"infinite; 1 in 32 has all bits of an f16's exponent set. The article's 6% would be {deviation:.0f} standard "
        f"deviations off; {pair:.2%} is the share of pairs of scales with at least one, and {1 - (31 / 32) ** 4:.1%} "
        f"that of tiles. What it does to a comparison: {bad_outputs} of {outputs} outputs are not finite, since a row "
        f"sums over all of its scales, and a maximum taken with `difference > max`, which no NaN passes, reports "
        f"{largest:.2g}. The repaired filling has {'no such scale' if finite else 'such scales TOO'}.",
        f"{share:.2%} of scales, {pair:.2%} of pairs, {1 - (31 / 32) ** 4:.1%} of tiles", data=rows)


def _compare_spoiled(lab: Lab, inputs: Inputs) -> tuple[int, int, float]:
    """Outputs of explicit FMA that are not finite, of how many, and its largest relative difference from the baseline
    as a loop finds it that asks whether each is greater."""
    with np.errstate(invalid="ignore", over="ignore"):
        outs = [_multiply(lab, inputs, variant, r, finite=False) for variant, r in ARTICLE_FORMS[:2]]
        difference = np.abs(outs[1] - outs[0]) / np.abs(outs[0])
    largest = float(np.max(difference, where=difference > 0, initial=0))
    return int(np.count_nonzero(~np.isfinite(outs[1]))), outs[1].size, largest


# ---------------------------------------------------------------- what int8 activations cost (B05)

def errors(lab: Lab, inputs: Sequence[Inputs]) -> Finding:
    """The article's three kernels against float64 on the float activations; the finding on B05.

    Data: rows of {inputs, outputs, variant, R, "relative Frobenius", rms, meanrel, maxrel, "maxrel to baseline"}: the
    first is the article's relative RMS, the RMS of the error over that of the output; meanrel and maxrel are of
    |error| / |reference|, output by output.
    """
    rows, ratios, right = [], {}, True
    for given in inputs:
        base = None
        for variant, r in ARTICLE_FORMS:
            out = _multiply(lab, given, variant, r)
            base = out if base is None else base
            own = op.reference_int8(*given.quantized, given.tiles) if variant == "int8_dot" else given.reference
            case = given.case | {"R": r}
            arithmetic = lab.errors(KERNEL, VARIANTS[variant], case, out, own, BOUND).relative_frobenius
            right &= arithmetic <= BOUND
            total = stats.errors(out, given.reference)
            relative, to_base = _relative(out, given.reference), _relative(out, base)
            row = {"inputs": given.name, "outputs": out.size, "variant": variant, "R": r,
                   "relative Frobenius": total.relative_frobenius, "rms": total.rms, "meanrel": float(relative.mean()),
                   "maxrel": float(relative.max()), "maxrel to baseline": float(to_base.max())}
            for metric in ("meanrel", "maxrel"):
                lab.record.measure(kernel=KERNEL, variant=VARIANTS[variant], case=case, metric=metric,
                                   value=row[metric] if np.isfinite(row[metric]) else None, unit="1")
            if variant == "int8_dot" and not total.nonfinite:
                lab.record.measure(kernel=KERNEL, variant=VARIANTS[variant], case=case, unit="1",
                                   metric="relative_frobenius_to_float_activations", value=total.relative_frobenius)
            rows.append(row)
        fma, dot = rows[-2:]
        ratios[given.name] = dot["relative Frobenius"] / fma["relative Frobenius"]
    orders = np.log10(list(ratios.values()))
    of = {variant: [row for row in rows if row["variant"] == variant] for variant, _ in ARTICLE_FORMS}

    def span(variant, key):
        values = [row[key] for row in of[variant]]
        return f"{min(values):.1e} to {max(values):.1e}"
    if not right:
        verdict = "not reproduced"
    elif all(round(order) in (3, 4) for order in orders):
        verdict = "reproduced"
    else:
        verdict = "direction holds" if min(orders) > 0.5 else "contradicted" if max(orders) <= 0 else "not reproduced"
    return Finding(
        "B05", verdict,
        f"{len(inputs)} products of 16 rows against float64 on the float activations. Relative RMS: explicit FMA "
        f"{span('explicit_fma', 'relative Frobenius')}, dp4a {span('int8_dot', 'relative Frobenius')}, "
        f"{10 ** orders.min():,.0f} to {10 ** orders.max():,.0f} times as much. meanrel of dp4a "
        f"{span('int8_dot', 'meanrel')} (the article: about 3e-2); maxrel {span('explicit_fma', 'maxrel')} and "
        f"{span('int8_dot', 'maxrel')}, which follow from how near the smallest outputs come to 0. Against float64 on "
        f"the quantized activations dp4a's own arithmetic {'is' if right else 'is NOT'} within {BOUND:g}: what it pays "
        "is the rounding of activations.",
        f"{orders.min():.1f} to {orders.max():.1f} orders of magnitude", data=rows)


# ---------------------------------------------------------------- maxrel and cancellation (B06)

PERCENTILES = (0, 0.1, 1, 10, 50, 100)
ARTICLE_REORDERED = 5.9e-2
"""maxrel between two orders of summation (section 2)."""


def _relative(out, reference) -> np.ndarray:
    """|out - reference| / |reference| of every output whose reference is not 0, one after the other."""
    out, reference = (np.asarray(x, np.float64).ravel() for x in (out, reference))
    there = reference != 0
    return np.abs(out[there] - reference[there]) / np.abs(reference[there])


def cancellation(lab: Lab, inputs: Sequence[Inputs]) -> Finding:
    """One kernel on the same numbers in two orders of summation: where relative differences are large; the finding on
    B06. The tiles of K and the activations change places alike, which changes no product and no exact sum.

    Data: rows of {inputs, outputs, comparison, "from %", "to %", maxrel, meanrel}, outputs sorted by the size of their
    reference, of which "from %" to "to %" are taken; comparisons are "another order", to the first one, and "explicit
    FMA" and "dp4a" to float64.
    """
    rows, shown, largest, typical, right = [], [], {}, {}, True
    for given in inputs:
        moved = lab.rng(32, given.tiles.k).permutation(given.tiles.k // formats.BLOCK)
        x = given.x.reshape(len(given.x), -1, formats.BLOCK)[:, moved].reshape(given.x.shape)
        other = Inputs(given.name, formats.Tiles(np.ascontiguousarray(given.tiles.data[:, moved])),
                       np.ascontiguousarray(x))
        first, second = (_multiply(lab, i, "explicit_fma", 4) for i in (given, other))
        for order, out in (("first", first), ("another", second)):
            right &= lab.errors(KERNEL, VARIANTS["explicit_fma"], given.case | {"order": order}, out, given.reference,
                                BOUND).relative_frobenius <= BOUND
        size = np.abs(given.reference[given.reference != 0])
        # over the exact output, as the others are, since the first order is no more right than the second
        apart = np.asarray(second, np.float64) - first + given.reference
        relative = {"another order": _relative(apart, given.reference),
                    "explicit FMA": _relative(first, given.reference),
                    "dp4a": _relative(_multiply(lab, given, "int8_dot", 4), given.reference)}
        edges = np.percentile(size, PERCENTILES)
        for comparison, values in relative.items():
            for i, (low, high) in enumerate(zip(edges[:-1], edges[1:], strict=True)):
                part = values[(size >= low) & ((size < high) | (i == len(PERCENTILES) - 2))]
                if part.size:
                    rows.append({"inputs": given.name, "outputs": size.size, "comparison": comparison,
                                 "from %": PERCENTILES[i], "to %": PERCENTILES[i + 1], "maxrel": float(part.max()),
                                 "meanrel": float(part.mean())})
        reordered = relative["another order"]
        largest[given.name] = float(reordered.max())
        typical[given.name] = stats.errors(apart, given.reference).relative_frobenius
        upper = reordered[size >= np.median(size)].max()
        rank = float((size < size[reordered.argmax()]).mean())
        shown.append(largest[given.name] >= 10 * upper and rank <= 0.05)
        lab.record.measure(kernel=KERNEL, variant=VARIANTS["explicit_fma"], metric="maxrel_of_another_order",
                           value=largest[given.name] if right else None, case=given.case, unit="1")
    names = list(largest)
    top = max(names, key=largest.get)
    if not right:
        verdict = "not reproduced"
    elif all(shown):
        verdict = "reproduced"
    else:
        verdict = ("direction holds" if sum(shown) > len(shown) / 2 else "not reproduced" if any(shown) else
                   "contradicted")
    outputs = next(row["outputs"] for row in rows if row["inputs"] == top)
    return Finding(
        "B06", verdict,
        f"Explicit FMA on {len(inputs)} products, the same numbers summed in two orders, "
        f"{'all' if right else 'NOT all'} within {BOUND:g} of float64. maxrel between the two is "
        f"{min(largest.values()):.1e} to {max(largest.values()):.1e} (the article: {ARTICLE_REORDERED:g}), relative "
        f"Frobenius {min(typical.values()):.1e} to {max(typical.values()):.1e}. On {sum(shown)} of {len(shown)} the "
        "largest is that of an output among the smallest 5% and at least 10 times the largest among the upper half. "
        f"The nearest to 0 of n outputs is about their size / n, so maxrel grows as n: on {outputs:,} outputs of {top} "
        f"it is {largest[top] / typical[top]:,.0f} times relative Frobenius. A threshold on it would measure how many "
        "outputs there are.",
        f"maxrel up to {max(largest.values()):.1e} from order alone, relative Frobenius {max(typical.values()):.1e}",
        data=rows)
