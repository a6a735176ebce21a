// 7. Weights in panels (kernelbook.packing), brought by bulk copies; two blocks share the activations that either brings.
//
// What holds 5_wgmma.cu back is not products: a warpgroup spends its time on addresses of 16-byte copies, half of L2's
// bandwidth goes to activations that the neighbouring block reads too, and a weight takes eight instructions. Here one
// warp asks for x, and three for w. A panel is what one warp has of operand A: the lane's codes are 16 bytes, read without bank
// conflicts and without a shuffle, and a pair of weights takes three instructions, f16(code * scale), rounded once (bf16:
// scale and product, each rounded). Blocks of a cluster have neighbouring rows of w and the same tokens: each asks for
// its part of a box of x, and both get it.
//
// A warpgroup turns the codes of some columns into weights while its products of those before run, and the warpgroups
// drift apart. Activations and weights have stages of their own: a chunk of a panel has 128 columns, of many tokens too
// much of x. Of fewer a stage of x has a chunk's columns as well: one wait, one barrier and one address for eight products.
//
// Where a product has few rows and tokens, tiles of 64 rows are as many as there are multiprocessors: both warpgroups have
// the same rows, and take chunks in turns (sliced K). What they add up at the end goes by way of shared memory, where sums
// that another block has made would have gone by way of L2.
//
// Where tiles are not many more than half of the multiprocessors, two blocks, a cluster, have one tile, and each a half of K.
// In the end either stores half of its sums right into the other's shared memory, whose barrier counts the bytes: nobody
// waits for L2 to have them, and for a flag.
//
// Cut tiles are put together as handover.h has it: what a block gives to another it has at the beginning. Sums of many tokens
// take microseconds to read: they come into the stages of x, behind its last ones, while those are multiplied. Of few
// tokens, where a tile has parts of many blocks and multiprocessors have room, all blocks add up evenly what all of them left.
//
// What a block has of its last tile, in 16 bits and of many tokens, goes by way of shared memory, where nothing more comes
// in: a copy writes 128 bytes of a token, of which lanes that store for themselves have 8 each, of lines far apart.
//
// Few tokens are a matter of bytes, and of what launches cost that follow each other. A block of half a multiprocessor
// leaves room for one of the next launch, which fills its stages with weights while this one hands over and ends.
//
// Predicted: 17408 x 5120, M = 512, either precision: as fast as cuBLAS on bf16 weights, to 3%; both draw all the power
// there is. M = 8 to 32: 6 us to begin, to hand over and to end, and beside these 80% of the read ceiling. With room for
// the next launch: 2 us less of them. Sliced K, 2048 x 2048, M = 256: 6.5 us where two tiles side by side took 8.4. Parts of K
// in two blocks, 6144 x 2048, M = 256: 12 us where 96 blocks with a tile each took 14.2.
//
// Outcome (H200, cold, median, launches that overlap, out of 16 bits; W8 / W4, beside cuBLAS on bf16 weights in the same run):
// M = 512, bf16, 17408 x 5120 122 / 120 us (747 and 761 TFLOP/s; 761), 5120 x 17408 122 / 118 (749, 775; 748), 12288 x 5120 89
// / 85 (721, 755; 733), 10240 x 5120 78 / 76 (686, 709; 738), 5120 x 6144 46 / 46 (697, 705; 716), 6144 x 2048 20.4 / 20.0
// (630, 643; 657), 2048 x 2048 9.5 / 9.0 (450, 479; 469). M = 256, f16, 2048 x 2048 7.1 / 6.7 us (cuBLAS 6.7), but 6144 x 2048
// 14.2 / 13.4 (11.5): 96 blocks have a tile, and cut into 132 they would gain less than handing over costs. M = 16, f16 24.9 /
// 17.9 us on 17408 x 5120, 25.4 / 17.7 on 5120 x 17408, 3.8 and 2.9 TB/s; M = 32 25.7 / 20.0 and 25.4 / 20.5; alone 3 to 5 us
// more.
// Taught: of 10240 x 5120, M = 512, reading others' sums took 2.1 us, leaving one's own 0.9, storing 2.9, and of 5120 x 17408
// 4.1, 1.1 and 1.8. Sums that come as stages do: 0.5 to 1.0% less time with int4, 0.9 to 2.3% with int8, but more with 64
// tokens. Outputs that leave as boxes: 0.4 to 1.4% from 176 tokens on, nothing with 128. Adding up evenly: int4, M = 16, 5120 x
// 17408 20.3 to 18.7 us; of 64 tokens and more twice the sums are read, and it lost. With room for two blocks, a multiprocessor
// without one gets two of the next launch: 120 blocks took 13 us, 132 10.4. Products of bf16 draw less power than of f16, and
// where power is the limit take 2 to 4% less time, with cuBLAS as well.
// The tensor cores are fast enough: products of 64 tokens with weights from registers follow each other at 32 clocks, also
// while others are made, but the 16 of a chunk took 870 clocks, not 512. Instructions around them do it: stages of a chunk,
// and addresses that stay in registers of a warp (200 instructions a chunk, 221 before; 240 where the compiler lost track)
// are 5 to 10% of the time with 64 and 128 tokens. Handing over took 2.6 of 11.6 us of 2048 x 2048, M = 512: two steps of a
// tile that are not cut give 2 to 8% with 128 tokens and more; sliced K, which there hands nothing over, 10 to 35%. Boxes of
// x without a row of it take longer than others (6144 x 2048, M = 32, tiles of 64: 11.0 us, 6.4 since they are not asked for).
// Of few tokens, tiles of 256 rows by four warpgroups lost everywhere to tiles of 192 or of 128 rows, which cut K less: with
// room for the next launch, or without, M = 32 takes 5 to 27% less time with W8 (script; 17408 x 5120 27.2 to 25.6 us, 2048 x
// 6144 10.6 to 7.6), M = 16 up to 17%. W4 keeps 256 rows, two bands a warp, for 8 and 16 tokens of large weights. Stages that
// a thread counts once for x and w, and an address that is not made again for each, are 19 of 217 instructions: 1 to 3% of the
// time with 128 tokens. One barrier for both takes 1 to 4% off W4, and nothing off W8, whose stages are wanted back sooner:
// 18% more where a slice has two of them.
// Parts of K in two blocks (script, launches that overlap, out of 16 bits): 6144 x 2048, M = 256, bf16, W8 / W4 14.3 to 12.8 /
// 14.2 to 12.4 us (cuBLAS 11.5); 2048 x 6144, M = 512 22.2 to 20.9 (21.0), M = 256 14.8 to 14.0 / 13.7 to 12.5 (13.3 to 13.9);
// 2048 x 2048, M = 256 7.1 to 6.7 (6.7); 1024 x 2048, M = 128 5.4 to 4.2; 12288 x 5120, M = 128 29.1 to 26.2 (35.1); of few
// tokens, f16, 12288 x 5120, W4, M = 16 14.7 to 13.7, M = 32 15.1 to 14.3, 10240 x 5120, W4, M = 32 14.3 to 13.1, 6144 x 2048,
// W8, M = 32 7.3 to 6.0. They share no x, and need not: neighbours that ask for the same lines at the same time cost L2 less
// than its bandwidth says. A cluster has two blocks, since of clusters of four only 30 run at once, not 33, and of three 39: 32
// of four, which share x as well, took twice the time.
// Counters, before that, of tiles of 128 x 128 alone (6144 x 8192, M = 256, bf16, W8): the tensor pipe is active for 80% of a
// block's time, and yet lanes wait for it in 4% of theirs. A warp takes 1,280 clocks for the 211 instructions of a chunk,
// where its products and its neighbour's take 1,024: results of the one before (23%), registers whose ports products use
// (17%), shared memory (12%). So instructions bound it, not copies. Tiles of 256 tokens, which make as many weights for twice
// the products, take 5% more than their products do.
// Tried in vain: codes read a turn ahead, and their stage waited for a chunk ahead (1 to 3% less of 128 tokens, as much more of
// 176 and where there are few stages, up to 10% where warpgroups share rows), scales of bf16 without their factor of 128, which
// sums get at the end (nothing), two blocks on a multiprocessor that both multiply (8% slower), parts with room for the
// next launch (1 to 20% more) and with tiles of 256 tokens (stages are too few), sums in float to out (3 us more
// at M = 512), a chunk's weights all made at once (within 3%, either way; it takes two chunks a turn of the loop, with
// registers of their own: written to the same ones, weights change under products).
//
// There is no simulated form: the ranges of handover.h are checked there, and the order of panels by kernels on mma.sync.
//
//   CODE_BITS    8 or 4
//   BF16         1: x is bf16, 0: f16
//   GROUPS       warpgroups of a block that multiply: 2 or 3
//   BANDS        of 64 rows of w, that each of them has
//   SLICES       2: both warpgroups have the same rows, and take chunks in turns; 1: each has its own
//   TILE_TOKENS  rows of x in a tile of the product: 8, 16, 32, 64, 96, 128, 176 or 256
//   X_BOXES      of 64 columns, of a stage of x: 1, or 2, a chunk's
//   X_STAGES     stages of x in shared memory
//   W_STAGES     stages of w there, each of a chunk
//   CLUSTER      blocks that share x, each by a multiple of 8 tokens
//   PARTS        2: two blocks have the same tile, and each a half of K, where they share no x; 1: each has its own
//   ROOM         1: a multiprocessor has room for two blocks
//   NARROW_OUT   1: out is of 16 bits, as x is; 0: float
//   SHARED_BYTES of dynamic shared memory that a launch asks for
#include "bulk.h"
#include "handover.h"

