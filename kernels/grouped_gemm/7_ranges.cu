// 7. No warp waits for another: each has a range of the weights of its own. And no launch waits for another's first bytes.
//
// Warps of kernel 6 meet after every step, whose activations they share, and when a tile was cut
// all of them stand by while one of them asks other blocks through L2, four times in a row. Here a warp reads one piece of memory
// from beginning to end, through a ring of its own and in copies as long as is good, panel after panel: they lie one behind the
// other. A panel that is all its own it stores; of others it leaves sums in shared memory, once at the beginning and once at
// the end of its range. They are added up when all is done, in the order of K.
//
// Every block multiplies equally many chunks: whole panels, and before those a range of the panels that are cut. Some
// warps more, which multiply nothing, add up the pieces of these and those of other blocks, while the whole ones
// are multiplied. Lanes take a group of columns each (panels.h), so that scaling and adding up take few instructions.
//
// A launch has a block for each multiprocessor, and there is room for two: rings of the next launch fill while this one
// adds up and ends, and while the next one waits for x. For that, registers are few (64 or 72 of a thread) and x must be
// small. Where it is not, for many rows or long K, a block has a slice of K and only that part of x. Blocks of all slices
// share the panels alike, and who comes last of a cut panel, or of the blocks that have the same whole panels, adds up all
// slices, in the order of K.
//
// Prediction: with 4 bits 116 instructions a chunk and 75 a copy of two, with 8 bits 175 together; at the ceiling a
// multiprocessor has time for about 250 and 460. When a block had 16 warps, 80 registers and a multiprocessor for itself,
// launches in a chain took 16.4 us (W4) and 25.7 us (W8) on 17408 x 5120 for M = 1, where reading takes 11.8 and 22.3 us. A
// ring of 76 KB is 2.3 us of reading, which covers the 1.5 us until x is there: 14.5 and 24 us; with 50 KB, M = 2 and 4, 15.5
// and 25.
// Slices cost 2 us at the end of a launch, when sums go to L2, a counter and back, M N 4 bytes for each slice, and save the
// reading of as much of x: 17 and 27 us for M = 8.
//
//   WARPS    that multiply
//   CHUNKS   that a warp asks for at a time
//   SLOTS    of a warp's ring, of CHUNKS chunks each
//   ROWS: 1, 2, 4 or 8; BITS, ACTIVATIONS: see panels.h
#include "panels.h"
#include "ring.h"

#if GPU_CUDA || GPU_SIMULATOR

// Warps that add up pieces of cut panels, a panel each: as many as a block has part of, at most.
constexpr int kAdders = 3;
constexpr int kWarps = WARPS + kAdders, kThreads = 32 * kWarps;
// Of a multiprocessor, where launches overlap and shared memory suffices: the second place is for the next launch.
#if GPU_CUDA && __CUDA_ARCH__ / 100 == 9
constexpr int kResident = 2;
#else
constexpr int kResident = 1;
#endif
constexpr int kValues = kPanelRows * ROWS, kOfLane = (kValues + 31) / 32;  // of a panel; of those of a lane, at most

// A chunk in a ring. Of 8 rows a round has products enough; more at once spill.
struct OfRing : InShared { static constexpr int unroll = ROWS < 8 ? kRounds : 2; };

using Piece = float[kPanelRows][ROWS];

struct Range { int first, end; };  // in chunks, which are numbered through the slices of all panels

// Of a warp, and where it begins: a panel, and a chunk of its slice.
struct alignas(16) Way {
  Range range;
  int panel, chunk;
};

// The part of K that a block has, in chunks.
struct SliceOfK {
  int first, chunks;
  __device__ __forceinline__ SliceOfK(int slice, int chunks_of_k) {
    first = slice * chunks_of_k / gridDim.y, chunks = (slice + 1) * chunks_of_k / gridDim.y - first;
  }
};

// Chunks in a row, cut into equal parts, one for each block of a slice.
struct Parts {
  int quotient, rest;  // chunks of a part, which the first `rest` parts exceed by one
  __device__ __forceinline__ Parts(int chunks) : quotient(chunks / gridDim.x), rest(chunks % gridDim.x) {}
  __device__ __forceinline__ int first_of(int block) const { return block * quotient + min(block, rest); }
  __device__ __forceinline__ int block_of(int chunk) const {
    const int of_longer = rest * (quotient + 1);
    return chunk < of_longer ? chunk / (quotient + 1) : rest + (chunk - of_longer) / quotient;
  }
};

