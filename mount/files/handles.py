"""Open handles in one shared-memory table, so that a successor of this process finds them.

A row is 48 bytes: u64 inode, u32 open flags, i32 backing id, u32 generation, u32 kind, u64 data
path, u64 thread id, u32 opens that share it and 4 bytes left free. A handle number is generation
<< 32 | slot + 1: a number that was closed is never valid again. One that is kept for the next
reader (shared_handles.py) has no opens meanwhile, and nobody has it. Row first, reply after: the
kernel must never know a handle that the table does not.
"""

import mmap
import os
import struct
from enum import IntEnum
from typing import TYPE_CHECKING, Final

from kvfs.core.errors import BadHandle
from kvfs.core.types import NO_BACKING_ID, BackingId, HandleNo, InodeNo
from kvfs.pool.open_inodes import OpenInode
from mount.files.open_shares import OpenShares

if TYPE_CHECKING:
    from kvfs.engine.blocks.doubts import Closing

_ROW: Final = struct.Struct("<QIiIIQQI4x")
_ROW_BYTES: Final = 48
assert _ROW.size == _ROW_BYTES
#: Of a row.
_OPENS: Final = struct.Struct("<I")
_OPENS_OFFSET: Final = 40
_GROW_ROWS: Final = 4096
#: libfuse hands open flags on as a signed int.
_U32_MASK: Final = (1 << 32) - 1


class HandleKind(IntEnum):
    """What a handle is for; FREE marks an unused row."""

    FREE = 0
    READER = 1
    WRITER = 2
    DIRECTORY = 3


class Handle:
    """One handle; ``opened`` is the inode it keeps open, ``opens`` how many share it."""

    __slots__ = (
        "backing_id",
        "closing",
        "fh",
        "flags",
        "flushed",
        "kind",
        "opened",
        "opens",
        "served",
        "slot",
        "tid",
        "uid",
    )

    def __init__(
        self,
        slot: int,
        fh: HandleNo,
        kind: HandleKind,
        flags: int,
        opened: OpenInode,
        backing_id: BackingId,
    ) -> None:
        self.slot = slot
        self.fh = fh
        self.kind = kind
        self.flags = flags
        self.opened = opened
        self.backing_id = backing_id
        self.opens = 1
        #: Of a writer: the thread that opened it, whether it was closed, and by whom last.
        self.tid = 0
        self.flushed = False
        self.closing: Closing | None = None
        #: Whether a file server has it, which may keep it for ever.
        self.served = False
        #: Whose share it is charged to, -1: nobody's (open_shares.py).
        self.uid = -1


class Handles:
    """The table: rows in shared memory, and this process's view of them."""

    def __init__(self, fd: int, shares: OpenShares | None = None) -> None:
        """Use the file *fd* (a memfd, or a file on tmpfs), which is grown as needed.

        *shares* hears of the end of each handle that it counted.
        """
        self._fd = fd
        self.shares = OpenShares(1.0) if shares is None else shares
        self._generation = 0
        self._rows = 0
        self._free: list[int] = []
        self._open: dict[int, Handle] = {}
        self._grow()

    def _grow(self) -> None:
        rows = self._rows + _GROW_ROWS
        os.ftruncate(self._fd, rows * _ROW_BYTES)
        self._memory = mmap.mmap(self._fd, rows * _ROW_BYTES)
        self._free.extend(range(rows - 1, self._rows - 1, -1))
        self._rows = rows

    def __len__(self) -> int:
        """Return how many opens there are: two that share a handle are two."""
        return sum(handle.opens for handle in self._open.values())

    def open(
        self, kind: HandleKind, flags: int, opened: OpenInode, backing_id: BackingId = NO_BACKING_ID
    ) -> Handle:
        """Record a new handle and return it."""
        if not self._free:
            self._grow()
        slot = self._free.pop()
        self._generation = generation = (self._generation + 1) & 0x7FFFFFFF
        fh = HandleNo(generation << 32 | (slot + 1))
        handle = Handle(slot, fh, kind, flags, opened, backing_id)
        row = (opened.ino, flags & _U32_MASK, backing_id, generation, kind, 0, 0, 1)
        _ROW.pack_into(self._memory, slot * _ROW_BYTES, *row)
        self._open[fh] = handle
        return handle

    def get(self, fh: int) -> Handle:
        """Return the open handle *fh*. Raises BadHandle."""
        handle = self._open.get(fh)
        if handle is None or not handle.opens:
            raise BadHandle(f"handle {fh:#x}")
        return handle

    def share(self, handle: Handle) -> None:
        """Count one more open of *handle*, which may have none."""
        handle.opens += 1
        _OPENS.pack_into(self._memory, handle.slot * _ROW_BYTES + _OPENS_OFFSET, handle.opens)

    def leave(self, handle: Handle) -> None:
        """Count one open of *handle* less; without any it is kept for ``share``, or ``forget``."""
        handle.opens -= 1
        _OPENS.pack_into(self._memory, handle.slot * _ROW_BYTES + _OPENS_OFFSET, handle.opens)

    def forget(self, handle: Handle) -> None:
        """Give the number of *handle* up, which has no opens."""
        del self._open[handle.fh]
        if handle.uid >= 0:
            self.shares.give_back(handle.uid)
        _ROW.pack_into(self._memory, handle.slot * _ROW_BYTES, 0, 0, 0, 0, 0, 0, 0, 0)
        self._free.append(handle.slot)

    def close(self, fh: int) -> Handle:
        """Count one open of handle *fh* less, and forget it with the last. Raises BadHandle."""
        handle = self.get(fh)
        self.leave(handle)
        if not handle.opens:
            self.forget(handle)
        return handle

    def inodes(self) -> set[InodeNo]:
        """Return the inodes that have an open handle."""
        return {handle.opened.ino for handle in self._open.values() if handle.opens}
