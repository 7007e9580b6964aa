// Sixteen lanes in plain C++: the vector vocabulary of the tile loops for any CPU.
// Multiplies and adds apart (no fused multiply-add), so its bits differ from those of the other instruction sets.
#pragma once

#include <bit>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>

#include "../formats.h"

namespace moedecode {

struct Portable {
  static constexpr const char* kName = "portable";
  static constexpr int kTokens = 4;  // tokens per pass of the float micro-kernel

  struct F {
    float v[kRows];
  };

  static F zero() { return F{}; }
  static F load(const float* p) {
    F r;
    std::memcpy(r.v, p, sizeof r.v);
    return r;
  }
  static void store(float* p, const F& a) { std::memcpy(p, a.v, sizeof a.v); }
  static F broadcast(float x) {
    F r;
    for (float& v : r.v) v = x;
    return r;
  }
  static F add(const F& a, const F& b) {
    F r;
    for (int i = 0; i < kRows; ++i) r.v[i] = a.v[i] + b.v[i];
    return r;
  }
  static F mul(const F& a, const F& b) {
    F r;
    for (int i = 0; i < kRows; ++i) r.v[i] = a.v[i] * b.v[i];
    return r;
  }
  static F fma(const F& a, const F& b, const F& c) {
    F r;
    for (int i = 0; i < kRows; ++i) r.v[i] = a.v[i] * b.v[i] + c.v[i];
    return r;
  }

  // --- weights of one step (kStep columns x 16 rows) as floats ---
  template <Format f>
  static constexpr float unit() {
    return 1.0f;
  }
  template <Format f>
  static void decode(const std::uint8_t* p, F* w) {
    for (int r = 0; r < kRows; ++r) {
      if constexpr (f == Format::F32) {
        std::memcpy(&w[0].v[r], p + 4 * r, 4);
      } else if constexpr (f == Format::F16) {
        w[0].v[r] = half(p[2 * r] | p[2 * r + 1] << 8);
      } else if constexpr (f == Format::BF16) {
        std::uint32_t pair;
        std::memcpy(&pair, p + 4 * r, 4);
        w[0].v[r] = std::bit_cast<float>(pair << 16);
        w[1].v[r] = std::bit_cast<float>(pair & 0xFFFF0000u);
      } else if constexpr (f == Format::E4M3 || f == Format::MXE4M3) {
        // The bits of E4M3 are those of a half with an exponent bias 8 smaller.
        w[0].v[r] = 256.0f * half((p[r] & 0x80) << 8 | (p[r] & 0x7F) << 7);
      } else if constexpr (f == Format::E5M2 || f == Format::MXE5M2) {
        w[0].v[r] = half(p[r] << 8);
      } else {
        static constexpr float kValue[16] = {0, 0.5f, 1, 1.5f, 2, 3, 4, 6, -0.0f, -0.5f, -1, -1.5f, -2, -3, -4, -6};
        for (int j = 0; j < 4; ++j) {
          w[j].v[r] = kValue[p[4 * r + j] & 0xF];
          w[4 + j].v[r] = kValue[p[4 * r + j] >> 4];
        }
      }
    }
  }
  static F e8m0(const std::uint8_t* p) {
    F r;
    for (int i = 0; i < kRows; ++i) r.v[i] = scale(p[i]);
    return r;
  }

  // --- integer products: 16 rows at once ---
  static constexpr int kIntRows = 16;
  using FI = F;
  struct U8 {
    std::uint8_t v[kIntRows * 4];
  };
  struct I32 {
    std::int32_t v[kIntRows];
  };
  static void nibbles(const std::uint8_t* p, U8& first, U8& second) {
    static constexpr std::uint8_t kTwice[16] = {12, 13, 14, 15, 16, 18, 20, 24, 12, 11, 10, 9, 8, 6, 4, 0};
    for (int i = 0; i < kIntRows * 4; ++i) {
      first.v[i] = kTwice[p[i] & 0xF];
      second.v[i] = kTwice[p[i] >> 4];
    }
  }
  static I32 dot(const U8 (&w)[8], const std::int8_t* x) {
    I32 r{};
    for (int s = 0; s < 8; ++s)
      for (int i = 0; i < kIntRows; ++i)
        for (int j = 0; j < 4; ++j) r.v[i] += w[s].v[4 * i + j] * x[4 * s + j];
    return r;
  }
  static I32 dot_wide(const U8 (&w)[8], const std::int8_t* high, const std::int8_t* low) {  // of 256 * high + low
    const I32 hi = dot(w, high), lo = dot(w, low);
    I32 r;
    for (int i = 0; i < kIntRows; ++i) r.v[i] = hi.v[i] * 256 + lo.v[i];
    return r;
  }
  static FI to_float(const I32& a, std::int32_t offset) {
    FI r;
    for (int i = 0; i < kIntRows; ++i) r.v[i] = static_cast<float>(a.v[i] - offset);
    return r;
  }
  static FI int_load(const float* p) { return load(p); }
  static void int_store(float* p, const FI& a) { store(p, a); }
  static FI int_zero() { return zero(); }
  static FI int_e8m0(const std::uint8_t* p) { return e8m0(p); }
  static FI int_scaled(const FI& a, float x) { return mul(a, broadcast(x)); }
  static FI int_fma(const FI& a, const FI& b, const FI& c) { return fma(a, b, c); }

 private:
  static float scale(std::uint8_t code) {  // 2^(code-127); 0xFF never reaches a kernel unmarked, see pack.cpp
    return std::bit_cast<float>(code ? static_cast<std::uint32_t>(code) << 23 : 0x00400000u);
  }
  static float half(int bits) {
    const int exponent = bits >> 10 & 0x1F, mantissa = bits & 0x3FF;
    const float sign = bits & 0x8000 ? -1.0f : 1.0f;
    if (exponent == 31)
      return mantissa ? std::numeric_limits<float>::quiet_NaN() : sign * std::numeric_limits<float>::infinity();
    if (exponent == 0) return sign * static_cast<float>(mantissa) * 0x1p-24f;
    return sign * std::bit_cast<float>((exponent + 112) << 23 | mantissa << 13);
  }
};

}  // namespace moedecode
