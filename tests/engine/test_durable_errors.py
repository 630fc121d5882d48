"""The pass that makes blocks durable, where a step fails: what is lost, and what only waits."""

import dataclasses
import errno
import os
import threading
from collections.abc import Callable, Iterator
from typing import Final

import pytest

from kvfs.core.errors import NotFound
from kvfs.core.types import ROOT_INODE, InodeNo
from kvfs.storage.syscalls import SYNC_FILE_RANGE_WRITE_AND_WAIT, Syscalls
from tests.support.clients.stepping import until
from tests.support.devices.power_cuts.power import Cut, drive
from tests.support.store.driven import Driven
from tests.support.store.stores import get, put, settle

pytestmark = [pytest.mark.needs_loop, pytest.mark.usefixtures("caplog")]

BYTES: Final = b"bytes" * 1000


class Refusing(Syscalls):
    """Calls of the pass's own thread, of which the next of a name fails once with an errno."""

    def __init__(self) -> None:
        self.next: dict[str, int] = {}
        #: Whether each call fails from now on, and how many did.
        self.lasts, self.refused = False, 0
        #: How many flushes began that did not fail.
        self.flushes = 0
        #: Whether the file system has shut itself down: it tells nobody how full it is.
        self.shut_down = False

    # Of Syscalls these two are the functions of os themselves, which take more kinds of files.
    def statvfs(self, fd: int) -> os.statvfs_result:  # type: ignore[override]
        """Tell how full the file system is."""
        if self.shut_down:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return super().statvfs(fd)

    def _fail(self, name: str) -> None:
        if threading.current_thread().name == "kvfs-durable":
            number = self.next.get(name) if self.lasts else self.next.pop(name, None)
            if number is not None:
                self.refused += 1
                raise OSError(number, os.strerror(number))

    def sync_file_range(self, fd: int, flags: int) -> None:
        """Wait for the bytes of a block."""
        if flags == SYNC_FILE_RANGE_WRITE_AND_WAIT:
            self._fail("bytes")
        super().sync_file_range(fd, flags)

    def utime(self, fd: int) -> None:  # type: ignore[override]
        """Begin a flush."""
        self._fail("flush")
        self.flushes += 1
        super().utime(fd)


@pytest.fixture
def calls() -> Refusing:
    return Refusing()


@pytest.fixture
def store(calls: Refusing) -> Iterator[Driven]:
    with drive() as powered:
        powered.settings = dataclasses.replace(powered.settings, durable_within_s=0.2)
        yield powered.start(syscalls=calls)


def figure(store: Driven, name: str) -> int:
    return int(store.describe()["durability"][name])


def tick_until(store: Driven, holds: Callable[[], bool], what: str) -> None:
    def ticked() -> bool:
        store.tick()
        store.run_all()
        return holds()

    until(ticked, what)


@pytest.mark.parametrize(
    "number", [errno.EINTR, errno.EAGAIN, errno.ENOMEM, errno.ENFILE, errno.EMFILE]
)
def test_an_error_of_the_machine_costs_no_block(
    store: Driven, calls: Refusing, number: int
) -> None:
    """It says nothing about the bytes: they are waited for again."""
    calls.next["bytes"] = number
    inos = [put(store, ROOT_INODE, b"%d" % each, BYTES) for each in range(3)]
    tick_until(store, lambda: not calls.next, "it is refused")
    tick_until(store, lambda: figure(store, "blocks") == 0, "all are durable")
    assert all(store.identity(ino) is not None for ino in inos)
    assert all(get(store, ROOT_INODE, b"%d" % each) == BYTES for each in range(3))
    assert figure(store, "failures") == 0


@pytest.mark.parametrize("number", [errno.EINTR, errno.ENOMEM])
def test_a_block_has_no_identity_before_its_bytes_were_waited_for(
    store: Driven, calls: Refusing, number: int
) -> None:
    """However often that is refused: an identity says that the bytes are durable."""
    ino = put(store, ROOT_INODE, b"K", BYTES)
    calls.next["bytes"], calls.lasts = number, True
    tick_until(store, lambda: calls.refused >= 3 or store.identity(ino) is not None, "it is tried")
    assert store.identity(ino) is None
    calls.next.clear()
    tick_until(store, lambda: figure(store, "blocks") == 0, "it is durable")
    assert store.identity(ino) is not None


