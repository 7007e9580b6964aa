"""Owns a user's checkout of the public nki-library: finding it, importing it onto the model, and saying
clearly what is missing.

Must not know configurations or comparisons. Nothing of the library is copied or changed; it is imported as it
lies.
"""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from ..machine.modules import as_nki_modules

__all__ = ["CheckoutError", "PublicLibrary", "open_checkout"]

_PACKAGE = "nkilib_src"
_CORE = f"{_PACKAGE}.nkilib.core"
_WRITTEN_FOR = "the nki-library of 2026-04-13"

# field of PublicLibrary: (module below nkilib.core, name in it)
_NAMES = {
    "moe_block": ("moe_block.moe_block_tkg", "moe_block_tkg"),
    "moe_block_reference": ("moe_block.moe_block_tkg_torch", "moe_block_tkg_torch_ref"),
    "moe": ("moe.moe_tkg.moe_tkg", "moe_tkg"),
    "moe_reference": ("moe.moe_tkg.moe_tkg_torch", "moe_tkg_torch_ref"),
    "router": ("router_topk.router_topk", "router_topk"),
    "router_reference": ("router_topk.router_topk_torch", "router_topk_torch_ref"),
    "rmsnorm": ("subkernels.rmsnorm_tkg", "rmsnorm_tkg"),
    "rmsnorm_reference": ("subkernels.rmsnorm_torch", "rms_norm_torch_ref"),
    "rmsnorm_mx": ("subkernels.rmsnorm_mx_quantize_tkg", "rmsnorm_mx_quantize_tkg"),
    "quantise_reference": ("utils.mx_torch_common", "quantize_to_mx"),
    "tensor_view": ("utils.tensor_view", "TensorView"),
    "activations": ("utils.common_types", "ActFnType"),
    "router_activations": ("utils.common_types", "RouterActFnType"),
    "scale_modes": ("utils.common_types", "ExpertAffinityScaleMode"),
}


class CheckoutError(Exception):
    """The path holds no usable checkout; the message says what is missing and what to do."""


@dataclass(frozen=True)
class PublicLibrary:
    """The names of the library that the comparison uses: kernels, PyTorch references, enumerations."""

    version: str
    moe_block: Callable[..., Any]
    moe_block_reference: Callable[..., Any]
    moe: Callable[..., Any]
    moe_reference: Callable[..., Any]
    router: Callable[..., Any]
    router_reference: Callable[..., Any]
    rmsnorm: Callable[..., Any]
    rmsnorm_reference: Callable[..., Any]
    rmsnorm_mx: Callable[..., Any]
    quantise_reference: Callable[..., Any]
    tensor_view: type[Any]
    activations: Any
    router_activations: Any
    scale_modes: Any

    def arguments(self, function: Callable[..., Any], given: dict[str, Any]) -> dict[str, Any]:
        """`given`, after a look at whether `function` takes all of it.

        Raises:
            CheckoutError: it has other parameters than this comparison was written for.
        """
        known = inspect.signature(function).parameters
        unknown = sorted(set(given) - set(known))
        if unknown:
            name = getattr(function, "__name__", repr(function))
            raise CheckoutError(
                f"{name} of the checkout does not take {', '.join(unknown)}: its interface has changed since "
                f"{_WRITTEN_FOR}; check out that state, or adapt moedecode.neuron.conformance"
            )
        return given


@contextmanager
def open_checkout(path: str | os.PathLike[str]) -> Iterator[PublicLibrary]:
    """Import a checkout onto the model for the length of a block.

    Args:
        path: the repository, its `src` folder, or a folder with the package `nkilib_src`.

    Yields:
        the library. Its kernels run in `Machine.run` inside the block; afterwards its modules are gone again.

    Raises:
        CheckoutError: no checkout there, PyTorch is missing, or it lacks a name that is needed.
    """
    folder = _source_folder(Path(path))
    _require_torch()
    quiet = os.environ.get("NKILIB_LOG_LEVEL")
    os.environ["NKILIB_LOG_LEVEL"] = (
        quiet or "ERROR"
    )  # its logger prints notices between the rows of the table
    sys.path.insert(0, str(folder))
    try:
        with as_nki_modules(forget=(_PACKAGE,)):
            yield _import_all(folder)
    finally:
        sys.path.remove(str(folder))
        if quiet is None:
            del os.environ["NKILIB_LOG_LEVEL"]


def _source_folder(path: Path) -> Path:
    """The folder to put on `sys.path`."""
    if not path.is_dir():
        raise CheckoutError(f"{path}: no such folder; give the path of a checkout of the public nki-library")
    for folder in (path / "src", path, path.parent):
        if (folder / _PACKAGE / "nkilib" / "core").is_dir():
            return folder.resolve()
    raise CheckoutError(
        f"{path}: holds no src/{_PACKAGE}/nkilib/core; give the path of a checkout of the public nki-library "
        f"(this comparison was written for {_WRITTEN_FOR})"
    )


def _require_torch() -> None:
    if importlib.util.find_spec("torch") is None:
        raise CheckoutError("the references of the nki-library need PyTorch: pip install 'moedecode[torch]'")


def _import_all(folder: Path) -> PublicLibrary:
    found: dict[str, Any] = {}
    for field in fields(PublicLibrary):
        if field.name == "version":
            continue
        module, name = _NAMES[field.name]
        found[field.name] = _import(folder, f"{_CORE}.{module}", name)
    return PublicLibrary(version=_version(), **found)


def _import(folder: Path, module: str, name: str) -> Any:
    try:
        return getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError, SyntaxError) as error:
        raise CheckoutError(
            f"{folder}: cannot import {name} from {module} ({type(error).__name__}: {error}); "
            f"this comparison was written for {_WRITTEN_FOR}, and the model offers the part of nki it needs"
        ) from error


def _version() -> str:
    try:
        module = importlib.import_module(f"{_PACKAGE}.nkilib.version")
    except ImportError:
        return "unknown"
    return str(getattr(module, "__version__", "unknown"))
