"""llama.cpp: the graph it computes for an MoE block, on the ggml library inside llama-cpp-python.

Weights lie where llama.cpp puts them: in the repacking buffer type when the CPU has a kernel for the format
there, else in plain memory. MXFP4 takes the codes of our MXFP4 weights, BF16 our bf16 ones, and Q8_0 (random
int8 codes) stands beside the 8-bit formats.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import numpy as np

from ..arrays import Array
from ..formats import StoredMatrix, WeightFormat
from ..formats.numbers import join_nibbles, split_nibbles
from ..spec import BlockSpec
from ..synthetic import block_weights
from ..weights import BlockWeights, ExpertMatrices
from . import Engine, missing
from .families import is_gpt_oss, is_plain_softmax
from .ggml import F32, TYPES, Ggml

__all__ = ["PEER"]

BLOCK = 32
BOUNDS = {"mxfp4": 2.5e-2, "q8_0": 2.5e-2, "bf16": 1e-2}  # activations: 8 bits, 8 bits, bfloat16
_TYPE_OF = {
    WeightFormat.MXFP4: "mxfp4",
    WeightFormat.BF16: "bf16",
    WeightFormat.FP8_E4M3: "q8_0",
    WeightFormat.FP8_E5M2: "q8_0",
    WeightFormat.MXFP8_E4M3: "q8_0",
    WeightFormat.MXFP8_E5M2: "q8_0",
}
_INT8_RMS = 73.0  # of codes equally likely in -127..127


class _Peer:
    """ggml's CPU backend."""

    name = "llama.cpp"

    def __init__(self) -> None:
        self._ggml: dict[int, Ggml] = {}  # by threads

    def available(self) -> str | None:
        """See :meth:`moedecode.peers.Peer.available`."""
        return missing("llama-cpp-python")

    def refuses(self, spec: BlockSpec, fmt: WeightFormat) -> str | None:
        """See :meth:`moedecode.peers.Peer.refuses`."""
        if fmt not in _TYPE_OF:
            return f"no type of it stands beside {fmt.value}"
        if not (is_gpt_oss(spec) or is_plain_softmax(spec)):
            return "no graph of it that is known here computes this block"
        if spec.hidden % BLOCK or spec.experts.intermediate % BLOCK:
            return f"H and I must be multiples of {BLOCK}"
        return None

    def build(self, spec: BlockSpec, fmt: WeightFormat, threads: int, copies: int) -> list[Engine]:
        """See :meth:`moedecode.peers.Peer.build`."""
        if threads not in self._ggml:
            self._ggml[threads] = Ggml(threads)
        ggml, kind = self._ggml[threads], _TYPE_OF[fmt]
        weights = _q8_weights(spec) if kind == "q8_0" else block_weights(spec, fmt)
        layers = [_Layer(ggml, spec, weights, kind) for _ in range(copies)]
        name = f"llama.cpp {kind}" + (" repacked" if "REPACK" in layers[0].place else "")
        return [Engine(name, [layer.run for layer in layers], "float32", weights, BOUNDS[kind])]


PEER = _Peer()


