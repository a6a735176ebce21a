// 3. Chunks of 64 tokens, all at once: what the recurrence needs of a chunk besides the state.
//
//   G = running sum of g;  M = beta_i exp(G_i - G_j) k_i . k_j below the diagonal
//   T = (I + M)^-1 diag(beta);  P = exp(G_i - G_j) q_i . k_j on and below it
//
// derived in kernelbook.ops.gated_delta_net. A block takes a chunk and a key head with its value heads, at most 4: k .
// k and q . k are theirs together, one pass of matrix instructions. The inverse is solved in floats, a thread for each
// of its columns, 16 rows at a time: what is known goes out of the rows behind it, by numbers of M that the whole wave
// reads at once. It takes the place of the half of M that is 0. q, k and k transposed are written as terms too, as
// 4_chunk_scan.cu multiplies them.
//
// G is kept as two floats, for differences of large sums: a gate may all but empty the state in one token, and the next
// ones keep it.
//
// Floor: q and k read, terms of q, k, k transposed (16 heads x 128) and T, P (48 heads x 64) written: 64 KiB a token of
// Qwen3.5-27B with two terms, 8 us at 512 tokens and 32 us at 2048 at 4.2 TB/s; what L2 keeps for the scan costs less.
#include "chunk.h"

constexpr int kWaves = 8;
constexpr int kThreads = kWaves * kLanes;
constexpr int kRowWaves = kChunk / kRows;  // waves that share the rows of the products; the others take more columns
constexpr int kColumnTiles = kChunk / (kWaves / kRowWaves) / kColumns;
constexpr int kBlock = 16;  // rows of T that a thread works out before it stores them
constexpr int kOwnTokens = kChunk / kLanes;
constexpr float kLeastGate = -1000.f;  // exp(it) is 0, and sums of 64 are far from overflow
constexpr int kMostHeads = 4;  // value heads of a key head
static_assert(kMostHeads * kChunk <= kThreads && kMostHeads <= kWaves);

using Products = Tiles<1, kColumnTiles>;

struct Operands { Shared<kChunk, kHeadDim> q, k; };
struct System {  // of a value head, in the same place, once q and k have been multiplied
  // M transposed above the diagonal, its inverse on and below it. The padding spreads a wave's writes over the banks.
  float m[kChunk][kChunk + 4];
  float high[kChunk], low[kChunk], beta[kChunk];  // high + low = G
};

// The run of 8 numbers x(0), x(1), ... as terms.
template <class F> __device__ __forceinline__ void split_run(uint32_t (&runs)[TERMS][kRun / 2], F x) {
  unrolled<kRun / 2>([&](auto pair) {
    uint32_t terms[TERMS];
    split(x(2 * pair.value), x(2 * pair.value + 1), terms);
    unrolled<TERMS>([&](auto term) { runs[term.value][pair.value] = terms[term.value]; });
  });
}
__device__ __forceinline__ void load_run(float (&x)[kRun], const float *from) {  // null: zeros
  unrolled<kRun / 4>([&](auto i) {
    const float4 y = from ? reinterpret_cast<const float4 *>(from)[i.value] : make_float4(0.f, 0.f, 0.f, 0.f);
    x[4 * i.value] = y.x, x[4 * i.value + 1] = y.y, x[4 * i.value + 2] = y.z, x[4 * i.value + 3] = y.w;
  });
}

// A known number goes out of the rows behind it: x[i] -= m[i] known, from row `first` on.
template <int first> __device__ __forceinline__ void subtract(float (&x)[kBlock], const float *m, float known) {
  unrolled<kBlock / 4>([&](auto quad) {
    constexpr int i = 4 * quad.value;
    if constexpr (i + 3 >= first) {
      const float4 y = *reinterpret_cast<const float4 *>(m + i);
      if constexpr (i >= first) x[i] = fmaf(-y.x, known, x[i]);
      if constexpr (i + 1 >= first) x[i + 1] = fmaf(-y.y, known, x[i + 1]);
      if constexpr (i + 2 >= first) x[i + 2] = fmaf(-y.z, known, x[i + 2]);
      x[i + 3] = fmaf(-y.w, known, x[i + 3]);
    }
  });
}

