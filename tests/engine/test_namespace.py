"""Names: made, moved, listed and removed, on a pool in memory and without a kernel mount."""

import contextlib
import os

import pytest

from kvfs.core.errors import (
    DeadInode,
    Exists,
    InvalidRequest,
    IsADirectory,
    NameTooLong,
    NotADirectory,
    NotEmpty,
    NotFound,
)
from kvfs.core.types import ROOT_INODE
from tests.support.store.stores import (
    FILE,
    SYMLINK,
    Host,
    assert_exact,
    get,
    make_directory,
    names,
    put,
    settle,
    tree,
    write,
)


def test_create_refuses_a_taken_name_and_uses_no_extent_up(running: Host) -> None:
    put(running.store, ROOT_INODE, b"a", b"x")
    with pytest.raises(Exists):
        running.store.create(ROOT_INODE, b"a", FILE, 0, 0)
    assert get(running.store, ROOT_INODE, b"a") == b"x"
    assert_exact(running)


def test_an_unlinked_block_is_readable_until_its_last_close(running: Host) -> None:
    store = running.store
    ino = put(store, ROOT_INODE, b"a", b"x" * 9000)
    opened = store.open(ino, writer=False, truncate=False)
    store.unlink(ROOT_INODE, b"a")
    with pytest.raises(NotFound):
        store.lookup(ROOT_INODE, b"a")
    assert os.pread(store.extent_fd(opened), 9000, 0) == b"x" * 9000
    assert store.present(ino).size_bytes == 9000
    assert_exact(running)
    store.close(opened, writer=False)
    settle(store)
    assert not running.extent(ino).exists()
    assert_exact(running)
    with pytest.raises(DeadInode):
        store.record(ino)


def test_readers_of_a_replaced_block_keep_the_old_bytes(running: Host) -> None:
    store = running.store
    old = put(store, ROOT_INODE, b"final", b"old")
    reader = store.open(old, writer=False, truncate=False)
    put(store, ROOT_INODE, b"tmp", b"new")
    assert store.rename(ROOT_INODE, b"tmp", ROOT_INODE, b"final") == old
    assert get(store, ROOT_INODE, b"final") == b"new"
    assert os.pread(store.extent_fd(reader), 10, 0) == b"old"
    store.close(reader, writer=False)
    settle(store)
    assert names(running) == [b"final"]
    assert not running.extent(old).exists()
    assert_exact(running)


def test_a_rewritten_block_can_lose_its_name_meanwhile(running: Host) -> None:
    store = running.store
    ino = put(store, ROOT_INODE, b"a", b"x" * 9000)
    opened = store.open(ino, writer=True, truncate=False)
    store.truncate(ino, 0)
    write(store, opened, b"y" * 20_000)
    store.unlink(ROOT_INODE, b"a")
    assert_exact(running)
    store.close(opened, writer=True)
    settle(store)
    assert store.space.used_bytes == 0
    assert_exact(running)


def test_rename_keeps_to_its_rules(running: Host) -> None:
    store = running.store
    a = make_directory(running, b"a")
    b = make_directory(running, b"b", a)
    put(running.store, ROOT_INODE, b"file", b"x")
    with pytest.raises(Exists):
        store.rename(ROOT_INODE, b"file", ROOT_INODE, b"a", replace=False)
    with pytest.raises(IsADirectory):
        store.rename(ROOT_INODE, b"file", ROOT_INODE, b"a")
    with pytest.raises(NotADirectory):
        store.rename(ROOT_INODE, b"a", ROOT_INODE, b"file")
    with pytest.raises(InvalidRequest):
        store.rename(ROOT_INODE, b"a", b, b"c")
    with pytest.raises(NotFound):
        store.rename(ROOT_INODE, b"none", b, b"c")
    make_directory(running, b"empty")
    with pytest.raises(NotEmpty):
        store.rename(ROOT_INODE, b"empty", ROOT_INODE, b"a")
    store.rename(ROOT_INODE, b"a", ROOT_INODE, b"empty")
    assert names(running) == [b"empty", b"file"]
    assert store.directory(ROOT_INODE).subdirs == 1


def test_exchange_swaps_two_names(running: Host) -> None:
    store = running.store
    a = make_directory(running, b"a")
    put(store, a, b"in", b"inside")
    put(store, ROOT_INODE, b"out", b"outside")
    store.exchange(a, b"in", ROOT_INODE, b"out")
    assert tree(store) == {b"/a": "directory", b"/a/in": b"outside", b"/out": b"inside"}
    with pytest.raises(InvalidRequest):
        store.exchange(ROOT_INODE, b"a", a, b"in")
    assert_exact(running)


def test_directories_count_their_names(running: Host) -> None:
    store = running.store
    a = make_directory(running, b"a")
    make_directory(running, b"b", a)
    store.make_node(a, b"link", SYMLINK, 0, 0, b"target")
    record = store.directory(a)
    assert (record.entries, record.subdirs) == (2, 1)
    with pytest.raises(NotEmpty):
        store.rmdir(ROOT_INODE, b"a")
    with pytest.raises(NotADirectory):
        store.rmdir(a, b"link")
    with pytest.raises(IsADirectory):
        store.unlink(a, b"b")
    store.unlink(a, b"link")
    store.rmdir(a, b"b")
    store.rmdir(ROOT_INODE, b"a")
    assert names(running) == []


def test_a_listing_stays_right_while_names_go(running: Host) -> None:
    inos = [put(running.store, ROOT_INODE, b"%d" % number, b"") for number in range(10)]
    half = running.store.children(ROOT_INODE, inos[4])
    for number in range(0, 10, 2):
        running.store.unlink(ROOT_INODE, b"%d" % number)
    assert [ino for ino, _ in half] == inos[5:]
    left = running.store.children(ROOT_INODE, inos[4])
    assert [name for _, name in left] == [b"5", b"7", b"9"]


@pytest.mark.parametrize("more", [0, 1], ids=["longest", "too long"])
def test_what_is_longer_than_linux_knows_is_refused(running: Host, more: int) -> None:
    """A target has no room for its end in a page; the name of an attribute is one byte long."""
    store = running.store
    with pytest.raises(NameTooLong) if more else contextlib.nullcontext():
        store.make_node(ROOT_INODE, b"l", SYMLINK, 0, 0, b"t" * (4095 + more))
    with pytest.raises(InvalidRequest) if more else contextlib.nullcontext():
        store.set_xattr(ROOT_INODE, b"user." + b"n" * (250 + more), b"value")
