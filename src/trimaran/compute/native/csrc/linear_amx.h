// Products on AMX tiles, in bf16. Included by the amx tier inside its own compilation unit.
//
// A weight's block gives one B tile a step: as it lies (bf16), or unpacked to scratch memory
// (S4, S8, see linear_stream.h). A tile of C keeps 16 rows and 16 outputs until all inputs
// are summed, in order; so a row's bits depend on nothing but itself.
//
//   few rows    up to four tiles of rows: blocks stream by, and unpacking is some steps ahead
//   many rows   two blocks are unpacked at once, for all rows of the task, while the product
//               of the two before is computed, in squares of two by two tiles
#pragma once

#include <immintrin.h>

#include "linear_finish.h"
#include "linear_stream.h"

namespace trimaran::TRIMARAN_TIER {

constexpr int kTile = 16;  // rows
constexpr int kTileBytes = 1024;
constexpr int kTileFloats = 256;
constexpr int kRing = 8;        // unpacked steps of a block, few rows
constexpr int kAhead = 6;       // of them not yet used
constexpr int kSlabSteps = 48;  // unpacked steps of two blocks, many rows
constexpr int kSlabPairs = 8;   // pairs of blocks whose sums wait for the next slab
constexpr int kRowPairs = kTaskRows / (2 * kTile);

struct alignas(64) TileShapes {
  std::uint8_t palette = 1;
  std::uint8_t start_row = 0;
  std::uint8_t reserved[14] = {};
  std::uint16_t row_bytes[16] = {};
  std::uint8_t rows[16] = {};

  // C in tiles 0-3 and A in 4 and 5 have `height` rows, B in 6 and 7 a step's 16 pairs.
  explicit TileShapes(int height) {
    for (int tile = 0; tile < 8; ++tile) {
      row_bytes[tile] = 64;
      rows[tile] = static_cast<std::uint8_t>(tile < 6 ? height : kTile);
    }
  }
};

static inline void load_tile_shapes(const TileShapes& shapes) {
  asm volatile("ldtilecfg %0" : : "m"(shapes) : "memory");
}

// The compiler doesn't know that tile loads read memory and tile stores write it.
static inline void tile_fence() { asm volatile("" : : : "memory"); }

struct Bf16Format {
  static constexpr bool unpacks = false;
  static constexpr std::size_t step_bytes = kTileBytes;
  static void unpack(const std::uint8_t*, std::uint8_t*) {}
};

// Slopes and offsets of 16 outputs, each twice.
struct StreamTable {
  __m512h slopes, offsets;

  __attribute__((always_inline)) explicit StreamTable(const std::uint8_t* table) {
    const __m512i twice = _mm512_srli_epi16(
        _mm512_set_epi16(31, 30, 29, 28, 27, 26, 25, 24, 23, 22, 21, 20, 19, 18, 17, 16, 15, 14,
                         13, 12, 11, 10, 9, 8, 7, 6, 5, 4, 3, 2, 1, 0),
        1);
    const __m512i both = _mm512_loadu_si512(table);
    slopes = _mm512_castsi512_ph(_mm512_permutexvar_epi16(twice, both));
    offsets = _mm512_castsi512_ph(
        _mm512_permutexvar_epi16(_mm512_add_epi16(twice, _mm512_set1_epi16(16)), both));
  }

  // 32 weights in bf16 from words that have the code in the bits of `mask`.
  __attribute__((always_inline)) __m512i weights(__m512i words, __m512i mask) const {
    constexpr int kAndOr = 0xea;  // (a & b) | c
    const __m512i one = _mm512_set1_epi16(0x3c00);
    const __m512i kept = _mm512_set1_epi16(static_cast<short>(0x8fff));
    const __m512i exponent = _mm512_set1_epi16(0x3800);  // 127 - 15, in bf16's place
    const __m512h code = _mm512_castsi512_ph(_mm512_ternarylogic_epi32(words, mask, one, kAndOr));
    const __m512i half = _mm512_castph_si512(_mm512_fmadd_ph(code, slopes, offsets));
    return _mm512_ternarylogic_epi32(_mm512_srai_epi16(half, 3), kept, exponent, kAndOr);
  }
};

struct S4Format {
  static constexpr bool unpacks = true;
  static constexpr std::size_t step_bytes = stream_step_bytes(true, 32);

