"""Inodes whose last handle is closed, and those that lost their name a moment ago.

The last close closes the extent. An inode without a name is erased then: its files, and the rows
that tell of them.

But another client may replace a name between a LOOKUP and its OPEN. A local file system then opens
the old file. On kvfs the OPEN would find a dead inode, and the kernel retries only once. So a
removed inode keeps its record and its extent for a moment. Time, number and bytes are bounded.
"""

import stat
from collections import OrderedDict
from collections.abc import Callable
from typing import Final, NamedTuple

from kvfs.core.changed import Changed, Why
from kvfs.core.errors import DeadInode
from kvfs.core.inode_rules import block_of
from kvfs.core.lifecycle import SETTLED, UNFINISHED, State
from kvfs.core.types import SECOND_NS, InodeNo, InodeRecord
from kvfs.pool.durable.identities import Identities
from kvfs.pool.open.open_inodes import OpenInode, OpenInodes
from kvfs.pool.open.open_notes import OpenNotes
from kvfs.pool.open.ports import Kernel
from kvfs.pool.space.space import Space, SpaceFigures
from kvfs.storage.extents_at_hand import ExtentsAtHand
from kvfs.storage.index import Index

#: A LOOKUP and its OPEN are microseconds apart, or perhaps 100 ms if CPU is short.
REMOVED_KEPT_S: Final = 1.0
#: Most inodes that are kept; if there are more, the oldest are erased.
REMOVED_MAX: Final = 4096
#: The share of the capacity that removed blocks may keep.
_SHARE: Final = 1 / 64


class _Removed(NamedTuple):
    record: InodeRecord
    due_s: float


class RecentlyRemoved:
    """Recently removed inodes, oldest first; their bytes count as used until they are erased."""

    def __init__(
        self,
        space_of: Callable[[InodeNo], Space],
        taken: SpaceFigures,
        erase: Callable[[InodeNo, InodeRecord], None],
    ) -> None:
        """*space_of* returns the space of an inode's drive; *taken* is that of the pool."""
        self._space_of = space_of
        self._taken = taken
        self._erase = erase
        self._removed: OrderedDict[InodeNo, _Removed] = OrderedDict()

    def __len__(self) -> int:
        return len(self._removed)

    def __contains__(self, ino: InodeNo) -> bool:
        return ino in self._removed

    def keep(self, ino: InodeNo, record: InodeRecord, now_s: float) -> None:
        """Keep *ino* with *record*. The caller has added its bytes to ``Space.extra_bytes``."""
        self._removed[ino] = _Removed(record, now_s + REMOVED_KEPT_S)
        self._space_of(ino).removed_bytes += record.allocated_bytes
        bound_bytes = self._taken.capacity_bytes * _SHARE
        while self._removed and (
            len(self._removed) > REMOVED_MAX or self._taken.removed_bytes > bound_bytes
        ):
            self._erase_oldest()

    @property
    def held_bytes(self) -> int:
        """Bytes that are freed as soon as they are needed."""
        return self._taken.removed_bytes

    def record(self, ino: InodeNo) -> InodeRecord | None:
        """Return the record of *ino* if it was removed a moment ago."""
        removed = self._removed.get(ino)
        return None if removed is None else removed.record

    def take_back(self, ino: InodeNo) -> InodeRecord | None:
        """Return the record of *ino*, and stop keeping it: it is open now. None if not kept."""
        removed = self._removed.pop(ino, None)
        if removed is None:
            return None
        self._space_of(ino).removed_bytes -= removed.record.allocated_bytes
        return removed.record

    def run_due(self, now_s: float) -> None:
        """Erase inodes whose time is over."""
        while self._removed and next(iter(self._removed.values())).due_s <= now_s:
            self._erase_oldest()

    def give_way(self, space: Space | None = None) -> None:
        """Erase all of the drive with *space*, which is needed; or all, as the pool stops, say."""
        for ino in list(self._removed):
            if space is None or self._space_of(ino) is space:
                self._erase_one(ino)

    def _erase_oldest(self) -> None:
        self._erase_one(next(iter(self._removed)))

    def _erase_one(self, ino: InodeNo) -> None:
        removed = self._removed.pop(ino)
        space = self._space_of(ino)
        space.removed_bytes -= removed.record.allocated_bytes
        space.extra_bytes -= removed.record.allocated_bytes
        self._erase(ino, removed.record)


