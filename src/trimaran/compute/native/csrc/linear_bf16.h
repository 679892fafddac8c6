// bf16 products in float32 vectors: widened exactly, summed in order of the inputs, the
// even and the odd ones apart. Included by each tier inside its own compilation unit.
#pragma once

#include "linear_finish.h"

namespace trimaran::TRIMARAN_TIER {

#if defined(__AVX512F__)
constexpr int kFloatRows = 6;
#elif defined(__AVX2__)
constexpr int kFloatRows = 2;
#else
constexpr int kFloatRows = 1;
#endif

static inline float widen(std::uint16_t half) {
  const std::uint32_t bits = static_cast<std::uint32_t>(half) << 16;
  float value;
  std::memcpy(&value, &bits, sizeof value);
  return value;
}

template <int R>
static void bf16_rows(const LinearTask& task, int block, int row) {
  const LinearView& weight = *task.weight;
  const int depth = weight.steps() * kStep;
  const auto* w = reinterpret_cast<const std::uint16_t*>(weight.data + block * weight.block_bytes);
  const std::uint16_t* x[R];
  V16 even[R], odd[R];
  for (int r = 0; r < R; ++r) {
    x[r] = reinterpret_cast<const std::uint16_t*>(task.bf16 +
                                                  activation_bytes(row + r, 0, weight.steps()));
    even[r] = odd[r] = vzero();
  }
  for (int k = 0; k < depth; k += 2, w += 2 * kBlock) {
    // Within a step elements follow each other, steps are a tile apart.
    const int at = k / kStep * (kRowPad * kStepBytes / 2) + k % kStep;
    V16 w_even, w_odd;
    vload_bf16_pairs(w, w_even, w_odd);
    for (int r = 0; r < R; ++r) {
      even[r] = vfma(vset1(widen(x[r][at])), w_even, even[r]);
      odd[r] = vfma(vset1(widen(x[r][at + 1])), w_odd, odd[r]);
    }
  }
  finish_rows(task, row, block, R, [&](int r) { return vadd(even[r], odd[r]); });
}

template <int R = kFloatRows>
static inline void bf16_rows_of(const LinearTask& task, int block, int row, int count) {
  if constexpr (R > 1) {
    if (count < R) {
      bf16_rows_of<R - 1>(task, block, row, count);
      return;
    }
  }
  bf16_rows<R>(task, block, row);
}

static void linear_bf16(const LinearTask& task) {
  for (int block = task.block_begin; block < task.block_end; ++block)
    for (int row = task.row_begin; row < task.row_end; row += kFloatRows) {
      const int left = task.row_end - row;
      bf16_rows_of(task, block, row, left < kFloatRows ? left : kFloatRows);
    }
}

}  // namespace trimaran::TRIMARAN_TIER
