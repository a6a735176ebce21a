// 6. What follows the gated delta net: out = weight * o / rms(o) * silu(z), each value head on its own, in the form
// that the projection out takes.
//
// gated_delta_net/5_norm_gate.cu with two differences that save passes over memory: z is read where its projection left
// it, beside others, and out needs no rounding by another kernel. 32 lanes own a head of a token, 4 numbers each.
//
//   OUT   Float32, Bf16 or Int8
#include "activations.h"

constexpr int kThreads = 256;
constexpr int kHeadDim = 128;
constexpr float kEpsilon = 1e-6f;

// o, out [tokens][heads][128]; z: rows of heads * 128 numbers, z_stride apart; weight [128]; scales
// [tokens][heads * 4]. Grid: tokens x ceil(heads / 8).
extern "C" __global__ void __launch_bounds__(kThreads)
silu_norm(const float *__restrict__ o, const float *__restrict__ z, const float *__restrict__ weight,
          OUT::Number *__restrict__ out, float *__restrict__ scales, int heads, int64_t z_stride) {
  const int own = 4 * (blockIdx.y * kThreads + threadIdx.x);
  const bool is_there = own < heads * kHeadDim;
  const int column = is_there ? own : 0;  // whole waves shuffle
  const size_t token = blockIdx.x, place = token * heads * kHeadDim + column;
  const float4 x = load4(o + place);
  const float4 gate = load4(z + token * z_stride + column);
  const float scale = 1.f / sqrtf(sum_of_32(dot4(x, x)) / kHeadDim + kEpsilon);
  const float4 y = multiplied(multiplied(scaled(x, scale), load4(weight + column % kHeadDim)), silu(gate));
  OUT::store(out, scales, place, y, is_there);
}
GPU_KERNEL(silu_norm)
