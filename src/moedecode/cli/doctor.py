"""`moedecode doctor`: what this machine and this installation offer."""

from __future__ import annotations

import platform
from importlib import metadata

from .. import machine
from ..gates import MoEDecodeError
from .console import console, rows

__all__ = ["doctor"]

OPTIONAL = {
    "torch": "tensors in and out, without copies",
    "transformers": "models",
    "safetensors": "checkpoints",
    "matplotlib": "plots",
    "typer": "these commands",
    "rich": "these tables",
}


def doctor() -> None:
    """Say what this machine offers: instruction sets, cores, caches, bandwidth, packages."""
    console.print(f"[bold]moedecode {version('moedecode') or 'from source'}[/]")
    console.print()
    rows("Machine", [("system", _system()), ("caches", _caches()), *_memory()])
    rows("Native core", _native())
    packages = {name: version(name) for name in ("numpy", "ml_dtypes", *OPTIONAL)}
    rows(
        "Packages",
        [(name, f"{found or '-':<14} {OPTIONAL.get(name, '')}") for name, found in packages.items()],
    )


def version(package: str) -> str | None:
    """The installed version, or None."""
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def _system() -> str:
    return f"{platform.system()} {platform.machine()}, Python {platform.python_version()}"


def _caches() -> str:
    short = {"Data": "d", "Instruction": "i"}
    found = [
        f"L{c.level}{short.get(c.kind, '')} {_binary(c.bytes)}"
        + (f" for {c.shared_by} cores" if c.shared_by > 1 else "")
        for c in machine.caches()
    ]
    return ", ".join(found) or "not reported"


def _memory() -> list[tuple[str, str]]:
    available = machine.memory_available()
    return [] if available is None else [("memory", f"{available / 2**30:.1f} GiB available")]


def _native() -> list[tuple[str, str]]:
    cores = machine.cores()
    try:
        isas = ", ".join(machine.available_isas())
        found = [("instructions", f"{machine.isa()} in use of {isas} (MOEDECODE_ISA chooses)")]
    except MoEDecodeError as error:
        return [("cores", str(cores)), ("problem", str(error))]
    with console.status("reading memory ..."):
        speeds = {threads: machine.stream_read_gbps(threads) for threads in sorted({1, cores})}
    read = ", ".join(f"{speed:.1f} GB/s with {_threads(threads)}" for threads, speed in speeds.items())
    return [*found, ("cores", f"{cores}, one thread on each by default"), ("stream read", read)]


def _threads(count: int) -> str:
    return "1 thread" if count == 1 else f"{count} threads"


def _binary(count: int) -> str:
    return f"{count >> 20} MiB" if count >= 1 << 20 else f"{count >> 10} KiB"
