"""Second tries of truncating opens: what a refused OPEN leaves behind must not hit later ones."""

import errno
from collections.abc import Iterator

import pytest

from kvfs.errors import DeadInode, NotFound
from kvfs.makers import Maker
from kvfs.open_inodes import OpenInode
from kvfs.types import ROOT_INODE, InodeNo
from tests.support.life_model import Lives
from tests.support.stores import (
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


class Client:
    """A process of one thread; its calls are the messages that the kernel makes of them."""

    def __init__(self, running: Host, tid: int) -> None:
        self.store = running.store
        self.tid = tid
        self.maker = Maker(tid, tid)
        running.store.pool.holdings.makers.begin(self.maker)  # type: ignore[attr-defined]

    def look(self, name: bytes = TMP) -> InodeNo:
        """LOOKUP."""
        try:
            ino = self.store.namespace.lookup(ROOT_INODE, name)
        except NotFound:
            self.store.blocks.superseding.found_nothing(self.tid)
            raise
        return self.store.blocks.superseding.looked_up(ino, self.tid, self.maker)

    def open(self, ino: InodeNo) -> OpenInode:
        """OPEN with O_TRUNC; raises DeadInode."""
        return self.store.blocks.open(
            ino, writer=True, truncate=True, maker=self.maker, thread=self.tid
        )

    def refused(self, ino: InodeNo) -> None:
        """OPEN that is answered ESTALE."""
        with pytest.raises(DeadInode):
            self.open(ino)


@pytest.fixture
def running() -> Iterator[Host]:
    with host() as made:
        made.start()
        made.store.pool.holdings.makers = Lives()
        yield made


def test_who_loses_the_name_between_two_looks_writes_his_own_draft(running: Host) -> None:
    """The kernel looks twice in a second try, and has no third for an OPEN of the other's.

    One open in thirty failed with ESTALE where two writers rewrote one name in place.
    """
    store = running.store
    first, slow, quick = (Client(running, tid) for tid in (100, 101, 102))
    draft, _ = store.blocks.create(ROOT_INODE, TMP, FILE, 0, 0, first.maker)
    slow.refused(draft.ino)
    promised = slow.look()
    quick.refused(promised)
    taken = quick.look()
    quicks = quick.open(taken)
    assert slow.look() == promised
    slows = slow.open(promised)
    write(store, quicks, b"quick")
    write(store, slows, b"slow")
    store.blocks.close(slows, writer=True)
    store.blocks.close(quicks, writer=True)
    store.rename(ROOT_INODE, TMP, ROOT_INODE, b"K", replace=True, who=quick.maker)
    slow.refused(taken)  # the kernel's name for it was older than the rename
    assert get(store, ROOT_INODE, b"K") == b"quick"
    store.blocks.close(draft, writer=True)


def test_only_its_own_second_try_finds_a_lost_draft(running: Host) -> None:
    """Other threads, and the same one once it has it open, are led to who took the name."""
    store = running.store
    first, slow, quick = (Client(running, tid) for tid in (100, 101, 102))
    draft, _ = store.blocks.create(ROOT_INODE, TMP, FILE, 0, 0, first.maker)
    slow.refused(draft.ino)
    promised = slow.look()
    quick.refused(promised)
    taken = quick.look()
    quicks = quick.open(taken)
    assert first.look() == taken
    assert slow.look() == promised
    slows = slow.open(promised)
    assert slow.look() == taken
    for opened in (slows, quicks, draft):
        store.blocks.close(opened, writer=True)


def test_a_name_that_comes_and_goes_between_two_looks(running: Host) -> None:
    """The kernel looks twice in a second try: for what it knew, then for what there is."""
    store = running.store
    first, slow, quick = (Client(running, tid) for tid in (100, 101, 102))
    draft, _ = store.blocks.create(ROOT_INODE, TMP, FILE, 0, 0, first.maker)
    slow.refused(draft.ino)
    store.rename(ROOT_INODE, TMP, ROOT_INODE, b"L", replace=True, who=first.maker)
    with pytest.raises(NotFound):
        slow.look()
    writing, _ = store.blocks.create(ROOT_INODE, TMP, FILE, 0, 0, quick.maker)
    slow.refused(slow.look())
    write(store, writing, b"whole")
    store.blocks.close(writing, writer=True)
    store.rename(ROOT_INODE, TMP, ROOT_INODE, b"K", replace=True, who=quick.maker)
    slow.refused(writing.ino)
    assert get(store, ROOT_INODE, b"K") == b"whole"
    store.blocks.close(draft, writer=True)


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
        failing.setattr(store.pool.syscalls, "utime", refuse)
        with pytest.raises(OSError, match="no time"):
            client.open(promised)
    settle(store)
    assert tree(store) == {}
    assert_exact(running)


@pytest.mark.parametrize("reads", [False, True])
def test_a_fresh_inode_that_nobody_opens_gives_its_reserve_back(running: Host, reads: bool) -> None:
    """At once, also where a reader has it open, or its grave keeps it for a moment."""
    store = running.store
    client = Client(running, 100)
    for number in range(4):
        put(store, ROOT_INODE, b"%d" % number, b"x" * MIB)
    settle(store)
    client.refused(client.look(b"0"))
    promised = client.look(b"0")
    assert running.allocated_bytes(promised) >= MIB
    opened = store.blocks.open_to_read(promised) if reads else None
    store.blocks.superseding.tick(store.pool.monotonic_s() + 10)
    assert_exact(running)
    if opened is not None:
        store.blocks.close(opened, writer=False)
    settle(store)
    assert_exact(running)
