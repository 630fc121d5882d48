"""``kvfs fsck``: check a pool that nobody has mounted and, if asked to, repair it.

Without *repair* nothing is written. With it a damaged row is dropped or rewritten, and an index
that cannot be read is rebuilt from the identities. What is lost becomes a miss. The files are
checked here: extents, identity files, INODES; the rows of the index in fsck_rows.py.
"""

import contextlib
import functools
import os

from kvfs.core.errors import Damaged, IndexDamaged
from kvfs.core.pool_layout import INDEX
from kvfs.core.settings import Settings
from kvfs.core.types import ROOT_INODE, InodeNo
from kvfs.devices import Device
from kvfs.engine.recovery.file_claims import node_record
from kvfs.engine.recovery.finish_drafts import finish_index
from kvfs.engine.recovery.fsck_files import FileCheck
from kvfs.engine.recovery.fsck_rows import FsckReport, RowCheck
from kvfs.engine.recovery.index_before_use import (
    ALL_ROWS,
    begin_log,
    refuse_unreadable,
    restore_index,
)
from kvfs.engine.recovery.rebuild import (
    Progress,
    numbers_lie_behind,
    rebuild_index,
    skip_numbers,
)
from kvfs.storage.drive_rows import read_drive_counts
from kvfs.storage.extents import Extents
from kvfs.storage.index import Index
from kvfs.storage.index_place import (
    IndexAt,
    IndexPlace,
    is_used,
    present_index,
    remove_index,
    settle_index,
)
from kvfs.storage.inode_numbers import InodeNumbers
from kvfs.storage.kept_aside import Quarantine, StrayFiles
from kvfs.storage.lmdb_file import verify_data_file
from kvfs.storage.memory_files import MemoryFiles
from kvfs.storage.pool_run import (
    RunPlace,
    distrust_index,
    latest_places,
    new_run,
    on_each,
    read_pool_run,
    stale_drives,
)
from kvfs.storage.row_log import forget_log
from kvfs.storage.run_state import RunState, write_run_state
from kvfs.storage.syscalls import Syscalls


def check_pool(
    device: Device,
    *,
    repair: bool,
    progress: Progress,
    settings: Settings | None = None,
    syscalls: Syscalls | None = None,
) -> FsckReport:
    """Check the pool on *device*. Raises FormatUnknown, NoSpace, OSError."""
    calls = syscalls if syscalls is not None else Syscalls()
    memory = _found_in_memory(device, calls)
    with contextlib.closing(Extents(device.pool_fds, calls, device.fs_type, memory)) as extents:
        check = _Check(device, extents, settings or Settings(), calls, progress, repair=repair)
        return check.run()


def _found_in_memory(device: Device, syscalls: Syscalls) -> MemoryFiles | None:
    """Return the extents that a killed server left in memory, beside its index."""
    state = read_pool_run(device.run_places, syscalls)
    said = state.index_dir if state.of_this_boot else ""
    path = present_index(device.home.pool_fd, said) if said and not is_used(said) else None
    return MemoryFiles.found(path or "", len(device.pool_fds), syscalls)


