"""A row that cannot be read, met by a running store: a miss, a line in the log, and a counter."""

import dataclasses
import os

import pytest

from kvfs.core.directory_policy import EVICT, PIN, DirectoryPolicy
from kvfs.core.errors import Damaged, NotFound
from kvfs.core.lifecycle import State
from kvfs.core.records import child_key, inode_key, name_key, xattr_key
from kvfs.core.types import ROOT_INODE, InodeNo
from tests.support.store.driven_faults import set_limit
from tests.support.store.stores import DIRECTORY, FILE, Host, get, make_directory, put, settle, tree

pytestmark = pytest.mark.usefixtures("caplog")


def test_a_damaged_name_is_a_miss_and_can_be_made_anew(running: Host) -> None:
    store = running.store
    put(store, ROOT_INODE, b"a", b"x")
    store.spoil_row(name_key(ROOT_INODE, b"a"))
    with pytest.raises(NotFound):
        store.lookup(ROOT_INODE, b"a")
    put(store, ROOT_INODE, b"a", b"y")
    assert get(store, ROOT_INODE, b"a") == b"y"
    assert store.describe()["damaged_rows"] == 1


def test_a_damaged_inode_is_a_miss_at_the_second_look(running: Host) -> None:
    """The kernel looks up again by itself when the first answer is ESTALE."""
    store = running.store
    ino = put(store, ROOT_INODE, b"a", b"x")
    store.spoil_row(inode_key(ino))
    assert store.lookup(ROOT_INODE, b"a") == ino
    with pytest.raises(Damaged):
        store.present(ino)
    with pytest.raises(NotFound):
        store.lookup(ROOT_INODE, b"a")
    put(store, ROOT_INODE, b"a", b"y")
    assert tree(store) == {b"/a": b"y"}


def test_a_name_is_stored_over_a_damaged_one(running: Host) -> None:
    store = running.store
    put(store, ROOT_INODE, b"final", b"old")
    store.spoil_row(name_key(ROOT_INODE, b"final"))
    put(store, ROOT_INODE, b"tmp", b"new")
    store.rename(ROOT_INODE, b"tmp", ROOT_INODE, b"final")
    assert get(store, ROOT_INODE, b"final") == b"new"


@pytest.mark.parametrize("size_bytes", [0, 4999, 5001])
def test_a_block_whose_extent_has_another_size_is_a_miss(running: Host, size_bytes: int) -> None:
    """A reader was given a part of it, or more, and no error."""
    ino = put(running.store, ROOT_INODE, b"a", b"x" * 5000)
    settle(running.store)
    running.stop()
    os.truncate(running.extent(ino), size_bytes)
    store = running.start()
    with pytest.raises(Damaged):
        get(store, ROOT_INODE, b"a")
    with pytest.raises(NotFound):
        get(store, ROOT_INODE, b"a")
    assert store.describe()["lost_blocks"] == 1


def test_an_identity_that_cannot_be_read_is_a_miss_where_it_is_asked(running: Host) -> None:
    """It was ESTALE at each open, on a name that stayed."""
    ino = put(running.store, ROOT_INODE, b"a", b"x" * 5000)
    settle(running.store)
    running.stop()
    os.setxattr(running.extent(ino), "trusted.kvfs.fixed", bytes(64))
    store = running.start(settings=dataclasses.replace(running.settings, verify="open"))
    with pytest.raises(Damaged):
        get(store, ROOT_INODE, b"a")
    with pytest.raises(NotFound):
        get(store, ROOT_INODE, b"a")


def test_a_listing_leaves_out_what_it_cannot_read(running: Host) -> None:
    store = running.store
    inos = [put(store, ROOT_INODE, b"%d" % number, b"") for number in range(600)]
    for ino in (*inos[:300], inos[400]):
        store.spoil_row(child_key(ROOT_INODE, ino))
    found: list[bytes] = []
    after = InodeNo(0)
    while rows := store.children(ROOT_INODE, after):
        after = rows[-1][0]
        found += [name for _, name in rows]
    assert found == [b"%d" % number for number in range(300, 600) if number != 400]


def test_the_status_says_what_it_can_read(running: Host) -> None:
    store = running.store
    parent = make_directory(running, b"parent")
    holder = make_directory(running, b"holder", parent)
    pinned = put(store, holder, b"pinned", b"x" * 5000)
    store.set_xattr(pinned, PIN, b"1")
    opened, _ = store.create(holder, b"draft", FILE, 0, 0)
    lost, _ = store.create(parent, b"lost", FILE, 0, 0)
    kept = put(store, holder, b"kept", b"y" * 5000)
    store.set_xattr(kept, PIN, b"1")
    for ino in (pinned, lost.ino, parent):
        store.spoil_row(inode_key(ino))
    told = store.describe()
    # What is kept counts as leased and as pinned; the draft has its reserve.
    assert told["largest_unevictable"] == {"directory": "/holder", "bytes": 3 * 8192}
    assert told["states"]["draft"]["blocks"] == 1
    store.close(opened, writer=True)
    running.kill()


