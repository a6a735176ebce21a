// What the prefill kernels share: the rows of a block, and where the tokens of a tile lie.
#pragma once
#include "attention.h"

// The query rows of one KV head: row r is query r / group, member r % group.
struct QueryRows {
  int queries, heads, group, head, batch, length, offset;  // offset: query i sees tokens 0 .. offset + i
  __device__ __forceinline__ int count() const { return queries * group; }
  __device__ __forceinline__ size_t place(int r) const {
    return ((size_t)batch * queries + r / group) * heads + head * group + r % group;
  }
  __device__ __forceinline__ int seen(int r) const { return max(0, min(length, offset + r / group + 1)); }
};
__device__ __forceinline__ QueryRows query_rows(int queries, int heads, int kv_heads, int head, int batch,
                                                const int *lengths, const int *offsets) {
  const int length = lengths[batch];
  return {queries, heads, heads / kv_heads, head, batch, length, offsets ? offsets[batch] : length};
}

// f(i) for a thread's share of 0 .. n - 1. Rolled up where registers are few: addresses of an unrolled loop are kept.
template <int n, int threads, bool rolled, class F> __device__ __forceinline__ void spread(int thread, F f) {
#pragma unroll(rolled ? 1 : (n + threads - 1) / threads)
  for (int round = 0; round < (n + threads - 1) / threads; ++round)
    if (const int i = round * threads + thread; n % threads == 0 || i < n) f(i);
}

// Where 16 tokens of one KV head begin: in [block][kv_head][token], and in V's pages; below 0 where there are none.
struct Places { long long token, value; };
__device__ __forceinline__ Places find_places(const int *block_table, int token, int length, int block_size, int kv_heads,
                                              int head) {
  if (token >= length) return {-1, -1};
  const Unit unit = unit_of(block_table, token, block_size, kv_heads, head);
  return {(long long)unit.row * block_size + unit.offset, (long long)unit.row * block_size * HEAD_DIM + unit.offset};
}

// Copies a tile, 16 bytes at a time. places(u) is where unit u lies; key(row, byte) and value(column, byte) are where a
// chunk goes.
template <int threads, bool rolled, class Where, class Key, class Value>
__device__ __forceinline__ void copy_tile(Where places, int thread, const int8_t *k_codes, const char *v_pages,
                                          const float *k_scales, const float *v_scales, int block_size, Key key,
                                          Value value, float *k_scale, float *v_scale) {
  spread<kTile * HEAD_DIM / 16, threads, rolled>(thread, [&](int i) {
    const int row = i / (HEAD_DIM / 16), byte = i % (HEAD_DIM / 16) * 16;
    const long long token = places(row / kUnit).token;
    copy_async(key(row, byte), k_codes + (token + row % kUnit) * HEAD_DIM + byte, token >= 0);
  });
  spread<HEAD_DIM * kTile * kValueBytes / 16, threads, rolled>(thread, [&](int i) {
    constexpr int kRowChunks = kTile * kValueBytes / 16, kUnitChunks = kUnit * kValueBytes / 16;
    const int column = i / kRowChunks, chunk = i % kRowChunks;
    const long long first = places(chunk / kUnitChunks).value;
    copy_async(value(column, chunk * 16),
               v_pages + (first + (unsigned)(column * block_size)) * kValueBytes + chunk % kUnitChunks * 16, first >= 0);
  });
  spread<2 * kTile / 4, threads, rolled>(thread, [&](int i) {
    const int first = i % (kTile / 4) * 4;
    const bool is_key = i < kTile / 4;
    const long long token = places(first / kUnit).token;
    copy_async((is_key ? k_scale : v_scale) + first, (is_key ? k_scales : v_scales) + token + first % kUnit, token >= 0);
  });
}
