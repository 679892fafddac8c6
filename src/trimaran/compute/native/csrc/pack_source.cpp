#include "pack_source.h"

#include <cstring>

namespace trimaran {
namespace {

float half_at(const std::uint8_t* p) {
  std::uint16_t half;
  std::memcpy(&half, p, sizeof half);
  return f16_to_f32(half);
}

std::uint32_t word_at(const std::uint8_t* p) {
  std::uint32_t word;
  std::memcpy(&word, p, sizeof word);
  return word;
}

// 16 bytes: elements 0-15 in the low nibbles, 16-31 in the high ones.
void split_nibbles(const std::uint8_t* bytes, std::uint8_t* codes) {
  for (int i = 0; i < 16; ++i) {
    codes[i] = bytes[i] & 15;
    codes[i + 16] = bytes[i] >> 4;
  }
}

// The fifth bits, one a bit of a word.
void add_fifth_bits(std::uint32_t bits, std::uint8_t* codes) {
  for (int i = 0; i < kStep; ++i) codes[i] |= static_cast<std::uint8_t>((bits >> i & 1) << 4);
}

// d f16 | 16 bytes
void decode_q4_0(const std::uint8_t* row, int step, StepCodes& out) {
  const std::uint8_t* block = row + step * 18;
  out.scales[0] = half_at(block);
  split_nibbles(block + 2, out.codes);
}

// d f16 | m f16 | 16 bytes
void decode_q4_1(const std::uint8_t* row, int step, StepCodes& out) {
  const std::uint8_t* block = row + step * 20;
  out.scales[0] = half_at(block);
  out.min = half_at(block + 2);
  split_nibbles(block + 4, out.codes);
}

// d f16 | fifth bits u32 | 16 bytes; value d * (q - 16)
void decode_q5_0(const std::uint8_t* row, int step, StepCodes& out) {
  const std::uint8_t* block = row + step * 22;
  out.scales[0] = half_at(block);
  split_nibbles(block + 6, out.codes);
  add_fifth_bits(word_at(block + 2), out.codes);
}

// d f16 | m f16 | fifth bits u32 | 16 bytes
void decode_q5_1(const std::uint8_t* row, int step, StepCodes& out) {
  const std::uint8_t* block = row + step * 24;
  out.scales[0] = half_at(block);
  out.min = half_at(block + 2);
  split_nibbles(block + 8, out.codes);
  add_fifth_bits(word_at(block + 4), out.codes);
}

// d f16 | 32 signed bytes
void decode_q8_0(const std::uint8_t* row, int step, StepCodes& out) {
  const std::uint8_t* block = row + step * 34;
  out.scales[0] = half_at(block);
  for (int i = 0; i < kStep; ++i) out.codes[i] = block[2 + i] ^ 0x80;
}

void multiply_parts(StepCodes& out) {
  for (int i = 0; i < 2; ++i)
    out.scales[i] = out.scale_half * static_cast<float>(out.scale_parts[i]);
  out.min = out.min_half * static_cast<float>(out.min_part);
}

// Scales and minima of Q4_K and Q5_K: 8 of 6 bits each in 12 bytes, the last four of each
// in the upper bits of the first eight bytes and the nibbles of the last four.
void scale_and_min(const std::uint8_t* block, int part, StepCodes& out) {
  const std::uint8_t* packed = block + 4;
  int scale, min;
  if (part < 4) {
    scale = packed[part] & 63;
    min = packed[part + 4] & 63;
  } else {
    scale = (packed[part + 4] & 15) | (packed[part - 4] >> 6) << 4;
    min = packed[part + 4] >> 4 | (packed[part] >> 6) << 4;
  }
  out.scale_half = half_at(block);
  out.min_half = -half_at(block + 2);
  out.scale_parts[0] = static_cast<std::int8_t>(scale);
  out.min_part = static_cast<std::int8_t>(min);
  multiply_parts(out);
}

// Four bits of parts 2 p (low nibbles) and 2 p + 1 (high nibbles) in 32 bytes.
void part_nibbles(const std::uint8_t* bytes, int part, std::uint8_t* codes) {
  const int shift = part % 2 * 4;
  for (int i = 0; i < kStep; ++i) codes[i] = bytes[part / 2 * kStep + i] >> shift & 15;
}

// d f16 | dmin f16 | 12 bytes of scales | 128 bytes; 8 parts of 32
void decode_q4_k(const std::uint8_t* row, int step, StepCodes& out) {
  const std::uint8_t* block = row + step / 8 * 144;
  scale_and_min(block, step % 8, out);
  part_nibbles(block + 16, step % 8, out.codes);
}

// d f16 | dmin f16 | 12 bytes of scales | 32 bytes of fifth bits | 128 bytes
void decode_q5_k(const std::uint8_t* row, int step, StepCodes& out) {
  const std::uint8_t* block = row + step / 8 * 176;
  const int part = step % 8;
  scale_and_min(block, part, out);
  part_nibbles(block + 48, part, out.codes);
  for (int i = 0; i < kStep; ++i)
    out.codes[i] |= static_cast<std::uint8_t>((block[16 + i] >> part & 1) << 4);
}

// 128 bytes of low nibbles | 64 bytes of upper bit pairs | 16 signed scales | d f16;
// value d * scale * (q - 32), 16 parts of 16
void decode_q6_k(const std::uint8_t* row, int step, StepCodes& out) {
  const std::uint8_t* block = row + step / 8 * 210;
  const int half = step % 8 / 4, quarter = step % 4;
  const std::uint8_t* low = block + half * 64 + quarter % 2 * 32;
  const std::uint8_t* high = block + 128 + half * 32;
  for (int i = 0; i < kStep; ++i) {
    const int q = (low[i] >> (quarter / 2 * 4) & 15) | (high[i] >> (2 * quarter) & 3) << 4;
    out.codes[i] = static_cast<std::uint8_t>(q);
  }
  out.scale_half = half_at(block + 208);
  std::memcpy(out.scale_parts, block + 192 + half * 8 + quarter * 2, 2);
  multiply_parts(out);
}

constexpr BlockType kBlockTypes[] = {
    // name, elements, bytes, {codes, group, offset, mins, scales}, decode
    {"Q4_0", 32, 18, {Codes::kU4, 32, 8, false, Scales::kFloat16}, decode_q4_0},
    {"Q4_1", 32, 20, {Codes::kU4, 32, 0, true, Scales::kFloat16}, decode_q4_1},
    {"Q5_0", 32, 22, {Codes::kU6, 32, 16, false, Scales::kFloat16}, decode_q5_0},
    {"Q5_1", 32, 24, {Codes::kU6, 32, 0, true, Scales::kFloat16}, decode_q5_1},
    {"Q8_0", 32, 34, {Codes::kU8, 32, 128, false, Scales::kFloat16}, decode_q8_0},
    {"Q4_K", 256, 144, {Codes::kU4, 32, 0, true, Scales::kParts}, decode_q4_k},
    {"Q5_K", 256, 176, {Codes::kU6, 32, 0, true, Scales::kParts}, decode_q5_k},
    {"Q6_K", 256, 210, {Codes::kU6, 16, 32, false, Scales::kParts}, decode_q6_k},
};

}  // namespace

const BlockType* block_type(const std::string& name) {
  for (const BlockType& type : kBlockTypes)
    if (name == type.name) return &type;
  return nullptr;
}

}  // namespace trimaran
