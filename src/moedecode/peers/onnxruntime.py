"""ONNX Runtime: its QMoE operator with int4 weights, 32 to a scale, and 8-bit activations.

``accuracy_level=4`` takes the integer kernels, ten times faster on the CPU than the operator's default. The
model is the whole block: norm, router, QMoE. Random int4 weights: the check dequantises the same ones.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np

from ..arrays import Array
from ..formats import StoredMatrix, WeightFormat
from ..formats.numbers import split_nibbles
from ..spec import BlockSpec, ExpertAffinityScaleMode
from ..synthetic import block_weights
from ..weights import BlockWeights, ExpertMatrices
from . import Engine, missing

__all__ = ["PEER"]

BLOCK = 32
BOUND = 2.5e-2  # 8-bit activations
LARGEST_MODEL = 1_900_000_000  # a protobuf message ends at 2 GiB
_ZERO_POINT = 8
_CODE_RMS = 4.61  # of sixteen equally likely codes around 8
_pool_threads: list[int] = []  # the size of the process-wide thread pool, once it exists


class _Peer:
    """QMoE of the CPU execution provider."""

    name = "onnxruntime int4"

    def available(self) -> str | None:
        """See :meth:`moedecode.peers.Peer.available`."""
        return missing("onnxruntime", "onnx")

    def refuses(self, spec: BlockSpec, fmt: WeightFormat) -> str | None:
        """See :meth:`moedecode.peers.Peer.refuses`."""
        e = spec.experts
        if fmt is not WeightFormat.MXFP4:
            return f"its 4-bit weights stand beside mxfp4, not {fmt.value}"
        if spec.router.score != "softmax" or spec.router.selection_bias or spec.router.scale != 1.0:
            return "the router is not a plain softmax"
        if spec.shared is not None or spec.affinity_scale is not ExpertAffinityScaleMode.POST_SCALE:
            return "QMoE has no shared expert and scales outputs only"
        if e.activation not in ("silu", "swish") or _limit(spec) is None:
            return f"QMoE on the CPU has no {e.activation} with these clamps"
        if spec.hidden % BLOCK or e.intermediate % BLOCK:
            return f"H and I must be multiples of {BLOCK}"
        size = spec.router.num_experts * 3 * spec.hidden * e.intermediate * 5 // 8
        if size > LARGEST_MODEL:
            return f"{size / 1e9:.1f} GB do not fit one ONNX file"
        return None

    def build(self, spec: BlockSpec, fmt: WeightFormat, threads: int, copies: int) -> list[Engine]:
        """See :meth:`moedecode.peers.Peer.build`."""
        weights = _int4_weights(spec)
        model = _model(spec, weights)
        shared_pool = _pool(threads)
        # without a common pool every session would bring its own threads, so one session has to do
        sessions = copies if shared_pool else 1
        calls = [_session(model, threads, shared_pool, spec.hidden) for _ in range(sessions)]
        return [Engine(self.name, calls, "float32", weights, BOUND)]


PEER = _Peer()


def _pool(threads: int) -> bool:
    """True when all sessions share one pool of this many threads; its size cannot change later."""
    import onnxruntime

    if not _pool_threads:
        try:
            onnxruntime.set_global_thread_pool_sizes(threads, 1)
        except Exception:  # someone else made it; its size is not known
            _pool_threads.append(-1)
        else:
            _pool_threads.append(threads)
    return _pool_threads[0] == threads


def _session(model: bytes, threads: int, shared_pool: bool, hidden: int) -> Callable[[Array], Array]:
    """A call on one session: bound buffers, no copies but that of the tokens."""
    import onnxruntime

    options = onnxruntime.SessionOptions()
    if shared_pool:
        options.use_per_session_threads = False
    else:
        options.intra_op_num_threads = threads
    options.log_severity_level = 3
    session = onnxruntime.InferenceSession(model, options, providers=["CPUExecutionProvider"])
    bound: dict[int, tuple[Array, Any, Array]] = {}

    def run(x: Array) -> Array:
        if len(x) not in bound:
            given, out = np.empty((len(x), hidden), np.float32), np.empty((len(x), hidden), np.float32)
            binding = session.io_binding()
            for bind, name, buffer in ((binding.bind_input, "x", given), (binding.bind_output, "out", out)):
                bind(name, "cpu", 0, np.float32, buffer.shape, buffer.ctypes.data)
            bound[len(x)] = given, binding, out
        given, binding, out = bound[len(x)]
        given[...] = x
        session.run_with_iobinding(binding)
        return out

    return run


def _limit(spec: BlockSpec) -> float | None:
    """QMoE's one clamp, gate from above, up from both sides: infinite for none, None for any other."""
    e = spec.experts
    if e.gate_clamp == (None, None) and e.up_clamp == (None, None):
        return float("inf")
    upper = e.gate_clamp[1]
    fits = upper is not None and e.gate_clamp[0] is None and e.up_clamp == (-upper, upper)
    return upper if fits else None


