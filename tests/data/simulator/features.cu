// What a kernel may rely on: one kernel a feature, its result known in numpy.
#include "gpu.h"

extern "C" __global__ void coordinates(int *out) {  // 12 numbers a thread, threads in their linear order
  const dim3 b = {blockDim.x, blockDim.y, blockDim.z};
  const int thread = (threadIdx.z * b.y + threadIdx.y) * b.x + threadIdx.x;
  const int block = (blockIdx.z * gridDim.y + blockIdx.y) * gridDim.x + blockIdx.x;
  int *o = out + (size_t)(block * b.x * b.y * b.z + thread) * 12;
  o[0] = threadIdx.x, o[1] = threadIdx.y, o[2] = threadIdx.z;
  o[3] = blockIdx.x, o[4] = blockIdx.y, o[5] = blockIdx.z;
  o[6] = blockDim.x, o[7] = blockDim.y, o[8] = blockDim.z;
  o[9] = gridDim.x, o[10] = gridDim.y, o[11] = gridDim.z;
}
GPU_KERNEL(coordinates)

extern "C" __global__ void shuffles(const float *x, float *out, int width) {
  const int t = threadIdx.x, n = blockDim.x;
  const float v = x[t];
  out[0 * n + t] = __shfl_sync(GPU_FULL_MASK, v, 3, width);
  out[1 * n + t] = __shfl_xor_sync(GPU_FULL_MASK, v, 5, width);
  out[2 * n + t] = __shfl_down_sync(GPU_FULL_MASK, v, 2, width);
  out[3 * n + t] = __shfl_up_sync(GPU_FULL_MASK, v, 3, width);
  out[4 * n + t] = (float)__shfl_sync(GPU_FULL_MASK, (long long)v << 33, (t + 1) % warpSize) / 8589934592.0f;
}
GPU_KERNEL(shuffles)

extern "C" __global__ void partial_mask(const int *x, int *out) {  // the even lanes go on alone
  out[threadIdx.x] = x[threadIdx.x];
  if (threadIdx.x % 2 == 0) {
    const gpu_mask even = (gpu_mask)0x5555555555555555ull;
    int v = x[threadIdx.x];
    for (int o = 2; o < warpSize; o *= 2) v += __shfl_xor_sync(even, v, o);
    out[threadIdx.x] = v;
  }
}
GPU_KERNEL(partial_mask)

extern "C" __global__ void absent_lane(int *out) {  // a lane outside the mask has no defined value
  if (threadIdx.x < 4) out[threadIdx.x] = __shfl_down_sync(0xf, (int)threadIdx.x, 1);
}
GPU_KERNEL(absent_lane)

extern "C" __global__ void votes(const int *x, uint64_t *ballot, int *any, int *all) {
  const int t = threadIdx.x;
  ballot[t] = __ballot_sync(GPU_FULL_MASK, x[t] & 1);
  any[t] = __any_sync(GPU_FULL_MASK, x[t] == 7);
  all[t] = __all_sync(GPU_FULL_MASK, x[t] < 100);
}
GPU_KERNEL(votes)

extern "C" __global__ void block_sum(const float *x, float *out, int n) {  // shuffles within waves, then shared memory
  __shared__ float part[32];
  GPU_DYNAMIC_SHARED(float, row);
  for (int i = threadIdx.x; i < n; i += blockDim.x) row[i] = x[(size_t)blockIdx.x * n + i];
  __syncthreads();
  float sum = 0;
  for (int i = threadIdx.x; i < n; i += blockDim.x) sum += row[n - 1 - i];
  for (int o = warpSize / 2; o; o /= 2) sum += __shfl_xor_sync(GPU_FULL_MASK, sum, o);
  if (threadIdx.x % warpSize == 0) part[threadIdx.x / warpSize] = sum;
  __syncthreads();
  if (threadIdx.x != 0) return;
  for (int i = 1; i < (int)(blockDim.x / warpSize); ++i) sum += part[i];
  out[blockIdx.x] = sum;
}
GPU_KERNEL(block_sum)

extern "C" __global__ void warp_exchange(const int *x, int *out) {  // through shared memory, in step within a wave
  __shared__ int tile[256];
  const int t = threadIdx.x;
  tile[t] = x[t];
  __syncwarp();
  out[t] = tile[t ^ 1];
}
GPU_KERNEL(warp_exchange)

