// The expert MLPs of a set of tokens and their weighted sum, inside a parallel region.
//
// Tokens are paired with experts and pairs are grouped: a group is one expert and some of its tokens. The strategies
// differ only in how they group. Sums of a token always run over its pairs in ascending expert id.
#pragma once

#include <cstdint>
#include <vector>

#include "kernels.h"
#include "matrix.h"
#include "memory.h"
#include "profile.h"

namespace moedecode {

enum class Strategy : std::uint8_t { Selective, Grouped, AllExpert };
enum class AffinityScale : std::uint8_t { None, Post, Pre };

struct ExpertSpec {
  GateUpEpilogue epilogue;
  AffinityScale affinity;
  Precision precision;
  bool round_h;  // round h to the io type before it is quantised
  IoType io;
};

struct Pair {
  std::int32_t token;
  float weight;
  bool counts;  // false: computed by a dense strategy, but not selected
};

struct Group {
  std::int32_t expert, first, count;  // pairs [first, first + count)
  std::int64_t chunks;                // chunks of tokens of this and all earlier groups
};

// How many pairs `tokens` tokens can make.
std::int64_t pair_capacity(Strategy s, std::int64_t tokens, int top_k, int local_experts);

// One set of experts applied to one set of tokens: memory, groups and the stages that fill it.
class ExpertPass {
 public:
  ExpertPass(const PackedExperts& weights, const ExpertSpec& spec)
      : w_(weights), spec_(spec), kernels_(kernels()), rep_(act_rep(kernels_, weights.format, spec.precision)) {}

  void place(Arena& arena, std::int64_t tokens, std::int64_t pairs, int threads);

  // Building groups; one thread. Ids outside [first_expert, first_expert + E_L) and tokens that are not usable (null:
  // all are) are skipped.
  void group_selected(Strategy s, std::int64_t tokens, int top_k, const std::uint8_t* usable, const std::int32_t* index,
                      const float* weight, int first_expert);
  void group_all(std::int64_t tokens, const std::uint8_t* usable, const float* weight, const std::uint8_t* counts);
  void group_shared(std::int64_t tokens, const std::uint8_t* usable, const float* weight);

  // Stages; all threads, with a barrier between them. r: floats [tokens][stride], natural order.
  void quantise_input(const float* r, std::int64_t stride, std::int64_t tokens);
  void gate_up(Crew& crew, float* scratch);
  void quantise_h();
  // Adds this pass's share of `tiles` rows tiles from `tile` on to acc [tiles][tokens][16].
  void down(Crew& crew, std::int64_t tile, int tiles, std::int64_t tokens, float* acc, float* scratch) const;

  const PackedExperts& weights() const { return w_; }

  static constexpr int kChunk = 64;  // most tokens of a group that pass over a tile together
  static constexpr std::size_t kScratch = 2 * kChunk * kRows;  // floats per thread

 private:
  void close_groups();
  bool scales_input() const { return spec_.affinity == AffinityScale::Pre; }
  bool per_pair_input() const { return scales_input() || rep_ == ActRep::BF16Pair; }
  void quantise_blocks(const float* row, int size, const std::int32_t* gather, float factor, unsigned char* out, int blocks,
                       int first, int last) const;

  const PackedExperts& w_;
  const ExpertSpec& spec_;
  const Kernels& kernels_;
  const ActRep rep_;
  std::int64_t pair_count_ = 0;
  std::int32_t group_count_ = 0;
  Pair* pairs_ = nullptr;
  Group* groups_ = nullptr;
  std::int32_t* start_ = nullptr;  // [E_L + 1], for sorting by expert
  unsigned char* x_ = nullptr;     // quantised input: a row per token, or per pair (per_pair_input)
  float* h_ = nullptr;             // [pairs][I16]
  unsigned char* hq_ = nullptr;    // quantised h: a row per pair
  std::size_t x_bytes_ = 0, h_bytes_ = 0;
  int chunk_ = kChunk;               // tokens whose activations the cache holds beside a tile
  Counter* counters_ = nullptr;      // one per thread
  Counter input_items_, h_items_;
};

}  // namespace moedecode
