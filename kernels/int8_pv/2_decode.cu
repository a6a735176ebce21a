// 2. Decode: a few query rows against a long history, cut into partitions that blocks attend to on their own.
//
// A block takes the rows of one KV head and one partition of the history. Its waves split the tokens for Q K and the
// columns for P V, so that nothing is read twice and no sum crosses waves; in between, the weights go through shared
// memory, in the order of tokens: lanes read them in the same runs of 16 as V, whatever the lane map. What the map does
// decide is which tokens one step multiplies, and with them which share a scale: step_of, the only place that knows.
//
//   score = q . k * sQ * sK          P = softmax within the partition       W = P sV
//   W ~ sW Wq over the tokens of a step                 out = sum over steps of sW * (Wq x V)
//
// Loads of V are under way before the scores are known. Partitions are merged by 4_merge_partitions.cu.
//
//   PARTITION   tokens of a partition, a multiple of 64
//   TRACE       1: weights, their codes and the integer sums are written out too, for comparison with a model
#include "gpu.h"
#if !defined(SWAPPED) && GPU_CUDA  // few rows: mma takes 8 of them and 16 columns when swapped; the others are square
#define SWAPPED 1
#elif !defined(SWAPPED)
#define SWAPPED 0
#endif
#include "attention.h"

constexpr int kWaves = 4;
constexpr int kTiles = PARTITION / kTile;
constexpr int kWaveTiles = (kTiles + kWaves - 1) / kWaves;  // for Q K
constexpr int kWaveTokens = kWaveTiles * kTile;
constexpr int kColumnTiles = HEAD_DIM / kColumns;
constexpr int kWaveColumns = (kColumnTiles + kWaves - 1) / kWaves;  // in tiles, for P V
constexpr int kTokens = kWaves * kWaveTokens;                       // of a short partition, some belong to no wave
constexpr int kKeyTiles = kWaveTokens / kKeys;
constexpr int kScales = kTokens / kScaleTokens;                     // of the weights of a row
constexpr int kPeakTokens = kScaleTokens < kTile ? kScaleTokens : kTile;  // under one maximum that a wave finds on its own
constexpr int kWavePeaks = kWaveTokens / kPeakTokens;


using Keys = uint32_t[kTile / kKeys][kQkParts][QK::Cache::vectors][kQkRun / 4];  // of a tile

using Values = uint32_t[kWaveColumns][PxV::Cache::vectors][kValueWords];
// Tiles of V that are loaded before the scores are known: as many as 64 registers hold, at least one.
constexpr int kFitting = sizeof(Values) < 64 * 4 ? 64 * 4 / sizeof(Values) : 1;
constexpr int kEarly = kTiles < kFitting ? kTiles : kFitting;

constexpr int kPad = 16;  // bytes between rows in shared memory, so that rows do not meet in the banks

struct Shared {
  alignas(16) Weight weights[kRows][kTokens + kPad / sizeof(Weight)];
  alignas(16) int8_t q[kRows][HEAD_DIM + kPad];
  alignas(16) float v_scale[kTokens];
  float k_scale[kTokens];
  Places places[kTokens / kUnit];
  size_t part[kRows];               // of a row in [batch][queries][heads][partitions]
  float q_scale[kRows], top[kWaves][kRows], total[kWaves][kRows];
  int seen[kRows];                  // tokens of the partition that a row sees
  float peak[kWaves * kWavePeaks][kRows];
  float w_scale[kScales][kRows];
};

// Number of the maximum that a token's weight counts for, and is quantized by.
__device__ __forceinline__ int peak_of(int token) {
  if constexpr (kPeakTokens == kTile) return token / kTile;
  else if constexpr (LOGICAL_GROUPS) return token / kPeakTokens;
  else return token / kTile * (kTile / kPeakTokens) + MATRIX::step_of<SWAPPED>(token % kTile);
}

