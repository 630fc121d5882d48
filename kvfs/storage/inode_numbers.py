"""Inode numbers: never given out twice, not even after a power loss.

The file INODES holds the end of the range that may be given out: u64 and its CRC32C, little-endian.
It is fsynced before any number of a range is used. It is not in the index, because unsynced commits
may be lost: after that a handle would open another file's data.
"""

import os
import threading
from collections.abc import Callable
from typing import Final

from kvfs.core.checksum import CRC32C_RESIDUE, crc32c
from kvfs.core.errors import IndexDamaged, NotAtHand
from kvfs.core.pool_layout import INODES
from kvfs.core.types import FIRST_INODE, INODE_END, InodeNo
from kvfs.storage.syscalls import Syscalls

#: Numbers made durable at a time: one fsync in 65,536 creates. A start skips as many of 2**64.
RANGE_NUMBERS: Final = 1 << 16
_RECORD_BYTES: Final = 12
#: A repair begins far above the last inode that it finds, which is below INODE_END.
_END_MAX: Final = INODE_END + (INODE_END >> 1)


def pack_end(end: int) -> bytes:
    """Return the content of INODES for a range that ends before *end*."""
    body = end.to_bytes(8, "little")
    return body + crc32c(body).to_bytes(4, "little")


def parse_end(raw: bytes) -> InodeNo:
    """Return the end that INODES holds; raises IndexDamaged."""
    if len(raw) != _RECORD_BYTES or crc32c(raw) != CRC32C_RESIDUE:
        raise IndexDamaged(f"{INODES}: {len(raw)} bytes that fail their checksum")
    end = InodeNo(int.from_bytes(raw[:8], "little"))
    if not FIRST_INODE <= end < _END_MAX:
        raise IndexDamaged(f"{INODES}: {end:#x} is no end of a range")
    return end


class InodeNumbers:
    """Gives out numbers from a range that is already durable.

    Invariant: ``_next <= _end <= what INODES holds on the device``. ``give_out`` belongs to one
    thread; ``refill`` may run in another meanwhile.
    """

    def __init__(self, pool_fd: int, syscalls: Syscalls, *, read_only: bool = False) -> None:
        """Continue above every number that may have been used. Writes nothing before ``give_out``.

        If *read_only*, ``give_out`` fails. Raises IndexDamaged if INODES is missing or damaged.
        """
        self._syscalls = syscalls
        self._lock = threading.Lock()
        access = os.O_RDONLY if read_only else os.O_RDWR
        flags = access | os.O_CLOEXEC | os.O_NOFOLLOW
        try:
            self._fd = syscalls.open(INODES, flags, dir_fd=pool_fd)
        except FileNotFoundError:
            raise IndexDamaged(f"{INODES} is missing") from None
        try:
            self._next = self._end = parse_end(syscalls.pread(self._fd, _RECORD_BYTES + 1, 0))
            #: The first number that this process may give out. All older inodes are below it.
            self.first = self._end
        except BaseException:
            syscalls.close(self._fd)
            raise

    @staticmethod
    def create(pool_fd: int, syscalls: Syscalls, first: InodeNo = FIRST_INODE) -> None:
        """Write INODES for a new pool, or a repaired one whose numbers are all below *first*.

        Durable on return, except for the directory entry, which mkfs syncs. Raises OSError.
        """
        flags = os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW
        fd = syscalls.open(INODES, flags, 0o600, dir_fd=pool_fd)
        try:
            # Written before it is cut: an interrupted repair leaves the old bytes or the new ones.
            syscalls.pwrite(fd, pack_end(first), 0)
            syscalls.ftruncate(fd, _RECORD_BYTES)
            syscalls.fsync(fd)
        finally:
            syscalls.close(fd)

    @property
    def next(self) -> InodeNo:
        """The number that ``give_out`` returns next: every existing inode has a lower one."""
        return self._next

    @property
    def refill_due(self) -> bool:
        """Whether less than half a range is left: call ``refill`` in a thread."""
        return self._end - self._next < RANGE_NUMBERS // 2

    def refill(self) -> None:
        """Make the next range durable (one fsync, some ms) and usable; raises OSError.

        Does nothing while enough is left, so concurrent calls do no harm.
        """
        with self._lock:
            if not self.refill_due:
                return
            end = self._end + RANGE_NUMBERS
            self._syscalls.pwrite(self._fd, pack_end(end), 0)
            self._syscalls.fsync(self._fd)
            self._end = InodeNo(end)

    def require(self, *, at_once: bool) -> None:
        """Raise NotAtHand if ``give_out`` would wait for the device, unless *at_once*."""
        if not at_once and self._next >= self._end:
            raise NotAtHand("a range of inode numbers", lambda: self._fetch, stores=True)

    def _fetch(self) -> Callable[[], None]:
        self.refill()
        return lambda: None

    def give_out(self) -> InodeNo:
        """Return a number that was never returned before.

        Waits for an fsync only if ``refill`` was not called in time. Raises OSError.
        """
        number = self._next
        if number >= self._end:
            self.refill()
        self._next = InodeNo(number + 1)
        return number

    def close(self) -> None:
        """Close the file; numbers of the range that were not taken are never used."""
        self._syscalls.close(self._fd)
