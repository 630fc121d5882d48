"""Units: files that are of no use without each other, and so go together.

A directory under ``user.kvfs.evict=together`` is a unit, with all below it: a database, a pool and
its index in a second file. It is as warm as its newest use, and one index transaction removes all
of its names. The files of a unit that is too large for one go one by one, and kvfs says so.

Without that policy, slabs that a process has left in a directory are a unit with the small files,
and those named as an index, beside them. One of these may say what is in a slab: alone it would
give zeros for what was stored.
"""

import stat
from collections.abc import Callable, Iterator
from typing import Final, NamedTuple

from kvfs.core.eviction_policy import Rank
from kvfs.core.lifecycle import BESIDE_SLAB_MAX, SLABS, State, is_index
from kvfs.core.types import NO_INODE, InodeNo, InodeRecord
from kvfs.engine.eviction.victims import look_at, obstacle
from kvfs.pool.pool import Pool
from kvfs.pool.rules.ranks import SMALL_BYTES, rank_of
from kvfs.storage.age_clock import AgeClock
from kvfs.storage.heat import Heat

#: The most names in a unit: one transaction removes them, some 60 us each.
NAMES_MAX: Final = 1024
#: Inodes read from the index at a time.
_READ_AT_ONCE: Final = 256

Victim = tuple[InodeNo, InodeRecord]


class UnitSize(NamedTuple):
    """How large a unit is; names beyond the bound are not counted."""

    names: int
    size_bytes: int
    #: Whether its files go one by one, because they are too many, or too large.
    is_too_large: bool


class _Wait(NamedTuple):
    """A unit that stays until *turn* in the present plan, and then is as warm as *stamp*."""

    turn: tuple[int, int]
    stamp: int
    inos: list[InodeNo]


class Units:
    """The units of one pool."""

    def __init__(self, pool: Pool) -> None:
        self._pool = pool
        #: Units that did not go when the present plan named one of theirs, and until when.
        self._waiting: dict[InodeNo, _Wait] = {}

    def begin_plan(self) -> None:
        """Let all of a unit be as warm as its newest use, so that the next plan names it there."""
        for wait in self._waiting.values():
            for ino in wait.inos:
                self._pool.rules.heat.warm(ino, wait.stamp)
        self._waiting.clear()

    def of(self, record: InodeRecord) -> InodeNo:
        """Return the directory of the unit that the block with *record* is in; 0: of none."""
        if record.state == State.ORPHAN:  # a temporary file of a process that has ended
            return NO_INODE
        if unit := self._pool.rules.policies.of(record.parent).unit:
            return unit
        return record.parent if _goes_with(record) and self._has_slab(record.parent) else NO_INODE

    def _has_slab(self, directory: InodeNo) -> bool:
        """Whether a process has left a slab in *directory*, beside few other files."""
        if not self._pool.rules.heat.held_bytes[Rank.ORPHAN_SLAB]:
            return False  # there are none at all
        record = self._pool.index.inode_or_miss(directory)
        if record is None or record.entries > BESIDE_SLAB_MAX:
            return False
        return any(own.state == State.ORPHAN_SLAB for _, own in self._beside(directory))

    def _beside(self, directory: InodeNo) -> Iterator[Victim]:
        """Yield the files of *directory* itself."""
        return (one for one in self._children(directory) if stat.S_ISREG(one[1].mode))

    def _children(self, directory: InodeNo) -> Iterator[Victim]:
        """Yield what is in *directory* itself and can be read."""
        for children in self._pool.index.below(directory, _READ_AT_ONCE):
            for ino, _ in children:
                record = self._pool.index.inode_or_miss(ino)
                if record is not None:
                    yield ino, record

    def members(self, ino: InodeNo, record: InodeRecord) -> list[Victim]:
        """Return the blocks of the unit that *ino* is in; itself alone if there is none."""
        root = self.of(record)
        if not root:
            return [(ino, record)]
        if not self._pool.rules.policies.of(record.parent).unit:
            return [(beside, own) for beside, own in self._beside(root) if _goes_with(own)]
        found = list(self._files(root))
        return found if self._fits(found) else [(ino, record)]

    def coldest(self, ino: InodeNo, record: InodeRecord) -> list[Victim]:
        """Return the blocks that go if *ino*, the coldest of a plan, is evicted.

        There are none while its unit was used after it, or one of the unit may not go. Atomic.
        """
        root = self.of(record)
        if not root:
            return [(ino, record)]
        heat = self._pool.rules.heat
        if (wait := self._waiting.get(root)) is not None and self._turn(ino, record) < wait.turn:
            return []
        members = self.members(ino, record)
        if len(members) == 1:
            return members
        newest = max(heat.touched(member) for member, _ in members)
        last = max(self._turn(member, own) for member, own in members)
        going = self._all_that_go(members)
        if going and self._turn(ino, record) >= last:
            return going
        inos = [member for member, _ in members]
        if going:
            self._waiting[root] = _Wait(last, newest, inos)
        else:  # who keeps it, a writer say, uses it now
            self._waiting[root] = _Wait((Rank.KEPT, 0), heat.stamp, inos)
        return []

    def _turn(self, ino: InodeNo, record: InodeRecord) -> tuple[int, int]:
        """Return what a plan sorts by: the lowest goes first."""
        policy = self._pool.rules.policies.of(record.parent)
        return rank_of(record, policy.evict), self._pool.rules.heat.touched(ino)

    def together(self, ino: InodeNo, record: InodeRecord, *, open_too: bool) -> list[Victim]:
        """Return the blocks that go if *ino* is evicted, none if one of them may not go.

        With *open_too* open ones may go, unless somebody writes them. Atomic.
        """
        members = self.members(ino, record)
        if len(members) == 1:
            return members
        if not open_too:
            return self._all_that_go(members)
        pool = self._pool
        stays = any(obstacle(pool, member, own, open_too=True) for member, own in members)
        return [] if stays else members

    def size(self, root: InodeNo, *, to_be: bool = False) -> UnitSize:
        """Return how large the unit of directory *root* is, or is *to_be*: with all below it."""
        found = list(self._files(root, all_below=to_be))
        size_bytes = sum(record.allocated_bytes for _, record in found)
        return UnitSize(len(found), size_bytes, not self._fits(found))

    @property
    def bound_bytes(self) -> int:
        """The most bytes that a unit may hold."""
        pool = self._pool
        return int(pool.settings.together_max * pool.space.taken.usable_bytes)

    def _all_that_go(self, members: list[Victim]) -> list[Victim]:
        """Return *members* as they are now, none if one of them may not go or is in use."""
        going: list[Victim] = []
        for member, _ in members:
            record, used, passing = look_at(self._pool, member)
            if record is None or (used and not passing):
                return []
            going.append((member, record))
        return going

    def _fits(self, found: list[Victim]) -> bool:
        size_bytes = sum(record.allocated_bytes for _, record in found)
        return len(found) <= NAMES_MAX and size_bytes <= self.bound_bytes

    def _files(self, root: InodeNo, *, all_below: bool = False) -> Iterator[Victim]:
        """Yield the files of the unit of *root*, one more than it may have at most."""
        policies, count = self._pool.rules.policies, 0
        waiting = [root]
        while waiting:
            for ino, record in self._children(waiting.pop()):
                if stat.S_ISREG(record.mode):
                    yield ino, record
                elif stat.S_ISDIR(record.mode) and (all_below or policies.of(ino).unit == root):
                    waiting.append(ino)
                count += 1
                if count > NAMES_MAX:
                    return


