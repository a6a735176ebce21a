// What a block of the prefill kernels works on.
#pragma once
#include "attention.h"

// Query rows of one KV head from first_row on, and the tiles of the history that are this split's. Every row sees at least
// least_seen tokens.
struct PrefillBlock {
  QueryRows rows;
  int split, first_row, least_seen, first_tile, end_tile;
};
// Grid: row blocks x (kv_heads * splits) x batch, block_rows rows a block; tiles of `tokens` tokens.
__device__ __forceinline__ PrefillBlock prefill_block(int block_rows, int tokens, int queries, int group, int kv_heads,
                                                      int splits, const int *lengths, const int *offsets) {
  const QueryRows rows = query_rows(queries, group, kv_heads, blockIdx.y % kv_heads, blockIdx.z, lengths, offsets);
  const int split = blockIdx.y / kv_heads, first_row = blockIdx.x * block_rows;
  const int most_seen = rows.seen(min(first_row + block_rows, rows.count()) - 1);
  const long long tiles = (most_seen + tokens - 1) / tokens;
  return {rows, split, first_row, rows.seen(first_row), int(tiles * split / splits), int(tiles * (split + 1) / splits)};
}
