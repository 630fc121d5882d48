"""What an open with O_TRUNC finds: whether others need the file that it would empty.

The tables in core/rewriting.py say what follows; truncating_open.py carries it out.

Lock files are opened with O_TRUNC by each that wants the lock, and locked after that. All must get
the same inode, or each has a lock of its own. So an empty or a locked file is shared by all that
open it, as on XFS. Emptying it loses nobody's bytes. But two processes that share an empty file
(they "meet") may also be two writers of one block, whose bytes would mix. So a file in which
writers met and that has bytes at its last close is torn, unless a lock was seen, by which they take
turns.
"""

import stat
from collections.abc import Callable
from typing import Final, Protocol

from kvfs.core.lifecycle import UNFINISHED, State, is_temporary
from kvfs.core.rewriting import Found, Loser, Place, Refusal, Try
from kvfs.core.types import InodeNo, InodeRecord
from kvfs.engine.names.namespace import Namespace
from kvfs.engine.rewrite.awaited_opens import AwaitedOpens
from kvfs.machine.file_holders import holders
from kvfs.machine.processes import Maker
from kvfs.pool.departures import RecentlyRemoved
from kvfs.pool.open.open_inodes import OpenInode, OpenInodes
from kvfs.pool.pool_parts import OpenParts
from kvfs.pool.rules.policies import Policies
from kvfs.storage.syscalls import Syscalls

#: How often, and for how many files each time, a lock of writers that met is looked for.
_LOOK_S: Final = 1.0
_LOOKS_MAX: Final = 4


class LockFiles:
    """The files of one pool that processes share while they are written."""

    def __init__(self, open_parts: OpenParts, policies: Policies, syscalls: Syscalls) -> None:
        self._open = open_parts
        self._policies = policies
        self._syscalls = syscalls
        self._due_s = 0.0

    def may_be(self, record: InodeRecord) -> bool:
        """Whether it may be a lock file: not if each writer renames, or sees, only its own."""
        if is_temporary(record.name):
            return False
        return not self._policies.hide_drafts(record.parent)

    def found(self, opened: OpenInode, record: InodeRecord) -> Found:
        """Return what an O_TRUNC of *opened*, which others have open, finds."""
        if opened.emptied or record.state == State.RENAMED:
            return Found.TAKEN
        if not self.size_bytes(opened, record):
            return Found.SHARED
        if opened.writers and (opened.met or self._is_locked(opened)):
            return Found.LOCKED
        return Found.TAKEN

    def size_bytes(self, opened: OpenInode, record: InodeRecord) -> int:
        """Return the present size; *record* may be older than what is being written."""
        if opened.writers and opened.fd >= 0:
            return self._syscalls.fstat(opened.fd).st_size
        return record.size_bytes

    def _is_locked(self, opened: OpenInode) -> bool:
        """Whether a writer was seen to lock *opened* since it has been open for writing."""
        if not opened.locked:
            tgids = dict.fromkeys(hand.maker.tgid for hand in opened.hands if hand.maker.is_one)
            if holders(opened.ino, tgids).locked:
                opened.see_lock()
                self._open.notes.writing(opened)
        return opened.locked

    def meet(self, opened: OpenInode) -> None:
        """Note that writers met: processes opened the empty file *opened*, each to write it."""
        opened.meet()
        self._open.notes.writing(opened)

    def part(self, opened: OpenInode) -> None:
        """Note that one of two writers of *opened* has closed it.

        If it is still empty, all bytes to come are the other one's.
        """
        if opened.fd >= 0 and not self._syscalls.fstat(opened.fd).st_size:
            tgids = {hand.maker.tgid for hand in opened.hands if hand.maker.is_one}
            left = holders(opened.ino, tgids).tgids
            opened.keep_hands(left)
            opened.part()
            self._open.notes.writing(opened)

    def run_due(self, now_s: float) -> None:
        """Look for locks on some of the files that processes share."""
        if now_s < self._due_s:
            return
        self._due_s = now_s + _LOOK_S
        due = [opened for opened in self._open.inodes.written.values() if opened.mixes]
        for opened in due[:_LOOKS_MAX]:
            self._is_locked(opened)


class MayEmpty(Protocol):
    """Tells whether the caller may empty a file, and read it if it *reads*."""

    def __call__(self, record: InodeRecord, /, *, reads: bool) -> bool:
        """Return whether it may do so with the file of *record*."""


