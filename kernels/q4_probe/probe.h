// What the probes share: the tile, which lane owns what of it, and the sum over lanes. They differ in arithmetic only.
//
//   out[m][n] = sum over k of  x[m][k] * w[n][k]
//
// A tile is 72 bytes for 4 rows x 32 columns of w: the rows' scales, four f16, then 16 words, word 4 * quarter + row.
// The bytes of a word hold columns 4 * quarter + 0..3 in their low nibbles and those 16 further in their high ones, as
// codes -8..7 in two's complement. Tiles lie as [N / 4][K / 32].
//
// A wave owns 1, 2 or 4 rows of a tile for all rows of x at once, and sweeps K. Four neighbouring lanes share a tile, a
// quarter each: 8 weights of a row, which meet two runs of 4 activations. What a wave loads of w at a time is one run
// of bytes but for the words of other rows, which neighbouring waves of the block take. Every lane holds a sum for each
// row of w and of x; they are added up over the lanes once, at the end, by a butterfly: in one order.
//
//   WAVE_ROWS   rows of w that a wave owns (the article's R)
//   BATCH       rows of x (the article's M)
#pragma once
#include "gpu.h"

constexpr int kWaves = 4;  // of a block, each on its own
#if GPU_CUDA
constexpr int kBlock = 32 * kWaves;  // threads, exactly: told of more, ptxas spends registers differently, and spills
#else
constexpr int kBlock = 64 * kWaves;  // at most
#endif
constexpr int kTileRows = 4, kTileColumns = 32, kTileBytes = 72;
constexpr int kQuarters = 4;
static_assert(kTileRows % WAVE_ROWS == 0, "the rows of a wave are of one tile");

// The first of this wave's rows; blocks are warpSize x kWaves.
__device__ __forceinline__ size_t first_row() { return ((size_t)blockIdx.x * kWaves + threadIdx.y) * WAVE_ROWS; }

// Tiles of a row that this lane visits: first_tile(), then each tile_step() further.
__device__ __forceinline__ int first_tile() { return threadIdx.x / kQuarters; }
__device__ __forceinline__ int tile_step() { return warpSize / kQuarters; }

// Column of the lane's low nibbles in a row of x; the high ones' is kTileColumns / 2 further.
__device__ __forceinline__ int first_column(int tile) { return tile * kTileColumns + threadIdx.x % kQuarters * 4; }

// What a lane owns of a tile: 8 weights of each of its rows.
struct Quarter {
  uint32_t word[WAVE_ROWS];
  float scale[WAVE_ROWS];
};
__device__ __forceinline__ Quarter load_quarter(const uint8_t *w, size_t row, int tile, int K) {
  struct alignas(2 * WAVE_ROWS) Scales { uint16_t row[WAVE_ROWS]; };
  struct alignas(WAVE_ROWS == 1 ? 4 : 8) Words { uint32_t row[WAVE_ROWS]; };  // tiles start at multiples of 8 bytes
  const uint8_t *at = w + (row / kTileRows * (K / kTileColumns) + tile) * kTileBytes;
  const int first = row % kTileRows, quarter = threadIdx.x % kQuarters;
  const Scales scales = *reinterpret_cast<const Scales *>(at + 2 * first);
  const Words words = *reinterpret_cast<const Words *>(at + 2 * kTileRows + 4 * (kTileRows * quarter + first));
  Quarter mine;
#pragma unroll
  for (int r = 0; r < WAVE_ROWS; ++r) {
    mine.word[r] = words.row[r];
    mine.scale[r] = half_to_float(scales.row[r]);
  }
  return mine;
}

// Weight i of a word, 0..3 from its low nibbles and 4..7 from its high ones. The product is exact: 4 bits times 11.
__device__ __forceinline__ float weight(uint32_t word, float scale, int i) {
  const int code = int(word << (28 - 8 * (i % 4) - 4 * (i / 4))) >> 28;
  return __fmul_rn(__int2float_rn(code), scale);
}

// The lane's 8 activations of a row, as weight() numbers them.
struct Activations { float value[8]; };
__device__ __forceinline__ Activations load_activations(const float *x, int m, int column, int K) {
  const float *at = x + (size_t)m * K + column;
  const float4 low = *reinterpret_cast<const float4 *>(at);
  const float4 high = *reinterpret_cast<const float4 *>(at + kTileColumns / 2);
  return {{low.x, low.y, low.z, low.w, high.x, high.y, high.z, high.w}};
}

// Adds the sums of all lanes, which leaves every total in every lane, and writes them to out[BATCH][N].
__device__ __forceinline__ void store_sums(float (&sum)[BATCH][WAVE_ROWS], float *out, size_t row, int N) {
  for (int flip = warpSize / 2; flip > 0; flip /= 2) {
#pragma unroll
    for (int m = 0; m < BATCH; ++m) {
#pragma unroll
      for (int r = 0; r < WAVE_ROWS; ++r) {
        sum[m][r] = __fadd_rn(sum[m][r], __shfl_xor_sync(GPU_FULL_MASK, sum[m][r], flip));
      }
    }
  }
#pragma unroll
  for (int m = 0; m < BATCH; ++m) {
#pragma unroll
    for (int r = 0; r < WAVE_ROWS; ++r) {
      if (threadIdx.x == (m * WAVE_ROWS + r) % 32) out[(size_t)m * N + row + r] = sum[m][r];
    }
  }
}
