// A fixed set of threads that run one function together.
//
// On a machine that is busy with other work, the system stops a thread wherever it happens to
// be, and those that need the result of what it was doing wait for a whole slice of time (some
// milliseconds, in which a small model makes a token). So a thread that computes gives its
// processor up by itself once in a while, between two pieces of work (Turn): whoever else wants
// the processor gets it then, and the others go on with all the work that is left.
#pragma once

#include <sys/types.h>

#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <exception>
#include <memory>
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

// The time that one thread computes at a stretch: about a millisecond, less than the slices in
// which systems give out time.
class Turn {
 public:
  bool over() const { return now() > end_; }
  // Lets other programs run, and starts again.
  void give_way();

 private:
  static std::int64_t now();  // in ticks

  std::int64_t end_ = 0;
};

class ThreadPool {
 public:
  // The caller of `run` and `share` is thread 0; the others are started here. Where there are
  // as many threads as processors that this process may use, each of those started stays on
  // one, and the caller is taken to the one that is left when it begins: otherwise the system
  // may leave two on the same one for long. Throws std::system_error.
  explicit ThreadPool(int threads);
  ~ThreadPool();
  ThreadPool(const ThreadPool&) = delete;
  ThreadPool& operator=(const ThreadPool&) = delete;

  int size() const { return size_; }
  // A thread's own.
  Turn& turn(int thread) { return turns_[thread].turn; }
  // For jobs that every thread runs.
  Barrier& barrier() { return barrier_; }

  // Calls job(context, thread) and returns when all calls have. The first exception is
  // thrown here. Not reentrant, one caller at a time. Throws std::runtime_error in a process
  // that was forked from the one that made the pool: the threads aren't in it.
  //   run    once on every thread
  //   share  on the caller, and until that call has returned again and again on the threads
  //          that are awake: for work that is handed out piece by piece, so that nobody waits
  //          for a thread that the system has no time for. A thread other than 0 may return
  //          from the job at any time to give way to other programs.
  using Job = void (*)(void* context, int thread);
  void run(Job job, void* context) { start(job, context, true); }
  void share(Job job, void* context) { start(job, context, false); }

 private:
  // What threads sleep on. A process that was forked while they slept can neither join them
  // nor destroy this, so there it is left alone.
  struct Workers {
    std::mutex mutex;
    std::condition_variable wake;
    std::vector<std::thread> threads;
  };

  void start(Job job, void* context, bool everyone);
  void work(int thread);
  std::uint64_t next_job(std::uint64_t left);
  void call(int thread);
  void stop();

  struct alignas(64) OwnTurn {
    Turn turn;
  };

  const int size_;
  const pid_t process_;
  int home_ = -1;  // the processor on which none of the threads started here stays, if they do
  Barrier barrier_;
  // The number of the job (32 bits), whether threads may enter it (1), whether all must (1),
  // and how many are in it or have to be (30).
  std::atomic<std::uint64_t> state_{0};
  std::unique_ptr<OwnTurn[]> turns_;
  std::atomic<int> sleeping_{0};
  std::atomic<bool> stop_{false};
  // Written while no thread is inside.
  Job job_ = nullptr;
  void* context_ = nullptr;
  std::mutex error_mutex_;
  std::exception_ptr error_;
  std::unique_ptr<Workers> workers_;
};

constexpr int kSpinMicroseconds = 40;

std::int64_t nanoseconds();  // of a clock that never goes back

// Pauses for a moment; whether kSpinMicroseconds have passed since turn 0.
bool spin_expired(int turn, std::int64_t& deadline);

// Spins while `waiting()` holds, and lets others run after some microseconds of that: on a
// machine with as many threads as cores, a spinning one keeps others from running.
template <class Condition>
void spin_while(Condition waiting) {
  std::int64_t deadline = 0;
  for (int turn = 0; waiting(); ++turn)
    if (spin_expired(turn, deadline)) std::this_thread::yield();
}

// Spins while `waiting()` holds, but not for longer; whether it no longer holds.
template <class Condition>
bool spin_briefly(Condition waiting) {
  std::int64_t deadline = 0;
  for (int turn = 0; waiting(); ++turn)
    if (spin_expired(turn, deadline)) return false;
  return true;
}

inline std::int64_t Turn::now() {
#if defined(__x86_64__)
  return static_cast<std::int64_t>(__builtin_ia32_rdtsc());  // 2 to 4 a nanosecond
#else
  return nanoseconds();
#endif
}

}  // namespace trimaran
