"""Which blocks are evicted first, found from columns of numbers about all of them.

A policy looks at all rows at once and names victims in the order in which they should go. This is a
hint: eviction checks each block again.

The clock is a counter, not the time of day: ``burst << BURST_BITS | n`` for the n-th touch of a
burst. A prompt's blocks are stored and looked up in one burst, and a prefix is useful only up to
its first missing block. So within a burst the tail goes before the head, which was created earlier.
This order holds only among a small part of all blocks (CHAIN_PART). In a small pool one burst may
touch every block, and then each new block would be evicted for the next one.
"""

from collections.abc import Sequence
from enum import IntEnum
from typing import Final, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from kvfs.core.block_owners import Owners
from kvfs.core.ghosts import GHOSTS, NO_SAMPLE, Ghosts, ShadowCaches
from kvfs.core.learned import Learner

#: The low bits of a stamp count the touches of one burst.
BURST_BITS: Final = 20
#: An empty list of inode numbers.
NOTHING: Final = np.zeros(0, np.uint64)
_BURST_SHIFT: Final = np.uint64(BURST_BITS)
_WITHIN: Final = np.uint64((1 << BURST_BITS) - 1)
_NO_BOUND: Final = 1 << 63
#: Tails go before heads among 1/CHAIN_PART of all blocks, if touched one after the other.
CHAIN_PART: Final = 64
#: One plan names at most this many blocks used again; then all blocks are looked at anew.
_AGAIN_MAX: Final = 64
#: Rows that are scanned again for each block, if need be: some 10 us.
_SCANNED_AT_ONCE: Final = 1 << 10
#: Rows of the sample that tells how warm the coldest blocks are.
_SAMPLE: Final = 1 << 12


class Rank(IntEnum):
    """Which blocks go before which others; within a rank the policy chooses."""

    NEVER = 0
    #: Orphans, and blocks in a directory with the policy ``evict=first``.
    FIRST = 1
    PUBLISHED = 2
    #: Published, but too small to be more than a configuration or a sidecar.
    SMALL = 3
    #: Slabs whose process has ended.
    ORPHAN_SLAB = 4
    #: Pinned, or under ``evict=never``, within the limit ``pin_share``. Not evicted.
    KEPT = 5
    #: Published, and a hint says that it will be used again: the highest priority goes last.
    RETAINED = 6


#: The ranks that may be evicted, first to last.
EVICTABLE: Final = (Rank.FIRST, Rank.PUBLISHED, Rank.SMALL, Rank.ORPHAN_SLAB, Rank.RETAINED)


class Retention(NamedTuple):
    """What hints say of the blocks with rank RETAINED, a row a block; later rows have none."""

    priority: NDArray[np.uint8]
    #: Until when it holds (s, of the clock of ages), and the present time.
    until_s: NDArray[np.uint32]
    now_s: int


class Columns(NamedTuple):
    """Arrays of equal length, a row a block; a row that is not in use has ``ino`` 0.

    They may change while they are read. ``touched`` is the stamp of the last touch. ``touches``
    counts the bursts in which it was touched (saturating; 1: stored, and not used since).
    """

    ino: NDArray[np.uint64]
    touched: NDArray[np.uint64]
    touches: NDArray[np.uint16]
    allocated_bytes: NDArray[np.uint64]
    rank: NDArray[np.uint8]
    #: None if no hint was ever given.
    retention: Retention | None = None
    #: None while all blocks are of one tenant, or are not all known.
    owners: Owners | None = None
    #: 32 bits of a hash of each name; none where no policy reads them.
    name_hash: NDArray[np.uint32] = np.zeros(0, np.uint32)

    def of(self, rows: NDArray[np.intp]) -> "Columns":
        """Return *rows* of these alone, without owners. Ranks must be those of now."""
        retention = self.retention
        if retention is not None:
            priority = _padded(retention.priority, len(self.ino))[rows]
            retention = Retention(priority, np.zeros(0, np.uint32), retention.now_s)
        return Columns(
            self.ino[rows],
            self.touched[rows],
            self.touches[rows],
            self.allocated_bytes[rows],
            self.rank[rows],
            retention,
        )


def _padded(known: NDArray[np.uint8], count: int) -> NDArray[np.uint8]:
    """Return *count* rows, of which the later ones are 0 if fewer are *known*."""
    rows = np.zeros(count, np.uint8)
    known = known[:count]
    rows[: len(known)] = known
    return rows


