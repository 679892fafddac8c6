#include "program.h"

#include <algorithm>
#include <stdexcept>
#include <string>
#include <utility>

#include "kv_cache.h"

namespace trimaran {
namespace {

[[noreturn]] void refuse(const std::string& problem) {
  throw std::invalid_argument("the recorded plan is unsound: " + problem);
}

}  // namespace

const Buffer& Program::checked(int buffer, const char* what) const {
  if (buffer < 0 || buffer >= static_cast<int>(buffers_.size()))
    refuse(std::string(what) + " is buffer " + std::to_string(buffer) + ", which doesn't exist");
  return buffers_[buffer];
}

void Program::expect_width(int buffer, int width, const char* what) const {
  const int found = checked(buffer, what).width;
  if (found != width)
    refuse(std::string(what) + " has " + std::to_string(found) + " elements a row, not " +
           std::to_string(width));
}

void Program::expect_space(int buffer, Space space) const {
  if (buffer >= 0 && buffers_[buffer].space != space)
    refuse("buffer " + std::to_string(buffer) + " has rows for another purpose");
}

void Program::push(Instruction instruction) {
  if (logits_ >= 0) refuse("it is finished");
  expect_space(instruction.out, instruction.space);
  expect_space(instruction.a, instruction.op == Op::kGather ? Space::kTokens : instruction.space);
  expect_space(instruction.b, instruction.space);
  expect_space(instruction.c, instruction.space);
  for (const LinearPart& part : instruction.parts) {
    expect_space(part.out, instruction.space);
    expect_space(part.residual, instruction.space);
  }
  instructions_.push_back(std::move(instruction));
}

int Program::buffer(int width, bool logits) {
  if (width < 1) refuse("a buffer of " + std::to_string(width) + " elements a row");
  const int stride = static_cast<int>(round_up(width, 16));
  buffers_.push_back({width, stride, logits ? Space::kLogits : Space::kTokens});
  return static_cast<int>(buffers_.size()) - 1;
}

void Program::embed(int out, std::shared_ptr<const PackedLinear> weight, float scale) {
  expect_width(out, weight->view().inputs, "the embedding");
  if (vocabulary_ != 0 && vocabulary_ != weight->view().outputs)
    refuse("embeddings of different vocabularies");
  vocabulary_ = weight->view().outputs;
  Instruction instruction(Op::kEmbed);
  instruction.out = out;
  instruction.weight = std::move(weight);
  instruction.scale = scale;
  push(std::move(instruction));
}

void Program::angles(int out, std::vector<double> frequencies) {
  expect_width(out, 2 * static_cast<int>(frequencies.size()), "the angles");
  Instruction instruction(Op::kAngles);
  instruction.out = out;
  instruction.frequencies = std::move(frequencies);
  push(std::move(instruction));
}

void Program::rms_norm(int out, int a, std::vector<float> weight, float eps) {
  const int width = checked(a, "the norm's input").width, part = static_cast<int>(weight.size());
  if (part < 1 || width % part != 0)
    refuse("the norm's input has " + std::to_string(width) + " elements a row, no multiple of " +
           std::to_string(part));
  expect_width(out, width, "the norm's output");
  Instruction instruction(Op::kRmsNorm, buffers_[a].space);
  instruction.out = out;
  instruction.a = a;
  instruction.vector = std::move(weight);
  instruction.eps = eps;
  instruction.heads = width / part;
  push(std::move(instruction));
}

void Program::rope(int out, int a, int angles, int heads, int head_dim) {
  expect_width(a, heads * head_dim, "the heads to rotate");
  expect_width(out, heads * head_dim, "the rotated heads");
  if (checked(angles, "the angles").width > head_dim) refuse("more angles than a head has pairs");
  Instruction instruction(Op::kRope);
  instruction.out = out;
  instruction.a = angles;
  instruction.b = a;
  instruction.heads = heads;
  instruction.head_dim = head_dim;
  push(std::move(instruction));
}

void Program::attention(int out, int q, int k, int v, const AttentionShape& shape,
                        bool direct) {
  if (const char* problem = kv_shape_error(shape.heads, shape.kv_heads, shape.head_dim, 16))
    throw std::invalid_argument(problem);
  expect_width(q, shape.heads * shape.head_dim, "the queries");
  expect_width(out, shape.heads * shape.head_dim, "the attention's output");
  expect_width(k, shape.kv_heads * shape.head_dim, "the keys");
  expect_width(v, shape.kv_heads * shape.head_dim, "the values");
  if (shape.window < 0) refuse("a window of " + std::to_string(shape.window) + " positions");
  if (shape.layer != layers_) refuse("layers out of order");
  if (layers_ > 0 && (shape.kv_heads != cache_shape_.kv_heads ||
                      shape.head_dim != cache_shape_.head_dim ||
                      shape.heads != cache_shape_.heads))
    refuse("layers with heads of different number or size");
  cache_shape_ = shape;
  ++layers_;
  Instruction write(Op::kWriteKv), attend(Op::kAttention);
  write.b = k;
  write.c = v;
  write.attention = attend.attention = shape;
  attend.out = out;
  attend.a = q;
  attend.direct_output = direct;
  push(std::move(write));
  push(std::move(attend));
}

void Program::silu_mul(int out, int gate, int up) { this->gate(Op::kSiluMul, out, gate, up); }

void Program::gelu_mul(int out, int gate, int up) { this->gate(Op::kGeluMul, out, gate, up); }

void Program::gate(Op op, int out, int gate, int up) {
  expect_width(gate, checked(out, "the product").width, "the gate");
  expect_width(up, buffers_[out].width, "the gated values");
  Instruction instruction(op, buffers_[out].space);
  instruction.out = out;
  instruction.a = gate;
  instruction.b = up;
  push(std::move(instruction));
}

void Program::add(int out, int a, int b) {
  expect_width(a, checked(out, "the sum").width, "the first addend");
  expect_width(b, buffers_[out].width, "the second addend");
  Instruction instruction(Op::kAdd, buffers_[out].space);
  instruction.out = out;
  instruction.a = a;
  instruction.b = b;
  push(std::move(instruction));
}

void Program::gather(int out, int a) {
  expect_width(a, checked(out, "the gathered rows").width, "the rows to gather");
  if (buffers_[out].space != Space::kLogits) refuse("gathered rows must be those of the logits");
  Instruction instruction(Op::kGather, Space::kLogits);
  instruction.out = out;
  instruction.a = a;
  push(std::move(instruction));
}

void Program::linear(int a, std::vector<LinearPart> parts, bool direct_input) {
  const Buffer& input = checked(a, "a linear layer's input");
  Instruction prepare(Op::kPrepare, input.space), multiply(Op::kLinear, input.space);
  for (const LinearPart& part : parts) {
    const LinearView& view = part.weight->view();
    expect_width(a, view.inputs, "a linear layer's input");
    expect_width(part.out, view.outputs, "a linear layer's output");
    if (part.residual >= 0) expect_width(part.residual, view.outputs, "a residual");
    if (!part.bias.empty() && static_cast<int>(part.bias.size()) != view.outputs)
      refuse("a bias of another length than its layer");
    (takes_integers(view.codes) ? prepare.integers : prepare.bf16) = true;
  }
  if (input.width > widest_input_) widest_input_ = input.width;
  prepare.a = a;
  prepare.direct_input = multiply.direct_input = direct_input;
  multiply.parts = std::move(parts);
  push(std::move(prepare));
  push(std::move(multiply));
}

void Program::gated_linear(int a, LinearPart gate, LinearPart up, bool gelu, bool direct) {
  if (gate.out != up.out || gate.residual >= 0 || up.residual >= 0)
    refuse("gated layers write to one buffer and have no residual");
  if (gate.weight->view().outputs != up.weight->view().outputs) refuse("gates of another number");
  linear(a, {std::move(gate), std::move(up)}, false);
  instructions_.back().gated = true;
  instructions_.back().gelu = gelu;
  instructions_.back().direct_output = direct;
}

void Program::finish(int logits) {
  if (checked(logits, "the logits").space != Space::kLogits)
    refuse("the logits must have a row each that is wanted");
  if (vocabulary_ == 0 || layers_ == 0) refuse("no embedding, or no attention");
  for (const Instruction& instruction : instructions_) {
    const int out = instruction.parts.empty() ? instruction.out : instruction.parts[0].out;
    if (instruction.direct_output && buffers_[out].width > widest_input_)
      refuse("an output for a linear layer is wider than the input of any");
  }
  find_hidden();
  // What a step returns is contiguous.
  buffers_[logits].stride = buffers_[logits].width;
  group_layers();
  logits_ = logits;
}

// Nothing may follow what gathers the rows that could write over them.
void Program::find_hidden() {
  int gathered = 0, later = 0;
  for (const Instruction& instruction : instructions_) {
    if (instruction.op == Op::kGather) {
      hidden_ = instruction.a;
      ++gathered;
    } else if (gathered > 0 && instruction.space == Space::kTokens) {
      ++later;
    }
  }
  if (gathered != 1 || later > 0) hidden_ = -1;
}

void Program::group_layers() {
  for (const Instruction& instruction : instructions_)
    if (instruction.op == Op::kAttention) {
      const int window = instruction.attention.window;
      const auto at = std::find_if(groups_.begin(), groups_.end(), [&](const LayerGroup& group) {
        return group.window >= window;
      });
      if (at != groups_.end() && at->window == window)
        at->layers.push_back(instruction.attention.layer);
      else
        groups_.insert(at, {window, {instruction.attention.layer}});
    }
  for (Instruction& instruction : instructions_) {
    if (instruction.op != Op::kAttention && instruction.op != Op::kWriteKv) continue;
    while (groups_[instruction.group].window != instruction.attention.window) ++instruction.group;
    const std::vector<int>& layers = groups_[instruction.group].layers;
    instruction.place = static_cast<int>(
        std::find(layers.begin(), layers.end(), instruction.attention.layer) - layers.begin());
  }
}

}  // namespace trimaran
