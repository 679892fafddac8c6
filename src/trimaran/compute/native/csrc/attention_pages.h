// Writing K and V into pages, and finding a chunk's pages again. Included by each tier
// inside its own compilation unit.
#pragma once

#include <cstdint>
#include <cstring>

#include "attention.h"
#include "elementwise.h"
#include "kv_cache.h"

namespace trimaran::TRIMARAN_TIER {

constexpr int kLanes = 16;

// A subtile is 16 positions: one vector of scores.
constexpr int kSubtiles = kChunk / kLanes;

// Prefetch into the second-level cache. The empty assembly keeps the compiler from taking a
// function that only prefetches for one without effect, whose calls it removes.
static inline void fetch_line(const void* address) {
  __builtin_prefetch(address, 0, 2);
  asm volatile("" : : "r"(address));
}

// Round to nearest, ties to even; a NaN stays one.
static inline std::uint16_t to_bf16(float value) {
  std::uint32_t bits;
  std::memcpy(&bits, &value, sizeof bits);
  const std::uint32_t rounded = (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16;
  const bool nan = (bits & 0x7fffffffu) > 0x7f800000u;
  return static_cast<std::uint16_t>(nan ? (bits >> 16) | 0x40u : rounded);
}

// 16 elements of K, rounded, pair by pair into the lines of a page.
static inline void write_keys(const float* k, int block_size, std::uint16_t* lines) {
  std::uint16_t rounded[kLanes];
#if defined(__AVX512F__)
  bf16_lanes(vload(k), rounded);
#else
  for (int d = 0; d < kLanes; ++d) rounded[d] = to_bf16(k[d]);
#endif
  for (int d = 0; d < kLanes; d += 2)
    std::memcpy(lines + d * block_size, rounded + d, 2 * sizeof(std::uint16_t));
}

// 16 elements of V, rounded, each the first or second of its pair.
static inline void write_values(const float* v, int second, std::uint16_t* pairs) {
#if defined(__AVX512F__)
  std::uint16_t rounded[kLanes];
  bf16_lanes(vload(v), rounded);
  const __m512i low =
      _mm512_cvtepu16_epi32(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(rounded)));
  if (second)
    _mm512_mask_storeu_epi16(pairs, 0xaaaaaaaau, _mm512_slli_epi32(low, 16));
  else
    _mm512_mask_storeu_epi16(pairs, 0x55555555u, low);
#else
  for (int d = 0; d < kLanes; ++d) pairs[2 * d + second] = to_bf16(v[d]);
#endif
}

// Writes K and V of rows row_begin..row_end at their slots. Every element is stored by
// itself, so rows of one page may be written by several threads.
static void write_kv(const AttentionArgs& args, int row_begin, int row_end) {
  const int dim = args.head_dim, block_size = args.block_size;
  const std::size_t page = static_cast<std::size_t>(dim) * block_size;
  for (int row = row_begin; row < row_end; ++row) {
    const int slot = args.slots[row];
    const int offset = slot % block_size;
    const std::size_t block = static_cast<std::size_t>(slot / block_size) * args.block_stride;
    auto* k_pages = reinterpret_cast<std::uint16_t*>(args.k_cache + block);
    auto* v_pages = reinterpret_cast<std::uint16_t*>(args.v_cache + block);
    for (int head = 0; head < args.kv_heads; ++head) {
      const std::size_t source = (static_cast<std::size_t>(row) * args.kv_heads + head) * dim;
      std::uint16_t* keys = k_pages + head * page + 2 * offset;
      std::uint16_t* values = v_pages + head * page + (offset / 2) * 2 * dim;
      for (int d = 0; d < dim; d += kLanes) {
        write_keys(args.k + source + d, block_size, keys + d * block_size);
        write_values(args.v + source + d, offset % 2, values + 2 * d);
      }
    }
  }
}

// Where the K and V of a chunk lie, by subtile of 16 positions. A subtile of K has
// head_dim / 2 lines of 16 pairs; one of V has 8 lines of head_dim pairs, contiguous.
struct ChunkView {
  const std::uint16_t* k[kSubtiles];
  const std::uint16_t* v[kSubtiles];
  int k_stride;  // elements from line to line
  int subtiles;
};

// Memory for pages that can't be read in place: kChunk * head_dim elements each (K of the
// amx tier: head_dim rounded up to 32).
struct PageScratch {
  std::uint16_t* k;
  std::uint16_t* v;
};

// One sequence's pages of one KV head, in either format. Blocks that end before position
// `from` are never looked up.
class PageTable {
 public:
  PageTable(const AttentionArgs& args, int sequence, int kv_head, int from)
      : table_(args.block_tables + static_cast<std::size_t>(sequence) * args.table_width),
        k_cache_(args.k_cache),
        v_cache_(args.v_cache),
        block_stride_(args.block_stride),
        kv_head_(kv_head),
        page_bytes_(kv_page_bytes(args.kv, args.head_dim, args.block_size)),
        dim_(args.head_dim),
        block_size_(args.block_size),
        context_(args.contexts[sequence]),
        from_(from) {}

  // Starts fetching V, or K, of the positions base .. base + kChunk: pages are too short for
  // the hardware to see a stream.
  void prefetch_values(int base) const { prefetch(v_cache_, kv_head_, base); }
  void prefetch_keys(int kv_head, int base) const { prefetch(k_cache_, kv_head, base); }

