"""What a layer does between its projections: every kernel on every backend in every form against float64, rows that lie
apart, quantizing to the bits of `formats.quantize_activations`, and what NaN and bad input do."""

import numpy as np
import pytest

from kernelbook import formats, toolchain
from kernelbook.backends.cpu import CpuBackend
from kernelbook.ops import layer as op
from kernelbook.stats import errors

BOUNDS = {"float32": 3e-7, "bf16": 4e-3}
TOKENS = (1, 5)


def normal(*shape, seed=0):
    return np.random.default_rng((seed, *shape)).standard_normal(shape, np.float32)


def apart(backend, *matrices):
    """Matrices of as many rows side by side in one array on the device: a view of each."""
    joined = backend.array(np.concatenate(matrices, axis=1))
    ends = np.cumsum([m.shape[1] for m in matrices])
    return [joined[:, end - m.shape[1]:end] for m, end in zip(matrices, ends, strict=True)]


def bf16(x):
    """Nearest bf16 numbers, as their bits."""
    bits = np.asarray(x, np.float32).view(np.uint32)
    return ((bits + 0x7FFF + (bits >> 16 & 1)) >> 16).astype(np.uint16)


def floats(bits):
    return (bits.astype(np.uint32) << 16).view(np.float32)


def check(backend, expected, make):
    """`make(out)` gives in every form what `expected` has: float64 [M, K]."""
    plain = backend.numpy(make(op.activations(backend, *expected.shape, "float32"))())
    assert errors(plain, expected).relative_frobenius <= BOUNDS["float32"]
    rounded = backend.numpy(make(op.activations(backend, *expected.shape, "bf16"))())
    assert np.array_equal(rounded, bf16(plain))
    codes, scales = make(op.activations(backend, *expected.shape, "int8"))()
    for found, right in zip((codes, scales), formats.quantize_activations(plain), strict=True):
        assert np.array_equal(backend.numpy(found), right)


# ---- kernels against float64

@pytest.mark.parametrize("columns", [32, 160, 1056])
@pytest.mark.parametrize("tokens", TOKENS)
def test_add_norm(backend, tokens, columns):
    x, y, weight = normal(tokens, columns), normal(tokens, columns, seed=1), normal(columns, seed=2)
    x[0] *= 1e-4  # where the epsilon counts
    y[0] *= 1e-4
    delta, weight_ = backend.array(y), backend.array(weight)
    check(backend, op.rms_norm((x + y).astype(np.float64), weight),
          lambda out: op.add_norm(backend, backend.array(x), delta, weight_, out))
    check(backend, op.rms_norm(x, weight), lambda out: op.add_norm(backend, backend.array(x), None, weight_, out))


def test_add_norm_writes_the_sum_where_it_is_told(backend):
    x, y, weight = normal(3, 64), normal(3, 64, seed=1), backend.array(normal(64, seed=2))
    stream, delta, out = backend.array(x), backend.array(y), op.activations(backend, 3, 64, "float32")
    total = backend.empty((3, 64), np.float32)
    first = backend.numpy(op.add_norm(backend, stream, delta, weight, out, sum=total)())
    assert np.array_equal(backend.numpy(total), x + y) and np.array_equal(backend.numpy(stream), x)
    second = backend.numpy(op.add_norm(backend, stream, delta, weight, out)())
    assert np.array_equal(backend.numpy(stream), x + y) and np.array_equal(first, second)
    op.add_norm(backend, stream, None, weight, out, sum=total)()
    assert np.array_equal(backend.numpy(stream), x + y)


@pytest.mark.parametrize("columns", [32, 1056])
@pytest.mark.parametrize("tokens", TOKENS)
def test_silu_product(backend, tokens, columns):
    gate, up = 4 * normal(tokens, columns), normal(tokens, columns, seed=1)
    expected = op.silu(gate) * up
    check(backend, expected, lambda out: op.silu_product(backend, backend.array(gate), backend.array(up), out))
    rows = apart(backend, gate, up, normal(tokens, 4))
    check(backend, expected, lambda out: op.silu_product(backend, *rows[:2], out))
    gate, up = bf16(gate), bf16(up)
    rows = apart(backend, up, gate, bf16(normal(tokens, 8)))
    check(backend, op.silu(floats(gate)) * floats(up), lambda out: op.silu_product(backend, *rows[1::-1], out))


