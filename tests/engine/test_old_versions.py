"""While a final block is rewritten with O_TRUNC, others see the version that was there before."""

import stat
from collections.abc import Iterator

import pytest

from kvfs.core.errors import DeadInode, NotFound
from kvfs.core.types import ROOT_INODE, InodeNo
from kvfs.machine.processes import Maker
from tests.support.store.driven import Opened
from tests.support.store.life_model import NO_PID, Lives
from tests.support.store.stores import (
    DIRECTORY,
    FILE,
    MIB,
    Host,
    assert_exact,
    assert_no_strays,
    get,
    host,
    put,
    settle,
    write,
)

WRITER = Maker(NO_PID, 1)
READER = Maker(NO_PID + 1, 2)
OTHER = Maker(NO_PID + 2, 3)


@pytest.fixture
def running() -> Iterator[Host]:
    with host() as made:
        made.start()
        lives = made.store.watch_processes(Lives())
        for maker in (WRITER, READER, OTHER):
            lives.begin(maker)
        yield made


def rewrite(running: Host, name: bytes, maker: Maker = WRITER) -> Opened:
    """Do what open(2) with O_TRUNC does."""
    store = running.store
    ino = running.store.lookup(ROOT_INODE, name)
    with pytest.raises(DeadInode):
        store.open(ino, writer=True, truncate=True, maker=maker)
    fresh = running.store.lookup(ROOT_INODE, name)
    return store.open(fresh, writer=True, truncate=True, maker=maker)


def published(running: Host, name: bytes, data: bytes) -> InodeNo:
    ino = put(running.store, ROOT_INODE, name + b".tmp", data)
    running.store.rename(ROOT_INODE, name + b".tmp", ROOT_INODE, name)
    return ino


def seen(running: Host, name: bytes, who: Maker) -> InodeNo | None:
    ino = running.store.lookup(ROOT_INODE, name)
    return running.store.seen(ino, running.store.present(ino), who)


def close(running: Host, opened: Opened) -> None:
    running.store.close(opened, writer=True)


def test_others_see_the_old_version_until_the_last_close(running: Host) -> None:
    old = published(running, b"K", b"old")
    opened = rewrite(running, b"K")
    write(running.store, opened, b"new and longer")
    assert seen(running, b"K", WRITER) == opened.ino
    assert seen(running, b"K", READER) == old
    assert running.store.present(old).size_bytes == 3
    store = running.store
    assert store.xattr(old, b"user.kvfs.state") == b"published"
    store.set_xattr(old, b"user.a", b"1")
    assert store.xattr_names(old) == store.xattr_names(opened.ino) == [b"user.a"]
    store.remove_xattr(old, b"user.a")
    close(running, opened)
    assert seen(running, b"K", READER) == opened.ino
    settle(running.store)
    assert_no_strays(running.store)
    assert_exact(running)


def test_a_second_writer_takes_the_old_version_over(running: Host) -> None:
    old = published(running, b"K", b"old")
    first = rewrite(running, b"K")
    write(running.store, first, b"newer")
    second = rewrite(running, b"K", OTHER)
    close(running, first)
    assert seen(running, b"K", OTHER) == second.ino
    assert seen(running, b"K", READER) == old
    close(running, second)
    assert seen(running, b"K", READER) == second.ino
    assert_exact(running)


@pytest.mark.parametrize("end", ["torn", "unlinked", "renamed"])
def test_it_goes_with_the_draft(running: Host, end: str) -> None:
    store = running.store
    old = published(running, b"K", b"old")
    opened = rewrite(running, b"K")
    write(store, opened, b"new")
    if end == "torn":
        opened.tear()
        close(running, opened)
    elif end == "unlinked":
        store.unlink(ROOT_INODE, b"K")
    else:
        store.rename(ROOT_INODE, b"K", ROOT_INODE, b"L", replace=True, who=WRITER)
        assert seen(running, b"L", READER) == opened.ino
    with pytest.raises(NotFound):
        seen(running, b"K", READER)
    settle(store)
    assert old not in store.open_inos
    assert_exact(running)


