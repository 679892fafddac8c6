#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/string.h>

#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "bindings.h"
#include "sampler.h"
#include "tier.h"

namespace nb = nanobind;

namespace trimaran {
namespace {

template <class T, int Dimensions>
using Array = nb::ndarray<T, nb::ndim<Dimensions>, nb::c_contig, nb::device::cpu>;

void check_length(const char* name, std::size_t length, std::size_t wanted) {
  if (length != wanted)
    throw SamplerError(std::string(name) + " has " + std::to_string(length) +
                       " entries, not " + std::to_string(wanted));
}

// The kernels of a tier, the threads of an executor and the memory that calls reuse; one caller
// at a time, and not while the executor runs.
class Sampler {
 public:
  Sampler(const std::string& isa, std::shared_ptr<ThreadPool> pool)
      : kernels_(*find_tier(isa).sampler),
        pool_(std::move(pool)),
        scratch_(pool_ ? pool_->size() : 1) {}

  void choose(Array<const float, 2> logits, Array<const std::int32_t, 1> rows,
              Array<const float, 1> temperature, Array<const std::int32_t, 1> top_k,
              Array<const float, 1> top_p, Array<const float, 1> min_p,
              Array<const double, 1> uniforms, Array<const std::int32_t, 1> adjust_starts,
              Array<const std::int32_t, 1> adjust_ids, Array<const float, 1> adjust_bias,
              Array<const float, 1> adjust_repetition, Array<const float, 1> adjust_penalty,
              Array<std::int32_t, 1> tokens) {
    const std::size_t count = rows.size();
    check_length("temperature", temperature.size(), count);
    check_length("top_k", top_k.size(), count);
    check_length("top_p", top_p.size(), count);
    check_length("min_p", min_p.size(), count);
    check_length("uniforms", uniforms.size(), count);
    check_length("tokens", tokens.size(), count);
    check_length("adjust_starts", adjust_starts.size(), count + 1);
    check_length("adjust_bias", adjust_bias.size(), adjust_ids.size());
    check_length("adjust_repetition", adjust_repetition.size(), adjust_ids.size());
    check_length("adjust_penalty", adjust_penalty.size(), adjust_ids.size());
    ChoiceBatch batch;
    batch.logits = logits.data();
    batch.logit_rows = static_cast<std::int64_t>(logits.shape(0));
    batch.vocab = static_cast<int>(logits.shape(1));
    batch.count = static_cast<int>(count);
    batch.rows = rows.data();
    batch.temperature = temperature.data();
    batch.top_k = top_k.data();
    batch.top_p = top_p.data();
    batch.min_p = min_p.data();
    batch.uniforms = uniforms.data();
    batch.adjust_starts = adjust_starts.data();
    batch.adjustments = static_cast<std::int32_t>(adjust_ids.size());
    batch.adjust_ids = adjust_ids.data();
    batch.adjust_bias = adjust_bias.data();
    batch.adjust_repetition = adjust_repetition.data();
    batch.adjust_penalty = adjust_penalty.data();
    std::int32_t* out = tokens.data();
    nb::gil_scoped_release unlocked;
    choose_tokens(kernels_, batch, pool_.get(), scratch_, out);
  }

  void score(Array<const float, 2> logits, Array<const std::int32_t, 1> rows,
             Array<const std::int32_t, 1> tokens, Array<float, 1> logprobs,
             Array<std::int32_t, 1> ranks, Array<std::int32_t, 2> top_ids,
             Array<float, 2> top_logprobs) {
    const std::size_t count = rows.size(), top = top_ids.shape(1);
    check_length("tokens", tokens.size(), count);
    check_length("logprobs", logprobs.size(), count);
    check_length("ranks", ranks.size(), count);
    check_length("top_ids", top_ids.size(), count * top);
    check_length("top_logprobs", top_logprobs.size(), count * top);
    ScoreBatch batch;
    batch.logits = logits.data();
    batch.logit_rows = static_cast<std::int64_t>(logits.shape(0));
    batch.vocab = static_cast<int>(logits.shape(1));
    batch.count = static_cast<int>(count);
    batch.top = static_cast<int>(top);
    batch.rows = rows.data();
    batch.tokens = tokens.data();
    batch.logprobs = logprobs.data();
    batch.ranks = ranks.data();
    batch.top_ids = top_ids.data();
    batch.top_logprobs = top_logprobs.data();
    nb::gil_scoped_release unlocked;
    score_tokens(kernels_, batch, pool_.get(), scratch_);
  }

 private:
  const SamplerKernels& kernels_;
  const std::shared_ptr<ThreadPool> pool_;
  std::vector<SamplerScratch> scratch_;  // one a thread
};

}  // namespace

void bind_sampler(nb::module_& module) {
  nb::exception<SamplerError>(module, "SamplerError", PyExc_RuntimeError);
  nb::class_<Sampler>(module, "Sampler")
      .def(nb::init<const std::string&, std::shared_ptr<ThreadPool>>(), nb::arg("isa"),
           nb::arg("pool").none() = nb::none())
      .def("choose", &Sampler::choose)
      .def("score", &Sampler::score);
}

}  // namespace trimaran
