"""Open handles in one shared-memory table, so that a successor of this process finds them.

A row is 48 bytes: u64 inode, u32 open flags, i32 backing id, u32 generation, u32 kind, u64 data
path, u64 thread id and 8 bytes left free. A handle number is generation << 32 | slot + 1: a
number that was closed is never valid again. Row first, reply after: the kernel must never know a
handle that the table does not.
"""

import mmap
import os
import struct
from enum import IntEnum
from typing import Final

from kvfs.errors import BadHandle
from kvfs.open_inodes import OpenInode
from kvfs.types import BackingId, HandleNo, InodeNo

_ROW: Final = struct.Struct("<QIiIIQQ8x")
_ROW_BYTES: Final = 48
assert _ROW.size == _ROW_BYTES
_NO_ID: Final = BackingId(0)
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
    """One open handle; ``opened`` is the inode it keeps open."""

    __slots__ = ("backing_id", "fh", "flags", "kind", "opened", "slot")

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


class Handles:
    """The table: rows in shared memory, and this process's view of them."""

    def __init__(self, fd: int) -> None:
        """Use the file *fd* (a memfd, or a file on tmpfs), which is grown as needed."""
        self._fd = fd
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
        return len(self._open)

    def open(
        self, kind: HandleKind, flags: int, opened: OpenInode, backing_id: BackingId = _NO_ID
    ) -> Handle:
        """Record a new handle and return it."""
        if not self._free:
            self._grow()
        slot = self._free.pop()
        self._generation = generation = (self._generation + 1) & 0x7FFFFFFF
        fh = HandleNo(generation << 32 | (slot + 1))
        handle = Handle(slot, fh, kind, flags, opened, backing_id)
        row = (opened.ino, flags & _U32_MASK, backing_id, generation, kind, 0, 0)
        _ROW.pack_into(self._memory, slot * _ROW_BYTES, *row)
        self._open[fh] = handle
        return handle

    def get(self, fh: int) -> Handle:
        """Return the open handle *fh*. Raises BadHandle."""
        try:
            return self._open[fh]
        except KeyError:
            raise BadHandle(f"handle {fh:#x}") from None

    def close(self, fh: int) -> Handle:
        """Forget handle *fh* and return what it was. Raises BadHandle."""
        try:
            handle = self._open.pop(fh)
        except KeyError:
            raise BadHandle(f"handle {fh:#x}") from None
        _ROW.pack_into(self._memory, handle.slot * _ROW_BYTES, 0, 0, 0, 0, 0, 0, 0)
        self._free.append(handle.slot)
        return handle

    def inodes(self) -> set[InodeNo]:
        """Return the inodes that have an open handle."""
        return {handle.opened.ino for handle in self._open.values()}
