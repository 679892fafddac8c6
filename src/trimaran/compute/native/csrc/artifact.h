// Packed weights on their way to a file and back.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>

#include "memory.h"
#include "pack.h"

namespace trimaran {

// Grows with every change of a packed layout, of an instruction's meaning, or of this file's
// checksum. (Builds also carry a hash of all sources; this is what people can read.)
constexpr int kKernelVersion = 2;

// 64 bits over `bytes` bytes. A change within any aligned 8 of them always shows, any other
// one but for a chance of 2^-64. It finds accidents; who can write the file can also write
// the sum that fits.
std::uint64_t checksum(const void* data, std::size_t bytes);

// Weights whose data are bytes `at` and following of `memory`, which it keeps.
// std::invalid_argument, naming the field, unless the view describes a whole block of data
// for each 16 outputs, with everything that kernels read inside it, and all of it in memory.
PackedLinear packed_from(std::shared_ptr<Memory> memory, std::size_t at, const LinearView& view,
                         const std::string& format);

}  // namespace trimaran
