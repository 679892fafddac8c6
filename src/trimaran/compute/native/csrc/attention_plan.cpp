#include "attention.h"

#include "kv_cache.h"

namespace trimaran {
namespace {

// Query rows of a unit (tokens x heads of a group), unless one token has more.
constexpr int kMaxUnitRows = 128;

int tokens_per_unit(int group) {
  // Fullest tiles of 16 rows; more tokens, where equal, read K and V less often.
  int best = 1, best_rows = group, best_tiles = (group + 15) / 16;
  for (int tokens = 2; tokens * group <= kMaxUnitRows; ++tokens) {
    const int rows = tokens * group, tiles = (rows + 15) / 16;
    if (rows * best_tiles >= best_rows * tiles) {
      best = tokens;
      best_rows = rows;
      best_tiles = tiles;
    }
  }
  return best;
}

// Time of one unit, up to a factor: K and V are read once, and used once a row.
std::int64_t cost(std::int64_t chunks, std::int64_t rows) { return chunks * (8 + rows); }

// Floats of one row's partials, see partial_stride in attention_kernels.h.
std::size_t attention_partial_floats(int head_dim) { return head_dim + std::size_t{16}; }

// Cuts a unit of one head into units of about `fit` chunks, to be merged.
void split_chunks(AttentionPlan& plan, AttentionUnit unit, std::int64_t fit, int rows,
                  int head_dim) {
  const int chunks = unit.chunk_end, stride = fit > 1 ? static_cast<int>(fit) : 1;
  unit.partial = static_cast<std::int64_t>(plan.workspace_floats);
  for (int chunk = 0; chunk < chunks; chunk += stride) {
    unit.chunk_begin = chunk;
    unit.chunk_end = chunk + stride < chunks ? chunk + stride : chunks;
    plan.units.push_back(unit);
  }
  plan.merges.push_back(
      {unit.sequence, unit.head_begin, unit.row_begin, unit.row_end, unit.partial});
  plan.workspace_floats += attention_partial_floats(head_dim) * chunks * rows;
}

}  // namespace

void plan_attention(const AttentionArgs& args, int threads, AttentionPlan& plan) {
  plan.units.clear();
  plan.merges.clear();
  plan.workspace_floats = 0;
  const int group = args.heads / args.kv_heads;
  const int step = tokens_per_unit(group);

  std::int64_t total = 0;
  for (int s = 0; s < args.sequences; ++s)
    for (int end = args.row_starts[s + 1]; end > args.row_starts[s]; end -= step) {
      const int begin = end - step > args.row_starts[s] ? end - step : args.row_starts[s];
      total += cost(args.positions[end - 1] / kChunk + 1, (end - begin) * group);
    }
  // Pieces of an eighth of a thread's share keep all threads busy to the end.
  const std::int64_t piece = threads > 1 ? total * args.kv_heads / (8 * threads) : total;

  for (int s = 0; s < args.sequences; ++s)
    for (int end = args.row_starts[s + 1]; end > args.row_starts[s]; end -= step) {
      const int begin = end - step > args.row_starts[s] ? end - step : args.row_starts[s];
      const int rows = (end - begin) * group;
      const int chunks = args.positions[end - 1] / kChunk + 1;
      // Heads of one row block together: their pages are neighbours in memory.
      const std::int64_t whole = cost(chunks, rows);
      const int heads = whole >= piece ? 1 : static_cast<int>(piece / whole);
      for (int head = 0; head < args.kv_heads; head += heads) {
        const int last = head + heads < args.kv_heads ? head + heads : args.kv_heads;
        if (threads == 1 || chunks == 1 || whole <= piece)
          plan.units.push_back({s, head, last, begin, end, 0, chunks, -1});
        else
          split_chunks(plan, {s, head, last, begin, end, 0, chunks, -1},
                       piece / cost(1, rows), rows, args.head_dim);
      }
    }
}

std::size_t attention_scratch_bytes(int heads, int kv_heads, int head_dim) {
  // The larger of what UnitScratch and AmxScratch lay out, part by part.
  const std::size_t group = heads / kv_heads;
  const std::size_t rows = group > kMaxUnitRows ? group : kMaxUnitRows;
  const std::size_t depth = (head_dim + 31) / 32 * 32;
  const std::size_t block = 32;  // rows in hand at a time
  const std::size_t state = (rows + block) * attention_partial_floats(head_dim) * sizeof(float);
  const std::size_t queries = rows * depth * sizeof(float);
  const std::size_t scores = block * (kChunk + 16) * sizeof(float);
  const std::size_t weights = 2 * block * (kChunk + 32) * sizeof(std::uint16_t);
  const std::size_t pages = 2 * kChunk * depth * sizeof(std::uint16_t);
  return state + queries + scores + weights + pages;
}

}  // namespace trimaran
