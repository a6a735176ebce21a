// 6. One block a multiprocessor, and weights that come by themselves.
//
// Blocks of kernel 5 come and go: each waits for its first bytes, splits activations that others have split, and stops reading
// while it adds up. Here a block stays for the whole product. Each of its warps has a ring of slots in shared memory
// that bulk copies fill without a register or an instruction of its lanes: all slots are asked for before anything else is
// done, and a slot again as soon as its chunk is multiplied, whatever tile it belongs to. So the memory never waits, while
// activations are split, sums of blocks meet or a tile is stored. Every block takes as many steps as the others (schedule.h),
// tiles that are cut come first, and adding up their pieces hides behind the whole ones.
//
// Warps lie side by side along the rows of w and share a step of x, which they split for all: the next one before they
// multiply the present one, while that of the one after is on its way. So x is read once for 256 rows of w.
//
// Prediction: 130 KB in flight a multiprocessor, three times what the ceiling needs; instructions take a quarter of the
// time with W8 and half of it with W4. What is left is the beginning, 2 us until bytes flow, and the end, where
// blocks differ by one step: 25 us for 94.7 MB and 15 us for 50 MB. With 32 rows the activations are 16 KB for 35 KB of W8 codes:
// L2 gives what both take, 140 MB in 28 us, but has little left.
// Outcome (H200, cold, median; 17408 x 5120; W8 / W4): M = 8 34.6 / 29.8 us, 16 45.8 / 45.1, 32 71.7 / 69.3; with f16
// activations 32.8 / 25.6 us at M = 8, 39.5 / 39.0 at 16. Launches that overlap take 3 to 5 us less.
// Taught: with 8 warps one row took 32 us, W8 and W4 alike: neither memory nor instructions bound, but the latency of dependent
// instructions in too few warps. W4, with as many instructions as W8, gains little from half the bytes. Warps along K, all of
// x in shared memory and two panels a warp were tried too: slower than this, or than kernel 7.
//
//   WARPS    of a block: one beside the other along the rows of w, a panel each
//   CHUNKS   along K that a warp takes at a time: a step of the block
//   SLOTS    of a warp's ring, a step of it each
//   BITS, ACTIVATIONS, ROWS: see panels.h
#include "panels.h"
#include "ring.h"
#include "schedule.h"

#if GPU_CUDA || GPU_SIMULATOR

constexpr int kThreads = 32 * WARPS;

// One step after the other, through parts of tiles and whole ones.
struct Cursor {
  Schedule schedule;
  Work work;
  int step;
  __device__ __forceinline__ Cursor(int tiles, int steps) : schedule(tiles, steps) { begin(); }
  __device__ __forceinline__ void begin() { schedule.next(work), step = work.first; }
  __device__ __forceinline__ bool there() const { return work.tile < schedule.tiles; }
  __device__ __forceinline__ void advance() {
    if (++step == work.end) begin();
  }
};

struct Shared {
  alignas(16) uint8_t rings[WARPS][SLOTS * CHUNKS * kChunkBytes];
  uint64_t barriers[WARPS][SLOTS];
  int seen;
  alignas(16) Slice slices[2][CHUNKS];  // of x: of this step and of the next one, in turn
};

// out [M][N] of x [M][K] and w [N / 16][K / 128] chunks; K a multiple of 32. M is at most ROWS.
// Grid: as many blocks as run at once, and no more than there are steps. pieces and counters: see schedule.h.
extern "C" __global__ void __launch_bounds__(kThreads, 1)
grouped_gemm_ring(const uint8_t *__restrict__ w, const Activation *x, float *__restrict__ out, float4 *pieces,
                  int *counters, int M, int N, int K) {
  GPU_DYNAMIC_SHARED(Shared, shared);
  // The compiler cannot know that it is the same for all lanes.
  const int lane = threadIdx.x, warp = __shfl_sync(GPU_FULL_MASK, (int)threadIdx.y, 0);
  const int panels = (N + kPanelRows - 1) / kPanelRows, chunks = (K + kChunkColumns - 1) / kChunkColumns;
  const int tiles = (panels + WARPS - 1) / WARPS, steps = (chunks + CHUNKS - 1) / CHUNKS;
  const auto chunks_of = [&](int step) { return min(CHUNKS, chunks - step * CHUNKS); };

  let_next_launch_begin();
  Ring<SLOTS, CHUNKS * kChunkBytes> ring(shared->rings[warp], shared->barriers[warp], lane);
  Cursor asked(tiles, steps);
  const auto ask = [&] {
    const int panel = min(asked.work.tile * WARPS + warp, panels - 1);  // the last one again, rather than none
    ring.ask(w + ((size_t)panel * chunks + asked.step * CHUNKS) * kChunkBytes,
             asked.there() ? chunks_of(asked.step) * kChunkBytes : 0);
    if (asked.there()) asked.advance();
  };
#pragma unroll 1
  for (int i = 0; i < SLOTS; ++i) ask();

  // A step's slices of x, 128 columns of a row to a warp and turn; the last row again, rather than none.
  constexpr int kTurns = (ROWS * CHUNKS + WARPS - 1) / WARPS;
  const auto read_x = [&](int step, Four (&to)[kTurns]) {
    unrolled<kTurns>([&](auto i) {
      const int number = i.value * WARPS + warp, row = number / CHUNKS, chunk = step * CHUNKS + number % CHUNKS;
      if (row < ROWS) to[i.value] = read_four(x + (size_t)min(row, M - 1) * K, chunk, lane, K);
    });
  };
  const auto split_x = [&](Slice (&to)[CHUNKS], const Four (&from)[kTurns]) {
    unrolled<kTurns>([&](auto i) {
      const int number = i.value * WARPS + warp, row = number / CHUNKS;
      if (row < ROWS) split_row(to[number % CHUNKS], row, from[i.value], lane);
    });
  };
  await_launch_before();
  Cursor coming(tiles, steps);  // whose x is on its way, to be split a step later
  Four four[kTurns];
  read_x(coming.step, four);
  split_x(shared->slices[0], four);
  coming.advance();
  if (coming.there()) read_x(coming.step, four);
  __syncthreads();

  Sums sums = {};
  Own own;
  int turn = 0;
#pragma unroll 1
  for (Cursor at(tiles, steps); at.there(); at.advance()) {
    if (coming.there()) {
      split_x(shared->slices[turn ^ 1], four);
      coming.advance();
      if (coming.there()) read_x(coming.step, four);
    }
    const uint8_t *slot = ring.wait();
#pragma unroll 1
    for (int c = 0, count = chunks_of(at.step); c < count; ++c)
      multiply(sums, InShared{slot + c * kChunkBytes, lane}, shared->slices[turn][c], own, lane);
    __syncwarp();
    ask();
    turn ^= 1;
    __syncthreads();
    if (at.step + 1 == at.work.end) {
      add_groups(sums);
      if (gather(sums, at.schedule.cut_of(at.work), Pieces<sizeof(Sums) / sizeof(float), kThreads>{pieces},
                 counters + at.work.tile, &shared->seen, warp * 32 + lane, [] { __syncthreads(); }))
        store(sums, out, at.work.tile * WARPS + warp, M, N, lane);
      unrolled<kSums>([&](auto i) { sums[i.value] = 0.f; });
    }
  }
}
GPU_KERNEL(grouped_gemm_ring)

#endif
