"""What a start makes of a pool whose server was killed, and what RUN says of it."""

import json
import os
from pathlib import Path

import pytest

from kvfs.core.errors import DeadInode
from kvfs.core.lifecycle import State
from kvfs.core.records import (
    HAS_CRC,
    HAS_HOLES,
    IS_SLAB,
    UNFINISHED_KEY,
    UNFINISHED_MAX,
    inode_key,
    name_key,
)
from kvfs.core.types import FIRST_DRIVE, ROOT_INODE, InodeNo
from kvfs.storage.inode_numbers import InodeNumbers
from kvfs.storage.pool_run import RunPlace, distrust_index
from kvfs.storage.run_state import RunState, read_run_state, write_run_state
from kvfs.storage.syscalls import Syscalls
from tests.support.store.loop_guard import LoopGuard
from tests.support.store.stores import (
    DIRECTORY,
    FILE,
    SYMLINK,
    Host,
    assert_exact,
    assert_no_strays,
    get,
    kill_behind_an_overwriting,
    put,
    settle,
    tree,
    write,
)
from tests.support.store.three_drives import three_drives

pytestmark = pytest.mark.usefixtures("caplog")


# ---- killed, in the same boot ----


def test_a_kill_drops_drafts_and_nothing_else(running: Host) -> None:
    store = running.store
    put(store, ROOT_INODE, b"published", b"x" * 5000)
    draft, _ = store.create(ROOT_INODE, b"draft", FILE, 0, 0)
    write(store, draft, b"y" * 9000)
    store.set_xattr(draft.ino, b"user.a", b"1")
    running.kill()
    store = running.start()
    assert tree(store) == {b"/published": b"x" * 5000}
    assert store.directory(ROOT_INODE).entries == 1
    with pytest.raises(DeadInode):
        store.record(draft.ino)
    assert_exact(running)
    settle(store)
    assert_no_strays(store)
    running.stop()
    assert running.check().problems == []


def test_a_kill_before_the_close_frees_the_reserve_of_a_renamed_block(running: Host) -> None:
    store = running.store
    put(store, ROOT_INODE, b"before", b"x" * 50_000)
    draft, _ = store.create(ROOT_INODE, b"K.tmp", FILE, 0, 0)
    write(store, draft, b"short")
    assert draft.allocated_bytes > 4096
    store.rename(ROOT_INODE, b"K.tmp", ROOT_INODE, b"K")
    assert store.record(draft.ino).state == State.RENAMED
    os.close(draft.fd)
    running.kill()
    store = running.start()
    record = store.record(draft.ino)
    assert (record.state, record.allocated_bytes) == (State.PUBLISHED, 4096)
    assert get(store, ROOT_INODE, b"K") == b"short"
    assert_exact(running)


def test_a_kill_takes_a_block_that_was_being_rewritten_in_place(running: Host) -> None:
    """Its bytes are half old and half new, for all anybody knows."""
    store = running.store
    ino = put(store, ROOT_INODE, b"a", b"x" * 50_000)
    put(store, ROOT_INODE, b"b", b"y")
    opened = store.open(ino, writer=True, truncate=False)
    write(store, opened, b"new", 20_000)
    # Times of its own do not make it look untouched.
    store.change(ino, mtime_ns=store.record(ino).mtime_ns)
    store.change(ino, mtime_ns=5)
    running.kill()
    store = running.start()
    assert tree(store) == {b"/b": b"y"}
    settle(store)
    assert_no_strays(store)
    assert_exact(running)


def test_a_kill_leaves_a_block_that_was_only_opened_for_writing(running: Host) -> None:
    store = running.store
    ino = put(store, ROOT_INODE, b"a", b"x" * 50_000)
    settle(store)
    store.open(ino, writer=True, truncate=False)
    settle(store)
    running.kill()
    store = running.start()
    assert store.record(ino).state == State.REWRITTEN
    assert tree(store) == {b"/a": b"x" * 50_000}


@pytest.mark.parametrize("way", ["rewritten", "renamed"])
@pytest.mark.parametrize("access", [os.O_RDWR, os.O_WRONLY, os.O_RDONLY])
def test_a_kill_takes_a_block_that_the_dead_mount_still_writes(
    running: Host, way: str, access: int
) -> None:
    """By passthrough or a mapping: under the next server its bytes would change, unasked."""
    store = running.store
    opened, _ = store.create(ROOT_INODE, b"a.tmp", FILE, 0, 0)
    write(store, opened, b"x" * 50_000)
    if way == "rewritten":
        store.close(opened, writer=True)
    store.rename(ROOT_INODE, b"a.tmp", ROOT_INODE, b"a")
    if way == "rewritten":
        store.open(opened.ino, writer=True, truncate=False)
    running.kill()
    client = os.open(running.extent(opened.ino), access)
    try:
        store = running.start()
        assert tree(store) == ({b"/a": b"x" * 50_000} if access == os.O_RDONLY else {})
        settle(store)
        assert_no_strays(store)
        assert_exact(running)
    finally:
        os.close(client)


