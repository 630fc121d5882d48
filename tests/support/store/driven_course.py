"""Time, the housekeeping of a store, and its bounds. Part of the facade (driven.py)."""

import contextlib
import dataclasses
import os
import re
from collections.abc import Callable, Iterable
from typing import Final, Generic, TypeVar

from kvfs.core.account import Accounts
from kvfs.core.blocks_ahead import UNUSED_S
from kvfs.core.types import FIRST_DRIVE, ROOT_INODE, InodeNo
from kvfs.engine.by_command import EvictionOrder, EvictionProgress, carry_out
from kvfs.engine.durability.verifier import VerifyProgress, verify_all
from kvfs.engine.names.named import STEP, Named
from kvfs.engine.store import Store
from kvfs.machine.processes import Maker, Processes
from kvfs.pool.open.open_inodes import OpenInode
from kvfs.pool.rules.leases import LeaseShares
from kvfs.pool.space.drive import PoolDrive
from kvfs.storage.memory_files import MemoryFiles
from tests.support.store.inside import At

P = TypeVar("P", bound=Processes)
T = TypeVar("T", int, float)

_DAY_NS: Final = 86_400 * 10**9
_AN_EXTENT: Final = re.compile(r"/extents/[0-9a-f]{2}/[0-9a-f]{16}( \(deleted\))?$")


def _memory(engine: Store) -> MemoryFiles:
    memory = engine.pool.extents.memory
    assert memory is not None, "nothing was ever to be in memory"
    return memory


class Turnable(Generic[T]):
    """A clock that a test can turn."""

    def __init__(self, tells: Callable[[], T]) -> None:
        self.tells: Callable[[], T] = tells

    def __call__(self) -> T:
        """Return the time."""
        return self.tells()


