// Operations on rows by themselves, for their tests.
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/string.h>

#include <stdexcept>
#include <string>

#include "bindings.h"
#include "thread_pool.h"
#include "tier.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace trimaran {
namespace {

template <class T, int Dimensions>
using Array = nb::ndarray<T, nb::ndim<Dimensions>, nb::c_contig, nb::device::cpu>;

void expect(bool fits) {
  if (!fits) throw std::invalid_argument("shapes don't fit");
}

void rms_norm(const std::string& isa, Array<const float, 1> x, Array<const float, 1> weight,
              float eps, Array<float, 1> out) {
  expect(weight.size() == x.size() && out.size() == x.size());
  find_tier(isa).rms_norm(x.data(), weight.data(), static_cast<int>(x.size()), eps, out.data());
}

void rope(const std::string& isa, Array<float, 2> heads, Array<const float, 1> cosines,
          Array<const float, 1> sines) {
  expect(cosines.size() == sines.size() && 2 * cosines.size() <= heads.shape(1));
  find_tier(isa).rope(heads.data(), static_cast<int>(heads.shape(0)),
                      static_cast<int>(heads.shape(1)), static_cast<int>(cosines.size()),
                      cosines.data(), sines.data());
}

void silu_mul(const std::string& isa, Array<const float, 1> gate, Array<const float, 1> up,
              Array<float, 1> out) {
  expect(gate.size() == out.size() && up.size() == out.size());
  find_tier(isa).silu_mul(gate.data(), up.data(), static_cast<int>(out.size()), out.data());
}

void gelu_mul(const std::string& isa, Array<const float, 1> gate, Array<const float, 1> up,
              Array<float, 1> out) {
  expect(gate.size() == out.size() && up.size() == out.size());
  find_tier(isa).gelu_mul(gate.data(), up.data(), static_cast<int>(out.size()), out.data());
}

void add(const std::string& isa, Array<const float, 1> a, Array<const float, 1> b,
         Array<float, 1> out) {
  expect(a.size() == out.size() && b.size() == out.size());
  find_tier(isa).add(a.data(), b.data(), static_cast<int>(out.size()), out.data());
}

// Has each of `threads` threads count up `rounds` times between barriers; returns whether
// all were always seen to agree. Throws on one thread where `fail` names it.
bool meet(int threads, int rounds, int fail) {
  struct Meeting {
    ThreadPool pool;
    std::vector<int> counts;
    int rounds, fail;
    std::atomic<bool> agreed{true};
  };
  Meeting meeting{ThreadPool(threads), std::vector<int>(threads), rounds, fail};
  nb::gil_scoped_release released;
  meeting.pool.run(
      [](void* context, int thread) {
        auto& meeting = *static_cast<Meeting*>(context);
        for (int round = 1; round <= meeting.rounds; ++round) {
          meeting.counts[thread] = round;
          meeting.pool.barrier().wait();
          for (int count : meeting.counts)
            if (count != round) meeting.agreed = false;
          meeting.pool.barrier().wait();
        }
        if (thread == meeting.fail) throw std::runtime_error("thread " + std::to_string(thread));
      },
      &meeting);
  return meeting.agreed;
}

}  // namespace

void bind_rows(nb::module_& module) {
  module.def("rms_norm", &rms_norm, "isa"_a, "x"_a, "weight"_a, "eps"_a, "out"_a);
  module.def("rope", &rope, "isa"_a, "heads"_a, "cosines"_a, "sines"_a);
  module.def("silu_mul", &silu_mul, "isa"_a, "gate"_a, "up"_a, "out"_a);
  module.def("gelu_mul", &gelu_mul, "isa"_a, "gate"_a, "up"_a, "out"_a);
  module.def("add", &add, "isa"_a, "a"_a, "b"_a, "out"_a);
  module.def("meet", &meet, "threads"_a, "rounds"_a, "fail"_a = -1);
}

}  // namespace trimaran
