"""User xattrs, pins and policies come back after a power loss: the old ones or the new ones."""

import contextlib
import dataclasses
import itertools
import os
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from kvfs.core.errors import NoSuchAttribute
from kvfs.core.records import AttributeRecord, Identity, xattr_key
from kvfs.core.types import ROOT_INODE, InodeNo, Sequence
from kvfs.storage.file_xattrs import FileXattrs
from kvfs.storage.syscalls import Syscalls
from tests.support.clients.stepping import until
from tests.support.devices.failing_syscalls import FailingSyscalls
from tests.support.devices.power_cuts.power import Cut, Drive, drive
from tests.support.store.driven import Driven
from tests.support.store.driven_faults import stand_in
from tests.support.store.stores import DIRECTORY, Host, put, settle, tree, write

pytestmark = pytest.mark.usefixtures("caplog")

PIN, EVICT, KEY = b"user.kvfs.pin", b"user.kvfs.evict", b"user.key"
LARGE = b"l" * 4000


@pytest.fixture
def powered() -> Iterator[Drive]:
    with drive() as made:
        made.settings = dataclasses.replace(made.settings, durable_within_s=0.5)
        made.start()
        yield made


def synced(store: Driven) -> None:
    """Wait as ``kvfs sync`` does."""
    store.hurry()
    store.commit()
    goal = store.goal()

    def is_reached() -> bool:
        store.tick()
        store.run_all()
        return store.reached(goal)

    until(is_reached, "all is durable")


def attributes(store: Driven, ino: InodeNo) -> dict[bytes, bytes]:
    """Return what was set on *ino*, kvfs's own included."""
    return {name: store.xattr_row(ino, name) for name in store.xattr_rows(ino)}


def restarted(powered: Drive) -> Driven:
    powered.cut(Cut.NOTHING)
    store = powered.start()
    settle(store)
    return store


@pytest.mark.needs_loop
@pytest.mark.parametrize("with_log", [True, False], ids=["logged", "rebuilt"])
def test_they_come_back_as_they_were_when_they_became_durable(
    powered: Drive, *, with_log: bool
) -> None:
    store = powered.store
    directory, _ = store.make_node(ROOT_INODE, b"dir", DIRECTORY, 0, 0)
    block = put(store, directory, b"block", b"b" * 5000)
    bare = put(store, directory, b"bare", b"b" * 5000)
    for name in (b"user.changed", b"user.removed"):
        store.set_xattr(block, name, b"before")
    store.set_xattr(bare, KEY, b"before")
    synced(store)
    if with_log:
        store.log_last()
    store.set_xattr(block, b"user.changed", b"after")
    store.remove_xattr(block, b"user.removed")
    store.set_xattr(block, b"user.large", LARGE)  # the thread writes it
    store.set_xattr(block, PIN, b"1")
    store.remove_xattr(bare, KEY)
    store.set_xattr(directory, EVICT, b"never")
    store.set_xattr(ROOT_INODE, KEY, b"root")
    young = put(store, directory, b"young", b"y" * 5000)
    store.set_xattr(young, KEY, b"young")
    assert store.describe()["durability"]["attributes"] > 0
    synced(store)
    assert store.describe()["durability"]["attributes"] == 0
    for ino in (block, bare, directory, ROOT_INODE, young):
        store.set_xattr(ino, b"user.late", b"lost with the power")

    store = restarted(powered)
    if with_log:
        assert store.describe()["reconcile"]["moved"] > 0, "it was rebuilt instead"
    wanted = {b"user.changed": b"after", b"user.large": LARGE, PIN: b"1"}
    assert attributes(store, block) == wanted
    assert attributes(store, bare) == {}
    assert attributes(store, directory) == {EVICT: b"never"}
    assert attributes(store, ROOT_INODE) == {KEY: b"root"}
    assert attributes(store, young) == {KEY: b"young"}
    assert store.policy(directory).evict == "never"
    assert [ino for ino, _ in store.pins()] == [block]
    powered.stop()
    assert powered.problems() == []


