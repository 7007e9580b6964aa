// How fast this machine reads memory: the yardstick of every benchmark.
#pragma once

#include <cstddef>

namespace moedecode {

// Best of `repeats` passes over `bytes` of memory with `threads` threads, in bytes per second.
double stream_read(std::size_t bytes, int threads, int repeats);

}  // namespace moedecode
