// How far ahead of the arithmetic the weights are asked for.
//
// Near into the first-level cache, further into the second. Measured on two cores that read 34 GB/s (AVX-512, 768 MB of
// tiles, H = 2880), GB/s without prefetch / near and 4 KiB ahead / both as here:
//   mxfp4 a16 T = 1: 22.6 / 24.2 / 26.7, T = 2: 16.0 / 21.9 / 25.1; mxfp8: 23.2 / 22.2 / 26.6; bf16: 29.8 / 27.8 / 32.5
#pragma once

#include "../kernels.h"

namespace moedecode {

constexpr std::size_t kNear = 1024, kFar = 3072;

// What comes after a position in a tile: the rest of the tile, then the next one.
template <Format f, ScaleKind kind>
class Ahead {
 public:
  explicit Ahead(const TileCall& c)
      : end_(c.tile + tile_bytes(f, kind, c.blocks)),
        jump_(c.next ? c.next - end_ : 0),
        scales_((c.next ? c.next : end_) + tile_code_bytes(f, c.blocks)) {}

  // Called once for each block. The scales of the next tile are asked for one by one: they lie behind its codes, too late
  // for the stream of codes to bring them. Running past the last tile is harmless: a prefetch never faults.
  // Inlined by force: GCC takes a function of prefetches for one without effects and drops calls to it.
  [[gnu::always_inline]] void prefetch(const std::uint8_t* codes, int block) const {
    const std::uint8_t *near = at(codes + kNear), *far = at(codes + kFar);
    for (std::size_t i = 0; i < tile_code_bytes(f, 1); i += kLine) {
      __builtin_prefetch(near + i, 0, 3);
      __builtin_prefetch(far + i, 0, 2);
    }
    if constexpr (kind == ScaleKind::E8M0) __builtin_prefetch(scales_ + block * kRows, 0, 3);
  }

 private:
  const std::uint8_t* at(const std::uint8_t* p) const { return p < end_ ? p : p + jump_; }

  const std::uint8_t* end_;
  std::ptrdiff_t jump_;
  const std::uint8_t* scales_;
};

}  // namespace moedecode
