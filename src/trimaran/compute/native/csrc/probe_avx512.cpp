#include "probe.h"

#include "probe_avx512.h"

namespace trimaran {
namespace {

constexpr int kSums = 12;

double f32(long rounds) {
  __m512 sums[kSums];
  for (__m512& sum : sums) sum = _mm512_setzero_ps();
  __m512 a = _mm512_set1_ps(0.5f), b = _mm512_set1_ps(0.25f);
  for (long i = 0; i < rounds; ++i) {
    asm volatile("" : "+v"(a), "+v"(b));
#pragma GCC unroll 12
    for (__m512& sum : sums) sum = _mm512_fmadd_ps(sum, a, b);
  }
  for (__m512& sum : sums) asm volatile("" : : "v"(sum));
  return 2.0 * 16 * kSums * rounds;
}

double int8(long rounds) {
  __m512i sums[kSums];
  for (__m512i& sum : sums) sum = _mm512_setzero_si512();
  __m512i a = _mm512_set1_epi8(37), b = _mm512_set1_epi8(-21);
  for (long i = 0; i < rounds; ++i) {
    asm volatile("" : "+v"(a), "+v"(b));
#pragma GCC unroll 12
    for (__m512i& sum : sums) sum = _mm512_dpbusd_epi32(sum, a, b);
  }
  for (__m512i& sum : sums) asm volatile("" : : "v"(sum));
  return 2.0 * 64 * kSums * rounds;
}

// Not all processors of this tier have it.
__attribute__((target("avx512bf16"))) double bf16(long rounds) {
  __m512 sums[kSums];
  for (__m512& sum : sums) sum = _mm512_setzero_ps();
  __m512i a = _mm512_set1_epi16(0x3f00), b = _mm512_set1_epi16(0x3e80);  // 0.5 and 0.25
  for (long i = 0; i < rounds; ++i) {
    asm volatile("" : "+v"(a), "+v"(b));
#pragma GCC unroll 12
    for (__m512& sum : sums)
      sum = _mm512_dpbf16_ps(sum, reinterpret_cast<__m512bh>(a), reinterpret_cast<__m512bh>(b));
  }
  for (__m512& sum : sums) asm volatile("" : : "v"(sum));
  return 2.0 * 32 * kSums * rounds;
}

}  // namespace

const ProbeTier kProbeAvx512 = {int8, bf16, f32, read_512};

}  // namespace trimaran
