"""What a start makes of a pool: believed, finished, rebuilt, or refused and left as it was."""

import json
import os
import random
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvfs import index_place
from kvfs.errors import DeadInode, FormatUnknown, IndexDamaged, NoSpace
from kvfs.index import Index
from kvfs.inode_numbers import InodeNumbers
from kvfs.lifecycle import State
from kvfs.records import FORMAT_KEY, Identity, pack_format
from kvfs.run_state import RunState, distrust_index, read_run_state, write_run_state
from kvfs.syscalls import Syscalls
from kvfs.types import ROOT_INODE, InodeNo, Sequence
from tests.support.stores import (
    DIRECTORY,
    FIFO,
    FILE,
    MIB,
    SYMLINK,
    Host,
    assert_exact,
    assert_no_strays,
    get,
    host,
    put,
    settle,
    tree,
    write,
)

pytestmark = pytest.mark.usefixtures("caplog")


@pytest.fixture
def running() -> Iterator[Host]:
    with host() as made:
        made.start()
        yield made


def pool_files(path: Path) -> dict[str, tuple[int, bytes]]:
    """Return every file of the pool with its time and bytes."""
    return {
        str(file): (file.stat().st_mtime_ns, file.read_bytes())
        for file in path.rglob("*")
        if file.is_file()
    }


# ---- killed, in the same boot ----


def test_a_kill_drops_drafts_and_nothing_else(running: Host) -> None:
    store = running.store
    put(store, ROOT_INODE, b"published", b"x" * 5000)
    draft, _, _ = store.blocks.create(ROOT_INODE, b"draft", FILE, 0, 0)
    write(store, draft, b"y" * 9000)
    store.attributes.set_xattr(draft.ino, b"user.a", b"1")
    running.kill()
    store = running.start()
    assert tree(store) == {b"/published": b"x" * 5000}
    assert store.namespace.directory(ROOT_INODE).entries == 1
    with pytest.raises(DeadInode):
        store.namespace.record(draft.ino)
    assert_exact(running)
    settle(store)
    assert_no_strays(store)
    running.stop()
    assert running.check().problems == []


def test_a_kill_while_rewriting_shows_what_the_extent_holds(running: Host) -> None:
    store = running.store
    ino = put(store, ROOT_INODE, b"a", b"x" * 50_000)
    store.blocks.open(ino, writer=True, truncate=True)
    write(store, store.pool.open_inodes[ino], b"new")
    running.kill()
    store = running.start()
    record = store.namespace.record(ino)
    assert (record.state, record.size_bytes) == (State.PUBLISHED, 3)
    assert get(store, ROOT_INODE, b"a") == b"new"
    assert_exact(running)
    settle(store)
    running.lose_power()
    assert tree(running.start()) == {b"/a": b"new"}


def test_a_kill_before_the_identities_costs_none(running: Host) -> None:
    """The sweep writes them again, so that a later power loss finds them."""
    put(running.store, ROOT_INODE, b"tmp", b"x")
    settle(running.store)
    running.store.namespace.rename(ROOT_INODE, b"tmp", ROOT_INODE, b"final")
    running.store.namespace.make_node(ROOT_INODE, b"dir", DIRECTORY, 0, 0)
    running.store.namespace.make_node(ROOT_INODE, b"link", SYMLINK, 0, 0, b"t")
    running.kill()
    settle(running.start())
    running.lose_power()
    assert tree(running.start()) == {b"/final": b"x", b"/dir": "directory", b"/link": b"t"}


def test_a_sweep_leaves_what_is_open_or_new_alone(running: Host) -> None:
    old = put(running.store, ROOT_INODE, b"old", b"x" * 5000)
    running.kill()
    store = running.start()
    reader = store.blocks.open(old, writer=False, truncate=False)
    store.namespace.unlink(ROOT_INODE, b"old")
    buried = put(store, ROOT_INODE, b"buried", b"y")
    store.namespace.unlink(ROOT_INODE, b"buried")
    put(store, ROOT_INODE, b"new", b"z")
    store.pool.background.drain()  # the sweep's thread; nothing is due for removal yet
    while not store.sweep.done:
        store.sweep.tick()
        store.pool.background.drain()
    assert running.extent(old).exists()
    assert running.extent(buried).exists()
    assert os.pread(store.blocks.extent_fd(reader), 5000, 0) == b"x" * 5000
    store.blocks.close(reader, writer=False)
    settle(store)
    assert_no_strays(store)


