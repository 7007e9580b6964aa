// How far ahead of the arithmetic the weights are asked for.
#pragma once

#include "../kernels.h"

namespace moedecode {

// Hardware prefetchers stop at 4 KiB pages, of which a tile has several; this keeps the stream going across them
// and across tiles. Running past the last tile is harmless: a prefetch never faults.
constexpr std::size_t kAhead = 4096;

template <class S, std::size_t bytes>
void prefetch_block(const std::uint8_t* codes) {
  for (std::size_t i = 0; i < bytes; i += kLine) S::prefetch(codes + kAhead + i);
}

}  // namespace moedecode
