// 4. Attention's output gate: out = attention * sigmoid(gate), in the form that the projection o takes.
//
// The gate is read where q's projection left it, behind the query of each head. A thread owns 4 numbers.
//
//   IN    Float32 or Bf16, what attention gives
//   OUT   Float32, Bf16 or Int8
#include "activations.h"

constexpr int kThreads = 256;

// attention, out [tokens][heads][head_dim]; q: rows of tokens, q_stride numbers apart, [heads][2][head_dim];
// scales [tokens][heads * head_dim / 32]; head_dim a multiple of 32. Grid: tokens x ceil(heads * head_dim / 1024).
extern "C" __global__ void __launch_bounds__(kThreads)
attention_gate(const IN::Number *__restrict__ attention, const float *__restrict__ q, OUT::Number *__restrict__ out,
               float *__restrict__ scales, int heads, int head_dim, int64_t q_stride) {
  const int own = 4 * (blockIdx.y * kThreads + threadIdx.x);
  const bool is_there = own < heads * head_dim;
  const int column = is_there ? own : 0;  // whole waves shuffle
  const size_t token = blockIdx.x, place = token * heads * head_dim + column;
  const int gate_column = column + (column / head_dim + 1) * head_dim;
  const float4 gate = load4(q + token * q_stride + gate_column);
  OUT::store(out, scales, place, multiplied(IN::load(attention + place), sigmoid(gate)), is_there);
}
GPU_KERNEL(attention_gate)
