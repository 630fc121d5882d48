"""The open inodes: for each its extent, its readers and its writers.

An inode has one row here from its first handle to its last. A removed inode (``gone``) stays
until then, because its handles still read its bytes and attributes. Which handles are file servers'
is decided in engine/blocks/served.py.
"""

from collections.abc import Collection, Mapping
from types import MappingProxyType
from typing import Final, NamedTuple

from kvfs.core.errors import DeadInode
from kvfs.core.types import NO_INODE, InodeNo, InodeRecord
from kvfs.core.writing import Writing
from kvfs.machine.processes import NOBODY, Maker
from kvfs.pool.open.extent_bytes import DraftReserve, ExtentBytes

#: Most hands of one inode; beyond it the oldest are forgotten.
_HANDS_MAX: Final = 64
#: Size in bytes and mtime (ns) of an extent; a write changes one of them at least.
Shown = tuple[int, int]


class ServedHandles:
    """The handles of file servers, a part of an ``OpenInode``. Defaults are class attributes."""

    #: How many of its readers and writers are file servers (file_servers.py).
    served_readers = 0
    served_writers = 0
    #: How many of both are on passthrough, which only the file server can end.
    served_passing = 0
    #: Bytes of the capacity that ``served_passing`` keeps, as last counted.
    passing_bytes = 0
    #: Whether one of ``served_writers`` has no handle: it keeps an emptied file open (served.py).
    kept_open = False
    #: How many of ``served_readers`` could write, but have not for long.
    quiet_writers = 0
    #: What the extent showed when the last of ``quiet_writers`` became one.
    left_as: Shown = (-1, 0)
    #: How often kvfs itself is changing its mtime, which is no late write.
    touches = 0

    def serve(self, *, writer: bool, passing: bool) -> None:
        """One more handle is a file server's."""
        self.served_passing += passing
        if writer:
            self.served_writers += 1
        else:
            self.served_readers += 1

    def stop_passing(self, *, passing: bool) -> None:
        """A file server closes a handle, which was perhaps on passthrough."""
        self.served_passing -= passing

    def stop_serving(self, *, writer: bool) -> bool:
        """A file server closes a handle; return whether it still counts as a *writer*'s."""
        writes = writer and not self.quiet_writers
        if writes:
            self.served_writers -= 1
        else:
            self.served_readers -= 1
            self.quiet_writers -= writer
        return writes

    def count_passing(self, allocated_bytes: int) -> int:
        """Count what passthrough keeps of *allocated_bytes*; return by how much that has grown."""
        now_bytes = allocated_bytes if self.served_passing else 0
        growth_bytes = now_bytes - self.passing_bytes
        self.passing_bytes = now_bytes
        return growth_bytes

    def keep_open(self) -> None:
        """One of its writers is kept for a file server that has no handle."""
        self.kept_open = True

    def quieten(self) -> tuple[int, int]:
        """Its file servers' writers count as readers; return how many, and those with a handle."""
        writers, self.served_writers = self.served_writers, 0
        handles = writers - self.kept_open
        self.kept_open = False
        self.served_readers += handles
        self.quiet_writers += handles
        return writers, handles

    def write_late(self) -> None:
        """One of the quiet ones has written, and is a writer again."""
        self.quiet_writers -= 1
        self.served_readers -= 1
        self.served_writers += 1

    def note_left(self, size_bytes: int, mtime_ns: int) -> None:
        """Note what the extent was like when its writers became quiet."""
        self.left_as = (size_bytes, mtime_ns)

    def begin_touch(self) -> None:
        """Kvfs changes the mtime of the extent; until ``end_touch`` no late write can be told."""
        self.touches += 1

    def end_touch(self, before: Shown | None, after: Shown | None) -> None:
        """The extent showed *before* and then *after*, through kvfs alone; None: nothing."""
        self.touches -= 1
        # If it was left otherwise, a server has written before, which shows still.
        if after is not None and self.left_as == before:
            self.left_as = after


class Hand(NamedTuple):
    """A process, and its thread, that opened a block for writing."""

    maker: Maker
    thread: int


