// The vector vocabulary of the tile loops for AVX2 with FMA and F16C. Included only by *_avx2.cpp.
#pragma once

#include <immintrin.h>

#include <cstdint>

#include "../formats.h"

namespace moedecode {

struct Avx2 {
  static constexpr const char* kName = "avx2";
  static constexpr int kTokens = 3;  // 3 tokens x 2 phases x 2 registers leave 4 for weights and broadcasts

  struct F {
    __m256 lo, hi;
  };

  static F zero() { return {_mm256_setzero_ps(), _mm256_setzero_ps()}; }
  static F load(const float* p) { return {_mm256_load_ps(p), _mm256_load_ps(p + 8)}; }
  static void store(float* p, const F& a) {
    _mm256_store_ps(p, a.lo);
    _mm256_store_ps(p + 8, a.hi);
  }
  static F broadcast(float x) { return {_mm256_set1_ps(x), _mm256_set1_ps(x)}; }
  static F add(const F& a, const F& b) { return {_mm256_add_ps(a.lo, b.lo), _mm256_add_ps(a.hi, b.hi)}; }
  static F mul(const F& a, const F& b) { return {_mm256_mul_ps(a.lo, b.lo), _mm256_mul_ps(a.hi, b.hi)}; }
  static F fma(const F& a, const F& b, const F& c) {
    return {_mm256_fmadd_ps(a.lo, b.lo, c.lo), _mm256_fmadd_ps(a.hi, b.hi, c.hi)};
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
      w[0] = {_mm256_cvtph_ps(load128(p)), _mm256_cvtph_ps(load128(p + 16))};
    } else if constexpr (f == Format::BF16) {
      const __m256i a = load256(p), b = load256(p + 32);
      const __m256i high = _mm256_set1_epi32(static_cast<int>(0xFFFF0000u));
      w[0] = {_mm256_castsi256_ps(_mm256_slli_epi32(a, 16)), _mm256_castsi256_ps(_mm256_slli_epi32(b, 16))};
      w[1] = {_mm256_castsi256_ps(_mm256_and_si256(a, high)), _mm256_castsi256_ps(_mm256_and_si256(b, high))};
    } else if constexpr (f == Format::E4M3 || f == Format::MXE4M3) {
      // Sign-extended, a shift by 7 leaves the sign in bits 15 and 14; the mask clears the copy.
      const __m256i wide = _mm256_slli_epi16(_mm256_cvtepi8_epi16(load128(p)), 7);
      w[0] = halves(_mm256_and_si256(wide, _mm256_set1_epi16(static_cast<short>(0xBF80))));
    } else if constexpr (f == Format::E5M2 || f == Format::MXE5M2) {
      w[0] = halves(_mm256_slli_epi16(_mm256_cvtepu8_epi16(load128(p)), 8));
    } else {
      const __m256i a = load256(p), b = load256(p + 32);
      for (int j = 0; j < 4; ++j) {
        w[j] = {e2m1(a, 8 * j), e2m1(b, 8 * j)};
        w[4 + j] = {e2m1(a, 8 * j + 4), e2m1(b, 8 * j + 4)};
      }
    }
  }
  static F e8m0(const std::uint8_t* p) { return {int_e8m0(p), int_e8m0(p + 8)}; }

  // --- integer products: 8 rows at once ---
  static constexpr int kIntRows = 8;
  using FI = __m256;
  using U8 = __m256i;
  using I32 = __m256i;
  static void nibbles(const std::uint8_t* p, U8& first, U8& second) {
    const __m256i table = _mm256_setr_epi8(12, 13, 14, 15, 16, 18, 20, 24, 12, 11, 10, 9, 8, 6, 4, 0,  //
                                           12, 13, 14, 15, 16, 18, 20, 24, 12, 11, 10, 9, 8, 6, 4, 0);
    const __m256i low = _mm256_set1_epi8(0xF);
    const __m256i codes = load256(p);
    first = _mm256_shuffle_epi8(table, _mm256_and_si256(codes, low));
    second = _mm256_shuffle_epi8(table, _mm256_and_si256(_mm256_srli_epi16(codes, 4), low));
  }
  // Pair products are at most 2*24*128 = 6144, so four of them fit int16 with room to spare.
  static I32 dot(const U8 (&w)[8], const std::int8_t* x) { return widened(w, x, 1); }
  static I32 dot_wide(const U8 (&w)[8], const std::int8_t* high, const std::int8_t* low) {  // of 256 * high + low
    return _mm256_add_epi32(widened(w, high, 256), widened(w, low, 1));
  }
  static FI to_float(const I32& a, std::int32_t offset) {
    return _mm256_cvtepi32_ps(_mm256_sub_epi32(a, _mm256_set1_epi32(offset)));
  }
  static FI int_load(const float* p) { return _mm256_load_ps(p); }
  static void int_store(float* p, FI a) { _mm256_store_ps(p, a); }
  static FI int_zero() { return _mm256_setzero_ps(); }
  // 2^(code-127): the code is the exponent field; code 0 is the subnormal 2^-127.
  static FI int_e8m0(const std::uint8_t* p) {
    const __m256i wide = _mm256_cvtepu8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(p)));
    return _mm256_castsi256_ps(_mm256_max_epi32(_mm256_slli_epi32(wide, 23), _mm256_set1_epi32(0x00400000)));
  }
  static FI int_scaled(FI a, float x) { return _mm256_mul_ps(a, _mm256_set1_ps(x)); }
  static FI int_fma(FI a, FI b, FI c) { return _mm256_fmadd_ps(a, b, c); }

 private:
  static __m128i load128(const std::uint8_t* p) { return _mm_load_si128(reinterpret_cast<const __m128i*>(p)); }
  static __m256i load256(const std::uint8_t* p) { return _mm256_load_si256(reinterpret_cast<const __m256i*>(p)); }
  static F halves(__m256i h) {
    return {_mm256_cvtph_ps(_mm256_castsi256_si128(h)), _mm256_cvtph_ps(_mm256_extracti128_si256(h, 1))};
  }
  // Code in bits shift..shift+3 of every lane: magnitude from a table of 8, sign from bit 3.
  static __m256 e2m1(__m256i lanes, int shift) {
    const __m256 magnitude = _mm256_setr_ps(0, 0.5f, 1, 1.5f, 2, 3, 4, 6);
    const __m256i sign = _mm256_and_si256(_mm256_slli_epi32(lanes, 28 - shift), _mm256_set1_epi32(INT32_MIN));
    const __m256 value = _mm256_permutevar8x32_ps(magnitude, _mm256_srli_epi32(lanes, shift));
    return _mm256_or_ps(value, _mm256_castsi256_ps(sign));
  }
  static __m256i widened(const U8 (&w)[8], const std::int8_t* x, short factor) {
    const __m256i f = _mm256_set1_epi16(factor);
    __m256i a = _mm256_maddubs_epi16(w[0], quad(x));
    __m256i b = _mm256_maddubs_epi16(w[4], quad(x + 16));
    for (int s = 1; s < 4; ++s) {
      a = _mm256_add_epi16(a, _mm256_maddubs_epi16(w[s], quad(x + 4 * s)));
      b = _mm256_add_epi16(b, _mm256_maddubs_epi16(w[4 + s], quad(x + 16 + 4 * s)));
    }
    return _mm256_add_epi32(_mm256_madd_epi16(a, f), _mm256_madd_epi16(b, f));
  }
  static __m256i quad(const std::int8_t* x) {
    int four;
    __builtin_memcpy(&four, x, 4);
    return _mm256_set1_epi32(four);
  }
};

}  // namespace moedecode
