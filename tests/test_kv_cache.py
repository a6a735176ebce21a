from dataclasses import replace

import numpy as np
import pytest

from kernelbook import kv_cache

TABLES = np.array([[4, 1, -7], [2, 99, 99], [0, 6, 3]])  # out of order, with rubbish where no length reaches
LENGTHS = [17, 0, 48]


def sequences(lengths=LENGTHS, kv_heads=2, head_dim=64, seed=0):
    rng = np.random.default_rng(seed)
    return [[rng.standard_normal((n, kv_heads, head_dim), np.float32) for n in lengths] for _ in range(2)]


def quantized(**options):
    return kv_cache.quantize(*sequences(), 16, TABLES, **options)


def test_every_value_is_within_half_a_step_of_its_own():
    keys, values = sequences()
    cache = quantized().check()
    for sequence in range(3):
        _, k_scales, _, v_scales = cache.tokens(sequence)
        for found, wanted, scales in zip(cache.dequantize(sequence), (keys[sequence], values[sequence]),
                                         (k_scales, v_scales), strict=True):
            assert found.shape == wanted.shape and found.dtype == np.float64
            assert (np.abs(found - wanted) <= 0.500001 * scales[:, :, None]).all()


def test_a_value_lies_where_the_layout_says():
    keys, values = sequences()
    cache = quantized()
    page, offset = TABLES[2, 1], 5  # token 21 of sequence 2
    for head, d in ((0, 0), (1, 63)):
        k_scale, v_scale = cache.k_scales[page, head, offset], cache.v_scales[page, head, offset]
        assert k_scale == np.abs(keys[2][21, head]).max() / np.float32(127)
        assert cache.k_codes[page, head, offset, d] == np.rint(keys[2][21, head, d] / k_scale)
        assert cache.v_codes[page, head, d, offset] == np.rint(values[2][21, head, d] / v_scale)
    assert cache.slots(2, 15, 3).tolist() == [[0, 15], [6, 0], [6, 1]]


def test_rounding_is_half_to_even_and_the_largest_value_is_127():
    codes, scales = kv_cache.quantize_vectors(np.array([127, -127, 0.5, 1.5, 2.5, -0.5, -1.5], np.float32))
    assert scales == 1 and codes.tolist() == [127, -127, 0, 2, 2, 0, -2]


def test_vectors_of_zeros_and_of_next_to_nothing():
    tiny = np.float32(1e-45)  # 2^-149, the smallest float
    codes, scales = kv_cache.quantize_vectors(np.array([[0, 0], [-0., 0], [tiny, 0], [189 * tiny, -tiny]], np.float32))
    assert scales.tolist() == [0, 0, 0, tiny]
    assert codes.tolist() == [[0, 0], [0, 0], [0, 0], [127, -1]]  # 189 steps do not fit into a code


def test_vectors_that_are_not_finite_have_scales_that_check_refuses():
    codes, scales = kv_cache.quantize_vectors(np.array([[np.nan, np.inf], [-np.inf, 1], [3e38, -1]], np.float32))
    assert np.isnan(scales[0]) and np.isposinf(scales[1]) and np.isfinite(scales[2])
    assert codes.tolist() == [[0, 0], [0, 0], [127, 0]]


def test_pages_behind_the_lengths_do_not_matter():
    cache = quantized()
    before = [cache.dequantize(sequence) for sequence in range(3)]
    assert np.isnan(cache.k_scales[5]).all() and np.isnan(cache.v_scales[1, :, 1:]).all()
    for scales in (cache.k_scales, cache.v_scales):
        scales[5], scales[1, :, 1:] = -np.inf, np.nan
    cache.check()
    for sequence in range(3):
        assert all(map(np.array_equal, before[sequence], cache.dequantize(sequence)))


def test_sequences_may_share_pages_of_equal_tokens_only():
    keys, values = sequences([20, 30])
    keys[1][:16], values[1][:16] = keys[0][:16], values[0][:16]
    cache = kv_cache.quantize(keys, values, 16, [[1, 0], [1, 2]])
    assert cache.blocks == 3
    assert np.array_equal(cache.dequantize(0)[0][:16], cache.dequantize(1)[0][:16])
    values[1][3, 1, 7] += 9
    with pytest.raises(ValueError, match="sequence 0 shares a page"):
        kv_cache.quantize(keys, values, 16, [[1, 0], [1, 2]])


