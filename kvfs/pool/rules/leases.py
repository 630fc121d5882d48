"""Blocks that belong to a process (leased blocks and slabs), and orphans, whose process has ended.

Published blocks belong to nobody and are in none of these tables. A lease ends when its maker, the
process that wrote the block, ends. If the maker cannot be watched (a kernel thread, a foreign pid
namespace, an NFS server), the lease ends when the block has not been used for a while. The index
keeps state and maker, so the next server finds the leases again.

So one process that goes on storing could take the whole pool. Above the limit of all leases each
tenant has a share of it, and each process of a tenant a part of that share (``LeaseShares``). Only
a process over its part, whose tenant is over the share, is refused: forking gains nothing, and no
process is refused for what another one holds. Blocks stored above the limit (begun before, by other
processes, under temporary names) get a lease until they fill half of what the limit leaves. After
that they are published without one.
"""

from array import array
from collections import OrderedDict, deque
from collections.abc import Callable, Iterator
from typing import Final, NamedTuple

from kvfs.core.account import Accounts, TenantId
from kvfs.core.changed import Changed, Why
from kvfs.core.directory_policy import DirectoryPolicy
from kvfs.core.errors import NoSpace
from kvfs.core.lifecycle import HELD, LEASES, State, is_temporary
from kvfs.core.types import InodeNo, InodeRecord
from kvfs.machine.processes import Maker, Processes

#: Most blocks that are settled in one tick: a process that ends may have made a million.
_SETTLED_A_TICK: Final = 128
#: What belongs to a process; a second name belongs to the one that linked it (inode_rules.py).
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
#: Parts of the space beyond the limit that leases may take: for users over their share (stores
#: under way, and stores of their other processes), and for all users together.
_UNDER_WAY_SHARE: Final = 1 / 4
_OTHERS_SHARE: Final = 1 / 2


class Lessee(NamedTuple):
    """The process with the most leases, in bytes; pid 0 stands for all that cannot be watched."""

    maker: Maker
    held_bytes: int


class LeaseShares:
    """The bytes that leases hold, by tenant and process."""

    def __init__(
        self,
        accounts: Accounts,
        bound_bytes: Callable[[], int],
        whole_bytes: Callable[[], int],
    ) -> None:
        """Count in *accounts*, and for each process.

        *bound_bytes* returns how much of *whole_bytes*() leases may keep now, 0 or more.
        """
        self._tenants = accounts.tenants
        self._leased = accounts.leased
        self.slabs = accounts.slabs
        self._bound_bytes = bound_bytes
        self._whole_bytes = whole_bytes
        self._makers: dict[TenantId, dict[Maker, int]] = {}
        #: Stores that were refused.
        self.refused = 0

    @property
    def held_bytes(self) -> int:
        """What all leases hold together."""
        return self._leased.total

    @property
    def bound_bytes(self) -> int:
        """How much leases may keep now."""
        return self._bound_bytes()

    def count(self, uid: int, maker: Maker, change_bytes: int) -> None:
        """Count *change_bytes* more, or less if negative, for *maker* of user *uid*."""
        self._leased.count(uid, change_bytes)
        makers = self._makers.setdefault(self._tenants[uid], {})
        makers[maker] = makers.get(maker, 0) + change_bytes
        if not makers[maker]:
            del makers[maker]
        if not makers:
            del self._makers[self._tenants[uid]]

    def refuses(self, uid: int, maker: Maker) -> bool:
        """Whether the next store of *maker* under a final name is refused."""
        bound_bytes = self._bound_bytes()
        return self.held_bytes > bound_bytes and self._is_over(uid, maker, bound_bytes)

    def require(self, policy: DirectoryPolicy, name: bytes, uid: int, maker: Maker) -> None:
        """Raise NoSpace for a process over its share, if its store under *policy* will be leased.

        That is under a final name; where only a rename publishes, under any name.
        """
        if is_temporary(name) and not policy.only_renamed:
            return
        if (policy.leases or policy.only_renamed) and self.refuses(uid, maker):
            self.refused += 1
            raise NoSpace(f"process {maker.tgid} has more leases than its share (lease_max)")

    def gives(self, uid: int, size_bytes: int) -> bool:
        """Whether user *uid* gets a lease for *size_bytes* just stored."""
        bound_bytes = self._bound_bytes()
        lacking_bytes = self.held_bytes + size_bytes - bound_bytes
        if lacking_bytes <= 0:
            return True
        # A part of the space beyond the limit.
        is_over = self._leased.has_its_part(uid, bound_bytes)
        share = _UNDER_WAY_SHARE if is_over else _OTHERS_SHARE
        return lacking_bytes <= share * (self._whole_bytes() - bound_bytes)

    def _is_over(self, uid: int, maker: Maker, bound_bytes: int) -> bool:
        if not self._leased.has_its_part(uid, bound_bytes):
            return False
        makers = self._makers[self._tenants[uid]]
        part_bytes = bound_bytes / len(self._leased.rows()) / len(makers)
        return makers.get(maker, 0) >= max(1, part_bytes)

    def most(self) -> Lessee | None:
        """Return the process with the most leases, None if there are none."""
        held: dict[Maker, int] = {}
        for makers in self._makers.values():
            for maker, size_bytes in makers.items():
                held[maker] = held.get(maker, 0) + size_bytes
        if not held:
            return None
        maker = max(held, key=lambda each: held[each])
        return Lessee(maker, held[maker])


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

    follows: Final = frozenset(Why) - {Why.CREATED, Why.DRAFTED}

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
            if ino in self._held:
                self.drop(ino)
        elif record.state != State.NODE and not (why is Why.FOUND and ino in self._held):
            if why in _SAID_BEFORE and record.maker_tgid and not self._same_boot:
                record = record._replace(maker_tgid=_OF_ANOTHER_BOOT)
            self.put(ino, record, self._monotonic_s())

    def put(self, ino: InodeNo, record: InodeRecord, now_s: float) -> None:
        """Update *ino*, which now has *record*."""
        if ino in self._held:
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
        elif state is State.SLAB:
            self.shares.slabs.count(lease.uid, size_bytes)

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
