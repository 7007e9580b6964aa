"""Random experts without block scales, the plain leaves on the model, the reference's unrounded answer."""

from __future__ import annotations

from dataclasses import dataclass

import ml_dtypes
import numpy as np

from moedecode.backends import Numerics
from moedecode.backends.reference import maths
from moedecode.neuron.kernels.all_expert import all_expert
from moedecode.neuron.kernels.masking import load_per_token
from moedecode.neuron.kernels.nki_names import nl
from moedecode.neuron.kernels.rows import load_hidden_major
from moedecode.neuron.kernels.selective import selective
from moedecode.neuron.kernels.tiles import ExpertOptions, ExpertTensors, Routing
from moedecode.neuron.machine import Machine
from moedecode.spec import ExpertAffinityScaleMode
from moedecode.weights import ExpertWeights

BF16, FP16, FP32 = np.dtype(ml_dtypes.bfloat16), np.dtype(np.float16), np.dtype(np.float32)
E4M3, E4M3_IEEE = np.dtype(ml_dtypes.float8_e4m3fn), np.dtype(ml_dtypes.float8_e4m3)
POST, NO = ExpertAffinityScaleMode.POST_SCALE, ExpertAffinityScaleMode.NO_SCALE
BOUND = {BF16: 4e-3, FP16: 1e-3, FP32: 2e-5}
"""Relative L2 after rounding to the io dtype; float32 shows the arithmetic itself."""


@dataclass
class Experts:
    """Tensors of the leaves by name, and the reference's view of them."""

    tensors: dict
    reference: ExpertWeights


def random_experts(experts, hidden, intermediate, dtype=BF16, bias=True, per_tensor=False, seed=0):
    """Experts whose gate and up are of order one; float8 comes with scales, by row or one per matrix."""
    rng = np.random.default_rng(seed)
    gate_up = rng.normal(size=(experts, hidden, 2, intermediate)) * hidden**-0.5
    down = rng.normal(size=(experts, intermediate, hidden)) * intermediate**-0.5
    tensors = dict.fromkeys(("gate_up_scale", "down_scale", "gate_up_bias", "down_bias"))
    if dtype.itemsize == 1:
        gu, d = ((2, 1), (1,)) if per_tensor else ((2, intermediate), (hidden,))
        tensors["gate_up_scale"] = rng.uniform(0.5, 2, (experts, *gu)).astype(np.float32) / 16
        tensors["down_scale"] = rng.uniform(0.5, 2, (experts, *d)).astype(np.float32) / 16
        gate_up, down = gate_up * 16, down * 16
    if bias:
        kind = BF16 if dtype.itemsize == 1 else dtype
        tensors["gate_up_bias"] = rng.normal(size=(experts, 2, intermediate)).astype(kind)
        tensors["down_bias"] = rng.normal(size=(experts, hidden)).astype(kind)
    tensors |= {"gate_up": gate_up.astype(dtype), "down": down.astype(dtype)}
    names = {k: v for k, v in tensors.items() if k not in ("gate_up", "down")}
    return Experts(tensors, ExpertWeights.from_flat(tensors["gate_up"], tensors["down"], **names))


def options_of(spec, io, mode):
    """The kernels' options for an ExpertSpec."""
    return ExpertOptions(
        activation=spec.activation, alpha=spec.alpha, up_offset=spec.up_offset, gate_clamp=spec.gate_clamp,
        up_clamp=spec.up_clamp, scaling=mode.name.lower(), io_dtype=io,
    )  # fmt: skip


def leaf_kernel(leaf, x, index, affinities, tensors, options):
    """x [T, H] and per-token tensors from HBM, as the stages before would leave them; one leaf; out."""
    out = nl.ndarray(tuple(x.shape), dtype=x.dtype, buffer=nl.shared_hbm, name="out")
    weights = ExpertTensors(**tensors)
    r = load_hidden_major(x)
    values = None if options.scaling == "no_scale" else load_per_token(affinities)
    if leaf == "all_expert":
        all_expert(r, values, weights, out, options)
    else:
        selective(r, Routing(load_per_token(index), None, values, x.shape[0]), weights, out, options)
    return out


def run_leaf(leaf, experts, x, index, affinities, spec, mode, cores=2, chip="trn3", **machine):
    """(out, report)."""
    options = options_of(spec, x.dtype, mode)
    result = Machine(chip, **machine).run(
        leaf_kernel, leaf, x, index, affinities, experts.tensors, options, n_programs=cores
    )
    return result.outputs, result.report


def want(leaf, experts, x, index, affinities, spec, mode):
    """The reference's unrounded float64 output."""
    with np.errstate(all="ignore"):
        return maths.expert_sum(
            x.astype(np.float64), experts.reference, spec, mode, leaf, index, affinities, 0,
            Numerics("a16", None), x.dtype,
        )  # fmt: skip
