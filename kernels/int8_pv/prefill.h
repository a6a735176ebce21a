// What the prefill kernels share: copies of a tile by the threads of a block.
#pragma once
#include "attention.h"

// f(i) for a thread's share of 0 .. n - 1. Rolled up where registers are few: addresses of an unrolled loop are kept.
template <int n, int threads, bool rolled, class F> __device__ __forceinline__ void spread(int thread, F f) {
#pragma unroll(rolled ? 1 : (n + threads - 1) / threads)
  for (int round = 0; round < (n + threads - 1) / threads; ++round)
    if (const int i = round * threads + thread; n % threads == 0 || i < n) f(i);
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
