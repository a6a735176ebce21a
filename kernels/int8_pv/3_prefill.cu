// 3. Prefill with history: many query rows, and weights that never leave the registers.
//
// A wave owns 16 rows and goes through the history in tiles of 64 tokens that its block holds in shared memory, copied
// some tiles ahead. After Q K a lane has scores of 16 tokens of each row it holds; P V wants from it the weights of the
// 16 neighbouring tokens whose run of V it reads. Keys may be multiplied in any order, so they are taken in the one in
// which the two are the same tokens: key_of. That works where the sums of Q K lie on the lanes that hold P: for mma and
// mmac with P as operand A, for mfma in the swapped form. `chains` proves it when the kernel is compiled.
//
// Weights are quantized before they are normalized, relative to the largest score so far, as online softmax has them.
// A long history is split over blocks, whose parts 4_merge_partitions.cu merges.
//
//   WAVES    of a block, 16 rows each
//   STAGES   tiles in shared memory: one in use, the others under way
#include "gpu.h"
#if !defined(SWAPPED) && GPU_HAS_MFMA
#define SWAPPED 1
#elif !defined(SWAPPED)
#define SWAPPED 0
#endif
#include "prefill.h"

using Sums = QK::Sums;
constexpr int kLanes = MATRIX::Signed::map().lanes;
constexpr int kThreads = WAVES * kLanes;
constexpr int kWaveKeys = kTile / kKeys;  // products of Q K in a tile
constexpr int kColumnTiles = HEAD_DIM / kColumns;
constexpr int kScales = kTile / kScaleTokens;  // of the weights of a row in a tile

// ---- the order of keys ----

// The bits of a column of Q K's sums that come from the lane, or else from the element, moved together.
__host__ __device__ constexpr int column_part(int column, bool of_lane) {
  const fragments::Operand &sums = operand_of(MATRIX::Signed::map(), 'D');
  const signed char *along = SWAPPED ? sums.row : sums.column;
  int index = 0, n = 0;
  for (int c = 0; along[c] >= 0; ++c)
    if ((along[c] < 8) == of_lane) index |= (column >> c & 1) << n++;
  return index;
}
// The token of a tile that column `column` of product `j` of Q K is: in the run that its lane is to read of V, at the
// place that the element and j count.
__host__ __device__ constexpr int key_of(int j, int column) {
  return column_part(column, true) * kUnit + j * Sums::run + column_part(column, false);
}
__host__ __device__ constexpr bool chains() {
  const fragments::Operand &sums = operand_of(MATRIX::Signed::map(), 'D');
  const fragments::Operand &p = operand_of(MATRIX::Signed::map(), SWAPPED ? 'B' : 'A');
  for (int lane = 0; lane < kLanes; ++lane)
    for (int v = 0; v < Sums::vectors; ++v) {
      const int of_sums = first_element(sums, !SWAPPED, v), of_p = first_element(p, !SWAPPED, v);
      const int place = SWAPPED ? fragments::row(p, lane, of_p) : fragments::column(p, lane, of_p);
      const int column = SWAPPED ? fragments::row(sums, lane, of_sums) : fragments::column(sums, lane, of_sums);
      const bool same_row = SWAPPED ? fragments::column(p, lane, of_p) == fragments::column(sums, lane, of_sums)
                                    : fragments::row(p, lane, of_p) == fragments::row(sums, lane, of_sums);
      if (!same_row || MATRIX::token<SWAPPED>(0, place) != key_of(0, column)) return false;
    }
  return QK::Rows::vectors == Sums::vectors;
}
static_assert(chains(), "the sums of Q K do not lie on the lanes that hold P; swap, or take another instruction");
static_assert(kScaleTokens <= kTile && !COMMON_SCALE && !LOGICAL_GROUPS && READ == 16);
static_assert(Sums::run % 2 == 0, "products of Q K keep a key's parity");
static_assert(HEAD_DIM * 127 * 127 < 1 << 22, "scores are read as floats by one subtraction");

