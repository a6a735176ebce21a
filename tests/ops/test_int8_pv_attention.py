"""Attention on the INT8 cache: every form of the kernels, on every lane map, against float64 attention within what the
quantization may cost, and bit for bit in the integers against the model in NumPy."""

import math
import re
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace

import numpy as np
import pytest

from kernelbook import kv_cache, pv_model, toolchain
from kernelbook.backends import Source
from kernelbook.backends.cpu import CpuBackend
from kernelbook.ops import int8_pv as op
from kernelbook.ops.int8_pv import Form
from kernelbook.stats import errors
from kernelbook.validation import validate

LENGTHS = (0, 1, 63, 64, 65, 257, 700)
CHANCE = 1e-9  # that V at random takes a right kernel beyond the bound
WAVE = {"mma": 32, "mfma": 64, "mmac": 64}


# ---- problems

@dataclass(frozen=True)
class Case:
    """A form on a problem: what is compiled, then what it is given. how: what its prefill takes besides."""

    form: Form
    head_dim: int = 64
    kv_heads: int = 2
    group: int = 3
    block_size: int = 16
    lengths: tuple[int, ...] = LENGTHS
    queries: int = 1
    how: dict = field(default_factory=dict, hash=False)

    def __str__(self):
        f = self.form
        words = [f.pv, f.matrix, "swapped" if f.swapped else "", f"d{self.head_dim}", f"g{self.group}",
                 f"p{f.partition}", f"s{f.scale_tokens}", *(f"{k}{v}" for k, v in self.how.items())]
        return "-".join(filter(None, words))

    def problem(self, seed=0):
        """q and a cache of unit variance, V of each token times 2**-x with x up to 4, pages in a random order."""
        rng = np.random.default_rng(seed)
        keys, values = ([rng.standard_normal((n, self.kv_heads, self.head_dim), np.float32) for n in self.lengths]
                        for _ in range(2))
        for v in values:
            v *= np.exp2(-4 * rng.random((*v.shape[:2], 1), np.float32))
        blocks = max(1, -(-max(self.lengths) // self.block_size))
        tables = rng.permutation(len(self.lengths) * blocks).reshape(-1, blocks)
        heads = self.kv_heads * self.group
        q = rng.standard_normal((len(self.lengths), self.queries, heads, self.head_dim), np.float32)
        return q, kv_cache.quantize(keys, values, self.block_size, tables)


def cases(*several, on_gpu=()):
    """Parameters "backend, case": on the simulator, and those that a GPU has the instructions for on a GPU; there,
    prefill is left to choose warpgroup instructions and is kept from them."""
    found = [pytest.param(f"cpu-{WAVE[case.form.matrix]}", case, id=f"cpu-{case}") for case in several]
    for case in [*several, *on_gpu]:
        kept = [replace(case, how=case.how | {"wgmma": False})] if case.how and case.form.scale_tokens <= 64 else []
        if case.form.matrix == "mma":
            found += [pytest.param("cuda", c, id=f"cuda-{c}", marks=pytest.mark.gpu) for c in [case, *kept]]
    return pytest.mark.parametrize("backend,case", found, indirect=["backend"])


def mma(pv="int8", swapped=True, **form):
    return Form(pv, "mma", swapped, trace=True, **form)


def mfma(pv="int8", swapped=False, **form):
    return Form(pv, "mfma", swapped, trace=True, **form)


def mmac(pv="int8", swapped=False, **form):
    return Form(pv, "mmac", swapped, trace=True, **form)


# Every P V, on every map, swapped and not; with them, sizes, partitions and groups that are compiled in.
DECODE = [
    Case(mma()),
    Case(mma(swapped=False)),
    Case(mma(partition=128, scale_tokens=128), 96, group=4, block_size=32),
    Case(mma(scale_tokens=256), 256, group=1, block_size=544),
    Case(mma("uint8", partition=128, scale_tokens=128), group=8),
    Case(mma("uint8", False, scale_tokens=64)),
    Case(mma("uint8_offset"), 128, kv_heads=1),
    Case(mma("bf16", partition=128), 128, group=4),
    Case(mma("bf16", False)),
    Case(mma("bf16_dequantized"), 96),
    Case(mma("bf16_pages"), block_size=48),
    Case(mfma()),
    Case(mfma(swapped=True, partition=512, scale_tokens=512), 96, group=4, block_size=32),
    Case(mfma("uint8_offset", scale_tokens=128), 128, kv_heads=1, block_size=544),
    Case(mfma("bf16"), group=8),
    Case(mfma("bf16_dequantized", True)),
    Case(mmac()),
    Case(mmac(swapped=True, scale_tokens=64), 256, kv_heads=1, group=6, block_size=48),
    Case(mmac("uint8_offset", True)),
    Case(mmac("bf16", True, partition=128), 96, kv_heads=1),
    Case(mmac("bf16_pages"), 128, kv_heads=1, block_size=32),
]
BASE = [Case(mma()), Case(mfma()), Case(mmac())]
GATED = [*BASE, Case(mma("uint8", partition=128, scale_tokens=128)), Case(mmac("uint8_offset", True))]
WRONG = {"grouping": "logical", "read": 8, "common_scale": True}
CAUGHT_BY = {"grouping": "scales belong to their fragment", "read": "reads every token",
             "common_scale": "scale of every token"}

# 7 queries of 3 heads are 21 rows: a wave's 16, and 5.
PREFILL = [
    Case(Form("int8", "mma"), queries=7, how={"waves": 4, "splits": 1}),
    Case(Form("int8", "mma"), queries=7, how={"waves": 4, "splits": 3}),
    Case(Form("uint8", "mma"), 96, kv_heads=1, group=4, queries=20, how={"waves": 8, "splits": 1}),
    Case(Form("uint8_offset", "mma", scale_tokens=64), 128, group=1, queries=17, block_size=48,
         how={"waves": 4, "splits": 3}),
    Case(Form("bf16", "mma"), queries=7, how={"waves": 4, "splits": 1}),
    Case(Form("bf16_dequantized", "mma"), queries=7, how={"waves": 4, "splits": 3}),
    Case(Form("bf16_pages", "mma"), queries=7, block_size=544, how={"waves": 4, "splits": 1}),
    Case(Form("int8", "mfma"), queries=7, how={"waves": 4, "splits": 1}),
    Case(Form("int8", "mfma"), queries=7, how={"waves": 4, "splits": 3}),
    Case(Form("bf16_dequantized", "mfma"), queries=7, how={"waves": 4, "splits": 1}),
    Case(Form("int8", "mmac", scale_tokens=64), 256, kv_heads=1, queries=45, block_size=32,
         how={"waves": 8, "splits": 1}),
    Case(Form("uint8_offset", "mmac"), kv_heads=1, group=8, queries=9, how={"waves": 4, "splits": 3}),
    Case(Form("bf16", "mmac"), 96, queries=7, how={"waves": 4, "splits": 1}),
]
PREFILL_BASE = [PREFILL[0], PREFILL[7]]
WARPGROUPS = [  # sizes and forms of Hopper's kernel, that a GPU compiles besides
    Case(Form("int8", "mma"), 128, queries=50, how={"waves": 12, "splits": 1}),
    Case(Form("int8", "mma", scale_tokens=64), 256, queries=50, block_size=48, how={"waves": 8, "splits": 3}),
    Case(Form("uint8", "mma"), 64, group=1, queries=70, block_size=544, how={"waves": 4, "splits": 3}),
    Case(Form("uint8", "mma", scale_tokens=64), 128, kv_heads=1, queries=33, how={"waves": 8, "splits": 1}),
    Case(Form("int8", "mma", scale_tokens=128), 64, queries=50, how={"waves": 12, "splits": 1}),
]


def run(backend, form, q, cache, method="decode", **how):
    """Output of one launch, and the Attention that gave it. The output is poisoned before."""
    attention = op.Attention(backend, op.on_device(backend, cache), form)
    return launched(backend, attention, q, method, **how), attention


def launched(backend, attention, q, method="decode", **how):
    out = backend.empty(q.shape, np.float32)
    assert np.isnan(backend.numpy(out)).all(), "poisoned"
    getattr(attention, method)(backend.array(q), out=out, **how)()
    return backend.numpy(out)


@pytest.fixture(scope="module", autouse=True)
def compiled(request):
    """Kernels of the chosen cases are compiled side by side: in turn they would take most of this file's time."""
    wanted = set()
    for item in request.session.items:
        parameters = getattr(item, "callspec", None) and item.callspec.params
        if item.path == request.path and parameters and "case" in parameters and parameters["backend"] != "cuda":
            case = parameters["case"]
            wanted.add((case.form, case.head_dim, case.how.get("waves")))

    def build(form, head_dim, waves):
        backend = CpuBackend(WAVE[form.matrix])
        q, cache = Case(form, head_dim, lengths=(1,)).problem()
        attention = op.Attention(backend, op.on_device(backend, cache), form)
        if waves:
            attention.prefill(backend.array(q), waves=waves)
        else:
            attention.decode(backend.array(q))

    with ThreadPoolExecutor(2) as pool:
        list(pool.map(lambda key: build(*key), sorted(wanted, key=str)))


# ---- what is right

def float64(q, cache, causal_offset=None, softmax_scale=None):
    """For every sequence and KV head: the place in q of its rows, V codes [head_dim, tokens] and scales, and in float64
    of the quantized query: scores to base 2 [rows, tokens], -inf where a token is not seen, and their softmax."""
    codes, scales = kv_cache.quantize_vectors(q)
    quantized = codes * scales[..., None].astype(np.float64)
    factor = (q.shape[-1] ** -0.5 if softmax_scale is None else softmax_scale) * math.log2(math.e)
    for place, queries, k_codes, k_scales, v_codes, v_scales in pv_model.by_kv_head(quantized, cache):
        tokens, (count, group, head_dim) = np.arange(len(k_scales)), queries.shape
        s = queries.reshape(-1, head_dim) @ (k_codes * k_scales[:, None].astype(np.float64)).T * factor
        if causal_offset is not None:
            first = np.broadcast_to(causal_offset, cache.batch)[place[0]]
            s[tokens > first + np.repeat(np.arange(count), group)[:, None]] = -np.inf
        top = s.max(axis=1, initial=-np.inf, keepdims=True)
        p = np.exp2(s - np.where(np.isfinite(top), top, 0))
        total = p.sum(axis=1, keepdims=True)
        yield place, v_codes, v_scales, s, np.divide(p, total, out=np.zeros_like(p), where=total > 0)


def relative_error(scores):
    """Of a weight in float32: exp2, products and a quotient to an ulp or two each, scores to an ulp of theirs."""
    return 2.0 ** -22 * (4 + np.abs(scores, where=np.isfinite(scores), out=np.zeros_like(scores)).max(initial=0))


SMALLEST = 2.0 ** -100  # that 6_prefill_wgmma.cu takes a scale of V for, whose logarithm it adds to the score


def assert_right(out, q, cache, form, **seen):
    """out against float64 attention. The codes of the query move every output by an amount that is known exactly. A
    weight's code is off by up to half a step (bf16: 2**-9 of itself, and so is V made in bf16), and as V's signs are
    independent of it, Hoeffding's inequality bounds the sum. Rows that see nothing are exactly 0."""
    codes, scales = kv_cache.quantize_vectors(q)
    exact = op.reference(q, cache, **seen)
    allowed = np.abs(exact - op.reference(codes * scales[..., None].astype(np.float64), cache, **seen))
    certain = math.sqrt(2 * math.log(2 * q.size / CHANCE))
    for place, v_codes, v_scales, s, p in float64(q, cache, **seen):
        weights, v = p * v_scales, v_codes.T.astype(np.float64)
        half_step = weights * 2.0 ** (-9 if form.pv == "bf16" else -8)
        if form.is_integer and len(v):
            group = pv_model.groups(form.tokens, len(v), form.scale_tokens)
            top = [np.max(weights, axis=1, where=group == g, initial=0) for g in range(group.max() + 1)]
            half_step = np.stack(top, axis=1)[:, group] / form.largest / 2
        logarithms = np.abs(np.log2(np.maximum(v_scales, SMALLEST))).max(initial=0)
        relative = relative_error(s) + 2.0 ** -24 * len(v) + 2.0 ** -22 * logarithms
        rounding = relative * (weights @ np.abs(v)) + 256 * SMALLEST * p.any(axis=1)[:, None]
        spread = certain * np.sqrt(half_step ** 2 @ v ** 2)
        allowed[place] += (spread + rounding).reshape(allowed[place].shape)
    assert np.isfinite(out).all()
    distance = np.abs(out - exact)
    assert (distance <= allowed).all(), (distance / np.where(allowed > 0, allowed, np.finfo(float).tiny)).max()
    assert not allowed.any() or distance.max() > 0, "a bound on nothing"


def assert_traced(attention, q, cache, **seen):
    """What the kernel computed on its way: its weights are W = P sV of their partition to float32's precision; from
    them follow the codes and the sums of every scale, bit for bit."""
    form, trace = attention.form, attention.trace
    for place, v_codes, v_scales, s, _ in float64(q, cache, **seen):
        of_rows = (x[place].reshape(len(s), *x.shape[3:]) for x in (trace.weights, trace.codes, trace.sums))
        weights, codes, sums = of_rows
        for first in range(0, s.shape[1], form.partition):
            part = slice(first, min(first + form.partition, s.shape[1]))
            top = s[:, part].max(axis=1, keepdims=True)
            p = np.exp2(s[:, part] - np.where(np.isfinite(top), top, 0))
            expected = p / np.maximum(p.sum(axis=1, keepdims=True), np.finfo(float).tiny)
            if form.pv not in ("bf16_dequantized", "bf16_pages") and not form.common_scale:
                expected *= v_scales[part]
            found = np.ascontiguousarray(weights[:, part])
            assert np.allclose(found, expected, rtol=relative_error(s), atol=1e-37)
            if not form.is_integer:
                bits = found.view(np.uint32)
                assert np.array_equal(codes[:, part], (bits + 0x7fff + (bits >> 16 & 1)) >> 16)
                continue
            model = pv_model.pv(found, v_codes[:, part], form.tokens, largest=form.largest,
                                scale_tokens=form.scale_tokens, grouping=form.grouping, read=form.read)
            assert np.array_equal(codes[:, part], model.codes)
            steps = np.arange(len(model.sums)) * form.tokens.instruction.K // form.scale_tokens
            for scale in range(steps.max() + 1):
                found = sums[:, first // form.scale_tokens + scale]
                assert np.array_equal(found, model.sums[steps == scale].sum(axis=0))


# ---- decode

@cases(*DECODE)
def test_decode(backend, case):
    q, cache = case.problem()
    out, attention = run(backend, case.form, q, cache)
    assert_right(out, q, cache, attention.form)
    assert_traced(attention, q, cache)
    assert (out[0] == 0).all(), "a sequence of length 0"
    _, v = cache.dequantize(1)
    if case.form.is_integer:  # of one token: its weight is 1, its code the largest
        assert np.allclose(out[1, 0], v[0].repeat(case.group, axis=0), rtol=1e-6, atol=0)


@cases(Case(mma("uint8", partition=128, scale_tokens=128)), Case(mma(partition=128, scale_tokens=128), 96),
       Case(mmac("bf16", True, partition=128), 96))
def test_partitions_that_are_many(backend, case):
    """18 of them, which the merge divides among its threads; sequences of fewer and of none."""
    q, cache = replace(case, kv_heads=1, group=1, lengths=(2200, 0, 130)).problem()
    out, attention = run(backend, case.form, q, cache)
    assert_right(out, q, cache, attention.form)
    assert (out[1] == 0).all()


@pytest.mark.slow
@cases(Case(mma(partition=1024, scale_tokens=1024), kv_heads=1, lengths=(1100, 1024, 3)))
def test_partitions_of_1024_tokens(backend, case):
    q, cache = case.problem()
    out, attention = run(backend, case.form, q, cache)
    assert_right(out, q, cache, attention.form)
    assert_traced(attention, q, cache)


@cases(*(replace(case, **shape) for case in BASE for shape in (
    {"kv_heads": 3, "group": 1, "block_size": 544, "lengths": (700, 1)},
    {"kv_heads": 1, "group": 4, "block_size": 48, "lengths": (255, 256, 257), "queries": 3},
    {"kv_heads": 1, "group": 16, "block_size": 32, "lengths": (65, 700), "queries": 2},
    {"kv_heads": 2, "group": 6, "block_size": 64, "lengths": (513,), "queries": 2},
    {"kv_heads": 1, "group": 8, "block_size": 16, "lengths": 33 * (20,)},
)))
def test_shapes(backend, case):
    q, cache = case.problem()
    out, attention = run(backend, case.form, q, cache)
    assert_right(out, q, cache, attention.form)
    assert_traced(attention, q, cache)


@cases(*(replace(case, queries=3) for case in BASE))
@pytest.mark.parametrize("causal_offset", [(3, 0, 60, -2, -1, 254, 100), -3, 500, (7, 0, -9, 2**40, 63, -2**40, 256)],
                         ids=str)
def test_a_query_sees_what_lies_up_to_its_offset(backend, case, causal_offset):
    q, cache = case.problem()
    seen = {"causal_offset": np.array(causal_offset), "softmax_scale": 0.3}
    out, attention = run(backend, case.form, q, cache, **seen)
    assert_right(out, q, cache, attention.form, **seen)
    assert_traced(attention, q, cache, **seen)
    last = np.broadcast_to(causal_offset, 7)[:, None] + np.arange(3)
    nothing = (last < 0) | (cache.lengths[:, None] == 0)
    assert nothing.any() and (out[nothing] == 0).all() and out[~nothing].any(axis=-1).all()


@cases(*BASE[:2])
def test_the_kernels_own_choice_and_no_trace_change_no_bit(backend, case):
    """A form that leaves open what the backend chooses, and one launch after another with another q."""
    q, cache = case.problem()
    out, _ = run(backend, case.form, q, cache)
    attention = op.Attention(backend, op.on_device(backend, cache), Form())
    assert attention.form == replace(case.form, trace=False) and attention.trace is None
    q_device = backend.array(q)
    launch = attention.decode(q_device)
    first = launch()
    assert np.array_equal(backend.numpy(first), out)
    q_device[...] = backend.array(q[::-1].copy())
    assert launch() is first
    assert np.array_equal(backend.numpy(first), run(backend, case.form, q[::-1].copy(), cache)[0])


def test_mfma_and_mmac_agree():
    """Their lanes hold other parts of the scores, and their sums over tokens run in another order; the integers are the
    same wherever both round a weight to the same code."""
    backend, case = CpuBackend(64), Case(mfma())
    q, cache = case.problem()
    (a, mfma_), (b, mmac_) = (run(backend, form, q, cache) for form in (mfma(), mmac()))
    exist = np.arange(mfma_.trace.codes.shape[-1]) < cache.lengths[:, None, None, None]
    differ = (mfma_.trace.codes != mmac_.trace.codes) & exist
    assert np.abs(np.where(differ, mfma_.trace.codes - mmac_.trace.codes, 0)).max() <= 1
    assert np.count_nonzero(differ) <= 1e-4 * np.count_nonzero(np.broadcast_to(exist, differ.shape))
    same = ~differ.any(axis=-1).any(axis=(1, 2))
    assert same.sum() >= 5
    for sequence in np.flatnonzero(same):
        scales = -(-int(cache.lengths[sequence]) // 64) * 2
        assert np.array_equal(mfma_.trace.sums[sequence, :, :, :scales], mmac_.trace.sums[sequence, :, :, :scales])
    assert np.allclose(a[same], b[same], rtol=1e-5, atol=2e-6)


@cases(*(case for case in DECODE if case.form.is_integer))
def test_sums_at_their_largest(backend, case):
    """All codes 127 or -127, all scores equal: a step of 32 tokens reaches 32 * 127 * 127 = 516128 (claim P04), with
    unsigned weights 32 * 255 * 127; a scale of more steps as many times that, and no more."""
    sign = np.where(np.arange(case.head_dim) % 3 == 0, -1, 1).astype(np.float32)
    ones = np.ones((512, case.kv_heads, case.head_dim), np.float32)
    cache = kv_cache.quantize([ones], [3 * ones * sign], case.block_size)
    q = np.ones((1, 1, case.kv_heads * case.group, case.head_dim), np.float32)
    out, attention = run(backend, case.form, q, cache)
    largest = case.form.scale_tokens * case.form.largest * 127
    assert case.form.pv != "int8" or 32 * case.form.largest * 127 == 516128
    assert (attention.trace.sums == largest * sign.astype(int)).all()
    assert np.allclose(out, 3 * sign, rtol=1e-6)


@cases(*BASE)
def test_rows_and_pages_of_zeros_and_scores_that_are_huge(backend, case):
    q, cache = case.problem()
    q[3:, :, 1] = 0
    out, attention = run(backend, case.form, q, cache)
    assert_right(out, q, cache, attention.form)  # a row of zeros weighs all tokens alike
    assert_traced(attention, q, cache)

    huge, _ = run(backend, case.form, q, cache, softmax_scale=1e4)
    assert np.isfinite(huge).all()
    assert_right(huge, q, cache, attention.form, softmax_scale=1e4)

    for zero in ("v_codes", "v_scales"):
        nothing = replace(cache, **{zero: np.zeros_like(getattr(cache, zero))})
        out, _ = run(backend, case.form, q, nothing)
        assert (out == 0).all()


# Codes, scales and entries of the block table.
STALE = {"zeros": (0, 0.0, 0), "NaN": (-128, np.nan, -1), "infinities": (127, -np.inf, 2**31 - 1)}


def with_stale(cache, kind):
    """The cache with something else behind the lengths: in pages, also of a block's rest, and in block tables."""
    code, scale, page = STALE[kind]
    behind = np.arange(cache.block_tables.shape[1]) * cache.block_size >= cache.lengths[:, None]
    tables = np.where(behind, np.int32(page), cache.block_tables)
    stale = replace(cache, k_codes=np.full_like(cache.k_codes, code), v_codes=np.full_like(cache.v_codes, code),
                    k_scales=np.full_like(cache.k_scales, scale), v_scales=np.full_like(cache.v_scales, scale),
                    block_tables=tables)
    for sequence, length in enumerate(cache.lengths):
        pages, offsets = cache.slots(sequence, 0, int(length)).T
        for name in ("k_codes", "k_scales", "v_scales"):
            getattr(stale, name)[pages, :, offsets] = getattr(cache, name)[pages, :, offsets]
        stale.v_codes[pages, :, :, offsets] = cache.v_codes[pages, :, :, offsets]
    return stale


@cases(*BASE, *(case for case in DECODE if case.form.pv in ("bf16_dequantized", "bf16_pages")), *PREFILL,
       on_gpu=WARPGROUPS)
def test_what_lies_behind_the_lengths_changes_no_bit(backend, case):
    """Also behind what a causal query sees: its last token is one of the cache's."""
    q, cache = case.problem()
    method = "prefill" if case.how else "decode"
    offsets = cache.lengths - case.queries + 2
    outs = [run(backend, case.form, q, with_stale(cache, kind), method, causal_offset=offsets, **case.how)[0]
            for kind in STALE]
    assert np.isfinite(outs[0]).all()
    assert np.array_equal(outs[1], outs[0]) and np.array_equal(outs[2], outs[0])


@cases(*BASE, *PREFILL_BASE)
def test_sequences_that_share_pages(backend, case):
    q, cache = replace(case, lengths=(100, 300)).problem()
    method = "prefill" if case.how else "decode"
    shared = replace(cache, block_tables=cache.block_tables[[1, 1]], lengths=np.array([200, 300], np.int32))
    out, _ = run(backend, case.form, q, shared, method, **case.how)
    for i in (0, 1):
        alone = replace(shared, block_tables=shared.block_tables[i:i + 1], lengths=shared.lengths[i:i + 1])
        found, _ = run(backend, case.form, q[i:i + 1], alone, method, **case.how)
        assert np.allclose(found[0], out[i], rtol=1e-6, atol=1e-7)  # one may be merged of parts and the other not


@cases(*BASE, *PREFILL_BASE)
def test_a_query_that_is_not_finite_harms_no_other_row(backend, case):
    q, cache = case.problem()
    method = "prefill" if case.how else "decode"
    clean, attention = run(backend, case.form, q, cache, method, **case.how)
    q[5, 0, 1, 7], q[6, 0, 5] = np.nan, np.inf
    others = np.ones(q.shape[:3], bool)
    others[5, 0, 1] = others[6, 0, 5] = False
    assert np.array_equal(launched(backend, attention, q, method, **case.how)[others], clean[others])


# ---- wrong on purpose

def wrong(case, name):
    return replace(case, form=replace(case.form, **{name: WRONG[name]}))


@cases(*(wrong(Case(mmac()), name) for name in WRONG), wrong(Case(mma()), "grouping"),
       on_gpu=[wrong(Case(mma()), name) for name in ("read", "common_scale")])
def test_wrong_forms_are_wrong_by_much_and_caught(backend, case):
    """They do what they say, bit for bit; where V differs much from token to token that is at least 20 times as wrong
    as the right form, and the gate refuses them by the check that is made for the fault."""
    form = case.form
    name = next(name for name, value in WRONG.items() if getattr(form, name) == value)
    q, cache = case.problem()
    out, attention = run(backend, form, q, cache)
    assert_traced(attention, q, cache)

    q, cache = replace(case, lengths=(2048,)).problem()
    step = np.arange(2048) // 8 % 2  # the step of a tile that owns a token, of which one has V 1000 times smaller
    pages, offsets = cache.slots(0, 0, 2048).T
    cache.v_scales[pages, :, offsets] *= np.where(step == 0, 1e-3, 1).astype(np.float32)[:, None]
    exact = op.reference(q, cache)
    right = replace(form, grouping="fragment", read=16, common_scale=False)
    of_wrong, of_right = (errors(run(backend, f, q, cache)[0], exact) for f in (form, right))
    assert of_wrong.nonfinite == 0
    assert of_wrong.relative_frobenius > 20 * of_right.relative_frobenius, (of_wrong, of_right)

    report = gate(backend, form)
    assert CAUGHT_BY[name] in report.caught_by, f"{name}:\n{report}"


def gate(backend, form, method="decode", **how):
    tokens = Form(form.pv, form.matrix, form.swapped).on(backend).tokens
    if method == "prefill" and how.get("wgmma", True) and getattr(backend, "arch", None) == "90a":
        tokens = replace(tokens, load=4)  # warpgroup instructions read V themselves: a step has 32 neighbouring tokens
    return validate(lambda q, cache: run(backend, form, q, cache, method, **how)[0], tokens,
                    partition=form.partition, largest=form.largest, scale_tokens=form.scale_tokens)


@cases(*GATED, *PREFILL_BASE)
def test_right_forms_pass_the_gate(backend, case):
    report = gate(backend, case.form, "prefill" if case.how else "decode", **case.how)
    assert report.passed, report


# ---- prefill

def of_prefill(form):
    """The form as the bound of a prefill takes it: in its orientation, and with the step of a whole tile, which is no
    smaller than that of any part of it, for warpgroup instructions own other tokens."""
    return replace(form, swapped=form.matrix == "mfma",
                   scale_tokens=max(64, form.scale_tokens) if form.is_integer else 32)


@cases(*PREFILL, on_gpu=WARPGROUPS)
@pytest.mark.parametrize("offset", ["after a history", "negative", "none"])
def test_prefill(backend, case, offset):
    q, cache = case.problem()
    seen = {"after a history": {"causal_offset": cache.lengths - case.queries},
            "negative": {"causal_offset": np.array((0, 0, -3, 70, -20, 250, 300)), "softmax_scale": 0.3},
            "none": {}}[offset]
    out, _ = run(backend, case.form, q, cache, "prefill", **seen, **case.how)
    assert_right(out, q, cache, of_prefill(case.form), **seen)
    assert (out[0] == 0).all()
    if offset == "negative":
        assert (out[2, :3] == 0).all() and out[2, 3:].any(axis=-1).all()


@cases(*PREFILL, on_gpu=WARPGROUPS)
def test_scales_of_values_from_zero_to_large(backend, case):
    """A token whose values vanish still takes its share of the softmax."""
    q, cache = case.problem()
    scales = cache.v_scales * np.exp2(np.random.default_rng(2).integers(-30, 10, cache.v_scales.shape))
    scales[np.random.default_rng(3).random(scales.shape) < 0.3] = 0
    cache = replace(cache, v_scales=scales.astype(np.float32))
    out, _ = run(backend, case.form, q, cache, "prefill", **case.how)
    assert_right(out, q, cache, of_prefill(case.form))


@cases(*PREFILL_BASE)
@pytest.mark.parametrize("shape", [
    {"kv_heads": 3, "group": 1, "queries": 130, "lengths": (300, 130)},  # more rows than a block
    {"kv_heads": 1, "group": 6, "queries": 2, "lengths": 20 * (70,), "block_size": 48},
    {"kv_heads": 2, "group": 16, "queries": 1, "lengths": (1, 640), "block_size": 64},
], ids=str)
def test_shapes_of_prefill(backend, case, shape):
    case = replace(case, **shape)
    q, cache = case.problem()
    seen = {"causal_offset": cache.lengths - case.queries}
    for splits in (1, 2, 16):
        out, _ = run(backend, case.form, q, cache, "prefill", **seen, waves=4, splits=splits)
        assert_right(out, q, cache, of_prefill(case.form), **seen)


@cases(*PREFILL_BASE)
def test_prefill_chooses_waves_and_splits(backend, case):
    """As many splits as there are would leave some without tiles; the choice gives the same to rounding."""
    q, cache = case.problem()
    seen = {"causal_offset": cache.lengths - case.queries}
    given, attention = run(backend, case.form, q, cache, "prefill", **seen, **case.how)
    chosen = launched(backend, attention, q, "prefill", **seen, wgmma=case.how.get("wgmma"))  # which groups otherwise
    assert np.allclose(chosen, given, rtol=0, atol=2e-3)
    assert_right(chosen, q, cache, of_prefill(case.form), **seen)


def test_splits_fill_the_multiprocessors():
    assert op.choose_splits(1, 1, 132) == 1
    assert op.choose_splits(132, 256, 132) == 1
    assert op.choose_splits(1, 10**4, 132) == op.MAX_SPLITS
    for blocks in (1, 3, 33, 40, 67, 100, 131, 133, 500):
        for tiles in (1, 2, 7, 64, 300):
            splits = op.choose_splits(blocks, tiles, 132)
            assert 1 <= splits <= min(tiles, op.MAX_SPLITS), (blocks, tiles)
            rounds = [-(-blocks * s // 132) * (-(-tiles // s) + op.PART_COST) for s in (1, splits)]
            assert rounds[1] <= rounds[0]


@cases(*PREFILL_BASE)
def test_prefill_is_decode_of_the_same_rows(backend, case):
    """They quantize weights relative to other numbers, which cancel: groups have the same step, and codes differ only
    where float32 rounds a weight to either side of a half. A row's outputs differ by a few such steps at most."""
    q, cache = case.problem()
    seen = {"causal_offset": cache.lengths - case.queries}
    prefill, _ = run(backend, case.form, q, cache, "prefill", **seen, **case.how | {"wgmma": False})
    decode, _ = run(backend, replace(case.form, trace=True, swapped=case.form.matrix == "mma"), q, cache, **seen)
    exact = op.reference(q, cache, **seen)
    assert errors(prefill, decode).relative_frobenius < 0.05 * errors(prefill, exact).relative_frobenius


# ---- order, and offsets beyond 31 bits

@cases(*BASE, *PREFILL)
def test_order_of_lanes_waves_and_blocks_changes_no_bit(backend, case):
    """Decode, prefill and the merge: a missing barrier would show in some order."""
    if not backend.simulated:
        pytest.skip("the order of a GPU's threads cannot be chosen")
    q, cache = case.problem()
    how = {"causal_offset": cache.lengths - case.queries, **case.how}
    method = "prefill" if case.how else "decode"
    outs = [run(CpuBackend(backend.wave, order=order), case.form, q, cache, method, **how)[0] for order in range(3)]
    for out in outs[1:]:
        assert np.array_equal(out, outs[0])


def test_offsets_past_two_to_the_31(simulator):
    """Pages of more than 2^31 codes, of which a sequence has the first and the last; the simulator would report an int
    that overflows, or an access outside. K and V lie in the same memory, to spare some."""
    block_size, head_dim = 544, 64
    blocks = 2**31 // (block_size * head_dim) + 2
    codes = simulator.empty((blocks, block_size * head_dim), np.int8)
    scales = simulator.empty((blocks, 1, block_size), np.float32)
    assert codes.size > 2**31
    rng = np.random.default_rng(0)
    used = [0, blocks - 1]
    codes[used] = rng.integers(-127, 128, (2, block_size * head_dim))
    scales[used] = rng.random((2, 1, block_size), np.float32) / 127

    def cache(pages, tables):
        layouts = ((1, block_size, head_dim), (1, head_dim, block_size))
        k, v = (codes[pages].reshape(-1, *shape) for shape in layouts)
        return kv_cache.PagedCache(k, scales[pages], v, scales[pages], np.array([tables], np.int32),
                                   np.array([900], np.int32))

    large, small = cache(slice(None), used), cache(used, [0, 1])
    large = replace(large, **{name: simulator.array(getattr(large, name)) for name in ("block_tables", "lengths")})
    q = rng.standard_normal((1, 2, 3, head_dim), np.float32)
    for case, method in ((BASE[0], "decode"), (PREFILL_BASE[0], "prefill")):
        expected, _ = run(simulator, case.form, q, small, method, **case.how)
        out = launched(simulator, op.Attention(simulator, large, case.form), q, method, **case.how)
        assert np.array_equal(out, expected) and out.any()


# ---- bad input

def test_forms_that_do_not_exist():
    for change, words in (
        ({"pv": "int4"}, "pv is 'int4'; expected one of int8, uint8, uint8_offset, bf16"),
        ({"matrix": "wgmma"}, "matrix is 'wgmma'"),
        ({"grouping": "tokens"}, "grouping is 'tokens'"),
        ({"read": 4}, "read is 4"),
        ({"scale_tokens": 16}, "scale_tokens is 16"),
        ({"partition": 64}, "partition is 64"),
        ({"partition": 128, "scale_tokens": 256}, "scale_tokens = 256; .* at most a partition, 128"),
        ({"grouping": "logical", "scale_tokens": 64}, "grouping 'logical' with scale_tokens = 64"),
        ({"pv": "bf16", "scale_tokens": 64}, "pv 'bf16' has no integer weights"),
        ({"pv": "bf16", "grouping": "logical"}, "pv 'bf16' has no integer weights"),
        ({"pv": "bf16_dequantized", "common_scale": True}, "has no integer weights"),
        ({"pv": "bf16_pages", "read": 8}, "pv 'bf16_pages' does not read them"),
        ({"partition": 256.0}, "partition is 256.0; expected one of 128"),
        ({"swapped": "no"}, "swapped is 'no'; expected one of None"),
        ({"common_scale": 1}, "common_scale is 1"),
        ({"trace": 2}, "trace is 2"),
        ({"pv": "uint8", "matrix": "mfma"}, "mixed-sign instruction, which mfma has not; take 'uint8_offset'"),
    ):
        with pytest.raises(ValueError, match=words):
            Form(**change)


@pytest.fixture
def refuses(backend, monkeypatch):
    """Whatever is bad is refused before a kernel is compiled, and so before one is launched."""
    def compile(*_):
        raise AssertionError("compiled")

    def check(kind, words, call):
        with monkeypatch.context() as patch:
            patch.setattr(type(backend), "compile", compile)
            with pytest.raises(kind, match=words):
                call()
    return check


def test_bad_caches(backend, refuses):
    _, host = Case(Form(), lengths=(20, 5)).problem()
    cache = op.on_device(backend, host)

    def attention(form=Form(), **change):
        return lambda: op.Attention(backend, replace(cache, **change), form)

    def changed(name, place, value):
        array = getattr(host, name).copy()
        array[place] = value
        return {name: backend.array(array)}

    page = int(host.block_tables[1, 0])
    for value in (np.nan, np.inf, -1.0):
        refuses(ValueError, rf"v_scales\[{page}, 1, 4\], of token 4 and KV head 1 of sequence 1, is {value}",
                attention(**changed("v_scales", (page, 1, 4), value)))
        refuses(ValueError, rf"k_scales\[{page}, 0, 0\].*is {value}",
                attention(**changed("k_scales", (page, 0, 0), value)))
    refuses(ValueError, r"block_tables\[0, 1\] = 4; the cache has the pages 0 to 3",
            attention(**changed("block_tables", (0, 1), 4)))
    refuses(ValueError, r"block_tables\[1, 0\] = -1", attention(**changed("block_tables", (1, 0), -1)))
    refuses(ValueError, r"lengths\[0\] = 33; expected 0 to 32", attention(**changed("lengths", 0, 33)))
    refuses(ValueError, r"lengths\[1\] = -1", attention(**changed("lengths", 1, -1)))
    refuses(ValueError, "v_codes has shape", attention(v_codes=cache.k_codes))
    refuses(ValueError, "head_dim = 32", attention(k_codes=backend.empty((4, 2, 16, 32), np.int8)))
    refuses(ValueError, "k_scales has strides", attention(k_scales=backend.empty((4, 2, 32), np.float32)[:, :, ::2]))
    memory = backend.empty(129, np.float32)
    refuses(ValueError, "v_scales starts at address .*; expected a multiple of 16",
            attention(v_scales=memory[1:].reshape(4, 2, 16)))
    refuses(TypeError, "lengths has dtype int64", attention(lengths=backend.array(host.lengths.astype(np.int64))))
    refuses(TypeError, "v_codes has dtype uint8", attention(v_codes=cache.v_codes.view(np.uint8)))
    refuses(TypeError, "k_codes is a ndarray; expected an array on", attention(k_codes=host.k_codes))
    refuses(TypeError, "block_tables is a list", attention(block_tables=[[0]]))
    lanes = backend.wave
    other = "mfma" if lanes == 32 else "mma"
    refuses(ValueError, f"matrix '{other}' takes waves of {96 - lanes} lanes; .* has {lanes}",
            attention(Form(matrix=other)))
    if lanes == 64:
        refuses(ValueError, "'uint8' needs a mixed-sign instruction", attention(Form("uint8")))


@pytest.mark.parametrize("method", ["decode", "prefill"])
def test_bad_queries(backend, refuses, method):
    q, host = Case(Form(), lengths=(20, 5)).problem()
    cache, device = op.on_device(backend, host), backend.array(q)
    attention = op.Attention(backend, cache)

    def call(q=device, **how):
        return lambda: getattr(attention, method)(q, **how)

    memory = backend.empty(q.size + 4, np.float32)
    scales = backend.array(np.zeros(q.size, np.float32))
    inside = op.Attention(backend, replace(cache, k_scales=scales[:128].reshape(4, 2, 16)))
    refuses(TypeError, "q is a ndarray; expected an array on", call(q)) if backend.simulated else None
    refuses(TypeError, "q is a list", call([1.0]))
    refuses(TypeError, "q has dtype float64", call(backend.array(q.astype(np.float64))))
    refuses(ValueError, r"q has shape \(1, 1, 6, 64\); expected \(2, 1, 6, 64\)", call(device[:1]))
    refuses(ValueError, r"q has shape \(2, 6, 64\); expected", call(device.reshape(2, 6, 64)))
    refuses(ValueError, r"q has shape \(2, 1, 6, 32\)", call(backend.empty((2, 1, 6, 32), np.float32)))
    refuses(ValueError, "q has strides", call(backend.empty((2, 1, 6, 128), np.float32)[..., ::2]))
    refuses(ValueError, "q starts at address .* multiple of 16", call(memory[1:1 + q.size].reshape(q.shape)))
    refuses(ValueError, "q has 5 heads; expected a multiple of the cache's 2",
            call(backend.empty((2, 1, 5, 64), np.float32)))
    refuses(ValueError, "q has 0 heads", call(backend.empty((2, 1, 0, 64), np.float32)))
    for scale in (np.nan, np.inf, -0.3, 1e39):  # the last is infinite in float32
        refuses(ValueError, re.escape(f"softmax_scale = {scale}"), call(softmax_scale=scale))
    for scale in ("1", True):
        refuses(TypeError, f"softmax_scale is {scale!r}", call(softmax_scale=scale))
    refuses(TypeError, "causal_offset has dtype float64", call(causal_offset=1.5))
    refuses(ValueError, r"causal_offset has shape \(3,\)", call(causal_offset=[1, 2, 3]))
    refuses(ValueError, r"out has shape \(2, 1, 6, 128\)", call(out=backend.empty((2, 1, 6, 128), np.float32)))
    refuses(TypeError, "out has dtype int32", call(out=backend.empty(q.shape, np.int32)))
    refuses(TypeError, "out is a ndarray", call(out=np.empty_like(q))) if backend.simulated else None
    refuses(ValueError, "out starts at address", call(out=memory[1:1 + q.size].reshape(q.shape)))
    refuses(ValueError, "out overlaps q", call(out=device))
    refuses(ValueError, "out overlaps k_scales",
            lambda: getattr(inside, method)(device, out=scales.reshape(q.shape)))


def test_bad_prefills(backend, refuses):
    q, host = Case(Form(), lengths=(20, 5)).problem()
    cache, device = op.on_device(backend, host), backend.array(q)

    def call(form=Form(), **how):
        attention = op.Attention(backend, cache, form)
        return lambda: attention.prefill(device, **how)

    refuses(ValueError, "waves is 5; expected one of None, 4, 8, 12", call(waves=5))
    refuses(ValueError, "waves is 4.0", call(waves=4.0))
    refuses(ValueError, "splits = 0; expected at least 1", call(splits=0))
    refuses(TypeError, "splits is 1.5 of type float", call(splits=1.5))
    if getattr(backend, "arch", None) != "90a":
        refuses(ValueError, "wgmma = True: .* has no warpgroup instructions of Hopper", call(wgmma=True))
    refuses(ValueError, "wgmma = True: ", call(Form("bf16"), wgmma=True))
    for change in (WRONG | {"trace": True}).items():
        refuses(ValueError, "prefill has no form", call(Form(**dict([change]))))
    refuses(ValueError, "scale_tokens = 256; a scale covers at most a tile of prefill", call(Form(scale_tokens=256)))
    refuses(ValueError, "scale_tokens = 128; .*, 64 tokens here", call(Form(scale_tokens=128), wgmma=False))
    refuses(ValueError, "swapped = .*: prefill keeps its scores in registers", call(Form(swapped=backend.wave == 32)))


def test_nothing_to_attend_to_and_nothing_that_attends(backend):
    q, host = Case(Form(), lengths=(20, 5)).problem()
    attention = op.Attention(backend, op.on_device(backend, host))
    nothing = np.zeros((0, 2, 64), np.float32)
    no_pages = kv_cache.quantize(2 * [nothing], 2 * [nothing], 16)
    assert no_pages.blocks == 0
    for method in ("decode", "prefill"):
        assert getattr(attention, method)(backend.array(q[:, :0]))().shape == (2, 0, 6, 64)
        assert (run(backend, Form(), q, no_pages, method)[0] == 0).all()
    op.Attention(backend, op.on_device(backend, no_pages), Form("bf16_pages"))


# ---- static evidence

missing = toolchain.targets()
nvidia = pytest.mark.skipif(missing["sm_90a"] is not None, reason=str(missing["sm_90a"]))
amd = pytest.mark.skipif(missing["gfx942"] is not None, reason=str(missing["gfx942"]))
TARGETS = {"mma": ["sm_80", "sm_90a", "sm_120"], "mfma": ["gfx90a", "gfx942", "gfx950"]}


def decode_source(matrix, head_dim, pv="int8"):
    form = Form(pv, matrix, matrix == "mma")
    return Source("int8_pv/2_decode.cu", form.defines(head_dim) | {"PARTITION": form.partition, "TRACE": False})


@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("matrix", [pytest.param("mma", marks=nvidia), pytest.param("mfma", marks=amd)])
def test_decode_builds_everywhere_without_spills_and_loads_v_16_bytes_at_once(matrix, head_dim):
    """Loads of 16 bytes a lane: of K and V the codes of a partition, all in one go; of V 16 neighbouring tokens.
    Registers are capped so that three blocks share a multiprocessor, which may cost other NVIDIA targets than Hopper a
    few values, once each."""
    rows = toolchain.evidence(decode_source(matrix, head_dim), TARGETS[matrix])
    assert [row["target"] for row in rows] == TARGETS[matrix]
    bytes_of_codes = 256 * head_dim  # of K, and again of V
    lanes = 4 * WAVE[matrix]
    for row in rows:
        few = 16 if row["target"] in ("sm_80", "sm_120") and head_dim == 128 else 0
        assert row["spill_bytes"] <= few and row["stack_bytes"] <= few, row
        assert row["global_loads"]["128"] == 2 * bytes_of_codes / 16 / lanes, row["target"]
        assert not {"8", "16", "64"} & set(row["global_loads"]), row["target"]


@amd
@pytest.mark.parametrize("matrix, target", [("mfma", "gfx942"), ("mmac", "gfx936")])
@pytest.mark.parametrize("head_dim", [64, 128])
def test_int8_takes_half_the_matrix_instructions_of_bf16(head_dim, matrix, target):
    """Claim P05, in CDNA3's code and in gfx936's: the same Q K, and in P V one instruction for 32 tokens where BF16
    takes two."""
    int8, bf16 = f"v_{matrix}_i32_16x16x32_i8", f"v_{matrix}_f32_16x16x16_bf16"
    counts = {}
    for pv in ("int8", "bf16"):
        code = toolchain.compile_hip(decode_source(matrix, head_dim, pv), target).kernels["decode"]
        counts[pv] = {name: code.opcodes[name] for name in (int8, bf16)}
    of_qk = counts["bf16"][int8]
    of_int8 = counts["int8"][int8] - of_qk
    assert counts["int8"][bf16] == 0
    assert of_int8 == 256 // 32 * head_dim // 16 // 4  # of one of four waves
    assert counts["bf16"][bf16] == 2 * of_int8


@pytest.mark.parametrize("length,blocks,partition", [(1024, 4, 128), (4096, 4, 128), (4224, 4, 128), (4225, 4, 256),
                                                     (16384, 4, 256), (4096, 64, 256)])
def test_short_histories_of_few_sequences_get_short_partitions(length, blocks, partition):
    assert op.choose_partition(length, blocks, 132) == partition
