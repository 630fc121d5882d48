"""Copies of the whole index on the device, each with the moment at which it was made.

A copy is what LMDB writes as a compact copy (mdb_env_copyfd2), and behind it the moment and the
checksum of all of it. There are two files, written in turns: one that is cut short has no end, and
the other is whole. With the rows logged since (row_log.py) a copy is what a start goes back to.
"""

import contextlib
import logging
import os
import threading
import time
from collections.abc import Iterator
from typing import Final, NamedTuple

import lmdb

from kvfs.core.checksum import crc32c
from kvfs.core.errors import IndexDamaged
from kvfs.core.log_records import (
    COPY_END_BYTES,
    CopyEnd,
    Moment,
    copy_end_bytes,
    parse_copy_end,
)
from kvfs.core.pool_layout import COPIES
from kvfs.storage.lmdb_file import raise_index_error
from kvfs.storage.syscalls import Syscalls

_log: Final = logging.getLogger(__name__)

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