#if GPU_HAS_WGMMA

constexpr int kThreads = 128 * (GROUPS + 1), kWarps = 4 * GROUPS;  // warps: that multiply
constexpr int kPanelRows = 16, kChunk = 128, kScaleBytes = 128;    // as kernelbook/packing.py has them
constexpr int kGroups = GROUPS / SLICES;                           // with rows of their own
constexpr int kPanels = BANDS * 4 * kGroups;                       // of a tile: one for each of their warps and bands
constexpr int kRows = kPanelRows * kPanels;
constexpr int kCodeBytes = kPanelRows * kChunk * CODE_BITS / 8, kChunkBytes = kCodeBytes + kScaleBytes;
constexpr int kStep = 64;               // columns of a box of x: 128 bytes, what a swizzle spans
constexpr int kWidth = 2 * kStep;       // bytes
constexpr int kBoxBytes = TILE_TOKENS * kWidth, kStageBytes = X_BOXES * kBoxBytes;
constexpr int kSums = TILE_TOKENS / 2;  // of a lane and band
constexpr int kTokens = TILE_TOKENS / SLICES, kKept = kTokens / PARTS;  // whose sums a warp has; of a slice, and at the end
constexpr int kBand = kKept / 2, kOwn = BANDS * kBand;  // sums that a lane stores or hands over
constexpr int kBlocksOfCluster = CLUSTER * PARTS;
constexpr int kShare = TILE_TOKENS / CLUSTER;  // rows of x that this block asks for
constexpr bool kMany = kKept >= 128;           // tokens, whose sums copies bring
constexpr int kLater = 2;                      // chunks after sums were left, when memory has them
constexpr int kWarpsOfStage = kStageBytes / (128 * kOwn);  // whose sums have the size of a stage of x
constexpr int kSumStages = kMany ? kWarps / kWarpsOfStage : 1;
constexpr int kCopying = 3;                    // warps that ask for w: each copy takes its warp some 100 clocks
static_assert(GROUPS >= 2 && GROUPS <= 3 && BANDS <= 2 && kShare % 8 == 0 && TILE_TOKENS % CLUSTER == 0);
// A stage holds one chunk, and always one of the same slice: parities repeat, and a warp that skips a turn of a stage could
// take the phase before for its own.
static_assert(SLICES == 1 || SLICES == 2 && GROUPS == 2 && BANDS == 1 && X_BOXES == 2 && kTokens % 8 == 0 && kTokens < 128);
static_assert(PARTS == 1 || PARTS == 2 && CLUSTER == 1 && BANDS == 1 && !ROOM && kKept % 8 == 0);
static_assert(X_STAGES % SLICES == 0 && W_STAGES % SLICES == 0);
// Where a stage of x has a chunk's columns, a thread stands at the same stage of x and of w. With codes of 4 bits both come
// and go together, too: one barrier to wait for and one to arrive at. Of 8 bits a stage of w is better let go of at once, when
// it is in registers, since what comes next is longer on its way; of few stages any.
constexpr bool kInStep = X_BOXES == 2, kTogether = kInStep && CODE_BITS == 4 && X_STAGES > 3 * SLICES;
static_assert(!kInStep || X_STAGES == W_STAGES);
// Outputs of 16 bits of more tokens still are stored by copies.
constexpr bool kStoredByCopy = kKept > 128 && NARROW_OUT;
static_assert(!kStoredByCopy || BANDS * X_BOXES == 1 && X_STAGES >= GROUPS, "a warpgroup's sums in 16 bits have the size of a stage of x");

