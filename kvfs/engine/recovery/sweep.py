"""After an unclean stop: finds stray files and writes missing identities.

A stray with an identity is kept aside for a day, unless its space is needed: it is a whole block or
directory, and may have lost its name by an error (kvfs/pool/space/unlink_queue.py). One without an
identity has no name that it could get back, and is removed; so is one on a drive that was away.

It runs while requests are served, in the thread for long jobs, a few files at a time. It cannot
race with new files: it looks only at numbers below the first one that this server may hand out, and
a number is never used again. The thread only finds files. The loop's thread decides which are
strays and which identities to write: between its steps each inode is in one of the tables.
"""

import functools
import logging
from collections import deque
from collections.abc import Callable, Iterator
from typing import Final

from kvfs.core.lifecycle import State, carries_identity
from kvfs.core.records import INODE_PREFIX, parse_inodes
from kvfs.core.types import InodeNo, InodeRecord
from kvfs.engine.recovery.file_claims import is_identified, is_identified_as
from kvfs.pool.pool import Pool
from kvfs.storage.extents import BROKEN_FILE

_log: Final = logging.getLogger(__name__)

#: Files in one step, some 3 ms; other long jobs run in between.
_STEP_FILES: Final = 256
#: Identities renewed in one tick, on the loop's thread: 10 us each.
_RENEWED_A_TICK: Final = 64
#: A search that failed begins again after this time.
_FAILED_REST_S: Final = 60.0
#: Above every inode number.


class Sweep:
    """One sweep of a pool; it is ``done`` when nothing is left to find or to write."""

    def __init__(self, pool: Pool) -> None:
        self._pool = pool
        self._outdated: deque[InodeNo] = deque()
        #: Files that look like strays, and what removes each or keeps it aside.
        self._suspects: deque[tuple[InodeNo, Callable[[InodeNo], None]]] = deque()
        self._work: Iterator[int] = iter(())
        self._searching = False
        #: Whether inodes of this run are left out: they get an identity without the sweep.
        self._skips_new = True
        #: How many gaps in the list of what is not durable the search closes; whether it failed.
        self._gaps = 0
        self._failed = False
        #: Whether the list was kept by the last server, so that its waiting attributes are in it.
        self._is_known = pool.durable.undurable_known
        #: When another search may begin after one that failed.
        self.rests_until_s = 0.0
        self.done = True
        self.removed = 0
        self.renewed = 0

    def start(self) -> None:
        """Begin; ``Store.run_due`` continues it."""
        self._work = self._steps()
        self._skips_new = True
        self._begin()

    def find_unidentified(self) -> None:
        """Search only for blocks without an identity, which a full list left out."""
        self._work = self._identity_steps()
        self._skips_new = False
        self._begin()

    def _begin(self) -> None:
        self._searching, self.done, self._failed = True, False, False
        self._gaps = self._pool.durable.not_durable.gaps
        self._pool.background.submit_long(self._search)

    def run_due(self) -> None:
        """Deal with some of what was found; on the loop's thread."""
        for _ in range(min(len(self._suspects), _RENEWED_A_TICK)):
            ino, remove = self._suspects.popleft()
            if self._is_stray(ino):  # and always will be
                self._pool.background.submit_long(functools.partial(remove, ino))
                self.removed += 1
        for _ in range(min(len(self._outdated), _RENEWED_A_TICK)):
            if not self._pool.durable.not_durable.has_room:
                break
            ino = self._outdated.popleft()
            record = self._pool.index.inode_or_miss(ino)
            if record is None or (self._is_known and ino in self._pool.durable.not_durable):
                continue  # the pass writes its identity
            self._pool.durable.identities.write_missing(ino, record)
            self.renewed += 1
        if not self._searching and not self._outdated and not self._suspects:
            self.done = True
            if self._failed:
                self.rests_until_s = self._pool.monotonic_s() + _FAILED_REST_S
                self._pool.durable.not_durable.failed_searches += 1
            else:
                self._pool.durable.not_durable.close_gaps(self._gaps)
                self._pool.durable.identities.attributes.note_all_listed()
                self._believe()
            _log.info(
                "sweep: %d strays removed or kept aside, %d identities", self.removed, self.renewed
            )

    def _believe(self) -> None:
        """Let drives that were away be as the others: what no name leads to there is gone."""
        pool = self._pool
        if pool.run.stale:
            base_ns = pool.age_clock.base_ns
            pool.background.submit_long(lambda: pool.run.believe(base_ns))

    def _search(self) -> None:
        """Do one step, in the thread. A failure ends the sweep and is counted (background.py).

        The next start then sweeps again. A search to close gaps is repeated after a while.
        """
        more, self._failed = False, True
        try:
            more = next(self._work, None) is not None
            self._failed = False
        finally:
            if not more:
                self._searching = False
        if more:
            self._pool.background.submit_long(self._search)

    def _steps(self) -> Iterator[int]:
        """Do the sweep; yield now and then."""
        extents = self._pool.extents
        for files, remove, of_node in (
            (extents.scan(), extents.unlink, False),
            (extents.scan_nodes(), extents.forget_node, True),
        ):
            keep = functools.partial(self._keep, of_node=of_node)
            for number, ino in enumerate(files, 1):
                if self._is_stray(ino):
                    keeps = self._pool.space.strays.keeps
                    keeps = keeps and self._pool.numbers.drive(ino) not in self._pool.run.stale
                    keeps = keeps and is_identified(extents, ino, of_node=of_node)
                    self._suspects.append((ino, keep if keeps else remove))
                if number % _STEP_FILES == 0:
                    yield number
        yield from self._identity_steps()

    def _identity_steps(self) -> Iterator[int]:
        """Look at the identity of each inode; yield now and then."""
        for rows in self._pool.index.walk(INODE_PREFIX, _STEP_FILES, committed=True):
            for ino, record in parse_inodes(rows):
                if record is not None and self._is_outdated(ino, record):
                    self._outdated.append(ino)
            yield len(rows)

    def _keep(self, ino: InodeNo, *, of_node: bool) -> None:
        """Move a stray aside, in the thread; the loop counts it."""
        strays = self._pool.space.strays
        stray = strays.move_aside(ino, self._pool.age_clock.now_ns(), of_node=of_node)
        if stray is not None:
            self._pool.background.hand_over(lambda: strays.add(stray))

    def _is_stray(self, ino: InodeNo) -> bool:
        """Whether file *ino* belongs to no inode; only a guess outside the loop's thread."""
        pool = self._pool
        if pool.numbers.is_new(ino) or pool.index.knows(ino):
            return False
        return ino not in pool.open.inodes and ino not in pool.departures.removed

    def _is_outdated(self, ino: InodeNo, record: InodeRecord) -> bool:
        if record.state == State.ALIAS or (self._skips_new and self._pool.numbers.is_new(ino)):
            return False
        if not carries_identity(record) and self._pool.durable.identities.attributes.may_lack(ino):
            return True  # no identity tells whether its file has its attributes
        try:
            return not is_identified_as(self._pool.extents, ino, record)
        except OSError as error:
            if error.errno not in BROKEN_FILE:
                raise
            _log.warning("inode %#x: its file is broken: %s", ino, error.strerror)
            return False  # its next open finds that
