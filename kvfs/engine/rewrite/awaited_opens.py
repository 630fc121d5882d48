"""Fresh inodes that wait for their OPEN. The kernel sends it only once, so it must find them.

``TruncatingOpens`` enters them, and drops those that waited too long.
"""

from collections import OrderedDict

from kvfs.core.types import InodeNo, InodeRecord
from kvfs.engine.rewrite.displaced import DisplacedDrafts
from kvfs.pool.open_inodes import OpenInode
from kvfs.pool.pool import Pool
from kvfs.pool.ready_extents import ReadyExtent


class AwaitedOpens(OrderedDict[InodeNo, tuple[ReadyExtent, float, int]]):
    """Each with its extent, its deadline (s), and the thread of the OPEN; oldest first."""

    def __init__(self, pool: Pool, displaced: DisplacedDrafts) -> None:
        super().__init__()
        self._pool = pool
        self.displaced = displaced

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
        promised = self._pool.open_inodes[ino]
        promised.create()
        self.claim(promised)

    def claim(self, opened: OpenInode) -> None:
        """Note that the OPEN of a fresh inode has come."""
        extent, _, _ = self.pop(opened.ino)
        if opened.fd >= 0:
            self._pool.ready.let_go(extent)  # a reader came first and has it open already
        else:
            opened.fd = extent.fd
            opened.fresh_id = extent.backing_id
        opened.allocated_bytes = extent.reserve_bytes
