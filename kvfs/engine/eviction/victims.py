"""Which blocks go next: the plan, found by a scan of the heat, and whether one may go now.

The plan is a hint. Whoever takes a victim from it checks it again (``look_at``), on the event loop,
and calls ``refuse`` if it may not be evicted.
"""

import contextlib
import functools
import math
import stat
from collections.abc import Callable, Iterator
from typing import Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from kvfs.core.errors import Damaged
from kvfs.core.eviction_policy import Columns, Rank
from kvfs.core.fair_shares import InOrder, Plan
from kvfs.core.lifecycle import State, label
from kvfs.core.types import InodeNo, InodeRecord
from kvfs.pool.open.open_inodes import OpenInode
from kvfs.pool.pool import Pool
from kvfs.pool.rules.ranks import SMALL_BYTES, rank_of
from kvfs.storage.background import Background
from kvfs.storage.heat import Heat
from kvfs.storage.index import Index

#: A scan of up to so many rows is short enough for the event loop, and needs no thread.
_INLINE_ROWS: Final = 16_384
#: How many refused victims, and for how long, are left out of the next plans.
_REFUSED_MAX: Final = 4096
_REFUSED_S: Final = 1.0

#: Returns inodes of the columns in the order of eviction, but none of the array (some thousands).
Choose = Callable[[Columns, NDArray[np.uint64]], Plan]
#: Suffixes of files with the metadata of a block, added to its name or in place of its suffix:
#: LMCache GDS (K.kvcache.safetensors.metadata), Mooncake (K.bucket, K.meta).
_ADDED: Final = (b".metadata", b".meta")
_SWAPPED: Final = (b".meta",)


class Eligibility(NamedTuple):
    """The check of a victim: its record if it may go; *used*: its space would not be free at once.

    *passing*: it would be in a moment, as only the pass that makes blocks durable has it open.
    """

    record: InodeRecord | None
    used: bool = False
    passing: bool = False


_NO: Final = Eligibility(None)


def look_at(pool: Pool, ino: InodeNo) -> Eligibility:
    """Return whether block *ino* may be evicted now, and whether somebody has it open or mapped."""
    record = pool.index.inode_or_miss(ino)
    if record is None or not stat.S_ISREG(record.mode):
        pool.rules.heat.drop(ino)
        return _NO
    parent = pool.index.inode_or_miss(record.parent)
    if parent is None or not stat.S_ISDIR(parent.mode):
        # Its directory cannot be read, so the batch would fail. It stays until fsck repairs it.
        pool.rules.ranks.keep(ino, record)
        return _NO
    why = obstacle(pool, ino, record, open_too=False)
    if why is None:
        passing = pool.durable.final_bytes.opened(ino) is not None
        return Eligibility(record, used=passing, passing=passing)
    opened = pool.open.inodes.get(ino)
    is_read = why == "mapped" or (opened is not None and not opened.writers)
    return Eligibility(record, used=True) if is_read and why in ("open", "mapped") else _NO


def obstacle(pool: Pool, ino: InodeNo, record: InodeRecord, *, open_too: bool) -> str | None:
    """Return in a word or two why the block with *record* may not be evicted; None if it may."""
    policy = pool.rules.policies.of(record.parent)
    if rank_of(record, policy.evict) is Rank.NEVER:
        pool.rules.ranks.enter(ino, record)
        return label(State(record.state))
    if (why := pool.rules.ranks.why_kept(ino, policy)) is not None:
        pool.rules.ranks.enter(ino, record)  # the policy or pin may have been set just now
        if pool.rules.heat.held_as(ino, Rank.KEPT) is not None:
            return why
    opened = pool.open.inodes.get(ino)
    if opened is not None and not opened.is_revocable:
        return None if open_too and not opened.writers else "open"
    return None if open_too or not _is_mapped(pool, ino, opened) else "mapped"


def _is_mapped(pool: Pool, ino: InodeNo, opened: OpenInode | None) -> bool:
    """Whether a process still has a block mapped that it has closed; False if it cannot be told."""
    if opened is not None and opened.fd >= 0:
        fd: int | None = opened.fd
    else:
        fd = pool.durable.final_bytes.opened(ino)  # the pass that makes it durable is no user
    if fd is None:
        return pool.at_hand.is_used(ino)
    with contextlib.suppress(OSError):
        return pool.extents.in_use(fd)
    return False


