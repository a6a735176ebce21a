// Products of panels (kernelbook/packing.py) on mma.sync, as accurate as sums of floats.
//
// A lane's 16 bytes of codes are its fragments of two products of 16 columns (int8) or of four (int4). A code meets the bits
// of 1024 as f16, whose last place is worth 1, and taking off what is too much leaves the code itself: exact. The sums of a
// group of 32 columns are scaled as floats, so that nothing of a weight is rounded.
//
// An activation is 2^e (high + low), two f16 of 11 bits each: 22 bits at least, of 24. e is that of 128 columns of a row, chosen
// so that the largest of them reaches 2^14, and is put back when their sums are added to those of the columns before. What
// is much smaller than the largest of its 128 keeps an absolute error of 2^-39 of that one, which is all that a sum with it
// could show. Activations that are f16 or bf16 in memory need no low part, and lose nothing to the high one, unless they
// are more than 2^24 times smaller than the largest of their 128.
//
//   BITS         of a code: 8 or 4
//   ACTIVATIONS  what x is in memory: 0 float, 1 f16, 2 bf16
//   ROWS         of x, or a few more than it has: 1, 2, 4, 8, 16 or 32
#pragma once
#include "operands.h"

constexpr int kPanelRows = 16, kChunkColumns = 128, kGroups = 4;     // groups of a chunk
constexpr int kCodeBytes = kPanelRows * kChunkColumns * BITS / 8, kChunkBytes = kCodeBytes + 128;

#if ACTIVATIONS == 0
using Activation = float;
#else
using Activation = uint16_t;
#endif

// Activations are operand B, 8 columns at a time. With up to 4 rows the columns are high and low parts of a row in turn,
// with more rows each part has products of its own, which go to the same sums. Where a group takes fewer than 8 columns,
// several groups share a product's sums, each in columns of its own: what it does not multiply by zeros is its own. So lanes
// have different groups to scale and to add up, a group each, where all of them would do the same for all groups.
constexpr int kParts = ACTIVATIONS == 0 ? 2 : 1;
constexpr bool kInTurn = kParts == 2 && ROWS <= 4;
constexpr int kTiles = ROWS > 8 ? ROWS / 8 : 1;                      // of 8 columns
constexpr int kOperands = kInTurn ? 1 : kParts;                      // of a tile
constexpr int kColumns = kInTurn ? 2 * ROWS : ROWS < 8 ? ROWS : 8;   // that a group of a tile really has
constexpr int kWidth = kColumns < 2 ? 2 : kColumns;                  // of 8 that it takes
constexpr int kTogether = 8 / kWidth < kGroups ? 8 / kWidth : kGroups, kRounds = kGroups / kTogether;  // groups of a round
constexpr int kSums = kInTurn ? 2 : 4 * kTiles;                      // of a lane

// 128 columns of all rows of x, as lanes read them: 16 bytes are a lane's operands of one group.
struct alignas(16) Slice {
  uint4 operand[kGroups][kTiles][kOperands][kColumns][4];
  float unit[ROWS];  // what 1 stands for
};

// ---- x into shared memory: a warp takes 128 columns of one row ----

// Two pairs of columns as they are in memory, and their numbers as floats.
#if ACTIVATIONS == 0
using Pair = float2;
#else
using Pair = uint32_t;
#endif
struct Four { Pair pair[2]; };
__device__ __forceinline__ float float_of(const Four &v, int i) {
#if ACTIVATIONS == 0
  return i % 2 == 0 ? v.pair[i / 2].x : v.pair[i / 2].y;
#else
  const uint16_t bits = v.pair[i / 2] >> 16 * (i % 2);
  return ACTIVATIONS == 1 ? half_to_float(bits) : bf16_to_float(bits);
#endif
}

// Of the 16 columns of a step those of lane t of an operand: 2 t and the next, which are its register 0, and those 8 further,
// register 1. Lanes of a warp have the 8 steps of a chunk, four each, one step after the other.
__device__ __forceinline__ Four read_four(const Activation *row, int chunk, unsigned lane, int K) {
  const int column = chunk * kChunkColumns + lane / 4 * 16 + lane % 4 * 2;
  Four four{};
  if (column < K) unrolled<2>([&](auto i) { four.pair[i.value] = *reinterpret_cast<const Pair *>(row + column + 8 * i.value); });
  return four;
}

__device__ __forceinline__ unsigned largest_of_warp(unsigned value) {
#if GPU_CUDA
  return __reduce_max_sync(GPU_FULL_MASK, value);
#else
  unrolled<5>([&](auto i) { value = max(value, __shfl_xor_sync(GPU_FULL_MASK, value, 1 << i.value)); });
  return value;
#endif
}

