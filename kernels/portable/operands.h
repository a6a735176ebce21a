// The operands of Q K and P V as lanes hold them, all from the lane maps of kernelbook/fragments.py.
//
// In both products k runs along bytes that lie side by side: along head_dim in K, along tokens in V. A lane reads a run
// of neighbouring k of each vector that it holds (a row of Q or P, a token of K, a column of V) and feeds it, in order,
// to one step after the other. Both sides of a product read runs of the same k, so that every map gives the right sum.
// Which k a step multiplies follows from the map and the width of a run, and is what scales must be grouped by.
#pragma once
#include "gpu.h"
#include "fragments.h"

template <int n> struct Index { static constexpr int value = n; };

// f(Index<0>{}), ..., f(Index<n - 1>{}): a loop whose counter is a constant, so that arrays can stay in registers.
template <int n, class F> __device__ __forceinline__ void unrolled(F f) {
  if constexpr (n > 0) {
    unrolled<n - 1>(f);
    f(Index<n - 1>{});
  }
}

// ---- instructions: mma (NVIDIA), mfma (AMD), mmac (gfx936 and gfx928); the simulator has all three ----

// Each multiplies by a template, so that the simulator's compiler takes time for those only that a kernel calls.
#define INSTRUCTION(type, name, sum_type, a, b)                                                                     \
  struct type {                                                                                                     \
    using Sum = sum_type;                                                                                           \
    __host__ __device__ static constexpr const fragments::Instruction &map() { return fragments::name; }            \
    template <int = 0>                                                                                              \
    __device__ static __forceinline__ void multiply(Sum d[4], const uint32_t *A, const uint32_t *B) {               \
      name(d, a, b);                                                                                                \
    }                                                                                                               \
  };
