"""The index's log while a copy of it is written, or rows are lost: what it says stays one state."""

import contextlib
import dataclasses
import errno
import os
import shutil
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvfs.core.records import inode_key
from kvfs.core.types import ROOT_INODE
from kvfs.storage.row_log import found_copies, logged_batches
from kvfs.storage.syscalls import Syscalls
from tests.support.clients.stepping import until
from tests.support.store.driven import Driven
from tests.support.store.driven_faults import set_limit
from tests.support.store.stores import FILE, Host, host, put, settle, tree, write

pytestmark = pytest.mark.usefixtures("caplog")

DATA = b"bytes" * 1000


class HeldCopies(Syscalls):
    """A device that keeps the thread waiting that writes copies of the index, once it is told to.

    And that may refuse what the thread writes that writes the rows.
    """

    def __init__(self) -> None:
        self.may_copy, self.waits = threading.Event(), threading.Event()
        self.may_copy.set()
        self.refuses_rows = self.refuses_copies = False

    def ftruncate(self, fd: int, size_bytes: int) -> None:
        """Wait first, in that thread; a copy begins with this."""
        if threading.current_thread().name == "kvfs-copies":
            self.waits.set()
            assert self.may_copy.wait(60)
            if self.refuses_copies:
                raise OSError(errno.EIO, os.strerror(errno.EIO))
        super().ftruncate(fd, size_bytes)

    def fdatasync(self, fd: int) -> None:  # type: ignore[override]
        """Refuse the batch, if it is to."""
        if self.refuses_rows and threading.current_thread().name == "kvfs-log":
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        super().fdatasync(fd)


@pytest.fixture
def device() -> Iterator[HeldCopies]:
    made = HeldCopies()
    yield made
    made.may_copy.set()


@pytest.fixture
def logged(device: HeldCopies) -> Iterator[Host]:
    """A host whose store logs its index when a test says so, and which has logged all so far."""
    with host() as made:
        made.settings = dataclasses.replace(made.settings, index_log_s=3600.0)
        made.start(device)
        made.store.log_index()
        with contextlib.ExitStack() as stack:
            stack.callback(device.may_copy.set)
            yield made


def said(store: Driven) -> dict[str, float | None]:
    return dict(store.describe()["index_log"])


def log_now(store: Driven) -> None:
    """Have what waits written to the log, as far as it takes it."""
    before = said(store)
    store.log_due()
    until(
        lambda: (
            store.tick()
            or said(store)["bytes"] != before["bytes"]
            or said(store)["failures"] != before["failures"]
        ),
        "a batch",
    )


def begin_copy(store: Driven, device: HeldCopies) -> None:
    device.may_copy.clear()
    device.waits.clear()
    store.log_due()
    until(lambda: store.tick() or device.waits.is_set(), "a copy begins")


def test_rows_that_were_dropped_are_not_skipped_by_those_that_follow(
    logged: Host, device: HeldCopies
) -> None:
    """The copy that is to have them is not whole when the power goes: their blocks were lost."""
    store = logged.store
    early = [b"early %d" % number for number in range(20)]
    for name in early:
        put(store, ROOT_INODE, name, DATA)
    store.lose_unlogged_rows()
    begin_copy(store, device)
    put(store, ROOT_INODE, b"late", DATA)
    log_now(store)
    settle(store)
    expected = tree(store)
    assert len(expected) == 21
    device.refuses_copies = True
    device.may_copy.set()
    logged.kill()
    logged.pretend_reboot()
    store = logged.start()
    settle(store)
    assert tree(store) == expected


def test_a_batch_that_fails_during_a_copy_leaves_a_gap_behind_it(
    logged: Host, device: HeldCopies
) -> None:
    store = logged.store
    put(store, ROOT_INODE, b"a", DATA)
    store.lose_unlogged_rows()
    copies = said(store)["copies"] or 0
    begin_copy(store, device)
    put(store, ROOT_INODE, b"b", DATA)
    device.refuses_rows = True
    log_now(store)
    assert said(store)["failures"] == 2
    device.refuses_rows = False
    device.may_copy.set()
    until(lambda: store.tick() or (said(store)["copies"] or 0) > copies, "the copy is whole")
    assert said(store)["behind_s"] is None, "rows are lost that are younger than it"
    store.log_due()
    until(lambda: store.tick() or said(store)["behind_s"] is not None, "the next one has them")
    assert not store.holds_index


