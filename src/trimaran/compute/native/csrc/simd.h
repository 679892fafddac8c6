// Sixteen float32 lanes on every tier: one register of AVX-512, two of AVX2, or a vector of
// the compiler's own, which becomes whatever the target has. The same operations in the
// same order give the same bits on all tiers that have fused multiply-add.
#pragma once

#include <cstdint>
#include <cstring>

#if defined(__AVX2__)
#include <immintrin.h>
#endif

namespace trimaran::TRIMARAN_TIER {

// 2^x on [-1/2, 1/2], fitted for the least relative error.
constexpr float kExp2[6] = {1.0f,          0.693147004f,    0.240222409f,
                            0.0555073433f, 0.00967155490f, 0.00132646726f};
constexpr float kRoundMagic = 12582912.0f;  // 1.5 * 2^23: adding it rounds to whole numbers

#if defined(__AVX512F__)

struct V16 {
  __m512 v;
};

static inline V16 vload(const float* p) { return {_mm512_loadu_ps(p)}; }
static inline void vstore(float* p, V16 a) { _mm512_storeu_ps(p, a.v); }
static inline V16 vset1(float x) { return {_mm512_set1_ps(x)}; }
static inline V16 vzero() { return {_mm512_setzero_ps()}; }
static inline V16 vadd(V16 a, V16 b) { return {_mm512_add_ps(a.v, b.v)}; }
static inline V16 vsub(V16 a, V16 b) { return {_mm512_sub_ps(a.v, b.v)}; }
static inline V16 vmul(V16 a, V16 b) { return {_mm512_mul_ps(a.v, b.v)}; }
static inline V16 vdiv(V16 a, V16 b) { return {_mm512_div_ps(a.v, b.v)}; }
// a * b + c, rounded once.
static inline V16 vfma(V16 a, V16 b, V16 c) { return {_mm512_fmadd_ps(a.v, b.v, c.v)}; }
// The greater; b where either is NaN.
static inline V16 vmax(V16 a, V16 b) { return {_mm512_max_ps(a.v, b.v)}; }
static inline V16 vmin(V16 a, V16 b) { return {_mm512_min_ps(a.v, b.v)}; }

static inline __mmask16 vfirst(int count) { return static_cast<__mmask16>((1u << count) - 1); }
// The first `count` lanes (0..16) of a, the others of b.
static inline V16 vselect_first(int count, V16 a, V16 b) {
  return {_mm512_mask_blend_ps(vfirst(count), b.v, a.v)};
}
// Lanes of a where x < 0, of b elsewhere.
static inline V16 vselect_negative(V16 x, V16 a, V16 b) {
  return {_mm512_mask_blend_ps(_mm512_cmp_ps_mask(x.v, _mm512_setzero_ps(), _CMP_LT_OQ), b.v,
                               a.v)};
}
// The first `count` lanes from memory, zeros beyond; touches nothing beyond.
static inline V16 vload_first(const float* p, int count) {
  return {_mm512_maskz_loadu_ps(vfirst(count), p)};
}
static inline void vstore_first(float* p, int count, V16 a) {
  _mm512_mask_storeu_ps(p, vfirst(count), a.v);
}

// 16 pairs of bf16: the even and the odd elements, widened.
static inline void vload_bf16_pairs(const std::uint16_t* p, V16& even, V16& odd) {
  const __m512i x = _mm512_loadu_si512(p);
  even.v = _mm512_castsi512_ps(_mm512_slli_epi32(x, 16));
  odd.v = _mm512_castsi512_ps(
      _mm512_and_si512(x, _mm512_set1_epi32(static_cast<int>(0xffff0000u))));
}
static inline V16 vload_i8(const std::int8_t* p) {
  const __m128i bytes = _mm_loadu_si128(reinterpret_cast<const __m128i*>(p));
  return {_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(bytes))};
}
static inline V16 vload_f16(const std::uint16_t* p) {
  return {_mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)))};
}

