"""Times of the int8_pv kernels and the errors that let them count: claims P08 and P10 to P14, and peers beside ours.

An experiment compares forms of one kernel. Where there is a GPU it times them together, cold (each call reads another
copy of the cache) and warm (each the same), and a case in which a form is not within BOUND of float64 has no times. It
is judged by cold times: a model's layers have a cache each. The forms' errors, on values whose size differs from token
to token, it has everywhere.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from typing import Any

import numpy as np

from kernelbook import kv_cache, measure, stats, validation
from kernelbook.experiments import Finding, Lab, not_timed, omitted, speed_verdict
from kernelbook.kv_cache import PagedCache
from kernelbook.measure import Timing
from kernelbook.ops import int8_pv as op
from kernelbook.ops.int8_pv import Form
from kernelbook.peers import attention as attention_peers

KERNEL = "int8_pv"
BLOCK_SIZE = 16
"""Tokens of a page of our caches."""
PEER_BLOCK_SIZE = 64
"""The same beside peers, whose caches are contiguous."""
BOUND = 0.05
"""Relative Frobenius against float64 attention that a kernel on INT8 queries and weights must stay within: right forms
are at 0.005 to 0.03 on random values, the wrong ones from 0.4."""
PEER_BOUND = {16: 0.02, 8: 0.15}
"""The same for peers by the bits of their cache; 8 are float8, with 3 bits of mantissa, for q, P and V too."""
SETTINGS = ((16, 24, 4, 128), (1, 24, 4, 128), (1, 24, 4, 256), (64, 24, 4, 128), (16, 9, 3, 64), (1, 9, 3, 64))
"""batch, heads, kv_heads, head_dim: heads of Qwen3.5-27B at its 256 and at 128, and of SmolLM2-135M."""
HISTORIES = (1024, 4096, 8192, 16384, 65536, 131072)
ACCURACY = (1, 24, 4, 128, 4096)
"""The setting and the history of the errors."""
MEMORY_GIB = 8.0
"""Of all copies of a case's cache together; a case that takes more is left out."""
BUDGET_S = 1.0
"""Seconds of measuring a case: see measure.device_times."""

ARTICLE_GAIN = {4096: 1.1049, 8192: 1.0979, 16384: 1.2653}
"""BF16 PV / INT8 PV by history (section 5)."""
FULL = 4
"""Blocks of a grid for each multiprocessor from which on they hide one another's latency."""
MEMORY_BOUND = 0.8
"""Share of the read ceiling from which on memory sets the time."""
ONE_BIT = 0.75
"""UINT8's error over INT8's: 0.5 for P V alone, and some for the rounding of the query, which both share."""


# ---------------------------------------------------------------- one call's sizes

