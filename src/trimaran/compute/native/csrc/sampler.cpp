#include "sampler.h"

#include <algorithm>
#include <atomic>
#include <cfloat>
#include <cmath>
#include <cstring>
#include <limits>
#include <mutex>
#include <string>

namespace trimaran {
namespace {

constexpr float kForbidden = -std::numeric_limits<float>::infinity();
constexpr Cut kEveryToken = {-FLT_MAX, std::numeric_limits<std::int32_t>::max()};
constexpr std::size_t kFewTokens = 256;  // among which top-p is tried first
constexpr int kManyTokens = 16384;       // that are selected from one by one

bool ranks_before(const Candidate& a, const Candidate& b) {
  return a.logit > b.logit || (a.logit == b.logit && a.id < b.id);
}

bool keeps(const Cut& cut, float logit, std::int32_t id) {
  return logit > cut.logit || (logit == cut.logit && id <= cut.id);
}

WeightScale weight_scale(float peak, double temperature) {
  const double factor = 1.4426950408889634 / temperature;
  const auto high = static_cast<float>(factor);
  return {peak, high, static_cast<float>(factor - high)};
}

// One row of logits with the maxima of its blocks.
struct Row {
  const float* logits;
  int vocab;
  float peak;
  const float* maxima;
};

Row scan(const SamplerKernels& kernels, const float* logits, int vocab, std::int64_t number,
         SamplerScratch& scratch) {
  scratch.maxima.resize(scan_blocks(vocab));
  if (!kernels.scan(logits, vocab, scratch.maxima.data()))
    throw SamplerError("the logits of row " + std::to_string(number) +
                       " are not numbers (NaN)");
  const float peak = *std::max_element(scratch.maxima.begin(), scratch.maxima.end());
  if (peak == kForbidden)
    throw SamplerError("no token is allowed in row " + std::to_string(number) +
                       ": every logit is -inf");
  if (std::isinf(peak))
    throw SamplerError("a logit of row " + std::to_string(number) + " is infinite");
  return {logits, vocab, peak, scratch.maxima.data()};
}

// The lowest id among the largest logits.
std::int32_t most_likely(const Row& row) {
  int block = 0;
  while (row.maxima[block] != row.peak) ++block;
  int id = block / kScanLanes * kScanSpan;
  while (row.logits[id] != row.peak) ++id;
  return id;
}

// A lower bound of the n-th largest logit: the n-th largest block maximum. -FLT_MAX where
// there are fewer blocks (then tokens that are not forbidden are the bound).
float nth_bound(const Row& row, std::size_t n, SamplerScratch& scratch) {
  std::vector<float>& sorted = scratch.sorted_maxima;
  sorted.assign(row.maxima, row.maxima + scan_blocks(row.vocab));
  if (n > sorted.size()) return -FLT_MAX;
  std::nth_element(sorted.begin(), sorted.begin() + (n - 1), sorted.end(),
                   [](float a, float b) { return a > b; });
  return std::max(sorted[n - 1], -FLT_MAX);
}

// The tokens whose logit is at least `bound` become the candidates, weights not yet set. False
// if there are more than `most`.
bool collect(const SamplerKernels& kernels, const Row& row, float bound, int most,
             SamplerScratch& scratch) {
  std::vector<Candidate>& found = scratch.found;
  const int room = most < row.vocab ? most + 1 : row.vocab;
  if (found.size() < static_cast<std::size_t>(room)) found.resize(room);
  const int count =
      kernels.collect(row.logits, row.vocab, row.maxima, bound, room, found.data());
  if (count > most) return false;
  scratch.candidates.assign(found.begin(), found.begin() + count);
  return true;
}

void set_weights(const SamplerKernels& kernels, const WeightScale& scale,
                 SamplerScratch& scratch) {
  const std::size_t count = scratch.candidates.size();
  scratch.logits.resize(count);
  scratch.weights.resize(count);
  for (std::size_t i = 0; i < count; ++i) scratch.logits[i] = scratch.candidates[i].logit;
  kernels.weights(scratch.logits.data(), static_cast<int>(count), scale,
                  scratch.weights.data());
  for (std::size_t i = 0; i < count; ++i) scratch.candidates[i].weight = scratch.weights[i];
}

double mass_of(const std::vector<Candidate>& candidates) {
  double mass = 0.0;
  for (const Candidate& candidate : candidates) mass += candidate.weight;
  return mass;
}

// Keeps the k candidates that rank first.
void keep_first(std::vector<Candidate>& candidates, std::size_t k) {
  if (candidates.size() <= k) return;
  std::nth_element(candidates.begin(), candidates.begin() + (k - 1), candidates.end(),
                   ranks_before);
  candidates.resize(k);
}

// Keeps the shortest prefix of the ranking whose mass reaches `target`: quickselect by mass
// instead of by count. Where bad pivots add up, the rest is sorted.
void keep_mass(std::vector<Candidate>& candidates, double target) {
  auto low = candidates.begin(), high = candidates.end();
  double before = 0.0;  // mass of what ranks before `low`
  for (int round = 0; high - low > 32 && round < 64; ++round) {
    auto middle = low + (high - low) / 2, last = high - 1;
    if (ranks_before(*middle, *low)) std::iter_swap(middle, low);
    if (ranks_before(*last, *low)) std::iter_swap(last, low);
    if (ranks_before(*last, *middle)) std::iter_swap(last, middle);
    const Candidate pivot = *middle;
    double mass = before;
    const auto cut = std::partition(low, high, [&](const Candidate& candidate) {
      const bool first = ranks_before(candidate, pivot);
      if (first) mass += candidate.weight;
      return first;
    });
    if (mass >= target) {
      high = cut;
    } else {
      before = mass;
      low = cut;
    }
  }
  std::sort(low, high, ranks_before);
  while (low != high) {
    before += low->weight;
    ++low;
    if (before >= target) break;
  }
  candidates.erase(low, candidates.end());
}

// The first kept token, in order of id, at which the cumulated mass exceeds `target`.
std::int32_t pick_sorted(std::vector<Candidate>& kept, double uniform) {
  std::sort(kept.begin(), kept.end(),
            [](const Candidate& a, const Candidate& b) { return a.id < b.id; });
  const double target = uniform * mass_of(kept);
  double mass = 0.0;
  std::int32_t token = kept.front().id;
  for (const Candidate& candidate : kept) {
    if (candidate.weight == 0.0f) continue;
    token = candidate.id;  // the last one with weight, should rounding leave mass <= target
    mass += candidate.weight;
    if (mass > target) break;
  }
  return token;
}

double row_mass(const SamplerKernels& kernels, const Row& row, const Cut& cut,
                const WeightScale& scale, SamplerScratch& scratch) {
  scratch.masses.resize(mass_blocks(row.vocab));
  kernels.masses(row.logits, row.vocab, cut, scale, scratch.masses.data());
  double total = 0.0;
  for (const double mass : scratch.masses) total += mass;
  return total;
}

// The same over a whole row: by blocks, then within one.
std::int32_t pick_in_row(const SamplerKernels& kernels, const Row& row, const Cut& cut,
                         const WeightScale& scale, double uniform, SamplerScratch& scratch) {
  const double total = row_mass(kernels, row, cut, scale, scratch);
  double target = uniform * total, before = 0.0;
  std::size_t block = 0, last = 0;
  for (; block < scratch.masses.size(); ++block) {
    if (scratch.masses[block] > 0.0) last = block;
    if (before + scratch.masses[block] > target) break;
    before += scratch.masses[block];
  }
  if (block == scratch.masses.size()) {  // rounding left the target at the total
    block = last;
    target = total + 1.0;
    before = 0.0;
  }
  const int start = static_cast<int>(block) * kMassBlock;
  const int count = std::min(kMassBlock, row.vocab - start);
  float weights[kMassBlock];
  kernels.weights(row.logits + start, count, scale, weights);
  std::int32_t token = start;
  for (int i = 0; i < count; ++i) {
    if (weights[i] == 0.0f || !keeps(cut, row.logits[start + i], start + i)) continue;
    token = start + i;
    before += weights[i];
    if (before > target) break;
  }
  return token;
}

// Buckets of the distance from the peak, 16 to each doubling of it.
constexpr int kBucketShift = 19;
constexpr std::size_t kBuckets = (0x7f800000u >> kBucketShift) + 1;

std::size_t bucket_of(float peak, float logit) {
  const float distance = peak - logit;
  std::uint32_t bits;
  std::memcpy(&bits, &distance, sizeof bits);
  bits &= 0x7fffffffu;  // -0, where the peak is -0 and the logit 0
  return bits >> kBucketShift;
}

// The last token of the shortest prefix of what `within` keeps that has `count` tokens, or
// reaches `mass`, whichever comes first.
Cut bucket_cut(const SamplerKernels& kernels, const Row& row, const Cut& within,
               const WeightScale& scale, std::int64_t count, double mass,
               SamplerScratch& scratch) {
  scratch.weights.resize(row.vocab);
  kernels.weights(row.logits, row.vocab, scale, scratch.weights.data());
  scratch.buckets.assign(kBuckets, {0.0, 0});
  for (int id = 0; id < row.vocab; ++id) {
    if (!keeps(within, row.logits[id], id)) continue;
    SamplerScratch::Bucket& bucket = scratch.buckets[bucket_of(row.peak, row.logits[id])];
    bucket.mass += scratch.weights[id];
    ++bucket.count;
  }
  std::size_t last = 0;
  for (; last < kBuckets; ++last) {
    const SamplerScratch::Bucket& bucket = scratch.buckets[last];
    if (bucket.count >= count || bucket.mass >= mass) break;
    count -= bucket.count;
    mass -= bucket.mass;
  }
  if (last == kBuckets) return within;
  std::vector<Candidate>& candidates = scratch.candidates;
  candidates.clear();
  for (int id = 0; id < row.vocab; ++id)
    if (bucket_of(row.peak, row.logits[id]) == last && keeps(within, row.logits[id], id))
      candidates.push_back({row.logits[id], scratch.weights[id], id});
  keep_first(candidates, static_cast<std::size_t>(std::min<std::int64_t>(count, row.vocab)));
  keep_mass(candidates, mass);
  const Candidate& least =
      *std::max_element(candidates.begin(), candidates.end(), ranks_before);
  return {least.logit, least.id};
}

// The least logit whose weight is at least `weight`, where the most likely token's is 1.
float least_logit(float peak, double weight, double temperature) {
  const double bound = peak + temperature * std::log(weight);
  auto rounded = static_cast<float>(std::max<double>(bound, -FLT_MAX));
  if (rounded < bound) rounded = std::nextafter(rounded, FLT_MAX);
  return rounded;
}

// What a choice asks for, in terms of the row.
struct Filter {
  double temperature;
  WeightScale scale;
  int top_k;    // 0: all
  double top_p;
  float least;  // logit, by min-p
  double uniform;
};

Filter filter_of(const ChoiceBatch& batch, int choice, const Row& row) {
  const double temperature = batch.temperature[choice], min_p = batch.min_p[choice];
  const int top_k = batch.top_k[choice];
  return {temperature, weight_scale(row.peak, temperature), top_k < row.vocab ? top_k : 0,
          batch.top_p[choice], min_p > 0.0 ? least_logit(row.peak, min_p, temperature) : -FLT_MAX,
          batch.uniforms[choice]};
}

// Whether the shortest prefix of the ranking that has `top_p` of the mass was found among a
// few tokens; then it is the candidates.
bool keep_few_by_mass(const SamplerKernels& kernels, const Row& row, const Filter& filter,
                      double total, SamplerScratch& scratch) {
  // Tokens below the second bound have less than half of what is cut off, all together.
  const double least = 0.5 * (1.0 - filter.top_p) * total / row.vocab;
  const std::size_t few = std::min<std::size_t>(kFewTokens, scan_blocks(row.vocab));
  for (const float bound : {nth_bound(row, few, scratch),
                            least_logit(row.peak, least, filter.temperature)}) {
    if (!collect(kernels, row, bound, kManyTokens, scratch)) return false;
    set_weights(kernels, filter.scale, scratch);
    if (mass_of(scratch.candidates) < filter.top_p * total) continue;
    keep_mass(scratch.candidates, filter.top_p * total);
    return true;
  }
  return false;
}

// Whether what the filters but min-p keep was found among a few tokens; then it is the
// candidates. Tokens that min-p drops may be missing where it is the only filter.
bool keep_few(const SamplerKernels& kernels, const Row& row, const Filter& filter,
              double total, SamplerScratch& scratch) {
  if (filter.top_k == 0 && filter.top_p < 1.0)
    return keep_few_by_mass(kernels, row, filter, total, scratch);
  if (filter.top_k == 0) {
    if (!collect(kernels, row, filter.least, static_cast<int>(kFewTokens), scratch)) return false;
    set_weights(kernels, filter.scale, scratch);
    return true;
  }
  if (filter.top_k > scan_blocks(row.vocab)) return false;
  collect(kernels, row, nth_bound(row, filter.top_k, scratch), row.vocab, scratch);
  keep_first(scratch.candidates, filter.top_k);
  set_weights(kernels, filter.scale, scratch);
  if (filter.top_p < 1.0)
    keep_mass(scratch.candidates, filter.top_p * mass_of(scratch.candidates));
  return true;
}

std::int32_t sample(const SamplerKernels& kernels, const Row& row, const Filter& filter,
                    SamplerScratch& scratch) {
  const double total = filter.top_k == 0 && filter.top_p < 1.0
                           ? row_mass(kernels, row, kEveryToken, filter.scale, scratch)
                           : 0.0;
  if (keep_few(kernels, row, filter, total, scratch)) {
    std::vector<Candidate>& kept = scratch.candidates;
    kept.erase(std::remove_if(kept.begin(), kept.end(),
                              [&](const Candidate& c) { return c.logit < filter.least; }),
               kept.end());
    return pick_sorted(kept, filter.uniform);
  }
  constexpr double kAnyMass = std::numeric_limits<double>::infinity();
  Cut cut = kEveryToken;
  if (filter.top_k > 0)
    cut = bucket_cut(kernels, row, cut, filter.scale, filter.top_k, kAnyMass, scratch);
  if (filter.top_p < 1.0) {
    const double mass =
        filter.top_k > 0 ? row_mass(kernels, row, cut, filter.scale, scratch) : total;
    cut = bucket_cut(kernels, row, cut, filter.scale, row.vocab, filter.top_p * mass, scratch);
  }
  if (cut.logit < filter.least) cut = {filter.least, kEveryToken.id};
  return pick_in_row(kernels, row, cut, filter.scale, filter.uniform, scratch);
}

// The row with the choice's adjustments: a copy, unless there are none.
const float* adjusted_row(const ChoiceBatch& batch, int choice, SamplerScratch& scratch) {
  const float* row = batch.logits + static_cast<std::int64_t>(batch.rows[choice]) * batch.vocab;
  const int begin = batch.adjust_starts[choice], end = batch.adjust_starts[choice + 1];
  if (begin == end) return row;
  scratch.adjusted.assign(row, row + batch.vocab);
  for (int i = begin; i < end; ++i) {
    float value = row[batch.adjust_ids[i]] + batch.adjust_bias[i];
    value = value > 0.0f ? value / batch.adjust_repetition[i] : value * batch.adjust_repetition[i];
    scratch.adjusted[batch.adjust_ids[i]] = value - batch.adjust_penalty[i];
  }
  return scratch.adjusted.data();
}

void check_row(std::int32_t row, std::int64_t rows) {
  if (row < 0 || row >= rows)
    throw SamplerError("row " + std::to_string(row) + " is outside the " +
                       std::to_string(rows) + " rows of logits");
}

void check_token(std::int32_t token, int vocab) {
  if (token < 0 || token >= vocab)
    throw SamplerError("token " + std::to_string(token) + " is outside the vocabulary of " +
                       std::to_string(vocab));
}

void check_choices(const ChoiceBatch& batch) {
  if (batch.vocab < 1 && batch.count > 0) throw SamplerError("the logits have no columns");
  std::int32_t end = 0;
  for (int i = 0; i < batch.count; ++i) {
    check_row(batch.rows[i], batch.logit_rows);
    if (!(batch.temperature[i] >= 0.0f))
      throw SamplerError("the temperature of choice " + std::to_string(i) +
                         " is not a number >= 0");
    if (batch.adjust_starts[i] < end || batch.adjust_starts[i + 1] < batch.adjust_starts[i] ||
        batch.adjust_starts[i + 1] > batch.adjustments)
      throw SamplerError("the adjustments of choice " + std::to_string(i) +
                         " begin or end outside the " + std::to_string(batch.adjustments));
    end = batch.adjust_starts[i + 1];
  }
  for (std::int32_t i = 0; i < batch.adjustments; ++i)
    check_token(batch.adjust_ids[i], batch.vocab);
}

void check_scores(const ScoreBatch& batch) {
  if (batch.top < 0 || (batch.count > 0 && batch.top > batch.vocab))
    throw SamplerError(std::to_string(batch.top) + " most likely tokens of a vocabulary of " +
                       std::to_string(batch.vocab));
  for (int i = 0; i < batch.count; ++i) {
    check_row(batch.rows[i], batch.logit_rows);
    check_token(batch.tokens[i], batch.vocab);
  }
}

// One row of scores.
void score(const SamplerKernels& kernels, const ScoreBatch& batch, int index,
           SamplerScratch& scratch) {
  const float* logits = batch.logits + static_cast<std::int64_t>(batch.rows[index]) * batch.vocab;
  const Row row = scan(kernels, logits, batch.vocab, batch.rows[index], scratch);
  const WeightScale scale = weight_scale(row.peak, 1.0);
  const double log_mass = std::log(row_mass(kernels, row, kEveryToken, scale, scratch));
  const auto logprob = [&](float logit) {
    return static_cast<float>(static_cast<double>(logit) - row.peak - log_mass);
  };
  batch.logprobs[index] = logprob(logits[batch.tokens[index]]);
  batch.ranks[index] = 1 + kernels.rank(logits, batch.vocab, batch.tokens[index]);
  if (batch.top == 0) return;
  std::vector<Candidate>& likely = scratch.candidates;
  collect(kernels, row, nth_bound(row, batch.top, scratch), row.vocab, scratch);
  if (likely.size() < static_cast<std::size_t>(batch.top))
    collect(kernels, row, kForbidden, row.vocab, scratch);
  keep_first(likely, batch.top);
  std::sort(likely.begin(), likely.end(), ranks_before);
  for (int j = 0; j < batch.top; ++j) {
    const std::int64_t at = static_cast<std::int64_t>(index) * batch.top + j;
    batch.top_ids[at] = likely[j].id;
    batch.top_logprobs[at] = logprob(likely[j].logit);
  }
}

// Calls job(index, scratch) for indices up to `count`, on the threads of `pool` if there is
// one. Throws what the least index threw, whoever came to it first.
template <class Job>
struct Share {
  Share(int count, std::vector<SamplerScratch>& scratch, const Job& job)
      : count(count), scratch(scratch), job(job) {}

