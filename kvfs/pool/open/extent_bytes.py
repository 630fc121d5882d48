"""The extent of an open inode: its descriptor, what is allocated and reserved, its size and times.

Most extents, with their reserve, have all blocks from offset 0 on. For them the allocated bytes
tell what a write will allocate, and no system call is needed. In an extent with holes a write may
also allocate before the last block. It has no block beyond ``reach_bytes``, so the holes are no
larger than what is missing up to there. The file system knows what is written, but it reports
reserved blocks as holes.

A draft gets its likely size ahead of its writes. How much is decided by allocator.py, and what was
taken beyond it is counted there; here is what is known of one inode.

Size and times of a block that is being written are those of its extent. The clock of the kernel's
stamps is here, too.
"""

import functools
import os
import time
from collections.abc import Callable
from typing import Final

from kvfs.core.errors import Damaged
from kvfs.core.lifecycle import SETTLED
from kvfs.core.types import (
    NO_BACKING_ID,
    NO_INODE,
    STAT_BLOCK_BYTES,
    BackingId,
    InodeNo,
    InodeRecord,
    round_up,
)
from kvfs.pool.space.space import Space
from kvfs.storage.device_thread import DeviceThread
from kvfs.storage.extents_at_hand import ExtentsAtHand
from kvfs.storage.syscalls import Syscalls

#: The kernel's coarse clock advances in steps of 1 to 10 ms; on a virtual machine it may be late.
_TICK_NS: Final = 50_000_000
#: CLOCK_REALTIME_COARSE of linux/time.h.
_REALTIME_COARSE: Final = 5


class ExtentBytes:
    """The extent, a part of an ``OpenInode``. Defaults are class attributes: a reader sets none."""

    ino: InodeNo
    writers: int
    #: -1 for a directory, or until it is needed.
    fd = -1
    #: The backing id that came with a fresh extent; the data path takes it over.
    fresh_id = NO_BACKING_ID
    #: Allocated bytes when it was last measured. The last close writes them to the index.
    allocated_bytes = 0
    #: How many allocations are under way, whose space is pledged; until then it is not measured.
    allocating = 0
    #: How many reads and writes through ``fd`` are under way in threads.
    transfers = 0
    #: How often its times are being set, by a writer's open or a client; the record has them.
    settling = 0
    #: How often they were to be set so far.
    settled_times = 0
    #: Why they could not be set, for the open that waits for it.
    unsettled: Exception | None = None
    #: Bytes from offset 0 on without a hole; -1 while there is no hole.
    front_bytes = -1
    #: If ``front_bytes`` is set: there is no block beyond this offset.
    reach_bytes = 0

    # ---- its descriptor ----

    def take_extent(self, fd: int, backing_id: BackingId) -> None:
        """Take a fresh extent, which comes open and registered."""
        self.fd, self.fresh_id = fd, backing_id

    def open_extent(self, fd: int) -> None:
        """Keep *fd*, on which the extent was opened, to the last close."""
        self.fd = fd

    def exchange_extent(self, fd: int) -> None:
        """The extent is the file behind *fd* from now on, and so are descriptors kept of it."""
        os.dup2(fd, self.fd, inheritable=False)
        os.close(fd)

    def close_extent(self, at_hand: ExtentsAtHand) -> None:
        """Close the descriptor, if there is one."""
        if self.fd >= 0:
            at_hand.close(self.ino, self.fd)
            self.fd = -1

    def take_fresh_id(self) -> BackingId:
        """Hand over the backing id that came with the extent."""
        fresh, self.fresh_id = self.fresh_id, NO_BACKING_ID
        return fresh

    # ---- what is under way ----

    def begin_allocation(self) -> None:
        """An allocation begins, whose space is pledged."""
        self.allocating += 1

    def end_allocation(self) -> None:
        """An allocation has ended."""
        self.allocating -= 1

    def begin_transfer(self) -> None:
        """A read or a write through ``fd`` begins."""
        self.transfers += 1

    def end_transfer(self) -> None:
        """A read or a write has ended."""
        self.transfers -= 1

    def settle(
        self, device: DeviceThread, work: Callable[[], None], end: Callable[[], None] | None = None
    ) -> None:
        """Have *device* do *work*, which sets times or length, and then do *end*, also if it fails.

        While requests are served, wait until it is settled. Else raises what *work* raises.
        """
        self.settled_times += 1
        if not device.is_serving:
            work()
            if end is not None:
                end()
            return

        def ended(error: Exception | None) -> None:
            self.settling -= 1
            self.unsettled = error
            if end is not None:
                end()

        self.settling += 1
        device.submit(work, ended, failed=ended)

    def require_settled(self) -> None:
        """Raise the error of times, or of a length, that could not be set."""
        error, self.unsettled = self.unsettled, None
        if error is not None:
            raise error

    # ---- what is allocated ----

    def hold(self, allocated_bytes: int) -> None:
        """Note that *allocated_bytes* are allocated; the caller accounts for the difference."""
        self.allocated_bytes = allocated_bytes

    def note_allocated(self, allocated_bytes: int, taken: Space) -> None:
        """Note that *allocated_bytes* are allocated, and count the difference in *taken*."""
        taken.extra_bytes += allocated_bytes - self.allocated_bytes
        self.allocated_bytes = allocated_bytes

    def look_for_holes(self, size_bytes: int) -> None:
        """Note the size of a file written by passthrough; if less is allocated, it has holes."""
        end_bytes = round_up(size_bytes)
        if self.front_bytes < 0:
            if not 0 < self.allocated_bytes < end_bytes:
                return
            self.front_bytes = self.reach_bytes = 0
        self.reach_bytes = max(self.reach_bytes, end_bytes)

    def forget_holes(self) -> None:
        """Take it for an extent without holes."""
        self.front_bytes = -1

    def growth_bytes(self, syscalls: Syscalls, start_bytes: int, end_bytes: int) -> int:
        """Return how many bytes a coming write from *start_bytes* to *end_bytes* may allocate."""
        held_bytes = self.allocated_bytes
        if self.front_bytes < 0:
            if start_bytes <= held_bytes:
                return max(0, end_bytes - held_bytes)  # most writes
            self.front_bytes = self.reach_bytes = held_bytes
        if end_bytes <= self.front_bytes:
            return 0
        reached_bytes = self.reach_bytes
        self.reach_bytes = max(reached_bytes, round_up(end_bytes))
        if start_bytes >= reached_bytes:
            return end_bytes - start_bytes
        lacking_bytes = self.reach_bytes - held_bytes
        if lacking_bytes <= 0:
            self.front_bytes = -1  # the holes are filled
            return 0
        hole_bytes = _next_hole(syscalls, self.fd, max(start_bytes, self.front_bytes))
        return min(max(0, end_bytes - hole_bytes), lacking_bytes)

    def note_filled(self, end_bytes: int) -> None:
        """Note that all blocks up to *end_bytes* were allocated."""
        if self.front_bytes >= 0:
            self.front_bytes = max(self.front_bytes, end_bytes)
            self.reach_bytes = max(self.reach_bytes, end_bytes)

    def note_punched(self, start_bytes: int) -> None:
        """Note that blocks from *start_bytes* on were freed, perhaps not all."""
        if self.front_bytes < 0:
            self.front_bytes = self.reach_bytes = self.allocated_bytes
        self.front_bytes = min(self.front_bytes, start_bytes)

    def note_cut(self, size_bytes: int) -> None:
        """Note that it is truncated to *size_bytes*, which may be more than it had."""
        self.front_bytes = min(self.front_bytes, size_bytes)


