"""Random MX experts, the MX leaves on the model, and the reference's answer for the same activations."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from moedecode.backends import Numerics
from moedecode.backends.reference import maths
from moedecode.formats import WeightFormat
from moedecode.neuron.kernels.all_expert_mx import all_expert_mx
from moedecode.neuron.kernels.distinct_mx import distinct_mx
from moedecode.neuron.kernels.dynamic_mx import all_expert_mx_dynamic
from moedecode.neuron.kernels.masking import load_per_token
from moedecode.neuron.kernels.nki_names import nisa, nl
from moedecode.neuron.kernels.norm import quantize_hidden
from moedecode.neuron.kernels.partial_sum import FEW_TOKENS
from moedecode.neuron.kernels.rows import load_hidden_major
from moedecode.neuron.kernels.selective_mx import selective_mx
from moedecode.neuron.kernels.tiles import ExpertOptions, ExpertTensors, Routing
from moedecode.neuron.machine import Machine
from moedecode.neuron.machine.dtypes import DTYPES, bfloat16
from moedecode.spec import ExpertAffinityScaleMode, ExpertSpec
from moedecode.weights import ExpertWeights
from trainium_layout import TRAINIUM_NAMES, trainium_pack

WEIGHTS = ("gate_up", "down", "gate_up_scale", "down_scale", "gate_up_bias", "down_bias")


@dataclass
class Experts:
    """Packed tensors (by name, biases None or given) and the reference's view of them."""

    hidden: int
    intermediate: int
    tensors: dict
    reference: ExpertWeights


def random_experts(experts, hidden, intermediate, fmt=WeightFormat.MXFP4, bias=True, io=bfloat16, seed=0):
    """Experts whose gate and up are of order one, so that activations and clamps matter."""
    rng = np.random.default_rng(seed)
    packed, _, _ = trainium_pack(fmt, experts, hidden, intermediate, rng)
    gate_up, down, gate_up_scale, down_scale = packed
    span = 6 if fmt is WeightFormat.MXFP4 else 3
    gate_up_scale = (gate_up_scale - (span + int(np.log2(hidden) / 2))).astype(np.uint8)
    lanes, tiles = down.shape[1], down.shape[2]
    biases = {}
    if bias:
        biases["gate_up_bias"] = _natural_zeros(
            rng.normal(size=(experts, lanes, 2, tiles, 4)).astype(io), intermediate
        )
        biases["down_bias"] = rng.normal(size=(experts, hidden)).astype(io)
    reference = ExpertWeights.from_trainium(
        gate_up, down, gate_up_scale, down_scale, hidden=hidden, intermediate=intermediate,
        dtype=TRAINIUM_NAMES[fmt], **biases,
    )  # fmt: skip
    x4 = DTYPES[TRAINIUM_NAMES[fmt]]
    tensors = dict.fromkeys(WEIGHTS) | biases
    tensors |= {"gate_up": gate_up.view(x4), "down": down.view(x4)}
    tensors |= {"gate_up_scale": gate_up_scale, "down_scale": down_scale}
    return Experts(hidden, intermediate, tensors, reference)


def _natural_zeros(bias, intermediate):
    """Padding entries of a packed bias are NaN: nobody may use them."""
    for tile in range(bias.shape[3]):
        size = min(512, intermediate - 512 * tile)
        used = 2 * -(-size // 8)
        for q in range(4):
            bias[:, max(0, min(used, size - q * used)) :, :, tile, q] = np.nan
    return bias


def options_of(spec, io, mode):
    """The kernels' options for an ExpertSpec."""
    return ExpertOptions(
        activation=spec.activation, alpha=spec.alpha, up_offset=spec.up_offset, gate_clamp=spec.gate_clamp,
        up_clamp=spec.up_clamp, scaling=mode.name.lower(), io_dtype=io,
    )  # fmt: skip


def leaf_kernel(
    leaf,
    x,
    index,
    affinities,
    tensors,
    options,
    block_size=None,
    partial=False,
    first_expert=0,
    out_dtype=None,
):
    """x [T, H] and per-token tensors from HBM, as earlier stages would leave them on chip; one leaf; out."""
    t, hidden = x.shape
    out = nl.ndarray((t, hidden), dtype=x.dtype if out_dtype is None else out_dtype, buffer=nl.shared_hbm)
    weights = ExpertTensors(**tensors)
    r = load_hidden_major(x)
    values = None if options.scaling == "no_scale" else load_per_token(affinities)
    given = {"partial": ones_on_core_0(leaf, t, hidden)} if partial else {}
    if leaf == "dynamic":
        all_expert_mx_dynamic(r, values, weights, out, options, block_size, **given)
        return out
    codes, scales = quantize_hidden(r)
    if leaf == "all_expert":
        all_expert_mx(codes, scales, values, weights, out, options, **given)
        return out
    routed = Routing(load_per_token(index), None, values, t)
    if leaf == "selective":
        selective_mx(codes, scales, routed, weights, out, options, **given)
    else:
        distinct_mx(codes, scales, routed, weights, out, options, first_expert=first_expert, **given)
    return out


def ones_on_core_0(leaf, t, hidden):
    """A partial sum in the leaf's layout: ones on core 0, zeros on core 1."""
    token_major = leaf == "dynamic" or (leaf != "selective" and t > FEW_TOKENS)
    shape = (min(t, 128), -(-t // 128), hidden) if token_major else (128, hidden // 128, t)
    tensor = nl.ndarray(shape, dtype=nl.float32, buffer=nl.sbuf)
    nisa.memset(dst=tensor, value=1.0 - nl.program_id(0))
    return tensor


def run_leaf(leaf, experts, x, index, affinities, spec, mode, cores=2, chip="trn3", compute=True, **more):
    """(out, report)."""
    options = options_of(spec, x.dtype, mode)
    result = Machine(chip, compute=compute).run(
        leaf_kernel, leaf, x, index, affinities, experts.tensors, options, n_programs=cores, **more
    )
    return result.outputs, result.report


def want(leaf, experts, x, index, affinities, spec, mode):
    """The reference's unrounded float64 output."""
    strategy = "grouped" if leaf in ("selective", "distinct") else "all_expert"  # each expert decoded once
    numerics = Numerics("mxfp8", "io")
    with np.errstate(all="ignore"):
        return maths.expert_sum(
            x.astype(np.float64),
            experts.reference,
            spec,
            mode,
            strategy,
            index,
            affinities,
            0,
            numerics,
            x.dtype,
        )


def routing(tokens, k, experts, seed=1):
    """Distinct random ids [T, K] and positive affinities."""
    rng = np.random.default_rng(seed)
    index = np.stack([rng.permutation(experts)[:k] for _ in range(tokens)]).astype(np.uint32)
    return index, rng.uniform(0.1, 1.0, size=(tokens, k)).astype(np.float32)


def dense(index, affinities, experts):
    """[T, E] affinities of the chosen ids, zero elsewhere."""
    full = np.zeros((len(index), experts), np.float32)
    np.add.at(full, (np.arange(len(index))[:, None], index), affinities)
    return full


POST, NO = ExpertAffinityScaleMode.POST_SCALE, ExpertAffinityScaleMode.NO_SCALE


def gpt_oss_spec(intermediate):
    """Clamps, offset, Swish: everything that may stand between gate, up and h."""
    return ExpertSpec(intermediate=intermediate, activation="swish", alpha=1.702, up_offset=1.0,
                      gate_clamp=(None, 1.5), up_clamp=(-1.0, 1.5), bias=True)  # fmt: skip