@dataclass(frozen=True)
class Shape:
    """Sizes of one attention call. A decode's query is the last token of its history, the queries of a prefill follow
    theirs. block_size: tokens of a page of our cache. Raises ValueError for sizes that no kernel takes."""

    batch: int
    heads: int
    kv_heads: int
    head_dim: int
    history: int
    queries: int = 1
    block_size: int = BLOCK_SIZE

    def __post_init__(self):
        for f in fields(self):
            value = getattr(self, f.name)
            if isinstance(value, bool) or not isinstance(value, int | np.integer) or value < 1:
                raise ValueError(f"{f.name} = {value!r}; expected an integer from 1")
        kv_cache.check_geometry(self.kv_heads, self.head_dim, self.block_size)
        if self.heads % self.kv_heads:
            raise ValueError(f"heads = {self.heads}; expected a multiple of kv_heads = {self.kv_heads}")

    @property
    def length(self) -> int:
        """Tokens of each sequence in the cache."""
        return self.history + (self.queries if self.queries > 1 else 0)

    @property
    def group(self) -> int:
        return self.heads // self.kv_heads

    @property
    def q_shape(self) -> tuple[int, int, int, int]:
        return self.batch, self.queries, self.heads, self.head_dim

    @property
    def case(self) -> dict:
        return {f.name: getattr(self, f.name) for f in fields(self)}

    @property
    def cache_bytes(self) -> int:
        """Codes and scales of K and V."""
        return self.batch * self.length * self.kv_heads * (2 * self.head_dim + 2 * 4)

    @property
    def flop(self) -> int:
        """Multiplications and additions of both products, of tokens that a query sees."""
        before = self.length - self.queries
        seen = self.queries * before + self.queries * (self.queries + 1) // 2
        return 4 * self.batch * self.heads * self.head_dim * seen

    def blocks(self, multiprocessors: int, partition: int = Form().partition) -> float:
        """Blocks of a decode for each multiprocessor."""
        return -(-self.length // partition) * self.kv_heads * self.batch / multiprocessors

    def __str__(self):
        return f"batch {self.batch}, {self.heads}/{self.kv_heads} heads of {self.head_dim}"

    @property
    def label(self) -> str:
        """With the history too."""
        return f"{self}, {_tokens(self.history)}"


def _tokens(n: int) -> str:
    return f"{n // 1024}K" if n % 1024 == 0 else str(n)


def _shapes(settings, histories, **more) -> list[Shape]:
    """Every setting at every history. Raises ValueError where there is none, or one is not four numbers."""
    for name, given in (("settings", settings), ("histories", histories)):
        if not len(given):
            raise ValueError(f"{name} is empty; expected at least one")
    for setting in settings:
        if len(setting) != 4:
            raise ValueError(f"setting {tuple(setting)}; expected batch, heads, kv_heads and head_dim")
    return [Shape(*setting, history, **more) for setting in settings for history in histories]


# ---------------------------------------------------------------- random caches on the device

def _random_words(lab: Lab, count: int, seed: int):
    """uint32 [count] on the device that look random, without a way through the host."""
    words = lab.backend.empty(count, np.uint32)
    fill = lab.backend.compile("ceilings/memory.cu").kernel("fill_words")
    fill((lab.backend.multiprocessors * 4, 1, 1), (512, 1, 1), [words, np.uint64(count), np.uint32(seed)])
    return words


def random_cache(lab: Lab, shape: Shape) -> PagedCache:
    """A cache on the device: uniform codes, scales that differ by a factor of up to 3 and give K and V a variance of
    about 1, pages in a random order. The same for the same seed of the lab and the same shape."""
    block_size = shape.block_size
    blocks = -(-shape.length // block_size)
    pages, rng = shape.batch * blocks, lab.rng(20, *shape.case.values())

    def codes(*rest):
        size = pages * shape.kv_heads * block_size * shape.head_dim
        found = _random_words(lab, size // 4, rng.integers(2**32)).view(np.int8)
        found.clip(-kv_cache.LARGEST_CODE, kv_cache.LARGEST_CODE, out=found)
        return found.reshape(pages, shape.kv_heads, *rest)

    def scales():
        words = _random_words(lab, pages * shape.kv_heads * block_size, rng.integers(2**32))
        uniform = words.astype(np.float32) * np.float32(2.0**-32)
        deviation = np.float32(kv_cache.LARGEST_CODE / 3**0.5)
        return lab.backend.array(((uniform + np.float32(0.5)) / deviation).reshape(pages, shape.kv_heads, block_size))

    tables = rng.permutation(pages).reshape(shape.batch, blocks).astype(np.int32)
    k, v = codes(block_size, shape.head_dim), codes(shape.head_dim, block_size)
    return PagedCache(k, scales(), v, scales(),
                      lab.backend.array(tables), lab.backend.array(np.full(shape.batch, shape.length, np.int32)))


def _floats(cache: PagedCache, shape: Shape):
    """K and V that a cache on the device stands for, each float32 [batch, length, kv_heads, head_dim] there."""
    k = (cache.k_codes * cache.k_scales[..., None])[cache.block_tables].transpose(0, 1, 3, 2, 4)
    v = (cache.v_codes * cache.v_scales[:, :, None])[cache.block_tables].transpose(0, 1, 4, 2, 3)
    return [x.reshape(shape.batch, -1, shape.kv_heads, shape.head_dim)[:, :shape.length] for x in (k, v)]


LONG = 16384
"""Tokens from which on float64 attention is worked out for one sequence and KV head only."""


class _Problem:
    """Queries and caches of one shape on the device, as many copies as a cold measurement goes through, and float64
    attention of a few queries, all heads of a KV head each."""

    def __init__(self, lab: Lab, shape: Shape, experiment: str):
        self.lab, self.shape = lab, shape
        self.case = shape.case | {"experiment": experiment}
        cache = random_cache(lab, shape)
        self.caches = [cache] + [op.on_device(lab.backend, cache) for _ in range(_copies(lab, shape) - 1)]
        self.host_q = lab.rng(21, *shape.case.values()).standard_normal(shape.q_shape, np.float32)
        self.q = lab.backend.array(self.host_q)
        last = shape.batch - 1, shape.queries - 1, shape.kv_heads - 1
        self.places = sorted({last} if shape.length > LONG and shape.queries == 1 else
                             {(0, 0, 0), last, (last[0], shape.queries // 2, 0)})
        self.expected = np.stack([self._reference(*place) for place in self.places])

    def _reference(self, sequence, query, head) -> np.ndarray:
        """float64 [group, head_dim]."""
        cache, backend = self.caches[0], self.lab.backend
        pages = cache.block_tables[sequence]
        parts = [np.ascontiguousarray(backend.numpy(array[pages][:, head:head + 1]))
                 for array in (cache.k_codes, cache.k_scales, cache.v_codes, cache.v_scales)]
        one = PagedCache(*parts, np.arange(len(parts[0]), dtype=np.int32)[None],
                         np.array([self.shape.length], np.int32))
        offset = self.shape.length - self.shape.queries + query
        return op.reference(self._rows(self.host_q, sequence, query, head)[None, None], one, causal_offset=offset)[0, 0]

    def _rows(self, x, sequence, query, head):
        return x[sequence, query, head * self.shape.group:(head + 1) * self.shape.group]

    def check(self, variant: str, case: dict, out: np.ndarray, bound: float) -> bool:
        """Whether an output [batch, queries, heads, head_dim] is finite and within `bound`; records the errors."""
        found = np.stack([self._rows(out, *place) for place in self.places])
        elsewhere = int(np.count_nonzero(~np.isfinite(out)) - np.count_nonzero(~np.isfinite(found)))
        case = case | {"outputs compared": found.size}
        errors = self.lab.errors(KERNEL, variant, case, found, self.expected, bound, elsewhere)
        return errors.relative_frobenius <= bound


@dataclass
class _Bench:
    """What is timed on a problem: one call for each copy of its cache, with everything allocated before.

    out: what our calls write to; None of a peer's. fault: what the form leaves out on purpose; its time is apparent.
    """

    problem: _Problem
    variant: str
    case: dict
    calls: list[Callable]
    nbytes: int
    out: Any = None
    fault: str | None = None

    def check(self) -> bool:
        """Whether our output is right, or wrong on purpose; records the errors."""
        self.out.fill(np.nan)
        self.calls[0]()
        right = self.problem.check(self.variant, self.case, self.problem.lab.backend.numpy(self.out), BOUND)
        return right or self.fault is not None

    def record(self, cache: str, timing: Timing) -> dict:
        """Record a time; returns it as plain data, with the share of the read ceiling that a cold one comes to."""
        lab, shape = self.problem.lab, self.problem.shape
        if self.fault:
            lab.record.measure(kernel=KERNEL, variant=self.variant, case=self.case, metric="apparent_time_us",
                               value=timing.median, p10=timing.p10, p90=timing.p90, n=timing.n, unit="us", cache=cache,
                               status="wrong_result", reason=self.fault)
        else:
            lab.time(KERNEL, self.variant, self.case, timing, cache, nbytes=self.nbytes,
                     flop=shape.flop if shape.queries > 1 else 0)
        row = shape.case | {"variant": self.variant, "cache": cache, "us": timing.median, "p10": timing.p10,
                            "p90": timing.p90}
        read, int8 = (lab.ceilings.get(name) for name in ("read", "int8_matmul"))
        if shape.queries == 1:
            cold = read and cache == "cold" and not self.fault
            return row | {"of read": self.nbytes / 1e3 / timing.median / read.value if cold else None}
        rates = [shape.flop / 1e6 / t for t in (timing.median, timing.p90, timing.p10)]
        if int8:
            share, low, high = (rate / int8.value for rate in rates)
            lab.record.measure(kernel=KERNEL, variant=self.variant, case=self.case, metric="fraction_of_int8_matmul",
                               value=share, p10=low, p90=high, n=timing.n, unit="1", cache=cache)
        return row | {"TFLOP/s": rates[0], "of int8 matmul": rates[0] / int8.value if int8 else None}


def _bench(problem: _Problem, form: Form, bind: Callable | None = None, variant: str | None = None) -> _Bench:
    """Our kernel in a form. bind: (attention, q, out) to what is called; None takes decode's launch."""
    lab, shape = problem.lab, problem.shape
    out = lab.backend.empty(shape.q_shape, np.float32)
    bind = bind or (lambda attention, q, out: attention.decode(q, out=out))
    calls = [bind(op.Attention(lab.backend, cache, form), problem.q, out) for cache in problem.caches]
    nbytes = shape.cache_bytes + 2 * 4 * problem.host_q.size
    fault = f"{form.read} of each 16 bytes of V are read" if form.read < 16 else None
    return _Bench(problem, variant or f"2_decode_{form.pv}", problem.case | _unusual(form), calls, nbytes, out, fault)


def _unusual(form: Form) -> dict:
    """What a form has other than the usual one, but for pv, which names the variant."""
    usual = Form(form.pv)
    return {f.name: getattr(form, f.name) for f in fields(form) if getattr(form, f.name) != getattr(usual, f.name)}


def _race(benches: dict[str, _Bench], budget_s: float) -> list[dict]:
    """Times of benches, all taking turns in one run, recorded: rows as _Bench.record gives them, with {form: the
    bench's name, timing}. What has one call has only a warm time."""
    contenders = {}
    for name, bench in benches.items():
        if len(bench.calls) > 1:
            contenders[name, "cold"] = bench.calls
        contenders[name, "warm"] = bench.calls[:1]
    times = measure.device_times(contenders, budget_s=budget_s)
    return [benches[name].record(cache, timing) | {"form": name, "timing": timing}
            for (name, cache), timing in times.items()]


def _times(lab: Lab, experiment: str, forms: dict[str, Form], shapes: Sequence[Shape], memory_gib: float,
           budget_s: float, more: Callable | None = None) -> tuple[list[dict], list[str]]:
    """Times of decode in several forms on every shape: rows as _race gives them, and the cases left out, since some
    form is wrong there. A case that takes too much memory is recorded as skipped.

    more: problem -> further benches by name, of what forms alone do not say.
    """
    rows, left_out = [], []
    for shape in shapes:
        if _fits(lab, shape, experiment, memory_gib):
            found = _time_case(_Problem(lab, shape, experiment), forms, budget_s, more)
            rows += found
            left_out += [] if found else [shape.label]
    return rows, left_out


def _time_case(problem, forms, budget_s, more) -> list[dict]:
    benches = {name: _bench(problem, form) for name, form in forms.items()}
    benches |= more(problem) if more else {}
    return _race(benches, budget_s) if all([bench.check() for bench in benches.values()]) else []


def _fits(lab, shape, experiment, memory_gib) -> bool:
    needed = shape.cache_bytes * _copies(lab, shape) / 2**30
    if needed > memory_gib:
        lab.no_time(KERNEL, "2_decode_int8", shape.case | {"experiment": experiment}, "skipped",
                    f"copies of the cache take {needed:.1f} GiB, more than the {memory_gib:g} allowed")
    return needed <= memory_gib


def _copies(lab, shape, nbytes=None) -> int:
    """Of a cache that a cold measurement goes through; one for a prefill, which is measured warm: it reads a cache so
    often that the first time is nothing beside it."""
    return 1 if shape.queries > 1 else measure.rotation(nbytes or shape.cache_bytes, lab.backend.l2_bytes)


def _by_case(rows: list[dict], cache: str = "cold") -> dict[Shape, dict[str, dict]]:
    """Rows of one state of the cache: shape to form to row."""
    found: dict[Shape, dict[str, dict]] = {}
    for row in rows:
        if row["cache"] == cache:
            shape = Shape(*(row[f.name] for f in fields(Shape)))
            found.setdefault(shape, {})[row["form"]] = row
    return found


def _relative(cases: dict[Shape, dict[str, dict]], to: str) -> str:
    """Times of every form over those of one, case by case, in words."""
    return "; ".join(f"{shape.label}: " + ", ".join(f"{name} {row['us'] / rows[to]['us']:.2f}"
                                                    for name, row in rows.items() if name != to)
                     for shape, rows in cases.items())


def _none_right(claim: str, evidence: str, rows: list[dict]) -> Finding:
    """The finding on a claim about speed where nothing could be timed."""
    return Finding(claim, "not reproduced", f"{evidence} No case fits in memory and passes its error check, so no time "
                   "counts.", data=rows)


# ---------------------------------------------------------------- errors of forms

def _accuracy(lab: Lab, experiment: str, forms: dict[str, Form], size: Sequence[int]) -> list[dict]:
    """Errors of decode in several forms against float64 attention on the same cache, where every token's V has a size
    of its own: a normal factor 2^N(0, 1).

    Rows {form, error, of P V, max_abs, rms}: `error` (relative Frobenius), max_abs and rms on the real query, `of P V`
    (relative Frobenius) on the query as its codes have it, so that only P V errs. size: Shape's first five numbers.
    """
    shape = Shape(*size)
    rng = lab.rng(22, *size)
    keys, values = (list(rng.standard_normal((shape.batch, shape.history, shape.kv_heads, shape.head_dim), np.float32))
                    for _ in range(2))
    for v in values:
        v *= np.exp2(rng.standard_normal((*v.shape[:2], 1), np.float32))
    blocks = -(-shape.history // shape.block_size)
    cache = kv_cache.quantize(keys, values, shape.block_size,
                              rng.permutation(shape.batch * blocks).reshape(shape.batch, blocks))
    q = rng.standard_normal(shape.q_shape, np.float32)
    codes, scales = kv_cache.quantize_vectors(q)
    exact = op.reference(q, cache)
    own = op.reference(codes * scales[..., None].astype(np.float64), cache)
    device = op.on_device(lab.backend, cache)
    rows = []
    for name, form in forms.items():
        launch = op.Attention(lab.backend, device, form).decode(lab.backend.array(q))
        out = lab.backend.numpy(launch())
        variant, case = f"2_decode_{form.pv}", shape.case | _unusual(form) | {"experiment": f"{experiment}, errors"}
        errors = lab.errors(KERNEL, variant, case, out, exact, BOUND)
        of_pv = stats.errors(out, own).relative_frobenius
        lab.record.measure(kernel=KERNEL, variant=variant, case=case, metric="relative_frobenius_of_pv", unit="1",
                           value=of_pv if np.isfinite(of_pv) else None)
        rows.append({"form": name, "error": errors.relative_frobenius, "of P V": of_pv, "max_abs": errors.max_abs,
                     "rms": errors.rms})
    return rows


def _joined(rows: list[dict], accuracy: list[dict]) -> list[dict]:
    """Plain rows of times, each with the errors of its form; of a form without times its errors alone."""
    of_form = {row["form"]: row for row in accuracy}
    timed = [of_form[row["form"]] | {name: value for name, value in row.items() if name != "timing"} for row in rows]
    return timed + [row for row in accuracy if row["form"] not in {row["form"] for row in rows}]


# ---------------------------------------------------------------- INT8 against BF16 P V (P08)

def prefill_gain(lab: Lab, setting: Sequence[int], histories: Sequence[int] = tuple(ARTICLE_GAIN), queries: int = 512,
                 budget_s: float = BUDGET_S) -> list[dict]:
    """INT8 against BF16 P V in the same prefill kernel (3_prefill.cu): a byte that is read meets many rows, so
    that nothing hides what the product costs. Rows of {sizes, "int8 us", "bf16 us", gain}, warm; none without a GPU.

    setting: batch, heads, kv_heads, head_dim.
    """
    rows = []
    for shape in _shapes([setting], histories, queries=queries) if lab.timed else ():
        problem = _Problem(lab, shape, "prefill gain")

        def bind(attention, q, out, offset=shape.history):
            return attention.prefill(q, out=out, causal_offset=offset, wgmma=False)
        benches = {pv: _bench(problem, Form(pv), bind, f"3_prefill_{pv}") for pv in ("int8", "bf16")}
        if all([bench.check() for bench in benches.values()]):
            int8, bf16 = (row["us"] for row in _race(benches, budget_s))
            rows.append(shape.case | {"int8 us": int8, "bf16 us": bf16, "gain": bf16 / int8})
    return rows


def decode_speed(lab: Lab, settings: Sequence[Sequence[int]] = SETTINGS, histories: Sequence[int] = HISTORIES,
                 accuracy: Sequence[int] = ACCURACY, memory_gib: float = MEMORY_GIB, budget_s: float = BUDGET_S,
                 prefill: Sequence[dict] = ()) -> Finding:
    """INT8 against BF16 P V in the same decode kernel, from short to long histories; the finding on P08.

    settings: batch, heads, kv_heads, head_dim each. accuracy: the same and a history, of the errors. prefill: rows of
    `prefill_gain`, to stand beside.
    Data: rows of {sizes, cache, "int8 us", "bf16 us", gain, its p10 and p90, "int8 of read", "bf16 of read", blocks},
    blocks of the grid for each multiprocessor. The article's figures are put to the first setting that fills the
    multiprocessors at their histories, since a setting that does not cannot show what a product costs. Without a GPU
    the data are the errors: rows of {form, error, of P V, max_abs, rms}.
    """
    shapes = _shapes(settings, histories)
    forms = {"int8": Form("int8"), "bf16": Form("bf16")}
    accuracy_of = _accuracy(lab, "decode speed", forms, accuracy)
    errors = {row["form"]: row["error"] for row in accuracy_of}
    words = (f"Relative Frobenius against float64 at {Shape(*accuracy).label}: INT8 PV {errors['int8']:.4f}, BF16 PV "
             f"{errors['bf16']:.4f}.")
    if not lab.timed:
        return not_timed("P08", f"{words} Both are the same kernel but for what P V multiplies; which is the faster "
                         "needs a clock.", accuracy_of)
    rows, left_out = _times(lab, "decode speed", forms, shapes, memory_gib, budget_s)
    table = [_gain(lab, shape, pair, cache) for cache in ("cold", "warm")
             for shape, pair in _by_case(rows, cache).items()]
    if not table:
        return _none_right("P08", words, table)
    gains = [gain for gain in table if gain["cache"] == "cold"]
    words += f" {_of_settings(gains)}"
    if prefill:
        words += (f" In prefill of {prefill[0]['queries']} queries, {_setting(prefill[0])}, "
                  "where reading hides nothing: "
                  + ", ".join(f"{row['gain']:.2f}x at {_tokens(row['history'])}" for row in prefill) + ".")
    judged: dict[str, dict[int, dict]] = {}
    for gain in gains:
        if gain["history"] in ARTICLE_GAIN:
            judged.setdefault(_setting(gain), {})[gain["history"]] = gain
    if not judged:
        return Finding("P08", "not testable here", words + omitted(left_out), data=table,
                       missing=f"a history of {', '.join(map(str, ARTICLE_GAIN))} among those that were timed")

    def least_blocks(setting):
        return min(gain["blocks"] for gain in judged[setting].values())

    full = [setting for setting in judged if least_blocks(setting) >= FULL]
    setting = full[0] if full else max(judged, key=least_blocks)
    at = judged[setting]
    cases = _by_case(rows)
    verdict = speed_verdict([(pair["bf16"]["timing"], pair["int8"]["timing"]) for shape, pair in cases.items()
                             if str(shape) == setting and shape.history in at], left_out)
    reached = all(gain["gain"] - 1 >= (ARTICLE_GAIN[h] - 1) / 2 for h, gain in at.items())
    grows = at[max(at)]["gain"] > at[min(at)]["gain"]
    if verdict == "reproduced" and not (at.keys() == ARTICLE_GAIN.keys() and reached and grows):
        verdict = "direction holds"
    figures = ", ".join(f"{gain['gain']:.2f}x at {_tokens(h)}" for h, gain in at.items())
    spread = ", ".join(f"{gain['gain']:.3f}x [{gain['gain p10']:.3f}, {gain['gain p90']:.3f}] at {_tokens(h)} "
                       f"(article {ARTICLE_GAIN[h]:.2f}x)" for h, gain in at.items())
    where = (f"Judged at {setting}, the first that has at least {FULL} blocks for each multiprocessor" if full else
             f"No setting has {FULL} blocks for each multiprocessor at these histories; judged at {setting}, which has "
             "most")
    return Finding(
        "P08", verdict,
        f"{words} {where}: {spread}; the gain {'grows' if grows else 'does not grow'} with the history."
        f"{omitted(left_out)}",
        f"{figures} ({setting})", data=table)


def _gain(lab: Lab, shape: Shape, pair: dict[str, dict], cache: str) -> dict:
    int8, bf16 = pair["int8"], pair["bf16"]
    return shape.case | {
        "cache": cache, "int8 us": int8["us"], "bf16 us": bf16["us"], "gain": bf16["us"] / int8["us"],
        "gain p10": bf16["p10"] / int8["p90"], "gain p90": bf16["p90"] / int8["p10"],
        "int8 of read": int8["of read"], "bf16 of read": bf16["of read"],
        "blocks": shape.blocks(lab.backend.multiprocessors)}


def _setting(row: dict) -> str:
    return str(Shape(*(row[f.name] for f in fields(Shape))))


def _of_settings(gains: list[dict]) -> str:
    """The gains of every setting, and what they have to do with blocks and bandwidth, in words."""
    of_setting: dict[str, list[dict]] = {}
    for gain in gains:
        of_setting.setdefault(_setting(gain), []).append(gain)

    def between(found, name, form):
        low, high = (format(pick(g[name] for g in found), form) for pick in (min, max))
        return low if low == high else f"{low} to {high}"

    words = []
    for setting, found in of_setting.items():
        first, last = (_tokens(pick(g["history"] for g in found)) for pick in (min, max))
        read = found[0]["int8 of read"] is not None
        words.append(f"{setting}: {between(found, 'gain', '.2f')} times, {first} to {last}, "
                     f"{between(found, 'blocks', '.1f')} blocks for each multiprocessor"
                     + (f", {between(found, 'int8 of read', '.0%')} of the read ceiling" if read else ""))
    hidden = [g for g in gains if g["gain p10"] <= 1 or g["gain"] < 1.05]
    starved = [g for g in hidden if g["blocks"] < FULL]
    bound = [g for g in hidden if g["blocks"] >= FULL and (g["int8 of read"] or 0) > MEMORY_BOUND]
    return (f"How much faster INT8 PV is than BF16 PV, cold, in the same kernel: {'; '.join(words)}. It is hidden "
            f"(below 1.05 times, or within the noise) in {len(hidden)} of {len(gains)} cases: in {len(starved)} there "
            f"are fewer than {FULL} blocks for each multiprocessor, so that the chain of loads and products of one "
            f"block sets the time, in {len(bound)} memory does, at over {MEMORY_BOUND:.0%} of the read ceiling.")


# ---------------------------------------------------------------- half of each load (P10)

READS_ALL = "reads every token"
"""The check of the gate that asks for each token by itself."""
CASES = ((16, 24, 4, 256), (1, 24, 4, 128))
"""Settings of what is compared beside P08: one that fills a GPU and one that does not."""


def narrow_load(lab: Lab, settings: Sequence[Sequence[int]] = CASES, histories: Sequence[int] = (4096, 16384),
                accuracy: Sequence[int] = ACCURACY, memory_gib: float = MEMORY_GIB,
                budget_s: float = BUDGET_S) -> Finding:
    """8 bytes of each 16 of V: its error, what the validation gate says of it, and the time that it seems to take; the
    finding on P10.

    Data: rows of {form, error, of P V, max_abs, rms, caught by} and, where there is a GPU, of {sizes, cache, us, p10,
    p90} too. The time of the wrong kernel is recorded as apparent_time_us, never as a time.
    """
    shapes = _shapes(settings, histories)
    forms = {"16 bytes": Form(), "8 bytes": Form(read=8)}
    table = _accuracy(lab, "narrow load", forms, accuracy)
    for row in table:
        row["caught by"] = _gate(lab, forms[row["form"]], Shape(*accuracy).head_dim)
    right, wrong = table
    words = (f"Relative Frobenius against float64: {right['error']:.4f} with 16 bytes, {wrong['error']:.2f} with 8. "
             f"The validation gate {_judgement('the first', right['caught by'])} and "
             f"{_judgement('the second', wrong['caught by'])}.")
    figure = f"error {wrong['error']:.2f} against {right['error']:.4f}"
    if not lab.timed:
        return not_timed("P10", f"{words} Whether it looks faster needs a clock.", table, figure)
    rows, left_out = _times(lab, "narrow load", forms, shapes, memory_gib, budget_s)
    cases = _by_case(rows)
    if not cases:
        return _none_right("P10", words, table)
    pairs = [(row["16 bytes"]["timing"], row["8 bytes"]["timing"]) for row in cases.values()]
    ratios = [full.median / half.median for full, half in pairs]
    seems = speed_verdict(pairs, left_out)
    reads_half = wrong["error"] > BOUND and READS_ALL in wrong["caught by"]
    if not reads_half:
        verdict = "contradicted"
    elif seems == "contradicted" or right["caught by"] or right["error"] > BOUND:
        verdict = "not reproduced"
    else:
        verdict = seems
    return Finding(
        "P10", verdict,
        f"{words} Cold, it seems to take, over the time of the right one: {_relative(cases, '16 bytes')}."
        f"{omitted(left_out)}",
        f"looks {min(ratios):.2f}x to {max(ratios):.2f}x as fast, {figure}", data=_joined(rows, table))


def _gate(lab: Lab, form: Form, head_dim: int) -> list[str]:
    """Names of the validation gate's checks that a form fails; their number is recorded."""
    def attend(q, cache):
        attention = op.Attention(lab.backend, op.on_device(lab.backend, cache), form)
        out = lab.backend.empty(q.shape, np.float32)
        return lab.backend.numpy(attention.decode(lab.backend.array(q), out=out)())

    report = validation.validate(attend, form.on(lab.backend).tokens, head_dim=head_dim, partition=form.partition,
                                 largest=form.largest, scale_tokens=form.scale_tokens)
    lab.record.measure(kernel=KERNEL, variant=f"2_decode_{form.pv}", metric="checks_failed", unit="1",
                       value=len(report.caught_by), case={"head_dim": head_dim, "of": len(report.checks),
                                                          "experiment": "gate"} | _unusual(form))
    return report.caught_by


def _judgement(what: str, caught_by: Sequence[str]) -> str:
    names = ", ".join(f'"{name}"' for name in caught_by)
    return f"refuses {what} by {names}" if names else f"passes {what}"


# ---------------------------------------------------------------- length of a partition (P11)

def partitions(lab: Lab, settings: Sequence[Sequence[int]] = CASES, histories: Sequence[int] = (4096, 16384, 65536),
               lengths: Sequence[int] = (128, 256, 512, 1024), accuracy: Sequence[int] = ACCURACY,
               memory_gib: float = MEMORY_GIB, budget_s: float = BUDGET_S) -> Finding:
    """Decode partitions of several lengths, which must hold 256 and 512; the finding on P11.

    Data: rows of {form, error, of P V, max_abs, rms} and, where there is a GPU, of {sizes, cache, us, p10, p90} too; a
    form's name is its partition's length.
    """
    shapes = _shapes(settings, histories)
    if not {256, 512} <= set(lengths):
        raise ValueError(f"lengths = {tuple(lengths)}; expected 256 and 512 among them, which P11 compares")
    forms = {str(n): Form(partition=n) for n in lengths}
    accuracy_of = _accuracy(lab, "partitions", forms, accuracy)
    words = ("Relative Frobenius against float64 with partitions of "
             + ", ".join(f"{row['form']}: {row['error']:.4f}" for row in accuracy_of) + ".")
    if not lab.timed:
        return not_timed("P11", f"{words} Which is the fastest needs a clock.", accuracy_of)
    rows, left_out = _times(lab, "partitions", forms, shapes, memory_gib, budget_s)
    cases = _by_case(rows)
    if not cases:
        return _none_right("P11", words, accuracy_of)
    pairs = [(row["256"]["timing"], row["512"]["timing"]) for row in cases.values()]
    faster = sum(of_256.p10 > of_512.p90 for of_256, of_512 in pairs)
    slower = sum(of_256.p90 < of_512.p10 for of_256, of_512 in pairs)
    if faster == len(pairs):
        verdict = "contradicted"
    elif left_out or (faster > len(pairs) / 2 and not slower):
        verdict = "direction holds"
    else:
        verdict = "reproduced"
    ratios = [of_256.median / of_512.median for of_256, of_512 in pairs]
    return Finding(
        "P11", verdict,
        f"{words} Cold, in {len(pairs)} cases, 512 is the faster beyond the noise in {faster} and the slower in "
        f"{slower}. Times over that of 256: {_relative(cases, '256')}.{omitted(left_out)}",
        f"512 is {min(ratios):.2f}x to {max(ratios):.2f}x as fast as 256, faster in {faster} of {len(pairs)} cases",
        data=_joined(rows, accuracy_of))


# ---------------------------------------------------------------- tokens under a scale (P12)

def scale_groups(lab: Lab, settings: Sequence[Sequence[int]] = CASES, histories: Sequence[int] = (4096, 16384),
                 tokens: Sequence[int] = (32, 64, 128, 256), accuracy: Sequence[int] = ACCURACY,
                 memory_gib: float = MEMORY_GIB, budget_s: float = BUDGET_S) -> Finding:
    """Scales of the weights over 32 tokens, one step's, up to a whole partition of 256; the finding on P12.

    tokens: under one scale, from 32 to 256. Data: rows of {form, error, of P V, max_abs, rms} and, where there is a
    GPU, of {sizes, cache, us, p10, p90} too; a form's name is its number of tokens.
    """
    shapes = _shapes(settings, histories)
    whole = Form().partition
    if not {32, whole} <= set(tokens):
        raise ValueError(f"tokens = {tuple(tokens)}; expected 32 and {whole} among them, which P12 compares")
    forms = {str(n): Form(scale_tokens=n) for n in tokens}
    accuracy_of = _accuracy(lab, "scale groups", forms, accuracy)
    error = {row["form"]: row["of P V"] for row in accuracy_of}
    loss = error[str(whole)] / error["32"]
    words = ("Relative Frobenius error of P V alone, on V whose size differs from token to token, with a scale for "
             + ", ".join(f"{name} tokens: {value:.4f}" for name, value in error.items())
             + f"; a partition's scale has {loss:.2f} times the error of a step's.")
    if not lab.timed:
        return not_timed("P12", f"{words} What its reduction across waves costs needs a clock.", accuracy_of,
                         f"{loss:.2f}x the error")
    rows, left_out = _times(lab, "scale groups", forms, shapes, memory_gib, budget_s)
    cases = _by_case(rows)
    if not cases:
        return _none_right("P12", words, accuracy_of)
    pairs = [(row[str(whole)]["timing"], row["32"]["timing"]) for row in cases.values()]
    slower, less_accurate = speed_verdict(pairs, left_out), loss > 1.1
    if less_accurate and slower == "reproduced":
        verdict = "reproduced"
    elif less_accurate or slower in ("reproduced", "direction holds"):
        verdict = "direction holds"
    else:
        verdict = "contradicted" if slower == "contradicted" and loss < 1 / 1.1 else "not reproduced"
    ratios = [of_whole.median / of_step.median for of_whole, of_step in pairs]
    costs = {"reproduced": "costs time in each case", "direction holds": "costs time in most cases",
             "not reproduced": "costs no time beyond the noise", "contradicted": "saves time, since fewer scales are "
             "applied than a reduction costs"}[slower]
    return Finding(
        "P12", verdict,
        f"{words} Cold, a partition's scale {costs}; times over those of a step's: {_relative(cases, '32')}."
        f"{omitted(left_out)}",
        f"{loss:.2f}x the error, {min(ratios):.2f}x to {max(ratios):.2f}x the time", data=_joined(rows, accuracy_of))


# ---------------------------------------------------------------- V in bf16 first (P13)

def dequantized(lab: Lab, settings: Sequence[Sequence[int]] = CASES, histories: Sequence[int] = (4096, 16384),
                accuracy: Sequence[int] = ACCURACY, memory_gib: float = MEMORY_GIB,
                budget_s: float = BUDGET_S) -> Finding:
    """INT8 P V against V dequantized to bf16, in registers or into pages, and against BF16 P V on folded scales; the
    finding on P13.

    Data: rows of {form, error, of P V, max_abs, rms} and, where there is a GPU, of {sizes, cache, us, p10, p90} too. Of
    the pages there are two forms: "bf16_pages", which finds them ready, and "bf16_pages, made", which makes them first.
    """
    shapes = _shapes(settings, histories)
    forms = {pv: Form(pv) for pv in ("int8", "bf16", "bf16_dequantized", "bf16_pages")}
    table = _accuracy(lab, "dequantized", forms, accuracy)
    table.append(table[-1] | {"form": "bf16_pages, made"})
    words = "Relative Frobenius against float64: " + ", ".join(f"{row['form']} {row['error']:.4f}"
                                                               for row in table[:-1]) + "."
    if not lab.timed:
        return not_timed("P13", f"{words} What is left of the gain needs a clock.", table)

    def make_and_attend(attention, q, out):
        launch = attention.decode(q, out=out)

        def call():
            attention.dequantize()
            launch()
        return call

    def made(problem):
        return {"bf16_pages, made": _bench(problem, forms["bf16_pages"], make_and_attend,
                                           "5_dequantize_v, 2_decode_bf16_pages")}

    rows, left_out = _times(lab, "dequantized", forms, shapes, memory_gib, budget_s, made)
    cases = _by_case(rows)
    if not cases:
        return _none_right("P13", words, table)
    first = ("bf16_dequantized", "bf16_pages, made")
    gaining = {shape: row for shape, row in cases.items() if row["int8"]["timing"].p90 < row["bf16"]["timing"].p10}
    kept = {(shape, name): (row["bf16"]["us"] - row[name]["us"]) / (row["bf16"]["us"] - row["int8"]["us"])
            for shape, row in gaining.items() for name in first}
    words += f" Cold, times over that of INT8 PV: {_relative(cases, 'int8')}."
    if not kept:
        return Finding("P13", "not reproduced", f"{words} INT8 PV gains nothing over BF16 PV beyond the noise here, so "
                       f"there is nothing to give back.{omitted(left_out)}", "no gain to give back",
                       data=_joined(rows, table))
    given_back = sum(share < 0.5 for share in kept.values())
    if given_back == len(kept):
        verdict = "direction holds" if left_out else "reproduced"
    else:
        most = given_back > len(kept) / 2
        verdict = "direction holds" if most else "not reproduced" if given_back else "contradicted"
    return Finding(
        "P13", verdict,
        f"{words} In the {len(gaining)} of {len(cases)} cases where INT8 PV gains over BF16 PV on folded scales, V "
        f"made bf16 first gives back more than half of the gain in {given_back} of {len(kept)} comparisons and keeps "
        f"{max(kept.values()):.0%} of it at best. Pages that lie ready would be a cache of 16 bits, not this one."
        f"{omitted(left_out)}",
        f"over INT8 PV: BF16 PV {_span(gaining, 'bf16')}, V made bf16 first {_span(gaining, *first)}",
        data=_joined(rows, table))


def _span(cases, *names) -> str:
    """Times of forms over that of INT8 PV, the least and the most."""
    ratios = [row[name]["us"] / row["int8"]["us"] for row in cases.values() for name in names]
    return f"{min(ratios):.2f}x to {max(ratios):.2f}x"


# ---------------------------------------------------------------- unsigned weights (P14)

def unsigned(lab: Lab, settings: Sequence[Sequence[int]] = CASES, histories: Sequence[int] = (4096, 16384),
             accuracy: Sequence[int] = ACCURACY, memory_gib: float = MEMORY_GIB, budget_s: float = BUDGET_S) -> Finding:
    """Weights in 0..255, by an instruction of mixed signs or by an offset, against 0..127; the finding on P14.

    Reproduced where a path passes the gate with an error of at most ONE_BIT of signed weights': the bit is there, and a
    path to it. Data: rows of {form, error, of P V, max_abs, rms, caught by} and, where there is a GPU, of {sizes,
    cache, us, p10, p90} too.
    """
    shapes = _shapes(settings, histories)
    forms, lacking = {"int8": Form("int8"), "uint8_offset": Form("uint8_offset")}, ""
    try:
        Form("uint8").on(lab.backend)
        forms["uint8"] = Form("uint8")
    except ValueError as no_instruction:
        lacking = f" No mixed-sign path: {no_instruction}."
    table = _accuracy(lab, "unsigned", forms, accuracy)
    for row in table:
        row["caught by"] = _gate(lab, forms[row["form"]], Shape(*accuracy).head_dim)
    signed, *paths = table
    ratio = {row["form"]: row["error"] / signed["error"] for row in paths}
    passing = [row["form"] for row in paths if row["error"] <= BOUND and not row["caught by"]]
    gaining = [name for name in passing if ratio[name] <= ONE_BIT]
    words = ("Relative Frobenius against float64 on V whose size differs from token to token: "
             + ", ".join(f"{row['form']} {row['error']:.4f} (of P V alone {row['of P V']:.4f})" for row in table)
             + f". The gate passes {' and '.join(passing) or 'no unsigned path'}; the article had none that passed."
             + lacking)
    verdict = ("reproduced" if gaining else "not reproduced" if not passing or min(ratio[n] for n in passing) < 1 else
               "contradicted")
    measured = ", ".join(f"{name} {value:.2f}x the error" for name, value in ratio.items())
    if not lab.timed:
        return Finding("P14", verdict, f"{words} What a path costs needs a clock.", measured, data=table)
    # int8 and the paths that pass: a wrong one would take every case with it
    forms = {name: form for name, form in forms.items() if name == "int8" or name in passing}
    rows, left_out = _times(lab, "unsigned", forms, shapes, memory_gib, budget_s)
    cases = _by_case(rows)
    times = f" Cold, times over that of int8: {_relative(cases, 'int8')}." if cases else ""
    slowest = {name: max(row[name]["us"] / row["int8"]["us"] for row in cases.values())
               for name in passing} if cases else {}
    cost = "".join(f"; {name} up to {value:.2f}x the time" for name, value in slowest.items())
    return Finding("P14", verdict, f"{words}{times}{omitted(left_out)}", measured + cost, data=_joined(rows, table))


# ---------------------------------------------------------------- beside others' kernels (no claim of its own)

PEER_SETTINGS = ((1, 24, 4, 128), (16, 24, 4, 128), (1, 24, 4, 256), (16, 24, 4, 256), (1, 9, 3, 64), (16, 9, 3, 64))
PREFILL_SETTINGS = ((1, 24, 4, 128), (1, 24, 4, 256))


def beside_peers(lab: Lab, decode_settings: Sequence[Sequence[int]] = PEER_SETTINGS,
                 decode_histories: Sequence[int] = (4096, 16384),
                 prefill_settings: Sequence[Sequence[int]] = PREFILL_SETTINGS,
                 prefill_histories: Sequence[int] = (4096, 8192, 16384), queries: int = 512,
                 memory_gib: float = MEMORY_GIB, budget_s: float = BUDGET_S) -> list[dict]:
    """Decode, and prefill of `queries` that follow a history, in our kernels and in every peer that takes the case;
    either may have no settings. Our caches are in pages of PEER_BLOCK_SIZE tokens.

    Rows of {phase, sizes, variant, peer, cache, us, p10, p90, fastest}, of a decode also of read, of a prefill (warm
    only) TFLOP/s and of int8 matmul; `fastest` is the case's fastest variant. A peer that is missing, refuses a case,
    fails or is wrong there is recorded as such and has no row. Without a GPU there are no rows.
    """
    paged = {"block_size": PEER_BLOCK_SIZE}
    shapes = _shapes(decode_settings, decode_histories, **paged) if len(decode_settings) else []
    shapes += _shapes(prefill_settings, prefill_histories, queries=queries, **paged) if len(prefill_settings) else []
    known = lab.able(KERNEL, attention_peers.all_peers(), {"experiment": "peers"})
    if not lab.timed:
        return []
    return [row for shape in shapes if _fits(lab, shape, "peers", memory_gib)
            for row in _case_beside_peers(_Problem(lab, shape, "peers"), known, budget_s)]


def page_sizes(lab: Lab, setting: Sequence[int] = (1, 24, 4, 128), history: int = 16384,
               block_sizes: Sequence[int] = (16, 32, 64, 128), queries: int = 512,
               budget_s: float = BUDGET_S) -> list[dict]:
    """What pages cost: our kernels on caches in pages of so many tokens, out of order, decode (cold) and prefill
    (warm).

    Rows of {tokens a page, variant: us}; a kernel that is wrong has no figure. Without a GPU there are no rows.
    """
    if not lab.timed:
        return []
    rows = []
    for block_size in block_sizes:
        row = {"tokens a page": block_size}
        for asked, cache in ((1, "cold"), (queries, "warm")):
            problem = _Problem(lab, Shape(*setting, history, asked, block_size), "pages")
            benches = {bench.variant: bench for bench in _ours(problem) if bench.check()}
            times = _race(benches, budget_s) if benches else []
            row |= {r["variant"]: r["us"] for r in times if r["cache"] == cache}
        rows.append(row)
    return rows


def _case_beside_peers(problem, known, budget_s) -> list[dict]:
    ours = [bench for bench in _ours(problem) if bench.check()]
    peers = [bench for peer in known if (bench := _peer_bench(problem, peer))]
    benches = {bench.variant: bench for bench in ours + peers}
    rows = _race(benches, budget_s) if benches else []
    for row in rows:
        row["phase"] = "prefill" if problem.shape.queries > 1 else "decode"
        row["peer"] = row["form"] not in {bench.variant for bench in ours}
        row["fastest"] = min((r for r in rows if r["cache"] == row["cache"]), key=lambda r: r["us"])["variant"]
    return [{name: value for name, value in row.items() if name not in ("form", "timing")} for row in rows]


def standings(table: list[dict]) -> list[dict]:
    """Of beside_peers, cold where a case is measured so: our fastest INT8 kernel against the fastest peer, a row a
    case.

    "ours / peer" is the ratio of their times; `faster` says "ours", "peer", or "neither" where the two overlap between
    their 10th and 90th percentiles.
    """
    keys = ("phase", *(f.name for f in fields(Shape)))
    cases: dict[tuple, list[dict]] = {}
    for row in table:
        if row["cache"] == ("cold" if row["phase"] == "decode" else "warm"):
            cases.setdefault(tuple(row[key] for key in keys), []).append(row)
    rows = []
    for case, found in cases.items():
        ours = min((r for r in found if not r["peer"] and "int8" in r["variant"]), key=lambda r: r["us"], default=None)
        peer = min((r for r in found if r["peer"]), key=lambda r: r["us"], default=None)
        row = dict(zip(keys, case, strict=True))
        for who, r in (("ours", ours), ("best peer", peer)):
            if r:
                row |= {who: r["variant"], f"{who} us": r["us"]}
        if ours and peer:
            row["ours / peer"] = ours["us"] / peer["us"]
            row["faster"] = "ours" if ours["p90"] < peer["p10"] else "peer" if peer["p90"] < ours["p10"] else "neither"
        rows.append(row)
    return rows


def _ours(problem: _Problem) -> list[_Bench]:
    """Our kernels for a problem: decode with INT8 and BF16 P V, the partition chosen; prefill with both, with a scale
    for 64 tokens, and on warpgroup instructions where the device has them."""
    shape = problem.shape
    if shape.queries == 1:
        partition = op.choose_partition(shape.length, shape.batch * shape.kv_heads, problem.lab.backend.multiprocessors)
        return [_bench(problem, Form(pv, partition=partition)) for pv in ("int8", "bf16")]
    benches = []
    for file, wgmma in (("3_prefill", False), ("6_prefill_wgmma", True)):
        def bind(attention, q, out, wgmma=wgmma):
            return attention.prefill(q, out=out, causal_offset=shape.history, wgmma=wgmma)
        for form in (Form("int8"), Form("int8", scale_tokens=64), Form("bf16")):
            name = f"{file}_{form.pv}" + ("_64" if form.scale_tokens == 64 else "")
            try:
                benches.append(_bench(problem, form, bind, name))
            except ValueError:
                if not wgmma:  # only these instructions may be lacking
                    raise
    return benches


def _peer_bench(problem: _Problem, peer: attention_peers.AttentionPeer) -> _Bench | None:
    """A peer on what our cache stands for, once its output has been found right; None where it has no time."""
    lab, shape, case = problem.lab, problem.shape, problem.case
    refusal = peer.supports(shape.head_dim, shape.queries, True)
    if refusal:
        return lab.no_time(KERNEL, peer.name, case, "skipped", refusal)
    nbytes = peer.cache_bytes(shape.batch, shape.length, shape.kv_heads, shape.head_dim)
    try:
        k, v = _floats(problem.caches[0], shape)
        calls = peer.prepare(problem.host_q, k, v, causal=True, copies=_copies(lab, shape, nbytes))
        out = calls[0]().float().cpu().numpy()
        # what no graph can hold fails here, alone, and not in the run of all
        measure.device_times({peer.name: calls[:1]}, rounds=1, sample_us=0)
    except Exception as error:  # a peer's own failure must not cost the run
        return lab.no_time(KERNEL, peer.name, case, "runtime_error", error)
    if not problem.check(peer.name, case, out, PEER_BOUND[peer.bits]):
        return None
    return _Bench(problem, peer.name, case, calls, nbytes + 2 * 2 * problem.host_q.size)
