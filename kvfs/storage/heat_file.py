"""HEAT: the heat of the blocks, written now and then so that a restart does not begin cold.

The file is a sequence of sections. The first has all blocks. Each save appends a section with those
touched since, so its cost depends on them, not on all blocks. When the later sections are as long
as the first, a new file replaces it by a rename. What the policy learned goes along: its counts in
each section, its tables in the first alone. It is never synced. Reading ends at a section
whose checksums fail, or of another pool or version. Without a valid first section the start is
cold, which is not an error. It is not memory-mapped: a store into a mapped file raises SIGBUS once
the file system is shut down, and a touch must not end the server.
"""

import logging
import os
import struct
import sys
from collections.abc import Iterator, Sequence
from operator import itemgetter
from typing import Any, Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from kvfs.core.checksum import CRC, crc32c
from kvfs.core.drives import Numbering
from kvfs.core.eviction_policy import Rank
from kvfs.core.learned import Learned
from kvfs.core.pool_layout import HEAT, HEAT_NEW
from kvfs.core.types import InodeNo
from kvfs.storage.age_clock import MARKS_MAX, Mark
from kvfs.storage.replaced_file import replaced_file
from kvfs.storage.syscalls import Syscalls

_log: Final = logging.getLogger(__name__)

#: Of a section without anything learned, which earlier versions of kvfs read too; and of others.
VERSION: Final = 1
VERSION_LEARNED: Final = 2
_MAGIC: Final = b"KVFSHEAT"
#: Magic, version, marks, the pool's epoch, rows, then the CRC32C of the rest and of this header.
_HEADER: Final = struct.Struct("<8sIIQQI")
_MARK: Final = struct.Struct("<QQ")
#: Behind the marks in a section of version 2: bytes of the counts, and of the tables.
_LEARNED: Final = struct.Struct("<QQ")
#: More is not kept: 20 bytes a block for twelve million of them.
LEARNED_MAX_BYTES: Final = 256 << 20
_HEADER_BYTES: Final = _HEADER.size + CRC.size
#: Rows copied at a time: the event loop needs the interpreter in between.
_STEP_ROWS: Final = 1 << 16
_STEP_BYTES: Final = 1 << 19
#: Stamps and sizes have at most this many bits: a stamp is a time in seconds, and 20 bits after it.
_NUMBER_BITS: Final = 62
_NOTHING: Final = Learned()
_FLAGS: Final = os.O_CLOEXEC | os.O_NOFOLLOW
#: At least this much may be appended: it is not worth replacing a small file.
_APPENDED_LEAST_BYTES: Final = 1 << 20


class HeatRows(NamedTuple):
    """What is kept of each block, as columns of equal length, in the order of the file.

    ``name_hash`` recognises a block's name; ``eviction_policy.Columns`` explains the rest.
    """

    ino: NDArray[np.uint64]
    touched: NDArray[np.uint64]
    allocated_bytes: NDArray[np.uint64]
    name_hash: NDArray[np.uint32]
    touches: NDArray[np.uint16]
    rank: NDArray[np.uint8]


class Saved(NamedTuple):
    """What HEAT holds."""

    rows: HeatRows
    marks: tuple[Mark, ...]
    learned: Learned = Learned()


def zero_rows(count: int) -> HeatRows:
    """Return *count* rows of zeros, which take no memory until they are used."""
    return HeatRows(
        np.zeros(count, np.uint64),
        np.zeros(count, np.uint64),
        np.zeros(count, np.uint64),
        np.zeros(count, np.uint32),
        np.zeros(count, np.uint16),
        np.zeros(count, np.uint8),
    )


def copy_rows(into: HeatRows, at: int, rows: HeatRows, which: NDArray[np.intp]) -> None:
    """Copy the rows *which* of *rows* to *into*, from row *at* on."""
    for target, source in zip(_columns(into), _columns(rows), strict=True):
        target[at : at + len(which)] = source[which]


