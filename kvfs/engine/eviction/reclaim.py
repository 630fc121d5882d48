"""Eviction: takes victims from the plan, checks each again, and removes them in batches.

The plan (``Victims``) is a hint. Each victim is checked again, and one index transaction removes
the names of a batch. No more is evicted than is needed. All of it runs on the loop's thread.
"""

import functools
import logging
from collections.abc import Sequence
from typing import Final

import numpy as np
from numpy.typing import NDArray

from kvfs.core.changed import Reason, Why
from kvfs.core.drives import Numbering
from kvfs.core.errors import Damaged, KvfsError
from kvfs.core.eviction_policy import Columns
from kvfs.core.fair_shares import Plan, plan_of
from kvfs.core.types import SECOND_NS, InodeNo, InodeRecord
from kvfs.engine.eviction.start_scan import StartScan
from kvfs.engine.eviction.units import Units, Victim
from kvfs.engine.eviction.victims import Victims, look_at, sidecars_of
from kvfs.engine.names.namespace import Namespace
from kvfs.engine.names.tree_change import TreeChange
from kvfs.pool.pool import Pool
from kvfs.pool.space.drive import PoolDrive

_log: Final = logging.getLogger(__name__)

#: Victims in one index transaction; some 60 us each.
BATCH: Final = 32
#: Names that one call removes at most, in 20 ms. For more, call again.
CALL_MAX: Final = 256
_PLAN_MAX: Final = 1024
#: A plan expires after this, because its blocks may have been used since.
_PLAN_AGE_S: Final = 1.0
#: A plan is exact to this part of the pool about who has more than its share.
_SLACK_PART: Final = 256
#: After a search that found nothing, the next one starts no sooner than this.
_BARREN_S: Final = 0.1
_ROUNDS: Final = 4


