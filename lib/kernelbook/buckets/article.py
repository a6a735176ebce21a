"""The prefill_breakdown article's own tables, added up again (section 3), and what its bits per weight count (B15)."""

import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache

from kernelbook import ROOT
from kernelbook.buckets.breakdown import Comparison, compare
from kernelbook.formats import BITS_PER_WEIGHT, BLOCK, TILE_BYTES, TILE_ROWS
from kernelbook.shapes import Inventory

TABLES = ROOT / "notebooks" / "data" / "prefill_breakdown.toml"

Q6_K_BITS = 8 * 210 / 256  # a block of 256 weights in 210 bytes
F32_BITS = 32


@dataclass(frozen=True)
class Side:
    """One engine's column, in ms: `buckets` and `kernels_ms` over its whole trace, of `trace_passes`; `shares` in
    percent and `normalized` as the article prints them; `wall_ms` of one pass."""

    name: str
    kernels_ms: float
    trace_passes: int
    wall_ms: float
    claimed_bits_per_weight: float
    buckets: Mapping[str, float]
    shares: Mapping[str, float]
    normalized: Mapping[str, float]
    launches_a_pass: int | None = None

    @property
    def bucket_sum_ms(self) -> float:
        return sum(self.buckets.values())

    @property
    def excess_ms(self) -> float:
        """By how much the buckets exceed the total that they are parts of; negative where they leave some of it out."""
        return self.bucket_sum_ms - self.kernels_ms

    def recomputed_shares(self) -> dict[str, float]:
        """Percent of the kernels' total, from the buckets' times."""
        return {name: 100 * time / self.kernels_ms for name, time in self.buckets.items()}

    def share_of_wall_ms(self) -> dict[str, float]:
        """Printed share times wall time, ms: what the article calls normalized to a pass. Idle time, which is part of
        the wall time and of no bucket, is dealt out to the buckets that way, and so is what else the trace covers."""
        return {name: share / 100 * self.wall_ms for name, share in self.shares.items()}

    def per_pass_ms(self) -> dict[str, float]:
        """Each bucket's time in the trace over its passes, ms. For the engine that is an upper bound, since the trace
        covers decode steps too."""
        return {name: time / self.trace_passes for name, time in self.buckets.items()}


@dataclass(frozen=True)
class Tables:
    """engine, peer: section 3. ratios: between them, as printed. weights_mb: of section 2's probe by projection, N, K
    and the printed size. probe_ms: the times at M = 16, of the baseline with R = 2, explicit FMA and dp4a with R = 4.
    probe_bandwidth: "gbs" and "percent" of the peak, as printed of the first two."""

    engine: Side
    peer: Side
    ratios: Mapping[str, float]
    weights_mb: Mapping[str, tuple[int, int, float]]
    probe_ms: Mapping[str, tuple[float, float, float]]
    probe_bandwidth: Mapping[str, tuple[float, float]]

    def comparison(self) -> list[Comparison]:
        """The normalized figures side by side, with the ratios and shares of the gap that follow from them; what is in
        neither of the two buckets is the line "rest"."""
        return compare(self.engine.normalized, self.peer.normalized, (self.engine.wall_ms, self.peer.wall_ms))


@cache
def tables() -> Tables:
    """The article's figures, as its tables print them."""
    content = tomllib.loads(TABLES.read_text(encoding="utf-8"))
    rows = ({name: tuple(row) for name, row in content[table].items()}
            for table in ("weights_mb", "probe_ms", "probe_bandwidth"))
    return Tables(Side(**content["engine"]), Side(**content["peer"]), content["ratios"], *rows)


def tile_bits_per_weight() -> float:
    """Of the article's 72-byte tile: four float16 scales and 4 x 32 nibbles. As 4.5 as a Q4_0 block, not 4.25."""
    return 8 * TILE_BYTES / (TILE_ROWS * BLOCK)


def printed_bits_per_weight() -> dict[str, float]:
    """What the sizes in the article's own probe table come to, taken as MiB: bits a weight by projection."""
    return {name: mb * 2**20 * 8 / (n * k) for name, (n, k, mb) in tables().weights_mb.items()}


def q4_0_file_bits_per_weight(inventory: Inventory) -> float:
    """Of a whole GGUF file quantized to Q4_0 as llama.cpp does it: the layers' products and the embedding in Q4_0
    blocks, lm_head in Q6_K, the convolutions' weights (four taps a row of gdn_qkv) in float32. Norms are too few to
    count."""
    embedding = inventory.vocabulary * inventory.hidden
    taps = sum(4 * p.n * p.count for p in inventory.projections if p.name == "gdn_qkv")
    parts = [(inventory.weights + embedding, BITS_PER_WEIGHT["Q4_0"]), (inventory.lm_head.weights, Q6_K_BITS),
             (taps, F32_BITS)]
    return sum(weights * bits for weights, bits in parts) / sum(weights for weights, _ in parts)
