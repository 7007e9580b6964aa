// The whole block in the native core: the bitwise invariants, several callers at once, and a fork in the middle.
#include <sys/wait.h>
#include <unistd.h>

#include <cstring>
#include <limits>
#include <thread>
#include <vector>

#include "../block.h"
#include "check.h"

using namespace moedecode;

namespace {

std::vector<std::int32_t> natural_order(int size) {
  std::vector<std::int32_t> order(static_cast<std::size_t>(round_up(size, kBlock)), -1);
  for (int i = 0; i < size; ++i) order[static_cast<std::size_t>(i)] = i;
  return order;
}

// A small MXFP4 block with biases: H 96, I 80, E 7, K 3.
struct Model {
  static constexpr int kHidden = 96, kIntermediate = 80, kExperts = 7, kTopK = 3;
  PackedExperts experts{kExperts, kHidden, kIntermediate, Format::MXFP4, ScaleKind::E8M0, natural_order(kHidden),
                        natural_order(kIntermediate)};
  std::vector<float> router_weight, bias;
  PackedMatrix router;
  BlockSpec spec{};

  explicit Model(std::uint64_t seed) : Model(Random(seed)) {}
  explicit Model(Random random) : router_weight(random_floats(random, kExperts * kHidden)), router(router_source(), Format::F32, 1) {
    for (int e = 0; e < kExperts; ++e) {
      fill(e, PackedExperts::Gate, kIntermediate, kHidden, random);
      fill(e, PackedExperts::Up, kIntermediate, kHidden, random);
      fill(e, PackedExperts::Down, kHidden, kIntermediate, random);
    }
    constexpr float inf = std::numeric_limits<float>::infinity();
    spec.norm = {kHidden, kHidden, 1e-6, nullptr, IoType::F32};
    spec.router = {kExperts, kTopK, Score::Softmax, true, true, 0.0f, 1.0f, IoType::BF16, nullptr, nullptr};
    spec.experts = {{Activation::Swish, 1.702f, 1.0f, -inf, 7.0f, -7.0f, 7.0f}, AffinityScale::Post, Precision::A16, false, IoType::F32};
  }

  std::vector<float> run(const std::vector<float>& x, Strategy strategy, int threads) const {
    std::vector<float> out(x.size());
    BlockCall call{};
    call.tokens = static_cast<std::int64_t>(x.size()) / kHidden;
    call.x = x.data();
    call.out = out.data();
    call.strategy = strategy;
    call.threads = threads;
    run_block(spec, router.view(), experts, nullptr, call);
    return out;
  }

  static std::vector<float> random_floats(Random& random, int n) {
    std::vector<float> v(static_cast<std::size_t>(n));
    for (float& x : v) x = random.uniform();
    return v;
  }

 private:
  MatrixSource router_source() const {
    return {reinterpret_cast<const std::uint8_t*>(router_weight.data()), kExperts, kHidden, kHidden * 4, 4, nullptr, 0, 0};
  }
  void fill(int e, PackedExperts::Projection which, int rows, int cols, Random& random) {
    const std::int64_t blocks = div_up(cols, kBlock);
    std::vector<std::uint8_t> codes(static_cast<std::size_t>(rows * cols / 2)), scales(static_cast<std::size_t>(rows * blocks));
    for (std::uint8_t& c : codes) c = static_cast<std::uint8_t>(random.bits());
    for (std::uint8_t& s : scales) s = static_cast<std::uint8_t>(120 + random.below(4));
    experts.set(e, which, {codes.data(), rows, cols, cols / 2, 1, scales.data(), blocks, 1}, 2);
    experts.set_bias(e, which, random_floats(random, rows).data(), rows);
  }
};

bool same(const std::vector<float>& a, const std::vector<float>& b) {
  return a.size() == b.size() && std::memcmp(a.data(), b.data(), a.size() * sizeof(float)) == 0;
}

void invariants(const Model& m) {
  Random random(2);
  const std::vector<float> x = Model::random_floats(random, 70 * Model::kHidden);
  const std::vector<float> want = m.run(x, Strategy::Grouped, 1);
  for (const Strategy s : {Strategy::Selective, Strategy::Grouped, Strategy::AllExpert})
    for (const int threads : {1, 2, 3}) CHECK(same(m.run(x, s, threads), want), "strategy %d, %d threads", static_cast<int>(s), threads);
  for (const int t : {0, 31, 69}) {
    const std::vector<float> alone(x.begin() + t * Model::kHidden, x.begin() + (t + 1) * Model::kHidden);
    const std::vector<float> got = m.run(alone, Strategy::Selective, 2);
    CHECK(std::memcmp(got.data(), want.data() + t * Model::kHidden, got.size() * 4) == 0, "token %d alone differs", t);
  }
  CHECK(m.run({}, Strategy::Grouped, 2).empty(), "no tokens");
}

void several_callers(const Model& a, const Model& b) {
  Random random(3);
  const std::vector<float> x = Model::random_floats(random, 9 * Model::kHidden);
  const std::vector<float> want_a = a.run(x, Strategy::Grouped, 2), want_b = b.run(x, Strategy::Grouped, 2);
  CHECK(!same(want_a, want_b), "two models, one result");
  std::vector<std::thread> callers;
  for (int i = 0; i < 8; ++i)
    callers.emplace_back([&, i] {
      for (int n = 0; n < 20; ++n) {
        const bool first = (i + n) % 2 == 0;
        CHECK(same((first ? a : b).run(x, Strategy::Grouped, 1 + n % 3), first ? want_a : want_b), "caller %d, call %d", i, n);
      }
    });
  for (std::thread& t : callers) t.join();
}

[[maybe_unused]] void forks(const Model& m) {
  Random random(4);
  const std::vector<float> x = Model::random_floats(random, 5 * Model::kHidden);
  const std::vector<float> want = m.run(x, Strategy::Grouped, 2);
  const pid_t child = fork();
  if (child == 0) _exit(same(m.run(x, Strategy::Grouped, 2), want) ? 0 : 1);
  int status = -1;
  waitpid(child, &status, 0);
  CHECK(WIFEXITED(status) && WEXITSTATUS(status) == 0, "the child of a fork got status %d", status);
  CHECK(same(m.run(x, Strategy::Grouped, 2), want), "the parent differs after a fork");
}

}  // namespace

int main() {
  for (const std::string& isa : available_isas()) {
    use_isa(isa);
    const Model a(10), b(11);
    invariants(a);
    several_callers(a, b);
#if !defined(__SANITIZE_THREAD__)  // which does not follow threads into the child of a fork
    forks(a);
#endif
    std::printf("%s: ok\n", isa.c_str());
  }
}
