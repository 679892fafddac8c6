#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/string.h>

#include <memory>
#include <optional>
#include <stdexcept>
#include <string>

#include "bindings.h"
#include "memory.h"
#include "pack.h"
#include "tier.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace trimaran {
namespace {

template <class T, int Dimensions>
using Array = nb::ndarray<T, nb::ndim<Dimensions>, nb::c_contig, nb::device::cpu>;

// Packs rows of a file for an instruction set, which this machine may lack. `target` is "as-is", "bf16", "int8" or "int4".
std::shared_ptr<PackedLinear> pack(const std::string& type, Array<const std::uint8_t, 2> rows,
                                   int inputs, std::optional<Array<const std::int64_t, 1>> order,
                                   const std::string& target, const std::string& isa) {
  Source source;
  source.type = type;
  source.rows = rows.data();
  source.row_bytes = rows.shape(1);
  source.outputs = static_cast<int>(rows.shape(0));
  source.inputs = inputs;
  if (!readable(type)) throw std::invalid_argument("no packing of type " + type);
  if (inputs < 1 || source.row_bytes != source_row_bytes(type, inputs))
    throw std::invalid_argument("a row of " + std::to_string(inputs) + " elements of " + type +
                                " doesn't take " + std::to_string(source.row_bytes) + " bytes");
  if (order) {
    if (order->size() != rows.shape(0)) throw std::invalid_argument("order: one entry a row");
    for (std::size_t i = 0; i < order->size(); ++i)
      if ((*order)(i) < 0 || (*order)(i) >= source.outputs)
        throw std::invalid_argument("order: no such row");
    source.order = order->data();
  }
  const Layout layout =
      tier_of(isa_named(isa)).multiplies_integers() ? Layout::kIntegers : Layout::kTiles;
  nb::gil_scoped_release released;
  if (target == "as-is") return std::make_shared<PackedLinear>(pack_as_is(source, layout));
  if (target == "bf16") return std::make_shared<PackedLinear>(pack_bf16(source));
  if (target == "int8") return std::make_shared<PackedLinear>(pack_rounded(source, 8, layout));
  if (target == "int4") return std::make_shared<PackedLinear>(pack_rounded(source, 4, layout));
  throw std::invalid_argument("target is '" + target + "'; give as-is, bf16, int8 or int4");
}

void values(const PackedLinear& packed, Array<float, 2> out) {
  const LinearView& view = packed.view();
  if (static_cast<int>(out.shape(0)) != view.outputs ||
      static_cast<int>(out.shape(1)) != view.inputs)
    throw std::invalid_argument("out: one row an output, one column an input");
  for (int output = 0; output < view.outputs; ++output)
    dequantize_output(view, output, out.data() + static_cast<std::size_t>(output) * view.inputs);
}

// Activations as linear layers read them, in memory that may be read past the last row.
class PreparedRows {
 public:
  PreparedRows(const Tier& tier, const float* x, int rows, int width, bool eight_bits) {
    const std::size_t steps = (width + kStep - 1) / kStep, padded = rows + 2 * kRowPad;
    planes_ = Memory(padded * steps * kStepBytes);
    words_ = Memory(padded * steps * kStepBytes);
    sums_ = Memory(padded * steps * 7 * sizeof(float));
    scales_ = Memory(padded * sizeof(float));
    bf16_ = Memory(padded * steps * kStepBytes);
    quant.planes = planes_.as<std::int8_t>();
    quant.sums16 = sums_.as<std::int32_t>();
    quant.sums32 = quant.sums16 + padded * steps * 2;
    quant.sums32f = reinterpret_cast<float*>(quant.sums32 + padded * steps);
    quant.scales = scales_.as<float>();
    quant.words = words_.as<std::int8_t>();
    quant.starts = reinterpret_cast<std::int32_t*>(quant.sums32f + padded * steps);
    quant.sums8 = quant.starts + padded * steps;
    if (eight_bits) quant.step_scales = reinterpret_cast<float*>(quant.sums8 + padded * steps);
    for (int row = 0; row < rows; ++row) {
      const float* values = x + static_cast<std::size_t>(row) * width;
      if (tier.multiplies_integers()) tier.quantize(values, width, quant, row);
      tier.to_bf16(values, width, bf16(), row);
    }
  }
  std::uint8_t* bf16() const { return bf16_.as<std::uint8_t>(); }
  QuantRows quant;

 private:
  Memory planes_, words_, sums_, scales_, bf16_;
};

// out = [residual +] x @ weight.T [+ bias], in tasks like those of a step.
void linear(const std::string& isa, const PackedLinear& weight, Array<const float, 2> x,
            std::optional<Array<const float, 1>> bias,
            std::optional<Array<const float, 2>> residual, Array<float, 2> out,
            const std::string& activations) {
  const Tier& tier = find_tier(isa);
  const LinearView& view = weight.view();
  const int rows = static_cast<int>(x.shape(0));
  const auto fits = [&](const auto& array) {
    return static_cast<int>(array.shape(0)) == rows &&
           static_cast<int>(array.shape(1)) == view.outputs;
  };
  if (!can_multiply(tier, view))
    throw std::invalid_argument("linear: packed for another instruction set than " + isa);
  if (static_cast<int>(x.shape(1)) != view.inputs || !fits(out) ||
      (bias && static_cast<int>(bias->size()) != view.outputs) || (residual && !fits(*residual)))
    throw std::invalid_argument("linear: shapes don't fit");
  const PreparedRows prepared(tier, x.data(), rows, view.inputs, eight_bits(activations));
  const Memory scratch(linear_scratch_bytes());
  LinearTask task;
  task.weight = &view;
  task.quant = prepared.quant;
  task.bf16 = prepared.bf16();
  task.block_end = view.blocks();
  task.out = out.data();
  task.out_stride = task.residual_stride = view.outputs;
  if (bias) task.bias = bias->data();
  if (residual) task.residual = residual->data();
  task.scratch = scratch.as<void>();
  for (int row = 0; row < rows; row += kTaskRows) {
    task.row_begin = row;
    task.row_end = row + kTaskRows < rows ? row + kTaskRows : rows;
    tier.linear(task);
  }
}

}  // namespace

void bind_linear(nb::module_& module) {
  nb::class_<PackedLinear>(module, "PackedLinear")
      .def_prop_ro("outputs", [](const PackedLinear& p) { return p.view().outputs; })
      .def_prop_ro("inputs", [](const PackedLinear& p) { return p.view().inputs; })
      .def_prop_ro("format", &PackedLinear::format)
      .def_prop_ro("nbytes", &PackedLinear::bytes)
      .def("values", &values, "out"_a, "Writes the weights it stands for, [outputs, inputs].");
  module.def("packable", &readable, "type"_a);
  module.def("pack", &pack, "type"_a, "rows"_a, "inputs"_a, "order"_a.none(), "target"_a,
             "isa"_a);
  module.def("linear", &linear, "isa"_a, "weight"_a, "x"_a, "bias"_a.none(),
             "residual"_a.none(), "out"_a, "activations"_a = "auto");
}

}  // namespace trimaran
