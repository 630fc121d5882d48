"""A pool in memory and the store on it, which tests stop, kill, cut off and look through."""

import contextlib
import dataclasses
import json
import os
import re
import stat
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Final
from unittest import mock

import pytest

from kvfs.core.errors import NoSpace
from kvfs.core.records import INODE_PREFIX, parse_inodes
from kvfs.core.settings import Settings
from kvfs.core.types import ROOT_INODE, InodeNo, InodeRecord
from kvfs.devices import Device, Reserve, open_source, pool_files
from kvfs.engine.recovery.fsck import check_pool
from kvfs.engine.recovery.fsck_report import FsckReport
from kvfs.engine.recovery.new_pool import found_root
from kvfs.engine.recovery.rebuild import Progress, no_progress
from kvfs.engine.store import Store
from kvfs.pool.open_inodes import OpenInode
from kvfs.pool.ports import Kernel
from kvfs.storage.index import Index
from kvfs.storage.index_swap import index_path
from kvfs.storage.inode_numbers import InodeNumbers
from kvfs.storage.syscalls import Syscalls
from tests.support.kernel_recorder import KernelRecorder
from tests.support.mounting import workplace

MIB: Final = 1 << 20
_STAT_BLOCK_BYTES: Final = 512
_AN_EXTENT: Final = re.compile(r"/extents/[0-9a-f]{2}/[0-9a-f]{16}( \(deleted\))?$")
_RESERVE: Final = Reserve(share=0.0, most_bytes=0)
FILE: Final = stat.S_IFREG | 0o644
DIRECTORY: Final = stat.S_IFDIR | 0o755
SYMLINK: Final = stat.S_IFLNK | 0o777
FIFO: Final = stat.S_IFIFO | 0o644


def fill_pool(pool_fd: int) -> None:
    """What ``found_pool`` does, in a megabyte instead of 128."""
    syscalls = Syscalls()
    InodeNumbers.create(pool_fd, syscalls)
    Index.create(index_path(pool_fd), preallocate_bytes=MIB)
    with Index(index_path(pool_fd), preallocate_bytes=MIB, syscalls=syscalls) as index:
        found_root(index, 1)
        index.sync()


def make_pool(path: Path, capacity_bytes: int) -> None:
    """What mkfs does, without the 512 directories: the first file in one makes it."""
    pool_fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.close(pool_files.lock_pool(pool_fd, str(path), create=True))
        fill_pool(pool_fd)
        pool_files.write_header(pool_fd, pool_files.new_header(capacity_bytes))
    finally:
        os.close(pool_fd)


class Host:
    """A machine with one pool: its store is started and ends in the ways a store can end."""

    def __init__(self, path: Path, *, capacity_bytes: int = 64 * MIB) -> None:
        self.path = path
        self.settings = Settings(
            index_preallocate_bytes=MIB,
            index_map_bytes=64 * MIB,
            lease_max=1.0,  # a pool that is full of leases is what many tests are about
            source=str(path),
        )
        make_pool(path, capacity_bytes)
        self._device: Device | None = None
        self._store: Store | None = None

    @property
    def store(self) -> Store:
        """The running store."""
        assert self._store is not None
        return self._store

    def start(
        self,
        syscalls: Syscalls | None = None,
        settings: Settings | None = None,
        kernel: Kernel | None = None,
    ) -> Store:
        """Start a store, which runs until one of the ends below."""
        chosen = settings or self.settings
        self._device = open_source(str(self.path), reserve=_RESERVE, read_only=chosen.read_only)
        try:
            self._store = Store(self._device, chosen, kernel or KernelRecorder(), syscalls=syscalls)
        except BaseException:
            self._device.close()
            raise
        return self._store

    def read_only(self) -> Settings:
        """Return the settings of a mount that writes nothing."""
        return dataclasses.replace(self.settings, read_only=True)

    def stop(self) -> None:
        """Stop cleanly."""
        try:
            self.store.close()
        finally:
            self._forget()

    def kill(self) -> None:
        """End as SIGKILL does."""
        kill(self.store)
        self._forget()

    def lose_power(self) -> None:
        """End, and come back in another boot with an index that nobody may believe."""
        self.kill()
        self.pretend_reboot()
        data = self.path / "index" / "data.mdb"
        with data.open("r+b") as file:
            file.seek(8192)
            file.write(b"\xa5" * 65536)

    def pretend_reboot(self) -> None:
        """Make RUN say that the pool ran last in another boot."""
        path = self.path / "RUN"
        path.write_text(json.dumps({**json.loads(path.read_text()), "boot_id": "another"}))

    def check(self, *, repair: bool = False, progress: Progress = no_progress) -> FsckReport:
        """Run fsck on the stopped pool."""
        with open_source(str(self.path), reserve=_RESERVE, read_only=not repair) as device:
            return check_pool(device, repair=repair, settings=self.settings, progress=progress)

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
        """Return the path of *ino*'s extent."""
        return self.path / "extents" / f"{ino & 0xFF:02x}" / f"{ino:016x}"

    def allocated_bytes(self, ino: InodeNo) -> int:
        """Return what *ino*'s extent holds on the device."""
        return self.extent(ino).stat().st_blocks * _STAT_BLOCK_BYTES