@pytest.mark.needs_loop
def test_they_are_durable_within_the_window_though_nobody_stores(powered: Drive) -> None:
    store = powered.store
    block = put(store, ROOT_INODE, b"block", b"b" * 5000)
    synced(store)
    store.set_xattr(block, PIN, b"1")

    def is_durable() -> bool:
        store.tick()
        store.run_all()
        return not store.describe()["durability"]["attributes"]

    until(is_durable, "the pin is durable")
    assert [ino for ino, _ in restarted(powered).pins()] == [block]


@pytest.mark.needs_loop
def test_what_a_kill_kept_in_the_index_alone_becomes_durable_after_it(powered: Drive) -> None:
    """Also what came between a change of attributes and one of the mode."""
    store = powered.store
    block = put(store, ROOT_INODE, b"block", b"b" * 5000)
    store.set_xattr(block, KEY, b"before")
    synced(store)
    store.remove_xattr(block, KEY)
    store.set_xattr(block, PIN, b"1")
    store.change(block, mode=0o600)
    store.commit()
    powered.kill()
    powered.settings = dataclasses.replace(powered.settings, index_log_s=0)
    settle(powered.start())
    synced(powered.store)
    assert attributes(restarted(powered), block) == {PIN: b"1"}


def chmod(store: Driven, directory: InodeNo, block: InodeNo) -> None:
    store.change(directory, mode=0o700)
    store.change(block, mode=0o600)


def rename(store: Driven, _directory: InodeNo, _block: InodeNo) -> None:
    store.rename(ROOT_INODE, b"dir", ROOT_INODE, b"another dir")
    store.rename(ROOT_INODE, b"block", ROOT_INODE, b"another")


def rewrite(store: Driven, _directory: InodeNo, block: InodeNo) -> None:
    opened = store.open(block, writer=True, truncate=False)
    write(store, opened, b"r" * 6000)
    store.close(opened, writer=True)


def rewrite_while_the_sweep_looks(store: Driven, _directory: InodeNo, block: InodeNo) -> None:
    opened = store.open(block, writer=True, truncate=False)
    write(store, opened, b"r" * 6000)
    store.hurry()
    store.sweep_anew()
    settle(store)
    store.close(opened, writer=True)


@pytest.mark.parametrize("change", [chmod, rename, rewrite, rewrite_while_the_sweep_looks])
@pytest.mark.parametrize("was_durable", [True, False], ids=["durable", "not durable"])
def test_a_change_before_the_sweep_hides_none_that_a_kill_kept_in_the_index_alone(
    running: Host,
    monkeypatch: pytest.MonkeyPatch,
    change: Callable[[Driven, InodeNo, InodeNo], None],
    *,
    was_durable: bool,
) -> None:
    """It writes an identity with a new number, which the sweep finds to be right."""
    store = running.store
    directory, _ = store.make_node(ROOT_INODE, b"dir", DIRECTORY, 0, 0)
    block = put(store, ROOT_INODE, b"block", b"b" * 5000)
    if was_durable:
        for ino in (directory, block):
            store.set_xattr(ino, KEY, b"before")
        settle(store)
    for ino in (directory, block):
        store.set_xattr(ino, KEY, b"after")
    store.commit()
    running.kill()
    with monkeypatch.context() as patch:
        stand_in(patch, "a sweep begins", lambda _: None)
        store = running.start()
    change(store, directory, block)
    store.sync()
    store.commit()
    store.sweep_anew()
    settle(store)

    running.lose_power()
    store = running.start()
    assert attributes(store, directory) == {KEY: b"after"}
    assert attributes(store, block) == {KEY: b"after"}


