"""Backing ids: one an inode while it is open, few when it is not, recorded before the reply."""

import contextlib
import mmap
import os
import struct
from collections.abc import Iterator
from errno import ENOMEM
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Final

import pytest
from hypothesis import settings
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule
from hypothesis.strategies import booleans, integers, sampled_from

from kvfs.core.types import BackingId, InodeNo, InodeRecord, Sequence
from kvfs.pool.open.open_inodes import OpenInode, OpenInodes
from mount.files.data_path import PassthroughPath
from mount.files.handles import HandleKind
from mount.fuse.wire import FOPEN_NOFLUSH, FOPEN_PASSTHROUGH
from tests.fuse.conftest import require_passthrough
from tests.support.kernel.backing_ids import DEVICE_FD, FakeIds
from tests.support.kernel.calls import opened, read_file, refused, write_file
from tests.support.kernel.message_counts import ask_status, mounted_with
from tests.support.mounts.mounting import Mounted

IDS_MAX: Final = 16
#: A row of mount/files/handles.py: inode, open flags, backing id, generation, kind.
ROW: Final = struct.Struct("<QIiIB75x")
ROWS_START: Final = 4096
GONE: Final = InodeRecord(
    *(0o100644, 0, 0, 0, 0, 0, 0, 0, 0, 0), InodeNo(1), 0, 0, Sequence(0), b"name"
)


def path_over(inodes: OpenInodes) -> PassthroughPath:
    """Return a data path whose pool has an extent for every inode."""
    at_hand: Any = SimpleNamespace(open=lambda _ino, flags: os.open("/dev/null", flags))
    notes: Any = SimpleNamespace(put=lambda *_: None, drop=lambda _: None)
    no_device: Any = None
    return PassthroughPath(*(no_device, inodes, at_hand, notes), DEVICE_FD, IDS_MAX, lambda: False)


class IdsMachine(RuleBasedStateMachine):
    """Opens, closes and removals in any order, against what the kernel demands."""

    def __init__(self) -> None:
        super().__init__()
        self.patch = pytest.MonkeyPatch()
        self.ids = FakeIds(self.patch)
        self.inodes = OpenInodes()
        self.path = path_over(self.inodes)
        self.handles: list[tuple[OpenInode, bool]] = []
        self.granted: dict[int, int] = {}
        self.ready: list[BackingId] = []
        self.gone: set[int] = set()
        self.next_ino = 100

    def teardown(self) -> None:
        """Give the ioctls back."""
        self.patch.undo()

    def _open(self, ino: InodeNo, writer: bool, fresh: BackingId) -> None:
        inode = self.inodes.enter(ino, writer=writer)
        if ino in self.gone:
            inode.gone = GONE
        inode.fresh_id = fresh
        grant = self.path.grant(inode, writer=writer)
        assert grant.open_flags & FOPEN_PASSTHROUGH
        assert bool(grant.open_flags & FOPEN_NOFLUSH) is not writer
        assert grant.backing_id == self.granted.setdefault(ino, grant.backing_id)
        self.handles.append((inode, writer))

    @rule()
    def prepare(self) -> None:
        """A ready extent is registered ahead."""
        if len(self.ready) < 5:
            self.ready.append(self.path.adopt(0))

    @precondition(lambda self: self.ready)
    @rule()
    def create(self) -> None:
        """A draft takes a ready extent with its id."""
        fresh = self.ready.pop()
        self.next_ino += 1
        self._open(InodeNo(self.next_ino), True, fresh)
        assert self.granted[self.next_ino] == fresh

    @rule(ino=integers(1, 40), writer=booleans())
    def open(self, ino: int, writer: bool) -> None:
        """A published block, or one that was removed a moment ago."""
        self._open(InodeNo(ino), writer and ino not in self.gone, BackingId(0))

    @precondition(lambda self: self.handles)
    @rule(which=integers(0, 1 << 30))
    def close(self, which: int) -> None:
        """Any handle; after the last one another id is legal."""
        inode, writer = self.handles.pop(which % len(self.handles))
        last = inode.readers + inode.writers == 1
        assert self.inodes.leave(inode, writer=writer) == last
        if last:
            self.path.freed(inode)
            del self.granted[inode.ino]

    @rule(ino=sampled_from(range(1, 41)))
    def remove(self, ino: int) -> None:
        """The name goes, whether the inode is open or not."""
        self.gone.add(ino)
        inode = self.inodes.get(InodeNo(ino))
        if inode is not None:
            inode.gone = GONE
        self.path.forget(InodeNo(ino))

    @invariant()
    def ids_of_open_inodes_live(self) -> None:
        """And no two inodes share one."""
        ids = list(self.granted.values())
        assert set(ids) <= self.ids.live
        assert len(set(ids)) == len(ids)

    @invariant()
    def nothing_is_lost_and_nothing_is_hoarded(self) -> None:
        """Every id is open, idle or ready; idle ones only within the bound, none of the gone."""
        figures = self.path.describe()
        assert figures["backing_ids_open"] == len(self.granted)
        idle = figures["backing_ids_cached"]
        assert len(self.ids.live) == len(self.granted) + idle + len(self.ready)
        assert idle == 0 or idle + len(self.granted) <= IDS_MAX
        assert self.path.opened_ids - self.path.closed_ids == len(self.ids.live)


TestIds = IdsMachine.TestCase
TestIds.settings = settings(max_examples=60, stateful_step_count=60)


