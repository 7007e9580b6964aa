// Every inner kernel of every instruction set of this CPU against sums in double over the codes' own values.
#include <cmath>
#include <cstring>
#include <vector>

#include "../kernels.h"
#include "../matrix.h"
#include "../rounding.h"
#include "check.h"

using namespace moedecode;

namespace {

double e8m0(int code) { return std::ldexp(1.0, code - 127); }

double minifloat(int code, int exponent_bits, int mantissa_bits) {
  const int bias = (1 << (exponent_bits - 1)) - 1, mask = (1 << mantissa_bits) - 1;
  const int mantissa = code & mask, exponent = code >> mantissa_bits & ((1 << exponent_bits) - 1);
  const double magnitude = exponent ? std::ldexp(1.0 + std::ldexp(mantissa, -mantissa_bits), exponent - bias)
                                    : std::ldexp(mantissa, 1 - bias - mantissa_bits);
  return code >> (mantissa_bits + exponent_bits) & 1 ? -magnitude : magnitude;
}

double element(Format f, const std::uint8_t* codes, int column) {
  switch (f) {
    case Format::F32: {
      float x;
      std::memcpy(&x, codes + 4 * column, 4);
      return static_cast<double>(x);
    }
    case Format::F16: return static_cast<double>(from_f16(static_cast<std::uint16_t>(codes[2 * column] | codes[2 * column + 1] << 8)));
    case Format::BF16: return static_cast<double>(from_bf16(static_cast<std::uint16_t>(codes[2 * column] | codes[2 * column + 1] << 8)));
    case Format::E4M3:
    case Format::MXE4M3: return minifloat(codes[column], 4, 3);
    case Format::E5M2:
    case Format::MXE5M2: return minifloat(codes[column], 5, 2);
    default: return minifloat(column % 2 ? codes[column / 2] >> 4 : codes[column / 2] & 0xF, 2, 1);
  }
}

struct Case {
  Format format;
  ScaleKind kind;
  ActRep rep;
  Precision precision;
};

// Random codes that are finite numbers of moderate size.
std::vector<std::uint8_t> random_codes(Format f, std::size_t bytes, Random& random) {
  std::vector<std::uint8_t> codes(bytes);
  for (std::size_t i = 0; i < bytes; ++i) codes[i] = static_cast<std::uint8_t>(random.bits());
  const std::size_t width = static_cast<std::size_t>(format_bits(f)) / 8;
  for (std::size_t i = 0; width > 1 && i + width <= bytes; i += width) {
    const float x = random.uniform();
    if (f == Format::F32) std::memcpy(&codes[i], &x, 4);
    const std::uint16_t half = f == Format::F16 ? to_f16(x) : to_bf16(x);
    if (width == 2) std::memcpy(&codes[i], &half, 2);
  }
  if (format_bits(f) == 8)
    for (std::uint8_t& c : codes) c = static_cast<std::uint8_t>((c & 0x80) | (c & 0x7F) % 0x60);
  return codes;
}

void run(const Kernels& k, const Case& c, int blocks, int tokens, Random& random) {
  const int cols = blocks * kBlock;
  const std::size_t row_bytes = static_cast<std::size_t>(cols * format_bits(c.format) / 8);
  const std::vector<std::uint8_t> codes = random_codes(c.format, row_bytes * kRows, random);
  std::vector<std::uint8_t> mx(static_cast<std::size_t>(kRows * blocks));
  for (std::uint8_t& s : mx) s = static_cast<std::uint8_t>(120 + random.below(12));
  std::vector<float> wide(static_cast<std::size_t>(div_up(blocks, 4)));
  for (float& s : wide) s = 1.0f + random.uniform() * 0.5f;

  const std::int64_t unit = format_bits(c.format) >= 8 ? format_bits(c.format) / 8 : 1;
  MatrixSource source{codes.data(), kRows, cols, static_cast<std::int64_t>(row_bytes), unit, nullptr, 0, 0};
  if (c.kind == ScaleKind::E8M0) source.scale = mx.data(), source.scale_row_stride = blocks, source.scale_col_stride = 1;
  if (c.kind == ScaleKind::Block128)
    source.scale = reinterpret_cast<const std::uint8_t*>(wide.data()), source.scale_col_stride = 4;
  const Buffer tile(tile_bytes(c.format, c.kind, blocks));
  pack_matrix(source, {c.format, c.kind, blocks, tile.as<std::uint8_t>(), tile.bytes(), nullptr, 0}, 1);

  const std::size_t stride = act_row_bytes(c.rep, blocks);
  const Buffer rows(stride * static_cast<std::size_t>(tokens)), out(static_cast<std::size_t>(tokens * kRows) * 4);
  std::vector<float> x(static_cast<std::size_t>(tokens * cols));
  for (float& v : x) v = random.uniform();
  std::vector<const unsigned char*> pointers;
  for (int t = 0; t < tokens; ++t) {
    unsigned char* row = rows.as<unsigned char>() + static_cast<std::size_t>(t) * stride;
    for (int b = 0; b < blocks; ++b) k.quantise(c.precision, c.rep, &x[static_cast<std::size_t>(t * cols + b * kBlock)], 1.0f, row, b, blocks);
    pointers.push_back(row);
  }
  alignas(64) float row_scale[kRows];
  for (float& s : row_scale) s = 1.0f + random.uniform() * 0.5f;
  const TileKernel kernel = k.tile(c.format, c.kind, c.rep);
  if (!kernel && c.rep == ActRep::BF16Pair) return;  // for AMX alone
  CHECK(kernel, "%s lacks a kernel for format %d", k.isa, static_cast<int>(c.format));
  kernel({tile.as<std::uint8_t>(), row_scale, blocks, pointers.data(), tokens, out.as<float>()});

  const double bound = c.precision == Precision::A8 ? 2.5e-2 : c.rep == ActRep::I16 ? 1.5e-4 : c.rep == ActRep::BF16Pair ? 4e-6 : 2e-6;
  double error = 0, norm = 0;
  for (int t = 0; t < tokens; ++t)
    for (int r = 0; r < kRows; ++r) {
      double want = 0;
      for (int i = 0; i < cols; ++i) {
        const double scale = c.kind == ScaleKind::E8M0       ? e8m0(mx[static_cast<std::size_t>(r * blocks + i / kBlock)])
                             : c.kind == ScaleKind::Block128 ? static_cast<double>(wide[static_cast<std::size_t>(i / 128)])
                                                             : 1.0;
        const double w = element(c.format, codes.data() + static_cast<std::size_t>(r) * row_bytes, i);
        want += w * scale * static_cast<double>(x[static_cast<std::size_t>(t * cols + i)]);
      }
      want *= static_cast<double>(row_scale[r]);
      const double got = static_cast<double>(out.as<float>()[t * kRows + r]);
      error += (got - want) * (got - want);
      norm += want * want;
    }
  CHECK(std::sqrt(error) <= bound * std::sqrt(norm), "%s format %d rep %d, %d blocks, %d tokens: relative error %g exceeds %g",
        k.isa, static_cast<int>(c.format), static_cast<int>(c.rep), blocks, tokens, std::sqrt(error / norm), bound);

  // A token alone gets the same bits as among others.
  alignas(64) float alone[kRows];
  for (const int t : {0, tokens / 2, tokens - 1}) {
    kernel({tile.as<std::uint8_t>(), row_scale, blocks, &pointers[static_cast<std::size_t>(t)], 1, alone});
    CHECK(std::memcmp(alone, out.as<float>() + t * kRows, sizeof alone) == 0, "%s format %d rep %d: token %d of %d differs alone",
          k.isa, static_cast<int>(c.format), static_cast<int>(c.rep), t, tokens);
  }
}

}  // namespace

