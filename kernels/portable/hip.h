// HIP for AMD GPUs and for gfx936/gfx928. Where HIP's own headers exist (hipcc, hiprtc) they give the device language;
// a plain clang (-x hip -nogpuinc -nogpulib) has none, and the first part stands in for what the kernels use.
#pragma once

#define GPU_DEVICE_INLINE static __device__ inline __attribute__((always_inline))

#if defined(__HIPCC_RTC__) || __has_include(<hip/hip_runtime.h>)

#if !defined(__HIPCC_RTC__)
#include <hip/hip_runtime.h>
#include <stdint.h>
#else  // hiprtc has read its headers already, which name the widths of 32 and 64 bits only
typedef signed char int8_t;
typedef unsigned char uint8_t;
typedef short int16_t;
typedef unsigned short uint16_t;
typedef unsigned long uintptr_t;
#endif

#else

#define __global__ __attribute__((global))
#define __device__ __attribute__((device))
#define __host__ __attribute__((host))
#define __shared__ __attribute__((shared))
#define __constant__ __attribute__((constant))
#define __launch_bounds__(threads, ...) __attribute__((amdgpu_flat_work_group_size(1, threads)))
#define __forceinline__ inline __attribute__((always_inline))
#define __align__(n) __attribute__((aligned(n)))

typedef signed char int8_t;
typedef unsigned char uint8_t;
typedef short int16_t;
typedef unsigned short uint16_t;
typedef int int32_t;
typedef unsigned int uint32_t;
typedef long int64_t;
typedef unsigned long uint64_t;
typedef unsigned long uintptr_t;
typedef unsigned long size_t;

// threadIdx.x and its like: properties that read a register.
#define GPU_INDEX(name, value)                                       \
  struct gpu_##name {                                                \
    __device__ static unsigned get_x() { return value(x); }          \
    __device__ static unsigned get_y() { return value(y); }          \
    __device__ static unsigned get_z() { return value(z); }          \
    __declspec(property(get = get_x)) unsigned x;                    \
    __declspec(property(get = get_y)) unsigned y;                    \
    __declspec(property(get = get_z)) unsigned z;                    \
  };                                                                 \
  static const __device__ gpu_##name name{};
#define GPU_THREAD(axis) __builtin_amdgcn_workitem_id_##axis()
#define GPU_BLOCK(axis) __builtin_amdgcn_workgroup_id_##axis()
#define GPU_SIZE(axis) __builtin_amdgcn_workgroup_size_##axis()
#define GPU_COUNT(axis) ((__builtin_amdgcn_grid_size_##axis() + GPU_SIZE(axis) - 1) / GPU_SIZE(axis))
GPU_INDEX(threadIdx, GPU_THREAD)
GPU_INDEX(blockIdx, GPU_BLOCK)
GPU_INDEX(blockDim, GPU_SIZE)
GPU_INDEX(gridDim, GPU_COUNT)
#undef GPU_INDEX
#undef GPU_THREAD
#undef GPU_BLOCK
#undef GPU_SIZE
#undef GPU_COUNT
#define warpSize 64

#define GPU_VECTOR(T, name)                                                                              \
  struct __attribute__((aligned(2 * sizeof(T)))) name##2 { T x, y; };                                    \
  struct __attribute__((aligned(4 * sizeof(T)))) name##4 { T x, y, z, w; };                              \
  GPU_DEVICE_INLINE name##2 make_##name##2(T x, T y) { return {x, y}; }                                  \
  GPU_DEVICE_INLINE name##4 make_##name##4(T x, T y, T z, T w) { return {x, y, z, w}; }
GPU_VECTOR(signed char, char)
GPU_VECTOR(unsigned char, uchar)
GPU_VECTOR(short, short)
GPU_VECTOR(unsigned short, ushort)
GPU_VECTOR(int, int)
GPU_VECTOR(unsigned, uint)
GPU_VECTOR(float, float)
#undef GPU_VECTOR

