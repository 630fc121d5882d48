"""What can be seen of a store. Part of the facade (driven.py)."""

import stat
from collections.abc import Iterator
from typing import Final, NamedTuple

from kvfs.core.eviction_policy import Rank
from kvfs.core.records import INODE_PREFIX, parse_inodes
from kvfs.core.types import ROOT_INODE, InodeNo, InodeRecord
from kvfs.engine.eviction.units import UsesOfUnits
from kvfs.engine.eviction.victims import obstacle
from kvfs.engine.names.named import STEP, Named, files_below, named
from kvfs.engine.store import Store
from kvfs.pool.open.open_inodes import OpenInode
from kvfs.pool.space.drive import PoolDrive
from kvfs.storage.drive_rows import read_drive_counts
from tests.support.store.inside import At

_STEP: Final = 1000


class SpaceNow(NamedTuple):
    """How much of the capacity is taken, and by what (see kvfs/pool/space/space.py)."""

    capacity_bytes: int
    bound_bytes: int
    recorded_bytes: int
    used_bytes: int
    ready_bytes: int
    pending_delete_bytes: int
    deleted_open_bytes: int
    pledged_bytes: int
    lacking_bytes: int
    taken_bytes: int
    unclaimed_bytes: int
    overcommitted_bytes: int


class HeatRow(NamedTuple):
    """What is known of one block that may go: its rank, when it was touched last, how often."""

    rank: Rank
    touched: int
    touches: int


