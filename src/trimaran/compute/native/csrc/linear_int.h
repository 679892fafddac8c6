// Integer products in vector registers: one block of outputs and a few rows at a time.
// Included by each tier inside its own compilation unit.
#pragma once

#include "linear_finish.h"

namespace trimaran::TRIMARAN_TIER {

// What a kernel is compiled for.
template <Codes kCodes, int kGroupSize, bool kHasMins>
struct IntFormat {
  static constexpr bool nibbles = kCodes != Codes::kU8;
  static constexpr bool upper = kCodes == Codes::kU6;
  static constexpr bool mins = kHasMins;
  static constexpr int groups = kStep / kGroupSize;  // of a step
  static constexpr int lines = 8 / groups;           // of four inputs, of a group
  static constexpr int step_bytes = code_step_bytes(kCodes);
  static constexpr int fetched = step_bytes / 64 + 1;  // lines a step: codes, and scales with mins
};

// One row's activations at one step, as the tier's kernel reads them.
struct RowStep {
  const std::int8_t* planes;
  const std::int32_t* sums;  // of the step's groups
};

#if defined(__AVX512VNNI__)

constexpr int kIntRows = 4;

// Codes of 16 outputs and the four inputs of a line, unsigned bytes.
template <class F>
static inline __m512i load_line(const std::uint8_t* codes, int line) {
  if constexpr (!F::nibbles) {
    return _mm512_loadu_si512(codes + line * 64);
  } else {
    const __m512i low_nibbles = _mm512_set1_epi8(15);
    const __m512i pair = _mm512_loadu_si512(codes + line % 4 * 64);
    const __m512i low = _mm512_and_si512(line < 4 ? pair : _mm512_srli_epi16(pair, 4), low_nibbles);
    if constexpr (!F::upper) return low;
    const __m512i four = _mm512_loadu_si512(codes + 256 + line / 4 * 64);
    const int left = 4 - upper_shift(line);
    const __m512i moved = left > 0   ? _mm512_slli_epi16(four, left)
                          : left < 0 ? _mm512_srli_epi16(four, -left)
                                     : four;
    constexpr int kOrAnd = 0xf8;  // a | (b & c)
    return _mm512_ternarylogic_epi32(low, moved, _mm512_set1_epi8(0x30), kOrAnd);
  }
}

static inline __m512i broadcast4(const std::int8_t* p) {
  std::int32_t four;
  std::memcpy(&four, p, sizeof four);
  return _mm512_set1_epi32(four);
}

// sum += codes * the four bytes at p: in place and with the operand in memory, which gcc 12
// doesn't find by itself.
static inline void add_bytes(__m512i& sum, __m512i codes, const std::int8_t* p) {
  asm("vpdpbusd %2%{1to16%}, %1, %0"
      : "+v"(sum)
      : "v"(codes), "m"(*reinterpret_cast<const std::int32_t*>(p)));
}

// sums[group][row] = float(isum) of one step.
template <class F, int R>
static inline void step_sums(const std::uint8_t* codes, const RowStep* rows, int offset,
                             V16 (&sums)[F::groups][R]) {
  for (int g = 0; g < F::groups; ++g) {
    __m512i high[R], low[R];
    for (int r = 0; r < R; ++r) {
      high[r] = _mm512_setzero_si512();
      low[r] = F::mins ? high[r] : _mm512_set1_epi32(-offset * rows[r].sums[g]);
    }
#pragma GCC unroll 8
    for (int i = 0; i < F::lines; ++i) {
      const int line = g * F::lines + i;
      const __m512i c = load_line<F>(codes, line);
      for (int r = 0; r < R; ++r) {
        high[r] = _mm512_dpbusd_epi32(high[r], c, broadcast4(rows[r].planes + line * 4));
        low[r] = _mm512_dpbusd_epi32(low[r], c, broadcast4(rows[r].planes + kStep + line * 4));
      }
    }
    for (int r = 0; r < R; ++r)
      sums[g][r].v =
          _mm512_cvtepi32_ps(_mm512_add_epi32(_mm512_slli_epi32(high[r], 4), low[r]));
  }
}

#elif defined(__AVX2__)

constexpr int kIntRows = 2;

// Inputs (0, 2) and (1, 3) of a line as pairs of 16 bits, for 8 outputs.
template <class F>
static inline void load_line(const std::uint8_t* codes, int line, int half, __m256i& even,
                             __m256i& odd) {
  const auto load = [&](int at) {
    return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(codes + at + half * 32));
  };
  const __m256i x = load((F::nibbles ? line % 4 : line) * 64);
  const __m256i mask = _mm256_set1_epi32(F::nibbles ? 0x000f000f : 0x00ff00ff);
  const int shift = F::nibbles && line >= 4 ? 4 : 0;
  even = _mm256_and_si256(shift ? _mm256_srli_epi32(x, 4) : x, mask);
  odd = _mm256_and_si256(_mm256_srli_epi32(x, 8 + shift), mask);
  if constexpr (F::upper) {
    const __m256i four = load(256 + line / 4 * 64), bits = _mm256_set1_epi32(0x00300030);
    const int left = 4 - upper_shift(line);  // of even inputs; odd ones lie 8 bits further
    const __m256i moved = left < 0 ? _mm256_srli_epi32(four, -left) : _mm256_slli_epi32(four, left);
    even = _mm256_or_si256(even, _mm256_and_si256(moved, bits));
    odd = _mm256_or_si256(odd, _mm256_and_si256(_mm256_srli_epi32(four, 8 - left), bits));
  }
}