GPU_DEVICE_INLINE float fmaf(float a, float b, float c) { return __builtin_fmaf(a, b, c); }
GPU_DEVICE_INLINE float fmaxf(float a, float b) { return __builtin_fmaxf(a, b); }
GPU_DEVICE_INLINE float fminf(float a, float b) { return __builtin_fminf(a, b); }
GPU_DEVICE_INLINE float fabsf(float x) { return __builtin_fabsf(x); }
GPU_DEVICE_INLINE float rintf(float x) { return __builtin_rintf(x); }
GPU_DEVICE_INLINE float sqrtf(float x) { return __builtin_sqrtf(x); }
GPU_DEVICE_INLINE float rsqrtf(float x) { return 1.0f / __builtin_sqrtf(x); }
GPU_DEVICE_INLINE float expf(float x) { return __builtin_expf(x); }
GPU_DEVICE_INLINE float exp2f(float x) { return __builtin_exp2f(x); }
GPU_DEVICE_INLINE float logf(float x) { return __builtin_logf(x); }
GPU_DEVICE_INLINE float __expf(float x) { return __builtin_amdgcn_exp2f(x * 1.442695041f); }
GPU_DEVICE_INLINE float __fmul_rn(float a, float b) { return a * b; }  // built with -ffp-contract=off
GPU_DEVICE_INLINE float __fadd_rn(float a, float b) { return a + b; }
GPU_DEVICE_INLINE float __int2float_rn(int x) { return float(x); }
GPU_DEVICE_INLINE int __float2int_rn(float x) { return int(__builtin_rintf(x)); }
GPU_DEVICE_INLINE float __uint_as_float(unsigned x) { return __builtin_bit_cast(float, x); }
GPU_DEVICE_INLINE float __int_as_float(int x) { return __builtin_bit_cast(float, x); }
GPU_DEVICE_INLINE unsigned __float_as_uint(float x) { return __builtin_bit_cast(unsigned, x); }
GPU_DEVICE_INLINE int __float_as_int(float x) { return __builtin_bit_cast(int, x); }
template <class T> GPU_DEVICE_INLINE T min(T a, T b) { return b < a ? b : a; }
template <class T> GPU_DEVICE_INLINE T max(T a, T b) { return a < b ? b : a; }
GPU_DEVICE_INLINE float min(float a, float b) { return fminf(a, b); }
GPU_DEVICE_INLINE float max(float a, float b) { return fmaxf(a, b); }

template <class T> GPU_DEVICE_INLINE T atomicAdd(T *p, T value) {
  return __hip_atomic_fetch_add(p, value, __ATOMIC_RELAXED, __HIP_MEMORY_SCOPE_AGENT);
}
template <class T> GPU_DEVICE_INLINE T atomicMax(T *p, T value) {
  return __hip_atomic_fetch_max(p, value, __ATOMIC_RELAXED, __HIP_MEMORY_SCOPE_AGENT);
}
GPU_DEVICE_INLINE void __threadfence() { __builtin_amdgcn_fence(__ATOMIC_SEQ_CST, "agent"); }

GPU_DEVICE_INLINE void __syncthreads() {
  __builtin_amdgcn_fence(__ATOMIC_RELEASE, "workgroup");
  __builtin_amdgcn_s_barrier();
  __builtin_amdgcn_fence(__ATOMIC_ACQUIRE, "workgroup");
}

// The value of another lane, 32 bits at a time.
GPU_DEVICE_INLINE int __lane_id() { return __builtin_amdgcn_mbcnt_hi(~0u, __builtin_amdgcn_mbcnt_lo(~0u, 0u)); }
template <class T> GPU_DEVICE_INLINE T gpu_read_lane(T value, int source) {
  static_assert(sizeof(T) % 4 == 0, "shuffles take 32- and 64-bit numbers");
  struct Words { int word[sizeof(T) / 4]; } words = __builtin_bit_cast(Words, value);
  for (int &word : words.word) word = __builtin_amdgcn_ds_bpermute(source << 2, word);
  return __builtin_bit_cast(T, words);
}
template <class T> GPU_DEVICE_INLINE T __shfl(T value, int source, int width = warpSize) {
  return gpu_read_lane(value, (__lane_id() & -width) | (source & (width - 1)));
}
template <class T> GPU_DEVICE_INLINE T __shfl_xor(T value, int flip, int width = warpSize) {
  const int lane = __lane_id(), source = lane ^ flip;
  return gpu_read_lane(value, source < (lane & -width) + width ? source : lane);
}
template <class T> GPU_DEVICE_INLINE T __shfl_down(T value, unsigned delta, int width = warpSize) {
  const int lane = __lane_id(), source = lane + int(delta);
  return gpu_read_lane(value, source < (lane & -width) + width ? source : lane);
}
template <class T> GPU_DEVICE_INLINE T __shfl_up(T value, unsigned delta, int width = warpSize) {
  const int lane = __lane_id(), source = lane - int(delta);
  return gpu_read_lane(value, source >= (lane & -width) ? source : lane);
}
GPU_DEVICE_INLINE uint64_t __ballot(int predicate) { return __builtin_amdgcn_ballot_w64(predicate); }
GPU_DEVICE_INLINE unsigned __byte_perm(unsigned a, unsigned b, unsigned selector) {  // of CUDA's selectors, a byte each
  const unsigned spread = (selector & 7) | (selector & 0x70) << 4 | (selector & 0x700) << 8 | (selector & 0x7000) << 12;
  return __builtin_amdgcn_perm(b, a, spread);
}
GPU_DEVICE_INLINE int __popc(unsigned x) { return __builtin_popcount(x); }
GPU_DEVICE_INLINE int __popcll(unsigned long x) { return __builtin_popcountl(x); }
GPU_DEVICE_INLINE int __clz(int x) { return x ? __builtin_clz(x) : 32; }
GPU_DEVICE_INLINE int __ffs(int x) { return __builtin_ffs(x); }

