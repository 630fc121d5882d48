"""What the device may not have yet: published blocks, and attributes; oldest first.

*Blocks.* A power loss would lose them. The durability pass (engine/durability/) makes their bytes
durable, and only then writes their identity. Each is also in shared memory (outliving.py), so
that the list, with its ages, outlives a server. The list may be incomplete: it is bounded, and
shared memory is lost if the supervisor dies with its server. Then a search of the index completes
it, and a sync of everything waits for that search first (``gaps``). All other blocks have their
identity.

*Attributes*: user xattrs, pins and policies. The index has them at once, but may lose them in a
power loss. A record in the file of their inode keeps them (core/records.py). It is written
in the background, before the identity with the new sequence number. The next flush of the
durability pass makes both durable.
"""

import logging
import stat
import threading
from collections.abc import Callable, Iterable, Iterator
from typing import Final, NamedTuple

from kvfs.core.errors import Damaged, NoSpace
from kvfs.core.records import AttributeRecord
from kvfs.core.types import InodeNo, InodeRecord
from kvfs.storage.extents import Extents
from kvfs.storage.index import Index
from kvfs.storage.outliving import Lacks, UndurableRow, UndurableTable

_log: Final = logging.getLogger(__name__)
#: Larger records block: XFS writes values that fill most of a block apart, and waits for that.
_QUICK_BYTES: Final = 2048


class Waiting(NamedTuple):
    """A block that waits: since when (monotonic), its size, and the number of its publishing."""

    since_s: float
    size_bytes: int
    ticket: int


