// The vector vocabulary of the tile loops for AVX-512 (F, BW, DQ, VL and VNNI). Included only by *_avx512.cpp.
#pragma once

#include <immintrin.h>

#include <cstdint>

#include "../formats.h"

namespace moedecode {

struct Avx512 {
  static constexpr const char* kName = "avx512";
  static constexpr int kTokens = 8;  // 8 tokens x 2 phases leave 16 registers for weights; broadcasts come from memory

  using F = __m512;

  static F zero() { return _mm512_setzero_ps(); }
  static F load(const float* p) { return _mm512_load_ps(p); }
  static void store(float* p, F a) { _mm512_store_ps(p, a); }
  static F broadcast(float x) { return _mm512_set1_ps(x); }
  static F add(F a, F b) { return _mm512_add_ps(a, b); }
  static F mul(F a, F b) { return _mm512_mul_ps(a, b); }
  static F fma(F a, F b, F c) { return _mm512_fmadd_ps(a, b, c); }

  // --- weights of one step (kStep columns x 16 rows) as floats, up to the factor unit() ---
  template <Format f>
  static constexpr float unit() {
    return f == Format::E4M3 || f == Format::MXE4M3 ? 256.0f : 1.0f;  // read as halves, whose bias is 8 larger
  }
  template <Format f>
  static void decode(const std::uint8_t* p, F* w) {
    if constexpr (f == Format::F32) {
      w[0] = _mm512_load_ps(p);
    } else if constexpr (f == Format::F16) {
      w[0] = _mm512_cvtph_ps(_mm256_load_si256(reinterpret_cast<const __m256i*>(p)));
    } else if constexpr (f == Format::BF16) {
      const __m512i pairs = _mm512_load_si512(p);
      w[0] = _mm512_castsi512_ps(_mm512_slli_epi32(pairs, 16));
      w[1] = _mm512_castsi512_ps(_mm512_and_si512(pairs, _mm512_set1_epi32(static_cast<int>(0xFFFF0000u))));
    } else if constexpr (f == Format::E4M3 || f == Format::MXE4M3) {
      // Sign-extended, a shift by 7 leaves the sign in bits 15 and 14; the mask clears the copy.
      const __m256i wide = _mm256_slli_epi16(_mm256_cvtepi8_epi16(load128(p)), 7);
      w[0] = _mm512_cvtph_ps(_mm256_and_si256(wide, _mm256_set1_epi16(static_cast<short>(0xBF80))));
    } else if constexpr (f == Format::E5M2 || f == Format::MXE5M2) {
      w[0] = _mm512_cvtph_ps(_mm256_slli_epi16(_mm256_cvtepu8_epi16(load128(p)), 8));
    } else {
      const __m512i codes = _mm512_load_si512(p);
      const F value = _mm512_setr_ps(0, 0.5f, 1, 1.5f, 2, 3, 4, 6, -0.0f, -0.5f, -1, -1.5f, -2, -3, -4, -6);
      for (int j = 0; j < 4; ++j) {  // the permutation reads the low four bits of every lane
        w[j] = _mm512_permutexvar_ps(_mm512_srli_epi32(codes, static_cast<unsigned>(8 * j)), value);
        w[4 + j] = _mm512_permutexvar_ps(_mm512_srli_epi32(codes, static_cast<unsigned>(8 * j + 4)), value);
      }
    }
  }
  // 2^(code-127): the code is the exponent field; code 0 is the subnormal 2^-127.
  static F e8m0(const std::uint8_t* p) {
    const __m512i wide = _mm512_slli_epi32(_mm512_cvtepu8_epi32(load128(p)), 23);
    return _mm512_castsi512_ps(_mm512_max_epi32(wide, _mm512_set1_epi32(0x00400000)));
  }

  // --- integer products: 16 rows at once ---
  static constexpr int kIntRows = 16;
  using FI = F;
  using U8 = __m512i;
  using I32 = __m512i;
  static void nibbles(const std::uint8_t* p, U8& first, U8& second) {
    const __m512i table = _mm512_broadcast_i32x4(_mm_setr_epi8(12, 13, 14, 15, 16, 18, 20, 24, 12, 11, 10, 9, 8, 6, 4, 0));
    const __m512i low = _mm512_set1_epi8(0xF);
    const __m512i codes = _mm512_load_si512(p);
    first = _mm512_shuffle_epi8(table, _mm512_and_si512(codes, low));
    second = _mm512_shuffle_epi8(table, _mm512_and_si512(_mm512_srli_epi16(codes, 4), low));
  }
  static I32 dot(const U8 (&w)[8], const std::int8_t* x) {
    __m512i a = _mm512_setzero_si512(), b = _mm512_setzero_si512();
    for (int s = 0; s < 4; ++s) {
      a = _mm512_dpbusd_epi32(a, w[s], quad(x + 4 * s));
      b = _mm512_dpbusd_epi32(b, w[4 + s], quad(x + 16 + 4 * s));
    }
    return _mm512_add_epi32(a, b);
  }
  static I32 dot_wide(const U8 (&w)[8], const std::int8_t* high, const std::int8_t* low) {  // of 256 * high + low
    return _mm512_add_epi32(_mm512_slli_epi32(dot(w, high), 8), dot(w, low));
  }
  static FI to_float(I32 a, std::int32_t offset) { return _mm512_cvtepi32_ps(_mm512_sub_epi32(a, _mm512_set1_epi32(offset))); }
  static FI int_load(const float* p) { return load(p); }
  static void int_store(float* p, FI a) { store(p, a); }
  static FI int_zero() { return zero(); }
  static FI int_e8m0(const std::uint8_t* p) { return e8m0(p); }
  static FI int_scaled(FI a, float x) { return mul(a, broadcast(x)); }
  static FI int_fma(FI a, FI b, FI c) { return fma(a, b, c); }

 private:
  static __m128i load128(const std::uint8_t* p) { return _mm_load_si128(reinterpret_cast<const __m128i*>(p)); }
  static __m512i quad(const std::int8_t* x) {
    int four;
    __builtin_memcpy(&four, x, 4);
    return _mm512_set1_epi32(four);
  }
};

}  // namespace moedecode
