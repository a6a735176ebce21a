// One of everything that gpu.h promises, to be built by every compiler.
#include "gpu.h"

extern "C" __global__ void __launch_bounds__(64) everywhere(const uint64_t *a, const uint64_t *b, const float *x, float *y,
                                                            int *out, int n) {
  __shared__ int tile[64];
  __shared__ uint4 chunks[2][64];
  GPU_DYNAMIC_SHARED(float, dynamic);
  const int t = threadIdx.x;
  int d[4] = {0, 0, 0, 0};
  float f[4] = {0, 0, 0, 0};
#if GPU_CUDA
  const uint32_t four[4] = {(uint32_t)a[0], 1, 2, 3}, two[2] = {(uint32_t)b[0], 7};
  mma_m16n8k32_s8(d, four, two);
  mma_m16n8k32_u8s8(d, four, two);
  mma_m16n8k32_s8u8(d, four, two);
  mma_m16n8k16_bf16(f, four, two);
#elif GPU_HAS_MMAC
  mmac_i32_16x16x32_i8(d, a[t], b[t]);
  mmac_f32_16x16x16_bf16(f, a[t], b[t]);
#elif GPU_HAS_MFMA
  mfma_i32_16x16x32_i8(d, a[t], b[t]);
  mfma_f32_16x16x16_bf16(f, a[t], b[t]);
#endif
  tile[t] = d[0] + (int)f[0];
  dynamic[t] = expf(x[t]) + __expf(x[0]) + exp2f(x[1]) + logf(x[2]) + rsqrtf(x[3]) + fast_exp2(x[4]) + fast_reciprocal(x[5]);
  copy_async(chunks[0] + t, a + 2 * t, t < n);
  copy_commit();
  copy_async(chunks[1] + t, b + 2 * t, true);
  copy_commit();
  copy_wait<1>();
  copy_wait<0>();
  __syncthreads();

  float s = dynamic[(t + 1) % 64] * half_to_float(3) + bf16_to_float(float_to_bf16(x[3])) + float_to_half(x[4]);
  for (int o = warpSize / 2; o; o >>= 1) s += __shfl_xor_sync(GPU_FULL_MASK, s, o);
  s += __shfl_sync(GPU_FULL_MASK, s, 0) + __shfl_down_sync(GPU_FULL_MASK, s, 2, 8) + __shfl_up_sync(GPU_FULL_MASK, s, 1);
  const gpu_mask ballot = __ballot_sync(GPU_FULL_MASK, s > 1);
  int c = __dp4a(tile[0], tile[1], (int)ballot) + min(n, 3) + max(n, 5) + __popcll(ballot);
  c += __float2int_rn(rintf(fmaxf(s, fminf(1.f, 2.f)))) + __any_sync(GPU_FULL_MASK, c) + __all_sync(GPU_FULL_MASK, c);
  const float4 v = *reinterpret_cast<const float4 *>(x);
  const char4 q = __ldg(reinterpret_cast<const char4 *>(a));
  if (t < n) out[blockIdx.x * blockDim.x * gridDim.x + t] = tile[63 - t] + c + q.x + make_int4(1, 2, 3, 4).w + chunks[0][63 - t].x + chunks[1][63 - t].y;
  y[t] = fmaf(s, v.x, sqrtf(v.y)) + __ldcs(x + 1) + __fmul_rn(s, 2) + __fadd_rn(1, s) + __int2float_rn(c);
  __syncwarp();
  atomicAdd(y, 1.0f);
  atomicAdd(out, 1);
  atomicAdd(reinterpret_cast<unsigned *>(out), 1u);
  atomicMax(out, 3);
  __threadfence();
}
GPU_KERNEL(everywhere)
