"""An extent whose own inode the file system cannot read: a miss, and no more than that."""

import errno
import os
from collections.abc import Callable
from typing import ParamSpec, TypeVar

import pytest

from kvfs.core.errors import Damaged, NotFound
from kvfs.core.types import ROOT_INODE, InodeNo
from kvfs.machine.kernel_log import DeviceErrors
from kvfs.storage.syscalls import Syscalls
from tests.support.clients.stepping import until
from tests.support.store.driven_faults import set_limit, stand_in
from tests.support.store.stores import DIRECTORY, FILE, Host, assert_exact, get, put, settle, tree

pytestmark = pytest.mark.usefixtures("caplog")

P = ParamSpec("P")
T = TypeVar("T")


class Breaking(Syscalls):
    """XFS with one broken inode (EFSCORRUPTED): all calls that name its file fail."""

    def __init__(self, ino: InodeNo) -> None:
        self._name = f"{ino:016x}"
        for name in ("open", "stat", "unlink", "getxattr", "setxattr", "removexattr"):
            setattr(self, name, self._broken(getattr(self, name)))

    def _broken(self, call: Callable[P, T]) -> Callable[P, T]:
        def broken(*args: P.args, **kwargs: P.kwargs) -> T:
            if str(args[0]).endswith(self._name):
                raise OSError(errno.EUCLEAN, os.strerror(errno.EUCLEAN))
            return call(*args, **kwargs)

        return broken


def test_a_load_of_it_is_a_miss_from_the_second_try_on(running: Host) -> None:
    """It was EIO, on a name that stayed."""
    broken = put(running.store, ROOT_INODE, b"broken", b"b")
    running.stop()
    store = running.start(Breaking(broken))
    with pytest.raises(Damaged):
        get(store, ROOT_INODE, b"broken")
    with pytest.raises(NotFound):
        get(store, ROOT_INODE, b"broken")
    assert store.describe()["lost_blocks"] == 1


@pytest.mark.parametrize("end", ["stop", "kill"])
def test_fsck_names_it_and_mends_what_it_can(running: Host, end: str) -> None:
    """It ended at the first one, with nothing but "Structure needs cleaning"."""
    broken = put(running.store, ROOT_INODE, b"broken", b"b")
    put(running.store, ROOT_INODE, b"whole", b"w")
    settle(running.store)
    running.stop() if end == "stop" else running.kill()
    assert any(
        "broken: " in line
        for line in running.check(repair=False, syscalls=Breaking(broken)).problems
    )
    report = running.check(repair=True, syscalls=Breaking(broken))
    assert report.found - report.repaired == 1, "the file itself is xfs_repair's"
    running.extent(broken).unlink()
    assert running.check().problems == []
    assert tree(running.start()) == {b"/whole": b"w"}
    assert_exact(running)


def test_a_directory_does_not_go_for_its_identity_file(running: Host) -> None:
    directory, _ = running.store.make_node(ROOT_INODE, b"dir", DIRECTORY, 0, 0)
    put(running.store, directory, b"whole", b"w")
    settle(running.store)
    running.stop()
    report = running.check(repair=True, syscalls=Breaking(directory))
    assert (report.found, report.repaired) == (1, 0)
    assert tree(running.start()) == {b"/dir": "directory", b"/dir/whole": b"w"}


def test_a_sweep_goes_on_behind_it(running: Host) -> None:
    """It ended there at every start, and what lay behind was never looked at."""
    store = running.store
    broken = put(store, ROOT_INODE, b"broken", b"b")
    late = put(store, ROOT_INODE, b"late", b"l")
    running.kill()
    store = running.start(Breaking(broken))
    settle(store)
    assert store.describe()["background_failures"] == 0
    assert store.identity(late) is not None


def test_a_start_after_a_kill_drops_it(running: Host) -> None:
    """The start was refused for one slab that was open for writing."""
    store = running.store
    put(store, ROOT_INODE, b"whole", b"w")
    slab, _ = store.create(ROOT_INODE, b"slab", FILE, 0, 0)
    store.truncate(slab.ino, 10_000)
    store.close(slab, writer=True)
    store.open(slab.ino, writer=True, truncate=False)
    running.kill()
    assert tree(running.start(Breaking(slab.ino))) == {b"/whole": b"w"}


def test_after_a_failed_read_the_blocks_used_last_are_tried(
    running: Host, monkeypatch: pytest.MonkeyPatch
) -> None:
    """So many at a time, for a failing device takes long for each."""
    set_limit(monkeypatch, "blocks tried to read", 3)
    tried: list[InodeNo] = []

    def is_legible(_extents: object, ino: InodeNo) -> bool:
        tried.append(ino)
        return True

    stand_in(monkeypatch, "a block is tried to read", is_legible)
    store = running.store
    inos = [put(store, ROOT_INODE, b"%d" % number, b"x") for number in range(10)]
    for number, ino in enumerate(inos):
        store.tick_heat(store.now_s() + 10 * number)
        store.touch(ino)
    errors = "kvfs.machine.kernel_log.KernelLog.errors"
    monkeypatch.setattr(errors, lambda _: DeviceErrors(reads=True))
    store.tick()
    until(lambda: len(tried) >= 3, "some are tried")
    monkeypatch.undo()
    running.stop()
    assert tried == inos[-3:]
