#include <algorithm>

#include "attention.h"

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

// Query rows that one sequence may bring to a unit of several.
constexpr int kMaxSharingRows = kMaxUnitRows / 2;

// Time of one unit, up to a factor: K and V are read once, and used once a row.
std::int64_t cost(std::int64_t chunks, std::int64_t rows) { return chunks * (8 + rows); }

// Floats of one row's partials, see partial_stride in attention_kernels.h.
std::size_t attention_partial_floats(int head_dim) { return head_dim + std::size_t{16}; }

// Cuts a step. Rows are cut into slices first; what a slice's own units don't cover, the
// units of its groups do.
class Planner {
 public:
  Planner(const AttentionArgs& args, int threads, AttentionPlan& plan)
      : args_(args),
        plan_(plan),
        threads_(threads),
        group_(args.heads / args.kv_heads),
        step_(tokens_per_unit(group_)) {}

  void run(bool grouped) {
    plan_.slices.clear();
    plan_.units.clear();
    plan_.merges.clear();
    plan_.workspace_floats = 0;
    grouped = grouped && args_.window == 0;
    plan_.groups.find(args_, grouped ? std::min(step_, kMaxSharingRows / group_) : 0);
    cut_rows();
    const int own = static_cast<int>(plan_.slices.size());
    // Pieces of an eighth of a thread's share keep all threads busy to the end.
    const std::int64_t all = total();
    piece_ = threads_ > 1 ? all * args_.kv_heads / (8 * threads_) : all * args_.kv_heads;
    for (int i = 0; i < own; ++i)
      if (shared(i) > 0 || splits(end_chunk(i) - begin_chunk(i), rows(i))) take_partials(i);
    for (const PrefixGroups::Group& group : plan_.groups.groups()) add_group(group);
    for (int i = 0; i < own; ++i) add_units(i, i + 1, rows(i), begin_chunk(i), end_chunk(i));
  }

 private:
  int rows(int slice) const {
    return (plan_.slices[slice].row_end - plan_.slices[slice].row_begin) * group_;
  }
  int end_chunk(int slice) const {
    return args_.positions[plan_.slices[slice].row_end - 1] / kChunk + 1;
  }
  // The first that its rows see.
  int seen_chunk(int slice) const { return first_chunk(args_, plan_.slices[slice].row_begin); }
  // The first that groups don't attend to.
  int begin_chunk(int slice) const { return std::max(shared(slice), seen_chunk(slice)); }
  int shared(int slice) const {
    return plan_.groups.shared_chunks(plan_.slices[slice].sequence);
  }
  bool splits(int chunks, int rows) const {
    return threads_ > 1 && chunks > 1 && cost(chunks, rows) > piece_;
  }

  void cut_rows() {
    plan_.slice_of.assign(args_.sequences, 0);
    for (int s = 0; s < args_.sequences; ++s) {
      const int first = args_.row_starts[s];
      plan_.slice_of[s] = static_cast<int>(plan_.slices.size());
      for (int end = args_.row_starts[s + 1]; end > first; end -= step_)
        plan_.slices.push_back({s, std::max(first, end - step_), end, -1});
    }
  }

  std::int64_t total() const {
    std::int64_t sum = 0;
    for (int i = 0; i < static_cast<int>(plan_.slices.size()); ++i)
      sum += cost(end_chunk(i) - begin_chunk(i), rows(i));
    for (const PrefixGroups::Group& group : plan_.groups.groups()) {
      int all = 0;
      for (int i = group.member_begin; i < group.member_end; ++i)
        all += rows(plan_.slice_of[plan_.groups.members()[i]]);
      sum += cost(group.chunk_end - group.chunk_begin, all);
    }
    return sum;
  }

  void take_partials(int slice) {
    plan_.slices[slice].partial = static_cast<std::int64_t>(plan_.workspace_floats);
    plan_.workspace_floats += attention_partial_floats(args_.head_dim) * args_.kv_heads *
                              (end_chunk(slice) - seen_chunk(slice)) * rows(slice);
    for (int head = 0; head < args_.kv_heads; ++head)
      plan_.merges.push_back({plan_.slices[slice], head});
  }

  // A member has one slice, for its rows are few. Units take as many members as fit.
  void add_group(const PrefixGroups::Group& group) {
    int begin = static_cast<int>(plan_.slices.size()), taken = 0;
    const auto flush = [&] {
      const int end = static_cast<int>(plan_.slices.size());
      add_units(begin, end, taken, group.chunk_begin, group.chunk_end);
      begin = end;
      taken = 0;
    };
    for (int i = group.member_begin; i < group.member_end; ++i) {
      const int slice = plan_.slice_of[plan_.groups.members()[i]];
      if (taken + rows(slice) > kMaxUnitRows) flush();
      plan_.slices.push_back(AttentionSlice(plan_.slices[slice]));
      taken += rows(slice);
    }
    flush();
  }

  void add_units(int slice_begin, int slice_end, int rows, int chunk_begin, int chunk_end) {
    const std::int64_t whole = cost(chunk_end - chunk_begin, rows);
    // Heads of one row block together: their pages are neighbours in memory.
    const int heads = whole >= piece_ ? 1 : static_cast<int>(piece_ / whole);
    const bool split = splits(chunk_end - chunk_begin, rows);
    const std::int64_t fit = split ? piece_ / cost(1, rows) : chunk_end - chunk_begin;
    const int stride = fit > 1 ? static_cast<int>(fit) : 1;
    for (int head = 0; head < args_.kv_heads; head += heads)
      for (int chunk = chunk_begin; chunk < chunk_end; chunk += stride)
        plan_.units.push_back({slice_begin, slice_end, head,
                               std::min(head + heads, args_.kv_heads), chunk,
                               std::min(chunk + stride, chunk_end)});
  }

  const AttentionArgs& args_;
  AttentionPlan& plan_;
  const int threads_, group_, step_;
  std::int64_t piece_ = 0;  // cost of a unit
};

}  // namespace

void plan_attention(const AttentionArgs& args, int threads, bool grouped, AttentionPlan& plan) {
  Planner(args, threads, plan).run(grouped);
}

std::size_t attention_scratch_bytes(int heads, int kv_heads, int head_dim) {
  // Of bf16, the larger of what UnitScratch and AmxScratch lay out, part by part.
  const std::size_t group = heads / kv_heads;
  const std::size_t rows = group > kMaxUnitRows ? group : kMaxUnitRows;
  const std::size_t depth = (head_dim + 31) / 32 * 32;
  const std::size_t block = 32;  // rows in hand at a time
  const std::size_t state = (rows + block) * attention_partial_floats(head_dim) * sizeof(float);
  const std::size_t queries = rows * depth * sizeof(float);
  const std::size_t scores = block * (kChunk + 16) * sizeof(float);
  const std::size_t weights = 2 * block * (kChunk + 32) * sizeof(std::uint16_t);
  const std::size_t pages = 2 * kChunk * depth * sizeof(std::uint16_t);
  const std::size_t bf16 = state + queries + scores + weights + pages;
  // And what IntScratch does.
  const std::size_t deep = (head_dim + 63) / 64 * 64, in_hand = 16;
  const std::size_t floats = in_hand * 3 * (kChunk + 16) + 2 * kChunk + 3 * (rows + 16);
  const std::size_t bytes = rows * 2 * deep + in_hand * 2 * kChunk + kChunk * (deep + head_dim);
  return std::max(bf16, state + floats * sizeof(float) + bytes);
}

}  // namespace trimaran