// How panels are shared among the blocks of a slice, and alike in every slice: some are cut, which come first, of the others
// blocks have `each` whole.
struct Share {
  int each, cut;
  Share() = default;
  __device__ __forceinline__ Share(int panels) {
    // Panels that are left over are cut, and where these are few, whose pieces would be many, as many more as there are blocks.
    const int blocks = gridDim.x, left_over = (unsigned)panels % gridDim.x;
    each = (unsigned)panels / gridDim.x;
    if (each > 0 && left_over > 0 && 2 * left_over < blocks) --each;
    cut = panels - each * blocks;
  }
};

// The part of a block's range that a warp has: who has one less of the cut panels has one more of the whole ones.
template <int phase> __device__ __forceinline__ Way way_of_warp(const Range &range, int warp, int chunks) {
  const auto first_of = [&](int warp) {
    return range.first + ((range.end - range.first) * warp + (phase == 0 ? 0 : WARPS - 1)) / WARPS;
  };
  const int first = first_of(warp);
  return {{first, first_of(warp + 1)}, first / chunks, first % chunks};
}

struct Shared {
  alignas(16) uint8_t rings[WARPS][SLOTS * CHUNKS * kChunkBytes];
  uint64_t barriers[WARPS][SLOTS];
  Piece pieces[2][WARPS][2];  // of cut panels and of whole ones: a range's first panel, if it begins before it, and its last
  Way ways[2][WARPS];         // through cut panels and through whole ones
  Share share;
  int seen;
  alignas(16) Slice slices[1];  // of x, all that the block multiplies
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

// One number of a panel, from what warps left of it, in the order of K. True if there is any: of whole panels not if one warp
// had all of it.
template <int phase>
__device__ __forceinline__ bool add_pieces(float &sum, int first, int chunks, int value, const Shared *shared) {
  const int end = first + chunks;
  bool any = false;
  sum = 0;
  unrolled<WARPS>([&](auto warp) {
    const Range range = shared->ways[phase][warp.value].range;
    const bool begun = range.first <= first, alone = phase == 1 && begun && end <= range.end;
    if (range.first < range.end && range.first < end && first < range.end && !alone) {
      sum += (&shared->pieces[phase][warp.value][begun][0][0])[value];
      any = true;
    }
  });
  return any;
}

// What blocks leave each other of cut panels, [slice][block][kAdders][kValues]: where the pieces of a panel lie, in the order
// of K.
struct Walk {
  float *pieces;
  int panel, cut, chunks_of_k;
  int slice = -1, block = 0, last = 0;

