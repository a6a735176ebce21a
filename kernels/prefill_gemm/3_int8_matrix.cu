// 3. Candidate B on int8 matrix instructions: a group of 32 k is one instruction.
//
// An instruction multiplies 32 k, the group that shares a scale, so none of its sums can be left in the integer
// accumulators for the next: each takes two multiply-adds into the FP32 sums, 8 instructions beside the one that makes
// 16 x 8 x 32 on mma. That is the price of the group of 32, and what is done here about the rest is to keep it small:
// w is operand A and lies in shared memory as the registers that lanes need of it, x is read in runs of 8 bytes, and a
// lane's scales lie together. All in all a matrix instruction takes 15 instructions on Hopper, 6 more than it must.
//
// Where a lane's k end another lane's begin that are 16 further, and low and high nibbles of the same words hold them.
// Hence a thread takes words for one such pair of lanes. All of this follows from the lane maps.
#include "int8.h"
#include "operands.h"

using Instruction = MATRIX::Signed;
using Weights = Held<Instruction, 'A', true>;  // vectors are rows of w
using Tokens = Held<Instruction, 'B', false>;  // and tokens
using Sums = Held<Instruction, 'D', false>;    // tokens
static_assert(Weights::length == kTileColumns && Weights::run == 8 && Tokens::run == 8);

// Of w, a block takes few rows, so that two blocks share a multiprocessor, one at work while the other waits, and that
// the last round of blocks leaves little of the GPU idle. A step has as many groups as give each thread a pair of
// lanes.
constexpr int kRows = 64, kAllTiles = kRows / Weights::count;
constexpr int kBlock = 256, kLanes = Instruction::map().lanes, kGroups = kBlock / (kAllTiles * kLanes / 2);
constexpr int kWaveRows = kTokens == 128 ? 32 : 16, kRowWaves = kRows / kWaveRows;
constexpr int kTokenWaves = kBlock / kLanes / kRowWaves, kWaveTokens = kTokens / kTokenWaves;
constexpr int kTokenTiles = kWaveTokens / Tokens::count, kRowTiles = kWaveRows / Weights::count;
#if GPU_CUDA && __CUDA_ARCH__ == 900
constexpr int kUnroll = kGroups;
#else
constexpr int kUnroll = 1;  // elsewhere more would spill
#endif

// The bit of a lane that tells the upper 16 of the 32 k from the lower.
__host__ __device__ constexpr int upper_bit() {
  int bit = 0;
  for (int i = 0; Instruction::map().A.column[i] >= 0; ++i)
    if (Instruction::map().A.column[i] < 8) bit = 1 << Instruction::map().A.column[i];
  return bit;
}
constexpr int kUpper = upper_bit();

// Scales lie as lanes need them: a lane holds sums of kRowTiles * Sums::run rows and kTokenTiles * Sums::vectors tokens
// of its wave's part, and the scales of each lie together, those of a tile next to each other.
constexpr int kLaneRows = kRowTiles * Sums::run, kLaneTokens = kTokenTiles * Sums::vectors;
template <class T, int n> struct alignas(n * sizeof(T) < 16 ? n * sizeof(T) : 16) Scales { T of[n]; };
using SumsOfRows = Held<Instruction, 'D', true>;  // whose part_of numbers the lanes that hold sums of the same rows

// The row or token of the wave's part, `lane_part` being the number of its lane and i its place among that lane's.
// sources: where bits of the index in a tile come from.
__host__ __device__ constexpr int scaled_index(const signed char *sources, int in_tile, int count, int lane_part,
                                               int i) {
  int index = i / in_tile * count, element_part = i % in_tile;
  for (int bit = 0; sources[bit] >= 0; ++bit) {
    int &from = sources[bit] < 8 ? lane_part : element_part;
    index |= (from & 1) << bit;
    from >>= 1;
  }
  return index;
}

struct Group {
  struct alignas(Weights::elements) Registers { uint32_t word[Weights::elements / 4]; };
  Registers rows[kAllTiles][kLanes];
  struct alignas(16) Token { int8_t k[kTileColumns]; };
  Token tokens[kTokens], gap;  // so that groups begin in different banks
  Scales<RowScale, kLaneRows> row_scales[kRowWaves][kWaveRows / kLaneRows];
  Scales<float, kLaneTokens> token_scales[kTokenWaves][kWaveTokens / kLaneTokens];
};

