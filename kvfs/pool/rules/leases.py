"""Blocks that belong to a process (leased blocks and slabs), and orphans, whose process has ended.

Published blocks belong to nobody and are in none of these tables. A lease ends when its maker, the
process that wrote the block, ends. If the maker cannot be watched (a kernel thread, a foreign pid
namespace, an NFS server), the lease ends when the block has not been used for a while. The index
keeps state and maker, so the next server finds the leases again.
"""

from array import array
from collections import OrderedDict, deque
from collections.abc import Callable, Iterator
from typing import Final, NamedTuple

from kvfs.core.changed import Changed, Why
from kvfs.core.lifecycle import HELD, LEASES, State
from kvfs.core.types import InodeNo, InodeRecord
from kvfs.machine.processes import Maker, Processes
from kvfs.pool.rules.lease_shares import LeaseShares

#: Most blocks that are settled in one tick: a process that ends may have made a million.
_SETTLED_A_TICK: Final = 128
#: What belongs to a process; a second name belongs to the one that linked it (aliases.py).
_HELD: Final = HELD | {State.ALIAS}
_KEPT: Final = _HELD | {State.ORPHAN, State.ORPHAN_SLAB}
#: Equal leases share one object, so that a million take 85 MB. At most this many are remembered.
_KINDS_MAX: Final = 4096
#: Changes whose record an earlier server wrote.
_SAID_BEFORE: Final = frozenset({Why.FOUND, Why.RECONCILED})
#: No process has this id. It stands for a maker of another boot, whose birth time means nothing.
_OF_ANOTHER_BOOT: Final = (1 << 32) - 1
#: A maker's list is compacted when more than half of it, and than this many, are stale.
_LOST_MIN: Final = 1024


class Lease(NamedTuple):
    """One block in the tables."""

    state: State
    allocated_bytes: int
    maker: Maker
    uid: int


class _Made:
    """The blocks of one maker: a list that may have stale ones, and how many it really has."""

    __slots__ = ("count", "inos")

    def __init__(self) -> None:
        self.inos = array("Q")
        self.count = 0


