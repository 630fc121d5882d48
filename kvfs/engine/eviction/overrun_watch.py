"""Drafts that grow without asking: checked at every tick, and stopped when no space is left.

A passthrough writer allocates in the backing file system. What it takes beyond its reserve is
found here; the next of it is kept free of others. The last resort, when it took what was not there
and nothing can go: its bytes are given back, its close is ENOSPC and its name goes.
"""

import logging
from itertools import islice
from typing import TYPE_CHECKING, Final

from kvfs.core.errors import NoSpace
from kvfs.core.headroom import UNWATCHED_BYTES, lacking_bytes
from kvfs.core.lifecycle import State, is_temporary
from kvfs.core.types import InodeNo
from kvfs.pool.open_inodes import OpenInode
from kvfs.pool.pool import Pool

if TYPE_CHECKING:
    from collections.abc import Callable

_log: Final = logging.getLogger(__name__)
#: Drafts looked at in one tick, at 2 us each; more take turns.
_LOOKS_A_TICK: Final = 512
#: And before one more is made: many at a time run only where there is room for them until a tick.
_LOOKS_A_DRAFT: Final = 32
#: What a draft with a temporary name is after its close; PUBLISHED where its maker gets no lease.
_GIVEN_UP: Final = frozenset({State.LEASED, State.PUBLISHED, State.ORPHAN})


class OverrunWatch:
    """Looks at what is open for writing."""

    def __init__(self, pool: Pool) -> None:
        self._pool = pool
        #: Whether room may come in a moment that could not be made at once.
        self.more_may_go: Callable[[], bool] = lambda: False
        self._skip = 0
        self.overruns = 0
        self.given_up = 0

    def tick(self, now_s: float) -> None:
        """Look at the drafts; stop some if the bound would be overstepped."""
        pool = self._pool
        written = pool.open_inodes.written
        due = self._due()
        lacking = sum(self._look(opened, now_s) for opened in due)
        kept = max((opened.outgrowing_bytes for opened in due), default=0)
        pool.space.lacking_bytes = max(lacking, kept)
        if written and pool.space.unclaimed_bytes < 0:
            self._hold_the_bound()

    def look_at_closing(self, opened: OpenInode) -> None:
        """Account what *opened*, which may be whole now, took since the last look, and stop some.

        What is closed within a tick would else stay above the bound, since nobody stops it then.
        """
        self._look(opened, self._pool.monotonic_s())
        if self._pool.space.overstepped_bytes:
            self._hold_the_bound()

    def look_at_removal(self, ino: InodeNo) -> None:
        """Count a draft that its writer takes away: the device may have refused its bytes.

        A refusal of a passthrough write is seen by nobody else. It comes only after all that was
        reserved is written, and while there is little room.
        """
        pool = self._pool
        if not pool.writers_run_free or pool.space.unclaimed_bytes >= UNWATCHED_BYTES:
            return
        record = pool.index.inode_or_miss(ino)
        if record is None or record.state not in _GIVEN_UP or not is_temporary(record.name):
            return
        usual_bytes = pool.ready.forecast.usual_bytes(record.parent)
        self.given_up += 0 < usual_bytes <= record.size_bytes

    def _hold_the_bound(self) -> None:
        pool = self._pool
        try:
            pool.require_space(0)
        except NoSpace:
            # What they will take next is a guess: nobody is stopped for that.
            if pool.space.overstepped_bytes and not self.more_may_go():
                self._stop_some(list(pool.open_inodes.written.values()))

    def look_at_runners(self) -> None:
        """Account what those took who may take any amount; before one more is let to.

        Not of all when they are many: those that were not looked at for longest.
        """
        runners = self._pool.open_inodes.runners
        now_s = self._pool.monotonic_s()
        for ino in list(islice(runners, _LOOKS_A_DRAFT)):
            opened = runners.pop(ino)
            if opened.runs_free:
                self._look(opened, now_s)
                runners[ino] = opened  # behind those whose turn is next

    def _due(self) -> list[OpenInode]:
        written = list(self._pool.open_inodes.written.values())
        if len(written) <= _LOOKS_A_TICK:
            return written
        start = self._skip % len(written)
        self._skip = start + _LOOKS_A_TICK
        return (written[start:] + written[:start])[:_LOOKS_A_TICK]

    def _look(self, opened: OpenInode, now_s: float) -> int:
        """Account what *opened* took since the last look; return what it will take next."""
        pool = self._pool
        if opened.fd < 0 or opened.through_daemon or not pool.writers_run_free or opened.allocating:
            return 0  # each of its writes asks, and accounts itself
        if opened.overrun:
            self._empty(opened)
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
            self._empty(opened)

    def _may_be_stopped(self, opened: OpenInode) -> bool:
        """Whether nobody loses anything but the writer: a draft under the name it was made with."""
        if opened.renamed or opened.readers or not opened.unfinished:
            return False
        if opened.gone is not None:
            return True
        record = self._pool.index.inode_or_miss(opened.ino)
        return record is not None and record.state == State.DRAFT  # a slab asked for its room

    def _empty(self, opened: OpenInode) -> None:
        try:
            left_bytes = self._pool.extents.empty(opened.fd)
        except OSError as error:
            _log.warning("inode %#x keeps its bytes: %s", opened.ino, error)
            return
        self._pool.note_allocated(opened, left_bytes)
