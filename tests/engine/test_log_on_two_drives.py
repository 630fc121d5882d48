"""In a pool of several drives two have the index's log: what one of them lacks, the other has."""

import dataclasses
import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from kvfs.core.errors import DriveNeeded
from kvfs.core.types import ROOT_INODE
from tests.support.clients.stepping import until
from tests.support.store.driven import Driven
from tests.support.store.loop_guard import LoopGuard
from tests.support.store.serving import Serving
from tests.support.store.stores import MIB, Host, assert_exact, host, put, settle, tree

pytestmark = pytest.mark.usefixtures("caplog")


@pytest.fixture
def guard() -> LoopGuard:
    return LoopGuard()


@pytest.fixture
def pool(guard: LoopGuard) -> Iterator[Host]:
    """Yield a host with three drives, whose store logs its index when a test says so."""
    with host(others_bytes=[64 * MIB] * 2) as made:
        made.settings = dataclasses.replace(made.settings, index_log_s=3600.0)
        made.start(guard)
        made.store.log_index()
        yield made


def logged_on(store: Driven) -> list[int]:
    found: list[int] = store.describe()["index_log"]["drives"]
    return found


def rows_of(pool: Host, drive: int) -> Path:
    (path,) = (pool.drives[drive] / "log").glob("rows.*")
    return path


def log_some(pool: Host, turns: int = 4, name: bytes = b"") -> dict[bytes, object]:
    """Store blocks and log them, in as many batches; return what is there."""
    for turn in range(turns):
        for number in range(3):
            put(pool.store, ROOT_INODE, b"%b%d %d" % (name, turn, number), b"%d" % turn * 5000)
        settle(pool.store)
        pool.store.log_index()
    return tree(pool.store)


def tick_until_logged_on(store: Driven, drives: list[int]) -> None:
    """Let ticks pass, each of which may write a batch or a copy, until *drives* have the log."""

    def logged() -> bool:
        store.log_due()
        store.tick()
        return sorted(logged_on(store)) == drives

    until(logged, f"{drives} have the log")


def start_after_power_loss(pool: Host) -> Driven:
    pool.kill()
    pool.pretend_reboot()
    return pool.start()


def assert_newest(pool: Host, expected: dict[bytes, object]) -> None:
    """What a start goes back to is the last batch: no file had to tell of a younger block."""
    store = pool.store
    assert store.describe()["reconcile"]["entered"] == 0
    assert tree(store) == expected
    settle(store)
    assert tree(store) == expected
    assert_exact(pool)


def test_two_drives_have_the_same_log(pool: Host) -> None:
    log_some(pool)
    assert logged_on(pool.store) == [0, 1]
    pool.kill()
    assert rows_of(pool, 0).read_bytes() == rows_of(pool, 1).read_bytes()
    assert not (pool.drives[2] / "log").exists()


# ---- a start ----


def without(log: Path) -> None:
    shutil.rmtree(log)


def cut_to_nothing(log: Path) -> None:
    for path in log.glob("rows.*"):
        os.truncate(path, 0)


def with_damaged_copies(log: Path) -> None:
    for path in log.glob("copy.*"):
        with path.open("r+b") as file:
            file.seek(5000)
            file.write(b"\xa5")


def with_copies_that_have_no_end(log: Path) -> None:
    for path in log.glob("copy.*"):
        os.truncate(path, path.stat().st_size - 1)


@pytest.mark.parametrize("drive", [0, 1])
@pytest.mark.parametrize(
    "harm", [without, cut_to_nothing, with_damaged_copies, with_copies_that_have_no_end]
)
def test_a_start_reads_the_log_that_is_whole(
    pool: Host, drive: int, harm: Callable[[Path], None]
) -> None:
    expected = log_some(pool)
    pool.kill()
    harm(pool.drives[drive] / "log")
    pool.pretend_reboot()
    pool.start()
    assert_newest(pool, expected)


@pytest.mark.parametrize("drive", [0, 1])
@pytest.mark.parametrize("share", [0.1, 0.3, 0.5, 0.7, 0.9, 0.999])
def test_a_log_that_is_torn_anywhere_is_not_believed_over_a_newer_one(
    pool: Host, drive: int, share: float
) -> None:
    expected = log_some(pool)
    pool.kill()
    path = rows_of(pool, drive)
    raw = path.read_bytes()
    at = int(len(raw) * share)
    path.write_bytes(raw[:at] + b"\xff" * (len(raw) - at))
    pool.pretend_reboot()
    pool.start()
    assert_newest(pool, expected)


@pytest.mark.parametrize("drive", [0, 1])
def test_a_log_that_is_behind_is_not_believed_over_a_newer_one(
    pool: Host, drive: int, tmp_path: Path
) -> None:
    """Its copy is newer than that of the other, which has more batches."""
    log_some(pool, 2)
    log = pool.drives[drive] / "log"
    shutil.copytree(log, tmp_path / "log")
    for number in range(3):
        pool.store.unlink(ROOT_INODE, b"1 %d" % number)
    expected = log_some(pool, 1, b"more ")
    pool.kill()
    shutil.rmtree(log)
    shutil.copytree(tmp_path / "log", log)
    pool.pretend_reboot()
    pool.start()
    assert_newest(pool, expected)


def test_a_clean_stop_needs_one_of_them(pool: Host) -> None:
    expected = log_some(pool)
    pool.stop()
    without(pool.drives[0] / "log")
    store = pool.start()
    assert store.describe()["reconcile"]["share"] == 1.0, "nothing is in doubt"
    assert logged_on(store) == [1]
    assert tree(store) == expected


