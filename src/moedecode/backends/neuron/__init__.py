"""The neuron backend: a thin door to the megakernel, run on the model of the machine.

Owns gates, the conversion of weights and arguments, and the report of the last run. Knows no torch, no blocks
and no commands; what a kernel computes is :mod:`moedecode.neuron.kernels`'s.
"""

from __future__ import annotations

from .backend import NeuronBackend, NeuronBlock, last_report

__all__ = ["NeuronBackend", "NeuronBlock", "last_report"]
