"""One handle for all readers of a whole block: what it serves, and what ends it. No kernel here."""

import contextlib
import dataclasses
import errno
import os
from collections.abc import Iterator
from typing import Final

import pytest
from hypothesis import settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule
from hypothesis.strategies import integers, sampled_from

from kvfs.errors import BadHandle, DeadInode, NotFound
from kvfs.makers import Maker
from kvfs.types import ROOT_INODE, HandleNo, InodeNo
from mount.data_path import PassthroughPath
from mount.files import Files
from mount.grant import Grant
from mount.handles import Handles
from tests.support.backing_ids import DEVICE_FD, FakeIds
from tests.support.stores import FILE, Host, host

NEW: Final = os.O_WRONLY | os.O_CREAT | os.O_EXCL
IDS_MAX: Final = 16
ALIVE: Final = Maker(os.getpid(), 1)
NAMES: Final = [b"one", b"two", b"three"]


class Desk:
    """Files over a store on the passthrough path, wired as a mount wires them."""

    def __init__(self, machine: Host, patch: pytest.MonkeyPatch, ids_max: int = IDS_MAX) -> None:
        self.host = machine
        self.store = machine.start()
        pool = self.store.pool
        self.ids = FakeIds(patch)
        self.path = PassthroughPath(pool, DEVICE_FD, ids_max)
        pool.ready.adopt, pool.ready.abandon = self.path.adopt, self.path.abandon
        pool.freed = self.path.freed
        self.fd = os.memfd_create("handles")
        self.handles = Handles(self.fd)
        pool.settings = dataclasses.replace(pool.settings, backing_ids_max=ids_max)
        self.files = Files(self.store, self.handles, self.path, io_threads=1)
        self.path.give_up_one = self.files.readers.give_up_one
        self.store.reclaim.unnamed = self.removed

    def close(self) -> None:
        """Stop the store; the table's mapping holds a descriptor of its own."""
        self.host.stop()
        del self.handles, self.files, self.path.give_up_one
        os.close(self.fd)

    def removed(self, ino: InodeNo) -> None:
        """An inode lost its name."""
        self.files.readers.forget(ino)
        self.path.forget(ino)

    def put(self, name: bytes, data: bytes = b"bytes") -> InodeNo:
        """Store a block as a connector does, over what is there."""
        draft = b"." + name + b".tmp"
        fh, _, ino, _ = self.files.create(ROOT_INODE, draft, FILE, NEW, 0, 0)
        os.pwrite(self.store.blocks.extent_fd(self.handles.get(fh).opened), data, 0)
        self.files.release(fh)
        replaced = self.store.rename(ROOT_INODE, draft, ROOT_INODE, name, replace=True)
        if replaced is not None:
            self.removed(replaced)
        return ino

    def unlink(self, name: bytes) -> None:
        """Remove a name."""
        self.removed(self.store.namespace.unlink(ROOT_INODE, name))

    def load(self, ino: InodeNo, flags: int = os.O_RDONLY) -> tuple[HandleNo, Grant]:
        """Open and close once; return what the kernel was told."""
        told = self.files.open(ino, flags)
        self.files.release(told[0])
        return told


@pytest.fixture
def desk(monkeypatch: pytest.MonkeyPatch) -> Iterator[Desk]:
    with host() as machine, contextlib.closing(Desk(machine, monkeypatch)) as made:
        yield made


def test_readers_of_a_whole_block_share_a_handle_and_the_next_one_gets_it_too(desk: Desk) -> None:
    ino = desk.put(b"one")
    first = desk.load(ino)
    assert ino not in desk.store.pool.open_inodes
    assert len(desk.handles) == 0
    told = [desk.files.open(ino, os.O_RDONLY) for _ in range(3)]
    assert told == [first] * 3
    assert desk.store.pool.open_inodes[ino].readers == len(desk.handles) == 3
    for fh, _ in told:
        desk.files.release(fh)
    assert ino not in desk.store.pool.open_inodes
    with pytest.raises(BadHandle):
        desk.files.release(first[0])
    assert desk.path.describe() == {"backing_ids_open": 0, "backing_ids_idle": 1}


