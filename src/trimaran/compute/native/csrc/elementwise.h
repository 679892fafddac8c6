// Operations on single rows of float32, and their rounding for linear layers. Included by
// each tier inside its own compilation unit.
#pragma once

#include "linear.h"
#include "simd.h"

namespace trimaran::TRIMARAN_TIER {

constexpr float kLog2OfE = 1.44269504f;

static void rms_norm(const float* x, const float* weight, int width, float eps, float* y) {
  V16 even = vzero(), odd = vzero();
  int i = 0;
  for (; i + 32 <= width; i += 32) {
    const V16 a = vload(x + i), b = vload(x + i + 16);
    even = vfma(a, a, even);
    odd = vfma(b, b, odd);
  }
  for (; i < width; i += 16) {
    const V16 a = vload_first(x + i, width - i < 16 ? width - i : 16);
    even = vfma(a, a, even);
  }
  const float mean = vhsum(vadd(even, odd)) / static_cast<float>(width);
  const V16 inverse = vset1(1.0f / __builtin_sqrtf(mean + eps));
  for (i = 0; i + 16 <= width; i += 16)
    vstore(y + i, vmul(vmul(vload(x + i), inverse), vload(weight + i)));
  if (i < width) {
    const int rest = width - i;
    vstore_first(y + i, rest,
                 vmul(vmul(vload_first(x + i, rest), inverse), vload_first(weight + i, rest)));
  }
}

static inline void rotate(float* first, float* second, const float* cosines,
                          const float* sines, int count) {
  const V16 a = vload_first(first, count), b = vload_first(second, count);
  const V16 c = vload_first(cosines, count), s = vload_first(sines, count);
  vstore_first(first, count, vsub(vmul(a, c), vmul(b, s)));
  vstore_first(second, count, vadd(vmul(b, c), vmul(a, s)));
}

static void rope(float* x, int heads, int head_dim, int half, const float* cosines,
                 const float* sines) {
  for (int head = 0; head < heads; ++head, x += head_dim)
    for (int i = 0; i < half; i += 16)
      rotate(x + i, x + half + i, cosines + i, sines + i, half - i < 16 ? half - i : 16);
}

// 1 / (1 + exp(-x)), by the exponential of -|x|, which can't overflow.
static inline V16 sigmoid_lanes(V16 x) {
  const V16 one = vset1(1.0f), none = vzero();
  const V16 exponent = vmul(x, vset1(kLog2OfE));
  const V16 e = vexp2(vselect_negative(x, exponent, vsub(none, exponent)));
  return vdiv(vselect_negative(x, e, one), vadd(one, e));
}

// g * sigmoid(g) * u
static inline V16 silu_mul_lanes(V16 g, V16 u) { return vmul(vmul(g, sigmoid_lanes(g)), u); }

// g / 2 * (1 + tanh(z)) * u, z = sqrt(2 / pi) * (g + 0.044715 g^3): (1 + tanh(z)) / 2 is
// sigmoid(2 z).
static inline V16 gelu_mul_lanes(V16 g, V16 u) {
  constexpr float kLinear = 1.59576912f, kCubic = 0.0713548163f;
  const V16 slope = vfma(vmul(g, g), vset1(kCubic), vset1(kLinear));
  return vmul(vmul(g, sigmoid_lanes(vmul(g, slope))), u);
}

static void silu_mul(const float* gate, const float* up, int width, float* y) {
  int i = 0;
  for (; i + 16 <= width; i += 16) vstore(y + i, silu_mul_lanes(vload(gate + i), vload(up + i)));
  if (i < width) {
    const int rest = width - i;
    vstore_first(y + i, rest,
                 silu_mul_lanes(vload_first(gate + i, rest), vload_first(up + i, rest)));
  }
}

static void gelu_mul(const float* gate, const float* up, int width, float* y) {
  int i = 0;
  for (; i + 16 <= width; i += 16) vstore(y + i, gelu_mul_lanes(vload(gate + i), vload(up + i)));
  if (i < width) {
    const int rest = width - i;
    vstore_first(y + i, rest,
                 gelu_mul_lanes(vload_first(gate + i, rest), vload_first(up + i, rest)));
  }
}

static void add(const float* a, const float* b, int width, float* y) {
  int i = 0;
  for (; i + 16 <= width; i += 16) vstore(y + i, vadd(vload(a + i), vload(b + i)));
  if (i < width) {
    const int rest = width - i;
    vstore_first(y + i, rest, vadd(vload_first(a + i, rest), vload_first(b + i, rest)));
  }
}

// Round to nearest, ties to even; a NaN stays one.
static inline void bf16_lanes(V16 x, std::uint16_t* y) {
#if defined(__AVX512F__)
  const __m512i bits = _mm512_castps_si512(x.v);
  const __m512i odd = _mm512_and_si512(_mm512_srli_epi32(bits, 16), _mm512_set1_epi32(1));
  const __m512i half = _mm512_add_epi32(odd, _mm512_set1_epi32(0x7fff));
  const __mmask16 nan = _mm512_cmp_ps_mask(x.v, x.v, _CMP_UNORD_Q);
  const __m512i quiet = _mm512_or_si512(bits, _mm512_set1_epi32(0x400000));
  const __m512i rounded = _mm512_mask_mov_epi32(_mm512_add_epi32(bits, half), nan, quiet);
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(y),
                      _mm512_cvtepi32_epi16(_mm512_srli_epi32(rounded, 16)));
#else
  std::uint32_t bits[16];
  std::memcpy(bits, &x, sizeof bits);
  for (int i = 0; i < 16; ++i) {
    const std::uint32_t rounded = bits[i] + 0x7fffu + (bits[i] >> 16 & 1u);
    const bool nan = (bits[i] & 0x7fffffffu) > 0x7f800000u;
    y[i] = static_cast<std::uint16_t>((nan ? bits[i] | 0x400000u : rounded) >> 16);
  }
#endif
}

