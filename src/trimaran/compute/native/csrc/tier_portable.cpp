#define TRIMARAN_TIER portable

#include "tier.h"

#include "attention_int8.h"
#include "elementwise.h"
#include "linear_bf16.h"
#include "linear_grouped.h"
#include "linear_int.h"
#include "sampler_kernels.h"

namespace trimaran {
namespace portable {

static void linear(const LinearTask& task) {
  if (task.gate != nullptr)
    gate_first(task, linear);
  else if (task.weight->codes == Codes::kBf16)
    linear_bf16(task);
  else if (task.quant.step_scales != nullptr)
    linear_grouped(task);
  else
    linear_int(task);
}

}  // namespace portable

const Tier kTierPortable = {
    portable::rms_norm,
    portable::rope,
    portable::silu_mul,
    portable::gelu_mul,
    portable::add,
    portable::quantize_row,
    portable::to_bf16_row,
    portable::linear,
    dequantize_output,
    portable::write_kv_as,
    portable::attention_unit_as,
    portable::merge_unit,
    &portable::kSamplerKernels,
};

}  // namespace trimaran
