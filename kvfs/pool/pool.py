"""One open pool: the device, its index and extents, and what the engine's parts share.

``Pool`` opens and closes these parts in order, and has them in groups (pool_parts.py): space, open,
rules, durable; the figures are one part. It owns the counters. The operations on all of them are in
namespace.py, blocks.py and attributes.py.
"""

import contextlib
import time
from collections.abc import Callable

from kvfs.core.account import Accounts
from kvfs.core.admission import policy_of
from kvfs.core.entitlements import entitled_directories
from kvfs.core.evicted import EvictedNames
from kvfs.core.eviction_policy import EVICTABLE, Rank
from kvfs.core.index_room import names_too_many
from kvfs.core.pool_layout import INDEX
from kvfs.core.records import Counters
from kvfs.core.settings import Settings
from kvfs.core.types import NO_INODE, SECOND_NS, InodeNo
from kvfs.devices import Device
from kvfs.machine.processes import Processes
from kvfs.pool.departures import Departures
from kvfs.pool.durable.attribute_records import AttributeRecords
from kvfs.pool.durable.final_bytes import FinalBytes, PoolSync
from kvfs.pool.durable.identities import Identities
from kvfs.pool.durable.index_log import UNLOGGED_MOST_BYTES, IndexLog
from kvfs.pool.durable.not_durable import UndurableBlocks
from kvfs.pool.figures.cache_figures import CacheFigures
from kvfs.pool.open.extent_bytes import stamp_ns
from kvfs.pool.open.ports import Kernel
from kvfs.pool.pool_change import Damage, Followers, PoolChange
from kvfs.pool.pool_parts import DurableParts, OpenParts, RuleParts, open_parts, space_parts
from kvfs.pool.rules.hints import Hints
from kvfs.pool.rules.leases import Leases, LeaseShares
from kvfs.pool.rules.policies import Policies, TenantRules
from kvfs.pool.rules.ranks import Pins, Ranks
from kvfs.pool.space.drive import PoolDrive
from kvfs.storage.age_clock import AgeClock
from kvfs.storage.background import Background
from kvfs.storage.drive_rows import read_drive_counts
from kvfs.storage.extent_bytes import FinalChecksum
from kvfs.storage.extents import Extents
from kvfs.storage.extents_at_hand import ExtentsAtHand
from kvfs.storage.heat import Heat
from kvfs.storage.index_place import IndexAt, discard_index, open_index, remove_index
from kvfs.storage.index_transaction import UnloggedRows
from kvfs.storage.inode_numbers import InodeNumbers
from kvfs.storage.memory_files import MemoryFiles
from kvfs.storage.outliving import Outliving, UndurableTable
from kvfs.storage.pool_run import PoolRun
from kvfs.storage.syscalls import Syscalls


