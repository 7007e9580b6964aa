#include "experts.h"

#include <unistd.h>

#include <algorithm>
#include <cmath>
#include <cstring>

#include "rounding.h"

namespace moedecode {

namespace {

constexpr int kBlocksPerItem = 16;  // blocks of activations quantised per piece of work

// How many activation rows to keep beside a tile: half of the second-level cache, at least eight rows, since decoding a
// tile has to pay.
int tokens_in_cache(std::size_t row_bytes) {
#if defined(_SC_LEVEL2_CACHE_SIZE)
  static const long reported = sysconf(_SC_LEVEL2_CACHE_SIZE);
#else
  static const long reported = 0;
#endif
  const std::size_t cache = reported > 0 ? static_cast<std::size_t>(reported) : std::size_t{1} << 20;
  return static_cast<int>(std::clamp<std::size_t>(cache / 2 / row_bytes, 8, ExpertPass::kChunk));
}

}  // namespace

std::int64_t pair_capacity(Strategy s, std::int64_t tokens, int top_k, int local_experts) {
  return tokens * (s == Strategy::AllExpert ? local_experts : top_k);
}

void ExpertPass::place(Arena& arena, std::int64_t tokens, std::int64_t pairs, int threads) {
  const std::size_t n = static_cast<std::size_t>(pairs);
  pairs_ = arena.take<Pair>(n);
  groups_ = arena.take<Group>(n);
  start_ = arena.take<std::int32_t>(static_cast<std::size_t>(w_.experts) + 1);
  x_bytes_ = act_row_bytes(rep_, w_.blocks_hidden);
  h_bytes_ = act_row_bytes(rep_, w_.blocks_intermediate);
  chunk_ = tokens_in_cache(std::max(x_bytes_, h_bytes_));
  counters_ = arena.take<Counter>(static_cast<std::size_t>(threads));
  x_ = arena.take<unsigned char>(x_bytes_ * (per_pair_input() ? n : static_cast<std::size_t>(tokens)));
  h_ = arena.take<float>(n * static_cast<std::size_t>(w_.tiles_intermediate * kRows));
  hq_ = arena.take<unsigned char>(h_bytes_ * n);
}

void ExpertPass::close_groups() {
  std::int64_t chunks = 0;
  for (std::int32_t g = 0; g < group_count_; ++g) groups_[g].chunks = chunks += div_up(groups_[g].count, chunk_);
}

void ExpertPass::group_selected(Strategy s, std::int64_t tokens, int top_k, const std::uint8_t* usable,
                                const std::int32_t* index, const float* weight, int first_expert) {
  pair_count_ = group_count_ = 0;
  const auto local = [&](std::int64_t i) {
    if (index[i] < 0 || (usable && !usable[i / top_k])) return -1;
    const std::int32_t e = index[i] - first_expert;
    return e >= 0 && e < w_.experts ? e : -1;
  };
  if (s == Strategy::Selective) {  // a group per pair; the pairs of a token in ascending expert id
    for (std::int64_t t = 0; t < tokens; ++t) {
      const std::int32_t begin = group_count_;
      for (std::int64_t i = t * top_k; i < (t + 1) * top_k; ++i) {
        const std::int32_t e = local(i);
        if (e < 0) continue;
        std::int32_t at = group_count_++;
        for (; at > begin && groups_[at - 1].expert > e; --at) {
          groups_[at].expert = groups_[at - 1].expert;
          pairs_[at] = pairs_[at - 1];
        }
        groups_[at].expert = e;
        pairs_[at] = {static_cast<std::int32_t>(t), weight[i], true};
      }
    }
    pair_count_ = group_count_;
    for (std::int32_t g = 0; g < group_count_; ++g) groups_[g] = {groups_[g].expert, g, 1, 0};
  } else {  // a group per expert, by counting sort; stable, so tokens ascend within an expert
    std::fill_n(start_, w_.experts + 1, 0);
    for (std::int64_t i = 0; i < tokens * top_k; ++i)
      if (const std::int32_t e = local(i); e >= 0) ++start_[e + 1];
    for (int e = 0; e < w_.experts; ++e) {
      if (start_[e + 1] > 0) groups_[group_count_++] = {e, start_[e], start_[e + 1], 0};
      start_[e + 1] += start_[e];
    }
    pair_count_ = start_[w_.experts];
    for (std::int64_t i = 0; i < tokens * top_k; ++i)
      if (const std::int32_t e = local(i); e >= 0)
        pairs_[start_[e]++] = {static_cast<std::int32_t>(i / top_k), weight[i], true};
  }
  close_groups();
}

void ExpertPass::group_all(std::int64_t tokens, const std::uint8_t* usable, const float* weight, const std::uint8_t* counts) {
  pair_count_ = group_count_ = 0;
  for (int e = 0; e < w_.experts; ++e) {
    const std::int32_t first = static_cast<std::int32_t>(pair_count_);
    for (std::int64_t t = 0; t < tokens; ++t) {
      if (usable && !usable[t]) continue;
      const std::int64_t at = t * w_.experts + e;
      pairs_[pair_count_++] = {static_cast<std::int32_t>(t), weight[at], counts[at] != 0};
    }
    const std::int32_t count = static_cast<std::int32_t>(pair_count_) - first;
    if (count > 0) groups_[group_count_++] = {e, first, count, 0};
  }
  close_groups();
}

void ExpertPass::group_shared(std::int64_t tokens, const std::uint8_t* usable, const float* weight) {
  pair_count_ = group_count_ = 0;
  for (std::int64_t t = 0; t < tokens; ++t)
    if (usable[t]) pairs_[pair_count_++] = {static_cast<std::int32_t>(t), weight ? weight[t] : 1.0f, true};
  if (pair_count_ > 0) groups_[group_count_++] = {0, 0, static_cast<std::int32_t>(pair_count_), 0};
  close_groups();
}

void ExpertPass::quantise_blocks(const float* row, int size, const std::int32_t* gather, float factor, unsigned char* out,
                                 int blocks, int first, int last) const {
  float block[kBlock];
  for (int b = first; b < last; ++b) {
    const int k0 = b * kBlock;
    if (gather) {
      for (int k = 0; k < kBlock; ++k) block[k] = gather[k0 + k] >= 0 ? row[gather[k0 + k]] : 0.0f;
    } else {
      const int real = std::min(kBlock, size - k0);
      std::memcpy(block, row + k0, static_cast<std::size_t>(real) * sizeof(float));
      std::fill(block + real, block + kBlock, 0.0f);
    }
    kernels_.quantise(spec_.precision, rep_, block, factor, out, b, blocks);
  }
}

void ExpertPass::quantise_input(const float* r, std::int64_t stride, std::int64_t tokens) {
  const int blocks = w_.blocks_hidden;
  const std::int64_t pieces = div_up(blocks, kBlocksPerItem), rows = per_pair_input() ? pair_count_ : tokens;
  for (std::int64_t i = input_items_.claim(1); i < rows * pieces; i = input_items_.claim(1)) {
    const std::int64_t row = i / pieces;
    const int first = static_cast<int>(i % pieces) * kBlocksPerItem;
    const std::int64_t token = per_pair_input() ? pairs_[row].token : row;
    const float factor = scales_input() ? pairs_[row].weight : 1.0f;
    quantise_blocks(r + token * stride, w_.hidden, w_.gather_hidden(), factor, x_ + static_cast<std::size_t>(row) * x_bytes_,
                    blocks, first, std::min(blocks, first + kBlocksPerItem));
  }
}

void ExpertPass::gate_up(Crew& crew, float* scratch) {
  const std::int64_t tiles = w_.tiles_intermediate, chunks = group_count_ ? groups_[group_count_ - 1].chunks : 0;
  const std::int64_t grain = std::clamp<std::int64_t>(tiles * chunks / (crew.count * 16), 1, 8);
  const unsigned char* rows[kChunk];
  float* h[kChunk];
  float *gate = scratch, *up = scratch + kChunk * kRows;
  const auto one = [&](const Group& group, std::int64_t first, std::int64_t tile) {
    const int tokens = static_cast<int>(std::min<std::int64_t>(chunk_, group.first + group.count - first));
    for (int t = 0; t < tokens; ++t) {
      const std::int64_t pair = first + t;
      rows[t] = x_ + static_cast<std::size_t>(per_pair_input() ? pair : pairs_[pair].token) * x_bytes_;
      h[t] = h_ + (pair * tiles + tile) * kRows;
    }
    const MatrixView mg = w_.gate(group.expert), mu = w_.up(group.expert);
    const float *gate_bias = w_.bias(group.expert, PackedExperts::Gate, tile), *up_bias = w_.bias(group.expert, PackedExperts::Up, tile);
    for (const float* wanted : {gate_bias, up_bias, mg.scale_of(tile), mu.scale_of(tile)}) __builtin_prefetch(wanted);
    const TileKernel kernel = kernels_.tile(mg.format, mg.kind, rep_);
    kernel({mg.tile(tile), mg.scale_of(tile), mg.blocks, rows, tokens, gate});
    kernel({mu.tile(tile), mu.scale_of(tile), mu.blocks, rows, tokens, up});
    crew.enter(Stage::Activation);
    kernels_.gate_up(spec_.epilogue, gate, up, gate_bias, up_bias, tokens, h);
    if (spec_.round_h)
      for (int t = 0; t < tokens; ++t)
        for (int k = 0; k < kRows; ++k) h[t][k] = rounded(h[t][k], spec_.io);
    crew.enter(Stage::GateUp);
  };
  TileShares(counters_).work(crew, tiles, chunks, grain, [&](std::int64_t tile, std::int64_t width, std::int64_t from, std::int64_t to) {
    std::int32_t g = 0;
    for (std::int64_t i = from; i < to; ++i) {
      const std::int64_t chunk = i / width;
      while (groups_[g].chunks <= chunk) ++g;
      const std::int64_t within = chunk - (g ? groups_[g - 1].chunks : 0);
      one(groups_[g], groups_[g].first + within * chunk_, tile + i % width);
    }
  });
}

void ExpertPass::quantise_h() {
  const int blocks = w_.blocks_intermediate;
  const std::int64_t pieces = div_up(blocks, kBlocksPerItem), width = w_.tiles_intermediate * kRows;
  for (std::int64_t i = h_items_.claim(1); i < pair_count_ * pieces; i = h_items_.claim(1)) {
    const std::int64_t pair = i / pieces;
    const int first = static_cast<int>(i % pieces) * kBlocksPerItem, last = std::min(blocks, first + kBlocksPerItem);
    quantise_blocks(h_ + pair * width, w_.intermediate, w_.gather_intermediate(), 1.0f, hq_ + static_cast<std::size_t>(pair) * h_bytes_,
                    blocks, first, last);
  }
}

void ExpertPass::down(Crew& crew, std::int64_t tile, int tiles, std::int64_t tokens, float* acc, float* scratch) const {
  const unsigned char* rows[kChunk];
  for (std::int32_t g = 0; g < group_count_; ++g) {
    const Group& group = groups_[g];
    const MatrixView m = w_.down(group.expert);
    const TileKernel kernel = kernels_.tile(m.format, m.kind, rep_);
    for (std::int64_t first = group.first; first < group.first + group.count; first += chunk_) {
      const int count = static_cast<int>(std::min<std::int64_t>(chunk_, group.first + group.count - first));
      for (int t = 0; t < count; ++t) rows[t] = hq_ + static_cast<std::size_t>(first + t) * h_bytes_;
      for (int j = 0; j < tiles; ++j) {
        const float* bias = w_.bias(group.expert, PackedExperts::Down, tile + j);
        for (const float* wanted : {bias, m.scale_of(tile + j)}) __builtin_prefetch(wanted);
        const std::uint8_t* next = j + 1 == tiles && g + 1 < group_count_ ? w_.down(groups_[g + 1].expert).tile(tile) : nullptr;
        kernel({m.tile(tile + j), m.scale_of(tile + j), m.blocks, rows, count, scratch, next});
        crew.enter(Stage::Combine);
        for (int t = 0; t < count; ++t) {
          const Pair& p = pairs_[first + t];
          if (!p.counts) continue;
          const float weight = spec_.affinity == AffinityScale::Post ? p.weight : 1.0f;
          kernels_.accumulate(acc + (j * tokens + p.token) * kRows, scratch + t * kRows, bias, weight);
        }
        crew.enter(Stage::Down);
      }
    }
  }
}

}  // namespace moedecode
