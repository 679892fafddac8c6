#include "artifact.h"

#include <cstring>
#include <stdexcept>
#include <utility>

#include "linear_stream.h"

namespace trimaran {
namespace {

constexpr std::uint64_t kOdd = 0x9e3779b97f4a7c15u;
constexpr int kLanes = 8;
constexpr int kMostElements = 1 << 28;  // of one side of a matrix

// One-to-one in `word` and in `lane`.
std::uint64_t mix(std::uint64_t lane, std::uint64_t word) {
  const std::uint64_t product = (lane ^ word) * kOdd;
  return product << 29 | product >> 35;
}

[[noreturn]] void refuse(const char* what) {
  throw std::invalid_argument(std::string("packed weights: ") + what);
}

void expect(bool holds, const char* what) {
  if (!holds) refuse(what);
}

// Bytes of a block's steps.
std::size_t step_bytes(const LinearView& view) {
  const auto steps = static_cast<std::size_t>(view.steps());
  switch (view.codes) {
    case Codes::kU4:
    case Codes::kU6:
    case Codes::kU8:
      return steps * code_step_bytes(view.codes);
    case Codes::kBf16:
      return steps * kStep * kBlock * 2;
    case Codes::kS4:
    case Codes::kS8:
      return steps * stream_step_bytes(view.codes == Codes::kS4, view.group);
  }
  refuse("codes of an unknown kind");
}

// What follows a block's steps lies in the block, and the rest is what kernels take it for.
void check_tables(const LinearView& view) {
  const auto fits = [&](std::size_t at, std::size_t bytes) {
    return at % 64 == 0 && at <= view.block_bytes && bytes <= view.block_bytes - at;
  };
  if (takes_integers(view.codes)) {
    expect(view.group == 32 || (view.codes == Codes::kU6 && !view.mins), "group isn't 32");
    expect(view.offset >= 0 && view.offset <= 255, "offset isn't a code");
    expect(view.scales >= Scales::kFloat16 && view.scales <= Scales::kParts,
           "scales of an unknown kind");
    const std::size_t table = scale_table_bytes(view.scales, view.steps(), view.groups());
    expect(view.scales_at >= step_bytes(view) && fits(view.scales_at, table),
           "scales outside the block");
    if (view.mins) expect(fits(view.mins_at, table), "minima outside the block");
  } else {
    expect(view.codes != Codes::kS4 || view.group == 32, "group isn't 32");
    expect(view.scales_at >= step_bytes(view) && fits(view.scales_at, kBlock * sizeof(float)),
           "multipliers outside the block");
  }
}

}  // namespace

std::uint64_t checksum(const void* data, std::size_t bytes) {
  std::uint64_t lanes[kLanes];
  for (int i = 0; i < kLanes; ++i) lanes[i] = kOdd * (i + 1);
  const auto* at = static_cast<const char*>(data);
  std::size_t left = bytes;
  for (; left >= sizeof lanes; left -= sizeof lanes, at += sizeof lanes) {
    std::uint64_t words[kLanes];
    std::memcpy(words, at, sizeof words);
    for (int i = 0; i < kLanes; ++i) lanes[i] = mix(lanes[i], words[i]);
  }
  std::uint64_t rest[kLanes] = {};
  std::memcpy(rest, at, left);
  std::uint64_t sum = bytes;
  for (int i = 0; i < kLanes; ++i) sum = mix(mix(lanes[i], rest[i]), sum);
  return sum ^ sum >> 32;
}

PackedLinear packed_from(std::shared_ptr<Memory> memory, std::size_t at, const LinearView& view,
                         const std::string& format) {
  expect(view.outputs > 0 && view.outputs <= kMostElements, "outputs out of range");
  expect(view.inputs > 0 && view.inputs <= kMostElements, "inputs out of range");
  expect(view.block_bytes > 0 && view.block_bytes % 64 == 0, "block_bytes is no multiple of 64");
  if (view.codes != Codes::kBf16)
    expect(view.group == 16 || view.group == 32, "group is neither 16 nor 32");
  expect(step_bytes(view) <= view.block_bytes, "codes outside the block");
  if (view.codes != Codes::kBf16) check_tables(view);
  const auto blocks = static_cast<std::size_t>(view.blocks());
  expect(at % 64 == 0 && at <= memory->size(), "data begin outside the memory");
  expect(view.block_bytes <= (memory->size() - at) / blocks, "data end outside the memory");
  return PackedLinear(view, format, SharedMemory(std::move(memory), at, blocks * view.block_bytes));
}

}  // namespace trimaran
