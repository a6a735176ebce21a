"""Other people's kernels for attention over a cache of keys and values, in 16 or 8 bits. All are optional.

    peer.prepare(q, k, v, causal=True, copies=3)    # three callables, each over a cache of its own

A peer gets q, k and v in its own types and layout before the clock starts: what ours does with q inside a kernel is
free to it.
"""

from collections.abc import Callable
from dataclasses import dataclass

from kernelbook.peers import missing

PAGE = 16
"""Tokens of a page of a paged peer's cache."""


@dataclass(frozen=True)
class AttentionPeer:
    """name: the variant's name in records.  bits: bits a number of its cache has.
    paged: whether its cache lies in pages of PAGE tokens, in an order drawn at random, rather than in one piece.
    missing: None, or why it cannot run here.
    refuses: (head_dim, queries, causal) -> None, or why it is not for them, in words.
    bind: (q, k, v, causal, copies) -> callables, what `prepare` calls with tensors that it has checked.
    """

    name: str
    bits: int
    paged: bool
    missing: str | None
    refuses: Callable[[int, int, bool], str | None]
    bind: Callable

    def supports(self, head_dim: int, queries: int, causal: bool) -> str | None:
        """None, or why this peer cannot serve `queries` queries a sequence of `head_dim` numbers, in words."""
        return self.refuses(head_dim, queries, causal)

    def cache_bytes(self, batch: int, length: int, kv_heads: int, head_dim: int) -> int:
        """Bytes of keys and values that one call must read."""
        return 2 * batch * length * kv_heads * head_dim * self.bits // 8

    def prepare(self, q, k, v, *, causal: bool, copies: int, device: str = "cuda") -> list[Callable]:
        """One callable for each of `copies` copies of the cache, without arguments, which returns its tensor
        [batch, queries, heads, head_dim] of 16 bits on `device`. It only launches work on PyTorch's current stream, and
        a CUDA graph can hold it once it has run.

        q: floats [batch, queries, heads, head_dim], rounded to what the peer multiplies: bfloat16, unless it says
        otherwise.  k, v: floats [batch, length, kv_heads, head_dim]; query head h reads KV head
        h // (heads / kv_heads). All three NumPy arrays or tensors. Scores are scaled by head_dim^-0.5.
        causal: the queries are the sequence's last tokens, query i sees tokens 0 .. length - queries + i.

        Raises TypeError where q, k or v are no floats; ValueError for shapes that do not go together, causal queries
        that outnumber the tokens, no copies, or what `supports` refuses; and whatever the peer itself raises.
        """
        import torch
        q, k, v = (torch.as_tensor(x, device=device) for x in (q, k, v))
        for name, x in {"q": q, "k": k, "v": v}.items():
            if not x.is_floating_point():
                raise TypeError(f"{name} is of {x.dtype}; expected floats, which the peer rounds by its own rule")
            if x.ndim != 4 or 0 in x.shape:
                raise ValueError(f"{name} has shape {list(x.shape)}; expected 4 axes, none of them empty")
        batch, queries, heads, head_dim = q.shape
        length, kv_heads = k.shape[1:3]
        if k.shape != v.shape or k.shape != (batch, length, kv_heads, head_dim):
            raise ValueError(f"k and v have shapes {list(k.shape)} and {list(v.shape)}; expected both "
                             f"[{batch}, length, kv_heads, {head_dim}] beside q {list(q.shape)}")
        if heads % kv_heads:
            raise ValueError(f"{heads} query heads cannot share {kv_heads} KV heads evenly; expected a multiple")
        if causal and queries > length:
            raise ValueError(f"{queries} causal queries are more than the sequence's {length} tokens, of which they "
                             "should be the last")
        if copies < 1:
            raise ValueError(f"copies = {copies}; expected at least one")
        refusal = self.supports(head_dim, queries, causal)
        if refusal:
            raise ValueError(f"{self.name}: {refusal}")
        return self.bind(q, k, v, causal, copies)


# ---------------------------------------------------------------- PyTorch