// The next 32 elements of a row, of which `left` exist, the others zero.
static inline void load_step(const float* x, int left, V16& first, V16& second) {
  if (left >= kStep) {
    first = vload(x);
    second = vload(x + 16);
  } else {
    first = vload_first(x, left < 16 ? left : 16);
    second = left > 16 ? vload_first(x + 16, left - 16) : vzero();
  }
}

static void to_bf16_row(const float* x, int width, std::uint8_t* rows, int row) {
  const int steps = (width + kStep - 1) / kStep;
  for (int i = 0; i < steps; ++i) {
    V16 first, second;
    load_step(x + i * kStep, width - i * kStep, first, second);
    auto* y = reinterpret_cast<std::uint16_t*>(rows + activation_bytes(row, i, steps));
    bf16_lanes(first, y);
    bf16_lanes(second, y + 16);
  }
}

// The largest magnitude of a row as bits of float32, whose order is that of the magnitudes,
// with infinity and NaN above all.
static std::uint32_t largest_magnitude(const float* x, int width) {
  std::uint32_t top = 0;
  for (int i = 0; i < width; ++i) {
    std::uint32_t bits;
    std::memcpy(&bits, x + i, sizeof bits);
    bits &= 0x7fffffffu;
    top = bits > top ? bits : top;
  }
  return top;
}

// Magnitudes below it count as zero: the inverse would overflow.
constexpr float kLeastMagnitude = 1e-30f;

// What a row of floats is multiplied with before it is rounded, and what to multiply its sums
// with: 0 for a row of zeros, NaN where an element isn't finite.
struct RowScale {
  float inverse;
  float scale;

  RowScale(const float* x, int width, float most) {
    const std::uint32_t top = largest_magnitude(x, width);
    float largest;
    std::memcpy(&largest, &top, sizeof largest);
    const bool finite = top < 0x7f800000u, zero = !finite || largest < kLeastMagnitude;
    inverse = zero ? 0.0f : most / largest;
    scale = !finite ? __builtin_nanf("") : zero ? 0.0f : largest / most;
  }
};

#if defined(__AVX512F__)

