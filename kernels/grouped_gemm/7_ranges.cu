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
// Every block brings all of x that it multiplies before it can begin, and of few panels and long K that is much for little: there
// blocks have a slice of K and only that part of x. Blocks of all slices share the panels alike, and who comes last of a
// cut panel, or of the blocks that have the same whole panels, adds up all slices, in the order of K. That is another form of
// the kernel: where there is one slice, chunks lie in memory as they are counted, and what is asked for first needs no
// search for a panel.
//
// Prediction: 110 instructions a chunk and warp with 4 bits and 105 with 8, a fifth of the time that a multiprocessor has with W4
// at the ceiling; 16 warps hide the 400 clocks of a chunk three times over. What is left is 2 us until the first bytes are
// multiplied, and 1 us at the end: 16 us for 50 MB, 26 us for 94.7 MB.
// Outcome (H200, cold, median, launches that overlap; W8 / W4): 17408 x 5120 24.1 / 15.4 us for M = 1, 3.94 and 3.27 TB/s, 25.1
// / 16.1 for M = 2; alone 2 us more. 5120 x 17408 25.5 / 16.6 us for M = 1 and, in four slices, 26.1 / 17.7 for M = 2. With f16
// activations 23.9 / 14.8 and 24.4 / 15.3 us for M = 1. 5120 x 6144 11.1 / 8.9 us, where kernel 5 takes 9.5 / 7.3; 2048 x 2048
// 3.5 / 3.2, a plain read 2.9 / 2.5.
// Taught: the ends, not the reading, set the time. One warp that adds up pieces instead of four took 1.4 us more; pieces of a
// number read one after the other, a branch and a load each, and 100 instructions more before the first copy 0.5 to 0.9 us; x
// with bank conflicts and divisions 41 ns for each KB of it. With slices all blocks meet once more: they pay from 2 rows of
// 17408 on. And x waits behind all weights that are asked for before it: with one of a warp's two slots before, and the other
// behind the first loads of x, W4 takes 3 to 5% less time, W8 1 to 3%.
// Tried in vain: more slots or warps; 11 warps of 72 registers, so that two blocks run on a multiprocessor (18.4 us for W4),
// or 16 of 48, wherever the next launch is let begin (10240 x 5120, W4 10.5 to 11.0 us and more; f16, which needs fewer, 10.0
// to 9.9, and 5120 x 6144 8.5 to 7.9, where kernel 5 is faster still); 8 rows, which fit with f16 or slices (no faster than
// kernel 6).
//
//   WARPS    that multiply
//   CHUNKS   that a warp asks for at a time
//   SLOTS    of a warp's ring, of CHUNKS chunks each
//   SLICED   1 where K is in several slices, else 0
//   ROWS: 1, 2 or 4; BITS, ACTIVATIONS: see panels.h
#include "panels.h"
#include "ring.h"

#if GPU_CUDA || GPU_SIMULATOR

// Warps that add up pieces of cut panels, a panel each, of which a block has part of up to three. With four, 160 pieces of x
// come in one round: 4 rows of 5120.
constexpr int kAdders = 4;
static_assert(WARPS >= 2, "a block's part of the cut panels is less than two, and a warp leaves two pieces");
constexpr int kBeforeX = 1;  // slots; x comes behind what was asked for before it, and nothing is multiplied without it
constexpr int kWarps = WARPS + kAdders, kThreads = 32 * kWarps;
constexpr int kValues = kPanelRows * ROWS, kOfLane = (kValues + 31) / 32;  // of a panel; of those of a lane, at most

using Piece = float[kPanelRows][ROWS];

constexpr bool kSliced = SLICED;
__device__ __forceinline__ int slices_of_k() { return kSliced ? gridDim.y : 1; }
__device__ __forceinline__ int own_slice() { return kSliced ? blockIdx.y : 0; }

// Things in a row, cut into parts as equal as can be.
struct Parts {
  int quotient, rest;  // of a part, which the first `rest` parts exceed by one
  __device__ __forceinline__ Parts(unsigned all, unsigned parts) : quotient(all / parts), rest(all - quotient * parts) {}
  __device__ __forceinline__ int first_of(int part) const { return part * quotient + min(part, rest); }
  __device__ __forceinline__ int size_of(int part) const { return quotient + (part < rest); }
  __device__ __forceinline__ int part_of(unsigned thing) const {
    const unsigned of_longer = rest * (quotient + 1);
    return thing < of_longer ? thing / (quotient + 1) : rest + (thing - of_longer) / quotient;
  }
};