// q [batch][queries][heads][HEAD_DIM]. Pages as in kernelbook/kv_cache.py; v_pages holds bf16 for BF16_PAGES and is not
// __restrict__, or the compiler would move its loads behind the barriers, to where they are used.
// offsets [batch]: query i sees tokens 0 .. offsets + i; null: every query sees all. softmax_scale: times log2(e).
// out [batch][queries][heads][partitions][HEAD_DIM], each partition normalized; stats the same without HEAD_DIM: the
// largest score and the sum of powers of 2 relative to it. Of partitions beyond a sequence nothing is written.
// Grid: (row tiles * partitions) x kv_heads x batch; block: warpSize x kWaves.
extern "C" __global__ void __launch_bounds__(kWaves * MATRIX::Signed::map().lanes, HEAD_DIM <= 128 && PARTITION <= 256 ? 3 : 2)
decode(const float *__restrict__ q, const int8_t *__restrict__ k_codes, const float *__restrict__ k_scales,
       const void *v_pages, const float *__restrict__ v_scales, const int *__restrict__ block_tables,
       const int *__restrict__ lengths, const int *__restrict__ offsets, float *__restrict__ out,
       float2 *__restrict__ stats, float *__restrict__ trace_weights, int *__restrict__ trace_codes,
       int *__restrict__ trace_sums, int queries, int group, int kv_heads, int partitions, int block_size,
       int max_blocks, float softmax_scale) {
  __shared__ Shared shared;
  const int lane = threadIdx.x, wave = threadIdx.y, thread = wave * warpSize + lane, threads = kWaves * warpSize;
  const int row_tile = blockIdx.x < partitions ? 0 : blockIdx.x / partitions;  // mostly there is one
  const int partition = blockIdx.x - row_tile * partitions, head = blockIdx.y, batch = blockIdx.z;
  const QueryRows rows = query_rows(queries, group, kv_heads, head, batch, lengths, offsets);
  const int first = partition * PARTITION, count = max(0, min(PARTITION, rows.length - first));
  const int first_row = row_tile * kRows;
  const auto is_row = [&](int r) { return first_row + r < rows.count(); };

  if (count == 0) {  // of a sequence of length 0, the first partition says that there is nothing
    for (int i = thread; partition == 0 && i < kRows * HEAD_DIM; i += threads)
      if (is_row(i / HEAD_DIM)) {
        const size_t row = rows.place(first_row + i / HEAD_DIM) * partitions;
        out[row * HEAD_DIM + i % HEAD_DIM] = 0.f;
        if (i % HEAD_DIM == 0) stats[row] = make_float2(kNone, 0.f);
      }
    return;
  }

  constexpr int kWaveRows = kRows / kWaves;
  QueryRow queries_of_wave[kWaveRows];
  size_t place_of_row[kWaveRows];
  unrolled<kWaveRows>([&](auto i) {
    const int r = i.value * kWaves + wave;
    place_of_row[i.value] = rows.place(first_row + r);
    load_query(queries_of_wave[i.value], is_row(r) ? q + place_of_row[i.value] * HEAD_DIM : nullptr);
  });
  for (int u = thread; u < kTokens / kUnit; u += threads) {
    const Places places = find_places(block_tables + (size_t)batch * max_blocks, max_blocks, first + u * kUnit,
                                      first + count, block_size, kv_heads, head);
    // Where there is nothing, the first page is read in its place, whatever it holds: no branch, and weights of 0.
    shared.places[u] = {max(places.token, 0ll), max(places.value, 0ll)};
  }
  __syncthreads();

  // ---- every load, and nothing that waits for one: scales, K for this wave's tokens, V for its columns ----

  constexpr int kThreadTokens = kTokens / (kWaves * MATRIX::Signed::map().lanes);
  float k_scale[kThreadTokens], v_scale[kThreadTokens];
  unrolled<kThreadTokens>([&](auto i) {
    const int t = i.value * threads + thread;
    const long long place = shared.places[t / kUnit].token + t % kUnit;
    k_scale[i.value] = t < count ? k_scales[place] : 0.f;
    v_scale[i.value] = t < count ? v_scales[place] : 0.f;
  });
  const int wave_token = wave * kWaveTokens;
  const auto read_keys = [&](Keys &keys, int tile) {
    unrolled<kTile / kKeys>([&](auto j) {
      const int unit = (wave_token + tile * kTile + j.value * kKeys) / kUnit;
      const int8_t *unit_keys = k_codes + shared.places[unit].token * HEAD_DIM + QK::Cache::part_of(lane) * kQkRun;
      unrolled<QK::Cache::vectors>([&](auto v) {
        const int token = j.value * kKeys % kUnit + QK::Cache::template vector<v.value>(lane);
        unrolled<kQkParts>([&](auto p) {
          read_run<kQkRun>(keys[j.value][p.value][v.value], unit_keys + token * HEAD_DIM + p.value * kQkPart);
        });
      });
    });
  };
  Keys keys;
  read_keys(keys, 0);
  const auto read_values = [&](Values &values, int tile) {
    const char *unit_values = static_cast<const char *>(v_pages) +
                              shared.places[tile * (kTile / kUnit) + PxV::Cache::part_of(lane)].value * kValueBytes;
    unrolled<kWaveColumns>([&](auto n) {
      const int first_column = min(n.value * kWaves + wave, kColumnTiles - 1) * kColumns;
      unrolled<PxV::Cache::vectors>([&](auto v) {
        const unsigned place = (first_column + PxV::Cache::template vector<v.value>(lane)) * block_size;
        if constexpr (READ < 16) unrolled<kValueWords>([&](auto w) { values[n.value][v.value][w.value] = 0; });
        read_run<kUnit * kValueBytes * READ / 16>(values[n.value][v.value], unit_values + (size_t)place * kValueBytes);
      });
    });
  };
  Values early[kEarly];
  unrolled<kEarly>([&](auto tile) { read_values(early[tile.value], tile.value); });

  // ---- meanwhile, rows of Q become codes ----

  unrolled<kWaveRows>([&](auto i) {
    const int r = i.value * kWaves + wave;
    const float scale = quantize_query(queries_of_wave[i.value], shared.q[r], softmax_scale);
    if (lane == 0) {
      shared.part[r] = place_of_row[i.value] * partitions + partition, shared.q_scale[r] = scale;
      shared.seen[r] = is_row(r) ? max(0, min(count, rows.seen(first_row + r) - first)) : 0;
    }
  });
  unrolled<kThreadTokens>([&](auto i) {
    const int t = i.value * threads + thread;
    shared.k_scale[t] = k_scale[i.value], shared.v_scale[t] = v_scale[i.value];
  });
  __syncthreads();

  // ---- scores of this wave's tokens, and softmax over the partition ----

  uint32_t query[kQkParts][QK::Rows::vectors][kQkRun / 4];
  unrolled<kQkParts>([&](auto p) {
    unrolled<QK::Rows::vectors>([&](auto v) {
      read_run<kQkRun>(query[p.value][v.value], &shared.q[QK::Rows::template vector<v.value>(lane)]
                                                         [p.value * kQkPart + QK::Rows::part_of(lane) * kQkRun]);
    });
  });
  using Sums = typename QK::Sums;
  int row[Sums::vectors];  // that this lane has scores of
  unrolled<Sums::vectors>([&](auto v) { row[v.value] = Sums::template vector<v.value>(lane); });
  float weight[kKeyTiles][4], top[Sums::vectors], total[Sums::vectors];
  unrolled<Sums::vectors>([&](auto v) { top[v.value] = kNone, total[v.value] = 0.f; });
  unrolled<kKeyTiles>([&](auto j) {
    const int kInTile = kTile / kKeys;
    if (j.value > 0 && j.value % kInTile == 0) read_keys(keys, j.value / kInTile);
    int sums[4] = {};
    unrolled<kQkParts>([&](auto p) {
      unrolled<kQkRun / QK::Rows::run>([&](auto step) {
        uint32_t a[QK::Rows::elements / 4], b[QK::Cache::elements / 4];
        QK::Rows::template feed<step.value>(a, query[p.value]);
        QK::Cache::template feed<step.value>(b, keys[j.value % kInTile][p.value]);
        QK::multiply(sums, a, b);
      });
    });
    unrolled<4>([&](auto i) {
      constexpr int v = Sums::template vector_of<i.value>;
      const int token = wave_token + j.value * kKeys + Sums::template along<i.value>(lane);
      const bool is_seen = token < shared.seen[row[v]];
      weight[j.value][i.value] = is_seen ? float(sums[i.value]) * (shared.q_scale[row[v]] * shared.k_scale[token]) : kNone;
      top[v] = fmaxf(top[v], weight[j.value][i.value]);
    });
  });
  unrolled<Sums::vectors>([&](auto v) { top[v.value] = Sums::reduce(top[v.value], larger); });
  unrolled<kKeyTiles>([&](auto j) {
    unrolled<4>([&](auto i) {
      constexpr int v = Sums::template vector_of<i.value>;
      weight[j.value][i.value] = fast_exp2(weight[j.value][i.value] - or_zero(top[v]));
      total[v] += weight[j.value][i.value];
    });
  });
  const bool leads = Sums::part_of(lane) == 0;  // one lane for each row
  unrolled<Sums::vectors>([&](auto v) {
    total[v.value] = Sums::reduce(total[v.value], sum);
    if (leads) shared.top[wave][row[v.value]] = top[v.value], shared.total[wave][row[v.value]] = total[v.value];
  });
  __syncthreads();
  unrolled<Sums::vectors>([&](auto v) {
    float partition_top = kNone, partition_total = 0.f;
    for (int w = 0; w < kWaves; ++w) partition_top = fmaxf(partition_top, shared.top[w][row[v.value]]);
    for (int w = 0; w < kWaves; ++w)
      partition_total += shared.total[w][row[v.value]] * fast_exp2(shared.top[w][row[v.value]] - or_zero(partition_top));
    if (wave == 0 && leads && is_row(row[v.value]))
      stats[shared.part[row[v.value]]] = make_float2(partition_top, partition_total);
    top[v.value] = partition_total > 0.f ? fast_exp2(top[v.value] - or_zero(partition_top)) / partition_total : 0.f;
  });

  // ---- weights: the scales of V folded in, then codes, grouped as the steps of P V multiply them ----

  unrolled<kKeyTiles>([&](auto j) {
    unrolled<4>([&](auto i) {
      const int token = wave_token + j.value * kKeys + Sums::template along<i.value>(lane);
      weight[j.value][i.value] *= top[Sums::template vector_of<i.value>];
      if (kFolded && !COMMON_SCALE) weight[j.value][i.value] *= shared.v_scale[token];
    });
  });
  float inverse[kWavePeaks][Sums::vectors];  // of the scale that the weights under one maximum get
  if constexpr (kInteger) {
    unrolled<kWavePeaks>([&](auto p) {
      unrolled<Sums::vectors>([&](auto v) {
        float peak = 0.f;
        unrolled<kKeyTiles>([&](auto j) {
          unrolled<4>([&](auto i) {
            const bool counts = Sums::template vector_of<i.value> == v.value &&
                                peak_of(j.value * kKeys + Sums::template along<i.value>(lane)) == p.value;
            peak = counts ? fmaxf(peak, weight[j.value][i.value]) : peak;
          });
        });
        peak = Sums::reduce(peak, larger);
        if (leads) shared.peak[wave * kWavePeaks + p.value][row[v.value]] = peak;
        inverse[p.value][v.value] = peak;
      });
    });
    if constexpr (kScaleTokens > kPeakTokens) __syncthreads();  // other waves have a part in the scale
    unrolled<kWavePeaks>([&](auto p) {
      unrolled<Sums::vectors>([&](auto v) {
        constexpr int kPeaks = kScaleTokens / kPeakTokens;
        const int scale = (wave * kWavePeaks + p.value) / kPeaks;
        float largest = inverse[p.value][v.value];
        for (int other = 0; other < kPeaks && kPeaks > 1; ++other)
          largest = fmaxf(largest, shared.peak[scale * kPeaks + other][row[v.value]]);
        inverse[p.value][v.value] = largest > 0.f ? kLargest / largest : 0.f;
        if (leads) shared.w_scale[scale][row[v.value]] = largest * (1.f / kLargest);
      });
    });
  }
  unrolled<kKeyTiles>([&](auto j) {
    unrolled<4>([&](auto i) {
      constexpr int v = Sums::template vector_of<i.value>;
      const int token = j.value * kKeys + Sums::template along<i.value>(lane);  // of this wave's
      Weight code;
      if constexpr (kInteger) {
        float factor = 0.f;
        unrolled<kWavePeaks>([&](auto p) { factor = peak_of(token) == p.value ? inverse[p.value][v] : factor; });
        code = rounded_bits(weight[j.value][i.value], factor);
      } else {
        code = float_to_bf16(weight[j.value][i.value]);
      }
#if TRACE
      if (is_row(row[v]) && wave_token + token < count) {
        const size_t place = shared.part[row[v]] * PARTITION + wave_token + token;
        trace_weights[place] = weight[j.value][i.value];
        trace_codes[place] = code;
      }
#endif
      if constexpr (kPv == UINT8_OFFSET) code ^= 0x80;  // minus 128
      shared.weights[row[v]][wave_token + token] = code;
    });
  });
  __syncthreads();

  // ---- P V: this wave's columns of all tokens ----

  using Outputs = typename PxV::Sums;
  float output[kWaveColumns][4] = {}, common = 0.f;
  if constexpr (COMMON_SCALE)
    for (int t = 0; t < count; ++t) common = fmaxf(common, shared.v_scale[t]);
  OpenSums open[kWaveColumns];
  const auto attend = [&](const Values &values, int tile) {
    const int token = tile * kTile + PxV::Rows::part_of(lane) * kUnit;
    uint32_t weights[PxV::Rows::vectors][kWeightWords];
    unrolled<PxV::Rows::vectors>([&](auto v) {
      read_run<kUnit * sizeof(Weight)>(weights[v.value], &shared.weights[PxV::Rows::template vector<v.value>(lane)][token]);
    });
    unrolled<kWaveColumns>([&](auto n) {
      const auto close = [&](auto i, int scale, int sum) {
        const int r = Outputs::template vector<Outputs::template vector_of<i.value>>(lane);
        const float factor = COMMON_SCALE ? shared.w_scale[scale][r] * common : shared.w_scale[scale][r];
        output[n.value][i.value] = fmaf(sum_as_float(sum), factor, output[n.value][i.value]);
#if TRACE
        const int column = (n.value * kWaves + wave) * kColumns + Outputs::template along<i.value>(lane);
        if (is_row(r) && column < HEAD_DIM)
          trace_sums[(shared.part[r] * (PARTITION / kScaleTokens) + scale) * HEAD_DIM + column] = sum - start_of_sum();
#endif
      };
      multiply_tile(output[n.value], open[n.value], tile, weights, values[n.value], &shared.v_scale[token], close);
    });
  };
  unrolled<kEarly>([&](auto tile) { attend(early[tile.value], tile.value); });
  for (int tile = kEarly; tile < kTiles; ++tile) {
    Values values;
    read_values(values, tile);
    attend(values, tile);
  }
  unrolled<kWaveColumns>([&](auto n) {
    unrolled<4>([&](auto i) {
      const int r = Outputs::template vector<Outputs::template vector_of<i.value>>(lane);
      const int column = (n.value * kWaves + wave) * kColumns + Outputs::template along<i.value>(lane);
      if (is_row(r) && column < HEAD_DIM)
        out[shared.part[r] * HEAD_DIM + column] = output[n.value][i.value];
    });
  });
}
GPU_KERNEL(decode)
