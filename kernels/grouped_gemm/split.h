// What the grouped GEMMs share: the mapping of threads to outputs and the partition of K over blockIdx.z.
#pragma once
#include "gpu.h"

constexpr int kThreadsN = 64;   // threads of a block along the columns
constexpr int kThreadsM = 4;    // threads of a block along the rows
constexpr int kColumns = 4;     // neighbouring columns a thread owns: one 4-byte load of codes

// Slice z of nsplit owns the groups [begin, end). Slices are whole groups, so the integer dot product of a group is
// never cut, and their sizes differ by at most one.
struct Slice { int begin, end; };
__device__ __forceinline__ Slice slice_of(int groups, int nsplit, int z) {
  const int base = groups / nsplit, rest = groups % nsplit;
  const int begin = z * base + min(z, rest);
  return {begin, begin + base + (z < rest ? 1 : 0)};
}

// A running sum over groups. With CARRY it takes along what each addition rounds away (Kahan's sum), and hundreds of groups
// add up as well as a handful, at three more additions a group and column. The article's kernel has no carry.
// A sum that is infinite has lost nothing that a number could say: carried along, the infinity or NaN which the
// subtractions give would turn it into NaN at the next group, if its slice has one.
constexpr float kLargestFloat = 3.4028234664e38f;
struct Sum {
  float value = 0.f, carry = 0.f;
  __device__ __forceinline__ void add(float term) {
    const float y = CARRY ? __fadd_rn(term, -carry) : term;
    const float t = __fadd_rn(value, y);
    if (CARRY) {
      const float lost = __fadd_rn(__fadd_rn(t, -value), -y);
      carry = fabsf(t) <= kLargestFloat ? lost : 0.f;
    }
    value = t;
  }
};

// Four columns of one row of the output; columns past N are padding of the weights and have no place there.
__device__ __forceinline__ void store_columns(float *row, int n, int N, const Sum *c) {
  if (N % kColumns == 0) {
    *reinterpret_cast<float4 *>(row + n) = make_float4(c[0].value, c[1].value, c[2].value, c[3].value);
  } else {
    for (int j = 0; j < kColumns && n + j < N; ++j) row[n + j] = c[j].value;
  }
}