class Looks:
    """Nothing here changes anything."""

    engine: Store

    # ---- what the store counts ----

    counters = At(lambda engine: engine.pool.counters)
    evictable_bytes = At(lambda engine: engine.pool.evictable_bytes)
    evicted_blocks = At(lambda engine: engine.reclaim.evicted_blocks)
    eviction_batches = At(lambda engine: engine.reclaim.batches)
    #: Whether somebody who waits for room may hope, and whether on those who read.
    hopeful = At(lambda engine: any(map(engine.reclaim.hopeful, engine.pool.space.drives.all)))
    #: On which drives evicting may give more, and readers may be done.
    hopeful_drives = At(
        lambda engine: [
            drive.number for drive in engine.pool.space.drives.all if engine.reclaim.hopeful(drive)
        ]
    )
    drives_awaiting_users = At(
        lambda engine: [
            drive.number
            for drive in engine.pool.space.drives.all
            if engine.reclaim.awaits_users(drive)
        ]
    )
    awaits_users = At(
        lambda engine: any(map(engine.reclaim.awaits_users, engine.pool.space.drives.all))
    )
    pinned_bytes = At(lambda engine: engine.pool.rules.pins.pinned_bytes)
    pins = At(lambda engine: engine.pool.rules.pins.rows)
    #: Of how many chains it is remembered which drive is the next.
    chains = At(lambda engine: len(engine.pool.open.placement._places))
    #: How each drive answers.
    drive_states = At(lambda engine: [probe.state.value for probe in engine.pool.space.probes.all])
    #: Whether each drive is being asked now.
    drives_asked = At(lambda engine: [probe.is_waiting for probe in engine.pool.space.probes.all])
    #: Why the whole pool is lost; empty while it serves.
    why_lost = At(lambda engine: engine.device_watch.lost)
    #: Of how many failed drives the index still has rows.
    drives_going = At(lambda engine: len(engine.device_watch._lost_drives._names.going))
    drafts_given_up = At(lambda engine: engine.watch.given_up)
    doubts = At(lambda engine: engine.blocks.doubts.__len__)
    node_bytes = At(lambda engine: engine.pool.space.accounts.names.by)
    held_by = At(lambda engine: engine.pool.figures.held.shown)
    usual_bytes = At(lambda engine: engine.pool.open.ready.forecast.usual_bytes)

    @property
    def space(self) -> SpaceNow:
        """What is taken now."""
        spaces = [drive.space for drive in self.engine.pool.space.drives.all]
        return SpaceNow(
            *(sum(getattr(space, name) for space in spaces) for name in SpaceNow._fields)
        )

    # ---- what is done ----

    #: The one walk after a start; the removal of strays; the looks at what was written back.
    scanned = At(lambda engine: engine.start_scan.done)
    #: Asked for an inode that was found to be in doubt, when its turn comes.
    prove = At(lambda engine: engine.reconcile.prove)
    swept = At(lambda engine: engine.swept and engine.reconcile.done)
    is_written_back = At(
        lambda engine: all(each.write_back.is_proven for each in engine.device_watch.drives)
    )
    write_back_looks = At(
        lambda engine: sum(each.write_back.looks for each in engine.device_watch.drives)
    )
    #: The number of the last transaction.
    transactions = At(lambda engine: engine.pool.index._env.info()["last_txnid"])

    # ---- open inodes ----

    def opened(self, ino: InodeNo) -> OpenInode:
        """Return *ino*'s row in the table of what is open. Raises KeyError."""
        return self.engine.pool.open.inodes[ino]

    @property
    def open_inos(self) -> set[InodeNo]:
        """Return what is open."""
        return set(self.engine.pool.open.inodes)

    @property
    def parked(self) -> dict[InodeNo, OpenInode]:
        """Return what keeps a backing id with no handle open."""
        return dict(self.engine.pool.open.inodes.parked)

    @property
    def runners(self) -> dict[InodeNo, OpenInode]:
        """Return the drafts that may take any amount until somebody looks, the next one first."""
        return dict(self.engine.pool.open.inodes.runners)

    #: Who was refused an OPEN with O_TRUNC, and may come again.
    second_tries = At(lambda engine: engine.blocks.truncating.refusals)
    #: What a kill would leave to the next start to finish: in memory, and as the index has it.
    unfinished = At(lambda engine: engine.pool.unfinished.copy)
    listed_unfinished = At(lambda engine: engine.pool.index.unfinished)

    #: The space of the drive of an inode.
    space_of = At(lambda engine: engine.pool.space.of)
    #: Requests that the last server did and may not have answered, with the inode of each.
    requests_done = At(lambda engine: engine.done.copy)
    #: What is noted to have had a writer.
    noted_writers = At(lambda engine: engine.pool.open.notes.all_written)

    def noted_closes(self, ino: InodeNo) -> int:
        """Return how many closes of *ino* a next server would have to carry out."""
        return len(dict(self.engine.pool.open.notes.all_closes()).get(ino, ()))

    # ---- leases, policies, heat ----

    #: Who lives: what the test gave (``watch_processes``).
    processes = At(lambda engine: engine.pool.rules.leases.processes)
    lease_state = At(lambda engine: engine.pool.rules.leases.state_of)
    #: By time: when each was used last.
    timed_leases = At(lambda engine: engine.pool.rules.leases._timed)
    lessee = At(lambda engine: engine.pool.rules.leases.shares.most)
    lease_shares_bytes = At(lambda engine: engine.pool.rules.leases.shares.held_bytes)
    policy = At(lambda engine: engine.pool.rules.policies.of)
    touched = At(lambda engine: engine.pool.rules.heat.touched)
    heat_clock = At(lambda engine: engine.pool.rules.heat.stamp)
    #: Loads of followed blocks that no tick has counted.
    waiting_loads = At(lambda engine: engine.pool.figures.reuse._loads.copy)
    tally_of = At(lambda engine: engine.pool.figures.tally_of)
    ranked = At(lambda engine: engine.pool.rules.heat.__contains__)
    ranked_count = At(lambda engine: engine.pool.rules.heat.__len__)

    def heat(self) -> dict[InodeNo, HeatRow]:
        """Return all that may be evicted, or is known to stay."""
        columns = self.engine.pool.rules.heat.columns()
        rows = zip(columns.ino, columns.rank, columns.touched, columns.touches, strict=True)
        return {
            InodeNo(int(ino)): HeatRow(Rank(int(rank)), int(touched), int(touches))
            for ino, rank, touched, touches in rows
            if ino
        }

    def held_bytes(self, rank: Rank) -> int:
        """Return what blocks of *rank* hold."""
        return self.engine.pool.rules.heat.held_bytes[rank]

    def is_kept(self, ino: InodeNo) -> bool:
        """Whether a pin or a policy keeps *ino* from eviction."""
        return self.engine.pool.rules.heat.held_as(ino, Rank.KEPT) is not None

    def obstacle(self, ino: InodeNo) -> object:
        """Return what keeps *ino* from eviction, None if nothing does."""
        record = self.row(ino)
        assert record is not None
        return obstacle(self.engine.pool, ino, record, open_too=False)

    # ---- rows of the index ----

    row = At(lambda engine: engine.pool.index.inode)
    has_row = At(lambda engine: engine.pool.index.knows)
    name_row = At(lambda engine: engine.pool.index.lookup)
    xattr_row = At(lambda engine: engine.pool.index.xattr)
    xattr_rows = At(lambda engine: engine.pool.index.xattrs)
    index_file_bytes = At(lambda engine: engine.pool.index.used_bytes)
    index_rows_bytes = At(lambda engine: engine.pool.index.room.rows_bytes)

    def files_below(self, ino: InodeNo) -> list[InodeNo]:
        """Return the files at or below *ino*, as a command finds them."""
        return [found for found in files_below(self.engine.pool.index, ino) if found != STEP]

    def used_within(self, ino: InodeNo, days: float) -> bool | None:
        """Return whether *ino* was used in the last *days*, as `kvfs evict --unused-for` asks."""
        pool, record = self.engine.pool, self.row(ino)
        assert record is not None
        since_ns = pool.age_clock.now_ns() - int(days * 86_400 * 10**9)
        units = self.engine.reclaim.units
        uses = UsesOfUnits(pool.rules.heat, pool.age_clock, pool.clock_ns, units, since_ns)
        return uses.of(ino, record)

    def records(self) -> dict[InodeNo, InodeRecord]:
        """Return every inode of the index."""
        found: dict[InodeNo, InodeRecord] = {}
        for rows in self.engine.pool.index.walk(INODE_PREFIX, _STEP):
            found.update((ino, record) for ino, record in parse_inodes(rows) if record is not None)
        return found

    # ---- the device ----

    #: For a test of one part, which its constructor takes.
    parts = At(lambda engine: engine.pool)
    settings = At(lambda engine: engine.pool.settings)
    syscalls = At(lambda engine: engine.pool.syscalls)
    kernel = At(lambda engine: engine.pool.kernel)
    device = At(lambda engine: engine.pool.device)
    open_extent = At(lambda engine: engine.pool.extents.open)
    identity = At(lambda engine: engine.pool.extents.identity)
    extent_bytes = At(lambda engine: engine.pool.extents.allocated_bytes)
    #: What lies on the device: the extents, and the files that say what a node is.
    extent_inos = At(lambda engine: engine.pool.extents.scan)
    node_inos = At(lambda engine: engine.pool.extents.scan_nodes)
    was_identified = At(lambda engine: engine.pool.durable.identities.was_identified)

    #: Whether the identity of an inode is written once its bytes are durable; and how many wait.
    is_listed = At(lambda engine: engine.pool.durable.not_durable.__contains__)
    listed = At(lambda engine: engine.pool.durable.not_durable.__len__)

    def is_waiting_for_device(self, ino: InodeNo) -> bool:
        """Whether *ino* is not durable yet, with its identity."""
        return ino in dict(self.engine.pool.durable.not_durable.sizes())

    #: What is durable, or shall be: a moment, and whether it has come.
    #: Whether it is compared with its checksum at its next open.
    is_doubted = At(lambda engine: engine.verifier.is_due)
    goal = At(lambda engine: engine.durable_pass.goal)
    reached = At(lambda engine: engine.durable_pass.reached)

    def ready(self) -> Iterator[tuple[InodeNo, int]]:
        """Yield the ready extents, and what each holds."""
        for ready in self.engine.pool.open.ready.queues.all:
            for extents in (*ready._queues.values(), ready._brought_before, ready._brought):
                for extent in extents:
                    yield extent.ino, extent.reserve_bytes

    # ---- all of it ----

    def nameless(self) -> set[InodeNo]:
        """Return the removed blocks that are open."""
        return {
            ino
            for ino, opened in self.engine.pool.open.inodes.items()
            if opened.gone is not None and not opened.revoked and stat.S_ISREG(opened.gone.mode)
        }

    def removed_lately(self) -> set[InodeNo]:
        """Return the blocks that are kept for a moment after their names went."""
        kept = self.engine.pool.departures.removed._removed
        return {ino for ino, each in kept.items() if stat.S_ISREG(each.record.mode)}

    def walk(self, match: str | None) -> tuple[set[InodeNo], int]:
        """Return what a command's walk finds, all files without *match*, and its steps."""
        engine = self.engine
        walked = (
            files_below(engine.pool.index, ROOT_INODE)
            if match is None
            else named(engine.pool.index, engine.namespace, Named(("",), match))
        )
        found = list(walked)
        return set(found) - {STEP}, found.count(STEP)

    def assert_counted(self, held_bytes: dict[InodeNo, int]) -> None:
        """Space and counters agree with the rows, and with what each extent holds."""
        pool = self.engine.pool
        blocks = {ino: each for ino, each in self.records().items() if stat.S_ISREG(each.mode)}
        recorded_bytes = sum(record.allocated_bytes for record in blocks.values())
        assert pool.counters.used_bytes == pool.space.taken.recorded_bytes == recorded_bytes
        drive_of, drives = pool.space.drives.of, pool.space.drives.all
        counted = pool.drive_counts.of_all(pool.counters)
        assert counted == read_drive_counts(pool.index, len(drives)).of_all(pool.counters)
        for drive, count in zip(drives, counted, strict=True):
            there = [record for ino, record in blocks.items() if drive_of(ino) is drive]
            there_bytes = sum(record.allocated_bytes for record in there)
            assert count == (len(there), there_bytes), drive.number
            assert drive.space.recorded_bytes == there_bytes
            held_there = [held for ino, held in held_bytes.items() if drive_of(ino) is drive]
            assert drive.space.used_bytes == sum(held_there)
            assert drive.space.pledged_bytes == 0
            self._assert_departures_counted(drive)
        assert pool.counters.blocks == len(blocks)
        assert pool.index.counters() == pool.counters
        assert pool.space.taken.used_bytes == sum(held_bytes.values())
        assert pool.space.taken.ready_bytes == sum(size_bytes for _, size_bytes in self.ready())

    def _assert_departures_counted(self, drive: PoolDrive) -> None:
        """What waits to be unlinked, and what is ordered, is counted on its drive."""
        for counted_bytes, held_back in (
            (drive.space.pending_delete_bytes, drive.unlink_queue._waiting),
            (drive.space.deleted_open_bytes, drive.unlink_queue._lingering),
        ):
            assert counted_bytes == sum(departure.size_bytes for departure in held_back)
        ready = self.engine.pool.open.ready.on(drive)
        assert ready._coming_bytes == sum(
            size_bytes * count for size_bytes, count in ready._coming.items()
        )
