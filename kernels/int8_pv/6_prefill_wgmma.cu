// 6. Prefill on Hopper's warpgroup instructions: the tensor cores read K and V themselves.
//
// 64 rows at a time are multiplied by tiles that stay in shared memory: no lane loads K or V, and nothing but softmax
// and quantization is left to issue. V's layout, with tokens along bytes, is the only one that 8-bit operands may have.
// The one thing lanes still hold is P, so keys are again taken in the order that leaves scores where P is needed. As no
// lane loads runs of V, a step multiplies 32 neighbouring tokens: here, and only here, the logical groups are right.
//
// One more warpgroup does nothing but copy tiles, some ahead, so that the others meet at no barrier: they drift apart, and
// one multiplies while another takes powers of 2. P V of 64 columns runs while the sums of the 64 before are scaled.
//
//   GROUPS   warpgroups of a block that attend, 64 rows each
//   STAGES   tiles in shared memory
#include "wgmma.h"
#include "prefill.h"

#if GPU_HAS_WGMMA

static_assert(kPv == INT8 || kPv == UINT8, "weights are INT8 or UINT8");
static_assert(HEAD_DIM % 64 == 0 && kScaleTokens <= kTile && !COMMON_SCALE && !LOGICAL_GROUPS && READ == 16);

constexpr int kThreads = 128 * (GROUPS + 1);
constexpr int kGroupRows = 64;
constexpr int kWidth = HEAD_DIM < 128 ? HEAD_DIM : 128;  // bytes of a row of Q or K that lie side by side
constexpr int kParts = HEAD_DIM / kWidth;
constexpr int kHalves = HEAD_DIM / 64;                   // of 64 columns of V
constexpr int kStep = 32;                                // tokens or d of one instruction
constexpr int kSteps = kTile / kStep;
constexpr int kScales = kTile / kScaleTokens;
constexpr int kInFlight = GROUPS == 3 && HEAD_DIM == 128 && kScales == 2 ? 1 : 2;  // products; where registers allow

// Registers of a thread. A block has what it is launched with, 65536 / kThreads each, rounded down to a multiple of 8: what
// the threads that attend take, those that copy must have given.
constexpr int kAttendRegisters = GROUPS == 3 ? 160 : 232, kCopyRegisters = GROUPS == 3 ? 32 : 40;

struct Stage {
  alignas(1024) uint8_t k[kParts][kTile][kWidth];
  alignas(1024) uint8_t v[HEAD_DIM][kTile];
  alignas(16) float k_scale[kTile], v_scale[kTile];
};
struct Shared {
  Stage stages[STAGES];
  alignas(1024) uint8_t q[GROUPS][kParts][kGroupRows][kWidth];
  alignas(16) int8_t codes[4 * GROUPS][HEAD_DIM];
  PhaseBarrier full[STAGES], empty[STAGES];
};

