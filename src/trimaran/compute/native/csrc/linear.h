// Packed weights of a linear layer, rounded activations, and one task of their product.
//
// Weights are cut into blocks of 16 outputs; a block is contiguous and streamed in order.
// Inputs are padded to a multiple of 32, a step, and outputs to one of 16.
//
//   U4, U6, U8   codes for products in integers, on tiers without tiles
//            | codes | scales [group][16] | mins [group][16] |
//            U8: per step 512 bytes    [k / 4][16 outputs][4 k]
//            U4: per step 256 bytes    the same order; the low nibbles are k / 4 = 0..3 and
//                                      the high nibbles k / 4 = 4..7
//            U6: per step 384 bytes    the lower 4 bits as U4, and then the upper 2 of four
//                                      k / 4 in a byte: those of 0..3 in 64 bytes in that
//                                      order, of 4..7 in the other 64; see upper_shift
//            Scales and mins in two parts (ggml's K types), per 8 steps:
//                                      | float16 [16] | signed bytes [group][16] |
//   S4, S8   codes that become bf16 on their way to the tiles: see linear_stream.h
//            | steps: codes, tables | multipliers float32 [16] |
//   bf16     | [k / 2][16 outputs][2 k] |
//
// Weights of U4, U6 and U8: scale * (c - offset), or with mins, scale * c + min.
//
// Products in integers. Activations have 12 bits: q = round(x * 2032 / max|x|) by row, split
// into q = 16 * hi + lo with hi in [-127, 127] and lo in [-8, 7]. The arithmetic, the same
// for every number of rows, tier and thread count:
//
//   acc = 0
//   for each group in order:   isum = sum of (c - offset) * q, exact
//                              acc = fma(scale, float(isum), acc)
//                              with mins: acc = fma(min, float(sum of q), acc)
//   y = acc * (max|x| / 2032) [+ bias], and then [residual + y] or [silu or gelu(gate) * y]
//
// Where QuantRows::step_scales is set, activations have 8 bits and a scale for each step
// instead: q = round(x * 127 / max|x of the 32|), r = max|x of the 32| / 127, and
//
//   for each group in order:   acc = fma(scale * r, float(isum), acc)
//                              with mins: acc = fma(min, r * float(sum of q), acc)
//   y = acc [+ ...]
//
// |isum| < 2^24, so the conversion is exact too. Because sums are exact, a kernel may be
// chosen by the number of rows: linear_int.h for few, and for many rows of 4-bit weights on
// AVX-512 linear_pairs.h; 8 bits are linear_grouped.h's.
//
// Products in bf16. Activations, and weights held in bf16, are rounded to nearest, ties to
// even; S4 and S8 have a rounding of their own.
// Tiles sum even and odd inputs apart within a step and add both to what they have, step by
// step; vectors (linear_bf16.h) over all steps. Either order is that of the inputs alone.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>

namespace trimaran {

constexpr int kBlock = 16;  // outputs
constexpr int kStep = 32;   // inputs
constexpr int kStepBytes = 64;  // of a row's activations
constexpr float kActivationMax = 2032.0f, kGroupedMax = 127.0f;
// Rows of activations are padded to it, so that a tile may read whole.
constexpr int kRowPad = 16;
// Rows of one task at most; tasks start at multiples of it.
constexpr int kTaskRows = 256;
// Fewer rows than that don't go by pairs of outputs: unpacking those would take too long.
constexpr int kLeastPairedRows = 12;

enum class Codes : std::int32_t { kU4, kU8, kBf16, kS4, kS8, kU6 };

// Bytes of a step of integer codes.
constexpr int code_step_bytes(Codes codes) {
  return codes == Codes::kU4 ? 256 : codes == Codes::kU6 ? 384 : 512;
}
// Where the upper 2 bits of a code of U6 are in their byte, by k / 4 % 4; they belong 4 bits up.
constexpr int upper_shift(int line) { return (line + 2) % 4 * 2; }

// What scales and mins are: numbers, or products of a float16 of 256 inputs and a byte of the
// group. Such a product is exact in float32, whose 32 bits a group they would else take.
enum class Scales : std::int32_t { kFloat16, kFloat32, kParts };

constexpr int kPartSteps = 8;  // that share a float16 of kParts

// Bytes of a table of scales (or mins), `groups` to a step.
constexpr std::size_t scale_table_bytes(Scales scales, int steps, int groups) {
  const std::size_t count = static_cast<std::size_t>(steps) * groups;
  if (scales == Scales::kParts)
    return (steps + kPartSteps - 1) / kPartSteps * (2u + kPartSteps * groups) * kBlock;
  return count * kBlock * (scales == Scales::kFloat32 ? 4 : 2);
}
// Where the parts of a group's scales are in a table.
struct ScaleParts {
  std::size_t halves, bytes;
  constexpr ScaleParts(int index, int groups)
      : halves(index / (kPartSteps * groups) * (2u + kPartSteps * groups) * kBlock),
        bytes(halves + (2u + index % (kPartSteps * groups)) * kBlock) {}
};

// Whether products with such weights take activations in 12 bits; the others take bf16.
constexpr bool takes_integers(Codes codes) {
  return codes == Codes::kU4 || codes == Codes::kU6 || codes == Codes::kU8;
}

struct LinearView {
  const std::uint8_t* data = nullptr;
  std::size_t block_bytes = 0;
  std::size_t scales_at = 0;  // within a block; of S4 and S8, where the multipliers are
  std::size_t mins_at = 0;
  int outputs = 0;
  int inputs = 0;
  Codes codes = Codes::kU4;
  int group = 0;      // inputs that share a scale: 16 or 32
  int offset = 0;     // of the codes; 0 with mins
  bool mins = false;
  Scales scales = Scales::kFloat16;  // and mins

