// The integer tile loop: 16 rows of MXFP4 codes times fixed-point activations.
//
// Codes become the unsigned integers 2w + 12; the products of a block are exact in int32, and the constant
// 12 * sum(q) (the row's offset) is taken off. Blocks are then added in order with one fused multiply-add each,
// so the result does not depend on how many tokens share the tile.
#pragma once

#include <cstring>

#include "prefetch.h"

namespace moedecode {

template <class S, ActRep rep>
struct IntTile {
  static_assert(rep != ActRep::F32);
  static constexpr int kStepBytes = kRows * 4;                 // eight columns of 16 rows
  static constexpr int kBlockBytes = kRows * kBlock / 2;       // the codes of a block
  static constexpr int kHalves = rep == ActRep::I16 ? 2 : 1;   // int8 numbers per activation
  using FI = typename S::FI;
  using U8 = typename S::U8;

  // An activation row taken apart.
  struct Row {
    const std::int8_t* q;
    const float* unit;
    const std::int32_t* offset;
    Row(const unsigned char* p, int blocks)
        : q(reinterpret_cast<const std::int8_t*>(p)),
          unit(reinterpret_cast<const float*>(p + blocks * kBlock * kHalves)),
          offset(reinterpret_cast<const std::int32_t*>(unit + blocks)) {}
  };

  static void decode(const std::uint8_t* codes, U8 (&w)[8]) {
    for (int s = 0; s < 4; ++s) S::nibbles(codes + s * kStepBytes, w[2 * s], w[2 * s + 1]);
  }

  static FI add_block(const U8 (&w)[8], const FI& scale, const Row& x, int b, const FI& total) {
    const std::int8_t* q = x.q + b * kBlock * kHalves;
    const auto dot = [&] {
      if constexpr (rep == ActRep::I16) return S::dot_wide(w, q, q + kBlock);
      else return S::dot(w, q);
    }();
    return S::int_fma(S::to_float(dot, x.offset[b]), S::int_scaled(scale, x.unit[b]), total);
  }

  static void finish(const TileCall& c) {
    if (!c.row_scale) return;
    for (int i = 0; i < c.tokens * kRows; ++i) c.out[i] *= c.row_scale[i % kRows];
  }

  static void one(const TileCall& c) {
    const std::uint8_t* scales = c.tile + tile_code_bytes(Format::MXFP4, c.blocks);
    constexpr int parts = kRows / S::kIntRows;
    const Row x(c.rows[0], c.blocks);
    FI total[parts];
    for (int p = 0; p < parts; ++p) total[p] = S::int_zero();
    const Ahead<Format::MXFP4, ScaleKind::E8M0> ahead(c);
    for (int b = 0; b < c.blocks; ++b) {
      ahead.prefetch(c.tile + b * kBlockBytes, b);
      for (int p = 0; p < parts; ++p) {
        U8 w[8];
        decode(c.tile + b * kBlockBytes + p * S::kIntRows * 4, w);
        total[p] = add_block(w, S::int_e8m0(scales + b * kRows + p * S::kIntRows), x, b, total[p]);
      }
    }
    for (int p = 0; p < parts; ++p) S::int_store(c.out + p * S::kIntRows, total[p]);
  }

  static void many(const TileCall& c) {
    const std::uint8_t* scales = c.tile + tile_code_bytes(Format::MXFP4, c.blocks);
    std::memset(c.out, 0, static_cast<std::size_t>(c.tokens) * kRows * sizeof(float));
    const Ahead<Format::MXFP4, ScaleKind::E8M0> ahead(c);
    for (int b = 0; b < c.blocks; ++b) {
      ahead.prefetch(c.tile + b * kBlockBytes, b);
      for (int r = 0; r < kRows; r += S::kIntRows) {
        U8 w[8];
        decode(c.tile + b * kBlockBytes + r * 4, w);
        const FI scale = S::int_e8m0(scales + b * kRows + r);
        for (int t = 0; t < c.tokens; ++t) {
          float* out = c.out + t * kRows + r;
          S::int_store(out, add_block(w, scale, Row(c.rows[t], c.blocks), b, S::int_load(out)));
        }
      }
    }
  }

  static void run(const TileCall& c) {
    if (c.tokens == 1)
      one(c);
    else
      many(c);
    finish(c);
  }
};

}  // namespace moedecode
