// What both designs on int8 activations share: weights as int8, and integer sums as floats.
//
//   out[m][n] = sum over groups g of  x_scale[m][g] * (w_scale[n][g] * (sum over k in g of  x[m][k] * w[n][k]))
//
// A nibble in the upper half of a byte is 16 times its code, whatever its sign: three instructions for 8 weights, and
// the 16 is taken off the scale, which costs a float nothing. The sum of a group is at most 32 * 128 * 128 = 2^19.
#pragma once
#include "tiles.h"

constexpr int kCodeFactor = 16;
__device__ __forceinline__ uint32_t low_codes(uint32_t word) { return word << 4 & 0xf0f0f0f0u; }
__device__ __forceinline__ uint32_t high_codes(uint32_t word) { return word & 0xf0f0f0f0u; }

// A sum that begins at the bits of 1.5 * 2^23 is, read as a float, that number plus the integer, below 2^22 as it is.
// One multiply-add takes the number off and scales: a weight's scale, an f16, has 11 bits, so that 1.5 * 2^23 times it
// is a float too, exactly, and the result is the product of sum and scale, rounded once.
constexpr int kStartBits = 0x4b400000;
constexpr float kStart = 12582912.f;
struct RowScale {
  float scale = 0.f, start = 0.f;
  RowScale() = default;
  __device__ __forceinline__ explicit RowScale(float scale) : scale(scale), start(-kStart * scale) {}
  __device__ __forceinline__ float times(int sum) const { return fmaf(__int_as_float(sum), scale, start); }
};
__device__ __forceinline__ float scale_of_codes(uint16_t half) { return half_to_float(half) * (1.f / kCodeFactor); }
