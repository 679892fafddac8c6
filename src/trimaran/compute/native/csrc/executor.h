// Runs a program's steps: owns activations, KV cache and threads.
//
// Instructions are grouped into phases, and a phase is cut into units:
//
//   copies      a layer's K or V of all blocks of its group that are copied
//   rows        a few rows, through all of the phase's instructions
//   linear      rows x blocks of outputs
//   attention   as attention.h cuts it, then its merges
//
// Threads take the next unit that nobody has, and go on to the next phase when all units are
// done. So a thread that comes late, or gives way to other programs, holds nobody up; and who
// computes what changes no result.
#pragma once

#include <atomic>
#include <cstdint>
#include <exception>
#include <memory>
#include <mutex>
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
  // With `eight_bits` activations of integer products have 8 bits and a scale every 32.
  Executor(std::shared_ptr<const Program> program, Isa isa, int threads, int max_rows,
           KvFormat kv, bool eight_bits);

  // Replaces the KV cache; `blocks` for each of the program's groups of layers. Throws
  // std::invalid_argument for sizes that the kernels can't work with, std::bad_alloc.
  void allocate_cache(const std::vector<int>& blocks, int block_size);

  // Bytes of a block: K and V of all layers, which lie together; 0 where there are several
  // groups of layers, whose blocks are not copied out.
  std::size_t block_bytes() const { return groups_.size() == 1 ? groups_[0].block_stride : 0; }
  // Copies whole blocks out of the cache, or into it, one after the other. May run while a step
  // does, on another thread: what is read of a block that the step writes is undefined, and a
  // block that the step reads or writes must not be written. Throws std::invalid_argument where
  // a block doesn't exist.
  void read_blocks(const std::int32_t* blocks, int count, std::uint8_t* out) const;
  void write_blocks(const std::int32_t* blocks, int count, const std::uint8_t* data);

  // Runs a step; returns [logit_rows][vocabulary] in memory that the next call may overwrite
  // but doesn't free while somebody holds it. Rows to be pooled are added to their sums at the
  // end. Throws std::invalid_argument for an unsound plan, before anything is written.
  std::shared_ptr<const Memory> run(const Step& step);

  // Seconds that thread 0 spent in each phase since timing was switched on, with names.
  void time_phases(bool on);
  // Whether attention reads pages that several sequences of a step hold once for all of
  // them; it does from the start. Changes no result.
  void group_prefixes(bool on) { group_prefixes_ = on; }
  std::vector<std::pair<std::string, double>> phase_seconds() const;

  // For others' work between steps, by the thread that runs them.
  const std::shared_ptr<ThreadPool>& pool() const { return pool_; }

  std::size_t activation_bytes() const;
  std::size_t cache_bytes() const;

 private:
  enum class Kind { kCopies, kRows, kLinear, kAttention, kMerges };
  struct Phase {
    Kind kind;
    Space space;
    int begin, end;  // instructions
  };
  // How far a phase is in this step.
  struct alignas(64) Progress {
    std::atomic<std::uint64_t> left{0};  // units that nobody has: end << 32 | begin
    std::atomic<int> done{0};

    void reset(int units) {
      left = static_cast<std::uint64_t>(units) << 32;
      done = 0;
    }
    // The next unit for a thread, or -1. Threads of even number take the first and the others
    // the last, so that two stream through the weights apart, and know where they will begin.
    int take(int thread);
  };
  // How a linear phase is cut.
  struct LinearGrid {
    int row_chunks, block_chunks, blocks;  // `blocks` of a chunk
  };

  void check_blocks(const std::int32_t* blocks, int count) const;
  void make_phases();
  void take_buffers(bool eight_bits);
  void prepare_step(const Step& step);
  void add_pooled(const PooledRows& pooled) const;
  void work(int thread);
  void fail();
  int units(const Phase& phase) const;
  void run_unit(const Phase& phase, int unit, int thread);
  void copy_blocks(int unit);
  const AttentionPlan& attention_plan(const Phase& phase) const;
  int rows_of_unit(const Phase& phase) const;
  void run_rows(const Phase& phase, int unit);
  void run_row(const Instruction& instruction, int row);
  LinearGrid linear_grid(const Phase& phase) const;
  void run_linear(const Phase& phase, int unit, int thread);
  QuantRows quant_of(Space space) const;
  LinearTask task_of(const LinearPart& part, Space space) const;
  // Starts fetching the weights that a thread reads next, in the phases after `phase`.
  void fetch_ahead(std::size_t phase, int thread) const;
  AttentionArgs attention_args(const Instruction& instruction) const;
  float* row_of(int buffer, int row) const {
    return buffers_[buffer] + static_cast<std::size_t>(row) * program_->buffers()[buffer].stride;
  }
  int rows_of(Space space) const {
    return space == Space::kTokens ? step_.rows : step_.logit_rows;
  }

  const std::shared_ptr<const Program> program_;
  const Tier& tier_;
  const bool direct_;  // producers round their outputs for the next linear layer
  const int max_rows_;
  const KvFormat kv_;
  const std::shared_ptr<ThreadPool> pool_;
  std::vector<Phase> phases_;

  Memory activations_;
  std::vector<float*> buffers_;
  std::shared_ptr<Memory> logits_;
  QuantRows quant_;
  std::uint8_t* bf16_[2] = {};  // rounded by kPrepare, and by who made them
  std::vector<Memory> scratch_;  // one a thread
  Memory workspace_;             // of attention

  // Of a group of layers.
  struct Group {
    Memory cache;
    std::size_t block_stride = 0;
    AttentionPlan plan;
  };
  std::vector<Group> groups_;
  std::vector<GroupLimits> limits_;
  int block_size_ = 0;
  std::size_t block_bytes_ = 0;  // of one layer's K, or V

  Step step_;
  bool group_prefixes_ = true;
  std::unique_ptr<Progress[]> progress_;  // one a phase
  std::atomic<bool> failed_{false};
  std::mutex error_mutex_;
  std::exception_ptr error_;
  bool timing_ = false;
  std::vector<double> seconds_;
};

}  // namespace trimaran
