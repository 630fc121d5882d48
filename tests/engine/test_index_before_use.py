"""An index whose names are gone gives their room back at the next start, or stays as it is."""

import errno
import os
import stat
from collections.abc import Callable, Iterator, Sequence
from typing import ParamSpec, TypeVar

import pytest

from kvfs.core.types import ROOT_INODE
from kvfs.engine.recovery import index_before_use
from kvfs.engine.recovery.index_before_use import compact_index
from kvfs.storage.syscalls import Syscalls
from tests.support.store.driven_faults import stand_in
from tests.support.store.stores import MIB, SYMLINK, Host, assert_exact, host, put, settle, tree

P = ParamSpec("P")
T = TypeVar("T")

#: Attributes, which are put into the index past all that bounds them: 24 MiB.
MANY = 400
VALUE = b"v" * (60 << 10)

#: What a compaction asks of the machine.
CALLS = ("statvfs", "mkdir", "open", "fsync", "rename", "unlink", "rmdir")


class Numbered(Syscalls):
    """Calls of ``CALLS``, told to *strike* with the number of each before it is made."""

    def __init__(self, strike: Callable[[int], None]) -> None:
        self._strike = strike
        self.count = 0
        for name in CALLS:
            setattr(self, name, self._struck(getattr(self, name)))

    def _struck(self, call: Callable[P, T]) -> Callable[P, T]:
        def struck(*args: P.args, **kwargs: P.kwargs) -> T:
            self.count += 1
            self._strike(self.count - 1)
            return call(*args, **kwargs)

        return struck


def fill_and_empty(running: Host, kept: int = 0) -> dict[bytes, bytes]:
    """Let attributes come, all but *kept* of them go, and stop; return the tree."""
    store = running.store
    block = put(store, ROOT_INODE, b"block", b"x" * 5000)
    store.make_node(ROOT_INODE, b"link", SYMLINK, 0, 0, b"target")
    store.set_xattr(block, b"user.mine", b"value")
    settle(store)
    for number in range(MANY):
        store.grow_index()
        with store.write_rows() as txn:
            txn.put_xattr(block, b"user.%d" % number, VALUE)
    for number in range(kept, MANY):
        with store.write_rows() as txn:
            txn.delete_xattr(block, b"user.%d" % number)
    found = tree(store)
    running.stop()
    return found


@pytest.fixture
def large() -> Iterator[tuple[Host, dict[bytes, bytes]]]:
    """A stopped pool whose index has 24 MiB of free pages, and its tree."""
    with host(capacity_bytes=64 * MIB, index_place="pool") as made:
        made.start()
        yield made, fill_and_empty(made)


def index_bytes(running: Host) -> int:
    return (running.path / "index" / "data.mdb").stat().st_blocks * 512


def assert_sound(running: Host, expected: dict[bytes, bytes], problems: Sequence[str] = ()) -> None:
    """Start the pool, look through it, stop it and have it checked: it has only *problems*."""
    assert tree(running.start()) == expected
    assert_exact(running)
    ino = running.store.lookup(ROOT_INODE, b"block")
    assert running.store.xattr(ino, b"user.mine") == b"value"
    running.stop()
    assert sorted(path.name for path in running.path.glob("index*")) == ["index"]
    assert sorted(os.listdir(running.path / "index")) == ["data.mdb", "lock.mdb"]
    assert running.check().problems == list(problems)


@pytest.mark.parametrize("end", ["stop", "kill"])
def test_a_start_gives_back_what_names_held(
    large: tuple[Host, dict[bytes, bytes]], end: str, caplog: pytest.LogCaptureFixture
) -> None:
    running, expected = large
    assert index_bytes(running) > 20 * MIB
    if end == "kill":
        with pytest.MonkeyPatch.context() as patch:
            stand_in(patch, "index is compacted", lambda *_: 0)
            running.start()
        running.kill()
    assert_sound(running, expected)
    assert index_bytes(running) < 6 * MIB
    assert stat.S_IMODE((running.path / "index" / "data.mdb").stat().st_mode) == 0o600
    assert ("not stopped" in caplog.text) == (end == "kill")


def test_a_read_only_start_gives_nothing_back(large: tuple[Host, dict[bytes, bytes]]) -> None:
    running, expected = large
    before = index_bytes(running)
    assert tree(running.start(settings=running.read_only())) == expected
    assert index_bytes(running) == before
    running.stop()


def test_an_index_that_is_half_full_stays() -> None:
    with host(capacity_bytes=64 * MIB, index_place="pool") as running:
        running.start()
        expected = fill_and_empty(running, kept=2 * MANY // 3)
        before = (running.path / "index" / "data.mdb").stat().st_ino
        # No file has what was put past all bounds, and could not hold it.
        beyond = "inode 0x10 b'block': its attributes are not in its file"
        assert_sound(running, expected, [beyond])
        assert (running.path / "index" / "data.mdb").stat().st_ino == before


def test_where_there_is_no_room_for_the_copy_there_is_none(
    large: tuple[Host, dict[bytes, bytes]],
) -> None:
    running, expected = large

    class Full(Syscalls):
        def _statvfs(self, fd: int) -> os.statvfs_result:
            fields = list(os.statvfs(fd))
            fields[4] = 16  # f_bavail
            return os.statvfs_result(fields)

        statvfs = _statvfs  # type: ignore[assignment]

    before = index_bytes(running)
    pool_fd = os.open(running.path, os.O_RDONLY)
    try:
        assert compact_index(pool_fd, Full()) == 0
    finally:
        os.close(pool_fd)
    assert index_bytes(running) == before
    assert_sound(running, expected)


def test_a_copy_whose_maker_dies_changes_nothing(
    large: tuple[Host, dict[bytes, bytes]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """LMDB answers some damage with SIGABRT: a start that came so far goes on."""
    running, expected = large
    with monkeypatch.context() as patch:
        patch.setattr(index_before_use, "_write_copy", lambda *_: os.abort())
        assert_sound(running, expected)
    assert index_bytes(running) > 20 * MIB


def compact(running: Host, strike: Callable[[int], None]) -> int:
    """Compact the stopped pool's index; return how many calls it took."""
    calls = Numbered(strike)
    pool_fd = os.open(running.path, os.O_RDONLY)
    try:
        compact_index(pool_fd, calls)
    finally:
        os.close(pool_fd)
    return calls.count


@pytest.mark.parametrize("number", range(10))
def test_a_call_that_fails_leaves_an_index(
    large: tuple[Host, dict[bytes, bytes]], number: int
) -> None:
    running, expected = large

    def fail(now: int) -> None:
        if now == number:
            raise OSError(errno.EIO, "injected")

    assert compact(running, fail) > number
    assert_sound(running, expected)
    assert index_bytes(running) < 6 * MIB


@pytest.mark.parametrize("number", range(10))
def test_a_kill_leaves_an_index(large: tuple[Host, dict[bytes, bytes]], number: int) -> None:
    running, expected = large

    def die(now: int) -> None:
        if now == number:
            os._exit(9)

    child = os.fork()
    if child == 0:
        compact(running, die)
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 9, "it was done before"
    assert_sound(running, expected)
    assert index_bytes(running) < 6 * MIB


def test_what_would_take_long_to_copy_is_not_copied(
    large: tuple[Host, dict[bytes, bytes]], monkeypatch: pytest.MonkeyPatch
) -> None:
    running, expected = large
    monkeypatch.setattr(index_before_use, "_COPIED_MOST_BYTES", 1000)
    assert_sound(running, expected)
    assert index_bytes(running) > 20 * MIB
