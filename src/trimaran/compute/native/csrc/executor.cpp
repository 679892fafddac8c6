#include "executor.h"

#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstring>
#include <stdexcept>

#include "kv_cache.h"

namespace trimaran {
namespace {

constexpr int kRowsInHand = 8;      // that a chain of row instructions keeps in the cache
constexpr int kUnitsPerThread = 6;  // of a linear phase: enough to even out, at least
constexpr int kSpareLogitRows = 256;
// With so few rows the time goes into reading weights, and a thread that waits for the others
// begins with the next ones.
constexpr int kFetchRows = 16;
constexpr std::size_t kFetchBytes = 32 << 10;
constexpr int kFewUnitsPerThread = 2;  // then: longer streams

double seconds_since_start() {
  return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch())
      .count();
}

}  // namespace

Executor::Executor(std::shared_ptr<const Program> program, Isa isa, int threads, int max_rows,
                   KvFormat kv, bool eight_bits)
    : program_(std::move(program)),
      tier_(tier_of(isa)),
      direct_(!tier_.multiplies_integers()),
      max_rows_(max_rows),
      kv_(kv),
      pool_(std::make_shared<ThreadPool>(threads)) {
  if (program_->logits() < 0) throw std::invalid_argument("the recorded plan has no logits");
  for (const Instruction& instruction : program_->instructions())
    for (const LinearPart& part : instruction.parts)
      if (!can_multiply(tier_, part.weight->view()))
        throw std::invalid_argument("weights packed for another instruction set");
  make_phases();
  take_buffers(eight_bits);
  const AttentionShape& shape = program_->cache_shape();
  const std::size_t scratch =
      std::max(attention_scratch_bytes(shape.heads, shape.kv_heads, shape.head_dim),
               linear_scratch_bytes());
  for (int thread = 0; thread < threads; ++thread) scratch_.emplace_back(scratch);
  progress_.reset(new Progress[phases_.size()]);
  seconds_.assign(phases_.size(), 0.0);
}

void Executor::make_phases() {
  phases_.push_back({Kind::kCopies, Space::kTokens, 0, 0});
  const std::vector<Instruction>& all = program_->instructions();
  for (int i = 0; i < static_cast<int>(all.size()); ++i) {
    if (direct_ && all[i].op == Op::kPrepare && all[i].direct_input) continue;
    const Kind kind = all[i].op == Op::kLinear      ? Kind::kLinear
                      : all[i].op == Op::kAttention ? Kind::kAttention
                                                    : Kind::kRows;
    Phase& last = phases_.back();
    if (kind == Kind::kRows && last.kind == kind && last.space == all[i].space && last.end == i)
      last.end = i + 1;
    else
      phases_.push_back({kind, all[i].space, i, i + 1});
    if (kind == Kind::kAttention) phases_.push_back({Kind::kMerges, all[i].space, i, i + 1});
  }
}

