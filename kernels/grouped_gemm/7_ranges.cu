// 7. No warp waits for another: each has a range of the weights of its own.
//
// Warps of kernel 6 meet after every step, whose activations they share, and when a tile was cut
// all of them stand by while one of them asks other blocks through L2, four times in a row. Here a warp reads one piece of memory
// from beginning to end, through a ring of its own and in copies as long as is good, panel after panel: they lie one behind the
// other. A panel that is all its own it stores; of others it leaves sums in shared memory, once at the beginning and once at
// the end of its range. They are added up when all is done, in the order of K.
//
// Every block multiplies equally many chunks: whole panels, and before those a range of the panels that are cut. Four
// warps more, which multiply nothing, add up the pieces of these and those of other blocks, while the whole ones are
// multiplied. Lanes take a group of columns each (panels.h), so that scaling and adding up take few instructions.
//
// Prediction: 110 instructions a chunk and warp with 4 bits and 105 with 8, a fifth of the time that a multiprocessor has with W4
// at the ceiling; 16 warps hide the 400 clocks of a chunk three times over. What is left is 2 us until the first bytes are
// multiplied, and 1 us at the end: 16 us for 50 MB, 26 us for 94.7 MB.
// Outcome (H200, cold, median; W8 / W4): 26.7 / 17.7 us on 17408 x 5120 for M = 1, 3.54 and 2.83 TB/s where a plain read has
// 4.13 and 3.85; M = 2 27.6 / 18.6 us, 4 30.0 / 22.3 us. But 29.6 / 21.1 us on 5120 x 17408 and 15.7 / 13.5 us on 5120 x 6144,
// where kernel 5 takes 25.8 / 20.6 and 11.7 / 9.35 us and a plain read of the latter 9.3 / 5.9: there the ends, not the reading,
// set the time. That was with one warp to add up pieces; with four, 28.2 / 19.3 and 13.7 / 11.8 us. Two slots a warp were the
// fastest, more warps no faster, and 8 rows no faster than kernel 6. With launches that overlap 24.7 / 15.9 us on the first, 3.83
// and 3.16 TB/s, M = 2 25.9 / 16.8 us, 4 27.9 / 18.7. Tried in vain: 11 warps of 72 registers, so that two blocks run on a
// multiprocessor (28.3 / 20.3 us alone, 26.4 / 18.4 overlapped), and slices of K, so that 8 rows fit (35 / 27 us with f16).
//
//   WARPS    that multiply
//   CHUNKS   that a warp asks for at a time
//   SLOTS    of a warp's ring, of CHUNKS chunks each
//   ROWS: 1, 2 or 4; BITS, ACTIVATIONS: see panels.h
#include "panels.h"
#include "ring.h"
#include "schedule.h"

#if GPU_CUDA || GPU_SIMULATOR

constexpr int kAdders = 4;  // warps that add up pieces of cut panels, of which a block has up to three
constexpr int kWarps = WARPS + kAdders, kThreads = 32 * kWarps;
constexpr int kValues = kPanelRows * ROWS, kOfLane = 4;  // of a panel; of those of a lane, at most

using Piece = float[kPanelRows][ROWS];

struct Range { int first, end; };

// What a block multiplies, in chunks, which are numbered through all panels: part of the panels that are cut, which come first,
// then whole ones.
struct Share {
  int chunks, each, quotient, rest;  // of a panel; whole panels of a block; cut chunks of a block, which the first exceed by 1
  Range of_phase[2];
  __device__ __forceinline__ Share(int panels, int chunks) : chunks(chunks) {
    const unsigned blocks = gridDim.x, block = blockIdx.x;
    // Panels that are left over are cut, and where these are few, whose pieces would be many, as many more as there are blocks.
    const unsigned left_over = panels % blocks;
    each = panels / blocks;
    if (each > 0 && left_over > 0 && 2 * left_over < blocks) --each;
    const unsigned cut = (panels - each * blocks) * chunks;
    quotient = cut / blocks, rest = cut % blocks;
    of_phase[0] = {first_of(block), first_of(block + 1)};
    of_phase[1].first = cut + block * each * chunks, of_phase[1].end = of_phase[1].first + each * chunks;
  }
  __device__ __forceinline__ int first_of(int block) const { return block * quotient + min(block, rest); }
  __device__ __forceinline__ int block_of(int chunk) const {
    const int of_longer = rest * (quotient + 1);
    return chunk < of_longer ? chunk / (quotient + 1) : rest + (chunk - of_longer) / quotient;
  }
  // The first chunk of a warp: who has one less of the cut panels has one more of the whole ones.
  template <int phase> __device__ __forceinline__ int first_of_warp(int warp) const {
    const Range &range = of_phase[phase];
    return range.first + ((range.end - range.first) * warp + (phase == 0 ? 0 : WARPS - 1)) / WARPS;
  }
};

