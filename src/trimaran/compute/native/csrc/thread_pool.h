// A fixed set of threads that run one function together.
#pragma once

#include <atomic>
#include <condition_variable>
#include <exception>
#include <mutex>
#include <thread>
#include <vector>

namespace trimaran {

// Lets `threads` threads meet.
class Barrier {
 public:
  explicit Barrier(int threads) : threads_(threads) {}
  void wait();

 private:
  const int threads_;
  std::atomic<int> arrived_{0};
  std::atomic<unsigned> round_{0};
};

class ThreadPool {
 public:
  // The caller of `run` is thread 0; the others are started here.
  explicit ThreadPool(int threads);
  ~ThreadPool();
  ThreadPool(const ThreadPool&) = delete;
  ThreadPool& operator=(const ThreadPool&) = delete;

  int size() const { return size_; }
  // For jobs that every thread runs.
  Barrier& barrier() { return barrier_; }

  // Calls job(context, thread) and returns when all calls have. The first exception is
  // thrown here. Not reentrant, one caller at a time.
  //   run    on every thread
  //   share  on the caller, and on those threads that are awake before it is done: for work
  //          that is handed out piece by piece, so that nobody waits for a thread that the
  //          system has no time for
  using Job = void (*)(void* context, int thread);
  void run(Job job, void* context) { start(job, context, true); }
  void share(Job job, void* context) { start(job, context, false); }

 private:
  void start(Job job, void* context, bool everyone);
  void work(int thread);
  void call(int thread);
  void stop();

  const int size_;
  Barrier barrier_;
  std::atomic<unsigned> round_{0};  // of jobs
  std::atomic<int> inside_{0};      // threads that are in the job, or will be
  std::mutex mutex_;                // of what follows
  std::condition_variable wake_;
  bool open_ = false;      // whether threads may enter the job
  bool everyone_ = false;
  bool stop_ = false;
  Job job_ = nullptr;
  void* context_ = nullptr;
  std::exception_ptr error_;
  std::vector<std::thread> workers_;
};

constexpr int kSpinMicroseconds = 40;

// Pauses for a moment; whether kSpinMicroseconds have passed since turn 0.
bool spin_expired(int turn, long long& deadline);

// Spins while `waiting()` holds, and lets others run after some microseconds of that: on a
// machine with as many threads as cores, a spinning one keeps others from running.
template <class Condition>
void spin_while(Condition waiting) {
  long long deadline = 0;
  for (int turn = 0; waiting(); ++turn)
    if (spin_expired(turn, deadline)) std::this_thread::yield();
}

}  // namespace trimaran
