// Products on AMX tiles, for all row counts in bf16 and for more than a few in integers.
// Included by the amx tier inside its own compilation unit.
//
// Integer codes. A step's 32 inputs are one pass of the tile unit:
//
//   U4   A row   [ hi of 32 inputs | lo of 32 inputs ]          64 bytes, as they lie
//        B       [ 16 * code, 8 lines | code, 8 lines ]         unpacked to scratch
//        C       16 * sum(hi * c) + sum(lo * c) = isum          in one product
//   U8   two products, hi and lo, over 8 lines (groups of 16: four over 4 lines)
//
// An offset goes into B, which is then signed. C tiles go through memory to the vector
// registers that hold the 16 rows' float sums; that work overlaps the next products.
#pragma once

#include "linear_int.h"

namespace trimaran::TRIMARAN_TIER {

constexpr int kTile = 16;         // rows
constexpr int kTileBytes = 1024;
constexpr int kSlabSteps = 48;    // steps unpacked at once
constexpr int kVectorRowsMax = 4; // up to so many rows vectors are as fast

struct alignas(64) LinearTiles {
  std::uint8_t palette = 1;
  std::uint8_t start_row = 0;
  std::uint8_t reserved[14] = {};
  std::uint16_t row_bytes[16] = {};
  std::uint8_t rows[16] = {};

  // C in tiles 0-3, A in 4 and 5, B in 6 and 7; `depth` lines of four bytes.
  LinearTiles(int height, int depth) {
    for (int tile = 0; tile < 8; ++tile) {
      row_bytes[tile] = static_cast<std::uint16_t>(tile == 4 || tile == 5 ? 4 * depth : 64);
      rows[tile] = static_cast<std::uint8_t>(tile < 6 ? height : depth);
    }
  }
};

static inline void load_tiles(const LinearTiles& config) {
  asm volatile("ldtilecfg %0" : : "m"(config) : "memory");
}

// Where the parts of a task's scratch memory lie.
struct LinearScratch {
  std::uint8_t* slab;   // [kSlabSteps + 1][1 KB] B tiles
  std::int32_t* tiles;  // [8][16][16] C tiles on their way
  float* acc;           // [kTaskRows][16], between slabs
  float* scales;        // [2 * (kSlabSteps + 1)][16] of the slab's groups
  float* mins;          // [kSlabSteps + 1][16]

