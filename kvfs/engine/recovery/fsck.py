"""``kvfs fsck``: check a pool that nobody has mounted and, if asked to, repair it.

Without *repair* nothing is written. With it a damaged row is dropped or rewritten, and an index
that cannot be read is rebuilt from the identities. What is lost becomes a miss. The files are
checked here: extents, identity files, INODES; the rows of the index in fsck_rows.py.
"""

import contextlib
import functools
import stat
import time
from collections.abc import Callable, Iterable

from kvfs.core.errors import Damaged, IndexDamaged, NoSpace
from kvfs.core.lifecycle import SETTLED, State
from kvfs.core.pool_layout import INDEX
from kvfs.core.records import HAS_HOLES, AttributeRecord
from kvfs.core.settings import Settings
from kvfs.core.types import ROOT_INODE, InodeNo, InodeRecord
from kvfs.devices import Device
from kvfs.engine.recovery.file_claims import attributes_of, node_record
from kvfs.engine.recovery.finish_drafts import finish_index
from kvfs.engine.recovery.fsck_rows import FsckReport, RowCheck
from kvfs.engine.recovery.index_before_use import ALL_ROWS, refuse_unreadable
from kvfs.engine.recovery.rebuild import (
    Progress,
    numbers_lie_behind,
    rebuild_index,
    skip_numbers,
)
from kvfs.engine.recovery.restore import begin_log, restore_index
from kvfs.pool.durable.identities import agrees, carries_identity, identity_of, is_identified
from kvfs.storage.extents import BROKEN_FILE, Extents
from kvfs.storage.index import Index
from kvfs.storage.index_place import (
    IndexAt,
    IndexPlace,
    present_index,
    remove_index,
    settle_index,
)
from kvfs.storage.inode_numbers import InodeNumbers
from kvfs.storage.kept_aside import Quarantine, StrayFiles
from kvfs.storage.lmdb_file import verify_data_file
from kvfs.storage.row_log import forget_log
from kvfs.storage.run_state import RunState, distrust_index, read_run_state, write_run_state
from kvfs.storage.syscalls import Syscalls