  __attribute__((always_inline)) static void unpack(const std::uint8_t* codes,
                                                    std::uint8_t* tile) {
    const StreamTable table(codes + 256);
    const __m512i mask = _mm512_set1_epi16(0x03c0);
#pragma GCC unroll 4
    for (int q = 0; q < 4; ++q) {
      const __m512i x = _mm512_loadu_si512(codes + 64 * q);
      const __m512i fields[4] = {x, _mm512_srli_epi16(x, 4), _mm512_slli_epi16(x, 4),
                                 _mm512_shldi_epi16(x, x, 8)};
#pragma GCC unroll 4
      for (int f = 0; f < 4; ++f)
        _mm512_store_si512(tile + (4 * q + f) * 64, table.weights(fields[f], mask));
    }
  }
};

template <int kGroup>
struct S8Format {
  static constexpr bool unpacks = true;
  static constexpr std::size_t step_bytes = stream_step_bytes(false, kGroup);

  __attribute__((always_inline)) static void unpack(const std::uint8_t* codes,
                                                    std::uint8_t* tile) {
    const StreamTable low(codes + 512), high(codes + (kGroup == 16 ? 576 : 512));
    const __m512i mask = _mm512_set1_epi16(0x03fc);
#pragma GCC unroll 8
    for (int q = 0; q < 8; ++q) {
      const __m512i x = _mm512_loadu_si512(codes + 64 * q);
      _mm512_store_si512(tile + q * 64, low.weights(_mm512_slli_epi16(x, 2), mask));
      _mm512_store_si512(tile + (8 + q) * 64, high.weights(_mm512_srli_epi16(x, 6), mask));
    }
  }
};

// Where the parts of a task's scratch memory lie.
struct TileScratch {
  std::uint8_t* slabs[2];  // [kSlabSteps][2 blocks][1 KB]; of the first, the ring of few rows
  float* waiting;          // sums: [kSlabPairs][kRowPairs][4][16][16], or [4][4][16][16]

  explicit TileScratch(void* memory) {
    slabs[0] = static_cast<std::uint8_t*>(memory);
    slabs[1] = slabs[0] + kSlabSteps * 2 * kTileBytes;
    waiting = reinterpret_cast<float*>(slabs[1] + kSlabSteps * 2 * kTileBytes);
  }
};

// y of `count` rows of one block from its sums, and of the gates' where there are some.
template <class F>
static inline void finish_tile(const LinearTask& task, int row, int block, int count,
                               const float* sums, const float* gates) {
  const auto multipliers = [&](const LinearView& weight) {
    return vload(reinterpret_cast<const float*>(weight.data + block * weight.block_bytes +
                                                weight.scales_at));
  };
  const V16 own = F::unpacks ? multipliers(*task.weight) : vset1(1.0f);
  if (gates == nullptr) {
    finish_rows(task, row, block, count,
                [&](int r) { return vmul(vload(sums + r * kBlock), own); });
    return;
  }
  const V16 others = F::unpacks ? multipliers(*task.gate) : vset1(1.0f);
  finish_gated_rows(
      task, row, block, count, [&](int r) { return vmul(vload(gates + r * kBlock), others); },
      [&](int r) { return vmul(vload(sums + r * kBlock), own); });
}

// The blocks of a task in order; gates come before what they gate.
struct BlockOrder {
  const LinearTask& task;

  int count() const {
    return (task.block_end - task.block_begin) * (task.gate == nullptr ? 1 : 2);
  }
  int block(int i) const { return task.block_begin + (task.gate == nullptr ? i : i / 2); }
  bool is_gate(int i) const { return task.gate != nullptr && i % 2 == 0; }
  const std::uint8_t* data(int i) const {
    const LinearView& weight = is_gate(i) ? *task.gate : *task.weight;
    return weight.data + block(i) * weight.block_bytes;
  }
};

// Unpacks the steps of all blocks in order, and asks for those to come.
template <class F>
class RingUnpacker {
 public:
  RingUnpacker(const BlockOrder& order, int steps, std::uint8_t* ring)
      : order_(order), steps_(steps), left_(order.count() * steps), ring_(ring),
        from_(order.data(0)) {}