class UndurableBlocks:
    """The blocks of one pool. Each is in one of four tables, each oldest first."""

    def __init__(self, most: int, memory: UndurableTable) -> None:
        """*most*: how many blocks may be listed at once. *memory* outlives this server."""
        self._most = most
        self._memory = memory
        self._waiting: dict[InodeNo, Waiting] = {}
        #: Taken by the pass, which is writing their bytes to the device.
        self._taken: dict[InodeNo, Waiting] = {}
        #: Put aside: they may still be written, through a mapping or a handle that is never closed.
        self._held: dict[InodeNo, Waiting] = {}
        #: With an identity that is written, and not durable yet.
        self._identified: dict[InodeNo, Waiting] = {}
        self.ticket = 0
        self.size_bytes = 0
        #: How many were left out so far because the list was full.
        self.left_out = 0
        #: How often the list became incomplete, and how many of these gaps were closed by a search
        #: that began later.
        self.gaps = self.closed_gaps = 0
        #: Searches that failed, so that the list stays incomplete.
        self.failed_searches = 0

    def __len__(self) -> int:
        """Return how many are listed, held ones included."""
        return sum(map(len, self._tables()))

    def __contains__(self, ino: InodeNo) -> bool:
        """Whether *ino* is listed and has no identity yet."""
        return ino in self._waiting or ino in self._taken or ino in self._held

    def _tables(self) -> tuple[dict[InodeNo, Waiting], ...]:
        return self._waiting, self._taken, self._held, self._identified

    @property
    def held(self) -> int:
        """How many are put aside because they may still be written."""
        return len(self._held)

    @property
    def waiting(self) -> int:
        """How many the pass has not taken yet; those put aside do not count."""
        return len(self._waiting)

    @property
    def has_room(self) -> bool:
        """Whether at least half of the list is free."""
        return 2 * len(self) <= self._most

    def oldest_since_s(self) -> float | None:
        """Return since when the oldest block waits, held ones aside; None: none does."""
        tables = (self._waiting, self._taken, self._identified)
        return min((next(iter(table.values())).since_s for table in tables if table), default=None)

    def add(self, ino: InodeNo, size_bytes: int, now_s: float) -> None:
        """List *ino*, which was published; if it is listed already, it keeps age and ticket."""
        before = self._take_off(ino)
        if len(self._waiting) >= self._most and len(self) >= self._most:
            self.left_out += 1
            self.note_gap()
            self._memory.drop(Lacks.BYTES, ino)
            return
        if before is None:
            self._list(ino, now_s, size_bytes)
        else:  # with its ticket, so that those who wait for it go on waiting
            self._list(ino, before.since_s, size_bytes, before.ticket)

    def _list(self, ino: InodeNo, since_s: float, size_bytes: int, ticket: int = 0) -> None:
        if not ticket:
            self.ticket = ticket = self.ticket + 1
        self._waiting[ino] = Waiting(since_s, size_bytes, ticket)
        self.size_bytes += size_bytes
        self._memory.put(Lacks.BYTES, ino, since_s, size_bytes)

    def remove(self, ino: InodeNo) -> None:
        """Take *ino* off the list: it is gone, durable, or being written again."""
        if self._take_off(ino) is not None:
            self._memory.drop(Lacks.BYTES, ino)

    def _take_off(self, ino: InodeNo) -> Waiting | None:
        for table in self._tables():
            waiting = table.pop(ino, None)
            if waiting is not None:
                self.size_bytes -= waiting.size_bytes
                return waiting
        return None

    # ---- what the list may lack ----

    def recall(self, rows: Iterable[UndurableRow]) -> None:
        """List what the last server had listed, oldest first, with its age."""
        for row in rows:
            self._list(row.ino, row.since_s, row.size_bytes)

    @property
    def is_complete(self) -> bool:
        """Whether every block without an identity is listed."""
        return self.closed_gaps == self.gaps

    def note_gap(self) -> None:
        """Note that a block without an identity may be missing from the list from now on."""
        self.gaps += 1
        self._memory.lacks_rows(lacking=True)

    def close_gaps(self, upto: int) -> None:
        """Note that a search has listed all that was missing when ``gaps`` was *upto*."""
        self.closed_gaps = max(self.closed_gaps, upto)
        self._memory.lacks_rows(lacking=not self.is_complete)

    # ---- the pass ----

    def next_due(self) -> tuple[InodeNo, Waiting] | None:
        """Return the block that the pass should take next, None if none waits."""
        return next(iter(self._waiting.items()), None)

    def begin(self, ino: InodeNo) -> None:
        """Note that the pass has begun to make *ino* durable."""
        self._taken[ino] = self._waiting.pop(ino)

    def hold(self, ino: InodeNo) -> None:
        """Put *ino* aside, because somebody may still write it."""
        self._held[ino] = self._waiting.pop(ino)

    def look_again(self, count: int) -> None:
        """Let up to *count* held blocks wait again, those held longest first."""
        for ino in list(self._held)[:count]:
            self._waiting[ino] = self._held.pop(ino)

    def is_taken(self, ino: InodeNo, waiting: Waiting) -> bool:
        """Whether *ino* was not published anew, written or removed since it was taken."""
        return self._taken.get(ino) is waiting

    def put_back(self, ino: InodeNo) -> None:
        """Let *ino*, which was taken, wait again."""
        self._waiting[ino] = self._taken.pop(ino)

    def put_all_back(self) -> None:
        """Let all taken blocks wait again, because the pass ends."""
        for ino in list(self._taken):
            self.put_back(ino)

    def note_identified(self, ino: InodeNo) -> None:
        """Note that the identity of *ino*, which was taken, is written."""
        self._identified[ino] = self._taken.pop(ino)

    def identified(self) -> list[tuple[InodeNo, Waiting]]:
        """Return the blocks whose identity is written and not durable yet."""
        return list(self._identified.items())

    def first_identified_since_s(self) -> float | None:
        """Return since when the first of the identified blocks waits; None: there is none."""
        return next((waiting.since_s for waiting in self._identified.values()), None)

    def leave(self, ino: InodeNo, waiting: Waiting) -> bool:
        """Take *ino*, an identified block that is durable now, off the list.

        False if it was removed, or written again, since *waiting*.
        """
        if self._identified.get(ino) is not waiting:
            return False
        self.remove(ino)
        return True

    def forget_identified(self) -> None:
        """Take all identified blocks off the list: a sync made them durable."""
        for ino in list(self._identified):
            self.remove(ino)

    # ---- everybody else ----

    def sizes(self) -> Iterator[tuple[InodeNo, int]]:
        """Yield all listed blocks with their sizes; the list must not change meanwhile."""
        for table in self._tables():
            for ino, waiting in table.items():
                yield ino, waiting.size_bytes

    def held_inos(self) -> Iterator[InodeNo]:
        """Yield the blocks that may still be written; the list must not change meanwhile."""
        yield from self._held

    def unidentified(self) -> Iterator[tuple[InodeNo, Waiting]]:
        """Yield all blocks without an identity; the list must not change meanwhile."""
        for table in (self._waiting, self._taken, self._held):
            yield from table.items()

    def undone(self, ticket: int) -> Iterator[InodeNo]:
        """Yield the blocks with a ticket up to *ticket* that the pass will make durable."""
        for table in (self._waiting, self._taken, self._identified):
            for ino, waiting in table.items():
                if waiting.ticket <= ticket:
                    yield ino


