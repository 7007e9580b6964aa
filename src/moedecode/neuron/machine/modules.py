"""Owns the module names under which kernels import the machine (`nki`, `nki.language`, `neuronxcc.nki`,
`neuron_dtypes`, ...), while a block runs.

Must not know which kernels import them: what belongs to one library (its package names, its folder) is the
caller's business.
"""

from __future__ import annotations

import functools
import sys
import types
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import numpy.typing as npt

from . import dtypes, isa, language
from .isa import constants
from .machine import Machine
from .program import active
from .tensor import Tensor

__all__ = ["Kernel", "as_nki_modules", "static_cast"]

Array = npt.NDArray[Any]

_PACKAGES = ("nki", "neuronxcc", "neuron_dtypes")


class Kernel:
    """What `nki.jit` makes of a function: inside a run it is the function itself, outside it starts a run on
    the machine.

    `kernel[2](...)` runs on two cores, `kernel(...)` on `programs`. Outputs are NumPy arrays.
    """

    def __init__(self, function: Callable[..., Any], machine: Machine | None, programs: int) -> None:
        functools.update_wrapper(self, function)
        self.function = function
        self.machine = machine
        self.programs = programs

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call through when a program runs already, else run on the machine."""
        if active() is not None or self.machine is None:
            return self.function(*args, **kwargs)
        return self.machine.run(self.function, *args, n_programs=self.programs, **kwargs).outputs

    def __getitem__(self, grid: Any) -> Kernel:
        """The kernel on a grid: an int, or a tuple whose product is the number of cores."""
        cores = int(np.prod([int(n) for n in grid])) if isinstance(grid, tuple) else int(grid)
        return Kernel(self.function, self.machine, cores)

    def __get__(self, instance: Any, owner: Any = None) -> Any:
        """As a method of a class it binds like a function."""
        return self if instance is None else functools.partial(self.__call__, instance)


def static_cast(values: Any, dtype: Any) -> Array:
    """Convert an array to a dtype of the machine, as the toolchain's own package of that name does.

    Args:
        values: array of any dtype; x4 arrays hold four values to an element.
        dtype: NumPy dtype, scalar type or name. An x4 dtype packs the last dimension by four, from an x4
            dtype it grows by four.

    Returns:
        a new array; x4 codes are rounded to nearest even and saturate.
    """
    wanted = dtypes.DTYPES[dtype] if isinstance(dtype, str) and dtype in dtypes.DTYPES else np.dtype(dtype)
    array: Array = np.asarray(values)
    if array.dtype == wanted:
        same: Array = array.copy()
        return same
    if dtypes.is_x4(array.dtype):
        unpacked = dtypes.unpack_x4(array)  # [..., 4]
        array = unpacked.reshape(*unpacked.shape[:-2], -1)  # [..., last * 4]
    if dtypes.is_x4(wanted):
        return dtypes.pack_x4(array.reshape(*array.shape[:-1], -1, 4).astype(np.float32), wanted)
    return array.astype(wanted)


@contextmanager
def as_nki_modules(
    machine: Machine | None = None, *, programs: int = 1, forget: Sequence[str] = ()
) -> Iterator[types.ModuleType]:
    """Make the machine importable under the names of the kernel language, then put everything back as it was.

    Inside the block `import nki`, `nki.language`, `nki.isa`, `nki.isa.constants`, `nki.typing`, the same
    below `neuronxcc.nki`, and `neuron_dtypes` give the model, even where the real toolchain is installed. It
    is not for threads that import the real one meanwhile.

    Args:
        machine: where a jitted kernel runs that is called outside a run; None: it is then called as a plain
            function.
        programs: number of cores of such a call when it names no grid.
        forget: top-level packages that import those names. They are imported afresh inside the block and
            their modules leave `sys.modules` with it, so that no module outlives the names it was built on.

    Yields:
        the module `nki`.
    """
    shadowed = {
        name: module for name, module in sys.modules.items() if _is_below(name, (*_PACKAGES, *forget))
    }
    for name in shadowed:
        del sys.modules[name]
    modules = _modules(machine, programs)
    sys.modules.update(modules)
    try:
        yield modules["nki"]
    finally:
        for name in [name for name in sys.modules if _is_below(name, (*_PACKAGES, *forget))]:
            del sys.modules[name]
        sys.modules.update(shadowed)


def _is_below(name: str, packages: Sequence[str]) -> bool:
    return name.partition(".")[0] in packages


def _modules(machine: Machine | None, programs: int) -> dict[str, types.ModuleType]:
    """All modules by name, each bound as an attribute of its package."""

    def jit(function: Callable[..., Any] | None = None, **options: Any) -> Any:
        """The decorator, with or without options (they choose compilation, of which there is none)."""
        return functools.partial(jit, **options) if function is None else Kernel(function, machine, programs)

    made: dict[str, types.ModuleType] = {}
    for root in ("nki", "neuronxcc.nki"):
        made[root] = _module(root, {"jit": jit, "dtype": np.dtype, "tensor": Tensor})
        made[f"{root}.language"] = _module(f"{root}.language", _public(language))
        made[f"{root}.isa"] = _module(f"{root}.isa", _public(constants) | _public(isa))
        made[f"{root}.isa.constants"] = _module(f"{root}.isa.constants", _public(constants))
        made[f"{root}.typing"] = _module(
            f"{root}.typing", {"tensor": Tensor, "mutable_tensor": Tensor, "scalar": float}
        )
    made["neuronxcc"] = _module("neuronxcc", {})
    made["neuron_dtypes"] = _module("neuron_dtypes", {**dtypes.DTYPES, "static_cast": static_cast})
    for name, module in made.items():
        package, _, own = name.rpartition(".")
        if package:
            setattr(made[package], own, module)
    return made


def _module(name: str, names: dict[str, Any]) -> types.ModuleType:
    module = types.ModuleType(name, "The machine model under a name of the kernel language.")
    module.__path__ = []  # a package, whose submodules are in sys.modules: nothing to look for on disk
    module.__dict__.update(names)
    return module


def _public(module: types.ModuleType) -> dict[str, Any]:
    """The names a module offers: its `__all__`."""
    return {name: getattr(module, name) for name in module.__all__}
