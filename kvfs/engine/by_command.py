"""Eviction and pins by command (`kvfs evict`, `kvfs pin`, `kvfs unpin`), in small steps.

Which blocks are evicted, in which order, and why others stay; which files and directories are
pinned: those of paths, a pattern or all. Requests are answered between two steps. So a step never
trusts what an earlier step has read, but reads it again. Each pin is one index transaction.
"""

import contextlib
import heapq
import stat
from collections import Counter
from collections.abc import Iterable, Iterator
from typing import Final, NamedTuple

from kvfs.core.changed import Reason
from kvfs.core.directory_policy import PIN
from kvfs.core.errors import CommandError, KvfsError, NoSuchAttribute, NotPermitted, UsageError
from kvfs.core.eviction_policy import BURST_BITS
from kvfs.core.types import ROOT_INODE, SECOND_NS, InodeNo, InodeRecord
from kvfs.engine.eviction.reclaim import Reclaim
from kvfs.engine.eviction.units import Units, UsesOfUnits
from kvfs.engine.eviction.victims import obstacle
from kvfs.engine.names.named import STEP, Named, files_below, named
from kvfs.engine.names.namespace import Namespace
from kvfs.engine.store import Store
from kvfs.engine.store_figures import gone_totals
from kvfs.pool.pool import Pool
from kvfs.pool.rules.ranks import rank_of

#: Blocks evicted in one step: a millisecond or two.
_TAKEN: Final = 32
#: How much the pool's policy is asked to evict in one step.
_AT_ONCE_BYTES: Final = 256 << 20
#: The command ends after so many steps in a row without a result; a scan takes some of them.
_VAIN_MAX: Final = 200
#: Reasons why a block stays, besides those of victims.py.
_NO_FILE: Final = "not a file"
_IN_USE: Final = "came into use"
_REMOVED: Final = "deleted, still open"
_UNKNOWN: Final = "last use unknown"
_USED: Final = "used since"
#: Pins set or removed in one step; some 60 us each.
_AT_ONCE: Final = 32
#: Why something was left as it was.
_BEYOND: Final = "beyond pin_share"
_PINNED: Final = "pinned already"
_UNPINNED: Final = "not pinned"


class EvictionOrder(NamedTuple):
    """What to evict."""

    what: Named
    size_bytes: int | None = None
    """How much to evict, the longest unused first. None: all that the other fields select."""
    unused_for_s: float | None = None
    """Only blocks not used for longer than this (s). Uses are a store, a rename, utime, a lookup,
    an open."""
    dry_run: bool = False


class EvictionProgress:
    """The progress of a command. ``kept`` has blocks that stay, and their bytes, by reason."""

    def __init__(self) -> None:
        self.looked_at = 0
        self.found_blocks = 0
        self.found_bytes = 0
        self.blocks = 0
        self.bytes = 0
        self.kept: Counter[str] = Counter()
        self.kept_bytes: Counter[str] = Counter()

    def keep(self, why: str, size_bytes: int) -> None:
        """Count a block that stays."""
        self.kept[why] += 1
        self.kept_bytes[why] += size_bytes

    def shown(self) -> dict[str, object]:
        """Return it JSON-ready."""
        return {**vars(self), "kept": dict(self.kept), "kept_bytes": dict(self.kept_bytes)}


class _Found(NamedTuple):
    """A block that may be evicted. These tuples sort in the order of eviction."""

    rank: int
    burst: int
    younger_first: int
    ino: InodeNo
    allocated_bytes: int


def carry_out(
    pool: Pool,
    namespace: Namespace,
    reclaim: Reclaim,
    order: EvictionOrder,
    progress: EvictionProgress,
) -> Iterator[None]:
    """Evict what *order* names, a step at a time. Raises PathMissing, UsageError.

    If less may go than *order* asks for, nothing is evicted: ``found_bytes`` says how much may.
    """
    if order.size_bytes is not None and order.size_bytes <= 0:
        raise UsageError("give more than 0 bytes")
    if order.size_bytes is not None and "" in order.what.paths and not _is_particular(order):
        progress.found_bytes = pool.evictable_bytes - pool.in_use_bytes()
        if order.size_bytes <= progress.found_bytes or not reclaim.all_known:
            yield from _by_policy(reclaim, order.size_bytes, progress)
        if progress.bytes < order.size_bytes:
            yield from _tell_what_stays(pool, order, progress)
        return
    candidates = _candidates(pool, namespace, order, progress)
    if order.size_bytes is None:
        yield from _evict(reclaim, candidates, order, progress)
        return
    coldest = _Coldest(order.size_bytes)
    for one in candidates:
        if one is None:
            yield
        else:
            coldest.add(one)
    if coldest.held_bytes >= order.size_bytes:
        yield from _evict(reclaim, coldest.in_order(), order, progress)


def _is_particular(order: EvictionOrder) -> bool:
    """Whether *order* selects blocks itself, and does not leave the choice to the policy."""
    return order.unused_for_s is not None or order.what.match is not None or order.dry_run