// q = 16 * high + low, 16 elements of each.
static inline __m512i split_lanes(V16 x, V16 inverse, __m128i& high, __m128i& low) {
  const __m512i q = _mm512_cvtps_epi32(vmul(x, inverse).v);
  const __m512i upper = _mm512_srai_epi32(_mm512_add_epi32(q, _mm512_set1_epi32(8)), 4);
  high = _mm512_cvtepi32_epi8(upper);
  low = _mm512_cvtepi32_epi8(_mm512_sub_epi32(q, _mm512_slli_epi32(upper, 4)));
  return q;
}

// By fours in the order 0 2 1 3.
static inline void store_words(__m512i q, std::int8_t* words) {
  const __m512i ordered = _mm512_shuffle_epi32(q, static_cast<_MM_PERM_ENUM>(0xd8));
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(words), _mm512_cvtepi32_epi16(ordered));
}

// Rounds 32 elements, the step of one row at `at` bytes of the planes and `index` of what has
// a number a step; `sums` are those of the first and the second 16.
static inline void quantize_step(V16 first, V16 second, V16 inverse, const QuantRows& rows,
                                 std::size_t at, std::size_t index, std::int32_t* sums) {
  __m128i high[2], low[2];
  const __m512i q[2] = {split_lanes(first, inverse, high[0], low[0]),
                        split_lanes(second, inverse, high[1], low[1])};
  const __m256i highs = _mm256_set_m128i(high[1], high[0]);
  const __m256i lows = _mm256_set_m128i(low[1], low[0]);
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(rows.planes + at), highs);
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(rows.planes + at + kStep), lows);
  // Sums of high, and of low, in each half of 128 bits.
  const __m256i ones = _mm256_set1_epi8(1), none = _mm256_setzero_si256();
  const __m256i upper = _mm256_dpbusd_epi32(none, ones, highs);
  const __m256i lower = _mm256_dpbusd_epi32(none, ones, lows);
  __m256i sum = _mm256_add_epi32(_mm256_unpacklo_epi32(upper, lower),
                                 _mm256_unpackhi_epi32(upper, lower));
  sum = _mm256_add_epi32(sum, _mm256_shuffle_epi32(sum, 0x4e));
  const auto halves = [](__m128i both) {
    return static_cast<std::int64_t>(_mm_cvtsi128_si64(both));
  };
  const std::int64_t begin = halves(_mm256_castsi256_si128(sum));
  const std::int64_t end = halves(_mm256_extracti128_si256(sum, 1));
  const auto low_sum = [](std::int64_t both) { return static_cast<std::int32_t>(both >> 32); };
  sums[0] = 16 * static_cast<std::int32_t>(begin) + low_sum(begin);
  sums[1] = 16 * static_cast<std::int32_t>(end) + low_sum(end);
  if (rows.words == nullptr) return;
  store_words(q[0], rows.words + at);
  store_words(q[1], rows.words + at + kStep);
  rows.starts[index] = 8 * (low_sum(begin) + low_sum(end)) - 1792;
  rows.sums8[index] = 8 * (sums[0] + sums[1]);
}

// In 8 bits.
static inline void quantize_bytes(V16 first, V16 second, V16 inverse, const QuantRows& rows,
                                  std::size_t at, std::size_t, std::int32_t* sums) {
  const __m512i q[2] = {_mm512_cvtps_epi32(vmul(first, inverse).v),
                        _mm512_cvtps_epi32(vmul(second, inverse).v)};
  for (int i = 0; i < 2; ++i) {
    _mm_storeu_si128(reinterpret_cast<__m128i*>(rows.planes + at + 16 * i),
                     _mm512_cvtepi32_epi8(q[i]));
    sums[i] = _mm512_reduce_add_epi32(q[i]);
  }
}

#else

static inline void round_lanes(V16 x, V16 inverse, std::int32_t* q) {
  const V16 magic = vset1(kRoundMagic);
  float rounded[16];
  vstore(rounded, vsub(vadd(vmul(x, inverse), magic), magic));
  for (int i = 0; i < 16; ++i) q[i] = static_cast<std::int32_t>(rounded[i]);
}

