"""One open pool: the device, its index and extents, and what the engine's parts share.

``Pool`` opens and closes these parts in order and owns the counters. The operations on them are in
namespace.py, blocks.py and attributes.py.
"""

import contextlib
import time
from collections.abc import Callable

from kvfs.core.eviction_policy import EVICTABLE, Rank, policy_named
from kvfs.core.headroom import Headroom
from kvfs.core.lifecycle import SETTLED, UNFINISHED
from kvfs.core.node_bound import NodeShares, names_too_many
from kvfs.core.records import Counters
from kvfs.core.settings import Settings
from kvfs.core.types import NO_INODE, SECOND_NS, InodeNo, InodeRecord, Sequence
from kvfs.devices import Device
from kvfs.machine.processes import Processes
from kvfs.pool.durable.checkpoints import Checkpoints
from kvfs.pool.durable.final_bytes import FinalBytes, PoolSync
from kvfs.pool.durable.identities import Identities
from kvfs.pool.durable.not_durable import AttributeRecords, NotDurable
from kvfs.pool.figures.cache_figures import CacheFigures
from kvfs.pool.open.measure import stamp_ns
from kvfs.pool.open.open_inodes import OpenInode, OpenInodes
from kvfs.pool.open.open_notes import OpenNotes
from kvfs.pool.open.ports import Kernel
from kvfs.pool.open.ready_extents import ReadyExtents
from kvfs.pool.pool_change import Damage, Followers, PoolChange
from kvfs.pool.rules.lease_shares import LeaseShares
from kvfs.pool.rules.leases import Leases
from kvfs.pool.rules.policies import Policies
from kvfs.pool.rules.ranks import Pins, Ranks
from kvfs.pool.space.recently_removed import REMOVED_KEPT_S, RecentlyRemoved
from kvfs.pool.space.space import DeviceRoom, Space, StayBounds
from kvfs.pool.space.unlink_queue import Strays, UnlinkQueue
from kvfs.storage.age_clock import AgeClock
from kvfs.storage.background import Background
from kvfs.storage.extent_checksum import FinalChecksum
from kvfs.storage.extents import Extents
from kvfs.storage.heat import Heat
from kvfs.storage.index_swap import open_index
from kvfs.storage.inode_numbers import InodeNumbers
from kvfs.storage.outliving import Outliving
from kvfs.storage.run_state import PoolRun
from kvfs.storage.stray_files import StrayFiles
from kvfs.storage.syscalls import Syscalls
from kvfs.storage.undurable_table import UndurableTable


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
        *,
        syscalls: Syscalls | None = None,
        clock_ns: Callable[[], int] = stamp_ns,
        monotonic_s: Callable[[], float] = time.monotonic,
    ) -> None:
        """Open the index and extents of *device*; *outliving* is left to the next server.

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
            self.index = open_index(device.pool_fd, settings, self.syscalls, outliving.journal)
            stack.callback(self.index.close)
            self.notes, self.open_notes = outliving.notes, OpenNotes(outliving.notes)
            self.numbers = InodeNumbers(device.pool_fd, self.syscalls, read_only=settings.read_only)
            stack.callback(self.numbers.close)
            self.run = PoolRun(device.pool_fd, device.superblock, self.syscalls, self.numbers.first)
            self.extents = Extents(device.pool_fd, self.syscalls, device.fs_type)
            stack.callback(self.extents.close)
            self.damage = Damage(self.index, read_only=settings.read_only)
            self.counters = self.index.counters()
            self._measure_space()
            self.background = Background(settings.unlink_queue_max)
            stack.callback(self.background.stop)
            self.unlink_queue = UnlinkQueue(self.background, self.space)
            self.open_inodes = OpenInodes()
            self.ready = ReadyExtents(
                self.extents,
                self.numbers,
                self.background,
                self.space,
                settings,
                self.unlink_queue,
                kernel,
                self.open_inodes,
                monotonic_s,
            )
            #: Drafts and blocks being rewritten, which the index lists in one row.
            self.unfinished: set[InodeNo] = set()
            self._make_identities(outliving.undurable)
            self.recently_removed = RecentlyRemoved(self.space, self._erase)
            self.followers = self._make_tables(stack)
            self.checkpoints = self._open_checkpoints(stack)
            if not settings.read_only:
                self._write_run(clean=False)
            self._parts = stack.pop_all()

    def _make_tables(self, stack: contextlib.ExitStack) -> Followers:
        """Create the tables that follow each change of the index, and return them in order.

        ``cache`` comes before ``ranks``, because it asks when an evicted block was last used.
        """
        settings, device = self.settings, self.device
        makers = Processes(settings.file_servers)
        stack.callback(makers.close)
        shares = LeaseShares(self._leases_end_bytes, lambda: self.space.usable_bytes)
        self.leases = Leases(
            makers, settings.lease_s, shares, self.monotonic_s, same_boot=self.run.same_boot
        )
        self.heat = Heat(
            device.pool_fd,
            self.syscalls,
            epoch=device.epoch,
            read_only=settings.read_only,
            policy=policy_named(settings.eviction),
            now_s=self.clock_ns() // SECOND_NS,
        )
        self.age_clock = AgeClock.begun(self.run.age_base_ns, self.clock_ns(), self.heat.seen_ns)
        #: The clock for ages, which never steps (ns; age_clock.py).
        self.age_ns = self.age_clock.now_ns
        self.policies = Policies(self.index, settings.policies)
        self.pins = Pins(self.index)
        self.cache = CacheFigures(
            self.index, settings, self.space, self.monotonic_s, self.clock_ns, self.unused_ns
        )
        self.ranks = Ranks(
            self.index,
            self.heat,
            self.policies,
            self.pins,
            shares,
            self.stay_bounds,
            self.empty_names_too_many,
        )
        tables = (self.policies, self.pins, self.leases, self.cache, self.ranks)
        return Followers(*tables, self.identities, self.ready, self.node_shares)

    def unused_ns(self, ino: InodeNo) -> int:
        """Return for how long block *ino* has not been used (ns); 0 if that is not known."""
        used_ns = self.heat.used_ns(ino)
        return 0 if used_ns is None else self.age_ns() - used_ns

    def empty_names_too_many(self) -> int:
        """Return how many empty files must be evicted to make space for blocks with bytes.

        Each takes an inode and index rows on the device, which the capacity does not count. None
        must be evicted while the device still has space for the whole capacity.
        """
        space = self.space
        if space.bound_bytes >= space.capacity_bytes:
            return 0
        return names_too_many(self.counters, space.capacity_bytes)

    def _open_strays(self) -> Strays:
        files = StrayFiles(self.device.pool_fd, self.syscalls, self.extents)
        grace_s, most = self.settings.stray_grace_s, self.settings.strays_max
        strays = Strays(files, self.space, self.unlink_queue, grace_s=grace_s, most=most)
        strays.load()
        return strays

    def _open_checkpoints(self, stack: contextlib.ExitStack) -> Checkpoints:
        checkpoints = Checkpoints(
            self.device.pool_fd,
            self.index,
            self.numbers,
            self.ready,
            self.open_inodes,
            self.unfinished,
            self.settings,
            self.space.capacity_bytes,
            self.syscalls,
            self.monotonic_s,
        )
        stack.callback(checkpoints.end)
        return checkpoints

    def _make_identities(self, undurable: UndurableTable) -> None:
        """Create the parts that make blocks durable, write identities, and keep strays."""
        self.strays = self._open_strays()
        self.undurable = undurable
        #: Whether the last server kept ``undurable``: RUN is still the file that it wrote.
        self.undurable_known = undurable.stamp == self.run.stamp
        self.not_durable = NotDurable(self.settings.durable_queue_max, undurable)
        self.identities = Identities(
            self.extents,
            self.background,
            self.unlink_queue,
            self.not_durable,
            AttributeRecords(self.index, self.extents, undurable, self.monotonic_s),
            undurable,
            self.monotonic_s,
        )
        self.final_checksum = FinalChecksum(
            self.syscalls,
            in_memory=self.device.fs_type == "tmpfs",
            reads_device=self.settings.verify == "open",
        )
        self.final_bytes = FinalBytes(
            self.index,
            self.extents,
            self.open_inodes,
            self.identities,
            self.syscalls,
            self.final_checksum,
            checksums_s=self.settings.checksum_stop_s if self.settings.checksum_share else 0.0,
        )
        self.syncs = PoolSync(
            self.device,
            self.index,
            self.identities,
            self.final_bytes,
            self.syscalls,
            read_only=self.settings.read_only,
        )

    def _write_run(self, *, clean: bool, strays: bool = False) -> None:
        self.run.write(self.age_clock.base_ns, clean=clean, strays=strays)
        self.undurable.put_stamp(self.run.stamp)

    def _measure_space(self) -> None:
        """Create the parts that count space."""
        capacity_bytes = self.settings.capacity_bytes or self.device.capacity_bytes
        self.space = Space(capacity_bytes, self.counters.used_bytes)
        self.headroom = Headroom(capacity_bytes)
        self.stay_bounds = StayBounds(
            lambda: self.space.usable_bytes,
            lease_max=self.settings.lease_max,
            pin_share=self.settings.pin_share,
        )
        self.device_room = DeviceRoom(self.space, self.device.free_bytes)
        self.node_shares = NodeShares(self.numbers.first)

    def close(self, *, settled: bool = True, swept: bool = True) -> None:
        """Stop: do all queued work and make index and extents durable. Raises OSError.

        If not *settled*, the index has drafts, and the pool counts as not stopped cleanly. If not
        *swept*, the next start looks for stray files.
        """
        try:
            self.recently_removed.give_way()
            self.unlink_queue.dismiss()
            self.background.drain()  # extents under preparation become ready first
            self.ready.give_way()
            self.background.drain()
            if not self.settings.read_only:
                self.heat.mark(self.age_ns())
                self.heat.save()
                marked = self.syncs.at_stop()
                swept = swept and marked.all_final and not self.extents.left_behind
                settled = settled and marked.error is None
                self.checkpoints.keep_last()
                if settled:
                    strays = self.background.failures > 0 or not swept
                    self._write_run(clean=True, strays=strays)
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

    @property
    def evictable_bytes(self) -> int:
        """Bytes of blocks that may be evicted by state, policy and pins, according to the heat."""
        return sum(self.heat.held_bytes[rank] for rank in EVICTABLE)

    def short_bytes(self, now_s: float) -> int:
        """Return how many bytes of headroom are missing; those being deleted count as free."""
        space = self.space
        free_bytes = space.unclaimed_bytes + space.pending_delete_bytes
        return self.headroom.target_bytes(now_s) - free_bytes

    def _leases_end_bytes(self) -> int:
        """Return how many bytes leases may keep."""
        return self.stay_bounds.leases_end_bytes(self.heat.held_bytes[Rank.KEPT])

    def note_allocated(self, opened: OpenInode, allocated_bytes: int) -> None:
        """Account for *allocated_bytes*, which the extent of *opened* holds now."""
        self.space.extra_bytes += allocated_bytes - opened.allocated_bytes
        opened.hold(allocated_bytes)

    def leave(self, opened: OpenInode, *, writer: bool) -> None:
        """Count one handle less. The last closes the extent, and unlinks it if it has no name."""
        last = self.open_inodes.leave(opened, writer=writer)
        if not opened.writers and self.open_notes.has_notes(opened.ino):
            self.open_notes.written(opened)
        if not last:
            return
        if opened.ino in self.unfinished and not self._is_draft(opened):
            self.unfinished.discard(opened.ino)  # the next change writes it to the index
        self.kernel.freed(opened)
        opened.close_extent(self.syscalls)
        if opened.gone is not None and not opened.revoked:
            self._erase_or_keep(opened, opened.gone)

    def revoke(self, opened: OpenInode, record: InodeRecord) -> None:
        """Give back the bytes of *opened*, which is revocable and has lost its name. Atomic.

        Its handles stay until the file servers close them.
        """
        opened.lose_name(record)
        opened.revoke()
        opened.hold(0)
        opened.close_extent(self.syscalls)
        self.kernel.freed(opened)
        self._erase(opened.ino, record)

    def _erase(self, ino: InodeNo, record: InodeRecord) -> None:
        """Remove the files of *ino*, which has no name and will not be opened any more."""
        self.open_notes.end(ino)
        self.identities.erase(ino, record)

    def _is_draft(self, opened: OpenInode) -> bool:
        """Whether *opened* is a draft whose writer is still to open it (truncating_open.py)."""
        record = None if opened.gone is not None else self.index.inode_or_miss(opened.ino)
        return record is not None and record.state in UNFINISHED

    def _erase_or_keep(self, opened: OpenInode, record: InodeRecord) -> None:
        """Erase an inode that is no longer open, or keep it for a moment if it just lost its name.

        The OPEN of an earlier LOOKUP may still come; after two dead inodes open(2) fails (ESTALE).
        """
        age_s = (self.clock_ns() - record.ctime_ns) / SECOND_NS
        if record.state in SETTLED and not opened.torn and 0 <= age_s < REMOVED_KEPT_S:
            record = record._replace(allocated_bytes=opened.allocated_bytes)
            self.recently_removed.keep(opened.ino, record, self.monotonic_s())
            return
        self.space.extra_bytes -= opened.allocated_bytes
        record = record._replace(allocated_bytes=opened.allocated_bytes)
        self._erase(opened.ino, record)

    def next_sequence(self) -> Sequence:
        """Return the next sequence number, higher than all before; the counters keep it."""
        return Sequence(self.counters.sequence + 1)

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
