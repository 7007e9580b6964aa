"""Everything MoEBlock refuses: when it is built and when it is called, with the four parts of the message.

Each row: what is changed, and fragments that the message must hold (argument, value, rule, way out).
"""

from __future__ import annotations

import os
from dataclasses import replace

import ml_dtypes
import numpy as np
import pytest

import moedecode as md
from blocks import Stored, spec_of
from moedecode import block as block_module
from moedecode import checks
from moedecode.backends import Numerics
from moedecode.backends.cpu import CpuBackend
from moedecode.checks import check_backend
from moedecode.formats import WeightFormat
from moedecode.synthetic import tokens
from refusals import assert_refused

torch = pytest.importorskip("torch")

H, E = 64, 6
SPEC = spec_of(H, 32, E, 2)
WEIGHTS = Stored(WeightFormat.MXFP4).weights(SPEC)
HALF = Stored(WeightFormat.MXFP4).weights(SPEC, local_experts=3)
SHARED = spec_of(H, 32, E, 2, shared=md.ExpertSpec(40), shared_gate=True)
SHARED_WEIGHTS = Stored(WeightFormat.MXFP4).weights(SHARED)
X = tokens(6, H, "float32")
BIG_ENDIAN = X.astype(">f4")


def _spec(**changes):
    return replace(SPEC, **changes)


def _weights(**changes):
    return replace(WEIGHTS, **changes)


