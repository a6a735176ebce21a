// Planted faults. Each kernel is right when `bad` is 0; the line at fault carries a comment with the kernel's name.
#include "gpu.h"

extern "C" __global__ void barrier_ended(int *out, int bad) {
  if (bad && threadIdx.x >= 40) return;
  __syncthreads();  // here: barrier_ended
  out[threadIdx.x] = 1;
}
GPU_KERNEL(barrier_ended)

extern "C" __global__ void barrier_elsewhere(int *out, int bad) {
  if (bad && threadIdx.x % 2) {
    __syncthreads();
  } else {
    __syncthreads();  // here: barrier_elsewhere
  }
  if (!bad) out[threadIdx.x] = 1;
}
GPU_KERNEL(barrier_elsewhere)

extern "C" __global__ void shuffle_ended(int *out, int bad) {
  if (bad && threadIdx.x == 5) return;
  out[threadIdx.x] = __shfl_xor_sync(GPU_FULL_MASK, 1, 1);  // here: shuffle_ended
}
GPU_KERNEL(shuffle_ended)

extern "C" __global__ void shuffle_diverged(int *out, int bad) {
  int v = 1;
  if (!bad || threadIdx.x % 2 == 0) v = __shfl_xor_sync(GPU_FULL_MASK, v, 2);  // here: shuffle_diverged
  __syncthreads();
  out[threadIdx.x] = v;
}
GPU_KERNEL(shuffle_diverged)

extern "C" __global__ void shuffle_other_mask(int *out, int bad) {
  const gpu_mask mask = bad && threadIdx.x == 3 ? (gpu_mask)0xff : GPU_FULL_MASK;
  out[threadIdx.x] = __shfl_sync(mask, 1, 0);  // here: shuffle_other_mask
}
GPU_KERNEL(shuffle_other_mask)

extern "C" __global__ void vote_not_in_mask(int *out, int bad) {
  const gpu_mask mask = bad ? (gpu_mask)0xfffe : GPU_FULL_MASK;
  out[threadIdx.x] = __any_sync(mask, 1);  // here: vote_not_in_mask
}
GPU_KERNEL(vote_not_in_mask)

extern "C" __global__ void syncwarp_missing(int *out, int bad) {
  if (!bad || threadIdx.x != 31) __syncwarp();  // here: syncwarp_missing
  out[threadIdx.x] = 1;
}
GPU_KERNEL(syncwarp_missing)

extern "C" __global__ void race_shared(int *out, int bad) {
  __shared__ int tile[64];
  tile[threadIdx.x] = threadIdx.x;
  if (!bad) __syncthreads();
  out[threadIdx.x] = tile[threadIdx.x ^ 1];
}
GPU_KERNEL(race_shared)

extern "C" __global__ void race_waves(int *out, int bad) {  // fails only where another wave runs first
  __shared__ int tile[128];
  tile[threadIdx.x] = threadIdx.x;
  if (!bad) __syncthreads(); else __syncwarp();
  out[threadIdx.x] = tile[threadIdx.x & 63];
}
GPU_KERNEL(race_waves)

extern "C" __global__ void race_blocks(int *out, int bad) {
  if (threadIdx.x == 0) out[bad ? 0 : blockIdx.x] = blockIdx.x;
}
GPU_KERNEL(race_blocks)

extern "C" __global__ void read_past_end(const float *x, float *out, int bad) {
  out[threadIdx.x] = x[threadIdx.x + bad];  // here: read_past_end
}
GPU_KERNEL(read_past_end)

extern "C" __global__ void write_past_end(const float *x, float *out, int bad) {
  out[threadIdx.x + 16 * bad] = x[threadIdx.x];  // here: write_past_end
}
GPU_KERNEL(write_past_end)

extern "C" __global__ void read_before_start(const float *x, float *out, int bad) {
  out[threadIdx.x] = x[(int)threadIdx.x - 4096 * bad];  // here: read_before_start
}
GPU_KERNEL(read_before_start)

extern "C" __global__ void write_before_start(const float *x, float *out, int bad) {
  out[(int)threadIdx.x - bad] = x[threadIdx.x];
}
GPU_KERNEL(write_before_start)

extern "C" __global__ void write_padding(uint8_t *out, int bad) { if (threadIdx.x < 13 + bad) out[threadIdx.x] = 1; }
GPU_KERNEL(write_padding)

extern "C" __global__ void null_pointer(const float *x, float *out, int bad) {
  if (bad || x) out[threadIdx.x] = x[threadIdx.x];  // here: null_pointer
}
GPU_KERNEL(null_pointer)

extern "C" __global__ void dynamic_shared(int *out, int bad) {
  GPU_DYNAMIC_SHARED(int, tile);
  tile[threadIdx.x + bad] = 1;  // here: dynamic_shared
  out[threadIdx.x] = tile[threadIdx.x + bad];
}
GPU_KERNEL(dynamic_shared)

extern "C" __global__ void dynamic_shared_padding(int *out, int bad) {
  GPU_DYNAMIC_SHARED(uint8_t, tile);
  if (threadIdx.x < 13 + bad) tile[threadIdx.x] = 1;
  out[threadIdx.x] = 1;
}
GPU_KERNEL(dynamic_shared_padding)

extern "C" __global__ void static_index(int *out, int bad) {
  __shared__ int tile[64];
  tile[threadIdx.x + bad] = 1;  // here: static_index
  out[threadIdx.x] = tile[threadIdx.x + bad];
}
GPU_KERNEL(static_index)

extern "C" __global__ void index_overflow(int *out, int bad) {
  const int row = bad ? 300000 : 3, stride = 8192;
  const int index = row * stride;  // here: index_overflow
  out[threadIdx.x] = index > 0;
}
GPU_KERNEL(index_overflow)

extern "C" __global__ void sum_overflow(int *out, int bad) {
  int sum = bad ? 2147483600 : 0;
  sum += threadIdx.x < 64 ? (int)threadIdx.x : 0;  // here: sum_overflow
  out[threadIdx.x] = sum;
}
GPU_KERNEL(sum_overflow)

extern "C" __global__ void dot_overflow(int *out, int bad) {
  out[threadIdx.x] = __dp4a(0x7f7f7f7f, 0x7f7f7f7f, bad ? 2147483647 : 0);  // here: dot_overflow
}
GPU_KERNEL(dot_overflow)

extern "C" __global__ void divide_by_zero(int *out, int bad) {
  out[threadIdx.x] = 100 / (bad ? (int)threadIdx.x : 1);  // here: divide_by_zero
}
GPU_KERNEL(divide_by_zero)

extern "C" __global__ void shift_too_far(int *out, int bad) {
  out[threadIdx.x] = 1u << (bad ? 32 : 3);  // here: shift_too_far
}
GPU_KERNEL(shift_too_far)

extern "C" __global__ void misaligned(const float *x, float *out, int bad) {
  const float4 v = *reinterpret_cast<const float4 *>(x + bad);  // here: misaligned
  out[threadIdx.x] = v.x;
}
GPU_KERNEL(misaligned)

__device__ int deep(int n) {
  volatile int local[64] = {n};
  return n ? deep(n - 1) + local[0] : 0;
}
extern "C" __global__ void stack_overflow(int *out, int bad) { out[threadIdx.x] = deep(bad ? 100000 : 3); }
GPU_KERNEL(stack_overflow)

extern "C" __global__ void waits_forever(volatile int *flag, int bad) {  // as for a block that has failed
  if (bad && blockIdx.x == 1) __shfl_sync(1, 0, 0);
  while (blockIdx.x == 0 && *flag == 0) {}
}
GPU_KERNEL(waits_forever)
