"""The store against dicts: any order of requests, and every way a server can end."""

import contextlib
import dataclasses
import os
from collections.abc import Iterator
from typing import Final

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from kvfs.core.errors import DeadInode, IsADirectory, KvfsError, NotADirectory, NotEmpty
from kvfs.core.lifecycle import Event, State
from kvfs.core.types import ROOT_INODE
from tests.support.store.driven import Driven, Opened
from tests.support.store.driven_faults import reading_here
from tests.support.store.store_model import Model, Node
from tests.support.store.stores import (
    DIRECTORY,
    FIFO,
    FILE,
    SYMLINK,
    assert_exact,
    assert_no_strays,
    host,
    settle,
    tree,
    write,
)

NAMES: Final = st.sampled_from([b"a", b"b", b"c.tmp", b"n" * 255, b"\xff\x01"])
MORE_NAMES: Final = st.integers(0, 200).map(b"block %d".__mod__)
PICKS: Final = st.integers(0, 1 << 20)
OFFSETS: Final = st.sampled_from([0, 0, 0, 1, 4096, 70_000])
DATA: Final = st.sampled_from([b"x", b"y" * 4096, b"z" * 9001, b""])
EVICTABLE: Final = {State.PUBLISHED, State.ORPHAN, State.ORPHAN_SLAB}
SIZES: Final = st.sampled_from([0, 1, 4096, 5000, 100_000])


@contextlib.contextmanager
def expecting(error: type[KvfsError] | None) -> Iterator[None]:
    """Expect *error*, or none."""
    if error is None:
        yield
        return
    with pytest.raises(KvfsError) as caught:
        yield
    assert type(caught.value) is error