class Pool:
    """The parts of one mounted pool. Everything runs on one thread unless it says otherwise."""

    #: Blocks whose name was removed because their bytes were damaged or could not be kept.
    lost_blocks = 0

    def __init__(
        self,
        device: Device,
        settings: Settings,
        kernel: Kernel,
        outliving: Outliving,
        index_at: IndexAt,
        accounts: Accounts,
        *,
        takes_over: bool = False,
        syscalls: Syscalls | None = None,
        clock_ns: Callable[[], int] = stamp_ns,
        monotonic_s: Callable[[], float] = time.monotonic,
    ) -> None:
        """Open the index *index_at*, and extents of *device*; *outliving* is for the next server.

        *takes_over*: the last server was not stopped, and left *outliving*. What each tenant takes
        is counted in *accounts*.

        Raises IndexDamaged, FormatUnknown, OSError.
        """
        self.device = device
        self.settings = settings
        #: Passes on what the kernel must know.
        self.kernel = kernel
        self.syscalls = syscalls if syscalls is not None else Syscalls()
        self.clock_ns = clock_ns
        self.monotonic_s = monotonic_s
        with contextlib.ExitStack() as stack:
            stack.callback(outliving.close)
            unlogged = self._open_storage(stack, outliving, index_at)
            self.damage = Damage(self.index, read_only=settings.read_only)
            self.counters = self.index.counters()
            drives = len(device.pool_fds)
            self.drive_counts = read_drive_counts(self.index, drives)
            #: Drafts and blocks being rewritten, which the index lists in one row.
            self.unfinished: set[InodeNo] = set()
            self.background = Background(settings.unlink_queue_max, settings.io_threads, drives)
            stack.callback(self.background.stop)
            self.at_hand = ExtentsAtHand(self.extents, self.background, self.syscalls)
            self.space = space_parts(
                *(device, settings, self.drive_counts.of_all(self.counters), self.numbers),
                *(self.extents, self.background, self.syscalls, accounts),
                monotonic_s=monotonic_s,
            )
            stack.callback(self.space.close)
            self.open = self._open_parts()
            self.durable = self._durable_parts(stack, outliving.undurable, unlogged, index_at)
            self.rules = self._rule_parts(stack)
            self.figures = CacheFigures(
                *(self.index, settings, self.space.taken, accounts.stored, self.rules.tenants),
                *(self.monotonic_s, self.clock_ns),
                self.rules.heat,
                self.age_clock.now_ns,
                EvictedNames(outliving.evicted.words),
            )
            self.departures = self._departures()
            self.followers = self._followers()
            #: The directory of the index in memory; empty if it is in the pool.
            self.index_dir = index_at.in_memory
            if not settings.read_only:
                follows = takes_over and self.durable.undurable_known
                self.run.begin(self.age_clock.base_ns, follows=follows)
                self.durable.undurable.put_stamp(self.run.stamp)
                self.durable.index_log.begin()
                if self.index_dir:
                    remove_index(INDEX, device.home.pool_fd, self.syscalls)
            self._parts = stack.pop_all()

    def _open_storage(
        self, stack: contextlib.ExitStack, outliving: Outliving, index_at: IndexAt
    ) -> UnloggedRows:
        """Open what is on the device and in memory; return what the log is yet to be told."""
        device, settings = self.device, self.settings
        unlogged = UnloggedRows(UNLOGGED_MOST_BYTES)
        self.index = open_index(index_at.path, settings, self.syscalls, outliving.journal, unlogged)
        stack.callback(self.index.close)
        self.notes = outliving.notes
        self.numbers = InodeNumbers(device.pool_fds, self.syscalls, read_only=settings.read_only)
        stack.callback(self.numbers.close)
        makes = bool(settings.probation_bytes) and not settings.read_only
        memory = MemoryFiles.found(
            index_at.in_memory, len(device.pool_fds), self.syscalls, makes=makes
        )
        self.extents = Extents(device.pool_fds, self.syscalls, device.fs_type, memory)
        stack.callback(self.extents.close)
        self.run = PoolRun(
            *(device.run_places, self.syscalls, self.numbers.first, index_at.in_memory),
            self.extents.lost,
            [one.header.drive for one in device.missing],
        )
        return unlogged

    def _departures(self) -> Departures:
        return Departures(
            *(self.index, self.space.of, self.space.taken),
            *(self.open.inodes, self.open.notes, self.unfinished),
            *(self.durable.identities, self.kernel, self.at_hand),
            *(self.clock_ns, self.monotonic_s),
        )

    def _open_parts(self) -> OpenParts:
        return open_parts(
            *(self.extents, self.numbers, self.background, self.space.drives),
            *(self.settings, self.kernel),
            notes=self.notes,
            monotonic_s=self.monotonic_s,
        )

    def _durable_parts(
        self,
        stack: contextlib.ExitStack,
        undurable: UndurableTable,
        unlogged: UnloggedRows,
        index_at: IndexAt,
    ) -> DurableParts:
        settings = self.settings
        not_durable = UndurableBlocks(settings.durable_queue_max, undurable, self.extents.drives)
        identities = Identities(
            *(self.extents, self.background, self.space.drives, not_durable),
            AttributeRecords(
                *(self.index, self.extents, undurable, self.monotonic_s, self.numbers.is_new)
            ),
            *(undurable, self.monotonic_s),
        )
        final_checksum = FinalChecksum(
            self.syscalls,
            in_memory=self.device.fs_type == "tmpfs",
            reads_device=settings.verify == "open",
        )
        final_bytes = FinalBytes(
            self.index,
            self.extents,
            self.at_hand,
            self.open.inodes,
            identities,
            self.syscalls,
            final_checksum,
            checksums_s=settings.checksum_stop_s if settings.checksum_share else 0.0,
        )
        syncs = PoolSync(
            *(self.device, self.index, identities, final_bytes, self.syscalls),
            *(self.extents.lost, self.run),
            read_only=settings.read_only,
        )
        return DurableParts(
            not_durable=not_durable,
            identities=identities,
            final_checksum=final_checksum,
            final_bytes=final_bytes,
            syncs=syncs,
            index_log=self._open_log(stack, unlogged, index_at),
            undurable=undurable,
            undurable_known=undurable.stamp == self.run.stamp,
        )

    def _open_log(
        self, stack: contextlib.ExitStack, unlogged: UnloggedRows, index_at: IndexAt
    ) -> IndexLog:
        index_log = IndexLog(
            *(self.space.drives.all, self.device.pool_fds, self.index, unlogged, self.numbers),
            *(self.open.ready, self.open.inodes, self.unfinished, self.settings, self.syscalls),
            index_at=index_at,
            outdated=self.run.outdated,
        )
        stack.callback(index_log.end)
        return index_log

    def _rule_parts(self, stack: contextlib.ExitStack) -> RuleParts:
        settings, device = self.settings, self.device
        makers = Processes(settings.file_servers)
        stack.callback(makers.close)
        accounts = self.space.accounts
        shares = LeaseShares(
            accounts, self._leases_end_bytes, lambda: self.space.taken.usable_bytes
        )
        leases = Leases(
            makers, settings.lease_s, shares, self.monotonic_s, same_boot=self.run.same_boot
        )
        heat = Heat(
            *(device.pool_fds, self.syscalls),
            epoch=device.epoch,
            read_only=settings.read_only,
            policy=policy_of(settings.eviction, settings.write_budget_bytes),
            now_s=self.clock_ns() // SECOND_NS,
            entitlements=accounts.entitlements,
        )
        #: The clock for ages, which never steps.
        self.age_clock = AgeClock.begun(self.run.age_base_ns, self.clock_ns(), heat.seen_ns)
        hints, named = Hints(heat), entitled_directories(settings.tenants)
        policies = Policies(self.index, settings.policies, named)
        pins = Pins(self.index, accounts.pinned)
        tenants = TenantRules(self.index, accounts, heat, policies, named)
        ranks = Ranks(
            *(self.index, heat, policies, pins, hints, shares),
            *(self.space.bounds, tenants, self.empty_names_too_many),
        )
        return RuleParts(policies, pins, hints, leases, heat, ranks, tenants)

    def _followers(self) -> Followers:
        """Return the tables that follow each change of the index, in order.

        The figures come before the ranks: they ask when an evicted block was last used.
        """
        rules = self.rules
        return Followers(
            *(rules.policies, rules.units, rules.pins, rules.hints, rules.leases, rules.tenants),
            *(self.figures, self.figures.held),
            rules.ranks,
            self.durable.identities,
            *self.open.followers,
            *(self.open.ready, self.space.node_shares, self.departures),
        )

    def close(self, *, settled: bool = True, swept: bool = True) -> None:
        """Stop: do all queued work and make index and extents durable. Raises OSError.

        If not *settled*, the index has drafts, and the pool counts as not stopped cleanly. If not
        *swept*, the next start looks for stray files.
        """
        try:
            self.departures.removed.give_way()
            for drive in self.space.drives.all:
                drive.unlink_queue.dismiss()
            self.background.drain()  # extents under preparation become ready first
            self.open.ready.give_way()
            self.background.drain()
            if not self.settings.read_only:
                self.rules.heat.mark(self.age_clock.now_ns())
                for drive in self.space.kept_on:
                    self.rules.heat.save(drive.number, at_stop=True)
                marked = self.durable.syncs.at_stop()
                swept = swept and marked.all_final and not self.extents.left_behind
                settled = settled and marked.error is None
                logged = self.durable.index_log.complete()
                settled = settled and (logged > 0 or not self.index_dir)
                # What stays in memory only this index knows.
                settled = settled and not self.extents.memory
                if settled:
                    strays = self.background.failures > 0 or not swept
                    base_ns = self.age_clock.base_ns
                    self.run.write(base_ns, clean=True, strays=strays, logged=logged)
                    self.durable.undurable.put_stamp(self.run.stamp)
            if settled and self.index_dir:
                discard_index(self.index_dir, self.syscalls)
        finally:
            self._parts.close()

    def ends_first(self, end: Callable[[], None]) -> None:
        """Call *end*, which uses the parts, before these are closed, however that happens."""
        self._parts.callback(end)

    def abandon(self) -> None:
        """Close without touching the device, which is gone."""
        self.background.discard()
        self.index.forget_pending()
        self._parts.close()

    def empty_names_too_many(self) -> int:
        """Return how many empty files must be evicted to make space for blocks with bytes.

        Each takes an inode and index rows on the device, which the capacity does not count. None
        must be evicted while the device still has space for the whole capacity.
        """
        space = self.space.taken
        if space.bound_bytes >= space.capacity_bytes:
            return 0
        return names_too_many(self.counters, space.capacity_bytes)

    @property
    def evictable_bytes(self) -> int:
        """Bytes of blocks that may be evicted by state, policy and pins, according to the heat."""
        return sum(map(self.evictable_on, self.space.drives.all))

    def evictable_on(self, drive: PoolDrive) -> int:
        """Return what of these bytes is on *drive*."""
        held_bytes = self.rules.heat.held_on[drive.number]
        return sum(held_bytes[rank] for rank in EVICTABLE)

    def in_use_bytes(self, drive: PoolDrive | None = None) -> int:
        """Return what of them, on *drive* or anywhere, is open now."""
        drive_of, heat = self.space.drives.of, self.rules.heat
        return sum(
            heat.held_as(ino, rank) or 0
            for ino, opened in self.open.inodes.items()
            if opened.gone is None and not opened.is_revocable and drive in (None, drive_of(ino))
            for rank in EVICTABLE
        )

    def _leases_end_bytes(self) -> int:
        """Return how many bytes leases may keep."""
        return self.space.bounds.leases_end_bytes(self.rules.heat.held_bytes[Rank.KEPT])

    def change(
        self,
        counters: Counters,
        *,
        begun: InodeNo = NO_INODE,
        finished: InodeNo = NO_INODE,
        lasting: bool = True,
    ) -> PoolChange:
        """Return one index transaction that ends with the pool's counters being *counters*.

        *begun* is open for writing from now on, and *finished* no longer is. The index lists such
        inodes, so that a start after a kill need not search for drafts. Memory is updated after the
        commit, so that a failed one changes nothing. If not *lasting*, a killed process may lose it
        (index.py).
        """
        return PoolChange(self, counters, begun, finished, lasting=lasting)
