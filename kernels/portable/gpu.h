// One kernel source, three places: CUDA (nvcc, NVRTC), HIP (clang), and the CPU wave simulator.
//
// A kernel file includes this, defines `extern "C" __global__ void name(...)` in plain CUDA C++ and ends with
// GPU_KERNEL(name), which registers the kernel with the simulator and is nothing on a GPU. (The name must not be one of
// the C library's, such as `sync`.) Beyond CUDA's own names there are:
//   GPU_CUDA, GPU_HIP, GPU_SIMULATOR   one of them is 1, for code that exists in one place only
//   GPU_FULL_MASK                      mask of a whole wave for shuffles and votes, of type gpu_mask (32 or 64 bits)
//   GPU_DYNAMIC_SHARED(T, name)        declares the launch's dynamic shared memory as T *name, 16-byte aligned
//   half_to_float, float_to_half, bf16_to_float, float_to_bf16    both 16-bit formats are stored as uint16_t
//   bf16_pair(low, high), half_pair(low, high)    two numbers as bf16 or as f16 in 32 bits
//   half2_add(a, b), half2_fma(a, b, c)           arithmetic on such pairs of f16
//   load_once(p)                       16 bytes of global memory that nobody reads again: they need no place in a cache
//   prefetch_to_l2(p)                  the line that p lies in will be read soon
//   fast_exp2(x), fast_reciprocal(x)   2^x and 1 / x by the hardware's instruction, to about 2 ulp; a subnormal x or
//                                      result may be taken for 0
//   copy_async(shared, global, there)  16 bytes into shared memory, or 16 zeros; copy_commit() ends a group of copies,
//   copy_wait<n>()                     copy_wait returns when all but the latest n groups of this thread are there.
//                                      Where a target has no such copies they are plain ones.
//   let_next_launch_begin()            a launch queued behind this one that may overlap it (backends.Kernel) may begin as
//                                      soon as all blocks have said so or ended
//   await_launch_before()              returns when the launch before has ended and all that it wrote is there: at once
//                                      where this one does not overlap it. Until then nothing may be read that a launch
//                                      writes, and nothing written.
//   mma_..., mfma_..., mmac_...        matrix instructions, D += A B: one function each, named after the instruction,
//                                      fragments as registers laid out by the maps in kernelbook/fragments.py
#pragma once
#if defined(__HIP__)
#define GPU_HIP 1
#include "hip.h"
#elif defined(__CUDACC__)
#define GPU_CUDA 1
#include "cuda.h"
#else
#define GPU_SIMULATOR 1
#include "sim.h"
#endif

#if !GPU_CUDA
__device__ __forceinline__ void prefetch_to_l2(const void *) {}
__device__ __forceinline__ void let_next_launch_begin() {}
__device__ __forceinline__ void await_launch_before() {}
#endif
