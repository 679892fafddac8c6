// Attention over float32 vectors: queries and weights stay float32, K and V are widened
// from bf16 as they are read. Included by each tier inside its own compilation unit.
//
//   scores    lanes are positions; a block of rows shares each widened K
//   softmax   exact maximum over the chunk, exp, sum by lane and then over lanes
//   weigh     lanes are elements of the head; a block of rows shares each widened V
#pragma once

#include "attention_pages.h"
#include "elementwise.h"
#include "simd.h"

namespace trimaran::TRIMARAN_TIER {

constexpr int kScoreStride = kChunk + kLanes;  // floats; spreads rows over cache sets

// Register blocks: rows, vectors of positions, vectors of elements.
#if defined(__AVX512F__)
constexpr int kRowBlock = 6, kPositionVectors = 2, kElementVectors = 4;
#elif defined(__AVX2__)
constexpr int kRowBlock = 4, kPositionVectors = 1, kElementVectors = 2;
#else
constexpr int kRowBlock = 2, kPositionVectors = 1, kElementVectors = 1;
#endif

constexpr int kFewRows = 16;  // of a unit: reading K and V costs more than using them
constexpr float kLog2E = 1.44269504f;

// Partials of one row: head_dim elements, the maximum, the sum, padding.
static inline int partial_stride(int head_dim) { return head_dim + kLanes; }

// s[r][i] = sum over d of q[r][d] * k[i][d]: even d and odd d in two chains, then added.
template <int R, int V>
static inline void score_block(const float* q, int dim, const std::uint16_t* const* k,
                               int k_stride, float* scores) {
  V16 even[R][V], odd[R][V];
  for (int r = 0; r < R; ++r)
    for (int v = 0; v < V; ++v) even[r][v] = odd[r][v] = vzero();
  for (int d = 0; d < dim; d += 2) {
    V16 k_even[V], k_odd[V];
    for (int v = 0; v < V; ++v) vload_bf16_pairs(k[v] + d / 2 * k_stride, k_even[v], k_odd[v]);
    for (int r = 0; r < R; ++r) {
      const V16 q_even = vset1(q[r * dim + d]), q_odd = vset1(q[r * dim + d + 1]);
      for (int v = 0; v < V; ++v) {
        even[r][v] = vfma(q_even, k_even[v], even[r][v]);
        odd[r][v] = vfma(q_odd, k_odd[v], odd[r][v]);
      }
    }
  }
  for (int r = 0; r < R; ++r)
    for (int v = 0; v < V; ++v)
      vstore(scores + r * kScoreStride + v * kLanes, vadd(even[r][v], odd[r][v]));
}

template <int R>
static void score_rows(const float* q, int dim, const ChunkView& view, int subtiles,
                       float* scores) {
  int i = 0;
  for (; i + kPositionVectors <= subtiles; i += kPositionVectors)
    score_block<R, kPositionVectors>(q, dim, view.k + i, view.k_stride, scores + i * kLanes);
  for (; i < subtiles; ++i)
    score_block<R, 1>(q, dim, view.k + i, view.k_stride, scores + i * kLanes);
}

// acc[r][n * 16 ..] = sum over positions of weight[r][position] * v[position][..].
template <int R, int N>
static inline void weigh_block(const float* weights, const ChunkView& view, int subtiles,
                               int dim, int column, float* acc, int acc_stride) {
  V16 sum[R][N];
  for (int r = 0; r < R; ++r)
    for (int n = 0; n < N; ++n) sum[r][n] = vzero();
  for (int i = 0; i < subtiles; ++i) {
    const std::uint16_t* v = view.v[i] + 2 * column;
    const float* w = weights + i * kLanes;
    for (int j = 0; j < kLanes; j += 2, v += 2 * dim) {
      V16 first[N], second[N];
      for (int n = 0; n < N; ++n) vload_bf16_pairs(v + 2 * kLanes * n, first[n], second[n]);
      for (int r = 0; r < R; ++r) {
        const V16 w_first = vset1(w[r * kScoreStride + j]);
        const V16 w_second = vset1(w[r * kScoreStride + j + 1]);
        for (int n = 0; n < N; ++n)
          sum[r][n] = vfma(w_second, second[n], vfma(w_first, first[n], sum[r][n]));
      }
    }
  }
  for (int r = 0; r < R; ++r)
    for (int n = 0; n < N; ++n)
      vstore(acc + r * acc_stride + column + n * kLanes, sum[r][n]);
}

template <int R>
static void weigh_rows(const float* weights, const ChunkView& view, int subtiles, int dim,
                       float* acc, int acc_stride) {
  int column = 0;
  for (; column + kLanes * kElementVectors <= dim; column += kLanes * kElementVectors)
    weigh_block<R, kElementVectors>(weights, view, subtiles, dim, column, acc, acc_stride);
  for (; column < dim; column += kLanes)
    weigh_block<R, 1>(weights, view, subtiles, dim, column, acc, acc_stride);
}

// Scores of one row become weights; the first `valid` positions (>= 1) count, the others
// weigh 0. Returns the maximum and the sum in `stats`.
static void softmax_row(float* scores, int subtiles, int valid, float* stats) {
  const V16 none = vset1(-__builtin_inff());
  const int whole = valid / kLanes, rest = valid % kLanes;
  V16 top = none;
  for (int i = 0; i < whole; ++i) top = vmax(vload(scores + i * kLanes), top);
  if (rest) {
    float* last = scores + whole * kLanes;
    const V16 masked = vselect_first(rest, vload(last), none);
    vstore(last, masked);
    top = vmax(masked, top);
  }
  stats[0] = vhmax(top);
  const V16 peak = vset1(stats[0]);
  const int used = whole + (rest ? 1 : 0);
  V16 sum = vzero();
  for (int i = 0; i < used; ++i) {
    const V16 weight = vexp2(vsub(vload(scores + i * kLanes), peak));
    vstore(scores + i * kLanes, weight);
    sum = vadd(sum, weight);
  }
  for (int i = used; i < subtiles; ++i) vstore(scores + i * kLanes, vzero());
  stats[1] = vhsum(sum);
}

// state <- state merged with the partial of a later chunk.
static void merge_partial(float* state, const float* partial, int dim) {
  const V16 old_peak = vset1(state[dim]), new_peak = vset1(partial[dim]);
  const V16 peak = vmax(old_peak, new_peak);
  const V16 keep = vexp2(vsub(old_peak, peak)), add = vexp2(vsub(new_peak, peak));
  for (int d = 0; d < dim; d += kLanes)
    vstore(state + d, vfma(vload(state + d), keep, vmul(vload(partial + d), add)));
  float lanes[3][kLanes];
  vstore(lanes[0], keep);
  vstore(lanes[1], add);
  vstore(lanes[2], peak);
  state[dim + 1] = state[dim + 1] * lanes[0][0] + partial[dim + 1] * lanes[1][0];
  state[dim] = lanes[2][0];
}

static inline std::size_t query_offset(const AttentionArgs& args, int row, int kv_head) {
  const int group = args.heads / args.kv_heads;
  return (static_cast<std::size_t>(row) * args.heads + kv_head * group) * args.head_dim;
}

// Where elements `element` .. + 16 of a row of `out_bf16` lie.
static inline std::uint16_t* rounded_output(const AttentionArgs& args, int row, int element) {
  const int steps = (args.heads * args.head_dim + kStep - 1) / kStep;
  std::uint8_t* step = args.out_bf16 + activation_bytes(row, element / kStep, steps);
  return reinterpret_cast<std::uint16_t*>(step) + element % kStep;
}

// out = acc / sum, of one head of one row. Adding 0 makes every zero +0: masked terms may
// turn a -0 into +0, and how many of them a row meets depends on its company.
static void finish_row(const AttentionArgs& args, const float* state, int row, int head) {
  const int dim = args.head_dim, first = head * dim;
  const V16 inverse = vset1(1.0f / state[dim + 1]);
  const auto element = [&](int d) { return vadd(vmul(vload(state + d), inverse), vzero()); };
  if (!args.out_bf16) {
    float* out = args.out + query_offset(args, row, 0) + first;
    for (int d = 0; d < dim; d += kLanes) vstore(out + d, element(d));
    return;
  }
  for (int d = 0; d < dim; d += kLanes)
    bf16_lanes(element(d), rounded_output(args, row, first + d));
  const int end = first + dim;
  if (head + 1 == args.heads && end % kStep) bf16_lanes(vzero(), rounded_output(args, row, end));
}

// Where the parts of a thread's scratch memory lie.
struct UnitScratch {
  float* state;    // [unit rows][partial_stride]
  float* queries;  // [unit rows][head_dim], scaled
  float* partial;  // [kRowBlock][partial_stride]
  float* scores;   // [kRowBlock][kScoreStride]
  PageScratch pages;

