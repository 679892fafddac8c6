// The KV cache: pages, laid out so that both products of attention read them as
// they lie.
//
//   [block][layer]{ K page [kv_head], V page [kv_head] }
//
// So what a sequence has written lies together, and memory is taken from the system only as
// blocks are first used.
//
// bf16
//   K page   [kv_head][head_dim / 2][block_size][2]   pairs of elements; columns are positions
//   V page   [kv_head][block_size / 2][head_dim][2]   pairs of positions; columns are elements
//
// Both are the operand order of bf16 dot-product instructions (AMX tiles, vdpbf16ps) and
// unpack to float32 with a shift and a mask.
//
// int8: x = scale * code, with a scale for each position and KV head
//   K page   [kv_head]{ [head_dim / 4][block_size][4] codes, [block_size] float32 scales }
//   V page   [kv_head]{ [block_size / 4][head_dim][4] codes, [block_size] float32 scales }
//
// Codes are -127..127, in the operand order of int8 dot-product instructions. A scale is NaN
// where an element wasn't finite.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <stdexcept>
#include <string>

namespace trimaran {

constexpr int kMaxHeadDim = 256;

enum class KvFormat { kBf16, kInt8 };

// Throws std::invalid_argument for another name than "bf16" and "int8".
inline KvFormat kv_from_name(const std::string& name) {
  if (name == "bf16") return KvFormat::kBf16;
  if (name == "int8") return KvFormat::kInt8;
  throw std::invalid_argument("kv is '" + name + "'; give bf16 or int8");
}

// Whether the kernels can work with these sizes; nullptr, or what is wrong.
inline const char* kv_shape_error(int heads, int kv_heads, int head_dim, int block_size) {
  if (block_size != 4 && block_size != 8 && block_size != 16 && block_size != 32)
    return "block_size must be 4, 8, 16 or 32";
  if (head_dim < 16 || head_dim > kMaxHeadDim || head_dim % 16 != 0)
    return "head_dim must be a multiple of 16, at most 256";
  if (kv_heads < 1 || heads < kv_heads || heads % kv_heads != 0)
    return "the number of query heads must be a multiple of the number of KV heads";
  return nullptr;
}

// Bytes of one page (static: the tiers have their own): one block's K (or V) of one KV head.
static inline std::size_t kv_page_bytes(KvFormat format, int head_dim, int block_size) {
  const std::size_t position = format == KvFormat::kInt8 ? head_dim + sizeof(float)
                                                         : head_dim * sizeof(std::uint16_t);
  return position * block_size;
}

// Copies `bytes` of one block, blocks being `stride` bytes apart: copy-on-write.
inline void copy_kv_block(std::uint8_t* cache, std::size_t stride, std::size_t bytes, int source,
                          int target) {
  std::memcpy(cache + target * stride, cache + source * stride, bytes);
}

}  // namespace trimaran