class _Layer:
    """One copy of the weights, and a graph for every token count it has met."""

    def __init__(self, ggml: Ggml, spec: BlockSpec, weights: BlockWeights, kind: str) -> None:
        self._ggml, self._spec = ggml, spec
        self._graphs: dict[int, tuple[Any, Any, Any, Array]] = {}
        hidden, experts, kind_id = spec.hidden, spec.router.num_experts, TYPES[kind]
        intermediate = spec.experts.intermediate

        def product(context: Any) -> tuple[Any, Any]:
            stack = ggml.call("ggml_new_tensor_3d", context, kind_id, hidden, intermediate, experts)
            x = ggml.call("ggml_new_tensor_3d", context, F32, hidden, spec.router.top_k, 8)
            ids = ggml.call("ggml_new_tensor_2d", context, 26, spec.router.top_k, 8)
            return stack, ggml.call("ggml_mul_mat_id", context, stack, x, ids)

        buffer_type, self.place = ggml.weight_buffer_type(product)
        context = ggml.context()
        self.gate, self.up = (
            ggml.call("ggml_new_tensor_3d", context, kind_id, hidden, intermediate, experts) for _ in range(2)
        )
        self.down = ggml.call("ggml_new_tensor_3d", context, kind_id, intermediate, hidden, experts)
        ggml.call("ggml_backend_alloc_ctx_tensors_from_buft", context, buffer_type)
        for tensor, name in ((self.gate, "gate"), (self.up, "up"), (self.down, "down")):
            ggml.write(tensor, np.stack([_rows(m, kind) for m in _matrices(spec, weights, name, kind)]))
        self._plain(weights)

    def _plain(self, weights: BlockWeights) -> None:
        """Norm, router and biases: float32 in plain memory."""
        ggml, w, context = self._ggml, weights.experts, self._ggml.context()
        arrays = {
            "gamma": weights.gamma,
            "router": weights.router,
            "router_bias": weights.router_bias,
            "gate_bias": w.gate_bias,
            "up_bias": w.up_bias,
            "down_bias": w.down_bias,
        }
        given = {n: np.ascontiguousarray(a, np.float32) for n, a in arrays.items() if a is not None}
        self.plain = {
            name: ggml.call(f"ggml_new_tensor_{array.ndim}d", context, F32, *reversed(array.shape))
            for name, array in given.items()
        }
        plain = ggml.call("ggml_backend_cpu_buffer_type")
        ggml.call("ggml_backend_alloc_ctx_tensors_from_buft", context, plain)
        for name, array in given.items():
            ggml.write(self.plain[name], array)

    def run(self, hidden: Array) -> Array:
        """Hidden states ``[T, H]`` float32 to the block's output."""
        if len(hidden) not in self._graphs:
            self._graphs[len(hidden)] = self._graph(len(hidden))
        graph, x, out, result = self._graphs[len(hidden)]
        self._ggml.write(x, np.ascontiguousarray(hidden))
        status = self._ggml.call("ggml_backend_graph_compute", self._ggml.backend, graph)
        if status != 0:
            raise RuntimeError(f"ggml could not compute the graph (status {status})")
        self._ggml.read(out, result)
        return result

    def _graph(self, tokens: int) -> tuple[Any, Any, Any, Array]:
        """The nodes for ``tokens`` tokens, in the order of llama.cpp; ggml counts axes from the innermost."""
        ggml, spec, context = self._ggml, self._spec, self._ggml.context()

        def op(name: str, *arguments: Any) -> Any:
            return ggml.call(f"ggml_{name}", context, *arguments)

        x = op("new_tensor_2d", F32, spec.hidden, tokens)
        ggml.call("ggml_set_input", x)
        r = op("mul", op("rms_norm", x, spec.eps), self.plain["gamma"])
        ids, affinities = self._route(op, r, tokens)
        r = op("reshape_3d", r, spec.hidden, 1, tokens)
        up = self._biased(op, op("mul_mat_id", self.up, r, ids), "up_bias", ids)
        gate = self._biased(op, op("mul_mat_id", self.gate, r, ids), "gate_bias", ids)
        e = spec.experts
        if is_gpt_oss(spec):
            h = op("swiglu_oai", gate, up, e.alpha, e.gate_clamp[1])
        else:
            h = op("swiglu_split", gate, up)
        y = self._biased(op, op("mul_mat_id", self.down, h, ids), "down_bias", ids)
        y = op("mul", y, affinities)  # [H, K, T]
        width = 4 * spec.hidden
        step = width * spec.router.top_k
        parts = [op("view_2d", y, spec.hidden, tokens, step, k * width) for k in range(spec.router.top_k)]
        out = parts[0]
        for part in parts[1:]:
            out = op("add", out, part)
        out = op("cont", out) if len(parts) == 1 else out
        ggml.call("ggml_set_output", out)
        graph = op("new_graph")
        ggml.call("ggml_build_forward_expand", graph, out)
        allocator = ggml.call("ggml_gallocr_new", ggml.call("ggml_backend_cpu_buffer_type"))
        if not ggml.call("ggml_gallocr_alloc_graph", allocator, graph):
            raise MemoryError("ggml could not allocate the graph")
        return graph, x, out, np.empty((tokens, spec.hidden), np.float32)

    def _route(self, op: Callable[..., Any], r: Any, tokens: int) -> tuple[Any, Any]:
        """Expert ids ``[K, T]`` and affinities ``[1, K, T]``."""
        router, k = self._spec.router, self._spec.router.top_k
        logits = op("mul_mat", self.plain["router"], r)
        if router.bias:
            logits = op("add", logits, self.plain["router_bias"])
        scores = op("soft_max", logits) if router.pre_norm else logits
        ids = op("argsort_top_k", scores, k)
        chosen = op("get_rows", op("reshape_3d", scores, 1, router.num_experts, tokens), ids)
        if not router.pre_norm:
            chosen = op("soft_max", op("reshape_2d", chosen, k, tokens))
        elif router.norm_topk_prob:
            chosen = op("reshape_2d", chosen, k, tokens)
            chosen = op("div", chosen, op("sum_rows", chosen))
        return ids, op("reshape_3d", chosen, 1, k, tokens)

    def _biased(self, op: Callable[..., Any], product: Any, name: str, ids: Any) -> Any:
        bias = self.plain.get(name)
        return product if bias is None else op("add_id", product, bias, ids)


