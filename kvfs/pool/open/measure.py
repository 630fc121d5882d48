"""Size and times of a block that is being written, from its extent."""

import functools
import os
import time
from typing import Final

from kvfs.core.errors import Damaged
from kvfs.core.lifecycle import SETTLED
from kvfs.core.types import STAT_BLOCK_BYTES, InodeRecord
from kvfs.pool.open.open_inodes import OpenInode
from kvfs.storage.extents_at_hand import ExtentsAtHand
from kvfs.storage.syscalls import Syscalls

#: The kernel's coarse clock advances in steps of 1 to 10 ms; on a virtual machine it may be late.
_TICK_NS: Final = 50_000_000
#: CLOCK_REALTIME_COARSE of linux/time.h.
_REALTIME_COARSE: Final = 5


@functools.cache
def _scratch_fd() -> int:
    """Return a file that is used only for its timestamps; -1 if the process may have none.

    It is in no directory, and open as long as the process lives. It is made at the first use: who
    imports and then forks or puts its own files at chosen numbers would lose it.
    """
    try:
        return os.memfd_create("kvfs-stamps", os.MFD_CLOEXEC)
    except OSError:
        return -1


def _kernels_ns() -> int:
    """Return the present time as the kernel stamps files, in ns since the epoch.

    From Linux 6.13 on a stamp is exact if the one before was read, and no file gets an earlier one
    after that (multigrain timestamps: inode_set_ctime_current() in fs/inode.c, with its floor in
    kernel/time/timekeeping.c).
    """
    scratch_fd = _scratch_fd()
    os.utime(scratch_fd)
    return os.fstat(scratch_fd).st_ctime_ns


@functools.cache
def stamps_are_exact() -> bool:
    """Whether the kernel never stamps a file with a time before an earlier ``stamp_ns``."""
    return _scratch_fd() >= 0 and _kernels_ns() < _kernels_ns() < _kernels_ns()


def stamp_ns() -> int:
    """Return the present time by the clock that the kernel stamps writes with, in ns (epoch).

    With passthrough the kernel sets times of writes. By another clock the older file could seem the
    younger, by one step of the kernel's coarse clock. That can happen before Linux 6.13.
    """
    return _kernels_ns() if stamps_are_exact() else time.time_ns()


def tick_ns(now_ns: int) -> int:
    """Return *now_ns* by the clock that the kernel stamps writes with (current_time()).

    Where stamps are not exact that clock may be one step behind ours, so that a write could seem
    older than the file's creation.
    """
    if stamps_are_exact():
        return now_ns
    at_ns = time.clock_gettime_ns(_REALTIME_COARSE)
    return at_ns if now_ns - _TICK_NS < at_ns < now_ns else now_ns


def not_before(record: InodeRecord, written: InodeRecord) -> InodeRecord:
    """Return *written*, as measured on the extent, with times no earlier than those of *record*.

    Times may be too early by one step of the kernel's clock. Use this for readers and for the last
    close; until then only the extent's own mtime shows whether more was written.
    """
    # A record whose time was set during writing differs by one nanosecond (attributes.py).
    if written.mtime_ns + 1 < record.mtime_ns < written.mtime_ns + _TICK_NS:
        return written._replace(mtime_ns=record.mtime_ns + 1)
    return written


def require_size(
    syscalls: Syscalls, at_hand: ExtentsAtHand, opened: OpenInode, record: InodeRecord | None
) -> None:
    """Raise Damaged if the extent of a settled block has another size than its *record*.

    Otherwise a reader would get a part of the block, or more, and no error. Call it when the extent
    was just opened: then nobody writes to it. If damaged, the extent is closed. Raises OSError.
    """
    if record is None or record.state not in SETTLED or opened.writers:
        return
    size_bytes = syscalls.fstat(opened.fd).st_size
    if size_bytes != record.size_bytes:
        opened.close_extent(at_hand)
        raise Damaged(
            f"extent {opened.ino:#x} has {size_bytes} bytes instead of {record.size_bytes}"
        )


def measured(syscalls: Syscalls, opened: OpenInode, record: InodeRecord) -> InodeRecord:
    """Return *record* with the extent's size and times; the same object if nothing was written.

    Raises OSError.
    """
    status = syscalls.fstat(opened.fd)
    if is_as_recorded(status, record):
        return record
    return record._replace(
        size_bytes=status.st_size,
        allocated_bytes=status.st_blocks * STAT_BLOCK_BYTES,
        mtime_ns=status.st_mtime_ns,
        ctime_ns=max(record.ctime_ns, status.st_ctime_ns),
    )


def is_as_recorded(status: os.stat_result, record: InodeRecord) -> bool:
    """Whether nothing was written to an extent with *status* since *record* was made."""
    if status.st_size != record.size_bytes:
        return False
    if status.st_mtime_ns == record.mtime_ns:
        return True
    # A ready extent is older than its draft, so the times differ even if nothing was written.
    return status.st_size == 0 and status.st_mtime_ns < record.btime_ns