def _by_policy(reclaim: Reclaim, size_bytes: int, progress: EvictionProgress) -> Iterator[None]:
    """Evict what the pool's own policy names, as for a writer that needs the space."""
    blocks, taken_bytes = reclaim.evicted_blocks, reclaim.evicted_bytes
    vain = 0
    while progress.bytes < size_bytes and vain < _VAIN_MAX:
        before = progress.bytes
        reclaim.evict(min(size_bytes - progress.bytes, _AT_ONCE_BYTES))
        progress.blocks = reclaim.evicted_blocks - blocks
        progress.bytes = reclaim.evicted_bytes - taken_bytes
        vain = 0 if progress.bytes > before or reclaim.planning else vain + 1
        yield


def _tell_what_stays(
    pool: Pool, order: EvictionOrder, progress: EvictionProgress
) -> Iterator[None]:
    """Count the blocks that stay, by reason; the policy itself never looks at most of them."""
    for ino in files_below(pool.index, ROOT_INODE):
        if ino == STEP:
            yield
        else:
            progress.looked_at += 1
            _unless_kept(pool, ino, order, progress, None)
    gone = gone_totals(pool)
    if gone["blocks"]:
        progress.kept[_REMOVED] += gone["blocks"]
        progress.kept_bytes[_REMOVED] += gone["bytes"]


def _candidates(
    pool: Pool, namespace: Namespace, order: EvictionOrder, progress: EvictionProgress
) -> Iterator["_Found | None"]:
    """Yield blocks that may be evicted, and None after every step."""
    uses = None
    if order.unused_for_s is not None:
        now_ns = pool.age_clock.now_ns()
        pool.rules.heat.mark(now_ns)  # all touches so far came before those that follow
        since_ns = now_ns - int(order.unused_for_s * SECOND_NS)
        uses = UsesOfUnits(*(pool.rules.heat, pool.age_clock, pool.clock_ns), Units(pool), since_ns)
    for root in named(pool.index, namespace, order.what):
        for ino in (STEP,) if root == STEP else files_below(pool.index, root):
            if ino == STEP:
                yield None
                continue
            progress.looked_at += 1
            one = _unless_kept(pool, ino, order, progress, uses)
            if one is not None:
                progress.found_blocks += 1
                progress.found_bytes += one.allocated_bytes
                yield one


class _Coldest:
    """The coldest blocks with *size_bytes* in all; a colder one displaces the warmest."""

    def __init__(self, size_bytes: int) -> None:
        self._size_bytes = size_bytes
        self.held_bytes = 0
        #: A heap of negated orders: its top is evicted last.
        self._heap: list[tuple[tuple[int, int, int], _Found]] = []

    def add(self, one: "_Found") -> None:
        heapq.heappush(self._heap, ((-one.rank, -one.burst, -one.younger_first), one))
        self.held_bytes += one.allocated_bytes
        while self.held_bytes - self._heap[0][1].allocated_bytes >= self._size_bytes:
            self.held_bytes -= heapq.heappop(self._heap)[1].allocated_bytes

    def in_order(self) -> list["_Found | None"]:
        return sorted(one for _, one in self._heap)  # type: ignore[return-value]


def _evict(
    reclaim: Reclaim,
    candidates: Iterable["_Found | None"],
    order: EvictionOrder,
    progress: EvictionProgress,
) -> Iterator[None]:
    """Evict *candidates* in batches; pass each None, the end of a step, on."""
    batch: list[_Found] = []
    for one in candidates:
        if one is not None:
            batch.append(one)
        if len(batch) == _TAKEN or (one is None and batch):
            _evict_batch(reclaim, batch, order, progress)
            batch = []
            yield
        elif one is None:
            yield
    if batch:
        _evict_batch(reclaim, batch, order, progress)


def _evict_batch(
    reclaim: Reclaim, batch: list["_Found"], order: EvictionOrder, progress: EvictionProgress
) -> None:
    if order.dry_run:
        progress.blocks += len(batch)
        progress.bytes += sum(one.allocated_bytes for one in batch)
        return
    inos = [one.ino for one in batch]
    open_too = order.size_bytes is None
    blocks, size_bytes = reclaim.evict_these(inos, open_too=open_too, reason=Reason.COMMAND)
    progress.blocks += blocks
    progress.bytes += size_bytes
    if blocks < len(batch):
        left_bytes = max(0, sum(one.allocated_bytes for one in batch) - size_bytes)
        progress.kept[_IN_USE] += len(batch) - blocks
        progress.kept_bytes[_IN_USE] += left_bytes