class Departures:
    """Counts handles that are closed, and carries out what the last close means."""

    follows: Final = frozenset({Why.LINKED})

    def __init__(
        self,
        index: Index,
        space_of: Callable[[InodeNo], Space],
        taken: SpaceFigures,
        inodes: OpenInodes,
        notes: OpenNotes,
        unfinished: set[InodeNo],
        identities: Identities,
        kernel: Kernel,
        at_hand: ExtentsAtHand,
        clock_ns: Callable[[], int],
        monotonic_s: Callable[[], float],
    ) -> None:
        """*unfinished* is the pool's set of drafts and rewritten blocks.

        *space_of* returns the space of an inode's drive; *taken* is that of the pool.
        """
        self._index = index
        self._space_of = space_of
        self._inodes = inodes
        self._notes = notes
        self._unfinished = unfinished
        self._identities = identities
        self._kernel = kernel
        self._at_hand = at_hand
        self._clock_ns = clock_ns
        self._monotonic_s = monotonic_s
        self.removed: Final = RecentlyRemoved(space_of, taken, self._erase)

    def follow(self, changed: Changed) -> None:
        """Have the kernel forget a second name that went without a call, or leads elsewhere now.

        And how many names its block has.
        """
        alias = changed.before
        if alias is not None and alias.state == State.ALIAS:
            self._kernel.name_vanished(alias.parent, alias.name)
            self._kernel.inode_vanished(block_of(alias), alias.parent)

    def open_removed(self, ino: InodeNo) -> tuple[OpenInode, InodeRecord]:
        """Count a reader of *ino*, a block that a LOOKUP found just before its name was removed.

        Return it with its last record. Raises DeadInode.
        """
        record = self.removed.take_back(ino)
        if record is None or not stat.S_ISREG(record.mode):
            raise DeadInode(f"inode {ino}")
        opened = self._inodes.enter(ino, writer=False)
        opened.lose_name(record)
        opened.hold(record.allocated_bytes)
        return opened, record

    def leave(self, opened: OpenInode, *, writer: bool) -> None:
        """Count one handle less. The last closes the extent, and unlinks it if it has no name."""
        last = self._inodes.leave(opened, writer=writer)
        if not opened.writers:
            self._notes.written(opened)
        if not last:
            return
        if opened.ino in self._unfinished and not self._is_draft(opened):
            self._unfinished.discard(opened.ino)  # the next change writes it to the index
        self._kernel.freed(opened)
        opened.close_extent(self._at_hand)
        if opened.gone is not None and not opened.revoked:
            self._erase_or_keep(opened, opened.gone)

    def revoke(self, opened: OpenInode, record: InodeRecord) -> None:
        """Give back the bytes of *opened*, which is revocable and has lost its name. Atomic.

        Its handles stay until the file servers close them.
        """
        opened.lose_name(record)
        opened.revoke()
        opened.hold(0)
        opened.close_extent(self._at_hand)
        self._kernel.freed(opened)
        self._erase(opened.ino, record)

    def _erase(self, ino: InodeNo, record: InodeRecord) -> None:
        """Remove the files of *ino*, which has no name and will not be opened any more."""
        self._notes.end(ino)
        self._identities.erase(ino, record)

    def _is_draft(self, opened: OpenInode) -> bool:
        """Whether *opened* is a draft whose writer is still to open it (truncating_open.py)."""
        record = None if opened.gone is not None else self._index.inode_or_miss(opened.ino)
        return record is not None and record.state in UNFINISHED

    def _erase_or_keep(self, opened: OpenInode, record: InodeRecord) -> None:
        """Erase an inode that is no longer open, or keep it for a moment if it just lost its name.

        The OPEN of an earlier LOOKUP may still come; after two dead inodes open(2) fails (ESTALE).
        """
        age_s = (self._clock_ns() - record.ctime_ns) / SECOND_NS
        if record.state in SETTLED and not opened.torn and 0 <= age_s < REMOVED_KEPT_S:
            record = record._replace(allocated_bytes=opened.allocated_bytes)
            self.removed.keep(opened.ino, record, self._monotonic_s())
            return
        self._space_of(opened.ino).extra_bytes -= opened.allocated_bytes
        record = record._replace(allocated_bytes=opened.allocated_bytes)
        self._erase(opened.ino, record)
