// The vector vocabulary of the tile loops for Arm NEON with the dot-product extension. Included only by *_neon.cpp.
#pragma once

#include <arm_neon.h>

#include <cstdint>

#include "../formats.h"

namespace moedecode {

struct Neon {
  static constexpr const char* kName = "neon";
  static constexpr int kTokens = 3;  // 3 tokens x 2 phases x 4 registers leave 8 for weights and broadcasts

  struct F {
    float32x4_t v[4];
  };

  template <class Op>
  static F lanes(Op op) {
    return {op(0), op(1), op(2), op(3)};
  }
  static F zero() { return broadcast(0); }
  static F load(const float* p) {
    return lanes([&](int i) { return vld1q_f32(p + 4 * i); });
  }
  static void store(float* p, const F& a) {
    for (int i = 0; i < 4; ++i) vst1q_f32(p + 4 * i, a.v[i]);
  }
  static F broadcast(float x) {
    return lanes([&](int) { return vdupq_n_f32(x); });
  }
  static F add(const F& a, const F& b) {
    return lanes([&](int i) { return vaddq_f32(a.v[i], b.v[i]); });
  }
  static F mul(const F& a, const F& b) {
    return lanes([&](int i) { return vmulq_f32(a.v[i], b.v[i]); });
  }
  static F fma(const F& a, const F& b, const F& c) {
    return lanes([&](int i) { return vfmaq_f32(c.v[i], a.v[i], b.v[i]); });
  }

  // --- weights of one step (kStep columns x 16 rows) as floats, up to the factor unit() ---
  template <Format f>
  static constexpr float unit() {
    return f == Format::E4M3 || f == Format::MXE4M3 ? 256.0f : 1.0f;  // read as halves, whose bias is 8 larger
  }
  template <Format f>
  static void decode(const std::uint8_t* p, F* w) {
    if constexpr (f == Format::F32) {
      w[0] = load(reinterpret_cast<const float*>(p));
    } else if constexpr (f == Format::F16) {
      w[0] = lanes([&](int i) { return vcvt_f32_f16(vreinterpret_f16_u8(vld1_u8(p + 8 * i))); });
    } else if constexpr (f == Format::BF16) {
      const uint32x4_t high = vdupq_n_u32(0xFFFF0000u);
      w[0] = lanes([&](int i) { return vreinterpretq_f32_u32(vshlq_n_u32(words(p, i), 16)); });
      w[1] = lanes([&](int i) { return vreinterpretq_f32_u32(vandq_u32(words(p, i), high)); });
    } else if constexpr (f == Format::E4M3 || f == Format::MXE4M3) {
      // Sign-extended, a shift by 7 leaves the sign in bits 15 and 14; the mask clears the copy.
      const int8x16_t bytes = vreinterpretq_s8_u8(vld1q_u8(p));
      const uint16x8_t mask = vdupq_n_u16(0xBF80);
      w[0] = halves(vandq_u16(vreinterpretq_u16_s16(vshll_n_s8(vget_low_s8(bytes), 7)), mask),
                    vandq_u16(vreinterpretq_u16_s16(vshll_n_s8(vget_high_s8(bytes), 7)), mask));
    } else if constexpr (f == Format::E5M2 || f == Format::MXE5M2) {
      const uint8x16_t bytes = vld1q_u8(p);
      w[0] = halves(vshll_n_u8(vget_low_u8(bytes), 8), vshll_n_u8(vget_high_u8(bytes), 8));
    } else {
      for (int j = 0; j < 8; ++j) {
        const int shift = j < 4 ? 8 * j : 8 * (j - 4) + 4;
        w[j] = lanes([&](int i) { return e2m1(vshlq_u32(words(p, i), vdupq_n_s32(-shift))); });
      }
    }
  }
  static F e8m0(const std::uint8_t* p) {
    return lanes([&](int i) { return int_e8m0(p + 4 * i); });
  }