def _unless_kept(
    pool: Pool,
    ino: InodeNo,
    order: EvictionOrder,
    progress: EvictionProgress,
    uses: UsesOfUnits | None,
) -> _Found | None:
    """Return block *ino* if it may go, and *uses* say it was not used; else count why not."""
    record = pool.index.inode_or_miss(ino)
    if record is None:
        return None
    if not stat.S_ISREG(record.mode):  # the command named it: walks yield only files
        progress.keep(_NO_FILE, record.allocated_bytes)
        return None
    used = None if uses is None else uses.of(ino, record)
    why = _USED if used else obstacle(pool, ino, record, open_too=order.size_bytes is None)
    if why is None and uses is not None and used is None:
        why = _UNKNOWN
    if why is not None:
        opened = pool.open.inodes.get(ino)  # a draft's bytes are in the index from its close on
        held_bytes = 0 if opened is None else opened.allocated_bytes
        progress.keep(why, max(held_bytes, record.allocated_bytes))
        return None
    rank = rank_of(record, pool.rules.policies.of(record.parent).evict)
    burst = pool.rules.heat.touched(ino) >> BURST_BITS
    return _Found(rank, burst, -ino, ino, record.allocated_bytes)


class PinProgress:
    """The progress of a command. ``kept`` and ``kept_bytes`` count what was left as is."""

    def __init__(self) -> None:
        self.looked_at = 0
        self.files = 0
        self.directories = 0
        self.others = 0
        self.bytes = 0
        self.kept: Counter[str] = Counter()
        self.kept_bytes: Counter[str] = Counter()

    def shown(self) -> dict[str, object]:
        """Return it JSON-ready."""
        return {**vars(self), "kept": dict(self.kept), "kept_bytes": dict(self.kept_bytes)}

    def changed(self, record: InodeRecord, size_bytes: int) -> None:
        """Count what was pinned or unpinned."""
        if stat.S_ISDIR(record.mode):
            self.directories += 1
        elif stat.S_ISREG(record.mode):
            self.files += 1
        else:
            self.others += 1
        self.bytes += size_bytes

    def keep(self, why: str, size_bytes: int) -> None:
        """Count a block of *size_bytes* that stays, and *why*."""
        self.kept[why] += 1
        self.kept_bytes[why] += size_bytes


def pin(store: Store, ino: InodeNo) -> None:
    """Pin *ino*. Raises NotPermitted beyond the limit of pins, KvfsError."""
    store.attributes.set_xattr(ino, PIN, b"1")


def unpin(store: Store, ino: InodeNo, *, all_pins: bool = False) -> bool:
    """Remove the pin of *ino*, or make it an exception to that of a directory above.

    Return whether that changed anything. When *all_pins* go, nothing becomes an exception.
    """
    attributes = store.attributes
    before = ino in store.pool.rules.pins
    with contextlib.suppress(NoSuchAttribute):
        attributes.remove_xattr(ino, PIN)
    if all_pins or attributes.xattr(ino, PIN) != b"1":
        return before
    attributes.set_xattr(ino, PIN, b"0")
    return True


def pin_matching(store: Store, what: Named, progress: PinProgress) -> Iterator[None]:
    """Pin all that *what* names, a step at a time. Raises PathMissing, UsageError."""
    for ino, record in _in_steps(store, what, progress):
        if record is None:
            yield
            continue
        held = store.pool.rules.pins.held_bytes(ino)
        if held is not None:
            progress.keep(_PINNED, held)
            continue
        try:
            pin(store, ino)
        except CommandError:
            raise
        except NotPermitted:
            progress.keep(_BEYOND, record.allocated_bytes)
        except KvfsError as error:
            progress.keep(type(error).__name__, record.allocated_bytes)
        else:
            progress.changed(record, store.pool.rules.pins.held_bytes(ino) or 0)


def unpin_matching(store: Store, what: Named, progress: PinProgress) -> Iterator[None]:
    """Unpin all that *what* names, a step at a time. Raises PathMissing, UsageError."""
    for ino, record in _in_steps(store, what, progress):
        if record is None:
            yield
        else:
            _unpin_one(store, ino, record, progress)


def unpin_all(store: Store, progress: PinProgress) -> Iterator[None]:
    """Remove every pin that is an attribute, a step at a time."""
    for count, (ino, _) in enumerate(store.pool.rules.pins.rows(), 1):
        record = store.pool.index.inode_or_miss(ino)
        if record is not None:
            progress.looked_at += 1
            _unpin_one(store, ino, record, progress, all_pins=True)
        if count % _AT_ONCE == 0:
            yield


def _unpin_one(
    store: Store,
    ino: InodeNo,
    record: InodeRecord,
    progress: PinProgress,
    *,
    all_pins: bool = False,
) -> None:
    held = store.pool.rules.pins.held_bytes(ino)
    if not unpin(store, ino, all_pins=all_pins):
        progress.keep(_UNPINNED, record.allocated_bytes)
        return
    progress.changed(record, record.allocated_bytes if held is None else held)


def _in_steps(
    store: Store, what: Named, progress: PinProgress
) -> Iterator[tuple[InodeNo, InodeRecord | None]]:
    """Yield each inode that *what* names with its record, and no record at the end of a step."""
    since = 0
    for ino in named(store.pool.index, store.namespace, what):
        if ino == STEP or since == _AT_ONCE:
            yield STEP, None
            since = 0
        record = None if ino == STEP else store.pool.index.inode_or_miss(ino)
        if record is not None:
            progress.looked_at += 1
            since += 1
            yield ino, record
