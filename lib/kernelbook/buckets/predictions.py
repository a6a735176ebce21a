"""Launches and bytes of one prefill pass, predicted from a model's shapes, to stand beside those counted.

llama.cpp's rule, from its public source: a quantized product of more than 8 rows runs `mul_mat_q` on output tiles of
128 weight rows by up to 128 tokens, as many tokens a tile as give the fewest tiles. If the tiles fill at least 90% of
the multiprocessors in the waves they take, each tile gets a block of its own. Else one block a multiprocessor runs
(stream-k), tiles are cut between blocks unless their number divides evenly, and a fixup kernel adds the pieces up.
On Qwen3.5-27B with 512 tokens, four tiles a 128 rows, that leaves without a fixup at

    170 multiprocessors (RTX 5090): down, gdn_out, o (160 tiles, 94%) and gdn_qkv (320, 94%): 496 - 176 = 320
    132 multiprocessors (H200):     q (384 tiles, 96%):                                      496 -  16 = 480

which is what the prefill_breakdown article (section 3) and a trace on an H200 counted. Any threshold above 82% and up
to 94% gives both; plain divisibility gives 496 and 496.
"""

import math
import re
from dataclasses import dataclass

from kernelbook.buckets.breakdown import Breakdown
from kernelbook.buckets.trace import short_name
from kernelbook.shapes import Inventory, Projection

TILE_ROWS = TILE_TOKENS = 128
EFFICIENCY_PERCENT = 90
VECTOR_ROWS = 8  # up to so many rows llama.cpp takes mul_mat_vec_q instead
# The template argument that is a bool, as profilers print it; in newer versions another follows.
UNCHECKED, CHECKED = r"(false|\(bool\)0)[,>]", r"(true|\(bool\)1)[,>]"


@dataclass(frozen=True)
class Expected:
    """Launches predicted for a pass.

    kernel: regular expression that the bare name of the kernels matches as a whole.
    arguments: one found in the name with template arguments, where only some instances count.
    why: what the number is made of.
    """

    what: str
    kernel: str
    launches: int
    why: str
    arguments: str | None = None


def fixup_needed(projection: Projection, tokens: int, multiprocessors: int) -> bool:
    """Whether llama.cpp leaves pieces of tiles to a fixup kernel, by the rule at the head of this module."""
    tiles = math.ceil(projection.n / TILE_ROWS) * math.ceil(tokens / TILE_TOKENS)
    waves = math.ceil(tiles / multiprocessors)
    return 100 * tiles // (waves * multiprocessors) < EFFICIENCY_PERCENT  # tiles that divide evenly fill 100%


def llama_cpp(inventory: Inventory, multiprocessors: int, tokens: int = 512) -> list[Expected]:
    """llama.cpp's launches for one micro-batch of `tokens` of a prefill, on an NVIDIA GPU with a Q4_0 file.

    Raises ValueError where tokens are so few that it takes other kernels, or multiprocessors are not above 0.
    """
    if tokens <= VECTOR_ROWS:
        raise ValueError(f"tokens = {tokens}; expected more than {VECTOR_ROWS}: up to that many llama.cpp runs "
                         "mul_mat_vec_q")
    if multiprocessors < 1:
        raise ValueError(f"multiprocessors = {multiprocessors}; expected at least 1")
    layers = inventory.projections
    ragged = sum(p.count for p in layers if p.n % TILE_ROWS)
    fixups = sum(p.count for p in layers if fixup_needed(p, tokens, multiprocessors))
    gemms = inventory.gemms
    expected = [
        Expected("activations quantized", "quantize_mmq_q8_1", gemms, "one a product"),
        Expected("products", "mul_mat_q", gemms, "one a product, by bare name"),
        Expected("products, unchecked instance", "mul_mat_q", gemms - ragged,
                 f"those whose rows fill tiles of {TILE_ROWS}", UNCHECKED),
        Expected("products, checked instance", "mul_mat_q", ragged, "the others", CHECKED),
        Expected("stream-k fixups", "mul_mat_q_stream_k_fixup", fixups,
                 f"products whose tiles fill {multiprocessors} multiprocessors to less than {EFFICIENCY_PERCENT}%"),
        Expected("lm_head", "mul_mat_vec_q", 1, "on the last token only"),
    ]
    deltas, attentions = (sum(p.count for p in layers if p.name == name) for name in ("gdn_out", "o"))
    if deltas:
        depth, what = inventory.layers, f"{deltas} delta nets and {attentions} attentions"
        expected += [
            Expected("gated delta nets", "gated_delta_net_cuda", deltas, "one a layer"),
            Expected("convolutions", "ssm_conv(_long_token)?_f32", deltas, "one a layer"),
            Expected("joins of state and inputs", "concat_.*", deltas, "before each convolution"),
            Expected("norms", "rms_norm_f32", 2 * depth + 1 + 3 * deltas + 2 * attentions,
                     f"two a layer and the last; with {what}, three and two of heads in each"),
            Expected("scalings", "scale_f32", 2 * deltas, "of queries and keys, after their norms"),
            Expected("gates of step and decay", "unary_op_kernel", 2 * deltas, "a sigmoid and a softplus"),
            Expected("gated units", "unary_gated_op_kernel", 2 * depth, "one in each FFN, one in what is before it"),
            Expected("sums and products of elements", "k_bin_bcast", 2 * depth + 2 * deltas,
                     "two sums a layer; a bias and a decay in each delta net"),
        ]
    expected += [Expected("attentions", "flash_attn_(ext|tile).*", attentions, "one a layer, flash attention on"),
                 Expected("rotations", "rope_.*", 2 * attentions, "queries and keys of a layer")]
    return expected