class StoreMachine(RuleBasedStateMachine):
    """``open`` holds the handles: the model's node, the store's, and whether it writes."""

    #: Without a log each power loss is a rebuild.
    index_log_s = 0.0
    drives = 1
    eviction = "adaptive"

    @initialize()
    def begin(self) -> None:
        self.stack = contextlib.ExitStack()
        self.stack.enter_context(reading_here())
        others_bytes = [64 << 20] * (self.drives - 1)
        self.host = self.stack.enter_context(host(others_bytes=others_bytes))
        self.host.settings = dataclasses.replace(
            self.host.settings, index_log_s=self.index_log_s, eviction=self.eviction
        )
        self.host.start()
        self.model = Model(Node(ROOT_INODE, DIRECTORY))
        self.open: list[tuple[Node, Opened, bool]] = []
        for number in range(3):
            self.make_node(0, b"dir%d" % number, DIRECTORY)
            self.store_block(number, b"block", b"x" * 5000, 0)
            self.store_block(number, b"other", b"y" * 100, 0)

    def teardown(self) -> None:
        self.stack.close()

    @property
    def store(self) -> Driven:
        return self.host.store

    def directory(self, pick: int) -> Node:
        found = self.model.directories()
        return found[pick % len(found)]

    def place(self, pick: int) -> tuple[Node, bytes] | None:
        found = self.model.places()
        return found[pick % len(found)] if found else None

    def file(self, pick: int) -> Node | None:
        found = [node for _, node in self.model.walk() if node.is_file]
        return found[pick % len(found)] if found else None

    def handle(self, pick: int) -> "tuple[Node, Opened, bool] | None":
        """No rule has a precondition: what goes at an eviction depends on the clock, the draws not.

        Hypothesis calls a machine flaky whose rules may be drawn once and not again.
        """
        return self.open[pick % len(self.open)] if self.open else None

    # ---- names ----

    @rule(pick=PICKS, name=NAMES)
    def create(self, pick: int, name: bytes) -> None:
        parent = self.directory(pick)
        if name in parent.children:
            return
        opened, _ = self.store.create(parent.ino, name, FILE, 0, 0)
        node = parent.children[name] = Node(opened.ino, FILE)
        node.writers = 1
        self.open.append((node, opened, True))

    @rule(pick=PICKS, name=MORE_NAMES, data=DATA, offset_bytes=OFFSETS)
    def store_block(self, pick: int, name: bytes, data: bytes, offset_bytes: int) -> None:
        """Create, write, close; most blocks are made so, and most names should be there."""
        before = len(self.open)
        self.create(pick, name)
        if len(self.open) > before:
            self.write(before, data, offset_bytes)
            self.close(before)

    @rule(pick=PICKS, name=MORE_NAMES, data=DATA)
    def publish(self, pick: int, name: bytes, data: bytes) -> None:
        """Store under a temporary name and rename."""
        parent, before = self.directory(pick), len(self.open)
        if b"tmp" in parent.children or name in parent.children:
            return
        self.create(pick, b"tmp")
        self.write(before, data, 0)
        self.close(before)
        self.store.rename(parent.ino, b"tmp", parent.ino, name, replace=True)
        node = parent.children[name] = parent.children.pop(b"tmp")
        node.rename()

    @rule(pick=PICKS, name=NAMES, mode=st.sampled_from([DIRECTORY, DIRECTORY, SYMLINK, FIFO]))
    def make_node(self, pick: int, name: bytes, mode: int) -> None:
        parent = self.directory(pick)
        if name in parent.children:
            return
        target = b"../t" if mode == SYMLINK else b""
        ino, _ = self.store.make_node(parent.ino, name, mode, 0, 0, target)
        parent.children[name] = Node(ino, mode)
        parent.children[name].target = target

    @rule(pick=PICKS)
    def unlink(self, pick: int) -> None:
        if (place := self.place(pick)) is None:
            return
        parent, name = place
        node = parent.children[name]
        with expecting(IsADirectory if node.is_directory else None):
            self.store.unlink(parent.ino, name)
            self.model.remove(parent, name)

    @rule(pick=PICKS)
    def rmdir(self, pick: int) -> None:
        if (place := self.place(pick)) is None:
            return
        parent, name = place
        node = parent.children[name]
        with expecting(
            NotADirectory if not node.is_directory else NotEmpty if node.children else None
        ):
            self.store.rmdir(parent.ino, name)
            self.model.remove(parent, name)

    @rule(pick=PICKS, to=PICKS, new_name=NAMES, replace=st.booleans())
    def rename(self, pick: int, to: int, new_name: bytes, replace: bool) -> None:
        if (place := self.place(pick)) is None:
            return
        (parent, name), target = place, self.directory(to)
        error = self.model.rename_error(parent, name, target, new_name, replace=replace)
        moves = replace and (parent, name) != (target, new_name)
        meant = self.model.meant(parent, name) if moves else None
        if isinstance(meant, type):
            error = meant
        with expecting(error):
            self.store.rename(parent.ino, name, target.ino, new_name, replace=replace)
            if isinstance(meant, Node):
                self.model.restore(meant, target, new_name)
            elif target.children.get(new_name) is not parent.children[name]:
                self.model.remove(target, new_name)
                self.model.move(parent, name, target, new_name)

    @rule(pick=PICKS, to=PICKS, new_name=NAMES)
    def link(self, pick: int, to: int, new_name: bytes) -> None:
        if (place := self.place(pick)) is None:
            return
        node, target = place[0].children[place[1]], self.directory(to)
        if new_name not in target.children:
            with expecting(node.link_error):
                self.store.link(node.ino, target.ino, new_name)
                self.model.link(node, target, new_name)

    @rule(pick=PICKS, name=MORE_NAMES, data=DATA, removes=st.booleans())
    def publish_by_link(self, pick: int, name: bytes, data: bytes, removes: bool) -> None:
        """Store under a temporary name and link; *removes*: and remove it."""
        parent, before = self.directory(pick), len(self.open)
        if b"tmp" in parent.children or name in parent.children:
            return
        self.create(pick, b"tmp")
        self.write(before, data, 0)
        self.close(before)
        node = parent.children[b"tmp"]
        self.store.link(node.ino, parent.ino, name)
        self.model.link(node, parent, name)
        if removes:
            self.store.unlink(parent.ino, b"tmp")
            self.model.remove(parent, b"tmp")

    @rule(pick=PICKS, other=PICKS)
    def exchange(self, pick: int, other: int) -> None:
        one, two = self.place(pick), self.place(other)
        if one is None or two is None:
            return
        (parent, name), (target, new_name) = one, two
        with expecting(self.model.exchange_error(parent, name, target, new_name)):
            self.store.exchange(parent.ino, name, target.ino, new_name)
            self.model.exchange(parent, name, target, new_name)

    # ---- bytes ----

    @rule(pick=PICKS, writer=st.booleans(), truncate=st.booleans())
    def open_file(self, pick: int, writer: bool, truncate: bool) -> None:
        if (node := self.file(pick)) is None:
            return
        if truncate and node.must_be_superseded:
            if not node.data:  # whoever empties an empty file shares it (test_lock_files.py)
                return
            node = self.supersede(node)
        opened = self.store.open(node.ino, writer=writer, truncate=truncate)
        if truncate and node.state is State.DRAFT and not node.writers and not writer:
            node.happens(Event.CLOSE)
        if writer:
            node.open_writer()
        else:
            node.readers += 1
        self.open.append((node, opened, writer))

    def supersede(self, node: Node) -> Node:
        """O_TRUNC of what somebody has: the name is another inode's now, which is opened next."""
        with pytest.raises(DeadInode):
            self.store.open(node.ino, writer=True, truncate=True)
        parent, name = next(
            (parent, name) for parent, name in self.model.places() if parent.children[name] is node
        )
        return self.model.supersede(parent, name, self.store.lookup(parent.ino, name))

    @rule(pick=PICKS, data=DATA, offset_bytes=OFFSETS)
    def write(self, pick: int, data: bytes, offset_bytes: int) -> None:
        if (held := self.handle(pick)) is None:
            return
        node, opened, writer = held
        if writer:
            write(self.store, opened, data, offset_bytes)
            node.write(data, offset_bytes)

    @rule(pick=PICKS)
    def read_what_is_open(self, pick: int) -> None:
        if (held := self.handle(pick)) is None:
            return
        node, opened, _ = held
        fd = self.store.extent_fd(opened)
        assert os.pread(fd, len(node.data) + 1, 0) == node.data
        assert self.store.present(node.ino).size_bytes == len(node.data)

    @rule(pick=PICKS)
    def close(self, pick: int) -> None:
        if not self.open:
            return
        node, opened, writer = self.open.pop(pick % len(self.open))
        self.store.close(opened, writer=writer, awaits_rename=pick % 2 > 0)
        if writer:
            node.close_writer()
        else:
            node.readers -= 1

    @rule(pick=PICKS, size_bytes=SIZES)
    def truncate(self, pick: int, size_bytes: int) -> None:
        if (node := self.file(pick)) is not None:
            self.store.truncate(node.ino, size_bytes)
            node.truncate(size_bytes)

    # ---- attributes ----

    @rule(pick=PICKS, mode=st.sampled_from([0o600, 0o755]), mtime_ns=st.sampled_from([None, 7]))
    def change(self, pick: int, mode: int, mtime_ns: int | None) -> None:
        if (place := self.place(pick)) is not None:
            node = place[0].children[place[1]]
            self.store.change(node.ino, mode=mode, mtime_ns=mtime_ns)
            node.mode = node.mode & ~0o777 | mode

    @rule(pick=PICKS, name=st.sampled_from([b"user.a", b"user.b"]), value=st.binary(max_size=5))
    def set_xattr(self, pick: int, name: bytes, value: bytes) -> None:
        if (place := self.place(pick)) is not None:
            node = place[0].children[place[1]]
            self.store.set_xattr(node.ino, name, value)
            node.xattrs[name] = value

    # ---- eviction ----

    @rule(size_bytes=SIZES.filter(bool), used=st.booleans())
    def evict(self, size_bytes: int, used: bool) -> None:
        """Some blocks go whole; none that is written, leased or a living process's slab."""
        self.store.search_anew()  # no search is spared here
        for drive in range(self.drives):
            self.store.evict(size_bytes, drive)
            if used:
                self.store.evict_used(size_bytes, drive)
        for parent, name in self.model.places():
            if self.store.name_row(parent.ino, name) is None:
                node = parent.children[name]
                assert node.state in EVICTABLE, node.state
                assert not node.writers
                assert used or not node.readers
                self.model.remove(parent, name)

    # ---- time, and the ends ----

    @rule()
    def tick(self) -> None:
        self.store.tick()

    @rule()
    def settle(self) -> None:
        """Do all that is due; then the device holds what the index knows, and nothing else."""
        settle(self.store)
        assert_no_strays(self.store)

    @rule(end=st.sampled_from(["stop", "stop and check", "kill", "kill and repair", "power"]))
    def end(self, end: str) -> None:
        """The server ends in one of its ways, and is started again."""
        self.open.clear()
        assert self.store.describe()["background_failures"] == 0
        if end.startswith("stop"):
            self.host.stop()
            self.model.stop()
        elif end.startswith("kill"):
            self.host.kill()
            self.model.kill()
        else:
            settle(self.store)
            if self.index_log_s:  # what came later is what test_index_log.py is about
                self.store.log_index()
            self.host.lose_power()
            self.model.lose_power(logged=bool(self.index_log_s))
        if end.endswith(("check", "repair")):
            assert self.host.check().problems == []
        if end.endswith("repair"):
            assert self.host.check(repair=True).problems == []
        self.host.start()
        assert self.store.swept or not end.endswith("repair")
        if self.index_log_s and not end.startswith(("stop", "kill")):
            settle(self.store)  # all is compared, and the index knows makers still
            self.store.end_leases(self.store.now_s() + 1e6)

    # ---- what must hold ----

    @invariant()
    def the_tree_is_the_models(self) -> None:
        assert tree(self.store) == self.model.tree()

    @invariant()
    def attributes_are_the_models(self) -> None:
        self.store.settle_awaited()  # the index tells of a close that waits for its rename later
        for path, node in self.model.walk():
            record = self.store.present(node.ino)
            assert record.mode == node.mode, path
            assert not node.is_file or record.state == node.state, (path, record.state, node.state)
            names = self.store.xattr_names(node.ino)
            found = {name: self.store.xattr(node.ino, name) for name in names}
            assert found == node.xattrs, path

    @invariant()
    def space_is_exact(self) -> None:
        assert_exact(self.host)


