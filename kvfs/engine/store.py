"""The store: the whole pool behind one object, as the mount sees it, and its periodic work.

It knows nothing of FUSE or data paths. Order of effects (docs/dev/architecture.md): reserve in
memory -> data -> one index transaction -> visible. A removal: index first, then unlink.
"""

import functools
import logging
import time
from collections.abc import Callable
from typing import Final

from kvfs.core.account import Accounts
from kvfs.core.errors import NoSpace
from kvfs.core.settings import Settings
from kvfs.devices import Device
from kvfs.engine.attributes import Attributes
from kvfs.engine.blocks.blocks import Blocks
from kvfs.engine.blocks.start_and_stop import TakenOver, close_all
from kvfs.engine.device_watch import DeviceWatch, DeviceWear, whole_wear
from kvfs.engine.durability.durable_pass import DurablePass
from kvfs.engine.durability.verifier import Verifier
from kvfs.engine.eviction.by_limits import Expiry, IndexGrowth, NameEviction, QuotaEviction
from kvfs.engine.eviction.drains import Drains
from kvfs.engine.eviction.gate import Gate
from kvfs.engine.eviction.overrun_watch import OverrunWatch
from kvfs.engine.eviction.probation_ends import ProbationEnds
from kvfs.engine.eviction.reclaim import Reclaim
from kvfs.engine.eviction.start_scan import StartScan
from kvfs.engine.names.namespace import Namespace
from kvfs.engine.read_ahead import ReadAhead
from kvfs.engine.recovery.lost_drives import LostDrives, LostNames
from kvfs.engine.recovery.rebuild import Progress
from kvfs.engine.recovery.reconcile import Reconcile
from kvfs.engine.recovery.recovery import Begun, begin
from kvfs.engine.recovery.sweep import Sweep
from kvfs.engine.rewrite.awaited_opens import AwaitedOpens
from kvfs.engine.rewrite.versions import DisplacedDrafts, OldVersions, Visibility
from kvfs.engine.take_hints import FetchAhead, TakeHints
from kvfs.pool.allocator import Allocator
from kvfs.pool.open.extent_bytes import stamp_ns
from kvfs.pool.open.open_notes import Living
from kvfs.pool.open.ports import Kernel
from kvfs.pool.pool import Pool
from kvfs.pool.space.drive import PoolDrive
from kvfs.storage.device_thread import Loop
from kvfs.storage.outliving import Outliving, undurable_rows_max
from kvfs.storage.syscalls import Syscalls

_log: Final = logging.getLogger(__name__)

#: Time for background work in each tick, even if the loop is never idle.
_TURN_S: Final = 0.002


