"""The designs of `prefill_gemm` on tensor cores: which tile of the product they take, and how many blocks.

A block takes as many steps along K as every other one, through parts of tiles and whole ones, so that no shape leaves
multiprocessors without work (kernels/portable/schedule.h). The compiled tiles are chosen from by what they cost:
tokens that do not exist, weights that become bf16 anew for each tile of tokens, sums of tiles that were cut.

Source: prefill_breakdown article, section 4 (candidate C).
"""

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from kernelbook.backends import Backend, Source

STEP = 64  # columns, as compiled into the kernels
BAND = 64  # rows of w of one warpgroup product, too
MIN_STEPS = 8  # that a block has at least: fewer are not worth the sums it leaves to others
INT32_MAX = 2**31 - 1

# Clocks of a multiprocessor, as far as tiles are to be compared: of a step, by its products, a row of w each, whose
# instructions take as long as some tokens more, or, where tokens are few, by turning rows of weights to bf16, and for
# what comes with every step; and the bytes of sums that it writes or reads in one.
CLOCKS_A_TOKEN, TOKENS_MORE, CLOCKS_OF_WEIGHTS, CLOCKS_A_STEP = 1 / 32, 16, 1.75, 60
BYTES_A_CLOCK = 50


@dataclass(frozen=True)
class Tile:
    """A tile of the product that a kernel is compiled for.

    tokens, rows: of x and of w. stages: of 64 columns in shared memory. blocks: that a multiprocessor runs at once.
    groups: warpgroups that multiply, for wgmma.
    """

    tokens: int
    rows: int
    stages: int
    blocks: int = 1
    groups: int = 0


@dataclass(frozen=True)
class TensorDesign:
    """A kernel on tensor cores. Its activations are bf16, its sums float32.

    file: below kernels/prefill_gemm, without its suffix. kernel: its name in there.
    k_multiple: what K must be a multiple of. align: bytes that the weights' address is a multiple of.
    tiles: from which M, N and K choose, no two of the same tokens.
    wgmma: whether it needs Hopper's warpgroup instructions.
    """

    file: str
    kernel: str
    k_multiple: int
    align: int
    tiles: tuple[Tile, ...]
    wgmma: bool
    activations = "bf16"

    @property
    def rows(self) -> int:
        """The fewest rows of w in a tile."""
        return min(tile.rows for tile in self.tiles)

    def source(self, tokens: int, matrix: str | None = None, bf16_out: bool = False) -> Source:
        """The kernel for `tokens` rows of x in a tile. matrix: as `prefill_gemm.Design.source` has it."""
        tile = next(tile for tile in self.tiles if tile.tokens == tokens)
        if self.wgmma:
            chosen = {"GROUPS": tile.groups, "BANDS": tile.rows // (BAND * tile.groups)}
        else:
            chosen = {"MATRIX": matrix} if matrix else {}
        return Source(f"prefill_gemm/{self.file}.cu",
                      {"TILE_TOKENS": tokens, "STAGES": tile.stages, "BF16_OUT": bf16_out} | chosen)

    def block(self, tile: Tile, wave: int) -> tuple[int, int, int]:
        return (32, 4 * (tile.groups + 1), 1) if self.wgmma else (wave, 8, 1)

    def shared(self, tile: Tile) -> int:
        """Bytes of dynamic shared memory."""
        x, tile_rows = 2 * STEP * tile.tokens, tile.rows // 4
        if not self.wgmma:
            return tile.stages * (x + 144 * tile_rows) + 16
        return tile.stages * _aligned(x + 160 * tile_rows) + 2 * 1024  # barriers; to align it all

    def why_not(self, backend: Backend, k: int) -> str | None:
        """Why weights of K = `k` cannot be multiplied by this on a backend; None where they can."""
        if self.wgmma and getattr(backend, "arch", None) != "90a":
            return f"it needs Hopper's warpgroup instructions, and {backend.device} has none"
        if k % self.k_multiple:
            return f"it takes K a multiple of {self.k_multiple}, not {k}"
        return None


@dataclass(frozen=True)
class Plan:
    """tile: of the product. tiles: how many it has. steps: along K. blocks: of the launch."""

    tile: Tile
    tiles: int
    steps: int
    blocks: int

    @property
    def scratch(self) -> int:
        """Float32 numbers that blocks need to leave sums of tiles in."""
        return 2 * self.blocks * self.tile.rows * self.tile.tokens


def plan(design: TensorDesign, m: int, n: int, k: int, multiprocessors: int) -> Plan:
    """The cheapest tile for a product [m, n] over k, and the blocks that share its steps.

    Raises ValueError for a product of more steps than an int32 counts.
    """
    def plan_for(tile):
        tiles, steps = math.ceil(m / tile.tokens) * math.ceil(n / tile.rows), math.ceil(k / STEP)
        most = math.isqrt(INT32_MAX // (2 * steps))  # the kernels' integers
        return Plan(tile, tiles, steps, max(1, min(tile.blocks * multiprocessors, tiles * steps // MIN_STEPS, most)))

    def clocks(plan):
        tile = plan.tile
        step = CLOCKS_A_STEP + tile.rows * max(CLOCKS_A_TOKEN * (tile.tokens + TOKENS_MORE), CLOCKS_OF_WEIGHTS)
        sums = (2 + plan.blocks / plan.tiles) * 4 * tile.rows * tile.tokens / BYTES_A_CLOCK
        return math.ceil(plan.tiles * plan.steps / plan.blocks) * step + sums

    best = min(map(plan_for, design.tiles), key=clocks)
    if (best.tiles + 2 * best.blocks) * best.steps > INT32_MAX:
        raise ValueError(f"a product {m} x {n} over {k} takes {best.tiles} tiles of {best.steps} steps; the kernel "
                         f"counts to {INT32_MAX}: multiply fewer rows at a time")
    return best


def tensor_launch(backend: Backend, design: TensorDesign, plan: Plan, arrays: list, shape: tuple[int, int, int],
                  matrix: str | None, bf16_out: bool) -> Callable:
    """A call of no arguments that launches the product. arrays: weights, x, out, scratch. shape: M, N, K."""
    kernel = backend.compile(design.source(plan.tile.tokens, matrix, bf16_out)).kernel(design.kernel)
    counters = backend.array(np.zeros(plan.tiles, np.int32))  # the kernel leaves them as it finds them
    args = [*arrays, counters, *map(np.int32, shape)]
    block, shared = design.block(plan.tile, backend.wave), design.shared(plan.tile)
    return lambda: kernel((plan.blocks, 1, 1), block, args, shared)


def _aligned(size: int) -> int:
    return math.ceil(size / 1024) * 1024


TENSOR_DESIGNS = {
    "tensor_cores": TensorDesign("4_tensor_cores", "prefill_tensor_cores", k_multiple=32, align=8, wgmma=False, tiles=(
        Tile(16, 128, stages=3, blocks=2), Tile(32, 128, stages=3, blocks=2), Tile(64, 128, stages=3, blocks=2),
        Tile(128, 128, stages=3))),
    "wgmma": TensorDesign("5_wgmma", "prefill_wgmma", k_multiple=64, align=16, wgmma=True, tiles=(
        Tile(16, 256, stages=16, groups=4), Tile(32, 256, stages=14, groups=4), Tile(64, 256, stages=12, groups=4),
        Tile(128, 256, stages=8, groups=4), Tile(256, 128, stages=5, groups=2))),
}
