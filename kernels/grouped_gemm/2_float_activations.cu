// 2. Int8 weights times float activations (the article's second generation).
//
// The mapping of kernel 1, but an activation stays a float: a code is widened to float and multiplied, so nothing of
// the activation is rounded away. The price is one conversion a code, where kernel 1 has none.
// With one row (decode), threads along m would have no row to work on. REMAP gives them columns instead.
//
//   GROUP   codes that share a scale
//   CARRY   1: the sum over groups carries its rounding errors along
//   REMAP   1: with M = 1 the whole block lies along n;  0: three of four threads leave at once
#include "split.h"

extern "C" __global__ void __launch_bounds__(kThreadsN *kThreadsM)
grouped_gemm_float(const float *__restrict__ a, const int8_t *__restrict__ w, const float *__restrict__ w_scales,
                   float *__restrict__ out, int M, int N, int Npad, int K, int nsplit, int first_slice) {
  int n = (blockIdx.x * kThreadsN + threadIdx.x) * kColumns;
  int m = blockIdx.y * kThreadsM + threadIdx.y;
  if (REMAP && M == 1) {
    n = ((blockIdx.x * kThreadsM + threadIdx.y) * kThreadsN + threadIdx.x) * kColumns;
    m = 0;
  }
  const int z = first_slice + blockIdx.z;
  if (n >= N || m >= M) return;

  const int groups = K / GROUP;
  const Slice slice = slice_of(groups, nsplit, z);
  Sum c[kColumns];
  for (int g = slice.begin; g < slice.end; ++g) {
    const int8_t *wg = w + (size_t)g * GROUP * Npad + n;
    const float *ag = a + (size_t)m * K + (size_t)g * GROUP;
    float dot[kColumns] = {0.f, 0.f, 0.f, 0.f};
#pragma unroll
    for (int k = 0; k < GROUP; ++k) {
      const char4 q = *reinterpret_cast<const char4 *>(wg + (size_t)k * Npad);
      const float v = ag[k];
      dot[0] = fmaf(q.x, v, dot[0]);
      dot[1] = fmaf(q.y, v, dot[1]);
      dot[2] = fmaf(q.z, v, dot[2]);
      dot[3] = fmaf(q.w, v, dot[3]);
    }
    const float4 ws = *reinterpret_cast<const float4 *>(w_scales + (size_t)g * Npad + n);
    c[0].add(__fmul_rn(dot[0], ws.x));
    c[1].add(__fmul_rn(dot[1], ws.y));
    c[2].add(__fmul_rn(dot[2], ws.z));
    c[3].add(__fmul_rn(dot[3], ws.w));
  }
  store_columns(out + ((size_t)z * M + m) * N, n, N, c);
}
GPU_KERNEL(grouped_gemm_float)
