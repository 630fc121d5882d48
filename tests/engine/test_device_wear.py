"""Bytes written to the device, and the drive's endurance: what it says, and that nobody waits."""

import os
import threading
from pathlib import Path
from typing import Any, Final

import pytest

from kvfs.engine.device_watch import DeviceWear, whole_wear
from kvfs.machine.hardware import (
    Endurance,
    drives_below,
    endurance_of,
    left_of,
    life_of,
    written_bytes,
)
from tests.support.clients.stepping import until
from tests.support.mounts.mounting import loop_device

NVME: Final = {"nvme_smart_health_information_log": {"percentage_used": 7}}
ATA: Final = {
    "ata_smart_attributes": {
        "table": [
            {"name": "Power_On_Hours", "value": 12},
            {"name": "Wear_Leveling_Count", "value": 93},
        ]
    }
}


@pytest.mark.parametrize(
    ("told", "left"),
    [(NVME, 0.93), (ATA, 0.93), ({}, None), ([], None), ({"ata_smart_attributes": {}}, None)],
)
def test_what_smartctl_tells(told: Any, left: float | None) -> None:  # noqa: ANN401
    found = left_of(told)
    assert found == (None if left is None else pytest.approx(left))


@pytest.mark.needs_loop
def test_a_loop_device_counts_and_stands_on_the_drive_of_its_file() -> None:
    with loop_device(4 << 20) as path:
        device = os.stat(path).st_rdev
        before = written_bytes(device)
        assert before is not None
        fd = os.open(path, os.O_WRONLY)
        os.write(fd, bytes(1 << 20))
        os.fsync(fd)
        os.close(fd)
        assert written_bytes(device) == before + (1 << 20)
        # Its file lies in memory here, and elsewhere on a drive.
        assert Path(path).name not in drives_below(device)


def test_without_a_block_device_nothing_is_known() -> None:
    memory = os.stat("/dev/shm").st_dev
    assert written_bytes(memory) is None
    assert drives_below(memory) == []
    assert endurance_of(memory) == Endurance(None, None)


def nothing(_device: int) -> Endurance:
    """What a drive says that tells nothing."""
    return Endurance(None, None)


def test_the_rate_is_that_of_the_last_minute(tmp_path: Path) -> None:
    counts = iter([1000, 1000, *range(2000, 100_000, 1000)])
    fd = os.open(tmp_path, os.O_RDONLY)
    wear = DeviceWear(fd, lambda _: next(counts), nothing)
    os.close(fd)
    assert set(wear.shown().values()) == {None}
    for now_s in range(0, 300, 5):
        wear.run_due(float(now_s))
    assert wear.shown()["write_rate"] == 200
    assert wear.shown()["written_bytes"] == 59_000


def test_a_drive_that_does_not_answer_is_waited_for_by_nobody(tmp_path: Path) -> None:
    answers, asked = threading.Event(), []

    def ask(device: int) -> Endurance:
        asked.append(device)
        answers.wait(60)
        return Endurance(0.5, None)

    fd = os.open(tmp_path, os.O_RDONLY)
    wear = DeviceWear(fd, lambda _: None, ask)
    os.close(fd)
    for now_s in (0.0, 20.0, 4000.0, 8000.0):
        wear.run_due(now_s)
    assert wear.shown()["endurance_left"] is None
    assert len(asked) <= 1
    answers.set()
    until(lambda: wear.shown()["endurance_left"] == 0.5, "the drive's answer")


def test_drives_together_have_the_endurance_of_the_most_worn(tmp_path: Path) -> None:
    """What one drive does not tell is not known of it, and does not hide the others."""
    fd = os.open(tmp_path, os.O_RDONLY)
    wears = [
        DeviceWear(fd, lambda _, told=told: told.pop(0), lambda _, left=left: Endurance(left, None))
        for told, left in (([100, 400, 700], 0.9), ([5, 15, 25], 0.4), ([None, None, None], None))
    ]
    os.close(fd)
    for now_s in (0.0, 10.0):
        for wear in wears:
            wear.run_due(now_s)
    until(lambda: whole_wear(wears)["endurance_left"] == 0.4, "the drives have answered")
    shown = whole_wear(wears)
    assert (shown["written_bytes"], shown["write_rate"]) == (620, 31.0)
    assert whole_wear(wears[2:]) == dict.fromkeys(shown)


def test_what_a_drive_was_written_for_its_wear_tells_how_much_it_bears(tmp_path: Path) -> None:
    log = {"percentage_used": 4, "data_units_written": 100_000_000}
    assert life_of({"nvme_smart_health_information_log": log}) == pytest.approx(1.28e15)
    assert life_of({"nvme_smart_health_information_log": {**log, "percentage_used": 0}}) is None
    assert life_of({"nvme_smart_health_information_log": {"percentage_used": 4}}) is None
    assert life_of(None) is None
    fd = os.open(tmp_path, os.O_RDONLY)
    wear = DeviceWear(fd, lambda _: None, lambda _: Endurance(0.96, 1.28e15))
    os.close(fd)
    for now_s in (0.0, 20.0):
        wear.run_due(now_s)
    until(lambda: wear.shown()["endurance_left_bytes"] is not None, "the drive's answer")
    assert whole_wear([wear])["endurance_left_bytes"] == pytest.approx(1.2288e15)
