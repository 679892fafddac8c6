// The reading loop of the two tiers with 512-bit registers; included in the compilation unit
// of each.
#pragma once

#include <immintrin.h>

#include <cstddef>
#include <cstdint>

namespace {

inline std::uint64_t read_512(const std::uint8_t* data, std::size_t bytes) {
  __m512i sums[8];
  for (__m512i& sum : sums) sum = _mm512_setzero_si512();
  for (std::size_t i = 0; i < bytes; i += 512)
#pragma GCC unroll 8
    for (int line = 0; line < 8; ++line)
      sums[line] = _mm512_xor_si512(sums[line], _mm512_load_si512(data + i + 64 * line));
  for (int line = 1; line < 8; ++line) sums[0] = _mm512_xor_si512(sums[0], sums[line]);
  return static_cast<std::uint64_t>(_mm_cvtsi128_si64(_mm512_castsi512_si128(sums[0])));
}

}  // namespace
