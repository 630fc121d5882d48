"""The log of the index on the device: copies of it, and the rows of each commit, in batches.

A batch holds what was committed since the one before, each row once, and the moment to which it
leads. It is there as a whole or not at all. Batches are numbered; a file ``rows.N`` begins with
number N, and the next file with the number behind its last one, or there is a gap. A start after a
power loss takes a copy of the index and the batches behind it up to the first gap.

A copy is what LMDB writes as a compact copy (mdb_env_copyfd2), and behind it the moment at which it
was made and the checksum of all of it. There are two files, written in turns: one that is cut short
has no end, and the other is whole.

Every method that reaches the device may wait for it: they belong in a thread.
"""

import contextlib
import logging
import os
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from typing import Final, NamedTuple, TypeVar

import lmdb

from kvfs.core.checksum import crc32c
from kvfs.core.errors import NO_SPACE, IndexDamaged
from kvfs.core.log_records import (
    BATCH_HEAD_BYTES,
    COPY_END_BYTES,
    Batch,
    CopyEnd,
    Moment,
    batch_bytes,
    copy_end_bytes,
    parse_batch,
    parse_copy_end,
    parse_moment,
)
from kvfs.core.pool_layout import COPIES, LOG, log_file_name, parse_log_file_name
from kvfs.storage.lmdb_file import raise_index_error
from kvfs.storage.syscalls import FALLOC_FL_KEEP_SIZE, Syscalls

#: Allocated ahead of the batches, so that few of them change the file's extents.
_STEP_BYTES: Final = 1 << 20
_log: Final = logging.getLogger(__name__)

NumberedT = TypeVar("NumberedT", Batch, Moment)

_COPIED_BYTES: Final = 1 << 20
#: So much is written before the device is asked whether it has it, and left to others for as long.
_TURN_BYTES: Final = 8 << 20
#: The longest that a copy leaves the device to others after a turn, so that it ends.
_REST_MOST_S: Final = 0.5
_FILE_OPTIONS: Final = os.O_CLOEXEC | os.O_NOFOLLOW


class HeldIndex:
    """The index as it was at one commit; LMDB does not overwrite its pages before ``end``."""

    def __init__(self, env: lmdb.Environment) -> None:
        """Hold the last commit of *env*. Raises Damaged, OSError."""
        self._env = env
        try:
            self._txn = env.begin()
        except lmdb.Error as error:
            raise_index_error(error)

    def pieces(self) -> Iterator[bytes]:
        """Yield a compact copy of it, piece by piece; may run in a thread. Raises Damaged, OSError.

        LMDB copies without the interpreter's lock, in a thread of its own, into a pipe.
        """
        reading, writing = os.pipe()
        failures: list[lmdb.Error] = []

        def copy() -> None:
            try:
                self._env.copyfd(writing, compact=True, txn=self._txn)
            except lmdb.Error as error:
                failures.append(error)
            finally:
                os.close(writing)

        thread = threading.Thread(target=copy, name="kvfs-copy", daemon=True)
        thread.start()
        try:
            while piece := os.read(reading, _COPIED_BYTES):
                yield piece
        finally:
            os.close(reading)  # if nobody reads on, the copy ends with EPIPE
            thread.join()
        if failures:
            raise_index_error(failures[0])

    def end(self) -> None:
        """Let LMDB use its pages again. Idempotent."""
        self._txn.abort()


class FoundCopy(NamedTuple):
    """A copy with a whole end, and its length."""

    moment: Moment
    name: str
    size_bytes: int


def write_copy(
    log_fd: int, syscalls: Syscalls, held: HeldIndex, moment: Moment, *, paced: bool
) -> int:
    """Write what is *held* over the older copy; return its bytes. Durable on return.

    *moment* is the one at which it was held. *paced* leaves the device to others in between.
    Raises Damaged, OSError; the copy is not whole then.
    """
    newest = max(found_copies(log_fd, syscalls), default=None)
    name = COPIES[0] if newest is None or newest.name != COPIES[0] else COPIES[1]
    fd = syscalls.open(name, os.O_RDWR | os.O_CREAT | _FILE_OPTIONS, 0o600, dir_fd=log_fd)
    try:
        # First the end of the one that was here goes, and durably: it vouches for other bytes.
        syscalls.ftruncate(fd, 0)
        syscalls.fsync(fd)
        syscalls.fsync(log_fd)
        at = crc = 0
        turn = time.monotonic()
        for piece in held.pieces():
            syscalls.pwrite_all(fd, piece, at)
            crc = crc32c(piece, crc)
            at += len(piece)
            if paced and at // _TURN_BYTES != (at - len(piece)) // _TURN_BYTES:
                syscalls.fdatasync(fd)
                # In a thread of its own: the device is the clients' for as long as this turn took.
                time.sleep(min(time.monotonic() - turn, _REST_MOST_S))
                turn = time.monotonic()
        end = CopyEnd(at, crc, moment).pack()
        syscalls.pwrite_all(fd, end, at)
        syscalls.fsync(fd)
        return at + len(end)
    finally:
        syscalls.close(fd)


