"""Leases and pins keep a share of what the pool can hold, which may be less than its capacity."""

import errno
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import pytest

from tests.support.clients.callers import Caller, callers
from tests.support.clients.churn import own_xfs
from tests.support.clients.stepping import until
from tests.support.kernel.calls import tolerated
from tests.support.mounts.bounded_pool import BLOCK_BYTES as MIB
from tests.support.mounts.bounded_pool import store
from tests.support.mounts.mounting import (
    Mounted,
    loop_device,
    run_kvfs,
    skip_without_mounts,
    workplace,
)

pytestmark = [pytest.mark.needs_fuse, pytest.mark.needs_loop]

DRIVE_BYTES: Final = 320 * MIB
#: A directory's pool of so much, on a file system that others fill.
CAPACITY_BYTES: Final = 300 * MIB
#: What they leave.
LEFT_BYTES: Final = 250 * MIB


@pytest.fixture(params=["drive", "directory"])
def source(request: pytest.FixtureRequest) -> Iterator[tuple[str, tuple[str, ...]]]:
    """A source that gives less than the capacity, and flags for it."""
    skip_without_mounts()
    if request.param == "drive":
        with loop_device(DRIVE_BYTES) as device:
            yield device, ("--set", "index_preallocate_bytes=1M")
        return
    with own_xfs(768 * MIB) as pool:
        flags = ("--capacity", str(CAPACITY_BYTES), "--set", "index_preallocate_bytes=1M")
        (pool.parent / "others").touch()
        yield str(pool), flags


@pytest.fixture(params=["daemon", "passthrough"])
def mounted(
    request: pytest.FixtureRequest, source: tuple[str, tuple[str, ...]]
) -> Iterator[Mounted]:
    """A mount of it that everybody may store in, after others have taken what is theirs."""
    path, flags = source
    with workplace("disk") as place:
        where = place / "kv"
        with Mounted(
            path, where, f"--data-path={request.param}", "-o", "mode=0777", *flags
        ) as made:
            others = Path(path).parent / "others"
            if others.exists():
                status = os.statvfs(others)
                with others.open("r+b") as file:
                    free_bytes = status.f_bavail * status.f_frsize
                    os.posix_fallocate(file.fileno(), 0, free_bytes - LEFT_BYTES)
                # It looks at each tick, and believes some looks together.
                until(lambda: made.status()["usable_bytes"] < LEFT_BYTES, "it has seen that")
            yield made
            made.stop()
            assert made.errors() == []


def store_until_refused(caller: Caller, directory: Path) -> int:
    """Store blocks under final names; return how many."""
    for number in range(1000):
        with tolerated(errno.ENOSPC):
            store(caller, directory / f"{caller.pid}-{number:03}")
            continue
        (directory / f"{caller.pid}-{number:03}").unlink(missing_ok=True)
        return number
    raise AssertionError("it was never refused")


def test_who_keeps_all_that_it_stores_leaves_space_to_others(mounted: Mounted) -> None:
    """[life-leased] Its limit is a share of what there is: it is refused, and nobody else."""
    with callers(2) as (keeper, other):
        kept = store_until_refused(keeper, mounted.path)
        status = mounted.status()
        usable_bytes = status["usable_bytes"]
        assert usable_bytes <= status["capacity_bytes"]
        assert 0.85 * usable_bytes < kept * MIB < 0.95 * usable_bytes
        assert status["lease_max_bytes"] <= 0.92 * usable_bytes
        for number in range(20):
            draft = mounted.path / f"stored{number}.tmp"
            store(other, draft)
            other.os("rename", str(draft), str(draft.with_suffix("")))
        told = run_kvfs("doctor", str(mounted.path), check=False).stdout
        assert f"process {keeper.pid}" in told
        assert f"setfattr -n user.kvfs.lease -v none {mounted.path}" in told
        bounded = usable_bytes < status["capacity_bytes"]
        assert ("lease_max and pin_share are shares of that" in told) == bounded


def test_pins_leave_space_to_others(mounted: Mounted) -> None:
    """[capacity] What comes beyond the share of what there is may go."""
    pinned = mounted.path / "pinned"
    pinned.mkdir(mode=0o777)
    pinned.chmod(0o777)
    os.setxattr(pinned, "user.kvfs.pin", b"1")
    with callers(2) as (keeper, other):
        for number in range(CAPACITY_BYTES // MIB):
            draft = pinned / f"{number}.tmp"
            store(keeper, draft)
            keeper.os("rename", str(draft), str(draft.with_suffix("")))
        status = mounted.status()
        assert 0.4 * status["usable_bytes"] < status["pinned_bytes"] < 0.55 * status["usable_bytes"]
        for number in range(20):
            draft = mounted.path / f"stored{number}.tmp"
            store(other, draft)
            other.os("rename", str(draft), str(draft.with_suffix("")))
