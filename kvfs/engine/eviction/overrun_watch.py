"""Drafts that grow without asking: checked at every tick, and stopped when no space is left.

A passthrough writer allocates in the backing file system. What it takes beyond its reserve is
found here; the next of it is kept free of others. The last resort, when it took what was not there
and nothing can go: its bytes are given back, its close is ENOSPC and its name goes.
"""

import logging
from typing import Final

from kvfs.core.errors import NoSpace
from kvfs.core.headroom import UNWATCHED_BYTES, lacking_bytes
from kvfs.core.lifecycle import State, is_temporary
from kvfs.core.types import InodeNo
from kvfs.engine.eviction.reclaim import Reclaim
from kvfs.pool.allocator import Allocator
from kvfs.pool.open_inodes import OpenInode
from kvfs.pool.pool import Pool

_log: Final = logging.getLogger(__name__)
#: Drafts looked at in one tick, at 2 us each; more take turns.
_LOOKS_A_TICK: Final = 512
#: What a draft with a temporary name is after its close; PUBLISHED where its maker gets no lease.
_GIVEN_UP: Final = frozenset({State.LEASED, State.PUBLISHED, State.ORPHAN})


class OverrunWatch:
    """Looks at what is open for writing."""

    def __init__(self, pool: Pool, allocator: Allocator, reclaim: Reclaim) -> None:
        self._pool = pool
        self._allocator = allocator
        self._growth = allocator.growth
        self._reclaim = reclaim
        self._skip = 0
        self.overruns = 0
        self.given_up = 0

    def tick(self, now_s: float) -> None:
        """Look at the drafts; stop some if the bound would be overstepped."""
        pool = self._pool
        written = pool.open_inodes.written
        due = self._due()
        lacking = sum(self._growth.look(opened, now_s) for opened in due)
        kept = max((opened.outgrowing_bytes for opened in due), default=0)
        pool.space.lacking_bytes = max(lacking, kept)
        if written and pool.space.unclaimed_bytes < 0:
            self._hold_the_bound()

    def look_at_closing(self, opened: OpenInode) -> None:
        """Account what *opened*, which may be whole now, took since the last look, and stop some.

        What is closed within a tick would else stay above the bound, since nobody stops it then.
        """
        self._growth.look(opened, self._pool.monotonic_s())
        if self._pool.space.overstepped_bytes:
            self._hold_the_bound()

    def look_at_removal(self, ino: InodeNo) -> None:
        """Count a draft that its writer takes away: the device may have refused its bytes.

        A refusal of a passthrough write is seen by nobody else. It comes only after all that was
        reserved is written, and while there is little room.
        """
        pool = self._pool
        if not pool.kernel.writers_run_free or pool.space.unclaimed_bytes >= UNWATCHED_BYTES:
            return
        record = pool.index.inode_or_miss(ino)
        if record is None or record.state not in _GIVEN_UP or not is_temporary(record.name):
            return
        usual_bytes = pool.ready.forecast.usual_bytes(record.parent)
        self.given_up += 0 < usual_bytes <= record.size_bytes

    def _hold_the_bound(self) -> None:
        pool = self._pool
        try:
            self._allocator.require_space(0)
        except NoSpace:
            # What they will take next is a guess: nobody is stopped for that.
            if pool.space.overstepped_bytes and not self._reclaim.hopeful:
                self._stop_some(list(pool.open_inodes.written.values()))

    def _due(self) -> list[OpenInode]:
        written = list(self._pool.open_inodes.written.values())
        if len(written) <= _LOOKS_A_TICK:
            return written
        start = self._skip % len(written)
        self._skip = start + _LOOKS_A_TICK
        return (written[start:] + written[:start])[:_LOOKS_A_TICK]

    def _stop_some(self, written: list[OpenInode]) -> None:
        """Give back what drafts took that is not there, the greediest first."""
        space = self._pool.space
        growing = [
            opened
            for opened in written
            if opened.taken_unasked > 0 and not opened.overrun and self._may_be_stopped(opened)
        ]
        growing.sort(key=lambda opened: (opened.outgrown, opened.taken_unasked), reverse=True)
        for opened in growing:
            if not space.overstepped_bytes:
                return
            _log.warning("inode %#x outgrew the pool: its writer gets ENOSPC", opened.ino)
            opened.outrun()
            self.overruns += 1
            lacking = lacking_bytes(opened.outgrown, unreserved=opened.unreserved)
            space.lacking_bytes -= min(space.lacking_bytes, lacking)
            opened.outgrown = 0
            self._growth.empty(opened)

    def _may_be_stopped(self, opened: OpenInode) -> bool:
        """Whether nobody loses anything but the writer: a draft under the name it was made with."""
        if opened.renamed or opened.readers or not opened.unfinished:
            return False
        if opened.gone is not None:
            return True
        record = self._pool.index.inode_or_miss(opened.ino)
        return record is not None and record.state == State.DRAFT  # a slab asked for its room