class Change(NamedTuple):
    """A waiting change: since when (monotonic), and its number among all changes."""

    since_s: float
    ticket: int


class _Flushed(NamedTuple):
    """Written changes that wait for a flush: their number, oldest time and lowest ticket."""

    changes: int = 0
    since_s: float = 0.0
    ticket: int = 0

    def joined(self, other: "_Flushed") -> "_Flushed":
        if not self.changes or not other.changes:
            return self if self.changes else other
        since_s, ticket = min(self.since_s, other.since_s), min(self.ticket, other.ticket)
        return _Flushed(self.changes + other.changes, since_s, ticket)


class AttributeRecords:
    """The attribute records of one pool, and which of them the device does not have."""

    def __init__(
        self,
        index: Index,
        extents: Extents,
        memory: UndurableTable,
        monotonic_s: Callable[[], float],
        is_new: Callable[[InodeNo], bool],
    ) -> None:
        """*memory* outlives this server, and lists the changes that the device does not have.

        *is_new*: whether this server gives out an inode's number.
        """
        self._is_new = is_new
        self._index = index
        self._memory = memory
        self._extents = extents
        self._monotonic_s = monotonic_s
        self._changed: dict[InodeNo, Change] = {}
        self._written = _Flushed()
        self._flushing = _Flushed()
        #: Records are written by the loop's thread and by the one for long jobs.
        self._writing = threading.Lock()
        self.ticket = 0
        #: Records that could not be written: after a power loss they are as they were logged.
        self.refused = 0
        #: Whether inodes from before this server may have changes that are not listed here.
        self._lacks_older = False

    def __contains__(self, ino: InodeNo) -> bool:
        """Whether *ino*'s record is not written yet; its identity waits for that."""
        return ino in self._changed

    def __len__(self) -> int:
        """Return how many changes are not durable."""
        return len(self._changed) + self._written.changes + self._flushing.changes

    def mark_changed(self, ino: InodeNo) -> bool:
        """Note that the attributes of *ino* changed in the index, with a new sequence number.

        Return True if no change of *ino* was waiting before.
        """
        before = self._changed.get(ino)
        self.ticket += 1
        since_s = self._monotonic_s() if before is None else before.since_s
        self._changed[ino] = Change(since_s, self.ticket)
        if before is None:
            self._memory.put(Lacks.ATTRIBUTES, ino, since_s)
        return before is None

    def may_lack(self, ino: InodeNo) -> bool:
        """Whether *ino* may have a change that is not listed, so that it is written to be sure."""
        return self._lacks_older and not self._is_new(ino)

    def note_unlisted(self) -> None:
        """Note that changes of older inodes may be missing, until a search has ended."""
        self._lacks_older = True

    def note_all_listed(self) -> None:
        """Note that a search has looked at all inodes, and every change is listed or written."""
        self._lacks_older = False

    def forget(self, ino: InodeNo) -> None:
        """Forget the change of *ino*, which is going away."""
        if self._changed.pop(ino, None) is not None:
            self._memory.drop(Lacks.ATTRIBUTES, ino)

    def recall(self, changed: Iterable[UndurableRow], flush_since_s: float | None) -> None:
        """Take over the changes that waited in the last server, with their ages.

        *flush_since_s*: since when written changes wait for a flush; None: there are none.
        """
        for row in changed:
            self.ticket += 1
            self._changed[row.ino] = Change(row.since_s, self.ticket)
        if flush_since_s is not None:
            self.ticket += 1
            self._written = _Flushed(1, flush_since_s, self.ticket)

    # ---- writing ----

    def record(self, ino: InodeNo) -> InodeRecord | None:
        """Return the present record of *ino* in the index; None if it is gone or damaged."""
        return self._index.inode_or_miss(ino)

    def present(self, ino: InodeNo, record: InodeRecord) -> AttributeRecord | None:
        """Return the attributes that belong to the present *record* of *ino*. Atomic.

        None if an attribute is damaged in the index: its file may still have it whole.
        """
        try:
            attributes = {
                name: value
                for name in self._index.xattrs(ino)
                if (value := self._index.xattr(ino, name)) is not None
            }
        except Damaged as error:
            _log.warning("inode %#x: its attributes are not written: %s", ino, error)
            return None
        return AttributeRecord(ino, record.sequence, attributes)

    def change_of(self, ino: InodeNo) -> Change | None:
        """Return the waiting change of *ino*, None if there is none."""
        return self._changed.get(ino)

    def write(self, attributes: AttributeRecord, record: InodeRecord) -> bool:
        """Write *attributes* into the file of their inode, in any thread; False if that fails.

        The file system may limit their size (ext4: one block for all xattrs of a file).
        """
        of_node = not stat.S_ISREG(record.mode)
        try:
            with self._writing:
                self._extents.write_attributes(attributes, of_node=of_node)
        except (NoSpace, OSError) as error:
            _log.warning("inode %#x: its attributes are not kept: %s", attributes.ino, error)
            return False
        return True

    def note_written(self, ino: InodeNo, change: Change, *, kept: bool) -> bool:
        """Note that *change* was written (*kept*) or refused; False if *ino* has changed since."""
        present = self._changed.get(ino)
        if present != change:
            return present is None
        del self._changed[ino]
        if kept:
            self._written = self._written.joined(_Flushed(1, change.since_s, change.ticket))
            self._note_flush()  # before the row is dropped
        else:
            self.refused += 1
        self._memory.drop(Lacks.ATTRIBUTES, ino)
        return True

    # ---- the pass ----

    def begin_flush(self) -> None:
        """Note that a flush begins, which makes all written changes durable."""
        self._flushing = self._flushing.joined(self._written)
        self._written = _Flushed()

    def end_flush(self, *, failed: bool = False) -> None:
        """Note that the flush has ended; after a *failed* one its changes wait for the next."""
        if failed:
            self._written = self._written.joined(self._flushing)
        self._flushing = _Flushed()
        self._note_flush()

    def _note_flush(self) -> None:
        """Note, for the next server, since when changes wait for a flush."""
        parts = self._written.joined(self._flushing)
        self._memory.await_flush(parts.since_s if parts.changes else None)

    def written_since_s(self) -> float | None:
        """Return since when the oldest written change waits for a flush; None: none does."""
        return self._written.since_s if self._written.changes else None

    def oldest_since_s(self) -> float | None:
        """Return since when the oldest change waits; None: none does."""
        parts = [part.since_s for part in (self._written, self._flushing) if part.changes]
        parts += [change.since_s for change in self._changed.values()]
        return min(parts, default=None)

    def undone(self, ticket: int) -> int:
        """Return how many changes up to *ticket* are not durable."""
        changed = sum(change.ticket <= ticket for change in self._changed.values())
        parts = (self._written, self._flushing)
        return changed + sum(
            part.changes for part in parts if part.changes and part.ticket <= ticket
        )


def is_quick(attributes: AttributeRecord) -> bool:
    """Whether *attributes* can be written without waiting for the device."""
    size_bytes = sum(len(name) + len(value) for name, value in attributes.attributes.items())
    return size_bytes <= _QUICK_BYTES
