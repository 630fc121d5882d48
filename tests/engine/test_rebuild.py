"""After a power loss the index is made from the identities: what is whole is there, as it was."""

import os
import random

import pytest

from kvfs.core.errors import NoSpace
from kvfs.core.lifecycle import State
from kvfs.core.records import Identity
from kvfs.core.types import ROOT_INODE, InodeNo, Sequence
from kvfs.devices import destroy_source
from kvfs.storage.index import Index
from kvfs.storage.index_place import settle_index
from kvfs.storage.syscalls import Syscalls
from tests.support.store.driven_faults import stand_in
from tests.support.store.stores import (
    DIRECTORY,
    FIFO,
    FILE,
    SYMLINK,
    Host,
    assert_exact,
    assert_no_strays,
    get,
    host,
    put,
    settle,
    tree,
)

pytestmark = pytest.mark.usefixtures("caplog")


def test_a_power_loss_costs_what_has_no_identity_and_nothing_else(running: Host) -> None:
    store = running.store
    a, _ = store.make_node(ROOT_INODE, b"a", DIRECTORY, 3, 4)
    b, _ = store.make_node(a, b"b", DIRECTORY, 0, 0)
    ino = put(store, b, b"block", b"x" * 12_345)
    store.make_node(a, b"link", SYMLINK, 5, 6, b"b/block")
    store.make_node(a, b"fifo", FIFO, 0, 0)
    store.set_xattr(ino, b"user.k", b"v")
    store.own_root(7, 8, 0o700)
    before = tree(store)
    settle(store)
    store.create(ROOT_INODE, b"draft", FILE, 0, 0)
    kept = store.record(ino)
    running.lose_power()
    store = running.start()
    assert tree(store) == before
    record = store.record(ino)
    # Its maker went with the power: what was leased is everybody's now.
    assert record._replace(atime_ns=0, ctime_ns=0, btime_ns=0) == kept._replace(
        state=State.PUBLISHED, atime_ns=0, ctime_ns=0, btime_ns=0
    )
    assert store.xattr(ino, b"user.k") == b"v"
    assert store.directory(a)[1:3] == (3, 4)
    root = store.directory(ROOT_INODE)
    assert (root.mode, root.uid, root.gid) == (0o40700, 7, 8)
    assert (root.entries, root.subdirs) == (1, 1)
    assert_exact(running)
    settle(store)
    assert_no_strays(store)


def test_numbers_and_sequences_go_on_behind_all_that_were_seen(running: Host) -> None:
    store = running.store
    inos = [put(store, ROOT_INODE, b"%d" % number, b"") for number in range(5)]
    settle(store)
    sequence = store.counters.sequence
    running.lose_power()
    store = running.start()
    assert store.counters.sequence >= sequence - 1
    assert put(store, ROOT_INODE, b"next", b"") > max(inos)
    assert store.counters.sequence > sequence


def test_of_two_claims_to_one_name_the_later_one_counts(running: Host) -> None:
    store = running.store
    old = put(store, ROOT_INODE, b"name", b"old")
    settle(store)
    put(store, ROOT_INODE, b"tmp", b"new")
    store.rename(ROOT_INODE, b"tmp", ROOT_INODE, b"name")
    store.sync()  # the identity is written; the old extent is kept for a moment yet
    assert running.extent(old).exists()
    running.lose_power()
    store = running.start()
    assert tree(store) == {b"/name": b"new"}
    settle(store)
    assert not running.extent(old).exists()
    assert_no_strays(store)


def test_what_hangs_on_a_lost_directory_is_a_miss(running: Host) -> None:
    store = running.store
    a, _ = store.make_node(ROOT_INODE, b"a", DIRECTORY, 0, 0)
    b, _ = store.make_node(a, b"b", DIRECTORY, 0, 0)
    put(store, b, b"block", b"x")
    put(store, ROOT_INODE, b"stays", b"y")
    settle(store)
    identity = running.path / "identities" / f"{a & 0xFF:02x}" / f"{a:016x}"
    identity.unlink()
    running.lose_power()
    store = running.start()
    assert tree(store) == {b"/stays": b"y"}
    assert store.counters[:3] == (1, 4096, 1)
    settle(store)
    assert_no_strays(store)


def test_directories_that_claim_each_other_are_a_miss(running: Host) -> None:
    """Two renames of which the device has each half: a in b, and b in a."""
    store = running.store
    a, _ = store.make_node(ROOT_INODE, b"a", DIRECTORY, 0, 0)
    b, _ = store.make_node(a, b"b", DIRECTORY, 0, 0)
    settle(store)
    identity = Identity(a, b, Sequence(99), DIRECTORY, 0, 0, 0, 0, State.NODE, 0, b"c")
    store.identify_node(a, identity)
    running.lose_power()
    assert tree(running.start()) == {}


@pytest.mark.parametrize("size_bytes", [0, 4999, 5001])
def test_an_extent_of_another_size_than_it_says_is_a_miss(running: Host, size_bytes: int) -> None:
    ino = put(running.store, ROOT_INODE, b"a", b"x" * 5000)
    settle(running.store)
    os.truncate(running.extent(ino), size_bytes)
    running.lose_power()
    assert tree(running.start()) == {}


