// The last step of every product: scales, biases, residuals, and the store. Included by
// each tier inside its own compilation unit.
#pragma once

#include "elementwise.h"
#include "linear.h"
#include "simd.h"

namespace trimaran::TRIMARAN_TIER {

// out[row][block] = y [+ bias], and then [residual +] or [silu(out) *]
static inline void finish_row(const LinearTask& task, int row, int block, V16 y) {
  const int column = block * kBlock;
  const int rest = task.weight->outputs - column;
  const int count = rest < kBlock ? rest : kBlock;
  if (task.bias != nullptr) y = vadd(y, vload_first(task.bias + column, count));
  if (task.residual != nullptr) {
    const float* residual = task.residual + row * task.residual_stride + column;
    y = vadd(vload_first(residual, count), y);
  }
  float* out = task.out + row * task.out_stride + column;
  if (task.gated) y = silu_mul_lanes(vload_first(out, count), y);
  if (count == kBlock)
    vstore(out, y);
  else
    vstore_first(out, count, y);
}

static inline V16 load_scales(const LinearView& weight, const std::uint8_t* table, int group) {
  if (weight.wide) return vload(reinterpret_cast<const float*>(table) + group * kBlock);
  return vload_f16(reinterpret_cast<const std::uint16_t*>(table) + group * kBlock);
}

}  // namespace trimaran::TRIMARAN_TIER
