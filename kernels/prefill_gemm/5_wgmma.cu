// 5. The same on Hopper's warpgroup instructions: weights are bf16 in registers only.
//
// Weights are operand A, which may come from registers: a lane turns its nibbles into just the pairs that its fragment
// needs. Columns 2 t and 2 t + 1 of 16 lie in the same half of a word, and those 16 further in the high nibbles of the same
// bytes: both operands keep their order along K, and x is copied as it lies. A lane's two rows of the fragment are
// neighbours in a tile, so that it reads them together and writes neighbours of out.
//
// A warpgroup only copies, the others drift apart: one turns nibbles into weights while others' products run, and its own
// of the 32 columns before. A tile has more rows of w than of x: a weight takes 4.5 bits and an activation 16, and what all
// blocks read, L2 has to give.
//
// There is no simulated form: 4_tensor_cores.cu, with the same schedule and the same weights, is the checked sibling.
//
//   GROUPS       warpgroups of a block that multiply
//   BANDS        of 64 rows of w, that each of them has
//   TILE_TOKENS  rows of x in a tile of the product: 16, 32, 64, 128 or 256
//   STAGES       steps of 64 columns in shared memory
//   BF16_OUT     1: out is bf16, 0: float
#include "wgmma.h"
#include "dequantize.h"
#include "schedule.h"

#if GPU_HAS_WGMMA

constexpr int kMultiplying = 128 * GROUPS, kThreads = kMultiplying + 128;
constexpr int kBand = 64;                      // rows of a product
constexpr int kRows = kBand * BANDS * GROUPS;  // of w in a tile
constexpr int kStep = 64;                      // columns
constexpr int kWidth = 2 * kStep;              // bytes of a row of x
constexpr int kSums = TILE_TOKENS / 2;         // of a lane and band
// A step of four rows of w: two tiles, 16 bytes at a time, and what puts the next four rows into other banks.
constexpr int kChunks = 2 * kTileBytes / 16, kTilesBytes = 2 * kTileBytes + 16;
constexpr int kRowTiles = kRows / kTileRows;

// Registers of a thread. A block has what it is launched with, 65536 / kThreads each, rounded down to a multiple of 8: what
// the threads that multiply take, those that copy must have given.
constexpr int kMultiplyRegisters = GROUPS == 4 ? 112 : GROUPS == 3 ? 160 : 232, kCopyRegisters = GROUPS < 3 ? 40 : 32;

struct Stage {
  alignas(1024) uint16_t x[TILE_TOKENS][kStep];
  alignas(16) uint8_t w[kRowTiles][kTilesBytes];
};
struct Block {
  Stage stages[STAGES];
  PhaseBarrier full[STAGES], empty[STAGES];
  int seen;
};

// Where a block stands in its stages.
struct Turn {
  int stage = 0, parity = 0;
  __device__ __forceinline__ void next() {
    if (++stage == STAGES) stage = 0, parity ^= 1;
  }
};

