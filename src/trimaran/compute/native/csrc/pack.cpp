#include "pack.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <functional>
#include <stdexcept>
#include <utility>
#include <vector>

#include "pack_source.h"
#include "pack_stream.h"

namespace trimaran {
namespace {

int element_bytes(const std::string& type) {
  return type == "F32" ? 4 : type == "F16" || type == "BF16" ? 2 : 0;
}

const std::uint8_t* source_row(const Source& source, int output) {
  const std::int64_t row = source.order == nullptr ? output : source.order[output];
  return source.rows + static_cast<std::size_t>(row) * source.row_bytes;
}

float block_value(const CodeFormat& format, const StepCodes& step, int i) {
  const float value =
      step.scales[i / format.group] * static_cast<float>(step.codes[i] - format.offset);
  return format.mins ? value + step.min : value;
}

// The values of one output: [inputs].
void read_values(const Source& source, int output, float* values) {
  const std::uint8_t* row = source_row(source, output);
  if (source.type == "F32") {
    std::memcpy(values, row, source.inputs * sizeof *values);
  } else if (const BlockType* type = block_type(source.type)) {
    for (int at = 0; at < source.inputs; at += kStep) {
      StepCodes step{};
      type->decode(row, at / kStep, step);
      for (int i = 0; i < kStep; ++i) values[at + i] = block_value(type->format, step, i);
    }
  } else {
    const bool brain = source.type == "BF16";
    for (int i = 0; i < source.inputs; ++i) {
      std::uint16_t half;
      std::memcpy(&half, row + i * sizeof half, sizeof half);
      const std::uint32_t bits = static_cast<std::uint32_t>(half) << 16;
      if (brain)
        std::memcpy(values + i, &bits, sizeof bits);
      else
        values[i] = f16_to_f32(half);
    }
  }
}

LinearView integer_view(int outputs, int inputs, const CodeFormat& format) {
  LinearView view;
  view.outputs = outputs;
  view.inputs = inputs;
  view.codes = format.codes;
  view.group = format.group;
  view.offset = format.offset;
  view.mins = format.mins;
  view.scales = format.scales;
  const std::size_t scales = scale_table_bytes(view.scales, view.steps(), view.groups());
  view.scales_at = static_cast<std::size_t>(view.steps()) * code_step_bytes(view.codes);
  view.mins_at = round_up(view.scales_at + scales, 64);
  const std::size_t mins = view.mins ? scale_table_bytes(view.scales, view.steps(), 1) : 0;
  view.block_bytes = round_up(view.mins_at + mins, 64);
  return view;
}

// Writes the codes of one output into a block of U4 or U8.
class LaneWriter {
 public:
  LaneWriter(const LinearView& view, std::uint8_t* block, int lane)
      : view_(view), block_(block), lane_(lane) {}

  void write(int step, const StepCodes& codes) const {
    write_codes(step, codes.codes);
    const int groups = view_.groups();
    std::uint8_t *scales = block_ + view_.scales_at, *mins = block_ + view_.mins_at;
    if (view_.scales == Scales::kParts) {
      for (int g = 0; g < groups; ++g)
        write_parts(scales, ScaleParts(step * groups + g, groups), codes.scale_half,
                    codes.scale_parts[g]);
      if (view_.mins) write_parts(mins, ScaleParts(step, 1), codes.min_half, codes.min_part);
      return;
    }
    for (int g = 0; g < groups; ++g)
      write_scale(scales, (step * groups + g) * kBlock + lane_, codes.scales[g]);
    if (view_.mins) write_scale(mins, step * kBlock + lane_, codes.min);
  }

