#include "isa.h"

#include <cstdint>
#include <stdexcept>

#if defined(__x86_64__)
#include <cpuid.h>
#if defined(__linux__)
#include <sys/syscall.h>
#include <unistd.h>
#endif
#endif

namespace trimaran {
namespace {

constexpr Isa kIsas[] = {Isa::kPortable, Isa::kAvx2, Isa::kAvx512, Isa::kAmx};

#if defined(__x86_64__)

struct Registers {
  unsigned eax = 0, ebx = 0, ecx = 0, edx = 0;
};

Registers cpuid(unsigned leaf, unsigned subleaf) {
  Registers r;
  __get_cpuid_count(leaf, subleaf, &r.eax, &r.ebx, &r.ecx, &r.edx);
  return r;
}

// Register states that the system saves: XCR0.
std::uint64_t saved_states() {
  const bool osxsave = cpuid(1, 0).ecx >> 27 & 1;
  if (!osxsave) return 0;
  unsigned low, high;
  asm volatile("xgetbv" : "=a"(low), "=d"(high) : "c"(0));
  return static_cast<std::uint64_t>(high) << 32 | low;
}

constexpr std::uint64_t kAvxState = 0x6, kAvx512State = 0xe6, kTileState = 0x60000;

// Linux hands out tile registers only to who asks (arch_prctl, since 5.16).
bool tiles_permitted() {
#if defined(__linux__)
  constexpr int kRequestPermission = 0x1023, kTileData = 18;
  static const bool permitted = syscall(SYS_arch_prctl, kRequestPermission, kTileData) == 0;
  return permitted;
#else
  return false;
#endif
}

void need(std::string& lacks, bool has, const char* name) {
  if (has) return;
  if (!lacks.empty()) lacks += ", ";
  lacks += name;
}

std::string x86_lacks(Isa isa) {
  const Registers basic = cpuid(1, 0), extended = cpuid(7, 0), more = cpuid(7, 1);
  const std::uint64_t states = saved_states();
  std::string lacks;
  if (isa == Isa::kPortable) return lacks;
  need(lacks, extended.ebx >> 5 & 1, "AVX2");
  need(lacks, basic.ecx >> 12 & 1, "FMA");
  need(lacks, basic.ecx >> 29 & 1, "F16C");
  need(lacks, (states & kAvxState) == kAvxState, "the system's support for AVX registers");
  if (isa == Isa::kAvx2) return lacks;
  need(lacks, extended.ebx >> 16 & 1, "AVX512F");
  need(lacks, extended.ebx >> 17 & 1, "AVX512DQ");
  need(lacks, extended.ebx >> 30 & 1, "AVX512BW");
  need(lacks, extended.ebx >> 31 & 1, "AVX512VL");
  need(lacks, extended.ecx >> 11 & 1, "AVX512_VNNI");
  need(lacks, (states & kAvx512State) == kAvx512State,
       "the system's support for AVX-512 registers");
  if (isa == Isa::kAvx512) return lacks;
  need(lacks, extended.ecx >> 6 & 1, "AVX512_VBMI2");
  need(lacks, extended.edx >> 23 & 1, "AVX512_FP16");
  need(lacks, more.eax >> 5 & 1, "AVX512_BF16");
  need(lacks, extended.edx >> 24 & 1, "AMX_TILE");
  need(lacks, extended.edx >> 25 & 1, "AMX_INT8");
  need(lacks, extended.edx >> 22 & 1, "AMX_BF16");
  need(lacks, (states & kTileState) == kTileState, "the system's support for tile registers");
  if (lacks.empty()) need(lacks, tiles_permitted(), "the system's permission to use tiles");
  return lacks;
}

#endif

}  // namespace

const char* isa_name(Isa isa) {
  switch (isa) {
    case Isa::kAvx2: return "avx2";
    case Isa::kAvx512: return "avx512";
    case Isa::kAmx: return "amx";
    default: return "portable";
  }
}

std::string isa_lacks(Isa isa) {
#if defined(__x86_64__)
  return x86_lacks(isa);
#else
  return isa == Isa::kPortable ? "" : "an x86-64 processor";
#endif
}

Isa isa_named(const std::string& name) {
  for (Isa isa : kIsas)
    if (name == isa_name(isa)) return isa;
  throw std::invalid_argument("isa is '" + name + "'; give amx, avx512, avx2 or portable");
}

Isa isa_from_name(const std::string& name) {
  const Isa isa = isa_named(name);
  const std::string lacks = isa_lacks(isa);
  if (!lacks.empty())
    throw std::invalid_argument("isa is '" + name + "', for which this machine lacks " + lacks);
  return isa;
}

bool has_avx512_bf16() {
#if defined(__x86_64__)
  return isa_lacks(Isa::kAvx512).empty() && (cpuid(7, 1).eax >> 5 & 1);
#else
  return false;
#endif
}

std::vector<Isa> available_isas() {
  std::vector<Isa> isas;
  for (Isa isa : kIsas)
    if (isa_lacks(isa).empty()) isas.push_back(isa);
  return isas;
}

}  // namespace trimaran
