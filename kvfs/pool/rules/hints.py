"""Hints in force: those of files' own attributes, of directories, and those told by the socket.

What was told comes first, then a file's own attribute, then that of the nearest directory. What was
told is kept with the block's heat, so it takes a few bytes, and goes with the block. Attributes of
files are kept here, in a bounded table: in a mount without any, a store looks nothing up.
"""

import contextlib
import stat
from typing import Final

from kvfs.core.changed import Changed, Why
from kvfs.core.directory_policy import HINT
from kvfs.core.eviction_policy import Rank
from kvfs.core.hints import BlockHint, hint_of
from kvfs.core.types import SECOND_NS, InodeNo, InodeRecord
from kvfs.storage.heat import Heat
from kvfs.storage.heat_columns import ALWAYS_S, Told

#: Blocks of these ranks follow hints. The others may not go, or have a reason to go first or last.
_BIASED: Final = frozenset({Rank.PUBLISHED, Rank.SMALL})
#: Attributes kept, some 0.5 KiB each; those of files beyond it do not count.
ATTRIBUTES_MAX: Final = 1 << 16


class HintCounts:
    """What became of the hints that were told, since the server started."""

    def __init__(self) -> None:
        #: Blocks that were hinted.
        self.taken = 0
        #: Values beyond their bound, and blocks or attributes beyond the number that is kept.
        self.clipped = 0
        #: Names of no block, sessions that nothing has, and lines that say nothing known.
        self.unknown = 0
        #: Blocks that the client may not write.
        self.refused = 0
        #: Blocks that ``fetch`` read.
        self.fetched = 0


class Hints:
    """The hints of one pool."""

    follows: Final = frozenset(
        {Why.ATTRIBUTED, Why.REPLACED, Why.REMOVED, Why.LOST, Why.EVICTED, Why.RECONCILED}
    )

    def __init__(self, heat: Heat) -> None:
        self._heat = heat
        #: The attributes of files, and those of directories that name a session.
        self._of: dict[InodeNo, BlockHint] = {}
        self._sessions: dict[str, dict[InodeNo, None]] = {}
        self.counts: Final = HintCounts()

    def follow(self, changed: Changed) -> None:
        """Note an attribute. One moves with the name if another inode inherits that."""
        ino, record = changed.ino, changed.after
        if record is None:
            if (hint := self._of.get(ino)) is not None:
                self.forget(ino)
                if changed.heir:
                    self._remember(changed.heir, hint)
        elif HINT in changed.gained:
            self.learn(ino, record, changed.gained[HINT])
        elif HINT in changed.lost:
            self.forget(ino)

    def learn(self, ino: InodeNo, record: InodeRecord, value: bytes) -> None:
        """Note the *value* of the attribute of *ino*; an invalid one says nothing."""
        self.forget(ino)
        with contextlib.suppress(ValueError):
            hint = hint_of(value)
            if hint.session or not stat.S_ISDIR(record.mode):
                self._remember(ino, hint)

    def forget(self, ino: InodeNo) -> None:
        """Forget the attribute of *ino*, if it had one."""
        hint = self._of.pop(ino, None)
        if hint is not None and hint.session:
            members = self._sessions[hint.session]
            del members[ino]
            if not members:
                del self._sessions[hint.session]

    def _remember(self, ino: InodeNo, hint: BlockHint) -> None:
        if len(self._of) >= ATTRIBUTES_MAX:
            self.counts.clipped += 1
            return
        self._of[ino] = hint
        self._heat.is_hinted = True
        if hint.session:
            self._sessions.setdefault(hint.session, {})[ino] = None

    def of_session(self, session: str) -> list[InodeNo]:
        """Return the files and directories whose attribute names *session*."""
        return list(self._sessions.get(session, ()))

    def bias(self, ino: InodeNo, rank: Rank, inherited: BlockHint | None) -> None:
        """Let block *ino*, which has *rank* now, go as the hint in force says.

        *inherited* is that of its directory.
        """
        if rank not in _BIASED:
            return
        told = self._heat.told(ino)
        hint = self._of.get(ino, inherited)
        if told is not Told.NOTHING:
            self._heat.bias(ino, Rank.RETAINED if told is Told.RETAIN else Rank.FIRST)
        elif hint is not None and hint.once:
            self._heat.bias(ino, Rank.FIRST)
        elif hint is not None and hint.priority:
            until_s = self._end_s(ino, hint)
            if until_s > self._heat.now_s:
                self._heat.bias(ino, Rank.RETAINED, priority=hint.priority, until_s=until_s)

    def _end_s(self, ino: InodeNo, hint: BlockHint) -> int:
        """Return when *hint* ends for block *ino* (s, of the clock of ages)."""
        if hint.ttl_s is None:
            return ALWAYS_S
        used_ns = self._heat.used_ns(ino)
        used_s = self._heat.now_s if used_ns is None else used_ns // SECOND_NS
        return used_s + int(hint.ttl_s)