// One stretch of memory: all buffers but the logits, then what linear layers read.
void Executor::take_buffers(bool eight_bits) {
  const std::vector<Buffer>& buffers = program_->buffers();
  const std::size_t rows = round_up(max_rows_, kRowPad) + kRowPad;
  const std::size_t steps = (program_->widest_input() + kStep - 1) / kStep;
  std::size_t bytes = 0;
  const auto take = [&](std::size_t size) {
    const std::size_t at = bytes;
    bytes += round_up(size, 64) + 64;
    return at;
  };
  std::vector<std::size_t> at;
  for (int i = 0; i < static_cast<int>(buffers.size()); ++i)
    at.push_back(i == program_->logits() ? 0 : take(rows * buffers[i].stride * sizeof(float)));
  const std::size_t quantized = tier_.multiplies_integers() ? rows : 0;
  const std::size_t planes = take(quantized * steps * kStepBytes);
  const std::size_t sums16 = take(quantized * steps * 2 * sizeof(std::int32_t));
  const std::size_t sums32 = take(quantized * steps * sizeof(std::int32_t));
  const std::size_t sums32f = take(quantized * steps * sizeof(float));
  const std::size_t scales = take(quantized * sizeof(float));
  const std::size_t words = take(quantized * steps * kStepBytes);
  const std::size_t starts = take(quantized * steps * sizeof(std::int32_t));
  const std::size_t sums8 = take(quantized * steps * sizeof(std::int32_t));
  const std::size_t step_scales = take(eight_bits ? quantized * steps * sizeof(float) : 0);
  const std::size_t prepared = take(rows * steps * kStepBytes);
  const std::size_t delivered = take((direct_ ? rows : 0) * steps * kStepBytes);
  activations_ = Memory(bytes);
  auto* base = activations_.as<std::uint8_t>();
  for (std::size_t offset : at) buffers_.push_back(reinterpret_cast<float*>(base + offset));
  quant_.planes = reinterpret_cast<std::int8_t*>(base + planes);
  quant_.sums16 = reinterpret_cast<std::int32_t*>(base + sums16);
  quant_.sums32 = reinterpret_cast<std::int32_t*>(base + sums32);
  quant_.sums32f = reinterpret_cast<float*>(base + sums32f);
  quant_.scales = reinterpret_cast<float*>(base + scales);
  quant_.words = reinterpret_cast<std::int8_t*>(base + words);
  quant_.starts = reinterpret_cast<std::int32_t*>(base + starts);
  if (eight_bits && quantized > 0)
    quant_.step_scales = reinterpret_cast<float*>(base + step_scales);
  quant_.sums8 = reinterpret_cast<std::int32_t*>(base + sums8);
  bf16_[0] = base + prepared;
  bf16_[1] = base + delivered;
}

void Executor::allocate_cache(const std::vector<int>& blocks, int block_size) {
  const AttentionShape& shape = program_->cache_shape();
  if (const char* problem =
          kv_shape_error(shape.heads, shape.kv_heads, shape.head_dim, block_size))
    throw std::invalid_argument(problem);
  const std::vector<LayerGroup>& layers = program_->groups();
  if (blocks.size() != layers.size())
    throw std::invalid_argument("a KV cache for " + std::to_string(blocks.size()) +
                                " groups of layers; the model has " +
                                std::to_string(layers.size()));
  for (int count : blocks)
    if (count < 1 || count > INT32_MAX / block_size)
      throw std::invalid_argument("a KV cache of " + std::to_string(count) + " blocks");
  groups_.clear();  // first, so that both never exist
  limits_.clear();
  block_bytes_ = shape.kv_heads * kv_page_bytes(kv_, shape.head_dim, block_size);
  block_size_ = block_size;
  std::vector<Group> groups(layers.size());
  std::vector<GroupLimits> limits;
  for (std::size_t i = 0; i < layers.size(); ++i) {
    groups[i].block_stride = block_bytes_ * 2 * layers[i].layers.size();
    groups[i].cache = Memory(groups[i].block_stride * blocks[i]);
    limits.push_back({layers[i].window, blocks[i]});
  }
  groups_ = std::move(groups);
  limits_ = std::move(limits);
}

std::size_t Executor::cache_bytes() const {
  std::size_t bytes = 0;
  for (const Group& group : groups_) bytes += group.cache.size();
  return bytes;
}

void Executor::check_blocks(const std::int32_t* blocks, int count) const {
  if (limits_.empty()) throw std::invalid_argument("the KV cache was not allocated");
  for (int i = 0; i < count; ++i)
    if (blocks[i] < 0 || blocks[i] >= limits_[0].blocks)
      throw std::invalid_argument("there is no block " + std::to_string(blocks[i]) +
                                  "; the KV cache has " + std::to_string(limits_[0].blocks));
}

void Executor::read_blocks(const std::int32_t* blocks, int count, std::uint8_t* out) const {
  check_blocks(blocks, count);
  const std::size_t stride = block_bytes();
  const auto* cache = groups_[0].cache.as<std::uint8_t>();
  for (int i = 0; i < count; ++i)
    std::memcpy(out + i * stride, cache + blocks[i] * stride, stride);
}

void Executor::write_blocks(const std::int32_t* blocks, int count, const std::uint8_t* data) {
  check_blocks(blocks, count);
  const std::size_t stride = block_bytes();
  auto* cache = groups_[0].cache.as<std::uint8_t>();
  for (int i = 0; i < count; ++i)
    std::memcpy(cache + blocks[i] * stride, data + i * stride, stride);
}