def _next_hole(syscalls: Syscalls, fd: int, start_bytes: int) -> int:
    try:
        return syscalls.lseek(fd, start_bytes, os.SEEK_HOLE)
    except OSError:
        return start_bytes  # ENXIO: the file ends before it


class DraftReserve:
    """The reserve, a part of an ``OpenInode``. Defaults are class attributes."""

    #: The directory in which a draft was created, for the size forecast; 0 for other blocks.
    created_in = NO_INODE
    #: Bytes reserved beyond the usual size of its directory, so that it does not outgrow them.
    spare_bytes = 0
    #: Bytes kept free in case it outgrows them, for this draft and all others together.
    outgrowing_bytes = 0
    #: Whether it is likely to outgrow its reserve.
    unreserved = False
    #: Whether each write must ask for space, on the daemon path, from first to last handle.
    through_daemon = False
    #: Bytes that it took beyond its reserve between the last two checks.
    outgrown = 0
    #: All bytes that it took beyond its reserve.
    taken_unasked = 0

    @property
    def runs_free(self) -> bool:
        """Whether its writers may take any amount until the next check."""
        return self.unreserved and not self.through_daemon

    def foresee(self, directory: InodeNo) -> None:
        """It is a draft in *directory*, whose forecast is to learn its size."""
        self.created_in = directory

    def tell_size(self) -> None:
        """The forecast has learned its size."""
        self.created_in = NO_INODE

    def rely(self, outgrowing_bytes: int) -> None:
        """Its likely size is reserved; *outgrowing_bytes* are kept free for all such drafts."""
        self.unreserved, self.outgrowing_bytes = False, outgrowing_bytes

    def run_free(self) -> None:
        """Its writers may take any amount until the next check."""
        self.unreserved, self.through_daemon = True, False

    def lack(self) -> None:
        """It is likely to outgrow its reserve, and there is no space to let it: it must ask."""
        self.unreserved = self.through_daemon = True

    def must_ask(self) -> None:
        """Each of its writes must ask for space."""
        self.through_daemon = True

    def need_not_ask(self) -> None:
        """It has no writer any more, and only writers must ask."""
        self.through_daemon = False

    def has_asked(self) -> None:
        """Its writer asked for space: it is expected to take no more without asking."""
        self.unreserved = False

    def spare(self, size_bytes: int) -> int:
        """Set its spare bytes; return by how much they have grown."""
        growth_bytes = size_bytes - self.spare_bytes
        self.spare_bytes = size_bytes
        return growth_bytes

    def take_unasked(self, growth_bytes: int) -> None:
        """It grew by *growth_bytes* (perhaps below 0) since the last check."""
        self.outgrown = max(growth_bytes, 0)
        self.taken_unasked += self.outgrown

    def is_stopped(self) -> None:
        """Its writer gets an error from now on, so nothing more is to be expected."""
        self.outgrown = 0


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
    syscalls: Syscalls, at_hand: ExtentsAtHand, opened: ExtentBytes, record: InodeRecord | None
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


def measured(syscalls: Syscalls, opened: ExtentBytes, record: InodeRecord) -> InodeRecord:
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
