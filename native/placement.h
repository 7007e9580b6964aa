// Which cores the workers of a pool run on: each in a group of its own, none in that of the calling thread.
//
// Left to itself the system wakes a worker on the core of the thread that woke it often enough, where the two share the
// core for milliseconds: OLMoE, T = 16, 2 threads, after a pause of 30 ms: 14.4 ms (p90 16.3) against 10.4 (p90 10.7).
#pragma once

#include <sched.h>

#include <thread>
#include <vector>

namespace moedecode {

class Placement {
 public:
  // Splits the cores open to the calling thread into `threads` groups of neighbours and confines each worker to one.
  // Costs a system call or two, and more only where the caller came from another group or the cores changed.
  // MOEDECODE_PLACEMENT=off leaves workers where they are.
  void arrange(const std::vector<std::thread>& workers, int threads);

  // The workers it knew are gone.
  void forget() { threads_ = 0; }

 private:
  cpu_set_t cores_;
  int threads_ = 0;
  int home_ = 0;
};

}  // namespace moedecode
