"""How warm each block is: columns of numbers; a touch changes one row, a scan reads all.

The heat is a hint: eviction checks each block in the index. The clock is a counter
(eviction_policy.py). Each touch advances it by one; a new burst begins about once a second, or
sooner. The first start sets it to the wall clock. A later start computes how far it is ahead of the
wall clock, so that blocks found by a scan get a stamp of the past.
"""

import logging
from array import array
from collections.abc import Collection, Mapping, Sequence
from typing import Final

import numpy as np

from kvfs.core.account import ROOT, Entitlements, TenantId
from kvfs.core.drives import ByDrive
from kvfs.core.eviction_policy import BURST_BITS, CHAIN_PART, Columns, EvictionPolicy, Rank
from kvfs.core.learned import Learned
from kvfs.core.types import FIRST_DRIVE, SECOND_NS, DriveNo, InodeNo
from kvfs.storage.age_clock import HeatMarks
from kvfs.storage.heat_columns import ALWAYS_S, HeatHints, HeatTenants, Told
from kvfs.storage.heat_file import (
    BurstUses,
    HeatFile,
    HeatRows,
    grown,
    read_newest,
    sound_rows,
    sum_up,
    used_between,
    zero_rows,
)
from kvfs.storage.row_table import RowTable
from kvfs.storage.syscalls import Syscalls

_log: Final = logging.getLogger(__name__)

_TOUCHES_MAX: Final = (1 << 16) - 1
_ROWS_MIN: Final = 1 << 10
#: A prompt's blocks are touched within about a second.
BURST_S: Final = 1.0
#: The lookups and opens of one load should be in one burst, so a burst has at least a few touches.
_BURST_TOUCHES_MIN: Final = 4
#: After a kill the touches since the last save are lost. A save writes 31 bytes per touched block.
_SAVE_S: Final = 60.0


