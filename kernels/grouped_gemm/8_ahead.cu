// 8. A small weight is all on its way before the launch before has ended.
//
// Of a small weight, bytes take half a microsecond, and launches that follow each other most of three. From the moment that a
// launch may read x to that at which the next one may, everything is latency, and all of it counts. Here a block has a panel
// whole: nothing is left to other blocks. Its warps ask for their chunks by one copy each, into shared memory, which takes no
// register and leaves room for blocks of the next launch beside this one's. What is left to do with x is to read it, to split
// it, to multiply one chunk or a few, and to add up what the warps have, by four lanes a number.
//
// The next launch begins when this one has asked for x, and not before: its weights would stand in the way of x, and its
// blocks, which come when one has ended here and another one there, would meet on some multiprocessors while others have none.
// This is for weights of no more panels than there are multiprocessors; others run, too, but kernel 5 is better for them.
//
// Predicted: 1.7 us on 1024 x 2048 and 2.3 us on 2048 x 2048, M = 1, where kernels 5 and 7 take 2.5 and 3.0: 0.5 us to read x,
// 0.5 to multiply a chunk, 0.2 to add up and 0.5 from one launch to the next. Up to 8 rows little more, since a warp splits
// and multiplies no more than a chunk of each.
// Outcome (H200, cold, median, launches that overlap; W8 / W4): M = 1 2048 x 2048 2.8 / 2.5 us, where kernels 5 and 7 take 3.3
// / 3.0; 1024 x 2048 1.9 / 1.8 (2.6 / 2.6), 2048 x 6144 4.9 / 4.0 (5.4 / 5.2). M = 8, f16 3.6 / 3.1, 2.7 / 2.6 and 7.6 / 6.4
// us, where 7_packed_wgmma.cu takes 5.4 / 5.1, 4.7 / 4.7 and 7.4 / 6.0. Alone 0.7 to 1.4 us more.
// Taught: clocks read in the kernel took the microseconds apart. From the end of all blocks to the moment when the next launch
// may read x it is 0.5 us, whatever they do. Of 3 us before, most was waiting for the slowest block: x came after 0.4 us to most,
// and after 1.4 us where weights were asked for at the same time, or where two blocks had met. Activations that branches stand
// between, one row each, cost 0.4 us of 8 rows.
// Tried in vain: running through everything once without x, so that instructions are there (0.4 to 1 us more); a break before
// asking for weights; operands made of the codes while x comes, two sums for each product instead of one (nothing). For 6144 x
// 2048, three panels a multiprocessor, blocks of 8 warps with room for four that begin early, as many on each: 4.4 / 3.7 us,
// where kernel 5 takes 5.0 / 4.0. It would be another mode for one shape.
//
//   CHUNKS  a warp has at most
//   ROWS: 1, 2, 4 or 8; BITS, ACTIVATIONS: see panels.h
#include "panels.h"
#include "ring.h"

#if GPU_CUDA || GPU_SIMULATOR

constexpr int kWarps = 16, kThreads = 32 * kWarps;
constexpr int kValues = kPanelRows * ROWS;                // of the panel
constexpr int kAdders = 4, kPieces = kWarps / kAdders;    // lanes that add up one of them, of so many warps each
constexpr int kPitch = kValues + 32 / kAdders / kPieces;  // so that pieces that a warp reads at once are in different banks
constexpr int kAtOnce = ROWS > 4 ? 1 : (ACTIVATIONS == 0 ? 8 : 16) / ROWS;  // chunks whose activations lanes have registers for
static_assert(kValues * kAdders <= kThreads);

struct Shared {
  alignas(16) uint8_t weights[kWarps][CHUNKS * kChunkBytes];
  uint64_t barriers[kWarps];
  alignas(16) Slice slices[kWarps][CHUNKS];
  float sums[kWarps][kPitch];
};

// out [M][N] of x [M][K] and w [N / 16][K / 128] chunks; K a multiple of 32. M is at most ROWS, K at most 16 * CHUNKS * 128.
// Grid: panels.
extern "C" __global__ void __launch_bounds__(kThreads, 2)
grouped_gemm_ahead(const uint8_t *__restrict__ w, const Activation *x, float *__restrict__ out, int M, int N, int K) {
  GPU_DYNAMIC_SHARED(Shared, shared);
  // The compiler cannot know that it is the same for all lanes.
  const int lane = threadIdx.x, warp = __shfl_sync(GPU_FULL_MASK, (int)threadIdx.y, 0), panel = blockIdx.x;
  const int chunks = (K + kChunkColumns - 1) / kChunkColumns;
  const int first = chunks * warp / kWarps, count = chunks * (warp + 1) / kWarps - first;
  Slice (&slices)[CHUNKS] = shared->slices[warp];
  Ring<1, CHUNKS * kChunkBytes> ring(shared->weights[warp], shared->barriers + warp, lane);
  ring.ask(w + ((size_t)panel * chunks + first) * kChunkBytes, count * kChunkBytes);

  await_launch_before();
  unrolled<(CHUNKS + kAtOnce - 1) / kAtOnce>([&](auto turn) {
    constexpr int begin = turn.value * kAtOnce, here = CHUNKS - begin < kAtOnce ? CHUNKS - begin : kAtOnce;
    Four four[here][ROWS] = {};
    unrolled<here>([&](auto i) {
      if (begin + i.value < count)
        unrolled<ROWS>([&](auto row) {  // the last one again, rather than none
          four[i.value][row.value] = read_four(x + (size_t)min(row.value, M - 1) * K, first + begin + i.value, lane, K);
        });
    });
    if (begin + here == CHUNKS) let_next_launch_begin();
    unrolled<here>([&](auto i) {
      unrolled<ROWS>([&](auto row) { split_row(slices[begin + i.value], row.value, four[i.value][row.value], lane); });
    });
  });
  __syncwarp();

  Sums sums = {};
  Own own;
  const uint8_t *chunk = count > 0 ? ring.wait() : nullptr;
#pragma unroll 1
  for (int i = 0; i < count; ++i, chunk += kChunkBytes) multiply(sums, InShared{chunk, lane}, slices[i], own, lane);
  add_groups(sums);
  unrolled<kSums>([&](auto i) {
    const Place place = place_of(lane, i.value);
    if (place.m < ROWS) shared->sums[warp][place.n * ROWS + place.m] = sums[i.value];
  });
  __syncthreads();
  const int thread = warp * 32 + lane, value = thread / kAdders, adder = thread % kAdders;
  if (value >= kValues) return;
  float sum = 0;
  unrolled<kPieces>([&](auto i) { sum += shared->sums[adder * kPieces + i.value][value]; });
  unrolled<2>([&](auto bit) { sum += __shfl_xor_sync(GPU_FULL_MASK, sum, 1 << bit.value); });
  const int n = panel * kPanelRows + value / ROWS, m = value % ROWS;
  if (adder == 0 && n < N && m < M) out[(size_t)m * N + n] = sum;
}
GPU_KERNEL(grouped_gemm_ahead)

#endif
