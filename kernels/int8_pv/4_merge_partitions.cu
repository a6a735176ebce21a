// 4. Partitions of a row become its attention: each weighs as much of the whole softmax as it holds.
//
//   out = sum of w_p out_p,  w_p = l_p 2^(m_p - m) / sum of the same,  m the largest m_p
//
// A block takes one row. Groups of HEAD_DIM / 4 threads take every so many-th partition, 16 bytes a thread, and add up in
// one fixed order, so that a result repeats to the bit.
//
//   HEAD_DIM   values of a row
#include "gpu.h"

constexpr int kThreads = 256;
constexpr int kQuads = HEAD_DIM / 4;
constexpr int kGroups = kThreads / kQuads;
constexpr int kChunk = 1024;  // partitions whose weights are in shared memory at once

// stats [rows][partitions]: the largest score m and the sum l of powers of 2 relative to it. parts [rows][partitions]
// [HEAD_DIM]. lengths [batch]: sequences of rows_of_sequence rows have written ceil(length / tokens) partitions, at least
// 1; null: every row has all of them.
extern "C" __global__ void __launch_bounds__(kThreads)
merge_partitions(const float *__restrict__ parts, const float2 *__restrict__ stats, const int *__restrict__ lengths,
                 float *__restrict__ out, int partitions, int tokens, int rows_of_sequence) {
  __shared__ float4 sums[kGroups][kQuads];
  __shared__ float weights[kChunk], found[kThreads / 32];
  const int thread = threadIdx.x, group = thread / kQuads, quad = thread % kQuads, lane = thread % warpSize;
  const size_t row = blockIdx.x;
  const int count = lengths ? max(1, (lengths[row / rows_of_sequence] + tokens - 1) / tokens) : partitions;
  stats += row * partitions;
  parts += row * partitions * HEAD_DIM;

  // Every thread of the block gets f over what they bring.
  const auto reduce = [&](float value, auto f) {
    for (int flip = warpSize / 2; flip > 0; flip /= 2) value = f(value, __shfl_xor_sync(GPU_FULL_MASK, value, flip));
    if (lane == 0) found[thread / warpSize] = value;
    __syncthreads();
    value = found[0];
    for (int wave = 1; wave < kThreads / warpSize; ++wave) value = f(value, found[wave]);
    __syncthreads();
    return value;
  };
  float top = -1e30f, total = 0.f;
  for (int p = thread; p < count; p += kThreads) top = fmaxf(top, stats[p].x);
  top = reduce(top, [](float a, float b) { return fmaxf(a, b); });
  for (int p = thread; p < count; p += kThreads) total += stats[p].y * fast_exp2(stats[p].x - top);
  total = reduce(total, [](float a, float b) { return a + b; });

  float4 sum = make_float4(0.f, 0.f, 0.f, 0.f);
  for (int first = 0; first < count; first += kChunk) {
    for (int p = thread; p < min(kChunk, count - first); p += kThreads)
      weights[p] = total > 0.f ? stats[first + p].y * fast_exp2(stats[first + p].x - top) / total : 0.f;
    __syncthreads();
#pragma unroll 4
    for (int p = group; p < min(kChunk, count - first); p += kGroups) {
      if (group == kGroups) break;  // threads that are left over
      const float4 part = reinterpret_cast<const float4 *>(parts + (size_t)(first + p) * HEAD_DIM)[quad];
      sum.x = fmaf(weights[p], part.x, sum.x), sum.y = fmaf(weights[p], part.y, sum.y);
      sum.z = fmaf(weights[p], part.z, sum.z), sum.w = fmaf(weights[p], part.w, sum.w);
    }
    __syncthreads();
  }
  if (group < kGroups) sums[group][quad] = sum;
  __syncthreads();
  if (group == 0) {
    for (int g = 1; g < kGroups; ++g)
      sum.x += sums[g][quad].x, sum.y += sums[g][quad].y, sum.z += sums[g][quad].z, sum.w += sums[g][quad].w;
    reinterpret_cast<float4 *>(out + row * HEAD_DIM)[quad] = sum;
  }
}
GPU_KERNEL(merge_partitions)