class EvictionPolicy(Learner, Protocol):
    """How victims are chosen."""

    name: str

    @property
    def sample_bits(self) -> int:
        """Call ``used`` only for blocks whose name's hash has none of these bits."""

    def victims(
        self,
        columns: Columns,
        *,
        bytes_wanted: int,
        count_max: int,
        ranks: Sequence[Rank] = EVICTABLE,
        but_not: NDArray[np.uint64] = NOTHING,
        part_of: int = 0,
    ) -> NDArray[np.uint64]:
        """Return inode numbers, in the order of eviction: enough for *bytes_wanted*, if possible.

        At most *count_max*, and only of *ranks*, in that order. Blocks in *but_not* (some
        thousands) and blocks without space are left out. *part_of*: the rows of the whole pool, if
        *columns* are a part of it (``Columns.of``), of which nothing is learned. Takes
        milliseconds: call it in a thread.
        """

    def survey(self, columns: Columns) -> None:
        """Learn what the rows of the whole pool tell, as ``victims`` does of them."""

    def used(self, name_hash: int) -> None:
        """A block of the sample was used again, in another burst."""

    def admitted(self, name_hash: int, allocated_bytes: int) -> bool:
        """A block was stored; True if it was evicted before, so that this counts as a reuse."""

    def evicted(self, name_hash: int, allocated_bytes: int, touches: int) -> None:
        """A block was evicted that was touched in *touches* bursts."""


class Lru(Learner):
    """Evicts the block that was not used for the longest time."""

    name = "lru"
    sample_bits = NO_SAMPLE

    def victims(
        self,
        columns: Columns,
        *,
        bytes_wanted: int,
        count_max: int,
        ranks: Sequence[Rank] = EVICTABLE,
        but_not: NDArray[np.uint64] = NOTHING,
        part_of: int = 0,
    ) -> NDArray[np.uint64]:
        """Return inode numbers, first to go first; see ``EvictionPolicy``."""
        columns = as_of_now(columns)
        found = _Found(columns, bytes_wanted, count_max, but_not, part_of)
        for rank in ranks:
            found.take_rank(rank)
        return found.inos()

    def survey(self, columns: Columns) -> None:
        """Learn nothing from it."""

    def used(self, name_hash: int) -> None:
        """Learn nothing from it."""

    def admitted(self, name_hash: int, allocated_bytes: int) -> bool:
        """Remember nothing."""
        return False

    def evicted(self, name_hash: int, allocated_bytes: int, touches: int) -> None:
        """Remember nothing."""


class Arc(Learner):
    """Blocks used once compete for space with those used again (Megiddo and Modha, FAST 2003).

    The policy learns from blocks that come back after their eviction, of which a ghost is left. A
    ghost of a block used once makes more room for such blocks, any other ghost makes less.
    """

    name = "arc"
    sample_bits = NO_SAMPLE

    def __init__(self) -> None:
        #: Space for blocks used once, while both kinds need space.
        self.once_bytes = 0
        self._ghosts = Ghosts()
        #: How many blocks of each kind the last scan found, and their bytes.
        self._counts = (0, 0)
        self._held_bytes = 0

    def victims(
        self,
        columns: Columns,
        *,
        bytes_wanted: int,
        count_max: int,
        ranks: Sequence[Rank] = EVICTABLE,
        but_not: NDArray[np.uint64] = NOTHING,
        part_of: int = 0,
    ) -> NDArray[np.uint64]:
        """Return inode numbers, first to go first; see ``EvictionPolicy``."""
        columns = as_of_now(columns)
        found = _Found(columns, bytes_wanted, count_max, but_not, part_of)
        for rank in ranks:
            if rank is Rank.PUBLISHED:
                kinds = _Kinds(columns)
                if not part_of:
                    self._learn(kinds)
                # Of a part of the pool, blocks used once have the same part of their space.
                room_bytes = self.once_bytes * kinds.held_bytes // max(1, self._held_bytes)
                found.take_coldest(kinds.once, kinds.once_bytes - room_bytes)
                found.take_coldest(kinds.again)
            found.take_rank(rank)
        return found.inos()

    def survey(self, columns: Columns) -> None:
        """Learn how many blocks of each kind there are; see ``EvictionPolicy``."""
        self._learn(_Kinds(as_of_now(columns)))

    def _learn(self, kinds: "_Kinds") -> None:
        self._counts = int(np.count_nonzero(kinds.once)), int(np.count_nonzero(kinds.again))
        self._held_bytes = kinds.held_bytes

    def used(self, name_hash: int) -> None:
        """Learn nothing from it."""

    def admitted(self, name_hash: int, allocated_bytes: int) -> bool:
        """A block was stored. If evicted lately, adapt the space of its kind and return True."""
        lives = self._lives()
        kind = self._ghosts.pop(name_hash, lives)
        if kind is None:
            return False
        live = [max(1, min(pair)) for pair in zip(self._ghosts.counts, lives, strict=True)]
        step_bytes = int(allocated_bytes * max(1.0, live[1 - kind] / live[kind]))
        wanted_bytes = self.once_bytes + (step_bytes if kind == 0 else -step_bytes)
        self.once_bytes = min(max(0, wanted_bytes), self._held_bytes)
        return True

    def evicted(self, name_hash: int, allocated_bytes: int, touches: int) -> None:
        """Remember the name."""
        self._ghosts.remember(name_hash, frequent=touches > 1, lives=self._lives())

    def _lives(self) -> tuple[int, int]:
        """Return after how many evictions of its kind a ghost is forgotten: ARC's B1 and B2."""
        once, again = self._counts
        return again, once


