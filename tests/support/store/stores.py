"""A pool in memory and the store on it, which tests stop, kill, cut off and look through."""

import contextlib
import dataclasses
import json
import os
import shutil
import stat
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Final

import pytest

from kvfs.core.account import Accounts
from kvfs.core.drives import Numbering
from kvfs.core.errors import NoSpace
from kvfs.core.inode_rules import alias_of, block_of
from kvfs.core.lifecycle import UNFINISHED, State
from kvfs.core.settings import Settings
from kvfs.core.types import ROOT_INODE, InodeNo
from kvfs.devices import Device, DirectoryReserve, PoolHeader, open_drives, pool_files
from kvfs.engine.blocks.allocations import AllocationRequest
from kvfs.engine.recovery.fsck import check_pool
from kvfs.engine.recovery.fsck_rows import FsckReport
from kvfs.engine.recovery.index_before_use import ALL_ROWS, refuse_unreadable
from kvfs.engine.recovery.rebuild import Progress, found_root
from kvfs.pool.open.ports import Kernel
from kvfs.storage.index import Index
from kvfs.storage.index_place import pool_index
from kvfs.storage.inode_numbers import InodeNumbers
from kvfs.storage.syscalls import Syscalls
from tests.support.mounts.mounting import workplace
from tests.support.store.driven import Driven, LivingHandle, Opened, driven
from tests.support.store.outliving_memory import OutlivingMemory

MIB: Final = 1 << 20
_STAT_BLOCK_BYTES: Final = 512


def no_bar(_done: int, _total: int) -> None:
    """Show no progress."""


_RESERVE: Final = DirectoryReserve(share=0.0, most_bytes=0)
FILE: Final = stat.S_IFREG | 0o644
DIRECTORY: Final = stat.S_IFDIR | 0o755
SYMLINK: Final = stat.S_IFLNK | 0o777
FIFO: Final = stat.S_IFIFO | 0o644


def fill_pool(pool_fd: int) -> None:
    """What ``found_pool`` does, in a megabyte instead of 128."""
    syscalls = Syscalls()
    InodeNumbers.create(pool_fd, syscalls)
    Index.create(pool_index(pool_fd), preallocate_bytes=MIB)
    with Index(pool_index(pool_fd), preallocate_bytes=MIB, syscalls=syscalls) as index:
        found_root(index, 1)
        index.sync()


def make_pool(path: Path, header: PoolHeader) -> None:
    """What mkfs does, without the 512 directories: the first file in one makes it."""
    pool_fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.close(pool_files.lock_pool(pool_fd, str(path), create=True))
        fill_pool(pool_fd)
        pool_files.write_header(pool_fd, header)
    finally:
        os.close(pool_fd)


