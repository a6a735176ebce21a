// What the kernels of the chunked recurrence share: operands of products as bf16 terms, and the product of two of them.
//
// An operand is kept as TERMS bf16 numbers for each float, the second being what the first leaves: hi + lo is the float
// to 2^-17. A product takes hi hi + hi lo + lo hi, summed in float. One term alone has errors of 3e-3 to 8e-3 in the
// output, the larger where keys are alike, since the recurrence subtracts what it recalls from what it is told.
//
// All products are D = A B^T with both operands along k in memory: the rows of A go to the rows of an instruction's
// product or, transposed, to its columns, whichever leaves a lane with neighbours of a row of D.
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
constexpr int kRows = AxB::Rows::count;        // of A, in one product
constexpr int kColumns = AxB::Cache::count;    // rows of B, columns of D
constexpr int kRun = 8;                        // neighbours that a lane reads of a row at once, 16 bytes
constexpr int kSteps = kRun / AxB::Rows::run;  // products that it feeds with them
constexpr int kDepth = AxB::Rows::length * kSteps;
static_assert(AxB::Rows::run == AxB::Cache::run);

// Two floats as pairs of bf16: their leading terms, then what these leave.
__device__ __forceinline__ void split(float low, float high, uint32_t (&pairs)[TERMS]) {
  pairs[0] = bf16_pair(low, high);
  if constexpr (TERMS == 2)
    pairs[1] = bf16_pair(low - __uint_as_float(pairs[0] << 16), high - __uint_as_float(pairs[0] & 0xffff0000u));
}

// Terms [TERMS][rows][depth] of a matrix. In shared memory a row's runs are exchanged among themselves, so that 8 rows'
// runs of one place lie in different banks, as do the first or last 4 runs of a row and those of the next.
template <int rows_, int depth_, bool shared_> struct Terms {
  static constexpr int rows = rows_, depth = depth_;
  static_assert(depth % kDepth == 0);
  uint16_t at[TERMS][rows][depth];
  __device__ static __forceinline__ int place(int row, int k) {
    return shared_ ? k ^ ((row >> 1 & 3) | (row & 1) << 2) * kRun : k;
  }
  __device__ __forceinline__ void write_run(int row, int k, const uint32_t (&runs)[TERMS][kRun / 2]) {
    unrolled<TERMS>([&](auto term) {
      const uint32_t *run = runs[term.value];
      *reinterpret_cast<uint4 *>(&at[term.value][row][place(row, k)]) = {run[0], run[1], run[2], run[3]};
    });
  }
};
template <int rows, int depth> using Shared = Terms<rows, depth, true>;
template <int rows, int depth> using Stored = Terms<rows, depth, false>;

// A wave's part of D: tiles of kRows x kColumns.
template <int row_tiles, int column_tiles> using Tiles = float[row_tiles][column_tiles][4];

// f(value, row, column) for what this lane has of a part of D.
template <int row_tiles, int column_tiles, class F>
__device__ __forceinline__ void each(Tiles<row_tiles, column_tiles> &d, int lane, F f) {
  unrolled<row_tiles>([&](auto m) {
    unrolled<column_tiles>([&](auto n) {
      unrolled<4>([&](auto i) {
        using Sums = AxB::Sums;
        constexpr int vector = Sums::template vector_of<i.value>;
        f(d[m.value][n.value][i.value], m.value * kRows + Sums::template vector<vector>(lane),
          n.value * kColumns + Sums::template along<i.value>(lane));
      });
    });
  });
}

// What a lane reads of some rows of B, kDepth of their length.
template <int column_tiles> struct Runs { uint32_t at[TERMS][column_tiles][AxB::Cache::vectors][kRun / 2]; };

template <int column_tiles, class B>
__device__ __forceinline__ void read(Runs<column_tiles> &runs, const B &b, int first_column, int part, int lane) {
  const int k = part * kDepth + AxB::Cache::part_of(lane) * kRun;
  unrolled<TERMS>([&](auto term) {
    unrolled<column_tiles>([&](auto n) {
      unrolled<AxB::Cache::vectors>([&](auto v) {
        const int row = first_column + n.value * kColumns + AxB::Cache::template vector<v.value>(lane);
        read_run<16>(runs.at[term.value][n.value][v.value], &b.at[term.value][row][B::place(row, k)]);
      });
    });
  });
}

