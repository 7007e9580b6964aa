// Words shared by the whole core: number formats, precisions and the constants of the tile layout.
// Knows nothing of memory, threads or instruction sets.
#pragma once

#include <cstddef>
#include <cstdint>

namespace moedecode {

enum class Format : std::uint8_t { F32, F16, BF16, E4M3, E5M2, MXE4M3, MXE5M2, MXFP4 };
enum class IoType : std::uint8_t { F32, F16, BF16 };
enum class Precision : std::uint8_t { A16, A8, MXFP8 };

// How a row of activations is held for the inner kernels.
//   F32: floats; under MXFP8 already rounded to E4M3.
//   I16: per block of 32 two int8 halves (q = 256*hi + lo), a float unit and an integer offset.
//   I8 : per block of 32 int8, a float unit and an integer offset.
//   BF16Pair: per block of 32 their bfloat16 values, then the bfloat16 values of what those leave over: 17 bits in all.
enum class ActRep : std::uint8_t { F32, I16, I8, BF16Pair };

// Where the scales of a packed matrix lie. Row scales are separate (PackedMatrix::row_scale).
enum class ScaleKind : std::uint8_t { None, E8M0, Block128 };

constexpr int kRows = 16;   // rows interleaved in one tile
constexpr int kBlock = 32;  // columns that share one scale
constexpr int kLine = 64;   // bytes of a cache line

constexpr std::int64_t round_up(std::int64_t n, std::int64_t unit) { return (n + unit - 1) / unit * unit; }
constexpr std::int64_t div_up(std::int64_t n, std::int64_t unit) { return (n + unit - 1) / unit; }

constexpr int format_bits(Format f) {
  switch (f) {
    case Format::F32: return 32;
    case Format::F16:
    case Format::BF16: return 16;
    case Format::MXFP4: return 4;
    default: return 8;
  }
}

// Bytes of one activation row of `blocks` blocks.
constexpr std::size_t act_row_bytes(ActRep rep, int blocks) {
  const std::int64_t n = blocks;
  switch (rep) {
    case ActRep::F32:
    case ActRep::BF16Pair: return static_cast<std::size_t>(n * kBlock * 4);
    case ActRep::I16: return static_cast<std::size_t>(round_up(n * (2 * kBlock + 8), kLine));
    default: return static_cast<std::size_t>(round_up(n * (kBlock + 8), kLine));
  }
}

// Bytes of one tile: the codes of all its blocks, then their scales, padded to a cache line.
constexpr std::size_t tile_code_bytes(Format f, int blocks) {
  return static_cast<std::size_t>(blocks) * kRows * kBlock * static_cast<std::size_t>(format_bits(f)) / 8;
}
constexpr std::size_t tile_bytes(Format f, ScaleKind k, int blocks) {
  const std::size_t scales = k == ScaleKind::E8M0       ? static_cast<std::size_t>(blocks) * kRows
                             : k == ScaleKind::Block128 ? static_cast<std::size_t>(div_up(blocks, 4)) * 4
                                                        : 0;
  return static_cast<std::size_t>(round_up(static_cast<std::int64_t>(tile_code_bytes(f, blocks) + scales), kLine));
}

}  // namespace moedecode
