// 3. Four MACs an instruction (the article's V5, dp4a).
//
// Activations come as int8 codes with a scale for each row and 32 columns, made beforehand: that rounding is what this
// design pays. Weights stay packed in memory and become int8 here, four at a time. The sum over a lane's 8 columns is an
// exact integer; one conversion and two multiplications scale it.
#include "probe.h"

// Nibbles 0..15 in four bytes, each a code in two's complement -> the codes as int8. No byte borrows from its neighbour:
// flipped, nibbles are code + 8; that and 0x78 is code + 0x80, at most 0x87, and flipping the top bit takes 0x80 off again.
__device__ __forceinline__ int codes_of(uint32_t nibbles) {
  return int(((nibbles ^ 0x08080808u) + 0x78787878u) ^ 0x80808080u);
}

extern "C" __global__ void __launch_bounds__(kWidestWave *kWaves)
q4_int8_dot(const uint8_t *__restrict__ w, const int8_t *__restrict__ x, const float *__restrict__ x_scales,
            float *__restrict__ out, int N, int K) {
  const size_t row = first_row();
  if (row >= N) return;

  float sum[M][ROWS] = {};
  for (int tile = first_tile(); tile < K / kTileColumns; tile += tile_step()) {
    const Quarter mine = load_quarter(w, row, tile, K);
    int low[ROWS], high[ROWS];
#pragma unroll
    for (int r = 0; r < ROWS; ++r) {
      low[r] = codes_of(mine.word[r] & 0x0f0f0f0fu);
      high[r] = codes_of(mine.word[r] >> 4 & 0x0f0f0f0fu);
    }
#pragma unroll
    for (int m = 0; m < M; ++m) {
      const int8_t *at = x + (size_t)m * K + first_column(tile);
      const int a_low = *reinterpret_cast<const int *>(at);
      const int a_high = *reinterpret_cast<const int *>(at + kTileColumns / 2);
      const float a_scale = x_scales[(size_t)m * (K / kTileColumns) + tile];
#pragma unroll
      for (int r = 0; r < ROWS; ++r) {
        const int dot = __dp4a(high[r], a_high, __dp4a(low[r], a_low, 0));
        sum[m][r] = fmaf(__int2float_rn(dot), __fmul_rn(mine.scale[r], a_scale), sum[m][r]);
      }
    }
  }
  store_sums(sum, out, row, N);
}
GPU_KERNEL(q4_int8_dot)
