// The block types of ggml, one step of 32 elements at a time, as codes with scales.
#pragma once

#include <cstdint>
#include <string>

#include "linear.h"

namespace trimaran {

// 32 elements of one row: scale[i / group] * (codes[i] - offset) [+ min].
struct StepCodes {
  std::uint8_t codes[kStep];
  float scales[2];
  float min;
};

// A block type, and the packed format that holds its values exactly.
struct BlockType {
  const char* name;
  int elements;  // of a block
  int bytes;
  Codes codes;
  int group;
  int offset;
  bool mins;
  bool wide;
  void (*decode)(const std::uint8_t* row, int step, StepCodes& out);
};

// nullptr for a type that isn't known.
const BlockType* block_type(const std::string& name);

}  // namespace trimaran
