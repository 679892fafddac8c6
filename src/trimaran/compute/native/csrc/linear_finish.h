// The last step of every product: scales, biases, residuals, and the store. Included by
// each tier inside its own compilation unit.
#pragma once

#include "elementwise.h"
#include "linear.h"
#include "simd.h"

namespace trimaran::TRIMARAN_TIER {

// y of one row and block in bf16, as the next layer reads it: what pads the last step is 0.
static inline void store_rounded(const LinearTask& task, int row, int block, V16 y) {
  const int outputs = task.weight->outputs, rest = outputs - block * kBlock;
  const int steps = (outputs + kStep - 1) / kStep;
  std::uint8_t* target = task.out_bf16 + activation_bytes(row, block / 2, steps);
  if (rest < kBlock) y = vselect_first(rest, y, vzero());
  if (block % 2 == 0 && rest <= kBlock) std::memset(target + kStepBytes / 2, 0, kStepBytes / 2);
  bf16_lanes(y, reinterpret_cast<std::uint16_t*>(target + block % 2 * (kStepBytes / 2)));
}

static inline V16 gate_lanes(const LinearTask& task, V16 gate, V16 y) {
  return task.gelu ? gelu_mul_lanes(gate, y) : silu_mul_lanes(gate, y);
}

// out[row][block] = y [+ bias], and then [residual +] or [silu or gelu(out) *]
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
  if (task.gated) y = gate_lanes(task, vload_first(out, count), y);
  if (task.out_bf16 != nullptr)
    store_rounded(task, row, block, y);
  else
    vstore_first(out, count, y);
}

// Several rows of one block; `value(r)` is the y of row + r. What most tasks need goes a
// shorter way to the same result.
template <class Value>
static inline void finish_rows(const LinearTask& task, int row, int block, int count,
                               Value value) {
  const bool whole = (block + 1) * kBlock <= task.weight->outputs;
  if (!whole || task.bias != nullptr || task.out_bf16 != nullptr || task.gated) {
    for (int r = 0; r < count; ++r) finish_row(task, row + r, block, value(r));
    return;
  }
  float* out = task.out + row * task.out_stride + block * kBlock;
  if (task.residual == nullptr) {
    for (int r = 0; r < count; ++r, out += task.out_stride) vstore(out, value(r));
    return;
  }
  const float* residual = task.residual + row * task.residual_stride + block * kBlock;
  for (int r = 0; r < count; ++r, out += task.out_stride, residual += task.residual_stride)
    vstore(out, vadd(vload(residual), value(r)));
}

// Likewise where the gates are at hand: silu or gelu(gate + bias) * (y + bias).
template <class Gate, class Value>
static inline void finish_gated_rows(const LinearTask& task, int row, int block, int count,
                                     Gate gate, Value value) {
  const int column = block * kBlock, rest = task.weight->outputs - column;
  const int lanes = rest < kBlock ? rest : kBlock;
  for (int r = 0; r < count; ++r) {
    V16 g = gate(r), y = value(r);
    if (task.gate_bias != nullptr) g = vadd(g, vload_first(task.gate_bias + column, lanes));
    if (task.bias != nullptr) y = vadd(y, vload_first(task.bias + column, lanes));
    y = gate_lanes(task, g, y);
    if (task.out_bf16 != nullptr)
      store_rounded(task, row + r, block, y);
    else
      vstore_first(task.out + (row + r) * task.out_stride + column, lanes, y);
  }
}

// A gated task in two passes of `linear`: gates to `out`, and then what they gate.
static inline void gate_first(const LinearTask& task, void (*linear)(const LinearTask&)) {
  LinearTask pass = task;
  pass.gate = nullptr;
  pass.weight = task.gate;
  pass.bias = task.gate_bias;
  pass.out_bf16 = nullptr;
  linear(pass);
  pass.weight = task.weight;
  pass.bias = task.bias;
  pass.out_bf16 = task.out_bf16;
  pass.gated = true;
  linear(pass);
}

// The numbers of 16 outputs, with kGroups of them a step.
template <int kGroups>
static inline V16 load_scales(const LinearView& weight, const std::uint8_t* table, int group) {
  if (weight.scales == Scales::kFloat16)
    return vload_f16(reinterpret_cast<const std::uint16_t*>(table) + group * kBlock);
  if (weight.scales == Scales::kFloat32)
    return vload(reinterpret_cast<const float*>(table) + group * kBlock);
  const ScaleParts at(group, kGroups);
  return vmul(vload_f16(reinterpret_cast<const std::uint16_t*>(table + at.halves)),
              vload_i8(reinterpret_cast<const std::int8_t*>(table + at.bytes)));
}

}  // namespace trimaran::TRIMARAN_TIER