class Hands:
    """The writers, a part of an ``OpenInode``. Defaults are class attributes."""

    writers = 0
    #: The process that writes.
    maker: Maker = NOBODY
    #: All that have opened it for writing since it last had no writer.
    hands: tuple[Hand, ...] = ()
    #: How many of its writers only append (O_APPEND).
    appenders = 0
    #: Whether a writer's descriptor was closed (FLUSH) since the last writer opened it.
    flushed = False
    #: Size and mtime (ns) of the extent when a writer's descriptor was closed last.
    flushed_as = (-1, 0)
    #: Its last writer has closed it, and the rename that follows publishes it, or else a tick.
    awaits_rename = False
    #: It is being rewritten; its identity was removed, but may still be on the device.
    identity_lingers = False

    def belong_to(self, maker: Maker) -> None:
        """*maker* is the process that writes."""
        self.maker = maker

    def note_hand(self, hand: Hand, *, appends: bool) -> None:
        """Note that *hand* opened it for writing."""
        if self.writers == 1:
            self.hands, self.appenders = (hand,), int(appends)
            return
        self.appenders += appends
        self.add_hand(hand)

    def add_hand(self, hand: Hand) -> None:
        """Add *hand* to ``hands``; beyond _HANDS_MAX the oldest is forgotten."""
        if hand not in self.hands:
            self.hands = (*self.hands[1 - _HANDS_MAX :], hand)

    def recall_hand(self, hand: Hand, *, appends: bool) -> None:
        """The last server had it open for *hand*."""
        self.add_hand(hand)
        self.appenders += appends

    def keep_hands(self, tgids: Collection[int]) -> None:
        """Of its hands only those of the processes *tgids* have it open still."""
        self.hands = tuple(hand for hand in self.hands if hand.maker.tgid in tgids)

    def stop_appending(self) -> None:
        """One of the writers that only append closes it."""
        self.appenders -= 1

    def begin_flushes(self) -> None:
        """A writer opens it, who has not closed it yet."""
        self.flushed = False

    def flush(self) -> None:
        """A writer's descriptor was closed."""
        self.flushed = True

    def note_flushed(self, size_bytes: int, mtime_ns: int) -> None:
        """Note what the extent was like when a writer's descriptor was closed."""
        self.flushed_as = (size_bytes, mtime_ns)

    def recall_flush(self, flushed_as: tuple[int, int]) -> None:
        """Before the last server ended, a writer's descriptor was closed."""
        self.flushed = True
        self.flushed_as = max(self.flushed_as, flushed_as, key=lambda at: at[1])

    def await_rename(self) -> None:
        """Its last writer has closed it; what follows publishes it."""
        self.awaits_rename = True

    def await_no_rename(self) -> None:
        """It is published now, or by the next close."""
        self.awaits_rename = False

    def note_identity(self, *, lingers: bool) -> None:
        """Note whether the device may still have an identity of what is being rewritten."""
        self.identity_lingers = lingers

    def is_shared_with(self, maker: Maker, thread: int, *, temporary: bool) -> bool:
        """Whether O_TRUNC by *maker* and *thread* empties the bytes being written, as on XFS.

        It does for a writer of the file, and for anybody if all writers only append. Under a
        *temporary* name it does only for the writing thread: if two threads store the same block,
        each renames its own file.
        """
        if not self.writers:
            return False
        if temporary:
            return thread > 0 and (maker, thread) in self.hands
        if self.appenders == self.writers:
            return True
        return maker.is_one and any(hand.maker == maker for hand in self.hands)


class NameLoss:
    """What became of its name, a part of an ``OpenInode``. Defaults are class attributes."""

    ino: InodeNo
    #: The last record of an inode that has no name any more; None while it has one.
    gone: InodeRecord | None = None
    #: The extended attributes of an inode without a name.
    attributes: Mapping[bytes, bytes] = MappingProxyType({})
    #: Evicted with its bytes while file servers have it open: their requests get ESTALE.
    revoked = False
    #: The draft that took its name: until that is whole this inode is shown instead; or 0.
    stands_in = NO_INODE

    def lose_name(self, record: InodeRecord) -> None:
        """It has no name any more, and *record* is its last; or that has changed."""
        self.gone = record

    def keep_attributes(self, attributes: Mapping[bytes, bytes]) -> None:
        """It keeps *attributes* without a name."""
        self.attributes = attributes

    def regain_name(self) -> None:
        """It has a name again."""
        self.gone = None

    def revoke(self) -> None:
        """Its bytes are taken away, or were lost, while it is open."""
        self.revoked = True

    def stand_in(self, draft: InodeNo) -> None:
        """It is shown instead of *draft*, which took its name; 0: no longer."""
        self.stands_in = draft

    def require_bytes(self) -> None:
        """Raise DeadInode if its bytes were taken away while it is open (departures.py)."""
        if self.revoked:
            raise DeadInode(f"inode {self.ino} was evicted")


