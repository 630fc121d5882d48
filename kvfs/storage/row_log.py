"""The log of the index on the device: the rows of each commit, in batches, as they are committed.

A batch holds what was committed since the one before, each row once, and the moment to which it
leads. It is there as a whole or not at all. Batches are numbered; a file ``rows.N`` begins with
number N, and the next file with the number behind its last one, or there is a gap. A start after a
power loss takes a copy of the index (index_copy.py) and the batches behind it up to the first gap.

Every method that reaches the device may wait for it: they belong in a thread.
"""

import contextlib
import os
from collections.abc import Iterator
from typing import Final

from kvfs.core.errors import NO_SPACE
from kvfs.core.log_records import BATCH_HEAD_BYTES, Batch, batch_bytes, parse_batch
from kvfs.core.pool_layout import COPIES, LOG, log_file_name, parse_log_file_name
from kvfs.storage.syscalls import FALLOC_FL_KEEP_SIZE, Syscalls

#: Allocated ahead of the batches, so that few of them change the file's extents.
_STEP_BYTES: Final = 1 << 20


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


def logged_batches(log_fd: int, syscalls: Syscalls, after: int) -> Iterator[Batch]:
    """Yield the batches behind number *after*, up to the first that is missing or not whole.

    Raises OSError.
    """
    number = after
    for first in log_files(log_fd, syscalls):
        if first > number + 1:
            return
        for batch in _batches_in(log_fd, syscalls, first):
            if batch.moment.number == number + 1:
                number += 1
                yield batch
            elif batch.moment.number > number:
                return


def _batches_in(log_fd: int, syscalls: Syscalls, first: int) -> Iterator[Batch]:
    """Yield the batches of one file, up to the first that is not whole."""
    flags = os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW
    fd = syscalls.open(log_file_name(first), flags, dir_fd=log_fd)
    try:
        at = 0
        while length_bytes := batch_bytes(syscalls.pread(fd, BATCH_HEAD_BYTES, at)):
            batch = parse_batch(syscalls.pread(fd, length_bytes, at))
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


def forget_log(pool_fd: int, syscalls: Syscalls) -> None:
    """Remove all copies and logged rows durably: the index is not what they say. Raises OSError."""
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
