#include "block.h"

#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstring>
#include <limits>
#include <optional>

#include "rounding.h"

namespace moedecode {

namespace {

std::atomic<std::size_t> workspace_limit{std::size_t{512} << 20};  // tokens are taken in chunks that need no more
constexpr int kRouterChunk = 64;                                 // tokens that pass over a router tile together

// Memory between the stages, shared by all calls: callers take turns. It grows and is never given back.
unsigned char* workspace(std::size_t bytes) {
  static Buffer* memory = new Buffer();
  if (memory->bytes() < bytes) {
    *memory = Buffer();  // first give back, so that the peak is one workspace
    *memory = Buffer(bytes);
  }
  return memory->as<unsigned char>();
}

template <class T>
T* advance(T* p, std::int64_t elements) {
  return p ? p + elements : nullptr;
}
const void* advance(const void* p, std::int64_t elements, IoType t) {
  return advance(static_cast<const unsigned char*>(p), elements * (t == IoType::F32 ? 4 : 2));
}
void* advance(void* p, std::int64_t elements, IoType t) {
  return advance(static_cast<unsigned char*>(p), elements * (t == IoType::F32 ? 4 : 2));
}

// --- router ---

// Logits of all tokens and what is chosen from them; memory and the two stages.
class RouterPass {
 public:
  RouterPass(const RouterSpec& spec, const MatrixView& matrix) : spec_(spec), m_(matrix) {}

  void place(Arena& arena, std::int64_t tokens, int threads) {
    x_ = arena.take<float>(static_cast<std::size_t>(tokens * columns()));
    logits_ = arena.take<float>(static_cast<std::size_t>(tokens * width()));
    index = arena.take<std::int32_t>(static_cast<std::size_t>(tokens * spec_.top_k));
    weight = arena.take<float>(static_cast<std::size_t>(tokens * spec_.top_k));
    scratch_ = arena.take<float>(static_cast<std::size_t>(threads * scratch_floats()));
  }

  // r [H], natural order, rounded to the matmul type.
  void load(std::int64_t token, const float* r, int hidden) {
    float* x = x_ + token * columns();
    for (int i = 0; i < hidden; ++i) x[i] = rounded(r[i], spec_.matmul_type);
    std::fill(x + hidden, x + columns(), 0.0f);
  }

  void multiply(const Worker& w, std::int64_t tokens) {
    const TileKernel kernel = kernels().tile(m_.format, ScaleKind::None, ActRep::F32);
    const std::int64_t tiles = width() / kRows, chunks = div_up(tokens, kRouterChunk);
    float* out = scratch_ + w.id * scratch_floats();
    const unsigned char* rows[kRouterChunk];
    for (std::int64_t i = items_.claim(1); i < tiles * chunks; i = items_.claim(1)) {
      const std::int64_t tile = i % tiles, first = i / tiles * kRouterChunk;
      const int count = static_cast<int>(std::min<std::int64_t>(kRouterChunk, tokens - first));
      for (int t = 0; t < count; ++t) rows[t] = reinterpret_cast<const unsigned char*>(x_ + (first + t) * columns());
      kernel({m_.tile(tile), nullptr, m_.blocks, rows, count, out});
      for (int t = 0; t < count; ++t)
        std::memcpy(logits_ + (first + t) * width() + tile * kRows, out + t * kRows, kRows * sizeof(float));
    }
  }

  // Chooses for one token and writes what the caller asked for (null: not asked).
  void choose(const Worker& w, std::int64_t t, TokenState state, IoType io, void* logits, std::int32_t* ids, float* row) {
    const int k = spec_.top_k, e = spec_.experts;
    float* mine = logits_ + t * width();
    std::int32_t* chosen = index + t * k;
    route(spec_, mine, chosen, weight + t * k, row, scratch_ + w.id * scratch_floats());
    if (state == TokenState::Masked) {
      std::fill_n(mine, e, 0.0f);
      std::fill_n(chosen, k, -1);
      if (row) std::fill_n(row, e, 0.0f);
    }
    if (logits)
      for (int i = 0; i < e; ++i) store_io(logits, i, io, mine[i]);
    if (ids) std::copy_n(chosen, k, ids);
    if (state == TokenState::NotFinite) std::fill_n(chosen, k, -1);  // reported as 0..K-1, but loads no expert
  }

  std::int32_t* index = nullptr;  // [T, K]
  float* weight = nullptr;        // [T, K]

