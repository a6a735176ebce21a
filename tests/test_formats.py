import math

import gguf
import numpy as np
import pytest
from gguf import GGMLQuantizationType as Kind

from kernelbook import formats
from kernelbook.formats import Strips

PRECISIONS = {"int8": Kind.Q8_0, "int4": Kind.Q4_0}


def bits(x):
    """Bit patterns, so that -0 differs from 0."""
    return np.ascontiguousarray(x).view(f"u{x.dtype.itemsize}")


def random_blocks(kind, n=5, k=96, seed=0):
    """Blocks with every code, negative, zero, minus zero and denormal scales."""
    rng = np.random.default_rng(seed)
    blocks = rng.integers(0, 256, (n, k // 32, formats.BLOCK_BYTES[kind]), np.uint8)
    scales = rng.standard_normal((n, k // 32)).astype(np.float16)
    scales.flat[:4] = [-0.0, 0.0, 6e-8, -65504]
    blocks[..., :2] = scales[..., None].view(np.uint8)
    blocks[1, 0, 2:] = 0x80  # code -128 in Q8_0
    return blocks.reshape(n, -1)


def small_strips(precision="int8"):
    rng = np.random.default_rng(1)
    low, high = formats.CODES[precision]
    return formats.pack(rng.integers(low, high + 1, (3, 64)), np.ones((3, 2), np.float32), 32, precision)


# ---------------------------------------------------------------- quantizing

@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("n", [1, 127, 128, 129])
def test_quantize_is_that_of_gguf_to_the_bit(precision, n):
    w = np.random.default_rng(n).standard_normal((n, 160)).astype(np.float32)
    w[0, :32] = 0                                       # a zero group: Q4_0 gives it the scale -0
    w[0, 32:64] = np.float32(1e-7)                      # a scale that is denormal, or 0, as float16
    w[0, 64:96] = np.linspace(-127, 127, 32).round() / 2  # ties
    w[0, 96:98] = [8, -8]                               # two values of largest size: the first one counts
    strips = formats.quantize(w, precision)
    assert strips.codes.shape == (160, math.ceil(n / 128) * 128) and strips.scales.shape == (5, strips.npad)
    assert not strips.codes[:, n:].any() and not bits(strips.scales[:, n:]).any()
    expected = gguf.quants.quantize(w, PRECISIONS[precision])
    np.testing.assert_array_equal(formats.blocks_from_strips(strips), expected)
    np.testing.assert_array_equal(bits(strips.dequantize()),
                                  bits(gguf.quants.dequantize(expected, PRECISIONS[precision])))


def test_int8_rounds_half_away_from_zero():
    w = np.zeros((1, 32), np.float32)
    w[0, :6] = [127, 0.5, -0.5, 2.5, -2.5, 0.49999997]
    assert formats.quantize(w, "int8").codes[:6, 0].tolist() == [127, 1, -1, 3, -3, 0]


@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("group, k", [(64, 128), (32, 40), (48, 100), (128, 5)])
def test_other_groups_follow_the_rule(precision, group, k):
    w = np.random.default_rng(2).standard_normal((3, k)).astype(np.float32)
    strips = formats.quantize(w, precision, group)
    assert strips.groups == math.ceil(k / group)
    for n in range(3):
        for g in range(strips.groups):
            part = w[n, g * group:(g + 1) * group]
            codes = strips.codes[g * group:(g + 1) * group, n].astype(int)
            peak = part[np.abs(part).argmax()]
            d = abs(peak) / np.float32(127) if precision == "int8" else peak / np.float32(-8)
            assert strips.scales[g, n] == np.float16(d)
            exact = part.astype(np.float64) / d
            assert np.abs(codes - exact.clip(*formats.CODES[precision])).max() <= 0.5 + 1e-5
            assert codes[np.abs(part).argmax()] == (np.sign(peak) * 127 if precision == "int8" else -8)


def test_quantize_takes_halves_and_doubles_as_float32():
    w = np.random.default_rng(3).standard_normal((4, 64))
    for dtype in (np.float16, np.float64):
        strips = formats.quantize(w.astype(dtype), "int8")
        expected = formats.quantize(w.astype(dtype).astype(np.float32), "int8")
        np.testing.assert_array_equal(strips.codes, expected.codes)


@pytest.mark.parametrize("precision", PRECISIONS)
def test_weights_too_small_for_a_scale_become_zero(precision):
    w = np.full((1, 32), 1e-40, np.float32)
    w[0, 3] = 0  # 0 times the reciprocal of a denormal scale must not be NaN
    strips = formats.quantize(w, precision)
    assert not strips.codes.any() and not strips.scales.any()


@pytest.mark.parametrize("w, message", [
    (np.array([[1, 2], [3, np.nan]]), r"w\[1, 1\] is nan"),
    (np.array([[np.inf, 2]], np.float32), r"w\[0, 0\] is inf"),
    (np.array([[1.0, 1e39]]), r"w\[0, 1\] is inf as float32"),
    (np.repeat([[1e3], [1e8]], 64, axis=1), "row 1, group 0 of w reaches 1e\\+08"),
    (np.zeros((0, 32)), "n must be a whole number of at least 1, not 0"),
    (np.zeros((32, 0)), "k must be a whole number of at least 1, not 0"),
    (np.zeros(32), r"w must be a matrix, not of shape \(32,\)"),
])
def test_quantize_refuses(w, message):
    with pytest.raises(ValueError, match=message):
        formats.quantize(w, "int8")


def test_quantize_refuses_other_precisions_groups_and_dtypes():
    with pytest.raises(ValueError, match="precision 'fp8' has no strips; there are 'int8' and 'int4'"):
        formats.quantize(np.ones((1, 32)), "fp8")
    with pytest.raises(ValueError, match="group must be a whole number of at least 1, not 0"):
        formats.quantize(np.ones((1, 32)), "int8", 0)
    with pytest.raises(TypeError, match="w must hold floats, not int64"):
        formats.quantize(np.ones((1, 32), np.int64), "int8")


# ---------------------------------------------------------------- activations

def test_activations_round_half_to_even_by_group():
    x = np.zeros((2, 40), np.float32)
    x[0, :6] = [127, 0.5, 1.5, 2.5, -2.5, -127]
    x[1, 32:] = -8
    codes, scales = formats.quantize_activations(x)
    assert codes.dtype == np.int8 and scales.dtype == np.float32 and codes.shape == x.shape
    assert codes[0, :6].tolist() == [127, 0, 2, 2, -2, -127]
    assert scales.tolist() == [[1, 0], [0, float(np.float32(8) / np.float32(127))]]
    assert (codes[1, 32:] == -127).all() and not codes[1, :32].any()


@pytest.mark.parametrize("group", [32, 64, 50])
def test_activations_are_within_half_a_step(group):
    x = np.random.default_rng(4).standard_normal((7, 160)).astype(np.float32)
    codes, scales = formats.quantize_activations(x, group)
    step = np.repeat(scales, group, axis=1)[:, :160]
    assert scales.shape == (7, math.ceil(160 / group))
    assert np.abs(codes * step.astype(np.float64) - x).max() <= 0.5001 * step.max()
    assert (np.abs(codes).max(axis=1) == 127).all()


def test_activations_at_the_edges():
    tiny = np.full((1, 32), 190 * 2.0**-149, np.float32)  # the scale is the smallest denormal: 190 steps
    assert formats.quantize_activations(tiny)[0].max() == 127
    codes, scales = formats.quantize_activations(np.full((1, 32), 1e-45, np.float32))
    assert not codes.any() and not scales.any()
    codes, scales = formats.quantize_activations(np.zeros((0, 64), np.float32))
    assert codes.shape == (0, 64) and scales.shape == (0, 2)
    x = np.ones((2, 32), np.float32)
    x[1, 7] = np.nan
    with pytest.raises(ValueError, match=r"x\[1, 7\] is nan"):
        formats.quantize_activations(x)


# ---------------------------------------------------------------- blocks

@pytest.mark.parametrize("kind", formats.BLOCK_BYTES)
def test_blocks_to_strips_and_back_keep_every_bit(kind):
    blocks = random_blocks(kind)
    strips = formats.strips_from_blocks(blocks, kind)
    assert (strips.n, strips.k, strips.group) == (5, 96, 32)
    assert strips.codes.min() == formats.CODES[strips.precision][0]
    np.testing.assert_array_equal(formats.blocks_from_strips(strips), blocks)
    np.testing.assert_array_equal(bits(strips.dequantize()), bits(gguf.quants.dequantize(blocks, Kind[kind])))
    np.testing.assert_array_equal(strips.dequantize(np.float64), strips.dequantize())


@pytest.mark.parametrize("scale", [np.nan, np.inf, -np.inf])
def test_blocks_with_a_bad_scale_are_refused(scale):
    blocks = random_blocks("Q4_0")
    blocks[3, 18:20] = np.array([scale], np.float16).view(np.uint8)
    with pytest.raises(ValueError, match=f"row 3, block 1 is {scale}"):
        formats.strips_from_blocks(blocks, "Q4_0")


def test_blocks_of_other_forms_are_refused():
    with pytest.raises(ValueError, match="kind 'Q4_1' make no strips; those of Q8_0 and Q4_0 do"):
        formats.strips_from_blocks(np.zeros((1, 20), np.uint8), "Q4_1")
    with pytest.raises(ValueError, match="multiple of 34"):
        formats.strips_from_blocks(np.zeros((1, 33), np.uint8), "Q8_0")
    with pytest.raises(TypeError, match="uint8"):
        formats.strips_from_blocks(np.zeros((1, 34), np.int8), "Q8_0")


def test_strips_that_are_no_blocks_are_refused():
    with pytest.raises(ValueError, match="group 64 and K=64"):
        formats.blocks_from_strips(formats.quantize(np.ones((1, 64)), "int8", 64))
    with pytest.raises(ValueError, match="group 32 and K=40"):
        formats.blocks_from_strips(formats.quantize(np.ones((1, 40)), "int8"))
    strips = small_strips()
    strips.scales[1, 2] = 0.1
    with pytest.raises(ValueError, match="row 2, block 1 is 0.100000001"):
        formats.blocks_from_strips(strips)


def test_bits_per_weight():
    assert formats.BITS_PER_WEIGHT == {"Q8_0": 8.5, "Q4_0": 4.5}
    for precision in formats.CODES:  # a byte a code, 32 bits of scale a group
        assert formats.quantize(np.ones((128, 64)), precision).bits_per_weight == 9


# ---------------------------------------------------------------- the layout's rules

def change(strips, **fields):
    return Strips(**{**vars(strips), **fields})


@pytest.mark.parametrize("broken, error, message", [
    (lambda s: change(s, precision="fp8"), ValueError, "precision 'fp8'"),
    (lambda s: change(s, n=0), ValueError, "n must be .* not 0"),
    (lambda s: change(s, k=-1), ValueError, "k must be .* not -1"),
    (lambda s: change(s, group=0), ValueError, "group must be .* not 0"),
    (lambda s: change(s, group=1.5), ValueError, "group must be .* not 1.5"),
    (lambda s: change(s, group=16), ValueError, r"scales has shape \(2, 128\).* take \(4, 128\)"),
    (lambda s: change(s, n=129), ValueError, r"codes has shape \(64, 128\).* take \(64, 256\)"),
    (lambda s: change(s, codes=s.codes.astype(np.int32)), TypeError, "int8, not int32"),
    (lambda s: change(s, scales=s.scales.astype(np.float16)), TypeError, "float32, not float16"),
    (lambda s: change(s, codes=s.codes.tolist()), TypeError, "int8, not list"),
    (lambda s: change(s, codes=np.asfortranarray(s.codes)), ValueError, "codes must be contiguous"),
    (lambda s: change(s, scales=np.ones((2, 256), "f4")[:, ::2]), ValueError, "scales must be contiguous"),
])
def test_check_names_what_is_wrong(broken, error, message):
    with pytest.raises(error, match=message):
        broken(small_strips()).check()


@pytest.mark.parametrize("array, place, value, message", [
    ("codes", (5, 2), 8, "code 8 at k=5, column 2 is outside -8..7"),
    ("codes", (5, 2), -9, "code -9 at k=5, column 2"),
    ("scales", (1, 2), np.nan, "group 1, column 2 is nan"),
    ("scales", (0, 127), -np.inf, "group 0, column 127 is -inf"),
    ("codes", (9, 3), 1, r"codes\[9, 3\] is 1; columns from n=3 on are padding"),
    ("scales", (1, 100), 1, r"scales\[1, 100\] is 1.0; columns from n=3"),
])
def test_check_names_the_first_bad_place(array, place, value, message):
    strips = small_strips("int4")
    getattr(strips, array)[place] = value
    with pytest.raises(ValueError, match=message):
        strips.check()


def test_pack_refuses_what_does_not_fit():
    with pytest.raises(ValueError, match="code 200 at row 1, k=0"):
        formats.pack(np.array([[1] * 32, [200] * 32]), np.ones((2, 1)), 32, "int8")
    with pytest.raises(ValueError, match=r"scales has shape \(2, 2\).*take \(2, 1\)"):
        formats.pack(np.zeros((2, 32), int), np.ones((2, 2)), 32, "int8")
    with pytest.raises(TypeError, match="codes must be integers, not float64"):
        formats.pack(np.zeros((2, 32)), np.ones((2, 1)), 32, "int8")


def test_fuse_puts_real_columns_side_by_side():
    rng = np.random.default_rng(5)
    parts = [formats.quantize(rng.standard_normal((n, 64)), "int4") for n in (100, 3, 130)]
    fused = formats.fuse(parts)
    assert (fused.n, fused.npad, fused.nbytes) == (233, 256, 64 * 256 + 2 * 256 * 4)
    np.testing.assert_array_equal(fused.dequantize(), np.concatenate([p.dequantize() for p in parts]))


@pytest.mark.parametrize("other, name", [
    (formats.quantize(np.ones((3, 96)), "int8"), "k"),
    (formats.quantize(np.ones((3, 64)), "int8", 64), "group"),
    (formats.quantize(np.ones((3, 64)), "int4"), "precision"),
])
def test_fuse_refuses_different_weights(other, name):
    with pytest.raises(ValueError, match=f"weights of different {name} cannot be fused.*part 1"):
        formats.fuse([small_strips(), other])
    with pytest.raises(ValueError, match="at least one"):
        formats.fuse([])


# ---------------------------------------------------------------- tiles

def test_a_tile_is_laid_out_byte_by_byte():
    data = np.zeros((2, 3, 72), np.uint8)
    tile = data[1, 2]  # rows 4..7, columns 64..95
    tile[:8] = np.array([1, 2, 3, 4], "<f2").view(np.uint8)  # the rows' scales
    tile[8 + 4 * (4 * 1 + 2) + 1] = 0x8F  # quarter 1 of row 2, byte 1: columns 5 and 21
    tile[8 + 4 * (4 * 3 + 0) + 3] = 0x70  # quarter 3 of row 0, byte 3: columns 15 and 31
    tiles = formats.Tiles(data).check()
    assert (tiles.n, tiles.k, tiles.nbytes, tiles.bits_per_weight) == (8, 96, 432, 4.5)
    assert tiles.scales.dtype == np.float16 and tiles.scales[4:, 2].tolist() == [1, 2, 3, 4]
    expected = np.zeros((8, 96), np.int8)
    expected[6, 64 + 5], expected[6, 64 + 21], expected[4, 64 + 31] = -1, -8, 7
    np.testing.assert_array_equal(tiles.codes, expected)
    for dtype in (np.float32, np.float64):
        w = tiles.dequantize(dtype)
        assert w.dtype == dtype and w[6, 85] == -24 and w[6, 69] == -3 and w[4, 95] == 7


def test_nibbles_become_int8_as_in_the_article():
    nibbles = np.arange(16, dtype=np.uint32) * 0x01010101
    codes = ((nibbles ^ 0x08080808) + 0x78787878) ^ 0x80808080
    data = np.zeros((1, 1, 72), np.uint8)
    data[..., 8::4] = np.arange(16)  # byte 0 of word 4 * quarter + row: column 4 * quarter
    np.testing.assert_array_equal(formats.Tiles(data).codes[:, :16:4].T.ravel(), codes.view(np.int8)[::4])
    assert codes.view(np.int8)[::4].tolist() == [0, 1, 2, 3, 4, 5, 6, 7, -8, -7, -6, -5, -4, -3, -2, -1]


def test_blocks_to_tiles_and_back_keep_every_bit():
    blocks = random_blocks("Q4_0", n=8)
    tiles = formats.tiles_from_blocks(blocks)
    np.testing.assert_array_equal(formats.blocks_from_tiles(tiles), blocks)
    np.testing.assert_array_equal(bits(tiles.dequantize()), bits(gguf.quants.dequantize(blocks, Kind.Q4_0)))
    strips = formats.strips_from_blocks(blocks, "Q4_0")
    np.testing.assert_array_equal(tiles.codes, strips.codes[:, :8].T)
    assert formats.BITS_PER_WEIGHT["Q4_0"] == tiles.bits_per_weight == 4.5


def test_quantized_tiles_are_those_of_gguf_to_the_bit():
    w = np.random.default_rng(7).standard_normal((12, 160)).astype(np.float32)
    w[0, :32] = 0
    np.testing.assert_array_equal(formats.blocks_from_tiles(formats.quantize_tiles(w)),
                                  gguf.quants.quantize(w, Kind.Q4_0))


def test_random_tiles_are_valid_and_hold_every_code():
    tiles = formats.random_tiles(np.random.default_rng(8), 64, 256).check()
    assert tiles.nonfinite() == (0, 0)
    assert 0.0019 < tiles.scales.min() < 0.004 and 0.018 < tiles.scales.max() < 0.0201
    assert np.bincount(tiles.codes.ravel() + 8, minlength=16).min() > 64 * 256 / 16 * 0.8


@pytest.mark.parametrize("seed", [1, 0xFFFFFFFF])
def test_random_bytes_are_those_of_the_generator(seed):
    tiles = formats.random_byte_tiles(seed, 40, 32 * 100)  # 72000 bytes, more than the states that are kept
    state, expected = seed, []
    for _ in range(tiles.nbytes):
        state ^= state << 13 & 0xFFFFFFFF
        state ^= state >> 17
        state ^= state << 5 & 0xFFFFFFFF
        expected.append(state & 255)
    assert tiles.data.ravel().tolist() == expected


def test_one_half_in_32_is_not_finite_and_is_counted():
    every = np.arange(1 << 16, dtype=np.uint16).reshape(-1, 8, 4)  # each float16 once, neighbours in a tile
    data = np.zeros((len(every), 8, 72), np.uint8)
    data[..., :8] = every.astype("<u2").view(np.uint8)
    assert formats.Tiles(data).nonfinite() == ((1 << 16) / 32, (1 << 14) / 32)
    tiles = formats.random_byte_tiles(1, 1024, 1024)
    scales, spoiled = tiles.nonfinite()
    number = tiles.nbytes // 72
    for count, total, share in [(scales, 4 * number, 1 / 32), (spoiled, number, 1 - (31 / 32)**4)]:
        assert abs(count - total * share) < 5 * (total * share * (1 - share))**0.5


@pytest.mark.parametrize("data, error, message", [
    (np.zeros((1, 1, 72), np.int8), TypeError, "uint8, not int8"),
    ([[[0] * 72]], TypeError, "uint8, not list"),
    (np.zeros((1, 72), np.uint8), ValueError, r"data has shape \(1, 72\); expected \[N / 4, K / 32, 72\]"),
    (np.zeros((1, 1, 71), np.uint8), ValueError, r"shape \(1, 1, 71\)"),
    (np.zeros((0, 1, 72), np.uint8), ValueError, r"shape \(0, 1, 72\)"),
    (np.zeros((1, 4, 72), np.uint8)[:, ::2], ValueError, "C-contiguous"),
])
def test_tiles_of_another_form_are_refused(data, error, message):
    with pytest.raises(error, match=message):
        formats.Tiles(data).check()


@pytest.mark.parametrize("scale", [np.nan, np.inf, -np.inf])
def test_tiles_with_a_bad_scale_are_refused(scale):
    tiles = formats.random_tiles(np.random.default_rng(9), 8, 96)
    tiles.data[1, 2, 4:6] = np.array([scale], "<f2").view(np.uint8)
    for use in (tiles.check, lambda: formats.blocks_from_tiles(tiles)):
        with pytest.raises(ValueError, match=f"the scale of row 6, group 2 is {scale}"):
            use()
    assert tiles.check(finite=False).nonfinite() == (1, 1)
    blocks = random_blocks("Q4_0", n=4)
    blocks[3, 18:20] = np.array([scale], np.float16).view(np.uint8)
    with pytest.raises(ValueError, match=f"row 3, block 1 is {scale}"):
        formats.tiles_from_blocks(blocks)


@pytest.mark.parametrize("make, message", [
    (lambda: formats.tiles_from_blocks(random_blocks("Q4_0", n=6)), "N = 6 rows are no multiple of 4.*rows of zeros"),
    (lambda: formats.tiles_from_blocks(np.zeros((4, 34), np.uint8)), "Q4_0 blocks must be .* multiple of 18"),
    (lambda: formats.quantize_tiles(np.ones((4, 40))), "group 32 and K=40"),
    (lambda: formats.random_tiles(np.random.default_rng(), 6, 32), "N = 6 rows"),
    (lambda: formats.random_tiles(np.random.default_rng(), 4, 40), "K = 40 is no multiple of 32"),
    (lambda: formats.random_byte_tiles(1, 0, 32), "n must be a whole number of at least 1, not 0"),
    (lambda: formats.random_byte_tiles(0, 4, 32), "seed must be a whole number from 1 to .*, not 0"),
    (lambda: formats.random_byte_tiles(2**32, 4, 32), "seed must be .* not 4294967296"),
])
def test_tiles_that_cannot_be_are_refused(make, message):
    with pytest.raises(ValueError, match=message):
        make()


# ---------------------------------------------------------------- GGUF files

WEIGHTS = {"blk.0.attn_q.weight": Kind.Q8_0, "blk.0.attn_k.weight": Kind.Q4_0,
           "blk.0.attn_v.weight": Kind.Q4_1, "blk.0.ffn_norm.weight": Kind.F16}


def write_gguf(path, endianess=gguf.GGUFEndian.LITTLE):
    """A file with one tensor of each kind in WEIGHTS; their blocks by name."""
    rng = np.random.default_rng(6)
    writer = gguf.GGUFWriter(path, "llama", endianess=endianess)
    writer.add_array("words", ["a", "bc", "déf"])
    written = {}
    for name, kind in WEIGHTS.items():
        written[name] = gguf.quants.quantize(rng.standard_normal((6, 64), np.float32), kind)
        writer.add_tensor(name, written[name], raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return written


@pytest.fixture
def model(tmp_path):
    path = tmp_path / "modèle 1.gguf"
    return path, write_gguf(path)


def test_gguf_tensors_become_strips(model):
    path, written = model
    reader = formats.open_gguf(path)
    for name in ("blk.0.attn_q.weight", "blk.0.attn_k.weight"):
        for source in (path, reader):
            strips = formats.gguf_strips(source, name)
            np.testing.assert_array_equal(formats.blocks_from_strips(strips), written[name])
    assert reader.fields["words"].contents() == ["a", "bc", "déf"]


@pytest.mark.parametrize("name, message", [
    ("blk.0.attn_q", "no tensor 'blk.0.attn_q' among the 4 of the file; nearest: blk.0.attn_q.weight"),
    ("blk.0.attn_v.weight", "is Q4_1; only Q8_0 and Q4_0 are strips as they stand.*quantize"),
    ("blk.0.ffn_norm.weight", "is F16; only Q8_0 and Q4_0"),
])
def test_gguf_tensors_that_make_no_strips(model, name, message):
    with pytest.raises(ValueError, match=message):
        formats.gguf_strips(model[0], name)


def test_a_file_cut_short_anywhere_is_refused(model):
    path, _ = model
    whole = path.read_bytes()
    last = formats.open_gguf(path).tensors[-1]
    for size in range(1, last.data_offset + last.n_bytes, 7):
        path.write_bytes(whole[:size])
        with pytest.raises(ValueError, match="truncated" if size >= 4 else "no GGUF file"):
            formats.open_gguf(path)
    path.write_bytes(whole[:last.data_offset + last.n_bytes - 1])
    with pytest.raises(ValueError, match=f"'{last.name}' ends at byte .*, the file at .* truncated"):
        formats.open_gguf(path)
    path.write_bytes(whole[:last.data_offset + last.n_bytes])
    formats.open_gguf(path)


def test_foreign_files_are_refused(tmp_path):
    path = tmp_path / "file.gguf"
    for content, message in [(b"", "is empty"), (b"PK\x03\x04zip", "it starts with b'PK"),
                             (b"GGUF\x63\0\0\0" + bytes(64), "cannot be read .* version 99"),
                             (b"GGUF\x03\0\0\0" + b"\xff" * 64, "truncated")]:
        path.write_bytes(content)
        with pytest.raises(ValueError, match=message):
            formats.open_gguf(path)
    write_gguf(path, gguf.GGUFEndian.BIG)
    with pytest.raises(ValueError, match="other byte order"):
        formats.open_gguf(path)
    with pytest.raises(FileNotFoundError):
        formats.open_gguf(tmp_path / "none.gguf")
