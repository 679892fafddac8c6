#define TRIMARAN_TIER avx2

#include "tier.h"

#include "attention_int8.h"
#include "elementwise.h"
#include "linear_bf16.h"
#include "linear_grouped.h"
#include "linear_int.h"
#include "sampler_kernels.h"

namespace trimaran {
namespace avx2 {

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

}  // namespace avx2

const Tier kTierAvx2 = {
    avx2::rms_norm,
    avx2::rope,
    avx2::silu_mul,
    avx2::gelu_mul,
    avx2::add,
    avx2::quantize_row,
    avx2::to_bf16_row,
    avx2::linear,
    dequantize_output,
    avx2::write_kv_as,
    avx2::attention_unit_as,
    avx2::merge_unit,
    &avx2::kSamplerKernels,
};

}  // namespace trimaran
