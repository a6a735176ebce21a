from dataclasses import fields, replace

import numpy as np
import pytest

from kernelbook import kv_cache
from kernelbook.backends.cpu import CpuBackend
from kernelbook.backends.source import KERNELS
from kernelbook.ops import int8_pv as op


def normal(*shape, seed=0):
    return np.random.default_rng((seed, *shape)).standard_normal(shape, np.float32)


def fresh(backend, kv_heads=2, head_dim=64, block_size=16, tables=((3, 0, 2),), lengths=(0,), blocks=4):
    """A cache on the device in which nothing is written."""
    return op.on_device(backend, kv_cache.empty(kv_heads, head_dim, block_size, np.array(tables), np.array(lengths),
                                                blocks))


def write(backend, cache, k, v, slots):
    op.write_tokens(backend, cache, backend.array(k), backend.array(v), slots)
    return op.on_host(backend, cache)


def assert_same(found, expected):
    for f in fields(kv_cache.PagedCache):
        assert np.array_equal(getattr(found, f.name), getattr(expected, f.name), equal_nan=f.name.endswith("scales")), \
            f.name


def random_cache(lengths, kv_heads, head_dim=64, block_size=16, seed=0):
    """Sequences of unit variance on pages in a random order."""
    keys, values = ([normal(n, kv_heads, head_dim, seed=seed + 2 * b + i) for b, n in enumerate(lengths)]
                    for i in range(2))
    needed = max(-(-n // block_size) for n in lengths) or 1
    tables = np.random.default_rng(seed).permutation(len(lengths) * needed).reshape(len(lengths), needed)
    return kv_cache.quantize(keys, values, block_size, tables)


# ---- the producer

@pytest.mark.parametrize("head_dim", kv_cache.HEAD_DIMS)
@pytest.mark.parametrize("kv_heads,block_size,lengths", [(1, 16, (1,)), (3, 32, (33, 0, 7)), (4, 544, (3, 50))])
def test_producer_gives_the_bits_of_numpy(backend, head_dim, kv_heads, block_size, lengths):
    """Over all pages, so that it also writes nothing else; odd numbers of tokens, pages out of order."""
    scale = (10.0 ** np.random.default_rng(1).integers(-44, 38, (sum(lengths), kv_heads, 1))).astype(np.float32)
    k, v = (scale * normal(sum(lengths), kv_heads, head_dim, seed=seed) for seed in (1, 2))
    blocks = 2 * len(lengths) + 1
    tables = np.random.default_rng(2).permutation(blocks)[1:].reshape(len(lengths), 2)
    cuts = np.cumsum(lengths)[:-1]
    expected = kv_cache.quantize(np.split(k, cuts), np.split(v, cuts), block_size, tables, blocks)
    cache = op.on_device(backend, kv_cache.empty(kv_heads, head_dim, block_size, tables, np.array(lengths), blocks))
    slots = np.concatenate([expected.slots(sequence, 0, n) for sequence, n in enumerate(lengths)])
    assert_same(write(backend, cache, k, v, slots), expected)


def test_producer_rounds_as_numpy_at_every_half(backend):
    """Quotients at and next to code + 1/2, where a reciprocal or another rounding gives another code."""
    halves = np.arange(-127, 127, dtype=np.float32) + np.float32(0.5)
    near = np.concatenate([halves, np.nextafter(halves, np.float32(np.inf)), np.nextafter(halves, np.float32(-np.inf))])
    k = np.resize(near, (13, 1, 64)).astype(np.float32)
    k[:, :, 0] = 127
    v = k * normal(13, 1, 1)
    cache = write(backend, fresh(backend, 1), k, v, np.stack([np.full(13, 3), np.arange(13)], axis=1))
    for codes, x in ((cache.k_codes[3, 0, :13], k), (cache.v_codes[3, 0, :, :13].T, v)):
        assert np.array_equal(codes, kv_cache.quantize_vectors(x[:, 0])[0])


def test_producer_on_zeros_next_to_nothing_and_values_that_are_not_finite(backend):
    tiny, k = np.float32(1e-45), normal(6, 1, 64)
    k[0], k[1], k[2] = 0, tiny, np.resize([189 * tiny, -tiny], 64)
    k[3, 0, 40], k[4, 0, 63], k[5, 0, 0] = np.nan, -np.inf, 3.4e38
    slots = np.stack([np.full(6, 1), np.arange(10, 16)], axis=1)
    cache = write(backend, fresh(backend, 1), k, k[::-1].copy(), slots)
    codes, scales = kv_cache.quantize_vectors(k[:, 0])
    assert np.array_equal(cache.k_codes[1, 0, 10:], codes)
    assert np.array_equal(cache.k_scales[1, 0, 10:], scales, equal_nan=True)
    assert np.array_equal(cache.v_codes[1, 0, :, 10:].T, codes[::-1])
    assert np.array_equal(cache.v_scales[1, 0, 10:], scales[::-1], equal_nan=True)


def test_tokens_join_those_that_are_there(backend):
    """Written one at a time, into pages that another sequence shares, they make the cache written at once."""
    keys, values = ([normal(n, 2, 64, seed=seed) for n in (37, 20)] for seed in (1, 2))
    for x in (keys, values):
        x[1][:16] = x[0][:16]
    tables = np.array([[5, 1, 3], [5, 0, -1]])
    expected = kv_cache.quantize(keys, values, 16, tables)
    cache = op.on_device(backend, kv_cache.empty(2, 64, 16, tables, expected.lengths, expected.blocks))
    for sequence, first, count in ((0, 0, 35), (0, 35, 1), (0, 36, 1), (1, 16, 4)):
        part = slice(first, first + count)
        found = write(backend, cache, keys[sequence][part], values[sequence][part],
                      expected.slots(sequence, first, count))
    assert_same(found, expected)


def test_no_tokens_write_nothing(backend):
    cache = fresh(backend)
    before = op.on_host(backend, cache)
    nothing = backend.empty((0, 2, 64), np.float32)
    op.write_tokens(backend, cache, nothing, nothing, np.empty((0, 2), np.int32))
    assert_same(op.on_host(backend, cache), before)


def test_offsets_past_two_to_the_31(simulator):
    """The last page of more than 2^31 codes; the simulator would report an int that overflows, or an access outside.
    K and V lie in the same memory, to spare some: at the last offset they meet in one byte, the last d of both."""
    block_size, head_dim = 544, 256
    pages = simulator.empty(((2**31 // (block_size * head_dim)) + 2, block_size * head_dim), np.int8)
    assert pages.size > 2**31
    k_scales, v_scales = (simulator.empty((len(pages), block_size), np.float32) for _ in range(2))
    x, slot = normal(1, 1, head_dim), np.array([[len(pages) - 1, block_size - 1]], np.int32)
    kernel = simulator.compile("int8_pv/1_quantize_kv.cu", {"HEAD_DIM": head_dim}).kernel("quantize_kv")
    kernel((1, 1, 1), (simulator.wave, op.WAVES, 1), [
        simulator.array(x), simulator.array(x), simulator.array(slot), pages, k_scales, pages, v_scales,
        *map(np.int32, (1, 1, block_size))])
    (codes,), (scale,) = kv_cache.quantize_vectors(x[0])
    assert np.array_equal(pages[-1].reshape(block_size, head_dim)[-1], codes)
    assert np.array_equal(pages[-1].reshape(head_dim, block_size)[:, -1], codes)
    assert k_scales[-1, -1] == v_scales[-1, -1] == scale


def test_bad_input_is_refused_before_anything_is_written(backend):
    cache = fresh(backend)
    before = op.on_host(backend, cache)
    k, slots = backend.array(normal(2, 2, 64)), np.array([[3, 0], [3, 1]])

    def call(cache=cache, k=k, v=k, slots=slots):
        return lambda: op.write_tokens(backend, cache, k, v, slots)

    memory = backend.array(np.zeros(4 * 2 * 16 + 256, np.float32))
    inside = replace(cache, v_scales=memory[:128].reshape(4, 2, 16))
    cases = [
        (ValueError, r"slots\[1\] is page 4, offset 0; the cache has the pages 0 to 3 of 16",
         call(slots=slots + [[0, 0], [1, -1]])),
        (ValueError, r"slots\[1\] is page -1, offset 0", call(slots=np.array([[0, 0], [-1, 0]]))),
        (ValueError, r"slots\[0\] is page 0, offset 16", call(slots=np.array([[0, 16], [0, 0]]))),
        (ValueError, r"slots\[0\] and slots\[1\] are both page 2, offset 5", call(slots=np.array([[2, 5], [2, 5]]))),
        (ValueError, r"slots has shape \(2,\)", call(slots=np.array([3, 4]))),
        (TypeError, "slots is a list", call(slots=[[3, 0], [3, 1]])),
        (TypeError, "slots is a ndarray of float64", call(slots=slots * 1.0)),
        (TypeError, "k is a list", call(k=[0.0])),
        (TypeError, "v has dtype float64", call(v=backend.array(np.ones((2, 2, 64))))),
        (ValueError, r"k has shape \(1, 2, 64\); expected \(2, 2, 64\)", call(k=k[:1])),
        (ValueError, "v has strides", call(v=backend.array(normal(2, 2, 128))[:, :, ::2])),
        (TypeError, "v_codes has dtype uint8", call(replace(cache, v_codes=cache.v_codes.view(np.uint8)))),
        (ValueError, "v_codes has shape", call(replace(cache, v_codes=cache.k_codes))),
        (ValueError, "k_codes has shape", call(replace(cache, k_codes=cache.k_codes[0]))),
        (ValueError, "k_scales overlaps v_scales", call(replace(cache, v_scales=cache.k_scales))),
        (ValueError, "v_scales overlaps k", call(inside, k=memory[120:376].reshape(2, 2, 64))),
        (ValueError, "head_dim = 32", call(replace(cache, k_codes=backend.empty((4, 2, 16, 32), np.int8)))),
        (ValueError, "block_size = 24", call(replace(cache, k_codes=backend.empty((4, 2, 24, 64), np.int8)))),
    ]
    for kind, words, attempt in cases:
        with pytest.raises(kind, match=words):
            attempt()
    assert_same(op.on_host(backend, cache), before)
    assert not backend.numpy(memory).any()


def test_order_of_lanes_waves_and_blocks_changes_no_bit():
    k, v = normal(16, 2, 96), normal(16, 2, 96, seed=1)
    slots = np.stack([np.full(16, 1), np.arange(16)], axis=1)
    caches = [write(backend, fresh(backend, head_dim=96), k, v, slots)
              for backend in (CpuBackend(order=order) for order in (0, 1, 2))]
    assert_same(caches[1], caches[0])
    assert_same(caches[2], caches[0])


# ---- the reference

def plain(q, k, v, scale, last):
    """One query of one head, [head_dim], over K and V [tokens, head_dim], up to token `last`."""
    scores = [scale * float(q @ k[t]) for t in range(min(last + 1, len(k)))]
    if not scores:
        return np.zeros_like(q)
    weights = np.exp(np.array(scores) - max(scores))
    return sum(w * v[t] for t, w in enumerate(weights / weights.sum()))


@pytest.mark.parametrize("group", [1, 3, 4, 6, 8])
@pytest.mark.parametrize("causal_offset", [None, 5, (2, -1, -9)])
def test_reference_against_plain_attention(group, causal_offset):
    lengths, queries = (19, 3, 0), 4
    cache = random_cache(lengths, 2)
    q = normal(3, queries, 2 * group, 64).astype(np.float64)
    out = op.reference(q, cache, causal_offset=causal_offset, softmax_scale=0.2)
    offsets = np.broadcast_to(1000 if causal_offset is None else causal_offset, 3)
    for sequence in range(3):
        k, v = cache.dequantize(sequence)
        for i in range(queries):
            for head in range(2 * group):
                expected = plain(q[sequence, i, head], k[:, head // group], v[:, head // group], 0.2,
                                 offsets[sequence] + i)
                assert np.allclose(out[sequence, i, head], expected, rtol=1e-12, atol=1e-14)


def test_what_sees_nothing_is_exactly_zero():
    cache = random_cache((0, 20), 1)
    out = op.reference(normal(2, 3, 1, 64), cache, causal_offset=-2)
    assert (out[0] == 0).all() and (out[1, :2] == 0).all() and (out[1, 2] == cache.dequantize(1)[1][0, 0]).all()


def test_prefill_after_a_history_is_decode_token_by_token():
    whole, q = random_cache((37,), 2), normal(1, 5, 6, 64)
    out = op.reference(q, whole, causal_offset=[32])
    for i in range(5):
        shorter = replace(whole, lengths=np.array([33 + i], np.int32))
        assert np.allclose(out[:, i:i + 1], op.reference(q[:, i:i + 1], shorter), rtol=1e-12, atol=1e-14)


def test_reference_survives_large_scores_and_pages_behind_the_length():
    cache = random_cache((5,), 1)
    _, v = cache.dequantize(0)
    q = 1e6 * normal(1, 1, 1, 64)
    k, _ = cache.dequantize(0)
    expected = v[np.argmax(k[:, 0] @ q[0, 0, 0]), 0]
    assert np.isnan(cache.v_scales).any()
    assert np.allclose(op.reference(q, cache)[0, 0, 0], expected, rtol=1e-12)


def test_reference_on_a_cache_of_zeros():
    cache = kv_cache.quantize([np.zeros((9, 1, 64), np.float32)], [np.zeros((9, 1, 64), np.float32)], 16)
    assert (op.reference(normal(1, 1, 4, 64), cache) == 0).all()


def test_bad_input_to_the_reference():
    cache, q = random_cache((5, 2), 2), normal(2, 1, 4, 64)
    nan = random_cache((5, 2), 2)
    nan.v_scales[nan.block_tables[1, 0], 0, 1] = np.nan
    cases = [
        (ValueError, "of token 1 and KV head 0 of sequence 1, is nan", lambda: op.reference(q, nan)),
        (ValueError, r"q has shape \(1, 1, 4, 64\); expected \[2, queries, heads, 64\]",
         lambda: op.reference(q[:1], cache)),
        (ValueError, "q has 3 heads; expected a multiple of the cache's 2", lambda: op.reference(q[:, :, :3], cache)),
        (TypeError, "q has dtype int64", lambda: op.reference(q.astype(np.int64), cache)),
        (ValueError, "softmax_scale = nan", lambda: op.reference(q, cache, softmax_scale=np.nan)),
        (TypeError, "softmax_scale is '1'", lambda: op.reference(q, cache, softmax_scale="1")),
        (TypeError, "causal_offset has dtype float64", lambda: op.reference(q, cache, causal_offset=1.5)),
        (ValueError, r"causal_offset has shape \(3,\)", lambda: op.reference(q, cache, causal_offset=[1, 2, 3])),
    ]
    for kind, words, call in cases:
        with pytest.raises(kind, match=words):
            call()


# ---- sources

def test_every_form_of_every_kernel_is_a_source():
    files = {s.path for s in op.sources()}
    assert files == {str(f.relative_to(KERNELS)) for f in (KERNELS / "int8_pv").glob("*.cu")}
    producers = [s for s in op.sources() if "quantize_kv" in s.path]
    assert {s.defines["HEAD_DIM"] for s in producers} == set(kv_cache.HEAD_DIMS)
