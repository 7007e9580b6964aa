#include "placement.h"

#include <pthread.h>

#include <cstdlib>
#include <cstring>

namespace moedecode {

namespace {

bool switched_off() {
  const char* value = std::getenv("MOEDECODE_PLACEMENT");
  return value != nullptr && std::strcmp(value, "off") == 0;
}

// Which of `groups` the core at `place` of `count` belongs to.
int group_of(int place, int count, int groups) {
  int group = 0;
  while (count * (group + 1) / groups <= place) ++group;
  return group;
}

}  // namespace

void Placement::arrange(const std::vector<std::thread>& workers, int threads) {
  static const bool off = switched_off();
  cpu_set_t cores;
  CPU_ZERO(&cores);
  if (off || sched_getaffinity(0, sizeof cores, &cores) != 0) return;
  const int count = CPU_COUNT(&cores), here = sched_getcpu();
  int place = 0;
  for (int core = 0; core < here; ++core) place += CPU_ISSET(core, &cores) ? 1 : 0;
  const bool apart = threads <= count;
  const int home = apart && place < count ? group_of(place, count, threads) : 0;
  if (threads == threads_ && home == home_ && CPU_EQUAL(&cores, &cores_)) return;

  for (int worker = 1; worker < threads; ++worker) {
    const int group = worker == home ? 0 : worker;  // the caller keeps its group; whoever had that takes the first
    cpu_set_t mine;
    CPU_ZERO(&mine);
    for (int core = 0, at = 0; core < CPU_SETSIZE; ++core)
      if (CPU_ISSET(core, &cores) && (group_of(at++, count, threads) == group || !apart)) CPU_SET(core, &mine);
    pthread_setaffinity_np(const_cast<std::thread&>(workers[worker - 1]).native_handle(), sizeof mine, &mine);
  }
  cores_ = cores;
  threads_ = threads;
  home_ = home;
}

}  // namespace moedecode
