"""What the tests of devices share: sources of each kind, and their state before and after."""

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Final, NamedTuple

import pytest

from kvfs import devices
from kvfs.core.errors import CommandError
from kvfs.devices.device import Fill
from kvfs.devices.pool_files import PoolHeader
from tests.support.devices.loop import digest_of, loop_device
from tests.support.mounts.mounting import own_tmpfs, why_no_mounts, workplace

MIB: Final = 1 << 20
#: XFS takes no less than 300 MiB.
DRIVE_BYTES: Final = 400 * MIB


class Source(NamedTuple):
    """A SOURCE that a test may use, and the file or directory in which its bytes lie."""

    path: str
    bytes_at: Path

    def state(self) -> object:
        """Return a value that differs when a byte, a name or a time of change does."""
        if self.bytes_at.is_file():
            return digest_of(self.bytes_at)
        return {
            str(path.relative_to(self.bytes_at)): (
                (status := path.lstat()).st_mtime_ns,
                status.st_ctime_ns,
                path.read_bytes() if path.is_file() else None,
            )
            for path in (self.bytes_at, *self.bytes_at.rglob("*"))
        }


def format_source(
    source: str,
    *,
    size_bytes: int | None = None,
    capacity_bytes: int | None = None,
    force: bool = False,
    fill: Fill = lambda _pool_fd: None,
) -> PoolHeader:
    """Make a pool of *source*: without an index, which no test of devices alone looks at."""
    return devices.format_source(
        source, fill=fill, size_bytes=size_bytes, capacity_bytes=capacity_bytes, force=force
    )


@contextlib.contextmanager
def blank_source(kind: str) -> Iterator[Source]:
    """Yield a blank source: ``block``, ``image``, or a ``directory`` in memory."""
    if kind == "block":
        with loop_device(DRIVE_BYTES) as drive:
            yield Source(*drive)
        return
    if kind == "directory" and why_no_mounts() is None:
        with own_tmpfs() as path:  # no other test changes what its statfs tells
            yield Source(str(path), path)
        return
    with workplace() as place:
        path = place / "source"
        if kind == "image":
            path.touch()
            os.truncate(path, DRIVE_BYTES)
        else:
            path.mkdir()
        yield Source(str(path), path)


@contextlib.contextmanager
def untouched(source: Source) -> Iterator[None]:
    """Expect that not a byte of the source is written, nor a name."""
    before = source.state()
    yield
    assert source.state() == before


@contextlib.contextmanager
def refused(kind: type[CommandError], *words: str) -> Iterator[None]:
    """Expect a refusal of exactly *kind*, in one line that holds all *words*."""
    with pytest.raises(CommandError) as caught:
        yield
    line = str(caught.value)
    assert type(caught.value) is kind, line
    assert "\n" not in line
    assert not [word for word in words if word not in line], line
