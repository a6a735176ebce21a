// 7. Valid random weights, 14 GB of them, in the time that writing them takes: every word of every tile from its index.
//
// Codes are uniform. A row's scale in a tile is uniform in 0.5..1.5 times `scale`, with a sign that is a coin: codes
// -8..7 have the mean -1/2, and with scales of one sign every output would have a part of the sum of all inputs, which
// grows from layer to layer. A thread writes a word; the words are those of fill_words with a longer counter.
#include "gpu.h"

constexpr int kTileWords = 18, kScaleWords = 2;

__device__ __forceinline__ uint32_t mixed(uint32_t h) {  // the finalizer of MurmurHash3
  h = (h ^ h >> 16) * 0x85ebca6bu;
  h = (h ^ h >> 13) * 0xc2b2ae35u;
  return h ^ h >> 16;
}

// tiles: `words` words; seed and matrix tell one matrix's weights from another's. Any grid.
extern "C" __global__ void __launch_bounds__(256)
q4_random_tiles(uint32_t *__restrict__ tiles, uint64_t words, uint32_t seed, uint32_t matrix, float scale) {
  const uint32_t key = mixed(seed + 0x9e3779b9u) ^ mixed(matrix * 0x9e3779b9u + 1);
  const uint64_t threads = (uint64_t)gridDim.x * blockDim.x;
  for (uint64_t i = (uint64_t)blockIdx.x * blockDim.x + threadIdx.x; i < words; i += threads) {
    const uint32_t random = mixed(mixed((uint32_t)i ^ key) ^ mixed((uint32_t)(i >> 32) + key));
    const auto one = [&](uint32_t bits) {  // 15 bits of size and one of sign
      const float size = scale * (0.5f + float(bits & 0x7fff) * (1.f / 32768.f));
      return (uint32_t)float_to_half(bits & 0x8000 ? -size : size);
    };
    tiles[i] = i % kTileWords < kScaleWords ? one(random & 0xffff) | one(random >> 16) << 16 : random;
  }
}
GPU_KERNEL(q4_random_tiles)
