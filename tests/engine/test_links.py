"""link(2) publishes a block under another name; the first one is an alias from then on."""

from collections.abc import Iterator
from typing import Final

import pytest

from kvfs.core.errors import (
    DeadInode,
    Exists,
    KvfsError,
    NotEmpty,
    NotFound,
    NotPermitted,
    TooManyLinks,
)
from kvfs.core.inode_rules import alias_of
from kvfs.core.lifecycle import State
from kvfs.core.types import ROOT_INODE, InodeNo
from kvfs.machine.processes import SERVER, Maker
from tests.support.kernel.kernel_recorder import KernelRecorder
from tests.support.store.driven import Opened
from tests.support.store.life_model import Lives
from tests.support.store.stores import (
    DIRECTORY,
    FILE,
    SYMLINK,
    Host,
    assert_exact,
    assert_no_strays,
    get,
    host,
    make_directory,
    names,
    put,
    settle,
    tree,
    write,
)

pytestmark = pytest.mark.usefixtures("caplog")
ONE: Final = Maker(100, 1)
OTHER: Final = Maker(101, 2)
BYTES: Final = b"whole" * 3000


@pytest.fixture
def kernel() -> KernelRecorder:
    return KernelRecorder()


@pytest.fixture
def running(kernel: KernelRecorder) -> Iterator[Host]:
    with host() as made:
        made.start(kernel=kernel)
        watch(made)
        yield made


def watch(running: Host) -> Lives:
    """Let both makers live."""
    lives = running.store.watch_processes(Lives())
    lives.begin(ONE)
    lives.begin(OTHER)
    return lives


def create(running: Host, name: bytes = b"K.tmp", who: Maker = ONE) -> Opened:
    opened, _ = running.store.create(ROOT_INODE, name, FILE, 0, 0, who)
    write(running.store, opened, BYTES)
    return opened


def store_linked(running: Host, name: bytes = b"K", temporary: bytes = b"K.tmp") -> InodeNo:
    """Store as a program does that links and has yet to remove the temporary name."""
    opened = create(running, temporary)
    running.store.close(opened, writer=True, awaits_rename=True)
    running.store.link(opened.ino, ROOT_INODE, name, who=ONE)
    return opened.ino


def state(running: Host, ino: InodeNo) -> State:
    return State(running.store.present(ino).state)


def leads_to(running: Host, *wanted: bytes) -> set[InodeNo]:
    """Return where these names lead."""
    return {running.store.lookup(ROOT_INODE, name) for name in wanted}


def is_whole(running: Host, *wanted: bytes) -> None:
    """Exactly these names are there, all of one whole block with so many names."""
    assert sorted(names(running)) == sorted(wanted)
    ino = leads_to(running, *wanted).pop()
    assert leads_to(running, *wanted) == {ino}
    assert bool(alias_of(running.store.record(ino))) == (len(wanted) == 2)
    assert tree(running.store) == {b"/" + name: BYTES for name in wanted}
    assert_exact(running)


def end(running: Host) -> None:
    """After all that, the pool is sound."""
    settle(running.store)
    assert_no_strays(running.store)
    running.stop()
    assert running.check().problems == []


@pytest.mark.parametrize("closes", ["not yet", "waits for its rename", "leased"])
def test_a_link_publishes_as_a_rename_does(running: Host, closes: str) -> None:
    """[hard-links]"""
    opened = create(running)
    if closes != "not yet":
        running.store.close(opened, writer=True, awaits_rename=closes != "leased")
    running.store.link(opened.ino, ROOT_INODE, b"K", who=ONE)
    settle(running.store)
    is_whole(running, b"K", b"K.tmp")
    published = State.RENAMED if closes == "not yet" else State.PUBLISHED
    assert state(running, opened.ino) is published
    if closes == "not yet":
        running.store.close(opened, writer=True)
    running.store.unlink(ROOT_INODE, b"K.tmp")
    is_whole(running, b"K")
    assert state(running, opened.ino) is State.PUBLISHED
    end(running)


