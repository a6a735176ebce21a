import math

import numpy as np
import pytest

from kernelbook import formats, fragments, packing

SHAPES = [(1, 32), (3, 64), (16, 128), (17, 96), (65, 160), (1023, 256), (130, 2048)]
PRECISIONS = ("int8", "int4")


def strips(n, k, precision, group=32, seed=0):
    rng = np.random.default_rng((seed, n, k))
    low, high = formats.CODES[precision]
    codes = rng.integers(low, high, (n, k), np.int8, endpoint=True)
    return formats.pack(codes, rng.uniform(-0.02, 0.02, (n, math.ceil(k / group))).astype(np.float16), group, precision)


def changed(panels, **values):
    """The same panels, unchecked, with other fields."""
    return packing.Panels(**{name: values.get(name, getattr(panels, name)) for name in ("data", "n", "k", "precision")})


@pytest.mark.parametrize("precision", PRECISIONS)
def test_there_and_back_loses_no_bit(precision):
    for n, k in SHAPES:
        weight = strips(n, k, precision)
        panels = packing.pack(weight).check()
        assert panels.data.shape == (math.ceil(n / 16), math.ceil(k / 128), packing.CHUNK_BYTES[precision])
        back = packing.unpack(panels)
        assert np.array_equal(back.codes, weight.codes) and np.array_equal(back.scales, weight.scales)


@pytest.mark.parametrize("precision", PRECISIONS)
def test_every_code_and_scale_is_where_the_module_says(precision):
    """Read lane by lane from the head of `packing`, not by its code."""
    n, k = 50, 288
    weight, data = strips(n, k, precision), packing.pack(strips(n, k, precision)).data
    for row, column in np.ndindex(n, k):
        chunk = data[row // 16, column // 128]
        group, step, of_step = column % 128 // 32, column % 32 // 16, column % 16
        lane = 4 * (row % 8) + of_step % 8 // 2
        register, second = row % 16 // 8 + 2 * (of_step // 8), column % 2
        if precision == "int8":
            code = int(chunk[512 * group + 16 * lane + 8 * step + 2 * register + second]) - 128
        else:
            word = int(chunk[512 * (group // 2) + 16 * lane + 8 * (group % 2) + 4 * step:][:4].view("<u4")[0])
            code = (word >> 4 * (register + 4 * second) & 15) - 8
        assert code == weight.codes[column, row]
        scale = chunk[-128:].view("<f2").reshape(8, 4, 2)[row % 8, group, row % 16 // 8]
        assert scale == weight.scales[column // 32, row]


def test_a_lanes_bytes_are_its_fragments():
    """The order of codes is that of operand A in `fragments`, the map that the simulator multiplies by."""
    panels = packing.pack(strips(16, 128, "int8"))
    chunk = panels.data[0, 0, :2048].reshape(4, 32, 2, 8)  # group, lane, step, element
    A = fragments.INSTRUCTIONS["mma_m16n8k16_f16"].A
    for group, step in np.ndindex(4, 2):
        column = 32 * group + 16 * step
        expected = A.pack(panels.codes[:, column:column + 16].astype(np.float16))
        assert np.array_equal(chunk[group, :, step].astype(np.float16) - 128, expected)


@pytest.mark.parametrize("group", [64, 128, 96])
def test_wider_groups_repeat_their_scale(group):
    weight = strips(20, 224, "int8", group)
    assert np.array_equal(packing.unpack(packing.pack(weight)).dequantize(), weight.dequantize())


def test_tiles_become_the_panels_of_their_strips():
    tiles = formats.random_tiles(np.random.default_rng(0), 36, 160)
    panels = packing.panels_from_tiles(tiles).check()
    assert np.array_equal(packing.unpack(panels).dequantize(), tiles.dequantize())
    by_strips = packing.pack(formats.strips_from_blocks(formats.blocks_from_tiles(tiles), "Q4_0"))
    assert np.array_equal(panels.data, by_strips.data)


def test_sizes():
    panels = packing.random_panels(np.random.default_rng(0), 64, 256, "int8").check()
    assert (panels.panels, panels.chunks, panels.nbytes, panels.bits_per_weight) == (4, 2, 4 * 2 * 2176, 8.5)
    assert packing.random_panels(np.random.default_rng(0), 64, 256, "int4").check().bits_per_weight == 4.5
    padded = packing.random_panels(np.random.default_rng(0), 17, 160, "int4").check()
    assert padded.codes.shape == (32, 256) and padded.bits_per_weight == 8 * 4 * 1152 / (17 * 160)
    assert not padded.codes[17:].any() and not padded.codes[:, 160:].any()
    assert not padded.scales[17:].any() and not padded.scales[:, 5:].any()


def test_the_extreme_codes_and_scales_are_held():
    codes = np.array([[-128, 127] * 16, [0, -1] * 16], np.int8)
    scales = np.array([[6e-8], [-65504]], np.float16)
    assert np.array_equal(packing.unpack(packing.pack(formats.pack(codes, scales, 32, "int8"))).codes[:, :2], codes.T)


@pytest.mark.parametrize("n,k,group,scale,message", [
    (2, 32, 32, 0.1, r"row 1, group 0 is 0.100000001, which float16 does not hold"),
    (2, 32, 32, 1e6, r"row 1, group 0 is 1000000, which float16"),
    (2, 48, 16, 0.5, r"groups of 16 do not fit: take a multiple of 32"),
    (2, 48, 32, 0.5, r"K = 48 is no multiple of 32")])
def test_strips_that_have_no_panels_are_refused(n, k, group, scale, message):
    scales = np.full((n, math.ceil(k / group)), 0.5, np.float32)
    scales[1] = scale
    with pytest.raises(ValueError, match=message):
        packing.pack(formats.pack(np.ones((n, k), np.int8), scales, group, "int8"))


def test_panels_that_break_a_rule_are_refused():
    panels = packing.random_panels(np.random.default_rng(0), 17, 160, "int8")
    for wrong, error, message in [
            (changed(panels, data=panels.data.tolist()), TypeError, "uint8, not list"),
            (changed(panels, data=panels.data.astype(np.int16)), TypeError, "uint8, not int16"),
            (changed(panels, n=33), ValueError, r"has shape \(2, 2, 2176\).*n=33.*\(3, 2, 2176\)"),
            (changed(panels, k=100), ValueError, "K = 100"),
            (changed(panels, k=0), ValueError, "k = 0"),
            (changed(panels, precision="int2"), ValueError, "'int2'; expected 'int8' or 'int4'"),
            (changed(panels, data=np.asfortranarray(panels.data)), ValueError, "strides"),
            (changed(panels, n=18), None, ""),
            (changed(panels, n=16 + 1, k=128 + 32), None, "")]:
        if error is None:
            wrong.check()  # padding that happens to be 0 is a weight of 0
            continue
        with pytest.raises(error, match=message):
            wrong.check()

    def with_bytes(place, value):
        data = panels.data.copy()
        data[place] = value
        return changed(panels, data=data)
    nan = np.array([np.nan], "<f2").view(np.uint8)
    with pytest.raises(ValueError, match="scale of row 0, group 0 is nan"):
        with_bytes((0, 0, slice(2048, 2050)), nan).check()
    with pytest.raises(ValueError, match="code of row 18, column 0 is 1"):
        with_bytes((1, 0, 16 * 8), 129).check()
    with pytest.raises(ValueError, match="code of row 0, column 160 is -128"):
        with_bytes((0, 1, 512), 0).check()
    with pytest.raises(ValueError, match="scale of row 0, group 5 is"):
        with_bytes((0, 1, 2048 + 4), 1).check()
