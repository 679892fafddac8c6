#include "probe.h"

namespace trimaran {
namespace {

double f32(long rounds) {
  constexpr int kLanes = 32;
  float sums[kLanes] = {};
  float factor = 0.5f, addend = 0.25f;
  for (long i = 0; i < rounds; ++i) {
    asm volatile("" : "+m"(factor), "+m"(addend));
    const float a = factor, b = addend;
    for (int lane = 0; lane < kLanes; ++lane) sums[lane] = sums[lane] * a + b;
  }
  asm volatile("" : : "r"(sums) : "memory");
  return 2.0 * kLanes * rounds;
}

std::uint64_t read(const std::uint8_t* data, std::size_t bytes) {
  const auto* words = reinterpret_cast<const std::uint64_t*>(data);
  std::uint64_t sums[8] = {};
  for (std::size_t i = 0; i < bytes / 8; i += 8)
    for (int lane = 0; lane < 8; ++lane) sums[lane] += words[i + lane];
  std::uint64_t total = 0;
  for (std::uint64_t sum : sums) total += sum;
  return total;
}

}  // namespace

const ProbeTier kProbePortable = {nullptr, nullptr, f32, read};

}  // namespace trimaran
