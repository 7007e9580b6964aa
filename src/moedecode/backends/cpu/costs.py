"""The cost table of the cpu backend: what this machine reads and multiplies per second.

Rates are per core, from the measurements named beside them, times the cores in use. Issues no work of its own.
"""

from __future__ import annotations

from ... import _native
from ...plan import CostTable

__all__ = ["machine_costs"]


def machine_costs() -> CostTable:
    """Rates for the plan. Measured on a 2-core AVX2 machine with MXFP4 weights and 16-bit activations."""
    cores = _native.cores()
    return CostTable(
        bytes_per_second=15e9 * cores,
        macs_per_second=25e9 * cores,
        decodes_per_second=60e9 * cores,
        seconds_per_call=20e-6,
    )
