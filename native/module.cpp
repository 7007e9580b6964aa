// The Python module moedecode._native: thin bindings. Shapes and dtypes are checked in Python with messages for
// people; here only sizes are checked again, so that no call can read or write outside its arrays.
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <memory>
#include <optional>
#include <stdexcept>
#include <string>
#include <vector>

#include "block.h"
#include "stream.h"

namespace nb = nanobind;
using namespace nb::literals;
using namespace moedecode;

namespace {

using Read = nb::ndarray<nb::ro, nb::device::cpu>;
using Write = nb::ndarray<nb::device::cpu>;
using MaybeRead = std::optional<Read>;
using MaybeWrite = std::optional<Write>;

std::size_t io_bytes(IoType t) { return t == IoType::F32 ? 4 : 2; }

void expect_bytes(const char* name, std::size_t got, std::size_t want) {
  if (got != want)
    throw std::invalid_argument(std::string(name) + ": holds " + std::to_string(got) + " bytes, the call needs " +
                                std::to_string(want));
}

template <class A>
auto* data_of(const char* name, const A& array, std::size_t bytes) {
  expect_bytes(name, array.nbytes(), bytes);
  if (bytes == 0) return array.data();  // the strides of an empty array say nothing
  std::int64_t expected = 1;
  for (std::size_t i = array.ndim(); i-- > 0;) {
    if (array.shape(i) > 1 && array.stride(i) != expected) throw std::invalid_argument(std::string(name) + ": must be contiguous");
    expected *= static_cast<std::int64_t>(array.shape(i));
  }
  return array.data();
}

template <class A>
auto* data_of(const char* name, const std::optional<A>& array, std::size_t bytes) {
  return array ? data_of(name, *array, bytes) : nullptr;
}

std::vector<float> floats(const char* name, const Read& a, std::size_t count) {
  const float* p = static_cast<const float*>(data_of(name, a, count * sizeof(float)));
  return std::vector<float>(p, p + count);
}

std::vector<float> floats(const char* name, const MaybeRead& a, std::size_t count) {
  return a ? floats(name, *a, count) : std::vector<float>();
}

const float* or_null(const std::vector<float>& v) { return v.empty() ? nullptr : v.data(); }

// codes [rows, cols]: integers as wide as the format (MXFP4: bytes of two). scale [rows, n] or null.
MatrixSource source_of(Format f, ScaleKind kind, const Read& codes, const MaybeRead& scale) {
  const std::size_t width = static_cast<std::size_t>(std::max(8, format_bits(f)) / 8);
  if (codes.ndim() != 2 || codes.itemsize() != width) throw std::invalid_argument("codes: wrong rank or element size");
  MatrixSource s{};
  s.codes = static_cast<const std::uint8_t*>(codes.data());
  s.rows = static_cast<std::int64_t>(codes.shape(0));
  s.cols = static_cast<std::int64_t>(codes.shape(1)) * (f == Format::MXFP4 ? 2 : 1);
  s.row_stride = codes.stride(0) * static_cast<std::int64_t>(width);
  s.col_stride = codes.stride(1) * static_cast<std::int64_t>(width);
  if (kind == ScaleKind::None) return s;
  const bool e8m0 = kind == ScaleKind::E8M0;
  const std::int64_t need_rows = e8m0 ? s.rows : div_up(s.rows, 128), need_cols = div_up(s.cols, e8m0 ? kBlock : 128);
  if (!scale || scale->ndim() != 2 || scale->itemsize() != (e8m0 ? 1u : 4u) ||
      static_cast<std::int64_t>(scale->shape(0)) != need_rows || static_cast<std::int64_t>(scale->shape(1)) != need_cols)
    throw std::invalid_argument("scale: missing or of the wrong shape");
  s.scale = static_cast<const std::uint8_t*>(scale->data());
  s.scale_row_stride = scale->stride(0) * static_cast<std::int64_t>(scale->itemsize());
  s.scale_col_stride = scale->stride(1) * static_cast<std::int64_t>(scale->itemsize());
  return s;
}

// --- objects whose memory a call reads ---

struct Router {
  RouterSpec spec;
  std::vector<float> bias, selection_bias;
  PackedMatrix matrix;

