// Which steps of which tile a cluster multiplies, and how tiles that were cut are put together, where blocks may wait.
//
// Each range has whole tiles, in step with the others, so that all read the same columns of x at the same time. What is
// left of the tiles lies in a row, which is cut into even ranges. There are two ways to add up their sums; either adds in
// one order, so that a result repeats to the bit.
//
// By the range that has a tile's end, last: a range is worked through from its end to its beginning. So it starts with
// the beginning of a tile, leaves those sums in memory for who has the tile's end, and goes on; and it ends with the end of
// a tile, whose other sums, made at the start of the range before, have long come. Only sums of ranges shorter than a tile
// are waited for: there the tail of a tile, some steps, is not cut, so that its owner multiplies these meanwhile. An owner
// waits for ranges before its own, which have begun before it, and give before they wait: somebody can always go on. Best
// for tiles of few parts, which have come long before.
//
// By all, evenly: the row comes first, and all of it is left in memory; after the whole tiles each range adds up an even
// share of the sums. Best for tiles of many parts, of which an owner would read one after the other while most ranges have
// none to add. But all ranges have to run at once: where every multiprocessor has room for two blocks and a launch has one
// for each, blocks of two streams' launches do; those of three may wait for each other for ever.
//
// schedule.h, where nobody waits, costs an owner three round trips through L2 more, and a giver two.
#pragma once
#include "wgmma.h"
#include "operands.h"

struct Work {  // steps first .. end - 1 of a tile
  int tile, first, end;
  // What a block has of them where several share them, in order.
  __device__ __forceinline__ Work part(int part, int parts) const {
    const int steps = end - first;
    return {tile, first + steps * part / parts, first + steps * (part + 1) / parts};
  }
};

// A range's way through all tiles, [tiles][steps]. Of those in the row the last `tail` steps are not cut, fewer than all;
// evenly: none. Without these the row is empty or has at least a step a range; ranges * its steps fits an int. Tiles are
// numbered along tokens first: neighbours read the same weights.
struct Ranges {
  int tiles, steps, range, ranges, whole;  // this range, of how many; whole tiles of each
  bool evenly;                             // the row first, its sums to be added up by all
  int cut, row, begin, end;                // steps of a tile that may be cut, those of the row; what is left of this range
  int turn = 0;

  __device__ __forceinline__ Ranges(int tiles, int steps, int range, int ranges, int whole, bool evenly, int tail)
      : tiles(tiles), steps(steps), range(range), ranges(ranges), whole(whole), evenly(evenly), cut(steps - tail) {
    row = max(tiles - whole * ranges, 0) * cut;
    begin = range * row / ranges, end = (range + 1) * row / ranges;
  }
  __device__ __forceinline__ bool next(Work &work) {
    if (begin < end && (evenly || turn == whole)) {
      const int tile = (end - 1) / cut, first = max(begin, tile * cut), until = end - tile * cut;
      work = {whole * ranges + tile, first - tile * cut, until == cut ? steps : until};
      end = first;
      return true;
    }
    if (turn == whole) return false;
    work = {turn++ * ranges + range, 0, steps};
    return work.tile < tiles;  // if not, there is no row
  }
  __device__ __forceinline__ bool is_last() const { return begin == end && turn == whole; }
  // Whether its sums are left in memory.
  __device__ __forceinline__ bool is_given(const Work &work) const {
    return evenly ? work.tile >= whole * ranges : work.end < steps;
  }
  // The range that has a step of the row, tails not counted.
  __device__ __forceinline__ int range_of(int step) const { return ((step + 1) * ranges - 1) / row; }
  // The first of the ranges that give to this one; the others follow, up to its own.
  __device__ __forceinline__ int first_giver(const Work &work) const {
    return work.first == 0 ? range : range_of((work.tile - whole * ranges) * cut);
  }
  // Where the sums of a range's part of a tile are left, if all are: each range and each tile of the row begins another.
  __device__ __forceinline__ int part(int range, int tile) const { return range + tile - whole * ranges; }
};

#if GPU_HAS_WGMMA
__device__ __forceinline__ void add_four(float *to, const float4 &four) {
  to[0] += four.x, to[1] += four.y, to[2] += four.z, to[3] += four.w;
}
// A lane's sums that shared memory holds as they were left, [count / 4][32 lanes].
template <int count> __device__ __forceinline__ void add_brought(float *own, const float4 *brought) {
  unrolled<count / 4>([&](auto i) { add_four(own + 4 * i.value, brought[i.value * 32]); });
}

