// An int8 cache: writing K and V into its pages, finding a chunk's pages again, and queries in
// numbers that fit it. Included by each tier inside its own compilation unit.
#pragma once

#include "int_products.h"

namespace trimaran::TRIMARAN_TIER {

constexpr int kIntDepth = 64;      // elements of a tile's row: queries are padded to it
constexpr int kMaxIntRows = 16;    // in hand at a time, on any tier
constexpr int kLineOf = 4;         // positions (or elements) of a line of bytes

// Writes K and V of rows row_begin..row_end at their slots. Every code is stored by itself, so
// rows of one page may be written by several threads.
static void write_kv_int8(const AttentionArgs& args, int row_begin, int row_end) {
  const int dim = args.head_dim, block_size = args.block_size;
  const std::size_t page_bytes = kv_page_bytes(KvFormat::kInt8, dim, block_size);
  const std::size_t scales_at = static_cast<std::size_t>(dim) * block_size;
  std::int8_t codes[kMaxHeadDim];
  const auto encode = [&](const float* x, std::uint8_t* scale) {
    const RowScale row(x, dim, kCodeMax);
    const bool zero = row.inverse == 0.0f;  // perhaps because of an infinity
    for (int d = 0; d < dim; d += kLanes)
      store_codes(zero ? vzero() : vmul(vload(x + d), vset1(row.inverse)), codes + d);
    std::memcpy(scale, &row.scale, sizeof row.scale);
  };
  for (int row = row_begin; row < row_end; ++row) {
    const int slot = args.slots[row], offset = slot % block_size;
    const std::size_t block = static_cast<std::size_t>(slot / block_size) * args.block_stride;
    for (int head = 0; head < args.kv_heads; ++head) {
      const std::size_t source = (static_cast<std::size_t>(row) * args.kv_heads + head) * dim;
      std::uint8_t* page = args.k_cache + block + head * page_bytes;
      encode(args.k + source, page + scales_at + offset * sizeof(float));
      for (int d = 0; d < dim; d += kLineOf)
        std::memcpy(page + d * block_size + kLineOf * offset, codes + d, kLineOf);
      page = args.v_cache + block + head * page_bytes;
      encode(args.v + source, page + scales_at + offset * sizeof(float));
      std::uint8_t* values = page + offset / kLineOf * kLineOf * dim + offset % kLineOf;
      for (int d = 0; d < dim; ++d) values[kLineOf * d] = static_cast<std::uint8_t>(codes[d]);
    }
  }
}

// Where the K and V of a chunk lie. A subtile of K is head_dim / 4 lines of 16 positions by 4
// elements, k_stride bytes apart; V has for every 4 positions a line of head_dim elements by 4
// positions. Scales are those of the chunk's positions, 0 beyond the context.
struct IntView {
  const std::int8_t* k[kSubtiles];
  const std::int8_t* v[kChunk / kLineOf];
  int k_stride;
  int first;  // the first subtile that is there
  const float* k_scales;
  const float* v_scales;
};

// Where the parts of a thread's scratch memory lie.
struct IntScratch {
  float* state;          // [unit rows][partial_stride]
  float* partial;        // [kMaxIntRows][partial_stride]: of rows in hand
  float* scores;         // [kMaxIntRows][kScoreStride]
  std::int32_t* sums;    // [2 * kMaxIntRows][kScoreStride]: exact scores, then exact acc
  float* k_scales;       // [kChunk]
  float* v_scales;       // [kChunk]
  float* q_scales;       // [unit rows]
  std::int32_t* q_starts;  // [unit rows][2], see query_starts
  std::int8_t* queries;  // [unit rows][2 * depth], see int_products.h
  std::int8_t* weights;  // [kMaxIntRows][2 * kChunk]
  std::int8_t* k;        // [kChunk * depth]: pages that can't be read in place
  std::int8_t* v;        // [kChunk * head_dim]
  int depth;             // head_dim rounded up to kIntDepth