def grown(rows: HeatRows, count: int) -> HeatRows:
    """Return *count* rows that begin with *rows*."""
    room = zero_rows(count)
    for target, source in zip(_columns(room), _columns(rows), strict=True):
        target[: len(source)] = source
    return room


def _columns(rows: HeatRows) -> tuple[NDArray[Any], ...]:
    return rows


def row_bytes() -> int:
    """Return how many bytes one row takes, in memory and in the file."""
    return sum(column.itemsize for column in _columns(zero_rows(0)))


def pack_header(epoch: int, count: int, marks: int, rest_crc: int, version: int = VERSION) -> bytes:
    """Return the header of a section with *count* rows and *marks* marks."""
    head = _HEADER.pack(_MAGIC, version, marks, epoch, count, rest_crc)
    return head + CRC.pack(crc32c(head))


class HeatFile:
    """Reads and writes HEAT. Only one thread at a time may call ``write``."""

    def __init__(self, pool_fd: int, syscalls: Syscalls, epoch: int) -> None:
        self._pool_fd = pool_fd
        self._syscalls = syscalls
        self._epoch = epoch
        #: Bytes of the first section, and of all. 0: not known to be whole.
        self._first_bytes = 0
        self._end_bytes = 0

    def write(
        self,
        rows: HeatRows,
        since: int,
        marks: Sequence[Mark] = (),
        learned: Learned = _NOTHING,
        *,
        at_stop: bool = False,
    ) -> None:
        """Write the *rows* touched from stamp *since* on, *marks* and what was *learned*.

        Rows and tables may change meanwhile. Writes all into a new file instead if that costs no
        more, or *at_stop* if there are tables. Takes milliseconds per MB, so call it in a thread.
        Raises OSError.
        """
        appends = 0 < self._end_bytes < 2 * self._first_bytes + _APPENDED_LEAST_BYTES
        if appends and not (at_stop and learned.tables):
            # A copy of the column, because numpy fails if numbers change while it counts them.
            touched = np.flatnonzero((rows.ino != 0) & (rows.touched >= since))
            self._append(rows, touched, marks, Learned(learned.counts))
            return
        self._end_bytes = 0
        used = np.flatnonzero(rows.ino != 0)
        with replaced_file(self._pool_fd, self._syscalls, HEAT, HEAT_NEW, durable=False) as fd:
            size_bytes = self._write_section(fd, 0, rows, used, marks, learned)
        self._first_bytes = self._end_bytes = size_bytes

    def _append(
        self, rows: HeatRows, which: NDArray[np.intp], marks: Sequence[Mark], learned: Learned
    ) -> None:
        at_bytes, self._end_bytes = self._end_bytes, 0
        fd = self._syscalls.open(HEAT, os.O_WRONLY | _FLAGS, dir_fd=self._pool_fd)
        try:
            # A killed save may have left bytes there.
            self._syscalls.ftruncate(fd, at_bytes)
            self._end_bytes = self._write_section(fd, at_bytes, rows, which, marks, learned)
        finally:
            self._syscalls.close(fd)

    def _write_section(
        self,
        fd: int,
        start_bytes: int,
        rows: HeatRows,
        which: NDArray[np.intp],
        marks: Sequence[Mark],
        learned: Learned,
    ) -> int:
        """Write a section at *start_bytes*, its header last; return its end (offset in bytes)."""
        crc, at_bytes = 0, start_bytes + _HEADER_BYTES
        for piece in (*_pieces(rows, which, marks), *_learned_pieces(learned)):
            data = memoryview(piece)
            crc = crc32c(data, crc)
            while data:
                written_bytes = self._syscalls.pwrite(fd, data, at_bytes)
                data, at_bytes = data[written_bytes:], at_bytes + written_bytes
        version = VERSION_LEARNED if learned.counts else VERSION
        head = pack_header(self._epoch, len(which), len(marks), crc, version)
        self._syscalls.pwrite(fd, head, start_bytes)
        return at_bytes

    def saved_s(self) -> int:
        """Return when HEAT was written, in seconds since the epoch. Raises OSError."""
        return int(self._syscalls.stat(HEAT, dir_fd=self._pool_fd, follow_symlinks=False).st_mtime)

    def read(self) -> Saved | None:
        """Return what HEAT holds, newest rows first; None unless its first section is whole.

        Raises OSError when the device fails.
        """
        try:
            fd = self._syscalls.open(HEAT, os.O_RDONLY | _FLAGS, dir_fd=self._pool_fd)
        except FileNotFoundError:
            return None
        sections: list[Saved] = []
        at_bytes = 0
        try:
            size_bytes = self._syscalls.fstat(fd).st_size
            while found := self._read_section(fd, at_bytes, size_bytes):
                section, at_bytes = found
                sections.append(section)
                self._first_bytes = self._first_bytes or at_bytes
        finally:
            self._syscalls.close(fd)
        self._end_bytes = at_bytes
        if len(sections) < 2:
            return sections[0] if sections else None
        columns = zip(*(_columns(section.rows) for section in reversed(sections)), strict=True)
        counts = sections[-1].learned.counts
        learned = Learned(counts, sections[0].learned.tables if counts else ())
        return Saved(HeatRows(*map(np.concatenate, columns)), sections[-1].marks, learned)

    def _read_section(self, fd: int, start_bytes: int, size_bytes: int) -> tuple[Saved, int] | None:
        """Return the section at *start_bytes* and its end; None if there is no whole one."""
        head = self._syscalls.pread(fd, _HEADER_BYTES, start_bytes)
        if len(head) != _HEADER_BYTES or CRC.pack(crc32c(head[: _HEADER.size])) != head[-4:]:
            return None
        magic, version, mark_count, its_epoch, count, crc = _HEADER.unpack_from(head)
        if (magic, its_epoch) != (_MAGIC, self._epoch) or mark_count > MARKS_MAX:
            return None
        if version not in (VERSION, VERSION_LEARNED):
            return None
        at_bytes = start_bytes + _HEADER_BYTES
        rows_end = at_bytes + count * row_bytes() + mark_count * _MARK.size
        if size_bytes < rows_end:
            return None
        sizes = b""
        if version == VERSION_LEARNED:
            sizes = self._syscalls.pread(fd, _LEARNED.size, rows_end)
            if len(sizes) != _LEARNED.size or size_bytes - rows_end < _learned_bytes(sizes):
                return None
        rows, its_crc = zero_rows(count), 0
        marks, learned = bytearray(mark_count * _MARK.size), bytearray(_learned_bytes(sizes))
        columns = (column.data.cast("B") for column in _columns(rows))
        for data in (*columns, memoryview(marks), memoryview(learned)):
            while data:
                read_bytes = self._syscalls.preadv(fd, [data], at_bytes)
                if read_bytes == 0:
                    return None
                its_crc = crc32c(data[:read_bytes], its_crc)
                data, at_bytes = data[read_bytes:], at_bytes + read_bytes
        if its_crc != crc:
            return None
        if count and max(int(rows.touched.max()), int(rows.allocated_bytes.max())) >> _NUMBER_BITS:
            return None  # kvfs adds to stamps and sizes: they must not overflow
        found = tuple(map(Mark._make, _MARK.iter_unpack(marks)))
        return Saved(rows, found, _learned_of(learned)), at_bytes


