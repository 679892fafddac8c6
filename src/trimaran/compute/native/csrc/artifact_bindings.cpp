#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/string.h>

#include <memory>
#include <stdexcept>
#include <string>

#include "artifact.h"
#include "bindings.h"
#include "source_hash.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace trimaran {
namespace {

using Bytes = nb::ndarray<const std::uint8_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;

// A new field of LinearView belongs into both functions below, and into check_tables.
static_assert(sizeof(LinearView) == 64, "LinearView has changed");

nb::dict layout(const PackedLinear& packed) {
  const LinearView& view = packed.view();
  nb::dict fields;
  fields["codes"] = static_cast<int>(view.codes);
  fields["outputs"] = view.outputs;
  fields["inputs"] = view.inputs;
  fields["group"] = view.group;
  fields["offset"] = view.offset;
  fields["mins"] = view.mins;
  fields["scales"] = static_cast<int>(view.scales);
  fields["block_bytes"] = view.block_bytes;
  fields["scales_at"] = view.scales_at;
  fields["mins_at"] = view.mins_at;
  return fields;
}

std::shared_ptr<PackedLinear> from_layout(std::shared_ptr<Memory> memory, std::size_t at,
                                          const std::string& format, int codes, int outputs,
                                          int inputs, int group, int offset, bool mins, int scales,
                                          std::size_t block_bytes, std::size_t scales_at,
                                          std::size_t mins_at) {
  LinearView view;
  view.codes = static_cast<Codes>(codes);
  view.outputs = outputs;
  view.inputs = inputs;
  view.group = group;
  view.offset = offset;
  view.mins = mins;
  view.scales = static_cast<Scales>(scales);
  view.block_bytes = block_bytes;
  view.scales_at = scales_at;
  view.mins_at = mins_at;
  return std::make_shared<PackedLinear>(packed_from(std::move(memory), at, view, format));
}

nb::object bytes_of(std::uint8_t* data, std::size_t size, nb::handle owner) {
  return nb::cast(nb::ndarray<nb::numpy, std::uint8_t, nb::ndim<1>>(data, {size}, owner));
}

}  // namespace

void bind_artifact(nb::module_& module) {
  module.attr("KERNEL_VERSION") = kKernelVersion;
  module.attr("SOURCE_HASH") = TRIMARAN_SOURCE_HASH;
  module.def(
      "checksum",
      [](Bytes data) {
        nb::gil_scoped_release released;
        return checksum(data.data(), data.size());
      },
      "data"_a);
  nb::class_<Memory>(module, "WeightMemory")
      .def(nb::init<std::size_t>(), "bytes"_a)
      .def("array", [](nb::handle self) {
        auto& memory = nb::cast<Memory&>(self);
        return bytes_of(memory.as<std::uint8_t>(), memory.size(), self);
      });
  module.def("packed_layout", &layout, "packed"_a);
  module.def("packed_bytes", [](nb::handle packed) {
    auto& own = nb::cast<PackedLinear&>(packed);
    return bytes_of(own.data(), own.bytes(), packed);
  });
  module.def("packed_from", &from_layout, "memory"_a, "at"_a, "format"_a, "codes"_a, "outputs"_a,
             "inputs"_a, "group"_a, "offset"_a, "mins"_a, "scales"_a, "block_bytes"_a,
             "scales_at"_a, "mins_at"_a);
}

}  // namespace trimaran
