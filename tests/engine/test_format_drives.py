"""Several sources become one pool, or nothing is written; and they end together."""

import contextlib
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import pytest

from kvfs.core.errors import (
    SourceBlank,
    SourceBusy,
    SourceForeign,
    SourceFull,
    SourceMissing,
    UsageError,
)
from kvfs.core.source_list import listed
from kvfs.devices import destroy_source, format_drives, open_drives, open_source
from kvfs.devices.pool_drives import SERVED_DRIVES_MAX
from kvfs.devices.pool_files import new_headers
from kvfs.devices.xfs_tools import is_cut_off_noted, note_cut_off
from kvfs.storage.inode_numbers import InodeNumbers
from kvfs.storage.pool_run import read_pool_run
from kvfs.storage.run_state import write_run_state
from kvfs.storage.syscalls import Syscalls
from tests.support.devices.pools import DRIVE_BYTES, MIB, Source, refused, untouched
from tests.support.mounts.mounting import own_tmpfs, workplace

DRIVES: Final = 3


def no_fill(_pool_fd: int) -> None:
    """Write no index."""


@contextlib.contextmanager
def sources_of_kind(kind: str) -> Iterator[list[Source]]:
    """Yield blank images, or directories in memory, each on a file system of its own."""
    with contextlib.ExitStack() as stack:
        if kind == "directory":
            paths = [stack.enter_context(own_tmpfs()) for _ in range(DRIVES)]
        else:
            place = stack.enter_context(workplace())
            paths = [place / f"image{number}" for number in range(DRIVES)]
            for path in paths:
                path.touch()
                os.truncate(path, DRIVE_BYTES)
        yield [Source(str(path), path) for path in paths]


@pytest.fixture(params=["image", "directory"])
def sources(request: pytest.FixtureRequest) -> Iterator[list[Source]]:
    with sources_of_kind(request.param) as found:
        yield found


@pytest.fixture
def images() -> Iterator[list[Source]]:
    with sources_of_kind("image") as found:
        yield found


def paths_of(sources: list[Source]) -> list[str]:
    return [source.path for source in sources]


@contextlib.contextmanager
def all_untouched(sources: list[Source]) -> Iterator[None]:
    with contextlib.ExitStack() as stack:
        for source in sources:
            stack.enter_context(untouched(source))
        yield


def test_several_sources_are_one_pool(sources: list[Source]) -> None:
    """Whatever order they are named in; and together they can be made blank again."""
    paths = paths_of(sources)
    headers = format_drives(paths, capacity_bytes=DRIVES * 64 * MIB, fill=no_fill)
    assert [header.drive for header in headers] == [0, 1, 2]
    assert len({header.epoch for header in headers}) == 1
    for order in (paths, paths[::-1]):
        with open_source(listed(order)) as device:
            assert device.sources == listed(paths)
            assert device.capacities_bytes == (64 * MIB,) * DRIVES
            assert [one.uuid for one in (device, *device.more)] == [h.uuid for h in headers]
            with refused(SourceBusy, order[0]):
                open_drives(order)
    with open_source(listed(paths), capacity_bytes=30 * MIB) as device:
        assert device.capacity_bytes == 30 * MIB
    with refused(UsageError, "more than the"):
        open_source(listed(paths), capacity_bytes=1 << 40)
    with all_untouched(sources), refused(UsageError, paths[0], "of a pool of 3"):
        destroy_source(listed(paths[:2]))
    destroy_source(listed(paths))
    with refused(SourceBlank, paths[0]):
        open_drives(paths)


def test_one_bad_source_leaves_all_as_they_were(sources: list[Source]) -> None:
    paths = paths_of(sources)
    for bad in range(DRIVES):
        format_drives([paths[bad]], fill=no_fill)
        with all_untouched(sources), refused(SourceForeign, paths[bad], "--force"):
            format_drives(paths, fill=no_fill)
        with open_drives([paths[bad]]), all_untouched(sources), refused(SourceBusy, paths[bad]):
            format_drives(paths, fill=no_fill, force=True)
        some = [paths[bad], paths[(bad + 1) % DRIVES]]
        for order in (some, some[::-1]):
            with refused(UsageError, some[1], "is blank"):
                open_drives(order)
        destroy_source(paths[bad])


