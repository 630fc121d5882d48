"""Fresh inodes that wait for their OPEN. The kernel sends it only once: it must find the inode.

``TruncatingOpens`` enters them, and drops those that waited too long.
"""

from collections import OrderedDict
from typing import Final

from kvfs.core.types import InodeNo, InodeRecord
from kvfs.engine.rewrite.versions import DisplacedDrafts
from kvfs.pool.open.open_inodes import OpenInode
from kvfs.pool.open.ready_extents import ReadyExtent
from kvfs.pool.pool_parts import OpenParts
from kvfs.storage.outliving import Notes

_AWAITED_NOTE: Final = b"rewrite/awaited"


#: Inode, reserved bytes, and the thread.
_Row = tuple[InodeNo, int, int]


def noted_awaited(notes: Notes) -> list[_Row]:
    """Return the awaited inodes that the last server noted."""
    rows: list[_Row] = notes.get(_AWAITED_NOTE) or []
    return rows


class AwaitedOpens(OrderedDict[InodeNo, tuple[ReadyExtent, float, int]]):
    """These inodes, oldest first, each with its extent, its deadline (s) and the OPEN's thread."""

    def __init__(self, notes: Notes, open_parts: OpenParts, displaced: DisplacedDrafts) -> None:
        super().__init__()
        self._notes = notes
        self._open = open_parts
        self.displaced = displaced

    def enter(self, extent: ReadyExtent, until_s: float, thread: int) -> None:
        """Await the OPEN of *thread* for the inode of *extent* until *until_s*."""
        self[extent.ino] = (extent, until_s, thread)
        self._write_note()

    def leave(self, ino: InodeNo) -> ReadyExtent:
        """Await *ino* no more; return its extent."""
        extent, _, _ = self.pop(ino)
        self._write_note()
        return extent

    def _write_note(self) -> None:
        """Note all of them, for a server that takes the mount over."""
        rows = [(ino, extent.reserve_bytes, thread) for ino, (extent, _, thread) in self.items()]
        self._notes.put(_AWAITED_NOTE, rows)

    def recall(self) -> list[_Row]:
        """Return what was noted."""
        return noted_awaited(self._notes)

    def promised(self, ino: InodeNo, record: InodeRecord) -> bool:
        """Keep *ino*, which lost its name, if its OPEN is still to come; return whether it is."""
        due = ino in self
        if due and ino not in self.displaced:
            self.displace(ino, record)
        return due

    def displace(self, ino: InodeNo, record: InodeRecord) -> None:
        """Keep *ino*, which loses its name, for its OPEN or its writer's rename."""
        awaited = self.get(ino)
        self.displaced.keep(ino, record, 0 if awaited is None else awaited[2])

    def keep_promise(self, ino: InodeNo) -> None:
        """Note that *ino* was kept, so that its OPEN will find it."""
        promised = self._open.inodes[ino]
        promised.create()
        self.claim(promised)

    def claim(self, opened: OpenInode) -> None:
        """Note that the OPEN of a fresh inode has come."""
        # Its note stays until the next one is written: a server killed before the last step of this
        # OPEN leaves no handle, and the next server awaits it again.
        extent, _, _ = self.pop(opened.ino)
        if opened.fd >= 0:
            self._open.ready.let_go(extent)  # a reader came first and has it open already
        else:
            opened.take_extent(extent.fd, extent.backing_id)
        opened.hold(extent.reserve_bytes)
