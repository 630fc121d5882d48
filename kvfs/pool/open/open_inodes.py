"""The open inodes: for each the descriptor of its extent, its readers and its writers.

An inode has one entry here from its first handle to its last. A removed inode (``gone``) stays
until then, because its handles still read its bytes and attributes.
"""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Final, NamedTuple

from kvfs.core.errors import DeadInode
from kvfs.core.types import NO_BACKING_ID, NO_INODE, InodeNo, InodeRecord
from kvfs.core.writing import Writing
from kvfs.machine.processes import NOBODY, Maker

#: Most hands of one inode; beyond it the oldest are forgotten.
_HANDS_MAX: Final = 64


class Hand(NamedTuple):
    """A process, and its thread, that opened a block for writing."""

    maker: Maker
    thread: int


class OpenInode(Writing):
    """One open inode. ``fd`` is its extent; -1 for a directory, or until it is needed."""

    # Defaults as class attributes, so that an open for reading sets two fields, not two dozen.
    fd = -1
    readers = 0
    writers = 0
    #: Bytes from offset 0 on without a hole; -1 while there is no hole (holes.py).
    front_bytes = -1
    #: If ``front_bytes`` is set: there is no block beyond this offset.
    reach_bytes = 0
    #: How many allocations are under way, whose space is pledged; until then it is not measured.
    allocating = 0
    #: Bytes reserved beyond the usual size of its directory, so that it does not outgrow them.
    spare_bytes = 0
    #: Bytes kept free in case it outgrows them, for this draft and all others together.
    outgrowing_bytes = 0
    #: Whether it is likely to outgrow its reserve.
    unreserved = False
    #: Whether each write must ask for space, on the daemon path, from first to last handle.
    through_daemon = False
    #: Bytes that it took beyond its reserve between the last two checks.
    outgrown = 0
    #: All bytes that it took beyond its reserve.
    taken_unasked = 0
    #: The directory in which a draft was created, for the size forecast; 0 for other blocks.
    created_in = NO_INODE
    #: The backing id that came with a fresh extent; the data path takes it over.
    fresh_id = NO_BACKING_ID
    #: Whether a writer's descriptor was closed (FLUSH) since the last writer opened it.
    flushed = False
    #: Size and mtime (ns) of the extent when a writer's descriptor was closed last.
    flushed_as = (-1, 0)
    #: The process that writes.
    maker: Maker = NOBODY
    #: All that have opened it for writing since it last had no writer.
    hands: tuple[Hand, ...] = ()
    #: How many of its writers only append (O_APPEND).
    appenders = 0
    #: How many of its readers and writers are file servers (file_servers.py).
    served_readers = 0
    served_writers = 0
    #: How many of both are on passthrough, which only the file server can end.
    served_passing = 0
    #: Bytes of the capacity that ``served_passing`` keeps, as last counted (served.py).
    passing_bytes = 0
    #: Whether one of ``served_writers`` has no handle: it keeps an emptied file open (served.py).
    kept_open = False
    #: How many of ``served_readers`` could write, but have not for long (served.py).
    quiet_writers = 0
    #: Size and mtime (ns) of the extent when the last of ``quiet_writers`` became one.
    left_as = (-1, 0)
    #: How many reads and writes through ``fd`` are under way in threads.
    transfers = 0
    #: Evicted with its bytes while file servers have it open: their requests get ESTALE.
    revoked = False
    #: The last record of an inode that has no name any more; None while it has one.
    gone: InodeRecord | None = None
    #: The extended attributes of an inode without a name.
    attributes: Mapping[bytes, bytes] = MappingProxyType({})
    #: It is being rewritten; its identity was removed, but may still be on the device.
    identity_lingers = False
    #: Whether there are notes about its writers (open_notes.py).
    noted = False
    #: The draft that took its name: until that is whole this inode is shown instead; or 0.
    stands_in = NO_INODE

    def __init__(self, ino: InodeNo, allocated_bytes: int = 0) -> None:
        self.ino = ino
        #: Allocated bytes when it was last measured. The last close writes them to the index.
        self.allocated_bytes = allocated_bytes

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

    def require_bytes(self) -> None:
        """Raise DeadInode if its bytes were taken away while it is open (``Pool.revoke``)."""
        if self.revoked:
            raise DeadInode(f"inode {self.ino} was evicted")

    @property
    def runs_free(self) -> bool:
        """Whether its writers may take any amount until the next check."""
        return self.unreserved and not self.through_daemon


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
            if opened.runs_free:
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

    def let_run(self, opened: OpenInode) -> None:
        """Let the writers of *opened* take any amount until the next check."""
        opened.unreserved, opened.through_daemon = True, False
        self.runners[opened.ino] = opened

    def spare(self, opened: OpenInode, size_bytes: int) -> None:
        """Set the ``spare_bytes`` of *opened*."""
        self.spare_bytes += size_bytes - opened.spare_bytes
        opened.spare_bytes = size_bytes

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