class Findings:
    """Looks at the files of one pool."""

    def __init__(
        self,
        inodes: OpenInodes,
        removed: RecentlyRemoved,
        monotonic_s: Callable[[], float],
        namespace: Namespace,
        awaited: AwaitedOpens,
        lock_files: LockFiles,
    ) -> None:
        self._inodes = inodes
        self._removed = removed
        self._monotonic_s = monotonic_s
        self._namespace = namespace
        self._awaited = awaited
        self._displaced = awaited.displaced
        self._old = awaited.displaced.old
        self._lock_files = lock_files

    def at_open(self, ino: InodeNo, record: InodeRecord | None, thread: int, maker: Maker) -> Found:
        """Return what *thread*'s OPEN of *ino* finds; *record* is None if *ino* has no name."""
        if record is not None:
            return self._found(ino, record, thread, maker)
        if self._displaced.is_promised(ino, thread):
            return Found.LOST
        opened = self._inodes.get(ino)
        if opened is None:
            return Found.NOTHING
        kept = opened.stands_in or ino in self._displaced
        if kept or opened.gone is None or not self._lock_files.may_be(opened.gone):
            return Found.NAMELESS
        size_bytes = self._lock_files.size_bytes(opened, opened.gone)
        return Found.NAMELESS if size_bytes else Found.UNLINKED

    def names(self, ino: InodeNo, record: InodeRecord | None) -> tuple[Place, ...]:
        """Return the names that a thread may have used for *ino*; none if they are not known."""
        if record is None:
            opened = self._inodes.get(ino)
            record = self._removed.record(ino) if opened is None else opened.gone
        former = self._namespace.former_names.of(ino, self._monotonic_s())
        present = None if record is None else (record.parent, record.name)
        return tuple(name for name in (present, former) if name is not None)

    def at_lookup(
        self,
        ino: InodeNo,
        record: InodeRecord,
        before: Refusal,
        thread: int,
        maker: Maker,
        may_empty: MayEmpty | None,
    ) -> Found:
        """Return what *thread*'s LOOKUP, which leads to *ino*, finds after refusal *before*."""
        is_meant = (record.parent, record.name) in before.names
        if not stat.S_ISREG(record.mode):
            return Found.ANOTHER if is_meant else Found.ON_THE_WAY
        if before.at_lookup is Try.LOOKED:
            lost = self._displaced.promised(record, thread)
            return Found.ANOTHER if lost is None else Found.LOST
        if not (is_meant and self._means(ino, record, before, may_empty)):
            return Found.ANOTHER
        found = self._found(ino, record, thread, maker)
        if not before.truncates and found not in (Found.SHARED, Found.LOCKED):
            return Found.ANOTHER
        appended = found is Found.FREE and ino in self._old and self.is_anothers(ino, maker)
        return Found.APPENDED if appended else found

    def _means(
        self, ino: InodeNo, record: InodeRecord, before: Refusal, may_empty: MayEmpty | None
    ) -> bool:
        """Whether the second try, after refusal *before*, means *ino* and may empty it."""
        if before.until_s <= self._monotonic_s():
            return False
        if ino == before.ino:
            return True
        return may_empty is not None and may_empty(record, reads=before.reads)

    def is_anothers(self, ino: InodeNo, maker: Maker) -> bool:
        """Whether a process other than *maker* has *ino* open for writing."""
        opened = self._inodes.get(ino)
        return opened is not None and opened.writers > 0 and opened.maker != maker

    def _found(self, ino: InodeNo, record: InodeRecord, thread: int, maker: Maker) -> Found:
        """Return what a truncating open of *ino*, which has a name, by *thread* finds."""
        awaited = self._awaited.get(ino)
        if awaited is not None and awaited[2] == thread:
            return Found.FREE
        opened = self._inodes.get(ino)
        if awaited is None and not self._due(opened, record, thread, maker):
            return Found.FREE
        renamed = self._namespace.former_names.of(ino, self._monotonic_s())
        if renamed or not self._lock_files.may_be(record):
            return Found.TAKEN  # the thread may have looked up its former name
        if opened is not None:
            return self._lock_files.found(opened, record)
        return Found.TAKEN if awaited is None else Found.SHARED

    def _due(
        self, opened: OpenInode | None, record: InodeRecord, thread: int, maker: Maker
    ) -> bool:
        """Whether others may need the block of *record* as it is; *opened* if it is open."""
        if opened is not None and opened.writers:
            temporary = is_temporary(record.name)
            if opened.is_shared_with(maker, thread, temporary=temporary):
                return False
        if record.state in UNFINISHED:
            return opened is not None and opened.writers > 0
        return record.size_bytes > 0 or opened is not None

    def loser(self, ino: InodeNo, record: InodeRecord, taker: Maker) -> Loser:
        """Return the kind of file *ino*, which loses its name to *taker*."""
        if ino in self._awaited:
            return Loser.FRESH
        opened = self._inodes.get(ino)
        if record.state in UNFINISHED:
            return Loser.DRAFT if opened is not None and opened.writers else Loser.REST
        if record.state == State.UNRENAMED:
            return Loser.TEMPORARY
        is_leased = record.state == State.LEASED
        if is_temporary(record.name):
            return Loser.TEMPORARY if is_leased else Loser.REST
        if is_leased and taker != (record.maker_tgid, record.maker_birth):
            return Loser.ANOTHERS
        return Loser.REST if record.state == State.REWRITE else Loser.FINAL
