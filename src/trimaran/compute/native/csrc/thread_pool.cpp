#include "thread_pool.h"

#include <chrono>

namespace trimaran {
namespace {

constexpr int kSpinMicroseconds = 40;

inline void pause() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#else
  std::this_thread::yield();
#endif
}

}  // namespace

void Barrier::wait() {
  if (threads_ == 1) return;
  const unsigned round = round_.load(std::memory_order_relaxed);
  if (arrived_.fetch_add(1, std::memory_order_acq_rel) == threads_ - 1) {
    arrived_.store(0, std::memory_order_relaxed);
    // Sequential consistency orders this store before the look at the sleepers, and theirs
    // before their look at the round: one of the two sees the other.
    round_.store(round + 1, std::memory_order_seq_cst);
    if (sleepers_.load(std::memory_order_seq_cst) > 0) {
      std::lock_guard<std::mutex> lock(mutex_);
      wake_.notify_all();
    }
    return;
  }
  const auto deadline =
      std::chrono::steady_clock::now() + std::chrono::microseconds(kSpinMicroseconds);
  for (int i = 0; round_.load(std::memory_order_acquire) == round; ++i) {
    pause();
    if (i % 16 == 15 && std::chrono::steady_clock::now() > deadline) {
      std::unique_lock<std::mutex> lock(mutex_);
      sleepers_.fetch_add(1, std::memory_order_seq_cst);
      wake_.wait(lock, [&] { return round_.load(std::memory_order_seq_cst) != round; });
      sleepers_.fetch_sub(1, std::memory_order_seq_cst);
      return;
    }
  }
}

ThreadPool::ThreadPool(int threads)
    : size_(threads), barrier_(threads), start_(threads), end_(threads) {
  workers_.reserve(threads - 1);
  try {
    for (int i = 1; i < threads; ++i) workers_.emplace_back([this, i] { work(i); });
  } catch (...) {
    // The barriers count threads that don't exist, so only the gate can let the others go.
    open_gate(true);
    for (std::thread& worker : workers_) worker.join();
    throw;
  }
  open_gate(false);
}

ThreadPool::~ThreadPool() {
  stop_ = true;
  start_.wait();
  for (std::thread& worker : workers_) worker.join();
}

void ThreadPool::run(Job job, void* context) {
  job_ = job;
  context_ = context;
  error_ = nullptr;
  start_.wait();
  call(0);
  end_.wait();
  if (error_) std::rethrow_exception(error_);
}

void ThreadPool::open_gate(bool stop) {
  std::lock_guard<std::mutex> lock(gate_mutex_);
  stop_ = stop;
  ready_ = true;
  gate_.notify_all();
}

void ThreadPool::work(int thread) {
  {
    std::unique_lock<std::mutex> lock(gate_mutex_);
    gate_.wait(lock, [&] { return ready_; });
    if (stop_) return;
  }
  for (;;) {
    start_.wait();
    if (stop_) return;
    call(thread);
    end_.wait();
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
