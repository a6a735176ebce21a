// What the tiled kernels of this folder share: the tile of weights, and which part of the product a block makes.
//
//   out[m][n] = sum over k of  x[m][k] * w[n][k]
//
// A tile is 72 bytes for 4 rows x 32 columns of w: the rows' scales, four f16, then 16 words, word 4 * quarter + row.
// The bytes of a word hold columns 4 * quarter + 0..3 in their low nibbles and those 16 further in their high ones, as
// codes -8..7 in two's complement. Tiles lie as [N / 4][K / 32]. A tile starts at a multiple of 8 bytes, no more:
// 16-byte copies into shared memory cannot move it.
//
//   TOKENS   rows of x that a block takes: 16, 32, 64 or 128
//
// Grid: token blocks x row blocks x slices of K. Token blocks are neighbours, so that those that read the same weights
// run at the same time, and one read of memory serves them all. Each slice writes an output of its own, [slices][M][N].
#pragma once
#include "gpu.h"

constexpr int kTokens = TOKENS;
constexpr int kTileRows = 4, kTileColumns = 32, kTileBytes = 72, kTileHead = 8;

struct Part {
  int first_token, first_row, first_group, groups;  // groups: of 32 k
  float *out;                                       // of this slice
};
template <int rows> __device__ __forceinline__ Part part_of_block(float *out, int M, int N, int K) {
  const unsigned groups = K / kTileColumns;
  const int begin = groups * blockIdx.z / gridDim.z, end = groups * (blockIdx.z + 1) / gridDim.z;
  return {int(blockIdx.x) * kTokens, int(blockIdx.y) * rows, begin, end - begin, out + (size_t)blockIdx.z * M * N};
}

// Where the block's first row and group begin in w. Tiles of the next 4 rows are K / 32 * kTileBytes further, less than
// 2^31 in all of a block.
__device__ __forceinline__ const uint8_t *weights_of_block(const uint8_t *w, const Part &part, int K) {
  const size_t groups = K / kTileColumns;
  return w + (part.first_row / kTileRows * groups + part.first_group) * kTileBytes;
}
// The same in x, which has 32 numbers a group, and in the scales of x, which have 1.
template <class T>
__device__ __forceinline__ const T *tokens_of_block(const T *x, const Part &part, int K, int per_group) {
  const size_t groups = K / kTileColumns;
  return x + (part.first_token * groups + part.first_group) * per_group;
}

// ---- sums of single threads: 256 of them make kTokens x rows, each kM x rows / 16 ----

constexpr int kThreads = 256, kM = kTokens / 16;

// Where a thread's sum [i][j] stands in the block: token + 4 * i, row + 8 * j. Warps lie as 4 x 2, lanes as 4 x 8, so
// that at one k the lanes of a warp read neighbouring rows of shared memory. They are numbered such that lane ^ 1 reads
// the same row of w and lane ^ 2 the same of x: then the hardware serves half a warp's 16-byte reads at once.
struct Place { int token, row; };
template <int rows> __device__ __forceinline__ Place place_of_thread() {
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  return {warp / 2 * 4 * kM + (lane >> 4) * 2 + (lane & 1), warp % 2 * (rows / 2) + (lane >> 1 & 7)};
}

// x, of which the compiler knows nothing: what is made of it is made here, and not kept in registers through a loop.
__device__ __forceinline__ int opaque(int x) {
#if GPU_HIP
  asm volatile("" : "+v"(x));
#else
  asm volatile("" : "+r"(x));
#endif
  return x;
}

// Writes a thread's sums to the output, or adds them to what it wrote before, and begins anew.
template <int kN>
__device__ __forceinline__ void add_sums(float (&sum)[kM][kN], const Part &part, const Place &place, int M, int N,
                                         bool first) {
  N = opaque(N);
  float *at = part.out + (size_t)(part.first_token + place.token) * N + part.first_row + place.row;
#pragma unroll
  for (int i = 0; i < kM; ++i, at += 4 * (size_t)N) {
    const int columns = part.first_token + place.token + 4 * i < M ? N - part.first_row - place.row : 0;
    float before[kN];
#pragma unroll
    for (int j = 0; j < kN; ++j) before[j] = !first && 8 * j < columns ? at[8 * j] : 0.f;
#pragma unroll
    for (int j = 0; j < kN; ++j) {
      if (8 * j < columns) at[8 * j] = before[j] + sum[i][j];
      sum[i][j] = 0.f;
    }
  }
}
