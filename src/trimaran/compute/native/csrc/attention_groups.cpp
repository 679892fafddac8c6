#include "attention_groups.h"

#include <algorithm>
#include <cstring>

#include "attention.h"

namespace trimaran {
namespace {

// Order of two sequences' blocks in one chunk.
int compare_chunk(const AttentionArgs& args, int a, int b, int chunk) {
  const int blocks = kChunk / args.block_size;
  const std::int32_t* table = args.block_tables + static_cast<std::int64_t>(chunk) * blocks;
  const auto of = [&](int s) { return table + static_cast<std::int64_t>(s) * args.table_width; };
  return std::memcmp(of(a), of(b), blocks * sizeof *table);
}

}  // namespace

void PrefixGroups::find(const AttentionArgs& args, int most_rows) {
  groups_.clear();
  members_.clear();
  open_.clear();
  shared_.assign(args.sequences, 0);
  sharable_.assign(args.sequences, 0);
  for (int s = 0; s < args.sequences; ++s) {
    const int begin = args.row_starts[s], rows = args.row_starts[s + 1] - begin;
    if (rows <= most_rows) sharable_[s] = args.positions[begin] / kChunk;
    if (sharable_[s] > 0) members_.push_back(s);
  }
  const int candidates = static_cast<int>(members_.size());
  if (candidates < 2) return;
  part(args, {0, candidates, 0, 0});
  while (!open_.empty()) {
    const Group group = open_.back();
    open_.pop_back();
    extend(args, group);
  }
}

// Opens a group for each set of at least two of the range's members that have the same
// blocks in the chunk; all of them can share it.
void PrefixGroups::part(const AttentionArgs& args, Group range) {
  const int chunk = range.chunk_begin;
  const auto begin = members_.begin() + range.member_begin;
  const auto end = members_.begin() + range.member_end;
  const auto differs = [&](int s) { return compare_chunk(args, *begin, s, chunk) != 0; };
  if (std::any_of(begin, end, differs))
    std::sort(begin, end, [&](int a, int b) {
      const int order = compare_chunk(args, a, b, chunk);
      return order != 0 ? order < 0 : a < b;
    });
  for (int first = range.member_begin, last; first < range.member_end; first = last) {
    const int leader = members_[first];
    for (last = first + 1; last < range.member_end; ++last)
      if (compare_chunk(args, leader, members_[last], chunk) != 0) break;
    if (last - first > 1) open_.push_back({first, last, chunk, chunk + 1});
  }
}

// Closes a group before the first chunk that not all of its members share, and opens those
// that some of them form there. Parts reorder the group's members, which stay the same.
void PrefixGroups::extend(const AttentionArgs& args, Group group) {
  const auto begin = members_.begin() + group.member_begin;
  const auto end = members_.begin() + group.member_end;
  const auto can_share = [&](int s) { return sharable_[s] > group.chunk_end; };
  const auto follows = [&](int s) {
    return can_share(s) && compare_chunk(args, *begin, s, group.chunk_end) == 0;
  };
  while (std::all_of(begin, end, follows)) ++group.chunk_end;
  groups_.push_back(group);
  std::for_each(begin, end, [&](int s) { shared_[s] = group.chunk_end; });
  const int left = static_cast<int>(std::partition(begin, end, can_share) - begin);
  if (left > 1)
    part(args, {group.member_begin, group.member_begin + left, group.chunk_end, 0});
}

}  // namespace trimaran
