// Sixteen float32 lanes, the same on every instruction set. Included by each tier inside its
// own compilation unit: the functions have the tier's name space, so that none compiled for
// one machine is linked into the code of another.
//
// Tiers with fused multiply-add (avx2, avx512) give the same bits; portable rounds twice.
#pragma once

#include <cstdint>
#include <cstring>

#if defined(__AVX2__) || defined(__AVX512F__)
#include <immintrin.h>
#endif

namespace trimaran::TRIMARAN_TIER {

constexpr int kLanes = 16;

// 2^x on [-1/2, 1/2], fitted for the least relative error.
constexpr float kExp2[6] = {1.0f,          0.693147004f,   0.240222409f,
                            0.0555073433f, 0.00967155490f, 0.00132646726f};
constexpr float kRounder = 12582912.0f;  // 1.5 * 2^23: adding it rounds to whole numbers

#if defined(__AVX512F__)

struct V16 {
  __m512 v;
};

static inline V16 vzero() { return {_mm512_setzero_ps()}; }
static inline V16 vset1(float x) { return {_mm512_set1_ps(x)}; }
static inline V16 vload(const float* p) { return {_mm512_loadu_ps(p)}; }
static inline void vstore(float* p, V16 a) { _mm512_storeu_ps(p, a.v); }
static inline V16 vadd(V16 a, V16 b) { return {_mm512_add_ps(a.v, b.v)}; }
static inline V16 vsub(V16 a, V16 b) { return {_mm512_sub_ps(a.v, b.v)}; }
static inline V16 vmul(V16 a, V16 b) { return {_mm512_mul_ps(a.v, b.v)}; }
static inline V16 vfma(V16 a, V16 b, V16 c) { return {_mm512_fmadd_ps(a.v, b.v, c.v)}; }

// The larger; b where either is NaN.
static inline V16 vmax(V16 a, V16 b) { return {_mm512_max_ps(a.v, b.v)}; }

// a in the first `count` lanes, b in the others.
static inline V16 vfirst(int count, V16 a, V16 b) {
  return {_mm512_mask_blend_ps(static_cast<__mmask16>((1u << count) - 1), b.v, a.v)};
}

// 16 pairs of bf16: their first and their second elements.
static inline void vload_pairs(const std::uint16_t* p, V16& first, V16& second) {
  const __m512i pairs = _mm512_loadu_si512(p);
  first.v = _mm512_castsi512_ps(_mm512_slli_epi32(pairs, 16));
  second.v = _mm512_castsi512_ps(
      _mm512_and_si512(pairs, _mm512_set1_epi32(static_cast<int>(0xffff0000u))));
}

// 2^x for x <= 0: relative error below 2^-22, 0 below 2^-126; NaN stays NaN.
static inline V16 vexp2(V16 x) {
  const __m512 rounder = _mm512_set1_ps(kRounder);
  const __m512 whole = _mm512_sub_ps(_mm512_add_ps(x.v, rounder), rounder);
  const __m512 part = _mm512_sub_ps(x.v, whole);
  __m512 p = _mm512_set1_ps(kExp2[5]);
  for (int i = 4; i >= 0; --i) p = _mm512_fmadd_ps(p, part, _mm512_set1_ps(kExp2[i]));
  const __mmask16 keep = _mm512_cmp_ps_mask(x.v, _mm512_set1_ps(-126.0f), _CMP_NLT_UQ);
  return {_mm512_maskz_scalef_ps(keep, p, whole)};
}

static inline float vfold8(__m256 a, bool largest) {
  const __m128 low = _mm256_castps256_ps128(a), high = _mm256_extractf128_ps(a, 1);
  __m128 b = largest ? _mm_max_ps(low, high) : _mm_add_ps(low, high);
  const __m128 c = _mm_movehl_ps(b, b);
  b = largest ? _mm_max_ps(b, c) : _mm_add_ps(b, c);
  const __m128 d = _mm_movehdup_ps(b);
  return _mm_cvtss_f32(largest ? _mm_max_ss(b, d) : _mm_add_ss(b, d));
}
static inline __m256 vupper(V16 a) {
  return _mm256_castpd_ps(_mm512_extractf64x4_pd(_mm512_castps_pd(a.v), 1));
}

// Sum, and largest, of the lanes: halves folded onto each other.
static inline float vsum(V16 a) {
  return vfold8(_mm256_add_ps(_mm512_castps512_ps256(a.v), vupper(a)), false);
}
static inline float vlargest(V16 a) {
  return vfold8(_mm256_max_ps(_mm512_castps512_ps256(a.v), vupper(a)), true);
}
static inline float vlane0(V16 a) { return _mm512_cvtss_f32(a.v); }

#elif defined(__AVX2__)

struct V16 {
  __m256 a, b;
};

static inline V16 vzero() { return {_mm256_setzero_ps(), _mm256_setzero_ps()}; }
static inline V16 vset1(float x) { return {_mm256_set1_ps(x), _mm256_set1_ps(x)}; }
static inline V16 vload(const float* p) { return {_mm256_loadu_ps(p), _mm256_loadu_ps(p + 8)}; }
static inline void vstore(float* p, V16 x) {
  _mm256_storeu_ps(p, x.a);
  _mm256_storeu_ps(p + 8, x.b);
}
static inline V16 vadd(V16 x, V16 y) {
  return {_mm256_add_ps(x.a, y.a), _mm256_add_ps(x.b, y.b)};
}
static inline V16 vsub(V16 x, V16 y) {
  return {_mm256_sub_ps(x.a, y.a), _mm256_sub_ps(x.b, y.b)};
}
static inline V16 vmul(V16 x, V16 y) {
  return {_mm256_mul_ps(x.a, y.a), _mm256_mul_ps(x.b, y.b)};
}
static inline V16 vfma(V16 x, V16 y, V16 z) {
  return {_mm256_fmadd_ps(x.a, y.a, z.a), _mm256_fmadd_ps(x.b, y.b, z.b)};
}
static inline V16 vmax(V16 x, V16 y) {
  return {_mm256_max_ps(x.a, y.a), _mm256_max_ps(x.b, y.b)};
}

static inline V16 vfirst(int count, V16 x, V16 y) {
  const __m256i lanes = _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7);
  const __m256i low = _mm256_cmpgt_epi32(_mm256_set1_epi32(count), lanes);
  const __m256i high = _mm256_cmpgt_epi32(_mm256_set1_epi32(count - 8), lanes);
  return {_mm256_blendv_ps(y.a, x.a, _mm256_castsi256_ps(low)),
          _mm256_blendv_ps(y.b, x.b, _mm256_castsi256_ps(high))};
}

