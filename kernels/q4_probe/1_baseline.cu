// 1. Multiply, then add (the article's baseline, built without contraction).
//
// A MAC is a multiplication and an addition, each rounded, and a weight is made of its nibble where it is used.
// Compilers move that ahead of the rows of x all the same: in machine code, the contraction alone sets kernel 2 apart.
#include "probe.h"

extern "C" __global__ void __launch_bounds__(kBlock)
q4_baseline(const uint8_t *__restrict__ w, const float *__restrict__ x, float *__restrict__ out, int N, int K) {
  const size_t row = first_row();
  if (row >= N) return;

  float sum[BATCH][WAVE_ROWS] = {};
  for (int tile = first_tile(); tile < K / kTileColumns; tile += tile_step()) {
    const Quarter mine = load_quarter(w, row, tile, K);
#pragma unroll
    for (int m = 0; m < BATCH; ++m) {
      const Activations a = load_activations(x, m, first_column(tile), K);
#pragma unroll
      for (int r = 0; r < WAVE_ROWS; ++r) {
        float low = __fmul_rn(weight(mine.word[r], mine.scale[r], 0), a.value[0]);
        float high = __fmul_rn(weight(mine.word[r], mine.scale[r], 4), a.value[4]);
#pragma unroll
        for (int i = 1; i < 4; ++i) {
          low = __fadd_rn(low, __fmul_rn(weight(mine.word[r], mine.scale[r], i), a.value[i]));
          high = __fadd_rn(high, __fmul_rn(weight(mine.word[r], mine.scale[r], 4 + i), a.value[4 + i]));
        }
        sum[m][r] = __fadd_rn(sum[m][r], __fadd_rn(low, high));
      }
    }
  }
  store_sums(sum, out, row, N);
}
GPU_KERNEL(q4_baseline)