  __attribute__((always_inline)) void next() {
    if (left_ == 0) return;
    --left_;
    for (std::size_t line = 0; line < F::step_bytes; line += 64)
      _mm_prefetch(reinterpret_cast<const char*>(from_ + kFetchAhead + line), _MM_HINT_T0);
    F::unpack(from_, ring_ + slot_ * kTileBytes);
    slot_ = (slot_ + 1) % kRing;
    from_ += F::step_bytes;
    if (++step_ == steps_) {
      step_ = 0;
      if (left_ > 0) from_ = order_.data(++block_);
    }
  }

 private:
  static constexpr int kFetchAhead = 8192;
  const BlockOrder& order_;
  const int steps_;
  int left_, step_ = 0, block_ = 0, slot_ = 0;
  std::uint8_t* const ring_;
  const std::uint8_t* from_;
};

// Tile registers are named in the instruction, so this can't be a loop.
template <int M>
__attribute__((always_inline)) static inline void few_rows_step(const std::uint8_t* a,
                                                                std::size_t tile_stride,
                                                                const std::uint8_t* b) {
  _tile_loadd(6, b, 64);
  _tile_loadd(4, a, 64);
  _tile_dpbf16ps(0, 4, 6);
  if constexpr (M > 1) {
    _tile_loadd(5, a + tile_stride, 64);
    _tile_dpbf16ps(1, 5, 6);
  }
  if constexpr (M > 2) {
    _tile_loadd(4, a + 2 * tile_stride, 64);
    _tile_dpbf16ps(2, 4, 6);
  }
  if constexpr (M > 3) {
    _tile_loadd(5, a + 3 * tile_stride, 64);
    _tile_dpbf16ps(3, 5, 6);
  }
}

template <int M>
__attribute__((always_inline)) static inline void store_few(float* c) {
  _tile_stored(0, c, 64);
  if constexpr (M > 1) _tile_stored(1, c + kTileFloats, 64);
  if constexpr (M > 2) _tile_stored(2, c + 2 * kTileFloats, 64);
  if constexpr (M > 3) _tile_stored(3, c + 3 * kTileFloats, 64);
  tile_fence();
}

template <int M>
__attribute__((always_inline)) static inline void zero_few() {
  _tile_zero(0);
  if constexpr (M > 1) _tile_zero(1);
  if constexpr (M > 2) _tile_zero(2);
  if constexpr (M > 3) _tile_zero(3);
}

// The last step of block `i` in order, whose sums are in their place in `sums`.
template <class F, int M>
static void finish_few(const LinearTask& task, const BlockOrder& order, int i, float* sums) {
  const int rows = task.row_end - task.row_begin;
  const float* own = sums + i % 4 * 4 * kTileFloats;
  const float* gates = task.gate == nullptr ? nullptr : sums + (i + 3) % 4 * 4 * kTileFloats;
  for (int m = 0; m < M; ++m) {
    const int left = rows - m * kTile, count = left < kTile ? left : kTile;
    finish_tile<F>(task, task.row_begin + m * kTile, order.block(i), count,
                   own + m * kTileFloats, gates == nullptr ? nullptr : gates + m * kTileFloats);
  }
}

// M tiles of rows, the last perhaps of fewer rows. A block is finished some steps into the
// next one, when its sums have long been stored.
template <class F, int M>
static void few_rows(const LinearTask& task) {
  const TileScratch scratch(task.scratch);
  const BlockOrder order{task};
  const int steps = task.weight->steps(), finish_at = steps > 4 ? 4 : steps - 1;
  const std::size_t tile_stride = static_cast<std::size_t>(steps) * kTileBytes;
  const std::uint8_t* a = task.bf16 + activation_bytes(task.row_begin, 0, steps);
  RingUnpacker<F> unpacker(order, steps, scratch.slabs[0]);
  if constexpr (F::unpacks)
    for (int i = 0; i < kAhead; ++i) unpacker.next();
  int slot = 0;
  const int blocks = order.count();
  for (int i = 0; i < blocks; ++i) {
    const std::uint8_t* data = order.data(i);
    zero_few<M>();
    for (int step = 0; step < steps; ++step) {
      if constexpr (F::unpacks) {
        unpacker.next();
        tile_fence();
        few_rows_step<M>(a + step * kTileBytes, tile_stride,
                         scratch.slabs[0] + slot * kTileBytes);
        slot = (slot + 1) % kRing;
      } else {
        const std::uint8_t* b = data + step * kTileBytes;
        for (int line = 0; line < kTileBytes; line += 64)
          _mm_prefetch(reinterpret_cast<const char*>(b + 4 * kTileBytes + line), _MM_HINT_T0);
        few_rows_step<M>(a + step * kTileBytes, tile_stride, b);
      }
      if (step == finish_at && i > 0 && !order.is_gate(i - 1))
        finish_few<F, M>(task, order, i - 1, scratch.waiting);
    }
    store_few<M>(scratch.waiting + i % 4 * 4 * kTileFloats);
  }
  finish_few<F, M>(task, order, blocks - 1, scratch.waiting);
}

// Two blocks of one slab as the tiles read them, or on their way there.
struct SlabPair {
  const std::uint8_t* left;
  const std::uint8_t* right;
  int steps;
};

// Unpacks a pair little by little, beside the product of the one before.
template <class F>
class PairUnpacker {
 public:
  PairUnpacker(const SlabPair& pair, std::uint8_t* slab)
      : pair_(pair), slab_(slab), left_(F::unpacks ? 2 * pair.steps : 0) {}

