"""One change of the pool: an index transaction, and what memory learns once it is committed."""

from types import TracebackType
from typing import Protocol, Self

from kvfs.core.records import UNFINISHED_MAX, Counters
from kvfs.core.types import InodeNo
from kvfs.pool.space import Space
from kvfs.storage.index import Index


class Ledger(Protocol):
    """What a change is entered in: the pool."""

    index: Index
    counters: Counters
    unfinished: set[InodeNo]
    space: Space


class PoolChange:
    """A ``with`` block around one transaction; a class, since a generator costs 3 us more a time.

    When it is left, counters and the list of what is open for writing go into the same
    transaction. The pool's own follow after the commit, so that a failed one changes nothing.
    """

    __slots__ = ("_begun", "_counters", "_finished", "_pool", "txn")

    def __init__(
        self, pool: Ledger, counters: Counters, begun: InodeNo, finished: InodeNo, *, lasting: bool
    ) -> None:
        """*begun* and *finished* are inodes, or 0; see ``Pool.change``."""
        self._pool = pool
        self._counters = counters
        self._begun = begun
        self._finished = finished
        self.txn = pool.index.write(lasting=lasting)

    def __enter__(self) -> Self:
        self.txn.__enter__()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        pool, txn = self._pool, self.txn
        if kind is None:
            try:
                txn.put_counters(self._counters)
                if self._begun or self._finished:
                    txn.put_unfinished(self._unfinished())
            except BaseException as failure:  # a row that cannot be packed
                txn.__exit__(type(failure), failure, None)
                raise
        txn.__exit__(kind, error, traceback)
        if kind is not None:
            return
        if self._begun:
            pool.unfinished.add(self._begun)
        if self._finished:
            pool.unfinished.discard(self._finished)
        pool.counters = self._counters
        pool.space.recorded_bytes = self._counters.used_bytes

    def _unfinished(self) -> set[InodeNo]:
        """Return what will be open for writing then."""
        unfinished = self._pool.unfinished
        if len(unfinished) > UNFINISHED_MAX + 1:
            return unfinished  # too many to be listed, with one more or less
        after = set(unfinished)
        if self._begun:
            after.add(self._begun)
        after.discard(self._finished)
        return after
