"""Closes by writers: which of them publishes a block, and which do not prove it whole.

A store closes its file under a temporary name, and renames it right after. Both are one change of
the index: the close waits for the rename, for a tick at most, as long as all that wait hold a small
part of the pool, since they cannot be evicted. Until then the block is a draft that
all may see, with the writer's handle counted, so that its size and times come from the extent.
Whoever opens or changes it meanwhile has it published first.

close(2) has returned already, so a failure cannot be reported to the writer. A whole block must not
be lost because one write to the index failed. So it is tried again, and the name is removed only
if that keeps failing.

A block is finished if the process that closes it stays alive, or ends by itself. But that process
may be unknown: it is in another pid namespace, or no descriptor was left to check it. And a file
may be written after its close, by io_uring or a mapping: then RELEASE comes when that ends, perhaps
by a signal. Such a close does not prove the block whole: it stays a draft until its writer's fate
is known, and is torn unless it is renamed or its process is seen alive in time.
"""

import logging
from collections.abc import Callable
from typing import Final

from kvfs.core.errors import KvfsError
from kvfs.core.lifecycle import UNFINISHED, State, is_temporary
from kvfs.core.types import InodeNo, InodeRecord
from kvfs.engine.blocks.publishing import Closing, Publishing
from kvfs.engine.rewrite.findings import LockFiles
from kvfs.engine.rewrite.versions import OldVersions
from kvfs.machine.process_ends import Fate
from kvfs.machine.processes import Question
from kvfs.pool.open.extent_bytes import is_as_recorded
from kvfs.pool.open.open_inodes import OpenInode
from kvfs.pool.open.open_notes import UNTOLD, NotedClose
from kvfs.pool.pool import Pool

_log: Final = logging.getLogger(__name__)

#: A RELEASE follows its close(2) at once. If it comes later than this, something else held the file
#: open. Even a busy server reads it within this time.
_AT_ONCE_S: Final = 0.5
#: If more are in doubt, the oldest is torn.
_DOUBTS_MAX: Final = 4096
#: Processes whose fate is asked for at a time, each in a thread.
_QUESTIONS_MAX: Final = 8
#: How long a stop waits for all answers together.
_STOP_WAIT_S: Final = 1.0
#: A block that could not be published in so many ticks in a row (two seconds) is given up.
_PUBLISH_TRIES: Final = 100
#: If more closes wait for a rename, the oldest is published. A writer renames right after its
#: close, so as many writers would have to be between the two.
_AWAITED_MAX: Final = 256
#: Or if they hold more than this share of the capacity: until then nothing of it can be evicted.
_AWAITED_SHARE: Final = 1 / 32


class _Doubt:
    """One handle that is closed but still counted; it is torn at *until_s*."""

    __slots__ = ("closing", "opened", "question", "until_s")

    def __init__(self, opened: OpenInode, closing: Closing, until_s: float) -> None:
        self.opened = opened
        self.closing = closing
        self.until_s = until_s
        self.question: Question | None = None


