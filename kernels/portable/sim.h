// The device language on the CPU: CUDA's names on top of the simulator's few primitives.
#pragma once
#include "sim_runtime.h"
// No <algorithm> or <atomic>: each of many builds would take half a second longer.
#include <bit>
#include <climits>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <type_traits>
#include <utility>

#define __global__
#define __device__
#define __host__
#define __constant__ static const
// A block runs on one OS thread, so the block's own copy of a variable is that thread's.
#define __shared__ static thread_local
#define __forceinline__ inline __attribute__((always_inline))
#define __launch_bounds__(...)
#define __align__(n) alignas(n)

#include "fragments.h"

// ---- the kernel and its launch ----

#define threadIdx sim::here.threadIdx
#define blockIdx sim::here.blockIdx
#define blockDim sim::here.blockDim
#define gridDim sim::here.gridDim
#define warpSize sim::here.warpSize
#define GPU_DYNAMIC_SHARED(T, name) T *name = reinterpret_cast<T *>(sim::here.dynamic_shared)

namespace sim {
template <auto kernel> struct Entry;
template <class... P, void (*kernel)(P...)> struct Entry<kernel> {
  template <size_t... I> static void call(void *const *arguments, std::index_sequence<I...>) {
    kernel(*static_cast<P *>(arguments[I])...);
  }
  static void call(void *const *arguments) { call(arguments, std::index_sequence_for<P...>{}); }
  template <class T> static constexpr Kind kind =
      std::is_pointer_v<T> ? Pointer : std::is_integral_v<T> ? Integer : std::is_floating_point_v<T> ? Floating : Other;
  static constexpr Parameter parameters[] = {{int(sizeof(P)), kind<P>}..., {0, Other}};
  static constexpr Kernel description = {call, sizeof...(P), parameters};
};
}  // namespace sim
#define GPU_KERNEL(name) \
  extern "C" const sim::Kernel *gpu_kernel_##name() { return &sim::Entry<name>::description; }

// ---- vector types ----

#define SIM_VECTOR(T, name, n, ...)                       \
  struct alignas(n * sizeof(T)) name { T __VA_ARGS__; };
SIM_VECTOR(signed char, char2, 2, x, y)
SIM_VECTOR(signed char, char4, 4, x, y, z, w)
SIM_VECTOR(unsigned char, uchar2, 2, x, y)
SIM_VECTOR(unsigned char, uchar4, 4, x, y, z, w)
SIM_VECTOR(short, short2, 2, x, y)
SIM_VECTOR(short, short4, 4, x, y, z, w)
SIM_VECTOR(unsigned short, ushort2, 2, x, y)
SIM_VECTOR(unsigned short, ushort4, 4, x, y, z, w)
SIM_VECTOR(int, int2, 2, x, y)
SIM_VECTOR(int, int4, 4, x, y, z, w)
SIM_VECTOR(unsigned, uint2, 2, x, y)
SIM_VECTOR(unsigned, uint4, 4, x, y, z, w)
SIM_VECTOR(float, float2, 2, x, y)
SIM_VECTOR(float, float4, 4, x, y, z, w)
#undef SIM_VECTOR
#define SIM_MAKE(T, name)                                                              \
  inline name##2 make_##name##2(T x, T y) { return {x, y}; }                           \
  inline name##4 make_##name##4(T x, T y, T z, T w) { return {x, y, z, w}; }
SIM_MAKE(signed char, char)
SIM_MAKE(unsigned char, uchar)
SIM_MAKE(short, short)
SIM_MAKE(unsigned short, ushort)
SIM_MAKE(int, int)
SIM_MAKE(unsigned, uint)
SIM_MAKE(float, float)
#undef SIM_MAKE

// ---- arithmetic ----

template <class A, class B> constexpr auto min(A a, B b) {
  using T = std::common_type_t<A, B>;
  if constexpr (std::is_floating_point_v<T>) return std::fmin(T(a), T(b));
  else return T(b) < T(a) ? T(b) : T(a);
}
template <class A, class B> constexpr auto max(A a, B b) {
  using T = std::common_type_t<A, B>;
  if constexpr (std::is_floating_point_v<T>) return std::fmax(T(a), T(b));
  else return T(a) < T(b) ? T(b) : T(a);
}

