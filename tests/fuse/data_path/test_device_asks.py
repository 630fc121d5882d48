"""Requests that wait for the device: what they lack is brought, and no wait is for ever."""

import os
import threading
from collections.abc import Callable
from pathlib import Path

import pytest
import trio
import trio.testing

from kvfs.core.drives import Numbering
from kvfs.core.errors import DeviceSilent, NotAtHand
from kvfs.core.types import NO_INODE, DriveNo, InodeNo
from mount.files import device_shares
from tests.support.devices.asking_desk import DEADLINE_S, Desk


async def test_what_is_lacking_is_brought_and_the_request_is_done_again(desk: Desk) -> None:
    desk.serve()
    desk.answer()
    tries: list[int] = []

    def request() -> str:
        tries.append(desk.brought)
        if desk.brought < 2:
            raise desk.lacks()
        return "answer"

    assert await desk.asks.at_hand(request) == "answer"
    assert tries == [0, 1, 2]
    assert desk.asides == 0, "each wait has ended"


async def test_a_request_that_always_lacks_something_ends(desk: Desk) -> None:
    desk.serve()
    desk.answer()

    def request() -> None:
        raise desk.lacks()

    with pytest.raises(NotAtHand):
        await desk.asks.at_hand(request, calls_max=3)
    assert desk.brought == 2


async def test_a_request_that_others_outrun_goes_on_until_the_deadline(desk: Desk) -> None:
    """However often they take what was brought for it: an extent in a full pool, say."""
    desk.serve()
    desk.answer()

    def outrun() -> str:
        if desk.brought < 50:
            raise desk.lacks()
        return "answer"

    def request() -> None:
        raise desk.lacks()

    assert await desk.asks.at_hand(outrun) == "answer"
    began_s = trio.current_time()
    with pytest.raises(NotAtHand):
        await desk.asks.at_hand(request)
    assert trio.current_time() - began_s >= DEADLINE_S


async def test_what_bringing_raises_the_request_gets(desk: Desk) -> None:
    desk.serve()

    def work() -> Callable[[], None]:
        raise OSError(5, "no")

    with pytest.raises(OSError, match="no"):
        await desk.asks.bring(NotAtHand("it", lambda: work))


@pytest.mark.parametrize("in_order", [False, True])
async def test_a_store_is_refused_as_soon_as_the_device_seems_silent(
    desk: Desk, in_order: bool
) -> None:
    """Its work ends by itself when the device answers; then all is as if it had waited."""
    desk.serve()
    async with trio.open_nursery() as nursery:

        async def store() -> None:
            with pytest.raises(DeviceSilent):
                await desk.asks.bring(desk.lacks(stores=True, in_order=in_order))

        nursery.start_soon(store)
        await desk.probe.hurried.wait()
        desk.probe.is_suspect = True
    assert desk.asks.refused == 1
    with pytest.raises(DeviceSilent):
        await desk.asks.bring(desk.lacks(stores=True))
    desk.answer()
    await desk.has_brought.wait()


async def test_only_who_needs_a_silent_drive_is_refused(desk: Desk) -> None:
    """Its other drive answers: a store waits for that, though the first one seems silent."""
    desk.serve()
    desk.probe.is_suspect = desk.probe.is_silent = True
    there = Numbering(2).inode(DriveNo(1), InodeNo(100))
    with pytest.raises(DeviceSilent):
        await desk.asks.bring(desk.lacks(stores=True))
    desk.asks.require_device(there)
    desk.asks.require_room(there)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(desk.asks.bring, desk.lacks(stores=True, ino=there))
        await desk.other.hurried.wait()
        desk.answer()
    assert desk.brought == 1


async def test_a_store_waits_less_for_a_device_that_answers_late(desk: Desk) -> None:
    """One that is only held up, by a long queue say, gives it the time that a load has."""
    desk.serve()
    patient = desk.asking(60)
    desk.probe.is_slow = True
    with trio.fail_after(50), pytest.raises(DeviceSilent):
        await patient.bring(desk.lacks(stores=True))
    for is_slow, stores in ((True, False), (False, True)):
        desk.probe.is_slow = is_slow
        begun_s = trio.current_time()
        with pytest.raises(DeviceSilent):
            await desk.asks.bring(desk.lacks(stores=stores))
        assert trio.current_time() - begun_s >= DEADLINE_S


