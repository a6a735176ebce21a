// 4. Parts of a row become its attention: each weighs as much of the whole softmax as it holds.
//
//   out = sum of w_p out_p,  w_p = l_p 2^(m_p - m) / sum of the same,  m the largest m_p
//
// HEAD_DIM / 4 threads go through every SLICES-th part of a row in one pass, 16 bytes a thread, relative to the largest
// score so far; what SLICES of them have found is merged in one fixed order, so that a result repeats to the bit. Many
// parts of few rows (decode) want many slices, few parts of many rows (prefill) one.
//
//   HEAD_DIM   values of a row
//   SLICES     that the parts of a row are divided into
#include "gpu.h"

constexpr int kThreads = 256;
constexpr int kQuads = HEAD_DIM / 4;
constexpr int kRows = kThreads / kQuads / SLICES;  // of a block

struct Merged { float top, total; float4 sum; };  // sum: of l 2^(m - top) out

__device__ __forceinline__ void merge(Merged &into, float top, float total, float4 sum, float weight) {
  if (total <= 0.f) return;  // nothing was seen, and sum may be anything
  const float largest = fmaxf(into.top, top), old = fast_exp2(into.top - largest), fresh = fast_exp2(top - largest);
  into.top = largest;
  into.total = into.total * old + total * fresh;
  const float factor = fresh * weight;
  into.sum.x = fmaf(sum.x, factor, into.sum.x * old), into.sum.y = fmaf(sum.y, factor, into.sum.y * old);
  into.sum.z = fmaf(sum.z, factor, into.sum.z * old), into.sum.w = fmaf(sum.w, factor, into.sum.w * old);
}

// parts [rows][partitions][HEAD_DIM], each normalized; stats [rows][partitions]: its largest score m and its sum l of
// powers of 2 relative to it. lengths [batch]: a sequence, of rows_of_sequence rows, has written ceil(length / tokens)
// parts, at least 1; null: all.
extern "C" __global__ void __launch_bounds__(kThreads)
merge_partitions(const float *__restrict__ parts, const float2 *__restrict__ stats, const int *__restrict__ lengths,
                 float *__restrict__ out, int rows, int partitions, int tokens, int rows_of_sequence) {
  __shared__ Merged found[kRows][SLICES][kQuads];
  const int quad = threadIdx.x % kQuads, slice = threadIdx.x / kQuads % SLICES, own = threadIdx.x / kQuads / SLICES;
  const int row = blockIdx.x * kRows + own;
  const bool is_there = own < kRows && row < rows;
  Merged merged = {-3e38f, 0.f, make_float4(0.f, 0.f, 0.f, 0.f)};
  if (is_there) {
    const int count = lengths ? max(1, (lengths[row / rows_of_sequence] + tokens - 1) / tokens) : partitions;
    const float2 *stat = stats + (size_t)row * partitions;
    const float4 *part = reinterpret_cast<const float4 *>(parts + (size_t)row * partitions * HEAD_DIM) + quad;
#pragma unroll 4
    for (int p = slice; p < count; p += SLICES)
      merge(merged, stat[p].x, stat[p].y, part[(size_t)p * kQuads], stat[p].y);
    found[own][slice][quad] = merged;
  }
  __syncthreads();
  if (!is_there || slice > 0) return;
  for (int s = 1; s < SLICES; ++s) {
    const Merged other = found[own][s][quad];
    merge(merged, other.top, other.total, other.sum, 1.f);
  }
  const float factor = merged.total > 0.f ? 1.f / merged.total : 0.f;
  reinterpret_cast<float4 *>(out + (size_t)row * HEAD_DIM)[quad] =
      make_float4(merged.sum.x * factor, merged.sum.y * factor, merged.sum.z * factor, merged.sum.w * factor);
}
GPU_KERNEL(merge_partitions)