def test_a_damaged_identity_is_a_miss(running: Host) -> None:
    ino = put(running.store, ROOT_INODE, b"a", b"x" * 5000)
    settle(running.store)
    os.setxattr(running.extent(ino), "trusted.kvfs.name", b"b")
    running.lose_power()
    assert tree(running.start()) == {}


def test_a_block_open_for_writing_is_a_miss_after_a_power_loss(running: Host) -> None:
    ino = put(running.store, ROOT_INODE, b"a", b"x" * 5000)
    settle(running.store)
    running.store.open(ino, writer=True, truncate=False)
    settle(running.store)
    running.lose_power()
    assert tree(running.start()) == {}


def test_a_rebuild_that_is_interrupted_is_done_again(
    running: Host, monkeypatch: pytest.MonkeyPatch
) -> None:
    put(running.store, ROOT_INODE, b"a", b"x")
    settle(running.store)
    running.lose_power()
    for moment in ("rebuild joins", "rebuild runs"):

        def interrupt(*_: object) -> None:
            raise KeyboardInterrupt

        with monkeypatch.context() as patched:
            stand_in(patched, moment, interrupt)
            with pytest.raises(KeyboardInterrupt):
                running.start()
    assert tree(running.start()) == {b"/a": b"x"}
    assert list(running.path.glob("index*")) == []
    assert os.listdir(running.settings.index_memory_dir) == [running.index_path().parent.name]


def test_a_rebuilt_index_takes_the_old_ones_place_whole(
    in_pool: Host, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Between its two renames the pool has no index; whoever comes then finishes the job."""
    put(in_pool.store, ROOT_INODE, b"a", b"x")
    in_pool.stop()
    pool_fd = os.open(in_pool.path, os.O_RDONLY)
    try:
        os.rename(in_pool.path / "index", in_pool.path / "index.new")
        (in_pool.path / "index.old").mkdir()
        settle_index(pool_fd, Syscalls())
    finally:
        os.close(pool_fd)
    assert sorted(path.name for path in in_pool.path.glob("index*")) == ["index"]
    assert tree(in_pool.start()) == {b"/a": b"x"}


def test_a_rebuild_finds_room_where_there_is_none_for_two_indexes(
    in_pool: Host, monkeypatch: pytest.MonkeyPatch
) -> None:
    put(in_pool.store, ROOT_INODE, b"a", b"x")
    settle(in_pool.store)
    in_pool.lose_power()
    create = Index.create
    tries: list[bool] = []

    def create_if_room(path: str, *args: object, **kwargs: object) -> None:
        tries.append((in_pool.path / "index").exists())
        if tries[-1]:
            raise NoSpace("no room for two")
        create(path, *args, **kwargs)  # type: ignore[arg-type]

    monkeypatch.setattr(Index, "create", create_if_room)
    assert tree(in_pool.start()) == {b"/a": b"x"}
    assert tries == [True, False]


def test_any_loss_of_late_identities_shows_no_wrong_bytes() -> None:
    """Whatever part of the queue a power loss ends, a name has bytes that it once had."""
    for seed in range(40):
        chance = random.Random(seed)
        had: dict[bytes, set[bytes]] = {}
        with host() as made:
            store = made.start()
            for step in range(40):
                names = [name for _, name in store.children(ROOT_INODE, InodeNo(0))]
                kind = chance.choice(["store", "store", "rename", "unlink", "idle", "idle"])
                if kind == "store":
                    name, data = b"%d" % chance.randrange(6), b"%d" % step * 1000
                    put(store, ROOT_INODE, b"tmp", data)
                    store.rename(ROOT_INODE, b"tmp", ROOT_INODE, name)
                    had.setdefault(b"/" + name, set()).add(data)
                    had.setdefault(b"/tmp", set()).add(data)
                elif kind == "rename" and names:
                    source, target = chance.choice(names), b"%d" % chance.randrange(6)
                    had.setdefault(b"/" + target, set()).add(get(store, ROOT_INODE, source))
                    store.rename(ROOT_INODE, source, ROOT_INODE, target)
                elif kind == "unlink" and names:
                    store.unlink(ROOT_INODE, chance.choice(names))
                elif kind == "idle":
                    store.begin_jobs()
                    for _ in range(chance.randrange(4)):
                        store.run_one()
            made.lose_power()
            store = made.start()
            for path, found in tree(store).items():
                assert found in had[path], f"seed {seed}: {path!r}"
            settle(store)
            assert_no_strays(store)
            made.stop()
            assert made.check().problems == []


def test_what_an_interrupted_rebuild_leaves_goes_with_the_pool(running: Host) -> None:
    running.stop()
    for name in ("index.new", "index.old"):
        (running.path / name).mkdir()
        (running.path / name / "data.mdb").write_bytes(b"half")
    destroy_source(str(running.path))
    assert list(running.path.iterdir()) == []
