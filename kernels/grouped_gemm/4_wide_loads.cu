// 4. The article's strips and arithmetic, with enough bytes on their way.
//
// A thread of kernel 2 reads 4 bytes of codes at a time and uses them at once: a multiprocessor has a few KB in flight, and
// the memory's latency is what is measured. Here a thread reads 16 neighbouring columns at once, past L1, and asks for all it
// needs of the next group before it multiplies what it has of this one: 8 loads of 16 bytes, the group's other columns
// of K being those of three more threads. K is split within the block, so that even few columns make enough threads, and
// across blocks as far as more of them run at once; the last block of a tile adds the pieces, in the order of K. One launch.
//
// Prediction: 64 KB in flight a multiprocessor are more than what the ceiling needs (40 KB), so that the instructions
// bound it: a code costs a conversion and a multiply-add, 0.7 M codes a multiprocessor at 64 conversions a clock 6 us on
// 17408 x 5120, hidden behind 24 us of reading only as far as warps overlap. 30 us, 3.2 TB/s for M = 1; each row of x costs
// another multiply-add a code, and four of them about as much as the memory.
// Outcome (H200, cold, median): M = 1 58.7 us, 1.61 TB/s; 40.7 us on 5120 x 17408 and 19.8 us on 5120 x 6144, whose fewer tiles
// are cut along K. M = 2 78.7 us, 8 141 us, 32 418 us: loads no longer bound, instructions do, and for codes of 4 bits, which
// are bytes here, as for those of 8.
//
//   GROUP   codes that share a scale: a multiple of 32
//   ROWS    of x that a block multiplies: 1, 2 or 4
#include "schedule.h"

constexpr int kThreads = 256, kTileColumns = 128, kLanes = kTileColumns / 16;  // threads along the columns
constexpr int kQuarters = 4, kParts = kThreads / kLanes / kQuarters;          // of a group; of the groups
constexpr int kLoads = 32 / kQuarters;

// 16 columns of 8 codes along K.
struct Codes { uint4 at[kLoads]; };

__device__ __forceinline__ float code_of(const uint4 &v, int column) {
  const uint32_t word = column < 4 ? v.x : column < 8 ? v.y : column < 12 ? v.z : v.w;
  return float(int8_t(word >> column % 4 * 8));
}

// out [M][N] of a [M][K] and w [K][Npad] with scales [K / GROUP][Npad]; K a multiple of 32 and GROUP.
// Grid: tiles of 128 columns, rows of x in ROWS each, slices of K. pieces and counters: see schedule.h, a range being a block.
extern "C" __global__ void __launch_bounds__(kThreads, ROWS == 1 ? 2 : 1)
grouped_gemm_wide(const float *__restrict__ a, const int8_t *__restrict__ w, const float *__restrict__ w_scales,
                  float *__restrict__ out, float4 *pieces, int *counters, int M, int N, int Npad, int K) {
  __shared__ float4 together[kThreads / kLanes][kTileColumns / 4];
  __shared__ int seen;
  const int thread = threadIdx.x, part = thread / kLanes;
  const int column = blockIdx.x * kTileColumns + thread % kLanes * 16, first_row = blockIdx.y * ROWS;
  const int groups = K / 32, slices = gridDim.z, z = blockIdx.z;
  const int begin = (int64_t)groups * z / slices, end = (int64_t)groups * (z + 1) / slices;

  const auto read = [&](int group, Codes &to) {
    const int8_t *from = w + (size_t)(group * 32 + part % kQuarters * kLoads) * Npad + column;
    unrolled<kLoads>([&](auto i) { to.at[i.value] = load_once(from + (size_t)i.value * Npad); });
  };
  float sums[ROWS][16] = {};
  const auto multiply = [&](int group, const Codes &codes) {
    const float *x = a + (size_t)first_row * K + group * 32 + part % kQuarters * kLoads;
    float4 scales[4];
    unrolled<4>([&](auto i) {
      scales[i.value] = reinterpret_cast<const float4 *>(w_scales + (size_t)(group * 32 / GROUP) * Npad + column)[i.value];
    });
    float own[ROWS][kLoads];
    unrolled<ROWS>([&](auto r) {
      const float *row = first_row + r.value < M ? x + (size_t)r.value * K : x;
      unrolled<kLoads / 4>([&](auto i) {
        const float4 four = reinterpret_cast<const float4 *>(row)[i.value];
        float *to = own[r.value] + 4 * i.value;
        to[0] = four.x, to[1] = four.y, to[2] = four.z, to[3] = four.w;
      });
    });
    unrolled<16>([&](auto c) {
      float dot[ROWS] = {};
      unrolled<kLoads>([&](auto k) {
        const float code = code_of(codes.at[k.value], c.value);
        unrolled<ROWS>([&](auto r) { dot[r.value] = fmaf(code, own[r.value][k.value], dot[r.value]); });
      });
      const float4 four = scales[c.value / 4];
      const float scale = c.value % 4 == 0 ? four.x : c.value % 4 == 1 ? four.y : c.value % 4 == 2 ? four.z : four.w;
      unrolled<ROWS>([&](auto r) { sums[r.value][c.value] = fmaf(scale, dot[r.value], sums[r.value][c.value]); });
    });
  };
  Codes here, next;
  int group = begin + part / kQuarters;
  if (group < end) read(group, here);
#pragma unroll 1
  for (; group < end; group += kParts) {
    if (group + kParts < end) read(group + kParts, next);
    multiply(group, here);
    here = next;
  }

  // Four neighbouring columns of a row a thread, the parts added up one after the other.
  constexpr int kFours = kTileColumns / 4;
  float own[4] = {};
  unrolled<ROWS>([&](auto r) {
    if constexpr (r.value > 0) __syncthreads();
    unrolled<4>([&](auto i) {
      const float *four = sums[r.value] + 4 * i.value;
      together[part][thread % kLanes * 4 + i.value] = make_float4(four[0], four[1], four[2], four[3]);
    });
    __syncthreads();
    if (thread / kFours == r.value)
#pragma unroll 8
      for (int p = 0; p < kThreads / kLanes; ++p) {
        const float4 four = together[p][thread % kFours];
        own[0] += four.x, own[1] += four.y, own[2] += four.z, own[3] += four.w;
      }
  });
  const int tile = blockIdx.y * gridDim.x + blockIdx.x;
  if (!gather(own, Cut{slices, z, tile * slices}, Pieces<4, kThreads>{pieces}, counters + tile, &seen, thread,
              [] { __syncthreads(); }))
    return;
  const int row = first_row + thread / kFours, first = blockIdx.x * kTileColumns + thread % kFours * 4;
  if (thread / kFours < ROWS && row < M)
    unrolled<4>([&](auto i) {
      if (first + i.value < N) out[(size_t)row * N + first + i.value] = own[i.value];
    });
}
GPU_KERNEL(grouped_gemm_wide)
