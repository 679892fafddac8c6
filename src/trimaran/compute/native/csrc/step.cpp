#include "step.h"

#include <stdexcept>
#include <string>

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

void check_sequence(const Step& step, const StepLimits& limits, int s) {
  const int begin = step.row_starts[s], end = step.row_starts[s + 1];
  if (begin >= end || end > step.rows)
    refuse("row_starts", s + 1, end, "rows of a sequence must be some of the step's");
  for (int row = begin; row < end; ++row)
    if (step.positions[row] < 0 || step.positions[row] - step.positions[begin] != row - begin)
      refuse("positions", row, step.positions[row], "positions of a sequence must be consecutive");
  const int context = step.contexts[s];
  if (context != step.positions[end - 1] + 1)
    refuse("contexts", s, context, "it must be the sequence's last position + 1");
  const int needed = (context + limits.block_size - 1) / limits.block_size;
  if (needed > step.table_width)
    refuse("contexts", s, context, "the block table is too short for it");
  expect_below("block_tables", step.block_tables + static_cast<std::int64_t>(s) * step.table_width,
               needed, limits.blocks, "it must be a block of the cache");
}

}  // namespace

void check_step(const Step& step, const StepLimits& limits) {
  if (step.rows > limits.rows)
    throw std::invalid_argument("step plan: " + std::to_string(step.rows) +
                                " rows; this executor was built for " +
                                std::to_string(limits.rows));
  expect_below("tokens", step.tokens, step.rows, limits.vocabulary,
               "it must be a token of the model");
  expect_below("slots", step.slots, step.rows, limits.blocks * limits.block_size,
               "it must be a slot of the cache");
  if (step.row_starts[0] != 0)
    refuse("row_starts", 0, step.row_starts[0], "the first sequence starts at row 0");
  for (int s = 0; s < step.sequences; ++s) check_sequence(step, limits, s);
  if (step.row_starts[step.sequences] != step.rows)
    refuse("row_starts", step.sequences, step.row_starts[step.sequences],
           "the last sequence ends with the last row");
  expect_below("logit_rows", step.logit_row, step.logit_rows, step.rows,
               "it must be a row of the step");
  if (step.logit_rows > step.rows)
    throw std::invalid_argument("step plan: more logit_rows than rows");
  expect_below("copies", step.copy_pairs, 2 * step.copies, limits.blocks,
               "it must be a block of the cache");
}

}  // namespace trimaran