BUILT = [
    # (spec, weights, options) -> fragments
    ((None, WEIGHTS, {}), ("spec=NoneType", "BlockSpec")),
    ((SPEC, WEIGHTS.experts, {}), ("weights=ExpertWeights", "BlockWeights")),
    ((SPEC, _weights(experts=None), {}), ("experts=NoneType", "ExpertWeights")),
    ((SPEC, _weights(shared=3), {}), ("shared=int", "ExpertWeights")),
    ((SPEC, WEIGHTS, {"backend": "gpu"}), ("backend='gpu'", "cpu, reference")),
    ((SPEC, WEIGHTS, {"strategy": "fast"}), ("strategy='fast'", "auto, selective, grouped, all_expert")),
    ((SPEC, WEIGHTS, {"strategy": ["auto"]}), ("strategy=['auto']", "choose one of")),
    ((SPEC, WEIGHTS, {"precision": X}), ("precision=array of shape (6, 64)", "single value", "by name")),
    ((SPEC, WEIGHTS, {"backend": torch.zeros(2)}), ("backend=array of shape (2,)", "single value")),
    ((SPEC, WEIGHTS, {"precision": "a4"}), ("precision='a4'", "a16, a8, mxfp8")),
    ((SPEC, WEIGHTS, {"h_rounding": "io"}), ("h_rounding='io'", "mxfp8", "leave it None")),
    ((SPEC, WEIGHTS, {"h_rounding": "bf16", "precision": "mxfp8"}), ("h_rounding='bf16'", "'io' or None")),
    ((SPEC, WEIGHTS, {"threads": -1}), ("threads=-1", "0..1024", "0 for all cores")),
    ((SPEC, WEIGHTS, {"threads": 10**6}), ("threads=1000000", "0..1024")),
    ((SPEC, WEIGHTS, {"threads": 10**30}), ("threads=1000", "0..1024")),
    ((SPEC, WEIGHTS, {"threads": 2.0}), ("threads=2.0", "whole number")),
    ((SPEC, WEIGHTS, {"threads": "all"}), ("threads='all'", "whole number", "0 for all cores")),
    ((SPEC, WEIGHTS, {"rank_id": "0"}), ("rank_id='0'", "whole number")),
    ((SPEC, HALF, {}), ("rank_id=None", "3 of 6 experts", "whose slice")),
    ((SPEC, WEIGHTS, {"rank_id": -1}), ("rank_id=-1", "negative")),
    ((SPEC, WEIGHTS, {"rank_id": 1}), ("rank_id=1", "end at rank 0", "use 0..0")),
    ((SPEC, HALF, {"rank_id": 2}), ("rank_id=2", "slices of 3", "use 0..1")),
    ((_spec(router=replace(SPEC.router, num_experts=4)), WEIGHTS, {}), ("router=shape (6, 64)", "(4, 64)")),
    (
        (
            _spec(router=replace(SPEC.router, num_experts=4)),
            _weights(router=WEIGHTS.router[:4], router_bias=WEIGHTS.router_bias[:4]),
            {},
        ),
        ("experts=6 local", "the router knows 4", "this rank's experts"),
    ),
    ((_spec(hidden=32), WEIGHTS, {}), ("experts=(H, I) = (64, 32)", "(32, 32)")),
    ((_spec(experts=replace(SPEC.experts, intermediate=33)), WEIGHTS, {}), ("experts=(H, I)", "(64, 33)")),
    ((_spec(experts=replace(SPEC.experts, bias=False)), WEIGHTS, {}), ("experts bias=given", "bias=False")),
    (
        (_spec(router=replace(SPEC.router, bias=False)), WEIGHTS, {}),
        ("router_bias=given", "has no router_bias"),
    ),
    (
        (_spec(router=replace(SPEC.router, selection_bias=True)), WEIGHTS, {}),
        ("selection_bias=None", "needs"),
    ),
    ((SPEC, _weights(router_bias=None), {}), ("router_bias=None", "the spec needs router_bias", "agree")),
    ((SPEC, _weights(router=None), {}), ("router=None", "needs router")),
    ((SPEC, _weights(router=WEIGHTS.router.T), {}), ("router=shape (64, 6)", "(6, 64)", "axes")),
    ((SPEC, _weights(router=WEIGHTS.router.astype(np.float64)), {}), ("router=array of float64", "bfloat16")),
    ((SPEC, _weights(router="w"), {}), ("router=str", "NumPy array or a torch tensor")),
    ((SPEC, _weights(gamma=np.ones(H - 1, np.float32)), {}), ("gamma=shape (63,)", "(64,)")),
    ((SPEC, _weights(gamma=np.float32(1)), {}), ("gamma=shape ()", "(64,)")),
    ((SPEC, _weights(gamma=np.ones(H, np.int32)), {}), ("gamma=array of int32", "cast it first")),
    ((SPEC, _weights(gamma=np.ones(H, ">f4")), {}), ("gamma=array of >f4", "byte order", "astype")),
    ((SPEC, _weights(gamma=[[1.0, 2.0], [3.0]]), {}), ("gamma=list", "equal length")),
    ((SPEC, _weights(shared=SHARED_WEIGHTS.shared), {}), ("shared=weights given", "spec says otherwise")),
    ((SHARED, replace(SHARED_WEIGHTS, shared=None), {}), ("shared=weights absent", "agree")),
    ((SHARED, replace(SHARED_WEIGHTS, shared=WEIGHTS.experts), {}), ("shared=6 experts", "one expert")),
    ((SHARED, replace(SHARED_WEIGHTS, shared_gate=None), {}), ("shared_gate=None", "needs shared_gate")),
    (
        (replace(SHARED, shared=md.ExpertSpec(48)), SHARED_WEIGHTS, {}),
        ("shared=(H, I) = (64, 40)", "(64, 48)"),
    ),
]


@pytest.mark.parametrize(("arguments", "fragments"), BUILT)
def test_building(arguments, fragments):
    spec, weights, options = arguments
    assert_refused(lambda: md.MoEBlock(spec, weights, **options), md.InvalidInput, fragments)


def _buffer(shape=(6, H), dtype=np.float32):
    return np.zeros(shape, dtype)


def _frozen():
    out = _buffer()
    out.flags.writeable = False
    return out


def _odd_address():
    return np.zeros(X.nbytes + 1, np.uint8)[1:].view(np.float32).reshape(X.shape)


