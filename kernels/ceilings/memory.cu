// How fast this device's memory can be read and copied: the ceilings that other kernels' speeds stand beside.
//
// Every thread has 4 independent 16-byte loads in flight, neighbours read neighbouring addresses, and the grid walks the
// array with a stride, so any number of blocks covers any length. `read` folds what it loads into one word a thread
// and stores it only if that word has a value it practically never has: the loads cannot be dropped, and no byte is
// written.
#include "gpu.h"

constexpr int kInFlight = 4;

extern "C" __global__ void __launch_bounds__(512) read_bytes(const uint4 *__restrict__ in, uint32_t *__restrict__ out,
                                                             size_t n) {
  const size_t threads = (size_t)gridDim.x * blockDim.x;
  uint32_t fold = 0;
  for (size_t i = (size_t)blockIdx.x * blockDim.x + threadIdx.x; i < n; i += kInFlight * threads) {
    uint4 v[kInFlight];
#pragma unroll
    for (int j = 0; j < kInFlight; ++j) v[j] = i + j * threads < n ? in[i + j * threads] : make_uint4(0, 0, 0, 0);
#pragma unroll
    for (int j = 0; j < kInFlight; ++j) fold ^= v[j].x ^ v[j].y ^ v[j].z ^ v[j].w;
  }
  if (fold == 0x9e3779b9u) out[0] = fold;
}
GPU_KERNEL(read_bytes)

extern "C" __global__ void __launch_bounds__(512) copy_bytes(const uint4 *__restrict__ in, uint4 *__restrict__ out,
                                                             size_t n) {
  const size_t threads = (size_t)gridDim.x * blockDim.x;
  for (size_t i = (size_t)blockIdx.x * blockDim.x + threadIdx.x; i < n; i += kInFlight * threads) {
    uint4 v[kInFlight];
#pragma unroll
    for (int j = 0; j < kInFlight; ++j) v[j] = i + j * threads < n ? in[i + j * threads] : make_uint4(0, 0, 0, 0);
#pragma unroll
    for (int j = 0; j < kInFlight; ++j) if (i + j * threads < n) out[i + j * threads] = v[j];
  }
}
GPU_KERNEL(copy_bytes)

// Words that look random (a finalizer of MurmurHash3 over their index): memory of zeros was seen to run faster.
extern "C" __global__ void fill_words(uint32_t *out, size_t n, uint32_t seed) {
  const size_t threads = (size_t)gridDim.x * blockDim.x;
  for (size_t i = (size_t)blockIdx.x * blockDim.x + threadIdx.x; i < n; i += threads) {
    uint32_t h = (uint32_t)i ^ (uint32_t)(i >> 32) ^ seed;
    h = (h ^ h >> 16) * 0x85ebca6bu;
    h = (h ^ h >> 13) * 0xc2b2ae35u;
    out[i] = h ^ h >> 16;
  }
}
GPU_KERNEL(fill_words)

// Nothing at all: what a launch costs before any work is done.
extern "C" __global__ void empty() {}
GPU_KERNEL(empty)