class OpenInode(ExtentBytes, DraftReserve, ServedHandles, Hands, NameLoss, Writing):
    """One open inode, made of parts. The fields of a part are set only where the part is defined.

    They are class attributes until they are set: an open for reading sets two fields, not dozens.
    """

    readers = 0

    def __init__(self, ino: InodeNo) -> None:
        self.ino = ino

    @property
    def only_served(self) -> bool:
        """Whether only file servers have it open, and none of them writes."""
        return not self.writers and 0 < self.readers == self.served_readers

    @property
    def only_servers_write(self) -> bool:
        """Whether all its writers are file servers, and it is visible to other programs, too."""
        return self.writers == self.served_writers > 0 and not self.emptied

    @property
    def is_revocable(self) -> bool:
        """Whether its bytes can be taken away although it is open.

        So if only file servers have it open, through this process, and no transfer is under way.
        """
        busy = self.served_passing or self.transfers or self.allocating
        return self.only_served and not busy and self.gone is None and not self.stands_in


class OpenInodes(dict[InodeNo, OpenInode]):
    """All open inodes by number."""

    def __init__(self) -> None:
        super().__init__()
        #: Those that have a writer.
        self.written: dict[InodeNo, OpenInode] = {}
        #: Those of ``written`` that may take any amount (some may not be ``runs_free`` any more).
        self.runners: dict[InodeNo, OpenInode] = {}
        #: The sum of ``spare_bytes``.
        self.spare_bytes = 0
        #: Whole blocks that are not open, kept for the next open, with their descriptors and
        #: backing ids; the least recently used first.
        self.parked: dict[InodeNo, OpenInode] = {}

    def enter(self, ino: InodeNo, *, writer: bool) -> OpenInode:
        """Count one more handle on *ino*."""
        opened = self.get(ino)
        if opened is None:
            opened = self.parked.pop(ino, None)
            if opened is None:
                opened = OpenInode(ino)
            self[ino] = opened
        if writer:
            opened.writers += 1
            self.written[ino] = opened
            if opened.unreserved and opened.runs_free:
                self.runners[ino] = opened
        else:
            opened.readers += 1
        return opened

    def park(self, opened: OpenInode) -> None:
        """Keep *opened*, which its last reader has closed, for the next one (``enter_again``)."""
        opened.readers = 0
        del self[opened.ino]
        self.parked[opened.ino] = opened

    def enter_again(self, opened: OpenInode) -> bool:
        """Count one more reading handle on *opened*, which is open or parked.

        False if it is neither any more, or if it has a writer.
        """
        ino = opened.ino
        if self.parked.get(ino) is opened:
            del self.parked[ino]
            self[ino] = opened
        elif self.get(ino) is not opened or opened.writers:
            return False
        opened.readers += 1
        return True

    def leave_one(self, opened: OpenInode) -> None:
        """Count one reading handle less of *opened*, which has others."""
        opened.readers -= 1

    def add_readers(self, opened: OpenInode, handles: int) -> None:
        """Count *handles* more reading handles, which were writers'; those are still to leave."""
        opened.readers += handles

    def turn_writer(self, opened: OpenInode) -> None:
        """Count one of the readers of *opened* as a writer."""
        opened.readers -= 1
        self.enter(opened.ino, writer=True)

    def let_run(self, opened: OpenInode) -> None:
        """Let the writers of *opened* take any amount until the next check."""
        opened.run_free()
        self.runners[opened.ino] = opened

    def spare(self, opened: OpenInode, size_bytes: int) -> None:
        """Set the ``spare_bytes`` of *opened*."""
        self.spare_bytes += opened.spare(size_bytes)

    def leave(self, opened: OpenInode, *, writer: bool) -> bool:
        """Count one handle less; True if it was the last, so that the inode left the table."""
        if writer:
            opened.writers -= 1
            if not opened.writers:
                self.written.pop(opened.ino, None)
                self.runners.pop(opened.ino, None)
                self.spare(opened, 0)
        else:
            opened.readers -= 1
        assert opened.writers >= 0 <= opened.readers, "a handle was closed twice"
        if opened.writers or opened.readers:
            return False
        del self[opened.ino]
        return True
