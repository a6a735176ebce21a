"""The NumPy model of the INT8 PV kernels: against a model that goes through the lanes one by one, against float64
attention, and the article's wrong kernels against both."""

from fractions import Fraction

import numpy as np
import pytest

from kernelbook import kv_cache, pv_model
from kernelbook.fragments import INSTRUCTIONS, LOADS, Tokens
from kernelbook.ops.int8_pv import reference
from kernelbook.pv_model import decode, partitions, prefill, pv
from kernelbook.stats import errors

TOKENS = [pytest.param(Tokens(i, load, operand), id=f"{i.name}-{operand}-{load}")
          for i in INSTRUCTIONS.values() for operand in "AB" for load in LOADS
          if i.D.dtype is np.int32 and getattr(i, operand).dtype is np.int8]
MMA, U8, MFMA, MMAC = (Tokens(INSTRUCTIONS[name]) for name in (
    "mma_m16n8k32_s8", "mma_m16n8k32_u8s8", "mfma_i32_16x16x32_i8", "mmac_i32_16x16x32_i8"))


def random_run(rows=6, head_dim=64, count=300, seed=0):
    """Weights and V codes; weights over ten octaves, as those of a softmax are."""
    rng = np.random.default_rng(seed)
    weights = np.exp2(-10 * rng.random((rows, count))).astype(np.float32)
    return weights, rng.integers(-127, 128, (head_dim, count)).astype(np.int8)


