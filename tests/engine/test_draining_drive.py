"""A store of three drives, one of which is emptied: at which pace, and what its header says."""

import json
import time
from collections.abc import Iterator

import pytest

from kvfs.core.drives import Numbering
from tests.support.clients.stepping import until
from tests.support.store.serving import Serving
from tests.support.store.stores import MIB, Host, host
from tests.support.store.three_drives import DRIVES, store_nine

#: Twice what one step evicts: so many extents may wait to be unlinked before the next one.
WAITING = 64
STEP = 32
STEP_PAUSE_S = 0.1
BLOCKS = 3 * (WAITING + 3 * STEP)


@pytest.fixture
def pool() -> Iterator[Host]:
    """Yield a host with a pool on three drives of the same size; no store runs yet."""
    with host(others_bytes=[64 * MIB] * (DRIVES - 1)) as made:
        yield made


def test_no_more_is_evicted_while_its_unlinks_pile_up(pool: Host) -> None:
    client = Serving(pool)
    inos = [client.put(b"%d" % number, b"x" * 500) for number in range(BLOCKS)]
    held = [Numbering(DRIVES).drive(ino) for ino in inos].count(1)
    assert held > WAITING + 2 * STEP
    with client.guard.held("unlink", below=pool.drives[1]):
        client.store.empty_drive(1)

        def evicted() -> int:
            client.store.tick()
            client.loop.run()
            return int(client.store.describe()["cache"]["evicted"]["command"]["blocks"])

        until(lambda: evicted() >= WAITING, "the first steps are done")
        until_s = time.monotonic() + 5 * STEP_PAUSE_S
        while time.monotonic() < until_s:
            assert evicted() <= WAITING + STEP
    until(lambda: evicted() == held, "and the others are")
    assert client.store.describe()["drives"]["1"]["blocks"] == 0
    client.stop_serving_now()


def test_a_drive_that_is_emptied_counts_by_what_it_still_holds(pool: Host) -> None:
    """In the capacity, and for statfs; all of it once it is not emptied any more."""
    store = pool.start()
    store_nine(pool)
    each_bytes, before = 64 * MIB, store.totals()
    held_bytes = store.describe()["drives"]["1"]["used_bytes"]
    assert held_bytes > 0
    assert store.describe()["capacity_bytes"] == 3 * each_bytes
    store.empty_drive(1)
    figures, totals = store.describe(), store.totals()
    assert figures["capacity_bytes"] == 2 * each_bytes + held_bytes
    assert before.blocks - totals.blocks == (each_bytes - held_bytes) // 4096
    assert totals.blocks_free <= totals.blocks
    for drive in (0, 2):
        store.empty_drive(drive)
    assert store.describe()["capacity_bytes"] == 3 * each_bytes, "then all take blocks"


def test_only_the_header_of_a_drive_that_is_emptied_says_so(pool: Host) -> None:
    pool.start()
    store_nine(pool)
    before = [(drive / "POOL").read_bytes() for drive in pool.drives]
    pool.store.empty_drive(1)
    after = [(drive / "POOL").read_bytes() for drive in pool.drives]
    assert [one == other for one, other in zip(before, after, strict=True)] == [True, False, True]
    assert json.loads(after[1]) == json.loads(before[1]) | {"draining": True}
    pool.stop()
    store = pool.start()
    assert store.describe()["drives"]["1"]["state"] == "draining"
