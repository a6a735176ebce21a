// What decode and prefill share: what is multiplied with V, how a query becomes INT8, where a token lies.
//
// Constants of a build:
//   HEAD_DIM       values of a vector: 64, 96, 128 or 256
//   PV             what P V multiplies, one of enum Pv
//   SWAPPED        0: rows x cache, Q K^T and P V;  1: both transposed, cache x rows, K Q^T and V^T P^T;
//   MATRIX         mma, mfma or mmac; where these two are left out, the target's own
//   SCALE_TOKENS   tokens under one scale of the weights: 32, one step, or a power of two above
// and, for what the article found to be wrong:
//   LOGICAL_GROUPS 1: scales are taken over tokens 0-31 and 32-63 of a tile instead of those that a step multiplies
//   READ           bytes of each 16 of V that are read; 8 leaves out half of the tokens
//   COMMON_SCALE   1: one scale of V for all tokens of a partition, taken out of the sum
#pragma once
#include "operands.h"

enum Pv {
  INT8,              // W = P sV quantized to -127..127
  UINT8,             // W quantized to 0..255, by a mixed-sign instruction
  UINT8_OFFSET,      // the same without one: (W - 128) V + 128 sum V
  BF16,              // W in bf16; the codes of V are exact in bf16
  BF16_DEQUANTIZED,  // P in bf16, V in bf16 made in registers from codes and scales
  BF16_PAGES,        // P in bf16, V in bf16 from pages of its own
};

template <Pv pv, class Matrix, bool swapped> __host__ __device__ constexpr auto pv_instruction() {
  if constexpr (pv >= BF16) return typename Matrix::Bf16{};
  else if constexpr (pv != UINT8) return typename Matrix::Signed{};
  else if constexpr (swapped) return typename Matrix::UnsignedB{};
  else return typename Matrix::UnsignedA{};
}

constexpr Pv kPv = PV;
constexpr bool kInteger = kPv <= UINT8_OFFSET;
constexpr bool kFolded = kPv <= BF16;  // the scales of V are in the weights
constexpr float kLargest = kPv == INT8 ? 127.f : 255.f;
constexpr int kScaleTokens = SCALE_TOKENS;
using Weight = decltype([] { if constexpr (kInteger) return uint8_t{}; else return uint16_t{}; }());

using QK = Product<MATRIX::Signed, SWAPPED>;
using PxV = Product<decltype(pv_instruction<kPv, MATRIX, SWAPPED>()), SWAPPED>;
constexpr int kRows = QK::Rows::count;       // of Q, in one product
constexpr int kKeys = QK::Cache::count;      // tokens of K, in one product
constexpr int kColumns = PxV::Cache::count;  // columns of V, in one product
constexpr int kUnit = 16;                    // tokens of V that a lane loads of a column at once
constexpr int kTile = 64;                    // tokens that a round of such loads brings
// Neighbouring d that a lane reads of a token of K; a part is what a round of reads covers.
constexpr int kQkRun = HEAD_DIM % 64 == 0 ? 16 : 8;
constexpr int kQkPart = QK::Rows::length / QK::Rows::run * kQkRun;
constexpr int kQkParts = HEAD_DIM / kQkPart;
constexpr float kNone = -3e38f;  // the score of a token that is not there: less than any, and no NaN in a difference

__device__ __forceinline__ float larger(float a, float b) { return fmaxf(a, b); }
__device__ __forceinline__ float sum(float a, float b) { return a + b; }
template <class F> __device__ __forceinline__ float over_wave(float x, F f) {
  for (int flip = warpSize / 2; flip > 0; flip /= 2) x = f(x, __shfl_xor_sync(GPU_FULL_MASK, x, flip));
  return x;
}
__device__ __forceinline__ float or_zero(float m) { return m == kNone ? 0.f : m; }

// round(x) to the nearest integer, half to even, of |x| < 2^22: in x + 1.5 * 2^23 the last bit is worth 1, and the low
// bits are the integer. Adding fused to a product rounds the exact product, once.
constexpr float kShift = 12582912.f;
constexpr int kShiftBits = 0x4b400000;
__device__ __forceinline__ uint32_t rounded_bits(float x, float factor) {
  return __float_as_uint(fmaf(x, factor, kShift));
}