// out [M][N] of x [M][K] and w [N / 4][K / 32] tiles; N a multiple of 4, K of 64. pieces and counters: see schedule.h.
// Grid: as many blocks as run at once, and no more than there are steps; block: 32 x 4 (GROUPS + 1).
extern "C" __global__ void __launch_bounds__(kThreads, 1)
prefill_wgmma(const uint8_t *__restrict__ w, const uint16_t *__restrict__ x, void *__restrict__ out, float4 *pieces,
              int *counters, int M, int N, int K) {
  GPU_DYNAMIC_SHARED(char, unaligned);
  const unsigned misaligned = __cvta_generic_to_shared(unaligned) % 1024;
  Block &block = *reinterpret_cast<Block *>(unaligned + (1024 - misaligned) % 1024);
  const unsigned lane = threadIdx.x, warp = threadIdx.y;  // the first 4 GROUPS warps multiply
  const int token_tiles = (M + TILE_TOKENS - 1) / TILE_TOKENS, row_tiles = (N + kRows - 1) / kRows;
  Work work;
  Turn turn;

  if (warp == 0 && lane < STAGES) block.full[lane].init(128), block.empty[lane].init(4 * GROUPS);
  __syncthreads();
  if (warp / 4 == GROUPS) {
    if constexpr (GROUPS > 1) give_registers<kCopyRegisters>();
    // 8 threads copy a row of x, 9 four rows of w: what a thread copies lies at a fixed place plus what the round adds.
    constexpr int kTokens = 128 / 8, kTiles = 128 / kChunks, kRounds = (kRowTiles + kTiles - 1) / kTiles;
    const int copier = warp % 4 * 32 + lane, token = copier / 8, tile = copier / kChunks;
    const int x_to = token * kWidth + swizzled<kWidth>(token, copier % 8 * 16);
    const int w_to = tile * kTilesBytes + copier % kChunks * 16;
    const size_t w_pitch = (size_t)K / kTileColumns * kTileBytes;  // bytes of four rows
    Schedule schedule(token_tiles * row_tiles, K / kStep);
    for (int copied = 0; schedule.next(work);) {
      const int first_token = work.tile % token_tiles * TILE_TOKENS + token;
      const int first_tile = work.tile / token_tiles * kRowTiles + tile;
      const uint16_t *x_from = x + (size_t)first_token * K + work.first * kStep + copier % 8 * 8;
      const uint8_t *w_from = w + first_tile * w_pitch + work.first * (2 * kTileBytes) + copier % kChunks * 16;
      const auto copy = [&](auto whole) {  // whole: all of the tile lies within x and w; else the rest is 0
#pragma unroll 1
        for (int step = work.first; step < work.end; ++step) {
          Stage &stage = block.stages[turn.stage];
          if (copied >= STAGES) block.empty[turn.stage].wait(turn.parity ^ 1);
          else ++copied;
          uint8_t *to = reinterpret_cast<uint8_t *>(&stage.x) + x_to;
          const uint16_t *from = x_from;
          unrolled<TILE_TOKENS / kTokens>([&](auto round) {
            constexpr int ahead = round.value * kTokens;
            copy_async(to + ahead * kWidth, from, whole.value || first_token + ahead < M);
            from += (size_t)kTokens * K;
          });
          to = reinterpret_cast<uint8_t *>(&stage.w) + w_to;
          unrolled<kRounds>([&](auto round) {
            constexpr int ahead = round.value * kTiles;
            if (tile < kTiles && ahead + tile < kRowTiles)
              copy_async(to + ahead * kTilesBytes, w_from + ahead * w_pitch,
                         whole.value || first_tile + ahead < N / kTileRows);
          });
          block.full[turn.stage].arrive_after_copies();
          x_from += kStep, w_from += 2 * kTileBytes;
          turn.next();
        }
      };
      if (first_token - token + TILE_TOKENS <= M && (first_tile - tile + kRowTiles) * kTileRows <= N) copy(Index<1>{});
      else copy(Index<0>{});
    }
    return;
  }
  if constexpr (GROUPS > 1) take_registers<kMultiplyRegisters>();

  // Of band b this lane has rows kBand * b + row and the next: neighbours in a tile.
  const int row = warp / 4 * kBand * BANDS + warp % 4 * 16 + lane / 4 * 2;
  const int tile_at = row / kTileRows * kTilesBytes, of_tile = row % kTileRows;
  const int words_at = tile_at + kWordsAt + lane % 4 / 2 * kQuarterBytes + of_tile * 4, scales_at = tile_at + of_tile * 2;
  const uint32_t half = 0x4140 + lane % 2 * 0x0202;  // of a word: its two bytes, apart

  Schedule schedule(token_tiles * row_tiles, K / kStep);
  while (schedule.next(work)) {
    float sums[BANDS][kSums] = {};
    int before = 0;  // the stage of the step before
#pragma unroll 1
    for (int step = work.first; step < work.end; ++step) {
      const Stage &stage = block.stages[turn.stage];
      block.full[turn.stage].wait(turn.parity);
      wgmma_publish();
      const uint32_t x_address = wgmma_address(stage.x);
      unrolled<2>([&](auto group) {  // of 32 columns
        uint32_t weights[BANDS][2][4];
        unrolled<BANDS>([&](auto b) {
          const uint8_t *tile = &stage.w[b.value * kBand / kTileRows][group.value * kTileBytes];
          const uint32_t scales = *reinterpret_cast<const uint32_t *>(tile + scales_at);
          const Scale scale[2] = {scale_of(uint16_t(scales)), scale_of(uint16_t(scales >> 16))};
          unrolled<2>([&](auto part) {  // columns 0..7, 8..15, with those 16 further
            const uint2 rows = *reinterpret_cast<const uint2 *>(tile + words_at + part.value * 2 * kQuarterBytes);
            unrolled<2>([&](auto r) {
              const uint32_t nibbles = __byte_perm(r.value ? rows.y : rows.x, 0, half);
              weights[b.value][0][2 * part.value + r.value] = weight_pair(nibbles, scale[r.value]);
              weights[b.value][1][2 * part.value + r.value] = weight_pair(nibbles >> 4, scale[r.value]);
            });
          });
        });
        wgmma_begin();
        unrolled<2>([&](auto s) {
          const uint64_t columns = wgmma_matrix<kWidth>(x_address, (2 * group.value + s.value) * 32);
          unrolled<BANDS>([&](auto b) { wgmma_bf16(sums[b.value], weights[b.value][s.value], columns); });
        });
        wgmma_commit();
        wgmma_wait<1>();  // the products before these are done
        if (group.value == 0 && step > work.first && lane == 0) block.empty[before].arrive();
      });
      before = turn.stage;
      turn.next();
    }
    wgmma_wait<0>();
    if (lane == 0) block.empty[before].arrive();
    unrolled<BANDS>([&](auto b) { wgmma_arrived(sums[b.value]); });

    using Sums = float[BANDS * kSums];
    const auto barrier = [] { group_barrier<kMultiplying>(1); };
    const Pieces<BANDS * kSums, kMultiplying> all{pieces};
    if (!gather(reinterpret_cast<Sums &>(sums), schedule.cut_of(work), all, counters + work.tile, &block.seen,
                warp * 32 + lane, barrier))
      continue;
    const int token = work.tile % token_tiles * TILE_TOKENS + lane % 4 * 2;
    const int first_row = work.tile / token_tiles * kRows + row;
    unrolled<BANDS>([&](auto b) {
      const int n = first_row + kBand * b.value;
      const size_t first = (size_t)token * N + n;
      unrolled<kSums / 2>([&](auto i) {
        constexpr int ahead = i.value / 2 * 8 + i.value % 2;
        const float *own = sums[b.value] + i.value / 2 * 4 + i.value % 2;
        const size_t at = first + (size_t)ahead * N;
        if (n < N && token + ahead < M) {
          if constexpr (BF16_OUT) *reinterpret_cast<uint32_t *>((uint16_t *)out + at) = bf16_pair(own[0], own[2]);
          else *reinterpret_cast<float2 *>((float *)out + at) = make_float2(own[0], own[2]);
        }
      });
    });
  }
}

#endif
