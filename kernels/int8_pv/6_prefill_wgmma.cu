// 6. Prefill on Hopper's warpgroup instructions: the tensor cores read K and V themselves.
//
// 64 rows at a time are multiplied by tiles that stay in shared memory: no lane loads K or V, and nothing but softmax
// and quantization is left to issue. V's layout, with tokens along bytes, is the only one that 8-bit operands may have.
// The one thing lanes still hold is P, so keys are again taken in the order that leaves scores where P is needed. As no
// lane loads runs of V, a step multiplies 32 neighbouring tokens: here, and only here, the logical groups are right.
//
// What is left to issue sets the time, so there is little of it. The logarithm of a token's V scale is added to its score:
// the exponential of that is the weight P sV itself, its largest is known before any power of 2 is taken, and taken
// relative to it the powers are the codes but for rounding, which two share an instruction for. The sum of P counts them
// by the inverse of the scale.
//
// Products run beside it: the scores of the next tile under this one's softmax and, where registers allow, P V while the
// next tile's weights are made of them. None is under way where the loop turns, for the compiler lets none be. Warps of one
// more warpgroup do nothing but copy tiles, some ahead, and show them to the tensor cores, so that the others meet at no
// barrier: they drift apart, and one multiplies while another takes powers of 2.
//
//   GROUPS   warpgroups of a block that attend, 64 rows each
//   TILE     tokens of a tile
//   STAGES   tiles in shared memory
#include "wgmma.h"
#include "prefill.h"

#if GPU_HAS_WGMMA

constexpr int kTokens = TILE;
static_assert(kPv == INT8 || kPv == UINT8, "weights are INT8 or UINT8");
static_assert(HEAD_DIM % 64 == 0 && kScaleTokens <= kTokens && !COMMON_SCALE && !LOGICAL_GROUPS && READ == 16);

constexpr int kThreads = 128 * (GROUPS + 1);
constexpr int kGroupRows = 64;
constexpr int kWidth = HEAD_DIM < 128 ? HEAD_DIM : 128;  // bytes of a row of Q or K that lie side by side
constexpr int kParts = HEAD_DIM / kWidth;
constexpr int kStep = 32;                                // tokens or d of one instruction
constexpr int kSteps = kTokens / kStep;
constexpr int kUnits = kTokens / kUnit;
constexpr int kScales = kTokens / kScaleTokens;
constexpr int kCopyThreads = 64;                         // a warp each for K and for V, whose copies land

// Registers of a thread. A block has what it is launched with, 65536 / kThreads each, rounded down to a multiple of 8: what
// the threads that attend take, those that copy must have given.
constexpr bool kTwo = GROUPS == 2 && HEAD_DIM < 256;
constexpr int kAttendRegisters = GROUPS == 1 ? 240 : GROUPS == 3 ? 152 : kTwo ? 232 : 224, kCopyRegisters = kTwo ? 40 : 56;
// What they allow, `kFree` being those left by the output, a tile's weights, the next one's sums and what else there is:
// the scores of the next tile run under this one's softmax, its weights are made under P V, and Q is held in registers, so
// that its products read nothing but K from shared memory.
constexpr int kFree = kAttendRegisters - (HEAD_DIM / 2 + kTokens + 24);
constexpr bool kAhead = kFree >= 0, kUnder = kFree >= 32, kHoldsQueries = kFree >= 48 + HEAD_DIM / 8;
constexpr int kWide = kUnder ? 64 : 32;                          // columns of V of a product
constexpr int kInFlight = kUnder && kFree < 64 ? 1 : 2;           // products at once

// d [64 x 32] = A B, or += A B where `add`, with A in registers, s8 or u8, and 32 k.
#define WGMMA_32_COLUMNS(name, types)                                                                                 \
  __device__ __forceinline__ void name(int d[16], const uint32_t a[4], uint64_t b, bool add) {                        \
    asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %21, 0;\n"                                                         \
                 "wgmma.mma_async.sync.aligned.m64n32k32.s32." types " {%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, "     \
                 "%10, %11, %12, %13, %14, %15}, {%16, %17, %18, %19}, %20, p;\n}"                                    \
                 : "+r"(d[0]), "+r"(d[1]), "+r"(d[2]), "+r"(d[3]), "+r"(d[4]), "+r"(d[5]), "+r"(d[6]), "+r"(d[7]),    \
                   "+r"(d[8]), "+r"(d[9]), "+r"(d[10]), "+r"(d[11]), "+r"(d[12]), "+r"(d[13]), "+r"(d[14]),           \
                   "+r"(d[15])                                                                                        \
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"((int)add));                                \
  }