#endif

// ---- CUDA's names that HIP lacks; a wave runs in step, so that a mask asks for nothing ----

typedef uint64_t gpu_mask;
#define GPU_FULL_MASK (~uint64_t(0))
#define GPU_KERNEL(name)
#define GPU_DYNAMIC_SHARED(T, name)                                          \
  extern __shared__ __attribute__((aligned(16))) char gpu_dynamic[];         \
  T *name = reinterpret_cast<T *>(gpu_dynamic)

// Newer ROCm has some of these, to which a call would be as good: ours go by other names.
#define __shfl_sync gpu_shfl_sync
#define __shfl_xor_sync gpu_shfl_xor_sync
#define __shfl_down_sync gpu_shfl_down_sync
#define __shfl_up_sync gpu_shfl_up_sync
#define __ballot_sync gpu_ballot_sync
#define __any_sync gpu_any_sync
#define __all_sync gpu_all_sync
#define __syncwarp gpu_syncwarp
#define GPU_SHUFFLE(name)                                                                                  \
  template <class T, class... More> GPU_DEVICE_INLINE T name##_sync(uint64_t, T value, More... more) {     \
    return name(value, more...);                                                                           \
  }
GPU_SHUFFLE(__shfl)
GPU_SHUFFLE(__shfl_xor)
GPU_SHUFFLE(__shfl_down)
GPU_SHUFFLE(__shfl_up)
#undef GPU_SHUFFLE
GPU_DEVICE_INLINE gpu_mask __ballot_sync(uint64_t, int predicate) { return __ballot(predicate); }
GPU_DEVICE_INLINE int __any_sync(uint64_t, int predicate) { return __ballot(predicate) != 0; }
GPU_DEVICE_INLINE int __all_sync(uint64_t, int predicate) { return __ballot(!predicate) == 0; }
GPU_DEVICE_INLINE void __syncwarp(uint64_t = GPU_FULL_MASK) {
  __builtin_amdgcn_fence(__ATOMIC_ACQ_REL, "wavefront");
  __builtin_amdgcn_wave_barrier();
}
template <class T> GPU_DEVICE_INLINE T __ldg(const T *p) { return *p; }
template <class T> GPU_DEVICE_INLINE T __ldcs(const T *p) { return *p; }
template <class T> GPU_DEVICE_INLINE void __stcs(T *p, T value) { *p = value; }

GPU_DEVICE_INLINE int __dp4a(int a, int b, int c) {
#if defined(__gfx906__) || defined(__gfx908__) || defined(__gfx90a__) || defined(__gfx942__) || \
    defined(__gfx950__) || defined(__gfx928__) || defined(__gfx936__)
  return __builtin_amdgcn_sdot4(a, b, c, false);
#else
  for (int shift = 0; shift < 32; shift += 8) c += int8_t(a >> shift) * int8_t(b >> shift);
  return c;
#endif
}

// A vector of the compiler's own is loaded into registers. A struct is copied from one of two addresses, and the zeros
// are put on the stack to have one.
typedef unsigned gpu_uint4 __attribute__((ext_vector_type(4)));
GPU_DEVICE_INLINE void copy_async(void *shared, const void *global, bool is_there) {
  gpu_uint4 value = 0;
  if (is_there) value = *static_cast<const gpu_uint4 *>(global);
  *static_cast<gpu_uint4 *>(shared) = value;
}
GPU_DEVICE_INLINE void copy_commit() {}
template <int groups> GPU_DEVICE_INLINE void copy_wait() {}