def test_a_log_that_is_behind_does_not_go_on_after_a_clean_stop(pool: Host, tmp_path: Path) -> None:
    log_some(pool, 2)
    shutil.copytree(pool.drives[1] / "log", tmp_path / "log")
    expected = log_some(pool, 4, b"more ")
    pool.stop()
    without(pool.drives[1] / "log")
    shutil.copytree(tmp_path / "log", pool.drives[1] / "log")
    store = pool.start()
    assert logged_on(store) == [0]
    tick_until_logged_on(store, [0, 1])
    without(pool.drives[0] / "log")
    start_after_power_loss(pool)
    assert_newest(pool, expected)


def test_a_pool_of_the_version_before_gets_its_second_log(pool: Host) -> None:
    expected = log_some(pool)
    pool.stop()
    without(pool.drives[1] / "log")
    store = pool.start()
    assert logged_on(store) == [0]
    tick_until_logged_on(store, [0, 1])
    start_after_power_loss(pool)
    assert_newest(pool, expected)


# ---- while it is written ----


@pytest.mark.parametrize("drive", [0, 1])
@pytest.mark.parametrize("call", ["open", "pwrite", "ftruncate", "fsync"])
def test_what_one_drive_refuses_the_other_has(
    pool: Host, guard: LoopGuard, drive: int, call: str
) -> None:
    """At each step of a batch or of a copy."""
    store = pool.store
    log_some(pool, 2)
    with guard.failing(call, below=pool.drives[drive] / "log"):
        for turn in range(3):
            put(store, ROOT_INODE, b"more %d" % turn, b"x" * 5000)
            store.lose_unlogged_rows()  # both need a copy
            tick_until_logged_on(store, [1 - drive])
        settle(store)
        store.log_index()
        expected = tree(store)
        assert logged_on(store) == [1 - drive]
    start_after_power_loss(pool)
    assert_newest(pool, expected)
    tick_until_logged_on(pool.store, [0, 1])


def test_a_batch_that_one_drive_lacks_is_made_good_by_a_copy(pool: Host, guard: LoopGuard) -> None:
    store = pool.store
    log_some(pool, 2)
    with guard.failing("fdatasync", "ftruncate", below=pool.drives[0]):
        put(store, ROOT_INODE, b"more", b"x" * 5000)
        settle(store)
        store.log_index()
        assert logged_on(store) == [1]
        assert store.describe()["index_log"]["behind_s"] == 0.0, "one drive has all"
    tick_until_logged_on(store, [0, 1])
    expected = tree(store)
    without(pool.drives[1] / "log")
    start_after_power_loss(pool)
    assert_newest(pool, expected)


def test_a_drive_that_alone_has_the_log_is_not_removed(pool: Host, guard: LoopGuard) -> None:
    """Without it a start after a power loss would make the index anew, and lose names."""
    store = pool.store
    log_some(pool, 1)
    with guard.failing("open", below=pool.drives[0] / "log"):
        store.lose_unlogged_rows()
        tick_until_logged_on(store, [1])
        with pytest.raises(DriveNeeded, match="drive 1 alone has the log"):
            store.require_removable(1)
        store.require_removable(2)
    tick_until_logged_on(store, [0, 1])
    store.require_removable(1)


def test_a_drive_that_fails_is_replaced_by_a_third(pool: Host, guard: LoopGuard) -> None:
    log_some(pool, 2)
    with guard.failing("check_alive", "fdatasync", below=pool.drives[1]):
        tick_until_logged_on(pool.store, [0, 2])
        pool.stop()
    without(pool.drives[0] / "log")
    pool.unnamed.add(1)
    assert pool.start().describe()["reconcile"]["share"] == 1.0


def test_nobody_waits_for_a_silent_drive_and_a_third_gets_the_log() -> None:
    with host(others_bytes=[64 * MIB] * 2) as made:
        settings = dataclasses.replace(made.settings, index_log_s=0.01, device_silent_s=1.0)
        client = Serving(made, settings)
        until(lambda: ticked(client) == [0, 1], "two have the log")
        with client.guard.held("fdatasync", "fsync", "preadv", below=made.drives[0]):
            until(lambda: ticked(client) == [1, 2], "two others have it")
            assert client.store.drive_states[0] == "silent"
        until(lambda: ticked(client) and client.store.drive_states[0] == "serving", "it is back")
        client.stop_serving_now()
        made.kill()


def ticked(client: Serving) -> list[int]:
    client.store.tick()
    client.loop.run()
    return sorted(logged_on(client.store))


def test_a_slow_drive_gets_no_copy_while_another_one_has_the_log() -> None:
    """The copy would keep it busier still, and nothing depends on it."""
    with host(others_bytes=[64 * MIB]) as made:
        settings = dataclasses.replace(made.settings, index_log_s=0.01, device_silent_s=1.0)
        client = Serving(made, settings)
        until(lambda: ticked(client) == [0, 1], "both have the log")
        with client.guard.failing("fdatasync", "ftruncate", below=made.drives[1]):
            client.put(b"block", b"x" * 5000)
            until(lambda: ticked(client) == [0], "one has it")
        with client.guard.held("preadv", below=made.drives[1]):  # its probe alone
            until(
                lambda: ticked(client) and client.store.drive_states[1] != "serving", "it is slow"
            )
            client.store.log_due()
            ticked(client)
            client.store.await_log_threads()
            assert ticked(client) == [0]
        until(
            lambda: client.store.log_due() or ticked(client) == [0, 1], "it answers, and gets one"
        )
        client.stop_serving_now()
        made.kill()
