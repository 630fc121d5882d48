"""How warm each block is: columns of numbers that a touch changes and a scan reads at once.

A hint, never the truth: the index says what a block is, and who evicts looks there again.
"""

from typing import Final

import numpy as np

from kvfs.eviction import BURST_BITS, Columns, Policy, Rank
from kvfs.syscalls import Syscalls
from kvfs.types import InodeNo

_TOUCHES_MAX: Final = (1 << 16) - 1


class Heat:
    """The rows of one pool. All but ``columns`` belongs to one thread."""

    def __init__(
        self, pool_fd: int, syscalls: Syscalls, *, epoch: int, read_only: bool, policy: Policy
    ) -> None:
        """Open or make HEAT in the pool with *epoch*; a file that does not fit starts cold."""
        self.policy = policy
        self._read_only = read_only
        self._stamp = 1 << BURST_BITS
        self._rows: dict[InodeNo, int] = {}
        self._name_hashes: dict[InodeNo, int] = {}
        self._free: list[int] = []
        self._columns = _room(1024)
        #: Allocated bytes of all rows, by rank.
        self.held_bytes = [0] * len(Rank)

    def __len__(self) -> int:
        return len(self._rows)

    def __contains__(self, ino: InodeNo) -> bool:
        return ino in self._rows

    def note(
        self, ino: InodeNo, allocated_bytes: int, rank: Rank, name_hash: int, *, used_s: int = -1
    ) -> None:
        """Learn of block *ino*, or what became of it; a block that is new here counts as touched.

        *name_hash* (32 bits) tells the name again after the block was evicted. *used_s*: found by
        a search, and used last then (seconds since the epoch). Never raises.
        """
        if self._read_only:
            return
        row = self._rows.get(ino)
        columns = self._columns
        if row is None:
            row = self._row()
            columns = self._columns
            self._rows[ino] = row
            again = used_s < 0 and self.policy.admitted(name_hash, allocated_bytes)
            columns.touches[row] = 1 + again
            columns.touched[row] = self._stamp if used_s < 0 else used_s
            columns.ino[row] = ino
            self._stamp += 1
        else:
            self.held_bytes[columns.rank[row]] -= int(columns.allocated_bytes[row])
        self._name_hashes[ino] = name_hash
        columns.allocated_bytes[row] = allocated_bytes
        columns.rank[row] = rank
        self.held_bytes[rank] += allocated_bytes

    def touch(self, ino: InodeNo) -> None:
        """Block *ino* was used; one that is not known is left alone."""
        row = self._rows.get(ino)
        if row is None:
            return
        columns = self._columns
        if int(columns.touched[row]) >> BURST_BITS != self._stamp >> BURST_BITS:
            columns.touches[row] = min(int(columns.touches[row]) + 1, _TOUCHES_MAX)
        columns.touched[row] = self._stamp
        self._stamp += 1

    def drop(self, ino: InodeNo) -> None:
        """Block *ino* is gone, and not because it was evicted."""
        row = self._rows.pop(ino, None)
        if row is None:
            return
        columns = self._columns
        self.held_bytes[columns.rank[row]] -= int(columns.allocated_bytes[row])
        columns.ino[row] = 0
        del self._name_hashes[ino]
        self._free.append(row)

    def evicted(self, ino: InodeNo) -> None:
        """Block *ino* is gone because it was evicted: the policy may remember it."""
        row = self._rows.get(ino)
        if row is not None:
            columns = self._columns
            size_bytes, touches = int(columns.allocated_bytes[row]), int(columns.touches[row])
            self.policy.evicted(self._name_hashes[ino], size_bytes, touches)
            self.drop(ino)

    def columns(self) -> Columns:
        """Return all rows for a scan, also in a thread; to be let go of before ``close``."""
        return self._columns

    def tick(self, now_s: float) -> None:
        """End the burst when it is due, and make room ahead of need."""

    def close(self) -> None:
        """Let go of the file; what is in it reaches the device with everything else."""

    def _row(self) -> int:
        if self._free:
            return self._free.pop()
        count = len(self._rows)
        if count == len(self._columns.ino):
            old, room = self._columns, _room(2 * count)
            room.ino[:count] = old.ino
            room.touched[:count] = old.touched
            room.touches[:count] = old.touches
            room.allocated_bytes[:count] = old.allocated_bytes
            room.rank[:count] = old.rank
            self._columns = room
        return count


def _room(rows: int) -> Columns:
    return Columns(
        np.zeros(rows, np.uint64),
        np.zeros(rows, np.uint64),
        np.zeros(rows, np.uint16),
        np.zeros(rows, np.uint64),
        np.zeros(rows, np.uint8),
    )
