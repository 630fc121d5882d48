"""Second tries of truncating opens: what a refused OPEN leaves behind must not hit later ones."""

import errno
import stat
from collections.abc import Iterator
from typing import NamedTuple

import pytest

from kvfs.core.errors import DeadInode, NotFound
from kvfs.core.lifecycle import State
from kvfs.core.types import ROOT_INODE, InodeNo, InodeRecord
from kvfs.machine.processes import Maker
from tests.support.store.driven import Opened
from tests.support.store.life_model import Lives
from tests.support.store.stores import (
    FILE,
    MIB,
    Host,
    assert_exact,
    get,
    host,
    put,
    settle,
    tree,
    write,
)

TMP = b"K.tmp"


def refuse(*_: object, **__: object) -> None:
    """Stand for a system call that fails."""
    raise OSError(errno.EIO, "no time")


def anything(_record: InodeRecord, *, reads: bool) -> bool:
    """Stand for modes that let everybody in."""
    del reads
    return True


class Client:
    """A process of one thread; its calls are the messages that the kernel makes of them."""

    def __init__(self, running: Host, tid: int) -> None:
        self.store = running.store
        self.tid = tid
        self.maker = Maker(tid, tid)
        running.store.processes.begin(self.maker)  # type: ignore[attr-defined]

    def look(self, name: bytes = TMP) -> InodeNo:
        """LOOKUP."""
        try:
            ino = self.store.lookup(ROOT_INODE, name)
        except NotFound:
            self.store.looked_in_vain(self.tid)
            raise
        return self.store.looked_up(ino, self.tid, self.maker)

    def look_where_it_may(self, name: bytes) -> InodeNo:
        """LOOKUP by one whom every file lets write."""
        ino = self.store.lookup(ROOT_INODE, name)
        return self.store.looked_up(ino, self.tid, self.maker, anything)

    def open(self, ino: InodeNo) -> Opened:
        """OPEN with O_TRUNC; raises DeadInode."""
        return self.store.open(ino, writer=True, truncate=True, maker=self.maker, thread=self.tid)

    def refused(self, ino: InodeNo) -> None:
        """OPEN that is answered ESTALE."""
        with pytest.raises(DeadInode):
            self.open(ino)


class Race(NamedTuple):
    """One draft's name, which two others took one after the other; *slow* has not opened yet."""

    first: Client
    draft: Opened
    slow: Client
    promised: InodeNo
    quick: Client
    quicks: Opened


def lose_the_name(running: Host) -> Race:
    """Let *slow* be refused and look, and *quick* take the name before *slow* opens."""
    first, slow, quick = (Client(running, tid) for tid in (100, 101, 102))
    draft, _ = running.store.create(ROOT_INODE, TMP, FILE, 0, 0, first.maker)
    slow.refused(draft.ino)
    promised = slow.look()
    quick.refused(promised)
    return Race(first, draft, slow, promised, quick, quick.open(quick.look()))


@pytest.fixture
def running() -> Iterator[Host]:
    with host() as made:
        made.start()
        made.store.watch_processes(Lives())
        yield made


def test_who_loses_the_name_between_two_looks_writes_his_own_draft(running: Host) -> None:
    """The kernel looks twice in a second try, and has no third for an OPEN of the other's.

    One open in thirty failed with ESTALE where two writers rewrote one name in place.
    """
    store, race = running.store, lose_the_name(running)
    assert race.slow.look() == race.promised
    slows = race.slow.open(race.promised)
    write(store, race.quicks, b"quick")
    write(store, slows, b"slow")
    store.close(slows, writer=True)
    store.close(race.quicks, writer=True)
    store.rename(ROOT_INODE, TMP, ROOT_INODE, b"K", replace=True, who=race.quick.maker)
    race.slow.refused(race.quicks.ino)  # the kernel's name for it was older than the rename
    assert get(store, ROOT_INODE, b"K") == b"quick"
    store.close(race.draft, writer=True)


def test_only_its_own_second_try_finds_a_lost_draft(running: Host) -> None:
    """Other threads, and the same one once it has it open, are led to who took the name."""
    store, race = running.store, lose_the_name(running)
    assert race.first.look() == race.quicks.ino
    assert race.slow.look() == race.promised
    slows = race.slow.open(race.promised)
    assert race.slow.look() == race.quicks.ino
    for opened in (slows, race.quicks, race.draft):
        store.close(opened, writer=True)


def test_a_name_that_comes_and_goes_between_two_looks(running: Host) -> None:
    """The kernel looks twice in a second try: for what it knew, then for what there is."""
    store = running.store
    first, slow, quick = (Client(running, tid) for tid in (100, 101, 102))
    draft, _ = store.create(ROOT_INODE, TMP, FILE, 0, 0, first.maker)
    slow.refused(draft.ino)
    store.rename(ROOT_INODE, TMP, ROOT_INODE, b"L", replace=True, who=first.maker)
    with pytest.raises(NotFound):
        slow.look()
    writing, _ = store.create(ROOT_INODE, TMP, FILE, 0, 0, quick.maker)
    slow.refused(slow.look())
    write(store, writing, b"whole")
    store.close(writing, writer=True)
    store.rename(ROOT_INODE, TMP, ROOT_INODE, b"K", replace=True, who=quick.maker)
    slow.refused(writing.ino)
    assert get(store, ROOT_INODE, b"K") == b"whole"
    store.close(draft, writer=True)


