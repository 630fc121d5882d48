"""The open inodes: for each its extent's descriptor, its readers and its writers.

An inode is here from its first handle to its last, and there is one entry for it at a time. A
removed inode lives on here (``gone``) until then, because a handle must go on reading its bytes
and attributes.
"""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Final, NamedTuple

from kvfs.core.types import NO_BACKING_ID, NO_INODE, InodeNo, InodeRecord
from kvfs.core.writing import Writing
from kvfs.machine.processes import NOBODY, Maker

#: Of one inode at a time; the first ones go.
_HANDS_MAX: Final = 64


class Hand(NamedTuple):
    """Who opened a block for writing: a process, and its thread."""

    maker: Maker
    thread: int


class OpenInode(Writing):
    """One open inode. ``fd`` is its extent, -1 for a directory or while nobody needed it."""

    # Defaults of the class: who opens a block to read it sets two of them, not two dozen.
    fd = -1
    readers = 0
    writers = 0
    #: Blocks without a hole from offset 0 on; -1 while all of them lie so (holes.py).
    front_bytes = -1
    #: Else no block lies behind this.
    reach_bytes = 0
    #: Allocations under way, whose room is pledged: nobody measures it meanwhile.
    allocating = 0
    #: What it holds beyond the usual size of its directory, so as not to outgrow its reserve.
    spare_bytes = 0
    #: What is kept free in case that it does, for it and all others that may.
    outgrowing_bytes = 0
    #: Whether it may well outgrow its reserve.
    unreserved = False
    #: Whether the data path must let each write ask for room first, from first handle to last.
    through_daemon = False
    #: Bytes that it took beyond its reserve between the last two looks.
    outgrown = 0
    #: And altogether.
    taken_unasked = 0
    #: The directory a draft was created in, whose demand it tells; 0 for the rest.
    created_in = NO_INODE
    #: The backing id that came with a fresh extent; the data path takes it over.
    fresh_id = NO_BACKING_ID
    #: A writer's descriptor was closed since the last writer came: a close that was heard of.
    flushed = False
    #: Size and mtime (ns) of the extent when a writer's descriptor was closed last.
    flushed_as = (-1, 0)
    #: The process that writes.
    maker: Maker = NOBODY
    #: Who opened it for writing since it had no writer.
    hands: tuple[Hand, ...] = ()
    #: Its writers that only append (O_APPEND).
    appenders = 0
    #: Of readers and writers, those that are file servers (file_servers.py).
    served_readers = 0
    served_writers = 0
    #: One of ``served_writers`` is no handle: it keeps open what a server emptied (emptying.py).
    kept_open = False
    #: Of ``served_readers``, those that may write: they wrote nothing for long (served.py).
    quiet_writers = 0
    #: Size and mtime (ns) of the extent when the last of them was counted so.
    left_as = (-1, 0)
    #: The last record of an inode that has no name any more.
    gone: InodeRecord | None = None
    #: And its extended attributes then.
    attributes: Mapping[bytes, bytes] = MappingProxyType({})
    #: The identity of what is now rewritten was removed, but the device may have it still.
    identity_lingers = False
    #: The draft that took its name, and for which it is shown until that is whole; 0: none.
    stands_in = NO_INODE

    def __init__(self, ino: InodeNo, allocated_bytes: int = 0) -> None:
        self.ino = ino
        #: What the extent held when last looked at; the index learns it at the last close.
        self.allocated_bytes = allocated_bytes

    def note_hand(self, hand: Hand, *, appends: bool) -> None:
        """*hand* opened it for writing, the first or one more."""
        if self.writers == 1:
            self.hands, self.appenders = (hand,), int(appends)
            return
        self.appenders += appends
        if hand not in self.hands:
            self.hands = (*self.hands[1 - _HANDS_MAX :], hand)

    def is_shared_with(self, maker: Maker, thread: int, *, temporary: bool) -> bool:
        """Whether who empties it by its name means the bytes that are being written, as on XFS.

        Its writer does, and whoever empties what is only appended to. Under a *temporary* name
        only the writing thread: two others that store one block at a time each rename their own.
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
        """Whether nobody has it open but file servers, of which none is writing."""
        return not self.writers and 0 < self.readers == self.served_readers

    @property
    def runs_free(self) -> bool:
        """Whether its writers may take any amount until somebody looks."""
        return self.unreserved and not self.through_daemon


class OpenInodes(dict[InodeNo, OpenInode]):
    """All open inodes by number."""

    def __init__(self) -> None:
        super().__init__()
        #: Those that have a writer.
        self.written: dict[InodeNo, OpenInode] = {}
        #: Of them, those that were let take any amount (``runs_free``; some may ask since).
        self.runners: dict[InodeNo, OpenInode] = {}
        #: What all of them hold to spare.
        self.spare_bytes = 0
        #: Not open: whole blocks, kept with what the data path has for them; longest unused first.
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

        False if it is neither any more, or if somebody writes.
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
        """Let the writers of *opened* take any amount until somebody looks."""
        opened.unreserved, opened.through_daemon = True, False
        self.runners[opened.ino] = opened

    def spare(self, opened: OpenInode, size_bytes: int) -> None:
        """Count *size_bytes* as what *opened* holds to spare."""
        self.spare_bytes += size_bytes - opened.spare_bytes
        opened.spare_bytes = size_bytes

    def leave(self, opened: OpenInode, *, writer: bool) -> bool:
        """Count one handle less; True when it was the last, and the inode left the table."""
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