def test_a_record_that_was_read_again_is_the_same(desk: Desk) -> None:
    """More blocks are read in turn than the index keeps parsed."""
    ino = desk.put(b"one")
    first = desk.load(ino)
    desk.store.pool.index._records.clear()
    assert desk.load(ino) == first


def test_every_open_is_a_touch(desk: Desk) -> None:
    ino, other = desk.put(b"one"), desk.put(b"two")
    heat = desk.store.pool.heat
    for _ in range(3):
        desk.load(other)
        before = heat.touched(ino)
        desk.load(ino)
        assert heat.touched(ino) > max(before, heat.touched(other))


def test_other_flags_have_a_handle_of_their_own(desk: Desk) -> None:
    """The row tells a successor what the client opened."""
    ino = desk.put(b"one")
    buffered, grant = desk.files.open(ino, os.O_RDONLY)
    direct, same = desk.files.open(ino, os.O_RDONLY | os.O_DIRECT)
    assert buffered != direct
    assert grant.backing_id == same.backing_id
    assert len(desk.ids.live) == 1
    for fh in (buffered, direct):
        desk.files.release(fh)
    assert len(desk.handles) == 0
    assert desk.path.describe()["backing_ids_open"] == 0


def test_a_removed_block_has_no_handle_left(desk: Desk) -> None:
    ino = desk.put(b"one")
    told = desk.load(ino)
    desk.unlink(b"one")
    assert not desk.ids.live, "an id pins the extent's space"
    fh, _ = desk.files.open(ino, os.O_RDONLY)  # its LOOKUP came before the removal
    assert fh != told[0]
    desk.files.release(fh)
    desk.store.pool.graves.give_way()
    desk.store.pool.background.drain()
    with pytest.raises(DeadInode):
        desk.files.open(ino, os.O_RDONLY)
    assert not desk.ids.live


def test_who_reads_a_removed_block_keeps_it_to_the_end(desk: Desk) -> None:
    ino = desk.put(b"one", b"old")
    (first, _), (second, _) = (desk.files.open(ino, os.O_RDONLY) for _ in range(2))
    desk.put(b"one", b"new")
    desk.files.release(first)
    assert desk.host.extent(ino).read_bytes() == b"old"
    assert ino in desk.store.pool.open_inodes
    desk.files.release(second)
    assert ino not in desk.store.pool.open_inodes
    assert len(desk.handles) == 0
    assert desk.path.describe()["backing_ids_open"] == 0


def test_a_rewritten_block_is_opened_anew(desk: Desk) -> None:
    """Its record is another one, and while it is written nobody shares anything."""
    ino = desk.put(b"one")
    before, grant = desk.load(ino)
    writer, _ = desk.files.open(ino, os.O_RDWR)
    during, same = desk.files.open(ino, os.O_RDONLY)
    assert before != during
    assert grant.backing_id == same.backing_id
    os.pwrite(desk.store.blocks.extent_fd(desk.handles.get(writer).opened), b"x" * 9000, 0)
    desk.files.release(writer)
    desk.files.release(during)
    after, _ = desk.load(ino)
    assert after not in (before, during)
    assert desk.store.namespace.record(ino).size_bytes == 9000
    assert len(desk.ids.live) == 1


def test_a_writer_finds_what_readers_left_parked(desk: Desk) -> None:
    """One entry for an inode, one id: also when kvfs itself opens it, to truncate it."""
    ino = desk.put(b"one")
    desk.load(ino)
    parked = desk.store.pool.open_inodes.parked[ino]
    desk.store.blocks.truncate(ino, 2)
    assert ino not in desk.store.pool.open_inodes.parked
    assert parked.readers == parked.writers == 0
    fh, _ = desk.files.open(ino, os.O_RDONLY)
    assert desk.store.pool.open_inodes[ino].allocated_bytes == desk.host.allocated_bytes(ino)
    desk.files.release(fh)
    assert len(desk.ids.live) == 1


def test_a_lease_by_time_starts_anew_with_each_open(desk: Desk) -> None:
    """Its maker cannot be watched, so its readers keep it: they take the whole way."""
    now_s = [100.0]
    desk.store.pool.monotonic_s = lambda: now_s[0]
    fh, _, ino, _ = desk.files.create(ROOT_INODE, b"in place", FILE, NEW, 0, 0)
    desk.files.release(fh)
    for _ in range(2):
        now_s[0] += 50.0
        desk.load(ino)
        assert desk.store.pool.holdings._timed[ino] == now_s[0]


