"""The names of nki.isa: every instruction of the model and the enumerations that they take.

Owns the list only; each instruction lives in a module named after what its engine does.
"""

from __future__ import annotations

from . import constants
from .activation import activation, activation_reduce
from .constants import (
    dge_mode,
    dma_engine,
    engine,
    gpsimd_engine,
    matmul_perf_mode,
    nc_version,
    oob_mode,
    reduce_cmd,
    scalar_engine,
    tensor_engine,
    unknown_engine,
    vector_engine,
)
from .dma import dma_compute, dma_copy, dma_transpose
from .elementwise import (
    memset,
    reciprocal,
    scalar_tensor_tensor,
    tensor_copy,
    tensor_copy_predicated,
    tensor_reduce,
    tensor_scalar,
    tensor_tensor,
)
from .matmul import nc_matmul, nc_transpose
from .move import iota, local_gather, nc_n_gather, nc_stream_shuffle, nonzero_with_count
from .mx import nc_matmul_mx, quantize_mx
from .select import max8, nc_find_index8, nc_match_replace8
from .sync import (
    core_barrier,
    get_nc_version,
    register_alloc,
    register_load,
    register_move,
    register_store,
    sendrecv,
)

__all__ = [
    "activation",
    "activation_reduce",
    "constants",
    "core_barrier",
    "dge_mode",
    "dma_compute",
    "dma_copy",
    "dma_engine",
    "dma_transpose",
    "engine",
    "get_nc_version",
    "gpsimd_engine",
    "iota",
    "local_gather",
    "matmul_perf_mode",
    "max8",
    "memset",
    "nc_find_index8",
    "nc_match_replace8",
    "nc_matmul",
    "nc_matmul_mx",
    "nc_n_gather",
    "nc_stream_shuffle",
    "nc_transpose",
    "nc_version",
    "nonzero_with_count",
    "oob_mode",
    "quantize_mx",
    "reciprocal",
    "reduce_cmd",
    "register_alloc",
    "register_load",
    "register_move",
    "register_store",
    "scalar_engine",
    "scalar_tensor_tensor",
    "sendrecv",
    "tensor_copy",
    "tensor_copy_predicated",
    "tensor_engine",
    "tensor_reduce",
    "tensor_scalar",
    "tensor_tensor",
    "unknown_engine",
    "vector_engine",
]