  UnitScratch(void* memory, int rows, int dim) {
    state = static_cast<float*>(memory);
    queries = state + rows * partial_stride(dim);
    partial = queries + rows * dim;
    scores = partial + kRowBlock * partial_stride(dim);
    pages.k = reinterpret_cast<std::uint16_t*>(scores + kRowBlock * kScoreStride);
    pages.v = pages.k + kChunk * dim;
  }
};

// With few rows the time goes into reading the cache. Fetches V while K is used, and then
// the K that is read next, of the next chunk or of the next head, while V is used.
class Prefetch {
 public:
  Prefetch(const AttentionUnit& unit, const PageReader& pages, int kv_head, int chunk, int rows)
      : pages_(pages), base_(chunk * kChunk), next_base_(-1), next_head_(kv_head) {
    if (rows > kFewRows)
      base_ = -1;
    else if (chunk + 1 < unit.chunk_end)
      next_base_ = base_ + kChunk;
    else if (++next_head_ < unit.head_end)
      next_base_ = unit.chunk_begin * kChunk;
  }

  void values() const {
    if (base_ >= 0) pages_.prefetch_values(base_);
  }
  void next_keys() const {
    if (next_base_ >= 0) pages_.prefetch_keys(next_head_, next_base_);
  }

 private:
  const PageReader& pages_;
  int base_, next_base_, next_head_;
};

// A block of R rows over one chunk: partials to `target`.
template <int R>
static void chunk_rows(const float* queries, int dim, const ChunkView& view, const int* valid,
                       const Prefetch& prefetch, float* scores, float* target) {
  const int subtiles = (valid[R - 1] + kLanes - 1) / kLanes;
  const int stride = partial_stride(dim);
  score_rows<R>(queries, dim, view, subtiles, scores);
  prefetch.next_keys();
  for (int r = 0; r < R; ++r)
    softmax_row(scores + r * kScoreStride, subtiles, valid[r], target + r * stride + dim);
  weigh_rows<R>(scores, view, subtiles, dim, target, stride);
}

// Any number of rows up to kRowBlock: the same arithmetic, another register block.
template <int R = kRowBlock>
static void chunk_rows_of(int rows, const float* queries, int dim, const ChunkView& view,
                          const int* valid, const Prefetch& prefetch, float* scores,
                          float* target) {
  if constexpr (R > 1) {
    if (rows < R) {
      chunk_rows_of<R - 1>(rows, queries, dim, view, valid, prefetch, scores, target);
      return;
    }
  }
  chunk_rows<R>(queries, dim, view, valid, prefetch, scores, target);
}

// queries[i] = scale * log2(e) * q of the unit's rows, in order of (token, head of the group).
static void load_queries(const AttentionArgs& args, const AttentionUnit& unit, int kv_head,
                         float* queries) {
  const int width = args.heads / args.kv_heads * args.head_dim;
  const V16 scale = vset1(args.scale * kLog2E);
  for (int row = unit.row_begin; row < unit.row_end; ++row) {
    const float* q = args.q + query_offset(args, row, kv_head);
    for (int d = 0; d < width; d += kLanes) vstore(queries + d, vmul(vload(q + d), scale));
    queries += width;
  }
}

static void finish_unit(const AttentionArgs& args, int kv_head, int row_begin, int row_end,
                        const float* state) {
  const int group = args.heads / args.kv_heads, dim = args.head_dim;
  for (int row = row_begin; row < row_end; ++row)
    for (int g = 0; g < group; ++g, state += partial_stride(dim))
      finish_row(args, state, row, kv_head * group + g);
}

// Partials of all rows of the unit for one chunk, where chunks are merged by merge_unit.
static inline float* partials(const AttentionArgs& args, const AttentionUnit& unit, int chunk) {
  const std::int64_t rows =
      static_cast<std::int64_t>(unit.row_end - unit.row_begin) * (args.heads / args.kv_heads);
  return args.workspace + unit.partial + chunk * rows * partial_stride(args.head_dim);
}

// How many positions of a chunk each of `count` rows from `row` sees; `offset` is the
// position of the unit's first token relative to the chunk.
static inline void valid_positions(int offset, int row, int count, int group, int* valid) {
  for (int r = 0; r < count; ++r) {
    const int seen = offset + (row + r) / group + 1;
    valid[r] = seen < kChunk ? seen : kChunk;
  }
}

static void attend_head(const AttentionArgs& args, const AttentionUnit& unit, int kv_head,
                        void* memory) {
  const int group = args.heads / args.kv_heads, dim = args.head_dim;
  const int rows = (unit.row_end - unit.row_begin) * group, stride = partial_stride(dim);
  const int first = args.positions[unit.row_begin], last = args.positions[unit.row_end - 1];
  const UnitScratch scratch(memory, rows, dim);
  const PageReader pages(args, unit.sequence, kv_head);
  load_queries(args, unit, kv_head, scratch.queries);
  for (int chunk = unit.chunk_begin; chunk < unit.chunk_end; ++chunk) {
    const int base = chunk * kChunk;
    const int wanted = last + 1 - base < kChunk ? last + 1 - base : kChunk;
    const ChunkView view = pages.view(base, wanted, scratch.pages);
    const Prefetch prefetch(unit, pages, kv_head, chunk, rows);
    prefetch.values();
    const bool merge = unit.partial < 0 && chunk > 0;
    float* target = unit.partial < 0 ? scratch.state : partials(args, unit, chunk);
    // Rows before the chunk have no part in it.
    for (int row = base > first ? (base - first) * group : 0; row < rows; row += kRowBlock) {
      const int count = rows - row < kRowBlock ? rows - row : kRowBlock;
      int valid[kRowBlock];
      valid_positions(first - base, row, count, group, valid);
      chunk_rows_of(count, scratch.queries + row * dim, dim, view, valid, prefetch, scratch.scores,
                    merge ? scratch.partial : target + row * stride);
      for (int r = 0; merge && r < count; ++r)
        merge_partial(scratch.state + (row + r) * stride, scratch.partial + r * stride, dim);
    }
  }
  if (unit.partial < 0)
    finish_unit(args, kv_head, unit.row_begin, unit.row_end, scratch.state);
}

static void attention_unit(const AttentionArgs& args, const AttentionUnit& unit,
                           void* memory) {
  for (int head = unit.head_begin; head < unit.head_end; ++head)
    attend_head(args, unit, head, memory);
}

static void merge_unit(const AttentionArgs& args, const AttentionMerge& merge, void*) {
  const int group = args.heads / args.kv_heads, dim = args.head_dim;
  const int rows = (merge.row_end - merge.row_begin) * group, stride = partial_stride(dim);
  float* state = args.workspace + merge.partial;
  for (int row = 0; row < rows; ++row) {
    const int chunks = args.positions[merge.row_begin + row / group] / kChunk + 1;
    for (int chunk = 1; chunk < chunks; ++chunk)
      merge_partial(state + row * stride,
                    state + (static_cast<std::int64_t>(chunk) * rows + row) * stride, dim);
  }
  finish_unit(args, merge.kv_head, merge.row_begin, merge.row_end, state);
}

}  // namespace trimaran::TRIMARAN_TIER
