// Hopper's warpgroup instructions (sm_90a): 128 threads multiply 64 rows by what shared memory holds, asynchronously.
// There is no simulated form; a kernel that uses them has a sibling on mma.sync, which has.
//
// Sums are laid out as those of mma.sync, warp w of the group holding rows 16 w .. 16 w + 15: element 4 j + i of a lane
// is element i of the j-th 8 columns. A from registers is laid out as A of mma_m16n8k32.
#pragma once
#include "bulk.h"

// Where byte `byte` of row `row` lies in a row of `width` (64 or 128) bytes whose 16-byte chunks are exchanged: the
// chunks of 8 neighbouring rows at one place are in different banks.
template <int width> __device__ __forceinline__ int swizzled(int row, int byte) {
  return byte ^ (width == 128 ? row % 8 : row / 2 % 4) << 4;
}
// Where a lane's row of store_transposed_8x8 lies, of a warp's sums of 16 columns, in a matrix [columns][64 rows] of
// 16 bits that is so exchanged: the matrices are rows 0 .. 7 and 8 .. 15 of 8 columns, then of the next 8.
__device__ __forceinline__ int transposed_row(int warp, int lane) {
  const int column = lane / 16 * 8 + lane % 8, chunk = warp % 4 * 2 + lane / 8 % 2;
  return column * 128 + swizzled<128>(column, chunk * 16);
}

#if GPU_CUDA && defined(__CUDA_ARCH_FEAT_SM90_ALL)
#define GPU_HAS_WGMMA 1

// A matrix in shared memory: rows of `width` (64 or 128) bytes with k along them, 8 rows after each other, 16-byte
// chunks exchanged as `swizzled` has them. Its address must be a multiple of 1024. `offset`, in bytes, moves along k by
// less than a row, or by whole groups of 8 rows; it only changes the low word, so that a constant one costs an addition.
__device__ __forceinline__ uint32_t wgmma_address(const void *shared) {
  return (uint32_t)__cvta_generic_to_shared(shared) >> 4 | 1u << 16;
}
template <int width> __device__ __forceinline__ uint64_t wgmma_matrix(uint32_t address, int offset) {
  constexpr uint32_t high = width * 8 / 16 | (width == 128 ? 1u : 2u) << 30;
  return uint64_t(high) << 32 | (address + offset / 16);
}

// Stores of this thread into shared memory, copies included, become visible after a barrier to the instructions, and to
// copies out of it.
__device__ __forceinline__ void wgmma_publish() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }
__device__ __forceinline__ void wgmma_begin() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
__device__ __forceinline__ void wgmma_commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
// Returns when all but the latest n groups are done.
template <int n> __device__ __forceinline__ void wgmma_wait() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(n) : "memory");
}

// A barrier of one warpgroup, numbered from 1.
__device__ __forceinline__ void warpgroup_barrier(int number) { asm volatile("bar.sync %0, 128;" ::"r"(number) : "memory"); }
// A barrier of some warps of the block, numbered from 1.
template <int threads> __device__ __forceinline__ void group_barrier(int number) {
  asm volatile("bar.sync %0, %1;" ::"r"(number), "n"(threads) : "memory");
}
// Hands registers from warpgroups that need few to those that need many.
template <int registers> __device__ __forceinline__ void take_registers() {
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(registers));
}
template <int registers> __device__ __forceinline__ void give_registers() {
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(registers));
}

