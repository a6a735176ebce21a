// 3. From the projections q, k, v to what attention reads: q and k normed head by head and turned by their position, k
// and v at their place in the cache, all in one pass and in the number format of attention.
//
// 32 lanes own a head of a token, 4 neighbouring numbers a lane in each 128. The mean square is a butterfly over them.
// Of the first ROTARY numbers of a head, i and i + ROTARY / 2 are a pair that turns by position * base^(-2 i / ROTARY):
// the other one of a pair is a shuffle away. Cosines and sines come from a table made in float64, since an angle of
// thousands has no digits left for a float to turn by. (The model splits pairs into sections for time, height and width
// of images; for text the three positions are one, and sections change nothing.)
//
//   HEAD_DIM   numbers of a head, a multiple of 128
//   ROTARY     numbers of a head that turn: 8, 16, 32, 64 or 128
//   OUT        Float32 or Bf16
#include "activations.h"

constexpr int kThreads = 256;
constexpr int kHeadsOfBlock = kThreads / 32;
constexpr int kRuns = HEAD_DIM / 128;
constexpr int kHalf = ROTARY / 2;
constexpr float kEpsilon = 1e-6f;
static_assert(HEAD_DIM % 128 == 0 && 128 % ROTARY == 0 && ROTARY >= 8, "a pair's lanes differ in one bit");

// Rows of tokens, q_stride, k_stride, v_stride numbers apart: q [heads][2][HEAD_DIM], each head's query before its
// gate, which 4_attention_gate.cu reads; k, v [kv_heads][HEAD_DIM]. q_norm, k_norm [HEAD_DIM].
// turns [tokens][2][ROTARY / 2]: cosines, then sines, of the tokens' positions.
// q_out [tokens][heads][HEAD_DIM]; k_out, v_out [tokens][kv_heads][HEAD_DIM].
// Grid: tokens x ceil((heads + 2 kv_heads) / 8).
extern "C" __global__ void __launch_bounds__(kThreads)
rotary_heads(const float *__restrict__ q, const float *__restrict__ k, const float *__restrict__ v,
             const float *__restrict__ q_norm, const float *__restrict__ k_norm, const float *__restrict__ turns,
             OUT::Number *__restrict__ q_out, OUT::Number *__restrict__ k_out, OUT::Number *__restrict__ v_out,
             int heads, int kv_heads, int64_t q_stride, int64_t k_stride, int64_t v_stride) {
  const int all = heads + 2 * kv_heads, lane = threadIdx.x % 32;
  const int own = blockIdx.y * kHeadsOfBlock + threadIdx.x / 32;
  const bool is_there = own < all;
  const int64_t token = blockIdx.x;
  int head = is_there ? own : 0;  // whole waves shuffle

  const bool is_q = head < heads, is_k = !is_q && head < heads + kv_heads;
  if (!is_q) head -= is_k ? heads : heads + kv_heads;
  const float *x = is_q ? q + token * q_stride + head * 2 * HEAD_DIM
                        : (is_k ? k + token * k_stride : v + token * v_stride) + head * HEAD_DIM;
  OUT::Number *out = is_q ? q_out + (token * heads + head) * HEAD_DIM
                          : (is_k ? k_out : v_out) + (token * kv_heads + head) * HEAD_DIM;
  float4 y[kRuns];
  float squares = 0.f;
#pragma unroll
  for (int i = 0; i < kRuns; ++i) {
    y[i] = load4(x + 128 * i + 4 * lane);
    squares += dot4(y[i], y[i]);
  }
  const float scale = 1.f / sqrtf(sum_of_32(squares) / HEAD_DIM + kEpsilon);
  if (is_q || is_k) {
#pragma unroll
    for (int i = 0; i < kRuns; ++i)
      y[i] = multiplied(scaled(y[i], scale), load4((is_q ? q_norm : k_norm) + 128 * i + 4 * lane));
  }
  const auto other = [](float x) { return __shfl_xor_sync(GPU_FULL_MASK, x, kHalf / 4); };
  const float4 pair = make_float4(other(y[0].x), other(y[0].y), other(y[0].z), other(y[0].w));
  if ((is_q || is_k) && 4 * lane < ROTARY) {
    const float *turn = turns + token * ROTARY + 4 * lane % kHalf;
    const float4 cosine = load4(turn), sine = scaled(load4(turn + kHalf), 4 * lane < kHalf ? -1.f : 1.f);
    const float4 from = multiplied(pair, sine);
    y[0] = make_float4(fmaf(y[0].x, cosine.x, from.x), fmaf(y[0].y, cosine.y, from.y),
                       fmaf(y[0].z, cosine.z, from.z), fmaf(y[0].w, cosine.w, from.w));
  }
#pragma unroll
  for (int i = 0; i < kRuns; ++i) OUT::store(out, nullptr, 128 * i + 4 * lane, y[i], is_there);
}
GPU_KERNEL(rotary_heads)
