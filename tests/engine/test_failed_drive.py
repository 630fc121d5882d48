"""A store of three drives, one of which fails for good: what was there is misses, and no more."""

import contextlib
from collections.abc import Iterator
from dataclasses import replace

import hypothesis
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvfs.core.drives import Numbering
from kvfs.core.errors import Damaged, NotFound
from kvfs.core.types import ROOT_INODE, InodeNo
from tests.support.clients.stepping import until
from tests.support.store.loop_guard import LoopGuard
from tests.support.store.serving import Serving
from tests.support.store.stores import (
    FILE,
    MIB,
    SYMLINK,
    Host,
    assert_exact,
    assert_no_strays,
    get,
    host,
    make_directory,
    put,
    settle,
    tree,
    write,
)
from tests.support.store.three_drives import DRIVES, store_nine, three_drives

pytestmark = pytest.mark.usefixtures("caplog")

#: Whatever a file system refuses that has shut itself down.
CALLS = (
    *("open", "pread", "preadv", "pwrite", "ftruncate", "fallocate", "fsync", "fdatasync"),
    *("syncfs", "sync_file_range", "unlink", "utime", "stat", "fstat", "statvfs", "mkdir"),
    *("setxattr", "getxattr", "listxattr", "removexattr", "open_cached"),
    "check_alive",
)


@pytest.fixture
def guard() -> LoopGuard:
    return LoopGuard()


@pytest.fixture
def pool(guard: LoopGuard) -> Iterator[Host]:
    with three_drives(guard) as made:
        yield made


def others(found: dict[int, dict[bytes, bytes]], drive: int) -> dict[bytes, object]:
    """Return all paths that are not on *drive*."""
    return {path: data for at in found if at != drive for path, data in found[at].items()}


def drops_all(pool: Host) -> None:
    """Let ticks pass until nothing is left of the blocks of drives that have failed."""

    def dropped() -> bool:
        pool.store.tick()
        pool.store.run_all()
        return pool.store.drives_going == 0

    until(dropped, "all rows are gone")


@pytest.mark.parametrize("drive", [0, 1, 2])
def test_a_failed_drive_is_misses(pool: Host, guard: LoopGuard, drive: int) -> None:
    found = store_nine(pool)
    pool.store.sync()
    with guard.failing(*CALLS, below=pool.drives[drive]):
        pool.store.tick()
        assert pool.store.drive_states[drive] == "failed"
        assert pool.store.describe()["device_state"] == "failed"
        for path in found[drive]:
            with pytest.raises(NotFound):
                pool.store.lookup(ROOT_INODE, path[1:])
        drops_all(pool)
        assert tree(pool.store) == others(found, drive)
        more = {
            b"/more %d" % number: put(pool.store, ROOT_INODE, b"more %d" % number, b"x" * 5000)
            for number in range(6)
        }
        assert drive not in set(map(Numbering(DRIVES).drive, more.values()))
        pool.store.sync()
        for number in range(3):
            pool.store.unlink(ROOT_INODE, b"more %d" % number)
        pool.store.erase_removed()
        assert pool.store.describe()["lost_blocks"] == 3
        assert pool.store.describe()["background_failures"] == 0
        pool.stop()
    kept = others(found, drive) | {b"/more %d" % number: b"x" * 5000 for number in range(3, 6)}
    store = pool.start()
    assert tree(store) == kept, "it is back, and not believed"
    settle(store)
    assert_exact(pool)
    assert_no_strays(store)


def test_without_the_drive_of_the_index_all_is_lost(guard: LoopGuard) -> None:
    """If it is in the pool, and not in memory."""
    with host(index_place="pool", others_bytes=[64 * MIB] * 2) as made:
        made.start(guard)
        store_nine(made)
        with guard.failing(*CALLS, below=made.drives[0]):
            made.store.tick()
            assert "file system has failed" in made.store.why_lost
            assert made.store.drives_going == 0
            made.store.tick()
            made.stop()


def test_without_any_drive_all_is_lost(pool: Host, guard: LoopGuard) -> None:
    store_nine(pool)
    with guard.failing(*CALLS):
        pool.store.tick()
        assert "file system has failed" in pool.store.why_lost
        pool.stop()


