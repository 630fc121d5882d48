"""The index's log and copies on the device: what is whole of them counts, and a gap ends them."""

import contextlib
import dataclasses
import errno
import itertools
import os
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import lmdb
import pytest

from kvfs.core.errors import NotFound
from kvfs.core.log_records import Batch, Moment, batch_bytes
from kvfs.core.pool_layout import parse_log_file_name
from kvfs.core.types import ROOT_INODE, InodeNo
from kvfs.storage.index_transaction import UnloggedRows
from kvfs.storage.row_log import HeldIndex, forget_log, logged_batches, write_copy
from kvfs.storage.syscalls import Syscalls
from tests.support.clients.stepping import until
from tests.support.devices.failing_syscalls import FailingSyscalls
from tests.support.store.driven import Driven
from tests.support.store.driven_faults import set_limit
from tests.support.store.stores import Host, host, put, settle, tree

pytestmark = pytest.mark.usefixtures("caplog")


@contextlib.contextmanager
def logged() -> Iterator[Host]:
    """Yield a host whose store logs its index: ``log_index`` is a batch, and nothing else is."""
    with host() as made:
        made.settings = dataclasses.replace(made.settings, index_log_s=3600.0)
        made.start()
        yield made


def log_file(running: Host) -> Path:
    (path,) = (running.path / "log").glob("rows.*")
    return path


def batches(running: Host) -> list[Batch]:
    log_fd = os.open(running.path / "log", os.O_RDONLY)
    try:
        first = parse_log_file_name(log_file(running).name)
        assert first is not None
        return list(logged_batches(log_fd, Syscalls(), first - 1))
    finally:
        os.close(log_fd)


class InOrder(Syscalls):
    """Notes the calls that change the log, or make it durable, in their order."""

    def __init__(self, log_fd: int) -> None:
        self.calls: list[str] = []
        self._log_fd = log_fd

    def _note(self, call: str, fd: int) -> None:
        what = "directory" if os.path.samestat(os.fstat(fd), os.fstat(self._log_fd)) else "file"
        self.calls.append(f"{call} {what}")

    def fsync(self, fd: int) -> None:  # type: ignore[override]
        """Note it: after it the device has the bytes, or the names."""
        self._note("fsync", fd)
        super().fsync(fd)

    def ftruncate(self, fd: int, size_bytes: int) -> None:
        """Note it: what a file said until now is to be gone."""
        self._note("cut", fd)
        super().ftruncate(fd, size_bytes)

    def pwrite_all(self, fd: int, raw: bytes, offset_bytes: int) -> None:
        """Note it."""
        self._note("write", fd)
        super().pwrite_all(fd, raw, offset_bytes)

    def unlink(self, path: str, *, dir_fd: int | None = None) -> None:  # type: ignore[override]
        """Note which file goes."""
        self.calls.append(f"unlink {path.split('.')[0]}")
        super().unlink(path, dir_fd=dir_fd)


@contextlib.contextmanager
def log_in_order() -> Iterator[tuple[Host, int, InOrder]]:
    """Yield a pool that nobody uses, the fd of its log, and what notes the calls."""
    with logged() as running:
        put(running.store, ROOT_INODE, b"block", b"x" * 3000)
        settle(running.store)
        for _ in range(2):  # so that there are two copies, and rows behind the newer one
            running.store.log_index()
            running.kill()
            running.start()
        running.store.log_index()
        put(running.store, ROOT_INODE, b"later", b"x" * 3000)
        running.store.log_index()
        running.kill()
        log_fd = os.open(running.path / "log", os.O_RDONLY)
        try:
            yield running, log_fd, InOrder(log_fd)
        finally:
            os.close(log_fd)


def test_the_end_of_the_copy_before_is_gone_durably_before_the_first_byte_of_the_next() -> None:
    """A power loss between two bytes would leave an end that vouches for both copies mixed."""
    with log_in_order() as (running, log_fd, calls):
        with lmdb.open(str(running.index_path().parent), lock=False) as env:
            held = HeldIndex(env)
            write_copy(log_fd, calls, held, Moment(99, InodeNo(1 << 20), ()), paced=False)
            held.end()
        first = calls.calls.index("write file")
        assert calls.calls[:first] == ["cut file", "fsync file", "fsync directory"]
        assert calls.calls[-2:] == ["write file", "fsync file"], "its own end is durable, and last"


def test_copies_are_forgotten_durably_before_the_rows_behind_them() -> None:
    """A copy that a power loss leaves alone would be an index of long ago."""
    with log_in_order() as (running, _, calls):
        pool_fd = os.open(running.path, os.O_RDONLY)
        try:
            forget_log([pool_fd], calls)
        finally:
            os.close(pool_fd)
        assert list(dict.fromkeys(calls.calls)) == ["unlink copy", "fsync directory", "unlink rows"]
        assert calls.calls[-1] == "fsync directory"
        last_copy = len(calls.calls) - 1 - calls.calls[::-1].index("unlink copy")
        assert calls.calls[last_copy + 1] == "fsync directory"