def test_a_stop_before_the_sweep_is_done_leaves_it_to_the_next_start(running: Host) -> None:
    ino = put(running.store, ROOT_INODE, b"a", b"x")
    running.kill()
    stray = running.extent(InodeNo(ino + 256))
    stray.write_bytes(b"nobody's")
    store = running.start()
    store.sweep._outdated.append(ino)  # found, and not yet written
    running.stop()
    state = read_run_state_of(running)
    assert (state.clean, state.strays) == (True, True)
    assert not running.start().sweep.done
    settle(running.store)
    assert not stray.exists()
    running.stop()
    state = read_run_state_of(running)
    assert (state.clean, state.strays) == (True, False)


def read_run_state_of(running: Host) -> RunState:
    pool_fd = os.open(running.path, os.O_RDONLY)
    try:
        return read_run_state(pool_fd, Syscalls())
    finally:
        os.close(pool_fd)


# ---- power lost: rebuilt from the identities ----


def test_a_power_loss_costs_what_has_no_identity_and_nothing_else(running: Host) -> None:
    store = running.store
    a, _ = store.namespace.make_node(ROOT_INODE, b"a", DIRECTORY, 3, 4)
    b, _ = store.namespace.make_node(a, b"b", DIRECTORY, 0, 0)
    ino = put(store, b, b"block", b"x" * 12_345)
    store.namespace.make_node(a, b"link", SYMLINK, 5, 6, b"b/block")
    store.namespace.make_node(a, b"fifo", FIFO, 0, 0)
    store.attributes.set_xattr(ino, b"user.k", b"v")
    store.own_root(7, 8, 0o700)
    before = tree(store)
    settle(store)
    store.blocks.create(ROOT_INODE, b"draft", FILE, 0, 0)
    kept = store.namespace.record(ino)
    running.lose_power()
    store = running.start()
    del before[b"/a/fifo"]
    assert tree(store) == before
    record = store.namespace.record(ino)
    assert record._replace(atime_ns=0, ctime_ns=0, btime_ns=0) == kept._replace(
        atime_ns=0, ctime_ns=0, btime_ns=0
    )
    assert store.attributes.xattr_names(ino) == []
    assert store.namespace.directory(a)[1:3] == (3, 4)
    root = store.namespace.directory(ROOT_INODE)
    assert (root.mode, root.uid, root.gid) == (0o40700, 7, 8)
    assert (root.entries, root.subdirs) == (1, 1)
    assert_exact(running)
    settle(store)
    assert_no_strays(store)


def test_numbers_and_sequences_go_on_behind_all_that_were_seen(running: Host) -> None:
    store = running.store
    inos = [put(store, ROOT_INODE, b"%d" % number, b"") for number in range(5)]
    settle(store)
    sequence = store.pool.counters.sequence
    running.lose_power()
    store = running.start()
    assert store.pool.counters.sequence >= sequence - 1
    assert put(store, ROOT_INODE, b"next", b"") > max(inos)
    assert store.pool.counters.sequence > sequence


def test_of_two_claims_to_one_name_the_later_one_counts(running: Host) -> None:
    store = running.store
    old = put(store, ROOT_INODE, b"name", b"old")
    settle(store)
    put(store, ROOT_INODE, b"tmp", b"new")
    store.namespace.rename(ROOT_INODE, b"tmp", ROOT_INODE, b"name")
    store.pool.background.tick()
    while store.pool.background.run_one():
        pass  # the identity is written; the old extent lies in its grave yet
    assert running.extent(old).exists()
    running.lose_power()
    store = running.start()
    assert tree(store) == {b"/name": b"new"}
    settle(store)
    assert not running.extent(old).exists()
    assert_no_strays(store)


def test_what_hangs_on_a_lost_directory_is_a_miss(running: Host) -> None:
    store = running.store
    a, _ = store.namespace.make_node(ROOT_INODE, b"a", DIRECTORY, 0, 0)
    b, _ = store.namespace.make_node(a, b"b", DIRECTORY, 0, 0)
    put(store, b, b"block", b"x")
    put(store, ROOT_INODE, b"stays", b"y")
    settle(store)
    identity = running.path / "identities" / f"{a & 0xFF:02x}" / f"{a:016x}"
    identity.unlink()
    running.lose_power()
    store = running.start()
    assert tree(store) == {b"/stays": b"y"}
    assert store.pool.counters[:3] == (1, 4096, 1)
    settle(store)
    assert_no_strays(store)


def test_directories_that_claim_each_other_are_a_miss(running: Host) -> None:
    """Two renames of which the device has each half: a in b, and b in a."""
    store = running.store
    a, _ = store.namespace.make_node(ROOT_INODE, b"a", DIRECTORY, 0, 0)
    b, _ = store.namespace.make_node(a, b"b", DIRECTORY, 0, 0)
    settle(store)
    identity = Identity(a, b, Sequence(99), DIRECTORY, 0, 0, 0, 0, State.NODE, b"c")
    store.pool.extents.identify_node(a, identity)
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
    running.store.blocks.open(ino, writer=True, truncate=False)
    settle(running.store)
    running.lose_power()
    assert tree(running.start()) == {}


