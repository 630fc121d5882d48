"""The history that `kvfs report` draws: bounded, begun anew, and no danger to the mount."""

from typing import Any

import pytest
import trio
import trio.testing

from kvfs.client.control_socket import ask
from kvfs.core.mount_name import socket_path
from kvfs.core.settings import Settings
from mount.control.status import SAMPLES_MAX, History, describe_lost
from tests.support.clients.stepping import until
from tests.support.mounts.mounting import skip_without_mounts
from tests.support.mounts.places import blank_place, small_mount


class Growing:
    """A status whose counters grow with each look; it fails when it is told to."""

    looks = 0
    failing = False

    async def status(self) -> dict[str, Any]:
        self.looks += 1
        if self.failing:
            raise RuntimeError("a fault")
        evicted = {"space": {"bytes": 10 * self.looks}, "ttl": {"bytes": self.looks}}
        counters = dict.fromkeys(("hits", "misses", "loaded_bytes", "stored_bytes"), self.looks)
        return {"used_bytes": 7, "cache": {**counters, "evicted": evicted}}


async def told(history: History) -> list[dict[str, float]]:
    answer = await history.table()["history"]({})
    samples: list[dict[str, float]] = answer["samples"]
    return samples


async def test_a_day_is_kept_and_no_more(autojump_clock: trio.testing.MockClock) -> None:
    growing = Growing()
    history = History(300.0, growing.status)
    with trio.move_on_after(300.0 * (SAMPLES_MAX + 10) + 1):
        await history.keep()
    samples = await told(history)
    assert growing.looks == SAMPLES_MAX + 11
    assert [sample["hits"] for sample in samples] == list(range(12, growing.looks + 1))
    assert samples[-1]["evicted_bytes"] == 11 * growing.looks
    assert samples[-1]["used_bytes"] == 7
    times = [sample["time_s"] for sample in samples]
    assert times == sorted(times)


async def test_a_fault_costs_a_sample(
    autojump_clock: trio.testing.MockClock, caplog: pytest.LogCaptureFixture
) -> None:
    growing = Growing()
    history = History(1.0, growing.status)
    growing.failing = True
    with trio.move_on_after(2.5):
        await history.keep()
    growing.failing = False
    with trio.move_on_after(1.5):
        await history.keep()
    assert len(await told(history)) == 2
    assert len([line for line in caplog.messages if "no sample" in line]) == 3


async def test_a_lost_device_has_no_sample(autojump_clock: trio.testing.MockClock) -> None:
    async def lost() -> dict[str, Any]:
        return describe_lost(Settings(mountpoint="/kv", source="/dev/x"), "EIO")

    history = History(1.0, lost)
    with trio.move_on_after(2.5):
        await history.keep()
    assert await told(history) == []


async def test_without_a_step_nothing_is_kept() -> None:
    growing = Growing()
    history = History(0.0, growing.status)
    with trio.fail_after(5):
        await history.keep()
    assert growing.looks == 0


@pytest.mark.needs_fuse
@pytest.mark.one_data_path
def test_a_server_keeps_what_its_status_shows() -> None:
    skip_without_mounts()
    with blank_place() as place, small_mount(place, "--set", "history_step_s=0.1") as mount:
        for number in range(5):
            (mount.path / f"{number}.data").write_bytes(bytes(4096))
            (mount.path / f"{number}.data").read_bytes()

        def last() -> dict[str, float]:
            answer = ask(socket_path(str(mount.status()["name"])), "history")
            assert answer["step_s"] == 0.1
            sample: dict[str, float] = answer["samples"][-1]
            return sample

        until(lambda: last()["hits"] == 5, "a sample after the last load")
        status = mount.status()
        for name in ("hits", "misses", "loaded_bytes", "stored_bytes"):
            assert last()[name] == status["cache"][name]
        assert last()["used_bytes"] == status["used_bytes"]