class Host:
    """A machine with one pool: its store is started and ends in the ways a store can end."""

    def __init__(
        self,
        path: Path,
        *,
        capacity_bytes: int = 64 * MIB,
        index_place: str = "memory",
        others_bytes: Sequence[int] = (),
    ) -> None:
        """*others_bytes*: the capacities of further drives."""
        self.path = path
        self._others: list[Path] = []
        #: The numbers of drives that a start does not name.
        self.unnamed: set[int] = set()
        memory = path.parent / "memory"
        memory.mkdir(exist_ok=True)
        self.settings = Settings(
            index_place=index_place,
            index_memory_dir=str(memory),
            index_preallocate_bytes=MIB,
            index_map_bytes=64 * MIB,
            # lose_power stands for a pool that is rebuilt (with a log: test_index_log.py).
            index_log_s=0.0,
            lease_max=1.0,  # a pool that is full of leases is what many tests are about
            source=str(path),
        )
        for number, header in enumerate(pool_files.new_headers([capacity_bytes, *others_bytes])):
            if number:
                self._others.append(path.parent / f"drive{number}")
                self._others[-1].mkdir()
            make_pool(self.drives[-1], header)
        self._device: Device | None = None
        self._store: Driven | None = None
        self._outliving: OutlivingMemory | None = None

    @property
    def drives(self) -> list[Path]:
        """The directories of all drives, by number."""
        return [self.path, *self._others]

    @property
    def store(self) -> Driven:
        """The running store."""
        assert self._store is not None
        return self._store

    def give_memory(self, size_bytes: int) -> None:
        """Let new blocks of the next store take so much memory."""
        self.settings = dataclasses.replace(self.settings, probation_bytes=size_bytes)

    def start(
        self,
        syscalls: Syscalls | None = None,
        settings: Settings | None = None,
        kernel: Kernel | None = None,
        accounts: Accounts | None = None,
    ) -> Driven:
        """Start a store, which runs until one of the ends below."""
        chosen = settings or self.settings
        self._device = self._open(read_only=chosen.read_only)
        try:
            self._store = driven(
                *(self._device, chosen, kernel),
                syscalls=syscalls,
                accounts=accounts,
            )
        except BaseException:
            self._device.close()
            raise
        return self._store

    def _open(self, *, read_only: bool = False) -> Device:
        sources = [str(at) for number, at in enumerate(self.drives) if number not in self.unnamed]
        return open_drives(sources, reserve=_RESERVE, read_only=read_only)

    def start_outliving(self) -> Driven:
        """Start a store whose memory outlives it (``take_over``)."""
        self._outliving = self._outliving or OutlivingMemory()
        return self._start_on(None)

    def take_over(self, *living: LivingHandle) -> Driven:
        """Kill the store, and start another that takes over what is *living*."""
        self.kill()
        return self._start_on(living)

    def start_after_kill(self, *living: LivingHandle) -> Driven:
        """Start a store after one that another process had, and that was killed."""
        return self._start_on(living)

    def _start_on(self, living: tuple[LivingHandle, ...] | None) -> Driven:
        self._device = self._open()
        assert self._outliving is not None
        outliving = self._outliving.at(self.settings)
        self._store = driven(
            *(self._device, self.settings),
            outliving=outliving,
            living=living,
        )
        return self._store

    def forget_requests(self) -> None:
        """Let the last server have been killed before it noted in a list what was done."""
        assert self._outliving is not None
        self._outliving.forget_requests()

    def forget_outliving(self) -> None:
        """Close what outlives a store."""
        if self._outliving is not None:
            self._outliving.close()

    def read_only(self) -> Settings:
        """Return the settings of a mount that writes nothing."""
        return dataclasses.replace(self.settings, read_only=True)

    def stop(self, *, all_closed: bool = False) -> None:
        """Stop cleanly; *all_closed*: clients have closed what is open, and nobody said so."""
        try:
            if all_closed:
                self.store.close_all_first()
            self.store.stop()
        finally:
            self._forget()

    def kill(self) -> None:
        """End as SIGKILL does."""
        self.store.kill()
        self._forget()

    def lose_power(self) -> None:
        """End, and come back in another boot with an index that nobody may believe."""
        self.kill()
        data = self.index_path() / "data.mdb"
        with data.open("r+b") as file:
            file.seek(8192)
            file.write(b"\xa5" * 65536)
        self.pretend_reboot()

    def index_path(self) -> Path:
        """Return the directory of the index that the last store left, in memory or in the pool."""
        home = next(drive for drive in self.drives if drive.exists())
        run = home / "RUN"
        said = json.loads(run.read_text()).get("index") if run.exists() else ""
        return Path(said) if said else home / "index"

    def pretend_reboot(self) -> None:
        """Make RUN say that the pool ran last in another boot, which took the memory along."""
        if (memory := self.index_path()).parent not in self.drives:
            shutil.rmtree(memory.parent)
        for path in (drive / "RUN" for drive in self.drives if drive.exists()):
            path.write_text(json.dumps({**json.loads(path.read_text()), "boot_id": "another"}))

    def check(
        self,
        *,
        repair: bool = False,
        progress: Progress = no_bar,
        syscalls: Syscalls | None = None,
    ) -> FsckReport:
        """Run fsck on the stopped pool."""
        with self._open(read_only=not repair) as device:
            return check_pool(
                device,
                repair=repair,
                settings=self.settings,
                progress=progress,
                syscalls=syscalls,
            )

    def probe_index(self) -> None:
        """Read every row of the stopped pool's index as a start does first. Raises IndexDamaged."""
        refuse_unreadable(str(self.index_path()), ALL_ROWS)

    def end(self) -> None:
        """Leave nothing open, whatever the test did."""
        if self._store is not None:
            self.kill()

    def _forget(self) -> None:
        self._store = None
        if self._device is not None:
            self._device.close()
            self._device = None

    # ---- looking at the pool from outside ----

    def extent(self, ino: InodeNo) -> Path:
        """Return the path of *ino*'s extent, in memory or on its drive."""
        if (there := self.in_memory(ino)).exists():
            return there
        drive = self.drives[Numbering(len(self.drives)).drive(ino)]
        return drive / "extents" / f"{ino & 0xFF:02x}" / f"{ino:016x}"

    def in_memory(self, ino: InodeNo) -> Path:
        """Return the path that *ino*'s extent has in memory, if it is there."""
        beside = self.index_path().parent / "blocks" / "extents"
        return beside / f"{ino & 0xFF:02x}" / f"{ino:016x}"

    def allocated_bytes(self, ino: InodeNo) -> int:
        """Return what *ino*'s extent holds on the device."""
        return self.extent(ino).stat().st_blocks * _STAT_BLOCK_BYTES