TestStore = pytest.mark.usefixtures("caplog")(StoreMachine.TestCase)
TestStore.settings = settings(max_examples=30, stateful_step_count=60)


class LoggedStoreMachine(StoreMachine):
    """The same with a log of the index, to which a power loss goes back."""

    index_log_s = 3600.0

    def exchange(self, pick: int, other: int) -> None:
        """Not drawn: the model does not follow drafts that lost a name which is exchanged."""

    @rule()
    def log(self) -> None:
        """What was committed so far is in the log."""
        self.store.log_index()


TestLogged = pytest.mark.usefixtures("caplog")(LoggedStoreMachine.TestCase)
TestLogged.settings = settings(max_examples=30, stateful_step_count=60)


class SeveralDrivesMachine(StoreMachine):
    """The same on three drives, with the gate."""

    drives = 3
    eviction = "gate"


TestSeveralDrives = pytest.mark.usefixtures("caplog")(SeveralDrivesMachine.TestCase)
TestSeveralDrives.settings = settings(max_examples=30, stateful_step_count=60)


@pytest.mark.usefixtures("caplog")
@pytest.mark.parametrize("machine", [StoreMachine, LoggedStoreMachine])
def test_a_block_without_its_last_name_loses_its_maker_with_the_power(
    machine: type[StoreMachine],
) -> None:
    """A log of the index knows that it had one, so it goes first; a file does not say."""
    run = machine()
    try:
        run.begin()
        run.store_block(0, b"c.tmp", b"z" * 100, 0)
        run.end("power")
        run.the_tree_is_the_models()
        run.attributes_are_the_models()
        found = run.store.record(run.store.lookup(ROOT_INODE, b"c.tmp"))
        assert found.state == (State.ORPHAN if run.index_log_s else State.PUBLISHED)
    finally:
        run.teardown()


class LongStoreMachine(StoreMachine):
    """The same, for as long as `make proof` has time."""


TestLong = pytest.mark.proof(pytest.mark.usefixtures("caplog")(LongStoreMachine.TestCase))
TestLong.settings = settings(max_examples=400, stateful_step_count=60)


class LongLoggedStoreMachine(LoggedStoreMachine):
    """The same with a log."""


TestLongLogged = pytest.mark.proof(
    pytest.mark.usefixtures("caplog")(LongLoggedStoreMachine.TestCase)
)
TestLongLogged.settings = settings(max_examples=400, stateful_step_count=60)
