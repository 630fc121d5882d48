"""Stores through a mapping in a full pool on XFS, larger than their directory had before."""

from collections.abc import Iterator
from pathlib import Path
from typing import Final

import pytest

from tests.support.clients.mapped_writer import begin, ends
from tests.support.clients.stamped import seed_of
from tests.support.kernel.calls import read_file, write_file
from tests.support.mounts.mounting import Mounted, loop_device, skip_without_mounts, workplace

pytestmark = [pytest.mark.needs_fuse, pytest.mark.needs_loop]

MIB: Final = 1 << 20
POOL_BYTES: Final = 1024 * MIB
USUAL_BYTES: Final = 8 * MIB
LARGE_BYTES: Final = 80 * MIB
AT_ONCE: Final = 4
WAIT_S: Final = 120.0


@pytest.fixture(params=[pytest.param("daemon", marks=pytest.mark.proof), "passthrough"])
def full(request: pytest.FixtureRequest) -> Iterator[Mounted]:
    """A drive of a gigabyte, full of blocks of 8 MiB, which may all go."""
    skip_without_mounts()
    flags = (f"--data-path={request.param}", "--set", "index_preallocate_bytes=1M")
    with (
        workplace("disk") as place,
        loop_device(POOL_BYTES) as device,
        Mounted(device, place / "kv", *flags) as mounted,
    ):
        for number in range(4):
            fill(mounted, mounted.path / f"{number}")
        yield mounted
        mounted.stop()
        assert mounted.errors() == []


def fill(mounted: Mounted, directory: Path) -> None:
    """Store a quarter of the pool, and a little more, in *directory*."""
    directory.mkdir()
    data = bytes(USUAL_BYTES)
    for number in range(POOL_BYTES // USUAL_BYTES // 4 + 2):
        write_file(directory / f"usual{number}.tmp", data)
        (directory / f"usual{number}.tmp").rename(directory / f"usual{number}")


@pytest.mark.parametrize("how", ["mapped", "written"])
def test_drafts_that_were_set_to_their_length_have_their_space(full: Mounted, how: str) -> None:
    """[truncate-up] However many at once, up to the bound; neither SIGBUS nor ENOSPC."""
    assert full.status()["eviction"]["blocks"] > 0
    for turn in range(2):
        names = [f"large{turn}-{number}" for number in range(AT_ONCE)]
        writers = [
            begin(full.path / f"{number}", name, LARGE_BYTES, how)
            for number, name in enumerate(names)
        ]
        assert list(ends(writers, WAIT_S)) == [0] * AT_ONCE
        for number, name in enumerate(names):
            seed_of(read_file(full.path / f"{number}" / name), name, LARGE_BYTES)
    assert full.status()["eviction"]["overruns"] == 0