def test_a_writer_that_dies_after_its_link_takes_both_names_along(running: Host) -> None:
    opened = create(running)
    running.store.link(opened.ino, ROOT_INODE, b"K", who=ONE)
    write(running.store, opened, b"more", len(BYTES))
    opened.tear()
    running.store.close(opened, writer=True)
    assert names(running) == []
    end(running)


def test_the_file_stays_under_the_name_that_is_left(running: Host) -> None:
    """[hard-links]"""
    store_linked(running)
    assert running.store.unlink(ROOT_INODE, b"K") is None
    is_whole(running, b"K.tmp")
    ino = running.store.lookup(ROOT_INODE, b"K.tmp")
    assert running.store.unlink(ROOT_INODE, b"K.tmp") == ino
    assert names(running) == []
    end(running)


@pytest.mark.parametrize("over", [b"K", b"K.tmp"])
def test_a_rename_over_one_name_leaves_the_other(running: Host, over: bytes) -> None:
    """[hard-links]"""
    linked = store_linked(running)
    other = put(running.store, ROOT_INODE, b"other", b"other")
    assert running.store.rename(ROOT_INODE, b"other", ROOT_INODE, over) is None
    left = b"K.tmp" if over == b"K" else b"K"
    assert leads_to(running, over) == {other}
    assert leads_to(running, left) == {linked}
    assert get(running.store, ROOT_INODE, left) == BYTES
    assert len(names(running)) == 2
    assert not alias_of(running.store.record(linked))
    assert_exact(running)
    end(running)


@pytest.mark.parametrize("over", [b"K", b"K.tmp"])
def test_a_draft_whose_name_another_took_leaves_the_other_name(running: Host, over: bytes) -> None:
    store, linked = running.store, store_linked(running)
    first = create(running, b"L.tmp")
    with pytest.raises(DeadInode):
        store.open(first.ino, writer=True, truncate=True, maker=OTHER)
    fresh = store.lookup(ROOT_INODE, b"L.tmp")
    second = store.open(fresh, writer=True, truncate=True, maker=OTHER)
    store.close(first, writer=True)
    assert store.rename(ROOT_INODE, b"L.tmp", ROOT_INODE, over, who=ONE) is None
    assert leads_to(running, over) == {first.ino}
    left = b"K.tmp" if over == b"K" else b"K"
    assert leads_to(running, left) == {linked}
    assert get(store, ROOT_INODE, left) == BYTES
    assert not alias_of(store.record(linked))
    store.close(second, writer=True)
    assert_exact(running)
    end(running)


@pytest.mark.parametrize("name", [b"K", b"K.tmp"])
def test_either_name_can_be_renamed(running: Host, name: bytes) -> None:
    linked = store_linked(running)
    directory = make_directory(running, b"dir")
    running.store.rename(ROOT_INODE, name, directory, b"moved")
    assert running.store.lookup(directory, b"moved") == linked
    with pytest.raises(NotEmpty):
        running.store.rmdir(ROOT_INODE, b"dir")
    other = b"K" if name == b"K.tmp" else b"K.tmp"
    assert tree(running.store) == {
        b"/dir": "directory",
        b"/dir/moved": BYTES,
        b"/" + other: BYTES,
    }
    assert_exact(running)
    running.store.unlink(directory, b"moved")
    running.store.rmdir(ROOT_INODE, b"dir")
    is_whole(running, other)
    end(running)


def test_a_rename_of_one_name_to_the_other_does_nothing(running: Host) -> None:
    """[rename-same]"""
    store_linked(running)
    for old, new in ((b"K", b"K.tmp"), (b"K.tmp", b"K")):
        assert running.store.rename(ROOT_INODE, old, ROOT_INODE, new) is None
        running.store.exchange(ROOT_INODE, old, ROOT_INODE, new)
        is_whole(running, b"K", b"K.tmp")


@pytest.mark.parametrize("name", [b"K", b"K.tmp"])
def test_either_name_can_be_exchanged(running: Host, name: bytes) -> None:
    linked = store_linked(running)
    other = put(running.store, ROOT_INODE, b"other", b"other")
    running.store.exchange(ROOT_INODE, name, ROOT_INODE, b"other")
    assert leads_to(running, name) == {other}
    assert len(names(running)) == 3
    assert leads_to(running, *{b"K", b"K.tmp", b"other"} - {name}) == {linked}
    assert_exact(running)
    end(running)


