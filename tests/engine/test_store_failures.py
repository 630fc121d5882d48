"""Every system call of a workload fails, one at a time: the store goes on, and is right.

A request that fails changes nothing, or all of it; space is exact to the byte; fsck finds nothing.
"""

import errno
from collections.abc import Iterator
from typing import Final

import pytest

from kvfs.core.errors import CommandError
from kvfs.core.types import ROOT_INODE
from kvfs.machine.process_ends import Fate
from tests.support.devices.failing_syscalls import FailingSyscalls
from tests.support.store.driven_faults import reading_here
from tests.support.store.store_workload import CALLS, FAILURES, Tree, work
from tests.support.store.stores import (
    FILE,
    Host,
    assert_exact,
    host,
    put,
    settle,
    tree,
    write,
)

ERRORS: Final = pytest.mark.parametrize(
    "error_no", [errno.EIO, errno.ENOSPC], ids=errno.errorcode.get
)


pytestmark = pytest.mark.usefixtures("caplog")


@pytest.fixture(autouse=True, scope="module")
def quick_starts() -> Iterator[None]:
    with reading_here():
        yield


def assert_sound(made: Host, expected: Tree) -> None:
    """Stop, check, start: all is as it was."""
    made.stop()
    report = made.check()
    assert report.problems == []
    made.start()
    settle(made.store)
    assert tree(made.store) == expected
    assert_exact(made)
    made.stop()


@ERRORS
def test_any_one_call_may_fail(error_no: int) -> None:
    fail_at = 0
    while True:
        fail_at += 1
        failing = FailingSyscalls(CALLS, 0, error_no)
        with host() as made:
            made.start(failing)
            failing.calls, failing.fail_at = 0, fail_at
            expected = work(made, failing)
            failing.fail_at = 0
            assert_sound(made, expected)
        if not failing.failed:
            break
    assert fail_at > 100, "the workload makes fewer calls than it should"


@ERRORS
def test_the_device_may_fail_from_any_call_on_and_come_back(error_no: int) -> None:
    """What cannot be published stays a draft of the very bytes, and is published in the end."""
    for fail_at in range(1, 160, 3):
        failing = FailingSyscalls(CALLS, 0, error_no, for_good=True)
        with host() as made:
            store = made.start(failing)
            failing.calls, failing.fail_at = 0, fail_at
            expected = work(made, failing)
            failing.fail_at = 0
            settle(store)
            assert not store.open_inos
            assert tree(store) == expected
            assert_exact(made)
            assert_sound(made, expected)


def test_who_dies_on_a_block_that_is_not_published_yet_tears_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Its first writer's close failed to publish; the second one overwrote a half of it."""
    failing = FailingSyscalls(["commit"])
    monkeypatch.setattr("kvfs.machine.processes.Processes.fate_of", lambda *_: Fate.KILLED)
    with host() as made:
        store = made.start(failing)
        first, _ = store.create(ROOT_INODE, b"K", FILE, 0, 0)
        write(store, first, b"1" * 8192)
        failing.calls, failing.fail_at = 0, 1
        store.close(first, writer=True)
        assert failing.failed
        second = store.open(first.ino, writer=True, truncate=False)
        store.tick()
        write(store, second, b"2" * 4096)
        store.flush(second, 1)
        store.close(second, writer=True)
        settle(store)
        assert_sound(made, {})


@ERRORS
def test_any_call_of_a_stop_may_fail(error_no: int) -> None:
    """The next start finds the pool as it was but for the draft: nobody will finish that."""
    for fail_at in range(1, 100):
        failing = FailingSyscalls(CALLS, 0, error_no)
        with host() as made:
            store = made.start(failing)
            put(store, ROOT_INODE, b"whole", b"x" * 9000)
            opened, _ = store.create(ROOT_INODE, b"open", FILE, 0, 0)
            write(store, opened, b"y" * 100)
            failing.calls, failing.fail_at = 0, fail_at
            kept: Tree = {b"/whole": b"x" * 9000}
            try:
                made.stop()
            except FAILURES:
                assert failing.failed
            failing.fail_at = 0
            store = made.start()
            settle(store)
            # If a sync failed, nobody knows what the device has.
            assert tree(store) == kept or (failing.failed and not tree(store))
            assert_sound(made, tree(store))
        if not failing.failed:
            break
    assert fail_at > 10


@pytest.mark.parametrize("end", ["stop", "kill", "power"])
@ERRORS
def test_any_call_of_a_start_may_fail(error_no: int, end: str) -> None:
    """The start is refused, or the pool is served as it should be; the next start is good."""
    fail_at = 0
    failing = FailingSyscalls(CALLS, 1)
    while failing.fail_at == 1 or failing.failed:
        fail_at += 1 + fail_at // 12  # the last thousand calls are the sweep's, all alike
        failing = FailingSyscalls(CALLS, fail_at, error_no)
        with host() as made:
            made.start()
            expected = work(made, FailingSyscalls(()))
            opened, _ = made.store.create(ROOT_INODE, b"draft", FILE, 0, 0)
            write(made.store, opened, b"y" * 100)
            if end == "stop":
                made.stop()
            elif end == "kill":
                made.kill()
            else:
                made.lose_power()
            try:
                made.start(failing)
                settle(made.store)
                with failing.pause():
                    found = tree(made.store)
                if (end, error_no) == ("power", errno.EIO):
                    # What the device cannot read is a miss, with what lies below it.
                    assert found.items() <= expected.items()
                    expected = found
                assert found == expected
                made.kill()
            except (*FAILURES, CommandError):
                assert failing.failed
            made.start()
            settle(made.store)
            assert tree(made.store) == expected
            assert_sound(made, expected)
    assert fail_at > 10
