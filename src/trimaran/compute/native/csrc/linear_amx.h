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
// Steps unpacked at once: with as many of the activations they fit the first-level cache;
// with few rows, so do the weights to come.
constexpr int kSlabSteps = 18, kShortSlabSteps = 6, kShortSlabRows = 64;
// Up to so many rows vectors are as fast.
constexpr int kVectorRows4 = 5, kVectorRows8 = 9;

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
  std::uint8_t* slab;   // [kSlabSteps][1 KB] B tiles
  std::int32_t* tiles;  // [4][16][16] C tiles on their way
  float* acc;           // [kTaskRows][16], between slabs
  float* scales;        // [2 * kSlabSteps][16] of the slab's groups
  float* mins;          // [kSlabSteps][16]

  explicit LinearScratch(void* memory) {
    slab = static_cast<std::uint8_t*>(memory);
    tiles = reinterpret_cast<std::int32_t*>(slab + kSlabSteps * kTileBytes);
    acc = reinterpret_cast<float*>(tiles + 4 * kTile * kBlock);
    scales = acc + kTaskRows * kBlock;
    mins = scales + 2 * kSlabSteps * kBlock;
  }
};

// Steps begin..end of one block, unpacked.
struct Slab {
  int begin, end;
  int steps;  // of the whole block
  bool first() const { return begin == 0; }
  bool last() const { return end == steps; }
};

// Products of a format, in order: one a step with U4; with U8 two a group, hi and then lo.
template <class F>
struct Products {
  static constexpr int of_step = F::four_bits ? 1 : 2 * F::groups;
  static constexpr int depth = F::four_bits ? 16 : F::lines;

  // Where the operands of a product lie in their tiles.
  static int a_at(int product) {
    if constexpr (F::four_bits) return product * kTileBytes;
    const int group = product / 2;
    return group / F::groups * kTileBytes + group % F::groups * (kStep / F::groups) +
           product % 2 * kStep;
  }
  static int b_at(int product) {
    if constexpr (F::four_bits) return product * kTileBytes;
    const int group = product / 2;
    return group / F::groups * kTileBytes + group % F::groups * F::lines * 64;
  }
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

// B tiles, scales and mins of a slab.
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
  // The compiler doesn't know that tile loads read memory: no store may move behind them.
  asm volatile("" : : : "memory");
}

// acc += scale * sum [+ min * (sum of q)], one group of R rows. With U8 `high` has the sums
// of hi and `low` those of lo; with U4 `low` has it all.
template <class F, int R>
__attribute__((always_inline)) static inline void add_group(const std::int32_t* high,
                                                            const std::int32_t* low,
                                                            const float* scales,
                                                            const float* mins, const float* sums,
                                                            __m512 (&acc)[R]) {
  const __m512 scale = _mm512_load_ps(scales);
#pragma GCC unroll 16
  for (int r = 0; r < R; ++r) {
    __m512i sum = _mm512_load_si512(low + r * kBlock);
    if constexpr (!F::four_bits)
      sum = _mm512_add_epi32(_mm512_slli_epi32(_mm512_load_si512(high + r * kBlock), 4), sum);
    acc[r] = _mm512_fmadd_ps(scale, _mm512_cvtepi32_ps(sum), acc[r]);
  }
  if constexpr (F::mins) {
    const __m512 min = _mm512_load_ps(mins);
#pragma GCC unroll 16
    for (int r = 0; r < R; ++r) acc[r] = _mm512_fmadd_ps(min, _mm512_set1_ps(sums[r]), acc[r]);
  }
}

// The tile unit names its registers in the instruction, so this is text and not a function:
// product `i` goes into tile C, product i - 2 from tile OLD to its place in memory, and
// product i - 4 from there into the vector registers. In this order the tile unit, the
// stores and the vector units have work at the same time.
#define TRIMARAN_STAGE(F, R, i, C, OLD, A, B)                                              \
  if ((i) < products) {                                                                    \
    _tile_zero(C);                                                                         \
    _tile_loadd(A, a + Products<F>::a_at(i), 64);                                          \
    _tile_loadd(B, b + Products<F>::b_at(i), 64);                                          \
    if constexpr (F::mins)                                                                 \
      _tile_dpbsud(C, A, B);                                                               \
    else                                                                                   \
      _tile_dpbssd(C, A, B);                                                               \
  }                                                                                        \
  if ((i) >= 2 && (i) - 2 < products) _tile_stored(OLD, tiles + ((i) - 2) % 4 * kC, 64);   \
  if ((F::four_bits || (C) % 2) && (i) >= 4 && (i) - 4 < products) {                       \
    const int group = F::four_bits ? (i) - 4 : ((i) - 4) / 2;                              \
    add_group<F, R>(tiles + ((i) - 5) % 4 * kC, tiles + ((i) - 4) % 4 * kC,                \
                    scratch.scales + group * kBlock, scratch.mins + group * kBlock,        \
                    sums + group * kRowPad, acc);                                          \
  }