@pytest.mark.parametrize("number", [errno.EIO, errno.ENOSPC, errno.EDQUOT, errno.ENXIO])
def test_an_error_of_the_device_costs_the_block_and_who_waits_is_told(
    store: Driven, calls: Refusing, number: int
) -> None:
    """The kernel tells of it once: afterwards the bytes would pass for written."""
    calls.next["bytes"] = number
    lost = put(store, ROOT_INODE, b"lost", BYTES)
    kept = put(store, ROOT_INODE, b"kept", BYTES)
    goal = store.goal()
    with pytest.raises(OSError, match="the device failed"):
        tick_until(store, lambda: store.reached(goal), "it is told")
    with pytest.raises(NotFound):
        store.lookup(ROOT_INODE, b"lost")
    tick_until(store, lambda: figure(store, "blocks") == 0, "the other one is durable")
    assert store.identity(kept) is not None
    assert not store.has_row(lost)
    assert figure(store, "failures") == 1


@pytest.mark.parametrize("number", [errno.EIO, errno.ENOMEM])
def test_a_flush_that_fails_is_told_and_costs_what_was_not_durable(
    store: Driven, calls: Refusing, number: int
) -> None:
    """The kernel tells of it once, and it may have dropped any of the bytes since the last one."""
    inos = [put(store, ROOT_INODE, b"%d" % each, BYTES) for each in range(3)]
    calls.next["flush"] = number
    goal = store.goal()
    with pytest.raises(OSError, match="the device failed"):
        tick_until(store, lambda: store.reached(goal), "it is told")
    assert (figure(store, "failures"), figure(store, "blocks")) == (1, 3)
    tick_until(store, lambda: figure(store, "blocks") == 0, "nothing waits")
    assert not any(store.has_row(ino) for ino in inos)
    after = put(store, ROOT_INODE, b"after", BYTES)
    tick_until(store, lambda: figure(store, "blocks") == 0, "the next one is durable")
    assert store.identity(after) is not None
    goal, flushes = store.goal(), calls.flushes
    tick_until(store, lambda: store.reached(goal), "nothing waits, and the device is asked once")
    assert calls.flushes <= flushes + 1


def test_of_a_file_system_that_has_shut_down_no_byte_is_believed(
    store: Driven, calls: Refusing
) -> None:
    """One block tells of it; the others, and the flush, only seem to have succeeded."""
    inos = [put(store, ROOT_INODE, b"%d" % each, BYTES) for each in range(3)]
    calls.next["bytes"], calls.shut_down = errno.EIO, True
    goal = store.goal()
    with pytest.raises(OSError, match="the device failed"):
        tick_until(store, lambda: store.reached(goal), "it is told")
    assert (figure(store, "failures"), figure(store, "blocks")) == (1, 3)
    assert [store.identity(ino) for ino in inos] == [None] * 3
    tick_until(store, lambda: figure(store, "blocks") == 0, "nothing waits")
    assert not any(store.has_row(ino) for ino in inos)


def test_names_alone_are_durable_once_a_goal_is_reached() -> None:
    """A rename, and a sync at once: nothing has bytes to wait for, or an identity that is due."""
    with drive() as powered:
        store = powered.start()
        directory, _ = store.make_node(ROOT_INODE, b"dir", 0o40755, 0, 0)
        put(store, ROOT_INODE, b"K", BYTES)
        store.sync()
        store.log_last()
        store.rename(ROOT_INODE, b"K", directory, b"L")
        goal = store.goal()
        until(lambda: store.reached(goal), "it is durable")  # no tick writes it meanwhile
        powered.cut(Cut.NOTHING)
        store = powered.start()
        settle(store)
        assert get(store, InodeNo(directory), b"L") == BYTES


def test_checksums_take_their_share_of_a_core_and_no_more() -> None:
    """What they have taken is counted: the first one of these takes all that there is."""
    with drive() as powered:
        powered.settings = dataclasses.replace(
            powered.settings, durable_within_s=0.2, checksum_share=1e-6
        )
        store = powered.start()
        for number in range(4):
            put(store, ROOT_INODE, b"%d" % number, BYTES * 100)
        tick_until(store, lambda: figure(store, "blocks") == 0, "all are durable")
        told = store.describe()["checksums"]
        assert (told["made"], told["unchecked"]) == (1, 3)
