// Choosing and scoring tokens from logits, many rows at once, without sorting a vocabulary.
//
// Tokens are ranked by (logit descending, id ascending), and every filter keeps a prefix of
// that ranking, so what is kept is named by the last token kept: a Cut. A first pass takes
// the maxima of small blocks of the row. The n-th largest of them is a lower bound of the
// n-th largest logit, so the few tokens that can matter are collected from the few blocks
// that hold them, and only those are selected from exactly. For top-p, tokens that all
// together can't weigh as much as what it cuts off are left out in the same way.
//
// Weights are float32 (relative error about 1e-7), sums of weights float64 in one order,
// without fused operations: every instruction set gives the same bits.
#pragma once

#include <cstddef>
#include <cstdint>
#include <stdexcept>
#include <vector>

#include "thread_pool.h"

namespace trimaran {

struct SamplerError : std::runtime_error {
  using std::runtime_error::runtime_error;
};

// The last token kept: those with a larger logit are kept, and those with an equal one and
// an id up to this.
struct Cut {
  float logit;
  std::int32_t id;
};

// weight(logit) = 2^((logit - peak) * (high + low)), (high + low) = log2(e) / temperature.
struct WeightScale {
  float peak;
  float high;
  float low;
};

constexpr int kScanLanes = 16;   // a scan block: every 16th of 1,024 logits
constexpr int kScanSpan = 1024;
constexpr int kMassBlock = 256;  // consecutive logits whose weights are summed at once

constexpr int scan_blocks(int vocab) {
  return (vocab + kScanSpan - 1) / kScanSpan * kScanLanes;
}
constexpr int mass_blocks(int vocab) { return (vocab + kMassBlock - 1) / kMassBlock; }

struct Candidate {
  float logit;
  float weight;
  std::int32_t id;
};

// Passes over a whole row, compiled for each tier.
struct SamplerKernels {
  // Maxima of the scan blocks (-inf where empty). False if any logit is NaN.
  bool (*scan)(const float* row, int vocab, float* maxima);
  // Tokens of the blocks with maxima of at least `bound` whose logit is too, weights not set;
  // in an order that depends on nothing else. Returns their number, and stops at `room`.
  int (*collect)(const float* row, int vocab, const float* maxima, float bound, int room,
                 Candidate* candidates);
  // Weights of `count` logits; 0 below 2^-126.
  void (*weights)(const float* logits, int count, const WeightScale& scale, float* weights);
  // Sums of the weights of the tokens that `cut` keeps, by mass block.
  void (*masses)(const float* row, int vocab, const Cut& cut, const WeightScale& scale,
                 double* masses);
  // Tokens that rank before `token`.
  int (*rank)(const float* row, int vocab, std::int32_t token);
};

// Arrays of core/sampling_batch.py's SamplingBatch, and the logits.
struct ChoiceBatch {
  const float* logits = nullptr;  // [rows][vocab]
  std::int64_t logit_rows = 0;
  int vocab = 0;
  int count = 0;  // choices
  const std::int32_t* rows = nullptr;
  const float* temperature = nullptr;
  const std::int32_t* top_k = nullptr;
  const float* top_p = nullptr;
  const float* min_p = nullptr;
  const double* uniforms = nullptr;
  const std::int32_t* adjust_starts = nullptr;  // [count + 1]
  std::int32_t adjustments = 0;                 // of all choices
  const std::int32_t* adjust_ids = nullptr;
  const float* adjust_bias = nullptr;
  const float* adjust_repetition = nullptr;
  const float* adjust_penalty = nullptr;
};

// One thread's memory, kept between calls.
struct SamplerScratch {
  struct Bucket {
    double mass;
    std::int64_t count;
  };
  std::vector<float> adjusted;
  std::vector<float> maxima;
  std::vector<float> sorted_maxima;
  std::vector<double> masses;
  std::vector<float> logits;
  std::vector<float> weights;
  std::vector<Candidate> found;  // what a pass collected, and room for more
  std::vector<Candidate> candidates;
  std::vector<Bucket> buckets;
};

// tokens[count]; rows are shared out to the threads of `pool` if there is one, with memory in
// `scratch` for each. Throws SamplerError: shapes or ids out of range, or the first choice of a
// row with a NaN, or without a token allowed.
void choose_tokens(const SamplerKernels& kernels, const ChoiceBatch& batch, ThreadPool* pool,
                   std::vector<SamplerScratch>& scratch, std::int32_t* tokens);

// Arrays of core/sampling_batch.py's Scores, and what they are asked of.
struct ScoreBatch {
  const float* logits = nullptr;  // [rows][vocab]
  std::int64_t logit_rows = 0;
  int vocab = 0;
  int count = 0;
  int top = 0;
  const std::int32_t* rows = nullptr;
  const std::int32_t* tokens = nullptr;
  float* logprobs = nullptr;       // [count]
  std::int32_t* ranks = nullptr;   // [count]
  std::int32_t* top_ids = nullptr;  // [count][top]
  float* top_logprobs = nullptr;   // [count][top]
};

// Likewise.
void score_tokens(const SamplerKernels& kernels, const ScoreBatch& batch, ThreadPool* pool,
                  std::vector<SamplerScratch>& scratch);

}  // namespace trimaran