def _sdpa(q, k, v, causal, copies):
    """torch.nn.functional.scaled_dot_product_attention, with the backend that PyTorch chooses."""
    import torch
    from torch.nn.attention.bias import causal_lower_right
    queries, length = q.shape[1], k.shape[1]
    mask = causal_lower_right(queries, length) if causal and queries > 1 else None  # one query sees all there is
    q, k, v = (x.to(torch.bfloat16).transpose(1, 2).contiguous() for x in (q, k, v))

    def bound(k, v):
        return lambda: torch.nn.functional.scaled_dot_product_attention(
            q, k, v, attn_mask=mask, enable_gqa=True).transpose(1, 2)
    return [bound(k.clone(), v.clone()) for _ in range(copies)]


# ---------------------------------------------------------------- FlashAttention 3

def _fa3_bf16(q, k, v, causal, copies):
    """The package fa3-fwd; it chooses by itself over how many blocks it splits a sequence."""
    import torch
    from fa3_fwd_interface import flash_attn_with_kvcache
    q, k, v = (x.to(torch.bfloat16).contiguous() for x in (q, k, v))
    return [lambda k=k.clone(), v=v.clone(): flash_attn_with_kvcache(q, k, v, causal=causal) for _ in range(copies)]


def _fa3_fp8(q, k, v, causal, copies):
    """The same on float8_e4m3fn, with a scale for every sequence and KV head of q, k and v."""
    from fa3_fwd_interface import flash_attn_with_kvcache
    q, q_scale = _float8(q, groups=k.shape[2])
    k, k_scale = _float8(k, groups=k.shape[2])
    v, v_scale = _float8(v, groups=v.shape[2])
    scales = {"q_descale": q_scale, "k_descale": k_scale, "v_descale": v_scale}
    return [lambda k=k.clone(), v=v.clone(): flash_attn_with_kvcache(q, k, v, causal=causal, **scales)
            for _ in range(copies)]


def _float8(x, groups):
    """x [batch, tokens, heads, dim] as float8_e4m3fn, with what to multiply it with: float32 [batch, groups], one for
    each sequence and run of heads / groups heads."""
    import torch
    parts = x.float().unflatten(2, (groups, -1))
    scale = (parts.abs().amax((1, 3, 4)) / torch.finfo(torch.float8_e4m3fn).max).clamp_min(1e-30)
    return (parts / scale[:, None, :, None, None]).to(torch.float8_e4m3fn).flatten(2, 3), scale


def _fa3_refuses(multiple):
    def refuses(head_dim, queries, causal):
        if head_dim > 256 or head_dim % multiple:
            return f"head_dim {head_dim}: it takes multiples of {multiple} up to 256"
    return refuses


def _fa3_missing(*majors):
    """Why fa3-fwd cannot run here; majors: of compute capability, those that it has machine code for."""
    import torch
    reason = missing("fa3_fwd_interface")
    if reason:
        return reason
    capability = torch.cuda.get_device_capability()
    if capability[0] not in majors:
        return (f"fa3-fwd has no such kernel for compute capability {'.'.join(map(str, capability))}, only for "
                f"{' and '.join(f'{major}.x' for major in majors)}")


# ---------------------------------------------------------------- FlashInfer