WGMMA_32_COLUMNS(wgmma_m64n32k32_s8_registers, "s8.s8")
WGMMA_32_COLUMNS(wgmma_m64n32k32_u8s8_registers, "u8.s8")
#undef WGMMA_32_COLUMNS

__device__ __forceinline__ void multiply_weights(int *d, const uint32_t a[4], uint64_t b, bool add) {
  if constexpr (kWide == 32 && kPv == UINT8) wgmma_m64n32k32_u8s8_registers(d, a, b, add);
  else if constexpr (kWide == 32) wgmma_m64n32k32_s8_registers(d, a, b, add);
  else if constexpr (kPv == UINT8) wgmma_m64n64k32_u8s8_registers(d, a, b, add);
  else wgmma_m64n64k32_s8_registers(d, a, b, add);
}

struct alignas(16) Quad {
  float x[4];
  __device__ __forceinline__ float operator[](int i) const { return x[i]; }
};
__device__ __forceinline__ Quad read_quad(const float *from) { return *reinterpret_cast<const Quad *>(from); }

// Four numbers to the nearest integers of 8 bits, two an instruction.
__device__ __forceinline__ uint32_t rounded_bytes(const float x[4]) {
  uint32_t bytes = 0;
  unrolled<2>([&](auto i) {
    const int low = __float2int_rn(x[2 - 2 * i.value]), high = __float2int_rn(x[3 - 2 * i.value]);
    if constexpr (kPv == INT8) asm("cvt.pack.sat.s8.s32.b32 %0, %1, %2, %0;" : "+r"(bytes) : "r"(high), "r"(low));
    else asm("cvt.pack.sat.u8.s32.b32 %0, %1, %2, %0;" : "+r"(bytes) : "r"(high), "r"(low));
  });
  return bytes;
}
__device__ __forceinline__ uint32_t low_bytes(const uint32_t x[4]) {
  return __byte_perm(__byte_perm(x[0], x[1], 0x40), __byte_perm(x[2], x[3], 0x40), 0x5410);
}

constexpr float kFar = 8.f;             // weights may pass 1 by 2^kFar
constexpr float kSmallest = 0x1p-100f;  // that a scale of V is taken for: its logarithm and inverse are finite
constexpr float kLogLargest = kPv == INT8 ? 6.988684687f : 7.994353437f;

struct Stage {
  alignas(1024) uint8_t k[kParts][kTokens][kWidth];
  alignas(1024) uint8_t v[HEAD_DIM][kTokens];
  alignas(16) float k_scale[kTokens], v_log[kTokens], v_inverse[kTokens];
};
struct Shared {
  Stage stages[STAGES];
  alignas(1024) uint8_t q[GROUPS][kParts][kGroupRows][kWidth];
  int seen[GROUPS][kGroupRows];
  PhaseBarrier landed[STAGES], full[STAGES], empty[STAGES];
};
// Which stage holds a tile, and the parity of its barriers' phase.
struct Turn {
  int stage = 0, parity = 0;
  __device__ __forceinline__ Turn next() const {
    const bool wraps = stage + 1 == STAGES;
    return {wraps ? 0 : stage + 1, parity ^ int(wraps)};
  }
};

// A lane's scores of a row are of the tokens 32 s + 16 h + 4 t + b, t = lane % 4: those at which P's fragment of step
// s has bytes. In column 8 j + 2 t + c of the sums lies c + 2 j then, with s and h above: the row of K that gives it.
__device__ __forceinline__ int row_of_key(int token) {
  const int b = token % 4, t = token / 4 % 4, h = token / 16 % 2, s = token / 32;
  return 8 * (b / 2 + 2 * h + 4 * s) + 2 * t + b % 2;
}

