"""A repair that ends in the middle: by a kill, or with the power."""

import os
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import ParamSpec, TypeVar

import pytest

from kvfs.core.records import child_key
from kvfs.core.types import ROOT_INODE
from kvfs.storage.index import Index
from kvfs.storage.run_state import RunState, read_run_state
from kvfs.storage.syscalls import Syscalls
from tests.support.store.driven_faults import stand_in
from tests.support.store.stores import (
    MIB,
    Host,
    assert_exact,
    assert_no_strays,
    kill_behind_an_overwriting,
    put,
    settle,
    tree,
)

pytestmark = pytest.mark.usefixtures("caplog")

P = ParamSpec("P")
T = TypeVar("T")


class Noting(Syscalls):
    """Notes the order of calls of *names*."""

    def __init__(self, names: Iterable[str]) -> None:
        self.calls: list[str] = []
        for name in names:
            setattr(self, name, self._noted(name, getattr(self, name)))

    def _noted(self, name: str, call: Callable[P, T]) -> Callable[P, T]:
        def noted(*args: P.args, **kwargs: P.kwargs) -> T:
            self.calls.append(name)
            return call(*args, **kwargs)

        return noted


class CutShortError(Exception):
    """The end of a repair."""


def cut_short(done: int, total: int) -> None:
    """Be the progress of a repair: end it when the last row and file was looked at."""
    if done == total:
        raise CutShortError


def run_state(path: Path) -> RunState:
    pool_fd = os.open(path, os.O_RDONLY)
    try:
        return read_run_state(pool_fd, Syscalls())
    finally:
        os.close(pool_fd)


def spoil_index(path: Path) -> None:
    with (path / "index" / "data.mdb").open("r+b") as file:
        file.seek(8192)
        file.write(b"\xa5" * 65536)


@pytest.fixture
def running(in_pool: Host) -> Host:
    """Return a host whose index is in the pool."""
    return in_pool


@pytest.fixture
def unlisted(running: Host) -> Host:
    """Return a cleanly stopped host whose index lacks a row."""
    ino = put(running.store, ROOT_INODE, b"a", b"x" * 5000)
    settle(running.store)
    running.stop()
    path = str(running.path / "index")
    with Index(path, map_size_bytes=64 * MIB, preallocate_bytes=MIB) as index:
        with index.write() as txn:
            txn.delete_row(child_key(ROOT_INODE, ino))
        index.sync()
    return running


def test_what_a_repair_has_mended_is_not_believed_before_it_is_synced(unlisted: Host) -> None:
    """The index is written without a sync: a loss of power may leave it in any state."""
    with pytest.raises(CutShortError):
        unlisted.check(repair=True, progress=cut_short)
    assert not run_state(unlisted.path).clean
    unlisted.pretend_reboot()
    spoil_index(unlisted.path)
    assert tree(unlisted.start()) == {b"/a": b"x" * 5000}


def test_a_repair_that_is_done_leaves_a_clean_pool(unlisted: Host) -> None:
    assert unlisted.check(repair=True).repaired == 1
    assert run_state(unlisted.path).clean
    assert tree(unlisted.start(settings=unlisted.read_only())) == {b"/a": b"x" * 5000}


def test_nothing_to_repair_leaves_run_alone(running: Host) -> None:
    running.stop()
    running.pretend_reboot()
    before = (running.path / "RUN").read_bytes()
    assert running.check(repair=True).problems == []
    assert (running.path / "RUN").read_bytes() == before


def test_a_rebuild_that_is_cut_short_leaves_its_strays_to_the_next_start(
    running: Host, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = running.store
    put(store, ROOT_INODE, b"a", b"x" * 5000)
    slab = store.create(ROOT_INODE, b"slab", 0o100644, 0, 0)[0]
    store.truncate(slab.ino, 100_000)
    store.close(slab, writer=True)
    settle(store)
    running.stop()
    spoil_index(running.path)

    def fail(*_: object) -> None:
        raise CutShortError

    stand_in(monkeypatch, "rows are checked", fail)
    with pytest.raises(CutShortError):
        running.check(repair=True)
    store = running.start()
    assert tree(store) == {b"/a": b"x" * 5000, b"/slab": bytes(100_000)}
    settle(store)
    assert_no_strays(store)
    assert_exact(running)


def test_what_was_overwritten_before_a_kill_is_durable_before_a_repair_identifies_it(
    running: Host, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A rebuild after a loss of power could not tell old bytes from new ones."""
    kill_behind_an_overwriting(running, monkeypatch)
    noting = Noting(["syncfs", "setxattr"])
    assert running.check(repair=True, syscalls=noting).problems == []
    assert noting.calls == ["syncfs", "setxattr", "setxattr", "syncfs"]