static inline void vload_pairs(const std::uint16_t* p, V16& first, V16& second) {
  const __m256i low = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p));
  const __m256i high = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p + 16));
  const __m256i mask = _mm256_set1_epi32(static_cast<int>(0xffff0000u));
  first = {_mm256_castsi256_ps(_mm256_slli_epi32(low, 16)),
           _mm256_castsi256_ps(_mm256_slli_epi32(high, 16))};
  second = {_mm256_castsi256_ps(_mm256_and_si256(low, mask)),
            _mm256_castsi256_ps(_mm256_and_si256(high, mask))};
}

static inline __m256 vexp2_half(__m256 x) {
  const __m256 rounder = _mm256_set1_ps(kRounder);
  const __m256 shifted = _mm256_add_ps(x, rounder);
  const __m256 part = _mm256_sub_ps(x, _mm256_sub_ps(shifted, rounder));
  __m256 p = _mm256_set1_ps(kExp2[5]);
  for (int i = 4; i >= 0; --i) p = _mm256_fmadd_ps(p, part, _mm256_set1_ps(kExp2[i]));
  // The low bits of `shifted` are the whole part: moved into the exponent.
  const __m256i power = _mm256_add_epi32(_mm256_slli_epi32(_mm256_castps_si256(shifted), 23),
                                         _mm256_set1_epi32(0x3f800000));
  const __m256 keep = _mm256_cmp_ps(x, _mm256_set1_ps(-126.0f), _CMP_NLT_UQ);
  return _mm256_and_ps(_mm256_mul_ps(p, _mm256_castsi256_ps(power)), keep);
}
static inline V16 vexp2(V16 x) { return {vexp2_half(x.a), vexp2_half(x.b)}; }

