"""One scan of the index after a start, a step at a time, which fills all tables in memory.

These are the pins, the users' shares of what is never evicted, what each model holds, the leases
and the heat. The inodes are scanned again for the heat when the policy of a directory changes, and
for models and tenants when one that tells a model is moved, or one becomes a tenant's. Until the
scan is done a table may lack a row. So eviction never trusts a table alone: the index still says
LEASED, and the policy is looked up again.
"""

import contextlib
import stat
from collections import deque
from collections.abc import Callable, Iterator
from typing import Final

from kvfs.core.changed import Changed, Why
from kvfs.core.directory_policy import EVICT, HINT, PIN, TENANT, TTL
from kvfs.core.errors import Damaged, NoSpace
from kvfs.core.index_room import attribute_bytes
from kvfs.core.lifecycle import State
from kvfs.core.records import (
    INODE_PREFIX,
    XATTR_PREFIX,
    parse_inodes,
    parse_xattr_key,
    unseal,
)
from kvfs.core.types import LAST_INODE, ROOT_INODE, InodeNo, InodeRecord
from kvfs.pool.pool import Pool

#: Rows in one step, some 5 us each; a step runs between two requests.
_STEP: Final = 64

#: Does a step; returns False if nothing was left to do.
_Stage = Callable[[], bool]
#: Is called with each inode that is found.
_Listener = Callable[[InodeNo, InodeRecord], None]


class StartScan:
    """The scan after the start, and later ones for the heat."""

    def __init__(self, pool: Pool) -> None:
        """Queue the first scan. Pins come first, so that what they hold is ranked only once."""
        self._pool = pool
        #: Each counts what one pin holds, for the limit of pins. They run in the last stage.
        self._counts: deque[Iterator[None]] = deque()
        self._stages: deque[_Stage] = deque()
        self._again = False
        pool.figures.held.begin(pool.numbers.is_new)
        self._begin(self._find_attributes, self._find_inodes, self._drop_unknown, self._count_pins)

    @property
    def done(self) -> bool:
        """Whether no scan is under way."""
        return not self._stages

    def rank_anew(self) -> None:
        """Rank every block again, if need be after the present scan."""
        if self._stages:
            self._again = True
        else:
            self._begin(self._rank_inodes, self._drop_unknown)

    def count_pins_anew(self) -> None:
        """Count again what pinned directories hold: blocks came and went without a request."""
        pool = self._pool
        for ino, _ in pool.rules.pins.rows():
            record = pool.index.inode_or_miss(ino)
            if record is not None and stat.S_ISDIR(record.mode):
                self._counts.append(pool.rules.pins.recount(ino, record))
        if self._stages:
            self._stages.append(self._count_pins)
        elif self._counts:
            self._begin(self._count_pins)
        if pool.figures.held.outdated:
            self.rank_anew()

    def _begin(self, *stages: _Stage) -> None:
        self._again = False
        if self._pool.figures.held.outdated:
            self._pool.figures.held.begin()
        self._stages.extend(stages)
        #: The last key that was read, and the next row of the heat.
        self._after, self._row = b"", 0
        self._pool.background.submit_leisure(self._step)

    def _step(self) -> None:
        """Do one step. What the device refuses is tried again later; damage ends only its stage."""
        try:
            if not self._stages[0]():
                self._next_stage()
        except (NoSpace, OSError):
            raise  # this step is done again
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
        """Read some extended attributes, to find pins and count the space they take."""
        pool = self._pool
        rows = self._rows(XATTR_PREFIX)
        for key, raw in rows:
            ino, name = parse_xattr_key(key)
            with contextlib.suppress(Damaged):
                record, value = pool.index.inode(ino), unseal(key, raw)
                if record is not None:
                    pool.space.node_shares.find_attribute(ino, record, attribute_bytes(name, value))
                    if name == PIN and value == b"1":
                        self._counts.append(pool.rules.pins.learn(ino, record))
                    elif name == EVICT:
                        pool.rules.units.learn(ino, value)
                    elif name == HINT:
                        pool.rules.hints.learn(ino, record, value)
                    elif name == TTL:
                        pool.rules.policies.note_ttl(value)
                    elif name == TENANT and record.parent == ROOT_INODE:
                        pool.rules.tenants.learn_directory(ino, record)
            self._after = key
        pool.space.node_shares.reach_attributes(
            parse_xattr_key(self._after)[0] if rows else LAST_INODE
        )
        return bool(rows)

    def _find_inodes(self) -> bool:
        """Pass some inodes to all listeners; a read-only mount has no heat."""
        rank = () if self._pool.settings.read_only else (self._rank,)
        if self._each_inode(self._share, self._lease, self._pool.figures.held.find, *rank):
            return True
        self._pool.space.node_shares.reach(LAST_INODE)
        self._pool.figures.held.end()
        self._pool.rules.heat.know_tenants()
        return False

    def _rank_inodes(self) -> bool:
        """Pass some inodes to the heat, and to the figures by model if these begin anew."""
        if self._each_inode(self._rank, self._pool.figures.held.find):
            return True
        self._pool.figures.held.end()
        return False

    def _each_inode(self, *listeners: _Listener) -> bool:
        rows = self._rows(INODE_PREFIX)
        for (key, _), (ino, record) in zip(rows, parse_inodes(rows), strict=True):
            if record is not None:  # else the next lookup of its name reports the damage
                for listener in listeners:
                    listener(ino, record)
            self._after = key
        return bool(rows)

    def _drop_unknown(self) -> bool:
        """Drop some rows of the heat that the index does not know."""
        pool = self._pool
        rows = pool.rules.heat.columns().ino[self._row : self._row + _STEP].tolist()
        for ino in rows:
            if ino and not pool.index.knows(InodeNo(ino)):
                pool.rules.heat.drop(InodeNo(ino))
        self._row += _STEP
        return bool(rows)

    def _count_pins(self) -> bool:
        """Count a part of what the pins hold: a directory may have any number of names."""
        while self._counts:
            with contextlib.suppress(Damaged):
                for _ in self._counts[0]:
                    return True
            self._counts.popleft()
        return False

    # ---- the listeners ----

    def _share(self, ino: InodeNo, record: InodeRecord) -> None:
        """Count what is never evicted, by user (index_room.py)."""
        if record.state == State.NODE:
            self._pool.space.node_shares.find(ino, record)
        self._pool.space.node_shares.reach(ino)

    def _lease(self, ino: InodeNo, record: InodeRecord) -> None:
        """Enter leased blocks, slabs and orphans."""
        self._pool.rules.leases.follow(Changed(ino, record, record, Why.FOUND))

    def _rank(self, ino: InodeNo, record: InodeRecord) -> None:
        self._pool.rules.ranks.follow(Changed(ino, record, record, Why.FOUND))
