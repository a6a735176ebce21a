// 4. Tensor cores (the article's candidate C): codes become bf16 weights in registers, sums stay floats.
//
// Activations are bf16 in memory, weights the tiles as they are. A lane reads 8 neighbouring columns of each of its rows of
// either, which two products take in turn: of x 16 bytes, of w two words of which it wants the low nibbles or the high ones.
// So any lane map gives the right sum, and nothing moves between lanes. Weights are operand A: what a lane has of a product
// are, on most maps, neighbours of a row of out.
//
//   TILE_TOKENS  rows of x in a tile: 16, 32, 64 or 128. Its rows of w are always 128.
//   STAGES       steps of 64 columns in shared memory
//   BF16_OUT     1: out is bf16, 0: float
//   MATRIX       mma, mfma or mmac; where it is left out, the target's own
#include "dequantize.h"
#include "schedule.h"

using Instruction = Product<MATRIX::Bf16, true>;  // its cache is w, its rows are those of x
using OfW = Instruction::Cache;
using OfX = Instruction::Rows;
using OfOut = Instruction::Sums;

constexpr int kLanes = MATRIX::Bf16::map().lanes, kWaves = 8, kThreads = kWaves * kLanes;
constexpr int kRows = 128, kStep = 64;
constexpr int kTokenWaves = TILE_TOKENS < 64 ? 1 : 2, kRowWaves = kWaves / kTokenWaves;
constexpr int kWaveRows = kRows / kRowWaves, kWaveTokens = TILE_TOKENS / kTokenWaves;
constexpr int kM = kWaveRows / OfW::count, kN = kWaveTokens / OfX::count;  // products of a wave
constexpr int kRun = 8;                                                   // neighbours that a lane reads
constexpr int kProducts = kRun / OfX::run;                                // that it feeds with them
static_assert(kProducts * OfX::length == kTileColumns && OfW::run == OfX::run);

constexpr int kRowTiles = kRows / kTileRows, kPitch = kStep / kTileColumns * kTileBytes;  // of w in shared memory

// What a round of copies moves: of x 16 bytes a thread, of w 8, since tiles start at multiples of 8 bytes and no more.
constexpr int kXChunks = kStep / kRun, kWChunks = kPitch / 8;  // of a row, of four rows
constexpr int kRoundTokens = kThreads / kXChunks, kRoundTiles = kThreads / kWChunks;
constexpr int kWRounds = (kRowTiles + kRoundTiles - 1) / kRoundTiles;

struct Stage {
  uint16_t x[TILE_TOKENS][kStep];
  alignas(8) uint8_t w[kRowTiles][kPitch];
};
struct Block {
  Stage stages[STAGES];
  int seen;
};

// Runs of a row of x are exchanged, so that 8 rows' runs of one place lie in different banks, as do the first or last 4
// runs of a row and those of the next.
__device__ __forceinline__ int place(int row, int k) { return k ^ ((row >> 1 & 3) | (row & 1) << 2) * kRun; }

// The row of w, among those of a product, that is row `row` of its operand: where a lane has two, they are neighbours.
constexpr int kNeighbours = OfOut::run;
static_assert(OfW::vectors <= kNeighbours);
__device__ __forceinline__ int row_of(int row) { return kNeighbours == 2 ? row % 8 * 2 + row / 8 : row; }

// Neighbours of a row of out, the first at a multiple of their number.
__device__ __forceinline__ void store(void *out, size_t at, const float (&sums)[kNeighbours]) {
  struct alignas(4 * kNeighbours) Floats { float at[kNeighbours]; };
  struct alignas(2 * kNeighbours) Halves { uint16_t at[kNeighbours]; };
  Floats floats;
  Halves halves;
  unrolled<kNeighbours>([&](auto i) {
    floats.at[i.value] = sums[i.value];
    halves.at[i.value] = float_to_bf16(sums[i.value]);
  });
  if constexpr (BF16_OUT) *reinterpret_cast<Halves *>((uint16_t *)out + at) = halves;
  else *reinterpret_cast<Floats *>((float *)out + at) = floats;
}

