"""MoEBlock as its users call it: shapes, NumPy and torch, residual, mask, out=, routing, plans, any layout.

Runs on the cpu and the reference backend; the numbers are the matter of tests/backends and tests/reference.
"""

from __future__ import annotations

from dataclasses import replace

import ml_dtypes
import numpy as np
import pytest

import moedecode as md
from blocks import STORED, Stored, clear_tokens, reference, spec_of, values
from moedecode.arrays import IO_DTYPES
from moedecode.formats import WeightFormat
from moedecode.synthetic import block_weights, tokens
from numeric import assert_bits_equal, assert_close

torch = pytest.importorskip("torch")

H, E, K = 96, 8, 2
SPEC = spec_of(H, 40, E, K)
WEIGHTS = Stored(WeightFormat.MXFP4).weights(SPEC)
ROUNDED = {"float32": 1.5e-4, "bfloat16": 4e-3, "float16": 1e-3}
PARTS = ("out", "residual", "router_logits", "expert_index", "affinities")


@pytest.fixture(scope="module", params=["cpu", "reference"])
def block(request):
    return md.MoEBlock(SPEC, WEIGHTS, backend=request.param)


def _wide(array):
    """Values in float64, of an array or a tensor."""
    return array.to(torch.float64).numpy() if isinstance(array, torch.Tensor) else array.astype(np.float64)


# --- shapes and dtypes ---


@pytest.mark.parametrize("dtype", list(IO_DTYPES))
def test_two_and_three_axes(block, dtype):
    x = clear_tokens(12, SPEC, WEIGHTS, dtype)
    out = block(x)
    assert out.shape == (12, H)
    assert out.dtype == x.dtype
    assert_close(
        "out", out.astype(np.float64), values(reference(SPEC, WEIGHTS), x).out, *[ROUNDED[dtype]] * 2
    )
    for shape in ((3, 4, H), (12, 1, H), (1, 12, H)):
        got = block(x.reshape(shape))
        assert got.shape == shape
        assert_bits_equal("batch", got.reshape(12, H), out)


@pytest.mark.parametrize("shape", [(0, H), (0, 4, H), (3, 0, H)])
def test_no_tokens(block, shape):
    x = np.empty(shape, ml_dtypes.bfloat16)
    assert block(x).shape == shape
    out = np.empty_like(x)
    assert block(x, out=out) is out
    got = block(x, residual=x, return_router=True)
    assert got.out.shape == got.residual.shape == shape
    assert [got.router_logits.shape, got.expert_index.shape, got.affinities.shape] == [(0, E), (0, K), (0, E)]
    assert block(torch.empty(shape)).shape == shape
    assert block(np.empty((0, 2 * H), np.float32)[:, ::2]).shape == (0, H)


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_torch_in_torch_out(block, dtype):
    """The same bits as for the NumPy array, in tensors of the same dtype; inputs are left as they were."""
    x = tokens(6, H, dtype)
    t = torch.from_numpy(x.astype(np.float32)).to(getattr(torch, dtype))
    want = block(x, residual=x, return_router=True)
    before = t.clone()
    got = block(t.reshape(2, 3, H), residual=t.reshape(2, 3, H), return_router=True)
    assert torch.equal(t, before)
    for name in PARTS:
        mine, theirs = getattr(got, name), getattr(want, name)
        assert isinstance(mine, torch.Tensor)
        assert str(mine.dtype) == f"torch.{theirs.dtype.name}"
        np.testing.assert_array_equal(_wide(mine).reshape(theirs.shape), _wide(theirs))
    assert got.out.shape == (2, 3, H)
    assert torch.equal(block(t.clone().requires_grad_()), block(t))


def test_float_types_of_the_parts(block):
    got = block(tokens(3, H, "bfloat16"), residual=tokens(3, H, "bfloat16"), return_router=True)
    names = [getattr(got, part).dtype.name for part in PARTS]
    assert names == ["bfloat16", "bfloat16", "bfloat16", "int32", "float32"]


# --- residual, routing, mask ---


@pytest.mark.parametrize("dtype", list(IO_DTYPES))
def test_the_residual_is_added_before_the_norm(block, dtype):
    """residual_out is s, rounded once; the norm sees the float32 sum; out does not contain it."""
    x, r = tokens(7, H, dtype), tokens(7, H, dtype, seed=2)
    got = block(x, residual=r)
    s = x.astype(np.float32) + r.astype(np.float32)
    assert_bits_equal("residual", got.residual, s.astype(x.dtype))
    assert (got.router_logits, got.expert_index, got.affinities) == (None, None, None)
    want = values(reference(SPEC, WEIGHTS), x, r).out
    assert_close("out", got.out.astype(np.float64), want, *[ROUNDED[dtype]] * 2)
    if dtype == "float32":
        assert_bits_equal("the sum alone", block(s), got.out)
        far = block(x, residual=np.float32(1000) * x)  # the norm hides a factor; a residual in out would not
        assert_close("scaled", far.out, block(x), 1e-3)


