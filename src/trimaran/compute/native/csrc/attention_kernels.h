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

// Subtiles first .. subtiles.
template <int R>
static void score_rows(const float* q, int dim, const ChunkView& view, int first, int subtiles,
                       float* scores) {
  int i = first;
  for (; i + kPositionVectors <= subtiles; i += kPositionVectors)
    score_block<R, kPositionVectors>(q, dim, view.k + i, view.k_stride, scores + i * kLanes);
  for (; i < subtiles; ++i)
    score_block<R, 1>(q, dim, view.k + i, view.k_stride, scores + i * kLanes);
}

// acc[r][n * 16 ..] = sum over positions of weight[r][position] * v[position][..].
template <int R, int N>
static inline void weigh_block(const float* weights, const ChunkView& view, int first,
                               int subtiles, int dim, int column, float* acc, int acc_stride) {
  V16 sum[R][N];
  for (int r = 0; r < R; ++r)
    for (int n = 0; n < N; ++n) sum[r][n] = vzero();
  for (int i = first; i < subtiles; ++i) {
    const std::uint16_t* v = view.v[i] + 2 * column;
    const float* w = weights + i * kLanes;
    for (int j = 0; j < kLanes; j += 2, v += 2 * dim) {
      V16 even[N], odd[N];
      for (int n = 0; n < N; ++n) vload_bf16_pairs(v + 2 * kLanes * n, even[n], odd[n]);
      for (int r = 0; r < R; ++r) {
        const V16 w_first = vset1(w[r * kScoreStride + j]);
        const V16 w_second = vset1(w[r * kScoreStride + j + 1]);
        for (int n = 0; n < N; ++n)
          sum[r][n] = vfma(w_second, odd[n], vfma(w_first, even[n], sum[r][n]));
      }
    }
  }
  for (int r = 0; r < R; ++r)
    for (int n = 0; n < N; ++n)
      vstore(acc + r * acc_stride + column + n * kLanes, sum[r][n]);
}

template <int R>
static void weigh_rows(const float* weights, const ChunkView& view, int first, int subtiles,
                       int dim, float* acc, int acc_stride) {
  int column = 0;
  for (; column + kLanes * kElementVectors <= dim; column += kLanes * kElementVectors)
    weigh_block<R, kElementVectors>(weights, view, first, subtiles, dim, column, acc,
                                    acc_stride);
  for (; column < dim; column += kLanes)
    weigh_block<R, 1>(weights, view, first, subtiles, dim, column, acc, acc_stride);
}

// Positions of a chunk that a row sees: begin < end.
struct Seen {
  int begin, end;
};

