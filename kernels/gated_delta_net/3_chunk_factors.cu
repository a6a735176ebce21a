// 3. Chunks of 64 tokens, all at once: what the recurrence needs of a chunk besides the state.
//
//   G = running sum of g;  M = beta_i exp(G_i - G_j) k_i . k_j below the diagonal
//   T = (I + M)^-1 diag(beta);  P = exp(G_i - G_j) q_i . k_j on and below it
//
// derived in kernelbook.ops.gated_delta_net. A block takes a chunk and a key head with its value heads, at most 4: k .
// k and q . k are theirs together, one pass of matrix instructions. The inverse is solved in floats, a thread for each
// of its columns, 16 rows at a time: what is known goes out of the rows behind it, by numbers of M that the whole wave
// reads at once. It takes the place of the half of M that is 0. q, k and k transposed, by a product with the identity,
// are written as terms too, all in the order in which lanes of 4_chunk_scan.cu read them.
//
// G is kept as two floats, for differences of large sums: a gate may all but empty the state in one token, and the next
// ones keep it.
//
// Floor: q and k read, terms of q, k, k transposed (16 heads x 128) and T, P (48 heads x 64) written: 40 KiB a token
// of Qwen3.5-27B with one term, 65 KiB with two, 5 and 8 us at 512 tokens and 20 and 32 us at 2048 at 4.2 TB/s; what
// L2 keeps for the scan costs less. In between, a block is a chain: loads, products, and 64 rows of the inverse, about
// 5 us that only the second block of a multiprocessor hides. Predicted were 8 and 10 us at 512 tokens, where there are
// 128 blocks, 25 and 36 us at 2048; measured on an H200 are 17 us at 512 tokens with one term, 51 and 63 us at 2048.
#include "chunk.h"

constexpr int kWaves = 8;
constexpr int kThreads = kWaves * kLanes;
constexpr int kRowWaves = kChunk / kRows;  // waves that share the rows of k . k and q . k; each takes a part's columns
constexpr int kBlock = 16;  // rows of the inverse that a thread works out before it stores them
constexpr int kOwnTokens = kChunk / kLanes;
constexpr float kLeastGate = -1000.f;  // exp(it) is 0, and sums of 64 are far from overflow
constexpr int kMostHeads = 4;  // value heads of a key head
static_assert(kMostHeads * kChunk <= kThreads && kMostHeads <= kWaves);
static_assert(kWaves == kRowWaves * (kChunk / kPart) && kWaves == kHeadDim / kRows);

using Keys = Part<kChunk>[kHeadDim / kPart];
struct Operands { Keys q, k; };
struct System {  // of a value head, in the same place, once q and k have been multiplied
  // M transposed above the diagonal, its inverse on and below it. The padding spreads a wave's writes over the banks.
  float m[kChunk][kChunk + 4];
  float high[kChunk], low[kChunk], beta[kChunk];  // high + low = G
};

__device__ __forceinline__ void load_run(float (&x)[kRun], const float *from) {
  unrolled<kRun / 4>([&](auto i) {
    const float4 y = reinterpret_cast<const float4 *>(from)[i.value];
    x[4 * i.value] = y.x, x[4 * i.value + 1] = y.y, x[4 * i.value + 2] = y.z, x[4 * i.value + 3] = y.w;
  });
}