def test_the_norm_sees_the_sum_before_its_rounding(block):
    """1 + 2^-9 is no bfloat16: rounding s before the norm would lose it."""
    x = np.ones((1, H), ml_dtypes.bfloat16)
    r = np.full((1, H), 2.0**-9, ml_dtypes.bfloat16)
    r[0, ::2] = -r[0, 0]
    wide = block(x, residual=r, return_router=True)
    assert_bits_equal(
        "residual", wide.residual, (x.astype(np.float32) + r.astype(np.float32)).astype(x.dtype)
    )
    blind = block(x, return_router=True)
    assert (wide.router_logits.astype(np.float32) != blind.router_logits.astype(np.float32)).any()


def test_routing_of_a_call(block):
    x = clear_tokens(9, SPEC, WEIGHTS)
    got, want = block(x, return_router=True), values(reference(SPEC, WEIGHTS), x)
    assert got.residual is None
    assert_bits_equal("index", got.expert_index, want.index)
    assert_close("logits", got.router_logits, want.logits, 2e-5)
    assert_close("affinities", got.affinities, want.affinities, 2e-5)
    assert_bits_equal("out", got.out, block(x))


def test_masks(block):
    """``[T]`` or ``[B, S]``, any layout; padding yields zeros and no ids; real tokens keep their bits."""
    x = tokens(12, H, "bfloat16").reshape(3, 4, H)
    mask = np.arange(12).reshape(3, 4) % 3 > 0
    want, got = block(x, return_router=True), block(x, token_mask=mask, return_router=True)
    rows = mask.reshape(-1)
    assert_bits_equal("real", got.out[mask], want.out[mask])
    assert not got.out[~mask].astype(np.float32).any()
    assert (got.expert_index[~rows] == -1).all()
    assert_bits_equal("ids", got.expert_index[rows], want.expert_index[rows])
    strided = np.zeros((3, 8), bool)[:, ::2]
    strided[...] = mask
    for other in (rows, strided, torch.from_numpy(mask), rows.tolist(), mask[::-1].copy()[::-1]):
        assert_bits_equal("mask", block(x, token_mask=other), got.out)


# --- out= and memory of any layout ---


def test_out(block):
    """The array that was handed in comes back, filled; torch and NumPy may be mixed."""
    x = tokens(6, H, "bfloat16")
    want = block(x)
    t = torch.from_numpy(x.view(np.int16)).view(torch.bfloat16)
    buffers = [np.full_like(x, 9), np.full((2, 3, H), 9, x.dtype), np.full((20, H), 9, x.dtype)[7:13]]
    for out in buffers:
        assert block(x.reshape(out.shape), out=out) is out
        assert_bits_equal("out", out.reshape(6, H), want)
    for out in (torch.full((6, H), 9.0, dtype=torch.bfloat16), torch.zeros(2, 3, H, dtype=torch.bfloat16)):
        assert block(t.reshape(out.shape), out=out) is out
        assert_bits_equal("torch out", out.view(torch.int16).numpy().reshape(6, H), want.view(np.int16))
        assert block(x.reshape(out.shape), out=out) is out
    got = block(x, residual=x, out=buffers[0], return_router=True)
    assert got.out is buffers[0]
    assert not np.may_share_memory(got.residual, got.out)
    assert_bits_equal("rows beside", buffers[2].base[:7], np.full((7, H), 9, x.dtype))


def test_a_torch_result_shares_the_memory_of_out(block):
    """A NumPy buffer seen as a tensor receives the result without a copy."""
    x = torch.randn(4, H, generator=torch.Generator().manual_seed(0))
    buffer = np.zeros((4, H), np.float32)
    block(x, out=torch.from_numpy(buffer))
    assert buffer.any(1).all()


LAYOUTS = {
    "strided rows": lambda a: np.repeat(a, 2, 0)[::2],
    "strided columns": lambda a: np.repeat(a, 3, -1)[..., ::3],
    "reversed rows": lambda a: a[::-1].copy()[::-1],
    "reversed columns": lambda a: a[..., ::-1].copy()[..., ::-1],
    "column-major": np.asfortranarray,
    "a slice of more columns": lambda a: np.concatenate([a, a], -1)[..., : a.shape[-1]],
}


def _read_only(a):
    a = a.copy()
    a.flags.writeable = False
    return a


def _odd_address(a):
    raw = np.zeros(a.nbytes + 1, np.uint8)[1:]
    raw[:] = np.frombuffer(a.tobytes(), np.uint8)
    return raw.view(a.dtype).reshape(a.shape)


def _field(a):
    record = np.zeros(a.shape, np.dtype([("pad", np.uint8), ("value", a.dtype)]))
    record["value"] = a
    return record["value"]


LAYOUTS |= {"read-only": _read_only, "odd address": _odd_address, "field of a record": _field}