  int groups() const { return kStep / group; }  // of a step
  int steps() const { return (inputs + kStep - 1) / kStep; }
  int blocks() const { return (outputs + kBlock - 1) / kBlock; }
};

// Activations as linear layers read them: 64 bytes a step and row, by tiles of 16 rows, so
// that a tile of one step is contiguous. T rows, S = K / 32 steps:
//
//   [T / 16][S][16 rows][64 bytes]
//
// integer codes   hi of 32 inputs, then lo; in 8 bits q and nothing; or, on tiers that multiply
//                 in 16 bits only, q of 32 inputs by fours in the order 0 2 1 3
// bf16            32 inputs
inline std::size_t activation_bytes(int row, int step, int steps) {
  return ((static_cast<std::size_t>(row / kRowPad) * steps + step) * kRowPad + row % kRowPad) *
         kStepBytes;
}

// T rows of activations in 12 bits, or in 8.
struct QuantRows {
  std::int8_t* planes = nullptr;   // as above
  std::int32_t* sums16 = nullptr;  // [T][K / 16] sums of q
  std::int32_t* sums32 = nullptr;  // [T][S]
  float* sums32f = nullptr;        // the same as [T / 16][S][16]
  float* scales = nullptr;         // [T] max|x| / 2032; NaN if the row has a NaN or infinity
  // For linear_pairs.h, on the tiers that have it; null where there are too few rows:
  std::int8_t* words = nullptr;    // as above: q in 16 bits, by fours in the order 0 2 1 3
  std::int32_t* starts = nullptr;  // [T / 16][S][16] 8 * sums of lo - 1792
  std::int32_t* sums8 = nullptr;   // [T / 16][S][16] 8 * sums of q

  // Scales of 8 bits, [T / 16][S][16]; NaN where one of the 32 inputs is, or is infinite. Then
  // sums32f is multiplied with them. Null in 12 bits, which have `scales`.
  float* step_scales = nullptr;

  // Where a row's numbers in [T / 16][S][16] begin; from step to step they are kRowPad apart.
  std::size_t tile_offset(int row, int steps) const {
    return static_cast<std::size_t>(row / kRowPad) * steps * kRowPad + row % kRowPad;
  }
  float* float_sums(int row, int steps) const { return sums32f + tile_offset(row, steps); }
};

// Outputs block_begin..block_end of rows row_begin..row_end, at most kTaskRows.
struct LinearTask {
  const LinearView* weight = nullptr;
  QuantRows quant;                        // integer codes: rounded for this number of inputs
  const std::uint8_t* bf16 = nullptr;     // the others
  int row_begin = 0, row_end = 0;
  int block_begin = 0, block_end = 0;
  float* out = nullptr;
  std::size_t out_stride = 0;
  const float* bias = nullptr;      // [outputs] or null
  const float* residual = nullptr;  // added to; may be `out`
  std::size_t residual_stride = 0;
  // Of the same size; y becomes silu (or gelu) of its product, times y. Only without bias and residual.
  const LinearView* gate = nullptr;
  const float* gate_bias = nullptr;
  bool gated = false;  // `out` holds gates that become silu or gelu(gate) * y
  bool gelu = false;
  // Takes y rounded to bf16 in place of `out`, as the next layer reads it.
  std::uint8_t* out_bf16 = nullptr;
  void* scratch = nullptr;          // linear_scratch_bytes, 64-byte aligned
};

std::size_t linear_scratch_bytes();

// By name: "int8" has 8 bits, "auto" hasn't. Throws std::invalid_argument.
bool eight_bits(const std::string& activations);

// The values of one output's weights: [inputs]. Products and sums are rounded to float32
// one by one, as ggml's own dequantisation does it.
void dequantize_output(const LinearView& weight, int output, float* values);

float f16_to_f32(std::uint16_t half);
// Round to nearest, ties to even; a NaN stays one.
std::uint16_t f32_to_f16(float value);
std::uint16_t f32_to_bf16(float value);

}  // namespace trimaran
