"""What recordings of the load are told: which blocks were used since they asked last.

A use writes the heat's row and nothing more, also while somebody records. So a recording that asks
looks at the stamps of all rows, and is told those that are new since it asked before, in their
order. A block that was used twice in between counts once. Blocks that went in between are kept for
it, up to a bound, and are told with the others.
"""

import hashlib
from collections import deque
from collections.abc import Callable
from itertools import count
from typing import Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from kvfs.core.errors import SourceBusy
from kvfs.core.eviction_policy import Columns
from kvfs.core.types import SECOND_NS, InodeNo, InodeRecord
from kvfs.pool.rules.ranks import name_hash
from kvfs.storage.heat import Heat

#: Blocks of one answer's look at the rows: more than are used in a second. Of further ones the
#: oldest are lost. As many may go between two looks.
BLOCKS_MAX: Final = 1 << 18
#: A look takes up to a millisecond for a million rows.
RECORDINGS_MAX: Final = 4
#: A recording that does not ask for so long has ended.
IDLE_MAX_S: Final = 60.0
_HASH_BYTES: Final = 4
_BYTE: Final = np.uint32(0xFF)


class KeyedNames:
    """Numbers that stand for names, and tell nothing of them without a key.

    The hashes in the heat are checksums: who guesses a name can compute its hash. Here each byte of
    such a hash selects a word of a table that is made of the key, and the words are combined
    (tabulation hashing, Zobrist 1970). One key gives a name the same number in every server.
    """

    def __init__(self, key: bytes) -> None:
        """*key*: of any length, by chance."""
        words = _HASH_BYTES * (int(_BYTE) + 1)
        table = hashlib.shake_256(key).digest(words * _HASH_BYTES)
        self._table = np.frombuffer(table, "<u4").reshape(_HASH_BYTES, -1)

    def numbers(self, hashes: NDArray[np.uint32]) -> NDArray[np.uint32]:
        """Return a number of 32 bits for each of *hashes*, which have 32, too."""
        found = np.zeros(len(hashes), np.uint32)
        for byte, words in enumerate(self._table):
            found ^= words[hashes >> np.uint32(8 * byte) & _BYTE]
        return found


class Used(NamedTuple):
    """Blocks that were used, first to last; a block has one row in each array."""

    numbers: NDArray[np.uint32]
    """What stands for their names."""
    sizes_bytes: NDArray[np.uint64]
    """What they take on the device."""
    lost: int = 0
    """Blocks used before these that are not told."""
    is_all: bool = True
    """Whether these are all until now."""


class _Gone(NamedTuple):
    """A block that went before it was told."""

    stamp: int
    name_hash: int
    size_bytes: int


class TouchRecording:
    """What one recording was not told yet."""

    def __init__(self, heat: Heat, names: KeyedNames, asked_s: float) -> None:
        #: When it asked last (s, monotonic).
        self.asked_s = asked_s
        self._heat = heat
        self._names = names
        columns = heat.columns()
        #: What has a lower stamp was told, but for the drafts.
        self._since = heat.stamp
        self._keep_drafts(columns, np.flatnonzero(columns.ino))
        self._gone: deque[_Gone] = deque()
        self._lost = 0
        #: What waits of the last look.
        self._waiting = Used(np.zeros(0, np.uint32), np.zeros(0, np.uint64))

    def _keep_drafts(self, columns: Columns, rows: NDArray[np.intp]) -> None:
        """Remember those of *rows* that are not stored yet: their stamp is that of their close."""
        self._draft_rows = rows[columns.touches[rows] == 0]
        self._drafts = columns.ino[self._draft_rows]

    def went(self, ino: InodeNo, record: InodeRecord) -> None:
        """Block *ino* goes; call it before the heat is told."""
        stamp = self._heat.touched(ino)
        if not self._heat.touches(ino) or (stamp < self._since and ino not in self._drafts):
            return
        size_bytes = self._heat.allocated_bytes(ino)
        self._gone.append(_Gone(stamp, name_hash(record), size_bytes))
        if len(self._gone) > BLOCKS_MAX:
            self._gone.popleft()
            self._lost += 1

    def pop(self, count_max: int) -> Used:
        """Return at most *count_max* blocks; the rows are looked at once all are told."""
        if not len(self._waiting.numbers):
            self._waiting = self._used_now()
        numbers, sizes_bytes, lost, _ = self._waiting
        rest = Used(numbers[count_max:], sizes_bytes[count_max:])
        self._waiting = rest
        is_all = not len(rest.numbers)
        return Used(numbers[:count_max], sizes_bytes[:count_max], lost, is_all)

    def _used_now(self) -> Used:
        """Look at the rows; no time passes between the look and the clock that ends it."""
        columns, since = self._heat.columns(), self._since
        self._since = self._heat.stamp
        rows = np.flatnonzero(columns.touched >= np.uint64(since))
        rows = rows[columns.ino[rows] != 0]
        drafts = self._draft_rows[columns.ino[self._draft_rows] == self._drafts]
        rows = np.concatenate((drafts[columns.touched[drafts] < np.uint64(since)], rows))
        self._keep_drafts(columns, rows)
        rows = rows[columns.touches[rows] > 0]
        gone, self._gone = np.array(self._gone, np.uint64).reshape(-1, len(_Gone._fields)), deque()
        stamps = np.concatenate((gone[:, 0], columns.touched[rows]))
        hashes = np.concatenate((gone[:, 1].astype(np.uint32), columns.name_hash[rows]))
        sizes_bytes = np.concatenate((gone[:, 2], columns.allocated_bytes[rows]))
        order = np.argsort(stamps, kind="stable")[-BLOCKS_MAX:]
        lost, self._lost = self._lost + len(stamps) - len(order), 0
        return Used(self._names.numbers(hashes[order]), sizes_bytes[order], lost)


class TouchRecordings:
    """The recordings of one pool that are under way."""

    def __init__(self, heat: Heat, monotonic_s: Callable[[], float]) -> None:
        self._heat = heat
        self._monotonic_s = monotonic_s
        #: An earlier server of this mount gave other numbers: its recordings may still ask.
        self._numbers = count(int(monotonic_s() * SECOND_NS))
        self._under_way: dict[int, TouchRecording] = {}
        #: Whether there is one; otherwise ``went`` need not be called.
        self.wanted = False

    def begin(self, names: KeyedNames) -> int:
        """Record from now on, and return the recording's number. Raises SourceBusy."""
        if len(self._under_way) >= RECORDINGS_MAX:
            raise SourceBusy(f"{RECORDINGS_MAX} recordings of this mount are under way")
        number = next(self._numbers)
        self._under_way[number] = TouchRecording(self._heat, names, self._monotonic_s())
        self.wanted = True
        return number

    def asked(self, number: int) -> TouchRecording | None:
        """Return the recording *number*, which asks now; None if there is none."""
        found = self._under_way.get(number)
        if found is not None:
            found.asked_s = self._monotonic_s()
        return found

    def end(self, number: int) -> None:
        """End the recording *number*, if there is one."""
        self._under_way.pop(number, None)
        self.wanted = bool(self._under_way)

    def went(self, ino: InodeNo, record: InodeRecord) -> None:
        """Block *ino* goes, with the name in *record*; call it before the heat is told."""
        for recording in self._under_way.values():
            recording.went(ino, record)

    def run_due(self, now_s: float) -> None:
        """End those that have not asked for long."""
        for number, recording in list(self._under_way.items()):
            if now_s - recording.asked_s > IDLE_MAX_S:
                self.end(number)