// d += A B^T, for the rows of A from first_row and the rows of B from first_column on. `ahead` is what `read` gives of
// B's part 0: the caller reads it before it waits for A. Each further part is read while the one before is multiplied.
template <int row_tiles, int column_tiles, class A, class B>
__device__ __forceinline__ void multiply(Tiles<row_tiles, column_tiles> &d, const A &a, int first_row, const B &b,
                                         int first_column, const Runs<column_tiles> &ahead, int lane) {
  using Rows = AxB::Rows;
  using Columns = AxB::Cache;
  static_assert(A::depth == B::depth);
  constexpr int kParts = A::depth / kDepth;
  Runs<column_tiles> now = ahead, next = ahead;
#pragma unroll 1
  for (int part = 0; part < kParts; ++part) {
    if (part + 1 < kParts) read(next, b, first_column, part + 1, lane);
    const int k = part * kDepth + Rows::part_of(lane) * kRun;
    uint32_t a_runs[TERMS][row_tiles][Rows::vectors][kRun / 2];
    unrolled<TERMS>([&](auto term) {
      unrolled<row_tiles>([&](auto m) {
        unrolled<Rows::vectors>([&](auto v) {
          const int row = first_row + m.value * kRows + Rows::template vector<v.value>(lane);
          read_run<16>(a_runs[term.value][m.value][v.value], &a.at[term.value][row][A::place(row, k)]);
        });
      });
    });
    unrolled<kSteps>([&](auto i) {
      constexpr int step = i.value;
      uint32_t rows[TERMS][row_tiles][Rows::elements / 2], columns[TERMS][column_tiles][Columns::elements / 2];
      unrolled<TERMS>([&](auto term) {
        unrolled<row_tiles>([&](auto m) {
          Rows::template feed<step>(rows[term.value][m.value], a_runs[term.value][m.value]);
        });
        unrolled<column_tiles>([&](auto n) {
          Columns::template feed<step>(columns[term.value][n.value], now.at[term.value][n.value]);
        });
      });
      // Small products first; one after the other of a sum are as far apart as there are tiles.
      unrolled<2 * TERMS - 1>([&](auto pair) {
        constexpr int of_a = pair.value == 0 ? TERMS - 1 : 0, of_b = pair.value == 1 ? 1 : 0;
        unrolled<row_tiles>([&](auto m) {
          unrolled<column_tiles>([&](auto n) {
            AxB::multiply(d[m.value][n.value], rows[of_a][m.value], columns[of_b][n.value]);
          });
        });
      });
    });
    now = next;
  }
}

// Terms of a part of D, to rows from first_row and columns from first_column of a matrix that is the next operand.
template <int row_tiles, int column_tiles, class Matrix>
__device__ __forceinline__ void write(Matrix &to, int first_row, int first_column, Tiles<row_tiles, column_tiles> &d,
                                      int lane) {
  using Sums = AxB::Sums;
  constexpr bool pairs = Sums::vector_of<0> == Sums::vector_of<1> && Sums::along<1>(0) == 1;
  unrolled<row_tiles>([&](auto m) {
    unrolled<column_tiles>([&](auto n) {
      unrolled<pairs ? 2 : 4>([&](auto p) {
        constexpr int i = pairs ? 2 * p.value : p.value;
        const int row = first_row + m.value * kRows + Sums::template vector<Sums::template vector_of<i>>(lane);
        const int column = first_column + n.value * kColumns + Sums::template along<i>(lane);
        uint32_t terms[TERMS];
        split(d[m.value][n.value][i], pairs ? d[m.value][n.value][i + 1] : 0.f, terms);
        unrolled<TERMS>([&](auto term) {
          uint16_t *place = &to.at[term.value][row][Matrix::place(row, column)];
          if constexpr (pairs) *reinterpret_cast<uint32_t *>(place) = terms[term.value];
          else *place = terms[term.value];
        });
      });
    });
  });
}

// What 3_chunk_factors.cu makes for 4_chunk_scan.cu.
using Keys = Stored<kChunk, kHeadDim>;         // q or k of a chunk and key head
using KeysAcross = Stored<kHeadDim, kChunk>;   // k transposed
using Factor = Stored<kChunk, kChunk>;         // T or P of a chunk and value head, a row for each token that is changed
struct Decays { float since_start[kChunk], to_end[kChunk]; };  // exp(G), exp(G_last - G)
