// The router of one token, after its logits: scores, top-k, affinities.
#pragma once

#include <cstdint>

#include "formats.h"

namespace moedecode {

enum class Score : std::uint8_t { Softmax, Sigmoid };

struct RouterSpec {
  int experts, top_k;
  Score score;
  bool pre_norm;    // score all logits before top-k, else only the selected ones
  bool normalise;   // divide the selected affinities by (their sum + norm_eps)
  float norm_eps, scale;
  IoType matmul_type;
  const float* bias;            // [experts] or null, part of the logits
  const float* selection_bias;  // [experts] or null, part of the selection only
};

// From logits [experts] (bias not yet added; added here) to the ids [top_k] in descending order of selection score, ties
// to the lowest id, NaN last, and their affinities [top_k]. Without a selection bias the logits are what is compared.
// `row` [experts], if not null, receives the affinity
// row: dense when scores are pre-norm and not normalised, else zero where not selected. `scratch` holds [experts].
void route(const RouterSpec& spec, float* logits, std::int32_t* index, float* affinity, float* row, float* scratch);

}  // namespace moedecode
