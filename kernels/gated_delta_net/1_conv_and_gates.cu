// 1. Everything before the recurrence, in one pass over the tokens.
//
//   q, k, v = silu(causal depthwise convolution of x with 4 taps);  q, k are normalized, q is scaled by 128^-0.5
//   g = -exp(a_log) softplus(a + dt_bias), the logarithm of the decay;  beta = sigmoid(b)
//
// 32 lanes own the 128 channels of one head, 4 each, and keep a run of tokens in registers, so that x is read once, but
// for 3 tokens before each run. A norm is a butterfly over the same lanes. The lanes that begin
// a sequence are the only ones to read the convolution's state, and so they may also write the new one in its place.
//
// Floor: what is read and written, x, q, k and v, over the memory's bandwidth: 80 KiB a token of Qwen3.5-27B, 10 us at
// 512 tokens and 40 us at 2048 at 4.2 TB/s.
#include "gpu.h"
#include "layer.h"

constexpr int kThreads = 256;
constexpr int kHeads = kThreads / kHeadLanes;  // of a block
constexpr int kRun = 8;                        // tokens
constexpr float kEpsilon = 1e-6f;

// log(1 + e^x), to a few ulp also where it is next to nothing.
__device__ __forceinline__ float softplus(float x) {
  const float y = expf(-fabsf(x)), sum = 1.f + y;
  const float log1p = sum == 1.f ? y : logf(sum) * (y / (sum - 1.f));  // the rounding of the sum cancels
  return x > 0.f ? x + log1p : log1p;
}

__device__ __forceinline__ void gates(const float *a, const float *b, const float *a_log, const float *dt_bias,
                                      float *g, float *beta, int first, int end, int heads, int64_t stride) {
  for (int i = threadIdx.x; i < (end - first) * heads; i += kThreads) {
    const int head = i % heads;
    const size_t from = (first + i / heads) * stride + head, place = (size_t)first * heads + i;
    g[place] = -expf(a_log[head]) * softplus(a[from] + dt_bias[head]);
    beta[place] = sigmoid(b[from]);
  }
}

// x [tokens][heads][128], heads = 2 key_heads + value_heads: those of q, of k, of v; conv_weight [heads][128][4], the
// last tap for the token itself. initial, final [3][heads][128]: the last tokens' x, oldest first; either may be null
// (zeros, nothing written), and both the same. a, b, g, beta [tokens][value_heads]; a_log, dt_bias [value_heads].
// Tokens of x are x_stride numbers apart, those of a and of b gate_stride: parts of a fused projection's rows.
// q, k [tokens][key_heads][128]; v [tokens][value_heads][128].
// Grid: for each run of 8 tokens, and for one run where there are none, ceil(heads / 8) blocks and one for the gates.
extern "C" __global__ void __launch_bounds__(kThreads)
conv_and_gates(const float *__restrict__ x, const float *__restrict__ conv_weight, const float *initial, float *final,
               const float *__restrict__ a, const float *__restrict__ b, const float *__restrict__ a_log,
               const float *__restrict__ dt_bias, float *__restrict__ q, float *__restrict__ k, float *__restrict__ v,
               float *__restrict__ g, float *__restrict__ beta, int tokens, int key_heads, int value_heads,
               int64_t x_stride, int64_t gate_stride) {
  const int heads = 2 * key_heads + value_heads, head_blocks = (heads + kHeads - 1) / kHeads;
  const int run = blockIdx.x / (head_blocks + 1), head_block = blockIdx.x % (head_blocks + 1);
  const int first = run * kRun, end = min(first + kRun, tokens);
  if (head_block == head_blocks) {
    gates(a, b, a_log, dt_bias, g, beta, first, end, value_heads, gate_stride);
    return;
  }
  const int own = head_block * kHeads + threadIdx.x / kHeadLanes;
  const bool is_there = own < heads;
  const int head = is_there ? own : heads - 1;  // lanes without a head follow one, since whole waves shuffle
  const size_t channel = (size_t)head * kHeadDim + threadIdx.x % kHeadLanes * 4, stride = (size_t)heads * kHeadDim;

  const auto zero = [] { return make_float4(0.f, 0.f, 0.f, 0.f); };  // a value: an object would go to AMD's stack
  const auto input = [&](int token) {  // from the state before the first token
    if (token >= 0) return load4(x + token * x_stride + channel);
    return initial ? load4(initial + (token + kTaps - 1) * stride + channel) : zero();
  };
  const float4 weight[4] = {load4(conv_weight + channel * kTaps), load4(conv_weight + (channel + 1) * kTaps),
                            load4(conv_weight + (channel + 2) * kTaps), load4(conv_weight + (channel + 3) * kTaps)};
  float4 rows[kTaps - 1 + kRun];  // all on their way at once
#pragma unroll
  for (int i = 0; i < kTaps - 1 + kRun; ++i) {
    const int token = first + i - (kTaps - 1);
    rows[i] = token < end ? input(token) : zero();
  }
  if (final && run == 0) {
    float4 last[kTaps - 1];
    for (int i = 0; i < kTaps - 1; ++i) last[i] = input(tokens + i - (kTaps - 1));
    for (int i = 0; i < kTaps - 1 && is_there; ++i) store4(final + i * stride + channel, last[i]);
  }
  const bool is_q = head < key_heads, is_k = !is_q && head < 2 * key_heads;
  float *out = is_q ? q : is_k ? k : v;
  const int out_head = is_q ? head : is_k ? head - key_heads : head - 2 * key_heads;
  const size_t out_stride = (size_t)(is_q || is_k ? key_heads : value_heads) * kHeadDim;
  out += (size_t)out_head * kHeadDim + threadIdx.x % kHeadLanes * 4;

#pragma unroll
  for (int i = 0; i < kRun; ++i) {
    const float4 &oldest = rows[i], &older = rows[i + 1], &old = rows[i + 2], &now = rows[i + 3];
    float4 y = {silu(convolve(weight[0], oldest.x, older.x, old.x, now.x)),
                silu(convolve(weight[1], oldest.y, older.y, old.y, now.y)),
                silu(convolve(weight[2], oldest.z, older.z, old.z, now.z)),
                silu(convolve(weight[3], oldest.w, older.w, old.w, now.w))};
    const float squares = sum_of_head(y.x * y.x + y.y * y.y + y.z * y.z + y.w * y.w);
    if (is_q || is_k) y = scaled(y, (is_q ? kQueryScale : 1.f) / sqrtf(squares + kEpsilon));
    if (is_there && first + i < end) store4(out + (first + i) * out_stride, y);
  }
}
GPU_KERNEL(conv_and_gates)
