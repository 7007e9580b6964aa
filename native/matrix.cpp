#include "matrix.h"

#include <algorithm>
#include <cstring>
#include <limits>
#include <memory>
#include <mutex>
#include <stdexcept>

#include "thread_pool.h"

namespace moedecode {

namespace {

// Places the elements of one block: element (row r, column k) of width W goes where the kernels expect it.
template <int W>
void place_block(const MatrixSource& s, std::int64_t row0, std::int64_t col0, Format f, std::uint8_t* out) {
  const int rows = static_cast<int>(std::min<std::int64_t>(kRows, s.rows - row0));
  const int cols = static_cast<int>(std::min<std::int64_t>(kBlock, s.cols - col0));
  const bool pairs = f == Format::BF16;  // [k/2][row][2] instead of [k][row]
  for (int r = 0; r < rows; ++r) {
    const std::uint8_t* from = s.codes + (row0 + r) * s.row_stride + col0 * s.col_stride;
    for (int k = 0; k < cols; ++k) {
      const int at = pairs ? (k / 2 * kRows + r) * 2 + k % 2 : k * kRows + r;
      std::memcpy(out + at * W, from + k * s.col_stride, W);
    }
  }
}

// MXFP4: eight columns of a row take four bytes; byte j holds column j (low nibble) and column j + 4.
void place_nibbles(const MatrixSource& s, std::int64_t row0, std::int64_t col0, std::uint8_t* out) {
  const int rows = static_cast<int>(std::min<std::int64_t>(kRows, s.rows - row0));
  const int bytes = static_cast<int>(std::min<std::int64_t>(kBlock, s.cols - col0) / 2);
  for (int r = 0; r < rows; ++r) {
    const std::uint8_t* from = s.codes + (row0 + r) * s.row_stride + col0 / 2 * s.col_stride;
    std::uint8_t b[kBlock / 2] = {};
    if (s.col_stride == 1)
      std::memcpy(b, from, static_cast<std::size_t>(bytes));
    else
      for (int j = 0; j < bytes; ++j) b[j] = from[j * s.col_stride];
    for (int step = 0; step < 4; ++step) {
      const std::uint8_t *a = b + 4 * step, *c = a + 2;
      std::uint8_t* to = out + (step * kRows + r) * 4;
      to[0] = static_cast<std::uint8_t>((a[0] & 0xF) | (c[0] & 0xF) << 4);
      to[1] = static_cast<std::uint8_t>(a[0] >> 4 | (c[0] & 0xF0));
      to[2] = static_cast<std::uint8_t>((a[1] & 0xF) | (c[1] & 0xF) << 4);
      to[3] = static_cast<std::uint8_t>(a[1] >> 4 | (c[1] & 0xF0));
    }
  }
}

bool has_nan_code(const MatrixSource& s, std::int64_t row, Format f, ScaleKind kind) {
  if (f == Format::E4M3 || f == Format::MXE4M3) {
    const std::uint8_t* p = s.codes + row * s.row_stride;
    for (std::int64_t c = 0; c < s.cols; ++c)
      if ((p[c * s.col_stride] & 0x7F) == 0x7F) return true;
  }
  if (kind == ScaleKind::E8M0) {
    const std::uint8_t* p = s.scale + row * s.scale_row_stride;
    for (std::int64_t b = 0; b < div_up(s.cols, kBlock); ++b)
      if (p[b * s.scale_col_stride] == 0xFF) return true;
  }
  return false;
}

bool is_natural(const std::vector<std::int32_t>& order, int size) {
  for (std::size_t i = 0; i < order.size(); ++i)
    if (order[i] != (static_cast<int>(i) < size ? static_cast<std::int32_t>(i) : -1)) return false;
  return true;
}

void pack_tile(const MatrixSource& s, std::int64_t row0, const MatrixView& m, std::uint8_t* tile) {
  const std::size_t block_bytes = tile_code_bytes(m.format, 1);
  const std::int64_t blocks = div_up(s.cols, kBlock);
  for (std::int64_t b = 0; b < blocks; ++b) {
    std::uint8_t* out = tile + static_cast<std::size_t>(b) * block_bytes;
    switch (format_bits(m.format)) {
      case 32: place_block<4>(s, row0, b * kBlock, m.format, out); break;
      case 16: place_block<2>(s, row0, b * kBlock, m.format, out); break;
      case 8: place_block<1>(s, row0, b * kBlock, m.format, out); break;
      default: place_nibbles(s, row0, b * kBlock, out);
    }
  }
  std::uint8_t* scales = tile + tile_code_bytes(m.format, m.blocks);
  if (m.kind == ScaleKind::E8M0) {
    const std::int64_t rows = std::min<std::int64_t>(kRows, s.rows - row0);
    for (std::int64_t r = 0; r < rows; ++r)
      for (std::int64_t b = 0; b < blocks; ++b)
        scales[b * kRows + r] = s.scale[(row0 + r) * s.scale_row_stride + b * s.scale_col_stride];
  } else if (m.kind == ScaleKind::Block128) {
    for (std::int64_t b = 0; b < div_up(blocks, 4); ++b)
      std::memcpy(scales + b * 4, s.scale + row0 / 128 * s.scale_row_stride + b * s.scale_col_stride, 4);
  }
}

}  // namespace

std::vector<std::int64_t> pack_matrix(const MatrixSource& source, const MatrixView& into, int threads) {
  const std::int64_t tiles = div_up(source.rows, kRows);
  std::vector<std::int64_t> marked;
  std::mutex guard;
  const auto counters = std::make_unique<Counter[]>(static_cast<std::size_t>(threads));
  const TileShares shares(counters.get());
  ThreadPool& pool = ThreadPool::instance();
  const auto turn = pool.take_turn();
  pool.run(threads, [&](const Worker& w) {
    shares.work(w, tiles, 1, 1, [&](std::int64_t first, std::int64_t, std::int64_t from, std::int64_t) {
      const std::int64_t tile = first + from, last = std::min<std::int64_t>(source.rows, (tile + 1) * kRows);
      pack_tile(source, tile * kRows, into, into.tiles + static_cast<std::size_t>(tile) * into.stride);
      for (std::int64_t r = tile * kRows; r < last; ++r)
        if (has_nan_code(source, r, into.format, into.kind)) {
          const std::lock_guard<std::mutex> lock(guard);
          marked.push_back(r);
        }
    });
  });
  return marked;
}

PackedMatrix::PackedMatrix(const MatrixSource& source, Format format, int threads) : rows_(static_cast<int>(source.rows)) {
  const int blocks = static_cast<int>(div_up(source.cols, kBlock));
  const std::size_t stride = tile_bytes(format, ScaleKind::None, blocks);
  memory_ = Buffer(stride * static_cast<std::size_t>(tiles()));
  view_ = {format, ScaleKind::None, blocks, memory_.as<std::uint8_t>(), stride, nullptr, 0};
  pack_matrix(source, view_, threads);
}

PackedExperts::PackedExperts(int experts_, int hidden_, int intermediate_, Format format_, ScaleKind kind_,
                             std::vector<std::int32_t> order_hidden, std::vector<std::int32_t> order_intermediate)
    : experts(experts_),
      hidden(hidden_),
      intermediate(intermediate_),
      format(format_),
      kind(kind_),
      blocks_hidden(static_cast<int>(order_hidden.size() / kBlock)),
      blocks_intermediate(static_cast<int>(order_intermediate.size() / kBlock)),
      tiles_hidden(static_cast<int>(div_up(hidden_, kRows))),
      tiles_intermediate(static_cast<int>(div_up(intermediate_, kRows))),
      order_hidden_(std::move(order_hidden)),
      order_intermediate_(std::move(order_intermediate)),
      natural_hidden_(is_natural(order_hidden_, hidden_)),
      natural_intermediate_(is_natural(order_intermediate_, intermediate_)),
      tile_in_(tile_bytes(format_, kind_, blocks_hidden)),
      tile_out_(tile_bytes(format_, kind_, blocks_intermediate)),
      expert_bytes_(2 * tile_in_ * static_cast<std::size_t>(tiles_intermediate) +
                    tile_out_ * static_cast<std::size_t>(tiles_hidden)),
      memory_(expert_bytes_ * static_cast<std::size_t>(experts_)) {}

MatrixView PackedExperts::view(int e, Projection which) const {
  std::uint8_t* base = memory_.as<std::uint8_t>() + static_cast<std::size_t>(e) * expert_bytes_;
  float* scales = row_scales(e, which);
  if (which == Down) {
    base += 2 * tile_in_ * static_cast<std::size_t>(tiles_intermediate);
    return {format, kind, blocks_intermediate, base, tile_out_, scales, kRows};
  }
  if (which == Up) base += tile_in_;
  return {format, kind, blocks_hidden, base, 2 * tile_in_, scales, 2 * kRows};
}

float* PackedExperts::row_scales(int e, Projection which) const {
  if (row_scale_.bytes() == 0) return nullptr;
  const std::size_t start = which == Gate ? 0 : which == Up ? kRows : static_cast<std::size_t>(2 * tiles_intermediate * kRows);
  return row_scale_.as<float>() + static_cast<std::size_t>(e) * row_scales_per_expert() + start;
}

void PackedExperts::need_row_scales() {
  if (row_scale_.bytes() != 0) return;
  const std::size_t count = static_cast<std::size_t>(experts) * row_scales_per_expert();
  row_scale_ = Buffer(count * sizeof(float));
  std::fill_n(row_scale_.as<float>(), count, 1.0f);
}

void PackedExperts::set(int e, Projection which, const MatrixSource& source, int threads) {
  const std::vector<std::int64_t> nan_rows = pack_matrix(source, view(e, which), threads);
  if (nan_rows.empty()) return;
  need_row_scales();
  const MatrixView m = view(e, which);
  for (const std::int64_t r : nan_rows)
    m.row_scale[static_cast<std::size_t>(r / kRows) * m.row_scale_stride + static_cast<std::size_t>(r % kRows)] =
        std::numeric_limits<float>::quiet_NaN();
}

void PackedExperts::set_row_scale(int e, Projection which, const float* scale, std::int64_t count) {
  need_row_scales();
  const MatrixView m = view(e, which);
  for (std::int64_t r = 0; r < rows(which); ++r)
    m.row_scale[static_cast<std::size_t>(r / kRows) * m.row_scale_stride + static_cast<std::size_t>(r % kRows)] *=
        scale[count == 1 ? 0 : r];
}

void PackedExperts::set_bias(int e, Projection which, const float* bias, std::int64_t count) {
  const std::size_t padded = static_cast<std::size_t>(round_up(rows(which), kRows));
  if (bias_[which].empty()) bias_[which].assign(padded * static_cast<std::size_t>(experts), 0.0f);
  std::copy(bias, bias + count, bias_[which].begin() + static_cast<std::ptrdiff_t>(padded) * e);
}

const float* PackedExperts::bias(int e, Projection which, std::int64_t tile) const {
  if (bias_[which].empty()) return nullptr;
  return bias_[which].data() + static_cast<std::size_t>(round_up(rows(which), kRows) * e + tile * kRows);
}

}  // namespace moedecode
