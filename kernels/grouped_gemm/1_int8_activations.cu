// 1. Int8 weights times int8 activations (the article's first generation).
//
//   out[m][n] = sum over groups g of  a_scale[m][g] * w_scale[g][n] * (sum over k in g of  a[m][k] * w[k][n])
//
// A thread owns 4 neighbouring columns of one row and sweeps K. Weights lie as [K][Npad], so the 32 lanes of a warp
// read 128 contiguous bytes at each k; the activation is the same for the whole warp, one broadcast. The inner sum is
// exact in int32 (|sum| <= GROUP * 128 * 128, so a group may have 131071 codes) and is finished before a scale touches
// it: cutting K at group boundaries (blockIdx.z) therefore changes no integer, only the order of the float additions
// that follow.
//
//   GROUP        codes that share a scale
//   CARRY        1: the sum over groups carries its rounding errors along
//   GROUP_SUMS   1: also write each group's integer sum to sums[M][groups][N], to look at that partition
#include "split.h"

extern "C" __global__ void __launch_bounds__(kThreadsN *kThreadsM)
grouped_gemm_int8(const int8_t *__restrict__ a, const float *__restrict__ a_scales, const int8_t *__restrict__ w,
                  const float *__restrict__ w_scales, float *__restrict__ out, int M, int N, int Npad, int K,
                  int nsplit, int first_slice
#if GROUP_SUMS
                  , int *__restrict__ sums
#endif
) {
  const int n = (blockIdx.x * kThreadsN + threadIdx.x) * kColumns;
  const int m = blockIdx.y * kThreadsM + threadIdx.y;
  const int z = first_slice + blockIdx.z;
  if (n >= N || m >= M) return;

  const int groups = K / GROUP;
  const Slice slice = slice_of(groups, nsplit, z);
  Sum c[kColumns];
  for (int g = slice.begin; g < slice.end; ++g) {
    const int8_t *wg = w + (size_t)g * GROUP * Npad + n;
    const int8_t *ag = a + (size_t)m * K + (size_t)g * GROUP;
    int dot[kColumns] = {0, 0, 0, 0};
#pragma unroll
    for (int k = 0; k < GROUP; ++k) {
      const char4 q = *reinterpret_cast<const char4 *>(wg + (size_t)k * Npad);
      const int v = ag[k];
      dot[0] += q.x * v;
      dot[1] += q.y * v;
      dot[2] += q.z * v;
      dot[3] += q.w * v;
    }
    const float as = a_scales[(size_t)m * groups + g];
    const float4 ws = *reinterpret_cast<const float4 *>(w_scales + (size_t)g * Npad + n);
    c[0].add(__fmul_rn(__int2float_rn(dot[0]), __fmul_rn(as, ws.x)));
    c[1].add(__fmul_rn(__int2float_rn(dot[1]), __fmul_rn(as, ws.y)));
    c[2].add(__fmul_rn(__int2float_rn(dot[2]), __fmul_rn(as, ws.z)));
    c[3].add(__fmul_rn(__int2float_rn(dot[3]), __fmul_rn(as, ws.w)));
#if GROUP_SUMS
    for (int j = 0; j < kColumns && n + j < N; ++j) sums[((size_t)m * groups + g) * N + n + j] = dot[j];
#endif
  }
  store_columns(out + ((size_t)z * M + m) * N, n, N, c);
}
GPU_KERNEL(grouped_gemm_int8)
