// Codes of a q4 tile become bf16 weights in registers, two at a time, rounded once: the very bits of bf16(code * scale).
//
// A code meets the bits of 128 as bf16, whose last place is worth 1: xor with 0x4308 makes 136 + code of a nibble in two's
// complement. Taking 136 off is exact. A scale is f16, 11 bits, and as two bf16 it is exact as well: its own 8 bits, and
// 3 that these leave. Code times the rest fits bf16, so that adding code times the leading part is all that rounds.
// Where there is no packed bf16 arithmetic the exact product of floats is rounded.
#pragma once
#include "gpu.h"

constexpr int kTileRows = 4, kTileColumns = 32, kTileBytes = 72;
constexpr int kWordsAt = 2 * kTileRows, kQuarterBytes = 4 * kTileRows;  // in a tile: word 4 * quarter + row

#if GPU_CUDA
__device__ __forceinline__ uint32_t bf16_fma(uint32_t a, uint32_t b, uint32_t c) {
  uint32_t d;
  asm("fma.rn.bf16x2 %0, %1, %2, %3;" : "=r"(d) : "r"(a), "r"(b), "r"(c));
  return d;
}
// (a & b) ^ c, in one instruction
__device__ __forceinline__ uint32_t and_xor(uint32_t a, uint32_t b, uint32_t c) {
  uint32_t d;
  asm("lop3.b32 %0, %1, %2, %3, 0x6a;" : "=r"(d) : "r"(a), "r"(b), "r"(c));
  return d;
}
struct Scale { uint32_t leading, rest; };  // each twice
__device__ __forceinline__ Scale scale_of(uint16_t half) {
  const float scale = half_to_float(half);
  const uint32_t leading = bf16_pair(scale, scale);
  const float rest = scale - __uint_as_float(leading & 0xffff0000u);
  return {leading, bf16_pair(rest, rest)};
}
#else
struct Scale { float value; };
__device__ __forceinline__ Scale scale_of(uint16_t half) { return {half_to_float(half)}; }
#endif

// Two weights, the first in the low half. Their codes are the low nibbles of the two halves of `nibbles`; other bits
// may be anything.
__device__ __forceinline__ uint32_t weight_pair(uint32_t nibbles, Scale scale) {
#if GPU_CUDA
  constexpr uint32_t kOne = 0x3f803f80u, kMinus136 = 0xc308c308u, kMinusZero = 0x80008000u;
  const uint32_t codes = bf16_fma(and_xor(nibbles, 0x000f000fu, 0x43084308u), kOne, kMinus136);
  return bf16_fma(codes, scale.leading, bf16_fma(codes, scale.rest, kMinusZero));
#else
  const int first = int(nibbles << 28) >> 28, second = int(nibbles << 12) >> 28;
  return bf16_pair(float(first) * scale.value, float(second) * scale.value);
#endif
}
