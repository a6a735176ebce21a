"""Other people's kernels for a product with quantized weights, and cuBLAS on weights of 16 bits. All are optional.

A peer takes 16-bit activations, converted before the clock starts, and quantizes the weights by its own rule.
"""

import copy
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from kernelbook.packing import CODE_BITS
from kernelbook.peers import missing

BOUND = {16: 0.01, 8: 0.01, 4: 0.15}
"""Relative Frobenius error against float64 that a peer must stay within, by the bits of its weights: it rounds
activations to 16 bits and quantizes by its own rule."""


@dataclass(frozen=True)
class Peer:
    """name: the variant's name in records.  bits: bits a weight code has; 16 means the weights are not quantized.
    prepare: (weights float32 [N, K], NumPy's or a tensor, group, copies) -> one callable x -> [M, N] for each copy of
    the weights.
    dtype: of its activations, a torch dtype's name.  missing: None, or why it cannot run here.
    scale_bytes: bytes of scales and zeros that quantized weights have a group.
    """

    name: str
    bits: int
    dtype: str
    missing: str | None
    prepare: Callable
    scale_bytes: int = 2

    def serves(self, precision: str) -> bool:
        """Whether it multiplies by codes of "int8" or "int4": its own have as many bits, or it has none."""
        return self.bits in (CODE_BITS[precision], 16)

    def weight_bytes(self, n: int, k: int, group: int) -> int:
        """Bytes of weights one call must read: the codes and, for quantized ones, what each group has."""
        return n * k * self.bits // 8 + (n * k // group * self.scale_bytes if self.bits < 16 else 0)


def _cublas(weights, group, copies):
    import torch
    base = torch.as_tensor(weights).cuda().to(torch.bfloat16)
    return [lambda x, w=base.clone(): torch.mm(x, w.T) for _ in range(copies)]


def _tinygemm(weights, group, copies):
    """torch.ops.aten._weight_int4pack_mm: codes 0..15 with a bf16 scale and zero a group."""
    import torch
    n, k = weights.shape
    w = torch.as_tensor(weights).cuda().reshape(n, k // group, group)
    low, high = w.amin(-1, keepdim=True), w.amax(-1, keepdim=True)
    scale = ((high - low) / 15).clamp_min(1e-8)
    codes = ((w - low) / scale).round().clamp(0, 15).to(torch.uint8).reshape(n, k)
    packed = torch.ops.aten._convert_weight_to_int4pack(codes[:, ::2] << 4 | codes[:, 1::2], 8)
    # its dequantization is (code - 8) * scale + zero
    scales = torch.cat([scale, low + 8 * scale], -1).permute(1, 0, 2).contiguous().to(torch.bfloat16)
    return [lambda x, p=packed.clone(), s=scales.clone(): torch.ops.aten._weight_int4pack_mm(x, p, group, s)
            for _ in range(copies)]


def _humming(dtype):
    def prepare(weights, group, copies):
        import torch
        from humming.layer import HummingLayer
        n, k = weights.shape
        layer = HummingLayer(shape_n=n, shape_k=k, weight_config={"dtype": dtype, "group_size": group},
                             torch_dtype=torch.float16).cuda()
        layer.load_from_unquantized(torch.as_tensor(weights).cuda())
        layer.transform()
        return [layer if i == 0 else copy.deepcopy(layer) for i in range(copies)]
    return prepare


def all_peers() -> list[Peer]:
    """Every peer this collection knows, with what is missing where it cannot run."""
    torch_missing, humming_missing = missing(), missing("humming.layer")
    return [
        Peer("cublas_bf16", 16, "bfloat16", torch_missing, _cublas),
        Peer("tinygemm_int4", 4, "bfloat16", torch_missing, _tinygemm, scale_bytes=4),
        Peer("humming_int8", 8, "float16", humming_missing, _humming("int8")),
        Peer("humming_int4", 4, "float16", humming_missing, _humming("int4")),
    ]


def activations(peer: Peer, x: np.ndarray):
    """x float32 [M, K] as the peer takes it: on the device, in its dtype."""
    import torch
    return torch.from_numpy(x).cuda().to(getattr(torch, peer.dtype))
