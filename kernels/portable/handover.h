// Which steps of which tile a cluster multiplies, and how tiles that were cut are put together, where blocks may wait.
//
// Each range first takes whole tiles, in step with the others, so that all read the same columns of x at the same time.
// What is left of the tiles lies in a row, which is cut into even ranges, and a range is worked through from its end to its
// beginning. So it starts with the beginning of a tile, leaves those sums in memory for who has the tile's end, and goes
// on; and it ends with the end of a tile, whose other sums, made at the start of the range before, have long come. Only
// sums of ranges shorter than a tile are waited for. An owner waits for ranges before its own, which have begun before
// it, and give before they wait: somebody can always go on. Sums are added in one order: a result repeats to the bit.
//
// schedule.h, where nobody waits, costs an owner three round trips through L2 more, and a giver two.
#pragma once
#include "wgmma.h"
#include "operands.h"

struct Work { int tile, first, end; };  // steps first .. end - 1 of a tile

// A range's way through all tiles, [tiles][steps]. The row is empty or has at least a step a range; ranges * its steps fits
// an int. Tiles are numbered along tokens first: neighbours read the same weights.
struct Ranges {
  int tiles, steps, range, ranges, whole;  // this range, of how many; whole tiles of each
  int row, begin, end;                     // steps of the row; what is left of this range
  int turn = 0;

  __device__ __forceinline__ Ranges(int tiles, int steps, int range, int ranges, int whole)
      : tiles(tiles), steps(steps), range(range), ranges(ranges), whole(whole) {
    row = max(tiles - whole * ranges, 0) * steps;
    begin = range * row / ranges, end = (range + 1) * row / ranges;
  }
  __device__ __forceinline__ bool next(Work &work) {
    if (turn < whole) {
      work = {turn++ * ranges + range, 0, steps};
      return work.tile < tiles;  // if not, there is no row
    }
    if (begin == end) return false;
    const int tile = (end - 1) / steps, first = max(begin, tile * steps);
    work = {whole * ranges + tile, first - tile * steps, end - tile * steps};
    end = first;
    return true;
  }
  __device__ __forceinline__ bool is_given(const Work &work) const { return work.end < steps; }
  // The first of the ranges that give to this one; the others follow, up to its own.
  __device__ __forceinline__ int first_giver(const Work &work) const {
    if (work.first == 0) return range;
    const int step = (work.tile - whole * ranges) * steps;
    return ((step + 1) * ranges - 1) / row;
  }
};

#if GPU_HAS_WGMMA
// What warps leave to each other: sums, [ranges][places][count / 4][32 lanes], and whether they are there, 0 before a
// launch and after it. A range gives at most once. place: of a warp in the cluster; equal warps have equal rows, and
// neither waits for others of its block.
template <int count, int places> struct Handover {
  float4 *sums;
  int *there;

  __device__ __forceinline__ void give(const float (&own)[count], int range, int place, int lane) const {
    const int slot = range * places + place;
    float4 *to = sums + slot * (count / 4 * 32) + lane;
    unrolled<count / 4>([&](auto i) {
      const float *four = own + 4 * i.value;
      to[i.value * 32] = make_float4(four[0], four[1], four[2], four[3]);
    });
    __syncwarp();
    if (lane == 0) asm volatile("st.release.gpu.global.u32 [%0], 1;" ::"l"(there + slot) : "memory");
  }
  __device__ __forceinline__ void take(float (&own)[count], int first, int end, int place, int lane) const {
    if (first == end) return;
    for (int giver = first + lane; giver < end; giver += 32) {  // each lane waits for one
      int *flag = there + giver * places + place, is_there;
      do asm volatile("ld.acquire.gpu.global.u32 %0, [%1];" : "=r"(is_there) : "l"(flag) : "memory");
      while (!is_there);
      *flag = 0;
    }
    __syncwarp();
#pragma unroll(count < 32 ? 32 / count : 1)  // so many registers to load into, or those of one giver
    for (int giver = first; giver < end; ++giver) {
      const float4 *from = sums + (giver * places + place) * (count / 4 * 32) + lane;
      unrolled<count / 4>([&](auto i) {
        const float4 four = __ldcg(from + i.value * 32);  // written while this kernel runs
        float *to = own + 4 * i.value;
        to[0] += four.x, to[1] += four.y, to[2] += four.z, to[3] += four.w;
      });
    }
  }
};

#endif
