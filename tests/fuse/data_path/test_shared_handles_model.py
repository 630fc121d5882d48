"""Readers, writers and evictions in any order, with two ids for three names. No kernel here."""

import contextlib
import os
from typing import Final

import pytest
from hypothesis import settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule
from hypothesis.strategies import integers, sampled_from

from kvfs.core.errors import NotFound
from kvfs.core.types import ROOT_INODE, HandleNo, InodeNo
from tests.support.store.readers_desk import Desk
from tests.support.store.stores import host

NAMES: Final = [b"one", b"two", b"three"]


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
        #: Handles that file servers have, as often as they have them.
        self.served: list[HandleNo] = []
        self.data: dict[InodeNo, bytes] = {}
        self.stored = 0

    def teardown(self) -> None:
        """Stop it."""
        self.stack.close()

    def find(self, name: bytes) -> InodeNo | None:
        """Return what the name leads to."""
        try:
            return self.desk.store.lookup(ROOT_INODE, name)
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

    @rule(name=sampled_from(NAMES))
    def read_as_server(self, name: bytes) -> None:
        """The same, by a file server."""
        with self.desk.by_server():
            fh = self._open(name, os.O_RDONLY)
        if fh is not None:
            self.served.append(fh)

    @rule(name=sampled_from(NAMES), size_bytes=integers(1, 9000))
    def rewrite(self, name: bytes, size_bytes: int) -> None:
        """Open a block for writing, and write."""
        fh = self._open(name, os.O_RDWR)
        if fh is not None:
            opened = self.desk.handles.get(fh).opened
            data = b"r" * size_bytes
            os.pwrite(self.desk.store.extent_fd(opened), data, 0)
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
            self.desk.files.flush(fh, os.getpid())
            self.desk.files.release(fh)
            if fh in self.served:
                self.served.remove(fh)

    @rule(which=integers(0, 1000))
    def use_the_extent_here(self, which: int) -> None:
        """As fallocate(2) and lseek(2) do."""
        if self.open:
            fh, _, _ = self.open[which % len(self.open)]
            self.desk.store.extent_fd(self.desk.handles.get(fh).opened)

    @rule(name=sampled_from(NAMES), size_bytes=integers(0, 10))
    def truncate(self, name: bytes, size_bytes: int) -> None:
        """Without a handle: truncate(2)."""
        ino = self.find(name)
        if ino is not None:
            self.desk.store.truncate(ino, size_bytes)
            self.data[ino] = self.data[ino].ljust(size_bytes, b"\0")[:size_bytes]

    @rule(name=sampled_from(NAMES))
    def unlink(self, name: bytes) -> None:
        """Whether it is read or not."""
        if self.find(name) is not None:
            self.desk.unlink(name)

    @rule()
    def evict(self) -> None:
        """One block, if one may go."""
        self.desk.store.evict(1)

    @rule()
    def idle(self) -> None:
        """What waits for a pause is done."""
        self.desk.store.tick()
        self.desk.store.drain()

    @invariant()
    def what_is_open_is_counted(self) -> None:
        """In the table of handles and in the one of inodes."""
        store = self.desk.store
        inos = {ino for _, ino, _ in self.open}
        assert len(self.desk.handles) == len(self.open)
        assert store.open_inos == inos
        for ino in inos:
            opened = store.opened(ino)
            assert opened.readers + opened.writers == sum(
                1 for _, one, _ in self.open if one == ino
            )
            served = sum(1 for fh, one, _ in self.open if one == ino and fh in self.served)
            assert opened.served_readers == opened.served_passing == served
        assert not store.parked.keys() & inos
        assert not any(one.served_readers or one.passing_bytes for one in store.parked.values())

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
        assert figures["backing_ids_cached"] == 0 or sum(figures.values()) <= 2
        ready = self.desk.path.opened_ids - self.desk.path.closed_ids - sum(figures.values())
        assert len(self.desk.ids.live) == sum(figures.values()) + ready
        assert ready >= 0

    @invariant()
    def every_reader_has_his_bytes(self) -> None:
        """And attributes that fit."""
        for fh, ino, _ in self.open:
            assert self.desk.host.extent(ino).read_bytes() == self.data[ino]
            assert self.desk.handles.get(fh).opened.ino == ino
            assert self.desk.store.present(ino).size_bytes == len(self.data[ino])


TestReaders = ReadersMachine.TestCase
TestReaders.settings = settings(max_examples=40, stateful_step_count=50)
