// Attention on AMX tiles: bf16 products, float32 sums, the structure of attention_kernels.h.
//
// Queries are split into two bf16 planes, x = high + low, which keeps 16 bits of their
// mantissa. Weights are rounded to one plane, and their sum is that of the rounded ones: what
// that costs is less than what rounding V does. A tile product adds 32 elements of K (or 32
// positions of V) to each sum in an order that does not depend on the number of rows.
//
//   tiles   0-3  sums     [rows][16] float32
//           4 5  queries [rows][32] bf16: both planes, or a plane of two row blocks;
//                weights of two row blocks, or of one for 32 positions and the next 32
//           6 7  K: 32 elements x 16 positions, or V: 32 positions x 16 elements
#pragma once

#include <immintrin.h>

#include "attention_kernels.h"

namespace trimaran::TRIMARAN_TIER {

constexpr int kTileRows = 16;
constexpr int kTileDepth = 32;                      // bf16 elements in a row of an operand

// Weights take the place of their scores: 32 in bf16 that of the first 16 of 32 floats.
constexpr int kWeightStride = 2 * kScoreStride;  // bf16 elements from row to row
constexpr int kWeightStep = 2 * kTileDepth;      // from 32 positions to the next 32

struct alignas(64) TileConfig {
  std::uint8_t palette = 1;
  std::uint8_t start_row = 0;
  std::uint8_t reserved[14] = {};
  std::uint16_t row_bytes[16] = {};
  std::uint8_t rows[16] = {};

  explicit TileConfig(int count) {
    for (int tile = 0; tile < 8; ++tile) {
      row_bytes[tile] = 64;
      rows[tile] = static_cast<std::uint8_t>(tile < 6 ? count : kTileRows);
    }
  }
};

// Tiles of `rows` rows. The whole structure is an operand: the compiler's own intrinsic
// lets it drop the stores that fill it.
static inline void load_tile_config(const TileConfig& config) {
  asm volatile("ldtilecfg %0" : : "m"(config) : "memory");
}

// The intrinsics of tile loads don't say that they read memory (gcc 12): what was written for
// them must not be kept back.
static inline void finish_writes() { asm volatile("" : : : "memory"); }

// x = high + low, 16 floats.
static inline void split_planes(__m512 x, std::uint16_t* high, std::uint16_t* low) {
  const __m256i upper = (__m256i)_mm512_cvtneps_pbh(x);
  const __m512 rest = _mm512_sub_ps(
      x, _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(upper), 16)));
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(high), upper);
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(low), (__m256i)_mm512_cvtneps_pbh(rest));
}

struct AmxScratch {
  float* state;             // [unit rows][partial_stride]
  std::uint16_t* queries;   // [unit rows][2 planes][depth]
  float* partial;           // [32][partial_stride]
  float* scores;            // [32][kScoreStride]; then weights
  PageScratch pages;
  int depth;                // head_dim rounded up to kTileDepth

  AmxScratch(void* memory, int unit_rows, int dim) {
    depth = (dim + kTileDepth - 1) / kTileDepth * kTileDepth;
    state = static_cast<float*>(memory);
    partial = state + unit_rows * partial_stride(dim);
    scores = partial + 2 * kTileRows * partial_stride(dim);
    queries = reinterpret_cast<std::uint16_t*>(scores + 2 * kTileRows * kScoreStride);
    pages.k = queries + unit_rows * 2 * depth;
    pages.v = pages.k + kChunk * depth;
  }
};

static void load_query_planes(const AttentionArgs& args, const UnitRows& rows, int kv_head,
                              const AmxScratch& scratch) {
  const int dim = args.head_dim, depth = scratch.depth;
  const __m512 scale = _mm512_set1_ps(args.scale * kLog2E);
  rows.queries(kv_head, [&](const float* q, int row) {
    std::uint16_t* planes = scratch.queries + row * 2 * depth;
    for (int d = 0; d < dim; d += kLanes)
      split_planes(_mm512_mul_ps(_mm512_loadu_ps(q + d), scale), planes + d, planes + depth + d);
    for (int d = dim; d < depth; d += kLanes)
      split_planes(_mm512_setzero_ps(), planes + d, planes + depth + d);
  });
}

