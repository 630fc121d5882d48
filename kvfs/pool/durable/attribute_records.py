"""Attributes that the device may not have yet: user xattrs, pins and policies.

The index has them at once, but may lose them in a power loss. A record in the file of their inode
keeps them (core/records.py). It is written in the background, before the identity with the new
sequence number. The next flush of the durability pass, on the drive of that file, makes both
durable.
"""

import functools
import logging
import stat
import threading
from collections.abc import Callable, Iterable
from typing import Final, NamedTuple

from kvfs.core.drives import ByDrive
from kvfs.core.errors import Damaged, NoSpace
from kvfs.core.records import AttributeRecord
from kvfs.core.types import FIRST_DRIVE, DriveNo, InodeNo, InodeRecord
from kvfs.storage.extents import Extents
from kvfs.storage.index import Index
from kvfs.storage.outliving import Lacks, UndurableRow, UndurableTable

_log: Final = logging.getLogger(__name__)
#: Larger records block: XFS writes values that fill most of a block apart, and waits for that.
_QUICK_BYTES: Final = 2048


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


class _OnDrive:
    """What was written to one drive, and is not durable there yet."""

    def __init__(self) -> None:
        self.written = _Flushed()
        self.flushing = _Flushed()
        #: Whether the drive has failed, so that nothing waits for it.
        self.is_lost = False
        #: Records are written by the loop's thread and by the drive's for long jobs.
        self.writing = threading.Lock()

    def parts(self) -> tuple[_Flushed, ...]:
        return () if self.is_lost else (self.written, self.flushing)

    def joined(self) -> _Flushed:
        return functools.reduce(_Flushed.joined, self.parts(), _Flushed())


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
        self._drives = ByDrive([_OnDrive() for _ in range(extents.drives)])
        self.ticket = 0
        #: Records that could not be written: after a power loss they are as they were logged.
        self.refused = 0
        #: Whether inodes from before this server may have changes that are not listed here.
        self.lacks_older = False

    def __contains__(self, ino: InodeNo) -> bool:
        """Whether *ino*'s record is not written yet; its identity waits for that."""
        return ino in self._changed

    def __len__(self) -> int:
        """Return how many changes are not durable."""
        return len(self._changed) + sum(one.joined().changes for one in self._drives.all)

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
        return self.lacks_older and not self._is_new(ino)

    def note_unlisted(self) -> None:
        """Note that changes of older inodes may be missing, until a search has ended."""
        self.lacks_older = True

    def note_all_listed(self) -> None:
        """Note that a search has looked at all inodes, and every change is listed or written."""
        self.lacks_older = False

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
            for one in self._drives.all:  # any of them may be the one that lacks it
                one.written = _Flushed(1, flush_since_s, self.ticket)

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
            with self._drives.of(attributes.ino).writing:
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
            there = self._drives.of(ino)
            there.written = there.written.joined(_Flushed(1, change.since_s, change.ticket))
            self._note_flush()  # before the row is dropped
        else:
            self.refused += 1
        self._memory.drop(Lacks.ATTRIBUTES, ino)
        return True

    # ---- the pass ----

    def begin_flush(self, drive: DriveNo = FIRST_DRIVE) -> None:
        """Note that a flush of *drive* begins, which makes all changes durable that it was told."""
        there = self._drives.all[drive]
        there.flushing, there.written = there.joined(), _Flushed()

    def end_flush(self, drive: DriveNo = FIRST_DRIVE, *, failed: bool = False) -> None:
        """Note that the flush has ended; after a *failed* one its changes wait for the next."""
        there = self._drives.all[drive]
        if failed:
            there.written = there.joined()
        there.flushing = _Flushed()
        self._note_flush()

    def give_up(self, drive: DriveNo) -> None:
        """Wait no more for what *drive* was told, because it has failed."""
        self._drives.all[drive].is_lost = True
        self._note_flush()

    def _note_flush(self) -> None:
        """Note, for the next server, since when changes wait for a flush."""
        parts = functools.reduce(_Flushed.joined, (one.joined() for one in self._drives.all))
        self._memory.await_flush(parts.since_s if parts.changes else None)

    def written_since_s(self, drive: DriveNo = FIRST_DRIVE) -> float | None:
        """Return since when the oldest change that *drive* was told waits; None: none does."""
        written = self._drives.all[drive].written
        return written.since_s if written.changes else None

    def oldest_since_s(self) -> float | None:
        """Return since when the oldest change waits; None: none does."""
        waiting = (one.joined() for one in self._drives.all)
        parts = [part.since_s for part in waiting if part.changes]
        parts += [change.since_s for change in self._changed.values()]
        return min(parts, default=None)

    def undone(self, ticket: int) -> int:
        """Return how many changes up to *ticket* are not durable."""
        changed = sum(change.ticket <= ticket for change in self._changed.values())
        parts = [part for one in self._drives.all for part in one.parts()]
        return changed + sum(
            part.changes for part in parts if part.changes and part.ticket <= ticket
        )


def is_quick(attributes: AttributeRecord) -> bool:
    """Whether *attributes* can be written without waiting for the device."""
    size_bytes = sum(len(name) + len(value) for name, value in attributes.attributes.items())
    return size_bytes <= _QUICK_BYTES