@pytest.mark.parametrize("unlinked", [False, True])
def test_a_draft_is_emptied_by_its_number(running: Host, unlinked: bool) -> None:
    """``echo >/dev/fd/3``: no LOOKUP leads to another one; ESTALE, or its old bytes stayed."""
    store = running.store
    client = Client(running, 100)
    draft, _ = store.create(ROOT_INODE, TMP, FILE, 0, 0, client.maker)
    write(store, draft, b"bytes")
    if unlinked:
        store.unlink(ROOT_INODE, TMP)
    client.refused(draft.ino)
    assert client.open(draft.ino) is draft
    assert store.present(draft.ino).size_bytes == 0
    write(store, draft, b"new")
    for _ in range(2):
        store.close(draft, writer=True)
    settle(store)
    assert tree(store) == ({} if unlinked else {b"/" + TMP: b"new"})
    assert_exact(running)


def publish(running: Host, who: Client, data: bytes) -> None:
    """Store K as most connectors do."""
    store = running.store
    draft, _ = store.create(ROOT_INODE, TMP, FILE, 0, 0, who.maker)
    write(store, draft, data)
    store.close(draft, writer=True)
    store.rename(ROOT_INODE, TMP, ROOT_INODE, b"K", replace=True, who=who.maker)


@pytest.mark.parametrize("unlinks", [False, True])
@pytest.mark.parametrize("looks", [1, 2])
def test_a_fresh_inode_that_loses_its_name_before_its_open(
    running: Host, looks: int, unlinks: bool
) -> None:
    """Who opens it came just before the rename or the unlink: nobody finds what he writes.

    One open in ten failed with ESTALE where another process renamed over the name.
    """
    store = running.store
    slow, quick = (Client(running, tid) for tid in (100, 101))
    publish(running, quick, b"one")
    slow.refused(slow.look(b"K"))
    promised = slow.look(b"K")
    if looks == 2:
        assert slow.look(b"K") == promised
    if unlinks:
        store.unlink(ROOT_INODE, b"K")
    else:
        publish(running, quick, b"two")
        if looks == 1:
            assert slow.look(b"K") == promised
    opened = slow.open(promised)
    write(store, opened, b"three")
    store.close(opened, writer=True)
    left = {} if unlinks else {b"/K": b"two"}
    assert tree(store) == left
    store.wait_for_opens(61)
    settle(store)
    assert tree(store) == left
    assert_exact(running)
    assert not running.extent(promised).exists()


def test_a_fresh_inode_that_is_renamed_before_its_open_is_no_empty_block(running: Host) -> None:
    """Others see the old version under the new name, until the new one is whole.

    Such a rename published the inode without a byte, and all saw it grow.
    """
    store = running.store
    writer, mover = (Client(running, tid) for tid in (100, 101))
    put(store, ROOT_INODE, TMP, b"whole")
    store.rename(ROOT_INODE, TMP, ROOT_INODE, b"K", replace=True)
    old = writer.look(b"K")
    writer.refused(old)
    promised = writer.look(b"K")
    store.rename(ROOT_INODE, b"K", ROOT_INODE, b"L", replace=True, who=mover.maker)
    record = store.record(promised)
    assert record.state == State.DRAFT
    assert store.seen(promised, record, mover.maker) == old
    opened = writer.open(promised)
    write(store, opened, b"new")
    assert store.seen(promised, store.record(promised), mover.maker) == old
    store.close(opened, writer=True)
    assert get(store, ROOT_INODE, b"L") == b"new"
    settle(store)
    assert_exact(running)