struct Range { int first, end; };  // in chunks, which are numbered through the slices of all panels
struct alignas(8) Start { int panel, chunk; };  // of a range

// What a warp asks for next: where it lies, in chunks, how much of the range is left, and how much of the present panel.
struct Asked {
  int at, left, of_panel;
  // Behind its panel's slice lies another slice.
  __device__ __forceinline__ int step() const { return kSliced ? min(min(CHUNKS, left), of_panel) : min(CHUNKS, left); }
  __device__ __forceinline__ void take(int count, int chunks, int chunks_of_k) {
    at += count, left -= count, of_panel -= count;
    if (kSliced && of_panel == 0) at += chunks_of_k - chunks, of_panel = chunks;
  }
};

struct Shared {
  alignas(16) uint8_t rings[WARPS][SLOTS * CHUNKS * kChunkBytes];
  uint64_t barriers[WARPS][SLOTS];
  Piece pieces[2][WARPS][2];  // of cut panels and of whole ones: a range's first panel, if it begins before it, and its last
  Start starts[2][WARPS];
  int firsts[2][WARPS + 1];   // chunks of the warps' ranges, and where the last one ends; of whole panels, the block's
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

// One number of a panel, from what warps left of it, in the order of K. False if one warp had all of it: of a whole panel
// nothing is left then. All pieces are read, and those of other panels not taken: to go around them takes longer.
__device__ __forceinline__ bool add_pieces(float &sum, int phase, int first, int chunks, int value, const Shared *shared) {
  const int end = first + chunks;
  bool alone = false;
  sum = 0;
  unrolled<WARPS>([&](auto warp) {
    const int begin = shared->firsts[phase][warp.value], until = shared->firsts[phase][warp.value + 1];
    const bool begun = begin <= first;
    const float piece = (&shared->pieces[phase][warp.value][begun][0][0])[value];
    sum += max(begin, first) < min(until, end) ? piece : 0.f;
    alone |= begun && end <= until;
  });
  return !alone;
}

// What blocks leave each other of cut panels, [slice][block][kAdders][kValues]: where the pieces of a panel lie, in the order
// of K.
struct Walk {
  float *pieces;
  int panel, cut;
  Parts slices;
  int slice = -1, block = 0, last = 0;

