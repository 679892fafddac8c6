// Which instruction sets this processor and this system let us use.
#pragma once

#include <string>
#include <vector>

namespace trimaran {

enum class Isa { kPortable, kAvx2, kAvx512, kAmx };

const char* isa_name(Isa isa);

// What the machine lacks for a tier: names separated by commas, empty if it can run. Asking
// about AMX asks the system for permission to use its tiles, once.
std::string isa_lacks(Isa isa);

// By name, whether or not it can run here; throws std::invalid_argument for an unknown one.
Isa isa_named(const std::string& name);

// Throws std::invalid_argument for an unknown name, or one that can't run here, with what the
// machine lacks for it.
Isa isa_from_name(const std::string& name);

// Whether vectors of 512 bits have dot products in bf16, which the tier kAvx512 doesn't need.
bool has_avx512_bf16();

// Tiers that can run here, the slowest first.
std::vector<Isa> available_isas();

}  // namespace trimaran
