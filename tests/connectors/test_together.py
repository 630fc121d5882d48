"""Databases under ``evict=together``: a tier that was evicted is a fresh start, never a half."""

import os
from collections.abc import Iterator
from itertools import count
from pathlib import Path
from typing import Final

import pytest

from tests.connectors.connector import Connector, Drivers
from tests.support.mounts.mounting import Mounted, skip_without_mounts
from tests.support.mounts.places import blank_place, small_mount

pytestmark = pytest.mark.connectors

MIB: Final = 1 << 20
#: More than the WAL of SQLite or a table of RocksDB holds, less than ``together_max``.
PAGES: Final = 2000


@pytest.fixture(params=["daemon", "passthrough"])
def mounted(request: pytest.FixtureRequest) -> Iterator[Mounted]:
    skip_without_mounts()
    with blank_place() as place, small_mount(place, f"--data-path={request.param}") as mount:
        yield mount


@pytest.fixture(params=["rocksdb", "sqlite"])
def base(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def use(drivers: Drivers, base: str, directory: Path, *, pages: int = 0) -> int:
    """Open the database in a process that ends; store *pages* if there are any; return how many."""
    process = Connector(drivers.python, "databases", base)
    try:
        process.call("open", directory=str(directory))
        if pages:
            process.call("put", count=pages)
        found = process.call("right")
        process.end()
    finally:
        process.kill()
    return int(found)


def store_until(directory: Path, gone: Path, names: set[str]) -> None:
    """Store blocks until the first of *names* is gone from *gone*."""
    for number in count():
        (directory / "x.tmp").write_bytes(bytes(MIB))
        (directory / "x.tmp").rename(directory / f"{number}")
        if not names <= set(os.listdir(gone)):
            return
        assert number < 2000, "nothing of it is evicted"


def test_what_is_evicted_of_a_database_is_all_of_it(
    drivers: Drivers, mounted: Mounted, base: str
) -> None:
    """[together] Three times; and while it is open, others go."""
    directory, others = mounted.path / "base", mounted.path / "others"
    directory.mkdir()
    others.mkdir()
    os.setxattr(directory, "user.kvfs.evict", b"together")
    for _ in range(3):
        assert use(drivers, base, directory, pages=PAGES) == PAGES
        assert use(drivers, base, directory) == PAGES
        assert mounted.status()["together"]["units"] == 1
        store_until(others, directory, set(os.listdir(directory)))
        assert os.listdir(directory) == []


def test_a_database_that_is_open_stays(drivers: Drivers, mounted: Mounted, base: str) -> None:
    """[together] Its files are a unit that somebody writes."""
    directory, others = mounted.path / "base", mounted.path / "others"
    directory.mkdir()
    others.mkdir()
    os.setxattr(directory, "user.kvfs.evict", b"together")
    process = Connector(drivers.python, "databases", base)
    try:
        process.call("open", directory=str(directory))
        process.call("put", count=PAGES)
        for number in range(400):
            (others / "x.tmp").write_bytes(bytes(MIB))
            (others / "x.tmp").rename(others / f"{number}")
        assert process.call("right") == PAGES
        process.end()
    finally:
        process.kill()
    assert use(drivers, base, directory) == PAGES
