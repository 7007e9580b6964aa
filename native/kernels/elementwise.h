// The loops around the products: activation functions, quantising activations, the weighted sum.
//
// Plain loops over 16 or 32 floats that the compiler vectorises for the instruction set of the including file;
// the type parameter keeps the instantiations of different instruction sets apart.
#pragma once

#include <bit>
#include <cmath>
#include <cstring>
#include <limits>

#include "../kernels.h"

namespace moedecode {

template <class S>
struct Elementwise {
  static constexpr float kRoundMagic = 12582912.0f;  // 1.5 * 2^23: adding and subtracting it rounds to nearest even

  static float round_even(float x) { return (x + kRoundMagic) - kRoundMagic; }

  // e^x to 2 ulp for normal results. Range reduction by ln 2 in two parts, Taylor series to degree 7 on
  // |r| <= ln(2)/2 (remainder below 2^-27). Saturates outside [-87.3, 88.7]; NaN stays NaN.
  static float exp(float x) {
    x = x < -87.3f ? -87.3f : x;
    x = x > 88.7f ? 88.7f : x;
    const float shifted = x * 1.44269504f + kRoundMagic;
    const float n = shifted - kRoundMagic;
    const float r = (x - n * 0.693145752f) - n * 1.42860677e-6f;
    float p = 1.0f / 5040;
    p = p * r + 1.0f / 720;
    p = p * r + 1.0f / 120;
    p = p * r + 1.0f / 24;
    p = p * r + 1.0f / 6;
    p = p * r + 0.5f;
    p = p * r + 1.0f;
    p = p * r + 1.0f;
    // `shifted` is 1.5 * 2^23 + n, so its bits count n from 0x4B400000. The exponent goes in two steps: n can be 128.
    const std::int32_t e = std::bit_cast<std::int32_t>(shifted) - 0x4B400000;
    const std::int32_t half = e >> 1;
    return p * std::bit_cast<float>((half + 127) << 23) * std::bit_cast<float>((e - half + 127) << 23);
  }
  static float sigmoid(float x) { return 1.0f / (1.0f + exp(-x)); }

  template <Activation a>
  static float activate(float g, float alpha) {
    if constexpr (a == Activation::SiLU) return g * sigmoid(g);
    if constexpr (a == Activation::Swish) return g * sigmoid(alpha * g);
    if constexpr (a == Activation::GELU) return 0.5f * g * (1.0f + std::erf(g * 0.707106781f));
    // 0.5*(1 + tanh(u)) is sigmoid(2u), u = sqrt(2/pi)*(g + 0.044715 g^3).
    if constexpr (a == Activation::GELUTanh) return g * sigmoid(1.59576912f * (g + 0.044715f * g * g * g));
    const float positive = g < 0.0f ? 0.0f : g;
    return a == Activation::ReLU2 ? positive * positive : positive;
  }

  static float clamp(float x, float lower, float upper) {  // NaN stays NaN
    x = x < lower ? lower : x;
    return x > upper ? upper : x;
  }

  template <Activation a>
  static void gate_up_as(const GateUpEpilogue& e, const float* gate, const float* up, const float* gate_bias,
                         const float* up_bias, int tokens, float* const* h) {
    for (int t = 0; t < tokens; ++t) {
      float result[kRows];
      for (int i = 0; i < kRows; ++i) {
        const float g = clamp(gate[t * kRows + i] + gate_bias[i], e.gate_lower, e.gate_upper);
        const float u = clamp(up[t * kRows + i] + up_bias[i], e.up_lower, e.up_upper);
        result[i] = activate<a>(g, e.alpha) * (u + e.up_offset);
      }
      std::memcpy(h[t], result, sizeof result);
    }
  }

  static void gate_up(const GateUpEpilogue& e, const float* gate, const float* up, const float* gate_bias,
                      const float* up_bias, int tokens, float* const* h) {
    static constexpr float kNone[kRows] = {};
    if (!gate_bias) gate_bias = kNone;
    if (!up_bias) up_bias = kNone;
    switch (e.activation) {
      case Activation::SiLU: return gate_up_as<Activation::SiLU>(e, gate, up, gate_bias, up_bias, tokens, h);
      case Activation::Swish: return gate_up_as<Activation::Swish>(e, gate, up, gate_bias, up_bias, tokens, h);
      case Activation::GELU: return gate_up_as<Activation::GELU>(e, gate, up, gate_bias, up_bias, tokens, h);
      case Activation::GELUTanh: return gate_up_as<Activation::GELUTanh>(e, gate, up, gate_bias, up_bias, tokens, h);
      case Activation::ReLU2: return gate_up_as<Activation::ReLU2>(e, gate, up, gate_bias, up_bias, tokens, h);
      case Activation::ReLU: return gate_up_as<Activation::ReLU>(e, gate, up, gate_bias, up_bias, tokens, h);
    }
  }

  static void accumulate(float* acc, const float* y, const float* bias, float weight) {
    if (bias)
      for (int i = 0; i < kRows; ++i) acc[i] += weight * (y[i] + bias[i]);
    else
      for (int i = 0; i < kRows; ++i) acc[i] += weight * y[i];
  }

  // --- one block of 32 activations ---