def test_what_takes_the_name_of_a_rewritten_block_takes_both(running: Host) -> None:
    linked = store_linked(running)
    reader = running.store.open(linked, writer=False, truncate=False)
    fresh = running.store.supersede(linked, thread=0)
    assert leads_to(running, b"K", b"K.tmp") == {fresh}
    assert running.store.present(linked).size_bytes == len(BYTES)
    running.store.close(reader, writer=False)
    running.store.wait_for_opens(1e9)  # whose OPEN does not come
    assert names(running) == []
    end(running)


def test_an_eviction_takes_both_names(running: Host, kernel: KernelRecorder) -> None:
    """[hard-links]"""
    store_linked(running)
    settle(running.store)
    running.store.evict(1)
    assert names(running) == []
    assert b"K.tmp" in kernel.names
    assert_exact(running)
    end(running)


def test_the_first_name_goes_with_its_linker(running: Host, kernel: KernelRecorder) -> None:
    """[hard-links]"""
    linked = store_linked(running)
    lives = watch(running)
    running.store.end_leases(running.store.now_s())
    is_whole(running, b"K", b"K.tmp")
    lives.end(ONE)
    running.store.end_leases(running.store.now_s())
    is_whole(running, b"K")
    assert kernel.names == [b"K.tmp"]
    assert linked in kernel.inodes
    assert state(running, linked) is State.PUBLISHED
    end(running)


def test_the_first_name_of_a_server_goes_when_its_time_is_over(running: Host) -> None:
    opened = create(running, who=SERVER)
    running.store.close(opened, writer=True)
    running.store.link(opened.ino, ROOT_INODE, b"K", who=SERVER)
    running.store.end_leases(running.store.now_s() + 1)
    is_whole(running, b"K", b"K.tmp")
    running.store.end_leases(running.store.now_s() + 1e9)
    is_whole(running, b"K")
    end(running)


def test_only_its_own_user_links_what_a_server_made(running: Host) -> None:
    """Clients of a server cannot be told apart."""
    opened, _ = running.store.create(ROOT_INODE, b"K.tmp", FILE, 7, 7, SERVER)
    running.store.close(opened, writer=True)
    with pytest.raises(NotPermitted):
        running.store.link(opened.ino, ROOT_INODE, b"K", who=SERVER, uid=8)
    running.store.link(opened.ino, ROOT_INODE, b"K", who=SERVER, uid=7)
    assert leads_to(running, b"K", b"K.tmp") == {opened.ino}


def test_both_names_outlive_a_killed_server_and_a_stop(running: Host) -> None:
    """[hard-links] The linker may live on; then it has yet to remove its first name."""
    store_linked(running)
    for ends in (running.kill, running.stop):
        ends()
        assert running.check().problems == []
        running.start()
        watch(running)
        settle(running.store)
        is_whole(running, b"K", b"K.tmp")
    end(running)


def test_what_a_killed_server_leaves_half_goes_with_both_names(running: Host) -> None:
    opened = create(running)
    running.store.link(opened.ino, ROOT_INODE, b"K", who=ONE)
    write(running.store, opened, b"more", len(BYTES))
    running.kill()
    running.start()
    assert names(running) == []
    assert_exact(running)
    end(running)


def test_after_a_reboot_no_linker_lives(running: Host) -> None:
    store_linked(running)
    running.stop()
    running.pretend_reboot()
    running.start()
    settle(running.store)
    running.store.end_leases(running.store.now_s())
    is_whole(running, b"K")
    end(running)


def refused(running: Host, ino: InodeNo, name: bytes = b"new", who: Maker = ONE) -> KvfsError:
    """Return what a link of *ino* is refused with, which changes nothing."""
    before = tree(running.store)
    with pytest.raises(KvfsError) as caught:
        running.store.link(ino, ROOT_INODE, name, who=who)
    assert tree(running.store) == before
    assert_exact(running)
    return caught.value