  __device__ __forceinline__ float *at(int slice, int block, int touched) const {
    return pieces + (size_t)((slice * gridDim.x + block) * kAdders + touched) * kValues;
  }
  // Null when there are no more.
  __device__ __forceinline__ const float *next() {
    if (block < last) return at(slice, ++block, 0);
    if (++slice >= (int)gridDim.y) return nullptr;
    const int chunks = SliceOfK(slice, chunks_of_k).chunks, first = panel * chunks;
    const Parts parts(cut * chunks);
    block = parts.block_of(first), last = parts.block_of(first + chunks - 1);
    return at(slice, block, panel - parts.first_of(block) / chunks);
  }
};

template <class F> __device__ __forceinline__ void each_value(int lane, F f) {
  unrolled<kOfLane>([&](auto i) {
    const int value = i.value * 32 + lane;
    if (kValues % 32 == 0 || value < kValues) f(i.value, value);
  });
}

// Of a cut panel `sums` are what `here` chunks of it came to. Who comes last has all of them together: makes them the sum of
// all pieces and returns true; others return false.
__device__ __forceinline__ bool gather(float (&sums)[kOfLane], Walk walk, int touched, int here, int *counter, int lane) {
  if (here == walk.chunks_of_k) return true;
  float *piece = walk.at(blockIdx.y, blockIdx.x, touched);
  each_value(lane, [&](int i, int value) { piece[value] = sums[i]; });
  __threadfence();
  __syncwarp();
  const int before = __shfl_sync(GPU_FULL_MASK, lane == 0 ? atomicAdd(counter, here) : 0, 0);
  if (before + here != walk.chunks_of_k) return false;
  __threadfence();
  if (lane == 0) *counter = 0;
  each_value(lane, [&](int i, int) { sums[i] = 0; });
  const float *next[2];  // as many at once: a load takes most of a microsecond
  do {
    float of_next[2][kOfLane];
    unrolled<2>([&](auto j) { next[j.value] = walk.next(); });
    unrolled<2>([&](auto j) {
      each_value(lane, [&](int i, int value) { of_next[j.value][i] = next[j.value] ? next[j.value][value] : 0.f; });
    });
    unrolled<2>([&](auto j) { each_value(lane, [&](int i, int) { sums[i] += of_next[j.value][i]; }); });
  } while (next[1]);
  return true;
}

// out [M][N] of x [M][K] and w [N / 16][K / 128] chunks; K a multiple of 32. M is at most ROWS.
// Grid: blocks of a slice, and slices, of which there are no more than chunks along K. pieces: floats, kValues times (kAdders
// a block and, of several slices, one a panel and slice). counters: one a panel, 0 before a launch and after it.
extern "C" __global__ void __launch_bounds__(kThreads, kResident)
grouped_gemm_ranges(const uint8_t *__restrict__ w, const Activation *__restrict__ x, float *__restrict__ out, float *pieces,
                    int *counters, int M, int N, int K) {
  GPU_DYNAMIC_SHARED(Shared, shared);
  // The compiler cannot know that it is the same for all lanes.
  const int lane = threadIdx.x, warp = __shfl_sync(GPU_FULL_MASK, (int)threadIdx.y, 0);
  const int panels = (N + kPanelRows - 1) / kPanelRows, chunks_of_k = (K + kChunkColumns - 1) / kChunkColumns;
  const SliceOfK slice(blockIdx.y, chunks_of_k);
  const int chunks = slice.chunks;
  const Share share(panels);
  const Parts parts(share.cut * chunks);
  let_next_launch_begin();
  const bool multiplies = warp < WARPS;
  const int first_whole = share.cut + blockIdx.x * share.each;
  const Range of_block[2] = {{parts.first_of(blockIdx.x), parts.first_of(blockIdx.x + 1)},
                             {first_whole * chunks, (first_whole + share.each) * chunks}};
  if (multiplies && lane == 0) {
    shared->ways[0][warp] = way_of_warp<0>(of_block[0], warp, chunks);
    shared->ways[1][warp] = way_of_warp<1>(of_block[1], warp, chunks);
  }
  __syncwarp();

  Ring<SLOTS, CHUNKS * kChunkBytes> ring(shared->rings[multiplies ? warp : 0], shared->barriers[multiplies ? warp : 0],
                                            lane, multiplies);
  // A copy ends with its panel's slice, behind which lies another slice.
  int to_ask = 0, chunk_asked = 0, phase_asked = 0, next = 0;
  const auto ask = [&] {
    while (to_ask == 0 && phase_asked < 2) {
      const Way way = shared->ways[phase_asked++][warp];
      to_ask = way.range.end - way.range.first, chunk_asked = way.chunk;
      next = way.panel * chunks_of_k + slice.first + way.chunk;
    }
    const int count = min(min(CHUNKS, to_ask), chunks - chunk_asked);
    ring.ask(w + (size_t)next * kChunkBytes, count * kChunkBytes);
    to_ask -= count, chunk_asked += count, next += count;
    if (chunk_asked == chunks) chunk_asked = 0, next += chunks_of_k - chunks;
  };
  if (multiplies)
#pragma unroll 1
    for (int i = 0; i < SLOTS; ++i) ask();

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
    each([&](Four &to, int row, int chunk) {
      to = read_four(x + (size_t)row * K, (slice.first + chunk) * kChunkColumns + lane * 4, K);
    });
    each([&](const Four &from, int row, int chunk) { split_row(shared->slices[chunk], row, from, lane); });
  }
  if (warp == 0 && lane == 0) shared->share = share;
  __syncthreads();