// A block takes a multiprocessor, or with ROOM half of it, so that blocks of the next launch may bring weights meanwhile.
// Registers of a thread are counted in eights: what the threads that multiply take, those that copy must have given.
constexpr int kBlocks = 1 + ROOM, kLaunched = 65536 / kBlocks / kThreads / 8 * 8;
constexpr int kCopyRegisters = GROUPS < 3 && !ROOM ? 40 : 32;
constexpr int kMultiplyRegisters = (kLaunched * (GROUPS + 1) - kCopyRegisters) / GROUPS / 8 * 8;
// Groups of 32 columns that become weights at a time: two, if there are registers for all sums, for weights that are being
// made and for those being multiplied.
constexpr int kAhead = BANDS * (kSums + 32) + 36 <= kMultiplyRegisters ? 2 : 1;

struct Block {
  alignas(1024) uint16_t x[X_STAGES][X_BOXES][TILE_TOKENS][kStep];
  alignas(128) uint8_t w[W_STAGES][kPanels][kChunkBytes];
  float4 given[SLICES > 1 ? kWarps * kTokens / 8 * 32 : 1];  // by each slice to the other
  float4 of_parts[PARTS > 1 ? kWarps * kOwn / 4 * 32 : 1];   // by the other part
  PhaseBarrier x_full[X_STAGES], x_empty[X_STAGES], own_w_full[W_STAGES], own_w_empty[W_STAGES];
  PhaseBarrier parts_there[kWarps], parts_taken[kWarps];     // of a warp: what it was given, what it gave
  __device__ __forceinline__ PhaseBarrier &w_full(int stage) { return kTogether ? x_full[stage] : own_w_full[stage]; }
  __device__ __forceinline__ PhaseBarrier &w_empty(int stage) { return kTogether ? x_empty[stage] : own_w_empty[stage]; }
};
static_assert(sizeof(Block) + 1024 <= SHARED_BYTES, "1 KB aligns it");
static_assert(SHARED_BYTES <= (ROOM ? 113 : 227) << 10, "of 228 KB each block has 1 KB");

// Where a thread stands in a ring of stages. Who fills them waits for an empty one with the parity before: of a new barrier
// that phase counts as ended.
template <int stages, int by = 1> struct Turn {
  int stage = 0, parity = 0;
  __device__ __forceinline__ void next() {
    if ((stage += by) >= stages) stage -= stages, parity ^= 1;
  }
};

// ---- codes to weights, two at a time ----

