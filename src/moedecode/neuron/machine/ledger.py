"""Owns the account of HBM traffic: bytes read and written per tensor and core, distinct bytes, re-reads.

Must not know instructions. It counts what DMA engines move; on-chip traffic is not HBM traffic.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from .coverage import Coverage, read_bit, write_bit
from .memory import Storage

__all__ = ["Ledger", "LedgerRow"]


@dataclass(frozen=True)
class LedgerRow:
    """Traffic of one HBM tensor.

    Attributes:
        name, shape, dtype, nbytes: of the tensor; `kind` is "input", "shared" or "private".
        read, written: bytes per core.
        distinct_read: bytes of the tensor that a core has read at least once, per core.
        distinct_read_chip, distinct_written_chip: the same for all cores together.
    """

    name: str
    kind: str
    shape: tuple[int, ...]
    dtype: str
    nbytes: int
    read: tuple[int, ...]
    written: tuple[int, ...]
    distinct_read: tuple[int, ...]
    distinct_read_chip: int
    distinct_written_chip: int

    @property
    def reread(self) -> int:
        """Bytes that were read more often than once per chip."""
        return sum(self.read) - self.distinct_read_chip

    @property
    def times_read(self) -> float:
        """Bytes read by all cores over distinct bytes; 0 where nothing was read."""
        return sum(self.read) / self.distinct_read_chip if self.distinct_read_chip else 0.0


@dataclass
class _Account:
    storage: Storage
    coverage: Coverage
    read: list[int]
    written: list[int]


@dataclass
class Ledger:
    """Collects the traffic of one run."""

    cores: int
    _accounts: dict[int, _Account] = field(default_factory=dict)

    def coverage(self, storage: Storage) -> Coverage:
        """The map of a tensor, created at its first access."""
        return self._account(storage).coverage

    def _account(self, storage: Storage) -> _Account:
        account = self._accounts.get(storage.key)
        if account is None:
            account = _Account(storage, Coverage(storage.nbytes), [0] * self.cores, [0] * self.cores)
            self._accounts[storage.key] = account
        return account

    def count(self, storage: Storage, core: int, nbytes: int, *, write: bool) -> None:
        """Add an access; the caller marks the coverage."""
        account = self._account(storage)
        (account.written if write else account.read)[core] += nbytes

    def rows(self) -> Sequence[LedgerRow]:
        """One row per HBM tensor that was touched, in the order of first touch."""
        return [self._row(account) for account in self._accounts.values()]

    def _row(self, account: _Account) -> LedgerRow:
        storage, coverage = account.storage, account.coverage
        every_read = sum(read_bit(c) for c in range(self.cores))
        every_write = sum(write_bit(c) for c in range(self.cores))
        return LedgerRow(
            name=storage.name,
            kind="input" if storage.is_input else "shared" if storage.core is None else "private",
            shape=storage.shape,
            dtype=storage.dtype.names[0] if storage.dtype.names else str(storage.dtype),
            nbytes=storage.nbytes,
            read=tuple(account.read),
            written=tuple(account.written),
            distinct_read=tuple(coverage.touched(read_bit(c)) for c in range(self.cores)),
            distinct_read_chip=coverage.touched(every_read),
            distinct_written_chip=coverage.touched(every_write),
        )

    @property
    def bytes_read(self) -> int:
        """Bytes that all cores read from HBM."""
        return sum(sum(a.read) for a in self._accounts.values())

    @property
    def bytes_written(self) -> int:
        """Bytes that all cores wrote to HBM."""
        return sum(sum(a.written) for a in self._accounts.values())

    @property
    def bytes_moved(self) -> int:
        """Bytes read plus bytes written."""
        return self.bytes_read + self.bytes_written

    def named(self, name: str) -> LedgerRow:
        """The row of a tensor by name.

        Raises:
            KeyError: no such tensor was touched.
        """
        for account in self._accounts.values():
            if account.storage.name == name:
                return self._row(account)
        raise KeyError(
            f"no HBM tensor called {name!r} was touched; "
            f"there are {[a.storage.name for a in self._accounts.values()]}"
        )