inline float __fmul_rn(float a, float b) { return a * b; }
inline float __fadd_rn(float a, float b) { return a + b; }
inline float __fsub_rn(float a, float b) { return a - b; }
inline float __fmaf_rn(float a, float b, float c) { return std::fma(a, b, c); }
inline float __fdividef(float a, float b) { return a / b; }
inline float __expf(float x) { return std::exp(x); }
inline float fast_exp2(float x) { return std::exp2(x); }
inline float fast_reciprocal(float x) { return 1.0f / x; }
inline float __logf(float x) { return std::log(x); }
inline float rsqrtf(float x) { return 1.0f / std::sqrt(x); }

inline float __int2float_rn(int x) { return float(x); }
inline int __float2int_rn(float x) {  // saturates, and gives 0 for NaN, as a GPU does
  if (x >= 0x1p31f) return INT_MAX;
  if (x < -0x1p31f) return INT_MIN;
  return std::isnan(x) ? 0 : int(std::nearbyint(x));
}
inline float __uint_as_float(unsigned bits) { return std::bit_cast<float>(bits); }
inline float __int_as_float(int bits) { return std::bit_cast<float>(bits); }
inline unsigned __float_as_uint(float x) { return std::bit_cast<unsigned>(x); }
inline int __float_as_int(float x) { return std::bit_cast<int>(x); }

inline unsigned __byte_perm(unsigned a, unsigned b, unsigned selector) {
  const uint64_t bytes = uint64_t(b) << 32 | a;
  unsigned result = 0;
  for (int i = 0; i < 4; ++i) result |= unsigned(bytes >> 8 * (selector >> 4 * i & 7) & 0xff) << 8 * i;
  return result;
}
inline int __popc(unsigned x) { return std::popcount(x); }
inline int __popcll(unsigned long long x) { return std::popcount(x); }
inline int __clz(int x) { return std::countl_zero(unsigned(x)); }
inline int __ffs(int x) { return __builtin_ffs(x); }

// Products of four signed bytes, added up; a sum past 2^31, which wraps on a GPU, is a fault.
inline int __dp4a(int a, int b, int c, sim::Place place = sim::Place::current()) {
  int sum = 0;
  for (int shift = 0; shift < 32; shift += 8) sum += int8_t(a >> shift) * int8_t(b >> shift);
  if (int result; !__builtin_add_overflow(sum, c, &result)) return result;
  sim::fault(place, "__dp4a: %d + %d does not fit into int", sum, c);
}

// ---- 16-bit floats, rounded to nearest even; every NaN becomes 0x7fff, as on a GPU ----

