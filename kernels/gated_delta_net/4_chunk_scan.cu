// 4. The chunked recurrence: what carries the state from chunk to chunk, on matrix instructions.
//
//   D = T (V - diag(exp G) K S);  O = diag(exp G) Q S + P D;  S <- exp(G_last) S + K^T diag(exp(G_last - G)) D
//
// Columns of S know nothing of each other, as in 2_sequential.cu: a wave takes 16 columns of a value head through all
// chunks. Everything is computed transposed, a row for each column of S: S^T K^T and S^T Q^T, (V - ..)^T T^T, D^T P^T
// and D^T K. What a product gives is then operand A of the next one, in the same registers of the same lane, and waves
// have nothing to tell each other. What they share is operand B: K, Q, T, P and K transposed, which 3_chunk_factors.cu
// has laid out as lanes read them, and V. They come in units of equal size through a ring of stages in shared memory,
// copied while the stages before them are multiplied.
//
// What bounds a chunk: its five products follow one another, but in each a wave has 8 sums at a time that do not depend
// on one another, about an instruction's latency. It needs 240 instructions with one term and 720 with two, 1500 and
// 4600 cycles at what such instructions reach on an H200. For its 16 rows of A it reads all of B, 60 KiB a term: four
// waves, with what is copied, move 330 or 640 KiB through shared memory, 2700 or 5100 cycles. So shared memory bounds
// one term and both bound two: predicted were 1.5 and 3 us a chunk, 13 and 25 us at 512 tokens of Qwen3.5-27B, 50 and
// 100 us at 2048. Measured on an H200 are 23 and 43, 85 and 161 us: a chunk takes 2.7 and 5 us. Two waves a block are
// better than four with one term, for then all multiprocessors have some. What blocks read there, 64 KiB a chunk and
// term, is 0.2 or 0.4 GB, mostly from L2, besides 48 KiB a token of v and out.
//
//   WAVES    in a block, each with 16 columns of S: 2, 4 or 8
//   UNITS    in a stage: 1 or 2
//   STAGES   of the ring, from 2 to 8 / UNITS
#include "chunk.h"

constexpr int kThreads = WAVES * kLanes;
constexpr int kWidth = WAVES * kRows;  // columns of S in a block
// A chunk's units, in the order of their use.
enum { RECALL, T = RECALL + kHeadDim / kPart, P, ACROSS, kUnits = ACROSS + kChunk / kPart };
constexpr int kStages = kUnits / UNITS;  // of a chunk
constexpr int kHalf = kChunk / kColumns / 2;  // tiles
static_assert(kRows == 16 && kHeadDim % kWidth == 0 && WAVES >= 2 && (UNITS == 1 || UNITS == 2));
static_assert(STAGES >= 2 && STAGES <= kStages);  // V has no place for two chunks

using Tokens = Sums<kChunk>;
using State = Sums<kHeadDim>;
struct Stage {
  Unit units[UNITS];
  float decays[kChunk];  // with T since the start, with the first of k transposed to the end
};
struct Block {
  Stage stages[STAGES];
  float v[kChunk][kWidth];
  // Tokens that are read together, kRun apart, lie in different banks.
  __device__ __forceinline__ float *v_at(int token, int column) {
    return &v[token][column ^ (token / kRun * 8 & 24)];
  }
};

// The ring, as a thread of a block sees it.
struct Ring {
  Block &block;
  const OfKeys *keys;      // of chunk 0 and this block's heads
  const OfValues *values;
  const float *v;          // of token 0 and this block's columns
  int key_heads, value_heads, tokens;
  int slot;                // of the stage in use

