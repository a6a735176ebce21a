// What the kernels between two projections share: four neighbouring numbers a lane, and the form in which the next
// projection takes its activations. A kernel is compiled for one form, by OUT:
//
//   Float32   as they are
//   Bf16      rounded to bf16
//   Int8      codes -127..127 and a float32 scale for each 32 columns, scale = max |x| / 127, code = x / scale rounded
//             half to even: by the IEEE divisions of formats.quantize_activations, so to the same bits
//
// To quantize on the way out costs a shuffle; as a kernel of its own it reads and writes every activation once more.
// store() is called by whole waves, lane l owning columns 4 l ..: 8 neighbouring lanes have the 32 of a scale.
#pragma once
#include "gpu.h"

__device__ __forceinline__ float4 load4(const float *x) { return *reinterpret_cast<const float4 *>(x); }
__device__ __forceinline__ void store4(float *x, float4 y) { *reinterpret_cast<float4 *>(x) = y; }
__device__ __forceinline__ float dot4(float4 x, float4 y) { return x.x * y.x + x.y * y.y + x.z * y.z + x.w * y.w; }
__device__ __forceinline__ float4 multiplied(float4 x, float4 y) {
  return make_float4(x.x * y.x, x.y * y.y, x.z * y.z, x.w * y.w);
}
__device__ __forceinline__ float4 scaled(float4 x, float by) { return multiplied(x, make_float4(by, by, by, by)); }
__device__ __forceinline__ float sigmoid(float x) { return 1.f / (1.f + expf(-x)); }
__device__ __forceinline__ float4 sigmoid(float4 x) {
  return make_float4(sigmoid(x.x), sigmoid(x.y), sigmoid(x.z), sigmoid(x.w));
}
__device__ __forceinline__ float4 silu(float4 x) { return multiplied(x, sigmoid(x)); }

// Over 32 lanes, of a wave of 32 or 64.
__device__ __forceinline__ float sum_of_32(float x) {
#pragma unroll
  for (int flip = 16; flip > 0; flip /= 2) x += __shfl_xor_sync(GPU_FULL_MASK, x, flip);
  return x;
}

struct Float32 {
  typedef float Number;
  __device__ static __forceinline__ float4 load(const float *x) { return load4(x); }
  __device__ static __forceinline__ void store(float *out, float *, size_t place, float4 y, bool is_there) {
    if (is_there) store4(out + place, y);
  }
};

struct Bf16 {
  typedef uint16_t Number;
  __device__ static __forceinline__ float4 load(const uint16_t *x) {
    const ushort4 y = *reinterpret_cast<const ushort4 *>(x);
    return make_float4(bf16_to_float(y.x), bf16_to_float(y.y), bf16_to_float(y.z), bf16_to_float(y.w));
  }
  __device__ static __forceinline__ void store(uint16_t *out, float *, size_t place, float4 y, bool is_there) {
    if (is_there) *reinterpret_cast<uint2 *>(out + place) = make_uint2(bf16_pair(y.x, y.y), bf16_pair(y.z, y.w));
  }
};

struct Int8 {
  typedef int8_t Number;
  __device__ static __forceinline__ void store(int8_t *out, float *scales, size_t place, float4 y, bool is_there) {
    // Floats without a sign are in the order of their bits, infinity above them and NaN on top. fmaxf would drop a NaN.
    unsigned top = max(max(__float_as_uint(fabsf(y.x)), __float_as_uint(fabsf(y.y))),
                       max(__float_as_uint(fabsf(y.z)), __float_as_uint(fabsf(y.w))));
#pragma unroll
    for (int flip = 4; flip > 0; flip /= 2) top = max(top, __shfl_xor_sync(GPU_FULL_MASK, top, flip));
    const float scale = __uint_as_float(top) / 127.f;
    const bool usable = scale > 0.f && top < 0x7f800000u;  // neither zero, nor with an infinity or a NaN among them
    const auto code = [&](float x) {  // a subnormal scale may be so far from max / 127 that a quotient passes 127
      return (signed char)(usable ? rintf(fminf(fmaxf(x / scale, -127.f), 127.f)) : 0.f);
    };
    if (!is_there) return;
    *reinterpret_cast<char4 *>(out + place) = make_char4(code(y.x), code(y.y), code(y.z), code(y.w));
    if (place % 32 == 0) scales[place / 32] = scale;
  }
};