  __attribute__((always_inline)) void next() {
    if (left_ == 0) return;
    const int at = 2 * pair_.steps - left_--;
    const std::uint8_t* from = (at % 2 ? pair_.right : pair_.left) + at / 2 * F::step_bytes;
    F::unpack(from, slab_ + at * kTileBytes);
  }
  void rest() {
    while (left_ > 0) next();
    tile_fence();
  }

 private:
  const SlabPair pair_;
  std::uint8_t* const slab_;
  int left_;
};

// The last step of 32 rows of two blocks, row by row, beside the product of the next 32.
template <class F>
class SquareFinisher {
 public:
  explicit SquareFinisher(const LinearTask& task) : task_(task) {}

  void start(int row, int block, const float* sums) {
    row_ = row;
    block_ = block;
    sums_ = sums;
    done_ = 0;
    const int left = task_.row_end - row;
    rows_ = left < 2 * kTile ? left : 2 * kTile;
  }
  __attribute__((always_inline)) void next() {
    if (done_ >= rows_) return;
    const float* left = sums_ + done_ / kTile * 2 * kTileFloats + done_ % kTile * kBlock;
    const float* right = left + kTileFloats;
    const int row = row_ + done_++;
    if (task_.gate != nullptr) {
      finish_tile<F>(task_, row, block_, 1, right, left);
      return;
    }
    finish_tile<F>(task_, row, block_, 1, left, nullptr);
    if (block_ + 1 < task_.block_end) finish_tile<F>(task_, row, block_ + 1, 1, right, nullptr);
  }
  void rest() {
    while (done_ < rows_) next();
  }

