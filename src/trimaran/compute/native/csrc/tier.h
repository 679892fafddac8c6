// The kernels of one instruction set, as a table of functions.
//
// Each tier_*.cpp fills one table from the same headers, compiled with its own flags inside
// a namespace of its own name (TRIMARAN_TIER). Functions in those headers are static, and
// no templates of the standard library are used there: a function that two files share
// would be kept once, from either, and might then use instructions the machine lacks.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>

#include "attention.h"
#include "isa.h"
#include "linear.h"
#include "sampler.h"

namespace trimaran {

struct Tier {
  // y = x / sqrt(mean(x^2) + eps) * weight, one row.
  void (*rms_norm)(const float* x, const float* weight, int width, float eps, float* y);
  // Turns the first 2 * half elements of each head of one row, in place.
  void (*rope)(float* x, int heads, int head_dim, int half, const float* cosines,
               const float* sines);
  void (*silu_mul)(const float* gate, const float* up, int width, float* y);
  void (*gelu_mul)(const float* gate, const float* up, int width, float* y);
  void (*add)(const float* a, const float* b, int width, float* y);
  // One row of activations for linear layers, in 12 or 8 bits or in bf16 (activation_bytes).
  // `quantize` is null on tiers without products in integers.
  void (*quantize)(const float* x, int width, const QuantRows& rows, int row);
  void (*to_bf16)(const float* x, int width, std::uint8_t* rows, int row);
  void (*linear)(const LinearTask& task);
  // The values of one output's weights, as dequantize_output gives them.
  void (*weights_of)(const LinearView& weight, int output, float* values);
  void (*write_kv)(const AttentionArgs& args, int row_begin, int row_end);
  void (*attention_unit)(const AttentionArgs& args, const AttentionUnit& unit,
                         const AttentionSlice* slices, void* scratch);
  void (*merge_unit)(const AttentionArgs& args, const AttentionMerge& merge, void* scratch);
  const SamplerKernels* sampler;

  // How integer codes are packed for it: U4 and U8, or S4 and S8.
  bool multiplies_integers() const { return quantize != nullptr; }
};

// The table of a tier that isa_lacks finds complete.
const Tier& tier_of(Isa isa);
// Whether a weight was packed for it.
inline bool can_multiply(const Tier& tier, const LinearView& weight) {
  return weight.codes == Codes::kBf16 ||
         takes_integers(weight.codes) == tier.multiplies_integers();
}
// By name; throws as isa_from_name does.
inline const Tier& find_tier(const std::string& name) { return tier_of(isa_from_name(name)); }

extern const Tier kTierPortable;
#if defined(__x86_64__)
extern const Tier kTierAvx2, kTierAvx512, kTierAmx;
#endif

}  // namespace trimaran