def tiled_engine(inventory: Inventory, tokens: int = 512, tile: int = 16) -> list[Expected]:
    """The article's engine: every product once for each `tile` tokens, so that the weights are read as often.

    Its launches depend on which projections one launch takes: between all apart and all of one source together. The
    article's count, about 9000 a pass, is 281 a tile, within 10% of the second.
    """
    tiles = rereads(tokens, tile)
    fused = sum(p.count for p in inventory.fused())
    kernel = "rq_q4_gemv_mr.*"
    return [Expected("products apart", kernel, inventory.gemms * tiles, f"{inventory.gemms} a tile, {tiles} tiles"),
            Expected("products of one source fused", kernel, fused * tiles, f"{fused} a tile, {tiles} tiles")]


def rereads(tokens: int, tile: int) -> int:
    """How often a pass that works on `tile` tokens at a time reads the weights (B12); ValueError below 1 token."""
    if tokens < 1 or tile < 1:
        raise ValueError(f"tokens = {tokens}, tile = {tile}; expected at least 1 of each")
    return math.ceil(tokens / tile)


@dataclass(frozen=True)
class Traffic:
    """Bytes that the projections of one pass move, if no cache keeps anything from one product to the next."""

    weights: float
    activations: float

    @property
    def total(self) -> float:
        return self.weights + self.activations


def traffic(inventory: Inventory, tokens: int, tile: int, bits_per_weight: float, activation_bytes: int = 4) -> Traffic:
    """Bytes of a pass over `tokens`, `tile` at a time: weights once a tile, each product's input and output once."""
    moved = sum(p.count * (p.n + p.k) for p in inventory.projections)
    return Traffic(rereads(tokens, tile) * inventory.weights * bits_per_weight / 8, tokens * moved * activation_bytes)


@dataclass(frozen=True)
class Launches:
    """A prediction beside a count. counted: a pass; None where the trace's names lack the arguments to tell."""

    expected: Expected
    counted: float | None

    @property
    def agrees(self) -> bool | None:
        return None if self.counted is None else self.counted == self.expected.launches


def beside(breakdown: Breakdown, expected: list[Expected]) -> list[Launches]:
    """Each prediction beside the launches that a breakdown counted."""
    lines = []
    for line in expected:
        kernels = [k for k in breakdown.kernels if re.fullmatch(line.kernel, short_name(k.name))]
        if line.arguments and kernels and not any("<" in kernel.name for kernel in kernels):
            lines.append(Launches(line, None))
        else:
            counted = sum(k.launches for k in kernels if re.search(line.arguments or "", k.name))
            lines.append(Launches(line, counted))
    return lines