class Doubts:
    """The closes in doubt."""

    def __init__(self, pool: Pool, finish: Callable[[OpenInode], None]) -> None:
        """*finish* carries out a writer's close."""
        self._pool = pool
        self._finish = finish
        self._doubts: list[_Doubt] = []
        #: How many blocks were torn because nothing proved them whole.
        self.unproven = 0

    def __len__(self) -> int:
        """Return how many closes are in doubt."""
        return len(self._doubts)

    def raised(self, opened: OpenInode, closing: Closing) -> bool:
        """Whether *closing* leaves a doubt about *opened*; then its handle stays until a tick."""
        if opened.torn or not opened.unfinished or opened.gone is not None or opened.fd < 0:
            return False
        try:
            if not self._is_doubtful(opened, closing):
                return False
        except OSError as error:  # what cannot be checked is in doubt
            _log.warning("inode %#x: %s", opened.ino, error)
        self.keep_in_doubt(opened, closing)
        return True

    def keep_in_doubt(self, opened: OpenInode, closing: Closing) -> None:
        """Keep a writer's handle of *opened* until it is known what *closing* means."""
        wait_s = self._pool.settings.foreign_close_s
        self._doubts.append(_Doubt(opened, closing, self._pool.monotonic_s() + wait_s))
        self._write_note(opened)
        if len(self._doubts) > _DOUBTS_MAX:
            self._tear(self._doubts.pop(0))

    def _write_note(self, opened: OpenInode) -> None:
        """Note the doubts about *opened*, for a server that takes the mount over."""
        closes = [doubt.closing for doubt in self._doubts if doubt.opened is opened]
        noted = (
            NotedClose(
                close.tid,
                *close.closer,
                close.fate.value,
                close.at_s,
                close.size_bytes,
                close.mtime_ns,
            )
            for close in closes
        )
        self._pool.open.notes.closes(opened, noted)

    def _is_doubtful(self, opened: OpenInode, closing: Closing) -> bool:
        pool = self._pool
        if closing.fate is Fate.LIVES:
            if not closing.closer.is_one:
                return False  # a kernel thread or NFS server: no signal ends its writes
            if opened.writers > 1:
                return False  # other writers, which have not closed yet, may have written the bytes
            status = pool.syscalls.fstat(opened.fd)
            # Another handle's FLUSH may be newer, and follow what was written through that handle.
            unchanged = (status.st_size, status.st_mtime_ns) in (closing[-2:], opened.flushed_as)
            if unchanged and pool.monotonic_s() - closing.at_s < _AT_ONCE_S:
                return False
        elif closing.fate is not Fate.UNKNOWN or (
            closing.tid <= 0 and pool.settings.foreign_closes == "trusted"
        ):
            return False
        record = pool.index.inode_or_miss(opened.ino)
        if record is None:
            return False
        if closing.tid <= 0 and is_temporary(record.name):
            return False  # its writer renames it, or nobody reads it
        return not self._is_settled(opened, State(record.state))

    def _is_settled(self, opened: OpenInode, state: State) -> bool:
        """Whether it was whole before and nothing was written since: renamed, or only opened."""
        if state not in (State.RENAMED, State.REWRITE):
            return False
        record = self._pool.index.inode_or_miss(opened.ino)
        return record is not None and is_as_recorded(self._pool.syscalls.fstat(opened.fd), record)

    def run_due(self, now_s: float) -> None:
        """Carry out the closes whose meaning is known by now."""
        if not self._doubts:
            return
        waiting: list[_Doubt] = []
        asked = 0
        for doubt in self._doubts:
            opened = doubt.opened
            if asked < _QUESTIONS_MAX and self._is_to_be_asked(doubt):
                doubt.question = self._ask(doubt, now_s)
            fate = None if doubt.question is None else doubt.question.fate
            asked += doubt.question is not None and fate is None
            if opened.torn or opened.gone is not None or self._is_vouched_for(opened, fate):
                self._finish(opened)
            elif fate is Fate.KILLED:
                opened.tear()
                self._finish(opened)
            elif now_s < doubt.until_s or self._has_another_writer(opened):
                waiting.append(doubt)
            else:
                self._tear(doubt)
        ended = {doubt.opened for doubt in self._doubts if doubt not in waiting}
        self._doubts = waiting
        for opened in ended:
            if opened.writers:
                self._pool.open.notes.writing(opened)
                self._write_note(opened)

    def _is_to_be_asked(self, doubt: _Doubt) -> bool:
        """Whether its fate was not asked for yet, or could not be, for lack of a descriptor."""
        if doubt.question is None:
            return True
        return doubt.question.fate is Fate.UNKNOWN and doubt.closing.tid > 0

    def _ask(self, doubt: _Doubt, now_s: float) -> Question | None:
        closing = doubt.closing
        if closing.tid <= 0:
            return Question(Fate.UNKNOWN)
        closer = closing.closer
        if not closer.is_one:
            closer = self._pool.rules.leases.processes.of(
                closing.tid, now_s
            )  # there may be a descriptor now
        return None if not closer.is_one else self._pool.rules.leases.processes.ask(closer)

    def _is_vouched_for(self, opened: OpenInode, fate: Fate | None) -> bool:
        if fate in (Fate.LIVES, Fate.EXITED):
            return True
        try:
            return self._is_renamed(opened)
        except OSError:
            return False

    def _is_renamed(self, opened: OpenInode) -> bool:
        """Whether it was renamed, and not written since, as far as that can be told."""
        record = self._pool.index.inode_or_miss(opened.ino)
        if record is None:
            return True
        if record.state == State.RENAMED:
            return self._is_settled(opened, State.RENAMED)
        return opened.renamed

    def _has_another_writer(self, opened: OpenInode) -> bool:
        return opened.writers > sum(doubt.opened is opened for doubt in self._doubts)

    def _tear(self, doubt: _Doubt) -> None:
        doubt.opened.tear()
        self.unproven += 1
        self._finish(doubt.opened)

    def close(self) -> None:
        """Carry out all closes, because the pool stops; what is not proved whole now is torn."""
        now_s = self._pool.monotonic_s()
        until_s = now_s + _STOP_WAIT_S
        for doubt in self._doubts:
            if doubt.question is None:
                doubt.question = self._ask(doubt, now_s)
        for doubt in self._doubts:
            if doubt.question is not None:
                doubt.question.wait(until_s - self._pool.monotonic_s())
            doubt.until_s = now_s
        self.run_due(now_s)
        while self._doubts:  # it still has another writer
            self._tear(self._doubts.pop())