@pytest.mark.parametrize("tokens,heads", [(1, 1), (5, 3), (3, 9)])
def test_silu_norm(backend, tokens, heads):
    o, z, weight = normal(tokens, heads, 128), normal(tokens, heads * 128, seed=1), normal(128, seed=2)
    o *= np.exp(normal(tokens, heads, 1, seed=3) * 4)
    expected = (op.rms_norm(o, weight) * op.silu(z).reshape(o.shape)).reshape(z.shape)
    o, weight = map(backend.array, (o, weight))
    check(backend, expected, lambda out: op.silu_norm(backend, o, backend.array(z), weight, out))
    _, rows = apart(backend, normal(tokens, 12), z)
    check(backend, expected, lambda out: op.silu_norm(backend, o, rows, weight, out))


@pytest.mark.parametrize("tokens,heads,head_dim", [(1, 1, 32), (5, 3, 128), (3, 5, 256)])
def test_attention_gate(backend, tokens, heads, head_dim):
    """The gate is behind each head's query; attention comes as floats or as bf16."""
    attention, q = normal(tokens, heads, head_dim), normal(tokens, heads, 2, head_dim, seed=1)
    rows, _ = apart(backend, q.reshape(tokens, -1), normal(tokens, 4))
    for given, device in ((attention, attention), (floats(bf16(attention)), bf16(attention))):
        expected = (given * op.sigmoid(q[:, :, 1])).reshape(tokens, -1)
        device = backend.array(device)
        check(backend, expected, lambda out, device=device: op.attention_gate(backend, device, rows, out))


@pytest.mark.parametrize("tokens,heads,kv_heads,head_dim,rotary", [
    (1, 1, 1, 128, 8), (5, 6, 2, 128, 128), (3, 6, 1, 256, 64), (3, 3, 3, 384, 32)])
def test_rotary_heads(backend, tokens, heads, kv_heads, head_dim, rotary):
    q = normal(tokens, heads, 2, head_dim)
    k, v = (normal(tokens, kv_heads, head_dim, seed=seed) for seed in (4, 5))
    q_norm, k_norm = normal(head_dim, seed=2), normal(head_dim, seed=3)
    positions = 2000 + np.arange(tokens)
    q_right, k_right = (op.rotated(op.rms_norm(x, norm), positions, rotary, 1e7)
                        for x, norm in ((q[:, :, 0], q_norm), (k, k_norm)))
    joined = apart(backend, *(x.reshape(tokens, -1) for x in (q, k, v)))
    alone = [backend.array(x.reshape(tokens, -1)) for x in (q, k, v)]
    others = [backend.array(x) for x in (q_norm, k_norm, op.turns(positions, rotary, 1e7))]
    for rows in (joined, alone):
        outs = [backend.empty(x.shape, np.float32) for x in (q[:, :, 0], k, v)]
        op.rotary_heads(backend, *rows, *others, *outs)()
        plain = list(map(backend.numpy, outs))
        assert errors(plain[0], q_right).relative_frobenius <= BOUNDS["float32"]
        assert errors(plain[1], k_right).relative_frobenius <= BOUNDS["float32"]
        assert np.array_equal(plain[2], v)
        outs = [backend.empty(x.shape, np.uint16) for x in (q[:, :, 0], k, v)]
        op.rotary_heads(backend, *rows, *others, *outs)()
        for found, right in zip(outs, plain, strict=True):
            assert np.array_equal(backend.numpy(found), bf16(right))


def test_rotary_by_hand():
    """Position 0 turns nothing; the first pair turns by the position itself; what is not rotary stays."""
    x = normal(3, 2, 128).astype(np.float64)
    y = op.rotated(x, [0, 1, 7], 32, 1e7)
    assert np.array_equal(y[0], x[0]) and np.array_equal(y[..., 32:], x[..., 32:])
    assert np.allclose(y[2, 1, 0], x[2, 1, 0] * np.cos(7) - x[2, 1, 16] * np.sin(7))
    assert np.allclose(y[2, 1, 16], x[2, 1, 16] * np.cos(7) + x[2, 1, 0] * np.sin(7))
    slow = 7 * 1e7 ** (-15 / 16)
    assert np.allclose(y[2, 1, 31], x[2, 1, 31] * np.cos(slow) + x[2, 1, 15] * np.sin(slow))
    table = op.turns([0, 1, 7], 32, 1e7)
    assert table.shape == (3, 2, 16) and np.allclose(table[2, :, 15], (np.cos(slow), np.sin(slow)))


