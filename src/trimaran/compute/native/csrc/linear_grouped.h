// Integer products of activations in 8 bits with a scale for each step (QuantRows::step_scales):
// one plane in place of two, on every tier. Included by each tier inside its own compilation
// unit.
#pragma once

#include "linear_int.h"

namespace trimaran::TRIMARAN_TIER {

// Rows that meet a block of weights while it is in the cache: their activations stay there too.
constexpr int kGroupedSlice = 128;

#if defined(__AVX512VNNI__)

constexpr int kGroupedRows = 8;  // in hand, of one tile

// sums[group][row] = float(isum) of one step. `q` is the first row's, the others follow.
template <class F, int R>
static inline void grouped_sums(const std::uint8_t* codes, const std::int8_t* q,
                                const std::int32_t* const (&starts)[R], int offset,
                                V16 (&sums)[F::groups][R]) {
  for (int g = 0; g < F::groups; ++g) {
    __m512i sum[R];
    for (int r = 0; r < R; ++r)
      sum[r] = F::mins ? _mm512_setzero_si512() : _mm512_set1_epi32(-offset * starts[r][g]);
#pragma GCC unroll 8
    for (int i = 0; i < F::lines; ++i) {
      const int line = g * F::lines + i;
      const __m512i c = load_line<F>(codes, line);
      for (int r = 0; r < R; ++r) add_bytes(sum[r], c, q + r * kStepBytes + line * 4);
    }
    for (int r = 0; r < R; ++r) sums[g][r].v = _mm512_cvtepi32_ps(sum[r]);
  }
}

#else

constexpr int kGroupedRows = kIntRows;

template <class F, int R>
static inline void grouped_sums(const std::uint8_t* codes, const std::int8_t* q,
                                const std::int32_t* const (&starts)[R], int offset,
                                V16 (&sums)[F::groups][R]) {
  RowStep rows[R];
  for (int r = 0; r < R; ++r) rows[r] = {q + r * kStepBytes, starts[r]};
  step_sums<F, R>(codes, rows, offset, sums);
}

#endif

template <class F, int R>
static void grouped_rows(const LinearTask& task, int block, int row) {
  const LinearView& weight = *task.weight;
  const QuantRows& quant = task.quant;
  const int steps = weight.steps();
  const std::uint8_t* codes = weight.data + block * weight.block_bytes;
  const std::uint8_t* scales = codes + weight.scales_at;
  const std::uint8_t* mins = codes + weight.mins_at;
  const std::uint8_t* ahead = codes + kFetchAhead;
  const bool fetches = (row - task.row_begin) % kGroupedSlice == 0;
  const std::int8_t* q = quant.planes + activation_bytes(row, 0, steps);
  const std::size_t first = quant.tile_offset(row, steps);
  const float* own_scales = quant.step_scales + first;
  const float* own_sums = quant.sums32f + first;
  const std::int32_t* starts[R];
  V16 acc[R];
  for (int r = 0; r < R; ++r) {
    const std::size_t at = static_cast<std::size_t>(row + r) * steps;
    starts[r] = F::groups == 1 ? quant.sums32 + at : quant.sums16 + 2 * at;
    acc[r] = vzero();
  }
  for (int step = 0; step < steps; ++step, codes += F::step_bytes, q += kRowPad * kStepBytes,
           own_scales += kRowPad, own_sums += kRowPad) {
    if (fetches)
      for (int line = 0; line < F::fetched; ++line, ahead += 64) __builtin_prefetch(ahead, 0, 2);
    V16 isum[F::groups][R];
    grouped_sums<F, R>(codes, q, starts, weight.offset, isum);
    for (int g = 0; g < F::groups; ++g) {
      const V16 scale = load_scales<F::groups>(weight, scales, step * F::groups + g);
      for (int r = 0; r < R; ++r)
        acc[r] = vfma(vmul(scale, vset1(own_scales[r])), isum[g][r], acc[r]);
    }
    if constexpr (F::mins) {
      const V16 min = load_scales<1>(weight, mins, step);
      for (int r = 0; r < R; ++r) acc[r] = vfma(min, vset1(own_sums[r]), acc[r]);
    }
    if constexpr (!F::mins)  // the others don't read them
      for (int r = 0; r < R; ++r) starts[r] += F::groups;
  }
  finish_rows(task, row, block, R, [&](int r) { return acc[r]; });
}

template <class F, int R = kGroupedRows>
static inline void grouped_rows_of(const LinearTask& task, int block, int row, int count) {
  if constexpr (R > 1) {
    if (count < R) {
      grouped_rows_of<F, R - 1>(task, block, row, count);
      return;
    }
  }
  grouped_rows<F, R>(task, block, row);
}

static void linear_grouped(const LinearTask& task) {
  with_format(*task.weight, [&](auto format) {
    for (int begin = task.row_begin; begin < task.row_end; begin += kGroupedSlice) {
      const int left = task.row_end - begin;
      const int end = begin + (left < kGroupedSlice ? left : kGroupedSlice);
      for (int block = task.block_begin; block < task.block_end; ++block)
        for (int row = begin; row < end; row += kGroupedRows) {
          const int count = end - row;
          grouped_rows_of<decltype(format)>(task, block, row,
                                            count < kGroupedRows ? count : kGroupedRows);
        }
    }
  });
}

}  // namespace trimaran::TRIMARAN_TIER
