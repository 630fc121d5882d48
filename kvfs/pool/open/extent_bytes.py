"""The extent of an open inode: its descriptor, what is allocated in it, and what a write may add.

Most extents, with their reserve, have all blocks from offset 0 on. For them the allocated bytes
tell what a write will allocate, and no system call is needed. In an extent with holes a write may
also allocate before the last block. It has no block beyond ``reach_bytes``, so the holes are no
larger than what is missing up to there. The file system knows what is written, but it reports
reserved blocks as holes.
"""

import os
from collections.abc import Callable

from kvfs.core.types import NO_BACKING_ID, BackingId, InodeNo, round_up
from kvfs.storage.device_thread import DeviceThread
from kvfs.storage.extents_at_hand import ExtentsAtHand
from kvfs.storage.syscalls import Syscalls


class ExtentBytes:
    """The extent, a part of an ``OpenInode``. Defaults are class attributes: a reader sets none."""

    ino: InodeNo
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