def test_with_the_last_drive_all_is_lost(guard: LoopGuard) -> None:
    """Not only if all fail at once."""
    with host(others_bytes=[64 * MIB]) as made:
        # What is ready when all is lost is closed by the end of the process alone.
        made.settings = replace(made.settings, ready_extents_max=0)
        store = made.start(guard)
        for number in range(4):
            put(store, ROOT_INODE, b"%d" % number, b"x" * 5000)
        with guard.failing(*CALLS, below=made.drives[1]):
            store.tick()
            assert store.drive_states[1] == "failed"
        with guard.failing(*CALLS):
            store.tick()
            assert "file system has failed" in store.why_lost
            made.stop()


def test_directories_of_a_failed_drive_stay_and_new_ones_are_elsewhere(
    pool: Host, guard: LoopGuard
) -> None:
    """They have no bytes but in the index, whose log is on other drives."""
    pool.stop()
    logged = replace(pool.settings, index_log_s=1e-9)
    store = pool.start(guard, logged)
    old = make_directory(pool, b"old")
    put(store, old, b"a", b"a" * 5000)
    store.make_node(ROOT_INODE, b"link", SYMLINK, 0, 0, b"target")
    with guard.failing(*CALLS, below=pool.drives[0]):
        drops_all(pool)
        new = make_directory(pool, b"new")
        assert Numbering(DRIVES).drive(new) == 1
        for number in range(3):
            put(store, old, b"%d" % number, b"x" * 5000)
            put(store, new, b"%d" % number, b"x" * 5000)
        store.rename(ROOT_INODE, b"old", ROOT_INODE, b"renamed")
        store.sync()
        expected = tree(store)
        assert {b"/renamed", b"/new", b"/link"} < set(expected)
        assert len(expected) >= 9
        until(lambda: store.tick() or logged_on(pool) == [1, 2], "two others have the log")
        store.log_index()
        pool.kill()
    pool.pretend_reboot()
    store = pool.start(settings=logged)
    assert tree(store) == expected
    settle(store)
    assert tree(store) == expected
    assert_exact(pool)


def logged_on(pool: Host) -> list[int]:
    return sorted(pool.store.describe()["index_log"]["drives"])


def test_how_warm_blocks_are_is_not_lost_with_a_drive(pool: Host, guard: LoopGuard) -> None:
    """Two drives know it, and a third one if one of them has failed."""
    store_nine(pool)
    before = touched(pool)
    pool.stop()
    assert [(drive / "HEAT").exists() for drive in pool.drives] == [True, True, False]
    assert (pool.drives[0] / "HEAT").read_bytes() == (pool.drives[1] / "HEAT").read_bytes()
    (pool.drives[0] / "HEAT").unlink()
    pool.start(guard)
    assert touched(pool) == before
    with guard.failing(*CALLS, below=pool.drives[0]):
        drops_all(pool)
        pool.stop()
    assert [(drive / "HEAT").exists() for drive in pool.drives] == [False, True, True]


def touched(pool: Host) -> list[int]:
    inos = [pool.store.lookup(ROOT_INODE, b"%d" % number) for number in range(9)]
    return [pool.store.touched(ino) for ino in inos]


@pytest.mark.parametrize("drive", [0, 1])
def test_its_space_is_no_more_of_the_pool(pool: Host, guard: LoopGuard, drive: int) -> None:
    store_nine(pool)
    before = pool.store.describe()["capacity_bytes"]
    with guard.failing(*CALLS, below=pool.drives[drive]):
        drops_all(pool)
        pool.store.tick()
        figures = pool.store.describe()
        assert figures["capacity_bytes"] == before - 64 * MIB
        assert figures["used_bytes"] == 6 * 8192
        assert figures["durability"]["blocks"] <= 6


def test_nobody_waits_for_attributes_that_it_was_told_and_never_flushed(
    pool: Host, guard: LoopGuard
) -> None:
    found, store = store_nine(pool), pool.store
    store.sync()
    store.set_xattr(store.lookup(ROOT_INODE, next(iter(found[1]))[1:]), b"user.of", b"a tenant")
    store.run_all()
    goal = store.goal()
    assert not store.reached(goal)
    with guard.failing(*CALLS, below=pool.drives[1]):
        store.tick()
        assert store.drive_states[1] == "failed"
        drops_all(pool)
        with pytest.raises(OSError, match="failed to write a block, or attributes"):
            store.reached(goal)
        goal = store.goal()
        until(lambda: store.tick() or store.reached(goal), "all that is left is durable")
        pool.stop()


