"""The chip table: what one NeuronCore of each generation holds, moves and clocks, and who says so.

Owns the public hardware figures and nothing else. Knows no tensors, no instructions, no programs.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

__all__ = ["CHIPS", "ENGINES", "Chip", "chip_named"]

KIB = 1024
GB = 1e9

ENGINES = ("tensor", "vector", "scalar", "gpsimd", "dma", "sync")
"""Lanes on which an instruction can run; "dma" is the core's 16 DMA engines together."""


@dataclass(frozen=True)
class Chip:
    """One generation. Everything is per NeuronCore; bandwidths are bytes per second, clocks are Hz.

    Sources, all public pages of the AWS Neuron documentation: [1] NeuronDevice Architecture Guide for NKI
    (trn1), [2] Trainium2 and [3] Trainium3 Architecture Guides for NKI, [4] "Introduction to DMA with NKI",
    [5] "Guideline to avoid under-utilising DMA bandwidth", [6] the nki.isa reference.
    """

    name: str
    generation: int
    """NeuronCore version: 2, 3 or 4."""
    sbuf_partition_bytes: int
    hbm_bytes_per_second: float
    """The core's share: device bandwidth / cores on the device."""
    dma_engine_bytes_per_second: float
    """Achieved by one DMA engine with large payloads [5]; the wires allow more [4]."""
    clock_hz: Mapping[str, float]
    has_mx: bool
    """MX matmul and quantise: NeuronCore-v4 and newer [3, 6]."""
    has_fast_modes: bool
    """16-bit fast modes of the Vector engine: NeuronCore-v3 and newer [2]."""
    scalar_fast_modes: bool
    """The same on the Scalar engine (2x): NeuronCore-v4 [3]."""
    psum_bf16: bool
    """PSUM tiles of bfloat16 as matmul destinations: NeuronCore-v4 [3, 6]."""
    sendrecv: bool
    """Two cores of one logical core: sendrecv and core_barrier, NeuronCore-v3 and newer [6]."""

    partitions: int = 128  # SBUF and PSUM alike [1]
    quadrant: int = 32  # partitions; tiles start on these [1], shuffles and MX scales live within them [3, 6]
    psum_partition_bytes: int = 16 * KIB  # [1]; unchanged since [2, 3]
    psum_bank_bytes: int = 2 * KIB  # 8 banks of 512 float32 [1]; one matmul writes into one bank
    stationary_columns: int = 128  # PE columns [1]
    dma_engines: int = 16  # per core, each serving 8 partitions [4]
    # A DMA starts ~1.3 us after its semaphore [5]; a hardware-generated descriptor set takes ~0.6 us more
    # [2].
    dma_start_seconds: float = 1.3e-6
    dma_descriptor_seconds: float = 0.6e-6
    # Not a public figure but a fit of [5]: 2 KiB per partition "approaches" the peak, 4 KiB saturates, below
    # 256 B is a small fraction. payload / (payload + 256 B) gives 0.89, 0.94 and below 0.5.
    dma_payload_overhead_bytes: int = 256
    # quantize_mx: the shared exponent is exponent - (emax - headroom). nki-library's reference and OCP's
    # example say 0, the newest page of the instruction says its scale is twice as large: 1.
    # dataclasses.replace() switches.
    mx_scale_headroom: int = 0
    minimum_cycles: int = 64  # smallest initiation interval of an engine instruction (MIN_II) [6]
    access_cycles: int = 60  # start of a tensor access to SBUF or PSUM [1]
    gpsimd_start_cycles: int = 150  # [6]
    # Nothing public on these two: parameters, so that a measurement can replace them.
    sendrecv_start_seconds: float = 1.9e-6  # a DMA start plus a descriptor set
    barrier_seconds: float = 1.3e-6  # a semaphore that crosses cores [5]

    @property
    def dma_bytes_per_second(self) -> float:
        """All DMA engines of the core together."""
        return self.dma_engines * self.dma_engine_bytes_per_second

    @property
    def hbm_path_bytes_per_second(self) -> float:
        """What a core can move between HBM and SBUF: the memory's share or the DMA engines, the smaller."""
        return min(self.hbm_bytes_per_second, self.dma_bytes_per_second)

    def seconds(self, engine: str, cycles: float) -> float:
        """``cycles`` of a compute engine in seconds."""
        return cycles / self.clock_hz[engine]


def _clocks(tensor: float, vector: float, scalar: float, gpsimd: float) -> Mapping[str, float]:
    ghz = {"tensor": tensor, "vector": vector, "scalar": scalar, "gpsimd": gpsimd}
    return MappingProxyType({engine: value * 1e9 for engine, value in ghz.items()})


CHIPS: Mapping[str, Chip] = MappingProxyType(
    {
        # [1]: 2 cores, 24 MiB of SBUF in 128 partitions, 820 GB/s of HBM; [5]: 17 B/ns per DMA engine.
        "trn1": Chip(
            name="trn1",
            generation=2,
            sbuf_partition_bytes=192 * KIB,
            hbm_bytes_per_second=820 * GB / 2,
            dma_engine_bytes_per_second=17 * GB,
            clock_hz=_clocks(2.8, 1.12, 1.4, 1.4),
            has_mx=False,
            has_fast_modes=False,
            scalar_fast_modes=False,
            psum_bf16=False,
            sendrecv=False,
        ),
        # [2]: 8 cores, 28 MiB of SBUF, 2.9 TB/s of HBM, 79 TFLOP/s bf16 = 2 * 128 * 128 * 2.4 GHz.
        "trn2": Chip(
            name="trn2",
            generation=3,
            sbuf_partition_bytes=224 * KIB,
            hbm_bytes_per_second=2900 * GB / 8,
            dma_engine_bytes_per_second=23 * GB,
            clock_hz=_clocks(2.4, 0.96, 1.2, 1.2),
            has_mx=False,
            has_fast_modes=True,
            scalar_fast_modes=False,
            psum_bf16=False,
            sendrecv=True,
        ),
        # [3]: 8 cores, 32 MiB of SBUF, 4.7 TB/s of HBM (the device page says 4.9), 315 TFLOP/s MX = 4x bf16.
        "trn3": Chip(
            name="trn3",
            generation=4,
            sbuf_partition_bytes=256 * KIB,
            hbm_bytes_per_second=4700 * GB / 8,
            dma_engine_bytes_per_second=33 * GB,
            clock_hz=_clocks(2.4, 1.2, 1.2, 1.2),
            has_mx=True,
            has_fast_modes=True,
            scalar_fast_modes=True,
            psum_bf16=True,
            sendrecv=True,
        ),
    }
)


def chip_named(name: str) -> Chip:
    """The chip called ``name``; raises ValueError with the names there are."""
    try:
        return CHIPS[name]
    except KeyError:
        raise ValueError(f"chip={name!r}: no such chip; take one of {', '.join(CHIPS)}") from None
