"""One batch of the durability pass: blocks that nobody writes, and the thread that waits for them.

The device's thread opens the blocks. Then a thread waits for the device: the bytes of the whole
batch first, then one flush for all.

On XFS and ext4 the flush is a forced log: whatever was done to the file system before it is
durable then, also the identities that were written since the last one. A log write flushes the
drive's cache first, so bytes whose write has ended are durable before the log that follows.
"""

import contextlib
import functools
import logging
import threading
import time
from collections.abc import Callable, Sequence
from queue import SimpleQueue
from typing import Final, NamedTuple

from kvfs.core.errors import Damaged
from kvfs.core.types import InodeNo
from kvfs.pool.durable.final_bytes import MAY_CHANGE
from kvfs.pool.durable.not_durable import UndurableQueue, Waiting
from kvfs.pool.open.open_inodes import OpenInodes
from kvfs.pool.pool_parts import DurableParts
from kvfs.storage.background import Background
from kvfs.storage.extent_bytes import FinalChecksum, lacks_bytes, new_buffer
from kvfs.storage.syscalls import (
    SYNC_FILE_RANGE_WRITE,
    SYNC_FILE_RANGE_WRITE_AND_WAIT,
    Syscalls,
)

_log: Final = logging.getLogger(__name__)

#: Bounds of a batch: its descriptors, and bytes that take a good part of a second to write.
_BLOCKS_MAX: Final = 128
_BYTES_MAX: Final = 256 << 20
#: Blocks in one step on the loop, some 15 us each.
STEP: Final = 16
#: File systems with one log for all files: fsync(2) of one file makes all earlier changes durable.
_ONE_LOG: Final = frozenset({"xfs", "ext4"})


#: Unused checksum time is saved for a burst of stores: at most the share of this time.
_SAVED_S: Final = 60.0


class OpenBlock(NamedTuple):
    """A block of a batch, with a descriptor to read it."""

    ino: InodeNo
    waiting: Waiting
    fd: int


class DurableBatch:
    """Gathers the blocks that are due for the next pass over one drive."""

    def __init__(
        self,
        durable: DurableParts,
        inodes: OpenInodes,
        background: Background,
        queue: UndurableQueue,
        complete: Callable[[], None],
    ) -> None:
        """*queue*: what its drive lacks. *complete* is called when all blocks are open."""
        self._inodes = inodes
        self._background = background
        self._queue = queue
        self._not_durable = durable.not_durable
        self._final_bytes = durable.final_bytes
        self._complete = complete
        self._blocks: list[OpenBlock] = []
        self._size_bytes = 0
        self._due_before_s = 0.0
        #: How many blocks the device's thread is opening, and whether no more follow.
        self._opening, self._is_complete = 0, False
        #: Whether blocks are being gathered.
        self.gathers = False

    @property
    def is_full(self) -> bool:
        """Whether it takes no more blocks."""
        blocks = len(self._blocks) + self._opening
        return blocks >= _BLOCKS_MAX or self._size_bytes >= _BYTES_MAX

    @property
    def descriptors(self) -> list[int]:
        """The descriptors of its blocks, in order."""
        return [block.fd for block in self._blocks]

    def begin(self, due_before_s: float) -> None:
        """Gather blocks that were published before *due_before_s*."""
        self._due_before_s = due_before_s
        self.gathers = True
        self._background.submit(self._gather)

    def take_all(self) -> list[OpenBlock]:
        """Return its blocks, which are no longer its own."""
        blocks, self._blocks, self._size_bytes = self._blocks, [], 0
        return blocks

    def stop(self) -> list[OpenBlock]:
        """Gather no more, because the pool stops; return the blocks that are open."""
        self.gathers = self._is_complete = False
        return self.take_all()

    def _gather(self) -> None:
        """Take some blocks; begin with them when there are enough or no more are due."""
        if not self.gathers or self._is_complete:
            return
        for _ in range(STEP):
            first = self._queue.next_due()
            if first is None or first[1].since_s > self._due_before_s or self.is_full:
                self._is_complete = True
                self._end_if_open()
                return
            self._begin_open(*first)
        self._background.submit(self._gather)

    def _begin_open(self, ino: InodeNo, waiting: Waiting) -> None:
        """Take *ino* into the batch, unless somebody may still write it. Atomic."""
        queue = self._queue
        opened = self._inodes.get(ino)
        if opened is not None and opened.writers:
            self._not_durable.remove(ino)  # its last close publishes it
            return
        if not self._final_bytes.begin_open(ino):
            queue.hold(ino)
            return
        queue.begin(ino)
        self._opening += 1
        self._size_bytes += waiting.size_bytes
        self._background.of(ino).device.submit(
            functools.partial(self._open, ino), functools.partial(self._opened, ino, waiting)
        )

    def _open(self, ino: InodeNo) -> int | Exception:
        """Open *ino* in the device's thread; return why that failed, or a descriptor."""
        try:
            return self._final_bytes.open_unwritten(ino)
        except (Damaged, OSError) as error:
            return error

    def _opened(self, ino: InodeNo, waiting: Waiting, found: int | Exception) -> None:
        """Enter *ino*, unless it was written or removed meanwhile. Atomic."""
        queue = self._queue
        self._opening -= 1
        taken = queue.is_taken(ino, waiting)
        if isinstance(found, OSError):
            _log.warning("inode %#x is not durable yet: %s", ino, found)
            found = MAY_CHANGE
        if isinstance(found, Exception):
            if taken:
                self._not_durable.remove(ino)  # its next open finds the damage
        elif found == MAY_CHANGE:
            if taken:
                queue.put_back(ino)
                queue.hold(ino)
        else:
            self._final_bytes.note_open(ino, found)
            if taken:
                self._blocks.append(OpenBlock(ino, waiting, found))
            else:
                self._final_bytes.close(ino, found)
        self._end_if_open()

    def _end_if_open(self) -> None:
        if self._is_complete and not self._opening:
            self.gathers = self._is_complete = False
            self._complete()