def test_a_lease_by_life_is_shared(desk: Desk, monkeypatch: pytest.MonkeyPatch) -> None:
    """LMCache's local disk stores in place, and loads while it lives."""
    monkeypatch.setattr(desk.store.pool.holdings.makers, "lives", lambda _: True)
    desk.files.requester = lambda: ALIVE
    fh, _, ino, _ = desk.files.create(ROOT_INODE, b"in place", FILE, NEW, 0, 0)
    desk.files.release(fh)
    assert desk.load(ino) == desk.load(ino)


async def test_an_extent_that_was_read_here_is_closed_with_its_last_reader(desk: Desk) -> None:
    ino = desk.put(b"one")
    fh, _ = desk.files.open(ino, os.O_RDONLY)
    assert await desk.files.read(fh, 0, 100) == b"bytes"
    opened = desk.handles.get(fh).opened
    assert opened.fd >= 0
    desk.files.release(fh)
    assert opened.fd < 0
    assert ino not in desk.store.pool.open_inodes.parked
    desk.load(ino)
    assert len(desk.ids.live) == 1


def test_no_more_are_kept_than_there_may_be_ids(desk: Desk) -> None:
    inos = [desk.put(b"%d" % number) for number in range(3 * IDS_MAX)]
    first = desk.load(inos[0])
    for ino in inos[1:]:
        desk.load(ino)
    assert len(desk.ids.live) <= IDS_MAX
    assert len(desk.store.pool.open_inodes.parked) <= IDS_MAX
    assert desk.load(inos[0]) != first
    assert len(desk.handles._open) <= IDS_MAX


def test_while_more_are_open_than_may_be_kept_each_close_gives_an_id_back(desk: Desk) -> None:
    inos = [desk.put(b"%d" % number) for number in range(IDS_MAX + 3)]
    told = [desk.files.open(ino, os.O_RDONLY) for ino in inos]
    for left in range(len(told) - 1, -1, -1):
        desk.files.release(told.pop()[0])
        figures = desk.path.describe()
        assert figures["backing_ids_open"] == left
        assert sum(figures.values()) == max(left, IDS_MAX)


def test_an_id_that_is_not_to_be_had_opens_nothing(desk: Desk) -> None:
    ino = desk.put(b"one")
    desk.load(ino)
    while desk.files.readers.give_up_one():
        pass
    desk.path.forget(ino)
    assert not desk.ids.live
    desk.ids.fail_with = errno.ENOMEM
    with pytest.raises(OSError, match="no id"):
        desk.files.open(ino, os.O_RDONLY)
    assert ino not in desk.store.pool.open_inodes
    assert len(desk.handles) == 0
    desk.ids.fail_with = 0
    desk.load(ino)