@contextlib.contextmanager
def host(
    *,
    capacity_bytes: int = 64 * MIB,
    index_place: str = "memory",
    others_bytes: Sequence[int] = (),
) -> Iterator[Host]:
    """Yield a host with a new pool in memory; no store runs yet."""
    with workplace() as place:
        pool = place / "pool"
        pool.mkdir()
        made = Host(
            pool,
            capacity_bytes=capacity_bytes,
            index_place=index_place,
            others_bytes=others_bytes,
        )
        try:
            yield made
        finally:
            made.end()


def write(store: Driven, opened: Opened, data: bytes, offset_bytes: int = 0) -> None:
    """Write as the daemon path does."""
    growth_bytes = store.growth_bytes(opened, offset_bytes + len(data), len(data))
    try:
        if growth_bytes:
            store.require_space(growth_bytes, opened.ino)
    except NoSpace:
        opened.spoil()
        raise
    fd = store.extent_fd(opened)
    assert store.syscalls.pwrite(fd, data, offset_bytes) == len(data)
    store.note_allocated(opened, store.extent_bytes(fd))


def allocate(
    store: Driven, opened: Opened, size_bytes: int, offset_bytes: int = 0, *, mode: int = 0
) -> None:
    """Do what fallocate(2) of *size_bytes*, the first ones, does."""
    allocation = store.begin_allocation(opened, AllocationRequest(mode, offset_bytes, size_bytes))
    allocation.work(opened.fd)
    store.end_allocation(opened, allocation)


def put(store: Driven, parent: InodeNo, name: bytes, data: bytes) -> InodeNo:
    """Driven a block as a connector does; return its inode."""
    opened, _ = store.create(parent, name, FILE, 0, 0)
    try:
        if data:
            write(store, opened, data)
    finally:
        store.close(opened, writer=True)
    return opened.ino


def get(store: Driven, parent: InodeNo, name: bytes) -> bytes:
    """Load a block, by its name."""
    ino = store.lookup(parent, name)
    record = store.present(ino)
    store.require_right(ino)
    opened = store.open(ino, writer=False, truncate=False)
    try:
        fd = store.extent_fd(opened)
        data = store.syscalls.pread(fd, record.size_bytes + 1, 0)
    finally:
        store.close(opened, writer=False)
    assert len(data) == record.size_bytes
    return data


def make_directory(
    running: Host, name: bytes, parent: InodeNo = ROOT_INODE, uid: int = 0
) -> InodeNo:
    """Make a directory; return its inode."""
    return running.store.make_node(parent, name, DIRECTORY, uid, 0)[0]