extern "C" __global__ void shared_is_fresh(uint32_t *found, int n) {  // what a block finds, then spoils
  __shared__ uint32_t fixed[100];
  __shared__ uint8_t more[3];
  GPU_DYNAMIC_SHARED(uint32_t, dynamic);
  found[blockIdx.x] = more[0] == 0xFF && more[2] == 0xFF;
  for (int i = 0; i < 100; ++i) found[blockIdx.x] &= fixed[i] == 0xffffffffu;
  for (int i = 0; i < n; ++i) found[blockIdx.x] &= dynamic[i] == 0xffffffffu;
  for (int i = 0; i < 100; ++i) fixed[i] = i;
  for (int i = 0; i < n; ++i) dynamic[i] = i;
  more[0] = more[1] = more[2] = 0;
}
GPU_KERNEL(shared_is_fresh)

extern "C" __global__ void dot4(const int *a, const int *b, const int *c, int *out) {
  out[threadIdx.x] = __dp4a(a[threadIdx.x], b[threadIdx.x], c[threadIdx.x]);
}
GPU_KERNEL(dot4)

extern "C" __global__ void from_16_bits(float *half, float *bf16) {
  const int i = blockIdx.x * blockDim.x + threadIdx.x;
  half[i] = half_to_float(i);
  bf16[i] = bf16_to_float(i);
}
GPU_KERNEL(from_16_bits)

extern "C" __global__ void to_16_bits(const float *x, uint16_t *half, uint16_t *bf16, int n) {
  const int i = blockIdx.x * blockDim.x + threadIdx.x;
  if (i >= n) return;
  half[i] = float_to_half(x[i]);
  bf16[i] = float_to_bf16(x[i]);
}
GPU_KERNEL(to_16_bits)

extern "C" __global__ void atomics(const int *x, int *histogram, unsigned *count, float *sum, int *largest) {
  __shared__ int local;
  if (threadIdx.x == 0) local = 0;
  __syncthreads();
  const int v = x[blockIdx.x * blockDim.x + threadIdx.x];
  atomicAdd(&histogram[v & 15], 1);
  atomicAdd(&local, 1);
  atomicAdd(sum, 0.5f);
  atomicMax(largest, v);
  __syncthreads();
  if (threadIdx.x == 0) atomicAdd(count, (unsigned)local);
}
GPU_KERNEL(atomics)

extern "C" __global__ void rounding(const float *x, float *out, int *rounded) {
  const float a = x[0], b = x[1], c = x[2];
  out[0] = a * b + c;                         // two roundings, whatever the compiler would like
  out[1] = fmaf(a, b, c);                     // one
  out[2] = __fadd_rn(__fmul_rn(a, b), c);
  out[3] = fmaxf(min(a, b), fminf(b, c));
  for (int i = 0; i < 6; ++i) rounded[i] = __float2int_rn(x[3 + i]);
}
GPU_KERNEL(rounding)

extern "C" __global__ void vectors(const float4 *x, const char4 *codes, float4 *out) {
  const float4 v = __ldcs(x + threadIdx.x);
  const char4 q = __ldg(codes + threadIdx.x);
  out[threadIdx.x] = make_float4(v.x * q.x, v.y * q.y, v.z * q.z, v.w * q.w);
}
GPU_KERNEL(vectors)

extern "C" __global__ void approximations(const float *x, float *powers, float *quotients) {
  const int i = blockIdx.x * blockDim.x + threadIdx.x;
  powers[i] = fast_exp2(x[i]);
  quotients[i] = __fdividef(x[i], x[i ^ 1]);
}
GPU_KERNEL(approximations)

extern "C" __global__ void copies(const uint4 *x, uint4 *out, int there) {  // nothing is read where nothing is there
  __shared__ uint4 tile[2][64];
  const int t = threadIdx.x;
  for (int i = 0; i < 2; ++i) {
    copy_async(&tile[i][t], x + 64 * i + t, 64 * i + t < there);
    copy_commit();
  }
  copy_wait<1>();
  __syncthreads();
  out[t] = tile[0][63 - t];
  copy_wait<0>();
  __syncthreads();
  out[64 + t] = tile[1][63 - t];
}
GPU_KERNEL(copies)

extern "C" __global__ void tickets(int *ticket, int *counter) {  // in which order threads run
  ticket[blockIdx.x * blockDim.x + threadIdx.x] = atomicAdd(counter, 1);
}
GPU_KERNEL(tickets)

__constant__ int kTable[4] = {2, 3, 5, 7};
template <int N> __device__ __forceinline__ int unrolled(int x) {
  int sum = 0;
#pragma unroll
  for (int i = 0; i < N; ++i) sum += kTable[i] * x;
  return sum;
}
extern "C" __global__ void __launch_bounds__(64) scalars(int64_t *out, int8_t a, uint16_t b, int64_t c, double d, bool e,
                                                         const int *none) {
  out[threadIdx.x] = a + b + c + (int64_t)d + e + (none == nullptr) + unrolled<4>(1);
}
GPU_KERNEL(scalars)

extern "C" __global__ void nothing() {}
GPU_KERNEL(nothing)