 private:
  std::int64_t columns() const { return static_cast<std::int64_t>(m_.blocks) * kBlock; }
  std::int64_t width() const { return round_up(spec_.experts, kRows); }
  std::int64_t scratch_floats() const { return std::max<std::int64_t>(width(), kRouterChunk * kRows); }

  const RouterSpec& spec_;
  const MatrixView& m_;
  float *x_ = nullptr, *logits_ = nullptr, *scratch_ = nullptr;
  Counter items_;
};

// --- experts ---

// The passes of one call (routed, then shared) from the normed hidden state to the rounded output.
class ExpertStages {
 public:
  ExpertPass* passes[2];
  int count = 0;

  void place(Arena& arena, std::int64_t tokens, int threads) {
    tokens_ = tokens;
    // Neighbouring tiles are one stretch of memory, and many tokens' activations are read once for all of them.
    // Few tokens: longer stretches, since each expert's is another one (T = 1: 3 % of a call).
    tiles_ = std::clamp(passes[0]->weights().tiles_hidden / (threads * 8), 1, tokens <= 8 ? 8 : 4);
    per_thread_ = ExpertPass::kScratch + static_cast<std::size_t>(tiles_ * tokens * kRows);
    scratch_ = arena.take<float>(per_thread_ * static_cast<std::size_t>(threads));
    counters_ = arena.take<Counter>(static_cast<std::size_t>(threads));
  }

  void run(Crew& crew, const float* r, std::int64_t stride, const TokenState* state, void* out, IoType io) {
    float* scratch = scratch_ + static_cast<std::size_t>(crew.id) * per_thread_;
    crew.enter(Stage::Quantise);
    for (int p = 0; p < count; ++p) passes[p]->quantise_input(r, stride, tokens_);
    crew.barrier();
    crew.enter(Stage::GateUp);
    for (int p = 0; p < count; ++p) passes[p]->gate_up(crew, scratch);
    crew.barrier();
    crew.enter(Stage::Quantise);
    for (int p = 0; p < count; ++p) passes[p]->quantise_h();
    crew.barrier();
    crew.enter(Stage::Down);
    const int hidden = passes[0]->weights().hidden, all = passes[0]->weights().tiles_hidden;
    float* acc = scratch + ExpertPass::kScratch;
    TileShares(counters_).work(crew, all, 1, tiles_, [&](std::int64_t first, std::int64_t, std::int64_t from, std::int64_t to) {
      const std::int64_t tile = first + from;
      const int tiles = static_cast<int>(to - from);
      std::memset(acc, 0, static_cast<std::size_t>(tiles * tokens_ * kRows) * sizeof(float));
      for (int p = 0; p < count; ++p) passes[p]->down(crew, tile, tiles, tokens_, acc, scratch);
      crew.enter(Stage::Combine);
      for (int j = 0; j < tiles; ++j) store(acc + j * tokens_ * kRows, (tile + j) * kRows, hidden, state, out, io);
      crew.enter(Stage::Down);
    });
  }

 private:
  void store(const float* acc, std::int64_t column, int hidden, const TokenState* state, void* out, IoType io) const {
    const std::int64_t n = std::min<std::int64_t>(kRows, hidden - column);
    for (std::int64_t t = 0; t < tokens_; ++t) {
      const bool broken = state && state[t] == TokenState::NotFinite;
      for (std::int64_t i = 0; i < n; ++i)
        store_io(out, t * hidden + column + i, io, broken ? std::numeric_limits<float>::quiet_NaN() : acc[t * kRows + i]);
    }
  }

  std::int64_t tokens_ = 0;
  int tiles_ = 1;
  std::size_t per_thread_ = 0;
  float* scratch_ = nullptr;
  Counter* counters_ = nullptr;  // one per thread
};

float gate_of(const float* r, const float* gate, int n) {
  double chain[8] = {};
  for (int i = 0; i < n; ++i) chain[i % 8] += static_cast<double>(r[i]) * static_cast<double>(gate[i]);
  double sum = 0;
  for (const double c : chain) sum += c;
  return static_cast<float>(1.0 / (1.0 + std::exp(-sum)));
}

// Runs `body(first, count)` over chunks of tokens whose workspace, measured by `need(count)`, stays below the limit.
template <class Need, class Body>
void in_chunks(std::int64_t tokens, Need need, Body body) {
  if (tokens == 0) return;
  std::int64_t chunk = tokens;
  while (chunk > 1 && need(chunk) > workspace_limit.load(std::memory_order_relaxed)) chunk = div_up(chunk, 2);
  for (std::int64_t first = 0; first < tokens; first += chunk) body(first, std::min(chunk, tokens - first));
}

// One chunk of a block call.
class BlockRun {
 public:
  BlockRun(const BlockSpec& spec, const MatrixView& router, const PackedExperts& experts, const PackedExperts* shared,
           const BlockCall& call)
      : spec_(spec), call_(call), router_(spec.router, router), routed_(experts, spec.experts) {
    stages_.passes[stages_.count++] = &routed_;
    if (shared) stages_.passes[stages_.count++] = &shared_.emplace(*shared, spec.shared);
  }