static inline float vfold8(__m256 a, bool largest) {
  const __m128 low = _mm256_castps256_ps128(a), high = _mm256_extractf128_ps(a, 1);
  __m128 b = largest ? _mm_max_ps(low, high) : _mm_add_ps(low, high);
  const __m128 c = _mm_movehl_ps(b, b);
  b = largest ? _mm_max_ps(b, c) : _mm_add_ps(b, c);
  const __m128 d = _mm_movehdup_ps(b);
  return _mm_cvtss_f32(largest ? _mm_max_ss(b, d) : _mm_add_ss(b, d));
}
static inline float vsum(V16 x) { return vfold8(_mm256_add_ps(x.a, x.b), false); }
static inline float vlargest(V16 x) { return vfold8(_mm256_max_ps(x.a, x.b), true); }
static inline float vlane0(V16 x) { return _mm256_cvtss_f32(x.a); }

#else

// Four vectors of four: what every 64-bit machine has.
typedef float Quad __attribute__((vector_size(16), aligned(4), may_alias));
typedef std::int32_t QuadInt __attribute__((vector_size(16), aligned(4), may_alias));
typedef std::uint32_t QuadBits __attribute__((vector_size(16), aligned(4), may_alias));

struct V16 {
  Quad q[4];
};

template <class Function>
static inline V16 veach(Function function) {
  V16 result;
  for (int i = 0; i < 4; ++i) result.q[i] = function(i);
  return result;
}

static inline V16 vset1(float x) {
  return veach([&](int) { return x - Quad{}; });
}
static inline V16 vzero() { return vset1(0.0f); }
static inline V16 vload(const float* p) {
  return veach([&](int i) { return *reinterpret_cast<const Quad*>(p + 4 * i); });
}
static inline void vstore(float* p, V16 x) {
  for (int i = 0; i < 4; ++i) *reinterpret_cast<Quad*>(p + 4 * i) = x.q[i];
}
static inline V16 vadd(V16 x, V16 y) {
  return veach([&](int i) { return x.q[i] + y.q[i]; });
}
static inline V16 vsub(V16 x, V16 y) {
  return veach([&](int i) { return x.q[i] - y.q[i]; });
}
static inline V16 vmul(V16 x, V16 y) {
  return veach([&](int i) { return x.q[i] * y.q[i]; });
}
static inline V16 vfma(V16 x, V16 y, V16 z) {
  return veach([&](int i) { return x.q[i] * y.q[i] + z.q[i]; });
}
static inline V16 vmax(V16 x, V16 y) {
  return veach([&](int i) { return x.q[i] > y.q[i] ? x.q[i] : y.q[i]; });
}

static inline V16 vfirst(int count, V16 x, V16 y) {
  return veach([&](int i) {
    const QuadInt lanes = QuadInt{0, 1, 2, 3} + 4 * i;
    return lanes < count ? x.q[i] : y.q[i];
  });
}

static inline void vload_pairs(const std::uint16_t* p, V16& first, V16& second) {
  for (int i = 0; i < 4; ++i) {
    QuadBits pairs;
    std::memcpy(&pairs, p + 8 * i, sizeof pairs);
    const QuadBits low = pairs << 16, high = pairs & 0xffff0000u;
    std::memcpy(&first.q[i], &low, sizeof low);
    std::memcpy(&second.q[i], &high, sizeof high);
  }
}

static inline V16 vexp2(V16 x) {
  return veach([&](int i) {
    const Quad shifted = x.q[i] + kRounder;
    const Quad part = x.q[i] - (shifted - kRounder);
    Quad p = kExp2[5] - Quad{};
    for (int j = 4; j >= 0; --j) p = p * part + kExp2[j];
    QuadBits power;
    std::memcpy(&power, &shifted, sizeof power);
    power = (power << 23) + 0x3f800000u;
    Quad factor;
    std::memcpy(&factor, &power, sizeof factor);
    return x.q[i] < -126.0f ? Quad{} : p * factor;
  });
}

static inline float vsum(V16 x) {
  const Quad sum = (x.q[0] + x.q[2]) + (x.q[1] + x.q[3]);
  return (sum[0] + sum[2]) + (sum[1] + sum[3]);
}
static inline float vlargest(V16 x) {
  float largest = x.q[0][0];
  for (int i = 0; i < 4; ++i)
    for (int j = 0; j < 4; ++j)
      if (x.q[i][j] > largest) largest = x.q[i][j];
  return largest;
}
static inline float vlane0(V16 x) { return x.q[0][0]; }

#endif

}  // namespace trimaran::TRIMARAN_TIER