// Instead of planes: q in 16 bits, by fours in the order 0 2 1 3.
static inline void quantize_step(V16 first, V16 second, V16 inverse, const QuantRows& rows,
                                 std::size_t at, std::size_t, std::int32_t* sums) {
  std::int32_t q[kStep];
  std::int16_t ordered[kStep];
  round_lanes(first, inverse, q);
  round_lanes(second, inverse, q + kStep / 2);
  for (int i = 0; i < kStep; i += 4) {
    ordered[i] = static_cast<std::int16_t>(q[i]);
    ordered[i + 1] = static_cast<std::int16_t>(q[i + 2]);
    ordered[i + 2] = static_cast<std::int16_t>(q[i + 1]);
    ordered[i + 3] = static_cast<std::int16_t>(q[i + 3]);
  }
  std::memcpy(rows.planes + at, ordered, sizeof ordered);
  sums[0] = sums[1] = 0;
  for (int i = 0; i < kStep / 2; ++i) {
    sums[0] += q[i];
    sums[1] += q[kStep / 2 + i];
  }
}

static inline void quantize_bytes(V16 first, V16 second, V16 inverse, const QuantRows& rows,
                                  std::size_t at, std::size_t index, std::int32_t* sums) {
  quantize_step(first, second, inverse, rows, at, index, sums);
}

#endif

static void quantize_grouped(const float* x, int width, const QuantRows& rows, int row) {
  const int steps = (width + kStep - 1) / kStep;
  std::int32_t* sums16 = rows.sums16 + static_cast<std::size_t>(row) * steps * 2;
  std::int32_t* sums32 = rows.sums32 + static_cast<std::size_t>(row) * steps;
  std::size_t index = rows.tile_offset(row, steps);
  for (int i = 0; i < steps; ++i, x += kStep, width -= kStep, index += kRowPad) {
    const RowScale rounding(x, width < kStep ? width : kStep, kGroupedMax);
    V16 first = vzero(), second = vzero();
    if (rounding.inverse != 0.0f) load_step(x, width, first, second);
    quantize_bytes(first, second, vset1(rounding.inverse), rows, activation_bytes(row, i, steps),
                   index, sums16 + 2 * i);
    sums32[i] = sums16[2 * i] + sums16[2 * i + 1];
    rows.step_scales[index] = rounding.scale;
    rows.sums32f[index] = static_cast<float>(sums32[i]) * rounding.scale;
  }
}

static void quantize_row(const float* x, int width, const QuantRows& rows, int row) {
  if (rows.step_scales != nullptr) return quantize_grouped(x, width, rows, row);
  const int steps = (width + kStep - 1) / kStep;
  std::int32_t* sums16 = rows.sums16 + static_cast<std::size_t>(row) * steps * 2;
  std::int32_t* sums32 = rows.sums32 + static_cast<std::size_t>(row) * steps;
  const std::size_t first_index = rows.tile_offset(row, steps);
  const RowScale rounding(x, width, kActivationMax);
  const bool zero = rounding.inverse == 0.0f;
  rows.scales[row] = rounding.scale;
  const V16 inverse = vset1(rounding.inverse);
  // Rows follow each other in memory, and come from the cache of another core.
  const float* next = x + (width + 15) / 16 * 16;
  for (int i = 0; i < steps; ++i) {
    __builtin_prefetch(next + i * kStep);
    __builtin_prefetch(next + i * kStep + 16);
    V16 first = vzero(), second = vzero();
    if (!zero) load_step(x + i * kStep, width - i * kStep, first, second);
    const std::size_t index = first_index + static_cast<std::size_t>(i) * kRowPad;
    quantize_step(first, second, inverse, rows, activation_bytes(row, i, steps), index,
                  sums16 + 2 * i);
    sums32[i] = sums16[2 * i] + sums16[2 * i + 1];
    rows.sums32f[index] = static_cast<float>(sums32[i]);
  }
}

}  // namespace trimaran::TRIMARAN_TIER
