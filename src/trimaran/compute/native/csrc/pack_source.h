// The block types of ggml, one step of 32 elements at a time, as codes with scales.
#pragma once

#include <cstdint>
#include <string>

#include "linear.h"

namespace trimaran {

// Values in codes: scale * (code - offset) [+ min].
struct CodeFormat {
  Codes codes;  // of those for integers
  int group;    // elements that share a scale: 16 or 32
  int offset;
  bool mins;    // one a step
  Scales scales;  // how they and minima are held
};

// 32 elements of one row: scales[i / group] * (codes[i] - offset) [+ min].
struct StepCodes {
  std::uint8_t codes[kStep];
  float scales[2];
  float min;
  // Scales::kParts: what scales and min are products of.
  float scale_half, min_half;
  std::int8_t scale_parts[2], min_part;
};

// A block type, and the packed format that holds its values exactly.
struct BlockType {
  const char* name;
  int elements;  // of a block
  int bytes;
  CodeFormat format;
  void (*decode)(const std::uint8_t* row, int step, StepCodes& out);
};

// nullptr for a type that isn't known.
const BlockType* block_type(const std::string& name);

}  // namespace trimaran
