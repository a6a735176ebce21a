// 5. Weights in the order of the tensor cores' operands: no conversion to float, no multiply-add a code and row.
//
// Kernel 4 spends two instructions on a code with one row of x and six with four. A matrix instruction multiplies 256 codes
// by up to 8 columns at once, and so it can take an activation in two parts, high and low, and be as accurate as floats
// (panels.h). Codes lie in memory just as lanes need them: 16 bytes a lane, a warp's 512 in a row, and f16 after one
// permutation and one addition a pair. All warps of a block have the same panels and part of K each; they ask for the next
// chunk before they multiply what they have. What they have summed up meets in shared memory, and the last block of a tile adds
// the pieces of others, in the order of K. One launch.
//
// Prediction: 110 instructions for a chunk of 2048 codes, 45 for its activations a row, against 130 clocks at the ceiling on
// four schedulers: reading is what bounds up to 4 rows, 3 TB/s with W8 and somewhat less with W4, whose blocks are half as
// long while they begin and end as slowly.
// Outcome (H200, cold, median; M = 1, W8 / W4): 26.9 / 19.6 us on 17408 x 5120, 3.52 and 2.56 TB/s; 24.8 / 19.3 us on
// 5120 x 17408; 11.0 / 8.8 us on 5120 x 6144. With launches that overlap 25.2 / 18.3, 24.4 / 17.7 and 9.5 / 7.3; 2048 x 2048,
// whose two chunks a warp are both asked for before the launch before has ended, 4.3 / 3.8 us alone and 3.4 / 3.0 overlapped.
// Taught: when groups came to share the sums of a product (panels.h), which halved the instructions, W4 gained 2 us and W8
// nothing: it waits for memory. Blocks that come and go, 24 warps a multiprocessor, fill each other's gaps, and on the narrow
// shapes nothing here is faster. But every block splits what all others split too: 4 rows took 46 / 40 us, 32 rows 575 us.
//
//   ROWS: 1, 2 or 4; BITS, ACTIVATIONS: see panels.h
#include "panels.h"
#include "schedule.h"

#if GPU_CUDA || GPU_SIMULATOR

constexpr int kWarps = 8;

// out [M][N] of x [M][K] and w [N / 16][K / 128] chunks; K a multiple of 32. M is at most ROWS.
// Grid: panels, slices of K. pieces and counters: see schedule.h, a range being a block, of 32 threads.
extern "C" __global__ void __launch_bounds__(32 * kWarps, 3)
grouped_gemm_panels(const uint8_t *__restrict__ w, const Activation *x, float *__restrict__ out, float4 *pieces,
                    int *counters, int M, int N, int K) {
  __shared__ Slice slices_of_x[kWarps];  // a warp's own each
  __shared__ float together[kWarps][kSums][32];
  __shared__ int seen;
  const int lane = threadIdx.x, warp = threadIdx.y, panel = blockIdx.x, z = blockIdx.y, slices = gridDim.y;
  const int chunks = (K + kChunkColumns - 1) / kChunkColumns;
  const int begin = (int64_t)chunks * z / slices, end = (int64_t)chunks * (z + 1) / slices;
  Slice &slice = slices_of_x[warp];
  let_next_launch_begin();

  Sums sums = {};
  Own own;
  InRegisters here, next;
  int c = begin + warp;
  constexpr int kTurn = kWarps * kChunkBytes;
  const uint8_t *chunk = w + ((size_t)panel * chunks + c) * kChunkBytes;
  if (c < end) here.read(chunk, lane);
  if (c + kWarps < end && lane < kChunkBytes / 128) prefetch_to_l2(chunk + kTurn + lane * 128);  // no register for it yet
  await_launch_before();
#pragma unroll 1
  for (; c < end; c += kWarps) {
    chunk += kTurn;
    if (c + kWarps < end) next.read(chunk, lane);
    __syncwarp();  // all have read what the slice held
    unrolled<ROWS>([&](auto row) {
      if (row.value < M)
        split_row(slice, row.value, read_four(x + (size_t)row.value * K, c, lane, K), lane);
    });
    __syncwarp();
    multiply(sums, here, slice, own, lane);
    here = next;
  }

  add_groups(sums);
  unrolled<kSums>([&](auto i) { together[warp][i.value][lane] = sums[i.value]; });
  __syncthreads();
  if (warp > 0) return;
  unrolled<kWarps - 1>([&](auto other) {
    unrolled<kSums>([&](auto i) { sums[i.value] += together[other.value + 1][i.value][lane]; });
  });
  if (gather(sums, Cut{slices, z, panel * slices}, Pieces<4, 32>{pieces}, counters + panel, &seen, lane, [] { __syncwarp(); }))
    store(sums, out, panel, M, N, lane);
}
GPU_KERNEL(grouped_gemm_panels)

#endif
