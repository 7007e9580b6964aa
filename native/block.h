// One call of the block, or of one of its stages: a parallel region over the stages with barriers between them.
#pragma once

#include <cstddef>
#include <cstdint>

#include "experts.h"
#include "matrix.h"
#include "norm.h"
#include "router.h"

namespace moedecode {

// What happens to a token's row of `out`.
enum class TokenState : std::uint8_t { Usable, Masked, NotFinite };

struct BlockSpec {
  NormSpec norm;
  RouterSpec router;
  ExpertSpec experts;
  ExpertSpec shared;          // read only when the block has a shared expert
  const float* shared_gate;   // [hidden] or null
};

// Pointers may be null where the comment says so. All arrays are contiguous.
struct BlockCall {
  std::int64_t tokens;
  const void* x;              // [T, H]
  const void* residual;       // [T, H] or null
  const std::uint8_t* mask;   // [T] or null; 0 marks padding
  void* out;                  // [T, H]
  void* residual_out;         // [T, H] or null
  void* logits;               // [T, E] in the io type, or null
  std::int32_t* index;        // [T, K] or null
  float* affinities;          // [T, E] or null
  Strategy strategy;
  std::int32_t first_expert;
  int threads;
  double* profile;            // [threads][kStages], added to; or null
};

void run_block(const BlockSpec& spec, const MatrixView& router, const PackedExperts& experts, const PackedExperts* shared,
               const BlockCall& call);

// The router alone on x [T, H] of type `io`.
struct RouterCall {
  std::int64_t tokens;
  int hidden;
  IoType io;
  const void* x;
  void* logits;               // [T, E] in the io type
  std::int32_t* index;        // [T, K]
  float* affinities;          // [T, E]
  int threads;
};
void run_router(const RouterSpec& spec, const MatrixView& matrix, const RouterCall& call);

// The experts alone. Selective and grouped: index [T, K] and affinities [T, K]; all-expert: affinities [T, E_L], where an
// exact 0 means not selected unless affinities do not scale.
struct ExpertsCall {
  std::int64_t tokens;
  const void* x;              // [T, H] of type spec.io
  const std::int32_t* index;
  const float* affinities;
  int top_k;
  Strategy strategy;
  std::int32_t first_expert;
  void* out;                  // [T, H]
  IoType out_type;
  int threads;
};
void run_experts(const ExpertSpec& spec, const PackedExperts& experts, const ExpertsCall& call);

// Most bytes between the stages of one call; more tokens than fit are taken in chunks. Returns the limit before.
std::size_t set_workspace_limit(std::size_t bytes);

void run_norm(const NormSpec& spec, std::int64_t tokens, const void* x, const void* residual, void* out, void* residual_out,
              int threads);

}  // namespace moedecode