@pytest.mark.parametrize("columns", [32, 1056])
def test_embedding(backend, columns):
    tiles = formats.random_tiles(np.random.default_rng(0), 12, columns)
    ids = np.array([11, 0, 1, 2, 3, 4, 11], np.int32)
    out = backend.empty((7, columns), np.float32)
    op.embedding(backend, backend.array(tiles.data), backend.array(ids), out)()
    assert np.array_equal(backend.numpy(out), tiles.dequantize()[ids])


# ---- weights

def test_random_tiles_are_valid_and_their_own(backend):
    device = op.random_tiles(backend, 64, 512, seed=1, matrix=2)
    tiles = formats.Tiles(backend.numpy(device)).check()
    w, sizes = tiles.dequantize(np.float64), np.abs(tiles.scales.astype(np.float64))
    assert abs(np.sqrt((w ** 2).sum(axis=1).mean()) - 1) < 0.05
    assert abs(w.sum(axis=1)).max() < 5  # of 512 numbers of size 512^-0.5, and not 512^0.5 / 9 of one sign
    assert sizes.max() / sizes.min() < 3.01 and 0.45 < (tiles.scales < 0).mean() < 0.55
    assert np.ptp(np.bincount(tiles.codes.reshape(-1) + 8, minlength=16)) < 0.2 * w.size / 16
    for other in (dict(seed=1, matrix=3), dict(seed=2, matrix=2)):
        assert (backend.numpy(op.random_tiles(backend, 64, 512, **other)) == tiles.data).mean() < 0.01
    doubled = formats.Tiles(backend.numpy(op.random_tiles(backend, 64, 512, seed=1, matrix=2, gain=2)))
    assert np.array_equal(doubled.codes, tiles.codes) and np.array_equal(doubled.scales, 2 * tiles.scales)


def test_random_tiles_are_the_same_everywhere(backend, simulator):
    first, second = (b.numpy(op.random_tiles(b, 8, 96, seed=3, matrix=4)) for b in (backend, simulator))
    assert np.array_equal(first, second)


def test_random_tiles_that_cannot_be():
    backend = CpuBackend()
    for words, how in (("n = 6, k = 32; tiles take multiples of 4 rows", (6, 32)), ("k = 40", (8, 40)),
                       ("n = 0; expected at least 1", (0, 32))):
        with pytest.raises(ValueError, match=words):
            op.random_tiles(backend, *how, seed=0, matrix=0)
    with pytest.raises(ValueError, match=r"seed = -1; expected 0 to 2\^32 - 1"):
        op.random_tiles(backend, 4, 32, seed=-1, matrix=0)
    with pytest.raises(ValueError, match="gain = 0.001 over 5120 columns takes scales about"):
        op.random_tiles(backend, 4, 5120, seed=0, matrix=0, gain=1e-3)


# ---- hard numbers

def kernels(backend, form, x):
    """What every kernel with several forms makes of x [M, 256], by its name."""
    m = len(x)
    ones, big = np.ones((m, 256), np.float32), np.full((m, 512), 40, np.float32)  # gates that are open
    heads, given, weight = (backend.array(array) for array in (ones.reshape(m, 2, 128), x, ones[0]))
    ones, big = backend.array(ones), backend.array(big)
    make = {"add_norm": lambda out: op.add_norm(backend, given, None, weight, out),
            "silu_product": lambda out: op.silu_product(backend, ones, given, out),
            "silu_norm": lambda out: op.silu_norm(backend, heads, given, weight[:128], out),
            "attention_gate": lambda out: op.attention_gate(backend, given.reshape(m, 2, 128), big, out)}
    return {name: call(op.activations(backend, m, 256, form))() for name, call in make.items()}


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_numbers_that_are_none_stay_in_their_row_or_group(backend, value):
    x = normal(3, 256)
    x[1, 70] = value
    for name, out in kernels(backend, "float32", x).items():
        bad = ~np.isfinite(backend.numpy(out))
        if name == "add_norm":
            assert not bad[[0, 2]].any() and (np.isnan(value) and bad[1].all() or bad[1, 70]), name
        else:
            assert bad[1, 70] and bad.sum() == 1, name
    for name, out in kernels(backend, "bf16", x).items():
        bad = ~np.isfinite(floats(backend.numpy(out)))
        assert bad[1, 70] and not bad[[0, 2]].any(), name
    for name, (codes, scales) in kernels(backend, "int8", x).items():
        codes, bad = backend.numpy(codes), ~np.isfinite(backend.numpy(scales))
        assert bad[1, 2] and not bad[[0, 2]].any() and (name == "add_norm" or bad.sum() == 1), name
        assert not codes[1, 64:96].any(), name