def names(running: Host, parent: InodeNo = ROOT_INODE) -> list[bytes]:
    """Return the names of a directory, oldest first."""
    return [name for _, name in running.store.children(parent, InodeNo(0))]


def settle(store: Driven) -> None:
    """Do all housekeeping that is due, and finish a sweep and the walks."""
    store.erase_removed()
    while not store.swept:
        store.tick()
        store.drain()
    store.tick()
    store.erase_removed()  # what the tick let go
    store.run_all()
    store.drain()
    failing = getattr(store.syscalls, "pause", contextlib.nullcontext)
    with failing():  # a failed sync would take what was stored since the last one
        store.sync()


def tree(store: Driven, top: InodeNo = ROOT_INODE, path: bytes = b"") -> dict[bytes, object]:
    """Return every path below *top* with what is there: a block's bytes, a target, or a kind."""
    found: dict[bytes, object] = {}
    after = InodeNo(0)
    while rows := store.children(top, after):
        for ino, name in rows:
            after = ino
            if store.record(ino).state == State.ALIAS:
                ino = block_of(store.record(ino))
            assert store.lookup(top, name) == ino
            record = store.present(ino)
            kind = stat.S_IFMT(record.mode)
            here = path + b"/" + name
            if kind == stat.S_IFREG:
                found[here] = get(store, top, name)
            elif kind == stat.S_IFDIR:
                found[here] = "directory"
                found.update(tree(store, ino, here))
            else:
                found[here] = record.target if kind == stat.S_IFLNK else "special"
    return found


def assert_no_strays(store: Driven) -> None:
    """The device holds the files that the index knows, or that are open or ready; no others.

    To be called on a settled store.
    """
    known = store.records()
    ready = {ino for ino, _ in store.ready()}
    blocks = {ino for ino, record in known.items() if stat.S_ISREG(record.mode)}
    assert set(store.extent_inos()) == blocks | ready | store.nameless()
    aliases = {ino for ino, record in known.items() if record.state == State.ALIAS}
    nodes = known.keys() - blocks - aliases
    assert set(store.node_inos()) | {ROOT_INODE} == nodes | {ROOT_INODE}


def assert_exact(host: Host) -> None:
    """Space, counters and files agree to the byte; what is open included."""
    store = host.store
    known = store.records()
    blocks = {ino: record for ino, record in known.items() if stat.S_ISREG(record.mode)}
    children = Counter(record.parent for ino, record in known.items() if ino != ROOT_INODE)
    for ino, record in known.items():
        assert record.entries == children[ino], f"{ino:#x}"
        if alias := alias_of(record):
            assert block_of(known[alias]) == ino
        if record.state == State.ALIAS:
            assert alias_of(known[block_of(record)]) == ino
    there = blocks.keys() | store.nameless() | store.removed_lately()
    held_bytes = {ino: host.allocated_bytes(ino) for ino in there}
    store.assert_counted(held_bytes)
    if store.scanned:
        held = store.held_by().values()
        whole = [record for record in blocks.values() if record.state not in UNFINISHED]
        assert sum(row["blocks"] for row in held) == len(whole)
        assert sum(row["bytes"] for row in held) == sum(one.allocated_bytes for one in whole)
    for ino, record in blocks.items():
        if ino not in store.open_inos or not store.opened(ino).writers:
            assert record.allocated_bytes == held_bytes[ino], f"{ino:#x}"


def kill_behind_an_overwriting(running: Host, patch: pytest.MonkeyPatch) -> InodeNo:
    """Kill a server whose block was overwritten and renamed, and waits for its bytes; return it."""
    store = running.store
    ino = put(store, ROOT_INODE, b"a.tmp", b"old" * 3000)
    opened = store.open(ino, writer=True, truncate=False)
    write(store, opened, b"new" * 3000)
    store.close(opened, writer=True)
    store.hold_thread(patch)
    store.rename(ROOT_INODE, b"a.tmp", ROOT_INODE, b"a")
    running.kill()
    return ino