GPU_DEVICE_INLINE float fast_exp2(float x) { return __builtin_amdgcn_exp2f(x); }
GPU_DEVICE_INLINE float fast_reciprocal(float x) { return __builtin_amdgcn_rcpf(x); }
GPU_DEVICE_INLINE float half_to_float(uint16_t h) { return float(__builtin_bit_cast(_Float16, h)); }
GPU_DEVICE_INLINE uint16_t float_to_half(float f) {
  return f != f ? 0x7fff : __builtin_bit_cast(uint16_t, _Float16(f));
}
GPU_DEVICE_INLINE float bf16_to_float(uint16_t b) { return __builtin_bit_cast(float, uint32_t(b) << 16); }
GPU_DEVICE_INLINE uint16_t float_to_bf16(float f) {
  const uint32_t bits = __builtin_bit_cast(uint32_t, f);
  return f != f ? 0x7fff : (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
}

GPU_DEVICE_INLINE uint32_t bf16_pair(float low, float high) {
  return float_to_bf16(low) | uint32_t(float_to_bf16(high)) << 16;
}
GPU_DEVICE_INLINE uint32_t half_pair(float low, float high) {
  return float_to_half(low) | uint32_t(float_to_half(high)) << 16;
}
typedef _Float16 gpu_half2 __attribute__((ext_vector_type(2)));
GPU_DEVICE_INLINE uint32_t half2_add(uint32_t a, uint32_t b) {
  return __builtin_bit_cast(uint32_t, __builtin_bit_cast(gpu_half2, a) + __builtin_bit_cast(gpu_half2, b));
}
GPU_DEVICE_INLINE uint32_t half2_fma(uint32_t a, uint32_t b, uint32_t c) {
  return __builtin_bit_cast(uint32_t, __builtin_elementwise_fma(__builtin_bit_cast(gpu_half2, a),
                                                                __builtin_bit_cast(gpu_half2, b),
                                                                __builtin_bit_cast(gpu_half2, c)));
}
GPU_DEVICE_INLINE uint4 load_once(const void *p) {
  const gpu_uint4 v = __builtin_nontemporal_load(static_cast<const gpu_uint4 *>(p));
  return {v[0], v[1], v[2], v[3]};
}

// ---- matrix instructions, 64 lanes ----

typedef int gpu_int4 __attribute__((ext_vector_type(4)));
typedef float gpu_float4 __attribute__((ext_vector_type(4)));
typedef short gpu_short4 __attribute__((ext_vector_type(4)));

#if defined(__gfx936__) || defined(__gfx928__)
#define GPU_HAS_MMAC 1
GPU_DEVICE_INLINE void mmac_i32_16x16x32_i8(int d[4], uint64_t a, uint64_t b) {
  gpu_int4 sum = {d[0], d[1], d[2], d[3]};
  asm volatile("v_mmac_i32_16x16x32_i8 %0, %1, %2, %0" : "+v"(sum) : "v"(a), "v"(b));
  for (int i = 0; i < 4; ++i) d[i] = sum[i];
}
GPU_DEVICE_INLINE void mmac_f32_16x16x16_bf16(float d[4], uint64_t a, uint64_t b) {
  gpu_float4 sum = {d[0], d[1], d[2], d[3]};
  asm volatile("v_mmac_f32_16x16x16_bf16 %0, %1, %2, %0" : "+v"(sum) : "v"(a), "v"(b));
  for (int i = 0; i < 4; ++i) d[i] = sum[i];
}
#elif defined(__gfx90a__) || defined(__gfx942__) || defined(__gfx950__)
#define GPU_HAS_MFMA 1
GPU_DEVICE_INLINE void mfma_i32_16x16x32_i8(int d[4], uint64_t a, uint64_t b) {
  gpu_int4 sum = {d[0], d[1], d[2], d[3]};
#if defined(__gfx90a__)
  // Two 16x16x16. Each lane holds the same eight k of A and B, so any split of the eight gives the same sum.
  sum = __builtin_amdgcn_mfma_i32_16x16x16i8(int(a), int(b), sum, 0, 0, 0);
  sum = __builtin_amdgcn_mfma_i32_16x16x16i8(int(a >> 32), int(b >> 32), sum, 0, 0, 0);
#else
  sum = __builtin_amdgcn_mfma_i32_16x16x32_i8(long(a), long(b), sum, 0, 0, 0);
#endif
  for (int i = 0; i < 4; ++i) d[i] = sum[i];
}
GPU_DEVICE_INLINE void mfma_f32_16x16x16_bf16(float d[4], uint64_t a, uint64_t b) {
  gpu_float4 sum = {d[0], d[1], d[2], d[3]};
  sum = __builtin_amdgcn_mfma_f32_16x16x16bf16_1k(__builtin_bit_cast(gpu_short4, a), __builtin_bit_cast(gpu_short4, b),
                                                  sum, 0, 0, 0);
  for (int i = 0; i < 4; ++i) d[i] = sum[i];
}
#endif