CALLED = [
    # arguments of the call, made anew -> fragments
    (lambda: {"hidden": X[0]}, ("hidden=shape (64,)", "[T, 64] or [B, S, 64]")),
    (lambda: {"hidden": np.float32(1)}, ("hidden=shape ()", "[T, 64]")),
    (lambda: {"hidden": X[:, :-1]}, ("hidden=shape (6, 63)", "[T, 64]", "check H")),
    (lambda: {"hidden": X[None, None]}, ("hidden=shape (1, 1, 6, 64)", "[B, S, 64]")),
    (
        lambda: {"hidden": X.astype(np.float64)},
        ("hidden=array of float64", "float32, float16 or bfloat16", "cast"),
    ),
    (lambda: {"hidden": X.astype(int)}, ("hidden=array of int64", "cast it first")),
    (lambda: {"hidden": X.astype(ml_dtypes.float8_e4m3fn)}, ("hidden=array of float8_e4m3fn", "cast")),
    (lambda: {"hidden": X.astype(object)}, ("hidden=array of object", "cast")),
    (lambda: {"hidden": X.astype(complex)}, ("hidden=array of complex128", "cast")),
    (lambda: {"hidden": BIG_ENDIAN}, ("hidden=array of >f4", "byte order")),
    (lambda: {"hidden": X.tolist()}, ("hidden=array of float64", "cast it first")),
    (lambda: {"hidden": [[1.0], [1.0, 2.0]]}, ("hidden=list", "equal length")),
    (lambda: {"hidden": None}, ("hidden=NoneType", "NumPy array or a torch tensor", "convert")),
    (lambda: {"hidden": "tokens"}, ("hidden=str", "NumPy array or a torch tensor")),
    (lambda: {"hidden": torch.zeros(2, H, device="meta")}, ("hidden=tensor on meta", "CPU memory", ".cpu()")),
    (
        lambda: {"hidden": torch.zeros(2, H).to_sparse()},
        ("hidden=torch.sparse_coo tensor", "dense", ".to_dense()"),
    ),
    (
        lambda: {"hidden": torch.zeros(2, H, dtype=torch.bfloat16).to_sparse()},
        ("hidden=torch.sparse_coo", "dense"),
    ),
    (lambda: {"hidden": torch.zeros(2, H, dtype=torch.float64)}, ("hidden=array of float64", "cast")),
    (
        lambda: {"hidden": torch.zeros(2, H, dtype=torch.complex64).conj()},
        ("hidden=tensor of complex64", "plain dtype"),
    ),
    (lambda: {"residual": X[:5]}, ("residual=shape (5, 64)", "(6, 64) like hidden", "reshape")),
    (
        lambda: {"residual": X.astype(np.float16)},
        ("residual=array of float16", "float32 like hidden", "cast"),
    ),
    (lambda: {"residual": BIG_ENDIAN}, ("residual=array of >f4", "byte order")),
    (lambda: {"residual": 1.0}, ("residual=shape ()", "like hidden")),
    (lambda: {"token_mask": np.ones(5, bool)}, ("token_mask=shape (5,)", "(6,)", "one flag per token")),
    (lambda: {"token_mask": np.ones((6, 1), bool)}, ("token_mask=shape (6, 1)", "one flag per token")),
    (lambda: {"token_mask": np.ones(6)}, ("token_mask=array of float64", "bool", "real token")),
    (lambda: {"token_mask": np.ones(6, np.uint8)}, ("token_mask=array of uint8", "bool")),
    (lambda: {"token_mask": "all"}, ("token_mask=str", "NumPy array")),
    (lambda: {"out": _buffer((5, H))}, ("out=shape (5, 64)", "(6, 64) like hidden")),
    (lambda: {"out": _buffer(dtype=np.float16)}, ("out=array of float16", "float32 like hidden")),
    (lambda: {"out": _buffer(dtype=">f4")}, ("out=array of >f4", "byte order")),
    (lambda: {"out": _frozen()}, ("out=read-only array", "writable", "fresh array")),
    (lambda: {"out": _buffer((6, 2 * H))[:, ::2]}, ("out=strides (512, 8)", "C-contiguous")),
    (lambda: {"out": np.asfortranarray(_buffer())}, ("out=strides", "C-contiguous")),
    (lambda: {"out": torch.zeros(1, H).expand(6, H)}, ("out=strides", "C-contiguous")),
    (lambda: {"out": _odd_address()}, ("out=array at an odd address", "aligned", "fresh array")),
    (lambda: {"out": _buffer().tolist()}, ("out=list", "NumPy array or a torch tensor", "write into")),
    (lambda: {"out": 3}, ("out=int", "NumPy array or a torch tensor")),
    (lambda: (lambda x: {"hidden": x, "out": x})(X.copy()), ("out=overlapping memory", "separate array")),
    (lambda: (lambda x: {"hidden": x[1:7], "out": x[:6]})(_buffer((7, H))), ("out=overlapping memory",)),
    (lambda: (lambda r: {"residual": r, "out": r})(X.copy()), ("out=overlapping memory", "must not overlap")),
    (
        lambda: (lambda b: {"residual": b[:, ::2], "out": b.reshape(-1)[: 6 * H].reshape(6, H)})(
            _buffer((6, 2 * H))
        ),
        ("out=overlapping memory",),
    ),
    (
        lambda: (lambda b: {"token_mask": b.view(bool).reshape(-1)[:6], "out": b})(_buffer()),
        ("out=overlapping memory",),
    ),
    (
        lambda: (lambda t: {"hidden": t, "out": t.numpy()})(torch.zeros(6, H)),
        ("out=overlapping memory", "separate array"),
    ),
]


