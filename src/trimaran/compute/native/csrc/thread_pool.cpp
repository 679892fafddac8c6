#include "thread_pool.h"

#include <pthread.h>
#include <sched.h>
#include <unistd.h>

#include <chrono>
#include <stdexcept>
#include <string>

namespace trimaran {
namespace {

constexpr std::int64_t kTurnTicks = 3'000'000;

constexpr std::uint64_t kJob = std::uint64_t{1} << 32;  // one more of them
constexpr std::uint64_t kOpen = std::uint64_t{1} << 31;
constexpr std::uint64_t kEveryone = std::uint64_t{1} << 30;
constexpr std::uint64_t kInside = kEveryone - 1;

constexpr std::uint64_t job_of(std::uint64_t state) { return state / kJob; }

// The processors that this thread may use, in order.
std::vector<int> allowed_cpus() {
  cpu_set_t set;
  CPU_ZERO(&set);
  std::vector<int> cpus;
  if (sched_getaffinity(0, sizeof set, &set) != 0) return cpus;
  for (int cpu = 0; cpu < CPU_SETSIZE; ++cpu)
    if (CPU_ISSET(cpu, &set)) cpus.push_back(cpu);
  return cpus;
}

void stay_on(int cpu) {
  cpu_set_t set;
  CPU_ZERO(&set);
  CPU_SET(cpu, &set);
  sched_setaffinity(0, sizeof set, &set);  // where it isn't granted, the system chooses
}

// Takes the calling thread to a processor, if it may use that, and leaves it free to be moved.
void go_to(int cpu) {
  cpu_set_t own;
  CPU_ZERO(&own);
  if (sched_getaffinity(0, sizeof own, &own) != 0 || !CPU_ISSET(cpu, &own)) return;
  stay_on(cpu);
  sched_setaffinity(0, sizeof own, &own);
}

}  // namespace

std::int64_t nanoseconds() {
  using std::chrono::steady_clock;
  return std::chrono::duration_cast<std::chrono::nanoseconds>(
             steady_clock::now().time_since_epoch())
      .count();
}

bool spin_expired(int turn, std::int64_t& deadline) {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#endif
  if (turn == 0) deadline = nanoseconds() + kSpinMicroseconds * 1000;
  return turn % 16 == 15 && nanoseconds() > deadline;
}

void Turn::give_way() {
  std::this_thread::yield();
  end_ = now() + kTurnTicks;
}

void Barrier::wait() {
  const unsigned round = round_.load(std::memory_order_relaxed);
  if (arrived_.fetch_add(1, std::memory_order_acq_rel) == threads_ - 1) {
    arrived_.store(0, std::memory_order_relaxed);
    round_.store(round + 1, std::memory_order_release);
    return;
  }
  spin_while([&] { return round_.load(std::memory_order_acquire) == round; });
}

ThreadPool::ThreadPool(int threads)
    : size_(threads),
      process_(getpid()),
      barrier_(threads),
      turns_(new OwnTurn[threads]),
      workers_(new Workers) {
  const std::vector<int> cpus = allowed_cpus();
  const bool pin = static_cast<int>(cpus.size()) == threads;
  if (pin) home_ = cpus[0];
  workers_->threads.reserve(threads - 1);
  try {
    for (int i = 1; i < threads; ++i)
      workers_->threads.emplace_back([this, i, cpu = pin ? cpus[i] : -1] {
        if (cpu >= 0) stay_on(cpu);
        pthread_setname_np(pthread_self(), ("compute-" + std::to_string(i)).c_str());
        work(i);
      });
  } catch (...) {
    stop();
    throw;
  }
}

ThreadPool::~ThreadPool() {
  if (getpid() == process_)
    stop();
  else
    workers_.release();
}

void ThreadPool::stop() {
  stop_ = true;
  {
    std::lock_guard<std::mutex> lock(workers_->mutex);
    workers_->wake.notify_all();
  }
  for (std::thread& worker : workers_->threads) worker.join();
}

void ThreadPool::start(Job job, void* context, bool everyone) {
  if (getpid() != process_)
    throw std::runtime_error("the compute threads belong to process " +
                             std::to_string(process_) +
                             ", of which this one is a fork; load the model here as well");
  job_ = job;
  context_ = context;
  error_ = nullptr;
  if (home_ >= 0 && sched_getcpu() != home_) go_to(home_);
  const std::uint64_t number = job_of(state_.load(std::memory_order_relaxed)) + 1;
  state_.store(number * kJob | kOpen | (everyone ? kEveryone | (size_ - 1) : 0));
  if (sleeping_.load() > 0) {
    std::lock_guard<std::mutex> lock(workers_->mutex);
    workers_->wake.notify_all();
  }
  call(0);
  state_.fetch_and(~kOpen, std::memory_order_acq_rel);
  spin_while([&] { return (state_.load(std::memory_order_acquire) & kInside) > 0; });
  if (error_) std::rethrow_exception(error_);
}

// Waits for a job other than `left` that may be entered; the state then, 0 to end.
std::uint64_t ThreadPool::next_job(std::uint64_t left) {
  std::uint64_t state;
  const auto found = [&] {
    state = state_.load();
    return stop_ || ((state & (kOpen | kEveryone)) && job_of(state) != left);
  };
  if (!spin_briefly([&] { return !found(); })) {
    std::unique_lock<std::mutex> lock(workers_->mutex);
    ++sleeping_;  // before the last look: `start` writes the state and then looks for sleepers
    workers_->wake.wait(lock, found);
    --sleeping_;
  }
  return stop_ ? 0 : state;
}

void ThreadPool::work(int thread) {
  std::uint64_t left = 0;  // the job that this thread doesn't enter again
  while (std::uint64_t state = next_job(left)) {
    if (state & kEveryone) {
      left = job_of(state);
    } else if (!state_.compare_exchange_strong(state, state + 1, std::memory_order_acq_rel)) {
      continue;
    }
    call(thread);
    state_.fetch_sub(1, std::memory_order_acq_rel);
    if (!(state & kEveryone)) turn(thread).give_way();
  }
}

void ThreadPool::call(int thread) {
  try {
    job_(context_, thread);
  } catch (...) {
    std::lock_guard<std::mutex> lock(error_mutex_);
    if (!error_) error_ = std::current_exception();
  }
}

}  // namespace trimaran