class _Kinds:
    """The published rows, as masks: of blocks used once, and of those used again."""

    def __init__(self, columns: Columns) -> None:
        of_rank = _of_rank(columns, Rank.PUBLISHED)
        self.once: Final = of_rank & (columns.touches < 2)
        self.again: Final = of_rank & ~self.once
        self.once_bytes: Final = int(np.dot(columns.allocated_bytes, self.once))
        again_bytes = int(np.dot(columns.allocated_bytes, self.again))
        self.held_bytes: Final = self.once_bytes + again_bytes


class Adaptive(Learner):
    """Evicts blocks used once first, or by age alone, whichever gives more hits.

    Which one does depends on the pool's size relative to its load, and two miniature caches measure
    it (ghosts.py). A small pool keeps blocks used again, and lets floods of new ones pass.
    """

    name = "adaptive"

    def __init__(self) -> None:
        self._ghosts = Ghosts(1)
        self._shadows = ShadowCaches()
        #: How many blocks the last scan found.
        self._held = 0

    @property
    def sample_bits(self) -> int:
        """See ``EvictionPolicy``."""
        return self._shadows.sample_bits

    @property
    def once_first(self) -> bool:
        """Whether blocks used once go first now."""
        return self._shadows.once_first

    def victims(
        self,
        columns: Columns,
        *,
        bytes_wanted: int,
        count_max: int,
        ranks: Sequence[Rank] = EVICTABLE,
        but_not: NDArray[np.uint64] = NOTHING,
        part_of: int = 0,
    ) -> NDArray[np.uint64]:
        """Return inode numbers, first to go first; see ``EvictionPolicy``."""
        columns = as_of_now(columns)
        published = _of_rank(columns, Rank.PUBLISHED)
        once = published & (columns.touches < 2)
        if not part_of:
            self._held = int(np.count_nonzero(published))
        if self.once_first:
            # Blocks stored after this plan should go first, so name few blocks used again.
            count_max = min(count_max, max(_AGAIN_MAX, int(np.count_nonzero(once))))
        found = _Found(columns, bytes_wanted, count_max, but_not, part_of)
        for rank in ranks:
            if rank is Rank.PUBLISHED and self.once_first:
                found.take_coldest(once)
            found.take_rank(rank)
        return found.inos()

    def survey(self, columns: Columns) -> None:
        """Learn how many blocks there are; see ``EvictionPolicy``."""
        self._held = int(np.count_nonzero(_of_rank(as_of_now(columns), Rank.PUBLISHED)))

    def used(self, name_hash: int) -> None:
        """A block of the sample was used again."""
        self._shadows.use(name_hash)

    def admitted(self, name_hash: int, allocated_bytes: int) -> bool:
        """A block was stored; True if it was evicted lately."""
        if not name_hash & self._shadows.sample_bits:
            self._shadows.use(name_hash)
        return self._ghosts.pop(name_hash, self._lives()) is not None

    def evicted(self, name_hash: int, allocated_bytes: int, touches: int) -> None:
        """Remember the name; the pool is full, so its size is known."""
        self._shadows.resize(self._held)
        self._ghosts.remember(name_hash, frequent=touches > 1, lives=self._lives())

    def _lives(self) -> tuple[int, int]:
        """Return after how many evictions of its kind a ghost is forgotten."""
        return GHOSTS * self._held, self._held