def kill(store: Store) -> None:
    """End *store* as SIGKILL does: nothing queued is done, nothing is written, all fds go."""
    pool = store.pool
    background = pool.background
    background._jobs.clear()
    background._fresh.clear()
    background._due.clear()
    pool._parts.close()
    for fd in os.listdir("/proc/self/fd"):
        with contextlib.suppress(FileNotFoundError):  # the descriptor of the listing itself
            if _AN_EXTENT.search(os.readlink(f"/proc/self/fd/{fd}")):
                os.close(int(fd))


@contextlib.contextmanager
def reading_here() -> Iterator[None]:
    """Let starts and checks read the index without a child first: a fork takes most of the time."""
    with (
        mock.patch("kvfs.engine.recovery.recovery.refuse_unreadable"),
        mock.patch("kvfs.engine.recovery.fsck.refuse_unreadable"),
    ):
        yield


@contextlib.contextmanager
def host(*, capacity_bytes: int = 64 * MIB) -> Iterator[Host]:
    """Yield a host with a new pool in memory; no store runs yet."""
    with workplace() as place:
        pool = place / "pool"
        pool.mkdir()
        made = Host(pool, capacity_bytes=capacity_bytes)
        try:
            yield made
        finally:
            made.end()


def write(store: Store, opened: OpenInode, data: bytes, offset_bytes: int = 0) -> None:
    """Write as the daemon path does."""
    growth_bytes = store.blocks.growth_bytes(opened, offset_bytes + len(data), len(data))
    try:
        if growth_bytes:
            store.allocator.require_space(growth_bytes)
    except NoSpace:
        opened.spoil()
        raise
    fd = store.blocks.extent_fd(opened)
    assert store.pool.syscalls.pwrite(fd, data, offset_bytes) == len(data)
    store.pool.note_allocated(opened, store.pool.extents.allocated_bytes(fd))


def allocate(
    store: Store, opened: OpenInode, size_bytes: int, offset_bytes: int = 0, *, mode: int = 0
) -> None:
    """Do what fallocate(2) of *size_bytes*, the first ones, does."""
    allocation = store.blocks.allocations.begin(opened, mode, offset_bytes, size_bytes)
    allocation.work()
    store.blocks.allocations.end(opened, allocation)


def put(store: Store, parent: InodeNo, name: bytes, data: bytes) -> InodeNo:
    """Store a block as a connector does; return its inode."""
    opened, _ = store.blocks.create(parent, name, FILE, 0, 0)
    try:
        if data:
            write(store, opened, data)
    finally:
        store.blocks.close(opened, writer=True)
    return opened.ino


def get(store: Store, parent: InodeNo, name: bytes) -> bytes:
    """Load a block, by its name."""
    ino = store.namespace.lookup(parent, name)
    record = store.blocks.present(ino)
    opened = store.blocks.open(ino, writer=False, truncate=False)
    try:
        fd = store.blocks.extent_fd(opened)
        data = store.pool.syscalls.pread(fd, record.size_bytes + 1, 0)
    finally:
        store.blocks.close(opened, writer=False)
    assert len(data) == record.size_bytes
    return data


def make_directory(
    running: Host, name: bytes, parent: InodeNo = ROOT_INODE, uid: int = 0
) -> InodeNo:
    """Make a directory; return its inode."""
    return running.store.namespace.make_node(parent, name, DIRECTORY, uid, 0)[0]


def names(running: Host, parent: InodeNo = ROOT_INODE) -> list[bytes]:
    """Return the names of a directory, oldest first."""
    return [name for _, name in running.store.namespace.children(parent, InodeNo(0))]


