// A fixed set of threads that run one function together, with barriers inside it.
#pragma once

#include <atomic>
#include <condition_variable>
#include <exception>
#include <mutex>
#include <thread>
#include <vector>

namespace trimaran {

// Lets `threads` threads meet. Who waits spins for some microseconds, then sleeps: on a
// machine with as many threads as cores, a spinning one keeps others from running.
class Barrier {
 public:
  explicit Barrier(int threads) : threads_(threads) {}
  void wait();

 private:
  const int threads_;
  std::atomic<int> arrived_{0};
  std::atomic<unsigned> round_{0};
  std::atomic<int> sleepers_{0};
  std::mutex mutex_;
  std::condition_variable wake_;
};

class ThreadPool {
 public:
  // The caller of `run` is thread 0; the others are started here.
  explicit ThreadPool(int threads);
  ~ThreadPool();
  ThreadPool(const ThreadPool&) = delete;
  ThreadPool& operator=(const ThreadPool&) = delete;

  int size() const { return size_; }
  Barrier& barrier() { return barrier_; }

  // Calls job(context, thread) on every thread and returns when all are done. The first
  // exception is thrown here. A job that uses the barrier must reach it on every thread,
  // whatever fails. Not reentrant, one caller at a time.
  using Job = void (*)(void* context, int thread);
  void run(Job job, void* context);

 private:
  void open_gate(bool stop);
  void work(int thread);
  void call(int thread);

  const int size_;
  Barrier barrier_;  // inside jobs
  Barrier start_;    // of a job
  Barrier end_;
  Job job_ = nullptr;
  void* context_ = nullptr;
  bool stop_ = false;
  bool ready_ = false;  // all threads exist
  std::mutex gate_mutex_;
  std::condition_variable gate_;
  std::mutex error_mutex_;
  std::exception_ptr error_;
  std::vector<std::thread> workers_;
};

}  // namespace trimaran
