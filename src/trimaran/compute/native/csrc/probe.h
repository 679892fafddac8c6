// Loops that find what the machine gives: how fast its memory is read, and how many
// operations a second its units do when nothing has to be loaded. They set the limits that
// the kernels' speeds are compared with.
//
// Each probe_*.cpp fills one table, compiled for its instruction set alone, as tier_*.cpp do.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "isa.h"

namespace trimaran {

// Does `rounds` rounds of independent multiplications and additions on registers, and
// returns how many operations that were (a multiplication and its addition are two).
using ProbeLoop = double (*)(long rounds);

struct ProbeTier {
  // Null where the instruction set has no such instruction; bf16 of kAvx512 needs
  // has_avx512_bf16().
  ProbeLoop int8, bf16, f32;
  // Loads every byte, 64-byte aligned, a multiple of 512 of them; returns something of all.
  std::uint64_t (*read)(const std::uint8_t* data, std::size_t bytes);
};

const ProbeTier& probe_tier(Isa isa);

// Names of the loops that a tier has: "int8", "bf16", "f32".
std::vector<std::string> probe_names(Isa isa);

// `samples` times operations a second on `threads` threads together, each sample at least
// `seconds` long. Throws std::invalid_argument for a loop that the tier doesn't have.
std::vector<double> probe_operations(Isa isa, const std::string& name, int threads, int samples,
                                     double seconds);

// `samples` times bytes a second at which `threads` threads read a buffer of `bytes` bytes
// together, each its own part, over and over for at least `seconds`. Throws std::bad_alloc.
std::vector<double> probe_reads(Isa isa, std::size_t bytes, int threads, int samples,
                                double seconds);

extern const ProbeTier kProbePortable;
#if defined(__x86_64__)
extern const ProbeTier kProbeAvx2, kProbeAvx512, kProbeAmx;
#endif

}  // namespace trimaran
