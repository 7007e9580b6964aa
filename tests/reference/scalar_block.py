"""The block a second time: plain Python floats, one loop per sum, no arrays. Shares nothing with the package.

Casts work on bit patterns, E4M3 rounding searches the list of all its values.
"""

from __future__ import annotations

import bisect
import math
import struct

E4M3 = [m / 8 * 2.0**-6 for m in range(8)] + [
    (1 + m / 8) * 2.0 ** (e - 7) for e in range(1, 16) for m in range(8)
]
E4M3.pop()  # the last code is NaN; 448 is the largest value


def cast(value, dtype):
    """``value`` rounded to float32, and then to nearest even in a 16-bit dtype."""
    value = struct.unpack("f", struct.pack("f", value))[0]
    if dtype == "float16":
        return struct.unpack("e", struct.pack("e", value))[0]
    if dtype == "bfloat16":
        (bits,) = struct.unpack("I", struct.pack("f", value))
        bits = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16 << 16
        return struct.unpack("f", struct.pack("I", bits))[0]
    return value


def e4m3(value):
    """The nearest E4M3 value, ties to the even code, saturating."""
    size = min(abs(value), 448.0)
    above = bisect.bisect_left(E4M3, size)
    if E4M3[above] != size:
        low, high = E4M3[above - 1], E4M3[above]
        middle = (low + high) / 2
        if size < middle or (size == middle and above % 2 == 1):
            above -= 1
    return math.copysign(E4M3[above], value)


def quantised(values, blocks):
    """``values`` after MX quantisation to E4M3; ``blocks`` lists the indices that share a scale."""
    out = list(values)
    for block in blocks:
        largest = max(abs(values[i]) for i in block)
        if largest > 0:
            scale = 2.0 ** max(math.floor(math.log2(largest)) - 8, -127)
            for i in block:
                out[i] = e4m3(values[i] / scale) * scale
    return out


def act(name, g, alpha):
    """One activation of one number."""
    if name in ("silu", "swish"):
        return g / (1 + math.exp(-(alpha if name == "swish" else 1.0) * g))
    if name == "gelu":
        return g * (1 + math.erf(g / 2**0.5)) / 2
    if name == "gelu_tanh":
        return g / 2 * (1 + math.tanh((2 / math.pi) ** 0.5 * (g + 0.044715 * g * g * g)))
    positive = g if g > 0 else 0.0
    return positive * positive if name == "relu2" else positive


def dot(a, b):
    """Their inner product."""
    return math.fsum(p * q for p, q in zip(a, b, strict=True))


def between(value, bounds):
    """``value`` within bounds that may be None."""
    lower, upper = bounds
    if lower is not None and value < lower:
        return lower
    return upper if upper is not None and value > upper else value


def mlp(x, gate, up, down, biases, spec, blocks_h, blocks_i):
    """One expert on one token; ``blocks_*`` None: no quantisation."""
    x = x if blocks_h is None else quantised(x, blocks_h)
    h = []
    for i in range(len(gate)):
        g = between(dot(gate[i], x) + biases["gate"][i], spec.gate_clamp)
        u = between(dot(up[i], x) + biases["up"][i], spec.up_clamp)
        h.append(act(spec.activation, g, spec.alpha) * (u + spec.up_offset))
    h = h if blocks_i is None else quantised(h, blocks_i)
    return [dot(row, h) + biases["down"][j] for j, row in enumerate(down)]


def scores(name, logits):
    """Softmax or sigmoid of a list."""
    if name == "sigmoid":
        return [1 / (1 + math.exp(-v)) for v in logits]
    peak = max(logits)
    total = math.fsum(math.exp(v - peak) for v in logits)
    return [math.exp(v - peak) / total for v in logits]


def route(r, arrays, spec):
    """(logits, chosen ids, {id: affinity}) of one token."""
    r = [cast(v, spec.matmul_dtype) for v in r]
    logits = [dot(row, r) for row in arrays["router"]]
    if spec.bias:
        logits = [v + b for v, b in zip(logits, arrays["router_bias"], strict=True)]
    ranking = list(logits)
    if spec.selection_bias:
        base = scores(spec.score, logits) if spec.pre_norm else logits
        ranking = [v + b for v, b in zip(base, arrays["selection_bias"], strict=True)]
    chosen = sorted(range(len(ranking)), key=lambda e: (-ranking[e], e))[: spec.top_k]
    if spec.pre_norm:
        everyone = scores(spec.score, logits)
        affinity = {e: everyone[e] for e in chosen}
    else:
        affinity = dict(zip(chosen, scores(spec.score, [logits[e] for e in chosen]), strict=True))
    if spec.norm_topk_prob:
        total = math.fsum(affinity.values()) + spec.norm_eps
        affinity = {e: a / total for e, a in affinity.items()}
    return logits, chosen, {e: a * spec.scale for e, a in affinity.items()}


def block(x, residual, arrays, spec, io, blocks_h=None, blocks_i=None):
    """(out, logits, chosen) of one token ``x``, all lists; ``arrays`` are nested lists."""
    s = [cast(v + w, "float32") for v, w in zip(x, residual, strict=True)] if residual else list(x)
    mean = math.fsum(v * v for v in s) / spec.norm_width
    r = [cast(v / math.sqrt(mean + spec.eps) * g, io) for v, g in zip(s, arrays["gamma"], strict=True)]
    logits, chosen, affinity = route(r, arrays, spec.router)
    out = [0.0] * len(x)
    for e in sorted(chosen):
        biases = {name: arrays.get(f"{name}_bias", {}) for name in ("gate", "up", "down")}
        biases = {n: b[e] if b else [0.0] * max(len(r), len(arrays["gate"][e])) for n, b in biases.items()}
        mode, a = spec.affinity_scale.name, affinity[e]
        given = [a * v for v in r] if mode == "PRE_SCALE" else r
        y = mlp(
            given,
            arrays["gate"][e],
            arrays["up"][e],
            arrays["down"][e],
            biases,
            spec.experts,
            blocks_h,
            blocks_i,
        )
        out = [v + (a if mode == "POST_SCALE" else 1.0) * w for v, w in zip(out, y, strict=True)]
    if spec.shared is not None:
        none = {n: [0.0] * max(len(r), spec.shared.intermediate) for n in ("gate", "up", "down")}
        parts = (arrays["shared_gate_w"], arrays["shared_up_w"], arrays["shared_down_w"])
        y = mlp(
            r, *parts, none, spec.shared, blocks_h, None if blocks_i is None else _plain_blocks(spec.shared)
        )
        weight = 1 / (1 + math.exp(-dot(r, arrays["shared_gate"]))) if spec.shared_gate else 1.0
        out = [v + weight * w for v, w in zip(out, y, strict=True)]
    return out, logits, chosen


def _plain_blocks(spec):
    return [range(b, min(b + 32, spec.intermediate)) for b in range(0, spec.intermediate, 32)]