std::size_t Executor::activation_bytes() const {
  std::size_t bytes = activations_.size() + workspace_.size();
  if (logits_) bytes += logits_->size();
  for (const Memory& memory : scratch_) bytes += memory.size();
  return bytes;
}

void Executor::time_phases(bool on) {
  timing_ = on;
  if (on) seconds_.assign(phases_.size(), 0.0);
}

std::vector<std::pair<std::string, double>> Executor::phase_seconds() const {
  std::vector<std::pair<std::string, double>> result;
  for (std::size_t i = 0; i < phases_.size(); ++i) {
    const Kind kind = phases_[i].kind;
    std::string name = kind == Kind::kCopies ? "copies"
                       : kind == Kind::kRows ? "rows"
                                             : "attention";
    if (kind == Kind::kLinear) {
      const Instruction& first = program_->instructions()[phases_[i].begin];
      int outputs = 0;
      for (const LinearPart& part : first.parts) outputs += part.weight->view().outputs;
      name = "linear " + std::to_string(first.parts[0].weight->view().inputs) + " -> " +
             std::to_string(outputs);
    }
    result.emplace_back(name, seconds_[i]);
  }
  return result;
}

std::shared_ptr<const Memory> Executor::run(const Step& step) {
  if (groups_.empty()) throw std::invalid_argument("the KV cache was not allocated");
  check_step(step, {max_rows_, program_->vocabulary(), block_size_}, limits_);
  prepare_step(step);
  pool_->share([](void* self, int thread) { static_cast<Executor*>(self)->work(thread); }, this);
  if (failed_) std::rethrow_exception(error_);
  add_pooled(step.pooled);
  return logits_;
}

// One row after the other, so that it makes no difference how many of them a step has.
void Executor::add_pooled(const PooledRows& pooled) const {
  if (pooled.count == 0) return;
  const int hidden = program_->hidden(), width = program_->buffers()[hidden].width;
  for (int i = 0; i < pooled.count; ++i) {
    double* sums = pooled.sums + static_cast<std::size_t>(i) * width;
    for (int row = pooled.rows[2 * i]; row < pooled.rows[2 * i + 1]; ++row) {
      const float* values = row_of(hidden, row);
      for (int k = 0; k < width; ++k) sums[k] += values[k];
    }
  }
}

// Sizes what depends on the step, and cuts its attention.
void Executor::prepare_step(const Step& step) {
  step_ = step;
  const std::size_t row_bytes = program_->buffers()[program_->logits()].width * sizeof(float);
  const std::size_t wanted = round_up(std::max(step.logit_rows, 1), 16) * row_bytes;
  // Rows by the thousand are rare (log-probabilities of a prompt): they are given back.
  if (!logits_ || logits_->size() < wanted ||
      logits_->size() > wanted + kSpareLogitRows * row_bytes)
    logits_ = std::make_shared<Memory>(wanted);
  buffers_[program_->logits()] = logits_->as<float>();
  std::size_t workspace = 0;
  for (std::size_t i = 0; i < groups_.size(); ++i) {
    Instruction shape(Op::kAttention);
    shape.attention = program_->cache_shape();
    shape.attention.window = limits_[i].window;
    shape.group = static_cast<int>(i);
    plan_attention(attention_args(shape), pool_->size(), group_prefixes_, groups_[i].plan);
    workspace = std::max(workspace, groups_[i].plan.workspace_floats * sizeof(float));
  }
  if (workspace_.size() < workspace) workspace_ = Memory(workspace + workspace / 2);
  for (std::size_t i = 0; i < phases_.size(); ++i) progress_[i].reset(units(phases_[i]));
  failed_ = false;
}

