"""Takes checkpoints of the index while the pool is in use, so that a power loss costs no rebuild.

A checkpoint costs what changed since the one before: the pages that LMDB wrote meanwhile go to the
device. Until the next checkpoint LMDB does not reuse pages that are freed, some 20 KiB per commit.
The limit is on what is freed, not on how much the file grows: pages freed earlier only delay the
growth, and the file never shrinks. If space runs short, the checkpoint is given up, since deletes
need the space.
"""

import logging
from collections.abc import Callable
from typing import Final, NamedTuple

from kvfs.core.errors import NO_SPACE, KvfsError, NoSpace
from kvfs.core.index_room import KEPT_BYTES
from kvfs.core.settings import Settings
from kvfs.core.types import InodeNo
from kvfs.pool.open.open_inodes import OpenInodes
from kvfs.pool.open.ready_extents import ReadyExtents
from kvfs.storage.background import Aside
from kvfs.storage.index import Index
from kvfs.storage.index_checkpoint import (
    Checkpoint,
    HeldCommit,
    is_usable,
    read_checkpoint,
    remove_checkpoint,
    write_checkpoint,
)
from kvfs.storage.inode_numbers import InodeNumbers
from kvfs.storage.syscalls import Syscalls

_log: Final = logging.getLogger(__name__)

#: The most bytes freed between two checkpoints, at most 1/_FREED_PART of the capacity, since the
#: file takes space from blocks; more makes the next one due at once. However often one is taken,
#: each page that a commit wrote goes to the device once; CHECKPOINT and XFS's log come on top.
_FREED_MAX_BYTES: Final = 256 << 20
_FREED_PART: Final = 64
_FREED_LEAST_BYTES: Final = 4 << 20
#: What a commit rewrites, and frees: some leaf pages and the branch pages above them.
_COMMIT_BYTES: Final = 20 << 10


class _Outcome(NamedTuple):
    """How writing a checkpoint ended. *torn*: CHECKPOINT may name the new or the old one."""

    error: Exception | None = None
    torn: bool = False


