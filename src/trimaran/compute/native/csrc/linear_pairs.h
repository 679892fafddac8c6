// Integer products of 4-bit weights with many rows: two blocks of outputs in three
// multiplications where two planes of activations would take four.
//
// A word holds the codes a and b of two outputs, w = a + 4096 * (b - 8), and meets q in 16
// bits. Over a step, in 32 bits,
//
//   sum of w * q = A + 4096 * B    A = sum of a * q,  B = sum of (b - 8) * q,  |B| < 2^19
//
// of which the lowest 12 bits are those of A. Its others follow from the high plane, one
// product of bytes:
//
//   A = 16 * (sum of a * hi) + 8 * (sum of lo) + rest,  rest = sum of (a - 8) * lo
//
// with -1792 <= rest <= 2048. So with
//
//   known = sum of (16 * a) * hi, starting from 8 * (sum of lo) - 1792 (QuantRows::starts)
//   d     = sum of w * q - known
//
//   rest + 1792 = d mod 4096,  B = d / 4096 rounded down,  A = known + d mod 4096
//
// Everything is exact, so results are those of linear_int.h. Included by the tier inside its
// own compilation unit.
#pragma once

#include "linear_int.h"

namespace trimaran::TRIMARAN_TIER {

constexpr int kPairRows = 8;  // in hand
constexpr int kPairStepBytes = 8 * 3 * 64;
// Steps that are unpacked at once, and rows that use them, so that both stay in the
// second-level cache.
constexpr int kSlabSteps = 48;
constexpr int kSlabRows = 128;
constexpr std::size_t kPairSlabBytes = std::size_t{kSlabSteps} * kPairStepBytes;

// As add_bytes, of two words.
static inline void add_words(__m512i& sum, __m512i codes, const std::int8_t* p) {
  asm("vpdpwssd %2%{1to16%}, %1, %0"
      : "+v"(sum)
      : "v"(codes), "m"(*reinterpret_cast<const std::int32_t*>(p)));
}

// One step of two blocks: for each line of four inputs, words of inputs 0 and 2, words of 1 and
// 3, bytes 16 * a.
static inline void unpack_pair(const std::uint8_t* first, const std::uint8_t* second,
                               std::uint8_t* target) {
  const __m512i nibbles = _mm512_set1_epi8(15), sign = _mm512_set1_epi16(-0x8000);
  for (int line = 0; line < 8; ++line, target += 3 * 64) {
    __m512i a = _mm512_loadu_si512(first + line % 4 * 64);
    __m512i b = _mm512_loadu_si512(second + line % 4 * 64);
    a = _mm512_and_si512(line < 4 ? a : _mm512_srli_epi16(a, 4), nibbles);
    b = _mm512_and_si512(line < 4 ? b : _mm512_srli_epi16(b, 4), nibbles);
    const __m512i even = _mm512_and_si512(a, _mm512_set1_epi16(0x00ff));
    const __m512i odd = _mm512_srli_epi16(a, 8);
    const __m512i above_even = _mm512_xor_si512(_mm512_slli_epi16(b, 12), sign);
    const __m512i above_odd =
        _mm512_xor_si512(_mm512_slli_epi16(_mm512_srli_epi16(b, 8), 12), sign);
    _mm512_store_si512(target, _mm512_or_si512(even, above_even));
    _mm512_store_si512(target + 64, _mm512_or_si512(odd, above_odd));
    _mm512_store_si512(target + 128, _mm512_slli_epi16(a, 4));
  }
}

// Scales and minima of both blocks at one step.
struct PairScales {
  V16 scale[2], min[2];
};

template <bool kMins>
static inline PairScales pair_scales(const LinearView& weight, const std::uint8_t* block,
                                     int step) {
  PairScales found{};
  for (int n = 0; n < 2; ++n, block += weight.block_bytes) {
    found.scale[n] = load_scales<1>(weight, block + weight.scales_at, step);
    if constexpr (kMins) found.min[n] = load_scales<1>(weight, block + weight.mins_at, step);
  }
  return found;
}

// Registers are taken: what was read before is read again, and sums wait in memory.
static inline void finish_products() { asm volatile("" : : : "memory"); }

static inline __m512i int_lanes(const std::int32_t* p) { return _mm512_set1_epi32(*p); }

// The weights that are multiplied next, fetched while the present ones are: some lines a step.
class NextPair {
 public:
  // `calls` of fetch() reach the end.
  NextPair(const std::uint8_t* data, std::size_t bytes, int calls)
      : at_(data), end_(data + bytes), share_((bytes / calls + 64) / 64 * 64) {}

  void fetch() {
    const std::uint8_t* stop = share_ < end_ - at_ ? at_ + share_ : end_;
    for (; at_ < stop; at_ += 64) __builtin_prefetch(at_, 0, 2);
  }

