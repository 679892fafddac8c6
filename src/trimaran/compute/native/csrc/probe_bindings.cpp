// Measuring the machine: `trimaran info --calibrate`.
#include <nanobind/nanobind.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <stdexcept>
#include <string>
#include <vector>

#include "bindings.h"
#include "probe.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace trimaran {
namespace {

void check(int threads, int samples) {
  if (threads < 1 || samples < 1)
    throw std::invalid_argument("threads is " + std::to_string(threads) + " and samples " +
                                std::to_string(samples) + "; both must be at least 1");
}

std::vector<double> operations(const std::string& isa, const std::string& name, int threads,
                               int samples, double seconds) {
  check(threads, samples);
  return probe_operations(isa_from_name(isa), name, threads, samples, seconds);
}

std::vector<double> reads(const std::string& isa, std::size_t bytes, int threads, int samples,
                          double seconds) {
  check(threads, samples);
  if (bytes == 0) throw std::invalid_argument("bytes is 0; it must be at least 1");
  return probe_reads(isa_from_name(isa), bytes, threads, samples, seconds);
}

}  // namespace

void bind_probe(nb::module_& module) {
  using Released = nb::call_guard<nb::gil_scoped_release>;
  module.def(
      "probe_names", [](const std::string& isa) { return probe_names(isa_from_name(isa)); },
      "isa"_a);
  module.def("probe_operations", &operations, "isa"_a, "name"_a, "threads"_a, "samples"_a,
             "seconds"_a, Released());
  module.def("probe_reads", &reads, "isa"_a, "bytes"_a, "threads"_a, "samples"_a, "seconds"_a,
             Released());
}

}  // namespace trimaran
