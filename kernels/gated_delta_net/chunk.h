// What the kernels of the chunked recurrence share: numbers as bf16 terms, how lanes hold matrices, and their products.
//
// A number is kept as TERMS bf16 numbers, the second being what the first leaves: hi + lo is the float to 2^-17. A
// product takes hi lo + lo hi + hi hi, summed in float. One term alone has errors of 3e-3 to 8e-3 in the output, the
// larger where keys are alike, since the recurrence subtracts what it recalls from what it is told.
//
// All products are D = A B^T, of a tile of 16 rows by tiles of 8 or 16 rows, 32 numbers of their depth at a time. Every
// matrix is held the same way, be it operand or result: a lane has, of one row of a tile, the run of 8 neighbours whose
// number among the 4 of a part's 32 is the lane's. For a result to come out like that, the rows of B are dealt to the
// places of its tiles so that what a lane gets from them are neighbours. Then a result is the next product's operand
// where it is, in registers, and one in memory is laid out as [part][term][tile][lane] of 16 bytes, read and copied in
// whole lines.
//
//   TERMS    1 or 2
//   MATRIX   mma, mfma or mmac; where it is left out, the target's own
#pragma once
#include "operands.h"

constexpr int kHeadDim = 128;
constexpr int kChunk = 64;  // tokens
constexpr int kLanes = MATRIX::Bf16::map().lanes;

constexpr bool kSwapped = MATRIX::Bf16::map().D.row[0] == 8;  // a lane's neighbours in D are rows of one column
using AxB = Product<MATRIX::Bf16, kSwapped>;
constexpr int kRows = AxB::Rows::count;         // in a tile of A
constexpr int kColumns = AxB::Cache::count;     // rows in a tile of B, columns in one of D
constexpr int kVectors = AxB::Rows::vectors;    // rows that a lane has in a tile of A or D; in one of B it has one
constexpr int kOwn = 4 / kVectors;              // neighbours of each that it has in a tile of D
constexpr int kRun = 8;                         // neighbours that it has in a part
constexpr int kSteps = kRun / AxB::Rows::run;   // products that it feeds with them
constexpr int kPart = AxB::Rows::length * kSteps;
constexpr int kPartTiles = kPart / kColumns;    // tiles of D with as many columns
static_assert(AxB::Rows::run == AxB::Cache::run && AxB::Cache::vectors == 1 && kRows == kVectors * kColumns);
static_assert(kPart == 32 && kPartTiles * kOwn == kRun && AxB::Sums::vector_of<kOwn - 1> == 0);

// The row of a matrix at place x of its tiles: number `own` of a tile's share of the run whose number is `holder`.
__host__ __device__ constexpr int dealt(int x) {
  constexpr auto &map = MATRIX::Bf16::map().D;
  const signed char *along = kSwapped ? map.row : map.column;
  int holder = 0, own = 0, holder_bits = 0, own_bits = 0;
  for (int i = 0; along[i] >= 0; ++i) {
    const int bit = x >> i & 1;
    if (along[i] < 8) holder |= bit << holder_bits++;
    else own |= bit << own_bits++;
  }
  return x / kPart * kPart + holder * kRun + x / kColumns % kPartTiles * kOwn + own;
}
// Places in tiles, and numbers of a part, that are this lane's: the first of its run, and its rows.
__device__ __forceinline__ int own_run(int lane) { return AxB::Rows::part_of(lane) * kRun; }
__device__ __forceinline__ int own_row(int lane) { return AxB::Cache::template vector<0>(lane); }

// ---- operands ----

// 32 numbers of each row of B, or of a matrix whose tiles are taken as A.
template <int rows> struct Part { uint4 at[TERMS][rows / kColumns][kLanes]; };
// 32 numbers of each row of a tile of A, in registers.
struct Left { uint32_t at[TERMS][kVectors][kRun / 2]; };
using Run = uint32_t[TERMS][kRun / 2];  // of one row