def _matrices(spec: BlockSpec, weights: BlockWeights, name: str, kind: str) -> Iterator[Any]:
    for e in range(spec.router.num_experts):
        yield _q8_codes(spec, e)[name] if kind == "q8_0" else getattr(weights.experts.expert(e), name)


def _rows(matrix: Any, kind: str) -> Array:
    """The bytes of a StoredMatrix (Q8_0: codes, scales) as ggml has them: blocks of 32, their scale first."""
    if kind == "bf16":
        return np.ascontiguousarray(matrix.codes).view(np.uint16)
    if kind == "mxfp4":
        codes = split_nibbles(matrix.codes).reshape(len(matrix.codes), -1, BLOCK)
        # a byte holds elements j and j + 16 of its block
        ordered = np.stack([codes[..., : BLOCK // 2], codes[..., BLOCK // 2 :]], axis=-1)
        bytes_of = join_nibbles(ordered.reshape(*codes.shape))
        return np.concatenate([matrix.scale[..., None], bytes_of], axis=-1).reshape(len(codes), -1)
    codes, scale = matrix
    blocks = codes.reshape(len(codes), -1, BLOCK).view(np.uint8)
    scales = np.ascontiguousarray(scale[..., None]).view(np.uint8)
    return np.concatenate([scales, blocks], axis=-1).reshape(len(codes), -1)


def _q8_codes(spec: BlockSpec, e: int) -> dict[str, tuple[Array, Array]]:
    """Random int8 codes ``[rows, cols]`` and float16 scales ``[rows, cols/32]`` of one expert's matrices."""
    hidden, intermediate = spec.hidden, spec.experts.intermediate
    made = {}
    for number, (name, rows, cols) in enumerate(
        (("gate", intermediate, hidden), ("up", intermediate, hidden), ("down", hidden, intermediate))
    ):
        rng = np.random.default_rng((e, number))
        codes = rng.integers(-127, 128, (rows, cols), np.int8)
        size = 1.0 / (_INT8_RMS * cols**0.5)
        made[name] = codes, (size * rng.uniform(0.5, 1.5, (rows, cols // BLOCK))).astype(np.float16)
    return made


def _q8_weights(spec: BlockSpec) -> BlockWeights:
    """The block of :func:`~moedecode.synthetic.block_weights` with the values of Q8_0 experts."""

    def values(codes: Array, scale: Array) -> StoredMatrix:
        scales = np.repeat(scale.astype(np.float32), BLOCK, axis=1)
        return StoredMatrix(WeightFormat.FP32, codes.astype(np.float32) * scales)

    def expert(e: int) -> ExpertMatrices:
        return ExpertMatrices(**{name: values(*pair) for name, pair in _q8_codes(spec, e).items()})

    plain = block_weights(spec, WeightFormat.FP32)
    return replace(plain, experts=replace(plain.experts, expert=expert))