  std::size_t place(unsigned char* base) {
    Arena arena(base);
    const std::int64_t t = call_.tokens;
    stride_ = round_up(spec_.norm.hidden, kRows);
    r_ = arena.take<float>(static_cast<std::size_t>(t * stride_));
    state_ = arena.take<TokenState>(static_cast<std::size_t>(t));
    usable_ = arena.take<std::uint8_t>(static_cast<std::size_t>(t));
    shared_weight_ = arena.take<float>(static_cast<std::size_t>(t));
    router_.place(arena, t, call_.threads);
    const int local = routed_.weights().experts;
    if (call_.strategy == Strategy::AllExpert) {
      dense_weight_ = arena.take<float>(static_cast<std::size_t>(t * local));
      dense_counts_ = arena.take<std::uint8_t>(static_cast<std::size_t>(t * local));
    }
    routed_.place(arena, t, pair_capacity(call_.strategy, t, spec_.router.top_k, local), call_.threads);
    if (shared_) shared_->place(arena, t, t, call_.threads);
    stages_.place(arena, t, call_.threads);
    return arena.used();
  }

  void run(const Worker& w) {
    Crew crew(w, call_.profile);
    crew.enter(Stage::Norm);
    for (std::int64_t t = tokens_.claim(1); t < call_.tokens; t = tokens_.claim(1)) normalise(t);
    crew.barrier();
    crew.enter(Stage::Router);
    router_.multiply(w, call_.tokens);
    crew.barrier();
    crew.enter(Stage::Router);
    for (std::int64_t t = choices_.claim(1); t < call_.tokens; t = choices_.claim(1)) choose(w, t);
    crew.barrier();
    crew.enter(Stage::Group);
    if (w.id == 0) group();
    crew.barrier();
    stages_.run(crew, r_, stride_, state_, call_.out, spec_.norm.io);
  }

 private:
  void normalise(std::int64_t t) {
    const IoType io = spec_.norm.io;
    const std::int64_t at = t * spec_.norm.hidden;
    float* r = r_ + t * stride_;
    const bool finite = rms_norm(spec_.norm, advance(call_.x, at, io), advance(call_.residual, at, io),
                                 advance(call_.residual_out, at, io), r);
    const bool masked = call_.mask && !call_.mask[t];
    state_[t] = masked ? TokenState::Masked : finite ? TokenState::Usable : TokenState::NotFinite;
    usable_[t] = state_[t] == TokenState::Usable;
    router_.load(t, r, spec_.norm.hidden);
    if (spec_.shared_gate) shared_weight_[t] = gate_of(r, spec_.shared_gate, spec_.norm.hidden);
  }

  void choose(const Worker& w, std::int64_t t) {
    const std::int64_t e = spec_.router.experts;
    router_.choose(w, t, state_[t], spec_.norm.io, advance(call_.logits, t * e, spec_.norm.io),
                   advance(call_.index, t * spec_.router.top_k), advance(call_.affinities, t * e));
  }

  void group() {
    const std::int64_t t = call_.tokens;
    const int k = spec_.router.top_k, local = routed_.weights().experts;
    if (call_.strategy == Strategy::AllExpert) {
      const bool all_count = spec_.experts.affinity == AffinityScale::None;
      std::fill_n(dense_weight_, t * local, 0.0f);
      std::fill_n(dense_counts_, t * local, static_cast<std::uint8_t>(all_count));
      for (std::int64_t i = 0; i < t * k; ++i) {
        const std::int32_t e = router_.index[i] - call_.first_expert;
        if (router_.index[i] < 0 || e < 0 || e >= local) continue;
        dense_weight_[i / k * local + e] = router_.weight[i];
        dense_counts_[i / k * local + e] = 1;
      }
      routed_.group_all(t, usable_, dense_weight_, dense_counts_);
    } else {
      routed_.group_selected(call_.strategy, t, k, nullptr, router_.index, router_.weight, call_.first_expert);
    }
    if (shared_) shared_->group_shared(t, usable_, spec_.shared_gate ? shared_weight_ : nullptr);
  }