@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=list(LAYOUTS))
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_inputs_may_lie_anyhow(block, layout, dtype):
    x, r = tokens(6, H, dtype), tokens(6, H, dtype, seed=3)
    want = block(x, residual=r)
    got = block(layout(x), residual=layout(r))
    for part in ("out", "residual"):
        assert_bits_equal(part, getattr(got, part), getattr(want, part))
    cube = block(layout(x.reshape(2, 3, H)))
    assert_bits_equal("three axes", cube.reshape(6, H), block(x))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_tensors_may_lie_anyhow(block, dtype):
    x = torch.randn(6, H, generator=torch.Generator().manual_seed(1)).to(dtype)
    want = block(x)
    others = [x.t().contiguous().t(), x.repeat(1, 2)[:, :H], x.repeat_interleave(2, 0)[::2]]
    others += [x.reshape(2, 3, H).permute(1, 0, 2).contiguous().permute(1, 0, 2)]
    for other in others:
        assert not other.is_contiguous()
        assert torch.equal(block(other).reshape(6, H), want)
    row = x[:1].expand(5, H)
    assert torch.equal(block(row), want[:1].expand(5, H))


@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=list(LAYOUTS))
@pytest.mark.parametrize("stored", [s for s in STORED if s.block_order == "contiguous"], ids=str)
def test_weights_may_lie_anyhow(stored, layout):
    """Every tensor of the block in that layout packs to the same bits."""
    spec = spec_of(64, 32, 3, 2, shared=md.ExpertSpec(32), shared_gate=True, router={"selection_bias": True})
    weights = stored.weights(spec)
    x = tokens(5, 64, "float32")

    def anyhow(experts):
        def one(e):
            m = experts.expert(e)
            parts = {
                name: replace(
                    getattr(m, name),
                    codes=layout(getattr(m, name).codes),
                    scale=None if getattr(m, name).scale is None else layout(getattr(m, name).scale),
                )
                for name in ("gate", "up", "down")
            }
            return replace(m, **parts)

        biases = {name: getattr(experts, name) for name in ("gate_bias", "up_bias", "down_bias")}
        biases = {name: None if bias is None else layout(bias) for name, bias in biases.items()}
        return replace(experts, expert=one, **biases)

    names = ("router", "gamma", "router_bias", "selection_bias", "shared_gate")
    other = replace(
        weights, experts=anyhow(weights.experts), shared=anyhow(weights.shared),
        **{name: layout(getattr(weights, name)) for name in names},
    )  # fmt: skip
    assert_bits_equal("out", md.MoEBlock(spec, other)(x), md.MoEBlock(spec, weights)(x))


def test_weights_may_be_tensors():
    """Router, norm, biases and experts as torch tensors, bfloat16 where a checkpoint has it."""
    spec = spec_of(64, 32, 4, 2)
    stored = Stored(WeightFormat.BF16).weights(spec)
    matrices = [stored.experts.expert(e) for e in range(4)]

    def tensor(array):
        bits = array.view(np.int16) if array.dtype == ml_dtypes.bfloat16 else array
        tensor = torch.from_numpy(np.ascontiguousarray(bits))
        return tensor.view(torch.bfloat16) if array.dtype == ml_dtypes.bfloat16 else tensor

    projections = [[tensor(getattr(m, name).codes) for m in matrices] for name in ("gate", "up", "down")]
    biases = {name: tensor(getattr(stored.experts, name)) for name in ("gate_bias", "up_bias", "down_bias")}
    weights = md.BlockWeights(
        router=tensor(stored.router),
        gamma=tensor(stored.gamma),
        router_bias=tensor(stored.router_bias),
        experts=md.ExpertWeights.from_experts(*projections, **biases),
    )
    x = tokens(5, 64, "float32")
    assert_bits_equal("out", md.MoEBlock(spec, weights)(x), md.MoEBlock(spec, stored)(x))


def test_the_block_keeps_no_hold_on_its_weights():
    """Packed once: changing a tensor afterwards changes nothing."""
    weights = block_weights(SPEC, WeightFormat.MXFP4)
    ones = {name: getattr(weights, name).copy() for name in ("router", "gamma", "router_bias")}
    block = md.MoEBlock(SPEC, replace(weights, **ones))
    x = tokens(3, H, "float32")
    want = block(x)
    for array in ones.values():
        array[...] = 0
    assert_bits_equal("out", block(x), want)


# --- plans and presets ---


def test_plan_says_what_a_call_does(block):
    for count in (0, 1, 7, 500):
        plan = block.plan(tokens=count)
        assert plan.tokens == count
        assert plan.leaf == f"{plan.strategy}_mx"
        assert "strategy" in str(plan)
    assert md.MoEBlock(SPEC, WEIGHTS, strategy="grouped").plan(np.int64(3)).strategy == "grouped"


def test_small_gpt_oss():
    """The preset's router, activation, clamps and biases at a size for tests, MXFP4, bfloat16 tokens."""
    preset = md.presets["gpt-oss-20b"]
    spec = replace(
        preset,
        hidden=96,
        router=replace(preset.router, num_experts=8),
        experts=replace(preset.experts, intermediate=64),
    )
    weights = block_weights(spec, WeightFormat.MXFP4)
    x = clear_tokens(20, spec, weights, "bfloat16")
    want = values(reference(spec, weights), x).out
    for precision, bound in (("a16", 4e-3), ("a8", 2.5e-2)):
        got = md.MoEBlock(spec, weights, precision=precision)(x)
        assert_close(precision, got.astype(np.float64), want, bound, bound)
