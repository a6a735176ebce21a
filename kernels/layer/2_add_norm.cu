// 2. The residual addition and the norm after it, in one pass: stream + delta, and its RMSNorm for the next projection.
//
// A block owns a token and keeps its row in registers between the mean square and the product, so that the stream is
// read and written once. It stays float32 whatever the projections take: 128 additions of a pass round it 128 times.
//
// Floor: stream and delta read, stream and out written: 80 KiB a token of Qwen3.5-27B in float32, 10 us at 512 tokens
// and 4.2 TB/s.
//
//   COLUMNS   of a row, a multiple of 32
//   OUT       Float32, Bf16 or Int8
#include "activations.h"

constexpr int kThreads = 256;
constexpr int kRounds = (COLUMNS / 4 + kThreads - 1) / kThreads;
constexpr float kEpsilon = 1e-6f;

// stream, delta, sum, out [tokens][COLUMNS]; sum may be stream; a null delta adds nothing, and then nothing is written
// to sum. weight [COLUMNS]; scales [tokens][COLUMNS / 32]. Grid: tokens.
extern "C" __global__ void __launch_bounds__(kThreads)
add_norm(const float *stream, const float *__restrict__ delta, float *sum, const float *__restrict__ weight,
         OUT::Number *__restrict__ out, float *__restrict__ scales) {
  __shared__ float partial[kThreads / 32];
  const size_t row = (size_t)blockIdx.x * COLUMNS;
  float4 x[kRounds];
  float squares = 0.f;
#pragma unroll
  for (int i = 0; i < kRounds; ++i) {
    const int column = 4 * (i * kThreads + threadIdx.x);
    x[i] = make_float4(0.f, 0.f, 0.f, 0.f);
    if (column < COLUMNS) {
      x[i] = load4(stream + row + column);
      if (delta) {
        const float4 y = load4(delta + row + column);
        x[i] = make_float4(x[i].x + y.x, x[i].y + y.y, x[i].z + y.z, x[i].w + y.w);
        store4(sum + row + column, x[i]);
      }
    }
    squares += dot4(x[i], x[i]);
  }
  squares = sum_of_32(squares);
  if (threadIdx.x % 32 == 0) partial[threadIdx.x / 32] = squares;
  __syncthreads();
  squares = 0.f;
#pragma unroll
  for (int i = 0; i < kThreads / 32; ++i) squares += partial[i];
  const float scale = 1.f / sqrtf(squares / COLUMNS + kEpsilon);
#pragma unroll
  for (int i = 0; i < kRounds; ++i) {
    const int column = 4 * (i * kThreads + threadIdx.x);
    const bool is_there = column < COLUMNS;
    const float4 own = is_there ? load4(weight + column) : make_float4(0.f, 0.f, 0.f, 0.f);
    OUT::store(out, scales, row + column, multiplied(scaled(x[i], scale), own), is_there);
  }
}
GPU_KERNEL(add_norm)
