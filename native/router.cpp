#include "router.h"

#include <cmath>
#include <cstring>
#include <limits>

namespace moedecode {

namespace {

void softmax(float* x, int n) {
  float peak = -std::numeric_limits<float>::infinity();
  for (int i = 0; i < n; ++i) peak = x[i] > peak ? x[i] : peak;
  double sum = 0;
  for (int i = 0; i < n; ++i) {
    x[i] = std::exp(x[i] - peak);
    sum += static_cast<double>(x[i]);
  }
  for (int i = 0; i < n; ++i) x[i] = static_cast<float>(static_cast<double>(x[i]) / sum);
}

void score(Score s, float* x, int n) {
  if (s == Score::Softmax) return softmax(x, n);
  for (int i = 0; i < n; ++i) x[i] = 1.0f / (1.0f + std::exp(-x[i]));
}

// Insertion into a descending list: a later score must be strictly larger, so ties keep the lowest id.
void select(const float* value, const float* bias, int n, int k, std::int32_t* index, float* best) {
  int held = 0;
  for (int i = 0; i < n; ++i) {
    float v = bias ? value[i] + bias[i] : value[i];
    if (std::isnan(v)) v = -std::numeric_limits<float>::infinity();
    if (held == k && !(v > best[k - 1])) continue;
    int at = held < k ? held++ : k - 1;
    for (; at > 0 && v > best[at - 1]; --at) {
      best[at] = best[at - 1];
      index[at] = index[at - 1];
    }
    best[at] = v;
    index[at] = i;
  }
}

}  // namespace

void route(const RouterSpec& spec, float* logits, std::int32_t* index, float* affinity, float* row, float* scratch) {
  const int n = spec.experts, k = spec.top_k;
  if (spec.bias)
    for (int i = 0; i < n; ++i) logits[i] += spec.bias[i];
  std::memcpy(scratch, logits, static_cast<std::size_t>(n) * sizeof(float));
  if (spec.pre_norm) score(spec.score, scratch, n);
  // Without a bias scores order as their logits do, and logits do not saturate.
  select(spec.selection_bias ? scratch : logits, spec.selection_bias, n, k, index, affinity);
  for (int j = 0; j < k; ++j) affinity[j] = scratch[index[j]];
  if (!spec.pre_norm) score(spec.score, affinity, k);

  float factor = spec.scale;
  if (spec.normalise) {
    double sum = 0;
    for (int j = 0; j < k; ++j) sum += static_cast<double>(affinity[j]);
    sum += static_cast<double>(spec.norm_eps);
    for (int j = 0; j < k; ++j) affinity[j] = static_cast<float>(static_cast<double>(affinity[j]) / sum);
  }
  for (int j = 0; j < k; ++j) affinity[j] *= factor;
  if (!row) return;
  const bool dense = spec.pre_norm && !spec.normalise;
  for (int i = 0; i < n; ++i) row[i] = dense ? scratch[i] * factor : 0.0f;
  for (int j = 0; j < k; ++j) row[index[j]] = affinity[j];
}

}  // namespace moedecode