// The step that multiplies a token of a tile, where lanes load V 16 tokens at a time, and the token by step and k.
#define TOKENS(name)                                                                                                \
  template <bool swapped> __host__ __device__ static constexpr int step_of(int token) {                             \
    return fragments::step_of(swapped ? fragments::name##_A_16 : fragments::name##_B_16, token);                    \
  }                                                                                                                 \
  template <bool swapped> __host__ __device__ static constexpr int token(int step, int k) {                         \
    return fragments::token(swapped ? fragments::name##_A_16 : fragments::name##_B_16, step, k);                    \
  }
#define REGISTER_PAIR(x) (uint64_t(x[1]) << 32 | x[0])
#define INSTRUCTION_64(type, name, sum_type) INSTRUCTION(type, name, sum_type, REGISTER_PAIR(A), REGISTER_PAIR(B))

#if GPU_CUDA || GPU_SIMULATOR
struct mma {
  INSTRUCTION(Signed, mma_m16n8k32_s8, int, A, B)
  INSTRUCTION(UnsignedA, mma_m16n8k32_u8s8, int, A, B)
  INSTRUCTION(UnsignedB, mma_m16n8k32_s8u8, int, A, B)
  INSTRUCTION(Bf16, mma_m16n8k16_bf16, float, A, B)
  TOKENS(mma_m16n8k32_s8)
};
#endif
#if GPU_HAS_MFMA || GPU_SIMULATOR
struct mfma {
  INSTRUCTION_64(Signed, mfma_i32_16x16x32_i8, int)
  INSTRUCTION_64(Bf16, mfma_f32_16x16x16_bf16, float)
  TOKENS(mfma_i32_16x16x32_i8)
};
#endif
#if GPU_HAS_MMAC || GPU_SIMULATOR
struct mmac {
  INSTRUCTION_64(Signed, mmac_i32_16x16x32_i8, int)
  INSTRUCTION_64(Bf16, mmac_f32_16x16x16_bf16, float)
  TOKENS(mmac_i32_16x16x32_i8)
};
#endif
// The target's own, unless a build says otherwise.
#if !defined(MATRIX) && GPU_HAS_MMAC
#define MATRIX mmac
#elif !defined(MATRIX) && GPU_HAS_MFMA
#define MATRIX mfma
#elif !defined(MATRIX)
#define MATRIX mma
#endif

#undef INSTRUCTION_64
#undef REGISTER_PAIR
#undef TOKENS
#undef INSTRUCTION

// ---- what a lane holds of a matrix, seen as vectors (its rows or its columns) with elements along each ----

// Whether source bit `bit` (of the lane; 8 + b: of an element's index) counts along vectors, not from one to another.
__host__ __device__ constexpr bool counts_along(const fragments::Operand &o, bool vectors_are_rows, int bit) {
  const signed char *along = vectors_are_rows ? o.column : o.row;
  for (int i = 0; along[i] >= 0; ++i)
    if (along[i] == bit) return true;
  return false;
}
// The bits of an element's index that count along the vectors, or else the others, moved together.
__host__ __device__ constexpr int part(const fragments::Operand &o, bool vectors_are_rows, int element, bool along) {
  int index = 0, n = 0;
  for (int b = 0; (1 << b) < o.elements; ++b)
    if (counts_along(o, vectors_are_rows, 8 + b) == along) index |= (element >> b & 1) << n++;
  return index;
}
__host__ __device__ constexpr int first_element(const fragments::Operand &o, bool vectors_are_rows, int vector) {
  int element = 0;
  while (part(o, vectors_are_rows, element, false) != vector) ++element;
  return element;
}
// How many of the first `n` sources of the place along a vector are bits of the lane.
__host__ __device__ constexpr int lane_bits_along(const fragments::Operand &o, bool vectors_are_rows, int n) {
  const signed char *along = vectors_are_rows ? o.column : o.row;
  int bits = 0;
  for (int i = 0; i < n && along[i] >= 0; ++i) bits += along[i] < 8;
  return bits;
}
__host__ __device__ constexpr const fragments::Operand &operand_of(const fragments::Instruction &i, char operand) {
  return operand == 'A' ? i.A : operand == 'B' ? i.B : i.D;
}

template <class Instruction, char operand, bool vectors_are_rows> struct Held {
  __host__ __device__ static constexpr const fragments::Operand &map() { return operand_of(Instruction::map(), operand); }
  static constexpr int elements = operand_of(Instruction::map(), operand).elements;
  static constexpr int vectors = part(operand_of(Instruction::map(), operand), vectors_are_rows, elements - 1, false) + 1;
  static constexpr int run = elements / vectors;  // elements of one vector
  // Vectors, and elements along each, of the whole matrix.
  static constexpr int count = vectors_are_rows ? operand_of(Instruction::map(), operand).rows
                                                : operand_of(Instruction::map(), operand).columns;
  static constexpr int length = vectors_are_rows ? operand_of(Instruction::map(), operand).columns
                                                 : operand_of(Instruction::map(), operand).rows;

  // Number among the lane's vectors of the one that an element belongs to.
  template <int element>
  static constexpr int vector_of = part(operand_of(Instruction::map(), operand), vectors_are_rows, element, false);

  // The index in the matrix of the lane's vector number `v`. Bits of the lane and of the element never meet, so that it is
  // a sum of what the lane gives and of a constant, which addresses take up for nothing.
  template <int v> __device__ static __forceinline__ int vector(int lane) {
    constexpr int element = first_element(operand_of(Instruction::map(), operand), vectors_are_rows, v);
    constexpr int offset = vectors_are_rows ? fragments::row(operand_of(Instruction::map(), operand), 0, element)
                                            : fragments::column(operand_of(Instruction::map(), operand), 0, element);
    return (vectors_are_rows ? fragments::row(map(), lane, 0) : fragments::column(map(), lane, 0)) + offset;
  }
  // The place of an element along its vector.
  template <int element> __host__ __device__ static constexpr int along(int lane) {
    constexpr int offset = vectors_are_rows ? fragments::column(operand_of(Instruction::map(), operand), 0, element)
                                            : fragments::row(operand_of(Instruction::map(), operand), 0, element);
    return (vectors_are_rows ? fragments::column(map(), lane, 0) : fragments::row(map(), lane, 0)) + offset;
  }
  // Number of the lane among those that hold parts of the same vectors, in the order along them.
  __device__ static __forceinline__ int part_of(int lane) {
    int index = 0;
    unrolled<6>([&](auto i) {
      constexpr const fragments::Operand &o = operand_of(Instruction::map(), operand);
      constexpr int before = lane_bits_along(o, vectors_are_rows, i.value);
      constexpr int bit = vectors_are_rows ? o.column[i.value] : o.row[i.value];
      if constexpr (lane_bits_along(o, vectors_are_rows, i.value + 1) > before) index |= (lane >> bit & 1) << before;
    });
    return index;
  }
  // f over all lanes that hold parts of the same vectors.
  template <class T, class F> __device__ static __forceinline__ T reduce(T value, F f) {
    unrolled<6>([&](auto bit) {
      if constexpr (counts_along(operand_of(Instruction::map(), operand), vectors_are_rows, bit.value))
        value = f(value, __shfl_xor_sync(GPU_FULL_MASK, value, 1 << bit.value));
    });
    return value;
  }
  // The registers of one step, from what the lane read of each of its vectors, `words` registers of them.
  template <int step, int words>
  __device__ static __forceinline__ void feed(uint32_t *registers, const uint32_t (&read)[vectors][words]) {
    constexpr int packed = length == 32 ? 4 : 2;  // elements in a register: 8-bit instructions multiply 32 k, others 16
    unrolled<elements / packed>([&](auto r) {
      constexpr const fragments::Operand &o = operand_of(Instruction::map(), operand);
      constexpr int v = part(o, vectors_are_rows, r.value * packed, false);
      constexpr int e = part(o, vectors_are_rows, r.value * packed, true);
      registers[r.value] = read[v][(step * run + e) / packed];
    });
  }
};

// One of the two products, rows x cache: Q x K or P x V; swapped: its transpose, cache x rows.
template <class Instruction, bool swapped> struct Product {
  using Sum = typename Instruction::Sum;
  using Rows = Held<Instruction, swapped ? 'B' : 'A', !swapped>;
  using Cache = Held<Instruction, swapped ? 'A' : 'B', swapped>;
  using Sums = Held<Instruction, 'D', !swapped>;  // vectors are the rows of Q or P
  __device__ static __forceinline__ void multiply(Sum sums[4], const uint32_t *rows, const uint32_t *cache) {
    swapped ? Instruction::multiply(sums, cache, rows) : Instruction::multiply(sums, rows, cache);
  }
};

// ---- runs in memory ----

template <int bytes> __device__ __forceinline__ void read_run(uint32_t *words, const void *source) {
  if constexpr (bytes == 8) {
    const uint2 x = *reinterpret_cast<const uint2 *>(source);
    words[0] = x.x, words[1] = x.y;
  } else {
    unrolled<bytes / 16>([&](auto i) {
      const uint4 x = reinterpret_cast<const uint4 *>(source)[i.value];
      words[4 * i.value] = x.x, words[4 * i.value + 1] = x.y, words[4 * i.value + 2] = x.z, words[4 * i.value + 3] = x.w;
    });
  }
}
