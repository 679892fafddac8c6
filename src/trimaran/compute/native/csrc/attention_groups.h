// Sequences of a step whose first chunks are the same pages: a prompt's prefix that the
// cache holds once. A unit of attention then reads such a chunk for all of them.
#pragma once

#include <cstdint>
#include <vector>

namespace trimaran {

struct AttentionArgs;

// Found by comparing block tables, chunk by chunk, so a group at one chunk may part into
// smaller ones at the next. A chunk is shared only if every row of the sequence lies behind
// it: all of them see all of it.
class PrefixGroups {
 public:
  // Sequences that have the same blocks in chunks chunk_begin .. chunk_end.
  struct Group {
    int member_begin, member_end;  // of members()
    int chunk_begin, chunk_end;
  };

  // Of the sequences with at most `most_rows` rows: others use a chunk so often that who
  // else reads it makes no difference. Reuses its memory. O(S log S), and O(1) for each
  // further chunk that a sequence shares.
  void find(const AttentionArgs& args, int most_rows);

  const std::vector<Group>& groups() const { return groups_; }
  const std::vector<std::int32_t>& members() const { return members_; }
  // Leading chunks of a sequence that groups attend to.
  int shared_chunks(int sequence) const { return shared_[sequence]; }

 private:
  void part(const AttentionArgs& args, Group range);
  void extend(const AttentionArgs& args, Group group);

  std::vector<Group> groups_, open_;
  std::vector<std::int32_t> members_, shared_, sharable_;
};

}  // namespace trimaran