def _goes_with(record: InodeRecord) -> bool:
    """Whether the file with *record* goes with the slabs that are left in its directory."""
    if record.state in SLABS:
        return True
    return record.state != State.ORPHAN and (
        record.size_bytes < SMALL_BYTES or is_index(record.name)
    )


class UsesOfUnits:
    """Whether blocks were used since one time: a unit was if one of its files was."""

    def __init__(
        self,
        heat: Heat,
        age_clock: AgeClock,
        clock_ns: Callable[[], int],
        units: Units,
        since_ns: int,
    ) -> None:
        """*since_ns* is of *age_clock*. Keep it for one look at many blocks only."""
        self._heat = heat
        self._age_clock = age_clock
        self._clock_ns = clock_ns
        self._units = units
        self._since_ns = since_ns
        self._found: dict[InodeNo, bool | None] = {}

    def of(self, ino: InodeNo, record: InodeRecord) -> bool | None:
        """Return whether block *ino* was used; None: unknown."""
        used = self._is_used(ino, record)
        root = self._units.of(record)
        if used or not root:
            return used
        if root not in self._found:
            self._found[root] = self._of_all(self._units.members(ino, record))
        return self._found[root]

    def _of_all(self, members: list[Victim]) -> bool | None:
        all_uses = {self._is_used(ino, own) for ino, own in members}
        return True if True in all_uses else None if None in all_uses else False

    def _is_used(self, ino: InodeNo, record: InodeRecord) -> bool | None:
        """Return whether block *ino* itself was used; None: unknown.

        Uses are a store, a rename, utime, a lookup, an open. The heat has them all, except those
        that came between its last save and a kill of the server. The times of the block may show
        these. They are of the wall clock, which may have been set since: a time ahead of it says
        nothing.
        """
        unused_ns = self._clock_ns() - max(record.atime_ns, record.mtime_ns, record.ctime_ns)
        if 0 <= unused_ns < self._age_clock.now_ns() - self._since_ns:
            return True
        return self._heat.used_since(ino, self._since_ns)