def _learned_bytes(sizes: bytes) -> int:
    """Return how much follows the marks, by the *sizes* there; more than any file if too much."""
    if not sizes:
        return 0
    sum_bytes = sum(_LEARNED.unpack(sizes))
    return _LEARNED.size + sum_bytes if sum_bytes <= LEARNED_MAX_BYTES else sys.maxsize


def _learned_of(data: bytearray) -> Learned:
    if not data:
        return Learned()
    counts_end = _LEARNED.size + _LEARNED.unpack_from(data)[0]
    tables = memoryview(data)[counts_end:]
    return Learned(bytes(data[_LEARNED.size : counts_end]), (tables,) if tables else ())


def _learned_pieces(learned: Learned) -> Iterator[bytes]:
    """Yield the bytes behind the marks, in pieces, because tables change meanwhile."""
    if not learned.counts:
        return
    tables = [memoryview(table).cast("B") for table in learned.tables]
    if len(learned.counts) + sum(map(len, tables)) > LEARNED_MAX_BYTES:
        tables = []
    yield _LEARNED.pack(len(learned.counts), sum(map(len, tables)))
    yield learned.counts
    for table in tables:
        for start in range(0, len(table), _STEP_BYTES):
            yield bytes(table[start : start + _STEP_BYTES])


def read_newest(files: Sequence[HeatFile]) -> tuple[Saved | None, int]:
    """Return what the newest of *files* holds (None: none is usable), and when it was saved (s)."""
    for found_s, file in sorted(_saved(files), key=itemgetter(0), reverse=True):
        try:
            if (found := file.read()) is not None:
                return found, found_s
        except OSError as error:
            _log.warning("block heat lost: %s", error)
    return None, 0