static inline __m256i broadcast_pair(const std::int8_t* p) {
  std::int32_t pair;
  std::memcpy(&pair, p, sizeof pair);
  return _mm256_set1_epi32(pair);
}

template <class F, int R>
static inline void step_sums(const std::uint8_t* codes, const RowStep* rows, int offset,
                             V16 (&sums)[F::groups][R]) {
  for (int g = 0; g < F::groups; ++g)
#pragma GCC unroll 2
    for (int half = 0; half < 2; ++half) {
      __m256i sum[R];
      for (int r = 0; r < R; ++r)
        sum[r] = F::mins ? _mm256_setzero_si256() : _mm256_set1_epi32(-offset * rows[r].sums[g]);
#pragma GCC unroll 8
      for (int i = 0; i < F::lines; ++i) {
        const int line = g * F::lines + i;
        __m256i even, odd;
        load_line<F>(codes, line, half, even, odd);
        for (int r = 0; r < R; ++r) {
          const std::int8_t* q = rows[r].planes + line * 8;
          const __m256i a = _mm256_madd_epi16(even, broadcast_pair(q));
          const __m256i b = _mm256_madd_epi16(odd, broadcast_pair(q + 4));
          sum[r] = _mm256_add_epi32(sum[r], _mm256_add_epi32(a, b));
        }
      }
      for (int r = 0; r < R; ++r)
        (half ? sums[g][r].hi : sums[g][r].lo) = _mm256_cvtepi32_ps(sum[r]);
    }
}

#else

constexpr int kIntRows = 2;

// In float32, where all of these integers are exact.
template <class F, int R>
static inline void step_sums(const std::uint8_t* codes, const RowStep* rows, int offset,
                             V16 (&sums)[F::groups][R]) {
  for (int g = 0; g < F::groups; ++g) {
    for (int r = 0; r < R; ++r)
      sums[g][r] = vset1(static_cast<float>(-offset) * static_cast<float>(rows[r].sums[g]));
    for (int i = 0; i < F::lines; ++i) {
      const int line = g * F::lines + i;
      U16 x;
      std::memcpy(&x, codes + (F::nibbles ? line % 4 : line) * 64, sizeof x);
      if (F::nibbles) x = (line < 4 ? x : x >> 4) & 0x0f0f0f0fu;
      if (F::upper) {
        U16 four;
        std::memcpy(&four, codes + 256 + line / 4 * 64, sizeof four);
        x |= (four >> upper_shift(line) & 0x03030303u) << 4;
      }
      std::int16_t q[R][4];
      for (int r = 0; r < R; ++r) std::memcpy(q[r], rows[r].planes + line * 8, sizeof q[r]);
      constexpr int kOrder[4] = {0, 2, 1, 3};
      for (int j = 0; j < 4; ++j) {
        const U16 c = x >> (8 * j) & 255u;
        const F16 code = __builtin_convertvector((I16)c, F16);
        for (int r = 0; r < R; ++r) sums[g][r].v += code * static_cast<float>(q[r][kOrder[j]]);
      }
    }
  }
}