  Router(const Read& weight, Format format, int top_k, Score score, bool pre_norm, bool normalise, float norm_eps, float scale,
         IoType matmul_type, const MaybeRead& bias_, const MaybeRead& selection_bias_)
      : spec{static_cast<int>(weight.shape(0)), top_k, score, pre_norm, normalise, norm_eps, scale, matmul_type, nullptr, nullptr},
        bias(floats("bias", bias_, weight.shape(0))),
        selection_bias(floats("selection_bias", selection_bias_, weight.shape(0))),
        matrix(source_of(format, ScaleKind::None, weight, {}), format, 1) {
    spec.bias = or_null(bias);
    spec.selection_bias = or_null(selection_bias);
    if (top_k < 1 || top_k > spec.experts) throw std::invalid_argument("top_k: out of range");
  }
};

struct Block {
  BlockSpec spec;
  std::vector<float> gamma, shared_gate;
  std::shared_ptr<Router> router;
  std::shared_ptr<PackedExperts> experts, shared;

  Block(int hidden, int width, double eps, const MaybeRead& gamma_, std::shared_ptr<Router> router_,
        std::shared_ptr<PackedExperts> experts_, const ExpertSpec& expert_spec, std::shared_ptr<PackedExperts> shared_,
        const std::optional<ExpertSpec>& shared_spec, const MaybeRead& shared_gate_)
      : gamma(floats("gamma", gamma_, static_cast<std::size_t>(hidden))),
        shared_gate(floats("shared_gate", shared_gate_, static_cast<std::size_t>(hidden))),
        router(std::move(router_)),
        experts(std::move(experts_)),
        shared(std::move(shared_)) {
    const bool same = experts->hidden == hidden && (!shared || shared->hidden == hidden) &&
                      router->matrix.view().blocks == div_up(hidden, kBlock);
    if (!same || (shared && !shared_spec)) throw std::invalid_argument("hidden: the parts of the block disagree");
    spec.norm = {hidden, width, eps, or_null(gamma), IoType::F32};
    spec.router = router->spec;
    spec.experts = expert_spec;
    if (shared_spec) spec.shared = *shared_spec;
    spec.shared_gate = or_null(shared_gate);
  }

