"""The shared memory that outlives a server: journal, notes, undurable bytes, evicted names.

Each is in a memfd that the supervisor holds open, too. The notes are short ones by key: what the
next server must know and no file has.

The table says what the device does not have yet: which inode, since when, how many bytes. So a
server that takes over the mount knows what its predecessor had still to make durable, and since
when it waits. Each row keeps its slot until it is dropped. The process may be killed between any
two stores to memory: the last store of a row is its key, and a slot without a key is free.

A missing row does not prove that something is durable. The table may have been full, which a word
in the header says. Or a server that does not know the table may have run in between, which a stamp
shows: each server writes one at its start (``stamp``).
"""

import contextlib
import marshal
import mmap
import os
import struct
from enum import IntEnum
from typing import Any, Final, NamedTuple, Self

from kvfs.core.errors import FormatUnknown
from kvfs.core.evicted import NAMES_MAX, words_of
from kvfs.core.settings import Settings
from kvfs.core.types import PAGE_BYTES, InodeNo, round_up
from kvfs.storage.journal import MARSHAL_VERSION, Journal
from kvfs.storage.shared_table import ALIGNED_BYTES, ENDS, WORD, begin_table, require_table
from kvfs.storage.syscalls import FALLOC_FL_KEEP_SIZE, FALLOC_FL_PUNCH_HOLE, Syscalls

#: Incremented when the layout, or that of any note, changes.
NOTES_VERSION: Final = 1
_NOTES_MAGIC: Final = b"KVFSNOTE"
#: The note of the drives that have failed while the pool was served: why, by number.
FAILED_DRIVES: Final = b"failed drives"
#: Incremented when the layout of the evicted names changes, or what it means.
EVICTED_VERSION: Final = 1
_EVICTED_MAGIC: Final = b"KVFSEVIC"
#: Where the valid part begins.
_LIVE_OFFSET: Final = 16
#: Length of the key, and of the value; -1: the note is dropped.
_NOTE: Final = struct.Struct("=Ii")
_NOTES_MIN_BYTES: Final = 1 << 20
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


class Notes:
    """The notes in one memfd; one process at a time writes them, on one thread.

    Like the journal (journal.py) they are in a memfd that the supervisor holds open, too. Each
    change is appended; when the room is used up, all current notes are written after the old part,
    and one store in the header makes the new part valid. The process may be killed between any two
    stores.
    """

    def __init__(self, fd: int) -> None:
        """Use the notes in *fd*, initialised if it is empty. Raises FormatUnknown."""
        self._fd = fd
        self._kept: dict[bytes, bytes] = {}
        self._at = 0
        found_bytes = os.fstat(fd).st_size
        if not found_bytes:
            os.ftruncate(fd, PAGE_BYTES)
        self._header = mmap.mmap(fd, PAGE_BYTES)
        if not found_bytes:
            self._start = self._end = PAGE_BYTES
            self._write_anew()
            begin_table(self._header, _NOTES_MAGIC, NOTES_VERSION)
            return
        require_table(self._header, _NOTES_MAGIC, NOTES_VERSION, "notes")
        (self._start,) = WORD.unpack_from(self._header, _LIVE_OFFSET)
        self._end = found_bytes
        self._memory = mmap.mmap(fd, found_bytes - self._start, offset=self._start)
        self._read()

    def close(self) -> None:
        """Unmap the memory; the supervisor may keep it alive."""
        self._header.close()
        self._memory.close()

    def get(self, key: bytes) -> Any:  # noqa: ANN401
        """Return the note of *key*, None if there is none."""
        raw = self._kept.get(key)
        return None if raw is None else marshal.loads(raw)

    def below(self, prefix: bytes) -> dict[bytes, Any]:
        """Return the notes whose keys begin with *prefix*, keyed by the rest of the key."""
        return {
            key[len(prefix) :]: marshal.loads(raw)
            for key, raw in self._kept.items()
            if key.startswith(prefix)
        }

    def put(self, key: bytes, value: Any) -> None:  # noqa: ANN401
        """Keep *value* as the note of *key*: anything that ``marshal`` writes."""
        self._kept[key] = raw = marshal.dumps(value, MARSHAL_VERSION)
        self._append(key, raw)

    def drop(self, key: bytes) -> None:
        """Drop the note of *key*, if there is one."""
        if self._kept.pop(key, None) is not None:
            self._append(key, None)

    def _append(self, key: bytes, value: bytes | None) -> None:
        """Append one change; write all notes anew if there is no room."""
        if value is None:
            body = _NOTE.pack(len(key), -1) + key
        else:
            body = _NOTE.pack(len(key), len(value)) + key + value
        body += ENDS[len(body) & 7]
        start = self._at + ALIGNED_BYTES
        end = start + len(body)
        if end > len(self._memory):
            self._write_anew()
            return
        self._memory[start:end] = body
        WORD.pack_into(self._memory, self._at, len(body) - ALIGNED_BYTES)
        self._at = end - ALIGNED_BYTES

    def _write_anew(self) -> None:
        """Write all current notes after the old part, and free that."""
        old_start, old_end = self._start, self._end
        live_bytes = sum(len(key) + len(value) + 24 for key, value in self._kept.items())
        room_bytes = round_up(max(_NOTES_MIN_BYTES, 4 * live_bytes))
        os.ftruncate(self._fd, old_end + room_bytes)
        if old_end > old_start:
            self._memory.close()
        self._memory = mmap.mmap(self._fd, room_bytes, offset=old_end)
        self._at, self._start, self._end = 0, old_end, old_end + room_bytes
        for key, value in self._kept.items():
            self._append(key, value)
        WORD.pack_into(self._header, _LIVE_OFFSET, self._start)
        if old_end > old_start:
            with contextlib.suppress(OSError):  # a failure only wastes memory
                flags = FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE
                Syscalls().fallocate(self._fd, flags, old_start, old_end - old_start)

    def _read(self) -> None:
        memory, at = self._memory, 0
        while at + ALIGNED_BYTES <= len(memory):
            (length_bytes,) = WORD.unpack_from(memory, at)
            if length_bytes < _NOTE.size:
                break
            start = at + ALIGNED_BYTES
            key_bytes, value_bytes = _NOTE.unpack_from(memory, start)
            start += _NOTE.size
            key = memory[start : start + key_bytes]
            start += key_bytes
            if value_bytes < 0:
                self._kept.pop(key, None)
            else:
                self._kept[key] = memory[start : start + value_bytes]
            at += ALIGNED_BYTES + length_bytes
        self._at = at