def test_drafts_on_it_fail_alone(pool: Host, guard: LoopGuard) -> None:
    store = pool.store
    drafts = [store.create(ROOT_INODE, b"%d" % number, FILE, 0, 0)[0] for number in range(6)]
    for opened in drafts:
        write(store, opened, b"a" * 5000)
    with guard.failing(*CALLS, below=pool.drives[1]):
        store.tick()
        for opened in drafts:
            if Numbering(DRIVES).drive(opened.ino) == 1:
                with pytest.raises(OSError, match="Input/output error"):
                    write(store, opened, b"b" * 5000, 5000)
            else:
                write(store, opened, b"b" * 5000, 5000)
        drops_all(pool)
        for opened in drafts:
            store.close(opened, writer=True)
        there = {b"/%d" % at for at in range(6) if Numbering(DRIVES).drive(drafts[at].ino) != 1}
        assert len(there) == 4
        assert tree(store) == dict.fromkeys(there, b"a" * 5000 + b"b" * 5000)
        assert not store.open_inos
        pool.stop()
    assert set(tree(pool.start())) == there


def test_readers_of_it_keep_a_handle_without_a_name(pool: Host, guard: LoopGuard) -> None:
    found = store_nine(pool)
    store = pool.store
    inos = [store.lookup(ROOT_INODE, path[1:]) for path in found[2]]
    opened = [store.open(ino, writer=False, truncate=False) for ino in inos]
    with guard.failing(*CALLS, below=pool.drives[2]):
        store.tick()
        drops_all(pool)
        assert tree(store) == others(found, 2)
        for one in opened:
            with pytest.raises((OSError, Damaged)):
                store.syscalls.pread(store.extent_fd(one), 10, 0)
            store.close(one, writer=False)
        assert not store.open_inos
    store.erase_removed()
    assert_exact(pool)


@pytest.mark.parametrize("drive", [0, 1])
def test_while_requests_are_served_the_others_go_on(pool: Host, drive: int) -> None:
    pool.stop()
    client = Serving(pool)
    for _ in range(3):
        client.tick()
    for number in range(9):
        client.put(b"%d" % number, b"%d" % number * 5000)
    lost = {
        b"%d" % number
        for number in range(9)
        if Numbering(DRIVES).drive(client.look_up(b"%d" % number)) == drive
    }
    with client.guard.failing(*CALLS, below=pool.drives[drive]):
        client.tick()
        for number in range(9):
            name = b"%d" % number
            if name in lost:
                with pytest.raises(NotFound):
                    client.get(name)
            else:
                assert client.get(name) == name * 5000
            client.put(b"more " + name, name)
        client.tick_until(lambda: client.store.drives_going == 0, "all rows are gone")
        for number in range(9):
            assert client.get(b"more %d" % number) == b"%d" % number
        client.stop_serving()
    assert client.store.describe()["background_failures"] == 0


@given(
    st.lists(st.sampled_from(["put", "get", "remove", "tick", "run", "sync"]), max_size=40),
    st.integers(0, 40),
    st.integers(0, DRIVES - 1),
)
@hypothesis.settings(max_examples=15, deadline=None)
def test_a_drive_that_fails_at_any_moment_costs_no_other_block_and_gives_no_wrong_byte(
    steps: list[str], moment: int, drive: int
) -> None:
    guard, moment = LoopGuard(), min(moment, len(steps))
    with host(others_bytes=[64 * MIB] * (DRIVES - 1)) as made, contextlib.ExitStack() as failing:
        store, model = made.start(guard), dict[bytes, tuple[InodeNo, bytes]]()
        for number, step in enumerate([*steps, "tick"]):
            if number == moment:
                failing.enter_context(guard.failing(*CALLS, below=made.drives[drive]))
                store.tick()
            if step == "put":
                name, data = b"%d" % number, b"%d" % number * 700
                model[name] = put(store, ROOT_INODE, name, data), data
            elif step == "remove" and model:
                with contextlib.suppress(NotFound):
                    store.unlink(ROOT_INODE, next(iter(model)))
                del model[next(iter(model))]
            elif step == "tick":
                store.tick()
            elif step == "run":
                store.run_one()
            elif step == "sync":
                store.sync()
            for name, (ino, data) in model.items():
                if number >= moment and Numbering(DRIVES).drive(ino) == drive:
                    with pytest.raises(NotFound):
                        store.lookup(ROOT_INODE, name)
                else:
                    assert get(store, ROOT_INODE, name) == data
        drops_all(made)
        there = {
            b"/" + name: data
            for name, (ino, data) in model.items()
            if Numbering(DRIVES).drive(ino) != drive
        }
        assert tree(store) == there
        made.stop()
        failing.close()
        assert tree(made.start()) == there