  IntScratch(void* memory, int rows, int dim) {
    depth = (dim + kIntDepth - 1) / kIntDepth * kIntDepth;
    state = static_cast<float*>(memory);
    partial = state + rows * partial_stride(dim);
    scores = partial + kMaxIntRows * partial_stride(dim);
    sums = reinterpret_cast<std::int32_t*>(scores + kMaxIntRows * kScoreStride);
    k_scales = reinterpret_cast<float*>(sums + 2 * kMaxIntRows * kScoreStride);
    v_scales = k_scales + kChunk;
    q_scales = v_scales + kChunk;
    const int padded = (rows + kLanes - 1) / kLanes * kLanes;
    q_starts = reinterpret_cast<std::int32_t*>(q_scales + padded);
    queries = reinterpret_cast<std::int8_t*>(q_starts + 2 * padded);
    weights = queries + rows * 2 * depth;
    k = weights + kMaxIntRows * 2 * kChunk;
    v = k + kChunk * depth;
  }
};

// Pages in int8.
class IntPages : public PageTable {
 public:
  using PageTable::PageTable;

  // Pages of positions base .. base + wanted, from first_subtile on. `whole` subtiles of K
  // only: tiles have no shorter ones. Scales of missing positions may be anything.
  void view(int base, int wanted, bool join, const IntScratch& scratch, IntView& view) const {
    const bool joins = join || block_size() < kLanes;
    view.k_stride = kLineOf * (joins ? kLanes : block_size());
    const int first = first_subtile(base);
    view.first = first;
    for (int i = first; i * kLanes < wanted; ++i) {
      view.k[i] = joins ? join_keys(base + i * kLanes, scratch.k + i * kLanes * scratch.depth)
                        : keys(base + i * kLanes);
    }
    const int end = context() - base < wanted ? context() - base : wanted;
    // V lines and scales, block by block, of those that are there.
    const int begin = first * kLanes / block_size() * block_size();
    for (int i = begin; i < end; i += block_size()) {
      if (missing(base + i, block_size())) {
        for (int j = 0; j < block_size(); j += kLineOf) view.v[(i + j) / kLineOf] = scratch.v;
        continue;
      }
      for (int j = 0; j < block_size() && i + j < end; j += kLineOf)
        view.v[(i + j) / kLineOf] = values(base + i + j);
      const int run = end - i < block_size() ? end - i : block_size();
      std::memcpy(scratch.k_scales + i, scales(key_page(base + i)), run * sizeof(float));
      std::memcpy(scratch.v_scales + i, scales(value_page(base + i)), run * sizeof(float));
    }
    for (int i = end; i % kLanes; ++i) scratch.k_scales[i] = scratch.v_scales[i] = 0.0f;
    view.k_scales = scratch.k_scales;
    view.v_scales = scratch.v_scales;
  }

 private:
  // K from `position` on: lines of 4 * block_size bytes.
  const std::int8_t* keys(int position) const {
    return reinterpret_cast<const std::int8_t*>(key_page(position)) +
           kLineOf * (position % block_size());
  }

  const std::int8_t* values(int position) const {
    return reinterpret_cast<const std::int8_t*>(value_page(position)) +
           position % block_size() * dim();
  }

  const std::uint8_t* scales(const std::uint8_t* page) const {
    return page + static_cast<std::size_t>(dim()) * block_size();
  }

  // K of 16 positions: head_dim / 4 lines of 64 bytes. Positions beyond the context are left
  // as they are: their scores are masked.
  const std::int8_t* join_keys(int position, std::int8_t* target) const {
    const int run = block_size() < kLanes ? block_size() : kLanes;
    for (int done = 0; done < kLanes && position + done < context(); done += run) {
      if (missing(position + done, run)) continue;
      const std::int8_t* source = keys(position + done);
      for (int line = 0; line < dim() / kLineOf; ++line)
        std::memcpy(target + kLineOf * (line * kLanes + done),
                    source + kLineOf * line * block_size(), kLineOf * run);
    }
    return target;
  }
};

static void load_int_queries(const AttentionArgs& args, const UnitRows& rows, int kv_head,
                             const IntScratch& scratch) {
  const int dim = args.head_dim, depth = scratch.depth;
  rows.queries(kv_head, [&](const float* q, int row) {
    const RowScale scale(q, dim, kQueryMax);
    const bool zero = scale.inverse == 0.0f;
    std::int8_t* numbers = scratch.queries + row * 2 * depth;
    for (int d = 0; d < depth; d += kLanes)
      store_numbers(zero || d >= dim ? vzero() : vmul(vload(q + d), vset1(scale.inverse)), numbers,
                    depth, d);
    query_starts(numbers, depth, scratch.q_starts + 2 * row);
    scratch.q_scales[row] = scale.scale * (args.scale * kLog2E);
  });
}

}  // namespace trimaran::TRIMARAN_TIER