int main() {
  using enum Format;
  using enum ScaleKind;
  const Case cases[] = {
      {F32, None, ActRep::F32, Precision::A16},    {F16, None, ActRep::F32, Precision::A16},
      {BF16, None, ActRep::F32, Precision::A16},   {E4M3, None, ActRep::F32, Precision::A16},
      {E4M3, Block128, ActRep::F32, Precision::A16}, {E5M2, None, ActRep::F32, Precision::A16},
      {E5M2, Block128, ActRep::F32, Precision::A16}, {MXE4M3, E8M0, ActRep::F32, Precision::A16},
      {MXE5M2, E8M0, ActRep::F32, Precision::A16}, {MXFP4, E8M0, ActRep::F32, Precision::A16},
      {MXFP4, E8M0, ActRep::I16, Precision::A16},  {MXFP4, E8M0, ActRep::I8, Precision::A8},
      {BF16, None, ActRep::F32, Precision::A8},    {BF16, None, ActRep::BF16Pair, Precision::A16},
  };
  Random random(1);
  int runs = 0;
  for (const std::string& isa : available_isas()) {
    use_isa(isa);
    for (const Case& c : cases)
      for (const int blocks : {1, 3, 9})
        for (const int tokens : {1, 2, 3, 4, 5, 7, 8, 9, 13, 64, 67}) run(kernels(), c, blocks, tokens, random), ++runs;
    std::printf("%s: ok\n", isa.c_str());
  }
  std::printf("%d kernel runs passed\n", runs);
}