def settle(store: Store) -> None:
    """Do all housekeeping that is due, and finish a sweep and the walks."""
    store.pool.recently_removed.give_way()
    while not store.sweep.done:
        store.tick()
        store.pool.background.drain()
    store.tick()
    store.pool.recently_removed.give_way()  # what the tick let go
    while store.pool.background.run_one():
        pass
    store.pool.background.drain()


def tree(store: Store, top: InodeNo = ROOT_INODE, path: bytes = b"") -> dict[bytes, object]:
    """Return every path below *top* with what is there: a block's bytes, a target, or a kind."""
    found: dict[bytes, object] = {}
    after = InodeNo(0)
    while rows := store.namespace.children(top, after):
        for ino, name in rows:
            after = ino
            assert store.namespace.lookup(top, name) == ino
            record = store.blocks.present(ino)
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


def assert_no_strays(store: Store) -> None:
    """The device holds the files that the index knows, or that are open or ready; no others.

    To be called on a settled store.
    """
    pool, known = store.pool, records(store)
    ready = {extent.ino for queue in pool.ready._queues.values() for extent in queue}
    blocks = {ino for ino, record in known.items() if stat.S_ISREG(record.mode)}
    removed = {
        ino
        for ino, opened in pool.open_inodes.items()
        if opened.gone is not None and stat.S_ISREG(opened.gone.mode)
    }
    assert set(pool.extents.scan()) == blocks | ready | removed
    nodes = {
        ino
        for ino, record in known.items()
        if stat.S_ISLNK(record.mode) or stat.S_ISDIR(record.mode)
    }
    assert set(pool.extents.scan_nodes()) | {ROOT_INODE} == nodes | {ROOT_INODE}


def records(store: Store) -> dict[InodeNo, InodeRecord]:
    """Return every inode of the index."""
    found: dict[InodeNo, InodeRecord] = {}
    for rows in store.pool.index.walk(INODE_PREFIX, 1000):
        found.update((ino, record) for ino, record in parse_inodes(rows) if record is not None)
    return found


def assert_exact(host: Host) -> None:
    """Space, counters and files agree to the byte; what is open included."""
    pool = host.store.pool
    known = records(host.store)
    blocks = {ino: record for ino, record in known.items() if stat.S_ISREG(record.mode)}
    recorded_bytes = sum(record.allocated_bytes for record in blocks.values())
    assert pool.counters.used_bytes == pool.space.recorded_bytes == recorded_bytes
    assert pool.counters.blocks == len(blocks)
    children = Counter(record.parent for ino, record in known.items() if ino != ROOT_INODE)
    for ino, record in known.items():
        assert record.entries == children[ino], f"{ino:#x}"
    assert pool.index.counters() == pool.counters

    nameless = {
        ino
        for ino, opened in pool.open_inodes.items()
        if opened.gone is not None and stat.S_ISREG(opened.gone.mode)
    }
    removed = {
        ino
        for ino, kept in pool.recently_removed._removed.items()
        if stat.S_ISREG(kept.record.mode)
    }
    held = {ino: host.allocated_bytes(ino) for ino in blocks.keys() | nameless | removed}
    assert pool.space.used_bytes == sum(held.values())
    for ino, record in blocks.items():
        opened = pool.open_inodes.get(ino)
        if opened is None or not opened.writers:
            assert record.allocated_bytes == held[ino], f"{ino:#x}"

    unlink_queue = pool.unlink_queue
    for counted_bytes, held_back in (
        (pool.space.pending_delete_bytes, unlink_queue._waiting),
        (pool.space.deleted_open_bytes, unlink_queue._lingering),
    ):
        assert counted_bytes == sum(departure.size_bytes for departure in held_back)
    assert pool.space.pledged_bytes == 0
    ready = pool.ready
    assert pool.space.ready_bytes == sum(
        extent.reserve_bytes for queue in ready._queues.values() for extent in queue
    )
    coming_bytes = sum(size_bytes * count for size_bytes, count in ready._coming.items())
    assert ready._coming_bytes == coming_bytes


def kill_behind_an_overwriting(running: Host, patch: pytest.MonkeyPatch) -> InodeNo:
    """Kill a server whose block was overwritten and renamed, and waits for its bytes; return it."""
    store = running.store
    ino = put(store, ROOT_INODE, b"a.tmp", b"old" * 3000)
    opened = store.blocks.open(ino, writer=True, truncate=False)
    write(store, opened, b"new" * 3000)
    store.blocks.close(opened, writer=True)
    patch.setattr(store.pool.background, "submit_long", lambda _job: None)
    store.namespace.rename(ROOT_INODE, b"a.tmp", ROOT_INODE, b"a")
    running.kill()
    return ino
