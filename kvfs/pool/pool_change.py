"""Changes of the pool: a transaction, the update of memory after it, and who follows. Damaged rows.

After its commit a change hands over what it did, to each follower in turn: each table that must
agree with the index. Tables are updated in no other way (tests/engine/test_followers.py).
"""

import logging
from collections.abc import Callable
from types import TracebackType
from typing import Final, Protocol, Self

from kvfs.core.changed import Changed, Why
from kvfs.core.drives import ByDrive, DriveCounts
from kvfs.core.errors import Damaged
from kvfs.core.records import UNFINISHED_MAX, Counters, child_key, name_key, parse_child_key, unseal
from kvfs.core.types import InodeNo
from kvfs.pool.space.drive import PoolDrive
from kvfs.pool.space.space import Space
from kvfs.storage.index import Index

_log: Final = logging.getLogger(__name__)
_Follow = Callable[[Changed], None]


class Follower(Protocol):
    """A table that must be told of changes."""

    @property
    def follows(self) -> frozenset[Why]:
        """The kinds of changes that it must be told of."""

    def follow(self, changed: Changed) -> None:
        """Update the table for *changed*, which is in the index already."""


class Followers:
    """All followers of one pool, in the order in which they are told."""

    def __init__(self, *followers: Follower) -> None:
        self._of: tuple[tuple[_Follow, ...], ...] = tuple(
            tuple(each.follow for each in followers if why in each.follows) for why in Why
        )
        #: How often a follower raised; the log says why.
        self.failures = 0

    def tell(self, changed: Changed) -> None:
        """Hand *changed* to all. A failure fails no request, since the index is right already."""
        for follow in self._of[changed.why]:
            try:
                follow(changed)
            except Exception:
                self.failures += 1
                _log.exception("inode %#x: not followed (%s)", changed.ino, changed.why.name)


class Counted(Protocol):
    """Where space is counted."""

    @property
    def drives(self) -> ByDrive[PoolDrive]:
        """How much is taken of each drive, and by what."""

    @property
    def first(self) -> Space:
        """What is taken of the first drive."""


class Ledger(Protocol):
    """What a change updates in memory; the pool implements it."""

    index: Index
    counters: Counters
    drive_counts: DriveCounts
    unfinished: set[InodeNo]
    followers: Followers

    @property
    def space(self) -> Counted:
        """How much is taken."""


class PoolChange:
    """A ``with`` block around one transaction; a class, because a generator costs 3 us more.

    At its end the counters and the list of inodes open for writing are written in the same
    transaction. After the commit the pool's memory is updated, and the followers are told of each
    change. A failed commit changes nothing.
    """

    __slots__ = ("_begun", "_changes", "_counters", "_finished", "_pool", "_recount", "txn")

    def __init__(
        self, pool: Ledger, counters: Counters, begun: InodeNo, finished: InodeNo, *, lasting: bool
    ) -> None:
        """*begun* and *finished* are inodes, or 0; see ``Pool.change``."""
        self._pool = pool
        self._counters = counters
        self._begun = begun
        self._finished = finished
        self._changes: list[Changed] = []
        self.txn = pool.index.write(lasting=lasting)

    def __enter__(self) -> Self:
        self.txn.__enter__()
        return self

    def write(self, changed: Changed) -> None:
        """Write the inode's new record; its name rows stay as they are."""
        assert changed.after is not None, "one that goes has rows to remove"
        self.txn.put_inode(changed.ino, changed.after)
        self._changes.append(changed)

    def does(self, request: int, ino: InodeNo) -> None:
        """Note that the change carries out *request* (0: none), which created *ino*."""
        if request:
            self.txn.deed = (request, ino)

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if kind is None:
            try:
                self._complete()
            except BaseException as failure:  # such as a row that cannot be packed
                self.txn.__exit__(type(failure), failure, None)
                raise
        self.txn.__exit__(kind, error, traceback)
        if kind is None:
            self._learn()
            for changed in self._changes:
                self._pool.followers.tell(changed)

    def _complete(self) -> None:
        """Write the rows that depend on the whole change."""
        self.txn.put_counters(self._counters)
        if self._pool.drive_counts.several:
            #: What drives from 1 on hold with the change.
            self._recount = self._pool.drive_counts.after(self._changes)
            self.txn.put_drive_counts(self._recount)
        if self._begun or self._finished:
            self.txn.put_unfinished(self._unfinished())

    def _learn(self) -> None:
        """Update memory, after the commit."""
        pool = self._pool
        if self._begun:
            pool.unfinished.add(self._begun)
        if self._finished:
            pool.unfinished.discard(self._finished)
        pool.counters = self._counters
        pool.space.first.recorded_bytes = self._counters.used_bytes
        if pool.drive_counts.several:
            pool.drive_counts.learn(self._recount)
            counts = pool.drive_counts.of_all(self._counters)
            for drive, count in zip(pool.space.drives.all, counts, strict=True):
                drive.space.recorded_bytes = count.used_bytes

    def _unfinished(self) -> set[InodeNo]:
        """Return the inodes that will be open for writing."""
        unfinished = self._pool.unfinished
        if len(unfinished) > UNFINISHED_MAX + 1:
            return unfinished  # too many to be listed, even with one less
        after = set(unfinished)
        if self._begun:
            after.add(self._begun)
        after.discard(self._finished)
        return after


class Damage:
    """Index rows that cannot be read: their names become misses, and `kvfs status` counts them.

    A name that always returned an error could neither be used nor created again. Counts and other
    rows that belong to a lost row stay as they are until ``kvfs fsck --repair``.
    """

    def __init__(self, index: Index, *, read_only: bool) -> None:
        self._index = index
        self._read_only = read_only
        #: Inodes whose record cannot be read; their names are removed at the next lookup.
        self.inodes: set[InodeNo] = set()
        self.misses = 0

    def miss_name(self, parent: InodeNo, name: bytes, ino: InodeNo | None, error: str) -> None:
        """Drop *name* in *parent*, which leads to no inode or a damaged one. Raises NoSpace."""
        self.misses += 1
        _log.error("%r in inode %#x: %s; kvfs fsck --repair repairs it", name, parent, error)
        if self._read_only:
            return
        with self._index.write() as txn:
            txn.delete_row(name_key(parent, name))
            if ino is not None:
                txn.delete_row(child_key(parent, ino))
                txn.delete_inode(ino)
                txn.delete_xattrs(ino)
        if ino is not None:
            self.inodes.discard(ino)

    def legible(self, parent: InodeNo, after: InodeNo, limit: int) -> list[tuple[InodeNo, bytes]]:
        """Return the readable ones of the next *limit* rows of a listing of *parent*.

        If none of them is readable, look at further rows. Empty: the listing has ended.
        """
        prefix = child_key(parent, InodeNo(0))[:-8]
        found: list[tuple[InodeNo, bytes]] = []
        for rows in self._index.walk(prefix, limit, after=child_key(parent, after)):
            for child, raw in rows:
                try:
                    found.append((parse_child_key(child)[1], unseal(child, raw)))
                except Damaged:
                    self.misses += 1
            if found:
                break
        return found
