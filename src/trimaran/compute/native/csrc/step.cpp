#include "step.h"

#include <stdexcept>
#include <string>

#include "attention.h"

namespace trimaran {
namespace {

[[noreturn]] void refuse(const char* what, int index, int value, const char* rule) {
  throw std::invalid_argument(std::string("step plan: ") + what + "[" + std::to_string(index) +
                              "] is " + std::to_string(value) + "; " + rule);
}

void expect_below(const char* what, const std::int32_t* values, int count, int limit,
                  const char* rule) {
  for (int i = 0; i < count; ++i)
    if (values[i] < 0 || values[i] >= limit) refuse(what, i, values[i], rule);
}

void check_sequence(const Step& step, int s) {
  const int begin = step.row_starts[s], end = step.row_starts[s + 1];
  if (begin >= end || end > step.rows)
    refuse("row_starts", s + 1, end, "rows of a sequence must be some of the step's");
  for (int row = begin; row < end; ++row)
    if (step.positions[row] < 0 || step.positions[row] - step.positions[begin] != row - begin)
      refuse("positions", row, step.positions[row], "positions of a sequence must be consecutive");
  if (step.contexts[s] != step.positions[end - 1] + 1)
    refuse("contexts", s, step.contexts[s], "it must be the sequence's last position + 1");
}

// The blocks of what the sequence's rows see.
void check_table(const Step& step, const StepTables& tables, int block_size,
                 const GroupLimits& group, int s) {
  const int needed = (step.contexts[s] + block_size - 1) / block_size;
  if (needed > tables.table_width)
    refuse("contexts", s, step.contexts[s], "the block table is too short for it");
  const int begin = first_seen(group.window, step.positions[step.row_starts[s]]) / block_size;
  expect_below("block_tables",
               tables.block_tables + static_cast<std::int64_t>(s) * tables.table_width + begin,
               needed - begin, group.blocks, "it must be a block of the cache");
}

void check_tables(const Step& step, const StepTables& tables, int block_size,
                  const GroupLimits& group) {
  expect_below("slots", tables.slots, step.rows, group.blocks * block_size,
               "it must be a slot of the cache");
  for (int s = 0; s < step.sequences; ++s) check_table(step, tables, block_size, group, s);
  expect_below("copies", tables.copy_pairs, 2 * tables.copies, group.blocks,
               "it must be a block of the cache");
}

void check_pooled(const Step& step) {
  const PooledRows& pooled = step.pooled;
  expect_below("pooled", pooled.rows, 2 * pooled.count, step.rows + 1,
               "it must be a row of the step");
  for (int i = 0; i < pooled.count; ++i)
    if (pooled.rows[2 * i] > pooled.rows[2 * i + 1])
      refuse("pooled", 2 * i + 1, pooled.rows[2 * i + 1], "it must not be before the first row");
}

}  // namespace

void check_step(const Step& step, const StepLimits& limits,
                const std::vector<GroupLimits>& groups) {
  if (step.rows > limits.rows)
    throw std::invalid_argument("step plan: " + std::to_string(step.rows) +
                                " rows; this executor was built for " +
                                std::to_string(limits.rows));
  expect_below("tokens", step.tokens, step.rows, limits.vocabulary,
               "it must be a token of the model");
  if (step.row_starts[0] != 0)
    refuse("row_starts", 0, step.row_starts[0], "the first sequence starts at row 0");
  for (int s = 0; s < step.sequences; ++s) check_sequence(step, s);
  if (step.row_starts[step.sequences] != step.rows)
    refuse("row_starts", step.sequences, step.row_starts[step.sequences],
           "the last sequence ends with the last row");
  expect_below("logit_rows", step.logit_row, step.logit_rows, step.rows,
               "it must be a row of the step");
  if (step.logit_rows > step.rows)
    throw std::invalid_argument("step plan: more logit_rows than rows");
  check_pooled(step);
  if (step.tables.size() != 1 && step.tables.size() != groups.size())
    throw std::invalid_argument("step plan: block tables for " +
                                std::to_string(step.tables.size()) + " groups of layers, not " +
                                std::to_string(groups.size()));
  for (std::size_t group = 0; group < groups.size(); ++group)
    check_tables(step, step.of_group(static_cast<int>(group)), limits.block_size, groups[group]);
}

}  // namespace trimaran
