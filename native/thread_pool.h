// A persistent pool that runs one parallel region at a time, with barriers inside the region.
//
// Workers spin for a short while after a region and then park. Calls from several threads take turns.
// After fork() the child starts its own workers on first use.
#pragma once

#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <mutex>
#include <thread>
#include <vector>

#include "placement.h"

namespace moedecode {

class Team;

// What a region sees of its pool: who it is, how many there are, and a barrier for all of them.
struct Worker {
  int id;
  int count;
  Team* team;
  void barrier() const;
};

// The rendezvous of the threads of one region.
class Team {
 public:
  void reset(int count) {
    count_ = count;
    arrived_.store(0, std::memory_order_relaxed);
  }
  void wait();

 private:
  int count_ = 1;
  std::atomic<int> arrived_{0};
  std::atomic<std::uint32_t> round_{0};
};

inline void Worker::barrier() const {
  if (count > 1) team->wait();
}

class ThreadPool {
 public:
  using Region = void (*)(const Worker&, void* context);

  static ThreadPool& instance();

  // Runs `region` on `threads` threads, this one included, and returns when all are done. Where the system refuses more
  // threads, those there are do the work.
  void run(int threads, Region region, void* context);

  template <class F>
  void run(int threads, F&& body) {
    run(threads, [](const Worker& w, void* f) { (*static_cast<F*>(f))(w); }, &body);
  }

  // Held by a caller for as long as it uses the shared workspace.
  std::unique_lock<std::mutex> take_turn() { return std::unique_lock<std::mutex>(turn_); }

  ThreadPool(const ThreadPool&) = delete;
  ThreadPool& operator=(const ThreadPool&) = delete;

 private:
  ThreadPool();
  int hire(int threads);
  void serve(int id, std::uint32_t seen);
  static void before_fork();
  static void after_fork_parent();
  static void after_fork_child();

  std::mutex turn_;
  std::vector<std::thread>* workers_;
  Placement placement_;
  std::atomic<std::uint32_t> generation_{0};
  std::atomic<int> running_{0};
  int active_ = 1;
  Region region_ = nullptr;
  void* context_ = nullptr;
  Team team_;
};

// Cores this process may run on.
int available_cores();

// Work handed out in pieces: each thread claims the next piece until none is left.
class Counter {
 public:
  std::int64_t claim(std::int64_t size) { return next_.fetch_add(size, std::memory_order_relaxed); }

 private:
  alignas(64) std::atomic<std::int64_t> next_{0};
};

// Work over the tiles of matrices: a contiguous share of the tiles for each thread, which takes its own first and then
// helps the others. A tile goes to the same thread when it is packed and in every call, so that each thread reads long
// stretches, and on machines with several memory nodes mostly pages that it touched first.
class TileShares {
 public:
  // `counters`: one for each thread, at zero.
  explicit TileShares(Counter* counters) : counters_(counters) {}

  // body(tile, width, from, to): items [from, to) of the share with tiles [tile, tile + width); item i is tile
  // `tile + i % width` in layer `i / width`, of which there are `layers`.
  template <class Body>
  void work(const Worker& w, std::int64_t tiles, std::int64_t layers, std::int64_t grain, Body body) const {
    for (int k = 0; k < w.count; ++k) {
      const std::int64_t share = (w.id + k) % w.count, tile = tiles * share / w.count;
      const std::int64_t width = tiles * (share + 1) / w.count - tile, items = layers * width;
      Counter& next = counters_[share];
      for (std::int64_t from = next.claim(grain); from < items; from = next.claim(grain))
        body(tile, width, from, from + grain < items ? from + grain : items);
    }
  }

 private:
  Counter* counters_;
};

}  // namespace moedecode