def _codes(spec: BlockSpec, e: int) -> dict[str, tuple[Array, Array]]:
    """Random int4 codes ``[rows, cols/2]``, float32 scales ``[rows, cols/32]`` of one expert's matrices."""
    hidden, intermediate = spec.hidden, spec.experts.intermediate
    made = {}
    for number, (name, rows, cols) in enumerate(
        (("gate", intermediate, hidden), ("up", intermediate, hidden), ("down", hidden, intermediate))
    ):
        rng = np.random.default_rng((e, number))
        codes = rng.integers(0, 256, (rows, cols // 2), np.uint8)
        size = np.float32(1.0 / (_CODE_RMS * cols**0.5))
        made[name] = codes, size * rng.uniform(0.5, 1.5, (rows, cols // BLOCK)).astype(np.float32)
    return made


def _int4_weights(spec: BlockSpec) -> BlockWeights:
    """The block of :func:`~moedecode.synthetic.block_weights` with the values of int4 experts."""

    def values(codes: Array, scale: Array) -> StoredMatrix:
        elements = split_nibbles(codes).astype(np.float32) - _ZERO_POINT
        return StoredMatrix(WeightFormat.FP32, elements * np.repeat(scale, BLOCK, axis=1))

    def expert(e: int) -> ExpertMatrices:
        return ExpertMatrices(**{name: values(*pair) for name, pair in _codes(spec, e).items()})

    plain = block_weights(spec, WeightFormat.FP32)
    return replace(plain, experts=replace(plain.experts, expert=expert))


def _model(spec: BlockSpec, weights: BlockWeights) -> bytes:
    """RMSNorm, router and QMoE as one ONNX model, float32 in and out."""
    from onnx import TensorProto, helper, numpy_helper

    hidden = spec.hidden
    # else: a softmax over the chosen logits, which is also what normalising over the chosen gives
    softmaxed = spec.router.pre_norm and not spec.router.norm_topk_prob
    nodes = [
        helper.make_node(
            "SimplifiedLayerNormalization", ["x", "gamma"], ["r"], axis=-1, epsilon=spec.eps, stash_type=1
        ),
        helper.make_node("MatMul", ["r", "router"], ["products"]),
        helper.make_node("Add", ["products", "router_bias"], ["logits"]),
    ]
    inputs = ["r", "logits", "fc1", "fc1_scales", "fc1_bias", "fc2", "fc2_scales", "fc2_bias"]
    if softmaxed:
        nodes.append(helper.make_node("Softmax", ["logits"], ["scores"], axis=-1))
        inputs += [""] * 6 + ["scores"]
    silu = spec.experts.activation == "silu"
    limit = _limit(spec)
    attributes = {
        "k": spec.router.top_k,
        "expert_weight_bits": 4,
        "block_size": BLOCK,
        "accuracy_level": 4,
        "activation_type": "swiglu",
        "swiglu_fusion": 1,
        "activation_alpha": 1.0 if silu else spec.experts.alpha,
        "activation_beta": spec.experts.up_offset,
        "normalize_routing_weights": int(not softmaxed),
    }
    if limit is not None and np.isfinite(limit):
        attributes["swiglu_limit"] = limit
    nodes.append(helper.make_node("QMoE", inputs, ["out"], domain="com.microsoft", **attributes))
    tensors = [numpy_helper.from_array(array, name) for name, array in _tensors(spec, weights).items()]
    graph = helper.make_graph(
        nodes,
        "block",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, ["T", hidden])],
        [helper.make_tensor_value_info("out", TensorProto.FLOAT, ["T", hidden])],
        tensors,
    )
    opsets = [helper.make_opsetid("", 21), helper.make_opsetid("com.microsoft", 1)]
    made: bytes = helper.make_model(graph, opset_imports=opsets, ir_version=10).SerializeToString()
    return made


def _tensors(spec: BlockSpec, weights: BlockWeights) -> dict[str, Array]:
    """The model's weights; rows of fc1 alternate gate, up."""
    experts, hidden, intermediate = spec.router.num_experts, spec.hidden, spec.experts.intermediate
    fc1 = np.empty((experts, intermediate, 2, hidden // 2), np.uint8)
    fc1_scales = np.empty((experts, intermediate, 2, hidden // BLOCK), np.float32)
    fc2 = np.empty((experts, hidden, intermediate // 2), np.uint8)
    fc2_scales = np.empty((experts, hidden, intermediate // BLOCK), np.float32)
    for e in range(experts):
        drawn = _codes(spec, e)
        for half, name in enumerate(("gate", "up")):
            fc1[e, :, half], fc1_scales[e, :, half] = drawn[name]
        fc2[e], fc2_scales[e] = drawn["down"]
    w = weights.experts
    gate, up, down = (
        np.zeros((experts, width), np.float32) if bias is None else bias
        for bias, width in ((w.gate_bias, intermediate), (w.up_bias, intermediate), (w.down_bias, hidden))
    )
    bias = np.zeros(experts, np.float32) if weights.router_bias is None else weights.router_bias
    return {
        "gamma": weights.gamma.astype(np.float32),
        "router": np.ascontiguousarray(weights.router.astype(np.float32).T),
        "router_bias": bias.astype(np.float32),
        "fc1": fc1.reshape(experts, 2 * intermediate, -1),
        "fc1_scales": fc1_scales.reshape(experts, 2 * intermediate, -1),
        "fc1_bias": np.stack([gate, up], axis=-1).reshape(experts, -1),
        "fc2": fc2,
        "fc2_scales": fc2_scales,
        "fc2_bias": down,
    }
