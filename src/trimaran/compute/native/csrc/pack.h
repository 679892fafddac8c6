// From the rows of a checkpoint to packed weights.
#pragma once

#include <cstdint>
#include <string>

#include "linear.h"
#include "memory.h"

namespace trimaran {

// A matrix as it lies in its file.
struct Source {
  std::string type;                   // ggml's name, e.g. "Q4_K"; F32, F16, BF16 as well
  const std::uint8_t* rows = nullptr;
  std::size_t row_bytes = 0;
  const std::int64_t* order = nullptr;  // row of the file for each output, or null
  int outputs = 0;
  int inputs = 0;
};

// Whether pack() reads a type; bytes of a row of `inputs` elements, 0 if it can't be.
bool readable(const std::string& type);
std::size_t source_row_bytes(const std::string& type, int inputs);

class PackedLinear {
 public:
  PackedLinear(LinearView view, const std::string& name);
  // What was packed before and lies in `memory`.
  PackedLinear(LinearView view, const std::string& name, SharedMemory memory);
  const LinearView& view() const { return view_; }
  std::uint8_t* data() const { return memory_.as<std::uint8_t>(); }
  std::size_t bytes() const { return memory_.size(); }
  // How the weights are held, for people: e.g. "u4 group 32".
  const std::string& format() const { return format_; }

 private:
  LinearView view_;
  SharedMemory memory_;
  std::string format_;
};

// How codes are laid out: for products in integers, or for tiles (see linear.h).
enum class Layout { kIntegers, kTiles };

// As they are: the very values of a block type (kTiles: rounded to bf16); floats in bf16.
PackedLinear pack_as_is(const Source& source, Layout layout);
// Values rounded to bf16.
PackedLinear pack_bf16(const Source& source);
// Values rounded to 2^bits levels between the least and the greatest of each 32 inputs; `bits`
// is 4 or 8.
PackedLinear pack_rounded(const Source& source, int bits, Layout layout);

}  // namespace trimaran