// Threads other than 0 may be called again in the same step: they go on where it is.
void Executor::work(int thread) {
  Turn& turn = pool_->turn(thread);
  double last = timing_ ? seconds_since_start() : 0.0;
  for (std::size_t i = 0; i < phases_.size(); ++i) {
    Progress& progress = progress_[i];
    const int count = units(phases_[i]);
    const auto unfinished = [&] { return progress.done.load(std::memory_order_acquire) < count; };
    for (int unit; unfinished() && (unit = progress.take(thread)) >= 0;) {
      try {
        if (!failed_) run_unit(phases_[i], unit, thread);
      } catch (...) {
        fail();
      }
      progress.done.fetch_add(1, std::memory_order_acq_rel);
      if (!turn.over()) continue;
      if (thread > 0) return;
      turn.give_way();
    }
    if (phases_[i].kind == Kind::kLinear) fetch_ahead(i, thread);
    if (thread == 0)
      spin_while(unfinished);
    else if (!spin_briefly(unfinished))
      return;  // who has the last units was stopped: that may take long
    if (timing_ && thread == 0) {
      const double now = seconds_since_start();
      seconds_[i] += now - last;
      last = now;
    }
  }
}

int Executor::Progress::take(int thread) {
  std::uint64_t seen = left.load(std::memory_order_relaxed);
  for (;;) {
    const auto begin = static_cast<std::uint32_t>(seen);
    const auto end = static_cast<std::uint32_t>(seen >> 32);
    if (begin >= end) return -1;
    const std::uint64_t rest = thread % 2 == 0 ? seen + 1 : seen - (std::uint64_t{1} << 32);
    if (left.compare_exchange_weak(seen, rest, std::memory_order_relaxed))
      return static_cast<int>(thread % 2 == 0 ? begin : end - 1);
  }
}

void Executor::fetch_ahead(std::size_t phase, int thread) const {
  std::size_t next = phase + 1;
  while (next < phases_.size() && phases_[next].kind != Kind::kLinear) ++next;
  if (next == phases_.size() || rows_of(phases_[next].space) > kFetchRows) return;
  const Instruction& op = program_->instructions()[phases_[next].begin];
  const LinearGrid grid = linear_grid(phases_[next]);
  int block = thread % 2 == 0 ? 0 : (grid.block_chunks - 1) * grid.blocks;
  for (const LinearPart& part : op.parts) {
    const LinearView& view = part.weight->view();
    if (op.gated || block < view.blocks()) {
      const std::uint8_t* data = view.data + static_cast<std::size_t>(block) * view.block_bytes;
      const std::size_t rest = (view.blocks() - static_cast<std::size_t>(block)) * view.block_bytes;
      const std::size_t bytes = std::min(rest, kFetchBytes / (op.gated ? 2 : 1));
      for (std::size_t at = 0; at < bytes; at += 64) __builtin_prefetch(data + at, 0, 2);
      if (!op.gated) return;
    } else {
      block -= view.blocks();
    }
  }
}

void Executor::fail() {
  std::lock_guard<std::mutex> lock(error_mutex_);
  if (!failed_) error_ = std::current_exception();
  failed_ = true;
}

int Executor::units(const Phase& phase) const {
  switch (phase.kind) {
    case Kind::kCopies:
      for (const StepTables& tables : step_.tables)
        if (tables.copies > 0) return 2 * program_->layers();
      return 0;
    case Kind::kRows: {
      const int size = rows_of_unit(phase);
      return (rows_of(phase.space) + size - 1) / size;
    }
    case Kind::kLinear: {
      const LinearGrid grid = linear_grid(phase);
      return grid.row_chunks * grid.block_chunks;
    }
    case Kind::kAttention:
      return static_cast<int>(attention_plan(phase).units.size());
    case Kind::kMerges:
      return static_cast<int>(attention_plan(phase).merges.size());
  }
  return 0;
}

void Executor::run_unit(const Phase& phase, int unit, int thread) {
  switch (phase.kind) {
    case Kind::kCopies:
      copy_blocks(unit);
      break;
    case Kind::kRows:
      run_rows(phase, unit);
      break;
    case Kind::kLinear:
      run_linear(phase, unit, thread);
      break;
    case Kind::kAttention:
      tier_.attention_unit(attention_args(program_->instructions()[phase.begin]),
                           attention_plan(phase).units[unit], attention_plan(phase).slices.data(),
                           scratch_[thread].as<void>());
      break;
    case Kind::kMerges:
      tier_.merge_unit(attention_args(program_->instructions()[phase.begin]),
                       attention_plan(phase).merges[unit], scratch_[thread].as<void>());
      break;
  }
}

const AttentionPlan& Executor::attention_plan(const Phase& phase) const {
  return groups_[program_->instructions()[phase.begin].group].plan;
}