def attention(lengths, group=3, kv_heads=2, head_dim=64, block_size=32, queries=1, octaves=4, seed=0):
    """q, the values, and a cache: unit variance, V of each token times 2**-x with x up to `octaves`."""
    rng = np.random.default_rng(seed)
    keys, values = ([rng.standard_normal((n, kv_heads, head_dim), np.float32) for n in lengths] for _ in range(2))
    values = [v * np.exp2(-octaves * rng.random((len(v), kv_heads, 1))).astype(np.float32) for v in values]
    needed = -(-max(lengths) // block_size)
    tables = rng.permutation(len(lengths) * needed).reshape(len(lengths), needed)
    q = rng.standard_normal((len(lengths), queries, kv_heads * group, head_dim), np.float32)
    return q, values, kv_cache.quantize(keys, values, block_size, tables)


# ---- the lanes

def lane_by_lane(weights, v_codes, tokens):
    """One tile, at most one operand of rows and of columns: every lane with its own loads, registers and outputs."""
    i, on_b = tokens.instruction, tokens.operand == "B"
    p_name = "A" if on_b else "B"
    v_operand, p_operand = getattr(i, tokens.operand), getattr(i, p_name)
    v = np.zeros((tokens.steps, v_operand.lanes, v_operand.elements), np.int8)
    p = np.zeros((tokens.steps, p_operand.lanes, p_operand.elements), p_operand.dtype)
    scale = np.zeros((tokens.steps, len(weights)), np.float32)
    for step, owned in enumerate(tokens.sets()):
        scale[step] = weights[:, owned].max(axis=1) / np.float32(127)
    for lane in range(i.lanes):
        along = lane & 3 if i.lanes == 32 else lane >> 4  # which of the four lanes that share a column
        registers = {}  # of each column, the bytes loaded and not yet used
        for step in range(tokens.steps):
            for e in range(v_operand.elements):
                row, column = v_operand.place(lane, e)
                d = int(column if on_b else row)
                if d not in registers:
                    rounds = v_codes[d].reshape(-1, 4, tokens.load)
                    registers[d] = list(rounds[:, along].ravel())
                v[step, lane, e] = registers[d].pop(0)
            for e in range(p_operand.elements):
                row, column = p_operand.place(lane, e)
                query, token = int(row if on_b else column), int(tokens.held(p_name, step, lane, e))
                if query < len(weights):
                    inverse = np.float32(127) / weights[query, tokens.sets()[step]].max()
                    p[step, lane, e] = np.rint(float(weights[query, token]) * float(inverse))
    out = np.zeros((len(weights), len(v_codes)), np.float32)
    sums = np.zeros((tokens.steps, *out.shape), np.int32)
    for step in range(tokens.steps):
        a, b = (p, v) if on_b else (v, p)
        d_fragments = i.D.pack(i.A.unpack(a[step]).astype(int) @ i.B.unpack(b[step]).astype(int))
        for lane in range(i.lanes):
            for e in range(i.D.elements):
                row, column = map(int, i.D.place(lane, e))
                query, d = (row, column) if on_b else (column, row)
                if query < len(weights):
                    sums[step, query, d] = d_fragments[lane, e]
                    out[query, d] += np.float32(d_fragments[lane, e]) * scale[step, query]
    return sums, out


@pytest.mark.parametrize("tokens", TOKENS)
def test_model_is_what_the_lanes_do_one_by_one(tokens):
    width = getattr(tokens.instruction, tokens.operand).shape[0 if tokens.operand == "A" else 1]
    weights, v_codes = random_run(5, width, tokens.tile)
    trace = pv(weights, v_codes, tokens)
    sums, out = lane_by_lane(weights, v_codes, tokens)
    assert np.array_equal(trace.sums, sums) and np.array_equal(trace.out, out)


@pytest.mark.parametrize("largest", [127, 255])
@pytest.mark.parametrize("tokens", TOKENS)
def test_sums_are_integer_products_over_the_tokens_of_each_step(tokens, largest):
    """More rows than an operand has, several tiles and an unfinished one, and the offset form where P is signed."""
    weights, v_codes = random_run(rows=21)
    trace = pv(weights, v_codes, tokens, largest=largest)
    tile, token = np.divmod(np.arange(300), tokens.tile)
    for step, found in enumerate(trace.sums):
        mine = (tile == step // tokens.steps) & np.isin(token, tokens.sets()[step % tokens.steps])
        top = weights[:, mine].max(axis=1)
        assert np.array_equal(trace.scales[:, step], top / np.float32(largest))
        assert np.array_equal(trace.codes[:, mine].max(axis=1), np.full(21, largest))
        assert np.array_equal(found, trace.codes[:, mine].astype(int) @ v_codes[:, mine].T)
    assert len(trace.sums) == -(-300 // tokens.tile) * tokens.steps
    assert (np.abs(trace.dequantized - weights) <= 0.500001 * trace.scales[:, trace.scale_of]).all()
    assert np.allclose(trace.out, trace.dequantized @ v_codes.T, rtol=1e-5, atol=1e-4)


def test_fragments_hold_what_operands_unpack_to():
    _, v_codes = random_run(count=64)
    fragments = pv_model.v_fragments(v_codes, MMAC)
    assert fragments.shape == (1, 2, 4, 64, 8)
    for step, owned in enumerate(MMAC.sets()):
        assert np.array_equal(MMAC.instruction.B.unpack(fragments[0, step, 3]), v_codes[48:, owned].T)
    codes = np.arange(640, dtype=np.uint8).reshape(10, 64)
    held = pv_model.p_fragments(codes, U8)
    assert held.shape == (1, 2, 1, 32, 16)
    assert np.array_equal(U8.instruction.A.unpack(held[0, 1, 0])[:10], codes[:, U8.token(1, np.arange(32))])


def test_swapped_form_offset_form_and_every_map_give_the_same_integers():
    """With 16-byte loads all of them multiply the same tokens in a step."""
    weights, v_codes = random_run(rows=18, head_dim=96)
    for largest in (127, 255):
        expected = pv(weights, v_codes, U8, largest=largest)
        for tokens in (p.values[0] for p in TOKENS):
            if tokens.load == 16:
                found = pv(weights, v_codes, tokens, largest=largest)
                for field in ("codes", "scales", "sums", "out"):
                    assert np.array_equal(getattr(found, field), getattr(expected, field)), (tokens, field)


def test_largest_sum_of_a_step():
    v_codes = np.full((64, 128), -127, np.int8)
    v_codes[:32] = 127
    trace = pv(np.ones((3, 128), np.float32), v_codes, MMAC)
    assert trace.sums.max() == 516128 and trace.sums.min() == -516128
    assert np.abs(pv(np.ones((3, 128), np.float32), v_codes, MMA, largest=255).sums).max() == 32 * 255 * 127


def test_codes_are_rounded_once_half_to_even():
    """Of the exact product: rounded to float32 before, some would become halves, and others."""
    weights = np.zeros((1, 64), np.float32)
    weights[0, :5] = [127, 0.5, 1.5, 2.5, 126.5]  # inverse scale 1, all in one step
    assert pv(weights, random_run(count=64)[1], MMAC).codes[0, :6].tolist() == [127, 0, 2, 2, 126, 0]
    rng, owned, twice = np.random.default_rng(0), MMAC.sets()[0], 0
    for top in rng.uniform(1, 2, 200).astype(np.float32):
        inverse = np.float32(127) / top
        weights[0, owned] = [top, *((np.arange(90, 121) + 0.5) / inverse).astype(np.float32)]
        exact = [round(Fraction(float(w)) * Fraction(float(inverse))) for w in weights[0, owned]]
        assert pv(weights, random_run(count=64)[1], MMAC).codes[0, owned].tolist() == exact
        twice += np.count_nonzero(np.rint(weights[0, owned] * inverse) != exact)
    assert twice > 10


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("largest", [127, 255])
def test_groups_of_nothing_and_of_next_to_nothing_add_nothing(largest):
    weights, v_codes = random_run(rows=2, count=64)
    weights[0] = 0
    weights[1, MMAC.sets()[1]] = np.float32(1e-38)  # 127 / 1e-38 is infinite
    trace = pv(weights, v_codes, MMAC, largest=largest)
    assert not trace.out[0].any() and not trace.codes[1, MMAC.sets()[1]].any() and np.isfinite(trace.out).all()


def test_one_scale_for_several_steps():
    weights, v_codes = random_run(count=256)
    for scale_tokens in (64, 128, 256):
        trace = pv(weights, v_codes, MMAC, scale_tokens=scale_tokens)
        top = weights.reshape(6, -1, scale_tokens).max(axis=2)
        assert np.array_equal(trace.scales, top / np.float32(127))
        assert np.allclose(trace.out, trace.dequantized @ v_codes.T, rtol=1e-5, atol=1e-4)


def test_logical_grouping_gives_half_of_the_tokens_another_groups_scale():
    weights, v_codes = random_run(count=64)
    trace = pv(weights, v_codes, MMAC, grouping="logical")
    logical = weights.reshape(6, 2, 32).max(axis=2) / np.float32(127)
    assert np.array_equal(trace.scales, logical)
    token = np.arange(64)
    assert np.array_equal(trace.codes, np.rint(weights * (1 / logical.astype(float))[:, token // 32]))
    assert np.count_nonzero(trace.scale_of != token // 32) == 32
    assert np.allclose(trace.out, trace.dequantized @ v_codes.T, rtol=1e-5, atol=1e-4)
    narrow = Tokens(MMAC.instruction, 8)
    assert np.array_equal(pv(weights, v_codes, narrow).out, pv(weights, v_codes, narrow, grouping="logical").out)


@pytest.mark.parametrize("tokens", [MMAC, MMA, Tokens(MFMA.instruction, 16, "A")])
def test_a_narrow_read_loses_the_tokens_that_fragments_names(tokens):
    weights, v_codes = random_run(count=64)
    without = v_codes.copy()
    without[:, tokens.missing(8)] = 0
    assert np.array_equal(pv(weights, v_codes, tokens, read=8).sums, pv(weights, without, tokens).sums)
    offset, unsigned = (pv(weights, v_codes, t, read=8, largest=255) for t in (tokens, U8))
    assert np.array_equal(offset.sums, unsigned.sums)
    assert np.array_equal(pv(weights, v_codes, tokens, read=16).sums, pv(weights, v_codes, tokens).sums)


# ---- whole attention

@pytest.mark.parametrize("tokens", [MMAC, MFMA, MMA, U8, Tokens(MMA.instruction, 16, "A"), Tokens(MFMA.instruction, 8)])
@pytest.mark.parametrize("head_dim,group,block_size", [(64, 3, 16), (96, 1, 544), (256, 8, 32)])
def test_decode_against_float64(tokens, head_dim, group, block_size):
    q, _, cache = attention([1, 0, 300, 531], group, head_dim=head_dim, block_size=block_size)
    out = decode(q, cache, tokens)
    assert out.dtype == np.float32 and not out[1].any()
    assert errors(out, reference(q, cache)).relative_frobenius < 0.012


def test_all_maps_agree_after_merging():
    q, _, cache = attention([531, 77])
    expected = decode(q, cache, MMAC)
    for tokens in (MFMA, MMA, U8, Tokens(MMA.instruction, 16, "A")):
        assert np.array_equal(decode(q, cache, tokens), expected)


def test_partition_hardly_matters():
    q, _, cache = attention([1300])
    expected = decode(q, cache, MMAC)
    for partition in (64, 128, 512, 1024):
        assert errors(decode(q, cache, MMAC, partition=partition), expected).relative_frobenius < 1e-3


@pytest.mark.parametrize("tokens", [MMAC, MMA])
def test_prefill_against_float64(tokens):
    """A history, queries in the middle of a tile, one sequence whose first queries see nothing."""
    q, _, cache = attention([200, 30, 70], queries=30)
    offsets = np.array([170, -3, 40])
    out = prefill(q, cache, tokens, offsets)
    expected = reference(q, cache, causal_offset=offsets)
    assert not out[1, :3].any() and out[1, 3:].any()
    assert errors(out, expected).relative_frobenius < 0.015


def test_prefill_of_one_query_is_decode():
    q, _, cache = attention([531])
    assert errors(prefill(q, cache, MMAC, 530), decode(q, cache, MMAC)).relative_frobenius < 1e-3


def test_decode_of_many_heads_and_tokens_takes_seconds_and_its_error_is_the_articles():
    """The issue's 4K setting; against the same quantized query, so that P V alone is measured."""
    q, _, cache = attention([4096], group=6, kv_heads=4, head_dim=128, octaves=0)
    codes, scales = kv_cache.quantize_vectors(q)
    found = errors(decode(q, cache, MMAC), reference(codes * scales[..., None].astype(float), cache))
    assert found.rms < 2.6e-4


# ---- the wrong kernels

def test_wrong_kernels_are_finite_and_wrong():
    """By 20 times and more, on V whose tokens differ in size."""
    q, _, cache = attention([4000], octaves=4)
    expected = reference(q, cache)
    right = errors(decode(q, cache, MMAC), expected).relative_frobenius
    for wrong in ({"grouping": "logical"}, {"read": 8}, {"common_scale": True}):
        found = errors(decode(q, cache, MMAC, **wrong), expected)
        assert found.nonfinite == 0 and found.relative_frobenius > 20 * right, wrong
    wrong = errors(prefill(q, cache, MMAC, 3999, grouping="logical"), expected).relative_frobenius
    assert wrong > 20 * right


def test_unsigned_probabilities_take_a_quarter_off_the_error():
    q, _, cache = attention([4000], octaves=4)
    expected = reference(q, cache)
    signed, unsigned = (errors(decode(q, cache, U8, largest=n), expected).rms for n in (127, 255))
    assert unsigned < 0.75 * signed
    assert np.array_equal(decode(q, cache, MMAC, largest=255), decode(q, cache, U8, largest=255))


def test_larger_groups_are_less_accurate():
    q, _, cache = attention([4000], octaves=4)
    expected = reference(q, cache)
    found = [errors(decode(q, cache, MMAC, scale_tokens=n), expected).rms for n in (32, 64, 128, 256)]
    assert found == sorted(found) and found[-1] > 1.2 * found[0]


# ---- where the error comes from

def test_error_terms_add_up_to_the_error_of_decode():
    q, values, cache = attention([531], group=6, kv_heads=1)
    k_codes, k_scales, v_codes, v_scales = (x[:, 0] for x in cache.tokens(0))
    parts = partitions(pv_model.scores(q[0, 0], k_codes, k_scales), v_codes.T, v_scales, MMAC)
    merge = pv_model.merge_weights(parts).astype(np.float64)
    probabilities, dequantized = (
        np.concatenate([w[:, None] * x for w, x in zip(merge, pieces, strict=True)], axis=1)
        for pieces in ([part.probabilities for part in parts], [part.trace.dequantized for part in parts]))
    terms = pv_model.error_terms(probabilities, values[0][:, 0], v_codes.T, v_scales, dequantized)
    error = probabilities @ values[0][:, 0].astype(np.float64) - decode(q, cache, MMAC)[0, 0]
    assert np.abs(terms.total - error).max() < 1e-4 * np.abs(error).max()
    for term in (terms.cache, terms.weights):
        assert 0.1 < np.linalg.norm(term) / np.linalg.norm(error) < 1.1
    assert [part.first for part in parts] == [0, 256, 512] and abs(merge.sum(axis=0) - 1).max() < 1e-6


# ---- bad input

BAD = [
    (TypeError, "weights must be a NumPy array of float32, not float64", {"weights": np.ones((1, 64))}),
    (TypeError, "v_codes must be a NumPy array of int8, not list", {"v_codes": [[1]]}),
    (ValueError, r"weights of shape \(1, 63\)", {"weights": np.ones((1, 63), np.float32)}),
    (ValueError, r"weights\[0, 7\] is nan", {"weights": np.where(np.arange(64) == 7, np.nan, 1)[None].astype("f")}),
    (ValueError, r"weights\[0, 0\] is -1", {"weights": -np.ones((1, 64), np.float32)}),
    (ValueError, "head_dim = 40; expected a multiple of the 16", {"v_codes": np.ones((40, 64), np.int8)}),
    (ValueError, "mma_m16n8k16_bf16 is not an INT8", {"tokens": Tokens(INSTRUCTIONS["mma_m16n8k16_bf16"])}),
    (ValueError, "largest = 128; expected 127 or 255", {"largest": 128}),
    (ValueError, "scale_tokens = 96", {"scale_tokens": 96}),
    (ValueError, "scale_tokens = 16", {"scale_tokens": 16}),
    (ValueError, "grouping = 'token'", {"grouping": "token"}),
    (ValueError, "read = 17; expected 0 to 16", {"read": 17}),
]


@pytest.mark.parametrize("kind,words,change", BAD, ids=[words for _, words, _ in BAD])
def test_bad_input_to_pv(kind, words, change):
    arguments = {"weights": np.ones((1, 64), np.float32), "v_codes": np.ones((64, 64), np.int8), "tokens": MMAC}
    with pytest.raises(kind, match=words):
        pv(**(arguments | change))


def test_bad_input_to_attention():
    q, values, cache = attention([70])
    cases = [
        (TypeError, "q must be .* not float64", lambda: decode(q.astype(float), cache, MMAC)),
        (ValueError, r"q has shape \(1, 1, 6, 32\)", lambda: decode(q[..., :32].copy(), cache, MMAC)),
        (ValueError, "q has 5 heads", lambda: decode(q[:, :, :5].copy(), cache, MMAC)),
        (ValueError, "partition = 100", lambda: decode(q, cache, MMAC, partition=100)),
        (ValueError, "partition = 64; .* scales of 128",
         lambda: decode(q, cache, MMAC, partition=64, scale_tokens=128)),
        (ValueError, "scale_tokens = 128; expected at most", lambda: prefill(q, cache, MMAC, 3, scale_tokens=128)),
        (ValueError, r"causal_offset = \[1, 2\]", lambda: prefill(q, cache, MMAC, [1, 2])),
        (ValueError, r"probabilities \(6, 71\)", lambda: pv_model.error_terms(
            np.ones((6, 71)), values[0][:, 0], np.ones((64, 70)), np.ones(70), np.ones((6, 70)))),
    ]
    for kind, words, call in cases:
        with pytest.raises(kind, match=words):
            call()