// What warps leave to each other: sums, [ranges or parts][places][count / 4][32 lanes], read from L2, as they are written
// while this kernel runs. place: of a warp in the cluster; equal warps leave equal parts of a tile, and wait for each other
// only, unless copies bring the sums.
template <int count, int places> struct Handover {
  float4 *sums;
  int *there;  // 0 before the first launch. [ranges][places], whether sums are there; evenly: [places][kApart], who arrived
  static constexpr int kApart = 32;  // of places that all arrive at: atomics on one sector go one after the other

  __device__ __forceinline__ float4 *sums_of(int part, int place, int lane) const {
    return sums + (part * places + place) * (count / 4 * 32) + lane;
  }
  __device__ __forceinline__ void leave(const float (&own)[count], int part, int place, int lane) const {
    float4 *to = sums_of(part, place, lane);
    unrolled<count / 4>([&](auto i) {
      const float *four = own + 4 * i.value;
      to[i.value * 32] = make_float4(four[0], four[1], four[2], four[3]);
    });
    __syncwarp();
  }

  // ---- to the range that has the tile's end; a range gives at most once

  // Says that what was left is there. It waits until memory has it, which goes unnoticed some time after `leave`.
  __device__ __forceinline__ void give(int range, int place, int lane) const {
    if (lane == 0) asm volatile("st.release.gpu.global.u32 [%0], 1;" ::"l"(there + range * places + place) : "memory");
  }
  __device__ __forceinline__ void wait_for(int giver, int place) const {
    int *flag = there + giver * places + place;
    while (!acquire(flag)) {}
    *flag = 0;
  }
  __device__ __forceinline__ void take(float (&own)[count], int first, int end, int place, int lane) const {
    if (first == end) return;
    for (int giver = first + lane; giver < end; giver += 32) wait_for(giver, place);  // each lane one
    __syncwarp();
#pragma unroll(count < 32 ? 32 / count : 1)  // so many registers to load into, or those of one giver
    for (int giver = first; giver < end; ++giver) {
      const float4 *from = sums_of(giver, place, lane);
      unrolled<count / 4>([&](auto i) { add_four(own + 4 * i.value, __ldcg(from + i.value * 32)); });
    }
  }

  // ---- to all, evenly

  // What this warp left is there. Counts from 0 to 2 ranges - 1 and again, so that nothing has to be set back: the ranges
  // of a launch make the first half of a turn, or the second. Returns which, in lane 0.
  __device__ __forceinline__ bool arrive(int ranges, int place, int lane) const {
    int before = 0;
    if (lane == 0)
      asm volatile("atom.acq_rel.gpu.global.inc.u32 %0, [%1], %2;"
                   : "=r"(before) : "l"(there + place * kApart), "r"(2 * ranges - 1) : "memory");
    return before >= ranges;
  }
  __device__ __forceinline__ void wait_for_all(bool half, int ranges, int place, int lane) const {
    if (lane == 0)
      while ((acquire(there + place * kApart) >= ranges) == half) {}
    __syncwarp();
  }
  // Adds up a range's share of the sums of this place, by fours of a lane: store(tile, i, four sums) has those from i on.
  template <class Store>
  __device__ __forceinline__ void add_up(const Ranges &range, int place, int lane, Store store) const {
    const int fours = range.row / range.cut * (count / 4), end = (range.range + 1) * fours / range.ranges;
#pragma unroll 1
    for (int four = range.range * fours / range.ranges; four < end; ++four) {
      const int i = four % (count / 4), of_row = four / (count / 4), tile = range.whole * range.ranges + of_row;
      const int last = range.range_of((of_row + 1) * range.cut - 1);
      float sum[4] = {};
#pragma unroll 1
      for (int giver = range.range_of(of_row * range.cut); giver <= last; giver += kGivers) {
        float4 parts[kGivers] = {};
        unrolled<kGivers>([&](auto g) {
          if (giver + g.value <= last)
            parts[g.value] = __ldcg(sums_of(range.part(giver + g.value, tile), place, lane) + i * 32);
        });
        unrolled<kGivers>([&](auto g) { add_four(sum, parts[g.value]); });
      }
      store(tile, 4 * i, sum);
    }
  }

 private:
  static constexpr int kGivers = 8;  // whose sums a lane asks for at a time
  static __device__ __forceinline__ int acquire(const int *flag) {
    int value;
    asm volatile("ld.acquire.gpu.global.u32 %0, [%1];" : "=r"(value) : "l"(flag) : "memory");
    return value;
  }
};

#endif