def test_groups_of_zeros_and_of_next_to_nothing_quantize(backend):
    up = normal(2, 96)
    up[0, 32:64], up[1, :32], up[1, 64:] = 0, 1e-44, 3e38
    gate = np.full((2, 96), 30, np.float32)
    gate[1, 64:] = 1
    plain = backend.numpy(op.silu_product(backend, backend.array(gate), backend.array(up),
                                          op.activations(backend, 2, 96, "float32"))())
    codes, scales = op.silu_product(backend, backend.array(gate), backend.array(up),
                                    op.activations(backend, 2, 96, "int8"))()
    for found, right in zip((codes, scales), formats.quantize_activations(plain), strict=True):
        assert np.array_equal(backend.numpy(found), right)


def test_far_gates_open_and_close(backend):
    gate = np.array([[-200, -90, -20, 0, 20, 90, 200] + [0] * 25], np.float32)
    up = np.ones_like(gate)
    out = backend.numpy(op.silu_product(backend, backend.array(gate), backend.array(up),
                                        op.activations(backend, 1, 32, "float32"))())
    assert np.allclose(out, op.silu(gate), rtol=1e-6, atol=1e-30)


def test_no_tokens_launch_nothing(backend):
    out = op.activations(backend, 0, 64, "float32")
    assert op.silu_product(backend, *(backend.empty((0, 64), np.float32) for _ in range(2)), out)() is out
    assert op.add_norm(backend, backend.empty((0, 64), np.float32), None, backend.empty(64, np.float32), out)() is out


def test_order_of_lanes_waves_and_blocks_changes_no_bit():
    def run(order):
        backend = CpuBackend(order=order)
        return [np.concatenate([part.reshape(-1).view(np.uint8) for part in out])
                for out in kernels(backend, "int8", normal(3, 256)).values()]
    for first, other in zip(run(0), run(3), strict=True):
        assert np.array_equal(first, other)


def test_what_lies_around_the_output_is_left_alone(backend):
    memory = backend.array(np.full((7, 64), 7, np.float32))
    x = normal(3, 64)
    op.silu_product(backend, backend.array(x), backend.array(x), memory[2:5])()
    found = backend.numpy(memory)
    assert np.allclose(found[2:5], op.silu(x) * x, rtol=1e-5) and (found[[0, 1, 5, 6]] == 7).all()


# ---- bad input

