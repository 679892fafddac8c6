#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <memory>
#include <optional>
#include <stdexcept>
#include <string>
#include <tuple>
#include <vector>

#include "bindings.h"
#include "executor.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace trimaran {
namespace {

template <int Dimensions>
using Ints = nb::ndarray<const std::int32_t, nb::ndim<Dimensions>, nb::c_contig, nb::device::cpu>;
// Slots, block tables and copies of a group of layers.
using Tables = std::tuple<Ints<1>, Ints<2>, Ints<2>>;
// Rows [count, 2], and sums [count, width of the hidden rows]
using Pooled =
    std::tuple<Ints<2>, nb::ndarray<double, nb::ndim<2>, nb::c_contig, nb::device::cpu>>;
// [count, bytes of a block]
using BlockBytes = nb::ndarray<const std::uint8_t, nb::ndim<2>, nb::c_contig, nb::device::cpu>;
using BlockBuffer = nb::ndarray<std::uint8_t, nb::ndim<2>, nb::c_contig, nb::device::cpu>;
using Logits = nb::ndarray<nb::numpy, float, nb::ndim<2>, nb::c_contig>;

// (weight, bias or [], out, residual or -1)
using Part = std::tuple<std::shared_ptr<const PackedLinear>, std::vector<float>, int, int>;

void add_linear(Program& program, int a, const std::vector<Part>& parts, bool direct_input) {
  std::vector<LinearPart> linear;
  for (const auto& [weight, bias, out, residual] : parts)
    linear.push_back({weight, bias, out, residual});
  program.linear(a, std::move(linear), direct_input);
}

void add_gated_linear(Program& program, int a, const Part& gate, const Part& up, bool gelu,
                      bool direct) {
  const auto part = [](const Part& given) {
    const auto& [weight, bias, out, residual] = given;
    return LinearPart{weight, bias, out, residual};
  };
  program.gated_linear(a, part(gate), part(up), gelu, direct);
}

void add_attention(Program& program, int out, int q, int k, int v, int layer, int heads,
                   int kv_heads, int head_dim, float scale, int window, bool direct) {
  program.attention(out, q, k, v, {layer, heads, kv_heads, head_dim, scale, window}, direct);
}

void expect_length(const char* name, std::size_t length, std::size_t wanted) {
  if (length != wanted)
    throw std::invalid_argument(std::string("step plan: ") + name + " has " +
                                std::to_string(length) + " entries, not " +
                                std::to_string(wanted));
}

class StepRunner {
 public:
  StepRunner(std::shared_ptr<const Program> program, const std::string& isa, int threads,
             int max_rows, const std::string& kv, const std::string& activations)
      : width_(program->buffers().at(program->logits()).width),
        hidden_(program->hidden() < 0 ? 0 : program->buffers().at(program->hidden()).width),
        executor_(std::move(program), isa_from_name(isa), threads, max_rows, kv_from_name(kv),
                  eight_bits(activations)) {}

  Executor& executor() { return executor_; }
  const Executor& executor() const { return executor_; }

  // `more`: what slots, block_tables and copies are for the groups of layers after the first.
  // `pooled`: as PooledRows.
  Logits run(Ints<1> tokens, Ints<1> positions, Ints<1> slots, Ints<1> row_starts,
             Ints<1> contexts, Ints<2> block_tables, Ints<1> logit_rows, Ints<2> copies,
             const std::vector<Tables>& more, const std::optional<Pooled>& pooled) {
    expect_length("positions", positions.size(), tokens.size());
    expect_length("row_starts", row_starts.size(), contexts.size() + 1);
    Step step;
    step.rows = static_cast<int>(tokens.size());
    step.sequences = static_cast<int>(contexts.size());
    step.logit_rows = static_cast<int>(logit_rows.size());
    step.tokens = tokens.data();
    step.positions = positions.data();
    step.row_starts = row_starts.data();
    step.contexts = contexts.data();
    step.logit_row = logit_rows.data();
    add_tables(step, {slots, block_tables, copies});
    for (const Tables& tables : more) add_tables(step, tables);
    if (pooled) step.pooled = pooled_rows(*pooled);
    std::shared_ptr<const Memory> memory;
    {
      nb::gil_scoped_release released;
      memory = executor_.run(step);
    }
    using Held = std::shared_ptr<const Memory>;
    nb::capsule owner(new Held(memory), [](void* p) noexcept { delete static_cast<Held*>(p); });
    return Logits(memory->as<float>(), {logit_rows.size(), static_cast<std::size_t>(width_)},
                  owner);
  }

  void read_blocks(Ints<1> blocks, BlockBuffer out) const {
    expect_blocks(blocks.size(), out.shape(0), out.shape(1));
    nb::gil_scoped_release released;
    executor_.read_blocks(blocks.data(), static_cast<int>(blocks.size()), out.data());
  }

  void write_blocks(Ints<1> blocks, BlockBytes data) {
    expect_blocks(blocks.size(), data.shape(0), data.shape(1));
    nb::gil_scoped_release released;
    executor_.write_blocks(blocks.data(), static_cast<int>(blocks.size()), data.data());
  }

