// One step's work (core/step_plan.py) as the executor gets it, and its check.
#pragma once

#include <cstdint>
#include <vector>

namespace trimaran {

// Where keys and values of a group of layers lie.
struct StepTables {
  int table_width = 0, copies = 0;
  const std::int32_t* slots = nullptr;         // [rows]
  const std::int32_t* block_tables = nullptr;  // [sequences][table_width]
  const std::int32_t* copy_pairs = nullptr;    // [copies][2]
};

// Rows whose hidden values (Program::hidden) are added up, row after row.
struct PooledRows {
  int count = 0;
  const std::int32_t* rows = nullptr;  // [count][2]: the first, and the one after the last
  double* sums = nullptr;              // [count][width]: to which they are added
};

struct Step {
  int rows = 0, sequences = 0, logit_rows = 0;
  const std::int32_t* tokens = nullptr;      // [rows]
  const std::int32_t* positions = nullptr;   // [rows]
  const std::int32_t* row_starts = nullptr;  // [sequences + 1]
  const std::int32_t* contexts = nullptr;    // [sequences]
  const std::int32_t* logit_row = nullptr;   // [logit_rows]
  // One for each group of layers, or one for all of them.
  std::vector<StepTables> tables;
  PooledRows pooled;

  const StepTables& of_group(int group) const { return tables[tables.size() > 1 ? group : 0]; }
};

struct StepLimits {
  int rows, vocabulary, block_size;
};

// Of a group of layers.
struct GroupLimits {
  int window, blocks;
};

// Throws std::invalid_argument, naming what is wrong, unless every index of the step lies
// within the buffers, the vocabulary and the caches.
void check_step(const Step& step, const StepLimits& limits,
                const std::vector<GroupLimits>& groups);

}  // namespace trimaran
