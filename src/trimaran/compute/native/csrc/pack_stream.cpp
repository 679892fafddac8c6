#include "pack_stream.h"

#include <cmath>
#include <cstring>

#include "memory.h"

namespace trimaran {
namespace {

constexpr float kLargest = 1.875f;  // the roundings can't bring it to 2
constexpr float kCutMakesUp = 1.0f + 0.693147f / 256.0f;

bool four_bits(const LinearView& view) { return view.codes == Codes::kS4; }
int levels(bool four_bits) { return four_bits ? 16 : 256; }

// slope and offset of half = (1 + c / levels) * slope + offset.
struct Line {
  float slope, offset;
};

struct CodeRange {
  int least, greatest;
};

CodeRange used_codes(const std::uint8_t* codes, int count) {
  CodeRange range{codes[0], codes[0]};
  for (int i = 1; i < count; ++i) {
    if (codes[i] < range.least) range.least = codes[i];
    if (codes[i] > range.greatest) range.greatest = codes[i];
  }
  return range;
}

float value_of(const CodeFormat& format, const StepCodes& step, int group, int code) {
  const float value = step.scales[group] * static_cast<float>(code - format.offset);
  return format.mins ? value + step.min : value;
}

// The largest magnitude of one output.
float largest_value(const CodeFormat& format, const StepCodes* steps, int count) {
  float largest = 0.0f;
  for (int step = 0; step < count; ++step)
    for (int g = 0; g < kStep / format.group; ++g) {
      const CodeRange used = used_codes(steps[step].codes + g * format.group, format.group);
      for (int code : {used.least, used.greatest}) {
        const float size = std::fabs(value_of(format, steps[step], g, code));
        if (size > largest || std::isnan(size)) largest = size;  // a NaN stays
      }
    }
  return largest;
}

float multiplier_of(float largest) {
  if (!std::isfinite(largest)) return std::nanf("");
  if (largest < 0x1p-100f) return 0.0f;  // so that its inverse is finite
  const float power = std::ldexp(1.0f, std::ilogb(largest));  // largest / power in [1, 2)
  return largest <= kLargest * power ? power : 2.0f * power;
}

// How a group's codes are written: (code - least) * stretch, which uses the levels there are,
// so that 1 + c / levels moves as far as it can and the offset is no larger than need be.
struct Stretch {
  int least, factor;
  Line line;
};

Stretch stretch_of(const CodeFormat& format, const StepCodes& step, int group, float multiplier,
                   int levels) {
  const CodeRange used = used_codes(step.codes + group * format.group, format.group);
  const float larger = kCutMakesUp / multiplier;
  if (used.least == used.greatest)
    return {used.least, 0, {0.0f, value_of(format, step, group, used.least) * larger}};
  const int factor = (levels - 1) / (used.greatest - used.least);
  const int middle = (used.least + used.greatest) / 2;
  const float slope =
      step.scales[group] * larger * static_cast<float>(levels) / static_cast<float>(factor);
  Line line{f16_to_f32(f32_to_f16(slope)), value_of(format, step, group, middle) * larger};
  const int written = (middle - used.least) * factor;
  line.offset -= (1.0f + static_cast<float>(written) / static_cast<float>(levels)) * line.slope;
  return {used.least, factor, line};
}

void write_half(std::uint8_t* table, int index, float value) {
  const std::uint16_t half = f32_to_f16(value);
  std::memcpy(table + index * sizeof half, &half, sizeof half);
}

float read_half(const std::uint8_t* table, int index) {
  std::uint16_t half;
  std::memcpy(&half, table + index * sizeof half, sizeof half);
  return f16_to_f32(half);
}

// Where a step's word of (vector, lane, input's parity) is.
int word_at(int vector, int lane, int k) { return (vector * 32 + 2 * lane + k % 2) * 2; }

void write_code(bool four, int lane, int k, int code, std::uint8_t* codes) {
  if (!four) {
    codes[word_at(k % 16 / 2, lane, k) + k / 16] = static_cast<std::uint8_t>(code);
    return;
  }
  const int at = word_at(stream_vector(k), lane, k);
  std::uint16_t word;
  std::memcpy(&word, codes + at, sizeof word);
  const unsigned bits = static_cast<unsigned>(code) << stream_bit(k);
  word = static_cast<std::uint16_t>(word | bits | bits >> 16);
  std::memcpy(codes + at, &word, sizeof word);
}

int read_code(bool four, int lane, int k, const std::uint8_t* codes) {
  if (!four) return codes[word_at(k % 16 / 2, lane, k) + k / 16];
  std::uint16_t word;
  std::memcpy(&word, codes + word_at(stream_vector(k), lane, k), sizeof word);
  const unsigned twice = word | static_cast<unsigned>(word) << 16;
  return static_cast<int>(twice >> stream_bit(k) & 15u);
}

// half = fma(1 + c / levels, slope, offset) in float16, and then in bf16, as the tiles' unit
// of vectors does it. The sum is exact in double.
float weight_of(int code, int levels, float slope, float offset) {
  const double exact = (1.0 + static_cast<double>(code) / levels) * slope + offset;
  // From double by way of float32 the rounding could go wrong where the first one makes a
  // tie: to odd, it doesn't.
  float nearest = static_cast<float>(exact);
  std::uint32_t bits;
  std::memcpy(&bits, &nearest, sizeof bits);
  if (static_cast<double>(nearest) != exact) {
    if (std::fabs(static_cast<double>(nearest)) > std::fabs(exact)) --bits;
    bits |= 1u;
    std::memcpy(&nearest, &bits, sizeof bits);
  }
  const std::uint16_t half = f32_to_f16(nearest);
  const std::uint32_t cut = (half & 0x7fffu) >> 3 | 0x3800u;
  const std::uint32_t wide = (cut | (half & 0x8000u)) << 16;
  float value;
  std::memcpy(&value, &wide, sizeof value);
  return value;
}

}  // namespace

LinearView stream_view(int outputs, int inputs, const CodeFormat& format) {
  LinearView view;
  view.outputs = outputs;
  view.inputs = inputs;
  view.codes = format.codes == Codes::kU4 ? Codes::kS4 : Codes::kS8;
  view.group = format.group;
  view.scales_at = view.steps() * stream_step_bytes(four_bits(view), view.group);
  view.block_bytes = view.scales_at + kBlock * sizeof(float);
  return view;
}

void write_stream_block(const LinearView& view, const CodeFormat& format,
                        const StepCodes* outputs, std::uint8_t* block) {
  const bool four = four_bits(view);
  const std::size_t step_bytes = stream_step_bytes(four, view.group);
  for (int lane = 0; lane < kBlock; ++lane) {
    const StepCodes* steps = outputs + static_cast<std::size_t>(lane) * view.steps();
    const float multiplier = multiplier_of(largest_value(format, steps, view.steps()));
    std::memcpy(block + view.scales_at + lane * sizeof multiplier, &multiplier,
                sizeof multiplier);
    if (!(multiplier > 0.0f)) continue;  // nothing but zeros, or no number
    for (int step = 0; step < view.steps(); ++step) {
      std::uint8_t* codes = block + step * step_bytes;
      std::uint8_t* tables = codes + (four ? 256 : 512);
      for (int g = 0; g < kStep / view.group; ++g) {
        const Stretch stretch = stretch_of(format, steps[step], g, multiplier, levels(four));
        for (int k = g * view.group; k < (g + 1) * view.group; ++k)
          write_code(four, lane, k, (steps[step].codes[k] - stretch.least) * stretch.factor,
                     codes);
        write_half(tables + g * kStreamTable, lane, stretch.line.slope);
        write_half(tables + g * kStreamTable, kBlock + lane, stretch.line.offset);
      }
    }
  }
}

void read_stream_step(const LinearView& view, const std::uint8_t* block, int lane, int step,
                      float* values) {
  const bool four = four_bits(view);
  const std::uint8_t* codes = block + step * stream_step_bytes(four, view.group);
  const std::uint8_t* tables = codes + (four ? 256 : 512);
  float multiplier;
  std::memcpy(&multiplier, block + view.scales_at + lane * sizeof multiplier, sizeof multiplier);
  for (int k = 0; k < kStep; ++k) {
    const std::uint8_t* table = tables + k / view.group * kStreamTable;
    values[k] = multiplier * weight_of(read_code(four, lane, k, codes), levels(four),
                                       read_half(table, lane), read_half(table, kBlock + lane));
  }
}

}  // namespace trimaran