 private:
  void write_codes(int step, const std::uint8_t* codes) const {
    std::uint8_t* target = block_ + step * code_step_bytes(view_.codes) + lane_ * 4;
    const auto put = [&](int line, std::uint32_t four) {
      std::memcpy(target + line * 64, &four, sizeof four);
    };
    constexpr std::uint32_t kLower = 0x0f0f0f0f, kUpper = 0x03030303;
    std::uint32_t lines[8];
    std::memcpy(lines, codes, sizeof lines);
    if (view_.codes == Codes::kU8) {
      for (int line = 0; line < 8; ++line) put(line, lines[line]);
      return;
    }
    for (int line = 0; line < 4; ++line)
      put(line, (lines[line] & kLower) | (lines[line + 4] & kLower) << 4);
    if (view_.codes == Codes::kU4) return;
    for (int half = 0; half < 2; ++half) {
      std::uint32_t upper = 0;
      for (int line = 0; line < 4; ++line)
        upper |= (lines[4 * half + line] >> 4 & kUpper) << upper_shift(line);
      put(4 + half, upper);
    }
  }

  void write_parts(std::uint8_t* table, ScaleParts at, float half, std::int8_t part) const {
    write_half(table + at.halves, lane_, half);
    std::memcpy(table + at.bytes + lane_, &part, 1);
  }

  void write_scale(std::uint8_t* table, int index, float value) const {
    if (view_.scales == Scales::kFloat16)
      write_half(table, index, value);
    else
      std::memcpy(table + index * sizeof value, &value, sizeof value);
  }

  static void write_half(std::uint8_t* table, int index, float value) {
    const std::uint16_t half = f32_to_f16(value);
    std::memcpy(table + index * sizeof half, &half, sizeof half);
  }