class ReadersMachine(RuleBasedStateMachine):
    """Opens, closes, stores, rewrites and removals in any order; few ids, so that they are lost."""

    @initialize()
    def begin(self) -> None:
        self.stack = contextlib.ExitStack()
        patch = self.stack.enter_context(pytest.MonkeyPatch.context())
        machine = self.stack.enter_context(host())
        self.desk = self.stack.enter_context(contextlib.closing(Desk(machine, patch, ids_max=2)))
        #: What each open handle may read and the id it got; in place changes the bytes of all.
        self.open: list[tuple[HandleNo, InodeNo, int]] = []
        self.data: dict[InodeNo, bytes] = {}
        self.stored = 0

    def teardown(self) -> None:
        """Stop it."""
        self.stack.close()

    def find(self, name: bytes) -> InodeNo | None:
        """Return what the name leads to."""
        try:
            return self.desk.store.namespace.lookup(ROOT_INODE, name)
        except NotFound:
            return None

    @rule(name=sampled_from(NAMES))
    def store(self, name: bytes) -> None:
        """A new block, perhaps in place of one that somebody reads."""
        self.stored += 1
        data = b"%d" % self.stored
        self.data[self.desk.put(name, data)] = data

    @rule(name=sampled_from(NAMES), flags=sampled_from([os.O_RDONLY] * 3 + [os.O_DIRECT]))
    def read(self, name: bytes, flags: int) -> None:
        """Open a block to read it."""
        self._open(name, flags)

    @rule(name=sampled_from(NAMES), size_bytes=integers(1, 9000))
    def rewrite(self, name: bytes, size_bytes: int) -> None:
        """Open a block for writing, and write."""
        fh = self._open(name, os.O_RDWR)
        if fh is not None:
            opened = self.desk.handles.get(fh).opened
            data = b"r" * size_bytes
            os.pwrite(self.desk.store.blocks.extent_fd(opened), data, 0)
            self.data[opened.ino] = data + self.data[opened.ino][size_bytes:]

    def _open(self, name: bytes, flags: int) -> HandleNo | None:
        ino = self.find(name)
        if ino is None:
            return None
        fh, grant = self.desk.files.open(ino, flags)
        self.open.append((fh, ino, grant.backing_id))
        return fh

    @rule(which=integers(0, 1000))
    def close(self, which: int) -> None:
        """Any handle."""
        if self.open:
            fh, _, _ = self.open.pop(which % len(self.open))
            self.desk.files.release(fh)

    @rule(which=integers(0, 1000))
    def use_the_extent_here(self, which: int) -> None:
        """As fallocate(2) and lseek(2) do."""
        if self.open:
            fh, _, _ = self.open[which % len(self.open)]
            self.desk.store.blocks.extent_fd(self.desk.handles.get(fh).opened)

    @rule(name=sampled_from(NAMES), size_bytes=integers(0, 10))
    def truncate(self, name: bytes, size_bytes: int) -> None:
        """Without a handle: truncate(2)."""
        ino = self.find(name)
        if ino is not None:
            self.desk.store.blocks.truncate(ino, size_bytes)
            self.data[ino] = self.data[ino].ljust(size_bytes, b"\0")[:size_bytes]

    @rule(name=sampled_from(NAMES))
    def unlink(self, name: bytes) -> None:
        """Whether it is read or not."""
        if self.find(name) is not None:
            self.desk.unlink(name)

    @rule()
    def evict(self) -> None:
        """One block, if one may go."""
        self.desk.store.pool.evict(1)

    @rule()
    def idle(self) -> None:
        """What waits for a pause is done."""
        self.desk.store.tick()
        self.desk.store.pool.background.drain()

    @invariant()
    def what_is_open_is_counted(self) -> None:
        """In the table of handles and in the one of inodes."""
        pool = self.desk.store.pool
        inos = {ino for _, ino, _ in self.open}
        assert len(self.desk.handles) == len(self.open)
        assert set(pool.open_inodes) == inos
        for ino in inos:
            opened = pool.open_inodes[ino]
            assert opened.readers + opened.writers == sum(
                1 for _, one, _ in self.open if one == ino
            )
        assert not set(pool.open_inodes.parked) & inos

    @invariant()
    def ids_of_what_is_open_live(self) -> None:
        """The kernel would refuse an open whose inode has another id, or none."""
        by_ino: dict[InodeNo, set[int]] = {}
        for _, ino, backing_id in self.open:
            by_ino.setdefault(ino, set()).add(backing_id)
        assert all(len(ids) == 1 for ids in by_ino.values())
        assert set().union(*by_ino.values()) <= self.desk.ids.live
        assert len(set().union(*by_ino.values())) == len(by_ino)
        figures = self.desk.path.describe()
        assert figures["backing_ids_open"] == len(by_ino)
        assert figures["backing_ids_idle"] == 0 or sum(figures.values()) <= 2
        ready = self.desk.path.opened_ids - self.desk.path.closed_ids - sum(figures.values())
        assert len(self.desk.ids.live) == sum(figures.values()) + ready
        assert ready >= 0

    @invariant()
    def every_reader_has_his_bytes(self) -> None:
        """And attributes that fit."""
        for fh, ino, _ in self.open:
            assert self.desk.host.extent(ino).read_bytes() == self.data[ino]
            assert self.desk.handles.get(fh).opened.ino == ino
            assert self.desk.store.blocks.present(ino).size_bytes == len(self.data[ino])


TestReaders = ReadersMachine.TestCase
TestReaders.settings = settings(max_examples=80, stateful_step_count=50, deadline=None)
