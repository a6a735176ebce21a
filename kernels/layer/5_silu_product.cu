// 5. The FFN's activation: out = silu(gate) * up, in the form that the projection down takes.
//
// gate and up are read where the projections left them: side by side in one matrix, or in two. They are the widest
// matrices of a layer, and used once: products that can write bf16 halve what they cost. A thread owns 4 numbers.
//
// Floor: gate and up read and out written, 102 KiB a token of Qwen3.5-27B in bf16, 12 us at 512 tokens and 4.2 TB/s;
// twice as much in float32.
//
//   IN    Float32 or Bf16
//   OUT   Float32, Bf16 or Int8
#include "activations.h"

constexpr int kThreads = 256;

// gate, up: rows of `columns` numbers, gate_stride and up_stride apart; out [tokens][columns]; scales
// [tokens][columns / 32]; columns a multiple of 32. Grid: tokens x ceil(columns / 1024).
extern "C" __global__ void __launch_bounds__(kThreads)
silu_product(const IN::Number *__restrict__ gate, const IN::Number *__restrict__ up, OUT::Number *__restrict__ out,
             float *__restrict__ scales, int columns, int64_t gate_stride, int64_t up_stride) {
  const size_t token = blockIdx.x;
  const int own = 4 * (blockIdx.y * kThreads + threadIdx.x);
  const bool is_there = own < columns;
  const int column = is_there ? own : 0;  // whole waves shuffle
  const float4 y = multiplied(silu(IN::load(gate + token * gate_stride + column)),
                              IN::load(up + token * up_stride + column));
  OUT::store(out, scales, token * columns + column, y, is_there);
}
GPU_KERNEL(silu_product)