// Of an 8 x 8 matrix a lane has two neighbours of 16 bits, of row lane / 4: those of the transposed matrix.
__device__ __forceinline__ uint32_t transposed_8x8(uint32_t pair) {
  uint32_t turned;
  asm volatile("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(turned) : "r"(pair));
  return turned;
}

// Four 8 x 8 matrices, held as that one is, to shared memory as their transposes: lane l says where row l % 8 of the
// transpose of matrix l / 8, 16 bytes, is to lie.
__device__ __forceinline__ void store_transposed_8x8(uint32_t to, uint32_t a, uint32_t b, uint32_t c, uint32_t d) {
  asm volatile("stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%0], {%1, %2, %3, %4};"
               ::"r"(to), "r"(a), "r"(b), "r"(c), "r"(d) : "memory");
}

// Behind a wait: what was multiplied is there, and no use of it may be moved ahead of this.
template <int n> __device__ __forceinline__ void wgmma_arrived(int (&d)[n]) {
#pragma unroll
  for (int i = 0; i < n; ++i) asm volatile("" : "+r"(d[i])::"memory");
}

#define WGMMA_SUMS                                                                                                    \
  "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "                                           \
  "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31}"
#define WGMMA_SUMS_64 \
  "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, " \
  "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, " \
  "%32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, " \
  "%48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63}"
#define WGMMA_OUT(d)                                                                                                  \
  "+r"(d[0]), "+r"(d[1]), "+r"(d[2]), "+r"(d[3]), "+r"(d[4]), "+r"(d[5]), "+r"(d[6]), "+r"(d[7]), "+r"(d[8]),         \
      "+r"(d[9]), "+r"(d[10]), "+r"(d[11]), "+r"(d[12]), "+r"(d[13]), "+r"(d[14]), "+r"(d[15]), "+r"(d[16]),          \
      "+r"(d[17]), "+r"(d[18]), "+r"(d[19]), "+r"(d[20]), "+r"(d[21]), "+r"(d[22]), "+r"(d[23]), "+r"(d[24]),         \
      "+r"(d[25]), "+r"(d[26]), "+r"(d[27]), "+r"(d[28]), "+r"(d[29]), "+r"(d[30]), "+r"(d[31])

// d [64 x 64] = A B, or += A B where `add`; A and B in shared memory, 32 k.
__device__ __forceinline__ void wgmma_m64n64k32_s8(int d[32], uint64_t a, uint64_t b, bool add) {
  asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %34, 0;\n"
               "wgmma.mma_async.sync.aligned.m64n64k32.s32.s8.s8 " WGMMA_SUMS ", %32, %33, p;\n}"
               : WGMMA_OUT(d) : "l"(a), "l"(b), "r"((int)add));
}
// The same for 128 columns: A is read once for all of them.
__device__ __forceinline__ void wgmma_m64n128k32_s8(int d[64], uint64_t a, uint64_t b, bool add) {
  asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %66, 0;\n"
               "wgmma.mma_async.sync.aligned.m64n128k32.s32.s8.s8 " WGMMA_SUMS_64 ", %64, %65, p;\n}"
               : WGMMA_OUT(d), WGMMA_OUT((d + 32)) : "l"(a), "l"(b), "r"((int)add));
}
// The same with A in registers, s8 or u8.
#define WGMMA_REGISTERS(name, types)                                                                                  \
  __device__ __forceinline__ void name(int d[32], const uint32_t a[4], uint64_t b, bool add) {                        \
    asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %37, 0;\n"                                                         \
                 "wgmma.mma_async.sync.aligned.m64n64k32.s32." types " " WGMMA_SUMS                                   \
                 ", {%32, %33, %34, %35}, %36, p;\n}"                                                                 \
                 : WGMMA_OUT(d) : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"((int)add));                 \
  }
WGMMA_REGISTERS(wgmma_m64n64k32_s8_registers, "s8.s8")
WGMMA_REGISTERS(wgmma_m64n64k32_u8s8_registers, "u8.s8")
#undef WGMMA_REGISTERS
#undef WGMMA_OUT
#undef WGMMA_SUMS
#undef WGMMA_SUMS_64

// bf16 or f16, with A in registers as A of mma_m16n8k16_bf16: d [64 x n] += A B, 16 k, n being 2 sums of a lane each.
template <int sums> __device__ __forceinline__ void wgmma_arrived(float (&d)[sums]) {
#pragma unroll
  for (int i = 0; i < sums; ++i) asm volatile("" : "+f"(d[i])::"memory");
}

#define WGMMA_TEN(t) ", %" #t "0, %" #t "1, %" #t "2, %" #t "3, %" #t "4, %" #t "5, %" #t "6, %" #t "7, %" #t "8, %" #t "9"
#define WGMMA_4 "%0, %1, %2, %3"
#define WGMMA_8 WGMMA_4 ", %4, %5, %6, %7"
#define WGMMA_16 WGMMA_8 ", %8, %9, %10, %11, %12, %13, %14, %15"
#define WGMMA_32 WGMMA_8 ", %8, %9" WGMMA_TEN(1) WGMMA_TEN(2) ", %30, %31"
#define WGMMA_48 WGMMA_8 ", %8, %9" WGMMA_TEN(1) WGMMA_TEN(2) WGMMA_TEN(3) ", %40, %41, %42, %43, %44, %45, %46, %47"
#define WGMMA_64 WGMMA_8 ", %8, %9" WGMMA_TEN(1) WGMMA_TEN(2) WGMMA_TEN(3) WGMMA_TEN(4) WGMMA_TEN(5) ", %60, %61, %62, %63"
#define WGMMA_88                                                                                                      \
  WGMMA_8 ", %8, %9" WGMMA_TEN(1) WGMMA_TEN(2) WGMMA_TEN(3) WGMMA_TEN(4) WGMMA_TEN(5) WGMMA_TEN(6) WGMMA_TEN(7)       \
      ", %80, %81, %82, %83, %84, %85, %86, %87"