  void run(IoType io, const Read& x, const MaybeRead& residual, const MaybeRead& mask, Write out, const MaybeWrite& residual_out,
           const MaybeWrite& logits, const MaybeWrite& index, const MaybeWrite& affinities, Strategy strategy, int first_expert,
           int threads, const MaybeWrite& profile) const {
    BlockSpec s = spec;
    s.norm.io = s.experts.io = s.shared.io = io;
    const std::size_t h = static_cast<std::size_t>(s.norm.hidden), e = static_cast<std::size_t>(s.router.experts);
    const std::size_t t = x.nbytes() / (h * io_bytes(io)), row = t * h * io_bytes(io);
    BlockCall c{};
    c.tokens = static_cast<std::int64_t>(t);
    c.x = data_of("x", x, row);
    c.residual = data_of("residual", residual, row);
    c.mask = static_cast<const std::uint8_t*>(data_of("mask", mask, t));
    c.out = data_of("out", out, row);
    c.residual_out = data_of("residual_out", residual_out, row);
    c.logits = data_of("logits", logits, t * e * io_bytes(io));
    c.index = static_cast<std::int32_t*>(data_of("index", index, t * static_cast<std::size_t>(s.router.top_k) * 4));
    c.affinities = static_cast<float*>(data_of("affinities", affinities, t * e * 4));
    c.strategy = strategy;
    c.first_expert = first_expert;
    c.threads = threads;
    c.profile = static_cast<double*>(data_of("profile", profile, static_cast<std::size_t>(threads * kStages) * sizeof(double)));
    const nb::gil_scoped_release released;
    run_block(s, router->matrix.view(), *experts, shared.get(), c);
  }
};

void bind_router(const Router& r, IoType io, const Read& x, Write logits, Write index, Write affinities, int hidden, int threads) {
  const std::size_t h = static_cast<std::size_t>(hidden), e = static_cast<std::size_t>(r.spec.experts);
  if (r.matrix.view().blocks != div_up(hidden, kBlock)) throw std::invalid_argument("hidden: differs from the weights");
  const std::size_t t = x.nbytes() / (h * io_bytes(io));
  RouterCall c{};
  c.tokens = static_cast<std::int64_t>(t);
  c.hidden = hidden;
  c.io = io;
  c.x = data_of("x", x, t * h * io_bytes(io));
  c.logits = data_of("logits", logits, t * e * io_bytes(io));
  c.index = static_cast<std::int32_t*>(data_of("index", index, t * static_cast<std::size_t>(r.spec.top_k) * 4));
  c.affinities = static_cast<float*>(data_of("affinities", affinities, t * e * 4));
  c.threads = threads;
  const nb::gil_scoped_release released;
  run_router(r.spec, r.matrix.view(), c);
}

void bind_experts(const PackedExperts& w, ExpertSpec spec, IoType io, const Read& x, const MaybeRead& index, const Read& affinities,
                  Strategy strategy, int first_expert, IoType out_type, Write out, int threads) {
  spec.io = io;
  const std::size_t h = static_cast<std::size_t>(w.hidden), t = x.nbytes() / (h * io_bytes(io));
  const bool dense = strategy == Strategy::AllExpert;
  const std::size_t k = dense ? static_cast<std::size_t>(w.experts) : t ? affinities.nbytes() / (4 * t) : 0;
  if (!dense && !index) throw std::invalid_argument("index: missing");
  ExpertsCall c{};
  c.tokens = static_cast<std::int64_t>(t);
  c.x = data_of("x", x, t * h * io_bytes(io));
  c.index = dense ? nullptr : static_cast<const std::int32_t*>(data_of("index", index, t * k * 4));
  c.affinities = static_cast<const float*>(data_of("affinities", affinities, t * k * 4));
  c.top_k = static_cast<int>(k);
  c.strategy = strategy;
  c.first_expert = first_expert;
  c.out = data_of("out", out, t * h * io_bytes(out_type));
  c.out_type = out_type;
  c.threads = threads;
  const nb::gil_scoped_release released;
  run_experts(spec, w, c);
}

void bind_norm(IoType io, int hidden, int width, double eps, const MaybeRead& gamma, const Read& x, const MaybeRead& residual,
               Write out, const MaybeWrite& residual_out, int threads) {
  const std::size_t h = static_cast<std::size_t>(hidden), t = x.nbytes() / (h * io_bytes(io)), bytes = t * h * io_bytes(io);
  const std::vector<float> g = floats("gamma", gamma, h);
  const NormSpec spec{hidden, width, eps, or_null(g), io};
  const void *px = data_of("x", x, bytes), *pr = data_of("residual", residual, bytes);
  void *po = data_of("out", out, bytes), *ps = data_of("residual_out", residual_out, bytes);
  const nb::gil_scoped_release released;
  run_norm(spec, static_cast<std::int64_t>(t), px, pr, po, ps, threads);
}

std::vector<std::int32_t> order_of(const Read& a) {
  const std::int32_t* p = static_cast<const std::int32_t*>(data_of("order", a, a.size() * 4));
  if (a.size() % kBlock) throw std::invalid_argument("order: must be a multiple of 32");
  return std::vector<std::int32_t>(p, p + a.size());
}

void check_order(const std::vector<std::int32_t>& order, int size) {
  for (const std::int32_t i : order)
    if (i < -1 || i >= size) throw std::invalid_argument("order: index out of range");
}

}  // namespace