  const BlockSpec& spec_;
  const BlockCall& call_;
  RouterPass router_;
  ExpertPass routed_;
  std::optional<ExpertPass> shared_;
  ExpertStages stages_;
  std::int64_t stride_ = 0;
  float *r_ = nullptr, *shared_weight_ = nullptr, *dense_weight_ = nullptr;
  std::uint8_t *usable_ = nullptr, *dense_counts_ = nullptr;
  TokenState* state_ = nullptr;
  Counter tokens_, choices_;
};

BlockCall part_of(const BlockSpec& spec, const BlockCall& call, std::int64_t first, std::int64_t count) {
  const IoType io = spec.norm.io;
  const std::int64_t h = spec.norm.hidden, e = spec.router.experts;
  BlockCall part = call;
  part.tokens = count;
  part.x = advance(call.x, first * h, io);
  part.residual = advance(call.residual, first * h, io);
  part.mask = advance(call.mask, first);
  part.out = advance(call.out, first * h, io);
  part.residual_out = advance(call.residual_out, first * h, io);
  part.logits = advance(call.logits, first * e, io);
  part.index = advance(call.index, first * spec.router.top_k);
  part.affinities = advance(call.affinities, first * e);
  return part;
}

// Choosing an instruction set may throw: on the caller's thread, before any worker asks.
void choose_kernels() { kernels(); }

}  // namespace

std::size_t set_workspace_limit(std::size_t bytes) { return workspace_limit.exchange(bytes); }

void run_block(const BlockSpec& spec, const MatrixView& router, const PackedExperts& experts, const PackedExperts* shared,
               const BlockCall& call) {
  choose_kernels();
  ThreadPool& pool = ThreadPool::instance();
  const auto turn = pool.take_turn();
  const auto need = [&](std::int64_t count) {
    const BlockCall part = part_of(spec, call, 0, count);
    return BlockRun(spec, router, experts, shared, part).place(nullptr);
  };
  in_chunks(call.tokens, need, [&](std::int64_t first, std::int64_t count) {
    const BlockCall part = part_of(spec, call, first, count);
    BlockRun run(spec, router, experts, shared, part);
    run.place(workspace(run.place(nullptr)));
    pool.run(call.threads, [&](const Worker& w) { run.run(w); });
  });
}

void run_router(const RouterSpec& spec, const MatrixView& matrix, const RouterCall& call) {
  choose_kernels();
  ThreadPool& pool = ThreadPool::instance();
  const auto turn = pool.take_turn();
  RouterPass pass(spec, matrix);
  const auto place = [&](unsigned char* base, float** rows) {
    Arena arena(base);
    pass.place(arena, call.tokens, call.threads);
    *rows = arena.take<float>(static_cast<std::size_t>(call.threads * call.hidden));
    return arena.used();
  };
  float* rows = nullptr;
  place(workspace(place(nullptr, &rows)), &rows);
  Counter loads, choices;
  pool.run(call.threads, [&](const Worker& w) {
    float* r = rows + w.id * call.hidden;
    for (std::int64_t t = loads.claim(1); t < call.tokens; t = loads.claim(1)) {
      const void* x = advance(call.x, t * call.hidden, call.io);
      for (int i = 0; i < call.hidden; ++i) r[i] = load_io(x, i, call.io);
      pass.load(t, r, call.hidden);
    }
    w.barrier();
    pass.multiply(w, call.tokens);
    w.barrier();
    for (std::int64_t t = choices.claim(1); t < call.tokens; t = choices.claim(1))
      pass.choose(w, t, TokenState::Usable, call.io, advance(call.logits, t * spec.experts, call.io),
                  call.index + t * spec.top_k, call.affinities + t * spec.experts);
  });
}

namespace {

// A call of the experts alone: the workspace of one chunk and its stages.
class ExpertsRun {
 public:
  ExpertsRun(const ExpertSpec& spec, const PackedExperts& experts, const ExpertsCall& call)
      : spec_(spec), call_(call), pass_(experts, spec) {
    stages_.passes[stages_.count++] = &pass_;
  }

  std::size_t place(unsigned char* base) {
    Arena arena(base);
    const std::int64_t t = call_.tokens, local = pass_.weights().experts;
    r_ = arena.take<float>(static_cast<std::size_t>(t * stride()));
    state_ = arena.take<TokenState>(static_cast<std::size_t>(t));
    usable_ = arena.take<std::uint8_t>(static_cast<std::size_t>(t));
    counts_ = arena.take<std::uint8_t>(static_cast<std::size_t>(dense() ? t * local : 0));
    pass_.place(arena, t, pair_capacity(call_.strategy, t, call_.top_k, pass_.weights().experts), call_.threads);
    stages_.place(arena, t, call_.threads);
    return arena.used();
  }

