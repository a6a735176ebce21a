// 6. Prefill on Hopper's warpgroup instructions: the tensor cores read K and V themselves.
//
// 64 rows at a time are multiplied by tiles that stay in shared memory: no lane loads K or V, and nothing but softmax
// and quantization is left to issue. V's layout, with tokens along bytes, is the only one that 8-bit operands may have.
// The one thing lanes still hold is P, so keys are again taken in the order that leaves scores where P is needed. As no
// lane loads runs of V, a step multiplies 32 neighbouring tokens: here, and only here, the logical groups are right.
//
// What is left to issue sets the time, so there is little of it. The logarithm of a token's V scale is added to its score:
// the exponential of that is the weight P sV itself, its largest is known before any power of 2 is taken, and taken
// relative to it the powers are the codes but for rounding. The sum of P counts them by the inverse of the scale.
//
// Warps of one more warpgroup do nothing but copy tiles, some ahead, so that the others meet at no barrier: they drift apart,
// and one multiplies while another takes powers of 2.
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
constexpr int kHalves = HEAD_DIM / 64;                   // of 64 columns of V
constexpr int kStep = 32;                                // tokens or d of one instruction
constexpr int kSteps = kTokens / kStep;
constexpr int kUnits = kTokens / kUnit;
constexpr int kScales = kTokens / kScaleTokens;
constexpr bool kAhead = HEAD_DIM == 128;                 // scores of the next tile run under softmax: where registers
constexpr int kInFlight = kAhead ? 1 : 2;                // allow, at the price of one product of P V at a time
constexpr int kCopyThreads = 96;                         // a warp each for K, for V and for scales

// Registers of a thread. A block has what it is launched with, 65536 / kThreads each, rounded down to a multiple of 8: what
// the threads that attend take, those that copy must have given.
constexpr int kAttendRegisters = GROUPS == 3 ? 160 : 224, kCopyRegisters = GROUPS == 3 ? 32 : 56;

__device__ __forceinline__ void wgmma_scores(int (&sums)[kTokens / 2], uint64_t q, uint64_t k, bool add) {
  if constexpr (kTokens == 64) wgmma_m64n64k32_s8(sums, q, k, add);
  else wgmma_m64n128k32_s8(sums, q, k, add);
}

