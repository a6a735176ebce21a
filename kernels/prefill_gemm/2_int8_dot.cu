// 2. Candidate B: four MACs an instruction, on activations that 6_quantize_activations.cu made int8 beforehand.
//
// The tiling is that of kernel 1, in steps of one group of 32 k, which is 32 bytes in a row of x or w: eight dot
// products for the integer sum of a group, then two multiply-adds take it in. Those two are what a group of 32 costs:
// 10 instructions for 32 MACs instead of 8. A thread keeps the group of its rows of w in registers, and their number is
// what makes the block 64 rows wide and not 128. Shared rows of 32 + 16 bytes put 8 neighbouring rows into different
// banks.
#include "int8.h"

constexpr int kRows = 64, kN = kRows / 16;
constexpr int kChunks = kTileColumns / 16, kStride = kChunks + 1;  // in 16 bytes

extern "C" __global__ void __launch_bounds__(kThreads, 2)
prefill_int8_dot(const uint8_t *__restrict__ w, const int8_t *__restrict__ x, const float *__restrict__ x_scales,
                 float *__restrict__ out, int M, int N, int K) {
  __shared__ int4 tokens[2][kTokens][kStride], rows[2][kRows][kStride];
  __shared__ float token_scales[2][kTokens], row_scales[2][kRows];
  const Part part = part_of_block<kRows>(out, M, N, K);
  const Place place = place_of_thread<kRows>();

  // This thread's part of a group's copies: 16 bytes of x, a word of w and its row's scale, a scale of x. All are
  // offsets from where the block's first row and group begin. What lies beyond the last row of w or x is taken from the
  // last, and never stored; nor is what is loaded behind the last group.
  const int8_t *x_block = tokens_of_block(x, part, K, kTileColumns);
  const float *x_scales_block = tokens_of_block(x_scales, part, K, 1);
  const uint8_t *w_block = weights_of_block(w, part, K);
  const int all_groups = K / kTileColumns;

  const int token = threadIdx.x / kChunks, chunk = threadIdx.x % kChunks, source = token * K + chunk * 16;
  const auto copy_tokens = [&](int group) {
    if (group < part.groups && token < kTokens)
      copy_async(&tokens[group % 2][token][chunk], x_block + group * kTileColumns + source,
                 part.first_token + token < M);
    copy_commit();
  };
  const int word = threadIdx.x % 16, quarter = word / kTileRows;
  const int tile_row = threadIdx.x / 16, row = tile_row * kTileRows + word % kTileRows;
  const int tile = min(tile_row, (N - part.first_row) / kTileRows - 1) * all_groups * kTileBytes;
  const int token_scale_at = min((int)threadIdx.x, M - part.first_token - 1) * all_groups;
  uint32_t nibbles;
  uint16_t row_scale;  // converted in store: here it would have to be waited for
  float token_scale;
  const auto load = [&](int group) {
    group = min(group, part.groups - 1);
    const uint8_t *at = w_block + group * kTileBytes + tile;
    nibbles = *reinterpret_cast<const uint32_t *>(at + kTileHead + 4 * word);
    row_scale = *reinterpret_cast<const uint16_t *>(at + word % kTileRows * 2);
    token_scale = (x_scales_block + group)[token_scale_at];
  };
  const auto store = [&](int group) {
    uint32_t *at = reinterpret_cast<uint32_t *>(rows[group % 2][row]) + quarter;
    at[0] = low_codes(nibbles), at[4] = high_codes(nibbles);
    if (quarter == 0) row_scales[group % 2][row] = scale_of_codes(row_scale);
    if (threadIdx.x < kTokens) token_scales[group % 2][threadIdx.x] = token_scale;
  };

  copy_tokens(0);
  load(0);
  store(0);
  float sum[kM][kN] = {};
  for (int group = 0; group < part.groups; ++group) {
    const int stage = group % 2;
    copy_wait<0>();
    __syncthreads();  // this group is in shared memory, and nobody reads the one before any more
    copy_tokens(group + 1);
    load(group + 1);
    int4 b[kN][kChunks];
    RowScale b_scale[kN];
#pragma unroll
    for (int j = 0; j < kN; ++j) {
#pragma unroll
      for (int c = 0; c < kChunks; ++c) b[j][c] = rows[stage][place.row + 8 * j][c];
      b_scale[j] = RowScale(row_scales[stage][place.row + 8 * j]);
    }
#pragma unroll
    for (int i = 0; i < kM; ++i) {
      int dot[kN];
#pragma unroll
      for (int j = 0; j < kN; ++j) dot[j] = kStartBits;
#pragma unroll
      for (int c = 0; c < kChunks; ++c) {
        const int4 a = tokens[stage][place.token + 4 * i][c];
#pragma unroll
        for (int j = 0; j < kN; ++j)
          dot[j] = __dp4a(a.w, b[j][c].w,
                          __dp4a(a.z, b[j][c].z, __dp4a(a.y, b[j][c].y, __dp4a(a.x, b[j][c].x, dot[j]))));
      }
      const float a_scale = token_scales[stage][place.token + 4 * i];
#pragma unroll
      for (int j = 0; j < kN; ++j) sum[i][j] = fmaf(b_scale[j].times(dot[j]), a_scale, sum[i][j]);
    }
    store(group + 1);
  }
  add_sums(sum, part, place, M, N, true);
}
GPU_KERNEL(prefill_int8_dot)
