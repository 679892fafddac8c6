// Products over an int8 cache by blocks of rows in vector registers.
#pragma once

#include "int8_pages.h"

namespace trimaran::TRIMARAN_TIER {

constexpr int kSumRows = 1;  // of `sums`, a query row

static inline V16 load_scores(const std::int32_t* sums) { return vload_int(sums); }

// Positions from which, and to which, weights of 0 are stored.
static inline int first_position(int begin) { return begin / kLanes * kLanes; }
static inline int padded_positions(int seen) {
  return (seen + kLanes - 1) / kLanes * kLanes;
}

static inline bool joins_keys(int) { return false; }
static inline void join_values(const IntScratch&, const IntView&, int, int, int) {}

class IntRowBlocks {
 public:
  int next(int left) const { return left < kIntRowBlock ? left : kIntRowBlock; }
};

template <int R, int N>
static inline void score_columns(const IntScratch& scratch, const IntView& view, int dim, int row,
                                 int subtile) {
  const auto line = [&](int i, int n) { return view.k[subtile + n] + i * view.k_stride; };
  products<true, R, N>(scratch.queries + row * 2 * scratch.depth, scratch.q_starts + 2 * row,
                       scratch.depth, dim / kLineOf, line, scratch.sums + subtile * kLanes);
}

template <int R = kIntRowBlock>
static void score_rows_int8(const IntScratch& scratch, const IntView& view, int dim, int row,
                            int count, Seen seen) {
  if constexpr (R > 1) {
    if (count < R) return score_rows_int8<R - 1>(scratch, view, dim, row, count, seen);
  }
  const int subtiles = (seen.end + kLanes - 1) / kLanes;
  int i = seen.begin / kLanes;
  for (; i + kIntColumns <= subtiles; i += kIntColumns)
    score_columns<R, kIntColumns>(scratch, view, dim, row, i);
  for (; i < subtiles; ++i) score_columns<R, 1>(scratch, view, dim, row, i);
}

template <int R, int N>
static inline void weigh_columns(const IntScratch& scratch, const IntView& view, int first,
                                 int lines, int column) {
  const auto line = [&](int i, int n) {
    return view.v[first + i] + kLineOf * (column + n * kLanes);
  };
  products<false, R, N>(scratch.weights + kNumberBytes * kLineOf * first, nullptr, kChunk,
                        lines - first, line, scratch.sums + column);
}

template <int R = kIntRowBlock>
static void weigh_rows_int8(const IntScratch& scratch, const IntView& view, int dim, int count,
                            Seen seen) {
  if constexpr (R > 1) {
    if (count < R) return weigh_rows_int8<R - 1>(scratch, view, dim, count, seen);
  }
  const int lines = (seen.end + kLineOf - 1) / kLineOf;
  const int first = seen.begin / kLanes * (kLanes / kLineOf);
  int column = 0;
  for (; column + kIntColumns * kLanes <= dim; column += kIntColumns * kLanes)
    weigh_columns<R, kIntColumns>(scratch, view, first, lines, column);
  for (; column < dim; column += kLanes) weigh_columns<R, 1>(scratch, view, first, lines, column);
}

}  // namespace trimaran::TRIMARAN_TIER