struct alignas(16) Quad {
  float x[4];
  __device__ __forceinline__ float operator[](int i) const { return x[i]; }
};
__device__ __forceinline__ Quad read_quad(const float *from) { return *reinterpret_cast<const Quad *>(from); }

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
  PhaseBarrier full[STAGES], empty[STAGES];
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
  const int lane = threadIdx.x, wave = threadIdx.y, thread = wave * 32 + lane, warpgroup = wave / 4;
  const PrefillBlock block = prefill_block(GROUPS * kGroupRows, kTokens, queries, group, kv_heads, splits, lengths, offsets);
  const QueryRows &rows = block.rows;
  const int first_tile = block.first_tile, end_tile = block.end_tile, wave_row = block.first_row + wave * 16;
  const int *block_table = block_tables + (size_t)rows.batch * max_blocks;

  if (thread < STAGES) shared.full[thread].init(kCopyThreads), shared.empty[thread].init(4 * GROUPS);
  __syncthreads();
  if (warpgroup == GROUPS) {
    if constexpr (GROUPS > 1) give_registers<kCopyRegisters>();
    if (wave >= 4 * GROUPS + 3) return;
    // Lane l knows where unit l % kUnits of a tile lies, one tile ahead.
    const auto find = [&](int tile) {
      const int token = tile * kTokens + lane % kUnits * kUnit;
      return find_places(block_table, max_blocks, token, tile < end_tile ? rows.length : 0, block_size, kv_heads,
                         rows.head);
    };
    const auto each_tile = [&](auto fill) {
      Places mine = find(first_tile);
      for (int tile = first_tile; tile < end_tile; ++tile) {
        const int n = tile - first_tile;
        const Places next = find(tile + 1);
        if (n >= STAGES) shared.empty[n % STAGES].wait(n / STAGES - 1 & 1);
        fill(shared.stages[n % STAGES], shared.full[n % STAGES], mine);
        mine = next;
      }
    };
    // What a lane copies lies at a fixed place of the tile plus, or for swizzled bits xor, what the round adds.
    if (wave == 4 * GROUPS) {
      constexpr int kChunks = HEAD_DIM / 16, kRoundTokens = 32 / kChunks;
      const int token = lane / kChunks, byte = lane % kChunks * 16, row = row_of_key(token);
      const int to = byte / kWidth * kTokens * kWidth + row * kWidth + swizzled<kWidth>(row, byte % kWidth);
      const int8_t *from = k_codes + token * HEAD_DIM + byte;
      each_tile([&](Stage &stage, PhaseBarrier &full, const Places &mine) {
        unrolled<kUnits>([&](auto unit) {
          const long long place = __shfl_sync(GPU_FULL_MASK, mine.token, unit.value);
          const int8_t *from_unit = from + place * HEAD_DIM;
          unrolled<kUnit / kRoundTokens>([&](auto round) {
            constexpr int first = decltype(round)::value * kRoundTokens;
            const int row = row_of_key(unit.value * kUnit + first);
            copy_async(&stage.k[0][0][0] + (to ^ (row * kWidth + swizzled<kWidth>(row, 0))),
                       from_unit + first * HEAD_DIM, place >= 0);
          });
        });
        full.arrive_after_copies();
      });
    } else if (wave == 4 * GROUPS + 1) {
      constexpr int kRoundColumns = 32 / kUnits;
      const int column = lane / kUnits;
      const int to = column * kTokens + swizzled<kTokens>(column, lane % kUnits * 16);
      const char *from = v_pages + (size_t)column * block_size;
      const size_t round_bytes = (size_t)kRoundColumns * block_size;
      each_tile([&](Stage &stage, PhaseBarrier &full, const Places &mine) {
        const char *column_from = from + mine.value;
        unrolled<HEAD_DIM / kRoundColumns>([&](auto round) {
          constexpr int first = decltype(round)::value * kRoundColumns;
          copy_async(&stage.v[first][0] + (to ^ swizzled<kTokens>(first, 0)), column_from, mine.value >= 0);
          column_from += round_bytes;
        });
        full.arrive_after_copies();
      });
    } else {
      each_tile([&](Stage &stage, PhaseBarrier &full, const Places &mine) {
        constexpr int kQuads = kTokens / 4;
        const int token = lane % kQuads * 4;
        const long long place = __shfl_sync(GPU_FULL_MASK, mine.token, token / kUnit);
        const float4 none = make_float4(0.f, 0.f, 0.f, 0.f);
        const auto read = [&](const float *scales) {
          return place < 0 ? none : *reinterpret_cast<const float4 *>(scales + place + token % kUnit);
        };
        const float4 k = read(k_scales), v = read(v_scales);
        // fmaxf also takes the place of what is no number, in pages beyond the sequence.
        const float values[4] = {fmaxf(v.x, kSmallest), fmaxf(v.y, kSmallest), fmaxf(v.z, kSmallest),
                                 fmaxf(v.w, kSmallest)};
        const auto write = [&](float *to, auto f) {
          *reinterpret_cast<float4 *>(to + token) = make_float4(f(values[0]), f(values[1]), f(values[2]), f(values[3]));
        };
        *reinterpret_cast<float4 *>(stage.k_scale + token) = k;
        write(stage.v_log, [](float x) { return __log2f(x); });
        write(stage.v_inverse, [](float x) { return fast_reciprocal(x); });
        full.arrive();
      });
    }
    return;
  }
  if constexpr (GROUPS > 1) take_registers<kAttendRegisters>();

  // Q: each wave its 16 rows, 8 at once, 4 neighbouring d a lane. A lane keeps the scales of rows g and g + 8.
  float q_scale[2];
  int seen[2];
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
    const int own = wave_row + v * kAtOnce + lane / 4;
    seen[v] = own < rows.count() ? rows.seen(own) : 0;
  }
  wgmma_publish();
  warpgroup_barrier(1 + warpgroup);

  float output[kHalves][32] = {}, top[2] = {kNone, kNone}, total[2] = {};
  const int t4 = lane % 4 * 4;
  const uint32_t q_address = wgmma_address(shared.q[warpgroup]);
  const auto over_row = [&](float x, auto f) {
    x = f(x, __shfl_xor_sync(GPU_FULL_MASK, x, 1));
    return f(x, __shfl_xor_sync(GPU_FULL_MASK, x, 2));
  };

  int sums[kTokens / 2];  // of Q K
  const auto start_scores = [&](int tile) {
    const int n = tile - first_tile;
    shared.full[n % STAGES].wait(n / STAGES & 1);
    wgmma_publish();
    const uint32_t k_address = wgmma_address(shared.stages[n % STAGES].k);
    wgmma_begin();
    unrolled<HEAD_DIM / kStep>([&](auto step) {
      constexpr int part = decltype(step)::value * kStep / kWidth, byte = decltype(step)::value * kStep % kWidth;
      wgmma_scores(sums, wgmma_matrix<kWidth>(q_address, part * kGroupRows * kWidth + byte),
                   wgmma_matrix<kWidth>(k_address, part * kTokens * kWidth + byte), step.value > 0);
    });
    wgmma_commit();
  };

  // Products of P V: by halves of the columns and by scales.
  constexpr int kProducts = kScales * kHalves, kScaleSteps = kSteps / kScales;
  int products[kInFlight][32];
  uint32_t fragment[kSteps][4];
  float w_scale[kScales][2];
  const auto start_product = [&](auto n, uint32_t v_address) {
    constexpr int half = decltype(n)::value / kScales, scale = decltype(n)::value % kScales;
    wgmma_begin();
    unrolled<kScaleSteps>([&](auto i) {
      constexpr int step = scale * kScaleSteps + decltype(i)::value;
      const uint64_t values = wgmma_matrix<kTokens>(v_address, half * 64 * kTokens + step * kStep);
      if constexpr (kPv == UINT8) wgmma_m64n64k32_u8s8_registers(products[n.value % kInFlight], fragment[step], values, i.value > 0);
      else wgmma_m64n64k32_s8_registers(products[n.value % kInFlight], fragment[step], values, i.value > 0);
    });
    wgmma_commit();
  };
  const auto add_product = [&](auto n) {
    constexpr int half = decltype(n)::value / kScales, scale = decltype(n)::value % kScales;
    wgmma_arrived(products[n.value % kInFlight]);
    unrolled<32>([&](auto i) {
      output[half][i.value] =
          fmaf(float(products[n.value % kInFlight][i.value]), w_scale[scale][i.value / 2 % 2], output[half][i.value]);
    });
  };
  const int whole_tiles = min(end_tile, block.least_seen / kTokens);

  const auto attend = [&](int tile) {
    const Stage &stage = shared.stages[(tile - first_tile) % STAGES];
    if constexpr (!kAhead) {
      start_scores(tile);
      wgmma_wait<0>();
    }
    wgmma_arrived(sums);

    // z = score + log2 sV of row v, by step s and place 4 h + b in the fragment.
    float weight[2][kSteps][8];
    const auto each_weight = [&](auto f) {
      unrolled<kSteps>([&](auto s) {
        unrolled<2>([&](auto h) { f(s, h, s.value * 32 + h.value * 16 + t4); });
      });
    };
    each_weight([&](auto s, auto h, int token) {
      const Quad k = read_quad(stage.k_scale + token), v_log = read_quad(stage.v_log + token);
      unrolled<4>([&](auto b) {
        unrolled<2>([&](auto v) {
          const int j = b.value / 2 + 2 * h.value + 4 * s.value;
          weight[v.value][s.value][4 * h.value + b.value] =
              fmaf(float(sums[4 * j + 2 * v.value + b.value % 2]) * k[b.value], q_scale[v.value], v_log[b.value]);
        });
      });
    });
    // Of the last tile once more, rather than a branch that would copy the registers of its result.
    if constexpr (kAhead) start_scores(min(tile + 1, end_tile - 1));
    if (tile >= whole_tiles)
      each_weight([&](auto s, auto h, int token) {
        unrolled<4>([&](auto b) {
          unrolled<2>([&](auto v) {
            float &z = weight[v.value][s.value][4 * h.value + b.value];
            if (tile * kTokens + token + b.value >= seen[v.value]) z = kNone;
          });
        });
      });

    // Of every scale its largest weight, which becomes the largest code. `top`, relative to which the sums are, moves only
    // where they would become large: mostly it stays, and they need not be multiplied.
    float shift[kScales][2];
    bool moves = false;
    float rescale[2];
    unrolled<2>([&](auto v) {
      float largest = kNone, peak[kScales];
      unrolled<kSteps>([&](auto s) {
        constexpr int scale = decltype(s)::value * kScales / kSteps;
        float own[2];
        unrolled<2>([&](auto h) {
          const float *z = &weight[v.value][s.value][4 * h.value];
          own[h.value] = fmaxf(fmaxf(z[0], z[1]), fmaxf(z[2], z[3]));
        });
        const float both = fmaxf(own[0], own[1]);
        peak[scale] = s.value * kScales % kSteps == 0 ? both : fmaxf(peak[scale], both);
      });
      unrolled<kScales>([&](auto s) {
        peak[s.value] = over_row(peak[s.value], larger);
        shift[s.value][v.value] = kLogLargest - or_zero(peak[s.value]);
        largest = fmaxf(largest, peak[s.value]);
      });
      const float next = largest > top[v.value] + kFar ? largest : top[v.value];
      rescale[v.value] = fast_exp2(top[v.value] - next);
      moves = moves || next != top[v.value];
      top[v.value] = next;
      unrolled<kScales>([&](auto s) {
        w_scale[s.value][v.value] = fast_exp2(peak[s.value] - next) * (1.f / kLargest);
      });
    });
    if (__any_sync(GPU_FULL_MASK, moves)) {
      unrolled<2>([&](auto v) { total[v.value] *= rescale[v.value]; });
      unrolled<kHalves>([&](auto half) {
        unrolled<32>([&](auto i) { output[half.value][i.value] *= rescale[i.value / 2 % 2]; });
      });
    }

    // P's fragments: register 2 h + v of a step holds the bytes of row v at 4 h.
    float sums_of_p[kScales][2] = {};
    each_weight([&](auto s, auto h, int token) {
      constexpr int scale = decltype(s)::value * kScales / kSteps;
      const Quad inverse = read_quad(stage.v_inverse + token);
      unrolled<2>([&](auto v) {
        uint32_t codes[4];
        unrolled<4>([&](auto b) {
          const float w = fast_exp2(weight[v.value][s.value][4 * h.value + b.value] + shift[scale][v.value]);
          sums_of_p[scale][v.value] = fmaf(w, inverse[b.value], sums_of_p[scale][v.value]);
          codes[b.value] = rounded_bits(w, 1.f);
        });
        fragment[s.value][2 * h.value + v.value] = low_bytes(codes);
      });
    });
    unrolled<2>([&](auto v) {
      unrolled<kScales>([&](auto s) {
        total[v.value] = fmaf(sums_of_p[s.value][v.value], w_scale[s.value][v.value], total[v.value]);
      });
    });

    const uint32_t v_address = wgmma_address(stage.v);
    unrolled<kInFlight - 1>([&](auto n) { start_product(n, v_address); });
    unrolled<kProducts>([&](auto n) {
      constexpr int next = decltype(n)::value + kInFlight - 1;
      if constexpr (next < kProducts) start_product(Index<next>{}, v_address);
      wgmma_wait<next < kProducts ? kInFlight - 1 : 0>();
      add_product(n);
    });
    if (lane == 0) shared.empty[(tile - first_tile) % STAGES].arrive();
  };
  if (kAhead && first_tile < end_tile) {
    start_scores(first_tile);
    wgmma_wait<0>();
  }
#pragma unroll 1
  for (int tile = first_tile; tile < end_tile; ++tile) attend(tile);

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
    unrolled<kHalves>([&](auto half) {
      unrolled<4>([&](auto j) {
        constexpr int low = 8 * decltype(j)::value + 2 * decltype(v)::value, high = low + 4;
        const auto &o = output[half.value];
        const float2 own = make_float2((odd ? o[high] : o[low]) * factor, (odd ? o[high + 1] : o[low + 1]) * factor);
        const float2 given = make_float2((odd ? o[low] : o[high]) * factor, (odd ? o[low + 1] : o[high + 1]) * factor);
        const float2 other = make_float2(__shfl_xor_sync(quad, given.x, 1), __shfl_xor_sync(quad, given.y, 1));
        *reinterpret_cast<float4 *>(to + half.value * 64 + j.value * 16) =
            odd ? make_float4(other.x, other.y, own.x, own.y) : make_float4(own.x, own.y, other.x, other.y);
      });
    });
  });
}

#endif