def test_a_kill_leaves_an_open_slab_as_its_extent_is(running: Host) -> None:
    """A slab was never whole in one piece: its maker knows what is where."""
    store = running.store
    opened, _ = store.create(ROOT_INODE, b"slab", FILE, 0, 0)
    store.truncate(opened.ino, 100_000)
    store.close(opened, writer=True)
    opened = store.open(opened.ino, writer=True, truncate=False)
    write(store, opened, b"x" * 5000, 100_000)
    running.kill()
    assert running.check().problems == []
    store = running.start()
    assert tree(store) == {b"/slab": bytes(100_000) + b"x" * 5000}
    assert store.record(opened.ino).state == State.SLAB
    assert_exact(running)


@pytest.mark.parametrize("mender", ["sweep", "fsck"])
@pytest.mark.parametrize("grown", [True, False], ids=["slab", "rewritten"])
def test_what_was_written_in_place_before_a_kill_is_identified_behind_its_bytes(
    running: Host, mender: str, grown: bool
) -> None:
    """Its former identity is gone, and the next one says that it is a slab."""
    store = running.store
    ino = put(store, ROOT_INODE, b"a", b"x" * 5000)
    settle(store)
    opened = store.open(ino, writer=True, truncate=False)
    write(store, opened, b"new", 1000)
    if grown:
        store.truncate(ino, 9000)
    store.close(opened, writer=True)
    running.kill()
    if mender == "fsck":
        assert running.check(repair=True).problems == []
    store = running.start()
    if mender == "sweep":
        assert store.identity(ino) is None
        settle(store)
    identity = store.identity(ino)
    assert identity is not None
    assert identity.flags & ~HAS_CRC == (IS_SLAB | HAS_HOLES if grown else IS_SLAB)
    before = tree(store)
    assert before[b"/a"] == (b"x" * 1000 + b"new" + b"x" * 3997).ljust(9000 if grown else 0, b"\0")
    running.lose_power()
    store = running.start()
    assert tree(store) == before
    assert store.record(ino).state == State.ORPHAN_SLAB


@pytest.mark.parametrize("change", ["touch", "rename"])
def test_what_was_overwritten_before_a_kill_is_identified_behind_its_bytes(
    running: Host, monkeypatch: pytest.MonkeyPatch, change: str
) -> None:
    """On a directory source they may be in the page cache still; and its sweep comes later."""
    ino = kill_behind_an_overwriting(running, monkeypatch)
    store = running.start()
    assert store.identity(ino) is None
    if change == "touch":
        store.change(ino, mtime_ns=5)
    else:
        store.rename(ROOT_INODE, b"a", ROOT_INODE, b"b")
    store.hurry()
    assert store.is_listed(ino)
    assert store.identity(ino) is None
    settle(store)
    assert store.identity(ino) is not None
    store.change(ino, mtime_ns=6)
    store.hurry()
    assert not store.is_listed(ino)


def test_a_removed_block_that_is_read_for_hours_does_not_come_back(running: Host) -> None:
    store = running.store
    ino = put(store, ROOT_INODE, b"a", b"x" * 5000)
    store.open(ino, writer=False, truncate=False)
    settle(store)
    store.unlink(ROOT_INODE, b"a")
    settle(store)
    running.lose_power()
    assert tree(running.start()) == {}


def test_a_kill_before_the_identities_costs_none(running: Host) -> None:
    """The sweep writes them again, so that a later power loss finds them."""
    put(running.store, ROOT_INODE, b"tmp", b"x")
    settle(running.store)
    running.store.rename(ROOT_INODE, b"tmp", ROOT_INODE, b"final")
    running.store.make_node(ROOT_INODE, b"dir", DIRECTORY, 0, 0)
    running.store.make_node(ROOT_INODE, b"link", SYMLINK, 0, 0, b"t")
    running.kill()
    settle(running.start())
    running.lose_power()
    assert tree(running.start()) == {b"/final": b"x", b"/dir": "directory", b"/link": b"t"}


def test_a_sweep_leaves_what_is_open_or_new_alone(running: Host) -> None:
    old = put(running.store, ROOT_INODE, b"old", b"x" * 5000)
    running.kill()
    store = running.start()
    reader = store.open(old, writer=False, truncate=False)
    store.unlink(ROOT_INODE, b"old")
    buried = put(store, ROOT_INODE, b"buried", b"y")
    store.unlink(ROOT_INODE, b"buried")
    put(store, ROOT_INODE, b"new", b"z")
    store.drain()  # the sweep's thread; nothing is due for removal yet
    while not store.swept:
        store.sweep_on()
        store.drain()
    assert running.extent(old).exists()
    assert running.extent(buried).exists()
    assert os.pread(store.extent_fd(reader), 5000, 0) == b"x" * 5000
    store.close(reader, writer=False)
    settle(store)
    assert_no_strays(store)


