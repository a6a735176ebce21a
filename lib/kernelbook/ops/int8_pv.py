"""Attention on a paged INT8 KV cache (`kernelbook.kv_cache`).

    out[query, head] = sum over tokens t of  softmax_t(softmax_scale * q . K[t]) * V[t]

    write_tokens    quantizes new tokens' K and V into the cache's pages on a device
    reference       the attention in float64 on the dequantized cache

Source: int8_pv article, sections 1 to 3.
"""

from dataclasses import fields
from numbers import Real

import numpy as np

from kernelbook.backends import Backend, Source
from kernelbook.kv_cache import HEAD_DIMS, PagedCache, check_geometry
from kernelbook.ops.checks import check_apart, check_array

# The geometry compiled into kernels/int8_pv/1_quantize_kv.cu.
WAVES = 4


def sources() -> list[Source]:
    """Every kernel of the family in every form, for static evidence."""
    return [Source("int8_pv/1_quantize_kv.cu", {"HEAD_DIM": head_dim}) for head_dim in HEAD_DIMS]


def on_device(backend: Backend, cache: PagedCache) -> PagedCache:
    """A copy of a cache in host memory, on the device."""
    return PagedCache(*(backend.array(getattr(cache, f.name)) for f in fields(cache)))


def on_host(backend: Backend, cache: PagedCache) -> PagedCache:
    """A copy of a cache on the device, in host memory."""
    return PagedCache(*(backend.numpy(getattr(cache, f.name)) for f in fields(cache)))


