// 3. The reduction over slices, in one fixed order.
//
// Float addition does not associate: were the slices added with atomics, in whatever order blocks happen to end, two
// runs would differ in their last bits. One thread an output adds slice 0, 1, 2 ... always, so a result is repeatable to
// the bit; another nsplit is another order and may give other bits.
#include "gpu.h"

extern "C" __global__ void reduce_splits(const float *__restrict__ partial, float *__restrict__ out, size_t total,
                                         int nsplit) {
  const size_t i = (size_t)blockIdx.x * blockDim.x + threadIdx.x;
  if (i >= total) return;
  float sum = 0.f;
  for (int z = 0; z < nsplit; ++z) sum = __fadd_rn(sum, partial[(size_t)z * total + i]);
  out[i] = sum;
}
GPU_KERNEL(reduce_splits)