  int context() const { return context_; }
  // The first subtile of the chunk at `base` with a position from `from` on.
  int first_subtile(int base) const { return from_ > base ? (from_ - base) / kLanes : 0; }
  // Whether `run` positions, of one block, aren't there: behind the context or before `from`.
  bool missing(int position, int run) const {
    return position >= context_ || position + run <= from_;
  }
  int block_size() const { return block_size_; }

 protected:
  const std::uint8_t* key_page(int position) const { return page(k_cache_, kv_head_, position); }
  const std::uint8_t* value_page(int position) const {
    return page(v_cache_, kv_head_, position);
  }
  int dim() const { return dim_; }

 private:
  const std::uint8_t* page(const std::uint8_t* cache, int kv_head, int position) const {
    const std::size_t block = table_[position / block_size_];
    return cache + block * block_stride_ + kv_head * page_bytes_;
  }

  void prefetch(const std::uint8_t* cache, int kv_head, int base) const {
    constexpr std::size_t kLine = 64;
    const int end = context_ < base + kChunk ? context_ : base + kChunk;
    const int begin = from_ > base ? from_ - from_ % block_size_ : base;
    for (int position = begin; position < end; position += block_size_) {
      const std::uint8_t* start = page(cache, kv_head, position);
      for (std::size_t i = 0; i < page_bytes_; i += kLine) fetch_line(start + i);
    }
  }

  const std::int32_t* table_;
  const std::uint8_t* k_cache_;
  const std::uint8_t* v_cache_;
  std::size_t block_stride_;
  int kv_head_;
  std::size_t page_bytes_;
  int dim_, block_size_, context_, from_;
};

// Pages in bf16.
class PageReader : public PageTable {
 public:
  using PageTable::PageTable;

  // Pages of positions base .. base + wanted, from first_subtile on. V of missing positions
  // reads as zero: a weight of 0 must not meet a NaN there. (Scores are masked, so K may be
  // anything.)
  ChunkView view(int base, int wanted, PageScratch scratch) const {
    ChunkView view;
    view.subtiles = (wanted + kLanes - 1) / kLanes;
    view.k_stride = block_size() < kLanes ? 2 * kLanes : 2 * block_size();
    for (int i = first_subtile(base); i < view.subtiles; ++i) {
      const int position = base + i * kLanes;
      std::uint16_t* spare = scratch.v + i * kLanes * dim();
      if (block_size() < kLanes) {
        std::uint16_t* joined = scratch.k + i * kLanes * dim();
        join_keys(position, joined);
        join_values(position, spare);
        view.k[i] = joined;
        view.v[i] = spare;
        continue;
      }
      view.k[i] = keys(position);
      view.v[i] = values(position);
      if (context() - position < kLanes) {
        join_values(position, spare);
        view.v[i] = spare;
      }
    }
    return view;
  }

  // V of `pairs` * 2 positions from `position`, contiguous lines of head_dim pairs.
  void join_values(int position, std::uint16_t* target, int positions = kLanes) const {
    const int run = block_size() < positions ? block_size() : positions;
    for (int done = 0; done < positions; done += run) {
      const int first = position + done;
      const int valid = context() - first;
      std::uint16_t* lines = target + done * dim();
      if (valid >= run && !missing(first, run)) {
        std::memcpy(lines, values(first), run * dim() * sizeof *lines);
        continue;
      }
      std::memset(lines, 0, run * dim() * sizeof *lines);
      if (missing(first, run)) continue;
      const std::uint16_t* source = values(first);
      std::memcpy(lines, source, valid / 2 * 2 * dim() * sizeof *lines);
      if (valid % 2)
        for (int d = 0; d < dim(); ++d)
          lines[(valid - 1) * dim() + 2 * d] = source[(valid - 1) * dim() + 2 * d];
    }
  }

  // K of 16 positions from `position`: head_dim / 2 lines of 16 pairs, contiguous.
  void join_keys(int position, std::uint16_t* target) const {
    const int run = block_size() < kLanes ? block_size() : kLanes;
    for (int done = 0; done < kLanes; done += run) {
      const int first = position + done;
      std::uint16_t* column = target + 2 * done;
      if (missing(first, run)) {
        for (int line = 0; line < dim() / 2; ++line)
          std::memset(column + line * 2 * kLanes, 0, 2 * run * sizeof *column);
        continue;
      }
      const std::uint16_t* source = keys(first);
      for (int line = 0; line < dim() / 2; ++line)
        std::memcpy(column + line * 2 * kLanes, source + line * 2 * block_size(),
                    2 * run * sizeof *column);
    }
  }

  // K from `position` on: lines of 2 * block_size elements.
  const std::uint16_t* keys(int position) const {
    const auto* page = reinterpret_cast<const std::uint16_t*>(key_page(position));
    return page + 2 * (position % block_size());
  }

  // V of `position`'s pair: lines of head_dim pairs, contiguous to the end of its page.
  const std::uint16_t* values(int position) const {
    const auto* page = reinterpret_cast<const std::uint16_t*>(value_page(position));
    return page + position % block_size() / 2 * 2 * dim();
  }
};

}  // namespace trimaran::TRIMARAN_TIER