def test_a_fresh_inode_that_cannot_be_opened_is_no_empty_block(
    running: Host, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The old version went with its name: a miss, and no bytes that nobody wrote."""
    store = running.store
    client = Client(running, 100)
    put(store, ROOT_INODE, b"K", b"whole")
    client.refused(client.look(b"K"))
    promised = client.look(b"K")
    with monkeypatch.context() as failing:
        failing.setattr(store.syscalls, "utime", refuse)
        with pytest.raises(OSError, match="no time"):
            client.open(promised)
    settle(store)
    assert tree(store) == {}
    assert_exact(running)


@pytest.mark.parametrize("reads", [False, True])
def test_a_fresh_inode_that_nobody_opens_gives_its_reserve_back(running: Host, reads: bool) -> None:
    """At once, also where a reader has it open, or it is kept for a moment."""
    store = running.store
    client = Client(running, 100)
    for number in range(4):
        put(store, ROOT_INODE, b"%d" % number, b"x" * MIB)
    settle(store)
    client.refused(client.look(b"0"))
    promised = client.look(b"0")
    assert running.allocated_bytes(promised) >= MIB
    opened = store.open_to_read(promised) if reads else None
    store.wait_for_opens(10)
    assert_exact(running)
    if opened is not None:
        store.close(opened, writer=False)
    settle(store)
    assert_exact(running)


@pytest.mark.usefixtures("caplog")
@pytest.mark.parametrize("comes", [True, False], ids=["comes", "does not come"])
def test_a_reader_before_the_writer_leaves_the_fresh_draft_unfinished(
    running: Host, comes: bool
) -> None:
    """Another thread of the writer's process sees the draft, between its LOOKUP and its OPEN."""
    store = running.store
    client = Client(running, 100)
    ino = put(store, ROOT_INODE, b"K", b"old" * 3000)
    client.refused(ino)
    fresh = client.look(b"K")
    assert store.seen(fresh, store.record(fresh), client.maker) == fresh
    store.close(store.open_to_read(fresh), writer=False)
    if comes:
        write(store, client.open(fresh), b"new" * 1000)
    put(store, ROOT_INODE, b"other", b"")  # which writes the list of the unfinished
    running.kill()
    assert tree(running.start()) == {b"/other": b""}
    settle(running.store)
    assert_exact(running)


def test_a_fresh_draft_that_nobody_opens_does_not_stay_listed(running: Host) -> None:
    store = running.store
    client = Client(running, 100)
    ino = put(store, ROOT_INODE, b"K", b"old" * 3000)
    client.refused(ino)
    fresh = client.look(b"K")
    assert fresh in store.unfinished()
    store.wait_for_opens(60.0)
    assert not store.unfinished()


@pytest.mark.parametrize("may", [False, True], ids=["may not", "may"])
def test_a_second_try_that_ends_at_another_file_empties_nothing(running: Host, may: bool) -> None:
    """A link was put in place of the refused one: who owns one file emptied those of others.

    It is refused even where it may write: the name is not the one that was asked for.
    """
    store = running.store
    client = Client(running, 100)
    put(store, ROOT_INODE, b"victim", b"theirs")
    client.refused(put(store, ROOT_INODE, b"own", b"mine"))
    store.rename(ROOT_INODE, b"own", ROOT_INODE, b"aside", replace=True)
    store.make_node(ROOT_INODE, b"own", stat.S_IFLNK | 0o777, 0, 0, b"victim")
    client.look(b"own")
    (client.look_where_it_may if may else client.look)(b"victim")
    client.look(b"aside")
    assert get(store, ROOT_INODE, b"victim") == b"theirs"
    assert get(store, ROOT_INODE, b"aside") == b"mine"


@pytest.mark.parametrize("may", [False, True], ids=["may not", "may"])
def test_a_second_try_empties_only_what_its_thread_may_write(running: Host, may: bool) -> None:
    """Another's file has the name by now: the kernel checks, but behind this LOOKUP."""
    store = running.store
    client = Client(running, 100)
    client.refused(put(store, ROOT_INODE, b"K", b"mine"))
    theirs = put(store, ROOT_INODE, b"T", b"theirs")
    store.rename(ROOT_INODE, b"T", ROOT_INODE, b"K", replace=True)
    led_to = (client.look_where_it_may if may else client.look)(b"K")
    assert (led_to != theirs) == may
    if not may:
        assert get(store, ROOT_INODE, b"K") == b"theirs"


def test_a_second_try_that_failed_leaves_the_next_open_its_own(running: Host) -> None:
    """What the kernel refused behind the LOOKUP has no OPEN: the next one is another call's first.

    It was taken for the end of the second try, got no second one, and the caller ESTALE.
    """
    store = running.store
    client = Client(running, 100)
    client.refused(put(store, ROOT_INODE, b"K", b"mine"))
    store.unlink(ROOT_INODE, b"K")
    with pytest.raises(NotFound):
        client.look(b"K")
    client.refused(put(store, ROOT_INODE, b"L", b"other"))
    opened = client.open(client.look(b"L"))
    write(store, opened, b"new")
    store.close(opened, writer=True)
    assert get(store, ROOT_INODE, b"L") == b"new"


def test_who_looked_a_name_up_just_before_its_rename_means_that_name(running: Host) -> None:
    """Of two writers of one temporary name each renames its own, however they meet."""
    store = running.store
    first, slow = (Client(running, tid) for tid in (100, 101))
    draft, _ = store.create(ROOT_INODE, TMP, FILE, 0, 0, first.maker)
    known = slow.look()
    store.rename(ROOT_INODE, TMP, ROOT_INODE, b"K", replace=True, who=first.maker)
    again, _ = store.create(ROOT_INODE, TMP, FILE, 0, 0, first.maker)
    slow.refused(known)
    slows = slow.open(slow.look_where_it_may(TMP))
    assert slows is not again
    for opened in (draft, again, slows):
        store.close(opened, writer=True)
    settle(store)
    assert_exact(running)
