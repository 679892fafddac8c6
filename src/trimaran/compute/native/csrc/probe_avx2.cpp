#include <immintrin.h>

#include "probe.h"

namespace trimaran {
namespace {

// Enough independent sums to cover the latency of a fused multiplication on two ports.
constexpr int kSums = 12;

double f32(long rounds) {
  __m256 sums[kSums];
  for (__m256& sum : sums) sum = _mm256_setzero_ps();
  __m256 a = _mm256_set1_ps(0.5f), b = _mm256_set1_ps(0.25f);
  for (long i = 0; i < rounds; ++i) {
    asm volatile("" : "+x"(a), "+x"(b));
#pragma GCC unroll 12
    for (__m256& sum : sums) sum = _mm256_fmadd_ps(sum, a, b);
  }
  for (__m256& sum : sums) asm volatile("" : : "x"(sum));
  return 2.0 * 8 * kSums * rounds;
}

// Bytes to pairs of 16 bits to sums of 32: the dot product that this instruction set has.
double int8(long rounds) {
  constexpr int kIntSums = 8;
  __m256i sums[kIntSums];
  for (__m256i& sum : sums) sum = _mm256_setzero_si256();
  const __m256i ones = _mm256_set1_epi16(1);
  __m256i a = _mm256_set1_epi8(37), b = _mm256_set1_epi8(-21);
  for (long i = 0; i < rounds; ++i) {
#pragma GCC unroll 8
    for (__m256i& sum : sums) {
      asm volatile("" : "+x"(a), "+x"(b));
      sum = _mm256_add_epi32(sum, _mm256_madd_epi16(_mm256_maddubs_epi16(a, b), ones));
    }
  }
  for (__m256i& sum : sums) asm volatile("" : : "x"(sum));
  return 2.0 * 32 * kIntSums * rounds;
}

std::uint64_t read(const std::uint8_t* data, std::size_t bytes) {
  __m256i sums[8];
  for (__m256i& sum : sums) sum = _mm256_setzero_si256();
  for (std::size_t i = 0; i < bytes; i += 512)
#pragma GCC unroll 16
    for (int line = 0; line < 16; ++line)
      sums[line % 8] = _mm256_xor_si256(
          sums[line % 8],
          _mm256_load_si256(reinterpret_cast<const __m256i*>(data + i + 32 * line)));
  for (int line = 1; line < 8; ++line) sums[0] = _mm256_xor_si256(sums[0], sums[line]);
  return static_cast<std::uint64_t>(_mm256_extract_epi64(sums[0], 0));
}

}  // namespace

const ProbeTier kProbeAvx2 = {int8, nullptr, f32, read};

}  // namespace trimaran