// exp(G_i - G_j) for i >= j.
__device__ __forceinline__ float decay(const System &system, int i, int j) {
  const float high = system.high[i] - system.high[j], low = system.low[i] - system.low[j];
  return fast_exp2((high + low) * 1.44269504f);
}

// q, k [tokens][key_heads][128]; g, beta [tokens][value_heads]. The rest: [chunks][heads] of what they hold.
// Grid: chunks x key_heads; block: lanes x 8. Dynamic shared memory: Operands, or a System for each value head of a key
// head where that is more.
extern "C" __global__ void __launch_bounds__(kThreads)
chunk_factors(const float *__restrict__ q, const float *__restrict__ k, const float *__restrict__ g,
              const float *__restrict__ beta, Keys *__restrict__ q_terms, Keys *__restrict__ k_terms,
              KeysAcross *__restrict__ k_across, Factor *__restrict__ t_terms, Factor *__restrict__ p_terms,
              Decays *__restrict__ decays, int tokens, int key_heads, int value_heads) {
  GPU_DYNAMIC_SHARED(char, shared);
  Operands &operands = *reinterpret_cast<Operands *>(shared);
  System *systems = reinterpret_cast<System *>(shared);
  const int lane = threadIdx.x, wave = threadIdx.y, thread = wave * kLanes + lane;
  const int chunk = blockIdx.x, key_head = blockIdx.y, first = chunk * kChunk, group = value_heads / key_heads;
  const size_t keys = (size_t)chunk * key_heads + key_head, values = (size_t)chunk * value_heads + key_head * group;

  // Gates are on their way while q and k are worked on: a wave has those of a value head.
  float own_g[kOwnTokens], own_beta[kOwnTokens];
  unrolled<kOwnTokens>([&](auto i) {
    const int token = first + lane * kOwnTokens + i.value;
    const bool is_there = wave < group && token < tokens;
    const size_t place = (size_t)token * value_heads + key_head * group + wave;
    own_g[i.value] = is_there ? g[place] : 0.f, own_beta[i.value] = is_there ? beta[place] : 0.f;
  });

  // ---- q and k as terms, here and for the scan ----

  for (int i = thread; i < kChunk * kHeadDim / kRun; i += kThreads) {
    const int t = i / (kHeadDim / kRun), d = i % (kHeadDim / kRun) * kRun;
    const size_t place = ((size_t)(first + t) * key_heads + key_head) * kHeadDim + d;
    const bool is_there = first + t < tokens;
    float of_q[kRun], of_k[kRun];
    load_run(of_q, is_there ? q + place : nullptr), load_run(of_k, is_there ? k + place : nullptr);
    uint32_t runs[TERMS][kRun / 2];
    split_run(runs, [&](int j) { return of_q[j]; });
    operands.q.write_run(t, d, runs), q_terms[keys].write_run(t, d, runs);
    split_run(runs, [&](int j) { return of_k[j]; });
    operands.k.write_run(t, d, runs), k_terms[keys].write_run(t, d, runs);
  }
  __syncthreads();
  for (int i = thread; i < kChunk / kRun * kHeadDim; i += kThreads) {
    const int d = i % kHeadDim, t = i / kHeadDim * kRun;
    uint32_t runs[TERMS][kRun / 2];
    unrolled<TERMS>([&](auto term) {
      unrolled<kRun / 2>([&](auto pair) {
        const auto bits = [&](int t) { return (uint32_t)operands.k.at[term.value][t][operands.k.place(t, d)]; };
        runs[term.value][pair.value] = bits(t + 2 * pair.value) | bits(t + 2 * pair.value + 1) << 16;
      });
    });
    k_across[keys].write_run(d, t, runs);
  }

  // ---- k . k and q . k ----

  const int first_row = wave % kRowWaves * kRows, first_column = wave / kRowWaves * kColumnTiles * kColumns;
  Products kk = {}, qk = {};
  Runs<kColumnTiles> of_k;
  read(of_k, operands.k, first_column, 0, lane);
  multiply(kk, operands.k, first_row, operands.k, first_column, of_k, lane);
  multiply(qk, operands.q, first_row, operands.k, first_column, of_k, lane);
  __syncthreads();

  // ---- gates ----

  if (wave < group) {
    double sum[kOwnTokens];
    unrolled<kOwnTokens>([&](auto i) {
      const double own = own_g[i.value] < kLeastGate ? kLeastGate : own_g[i.value];  // a NaN stays one
      sum[i.value] = own;
      if constexpr (i.value > 0) sum[i.value] += sum[i.value - 1];
    });
    double before = sum[kOwnTokens - 1];
    for (int delta = 1; delta < kLanes; delta *= 2) {
      const double other = __shfl_up_sync(GPU_FULL_MASK, before, delta);
      before += lane >= delta ? other : 0.;
    }
    const double last = __shfl_sync(GPU_FULL_MASK, before, kLanes - 1);
    before -= sum[kOwnTokens - 1];
    unrolled<kOwnTokens>([&](auto i) {
      const int t = lane * kOwnTokens + i.value;
      const double total = before + sum[i.value];
      const float high = total;
      systems[wave].high[t] = high, systems[wave].low[t] = total - high, systems[wave].beta[t] = own_beta[i.value];
      decays[values + wave].since_start[t] = expf(high), decays[values + wave].to_end[t] = expf(last - total);
    });
  }
  __syncthreads();

  // ---- M, and P, which is done ----

  for (int head = 0; head < group; ++head) {
    System &system = systems[head];
    Products p;
    unrolled<kColumnTiles>([&](auto n) {
      unrolled<4>([&](auto i) { p[0][n.value][i.value] = qk[0][n.value][i.value]; });
    });
    each(p, lane, [&](float &value, int row, int column) {
      const int i = first_row + row, j = first_column + column;
      value = j <= i ? value * decay(system, i, j) : 0.f;
    });
    write(p_terms[values + head], first_row, first_column, p, lane);
    each(kk, lane, [&](float value, int row, int column) {
      const int i = first_row + row, j = first_column + column;
      if (j < i) system.m[j][i] = value * decay(system, i, j) * system.beta[i];
    });
  }
  __syncthreads();

  // ---- (I + M)^-1, a column for a thread, into the half of the array that M leaves free ----

  if (thread < group * kChunk) {
    auto &m = systems[thread / kChunk].m;
    const int column = thread % kChunk, wave_column = column / kLanes * kLanes;  // above it a wave has only zeros
#pragma unroll 1
    for (int block = wave_column; block < kChunk; block += kBlock) {
      float x[kBlock];
      unrolled<kBlock>([&](auto i) { x[i.value] = block + i.value == column ? 1.f : 0.f; });
#pragma unroll 4
      for (int known = wave_column; known < block; ++known)
        subtract<0>(x, &m[known][block], known >= column ? m[known][column] : 0.f);
      unrolled<kBlock - 1>([&](auto known) {
        subtract<known.value + 1>(x, &m[block + known.value][block], x[known.value]);
      });
      unrolled<kBlock>([&](auto i) {
        if (block + i.value >= column) m[block + i.value][column] = x[i.value];
      });
    }
  }
  __syncthreads();

  // ---- T ----

  for (int i = thread; i < group * kChunk * kChunk / kRun; i += kThreads) {
    const int row = i / (kChunk / kRun) % kChunk, first = i % (kChunk / kRun) * kRun;
    const int head = i / (kChunk / kRun) / kChunk;
    uint32_t runs[TERMS][kRun / 2];
    split_run(runs, [&](int j) {
      return first + j <= row ? systems[head].m[row][first + j] * systems[head].beta[first + j] : 0.f;
    });
    t_terms[values + head].write_run(row, first, runs);
  }
}
GPU_KERNEL(chunk_factors)
