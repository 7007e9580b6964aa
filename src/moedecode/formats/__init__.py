"""Number formats, block orders and stored matrices. The floor on which weights stand."""

from .block_order import BlockOrder, hidden_order, intermediate_order
from .matrix import FP8_BLOCK, StoredMatrix
from .mx import dequantise_e4m3, quantise_mx
from .numbers import MX_BLOCK, WeightFormat

__all__ = [
    "FP8_BLOCK",
    "MX_BLOCK",
    "BlockOrder",
    "StoredMatrix",
    "WeightFormat",
    "dequantise_e4m3",
    "hidden_order",
    "intermediate_order",
    "quantise_mx",
]
