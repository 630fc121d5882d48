"""After a start: find the leased blocks, slabs, orphans and pins that the index knows of.

And what of it is never evicted, by user (node_bound.py).
"""

import contextlib
from collections import deque
from typing import TYPE_CHECKING, Final

from kvfs.core.directory_policy import PIN
from kvfs.core.errors import Damaged
from kvfs.core.lifecycle import SETTLED, State
from kvfs.core.node_bound import attribute_bytes
from kvfs.core.records import (
    INODE_PREFIX,
    XATTR_PREFIX,
    parse_inode,
    parse_inode_key,
    parse_xattr_key,
    state_of_inode,
    unseal,
)
from kvfs.core.types import InodeNo
from kvfs.pool import ranks
from kvfs.pool.pool import Pool
from kvfs.storage.run_state import present_boot_id

if TYPE_CHECKING:
    from collections.abc import Iterator

#: Inodes a step: a step runs between two requests.
_STEP: Final = 256
#: No inode has a higher number.
_LAST: Final = InodeNo((1 << 64) - 1)
_OWNED: Final = SETTLED - {State.PUBLISHED}
#: No process has this number: the maker ran in another boot, where births were others.
_OF_ANOTHER_BOOT: Final = (1 << 32) - 1


class HoldingsScan:
    """Walks the index once, a step at a time, and tells the pool's holdings.

    Until it is done a lease may be missing from the tables; the index still says LEASED, and
    nothing may be evicted on the tables' word alone.
    """

    def __init__(self, pool: Pool) -> None:
        self._pool = pool
        self._after = b""
        #: Counts what the pins hold that were found: for their bound, so that it comes last.
        self._counts: deque[Iterator[None]] = deque()
        self._same_boot = pool.former_boot_id == present_boot_id()

    def step(self) -> None:
        """Look at some inodes and queue the next step."""
        pool = self._pool
        rows = pool.index.rows(INODE_PREFIX, self._after, _STEP)
        if not rows:
            self._after = b""
            pool.node_shares.reach(_LAST)
            pool.background.submit_leisure(self._step_pins)
            return
        for key, raw in rows:
            with contextlib.suppress(Damaged):  # the next lookup of its name reports it
                state = state_of_inode(raw)
                if state == State.NODE:
                    pool.node_shares.find(parse_inode_key(key), parse_inode(raw))
                elif state in _OWNED:
                    self._note(parse_inode_key(key))
        self._after = rows[-1][0]
        pool.node_shares.reach(parse_inode_key(self._after))
        pool.background.submit_leisure(self.step)

    def _step_pins(self) -> None:
        """Look at some extended attributes: for pins, and for what they take."""
        pool = self._pool
        rows = pool.index.rows(XATTR_PREFIX, self._after, _STEP)
        if not rows:
            pool.node_shares.reach_attributes(_LAST)
            pool.leases.complete = True
            self._step_counts()
            return
        for key, raw in rows:
            ino, name = parse_xattr_key(key)
            with contextlib.suppress(Damaged):
                record, value = pool.index.inode(ino), unseal(key, raw)
                if record is None:
                    continue
                pool.node_shares.find_attribute(ino, record, attribute_bytes(name, value))
                if name == PIN and value == b"1":
                    self._counts.append(pool.pins.learn(ino, record))
                    ranks.note_found(pool, ino, record)  # its walk may have come before
        self._after = rows[-1][0]
        pool.node_shares.reach_attributes(parse_xattr_key(self._after)[0])
        pool.background.submit_leisure(self._step_pins)

    def _step_counts(self) -> None:
        """Count some of what the pins hold: a directory may have as many names as it likes."""
        while self._counts:
            with contextlib.suppress(Damaged):
                for _ in self._counts[0]:
                    self._pool.background.submit_leisure(self._step_counts)
                    return
            self._counts.popleft()

    def _note(self, ino: InodeNo) -> None:
        pool = self._pool
        record = pool.index.inode(ino)
        if record is None or pool.leases.state_of(ino) is not None:
            return
        if not self._same_boot and record.maker_tgid:
            record = record._replace(maker_tgid=_OF_ANOTHER_BOOT)
        pool.leases.note(ino, record, pool.monotonic_s())