 private:
  const std::uint8_t* at_;
  const std::uint8_t* end_;
  std::ptrdiff_t share_;
};

// acc[row][2][16] over steps begin..begin + count of rows row..row + R, one tile's.
template <bool kMins, int R>
static void pair_rows(const LinearTask& task, const std::uint8_t* block, int row, int begin,
                      int count, const std::uint8_t* slab, NextPair& next, float* acc) {
  const LinearView& weight = *task.weight;
  const int steps = weight.steps();
  const QuantRows& quant = task.quant;
  const std::int8_t* high = quant.planes + activation_bytes(row, begin, steps);
  const std::int8_t* words = quant.words + activation_bytes(row, begin, steps);
  const std::size_t first = quant.tile_offset(row, steps) + begin * kRowPad;
  const std::int32_t* starts = quant.starts + first;
  const std::int32_t* sums8 = quant.sums8 + first;
  const float* float_sums = quant.sums32f + first;
  const __m512i low_bits = _mm512_set1_epi32(4095);
  for (int step = begin; step < begin + count; ++step, slab += kPairStepBytes) {
    next.fetch();
    __m512i both[R], known[R];
    for (int r = 0; r < R; ++r) {
      both[r] = _mm512_setzero_si512();
      known[r] = int_lanes(starts + r);
    }
#pragma GCC unroll 8
    for (int line = 0; line < 8; ++line) {
      const __m512i even = _mm512_load_si512(slab + line * 192);
      const __m512i odd = _mm512_load_si512(slab + line * 192 + 64);
      const __m512i a16 = _mm512_load_si512(slab + line * 192 + 128);
      for (int r = 0; r < R; ++r) {
        const std::int8_t* q = words + r * kStepBytes + line * 8;
        add_words(both[r], even, q);
        add_bytes(known[r], a16, high + r * kStepBytes + line * 4);
        add_words(both[r], odd, q + 4);
      }
    }
    finish_products();
    const PairScales scales = pair_scales<kMins>(weight, block, step);
    for (int r = 0; r < R; ++r) {
      const __m512i d = _mm512_sub_epi32(both[r], known[r]);
      __m512i a = _mm512_add_epi32(known[r], _mm512_and_si512(d, low_bits));
      __m512i b = _mm512_srai_epi32(d, 12);
      if constexpr (kMins)
        b = _mm512_add_epi32(b, int_lanes(sums8 + r));
      else
        a = _mm512_sub_epi32(a, int_lanes(sums8 + r));
      float* target = acc + r * 2 * kBlock;
      V16 sum[2] = {vfma(scales.scale[0], {_mm512_cvtepi32_ps(a)}, vload(target)),
                    vfma(scales.scale[1], {_mm512_cvtepi32_ps(b)}, vload(target + kBlock))};
      for (int n = 0; n < 2; ++n) {
        if constexpr (kMins) sum[n] = vfma(scales.min[n], vset1(float_sums[r]), sum[n]);
        vstore(target + n * kBlock, sum[n]);
      }
    }
    finish_products();
    high += kRowPad * kStepBytes;
    words += kRowPad * kStepBytes;
    starts += kRowPad;
    sums8 += kRowPad;
    float_sums += kRowPad;
  }
}

template <bool kMins, int R = kPairRows>
static inline void pair_rows_of(const LinearTask& task, const std::uint8_t* block, int row,
                                int rows, int begin, int count, const std::uint8_t* slab,
                                NextPair& next, float* acc) {
  if constexpr (R > 1) {
    if (rows < R) {
      pair_rows_of<kMins, R - 1>(task, block, row, rows, begin, count, slab, next, acc);
      return;
    }
  }
  pair_rows<kMins, R>(task, block, row, begin, count, slab, next, acc);
}

// Blocks `block` and `block` + 1 of rows row..row + rows.
template <bool kMins>
static void linear_pair(const LinearTask& task, int block, int row, int rows) {
  const LinearView& weight = *task.weight;
  const std::uint8_t* data = weight.data + block * weight.block_bytes;
  auto* slab = static_cast<std::uint8_t*>(task.scratch);
  auto* acc = reinterpret_cast<float*>(slab + kPairSlabBytes);
  const bool last = block + 2 >= task.block_end;
  NextPair next(data + 2 * weight.block_bytes, last ? 0 : 2 * weight.block_bytes,
                weight.steps() * ((rows + kPairRows - 1) / kPairRows));
  std::memset(acc, 0, static_cast<std::size_t>(rows) * 2 * kBlock * sizeof *acc);
  for (int begin = 0; begin < weight.steps(); begin += kSlabSteps) {
    const int left = weight.steps() - begin, count = left < kSlabSteps ? left : kSlabSteps;
    for (int i = 0; i < count; ++i) {
      const std::uint8_t* codes = data + (begin + i) * 256;
      unpack_pair(codes, codes + weight.block_bytes, slab + i * kPairStepBytes);
    }
    for (int r = 0; r < rows; r += kPairRows) {
      const int in_hand = rows - r < kPairRows ? rows - r : kPairRows;
      pair_rows_of<kMins>(task, data, row + r, in_hand, begin, count, slab, next,
                          acc + r * 2 * kBlock);
    }
  }
  for (int n = 0; n < 2; ++n)
    finish_rows(task, row, block + n, rows, [&](int r) {
      return vmul(vload(acc + (2 * r + n) * kBlock), vset1(task.quant.scales[row + r]));
    });
}

// Whether linear_pairs gives what linear_int does, and sooner.
static inline bool takes_pairs(const LinearTask& task) {
  const LinearView& weight = *task.weight;
  return weight.codes == Codes::kU4 && (weight.mins || weight.offset == 8) &&
         task.quant.words != nullptr && task.row_end - task.row_begin >= kLeastPairedRows;
}

static void linear_pairs(const LinearTask& task) {
  const int paired = (task.block_end - task.block_begin) / 2 * 2;
  for (int row = task.row_begin; row < task.row_end; row += kSlabRows) {
    const int left = task.row_end - row, rows = left < kSlabRows ? left : kSlabRows;
    for (int i = 0; i < paired; i += 2)
      (task.weight->mins ? linear_pair<true> : linear_pair<false>)(task, task.block_begin + i, row,
                                                                   rows);
  }
  if (task.block_begin + paired == task.block_end) return;
  LinearTask last = task;
  last.block_begin = task.block_end - 1;
  linear_int(last);
}

}  // namespace trimaran::TRIMARAN_TIER
