"""The wall clock is set forward or back: nothing gets old by that, and nothing stays for ever."""

import time

import pytest

from kvfs.core.directory_policy import TTL
from kvfs.core.errors import DeadInode
from kvfs.core.pool_layout import HEAT
from kvfs.core.types import ROOT_INODE, InodeNo
from kvfs.storage.age_clock import AgeClock
from tests.support.store.driven import Driven
from tests.support.store.stores import Host, make_directory, put, settle, write

pytestmark = pytest.mark.usefixtures("caplog")

DAY_NS = 86_400 * 10**9
COUNT = 20
#: More than one tick looks at.
MANY = 200
#: Longer than a server of files may be quiet (file_server_close_s).
LONG_DAYS = 1.0


def stored(store: Driven, parent: InodeNo, name: bytes) -> InodeNo:
    ino = put(store, parent, name + b".tmp", b"x" * 5000)
    store.rename(parent, name + b".tmp", parent, name)
    return ino


def with_ttl(running: Host) -> list[InodeNo]:
    """Store blocks that go when nobody used them for a week."""
    directory = make_directory(running, b"dir")
    running.store.set_xattr(directory, TTL, b"7d")
    return [stored(running.store, directory, b"%d" % number) for number in range(COUNT)]


def tick_expiry(store: Driven) -> None:
    """Let a whole pass through the heat begin and end."""
    for _ in range(4):
        store.let_pass_begin()
        store.tick()


def there(store: Driven, inos: list[InodeNo]) -> int:
    return sum(store.has_row(ino) for ino in inos)


@pytest.mark.parametrize("days", [30, -30, 3650])
def test_fresh_blocks_stay_whatever_the_wall_clock_says(running: Host, days: int) -> None:
    """30 days forward, and 20 of 20 fresh blocks were gone."""
    store, inos = running.store, with_ttl(running)
    tick_expiry(store)
    store.set_calendar(days)
    tick_expiry(store)
    assert there(store, inos) == COUNT
    assert not any(store.used_within(ino, 1) is False for ino in inos)
    store.let_days_pass(6)
    tick_expiry(store)
    assert there(store, inos) == COUNT
    store.let_days_pass(2)
    tick_expiry(store)
    assert there(store, inos) == 0


@pytest.mark.parametrize("days", [30, -30])
def test_blocks_of_a_wrong_clock_go_when_it_is_right_again(running: Host, days: int) -> None:
    """Stored while the clock was ahead, they stayed until the time came that it had said."""
    store = running.store
    store.set_calendar(days)
    inos = with_ttl(running)
    tick_expiry(store)
    store.set_calendar(-days)
    tick_expiry(store)
    assert there(store, inos) == COUNT
    store.let_days_pass(8)
    assert not any(store.used_within(ino, 7) for ino in inos)
    tick_expiry(store)
    assert there(store, inos) == 0


def test_a_rename_and_an_access_time_are_uses_whatever_is_set_then(running: Host) -> None:
    store = running.store
    inos = [stored(store, ROOT_INODE, b"%d" % number) for number in range(3)]
    store.tick()
    store.let_days_pass(8)
    store.tick()
    store.set_calendar(30)
    store.rename(ROOT_INODE, b"0", ROOT_INODE, b"renamed")
    store.change(inos[1], atime_ns=time.time_ns())
    store.set_calendar(-60)
    assert [store.used_within(ino, 7) for ino in inos] == [True, True, False]


@pytest.mark.parametrize("days", [30, -30])
def test_a_file_server_is_idle_only_when_it_is(running: Host, days: int) -> None:
    """A step forward counted it as closed while it wrote; one back kept it a writer for ever."""
    store = running.store
    opened, _ = store.create(ROOT_INODE, b"a", 0o100644, 0, 0)
    store.close(opened, writer=True)
    opened = store.open_served(opened.ino, writer=True)
    write(store, opened, b"x" * 5000)
    store.pass_looks(0.0)
    assert opened.served_writers == 1
    write(store, opened, b"y" * 5000)
    store.set_calendar(days)
    store.pass_looks(LONG_DAYS)  # the look that finds what was written beside the step
    assert opened.served_writers == 1, "nobody knows when it was written"
    store.pass_looks(LONG_DAYS)
    assert opened.served_writers == 0
    store.close_served(opened, writer=True)


