// Weights of 4 and 8 bits that become bf16 on their way to the tiles.
//
// One step of a block, 32 inputs of 16 outputs, is codes and then a table a group:
//
//   S4   256 bytes   vector q = 0..3 has 32 words, (output, k % 2); field f = 0..3 of a word
//                    is the code of inputs 2 * (4 q + f) and + 1:
//                    bits 6-9 | 10-13 | 2-5 | 14, 15, 0, 1
//   S8   512 bytes   vector q = 0..7; the low byte of a word has the code of inputs 2 q,
//                    + 1, the high one that of 16 + 2 q, + 1
//   table 64 bytes   slopes of 16 outputs, then offsets, float16
//
// The weight of code c is, up to the block's multiplier of that output, a power of two,
//
//   half = fma(1 + c / n, slope, offset)    n = 16 or 256, rounded to float16
//   w    = half cut to the 8 bits of bf16
//
// which costs five vector instructions for 32 weights: 1 + c / n is made by placing c in the
// mantissa of 1, and float16 becomes bf16 by a shift, since all |half| < 2 (pack_stream.h
// chooses multipliers so). Cutting makes weights smaller by 2^-8 ln 2 of themselves on the
// average, and slopes and offsets are larger by as much; what is left is an error about that
// of rounding. Magnitudes below 2^-14 become something of that size at most: 2^-15 of the
// largest weight of their output.
#pragma once

#include <cstddef>
#include <cstdint>

namespace trimaran {

constexpr int kStreamTable = 64;  // bytes

// Bytes of one step.
constexpr std::size_t stream_step_bytes(bool four_bits, int group) {
  return (four_bits ? 256u : 512u) + static_cast<std::size_t>(32 / group) * kStreamTable;
}

// Where the field of S4 with the code of input k (0..31) is: the vector, and the bit of its
// lowest bit in a word, to be read cyclically.
constexpr int stream_vector(int k) { return k / 2 / 4; }
constexpr int stream_bit(int k) {
  return k / 2 % 4 == 0 ? 6 : k / 2 % 4 == 1 ? 10 : k / 2 % 4 == 2 ? 2 : 14;
}

}  // namespace trimaran