// All lanes of the warp, for the same row.
__device__ __forceinline__ void split_row(Slice &slice, int row, const Four &four, unsigned lane) {
  float x[4];
  unrolled<4>([&](auto i) { x[i.value] = float_of(four, i.value); });
  unsigned largest = 0;  // as the bits of its size, which are in the order of sizes; those of a NaN are above all
  unrolled<4>([&](auto i) { largest = max(largest, __float_as_uint(x[i.value]) & 0x7fffffffu); });
  largest = largest_of_warp(largest);
  const unsigned exponent = max(largest >> 23, 15u);  // smaller ones: 2^126 is the largest factor
  const float factor = __uint_as_float(268 - exponent << 23);
  if (lane == 0) slice.unit[row] = __uint_as_float(exponent - 14 << 23);

  unrolled<4>([&](auto i) { x[i.value] *= factor; });
  uint2 high{half_pair(x[0], x[1]), half_pair(x[2], x[3])};
  const int group = lane / 8, step = lane / 4 % 2, t = lane % 4, tile = row / 8 % kTiles;
  const auto place = [&](int operand, int column) -> uint2 & {
    return reinterpret_cast<uint2 *>(&slice.operand[group][tile][operand][column][t])[step];
  };
  if constexpr (kParts == 1) {
    place(0, row % 8) = high;
  } else {
    // An infinity leaves nothing, and not infinity minus infinity.
    const auto rest = [&](uint32_t bits, int i) {
      const uint32_t both = half_pair(x[i] - half_to_float(uint16_t(bits)), x[i + 1] - half_to_float(uint16_t(bits >> 16)));
      return largest < 0x7f800000 ? both : 0;
    };
    uint2 low{rest(high.x, 0), rest(high.y, 2)};
    if constexpr (kInTurn) {
      // In the same banks are the high parts of all groups, and the low ones: every other group begins with these.
      const int odd = group % 2;
      place(0, 2 * row + odd) = odd ? low : high;
      place(0, 2 * row + 1 - odd) = odd ? high : low;
    } else {
      place(0, row % 8) = high, place(kOperands - 1, row % 8) = low;
    }
  }
}

// ---- a chunk of a panel as a lane reads it, from shared memory or from registers ----

constexpr int kLoads = kCodeBytes / 512, kGroupsOfLoad = kGroups / kLoads;

// Of a round: whose sums a lane has.
__device__ __forceinline__ int group_of_sums(int round, int lane) { return round * kTogether + lane % 4 * 2 / kWidth; }

struct InShared {
  static constexpr int unroll = ROWS < 16 ? kRounds : 1;  // sums of many rows leave few registers to what comes next
  const uint8_t *chunk;
  int lane;
  __device__ __forceinline__ uint4 codes(int load) const {
    return *reinterpret_cast<const uint4 *>(chunk + load * 512 + lane * 16);
  }
  // Of rows g and g + 8, of this lane's group of the round.
  __device__ __forceinline__ uint32_t scales(int round) const {
    return *reinterpret_cast<const uint32_t *>(chunk + kCodeBytes + lane / 4 * 16 + group_of_sums(round, lane) * 4);
  }
};

__device__ __forceinline__ uint32_t word_of(const uint4 &v, int i) { return i == 0 ? v.x : i == 1 ? v.y : i == 2 ? v.z : v.w; }

struct InRegisters {
  static constexpr int unroll = kRounds;
  uint4 loads[kLoads];
  uint32_t last[kRounds];
  __device__ __forceinline__ void read(const uint8_t *chunk, int lane) {
    unrolled<kLoads>([&](auto i) { loads[i.value] = load_once(chunk + i.value * 512 + lane * 16); });
    const uint8_t *scales = chunk + kCodeBytes + lane / 4 * 16;
    if constexpr (kRounds == kGroups) {
      const uint4 all = load_once(scales);
      unrolled<kGroups>([&](auto i) { last[i.value] = word_of(all, i.value); });
    } else {
      unrolled<kRounds>([&](auto i) {
        last[i.value] = __ldcs(reinterpret_cast<const uint32_t *>(scales) + group_of_sums(i.value, lane));
      });
    }
  }
  __device__ __forceinline__ uint4 codes(int load) const { return loads[load]; }
  __device__ __forceinline__ uint32_t scales(int round) const { return last[round]; }
};

// (bits & mask) | more. Of two constants one must be in a register: left to itself the compiler takes two instructions instead.
template <uint32_t mask, uint32_t more> __device__ __forceinline__ uint32_t masked(uint32_t bits) {
#if GPU_CUDA
  uint32_t result;
  asm("lop3.b32 %0, %1, %2, %3, 0xea;" : "=r"(result) : "r"(bits), "n"(mask), "r"(more));
  return result;
#else
  return (bits & mask) | more;
#endif
}