  float *const whole_pieces = pieces + (size_t)kAdders * gridDim.y * gridDim.x * kValues;  // [slice][panel][kValues]
  const auto store_value = [&](int panel, int value, float sum) {
    const int n = panel * kPanelRows + value / ROWS, m = value % ROWS;
    if (n < N && m < M) out[(size_t)m * N + n] = sum;
  };
  const auto whole_piece = [&](int slice, int panel) {
    return whole_pieces + (size_t)(slice * shared->share.each * gridDim.x + panel - shared->share.cut) * kValues;
  };
  // Of a whole panel, all that this block has.
  const auto finish = [&](int panel, int value, float sum) {
    if (gridDim.y == 1) store_value(panel, value, sum);
    else whole_piece(blockIdx.y, panel)[value] = sum;
  };
  if (multiplies) {
    Own own;
#pragma unroll 1
    for (int phase = 0; phase < 2; ++phase) {
      const Way way = shared->ways[phase][warp];
      int panel = way.panel, chunk = way.chunk;
      bool begun = chunk == 0;  // by this warp, the present panel
      Sums sums = {};
#pragma unroll 1
      for (int left = way.range.end - way.range.first; left > 0;) {
        const int count = min(min(CHUNKS, left), chunks - chunk);
        const uint8_t *slot = ring.wait();
#pragma unroll 1
        for (int c = 0; c < count; ++c)
          multiply(sums, OfRing{{slot + c * kChunkBytes, lane}}, shared->slices[chunk + c], own, lane);
        left -= count, chunk += count;
        __syncwarp();
        ask();
        if (chunk < chunks && left > 0) continue;
        // The panel ends, or the range does.
        add_groups(sums);
        const bool alone = phase == 1 && begun && chunk == chunks;
        float *piece = &shared->pieces[phase][warp][begun][0][0];
        // What depends on it cannot be kept in registers meanwhile, which are few.
        const int again = __shfl_sync(GPU_FULL_MASK, lane, lane);
        unrolled<kSums>([&](auto i) {
          const Place place = place_of(again, i.value);
          if (place.m < ROWS) {
            const int value = place.n * ROWS + place.m;
            if (alone) finish(panel, value, sums[i.value]);
            else piece[value] = sums[i.value];
          }
          sums[i.value] = 0;
        });
        chunk = 0, ++panel, begun = true;
      }
      if (phase == 0) pieces_are_there(false);
    }
  } else {
    pieces_are_there(true);
    const Range &range = of_block[0];
    const int touched = warp - WARPS, panel = range.first / chunks + touched, first = panel * chunks;
    if (first < range.end) {
      float sums[kOfLane];
      each_value(lane, [&](int i, int value) { add_pieces<0>(sums[i], first, chunks, value, shared); });
      const int here = min(range.end, first + chunks) - max(range.first, first);
      if (gather(sums, Walk{pieces, panel, share.cut, chunks_of_k}, touched, here, counters + panel, lane))
        each_value(lane, [&](int i, int value) { store_value(panel, value, sums[i]); });
    }
  }
  __syncthreads();
  const int each = shared->share.each, first = shared->share.cut + blockIdx.x * each;
  const auto each_of_whole = [&](auto f) {
#pragma unroll 1
    for (int number = warp * 32 + lane; number < each * kValues; number += kThreads)
      f(first + number / kValues, number % kValues);
  };
  each_of_whole([&](int panel, int value) {
    float sum;
    if (add_pieces<1>(sum, panel * chunks, chunks, value, shared)) finish(panel, value, sum);
  });
  if (gridDim.y == 1 || each == 0) return;
  // Blocks of the same whole panels have a counter, behind those of the panels that are cut.
  __threadfence();
  __syncthreads();
  int *counter = counters + shared->share.cut + blockIdx.x;
  if (warp == 0 && lane == 0) shared->seen = atomicAdd(counter, 1);
  __syncthreads();
  if (shared->seen + 1 != (int)gridDim.y) return;
  __threadfence();
  if (warp == 0 && lane == 0) *counter = 0;
  each_of_whole([&](int panel, int value) {
    float sum = 0;
#pragma unroll 4
    for (int slice = 0; slice < (int)gridDim.y; ++slice) sum += whole_piece(slice, panel)[value];
    store_value(panel, value, sum);
  });
}
GPU_KERNEL(grouped_gemm_ranges)

#endif
