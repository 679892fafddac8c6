#define TRIMARAN_TIER avx512

#include "tier.h"

#include "attention_int8.h"
#include "elementwise.h"
#include "linear_bf16.h"
#include "linear_grouped.h"
#include "linear_int.h"
#include "linear_pairs.h"
#include "sampler_kernels.h"

namespace trimaran {
namespace avx512 {

static void linear(const LinearTask& task) {
  if (task.gate != nullptr)
    gate_first(task, linear);
  else if (task.weight->codes == Codes::kBf16)
    linear_bf16(task);
  else if (task.quant.step_scales != nullptr)
    linear_grouped(task);
  else if (takes_pairs(task))
    linear_pairs(task);
  else
    linear_int(task);
}

}  // namespace avx512

const Tier kTierAvx512 = {
    avx512::rms_norm,
    avx512::rope,
    avx512::silu_mul,
    avx512::gelu_mul,
    avx512::add,
    avx512::quantize_row,
    avx512::to_bf16_row,
    avx512::linear,
    dequantize_output,
    avx512::write_kv_as,
    avx512::attention_unit_as,
    avx512::merge_unit,
    &avx512::kSamplerKernels,
};

}  // namespace trimaran
