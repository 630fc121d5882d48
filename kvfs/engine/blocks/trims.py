"""Trims: after the last close the unused reserve of a block is freed.

The device's thread does it, so the index gets what the extent will hold: as many bytes as the block
has, if it has no holes. What is being freed counts as coming. If the extent turns out to hold
something else, the record is corrected afterwards.
"""

import contextlib
import functools
import logging
from collections.abc import Callable
from typing import Final, NamedTuple

from kvfs.core.changed import Changed, Why
from kvfs.core.lifecycle import State
from kvfs.core.types import InodeNo, InodeRecord, round_up
from kvfs.pool.open.open_inodes import OpenInode
from kvfs.pool.open.served_handles import Shown
from kvfs.pool.pool import Pool
from kvfs.storage.syscalls import Syscalls

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
        # What was written has just been measured.
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
            pool.note_allocated(opened, held_bytes)
            return held_bytes
        trim = functools.partial(self._trim, opened.fd, record.size_bytes, beyond, sparse)
        device = pool.background.device
        if not device.is_serving:
            left_bytes = trim()
            pool.note_allocated(opened, left_bytes)
            return left_bytes
        pool.note_allocated(opened, left_bytes)
        freed_bytes = held_bytes - left_bytes
        pool.space.taken.pending_delete_bytes += freed_bytes
        pool.space.taken.coming_bytes += freed_bytes
        work = functools.partial(self._try, trim, held_bytes)
        end = functools.partial(self._end, opened, left_bytes, freed_bytes)
        if opened.quiet_writers:
            opened.begin_touch()
            look = functools.partial(_shown, pool.syscalls, opened.fd)
            device.submit(
                lambda: _Touch(look(), work(), look()), functools.partial(_end_touch, opened, end)
            )
            return left_bytes
        device.submit(
            work,
            end,
            # It has holes, and only then is it known what it holds.
            at_once=sparse and held_bytes < record.size_bytes,
        )
        return left_bytes

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

    def _end(self, opened: OpenInode, left_bytes: int, freed_bytes: int, held_bytes: int) -> None:
        """Correct what was foreseen to be left: *held_bytes* are."""
        space = self._pool.space.taken
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
                pool.note_allocated(opened, held_bytes)
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


class _Touch(NamedTuple):
    """A trim of a block that a file server may still write: what the extent showed around it.

    The trim sets the mtime, by which a late write shows.
    """

    before: Shown
    left_bytes: int
    after: Shown


def _shown(syscalls: Syscalls, fd: int) -> Shown:
    status = syscalls.fstat(fd)
    return status.st_size, status.st_mtime_ns


def _end_touch(opened: OpenInode, end: Callable[[int], None], touch: _Touch) -> None:
    opened.end_touch(touch.before, touch.after)
    end(touch.left_bytes)
