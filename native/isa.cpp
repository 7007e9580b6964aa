// Which instruction sets this CPU has and which one is in use.
#include <atomic>
#include <cstdlib>
#include <stdexcept>

#include "kernels.h"

#if defined(__aarch64__)
#include <sys/auxv.h>

#include <asm/hwcap.h>
#endif

namespace moedecode {

namespace {

struct Choice {
  const char* name;
  const Kernels& (*table)();
};

std::vector<Choice> choices() {  // best last
  std::vector<Choice> found{{"portable", portable_kernels}};
#if defined(__x86_64__)
  __builtin_cpu_init();
  if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("f16c"))
    found.push_back({"avx2", avx2_kernels});
  if (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512dq") &&
      __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512vnni"))
    found.push_back({"avx512", avx512_kernels});
#if defined(MOEDECODE_AMX)
  if (found.back().table == avx512_kernels && amx_permitted()) found.push_back({"amx", amx_kernels});
#endif
#elif defined(__aarch64__)
  if (getauxval(AT_HWCAP) & HWCAP_ASIMDDP) found.push_back({"neon", neon_kernels});
#endif
  return found;
}

const Kernels* find(const std::string& name) {
  for (const Choice& c : choices())
    if (name == c.name) return &c.table();
  std::string known;
  for (const Choice& c : choices()) known += std::string(known.empty() ? "" : ", ") + c.name;
  throw std::invalid_argument("isa=" + name + ": this CPU or build lacks it; choose one of " + known);
}

const Kernels* initial() {
  const char* wanted = std::getenv("MOEDECODE_ISA");
  return wanted && *wanted ? find(wanted) : &choices().back().table();
}

std::atomic<const Kernels*>& current() {
  static std::atomic<const Kernels*> table{initial()};
  return table;
}

}  // namespace

std::vector<std::string> available_isas() {
  std::vector<std::string> names;
  for (const Choice& c : choices()) names.emplace_back(c.name);
  return names;
}

const Kernels& kernels() { return *current().load(std::memory_order_acquire); }

void use_isa(const std::string& name) { current().store(find(name), std::memory_order_release); }

}  // namespace moedecode