// Tile `tile` of the identity, as far as it is not 0: the part of its depth that its rows lie in.
__device__ __forceinline__ Left identity(int tile, int lane) {
  Left left = {};
  unrolled<kVectors>([&](auto v) {
    const int one = dealt((tile * kVectors + v.value) * kColumns + own_row(lane)) % kPart - own_run(lane);
    unrolled<kRun / 2>([&](auto pair) {
      const int place = one - 2 * pair.value;
      left.at[0][v.value][pair.value] = place == 0 ? 0x3f80u : place == 1 ? 0x3f800000u : 0u;
    });
  });
  return left;
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

// q, k [tokens][key_heads][128]; g, beta [tokens][value_heads]; of_keys, of_values [chunks][heads].
// Grid: chunks x key_heads; block: lanes x 8. Dynamic shared memory: Operands, or a System for each value head of a key
// head where that is more.
extern "C" __global__ void __launch_bounds__(kThreads)
chunk_factors(const float *__restrict__ q, const float *__restrict__ k, const float *__restrict__ g,
              const float *__restrict__ beta, OfKeys *__restrict__ of_keys, OfValues *__restrict__ of_values,
              int tokens, int key_heads, int value_heads) {
  GPU_DYNAMIC_SHARED(char, shared);
  Operands &operands = *reinterpret_cast<Operands *>(shared);
  System *systems = reinterpret_cast<System *>(shared);
  const int lane = threadIdx.x, wave = threadIdx.y, thread = wave * kLanes + lane;
  const int chunk = blockIdx.x, key_head = blockIdx.y, first = chunk * kChunk, group = value_heads / key_heads;
  OfKeys &keys = of_keys[(size_t)chunk * key_heads + key_head];
  OfValues *values = of_values + (size_t)chunk * value_heads + key_head * group;

  // Gates are on their way while q and k are worked on: a wave has those of a value head.
  float own_g[kOwnTokens], own_beta[kOwnTokens];
  unrolled<kOwnTokens>([&](auto i) {
    const int token = first + lane * kOwnTokens + i.value;
    const bool is_there = wave < group && token < tokens;
    const size_t place = (size_t)token * value_heads + key_head * group + wave;
    own_g[i.value] = is_there ? g[place] : 0.f, own_beta[i.value] = is_there ? beta[place] : 0.f;
  });

  // ---- q and k as terms, here and for the scan ----

  constexpr int kTiles = kChunk / kColumns;
  unrolled<kHeadDim / kPart * kTiles / kWaves>([&](auto i) {
    const int part = (i.value * kWaves + wave) / kTiles, tile = (i.value * kWaves + wave) % kTiles;
    const int token = first + dealt(tile * kColumns + own_row(lane));
    const size_t place = ((size_t)token * key_heads + key_head) * kHeadDim + part * kPart + own_run(lane);
    float of_q[kRun] = {}, of_k[kRun] = {};
    if (token < tokens) load_run(of_q, q + place), load_run(of_k, k + place);
    Run run;
    split_run(run, [&](auto j) { return of_q[j.value]; });
    store_run(operands.q[part], tile, lane, run), store_run(keys.recall[part].recall.q, tile, lane, run);
    split_run(run, [&](auto j) { return of_k[j.value]; });
    store_run(operands.k[part], tile, lane, run), store_run(keys.recall[part].recall.k, tile, lane, run);
  });
  __syncthreads();

  // ---- k . k and q . k, 16 rows of 32 numbers for a wave, and k transposed, 16 rows for a wave ----

  const int row_tile = wave % kRowWaves, part = wave / kRowWaves;
  Sums<kPart> kk = {}, qk = {};
#pragma unroll 1
  for (int depth = 0; depth < kHeadDim / kPart; ++depth) {
    const Part<kChunk> &of_k = operands.k[depth];
    multiply(kk, load_left(of_k, row_tile, lane), of_k, part * kPartTiles, lane);
    multiply(qk, load_left(operands.q[depth], row_tile, lane), of_k, part * kPartTiles, lane);
  }
  Sums<kChunk> across = {};
  multiply(across, identity(wave, lane), operands.k[wave * kRows / kPart], 0, lane);
  store_left(keys.across[0].across, wave, lane, as_left<0>(across));
  store_left(keys.across[1].across, wave, lane, as_left<1>(across));
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
      values[wave].since_start[t] = expf(high), values[wave].to_end[t] = expf(last - total);
    });
  }
  __syncthreads();

  // ---- M, and P, which is done. k . k is its own transpose: what a lane has are neighbours of a row of that of M ----

  const auto row = [&](int v) { return dealt((row_tile * kVectors + v) * kColumns + own_row(lane)); };
  const int first_column = part * kPart + own_run(lane);
  for (int head = 0; head < group; ++head) {
    System &system = systems[head];
    Sums<kPart> p;
    each(p, [&](float &number, int v, int r, int j) {
      number = first_column + j <= row(v) ? at(qk, v, r, j) * decay(system, row(v), first_column + j) : 0.f;
    });
    store_left(values[head].p.factor[part], row_tile, lane, as_left<0>(p));
    Sums<kPart> m;
    each(m, [&](float &number, int v, int r, int j) {
      const int changed = first_column + j, by = row(v);
      number = changed > by ? at(kk, v, r, j) * decay(system, changed, by) * system.beta[changed] : 0.f;
    });
    unrolled<kVectors>([&](auto v) {
      unrolled<kRun / 4>([&](auto four) {
        const auto m_at = [&](int j) { return at(m, v.value, 0, 4 * four.value + j); };
        *reinterpret_cast<float4 *>(&system.m[row(v.value)][first_column + 4 * four.value]) =
            make_float4(m_at(0), m_at(1), m_at(2), m_at(3));
      });
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

  constexpr int kRuns = kChunk / kPart * kTiles;  // of a head, for a wave
  for (int i = wave; i < group * kRuns; i += kWaves) {
    const int head = i / kRuns, part = i % kRuns / kTiles, tile = i % kTiles;
    const int row = dealt(tile * kColumns + own_row(lane)), column = part * kPart + own_run(lane);
    Run run;
    split_run(run, [&](auto j) {
      const int at = column + j.value;
      return at <= row ? systems[head].m[row][at] * systems[head].beta[at] : 0.f;
    });
    store_run(values[head].t.factor[part], tile, lane, run);
  }
}
GPU_KERNEL(chunk_factors)