def sidecars_of(index: Index, record: InodeRecord) -> Iterator[InodeNo]:
    """Yield the small files beside block *record* that are useless without it."""
    if record.size_bytes < SMALL_BYTES:
        return
    stem, dot, _ = record.name.rpartition(b".")
    names = [record.name + suffix for suffix in _ADDED]
    if dot and stem:
        names += [stem + suffix for suffix in _SWAPPED]
    for name in names:
        try:
            ino = index.lookup(record.parent, name)
            beside = None if ino is None else index.inode(ino)
        except Damaged:
            continue
        if ino is not None and beside is not None and beside.size_bytes < SMALL_BYTES:
            yield ino


class Victims:
    """The present plan, a queue of victims, and the making of the next one."""

    def __init__(
        self,
        heat: Heat,
        background: Background,
        monotonic_s: Callable[[], float],
        *,
        barren_s: float,
        age_s: float = math.inf,
        forgotten: Callable[[], None] | None = None,
    ) -> None:
        """After a plan that found nothing, no other one begins for *barren_s*.

        A plan expires after *age_s*. *forgotten* is called when refused victims may be named again.
        """
        self._heat = heat
        self._background = background
        self._monotonic_s = monotonic_s
        self._barren_s = barren_s
        self._age_s = age_s
        self._forgotten = forgotten
        #: The present plan, and one that is found and does not count yet.
        self._plan: Plan = InOrder()
        self._found: Plan | None = None
        self._refused: dict[InodeNo, None] = {}
        self._refused_since_s = -math.inf
        self._barren_until_s = -math.inf
        self._taken_s = -math.inf
        #: The heat's clock when the plan began: a block touched since is not cold any more.
        self._stamp = 0
        #: Whether it was made for several tenants.
        self._shared = False
        #: Whether a scan runs in the thread.
        self.planning = False

    def __bool__(self) -> bool:
        return bool(self._plan)

    @property
    def takes_long(self) -> bool:
        """Whether a scan takes long, and runs in the thread."""
        return len(self._heat) > _INLINE_ROWS

    def next(self) -> InodeNo | None:
        """Take the next victim that was not used since the plan was made."""
        return self._plan.next(self._heat, self._stamp)

    def put_back(self, ino: InodeNo) -> None:
        """Let *ino*, which was taken last, be the next victim again."""
        self._plan.put_back(ino)

    def begin_batch(self) -> None:
        """Those that were taken before have gone, or stay.

        Forget the plan if it has expired: its victims may have been used since, or it was made for
        one tenant alone.
        """
        is_old = self._monotonic_s() - self._taken_s > self._age_s
        if is_old or self._heat.is_shared is not self._shared:
            self.drop()
        self._plan.begin_batch()

    def refuse(self, ino: InodeNo) -> None:
        """Leave *ino*, which may not go now, out of the next plans for a while."""
        self._refused[ino] = None

    def allow(self, ino: InodeNo) -> None:
        """Let the next plan name *ino*, which may be evicted now."""
        self._refused.pop(ino, None)

    def drop(self) -> None:
        """Forget the plan, because a new one would have other victims."""
        self._plan = InOrder()

    def is_barren(self) -> bool:
        """Whether a plan found nothing so recently that no other one may begin."""
        return self._monotonic_s() < self._barren_until_s

    def rest(self) -> None:
        """Begin no plan for ``barren_s``."""
        self._barren_until_s = self._monotonic_s() + self._barren_s

    def search_anew(self) -> None:
        """Forget what earlier plans found, refused or did not find."""
        self._barren_until_s = -math.inf
        self._forget_refused()

    def replan(self, choose: Choose) -> bool:
        """Let *choose* find more victims; True if there are some now."""
        if self._found is None and not self.planning and not self.is_barren():
            self._begin(choose)
        found, self._found = self._found, None
        if found is None:
            return False
        self._plan = found
        self._taken_s = self._monotonic_s()
        if not found:
            self.rest()
        return bool(found)

    def _begin(self, choose: Choose) -> None:
        now_s = self._monotonic_s()
        if now_s - self._refused_since_s > _REFUSED_S or len(self._refused) > _REFUSED_MAX:
            self._forget_refused()
            self._refused_since_s = now_s
        self.drop()  # its victims are older than the new stamp
        heat = self._heat
        but_not = np.fromiter(self._refused, np.uint64, len(self._refused))
        columns, self._stamp, self._shared = heat.columns(), heat.stamp, heat.is_shared
        scan = functools.partial(choose, columns, but_not)
        if self.takes_long:
            self.planning = True
            self._background.submit_long(functools.partial(self._in_the_thread, scan))
        else:
            self._found = scan()

    def _in_the_thread(self, scan: Callable[[], Plan]) -> None:
        try:
            self._found = scan()
        finally:
            self.planning = False

    def _forget_refused(self) -> None:
        self._refused.clear()
        if self._forgotten is not None:
            self._forgotten()