#define WGMMA_128                                                                                                     \
  WGMMA_8 ", %8, %9" WGMMA_TEN(1) WGMMA_TEN(2) WGMMA_TEN(3) WGMMA_TEN(4) WGMMA_TEN(5) WGMMA_TEN(6) WGMMA_TEN(7)       \
      WGMMA_TEN(8) WGMMA_TEN(9) WGMMA_TEN(10) WGMMA_TEN(11) ", %120, %121, %122, %123, %124, %125, %126, %127"
#define WGMMA_OUT_4(i) "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3])
#define WGMMA_OUT_8(i) WGMMA_OUT_4(i), WGMMA_OUT_4(i + 4)
#define WGMMA_OUT_16(i) WGMMA_OUT_8(i), WGMMA_OUT_8(i + 8)
#define WGMMA_OUT_24(i) WGMMA_OUT_16(i), WGMMA_OUT_8(i + 16)
#define WGMMA_OUT_32(i) WGMMA_OUT_16(i), WGMMA_OUT_16(i + 16)
#define WGMMA_OUT_48(i) WGMMA_OUT_32(i), WGMMA_OUT_16(i + 32)
#define WGMMA_OUT_64(i) WGMMA_OUT_32(i), WGMMA_OUT_32(i + 32)
#define WGMMA_OUT_88(i) WGMMA_OUT_64(i), WGMMA_OUT_24(i + 64)
#define WGMMA_OUT_128(i) WGMMA_OUT_64(i), WGMMA_OUT_64(i + 64)
#define WGMMA_16_BIT(name, type, n, sums, a, b)                                                                       \
  __device__ __forceinline__ void name(float (&d)[sums], const uint32_t (&A)[4], uint64_t B) {                        \
    asm volatile("{\n.reg .pred p;\nsetp.eq.b32 p, 0, 0;\nwgmma.mma_async.sync.aligned.m64n" #n                       \
                 "k16.f32." type " {" WGMMA_##sums "}, {" a "}, " b ", p, 1, 1, 0;\n}"                                \
                 : WGMMA_OUT_##sums(0) : "r"(A[0]), "r"(A[1]), "r"(A[2]), "r"(A[3]), "l"(B));                         \
  }
#define WGMMA_BOTH(n, sums, a, b)                                                                                     \
  WGMMA_16_BIT(wgmma_bf16, "bf16.bf16", n, sums, a, b) WGMMA_16_BIT(wgmma_f16, "f16.f16", n, sums, a, b)
WGMMA_BOTH(8, 4, "%4, %5, %6, %7", "%8")
WGMMA_BOTH(16, 8, "%8, %9, %10, %11", "%12")
WGMMA_BOTH(32, 16, "%16, %17, %18, %19", "%20")
WGMMA_BOTH(64, 32, "%32, %33, %34, %35", "%36")
WGMMA_BOTH(96, 48, "%48, %49, %50, %51", "%52")
WGMMA_BOTH(128, 64, "%64, %65, %66, %67", "%68")
WGMMA_BOTH(176, 88, "%88, %89, %90, %91", "%92")
WGMMA_BOTH(256, 128, "%128, %129, %130, %131", "%132")
#undef WGMMA_BOTH
#undef WGMMA_16_BIT
#undef WGMMA_OUT_128
#undef WGMMA_OUT_88
#undef WGMMA_OUT_64
#undef WGMMA_OUT_48
#undef WGMMA_OUT_32
#undef WGMMA_OUT_24
#undef WGMMA_OUT_16
#undef WGMMA_OUT_8
#undef WGMMA_OUT_4
#undef WGMMA_128
#undef WGMMA_88
#undef WGMMA_64
#undef WGMMA_48
#undef WGMMA_32
#undef WGMMA_16
#undef WGMMA_8
#undef WGMMA_4
#undef WGMMA_TEN

#endif
