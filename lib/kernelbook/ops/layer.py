"""What a layer of Qwen3.5 does between its projections, its gated delta net and its attention.

    embedding         stream = rows of the embedding
    add_norm          stream += delta;  out = weight * stream / rms(stream)
    rotary_heads      q, k normed head by head and turned by their position, v beside them, for attention
    attention_gate    out = attention * sigmoid(gate)
    silu_product      out = silu(gate) * up
    silu_norm         out = weight * o / rms(o) * silu(z), head by head
    random_tiles      weights, made on the device

Each of these checks its arrays, compiles, and returns a call of no arguments that only launches; nothing is
synchronized. An `out` that a projection takes next is float32 [M, K], bf16 in uint16 [M, K], or, quantized by the rule
of `formats.quantize_activations` and to its bits, a pair (codes int8 [M, K], scales float32 [M, K / 32]):
`activations` makes each. Inputs called rows may lie apart, as columns of a fused projection's output do:
fused[:, 4:8] is one. They start at multiples of 16 bytes, and so do distances between rows.

Values are not looked at: NaN and infinities go where the formulas take them, and a group of 32 that has one gets a
scale that is none and codes of 0. TypeError and ValueError name an array that is wrong before anything is launched.

Source: prefill_breakdown article, section 3 (the norm and activation bucket); formulas: the model's definition.
"""

from collections.abc import Callable

import numpy as np

from kernelbook import formats
from kernelbook.backends import Backend, Source
from kernelbook.ops.checks import check_apart, check_array, check_count, check_rows, start

EPSILON = 1e-6  # in the norms, as the model has it
GDN_HEAD_DIM = 128
THREADS = 256  # of a block, as compiled into kernels/layer; 4 numbers a thread
FORMS = {"float32": "Float32", "bf16": "Bf16", "int8": "Int8"}
"""Forms of activations, and what kernels call them."""


def sources() -> list[Source]:
    """The kernels for static evidence, those with several forms in the one that takes most registers."""
    out = {"OUT": "Int8"}
    return [_source("1_embedding"), _source("2_add_norm", COLUMNS=5120, **out),
            _source("3_rotary_heads", HEAD_DIM=256, ROTARY=64, OUT="Bf16"),
            _source("4_attention_gate", IN="Bf16", **out), _source("5_silu_product", IN="Bf16", **out),
            _source("6_silu_norm", **out), _source("7_random_tiles")]


def _source(name: str, **defines) -> Source:
    return Source(f"layer/{name}.cu", defines)