@pytest.mark.parametrize("backend", ["cpu", "reference"])
@pytest.mark.parametrize(("make", "fragments"), CALLED)
def test_calling(make, fragments, backend):
    arguments = {"hidden": X} | make()
    before = {k: np.array(v, copy=True) for k, v in arguments.items() if isinstance(v, np.ndarray)}
    block = md.MoEBlock(SPEC, WEIGHTS, backend=backend)
    assert_refused(lambda: block(arguments.pop("hidden"), **arguments), md.InvalidInput, fragments)
    for name, value in arguments.items():  # nothing was written
        if name in before and value.dtype != object:
            np.testing.assert_array_equal(value, before[name])


@pytest.mark.parametrize("count", [-1, 1.5, "many", None])
def test_planning(count):
    block = md.MoEBlock(SPEC, WEIGHTS)
    assert_refused(
        lambda: block.plan(count), md.InvalidInput, (f"tokens={count!r}", "new tokens of the call")
    )


UNABLE = [
    ({"formats": frozenset({WeightFormat.BF16})}, ("weights=mxfp4", "cannot read it", "another backend")),
    ({"precisions": frozenset({"a16"})}, ("precision=a8", "lacks it", "use a16")),
    ({"scale_modes": frozenset({md.ExpertAffinityScaleMode.NO_SCALE})}, ("affinity_scale=", "lacks it")),
    ({"shared_expert": False}, ("shared=given", "no shared expert", "outside the block")),
]


@pytest.mark.parametrize(("changes", "fragments"), UNABLE)
def test_what_a_backend_cannot_do(changes, fragments):
    """Capabilities decide, before any work; the exception is UnsupportedConfig."""
    able = CpuBackend()
    able.capabilities = replace(able.capabilities, **changes)
    numerics = Numerics("a8", None)
    call = lambda: check_backend(able, SHARED, WEIGHTS.experts, numerics)  # noqa: E731
    assert_refused(call, md.UnsupportedConfig, fragments)


def test_a_strategy_the_backend_lacks():
    able = CpuBackend()
    able.capabilities = replace(able.capabilities, strategies=frozenset({"selective"}))

    def build():
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(block_module, "find_backend", lambda name, **_: able)
            md.MoEBlock(SPEC, WEIGHTS, strategy="grouped")

    assert_refused(build, md.UnsupportedConfig, ("strategy='grouped'", "has selective", "use one of those"))


def test_the_thread_limit_is_above_this_machine():
    assert (os.cpu_count() or 1) <= checks.MAX_THREADS