  void run(const Worker& w) {
    for (std::int64_t t = tokens_.claim(1); t < call_.tokens; t = tokens_.claim(1)) load(t);
    w.barrier();
    if (w.id == 0) group();
    w.barrier();
    Crew crew(w, nullptr);
    stages_.run(crew, r_, stride(), state_, call_.out, call_.out_type);
  }

 private:
  bool dense() const { return call_.strategy == Strategy::AllExpert; }
  std::int64_t stride() const { return round_up(pass_.weights().hidden, kRows); }

  void load(std::int64_t t) {
    const std::int64_t hidden = pass_.weights().hidden;
    const void* x = advance(call_.x, t * hidden, spec_.io);
    float* r = r_ + t * stride();
    bool finite = true;
    for (std::int64_t i = 0; i < hidden; ++i) {
      r[i] = load_io(x, i, spec_.io);
      finite = finite && std::isfinite(r[i]);
    }
    state_[t] = finite ? TokenState::Usable : TokenState::NotFinite;
    usable_[t] = finite;
  }

  void group() {
    const std::int64_t t = call_.tokens;
    if (!dense()) return pass_.group_selected(call_.strategy, t, call_.top_k, usable_, call_.index, call_.affinities, call_.first_expert);
    const bool all_count = spec_.affinity == AffinityScale::None;
    for (std::int64_t i = 0; i < t * pass_.weights().experts; ++i) counts_[i] = all_count || call_.affinities[i] != 0.0f;
    pass_.group_all(t, usable_, call_.affinities, counts_);
  }

  const ExpertSpec& spec_;
  const ExpertsCall& call_;
  ExpertPass pass_;
  ExpertStages stages_;
  float* r_ = nullptr;
  TokenState* state_ = nullptr;
  std::uint8_t *usable_ = nullptr, *counts_ = nullptr;
  Counter tokens_;
};

ExpertsCall part_of(const ExpertSpec& spec, const PackedExperts& experts, const ExpertsCall& call, std::int64_t first,
                    std::int64_t count) {
  const std::int64_t columns = call.strategy == Strategy::AllExpert ? experts.experts : call.top_k;
  ExpertsCall part = call;
  part.tokens = count;
  part.x = advance(call.x, first * experts.hidden, spec.io);
  part.index = advance(call.index, first * call.top_k);
  part.affinities = advance(call.affinities, first * columns);
  part.out = advance(call.out, first * experts.hidden, call.out_type);
  return part;
}

}  // namespace

void run_experts(const ExpertSpec& spec, const PackedExperts& experts, const ExpertsCall& call) {
  choose_kernels();
  ThreadPool& pool = ThreadPool::instance();
  const auto turn = pool.take_turn();
  const auto need = [&](std::int64_t count) {
    const ExpertsCall part = part_of(spec, experts, call, 0, count);
    return ExpertsRun(spec, experts, part).place(nullptr);
  };
  in_chunks(call.tokens, need, [&](std::int64_t first, std::int64_t count) {
    const ExpertsCall part = part_of(spec, experts, call, first, count);
    ExpertsRun run(spec, experts, part);
    run.place(workspace(run.place(nullptr)));
    pool.run(call.threads, [&](const Worker& w) { run.run(w); });
  });
}

void run_norm(const NormSpec& spec, std::int64_t tokens, const void* x, const void* residual, void* out, void* residual_out,
              int threads) {
  ThreadPool& pool = ThreadPool::instance();
  const auto turn = pool.take_turn();
  float* rows = reinterpret_cast<float*>(workspace(static_cast<std::size_t>(threads) * static_cast<std::size_t>(spec.hidden) * 4));
  Counter next;
  pool.run(threads, [&](const Worker& w) {
    float* r = rows + static_cast<std::int64_t>(w.id) * spec.hidden;
    for (std::int64_t t = next.claim(1); t < tokens; t = next.claim(1)) {
      const std::int64_t at = t * spec.hidden;
      rms_norm(spec, advance(x, at, spec.io), advance(residual, at, spec.io), advance(residual_out, at, spec.io), r);
      void* row = advance(out, at, spec.io);
      for (int i = 0; i < spec.hidden; ++i) store_io(row, i, spec.io, r[i]);
    }
  });
}

}  // namespace moedecode