#endif

// Weights are read in order, on into the next block: so far ahead into the second-level cache,
// scales and minima with the codes.
constexpr int kFetchAhead = 12 << 10;

template <class F, int R>
static void int_rows(const LinearTask& task, int block, int row) {
  const LinearView& weight = *task.weight;
  const int steps = weight.steps();
  const std::uint8_t* codes = weight.data + block * weight.block_bytes;
  const std::uint8_t* scales = codes + weight.scales_at;
  const std::uint8_t* mins = codes + weight.mins_at;
  const std::uint8_t* ahead = codes + kFetchAhead;
  const bool fetches = row == task.row_begin;  // the rows after it find them in the cache
  const std::int32_t* sums = F::groups == 1 ? task.quant.sums32 : task.quant.sums16;
  RowStep rows[R];
  const float* float_sums[R];
  V16 acc[R];
  for (int r = 0; r < R; ++r) {
    const std::size_t first = static_cast<std::size_t>(row + r) * steps;
    rows[r] = {task.quant.planes + activation_bytes(row + r, 0, steps),
               sums + first * F::groups};
    float_sums[r] = task.quant.float_sums(row + r, steps);
    acc[r] = vzero();
  }
  for (int step = 0; step < steps; ++step, codes += F::step_bytes) {
    if (fetches)
      for (int line = 0; line < F::fetched; ++line, ahead += 64) __builtin_prefetch(ahead, 0, 2);
    V16 isum[F::groups][R];
    step_sums<F, R>(codes, rows, weight.offset, isum);
    for (int g = 0; g < F::groups; ++g) {
      const V16 scale = load_scales<F::groups>(weight, scales, step * F::groups + g);
      for (int r = 0; r < R; ++r) acc[r] = vfma(scale, isum[g][r], acc[r]);
    }
    if constexpr (F::mins) {
      const V16 min = load_scales<1>(weight, mins, step);
      for (int r = 0; r < R; ++r) acc[r] = vfma(min, vset1(float_sums[r][step * kRowPad]), acc[r]);
    }
    for (int r = 0; r < R; ++r) {
      rows[r].planes += kRowPad * kStepBytes;
      rows[r].sums += F::groups;
    }
  }
  finish_rows(task, row, block, R,
              [&](int r) { return vmul(acc[r], vset1(task.quant.scales[row + r])); });
}

template <class F, int R = kIntRows>
static inline void int_rows_of(const LinearTask& task, int block, int row, int count) {
  if constexpr (R > 1) {
    if (count < R) {
      int_rows_of<F, R - 1>(task, block, row, count);
      return;
    }
  }
  int_rows<F, R>(task, block, row);
}

template <class F>
static void linear_int_as(const LinearTask& task) {
  for (int block = task.block_begin; block < task.block_end; ++block)
    for (int row = task.row_begin; row < task.row_end; row += kIntRows) {
      const int left = task.row_end - row;
      int_rows_of<F>(task, block, row, left < kIntRows ? left : kIntRows);
    }
}

template <Codes kCodes, class Function>
static inline void with_groups(const LinearView& weight, Function f) {
  if (weight.mins) {
    f(IntFormat<kCodes, 32, true>{});
  } else if (weight.group == 32) {
    f(IntFormat<kCodes, 32, false>{});
  } else if constexpr (kCodes == Codes::kU6) {
    f(IntFormat<kCodes, 16, false>{});  // ggml's Q6_K, the only one with groups of 16
  }
}

// Calls `f` with the format of a weight of integer codes.
template <class Function>
static inline void with_format(const LinearView& weight, Function f) {
  if (weight.codes == Codes::kU4)
    with_groups<Codes::kU4>(weight, f);
  else if (weight.codes == Codes::kU6)
    with_groups<Codes::kU6>(weight, f);
  else
    with_groups<Codes::kU8>(weight, f);
}

static void linear_int(const LinearTask& task) {
  with_format(*task.weight, [&](auto format) { linear_int_as<decltype(format)>(task); });
}

}  // namespace trimaran::TRIMARAN_TIER