def found_copies(log_fd: int, syscalls: Syscalls) -> list[FoundCopy]:
    """Return all copies with a whole end; their bytes are not looked at. Raises OSError."""
    found: list[FoundCopy] = []
    for name in COPIES:
        with contextlib.suppress(FileNotFoundError):
            fd = syscalls.open(name, os.O_RDONLY | _FILE_OPTIONS, dir_fd=log_fd)
            try:
                end = _end_of(syscalls, fd)
                size_bytes = syscalls.fstat(fd).st_size
            finally:
                syscalls.close(fd)
            if end is not None:
                found.append(FoundCopy(end.moment, name, size_bytes))
    return found


def _end_of(syscalls: Syscalls, fd: int) -> CopyEnd | None:
    size_bytes = syscalls.fstat(fd).st_size
    tail = syscalls.pread(fd, COPY_END_BYTES, max(0, size_bytes - COPY_END_BYTES))
    end_bytes = copy_end_bytes(tail)
    if not end_bytes or end_bytes > size_bytes:
        return None
    return parse_copy_end(syscalls.pread(fd, end_bytes, size_bytes - end_bytes), size_bytes)


def load_copy(log_fd: int, name: str, data_fd: int, syscalls: Syscalls) -> None:
    """Write the index in copy *name* to *data_fd*.

    Raises IndexDamaged if the copy is not whole, OSError.
    """
    fd = syscalls.open(name, os.O_RDONLY | _FILE_OPTIONS, dir_fd=log_fd)
    try:
        end = _end_of(syscalls, fd)
        if end is None:
            raise IndexDamaged(f"{name}: it has no end")
        at = crc = 0
        while at < end.data_bytes:
            piece = syscalls.pread(fd, min(_COPIED_BYTES, end.data_bytes - at), at)
            if not piece:
                break
            crc = crc32c(piece, crc)
            syscalls.pwrite_all(data_fd, piece, at)
            at += len(piece)
        if (at, crc) != (end.data_bytes, end.data_crc):
            raise IndexDamaged(f"{name}: it fails its checksum")
    finally:
        syscalls.close(fd)


def open_log(pool_fd: int, syscalls: Syscalls, *, create: bool = False) -> int | None:
    """Return an fd of the log's directory; None if there is none. *create* makes one. OSError."""
    if create:
        with contextlib.suppress(FileExistsError):
            syscalls.mkdir(LOG, 0o700, dir_fd=pool_fd)
            syscalls.fsync(pool_fd)
    flags = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC | os.O_NOFOLLOW
    try:
        return syscalls.open(LOG, flags, dir_fd=pool_fd)
    except FileNotFoundError:
        return None


