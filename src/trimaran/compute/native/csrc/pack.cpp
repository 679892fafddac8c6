#include "pack.h"

#include <cmath>
#include <cstring>
#include <stdexcept>
#include <vector>

#include "pack_source.h"

namespace trimaran {
namespace {


int element_bytes(const std::string& type) {
  return type == "F32" ? 4 : type == "F16" || type == "BF16" ? 2 : 0;
}

const std::uint8_t* source_row(const Source& source, int output) {
  const std::int64_t row = source.order == nullptr ? output : source.order[output];
  return source.rows + static_cast<std::size_t>(row) * source.row_bytes;
}

float block_value(const BlockType& type, const StepCodes& step, int i) {
  const float value =
      step.scales[i / type.group] * static_cast<float>(step.codes[i] - type.offset);
  return type.mins ? value + step.min : value;
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
      for (int i = 0; i < kStep; ++i) values[at + i] = block_value(*type, step, i);
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

LinearView integer_view(const Source& source, Codes codes, int group, int offset, bool mins,
                        bool wide) {
  LinearView view;
  view.outputs = source.outputs;
  view.inputs = source.inputs;
  view.codes = codes;
  view.group = group;
  view.offset = offset;
  view.mins = mins;
  view.wide = wide;
  const std::size_t table = static_cast<std::size_t>(view.steps()) * (kStep / group) * kBlock *
                            (wide ? sizeof(float) : sizeof(std::uint16_t));
  view.scales_at = static_cast<std::size_t>(view.steps()) * (codes == Codes::kU4 ? 256 : 512);
  view.mins_at = round_up(view.scales_at + table, 64);
  view.block_bytes = mins ? round_up(view.mins_at + table, 64) : view.mins_at;
  return view;
}

// Writes steps of 16 outputs into their block.
class BlockWriter {
 public:
  BlockWriter(const PackedLinear& packed, int block)
      : view_(packed.view()), block_(packed.data() + block * packed.view().block_bytes) {}

  void write(int step, const StepCodes (&outputs)[kBlock]) const {
    write_codes(step, outputs);
    const int groups = kStep / view_.group;
    for (int lane = 0; lane < kBlock; ++lane) {
      for (int g = 0; g < groups; ++g)
        write_scale(view_.scales_at, (step * groups + g) * kBlock + lane,
                    outputs[lane].scales[g]);
      if (view_.mins) write_scale(view_.mins_at, step * kBlock + lane, outputs[lane].min);
    }
  }

 private:
  void write_codes(int step, const StepCodes (&outputs)[kBlock]) const {
    const bool four_bits = view_.codes == Codes::kU4;
    std::uint8_t* target = block_ + step * (four_bits ? 256 : 512);
    for (int line = 0; line < (four_bits ? 4 : 8); ++line)
      for (int lane = 0; lane < kBlock; ++lane) {
        std::uint32_t four, upper;
        std::memcpy(&four, outputs[lane].codes + line * 4, sizeof four);
        if (four_bits) {
          std::memcpy(&upper, outputs[lane].codes + 16 + line * 4, sizeof upper);
          four |= upper << 4;
        }
        std::memcpy(target + (line * kBlock + lane) * 4, &four, sizeof four);
      }
  }

  void write_scale(std::size_t table, int index, float value) const {
    if (view_.wide) {
      std::memcpy(block_ + table + index * sizeof value, &value, sizeof value);
    } else {
      const std::uint16_t half = f32_to_f16(value);
      std::memcpy(block_ + table + index * sizeof half, &half, sizeof half);
    }
  }

  const LinearView& view_;
  std::uint8_t* block_;
};

PackedLinear pack_blocks(const Source& source, const BlockType& type) {
  PackedLinear packed(integer_view(source, type.codes, type.group, type.offset, type.mins,
                                   type.wide),
                      type.name);
  StepCodes nothing{};
  std::memset(nothing.codes, type.offset, sizeof nothing.codes);
  for (int block = 0; block < packed.view().blocks(); ++block) {
    const BlockWriter writer(packed, block);
    StepCodes steps[kBlock];
    for (int step = 0; step < packed.view().steps(); ++step) {
      for (int lane = 0; lane < kBlock; ++lane) {
        const int output = block * kBlock + lane;
        steps[lane] = nothing;
        if (output < source.outputs) type.decode(source_row(source, output), step, steps[lane]);
      }
      writer.write(step, steps);
    }
  }
  return packed;
}

struct Range {
  float scale, min;
};

Range value_range(const float* values, int count) {
  float least = values[0], greatest = values[0];
  for (int i = 1; i < count; ++i) {
    least = values[i] < least ? values[i] : least;
    greatest = values[i] > greatest ? values[i] : greatest;
  }
  return {(greatest - least) / 255.0f, least};
}

int step_elements(const Source& source, int step) {
  const int left = source.inputs - step * kStep;
  return left < kStep ? left : kStep;
}

// Whether scales and minima can be halves. The absolute error of a small half is 2^-25, that
// of 255 times a small scale 2^-17: nothing beside weights that reach 2^-7.
bool halves_suffice(const Source& source) {
  std::vector<float> values(source.inputs);
  float largest = 0.0f;
  for (int output = 0; output < source.outputs; ++output) {
    read_values(source, output, values.data());
    for (float value : values) largest = std::fabs(value) > largest ? std::fabs(value) : largest;
  }
  return largest >= 0x1p-7f && largest <= 65504.0f;
}

void quantize_step(const float* values, int count, bool wide, StepCodes& step) {
  Range range = value_range(values, count);
  if (!wide) {
    range.scale = f16_to_f32(f32_to_f16(range.scale));
    range.min = f16_to_f32(f32_to_f16(range.min));
  }
  step.scales[0] = range.scale;
  step.min = range.min;
  for (int i = 0; i < count; ++i) {
    const float code = range.scale > 0.0f ? (values[i] - range.min) / range.scale : 0.0f;
    step.codes[i] = static_cast<std::uint8_t>(
        code <= 0.0f ? 0.0f : code >= 255.0f ? 255.0f : std::nearbyint(code));
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

PackedLinear pack_as_is(const Source& source) {
  if (const BlockType* type = block_type(source.type)) return pack_blocks(source, *type);
  return pack_bf16(source);
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

PackedLinear pack_int8(const Source& source) {
  const bool wide = !halves_suffice(source);
  PackedLinear packed(integer_view(source, Codes::kU8, kStep, 0, true, wide), "INT8");
  std::vector<float> values(static_cast<std::size_t>(kBlock) * source.inputs);
  for (int block = 0; block < packed.view().blocks(); ++block) {
    const BlockWriter writer(packed, block);
    for (int lane = 0; lane < kBlock && block * kBlock + lane < source.outputs; ++lane)
      read_values(source, block * kBlock + lane,
                  values.data() + static_cast<std::size_t>(lane) * source.inputs);
    for (int step = 0; step < packed.view().steps(); ++step) {
      StepCodes steps[kBlock] = {};
      for (int lane = 0; lane < kBlock && block * kBlock + lane < source.outputs; ++lane)
        quantize_step(values.data() + static_cast<std::size_t>(lane) * source.inputs +
                          step * kStep,
                      step_elements(source, step), wide, steps[lane]);
      writer.write(step, steps);
    }
  }
  return packed;
}

}  // namespace trimaran
