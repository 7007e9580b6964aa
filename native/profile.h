// Where the time of one call goes: seconds per stage, per thread.
#pragma once

#include <chrono>
#include <cstdint>

#include "thread_pool.h"

namespace moedecode {

enum class Stage : std::uint8_t { Norm, Router, Group, Quantise, GateUp, Activation, Down, Combine, Waiting };
constexpr const char* kStageNames[] = {"norm", "router", "group", "quantise", "gate/up", "activation", "down", "combine", "waiting"};
constexpr int kStages = 9;

// A worker that can say what it is doing. Without a profile (`seconds` null) that costs one test.
struct Crew : Worker {
  Crew(const Worker& w, double* seconds) : Worker(w), seconds_(seconds ? seconds + w.id * kStages : nullptr) {
    if (seconds_) since_ = Clock::now();
  }
  ~Crew() { enter(Stage::Waiting); }
  Crew(const Crew&) = delete;
  Crew& operator=(const Crew&) = delete;

  // What came before is charged to the stage that ends here.
  void enter(Stage next) {
    if (!seconds_) return;
    const Clock::time_point now = Clock::now();
    seconds_[static_cast<int>(stage_)] += std::chrono::duration<double>(now - since_).count();
    since_ = now;
    stage_ = next;
  }
  void barrier() {
    enter(Stage::Waiting);
    Worker::barrier();
  }

 private:
  using Clock = std::chrono::steady_clock;
  double* seconds_;
  Stage stage_ = Stage::Waiting;
  Clock::time_point since_{};
};

}  // namespace moedecode
