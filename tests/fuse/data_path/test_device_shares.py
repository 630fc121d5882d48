"""Of what waits for a drive that does not answer, each tenant has its part."""

import pytest
import trio
import trio.testing

from kvfs.core.account import ROOT
from kvfs.core.errors import DeviceSilent, TooManyWaiting
from mount.files import device_shares
from tests.fuse.conftest import NOBODY, OTHER
from tests.support.devices.asking_desk import DEADLINE_S, Desk


class Flood:
    """Loads of several users, which wait until the desk answers, and how each ended."""

    def __init__(self, desk: Desk, deadline_s: float) -> None:
        self.desk = desk
        self.asks = desk.asking(deadline_s)
        self.ended: list[tuple[int, str]] = []
        self.changed = trio.Event()

    def _request(self) -> None:
        if not self.desk.brought:
            raise self.desk.lacks()

    async def load(self, uid: int) -> None:
        """Load once as *uid*."""
        self.desk.uid = uid
        try:
            await self.asks.at_hand(self._request)
            self.ended.append((uid, "answered"))
        except DeviceSilent as error:
            self.ended.append((uid, type(error).__name__))
        self.changed.set()
        self.changed = trio.Event()

    async def have_ended(self, count: int) -> None:
        """Return when so many have ended."""
        with trio.fail_after(60):
            while len(self.ended) < count:
                await self.changed.wait()


async def test_a_flood_of_one_users_loads_is_refused_to_that_user_alone(
    desk: Desk, monkeypatch: pytest.MonkeyPatch
) -> None:
    """[device-aside] Whoever waits beside it goes on to wait, and is answered."""
    monkeypatch.setattr(device_shares, "_WAITING_MAX", 16)
    flood = Flood(desk, 1e9)
    desk.serve()
    async with trio.open_nursery() as nursery:
        for uid in (NOBODY,) * 40 + (OTHER,) * 3 + (ROOT,) * 3:
            nursery.start_soon(flood.load, uid)
            await trio.testing.wait_all_tasks_blocked()
        desk.probe.is_suspect = True
        await flood.have_ended(32)
        assert set(flood.ended) == {(NOBODY, "TooManyWaiting")}
        desk.uid = NOBODY
        with pytest.raises(TooManyWaiting):  # at once: it leaves no more work behind
            await flood.asks.bring(desk.lacks())
        desk.answer()
    assert [who for who, how in flood.ended if how == "answered"].count(OTHER) == 3
    assert [who for who, how in flood.ended if how == "answered"].count(ROOT) == 3
    desk.uid = ROOT
    with trio.fail_after(60):
        while desk.left.rows():  # what was given up is still under way
            await flood.asks.bring(desk.lacks())


async def test_what_requests_that_gave_up_have_left_counts_until_the_drive_answers(
    desk: Desk, monkeypatch: pytest.MonkeyPatch
) -> None:
    """[device-aside] Else one user's retries would fill the queue in which others wait."""
    monkeypatch.setattr(device_shares, "_WAITING_MAX", 8)
    flood = Flood(desk, DEADLINE_S)
    desk.serve()
    desk.probe.is_suspect = True
    async with trio.open_nursery() as nursery:
        for _ in range(7):
            nursery.start_soon(flood.load, NOBODY)
            await trio.testing.wait_all_tasks_blocked()
        await flood.have_ended(7)
    assert set(flood.ended) == {(NOBODY, "DeviceSilent")}
    await flood.load(NOBODY)
    assert flood.ended[-1] == (NOBODY, "TooManyWaiting")
    await flood.load(OTHER)
    assert flood.ended[-1] == (OTHER, "DeviceSilent")  # it has waited
    assert desk.left.rows() == {NOBODY: 7, OTHER: 1}
    desk.answer()
    desk.probe.is_suspect = False
    flood.asks = desk.asking(1e9)
    with trio.fail_after(60):
        await flood.load(NOBODY)
    assert flood.ended[-1] == (NOBODY, "answered")
