"""Random calls of the public functions, right and wrong: a result like the reference's, or a MoEDecodeError.

Valid arguments are drawn first; up to two of them are then spoiled. The cpu and the reference backend get
the same call: both refuse it or both compute it, and never does another exception come out.
MOEDECODE_FUZZ=5000 draws that many new calls instead of the few fixed ones.
"""

from __future__ import annotations

import os
from dataclasses import replace

import ml_dtypes
import numpy as np
import pytest
from hypothesis import HealthCheck, given, note, settings
from hypothesis import strategies as st

import moedecode as md
from moedecode.formats import WeightFormat
from moedecode.spec import ACTIVATIONS, PRECISIONS, STRATEGIES
from moedecode.synthetic import block_weights
from numeric import assert_bits_equal, worst_row_rel_l2

torch = pytest.importorskip("torch")
from spoiling import QUIET, spoil  # noqa: E402

EXAMPLES = int(os.environ.get("MOEDECODE_FUZZ", "0"))
fuzz = settings(
    max_examples=EXAMPLES or 300,
    deadline=None,
    derandomize=not EXAMPLES,
    database=None,
    suppress_health_check=list(HealthCheck),
)

FLOATS = {"float32": np.float32, "float16": np.float16, "bfloat16": ml_dtypes.bfloat16}
IO = st.sampled_from(list(FLOATS))
SEED = st.integers(0, 2**20)
MODES = st.sampled_from(["NO_SCALE", "POST_SCALE", "PRE_SCALE"])
MAYBE = st.booleans()


def outcome(call, backend):
    """("refused", error) or ("computed", results)."""
    try:
        return "computed", call(backend)
    except md.MoEDecodeError as error:
        assert "=" in str(error), error
        return "refused", error


def both(call, spoiled):
    """The results of both backends, or None when both refuse; an unspoiled call is never refused."""
    (mine, got), (theirs, want) = outcome(call, "cpu"), outcome(call, "reference")
    note(f"cpu {mine}: {got!r:.200}")
    assert mine == theirs, f"cpu {mine} ({got}), reference {theirs} ({want})"
    loud = [s for s in spoiled if s.split(": ", 1)[1] not in QUIET]
    assert loud or mine == "computed", f"valid arguments are refused: {got}"
    return (got, want) if mine == "computed" else None


def alike(name, got, want, bound):
    """Both finite in the same places, and there within the bound row by row."""
    assert (got.shape, got.dtype) == (want.shape, want.dtype), name
    if 0 in got.shape:
        return
    if "float32" not in str(got.dtype):
        bound = max(bound, 2e-2)  # one unit in the last place of 16 bits
    got, want = (a.float().numpy() if isinstance(a, torch.Tensor) else np.asarray(a) for a in (got, want))
    assert (got.shape, got.dtype) == (want.shape, want.dtype), name
    end = 1e4 if "float16" in str(got.dtype) else 1e15
    got, want = (a.astype(np.float64).reshape(-1, max(1, a.shape[-1])) for a in (got, want))
    if np.abs(np.nan_to_num(want, posinf=0, neginf=0)).max() > end:
        return  # an absurd bound or value: near the end of the type either side may overflow
    np.testing.assert_array_equal(np.isfinite(got), np.isfinite(want), err_msg=name)
    whole = np.isfinite(want).all(-1)
    if whole.any():
        worst, row = worst_row_rel_l2(got[whole], want[whole])
        tiny = np.abs(got[whole] - want[whole]).max() < 1e-7  # beside inputs near 1
        assert worst <= bound or tiny, f"{name}: row {row} of the finite ones differs by {worst:.3g}"