static inline float vhmax(V16 a) { return _mm512_reduce_max_ps(a.v); }
// Lanes i and i + 8, then i + 4, i + 2, i + 1.
static inline float vhsum(V16 a) {
  const __m256 upper = _mm256_castpd_ps(_mm512_extractf64x4_pd(_mm512_castps_pd(a.v), 1));
  const __m256 x = _mm256_add_ps(_mm512_castps512_ps256(a.v), upper);
  __m128 y = _mm_add_ps(_mm256_castps256_ps128(x), _mm256_extractf128_ps(x, 1));
  y = _mm_add_ps(y, _mm_movehl_ps(y, y));
  y = _mm_add_ss(y, _mm_movehdup_ps(y));
  return _mm_cvtss_f32(y);
}

// p * 2^n for whole n in [-126, 0]; 0 where x < -126.
static inline V16 vscale_exp2(V16 p, V16 n, V16 x) {
  const __mmask16 keep = _mm512_cmp_ps_mask(x.v, _mm512_set1_ps(-126.0f), _CMP_NLT_UQ);
  return {_mm512_maskz_scalef_ps(keep, p.v, n.v)};
}

#elif defined(__AVX2__)

struct V16 {
  __m256 lo, hi;
};

static inline V16 vload(const float* p) { return {_mm256_loadu_ps(p), _mm256_loadu_ps(p + 8)}; }
static inline void vstore(float* p, V16 a) {
  _mm256_storeu_ps(p, a.lo);
  _mm256_storeu_ps(p + 8, a.hi);
}
static inline V16 vset1(float x) { return {_mm256_set1_ps(x), _mm256_set1_ps(x)}; }
static inline V16 vzero() { return {_mm256_setzero_ps(), _mm256_setzero_ps()}; }
static inline V16 vadd(V16 a, V16 b) {
  return {_mm256_add_ps(a.lo, b.lo), _mm256_add_ps(a.hi, b.hi)};
}
static inline V16 vsub(V16 a, V16 b) {
  return {_mm256_sub_ps(a.lo, b.lo), _mm256_sub_ps(a.hi, b.hi)};
}
static inline V16 vmul(V16 a, V16 b) {
  return {_mm256_mul_ps(a.lo, b.lo), _mm256_mul_ps(a.hi, b.hi)};
}
static inline V16 vdiv(V16 a, V16 b) {
  return {_mm256_div_ps(a.lo, b.lo), _mm256_div_ps(a.hi, b.hi)};
}
static inline V16 vfma(V16 a, V16 b, V16 c) {
  return {_mm256_fmadd_ps(a.lo, b.lo, c.lo), _mm256_fmadd_ps(a.hi, b.hi, c.hi)};
}
static inline V16 vmax(V16 a, V16 b) {
  return {_mm256_max_ps(a.lo, b.lo), _mm256_max_ps(a.hi, b.hi)};
}
static inline V16 vmin(V16 a, V16 b) {
  return {_mm256_min_ps(a.lo, b.lo), _mm256_min_ps(a.hi, b.hi)};
}

// All bits of lane first + i set where first + i < count.
static inline __m256i vfirst(int count, int first) {
  const __m256i lanes = _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7);
  return _mm256_cmpgt_epi32(_mm256_set1_epi32(count - first), lanes);
}
static inline V16 vselect_first(int count, V16 a, V16 b) {
  return {_mm256_blendv_ps(b.lo, a.lo, _mm256_castsi256_ps(vfirst(count, 0))),
          _mm256_blendv_ps(b.hi, a.hi, _mm256_castsi256_ps(vfirst(count, 8)))};
}
static inline V16 vselect_negative(V16 x, V16 a, V16 b) {
  const __m256 zero = _mm256_setzero_ps();
  return {_mm256_blendv_ps(b.lo, a.lo, _mm256_cmp_ps(x.lo, zero, _CMP_LT_OQ)),
          _mm256_blendv_ps(b.hi, a.hi, _mm256_cmp_ps(x.hi, zero, _CMP_LT_OQ))};
}
static inline V16 vload_first(const float* p, int count) {
  return {_mm256_maskload_ps(p, vfirst(count, 0)), _mm256_maskload_ps(p + 8, vfirst(count, 8))};
}
static inline void vstore_first(float* p, int count, V16 a) {
  _mm256_maskstore_ps(p, vfirst(count, 0), a.lo);
  _mm256_maskstore_ps(p + 8, vfirst(count, 8), a.hi);
}