// Where a chunk's tiles lie: K by subtile, V by pair of subtiles (32 positions). K has a
// pointer for each of the next multiple of four subtiles; what the surplus scores are
// doesn't matter.
struct TileView {
  const std::uint16_t* k[kSubtiles];
  const std::uint16_t* v[kSubtiles / 2];
  int k_stride;
};

// Scores are made for four subtiles at a time: those from the first of a row block on.
static inline int first_scored(int begin) { return begin / (4 * kLanes) * 4; }

static void view_keys(const PageReader& pages, int base, int wanted, int dim,
                      const AmxScratch& scratch, TileView& view) {
  const bool join = pages.block_size() < kLanes || dim % kTileDepth != 0;
  view.k_stride = join ? 2 * kLanes : 2 * pages.block_size();
  const int first = pages.first_subtile(base);
  int i = first;
  for (; i * kLanes < wanted; ++i) {
    const int position = base + i * kLanes;
    if (!join) {
      view.k[i] = pages.keys(position);
      continue;
    }
    std::uint16_t* joined = scratch.pages.k + i * kLanes * scratch.depth;
    pages.join_keys(position, joined);
    // Lines of elements that the head doesn't have: multiplied by zeros, so no NaN here.
    std::memset(joined + kLanes * dim, 0,
                kLanes * (scratch.depth - dim) * sizeof(std::uint16_t));
    view.k[i] = joined;
  }
  for (; i % 4; ++i) view.k[i] = view.k[i - 1];
  for (i = first; i % 4; --i) view.k[i - 1] = view.k[first];
}

static void view_values(const PageReader& pages, int base, int wanted, int dim,
                        const AmxScratch& scratch, TileView& view) {
  for (int i = pages.first_subtile(base) / 2; i * kTileDepth < wanted; ++i) {
    const int position = base + i * kTileDepth;
    if (pages.block_size() == kTileDepth && pages.context() - position >= kTileDepth) {
      view.v[i] = pages.values(position);
      continue;
    }
    std::uint16_t* joined = scratch.pages.v + i * kTileDepth * dim;
    pages.join_values(position, joined, kTileDepth);
    view.v[i] = joined;
  }
}

// Scores of 16 rows (or fewer) over four subtiles.
static inline void score_single(const std::uint16_t* queries, int depth, const TileView& view,
                                int subtile, float* scores) {
  const int q_stride = 2 * depth * static_cast<int>(sizeof *queries);
  const int k_stride = view.k_stride * static_cast<int>(sizeof(std::uint16_t));
  const std::uint16_t* const* k = view.k + subtile;
  _tile_zero(0);
  _tile_zero(1);
  _tile_zero(2);
  _tile_zero(3);
  for (int d = 0; d < depth; d += kTileDepth) {
    const int line = d / 2 * view.k_stride;
    _tile_loadd(4, queries + d, q_stride);
    _tile_loadd(5, queries + depth + d, q_stride);
    _tile_loadd(6, k[0] + line, k_stride);
    _tile_loadd(7, k[1] + line, k_stride);
    _tile_dpbf16ps(0, 4, 6);
    _tile_dpbf16ps(0, 5, 6);
    _tile_dpbf16ps(1, 4, 7);
    _tile_dpbf16ps(1, 5, 7);
    _tile_loadd(6, k[2] + line, k_stride);
    _tile_loadd(7, k[3] + line, k_stride);
    _tile_dpbf16ps(2, 4, 6);
    _tile_dpbf16ps(2, 5, 6);
    _tile_dpbf16ps(3, 4, 7);
    _tile_dpbf16ps(3, 5, 7);
  }
  float* target = scores + subtile * kLanes;
  constexpr int stride = kScoreStride * sizeof(float);
  _tile_stored(0, target, stride);
  _tile_stored(1, target + kLanes, stride);
  _tile_stored(2, target + 2 * kLanes, stride);
  _tile_stored(3, target + 3 * kLanes, stride);
}

