// A model's forward as a list of instructions over numbered buffers.
//
// Recorded once (recorder.py); an executor runs it once a step. Buffers hold float32 rows:
// one a row of the step, or one a row whose logits are wanted.
#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "pack.h"

namespace trimaran {

enum class Space { kTokens, kLogits };

enum class Op {
  // On single rows, of any thread:
  kEmbed,     // out = rows of `weight` picked by the tokens, times `scale`
  kAngles,    // out = cosines | sines of position * frequency
  kRmsNorm,   // out = rms_norm(a) * vector, of each of `heads` parts
  kRope,      // out = b turned by the angles a
  kWriteKv,   // writes b and c into the layer's cache
  kSiluMul,   // out = silu(a) * b
  kGeluMul,   // out = gelu(a) * b
  kAdd,       // out = a + b
  kGather,    // out = rows of a whose logits are wanted
  kPrepare,   // rounds a for the linear layers that follow
  // With units of work of their own:
  kLinear,     // all parts read what was prepared last; gated: silu or gelu(parts[0]) * parts[1]
  kAttention,  // out = attention of a over the layer's cache
};

// out = [residual +] input @ weight.T [+ bias]
struct LinearPart {
  std::shared_ptr<const PackedLinear> weight;
  std::vector<float> bias;  // empty: none
  int out = -1;
  int residual = -1;  // a buffer, or -1
};

struct AttentionShape {
  int layer = 0, heads = 0, kv_heads = 0, head_dim = 0;
  float scale = 0.0f;
  int window = 0;  // 0: all positions
};

// Layers with the same window. Their keys and values lie in a cache of their own.
struct LayerGroup {
  int window;
  std::vector<int> layers;  // ascending
};

struct Instruction {
  explicit Instruction(Op op, Space space = Space::kTokens) : op(op), space(space) {}

  Op op;
  Space space;
  int out = -1, a = -1, b = -1, c = -1;
  std::vector<float> vector;         // kRmsNorm
  std::vector<double> frequencies;   // kAngles
  float eps = 0.0f, scale = 1.0f;
  int heads = 1, head_dim = 0;       // kRope; kRmsNorm
  bool integers = false, bf16 = false;  // kPrepare: for which products
  AttentionShape attention;
  int group = 0, place = 0;  // of the layer: in groups(), and in its group
  std::shared_ptr<const PackedLinear> weight;  // kEmbed
  std::vector<LinearPart> parts;
  bool gated = false, gelu = false;
  // Of kPrepare and kLinear: the input's producer could round it on its way out. Of kLinear
  // and kAttention: it is that producer, and nobody else reads the output. Whether it does
  // depends on the tier: where it doesn't, kPrepare is there for it.
  bool direct_input = false, direct_output = false;
};

struct Buffer {
  int width = 0;
  int stride = 0;  // floats from row to row
  Space space = Space::kTokens;
};

class Program {
 public:
  // Each returns or takes numbers of buffers; std::invalid_argument where they don't fit.
  int buffer(int width, bool logits);
  void embed(int out, std::shared_ptr<const PackedLinear> weight, float scale);
  void angles(int out, std::vector<double> frequencies);
  // Of each part of a row that is as long as `weight`.
  void rms_norm(int out, int a, std::vector<float> weight, float eps);
  void rope(int out, int a, int angles, int heads, int head_dim);
  // `direct`: only a linear layer with direct input reads the output, before the next such.
  void attention(int out, int q, int k, int v, const AttentionShape& shape, bool direct);
  void silu_mul(int out, int gate, int up);
  void gelu_mul(int out, int gate, int up);
  void add(int out, int a, int b);
  void gather(int out, int a);
  // The parts share their input.
  void linear(int a, std::vector<LinearPart> parts, bool direct_input);
  // out = silu or gelu(gate) * up of two layers of the same size, both writing to `out`.
  void gated_linear(int a, LinearPart gate, LinearPart up, bool gelu, bool direct);
  // `logits` are what a step returns; nothing can be added after it.
  void finish(int logits);

  const std::vector<Instruction>& instructions() const { return instructions_; }
  const std::vector<Buffer>& buffers() const { return buffers_; }
  int logits() const { return logits_; }
  // What the logits are made of: rows after the final norm, one a row of the step, which
  // nothing writes over. Or -1, where a program has none.
  int hidden() const { return hidden_; }
  int vocabulary() const { return vocabulary_; }  // tokens that `embed` knows
  int layers() const { return layers_; }
  // By window, ascending: first the layers that see all. Once finished.
  const std::vector<LayerGroup>& groups() const { return groups_; }
  // Of all attention instructions; a program has one shape of cache.
  const AttentionShape& cache_shape() const { return cache_shape_; }
  int widest_input() const { return widest_input_; }  // of the linear layers

 private:
  const Buffer& checked(int buffer, const char* what) const;
  void expect_width(int buffer, int width, const char* what) const;
  void expect_space(int buffer, Space space) const;
  void push(Instruction instruction);
  void gate(Op op, int out, int gate, int up);
  void find_hidden();
  void group_layers();

  std::vector<Instruction> instructions_;
  std::vector<Buffer> buffers_;
  AttentionShape cache_shape_;
  std::vector<LayerGroup> groups_;
  int logits_ = -1, hidden_ = -1, vocabulary_ = 0, layers_ = 0, widest_input_ = 0;
};

}  // namespace trimaran