extern "C" __global__ void __launch_bounds__(kThreads, 1)
prefill(const float *__restrict__ q, const int8_t *__restrict__ k_codes, const float *__restrict__ k_scales,
        const char *__restrict__ v_pages, const float *__restrict__ v_scales, const int *__restrict__ block_tables,
        const int *__restrict__ lengths, const int *__restrict__ offsets, float *__restrict__ out,
        float2 *__restrict__ stats, int queries, int group, int kv_heads, int splits, int block_size, int max_blocks,
        float softmax_scale) {
  GPU_DYNAMIC_SHARED(char, unaligned);
  const unsigned misaligned = __cvta_generic_to_shared(unaligned) % 1024;
  Shared &shared = *reinterpret_cast<Shared *>(unaligned + (1024 - misaligned) % 1024);
  // The warpgroup's number by way of an instruction whose result the compiler knows to be the same in all lanes.
  const int lane = threadIdx.x, wave = threadIdx.y, thread = wave * 32 + lane;
  const int warpgroup = __reduce_or_sync(GPU_FULL_MASK, wave / 4);
  const PrefillBlock block = prefill_block(GROUPS * kGroupRows, kTokens, queries, group, kv_heads, splits, lengths, offsets);
  const QueryRows &rows = block.rows;
  const int first_tile = block.first_tile, end_tile = block.end_tile, wave_row = block.first_row + wave * 16;
  const int *block_table = block_tables + (size_t)rows.batch * max_blocks;

  if (thread < STAGES) {
    shared.landed[thread].init(kCopyThreads);
    shared.full[thread].init(1 + 32);  // who shows that copies have landed, and the scales' warp
    shared.empty[thread].init(128 * GROUPS);
  }
  __syncthreads();
  if (warpgroup == GROUPS) {
    if constexpr (GROUPS > 1) give_registers<kCopyRegisters>();
    if (wave == 4 * GROUPS + 3) {  // what has landed becomes visible to the warpgroups' instructions
      Turn turn;
      for (int tile = first_tile; tile < end_tile; ++tile, turn = turn.next()) {
        shared.landed[turn.stage].wait(turn.parity);
        wgmma_publish();
        if (lane == 0) shared.full[turn.stage].arrive();
      }
      return;
    }
    // Lane l knows where unit l % kUnits of a tile begins, one tile ahead, below 0 where it is not: in the arrays
    // [block][kv_head][token], in units, and in V's pages. Only the first is divided for.
    struct Unit { int number; long long value; };
    const auto each_tile = [&](auto fill) {
      int token = first_tile * kTokens + lane % kUnits * kUnit, entry = token / block_size, offset = token % block_size;
      const auto find = [&]() -> Unit {
        const int page = entry < max_blocks ? block_table[entry] : 0, row = page * kv_heads + rows.head;
        const bool there = token < rows.length;
        const Unit found = {there ? row * (block_size / kUnit) + offset / kUnit : -1,
                            there ? (long long)row * block_size * HEAD_DIM + offset : -1};
        token += kTokens, offset += kTokens;
        while (offset >= block_size) offset -= block_size, ++entry;
        return found;
      };
      Unit mine = find();
      Turn turn;
      for (int tile = first_tile; tile < end_tile; ++tile, turn = turn.next()) {
        const Unit next = find();
        if (tile >= first_tile + STAGES) shared.empty[turn.stage].wait(turn.parity ^ 1);
        fill(turn.stage, mine);
        mine = next;
      }
    };
    // What a lane copies lies at a fixed place of the tile plus, or for swizzled bits xor, what the round adds.
    if (wave == 4 * GROUPS) {
      constexpr int kChunks = HEAD_DIM / 16, kRoundTokens = 32 / kChunks;
      const int token = lane / kChunks, byte = lane % kChunks * 16, row = row_of_key(token);
      const int to = byte / kWidth * kTokens * kWidth + row * kWidth + swizzled<kWidth>(row, byte % kWidth);
      const int8_t *from = k_codes + token * HEAD_DIM + byte;
      each_tile([&](int number, const Unit &mine) {
        Stage &stage = shared.stages[number];
        unrolled<kUnits>([&](auto unit) {
          const int from_number = __shfl_sync(GPU_FULL_MASK, mine.number, unit.value);
          const int8_t *from_unit = from + (long long)from_number * (kUnit * HEAD_DIM);
          unrolled<kUnit / kRoundTokens>([&](auto round) {
            constexpr int first = decltype(round)::value * kRoundTokens;
            const int row = row_of_key(unit.value * kUnit + first);
            copy_async(&stage.k[0][0][0] + (to ^ (row * kWidth + swizzled<kWidth>(row, 0))),
                       from_unit + first * HEAD_DIM, from_number >= 0);
          });
        });
        shared.landed[number].arrive_after_copies();
      });
    } else if (wave == 4 * GROUPS + 1) {
      constexpr int kRoundColumns = 32 / kUnits;
      const int column = lane / kUnits;
      const int to = column * kTokens + swizzled<kTokens>(column, lane % kUnits * 16);
      const char *from = v_pages + (size_t)column * block_size;
      const size_t round_bytes = (size_t)kRoundColumns * block_size;
      each_tile([&](int number, const Unit &mine) {
        Stage &stage = shared.stages[number];
        const char *column_from = from + mine.value;
        unrolled<HEAD_DIM / kRoundColumns>([&](auto round) {
          constexpr int first = decltype(round)::value * kRoundColumns;
          copy_async(&stage.v[first][0] + (to ^ swizzled<kTokens>(first, 0)), column_from, mine.value >= 0);
          column_from += round_bytes;
        });
        shared.landed[number].arrive_after_copies();
      });
    } else {
      each_tile([&](int number, const Unit &mine) {
        Stage &stage = shared.stages[number];
        unrolled<kTokens / 32>([&](auto i) {
          const int token = i.value * 32 + lane;
          const int from_number = __shfl_sync(GPU_FULL_MASK, mine.number, token / kUnit);
          const long long place = (long long)from_number * kUnit + token % kUnit;
          const float k = from_number < 0 ? 0.f : k_scales[place], v = from_number < 0 ? 0.f : v_scales[place];
          // fmaxf also takes the place of what is no number, in pages beyond the sequence.
          const float at_least = fmaxf(v, kSmallest);
          stage.k_scale[token] = k;
          stage.v_log[token] = __log2f(at_least);
          stage.v_inverse[token] = fast_reciprocal(at_least);
        });
        shared.full[number].arrive();
      });
    }
    return;
  }
  if constexpr (GROUPS > 1) take_registers<kAttendRegisters>();

  // Q: each wave its 16 rows, 8 at once, 4 neighbouring d a lane. A lane keeps the scales of rows g and g + 8.
  float q_scale[2];
#pragma unroll
  for (int v = 0; v < 2; ++v) {
    constexpr int kAtOnce = 8, kReads = (HEAD_DIM + 127) / 128;
    float4 values[kAtOnce][kReads];
    const auto each_read = [&](auto f) {
      unrolled<kReads>([&](auto i) {
        if (HEAD_DIM % 128 == 0 || lane < HEAD_DIM / 4) f(i, (i.value * 32 + lane) * 4);
      });
    };
    unrolled<kAtOnce>([&](auto r) {
      const int row = wave_row + v * kAtOnce + r.value;
      each_read([&](auto i, int d) {
        values[r.value][i.value] = row < rows.count() ? *reinterpret_cast<const float4 *>(q + rows.place(row) * HEAD_DIM + d)
                                                      : make_float4(0.f, 0.f, 0.f, 0.f);
      });
    });
    unrolled<kAtOnce>([&](auto r) {
      float top = 0.f;
      each_read([&](auto i, int) {
        const float4 x = values[r.value][i.value];
        top = fmaxf(top, fmaxf(fmaxf(fabsf(x.x), fabsf(x.y)), fmaxf(fabsf(x.z), fabsf(x.w))));
      });
      const QueryScale scale = query_scale(over_wave(top, larger));
      if (lane / 4 == r.value) q_scale[v] = scale.scale * softmax_scale;
      const int row = wave % 4 * 16 + v * kAtOnce + r.value;
      each_read([&](auto i, int d) {
        const float4 x = values[r.value][i.value];
        const uint32_t codes[4] = {scale.bits(x.x), scale.bits(x.y), scale.bits(x.z), scale.bits(x.w)};
        *reinterpret_cast<uint32_t *>(&shared.q[warpgroup][d / kWidth][row][swizzled<kWidth>(row, d % kWidth)]) =
            low_bytes(codes);
      });
    });
    if (lane < kAtOnce) {
      const int row = wave_row + v * kAtOnce + lane;
      shared.seen[warpgroup][wave % 4 * 16 + v * kAtOnce + lane] = row < rows.count() ? rows.seen(row) : 0;
    }
  }
  wgmma_publish();
  warpgroup_barrier(1 + warpgroup);

  float output[HEAD_DIM / kWide][kWide / 2] = {}, top[2] = {kNone, kNone}, total[2] = {};
  const int t4 = lane % 4 * 4;
  const auto over_row = [&](float x, auto f) {
    x = f(x, __shfl_xor_sync(GPU_FULL_MASK, x, 1));
    return f(x, __shfl_xor_sync(GPU_FULL_MASK, x, 2));
  };

  const uint32_t q_address = wgmma_address(shared.q[0]) + warpgroup * (int(sizeof(shared.q[0])) / 16);
  uint32_t queries_held[kHoldsQueries ? HEAD_DIM / kStep : 1][4];
  if constexpr (kHoldsQueries)
    unrolled<HEAD_DIM / kStep>([&](auto step) {
      unrolled<4>([&](auto i) {
        const int row = wave % 4 * 16 + lane / 4 + i.value % 2 * 8, byte = step.value * kStep + i.value / 2 * 16 + t4;
        queries_held[step.value][i.value] = *reinterpret_cast<const uint32_t *>(
            &shared.q[warpgroup][byte / kWidth][row][swizzled<kWidth>(row, byte % kWidth)]);
      });
    });

  int sums[kTokens / 2];  // of Q K
  const auto start_scores = [&](Turn turn) {
    shared.full[turn.stage].wait(turn.parity);
    const uint32_t k_address = wgmma_address(shared.stages[0].k) + turn.stage * (int(sizeof(Stage)) / 16);
    wgmma_begin();
    unrolled<HEAD_DIM / kStep>([&](auto step) {
      constexpr int part = decltype(step)::value * kStep / kWidth, byte = decltype(step)::value * kStep % kWidth;
      constexpr int of_q = part * kGroupRows * kWidth + byte, of_k = part * kTokens * kWidth + byte;
      if constexpr (kHoldsQueries)
        unrolled<kTokens / 64>([&](auto i) {
          wgmma_m64n64k32_s8_registers(sums + 32 * i.value, queries_held[step.value],
                                       wgmma_matrix<kWidth>(k_address, of_k + i.value * 64 * kWidth), step.value > 0);
        });
      else if constexpr (kTokens == 64)
        wgmma_m64n64k32_s8(sums, wgmma_matrix<kWidth>(q_address, of_q), wgmma_matrix<kWidth>(k_address, of_k),
                           step.value > 0);
      else
        wgmma_m64n128k32_s8(sums, wgmma_matrix<kWidth>(q_address, of_q), wgmma_matrix<kWidth>(k_address, of_k),
                            step.value > 0);
    });
    wgmma_commit();
  };

  // z = score + log2 sV of row v, by step s and place 4 h + b in the fragment.
  float weight[2][kSteps][8];
  constexpr int kPieces = 2 * kSteps;  // of the weights: s and h
  const auto weigh = [&](auto piece, Turn turn) {
    constexpr int s = decltype(piece)::value / 2, h = decltype(piece)::value % 2;
    const Stage &stage = shared.stages[turn.stage];
    const int token = s * 32 + h * 16 + t4;
    const Quad k = read_quad(stage.k_scale + token), v_log = read_quad(stage.v_log + token);
    unrolled<4>([&](auto b) {
      unrolled<2>([&](auto v) {
        constexpr int j = decltype(b)::value / 2 + 2 * h + 4 * s;
        weight[v.value][s][4 * h + b.value] =
            fmaf(float(sums[4 * j + 2 * v.value + b.value % 2]) * k[b.value], q_scale[v.value], v_log[b.value]);
      });
    });
  };
  const auto each_weight = [&](auto f) {
    unrolled<kSteps>([&](auto s) {
      unrolled<2>([&](auto h) { f(s, h, s.value * 32 + h.value * 16 + t4); });
    });
  };

  // Products of P V: by columns and by scales.
  constexpr int kProducts = kScales * HEAD_DIM / kWide, kScaleSteps = kSteps / kScales;
  constexpr int kAtOnce = kInFlight < kProducts ? kInFlight : kProducts;
  int products[kAtOnce][kWide / 2];
  uint32_t fragment[kSteps][4];
  float w_scale[kScales][2];
  const auto start_product = [&](auto n, uint32_t v_address) {
    constexpr int part = decltype(n)::value / kScales, scale = decltype(n)::value % kScales;
    wgmma_begin();
    unrolled<kScaleSteps>([&](auto i) {
      constexpr int step = scale * kScaleSteps + decltype(i)::value;
      multiply_weights(products[n.value % kAtOnce], fragment[step],
                       wgmma_matrix<kTokens>(v_address, part * kWide * kTokens + step * kStep), i.value > 0);
    });
    wgmma_commit();
  };
  const auto add_product = [&](auto n) {
    constexpr int part = decltype(n)::value / kScales, scale = decltype(n)::value % kScales;
    wgmma_arrived(products[n.value % kAtOnce]);
    unrolled<kWide / 2>([&](auto i) {
      output[part][i.value] =
          fmaf(float(products[n.value % kAtOnce][i.value]), w_scale[scale][i.value / 2 % 2], output[part][i.value]);
    });
  };
  const int whole_tiles = min(end_tile, block.least_seen / kTokens);

  // One tile, of which the scores are there, or (kUnder) the weights: to its share of the output, and as much of the next
  // one's meanwhile.
  const auto attend = [&](int tile, Turn turn, Turn next) {
    const Stage &stage = shared.stages[turn.stage];
    if constexpr (!kUnder) unrolled<kPieces>([&](auto piece) { weigh(piece, turn); });
    if constexpr (kAhead) start_scores(next);
    if (tile >= whole_tiles)
      unrolled<2>([&](auto v) {
        const int seen = shared.seen[warpgroup][wave % 4 * 16 + lane / 4 + v.value * 8] - tile * kTokens;
        each_weight([&](auto s, auto h, int token) {
          unrolled<4>([&](auto b) {
            float &z = weight[v.value][s.value][4 * h.value + b.value];
            if (token + b.value >= seen) z = kNone;
          });
        });
      });

    // Of every scale its largest weight, which becomes the largest code. `top`, relative to which the sums are, moves only
    // where they would become large: mostly it stays, and they need not be multiplied.
    float shift[kScales][2];
    bool moves = false;
    float rescale[2];
    unrolled<2>([&](auto v) {
      float largest, peak[kScales];
      unrolled<kSteps>([&](auto s) {
        constexpr int scale = decltype(s)::value * kScales / kSteps;
        float own[2];
        unrolled<2>([&](auto h) {
          const float *z = &weight[v.value][s.value][4 * h.value];
          own[h.value] = fmaxf(fmaxf(z[0], z[1]), fmaxf(z[2], z[3]));
        });
        const float both = fmaxf(own[0], own[1]);
        if constexpr (s.value * kScales % kSteps == 0) peak[scale] = both;
        else peak[scale] = fmaxf(peak[scale], both);
      });
      unrolled<kScales>([&](auto s) {
        peak[s.value] = over_row(peak[s.value], larger);
        shift[s.value][v.value] = kLogLargest - or_zero(peak[s.value]);
        if constexpr (s.value == 0) largest = peak[0];
        else largest = fmaxf(largest, peak[s.value]);
      });
      const float moved = largest > top[v.value] + kFar ? largest : top[v.value];
      rescale[v.value] = fast_exp2(top[v.value] - moved);
      moves = moves || moved != top[v.value];
      top[v.value] = moved;
      unrolled<kScales>([&](auto s) {
        w_scale[s.value][v.value] = fast_exp2(peak[s.value] - moved) * (1.f / kLargest);
      });
    });
    if (__any_sync(GPU_FULL_MASK, moves)) {
      unrolled<2>([&](auto v) { total[v.value] *= rescale[v.value]; });
      unrolled<HEAD_DIM / kWide>([&](auto part) {
        unrolled<kWide / 2>([&](auto i) { output[part.value][i.value] *= rescale[i.value / 2 % 2]; });
      });
    }

    // P's fragments: register 2 h + v of a step holds the bytes of row v at 4 h.
    float sums_of_p[kScales][2] = {};
    each_weight([&](auto s, auto h, int token) {
      constexpr int scale = decltype(s)::value * kScales / kSteps;
      const Quad inverse = read_quad(stage.v_inverse + token);
      unrolled<2>([&](auto v) {
        float w[4];
        unrolled<4>([&](auto b) {
          w[b.value] = fast_exp2(weight[v.value][s.value][4 * h.value + b.value] + shift[scale][v.value]);
          sums_of_p[scale][v.value] = fmaf(w[b.value], inverse[b.value], sums_of_p[scale][v.value]);
        });
        fragment[s.value][2 * h.value + v.value] = rounded_bytes(w);
      });
    });
    unrolled<2>([&](auto v) {
      unrolled<kScales>([&](auto s) {
        total[v.value] = fmaf(sums_of_p[s.value][v.value], w_scale[s.value][v.value], total[v.value]);
      });
    });

    const uint32_t v_address = wgmma_address(shared.stages[0].v) + turn.stage * (int(sizeof(Stage)) / 16);
    unrolled<kAtOnce>([&](auto n) { start_product(n, v_address); });
    if constexpr (kUnder) {
      wgmma_wait<kAtOnce>();
      wgmma_arrived(sums);
    }
    unrolled<kProducts>([&](auto n) {
      constexpr int i = decltype(n)::value, left = kProducts - 1 - i;
      if constexpr (kUnder)
        unrolled<(i + 1) * kPieces / kProducts - i * kPieces / kProducts>(
            [&](auto p) { weigh(Index<i * kPieces / kProducts + decltype(p)::value>{}, next); });
      wgmma_wait<left < kAtOnce - 1 ? left : kAtOnce - 1>();
      add_product(n);
      if constexpr (left >= kAtOnce) start_product(Index<i + kAtOnce>{}, v_address);
    });
    shared.empty[turn.stage].arrive();  // all lanes: each has read scales
    if constexpr (kAhead && !kUnder) wgmma_arrived(sums);
  };
  const auto finish_scores = [&](Turn turn) {
    start_scores(turn);
    wgmma_wait<0>();
    wgmma_arrived(sums);
  };
  Turn turn;
  if (kAhead && first_tile < end_tile) {
    finish_scores(turn);
    if constexpr (kUnder) unrolled<kPieces>([&](auto piece) { weigh(piece, turn); });
  }
#pragma unroll 1
  for (int tile = first_tile; tile < end_tile; ++tile) {
    if constexpr (!kAhead) finish_scores(turn);
    // Behind the last tile it once more, rather than a branch that would copy the registers of the result.
    const Turn next = tile + 1 < end_tile ? turn.next() : turn;
    attend(tile, turn, next);
    turn = next;
  }

  unrolled<2>([&](auto v) {
    const int row = wave_row + lane / 4 + 8 * v.value;
    total[v.value] = over_row(total[v.value], sum);
    if (row >= rows.count()) return;
    const unsigned quad = 0xfu << (lane & ~3);  // its 4 lanes have the same row
    const size_t part = rows.place(row) * splits + block.split;
    if (stats && lane % 4 == 0)
      stats[part] = make_float2(top[v.value], total[v.value]);
    const float factor = total[v.value] > 0.f ? 1.f / total[v.value] : 0.f;
    // A lane has 2 columns of every 8; of two times 8 it takes 4 of one and gives its neighbour those of the other.
    const bool odd = lane % 2;
    float *to = out + part * HEAD_DIM + odd * 8 + lane % 4 / 2 * 4;
    unrolled<HEAD_DIM / kWide>([&](auto part) {
      unrolled<kWide / 16>([&](auto j) {
        constexpr int low = 8 * decltype(j)::value + 2 * decltype(v)::value, high = low + 4;
        const auto &o = output[part.value];
        const float2 own = make_float2((odd ? o[high] : o[low]) * factor, (odd ? o[high + 1] : o[low + 1]) * factor);
        const float2 given = make_float2((odd ? o[low] : o[high]) * factor, (odd ? o[low + 1] : o[high + 1]) * factor);
        const float2 other = make_float2(__shfl_xor_sync(quad, given.x, 1), __shfl_xor_sync(quad, given.y, 1));
        *reinterpret_cast<float4 *>(to + part.value * kWide + j.value * 16) =
            odd ? make_float4(other.x, other.y, own.x, own.y) : make_float4(own.x, own.y, other.x, other.y);
      });
    });
  });
}

#endif
