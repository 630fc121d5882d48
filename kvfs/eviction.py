"""Which blocks go first, told from columns of numbers about them; nothing else is known here.

A policy looks at all rows at once and names victims in the order they should go. What it says is
a hint: whoever evicts looks at each block again.

The clock is a counter, not the time of day: ``burst << BURST_BITS | n`` for the n-th touch of a
burst. Blocks of one prompt are stored and looked up head first, in one burst, and a prefix is of
use up to its first missing block only: so within a burst the younger touch goes first.
"""

from collections.abc import Sequence
from enum import IntEnum
from typing import Final, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

#: Of a touch's stamp: the low bits count within its burst.
BURST_BITS: Final = 20
_WITHIN: Final = np.uint64((1 << BURST_BITS) - 1)
_NOTHING: Final = np.zeros(0, np.uint64)


class Rank(IntEnum):
    """Which blocks go before which others; within a rank the policy chooses."""

    NEVER = 0
    #: Orphans, and what lies in a directory whose policy is ``evict=first``.
    FIRST = 1
    PUBLISHED = 2
    #: Published, but too small to be more than a configuration or a sidecar.
    SMALL = 3
    #: Slabs whose maker is gone.
    SPENT = 4


#: What may go, first to last.
EVICTABLE: Final = (Rank.FIRST, Rank.PUBLISHED, Rank.SMALL, Rank.SPENT)


class Columns(NamedTuple):
    """Arrays of equal length, a row a block; a row that is not in use has ``ino`` 0.

    They may change while they are read. ``touched`` is the stamp of the last touch, ``touches``
    in how many bursts it was touched (saturating; 1: stored, and not used since).
    """

    ino: NDArray[np.uint64]
    touched: NDArray[np.uint64]
    touches: NDArray[np.uint16]
    allocated_bytes: NDArray[np.uint64]
    rank: NDArray[np.uint8]


class Policy(Protocol):
    """How victims are chosen."""

    name: str

    def victims(
        self,
        columns: Columns,
        *,
        bytes_wanted: int,
        count_max: int,
        ranks: Sequence[Rank] = EVICTABLE,
        but_not: NDArray[np.uint64] = _NOTHING,
    ) -> NDArray[np.uint64]:
        """Return inode numbers, first to go first: just enough for *bytes_wanted*, if there are.

        At most *count_max*, only of *ranks*, in that order; none of *but_not* (some thousands),
        and none that holds no space. Takes milliseconds: it belongs in a thread.
        """

    def admitted(self, name_hash: int, allocated_bytes: int) -> bool:
        """A block came in; True if it is known from before, and its store counts as a reuse."""

    def evicted(self, name_hash: int, allocated_bytes: int, touches: int) -> None:
        """A block that was touched in so many bursts was evicted."""


class Lru:
    """The block goes that was not used for the longest time; of one burst, the last touched."""

    name = "lru"

    def victims(
        self,
        columns: Columns,
        *,
        bytes_wanted: int,
        count_max: int,
        ranks: Sequence[Rank] = EVICTABLE,
        but_not: NDArray[np.uint64] = _NOTHING,
    ) -> NDArray[np.uint64]:
        """Return inode numbers, first to go first; see ``Policy``."""
        found: list[NDArray[np.uint64]] = []
        for rank in ranks:
            wanted = (columns.rank == rank) & (columns.ino != 0) & (columns.allocated_bytes != 0)
            rows = np.flatnonzero(wanted)
            rows = rows[np.isin(columns.ino[rows], but_not, invert=True)]
            rows = rows[np.argsort(columns.touched[rows] ^ _WITHIN)][:count_max]
            ends_bytes = np.cumsum(columns.allocated_bytes[rows])
            count = int(np.searchsorted(ends_bytes, np.uint64(max(0, bytes_wanted)))) + 1
            rows = rows[:count] if bytes_wanted > 0 else rows[:0]
            found.append(columns.ino[rows])
            bytes_wanted -= int(columns.allocated_bytes[rows].sum())
            count_max -= len(rows)
        return np.concatenate(found) if found else _NOTHING

    def admitted(self, name_hash: int, allocated_bytes: int) -> bool:
        """Remember nothing."""
        return False

    def evicted(self, name_hash: int, allocated_bytes: int, touches: int) -> None:
        """Remember nothing."""


def policy_named(name: str, capacity_bytes: int) -> Policy:
    """Return the policy that the setting ``eviction`` names, for a pool of *capacity_bytes*."""
    return Lru()