def test_a_draft_has_no_old_version_nor_has_a_temporary_name(running: Host) -> None:
    """Their writers look them up, each for its own."""
    store = running.store
    draft, _ = store.create(ROOT_INODE, b"D", FILE, 0, 0, OTHER)
    write(store, draft, b"others")
    put(store, ROOT_INODE, b"K.tmp", b"old")
    for name in (b"D", b"K.tmp"):
        opened = rewrite(running, name)
        assert seen(running, name, READER) == opened.ino
        close(running, opened)
    close(running, draft)


def test_nobody_writes_into_what_will_vanish(running: Host) -> None:
    old = published(running, b"K", b"old")
    opened = rewrite(running, b"K")
    with pytest.raises(DeadInode):
        running.store.open(old, writer=True, truncate=False, maker=OTHER)
    reader = running.store.open(old, writer=False, truncate=False)
    close(running, opened)
    running.store.close(reader, writer=False)
    assert_exact(running)


def test_it_gives_way_to_the_new_version(running: Host) -> None:
    """A pool without room for both: a miss for others, and never "no space" for the writer."""
    store = running.store
    old = published(running, b"K", b"1" * (40 * MIB))
    opened = rewrite(running, b"K")
    assert seen(running, b"K", READER) in (old, None)  # the reserve for the new may take it
    write(store, opened, b"2" * (40 * MIB))
    assert seen(running, b"K", READER) is None
    assert seen(running, b"K", WRITER) == opened.ino
    close(running, opened)
    assert seen(running, b"K", READER) == opened.ino
    assert_exact(running)


def test_a_small_one_gives_way_too(running: Host) -> None:
    """Of up to a 64th of the pool, which is kept as recently removed when it is let go."""
    store = running.store
    for name, size_bytes in ((b"K", MIB), (b"rest", 63 * MIB - 8192)):
        # In lease, so that nothing else may go.
        opened, _ = store.create(ROOT_INODE, name, FILE, 0, 0, WRITER)
        write(store, opened, b"1" * size_bytes)
        close(running, opened)
        settle(store)
    opened = rewrite(running, b"K", OTHER)
    write(store, opened, b"2" * MIB)
    close(running, opened)
    assert get(store, ROOT_INODE, b"K") == b"2" * MIB
    assert_exact(running)


def test_a_name_that_its_displaced_writer_keeps_shows_nothing(running: Host) -> None:
    """Renamed away by its writer, the old version has a name of its own."""
    store = running.store
    stored, _ = store.create(ROOT_INODE, b"staged", FILE, 0, 0, OTHER)
    write(store, stored, b"one")
    close(running, stored)
    opened = rewrite(running, b"staged")
    assert seen(running, b"staged", READER) == stored.ino
    store.rename(ROOT_INODE, b"staged", ROOT_INODE, b"K", replace=True, who=OTHER)
    assert seen(running, b"K", READER) == stored.ino
    assert seen(running, b"staged", READER) is None
    close(running, opened)
    assert seen(running, b"staged", READER) == opened.ino
    assert_exact(running)


def test_a_create_that_evicts_beside_itself_counts_its_directory_right(running: Host) -> None:
    """The extent's reserve takes names of the very directory that the new one goes into."""
    store = running.store
    directory = store.make_node(ROOT_INODE, b"d", DIRECTORY, 0, 0)[0]
    for number in range(14):
        name = b"%d" % number
        put(store, directory, name + b".tmp", b"x" * (8 * MIB))
        store.rename(directory, name + b".tmp", directory, name)
    rows = store.children(directory, InodeNo(0))
    assert store.directory(directory).entries == len(rows) < 14
    running.stop()
    assert running.check().problems == []
    running.start()


def test_owner_and_mode_are_handed_on_as_long_as_it_stands_in(running: Host) -> None:
    """Not the times: they are of the bytes; and nothing any more once the draft is final."""
    old = published(running, b"K", b"old")
    store = running.store
    opened = rewrite(running, b"K")
    store.change(old, mode=0o600, uid=1, gid=2, mtime_ns=3)
    for ino in (old, opened.ino):
        record = store.present(ino)
        assert (stat.S_IMODE(record.mode), record.uid, record.gid) == (0o600, 1, 2)
    assert store.present(old).mtime_ns == 3
    assert store.present(opened.ino).mtime_ns != 3
    write(store, opened, b"new")
    store.close(opened, writer=True)
    assert stat.S_IMODE(store.record(opened.ino).mode) == 0o600
    assert_exact(running)
