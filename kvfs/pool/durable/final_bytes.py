"""Whether the bytes of a closed block are final: nobody can write them without a new open.

A mapping outlives the close of its file, and with passthrough kvfs sees no request of it. If kvfs
cannot tell, the bytes are not final. A sync of the whole pool marks all that are (``PoolSync``).
"""

import contextlib
import logging
import os
import time
from collections.abc import Callable, Container
from typing import Final, NamedTuple

from kvfs.core.errors import Damaged, NoSpace
from kvfs.core.lifecycle import carries_identity
from kvfs.core.types import FIRST_DRIVE, DriveNo, InodeNo
from kvfs.devices import Device
from kvfs.pool.durable.identities import Identities
from kvfs.pool.open.open_inodes import OpenInodes
from kvfs.storage.extent_bytes import FinalChecksum, lacks_bytes, new_buffer
from kvfs.storage.extents import Extents
from kvfs.storage.extents_at_hand import ExtentsAtHand
from kvfs.storage.index import Index
from kvfs.storage.pool_run import PoolRun
from kvfs.storage.syscalls import Syscalls

_log: Final = logging.getLogger(__name__)

#: What ``open`` returns for a block that may still be written.
MAY_CHANGE: Final = -1


class Marked(NamedTuple):
    """The result of ``mark_all``."""

    #: Whether all blocks have an identity now; otherwise some may still be written.
    all_final: bool
    #: Why a block is not durable; None if all are.
    error: OSError | None


class FinalBytes:
    """Opens the extents of blocks that nobody writes, and marks them durable."""

    def __init__(
        self,
        index: Index,
        extents: Extents,
        at_hand: ExtentsAtHand,
        open_inodes: OpenInodes,
        identities: Identities,
        syscalls: Syscalls,
        final_checksum: FinalChecksum,
        *,
        checksums_s: float,
    ) -> None:
        """*checksums_s*: how long (s) all checksums of one ``mark_all`` may take together."""
        self._index = index
        self._extents = extents
        self._at_hand = at_hand
        self._open_inodes = open_inodes
        self._identities = identities
        self._syscalls = syscalls
        self._checksums_s = checksums_s
        self._final_checksum = final_checksum
        #: Blocks that ``open`` has opened, with their read-only descriptors.
        self._reading: dict[InodeNo, int] = {}
        #: How many blocks were marked here with a checksum, and without.
        self.checksums = self.unchecked = 0

    def open(self, ino: InodeNo) -> int:
        """Return a read-only descriptor of *ino*'s extent; MAY_CHANGE if its bytes are not final.

        From here on a writer needs a new open, which takes the block off the list of what is not
        durable (not_durable.py). End it by ``close``. Raises Damaged, OSError.
        """
        fd = self.open_unwritten(ino) if self.begin_open(ino) else MAY_CHANGE
        if fd != MAY_CHANGE:
            self.note_open(ino, fd)
        return fd

    def begin_open(self, ino: InodeNo) -> bool:
        """Prepare ``open_unwritten`` of *ino*; False if its bytes are not final."""
        opened = self._open_inodes.get(ino)
        if opened is not None:
            if opened.writers or opened.quiet_writers or opened.transfers or opened.allocating:
                return False  # a file server may write by a handle that it never closes
            # The lease test would see a writer; readers open it again.
            opened.close_extent(self._at_hand)
        return True

    def open_unwritten(self, ino: InodeNo) -> int:
        """Do the part of ``open`` that asks the device, after ``begin_open``; in any thread."""
        fd = self._extents.open(ino, os.O_RDONLY)
        if self._extents.may_be_written(fd):
            self._syscalls.close(fd)
            return MAY_CHANGE
        return fd

    def note_open(self, ino: InodeNo, fd: int) -> None:
        """Note that *fd*, from ``open_unwritten``, is open until ``close``."""
        self._reading.setdefault(ino, fd)

    def close(self, ino: InodeNo, fd: int) -> None:
        """Close descriptor *fd* of *ino*, which ``open`` returned."""
        if self._reading.get(ino) == fd:
            del self._reading[ino]
        self._at_hand.close(ino, fd)

    def opened(self, ino: InodeNo) -> int | None:
        """Return the descriptor that ``open`` has of *ino*, None if it has none."""
        return self._reading.get(ino)

    def mark_all(self, sync: Callable[[], None]) -> Marked:
        """Write all missing identities once *sync* has made every byte durable; it blocks.

        Raises what *sync* raises.
        """
        listed = [ino for ino, _ in self._identities.not_durable.unidentified()]
        final = [ino for ino in listed if self._is_final(ino)]
        sync()
        marked = Marked(len(final) == len(listed), None)
        end_s = time.monotonic() + self._checksums_s
        for ino in final:
            try:
                error = self._mark(ino, end_s)
            except Damaged:
                continue  # its extent is missing or broken: its next open reports that
            except (NoSpace, OSError) as refused:
                _log.warning("inode %#x: its identity is not written yet: %s", ino, refused)
                marked = marked._replace(all_final=False)
            else:
                marked = marked._replace(error=marked.error or error)
        return marked

    def _is_final(self, ino: InodeNo) -> bool:
        try:
            fd = self.open(ino)
        except (Damaged, OSError):
            return False
        if fd != MAY_CHANGE:
            self.close(ino, fd)
        return fd != MAY_CHANGE

    def _mark(self, ino: InodeNo, end_s: float) -> OSError | None:
        """Write the identity of *ino*, whose bytes are durable. Raises Damaged, NoSpace, OSError.

        Return the I/O error of its bytes, if one shows only now; no identity is written then.
        """
        fd = self._extents.open(ino, os.O_RDONLY)
        try:
            record = self._index.inode_or_miss(ino)
            if record is not None and carries_identity(record):
                try:
                    holes = lacks_bytes(self._syscalls, fd, record.size_bytes)
                    crc = None if holes else self._checksum(fd, record.size_bytes, end_s)
                except OSError as error:
                    _log.error("inode %#x is not durable: %s", ino, error)
                    return error
                self._identities.write_durable(ino, record, has_holes=holes, content_crc=crc, fd=fd)
                self.checksums += crc is not None
                self.unchecked += crc is None
            self._identities.not_durable.remove(ino)
        finally:
            self._syscalls.close(fd)
        return None

    def _checksum(self, fd: int, size_bytes: int, end_s: float) -> int | None:
        """Return the CRC32C of a block, None if it cannot be made before *end_s*."""
        if time.monotonic() >= end_s:
            return None
        buffer = new_buffer()
        try:
            return self._final_checksum.of(fd, size_bytes, buffer, end_s)
        finally:
            buffer.close()


