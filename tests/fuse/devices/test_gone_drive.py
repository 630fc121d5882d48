"""A mounted pool of two drives, one of which fails all that it is asked, while nobody stores.

Nothing is written there, so its file system does not find out. The server does, and goes on without
it, as without one whose file system has shut itself down.
"""

import os
from collections.abc import Iterator
from contextlib import ExitStack
from typing import Final

import pytest

from kvfs.core.source_list import listed
from tests.support.clients.stamped import seed_of
from tests.support.clients.stepping import until
from tests.support.devices.failing_drive import FailingDrive, failing_drive
from tests.support.devices.failing_drive_program import Fails
from tests.support.devices.loop import loop_device
from tests.support.mounts.drives import names_on, store
from tests.support.mounts.mounting import Mounted, run_kvfs, skip_without_mounts, workplace

pytestmark = [pytest.mark.needs_fuse, pytest.mark.needs_loop]

BLOCKS: Final = 12
SIZE_BYTES: Final = 100_000
DRIVE_BYTES: Final = 400 << 20


@pytest.fixture(params=[0, 1])
def gone(request: pytest.FixtureRequest) -> int:
    """Return the number of the drive that fails."""
    number: int = request.param
    return number


@pytest.fixture
def failing() -> Iterator[FailingDrive]:
    with failing_drive(DRIVE_BYTES) as made:
        yield made


@pytest.fixture
def mount(gone: int, failing: FailingDrive) -> Iterator[Mounted]:
    """A mount of a new pool, with blocks on both drives."""
    skip_without_mounts()
    with ExitStack() as stack:
        place = stack.enter_context(workplace("disk"))
        sources = [stack.enter_context(loop_device(DRIVE_BYTES)).path]
        sources.insert(gone, failing.path)
        run_kvfs("mkfs", *sources)
        made = stack.enter_context(Mounted(listed(sources), place / "kv"))
        for number in range(BLOCKS):
            store(made.path, f"{number}", SIZE_BYTES, 1)
        run_kvfs("sync", str(made.path))
        yield made


def state_of(mount: Mounted, drive: int) -> str:
    return str(mount.status()["drives"][f"{drive}"]["state"])


def all_whole(mount: Mounted, names: set[str]) -> None:
    """Just these are there, and whole."""
    assert set(os.listdir(mount.path)) == names
    for name in names:
        assert seed_of((mount.path / name).read_bytes(), name, SIZE_BYTES) == 1


def test_the_rest_is_served_and_servers_follow(
    mount: Mounted, failing: FailingDrive, gone: int
) -> None:
    names = {f"{number}" for number in range(BLOCKS)}
    kept = names - names_on(mount.path, gone)
    assert kept != names
    failing.fail(reads=Fails.ALL, writes=Fails.ALL)
    until(lambda: state_of(mount, gone) == "failed", "the server finds out")
    until(lambda: mount.status()["blocks"] == len(kept), "what was there is forgotten")
    all_whole(mount, kept)
    mount.kill_server()
    mount.follow_server()
    assert state_of(mount, gone) == "missing"
    store(mount.path, "after", SIZE_BYTES, 1)
    all_whole(mount, kept | {"after"})
    mount.stop()
    failing.recover()
    mount.start()
    assert state_of(mount, gone) == "serving"
    all_whole(mount, kept | {"after"})


def test_reads_that_fail_alone_cost_no_drive(
    mount: Mounted, failing: FailingDrive, gone: int
) -> None:
    before = failing.failed()
    failing.fail(reads=Fails.ALL)
    until(lambda: failing.failed() >= before + 8, "it was asked again and again")
    assert state_of(mount, gone) != "failed"
    failing.recover()
    store(mount.path, "after", SIZE_BYTES, 1)