def test_a_name_that_is_taken_is_not_replaced(running: Host) -> None:
    """[hard-links] That is why programs link."""
    opened = create(running)
    put(running.store, ROOT_INODE, b"K", b"first")
    assert isinstance(refused(running, opened.ino, b"K"), Exists)
    running.store.close(opened, writer=True)
    assert get(running.store, ROOT_INODE, b"K") == b"first"


def test_more_than_two_names_are_refused(running: Host) -> None:
    """[hard-links]"""
    assert isinstance(refused(running, store_linked(running)), TooManyLinks)


@pytest.mark.parametrize("mode", [DIRECTORY, SYMLINK])
def test_what_is_no_block_is_not_linked(running: Host, mode: int) -> None:
    """[hard-links]"""
    target = b"some one" if mode == SYMLINK else b""  # of as many bytes as an alias has
    ino, _ = running.store.make_node(ROOT_INODE, b"node", mode, 0, 0, target)
    assert isinstance(refused(running, ino), NotPermitted)


def test_what_others_may_use_is_not_linked(running: Host) -> None:
    """[hard-links] Not what was renamed, nor what another process writes, or wrote."""
    opened = create(running)
    assert isinstance(refused(running, opened.ino, who=OTHER), NotPermitted)
    running.store.close(opened, writer=True)
    assert isinstance(refused(running, opened.ino, who=OTHER), NotPermitted)
    running.store.rename(ROOT_INODE, b"K.tmp", ROOT_INODE, b"K", who=ONE)
    assert isinstance(refused(running, opened.ino), NotPermitted)


def test_a_draft_that_cannot_be_whole_is_not_linked(running: Host) -> None:
    opened = create(running)
    opened.spoil()
    assert isinstance(refused(running, opened.ino), NotPermitted)
    running.store.close(opened, writer=True)
    assert names(running) == []


def test_what_lost_its_name_is_not_linked(running: Host) -> None:
    ino = put(running.store, ROOT_INODE, b"old", b"old")
    opened = running.store.open(ino, writer=False, truncate=False)
    running.store.unlink(ROOT_INODE, b"old")
    assert isinstance(refused(running, ino), NotFound)
    running.store.close(opened, writer=False)


def nameless(running: Host) -> Opened:
    """Make a draft as O_TMPFILE does."""
    opened = create(running, b".0.tmp")
    running.store.unlink(ROOT_INODE, b".0.tmp")
    return opened


@pytest.mark.parametrize("writes_on", [False, True])
def test_a_draft_without_a_name_gets_one(running: Host, writes_on: bool) -> None:
    """[open-tmpfile]"""
    opened = nameless(running)
    running.store.set_xattr(opened.ino, b"user.a", b"b")
    running.store.link(opened.ino, ROOT_INODE, b"K", who=ONE)
    is_whole(running, b"K")
    if writes_on:
        write(running.store, opened, BYTES[-10:], len(BYTES) - 10)
    running.store.close(opened, writer=True)
    is_whole(running, b"K")
    assert state(running, opened.ino) is State.PUBLISHED
    assert running.store.xattr(opened.ino, b"user.a") == b"b"
    end(running)


def test_a_draft_without_a_name_gets_it_of_its_maker_alone(running: Host) -> None:
    """[open-tmpfile]"""
    opened = nameless(running)
    assert isinstance(refused(running, opened.ino, who=OTHER), NotPermitted)
    put(running.store, ROOT_INODE, b"K", b"first")
    assert isinstance(refused(running, opened.ino, b"K"), Exists)
    opened.spoil()
    assert isinstance(refused(running, opened.ino), NotPermitted)
    running.store.close(opened, writer=True)
    assert names(running) == [b"K"]
    end(running)


@pytest.mark.parametrize("closed", [False, True])
def test_what_got_its_name_outlives_a_killed_server(running: Host, closed: bool) -> None:
    """[open-tmpfile]"""
    opened = nameless(running)
    running.store.link(opened.ino, ROOT_INODE, b"K", who=ONE)
    if closed:
        running.store.close(opened, writer=True)
    running.kill()
    running.start()
    is_whole(running, b"K")
    end(running)