// Scores of 32 rows over two subtiles: each tile of K is used for both halves.
static inline void score_double(const std::uint16_t* queries, int depth, const TileView& view,
                                int subtile, float* scores) {
  const int q_stride = 2 * depth * static_cast<int>(sizeof *queries);
  const int k_stride = view.k_stride * static_cast<int>(sizeof(std::uint16_t));
  const std::uint16_t* below = queries + kTileRows * 2 * depth;
  _tile_zero(0);
  _tile_zero(1);
  _tile_zero(2);
  _tile_zero(3);
  for (int d = 0; d < depth; d += kTileDepth) {
    const int line = d / 2 * view.k_stride;
    _tile_loadd(6, view.k[subtile] + line, k_stride);
    _tile_loadd(7, view.k[subtile + 1] + line, k_stride);
    for (int plane = 0; plane < 2; ++plane) {
      _tile_loadd(4, queries + plane * depth + d, q_stride);
      _tile_loadd(5, below + plane * depth + d, q_stride);
      _tile_dpbf16ps(0, 4, 6);
      _tile_dpbf16ps(2, 5, 6);
      _tile_dpbf16ps(1, 4, 7);
      _tile_dpbf16ps(3, 5, 7);
    }
  }
  float* target = scores + subtile * kLanes;
  constexpr int stride = kScoreStride * sizeof(float);
  _tile_stored(0, target, stride);
  _tile_stored(1, target + kLanes, stride);
  _tile_stored(2, target + kTileRows * kScoreStride, stride);
  _tile_stored(3, target + kTileRows * kScoreStride + kLanes, stride);
}

// acc of 16 rows (or fewer), N tiles of elements from `column`; N is 1 or 4.
template <int N>
static inline void weigh_single(const std::uint16_t* weights, const TileView& view, int first,
                                int steps, int dim, int column, float* acc, int acc_stride) {
  constexpr int w_stride = kWeightStride * sizeof(std::uint16_t);
  const int v_stride = 2 * dim * static_cast<int>(sizeof(std::uint16_t));
  _tile_zero(0);
  if constexpr (N == 4) {
    _tile_zero(1);
    _tile_zero(2);
    _tile_zero(3);
  }
  for (int step = first; step < steps; ++step) {
    const std::uint16_t* v = view.v[step] + 2 * column;
    _tile_loadd(4, weights + step * kWeightStep, w_stride);
    _tile_loadd(6, v, v_stride);
    _tile_dpbf16ps(0, 4, 6);
    if constexpr (N == 4) {
      _tile_loadd(7, v + 2 * kLanes, v_stride);
      _tile_dpbf16ps(1, 4, 7);
      _tile_loadd(6, v + 4 * kLanes, v_stride);
      _tile_dpbf16ps(2, 4, 6);
      _tile_loadd(7, v + 6 * kLanes, v_stride);
      _tile_dpbf16ps(3, 4, 7);
    }
  }
  const int stride = acc_stride * static_cast<int>(sizeof(float));
  _tile_stored(0, acc + column, stride);
  if constexpr (N == 4) {
    _tile_stored(1, acc + column + kLanes, stride);
    _tile_stored(2, acc + column + 2 * kLanes, stride);
    _tile_stored(3, acc + column + 3 * kLanes, stride);
  }
}

// acc of 32 rows, two tiles of elements from `column`.
static inline void weigh_double(const std::uint16_t* weights, const TileView& view, int first,
                                int steps, int dim, int column, float* acc, int acc_stride) {
  constexpr int w_stride = kWeightStride * sizeof(std::uint16_t);
  const int v_stride = 2 * dim * static_cast<int>(sizeof(std::uint16_t));
  _tile_zero(0);
  _tile_zero(1);
  _tile_zero(2);
  _tile_zero(3);
  for (int step = first; step < steps; ++step) {
    const std::uint16_t* v = view.v[step] + 2 * column;
    const std::uint16_t* w = weights + step * kWeightStep;
    _tile_loadd(4, w, w_stride);
    _tile_loadd(5, w + kTileRows * kWeightStride, w_stride);
    _tile_loadd(6, v, v_stride);
    _tile_loadd(7, v + 2 * kLanes, v_stride);
    _tile_dpbf16ps(0, 4, 6);
    _tile_dpbf16ps(2, 5, 6);
    _tile_dpbf16ps(1, 4, 7);
    _tile_dpbf16ps(3, 5, 7);
  }
  const int stride = acc_stride * static_cast<int>(sizeof(float));
  float* below = acc + kTileRows * acc_stride;
  _tile_stored(0, acc + column, stride);
  _tile_stored(1, acc + column + kLanes, stride);
  _tile_stored(2, below + column, stride);
  _tile_stored(3, below + column + kLanes, stride);
}

