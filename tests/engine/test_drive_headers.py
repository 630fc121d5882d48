"""The header of each drive says which it is of its pool, and a pool is opened whole or not."""

import contextlib
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from kvfs.core.drives import DRIVES_MAX
from kvfs.core.errors import SourceForeign, SourceMissing, UsageError
from kvfs.devices import Device, open_drives, open_source
from kvfs.devices.pool_files import new_headers, parse_header, read_header, write_header
from tests.support.mounts.mounting import workplace
from tests.support.store.stores import MIB, make_pool


@pytest.fixture
def place() -> Iterator[Path]:
    with workplace() as found:
        yield found


def pool_of(place: Path, name: str, drives: int) -> list[str]:
    """Make a pool of so many drives in *place*; return their directories by number."""
    paths = [place / f"{name}{drive}" for drive in range(drives)]
    for path, header in zip(paths, new_headers([64 * MIB] * drives), strict=True):
        path.mkdir()
        make_pool(path, header)
    return [*map(str, paths)]


def test_the_header_of_one_drive_has_no_word_of_drives(place: Path) -> None:
    [path] = pool_of(place, "only", 1)
    said = json.loads((Path(path) / "POOL").read_text())
    assert said.keys() == {"format", "epoch", "uuid", "created_ns", "kvfs", "capacity_bytes"}
    assert said["format"] == 1


@pytest.mark.parametrize("drives", [1, 2, DRIVES_MAX])
def test_what_is_written_is_read(tmp_path: Path, drives: int) -> None:
    headers = new_headers([None] * drives)
    fd = os.open(tmp_path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        for header in headers:
            write_header(fd, header)
            assert read_header(fd, "here") == header
    finally:
        os.close(fd)
    assert len({header.uuid for header in headers}) == drives
    assert len({header.epoch for header in headers}) == 1


@pytest.mark.parametrize(
    "wrong",
    [
        {"drive": 2},
        {"drive": -1},
        {"drive": 0},
        {"drives": []},
        {"drives": 7},
        {"drives": ["one"]},
        {"drives": [*map(str, range(DRIVES_MAX)), "b"], "drive": DRIVES_MAX},
    ],
)
def test_a_header_that_contradicts_itself_is_refused(wrong: dict[str, Any]) -> None:
    right = {
        "format": 2,
        "epoch": 1,
        "uuid": "b",
        "created_ns": 1,
        "kvfs": "x",
        "capacity_bytes": None,
        "pool": "a",
        "drive": 1,
        "drives": ["a", "b"],
    }
    assert parse_header(json.dumps(right).encode(), "here").several is not None
    with pytest.raises(SourceForeign, match="not a pool's header"):
        parse_header(json.dumps({**right, **wrong}).encode(), "here")


def opened_numbers(device: Device) -> list[int]:
    with device:
        return [one.header.drive for one in (device, *device.more)]


def test_drives_are_opened_in_the_order_of_their_numbers(place: Path) -> None:
    first, second, third = pool_of(place, "drive", 3)
    device = open_drives([third, first, second])
    assert opened_numbers(device) == [0, 1, 2]
    assert device.capacities_bytes == (64 * MIB,) * 3
    with contextlib.closing(open_drives([first, second, third])):  # all are free again
        pass


def test_a_drive_of_several_is_not_taken_for_the_pool(place: Path) -> None:
    """It goes on without the other, unless all are wanted."""
    drives = pool_of(place, "drive", 2)
    for number, path in enumerate(drives):
        missing = rf"is drive {number} of a pool of 2, and drive {1 - number} \(UUID .*cannot be"
        with pytest.raises(SourceMissing, match=missing):
            open_source(path, all_drives=True)
        with pytest.raises(SourceMissing, match=missing):
            open_drives([path], all_drives=True)
        with contextlib.closing(open_source(path)) as device:
            assert [one.header.drive for one in device.missing] == [1 - number]
            assert device.home.source == path


def test_only_all_drives_of_one_pool_are_one(place: Path) -> None:
    drives, others = pool_of(place, "drive", 2), pool_of(place, "other", 2)
    [alone] = pool_of(place, "only", 1)
    for given, why in (
        ([drives[0], others[1]], "of another pool"),
        ([drives[0], others[0]], "of another pool"),
        ([alone, drives[1]], "pool of one drive"),
        ([drives[1], alone], "pool of one drive"),
    ):
        with pytest.raises(UsageError, match=why):
            open_drives(given)
    with contextlib.closing(open_drives(drives)), contextlib.closing(open_drives([alone])):
        pass  # nothing is left locked


@pytest.mark.parametrize(
    "wrong", [{"epoch": 1 << 64}, {"created_ns": 1 << 64}, {"kvfs": "x" * (16 << 10)}]
)
def test_a_header_that_nobody_writes_is_refused(tmp_path: Path, wrong: dict[str, Any]) -> None:
    fd = os.open(tmp_path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        (header,) = new_headers([None])
        write_header(fd, header)
        said = json.loads((tmp_path / "POOL").read_text())
        (tmp_path / "POOL").write_text(json.dumps({**said, "epoch": (1 << 64) - 1}))
        assert read_header(fd, "here") == header._replace(epoch=(1 << 64) - 1)
        (tmp_path / "POOL").write_text(json.dumps({**said, **wrong}))
        with pytest.raises(SourceForeign, match="not a pool's header"):
            read_header(fd, "here")
    finally:
        os.close(fd)
