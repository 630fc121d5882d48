"""Several commands want one image file at a time: one gets it, and none harms another."""

import fcntl
import os

import pytest

from kvfs.core.errors import SourceBusy
from tests.support.devices.pools import MIB, format_source, refused
from tests.support.forks.process import run
from tests.support.mounts.mounting import KVFS, ROOT, workplace

pytestmark = pytest.mark.needs_loop


def test_an_image_that_another_was_faster_to_take_is_not_removed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Between its creation and our lock: he makes the pool, in this very file."""
    with workplace() as place:
        path = place / "image"
        flock = fcntl.flock

        def too_late(fd: int, operation: int) -> None:
            monkeypatch.setattr(fcntl, "flock", flock)
            taken.append(os.open(path, os.O_RDWR))
            flock(taken[0], fcntl.LOCK_EX)
            flock(fd, operation)

        taken: list[int] = []
        monkeypatch.setattr(fcntl, "flock", too_late)
        with refused(SourceBusy, str(path)):
            format_source(str(path), size_bytes=320 * MIB)
        assert os.path.samestat(os.fstat(taken[0]), path.stat())
        os.close(taken[0])


def test_an_image_that_becomes_a_pool_just_now_is_in_use() -> None:
    """Its file system is mounted, on no path, as one is that outlived its server."""
    with workplace() as place:
        path = place / "image"
        said: list[str] = []

        def fill(_pool_fd: int) -> None:
            done = run(
                [*KVFS, "fsck", str(path)], cwd=ROOT, capture_output=True, text=True, check=False
            )
            said.append(done.stderr)
            assert done.returncode == SourceBusy.exit_code

        format_source(str(path), size_bytes=320 * MIB, fill=fill)
        assert "is in use" in said[0]