def activations(backend: Backend, m: int, k: int, form: str):
    """Memory on the device for activations [m, k] in one of `FORMS`. Raises ValueError for another form, and for k no
    multiple of 32."""
    if form not in FORMS:
        raise ValueError(f"form is {form!r}; expected one of {', '.join(FORMS)}")
    if k % formats.BLOCK:
        raise ValueError(f"k = {k} is no multiple of {formats.BLOCK}, the columns of a tile")
    if form == "int8":
        return backend.empty((m, k), np.int8), backend.empty((m, k // formats.BLOCK), np.float32)
    return backend.empty((m, k), np.float32 if form == "float32" else np.uint16)


# ---- the kernels

def embedding(backend: Backend, table, ids, out) -> Callable:
    """out [M, K] = the rows of `table` that `ids` names.

    table: a weight [vocabulary, K] in tiles, uint8 [vocabulary / 4, K / 32, 72]; ids: int32 [M], each from 0 to below
    the vocabulary, which nothing checks; out: float32 [M, K]. All on the device.
    """
    tokens, columns = len(ids), formats.BLOCK * table.shape[1]
    check_array(backend, table, "table", (table.shape[0], table.shape[1], formats.TILE_BYTES), np.uint8, 8)
    check_array(backend, ids, "ids", (tokens,), np.int32, 4)
    check_array(backend, out, "out", (tokens, columns), np.float32, 16)
    check_apart(backend, {"out": out}, {"table": table, "ids": ids})
    return _launch(backend, _source("1_embedding"), "q4_rows", (tokens, -(-columns // 1024)),
                   [table, ids, out, np.int32(columns)], out, threads=128)


def add_norm(backend: Backend, stream, delta, weight, out, *, sum=None) -> Callable:
    """sum = stream + delta, and out = weight * sum / sqrt(mean of sum^2 + 1e-6), row by row.

    stream, delta: float32 [M, K], K a multiple of 32; delta may be None, and then nothing is added or written but out.
    weight: float32 [K]. sum: None writes over stream.
    """
    tokens, columns = _matrix(stream, "stream")
    _check_columns("stream", columns)
    sum = stream if sum is None else sum
    arrays = {"stream": stream, "sum": sum} | ({} if delta is None else {"delta": delta})
    for what, array in arrays.items():
        check_array(backend, array, what, (tokens, columns), np.float32, 16)
    check_array(backend, weight, "weight", (columns,), np.float32, 16)
    written, form = _out(backend, out, tokens, columns)
    is_in_place = backend.pointer(sum) == backend.pointer(stream)
    check_apart(backend, written | {"sum": sum},
                 {what: a for what, a in (arrays | {"weight": weight}).items()
                  if what != "sum" and not (what == "stream" and is_in_place)})
    return _launch(backend, _source("2_add_norm", COLUMNS=columns, OUT=form), "add_norm", (tokens,),
                   [stream, delta, sum, weight, *_codes_and_scales(out)], out)


def rotary_heads(backend: Backend, q, k, v, q_norm, k_norm, turns, q_out, k_out, v_out) -> Callable:
    """q_out and k_out = RMSNorm of each head of q and k, its first numbers turned by the token's position; v_out = v.

    q: rows [M, heads * 2 * head_dim], each head's query before its gate; k, v: rows [M, kv_heads * head_dim].
    q_norm, k_norm: float32 [head_dim]. turns: float32 [M, 2, rotary / 2], as `turns` makes them.
    q_out [M, heads, head_dim]; k_out, v_out [M, kv_heads, head_dim]: all float32, or all bf16 in uint16.
    """
    for what, array in {"q_out": q_out, "k_out": k_out}.items():
        if len(getattr(array, "shape", ())) != 3:
            raise ValueError(f"{what} has shape {getattr(array, 'shape', None)}; expected 3 axes, [M, heads, head_dim]")
    (tokens, heads, head_dim), kv_heads, rotary = q_out.shape, k_out.shape[1], 2 * turns.shape[-1]
    if head_dim % 128 or head_dim == 0:
        raise ValueError(f"head_dim = {head_dim}; expected a multiple of 128")
    if rotary not in (8, 16, 32, 64, 128):
        raise ValueError(f"turns are of {rotary} numbers; expected 8, 16, 32, 64 or 128")
    strides = [check_rows(backend, array, what, (tokens, columns), np.float32, 16) for what, array, columns in (
        ("q", q, 2 * heads * head_dim), ("k", k, kv_heads * head_dim), ("v", v, kv_heads * head_dim))]
    for what, array in {"q_norm": q_norm, "k_norm": k_norm}.items():
        check_array(backend, array, what, (head_dim,), np.float32, 16)
    check_array(backend, turns, "turns", (tokens, 2, rotary // 2), np.float32, 16)
    form, number = _number(q_out)
    written = {"q_out": q_out, "k_out": k_out, "v_out": v_out}
    for what, array in written.items():
        shape = (tokens, heads if what == "q_out" else kv_heads, head_dim)
        check_array(backend, array, what, shape, number, 16)
    check_apart(backend, written, {"q": q, "k": k, "v": v, "q_norm": q_norm, "k_norm": k_norm, "turns": turns})
    return _launch(backend, _source("3_rotary_heads", HEAD_DIM=head_dim, ROTARY=rotary, OUT=form), "rotary_heads",
                   (tokens, -(-(heads + 2 * kv_heads) // (THREADS // 32))),
                   [*map(start, (q, k, v)), q_norm, k_norm, turns, q_out, k_out, v_out,
                    *map(np.int32, (heads, kv_heads)), *map(np.int64, strides)], (q_out, k_out, v_out))


def attention_gate(backend: Backend, attention, q, out) -> Callable:
    """out [M, heads * head_dim] = attention * sigmoid(gate).

    attention: float32 or bf16 in uint16, [M, heads, head_dim]; q: rows [M, heads * 2 * head_dim], each head's gate
    after its query.
    """
    if len(getattr(attention, "shape", ())) != 3:
        raise ValueError(f"attention has shape {getattr(attention, 'shape', None)}; expected [M, heads, head_dim]")
    tokens, heads, head_dim = attention.shape
    _check_columns("attention's last axis", head_dim)
    given, number = _number(attention)
    check_array(backend, attention, "attention", attention.shape, number, 16)
    stride = check_rows(backend, q, "q", (tokens, 2 * heads * head_dim), np.float32, 16)
    written, form = _out(backend, out, tokens, heads * head_dim)
    check_apart(backend, written, {"attention": attention, "q": q})
    return _launch(backend, _source("4_attention_gate", IN=given, OUT=form), "attention_gate",
                   (tokens, -(-heads * head_dim // (4 * THREADS))),
                   [attention, start(q), *_codes_and_scales(out), np.int32(heads), np.int32(head_dim),
                    np.int64(stride)], out)


def silu_product(backend: Backend, gate, up, out) -> Callable:
    """out [M, K] = silu(gate) * up, both rows [M, K], K a multiple of 32, float32 or bf16 in uint16."""
    tokens, columns = _matrix(gate, "gate")
    _check_columns("gate", columns)
    given, number = _number(gate)
    strides = [check_rows(backend, array, what, (tokens, columns), number, 16)
               for what, array in (("gate", gate), ("up", up))]
    written, form = _out(backend, out, tokens, columns)
    check_apart(backend, written, {"gate": gate, "up": up})
    return _launch(backend, _source("5_silu_product", IN=given, OUT=form), "silu_product",
                   (tokens, -(-columns // (4 * THREADS))),
                   [start(gate), start(up), *_codes_and_scales(out), np.int32(columns), *map(np.int64, strides)], out)


def silu_norm(backend: Backend, o, z, weight, out) -> Callable:
    """out [M, heads * 128] = weight * o / sqrt(mean of o^2 + 1e-6) * silu(z), over the 128 numbers of each head.

    o: float32 [M, heads, 128], as `GatedDeltaNet.prepare_recurrence` gives it; z: rows [M, heads * 128]; weight:
    float32 [128].
    """
    if len(getattr(o, "shape", ())) != 3:
        raise ValueError(f"o has shape {getattr(o, 'shape', None)}; expected [M, heads, {GDN_HEAD_DIM}]")
    tokens, heads, _ = o.shape
    check_array(backend, o, "o", (tokens, heads, GDN_HEAD_DIM), np.float32, 16)
    stride = check_rows(backend, z, "z", (tokens, heads * GDN_HEAD_DIM), np.float32, 16)
    check_array(backend, weight, "weight", (GDN_HEAD_DIM,), np.float32, 16)
    written, form = _out(backend, out, tokens, heads * GDN_HEAD_DIM)
    check_apart(backend, written, {"o": o, "z": z, "weight": weight})
    return _launch(backend, _source("6_silu_norm", OUT=form), "silu_norm",
                   (tokens, -(-heads * GDN_HEAD_DIM // (4 * THREADS))),
                   [o, start(z), weight, *_codes_and_scales(out), np.int32(heads), np.int64(stride)], out)


def random_tiles(backend: Backend, n: int, k: int, *, seed: int, matrix: int, gain: float = 1.0):
    """Valid random tiles of a weight [n, k] on the device, uint8 [n / 4, k / 32, 72], that turn k activations of
    variance 1 into outputs of variance gain^2. The same numbers on every backend.

    seed, matrix: from 0 to 2^32 - 1; different pairs give different weights. Codes are uniform in -8..7, sizes of
    scales uniform over a factor of 3, and their signs a coin's.
    Raises ValueError for n no multiple of 4, k no multiple of 32, a seed or matrix out of range, and a gain whose
    scales float16 does not hold.
    """
    check_count("n", n)
    check_count("k", k)
    for what, value in (("seed", seed), ("matrix", matrix)):
        if not 0 <= value < 2**32:
            raise ValueError(f"{what} = {value}; expected 0 to 2^32 - 1")
    if n % formats.TILE_ROWS or k % formats.BLOCK:
        raise ValueError(f"n = {n}, k = {k}; tiles take multiples of {formats.TILE_ROWS} rows and {formats.BLOCK} "
                         "columns")
    codes, sizes = np.mean(np.arange(-8, 8) ** 2.0), 1 + 1 / 12  # mean squares, of a size over their middle
    scale = gain / np.sqrt(k * codes * sizes)
    if not 2e-4 <= scale <= 4e4:
        raise ValueError(f"gain = {gain} over {k} columns takes scales about {scale:.3g}; a float16 holds 11 bits from "
                         "6e-5 to 6.5e4")
    tiles = backend.empty((n // formats.TILE_ROWS, k // formats.BLOCK, formats.TILE_BYTES), np.uint8)
    words = tiles.size // 4
    _launch(backend, _source("7_random_tiles"), "q4_random_tiles", (min(-(-words // THREADS), 8192),),
            [tiles, np.uint64(words), np.uint32(seed), np.uint32(matrix), np.float32(scale)], tiles)()
    return tiles


def turns(positions, rotary: int, base: float) -> np.ndarray:
    """Cosines and sines of the angles position * base^(-2 i / rotary), i below rotary / 2, worked out in float64:
    float32 [positions, 2, rotary / 2]."""
    angles = np.multiply.outer(np.asarray(positions, np.float64), base ** (-np.arange(0, rotary, 2) / rotary))
    return np.stack([np.cos(angles), np.sin(angles)], axis=1).astype(np.float32)


# ---- checks and launches

def _launch(backend, source, name, grid, args, result, threads=THREADS) -> Callable:
    """The call that launches; one that does nothing where the grid is empty."""
    if 0 in grid:
        return lambda: result
    kernel = backend.compile(source).kernel(name)
    grid, block = (*grid, *(1,) * (3 - len(grid))), (threads, 1, 1)

    def launch():
        kernel(grid, block, args)
        return result
    return launch


def _matrix(array, what) -> tuple[int, int]:
    shape = getattr(array, "shape", ())
    if len(shape) != 2:
        raise ValueError(f"{what} has shape {shape}; expected a matrix")
    return shape


def _check_columns(what, columns):
    if columns % formats.BLOCK or columns == 0:
        raise ValueError(f"{what} has {columns} columns; expected a multiple of {formats.BLOCK}, as tiles have it")


def _number(array) -> tuple[str, type]:
    """What kernels call the numbers of an array, bf16 or else float32, and the dtype that it must then have."""
    return ("Bf16", np.uint16) if getattr(array, "dtype", None) == np.uint16 else ("Float32", np.float32)


def _out(backend, out, tokens, columns) -> tuple[dict, str]:
    """The arrays of `out` by their names in errors, and the form that they are in, once they are right."""
    if isinstance(out, tuple | list):
        if len(out) != 2:
            raise TypeError(f"out has {len(out)} parts; expected an array, or a pair (codes, scales)")
        check_array(backend, out[0], "out codes", (tokens, columns), np.int8, 16)
        check_array(backend, out[1], "out scales", (tokens, columns // formats.BLOCK), np.float32, 4)
        return {"out codes": out[0], "out scales": out[1]}, "Int8"
    form, number = _number(out)
    check_array(backend, out, "out", (tokens, columns), number, 16)
    return {"out": out}, form


def _codes_and_scales(out) -> tuple:
    return tuple(out) if isinstance(out, tuple | list) else (out, None)


# ---- in float64

def rms_norm(x, weight) -> np.ndarray:
    """weight * x / sqrt(mean of x^2 + 1e-6) over the last axis, in float64."""
    x = np.asarray(x, np.float64)
    return np.asarray(weight, np.float64) * x / np.sqrt((x ** 2).mean(axis=-1, keepdims=True) + EPSILON)


def sigmoid(x) -> np.ndarray:
    return np.exp(-np.logaddexp(0, -np.asarray(x, np.float64)))


def silu(x) -> np.ndarray:
    return x * sigmoid(x)


def rotated(x, positions, rotary: int, base: float) -> np.ndarray:
    """x [M, heads, head_dim] with the first `rotary` numbers of each head turned, number i with i + rotary / 2, by the
    row's position, in float64."""
    x = np.array(x, np.float64)
    angles = np.multiply.outer(np.asarray(positions, np.float64), base ** (-np.arange(0, rotary, 2) / rotary))[:, None]
    first, second = x[..., :rotary // 2].copy(), x[..., rotary // 2:rotary].copy()
    x[..., :rotary // 2] = first * np.cos(angles) - second * np.sin(angles)
    x[..., rotary // 2:rotary] = second * np.cos(angles) + first * np.sin(angles)
    return x