  template <int unit> static __device__ __forceinline__ const Unit &source(const OfKeys &keys, const OfValues &values) {
    if constexpr (unit == T) return values.t;
    else if constexpr (unit == P) return values.p;
    else if constexpr (unit < T) return keys.recall[unit - RECALL];
    else return keys.across[unit - ACROSS];
  }
  __device__ __forceinline__ void copy_v(int chunk, int thread) const {
    constexpr int words = kWidth / 4, rows = kThreads / words;
    const int column = thread % words * 4, first = thread / words, there = tokens - chunk * kChunk;
    const float *from = v + (size_t)chunk * kChunk * value_heads * kHeadDim;
    unrolled<kChunk / rows>([&](auto i) {
      const int row = first + i.value * rows;
      copy_async(block.v_at(row, column), from + row * value_heads * kHeadDim + column, row < there);
    });
  }
  // Stage number `stage`, counted from the first of `chunk`, to a slot. Every call ends a group of copies.
  template <int stage> __device__ __forceinline__ void copy(int chunk, int slot) const {
    const int thread = threadIdx.y * kLanes + threadIdx.x;
    chunk += stage / kStages;
    if (chunk * kChunk < tokens) {
      Stage &to = block.stages[slot];
      const OfKeys &of_keys = keys[(size_t)chunk * key_heads];
      const OfValues &of_values = values[(size_t)chunk * value_heads];
      unrolled<UNITS>([&](auto i) {
        constexpr int unit = stage % kStages * UNITS + i.value;
        const uint4 *from = reinterpret_cast<const uint4 *>(&source<unit>(of_keys, of_values)) + thread;
        uint4 *into = reinterpret_cast<uint4 *>(&to.units[i.value]) + thread;
        static_assert(sizeof(Unit) / 16 % kThreads == 0);
        unrolled<sizeof(Unit) / 16 / kThreads>([&](auto j) {
          copy_async(into + j.value * kThreads, from + j.value * kThreads, true);
        });
        if constexpr (unit == T || unit == ACROSS) {
          const float *decays = unit == T ? of_values.since_start : of_values.to_end;
          if (thread < kChunk / 4) copy_async(to.decays + 4 * thread, decays + 4 * thread, true);
        }
        if constexpr (unit == T) copy_v(chunk, thread);
      });
    }
    copy_commit();
  }
  __device__ __forceinline__ void start() {
    unrolled<STAGES - 1>([&](auto stage) { copy<stage.value>(0, stage.value); });
    slot = STAGES - 1;
  }
  // The stage that holds a unit of a chunk, once it is there. Units are asked for in order, and those of earlier stages
  // are gone then: a stage takes the place of the one before the one in use.
  template <int unit> __device__ __forceinline__ const Stage &next(int chunk) {
    if constexpr (unit % UNITS == 0) {
      copy_wait<STAGES - 2>();
      __syncthreads();
      copy<unit / UNITS + STAGES - 1>(chunk, slot);
      slot = slot + 1 == STAGES ? 0 : slot + 1;
    }
    return block.stages[slot];
  }
};

// The decays of this lane's tokens.
struct OwnDecays {
  float at[kChunk / kPart][kRun];
  __device__ __forceinline__ OwnDecays(const Stage &stage, int lane) {
    unrolled<kChunk / kPart>([&](auto run) {
      unrolled<kRun / 4>([&](auto i) {
        const float *from = stage.decays + run.value * kPart + own_run(lane) + 4 * i.value;
        const float4 x = *reinterpret_cast<const float4 *>(from);
        float *to = at[run.value] + 4 * i.value;
        to[0] = x.x, to[1] = x.y, to[2] = x.z, to[3] = x.w;
      });
    });
  }
};