 private:
  static void add_tables(Step& step, const Tables& given) {
    const auto& [slots, block_tables, copies] = given;
    expect_length("slots", slots.size(), step.rows);
    expect_length("block_tables", block_tables.shape(0), step.sequences);
    expect_length("copies", copies.size(), 2 * copies.shape(0));
    StepTables tables;
    tables.table_width = static_cast<int>(block_tables.shape(1));
    tables.copies = static_cast<int>(copies.shape(0));
    tables.slots = slots.data();
    tables.block_tables = block_tables.data();
    tables.copy_pairs = copies.data();
    step.tables.push_back(tables);
  }

  PooledRows pooled_rows(const Pooled& given) const {
    const auto& [rows, sums] = given;
    expect_length("pooled", rows.size(), 2 * rows.shape(0));
    expect_length("sums", sums.shape(0), rows.shape(0));
    if (hidden_ == 0) throw std::invalid_argument("step plan: the model has no rows to pool");
    expect_length("a row of sums", sums.shape(1), hidden_);
    return {static_cast<int>(rows.shape(0)), rows.data(), sums.data()};
  }

  void expect_blocks(std::size_t blocks, std::size_t rows, std::size_t bytes) const {
    if (blocks != rows || bytes != executor_.block_bytes())
      throw std::invalid_argument("bytes [" + std::to_string(rows) + ", " + std::to_string(bytes) +
                                  "] for " + std::to_string(blocks) + " blocks of " +
                                  std::to_string(executor_.block_bytes()) + " bytes");
  }

  const int width_;
  const int hidden_;  // elements of a row that can be pooled
  Executor executor_;
};

}  // namespace

void bind_executor(nb::module_& module) {
  nb::class_<Program>(module, "Program")
      .def(nb::init<>())
      .def("buffer", &Program::buffer, "width"_a, "logits"_a)
      .def("embed", &Program::embed, "out"_a, "weight"_a, "scale"_a)
      .def("angles", &Program::angles, "out"_a, "frequencies"_a)
      .def("rms_norm", &Program::rms_norm, "out"_a, "a"_a, "weight"_a, "eps"_a)
      .def("rope", &Program::rope, "out"_a, "a"_a, "angles"_a, "heads"_a, "head_dim"_a)
      .def("attention", &add_attention, "out"_a, "q"_a, "k"_a, "v"_a, "layer"_a, "heads"_a,
           "kv_heads"_a, "head_dim"_a, "scale"_a, "window"_a, "direct"_a)
      .def("silu_mul", &Program::silu_mul, "out"_a, "gate"_a, "up"_a)
      .def("gelu_mul", &Program::gelu_mul, "out"_a, "gate"_a, "up"_a)
      .def("add", &Program::add, "out"_a, "a"_a, "b"_a)
      .def("gather", &Program::gather, "out"_a, "a"_a)
      .def("linear", &add_linear, "a"_a, "parts"_a, "direct_input"_a)
      .def("gated_linear", &add_gated_linear, "a"_a, "gate"_a, "up"_a, "gelu"_a, "direct"_a)
      .def("finish", &Program::finish, "logits"_a);
  nb::class_<ThreadPool>(module, "ThreadPool");
  nb::class_<StepRunner>(module, "Executor")
      .def(nb::init<std::shared_ptr<const Program>, const std::string&, int, int,
                    const std::string&, const std::string&>(),
           "program"_a, "isa"_a, "threads"_a, "max_rows"_a, "kv"_a = "bf16",
           "activations"_a = "auto")
      .def("allocate_cache",
           [](StepRunner& self, const std::vector<int>& blocks, int block_size) {
             self.executor().allocate_cache(blocks, block_size);
           },
           "blocks"_a, "block_size"_a)
      .def("run", &StepRunner::run, "tokens"_a.noconvert(), "positions"_a.noconvert(),
           "slots"_a.noconvert(), "row_starts"_a.noconvert(), "contexts"_a.noconvert(),
           "block_tables"_a.noconvert(), "logit_rows"_a.noconvert(), "copies"_a.noconvert(),
           "more"_a = std::vector<Tables>(), "pooled"_a.noconvert() = nb::none())
      .def("read_blocks", &StepRunner::read_blocks, "blocks"_a.noconvert(), "out"_a.noconvert())
      .def("write_blocks", &StepRunner::write_blocks, "blocks"_a.noconvert(),
           "data"_a.noconvert())
      .def_prop_ro("block_bytes",
                   [](const StepRunner& self) { return self.executor().block_bytes(); })
      .def("group_prefixes",
           [](StepRunner& self, bool on) { self.executor().group_prefixes(on); }, "on"_a)
      .def("time_phases",
           [](StepRunner& self, bool on) { self.executor().time_phases(on); }, "on"_a)
      .def("phase_seconds",
           [](const StepRunner& self) { return self.executor().phase_seconds(); })
      .def_prop_ro("pool", [](const StepRunner& self) { return self.executor().pool(); })
      .def_prop_ro("activation_bytes",
                   [](const StepRunner& self) { return self.executor().activation_bytes(); })
      .def_prop_ro("cache_bytes",
                   [](const StepRunner& self) { return self.executor().cache_bytes(); });
}

}  // namespace trimaran
