"""The heat follows the index: each block of the index has its row and rank, and nothing else has.

Needed after a start, since the policies in the settings may have changed, HEAT may be lost or
older than the index, and when a policy changes for all that lies below a directory.
"""

from typing import Final

from kvfs.core.errors import Damaged, NoSpace
from kvfs.core.lifecycle import SETTLED
from kvfs.core.records import INODE_PREFIX, parse_inode, parse_inode_key, state_of_inode
from kvfs.core.types import InodeNo
from kvfs.pool import ranks
from kvfs.pool.pool import Pool

#: Inodes a step, some 5 us each: a step runs between two requests.
_STEP: Final = 64


class HeatScan:
    """Walks the index, then the heat, a step at a time.

    Meanwhile a block may be missing in the heat, and is not evicted; or have the rank of before,
    which whoever evicts does not rely on.
    """

    def __init__(self, pool: Pool) -> None:
        self._pool = pool
        self._running = self._again = False
        #: The last inode looked at; None: all of them were.
        self._after: bytes | None = b""
        self._row = 0

    @property
    def done(self) -> bool:
        """Whether no walk is under way."""
        return not self._running

    def start(self) -> None:
        """Walk through everything, or once more when the present walk is done."""
        if self._running:
            self._again = True
            return
        self._running, self._again = True, False
        self._after, self._row = b"", 0
        self._pool.background.submit_leisure(self._step)

    def _step(self) -> None:
        """Go on for a moment; after damage the walk has ended, and the next start begins anew."""
        try:
            self._running = self._step_index() or self._step_heat()
        except Exception as error:
            self._running = isinstance(error, (NoSpace, OSError))  # which is put off
            raise
        if self._running:
            self._pool.background.submit_leisure(self._step)
        elif self._again:
            self.start()

    def _step_index(self) -> bool:
        """Note some blocks of the index; False behind its end."""
        pool = self._pool
        if self._after is None:
            return False
        rows = pool.index.rows(INODE_PREFIX, self._after, _STEP)
        for key, raw in rows:
            try:
                if state_of_inode(raw) not in SETTLED:
                    continue
                record = parse_inode(raw)
            except Damaged:
                continue  # whoever asks for it will make it known
            ranks.note_found(pool, parse_inode_key(key), record)
        self._after = rows[-1][0] if rows else None
        return bool(rows)

    def _step_heat(self) -> bool:
        """Drop some rows of the heat that the index does not know; False behind its end."""
        pool = self._pool
        rows = pool.heat.columns().ino[self._row : self._row + _STEP].tolist()
        for ino in rows:
            if ino and not pool.index.knows(InodeNo(ino)):
                pool.heat.drop(InodeNo(ino))
        self._row += _STEP
        return bool(rows)