  const int count;
  std::vector<SamplerScratch>& scratch;
  const Job& job;
  std::atomic<int> next{0};
  std::mutex mutex;  // of what follows
  int failed = std::numeric_limits<int>::max();
  std::exception_ptr error;

  void work(int thread) {
    for (int index = next++; index < count; index = next++) {
      try {
        job(index, scratch[thread]);
      } catch (...) {
        std::lock_guard<std::mutex> lock(mutex);
        if (index > failed) continue;
        failed = index;
        error = std::current_exception();
      }
    }
  }
};

template <class Job>
void share(ThreadPool* pool, int count, std::vector<SamplerScratch>& scratch, const Job& job) {
  Share<Job> all(count, scratch, job);
  if (pool && count > 1)
    pool->share([](void* all, int thread) { static_cast<Share<Job>*>(all)->work(thread); }, &all);
  else
    all.work(0);
  if (all.error) std::rethrow_exception(all.error);
}

}  // namespace

void choose_tokens(const SamplerKernels& kernels, const ChoiceBatch& batch, ThreadPool* pool,
                   std::vector<SamplerScratch>& scratch, std::int32_t* tokens) {
  check_choices(batch);
  share(pool, batch.count, scratch, [&](int choice, SamplerScratch& own) {
    const float* logits = adjusted_row(batch, choice, own);
    const Row row = scan(kernels, logits, batch.vocab, batch.rows[choice], own);
    tokens[choice] = batch.temperature[choice] == 0.0f
                         ? most_likely(row)
                         : sample(kernels, row, filter_of(batch, choice, row), own);
  });
}

void score_tokens(const SamplerKernels& kernels, const ScoreBatch& batch, ThreadPool* pool,
                  std::vector<SamplerScratch>& scratch) {
  check_scores(batch);
  share(pool, batch.count, scratch,
        [&](int index, SamplerScratch& own) { score(kernels, batch, index, own); });
}

}  // namespace trimaran