class LastCloses:
    """Carries out closes of writers; the last of an inode publishes. Implements ``Closes``."""

    def __init__(
        self, pool: Pool, publishing: Publishing, old: OldVersions, lock_files: LockFiles
    ) -> None:
        self._pool = pool
        self._publishing = publishing
        self._old = old
        self._lock_files = lock_files
        #: Blocks that are closed and not published yet, and how often that was tried, oldest
        #: first. The writer's handle still counts.
        self._untold: dict[InodeNo, tuple[OpenInode, int]] = {}
        #: Those of them that wait for a rename, with what each held at its close, and the sum.
        self._awaited: dict[InodeNo, int] = {}
        self._awaited_bytes = 0

    def close(self, opened: OpenInode, *, awaits_rename: bool = False) -> None:
        """Close one writer's handle; if it *awaits_rename*, the next tick may publish the block."""
        if opened.writers == 1 and not self._pool.settings.read_only:
            if opened.settling:  # its times and length are on their way to the extent
                self._pool.open.notes.closes(opened, (UNTOLD,))
                device = self._pool.background.of(opened.ino).device
                device.after_all(lambda: self.close(opened))
                return
            if awaits_rename and self._may_await(opened):
                self.put_off(opened)
                self._await_rename(opened)
                return
            try:
                self._publishing.publish(opened)
            except (KvfsError, OSError) as error:
                _log.warning("inode %#x is not published yet: %s", opened.ino, error)
                self.put_off(opened)
                return
            if opened.ino in self._old:
                self._old.end(opened.ino)
        self._pool.departures.leave(opened, writer=True)
        if opened.met and opened.writers == 1:
            self._lock_files.part(opened)

    def _await_rename(self, opened: OpenInode) -> None:
        opened.await_rename()
        self._awaited[opened.ino] = opened.allocated_bytes
        self._awaited_bytes += opened.allocated_bytes
        most_bytes = self._pool.space.taken.bound_bytes * _AWAITED_SHARE
        while len(self._untold) > _AWAITED_MAX or self._awaited_bytes > most_bytes:
            if not self._publish(next(iter(self._untold))):
                return

    def _await_no_rename(self, opened: OpenInode) -> None:
        opened.await_no_rename()
        self._awaited_bytes -= self._awaited.pop(opened.ino, 0)

    def take_back(self, opened: OpenInode, *, appends: bool) -> None:
        """Close a writer's handle that no client received; the last once the device has answered.

        Of a draft that was made for it nothing stays. Nothing is noted: a server that takes over
        finds no handle, and does the same.
        """
        device = self._pool.background.of(opened.ino).device

        def close() -> None:
            if opened.settling:
                device.after_all(close)
                return
            if opened.writers == 1:  # else it is another's by now, who may write it whole
                opened.refuse()
            self.close(opened)

        if appends:
            opened.stop_appending()
        if opened.writers > 1:
            self._pool.departures.leave(opened, writer=True)
        else:
            device.after_all(close)

    def _may_await(self, opened: OpenInode) -> bool:
        """Whether *opened* is a whole draft under a temporary name, and nothing is special."""
        if not opened.is_plain_draft or opened.gone is not None or opened.fd < 0:
            return False
        if opened.readers or opened.served_writers or opened.ino in self._old:
            return False
        record = self._pool.index.inode_or_miss(opened.ino)
        return record is not None and record.state in UNFINISHED and is_temporary(record.name)

    def put_off(self, opened: OpenInode) -> None:
        """Keep the handle of the last writer of *opened*, which has closed it, for ``settle``."""
        self._untold[opened.ino] = (opened, 1)
        self._pool.open.notes.closes(opened, (UNTOLD,))

    # ---- the port Closes: what a rename asks for ----

    def closed(self, opened: OpenInode, record: InodeRecord) -> InodeRecord | None:
        """Return what the close that waits makes of *record*, for the rename that follows it.

        None: no close waits, or it leads to no whole block. Nothing is published yet.
        """
        if not opened.awaits_rename or opened.writers != 1 or opened.ino not in self._untold:
            return None
        if opened.settling:
            return None
        return self._publishing.finished(opened, record)

    def published(self, opened: OpenInode, growth_bytes: int) -> None:
        """Note that the rename has published *opened*, which takes *growth_bytes* more now."""
        del self._untold[opened.ino]
        self._await_no_rename(opened)
        self._publishing.end(opened, growth_bytes)
        self._pool.departures.leave(opened, writer=True)

    # ---- everybody else ----

    def publish_now(self, ino: InodeNo) -> None:
        """Publish *ino* if its close waits: somebody else is about to use or change it."""
        if ino in self._untold:
            self._publish(ino)

    def settle(self) -> None:
        """Publish the waiting blocks; stop at the first that still cannot be."""
        while self._untold and self._publish(next(iter(self._untold))):
            pass

    def _publish(self, ino: InodeNo) -> bool:
        """Publish *ino*, whose close waits; False if that has failed, and is to be tried again."""
        opened, tries = self._untold.pop(ino)
        self._await_no_rename(opened)
        try:
            if opened.writers == 1:  # else the next close publishes
                self._publishing.publish(opened)
        except (KvfsError, OSError) as error:
            if tries < _PUBLISH_TRIES or not self._publishing.dismiss(opened, error):
                self._untold[ino] = (opened, tries + 1)
                return False
        self._pool.departures.leave(opened, writer=True)
        return True

    def forget_all(self) -> set[InodeNo]:
        """Empty the list; return the inodes that all writers have closed, for the stop."""
        closed = {ino for ino, (opened, _) in self._untold.items() if opened.writers == 1}
        self._untold.clear()
        return closed

    def end(self) -> bool:
        """Give up what could not be published; return False if there was any."""
        settled = not self._untold
        while self._untold:
            opened, _ = self._untold.pop(next(iter(self._untold)))
            self._pool.departures.leave(opened, writer=True)
        return settled