class _Found:
    """Victims found so far, and how much is still wanted. Sets of rows are masks, for speed."""

    def __init__(
        self,
        columns: Columns,
        bytes_wanted: int,
        count_max: int,
        but_not: NDArray[np.uint64],
        part_of: int,
    ) -> None:
        self._columns = columns
        #: How many rows were scanned for this.
        self._scanned = part_of or len(columns.ino)
        self._bytes = bytes_wanted
        self._count = count_max
        self._but_not = but_not
        self._chain = np.uint64(max(1, int(np.count_nonzero(columns.ino)) // CHAIN_PART))
        self._taken: list[NDArray[np.uint64]] = []

    def inos(self) -> NDArray[np.uint64]:
        """Return the victims' inode numbers in order."""
        return np.concatenate(self._taken) if self._taken else NOTHING

    def take_rank(self, rank: Rank) -> None:
        """Take the coldest blocks of *rank*, as many as are still wanted."""
        if self._bytes <= 0 or self._count <= 0:
            return
        of_rank = _of_rank(self._columns, rank)
        if rank is Rank.RETAINED:
            self._take_retained(of_rank)
        else:
            self.take_coldest(of_rank)

    def _take_retained(self, of_rank: NDArray[np.bool_]) -> None:
        """Take those that hints retain, the coldest of the lowest priority first.

        Blocks stored after this plan should go before them. So it names none beside a few others,
        and few beside fewer: a large pool is not to be scanned for each store.
        """
        others = sum(map(len, self._taken))
        if others > min(_AGAIN_MAX - 1, self._scanned // _SCANNED_AT_ONCE):
            return
        if others:
            self._count = min(self._count, _AGAIN_MAX)
        if self._columns.retention is None:
            self.take_coldest(of_rank)
            return
        priority = _padded(self._columns.retention.priority, len(of_rank))
        for level in np.unique(priority[of_rank]):
            self.take_coldest(of_rank & (priority == level))

    def take_coldest(self, among: NDArray[np.bool_], bytes_max: int = _NO_BOUND) -> None:
        """Take the coldest rows of *among*, as many as are still wanted, or for *bytes_max*.

        Of rows touched in one burst those created last go first: blocks of a prompt are created
        head first, and their inode numbers rise.
        """
        bytes_wanted = min(self._bytes, bytes_max)
        if bytes_wanted <= 0 or self._count <= 0 or not among.any():
            return
        columns = self._columns
        rows = self._preselected(among, bytes_wanted)
        touched = columns.touched[rows]
        together = (touched & _WITHIN) // self._chain
        rows = rows[np.lexsort((~columns.ino[rows], together, touched >> _BURST_SHIFT))]
        rows = rows[: self._count]
        sizes_bytes = columns.allocated_bytes[rows]
        count = int(np.searchsorted(np.cumsum(sizes_bytes), np.uint64(bytes_wanted))) + 1
        inos = columns.ino[rows[:count]]
        self._taken.append(inos)
        self._but_not = np.concatenate((self._but_not, inos))
        self._bytes -= int(sizes_bytes[:count].sum())
        self._count -= len(inos)

    def _preselected(self, among: NDArray[np.bool_], bytes_wanted: int) -> NDArray[np.intp]:
        """Return the coldest rows of *among*, unsorted, with enough bytes.

        A sample gives the stamp up to which rows are taken; a full sort takes ten times as long.
        """
        columns = self._columns
        step = len(among) // _SAMPLE + 1
        sampled = np.flatnonzero(among[::step]) * step
        sample = np.sort(columns.touched[sampled])
        mean_bytes = max(1, int(columns.allocated_bytes[sampled].mean())) if len(sampled) else 1
        count = min(self._count, bytes_wanted // mean_bytes) + len(self._but_not)
        while True:
            # A quarter more than needed, and the error of a sample.
            count += count // 4 + _SAMPLE // 256 * step
            if count // step >= len(sample):
                return self._allowed(np.flatnonzero(among))
            warmest = sample[count // step] | _WITHIN  # the whole burst, which is then put in order
            chosen = self._allowed(np.flatnonzero(among & (columns.touched <= warmest)))
            enough = int(columns.allocated_bytes[chosen].sum()) >= bytes_wanted
            if enough or len(chosen) >= self._count:
                return chosen
            count *= 4

    def _allowed(self, rows: NDArray[np.intp]) -> NDArray[np.intp]:
        """Return *rows* without those that are excluded or already found."""
        if not len(self._but_not):
            return rows
        return rows[np.isin(self._columns.ino[rows], self._but_not, invert=True)]


def as_of_now(columns: Columns) -> Columns:
    """Return *columns* in which blocks are published again whose hint has ended."""
    retention = columns.retention
    if retention is None:
        return columns
    rank = columns.rank.copy()
    known = rank[: len(retention.until_s)]
    until_s = retention.until_s[: len(known)]
    known[(known == Rank.RETAINED) & (until_s <= retention.now_s)] = Rank.PUBLISHED
    return columns._replace(rank=rank)


def _of_rank(columns: Columns, rank: Rank) -> NDArray[np.bool_]:
    """Return a mask of the blocks of *rank* that hold space."""
    of_rank: NDArray[np.bool_] = columns.rank == rank
    if of_rank.any():
        of_rank &= columns.ino != 0
        of_rank &= columns.allocated_bytes != 0
    return of_rank


def policy_named(name: str) -> EvictionPolicy:
    """Return the policy that the setting ``eviction`` names."""
    if name == Arc.name:
        return Arc()
    return Adaptive() if name == Adaptive.name else Lru()