class FileCheck:
    """Checks files against the index; with *before_repair*, called before each repair, mends them.

    *leftovers* says that a server ended before it could tidy up. Then strays and outdated
    identities do not count as damage, since the next mount's sweep removes or renews them.
    """

    def __init__(
        self,
        index: Index,
        extents: Extents,
        stray_files: StrayFiles,
        report: FsckReport,
        *,
        before_repair: Callable[[], None] | None,
        leftovers: bool,
    ) -> None:
        self._index = index
        self._extents = extents
        self._stray_files = stray_files
        self._report = report
        self._before_repair = before_repair
        self._leftovers = leftovers
        self.highest = InodeNo(0)

    def inode(self, ino: InodeNo, record: InodeRecord) -> str | None:
        """Return why *ino* must be dropped, None if its bytes are right. Mends its identity."""
        self.highest = max(self.highest, ino)
        try:
            return self._look(ino, record)
        except OSError as error:
            if error.errno not in BROKEN_FILE or not stat.S_ISREG(record.mode):
                raise
            return f"its extent is broken: {error.strerror}"

    def _look(self, ino: InodeNo, record: InodeRecord) -> str | None:
        if stat.S_ISREG(record.mode):
            status = self._extents.stat(ino)
            if status is None:
                return "its extent is missing"
            if record.state not in SETTLED:
                return None if self._leftovers else "a draft without a server"
            # The writer of a slab may have been cut off: the next start measures it.
            measured_later = self._leftovers and record.state == State.SLAB
            if status.st_size != record.size_bytes and not measured_later:
                return f"its extent has {status.st_size} bytes of {record.size_bytes}"
        if self._agrees(ino, record):
            self._look_at_attributes(ino, record)
            return None
        if carries_identity(record):
            self._wrong(
                f"inode {ino:#x} {record.name!r}: its identity is missing or out of date",
                lambda: self._identify(ino, record),
            )
        else:
            self._wrong(
                f"inode {ino:#x} {record.name!r}: has the identity that it had before a rewrite",
                lambda: self._extents.unidentify(ino),
            )
        return None

    def _look_at_attributes(self, ino: InodeNo, record: InodeRecord) -> None:
        """Compare the attributes in the index with those in the file, which outlive a power loss.

        A damaged row is left to the check of rows, which may find its value in the file.
        """
        try:
            said = {name: self._index.xattr(ino, name) for name in self._index.xattrs(ino)}
        except Damaged:
            return
        found = attributes_of(self._extents, ino, record)
        if said != ({} if found is None else dict(found.attributes)):
            self._wrong(
                f"inode {ino:#x} {record.name!r}: its attributes are not in its file",
                lambda: self._write_attributes(ino, record),
            )

    def attribute(self, ino: InodeNo, name: bytes) -> bytes | None:
        """Return the value of attribute *name* in the file of *ino*; None if it has none."""
        record = self._index.inode_or_miss(ino)
        found = None if record is None else attributes_of(self._extents, ino, record)
        return None if found is None else found.attributes.get(name)

    def _write_attributes(self, ino: InodeNo, record: InodeRecord) -> None:
        """Write the attributes of *ino* into its file, which may have no room for them."""
        said = {name: self._index.xattr(ino, name) or b"" for name in self._index.xattrs(ino)}
        attributes = AttributeRecord(ino, record.sequence, said)
        with contextlib.suppress(NoSpace):
            self._extents.write_attributes(attributes, of_node=not stat.S_ISREG(record.mode))

    def strays(self) -> None:
        """Find the files that belong to no inode."""
        self._strays("extent", self._extents.scan(), of_node=False)
        self._strays("identity file", self._extents.scan_nodes(), of_node=True)

    def _strays(self, what: str, files: Iterable[InodeNo], *, of_node: bool) -> None:
        for ino in files:
            self.highest = max(self.highest, ino)
            if not self._index.knows(ino):
                text = f"{what} {ino:#x}: no inode knows it"
                self._wrong(text, functools.partial(self._put_aside, ino, of_node=of_node))

    def _put_aside(self, ino: InodeNo, *, of_node: bool) -> None:
        """Keep a stray with an identity for a day, as a sweep does; remove one without."""
        if is_identified(self._extents, ino, of_node=of_node):
            self._stray_files.move_in(ino, time.time_ns(), of_node=of_node)
        elif of_node:
            self._extents.forget_node(ino)
        else:
            self._extents.unlink(ino)

    def _wrong(self, text: str, repair: Callable[[], object]) -> None:
        """Note a problem of the files alone. Leftovers are mended, but are not a problem."""
        mended = self._before_repair is not None and self._mend(repair)
        if not self._leftovers or (self._before_repair is not None and not mended):
            self._report.problem(text)
            self._report.repaired += mended

    def _mend(self, repair: Callable[[], object]) -> bool:
        """Do *repair*; False if the file is broken, and needs xfs_repair or e2fsck first."""
        assert self._before_repair is not None
        self._before_repair()
        try:
            repair()
        except OSError as error:
            if error.errno not in BROKEN_FILE:
                raise
            return False
        return True

    def _agrees(self, ino: InodeNo, record: InodeRecord) -> bool:
        try:
            return agrees(self._extents, ino, record)
        except OSError as error:
            if error.errno not in BROKEN_FILE or stat.S_ISREG(record.mode):
                raise
            return False  # a directory is not dropped because of its identity

    def _identify(self, ino: InodeNo, record: InodeRecord) -> None:
        """Write the identity of *ino*, a block's once its bytes are durable. Raises OSError."""
        with contextlib.suppress(Damaged):
            self._write_attributes(ino, record)
        identity = identity_of(ino, record)
        if stat.S_ISREG(record.mode):
            if self._extents.has_holes(ino):
                identity = identity._replace(flags=identity.flags | HAS_HOLES)
            self._extents.identify(ino, identity)
        else:
            self._extents.identify_node(ino, identity, record.target)


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
    with contextlib.closing(Extents(device.pool_fd, calls, device.fs_type)) as extents:
        check = _Check(device, extents, settings or Settings(), calls, progress, repair=repair)
        return check.run()


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
        self._pool_fd = device.pool_fd
        self._place = IndexPlace(device.pool_fd, device.index_id, settings, syscalls, in_pool=False)
        #: Where the index is; empty until that is known.
        self._path = ""
        #: Whether it is in memory, and not needed after this.
        self._is_made = False
        self._superblock = device.superblock
        self._extents = extents
        self._settings = settings
        self._syscalls = syscalls
        self._progress = progress
        self._repair = repair
        self._report = FsckReport()
        #: Whether RUN says that the pool was stopped cleanly.
        self._said_clean = False

    def run(self) -> FsckReport:
        state = read_run_state(self._pool_fd, self._syscalls, self._superblock)
        self._said_clean = state.clean
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
                self._doubtful_below = _end_of_numbers(self._pool_fd, self._syscalls)
            state = RunState("", clean=False)
        with self._open() as index:
            if self._repair and not state.clean:
                finish_index(index, self._extents)
                # Before any identity is written: bytes that were overwritten in place before the
                # kill may still be on their way to the device, and nothing shows which.
                self._syscalls.syncfs(self._pool_fd)
            self._check(index, state)
            held = Quarantine(self._pool_fd, self._syscalls).held()
            report.quarantined = tuple(sorted(held.items()))
            report.strays = tuple(StrayFiles(self._pool_fd, self._syscalls, self._extents).held())
            if self._repair and (report.repaired or not state.clean or state.strays):
                self._make_clean(index)

    def _make_anew(self) -> None:
        """Rebuild the index, in memory, and remove the former one, wherever it is.

        If this is cut short, the next start rebuilds it again.
        """
        distrust_index(self._pool_fd, self._syscalls)
        self._path = rebuild_index(
            *(self._pool_fd, self._place, self._extents, self._settings),
            *(self._syscalls, self._progress),
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
        path = present_index(self._pool_fd, state.index_dir if state.of_this_boot else "")
        if path is None:
            restored = restore_index(self._pool_fd, self._place, self._settings, self._syscalls)
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
        forget_log(self._pool_fd, self._syscalls)

    def _check(self, index: Index, state: RunState) -> None:
        total = _inodes_of(index)
        repair = self._unsay_clean if self._repair else None
        leftovers = state.strays or not state.clean
        files = FileCheck(
            index,
            self._extents,
            StrayFiles(self._pool_fd, self._syscalls, self._extents),
            self._report,
            before_repair=repair,
            leftovers=leftovers,
        )
        rows = RowCheck(index, self._report, before_repair=repair)
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
        if numbers_lie_behind(highest, self._pool_fd, self._syscalls):
            return
        self._report.problem(f"INODES: damaged, or not behind {highest:#x}")
        if self._repair:
            skip_numbers(highest, self._pool_fd, self._syscalls)
            self._report.repaired += 1

    def _make_clean(self, index: Index) -> None:
        """Mark the pool as clean, so that the next mount, even a read-only one, needs no check."""
        index.sync()
        self._syscalls.syncfs(self._pool_fd)
        held = index.hold()
        try:
            young = _end_of_numbers(self._pool_fd, self._syscalls)
            logged = begin_log(self._pool_fd, held, young, self._syscalls)
        finally:
            held.end()
        self._write_run(clean=True, logged=logged)
        remove_index(INDEX, self._pool_fd, self._syscalls)
        self._is_made = bool(IndexAt(self._path, logged).in_memory)

    def _write_run(self, *, clean: bool, logged: int = 0) -> None:
        write_run_state(
            self._pool_fd,
            self._syscalls,
            clean=clean,
            superblock=self._superblock,
            doubtful_below=self._doubtful_below,
            age_base_ns=self._age_base_ns,
            logged=logged,
        )


def _end_of_numbers(pool_fd: int, syscalls: Syscalls) -> InodeNo:
    """Return a number above all inodes, from INODES, which the rebuild has mended."""
    with contextlib.closing(InodeNumbers(pool_fd, syscalls, read_only=True)) as numbers:
        return numbers.first


def _inodes_of(index: Index) -> int:
    """Return how many inodes there should be, 0 if that is unknown."""
    try:
        counters = index.counters()
    except Damaged:
        return 0
    return counters.blocks + counters.directories + counters.symlinks + counters.others
