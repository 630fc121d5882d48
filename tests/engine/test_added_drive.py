"""What a crash leaves while a drive is added: all headers have one list, the old or the new."""

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import pytest

from kvfs.core.errors import SourceForeign, UsageError
from kvfs.devices import format_drives, format_one_more, open_drives
from kvfs.devices.pool_files import PoolHeader, one_more_header, parse_header
from tests.support.mounts.mounting import own_tmpfs

MOST: Final = 3


def no_fill(_pool_fd: int) -> None:
    """Write no index."""


@pytest.fixture
def places() -> Iterator[list[str]]:
    """Yield blank directories, each on a file system of its own."""
    with contextlib.ExitStack() as stack:
        yield [str(stack.enter_context(own_tmpfs())) for _ in range(MOST)]


def header(place: str) -> PoolHeader:
    return parse_header((Path(place) / "POOL").read_bytes(), place)


def new_pool(places: list[str]) -> PoolHeader:
    """Make a pool of *places* but the last, and the last one ready to join it."""
    *before, last = places
    first, *_ = format_drives(before, fill=no_fill)
    format_one_more(last, before, one_more_header(first), fill=no_fill)
    return header(last)


@pytest.mark.parametrize("drives", [2, 3])
def test_after_a_crash_all_drives_have_the_longer_list(places: list[str], drives: int) -> None:
    """However many of the others had been told of the new drive."""
    places = places[-drives:]
    added = new_pool(places)
    assert added.several is not None
    old = [(Path(place) / "POOL").read_bytes() for place in places[:-1]]
    for told in range(drives):
        for place, text in zip(places[told:-1], old[told:], strict=True):
            (Path(place) / "POOL").write_bytes(text)
        with open_drives(list(reversed(places))) as device:
            assert [one.source for one in device.drives] == places
            uuids = tuple(one.uuid for one in device.drives)
        assert uuids == added.several.drives
        assert [header(place).membership.drives for place in places] == [uuids] * drives
        assert {header(place).epoch for place in places} == {added.epoch}


@pytest.mark.parametrize("drives", [2, 3])
def test_a_drive_of_which_no_other_was_told_is_none(places: list[str], drives: int) -> None:
    places = places[-drives:]
    new_pool(places)
    before = [header(place) for place in places[:-1]]
    with open_drives(places[:-1]) as device:
        assert [one.source for one in device.drives] == places[:-1]
    assert [header(place) for place in places[:-1]] == before


def test_of_two_that_were_made_for_the_same_place_one_joins(places: list[str]) -> None:
    one, first, second = places
    made = format_drives([one], fill=no_fill)[0]
    for place in (first, second):
        format_one_more(place, [one], one_more_header(made), fill=no_fill)
    with open_drives([one, first]):
        pass
    with pytest.raises(UsageError, match="another pool"):
        open_drives([one, second])


def test_a_drive_of_a_pool_is_not_made_one_of_another(places: list[str]) -> None:
    one, other, _ = places
    made = format_drives([one], fill=no_fill)[0]
    format_drives([other], fill=no_fill)
    before = header(other)
    with pytest.raises((SourceForeign, UsageError)):
        format_one_more(other, [one], one_more_header(made), fill=no_fill)
    assert header(other) == before
