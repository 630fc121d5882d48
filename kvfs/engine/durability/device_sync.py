"""The thread that waits for the device: bytes of a batch of blocks first, then one flush for all.

On XFS and ext4 the flush is a forced log: whatever was done to the file system before it is
durable then, also the identities that were written since the last one. A log write flushes the
drive's cache first, so bytes whose write has ended are durable before the log that follows.
"""

import contextlib
import threading
import time
from collections.abc import Callable, Sequence
from queue import SimpleQueue
from typing import Final, NamedTuple

from kvfs.storage.extent_bytes import FinalChecksum, lacks_bytes, new_buffer
from kvfs.storage.syscalls import (
    SYNC_FILE_RANGE_WRITE,
    SYNC_FILE_RANGE_WRITE_AND_WAIT,
    Syscalls,
)

#: File systems with one log for all files: fsync(2) of one file makes all earlier changes durable.
_ONE_LOG: Final = frozenset({"xfs", "ext4"})


#: Unused checksum time is saved for a burst of stores: at most the share of this time.
_SAVED_S: Final = 60.0


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
    """One thread, which works on one batch at a time."""

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
        """Make durable what was done to the file system so far. Raises OSError."""
        if self._fs_type == "tmpfs":
            return
        if self._fs_type not in _ONE_LOG:
            self._syscalls.syncfs(self._pool_fd)
            return
        # Change the directory first, because fsync(2) without a change forces no log.
        self._syscalls.utime(self._pool_fd)
        self._syscalls.fsync(self._pool_fd)
