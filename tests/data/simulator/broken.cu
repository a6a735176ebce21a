#include "gpu.h"
extern "C" __global__ void broken(float *out) {
  out[threadIdx.x] = undeclared;
}
GPU_KERNEL(broken)
