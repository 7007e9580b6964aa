// bfloat16 weights, activations as pairs of bfloat16, on the tile registers of AMX.
//
// The packed tile is what TDPBF16PS wants of its right operand: 16 pairs of columns, each 16 rows wide. A token is a row
// of the left operand, so its sums know nothing of its neighbours. Firsts and seconds of the pairs are summed apart, in
// ascending order of columns, and added at the end.
#include <cpuid.h>
#include <immintrin.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>

#include "prefetch.h"

namespace moedecode {

namespace {

constexpr int kTokens = 16;  // rows of a tile register

// Tile registers (the intrinsics take literals): 0 and 1 sums of firsts and seconds of 16 tokens, 2 and 3 the same of 16
// more, 4 weights, 5 and 6 activations of the one and the other.

struct alignas(kLine) Config {
  std::uint8_t palette = 1, start_row = 0, reserved[14] = {};
  std::uint16_t row_bytes[16] = {};
  std::uint8_t rows[16] = {};
};

void configure(int tokens0, int tokens1) {
  Config c;
  for (const int r : {0, 1, 5}) c.rows[r] = static_cast<std::uint8_t>(tokens0);
  for (const int r : {2, 3, 6}) c.rows[r] = static_cast<std::uint8_t>(tokens1);
  c.rows[4] = kBlock / 2;
  for (int r = 0; r <= 6; ++r) c.row_bytes[r] = c.rows[r] ? kLine : 0;
  _tile_loadconfig(&c);
}

void store(const TileCall& c, const float* seconds, float* out, int tokens) {
  for (int t = 0; t < tokens; ++t) {
    __m512 sum = _mm512_add_ps(_mm512_load_ps(out + t * kRows), _mm512_load_ps(seconds + t * kRows));
    if (c.row_scale) sum = _mm512_mul_ps(sum, _mm512_loadu_ps(c.row_scale));
    _mm512_store_ps(out + t * kRows, sum);
  }
}

template <bool two>
void pass(const TileCall& c, const unsigned char* row, std::ptrdiff_t stride, float* out, int tokens0, int tokens1) {
  const unsigned char* next = row + kTokens * stride;
  _tile_zero(0);
  _tile_zero(1);
  if constexpr (two) {
    _tile_zero(2);
    _tile_zero(3);
  }
  constexpr int kBytes = kRows * kBlock * 2;
  const std::uint8_t* codes = c.tile;
  const Ahead<Format::BF16, ScaleKind::None> ahead(c);
  for (int b = 0; b < c.blocks; ++b, codes += kBytes, row += 2 * kLine, next += 2 * kLine) {
    ahead.prefetch(codes, b);
    _tile_loadd(4, codes, kLine);
    _tile_loadd(5, row, stride);
    _tile_dpbf16ps(0, 5, 4);
    if constexpr (two) {
      _tile_loadd(6, next, stride);
      _tile_dpbf16ps(2, 6, 4);
    }
    _tile_loadd(5, row + kLine, stride);
    _tile_dpbf16ps(1, 5, 4);
    if constexpr (two) {
      _tile_loadd(6, next + kLine, stride);
      _tile_dpbf16ps(3, 6, 4);
    }
  }
  alignas(kLine) float seconds[kTokens * kRows];
  _tile_stored(0, out, kLine);
  _tile_stored(1, seconds, kLine);
  store(c, seconds, out, tokens0);
  if constexpr (two) {
    _tile_stored(2, out + kTokens * kRows, kLine);
    _tile_stored(3, seconds, kLine);
    store(c, seconds, out + kTokens * kRows, tokens1);
  }
}

}  // namespace

void bf16_pair_amx(const TileCall& c) {
  const std::ptrdiff_t stride = c.tokens > 1 ? c.rows[1] - c.rows[0] : kLine;
  for (int first = 0; first < c.tokens; first += 2 * kTokens) {
    const int tokens0 = std::min(kTokens, c.tokens - first), tokens1 = std::clamp(c.tokens - first - kTokens, 0, kTokens);
    configure(tokens0, tokens1);
    if (tokens1)
      pass<true>(c, c.rows[first], stride, c.out + first * kRows, tokens0, tokens1);
    else
      pass<false>(c, c.rows[first], stride, c.out + first * kRows, tokens0, tokens1);
  }
  _tile_release();
}

bool amx_permitted() {
  static const bool permitted = [] {
    unsigned a = 0, b = 0, c = 0, d = 0;
    constexpr unsigned kBf16 = 1u << 22, kTile = 1u << 24;  // leaf 7, edx
    if (!__get_cpuid_count(7, 0, &a, &b, &c, &d) || (d & kBf16) == 0 || (d & kTile) == 0) return false;
    constexpr long kRequest = 0x1023, kTileData = 18;  // ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA
    return syscall(SYS_arch_prctl, kRequest, kTileData) == 0;
  }();
  return permitted;
}

}  // namespace moedecode