def test_a_source_that_fails_late_leaves_the_others_blank(sources: list[Source]) -> None:
    """An image that was made for it is removed."""
    paths = paths_of(sources)
    new = f"{sources[0].bytes_at.parent}/new"
    if sources[0].bytes_at.is_file():
        paths[1:1] = [new]
    filled: list[int] = []

    def fill(pool_fd: int) -> None:
        filled.append(pool_fd)
        if len(filled) == len(paths):
            raise OSError(28, "No space left on device")

    with refused(SourceFull, paths[-1]):
        format_drives(paths, capacity_bytes=len(paths) * 64 * MIB, fill=fill)
    assert not os.path.exists(new)
    for path in paths_of(sources)[:-1]:
        with refused(SourceBlank, path):
            open_source(path)


def test_what_cannot_be_the_drives_of_one_pool(tmp_path: Path, images: list[Source]) -> None:
    paths = paths_of(images)
    link = tmp_path / "link"
    link.symlink_to(paths[0])
    beside, other = tmp_path / "beside", tmp_path / "other"
    for directory in (beside, other):
        directory.mkdir()
    small = tmp_path / "small"
    small.write_bytes(bytes(MIB))
    cases = (
        ([paths[0], paths[0]], UsageError, "is given twice"),
        ([paths[0], str(link)], UsageError, f"is given twice, as {paths[0]}"),
        ([paths[0], str(beside)], UsageError, "either directories or drives"),
        ([str(beside), str(other)], UsageError, "on one file system"),
        ([str(beside), str(beside)], UsageError, "given twice"),
        ([paths[0], str(small)], SourceFull, "a pool needs"),
        ([paths[0], str(tmp_path / "none")], SourceMissing, "No such file"),
        ([f"{number}" for number in range(SERVED_DRIVES_MAX + 1)], UsageError, "too many"),
    )
    for given, kind, said in cases:
        for name in given:
            if name.isdigit():
                (tmp_path / name).touch()
        whole = [str(tmp_path / name) if name.isdigit() else name for name in given]
        with all_untouched(images), refused(kind, said):
            format_drives(whole, fill=no_fill)
    with refused(UsageError, "too small"):
        format_drives(paths, capacity_bytes=2 * MIB, fill=no_fill)


def test_a_drive_named_twice_is_refused(images: list[Source]) -> None:
    paths = paths_of(images)
    format_drives(paths, fill=no_fill)
    with all_untouched(images):
        for given in ([paths[0], *paths], [*paths, paths[2]]):
            with refused(UsageError, "given twice"):
                open_drives(given)
            with refused(UsageError, "given twice"):
                destroy_source(listed(given))


def test_a_cut_off_drive_makes_the_index_distrusted(images: list[Source]) -> None:
    """What a drive lost is in its own log, and the RUNs of all say it.

    Noted before, and found by a start that was killed before it could say so.
    """
    paths = paths_of(images)
    format_drives(paths, fill=lambda pool_fd: InodeNumbers.create(pool_fd, Syscalls()))
    with open_drives(paths) as device:
        for pool_fd in device.pool_fds:
            write_run_state(pool_fd, Syscalls(), clean=False, run="a run")
    with open_drives(paths) as device:
        assert read_pool_run(device.run_places, Syscalls()).trusted
        epoch = device.epoch
    note_cut_off(epoch)
    with open_drives(paths) as device:
        assert not read_pool_run(device.run_places, Syscalls()).trusted
    assert not is_cut_off_noted(epoch)


def test_the_headers_of_directories_say_what_each_has(tmp_path: Path) -> None:
    with sources_of_kind("directory") as sources:
        format_drives(paths_of(sources), fill=no_fill)
        for number, source in enumerate(sources):
            said = json.loads((source.bytes_at / "POOL").read_text())
            assert (said["format"], said["drive"], len(said["drives"])) == (2, number, DRIVES)
            assert said["capacity_bytes"] > 64 * MIB
    assert new_headers([None])[0].several is None