async def test_a_store_that_surely_needs_a_silent_device_is_refused_at_once(desk: Desk) -> None:
    """Not where the device only seems silent: a busy machine holds up the probe, too."""
    desk.serve()
    desk.probe.is_suspect = True
    desk.asks.require_device(NO_INODE)
    desk.probe.is_silent = True
    with pytest.raises(DeviceSilent):
        desk.asks.require_device(NO_INODE)
    assert desk.asks.refused == 1


async def test_a_load_waits_longer_but_not_for_ever(desk: Desk) -> None:
    desk.serve()
    desk.probe.is_suspect = True
    begun_s = trio.current_time()
    with pytest.raises(DeviceSilent):
        await desk.asks.bring(desk.lacks())
    assert trio.current_time() - begun_s >= DEADLINE_S


async def test_what_a_thread_does_for_who_gave_up_has_a_descriptor_of_its_own(
    desk: Desk, tmp_path: object
) -> None:
    """The extent may be closed meanwhile, and its number be another file's."""
    desk.serve()
    fd = os.open(f"{tmp_path}/file", os.O_RDWR | os.O_CREAT)
    own, ended = threading.Event(), threading.Event()
    seen: list[int] = []

    def work(own_fd: int) -> None:
        own.wait(30)
        seen.append(os.fstat(own_fd).st_ino)
        ended.set()

    number = os.fstat(fd).st_ino
    with pytest.raises(DeviceSilent):
        await desk.asks.transfer(work, fd, ino=NO_INODE, stores=False)
    os.close(fd)
    own.set()
    await trio.to_thread.run_sync(ended.wait)
    assert seen == [number]


async def test_nothing_more_is_queued_for_a_device_that_seems_silent(desk: Desk) -> None:
    desk.serve()
    desk.asks.require_room(NO_INODE)
    while not desk.background.drives.all[0].device.is_crowded:
        desk.background.drives.all[0].device.submit(lambda: None)
    desk.asks.require_room(NO_INODE)
    desk.probe.is_suspect = True
    with pytest.raises(DeviceSilent):
        desk.asks.require_room(NO_INODE)


@pytest.mark.parametrize("how", ["transfer", "compare"])
async def test_no_thread_is_asked_behind_a_crowd_of_a_device_that_seems_silent(
    desk: Desk, tmp_path: Path, how: str
) -> None:
    """A crowd alone is a busy device, and a silence alone is found out by who waits."""
    desk.serve()
    file = os.open(tmp_path / "file", os.O_RDWR | os.O_CREAT)
    done: list[str] = []
    stuck = threading.Event()

    async def ask() -> None:
        if how == "transfer":
            await desk.asks.transfer(lambda _fd: done.append(how), file, ino=NO_INODE, stores=False)
        else:
            await desk.asks.compare(lambda: done.append(how), ino=NO_INODE, stores=False)

    desk.probe.is_suspect = True
    await ask()
    assert done == [how]
    desk.probe.is_suspect = False
    transfers = desk.background.drives.all[0].transfers
    while not transfers.is_crowded:
        transfers.submit(lambda: stuck.wait(30))
    before, submitted = os.listdir("/proc/self/fd"), transfers.submitted
    desk.probe.is_suspect = True
    try:
        with pytest.raises(DeviceSilent):
            await ask()
        assert (transfers.submitted, os.listdir("/proc/self/fd")) == (submitted, before)
    finally:
        stuck.set()
    desk.probe.is_suspect = False
    await ask()
    assert done == [how, how]
    os.close(file)


async def test_of_many_loads_that_wait_for_a_silent_device_some_are_refused(
    desk: Desk, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each occupies a task, of which others need some."""
    monkeypatch.setattr(device_shares, "_WAITING_MAX", 2)
    asks = desk.asking(1e9)
    desk.serve()
    refused = answered = 0
    some_are_left = trio.Event()

    def request() -> None:
        if not desk.brought:
            raise desk.lacks()

    async def load() -> None:
        nonlocal refused, answered
        try:
            await asks.at_hand(request)
            answered += 1
        except DeviceSilent:
            refused += 1
            if refused == 4:
                some_are_left.set()

    async with trio.open_nursery() as nursery:
        for _ in range(6):
            nursery.start_soon(load)
        await trio.testing.wait_all_tasks_blocked()
        desk.probe.is_suspect = True
        with trio.fail_after(60):
            await some_are_left.wait()
        desk.answer()
    assert (refused, answered) == (4, 2)