class Synced(NamedTuple):
    """What became of one block: the device's error, or whether it has holes, and its CRC32C.

    The CRC is None if the block has holes, a part of it had left the page cache, or the thread had
    used up its share of time.
    """

    error: OSError | None
    has_holes: bool
    content_crc: int | None = None


class Done(NamedTuple):
    """What became of a batch: each block in its order, the flush, and the time it took."""

    blocks: list[Synced]
    flush_error: OSError | None
    took_s: float


class DeviceSync:
    """The thread of one drive, which works on one batch at a time."""

    def __init__(
        self,
        pool_fd: int,
        syscalls: Syscalls,
        fs_type: str,
        checksum: FinalChecksum,
        checksum_share: float,
        ended: Callable[[], None],
    ) -> None:
        """*checksum_share*: of a core's time, for checksums. *ended*: called after a batch."""
        self._ended = ended
        self._pool_fd = pool_fd
        self._syscalls = syscalls
        self._fs_type = fs_type
        self._buffer = new_buffer()
        self._checksum_share = checksum_share
        self._final_checksum = checksum
        #: Time that checksums may still take: it grows by the share as time goes by.
        self._left_s = 0.0
        self._counted_s = time.monotonic()
        self._batches: SimpleQueue[Sequence[int] | None] = SimpleQueue()
        self._done: list[Done] = []
        self._thread: threading.Thread | None = None

    def start(self, fds: Sequence[int]) -> None:
        """Begin to make durable the files *fds*, which may be none, and all earlier changes."""
        if self._thread is None:
            self._thread = threading.Thread(target=self._work, name="kvfs-durable", daemon=True)
            self._thread.start()
        self._batches.put(fds)

    def pop_result(self) -> Done | None:
        """Return what became of the batch, once; None while it is under way."""
        return self._done.pop() if self._done else None

    def close(self) -> None:
        """Wait for the batch under way, and end the thread."""
        if self._thread is not None:
            self._batches.put(None)
            self._thread.join()
            self._thread = None

    def _work(self) -> None:
        while (fds := self._batches.get()) is not None:
            begun_s = time.monotonic()
            blocks = self._sync(fds)
            flush_error = None
            try:
                self._flush()
            except OSError as error:
                flush_error = error
            self._done.append(Done(blocks, flush_error, time.monotonic() - begun_s))
            self._ended()

    def _sync(self, fds: Sequence[int]) -> list[Synced]:
        if self._fs_type == "xfs":
            for fd in fds:  # all begin before the first is waited for
                with contextlib.suppress(OSError):  # the wait reports it
                    self._syscalls.sync_file_range(fd, SYNC_FILE_RANGE_WRITE)
        return [self._sync_one(fd) for fd in fds]

    def _sync_one(self, fd: int) -> Synced:
        try:
            if self._fs_type == "xfs":
                self._syscalls.sync_file_range(fd, SYNC_FILE_RANGE_WRITE_AND_WAIT)
            else:
                self._syscalls.fdatasync(fd)
            size_bytes = self._syscalls.fstat(fd).st_size
            has_holes = lacks_bytes(self._syscalls, fd, size_bytes)
            # A file of a petabyte may be a hole: it takes no time to make, and years to sum up.
            crc = None if has_holes else self._checksum(fd, size_bytes)
            return Synced(None, has_holes, crc)
        except OSError as error:
            return Synced(error, has_holes=False)

    def _checksum(self, fd: int, size_bytes: int) -> int | None:
        """Return the CRC32C of a block's bytes, None if its time is used up. Raises OSError."""
        begun_s = time.monotonic()
        grown_s = (begun_s - self._counted_s) * self._checksum_share
        self._left_s = min(self._left_s + grown_s, self._checksum_share * _SAVED_S)
        self._counted_s = begun_s
        if self._left_s <= 0:
            return None
        end_s = begun_s + self._checksum_share * _SAVED_S
        crc = self._final_checksum.of(fd, size_bytes, self._buffer, end_s)
        self._left_s -= time.monotonic() - begun_s
        return crc

    def _flush(self) -> None:
        """Make durable what was done to the drive's file system so far. Raises OSError."""
        if self._fs_type in _ONE_LOG:
            # Change the directory first, because fsync(2) without a change forces no log.
            self._syscalls.utime(self._pool_fd)
            self._syscalls.fsync(self._pool_fd)
        elif self._fs_type != "tmpfs":
            self._syscalls.syncfs(self._pool_fd)
