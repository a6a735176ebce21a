// 4. The chunked recurrence: what carries the state from chunk to chunk, on matrix instructions.
//
//   D = T (V - diag(exp G) K S);  O = diag(exp G) Q S + P D;  S <- exp(G_last) S + K^T diag(exp(G_last - G)) D
//
// Columns of S know nothing of each other, as in 2_sequential.cu: a block takes COLUMNS of a value head and goes
// through all chunks, its part of S in the registers of its waves. Everything is computed transposed, a row for each
// column of S: S^T K^T, (V - ..)^T T^T, D^T P^T and D^T K. Then what a lane has of a product are neighbours along k of
// the next one. What changes from step to step (S, the rest of V, D) is always operand A, in shared memory, and what is
// given (K, Q, T, P, K transposed) is always operand B, read from memory as 3_chunk_factors.cu has laid it out. A wave
// takes TILES x 16 columns of S and one of PARTS parts of a product's other side.
//
// Floor: 4.2 million multiply-adds a chunk and value head, three times that with two terms: 16 us at 512 tokens of
// Qwen3.5-27B and 64 us at 2048 at the 600 TFLOP/s or so of such instructions on a whole H200; 22 and 88 us on the 96
// of its 132 multiprocessors that have a block of 64 columns. What blocks read, 128 KiB a chunk, is 0.1 and 0.4 GB,
// mostly from L2, besides 48 KiB a token of v and out. In between, a chunk is a chain of three products and barriers.
//
//   COLUMNS   of S in a block, 16, 32, 64 or 128
//   TILES     of 16 columns of S in a wave
//   PARTS     waves that share the same columns
#include "chunk.h"

constexpr int kWaveRows = TILES * kRows;
constexpr int kWaves = COLUMNS / kWaveRows * PARTS;
constexpr int kThreads = kWaves * kLanes;
constexpr int kPartTokens = kChunk / PARTS, kPartKeys = kHeadDim / PARTS;
static_assert(kPartTokens % kColumns == 0 && COLUMNS % kWaveRows == 0);

constexpr int kTokenTiles = kPartTokens / kColumns, kKeyTiles = kPartKeys / kColumns;
using Tokens = Tiles<TILES, kTokenTiles>;
using State = Tiles<TILES, kKeyTiles>;

struct Block {
  Shared<COLUMNS, kHeadDim> state;
  Shared<COLUMNS, kChunk> rest, change, decayed_change;
};

// The factors are 3_chunk_factors.cu's; v, out [tokens][value_heads][128]. initial, final [value_heads][128 of k]
// [128 of v]; either may be null (zeros, nothing written), and both the same.
// Grid: 128 / COLUMNS x value_heads; block: lanes x waves. Dynamic shared memory: Block.
extern "C" __global__ void __launch_bounds__(kThreads)
chunk_scan(const Keys *__restrict__ q, const Keys *__restrict__ k, const KeysAcross *__restrict__ k_across,
           const Factor *__restrict__ t, const Factor *__restrict__ p, const Decays *__restrict__ decays,
           const float *__restrict__ v, const float *initial, float *final, float *__restrict__ out, int tokens,
           int key_heads, int value_heads) {
  GPU_DYNAMIC_SHARED(Block, block);
  const int lane = threadIdx.x, part = threadIdx.y % PARTS, row = threadIdx.y / PARTS * kWaveRows;
  const int head = blockIdx.y, key_head = head / (value_heads / key_heads);
  const int column = blockIdx.x * COLUMNS + row;  // of S: the first of this wave
  const int first_token = part * kPartTokens, first_key = part * kPartKeys;

  State state = {};
  const auto state_place = [&](int of_column, int key) {
    return ((size_t)head * kHeadDim + first_key + key) * kHeadDim + column + of_column;
  };
  if (initial)
    each(state, lane, [&](float &value, int of_column, int key) { value = initial[state_place(of_column, key)]; });
  write(block->state, row, first_key, state, lane);
  Runs<kTokenTiles> of_k;
  if (tokens > 0) read(of_k, k[key_head], first_token, 0, lane);
  __syncthreads();

  for (int chunk = 0; chunk * kChunk < tokens; ++chunk) {
    const size_t keys = (size_t)chunk * key_heads + key_head, values = (size_t)chunk * value_heads + head;
    const Decays &decay = decays[values];
    const auto token = [&](int own) { return chunk * kChunk + first_token + own; };
    const auto value_place = [&](int of_column, int own) {
      return ((size_t)token(own) * value_heads + head) * kHeadDim + column + of_column;
    };

    // ---- what is left of V, and the part of the output that the state has ----

    Tokens rest;
    each(rest, lane, [&](float &value, int of_column, int own) {
      value = token(own) < tokens ? v[value_place(of_column, own)] : 0.f;
    });
    Tokens recalled = {}, output = {};
    Runs<kTokenTiles> of_q, of_t, of_p;
    read(of_q, q[keys], first_token, 0, lane);
    multiply(recalled, block->state, row, k[keys], first_token, of_k, lane);
    read(of_t, t[values], first_token, 0, lane);
    multiply(output, block->state, row, q[keys], first_token, of_q, lane);
    unrolled<TILES>([&](auto m) {
      unrolled<kTokenTiles>([&](auto n) {
        unrolled<4>([&](auto i) {
          const float since_start =
              decay.since_start[first_token + n.value * kColumns + AxB::Sums::template along<i.value>(lane)];
          float &left = rest[m.value][n.value][i.value];
          left = fmaf(-since_start, recalled[m.value][n.value][i.value], left);
          output[m.value][n.value][i.value] *= since_start;
        });
      });
    });
    write(block->rest, row, first_token, rest, lane);
    __syncthreads();

    // ---- D, and D as it is at the end of the chunk ----

    Tokens change = {};
    read(of_p, p[values], first_token, 0, lane);
    multiply(change, block->rest, row, t[values], first_token, of_t, lane);
    write(block->change, row, first_token, change, lane);
    each(change, lane, [&](float &value, int, int own) { value *= decay.to_end[first_token + own]; });
    write(block->decayed_change, row, first_token, change, lane);
    __syncthreads();

    // ---- the output, and the state after the chunk ----

    Runs<kKeyTiles> of_k_across;
    read(of_k_across, k_across[keys], first_key, 0, lane);
    multiply(output, block->change, row, p[values], first_token, of_p, lane);
    each(output, lane, [&](float value, int of_column, int own) {
      if (token(own) < tokens) out[value_place(of_column, own)] = value;
    });
    const float of_chunk = decay.since_start[kChunk - 1];
    each(state, lane, [&](float &value, int, int) { value *= of_chunk; });
    if ((chunk + 1) * kChunk < tokens) read(of_k, k[keys + key_heads], first_token, 0, lane);
    multiply(state, block->decayed_change, row, k_across[keys], first_key, of_k_across, lane);
    write(block->state, row, first_key, state, lane);
    __syncthreads();
  }

  if (final)
    each(state, lane, [&](float value, int of_column, int key) { final[state_place(of_column, key)] = value; });
}
GPU_KERNEL(chunk_scan)
