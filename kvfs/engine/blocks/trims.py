"""Trims: after the last close the unused reserve of a block is freed.

The device's thread does it, so the index gets what the extent will hold: as many bytes as the block
has, if it has no holes. What is being freed counts as coming. If the extent turns out to hold
something else, the record is corrected afterwards.
"""

import contextlib
import functools
import logging
from typing import Final, NamedTuple

from kvfs.core.changed import Changed, Why
from kvfs.core.lifecycle import State
from kvfs.core.types import InodeNo, InodeRecord, round_up
from kvfs.pool.open.open_inodes import OpenInode, Shown
from kvfs.pool.pool import Pool

_log: Final = logging.getLogger(__name__)


class Trims:
    """Frees the unused reserves of one pool."""

    def __init__(self, pool: Pool) -> None:
        self._pool = pool

    def begin(self, opened: OpenInode, before: InodeRecord, record: InodeRecord) -> int:
        """Free the unused reserve of *opened*, measured as *record*; return what it will hold.

        *before* is its record in the index. Raises OSError, while no requests are served.
        """
        pool = self._pool
        # A record that differs has its size from fstat a moment ago.
        held_bytes = (
            pool.extents.allocated_bytes(opened.fd) if record is before else record.allocated_bytes
        )
        is_slab = before.state == State.SLAB_DRAFT
        whole_bytes = round_up(record.size_bytes)
        beyond = held_bytes > whole_bytes and not is_slab
        left_bytes = whole_bytes if beyond else held_bytes
        # A slab keeps its reserve, which it asked for.
        sparse = bool(opened.created_in) and not is_slab
        if not beyond and not (sparse and held_bytes < record.size_bytes):
            opened.note_allocated(held_bytes, pool.space.of(opened.ino))
            return held_bytes
        trim = functools.partial(self._trim, opened.fd, record.size_bytes, beyond, sparse)
        device = pool.background.of(opened.ino).device
        if not device.is_serving:
            left_bytes = trim()
            opened.note_allocated(left_bytes, pool.space.of(opened.ino))
            return left_bytes
        opened.note_allocated(left_bytes, pool.space.of(opened.ino))
        freed_bytes = held_bytes - left_bytes
        space = pool.space.of(opened.ino)
        space.pending_delete_bytes += freed_bytes
        space.coming_bytes += freed_bytes
        touches = opened.quiet_writers > 0
        if touches:
            opened.begin_touch()
        device.submit(
            functools.partial(self._trim_seen, trim, held_bytes, opened.fd, touches),
            functools.partial(self._end, opened, left_bytes, freed_bytes),
            # A block with holes: how much it holds is known only once it is trimmed.
            at_once=sparse and held_bytes < record.size_bytes,
        )
        return left_bytes

    def _trim_seen(
        self, trim: "functools.partial[int]", held_bytes: int, fd: int, touches: bool
    ) -> "_Trimmed":
        """Do *trim* in the device's thread; if it *touches*, note what the extent shows around it.

        Raises nothing that the device says: whoever waits for the end must hear of it.
        """
        before = self._shown(fd) if touches else None
        left_bytes = self._try(trim, held_bytes)
        return _Trimmed(left_bytes, touches, before, self._shown(fd) if touches else None)

    def _shown(self, fd: int) -> Shown | None:
        try:
            status = self._pool.syscalls.fstat(fd)
        except OSError:  # its file system has shut itself down
            return None
        return status.st_size, status.st_mtime_ns

    def _try(self, trim: "functools.partial[int]", held_bytes: int) -> int:
        """Return what *trim* leaves: all, if it fails, for the block is whole anyway."""
        try:
            return trim()
        except OSError as error:
            _log.warning("a reserve is not freed: %s", error)
            return held_bytes

    def _trim(self, fd: int, size_bytes: int, beyond: bool, sparse: bool) -> int:
        """Free what is reserved and not written behind *fd*; return the bytes that it holds.

        *beyond*: there is some beyond *size_bytes*; if *sparse*, perhaps in holes before it, too.
        Raises OSError.
        """
        extents = self._pool.extents
        left_bytes = extents.trim(fd, size_bytes) if beyond else extents.allocated_bytes(fd)
        if not sparse or left_bytes >= size_bytes:
            return left_bytes
        # An extent that a process maps may still be written. An error is ignored: the block is
        # whole anyway.
        with contextlib.suppress(OSError):
            if not extents.in_use(fd):
                extents.trim_holes(fd, size_bytes)
        return extents.allocated_bytes(fd)

    def _end(
        self, opened: OpenInode, left_bytes: int, freed_bytes: int, trimmed: "_Trimmed"
    ) -> None:
        """Correct what was foreseen to be left, if *trimmed* left something else."""
        space, held_bytes = self._pool.space.of(opened.ino), trimmed.left_bytes
        if trimmed.touches:
            opened.end_touch(trimmed.before, trimmed.after)
        space.pending_delete_bytes -= freed_bytes
        space.coming_bytes -= freed_bytes
        if held_bytes != left_bytes:
            self._correct(opened.ino, left_bytes, held_bytes)

    def _correct(self, ino: InodeNo, left_bytes: int, held_bytes: int) -> None:
        """Record that *ino* holds *held_bytes*, unless somebody uses it anew. Atomic."""
        pool = self._pool
        opened, record = pool.open.inodes.get(ino), pool.index.inode_or_miss(ino)
        if opened is not None and (opened.writers or opened.gone is not None):
            if opened.allocated_bytes == left_bytes:
                opened.note_allocated(held_bytes, pool.space.of(opened.ino))
            return
        if record is None or record.allocated_bytes != left_bytes:
            return
        corrected = record._replace(allocated_bytes=held_bytes)
        used_bytes = pool.counters.used_bytes + held_bytes - left_bytes
        with pool.change(pool.counters._replace(used_bytes=used_bytes)) as change:
            change.write(Changed(ino, record, corrected, Why.TRIMMED))
        pool.kernel.attributes_corrected(ino)
        if opened is not None:
            opened.hold(held_bytes)


class _Trimmed(NamedTuple):
    """What a trim has left, and what the extent showed around it; None: nothing.

    The trim sets the mtime, by which a late write of a file server shows.
    """

    left_bytes: int
    touches: bool
    before: Shown | None
    after: Shown | None
