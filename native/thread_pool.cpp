#include "thread_pool.h"

#include <pthread.h>
#include <sched.h>

#include <algorithm>
#include <new>
#include <system_error>

namespace moedecode {

namespace {

// About 50 microseconds on current cores: longer than the gap between two stages, far shorter than a decode step.
constexpr int kSpins = 2000;

inline void relax() {
#if defined(__x86_64__) || defined(__i386__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

template <class T>
void wait_while_equal(std::atomic<T>& value, T old) {
  for (int i = 0; i < kSpins; ++i) {
    if (value.load(std::memory_order_acquire) != old) return;
    relax();
  }
  while (value.load(std::memory_order_acquire) == old) value.wait(old, std::memory_order_acquire);
}

}  // namespace

void Team::wait() {
  const std::uint32_t round = round_.load(std::memory_order_acquire);
  if (arrived_.fetch_add(1, std::memory_order_acq_rel) + 1 == count_) {
    arrived_.store(0, std::memory_order_relaxed);
    round_.store(round + 1, std::memory_order_release);
    round_.notify_all();
  } else {
    wait_while_equal(round_, round);
  }
}

int available_cores() {
  cpu_set_t set;
  CPU_ZERO(&set);
  if (sched_getaffinity(0, sizeof set, &set) == 0) return std::max(1, CPU_COUNT(&set));
  return std::max(1u, std::thread::hardware_concurrency());
}

ThreadPool& ThreadPool::instance() {
  // Never destroyed: workers may still be parked when the process ends.
  static ThreadPool* pool = new ThreadPool();
  return *pool;
}

ThreadPool::ThreadPool() : workers_(new std::vector<std::thread>()) {
  pthread_atfork(before_fork, after_fork_parent, after_fork_child);
}

// A fork waits for the region in flight, so that the child never inherits half a region.
void ThreadPool::before_fork() { instance().turn_.lock(); }
void ThreadPool::after_fork_parent() { instance().turn_.unlock(); }
void ThreadPool::after_fork_child() {
  ThreadPool& pool = instance();
  pool.workers_ = new std::vector<std::thread>();  // the parent's threads do not exist here; their handles are left alone
  pool.placement_.forget();
  pool.generation_.store(0);
  pool.running_.store(0);
  pool.turn_.unlock();
}

// Starts workers until there are `threads` with the caller; returns how many there are, at most `threads`.
int ThreadPool::hire(int threads) {
  try {
    while (static_cast<int>(workers_->size()) < threads - 1) {
      const int id = static_cast<int>(workers_->size()) + 1;
      workers_->emplace_back(&ThreadPool::serve, this, id, generation_.load());
    }
  } catch (const std::system_error&) {  // a limit on threads: fewer are slower, not wrong
  }
  return std::min(threads, static_cast<int>(workers_->size()) + 1);
}

void ThreadPool::run(int threads, Region region, void* context) {
  if (threads > 1) threads = hire(threads);
  if (threads <= 1) {
    team_.reset(1);
    region(Worker{0, 1, &team_}, context);
    return;
  }
  placement_.arrange(*workers_, threads);
  region_ = region;
  context_ = context;
  active_ = threads;
  team_.reset(threads);
  const int others = static_cast<int>(workers_->size());
  running_.store(others, std::memory_order_relaxed);
  generation_.fetch_add(1, std::memory_order_release);
  generation_.notify_all();
  region(Worker{0, threads, &team_}, context);
  for (int left = running_.load(std::memory_order_acquire); left != 0; left = running_.load(std::memory_order_acquire))
    wait_while_equal(running_, left);
}

void ThreadPool::serve(int id, std::uint32_t seen) {
  for (;;) {
    wait_while_equal(generation_, seen);
    seen = generation_.load(std::memory_order_acquire);
    if (id < active_) region_(Worker{id, active_, &team_}, context_);
    if (running_.fetch_sub(1, std::memory_order_acq_rel) == 1) running_.notify_all();
  }
}

}  // namespace moedecode
