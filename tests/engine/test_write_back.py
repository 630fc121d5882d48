"""Looks for write-back that failed, where the kernel's log is silent or may not be read."""

import dataclasses
from collections.abc import Iterator

import pytest

from kvfs.core.settings import Settings
from kvfs.core.types import ROOT_INODE
from kvfs.devices import Device, format_source, open_source, wait_released
from kvfs.machine.kernel_log import DeviceErrors
from kvfs.storage.run_state import read_run_state
from kvfs.storage.syscalls import Syscalls
from tests.support.clients.stepping import until
from tests.support.devices.failing_drive import FailingDrive, failing_drive
from tests.support.devices.failing_drive_program import BAD_PAGE, PAGE_BYTES, Fails
from tests.support.mounts.mounting import skip_without_mounts
from tests.support.store.driven import Driven, driven
from tests.support.store.driven_faults import set_limit
from tests.support.store.stores import MIB, fill_pool, put, tree

pytestmark = [
    pytest.mark.needs_loop,
    pytest.mark.needs_fuse,
    pytest.mark.usefixtures("caplog"),
]

LOST = (BAD_PAGE + bytes(PAGE_BYTES))[:PAGE_BYTES] * 4
SETTINGS = Settings(index_preallocate_bytes=MIB, index_map_bytes=64 * MIB)


@pytest.fixture
def drive() -> Iterator[FailingDrive]:
    skip_without_mounts()
    with failing_drive(400 * MIB) as made:
        format_source(made.path, fill=fill_pool)
        yield made


@pytest.fixture
def device(drive: FailingDrive) -> Iterator[Device]:
    with open_source(drive.path) as opened:
        yield opened
    wait_released(drive.path)


@pytest.fixture(autouse=True)
def silent_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its log tells of no error."""
    monkeypatch.setattr("kvfs.machine.kernel_log.KernelLog.errors", lambda _: DeviceErrors())


@pytest.fixture
def store(device: Device, monkeypatch: pytest.MonkeyPatch) -> Iterator[Driven]:
    """A store that hears nothing of the kernel and looks often, as under a load without a rest."""
    set_limit(monkeypatch, "write_back_looks_s", 0.1)
    made = driven(device, SETTINGS)
    try:
        yield made
    finally:
        made.stop()


def tick_until(store: Driven, dismissed: int) -> None:
    def holds() -> bool:
        store.tick()
        store.run_all()
        return bool(store.describe()["lost_blocks"] >= dismissed)

    until(holds, f"{dismissed} blocks are dismissed")


def looked(store: Driven) -> bool:
    """Tick; whether all that was stored is known to be durable."""
    store.tick()
    return store.is_written_back


def test_a_look_finds_what_the_kernel_told_nobody(store: Driven, drive: FailingDrive) -> None:
    put(store, ROOT_INODE, b"good", b"w" * 5000)
    until(lambda: looked(store), "what was stored is durable")
    drive.fail(writes=Fails.BAD_PAGES)
    put(store, ROOT_INODE, b"bad", LOST)
    put(store, ROOT_INODE, b"since", b"w" * 5000)
    tick_until(store, 2)
    assert tree(store) == {b"/good": b"w" * 5000}, "what was proven stays"
    drive.recover()
    put(store, ROOT_INODE, b"later", b"w" * 5000)
    until(lambda: looked(store), "that is durable, too")
    assert set(tree(store)) == {b"/good", b"/later"}
    assert store.describe()["write_back_failures"] == 1


def test_an_error_that_a_clients_fsync_was_told_of_is_not_lost(
    store: Driven, drive: FailingDrive, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The kernel tells each description once."""
    set_limit(monkeypatch, "write_back_looks_s", 86_400.0)
    drive.fail(writes=Fails.BAD_PAGES)
    put(store, ROOT_INODE, b"bad", LOST)
    with pytest.raises(OSError, match="Input/output error"):
        store.sync()
    tick_until(store, 1)
    assert tree(store) == {}


