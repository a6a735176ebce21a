// What the kernels around the recurrence share: 32 lanes own the 128 numbers of a head, 4 neighbours each.
#pragma once
#include "gpu.h"

constexpr int kHeadDim = 128;
constexpr int kHeadLanes = kHeadDim / 4;
constexpr int kTaps = 4;
constexpr float kQueryScale = 0.08838834764831845f;  // 128^-0.5

__device__ __forceinline__ float4 load4(const float *x) { return *reinterpret_cast<const float4 *>(x); }
__device__ __forceinline__ void store4(float *x, float4 y) { *reinterpret_cast<float4 *>(x) = y; }
__device__ __forceinline__ float4 scaled(float4 x, float by) {
  return make_float4(x.x * by, x.y * by, x.z * by, x.w * by);
}
__device__ __forceinline__ float sigmoid(float x) { return 1.f / (1.f + expf(-x)); }
__device__ __forceinline__ float silu(float x) { return x * sigmoid(x); }
__device__ __forceinline__ float convolve(float4 taps, float oldest, float older, float old, float now) {
  return fmaf(taps.w, now, fmaf(taps.z, old, fmaf(taps.y, older, taps.x * oldest)));
}
__device__ __forceinline__ float sum_of_head(float x) {
#pragma unroll
  for (int flip = kHeadLanes / 2; flip > 0; flip /= 2) x += __shfl_xor_sync(GPU_FULL_MASK, x, flip);
  return x;
}
