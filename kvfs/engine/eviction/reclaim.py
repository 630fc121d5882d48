"""Eviction: takes victims from the plan, checks each again, and removes them in batches.

The plan (``Victims``) is a hint. Each victim is checked again, and one index transaction removes
the names of a batch. No more is evicted than is needed. All of it runs on the loop's thread.
"""

import logging
from collections.abc import Sequence
from typing import Final

import numpy as np
from numpy.typing import NDArray

from kvfs.core.changed import Reason, Why
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
        self._victims = Victims(
            pool, barren_s=_BARREN_S, age_s=_PLAN_AGE_S, forgotten=self._used.clear
        )
        self._topping_up = False
        self.evicted_blocks = 0
        self.evicted_bytes = 0
        self.batches = 0
        self.refusals = 0

    @property
    def planning(self) -> bool:
        """Whether the thread is making a plan."""
        return self._victims.planning

    @property
    def all_known(self) -> bool:
        """Whether the scan after the start has found all blocks that may go."""
        return self._start_scan.done

    @property
    def hopeful(self) -> bool:
        """Whether evicting again may give more than it gave a moment ago."""
        pool = self._pool
        if self.planning or len(pool.space.unlink_queue):
            return True
        if not self.all_known:
            return True
        return pool.evictable_bytes > 0 and not self._victims.is_barren()

    def run_due(self, now_s: float) -> None:
        """Keep space free ahead of the writers."""
        short_bytes = self._short_bytes(now_s)
        if short_bytes > 0 and len(self._pool.departures.removed):
            self._pool.departures.removed.give_way()
            short_bytes = self._short_bytes(now_s)
        if short_bytes > 0:
            self.evict(short_bytes, ahead=True)

    def _short_bytes(self, now_s: float) -> int:
        """Return how many bytes of headroom are missing; those being deleted count as free."""
        space = self._pool.space.taken
        free_bytes = space.unclaimed_bytes + space.pending_delete_bytes
        return self._pool.space.headroom.short_bytes(free_bytes, now_s)

    def top_up(self) -> None:
        """Call ``run_due`` as soon as no request waits, because a draft has just taken space."""
        if not self._topping_up:
            self._topping_up = True
            self._pool.background.submit(self._top_up)

    def _top_up(self) -> None:
        self._topping_up = False
        now_s = self._pool.monotonic_s()
        self.run_due(now_s)
        self._pool.space.unlink_queue.hurry(self._pool.space.headroom.target_bytes(now_s))
        self._pool.open.ready.fill()

    def evict(self, size_bytes: int, *, ahead: bool = False) -> int:
        """Evict until *size_bytes* are being freed; return how many are.

        Fewer if nothing can be evicted, if a plan is being made, or if one call would remove too
        many names. If *ahead* of need, no block of more than twice the missing bytes is evicted.
        """
        count = rounds = 0
        gone_bytes = self._pool.space.strays.give_way(size_bytes)  # before any block
        self._name_again()
        while gone_bytes < size_bytes and count < CALL_MAX and rounds < _ROUNDS:
            batch = self._next_batch(size_bytes - gone_bytes, ahead=ahead)
            if not batch and ahead and self._victims:
                break
            if not batch:
                rounds += 1
                self.units.begin_plan()
                if not self._victims.replan(self._choose):
                    break
                continue
            freed_bytes = self._execute(batch)
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
        self._victims.search_anew()

    @property
    def awaits_users(self) -> bool:
        """Whether space would be freed if the users of some blocks closed them."""
        return bool(self._used) or self.promised_bytes > 0

    def users_came_lately(self, lately_s: float) -> bool:
        """Whether a block lost its name within *lately_s* and is still read, which may end soon."""
        now_ns = self._pool.clock_ns()
        since_ns = now_ns - int(lately_s * SECOND_NS)
        return any(
            opened.gone is not None
            and not opened.writers
            and since_ns < opened.gone.ctime_ns <= now_ns  # the clock may have been set back
            for opened in self._pool.open.inodes.values()
        )

    @property
    def promised_bytes(self) -> int:
        """Bytes that are freed when the readers of blocks without a name close them."""
        return self._pool.space.taken.deleted_open_bytes + sum(
            opened.allocated_bytes
            for opened in self._pool.open.inodes.values()
            if opened.gone is not None and not opened.writers
        )

    def evict_used(self, size_bytes: int) -> None:
        """Remove names of open or mapped blocks, which frees *size_bytes* after their last users.

        Called if nothing else can be evicted and a request waits. The names are misses from now
        on; processes that have the blocks open read on.
        """
        size_bytes -= self.promised_bytes
        batch: dict[InodeNo, InodeRecord] = {}
        while self._used and size_bytes > 0 and len(batch) < BATCH:
            ino, _ = self._used.popitem()
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
            self._victims.allow(ino)
        if done:
            self._victims.drop()

    def _choose(self, columns: Columns, but_not: NDArray[np.uint64]) -> Plan:
        capacity_bytes = self._pool.space.taken.capacity_bytes
        return plan_of(
            self._pool.rules.heat.policy,
            columns,
            bytes_wanted=capacity_bytes,  # many of them may be in use
            count_max=_PLAN_MAX,
            but_not=but_not,
            slack_bytes=capacity_bytes // _SLACK_PART,
        )

    def _next_batch(self, size_bytes: int, *, ahead: bool) -> list[Victim]:
        """Return victims of the plan that can go now, for *size_bytes*, with their sidecars."""
        self._victims.begin_batch()
        batch: dict[InodeNo, InodeRecord] = {}
        held_bytes = 0
        while len(batch) < BATCH and held_bytes < size_bytes:
            ino = self._victims.next()
            if ino is None:
                break
            if ino in batch:
                continue  # it goes with another block already
            record, used, _ = look_at(self._pool, ino)
            if record is None or used:
                self.refusals += 1
                self._victims.refuse(ino)
                if used:
                    self._used[ino] = ino in self._pool.open.inodes
                continue
            if ahead and record.allocated_bytes > 2 * (size_bytes - held_bytes):
                self._victims.put_back(ino)
                break
            going = self.units.coldest(ino, record)
            if not going:
                self.refusals += 1
                continue
            batch.update(going)
            held_bytes += sum(gone.allocated_bytes for _, gone in going)
            for sidecar in sidecars_of(self._pool, record):
                beside, used, _ = look_at(self._pool, sidecar)
                if beside is not None and not used:
                    batch[sidecar] = beside
                    held_bytes += beside.allocated_bytes
        return list(batch.items())

    # ---- carrying it out ----

    def _execute(self, batch: list[Victim], reason: Reason = Reason.SPACE) -> int:
        """Remove the names of *batch* for *reason*; return the bytes that are being freed.

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
            self._victims.rest()
            return -1
        self.batches += 1
        return sum(self._let_go(ino, record, now_ns) for ino, record in batch)

    def _let_go(self, ino: InodeNo, record: InodeRecord, now_ns: int) -> int:
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
        return 0 if stays else record.allocated_bytes