static inline void vload_bf16_pairs(const std::uint16_t* p, V16& even, V16& odd) {
  const __m256i a = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p));
  const __m256i b = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p + 16));
  const __m256i upper = _mm256_set1_epi32(static_cast<int>(0xffff0000u));
  even = {_mm256_castsi256_ps(_mm256_slli_epi32(a, 16)),
          _mm256_castsi256_ps(_mm256_slli_epi32(b, 16))};
  odd = {_mm256_castsi256_ps(_mm256_and_si256(a, upper)),
         _mm256_castsi256_ps(_mm256_and_si256(b, upper))};
}
static inline V16 vload_i8(const std::int8_t* p) {
  const __m128i bytes = _mm_loadu_si128(reinterpret_cast<const __m128i*>(p));
  return {_mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(bytes)),
          _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_srli_si128(bytes, 8)))};
}
static inline V16 vload_f16(const std::uint16_t* p) {
  return {_mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p))),
          _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p + 8)))};
}

static inline float vhmax(V16 a) {
  const __m256 x = _mm256_max_ps(a.lo, a.hi);
  __m128 y = _mm_max_ps(_mm256_castps256_ps128(x), _mm256_extractf128_ps(x, 1));
  y = _mm_max_ps(y, _mm_movehl_ps(y, y));
  y = _mm_max_ss(y, _mm_movehdup_ps(y));
  return _mm_cvtss_f32(y);
}
static inline float vhsum(V16 a) {
  const __m256 x = _mm256_add_ps(a.lo, a.hi);
  __m128 y = _mm_add_ps(_mm256_castps256_ps128(x), _mm256_extractf128_ps(x, 1));
  y = _mm_add_ps(y, _mm_movehl_ps(y, y));
  y = _mm_add_ss(y, _mm_movehdup_ps(y));
  return _mm_cvtss_f32(y);
}

static inline __m256 scale_exp2(__m256 p, __m256 n, __m256 x) {
  const __m256i exponent =
      _mm256_slli_epi32(_mm256_add_epi32(_mm256_cvtps_epi32(n), _mm256_set1_epi32(127)), 23);
  const __m256 keep = _mm256_cmp_ps(x, _mm256_set1_ps(-126.0f), _CMP_NLT_UQ);
  return _mm256_and_ps(keep, _mm256_mul_ps(p, _mm256_castsi256_ps(exponent)));
}
static inline V16 vscale_exp2(V16 p, V16 n, V16 x) {
  return {scale_exp2(p.lo, n.lo, x.lo), scale_exp2(p.hi, n.hi, x.hi)};
}

#else

typedef float F16 __attribute__((vector_size(64)));
typedef std::int32_t I16 __attribute__((vector_size(64)));
typedef std::uint32_t U16 __attribute__((vector_size(64)));

struct V16 {
  F16 v;
};

static inline V16 vload(const float* p) {
  V16 a;
  std::memcpy(&a, p, sizeof a);
  return a;
}
static inline void vstore(float* p, V16 a) { std::memcpy(p, &a, sizeof a); }
static inline V16 vset1(float x) { return {x - F16{}}; }
static inline V16 vzero() { return {F16{}}; }
static inline V16 vadd(V16 a, V16 b) { return {a.v + b.v}; }
static inline V16 vsub(V16 a, V16 b) { return {a.v - b.v}; }
static inline V16 vmul(V16 a, V16 b) { return {a.v * b.v}; }
static inline V16 vdiv(V16 a, V16 b) { return {a.v / b.v}; }
// Rounded twice: a fused one would be a function call a lane.
static inline V16 vfma(V16 a, V16 b, V16 c) { return {a.v * b.v + c.v}; }
static inline V16 vmax(V16 a, V16 b) { return {a.v > b.v ? a.v : b.v}; }
static inline V16 vmin(V16 a, V16 b) { return {a.v < b.v ? a.v : b.v}; }