def test_bad_input_is_refused_before_anything_is_written(backend):
    def empty(*shape, dtype=np.float32):
        return backend.array(np.zeros(shape, dtype))

    x, out, heads = empty(3, 64), empty(3, 64), empty(3, 1, 128)
    row, wide = empty(64), empty(3, 128)
    q, k, turns = empty(3, 256), empty(3, 128), empty(3, 2, 16)
    cases = [
        (TypeError, "stream is a ndarray; expected an array on",
         lambda: op.add_norm(backend, np.zeros((3, 64), np.float32), None, row, out)),
        (ValueError, r"stream has shape \(64,\); expected a matrix", lambda: op.add_norm(backend, row, None, row, out)),
        (ValueError, "stream has 40 columns; expected a multiple of 32",
         lambda: op.add_norm(backend, empty(3, 40), None, empty(40), empty(3, 40))),
        (ValueError, r"delta has shape \(2, 64\)", lambda: op.add_norm(backend, x, empty(2, 64), row, out)),
        (ValueError, r"weight has shape \(32,\)", lambda: op.add_norm(backend, x, None, empty(32), out)),
        (ValueError, "out overlaps stream", lambda: op.add_norm(backend, x, None, row, x, sum=empty(3, 64))),
        (ValueError, "out overlaps sum", lambda: op.add_norm(backend, x, None, row, x)),
        (ValueError, "sum overlaps delta", lambda: op.add_norm(backend, x, out, row, empty(3, 64), sum=out)),
        (TypeError, "out has dtype float64", lambda: op.silu_product(backend, x, x, empty(3, 64, dtype=np.float64))),
        (TypeError, r"out has 3 parts", lambda: op.silu_product(backend, x, x, (out, out, out))),
        (ValueError, r"out scales has shape \(3, 3\); expected \(3, 2\)",
         lambda: op.silu_product(backend, x, x, (empty(3, 64, dtype=np.int8), empty(3, 3)))),
        (ValueError, r"up has shape \(3, 128\); expected \(3, 64\)", lambda: op.silu_product(backend, x, wide, out)),
        (TypeError, "up has dtype float32; expected uint16",
         lambda: op.silu_product(backend, empty(3, 64, dtype=np.uint16), x, out)),
        (ValueError, "gate has strides", lambda: op.silu_product(backend, wide[:, ::2], x, out)),
        (ValueError, "gate has strides", lambda: op.silu_product(backend, empty(3, 66)[:, :64], x, out)),
        (ValueError, "gate starts at address", lambda: op.silu_product(backend, wide[:, 2:66], x, out)),
        (ValueError, "out overlaps gate", lambda: op.silu_product(backend, wide[:, :64], x,
                                                                  wide.reshape(-1)[64:256].reshape(3, 64))),
        (ValueError, r"o has shape \(3, 64\)", lambda: op.silu_norm(backend, x, x, row, out)),
        (ValueError, r"o has shape \(3, 1, 64\); expected \(3, 1, 128\)",
         lambda: op.silu_norm(backend, empty(3, 1, 64), x, row, out)),
        (ValueError, r"weight has shape \(64,\); expected \(128,\)",
         lambda: op.silu_norm(backend, heads, wide, row, empty(3, 128))),
        (ValueError, r"attention has shape \(3, 64\)", lambda: op.attention_gate(backend, x, wide, out)),
        (ValueError, r"q has shape \(3, 128\); expected \(3, 256\)",
         lambda: op.attention_gate(backend, heads, wide, empty(3, 128))),
        (TypeError, "attention has dtype float64",
         lambda: op.attention_gate(backend, empty(3, 1, 128, dtype=np.float64), q, empty(3, 128))),
        (ValueError, "head_dim = 64; expected a multiple of 128",
         lambda: op.rotary_heads(backend, wide, x, x, row, row, turns, *(empty(3, 1, 64) for _ in "qkv"))),
        (ValueError, "turns are of 24 numbers; expected 8, 16",
         lambda: op.rotary_heads(backend, q, k, k, empty(128), empty(128), empty(3, 2, 12), heads, empty(3, 1, 128),
                                 empty(3, 1, 128))),
        (TypeError, "v_out has dtype uint16; expected float32",
         lambda: op.rotary_heads(backend, q, k, k, empty(128), empty(128), turns, heads, empty(3, 1, 128),
                                 empty(3, 1, 128, dtype=np.uint16))),
        (ValueError, "k_out overlaps q_out|q_out overlaps k_out",
         lambda: op.rotary_heads(backend, q, k, k, empty(128), empty(128), turns, heads, heads, empty(3, 1, 128))),
        (TypeError, "ids has dtype int64",
         lambda: op.embedding(backend, empty(2, 2, 72, dtype=np.uint8), empty(3, dtype=np.int64), out)),
        (ValueError, r"table has shape \(2, 2, 64\); expected \(2, 2, 72\)",
         lambda: op.embedding(backend, empty(2, 2, 64, dtype=np.uint8), empty(3, dtype=np.int32), out)),
        (ValueError, "form is 'fp8'; expected one of float32, bf16", lambda: op.activations(backend, 1, 32, "fp8")),
        (ValueError, "k = 33 is no multiple of 32", lambda: op.activations(backend, 1, 33, "int8")),
    ]
    for kind, words, attempt in cases:
        with pytest.raises(kind, match=words):
            attempt()
    for array in (x, out, heads, wide, row):
        assert not backend.numpy(array).any()


# ---- static evidence

@pytest.mark.parametrize("target", ["sm_80", "sm_90a", "sm_120", "gfx90a", "gfx942"])
def test_kernels_build_without_spills(target):
    reason = toolchain.targets()[target]
    if reason:
        pytest.skip(reason)
    rows = [row for source in op.sources() for row in toolchain.evidence(source, [target])]
    assert [row["kernel"] for row in rows] == ["q4_rows", "add_norm", "rotary_heads", "attention_gate", "silu_product",
                                               "silu_norm", "q4_random_tiles"]
    for row in rows:
        assert row["spill_bytes"] == 0, row
