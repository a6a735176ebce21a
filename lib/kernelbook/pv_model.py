"""The INT8 PV kernels in NumPy, lane by lane: the integers and the outputs that they have to give.

The kernels multiply the softmax's probability P of a token by the scale of its V and quantize the product:

    W[t] = P[t] * sV[t]        codes Wq[t] = round(W[t] / sW)        O = sum over steps of sW * (Wq . Vq)

One matrix instruction, a step, multiplies 32 tokens, and sW has to cover just the tokens that the step multiplies.
Which these are is decided here as on the device, by two routes that meet only in the product: V reaches the lanes as
they load it, P's codes go to the lanes that `fragments.Tokens` names. Nothing is shared with the simulator.

    pv          weights and V codes of a run of tokens -> codes, scales, the sums of every step, outputs
    decode      attention on a paged cache: softmax normalized within a partition, partitions merged
    prefill     attention with a causal mask: online softmax over tiles of 64 tokens
    error_terms what the codes of V and what the codes of the weights add to the error

Exponentials are base 2; all arithmetic is float32, in the kernels' order, unless said.

Source: int8_pv article, sections 1, 2, 4 and 6 (8-byte load, scale of a partition, UINT8).
"""

import math
from dataclasses import dataclass
from functools import cache as remember

import numpy as np

from kernelbook.fragments import Tokens
from kernelbook.kv_cache import LARGEST_CODE, PagedCache

KEY_TILE = 64
"""Tokens of one round of the online softmax in `prefill`."""
GROUPINGS = ("fragment", "logical")


@dataclass(frozen=True, eq=False)
class Trace:
    """P V of one run of tokens, from the weights to the output.

    weights: float32 [rows, tokens], P times the scales of V.
    codes: uint8 [rows, tokens], 0 to 127 or 255.
    scales: float32 [rows, groups].
    scale_of: int [tokens], the group whose scale a token's product is multiplied by.
    sums: int32 [steps, rows, head_dim], what the matrix instructions add up.
    out: float32 [rows, head_dim].
    """

    weights: np.ndarray
    codes: np.ndarray
    scales: np.ndarray
    scale_of: np.ndarray
    sums: np.ndarray
    out: np.ndarray

    @property
    def dequantized(self) -> np.ndarray:
        """The weights that the codes stand for, float64 [rows, tokens]."""
        return self.codes * self.scales[:, self.scale_of].astype(np.float64)


