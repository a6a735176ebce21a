"""The projections of three language models, as data: what a pass multiplies, how often, what can be fused."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import groupby


@dataclass(frozen=True)
class Projection:
    """A weight [n, k] by which a pass multiplies activations [m, k]; `count` layers have one each.

    source: the activation it reads. Projections of one source can be fused into one call.
    """

    name: str
    n: int
    k: int
    count: int
    source: str

    @property
    def weights(self) -> int:
        """Weights of one of them."""
        return self.n * self.k

    def flops(self, m: int) -> int:
        """Operations of one call on m rows, a multiplication and an addition each."""
        return 2 * m * self.n * self.k


@dataclass(frozen=True)
class Inventory:
    """A model's sizes and projections. `projections` are those of the layers; lm_head stands apart, since a
    prefill runs it on the last row only.

    heads, kv_heads, head_dim: of its softmax attention.
    """

    name: str
    hidden: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    ffn: int
    vocabulary: int
    projections: tuple[Projection, ...]

    @property
    def lm_head(self) -> Projection:
        return Projection("lm_head", self.vocabulary, self.hidden, 1, "output_norm")

    def __iter__(self) -> Iterator[Projection]:
        """Projections of the layers, then lm_head."""
        yield from (*self.projections, self.lm_head)

    def __getitem__(self, name: str) -> Projection:
        """The projection called `name`. Raises KeyError with the names there are."""
        for projection in self:
            if projection.name == name:
                return projection
        raise KeyError(f"{self.name} has no projection {name!r}; it has {', '.join(p.name for p in self)}")

    @property
    def gemms(self) -> int:
        """Matrix products of all layers in one pass."""
        return sum(p.count for p in self.projections)

    @property
    def weights(self) -> int:
        """Weights of all layers' projections."""
        return sum(p.count * p.weights for p in self.projections)

    def flops(self, m: int) -> int:
        """Operations of all layers' projections in one pass over m rows."""
        return sum(p.count * p.flops(m) for p in self.projections)

    def fused(self) -> tuple[Projection, ...]:
        """The layers' projections with those of one source joined along n, named such as "q+k+v"."""
        joined = []
        for source, group in groupby(self.projections, key=lambda p: p.source):
            parts = list(group)
            joined.append(Projection("+".join(p.name for p in parts), sum(p.n for p in parts), parts[0].k,
                                     parts[0].count, source))
        return tuple(joined)


def distinct(projections: Iterable[Projection]) -> list[Projection]:
    """The first projection of each shape: q stands for o too where both are square."""
    first = {}
    for p in projections:
        first.setdefault((p.n, p.k), p)
    return list(first.values())


def _transformer(name, hidden, layers, heads, kv_heads, head_dim, ffn, vocabulary) -> Inventory:
    """A model whose layers are all softmax attention and a gated FFN."""
    q, kv = heads * head_dim, kv_heads * head_dim
    return Inventory(name, hidden, layers, heads, kv_heads, head_dim, ffn, vocabulary, (
        Projection("q", q, hidden, layers, "attn_norm"),
        Projection("k", kv, hidden, layers, "attn_norm"),
        Projection("v", kv, hidden, layers, "attn_norm"),
        Projection("o", hidden, q, layers, "attention"),
        Projection("gate", ffn, hidden, layers, "ffn_norm"),
        Projection("up", ffn, hidden, layers, "ffn_norm"),
        Projection("down", hidden, ffn, layers, "ffn"),
    ))


QWEN3_VL_2B = _transformer("Qwen3-VL-2B", hidden=2048, layers=28, heads=16, kv_heads=8, head_dim=128,
                           ffn=6144, vocabulary=151936)
"""The language model of Qwen3-VL-2B, the shapes of grouped_gemm."""

SMOLLM2_135M = _transformer("SmolLM2-135M", hidden=576, layers=30, heads=9, kv_heads=3, head_dim=64, ffn=1536,
                            vocabulary=49152)
"""The model of `kernelbook.smollm2`, whose real weights and activations are the default input."""

QWEN3_5_27B = Inventory("Qwen3.5-27B", hidden=5120, layers=64, heads=24, kv_heads=4, head_dim=256, ffn=17408,
                        vocabulary=248320, projections=(
    Projection("gdn_qkv", 10240, 5120, 48, "gdn_norm"),
    Projection("gdn_z", 6144, 5120, 48, "gdn_norm"),
    Projection("gdn_b", 48, 5120, 48, "gdn_norm"),
    Projection("gdn_a", 48, 5120, 48, "gdn_norm"),
    Projection("gdn_out", 5120, 6144, 48, "gdn"),
    Projection("q", 12288, 5120, 16, "attn_norm"),  # with its output gate: twice 24 heads of 256
    Projection("k", 1024, 5120, 16, "attn_norm"),
    Projection("v", 1024, 5120, 16, "attn_norm"),
    Projection("o", 5120, 6144, 16, "attention"),
    Projection("gate", 17408, 5120, 64, "ffn_norm"),
    Projection("up", 17408, 5120, 64, "ffn_norm"),
    Projection("down", 5120, 17408, 64, "ffn"),
))
"""The shapes of prefill_breakdown: 48 layers of gated delta net, and softmax attention in each fourth."""
