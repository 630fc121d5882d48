"""How much passthrough writers have allocated since the last check, by file.

They allocate in the backing file system, without asking kvfs for space.
"""

import logging
from itertools import islice
from typing import Final

from kvfs.core.headroom import lacking_bytes
from kvfs.pool.open_inodes import OpenInode
from kvfs.pool.pool import Pool

_log: Final = logging.getLogger(__name__)
#: Files checked before a new draft is created. There are more such files only while there is space
#: for all of them until the next tick.
_LOOKS_A_DRAFT: Final = 32


class DraftGrowth:
    """Checks the files that are open for writing."""

    def __init__(self, pool: Pool) -> None:
        self._pool = pool

    def look_at_runners(self) -> None:
        """Count what writers without a limit took, before another one is permitted.

        If there are many, check only those that were not checked for longest.
        """
        runners = self._pool.open_inodes.runners
        now_s = self._pool.monotonic_s()
        for ino in list(islice(runners, _LOOKS_A_DRAFT)):
            opened = runners.pop(ino)
            if opened.runs_free:
                self.look(opened, now_s)
                runners[ino] = opened  # moved to the end

    def look(self, opened: OpenInode, now_s: float) -> int:
        """Count the bytes that *opened* took since the last check; return what it may take next."""
        pool = self._pool
        if (
            opened.fd < 0
            or opened.through_daemon
            or not pool.kernel.writers_run_free
            or opened.allocating
        ):
            return 0  # each of its writes asks for space and is counted
        if opened.overrun:
            self.empty(opened)
        try:
            allocated_bytes = pool.extents.allocated_bytes(opened.fd)
        except OSError as error:
            _log.warning("inode %#x: %s", opened.ino, error)
            return 0
        growth_bytes = allocated_bytes - opened.allocated_bytes
        pool.note_allocated(opened, allocated_bytes)
        if opened.overrun:
            return 0
        if growth_bytes > 0:
            pool.headroom.note(growth_bytes, now_s)
        opened.outgrown = max(growth_bytes, 0)
        opened.taken_unasked += opened.outgrown
        return lacking_bytes(opened.outgrown, unreserved=opened.unreserved)

    def empty(self, opened: OpenInode) -> None:
        """Free all bytes of *opened*, because it outgrew the pool."""
        try:
            left_bytes = self._pool.extents.empty(opened.fd)
        except OSError as error:
            _log.warning("inode %#x keeps its bytes: %s", opened.ino, error)
            return
        self._pool.note_allocated(opened, left_bytes)