class Checkpoints:
    """The present checkpoint, and the one that is being written."""

    def __init__(
        self,
        pool_fd: int,
        index: Index,
        numbers: InodeNumbers,
        ready: ReadyExtents,
        open_inodes: OpenInodes,
        unfinished: set[InodeNo],
        settings: Settings,
        capacity_bytes: int,
        syscalls: Syscalls,
        monotonic_s: Callable[[], float],
    ) -> None:
        """Hold the commit that CHECKPOINT names, or remove CHECKPOINT. *index* is still unchanged.

        *unfinished* is the pool's set of drafts and rewritten blocks. Raises OSError.
        """
        self._pool_fd = pool_fd
        self._index = index
        self._numbers = numbers
        self._ready = ready
        self._open_inodes = open_inodes
        self._unfinished = unfinished
        self._syscalls = syscalls
        self._monotonic_s = monotonic_s
        self._interval_s = settings.checkpoint_s
        self._freed_max_bytes = max(
            _FREED_LEAST_BYTES, min(_FREED_MAX_BYTES, capacity_bytes // _FREED_PART)
        )
        self._kept_bytes = min(KEPT_BYTES, settings.index_preallocate_bytes // 4)
        self._held: HeldCommit | None = None
        self._next: HeldCommit | None = None
        self._aside: Aside[_Outcome] = Aside("kvfs-checkpoint")
        self._begun_s = self._tried_s = -self._interval_s
        #: Whether data.mdb could not be written. The former checkpoint is still right, but later
        #: syncs may succeed without having written all.
        self._broken = False
        self.taken = self.failures = 0
        #: When the present checkpoint was begun or found (monotonic); None: there is none.
        self.kept_s: float | None = None
        if not settings.read_only:
            self._hold_former()

    def _hold_former(self) -> None:
        former = read_checkpoint(self._pool_fd, self._syscalls)
        if former is not None and self._interval_s > 0:
            held = self._index.hold()
            if is_usable(former, held):
                self._held, self.kept_s = held, self._monotonic_s()
                return
            held.end()
        remove_checkpoint(self._pool_fd, self._syscalls)

    def run_due(self, now_s: float) -> None:
        """Begin a checkpoint that is due, or keep one that is complete. Raises NoSpace, OSError."""
        if self._aside.busy:
            self._finish()
        if self._held is not None and self._index.spare_bytes() < 2 * self._kept_bytes:
            _log.info("no room for a checkpoint of the index; deletes need it")
            self.give_up()
        if not self._aside.busy and self._is_due(now_s):
            self._begin(now_s)

    def _is_due(self, now_s: float) -> bool:
        if self._broken or self._interval_s <= 0:
            return False
        since_s = now_s - self._tried_s
        if self._held is None:
            roomy = self._index.spare_bytes() >= 4 * self._kept_bytes
            return roomy and since_s >= min(1.0, self._interval_s)
        freed_bytes = (self._index.transaction() - self._held.transaction) * _COMMIT_BYTES
        if freed_bytes == 0:
            return False
        return since_s >= self._interval_s or freed_bytes >= self._freed_max_bytes

    def _begin(self, now_s: float) -> None:
        self._tried_s = now_s
        held, checkpoint = self._hold()
        self._next, self._begun_s = held, now_s
        self._aside.start(lambda: self._write(held, checkpoint))

    def _hold(self) -> tuple[HeldCommit, Checkpoint]:
        # Atomic: the commit and the pending inodes are of the same moment.
        held = self._index.hold()
        written = {
            ino
            for ino, opened in self._open_inodes.items()
            if opened.writers and opened.gone is None
        }
        pending = self._unfinished | self._ready.numbers() | written
        checkpoint = Checkpoint(
            held.data_ino,
            held.transaction,
            self._numbers.next,
            tuple(sorted(pending)),
            held.meta,
        )
        return held, checkpoint

    def _write(self, held: HeldCommit, checkpoint: Checkpoint) -> _Outcome:
        """Make the commit durable, then write CHECKPOINT; runs in the thread."""
        try:
            held.make_durable()
        except OSError as error:
            self._broken = True
            return _Outcome(error)
        try:
            write_checkpoint(self._pool_fd, self._syscalls, checkpoint)
        except (KvfsError, OSError) as error:
            full = isinstance(error, NoSpace) or getattr(error, "errno", 0) in NO_SPACE
            return _Outcome(error, torn=not full)
        return _Outcome()

    def _finish(self) -> None:
        outcome = self._aside.pop_result()
        if outcome is None:
            return
        done, self._next = self._next, None
        assert done is not None
        if outcome.error is not None:
            self.failures += 1
            _log.warning("no checkpoint of the index: %s", outcome.error)
            if outcome.torn:
                self._broken, self._next = True, done  # both stay held
            else:
                done.end()
            return
        if self._held is not None:
            self._held.end()
        self._held, self.kept_s = done, self._begun_s
        self.taken += 1

    def describe(self, now_s: float) -> dict[str, float | int | None]:
        """Return what `kvfs status` shows: the age (s) of the present checkpoint, and counts."""
        age_s = None if self.kept_s is None else round(now_s - self.kept_s, 1)
        return {"age_s": age_s, "taken": self.taken, "failures": self.failures}

    def give_up(self) -> None:
        """Remove CHECKPOINT, and let LMDB use all free pages. Waits for one flush of the device.

        Raises OSError.
        """
        self._aside.join()
        self._finish()
        remove_checkpoint(self._pool_fd, self._syscalls)
        self.end()
        self.kept_s = None

    def keep_last(self) -> None:
        """Write the last commit, which was made durable just now, to CHECKPOINT. Raises OSError."""
        self._aside.join()
        self._finish()
        if self._broken or self._interval_s <= 0:
            return
        held, checkpoint = self._hold()
        try:
            if self._held is None or self._held.transaction != held.transaction:
                write_checkpoint(self._pool_fd, self._syscalls, checkpoint)
        finally:
            held.end()

    def end(self) -> None:
        """Hold no commit any more; CHECKPOINT stays."""
        self._aside.join()
        for held in (self._held, self._next):
            if held is not None:
                held.end()
        self._held = self._next = None