// 2^x on [0, 1), fitted for the least relative error: 2^-13.7, where bf16 has 2^-9.
constexpr float kCoarseExp2[4] = {0.999925256f, 0.695833445f, 0.226067215f, 0.0780245811f};

// 2^x for x <= 0; 0 where `keep` has no bit.
static inline __m512 exp2_weights(__mmask16 keep, __m512 x) {
  const __m512 part = _mm512_reduce_ps(x, _MM_FROUND_TO_NEG_INF | _MM_FROUND_NO_EXC);
  __m512 p = _mm512_set1_ps(kCoarseExp2[3]);
  for (int i = 2; i >= 0; --i) p = _mm512_fmadd_ps(p, part, _mm512_set1_ps(kCoarseExp2[i]));
  return _mm512_maskz_scalef_ps(keep, p, x);  // by 2 to the floor of x
}

static inline __mmask16 first_lanes(int count) {
  return static_cast<__mmask16>(count >= kLanes ? 0xffff : count <= 0 ? 0 : (1 << count) - 1);
}

// Scores of one row (to base 2) become weights; the positions that are seen count, the others
// from `begin` up to `padded` (multiples of 32) weigh 0. `stats`: the maximum and the sum.
static inline void softmax_tiles(float* scores, int begin, int padded, Seen seen,
                                 float* stats) {
  const __m512 none = _mm512_set1_ps(-__builtin_inff());
  const int whole = seen.end / kTileDepth * kTileDepth;
  const int head = seen.begin / kTileDepth * kTileDepth, gone = seen.begin - head;
  const auto seen_first = static_cast<__mmask16>(~first_lanes(gone));
  const auto seen_second = static_cast<__mmask16>(~first_lanes(gone - kLanes));
  const bool same = head == whole;  // the window begins among the last positions
  const __mmask16 rest = first_lanes(seen.end - whole) & (same ? seen_first : 0xffff);
  const __mmask16 more = first_lanes(seen.end - whole - kLanes) & (same ? seen_second : 0xffff);
  const __m512 last = _mm512_mask_loadu_ps(none, rest, scores + whole);
  const __m512 after = _mm512_mask_loadu_ps(none, more, scores + whole + kLanes);
  __m512 top = last, other = after;
  int start = head;
  if (gone && !same) {
    top = _mm512_max_ps(_mm512_mask_loadu_ps(none, seen_first, scores + head), top);
    other = _mm512_max_ps(_mm512_mask_loadu_ps(none, seen_second, scores + head + kLanes), other);
    start += kTileDepth;
  }
  for (int i = start; i < whole; i += kTileDepth) {
    top = _mm512_max_ps(_mm512_load_ps(scores + i), top);
    other = _mm512_max_ps(_mm512_load_ps(scores + i + kLanes), other);
  }
  stats[0] = vhmax({_mm512_max_ps(top, other)});
  const __m512 peak = _mm512_set1_ps(stats[0]);
  const __m512bh ones = (__m512bh)_mm512_set1_epi16(0x3f80);
  __m512 sum = _mm512_setzero_ps();
  int i = begin;
  for (; i < head; i += kTileDepth) _mm512_store_ps(scores + i, _mm512_setzero_ps());
  const auto weigh = [&](__mmask16 keep_first, __m512 first, __mmask16 keep_second,
                         __m512 second) {
    first = exp2_weights(keep_first, _mm512_sub_ps(first, peak));
    second = exp2_weights(keep_second, _mm512_sub_ps(second, peak));
    const __m512bh weights = _mm512_cvtne2ps_pbh(second, first);
    _mm512_store_si512(scores + i, (__m512i)weights);
    sum = _mm512_dpbf16_ps(sum, weights, ones);
  };
  if (start > head) {
    weigh(seen_first, _mm512_mask_loadu_ps(none, seen_first, scores + i), seen_second,
          _mm512_mask_loadu_ps(none, seen_second, scores + i + kLanes));
    i += kTileDepth;
  }
  for (; i < whole; i += kTileDepth)
    weigh(0xffff, _mm512_load_ps(scores + i), 0xffff, _mm512_load_ps(scores + i + kLanes));
  if (rest || more) {
    weigh(rest, last, more, after);
    i += kTileDepth;
  }
  for (; i < padded; i += kTileDepth) _mm512_store_ps(scores + i, _mm512_setzero_ps());
  stats[1] = vhsum({sum});
}

