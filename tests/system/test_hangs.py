"""Drives that hang, and drives that are slow, under clients of every kind.

No call that needs no device waits for one, no store waits long, and afterwards all is right. As a
proof (`make proof`): ten hangs of a minute on each data path.
"""

import contextlib
import errno
import json
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final, NamedTuple

import pytest

from tests.support.clients.stepping import until
from tests.support.devices.calls_at_a_silence import (
    BLOCKS,
    DATA,
    Calls,
    calling,
    calls_with_device,
    calls_without_device,
    load_direct,
    prepare,
    store,
    waits_of_main_thread,
)
from tests.support.devices.failing_drive import FailingDrive, failing_drive, mounted_on
from tests.support.mounts.mounting import Mounted, own_tmpfs, run_kvfs, skip_without_mounts

pytestmark = [pytest.mark.needs_fuse, pytest.mark.needs_loop]

#: Blocks that are older than the window when the drive hangs.
OLD: Final = 100
#: ``device_silent_s``, and one more.
STORE_S: Final = 6.0
#: A drive that answers, but only after so long.
DELAY_S: Final = 2.0


class Size(NamedTuple):
    """How long and how often, and how much longer calls may take that need no device."""

    hangs: int
    hang_s: float
    slow_s: float
    quiet_s: float
    #: In CI other tests run beside it, and seconds say little.
    p99_more_s: float
    longest_s: float


IN_CI: Final = Size(1, 4.0, 8.0, 1.0, p99_more_s=2.0, longest_s=4.0)
WHOLE: Final = Size(10, 60.0, 60.0, 10.0, p99_more_s=0.2, longest_s=1.0)


@pytest.fixture(params=[IN_CI, pytest.param(WHOLE, marks=pytest.mark.proof)], ids=["ci", "whole"])
def size(request: pytest.FixtureRequest) -> Size:
    found = request.param
    assert isinstance(found, Size)
    return found


@pytest.fixture
def drive() -> Iterator[FailingDrive]:
    skip_without_mounts()
    with failing_drive() as made:
        yield made


@pytest.fixture(params=["daemon", "passthrough"])
def mounted(drive: FailingDrive, request: pytest.FixtureRequest) -> Iterator[Mounted]:
    """A mount of *drive* with old blocks, and with those on which the calls are made."""
    with mounted_on(drive, str(request.param)) as mount:
        (mount.path / "old").mkdir()
        for number in range(OLD):
            store(mount.path / "old", f"{number}")
        prepare(mount.path)
        run_kvfs("sync", str(mount.path))
        (mount.path / "loaded" / "0").read_bytes()
        yield mount
        mount.stop()
        assert run_kvfs("fsck", drive.path).returncode == 0


@pytest.fixture
def other() -> Iterator[Mounted]:
    """A mount of another drive, which answers."""
    with own_tmpfs() as pool, Mounted(pool, pool.parent.parent / "kv") as mount:
        prepare(mount.path)
        (mount.path / "loaded" / "0").read_bytes()
        yield mount


def passes(seconds: float) -> None:
    """Return after *seconds*: how long the drive hangs is what is tried."""
    threading.Event().wait(seconds)


def longest(kinds: dict[str, Calls]) -> dict[str, float]:
    return {name: round(calls.longest_s, 3) for name, calls in kinds.items()}


def p99(kinds: dict[str, Calls]) -> dict[str, float]:
    return {name: round(calls.p99_s, 3) for name, calls in kinds.items()}


def assert_unharmed(before: dict[str, float], kinds: dict[str, Calls], size: Size) -> None:
    """Expect that calls of *kinds* took no longer than usual, and none failed."""
    errors = {name: sorted(calls.errors) for name, calls in kinds.items() if calls.errors}
    shown = json.dumps(
        {"before": before, "p99_s": p99(kinds), "longest_s": longest(kinds), "errors": errors}
    )
    print(shown)
    assert not errors, shown
    assert all(calls.p99_s <= before[name] + size.p99_more_s for name, calls in kinds.items()), (
        shown
    )
    assert max(longest(kinds).values()) <= size.longest_s, shown


def quiet_p99(mounted: Mounted, size: Size) -> dict[str, float]:
    with calling(calls_without_device(mounted.path), calls_with_device(mounted.path)) as (free, _):
        passes(size.quiet_s)
    return p99(free)


@contextlib.contextmanager
def watched(mounted: Mounted, other: Mounted, size: Size) -> Iterator[dict[str, Calls]]:
    """Make calls of every kind on both mounts meanwhile; expect what they are promised."""
    before, before_other = quiet_p99(mounted, size), quiet_p99(other, size)
    server_pid = mounted.status()["server_pid"]
    direct = {"direct": lambda number: check_old(mounted.path, number % OLD)}
    with (
        waits_of_main_thread(server_pid) as waits,
        calling(
            calls_without_device(mounted.path),
            calls_with_device(mounted.path),
            direct,
            calls_without_device(other.path),
        ) as (free, bound, cold, others),
    ):
        yield bound
    assert waits == []
    assert_unharmed(before, free, size)
    assert_unharmed(before_other, others, size)
    print(json.dumps({"stores": longest(bound), "cold loads": longest(cold)}))
    assert max(longest(bound).values()) <= STORE_S
    assert {error for calls in bound.values() for error in calls.errors} <= {errno.EIO}
    # A read on the daemon path ends (``device_deadline_s``); on passthrough it waits.
    assert cold["direct"].errors <= {errno.EIO}
    status: dict[str, Any] = mounted.status()
    assert (status["server_pid"], status["restarts"]) == (server_pid, 0), mounted.errors()


def check_old(kv: Path, number: int) -> None:
    assert load_direct(kv / "old" / f"{number}") == DATA


def assert_all_right(mounted: Mounted) -> None:
    """Expect every block that is older than the window, and that stores go on."""
    until(lambda: mounted.status()["device_state"] == "serving", "it answers again")
    for number in range(OLD):
        check_old(mounted.path, number)
    assert (mounted.path / "loaded" / f"{BLOCKS - 1}").read_bytes() == DATA
    store(mounted.path / "stored", "afterwards")
    assert (mounted.path / "stored" / "afterwards").read_bytes() == DATA


def test_a_drive_that_hangs(
    mounted: Mounted, drive: FailingDrive, other: Mounted, size: Size
) -> None:
    """[device-silent] Again and again, and another mount does not notice."""
    for _ in range(size.hangs):
        with watched(mounted, other, size) as bound, drive.silent():
            passes(size.hang_s)
            until(lambda: all(calls.done for calls in bound.values()), "stores are refused")
        assert_all_right(mounted)


def test_a_drive_that_is_slow(
    mounted: Mounted, drive: FailingDrive, other: Mounted, size: Size
) -> None:
    """[device-silent] Each of its answers takes two seconds."""
    with watched(mounted, other, size), drive.slow(DELAY_S):
        passes(size.slow_s)
    assert_all_right(mounted)