// Scores of one row, of subtiles first .. subtiles, become weights; the positions that are
// seen count, the others weigh 0. Returns the maximum and the sum in `stats`.
static void softmax_row(float* scores, int first, int subtiles, Seen seen, float* stats) {
  const V16 none = vset1(-__builtin_inff());
  const int head = seen.begin / kLanes, gone = seen.begin % kLanes;
  const int whole = seen.end / kLanes, rest = seen.end % kLanes;
  for (int i = first; i < head; ++i) vstore(scores + i * kLanes, vzero());
  if (gone) {
    float* begin = scores + head * kLanes;
    vstore(begin, vselect_first(gone, none, vload(begin)));
  }
  V16 top = none;
  for (int i = head; i < whole; ++i) top = vmax(vload(scores + i * kLanes), top);
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
  for (int i = head; i < used; ++i) {
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

static inline std::size_t query_offset(const AttentionArgs& args, int row, int head) {
  return (static_cast<std::size_t>(row) * args.heads + head) * args.head_dim;
}

// Partials of all chunks of a slice, of one KV head.
static inline float* slice_partials(const AttentionArgs& args, const AttentionSlice& slice,
                                    int kv_head) {
  const std::int64_t rows = (slice.row_end - slice.row_begin) * (args.heads / args.kv_heads);
  const std::int64_t chunks =
      args.positions[slice.row_end - 1] / kChunk + 1 - first_chunk(args, slice.row_begin);
  return args.workspace + slice.partial +
         kv_head * chunks * rows * partial_stride(args.head_dim);
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
    float* out = args.out + query_offset(args, row, head);
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
  float* partial;  // [kRowBlock][partial_stride]: of rows in hand
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

// The rows of a unit, for one KV head: those of all its slices, in order.
class UnitRows {
 public:
  UnitRows(const AttentionArgs& args, const AttentionUnit& unit, const AttentionSlice* slices)
      : args_(args),
        slices_(slices + unit.slice_begin),
        count_(unit.slice_end - unit.slice_begin),
        group_(args.heads / args.kv_heads) {
    for (int i = 0; i < count_; ++i) rows_ += rows_of(slices_[i]);
    // Rows of several sequences see all of the unit's chunks, as if they lay behind them.
    first_ = count_ > 1 ? unit.chunk_end * kChunk : args.positions[slices_->row_begin];
    last_ = count_ > 1 ? first_ : args.positions[slices_->row_end - 1];
    from_ = first_seen(args.window, first_);
  }

  int rows() const { return rows_; }
  int sequence() const { return slices_->sequence; }
  // Whether the unit has all chunks of its rows, and finishes them.
  bool whole() const { return slices_->partial < 0; }
  const AttentionSlice& slice() const { return *slices_; }

  // The first position that any row sees.
  int from() const { return from_; }
  // Of the chunk at `base`: one behind the last position that any row sees.
  int seen(int base) const { return last_ + 1 - base < kChunk ? last_ + 1 - base : kChunk; }
  // The first row that sees the chunk.
  int first_row(int base) const { return base > first_ ? (base - first_) * group_ : 0; }
  // One behind the last row that sees the chunk.
  int end_row(int base) const {
    if (args_.window == 0) return rows_;
    const int tokens = base + kChunk + args_.window - 1 - first_;
    return tokens < rows_ / group_ ? tokens * group_ : rows_;
  }
  // What of the chunk each of `count` rows from `row` sees; begins and ends ascend.
  void seen(int base, int row, int count, Seen* seen) const {
    for (int r = 0; r < count; ++r) {
      const int position = first_ + (row + r) / group_;
      const int begin = first_seen(args_.window, position) - base, end = position - base + 1;
      seen[r] = {begin > 0 ? begin : 0, end < kChunk ? end : kChunk};
    }
  }
  // Whether the unit has had a chunk before the one at `base` that it merges this one with.
  bool merges(int base) const { return whole() && base > from_; }
  // Partials of rows row .. row + count, of the chunk at `base`, go from `source` into their
  // state: merged, or as they are where it is the first chunk that a row sees.
  void merge(int base, int row, int count, const float* source, float* state) const {
    const int stride = partial_stride(args_.head_dim);
    state += row * stride;
    for (int r = 0; r < count; ++r, source += stride, state += stride) {
      if (first_seen(args_.window, first_ + (row + r) / group_) < base)
        merge_partial(state, source, args_.head_dim);
      else
        std::memcpy(state, source, stride * sizeof(float));
    }
  }

  // Calls use(query, row) for each row, with its query.
  template <class Use>
  void queries(int kv_head, Use use) const {
    int row = 0;
    for (int i = 0; i < count_; ++i)
      for (int token = slices_[i].row_begin; token < slices_[i].row_end; ++token) {
        const float* q = args_.q + query_offset(args_, token, kv_head * group_);
        for (int g = 0; g < group_; ++g, q += args_.head_dim) use(q, row++);
      }
  }

  // Partials of the first slice's rows for one chunk, row after row.
  float* partials(int kv_head, int chunk) const { return partials(*slices_, kv_head, chunk); }

  // Partials of rows row .. row + count go from `source` to where their slices have them.
  void scatter(int kv_head, int chunk, int row, int count, const float* source) const {
    const int stride = partial_stride(args_.head_dim);
    for (int i = 0, begin = 0; i < count_ && begin < row + count; ++i) {
      const int end = begin + rows_of(slices_[i]);
      const int from = begin > row ? begin : row, to = end < row + count ? end : row + count;
      if (from < to)
        std::memcpy(partials(slices_[i], kv_head, chunk) + (from - begin) * stride,
                    source + (from - row) * stride, (to - from) * stride * sizeof(float));
      begin = end;
    }
  }
  bool scattered() const { return count_ > 1; }

 private:
  int rows_of(const AttentionSlice& slice) const {
    return (slice.row_end - slice.row_begin) * group_;
  }
  float* partials(const AttentionSlice& slice, int kv_head, int chunk) const {
    return slice_partials(args_, slice, kv_head) +
           static_cast<std::int64_t>(chunk - first_chunk(args_, slice.row_begin)) *
               rows_of(slice) * partial_stride(args_.head_dim);
  }

  const AttentionArgs& args_;
  const AttentionSlice* slices_;
  const int count_, group_;
  int rows_ = 0, first_, last_, from_;
};

// With few rows the time goes into reading the cache. Fetches V while K is used, and then
// the K that is read next, of the next chunk or of the next head, while V is used.
class Prefetch {
 public:
  Prefetch(const AttentionUnit& unit, const PageTable& pages, int kv_head, int chunk, int rows)
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
  const PageTable& pages_;
  int base_, next_base_, next_head_;
};

// A block of R rows over one chunk: partials to `target`.
template <int R>
static void chunk_rows(const float* queries, int dim, const ChunkView& view, const Seen* seen,
                       const Prefetch& prefetch, float* scores, float* target) {
  const int first = seen[0].begin / kLanes, subtiles = (seen[R - 1].end + kLanes - 1) / kLanes;
  const int stride = partial_stride(dim);
  score_rows<R>(queries, dim, view, first, subtiles, scores);
  prefetch.next_keys();
  for (int r = 0; r < R; ++r)
    softmax_row(scores + r * kScoreStride, first, subtiles, seen[r], target + r * stride + dim);
  weigh_rows<R>(scores, view, first, subtiles, dim, target, stride);
}

// Any number of rows up to kRowBlock: the same arithmetic, another register block.
template <int R = kRowBlock>
static void chunk_rows_of(int rows, const float* queries, int dim, const ChunkView& view,
                          const Seen* seen, const Prefetch& prefetch, float* scores,
                          float* target) {
  if constexpr (R > 1) {
    if (rows < R) {
      chunk_rows_of<R - 1>(rows, queries, dim, view, seen, prefetch, scores, target);
      return;
    }
  }
  chunk_rows<R>(queries, dim, view, seen, prefetch, scores, target);
}

// All heads of a slice's group: one row of `state` each.
static void finish_slice(const AttentionArgs& args, const AttentionSlice& slice, int kv_head,
                         const float* state) {
  const int group = args.heads / args.kv_heads;
  for (int row = slice.row_begin; row < slice.row_end; ++row)
    for (int g = 0; g < group; ++g, state += partial_stride(args.head_dim))
      finish_row(args, state, row, kv_head * group + g);
}

static void attend_head(const AttentionArgs& args, const AttentionUnit& unit,
                        const AttentionSlice* slices, int kv_head, void* memory) {
  const UnitRows rows(args, unit, slices);
  const int dim = args.head_dim, stride = partial_stride(dim);
  const UnitScratch scratch(memory, rows.rows(), dim);
  const PageReader pages(args, rows.sequence(), kv_head, rows.from());
  const V16 scale = vset1(args.scale * kLog2E);
  rows.queries(kv_head, [&](const float* q, int row) {
    for (int d = 0; d < dim; d += kLanes)
      vstore(scratch.queries + row * dim + d, vmul(vload(q + d), scale));
  });
  for (int chunk = unit.chunk_begin; chunk < unit.chunk_end; ++chunk) {
    const int base = chunk * kChunk;
    const ChunkView view = pages.view(base, rows.seen(base), scratch.pages);
    const Prefetch prefetch(unit, pages, kv_head, chunk, rows.rows());
    prefetch.values();
    const bool merge = rows.merges(base), aside = merge || rows.scattered();
    float* target = rows.whole() ? scratch.state : rows.partials(kv_head, chunk);
    const int end_row = rows.end_row(base);
    for (int row = rows.first_row(base); row < end_row; row += kRowBlock) {
      const int count = end_row - row < kRowBlock ? end_row - row : kRowBlock;
      Seen seen[kRowBlock];
      rows.seen(base, row, count, seen);
      chunk_rows_of(count, scratch.queries + row * dim, dim, view, seen, prefetch, scratch.scores,
                    aside ? scratch.partial : target + row * stride);
      if (merge) rows.merge(base, row, count, scratch.partial, scratch.state);
      if (rows.scattered()) rows.scatter(kv_head, chunk, row, count, scratch.partial);
    }
  }
  if (rows.whole()) finish_slice(args, rows.slice(), kv_head, scratch.state);
}

static void attention_unit(const AttentionArgs& args, const AttentionUnit& unit,
                           const AttentionSlice* slices, void* memory) {
  for (int head = unit.head_begin; head < unit.head_end; ++head)
    attend_head(args, unit, slices, head, memory);
}

static void merge_unit(const AttentionArgs& args, const AttentionMerge& merge, void*) {
  const AttentionSlice& slice = merge.slice;
  const int group = args.heads / args.kv_heads, dim = args.head_dim;
  const int rows = (slice.row_end - slice.row_begin) * group, stride = partial_stride(dim);
  float* state = slice_partials(args, slice, merge.kv_head);
  const int begin = first_chunk(args, slice.row_begin);
  for (int row = 0; row < rows; ++row) {
    const int token = slice.row_begin + row / group;
    const int first = first_chunk(args, token) - begin;
    const int chunks = args.positions[token] / kChunk + 1 - begin;
    const auto partial = [&](int chunk) {
      return state + (static_cast<std::int64_t>(chunk) * rows + row) * stride;
    };
    if (first > 0) std::memcpy(partial(0), partial(first), stride * sizeof(float));
    for (int chunk = first + 1; chunk < chunks; ++chunk)
      merge_partial(partial(0), partial(chunk), dim);
  }
  finish_slice(args, slice, merge.kv_head, state);
}

}  // namespace trimaran::TRIMARAN_TIER
