"""The seam between the kernels and the kernel language: the one place that decides whose `nki` they are
written against.

Owns that choice and nothing else. Kernels import `nl`, `nisa` and `jit` from here and nothing from the
machine model.

MOEDECODE_NKI=toolchain takes the installed Neuron toolchain's `nki` (compile for the hardware). The default
is the machine model: everything in this package that calls the kernels runs them on it, also where the
toolchain happens to be installed.
"""

from __future__ import annotations

import importlib
import os
from collections.abc import Callable
from typing import Any

from ...gates import MissingExtra, invalid

__all__ = ["jit", "nisa", "nl", "on_model"]

_CHOICE = os.environ.get("MOEDECODE_NKI", "model")
if _CHOICE not in ("model", "toolchain"):
    raise invalid("MOEDECODE_NKI", repr(_CHOICE), "is not known", 'set "model" or "toolchain", or unset it')

on_model: bool = _CHOICE == "model"
"""Whether the names are the machine model's."""

nl: Any
nisa: Any
if on_model:
    nl = importlib.import_module("moedecode.neuron.machine.language")
    nisa = importlib.import_module("moedecode.neuron.machine.isa")
else:
    try:
        nl = importlib.import_module("nki.language")
        nisa = importlib.import_module("nki.isa")
    except ModuleNotFoundError as error:
        raise MissingExtra(
            "MOEDECODE_NKI='toolchain' needs the Neuron toolchain, whose `nki` is not installed; "
            "install it, or unset the variable to run on the model"
        ) from error


def jit(kernel: Callable[..., Any]) -> Callable[..., Any]:
    """Mark the outermost function of a kernel: compiled by the toolchain, left as it is on the model."""
    if on_model:
        return kernel
    compiled: Callable[..., Any] = importlib.import_module("nki").jit(kernel)
    return compiled