__device__ __forceinline__ uint32_t bf16_add(uint32_t a, uint32_t b) {
  uint32_t sum;
  asm("add.rn.bf16x2 %0, %1, %2;" : "=r"(sum) : "r"(a), "r"(b));
  return sum;
}
__device__ __forceinline__ uint32_t bf16_fma(uint32_t a, uint32_t b, uint32_t c) {
  uint32_t d;
  asm("fma.rn.bf16x2 %0, %1, %2, %3;" : "=r"(d) : "r"(a), "r"(b), "r"(c));
  return d;
}
__device__ __forceinline__ uint32_t scaled(uint32_t codes, uint32_t scale) {
  uint32_t product;
  if constexpr (BF16) asm("mul.rn.bf16x2 %0, %1, %2;" : "=r"(product) : "r"(codes), "r"(scale));
  else asm("mul.rn.f16x2 %0, %1, %2;" : "=r"(product) : "r"(codes), "r"(scale));
  return product;
}
// a & b | c, in one instruction
__device__ __forceinline__ uint32_t and_or(uint32_t a, uint32_t b, uint32_t c) {
  uint32_t d;
  asm("lop3.b32 %0, %1, %2, %3, 0xea;" : "=r"(d) : "r"(a), "r"(b), "r"(c));
  return d;
}

// Of a lane's two rows, each twice.
struct Scales { uint32_t row[2]; };
__device__ __forceinline__ Scales scales_of(uint32_t halves) {
  if constexpr (BF16) {
    constexpr float unit = CODE_BITS == 8 ? 128 : 1;  // weights_of makes code / unit
    const float low = half_to_float(uint16_t(halves)) * unit, high = half_to_float(uint16_t(halves >> 16)) * unit;
    return {bf16_pair(low, low), bf16_pair(high, high)};
  } else {
    return {__byte_perm(halves, 0, 0x1010), __byte_perm(halves, 0, 0x3232)};
  }
}
// A step of 16 columns from its codes. A code's bits are put below those of 1024 (f16) or 128 (bf16), whose last place is
// worth 1, or of 64, worth 1/16 each: what is taken off then is exact. Below 128 there is no room for 8 bits, but a byte is a
// bf16 as it is: its 256 least numbers, the subnormal ones and as many more, are 2^-133 apart.
__device__ __forceinline__ void weights_of(uint32_t (&weights)[4], const uint32_t (&codes)[CODE_BITS / 4], const Scales &scales) {
  unrolled<4>([&](auto p) {
    uint32_t pair;
    if constexpr (CODE_BITS == 8 && BF16) {
      const uint32_t bytes = __byte_perm(codes[p.value / 2], 0, p.value % 2 ? 0x4342 : 0x4140);
      pair = bf16_fma(bytes, 0x7e807e80u, 0xbf80bf80u);  // 2^126 byte - 1: (code + 128) / 128 - 1
    } else if constexpr (CODE_BITS == 8) {
      const uint32_t bytes = __byte_perm(codes[p.value / 2], 0x64646464u, p.value % 2 ? 0x4342 : 0x4140);
      pair = half2_add(bytes, 0xe480e480u);  // - 1024 - 128
    } else if constexpr (BF16) {
      pair = bf16_add(and_or(codes[0] >> 4 * p.value, 0x000f000fu, 0x43004300u), 0xc308c308u);  // - 128 - 8
    } else if constexpr (p.value % 2 == 0) {
      pair = half2_add(and_or(codes[0] >> 4 * p.value, 0x000f000fu, 0x64006400u), 0xe408e408u);  // - 1024 - 8
    } else {  // its nibble four bits higher: 1024 + 16 (code + 8)
      pair = half2_fma(and_or(codes[0] >> 4 * (p.value - 1), 0x00f000f0u, 0x64006400u), 0x2c002c00u, 0xd480d480u);
    }
    weights[p.value] = scaled(pair, scales.row[p.value % 2]);
  });
}

__device__ __forceinline__ void multiply(float (&sums)[kSums], const uint32_t (&weights)[4], uint64_t x) {
  if constexpr (BF16) wgmma_bf16(sums, weights, x);
  else wgmma_f16(sums, weights, x);
}

#if NARROW_OUT
using Out = uint16_t;
#else
using Out = float;
#endif
__device__ __forceinline__ uint32_t pair(float first, float second) {
  return BF16 ? bf16_pair(first, second) : half_pair(first, second);
}

