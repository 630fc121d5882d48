"""Whose block goes next: that of the tenant with the most for its weight. Pure.

This is max-min fairness by weight. A block goes only if its tenant has at least its share: the part
of the pool that its weight is of all weights. What a tenant does not use is lent to those who store
more, and comes back as it stores: whoever has more than it gives way. Among its own blocks the
policy chooses (eviction_policy.py), so one tenant alone has what that policy gives.

- *Garbage* goes first, whose ever it is: blocks of rank FIRST.
- After it the tenant counts before the rank. One's small files or retained blocks push out nobody
  else's.
- *Idle* tenants have no share. Their blocks go by age, among those of the tenant that gives way.

Whose turn it is, is found for each victim from what all have then. While a plan lasts (a second,
and in a small pool as much as it holds) they store on, and a fixed order would go on taking from
those who stored nothing.
"""

from collections import deque
from collections.abc import Collection, Iterable
from typing import Final, Protocol

import numpy as np
from numpy.typing import NDArray

from kvfs.core.block_owners import Owners
from kvfs.core.eviction_policy import EVICTABLE, Columns, EvictionPolicy, Lru, Rank, as_of_now
from kvfs.core.types import InodeNo

#: A plan has a queue for each of so many tenants, those with the most for their weight. All other
#: tenants share one queue, which is used only when these are empty.
TENANTS_MAX: Final = 16
_OF_TENANTS: Final = tuple(rank for rank in EVICTABLE if rank is not Rank.FIRST)
_MAY_GO: Final = np.array([rank in _OF_TENANTS for rank in Rank], np.bool_)


class KnownBlocks(Protocol):
    """What is known of blocks at present."""

    def touched(self, ino: InodeNo) -> int:
        """Return the stamp of the last touch, 0 if the block is not known."""

    def allocated_bytes(self, ino: InodeNo) -> int:
        """Return how many bytes it holds, 0 if it is not known."""


class Plan(Protocol):
    """Victims, one after the other."""

    def __bool__(self) -> bool:
        """Whether some are left."""

    def next(self, known: KnownBlocks, stamp: int) -> InodeNo | None:
        """Take the next victim that was not touched since *stamp*; None: a new plan is due."""

    def put_back(self, ino: InodeNo) -> None:
        """Let *ino*, which was taken last, be the next victim again."""

    def begin_batch(self) -> None:
        """Those that were taken before have gone, or stay."""


class InOrder:
    """Victims in a fixed order."""

    def __init__(self, inos: Iterable[int] = ()) -> None:
        self._inos = deque(map(InodeNo, inos))

    def __len__(self) -> int:
        return len(self._inos)

    def __bool__(self) -> bool:
        return bool(self._inos)

    def next(self, known: KnownBlocks, stamp: int) -> InodeNo | None:
        """See ``Plan``."""
        while self._inos:
            ino = self._inos.popleft()
            if known.touched(ino) < stamp:
                return ino
        return None

    def put_back(self, ino: InodeNo) -> None:
        """See ``Plan``."""
        self._inos.appendleft(ino)

    def begin_batch(self) -> None:
        """Nothing depends on it."""

    def head(self) -> InodeNo:
        """Return the next one; there must be one."""
        return self._inos[0]


_NOTHING: Final = InOrder()