  const LinearView& view_;
  std::uint8_t* block_;
  const int lane_;
};

// Fills [steps] of one output.
using CodesOfOutput = std::function<void(int output, StepCodes* steps)>;

PackedLinear pack_codes(const Source& source, const CodeFormat& format, Layout layout,
                        const std::string& name, const CodesOfOutput& codes_of) {
  const bool tiles = layout == Layout::kTiles;
  PackedLinear packed(tiles ? stream_view(source.outputs, source.inputs, format)
                            : integer_view(source.outputs, source.inputs, format),
                      name);
  const LinearView& view = packed.view();
  StepCodes nothing{};
  std::memset(nothing.codes, format.offset, sizeof nothing.codes);
  std::vector<StepCodes> outputs(static_cast<std::size_t>(kBlock) * view.steps());
  for (int block = 0; block < view.blocks(); ++block) {
    std::uint8_t* data = packed.data() + block * view.block_bytes;
    for (int lane = 0; lane < kBlock; ++lane) {
      StepCodes* steps = outputs.data() + static_cast<std::size_t>(lane) * view.steps();
      std::fill(steps, steps + view.steps(), nothing);
      if (block * kBlock + lane < source.outputs) codes_of(block * kBlock + lane, steps);
      if (tiles) continue;
      const LaneWriter writer(view, data, lane);
      for (int step = 0; step < view.steps(); ++step) writer.write(step, steps[step]);
    }
    if (tiles) write_stream_block(view, format, outputs.data(), data);
  }
  return packed;
}

struct Range {
  float scale, min;
};

// NaN if one of the values, or their range, isn't finite.
Range value_range(const float* values, int count, int levels) {
  float least = values[0], greatest = values[0];
  for (int i = 0; i < count; ++i) {
    if (!std::isfinite(values[i])) return {std::nanf(""), std::nanf("")};
    least = values[i] < least ? values[i] : least;
    greatest = values[i] > greatest ? values[i] : greatest;
  }
  const float scale = (greatest - least) / static_cast<float>(levels - 1);
  return std::isfinite(scale) ? Range{scale, least} : Range{std::nanf(""), std::nanf("")};
}

// Whether scales and minima can be halves. The absolute error of a small half is 2^-25, that
// of 255 times a small scale 2^-17: nothing beside weights that reach 2^-7.
bool halves_suffice(const Source& source) {
  std::vector<float> values(source.inputs);
  float largest = 0.0f;
  for (int output = 0; output < source.outputs; ++output) {
    read_values(source, output, values.data());
    for (float value : values)
      if (std::isfinite(value)) largest = std::max(largest, std::fabs(value));
  }
  return largest >= 0x1p-7f && largest <= 65504.0f;
}

void round_step(const float* values, int count, int levels, bool wide, StepCodes& step) {
  Range range = value_range(values, count, levels);
  const float top = static_cast<float>(levels - 1);
  if (!wide) {
    range.scale = f16_to_f32(f32_to_f16(range.scale));
    range.min = f16_to_f32(f32_to_f16(range.min));
  }
  step.scales[0] = range.scale;
  step.min = range.min;
  for (int i = 0; i < count; ++i) {
    const float code = range.scale > 0.0f ? (values[i] - range.min) / range.scale : 0.0f;
    step.codes[i] = static_cast<std::uint8_t>(
        code <= 0.0f ? 0.0f : code >= top ? top : std::nearbyint(code));
  }
}

}  // namespace

bool readable(const std::string& type) {
  return element_bytes(type) != 0 || block_type(type) != nullptr;
}

std::size_t source_row_bytes(const std::string& type, int inputs) {
  if (const BlockType* block = block_type(type))
    return inputs % block->elements ? 0 : static_cast<std::size_t>(inputs) / block->elements *
                                              block->bytes;
  return static_cast<std::size_t>(inputs) * element_bytes(type);
}

PackedLinear::PackedLinear(LinearView view, const std::string& name)
    : view_(view), memory_(view.block_bytes * view.blocks()), format_(name) {
  view_.data = memory_.as<std::uint8_t>();
}

PackedLinear::PackedLinear(LinearView view, const std::string& name, SharedMemory memory)
    : view_(view), memory_(std::move(memory)), format_(name) {
  view_.data = memory_.as<std::uint8_t>();
}

PackedLinear pack_as_is(const Source& source, Layout layout) {
  const BlockType* type = block_type(source.type);
  if (type == nullptr) return pack_bf16(source);
  return pack_codes(source, type->format, layout, type->name, [&](int output, StepCodes* steps) {
    const std::uint8_t* row = source_row(source, output);
    for (int step = 0; step < source.inputs / kStep; ++step) type->decode(row, step, steps[step]);
  });
}

PackedLinear pack_bf16(const Source& source) {
  LinearView view;
  view.outputs = source.outputs;
  view.inputs = source.inputs;
  view.codes = Codes::kBf16;
  view.block_bytes = static_cast<std::size_t>(view.steps()) * kStep * kBlock * 2;
  PackedLinear packed(view, "BF16");
  std::vector<float> values(source.inputs);
  for (int output = 0; output < source.outputs; ++output) {
    read_values(source, output, values.data());
    auto* target = reinterpret_cast<std::uint16_t*>(packed.data() +
                                                    output / kBlock * view.block_bytes) +
                   output % kBlock * 2;
    for (int k = 0; k < source.inputs; ++k)
      target[k / 2 * 2 * kBlock + k % 2] = f32_to_bf16(values[k]);
  }
  return packed;
}

PackedLinear pack_rounded(const Source& source, int bits, Layout layout) {
  const int levels = 1 << bits;
  const Codes codes = bits == 4 ? Codes::kU4 : Codes::kU8;
  const bool wide = layout == Layout::kTiles || !halves_suffice(source);
  const CodeFormat format{codes, kStep, 0, true, wide ? Scales::kFloat32 : Scales::kFloat16};
  std::vector<float> values(source.inputs);
  return pack_codes(source, format, layout, "INT" + std::to_string(bits),
                    [&](int output, StepCodes* steps) {
                      read_values(source, output, values.data());
                      for (int at = 0; at < source.inputs; at += kStep)
                        round_step(values.data() + at, std::min(kStep, source.inputs - at),
                                   levels, wide, steps[at / kStep]);
                    });
}

}  // namespace trimaran
