#include <cstring>

#include "probe.h"

#include "probe_avx512.h"

namespace trimaran {
namespace {

struct alignas(64) Tiles {
  std::uint8_t palette = 1;
  std::uint8_t start_row = 0;
  std::uint8_t reserved[14] = {};
  std::uint16_t row_bytes[16] = {64, 64, 64, 64, 64, 64};
  std::uint8_t rows[16] = {16, 16, 16, 16, 16, 16};
};

// C in tiles 0-3: four products under way cover one's latency. A in 4, B in 5, both full of
// `byte`.
void fill_tiles(int byte) {
  alignas(64) std::uint8_t operand[1024];
  std::memset(operand, byte, sizeof operand);
  const Tiles config;
  asm volatile("ldtilecfg %0" : : "m"(config) : "memory");
  _tile_zero(0);
  _tile_zero(1);
  _tile_zero(2);
  _tile_zero(3);
  asm volatile("" : : "r"(operand) : "memory");
  _tile_loadd(4, operand, 64);
  _tile_loadd(5, operand, 64);
}

double int8(long rounds) {
  fill_tiles(37);
  for (long i = 0; i < rounds; ++i) {
    _tile_dpbssd(0, 4, 5);
    _tile_dpbssd(1, 4, 5);
    _tile_dpbssd(2, 4, 5);
    _tile_dpbssd(3, 4, 5);
  }
  asm volatile("tilerelease" : : : "memory");
  return 4 * 2.0 * 16 * 16 * 64 * rounds;
}

double bf16(long rounds) {
  fill_tiles(0x3d);  // 0x3d3d is 0.046 in bf16
  for (long i = 0; i < rounds; ++i) {
    _tile_dpbf16ps(0, 4, 5);
    _tile_dpbf16ps(1, 4, 5);
    _tile_dpbf16ps(2, 4, 5);
    _tile_dpbf16ps(3, 4, 5);
  }
  asm volatile("tilerelease" : : : "memory");
  return 4 * 2.0 * 16 * 16 * 32 * rounds;
}

}  // namespace

const ProbeTier kProbeAmx = {int8, bf16, nullptr, read_512};

}  // namespace trimaran
