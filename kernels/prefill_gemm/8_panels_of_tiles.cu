// 8. Weights in q4 tiles, laid out anew as the int4 panels that 7_packed_wgmma.cu multiplies: once, when weights are loaded.
//
// Both forms hold two's complement nibbles or those plus 8 and the same float16 scales, so that no bit is lost: a lane
// gathers what the fragments of a chunk's 128 columns need of its two rows. In a tile the columns 16 further are the high
// nibbles of the same bytes: two bytes of a row are a register's pair of codes for both steps of a group.
#include "gpu.h"

constexpr int kThreads = 256;
constexpr int kTileRows = 4, kTileBytes = 72, kWordsAt = 2 * kTileRows;  // as kernelbook/formats.py has them
constexpr int kLanes = 32, kGroups = 4;                                  // of a chunk; as kernelbook/packing.py has them
constexpr int kPairBytes = 16 * kLanes, kCodeBytes = kPairBytes * kGroups / 2, kChunkBytes = kCodeBytes + 4 * kLanes;

// panels [ceil(N / 16)][ceil(K / 128)] chunks of tiles [N / 4][K / 32]; rows and columns beyond them become codes and
// scales of 0. row_tiles, groups: N / 4 and K / 32. Grid: a thread a lane of each chunk, `lanes` in all.
extern "C" __global__ void __launch_bounds__(kThreads)
q4_panels(const uint8_t *__restrict__ tiles, uint8_t *__restrict__ panels, uint64_t lanes, int row_tiles, int groups) {
  const uint64_t index = (uint64_t)blockIdx.x * kThreads + threadIdx.x;
  if (index >= lanes) return;
  const int lane = index % kLanes, g = lane / 4, t = lane % 4, chunks = (groups + kGroups - 1) / kGroups;
  const uint64_t at = index / kLanes;  // of the chunk
  const int chunk = at % chunks, row_tile = at / chunks * 4 + g / kTileRows;  // of row g; two further is that of g + 8
  const auto tile_of = [&](int half, int q) -> const uint8_t * {
    const int row = row_tile + 2 * half, group = chunk * kGroups + q;
    return row < row_tiles && group < groups ? tiles + ((size_t)row * groups + group) * kTileBytes : nullptr;
  };

  uint32_t codes[kGroups][2] = {};  // of the two steps of 16 columns of a group
#pragma unroll
  for (int q = 0; q < kGroups; ++q) {
#pragma unroll
    for (int p = 0; p < 4; ++p) {  // registers a0 to a3: rows g, g + 8, then columns 8 further
      if (const uint8_t *tile = tile_of(p % 2, q)) {
        const int quarter = p / 2 * 2 + t / 2, word = quarter * kTileRows + g % kTileRows;
        const uint32_t pair = *reinterpret_cast<const uint16_t *>(tile + kWordsAt + 4 * word + t % 2 * 2);
        codes[q][0] |= ((pair | pair << 8) & 0x000f000fu) << 4 * p;
        codes[q][1] |= ((pair >> 4 | pair << 4) & 0x000f000fu) << 4 * p;
      }
    }
  }
  uint32_t scales = 0;  // of group t, rows g and g + 8
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    if (const uint8_t *tile = tile_of(half, t))
      scales |= uint32_t(reinterpret_cast<const uint16_t *>(tile)[g % kTileRows]) << 16 * half;
  }

  uint8_t *to = panels + at * kChunkBytes;
  constexpr uint32_t kPlus8 = 0x88888888u;  // of a nibble in two's complement
#pragma unroll
  for (int pair = 0; pair < kGroups / 2; ++pair) {
    const auto &first = codes[2 * pair], &second = codes[2 * pair + 1];
    *reinterpret_cast<uint4 *>(to + pair * kPairBytes + lane * 16) =
        make_uint4(first[0] ^ kPlus8, first[1] ^ kPlus8, second[0] ^ kPlus8, second[1] ^ kPlus8);
  }
  *reinterpret_cast<uint32_t *>(to + kCodeBytes + lane * 4) = scales;
}
GPU_KERNEL(q4_panels)
