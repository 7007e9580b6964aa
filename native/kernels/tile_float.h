// The float tile loop: 16 weight rows times float activations, for every format and instruction set.
//
// The order of additions of one token is fixed: within a block of 32 columns two chains (even and odd columns),
// their sum is scaled and added to the running total. It does not depend on how many tokens share the tile.
#pragma once

#include <cstring>

#include "prefetch.h"

namespace moedecode {

template <Format f>
constexpr int kStep = f == Format::BF16 ? 2 : f == Format::MXFP4 ? 8 : 1;  // columns that decode() yields at once

template <class S, Format f, ScaleKind kind>
struct FloatTile {
  using F = typename S::F;
  static constexpr int kMany = 64;  // tokens whose activations stay in the cache while a tile passes
  static constexpr std::size_t kBlockBytes = kRows * kBlock * static_cast<std::size_t>(format_bits(f)) / 8;

  // Sums of one block for n tokens: w(k) gives column k.
  template <int n, Format g>
  static void block_sums(const std::uint8_t* codes, const float* const* x, F (&sum)[n]) {
    F even[n], odd[n];
    for (int t = 0; t < n; ++t) even[t] = odd[t] = S::zero();
    constexpr int step = kStep<g> > 1 ? kStep<g> : 2;
    constexpr std::size_t bytes = kRows * static_cast<std::size_t>(format_bits(g)) * kStep<g> / 8;
    for (int k = 0; k < kBlock; k += step) {
      F w[step];
      for (int j = 0; j < step; j += kStep<g>) {
        S::template decode<g>(codes, w + j);
        codes += bytes;
      }
      for (int j = 0; j < step; j += 2)
        for (int t = 0; t < n; ++t) {
          even[t] = S::fma(w[j], S::broadcast(x[t][k + j]), even[t]);
          odd[t] = S::fma(w[j + 1], S::broadcast(x[t][k + j + 1]), odd[t]);
        }
    }
    for (int t = 0; t < n; ++t) sum[t] = S::add(even[t], odd[t]);
  }

  static F scaled_add(const std::uint8_t* scales, int b, const F& sum, const F& total) {
    if constexpr (kind == ScaleKind::None) return S::add(total, sum);
    if constexpr (kind == ScaleKind::E8M0) return S::fma(S::e8m0(scales + b * kRows), sum, total);
    float scale;
    std::memcpy(&scale, scales + b / 4 * 4, 4);
    return S::fma(S::broadcast(scale), sum, total);
  }

  static void finish(const TileCall& c, float* out, const F& total) {
    F r = S::template unit<f>() == 1.0f ? total : S::mul(total, S::broadcast(S::template unit<f>()));
    if (c.row_scale) r = S::mul(r, S::load(c.row_scale));
    S::store(out, r);
  }

  // n tokens in registers, weights decoded on the fly.
  template <int n>
  static void few(const TileCall& c) {
    const std::uint8_t* scales = c.tile + tile_code_bytes(f, c.blocks);
    const float* x[n];
    F total[n], sum[n];
    for (int t = 0; t < n; ++t) {
      x[t] = reinterpret_cast<const float*>(c.rows[t]);
      total[t] = S::zero();
    }
    const Ahead<f, kind> ahead(c);
    for (int b = 0; b < c.blocks; ++b) {
      ahead.prefetch(c.tile + static_cast<std::size_t>(b) * kBlockBytes, b);
      block_sums<n, f>(c.tile + static_cast<std::size_t>(b) * kBlockBytes, x, sum);
      for (int t = 0; t < n; ++t) {
        total[t] = scaled_add(scales, b, sum[t], total[t]);
        x[t] += kBlock;
      }
    }
    for (int t = 0; t < n; ++t) finish(c, c.out + t * kRows, total[t]);
  }

  template <int n>
  static void add_block(const TileCall& c, const float* decoded, const std::uint8_t* scales, int b, int first) {
    const float* x[n];
    F sum[n];
    for (int t = 0; t < n; ++t) x[t] = reinterpret_cast<const float*>(c.rows[first + t]) + b * kBlock;
    block_sums<n, Format::F32>(reinterpret_cast<const std::uint8_t*>(decoded), x, sum);
    for (int t = 0; t < n; ++t) {
      float* out = c.out + (first + t) * kRows;
      S::store(out, scaled_add(scales, b, sum[t], S::load(out)));
    }
  }

  // The largest n <= limit for which tokens [first, first + n) exist.
  template <int limit>
  static void add_up_to(const TileCall& c, const float* decoded, const std::uint8_t* scales, int b, int first) {
    if constexpr (limit > 1)
      if (c.tokens - first < limit) return add_up_to<limit - 1>(c, decoded, scales, b, first);
    add_block<limit>(c, decoded, scales, b, first);
  }
  template <int limit>
  static void few_up_to(const TileCall& c) {
    if constexpr (limit > 1)
      if (c.tokens < limit) return few_up_to<limit - 1>(c);
    few<limit>(c);
  }

  // Many tokens: a block is decoded once into the cache and all tokens pass over it.
  static void many(const TileCall& c) {
    const std::uint8_t* scales = c.tile + tile_code_bytes(f, c.blocks);
    alignas(kLine) float decoded[kBlock * kRows];
    std::memset(c.out, 0, static_cast<std::size_t>(c.tokens) * kRows * sizeof(float));
    const Ahead<f, kind> ahead(c);
    for (int b = 0; b < c.blocks; ++b) {
      const std::uint8_t* codes = c.tile + static_cast<std::size_t>(b) * kBlockBytes;
      ahead.prefetch(codes, b);
      constexpr std::size_t bytes = kRows * static_cast<std::size_t>(format_bits(f)) * kStep<f> / 8;
      for (int k = 0; k < kBlock; k += kStep<f>, codes += bytes) {
        F w[kStep<f>];
        S::template decode<f>(codes, w);
        for (int j = 0; j < kStep<f>; ++j) S::store(decoded + (k + j) * kRows, w[j]);
      }
      for (int t = 0; t < c.tokens; t += S::kTokens) add_up_to<S::kTokens>(c, decoded, scales, b, t);
    }
    for (int t = 0; t < c.tokens; ++t) finish(c, c.out + t * kRows, S::load(c.out + t * kRows));
  }

  static void run(const TileCall& call) {
    for (int first = 0; first < call.tokens; first += kMany) {
      TileCall c = call;
      c.rows += first;
      c.out += first * kRows;
      c.tokens = call.tokens - first < kMany ? call.tokens - first : kMany;
      if (c.tokens <= S::kTokens)
        few_up_to<S::kTokens>(c);
      else
        many(c);
    }
  }
};

}  // namespace moedecode