// A layer's K or V: units of one group follow each other.
void Executor::copy_blocks(int unit) {
  int number = 0;
  for (int own; unit >= (own = 2 * static_cast<int>(program_->groups()[number].layers.size()));
       ++number)
    unit -= own;
  const Group& group = groups_[number];
  const StepTables& tables = step_.of_group(number);
  std::uint8_t* cache = group.cache.as<std::uint8_t>() + unit * block_bytes_;
  for (int copy = 0; copy < tables.copies; ++copy)
    copy_kv_block(cache, group.block_stride, block_bytes_, tables.copy_pairs[2 * copy],
                  tables.copy_pairs[2 * copy + 1]);
}

int Executor::rows_of_unit(const Phase& phase) const {
  const int share = (rows_of(phase.space) + pool_->size() - 1) / pool_->size();
  return std::max(1, std::min(share, kRowsInHand));
}

void Executor::run_rows(const Phase& phase, int unit) {
  const std::vector<Instruction>& all = program_->instructions();
  const int size = rows_of_unit(phase);
  const int first = unit * size, last = std::min(rows_of(phase.space), first + size);
  for (int i = phase.begin; i < phase.end; ++i)
    for (int row = first; row < last; ++row) run_row(all[i], row);
}

void Executor::run_row(const Instruction& op, int row) {
  const std::vector<Buffer>& buffers = program_->buffers();
  const auto input = [&](int buffer) { return row_of(buffer, row); };
  switch (op.op) {
    case Op::kEmbed:
      tier_.weights_of(op.weight->view(), step_.tokens[row], row_of(op.out, row));
      if (op.scale != 1.0f) {
        float* out = row_of(op.out, row);
        for (int i = 0; i < buffers[op.out].width; ++i) out[i] *= op.scale;
      }
      break;
    case Op::kAngles: {
      const std::size_t half = op.frequencies.size();
      float* out = row_of(op.out, row);
      for (std::size_t i = 0; i < half; ++i) {
        const double angle = step_.positions[row] * op.frequencies[i];
        out[i] = static_cast<float>(std::cos(angle));
        out[half + i] = static_cast<float>(std::sin(angle));
      }
      break;
    }
    case Op::kRmsNorm: {
      const int part = static_cast<int>(op.vector.size());
      for (int at = 0; at < buffers[op.a].width; at += part)
        tier_.rms_norm(input(op.a) + at, op.vector.data(), part, op.eps, row_of(op.out, row) + at);
      break;
    }
    case Op::kRope: {
      const int half = buffers[op.a].width / 2;
      const float* angles = input(op.a);
      float* out = row_of(op.out, row);
      if (op.out != op.b) std::memcpy(out, input(op.b), buffers[op.out].width * sizeof(float));
      tier_.rope(out, op.heads, op.head_dim, half, angles, angles + half);
      break;
    }
    case Op::kWriteKv:
      tier_.write_kv(attention_args(op), row, row + 1);
      break;
    case Op::kSiluMul:
      tier_.silu_mul(input(op.a), input(op.b), buffers[op.out].width, row_of(op.out, row));
      break;
    case Op::kGeluMul:
      tier_.gelu_mul(input(op.a), input(op.b), buffers[op.out].width, row_of(op.out, row));
      break;
    case Op::kAdd:
      tier_.add(input(op.a), input(op.b), buffers[op.out].width, row_of(op.out, row));
      break;
    case Op::kGather:
      std::memcpy(row_of(op.out, row), row_of(op.a, step_.logit_row[row]),
                  buffers[op.out].width * sizeof(float));
      break;
    case Op::kPrepare: {
      const int width = buffers[op.a].width;
      if (op.integers) tier_.quantize(input(op.a), width, quant_of(op.space), row);
      if (op.bf16) tier_.to_bf16(input(op.a), width, bf16_[0], row);
      break;
    }
    case Op::kLinear:
    case Op::kAttention:
      break;
  }
}

