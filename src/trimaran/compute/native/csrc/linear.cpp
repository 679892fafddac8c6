#include "linear.h"

#include <cstring>
#include <stdexcept>

#include "pack_stream.h"
#include "tier.h"

namespace trimaran {
namespace {

float half_at(const std::uint8_t* p, int index) {
  std::uint16_t half;
  std::memcpy(&half, p + index * sizeof half, sizeof half);
  return f16_to_f32(half);
}

// The number of a group, with `groups` of them a step.
float scale_at(const LinearView& weight, const std::uint8_t* table, int group, int groups,
               int lane) {
  const int index = group * kBlock + lane;
  if (weight.scales == Scales::kParts) {
    const ScaleParts at(group, groups);
    const auto part = static_cast<std::int8_t>(table[at.bytes + lane]);
    return half_at(table + at.halves, lane) * static_cast<float>(part);
  }
  if (weight.scales == Scales::kFloat16) return half_at(table, index);
  float value;
  std::memcpy(&value, table + index * sizeof value, sizeof value);
  return value;
}

}  // namespace

std::size_t linear_scratch_bytes() {
  // TileScratch in linear_amx.h: two slabs of weights, and sums that wait.
  const std::size_t tile = 1024, slab = 48 * 2 * tile, rows = kTaskRows / 32;
  return 2 * slab + 8 * rows * 4 * tile;
}

bool eight_bits(const std::string& activations) {
  if (activations != "int8" && activations != "auto")
    throw std::invalid_argument("activations is '" + activations + "'; give auto or int8");
  return activations == "int8";
}

float f16_to_f32(std::uint16_t half) {
  const std::uint32_t magnitude = half & 0x7fffu;
  std::uint32_t bits = magnitude << 13;
  float value;
  if (magnitude >= 0x7c00u) {
    bits |= 0x7f800000u;
    std::memcpy(&value, &bits, sizeof value);
  } else {
    std::memcpy(&value, &bits, sizeof value);
    value *= 0x1p112f;  // moves the exponent; exact, subnormals included
  }
  return half & 0x8000u ? -value : value;
}

std::uint16_t f32_to_f16(float value) {
  std::uint32_t bits;
  std::memcpy(&bits, &value, sizeof bits);
  const std::uint32_t sign = bits >> 16 & 0x8000u, magnitude = bits & 0x7fffffffu;
  if (magnitude > 0x7f800000u) return static_cast<std::uint16_t>(sign | 0x7e00u);
  if (magnitude >= 0x477ff000u) return static_cast<std::uint16_t>(sign | 0x7c00u);
  if (magnitude < 0x38800000u) {  // subnormal: adding 0.5 rounds to multiples of 2^-24
    float rounded;
    std::memcpy(&rounded, &magnitude, sizeof rounded);
    rounded += 0.5f;
    std::uint32_t result;
    std::memcpy(&result, &rounded, sizeof result);
    return static_cast<std::uint16_t>(sign | (result - 0x3f000000u));
  }
  const std::uint32_t odd = magnitude >> 13 & 1u;
  return static_cast<std::uint16_t>(sign | ((magnitude - 0x38000000u + 0xfffu + odd) >> 13));
}

std::uint16_t f32_to_bf16(float value) {
  std::uint32_t bits;
  std::memcpy(&bits, &value, sizeof bits);
  if ((bits & 0x7fffffffu) > 0x7f800000u) return static_cast<std::uint16_t>(bits >> 16 | 0x40u);
  return static_cast<std::uint16_t>((bits + 0x7fffu + (bits >> 16 & 1u)) >> 16);
}

void dequantize_output(const LinearView& weight, int output, float* values) {
  const std::uint8_t* block = weight.data + output / kBlock * weight.block_bytes;
  const int lane = output % kBlock;
  if (weight.codes == Codes::kBf16) {
    for (int k = 0; k < weight.inputs; ++k) {
      std::uint16_t half;
      std::memcpy(&half, block + ((k / 2 * kBlock + lane) * 2 + k % 2) * sizeof half, sizeof half);
      const std::uint32_t bits = static_cast<std::uint32_t>(half) << 16;
      std::memcpy(values + k, &bits, sizeof bits);
    }
    return;
  }
  if (!takes_integers(weight.codes)) {
    for (int k = 0; k < weight.inputs; k += kStep) {
      float step[kStep];
      read_stream_step(weight, block, lane, k / kStep, step);
      const int left = weight.inputs - k;
      std::memcpy(values + k, step, (left < kStep ? left : kStep) * sizeof *step);
    }
    return;
  }
  for (int k = 0; k < weight.inputs;) {
    const int group = k / weight.group, groups = weight.groups();
    const float scale = scale_at(weight, block + weight.scales_at, group, groups, lane);
    const float min =
        weight.mins ? scale_at(weight, block + weight.mins_at, group, groups, lane) : 0.0f;
    const int end = k + weight.group < weight.inputs ? k + weight.group : weight.inputs;
    for (; k < end; ++k) {
      int code;
      const std::uint8_t* step = block + k / kStep * code_step_bytes(weight.codes);
      const int line = k % kStep / 4, at = lane * 4 + k % 4;  // of 64 bytes
      if (weight.codes == Codes::kU8) {
        code = step[line * 64 + at];
      } else {
        const int byte = step[line % 4 * 64 + at];
        code = line < 4 ? byte & 15 : byte >> 4;
        if (weight.codes == Codes::kU6)
          code |= (step[256 + line / 4 * 64 + at] >> upper_shift(line) & 3) << 4;
      }
      const float value = scale * static_cast<float>(code - weight.offset);
      values[k] = weight.mins ? value + min : value;
    }
  }
}

const Tier& tier_of(Isa isa) {
#if defined(__x86_64__)
  if (isa == Isa::kAvx2) return kTierAvx2;
  if (isa == Isa::kAvx512) return kTierAvx512;
  if (isa == Isa::kAmx) return kTierAmx;
#endif
  return kTierPortable;
}

}  // namespace trimaran