// The fragment of 16 columns of a group: its step'th. int4 takes two words for both.
__device__ __forceinline__ void widen(uint32_t (&a)[4], const uint4 &codes, int step) {
  unrolled<2>([&](auto i) {
    if constexpr (BITS == 8) {
      const uint32_t four = word_of(codes, 2 * step + i.value);
      a[2 * i.value] = half2_add(__byte_perm(four, 0x64646464, 0x4140), 0xe480e480);  // 1024 + 128 + code - 1152
      a[2 * i.value + 1] = half2_add(__byte_perm(four, 0x64646464, 0x4342), 0xe480e480);
    } else {
      const uint32_t four = word_of(codes, step) >> 8 * i.value;
      a[2 * i.value] = half2_add(masked<0x000f000f, 0x64006400>(four), 0xe408e408);  // 1024 + 8 + code - 1032
      a[2 * i.value + 1] = half2_fma(masked<0x00f000f0, 0x64006400>(four), 0x2c002c00, 0xd480d480);  // 16 codes: 1/16 of that
    }
  });
}

// ---- the product ----

// A lane's sums of a panel: in turn, of rows g and g + 8 of w and a row of x; else of g, g + 8 and two rows of x, for each
// tile. In fours, as blocks leave them to each other.
using Sums = float[(kSums + 3) / 4 * 4];

// A lane's operands of a round, where groups share one: a column belongs to one of them, and is 0 for the others, once and for
// all.
struct Own { uint4 of[kTogether] = {}; };

// Adds a chunk.
template <class Chunk>
__device__ __forceinline__ void multiply(Sums &sums, const Chunk &chunk, const Slice &slice, Own &own, int lane) {
  const int column = lane / 4 % kWidth, owner = lane / 4 / kWidth, t = lane % 4;
  float of_chunk[kSums] = {};
  uint4 codes;
#pragma unroll Chunk::unroll
  for (int round = 0; round < kRounds; ++round) {
    float products[kTiles][4] = {};
    if constexpr (kTogether > 1) {
      const uint4 *x = &slice.operand[round * kTogether + owner][0][0][column % kColumns][t];
      unrolled<kTogether>([&](auto i) {
        if (i.value == owner && column < kColumns) own.of[i.value] = *x;
      });
    }
    unrolled<kTogether>([&](auto i) {
      const int group = round * kTogether + i.value, of_load = group % kGroupsOfLoad;
      if (of_load == 0) codes = chunk.codes(group / kGroupsOfLoad);
      const uint4 of_group = of_load == 0 ? codes : uint4{codes.z, codes.w};
      uint32_t a[2][4];
      unrolled<2>([&](auto step) { widen(a[step.value], of_group, step.value); });
      unrolled<kTiles>([&](auto tile) {
        unrolled<kOperands>([&](auto operand) {  // the low parts, which are last, first
          const uint4 x = kTogether > 1 ? own.of[i.value]
                                        : slice.operand[group][tile.value][kOperands - 1 - operand.value][column][t];
          const uint32_t b[2][2] = {{x.x, x.y}, {x.z, x.w}};
          unrolled<2>([&](auto step) { mma_m16n8k16_f16(products[tile.value], a[step.value], b[step.value]); });
        });
      });
    });
    const uint32_t both = chunk.scales(round);
    const float scale[2] = {half_to_float(uint16_t(both)), half_to_float(uint16_t(both >> 16))};
    unrolled<kSums>([&](auto i) {
      const float *d = products[i.value / 4];
      if constexpr (kInTurn) of_chunk[i.value] = fmaf(scale[i.value], d[2 * i.value] + d[2 * i.value + 1], of_chunk[i.value]);
      else of_chunk[i.value] = fmaf(scale[i.value % 4 / 2], d[i.value % 4], of_chunk[i.value]);
    });
  }
  unrolled<kSums>([&](auto i) {
    const int row = kInTurn ? t : i.value / 4 * 8 + 2 * t + i.value % 2;
    sums[i.value] = fmaf(slice.unit[row & (ROWS - 1)], of_chunk[i.value], sums[i.value]);
  });
}

// Adds up what lanes have of different groups: all of them for the first lanes, of which `place_of` speaks.
__device__ __forceinline__ void add_groups(Sums &sums) {
  unrolled<2>([&](auto bit) {
    if constexpr (2 << bit.value >= kWidth)
      unrolled<kSums>([&](auto i) { sums[i.value] += __shfl_xor_sync(GPU_FULL_MASK, sums[i.value], 1 << bit.value); });
  });
}

// Where a sum belongs: row of the panel, and row of x, which may be beyond the last.
struct Place { int n, m; };
__device__ __forceinline__ Place place_of(int lane, int sum) {
  const int g = lane / 4, t = lane % 4;
  if constexpr (kInTurn) return {g + 8 * sum, t};
  else return {g + 8 * (sum % 4 / 2), 8 * (sum / 4) + 2 * t + sum % 2};
}

// out [M][N], of a panel that may be beyond the last.
__device__ __forceinline__ void store(const Sums &sums, float *out, int panel, int M, int N, int lane) {
  unrolled<kSums>([&](auto i) {
    const Place place = place_of(lane, i.value);
    const int n = panel * kPanelRows + place.n;
    if (n < N && place.m < M) out[(size_t)place.m * N + n] = sums[i.value];
  });
}
