"""What the device does not have yet, in shared memory: which inode, since when, how many bytes.

Like the journal (journal.py) it lies in a memfd that the supervisor holds, too. So another server
that takes the mount over knows what its predecessor still owed to those who wait for a device, and
goes on with the age of each. A row has a slot for as long as it counts. The process may be killed
between any two stores to memory: the last store of a row is its key, and a slot without one is
free.

What is not here need not be durable: the table may have been full, or a server may have come
between that does not know it. The first is told by a word in the header, the second by a stamp:
each server leaves one at its start (``stamp``).
"""

import mmap
import os
import struct
from enum import IntEnum
from typing import Final, NamedTuple

from kvfs.core.types import PAGE_BYTES, InodeNo, round_up
from kvfs.storage.shared_table import WORD, begin_table, require_table

#: Raised when the layout changes.
UNDURABLE_VERSION: Final = 1
_MAGIC: Final = b"KVFSUNDU"
#: Words of the header: what its server left (``stamp``), whether rows are missing, up to where
#: slots were ever used, and since when attributes wait that are written and not flushed (seconds).
_STAMP_OFFSET, _GAP_OFFSET, _USED_OFFSET, _FLUSH_OFFSET = 16, 24, 32, 40
_SECONDS: Final = struct.Struct("@d")
#: Since when (CLOCK_MONOTONIC, seconds), size in bytes, key; the key is stored last.
_ROW: Final = struct.Struct("@dQQ")
_KEY_OFFSET: Final = 16
#: An inode number leaves two bits of a word: it is one of a count, from random places below 2**41.
_KIND_BITS: Final = 2
_KIND_MASK: Final = (1 << _KIND_BITS) - 1
_KEY_MAX: Final = (1 << 64) - 1


class Lacks(IntEnum):
    """What the device lacks of an inode; never 0, so that no key is."""

    #: The bytes of a published block.
    BYTES = 1
    #: Its identity under the present name, or the removal of one: that is queued.
    IDENTITY = 2
    #: The record of its user xattrs.
    ATTRIBUTES = 3


class Row(NamedTuple):
    """One row: *since_s* by CLOCK_MONOTONIC, *size_bytes* of a block."""

    since_s: float
    size_bytes: int
    lacks: Lacks
    ino: InodeNo


class UndurableTable:
    """The table in one memfd; one process at a time writes it, on one thread."""

    def __init__(self, fd: int, rows_max: int) -> None:
        """Use *fd* and what it holds, with room for *rows_max* at least; an empty one is made.

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
        """Let go of the memory, which the supervisor may hold on to."""
        self._memory.close()

    def _word(self, offset: int) -> int:
        return int(WORD.unpack_from(self._memory, offset)[0])

    # ---- rows ----

    def rows(self) -> list[Row]:
        """Return all rows, the oldest first."""
        found = []
        for at in self._slots.values():
            since_s, size_bytes, key = _ROW.unpack_from(self._memory, at)
            found.append(
                Row(since_s, size_bytes, Lacks(key & _KIND_MASK), InodeNo(key >> _KIND_BITS))
            )
        return sorted(found)

    def put(self, lacks: Lacks, ino: InodeNo, since_s: float, size_bytes: int = 0) -> None:
        """Keep a row, in place of the one that says the same of *ino*; a full table says so."""
        key = ino << _KIND_BITS | lacks
        at = self._slots.get(key)
        if at is None:
            if key > _KEY_MAX:  # a damaged INODES gave a number that none should have
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
        """Drop a row, if there is one: the device has it now, or nobody wants it."""
        at = self._slots.pop(ino << _KIND_BITS | lacks, None)
        if at is not None:
            WORD.pack_into(self._memory, at + _KEY_OFFSET, 0)
            self._free.append(at)

    # ---- what the header says ----

    @property
    def stamp(self) -> int:
        """What the last server left that knew this table; 0: none did."""
        return self._word(_STAMP_OFFSET)

    def put_stamp(self, stamp: int) -> None:
        """Leave *stamp*: from now on this server keeps the table."""
        WORD.pack_into(self._memory, _STAMP_OFFSET, stamp)

    @property
    def is_lacking(self) -> bool:
        """Whether something may be not durable that has no row."""
        return self._word(_GAP_OFFSET) != 0

    def lacks_rows(self, *, lacking: bool) -> None:
        """Note whether that is so."""
        WORD.pack_into(self._memory, _GAP_OFFSET, lacking)

    @property
    def flush_since_s(self) -> float | None:
        """Since when the oldest attributes wait for a flush that are written; None: none do."""
        since_s = float(_SECONDS.unpack_from(self._memory, _FLUSH_OFFSET)[0])
        return since_s or None

    def await_flush(self, since_s: float | None) -> None:
        """Note since when they wait."""
        _SECONDS.pack_into(self._memory, _FLUSH_OFFSET, since_s or 0.0)
