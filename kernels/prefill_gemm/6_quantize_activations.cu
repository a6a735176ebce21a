// 6. Activations to int8, one scale for a row's 32 neighbouring columns: what designs B pay before they begin.
//
// Eight lanes share a group, four values each. Rounding is that of formats.quantize_activations: scale = largest / 127,
// code = value / scale to the nearest, half to even. A NaN or an infinity among the 32 makes their scale one, which
// then spoils the sums of its row as it would have itself: bits of |x| compare like the numbers, with NaN above all.
#include "gpu.h"

constexpr int kThreads = 256, kGroupLanes = 8;

// x, codes [count], scales [count / 32]; count a multiple of 32.
extern "C" __global__ void __launch_bounds__(kThreads)
quantize_activations(const float *__restrict__ x, int8_t *__restrict__ codes, float *__restrict__ scales,
                     size_t count) {
  const size_t at = ((size_t)blockIdx.x * kThreads + threadIdx.x) * 4;
  const bool is_there = at < count;  // for all lanes of a group or for none; all take part in the shuffles
  const float4 value = is_there ? *reinterpret_cast<const float4 *>(x + at) : make_float4(0.f, 0.f, 0.f, 0.f);

  const auto size = [](float v) { return __float_as_uint(v) & 0x7fffffffu; };
  unsigned largest = max(max(size(value.x), size(value.y)), max(size(value.z), size(value.w)));
#pragma unroll
  for (int flip = kGroupLanes / 2; flip > 0; flip /= 2)
    largest = max(largest, __shfl_xor_sync(GPU_FULL_MASK, largest, flip));
  if (!is_there) return;

  const float scale = __uint_as_float(largest) / 127.f, step = scale == 0.f ? 1.f : scale;
  const auto code = [&](float v) { return (signed char)__float2int_rn(fminf(fmaxf(v / step, -127.f), 127.f)); };
  *reinterpret_cast<char4 *>(codes + at) = make_char4(code(value.x), code(value.y), code(value.z), code(value.w));
  if (threadIdx.x % kGroupLanes == 0) scales[at / 32] = scale;
}
GPU_KERNEL(quantize_activations)
