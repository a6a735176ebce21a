// 5. The other road: V of all pages as bf16 in pages of its own, for a P V that knows nothing of codes.
//
// One byte in, two out, and the attention then reads two where it read one: what INT8 saved in memory is spent again.
// A thread takes 16 tokens of one d. Scales that are not finite belong to places nobody has written: they give 0, as the
// weight 0 that such a token gets would not survive a NaN.
#include "gpu.h"

// codes [rows][head_dim][block_size], scales [rows][block_size], rows = blocks * kv_heads; values like codes.
extern "C" __global__ void __launch_bounds__(256)
dequantize_v(const int8_t *__restrict__ codes, const float *__restrict__ scales, uint16_t *__restrict__ values,
             uint64_t runs, int head_dim, int block_size) {
  const uint64_t run = (uint64_t)blockIdx.x * blockDim.x + threadIdx.x;
  if (run >= runs) return;
  const uint64_t first = run * 16, row = first / ((uint64_t)head_dim * block_size);
  const float *scale = scales + row * block_size + first % block_size;
  const uint4 packed = *reinterpret_cast<const uint4 *>(codes + first);
  const uint32_t words[4] = {packed.x, packed.y, packed.z, packed.w};
  uint32_t out[8] = {};
#pragma unroll
  for (int i = 0; i < 16; ++i) {
    const float value = float(int8_t(words[i / 4] >> 8 * (i % 4))) * scale[i];
    const bool is_written = fabsf(scale[i]) < 3.4e38f;
    out[i / 2] |= (is_written ? uint32_t(float_to_bf16(value)) : 0u) << 16 * (i % 2);
  }
  uint4 *target = reinterpret_cast<uint4 *>(values + first);
  target[0] = make_uint4(out[0], out[1], out[2], out[3]);
  target[1] = make_uint4(out[4], out[5], out[6], out[7]);
}
GPU_KERNEL(dequantize_v)