def test_what_the_log_alone_kept_is_written_with_the_next_change(
    running: Host, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After a power loss the index has what the file lacks."""
    running.stop()
    running.settings = dataclasses.replace(running.settings, index_log_s=3600.0)
    store = running.start()
    directory, _ = store.make_node(ROOT_INODE, b"dir", DIRECTORY, 0, 0)
    settle(store)
    store.set_xattr(directory, KEY, b"after")
    store.log_last()
    running.lose_power()
    with monkeypatch.context() as patch:
        stand_in(patch, "a sweep begins", lambda _: None)
        store = running.start()
    store.change(directory, mode=0o700)
    settle(store)
    running.stop()
    assert running.check().problems == []


@pytest.mark.needs_loop
def test_a_block_that_came_back_is_older_than_what_was_stored_since(powered: Drive) -> None:
    """Its rename after what was logged has a number that the next server would give out again."""
    store = powered.store
    for number in range(300):  # the search comes to the last one late
        put(store, ROOT_INODE, b"%d" % number, b"b" * 100)
    synced(store)
    store.log_last()
    for before, after in itertools.pairwise((b"299", b"a", b"b", b"c", b"name")):
        store.rename(ROOT_INODE, before, ROOT_INODE, after)
    synced(store)
    powered.cut(Cut.NOTHING)

    store = powered.start()
    put(store, ROOT_INODE, b"name", b"newer" * 100)
    settle(store)
    assert tree(store)[b"/name"] == b"newer" * 100


def test_a_change_that_is_cut_anywhere_leaves_the_old_ones_or_the_new_ones(tmp_path: Path) -> None:
    """The attributes of one change, then its identity: each call may be the last."""
    path = tmp_path / "extent"
    fixed = {"parent": InodeNo(1), "mode": 0o100644, "uid": 0, "gid": 0, "size_bytes": 0}

    def say(calls: Syscalls, sequence: int) -> None:
        xattrs = FileXattrs(calls)
        number = Sequence(sequence)
        record = AttributeRecord(InodeNo(17), number, {KEY: b"%d" % sequence})
        xattrs.set_attributes(str(path), record)
        xattrs.set_identity(
            str(path),
            Identity(
                ino=InodeNo(17), sequence=number, name=b"%d" % sequence,
                mtime_ns=0, flags=0, content_crc=0, **fixed,
            ),
        )  # fmt: skip

    def said() -> tuple[int, bytes]:
        xattrs = FileXattrs(Syscalls())
        identity = xattrs.identity(str(path), InodeNo(17))
        assert identity is not None
        found = xattrs.attributes(str(path), InodeNo(17), identity.sequence)
        assert found is not None
        return identity.sequence, found.attributes[KEY]

    before = 1
    for fail_at in itertools.count(1):
        path.unlink(missing_ok=True)
        path.touch()
        say(Syscalls(), 1)
        calls = FailingSyscalls(["setxattr", "removexattr"], fail_at, for_good=True)
        with contextlib.suppress(OSError):
            say(calls, 2)
        sequence, value = said()
        assert value == b"%d" % sequence
        assert sequence >= before
        before = sequence
        say(Syscalls(), 3)  # what goes on from there
        assert said() == (3, b"3")
        if not calls.failed:
            break
    assert fail_at > 3
    assert before == 2


def test_fsck_takes_a_damaged_row_from_the_file_and_writes_what_a_file_lacks(
    running: Host,
) -> None:
    store = running.store
    ino = put(store, ROOT_INODE, b"block", b"b" * 100)
    other = put(store, ROOT_INODE, b"other", b"b" * 100)
    for each in (ino, other):
        store.set_xattr(each, KEY, b"value")
    settle(store)
    store.spoil_row(xattr_key(ino, KEY))
    running.stop()
    for name in os.listxattr(running.extent(other)):
        if "attributes" in name:
            os.removexattr(running.extent(other), name)
    assert len(running.check().problems) == 2
    assert running.check(repair=True).repaired == 2
    assert running.check().problems == []
    store = running.start()
    assert store.xattr(ino, KEY) == b"value"
    (running.index_path() / "data.mdb").write_bytes(b"")
    running.kill()
    running.check(repair=True)
    store = running.start()
    assert [store.xattr(each, KEY) for each in (ino, other)] == [b"value"] * 2


def test_what_does_not_fit_into_a_file_is_told_and_a_sync_fails(
    running: Host, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = running.store
    ino = put(store, ROOT_INODE, b"block", b"b" * 100)
    settle(store)
    goal = store.goal()

    def refuse(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(store.syscalls, "setxattr", refuse)
    store.set_xattr(ino, KEY, b"value")
    store.run_all()
    monkeypatch.undo()
    assert store.xattr(ino, KEY) == b"value"
    assert store.describe()["durability"]["attributes_refused"] == 1
    with pytest.raises(OSError, match="attributes"):
        store.reached(goal)
    with pytest.raises(NoSuchAttribute):
        store.xattr(ino, b"user.other")