// The scale in its tile that covers place t of a run: the step's that multiplies it, the same for every run.
__host__ __device__ constexpr int scale_of(int t) { return kScaleTokens == kTile ? 0 : MATRIX::step_of<SWAPPED>(t); }

// ---- a tile in shared memory ----

struct Stage {
  alignas(16) int8_t k[kTile][HEAD_DIM];
  alignas(16) uint8_t v[HEAD_DIM][kTile * kValueBytes];
  alignas(16) float k_scale[kTile], v_scale[kTile];
};
// f(i) for this thread's share of 0 .. n - 1.
template <int n, class F> __device__ __forceinline__ void spread(int thread, F f) {
#pragma unroll
  for (int round = 0; round < (n + kThreads - 1) / kThreads; ++round)
    if (const int i = round * kThreads + thread; n % kThreads == 0 || i < n) f(i);
}
// Rows of K of 128 bytes all begin in the same bank; odd ones have their halves of 64 bytes exchanged.
__device__ __forceinline__ int place_in_row(int row, int byte) {
  return HEAD_DIM % 128 == 0 ? byte ^ (row & 1) << 6 : byte;
}

// q [batch][queries][heads][HEAD_DIM]. Pages as in kernelbook/kv_cache.py; v_pages holds bf16 for BF16_PAGES.
// offsets [batch]: query i sees tokens 0 .. offsets + i; null: every query sees all. softmax_scale: times log2(e).
// out [batch][queries][heads][splits][HEAD_DIM], each split normalized; stats the same without HEAD_DIM: the largest
// score and the sum of powers of 2 relative to it. One split needs no stats.
// Grid: row blocks x (kv_heads * splits) x batch; block: lanes x WAVES. Dynamic shared memory: Stage[STAGES], then
// HEAD_DIM bytes for each row.
extern "C" __global__ void __launch_bounds__(kThreads)
prefill(const float *__restrict__ q, const int8_t *__restrict__ k_codes, const float *__restrict__ k_scales,
        const char *__restrict__ v_pages, const float *__restrict__ v_scales, const int *__restrict__ block_tables,
        const int *__restrict__ lengths, const int *__restrict__ offsets, float *__restrict__ out,
        float2 *__restrict__ stats, int queries, int group, int kv_heads, int splits, int block_size, int max_blocks,
        float softmax_scale) {
  GPU_DYNAMIC_SHARED(Stage, stages);
  const int lane = threadIdx.x, wave = threadIdx.y, thread = wave * kLanes + lane;
  const PrefillBlock block = prefill_block(WAVES * kRows, kTile, queries, group, kv_heads, splits, lengths, offsets);
  const QueryRows &rows = block.rows;
  const int first_tile = block.first_tile, end_tile = block.end_tile, wave_row = block.first_row + wave * kRows;
  const int *block_table = block_tables + (size_t)rows.batch * max_blocks;

  // Where a tile lies is worked out by four threads, one tile before it is copied.
  __shared__ Places places[2][kTile / kUnit];
  const auto place = [&](int tile) {
    if (tile < end_tile && thread < kTile / kUnit)
      places[tile % 2][thread] =
          find_places(block_table, max_blocks, tile * kTile + thread * kUnit, rows.length, block_size, kv_heads, rows.head);
  };
  const auto copy = [&](int tile) {
    Stage &stage = stages[tile % STAGES];
    const Places *units = places[tile % 2];
    if (tile < end_tile) {
      spread<kTile * HEAD_DIM / 16>(thread, [&](int i) {
        const int row = i / (HEAD_DIM / 16), byte = i % (HEAD_DIM / 16) * 16;
        const long long token = units[row / kUnit].token;
        copy_async(&stage.k[row][place_in_row(row, byte)], k_codes + (token + row % kUnit) * HEAD_DIM + byte,
                   token >= 0);
      });
      spread<HEAD_DIM * kTile * kValueBytes / 16>(thread, [&](int i) {
        constexpr int kRowChunks = kTile * kValueBytes / 16, kUnitChunks = kUnit * kValueBytes / 16;
        const int column = i / kRowChunks, chunk = i % kRowChunks;
        const long long value = units[chunk / kUnitChunks].value;
        const char *from = v_pages + (value + (unsigned)(column * block_size)) * kValueBytes + chunk % kUnitChunks * 16;
        copy_async(&stage.v[column][chunk * 16], from, value >= 0);
      });
      spread<2 * kTile / 4>(thread, [&](int i) {
        const int first = i % (kTile / 4) * 4;
        const bool is_key = i < kTile / 4;
        const long long token = units[first / kUnit].token;
        copy_async((is_key ? stage.k_scale : stage.v_scale) + first,
                   (is_key ? k_scales : v_scales) + token + first % kUnit, token >= 0);
      });
    }
    copy_commit();  // an empty group too, so that their number tells the tile
  };

  // This wave's rows of Q: quantized where tiles will lie, then kept behind them as the registers of each step.
  constexpr int kQkSteps = kQkRun / QK::Rows::run;  // of a part
  constexpr int kQkRegisters = QK::Rows::elements / 4;
  using Fragment = uint32_t[kQkRegisters];
  Fragment *query = reinterpret_cast<Fragment *>(stages + STAGES) + wave * kQkParts * kQkSteps * kLanes + lane;
  int8_t(*codes)[HEAD_DIM] = reinterpret_cast<int8_t(*)[HEAD_DIM]>(stages) + wave * kRows;
  float q_scale[Sums::vectors];
  int seen[Sums::vectors], row[Sums::vectors];
#pragma unroll 1
  for (int r = 0; r < kRows; ++r) {
    QueryRow values;
    load_query(values, wave_row + r < rows.count() ? q + rows.place(wave_row + r) * HEAD_DIM : nullptr);
    const float scale = quantize_query(values, codes[r], softmax_scale);
    unrolled<Sums::vectors>([&](auto v) {
      if (Sums::template vector<v.value>(lane) == r) q_scale[v.value] = scale;
    });
  }
  __syncwarp();
  unrolled<kQkParts>([&](auto p) {
    uint32_t runs[QK::Rows::vectors][kQkRun / 4];
    unrolled<QK::Rows::vectors>([&](auto v) {
      read_run<kQkRun>(runs[v.value], codes[QK::Rows::template vector<v.value>(lane)] + p.value * kQkPart +
                                          QK::Rows::part_of(lane) * kQkRun);
    });
    unrolled<kQkSteps>([&](auto step) {
      QK::Rows::template feed<step.value>(query[(p.value * kQkSteps + step.value) * kLanes], runs);
    });
  });
  unrolled<Sums::vectors>([&](auto v) {
    row[v.value] = wave_row + Sums::template vector<v.value>(lane);
    seen[v.value] = row[v.value] < rows.count() ? rows.seen(row[v.value]) : 0;
  });
  place(first_tile);
  unrolled<STAGES - 1>([&](auto i) {
    __syncthreads();
    copy(first_tile + i.value);
    place(first_tile + i.value + 1);
  });

  float output[kColumnTiles][4] = {}, top[Sums::vectors], total[Sums::vectors];
  unrolled<Sums::vectors>([&](auto v) { top[v.value] = kNone, total[v.value] = 0.f; });
  const int run = Sums::part_of(lane) * kUnit;  // of tokens, that this lane has scores of and reads V of

  // cut: whether some row does not see all of the tile. Most tiles are whole, and need no question for each token.
  const auto attend = [&](int tile, auto cut) {
    constexpr bool is_cut = decltype(cut)::value;
    copy_wait<STAGES - 2>();
    __syncthreads();
    copy(tile + STAGES - 1);
    place(tile + STAGES);
    const Stage &stage = stages[tile % STAGES];

    // ---- scores, by the place of the token in the lane's run ----

    int sums[kWaveKeys][4];
    unrolled<kWaveKeys>([&](auto j) {
      unrolled<4>([&](auto i) { sums[j.value][i.value] = kShiftBits; });
    });
    unrolled<kQkParts>([&](auto p) {
      uint32_t a[kQkSteps][kQkRegisters];
      unrolled<kQkSteps>([&](auto step) {
        read_run<kQkRegisters * 4>(a[step.value], query[(p.value * kQkSteps + step.value) * kLanes]);
      });
      const int8_t *key[QK::Cache::vectors];  // of the first product; the others' lie even numbers of rows behind
      unrolled<QK::Cache::vectors>([&](auto v) {
        const int first = key_of(0, QK::Cache::template vector<v.value>(lane));
        key[v.value] = &stage.k[first][place_in_row(first, p.value * kQkPart + QK::Cache::part_of(lane) * kQkRun)];
      });
      unrolled<kWaveKeys>([&](auto j) {
        uint32_t keys[QK::Cache::vectors][kQkRun / 4];
        unrolled<QK::Cache::vectors>([&](auto v) {
          read_run<kQkRun>(keys[v.value], key[v.value] + j.value * Sums::run * HEAD_DIM);
        });
        unrolled<kQkSteps>([&](auto step) {
          uint32_t b[QK::Cache::elements / 4];
          QK::Cache::template feed<step.value>(b, keys);
          QK::multiply(sums[j.value], a[step.value], b);
        });
      });
    });
    float weight[Sums::vectors][kUnit];
    unrolled<kWaveKeys>([&](auto j) {
      unrolled<4>([&](auto i) {
        constexpr int t = key_of(decltype(j)::value, Sums::template along<i.value>(0));
        weight[Sums::template vector_of<i.value>][t] =
            (__int_as_float(sums[j.value][i.value]) - kShift) * stage.k_scale[run + t];
      });
    });
    const auto is_seen = [&](int v, int t) { return !is_cut || tile * kTile + run + t < seen[v]; };
    if constexpr (is_cut)
      unrolled<Sums::vectors>([&](auto v) {
        unrolled<kUnit>([&](auto t) {
          if (!is_seen(v.value, t.value)) weight[v.value][t.value] = kNone;
        });
      });

    // ---- online softmax: scores become powers of 2 relative to the largest so far ----

    float rescale[Sums::vectors];
    bool moves = false;
    unrolled<Sums::vectors>([&](auto v) {
      float largest = weight[v.value][0];
      unrolled<kUnit>([&](auto t) { largest = fmaxf(largest, weight[v.value][t.value]); });
      largest = fmaxf(top[v.value], Sums::reduce(largest, larger));
      rescale[v.value] = fast_exp2((top[v.value] - largest) * q_scale[v.value]);
      moves = moves || largest != top[v.value];
      top[v.value] = largest;
      float sum = 0.f;
      unrolled<kUnit>([&](auto t) {
        float &e = weight[v.value][t.value];
        e = fast_exp2(fmaf(e, q_scale[v.value], -largest * q_scale[v.value]));
        if (!is_seen(v.value, t.value)) e = 0.f;
        sum += e;
      });
      total[v.value] = fmaf(total[v.value], rescale[v.value], sum);  // of this lane's tokens
    });
    if (__any_sync(GPU_FULL_MASK, moves))
      unrolled<kColumnTiles>([&](auto n) {
        unrolled<4>([&](auto i) { output[n.value][i.value] *= rescale[Sums::template vector_of<i.value>]; });
      });

    // ---- weights: the scales of V folded in, then codes of the tokens that one step multiplies ----

    if constexpr (kFolded)
      unrolled<Sums::vectors>([&](auto v) {
        unrolled<kUnit>([&](auto t) {
          const float scale = stage.v_scale[run + t.value];
          weight[v.value][t.value] *= is_seen(v.value, t.value) ? scale : 0.f;
        });
      });
    uint32_t weights[Sums::vectors][kWeightWords];
    float w_scale[kScales][Sums::vectors];
    unrolled<Sums::vectors>([&](auto v) {
      float inverse[kScales] = {};
      if constexpr (kInteger) {
        unrolled<kUnit>([&](auto t) {
          float &peak = inverse[scale_of(decltype(t)::value)];
          peak = fmaxf(peak, weight[v.value][t.value]);
        });
        unrolled<kScales>([&](auto s) {
          const float peak = Sums::reduce(inverse[s.value], larger);
          w_scale[s.value][v.value] = peak * (1.f / kLargest);
          inverse[s.value] = peak > 0.f ? kLargest * fast_reciprocal(peak) : 0.f;
        });
      }
      if constexpr (kInteger) {
        unrolled<kWeightWords>([&](auto w) { weights[v.value][w.value] = 0; });
        unrolled<kUnit>([&](auto t) {
          const uint32_t code = rounded_bits(weight[v.value][t.value], inverse[scale_of(decltype(t)::value)]) & 0xff;
          weights[v.value][t.value / 4] |= code << t.value % 4 * 8;
        });
      } else {
        unrolled<kWeightWords>([&](auto w) {
          weights[v.value][w.value] = bf16_pair(weight[v.value][2 * w.value], weight[v.value][2 * w.value + 1]);
        });
      }
      if constexpr (kPv == UINT8_OFFSET)
        unrolled<kWeightWords>([&](auto w) { weights[v.value][w.value] ^= 0x80808080u; });  // minus 128
    });

    // ---- P V ----

    float v_scale[kUnit];  // for V made in registers; of a token that is not there, 0, as its weight, against a NaN
    if constexpr (kPv == BF16_DEQUANTIZED)
      unrolled<kUnit>([&](auto t) {
        const bool is_there = !is_cut || tile * kTile + run + t.value < rows.length;
        v_scale[t.value] = is_there ? stage.v_scale[run + t.value] : 0.f;
      });
    unrolled<kColumnTiles>([&](auto n) {
      uint32_t values[PxV::Cache::vectors][kValueWords];
      unrolled<PxV::Cache::vectors>([&](auto v) {
        const int column = n.value * kColumns + PxV::Cache::template vector<v.value>(lane);
        read_run<kUnit * kValueBytes>(values[v.value], &stage.v[column][run * kValueBytes]);
      });
      OpenSums open;
      multiply_tile(output[n.value], open, 0, weights, values, v_scale, [&](auto i, int scale, int sum) {
        constexpr int v = PxV::Sums::template vector_of<i.value>;
        output[n.value][i.value] = fmaf(sum_as_float(sum), w_scale[scale][v], output[n.value][i.value]);
      });
    });
  };
  const int whole_tiles = min(end_tile, block.least_seen / kTile);
  for (int tile = first_tile; tile < whole_tiles; ++tile) attend(tile, Index<0>{});
  for (int tile = max(first_tile, whole_tiles); tile < end_tile; ++tile) attend(tile, Index<1>{});

  // ---- the end: divide by the sum of all weights ----

  unrolled<Sums::vectors>([&](auto v) {
    total[v.value] = Sums::reduce(total[v.value], sum);
    if (stats && Sums::part_of(lane) == 0 && row[v.value] < rows.count())
      stats[rows.place(row[v.value]) * splits + block.split] =
          make_float2(top[v.value] == kNone ? kNone : top[v.value] * q_scale[v.value], total[v.value]);
    total[v.value] = total[v.value] > 0.f ? 1.f / total[v.value] : 0.f;
  });
  unrolled<kColumnTiles>([&](auto n) {
    unrolled<4>([&](auto i) {
      constexpr int v = Sums::template vector_of<i.value>;
      const int column = n.value * kColumns + PxV::Sums::template along<i.value>(lane);
      if (row[v] < rows.count())
        out[(rows.place(row[v]) * splits + block.split) * HEAD_DIM + column] = output[n.value][i.value] * total[v];
    });
  });
}
GPU_KERNEL(prefill)