class EvictedMemory:
    """The memory of the evicted names (core/evicted.py), which only figures need."""

    def __init__(self, fd: int) -> None:
        """Use the table in *fd*; one that is empty, or of another layout, begins anew.

        Raises OSError.
        """
        size_bytes = PAGE_BYTES + WORD.size * words_of(NAMES_MAX)
        is_known = os.fstat(fd).st_size == size_bytes
        if not is_known:
            os.ftruncate(fd, 0)
            os.ftruncate(fd, size_bytes)  # zeros: free slots, which take no memory
        self._memory = mmap.mmap(fd, size_bytes)
        self.words: Final = memoryview(self._memory)[PAGE_BYTES:].cast("Q")
        try:
            require_table(self._memory, _EVICTED_MAGIC, EVICTED_VERSION, "evicted names")
        except FormatUnknown:
            self._memory[:] = bytes(size_bytes)
            begin_table(self._memory, _EVICTED_MAGIC, EVICTED_VERSION)

    def close(self) -> None:
        """Unmap the memory; the supervisor may keep it alive."""
        self.words.release()
        self._memory.close()


class Outliving(NamedTuple):
    """Journal, notes and tables, and the memfds that hold them."""

    journal: Journal
    notes: Notes
    undurable: UndurableTable
    evicted: EvictedMemory
    journal_fd: int
    notes_fd: int
    undurable_fd: int
    evicted_fd: int

    @classmethod
    def at(
        cls, journal_fd: int, notes_fd: int, undurable_fd: int, evicted_fd: int, undurable_max: int
    ) -> Self:
        """Use what the memfds hold; ``close`` closes them. Raises FormatUnknown, OSError.

        *undurable_max*: most rows in the table of what is not durable.
        """
        journal, notes = Journal(journal_fd), Notes(notes_fd)
        undurable = UndurableTable(undurable_fd, undurable_max)
        evicted = EvictedMemory(evicted_fd)
        fds = journal_fd, notes_fd, undurable_fd, evicted_fd
        return cls(journal, notes, undurable, evicted, *fds)

    @classmethod
    def fresh(cls, undurable_max: int) -> Self:
        """Create all, empty. Raises OSError."""
        journal_fd, notes_fd = (_memory(name) for name in ("kvfs-journal", "kvfs-notes"))
        return cls.at(journal_fd, notes_fd, empty_undurable(), empty_evicted(), undurable_max)

    def close(self) -> None:
        """Unmap all, and close the memfds."""
        self.journal.close()
        self.notes.close()
        self.undurable.close()
        self.evicted.close()
        for fd in (self.journal_fd, self.notes_fd, self.undurable_fd, self.evicted_fd):
            os.close(fd)


def undurable_rows_max(settings: Settings) -> int:
    """Return how many rows are enough for waiting blocks and queued identities together."""
    return 2 * settings.durable_queue_max


def empty_undurable() -> int:
    """Return the descriptor of an empty table of what is not durable. Raises OSError."""
    return _memory("kvfs-undurable")


def empty_evicted() -> int:
    """Return the descriptor of an empty table of evicted names. Raises OSError."""
    return _memory("kvfs-evicted")


def _memory(name: str) -> int:
    return os.memfd_create(name, os.MFD_CLOEXEC)