def test_an_error_found_just_before_a_stop_is_dealt_with_by_the_stop(
    device: Device, drive: FailingDrive, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The look took the error, which the stop's own sync is not told of any more."""
    first = driven(device, SETTINGS)
    put(first, ROOT_INODE, b"good", b"w" * 5000)
    first.sync()
    drive.fail(writes=Fails.BAD_PAGES)
    put(first, ROOT_INODE, b"bad", LOST)
    set_limit(monkeypatch, "write_back_looks_s", 0.0)
    first.tick()
    until(lambda: drive.failed() > 0, "a look meets the error")
    drive.recover()
    first.stop()
    second = driven(device, SETTINGS)
    try:
        assert tree(second) == {b"/good": b"w" * 5000}
    finally:
        second.stop()


def test_a_stop_after_a_failed_write_keeps_what_is_durable(
    device: Device, drive: FailingDrive, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The pass had removed the block, and no look had been told of the error before the stop."""
    set_limit(monkeypatch, "write_back_looks_s", 86_400.0)
    first = driven(device, dataclasses.replace(SETTINGS, durable_within_s=0.5))
    drive.fail(writes=Fails.BAD_PAGES)
    put(first, ROOT_INODE, b"bad", LOST)
    tick_until(first, 1)
    drive.recover()
    put(first, ROOT_INODE, b"after", b"w" * 5000)
    until(lambda: passed(first), "it is durable")
    put(first, ROOT_INODE, b"suspect", b"w" * 5000)
    first.stop()
    assert read_run_state(device.pool_fd, Syscalls(), device.superblock).clean
    second = driven(device, SETTINGS)
    try:
        assert tree(second) == {b"/after": b"w" * 5000}
    finally:
        second.stop()


def test_nothing_is_looked_at_while_nothing_is_stored(store: Driven) -> None:
    """A syncfs of a shared file system is others' time."""
    until(lambda: looked(store), "the start is proven")
    looks = store.write_back_looks
    put(store, ROOT_INODE, b"a", b"w" * 5000)
    until(lambda: looked(store), "the block is proven")
    after = store.write_back_looks
    assert after > looks
    for _ in range(50):
        store.turn_clock(lambda: 1e9)
        store.tick()
    assert store.write_back_looks == after


def test_the_pass_finds_the_block_whose_write_failed_and_spares_the_others(
    device: Device, drive: FailingDrive, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It was served as zeros until the next stop: no error, no counter. Without any other look."""
    set_limit(monkeypatch, "write_back_looks_s", 86_400.0)
    store = driven(device, dataclasses.replace(SETTINGS, durable_within_s=0.5))
    try:
        drive.fail(writes=Fails.BAD_PAGES)
        kept = {b"/good %d" % number: b"w" * 5000 for number in range(5)}
        for path, data in kept.items():
            put(store, ROOT_INODE, path[1:], data)
        put(store, ROOT_INODE, b"bad", LOST)
        tick_until(store, 1)
        until(lambda: passed(store), "the others are durable")
        assert tree(store) == kept
        figures = store.describe()
        assert (figures["lost_blocks"], figures["write_back_failures"]) == (1, 1)
        assert figures["durability"]["marked"] == len(kept)
        drive.recover()
    finally:
        store.kill()  # a stop asks for the error of the whole file system, and is not clean


def passed(store: Driven) -> bool:
    store.tick()
    store.run_all()
    return bool(store.listed() == 0)


def test_what_is_durable_outlives_an_error_of_what_was_stored_later(
    store: Driven, drive: FailingDrive
) -> None:
    """A look is told of an error of the whole file system, and drops what may have it."""
    put(store, ROOT_INODE, b"durable", b"w" * 5000)
    store.sync()
    drive.fail(writes=Fails.BAD_PAGES)
    put(store, ROOT_INODE, b"bad", LOST)
    tick_until(store, 1)
    drive.recover()
    assert tree(store) == {b"/durable": b"w" * 5000}