Executor::LinearGrid Executor::linear_grid(const Phase& phase) const {
  const Instruction& op = program_->instructions()[phase.begin];
  int blocks = 0;
  for (const LinearPart& part : op.parts) blocks += part.weight->view().blocks();
  if (op.gated) blocks /= 2;
  LinearGrid grid;
  grid.row_chunks = (rows_of(phase.space) + kTaskRows - 1) / kTaskRows;
  const int share = rows_of(phase.space) > kFetchRows ? kUnitsPerThread : kFewUnitsPerThread;
  const int wanted = share * pool_->size();
  const int chunks = pool_->size() == 1 || grid.row_chunks == 0
                         ? 1
                         : (wanted + grid.row_chunks - 1) / grid.row_chunks;
  const int size = (blocks + chunks - 1) / chunks;
  grid.blocks = size + size % 2;  // even, since tiles may take blocks in pairs
  grid.block_chunks = (blocks + grid.blocks - 1) / grid.blocks;
  return grid;
}

void Executor::run_linear(const Phase& phase, int unit, int thread) {
  const Instruction& op = program_->instructions()[phase.begin];
  const LinearGrid grid = linear_grid(phase);
  const int row_begin = unit / grid.block_chunks * kTaskRows;
  int begin = unit % grid.block_chunks * grid.blocks, end = begin + grid.blocks;
  for (std::size_t i = op.gated ? 1 : 0; i < op.parts.size(); ++i) {
    LinearTask task = task_of(op.parts[i], phase.space);
    const int own = task.weight->blocks();
    if (op.gated) {
      const LinearPart& gate = op.parts[0];
      task.gate = &gate.weight->view();
      task.gelu = op.gelu;
      if (!gate.bias.empty()) task.gate_bias = gate.bias.data();
    }
    if (direct_ && op.direct_output) task.out_bf16 = bf16_[1];
    task.bf16 = bf16_[direct_ && op.direct_input ? 1 : 0];
    task.scratch = scratch_[thread].as<void>();
    task.row_begin = row_begin;
    task.row_end = std::min(rows_of(phase.space), row_begin + kTaskRows);
    task.block_begin = std::max(0, begin);
    task.block_end = std::min(own, end);
    if (task.block_begin < task.block_end) tier_.linear(task);
    begin -= own;
    end -= own;
  }
}

// What other cores wrote is dear to write again, so few rows leave out what only many need.
QuantRows Executor::quant_of(Space space) const {
  QuantRows rows = quant_;
  if (rows_of(space) < kLeastPairedRows) rows.words = nullptr;
  return rows;
}

LinearTask Executor::task_of(const LinearPart& part, Space space) const {
  const std::vector<Buffer>& buffers = program_->buffers();
  LinearTask task;
  task.quant = quant_of(space);
  task.weight = &part.weight->view();
  task.out = buffers_[part.out];
  task.out_stride = buffers[part.out].stride;
  if (!part.bias.empty()) task.bias = part.bias.data();
  if (part.residual >= 0) {
    task.residual = buffers_[part.residual];
    task.residual_stride = buffers[part.residual].stride;
  }
  return task;
}

AttentionArgs Executor::attention_args(const Instruction& instruction) const {
  const AttentionShape& shape = instruction.attention;
  const auto data = [&](int buffer) { return buffer < 0 ? nullptr : buffers_[buffer]; };
  AttentionArgs args;
  args.q = data(instruction.a);
  args.k = data(instruction.b);
  args.v = data(instruction.c);
  args.out = data(instruction.out);
  if (direct_ && instruction.direct_output) args.out_bf16 = bf16_[1];
  args.kv = kv_;
  const Group& group = groups_[instruction.group];
  const StepTables& tables = step_.of_group(instruction.group);
  args.k_cache = group.cache.as<std::uint8_t>() + 2 * instruction.place * block_bytes_;
  args.v_cache = args.k_cache + block_bytes_;
  args.block_stride = group.block_stride;
  args.rows = step_.rows;
  args.sequences = step_.sequences;
  args.heads = shape.heads;
  args.kv_heads = shape.kv_heads;
  args.head_dim = shape.head_dim;
  args.block_size = block_size_;
  args.table_width = tables.table_width;
  args.scale = shape.scale;
  args.window = shape.window;
  args.positions = step_.positions;
  args.slots = tables.slots;
  args.row_starts = step_.row_starts;
  args.contexts = step_.contexts;
  args.block_tables = tables.block_tables;
  args.workspace = workspace_.as<float>();
  return args;
}

}  // namespace trimaran