 private:
  const LinearTask& task_;
  const float* sums_ = nullptr;
  int row_ = 0, block_ = 0, done_ = 0, rows_ = 0;
};

// 32 rows of two blocks over one slab: tiles 0 and 1 are the left and right block of the
// upper rows, 2 and 3 of the lower ones. Products with the same B follow each other: a second
// one takes 10 cycles in place of 16. `every`: steps from one unpacking to the next.
template <class F>
static inline void square(const std::uint8_t* a, std::size_t tile_stride, const SlabPair& b,
                          int every, PairUnpacker<F>& unpacker, SquareFinisher<F>& finisher) {
  constexpr std::size_t kNext = F::unpacks ? 2 * kTileBytes : kTileBytes;
  constexpr int kFetchAhead = 4 * kTileBytes;
  const std::uint8_t* below = a + tile_stride;
  const std::uint8_t* left = b.left;
  const std::uint8_t* right = b.right;
  const bool two_rows = b.steps < 2 * kTile;
  int wait = every;
  for (int step = 0; step < b.steps; ++step) {
    for (int line = 0; line < kTileBytes; line += 64) {
      _mm_prefetch(reinterpret_cast<const char*>(a + kFetchAhead + line), _MM_HINT_T0);
      _mm_prefetch(reinterpret_cast<const char*>(below + kFetchAhead + line), _MM_HINT_T0);
    }
    _tile_loadd(4, a, 64);
    _tile_loadd(6, left, 64);
    _tile_dpbf16ps(0, 4, 6);
    _tile_loadd(5, below, 64);
    _tile_dpbf16ps(2, 5, 6);
    _tile_loadd(7, right, 64);
    _tile_dpbf16ps(1, 4, 7);
    _tile_dpbf16ps(3, 5, 7);
    if (--wait == 0) {
      unpacker.next();
      wait = every;
    }
    finisher.next();
    if (two_rows) finisher.next();
    a += kTileBytes;
    below += kTileBytes;
    left += kNext;
    right += kNext;
  }
  finisher.rest();
}

static inline void load_square(const float* c) {
  _tile_loadd(0, c, 64);
  _tile_loadd(1, c + kTileFloats, 64);
  _tile_loadd(2, c + 2 * kTileFloats, 64);
  _tile_loadd(3, c + 3 * kTileFloats, 64);
}

static inline void zero_square() {
  _tile_zero(0);
  _tile_zero(1);
  _tile_zero(2);
  _tile_zero(3);
}

static inline void store_square(float* c) {
  _tile_stored(0, c, 64);
  _tile_stored(1, c + kTileFloats, 64);
  _tile_stored(2, c + 2 * kTileFloats, 64);
  _tile_stored(3, c + 3 * kTileFloats, 64);
  tile_fence();
}

// Pairs of blocks of a task: neighbours, or a gate and what it gates.
template <class F>
struct PairOrder {
  const LinearTask& task;

