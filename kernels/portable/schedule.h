// Which steps of which tile a block multiplies, so that all blocks multiply equally many, and how tiles that were cut are
// put together again.
//
// Tiles seldom come in a multiple of the blocks that run at once, and what is left over would keep few of them busy. So the
// steps along K of the first tiles, as many as leave the others a whole number a block, lie in a row that is cut into one
// range a block: a block has the end of one tile and the beginning of the next, and others whole. Blocks that share a tile
// leave their sums in memory, and the last to come adds them up, in the order of K: nobody waits, and a result repeats to
// the bit.
//
// Tiles are numbered along tokens first, so that neighbours, multiplied at about the same time, read the same weights.
#pragma once
#include "operands.h"

struct Work { int tile, first, end; };        // of the tile's steps
struct Cut { int pieces, piece, range; };     // of a tile; which of them this is; the range that holds piece 0

// A block's way through the steps of all tiles, [tiles][steps]. There are no more ranges than steps, and
// ranges * ranges * 2 * steps fits an int, as does tiles * steps.
struct Schedule {
  int tiles, steps, range, ranges;  // this block's range, of how many
  int at;                           // the next step

  __device__ __forceinline__ Schedule(int tiles, int steps)
      : tiles(tiles), steps(steps), range(blockIdx.x), ranges(gridDim.x) {
    at = first_of(range);
  }
  __device__ __forceinline__ int cut_tiles() const { return tiles - max(tiles / ranges - 1, 0) * ranges; }
  __device__ __forceinline__ int first_of(int range) const { return range * (cut_tiles() * steps) / ranges; }
  __device__ __forceinline__ int range_of(int step) const {
    return ((step + 1) * ranges - 1) / (cut_tiles() * steps);
  }
  // Whether there is more to do, and what.
  __device__ __forceinline__ bool next(Work &work) {
    const int row = cut_tiles() * steps, end = first_of(range + 1);
    if (at == end) at = row + range * steps;
    work.tile = at / steps, work.first = at % steps, work.end = steps;
    if (at < row) {
      work.end = min(steps, work.first + end - at);
      at += work.end - work.first;
    } else {
      at += ranges * steps;
    }
    return work.tile < tiles;
  }
  __device__ __forceinline__ Cut cut_of(const Work &work) const {
    if (work.tile >= cut_tiles()) return {1, 0, 0};
    const int first = range_of(work.tile * steps), last = range_of(work.tile * steps + steps - 1);
    return {last - first + 1, range - first, first};
  }
};

// The sums of pieces, [slot][count / 4][threads]. A range has two slots: one for a tile's first piece, which is its last.
template <int count, unsigned threads> struct Pieces {
  float4 *sums;
  __device__ __forceinline__ float4 *at(const Cut &cut, int piece, unsigned thread) const {
    return sums + (size_t)(2 * (cut.range + piece) + (piece == 0)) * (count / 4) * threads + thread;
  }
  __device__ __forceinline__ void store(const float (&own)[count], const Cut &cut, unsigned thread) const {
    float4 *to = at(cut, cut.piece, thread);
    unrolled<count / 4>([&](auto i) {
      const float *four = own + 4 * i.value;
      to[i.value * threads] = make_float4(four[0], four[1], four[2], four[3]);
    });
  }
  __device__ __forceinline__ void add(float (&own)[count], const Cut &cut, int piece, unsigned thread) const {
    const float4 *from = at(cut, piece, thread);
    unrolled<count / 4>([&](auto i) {
      const float4 four = from[i.value * threads];
      float *to = own + 4 * i.value;
      to[0] += four.x, to[1] += four.y, to[2] += four.z, to[3] += four.w;
    });
  }
};

// Makes `own` the sum over all pieces of the tile and returns true in the block that came last; in others returns false.
// counters: of the pieces that have come, one a tile, 0 before a launch and after it. seen: in shared memory. barrier()
// holds all `threads` of the block that have sums.
template <int count, unsigned threads, class Barrier>
__device__ __forceinline__ bool gather(float (&own)[count], const Cut &cut, Pieces<count, threads> pieces, int *counter,
                                       int *seen, unsigned thread, Barrier barrier) {
  if (cut.pieces == 1) return true;
  // Of two, the second need not leave its sums to anyone.
  barrier();
  if (thread == 0) *seen = cut.pieces == 2 && atomicAdd(counter, 0) == 1;
  barrier();
  if (!*seen) {
    pieces.store(own, cut, thread);
    __threadfence();
  }
  barrier();
  if (thread == 0) *seen = atomicAdd(counter, 1);
  barrier();
  if (*seen + 1 < cut.pieces) return false;
  __threadfence();
  if (thread == 0) *counter = 0;
  if (cut.pieces == 2) {
    pieces.add(own, cut, 1 - cut.piece, thread);
  } else {
    unrolled<count>([&](auto i) { own[i.value] = 0.f; });
#pragma unroll 1
    for (int piece = 0; piece < cut.pieces; ++piece) pieces.add(own, cut, piece, thread);
  }
  return true;
}
