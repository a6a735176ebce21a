// 2. The recurrence as it is written: one token after the other, the state in registers.
//
//   S <- exp(g) S;  d = beta (v - S^T k);  S += k d^T;  o = S^T q           S: 128 of k x 128 of v, a value head
//
// Columns of S know nothing of each other: a block takes a value head and some of its columns, 4 lanes own a column, 32
// numbers of it each. Two sums over 4 lanes stand between a token and the next; k, q and v come from shared memory, a
// tile of tokens copied while the one before is worked on.
//
// Floor: tokens are a chain. Loads of k from shared memory, two passes over 32 numbers and two rounds of shuffles are
// some 250 cycles a token by count: 70 us at 512 tokens and 280 us at 2048 at 1.8 GHz, where memory alone would take 8
// and 32.
//
//   COLUMNS   of the state in a block
#include "gpu.h"
#include "layer.h"

constexpr int kParts = 4;                   // lanes of a column
constexpr int kOwn = kHeadDim / kParts / 4; // groups of 4 neighbours that a lane owns of its column
constexpr int kThreads = COLUMNS * kParts;
constexpr int kTile = 16;                   // tokens

struct Tile {
  float4 q[kTile][kHeadDim / 4], k[kTile][kHeadDim / 4];
  float v[kTile][COLUMNS];
  float decay[kTile], beta[kTile];
};

// Four sums side by side, so that no addition waits for the one before.
__device__ __forceinline__ float4 multiply_add(float4 x, float4 y, float4 sums) {
  return make_float4(fmaf(x.x, y.x, sums.x), fmaf(x.y, y.y, sums.y), fmaf(x.z, y.z, sums.z), fmaf(x.w, y.w, sums.w));
}
__device__ __forceinline__ float sum_of_column(float4 sums) {
  float x = (sums.x + sums.y) + (sums.z + sums.w);
  x += __shfl_xor_sync(GPU_FULL_MASK, x, 1);
  return x + __shfl_xor_sync(GPU_FULL_MASK, x, 2);
}

// q, k [tokens][key_heads][128]; v, out [tokens][value_heads][128]; g, beta [tokens][value_heads].
// initial, final [value_heads][128 of k][128 of v]; either may be null (zeros, nothing written), and both the same.
// Grid: 128 / COLUMNS x value_heads; block: 4 COLUMNS.
extern "C" __global__ void __launch_bounds__(kThreads)
sequential(const float *__restrict__ q, const float *__restrict__ k, const float *__restrict__ v,
           const float *__restrict__ g, const float *__restrict__ beta, const float *initial, float *final,
           float *__restrict__ out, int tokens, int key_heads, int value_heads) {
  __shared__ Tile tiles[2];
  const int head = blockIdx.y, key_head = head / (value_heads / key_heads), first_column = blockIdx.x * COLUMNS;
  const int part = threadIdx.x % kParts, column = threadIdx.x / kParts;

  const auto copy = [&](int first) {
    Tile &tile = tiles[first / kTile % 2];
    for (int i = threadIdx.x; i < kTile * kHeadDim / 4; i += kThreads) {
      const int t = i / (kHeadDim / 4), d = i % (kHeadDim / 4);
      const bool is_there = first + t < tokens;
      const size_t place = ((size_t)(is_there ? first + t : 0) * key_heads + key_head) * kHeadDim + 4 * d;
      copy_async(&tile.q[t][d], q + place, is_there);
      copy_async(&tile.k[t][d], k + place, is_there);
    }
    for (int i = threadIdx.x; i < kTile * COLUMNS / 4; i += kThreads) {
      const int t = i / (COLUMNS / 4), c = i % (COLUMNS / 4) * 4;
      const bool is_there = first + t < tokens;
      const size_t place = ((size_t)(is_there ? first + t : 0) * value_heads + head) * kHeadDim + first_column + c;
      copy_async(&tile.v[t][c], v + place, is_there);
    }
    copy_commit();
    if (threadIdx.x < kTile && first + threadIdx.x < tokens) {
      const size_t place = (size_t)(first + threadIdx.x) * value_heads + head;
      tile.decay[threadIdx.x] = expf(g[place]), tile.beta[threadIdx.x] = beta[place];
    }
  };

  const size_t place = (size_t)head * kHeadDim * kHeadDim + first_column + column;
  const auto row = [&](int i) { return (size_t)((i * kParts + part) * 4) * kHeadDim; };  // of group i
  float4 state[kOwn];
#pragma unroll
  for (int i = 0; i < kOwn; ++i) {
    const float *from = initial + place + row(i);
    state[i] = initial ? make_float4(from[0], from[kHeadDim], from[2 * kHeadDim], from[3 * kHeadDim])
                       : make_float4(0.f, 0.f, 0.f, 0.f);
  }

  if (tokens > 0) copy(0);
  for (int first = 0; first < tokens; first += kTile) {
    copy_wait<0>();
    __syncthreads();
    if (first + kTile < tokens) copy(first + kTile);
    const Tile &tile = tiles[first / kTile % 2];
    for (int t = 0; t < min(kTile, tokens - first); ++t) {
      const float decay = tile.decay[t];
      float4 key[kOwn], recalled = {};
#pragma unroll
      for (int i = 0; i < kOwn; ++i) {
        key[i] = tile.k[t][i * kParts + part];
        state[i] = scaled(state[i], decay);
        recalled = multiply_add(state[i], key[i], recalled);
      }
      const float change = tile.beta[t] * (tile.v[t][column] - sum_of_column(recalled));
      float4 read = {};
#pragma unroll
      for (int i = 0; i < kOwn; ++i) {
        state[i] = multiply_add(key[i], make_float4(change, change, change, change), state[i]);
        read = multiply_add(state[i], tile.q[t][i * kParts + part], read);
      }
      const float o = sum_of_column(read);
      if (part == 0) out[((size_t)(first + t) * value_heads + head) * kHeadDim + first_column + column] = o;
    }
  }

  if (final) {
#pragma unroll
    for (int i = 0; i < kOwn; ++i) {
      float *to = final + place + row(i);
      to[0] = state[i].x, to[kHeadDim] = state[i].y, to[2 * kHeadDim] = state[i].z, to[3 * kHeadDim] = state[i].w;
    }
  }
}
GPU_KERNEL(sequential)