def _flashinfer(q, k, v, causal, copies):
    """FlashInfer's wrappers for paged caches, of decoding for one query and of prefill for more.

    A plan depends on lengths and page tables alone, so that one serves every copy. Lengths do not change between calls,
    so that a graph can hold them without `use_cuda_graph`, which would launch as many blocks as the longest might need.
    """
    import flashinfer
    import torch
    batch, queries, heads, head_dim = q.shape
    length, kv_heads = k.shape[1:3]
    blocks = -(-length // PAGE)
    order = torch.randperm(batch * blocks, generator=torch.Generator().manual_seed(0)).to(q.device)
    q = q.to(torch.bfloat16).flatten(0, 1).contiguous()
    k, v = (_pages(x.to(torch.bfloat16), order) for x in (k, v))

    workspace = torch.zeros(128 << 20, dtype=torch.uint8, device=q.device)
    table = [torch.arange(batch + 1, dtype=torch.int32) * blocks, order.int(),
             torch.full((batch,), length - (blocks - 1) * PAGE, dtype=torch.int32)]
    sizes = [heads, kv_heads, head_dim, PAGE]
    if queries == 1:
        # on tensor cores: its kernel without them is compiled for few ratios of heads, 6 not among them
        wrapper = flashinfer.BatchDecodeWithPagedKVCacheWrapper(workspace, use_tensor_cores=True)
        wrapper.plan(*table, *sizes, q_data_type=torch.bfloat16)
    else:
        wrapper = flashinfer.BatchPrefillWithPagedKVCacheWrapper(workspace)
        starts = torch.arange(batch + 1, dtype=torch.int32) * queries
        wrapper.plan(starts, *table, *sizes, causal=causal, q_data_type=torch.bfloat16)

    def bound(cache, out):  # with an output of its own: else it would fill a new one with zeros in every call
        return lambda: wrapper.run(q, cache, out=out).unflatten(0, (batch, queries))
    return [bound((k.clone(), v.clone()), torch.empty_like(q)) for _ in range(copies)]


def _pages(x, order):
    """x [batch, length, heads, dim] as pages [blocks of all sequences, PAGE, heads, dim], the i-th block in page
    order[i]; zeros behind a sequence's end."""
    import torch
    batch, length = x.shape[:2]
    padded = torch.nn.functional.pad(x, (0, 0, 0, 0, 0, -length % PAGE))
    pages = torch.empty_like(padded).reshape(-1, PAGE, *x.shape[2:])
    pages[order] = padded.reshape(pages.shape)
    return pages


def _flashinfer_refuses(head_dim, queries, causal):
    if head_dim not in (64, 128, 256):
        return f"head_dim {head_dim}: its kernels for paged caches take 64, 128 and 256"


# ---------------------------------------------------------------- SageAttention

def _sage(q, k, v, causal, copies):
    """SageAttention 1: int8 codes for q and k, a scale for every 128 queries and 64 keys, and P and V in float16.

    It keeps no int8 cache: every call quantizes q and k anew, and rounds V to float16 if it is not. float16 in and out
    is the fastest that it takes. It takes the mean over tokens off the keys it is given, in place; softmax does not
    change with it, and a second time changes nothing, so that a copy need not be restored between calls.

    Raises ValueError for a length that is no multiple of 64.
    """
    import torch
    from sageattention import sageattn
    if k.shape[1] % 64:
        raise ValueError(f"sage_int8: {k.shape[1]} tokens; expected a multiple of 64, since it lets what its last tile "
                         "of 64 keys lacks count as keys of score 0")
    q, k, v = (x.to(torch.float16).transpose(1, 2).contiguous() for x in (q, k, v))

    def bound(k, v):
        return lambda: sageattn(q, k, v, tensor_layout="HND", is_causal=False).transpose(1, 2)
    return [bound(k.clone(), v.clone()) for _ in range(copies)]


def _sage_refuses(head_dim, queries, causal):
    if head_dim not in (64, 96, 128):
        return f"head_dim {head_dim}: it takes 64, 96 and 128"
    if causal:
        return "causal: its mask is for as many queries as tokens, not for a sequence's last"
    if queries < 128:
        return f"{queries} queries: a tile holds 128 of one head, which would be mostly empty"


def all_peers() -> list[AttentionPeer]:
    """Every peer this collection knows, with what is missing where it cannot run."""
    return [
        AttentionPeer("sdpa_bf16", 16, False, missing(), lambda *case: None, _sdpa),
        AttentionPeer("fa3_bf16", 16, False, _fa3_missing(8, 9), _fa3_refuses(8), _fa3_bf16),
        AttentionPeer("fa3_fp8", 8, False, _fa3_missing(9), _fa3_refuses(16), _fa3_fp8),
        AttentionPeer("flashinfer_bf16", 16, True, missing("flashinfer"), _flashinfer_refuses, _flashinfer),
        AttentionPeer("sage_int8", 16, False, missing("sageattention"), _sage_refuses, _sage),
    ]