def test_a_log_that_is_torn_at_any_byte_ends_with_what_is_whole() -> None:
    with logged() as running:
        store = running.store
        store.log_index()
        for name in (b"1", b"2", b"3", b"4"):
            put(store, ROOT_INODE, name, name)
            store.log_index()
        running.kill()
        raw, whole = log_file(running).read_bytes(), batches(running)
        assert len(whole) == 4
        ends = [0]
        while length_bytes := batch_bytes(raw[ends[-1] :]):
            ends.append(ends[-1] + length_bytes)
        assert len(ends) == 5
        for at in range(ends[1], ends[4]):
            left = sum(end <= at for end in ends) - 1
            for torn in (raw[:at], raw[:at] + bytes(len(raw) - at), raw[:at] + b"\xff" * 64):
                log_file(running).write_bytes(torn)
                found = batches(running)
                assert found == whole[:left] or (found == whole[: left + 1] and torn[at:])
        log_file(running).write_bytes(raw[: ends[3] + 5])
        running.pretend_reboot()
        store = running.start()
        assert store.describe()["reconcile"]["entered"] == 0
        with pytest.raises(NotFound):  # its row was torn, and its bytes are not proven
            store.lookup(ROOT_INODE, b"4")
        settle(store)
        running.stop()
        assert running.check().problems == []


@pytest.mark.parametrize("damaged", [["copy.0"], ["copy.1"], ["copy.0", "copy.1"]])
def test_a_copy_that_is_damaged_is_not_believed(damaged: list[str]) -> None:
    with logged() as running:
        for number in range(3):  # each start after a kill begins with a copy
            put(running.store, ROOT_INODE, b"%d" % number, b"%d" % number * 3000)
            settle(running.store)
            running.store.log_index()
            running.kill()
            running.start()
        running.store.log_index()
        expected = tree(running.store)
        running.kill()
        for name in damaged:
            with (running.path / "log" / name).open("r+b") as file:
                file.seek(5000)
                file.write(b"\xa5")
        running.pretend_reboot()
        store = running.start()
        assert tree(store) == expected
        settle(store)
        assert tree(store) == expected
        running.stop()
        assert running.check().problems == []


def test_a_clean_pool_whose_log_lacks_its_end_is_compared(caplog: pytest.LogCaptureFixture) -> None:
    with logged() as running:
        put(running.store, ROOT_INODE, b"early", b"e" * 3000)
        settle(running.store)
        running.store.log_index()
        put(running.store, ROOT_INODE, b"late", b"l" * 3000)
        settle(running.store)
        expected = tree(running.store)
        running.stop()
        os.truncate(log_file(running), 10)
        store = running.start()
        assert "a part of the index's log is missing" in caplog.text
        assert tree(store) == expected
        settle(store)
        running.stop()
        assert running.check().problems == []


# ---- gaps ----


def test_a_batch_that_fails_leaves_a_gap_until_the_next_copy() -> None:
    with logged() as running:
        running.stop()
        failing = FailingSyscalls(["fdatasync"], 1, errno.EIO)
        store = running.start(failing)
        put(store, ROOT_INODE, b"a", b"a" * 3000)
        store.log_due()
        until(lambda: store.tick() or failing.failed, "the batch has failed")
        until(lambda: store.tick() or store.describe()["index_log"]["failures"] == 1, "it is told")
        assert store.describe()["index_log"]["behind_s"] is None
        put(store, ROOT_INODE, b"b", b"b" * 3000)
        store.log_due()
        until(lambda: store.tick() or store.describe()["index_log"]["copies"] == 1, "a copy")
        assert store.describe()["index_log"]["behind_s"] is not None
        expected = tree(store)
        settle(store)
        running.kill()
        running.pretend_reboot()
        store = running.start()
        assert tree(store) == expected


def test_rows_that_nobody_takes_are_dropped_and_a_copy_has_them() -> None:
    """A device that does not answer: memory has a bound."""
    unlogged = UnloggedRows(1000)
    unlogged.learn({b"key": b"v" * 600})
    assert not unlogged.overflowed
    unlogged.learn({b"key": b"v" * 600})
    assert unlogged.overflowed
    assert not unlogged.pop()


def wait_for_log(store: Driven) -> None:
    """Tick until the log has all."""
    until(lambda: store.tick() or not store.describe()["index_log"]["behind_s"], "logged")


def test_a_log_that_several_servers_wrote_is_copied_when_it_is_long(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Each stops cleanly, and none of them logs much."""
    set_limit(monkeypatch, "log that is copied", 20_000)
    with logged() as running:
        store = running.store
        lengths = []
        for turn in range(12):
            for number in range(20):
                put(store, ROOT_INODE, b"%d %d" % (turn, number), b"x")
            running.stop()
            lengths.append(sum(path.stat().st_size for path in (running.path / "log").glob("r*")))
            store = running.start()
            store.log_due()
            wait_for_log(store)
        assert max(lengths) > 20_000
        assert lengths[-1] < 2 * max(lengths)
        assert len(tree(store)) == 240
        assert len(list((running.path / "log").glob("r*"))) < 12


def test_of_too_many_rows_that_wait_for_the_device_none_is_kept(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    set_limit(monkeypatch, "rows not logged", 10_000)
    with logged() as running:
        store = running.store
        store.log_index()
        for number in range(100):
            put(store, ROOT_INODE, b"%d" % number, b"x")
        store.commit()
        store.tick()
        assert store.describe()["index_log"]["failures"] == 1
        running.kill()


def test_a_copy_leaves_the_device_to_others_but_ends(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """For as long as a turn took, here a minute each, and not longer than half a second."""
    moments_s, rests_s = itertools.count(0.0, 60.0), list[float]()
    clock = SimpleNamespace(monotonic=lambda: next(moments_s), sleep=rests_s.append)
    monkeypatch.setattr("kvfs.storage.row_log.time", clock)
    monkeypatch.setattr("kvfs.storage.row_log._TURN_BYTES", 100)
    held: Any = SimpleNamespace(pieces=lambda: iter([b"x" * 100] * 3))
    log_fd = os.open(tmp_path, os.O_RDONLY)
    write_copy(log_fd, Syscalls(), held, Moment(1, InodeNo(16), ()), paced=True)
    os.close(log_fd)
    assert rests_s == [0.5] * 3