// The same backwards: sums start at the bits of 1.5 * 2^23, and as long as they stay below 2^22 are read as floats with
// one subtraction. At most 256 products of 127 * 127 are.
constexpr bool kSumsAreSmall = kInteger && kScaleTokens * (kLargest == 127.f ? 127 : 255) * 127 < 1 << 22;
__device__ __forceinline__ PxV::Sum start_of_sum() {
  if constexpr (kSumsAreSmall) return kShiftBits;
  else return 0;
}
__device__ __forceinline__ float sum_as_float(PxV::Sum x) {
  if constexpr (kSumsAreSmall) return __int_as_float(x) - kShift;
  else return float(x);
}

// 16 codes as bf16, each multiplied by scale[i] where the weights do not hold the scales. A byte moved into a float's
// last bits, minus what is left when it is 0, is the byte as a float; the upper half of a small integer is its bf16.
__device__ __forceinline__ void widen(uint32_t *bf16, const uint32_t *codes, const float *scale) {
  unrolled<kUnit / 4>([&](auto word) {
    const uint32_t bytes = codes[word.value] ^ 0x80808080u;
    float x[4];
    unrolled<4>([&](auto i) {
      x[i.value] = __uint_as_float(__byte_perm(bytes, 0x4b000000u, 0x7440 + i.value)) - 8388736.f;
    });
    unrolled<2>([&](auto pair) {
      const float low = x[2 * pair.value], high = x[2 * pair.value + 1];
      const float *scales = scale + 4 * word.value + 2 * pair.value;
      if constexpr (kFolded)
        bf16[2 * word.value + pair.value] = __byte_perm(__float_as_uint(low), __float_as_uint(high), 0x7632);
      else
        bf16[2 * word.value + pair.value] = bf16_pair(low * scales[0], high * scales[1]);
    });
  });
}

// Where 16 neighbouring tokens of one KV head begin: in [block][kv_head][token], and in V's pages, both below 0 where
// there are none.
struct Places { long long token, value; };
__device__ __forceinline__ Places find_places(const int *block_table, int max_blocks, int token, int length,
                                              int block_size, int kv_heads, int head) {
  const int block = token / block_size, offset = token - block * block_size;
  const int page = block < max_blocks ? block_table[block] : 0;  // on its way while the length still is
  if (token >= length) return {-1, -1};
  const long long row = ((long long)page * kv_heads + head) * block_size;
  return {row + offset, row * HEAD_DIM + offset};
}

// The query rows of one KV head: row r is query r / group, member r % group.
struct QueryRows {
  int queries, heads, group, head, batch, length, offset;  // offset: query i sees tokens 0 .. offset + i
  __device__ __forceinline__ int count() const { return queries * group; }
  __device__ __forceinline__ int query(int r) const { return r < group ? 0 : r / group; }  // mostly without dividing
  __device__ __forceinline__ size_t place(int r) const {
    return ((size_t)batch * queries + query(r)) * heads + head * group + r - query(r) * group;
  }
  __device__ __forceinline__ int seen(int r) const { return max(0, min(length, offset + query(r) + 1)); }
};
__device__ __forceinline__ QueryRows query_rows(int queries, int group, int kv_heads, int head, int batch,
                                                const int *lengths, const int *offsets) {
  const int length = lengths[batch];
  return {queries, group * kv_heads, group, head, batch, length, offsets ? offsets[batch] : length};
}