class LogFile:
    """One file of the log, which is being written."""

    def __init__(self, log_fd: int, syscalls: Syscalls, first: int) -> None:
        """Make the file that begins with batch *first*; durable on return. Raises OSError."""
        self._syscalls = syscalls
        self._end_bytes = self._allocated_bytes = 0
        flags = os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC | os.O_NOFOLLOW
        self._fd = syscalls.open(log_file_name(first), flags, 0o600, dir_fd=log_fd)
        try:
            syscalls.fsync(log_fd)
        except BaseException:  # an interrupt, too: nobody else knows the descriptor
            syscalls.close(self._fd)
            raise

    def append(self, raw: bytes) -> None:
        """Append one batch; durable on return. After an OSError the file takes no more."""
        self._allocate(len(raw))
        self._syscalls.pwrite_all(self._fd, raw, self._end_bytes)
        self._end_bytes += len(raw)
        self._syscalls.fdatasync(self._fd)

    def _allocate(self, more_bytes: int) -> None:
        """Allocate ahead; on a full device the write itself finds out whether it fits."""
        if self._end_bytes + more_bytes <= self._allocated_bytes:
            return
        length_bytes = -(-more_bytes // _STEP_BYTES) * _STEP_BYTES
        try:
            self._syscalls.fallocate(self._fd, FALLOC_FL_KEEP_SIZE, self._end_bytes, length_bytes)
        except OSError as error:
            if error.errno not in NO_SPACE:
                raise
        else:
            self._allocated_bytes = self._end_bytes + length_bytes

    def close(self) -> None:
        """Close the file."""
        self._syscalls.close(self._fd)


def log_files(log_fd: int, syscalls: Syscalls) -> list[int]:
    """Return the first numbers of all files of the log, in order. Raises OSError."""
    found = (parse_log_file_name(name) for name in syscalls.listdir(log_fd))
    return sorted(first for first in found if first is not None)


def log_bytes(log_fd: int, syscalls: Syscalls) -> int:
    """Return the length of all files of the log together. Raises OSError."""
    names = map(log_file_name, log_files(log_fd, syscalls))
    return sum(syscalls.stat(name, dir_fd=log_fd).st_size for name in names)


def highest_number(pool_fd: int, syscalls: Syscalls) -> int:
    """Return the highest number that a copy or a file has in the log of the drive at *pool_fd*.

    0 if there is no log. Raises OSError.
    """
    log_fd = open_log(pool_fd, syscalls)
    if log_fd is None:
        return 0
    try:
        copies = [copy.moment.number for copy in found_copies(log_fd, syscalls)]
        return max((0, *copies, *log_files(log_fd, syscalls)))
    finally:
        syscalls.close(log_fd)


def leads_to(pool_fd: int, number: int, syscalls: Syscalls) -> bool:
    """Whether the log of the drive at *pool_fd* is whole up to batch *number*; it reads all of it.

    Raises OSError.
    """
    log_fd = open_log(pool_fd, syscalls)
    if log_fd is None:
        return False
    try:
        copies = [copy.moment.number for copy in found_copies(log_fd, syscalls)]
        return any(last_logged(log_fd, syscalls, copied) == number for copied in copies)
    finally:
        syscalls.close(log_fd)


def logged_batches(log_fd: int, syscalls: Syscalls, after: int) -> Iterator[Batch]:
    """Yield the batches behind number *after*, up to the first that is missing or not whole.

    Raises OSError.
    """
    return _in_order(log_fd, syscalls, after, parse_batch)


def last_logged(log_fd: int, syscalls: Syscalls, after: int) -> int:
    """Return the number of the last batch that ``logged_batches`` yields; *after* if none.

    It reads all of them, and makes nothing of their rows. Raises OSError.
    """
    return max(
        (at.number for at in _in_order(log_fd, syscalls, after, parse_moment)), default=after
    )


def _in_order(
    log_fd: int, syscalls: Syscalls, after: int, parse: Callable[[bytes], NumberedT | None]
) -> Iterator[NumberedT]:
    """Yield what *parse* makes of the batches behind number *after*, up to the first gap."""
    number = after
    for first in log_files(log_fd, syscalls):
        if first > number + 1:
            return
        for batch in _batches_in(log_fd, syscalls, first, parse):
            if batch.number == number + 1:
                number += 1
                yield batch
            elif batch.number > number:
                return


def _batches_in(
    log_fd: int, syscalls: Syscalls, first: int, parse: Callable[[bytes], NumberedT | None]
) -> Iterator[NumberedT]:
    """Yield the batches of one file, up to the first that is not whole."""
    flags = os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW
    fd = syscalls.open(log_file_name(first), flags, dir_fd=log_fd)
    try:
        at = 0
        while length_bytes := batch_bytes(syscalls.pread(fd, BATCH_HEAD_BYTES, at)):
            batch = parse(syscalls.pread(fd, length_bytes, at))
            if batch is None:
                return
            yield batch
            at += length_bytes
    finally:
        syscalls.close(fd)


def remove_log_files(log_fd: int, syscalls: Syscalls, up_to: int) -> None:
    """Remove the files that begin with number *up_to* or a lower one. Raises OSError."""
    for first in log_files(log_fd, syscalls):
        if first <= up_to:
            with contextlib.suppress(FileNotFoundError):
                syscalls.unlink(log_file_name(first), dir_fd=log_fd)


def forget_log(pool_fds: Iterable[int], syscalls: Syscalls) -> None:
    """Remove all copies and logged rows durably: the index is not what they say. Raises OSError.

    *pool_fds* are the directories of all drives: another one's log is as wrong.
    """
    for pool_fd in pool_fds:
        _forget_log(pool_fd, syscalls)


def _forget_log(pool_fd: int, syscalls: Syscalls) -> None:
    log_fd = open_log(pool_fd, syscalls)
    if log_fd is None:
        return
    try:
        for name in COPIES:
            with contextlib.suppress(FileNotFoundError):
                syscalls.unlink(name, dir_fd=log_fd)
        syscalls.fsync(log_fd)
        for first in log_files(log_fd, syscalls):
            syscalls.unlink(log_file_name(first), dir_fd=log_fd)
        syscalls.fsync(log_fd)
    finally:
        syscalls.close(log_fd)