class PoolSync:
    """Makes a whole pool durable: index, extents and identities together. All of it blocks."""

    def __init__(
        self,
        device: Device,
        index: Index,
        identities: Identities,
        final_bytes: FinalBytes,
        syscalls: Syscalls,
        lost: Container[DriveNo],
        run: PoolRun,
        *,
        read_only: bool,
    ) -> None:
        """*lost*: the drives that have failed."""
        self._lost = lost
        self._run = run
        self._device = device
        self._index = index
        self._identities = identities
        self._final_bytes = final_bytes
        self._syscalls = syscalls
        self._read_only = read_only
        #: The drives of which a sync has failed. The kernel reports a failure only once: the next
        #: sync succeeds (device_errors.py).
        self.failed: Final[set[DriveNo]] = set()

    def at_stop(self) -> Marked:
        """Sync index and extents, because the next start trusts both after a clean stop.

        After a failed sync the page cache cannot be trusted: the kernel may have dropped what it
        could not write. The next start then rebuilds from what is durable.
        """
        try:
            marked = self.all()
            if marked.error is not None:
                self._run.distrust()
            return marked
        except (NoSpace, OSError):
            with contextlib.suppress(OSError):
                self._run.distrust()
            raise

    def all(self) -> Marked:
        """Make all published blocks and all names durable. A read-only pool has nothing to write.

        Call ``background.hurry`` before. Raises NoSpace, OSError.
        """
        if self._read_only:
            return Marked(True, None)
        self._index.settle()
        marked = self._final_bytes.mark_all(self.written)
        drives = [DriveNo(number) for number in range(len(self._device.pool_fds))]
        for drive in drives:
            self._identities.attributes.begin_flush(drive)
        self._sync_drives()  # for the identities
        for drive in drives:
            self._identities.attributes.end_flush(drive)
        self._identities.not_durable.forget_identified()
        return marked

    def written(self) -> None:
        """Make durable what was written to index, extents and identities; call it in a thread.

        Call ``background.hurry`` before, which writes queued identities, and ``index.settle``,
        which commits waiting rows. Raises OSError.
        """
        try:
            self._index.sync()
        except OSError:
            self.failed.add(FIRST_DRIVE)
            raise
        self._sync_drives()

    def _sync_drives(self) -> None:
        """Sync each drive that serves, also after one that fails. Raises the first OSError."""
        errors: list[OSError] = []
        for number, pool_fd in enumerate(self._device.pool_fds):
            if number in self._lost:
                continue
            try:
                self._syscalls.syncfs(pool_fd)
            except OSError as error:
                self.failed.add(DriveNo(number))
                errors.append(error)
        if errors:
            raise errors[0]