// keys, values: 3_chunk_factors.cu's, [chunks][heads]; v, out [tokens][value_heads][128]. initial, final [value_heads]
// [128 of k][128 of v]; either may be null (zeros, nothing written), and both the same.
// Grid: 128 / (16 WAVES) x value_heads; block: lanes x WAVES. Dynamic shared memory: Block.
extern "C" __global__ void __launch_bounds__(kThreads)
chunk_scan(const OfKeys *__restrict__ keys, const OfValues *__restrict__ values, const float *__restrict__ v,
           const float *initial, float *final, float *__restrict__ out, int tokens, int key_heads, int value_heads) {
  GPU_DYNAMIC_SHARED(Block, block);
  const int lane = threadIdx.x, head = blockIdx.y;
  const int own_column = threadIdx.y * kRows + own_row(lane);  // of S in the block; further rows are kColumns apart
  const int column = head * kHeadDim + blockIdx.x * kWidth + own_column;
  Ring ring = {*block, keys + head / (value_heads / key_heads), values + head, v + column - own_column,
               key_heads, value_heads, tokens};
  ring.start();

  State state = {};
  const auto state_place = [&](int row, int run, int i) {
    return ((size_t)head * kHeadDim + run * kPart + own_run(lane) + i) * kHeadDim + column % kHeadDim + row * kColumns;
  };
  if (initial)
    each(state, [&](float &number, int row, int run, int i) { number = initial[state_place(row, run, i)]; });

  const float *own_v[kVectors];
  unrolled<kVectors>([&](auto row) {
    own_v[row.value] = block->v_at(own_run(lane), own_column + row.value * kColumns);
  });

#pragma unroll 1
  for (int chunk = 0; chunk * kChunk < tokens; ++chunk) {
    // ---- what the state recalls, by k and by q ----

    Tokens rest = {}, output = {};
    unrolled<kHeadDim / kPart>([&](auto part) {
      constexpr int unit = RECALL + part.value;
      const auto &by = ring.next<unit>(chunk).units[unit % UNITS].recall;
      const Left of_state = as_left<part.value>(state);
      multiply(rest, of_state, by.k, 0, lane);
      multiply(output, of_state, by.q, 0, lane);
    });

    // ---- what is left of V, and D; T and P are 0 where a token would change an earlier one ----

    const Stage &of_t = ring.next<T>(chunk);
    const OwnDecays since_start(of_t, lane);
    each(rest, [&](float &number, int row, int run, int i) {
      number = fmaf(-since_start.at[run][i], number, own_v[row][(run * kPart + i) * kWidth]);
    });
    each(output, [&](float &number, int, int run, int i) { number *= since_start.at[run][i]; });
    each(state, [&, of_chunk = of_t.decays[kChunk - 1]](float &number, int, int, int) { number *= of_chunk; });
    Tokens change = {};
    const Unit &t = of_t.units[T % UNITS];
    multiply(change, as_left<0>(rest), t.factor[0], 0, lane);
    multiply<kHalf>(change, as_left<1>(rest), t.factor[1], kHalf, lane);

    // ---- the output ----

    const Unit &p = ring.next<P>(chunk).units[P % UNITS];
    multiply(output, as_left<0>(change), p.factor[0], 0, lane);
    multiply<kHalf>(output, as_left<1>(change), p.factor[1], kHalf, lane);
    unrolled<kChunk / kPart>([&](auto run) {
      const int there = tokens - chunk * kChunk;
      float *to = out + (size_t)chunk * kChunk * value_heads * kHeadDim + column;
      unrolled<kRun>([&](auto i) {
        const int token = run.value * kPart + own_run(lane) + i.value;
        if (token < there)
          unrolled<kVectors>([&](auto row) {
            to[token * value_heads * kHeadDim + row.value * kColumns] = at(output, row.value, run.value, i.value);
          });
      });
    });

    // ---- the state after the chunk ----

    const Stage &of_across = ring.next<ACROSS>(chunk);
    each(change, [&, decays = OwnDecays(of_across, lane)](float &number, int, int run, int i) {
      number *= decays.at[run][i];
    });
    multiply(state, as_left<0>(change), of_across.units[ACROSS % UNITS].across, 0, lane);
    const Stage &second = ring.next<ACROSS + 1>(chunk);
    multiply(state, as_left<1>(change), second.units[(ACROSS + 1) % UNITS].across, 0, lane);
  }

  if (final)
    each(state, [&](float number, int row, int run, int i) { final[state_place(row, run, i)] = number; });
}
GPU_KERNEL(chunk_scan)