def test_a_stop_before_the_sweep_is_done_leaves_it_to_the_next_start(running: Host) -> None:
    ino = put(running.store, ROOT_INODE, b"a", b"x")
    running.kill()
    stray = running.extent(InodeNo(ino + 256))
    stray.write_bytes(b"nobody's")
    store = running.start()
    store.find_outdated(ino)  # found, and not yet written
    running.stop()
    state = read_run_state_of(running)
    assert (state.clean, state.strays) == (True, True)
    assert not running.start().swept
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
        syscalls, places = Syscalls(), [RunPlace(FIRST_DRIVE, pool_fd, "")]
        InodeNumbers.create(pool_fd, syscalls)
        distrust_index(places, syscalls)
        assert read_run_state(pool_fd, syscalls).clean, "a pool that never ran"
        write_run_state(pool_fd, syscalls, clean=True, strays=True)
        distrust_index(places, syscalls)
        assert read_run_state(pool_fd, syscalls)[1:5] == (True, True, False, False)
        write_run_state(pool_fd, syscalls, clean=False)
        assert read_run_state(pool_fd, syscalls).trusted
        distrust_index(places, syscalls)
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
        numbers = InodeNumbers((pool_fd,), Syscalls(), read_only=True)
        numbers.close()
    finally:
        os.close(pool_fd)
    assert numbers.first >= ino + (1 << 40)


# ---- what a kill leaves open is listed, so that a start need not search ----


def test_the_index_lists_what_is_open_for_writing(running: Host) -> None:
    store = running.store
    ino = put(store, ROOT_INODE, b"a", b"x")
    assert store.listed_unfinished() == []
    draft, _ = store.create(ROOT_INODE, b"b", FILE, 0, 0)
    assert store.listed_unfinished() == [draft.ino]
    rewritten = store.open(ino, writer=True, truncate=False)
    assert sorted(store.listed_unfinished() or ()) == [ino, draft.ino]
    store.close(draft, writer=True)
    assert store.listed_unfinished() == [ino]
    store.unlink(ROOT_INODE, b"a")
    store.close(rewritten, writer=True)
    put(store, ROOT_INODE, b"c", b"x")
    assert store.listed_unfinished() == []


@pytest.mark.parametrize("drafts", [UNFINISHED_MAX, UNFINISHED_MAX + 1, 2 * UNFINISHED_MAX])
def test_any_number_of_drafts_is_dropped_after_a_kill(running: Host, drafts: int) -> None:
    store = running.store
    put(store, ROOT_INODE, b"published", b"x")
    for number in range(drafts):
        store.create(ROOT_INODE, b"%d" % number, FILE, 0, 0)
    listed = store.listed_unfinished()
    assert listed is None if drafts > UNFINISHED_MAX else len(listed or ()) == drafts
    running.kill()
    store = running.start()
    assert tree(store) == {b"/published": b"x"}
    assert store.listed_unfinished() == []
    assert_exact(running)


@pytest.mark.parametrize("damaged", ["name", "parent"])
@pytest.mark.parametrize("mender", ["start", "fsck"])
def test_a_damaged_row_beside_a_draft_keeps_no_pool_down(
    running: Host, damaged: str, mender: str
) -> None:
    """The start was refused for it, and so was the repair that the refusal asked for."""
    store = running.store
    put(store, ROOT_INODE, b"a", b"x" * 5000)
    directory, _ = store.make_node(ROOT_INODE, b"dir", DIRECTORY, 0, 0)
    draft, _ = store.create(directory, b"draft", FILE, 0, 0)
    store.commit()
    key = name_key(directory, b"draft") if damaged == "name" else inode_key(directory)
    store.spoil_row(key)
    running.kill()
    if mender == "start":
        assert running.start().row(draft.ino) is None
        settle(running.store)
        running.stop()
    running.check(repair=True)
    assert running.check().problems == []
    left = {b"/dir": "directory"} if damaged == "name" else {}
    assert tree(running.start()) == {b"/a": b"x" * 5000, **left}
    assert_exact(running)


def test_without_the_list_a_start_searches(running: Host) -> None:
    store = running.store
    store.create(ROOT_INODE, b"draft", FILE, 0, 0)
    store.spoil_row(UNFINISHED_KEY)
    running.kill()
    assert tree(running.start()) == {}


def test_too_many_drafts_become_listed_again_when_they_are_fewer(running: Host) -> None:
    store = running.store
    opened = [
        store.create(ROOT_INODE, b"%d" % number, FILE, 0, 0)[0]
        for number in range(UNFINISHED_MAX + 5)
    ]
    for draft in opened[3:]:
        store.close(draft, writer=True)
    assert sorted(store.listed_unfinished() or ()) == [draft.ino for draft in opened[:3]]


def test_what_a_kill_left_half_written_counts_on_no_drive() -> None:
    """Several drafts of each drive, and blocks that were being rewritten."""
    with three_drives(LoopGuard()) as pool:
        store = pool.store
        old = [put(store, ROOT_INODE, b"old %d" % number, b"x" * 9000) for number in range(6)]
        for number in range(12):
            draft, _ = store.create(ROOT_INODE, b"%d" % number, FILE, 0, 0)
            write(store, draft, b"x" * 100_000)
        for ino in old:
            write(store, store.open(ino, writer=True, truncate=False), b"y" * 50_000)
        store.commit()
        pool.kill()
        pool.start()
        assert tree(pool.store) == {}
        assert_exact(pool)
        pool.stop()
        assert pool.check().problems == []