static inline V16 vselect_first(int count, V16 a, V16 b) {
  const I16 lanes = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
  return {lanes < count ? a.v : b.v};
}
static inline V16 vselect_negative(V16 x, V16 a, V16 b) { return {x.v < F16{} ? a.v : b.v}; }
static inline V16 vload_first(const float* p, int count) {
  V16 a = vzero();
  std::memcpy(&a, p, count * sizeof *p);
  return a;
}
static inline void vstore_first(float* p, int count, V16 a) {
  std::memcpy(p, &a, count * sizeof *p);
}

static inline void vload_bf16_pairs(const std::uint16_t* p, V16& even, V16& odd) {
  U16 x;
  std::memcpy(&x, p, sizeof x);
  const U16 low = x << 16, high = x & 0xffff0000u;
  std::memcpy(&even, &low, sizeof even);
  std::memcpy(&odd, &high, sizeof odd);
}
static inline V16 vload_i8(const std::int8_t* p) {
  float lanes[16];
  for (int i = 0; i < 16; ++i) lanes[i] = static_cast<float>(p[i]);
  return vload(lanes);
}
// Exponents are moved into float32's range by a product, which is exact and also puts
// subnormals right; those of infinities and NaN are filled up.
static inline V16 vload_f16(const std::uint16_t* p) {
  std::uint16_t halves[16];
  std::memcpy(halves, p, sizeof halves);
  U16 bits;
  for (int i = 0; i < 16; ++i) bits[i] = halves[i];
  const U16 moved = (bits & 0x7fffu) << 13 | (bits & 0x8000u) << 16;
  V16 a;
  std::memcpy(&a, &moved, sizeof a);
  a.v *= 0x1p112f;
  const U16 special = (U16)((bits & 0x7c00u) == 0x7c00u) & 0x7f800000u;
  std::memcpy(&bits, &a, sizeof bits);
  bits |= special;
  std::memcpy(&a, &bits, sizeof a);
  return a;
}

static inline float vhmax(V16 a) {
  float lanes[16];
  vstore(lanes, a);
  for (int half = 8; half; half /= 2)
    for (int i = 0; i < half; ++i)
      lanes[i] = lanes[i] > lanes[i + half] ? lanes[i] : lanes[i + half];
  return lanes[0];
}
static inline float vhsum(V16 a) {
  float lanes[16];
  vstore(lanes, a);
  for (int half = 8; half; half /= 2)
    for (int i = 0; i < half; ++i) lanes[i] += lanes[i + half];
  return lanes[0];
}

static inline V16 vscale_exp2(V16 p, V16 n, V16 x) {
  const F16 bounded = n.v > -126.0f ? n.v : -126.0f - F16{};  // also in the place of a NaN
  const I16 exponent = (__builtin_convertvector(bounded, I16) + 127) << 23;
  V16 power;
  std::memcpy(&power, &exponent, sizeof power);
  return {x.v < -126.0f ? F16{} : p.v * power.v};
}

#endif

// 2^x for x <= 0, within 2^-23; 0 below 2^-126, NaN for NaN.
static inline V16 vexp2(V16 x) {
  const V16 magic = vset1(kRoundMagic);
  const V16 whole = vsub(vadd(x, magic), magic);
  const V16 part = vsub(x, whole);
  V16 p = vset1(kExp2[5]);
  for (int i = 4; i >= 0; --i) p = vfma(p, part, vset1(kExp2[i]));
  return vscale_exp2(p, whole, x);
}

}  // namespace trimaran::TRIMARAN_TIER