def test_a_rebuild_that_is_interrupted_is_done_again(
    running: Host, monkeypatch: pytest.MonkeyPatch
) -> None:
    put(running.store, ROOT_INODE, b"a", b"x")
    settle(running.store)
    running.lose_power()
    for name in ("_join", "run"):

        def interrupt(*_: object) -> None:
            raise KeyboardInterrupt

        with monkeypatch.context() as patched:
            patched.setattr(f"kvfs.rebuild._Rebuild.{name}", interrupt)
            with pytest.raises(KeyboardInterrupt):
                running.start()
    assert tree(running.start()) == {b"/a": b"x"}
    assert sorted(path.name for path in running.path.glob("index*")) == ["index"]


def test_a_rebuilt_index_takes_the_old_ones_place_whole(
    running: Host, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Between its two renames the pool has no index; whoever comes then finishes the job."""
    put(running.store, ROOT_INODE, b"a", b"x")
    running.stop()
    pool_fd = os.open(running.path, os.O_RDONLY)
    try:
        os.rename(running.path / "index", running.path / "index.new")
        (running.path / "index.old").mkdir()
        index_place.settle_index(pool_fd, Syscalls())
    finally:
        os.close(pool_fd)
    assert sorted(path.name for path in running.path.glob("index*")) == ["index"]
    assert tree(running.start()) == {b"/a": b"x"}


def test_a_rebuild_finds_room_where_there_is_none_for_two_indexes(
    running: Host, monkeypatch: pytest.MonkeyPatch
) -> None:
    put(running.store, ROOT_INODE, b"a", b"x")
    settle(running.store)
    running.lose_power()
    create = Index.create
    tries: list[bool] = []

    def create_if_room(path: str, *args: object, **kwargs: object) -> None:
        tries.append((running.path / "index").exists())
        if tries[-1]:
            raise NoSpace("no room for two")
        create(path, *args, **kwargs)  # type: ignore[arg-type]

    monkeypatch.setattr(Index, "create", create_if_room)
    assert tree(running.start()) == {b"/a": b"x"}
    assert tries == [True, False]


def test_any_loss_of_late_identities_shows_no_wrong_bytes() -> None:
    """Whatever part of the queue a power loss ends, a name has bytes that it once had."""
    for seed in range(40):
        chance = random.Random(seed)
        had: dict[bytes, set[bytes]] = {}
        with host() as made:
            store = made.start()
            for step in range(40):
                names = [name for _, name in store.namespace.children(ROOT_INODE, InodeNo(0))]
                kind = chance.choice(["store", "store", "rename", "unlink", "idle", "idle"])
                if kind == "store":
                    name, data = b"%d" % chance.randrange(6), b"%d" % step * 1000
                    put(store, ROOT_INODE, b"tmp", data)
                    store.namespace.rename(ROOT_INODE, b"tmp", ROOT_INODE, name)
                    had.setdefault(b"/" + name, set()).add(data)
                    had.setdefault(b"/tmp", set()).add(data)
                elif kind == "rename" and names:
                    source, target = chance.choice(names), b"%d" % chance.randrange(6)
                    had.setdefault(b"/" + target, set()).add(get(store, ROOT_INODE, source))
                    store.namespace.rename(ROOT_INODE, source, ROOT_INODE, target)
                elif kind == "unlink" and names:
                    store.namespace.unlink(ROOT_INODE, chance.choice(names))
                elif kind == "idle":
                    store.pool.background.tick()
                    for _ in range(chance.randrange(4)):
                        store.pool.background.run_one()
            made.lose_power()
            store = made.start()
            for path, found in tree(store).items():
                assert found in had[path], f"seed {seed}: {path!r}"
            settle(store)
            assert_no_strays(store)
            made.stop()
            assert made.check().problems == []


# ---- refused, and left as it was ----


def spoil_pages(path: Path) -> None:
    with (path / "index" / "data.mdb").open("r+b") as file:
        file.seek(8192)
        file.write(b"\xa5" * 16384)


def spoil_meta(path: Path) -> None:
    with (path / "index" / "data.mdb").open("r+b") as file:
        file.write(b"\xa5" * 8192)


def cut_short(path: Path) -> None:
    os.truncate(path / "index" / "data.mdb", 4096)


def remove_data(path: Path) -> None:
    (path / "index" / "data.mdb").unlink()


def spoil_numbers(path: Path) -> None:
    (path / "INODES").write_bytes(b"not a number")


def remove_root(path: Path) -> None:
    with Index(str(path / "index"), map_size_bytes=64 * MIB, preallocate_bytes=MIB) as index:
        with index.write() as txn:
            txn.delete_inode(ROOT_INODE)
        index.sync()


def zero_pages(path: Path) -> None:
    """LMDB ends the process that reads this, by an assertion."""
    with (path / "index" / "data.mdb").open("r+b") as file:
        for page in range(2, 64):
            file.seek(page * 4096 + 8)
            file.write(bytes(4088))


SPOILERS = pytest.mark.parametrize(
    "spoil",
    [spoil_meta, spoil_pages, zero_pages, cut_short, remove_data, spoil_numbers, remove_root],
)


@SPOILERS
@pytest.mark.parametrize("killed", [False, True])
def test_a_damaged_index_is_refused_in_one_line_and_left_alone(
    running: Host, spoil: object, killed: bool
) -> None:
    assert callable(spoil)
    put(running.store, ROOT_INODE, b"a", b"x")
    if killed:
        running.kill()
    else:
        running.stop()
    spoil(running.path)
    before = pool_files(running.path)
    with pytest.raises(IndexDamaged) as caught:
        running.start()
    line = str(caught.value)
    assert line.startswith(f"{running.path}: ")
    assert "\n" not in line
    assert f"kvfs fsck --repair {running.path}" in line
    assert pool_files(running.path) == before


@SPOILERS
def test_a_repair_brings_back_what_a_damaged_index_held(running: Host, spoil: object) -> None:
    assert callable(spoil)
    ino = put(running.store, ROOT_INODE, b"a", b"x")
    running.stop()
    spoil(running.path)
    assert running.check().problems != []
    assert running.check(repair=True).repaired > 0
    assert running.check().problems == []
    store = running.start()
    assert tree(store) == {b"/a": b"x"}
    assert put(store, ROOT_INODE, b"b", b"y") > ino
    assert_exact(running)


def test_an_unknown_format_is_refused_and_left_alone(running: Host) -> None:
    running.stop()
    index_at = str(running.path / "index")
    with Index(index_at, map_size_bytes=64 * MIB, preallocate_bytes=MIB) as index:
        with index.write() as txn:
            txn._put(FORMAT_KEY, pack_format(77))
        index.sync()
    before = pool_files(running.path)
    with pytest.raises(FormatUnknown, match="77"):
        running.start()
    with pytest.raises(FormatUnknown, match="77"):
        running.check()
    assert pool_files(running.path) == before


def test_a_pool_that_was_not_stopped_is_not_mounted_read_only(running: Host) -> None:
    put(running.store, ROOT_INODE, b"a", b"x")
    running.kill()
    before = pool_files(running.path)
    with pytest.raises(IndexDamaged, match="not stopped cleanly"):
        running.start(settings=running.read_only())
    assert pool_files(running.path) == before


# ---- RUN ----


def test_an_unreadable_run_file_is_believed_in_nothing(running: Host) -> None:
    put(running.store, ROOT_INODE, b"a", b"x")
    running.stop()
    for text in ("", "{", "[]", "7", json.dumps({"clean": True}), json.dumps({"boot_id": 7})):
        (running.path / "RUN").write_text(text)
        state = read_run_state_of(running)
        assert not state.clean
        assert not state.trusted


def test_distrust_needs_no_room_and_spares_a_clean_stop(tmp_path: Path) -> None:
    pool_fd = os.open(tmp_path, os.O_RDONLY)
    try:
        syscalls = Syscalls()
        distrust_index(pool_fd, syscalls)
        assert read_run_state(pool_fd, syscalls).clean, "a pool that never ran"
        write_run_state(pool_fd, syscalls, clean=True, strays=True)
        distrust_index(pool_fd, syscalls)
        assert read_run_state(pool_fd, syscalls)[1:] == (True, True)
        write_run_state(pool_fd, syscalls, clean=False)
        assert read_run_state(pool_fd, syscalls).trusted
        distrust_index(pool_fd, syscalls)
        assert not read_run_state(pool_fd, syscalls).trusted
        assert not list(tmp_path.glob("*.new"))
    finally:
        os.close(pool_fd)


def test_numbers_start_far_behind_when_their_file_is_lost(running: Host) -> None:
    ino = put(running.store, ROOT_INODE, b"a", b"x")
    running.stop()
    (running.path / "INODES").unlink()
    assert running.check(repair=True).repaired == 1
    pool_fd = os.open(running.path, os.O_RDONLY)
    try:
        numbers = InodeNumbers(pool_fd, Syscalls(), read_only=True)
        numbers.close()
    finally:
        os.close(pool_fd)
    assert numbers.first >= ino + (1 << 40)
