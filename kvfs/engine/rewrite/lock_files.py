"""Lock files: opened with O_TRUNC by each that wants the lock, and locked after that.

All must get the same inode, or each has a lock of its own. So an empty or a locked file is shared
by all that open it, as on XFS. Emptying it loses nobody's bytes. But two processes that share an
empty file (they "meet") may also be two writers of one block, whose bytes would mix. So a file in
which writers met and that has bytes at its last close is torn, unless a lock was seen, by which
they take turns.
"""

from typing import Final

from kvfs.core.lifecycle import State, is_temporary
from kvfs.core.rewriting import Found
from kvfs.core.types import InodeRecord
from kvfs.machine.file_locks import holders
from kvfs.pool.open.open_inodes import OpenInode
from kvfs.pool.pool import Pool

#: How often, and for how many files each time, a lock of writers that met is looked for.
_LOOK_S: Final = 1.0
_LOOKS_MAX: Final = 4


class LockFiles:
    """The files of one pool that processes share while they are written."""

    def __init__(self, pool: Pool) -> None:
        self._pool = pool
        self._due_s = 0.0

    def may_be(self, record: InodeRecord) -> bool:
        """Whether it may be a lock file: not if each writer renames, or sees, only its own."""
        if is_temporary(record.name):
            return False
        policy = self._pool.policies.of(record.parent)
        return not (policy.only_renamed or policy.hides_drafts)

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
            return self._pool.syscalls.fstat(opened.fd).st_size
        return record.size_bytes

    def _is_locked(self, opened: OpenInode) -> bool:
        """Whether a writer was seen to lock *opened* since it has been open for writing."""
        if not opened.locked:
            tgids = dict.fromkeys(hand.maker.tgid for hand in opened.hands if hand.maker.is_one)
            if holders(opened.ino, tgids).locked:
                opened.see_lock()
                self._pool.open_notes.writing(opened)
        return opened.locked

    def meet(self, opened: OpenInode) -> None:
        """Note that writers met: processes opened the empty file *opened*, each to write it."""
        opened.meet()
        self._pool.open_notes.writing(opened)

    def part(self, opened: OpenInode) -> None:
        """Note that one of two writers of *opened* has closed it.

        If it is still empty, all bytes to come are the other one's.
        """
        if opened.fd >= 0 and not self._pool.syscalls.fstat(opened.fd).st_size:
            tgids = {hand.maker.tgid for hand in opened.hands if hand.maker.is_one}
            left = holders(opened.ino, tgids).tgids
            opened.hands = tuple(hand for hand in opened.hands if hand.maker.tgid in left)
            opened.part()
            self._pool.open_notes.writing(opened)

    def tick(self, now_s: float) -> None:
        """Look for locks on some of the files that processes share."""
        if now_s < self._due_s:
            return
        self._due_s = now_s + _LOOK_S
        due = [opened for opened in self._pool.open_inodes.written.values() if opened.mixes]
        for opened in due[:_LOOKS_MAX]:
            self._is_locked(opened)