// Two floats as pairs of bf16: their leading terms, then what these leave.
__device__ __forceinline__ void split(float low, float high, uint32_t (&pairs)[TERMS]) {
  pairs[0] = bf16_pair(low, high);
  if constexpr (TERMS == 2)
    pairs[1] = bf16_pair(low - __uint_as_float(pairs[0] << 16), high - __uint_as_float(pairs[0] & 0xffff0000u));
}
// x(Index<0>{}), ..., x(Index<7>{}) as terms.
template <class F> __device__ __forceinline__ void split_run(Run &run, F x) {
  unrolled<kRun / 2>([&](auto pair) {
    uint32_t terms[TERMS];
    split(x(Index<2 * pair.value>{}), x(Index<2 * pair.value + 1>{}), terms);
    unrolled<TERMS>([&](auto term) { run[term.value][pair.value] = terms[term.value]; });
  });
}
template <int rows> __device__ __forceinline__ void store_run(Part<rows> &part, int tile, int lane, const Run &run) {
  unrolled<TERMS>([&](auto term) {
    const uint32_t *words = run[term.value];
    part.at[term.value][tile][lane] = {words[0], words[1], words[2], words[3]};
  });
}
// Tile number `tile` of A out of a matrix laid out as B.
template <int rows> __device__ __forceinline__ Left load_left(const Part<rows> &part, int tile, int lane) {
  Left left;
  unrolled<TERMS>([&](auto term) {
    unrolled<kVectors>([&](auto v) {
      read_run<16>(left.at[term.value][v.value], &part.at[term.value][tile * kVectors + v.value][lane]);
    });
  });
  return left;
}

// ---- results ----

template <int columns> using Sums = float[columns / kColumns][4];

// Number j of run r in row v, of the lane's.
template <int tiles> __device__ __forceinline__ float &at(float (&d)[tiles][4], int v, int r, int j) {
  return d[r * kPartTiles + j / kOwn][v * kOwn + j % kOwn];
}
// f(number, v, r, j) for all that the lane has.
template <int tiles, class F> __device__ __forceinline__ void each(float (&d)[tiles][4], F f) {
  unrolled<tiles / kPartTiles>([&](auto r) {
    unrolled<kRun>([&](auto j) {
      unrolled<kVectors>([&](auto v) { f(at(d, v.value, r.value, j.value), v.value, r.value, j.value); });
    });
  });
}
// Part r of a result as the next product's operand.
template <int r, int tiles> __device__ __forceinline__ Left as_left(float (&d)[tiles][4]) {
  Left left;
  unrolled<kVectors>([&](auto v) {
    Run run;
    split_run(run, [&](auto j) { return at(d, v.value, r, j.value); });
    unrolled<TERMS>([&](auto term) {
      unrolled<kRun / 2>([&](auto i) { left.at[term.value][v.value][i.value] = run[term.value][i.value]; });
    });
  });
  return left;
}
template <int rows> __device__ __forceinline__ void store_left(Part<rows> &part, int tile, int lane, const Left &left) {
  unrolled<kVectors>([&](auto v) {
    unrolled<TERMS>([&](auto term) {
      const uint32_t *words = left.at[term.value][v.value];
      part.at[term.value][tile * kVectors + v.value][lane] = {words[0], words[1], words[2], words[3]};
    });
  });
}

// d += a B^T, for a part of the depth. The tiles of d from `first` on are those of b from `first_of_b` on. Of sums that
// depend on one another as many as there are tiles, at most 8, lie apart; small products come first.
template <int first = 0, int tiles, int rows>
__device__ __forceinline__ void multiply(float (&d)[tiles][4], const Left &a, const Part<rows> &b, int first_of_b,
                                         int lane) {
  constexpr int count = tiles - first < 8 ? tiles - first : 8;
  unrolled<TERMS>([&](auto t) {
    constexpr int of_b = TERMS - 1 - t.value;
    uint32_t b_runs[count][1][kRun / 2];
    unrolled<count>([&](auto n) { read_run<16>(b_runs[n.value][0], &b.at[of_b][first_of_b + n.value][lane]); });
    unrolled<TERMS - of_b>([&](auto u) {
      constexpr int of_a = TERMS - 1 - of_b - u.value;
      unrolled<kSteps>([&](auto i) {
        constexpr int step = i.value;
        uint32_t row[AxB::Rows::elements / 2];
        AxB::Rows::template feed<step>(row, a.at[of_a]);
        unrolled<count>([&](auto n) {
          uint32_t column[AxB::Cache::elements / 2];
          AxB::Cache::template feed<step>(column, b_runs[n.value]);
          AxB::multiply(d[first + n.value], row, column);
        });
      });
    });
  });
  if constexpr (first + count < tiles) multiply<first + count>(d, a, b, first_of_b + count, lane);
}

// ---- what 3_chunk_factors.cu makes for 4_chunk_scan.cu, in units of equal size, as these are copied ----

union Unit {
  struct { Part<kChunk> k, q; } recall;  // 32 numbers of each token's
  Part<kChunk> factor[2];                // T or P
  Part<kHeadDim> across;                 // 32 tokens of k transposed
};
struct OfKeys { Unit recall[4], across[2]; };  // of a chunk and key head
struct OfValues {                              // of a chunk and value head
  Unit t, p;
  float since_start[kChunk], to_end[kChunk];  // exp(G), exp(G_last - G)
};
static_assert(sizeof(Unit) == TERMS * 8192 && kHeadDim == 4 * kPart && kChunk == 2 * kPart);