// A lane's 16 scores of a row are of the tokens 32 s + 16 h + 4 t + b, t = lane % 4: those at which P's fragment of step
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
  const PrefillBlock block = prefill_block(GROUPS * kGroupRows, queries, group, kv_heads, splits, lengths, offsets);
  const QueryRows &rows = block.rows;
  const int first_tile = block.first_tile, end_tile = block.end_tile, wave_row = block.first_row + wave * 16;
  const int *block_table = block_tables + (size_t)rows.batch * max_blocks;

  if (thread < STAGES) shared.full[thread].init(128), shared.empty[thread].init(4 * GROUPS);
  __syncthreads();
  if (warpgroup == GROUPS) {
    if constexpr (GROUPS > 1) give_registers<kCopyRegisters>();
    // A lane knows where unit lane % 4 of a tile lies, one tile ahead. What a thread copies lies at a fixed place of the
    // tile plus, or for swizzled bits xor, what the round adds.
    const auto find = [&](int tile) {
      const int token = tile * kTile + lane % 4 * kUnit;
      return find_places(block_table, max_blocks, token, tile < end_tile ? rows.length : 0, block_size, kv_heads,
                         rows.head);
    };
    constexpr int kChunks = HEAD_DIM / 16, kRoundTokens = 128 / kChunks, kRoundColumns = 128 / 4;
    const int copier = thread % 128, token = copier / kChunks, byte = copier % kChunks * 16, column = copier / 4;
    const int k_to = byte / kWidth * kTile * kWidth + row_of_key(token) * kWidth +
                     swizzled<kWidth>(row_of_key(token), byte % kWidth);
    const int v_to = column * kTile + swizzled<kTile>(column, copier % 4 * 16);
    const int8_t *k_from = k_codes + token % kUnit * HEAD_DIM + byte;
    const char *v_from = v_pages + (size_t)column * block_size;
    const float *scales_from = (lane < 16 ? k_scales : v_scales) + lane % 4 * 4;
    Places mine = find(first_tile);
    for (int tile = first_tile; tile < end_tile; ++tile) {
      const int n = tile - first_tile;
      Stage &stage = shared.stages[n % STAGES];
      const Places next = find(tile + 1);
      if (n >= STAGES) shared.empty[n % STAGES].wait(n / STAGES - 1 & 1);
      unrolled<kTile / kRoundTokens>([&](auto round) {
        const int first = round.value * kRoundTokens, row = row_of_key(first);
        const long long place = __shfl_sync(GPU_FULL_MASK, mine.token, token / kUnit + first / kUnit);
        copy_async(&stage.k[0][0][0] + (k_to ^ (row * kWidth + swizzled<kWidth>(row, 0))),
                   k_from + (place + first % kUnit) * HEAD_DIM, place >= 0);
      });
      unrolled<HEAD_DIM / kRoundColumns>([&](auto round) {
        copy_async(&stage.v[0][0] + v_to + round.value * kRoundColumns * kTile,
                   v_from + mine.value + (unsigned)(round.value * kRoundColumns * block_size), mine.value >= 0);
      });
      if (copier < 32) {
        const long long place = __shfl_sync(GPU_FULL_MASK, mine.token, lane / 4 % 4);
        copy_async((lane < 16 ? stage.k_scale : stage.v_scale) + lane % 16 * 4, scales_from + place, place >= 0);
      }
      shared.full[n % STAGES].arrive_after_copies();
      mine = next;
    }
    return;
  }
  if constexpr (GROUPS > 1) take_registers<kAttendRegisters>();

  // Q: each wave its 16 rows, of which a lane keeps the scales of rows g and g + 8.
  float q_scale[2];
  int seen[2];