  int count() const {
    const int blocks = task.block_end - task.block_begin;
    return task.gate == nullptr ? (blocks + 1) / 2 : blocks;
  }
  int block(int pair) const {
    return task.block_begin + (task.gate == nullptr ? 2 * pair : pair);
  }
  // As packed. The last of an odd number of blocks is paired with itself.
  SlabPair data(int pair, int slab) const {
    const LinearView& weight = *task.weight;
    const int first = slab * kSlabSteps, left = weight.steps() - first;
    const std::size_t at = block(pair) * weight.block_bytes + first * F::step_bytes;
    const bool alone = task.gate == nullptr && block(pair) + 1 == task.block_end;
    SlabPair data{weight.data + at, weight.data + at, left < kSlabSteps ? left : kSlabSteps};
    if (task.gate != nullptr)
      data.left = task.gate->data + at;
    else if (!alone)
      data.right += weight.block_bytes;
    return data;
  }
};

// Pairs pair_begin..pair_end, slab by slab; with several slabs, at most kSlabPairs.
template <class F>
static void many_rows_of(const LinearTask& task, int pair_begin, int pair_end) {
  const TileScratch scratch(task.scratch);
  const PairOrder<F> order{task};
  const int steps = task.weight->steps(), slabs = (steps + kSlabSteps - 1) / kSlabSteps;
  const std::size_t tile_stride = static_cast<std::size_t>(steps) * kTileBytes;
  const int row_pairs = (task.row_end - task.row_begin + 2 * kTile - 1) / (2 * kTile);
  const int pairs = pair_end - pair_begin, all = slabs * pairs;
  const auto packed = [&](int i) { return order.data(pair_begin + i % pairs, i / pairs); };
  PairUnpacker<F>(packed(0), scratch.slabs[0]).rest();
  SquareFinisher<F> finisher(task);
  for (int i = 0; i < all; ++i) {
    const int slab = i / pairs, pair = i % pairs;
    SlabPair b = packed(i);
    if constexpr (F::unpacks) {
      b.left = scratch.slabs[i % 2];
      b.right = b.left + kTileBytes;
    }
    PairUnpacker<F> unpacker(i + 1 < all ? packed(i + 1) : SlabPair{nullptr, nullptr, 0},
                             scratch.slabs[(i + 1) % 2]);
    const int every = row_pairs > 1 ? row_pairs / 2 : 1;
    for (int r = 0; r < row_pairs; ++r) {
      const int row = task.row_begin + r * 2 * kTile;
      float* c = scratch.waiting + ((slabs == 1 ? i % 2 : pair) * kRowPairs + r) * 4 * kTileFloats;
      if (slab == 0)
        zero_square();
      else
        load_square(c);
      square<F>(task.bf16 + activation_bytes(row, slab * kSlabSteps, steps), tile_stride, b,
                every, unpacker, finisher);
      store_square(c);
      if (slab == slabs - 1) finisher.start(row, order.block(pair_begin + pair), c);
    }
    unpacker.rest();
  }
  finisher.rest();
}

template <class F>
static void many_rows(const LinearTask& task) {
  const int pairs = PairOrder<F>{task}.count();
  const int size = task.weight->steps() > kSlabSteps ? kSlabPairs : pairs;
  for (int begin = 0; begin < pairs; begin += size)
    many_rows_of<F>(task, begin, begin + size < pairs ? begin + size : pairs);
}

template <class F>
static void linear_tiles(const LinearTask& task) {
  const int rows = task.row_end - task.row_begin;
  load_tile_shapes(TileShapes(rows < kTile ? rows : kTile));
  switch ((rows + kTile - 1) / kTile) {
    case 1: return few_rows<F, 1>(task);
    case 2: return few_rows<F, 2>(task);
    case 3: return few_rows<F, 3>(task);
    case 4: return few_rows<F, 4>(task);
    default: return many_rows<F>(task);
  }
}

static void linear_amx(const LinearTask& task) {
  const LinearView& weight = *task.weight;
  if (task.gate != nullptr &&
      (task.gate->codes != weight.codes || task.gate->group != weight.group)) {
    gate_first(task, linear_amx);
    return;
  }
  if (weight.codes == Codes::kBf16)
    linear_tiles<Bf16Format>(task);
  else if (weight.codes == Codes::kS4)
    linear_tiles<S4Format>(task);
  else if (weight.group == 16)
    linear_tiles<S8Format<16>>(task);
  else
    linear_tiles<S8Format<32>>(task);
}

// One output's weights by unpacking its block and keeping one lane.
template <class F>
static void unpacked_lane(const LinearView& weight, int output, float* values) {
  const std::uint8_t* block = weight.data + output / kBlock * weight.block_bytes;
  const int lane = output % kBlock;
  float multiplier;
  std::memcpy(&multiplier, block + weight.scales_at + lane * sizeof multiplier, sizeof multiplier);
  for (int step = 0; step < weight.steps(); ++step) {
    alignas(64) std::uint16_t tile[kTileBytes / 2];
    F::unpack(block + step * F::step_bytes, reinterpret_cast<std::uint8_t*>(tile));
    const int left = weight.inputs - step * kStep;
    for (int k = 0; k < (left < kStep ? left : kStep); ++k) {
      const std::uint16_t half = tile[(k / 2 * kBlock + lane) * 2 + k % 2];
      const std::uint32_t bits = static_cast<std::uint32_t>(half) << 16;
      float value;
      std::memcpy(&value, &bits, sizeof value);
      values[step * kStep + k] = multiplier * value;
    }
  }
}

static void weights_of(const LinearView& weight, int output, float* values) {
  if (weight.codes == Codes::kBf16)
    dequantize_output(weight, output, values);
  else if (weight.codes == Codes::kS4)
    unpacked_lane<S4Format>(weight, output, values);
  else if (weight.group == 16)
    unpacked_lane<S8Format<16>>(weight, output, values);
  else
    unpacked_lane<S8Format<32>>(weight, output, values);
}

}  // namespace trimaran::TRIMARAN_TIER