class Leases:
    """The leases and orphans of one pool."""

    follows: Final = frozenset(Why) - {Why.CREATED}

    def __init__(
        self,
        makers: Processes,
        lease_s: float,
        leases: LeaseShares,
        monotonic_s: Callable[[], float],
        *,
        same_boot: bool,
    ) -> None:
        """*same_boot*: whether the pool ran last in this boot; otherwise all makers are dead."""
        self._same_boot = same_boot
        self.processes = makers
        self.shares = leases
        self._lease_s = lease_s
        self._monotonic_s = monotonic_s
        self._held: dict[InodeNo, Lease] = {}
        self._kinds: dict[Lease, Lease] = {}
        #: Blocks and bytes in each state.
        self.totals: dict[State, tuple[int, int]] = dict.fromkeys(_KEPT, (0, 0))
        #: The blocks of makers that are alive.
        self._by_maker: dict[Maker, _Made] = {}
        #: Blocks of makers that have ended, settled in turn with those of ``_ended``.
        self._left: deque[Iterator[int]] = deque()
        #: Leases that end by time: when each block was used last (monotonic), oldest first.
        self._timed: OrderedDict[InodeNo, float] = OrderedDict()
        self._ended: deque[InodeNo] = deque()

    def follow(self, changed: Changed) -> None:
        """Add a block that belongs to a process, and drop one that no longer does."""
        ino, record, why = changed.ino, changed.after, changed.why
        if record is None:
            self.drop(ino)
        elif record.state != State.NODE and not (why is Why.FOUND and ino in self._held):
            if why in _SAID_BEFORE and record.maker_tgid and not self._same_boot:
                record = record._replace(maker_tgid=_OF_ANOTHER_BOOT)
            self.put(ino, record, self._monotonic_s())

    def put(self, ino: InodeNo, record: InodeRecord, now_s: float) -> None:
        """Update *ino*, which now has *record*."""
        self.drop(ino)
        state = State(record.state)
        if state not in _KEPT:
            return
        maker = Maker(record.maker_tgid, record.maker_birth)
        lease = self._shared(Lease(state, record.allocated_bytes, maker, record.uid))
        self._held[ino] = lease
        self._count(lease, 1)
        if state not in _HELD:
            return
        lives = self._lives(maker)
        if lives is None:
            self._timed[ino] = now_s
        elif lives:
            made = self._by_maker.get(maker)
            if made is None:
                made = self._by_maker[maker] = _Made()
            made.inos.append(ino)
            made.count += 1
        else:
            self._ended.append(ino)

    def _lives(self, maker: Maker) -> bool | None:
        """Whether *maker* is alive, None if it cannot be watched."""
        if not maker.is_one:
            return None
        if maker in self._by_maker:
            return True
        try:
            return self.processes.lives(maker)
        except OSError:  # no descriptor is left for a pidfd
            return None

    def _count(self, lease: Lease, step: int) -> None:
        state, size_bytes = lease.state, step * lease.allocated_bytes
        before_blocks, before_bytes = self.totals[state]
        self.totals[state] = (before_blocks + step, before_bytes + size_bytes)
        if state in LEASES:
            self.shares.count(lease.uid, lease.maker, size_bytes)

    def _shared(self, lease: Lease) -> Lease:
        if len(self._kinds) > _KINDS_MAX:
            self._kinds.clear()
        return self._kinds.setdefault(lease, lease)

    def drop(self, ino: InodeNo) -> None:
        """Forget *ino*."""
        lease = self._held.pop(ino, None)
        if lease is None:
            return
        self._count(lease, -1)
        self._timed.pop(ino, None)
        if lease.state not in _HELD:
            return
        made = self._by_maker.get(lease.maker)
        if made is not None:
            made.count -= 1
            if not made.count:
                del self._by_maker[lease.maker]
            elif len(made.inos) - made.count > made.count + _LOST_MIN:
                made.inos = array("Q", self._still_of(lease.maker, made))

    def _still_of(self, maker: Maker, made: _Made) -> list[InodeNo]:
        """Return the blocks that *maker* still has, each once, in order."""
        return [
            InodeNo(ino)
            for ino in sorted(set(made.inos))
            if (lease := self._held.get(InodeNo(ino))) is not None
            and lease.maker == maker
            and lease.state in _HELD
        ]

    def touch(self, ino: InodeNo, now_s: float) -> None:
        """Note that a block was used: the time of its lease starts anew, if it ends by time."""
        if ino in self._timed:
            self._timed[ino] = now_s
            self._timed.move_to_end(ino)

    def run_due(self, now_s: float, settle: Callable[[InodeNo], bool]) -> None:
        """End the leases of processes that ended, and of timed leases not used for long.

        Calls *settle* with each inode whose lease ended; it returns False to be called again later.
        """
        self.processes.servers.forget_expired(now_s)
        for maker in self.processes.ended():
            made = self._by_maker.pop(maker, None)
            if made is not None:
                self._left.append(iter(array("Q", self._still_of(maker, made))))
        while self._timed:
            ino, used_s = next(iter(self._timed.items()))
            if used_s + self._lease_s > now_s:
                break
            del self._timed[ino]
            self._ended.append(ino)
        again: list[InodeNo] = []
        for turn in range(_SETTLED_A_TICK):
            ended = self._next_ended(left_first=turn % 2 > 0)
            if ended is None:
                break
            if self._is_without_maker(ended) and not settle(ended):
                again.append(ended)
        self._ended.extend(again)

    def _next_ended(self, *, left_first: bool) -> InodeNo | None:
        """Return the next block to settle. *left_first*: prefer blocks of ended makers."""
        if self._ended and not (left_first and self._left):
            return self._ended.popleft()
        while self._left:
            for ino in self._left[0]:
                return InodeNo(ino)
            self._left.popleft()
        return self._ended.popleft() if self._ended else None

    def _is_without_maker(self, ino: InodeNo) -> bool:
        """Whether *ino* is still held, and has no new maker since its maker ended."""
        lease = self._held.get(ino)
        if lease is None or lease.state not in _HELD:
            return False
        return ino not in self._timed and lease.maker not in self._by_maker

    def state_of(self, ino: InodeNo) -> State | None:
        """Return the state of *ino* if it is in the tables, else None."""
        lease = self._held.get(ino)
        return None if lease is None else lease.state

    def rows(self) -> Iterator[tuple[InodeNo, Lease]]:
        """Yield everything in the tables."""
        return iter(self._held.items())
