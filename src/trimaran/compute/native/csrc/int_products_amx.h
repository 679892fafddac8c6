// Products over an int8 cache on AMX tiles. The two planes of a row of numbers are two rows of
// a tile, so that 8 query rows fill one.
//
//   tiles   0-3  sums     [plane rows][16] int32
//           4 5  queries or weights [plane rows][64] bytes, of one or two blocks of rows
//           6 7  K: 64 elements x 16 positions, or V: 64 positions x 16 elements
#pragma once

#include "attention_amx.h"
#include "int8_pages.h"

namespace trimaran::TRIMARAN_TIER {

constexpr int kSumRows = 2;       // of `sums`, a query row: its planes
constexpr int kIntTileRows = 8;   // query rows of a tile
constexpr int kSumStride = kScoreStride * sizeof(std::int32_t);
static_assert(kMaxIntRows == 2 * kIntTileRows, "rows in hand fill two tiles");

static inline V16 load_scores(const std::int32_t* sums) {
  const __m512i high = _mm512_loadu_si512(sums), low = _mm512_loadu_si512(sums + kScoreStride);
  return {_mm512_cvtepi32_ps(_mm512_add_epi32(_mm512_slli_epi32(high, 7), low))};
}

static inline int first_position(int begin) { return begin / kIntDepth * kIntDepth; }
static inline int padded_positions(int seen) {
  return (seen + kIntDepth - 1) / kIntDepth * kIntDepth;
}

static inline bool joins_keys(int dim) { return dim % kIntDepth != 0; }

// V of the chunk from `begin` on, line after line: pages are shorter than a tile. Lines that
// are missing are left as they are: they are multiplied by 0.
static inline void join_values(const IntScratch& scratch, const IntView& view, int dim,
                               int begin, int wanted) {
  for (int i = begin / kLineOf; i * kLineOf < wanted; ++i)
    if (view.v[i] != scratch.v) std::memcpy(scratch.v + i * kLineOf * dim, view.v[i], kLineOf * dim);
}

// Cuts a unit's rows into blocks, and keeps the tiles configured for them.
class IntRowBlocks {
 public:
  int next(int left) {
    const int count = left >= kMaxIntRows ? kMaxIntRows : left < kIntTileRows ? left : kIntTileRows;
    const int height = 2 * (count < kIntTileRows ? count : kIntTileRows);
    if (height != configured_) load_tile_config(TileConfig(configured_ = height));
    return count;
  }

 private:
  int configured_ = 0;
};

// Adds to the sums of one block of rows, four tiles of columns; or of two, two tiles.
template <bool kSigned>
static inline void multiply_tiles(bool two, const std::int8_t* rows, int row_stride,
                                  const std::int8_t* const (&columns)[4], int stride) {
  _tile_loadd(4, rows, row_stride);
  _tile_loadd(6, columns[0], stride);
  _tile_loadd(7, columns[1], stride);
  const auto product = [](auto&& with_signed, auto&& with_unsigned) {
    if constexpr (kSigned)
      with_signed();
    else
      with_unsigned();
  };
  product([] { _tile_dpbssd(0, 4, 6); }, [] { _tile_dpbusd(0, 4, 6); });
  product([] { _tile_dpbssd(1, 4, 7); }, [] { _tile_dpbusd(1, 4, 7); });
  if (two) {
    _tile_loadd(5, rows + 2 * kIntTileRows * row_stride, row_stride);
    product([] { _tile_dpbssd(2, 5, 6); }, [] { _tile_dpbusd(2, 5, 6); });
    product([] { _tile_dpbssd(3, 5, 7); }, [] { _tile_dpbusd(3, 5, 7); });
    return;
  }
  _tile_loadd(6, columns[2], stride);
  _tile_loadd(7, columns[3], stride);
  product([] { _tile_dpbssd(2, 4, 6); }, [] { _tile_dpbusd(2, 4, 6); });
  product([] { _tile_dpbssd(3, 4, 7); }, [] { _tile_dpbusd(3, 4, 7); });
}

static inline void zero_tiles() {
  _tile_zero(0);
  _tile_zero(1);
  _tile_zero(2);
  _tile_zero(3);
}

// Stores the sums; of `tiles` columns, where one block of rows has up to four.
static inline void store_tiles(bool two, int tiles, std::int32_t* sums) {
  _tile_stored(0, sums, kSumStride);
  if (two) {
    std::int32_t* below = sums + 2 * kIntTileRows * kScoreStride;
    if (tiles > 1) _tile_stored(1, sums + kLanes, kSumStride);
    _tile_stored(2, below, kSumStride);
    if (tiles > 1) _tile_stored(3, below + kLanes, kSumStride);
    return;
  }
  if (tiles > 1) _tile_stored(1, sums + kLanes, kSumStride);
  if (tiles > 2) _tile_stored(2, sums + 2 * kLanes, kSumStride);
  if (tiles > 3) _tile_stored(3, sums + 3 * kLanes, kSumStride);
}

static void score_rows_int8(const IntScratch& scratch, const IntView& view, int, int row,
                            int count, Seen seen) {
  const bool two = count > kIntTileRows;
  const int subtiles = (seen.end + kLanes - 1) / kLanes, step = two ? 2 : 4;
  const int depth = scratch.depth;
  const std::int8_t* queries = scratch.queries + row * 2 * depth;
  finish_writes();
  for (int i = seen.begin / kLanes / step * step; i < subtiles; i += step) {
    const std::int8_t* k[4];
    for (int n = 0; n < 4; ++n) {
      const int there = i + n < view.first ? view.first : i + n;
      k[n] = view.k[there < subtiles ? there : subtiles - 1];
    }
    zero_tiles();
    for (int d = 0; d < depth; d += kIntDepth) {
      const int line = d / kLineOf * view.k_stride;
      multiply_tiles<true>(two, queries + d, depth, {k[0] + line, k[1] + line, k[2] + line,
                                                     k[3] + line}, view.k_stride);
    }
    store_tiles(two, subtiles - i, scratch.sums + i * kLanes);
  }
}

static void weigh_rows_int8(const IntScratch& scratch, const IntView&, int dim, int count,
                            Seen seen) {
  const bool two = count > kIntTileRows;
  const int tiles = dim / kLanes, step = two ? 2 : 4;
  finish_writes();
  for (int i = 0; i < tiles; i += step) {
    const std::int8_t* v[4];
    for (int n = 0; n < 4; ++n)
      v[n] = scratch.v + kLineOf * kLanes * (i + n < tiles ? i + n : tiles - 1);
    zero_tiles();
    for (int position = first_position(seen.begin); position < seen.end;
         position += kIntDepth) {
      const int line = position * dim;
      multiply_tiles<false>(two, scratch.weights + position, kChunk,
                            {v[0] + line, v[1] + line, v[2] + line, v[3] + line}, kLineOf * dim);
    }
    store_tiles(two, tiles - i, scratch.sums + i * kLanes);
  }
}

}  // namespace trimaran::TRIMARAN_TIER