NB_MODULE(_native, m) {
  m.doc() = "The compiled core of moedecode. Private: use the Python API.";

  nb::enum_<Format>(m, "Format")
      .value("fp32", Format::F32)
      .value("fp16", Format::F16)
      .value("bf16", Format::BF16)
      .value("fp8_e4m3", Format::E4M3)
      .value("fp8_e5m2", Format::E5M2)
      .value("mxfp8_e4m3", Format::MXE4M3)
      .value("mxfp8_e5m2", Format::MXE5M2)
      .value("mxfp4", Format::MXFP4);
  nb::enum_<IoType>(m, "IoType").value("float32", IoType::F32).value("float16", IoType::F16).value("bfloat16", IoType::BF16);
  nb::enum_<Precision>(m, "Precision").value("a16", Precision::A16).value("a8", Precision::A8).value("mxfp8", Precision::MXFP8);
  nb::enum_<ScaleKind>(m, "ScaleKind")
      .value("none", ScaleKind::None)
      .value("e8m0", ScaleKind::E8M0)
      .value("block128", ScaleKind::Block128);
  nb::enum_<Strategy>(m, "Strategy")
      .value("selective", Strategy::Selective)
      .value("grouped", Strategy::Grouped)
      .value("all_expert", Strategy::AllExpert);
  nb::enum_<AffinityScale>(m, "AffinityScale")
      .value("NO_SCALE", AffinityScale::None)
      .value("POST_SCALE", AffinityScale::Post)
      .value("PRE_SCALE", AffinityScale::Pre);
  nb::enum_<Score>(m, "Score").value("softmax", Score::Softmax).value("sigmoid", Score::Sigmoid);
  nb::enum_<Activation>(m, "Activation")
      .value("silu", Activation::SiLU)
      .value("swish", Activation::Swish)
      .value("gelu", Activation::GELU)
      .value("gelu_tanh", Activation::GELUTanh)
      .value("relu2", Activation::ReLU2)
      .value("relu", Activation::ReLU);
  nb::enum_<PackedExperts::Projection>(m, "Projection")
      .value("gate", PackedExperts::Gate)
      .value("up", PackedExperts::Up)
      .value("down", PackedExperts::Down);

  nb::class_<ExpertSpec>(m, "ExpertSpec")
      .def("__init__",
           [](ExpertSpec* self, Activation activation, float alpha, float up_offset, float gate_lower, float gate_upper,
              float up_lower, float up_upper, AffinityScale affinity, Precision precision, bool round_h) {
             new (self) ExpertSpec{{activation, alpha, up_offset, gate_lower, gate_upper, up_lower, up_upper},
                                   affinity, precision, round_h, IoType::F32};
           },
           "activation"_a, "alpha"_a, "up_offset"_a, "gate_lower"_a, "gate_upper"_a, "up_lower"_a, "up_upper"_a, "affinity"_a,
           "precision"_a, "round_h"_a);

  nb::class_<PackedExperts>(m, "PackedExperts")
      .def("__init__",
           [](PackedExperts* self, int experts, int hidden, int intermediate, Format format, ScaleKind kind, const Read& order_hidden,
              const Read& order_intermediate) {
             auto oh = order_of(order_hidden), oi = order_of(order_intermediate);
             check_order(oh, hidden);
             check_order(oi, intermediate);
             new (self) PackedExperts(experts, hidden, intermediate, format, kind, std::move(oh), std::move(oi));
           },
           "experts"_a, "hidden"_a, "intermediate"_a, "format"_a, "kind"_a, "order_hidden"_a, "order_intermediate"_a)
      .def("set",
           [](PackedExperts& self, int expert, PackedExperts::Projection which, const Read& codes, const MaybeRead& scale,
              const MaybeRead& row_scale, const MaybeRead& bias, int threads) {
             const std::size_t rows = static_cast<std::size_t>(which == PackedExperts::Down ? self.hidden : self.intermediate);
             const int blocks = which == PackedExperts::Down ? self.blocks_intermediate : self.blocks_hidden;
             const MatrixSource s = source_of(self.format, self.kind, codes, scale);
             if (expert < 0 || expert >= self.experts || static_cast<std::size_t>(s.rows) != rows || div_up(s.cols, kBlock) > blocks)
               throw std::invalid_argument("codes: expert or shape out of range");
             {
               const nb::gil_scoped_release released;
               self.set(expert, which, s, threads);
             }
             if (row_scale) {
               const std::size_t n = row_scale->size() == 1 ? 1 : rows;
               self.set_row_scale(expert, which, floats("row_scale", *row_scale, n).data(), static_cast<std::int64_t>(n));
             }
             if (bias) self.set_bias(expert, which, floats("bias", *bias, rows).data(), static_cast<std::int64_t>(rows));
           },
           "expert"_a, "which"_a, "codes"_a, "scale"_a.none(), "row_scale"_a.none(), "bias"_a.none(), "threads"_a)
      .def_prop_ro("nbytes", &PackedExperts::bytes);

  nb::class_<Router>(m, "Router")
      .def(nb::init<const Read&, Format, int, Score, bool, bool, float, float, IoType, const MaybeRead&, const MaybeRead&>(),
           "weight"_a, "format"_a, "top_k"_a, "score"_a, "pre_norm"_a, "normalise"_a, "norm_eps"_a, "scale"_a, "matmul_type"_a,
           "bias"_a.none(), "selection_bias"_a.none());

  nb::class_<Block>(m, "Block")
      .def(nb::init<int, int, double, const MaybeRead&, std::shared_ptr<Router>, std::shared_ptr<PackedExperts>, const ExpertSpec&,
                    std::shared_ptr<PackedExperts>, const std::optional<ExpertSpec>&, const MaybeRead&>(),
           "hidden"_a, "width"_a, "eps"_a, "gamma"_a.none(), "router"_a, "experts"_a, "expert_spec"_a, "shared"_a.none(),
           "shared_spec"_a.none(), "shared_gate"_a.none())
      .def("run", &Block::run, "io"_a, "x"_a, "residual"_a.none(), "mask"_a.none(), "out"_a, "residual_out"_a.none(),
           "logits"_a.none(), "index"_a.none(), "affinities"_a.none(), "strategy"_a, "first_expert"_a, "threads"_a,
           "profile"_a.none() = nb::none());

  m.def("run_router", &bind_router, "router"_a, "io"_a, "x"_a, "logits"_a, "index"_a, "affinities"_a, "hidden"_a, "threads"_a);
  m.def("run_experts", &bind_experts, "experts"_a, "spec"_a, "io"_a, "x"_a, "index"_a.none(), "affinities"_a, "strategy"_a,
        "first_expert"_a, "out_type"_a, "out"_a, "threads"_a);
  m.def("run_norm", &bind_norm, "io"_a, "hidden"_a, "width"_a, "eps"_a, "gamma"_a.none(), "x"_a, "residual"_a.none(), "out"_a,
        "residual_out"_a.none(), "threads"_a);

  m.def("stages", [] { return std::vector<std::string>(std::begin(kStageNames), std::end(kStageNames)); }, "Columns of a profile.");
  m.def("isa", [] { return std::string(kernels().isa); }, "The instruction set in use.");
  m.def("available_isas", &available_isas, "The instruction sets this CPU and build have, best last.");
  m.def("use_isa", &use_isa, "name"_a, "Switch the instruction set for the whole process.");
  m.def("set_workspace_limit", &set_workspace_limit, "bytes"_a, "For tests: bound the memory between the stages of a call.");
  m.def("cores", &available_cores, "Cores this process may run on.");
  m.def("stream_read_gbps",
        [](std::size_t megabytes, int threads, int repeats) {
          const nb::gil_scoped_release released;
          return stream_read(megabytes << 20, threads, repeats) / 1e9;
        },
        "megabytes"_a, "threads"_a, "repeats"_a, "Best memory read bandwidth of `repeats` passes, in GB/s.");
}