  explicit LinearScratch(void* memory) {
    slab = static_cast<std::uint8_t*>(memory);
    tiles = reinterpret_cast<std::int32_t*>(slab + (kSlabSteps + 1) * kTileBytes);
    acc = reinterpret_cast<float*>(tiles + 8 * kTile * kBlock);
    scales = acc + kTaskRows * kBlock;
    mins = scales + 2 * (kSlabSteps + 1) * kBlock;
  }
};

// Steps begin..end of one block, unpacked.
struct Slab {
  int begin, end;
  int steps;  // of the whole block
  bool first() const { return begin == 0; }
  bool last() const { return end == steps; }
};

template <class F>
struct Pass {
  static constexpr int steps = F::four_bits ? 2 : 1;
  static constexpr int tiles = F::four_bits ? 2 : 2 * F::groups;
  static constexpr int depth = F::four_bits ? 16 : F::lines;
};

// One step's B tiles from its codes.
template <class F>
static inline void unpack_step(const std::uint8_t* codes, std::uint8_t* target) {
  const __m512i top_bit = _mm512_set1_epi8(static_cast<char>(0x80));
  if constexpr (F::four_bits) {
    const __m512i high_nibbles = _mm512_set1_epi8(static_cast<char>(0xf0));
    const __m512i low_nibbles = _mm512_set1_epi8(15), eight = _mm512_set1_epi8(8);
    for (int line = 0; line < 4; ++line) {
      const __m512i pair = _mm512_loadu_si512(codes + line * 64);
      __m512i scaled[2] = {_mm512_and_si512(_mm512_slli_epi16(pair, 4), high_nibbles),
                           _mm512_and_si512(pair, high_nibbles)};
      __m512i plain[2] = {_mm512_and_si512(pair, low_nibbles),
                          _mm512_and_si512(_mm512_srli_epi16(pair, 4), low_nibbles)};
      for (int half = 0; half < 2; ++half) {
        if constexpr (!F::mins) {
          scaled[half] = _mm512_xor_si512(scaled[half], top_bit);  // - 16 * 8
          plain[half] = _mm512_sub_epi8(plain[half], eight);
        }
        _mm512_store_si512(target + (4 * half + line) * 64, scaled[half]);
        _mm512_store_si512(target + (8 + 4 * half + line) * 64, plain[half]);
      }
    }
  } else {
    for (int line = 0; line < 8; ++line) {
      __m512i c = _mm512_loadu_si512(codes + line * 64);
      if constexpr (!F::mins) c = _mm512_xor_si512(c, top_bit);  // - 128
      _mm512_store_si512(target + line * 64, c);
    }
  }
}

// C tiles of one pass.
template <class F>
static inline void multiply_pass(const std::int8_t* a, std::size_t a_stride,
                                 const std::uint8_t* b, std::int32_t* c) {
  constexpr int kC = kTile * kBlock;
  _tile_zero(0);
  _tile_zero(1);
  if constexpr (F::four_bits) {
    _tile_loadd(4, a, a_stride);
    _tile_loadd(6, b, 64);
    _tile_loadd(5, a + 64, a_stride);
    _tile_loadd(7, b + kTileBytes, 64);
    if constexpr (F::mins) {
      _tile_dpbsud(0, 4, 6);
      _tile_dpbsud(1, 5, 7);
    } else {
      _tile_dpbssd(0, 4, 6);
      _tile_dpbssd(1, 5, 7);
    }
  } else {
    _tile_loadd(4, a, a_stride);
    _tile_loadd(6, b, 64);
    _tile_loadd(5, a + kStep, a_stride);
    if constexpr (F::mins) {
      _tile_dpbsud(0, 4, 6);
      _tile_dpbsud(1, 5, 6);
    } else {
      _tile_dpbssd(0, 4, 6);
      _tile_dpbssd(1, 5, 6);
    }
  }
  if constexpr (F::groups == 2) {
    _tile_zero(2);
    _tile_zero(3);
    _tile_loadd(4, a + kStep / 2, a_stride);
    _tile_loadd(7, b + 4 * 64, 64);
    _tile_loadd(5, a + kStep + kStep / 2, a_stride);
    _tile_dpbssd(2, 4, 7);
    _tile_dpbssd(3, 5, 7);
    _tile_stored(2, c + 2 * kC, 64);
    _tile_stored(3, c + 3 * kC, 64);
  }
  _tile_stored(0, c, 64);
  _tile_stored(1, c + kC, 64);
}

// B tiles, scales and mins of a slab. Scales and mins of a last pass's missing step are 0.
template <class F>
static void unpack_slab(const LinearView& weight, const std::uint8_t* block, const Slab& slab,
                        const LinearScratch& scratch) {
  for (int step = slab.begin; step < slab.end; ++step) {
    const int at = step - slab.begin;
    unpack_step<F>(block + step * F::step_bytes, scratch.slab + at * kTileBytes);
    for (int g = 0; g < F::groups; ++g)
      vstore(scratch.scales + (at * F::groups + g) * kBlock,
             load_scales(weight, block + weight.scales_at, step * F::groups + g));
    if constexpr (F::mins)
      vstore(scratch.mins + at * kBlock, load_scales(weight, block + weight.mins_at, step));
  }
  vstore(scratch.scales + (slab.end - slab.begin) * F::groups * kBlock, vzero());
  vstore(scratch.mins + (slab.end - slab.begin) * kBlock, vzero());
}

// acc += scale * sum [+ min * (sum of q)], one group of R rows. With U8, `tile` has the sums
// of hi and then those of lo.
template <class F, int R>
__attribute__((always_inline)) static inline void add_group(const std::int32_t* tile,
                                                            const float* scales,
                                                            const float* mins, const float* sums,
                                                            __m512 (&acc)[R]) {
  constexpr int kC = kTile * kBlock;
  const __m512 scale = _mm512_load_ps(scales);
#pragma GCC unroll 16
  for (int r = 0; r < R; ++r) {
    __m512i sum = _mm512_load_si512(tile + r * kBlock);
    if constexpr (!F::four_bits)
      sum = _mm512_add_epi32(_mm512_slli_epi32(sum, 4), _mm512_load_si512(tile + kC + r * kBlock));
    acc[r] = _mm512_fmadd_ps(scale, _mm512_cvtepi32_ps(sum), acc[r]);
  }
  if constexpr (F::mins) {
    const __m512 min = _mm512_load_ps(mins);
#pragma GCC unroll 16
    for (int r = 0; r < R; ++r) acc[r] = _mm512_fmadd_ps(min, _mm512_set1_ps(sums[r]), acc[r]);
  }
}

// A whole pass, whose first step is the slab's `at`-th.
template <class F, int R>
__attribute__((always_inline)) static inline void add_pass(const std::int32_t* tiles, int at,
                                                           const LinearScratch& scratch,
                                                           const float* sums, __m512 (&acc)[R]) {
  constexpr int kC = kTile * kBlock;
  const float* scales = scratch.scales + at * F::groups * kBlock;
  const float* mins = scratch.mins + at * kBlock;
  sums += at * kRowPad;
  add_group<F, R>(tiles, scales, mins, sums, acc);
  if constexpr (F::four_bits)
    add_group<F, R>(tiles + kC, scales + kBlock, mins + kBlock, sums + kRowPad, acc);
  else if constexpr (F::groups == 2)
    add_group<F, R>(tiles + 2 * kC, scales + kBlock, mins, sums, acc);
}

// One slab for `count` <= R rows from `row`: their float sums go on from `memory`, and back,
// or with the last slab into the outputs.
template <class F, int R>
static void slab_rows(const LinearTask& task, int block, int row, int count, const Slab& slab,
                      const LinearScratch& scratch, float* memory) {
  const std::size_t stride = static_cast<std::size_t>(slab.steps) * 2 * kStep;
  const std::int8_t* a = task.quant.planes + row * stride + slab.begin * 2 * kStep;
  const float* sums = task.quant.float_sums(row, slab.steps) + slab.begin * kRowPad;
  constexpr int kHalf = 4 * kTile * kBlock;  // of the C tiles; passes take turns
  const int steps = slab.end - slab.begin;
  __m512 acc[R];
#pragma GCC unroll 16
  for (int r = 0; r < R; ++r) acc[r] = _mm512_setzero_ps();
  if (!slab.first()) {
#pragma GCC unroll 16
    for (int r = 0; r < R; ++r) acc[r] = _mm512_load_ps(memory + r * kBlock);
  }
  multiply_pass<F>(a, stride, scratch.slab, scratch.tiles);
  int turn = 0, at = Pass<F>::steps;
  for (; at < steps; at += Pass<F>::steps) {
    turn ^= kHalf;
    multiply_pass<F>(a + at * 2 * kStep, stride, scratch.slab + at * kTileBytes,
                     scratch.tiles + turn);
    add_pass<F, R>(scratch.tiles + (turn ^ kHalf), at - Pass<F>::steps, scratch, sums, acc);
  }
  add_pass<F, R>(scratch.tiles + turn, at - Pass<F>::steps, scratch, sums, acc);
  if (!slab.last()) {
#pragma GCC unroll 16
    for (int r = 0; r < R; ++r) _mm512_store_ps(memory + r * kBlock, acc[r]);
    return;
  }
#pragma GCC unroll 16
  for (int r = 0; r < R; ++r)
    if (r < count)
      finish_row(task, row + r, block,
                 {_mm512_mul_ps(acc[r], _mm512_set1_ps(task.quant.scales[row + r]))});
}

// Outputs are written rows apart: fetched for writing while the sums are made.
static inline void fetch_outputs(const LinearTask& task, int block, int row, int count) {
  for (int r = row; r < row + count; ++r) {
    __builtin_prefetch(task.out + r * task.out_stride + block * kBlock, 1);
    if (task.residual != nullptr)
      __builtin_prefetch(task.residual + r * task.residual_stride + block * kBlock, 0);
  }
}

template <class F>
static void linear_int_tiles(const LinearTask& task) {
  const LinearView& weight = *task.weight;
  const LinearScratch scratch(task.scratch);
  const int rows = task.row_end - task.row_begin, steps = weight.steps();
  load_tiles(LinearTiles(rows < kTile ? rows : kTile, Pass<F>::depth));
  for (int block = task.block_begin; block < task.block_end; ++block) {
    const std::uint8_t* data = weight.data + block * weight.block_bytes;
    for (int begin = 0; begin < steps; begin += kSlabSteps) {
      const int end = begin + kSlabSteps < steps ? begin + kSlabSteps : steps;
      const Slab slab{begin, end, steps};
      unpack_slab<F>(weight, data, slab, scratch);
      for (int first = 0; first < rows; first += kTile) {
        const int row = task.row_begin + first;
        const int count = rows - first < kTile ? rows - first : kTile;
        float* acc = scratch.acc + first * kBlock;
        if (slab.last()) fetch_outputs(task, block, row, count);
        if (count <= kTile / 2)
          slab_rows<F, kTile / 2>(task, block, row, count, slab, scratch, acc);
        else
          slab_rows<F, kTile>(task, block, row, count, slab, scratch, acc);
      }
    }
  }
}

static void linear_int_amx(const LinearTask& task) {
  if (task.row_end - task.row_begin <= kVectorRowsMax)
    linear_int(task);
  else
    with_format(*task.weight,
                [&](auto format) { linear_int_tiles<decltype(format)>(task); });
}

// M x N tiles of 16 rows and 16 outputs, over all inputs in order.
template <int M, int N>
static inline void bf16_tiles(const std::uint16_t* a, const std::uint16_t* b, int depth,
                              std::size_t block_elements, float* c) {
  const std::size_t a_stride = static_cast<std::size_t>(depth) * sizeof *a;
  const std::uint16_t* below = a + kTile * static_cast<std::size_t>(depth);
  constexpr int kC = kTile * kBlock;
  _tile_zero(0);
  if constexpr (N == 2) _tile_zero(1);
  if constexpr (M == 2) _tile_zero(2);
  if constexpr (M == 2 && N == 2) _tile_zero(3);
  for (int k = 0; k < depth; k += kStep) {
    _tile_loadd(4, a + k, a_stride);
    _tile_loadd(6, b + k * kBlock, 64);
    _tile_dpbf16ps(0, 4, 6);
    if constexpr (N == 2) {
      _tile_loadd(7, b + block_elements + k * kBlock, 64);
      _tile_dpbf16ps(1, 4, 7);
    }
    if constexpr (M == 2) {
      _tile_loadd(5, below + k, a_stride);
      _tile_dpbf16ps(2, 5, 6);
    }
    if constexpr (M == 2 && N == 2) _tile_dpbf16ps(3, 5, 7);
  }
  _tile_stored(0, c, 64);
  if constexpr (N == 2) _tile_stored(1, c + kC, 64);
  if constexpr (M == 2) _tile_stored(2, c + 2 * kC, 64);
  if constexpr (M == 2 && N == 2) _tile_stored(3, c + 3 * kC, 64);
}

template <int M, int N>
static void bf16_corner(const LinearTask& task, int block, int row, float* c) {
  const LinearView& weight = *task.weight;
  const int depth = weight.steps() * kStep;
  const std::size_t block_elements = weight.block_bytes / sizeof(std::uint16_t);
  bf16_tiles<M, N>(
      task.bf16 + static_cast<std::size_t>(row) * depth,
      reinterpret_cast<const std::uint16_t*>(weight.data + block * weight.block_bytes), depth,
      block_elements, c);
  const int left = task.row_end - row, rows = left < M * kTile ? left : M * kTile;
  for (int r = 0; r < rows; ++r)
    for (int n = 0; n < N; ++n)
      finish_row(task, row + r, block + n,
                 vload(c + ((r / kTile * 2 + n) * kTile + r % kTile) * kBlock));
}

static void linear_bf16_amx(const LinearTask& task) {
  float* c = reinterpret_cast<float*>(LinearScratch(task.scratch).tiles);
  const int rows = task.row_end - task.row_begin;
  load_tiles(LinearTiles(rows < kTile ? rows : kTile, kTile));
  for (int block = task.block_begin; block < task.block_end; block += 2) {
    const bool pair = block + 1 < task.block_end;
    for (int row = task.row_begin; row < task.row_end; row += 2 * kTile) {
      const bool tall = task.row_end - row > kTile;
      if (tall && pair)
        bf16_corner<2, 2>(task, block, row, c);
      else if (tall)
        bf16_corner<2, 1>(task, block, row, c);
      else if (pair)
        bf16_corner<1, 2>(task, block, row, c);
      else
        bf16_corner<1, 1>(task, block, row, c);
    }
  }
}

}  // namespace trimaran::TRIMARAN_TIER
