#include "norm.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>

#include "rounding.h"

namespace moedecode {

namespace {

template <IoType t>
void widen(const void* row, std::int64_t n, float* out) {
  if constexpr (t == IoType::F32) {
    std::memcpy(out, row, static_cast<std::size_t>(n) * sizeof(float));
  } else {
    const std::uint16_t* p = static_cast<const std::uint16_t*>(row);
    for (std::int64_t i = 0; i < n; ++i) out[i] = t == IoType::BF16 ? from_bf16(p[i]) : from_f16(p[i]);
  }
}

void widen(const void* row, std::int64_t n, IoType t, float* out) {
  if (t == IoType::F32) return widen<IoType::F32>(row, n, out);
  if (t == IoType::BF16) return widen<IoType::BF16>(row, n, out);
  widen<IoType::F16>(row, n, out);
}

}  // namespace

float load_io(const void* row, std::int64_t i, IoType t) {
  if (t == IoType::F32) return static_cast<const float*>(row)[i];
  const std::uint16_t bits = static_cast<const std::uint16_t*>(row)[i];
  return t == IoType::BF16 ? from_bf16(bits) : from_f16(bits);
}

void store_io(void* row, std::int64_t i, IoType t, float x) {
  if (t == IoType::F32)
    static_cast<float*>(row)[i] = x;
  else
    static_cast<std::uint16_t*>(row)[i] = t == IoType::BF16 ? to_bf16(x) : to_f16(x);
}

bool rms_norm(const NormSpec& n, const void* x, const void* residual, void* residual_out, float* r) {
  widen(x, n.hidden, n.io, r);
  if (residual)
    for (int i = 0; i < n.hidden; ++i) r[i] += load_io(residual, i, n.io);
  if (residual_out)
    for (int i = 0; i < n.hidden; ++i) store_io(residual_out, i, n.io, r[i]);

  // Sixteen chains in double: a fixed order, no overflow, no wait for one chain.
  constexpr int kChains = 16;
  double chain[kChains] = {};
  int i = 0;
  for (; i + kChains <= n.hidden; i += kChains)
    for (int c = 0; c < kChains; ++c) chain[c] += static_cast<double>(r[i + c]) * static_cast<double>(r[i + c]);
  for (int c = 0; i < n.hidden; ++i, ++c) chain[c] += static_cast<double>(r[i]) * static_cast<double>(r[i]);
  double sum = 0;
  for (const double c : chain) sum += c;
  bool finite = std::isfinite(sum);  // squares of finite floats cannot overflow a double
  const double scale = 1.0 / std::sqrt(sum / n.width + n.eps);
  for (int j = 0; j < n.hidden; ++j) {
    const double gamma = n.gamma ? static_cast<double>(n.gamma[j]) : 1.0;
    r[j] = rounded(static_cast<float>(static_cast<double>(r[j]) * scale * gamma), n.io);
    finite = finite && std::isfinite(r[j]);  // gamma, an epsilon of 0 or the io type can spoil a finite s
  }
  if (!finite) std::fill_n(r, n.hidden, std::numeric_limits<float>::quiet_NaN());
  return finite;
}

}  // namespace moedecode
