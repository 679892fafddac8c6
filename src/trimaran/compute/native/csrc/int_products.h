// Exact products of rows of 15 or 16 bits with signed bytes: scores and weighted sums over an
// int8 cache, on vectors. Included by each tier inside its own compilation unit.
//
// A row of `depth` numbers takes 2 * depth bytes:
//
//   AVX-512   [2][depth] bytes, n = 128 * high + low: the high plane, then the low one. low is
//             0..127; high is signed for queries (|n| < 2^14), unsigned for weights (n < 2^15)
//   others    int16 by fours, in the order 0 2 1 3
//
// The bytes come in lines of [16 columns][4]: four consecutive factors of each column. All
// sums fit 32 bits: 2^14 * 127 * 256 elements, 2^15 * 127 * 256 positions.
#pragma once

#include "attention_kernels.h"

namespace trimaran::TRIMARAN_TIER {

constexpr float kQueryMax = 16383.0f, kWeightMax = 32767.0f, kCodeMax = 127.0f;

// Sixteen numbers, rounded to whole ones; what NaN becomes doesn't matter.
#if defined(__AVX512F__)

constexpr int kNumberBytes = 1;  // from a number of a row to the next

static inline void store_numbers(V16 x, std::int8_t* row, int depth, int at) {
  const __m512i n = _mm512_cvtps_epi32(x.v);
  const __m128i high = _mm512_cvtepi32_epi8(_mm512_srai_epi32(n, 7));
  const __m128i low = _mm512_cvtepi32_epi8(_mm512_and_si512(n, _mm512_set1_epi32(127)));
  _mm_storeu_si128(reinterpret_cast<__m128i*>(row + at), high);
  _mm_storeu_si128(reinterpret_cast<__m128i*>(row + depth + at), low);
}

static inline void store_codes(V16 x, std::int8_t* codes) {
  _mm_storeu_si128(reinterpret_cast<__m128i*>(codes),
                   _mm512_cvtepi32_epi8(_mm512_cvtps_epi32(x.v)));
}

static inline V16 vload_int(const std::int32_t* p) {
  return {_mm512_cvtepi32_ps(_mm512_loadu_si512(p))};
}

#else

constexpr int kNumberBytes = 2;

// The number is what the lowest bits of x + kRoundMagic say.
static inline void whole_lanes(V16 x, std::uint32_t* bits) {
  const V16 moved = vadd(x, vset1(kRoundMagic));
  std::memcpy(bits, &moved, sizeof moved);
}

static inline void store_numbers(V16 x, std::int8_t* row, int, int at) {
  std::uint32_t bits[kLanes];
  std::uint16_t ordered[kLanes];
  whole_lanes(x, bits);
  for (int i = 0; i < kLanes; i += 4) {
    ordered[i] = static_cast<std::uint16_t>(bits[i]);
    ordered[i + 1] = static_cast<std::uint16_t>(bits[i + 2]);
    ordered[i + 2] = static_cast<std::uint16_t>(bits[i + 1]);
    ordered[i + 3] = static_cast<std::uint16_t>(bits[i + 3]);
  }
  std::memcpy(row + 2 * at, ordered, sizeof ordered);
}

static inline void store_codes(V16 x, std::int8_t* codes) {
  std::uint32_t bits[kLanes];
  std::uint8_t bytes[kLanes];
  whole_lanes(x, bits);
  for (int i = 0; i < kLanes; ++i) bytes[i] = static_cast<std::uint8_t>(bits[i]);
  std::memcpy(codes, bytes, sizeof bytes);
}

static inline V16 vload_int(const std::int32_t* p) {
  float lanes[kLanes];
  for (int i = 0; i < kLanes; ++i) lanes[i] = static_cast<float>(p[i]);
  return vload(lanes);
}

#endif

#if defined(__AVX512VNNI__) && !defined(__AMX_INT8__)

constexpr int kIntRowBlock = 6, kIntColumns = 2;  // rows and vectors of columns in hand

// The instruction takes unsigned times signed bytes. Of signed rows it is the columns that are
// made unsigned, by adding 128: so the sums of each plane start from -128 times those of the
// row, which are these.
static inline void query_starts(const std::int8_t* row, int depth, std::int32_t* starts) {
  const __m512i ones = _mm512_set1_epi8(1);
  for (int plane = 0; plane < 2; ++plane) {
    __m512i sum = _mm512_setzero_si512();
    for (int at = 0; at < depth; at += 64)
      sum = _mm512_dpbusd_epi32(sum, ones, _mm512_loadu_si512(row + plane * depth + at));
    starts[plane] = -128 * _mm512_reduce_add_epi32(sum);
  }
}

// sum += unsigned bytes * the four signed ones at p, or signed ones * the four unsigned at p.
template <bool kSigned>
static inline void add_products(__m512i& sum, __m512i columns, const std::int8_t* p) {
  std::int32_t four;
  std::memcpy(&four, p, sizeof four);
  const __m512i row = _mm512_set1_epi32(four);
  sum = kSigned ? _mm512_dpbusd_epi32(sum, columns, row) : _mm512_dpbusd_epi32(sum, row, columns);
}

template <bool kSigned, int R, int N, class Line>
static inline void products(const std::int8_t* rows, const std::int32_t* starts, int depth,
                            int lines, Line line, std::int32_t* out) {
  const __m512i offset = _mm512_set1_epi8(static_cast<char>(0x80));
  __m512i high[R][N], low[R][N];
  for (int r = 0; r < R; ++r)
    for (int n = 0; n < N; ++n) {
      high[r][n] = _mm512_set1_epi32(kSigned ? starts[2 * r] : 0);
      low[r][n] = _mm512_set1_epi32(kSigned ? starts[2 * r + 1] : 0);
    }
  for (int i = 0; i < lines; ++i) {
    __m512i c[N];
    for (int n = 0; n < N; ++n) {
      c[n] = _mm512_loadu_si512(line(i, n));
      if (kSigned) c[n] = _mm512_xor_si512(c[n], offset);
    }
    for (int r = 0; r < R; ++r) {
      const std::int8_t* row = rows + r * 2 * depth + 4 * i;
      for (int n = 0; n < N; ++n) {
        add_products<kSigned>(high[r][n], c[n], row);
        add_products<kSigned>(low[r][n], c[n], row + depth);
      }
    }
  }
  for (int r = 0; r < R; ++r)
    for (int n = 0; n < N; ++n)
      _mm512_storeu_si512(out + r * kScoreStride + n * kLanes,
                          _mm512_add_epi32(_mm512_slli_epi32(high[r][n], 7), low[r][n]));
}

#elif defined(__AVX2__) && !defined(__AVX512F__)

constexpr int kIntRowBlock = 3, kIntColumns = 1;

static inline __m256i two_numbers(const std::int8_t* p) {
  std::int32_t pair;
  std::memcpy(&pair, p, sizeof pair);
  return _mm256_set1_epi32(pair);
}

template <bool, int R, int N, class Line>
static inline void products(const std::int8_t* rows, const std::int32_t*, int depth, int lines,
                            Line line, std::int32_t* out) {
  __m256i sum[R][N][2];
  for (int r = 0; r < R; ++r)
    for (int n = 0; n < N; ++n) sum[r][n][0] = sum[r][n][1] = _mm256_setzero_si256();
  for (int i = 0; i < lines; ++i)
    for (int n = 0; n < N; ++n)
      for (int half = 0; half < 2; ++half) {
        const __m256i x =
            _mm256_loadu_si256(reinterpret_cast<const __m256i*>(line(i, n) + 32 * half));
        const __m256i even = _mm256_srai_epi16(_mm256_slli_epi16(x, 8), 8);
        const __m256i odd = _mm256_srai_epi16(x, 8);
        for (int r = 0; r < R; ++r) {
          const std::int8_t* row = rows + r * 2 * depth + 8 * i;
          const __m256i a = _mm256_madd_epi16(even, two_numbers(row));
          const __m256i b = _mm256_madd_epi16(odd, two_numbers(row + 4));
          sum[r][n][half] = _mm256_add_epi32(sum[r][n][half], _mm256_add_epi32(a, b));
        }
      }
  for (int r = 0; r < R; ++r)
    for (int n = 0; n < N; ++n)
      for (int half = 0; half < 2; ++half)
        _mm256_storeu_si256(
            reinterpret_cast<__m256i*>(out + r * kScoreStride + n * kLanes + 8 * half),
            sum[r][n][half]);
}

#elif !defined(__AVX512F__)

constexpr int kIntRowBlock = 2, kIntColumns = 1;

template <bool, int R, int N, class Line>
static inline void products(const std::int8_t* rows, const std::int32_t*, int depth, int lines,
                            Line line, std::int32_t* out) {
  constexpr int kOrder[4] = {0, 2, 1, 3};
  I16 sum[R][N] = {};
  for (int i = 0; i < lines; ++i)
    for (int n = 0; n < N; ++n) {
      U16 x;
      std::memcpy(&x, line(i, n), sizeof x);
      I16 column[4];
      for (int j = 0; j < 4; ++j) column[j] = (I16)(x << (24 - 8 * kOrder[j])) >> 24;
      for (int r = 0; r < R; ++r) {
        std::int16_t four[4];
        std::memcpy(four, rows + r * 2 * depth + 8 * i, sizeof four);
        for (int j = 0; j < 4; ++j)
          sum[r][n] += column[j] * static_cast<std::int32_t>(four[j]);
      }
    }
  for (int r = 0; r < R; ++r)
    for (int n = 0; n < N; ++n)
      std::memcpy(out + r * kScoreStride + n * kLanes, &sum[r][n], sizeof sum[r][n]);
}

#endif

#if !defined(__AVX512VNNI__) || defined(__AMX_INT8__)
// Elsewhere sums start from nothing.
static inline void query_starts(const std::int8_t*, int, std::int32_t*) {}
#endif

}  // namespace trimaran::TRIMARAN_TIER