def test_a_batch_has_all_rows_of_its_moment(logged: Host, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a draft, too, whose rows nothing had to commit so far; while they cannot be, none is."""
    store = logged.store
    put(store, ROOT_INODE, b"block", DATA)
    draft, _ = store.create(ROOT_INODE, b"draft", FILE, 0, 0)
    write(store, draft, DATA)

    def refuse(_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as full:
        store.fail_commit(full, refuse)
        store.log_due()
        store.tick()
        assert not store.logs_rows
    log_now(store)
    log_fd = os.open(logged.path / "log", os.O_RDONLY)
    try:
        last = max(
            (batch for number in range(8) for batch in logged_batches(log_fd, Syscalls(), number)),
            key=lambda batch: batch.moment.number,
        )
    finally:
        os.close(log_fd)
    assert draft.ino in last.moment.pending
    assert inode_key(draft.ino) in last.rows
    store.close(draft, writer=True)


def test_a_copy_is_of_the_moment_at_which_it_was_begun(logged: Host, device: HeldCopies) -> None:
    """What ends while it is written is in the batches behind it."""
    store = logged.store
    draft, _ = store.create(ROOT_INODE, b"draft", FILE, 0, 0)
    write(store, draft, DATA)
    store.lose_unlogged_rows()
    copies = said(store)["copies"] or 0
    begin_copy(store, device)
    store.close(draft, writer=True)
    later = put(store, ROOT_INODE, b"later", DATA)
    log_now(store)
    device.may_copy.set()
    until(lambda: store.tick() or (said(store)["copies"] or 0) > copies, "the copy is whole")
    log_fd = os.open(logged.path / "log", os.O_RDONLY)
    try:
        moments = [copy.moment for copy in found_copies(log_fd, Syscalls())]
        newest = max(moments, key=lambda moment: moment.number)
        behind = list(logged_batches(log_fd, Syscalls(), newest.number))
    finally:
        os.close(log_fd)
    assert draft.ino in newest.pending
    assert newest.young <= later
    assert any(inode_key(later) in batch.rows for batch in behind)
    settle(store)
    expected = tree(store)
    assert set(expected) == {b"/draft", b"/later"}
    logged.kill()
    logged.pretend_reboot()
    store = logged.start()
    settle(store)
    assert tree(store) == expected


class HeldBatches(HeldCopies):
    """And whose drive 0 keeps the thread waiting that writes its rows, once it is told to."""

    def __init__(self, drive: Path) -> None:
        super().__init__()
        self.may_log, self.logs = threading.Event(), threading.Event()
        self.may_log.set()
        self._drive = drive

    def fdatasync(self, fd: int) -> None:  # type: ignore[override]
        """Wait first."""
        on_drive = Path(os.readlink(f"/proc/self/fd/{fd}")).is_relative_to(self._drive)
        if on_drive and threading.current_thread().name == "kvfs-log":
            if not self.may_log.is_set():
                self.logs.set()
            assert self.may_log.wait(60)
        super().fdatasync(fd)


def test_no_copy_begins_while_batches_wait_for_the_drive(monkeypatch: pytest.MonkeyPatch) -> None:
    """They would begin a file of a number that the copy has, and it would take the file with it.

    And with it what is logged in that file later.
    """
    with host(others_bytes=[64 << 20]) as made:
        made.settings = dataclasses.replace(made.settings, index_log_s=3600.0)
        device = HeldBatches(made.drives[0])
        store = made.start(device)
        store.log_index()
        copied_bytes = max(path.stat().st_size for path in made.path.glob("log/copy.*"))
        for number in range(1000):
            put(store, ROOT_INODE, b"%d" % number, b"x" * 100)
            if number % 50 == 0:
                store.log_index()
                if (said(store)["bytes"] or 0) > copied_bytes:
                    break
        copies = said(store)["copies"] or 0
        device.may_log.clear()
        device.may_copy.clear()
        for name in (b"under way", b"waits"):
            put(store, ROOT_INODE, name, DATA)
            store.log_batch_due()
            store.tick()
            until(device.logs.is_set, "drive 0 is at the first of them")
            until(lambda: store.tick() or not store.logs_on(1), "drive 1 has it")
        set_limit(monkeypatch, "log that is copied", 1)
        store.log_due()
        store.tick()
        device.may_log.set()
        until(lambda: store.tick() or not store.logs_rows, "drive 0 has both")
        device.may_copy.set()
        store.log_due()
        until(lambda: store.tick() or (said(store)["copies"] or 0) > copies, "a copy")
        assert (said(store)["bytes"] or 0) < copied_bytes, "no other copy is due so soon"
        put(store, ROOT_INODE, b"later", DATA)
        settle(store)
        store.log_index()
        expected = tree(store)
        shutil.rmtree(made.drives[1] / "log")
        made.kill()
        made.pretend_reboot()
        store = made.start()
        assert store.describe()["reconcile"]["entered"] == 0
        assert tree(store) == expected


@pytest.mark.parametrize("opened_as", ["draft", "slab", "rewrite", "renamed", "ready"])
def test_what_is_about_to_be_stored_at_a_moment_is_found_behind_it(
    logged: Host, opened_as: str
) -> None:
    """Its number is older than the moment, and its name may be younger: at the first request."""
    store = logged.store
    if opened_as == "ready":
        for number in range(4):  # the next ones will be as large
            put(store, ROOT_INODE, b"%d" % number, DATA)
        settle(store)
        store.run_all()
        assert list(store.ready())
        store.log_last()
        opened, _ = store.create(ROOT_INODE, b"K.tmp", FILE, 0, 0)
    elif opened_as in ("slab", "rewrite"):
        ino = put(store, ROOT_INODE, b"K.tmp", b"old")
        if opened_as == "slab":
            store.truncate(ino, 9000)
        settle(store)
        opened = store.open(ino, writer=True, truncate=False)
        store.log_last()
    else:
        opened, _ = store.create(ROOT_INODE, b"K.tmp", FILE, 0, 0)
        if opened_as == "renamed":
            store.rename(ROOT_INODE, b"K.tmp", ROOT_INODE, b"K")
        store.log_last()
    write(store, opened, DATA)
    store.close(opened, writer=True)
    if opened_as != "renamed":
        store.rename(ROOT_INODE, b"K.tmp", ROOT_INODE, b"K")
    settle(store)
    expected = tree(store)
    logged.kill()
    logged.pretend_reboot()
    store = logged.start()
    assert store.lookup(ROOT_INODE, b"K") == opened.ino
    assert tree(store) == expected
    settle(store)
    assert tree(store) == expected