def pv(weights: np.ndarray, v_codes: np.ndarray, tokens: Tokens, *, largest: int = LARGEST_CODE,
       scale_tokens: int = 32, grouping: str = "fragment", read: int | None = None) -> Trace:
    """Weights float32 [rows, tokens] times V codes int8 [head_dim, tokens], step by step.

    The run starts at a tile; tokens that its last tile lacks have weight 0.
    largest: code of a group's largest weight: 127, or 255 for unsigned probabilities. Where the operand of P is signed,
    255 takes the offset form, (Wq - 128) Vq + 128 sum Vq, exact in int32.
    scale_tokens: tokens that share a scale, in whole steps: 32 gives every step its own.
    grouping: "fragment", or "logical", the article's wrong kernel: scales of the tokens 0-31, 32-63, ..., the n-th of
    which goes to the n-th step, whatever tokens that multiplies.
    read: bytes read of each load of V, the others taken as 0. None reads all; 8 of 16 is the article's other wrong
    kernel.
    Raises TypeError or ValueError for what does not fit.
    """
    _check(weights, v_codes, tokens, largest, scale_tokens, grouping, read)
    count = weights.shape[1]
    step_scale = np.arange(-(-count // tokens.tile) * tokens.steps) * tokens.instruction.K // scale_tokens
    owned = groups(tokens, count, scale_tokens)
    group = owned if grouping == "fragment" else np.arange(count) // scale_tokens
    codes, scales = _quantize(weights, group, step_scale[-1] + 1, largest)
    sums = _multiply(codes, v_codes, tokens, largest, read)
    out = np.zeros((len(weights), len(v_codes)), np.float32)
    for total, scale in zip(sums, scales.T[step_scale], strict=True):
        out += total.astype(np.float32) * scale[:, None]
    return Trace(weights, codes, scales, owned, sums, out)


def check_form(tokens: Tokens, largest: int, scale_tokens: int) -> None:
    """Raises ValueError for an instruction that is not INT8, a largest code that is neither 127 nor 255, and a scale
    for other than whole steps."""
    i = tokens.instruction
    if i.D.dtype is not np.int32:
        raise ValueError(f"{i.name} is not an INT8 instruction; use one that adds up int32")
    if largest not in (127, 255):
        raise ValueError(f"largest = {largest!r}; expected 127 or 255")
    if scale_tokens < i.K or scale_tokens % i.K or (scale_tokens % tokens.tile and tokens.tile % scale_tokens):
        raise ValueError(f"scale_tokens = {scale_tokens!r}; expected whole steps of {i.K} tokens that divide a tile of "
                         f"{tokens.tile} or are whole tiles")


def _check(weights, v_codes, tokens, largest, scale_tokens, grouping, read):
    for name, array, dtype in (("weights", weights, np.float32), ("v_codes", v_codes, np.int8)):
        if not (isinstance(array, np.ndarray) and array.dtype == dtype):
            raise TypeError(f"{name} must be a NumPy array of {np.dtype(dtype)}, not "
                            f"{getattr(array, 'dtype', type(array).__name__)}")
    if weights.ndim != 2 or v_codes.ndim != 2 or weights.shape[1] != v_codes.shape[1] or not weights.shape[1]:
        raise ValueError(f"weights of shape {weights.shape} and v_codes of {v_codes.shape}; expected [rows, tokens] "
                         "and [head_dim, tokens] with at least one token")
    bad = ~(np.isfinite(weights) & (weights >= 0))
    if bad.any():
        row, token = np.argwhere(bad)[0]
        raise ValueError(f"weights[{row}, {token}] is {weights[row, token]}; a probability times a scale is finite and "
                         "not negative")
    check_form(tokens, largest, scale_tokens)
    if grouping not in GROUPINGS:
        raise ValueError(f"grouping = {grouping!r}; expected {' or '.join(map(repr, GROUPINGS))}")
    if read is not None and not 0 <= read <= tokens.load:
        raise ValueError(f"read = {read!r}; expected 0 to {tokens.load}, the bytes of a load")


def groups(tokens: Tokens, count: int, scale_tokens: int = 32) -> np.ndarray:
    """The group of each of `count` tokens, those that share a scale because their steps do: int [count]."""
    token = np.arange(count)
    step = token // tokens.tile * tokens.steps + tokens.place(token)[0]
    return step * tokens.instruction.K // scale_tokens


def _quantize(weights, group, count, largest):
    """Codes [rows, tokens] and scales [rows, count] of weights whose token t is in group[t] of `count` groups."""
    top = np.zeros((len(weights), count), np.float32)
    for g in np.unique(group):
        top[:, g] = weights[:, group == g].max(axis=1)
    with np.errstate(divide="ignore", over="ignore"):
        inverse = np.float32(largest) / top
    # A group of weight 0, or of so little (below 4e-37) that the inverse is infinite, has codes 0.
    inverse[np.isinf(inverse)] = 0
    # The product of two float32 is exact in float64: one rounding, like the device's fma(W, inverse, 1.5 * 2**23).
    codes = np.rint(weights.astype(np.float64) * inverse[:, group]).astype(np.uint8)
    return codes, top / np.float32(largest)


# ---- what the lanes hold

def v_fragments(v_codes: np.ndarray, tokens: Tokens, read: int | None = None) -> np.ndarray:
    """V codes [head_dim, tokens] as the lanes load them and feed them to the steps.

    Returns [tiles, steps, head_dim tiles, lanes, elements]: at [..., l, e] what lane l holds in element e of V's
    operand. Tokens that the last tile lacks are 0, and so is what lies behind the first `read` bytes of each load.
    Raises ValueError where head_dim is not made of whole operands.
    """
    line, _ = _places(tokens, tokens.operand)
    source = _loads(tokens)
    codes = _tiles(v_codes, tokens, tokens.operand)
    if codes.shape[1] * codes.shape[2] != len(v_codes):
        raise ValueError(f"head_dim = {len(v_codes)}; expected a multiple of the {codes.shape[2]} columns of V that "
                         f"one {tokens.instruction.name} multiplies")
    fragments = codes[:, :, line, source]  # [tiles, head_dim tiles, steps, lanes, elements]
    if read is not None:
        fragments[:, :, source % tokens.load >= read] = 0
    return fragments.swapaxes(1, 2)


def p_fragments(codes: np.ndarray, tokens: Tokens) -> np.ndarray:
    """Codes of the weights, 8-bit [rows, tokens], at the lanes that hold them: [tiles, steps, row tiles, lanes,
    elements]. Rows and tokens that the last tile lacks are 0."""
    name = _other(tokens)
    line, _ = _places(tokens, name)
    return _tiles(codes, tokens, name)[:, :, line, _held(tokens)].swapaxes(1, 2)


def _other(tokens) -> str:
    """The operand that P is."""
    return "A" if tokens.operand == "B" else "B"


@remember
def _places(tokens, name):
    """What of an operand each lane's elements are, [lanes, elements]: the line (a query or a column of V) and k."""
    operand = getattr(tokens.instruction, name)
    row, column = operand.place(*np.indices((operand.lanes, operand.elements)))
    return (row, column) if name == "A" else (column, row)


def _tiles(matrix, tokens, name):
    """[lines, tokens] cut into operands, with zeros to the full: [tiles, line tiles, lines of one, tokens of one]."""
    lines, count = matrix.shape
    width = getattr(tokens.instruction, name).shape[0 if name == "A" else 1]
    padded = np.pad(matrix, ((0, -lines % width), (0, -count % tokens.tile)))
    return padded.reshape(-1, width, padded.shape[1] // tokens.tile, tokens.tile).transpose(2, 0, 1, 3)


@remember
def _held(tokens) -> np.ndarray:
    """Token of the tile that each lane has to have in each element of P's operand, [steps, lanes, elements]."""
    operand = getattr(tokens.instruction, _other(tokens))
    lane, element = np.indices((operand.lanes, operand.elements))
    return tokens.held(_other(tokens), np.arange(tokens.steps)[:, None, None], lane, element)


@remember
def _loads(tokens) -> np.ndarray:
    """Token of the tile that each lane has in each element of V's operand, [steps, lanes, elements], when every lane
    loads `load` tokens of each of its columns at once and uses them up in order, step after step."""
    line, k = _places(tokens, tokens.operand)
    source = np.empty((tokens.steps, *line.shape), int)
    for column in np.unique(line):
        # The lanes that share a column, in the order of their k, load side by side.
        holders, first_elements = np.unique(np.nonzero(line == column)[0], return_index=True)
        first_k = k[line == column][first_elements]
        for place, lane in enumerate(holders[np.argsort(first_k)]):
            elements = np.flatnonzero(line[lane] == column)
            rounds = tokens.steps * len(elements) // tokens.load
            first = (np.arange(rounds) * len(holders) + place) * tokens.load
            loaded = first[:, None] + np.arange(tokens.load)
            source[:, lane, elements] = loaded.reshape(tokens.steps, len(elements))
    return source


def _multiply(codes, v_codes, tokens, largest, read) -> np.ndarray:
    """The sums of every step, int32 [steps, rows, head_dim]."""
    p_name, i = _other(tokens), tokens.instruction
    offset = 128 if largest > LARGEST_CODE and getattr(i, p_name).dtype is np.int8 else 0
    p = p_fragments((codes.astype(np.int16) - offset).astype(getattr(i, p_name).dtype), tokens)
    v = v_fragments(v_codes, tokens, read)
    operands = {name: _unpack(x, getattr(i, name), name) for name, x in ((p_name, p), (tokens.operand, v))}
    # Exact in float32, which a BLAS multiplies: no sum of a step reaches 32 * 255 * 128 < 2**24.
    sums = (operands["A"] @ operands["B"]).astype(np.int32)
    if tokens.operand == "A":
        sums = sums.swapaxes(-1, -2)
    if offset:
        along_k = -2 if tokens.operand == "B" else -1
        sums += offset * operands[tokens.operand].sum(axis=along_k).astype(np.int32)[..., None, :]
    return sums.reshape(-1, *sums.shape[2:])[:, :len(codes)]


@remember
def _owners(operand):
    """Lane and element of everything in an operand, as `Operand.unpack` takes them."""
    return operand.owner(*np.indices(operand.shape))


def _unpack(fragments, operand, name) -> np.ndarray:
    """The operands that fragments [tiles, steps, line tiles, lanes, elements] make up, those of a step side by side:
    float32 [tiles, steps, lines, K] of operand A, [tiles, steps, K, lines] of B."""
    matrices = fragments[(..., *_owners(operand))].astype(np.float32)
    if name == "A":
        return matrices.reshape(*matrices.shape[:2], -1, operand.shape[1])
    return matrices.swapaxes(2, 3).reshape(*matrices.shape[:2], operand.shape[0], -1)


# ---- whole attention

@dataclass(frozen=True, eq=False)
class Partition:
    """A partition of decode. first: its first token. probabilities: float32 [rows, tokens], that add up to 1.
    m, l: float32 [rows], the largest score and the sum of exp2(score - m)."""

    first: int
    probabilities: np.ndarray
    m: np.ndarray
    l: np.ndarray
    trace: Trace


def decode(q: np.ndarray, cache: PagedCache, tokens: Tokens, *, partition: int = 256,
           softmax_scale: float | None = None, common_scale: bool = False, **form) -> np.ndarray:
    """Attention of q float32 [batch, queries, heads, head_dim] to all tokens of a cache -> float32 of that shape.

    Query heads h * group .. h * group + group - 1 read KV head h. A sequence without tokens gives exactly 0.
    partition: tokens, in whole tiles and whole scales. softmax_scale: None takes 1 / sqrt(head_dim).
    common_scale: the article's wrong formula, one scale of V, the largest, for all tokens of a partition.
    form: largest, scale_tokens, grouping and read, as `pv` takes them.
    Raises TypeError or ValueError for what does not fit.
    """
    _check_attention(q, cache)
    out = np.zeros(q.shape, np.float32)
    for place, queries, k_codes, k_scales, v_codes, v_scales in by_kv_head(q, cache):
        if len(k_scales):
            s = scores(queries.reshape(-1, cache.head_dim), k_codes, k_scales, softmax_scale)
            parts = partitions(s, v_codes, v_scales, tokens, partition=partition, common_scale=common_scale, **form)
            merged = sum(w[:, None] * part.trace.out for w, part in zip(merge_weights(parts), parts, strict=True))
            out[place] = merged.reshape(queries.shape)
    return out


def scores(q: np.ndarray, k_codes: np.ndarray, k_scales: np.ndarray, softmax_scale: float | None = None) -> np.ndarray:
    """Scores to base 2, float32 [rows, tokens], of q float32 [rows, head_dim], quantized by rows, and keys of codes
    int8 [tokens, head_dim] and scales float32 [tokens]. softmax_scale: None takes 1 / sqrt(head_dim)."""
    head_dim = q.shape[1]
    codes, scale = quantize_queries(q)
    factor = np.float32((head_dim ** -0.5 if softmax_scale is None else softmax_scale) * math.log2(math.e))
    dots = codes.astype(np.float32) @ k_codes.T.astype(np.float32)  # exact: head_dim * 127 * 127 < 2**24
    return dots * ((scale * factor)[:, None] * k_scales)


def quantize_queries(q: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Codes int8 and scales float32 [rows] of query rows, float32 [rows, head_dim], as the kernels make them: one
    division a row where `kv_cache.quantize_vectors` has one an element.

    scale = amax * (1 / 127) in float32; code = x * (127 / amax) to the nearest, half to even, where the quotient is
    rounded to float32 and the product is not. Rows of no more than 2^-100 are zeros.
    """
    amax = np.abs(q).max(axis=-1, initial=0)
    usable = amax > np.float32(2.0 ** -100)
    inverse = np.divide(np.float32(LARGEST_CODE), amax, out=np.zeros_like(amax), where=usable)
    codes = np.rint(q * inverse[:, None].astype(np.float64)).astype(np.int8)
    return codes, np.where(usable, amax * np.float32(1 / LARGEST_CODE), np.float32(0))


def partitions(scores: np.ndarray, v_codes: np.ndarray, v_scales: np.ndarray, tokens: Tokens, *, partition: int = 256,
               common_scale: bool = False, **form) -> list[Partition]:
    """The partitions of decode of one KV head: scores float32 [rows, tokens], V codes int8 [head_dim, tokens] and
    scales float32 [tokens]; the other parameters are those of `decode`."""
    if partition < 1 or partition % tokens.tile or partition % form.get("scale_tokens", 32):
        raise ValueError(f"partition = {partition!r}; expected whole tiles of {tokens.tile} tokens and whole scales of "
                         f"{form.get('scale_tokens', 32)}")
    parts = []
    for first in range(0, scores.shape[1], partition):
        part = slice(first, first + partition)
        m = scores[:, part].max(axis=1)
        p = np.exp2(scores[:, part] - m[:, None])
        l = p.sum(axis=1)
        p /= l[:, None]
        s_v = np.full_like(v_scales[part], v_scales[part].max()) if common_scale else v_scales[part]
        parts.append(Partition(first, p, m, l, pv(p * s_v, v_codes[:, part], tokens, **form)))
    return parts


def merge_weights(parts: list[Partition]) -> np.ndarray:
    """What each partition's output counts in the whole: float32 [partitions, rows], adding up to 1."""
    m, l = (np.stack([getattr(part, name) for part in parts]) for name in "ml")
    weights = l * np.exp2(m - m.max(axis=0))
    return weights / weights.sum(axis=0)


def prefill(q: np.ndarray, cache: PagedCache, tokens: Tokens, causal_offset, *, softmax_scale: float | None = None,
            **form) -> np.ndarray:
    """Causal attention of q float32 [batch, queries, heads, head_dim] to a cache -> float32 of that shape.

    Query i sees the tokens 0 .. causal_offset + i; causal_offset is an integer, or one for each sequence. A query that
    sees none is exactly 0. Weights are quantized before they are normalized, relative to the largest score so far.
    form: largest, scale_tokens (32 or 64), grouping and read, as `pv` takes them.
    Raises TypeError or ValueError for what does not fit.
    """
    if form.get("scale_tokens", 32) > KEY_TILE:
        raise ValueError(f"scale_tokens = {form['scale_tokens']}; expected at most the {KEY_TILE} tokens after which "
                         "prefill rescales")
    offsets = np.asarray(causal_offset)
    if not np.issubdtype(offsets.dtype, np.integer) or offsets.shape not in ((), (cache.batch,)):
        raise ValueError(f"causal_offset = {causal_offset!r}; expected one integer or {cache.batch}, one for each "
                         "sequence")
    _check_attention(q, cache)
    offsets = np.broadcast_to(offsets, cache.batch)
    out = np.zeros(q.shape, np.float32)
    for place, queries, k_codes, k_scales, v_codes, v_scales in by_kv_head(q, cache):
        last = np.repeat(offsets[place[0]] + np.arange(len(queries)), queries.shape[1])[:, None]
        s = scores(queries.reshape(-1, cache.head_dim), k_codes, k_scales, softmax_scale)
        s[np.arange(len(k_scales)) > last] = -np.inf
        m = np.full((len(s), 1), -np.inf, np.float32)
        l, o = np.zeros_like(m), np.zeros((len(s), cache.head_dim), np.float32)
        for first in range(0, len(k_scales), KEY_TILE):
            tile = slice(first, first + KEY_TILE)
            m_new = np.maximum(m, s[:, tile].max(axis=1, keepdims=True))
            base = np.where(np.isfinite(m_new), m_new, np.float32(0))  # a row that has seen nothing yet stays 0
            alpha, p = np.exp2(m - base), np.exp2(s[:, tile] - base)
            l = alpha * l + p.sum(axis=1, keepdims=True)
            o = alpha * o + pv(p * v_scales[tile], v_codes[:, tile], tokens, **form).out
            m = m_new
        out[place] = np.divide(o, l, out=o, where=l > 0).reshape(queries.shape)
    return out


def _check_attention(q, cache):
    cache.check()
    if not (isinstance(q, np.ndarray) and q.dtype == np.float32):
        raise TypeError(f"q must be a NumPy array of float32, not {getattr(q, 'dtype', type(q).__name__)}")
    if q.ndim != 4 or (q.shape[0], q.shape[3]) != (cache.batch, cache.head_dim):
        raise ValueError(f"q has shape {q.shape}; expected [{cache.batch}, queries, heads, {cache.head_dim}]")
    if q.shape[2] < 1 or q.shape[2] % cache.kv_heads:
        raise ValueError(f"q has {q.shape[2]} heads; expected a multiple of the cache's {cache.kv_heads} KV heads")


def by_kv_head(q, cache):
    """For every sequence and KV head: the place in q and out of the query heads that read it, their queries
    [queries, group, head_dim], K codes [tokens, head_dim], K scales, V codes [head_dim, tokens], V scales."""
    group = q.shape[2] // cache.kv_heads
    for sequence in range(cache.batch):
        k_codes, k_scales, v_codes, v_scales = cache.tokens(sequence)
        for head in range(cache.kv_heads):
            place = sequence, slice(None), slice(head * group, head * group + group)
            yield place, q[place], k_codes[:, head], k_scales[:, head], v_codes[:, head].T, v_scales[:, head]


# ---- where the error comes from

@dataclass(frozen=True, eq=False)
class ErrorTerms:
    """O - O', taken apart; float64 [rows, head_dim].

    cache: sum P eV, of V that the codes cannot hold. weights: sum eW Vq, of weights that the codes cannot hold.
    """

    cache: np.ndarray
    weights: np.ndarray

    @property
    def total(self) -> np.ndarray:
        return self.cache + self.weights


def error_terms(probabilities: np.ndarray, values: np.ndarray, v_codes: np.ndarray, v_scales: np.ndarray,
                dequantized: np.ndarray) -> ErrorTerms:
    """The two terms of O - O' (int8_pv, section 1), O = P V of the real V, O' = dequantized weights times V codes.

    probabilities: P, [rows, tokens]. values: V before it went into the cache, [tokens, head_dim].
    v_codes: int8 [head_dim, tokens]. v_scales: [tokens]. dequantized: [rows, tokens], what the codes of W = P sV stand
    for: `Trace.dequantized`, of decode times the merge weight of its partition.
    Raises ValueError for shapes that do not fit.
    """
    p, v, codes, s_v, w = (np.asarray(x, np.float64) for x in (probabilities, values, v_codes, v_scales, dequantized))
    if p.ndim != 2 or v.ndim != 2 or (w.shape, codes.shape, s_v.shape) != (p.shape, v.T.shape, v.shape[:1]) or \
            p.shape[1] != len(v):
        raise ValueError(f"probabilities {p.shape}, values {v.shape}, v_codes {codes.shape}, v_scales {s_v.shape}, "
                         f"dequantized {w.shape}; expected [rows, tokens], [tokens, head_dim], [head_dim, tokens], "
                         "[tokens], [rows, tokens]")
    return ErrorTerms(p @ (v - (codes * s_v).T), (p * s_v - w) @ codes.T)