  __device__ __forceinline__ float *at(int slice, int block, int touched) const {
    return pieces + (size_t)((slice * gridDim.x + block) * kAdders + touched) * kValues;
  }
  // Null when there are no more.
  __device__ __forceinline__ const float *next() {
    if (block < last) return at(slice, ++block, 0);
    if (++slice >= slices_of_k()) return nullptr;
    const int chunks = slices.size_of(slice), first = panel * chunks;
    const Parts parts(cut * chunks, gridDim.x);
    block = parts.part_of(first), last = parts.part_of(first + chunks - 1);
    return at(slice, block, panel - parts.first_of(block) / chunks);
  }
};

template <class F> __device__ __forceinline__ void each_value(int lane, F f) {
  unrolled<kOfLane>([&](auto i) {
    const int value = i.value * 32 + lane;
    if (kValues % 32 == 0 || value < kValues) f(i.value, value);
  });
}

// Of a cut panel `sums` are what `here` of its chunks came to. Who comes last has all of them together: makes them the sum of
// all pieces and returns true; others return false.
__device__ __forceinline__ bool gather(float (&sums)[kOfLane], Walk walk, int touched, int here, int chunks_of_k, int *counter,
                                       int lane) {
  if (here == chunks_of_k) return true;
  float *piece = walk.at(own_slice(), blockIdx.x, touched);
  each_value(lane, [&](int i, int value) { piece[value] = sums[i]; });
  __threadfence();
  __syncwarp();
  const int before = __shfl_sync(GPU_FULL_MASK, lane == 0 ? atomicAdd(counter, here) : 0, 0);
  if (before + here != chunks_of_k) return false;
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

// out [M][N] of x [M][K] and w [N / 16][K / 128] chunks; K a multiple of 32. M is at most ROWS. each: panels that a block has
// whole; those that are cut come first, and are less than two a block.
// Grid: blocks of a slice, and slices, of which there are no more than chunks along K. pieces: floats, kValues times (kAdders
// a block and, of several slices, one a panel and slice). counters: one a panel, 0 before a launch and after it.
extern "C" __global__ void __launch_bounds__(kThreads, 1)
grouped_gemm_ranges(const uint8_t *__restrict__ w, const Activation *x, float *__restrict__ out, float *pieces,
                    int *counters, int M, int N, int K, int each) {
  GPU_DYNAMIC_SHARED(Shared, shared);
  // The compiler cannot know that it is the same for all lanes.
  const int lane = threadIdx.x, warp = __shfl_sync(GPU_FULL_MASK, (int)threadIdx.y, 0);
  const int panels = (N + kPanelRows - 1) / kPanelRows, chunks_of_k = (K + kChunkColumns - 1) / kChunkColumns;
  const Parts slices(chunks_of_k, slices_of_k());
  const int slice = slices.first_of(own_slice()), chunks = slices.size_of(own_slice());  // all that the block has of K
  const int cut_panels = panels - each * gridDim.x;
  let_next_launch_begin();
  const bool multiplies = warp < WARPS;

  const Parts parts(cut_panels * chunks, gridDim.x);
  const Range cut{parts.first_of(blockIdx.x), parts.first_of(blockIdx.x + 1)};
  const auto first_of_cut = [&](int warp) -> int { return cut.first + unsigned(cut.end - cut.first) * warp / WARPS; };
  // Of the whole panels, from the block's first on: who has one chunk less of the cut ones has one more of these.
  const auto first_of_whole = [&](int warp) -> int { return (unsigned(each * chunks * warp) + WARPS - 1) / WARPS; };
  const int first_whole = cut_panels + blockIdx.x * each;  // panel

  Ring<SLOTS, CHUNKS * kChunkBytes> ring(shared->rings[multiplies ? warp : 0], shared->barriers[multiplies ? warp : 0],
                                            lane, multiplies);
  const int first = first_of_cut(warp), first_again = first_of_whole(warp);
  const auto start_of_cut = [&]() -> Start { return {int((unsigned)first / chunks), int((unsigned)first % chunks)}; };
  // No division: warps have equal shares of the panels, but for the part of a chunk by which `first_again` is rounded up.
  const auto start_of_whole = [&]() -> Start {
    const int panel = unsigned(each * warp) / WARPS, chunk = first_again - panel * chunks;
    return chunk < chunks ? Start{panel, chunk} : Start{panel + 1, 0};
  };
  // Without slices chunks lie as they are counted.
  const auto asked_from = [&](int panel, const Start &start, int left) {
    return Asked{(panel + start.panel) * chunks_of_k + slice + start.chunk, left, chunks - start.chunk};
  };
  Asked asked = asked_from(0, kSliced ? start_of_cut() : Start{0, first}, first_of_cut(warp + 1) - first);
  bool all_asked = false;
  const auto ask = [&] {
    if (asked.left == 0 && !all_asked) {
      const int left = first_of_whole(warp + 1) - first_again;
      asked = asked_from(first_whole, kSliced ? start_of_whole() : Start{0, first_again}, left), all_asked = true;
    }
    const int count = asked.step();
    ring.ask(w + (size_t)asked.at * kChunkBytes, count * kChunkBytes);
    asked.take(count, chunks, chunks_of_k);
  };
  if (multiplies)
#pragma unroll 1
    for (int i = 0; i < kBeforeX; ++i) ask();

  if (lane == 0 && warp <= WARPS) shared->firsts[0][warp] = first, shared->firsts[1][warp] = first_again;
  // Where x is waited for, rather than when it is there.
  if (lane == 0 && multiplies) shared->starts[0][warp] = start_of_cut(), shared->starts[1][warp] = start_of_whole();

  await_launch_before();
  constexpr int kAtOnce = 8, kOfRow = kWarps / ROWS;  // a round of loads is a microsecond; warps that bring a row of x
  const int row = warp % ROWS, end = min(K, (slice + chunks) * kChunkColumns);
  const auto ask_again = [&] {
    if (multiplies)
#pragma unroll 1
      for (int i = kBeforeX; i < SLOTS; ++i) ask();
  };
  if (row < M && warp < kOfRow * ROWS) {
    int from = warp / ROWS;
#pragma unroll 1
    do {
      Four four[kAtOnce];
      unrolled<kAtOnce>([&](auto i) {
        four[i.value] = read_four(x + (size_t)row * K, slice + from + i.value * kOfRow, lane, end);
      });
      if (from == warp / ROWS) ask_again();
      unrolled<kAtOnce>([&](auto i) {
        const int chunk = from + i.value * kOfRow;
        if (chunk < chunks) split_row(shared->slices[chunk], row, four[i.value], lane);
      });
      from += kAtOnce * kOfRow;
    } while (from < chunks);
  } else {
    ask_again();
  }
  __syncthreads();

  const auto store_value = [&](int panel, int value, float sum) {
    const int n = panel * kPanelRows + value / ROWS, m = value % ROWS;
    if (n < N && m < M) out[(size_t)m * N + n] = sum;
  };
  // Of a whole panel, all that blocks of one slice have, behind the pieces of cut panels: [slice][block][each][kValues].
  const auto whole_piece = [&](int slice, int whole) {
    const int blocks = gridDim.y * gridDim.x, block = slice * gridDim.x + blockIdx.x;
    return pieces + (size_t)(kAdders * blocks + block * each + whole) * kValues;
  };
  const auto finish = [&](int whole, int value, float sum) {
    if constexpr (kSliced) whole_piece(blockIdx.y, whole)[value] = sum;
    else store_value(first_whole + whole, value, sum);
  };
  if (multiplies) {
    Own own;
#pragma unroll 1
    for (int phase = 0; phase < 2; ++phase) {
      Start at = shared->starts[phase][warp];
      int left = shared->firsts[phase][warp + 1] - shared->firsts[phase][warp];
      bool begun = at.chunk == 0;  // by this warp, the present panel
      Sums sums = {};
#pragma unroll 1
      while (left > 0) {
        const int count = Asked{0, left, chunks - at.chunk}.step();
        const uint8_t *slot = ring.wait();
#pragma unroll 1
        for (int c = 0; c < count; ++c) {
          multiply(sums, InShared{slot + c * kChunkBytes, lane}, shared->slices[at.chunk], own, lane);
          const bool to_end = ++at.chunk == chunks;
          if (--left > 0 && !to_end) continue;
          add_groups(sums);
          float *piece = &shared->pieces[phase][warp][begun][0][0];
          // What depends on it shall not take up registers meanwhile.
          const int again = __shfl_sync(GPU_FULL_MASK, lane, lane);
          unrolled<kSums>([&](auto i) {
            const Place place = place_of(again, i.value);
            if (place.m < ROWS) {
              const int value = place.n * ROWS + place.m;
              if (phase == 1 && begun && to_end) finish(at.panel, value, sums[i.value]);
              else piece[value] = sums[i.value];
            }
            sums[i.value] = 0;
          });
          if (to_end) at.chunk = 0, ++at.panel;
          begun = true;
        }
        __syncwarp();
        ask();
      }
      if (phase == 0) pieces_are_there(false);
    }
  } else {
    pieces_are_there(true);
    const int touched = warp - WARPS, panel = (unsigned)cut.first / chunks + touched, begin = panel * chunks;
    if (begin < cut.end) {
      float sums[kOfLane];
      each_value(lane, [&](int i, int value) { add_pieces(sums[i], 0, begin, chunks, value, shared); });
      const int here = min(cut.end, begin + chunks) - max(cut.first, begin);
      if (gather(sums, Walk{pieces, panel, cut_panels, slices}, touched, here, chunks_of_k, counters + panel, lane))
        each_value(lane, [&](int i, int value) { store_value(panel, value, sums[i]); });
    }
  }
  __syncthreads();
  const auto each_of_whole = [&](auto f) {
#pragma unroll 1
    for (int number = warp * 32 + lane; number < each * kValues; number += kThreads) f(number / kValues, number % kValues);
  };
  each_of_whole([&](int whole, int value) {
    float sum;
    if (add_pieces(sum, 1, whole * chunks, chunks, value, shared)) finish(whole, value, sum);
  });
  if (!kSliced || each == 0) return;
  // Blocks of the same whole panels have the counter of the first of these.
  __threadfence();
  __syncthreads();
  int *counter = counters + first_whole;
  if (warp == 0 && lane == 0) shared->seen = atomicAdd(counter, 1);
  __syncthreads();
  if (shared->seen + 1 != slices_of_k()) return;
  __threadfence();
  if (warp == 0 && lane == 0) *counter = 0;
  each_of_whole([&](int whole, int value) {
    float sum = 0;
#pragma unroll 4
    for (int slice = 0; slice < slices_of_k(); ++slice) sum += whole_piece(slice, whole)[value];
    store_value(first_whole + whole, value, sum);
  });
}
GPU_KERNEL(grouped_gemm_ranges)

#endif