inline float half_to_float(uint16_t half) {
  const uint32_t sign = (half & 0x8000u) << 16, magnitude = half & 0x7fffu;
  uint32_t bits = (magnitude << 13) + 0x38000000;                                     // rebias the exponent
  if (magnitude >= 0x7c00) bits = (magnitude << 13) | 0x7f800000;                     // infinity, NaN
  if (magnitude < 0x0400) bits = std::bit_cast<uint32_t>(float(magnitude) * 0x1p-24f);  // subnormal, zero
  return std::bit_cast<float>(bits | sign);
}
inline uint16_t float_to_half(float x) {
  const uint32_t bits = std::bit_cast<uint32_t>(x), sign = bits >> 16 & 0x8000u, magnitude = bits & 0x7fffffffu;
  if (magnitude > 0x7f800000) return 0x7fff;
  if (magnitude >= 0x477ff000) return sign | 0x7c00;  // 65520 and above round to infinity
  if (magnitude < 0x38800000)  // subnormal: in x + 0.5 the last bit is worth 2^-24, as in the result
    return sign | (std::bit_cast<uint32_t>(std::bit_cast<float>(magnitude) + 0.5f) - 0x3f000000);
  return sign | ((magnitude - 0x38000000 + 0xfff + (magnitude >> 13 & 1)) >> 13);
}
inline float bf16_to_float(uint16_t bf16) { return std::bit_cast<float>(uint32_t(bf16) << 16); }
inline uint16_t float_to_bf16(float x) {
  const uint32_t bits = std::bit_cast<uint32_t>(x);
  return std::isnan(x) ? 0x7fff : (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
}

inline uint32_t bf16_pair(float low, float high) { return float_to_bf16(low) | uint32_t(float_to_bf16(high)) << 16; }
inline uint32_t half_pair(float low, float high) { return float_to_half(low) | uint32_t(float_to_half(high)) << 16; }
// Sums and products of f16 are exact in float, or as good as a GPU's one rounding.
inline uint32_t half2_fma(uint32_t a, uint32_t b, uint32_t c) {
  const auto one = [=](int shift) {
    return std::fma(half_to_float(uint16_t(a >> shift)), half_to_float(uint16_t(b >> shift)),
                    half_to_float(uint16_t(c >> shift)));
  };
  return half_pair(one(0), one(16));
}
inline uint32_t half2_add(uint32_t a, uint32_t b) { return half2_fma(a, 0x3c003c00, b); }

// ---- memory ----

template <class T> T __ldg(const T *p) { return *p; }
template <class T> T __ldcs(const T *p) { return *p; }
inline uint4 load_once(const void *p) { return *static_cast<const uint4 *>(p); }
template <class T> void __stcs(T *p, T value) { *p = value; }
inline void __threadfence() { __atomic_thread_fence(__ATOMIC_SEQ_CST); }

inline void copy_async(void *shared, const void *global, bool is_there) {
  const uint4 zero = {};
  *static_cast<uint4 *>(shared) = is_there ? *static_cast<const uint4 *>(global) : zero;
}
inline void copy_commit() {}
template <int groups> void copy_wait() {}

template <class T> T atomicAdd(T *p, std::type_identity_t<T> value) {
  if constexpr (std::is_integral_v<T>) {
    return __atomic_fetch_add(p, value, __ATOMIC_RELAXED);
  } else {
    T seen = *p, sum;
    do sum = seen + value;
    while (!__atomic_compare_exchange(p, &seen, &sum, true, __ATOMIC_RELAXED, __ATOMIC_RELAXED));
    return seen;
  }
}
template <class T> T atomicMax(T *p, std::type_identity_t<T> value) {
  static_assert(std::is_integral_v<T>, "atomicMax takes integers");
  T seen = *p;
  while (seen < value && !__atomic_compare_exchange(p, &seen, &value, true, __ATOMIC_RELAXED, __ATOMIC_RELAXED)) {}
  return seen;
}

// ---- what threads do together ----

using gpu_mask = uint64_t;
#define GPU_FULL_MASK (~uint64_t(0))

inline void __syncthreads(sim::Place place = sim::Place::current()) { sim::barrier(place); }
inline void __syncwarp(uint64_t mask = GPU_FULL_MASK, sim::Place place = sim::Place::current()) {
  sim::collective("__syncwarp", [](void *const *) {}, nullptr, mask, place);
}

namespace sim {
inline constexpr int widest_wave = 64;

// The value that lane `source` brought; every byte 0xFF where that lane takes no part (undefined on a GPU).
template <class T> T shuffle(const char *name, uint64_t mask, T value, int source, Place place) {
  static_assert(std::is_arithmetic_v<T> && sizeof(T) >= 4, "shuffles take 32- and 64-bit numbers");
  struct Operands { T value, result; int source; } mine = {value, value, source};
  collective(name, [](void *const *lanes) {
    for (int lane = 0; lane < widest_wave; ++lane) {
      auto *to = static_cast<Operands *>(lanes[lane]);
      if (!to) continue;
      const bool exists = to->source >= 0 && to->source < widest_wave;
      auto *from = exists ? static_cast<Operands *>(lanes[to->source]) : nullptr;
      if (from) to->result = from->value;
      else std::memset(&to->result, 0xFF, sizeof(T));
    }
  }, &mine, mask, place);
  return mine.result;
}

// A bit for every lane of `mask` whose predicate is true.
inline uint64_t vote(const char *name, uint64_t mask, bool predicate, Place place) {
  struct Operands { uint64_t predicate, result; } mine = {predicate, 0};
  collective(name, [](void *const *lanes) {
    uint64_t ballot = 0;
    for (int lane = 0; lane < widest_wave; ++lane)
      if (lanes[lane]) ballot |= static_cast<Operands *>(lanes[lane])->predicate << lane;
    for (int lane = 0; lane < widest_wave; ++lane)
      if (lanes[lane]) static_cast<Operands *>(lanes[lane])->result = ballot;
  }, &mine, mask, place);
  return mine.result;
}
}  // namespace sim

// `width` splits a wave into segments that shuffle each on its own.
template <class T> T __shfl_sync(uint64_t mask, T value, int source, int width = warpSize,
                                 sim::Place place = sim::Place::current()) {
  const int segment = sim::here.lane & -width;
  return sim::shuffle("__shfl_sync", mask, value, segment | (source & (width - 1)), place);
}
template <class T> T __shfl_xor_sync(uint64_t mask, T value, int flip, int width = warpSize,
                                     sim::Place place = sim::Place::current()) {
  const int lane = sim::here.lane, end = (lane & -width) + width, source = lane ^ flip;
  return sim::shuffle("__shfl_xor_sync", mask, value, source < end ? source : lane, place);
}
template <class T> T __shfl_down_sync(uint64_t mask, T value, unsigned delta, int width = warpSize,
                                      sim::Place place = sim::Place::current()) {
  const int lane = sim::here.lane, end = (lane & -width) + width, source = lane + int(delta);
  return sim::shuffle("__shfl_down_sync", mask, value, source < end ? source : lane, place);
}
template <class T> T __shfl_up_sync(uint64_t mask, T value, unsigned delta, int width = warpSize,
                                    sim::Place place = sim::Place::current()) {
  const int lane = sim::here.lane, begin = lane & -width, source = lane - int(delta);
  return sim::shuffle("__shfl_up_sync", mask, value, source >= begin ? source : lane, place);
}
inline gpu_mask __ballot_sync(uint64_t mask, int predicate, sim::Place place = sim::Place::current()) {
  return sim::vote("__ballot_sync", mask, predicate, place);
}
inline int __any_sync(uint64_t mask, int predicate, sim::Place place = sim::Place::current()) {
  return sim::vote("__any_sync", mask, predicate, place) != 0;
}
inline int __all_sync(uint64_t mask, int predicate, sim::Place place = sim::Place::current()) {
  return sim::vote("__all_sync", mask, !predicate, place) == 0;
}

// ---- matrix instructions ----

namespace sim {

// Element types of operands: what a register's bits stand for.
struct bf16 { uint16_t bits; };
struct f16 { uint16_t bits; };
inline int number(int8_t x) { return x; }
inline int number(uint8_t x) { return x; }
inline double number(bf16 x) { return bf16_to_float(x.bits); }
inline double number(f16 x) { return half_to_float(x.bits); }

// Index of every lane's every element in its matrix, in row order.
template <const fragments::Operand &operand> struct Layout {
  int index[widest_wave][operand.elements] = {};
  constexpr Layout() {
    for (int lane = 0; lane < widest_wave; ++lane)
      for (int e = 0; e < operand.elements; ++e)
        index[lane][e] = fragments::row(operand, lane, e) * operand.columns + fragments::column(operand, lane, e);
  }
};

// D += A B, one lane's part. Integer sums are exact, and one that does not fit into int is a fault (a GPU wraps).
// Products of bf16 or f16 are added up in double and rounded once; a GPU may round differently in the last place.
template <const fragments::Instruction &instruction, class TA, class TB, class TD, class Register>
void multiply(TD *d, const Register *a, const Register *b, Place place) {
  static constexpr int M = instruction.M, N = instruction.N, K = instruction.K;
  static constexpr Layout<instruction.A> layout_a;
  static constexpr Layout<instruction.B> layout_b;
  static constexpr Layout<instruction.D> layout_d;
  using Number = decltype(number(TA{}));
  using Sum = std::conditional_t<std::is_same_v<TD, int>, int64_t, double>;
  struct Operands {
    TA a[instruction.A.elements];
    TB b[instruction.B.elements];
    TD d[instruction.D.elements];
    bool overflow;
  } mine = {};

  if (warpSize != instruction.lanes)
    fault(place, "%s takes a wave of %d lanes, this one has %d", instruction.name, instruction.lanes, warpSize);
  if (here.wave_mask != ~uint64_t(0) >> (64 - instruction.lanes))
    fault(place, "%s takes all %d lanes, but the block ends within the wave", instruction.name, instruction.lanes);

  std::memcpy(mine.a, a, sizeof mine.a);
  std::memcpy(mine.b, b, sizeof mine.b);
  std::memcpy(mine.d, d, sizeof mine.d);
  collective(instruction.name, [](void *const *lanes) __attribute__((no_sanitize("undefined"))) {
    Number A[M * K], B[K * N], product[M * N] = {};
    for (int lane = 0; lane < instruction.lanes; ++lane) {
      const auto &from = *static_cast<const Operands *>(lanes[lane]);
      for (int e = 0; e < instruction.A.elements; ++e) A[layout_a.index[lane][e]] = number(from.a[e]);
      for (int e = 0; e < instruction.B.elements; ++e) B[layout_b.index[lane][e]] = number(from.b[e]);
    }
    for (int m = 0; m < M; ++m)
      for (int k = 0; k < K; ++k)
        for (int n = 0; n < N; ++n) product[m * N + n] += A[m * K + k] * B[k * N + n];
    for (int lane = 0; lane < instruction.lanes; ++lane) {
      auto &to = *static_cast<Operands *>(lanes[lane]);
      for (int e = 0; e < instruction.D.elements; ++e) {
        const Sum sum = Sum(to.d[e]) + Sum(product[layout_d.index[lane][e]]);
        to.overflow |= std::is_same_v<TD, int> && (sum > Sum(INT_MAX) || sum < Sum(INT_MIN));
        to.d[e] = TD(sum);
      }
    }
  }, &mine, GPU_FULL_MASK, place);
  if (mine.overflow) fault(place, "%s: an accumulator does not fit into int", instruction.name);
  std::memcpy(d, mine.d, sizeof mine.d);
}

}  // namespace sim

// Templates, so that only those which a kernel calls take time to compile.
#define SIM_MATRIX(name, TA, TB, TD, Register)                                                                  \
  template <int = 0>                                                                                            \
  void name(TD *d, const Register *a, const Register *b, sim::Place place = sim::Place::current()) {            \
    sim::multiply<fragments::name, TA, TB, TD>(d, a, b, place);                                                 \
  }
#define SIM_MATRIX_64(name, T, TD)                                                                              \
  template <int = 0>                                                                                            \
  void name(TD *d, uint64_t a, uint64_t b, sim::Place place = sim::Place::current()) {                          \
    sim::multiply<fragments::name, T, T, TD>(d, &a, &b, place);                                                 \
  }
SIM_MATRIX(mma_m16n8k32_s8, int8_t, int8_t, int, uint32_t)
SIM_MATRIX(mma_m16n8k32_u8s8, uint8_t, int8_t, int, uint32_t)
SIM_MATRIX(mma_m16n8k32_s8u8, int8_t, uint8_t, int, uint32_t)
SIM_MATRIX(mma_m16n8k16_bf16, sim::bf16, sim::bf16, float, uint32_t)
SIM_MATRIX(mma_m16n8k16_f16, sim::f16, sim::f16, float, uint32_t)
SIM_MATRIX_64(mfma_i32_16x16x32_i8, int8_t, int)
SIM_MATRIX_64(mmac_i32_16x16x32_i8, int8_t, int)
SIM_MATRIX_64(mfma_f32_16x16x16_bf16, sim::bf16, float)
SIM_MATRIX_64(mmac_f32_16x16x16_bf16, sim::bf16, float)
#undef SIM_MATRIX
#undef SIM_MATRIX_64
