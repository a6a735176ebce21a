// 1. The stream's first values: rows of an embedding that lies in q4 tiles, like any other weight.
//
// A thread unpacks one word of a tile, 8 weights of the token's row. Only the rows of the tokens at hand are read.
#include "activations.h"

constexpr int kThreads = 128;
constexpr int kTileRows = 4, kTileColumns = 32, kTileBytes = 72;
constexpr int kWordWeights = 8;

// Weights i of a word's low nibbles, or of its high ones, as q4_probe/probe.h numbers them: exact products.
__device__ __forceinline__ float4 weights(uint32_t word, float scale) {
  const auto weight = [&](int i) { return float(int(word << (28 - 8 * i)) >> 28) * scale; };
  return make_float4(weight(0), weight(1), weight(2), weight(3));
}

// table: tiles of [vocabulary][columns]; ids [tokens], each below the vocabulary; out [tokens][columns].
// Grid: tokens x ceil(columns / 1024).
extern "C" __global__ void __launch_bounds__(kThreads)
q4_rows(const uint8_t *__restrict__ table, const int *__restrict__ ids, float *__restrict__ out, int columns) {
  const int word = blockIdx.y * kThreads + threadIdx.x;
  if (word * kWordWeights >= columns) return;
  const int tile = word / 4, quarter = word % 4, id = ids[blockIdx.x], row = id % kTileRows;
  const uint8_t *at = table + ((size_t)(id / kTileRows) * (columns / kTileColumns) + tile) * kTileBytes;
  const float scale = half_to_float(reinterpret_cast<const uint16_t *>(at)[row]);
  const uint32_t codes = reinterpret_cast<const uint32_t *>(at)[2 + kTileRows * quarter + row];
  float *first = out + (size_t)blockIdx.x * columns + tile * kTileColumns + 4 * quarter;
  store4(first, weights(codes, scale));
  store4(first + kTileColumns / 2, weights(codes >> 4, scale));
}
GPU_KERNEL(q4_rows)
