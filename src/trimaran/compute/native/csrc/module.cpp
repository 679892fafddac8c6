#include <nanobind/nanobind.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <string>
#include <vector>

#include "bindings.h"
#include "isa.h"

namespace nb = nanobind;

NB_MODULE(_native, module) {
  using namespace trimaran;
  module.def("available_isas", [] {
    std::vector<std::string> names;
    for (Isa isa : available_isas()) names.emplace_back(isa_name(isa));
    return names;
  });
  module.def(
      "check_isa", [](const std::string& name) { isa_from_name(name); }, nb::arg("name"),
      "Raises ValueError, saying what is lacking, unless the kernels of this name can run.");
  bind_artifact(module);
  bind_attention(module);
  bind_executor(module);
  bind_linear(module);
  bind_probe(module);
  bind_rows(module);
  bind_sampler(module);
}
