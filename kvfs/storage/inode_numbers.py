"""Inode numbers: never given out twice, not even after a power loss.

The file INODES holds the end of the range that may be given out: u64 and its CRC32C, little-endian.
It is fsynced before any number of a range is used. It is not in the index, because unsynced commits
may be lost: after that a handle would open another file's data.

Each drive of a pool has its own INODES, which is asked for its own inodes only. The serial numbers
in them are given out in one row (drives.py). A start goes on behind the last of all ends.
"""

import functools
import os
import threading
from collections.abc import Callable
from typing import Final

from kvfs.core.checksum import CRC32C_RESIDUE, crc32c
from kvfs.core.drives import SERIAL_END, Numbering
from kvfs.core.errors import IndexDamaged, NotAtHand
from kvfs.core.pool_layout import INODES
from kvfs.core.types import FIRST_DRIVE, FIRST_INODE, INODE_END, NO_INODE, DriveNo, InodeNo
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


class _Range:
    """The INODES of one drive: what may be given out there is below ``end``, which is durable."""

    def __init__(self, pool_fd: int, syscalls: Syscalls, *, read_only: bool) -> None:
        self._syscalls = syscalls
        self._lock = threading.Lock()
        access = os.O_RDONLY if read_only else os.O_RDWR
        flags = access | os.O_CLOEXEC | os.O_NOFOLLOW
        try:
            self._fd = syscalls.open(INODES, flags, dir_fd=pool_fd)
        except FileNotFoundError:
            raise IndexDamaged(f"{INODES} is missing") from None
        try:
            self.end = parse_end(syscalls.pread(self._fd, _RECORD_BYTES + 1, 0))
        except BaseException:
            self.close()
            raise

    def is_due(self, serial: InodeNo) -> bool:
        """Whether less than half a range is left from *serial* on."""
        return self.end - serial < RANGE_NUMBERS // 2

    def refill(self, serial: InodeNo) -> None:
        """Make the next range durable, and usable from *serial* on; raises OSError."""
        with self._lock:
            if not self.is_due(serial):
                return
            end = max(self.end, serial) + RANGE_NUMBERS
            self._syscalls.pwrite(self._fd, pack_end(end), 0)
            self._syscalls.fsync(self._fd)
            self.end = InodeNo(end)

    def close(self) -> None:
        self._syscalls.close(self._fd)


class InodeNumbers:
    """Gives out numbers from ranges that are already durable.

    Invariant: each number that a drive was given is below what its INODES holds on the device.
    ``give_out`` belongs to one thread; ``refill`` may run in another meanwhile.
    """

    def __init__(
        self, pool_fds: tuple[int, ...], syscalls: Syscalls, *, read_only: bool = False
    ) -> None:
        """Continue above every number that may have been used. Writes nothing before ``give_out``.

        *pool_fds* are the directories of the pool's drives, by number. If *read_only*, ``give_out``
        fails. Raises IndexDamaged if an INODES is missing or damaged.
        """
        self._ranges: list[_Range] = []
        #: The drives whose next range is being made durable.
        self._refilling: set[DriveNo] = set()
        #: Those that have failed; and the first that has not, where inodes without bytes are.
        self._given_up: set[DriveNo] = set()
        self._first_drive = FIRST_DRIVE
        try:
            for pool_fd in pool_fds:
                self._ranges.append(_Range(pool_fd, syscalls, read_only=read_only))
        except BaseException:
            self.close()
            raise
        numbering = Numbering(len(self._ranges))
        self._inode = numbering.inode
        #: The serial number of an inode: of two the older has the lower.
        self.serial = numbering.serial
        #: The drive that holds the file of an inode, or of each inode of an array.
        self.drive, self.drives = numbering.drive, numbering.drives
        #: The first serial number that this process may give out. All older inodes are below it.
        self.first = self._next = max(one.end for one in self._ranges)
        if len(self._ranges) > 1 and self.first >= SERIAL_END:
            self.close()
            raise IndexDamaged(f"{INODES}: {self.first:#x} has the bits of a drive's number")

    @staticmethod
    def create(pool_fd: int, syscalls: Syscalls, first: InodeNo = FIRST_INODE) -> None:
        """Write INODES for a new drive, or a repaired one whose serials are all below *first*.

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
        """The serial number that is given out next: every existing inode has a lower one."""
        return self._next

    @property
    def refill_due(self) -> bool:
        """Whether a drive has less than half a range left: call ``refill`` in a thread."""
        return any(one.is_due(self._next) for one in self._ranges)

    def begin_refills(self) -> list[DriveNo]:
        """Return the drives whose ``refill`` is due and was not begun: begin it now."""
        due = [
            DriveNo(number)
            for number, one in enumerate(self._ranges)
            if one.is_due(self._next) and number not in self._refilling
        ]
        self._refilling.update(due)
        return due

    def refill(self, drive: DriveNo = FIRST_DRIVE) -> None:
        """Make the next range of *drive* durable (an fsync, some ms) and usable; raises OSError.

        Does nothing while enough is left, so concurrent calls do no harm.
        """
        try:
            self._ranges[drive].refill(self._next)
        finally:
            self._refilling.discard(drive)

    def give_up(self, drive: DriveNo) -> None:
        """Refill *drive* no more: it has failed. Inodes without bytes go to another drive."""
        self._refilling.add(drive)
        self._given_up.add(drive)
        drives = map(DriveNo, range(len(self._ranges)))
        self._first_drive = next((at for at in drives if at not in self._given_up), FIRST_DRIVE)

    def with_serial(self, serial: InodeNo) -> list[InodeNo]:
        """Return the numbers of which one may have been given out with *serial*: one a drive."""
        return [self._inode(DriveNo(drive), serial) for drive in range(len(self._ranges))]

    def is_new(self, ino: InodeNo) -> bool:
        """Whether *ino* was given out by this process, or will be."""
        return self.serial(ino) >= self.first

    def require(self, *, at_once: bool, drive: DriveNo | None = None) -> None:
        """Raise NotAtHand if ``give_out`` of *drive* would wait for it, unless *at_once*."""
        drive = self._first_drive if drive is None else drive
        if not at_once and self._next >= self._ranges[drive].end:
            fetch, ino = functools.partial(self._fetch, drive), self._inode(drive, NO_INODE)
            raise NotAtHand("a range of inode numbers", lambda: fetch, stores=True, ino=ino)

    def _fetch(self, drive: DriveNo) -> Callable[[], None]:
        self._ranges[drive].refill(self._next)
        return lambda: None

    def give_out(self, drive: DriveNo | None = None) -> InodeNo:
        """Return a number, for an inode on *drive*, that was never returned before.

        None: an inode without bytes, which is put on the first drive that has not failed.

        Waits for an fsync only if ``refill`` was not called in time. Raises OSError.
        """
        serial, drive = self._next, self._first_drive if drive is None else drive
        if serial >= self._ranges[drive].end:
            self._ranges[drive].refill(serial)
        self._next = InodeNo(serial + 1)
        return self._inode(drive, serial)

    def close(self) -> None:
        """Close the files; numbers of the ranges that were not taken are never used."""
        for one in self._ranges:
            one.close()