// Number of a sum among those of its token that a lane holds.
template <int element> constexpr int kAlong = part(Instruction::map().D, false, element, true);
using Step = Group[kGroups];

extern "C" __global__ void __launch_bounds__(kBlock, 2)
prefill_int8_matrix(const uint8_t *__restrict__ w, const int8_t *__restrict__ x, const float *__restrict__ x_scales,
                    float *__restrict__ out, int M, int N, int K) {
  GPU_DYNAMIC_SHARED(Step, stages);  // two of them
  const Part part = part_of_block<kRows>(out, M, N, K);
  const int lane = threadIdx.x, wave = threadIdx.y, thread = wave * kLanes + lane;

  // This thread's part of a step's copies, as offsets from where the block's first row and group begin. What lies
  // beyond the last row of w or x is taken from the last, and never stored. Of a group beyond the last one x is zero,
  // and so are its sums, whatever they are scaled by.
  const int8_t *x_block = tokens_of_block(x, part, K, kTileColumns);
  const float *x_scales_block = tokens_of_block(x_scales, part, K, 1);
  const uint8_t *w_block = weights_of_block(w, part, K);
  const int all_groups = K / kTileColumns;
  const int w_stride = all_groups * kTileBytes;  // of 4 rows
  const int last_row = N - part.first_row - 1, last_token = M - part.first_token - 1, last_group = part.groups - 1;

  constexpr int kChunks = kGroups * 2, kRoundTokens = kBlock / kChunks;  // of 16 bytes
  const int token = thread / kChunks, token_group = thread / 2 % kGroups, half = thread % 2;
  const int source = token * K + thread % kChunks * 16;
  const auto copy_tokens = [&](int group) {
    if (group <= last_group) {
#pragma unroll
      for (int i = 0; i < kTokens; i += kRoundTokens)
        if (kTokens % kRoundTokens == 0 || token + i < kTokens)
          copy_async(&stages[group / kGroups % 2][token_group].tokens[token + i].k[16 * half],
                     x_block + (size_t)i * K + group * kTileColumns + source,
                     token + i <= last_token && group + token_group <= last_group);
    }
    copy_commit();
  };

  // The lane whose registers this thread makes from low nibbles, their tile and group, and the words they come from.
  const int pair = thread % (kLanes / 2), pair_group = thread / (kLanes / 2) % kGroups;
  const int row_tile = thread / (kLanes / 2 * kGroups);
  const int lower_lane = (pair & (kUpper - 1)) | (pair & -kUpper) << 1, pair_part = Weights::part_of(lower_lane);
  int words_at[Weights::vectors];
  unrolled<Weights::vectors>([&](auto v) {
    const int row = min(row_tile * Weights::count + Weights::template vector<v.value>(lower_lane), last_row);
    words_at[v.value] = row / kTileRows * w_stride + kTileHead + 4 * (2 * pair_part * kTileRows + row % kTileRows);
  });
  // It takes along a scale of w and, of each kRoundScales tokens, one of x.
  constexpr int kRoundScales = kBlock / kGroups, kScaleRounds = (kTokens + kRoundScales - 1) / kRoundScales;
  const int scaled = thread / kGroups, scale_group = thread % kGroups;
  const int scale_row = min(scaled / kWaveRows * kWaveRows +
                                scaled_index(Instruction::map().D.row, Sums::run, Weights::count,
                                             scaled % kWaveRows / kLaneRows, scaled % kLaneRows),
                            last_row);
  const int scale_token = scaled / kWaveTokens * kWaveTokens +
                          scaled_index(Instruction::map().D.column, Sums::vectors, Tokens::count,
                                       scaled % kWaveTokens / kLaneTokens, scaled % kLaneTokens);
  static_assert(kScaleRounds == 1 || kRoundScales % kWaveTokens == 0);
  const int row_scale_at = scale_row / kTileRows * w_stride + scale_row % kTileRows * 2;

  uint32_t words[Weights::vectors][2];
  uint16_t row_scale;
  float token_scales[kScaleRounds];
  const auto load = [&](int group) {
    if (group > last_group) return;
    const uint8_t *tile = w_block + min(group + pair_group, last_group) * kTileBytes;
    unrolled<Weights::vectors>([&](auto v) {
      const uint32_t *at = reinterpret_cast<const uint32_t *>(tile + words_at[v.value]);
      words[v.value][0] = at[0], words[v.value][1] = at[kTileRows];
    });
    const int scaled_group = min(group + scale_group, last_group);
    if (scaled < kRows)
      row_scale = *reinterpret_cast<const uint16_t *>(w_block + scaled_group * kTileBytes + row_scale_at);
    unrolled<kScaleRounds>([&](auto i) {
      const int token = min(opaque(scale_token) + i.value * kRoundScales, last_token);  // no register to keep it in
      if (scaled + i.value * kRoundScales < kTokens)
        token_scales[i.value] = x_scales_block[token * all_groups + scaled_group];
    });
  };
  const auto store = [&](int group) {
    Group *stage = stages[group / kGroups % 2];
    uint32_t low[Weights::vectors][2], high[Weights::vectors][2];
    unrolled<Weights::vectors>([&](auto v) {
      unrolled<2>([&](auto i) {
        low[v.value][i.value] = low_codes(words[v.value][i.value]);
        high[v.value][i.value] = high_codes(words[v.value][i.value]);
      });
    });
    Group::Registers lower, upper;
    Weights::template feed<0>(lower.word, low);
    Weights::template feed<0>(upper.word, high);
    stage[pair_group].rows[row_tile][lower_lane] = lower;
    stage[pair_group].rows[row_tile][lower_lane + kUpper] = upper;
    if (scaled < kRows) (&stage[scale_group].row_scales[0][0].of[0])[scaled] = RowScale(scale_of_codes(row_scale));
    unrolled<kScaleRounds>([&](auto i) {
      const int slot = scaled + i.value * kRoundScales;
      if (slot < kTokens) (&stage[scale_group].token_scales[0][0].of[0])[slot] = token_scales[i.value];
    });
  };

  copy_tokens(0);
  load(0);
  store(0);
  const int wave_token = wave % kTokenWaves, wave_row = wave / kTokenWaves;
  float sum[kRowTiles][kTokenTiles][4] = {};
  for (int first = 0; first < part.groups; first += kGroups) {
    copy_wait<0>();
    __syncthreads();  // this step is in shared memory, and nobody reads the one before any more
    copy_tokens(first + kGroups);
    load(first + kGroups);
#pragma unroll kUnroll
    for (int i = 0; i < kGroups; ++i) {
      const Group &group = stages[first / kGroups % 2][i];
      Group::Registers a[kRowTiles];
      unrolled<kRowTiles>([&](auto r) { a[r.value] = group.rows[wave_row * kRowTiles + r.value][lane]; });
      const auto row_scales = group.row_scales[wave_row][Sums::part_of(lane)];
      const auto token_scales = group.token_scales[wave_token][SumsOfRows::part_of(lane)];
      unrolled<kTokenTiles>([&](auto t) {
        const int token = wave_token * kWaveTokens + t.value * Tokens::count + Tokens::template vector<0>(lane);
        uint32_t b[2];
        read_run<8>(b, &group.tokens[token].k[Tokens::part_of(lane) * 8]);
        unrolled<kRowTiles>([&](auto r) {
          int products[4] = {kStartBits, kStartBits, kStartBits, kStartBits};
          Instruction::multiply(products, a[r.value].word, b);
          unrolled<4>([&](auto i) {
            float &to = sum[r.value][t.value][i.value];
            to = fmaf(row_scales.of[r.value * Sums::run + kAlong<i.value>].times(products[i.value]),
                      token_scales.of[t.value * Sums::vectors + Sums::template vector_of<i.value>], to);
          });
        });
      });
    }
    store(first + kGroups);
  }

  unrolled<kTokenTiles>([&](auto t) {
    unrolled<kRowTiles>([&](auto r) {
      unrolled<4>([&](auto i) {
        const int m = part.first_token + wave_token * kWaveTokens + t.value * Tokens::count +
                      Sums::template vector<Sums::template vector_of<i.value>>(lane);
        const int n = part.first_row + wave_row * kWaveRows + r.value * Weights::count +
                      Sums::template along<i.value>(lane);
        if (m < M && n < N) part.out[(size_t)m * N + n] = sum[r.value][t.value][i.value];
      });
    });
  });
}
GPU_KERNEL(prefill_int8_matrix)