class ByShare:
    """Victims of several tenants, each in an order of its own."""

    def __init__(
        self,
        owners: Owners,
        queues: dict[int, InOrder],
        *,
        garbage: InOrder = _NOTHING,
        idle: InOrder = _NOTHING,
        rest: InOrder = _NOTHING,
        cut: Collection[int] = (),
        without: Collection[int] = (),
        slack_bytes: int = 0,
    ) -> None:
        """*queues* are by slot. *rest* is of those that have no queue.

        Slots: *cut* of those who have more that may go than is named, *without* of those whose are
        in *rest*. *slack_bytes*: by how much a share may be missed while the plan lasts.
        """
        self._owners = owners
        self._garbage = garbage
        self._queues = {slot: queue for slot, queue in queues.items() if queue}
        self._idle = idle
        self._rest = rest
        self._cut = _mask(cut, len(owners.weight))
        self._without = _mask(without, len(owners.weight))
        self._slack_bytes = slack_bytes
        self._stored = owners.stored_bytes.data
        self._weight = owners.weight.data
        #: Bytes of victims that were taken in this batch, by slot.
        self._going: dict[int, int] = {}
        #: Where the last victim came from, and its slot, if that counts.
        self._last: InOrder = garbage
        self._last_slot: int | None = None
        self._unchecked = True

    def __bool__(self) -> bool:
        return bool(self._garbage or self._queues or self._idle or self._rest)

    def next(self, known: KnownBlocks, stamp: int) -> InodeNo | None:
        """See ``Plan``."""
        ino = self._next_of(self._garbage, None, known, stamp)
        while ino is None:
            slot = self._largest()
            if self._unchecked and self._is_outdated(slot):
                self._clear()
                return None
            if slot is None:
                queue = self._idle or self._rest
                if not queue:
                    return None
                ino = self._next_of(queue, None, known, stamp)
            elif self._idle and self._is_older(known, slot):
                ino = self._next_of(self._idle, None, known, stamp)
            else:
                ino = self._next_of(self._queues[slot], slot, known, stamp)
        return ino

    def put_back(self, ino: InodeNo) -> None:
        """See ``Plan``."""
        self._last.put_back(ino)
        if self._last_slot is not None:
            self._queues[self._last_slot] = self._last
            self._going.pop(self._last_slot, None)

    def begin_batch(self) -> None:
        """See ``Plan``."""
        self._going.clear()
        self._unchecked = True

    def _next_of(
        self, queue: InOrder, slot: int | None, known: KnownBlocks, stamp: int
    ) -> InodeNo | None:
        ino = queue.next(known, stamp)
        self._last, self._last_slot = queue, slot
        if slot is None:
            return ino
        if ino is not None:
            self._going[slot] = self._going.get(slot, 0) + known.allocated_bytes(ino)
        if not queue:
            del self._queues[slot]
            self._unchecked = True
        return ino

    def _largest(self) -> int | None:
        """Return the slot, of those with victims, that has most for its weight."""
        most, found = -1.0, None
        for slot in self._queues:
            ratio = self._ratio(slot)
            if ratio > most:
                most, found = ratio, slot
        return found

    def _ratio(self, slot: int) -> float:
        # What went meanwhile may have been lent (heat_columns.py).
        return max(0, self._stored[slot] - self._going.get(slot, 0)) / self._weight[slot]

    def _is_older(self, known: KnownBlocks, slot: int) -> bool:
        """Whether the next one of the idle is at least as cold as that of *slot*."""
        return known.touched(self._idle.head()) <= known.touched(self._queues[slot].head())

    def _is_outdated(self, slot: int | None) -> bool:
        """Whether one of whom nothing is named now has more for its weight than *slot*.

        Only once this plan has freed something: what cannot go must not hide the blocks of others.
        """
        self._unchecked = False
        owners = self._owners
        went_bytes = owners.gone_bytes - owners.gone_then_bytes
        if not went_bytes.any():
            return False
        came_bytes = owners.stored_bytes - owners.stored_then_bytes + went_bytes
        more = (came_bytes >= self._slack_bytes) | (self._cut & (went_bytes > 0)) | self._without
        more[list(self._queues)] = False
        if not more.any():
            return False
        stored_bytes = owners.stored_bytes - np.where(self._without, self._slack_bytes, 0)
        ratios = stored_bytes[more] / owners.weight[more]
        return slot is None or bool(ratios.max() > self._ratio(slot))

    def _clear(self) -> None:
        self._garbage = self._idle = self._rest = _NOTHING
        self._queues.clear()


