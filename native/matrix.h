// Packed weight matrices: 16-row tiles in the layout that every inner kernel reads.
#pragma once

#include <cstdint>
#include <vector>

#include "formats.h"
#include "memory.h"

namespace moedecode {

// A matrix as its owner stores it. Strides are in bytes and may be anything.
// codes: [rows, cols] elements of format_bits; MXFP4: bytes [rows, cols/2], first code in the low nibble.
struct MatrixSource {
  const std::uint8_t* codes;
  std::int64_t rows, cols;
  std::int64_t row_stride, col_stride;  // col_stride: per element, MXFP4: per byte
  const std::uint8_t* scale;            // E8M0 bytes, or floats
  std::int64_t scale_row_stride, scale_col_stride;
};

// Where the tiles of one matrix lie. A view: PackedExperts and PackedMatrix own the memory.
struct MatrixView {
  Format format;
  ScaleKind kind;
  int blocks;                // blocks of 32 columns
  std::uint8_t* tiles;       // tile i at tiles + i * stride
  std::size_t stride;
  float* row_scale;          // row scales of tile i at row_scale + i * row_scale_stride; null if all are 1
  std::size_t row_scale_stride;

  const std::uint8_t* tile(std::int64_t i) const { return tiles + static_cast<std::size_t>(i) * stride; }
  const float* scale_of(std::int64_t i) const {
    return row_scale ? row_scale + static_cast<std::size_t>(i) * row_scale_stride : nullptr;
  }
};

// Packs every tile of `source`. Returns the rows that hold a NaN weight whose code the kernels would not
// read as NaN (E4M3 0x7F, E8M0 0xFF): the caller marks them with a NaN row scale.
std::vector<std::int64_t> pack_matrix(const MatrixSource& source, const MatrixView& into, int threads);

// One matrix on its own, e.g. the router's weights: rows are outputs, natural column order.
class PackedMatrix {
 public:
  PackedMatrix(const MatrixSource& source, Format format, int threads);
  const MatrixView& view() const { return view_; }
  int rows() const { return rows_; }
  int tiles() const { return static_cast<int>(div_up(rows_, kRows)); }

 private:
  int rows_;
  Buffer memory_;
  MatrixView view_;
};

// The experts of this rank. Tile i of gate and tile i of up are neighbours, since they are used together.
class PackedExperts {
 public:
  enum Projection { Gate, Up, Down };

  // `order_hidden` and `order_intermediate` list the natural index at every stored column (-1: zero).
  PackedExperts(int experts, int hidden, int intermediate, Format format, ScaleKind kind,
                std::vector<std::int32_t> order_hidden, std::vector<std::int32_t> order_intermediate);

  void set(int expert, Projection which, const MatrixSource& source, int threads);
  void set_row_scale(int expert, Projection which, const float* scale, std::int64_t count);  // count 1 or rows
  void set_bias(int expert, Projection which, const float* bias, std::int64_t count);

  MatrixView gate(int e) const { return view(e, Gate); }
  MatrixView up(int e) const { return view(e, Up); }
  MatrixView down(int e) const { return view(e, Down); }
  const float* bias(int e, Projection which, std::int64_t tile) const;  // 16 floats or null

  const int experts, hidden, intermediate;
  const Format format;
  const ScaleKind kind;
  const int blocks_hidden, blocks_intermediate;
  const int tiles_hidden, tiles_intermediate;
  // Null when stored order is natural order, padded at the end: then no index needs to be read.
  const std::int32_t* gather_hidden() const { return natural_hidden_ ? nullptr : order_hidden_.data(); }
  const std::int32_t* gather_intermediate() const { return natural_intermediate_ ? nullptr : order_intermediate_.data(); }
  std::size_t bytes() const { return memory_.bytes(); }

 private:
  MatrixView view(int e, Projection which) const;
  float* row_scales(int e, Projection which) const;
  void need_row_scales();
  std::int64_t rows(Projection which) const { return which == Down ? hidden : intermediate; }
  std::size_t row_scales_per_expert() const { return static_cast<std::size_t>((2 * tiles_intermediate + tiles_hidden) * kRows); }

  std::vector<std::int32_t> order_hidden_, order_intermediate_;
  bool natural_hidden_, natural_intermediate_;
  std::size_t tile_in_, tile_out_, expert_bytes_;
  Buffer memory_;
  Buffer row_scale_;            // floats [E][2 * I16 + H16], gate and up interleaved by tile; empty: all 1
  std::vector<float> bias_[3];  // [E][rows padded to 16]; empty: none
};

}  // namespace moedecode