def test_a_start_finds_the_holdings_behind_a_row_that_it_cannot_read(running: Host) -> None:
    """Leases, slabs and pins: one that stays unknown is never given up, or counts as room."""
    store = running.store
    short, torn = (put(store, ROOT_INODE, name, b"x") for name in (b"short", b"torn"))
    leased = put(store, ROOT_INODE, b"leased", b"y" * 5000)
    top = make_directory(running, b"top")
    below = [put(store, top, name, b"z" * 5000) for name in (b"1", b"2")]
    for ino in (torn, leased, top):
        store.set_xattr(ino, PIN, b"1")
    store.spoil_row(inode_key(short))
    with store.write_rows() as txn:
        for ino in (torn, below[0]):
            key = inode_key(ino)
            txn._rows[key] = txn._get(key)[:-1] + b"\xa5"
        txn._rows[xattr_key(leased, PIN)] = b"garbage"
    running.stop()
    store = running.start()
    settle(store)
    assert store.scanned
    assert store.lease_state(leased) is State.LEASED
    assert store.pinned_bytes == 8192  # of two below the top


def test_a_policy_that_cannot_be_read_is_none(running: Host) -> None:
    """Else who evicts, and with him a writer who has nothing to do with it, would fail."""
    store = running.store
    top = make_directory(running, b"top")
    below, _ = store.make_node(top, b"below", DIRECTORY, 0, 0)
    for name, value in ((EVICT, b"never"), (PIN, b"1")):
        store.set_xattr(top, name, value)
    assert store.policy(below) == DirectoryPolicy(evict="never", pin=True)
    store.spoil_row(xattr_key(top, EVICT))
    store.forget_policies()
    assert store.policy(below) == DirectoryPolicy(pin=True)
    store.spoil_row(inode_key(top))
    store.forget_policies()
    assert store.policy(below) == DirectoryPolicy()


@pytest.mark.parametrize("lost", [False, True])
def test_a_directory_that_cannot_be_read_keeps_no_other_block_from_going(
    running: Host, lost: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    set_limit(monkeypatch, "plan_blocks", 4)
    store = running.store
    inos = []
    for name in (b"spoiled", b"sound"):
        top = make_directory(running, name)
        for number in range(6):
            ino = put(store, top, b"%d.tmp" % number, b"x" * 5000)
            store.rename(top, b"%d.tmp" % number, top, b"%d" % number)
            inos.append(ino)
    settle(store)
    spoiled = store.lookup(ROOT_INODE, b"spoiled")
    store.spoil_row(inode_key(spoiled))
    if lost:
        with store.write_rows() as txn:
            txn.delete_inode(spoiled)
    assert store.evictable_bytes == 12 * 8192
    assert store.evict(8192) == 8192
    store.evict(12 * 8192)
    assert [store.has_row(ino) for ino in inos] == [True] * 6 + [False] * 6
    assert store.evictable_bytes == 0


def test_housekeeping_goes_on_beside_what_cannot_be_read(running: Host) -> None:
    store = running.store
    leased, other = (put(store, ROOT_INODE, name, b"y" * 5000) for name in (b"leased", b"other"))
    settle(store)
    store.spoil_row(inode_key(leased))
    store.lose_maker(leased)
    assert store.lease_state(leased) is None
    assert store.lease_state(other) is State.LEASED


def test_a_chore_that_fails_keeps_neither_the_rest_nor_the_mount(
    running: Host, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """It would end the nursery in which the server runs."""
    store = running.store

    def fail(_now_s: float) -> None:
        raise Damaged("a row")

    store.fail_saving(monkeypatch, fail)
    before = store.describe()["background_failures"]
    with store.write_rows(lasting=False) as txn:
        txn.put_xattr(ROOT_INODE, b"user.k", b"v")
    store.sweep_anew()
    store.tick()
    settle(store)
    store.tick()
    assert store.swept
    assert store.describe()["background_failures"] >= before + 2
    assert "background job failed" in caplog.text
    monkeypatch.undo()


def test_fsck_sets_right_what_a_miss_left_behind(running: Host) -> None:
    store = running.store
    put(store, ROOT_INODE, b"a", b"x")
    ino = put(store, ROOT_INODE, b"b", b"y" * 5000)
    put(store, ROOT_INODE, b"c", b"z")
    store.spoil_row(name_key(ROOT_INODE, b"a"))
    store.spoil_row(inode_key(ino))
    for name in (b"a", b"b", b"b"):
        with pytest.raises((NotFound, Damaged)):
            store.record(store.lookup(ROOT_INODE, name))
    running.stop()
    assert running.check().problems != []
    running.check(repair=True)
    assert running.check().problems == []
    store = running.start()
    assert tree(store) == {b"/a": b"x", b"/c": b"z"}
    assert store.space.used_bytes == 2 * 4096


def test_a_read_only_store_changes_nothing(running: Host) -> None:
    put(running.store, ROOT_INODE, b"a", b"x")
    running.store.spoil_row(name_key(ROOT_INODE, b"a"))
    running.stop()
    store = running.start(settings=running.read_only())
    for _ in range(2):
        with pytest.raises(NotFound):
            store.lookup(ROOT_INODE, b"a")
    running.stop()
    assert running.check().problems != []


def test_attributes_that_cannot_be_read_are_not_written_over_what_the_file_has(
    running: Host, caplog: pytest.LogCaptureFixture
) -> None:
    store = running.store
    ino = put(store, ROOT_INODE, b"K", b"x")
    store.set_xattr(ino, b"user.first", b"whole")
    store.sync()
    settle(store)
    store.set_xattr(ino, b"user.second", b"late")
    store.spoil_row(xattr_key(ino, b"user.first"))
    store.sync()
    settle(store)
    assert f"inode {ino:#x}: its attributes are not written: " in caplog.text
