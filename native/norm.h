// RMSNorm of one token with its fused residual: s = x [+ residual], r = s * rsqrt(sum(s^2)/width + eps) * gamma.
#pragma once

#include <cstdint>

#include "formats.h"

namespace moedecode {

float load_io(const void* row, std::int64_t i, IoType t);
void store_io(void* row, std::int64_t i, IoType t, float x);  // rounds once, to nearest even

struct NormSpec {
  int hidden;
  int width;  // divisor of the sum of squares
  double eps;
  const float* gamma;  // [hidden] or null
  IoType io;
};

// Writes r, rounded to the io type, as floats [hidden] and, if asked, s to residual_out in the io type.
// Returns false when s or r holds a NaN or an infinity; r is then all NaN.
bool rms_norm(const NormSpec& n, const void* x, const void* residual, void* residual_out, float* r);

}  // namespace moedecode
