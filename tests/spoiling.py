"""Spoiling arguments: what goes wrong with arrays and values that users hand in, for the fuzz tests.

Some changes leave an argument valid (another layout of the same numbers): those are named in QUIET.
"""

from __future__ import annotations

import warnings

import ml_dtypes
import numpy as np
import torch
from hypothesis import note
from hypothesis import strategies as st

import moedecode as md


def _at_odd_address(a):
    raw = np.zeros(a.nbytes + 1, np.uint8)[1:]
    raw[:] = np.frombuffer(a.tobytes(), np.uint8)
    return raw.view(a.dtype).reshape(a.shape)


def _with(value):
    def put(a):
        a = np.array(a, copy=True)
        if a.size and a.dtype.kind in "fV" and a.dtype.names is None:
            a.reshape(-1)[a.size // 2] = value
        return a

    return put


def _frozen(a):
    a = np.array(a, copy=True)
    a.flags.writeable = False
    return a


def _tensor(a):
    a = a.copy()
    if a.dtype == ml_dtypes.bfloat16:
        return torch.from_numpy(np.ascontiguousarray(a).view(np.int16)).view(torch.bfloat16)
    return torch.from_numpy(np.ascontiguousarray(a)) if a.dtype.kind in "fiub" else a


def _cast(dtype):
    def cast(a):
        with np.errstate(all="ignore"):
            return a.astype(np.float32).astype(dtype)

    return cast


ARRAYS = {
    "one column fewer": lambda a: a[..., :-1],
    "one row fewer": lambda a: a[:-1],
    "one row more": lambda a: np.concatenate([a, a[:1]]),
    "one axis more": lambda a: a[None],
    "one axis fewer": lambda a: a[0] if len(a) else a,
    "no axes": lambda a: a.reshape(-1)[0] if a.size else a,
    "empty": lambda a: a[:0],
    "no columns": lambda a: a[..., :0],
    "transposed": lambda a: a.T,
    "flat": lambda a: a.reshape(-1),
    "reversed view": lambda a: a[::-1].copy()[::-1],
    "strided view": lambda a: np.repeat(a, 2, -1)[..., ::2],
    "column-major": np.asfortranarray,
    "read-only": _frozen,
    "odd address": _at_odd_address,
    "a tensor": _tensor,
    "a matrix": lambda a: np.asarray(a).view(np.matrix) if a.ndim == 2 else a,
    "a list": lambda a: a.astype(np.float32).tolist(),
    "float64": _cast(np.float64),
    "float32": _cast(np.float32),
    "float16": _cast(np.float16),
    "int32": lambda a: a.astype(np.float32).astype(np.int32),
    "uint8": lambda a: np.zeros(a.shape, np.uint8),
    "uint32": lambda a: np.zeros(a.shape, np.uint32),
    "int64": lambda a: np.zeros(a.shape, np.int64) - 7,
    "bool": lambda a: np.ones(a.shape, bool),
    "complex": lambda a: np.ones(a.shape, complex),
    "object": lambda a: np.full(a.shape, None, object),
    "strings": lambda a: np.full(a.shape, "x"),
    "record": lambda a: np.zeros(a.shape, [("x", np.float32)]),
    "big endian": lambda a: a.astype(a.dtype.newbyteorder(">")) if a.dtype.kind in "fiu" else a,
    "a NaN": _with(np.nan),
    "an infinity": _with(-np.inf),
    "zeros": np.zeros_like,
}
VALUES = [
    None,
    -1,
    0,
    1,
    2,
    3,
    7,
    10**9,
    10**30,
    10**400,
    -(10**30),
    0.5,
    1e-300,
    1e30,
    float("nan"),
    float("inf"),
    True,
]
VALUES += [
    "x",
    "",
    "float64",
    (),
    [],
    {},
    (1, 2, 3),
    object(),
    np.int64(1),
    np.array([[0]]),
    np.zeros(3, np.float32),
    torch.zeros(2, 2),
    np.float32(0.5),
    b"x",
]
VALUES += [
    md.ActFn.GELU,
    md.RouterActFn.SOFTMAX,
    md.ExpertAffinityScaleMode.PRE_SCALE_DELAYED,
    np.float16,
    torch.bfloat16,
]
QUIET = {
    "reversed view",
    "strided view",
    "column-major",
    "read-only",
    "odd address",
    "a tensor",
    "a NaN",
    "an infinity",
}
QUIET |= {"zeros", "a matrix"}
"""These leave an argument valid."""


def spoil(draw, arguments, keep=()):
    """Change none to two of the arguments; returns what was done."""
    done = []
    for _ in range(draw(st.sampled_from([0, 1, 1, 1, 2]))):
        name = draw(st.sampled_from(sorted(set(arguments) - set(keep))))
        value = arguments[name]
        if isinstance(value, np.ndarray) and draw(st.sampled_from([True, True, True, False])):
            how = draw(st.sampled_from(sorted(ARRAYS)))
            if name.endswith("_scale") and how == "an infinity":
                how = "a NaN"  # infinity times a weight of 0 depends on where the scale is applied
            try:
                with np.errstate(all="ignore"), warnings.catch_warnings():
                    warnings.simplefilter("ignore")
                    arguments[name] = ARRAYS[how](value)
            except (TypeError, ValueError, IndexError):
                continue  # there is no such change of this array
        else:
            arguments[name] = draw(st.sampled_from(VALUES))
            how = repr(arguments[name])
        done.append(f"{name}: {how}")
    note(f"spoiled: {done}")
    return done