#pragma unroll 1
  for (int r = 0; r < 16; ++r) {
    int8_t *codes = shared.codes[wave];
    const bool is_row = wave_row + r < rows.count();
    QueryRow values;
    load_query(values, is_row ? q + rows.place(wave_row + r) * HEAD_DIM : nullptr);
    const float scale = quantize_query(values, codes, softmax_scale);
    __syncwarp();
    const int row = wave % 4 * 16 + r;
    for (int byte = 4 * lane; byte < HEAD_DIM; byte += 128)
      *reinterpret_cast<uint32_t *>(
          &shared.q[warpgroup][byte / kWidth][row][swizzled<kWidth>(row, byte % kWidth)]) =
          *reinterpret_cast<const uint32_t *>(codes + byte);
    __syncwarp();
    unrolled<2>([&](auto v) {
      if (r == lane / 4 + 8 * v.value) q_scale[v.value] = scale, seen[v.value] = is_row ? rows.seen(wave_row + r) : 0;
    });
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

  const auto attend = [&](int tile, auto cut) {
    constexpr bool is_cut = decltype(cut)::value;
    const int n = tile - first_tile;
    const Stage &stage = shared.stages[n % STAGES];
    shared.full[n % STAGES].wait(n / STAGES & 1);
    wgmma_publish();

    const uint32_t k_address = wgmma_address(stage.k), v_address = wgmma_address(stage.v);
    int sums[32];
    wgmma_begin();
    unrolled<HEAD_DIM / kStep>([&](auto step) {
      constexpr int part = decltype(step)::value * kStep / kWidth, byte = decltype(step)::value * kStep % kWidth;
      wgmma_m64n64k32_s8(sums, wgmma_matrix<kWidth>(q_address, part * kGroupRows * kWidth + byte),
                         wgmma_matrix<kWidth>(k_address, part * kTile * kWidth + byte), step.value > 0);
    });
    wgmma_commit();
    wgmma_wait<0>();
    wgmma_arrived(sums);

    // Scores of row v by step s and place 4 h + b in the fragment.
    float weight[2][kSteps][8];
    unrolled<kSteps>([&](auto s) {
      unrolled<2>([&](auto h) {
        const float4 scale = *reinterpret_cast<const float4 *>(&stage.k_scale[s.value * 32 + h.value * 16 + t4]);
        const float scales[4] = {scale.x, scale.y, scale.z, scale.w};
        unrolled<4>([&](auto b) {
          unrolled<2>([&](auto v) {
            const int j = b.value / 2 + 2 * h.value + 4 * s.value;
            weight[v.value][s.value][4 * h.value + b.value] =
                float(sums[4 * j + 2 * v.value + b.value % 2]) * scales[b.value];
          });
        });
      });
    });
    const auto is_seen = [&](int v, int s, int p) {
      return !is_cut || tile * kTile + s * 32 + p / 4 * 16 + t4 + p % 4 < seen[v];
    };
    if constexpr (is_cut)
      unrolled<2>([&](auto v) {
        unrolled<kSteps>([&](auto s) {
          unrolled<8>([&](auto p) {
            if (!is_seen(v.value, s.value, p.value)) weight[v.value][s.value][p.value] = kNone;
          });
        });
      });

    float rescale[2];
    bool moves = false;
    unrolled<2>([&](auto v) {
      float largest = weight[v.value][0][0];
      unrolled<kSteps>([&](auto s) {
        unrolled<8>([&](auto p) { largest = fmaxf(largest, weight[v.value][s.value][p.value]); });
      });
      largest = fmaxf(top[v.value], over_row(largest, larger));
      rescale[v.value] = fast_exp2((top[v.value] - largest) * q_scale[v.value]);
      moves = moves || largest != top[v.value];
      top[v.value] = largest;
      float sum = 0.f;
      unrolled<kSteps>([&](auto s) {
        unrolled<8>([&](auto p) {
          float &e = weight[v.value][s.value][p.value];
          e = fast_exp2(fmaf(e, q_scale[v.value], -largest * q_scale[v.value]));
          if (!is_seen(v.value, s.value, p.value)) e = 0.f;
          sum += e;
        });
      });
      total[v.value] = fmaf(total[v.value], rescale[v.value], sum);
    });
    if (__any_sync(GPU_FULL_MASK, moves))
      unrolled<kHalves>([&](auto half) {
        unrolled<32>([&](auto i) { output[half.value][i.value] *= rescale[i.value / 2 % 2]; });
      });

    // Weights, and P's fragments: register 2 h + v of a step holds the bytes of row v at 4 h.
    unrolled<kSteps>([&](auto s) {
      unrolled<2>([&](auto h) {
        const float4 scale = *reinterpret_cast<const float4 *>(&stage.v_scale[s.value * 32 + h.value * 16 + t4]);
        const float scales[4] = {scale.x, scale.y, scale.z, scale.w};
        unrolled<4>([&](auto b) {
          unrolled<2>([&](auto v) {
            constexpr int p = 4 * decltype(h)::value + decltype(b)::value;
            weight[v.value][s.value][p] *= is_seen(v.value, s.value, p) ? scales[b.value] : 0.f;
          });
        });
      });
    });
    uint32_t fragment[kSteps][4] = {};
    float w_scale[kScales][2];
    unrolled<2>([&](auto v) {
      float peak[kScales] = {}, inverse[kScales];
      unrolled<kSteps>([&](auto s) {
        unrolled<8>([&](auto p) {
          float &own = peak[s.value * kScales / kSteps];
          own = fmaxf(own, weight[v.value][s.value][p.value]);
        });
      });
      unrolled<kScales>([&](auto s) {
        peak[s.value] = over_row(peak[s.value], larger);
        w_scale[s.value][v.value] = peak[s.value] * (1.f / kLargest);
        inverse[s.value] = peak[s.value] > 0.f ? kLargest * fast_reciprocal(peak[s.value]) : 0.f;
      });
      unrolled<kSteps>([&](auto s) {
        unrolled<8>([&](auto p) {
          const uint32_t code = rounded_bits(weight[v.value][s.value][p.value], inverse[s.value * kScales / kSteps]);
          fragment[s.value][p.value / 4 * 2 + v.value] |= (code & 0xff) << p.value % 4 * 8;
        });
      });
    });

    // P V by halves of the columns and scales, kInFlight of them at a time.
    constexpr int kProducts = kScales * kHalves, kScaleSteps = kSteps / kScales;
    int products[kInFlight][32];
    const auto start = [&](auto n) {
      constexpr int half = decltype(n)::value / kScales, scale = decltype(n)::value % kScales;
      wgmma_begin();
      unrolled<kScaleSteps>([&](auto i) {
        constexpr int step = scale * kScaleSteps + decltype(i)::value;
        const uint64_t values = wgmma_matrix<kTile>(v_address, half * 64 * kTile + step * kStep);
        if constexpr (kPv == UINT8) wgmma_m64n64k32_u8s8_registers(products[n.value % kInFlight], fragment[step], values, i.value > 0);
        else wgmma_m64n64k32_s8_registers(products[n.value % kInFlight], fragment[step], values, i.value > 0);
      });
      wgmma_commit();
    };
    unrolled<kInFlight - 1>([&](auto n) { start(n); });
    unrolled<kProducts>([&](auto n) {
      constexpr int half = decltype(n)::value / kScales, scale = decltype(n)::value % kScales;
      constexpr int next = decltype(n)::value + kInFlight - 1;
      if constexpr (next < kProducts) start(Index<next>{});
      wgmma_wait<next < kProducts ? kInFlight - 1 : 0>();
      wgmma_arrived(products[n.value % kInFlight]);
      if constexpr (n.value == kProducts - 1) {
        if (lane == 0) shared.empty[(tile - first_tile) % STAGES].arrive();
      }
      unrolled<32>([&](auto i) {
        output[half][i.value] =
            fmaf(float(products[n.value % kInFlight][i.value]), w_scale[scale][i.value / 2 % 2], output[half][i.value]);
      });
    });
  };
  const int whole_tiles = min(end_tile, block.least_seen / kTile);
  for (int tile = first_tile; tile < whole_tiles; ++tile) attend(tile, Index<0>{});
  for (int tile = max(first_tile, whole_tiles); tile < end_tile; ++tile) attend(tile, Index<1>{});

  unrolled<2>([&](auto v) {
    const int row = wave_row + lane / 4 + 8 * v.value;
    total[v.value] = over_row(total[v.value], sum);
    if (row >= rows.count()) return;
    const size_t part = rows.place(row) * splits + block.split;
    if (stats && lane % 4 == 0)
      stats[part] = make_float2(top[v.value] == kNone ? kNone : top[v.value] * q_scale[v.value], total[v.value]);
    const float factor = total[v.value] > 0.f ? 1.f / total[v.value] : 0.f;
    unrolled<kHalves>([&](auto half) {
      unrolled<8>([&](auto j) {
        const float *pair = &output[half.value][4 * j.value + 2 * v.value];
        *reinterpret_cast<float2 *>(out + part * HEAD_DIM + half.value * 64 + j.value * 8 + lane % 4 * 2) =
            make_float2(pair[0] * factor, pair[1] * factor);
      });
    });
  });
}

#endif