def plan_of(
    policy: EvictionPolicy,
    columns: Columns,
    *,
    bytes_wanted: int,
    count_max: int,
    but_not: NDArray[np.uint64],
    slack_bytes: int,
    among: NDArray[np.bool_] | None = None,
) -> Plan:
    """Return victims for *bytes_wanted*, if possible: at most *count_max*, of each tenant.

    None of *but_not* (some thousands), and only *among* such rows; the order is that of all.
    *slack_bytes*: see ``ByShare``. Takes milliseconds: call it in a thread.
    """
    owners, scanned = columns.owners, len(columns.ino)
    storing = [] if owners is None else np.flatnonzero(owners.stored_then_bytes).tolist()
    if owners is None or len(storing) < 2:
        of_all = _whosever(policy, columns, among, bytes_wanted, count_max, but_not)
        return of_all if owners is None else ByShare(owners, dict.fromkeys(storing, of_all))
    columns = as_of_now(columns)
    policy.survey(columns)
    may_go = _MAY_GO[columns.rank] & (columns.ino != 0)
    if among is not None:
        may_go &= among
    garbage = Lru().victims(
        columns if among is None else columns.of(np.flatnonzero(among)),
        bytes_wanted=bytes_wanted,
        count_max=count_max,
        ranks=(Rank.FIRST,),
        but_not=but_not,
    )

    def named(rows: NDArray[np.intp]) -> InOrder:
        inos = policy.victims(
            columns.of(rows),
            bytes_wanted=bytes_wanted,
            count_max=count_max,
            ranks=_OF_TENANTS,
            but_not=but_not,
            part_of=scanned,
        )
        return InOrder(inos.tolist())

    slots = _slots(owners, scanned)
    rows = np.flatnonzero(may_go)
    of_rows = slots[rows]
    counts = np.bincount(of_rows, minlength=len(owners.weight))
    has_share = _not_idle(owners, columns, slots)
    stored_bytes = np.maximum(owners.stored_then_bytes, 0)
    ratios = np.where(has_share & (counts > 0), stored_bytes / owners.weight, -1.0)
    first = [int(slot) for slot in np.argsort(-ratios)[:TENANTS_MAX] if ratios[slot] >= 0.0]
    queues = {slot: named(rows[of_rows == slot]) for slot in first}
    is_without = ratios >= 0.0
    is_without[first] = False
    is_idle = (counts > 0) & ~has_share
    return ByShare(
        owners,
        queues,
        garbage=InOrder(garbage.tolist()),
        idle=named(rows[is_idle[of_rows]]) if is_idle.any() else _NOTHING,
        rest=named(rows[is_without[of_rows]]) if is_without.any() else _NOTHING,
        cut=[slot for slot, queue in queues.items() if len(queue) < counts[slot]],
        without=np.flatnonzero(is_without).tolist(),
        slack_bytes=slack_bytes,
    )


def _whosever(
    policy: EvictionPolicy,
    columns: Columns,
    among: NDArray[np.bool_] | None,
    bytes_wanted: int,
    count_max: int,
    but_not: NDArray[np.uint64],
) -> InOrder:
    """Return the victims, whose ever they are; arguments as in ``plan_of``."""
    part_of = 0
    if among is not None:
        part_of = len(columns.ino)
        policy.survey(columns)
        columns = as_of_now(columns).of(np.flatnonzero(among))
    inos = policy.victims(
        columns, bytes_wanted=bytes_wanted, count_max=count_max, but_not=but_not, part_of=part_of
    )
    return InOrder(inos.tolist())


def plan_of_one(
    policy: EvictionPolicy,
    columns: Columns,
    slot: int,
    *,
    bytes_wanted: int,
    count_max: int,
    but_not: NDArray[np.uint64],
) -> Plan:
    """Return victims of the tenant of *slot* alone, as ``plan_of`` does of all."""
    columns, scanned = as_of_now(columns), len(columns.ino)
    if columns.owners is not None:
        columns = columns.of(np.flatnonzero(_slots(columns.owners, scanned) == slot))
    inos = policy.victims(
        columns,
        bytes_wanted=bytes_wanted,
        count_max=count_max,
        but_not=but_not,
        part_of=scanned,
    )
    return InOrder(inos.tolist())


def _mask(slots: Collection[int], count: int) -> NDArray[np.bool_]:
    """Return which of *count* slots are among *slots*."""
    mask = np.zeros(count, np.bool_)
    mask[list(slots)] = True
    return mask


def _slots(owners: Owners, count: int) -> NDArray[np.uint16]:
    """Return the slots of *count* rows."""
    slots = owners.slot[:count]
    return np.pad(slots, (0, count - len(slots)))


def _not_idle(owners: Owners, columns: Columns, slots: NDArray[np.uint16]) -> NDArray[np.bool_]:
    """Return, by slot, whose blocks were used of late."""
    used = np.zeros(len(owners.weight), np.bool_)
    if owners.idle_stamp <= 0:
        return ~used
    used[slots[(columns.touched >= owners.idle_stamp) & (columns.ino != 0)]] = True
    return used
