#include "stream.h"

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdint>

#include "memory.h"
#include "thread_pool.h"

namespace moedecode {

double stream_read(std::size_t bytes, int threads, int repeats) {
  using Clock = std::chrono::steady_clock;
  constexpr std::int64_t kPiece = 64 * 1024 / 8;
  const std::int64_t words = static_cast<std::int64_t>(bytes / 8) / kPiece * kPiece;
  const Buffer buffer(bytes);
  std::uint64_t* data = buffer.as<std::uint64_t>();
  ThreadPool& pool = ThreadPool::instance();
  const auto turn = pool.take_turn();
  Counter touch;
  pool.run(threads, [&](const Worker&) {
    for (std::int64_t i = touch.claim(kPiece); i < words; i = touch.claim(kPiece))
      for (std::int64_t j = i; j < i + kPiece; ++j) data[j] = static_cast<std::uint64_t>(j);
  });
  std::atomic<std::uint64_t> sink{0};
  double best = 0;
  for (int r = 0; r < repeats; ++r) {
    Counter next;
    const auto start = Clock::now();
    pool.run(threads, [&](const Worker&) {
      std::uint64_t sum[8] = {};
      for (std::int64_t i = next.claim(kPiece); i < words; i = next.claim(kPiece))
        for (std::int64_t j = i; j < i + kPiece; j += 8)
          for (int c = 0; c < 8; ++c) sum[c] += data[j + c];
      for (const std::uint64_t s : sum) sink.fetch_add(s, std::memory_order_relaxed);
    });
    const double seconds = std::chrono::duration<double>(Clock::now() - start).count();
    best = std::max(best, static_cast<double>(words) * 8 / seconds);
  }
  return best;
}

}  // namespace moedecode
