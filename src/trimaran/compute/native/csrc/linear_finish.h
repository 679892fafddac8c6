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
  vstore_first(out, count, y);
}

// Several rows of one block; `value(r)` is the y of row + r. What most tasks need goes a
// shorter way to the same result.
template <class Value>
static inline void finish_rows(const LinearTask& task, int row, int block, int count,
                               Value value) {
  const bool whole = (block + 1) * kBlock <= task.weight->outputs;
  if (!whole || task.bias != nullptr || (task.gated && task.residual != nullptr)) {
    for (int r = 0; r < count; ++r) finish_row(task, row + r, block, value(r));
    return;
  }
  float* out = task.out + row * task.out_stride + block * kBlock;
  if (task.gated) {
    for (int r = 0; r < count; ++r, out += task.out_stride)
      vstore(out, silu_mul_lanes(vload(out), value(r)));
    return;
  }
  if (task.residual == nullptr) {
    for (int r = 0; r < count; ++r, out += task.out_stride) vstore(out, value(r));
    return;
  }
  const float* residual = task.residual + row * task.residual_stride + block * kBlock;
  for (int r = 0; r < count; ++r, out += task.out_stride, residual += task.residual_stride)
    vstore(out, vadd(vload(residual), value(r)));
}

static inline V16 load_scales(const LinearView& weight, const std::uint8_t* table, int group) {
  if (weight.wide) return vload(reinterpret_cast<const float*>(table) + group * kBlock);
  return vload_f16(reinterpret_cast<const std::uint16_t*>(table) + group * kBlock);
}

}  // namespace trimaran::TRIMARAN_TIER
