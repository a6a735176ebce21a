// One matrix instruction a wave: fragments in, fragments out, as kernelbook.fragments packs them.
#include "gpu.h"

#define MMA(name, T)                                                                                  \
  extern "C" __global__ void name##_tile(const uint32_t *a, const uint32_t *b, T *d, int a_registers) {   \
    const int lane = threadIdx.x;                                                                     \
    name(d + 4 * lane, a + a_registers * lane, b + 2 * lane);                                         \
  }                                                                                                   \
  GPU_KERNEL(name##_tile)
MMA(mma_m16n8k32_s8, int)
MMA(mma_m16n8k32_u8s8, int)
MMA(mma_m16n8k32_s8u8, int)
MMA(mma_m16n8k16_bf16, float)
MMA(mma_m16n8k16_f16, float)

#define MFMA(name, T)                                                                                 \
  extern "C" __global__ void name##_tile(const uint64_t *a, const uint64_t *b, T *d, int a_registers) {   \
    const int lane = threadIdx.x;                                                                     \
    name(d + 4 * lane, a[a_registers * lane], b[lane]);                                               \
  }                                                                                                   \
  GPU_KERNEL(name##_tile)
MFMA(mfma_i32_16x16x32_i8, int)
MFMA(mmac_i32_16x16x32_i8, int)
MFMA(mfma_f32_16x16x16_bf16, float)
MFMA(mmac_f32_16x16x16_bf16, float)

extern "C" __global__ void lane_left(const uint32_t *a, const uint32_t *b, int *d, int first) {
  if ((int)threadIdx.x < first) return;
  mma_m16n8k32_s8(d + 4 * threadIdx.x, a + 4 * threadIdx.x, b + 2 * threadIdx.x);  // here: lane_left
}
GPU_KERNEL(lane_left)