@pytest.mark.parametrize("block_size", [16, 32, 544])
def test_pages_are_laid_in_order_where_no_table_is_given(block_size):
    cache = kv_cache.quantize(*sequences([33, 0, 600, 1]), block_size)
    used = np.concatenate([row[:-(-n // block_size)] for row, n in zip(cache.block_tables, cache.lengths, strict=True)])
    assert used.tolist() == list(range(cache.blocks))


def test_caches_of_nothing():
    cache = kv_cache.quantize(*sequences([0, 0]), 16)
    assert cache.check().blocks == 0 and cache.dequantize(1)[0].shape == (0, 2, 64)


def with_value(name, value, place):
    def change(cache):
        getattr(cache, name)[place] = value
        return cache
    return change


CASES = [
    (ValueError, r"k_scales\[6, 1, 5\], of token 21 and KV head 1 of sequence 2, is nan",
     with_value("k_scales", np.nan, (6, 1, 5))),
    (ValueError, r"v_scales\[1, 0, 0\], of token 16 .* sequence 0, is inf", with_value("v_scales", np.inf, (1, 0, 0))),
    (ValueError, r"v_scales\[4, 0, 0\].* is -1.0; .* not negative", with_value("v_scales", -1, (4, 0, 0))),
    (ValueError, "v_codes has the code -128 at token 0, KV head 1, dimension 9 of sequence 0",
     with_value("v_codes", -128, (4, 1, 9, 0))),
    (ValueError, r"block_tables\[2, 1\] = 7; the cache has the pages 0 to 6", with_value("block_tables", 7, (2, 1))),
    (ValueError, r"block_tables\[0, 0\] = -1;", with_value("block_tables", -1, (0, 0))),
    (ValueError, r"lengths\[1\] = 49; expected 0 to 48", with_value("lengths", 49, 1)),
    (ValueError, r"lengths\[0\] = -1;", with_value("lengths", -1, 0)),
    (ValueError, "v_codes has shape", lambda c: replace(c, v_codes=c.k_codes)),
    (ValueError, "k_scales has shape", lambda c: replace(c, k_scales=c.k_scales[:1])),
    (ValueError, "block_tables has shape", lambda c: replace(c, block_tables=c.block_tables[:2])),
    (ValueError, "lengths has shape", lambda c: replace(c, lengths=c.lengths[:, None])),
    (ValueError, "strides", lambda c: replace(c, k_scales=np.asfortranarray(c.k_scales))),
    (TypeError, "v_scales must be a NumPy array of float32, not float64",
     lambda c: replace(c, v_scales=c.v_scales.astype(np.float64))),
    (TypeError, "lengths must be a NumPy array of int32, not list", lambda c: replace(c, lengths=[17, 0, 48])),
    (ValueError, "head_dim = 48; expected one of 64, 96, 128, 256",
     lambda c: replace(c, k_codes=c.k_codes[..., :48].copy())),
    (ValueError, "block_size = 8; expected a multiple of 16", lambda c: replace(c, k_codes=c.k_codes[:, :, :8].copy())),
]


@pytest.mark.parametrize("kind,words,change", CASES, ids=[words for _, words, _ in CASES])
def test_check_names_what_is_wrong(kind, words, change):
    with pytest.raises(kind, match=words):
        change(quantized()).check()


def test_codes_that_are_elsewhere_need_not_be_looked_at():
    """On a device, codes are not worth the copy; everything else is checked as ever."""
    cache = quantized()
    cache.k_codes[cache.block_tables[0, 0], 0, 0, 0] = kv_cache.STALE_CODE
    with pytest.raises(ValueError, match="k_codes has the code -128 at token 0"):
        cache.check()
    assert cache.check(codes=False) is cache

    class Elsewhere:
        def __init__(self, shape):
            self.shape = shape

    away = replace(cache, k_codes=Elsewhere(cache.k_codes.shape), v_codes=Elsewhere(cache.v_codes.shape))
    away.check(codes=False)
    with pytest.raises(ValueError, match=r"v_codes has shape \(1, 2, 64, 16\)"):
        replace(away, v_codes=Elsewhere((1, 2, 64, 16))).check(codes=False)
    cache.v_scales[cache.block_tables[0, 0], 1, 3] = np.inf
    with pytest.raises(ValueError, match="of token 3 and KV head 1 of sequence 0, is inf"):
        away.check(codes=False)


def test_bad_input_to_quantize():
    keys, values = sequences()
    broken = [v.copy() for v in values]
    broken[2][40, 1, 3] = np.nan
    cases = [
        (ValueError, r"values\[2\]\[40, 1, 3\] is nan", lambda: kv_cache.quantize(keys, broken, 16)),
        (ValueError, "3 arrays of keys and 2 of values", lambda: kv_cache.quantize(keys, values[:2], 16)),
        (ValueError, "at least one sequence", lambda: kv_cache.quantize([], [], 16)),
        (ValueError, r"values\[0\] has shape \(16, 2, 64\)",
         lambda: kv_cache.quantize(keys, [values[0][:16], *values[1:]], 16)),
        (TypeError, r"keys\[0\] is a ndarray of float64",
         lambda: kv_cache.quantize([k.astype(np.float64) for k in keys], values, 16)),
        (ValueError, "block_size = 24", lambda: kv_cache.quantize(keys, values, 24)),
        (ValueError, r"lengths\[2\] = 48; expected 0 to 32",
         lambda: kv_cache.quantize(keys, values, 16, TABLES[:, :2])),
        (ValueError, r"block_tables\[0, 0\] = 4; the cache has the pages 0 to 3",
         lambda: kv_cache.quantize(keys, values, 16, TABLES, blocks=4)),
        (ValueError, "block_tables has 2 rows; expected 3", lambda: kv_cache.quantize(keys, values, 16, TABLES[:2])),
        (TypeError, "block_tables has dtype float64", lambda: kv_cache.quantize(keys, values, 16, TABLES * 1.0)),
        (TypeError, "ndarray of float64; expected", lambda: kv_cache.quantize_vectors(np.ones(64))),
        (ValueError, "tokens 47 to 48 of sequence 0; .* 0 to 47", lambda: quantized().slots(0, 47, 2)),
    ]
    for kind, words, call in cases:
        with pytest.raises(kind, match=words):
            call()