class _Check:
    """One run of fsck."""

    def __init__(
        self,
        device: Device,
        extents: Extents,
        settings: Settings,
        syscalls: Syscalls,
        progress: Progress,
        *,
        repair: bool,
    ) -> None:
        self._pool_fd, self._pool_fds = device.home.pool_fd, device.pool_fds
        self._there = [one.pool_fd for one in device.there]
        self._place = IndexPlace(device.index_places, settings, syscalls, in_pool=False)
        #: Where the index is; empty until that is known.
        self._path = ""
        #: Whether it is in memory, and not needed after this.
        self._is_made = False
        self._run_places = device.run_places
        self._extents = extents
        self._settings = settings
        self._syscalls = syscalls
        self._progress = progress
        self._repair = repair
        self._report = FsckReport()
        self._report.missing = tuple((one.header.drive, one.uuid) for one in device.lacking)
        self._missing = [one.header.drive for one in device.missing]
        #: Whether repairs have begun.
        self._is_begun = False
        #: Whether RUN says that the pool was stopped cleanly.
        self._said_clean = False

    def run(self) -> FsckReport:
        state = read_pool_run(self._run_places, self._syscalls)
        self._said_clean = state.clean
        self._state = state
        self._stale = stale_drives(self._run_places, self._syscalls)
        self._doubtful_below = state.doubtful_below
        self._age_base_ns = state.present_age_base_ns
        if self._repair:
            settle_index(self._pool_fd, self._syscalls)
        try:
            self._run(state)
        finally:
            if self._is_made:
                self._place.discard(self._path)
        return self._report

    def _run(self, state: RunState) -> None:
        report = self._report
        if self._is_unusable(state):
            if not self._repair:
                return
            self._unsay_clean()
            self._make_anew()
            report.repaired += 1
            if not state.trusted:
                self._doubtful_below = _end_of_numbers(self._pool_fds, self._syscalls)
            state = RunState("", clean=False)
        with self._open() as index:
            if self._repair and not state.clean:
                finish_index(index, self._extents)
                self._move_out(index)
                # Before any identity is written: bytes that were overwritten in place before the
                # kill may still be on their way to the device, and nothing shows which.
                self._sync_drives()
            self._check(index, state)
            held = Quarantine(self._pool_fds, self._syscalls).held()
            report.quarantined = tuple(sorted(held.items()))
            report.strays = tuple(StrayFiles(self._pool_fds, self._syscalls, self._extents).held())
            changed = report.repaired or self._is_begun
            if self._repair and (changed or not state.clean or state.strays):
                self._make_clean(index)

    def _move_out(self, index: Index) -> None:
        """Write what is only in memory to the drives: afterwards the pool counts as stopped.

        The mount of a server that was killed has ended, so nobody writes. Raises NoSpace, OSError.
        """
        extents, memory = self._extents, self._extents.memory
        for ino in memory.inos() if memory is not None else ():
            if memory is not None and index.knows(ino):
                fd = extents.open(ino, os.O_RDONLY)
                try:
                    extents.moves.copy(ino, fd)
                finally:
                    self._syscalls.close(fd)
                memory.remove(memory.leave(ino))

    def _make_anew(self) -> None:
        """Rebuild the index, in memory, and remove the former one, wherever it is.

        If this is cut short, the next start rebuilds it again.
        """
        distrust_index(self._run_places, self._syscalls)
        self._path = rebuild_index(
            *(self._pool_fds, self._place, self._extents, self._settings),
            *(self._syscalls, self._progress),
            stale=self._stale,
        )
        self._is_made = True
        self._place.discard_others(self._path)
        remove_index(INDEX, self._pool_fd, self._syscalls)

    def _is_unusable(self, state: RunState) -> bool:
        """Whether the index must be rebuilt. Raises FormatUnknown."""
        try:
            self._find_index(state)
            refuse_unreadable(self._path, ALL_ROWS)
            # An index that can be read may still break soon: a page may be both used and free.
            if flaws := verify_data_file(self._path):
                raise IndexDamaged(f"index: {flaws[0]}")
            with self._open(read_only=True) as index:
                if not state.clean:
                    index.counters()  # needed to end what is open
                    read_drive_counts(index, len(self._pool_fds))
                if index.inode(ROOT_INODE) is None:
                    raise IndexDamaged("index: it has no root directory")
        except (IndexDamaged, Damaged) as error:
            self._report.problem(str(error))
            return True
        if not state.trusted:
            self._report.problem("index: the pool was cut off before it could stop")
            return True
        return False

    def _find_index(self, state: RunState) -> None:
        """Find the index, or load it from its log as a start does. Raises IndexDamaged."""
        said = state.index_dir if state.of_this_boot else ""
        path = None if said and is_used(said) else present_index(self._pool_fd, said)
        if path is None:
            latest = latest_places(self._run_places, self._syscalls)
            pool_fds = [one.pool_fd for one in latest]
            restored = restore_index(pool_fds, self._place, self._settings, self._syscalls)
            if restored is None:
                raise IndexDamaged("index: no copy of it is whole")
            path, self._is_made = restored.path, True
            if state.clean and restored.moment.number != state.logged:
                self._path = path
                raise IndexDamaged("index: a part of its log is missing")
        self._path = path

    def _open(self, *, read_only: bool | None = None) -> Index:
        return Index(
            self._path,
            # Repairs may add rows where a mount would not take more names.
            map_size_bytes=2 * self._settings.index_map_bytes,
            preallocate_bytes=self._settings.index_preallocate_bytes,
            read_only=not self._repair if read_only is None else read_only,
            syscalls=self._syscalls,
        )

    def _unsay_clean(self) -> None:
        """Mark the pool as not clean, before the first repair. Repairs are synced at the end.

        If the power is lost in between, the index may be in any state; after a kill it has strays.
        """
        if self._said_clean:
            self._write_run(clean=False)
            self._said_clean = False
            self._is_begun = True
            if self._is_made:  # if this is cut short, nothing is left of it
                distrust_index(self._run_places, self._syscalls)
        forget_log(self._there, self._syscalls)

    def _check(self, index: Index, state: RunState) -> None:
        total = _inodes_of(index)
        repair = self._unsay_clean if self._repair else None
        leftovers = state.strays or not state.clean
        files = FileCheck(
            index,
            self._extents,
            StrayFiles(self._pool_fds, self._syscalls, self._extents),
            self._report,
            before_repair=repair,
            leftovers=leftovers,
            missing=self._missing,
        )
        drives = len(self._pool_fds)
        rows = RowCheck(index, self._report, before_repair=repair, drives=drives)
        rows.run(
            files.inode,
            functools.partial(node_record, self._extents),
            files.attribute,
            lambda done: self._progress(min(done, total), total),
        )
        files.strays()
        self._progress(total, total)
        self._check_numbers(files.highest)

    def _check_numbers(self, highest: InodeNo) -> None:
        if numbers_lie_behind(highest, self._pool_fds, self._syscalls):
            return
        self._report.problem(f"INODES: damaged, or not behind {highest:#x}")
        if self._repair:
            skip_numbers(highest, self._pool_fds, self._syscalls)
            self._report.repaired += 1

    def _make_clean(self, index: Index) -> None:
        """Mark the pool as clean, so that the next mount, even a read-only one, needs no check."""
        index.sync()
        self._sync_drives()
        held = index.hold()
        try:
            young = _end_of_numbers(self._pool_fds, self._syscalls)
            logged = begin_log(self._there, held, young, self._syscalls)
        finally:
            held.end()
        failed = self._report.found > self._report.repaired
        self._write_run(clean=True, logged=logged, strays=failed)
        remove_index(INDEX, self._pool_fd, self._syscalls)
        self._is_made = bool(IndexAt(self._path, logged).in_memory)

    def _sync_drives(self) -> None:
        for pool_fd in self._pool_fds:
            self._syscalls.syncfs(pool_fd)

    def _write_run(self, *, clean: bool, logged: int = 0, strays: bool = False) -> None:
        run, number = new_run(self._pool_fds, self._state)

        def write(place: RunPlace) -> None:
            write_run_state(
                place.pool_fd,
                self._syscalls,
                clean=clean,
                superblock=place.superblock,
                doubtful_below=self._doubtful_below,
                age_base_ns=self._age_base_ns,
                logged=logged,
                strays=strays,
                run=run,
                number=number,
                stale=not clean and place.drive in self._stale,
                lost=self._missing if run else (),
            )

        on_each(self._run_places, write, all_of_them=True)


def _end_of_numbers(pool_fds: tuple[int, ...], syscalls: Syscalls) -> InodeNo:
    """Return a number above all inodes, from INODES, which the rebuild has mended."""
    with contextlib.closing(InodeNumbers(pool_fds, syscalls, read_only=True)) as numbers:
        return numbers.first


def _inodes_of(index: Index) -> int:
    """Return how many inodes there should be, 0 if that is unknown."""
    try:
        counters = index.counters()
    except Damaged:
        return 0
    return counters.blocks + counters.directories + counters.symlinks + counters.others