class Course:
    """What goes on beside the requests."""

    engine: Store
    clock: Turnable[float]
    calendar: Turnable[int]

    # ---- chores: the tick does them all, and a test one of them ----

    tick = At(lambda engine: engine.run_due)
    judge = At(lambda engine: engine.gate.run_due)
    judges_by = At(lambda engine: engine.pool.rules.heat.policy)
    #: How many new blocks were worth a write, and how many were not.
    admitted = At(lambda engine: engine.gate.admitted)
    turned_away = At(lambda engine: engine.gate.turned_away)
    evict_by_command = At(lambda engine: engine.reclaim.evict_these)
    open_final = At(lambda engine: engine.pool.durable.final_bytes.open)
    close_final = At(lambda engine: engine.pool.durable.final_bytes.close)
    evict_names = At(lambda engine: engine.name_eviction.run_due)
    settle_awaited = At(lambda engine: engine.blocks.last_closes.settle)
    settle_closes = At(lambda engine: engine.blocks.settle)
    search_anew = At(lambda engine: engine.reclaim.search_anew)
    rank_anew = At(lambda engine: engine.start_scan.rank_anew)
    sweep_anew = At(lambda engine: engine.sweep.start)
    sweep_on = At(lambda engine: engine.sweep.run_due)

    def log_index(self) -> None:
        """Have all that was committed so far in the log of the index."""
        self.commit()
        assert self.engine.pool.durable.index_log.complete(), "no log, or it has a gap"

    def log_due(self) -> None:
        """Let the next tick write a batch, or a copy if there is a gap."""
        index_log = self.engine.pool.durable.index_log
        index_log._logged_s = float("-inf")
        for log in index_log._logs:
            log._tried_s = float("-inf")

    def log_batch_due(self) -> None:
        """Let the next tick write a batch, and no copy that would not be due."""
        self.engine.pool.durable.index_log._logged_s = float("-inf")

    def await_log_threads(self) -> None:
        """Let the threads end that write the log and its copies."""
        for log in self.engine.pool.durable.index_log._logs:
            log.join()

    #: Blocks in memory: which are there, what moves them to their drives, and how often it did.
    in_memory = At(lambda engine: set(_memory(engine).inos()))
    memory = At(_memory)
    memory_bytes = At(lambda engine: _memory(engine).held_bytes)
    #: That a draft in memory may grow so far (``Outgrown.require``).
    require_memory = At(lambda engine: engine.probation_ends.outgrown.require)
    order_move = At(lambda engine: engine.probation_ends.moves.order)
    moved = At(lambda engine: engine.probation_ends.moves.moved)
    moves_undone = At(lambda engine: engine.probation_ends.moves.undone)

    def move(self, *inos: InodeNo) -> None:
        """Move *inos* from memory to their drives now, as far as nobody has them open."""
        for ino in inos:
            self.engine.probation_ends.moves.order(ino)
        for _ in inos:  # each may let the next one wait
            self.engine.probation_ends.moves.run_due(float("inf"))
            self.engine.pool.background.drain()

    def let_memory_be(self, waited_share: float, seconds: int) -> None:
        """Let so many *seconds* pass in which something waited for memory for such a share."""
        ends = self.engine.probation_ends
        ends._pressure = lambda: waited_share
        for _ in range(seconds):
            ends._adapted_s = float("-inf")
            self.engine.run_due()
            self.engine.pool.background.drain()

    def lack_memory(self, waited_share: float) -> None:
        """Let something wait for memory for such a share of the time; reading ahead learns it."""
        ahead = self.engine.read_ahead
        assert ahead is not None
        ahead._pressure = lambda: waited_share
        ahead._adapted_s = float("-inf")
        self.engine.run_due()

    def let_unused_expire(self) -> None:
        """Let so much time pass that what was read ahead and not used counts as wasted."""
        ahead = self.engine.read_ahead
        assert ahead is not None
        ahead.run_due(self.engine.pool.monotonic_s() + UNUSED_S)

    def slow_down(self, took_s: float) -> None:
        """Let each drive have taken so long for the last probe, and reading ahead mind it."""
        ahead = self.engine.read_ahead
        assert ahead is not None
        ahead._is_slow = lambda probe: probe.is_slow
        for probe in self.engine.pool.space.probes.all:
            probe.took_s = took_s

    def copy_only(self, ino: InodeNo, *, counts: bool = False) -> None:
        """Copy *ino*, which is in memory, as a server does that is killed then.

        If it *counts*, the file in memory has gone as well, and nobody was told.
        """
        extents = self.engine.pool.extents
        fd = extents.open(ino, os.O_RDONLY)
        extents.moves.copy(ino, fd)
        os.close(fd)
        if counts:
            _memory(self.engine).leave(ino)

    def begin_moves(self) -> None:
        """Copy what was ordered; the copies do not count before the next short jobs."""
        self.engine.probation_ends.moves.run_due(float("inf"))
        for long in self.engine.pool.background._long.all:
            long.wait()

    def lose_unlogged_rows(self) -> None:
        """Let more wait for the log than is kept: the rows so far are dropped."""
        unlogged = self.engine.pool.durable.index_log._unlogged
        unlogged.drop()
        unlogged.overflowed = True

    @property
    def logs_rows(self) -> bool:
        """Whether a batch of rows is written, or its end is not noted yet."""
        return any(log._writing.busy for log in self.engine.pool.durable.index_log._logs)

    def logs_on(self, drive: int) -> bool:
        """Whether batches of rows are written to *drive*, or wait for it."""
        return not self.engine.pool.durable.index_log._logs[drive].is_at_rest

    @property
    def holds_index(self) -> bool:
        """Whether an earlier state of the index is kept, for a copy."""
        return any(log._held for log in self.engine.pool.durable.index_log._logs)

    def log_no_more(self) -> None:
        """Let the log of the index stay as it is, whatever is committed from here on."""
        self.engine.pool.durable.index_log.end()

    def log_last(self) -> None:
        """Have all that was committed so far in the log of the index, and nothing later."""
        self.log_index()
        self.log_no_more()

    erase_removed = At(lambda engine: engine.pool.departures.removed.give_way)
    save_heat = At(lambda engine: engine.pool.rules.heat.save)
    tick_heat = At(lambda engine: engine.pool.rules.heat.run_due)
    touch = At(lambda engine: engine.pool.rules.heat.touch)
    #: Nobody comes for what waits for an OPEN.
    end_second_tries = At(lambda engine: engine.blocks.truncating.close)
    lose_maker = At(lambda engine: engine.blocks.lease_ends.end)
    # Drafts that grow without asking.
    watch = At(lambda engine: engine.watch.run_due)
    look_at_closing = At(lambda engine: engine.watch.look_at_closing)
    look_at_removal = At(lambda engine: engine.watch.look_at_removal)
    look_at_runners = At(lambda engine: engine.allocator.growth.look_at_runners)

    # ---- jobs in the background ----

    #: One short job; False if none is due.
    run_one = At(lambda engine: engine.pool.background.run_one)
    #: All short jobs, identities too; and with them those of the thread.
    hurry = At(lambda engine: engine.pool.background.hurry)
    drain = At(lambda engine: engine.pool.background.drain)
    begin_jobs = At(lambda engine: engine.pool.background.make_due)

    def run_all(self) -> None:
        """Do the short jobs: the walks after a start, too."""
        while self.run_one():
            pass

    # ---- what reaches the device ----

    commit = At(lambda engine: engine.pool.index.settle)
    sync_device = At(lambda engine: engine.pool.durable.syncs.written)

    def compare(self, ino: InodeNo) -> bool | None:
        """Compare block *ino* with its checksum; None if it has none. False: it is gone now."""
        verifier = self.engine.verifier
        look = verifier.begin(ino)
        return None if look is None else verifier.judge(look, verifier.read(look))

    def begin_comparing(self, ino: InodeNo) -> Callable[[], bool]:
        """Ask for the checksum of block *ino*; return what then reads its bytes, and judges them.

        The answer is whether it may be opened.
        """
        verifier = self.engine.verifier
        look = verifier.begin(ino)
        assert look is not None, "it has no checksum"
        return lambda: verifier.judge(look, verifier.read(look))

    def verify_everything(self, inos: Iterable[InodeNo]) -> VerifyProgress:
        """Compare the blocks *inos*, which are all, as ``kvfs verify`` does."""
        progress = VerifyProgress()
        for _ in verify_all(self.engine.verifier, iter(inos), progress, STEP, everything=True):
            pass  # a thread reads
        return progress

    @property
    def scrub_reads(self) -> bool:
        """Whether the scrub reads a block, or has read one that no tick has judged yet."""
        return self.engine.verifier._scrub.busy

    @property
    def scrub_has_read(self) -> bool:
        """Whether it has read one that no tick has judged yet."""
        return bool(self.engine.verifier._scrub._results)

    def sync(self) -> None:
        """Everything so far reaches the device, as it does within half a minute anyway.

        It is what ``--fsync=honour`` does for an fsync. Raises OSError.
        """
        self.engine.pool.background.hurry()
        if error := self.engine.pool.durable.syncs.all().error:
            raise error

    # ---- the ends ----

    #: A clean stop.
    stop = At(lambda engine: engine.close)

    def kill(self) -> None:
        """End as SIGKILL does: nothing queued is done, nothing is written, all fds go."""
        pool = self.engine.pool
        background = pool.background
        background._jobs.clear()
        background._fresh.clear()
        background._due.clear()
        pool._parts.close()
        for fd in os.listdir("/proc/self/fd"):
            with contextlib.suppress(FileNotFoundError):  # the descriptor of the listing itself
                if _AN_EXTENT.search(os.readlink(f"/proc/self/fd/{fd}")):
                    os.close(int(fd))

    def close_all_first(self) -> None:
        """Clients have closed all that is open: their RELEASEs were lost."""
        self.engine.all_closed = True

    # ---- time ----

    now_s = At(lambda engine: engine.pool.monotonic_s)

    def turn_clock(self, monotonic_s: Callable[[], float]) -> None:
        """Tell the time by *monotonic_s* from now on."""
        self.clock.tells = monotonic_s

    def turn_calendar(self, clock_ns: Callable[[], int]) -> None:
        """Tell the date by *clock_ns* (since the epoch) from now on."""
        self.calendar.tells = clock_ns

    def let_days_pass(self, days: float) -> None:
        """Let both the wall clock and that of ages say that so many *days* have passed."""
        age_ns, passed_ns = self.age_ns, int(days * _DAY_NS)
        self.set_calendar(days)
        self.turn_age_clock(lambda: age_ns() + passed_ns)

    def set_calendar(self, days: float) -> None:
        """Set the wall clock forward by so many *days*, or back."""
        wall_ns, step_ns = self.calendar.tells, int(days * _DAY_NS)
        self.calendar.tells = lambda: wall_ns() + step_ns

    def turn_age_clock(self, age_ns: Callable[[], int]) -> None:
        """Tell by *age_ns* from now on how old something is."""
        self.engine.pool.age_clock.now_ns = age_ns  # type: ignore[method-assign]

    def let_pass_begin(self) -> None:
        """Let the next tick begin a pass through the heat for what has expired."""
        self.engine.expiry._due_s = float("-inf")

    def pass_looks(self, days: float) -> None:
        """Let *days* pass, and look at all blocks that file servers write."""
        self.let_days_pass(days)
        self.engine.blocks.served.run_due(float("inf"))

    age_ns = At(lambda engine: engine.pool.age_clock.now_ns)

    def wait_for_opens(self, wait_s: float) -> None:
        """Let *wait_s* go by for the OPENs that truncating opens wait for."""
        self.engine.blocks.truncating.run_due(self.now_s() + wait_s)

    def end_leases(self, now_s: float) -> None:
        """End the leases that are over at *now_s*."""
        self.engine.pool.rules.leases.run_due(now_s, self.engine.blocks.lease_ends.end)

    # ---- who is there ----

    def watch_processes(self, processes: P) -> P:
        """Ask *processes* who lives from now on; return them."""
        self.engine.pool.rules.leases.processes = processes
        return processes

    def maker_of(self, pid: int) -> Maker:
        """Return the process that *pid* is now."""
        return self.engine.pool.rules.leases.processes.of(pid, self.now_s())

    def let_writers_run(self, *, free: bool = True) -> None:
        """Whether the kernel writes past the server, as passthrough lets it."""
        self.engine.pool.kernel.writers_run_free = free  # type: ignore[misc]

    def let_run(self, opened: OpenInode) -> None:
        """Let the writers of *opened* take any amount until somebody looks."""
        self.engine.pool.open.inodes.let_run(opened)

    # ---- bounds and settings ----

    def configure(self, **settings: float) -> None:
        """Change settings of the running store."""
        pool = self.engine.pool
        pool.settings = dataclasses.replace(pool.settings, **settings)  # type: ignore[arg-type]

    @property
    def _first_drive(self) -> PoolDrive:
        return self.engine.pool.space.drives.all[FIRST_DRIVE]

    def evict(self, size_bytes: int, drive: int = FIRST_DRIVE) -> int:
        """Evict so much on a drive; most tests have one."""
        return self.engine.evict(size_bytes, self.engine.pool.space.drives.all[drive])

    def empty_drive(self, drive: int) -> None:
        """Empty a drive from now on."""
        drains = self.engine.drains
        drains.learn(drains.drive(drive), drains.write(drains.drive(drive), draining=True))

    def require_removable(self, drive: int) -> None:
        """Ask whether a drive may be removed, and what it holds given up. Raises DriveNeeded."""
        drains = self.engine.drains
        drains.require_removable(drains.drive(drive), now=True)

    def evict_by_policy(self, size_bytes: int) -> int:
        """Evict so much as a command that leaves the choice to the policy; return its steps."""
        engine, progress = self.engine, EvictionProgress()
        order = EvictionOrder(Named(("",)), size_bytes)
        steps = carry_out(engine.pool, engine.namespace, engine.reclaim, order, progress)
        return sum(1 for _ in steps)

    def evict_used(self, size_bytes: int, drive: int = FIRST_DRIVE) -> None:
        """Remove names there of blocks that somebody uses."""
        self.engine.reclaim.evict_used(size_bytes, self.engine.pool.space.drives.all[drive])

    def require_space(self, size_bytes: int, ino: InodeNo = ROOT_INODE) -> None:
        """Make space on the drive that holds *ino*'s file."""
        self.engine.allocator.require_space(size_bytes, self.engine.pool.space.drives.of(ino))

    def look_at_device(self) -> None:
        """Look what the first drive can really hold."""
        self._first_drive.device_room.measure()

    def unlink_now(self, size_bytes: int) -> None:
        """Unlink there until so much is free."""
        self._first_drive.unlink_queue.hurry(size_bytes)

    def bound_space(self, capacity_bytes: int, bound_bytes: int) -> None:
        """Let the capacity be this, and what the device can really hold that."""
        space = self._first_drive.space
        space.capacity_bytes, space.bound_bytes = capacity_bytes, bound_bytes

    def bound_leases(self, most_bytes: int) -> None:
        """Let leases keep so much, of a pool as large."""
        shares = LeaseShares(Accounts(), lambda: most_bytes, lambda: most_bytes)
        self.engine.pool.rules.leases.shares = shares

    def take_space(self, size_bytes: int) -> None:
        """Count so much more as held by what is open."""
        self._first_drive.space.extra_bytes += size_bytes

    def pledge_all(self) -> None:
        """Let writes in flight have a claim on all that is free."""
        space = self._first_drive.space
        space.pledged_bytes = space.unclaimed_bytes

    def expect_growth(self, size_bytes: int) -> None:
        """Believe that drafts will take so much."""
        self._first_drive.space.lacking_bytes = size_bytes

    def note_allocated(self, opened: OpenInode, allocated_bytes: int) -> None:
        """Account for what an extent holds that was changed past the server."""
        opened.note_allocated(allocated_bytes, self.engine.pool.space.of(opened.ino))

    def reserve(self, opened: OpenInode, size_bytes: int) -> None:
        """Give the extent of an open file blocks for its first bytes, and account for them."""
        pool, fd = self.engine.pool, self.engine.blocks.extent_fd(opened)
        pool.extents.reserve(fd, size_bytes)
        opened.note_allocated(pool.extents.allocated_bytes(fd), pool.space.of(opened.ino))
