// 2. One fused multiply-add a MAC (the article's V4).
//
// The weights of a tile are unpacked ahead, once for all rows of x, and stay in registers; products are not rounded.
#include "probe.h"

extern "C" __global__ void __launch_bounds__(kBlock)
q4_explicit_fma(const uint8_t *__restrict__ w, const float *__restrict__ x, float *__restrict__ out, int N, int K) {
  const size_t row = first_row();
  if (row >= N) return;

  float sum[BATCH][WAVE_ROWS] = {};
  for (int tile = first_tile(); tile < K / kTileColumns; tile += tile_step()) {
    const Quarter mine = load_quarter(w, row, tile, K);
    float weights[WAVE_ROWS][8];
#pragma unroll
    for (int r = 0; r < WAVE_ROWS; ++r) {
#pragma unroll
      for (int i = 0; i < 8; ++i) weights[r][i] = weight(mine.word[r], mine.scale[r], i);
    }
#pragma unroll
    for (int m = 0; m < BATCH; ++m) {
      const Activations a = load_activations(x, m, first_column(tile), K);
#pragma unroll
      for (int r = 0; r < WAVE_ROWS; ++r) {
        float low = 0.f, high = 0.f;
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          low = fmaf(weights[r][i], a.value[i], low);
          high = fmaf(weights[r][4 + i], a.value[4 + i], high);
        }
        sum[m][r] = __fadd_rn(sum[m][r], __fadd_rn(low, high));
      }
    }
  }
  store_sums(sum, out, row, N);
}
GPU_KERNEL(q4_explicit_fma)