def test_a_closed_inode_keeps_its_id_for_the_next_opener(monkeypatch: pytest.MonkeyPatch) -> None:
    ids, inodes = FakeIds(monkeypatch), OpenInodes()
    path = path_over(inodes)
    for _ in range(5):
        inode = inodes.enter(InodeNo(20), writer=False)
        assert path.grant(inode, writer=False).backing_id == 1
        inodes.leave(inode, writer=False)
        path.freed(inode)
    assert ids.given == 1


def test_an_id_that_is_not_to_be_had_fails_the_open_and_nothing_else(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    ids, inodes = FakeIds(monkeypatch), OpenInodes()
    path = path_over(inodes)
    inode = inodes.enter(InodeNo(20), writer=False)
    ids.fail_with = ENOMEM
    with refused(ENOMEM):
        path.grant(inode, writer=False)
    path.freed(inode)
    assert path.describe() == {"backing_ids_open": 0, "backing_ids_cached": 0}
    ids.fail_with = 0
    assert path.grant(inode, writer=False).backing_id == 1


def test_the_connection_ends_without_ids_and_is_not_asked_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It may live on, and keep their extents; and its number may be another file's by now."""
    ids = FakeIds(monkeypatch)
    path = path_over(OpenInodes())
    fresh = [path.adopt(0), path.adopt(0)]
    path.abandon(fresh[0])
    path.disconnect()
    assert ids.live == set()
    path.abandon(fresh[1])
    path.disconnect()


# ---- on a real mount ----


@pytest.fixture(scope="module")
def mount() -> Iterator[Mounted]:
    """A passthrough mount that keeps only a few ids."""
    with mounted_with({"backing_ids_max": IDS_MAX}) as mount:
        require_passthrough(mount)
        yield mount


def figures(mount: Mounted) -> tuple[int, int]:
    """Return ids of open and of closed inodes, after every RELEASE so far was read."""
    os.statvfs(mount.path)
    status = ask_status(mount)
    return status["backing_ids_open"], status["backing_ids_cached"]


def recorded(mount: Mounted, ino: int) -> list[tuple[int, ...]]:
    """Return the rows of inode *ino* in the server's shared table, as a successor finds them."""
    descriptors = Path(f"/proc/{mount.server_pid}/fd")
    for name in os.listdir(descriptors):
        with contextlib.suppress(FileNotFoundError):
            if os.readlink(descriptors / name).startswith("/memfd:kvfs-handles"):
                with (
                    opened(descriptors / name, os.O_RDWR) as fd,
                    contextlib.closing(mmap.mmap(fd, 0, prot=mmap.PROT_READ)) as memory,
                ):
                    return [
                        row
                        for row in ROW.iter_unpack(memory[ROWS_START:])
                        if row[0] == ino and row[4]
                    ]
    pytest.fail("the server has no table of handles")


@pytest.mark.needs_fuse
def test_all_handles_of_an_inode_share_one_id(mount: Mounted) -> None:
    write_file(mount.path / "shared", b"content")
    before, _ = figures(mount)
    with contextlib.ExitStack() as stack:
        for flags in (os.O_RDONLY, os.O_RDWR, os.O_WRONLY | os.O_APPEND, os.O_RDONLY | os.O_DIRECT):
            fd = stack.enter_context(opened(mount.path / "shared", flags))
            assert figures(mount)[0] == before + 1
        rows = recorded(mount, os.fstat(fd).st_ino)
        assert sorted(row[4] for row in rows) == [HandleKind.READER] * 2 + [HandleKind.WRITER] * 2
        assert len({row[2] for row in rows}) == 1
        assert rows[0][2] > 0
    assert figures(mount)[0] == before


@pytest.mark.needs_fuse
def test_open_ids_may_be_many_and_idle_ones_are_few(mount: Mounted) -> None:
    """Bounded by what is open alone while that is above backing_ids_max."""
    names = [mount.path / f"file{number}" for number in range(100)]
    for number, name in enumerate(names):
        write_file(name, b"%d" % number)
    assert figures(mount) == (0, IDS_MAX)
    with contextlib.ExitStack() as stack:
        fds = [stack.enter_context(opened(name, os.O_RDONLY)) for name in names]
        assert figures(mount) == (100, 0)
        assert [os.read(fd, 100) for fd in fds] == [b"%d" % number for number in range(100)]
    assert figures(mount) == (0, IDS_MAX)
    assert [read_file(name) for name in names] == [b"%d" % number for number in range(100)]


@pytest.mark.needs_fuse
def test_removed_blocks_hold_no_id(mount: Mounted) -> None:
    """An id pins the extent's space: it goes with the name, or with the last handle."""
    for number in range(IDS_MAX + 4):
        write_file(mount.path / f"gone{number}", b"content")
    with opened(mount.path / "gone0", os.O_RDONLY) as fd:
        for number in range(IDS_MAX + 4):
            os.unlink(mount.path / f"gone{number}")
        for name in os.listdir(mount.path):
            os.unlink(mount.path / name)
        assert figures(mount) == (1, 0)
        assert os.read(fd, 100) == b"content"
    assert figures(mount) == (0, 0)


@pytest.mark.needs_fuse
def test_a_replaced_block_has_an_id_beside_the_new_ones(mount: Mounted) -> None:
    write_file(mount.path / "name", b"old")
    with opened(mount.path / "name", os.O_RDONLY) as old:
        write_file(mount.path / "tmp", b"new")
        os.rename(mount.path / "tmp", mount.path / "name")
        with opened(mount.path / "name", os.O_RDONLY) as new:
            assert figures(mount)[0] == 2
            assert (os.read(old, 100), os.read(new, 100)) == (b"old", b"new")
    assert read_file(mount.path / "name") == b"new"
