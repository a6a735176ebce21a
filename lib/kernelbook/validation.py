"""A gate for decode kernels with INT8 PV: what a kernel has to show before its speed counts.

A kernel that finishes and gives finite numbers may still take the scale of other tokens than it multiplies, load half
of V, or leave rows unwritten, and loose comparisons accept that. `validate` runs the kernel under test on problems made
so that each of these faults shows by itself, and compares it with the NumPy model of the same arithmetic (`pv_model`)
and with float64 attention, within bounds that follow from the arithmetic:

    report = validate(lambda q, cache: my_kernel(q, cache), Tokens(INSTRUCTIONS["mfma_i32_16x16x32_i8"]))
    print(report)
    assert report.passed

Source: int8_pv article, section 4 (what a PV kernel has to pass) and section 6 (what fast wrong ones did).
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from kernelbook import kv_cache, pv_model
from kernelbook.fragments import Tokens
from kernelbook.kv_cache import LARGEST_CODE, STALE_CODE, PagedCache
from kernelbook.stats import errors

LONGEST = 4096
"""Tokens of the longest sequence: the gate asks for each token by itself, in a cache that grows with its square."""
FRAGMENT_RATIO = 1000  # between the V scales of tokens that neighbouring groups own
PROBE_TOLERANCE = 0.05
"""Relative, of a token asked for by itself: a code, 31 or more, is off by up to 1.6 %, a fault by 29 % or more."""
CHANCE = 1e-9
"""That the random problem takes a right kernel beyond the bound on its distance from float64 attention."""
STALE = {  # what lies behind the lengths: K and V codes and scales
    "zeros": (0, 0.0),
    "NaN": (STALE_CODE, np.nan),
    "huge numbers": (LARGEST_CODE, 1e4),
}


@dataclass(frozen=True)
class Check:
    """One thing that a kernel has to show. detail: a sentence with the figures."""

    name: str
    passed: bool
    detail: str


@dataclass(frozen=True)
class Report:
    """What `validate` found; `print` it for one line a check."""

    checks: tuple[Check, ...]

    @property
    def passed(self) -> bool:
        return not self.caught_by

    @property
    def caught_by(self) -> list[str]:
        """Names of the checks that failed."""
        return [check.name for check in self.checks if not check.passed]

    def __str__(self) -> str:
        width = max(len(check.name) for check in self.checks)
        lines = [f"{'passed' if check.passed else 'FAILED'}  {check.name:{width}}  {check.detail}"
                 for check in self.checks]
        good = len(self.checks) - len(self.caught_by)
        return "\n".join([f"{good} of {len(self.checks)} checks passed", *lines])


def validate(attend: Callable[[np.ndarray, PagedCache], np.ndarray], tokens: Tokens, *, kv_heads: int = 2,
             group: int = 3, head_dim: int = 64, block_size: int = 16, lengths: Sequence[int] | None = None,
             seed: int = 0, partition: int = 256, largest: int = LARGEST_CODE, scale_tokens: int = 32) -> Report:
    """Whether a decode kernel is right, and if not, which checks it fails.

    attend: runs the kernel under test on q float32 [batch, 1, kv_heads * group, head_dim] and a cache in host memory,
    and returns its output, float32 of q's shape, softmax_scale being 1 / sqrt(head_dim). It should give the kernel a
    fresh output filled with NaN each time: an output that was never written shows only by what it held before.
    tokens: the instruction, the load and the operand by which the kernel multiplies V.
    lengths: of the sequences of a batch, up to 4096, one longer than a partition; None takes 0, 1, 37, a partition, and
    lengths beyond one and two partitions that are multiples of nothing.
    partition, largest, scale_tokens: as the kernel has them; what they mean says `pv_model`.
    The kernel runs seven times; what it raises is passed on. Raises TypeError or ValueError where parameters do not fit
    and where attend returns something else than float32 of q's shape.
    """
    if lengths is None:
        lengths = (0, 1, 37, partition, partition + 45, 2 * partition + 205)
    kv_cache.check_geometry(kv_heads, head_dim, block_size)
    pv_model.check_form(tokens, largest, scale_tokens)
    tokens.blocks(block_size)
    if group < 1:
        raise ValueError(f"group = {group}; expected at least 1 query head for each KV head")
    if kv_heads > head_dim:
        raise ValueError(f"kv_heads = {kv_heads}; expected at most head_dim, {head_dim}, which tell the heads apart")
    if min(lengths, default=-1) < 0 or not partition < max(lengths) <= LONGEST:
        raise ValueError(f"lengths = {tuple(lengths)}; expected lengths from 0 to {LONGEST}, one of them beyond a "
                         f"partition of {partition}")
    gate = _Gate(attend, tokens, kv_heads, group, head_dim, block_size, tuple(lengths), seed,
                 {"partition": partition, "largest": largest, "scale_tokens": scale_tokens})
    return gate.report()


@dataclass(frozen=True)
class _Expected:
    """Outputs of a right kernel, float64 of q's shape: the model's, and float64 attention; how far off each it may be,
    as `_Gate.expected` derives it."""

    model: np.ndarray
    from_model: np.ndarray
    exact: np.ndarray
    from_exact: np.ndarray


@dataclass(frozen=True)
class _Gate:
    """The problems of one run of the gate, and the checks on them."""

    attend: Callable
    tokens: Tokens
    kv_heads: int
    group: int
    head_dim: int
    block_size: int
    lengths: tuple[int, ...]
    seed: int
    form: dict

    def report(self) -> Report:
        q, cache = self.random_problem("zeros")
        expected = self.expected(q, cache)
        out = self.run(q, cache)
        checks = [self.writes_every_output(out),
                  self.reads_every_token(),
                  self.reads_nothing_else(out, expected.from_model),
                  self.reads_its_kv_head(),
                  self.scales_belong_to_their_fragment(),
                  self.scale_of_every_token(),
                  self.agrees_with_model(out, expected, q, cache),
                  self.agrees_with_float64(out, expected)]
        checks.append(self.finite_but_wrong(out, expected.exact, sum(not check.passed for check in checks)))
        return Report(tuple(checks))

    def run(self, q, cache) -> np.ndarray:
        out = self.attend(q, cache)
        if not isinstance(out, np.ndarray) or out.dtype != np.float32:
            raise TypeError(f"attend returned {getattr(out, 'dtype', type(out).__name__)}; expected a NumPy array of "
                            "float32")
        if out.shape != q.shape:
            raise ValueError(f"attend returned the shape {out.shape}; expected that of q, {q.shape}")
        return out

    # ---- problems

    def cache(self, sequences, stale) -> PagedCache:
        """Sequences of K codes [length, kv_heads or 1, head_dim], K scales [length, kv_heads or 1], V codes, V scales,
        1 for what all heads share, on pages in a random order. Entries of the block table behind a length name a page
        that no sequence has."""
        rng = np.random.default_rng(self.seed)
        lengths = np.array([len(sequence[1]) for sequence in sequences])
        needed = -(-lengths // self.block_size)
        pages = rng.permutation(needed.sum() + 1)
        tables = np.full((len(lengths), needed.max() + 1), pages[-1])
        reached = np.arange(tables.shape[1]) < needed[:, None]
        tables[reached] = pages[:-1]
        cache = kv_cache.empty(self.kv_heads, self.head_dim, self.block_size, tables, lengths, len(pages))
        code, scale = STALE[stale]
        for codes, scales in ((cache.k_codes, cache.k_scales), (cache.v_codes, cache.v_scales)):
            codes[:], scales[:] = code, scale
        for index, (k_codes, k_scales, v_codes, v_scales) in enumerate(sequences):
            page, offset = cache.slots(index, 0, len(k_scales)).T
            cache.k_codes[page, :, offset], cache.k_scales[page, :, offset] = k_codes, k_scales
            cache.v_codes[page, :, :, offset], cache.v_scales[page, :, offset] = v_codes, v_scales
        return cache

    def random_problem(self, stale):
        """Unit variance, V of each token times 2**-x with x up to 4, so that tokens differ in scale."""
        rng = np.random.default_rng(self.seed)
        sequences = []
        for length in self.lengths:
            k, v = rng.standard_normal((2, length, self.kv_heads, self.head_dim), np.float32)
            v *= np.exp2(-4 * rng.random((length, self.kv_heads, 1), np.float32))
            sequences.append((*kv_cache.quantize_vectors(k), *kv_cache.quantize_vectors(v)))
        q = rng.standard_normal((len(self.lengths), 1, self.kv_heads * self.group, self.head_dim), np.float32)
        return q, self.cache(sequences, stale)

    def token_problem(self, scores, v_scales):
        """A batch in which each column of the output is one token's V alone, and each token has a column.

        scores: [length], to base 2. v_scales: [length]. All sequences have the same K and scales; sequence b has V
        codes of its tokens b * head_dim + d only, 127 in column d. Returns q, the cache and each token's output.
        """
        length = len(v_scales)
        q, k_codes, k_scales = self.keys(scores)
        sequences = []
        for first in range(0, length, self.head_dim):
            v_codes = np.zeros((length, self.head_dim), np.int8)
            mine = np.arange(first, min(first + self.head_dim, length))
            v_codes[mine, mine - first] = LARGEST_CODE
            sequences.append((k_codes, k_scales, v_codes[:, None], v_scales[:, None]))
        weights = np.exp2(scores - np.max(scores))
        expected = weights / weights.sum() * v_scales * LARGEST_CODE
        return np.repeat(q, len(sequences), axis=0), self.cache(sequences, "zeros"), expected

    def keys(self, scores):
        """q [1, 1, heads, head_dim], K codes and scales that give the tokens these scores to base 2, all positive.
        scores: [length] or [length, kv_heads]."""
        scores = np.broadcast_to(np.reshape(scores, (len(scores), -1)), (len(scores), self.kv_heads))
        q = np.ones((1, 1, self.kv_heads * self.group, self.head_dim), np.float32)
        one = self.head_dim ** 0.5 * math.log2(math.e) * LARGEST_CODE  # the score of codes 127 with scale 1
        return q, np.full((*scores.shape, self.head_dim), LARGEST_CODE, np.int8), (scores / one).astype(np.float32)

    # ---- what is right

    def expected(self, q, cache) -> _Expected:
        """What a right kernel gives, and two bounds on how far it may be off.

        From the model: both round the same products, but a device's exp2 and order of additions make its weights
        differ by a relative delta. A code may then be off by one only where the model's quotient W / sW lies within
        largest * delta of a half: there, |Vq| sW of the token may be missing or too much. Everything else may differ
        by delta itself.
        From float64: the query's codes move every output by an amount known exactly. A weight's code is off by at most
        half a step, and as V's signs here are independent of its weight, Hoeffding's inequality bounds their sum.
        """
        model, from_model, exact, from_exact = np.zeros((4, *q.shape))
        certain = math.sqrt(2 * math.log(2 * q.size / CHANCE))
        for place, queries, k_codes, k_scales, v_codes, v_scales in pv_model.by_kv_head(q, cache):
            if not len(k_scales):
                continue
            rows = queries.reshape(-1, self.head_dim)
            s = pv_model.scores(rows, k_codes, k_scales)
            parts = pv_model.partitions(s, v_codes, v_scales, self.tokens, **self.form)
            merge = pv_model.merge_weights(parts).astype(np.float64)
            # Two exp2, products and a quotient, to an ulp or two each; scores to an ulp of theirs; then the additions.
            additions = len(parts) + len(parts[0].trace.sums)
            delta = 2.0 ** -22 * (4 + np.abs(s).max()) + 2.0 ** -24 * additions
            step, near, dequantized, out = [], [], [], 0
            for w, part in zip(merge[:, :, None], parts, strict=True):
                trace = part.trace
                scale = trace.scales[:, trace.scale_of].astype(np.float64)
                quotient = np.divide(trace.weights, scale, out=np.zeros_like(scale), where=scale > 0)
                near.append(np.abs(quotient % 1 - 0.5) <= self.form["largest"] * delta)
                step.append(w * scale)
                dequantized.append(w * trace.dequantized)
                out = out + w * trace.out
            step, near, dequantized = (np.concatenate(x, axis=1) for x in (step, near, dequantized))
            v = v_codes.T.astype(np.float64)
            rounding = delta * dequantized @ np.abs(v) + np.finfo(np.float32).tiny
            codes, scale = kv_cache.quantize_vectors(rows)
            real, quantized = (_attention(x, k_codes, k_scales, v, v_scales)
                               for x in (rows.astype(np.float64), codes * scale[:, None].astype(np.float64)))
            spread = certain * np.sqrt((step / 2) ** 2 @ v ** 2)
            for target, value in ((model, out), (from_model, (near * step) @ np.abs(v) + rounding), (exact, real),
                                  (from_exact, np.abs(real - quantized) + spread + rounding)):
                target[place] = value.reshape(queries.shape)
        return _Expected(model, from_model, exact, from_exact)

    def explanation(self, out, q, cache) -> str:
        """Which kernels unlike the declared one give this output by their model, as the end of a sentence, or ""."""
        other, half = {127: 255, 255: 127}[self.form["largest"]], self.tokens.load // 2
        forms = {"with scales of logical tokens instead of the step's own": {"grouping": "logical"},
                 f"reading {half} of the {self.tokens.load} bytes of each load": {"read": half},
                 "with one common scale of V in each partition": {"common_scale": True},
                 f"with codes up to {other}": {"largest": other}}
        for n in (32, 64, 128, 256, 512, 1024):
            if n != self.form["scale_tokens"] and self.form["partition"] % n == 0:
                forms[f"with a scale for {n} tokens"] = {"scale_tokens": n}
        fits = []
        for words, change in forms.items():
            model = pv_model.decode(q, cache, self.tokens, **(self.form | change))
            if errors(out, model).relative_frobenius < 1e-3:
                fits.append(words)
        return f"; it is what the model gives {', or '.join(fits)}" if fits else ""

    # ---- checks

    def writes_every_output(self, out) -> Check:
        empty = np.array(self.lengths) == 0
        bad = ~np.isfinite(out)
        unwritten = ~out.any(axis=-1) & ~empty[:, None, None]
        problems = []
        if bad.any():
            problems.append(f"{np.count_nonzero(bad)} of {out.size} outputs are not finite, the first at "
                            f"{self.place(bad)}")
        if unwritten.any():
            problems.append(f"{np.count_nonzero(unwritten)} rows are all 0, the first at {self.place(unwritten)}")
        if out[empty].any():
            problems.append(f"a sequence of length 0 gives {np.abs(out[empty]).max():.3g} instead of exactly 0")
        right = (f"{out.size} finite outputs for lengths {', '.join(map(str, self.lengths))}"
                 + (", exactly 0 for length 0" if empty.any() else ""))
        return Check("writes every output", not problems, _sentence(problems, right))

    def place(self, where) -> str:
        """The first place of a mask over an output or its rows, in words."""
        sequence, _, head, *d = np.argwhere(where)[0]
        return (f"sequence {sequence} of length {self.lengths[sequence]}, head {head}"
                + (f", dimension {d[0]}" if d else ""))

    def token_ratios(self, scores, v_scales) -> np.ndarray:
        """On `token_problem`, how much each token counts for each head, in units of what is right: [tokens, heads]."""
        q, cache, expected = self.token_problem(scores, v_scales)
        out = self.run(q, cache)[:, 0]
        return out.transpose(0, 2, 1).reshape(-1, out.shape[1])[:len(expected)] / expected[:, None]

    def reads_every_token(self) -> Check:
        rng = np.random.default_rng(self.seed)
        length = max(self.lengths)
        levels = 4 - rng.integers(0, 4, length) / 2
        ratios = self.token_ratios(levels, np.full(length, 1 / LARGEST_CODE))
        missed = np.flatnonzero((np.abs(ratios) < 0.1).any(axis=1))
        wrong = np.setdiff1d(np.flatnonzero(~(np.abs(ratios - 1) < PROBE_TOLERANCE).all(axis=1)), missed)
        problems = []
        if missed.size:
            problems.append(f"{missed.size} of {length} tokens do not count: {_ranges(missed)}"
                            + self.narrow_load(missed, length))
        if wrong.size:
            problems.append(f"{wrong.size} of {length} tokens count with another weight than theirs: {_ranges(wrong)}")
        return Check("reads every token", not problems, _sentence(
            problems, f"each of {length} tokens counts with its own weight, to {np.abs(ratios - 1).max():.1%}"))

    def narrow_load(self, missed, length) -> str:
        position = np.arange(length) % self.tokens.load
        for read in range(1, self.tokens.load):
            if np.array_equal(missed, np.flatnonzero(position >= read)):
                return f", as where lanes read {read} of the {self.tokens.load} bytes of each load of V"
        return ""

    def reads_nothing_else(self, clean, allowed) -> Check:
        problems = []
        for stale in ("NaN", "huge numbers"):
            out = self.run(*self.random_problem(stale))
            changed = ~np.isclose(out, clean, rtol=0, atol=allowed, equal_nan=True)
            if changed.any():
                problems.append(f"{stale} behind the lengths change {np.count_nonzero(changed)} of {out.size} outputs, "
                                f"the first at {self.place(changed)}")
        return Check("reads nothing else", not problems, _sentence(
            problems, "NaN and huge numbers behind the lengths, in pages and block tables, change nothing"))

    def reads_its_kv_head(self) -> Check:
        """K of head h has all its weight on token h, V of token t stands in column t with the size h + 1: an output
        tells the head of K by its largest column and the head of V by its size."""
        heads = self.kv_heads
        q, k_codes, k_scales = self.keys(np.where(np.eye(heads), 30, 1))
        v_codes = np.zeros((heads, heads, self.head_dim), np.int8)
        v_codes[np.arange(heads), :, np.arange(heads)] = LARGEST_CODE
        v_scales = np.tile(np.arange(1, heads + 1) / np.float32(LARGEST_CODE), (heads, 1)).astype(np.float32)
        out = np.nan_to_num(self.run(q, self.cache([(k_codes, k_scales, v_codes, v_scales)], "zeros"))[0, 0])
        own = np.arange(heads * self.group) // self.group
        k_head, v_size = out.argmax(axis=1), out.max(axis=1)
        wrong = np.flatnonzero((k_head != own) | (np.abs(v_size - (own + 1)) > PROBE_TOLERANCE))
        problems = []
        if wrong.size:
            head = wrong[0]
            v_head = round(float(v_size[head])) - 1
            read = f"V of KV head {v_head}" if 0 <= v_head < heads else f"no head's V (size {v_size[head]:.3g})"
            problems.append(f"{wrong.size} of {len(own)} query heads read another KV head than theirs, the first head "
                            f"{head}: K of KV head {k_head[head]} and {read} instead of {own[head]}")
        return Check("reads its own KV head", not problems, _sentence(
            problems, f"{len(own)} query heads read K and V of their KV head, {self.group} each"))

    def scales_belong_to_their_fragment(self) -> Check:
        """V of every second group is 1000 times smaller, and stands in columns of its own, where a scale taken over
        other tokens than its own shows in full. In a second sequence the other groups are the small ones."""
        length = max(self.lengths)
        rng = np.random.default_rng(self.seed)
        q, k_codes, k_scales = self.keys(np.ones(length))
        codes = rng.integers(1, LARGEST_CODE + 1, (length, self.head_dim))
        small_column = np.arange(self.head_dim) >= self.head_dim // 2
        sequences, expected = [], []
        for parity in (0, 1):
            small = pv_model.groups(self.tokens, length, self.form["scale_tokens"]) % 2 == parity
            v_codes = np.where(small[:, None] == small_column, codes, 0)
            v_scales = np.where(small, 1 / FRAGMENT_RATIO, 1) / LARGEST_CODE
            sequences.append((k_codes, k_scales, v_codes[:, None], v_scales[:, None]))
            expected.append(v_scales @ v_codes / length)
        q, cache = np.repeat(q, 2, axis=0), self.cache(sequences, "zeros")
        out = self.run(q, cache)
        off = np.abs(out / np.array(expected)[:, None, None] - 1)
        words = (f"where V of every second group of {self.form['scale_tokens']} tokens is {FRAGMENT_RATIO} times "
                 f"smaller, the small groups are off by up to {off[..., small_column].max():.1%}, the large by up to "
                 f"{off[..., ~small_column].max():.1%}")
        passed = bool((off < PROBE_TOLERANCE).all())
        return Check("scales belong to their fragment", passed,
                     words + ("" if passed else self.explanation(out, q, cache)))

    def scale_of_every_token(self) -> Check:
        rng = np.random.default_rng(self.seed + 1)
        length = max(self.lengths)
        scales = np.exp2(-rng.integers(0, 3, length)) / LARGEST_CODE
        ratios = self.token_ratios(np.ones(length), scales)
        wrong = np.flatnonzero(~(np.abs(ratios - 1) < PROBE_TOLERANCE).all(axis=1))
        problems = []
        if wrong.size:
            problems.append(f"{wrong.size} of {length} tokens do not count with the scale of their V: {_ranges(wrong)}")
            alike = ratios * scales[:, None]
            if np.ptp(alike) < PROBE_TOLERANCE * np.abs(alike).min():
                problems.append("all count alike, as with one common scale")
        return Check("scale of every token", not problems, _sentence(
            problems, f"each of {length} tokens counts with the scale of its V, to {np.abs(ratios - 1).max():.1%}"))

    def agrees_with_model(self, out, expected, q, cache) -> Check:
        passed, words = self.within(out, expected.model, expected.from_model)
        words += "; a code may differ only where rounding in float32 decides it"
        return Check("agrees with the model", passed, words + ("" if passed else self.explanation(out, q, cache)))

    def agrees_with_float64(self, out, expected) -> Check:
        passed, words = self.within(out, expected.exact, expected.from_exact)
        found = errors(out, expected.exact)
        return Check("agrees with float64 attention", passed,
                     f"{words}; relative error {found.relative_frobenius:.3g}, RMS {found.rms:.3g}")

    def finite_but_wrong(self, out, exact, failed) -> Check:
        """What a loose test of the longest sequence says: fails where it accepts what another check refuses."""
        longest = int(np.argmax(self.lengths))
        found = errors(out[longest], exact[longest])
        accepts = found.nonfinite == 0 and (found.cosine > 0.99 or found.max_abs < 0.1)
        words = (f"a loose test of {self.lengths[longest]} tokens, all finite and either a cosine above 0.99 or no "
                 f"error above 0.1, {'accepts' if accepts else 'refuses'} this kernel (cosine {found.cosine:.5f}, "
                 f"max_abs {found.max_abs:.3g})")
        if accepts and failed:
            words += f" that fails {failed} of the checks above"
        return Check("finite but wrong", not (accepts and failed), words)

    def within(self, out, right, bound) -> tuple[bool, str]:
        distance = np.abs(out - right)
        beyond = ~(distance <= bound)
        share = np.divide(distance, bound, out=np.zeros_like(distance), where=bound > 0).max()
        words = f"off by up to {distance.max():.3g}, {share:.3g} of what is allowed there"
        if beyond.any():
            words += f"; {np.count_nonzero(beyond)} of {out.size} outputs beyond, the first at {self.place(beyond)}"
        return not beyond.any(), words


def _attention(q, k_codes, k_scales, v_codes, v_scales) -> np.ndarray:
    """Attention in float64: q [rows, head_dim], codes [tokens, head_dim], scales [tokens] -> [rows, head_dim]."""
    keys, values = (codes * scales[:, None].astype(np.float64) for codes, scales in
                    ((k_codes, k_scales), (v_codes, v_scales)))
    scores = q @ keys.T * q.shape[1] ** -0.5
    weights = np.exp(scores - scores.max(axis=1, keepdims=True))
    return weights / weights.sum(axis=1, keepdims=True) @ values


def _sentence(problems, right) -> str:
    return "; ".join(problems) or right


def _ranges(numbers, most=6) -> str:
    """Ascending integers as ranges, "0-3, 7, 12-15", no more than `most` of them."""
    runs = np.split(numbers, np.flatnonzero(np.diff(numbers) != 1) + 1)
    words = [str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs]
    return ", ".join(words[:most]) + (f", ... ({len(words)} ranges)" if len(words) > most else "")