def routed_alike(got, want, logits):
    """The tokens that went to the same experts: all but the few that nearly tie or are not finite."""
    got, want = np.sort(np.asarray(got)), np.sort(np.asarray(want))
    logits = logits.float().numpy() if isinstance(logits, torch.Tensor) else logits.astype(np.float32)
    same, finite = (got == want).all(-1), np.isfinite(logits).all(-1)
    strayed = int((~same & finite).sum())
    assert strayed <= max(1, len(same) // 20), f"{strayed} of {len(same)} tokens went elsewhere"
    return same


def out_bound(precision, mx, dtype, shortest):
    """Loose for 8 bits: one moved code shows in short rows, and sums of a few products may cancel."""
    if precision in ("a8", "mxfp8") or (precision is None and mx):
        return 0.3 if shortest >= 16 else np.inf
    return 2e-3 if dtype == "float32" else 2e-2


# --- MoEBlock ---


@st.composite
def blocks(draw):
    """A spec, its weights, options and the arguments of a call."""
    fmt = draw(st.sampled_from(list(WeightFormat)))
    even = 2 if fmt is WeightFormat.MXFP4 else 1
    hidden, width = even * draw(st.integers(1, 40)), even * draw(st.integers(1, 24))
    experts = draw(st.sampled_from([1, 2, 3, 4, 6, 7]))
    ranks = draw(st.sampled_from([r for r in (1, 2, 3) if experts % r == 0]))
    clamp = st.sampled_from([(None, None), (None, 0.5), (-0.5, None), (-0.5, 0.5)])
    mlp = md.ExpertSpec(
        width, draw(st.sampled_from(ACTIVATIONS)), 1.702, draw(st.sampled_from([0.0, 1.0])),
        draw(clamp), draw(clamp), bias=draw(MAYBE),
    )  # fmt: skip
    shared = md.ExpertSpec(even * draw(st.integers(1, 20))) if draw(MAYBE) else None
    router = md.RouterSpec(
        experts, draw(st.integers(1, experts)), draw(st.sampled_from(["softmax", "sigmoid"])), draw(MAYBE),
        draw(MAYBE), 0.0, draw(MAYBE), draw(MAYBE), draw(st.sampled_from([1.0, 2.5])), "float32",
    )  # fmt: skip
    spec = md.BlockSpec(
        hidden, router, mlp, shared=shared, shared_gate=shared is not None and draw(MAYBE),
        affinity_scale=md.ExpertAffinityScaleMode[draw(MODES)],
    )  # fmt: skip
    local, rank = experts // ranks, draw(st.integers(0, ranks - 1))
    weights = block_weights(
        spec, fmt, seed=draw(SEED), local_experts=local, first_expert=rank * local,
        fp8_scale=draw(st.sampled_from(["row", "tensor", "block"])),
    )  # fmt: skip
    options = {
        "strategy": draw(st.sampled_from(STRATEGIES)), "precision": draw(st.sampled_from(PRECISIONS)),
        "h_rounding": None, "rank_id": rank, "threads": draw(st.integers(0, 4)),
    }  # fmt: skip
    dtype, shape = draw(IO), draw(st.sampled_from([(0,), (1,), (5,), (2, 3), (66,)]))
    rng = np.random.default_rng(draw(SEED))
    call = {"hidden": rng.standard_normal((*shape, hidden)).astype(FLOATS[dtype])}
    if draw(MAYBE):
        call["residual"] = rng.standard_normal((*shape, hidden)).astype(FLOATS[dtype])
    if draw(MAYBE):
        call["token_mask"] = rng.random(shape) < 0.7
    return spec, weights, options, call, dtype


def _truncated(draw, experts):
    """Builds ``experts`` anew from their tensors; one scale tensor of one expert loses a row or a column."""
    matrices = [experts.expert(e) for e in range(experts.num_experts)]
    names = ("gate", "up", "down")
    codes = [[getattr(m, name).codes for m in matrices] for name in names]
    scales = {f"{name}_scale": [getattr(m, name).scale for m in matrices] for name in names}
    biases = {f"{name}_bias": getattr(experts, f"{name}_bias") for name in names}
    if matrices[0].gate.scale is None:
        scales = {}
    else:
        which = scales[draw(st.sampled_from(sorted(scales)))]
        e = draw(st.integers(0, len(matrices) - 1))
        short = which[e][:-1] if which[e].ndim == 1 or draw(MAYBE) else which[e][:, :-1]
        which[e] = short
    note(f"truncated: {bool(scales)}")
    return lambda: md.ExpertWeights.from_experts(*codes, **scales, **biases), bool(scales)


@fuzz
@given(st.data())
def test_blocks(data):
    spec, weights, options, call, dtype = data.draw(blocks())
    done = spoil(data.draw, call) if data.draw(MAYBE) else []
    if data.draw(st.integers(0, 3)) == 0:
        done += spoil(data.draw, options)
    if data.draw(st.integers(0, 3)) == 0:
        names = ("router", "gamma", "router_bias", "selection_bias", "shared_gate")
        tensors = {name: getattr(weights, name) for name in names}
        done += spoil(data.draw, tensors)
        weights = replace(weights, **tensors)
    make = lambda: weights.experts  # noqa: E731
    if data.draw(st.integers(0, 7)) == 0:
        make, truncated = _truncated(data.draw, weights.experts)
        done += ["scale: truncated"] if truncated else []
    hidden = call.pop("hidden")

    def run(backend):
        own = replace(weights, experts=make())
        return md.MoEBlock(spec, own, backend=backend, **options)(hidden, **call, return_router=True)

    results = both(run, done)
    if results is None:
        return
    got, want = results
    agreed = routed_alike(got.expert_index, want.expert_index, want.router_logits)
    alike("logits", got.router_logits, want.router_logits, 1e-4)
    alike("affinities", got.affinities[agreed], want.affinities[agreed], 1e-3)
    shortest = min(spec.hidden, spec.experts.intermediate, spec.shared.intermediate if spec.shared else 99)
    bound = out_bound(options["precision"], weights.experts.fmt.is_mx, dtype, shortest)
    rows = (out.reshape(-1, spec.hidden)[agreed] for out in (got.out, want.out))
    alike("out", *rows, bound)
    if got.residual is not None and not isinstance(got.residual, torch.Tensor):
        finite = np.isfinite(got.residual.astype(np.float32))
        assert_bits_equal("residual", got.residual[finite], want.residual[finite])


# --- the flat functions ---

WEIGHT_TYPES = st.sampled_from(["float32", "float16", "bfloat16", "fp8 row", "fp8 tensor", "mx"])


@st.composite
def expert_tensors(draw):
    """Arguments of pack: weights, scales, biases; with (E_L, H, I)."""
    kind, rng = draw(WEIGHT_TYPES), np.random.default_rng(draw(SEED))
    local = draw(st.sampled_from([1, 2, 3]))
    given_: dict = {}
    if kind == "mx":
        hidden, width = 512, draw(st.sampled_from([8, 33, 64]))
        lanes, tiles = 8 * -(-width // 32), 1
        given_["expert_gate_up_weights"] = rng.integers(0, 2**16, (local, 128, 2, 1, width), np.uint16)
        given_["expert_down_weights"] = rng.integers(0, 2**16, (local, lanes, tiles, hidden), np.uint16)
        given_["expert_gate_up_weights_scale"] = rng.integers(119, 123, (local, 16, 2, 1, width), np.uint8)
        shape = (local, -(-lanes // 8), tiles, hidden)
        given_["expert_down_weights_scale"] = rng.integers(119, 123, shape, np.uint8)
        bias = (local, lanes, 2, tiles, 4)
    else:
        hidden, width = draw(st.integers(1, 70)), draw(st.integers(1, 40))
        dtype = FLOATS.get(kind, ml_dtypes.float8_e4m3fn)
        gate_up = rng.standard_normal((local, hidden, 2, width)) / hidden**0.5
        down = rng.standard_normal((local, width, hidden)) / width**0.5
        given_["expert_gate_up_weights"], given_["expert_down_weights"] = (
            gate_up.astype(dtype),
            down.astype(dtype),
        )
        if kind.startswith("fp8"):
            rows = (width, hidden) if kind == "fp8 row" else (1, 1)
            given_["expert_gate_up_weights_scale"] = rng.uniform(0.5, 2, (local, 2, rows[0])).astype(
                np.float32
            )
            given_["expert_down_weights_scale"] = rng.uniform(0.5, 2, (local, rows[1])).astype(np.float32)
        bias = (local, 2, width)
    if draw(MAYBE):
        given_["expert_gate_up_bias"] = rng.standard_normal(bias).astype(np.float32)
        given_["expert_down_bias"] = rng.standard_normal((local, hidden)).astype(np.float32)
    return given_, local, hidden, kind == "mx"


def _clamps(draw):
    names = (
        "gate_clamp_upper_limit",
        "gate_clamp_lower_limit",
        "up_clamp_upper_limit",
        "up_clamp_lower_limit",
    )
    return {n: draw(st.sampled_from([None, 0.7 if "upper" in n else -0.7])) for n in names}


def _common(draw, mx):
    """Options of both expert functions."""
    return {
        "expert_affinities_scaling_mode": draw(MODES),
        "precision": draw(st.sampled_from([None, *PRECISIONS])),
        "strategy": draw(st.sampled_from([None, *STRATEGIES])),
        "h_rounding": None,
        "expert_weight_dtype": None,
        "block_order": None,
        **_clamps(draw),
    }


@fuzz
@given(st.data())
def test_moe_block_tkg(data):
    draw = data.draw
    tensors, local, hidden, mx = draw(expert_tensors())
    shortest = min(hidden, tensors["expert_gate_up_weights"].shape[-1])
    ranks, dtype, rng = draw(st.integers(1, 2)), draw(IO), np.random.default_rng(draw(SEED))
    experts, shape = local * ranks, draw(st.sampled_from([(0, 1), (1, 1), (5,), (2, 3)]))

    def normal(*size, scale=1.0):
        return (rng.standard_normal(size) * scale).astype(FLOATS[dtype])

    call = tensors | _common(draw, mx) | {
        "inp": normal(*shape, hidden),
        "gamma": normal(1, hidden),
        "router_weights": normal(hidden, experts, scale=2 / hidden**0.5),
        "router_bias": normal(1, experts) if draw(MAYBE) else None,
        "top_k": draw(st.integers(1, experts)),
        "router_act_fn": draw(st.sampled_from(["SIGMOID", "SOFTMAX"])),
        "router_pre_norm": draw(MAYBE),
        "norm_topk_prob": draw(MAYBE),
        "hidden_act_fn": draw(st.sampled_from(list(md.ActFn))),
        "hidden_act_bias": draw(st.sampled_from([None, 1.0])),
        "router_mm_dtype": "float32",
        "hidden_actual": draw(st.sampled_from([None, 1, hidden])),
        "eps": 1e-5,
        "skip_router_logits": draw(MAYBE),
        "is_all_expert": draw(MAYBE),
        "rank_id": draw(st.integers(0, ranks - 1)),
        "residual": normal(*shape, hidden) if draw(MAYBE) else None,
        "token_mask": rng.random(shape) < 0.7 if draw(MAYBE) else None,
        "threads": draw(st.integers(0, 3)),
    }  # fmt: skip
    if draw(MAYBE):
        call |= {
            "shared_expert_gate_w": normal(hidden, 20), "shared_expert_up_w": normal(hidden, 20),
            "shared_expert_down_w": normal(20, hidden), "shared_expert_down_bias": normal(1, hidden),
        }  # fmt: skip
    done = spoil(draw, call)
    results = both(lambda backend: md.moe_block_tkg(**call, backend=backend), done)
    if results is not None:
        got, want = results
        assert len(got) == len(want)
        for n, (mine, theirs) in enumerate(zip(got, want, strict=True)):
            alike(f"output {n}", mine, theirs, out_bound(call["precision"], mx, dtype, shortest))


@fuzz
@given(st.data())
def test_moe_tkg(data):
    draw = data.draw
    tensors, local, hidden, mx = draw(expert_tensors())
    shortest = min(hidden, tensors["expert_gate_up_weights"].shape[-1])
    ranks, dtype, rng = draw(st.integers(1, 2)), draw(IO), np.random.default_rng(draw(SEED))
    experts, tokens, k = local * ranks, draw(st.sampled_from([0, 1, 5, 66])), draw(st.integers(1, 3))
    call = tensors | _common(draw, mx) | {
        "hidden_input": rng.standard_normal((tokens, hidden)).astype(FLOATS[dtype]),
        "expert_affinities": rng.random((tokens, experts)).astype(np.float32),
        "expert_index": rng.integers(-1, experts, (tokens, k)).astype(np.int32),
        "expert_affinities_eager": rng.random((tokens, k)).astype(np.float32) if draw(MAYBE) else None,
        "mask_unselected_experts": draw(MAYBE),
        "is_all_expert": draw(MAYBE),
        "rank_id": draw(st.integers(0, ranks - 1)),
        "activation_fn": draw(st.sampled_from(list(md.ActFn))),
        "output_dtype": draw(st.sampled_from([None, *FLOATS])),
    }  # fmt: skip
    done = spoil(draw, call)
    results = both(lambda backend: md.moe_tkg(**call, backend=backend), done)
    if results is not None:
        wide = "float32" if call["output_dtype"] in (None, "float32") and dtype == "float32" else "bfloat16"
        alike("out", *results, out_bound(call["precision"], mx, wide, shortest))


@fuzz
@given(st.data())
def test_router_and_masking(data):
    draw = data.draw
    tokens, hidden, experts = (
        draw(st.sampled_from([0, 1, 5, 66])),
        draw(st.integers(1, 40)),
        draw(st.integers(1, 20)),
    )
    dtype, rng = draw(IO), np.random.default_rng(draw(SEED))
    k = draw(st.integers(1, experts))
    call = {
        "x": rng.standard_normal((tokens, hidden)).astype(FLOATS[dtype]),
        "w": rng.standard_normal((hidden, experts)).astype(FLOATS[dtype]),
        "w_bias": rng.standard_normal((1, experts)).astype(np.float32) if draw(MAYBE) else None,
        "act_fn": draw(st.sampled_from(["SIGMOID", "SOFTMAX"])),
        "k": k,
        "router_pre_norm": draw(MAYBE),
        "norm_topk_prob": draw(MAYBE),
        "return_eager_affi": draw(MAYBE),
        "x_hbm_layout": 1,
    }
    done = spoil(draw, call)
    results = both(lambda backend: md.router_topk(**call, backend=backend), done)
    if results is None:
        return
    got, want = (tuple(r.float().numpy() if isinstance(r, torch.Tensor) else r for r in rs) for rs in results)
    finite = np.isfinite(want[0].astype(np.float64)).all(-1)
    agreed = finite & routed_alike(got[1], want[1], want[0])
    for n, rows, bound in ((0, finite, 1e-4), (2, agreed, 1e-3)):
        alike(f"output {n}", got[n][rows], want[n][rows], bound)
    index, affinities = got[1].astype(np.int32), got[2]
    size = draw(st.sampled_from([d for d in range(1, experts + 1) if experts % d == 0]))
    mask = {
        "expert_affinities": affinities, "expert_index": index,
        "rank_id": draw(st.integers(0, experts // size - 1)), "E_L": size,
        "mask_unselected_experts": draw(MAYBE),
    }  # fmt: skip
    plain = dict(mask)
    if affinities.shape[-1] != experts:
        return
    loud = spoil(draw, mask)
    state, masked = outcome(lambda _: md.mask_expert_affinities(**mask), "cpu")
    assert loud or state == "computed", masked
    if not loud:
        first = plain["rank_id"] * size
        piece = affinities[:, first : first + size]
        chosen = (index[:, :, None] == np.arange(first, first + size)).any(1)
        np.testing.assert_array_equal(
            masked, np.where(chosen, piece, 0) if plain["mask_unselected_experts"] else piece
        )


@fuzz
@given(st.data())
def test_rmsnorm(data):
    draw = data.draw
    shape, hidden, dtype = (
        draw(st.sampled_from([(0,), (1,), (5,), (2, 3)])),
        draw(st.integers(1, 70)),
        draw(IO),
    )
    rng = np.random.default_rng(draw(SEED))
    call = {
        "inp": (rng.standard_normal((*shape, hidden)) * draw(st.sampled_from([1e-4, 1.0, 1e4]))).astype(
            FLOATS[dtype]
        ),
        "gamma": rng.standard_normal((1, hidden)).astype(FLOATS[dtype]) if draw(MAYBE) else None,
        "eps": draw(st.sampled_from([0.0, 1e-6, 0.1])),
        "hidden_actual": draw(st.sampled_from([None, 1, hidden])),
        "residual": rng.standard_normal((*shape, hidden)).astype(FLOATS[dtype]) if draw(MAYBE) else None,
    }
    done = spoil(draw, call)
    results = both(lambda backend: md.rmsnorm_tkg(**call, backend=backend), done)
    if results is not None:
        got, want = (r if isinstance(r, tuple) else (r,) for r in results)
        assert len(got) == len(want)
        for mine, theirs in zip(got, want, strict=True):
            alike("norm", mine, theirs, 1e-6 if dtype == "float32" else 1e-2)


@fuzz
@given(st.data())
def test_packed_weights(data):
    """A handle gives what its tensors give."""
    draw = data.draw
    tensors, local, hidden, _ = draw(expert_tensors())
    plain = dict(tensors)
    tensors |= {"expert_weight_dtype": None, "block_order": None}
    done = spoil(draw, tensors)
    handles = both(lambda backend: md.pack(**tensors, backend=backend), done)
    if handles is None or done:
        return
    rng = np.random.default_rng(draw(SEED))
    x = rng.standard_normal((4, hidden)).astype(np.float32)
    index = rng.integers(-1, local, (4, 2))
    rest = {
        "expert_affinities": np.ones((4, local), np.float32),
        "expert_index": index,
        "is_all_expert": False,
    }
    for backend, handle in zip(("cpu", "reference"), handles, strict=True):
        want = md.moe_tkg(x, **plain, **rest, backend=backend)
        if backend == "cpu":
            assert_bits_equal("handle", md.moe_tkg(x, handle, None, **rest, backend=backend), want)