// Writes a warp's sums of 16 rows and of 2 count tokens to out [M][N], `row` and `token` being the first of them.
#if NARROW_OUT
// A lane has two tokens of a row, and memory the rows of a token side by side: 8 x 8 are transposed, then lanes exchange
// halves, so that each has four rows of a token, 8 bytes, and four lanes a sector.
template <int count>
__device__ __forceinline__ void store(Out *out, const float (&sums)[count], int row, int token, int M, int N, int lane) {
  const bool is_odd = lane % 2;
  uint2 four[count / 4];
  unrolled<count / 4>([&](auto j) {
    const float *of_8 = sums + 4 * j.value;
    const uint32_t upper = transposed_8x8(pair(of_8[0], of_8[1])), lower = transposed_8x8(pair(of_8[2], of_8[3]));
    const uint32_t theirs = __shfl_xor_sync(GPU_FULL_MASK, is_odd ? upper : lower, 1);
    four[j.value] = is_odd ? make_uint2(theirs, lower) : make_uint2(upper, theirs);
  });
  row += is_odd * 8 + lane % 4 / 2 * 4, token += lane / 4;
  Out *to = out + (size_t)token * N + row;
  if (N % 4 == 0) {
    unrolled<count / 4>([&](auto j) {
      if (token + 8 * j.value < M && row < N) *reinterpret_cast<uint2 *>(to) = four[j.value];
      to += (size_t)8 * N;
    });
  } else {  // rows are not at multiples of 8 bytes
    unrolled<count / 4>([&](auto j) {
      unrolled<4>([&](auto i) {
        const uint32_t two = i.value < 2 ? four[j.value].x : four[j.value].y;
        if (token + 8 * j.value < M && row + i.value < N) to[i.value] = uint16_t(two >> i.value % 2 * 16);
      });
      to += (size_t)8 * N;
    });
  }
}
#else
template <int count>
__device__ __forceinline__ void store(Out *out, const float (&sums)[count], int row, int token, int M, int N, int lane) {
  row += lane / 4, token += lane % 4 * 2;
  Out *to = out + (size_t)token * N + row;
  unrolled<count>([&](auto i) {  // of 8 tokens + 0, + 1, of rows + 0, + 8
    constexpr int later = i.value / 4 * 8 + i.value % 2, below = i.value % 4 / 2 * 8;
    if (token + later < M && row + below < N) to[(size_t)later * N + below] = sums[i.value];
  });
}
#endif

// Writes a warpgroup's sums of 64 rows to out, as 16 bits, by its map: by way of a stage of x, which has just their size,
// and is what a box of out [tokens][64 rows] looks like there.
template <int count>
__device__ __forceinline__ void store_by_copy(const TensorMap &out, const float (&sums)[count], void *stage, int row, int token,
                                              int warp, int lane) {
  const uint32_t to = shared_address(stage) + transposed_row(warp, lane);
  unrolled<count / 8>([&](auto j) {
    const float *of_16 = sums + 8 * j.value;
    store_transposed_8x8(to + j.value * 16 * kWidth, pair(of_16[0], of_16[1]), pair(of_16[2], of_16[3]),
                         pair(of_16[4], of_16[5]), pair(of_16[6], of_16[7]));
  });
  wgmma_publish();
  warpgroup_barrier(1 + warp / 4);
  if (warp % 4 == 0 && lane == 0) {
    store_box(out, row, token, stage);
    wait_for_boxes_read();
  }
}

// Keeps one half of the sums, in the first half of them, and hands out the other.
template <int both>
__device__ __forceinline__ void keep_half(float (&sums)[both], float (&others)[both / 2], bool second) {
  unrolled<both / 2>([&](auto i) {
    const float low = sums[i.value], high = sums[i.value + both / 2];
    sums[i.value] = second ? high : low, others[i.value] = second ? low : high;
  });
}

// Of two slices' sums of the same rows, a warp of the first keeps those of the first tokens, its like the others, in its first
// half, and each adds what the other has of them, [warps][count / 4][32 lanes].
template <int both>
__device__ __forceinline__ void add_slices(float (&sums)[both], float4 *given, int slice, int warp, int lane) {
  constexpr int count = both / 2;
  float4 *const to = given + warp * (count / 4 * 32) + lane;
  const float4 *const from = given + (warp + kWarps / 2) % kWarps * (count / 4 * 32) + lane;
  float others[count];
  keep_half(sums, others, slice);
  group_barrier<64>(1 + warp % 4);  // what was given before has been taken
  unrolled<count / 4>([&](auto i) {
    const float *four = others + 4 * i.value;
    to[i.value * 32] = make_float4(four[0], four[1], four[2], four[3]);
  });
  group_barrier<64>(1 + warp % 4);
  add_brought<count>(sums, from);
}

// Two blocks that have the parts of K do the same: each keeps the sums of its half of the tokens, [0, count), and adds what
// the other, whose stores end a phase, has of them, [warps][count / 4][32 lanes].
template <int both>
__device__ __forceinline__ void add_parts(float (&sums)[both], Block &block, int part, int warp, int lane, int parity) {
  constexpr int count = both / 2;
  PhaseBarrier &there = block.parts_there[warp];
  if (lane == 0) arrive_expecting(there, count * 128);
  float4 *const given = block.of_parts + warp * (count / 4 * 32) + lane;
  const uint32_t to = address_at(given, part ^ 1), told = address_at(&there, part ^ 1);
  float others[count];
  keep_half(sums, others, part);
  block.parts_taken[warp].wait(parity ^ 1);  // what was given before
  unrolled<count / 4>([&](auto i) { store_at(to + i.value * 512, others + 4 * i.value, told); });
  there.wait_for_cluster(parity);
  add_brought<count>(sums, given);
  __syncwarp();
}

#if CLUSTER * PARTS > 1
#define OF_CLUSTER __cluster_dims__(CLUSTER * PARTS, 1, 1)
#else
#define OF_CLUSTER
#endif

