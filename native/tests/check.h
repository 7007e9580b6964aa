// The smallest thing a test needs: a check that says where it failed, and numbers that are the same everywhere.
#pragma once

#include <cstdint>
#include <cstdio>
#include <cstdlib>

#define CHECK(condition, ...)                                                \
  do {                                                                       \
    if (!(condition)) {                                                      \
      std::fprintf(stderr, "%s:%d: %s is false: ", __FILE__, __LINE__, #condition); \
      std::fprintf(stderr, __VA_ARGS__);                                     \
      std::fprintf(stderr, "\n");                                            \
      std::exit(1);                                                          \
    }                                                                        \
  } while (0)

// A 64-bit linear congruential generator (Knuth's MMIX constants), upper bits used.
class Random {
 public:
  explicit Random(std::uint64_t seed) : state_(seed) {}
  std::uint32_t bits() {
    state_ = state_ * 6364136223846793005u + 1442695040888963407u;
    return static_cast<std::uint32_t>(state_ >> 32);
  }
  int below(int n) { return static_cast<int>(bits() % static_cast<std::uint32_t>(n)); }
  float uniform() { return static_cast<float>(bits()) * 0x1p-31f - 1.0f; }  // in [-1, 1)

 private:
  std::uint64_t state_;
};