// A row of Q, by one wave: its values, then codes, and what an integer score is multiplied by besides the key's scale.
// Scores count in powers of 2: softmax_scale has the factor log2(e).
using QueryRow = float[HEAD_DIM / 32];
__device__ __forceinline__ void load_query(QueryRow &row, const float *q) {  // null: a row that is not there
#pragma unroll
  for (int i = 0; i < HEAD_DIM / 32; ++i) {
    const int d = threadIdx.x + i * warpSize;
    row[i] = q && d < HEAD_DIM ? q[d] : 0.f;
  }
}
// What a row whose largest |value| is `top` is multiplied by and what its codes are worth; a row of no more than
// kSmallestTop counts as zeros.
constexpr float kSmallestTop = 0x1p-100f;
struct QueryScale {
  float scale, inverse;
  __device__ __forceinline__ uint32_t bits(float x) const { return rounded_bits(x, inverse); }  // low byte: the code
};
__device__ __forceinline__ QueryScale query_scale(float top) {
  return top > kSmallestTop ? QueryScale{top * (1.f / 127.f), 127.f / top} : QueryScale{0.f, 0.f};
}
__device__ __forceinline__ float quantize_query(const QueryRow &row, int8_t *codes, float softmax_scale) {
  float top = 0.f;
#pragma unroll
  for (int i = 0; i < HEAD_DIM / 32; ++i) top = fmaxf(top, fabsf(row[i]));
  const QueryScale scale = query_scale(over_wave(top, larger));
#pragma unroll
  for (int i = 0; i < HEAD_DIM / 32; ++i) {
    const int d = threadIdx.x + i * warpSize;
    if (d < HEAD_DIM) codes[d] = (int8_t)scale.bits(row[i]);
  }
  return scale.scale * softmax_scale;
}

// ---- P V of one tile: the same for decode and prefill ----

constexpr int kValueBytes = kPv == BF16_PAGES ? 2 : 1;
constexpr int kValueWords = kUnit * kValueBytes / 4;           // registers of a run of V
constexpr int kWeightWords = kUnit * sizeof(Weight) / 4;       // and of a run of weights
struct OpenSums { PxV::Sum products[4], values[4]; };          // of a scale that covers more than one step

// A tile's weights, a run of tokens for each row that the lane holds, times its values, a run for each column.
// close(i, scale, sum): element i of the sums under scale number `scale` is complete. In bf16 `output` is added to.
template <class P = PxV, class Close>
__device__ __forceinline__ void multiply_tile(float (&output)[4], OpenSums &open, int tile,
                                              const uint32_t (&weights)[P::Rows::vectors][kWeightWords],
                                              const uint32_t (&values)[P::Cache::vectors][kValueWords],
                                              const float *v_scale, Close close) {
  constexpr int kStepTokens = P::Rows::length, kSteps = kTile / kStepTokens;
  constexpr int kRegisters = P::Rows::elements * sizeof(Weight) / 4;
  uint32_t bf16[P::Cache::vectors][kUnit / 2];
  if constexpr (kPv == BF16 || kPv == BF16_DEQUANTIZED)
    unrolled<P::Cache::vectors>([&](auto v) { widen(bf16[v.value], values[v.value], v_scale); });
  unrolled<kSteps>([&](auto step) {
    uint32_t a[kRegisters], b[P::Cache::elements * sizeof(Weight) / 4];
    P::Rows::template feed<step.value>(a, weights);
    if constexpr (kPv == BF16 || kPv == BF16_DEQUANTIZED) P::Cache::template feed<step.value>(b, bf16);
    else P::Cache::template feed<step.value>(b, values);
    if constexpr (!kInteger) {
      P::multiply(output, a, b);
    } else {
      const int token = tile * kTile + step.value * kStepTokens;  // counted in the order of steps
      unrolled<4>([&](auto i) {
        if (token % kScaleTokens == 0) open.products[i.value] = start_of_sum(), open.values[i.value] = 0;
      });
      P::multiply(open.products, a, b);
      if constexpr (kPv == UINT8_OFFSET) {
        uint32_t ones[kRegisters];
        unrolled<kRegisters>([&](auto r) { ones[r.value] = 0x01010101; });
        P::multiply(open.values, ones, b);
      }
      if ((token + kStepTokens) % kScaleTokens != 0) return;
      unrolled<4>([&](auto i) {
        if constexpr (kPv == UINT8_OFFSET) open.products[i.value] += 128 * open.values[i.value];
        close(i, token / kScaleTokens, open.products[i.value]);
      });
    }
  });
}
