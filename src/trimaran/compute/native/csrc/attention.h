// Paged causal attention, over all positions or a window of them: its inputs, how its work is cut into units, and who merges.
//
// Arithmetic, one for every way of cutting the work. Positions are cut at absolute
// multiples of kChunk. For each row (one query head of one token) and chunk:
//
//   s_j = q . k_j over d in a fixed order        (q is scaled first)
//   m   = max s_j,  p_j = exp(s_j - m),  l = sum p_j in a fixed order
//   acc = sum p_j v_j in order of j
//
// and (m, l, acc) of the chunks that the row sees are merged in order of chunk. Masked
// positions, behind the row or before its window, contribute exactly 0. So a row's bits depend on its own q and on the K and V of its own positions
// only: not on the rows that share its unit, the block size, or who runs which chunk.
//
// Over an int8 cache the products are exact, in integers:
//
//   s_j = (sum of n * k codes) * scales         n: q in 15 bits of its largest magnitude
//   w_j = p_j * scale of v_j                    in 15 bits of the chunk's largest w
//   acc = (sum of w_j * v codes) * the largest w
//
// Unused slots of the cache (positions >= context) may hold anything, NaN included. With a
// window, blocks that lie before those of all rows of a step are not read: their places in the
// block table may hold anything too.
//
// A step: plan_attention once; then for each layer write_kv of all rows (barrier),
// attention_unit of all units (barrier), and if there are merges, merge_unit of all merges.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "attention_groups.h"
#include "kv_cache.h"

namespace trimaran {

constexpr int kChunk = 256;

// Inputs of one layer's attention. Arrays are C-contiguous; T rows, S sequences, as in
// core/step_plan.py.
struct AttentionArgs {
  const float* q = nullptr;  // [T][heads * head_dim], rotated
  const float* k = nullptr;  // [T][kv_heads * head_dim], rotated
  const float* v = nullptr;  // [T][kv_heads * head_dim]
  float* out = nullptr;      // [T][heads * head_dim], unless out_bf16 is given:
  // the same rounded to bf16 (to nearest even) as a linear layer reads it, by
  // activation_bytes of linear.h, the last step of a row padded with zeros.
  std::uint8_t* out_bf16 = nullptr;
  std::uint8_t* k_cache = nullptr;  // this layer's pages, see kv_cache.h
  std::uint8_t* v_cache = nullptr;
  KvFormat kv = KvFormat::kBf16;
  std::size_t block_stride = 0;  // bytes from one block of k_cache, or v_cache, to the next
  int rows = 0;
  int sequences = 0;
  int heads = 0;
  int kv_heads = 0;
  int head_dim = 0;
  int block_size = 0;
  int table_width = 0;
  float scale = 1.0f;
  int window = 0;  // positions that a row sees, its own included; 0: all
  const std::int32_t* positions = nullptr;     // [T]
  const std::int32_t* slots = nullptr;         // [T]
  const std::int32_t* row_starts = nullptr;    // [S + 1]
  const std::int32_t* contexts = nullptr;      // [S]
  const std::int32_t* block_tables = nullptr;  // [S][table_width]
  float* workspace = nullptr;  // AttentionPlan::workspace_floats, 64-byte aligned
};

// The first position that a row at `position` sees (static: the tiers have their own).
static inline int first_seen(int window, int position) {
  return window > 0 && position >= window ? position - window + 1 : 0;
}

// The first chunk that a row of the step sees; later rows of its sequence see none before it.
static inline int first_chunk(const AttentionArgs& args, int row) {
  return first_seen(args.window, args.positions[row]) / kChunk;
}

// Rows row_begin..row_end of one sequence.
struct AttentionSlice {
  std::int32_t sequence;
  std::int32_t row_begin;
  std::int32_t row_end;
  // Offset in the workspace of the rows' partials, or -1: the unit has every chunk and
  // writes `out` itself.
  std::int64_t partial;
};

// The rows of some slices, KV heads head_begin..head_end, chunks chunk_begin..chunk_end. If
// there are several slices, their sequences hold the same blocks there, and all rows see all
// of the chunks: the first sequence's pages are read for all of them.
struct AttentionUnit {
  std::int32_t slice_begin;  // of AttentionPlan::slices
  std::int32_t slice_end;
  std::int32_t head_begin;
  std::int32_t head_end;
  std::int32_t chunk_begin;
  std::int32_t chunk_end;
};

// Partials of a slice's rows for one KV head, of all their chunks, to be merged into `out`.
struct AttentionMerge {
  AttentionSlice slice;
  std::int32_t kv_head;
};

// How a step's attention is cut; the same for all layers with the same window.
struct AttentionPlan {
  std::vector<AttentionSlice> slices;
  std::vector<AttentionUnit> units;    // in any order, on any thread
  std::vector<AttentionMerge> merges;  // after all units; often empty
  std::size_t workspace_floats = 0;
  // What planning works with.
  PrefixGroups groups;
  std::vector<std::int32_t> slice_of;  // first slice of each sequence
};

// Partials in the workspace, from a slice's own offset:
//   [kv_head][chunk from the first row's first on][token][head of the group][partial_stride of attention_kernels.h]

// Reads only the dimensions and the step's index arrays of `args`. Reuses the plan's memory.
// `grouped`: units read pages that several sequences hold once for all of them, unless there
// is a window: then most of what sequences share lies before it.
void plan_attention(const AttentionArgs& args, int threads, bool grouped, AttentionPlan& plan);

// Bytes of a thread's scratch memory (64-byte aligned) for attention_unit and merge_unit;
// of any tier.
std::size_t attention_scratch_bytes(int heads, int kv_heads, int head_dim);

// Per tier (see tier.h):
//   void write_kv(const AttentionArgs&, int row_begin, int row_end);
//   void attention_unit(const AttentionArgs&, const AttentionUnit&,
//                       const AttentionSlice* slices /* of the plan */, void* scratch);
//   void merge_unit(const AttentionArgs&, const AttentionMerge&, void* scratch);
// attention_unit of the amx tier loads its own tile configuration and leaves it loaded:
// whoever uses tiles next must load theirs.

}  // namespace trimaran