// out [M][N] of x [M][K] and w [N / 4][K / 32] tiles; N a multiple of 4, K of 32. pieces and counters: see schedule.h.
// Grid: as many blocks as run at once, and no more than there are steps; block: lanes x 8. Dynamic shared memory: Block.
extern "C" __global__ void __launch_bounds__(kThreads, TILE_TOKENS < 128 ? 2 : 1)
prefill_tensor_cores(const uint8_t *__restrict__ w, const uint16_t *__restrict__ x, void *__restrict__ out, float4 *pieces,
                     int *counters, int M, int N, int K) {
  GPU_DYNAMIC_SHARED(Block, block);
  const int lane = threadIdx.x, wave = threadIdx.y, thread = wave * kLanes + lane;
  const int token_tiles = (M + TILE_TOKENS - 1) / TILE_TOKENS, row_tiles = (N + kRows - 1) / kRows;
  const size_t w_pitch = (size_t)K / kTileColumns * kTileBytes;  // bytes of four rows

  // What this thread copies first: further rounds are whole rows further.
  const int copied_token = thread / kXChunks, copied_k = thread % kXChunks * kRun;
  const int copied_tile = thread / kWChunks, copied_byte = thread % kWChunks * 8;
  // What this lane reads first: further products and groups lie at constant distances, and the lane's second row of a
  // product behind its first. Its columns are in two words of a tile, one after the other, the low nibbles or the high ones.
  const int wave_row = wave / kTokenWaves * kWaveRows, wave_token = wave % kTokenWaves * kWaveTokens;
  const int row = wave_row + row_of(OfW::template vector<0>(lane)), part_of_w = OfW::part_of(lane);
  const int scales_at = row / kTileRows * kPitch + row % kTileRows * 2;
  const int words_at = row / kTileRows * kPitch + kWordsAt + row % kTileRows * 4 + part_of_w % 2 * 2 * kQuarterBytes;
  const int token = wave_token + OfX::template vector<0>(lane), x_at = place(token, OfX::part_of(lane) * kRun);
  static_assert(OfX::vectors == 1 && OfX::count % 8 == 0);

  Schedule schedule(token_tiles * row_tiles, (K + kStep - 1) / kStep);
  for (Work work; schedule.next(work);) {
    const int first_token = work.tile % token_tiles * TILE_TOKENS, first_row = work.tile / token_tiles * kRows;

    // What lies outside x or w is 0.
    const auto copy_x = [&](int step, Stage &stage) {
      const int k = step * kStep + copied_k;
      const uint16_t *from = x + (size_t)(first_token + copied_token) * K + k;
#pragma unroll 1  // addresses would take registers
      for (int token = copied_token; token < TILE_TOKENS; token += kRoundTokens, from += (size_t)kRoundTokens * K)
        copy_async(&stage.x[token][place(copied_token, copied_k)], from, first_token + token < M && k < K);
    };
    const auto load_w = [&](int step, uint2 (&ahead)[kWRounds]) {
      const int tile = first_row / kTileRows + copied_tile;
      const size_t at = (size_t)step * kPitch + copied_byte;
      unrolled<kWRounds>([&](auto round) {
        constexpr int tiles = round.value * kRoundTiles;
        ahead[round.value] = {};
        if (copied_tile < kRoundTiles && tile + tiles < min(N, first_row + kRows) / kTileRows && at < w_pitch)
          ahead[round.value] = *reinterpret_cast<const uint2 *>(w + (tile + tiles) * w_pitch + at);
      });
    };
    const auto store_w = [&](const uint2 (&ahead)[kWRounds], Stage &stage) {
      unrolled<kWRounds>([&](auto round) {
        constexpr int tiles = round.value * kRoundTiles;
        if (copied_tile < kRoundTiles && copied_tile + tiles < kRowTiles)
          *reinterpret_cast<uint2 *>(&stage.w[copied_tile + tiles][copied_byte]) = ahead[round.value];
      });
    };

    float sums[kM][kN][4] = {};
    uint2 ahead[kWRounds];
    for (int i = 0; i < STAGES - 1; ++i) {
      if (work.first + i < work.end) {
        copy_x(work.first + i, block->stages[i]);
        load_w(work.first + i, ahead);
        store_w(ahead, block->stages[i]);
      }
      copy_commit();
    }
    int turn = 0;
#pragma unroll 1
    for (int step = work.first; step < work.end; ++step) {
      const Stage &stage = block->stages[turn];
      Stage &next = block->stages[turn == 0 ? STAGES - 1 : turn - 1];  // the one of the step before
      const bool is_next = step + STAGES - 1 < work.end;
      copy_wait<STAGES - 2>();
      __syncthreads();
      if (is_next) {
        copy_x(step + STAGES - 1, next);
        load_w(step + STAGES - 1, ahead);
      }
      copy_commit();
      unrolled<kStep / kTileColumns>([&](auto group) {
        uint32_t weights[kM][OfW::vectors][kRun / 2];
        unrolled<kM>([&](auto m) {
          const uint8_t *tile = &stage.w[m.value * OfW::count / kTileRows][group.value * kTileBytes];
          unrolled<OfW::vectors>([&](auto v) {
            const Scale scale = scale_of(*reinterpret_cast<const uint16_t *>(tile + scales_at + v.value * 2));
            unrolled<2>([&](auto i) {
              const uint32_t word = *reinterpret_cast<const uint32_t *>(tile + words_at + v.value * 4 +
                                                                        i.value * kQuarterBytes) >> part_of_w / 2 * 4;
              weights[m.value][v.value][2 * i.value] = weight_pair(__byte_perm(word, 0, 0x4140), scale);
              weights[m.value][v.value][2 * i.value + 1] = weight_pair(__byte_perm(word, 0, 0x4342), scale);
            });
          });
        });
        unrolled<kN>([&](auto n) {
          uint32_t activations[1][kRun / 2];
          read_run<16>(activations[0], &stage.x[token + n.value * OfX::count][x_at ^ group.value * kTileColumns]);
          unrolled<kProducts>([&](auto p) {
            constexpr int product = p.value;
            uint32_t of_x[OfX::elements / 2];
            OfX::template feed<product>(of_x, activations);
            unrolled<kM>([&](auto m) {
              uint32_t of_w[OfW::elements / 2];
              OfW::template feed<product>(of_w, weights[m.value]);
              Instruction::multiply(sums[m.value][n.value], of_x, of_w);
            });
          });
        });
      });
      if (is_next) store_w(ahead, next);
      turn = turn == STAGES - 1 ? 0 : turn + 1;
    }
    copy_wait<0>();
    __syncthreads();  // all are done with the stages

    using Sums = float[kM * kN * 4];
    const Pieces<kM * kN * 4, kThreads> all{pieces};
    if (!gather(reinterpret_cast<Sums &>(sums), schedule.cut_of(work), all, counters + work.tile, &block->seen, thread,
                [] { __syncthreads(); }))
      continue;
    const size_t first = (size_t)(first_token + wave_token) * N + first_row + wave_row;
    unrolled<kM>([&](auto m) {
      unrolled<kN>([&](auto n) {
        unrolled<OfOut::vectors>([&](auto v) {
          constexpr const fragments::Operand &map = MATRIX::Bf16::map().D;
          constexpr int vector = v.value, element = first_element(map, false, vector);
          const int token = n.value * OfX::count + OfOut::template vector<vector>(lane);
          const int row = m.value * OfW::count + row_of(OfOut::template along<element>(lane));
          float run[kNeighbours];
          unrolled<4>([&](auto e) {
            constexpr int at = part(map, false, e.value, true);
            if constexpr (OfOut::template vector_of<e.value> == vector) run[at] = sums[m.value][n.value][e.value];
          });
          if (first_token + wave_token + token < M && first_row + wave_row + row < N)
            store(out, first + (size_t)token * N + row, run);
        });
      });
    });
  }
}
GPU_KERNEL(prefill_tensor_cores)