  // --- integer products: 4 rows at once, codes as the signed integers 2w ---
  static constexpr int kIntRows = 4;
  using FI = float32x4_t;
  using U8 = int8x16_t;
  using I32 = int32x4_t;
  static void nibbles(const std::uint8_t* p, U8& first, U8& second) {
    static constexpr std::int8_t kTwice[16] = {0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12};
    const int8x16_t table = vld1q_s8(kTwice);
    const uint8x16_t codes = vld1q_u8(p);
    first = vqtbl1q_s8(table, vandq_u8(codes, vdupq_n_u8(0xF)));
    second = vqtbl1q_s8(table, vshrq_n_u8(codes, 4));
  }
  static I32 dot(const U8 (&w)[8], const std::int8_t* x) {
    const int8x16_t low = vld1q_s8(x), high = vld1q_s8(x + 16);
    int32x4_t a = vdupq_n_s32(0), b = vdupq_n_s32(0);
    a = vdotq_laneq_s32(a, w[0], low, 0);
    b = vdotq_laneq_s32(b, w[4], high, 0);
    a = vdotq_laneq_s32(a, w[1], low, 1);
    b = vdotq_laneq_s32(b, w[5], high, 1);
    a = vdotq_laneq_s32(a, w[2], low, 2);
    b = vdotq_laneq_s32(b, w[6], high, 2);
    a = vdotq_laneq_s32(a, w[3], low, 3);
    b = vdotq_laneq_s32(b, w[7], high, 3);
    return vaddq_s32(a, b);
  }
  static I32 dot_wide(const U8 (&w)[8], const std::int8_t* high, const std::int8_t* low) {  // of 256 * high + low
    return vaddq_s32(vshlq_n_s32(dot(w, high), 8), dot(w, low));
  }
  // Signed codes carry no constant, so there is no offset to take off.
  static FI to_float(I32 a, std::int32_t) { return vcvtq_f32_s32(a); }
  static FI int_load(const float* p) { return vld1q_f32(p); }
  static void int_store(float* p, FI a) { vst1q_f32(p, a); }
  static FI int_zero() { return vdupq_n_f32(0); }
  // 2^(code-127): the code is the exponent field; code 0 is the subnormal 2^-127.
  static FI int_e8m0(const std::uint8_t* p) {
    std::uint32_t four;
    __builtin_memcpy(&four, p, 4);
    const uint16x4_t wide = vget_low_u16(vmovl_u8(vreinterpret_u8_u32(vdup_n_u32(four))));
    return vreinterpretq_f32_u32(vmaxq_u32(vshlq_n_u32(vmovl_u16(wide), 23), vdupq_n_u32(0x00400000u)));
  }
  static FI int_scaled(FI a, float x) { return vmulq_n_f32(a, x); }
  static FI int_fma(FI a, FI b, FI c) { return vfmaq_f32(c, a, b); }

 private:
  static uint32x4_t words(const std::uint8_t* p, int i) { return vreinterpretq_u32_u8(vld1q_u8(p + 16 * i)); }
  static F halves(uint16x8_t a, uint16x8_t b) {
    const float16x8_t low = vreinterpretq_f16_u16(a), high = vreinterpretq_f16_u16(b);
    return {vcvt_f32_f16(vget_low_f16(low)), vcvt_f32_f16(vget_high_f16(low)), vcvt_f32_f16(vget_low_f16(high)),
            vcvt_f32_f16(vget_high_f16(high))};
  }
  // The code in the low four bits of every lane: E2M1 floats differ only in their two upper bytes, so those are looked up.
  static float32x4_t e2m1(uint32x4_t lanes_) {
    static constexpr std::uint8_t kThird[16] = {0, 0, 0x80, 0xC0, 0, 0x40, 0x80, 0xC0, 0, 0, 0x80, 0xC0, 0, 0x40, 0x80, 0xC0};
    static constexpr std::uint8_t kTop[16] = {0,    0x3F, 0x3F, 0x3F, 0x40, 0x40, 0x40, 0x40,
                                              0x80, 0xBF, 0xBF, 0xBF, 0xC0, 0xC0, 0xC0, 0xC0};
    const uint8x16x2_t table = {vld1q_u8(kThird), vld1q_u8(kTop)};
    const uint32x4_t code = vandq_u32(lanes_, vdupq_n_u32(0xF));
    // Byte 2 looks up the code, byte 3 the code + 16, bytes 0 and 1 entry 0, which is 0.
    const uint32x4_t index = vmlaq_n_u32(vdupq_n_u32(0x10000000u), code, 0x01010000u);
    return vreinterpretq_f32_u8(vqtbl2q_u8(table, vreinterpretq_u8_u32(index)));
  }
};

}  // namespace moedecode