class Reclaim:
    """Makes space by eviction, never more than was asked for."""

    def __init__(self, pool: Pool, namespace: Namespace, start_scan: StartScan) -> None:
        self._pool = pool
        self._namespace = namespace
        self._start_scan = start_scan
        self.units = Units(pool)
        #: Refused victims that are open (True) or only mapped (False): the last resort.
        self._used: dict[InodeNo, bool] = {}
        #: The plan for each drive, and the one for the whole pool, which is another with several.
        self._victims = {drive: self._begin_victims() for drive in pool.space.drives.all}
        only = self._victims.get(pool.space.drives.all[0]) if len(self._victims) == 1 else None
        self._of_pool = only or self._begin_victims()
        self._plans = (*self._victims.values(), *(() if only else (self._of_pool,)))
        self._topping_up = False
        self.evicted_blocks = 0
        self.evicted_bytes = 0
        self.batches = 0
        self.refusals = 0

    def _begin_victims(self) -> Victims:
        pool = self._pool
        return Victims(
            *(pool.rules.heat, pool.background, pool.monotonic_s),
            barren_s=_BARREN_S,
            age_s=_PLAN_AGE_S,
            forgotten=self._used.clear,
        )

    @property
    def planning(self) -> bool:
        """Whether the thread is making a plan."""
        return any(victims.planning for victims in self._plans)

    @property
    def all_known(self) -> bool:
        """Whether the scan after the start has found all blocks that may go."""
        return self._start_scan.done

    def hopeful(self, drive: PoolDrive) -> bool:
        """Whether evicting again on *drive* may give more than it gave a moment ago."""
        victims = self._victims[drive]
        if victims.planning or len(drive.unlink_queue) or not self.all_known:
            return True
        return self._pool.evictable_on(drive) > 0 and not victims.is_barren()

    def run_due(self, now_s: float) -> None:
        """Keep space free ahead of the writers, on each drive."""
        for drive in self._pool.space.serving:
            short_bytes = _short_bytes(drive, now_s)
            if short_bytes > 0 and len(self._pool.departures.removed):
                self._pool.departures.removed.give_way(drive.space)
                short_bytes = _short_bytes(drive, now_s)
            if short_bytes > 0:
                self.evict(short_bytes, drive, ahead=True)

    def top_up(self) -> None:
        """Call ``run_due`` as soon as no request waits, because a draft has just taken space."""
        if not self._topping_up:
            self._topping_up = True
            self._pool.background.submit(self._top_up)

    def _top_up(self) -> None:
        self._topping_up = False
        now_s = self._pool.monotonic_s()
        self.run_due(now_s)
        for drive in self._pool.space.serving:
            drive.unlink_queue.hurry(drive.headroom.target_bytes(now_s))
            self._pool.open.ready.on(drive).fill()

    def evict(
        self,
        size_bytes: int,
        drive: PoolDrive | None = None,
        *,
        ahead: bool = False,
        reason: Reason = Reason.SPACE,
    ) -> int:
        """Evict until *size_bytes* are being freed on *drive*, or anywhere; return how many are.

        Blocks go in the one order of the pool, but those of other drives stay. Fewer if nothing can
        be evicted, if a plan is being made, or if one call would remove too many names. If *ahead*
        of need, no block of more than twice the missing bytes is evicted.
        """
        count = rounds = 0
        space = None if drive is None else drive.space
        gone_bytes = self._pool.space.strays.give_way(size_bytes, space)  # before any block
        victims = self._of_pool if drive is None else self._victims[drive]
        self._name_again()
        while gone_bytes < size_bytes and count < CALL_MAX and rounds < _ROUNDS:
            batch = self._next_batch(victims, size_bytes - gone_bytes, drive, ahead=ahead)
            if not batch and ahead and victims:
                break
            if not batch:
                rounds += 1
                self.units.begin_plan()
                if not victims.replan(functools.partial(self._choose, drive)):
                    break
                continue
            freed_bytes = self._execute(batch, reason, drive)
            if freed_bytes < 0:
                break
            gone_bytes += freed_bytes
            count += len(batch)
        return gone_bytes

    def evict_these(
        self, inos: Sequence[InodeNo], *, open_too: bool, reason: Reason
    ) -> tuple[int, int]:
        """Evict those of *inos* that can go, for *reason*; return how many blocks and bytes did.

        With *open_too* also open ones, whose space is freed after the last reader.
        """
        batch: dict[InodeNo, InodeRecord] = {}
        for ino in inos:
            if ino in batch:
                continue
            found = look_at(self._pool, ino)
            if found.record is not None and (open_too or not found.used or found.passing):
                batch.update(self.units.together(ino, found.record, open_too=open_too))
        blocks, size_bytes = self.evicted_blocks, self.evicted_bytes
        if batch:
            self._execute(list(batch.items()), reason)
        return self.evicted_blocks - blocks, self.evicted_bytes - size_bytes

    def search_anew(self) -> None:
        """Forget what a search found a moment ago, because a request waits."""
        for victims in self._plans:
            victims.search_anew()

    def awaits_users(self, drive: PoolDrive) -> bool:
        """Whether space would be freed on *drive* if the users of some blocks closed them."""
        drive_of = self._pool.space.drives.of
        return any(drive_of(ino) is drive for ino in self._used) or self._promised_bytes(drive) > 0

    def users_came_lately(self, lately_s: float, drive: PoolDrive) -> bool:
        """Whether a block of *drive* lost its name within *lately_s*, and is still read.

        That may end soon.
        """
        now_ns, drive_of = self._pool.clock_ns(), self._pool.space.drives.of
        since_ns = now_ns - int(lately_s * SECOND_NS)
        return any(
            opened.gone is not None
            and not opened.writers
            and since_ns < opened.gone.ctime_ns <= now_ns  # the clock may have been set back
            and drive_of(opened.ino) is drive
            for opened in self._pool.open.inodes.values()
        )

    def _promised_bytes(self, drive: PoolDrive) -> int:
        """Return what is freed on *drive* when readers of blocks without a name close them."""
        drive_of = self._pool.space.drives.of
        return drive.space.deleted_open_bytes + sum(
            opened.allocated_bytes
            for opened in self._pool.open.inodes.values()
            if opened.gone is not None and not opened.writers
            if drive_of(opened.ino) is drive
        )

    def evict_used(self, size_bytes: int, drive: PoolDrive) -> None:
        """Remove names of open or mapped blocks of *drive*, to free *size_bytes* after their users.

        Called if nothing else can be evicted and a request waits. The names are misses from now
        on; processes that have the blocks open read on.
        """
        drive_of = self._pool.space.drives.of
        size_bytes -= self._promised_bytes(drive)
        batch: dict[InodeNo, InodeRecord] = {}
        for ino in [ino for ino in reversed(self._used) if drive_of(ino) is drive]:
            if size_bytes <= 0 or len(batch) >= BATCH:
                break
            self._used.pop(ino, None)  # perhaps it went with another one
            record = look_at(self._pool, ino).record
            if record is not None and ino not in batch:
                going = self.units.together(ino, record, open_too=True)
                batch.update(going)
                size_bytes -= sum(gone.allocated_bytes for _, gone in going)
        if batch:
            self._execute(list(batch.items()))

    # ---- the plan ----

    def _name_again(self) -> None:
        """In a small pool, make blocks candidates again as soon as their readers are done.

        There one plan covers all blocks: those left out of it would outlive younger ones.
        """
        pool = self._pool
        if not self._used or len(pool.rules.heat) > _PLAN_MAX:
            return
        done = [
            ino
            for ino, read in self._used.items()
            if read and ((opened := pool.open.inodes.get(ino)) is None or opened.is_revocable)
        ]
        for ino in done:
            del self._used[ino]
            for victims in self._plans:
                victims.allow(ino)
        for victims in self._plans if done else ():
            victims.drop()

    def _choose(
        self, drive: PoolDrive | None, columns: Columns, but_not: NDArray[np.uint64]
    ) -> Plan:
        capacity_bytes, among = self._pool.space.taken.capacity_bytes, None
        if drive is not None and len(self._victims) > 1:
            among = Numbering(len(self._victims)).drives(columns.ino) == drive.number
        return plan_of(
            self._pool.rules.heat.policy,
            columns,
            bytes_wanted=capacity_bytes,  # many of them may be in use
            count_max=_PLAN_MAX,
            but_not=but_not,
            slack_bytes=capacity_bytes // _SLACK_PART,
            among=among,
        )

    def _next_batch(
        self, victims: Victims, size_bytes: int, drive: PoolDrive | None, *, ahead: bool
    ) -> list[Victim]:
        """Return *victims* that can go now, for *size_bytes* on *drive*, with their sidecars."""
        victims.begin_batch()
        batch: dict[InodeNo, InodeRecord] = {}
        held_bytes = 0
        while len(batch) < BATCH and held_bytes < size_bytes:
            ino = victims.next()
            if ino is None:
                break
            if ino in batch:
                continue  # it goes with another block already
            record, used, _ = look_at(self._pool, ino)
            if record is None or used:
                self.refusals += 1
                victims.refuse(ino)
                if used:
                    self._used[ino] = ino in self._pool.open.inodes
                continue
            if ahead and record.allocated_bytes > 2 * (size_bytes - held_bytes):
                victims.put_back(ino)
                break
            going = self.units.coldest(ino, record)
            if not going:
                self.refusals += 1
                continue
            batch.update(going)
            held_bytes += sum(self._frees(one, gone, drive) for one, gone in going)
            for sidecar in sidecars_of(self._pool.index, record):
                beside, used, _ = look_at(self._pool, sidecar)
                if beside is not None and not used:
                    batch[sidecar] = beside
                    held_bytes += self._frees(sidecar, beside, drive)
        return list(batch.items())

    def _frees(self, ino: InodeNo, record: InodeRecord, drive: PoolDrive | None) -> int:
        """Return what the removal of *ino* frees on *drive*, or anywhere."""
        there = drive is None or self._pool.space.drives.of(ino) is drive
        return record.allocated_bytes if there else 0

    # ---- carrying it out ----

    def _execute(
        self, batch: list[Victim], reason: Reason = Reason.SPACE, drive: PoolDrive | None = None
    ) -> int:
        """Remove the names of *batch* for *reason*; return what is being freed on *drive*.

        -1 if it failed. Atomic: no checkpoint between the check of the victims and here.
        """
        pool = self._pool
        now_ns = pool.clock_ns()
        try:
            with TreeChange(pool, now_ns) as change:
                for ino, record in batch:
                    change.unlink(ino, record, Why.EVICTED, reason=reason)
        except (KvfsError, OSError, Damaged) as error:
            _log.error("nothing evicted: %s", error)
            for victims in self._plans:
                victims.rest()
            return -1
        self.batches += 1
        return sum(self._let_go(ino, record, now_ns, drive) for ino, record in batch)

    def _let_go(
        self, ino: InodeNo, record: InodeRecord, now_ns: int, drive: PoolDrive | None
    ) -> int:
        """Free the space of *ino*, which the index has dropped, now or after its last reader."""
        pool = self._pool
        opened = pool.open.inodes.get(ino)
        stays = opened is not None and not opened.is_revocable
        if stays:
            self._namespace.keep_removed(ino, record, now_ns)
        elif opened is None:
            pool.durable.identities.erase(ino, record)
        else:
            pool.departures.revoke(opened, record)
        pool.kernel.unnamed(ino)
        if opened is not None:
            pool.kernel.name_vanished(record.parent, record.name)
        else:
            pool.kernel.inode_vanished(ino, record.parent)
        self.evicted_blocks += 1
        self.evicted_bytes += record.allocated_bytes
        return 0 if stays else self._frees(ino, record, drive)


def _short_bytes(drive: PoolDrive, now_s: float) -> int:
    """Return how many bytes of headroom *drive* lacks; those being deleted count as free."""
    free_bytes = drive.space.unclaimed_bytes + drive.space.pending_delete_bytes
    return drive.headroom.short_bytes(free_bytes, now_s)
