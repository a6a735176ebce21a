// 1. The producer: new tokens' K and V become codes and scales in the pages of the INT8 KV cache.
//
//   scale = max |x| / 127 over the vector of one token and KV head;  code = round(x / scale), half to even
//
// A wave owns one token of one KV head, K and V: the maximum is a butterfly over lanes, nothing is shared and nobody
// waits. Both divisions are IEEE divisions of floats, not products with a reciprocal, which rounds differently, so that
// NumPy gives the same bits. K goes to [block][kv_head][offset][d], a wave writing neighbouring bytes. V goes to
// [block][kv_head][d][offset], as the attention kernels load 16 tokens of one d at once: here that costs a byte for
// each d in a line of its own, once for each token, where every later step reads it.
//
//   HEAD_DIM   values of a vector, a multiple of 32
#include "gpu.h"

constexpr int kWaves = 4;  // of a block, each on its own
constexpr int kNarrowestWave = 32;
constexpr int kValues = HEAD_DIM / kNarrowestWave;  // at most, in each lane

// Writes the codes of x at codes[d * stride]; every lane returns the scale.
__device__ __forceinline__ float quantize(const float *x, int8_t *codes, int stride) {
  float value[kValues];
  // Floats without a sign are in the order of their bits, infinity above them and NaN on top. fmaxf would drop a NaN.
  unsigned top = 0;
#pragma unroll
  for (int i = 0; i < kValues; ++i) {
    const int d = threadIdx.x + i * warpSize;
    value[i] = d < HEAD_DIM ? x[d] : 0.f;
    top = max(top, __float_as_uint(fabsf(value[i])));
  }
  for (int flip = warpSize / 2; flip > 0; flip /= 2) top = max(top, __shfl_xor_sync(GPU_FULL_MASK, top, flip));

  const float scale = __uint_as_float(top) / 127.f;
  const bool usable = scale > 0.f && top < 0x7f800000u;  // neither zero, nor with an infinity or a NaN in the vector
#pragma unroll
  for (int i = 0; i < kValues; ++i) {
    const int d = threadIdx.x + i * warpSize;
    // A subnormal scale may be so far from max / 127 that a quotient passes 127.
    const float code = usable ? rintf(fminf(fmaxf(value[i] / scale, -127.f), 127.f)) : 0.f;
    if (d < HEAD_DIM) codes[(size_t)d * stride] = (int8_t)code;
  }
  return scale;
}

// k, v [tokens][kv_heads][HEAD_DIM]; slots [tokens][2], the page and the offset in it. Block: warpSize x kWaves.
extern "C" __global__ void __launch_bounds__(64 * kWaves)
quantize_kv(const float *__restrict__ k, const float *__restrict__ v, const int *__restrict__ slots,
            int8_t *__restrict__ k_codes, float *__restrict__ k_scales, int8_t *__restrict__ v_codes,
            float *__restrict__ v_scales, int tokens, int kv_heads, int block_size) {
  const size_t vector = (size_t)blockIdx.x * kWaves + threadIdx.y;  // the same for a whole wave
  if (vector >= (size_t)tokens * kv_heads) return;
  const size_t token = vector / kv_heads, head = vector % kv_heads;
  const int offset = slots[2 * token + 1];
  const size_t row = (size_t)slots[2 * token] * kv_heads + head;  // of one head in one page

  const float k_scale = quantize(k + vector * HEAD_DIM, k_codes + (row * block_size + offset) * HEAD_DIM, 1);
  const float v_scale = quantize(v + vector * HEAD_DIM, v_codes + row * HEAD_DIM * block_size + offset, block_size);
  if (threadIdx.x == 0) {
    k_scales[row * block_size + offset] = k_scale;
    v_scales[row * block_size + offset] = v_scale;
  }
}
GPU_KERNEL(quantize_kv)
