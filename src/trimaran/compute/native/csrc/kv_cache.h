// The KV cache of one layer: bf16 pages, laid out so that both products of attention read
// them as they lie.
//
//   K page   [kv_head][head_dim / 2][block_size][2]   pairs of elements; columns are positions
//   V page   [kv_head][block_size / 2][head_dim][2]   pairs of positions; columns are elements
//
// Both are the operand order of bf16 dot-product instructions (AMX tiles, vdpbf16ps) and
// unpack to float32 with a shift and a mask. One (block, kv_head) is contiguous, and takes
// head_dim * block_size elements in either.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>

namespace trimaran {

constexpr int kMaxHeadDim = 256;

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

// Elements of one layer's K (or V) in one block.
inline std::size_t kv_block_elements(int kv_heads, int head_dim, int block_size) {
  return static_cast<std::size_t>(kv_heads) * head_dim * block_size;
}

// Copies one block of one layer's K (or V): copy-on-write.
inline void copy_kv_block(std::uint16_t* cache, std::size_t block_elements, int source,
                          int target) {
  std::memcpy(cache + target * block_elements, cache + source * block_elements,
              block_elements * sizeof(std::uint16_t));
}

}  // namespace trimaran
