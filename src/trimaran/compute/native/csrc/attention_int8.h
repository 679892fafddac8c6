// Attention over an int8 cache, the structure of attention_kernels.h. All products are exact,
// so they may be formed in any order, by any instruction: tiers differ in score_rows_int8 and
// weigh_rows_int8 only, and give the same bits where they have fused multiply-add.
// Included by each tier inside its own compilation unit.
#pragma once

#if defined(__AMX_INT8__)
#include "int_products_amx.h"
#else
#include "int_products_rows.h"
#endif

namespace trimaran::TRIMARAN_TIER {

// Exact scores of one row become weights in 15 bits; the positions that are seen count, the
// others from `first` up to `padded` weigh 0. `scores` is scratch. Maximum and sum of the weights before
// their scales go to `stats`; returns what the weighted sums are to be multiplied with.
static float softmax_int8(const IntView& view, const std::int32_t* sums, float q_scale, Seen seen,
                          int first, int padded, float* scores, std::int8_t* weights,
                          float* stats) {
  const int whole = seen.end / kLanes, rest = seen.end % kLanes, used = whole + (rest ? 1 : 0);
  const int head = seen.begin / kLanes, gone = seen.begin % kLanes;
  const V16 none = vset1(-__builtin_inff()), scale = vset1(q_scale);
  V16 top = none;
  for (int i = head; i < used; ++i) {
    const V16 scales = vmul(vload(view.k_scales + i * kLanes), scale);
    V16 score = vmul(load_scores(sums + i * kLanes), scales);
    if (i == whole) score = vselect_first(rest, score, none);
    if (i == head) score = vselect_first(gone, none, score);
    vstore(scores + i * kLanes, score);
    top = vmax(score, top);
  }
  stats[0] = vhmax(top);
  const V16 peak = vset1(stats[0]);
  V16 sum = vzero(), total = vzero(), most = vzero();
  for (int i = head; i < used; ++i) {
    const V16 weight = vexp2(vsub(vload(scores + i * kLanes), peak));
    sum = vadd(sum, weight);
    V16 scaled = vmul(weight, vload(view.v_scales + i * kLanes));
    if (i == whole) scaled = vselect_first(rest, scaled, vzero());
    if (i == head) scaled = vselect_first(gone, vzero(), scaled);
    vstore(scores + i * kLanes, scaled);
    total = vadd(total, scaled);
    most = vmax(scaled, most);
  }
  stats[1] = vhsum(sum);
  const float largest = vhmax(most), all = vhsum(total);
  const bool zero = !(largest >= kLeastMagnitude);
  const V16 inverse = vset1(zero ? 0.0f : kWeightMax / largest);
  int i = first / kLanes;
  for (; i < head; ++i) store_numbers(vzero(), weights, kChunk, i * kLanes);
  for (; i < used; ++i)
    store_numbers(vmul(vload(scores + i * kLanes), inverse), weights, kChunk, i * kLanes);
  for (; i * kLanes < padded; ++i) store_numbers(vzero(), weights, kChunk, i * kLanes);
  // The largest passes NaN over, the sum doesn't.
  return all != all ? all : zero ? 0.0f : largest / kWeightMax;
}

// `count` rows over one chunk: partials to `target`.
static void chunk_rows_int8(const IntScratch& scratch, const IntView& view, int dim, int row,
                            int count, const Seen* seen, const Prefetch& prefetch,
                            float* target) {
  const int stride = partial_stride(dim);
  const Seen any = {seen[0].begin, seen[count - 1].end};
  float scales[kMaxIntRows];
  score_rows_int8(scratch, view, dim, row, count, any);
  prefetch.next_keys();
  for (int r = 0; r < count; ++r)
    scales[r] = softmax_int8(view, scratch.sums + r * kSumRows * kScoreStride,
                             scratch.q_scales[row + r], seen[r], first_position(any.begin),
                             padded_positions(any.end), scratch.scores, scratch.weights + r * 2 * kChunk,
                             target + r * stride + dim);
  weigh_rows_int8(scratch, view, dim, count, any);
  for (int r = 0; r < count; ++r) {
    const V16 scale = vset1(scales[r]);
    for (int d = 0; d < dim; d += kLanes)
      vstore(target + r * stride + d,
             vmul(load_scores(scratch.sums + r * kSumRows * kScoreStride + d), scale));
  }
}

static void attend_head_int8(const AttentionArgs& args, const AttentionUnit& unit,
                             const AttentionSlice* slices, int kv_head, void* memory) {
  const UnitRows rows(args, unit, slices);
  const int dim = args.head_dim, stride = partial_stride(dim);
  const IntScratch scratch(memory, rows.rows(), dim);
  const IntPages pages(args, rows.sequence(), kv_head, rows.from());
  load_int_queries(args, rows, kv_head, scratch);
  IntRowBlocks blocks;
  for (int chunk = unit.chunk_begin; chunk < unit.chunk_end; ++chunk) {
    const int base = chunk * kChunk, wanted = rows.seen(base);
    const Prefetch prefetch(unit, pages, kv_head, chunk, rows.rows());
    prefetch.values();
    IntView view;
    pages.view(base, wanted, joins_keys(dim), scratch, view);
    join_values(scratch, view, dim, pages.first_subtile(base) * kLanes, wanted);
    const bool merge = rows.merges(base), aside = merge || rows.scattered();
    float* all = rows.whole() ? scratch.state : rows.partials(kv_head, chunk);
    const int end_row = rows.end_row(base);
    for (int row = rows.first_row(base), count; row < end_row; row += count) {
      count = blocks.next(end_row - row);
      Seen seen[kMaxIntRows];
      rows.seen(base, row, count, seen);
      float* target = aside ? scratch.partial : all + row * stride;
      chunk_rows_int8(scratch, view, dim, row, count, seen, prefetch, target);
      if (merge) rows.merge(base, row, count, target, scratch.state);
      if (rows.scattered()) rows.scatter(kv_head, chunk, row, count, target);
    }
  }
  if (rows.whole()) finish_slice(args, rows.slice(), kv_head, scratch.state);
}

static void attention_unit_int8(const AttentionArgs& args, const AttentionUnit& unit,
                                const AttentionSlice* slices, void* memory) {
  for (int head = unit.head_begin; head < unit.head_end; ++head)
    attend_head_int8(args, unit, slices, head, memory);
}

// The tier's functions, by the format of the cache.
static void write_kv_as(const AttentionArgs& args, int row_begin, int row_end) {
  const bool int8 = args.kv == KvFormat::kInt8;
  (int8 ? write_kv_int8 : write_kv)(args, row_begin, row_end);
}

static void attention_unit_as(const AttentionArgs& args, const AttentionUnit& unit,
                              const AttentionSlice* slices, void* memory) {
#if defined(__AMX_INT8__)
  constexpr auto bf16 = attention_unit_amx;
#else
  constexpr auto bf16 = attention_unit;
#endif
  (args.kv == KvFormat::kInt8 ? attention_unit_int8 : bf16)(args, unit, slices, memory);
}

}  // namespace trimaran::TRIMARAN_TIER