# ---- the next servers ----


def test_what_a_start_without_the_heat_cannot_know_does_not_expire(running: Host) -> None:
    """Blocks with old times may have been read since; after a ttl it is known."""
    store, long = running.store, with_ttl(running)
    hour = make_directory(running, b"hour")
    store.set_xattr(hour, TTL, b"1h")
    short = [stored(store, hour, b"%d" % number) for number in range(COUNT)]
    settle(store)
    running.stop()
    (running.path / HEAT).unlink()
    store = running.start()
    store.set_calendar(30)
    settle(store)
    store.tick()
    store.let_days_pass(0.1)
    tick_expiry(store)
    assert all(store.used_within(ino, 7) is None for ino in long)
    assert (there(store, short), there(store, long)) == (0, COUNT)
    store.let_days_pass(8)
    tick_expiry(store)
    assert there(store, long) == 0


def test_every_server_of_a_boot_goes_on_with_the_same_clock(running: Host) -> None:
    base_ns = running.store.age_ns() - time.clock_gettime_ns(time.CLOCK_BOOTTIME)
    for end in (running.kill, running.stop):
        end()
        store = running.start()
        now_ns = store.age_ns() - time.clock_gettime_ns(time.CLOCK_BOOTTIME)
        assert abs(now_ns - base_ns) < 10**9
    clock = AgeClock.begun(base_ns, time.time_ns() + 30 * DAY_NS, 0)
    assert clock.base_ns == base_ns


def test_after_a_reboot_time_does_not_go_back(running: Host) -> None:
    store = running.store
    inos = with_ttl(running)
    store.let_days_pass(30)
    for ino in inos:
        store.touch(ino)
    settle(store)
    store.tick()
    store.save_heat()
    seen_ns = store.age_ns()
    running.kill()
    running.pretend_reboot()
    store = running.start()  # the wall clock is 30 days behind
    assert seen_ns - 10**9 <= store.age_ns() < seen_ns + DAY_NS
    settle(store)
    tick_expiry(store)
    assert there(store, inos) == COUNT
    assert not any(store.used_within(ino, 1) is False for ino in inos)


@pytest.mark.parametrize(
    ("wall_days", "seen_days", "begins_days"),
    [(20, 10, 20), (10, 20, 20), (0, 20, 20), (20, 0, 20), (20, 1 << 17, 20)],
)
def test_a_clock_begins_with_the_time_of_day_but_not_before_what_was_seen(
    wall_days: int, seen_days: int, begins_days: int
) -> None:
    clock = AgeClock.begun(None, wall_days * DAY_NS, seen_days * DAY_NS)
    assert 0 <= clock.now_ns() - begins_days * DAY_NS < DAY_NS


def test_what_is_gone_stays_gone(running: Host) -> None:
    """A handle of a block that expired is stale, as after an eviction."""
    store, inos = running.store, with_ttl(running)
    store.tick()
    store.let_days_pass(8)
    tick_expiry(store)
    with pytest.raises(DeadInode):
        store.record(inos[0])


def test_a_pass_goes_on_behind_the_last_block_that_it_looked_at(running: Host) -> None:
    store, directory = running.store, make_directory(running, b"dir")
    store.set_xattr(directory, TTL, b"7d")
    inos = [stored(store, directory, b"%d" % number) for number in range(MANY)]
    store.tick()
    store.let_days_pass(8)
    store.let_pass_begin()
    now_s = store.now_s()
    store.turn_clock(lambda: now_s)  # so that no other pass begins
    for _ in range(8):
        store.tick()
    assert there(store, inos) == 0
