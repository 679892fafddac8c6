// Runs a program's steps: owns activations, KV cache and threads.
//
// Instructions are grouped into phases, between which the threads meet:
//
//   rows        instructions that work on single rows, one after another for a few rows at
//               a time while these are in the cache; rows are shared out evenly
//   linear      units of (rows, blocks of outputs), taken by whoever is free
//   attention   units of attention.h, then merges where there are any
#pragma once

#include <atomic>
#include <cstdint>
#include <exception>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "attention.h"
#include "memory.h"
#include "program.h"
#include "step.h"
#include "thread_pool.h"
#include "tier.h"

namespace trimaran {

class Executor {
 public:
  // A step may have `max_rows` rows. Throws std::bad_alloc or std::system_error.
  Executor(std::shared_ptr<const Program> program, Isa isa, int threads, int max_rows);

  // Replaces the KV cache. Throws std::invalid_argument for sizes that the kernels can't
  // work with, std::bad_alloc.
  void allocate_cache(int blocks, int block_size);

  // Runs a step; returns [logit_rows][vocabulary] in memory that the next call may overwrite
  // but doesn't free while somebody holds it. Throws std::invalid_argument for an unsound
  // plan, before anything is written.
  std::shared_ptr<const Memory> run(const Step& step);

  // Seconds that thread 0 spent in each phase since timing was switched on, with names.
  void time_phases(bool on);
  std::vector<std::pair<std::string, double>> phase_seconds() const;

  std::size_t activation_bytes() const;
  std::size_t cache_bytes() const { return cache_.size(); }
  int threads() const { return pool_.size(); }

 private:
  enum class Kind { kRows, kLinear, kAttention };
  struct Phase {
    Kind kind;
    Space space;
    int begin, end;  // instructions
  };

  void make_phases();
  void take_buffers();
  void prepare_step(const Step& step);
  void work(int thread);
  void run_phase(int index, int thread);
  void copy_blocks(int thread);
  void run_rows(const Phase& phase, int thread);
  void run_row(const Instruction& instruction, int row);
  void run_linear(const Phase& phase, std::atomic<int>& next, int thread);
  void run_part(const LinearPart& part, LinearTask task);
  void run_attention(const Phase& phase, int index, int thread);
  AttentionArgs attention_args(const Instruction& instruction) const;
  float* row_of(int buffer, int row) const {
    return buffers_[buffer] + static_cast<std::size_t>(row) * program_->buffers()[buffer].stride;
  }
  int rows_of(Space space) const {
    return space == Space::kTokens ? step_.rows : step_.logit_rows;
  }

  const std::shared_ptr<const Program> program_;
  const Tier& tier_;
  const int max_rows_;
  ThreadPool pool_;
  std::vector<Phase> phases_;

  Memory activations_;
  std::vector<float*> buffers_;
  std::shared_ptr<Memory> logits_;
  QuantRows quant_;
  std::uint16_t* bf16_ = nullptr;
  std::vector<Memory> scratch_;  // one a thread
  Memory workspace_;             // of attention

  Memory cache_;
  int blocks_ = 0, block_size_ = 0;
  std::size_t block_elements_ = 0;  // of one layer's K, or V

  Step step_;
  AttentionPlan attention_plan_;
  std::unique_ptr<std::atomic<int>[]> next_;  // unit of each phase, and then merge
  bool timing_ = false;
  std::vector<double> seconds_;
};

}  // namespace trimaran
