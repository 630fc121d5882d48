"""A store of three drives, one of which does not answer for a while, or answers late."""

import contextlib
from collections.abc import Iterator
from dataclasses import replace

import pytest

from kvfs.core.drives import Numbering
from kvfs.core.errors import NotAtHand, NotFound
from kvfs.core.types import ROOT_INODE, DriveNo, InodeNo
from tests.support.clients.stepping import until
from tests.support.store.serving import Serving
from tests.support.store.stores import FILE, MIB, Host, host

pytestmark = pytest.mark.usefixtures("caplog")

_DRIVES = 3
#: Whatever may wait for a drive.
CALLS = (
    *("open", "pread", "preadv", "pwrite", "ftruncate", "fallocate", "fsync", "fdatasync"),
    *("syncfs", "sync_file_range", "unlink", "utime", "stat", "statvfs", "mkdir"),
    *("setxattr", "getxattr", "listxattr", "removexattr"),
)


@pytest.fixture
def pool() -> Iterator[Host]:
    """Yield a host with a pool on three drives of the same size; no store runs yet."""
    with host(others_bytes=[64 * MIB] * (_DRIVES - 1)) as made:
        yield made


@pytest.fixture
def client(pool: Host) -> Iterator[Serving]:
    """Yield a client of a store that serves, with some extents ready on each drive."""
    made = Serving(pool, replace(pool.settings, device_silent_s=1.0, durable_within_s=1.0))
    for _ in range(3):
        made.tick()
    until(lambda: is_known(made, ["serving"] * _DRIVES), "all answer")
    yield made
    made.stop_serving_now()


def states(client: Serving) -> list[str]:
    """Let a tick pass, and return how each drive answers."""
    client.store.tick()
    client.loop.run()
    return client.store.drive_states


def is_known(client: Serving, expected: list[str]) -> bool:
    """Let a tick pass; whether drives answer as *expected*, and none that does is being asked.

    Then that stays so until the next tick, however long the machine takes to come to it.
    """
    asked = [state == "silent" for state in expected]
    return states(client) == expected and client.store.drives_asked == asked


def drive_of(ino: InodeNo) -> DriveNo:
    return Numbering(_DRIVES).drive(ino)


def test_a_silent_drive_gets_no_blocks_and_comes_back_by_itself(
    pool: Host, client: Serving
) -> None:
    before = [client.put(b"before %d" % number, b"x" * 5000) for number in range(_DRIVES)]
    assert sorted(map(drive_of, before)) == [0, 1, 2]
    with client.guard.held(*CALLS, below=pool.drives[1]):
        until(lambda: is_known(client, ["serving", "silent", "serving"]), "it is found out")
        assert client.store.describe()["device_state"] == "silent"
        assert client.store.describe()["device_silent_s"] >= 1
        meanwhile = [client.put(b"meanwhile %d" % number, b"y" * 5000) for number in range(12)]
        assert [sorted(map(drive_of, meanwhile)).count(at) for at in range(_DRIVES)] == [6, 0, 6]
        for number in range(12):
            assert client.get(b"meanwhile %d" % number) == b"y" * 5000
    until(lambda: is_known(client, ["serving"] * _DRIVES), "it answers again")
    after = [client.put(b"after %d" % number, b"z" * 5000) for number in range(12)]
    assert set(map(drive_of, after)) == {0, 1, 2}
    for number in range(_DRIVES):
        assert client.get(b"before %d" % number) == b"x" * 5000
    client.finish_jobs()


def test_a_drive_that_answers_late_is_passed_over(pool: Host, client: Serving) -> None:
    with client.guard.held("preadv", below=pool.drives[2]):
        until(lambda: states(client)[2] != "serving", "it is found out")
    until(lambda: is_known(client, ["serving", "serving", "slow"]), "it has answered late")
    inos = [client.put(b"%d" % number, b"x") for number in range(6)]
    assert set(map(drive_of, inos)) == {0, 1}
    until(lambda: is_known(client, ["serving"] * _DRIVES), "it answers in time")
    inos = [client.put(b"again %d" % number, b"x") for number in range(6)]
    assert set(map(drive_of, inos)) == {0, 1, 2}
    client.finish_jobs()


def test_while_no_drive_answers_as_it_should_all_get_blocks(client: Serving) -> None:
    """As with one drive: a slow one takes what it is given."""
    with client.guard.held("preadv"):
        until(lambda: is_known(client, ["silent"] * _DRIVES), "it is found out")
        inos = [client.put(b"%d" % number, b"x") for number in range(6)]
    assert set(map(drive_of, inos)) == {0, 1, 2}
    client.finish_jobs()


def test_what_a_create_lacks_is_brought_by_its_own_drive(client: Serving) -> None:
    """A silent one keeps creates on the others from nothing."""
    asked: set[DriveNo] = set()
    while len(asked) < _DRIVES:
        try:
            client.store.create(ROOT_INODE, b"taken", FILE, 0, 0)
        except NotAtHand as lack:
            lacking = lack
        else:
            client.unlink(b"taken")
            continue
        client.wait_for(client.bring(lacking))
        opened, _ = client.store.create(ROOT_INODE, b"taken", FILE, 0, 0)
        assert drive_of(opened.ino) == drive_of(lacking.ino)
        asked.add(drive_of(opened.ino))
        client.unlink(b"taken")


def test_who_waits_for_room_asks_the_drive_that_frees_it(pool: Host, client: Serving) -> None:
    there = next(
        ino for number in range(9) if drive_of(ino := client.put(b"%d" % number, b"x" * MIB)) == 2
    )
    for number in range(9):
        with contextlib.suppress(NotFound):
            client.unlink(b"%d" % number)
    client.store.erase_removed()
    with client.guard.held("unlink", below=pool.drives[2]), pytest.raises(NotAtHand) as lacking:
        client.store.require_space(64 * MIB, there)
    assert drive_of(lacking.value.ino) == 2
    client.finish_jobs()


def test_blocks_of_the_others_become_durable_meanwhile(pool: Host, client: Serving) -> None:
    inos = [client.put(b"%d" % number, b"x" * 5000) for number in range(6)]
    stuck = {ino for ino in inos if drive_of(ino) == 1}
    assert len(stuck) == 2
    with client.guard.held(*CALLS, below=pool.drives[1]):
        until(lambda: is_known(client, ["serving", "silent", "serving"]), "it is found out")
        inos += [client.put(b"later %d" % number, b"x") for number in range(4)]

        def listed() -> set[InodeNo]:
            states(client)
            return set(filter(client.store.is_waiting_for_device, inos))

        until(lambda: listed() == stuck, "all others are durable")
        assert all(client.store.identity(ino) for ino in inos if ino not in stuck)
    until(lambda: not listed(), "these are, too")
    client.finish_jobs()
