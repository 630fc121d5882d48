"""One walk of the index after a start, a step at a time, for all who keep tables in memory.

They are the pins, the shares of what is never evicted, the leases and the heat. The heat alone
has the inodes walked again when a policy changes for all that lies below a directory. Until a walk
is done a table may lack a row, so that nothing may be evicted on a table's word alone: the index
still says LEASED, and who evicts asks for the policy again.
"""

import contextlib
from collections import deque
from collections.abc import Callable, Iterator
from typing import Final

from kvfs.core.directory_policy import PIN
from kvfs.core.errors import Damaged, NoSpace
from kvfs.core.lifecycle import SETTLED, State
from kvfs.core.node_bound import attribute_bytes
from kvfs.core.records import (
    INODE_PREFIX,
    XATTR_PREFIX,
    parse_inodes,
    parse_xattr_key,
    unseal,
)
from kvfs.core.types import InodeNo, InodeRecord
from kvfs.pool import ranks
from kvfs.pool.pool import Pool
from kvfs.storage.run_state import present_boot_id

#: Rows a step, some 5 us each: a step runs between two requests.
_STEP: Final = 64
#: No inode has a higher number.
_LAST: Final = InodeNo((1 << 64) - 1)
_OWNED: Final = SETTLED - {State.PUBLISHED}
#: No process has this number: the maker ran in another boot, where births were others.
_OF_ANOTHER_BOOT: Final = (1 << 32) - 1

#: Does a step; False when there was nothing left to do.
_Stage = Callable[[], bool]
#: Is told each inode that is found.
_Listener = Callable[[InodeNo, InodeRecord], None]


class StartScan:
    """The walk of the start, and later ones for the heat."""

    def __init__(self, pool: Pool) -> None:
        """Queue the first walk. The pins come first: what they hold is then ranked once."""
        self._pool = pool
        self._same_boot = pool.former_boot_id == present_boot_id()
        #: Counts what the pins hold that were found: for their bound, so that it comes last.
        self._counts: deque[Iterator[None]] = deque()
        self._stages: deque[_Stage] = deque()
        self._again = False
        self._begin(self._find_attributes, self._find_inodes, self._drop_unknown, self._count_pins)

    @property
    def done(self) -> bool:
        """Whether no walk is under way."""
        return not self._stages

    def rank_anew(self) -> None:
        """Have every block ranked, or once more when the present walk is done."""
        if self._stages:
            self._again = True
        else:
            self._begin(self._rank_inodes, self._drop_unknown)

    def _begin(self, *stages: _Stage) -> None:
        self._again = False
        self._stages.extend(stages)
        #: The last key that was looked at, and the next row of the heat.
        self._after, self._row = b"", 0
        self._pool.background.submit_leisure(self._step)

    def _step(self) -> None:
        """Go on for a moment. What the device refuses is postponed; damage ends its stage alone."""
        try:
            if not self._stages[0]():
                self._next_stage()
        except (NoSpace, OSError):
            raise  # the same step again
        except Exception:
            self._next_stage()
            self._go_on()
            raise
        self._go_on()

    def _next_stage(self) -> None:
        self._stages.popleft()
        self._after = b""

    def _go_on(self) -> None:
        if self._stages:
            self._pool.background.submit_leisure(self._step)
        elif self._again:
            self.rank_anew()

    def _rows(self, prefix: bytes) -> list[tuple[bytes, bytes]]:
        return next(self._pool.index.walk(prefix, _STEP, after=self._after), [])

    # ---- the stages ----

    def _find_attributes(self) -> bool:
        """Look at some extended attributes: for pins, and for what they take."""
        pool = self._pool
        rows = self._rows(XATTR_PREFIX)
        for key, raw in rows:
            ino, name = parse_xattr_key(key)
            with contextlib.suppress(Damaged):
                record, value = pool.index.inode(ino), unseal(key, raw)
                if record is not None:
                    pool.node_shares.find_attribute(ino, record, attribute_bytes(name, value))
                    if name == PIN and value == b"1":
                        self._counts.append(pool.pins.learn(ino, record))
            self._after = key
        pool.node_shares.reach_attributes(parse_xattr_key(self._after)[0] if rows else _LAST)
        return bool(rows)

    def _find_inodes(self) -> bool:
        """Tell all listeners of some inodes; a mount that is read-only has no heat."""
        rank = () if self._pool.settings.read_only else (self._rank,)
        if self._each_inode(self._share, self._lease, *rank):
            return True
        self._pool.node_shares.reach(_LAST)
        return False

    def _rank_inodes(self) -> bool:
        """Tell the heat of some inodes."""
        return self._each_inode(self._rank)

    def _each_inode(self, *listeners: _Listener) -> bool:
        rows = self._rows(INODE_PREFIX)
        for (key, _), (ino, record) in zip(rows, parse_inodes(rows), strict=True):
            if record is not None:  # the next lookup of its name reports it
                for listener in listeners:
                    listener(ino, record)
            self._after = key
        return bool(rows)

    def _drop_unknown(self) -> bool:
        """Drop some rows of the heat that the index does not know."""
        pool = self._pool
        rows = pool.heat.columns().ino[self._row : self._row + _STEP].tolist()
        for ino in rows:
            if ino and not pool.index.knows(InodeNo(ino)):
                pool.heat.drop(InodeNo(ino))
        self._row += _STEP
        return bool(rows)

    def _count_pins(self) -> bool:
        """Count some of what the pins hold: a directory may have as many names as it likes."""
        while self._counts:
            with contextlib.suppress(Damaged):
                for _ in self._counts[0]:
                    return True
            self._counts.popleft()
        return False

    # ---- the listeners ----

    def _share(self, ino: InodeNo, record: InodeRecord) -> None:
        """Count what is never evicted, by user (node_bound.py)."""
        if record.state == State.NODE:
            self._pool.node_shares.find(ino, record)
        self._pool.node_shares.reach(ino)

    def _lease(self, ino: InodeNo, record: InodeRecord) -> None:
        """Enter leased blocks, slabs and orphans."""
        pool = self._pool
        if record.state in _OWNED and pool.leases.state_of(ino) is None:
            if not self._same_boot and record.maker_tgid:
                record = record._replace(maker_tgid=_OF_ANOTHER_BOOT)
            pool.leases.note(ino, record, pool.monotonic_s())

    def _rank(self, ino: InodeNo, record: InodeRecord) -> None:
        ranks.note_found(self._pool, ino, record)
