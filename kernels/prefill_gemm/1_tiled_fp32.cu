// 1. Candidate A: a tiled GEMM in FP32, one fused multiply-add a MAC.
//
// A block makes 128 rows x TOKENS of the product. Each weight is dequantized once for all its tokens, into shared
// memory, from where both operands are read 16 bytes, four k, at a time: 8 + kM reads for 32 kM multiply-adds, 1 to 16
// at 128 tokens. While a step of 16 k is multiplied, activations of the next are on their way into the other half of
// shared memory and its weights, a word a thread, into registers. 16 k are half a tile: 8 of its 16 words, columns 0-7
// and 16-23 or the others. Shared rows of 16 + 4 floats put the same k of 8 neighbouring rows into different banks.
//
// In FP32 one long sum drifts: over 17408 products by more than 2e-6 of the result. Every 1024 k the sums are added to
// the output, which costs 8 bytes for 1024 multiply-adds and no registers.
#include "tiles.h"

constexpr int kRows = 128, kN = kRows / 16;
constexpr int kStep = 16, kChunks = kStep / 4;  // k of a step; as float4
constexpr int kStride = kChunks + 1;
constexpr int kStepsOfSum = 1024 / kStep;

extern "C" __global__ void __launch_bounds__(kThreads, 2)
prefill_tiled_fp32(const uint8_t *__restrict__ w, const float *__restrict__ x, float *__restrict__ out, int M, int N,
                   int K) {
  __shared__ float4 tokens[2][kTokens][kStride], rows[2][kRows][kStride];
  const Part part = part_of_block<kRows>(out, M, N, K);
  const Place place = place_of_thread<kRows>();
  const int steps = 2 * part.groups;

  // This thread's part of a step's copies, as offsets from where the block's rows begin. What lies beyond the last row
  // of x is not read; beyond the last of w, and behind the last step, the last is read once more, and never stored.
  const float *x_block = tokens_of_block(x, part, K, kTileColumns);
  const uint8_t *w_block = weights_of_block(w, part, K);

  constexpr int kRoundTokens = kThreads / kChunks;
  const int token = threadIdx.x / kChunks, chunk = threadIdx.x % kChunks;
  const int source = token * K + chunk / 2 * (kTileColumns / 2) + chunk % 2 * 4;
  const auto copy_tokens = [&](int step) {
    if (step < steps && (kTokens >= kRoundTokens || token < kTokens)) {
#pragma unroll
      for (int i = 0; i < kTokens; i += kRoundTokens)
        copy_async(&tokens[step % 2][token + i][chunk],
                   x_block + (size_t)i * K + step / 2 * kTileColumns + step % 2 * (kTileColumns / 4) + source,
                   part.first_token + token + i < M);
    }
    copy_commit();
  };
  const int word = threadIdx.x % 8, tile_row = threadIdx.x / 8, row = tile_row * kTileRows + word % kTileRows;
  const int tile = min(tile_row, (N - part.first_row) / kTileRows - 1) * (K / kTileColumns) * kTileBytes;
  uint32_t nibbles;
  uint16_t scale_bits;  // converted in store_row: here it would have to be waited for
  const auto load_row = [&](int step) {
    step = min(step, steps - 1);
    const uint8_t *at = w_block + step / 2 * kTileBytes + tile;
    nibbles = *reinterpret_cast<const uint32_t *>(at + kTileHead + 4 * (step % 2 * 8 + word));
    scale_bits = *reinterpret_cast<const uint16_t *>(at + word % kTileRows * 2);
  };
  const auto store_row = [&](int step) {
    const float scale = half_to_float(scale_bits);
    const auto weight = [&](int bit) { return __int2float_rn(int(nibbles << (28 - bit)) >> 28) * scale; };  // exact
    float4 *at = &rows[step % 2][row][word / kTileRows];
    at[0] = make_float4(weight(0), weight(8), weight(16), weight(24));
    at[2] = make_float4(weight(4), weight(12), weight(20), weight(28));
  };

  copy_tokens(0);
  load_row(0);
  store_row(0);
  float sum[kM][kN] = {};
  for (int step = 0; step < steps; ++step) {
    copy_wait<0>();
    __syncthreads();  // this step is in shared memory, and nobody reads the one before any more
    copy_tokens(step + 1);
    load_row(step + 1);
#pragma unroll 1  // more of it at once takes more registers than two blocks a multiprocessor leave
    for (int chunk = 0; chunk < kChunks; ++chunk) {
      float4 b[kN];
#pragma unroll
      for (int j = 0; j < kN; ++j) b[j] = rows[step % 2][place.row + 8 * j][chunk];
#pragma unroll
      for (int i = 0; i < kM; ++i) {
        const float4 a = tokens[step % 2][place.token + 4 * i][chunk];
#pragma unroll
        for (int j = 0; j < kN; ++j) sum[i][j] = fmaf(a.x, b[j].x, sum[i][j]);
#pragma unroll
        for (int j = 0; j < kN; ++j) sum[i][j] = fmaf(a.y, b[j].y, sum[i][j]);
#pragma unroll
        for (int j = 0; j < kN; ++j) sum[i][j] = fmaf(a.z, b[j].z, sum[i][j]);
#pragma unroll
        for (int j = 0; j < kN; ++j) sum[i][j] = fmaf(a.w, b[j].w, sum[i][j]);
      }
    }
    store_row(step + 1);
    if ((step + 1) % kStepsOfSum == 0 || step + 1 == steps) add_sums(sum, part, place, M, N, step < kStepsOfSum);
  }
}
GPU_KERNEL(prefill_tiled_fp32)