def write_tokens(backend: Backend, cache: PagedCache, k, v, slots: np.ndarray) -> None:
    """Quantize new tokens' keys and values into the pages of a cache on the device. Nothing is synchronized.

    k, v: float32 [tokens, kv_heads, head_dim] on the device.
    slots: integers [tokens, 2] in host memory: the page and the offset in it that a token goes to, as
    `PagedCache.slots` gives them. Block tables and lengths stay as they are.
    The bits are those of `kv_cache.quantize_vectors`; values are not looked at, and a vector with a NaN or an infinity
    gets a scale that is not finite.
    Raises TypeError or ValueError, before anything is launched, on a wrong dtype, device, shape, stride or alignment,
    on a slot outside the cache or given twice, and where k, v and the cache share memory.
    """
    if getattr(cache.k_codes, "ndim", None) != 4:
        raise ValueError(f"k_codes has shape {getattr(cache.k_codes, 'shape', None)}; expected "
                         "[blocks, kv_heads, block_size, head_dim]")
    blocks, heads, block_size, head_dim = cache.k_codes.shape
    check_geometry(heads, head_dim, block_size)
    pages = {"k_codes": (np.int8, (blocks, heads, block_size, head_dim)),
             "k_scales": (np.float32, (blocks, heads, block_size)),
             "v_codes": (np.int8, (blocks, heads, head_dim, block_size)),
             "v_scales": (np.float32, (blocks, heads, block_size))}
    for name, (dtype, shape) in pages.items():
        check_array(backend, getattr(cache, name), name, shape, dtype, 16)
    slots = _check_slots(slots, blocks, block_size)
    for name, array in (("k", k), ("v", v)):
        check_array(backend, array, name, (len(slots), heads, head_dim), np.float32, 4)
    written = {name: getattr(cache, name) for name in pages}
    check_apart(backend, written, {"k": k, "v": v})
    if len(slots) == 0:
        return
    kernel = backend.compile("int8_pv/1_quantize_kv.cu", {"HEAD_DIM": head_dim}).kernel("quantize_kv")
    numbers = map(np.int32, (len(slots), heads, block_size))
    kernel((-(-len(slots) * heads // WAVES), 1, 1), (backend.wave, WAVES, 1),
           [k, v, backend.array(slots), *written.values(), *numbers])


def _check_slots(slots, blocks, block_size) -> np.ndarray:
    """The slots as the kernel reads them, int32 [tokens, 2], once each is a place in the cache and no two are one."""
    if not isinstance(slots, np.ndarray) or not np.issubdtype(slots.dtype, np.integer):
        raise TypeError(f"slots is a {type(slots).__name__} of {getattr(slots, 'dtype', 'no dtype')}; expected a NumPy "
                        "array of integers [tokens, 2]")
    if slots.ndim != 2 or slots.shape[1] != 2:
        raise ValueError(f"slots has shape {slots.shape}; expected [tokens, 2], a page and an offset for each token")
    bad = np.flatnonzero(((slots < 0) | (slots >= (blocks, block_size))).any(axis=1))
    if bad.size:
        page, offset = slots[bad[0]]
        raise ValueError(f"slots[{bad[0]}] is page {page}, offset {offset}; the cache has the pages 0 to {blocks - 1} "
                         f"of {block_size} tokens")
    places = slots[:, 0].astype(np.int64) * block_size + slots[:, 1]
    order = np.argsort(places, kind="stable")
    twice = np.flatnonzero(np.diff(places[order]) == 0)
    if twice.size:
        first, second = order[twice[0]:twice[0] + 2]
        raise ValueError(f"slots[{first}] and slots[{second}] are both page {slots[first, 0]}, offset "
                         f"{slots[first, 1]}; a place takes one token")
    return np.ascontiguousarray(slots, np.int32)


def reference(q, cache: PagedCache, *, softmax_scale: float | None = None, causal_offset=None) -> np.ndarray:
    """Attention in float64 on a cache in host memory: q [batch, queries, heads, head_dim] -> float64 of that shape.

    Query heads h * group .. h * group + group - 1 read KV head h, group = heads / kv_heads.
    softmax_scale: None takes 1 / sqrt(head_dim).
    causal_offset: None lets every query see its whole sequence (decode); an integer, or one for each sequence, lets
    query i see the tokens 0 .. causal_offset + i, so that the history's length makes a prefill that follows it.
    A query that sees nothing, for it is masked or its sequence has length 0, is exactly 0.
    Raises what `PagedCache.check` raises; TypeError or ValueError on a q, softmax_scale or causal_offset that does not
    fit.
    """
    cache.check()
    q = np.asarray(q)
    if not np.issubdtype(q.dtype, np.floating):
        raise TypeError(f"q has dtype {q.dtype}; expected floats")
    if q.ndim != 4 or (q.shape[0], q.shape[3]) != (cache.batch, cache.head_dim):
        raise ValueError(f"q has shape {q.shape}; expected [{cache.batch}, queries, heads, {cache.head_dim}]")
    _, queries, heads, head_dim = q.shape
    if heads < 1 or heads % cache.kv_heads:
        raise ValueError(f"q has {heads} heads; expected a multiple of the cache's {cache.kv_heads} KV heads")
    if softmax_scale is None:
        softmax_scale = head_dim ** -0.5
    if isinstance(softmax_scale, bool) or not isinstance(softmax_scale, Real):
        raise TypeError(f"softmax_scale is {softmax_scale!r} of type {type(softmax_scale).__name__}; expected a number")
    if not np.isfinite(softmax_scale):
        raise ValueError(f"softmax_scale = {softmax_scale}; expected a finite number")
    last = _last_seen(causal_offset, cache, queries)
    out = np.zeros(q.shape, np.float64)
    for sequence in range(cache.batch):
        k, v = cache.dequantize(sequence)
        seen = np.arange(len(k)) <= last[sequence][:, None]  # [queries, tokens]
        grouped = q[sequence].astype(np.float64).reshape(queries, cache.kv_heads, -1, head_dim)
        scores = np.einsum("qhgd,thd->hgqt", grouped, k, optimize=True) * softmax_scale
        attended = np.einsum("hgqt,thd->qhgd", _softmax(scores, seen), v, optimize=True)
        out[sequence] = attended.reshape(queries, heads, head_dim)
    return out


def _last_seen(causal_offset, cache, queries) -> np.ndarray:
    """The last token that each query sees, [batch, queries]; below 0 where it sees none."""
    if causal_offset is None:
        return np.repeat(cache.lengths[:, None] - 1, queries, axis=1)
    offsets = np.asarray(causal_offset)
    if not np.issubdtype(offsets.dtype, np.integer):
        raise TypeError(f"causal_offset has dtype {offsets.dtype}; expected integers")
    if offsets.shape not in ((), (cache.batch,)):
        raise ValueError(f"causal_offset has shape {offsets.shape}; expected one integer or {cache.batch}, one for "
                         "each sequence")
    return np.broadcast_to(offsets, cache.batch)[:, None].astype(np.int64) + np.arange(queries)


def _softmax(scores, seen) -> np.ndarray:
    """Softmax over the last axis of the scores that are seen; 0 for the others, and for all of a row that sees none."""
    some = seen.any(axis=-1, keepdims=True)
    top = np.max(scores, axis=-1, keepdims=True, initial=-np.inf, where=seen)
    weights = np.exp(np.where(seen, scores - np.where(some, top, 0), -np.inf))
    return weights / np.where(some, weights.sum(axis=-1, keepdims=True), 1)
