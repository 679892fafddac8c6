#define TRIMARAN_TIER amx

#include "tier.h"

#include "attention_amx.h"
#include "elementwise.h"
#include "linear_amx.h"
#include "sampler_kernels.h"

namespace trimaran {
namespace amx {

static void linear(const LinearTask& task) {
  if (task.weight->codes == Codes::kBf16)
    linear_bf16_amx(task);
  else
    linear_int_amx(task);
}

}  // namespace amx

const Tier kTierAmx = {
    amx::rms_norm,
    amx::rope,
    amx::silu_mul,
    amx::add,
    amx::quantize_row,
    amx::to_bf16_row,
    amx::linear,
    amx::write_kv,
    amx::attention_unit_amx,
    amx::merge_unit,
    &amx::kSamplerKernels,
};

}  // namespace trimaran