  // The largest magnitude as its bit pattern: magnitudes order like their bits, and NaN and Inf come last.
  static std::uint32_t largest(const float* x) {
    std::uint32_t m = 0;
    for (int i = 0; i < kBlock; ++i) {
      const std::uint32_t bits = std::bit_cast<std::uint32_t>(x[i]) & 0x7FFFFFFFu;
      m = bits > m ? bits : m;
    }
    return m;
  }

  // Fixed point with `limit` as the largest integer: returns the unit, writes q.
  // Blocks below 1e-30 count as zero, so that limit/amax cannot overflow.
  static float fixed_point(const float* x, float limit, std::int32_t (&q)[kBlock]) {
    const std::uint32_t m = largest(x);
    const float amax = std::bit_cast<float>(m);
    if (m >= 0x7F800000u || amax < 1e-30f) {
      std::memset(q, 0, sizeof q);
      return m >= 0x7F800000u ? std::numeric_limits<float>::quiet_NaN() : 0.0f;
    }
    const float inverse = limit / amax;
    for (int i = 0; i < kBlock; ++i) q[i] = static_cast<std::int32_t>(round_even(x[i] * inverse));
    return amax / limit;
  }

  // The nearest E4M3 values under one E8M0 scale (the rule of formats/mx.py), back as floats.
  static void through_e4m3(const float* x, float* out) {
    const std::uint32_t m = largest(x);
    if (m >= 0x7F800000u) {
      for (int i = 0; i < kBlock; ++i) out[i] = std::numeric_limits<float>::quiet_NaN();
      return;
    }
    const int code = static_cast<int>(m >> 23) > 8 ? static_cast<int>(m >> 23) - 8 : 0;
    const float up = std::bit_cast<float>((254 - code) << 23);
    const float down = std::bit_cast<float>(code ? code << 23 : 0x00400000);
    for (int i = 0; i < kBlock; ++i) {
      float v = clamp(x[i] * up, -448.0f, 448.0f);
      // The spacing is 2^(e-3) from e = -6 upwards; adding 1.5 * 2^(e-3+23) rounds to it, ties to even.
      std::uint32_t e = (std::bit_cast<std::uint32_t>(v) & 0x7F800000u) >> 23;
      e = e < 121 ? 121 : e;
      const float magic = std::bit_cast<float>((e + 20) << 23 | 0x400000u);
      v = (v + magic) - magic;
      out[i] = v * down;
    }
  }

  // x = first + second: the nearest bfloat16, then the nearest to what it leaves over. Where the nearest would be infinite
  // the first is cut off instead; beside infinities and NaN the second is zero.
  static void bf16_pair(const float* x, std::uint16_t* out) {
    for (int i = 0; i < kBlock; ++i) {
      const std::uint32_t bits = std::bit_cast<std::uint32_t>(x[i]), magnitude = bits & 0x7FFFFFFFu;
      const std::uint32_t first = (magnitude >= 0x7F7F8000u ? bits | (magnitude > 0x7F800000u ? 0x400000u : 0u) : nearest(bits)) & 0xFFFF0000u;
      const std::uint32_t rest = nearest(std::bit_cast<std::uint32_t>(x[i] - std::bit_cast<float>(first)));
      out[i] = static_cast<std::uint16_t>(first >> 16);
      out[kBlock + i] = static_cast<std::uint16_t>(magnitude >= 0x7F800000u ? 0 : rest >> 16);
    }
  }
  // Rounds to the upper 16 bits, ties to even.
  static std::uint32_t nearest(std::uint32_t bits) { return bits + 0x7FFF + (bits >> 16 & 1); }

  static void quantise(Precision p, ActRep rep, const float* block, float factor, unsigned char* row, int b, int blocks) {
    float x[kBlock];
    for (int i = 0; i < kBlock; ++i) x[i] = block[i] * factor;
    std::int32_t q[kBlock];
    if (rep == ActRep::F32) {
      float* out = reinterpret_cast<float*>(row) + b * kBlock;
      if (p == Precision::MXFP8) return through_e4m3(x, out);
      return static_cast<void>(std::memcpy(out, x, sizeof x));  // fixed point would cost precision and gain nothing
    }
    if (rep == ActRep::BF16Pair) return bf16_pair(x, reinterpret_cast<std::uint16_t*>(row) + b * 2 * kBlock);
    const bool wide = rep == ActRep::I16;
    const int bytes = wide ? 2 * kBlock : kBlock;
    // 32639 = 127*256 + 127: both halves of every q fit int8.
    const float unit = fixed_point(x, wide ? 32639.0f : 127.0f, q);
    std::int8_t* out = reinterpret_cast<std::int8_t*>(row) + b * bytes;
    std::int32_t sum = 0;
    for (int i = 0; i < kBlock; ++i) sum += q[i];
    if (wide) {
      for (int i = 0; i < kBlock; ++i) {
        const std::int32_t hi = (q[i] + 128) >> 8;
        out[i] = static_cast<std::int8_t>(hi);
        out[kBlock + i] = static_cast<std::int8_t>(q[i] - hi * 256);
      }
    } else {
      for (int i = 0; i < kBlock; ++i) out[i] = static_cast<std::int8_t>(q[i]);
    }
    float* units = reinterpret_cast<float*>(row + blocks * bytes);
    units[b] = 0.5f * unit;  // the kernels multiply 2w
    reinterpret_cast<std::int32_t*>(units + blocks)[b] = 12 * sum;
  }
};

}  // namespace moedecode