class Heat:
    """The rows of one pool. All but ``columns`` and ``save`` belongs to one thread."""

    def __init__(
        self,
        pool_fds: Sequence[int],
        syscalls: Syscalls,
        *,
        epoch: int,
        read_only: bool,
        policy: EvictionPolicy,
        now_s: int,
        entitlements: Entitlements | None = None,
    ) -> None:
        """Load HEAT, if it belongs to the pool with *epoch*; else start cold.

        *now_s*: seconds since the Unix epoch. If *read_only*, nothing is loaded or recorded.
        Without *entitlements* all tenants are alike. *pool_fds* are the directories of the drives.
        """
        self.policy = policy
        #: A HEAT for each drive; two of them are written.
        self._files = [HeatFile(pool_fd, syscalls, epoch) for pool_fd in pool_fds]
        self._read_only = read_only
        held = ByDrive([[0] * len(Rank) for _ in pool_fds])
        #: Allocated bytes of the rows of each drive, by its number and by rank.
        self.held_on: Final = held.all
        self._held_with: Final = held.of
        self._count = 0
        #: What hints say; None before the first one. The present time by the clock of ages (s).
        self._hints: HeatHints | None = None
        self._now_s = now_s
        #: Whether any block was told of, or may have a hint of its own.
        self.is_hinted = False
        #: The tenant of the first block; whose the blocks are, None before there is a second one;
        #: and whether that is known of all.
        self._tenant: TenantId | None = None
        self._tenants: HeatTenants | None = None
        self._tenants_known = False
        self._entitlements = entitlements or Entitlements({})
        #: A block with a lower stamp would have gone by now, had no hint retained it.
        self._evicted_stamp = 0
        #: How often such a block was used, in how many bursts.
        self.kept_hits = 0
        self._saved_s = self._burst_s = float("-inf")
        self._stamp = 0
        saved, found_s = (None, 0) if read_only else read_newest(self._files)
        found = None if saved is None else saved.rows
        self._table = RowTable()
        self._use(zero_rows(_ROWS_MIN) if found is None else sound_rows(found, _ROWS_MIN))
        newest = int(self._rows.touched.max()) >> BURST_BITS
        #: Blocks used after HEAT was saved are warmer than all in it.
        self._ahead_s = 0 if found is None else max(0, newest + 1 - found_s)
        self._marks = HeatMarks(() if saved is None else saved.marks)
        self.policy.recall(Learned() if saved is None else saved.learned, self._count)
        if saved is not None and not saved.marks:  # all touches in it came before it was written
            self._marks.add((found_s + 1) * SECOND_NS, newest + 1 << BURST_BITS)
        self._begin_burst(max(now_s + self._ahead_s, newest + 1))
        self._saved_stamp = self._stamp
        #: Touches with a lower stamp are in the HEAT of each drive.
        self._written_stamps = [self._stamp] * len(self._files)

    def __len__(self) -> int:
        return self._count

    def __contains__(self, ino: InodeNo) -> bool:
        return self._table.find(ino) != 0

    def put(
        self,
        ino: InodeNo,
        allocated_bytes: int,
        rank: Rank,
        name_hash: int,
        *,
        used_s: int = -1,
        tenant: TenantId = ROOT,
    ) -> None:
        """Add or update block *ino* of *tenant*; a new one counts as touched.

        *name_hash* (32 bits) recognises the name after the block was evicted. *used_s* is set if a
        scan found the block: when it was last used (seconds since the epoch). Never raises.
        """
        row, held_bytes = self._table.find(ino), self._held_with(ino)
        if row:
            held_bytes[self._rank[row]] -= self._allocated[row]
            if self._tenants is not None:
                self._tenants.leave(row, self._allocated[row])
        elif self._read_only:
            return
        else:
            row = self._enter(ino, used_s)
        if tenant != self._tenant or self._tenants is not None:
            self._own(row, tenant, allocated_bytes)
        self._allocated[row] = allocated_bytes
        self._rank[row] = rank
        self._name_hash[row] = name_hash
        held_bytes[rank] += allocated_bytes
        if not self._touches[row] and rank is not Rank.NEVER:
            # Not earlier: until its rename a block has a temporary name, unknown to the policy.
            self._touches[row] = 1 + self.policy.admitted(name_hash, allocated_bytes)

    def _own(self, row: int, tenant: TenantId, allocated_bytes: int) -> None:
        """Note whose the block in *row* is, which counts in no sum at this moment."""
        if self._tenant is None:
            self._tenant = tenant
            return
        if self._tenants is None:
            self._tenants = HeatTenants(self._tenant, sum(self.held_bytes), self._entitlements)
        self._tenants.enter(row, tenant, allocated_bytes, len(self._rows.ino))

    def slot_of(self, tenant: TenantId) -> int | None:
        """Return the slot of *tenant* in ``Owners``; None if it has none, or it is not known."""
        slots = {self._tenant: 0} if self._tenants is None else self._tenants.slots
        return slots.get(tenant) if self._tenants_known else None

    def weigh(self, tenant: TenantId) -> None:
        """Give *tenant* the weight that it is entitled to now."""
        if self._tenants is not None:
            self._tenants.weigh(tenant)

    def lend(self, kept: Mapping[InodeNo, Collection[TenantId]]) -> None:
        """Note which blocks are *kept* from eviction now, and by whom, beside their tenants."""
        if self._tenants is not None:
            rows = [(self._table.find(ino), holders) for ino, holders in kept.items()]
            self._tenants.lend((row, self._allocated[row], by) for row, by in rows if row)

    @property
    def is_shared(self) -> bool:
        """Whether there are several tenants, and it is known whose each block is."""
        return self._tenants is not None and self._tenants_known

    def know_tenants(self) -> None:
        """Note that the tenants of all blocks are told: HEAT does not have them."""
        self._tenants_known = True

    def touch(self, ino: InodeNo) -> None:
        """Note that block *ino* was used, if it is known."""
        row = self._table.find(ino)
        if row:
            stamp = self._stamp
            before = self._touched[row]
            if before < self._burst_begin and 0 < (touches := self._touches[row]) < _TOUCHES_MAX:
                self._touches[row] = touches + 1
                if not (name_hash := self._name_hash[row]) & self.policy.sample_bits:
                    self.policy.used(name_hash)
                if before < self._evicted_stamp:
                    self.note_kept(row)
            self._touched[row] = stamp
            self._stamp = stamp + 1
            if stamp >= self._burst_end:
                self._begin_burst((stamp >> BURST_BITS) + 1)

    def note_kept(self, row: int) -> None:
        """Count a use of the block in *row*, which is older than what went, if a hint kept it."""
        self.kept_hits += self._rank[row] == Rank.RETAINED

    def bias(self, ino: InodeNo, rank: Rank, *, priority: int = 0, until_s: int = 0) -> None:
        """Give block *ino*, if it is known, the *rank* that a hint asks for.

        Of an attribute's hint also the *priority*, and until when it holds (s, of the clock of
        ages); 0 leaves what was told.
        """
        row = self._table.find(ino)
        if row:
            held_bytes = self._held_with(ino)
            held_bytes[self._rank[row]] -= self._allocated[row]
            self._rank[row] = rank
            held_bytes[rank] += self._allocated[row]
            if until_s:
                self._say(row, priority, until_s, Told.NOTHING)

    def tell(self, ino: InodeNo, told: Told, *, priority: int = 0, until_s: int = ALWAYS_S) -> bool:
        """Note what was *told* of block *ino* until *until_s*; its rank follows by ``bias``.

        It stays with the block until it goes. Return whether the block is known.
        """
        if row := self._table.find(ino):
            self._say(row, priority, until_s, told)
        return row != 0

    def _say(self, row: int, priority: int, until_s: int, told: Told) -> None:
        if self._hints is None:
            self._hints = HeatHints()
            self.is_hinted = True
        self._hints.set(row, priority, until_s, told, len(self._rows.ino))

    def told(self, ino: InodeNo) -> Told:
        """Return what was told of block *ino* and counts still."""
        row = self._table.find(ino) if self._hints is not None else 0
        return Told.NOTHING if self._hints is None else self._hints.told(row, self._now_s)

    @property
    def now_s(self) -> int:
        """The time of the last mark (s, of the clock of ages)."""
        return self._now_s

    def warm(self, ino: InodeNo, stamp: int) -> None:
        """Let *ino* be as warm as if it was touched at *stamp*, without counting a use."""
        if (row := self._table.find(ino)) and self._touched[row] < stamp:
            self._touched[row] = stamp

    def inherit(self, ino: InodeNo, heir: InodeNo) -> bool:
        """Let *heir* be as warm as *ino*, with what was told of it; return whether both are known.

        Its rank follows by ``put`` and ``bias``.
        """
        row, to = self._table.find(ino), self._table.find(heir)
        if row and to:
            self._touched[to], self._touches[to] = self._touched[row], self._touches[row]
            if self._hints is not None:
                self._hints.copy(row, to, len(self._rows.ino))
        return row > 0 < to

    def allocated_bytes(self, ino: InodeNo) -> int:
        """Return the allocated bytes of block *ino*, 0 if it is not known."""
        return self._allocated[row] if (row := self._table.find(ino)) else 0

    def held_as(self, ino: InodeNo, rank: Rank) -> int | None:
        """Return the allocated bytes of block *ino* if it has *rank*, else None."""
        row = self._table.find(ino)
        return self._allocated[row] if row and self._rank[row] == rank else None

    @property
    def stamp(self) -> int:
        """The clock: the stamp of the next touch."""
        return self._stamp

    def touched(self, ino: InodeNo) -> int:
        """Return the stamp of *ino*'s last touch, 0 if it is not known."""
        return self._touched[row] if (row := self._table.find(ino)) else 0

    def used_in_bursts(self, begin: int) -> BurstUses:
        """Return the blocks touched last from stamp *begin* on, in bursts that have ended.

        Those that may not be evicted, a lease say, are left out. A millisecond for a million rows.
        """
        return used_between(self._rows, begin, self._burst_begin)

    def demote(self, ino: InodeNo) -> None:
        """Let block *ino* be colder than all that were touched, until it is touched again."""
        if row := self._table.find(ino):
            self._touched[row] = 0

    def touches(self, ino: InodeNo) -> int:
        """Return in how many bursts *ino* was touched, 0 if it is not known."""
        return self._touches[row] if (row := self._table.find(ino)) else 0

    @property
    def seen_ns(self) -> int:
        """The latest time (ns) that was marked, in this run or an earlier one; 0: none was."""
        return self._marks.latest_ns

    def mark(self, now_ns: int) -> None:
        """Remember that the present stamp was reached at *now_ns* (age_clock.py)."""
        self._now_s = now_ns // SECOND_NS
        self._marks.add(now_ns, self._stamp)

    def stamp_at(self, time_ns: int) -> int | None:
        """Return a stamp: touches with a lower one came before *time_ns*. None: unknown."""
        return self._marks.stamp_at(time_ns)

    def used_since(self, ino: InodeNo, time_ns: int) -> bool | None:
        """Return whether *ino* was touched since *time_ns*; None: unknown."""
        row = self._table.find(ino)
        before = self._marks.stamp_at(time_ns)
        return self._touched[row] >= before if row and before is not None else None

    def used_ns(self, ino: InodeNo) -> int | None:
        """Return when *ino* was touched last (ns, age_clock.py), to about a second.

        None if the block is not known, or was touched after the last mark.
        """
        row = self._table.find(ino)
        return self._marks.time_of(self._touched[row]) if row else None

    def drop(self, ino: InodeNo) -> None:
        """Remove block *ino*, which was removed but not evicted."""
        row = self._table.remove(ino)
        if row:
            self._held_with(ino)[self._rank[row]] -= self._allocated[row]
            if self._tenants is not None:
                self._tenants.drop(row, self._allocated[row])
            self._ino[row] = 0
            self._free.append(row)
            if self._hints is not None:
                self._hints.clear(row)
            self._count -= 1

    def evicted(self, ino: InodeNo, *, for_space: bool = True) -> None:
        """Remove block *ino*, which was evicted; the policy may remember it.

        *for_space*: a block as cold as this one, and of no higher rank, would have gone as well.
        """
        row = self._table.find(ino)
        if row:
            if for_space and self._hints is not None and self._rank[row] == Rank.PUBLISHED:
                self._evicted_stamp = max(self._evicted_stamp, self._touched[row])
            self.policy.evicted(self._name_hash[row], self._allocated[row], self._touches[row])
            self.drop(ino)

    @property
    def held_bytes(self) -> list[int]:
        """Allocated bytes of all rows, by rank."""
        return [sum(of_rank) for of_rank in zip(*self.held_on, strict=True)]

    def columns(self) -> Columns:
        """Return all rows for a scan, in any thread. They may change during the scan."""
        rows = self._rows
        retention = None if self._hints is None else self._hints.columns(self._now_s)
        owners = None
        if self._tenants is not None and self._tenants_known:
            since_s = self._now_s - self._entitlements.idle_s if self._entitlements.idle_s else 0
            owners = self._tenants.columns(self._marks.stamp_at(int(since_s * SECOND_NS)) or 0)
        return Columns(
            *(rows.ino, rows.touched, rows.touches, rows.allocated_bytes, rows.rank),
            *(retention, owners, rows.name_hash),
        )

    def run_due(self, now_s: float) -> None:
        """End the burst if it has lasted long enough; *now_s* is of a monotonic clock."""
        if now_s - self._burst_s >= BURST_S and self._stamp > self._burst_begin:
            self._burst_s = now_s
            self._begin_burst((self._stamp >> BURST_BITS) + 1)

    def save_due(self, now_s: float) -> bool:
        """Whether to call ``save``: there are new touches, and the last save is old. True once."""
        if now_s - self._saved_s < _SAVE_S or self._stamp == self._saved_stamp:
            return False
        self._saved_s, self._saved_stamp = now_s, self._stamp
        return not self._read_only

    def save(self, drive: DriveNo = FIRST_DRIVE, *, at_stop: bool = False) -> None:
        """Write HEAT of *drive*, in a thread since it takes a while. A failure is only logged."""
        try:
            # The next save begins at this burst: a touch stores its stamp after taking it.
            stamp, since = self._burst_begin, self._written_stamps[drive]
            told = (self._marks.all(), self.policy.learned())
            self._files[drive].write(self._rows, since, *told, at_stop=at_stop)
            self._written_stamps[drive] = stamp
        except OSError as error:
            _log.info("block heat not saved: %s", error)

    def _use(self, rows: HeatRows) -> None:
        """Use *rows* from now on."""
        self._view(rows)
        self._table.rebuild(rows.ino)
        # Row 0 is not used (RowTable); the lowest free row is taken first.
        self._free = array("I", np.flatnonzero(rows.ino[1:] == 0)[::-1] + 1)
        self._count = len(rows.ino) - 1 - len(self._free)
        sum_up(rows, self.held_on)

    def _view(self, rows: HeatRows) -> None:
        """Replace the rows by *rows*, and make memoryviews of the columns.

        To access one number a memoryview takes a third of the time that numpy takes.
        """
        self._rows = rows
        self._ino = self._table.inos = rows.ino.data
        self._touched = rows.touched.data
        self._allocated = rows.allocated_bytes.data
        self._name_hash = rows.name_hash.data
        self._touches = rows.touches.data
        self._rank = rows.rank.data

    def _enter(self, ino: InodeNo, used_s: int) -> int:
        """Return a new row for *ino*, with its stamp set; *used_s* as in ``put``."""
        if not self._free:
            self._grow()
        row = self._free.pop()
        stamp = self._stamp
        if used_s < 0:
            self._touches[row] = 0  # until it may be evicted
            self._stamp = stamp + 1
        else:
            self._touches[row] = 1
            stamp = min(used_s + self._ahead_s << BURST_BITS, self._burst_begin - 1)
        self._touched[row] = stamp
        self._ino[row] = ino
        self._table.add(ino, row)
        self._count += 1
        if stamp >= self._burst_end:
            self._begin_burst((stamp >> BURST_BITS) + 1)
        return row

    def _begin_burst(self, number: int) -> None:
        touches = min(max(self._count // CHAIN_PART, _BURST_TOUCHES_MIN), (1 << BURST_BITS) - 2)
        self._stamp = self._burst_begin = number << BURST_BITS
        self._burst_end = self._stamp + touches

    def _grow(self) -> None:
        """Grow by half as many rows; a running scan reads the old ones."""
        count = len(self._rows.ino)
        self._view(grown(self._rows, count + count // 2))
        fresh = np.arange(count, count + count // 2, dtype=np.uint32)
        self._free.frombytes(fresh[::-1].tobytes())