// Scores of `count` rows, at most 32, whose tiles are configured for 16 rows, or for
// `count` where that is less.
static void score_tiles(const std::uint16_t* queries, int count, int depth,
                        const TileView& view, int first, int steps, float* scores) {
  finish_writes();
  if (count > kTileRows)
    for (int i = first; i < 2 * steps; i += 2) score_double(queries, depth, view, i, scores);
  else
    for (int i = first; i < 2 * steps; i += 4) score_single(queries, depth, view, i, scores);
}

// acc of the same rows.
static void weigh_tiles(const std::uint16_t* weights, int count, int dim, const TileView& view,
                        int first, int steps, float* acc) {
  const int stride = partial_stride(dim);
  finish_writes();
  int column = 0;
  if (count > kTileRows)
    for (; column + 2 * kLanes <= dim; column += 2 * kLanes)
      weigh_double(weights, view, first, steps, dim, column, acc, stride);
  for (; count <= kTileRows && column + 4 * kLanes <= dim; column += 4 * kLanes)
    weigh_single<4>(weights, view, first, steps, dim, column, acc, stride);
  for (; column < dim; column += kLanes)
    for (int top = 0; top < count; top += kTileRows)
      weigh_single<1>(weights + top * kWeightStride, view, first, steps, dim, column,
                      acc + top * stride, stride);
}

static int tile_rows(int left) {
  return left >= 2 * kTileRows ? 2 * kTileRows : left < kTileRows ? left : kTileRows;
}

static void attend_head_amx(const AttentionArgs& args, const AttentionUnit& unit,
                            const AttentionSlice* slices, int kv_head, void* memory) {
  const UnitRows rows(args, unit, slices);
  const int dim = args.head_dim, stride = partial_stride(dim);
  const AmxScratch scratch(memory, rows.rows(), dim);
  const PageReader pages(args, rows.sequence(), kv_head, rows.from());
  const auto* weights = reinterpret_cast<const std::uint16_t*>(scratch.scores);
  load_query_planes(args, rows, kv_head, scratch);
  int configured = 0;
  for (int chunk = unit.chunk_begin; chunk < unit.chunk_end; ++chunk) {
    const int base = chunk * kChunk, wanted = rows.seen(base);
    TileView view;
    view_keys(pages, base, wanted, dim, scratch, view);
    view_values(pages, base, wanted, dim, scratch, view);
    const bool merge = rows.merges(base), aside = merge || rows.scattered();
    float* all = rows.whole() ? scratch.state : rows.partials(kv_head, chunk);
    const int end_row = rows.end_row(base);
    for (int row = rows.first_row(base), count; row < end_row; row += count) {
      count = tile_rows(end_row - row);
      const int height = count < kTileRows ? count : kTileRows;
      if (height != configured) load_tile_config(TileConfig(configured = height));
      Seen seen[2 * kTileRows];
      rows.seen(base, row, count, seen);
      const int begin = seen[0].begin, first = begin / kTileDepth;
      const int steps = (seen[count - 1].end + kTileDepth - 1) / kTileDepth;
      score_tiles(scratch.queries + row * 2 * scratch.depth, count, scratch.depth, view,
                  first_scored(begin), steps, scratch.scores);
      float* target = aside ? scratch.partial : all + row * stride;
      for (int r = 0; r < count; ++r)
        softmax_tiles(scratch.scores + r * kScoreStride, first * kTileDepth, steps * kTileDepth,
                      seen[r], target + r * stride + dim);
      weigh_tiles(weights, count, dim, view, first, steps, target);
      if (merge) rows.merge(base, row, count, target, scratch.state);
      if (rows.scattered()) rows.scatter(kv_head, chunk, row, count, target);
    }
  }
  if (rows.whole()) finish_slice(args, rows.slice(), kv_head, scratch.state);
}

static void attention_unit_amx(const AttentionArgs& args, const AttentionUnit& unit,
                               const AttentionSlice* slices, void* memory) {
  for (int head = unit.head_begin; head < unit.head_end; ++head)
    attend_head_amx(args, unit, slices, head, memory);
}

}  // namespace trimaran::TRIMARAN_TIER