struct Shared {
  alignas(16) uint8_t rings[WARPS][SLOTS * CHUNKS * kChunkBytes];
  uint64_t barriers[WARPS][SLOTS];
  Piece pieces[2][WARPS][2];  // of cut panels and of whole ones: a range's first panel, if it begins within it, and its last
  int firsts[2][WARPS + 1];   // chunks of the warps' ranges, and where the last one ends
  int seen[kAdders];
  alignas(16) Slice slices[1];  // all of x
};

// The last warps wait for the others, who do not wait.
__device__ __forceinline__ void pieces_are_there(bool waits) {
#if GPU_CUDA
  if (waits) asm volatile("bar.sync 1, %0;" ::"n"(kThreads) : "memory");
  else asm volatile("bar.arrive 1, %0;" ::"n"(kThreads) : "memory");
#else
  __syncthreads();
#endif
}

// One number of a panel, from what warps left of it, in the order of K. True if there is any: not if one warp had all of it.
__device__ __forceinline__ bool add_pieces(float &sum, int phase, int first, int chunks, int value, const Shared *shared) {
  const int end = first + chunks;
  bool any = false;
  sum = 0;
  unrolled<WARPS>([&](auto warp) {
    const int begin = shared->firsts[phase][warp.value], until = shared->firsts[phase][warp.value + 1];
    const bool begun = begin <= first, ended = end <= until;
    if (begin < until && begin < end && first < until && !(begun && ended)) {
      sum += (&shared->pieces[phase][warp.value][begun][0][0])[value];
      any = true;
    }
  });
  return any;
}