def _saved(files: Sequence[HeatFile]) -> Iterator[tuple[int, HeatFile]]:
    """Yield when each of *files* was saved, and the file."""
    for file in files:
        try:
            yield file.saved_s(), file
        except FileNotFoundError:
            continue
        except OSError as error:
            _log.warning("block heat lost: %s", error)


def _pieces(rows: HeatRows, used: NDArray[np.intp], marks: Sequence[Mark]) -> Iterator[bytes]:
    """Yield the bytes after the header: the rows *used*, column by column, in pieces; *marks*."""
    for column in _columns(rows):
        for start in range(0, len(used), _STEP_ROWS):
            yield column[used[start : start + _STEP_ROWS]].tobytes()
    if marks:
        yield b"".join(_MARK.pack(*mark) for mark in marks)


def sound_rows(found: HeatRows, least: int) -> HeatRows:
    """Return *found* with spare rows, at *least* so many, and without duplicates.

    A row that moved during the save may be there twice. One whose block was removed meanwhile
    counts as empty.
    """
    inos, first = np.unique(found.ino, return_index=True)
    first = first[inos != 0]
    rows = zero_rows(max(least, len(first) + len(first) // 2 + 1))
    copy_rows(rows, 1, found, first)
    np.minimum(rows.rank, np.uint8(max(Rank)), out=rows.rank)
    return rows


class BurstUses(NamedTuple):
    """Blocks that were used, in the order of their last use: sequences of equal length.

    ``names``: 32 bits of a hash of each; ``touches``: in how many bursts each was touched. ``end``:
    the stamp from which on uses are missing.
    """

    inos: Sequence[InodeNo]
    names: Sequence[int]
    touches: Sequence[int]
    end: int


def used_between(rows: HeatRows, begin: int, end: int) -> BurstUses:
    """Return the blocks of *rows* with stamps from *begin* on, and below *end*, which may go."""
    touched = rows.touched
    found = np.flatnonzero((touched >= begin) & (touched < end) & (rows.touches > 0))
    found = found[np.argsort(touched[found])]
    found = found[rows.ino[found] != 0]
    inos = [InodeNo(ino) for ino in rows.ino[found].tolist()]
    return BurstUses(inos, rows.name_hash[found].tolist(), rows.touches[found].tolist(), end)


def sum_up(rows: HeatRows, held_on: Sequence[list[int]]) -> None:
    """Set *held_on*, by drive and by rank, to the bytes that the blocks of *rows* hold."""
    drive = Numbering(len(held_on)).drives(rows.ino)
    for number, held_bytes in enumerate(held_on):
        for rank in Rank:
            there = (rows.rank == rank) & (drive == number)
            held_bytes[rank] = int(rows.allocated_bytes[there].sum())
