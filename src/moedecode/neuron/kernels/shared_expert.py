"""The shared expert: every token goes through it, on top of the experts it chose (dead in the spec, alive
here).

Owns its place in the sum and its sigmoid gate. Knows no routing and no leaves.
Letters: T tokens, H hidden.
"""

from __future__ import annotations

from .down_bias import add_shared_bias
from .nki_names import nisa, nl
from .partial_sum import PartialSum
from .plain_expert import Piece, SharedExpert, SharedTensors, in_columns
from .projections import add_expert, same_kind
from .tiles import MOVING, PARTITIONS, Tensor, exchange_and_add, share, tiles


def shared_expert(r: Tensor, tensors: SharedTensors, hidden_major: bool = True) -> Tensor:
    """This core's summand of the shared expert's output, to start a leaf's sum from.

    ``r [128, H/128, T]`` in SBUF, whole on both cores. Each core works on half of I, so that the weights are
    read once per chip. Returns ``[128, H/128, T]`` float32, or ``[T or 128, ceil(T/128), H]`` if not
    ``hidden_major``.
    """
    width, hidden = tensors.down.shape
    total = PartialSum(r.shape[2], hidden, hidden_major)
    gate = tensors.sigmoid_gate
    weight = None if gate is None else _weight(r, gate, SharedExpert(tensors))
    start, columns = share(width)
    if columns:
        piece = Piece(0, start, columns, shared=True)
        add_expert(total, r, SharedExpert(tensors), piece, weight, tensors.options, fold=True)
    if tensors.down_bias is not None:
        add_shared_bias(total, tensors.down_bias, weight)
    total.zero()  # a core without a share
    return total.values


def _weight(r: Tensor, gate: Tensor, expert: SharedExpert) -> Tensor:
    """sigmoid(r . ``gate [H, 1]``) of every token, the same on every partition: ``[128, T]`` float32."""
    tokens = r.shape[2]
    logits = nl.ndarray((PARTITIONS, tokens), dtype=nl.float32, buffer=nl.sbuf, name="shared_gate_logits")
    start, count = share(r.shape[1])
    if not count:
        nisa.memset(dst=logits, value=0.0)
    else:
        (columns,) = in_columns(expert, [(gate, start * PARTITIONS)], count * PARTITIONS)
        w, x = _as_hidden(columns, r[:, nl.ds(start, count), :], gate.dtype)
        for first, n in tiles(tokens, MOVING):
            dot = nl.ndarray((PARTITIONS, n), dtype=nl.float32, buffer=nl.psum, name="shared_gate_logits")
            for j in range(count):
                everywhere = w.ap([[count, PARTITIONS], [0, PARTITIONS]], offset=j)  # 128 equal columns
                nisa.nc_matmul(dst=dot, stationary=everywhere, moving=x[:, j, nl.ds(first, n)])
            nisa.tensor_copy(dst=logits[:, nl.ds(first, n)], src=dot)
    exchange_and_add(logits)
    weight = nl.ndarray((PARTITIONS, tokens), dtype=nl.float32, buffer=nl.sbuf, name="shared_gate")
    nisa.activation(dst=weight, op=nl.sigmoid, data=logits)
    return weight


def _as_hidden(columns: Tensor, x: Tensor, dtype: object) -> tuple[Tensor, Tensor]:
    """``columns`` (float32) in the ``dtype`` they came in, and ``x`` so that the PE multiplies them."""
    stored = nl.ndarray(tuple(columns.shape), dtype=dtype, buffer=nl.sbuf, name="shared_gate_weights")
    nisa.tensor_copy(dst=stored, src=columns)
    return same_kind(stored, x)