class Store:
    """A pool with its operations: ``namespace``, ``blocks``, ``attributes``."""

    def __init__(
        self,
        device: Device,
        settings: Settings,
        kernel: Kernel,
        *,
        syscalls: Syscalls | None = None,
        clock_ns: Callable[[], int] = stamp_ns,
        monotonic_s: Callable[[], float] = time.monotonic,
        progress: Progress | None = None,
        outliving: Outliving | None = None,
        living: Living | None = None,
        accounts: Accounts | None = None,
    ) -> None:
        """Open *device*'s pool and repair what a crash left. Raises CommandError, OSError.

        *progress* is told how far a rebuild is. *outliving* is what a server that takes over gets.
        This one does if there are *living* handles: then *outliving* is what the last one left.
        Without *accounts* each uid is a tenant.
        """
        calls = syscalls if syscalls is not None else Syscalls()
        outliving = outliving or Outliving.fresh(undurable_rows_max(settings))
        begun = begin(device, settings, calls, progress, outliving, living)
        #: ``done``: the requests that the last server did and may not have answered, with inodes.
        recovered, self._kept, self.done = begun.recovered, begun.kept, begun.done
        self.pool = pool = Pool(
            *(device, settings, kernel, outliving, recovered.at),
            Accounts() if accounts is None else accounts,
            takes_over=living is not None,
            syscalls=calls,
            clock_ns=clock_ns,
            monotonic_s=monotonic_s,
        )
        rules = pool.rules
        self._know_undurable(begun, takes_over=living is not None)
        self.allocator = Allocator(self.pool, room=self)
        self.reconcile = Reconcile(self.pool, recovered.gone_back)
        lost_names = LostNames(self.pool, self.reconcile)
        old = OldVersions(pool.index, pool.space, pool.open, pool.notes, pool.departures)
        awaited = AwaitedOpens(pool.notes, pool.open, DisplacedDrafts(pool, old))
        self.namespace = Namespace(self.pool, self.allocator, awaited, lost_names)
        self.blocks = blocks = Blocks(self.pool, self.namespace, self.allocator, awaited)
        self.attributes = Attributes(self.pool, self.namespace, self.allocator, self.blocks)
        #: Whether clients are known to have closed all handles that are still open at ``close``.
        self.all_closed = False
        self.visibility = Visibility(pool.open.inodes, pool.rules.policies, blocks.truncating.old)
        self._begin_eviction(pool)
        self.device_wears = [DeviceWear(pool_fd) for pool_fd in device.pool_fds]
        self.probation_ends = ends = ProbationEnds(pool, self.reclaim, blocks.successors)
        wear = functools.partial(whole_wear, self.device_wears)
        self.gate = Gate(rules.heat, pool.open, ends.moves, wear)
        self.durable_pass = DurablePass(self.pool, self.blocks.publishing, ends.moves)
        self.verifier = Verifier(self.pool, self.blocks.publishing)
        lost_drives = LostDrives(self.pool, self.blocks.publishing, lost_names)
        self.device_watch = DeviceWatch(self.pool, self.blocks.publishing, lost_drives)
        self.sweep = Sweep(self.pool)
        self._fetch_ahead = fetch = FetchAhead(rules, pool.extents, pool.syscalls)
        pool.ends_first(fetch.close)
        self.take_hints = TakeHints(pool.index, rules, pool.age_clock, self.namespace, fetch)
        self.read_ahead = ReadAhead.wanted(pool)
        self._index_growth = IndexGrowth(pool.index, pool.background, self.allocator)
        lost_drives.give_up_missing()
        self._chores = self._list_chores()
        self._sweep_due = recovered.sweep_due  # and has not begun
        self._begin_sweep()
        self.reconcile.start()
        if recovered.sweep_due or device.outlived:
            self.pool.extents.held_below = self.pool.numbers.first

    def _begin_eviction(self, pool: Pool) -> None:
        """Make what evicts blocks: for space, names, ages and quotas."""
        self.start_scan = StartScan(pool)
        self.reclaim = Reclaim(pool, self.namespace, self.start_scan)
        self.drains = Drains(pool, self.reclaim)
        self.name_eviction = NameEviction(pool, self.reclaim)
        self._quota_eviction = QuotaEviction(
            *(pool.space, pool.rules.heat, pool.background, pool.monotonic_s), self.reclaim
        )
        self.expiry = Expiry(pool.index, pool.rules, pool.age_clock, pool.clock_ns, self.reclaim)
        self.watch = OverrunWatch(pool, self.allocator, self.reclaim)

    def _know_undurable(self, begun: Begun, *, takes_over: bool) -> None:
        """Keep the last server's list of what is not durable, or note that it has gaps."""
        pool, known = self.pool, not begun.recovered.unlisted
        if takes_over and not pool.settings.read_only:
            known = pool.durable.undurable_known and not pool.durable.undurable.is_lacking
            pool.durable.identities.recall(begun.done.values())
        if not known:
            pool.durable.not_durable.note_gap()
        if not known or begun.recovered.gone_back is not None:
            pool.durable.identities.attributes.note_unlisted()

    def _list_chores(self) -> tuple[Callable[[float], None], ...]:
        """Return what a tick does, in order. Each chore gets the present time."""
        pool = self.pool
        return (
            pool.departures.removed.run_due,
            lambda _: pool.space.on_each(lambda drive: drive.unlink_queue.settle()),
            lambda _: pool.at_hand.run_due(),
            self.watch.run_due,
            lambda _: pool.space.on_each(lambda drive: drive.device_room.measure()),
            self.reclaim.run_due,
            *((self.drains.run_due,) if pool.drive_counts.several else ()),
            self.probation_ends.run_due,
            lambda _: self.name_eviction.run_due(),
            lambda _: self._quota_eviction.run_due(),
            lambda now_s: pool.open.ready.run_due(now_s, pool.evictable_on),
            lambda _: self.blocks.settle(),
            self._settle_index,
            pool.durable.index_log.run_due,
            self.verifier.run_due,
            self.blocks.truncating.run_due,
            lambda now_s: pool.rules.leases.run_due(now_s, self.blocks.lease_ends.end),
            pool.rules.heat.run_due,
            self.gate.run_due,
            lambda _: pool.rules.heat.mark(pool.age_clock.now_ns()),
            self.expiry.run_due,
            self._save_heat,
            pool.figures.run_due,
            *(wear.run_due for wear in self.device_wears),
            lambda _: self._fetch_ahead.run_due(),
            *((self.read_ahead.run_due,) if self.read_ahead is not None else ()),
            self._sweep_on,
            self.durable_pass.run_due,
            lambda _: pool.space.strays.run_due(pool.age_clock.now_ns()),
        )

    # ---- the port Room: what the allocator asks for ----

    def evict(self, size_bytes: int, drive: PoolDrive) -> int:
        """Evict *size_bytes* on *drive*, if possible; return how many are being freed there."""
        return self.reclaim.evict(size_bytes, drive)

    def evict_names(self) -> None:
        """Evict blocks for their names, because the index would refuse the next one."""
        self.name_eviction.make_room()

    def nameless_bytes(self, drive: PoolDrive) -> int:
        """Return the bytes that ``forget_nameless`` would free on *drive*."""
        return self.blocks.truncating.nameless_bytes(drive)

    @property
    def all_known(self) -> bool:
        """Whether the scan after the start has found all blocks that may go."""
        return self.reclaim.all_known

    def forget_nameless(self) -> None:
        """Give up old versions, and finished drafts without a name."""
        self.blocks.truncating.give_way()

    def top_up(self) -> None:
        """Make space ahead of the next draft, as soon as no request waits."""
        self.reclaim.top_up()

    def rank_anew(self) -> None:
        """Rank every block again, because a policy changed for many."""
        self.start_scan.rank_anew()

    # ---- what the mount asks for ----

    def take_over(self, living: Living) -> None:
        """Open what the *living* handles of the last server have open. Raises OSError.

        The kernel's side must be able to give backing ids by now.
        """
        TakenOver(self.pool, self.blocks).recall(living, self._kept)

    def close(self) -> None:
        """Stop cleanly: publish or free every open inode first. Raises OSError.

        On a lost device nothing is done; the next start rebuilds the index.
        """
        if self.device_watch.lost:
            self.pool.abandon()
            return
        settled = close_all(self.pool, self.blocks, all_closed=self.all_closed)
        self.pool.background.do(self.probation_ends.close)
        self.durable_pass.close()
        self.verifier.close()
        if not (self.pool.settings.read_only or self.device_watch.settle()):
            settled = False
            self.pool.run.distrust()
        self.pool.close(settled=settled, swept=self.swept)

    def begin_serving(self, loop: Loop) -> None:
        """From now on *loop* serves requests: it waits for the device in threads only."""
        self.pool.extents.open_directories()
        self.pool.background.begin_serving(loop)
        if not self.pool.settings.read_only:
            self.pool.open.ready.begin_serving()

    def end_serving(self) -> None:
        """Wait for what threads do on the device. From now on that is done at once."""
        self.pool.background.end_serving()
        self.pool.at_hand.let_go()

    @property
    def growing(self) -> bool:
        """Whether a file is open for writing; the tick then runs more often."""
        return bool(self.pool.open.inodes.written)

    def run_due(self) -> None:
        """Do the periodic work that is due. Called a few times a second; never blocks.

        A failure is logged and counted. The other chores and the mount go on.
        """
        pool = self.pool
        if pool.settings.read_only:
            return
        now_s = pool.monotonic_s()
        pool.background.do(lambda: self.device_watch.run_due(now_s))
        if self.device_watch.lost:
            return
        for chore in self._chores:
            pool.background.do(functools.partial(chore, now_s))
        pool.background.make_due()
        pool.background.work(_TURN_S)
        if pool.numbers.refill_due:
            for drive in pool.numbers.begin_refills():
                refill = functools.partial(pool.numbers.refill, drive)
                pool.background.submit_long(refill, pool.space.drives.all[drive].ino)
        self._index_growth.run_due()

    def _save_heat(self, now_s: float) -> None:
        heat = self.pool.rules.heat
        if heat.save_due(now_s):
            for drive in self.pool.space.kept_on:
                save = functools.partial(heat.save, drive.number)
                self.pool.background.submit_long(save, drive.ino)

    @property
    def swept(self) -> bool:
        """Whether every inode is compared with its file, and no stray file is left."""
        return self.sweep.done and not (self._sweep_due or self.pool.extents.lost)

    def _begin_sweep(self) -> None:
        """Sweep once the index is compared: before that a file without an inode may get one."""
        if self._sweep_due and self.reconcile.done:
            self._sweep_due = False
            self.sweep.start()

    def _sweep_on(self, now_s: float) -> None:
        if not self.reconcile.done:
            if self.reconcile.run_due():
                self.start_scan.count_pins_anew()
            self._begin_sweep()
        elif not self.sweep.done:
            self.sweep.run_due()
        elif self._search_due(now_s):
            self._settle_index(now_s)  # the search sees only committed rows
            self.sweep.find_unidentified()

    def _search_due(self, now_s: float) -> bool:
        not_durable = self.pool.durable.not_durable
        lacking = not not_durable.is_complete and not_durable.has_room
        return lacking and now_s >= self.sweep.rests_until_s

    def _settle_index(self, _now_s: float) -> None:
        try:
            self.pool.index.settle()
        except (NoSpace, OSError) as error:
            _log.warning("index: pending rows not written: %s", error)
