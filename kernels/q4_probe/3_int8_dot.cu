// 3. Four MACs an instruction (the article's V5, dp4a).
//
// Activations come as int8 codes with a scale for each row and 32 columns, made beforehand: that rounding is what this
// design pays. Weights become int8 here, four at a time. The sum over a lane's 8 columns is an exact integer; a
// conversion, a product of scales and a fused multiply-add take it in: five instructions for 8 MACs.
#include "probe.h"

// Four nibbles, one a byte, each a code in two's complement -> the codes as int8. With its top bit flipped a nibble is
// code + 8; adding 0x78 makes code + 0x80, at most 0x87, so that no byte carries into the next; flipping 0x80 takes it
// off again.
__device__ __forceinline__ int codes_of(uint32_t nibbles) {
  return int(((nibbles ^ 0x08080808u) + 0x78787878u) ^ 0x80808080u);
}

extern "C" __global__ void __launch_bounds__(kBlock)
q4_int8_dot(const uint8_t *__restrict__ w, const int8_t *__restrict__ x, const float *__restrict__ x_scales,
            float *__restrict__ out, int N, int K) {
  const size_t row = first_row();
  if (row >= N) return;

  float sum[BATCH][WAVE_ROWS] = {};
  for (int tile = first_tile(); tile < K / kTileColumns; tile += tile_step()) {
    const Quarter mine = load_quarter(w, row, tile, K);
    int low[WAVE_ROWS], high[WAVE_ROWS];
#pragma unroll
    for (int r = 0; r < WAVE_ROWS; ++r) {
      low[r] = codes_of(mine.word[r] & 0x0f0f0f0fu);
      high[r] = codes_of(mine.word[r] >> 4 & 0x0f0f0f0fu);
    }
#pragma unroll
    for (int m = 0; m < BATCH; ++m) {
      const int8_t *at = x + (size_t)m * K + first_column(tile);
      const int a_low = *reinterpret_cast<const int *>(at);
      const int a_high = *reinterpret_cast<const int *>(at + kTileColumns / 2);
      const float a_scale = x_scales[(size_t)m * (K / kTileColumns) + tile];
#pragma unroll
      for (int r = 0; r < WAVE_ROWS; ++r) {
        const int dot = __dp4a(high[r], a_high, __dp4a(low[r], a_low, 0));
        sum[m][r] = fmaf(__int2float_rn(dot), __fmul_rn(mine.scale[r], a_scale), sum[m][r]);
      }
    }
  }
  store_sums(sum, out, row, N);
}
GPU_KERNEL(q4_int8_dot)
