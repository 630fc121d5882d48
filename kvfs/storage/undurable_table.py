"""What the device does not have yet, in shared memory: which inode, since when, how many bytes.

Like the journal (journal.py) it is in a memfd that the supervisor holds open, too. So a server that
takes over the mount knows what its predecessor had still to make durable, and since when it waits.
Each row keeps its slot until it is dropped. The process may be killed between any two stores to
memory: the last store of a row is its key, and a slot without a key is free.

A missing row does not prove that something is durable. The table may have been full, which a word
in the header says. Or a server that does not know the table may have run in between, which a stamp
shows: each server writes one at its start (``stamp``).
"""

import mmap
import os
import struct
from enum import IntEnum
from typing import Final, NamedTuple

from kvfs.core.types import PAGE_BYTES, InodeNo, round_up
from kvfs.storage.shared_table import WORD, begin_table, require_table

#: Incremented when the layout changes.
UNDURABLE_VERSION: Final = 1
_MAGIC: Final = b"KVFSUNDU"
#: Words of the header: the server's ``stamp``; whether rows are missing; the end of the slots that
#: were ever used; since when written attributes wait for a flush (seconds).
_STAMP_OFFSET, _GAP_OFFSET, _USED_OFFSET, _FLUSH_OFFSET = 16, 24, 32, 40
_SECONDS: Final = struct.Struct("@d")
#: Since when (CLOCK_MONOTONIC, seconds), size in bytes, key; the key is stored last.
_ROW: Final = struct.Struct("@dQQ")
_KEY_OFFSET: Final = 16
#: An inode number leaves two bits of a word free: numbers count up, after random jumps below 2**41.
_KIND_BITS: Final = 2
_KIND_MASK: Final = (1 << _KIND_BITS) - 1
_KEY_MAX: Final = (1 << 64) - 1


class Lacks(IntEnum):
    """What the device lacks of an inode; never 0, so that no key is 0."""

    #: The bytes of a published block.
    BYTES = 1
    #: Its identity under the present name, or the removal of one, which is queued.
    IDENTITY = 2
    #: The record of its user xattrs.
    ATTRIBUTES = 3


class UndurableRow(NamedTuple):
    """One row: waiting since *since_s* (CLOCK_MONOTONIC); *size_bytes* of a block."""

    since_s: float
    size_bytes: int
    lacks: Lacks
    ino: InodeNo


class UndurableTable:
    """The table in one memfd; one process at a time writes it, on one thread."""

    def __init__(self, fd: int, rows_max: int) -> None:
        """Use the table in *fd*, with room for at least *rows_max*; initialised if it is empty.

        Raises FormatUnknown, OSError.
        """
        found_bytes = os.fstat(fd).st_size
        size_bytes = max(found_bytes, round_up(PAGE_BYTES + rows_max * _ROW.size))
        if size_bytes > found_bytes:
            os.ftruncate(fd, size_bytes)  # zeros: free slots, which take no memory
        self._memory = memory = mmap.mmap(fd, size_bytes)
        if not found_bytes:
            begin_table(memory, _MAGIC, UNDURABLE_VERSION)
        require_table(memory, _MAGIC, UNDURABLE_VERSION, "table of what is not durable")
        self._end = size_bytes - (size_bytes - PAGE_BYTES) % _ROW.size
        self._slots: dict[int, int] = {}
        self._free: list[int] = []
        self._used = max(PAGE_BYTES, self._word(_USED_OFFSET))
        for at in range(PAGE_BYTES, self._used, _ROW.size):
            (key,) = WORD.unpack_from(memory, at + _KEY_OFFSET)
            if key:
                self._slots[key] = at
            else:
                self._free.append(at)

    def close(self) -> None:
        """Unmap the memory; the supervisor may keep it alive."""
        self._memory.close()

    def _word(self, offset: int) -> int:
        return int(WORD.unpack_from(self._memory, offset)[0])

    # ---- rows ----

    def rows(self) -> list[UndurableRow]:
        """Return all rows, the oldest first."""
        found = []
        for at in self._slots.values():
            since_s, size_bytes, key = _ROW.unpack_from(self._memory, at)
            found.append(
                UndurableRow(
                    since_s, size_bytes, Lacks(key & _KIND_MASK), InodeNo(key >> _KIND_BITS)
                )
            )
        return sorted(found)

    def put(self, lacks: Lacks, ino: InodeNo, since_s: float, size_bytes: int = 0) -> None:
        """Add or replace the row that *ino* lacks *lacks*; a full table sets ``is_lacking``."""
        key = ino << _KIND_BITS | lacks
        at = self._slots.get(key)
        if at is None:
            if key > _KEY_MAX:  # an impossible number, from a damaged INODES
                self.lacks_rows(lacking=True)
                return
            if self._free:
                at = self._free.pop()
            elif self._used + _ROW.size <= self._end:
                at = self._used
                self._used += _ROW.size
                WORD.pack_into(self._memory, _USED_OFFSET, self._used)
            else:
                self.lacks_rows(lacking=True)
                return
            self._slots[key] = at
        _ROW.pack_into(self._memory, at, since_s, size_bytes, key)

    def drop(self, lacks: Lacks, ino: InodeNo) -> None:
        """Drop a row, if there is one: the device has it now, or it is not needed any more."""
        at = self._slots.pop(ino << _KIND_BITS | lacks, None)
        if at is not None:
            WORD.pack_into(self._memory, at + _KEY_OFFSET, 0)
            self._free.append(at)

    # ---- what the header says ----

    @property
    def stamp(self) -> int:
        """The stamp of the last server that kept this table; 0: there was none."""
        return self._word(_STAMP_OFFSET)

    def put_stamp(self, stamp: int) -> None:
        """Write *stamp*: from now on this server keeps the table."""
        WORD.pack_into(self._memory, _STAMP_OFFSET, stamp)

    @property
    def is_lacking(self) -> bool:
        """Whether something without a row may not be durable."""
        return self._word(_GAP_OFFSET) != 0

    def lacks_rows(self, *, lacking: bool) -> None:
        """Set ``is_lacking``."""
        WORD.pack_into(self._memory, _GAP_OFFSET, lacking)

    @property
    def flush_since_s(self) -> float | None:
        """Since when (monotonic) the oldest written attributes wait for a flush; None: none do."""
        since_s = float(_SECONDS.unpack_from(self._memory, _FLUSH_OFFSET)[0])
        return since_s or None

    def await_flush(self, since_s: float | None) -> None:
        """Set ``flush_since_s``."""
        _SECONDS.pack_into(self._memory, _FLUSH_OFFSET, since_s or 0.0)