// out [M][N] of x [M][K], by its map of boxes of kShare x 64, and w [N / 16][K / 128] chunks of panels, rounded up; rows
// of w beyond N and columns beyond K count as 0. sums, there, whole, evenly, tail: see handover.h; a step is a chunk, a range a
// cluster's. out_boxes: where has_boxes, out's map of boxes of TILE_TOKENS x 64; else not looked at.
// Grid: as many blocks as run at once, or fewer, whole clusters; block: 32 x 4 (GROUPS + 1).
extern "C" __global__ void OF_CLUSTER __launch_bounds__(kThreads, kBlocks)
packed_wgmma(const uint8_t *__restrict__ w, const __grid_constant__ TensorMap x, Out *__restrict__ out, float4 *sums_left,
             int *there, int M, int N, int K, int whole, int evenly, int tail, const __grid_constant__ TensorMap out_boxes) {
  GPU_DYNAMIC_SHARED(char, unaligned);
  // Handed around, an address is not made once more wherever it is needed.
  const unsigned aligned = __shfl_sync(GPU_FULL_MASK, (shared_address(unaligned) + 1023) / 1024 * 1024, 0);
  Block &block = *reinterpret_cast<Block *>(__cvta_shared_to_generic(aligned));
  // The first kWarps multiply. Nor is a warp's number read from the special register over and over.
  const unsigned lane = threadIdx.x, warp = __shfl_sync(GPU_FULL_MASK, threadIdx.y, 0);
  const int rank = blockIdx.x % CLUSTER, part = blockIdx.x % PARTS, clusters = gridDim.x / kBlocksOfCluster;
  const int token_tiles = (M + TILE_TOKENS - 1) / TILE_TOKENS, row_tiles = (N + CLUSTER * kRows - 1) / (CLUSTER * kRows);
  const int chunks = (K + kChunk - 1) / kChunk;
  // Of a tile of the cluster: this block's first panel, and the first token.
  const auto panel_of = [&](int tile) { return (tile / token_tiles * CLUSTER + rank) * kPanels; };
  const auto token_of = [&](int tile) { return tile % token_tiles * TILE_TOKENS; };
  const int place = blockIdx.x % kBlocksOfCluster * kWarps;  // of this block's first warp, in the cluster
  const bool by_all = ROOM && evenly;
  const bool has_boxes = kStoredByCopy && N % 8 == 0;  // of out: a map has rows at multiples of 16 bytes
  const auto own_range = [&] {
    return Ranges(token_tiles * row_tiles, chunks, blockIdx.x / kBlocksOfCluster, clusters, whole, by_all, tail);
  };
  // What a warp hands over is its own: unless copies bring sums, it waits for its like in other blocks only.
  const Handover<kOwn, kBlocksOfCluster * kWarps> handover{sums_left, there};
  Work work;

  let_next_launch_begin();
  if (warp == kWarps && lane == 0) {
    prefetch_map(x);
    if (has_boxes) prefetch_map(out_boxes);
  }
  if (warp == 0 && lane == 0) {
    for (PhaseBarrier &barrier : block.x_full) barrier.init(kTogether ? 1 + kPanels : 1);
    for (PhaseBarrier &barrier : block.x_empty) barrier.init(kWarps / SLICES * CLUSTER);  // the other block's, too
    for (PhaseBarrier &barrier : block.own_w_full) barrier.init(kPanels);  // whose lanes count what each asks for
    for (PhaseBarrier &barrier : block.own_w_empty) barrier.init(32 * kWarps / SLICES);
    if constexpr (PARTS > 1) {
      for (PhaseBarrier &barrier : block.parts_there) barrier.init(1);
      for (PhaseBarrier &barrier : block.parts_taken) barrier.init(1);
    }
    publish_barriers();
  }
  if constexpr (kBlocksOfCluster > 1) cluster_barrier();
  else __syncthreads();

  if (warp / 4 == GROUPS) {
    give_registers<kCopyRegisters>();
    if (warp % 4 == 0) {  // x, without which nothing is multiplied, left or stored
      await_launch_before();
      Ranges range = own_range();
      Turn<X_STAGES> x_turn;
      const auto bring = [&](int bytes, auto copy) {  // into the next stage
        PhaseBarrier &full = block.x_full[x_turn.stage];
        block.x_empty[x_turn.stage].wait(x_turn.parity ^ 1);
        arrive_expecting(full, bytes);
        copy(block.x[x_turn.stage], full);
        x_turn.next();
      };
      while (range.next(work)) {
        const Work own = work.part(part, PARTS);
        const int first = token_of(work.tile), token = first + rank * kShare;
        // Boxes with no row of x are not asked for: to fill them takes longer than to bring others, and what lies in their
        // place makes sums that nobody stores.
        const int shares = min(CLUSTER, (M - first + kShare - 1) / kShare);
        if (lane == 0) {
#pragma unroll 1
          for (int column = own.first * kChunk; column < own.end * kChunk; column += X_BOXES * kStep)
            bring(shares * (kStageBytes / CLUSTER), [&](auto &stage, PhaseBarrier &full) {
              if (token >= M) return;
              unrolled<X_BOXES>([&](auto b) {
                copy_box<CLUSTER>(stage[b.value][rank * kShare], x, column + b.value * kStep, token, full);
              });
            });
        }
        if (!kMany || range.is_given(work)) continue;
        // Sums that others left, while the last steps are multiplied.
        constexpr int kGivers = 32 / kWarps;  // that lanes wait for at a time, and for each of their warps
#pragma unroll 1
        for (int giver = range.first_giver(work); giver < range.range; giver += kGivers) {
          const int givers = min(kGivers, range.range - giver);
          __syncwarp();
          if (lane < givers * kWarps) handover.wait_for(giver + lane / kWarps, place + lane % kWarps);
          __syncwarp();
          if (lane == 0) {
            fence_copies();
#pragma unroll 1
            for (int i = 0; i < givers * kSumStages; ++i)
              bring(kStageBytes, [&](auto &stage, PhaseBarrier &full) {
                const float4 *left = handover.sums_of(giver + i / kSumStages, place + i % kSumStages * kWarpsOfStage, 0);
                if constexpr (kTogether) full.arrive(kPanels);  // no weights come with them
                copy_bulk(stage, left, kStageBytes, full, cache_policy(false));
              });
          }
        }
      }
      // What the other block lets go of here has come: without it a block must not end.
      if (CLUSTER > 1 && lane == 0) {
        for (int i = 0; i < X_STAGES; ++i, x_turn.next()) block.x_empty[x_turn.stage].wait(x_turn.parity ^ 1);
      }
    }
    if (warp % 4 > 0) {  // w, a lane each panel
      const int panels = (N + kPanelRows - 1) / kPanelRows, mine = lane * kCopying + warp % 4 - 1;
      const uint64_t policy = cache_policy(token_tiles > 1);
      Ranges range = own_range();
      Turn<W_STAGES> w_turn;
      while (range.next(work)) {
        const Work own = work.part(part, PARTS);
        const int first = panel_of(work.tile), count = min(max(panels - first, 0), kPanels);
        const uint8_t *from = w + ((size_t)(first + mine) * chunks + own.first) * kChunkBytes;
#pragma unroll 1
        for (int chunk = own.first; chunk < own.end; ++chunk) {
          PhaseBarrier &full = block.w_full(w_turn.stage);
          block.w_empty(w_turn.stage).wait(w_turn.parity ^ 1);
          if (mine < count) {
            arrive_expecting(full, kChunkBytes);
            copy_bulk(block.w[w_turn.stage][mine], from, kChunkBytes, full, policy);
          } else if (mine < kPanels) {
            full.arrive();
          }
          from += kChunkBytes;
          w_turn.next();
        }
      }
    }
  } else {
    take_registers<kMultiplyRegisters>();
    const int slice = SLICES > 1 ? warp / 4 : 0;
    const int first_panel = (warp / 4 - slice) * BANDS * 4 + warp % 4;  // of band b: 4 b further
    const auto release_x = [&](int stage) {
      if constexpr (CLUSTER == 1) {
        if (lane == 0) block.x_empty[stage].arrive();
      } else {
        if (lane < CLUSTER) arrive_at(block.x_empty[stage], lane);
      }
    };
    const int of_cluster = place + warp;
    const auto row_of = [&](int tile, int band) { return (panel_of(tile) + first_panel + band * 4) * kPanelRows; };
    const auto tokens_of = [&](int tile) { return token_of(tile) + slice * kTokens + part * kKept; };
    Ranges range = own_range();
    Turn<X_STAGES, SLICES> x_turn{slice};
    Turn<W_STAGES, SLICES> w_turn{slice};
    const uint32_t first_x = wgmma_address(block.x[0]);
    int next = slice;  // chunk of the slice, of a range's part of a tile
    bool half = false;  // of the turn that ranges arrive in
    bool is_owed = false;  // sums that were left, to be given
    int added = 0;          // times that parts were
    const auto give = [&] {
      if (is_owed) handover.give(range.range, of_cluster, lane);
      is_owed = false;
    };

    while (range.next(work)) {
      // The other part may give again: told only now, since without another tile it may have ended.
      if (PARTS > 1 && added > 0 && lane == 0) arrive_at(block.parts_taken[warp], part ^ 1);
      const Work own = work.part(part, PARTS);
      const int count = own.end - own.first;
      float sums[BANDS][kSums] = {};
      int before = 0;  // the stage of x before
      int at = SLICES > 1 ? next : 0;
      const bool has_part = SLICES * PARTS == 1 || at < count;
#pragma unroll 1
      for (; at < count; at += SLICES) {
        if (kMany && at == kLater) give();
        wgmma_begin();  // by all lanes: so the compiler keeps addresses, the same for all, in registers of a warp
        const int w_stage = kInStep ? x_turn.stage : w_turn.stage;
        block.w_full(w_stage).wait(kInStep ? x_turn.parity : w_turn.parity);
        const uint8_t *panel = block.w[w_stage][first_panel];
        uint32_t scales[BANDS][4], codes[BANDS][4];
        unrolled<BANDS>([&](auto b) {
          read_run<16>(scales[b.value], panel + b.value * 4 * kChunkBytes + kCodeBytes + lane / 4 * 16);
        });
        uint32_t x_address;
        unrolled<4 / kAhead>([&](auto turn) {
          constexpr int first_group = turn.value * kAhead;  // of 32 columns, of the chunk; a stage of x has 2 or all
          constexpr bool begins = first_group % (2 * X_BOXES) == 0, ends = (first_group + kAhead) % (2 * X_BOXES) == 0;
          uint32_t weights[BANDS][2 * kAhead][4];  // of each step of 16 columns
          unrolled<kAhead * BANDS>([&](auto i) {
            constexpr int b = i.value % BANDS, ahead = i.value / BANDS, q = first_group + ahead;
            // 16 bytes of codes are one group of int8, two of int4
            if constexpr (CODE_BITS == 8 || q % 2 == 0)
              read_run<16>(codes[b], panel + b * 4 * kChunkBytes + q * CODE_BITS / 8 * 512 + lane * 16);
            const Scales two = scales_of(scales[b][q]);
            unrolled<2>([&](auto s) {
              uint32_t own[CODE_BITS / 4];
              unrolled<CODE_BITS / 4>([&](auto word) {
                own[word.value] = codes[b][((CODE_BITS == 4 ? q % 2 * 2 : 0) + s.value) * (CODE_BITS / 4) + word.value];
              });
              weights_of(weights[b][2 * ahead + s.value], own, two);
            });
          });
          if constexpr (begins) {
            if constexpr (!kTogether) block.x_full[x_turn.stage].wait(x_turn.parity);
            x_address = first_x + x_turn.stage * (kStageBytes / 16);
          }
          wgmma_begin();
          unrolled<2 * kAhead>([&](auto s) {
            constexpr int step = first_group * 2 + s.value, box = step / 4 % X_BOXES;  // of 16 columns; a box has 4
            const uint64_t columns = wgmma_matrix<kWidth>(x_address, box * kBoxBytes + step % 4 * 32);
            unrolled<BANDS>([&](auto b) { multiply(sums[b.value], weights[b.value][s.value], columns); });
          });
          wgmma_commit();
          if constexpr (first_group + kAhead == 4) {  // the stage is in registers
            if constexpr (!kTogether) block.w_empty(w_stage).arrive();
            w_turn.next();
          }
          wgmma_wait<1>();  // the products before these are done
          if constexpr (begins) {
            if (first_group > 0 || at >= SLICES) release_x(before);
            before = x_turn.stage;
          }
          if constexpr (ends) x_turn.next();
        });
      }
      next = at - count;
      wgmma_wait<0>();
      if (has_part) release_x(before);
      unrolled<BANDS>([&](auto b) { wgmma_arrived(sums[b.value]); });
      if constexpr (SLICES > 1) add_slices(sums[0], block.given, slice, warp, lane);
      if constexpr (PARTS > 1) {
        using OfSlice = float[kTokens / 2];
        add_parts(reinterpret_cast<OfSlice &>(sums), block, part, warp, lane, added % 2);
        ++added;
      }

      using Own = float[kOwn];
      using Bands = float[BANDS][kBand];
      Own &all = reinterpret_cast<Own &>(sums);
      const Bands &bands = reinterpret_cast<const Bands &>(sums);
      auto turn = x_turn;  // of many tokens who takes sums, or stores by copies, has nothing left to multiply
      if (by_all) {
        if (range.is_given(work)) handover.leave(all, range.part(range.range, work.tile), of_cluster, lane);
        if (range.is_last()) half = handover.arrive(clusters, of_cluster, lane);  // by now memory has what was left
      } else if (range.is_given(work)) {
        handover.leave(all, range.range, of_cluster, lane);
        is_owed = true;
        if (!kMany) give();
      } else {
        give();
        const int giver = range.first_giver(work);
        if constexpr (!kMany) {
          handover.take(all, giver, range.range, of_cluster, lane);
        } else {
#pragma unroll 1
          for (int i = 0; i < (range.range - giver) * kSumStages; ++i) {
            block.x_full[turn.stage].wait(turn.parity);
            if (i % kSumStages == warp / kWarpsOfStage) {
              const float4 *brought = reinterpret_cast<const float4 *>(block.x[turn.stage]);
              add_brought<kOwn>(all, brought + warp % kWarpsOfStage * (kOwn / 4 * 32) + lane);
            }
            __syncwarp();
            release_x(turn.stage);
            turn.next();
          }
        }
      }
      if (range.is_given(work)) continue;
      if (has_boxes && range.is_last()) {  // nothing more comes into the stages of x: each warpgroup takes one
        for (int i = 0; i < warp / 4; ++i) turn.next();
        block.x_empty[turn.stage].wait(turn.parity ^ 1);
        store_by_copy(out_boxes, sums[0], block.x[turn.stage], row_of(work.tile, 0) - warp % 4 * kPanelRows,
                      token_of(work.tile), warp, lane);
      } else {
        unrolled<BANDS>([&](auto b) {
          store(out, bands[b.value], row_of(work.tile, b.value), tokens_of(work.tile), M, N, lane);
        });
      }
    }
    give();
    if (by_all) {
      handover.wait_for_all(half, clusters, of_cluster, lane);
      handover.add_up(range, of_cluster, lane, [&](int tile, int i, const float (&four)[4]) {
        store(out, four, row_of(tile, i / kBand), tokens_of(tile) + i % kBand * 2, M, N, lane);
      });
    }
  }
}

#endif
