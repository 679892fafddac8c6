#include "thread_pool.h"

#include <chrono>

namespace trimaran {
namespace {

long long microseconds() {
  using std::chrono::steady_clock;
  return std::chrono::duration_cast<std::chrono::microseconds>(
             steady_clock::now().time_since_epoch())
      .count();
}

}  // namespace

bool spin_expired(int turn, long long& deadline) {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#endif
  if (turn == 0) deadline = microseconds() + kSpinMicroseconds;
  return turn % 16 == 15 && microseconds() > deadline;
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

ThreadPool::ThreadPool(int threads) : size_(threads), barrier_(threads) {
  workers_.reserve(threads - 1);
  try {
    for (int i = 1; i < threads; ++i) workers_.emplace_back([this, i] { work(i); });
  } catch (...) {
    stop();
    throw;
  }
}

ThreadPool::~ThreadPool() { stop(); }

void ThreadPool::stop() {
  {
    std::lock_guard<std::mutex> lock(mutex_);
    stop_ = true;
    round_.fetch_add(1);
    wake_.notify_all();
  }
  for (std::thread& worker : workers_) worker.join();
}

void ThreadPool::start(Job job, void* context, bool everyone) {
  {
    std::lock_guard<std::mutex> lock(mutex_);
    job_ = job;
    context_ = context;
    error_ = nullptr;
    open_ = true;
    everyone_ = everyone;
    inside_ = everyone ? size_ - 1 : 0;
    round_.fetch_add(1, std::memory_order_release);
    wake_.notify_all();
  }
  call(0);
  if (!everyone) {
    std::lock_guard<std::mutex> lock(mutex_);
    open_ = false;
  }
  spin_while([&] { return inside_.load(std::memory_order_acquire) > 0; });
  if (error_) std::rethrow_exception(error_);
}

void ThreadPool::work(int thread) {
  unsigned seen = 0;
  for (;;) {
    long long deadline = 0;
    for (int turn = 0; round_.load(std::memory_order_acquire) == seen; ++turn)
      if (spin_expired(turn, deadline)) break;
    {
      std::unique_lock<std::mutex> lock(mutex_);
      wake_.wait(lock, [&] { return round_.load() != seen; });
      seen = round_.load();
      if (stop_) return;
      if (!open_) continue;
      if (!everyone_) ++inside_;
    }
    call(thread);
    inside_.fetch_sub(1, std::memory_order_acq_rel);
  }
}

void ThreadPool::call(int thread) {
  try {
    job_(context_, thread);
  } catch (...) {
    std::lock_guard<std::mutex> lock(mutex_);
    if (!error_) error_ = std::current_exception();
  }
}

}  // namespace trimaran