// One slab for `count` <= R rows from `row`: their float sums go on from `memory`, and back,
// or with the last slab into the outputs.
template <class F, int R>
static void slab_rows(const LinearTask& task, int block, int row, int count, const Slab& slab,
                      const LinearScratch& scratch, float* memory) {
  const std::int8_t* a = task.quant.planes + activation_bytes(row, slab.begin, slab.steps);
  const float* sums = task.quant.float_sums(row, slab.steps) + slab.begin * kRowPad;
  const std::uint8_t* b = scratch.slab;
  std::int32_t* tiles = scratch.tiles;
  constexpr int kC = kTile * kBlock;
  const int products = (slab.end - slab.begin) * Products<F>::of_step;
  __m512 acc[R];
#pragma GCC unroll 16
  for (int r = 0; r < R; ++r) acc[r] = _mm512_setzero_ps();
  if (!slab.first()) {
#pragma GCC unroll 16
    for (int r = 0; r < R; ++r) acc[r] = _mm512_load_ps(memory + r * kBlock);
  }
  for (int i = 0; i < products + 4; i += 4) {
    TRIMARAN_STAGE(F, R, i, 0, 2, 4, 6)
    TRIMARAN_STAGE(F, R, i + 1, 1, 3, 5, 7)
    TRIMARAN_STAGE(F, R, i + 2, 2, 0, 4, 6)
    TRIMARAN_STAGE(F, R, i + 3, 3, 1, 5, 7)
  }
#pragma GCC unroll 16
  for (int r = 0; r < R; ++r) _mm512_store_ps(memory + r * kBlock, acc[r]);
  if (!slab.last()) return;
  finish_rows(task, row, block, count, [&](int r) {
    return vmul(vload(memory + r * kBlock), vset1(task.quant.scales[row + r]));
  });
}

#undef TRIMARAN_STAGE

template <class F>
static void linear_int_tiles(const LinearTask& task) {
  const LinearView& weight = *task.weight;
  const LinearScratch scratch(task.scratch);
  const int rows = task.row_end - task.row_begin, steps = weight.steps();
  const int size = rows <= kShortSlabRows ? kShortSlabSteps : kSlabSteps;
  load_tiles(LinearTiles(rows < kTile ? rows : kTile, Products<F>::depth));
  for (int block = task.block_begin; block < task.block_end; ++block) {
    const std::uint8_t* data = weight.data + block * weight.block_bytes;
    for (int begin = 0; begin < steps; begin += size) {
      const int end = begin + size < steps ? begin + size : steps;
      const Slab slab{begin, end, steps};
      unpack_slab<F>(weight, data, slab, scratch);
      for (int first = 0; first < rows; first += kTile) {
        const int row = task.row_begin + first;
        const int count = rows - first < kTile ? rows - first : kTile;
        float* acc = scratch.acc + first * kBlock;
        if (count <= kTile / 2)
          slab_rows<F, kTile / 2>(task, block, row, count, slab, scratch, acc);
        else
          slab_rows<F, kTile>(task, block, row, count, slab, scratch, acc);
      }
    }
  }
}

static void linear_int_amx(const LinearTask& task) {
  const int few = task.weight->codes == Codes::kU4 ? kVectorRows4 : kVectorRows8;
  if (task.row_end - task.row_begin <= few)
    linear_int(task);
  else
    with_format(*task.weight,
                [&](auto format) { linear_int_tiles<decltype(format)>(task); });
}

// M x N tiles of 16 rows and 16 outputs, over all inputs in order.
template <int M, int N>
static inline void bf16_tiles(const std::uint8_t* a, const std::uint8_t* b, int steps,
                              std::size_t block_bytes, float* c) {
  const std::uint8_t* below = a + static_cast<std::size_t>(steps) * kTileBytes;
  constexpr int kC = kTile * kBlock;
  _tile_zero(0);
  if constexpr (N == 2) _tile_zero(1);
  if constexpr (M == 2) _tile_zero(2);
  if constexpr (M == 2 && N == 2) _tile_zero(3);
  for (int step = 0; step < steps; ++step, a += kTileBytes, below += kTileBytes, b += kTileBytes) {
    _tile_loadd(4, a, 64);
    _tile_loadd(6, b, 64);
    _tile_dpbf16ps(0, 4, 6);
    if constexpr (N == 2) {
      _tile_loadd(7, b + block_bytes, 64);
      _tile_dpbf16ps(1, 4, 7);
    }
    if constexpr (M == 2) {
      _tile_loadd(5, below, 64);
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
  bf16_tiles<M, N>(task.bf16 + activation_bytes(row, 0, weight.steps()),
                   weight.data + block * weight.block_bytes, weight.steps(), weight.block_bytes,
                   c);
  const int left = task.row_end - row, rows = left < M * kTile ? left : M * kTile;
  for (int m = 0; m < M; ++m)
    for (int n = 0; n < N; ++n) {
      const float* sums = c + (2 * m + n) * kTile * kBlock;
      const int count = rows - m * kTile < kTile ? rows - m * kTile : kTile;
      finish_rows(task, row + m * kTile, block + n, count,
                  [&](int r) { return vload(sums + r * kBlock); });
    }
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
