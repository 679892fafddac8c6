#define TRIMARAN_TIER amx

#include "tier.h"

#include "attention_int8.h"
#include "elementwise.h"
#include "linear_amx.h"
#include "sampler_kernels.h"

namespace trimaran {

const Tier kTierAmx = {
    amx::rms_norm,
    amx::rope,
    amx::silu_mul,
    amx::gelu_mul,
    amx::add,
    nullptr,  // has no products in integers
    amx::to_bf16_row,
    amx::linear_amx,
    amx::weights_of,
    amx::write_kv_as,
    amx::attention_unit_as,
    amx::merge_unit,
    &amx::kSamplerKernels,
};

}  // namespace trimaran
