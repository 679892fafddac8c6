#include "probe.h"

#include <chrono>
#include <cstring>
#include <stdexcept>

#include "memory.h"
#include "thread_pool.h"

namespace trimaran {
namespace {

constexpr std::size_t kReadUnit = 512;  // bytes of one turn of a reading loop

double now() {
  return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch())
      .count();
}

// Work that can be done `times` over; what it returns is summed over threads.
template <class Work>
struct Job {
  Work& work;
  ThreadPool& pool;
  long times = 1;
  double seconds = 0;
  std::vector<double> done = {};  // by thread

  static void run(void* context, int thread) {
    Job& job = *static_cast<Job*>(context);
    job.pool.barrier().wait();
    const double start = now();
    job.done[thread] = job.work(thread, job.times);
    job.pool.barrier().wait();
    if (thread == 0) job.seconds = now() - start;
  }
};

// Amounts a second; the number of times is doubled until one sample is long enough.
template <class Work>
std::vector<double> sample(ThreadPool& pool, int samples, double seconds, Work work) {
  Job<Work> job{work, pool};
  job.done.assign(pool.size(), 0.0);
  for (;;) {
    pool.run(Job<Work>::run, &job);
    if (job.seconds >= seconds) break;
    job.times *= 2;
  }
  std::vector<double> rates;
  for (int i = 0; i < samples; ++i) {
    pool.run(Job<Work>::run, &job);
    double amount = 0;
    for (double part : job.done) amount += part;
    rates.push_back(amount / job.seconds);
  }
  return rates;
}

ProbeLoop find_loop(Isa isa, const std::string& name) {
  const ProbeTier& tier = probe_tier(isa);
  if (name == "int8") return tier.int8;
  if (name == "bf16") return isa == Isa::kAvx512 && !has_avx512_bf16() ? nullptr : tier.bf16;
  if (name == "f32") return tier.f32;
  return nullptr;
}

}  // namespace

const ProbeTier& probe_tier(Isa isa) {
#if defined(__x86_64__)
  switch (isa) {
    case Isa::kAvx2: return kProbeAvx2;
    case Isa::kAvx512: return kProbeAvx512;
    case Isa::kAmx: return kProbeAmx;
    default: break;
  }
#endif
  (void)isa;
  return kProbePortable;
}

std::vector<std::string> probe_names(Isa isa) {
  std::vector<std::string> names;
  for (const char* name : {"int8", "bf16", "f32"})
    if (find_loop(isa, name) != nullptr) names.emplace_back(name);
  return names;
}

std::vector<double> probe_operations(Isa isa, const std::string& name, int threads, int samples,
                                     double seconds) {
  const ProbeLoop loop = find_loop(isa, name);
  if (loop == nullptr)
    throw std::invalid_argument(std::string(isa_name(isa)) + " has no loop in " + name);
  ThreadPool pool(threads);
  constexpr long kRounds = 1000;
  return sample(pool, samples, seconds, [&](int, long times) { return loop(kRounds * times); });
}

std::vector<double> probe_reads(Isa isa, std::size_t bytes, int threads, int samples,
                                double seconds) {
  ThreadPool pool(threads);
  const ProbeTier& tier = probe_tier(isa);
  const std::size_t units = bytes / kReadUnit + (bytes % kReadUnit != 0);
  const Memory memory(units * kReadUnit);
  const auto part = [&](int thread) {
    return memory.as<std::uint8_t>() + units * thread / threads * kReadUnit;
  };
  // Pages belong to the thread that reads them, and none is the shared page of zeros.
  struct Fill {
    decltype(part)& of;
    static void run(void* context, int thread) {
      const Fill& fill = *static_cast<Fill*>(context);
      std::memset(fill.of(thread), thread + 1, fill.of(thread + 1) - fill.of(thread));
    }
  } fill{part};
  pool.run(Fill::run, &fill);
  std::vector<std::uint64_t> sums(threads * 8);  // on lines of their own
  return sample(pool, samples, seconds, [&](int thread, long times) {
    const std::uint8_t* begin = part(thread);
    const std::size_t size = part(thread + 1) - begin;
    for (long i = 0; i < times; ++i) sums[thread * 8] += tier.read(begin, size);
    return static_cast<double>(size) * times;
  });
}

}  // namespace trimaran