// out [M][N] of x [M][K] and w [N / 16][K / 128] chunks; K a multiple of 32. M is at most ROWS.
// Grid: as many blocks as run at once, and no more than there are chunks. pieces and counters: see schedule.h, a block
// of 32 threads being one of the last warps.
extern "C" __global__ void __launch_bounds__(kThreads, 1)
grouped_gemm_ranges(const uint8_t *__restrict__ w, const Activation *x, float *__restrict__ out, float4 *pieces,
                    int *counters, int M, int N, int K) {
  GPU_DYNAMIC_SHARED(Shared, shared);
  // The compiler cannot know that it is the same for all lanes.
  const int lane = threadIdx.x, warp = __shfl_sync(GPU_FULL_MASK, (int)threadIdx.y, 0);
  const int panels = (N + kPanelRows - 1) / kPanelRows, chunks = (K + kChunkColumns - 1) / kChunkColumns;
  const Share share(panels, chunks);
  let_next_launch_begin();
  const bool multiplies = warp < WARPS;
  const Range cut{share.first_of_warp<0>(warp), share.first_of_warp<0>(warp + 1)};
  const Range whole{share.first_of_warp<1>(warp), share.first_of_warp<1>(warp + 1)};

  Ring<SLOTS, CHUNKS * kChunkBytes> ring(shared->rings[multiplies ? warp : 0], shared->barriers[multiplies ? warp : 0],
                                            lane, multiplies);
  Range asked = cut, then = whole;
  const auto ask = [&] {
    if (asked.first == asked.end) asked = then, then.first = then.end;
    const int count = min(CHUNKS, asked.end - asked.first);
    ring.ask(w + (size_t)asked.first * kChunkBytes, count * kChunkBytes);
    asked.first += count;
  };
  if (multiplies)
#pragma unroll 1
    for (int i = 0; i < SLOTS; ++i) ask();

  if (lane == 0 && warp <= WARPS) shared->firsts[0][warp] = cut.first, shared->firsts[1][warp] = whole.first;

  await_launch_before();
  constexpr int kAtOnce = 8;  // a round of loads is a microsecond
#pragma unroll 1
  for (int first = warp; first < M * chunks; first += kAtOnce * kWarps) {
    Four four[kAtOnce];
    const auto each = [&](auto f) {
      unrolled<kAtOnce>([&](auto i) {
        const int number = first + i.value * kWarps, row = ROWS == 1 ? 0 : number / chunks, chunk = number - row * chunks;
        if (number < M * chunks) f(four[i.value], row, chunk);
      });
    };
    each([&](Four &to, int row, int chunk) { to = read_four(x + (size_t)row * K, chunk * kChunkColumns + lane * 4, K); });
    each([&](const Four &from, int row, int chunk) { split_row(shared->slices[chunk], row, from, lane); });
  }
  __syncthreads();

  const auto store_value = [&](int panel, int value, float sum) {
    const int n = panel * kPanelRows + value / ROWS, m = value % ROWS;
    if (n < N && m < M) out[(size_t)m * N + n] = sum;
  };
  if (multiplies) {
    Own own;
#pragma unroll 1
    for (int phase = 0; phase < 2; ++phase) {
      const Range range = phase == 0 ? cut : whole;
      int panel = range.first / chunks, chunk = range.first % chunks;
      Sums sums = {};
      // The sums of the present panel, of which this range has chunks up to `chunk`.
      const auto leave = [&](bool to_end) {
        add_groups(sums);
        const bool begun = range.first <= panel * chunks;
        float *piece = &shared->pieces[phase][warp][begun][0][0];
        unrolled<kSums>([&](auto i) {
          const Place place = place_of(lane, i.value);
          if (place.m < ROWS) {
            const int value = place.n * ROWS + place.m;
            if (begun && to_end) store_value(panel, value, sums[i.value]);
            else piece[value] = sums[i.value];
          }
          sums[i.value] = 0;
        });
      };
#pragma unroll 1
      for (int at = range.first; at < range.end;) {
        const int count = min(CHUNKS, range.end - at);
        const uint8_t *slot = ring.wait();
#pragma unroll 1
        for (int c = 0; c < count; ++c) {
          multiply(sums, InShared{slot + c * kChunkBytes, lane}, shared->slices[chunk], own, lane);
          if (++chunk == chunks) leave(true), chunk = 0, ++panel;
        }
        at += count;
        __syncwarp();
        ask();
      }
      if (chunk > 0 && range.first < range.end) leave(false);
      if (phase == 0) pieces_are_there(false);
    }
  } else {
    pieces_are_there(true);
    const Range &range = share.of_phase[0];
#pragma unroll 1
    for (int panel = range.first / chunks + warp - WARPS; panel * chunks < range.end; panel += kAdders) {
      const int first = panel * chunks, end = first + chunks;
      float sums[kOfLane];
      bool any = false;
      unrolled<kOfLane>([&](auto i) {
        const int value = i.value * 32 + lane;
        sums[i.value] = 0;
        if (i.value * 32 < kValues && value < kValues) any |= add_pieces(sums[i.value], 0, first, chunks, value, shared);
      });
      if (!__any_sync(GPU_FULL_MASK, any)) continue;
      Cut of_panel{1, 0, 0};
      if (first < range.first || range.end < end) {
        of_panel.range = share.block_of(first);
        of_panel.piece = blockIdx.x - of_panel.range, of_panel.pieces = share.block_of(end - 1) - of_panel.range + 1;
      }
      if (gather(sums, of_panel, Pieces<kOfLane, 32>{pieces}, counters + panel, shared->seen + warp - WARPS, lane,
                 [] { __syncwarp(); }))
        unrolled<kOfLane>([&](auto i) {
          if (i.value * 32 + lane < kValues) store_value(panel, i.value * 32 + lane, sums[i.value]);
        });
    }
  }
  __syncthreads();
#pragma unroll 1
  for (int number = warp * 32 + lane; number < share.each * kValues; number += kThreads) {
    const int first = share.of_phase[1].first + number / kValues * chunks, value = number % kValues;
    float sum;
    if (add_pieces(sum, 1, first, chunks, value, shared)) store_value(first / chunks, value, sum);
  }
}
GPU_KERNEL(grouped_gemm_ranges)

#endif
