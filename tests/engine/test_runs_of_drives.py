"""Each drive of a pool has a RUN: any may be missing, and none is believed that was away."""

import errno
import json
import os
import shutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from kvfs.core.types import ROOT_INODE, DriveNo
from kvfs.storage.inode_numbers import InodeNumbers
from kvfs.storage.pool_run import (
    PoolRun,
    RunPlace,
    distrust_index,
    latest_places,
    read_pool_run,
    stale_drives,
)
from kvfs.storage.syscalls import Syscalls
from tests.support.store.stores import MIB, Host, host, put, settle, tree

pytestmark = pytest.mark.usefixtures("caplog")

_DRIVES = 3
#: An index in memory; nothing looks at it here.
_INDEX = "/dev/shm/kvfs-x/y"


@pytest.fixture
def places(tmp_path: Path) -> Iterator[list[RunPlace]]:
    """Three drives whose pool never ran."""
    made: list[RunPlace] = []
    for number in range(_DRIVES):
        (tmp_path / f"{number}").mkdir()
        fd = os.open(tmp_path / f"{number}", os.O_RDONLY)
        made.append(RunPlace(DriveNo(number), fd, f"file system {number}"))
        InodeNumbers.create(fd, Syscalls())
    yield made
    for place in made:
        os.close(place.pool_fd)


def ran(places: list[RunPlace], *, clean: bool, lost: set[DriveNo] | None = None) -> PoolRun:
    """Let a server run on *places*, and stop or be killed."""
    end = InodeNumbers(tuple(place.pool_fd for place in places), Syscalls(), read_only=True)
    run = PoolRun(places, Syscalls(), end.first, _INDEX, lost if lost is not None else set())
    end.close()
    run.begin(0, follows=False)
    if clean:
        run.write(0, clean=True, logged=7)
    return run


def said(places: list[RunPlace], drive: int) -> dict[str, object]:
    found: dict[str, object] = json.loads(run_of(places, drive).read_text())
    return found


def run_of(places: list[RunPlace], drive: int) -> Path:
    return Path(os.readlink(f"/proc/self/fd/{places[drive].pool_fd}")) / "RUN"


def test_a_pool_that_never_ran_is_clean(places: list[RunPlace]) -> None:
    assert read_pool_run(places, Syscalls()).clean


@pytest.mark.parametrize("clean", [True, False])
@pytest.mark.parametrize("missing", [None, 0, 1, 2])
def test_any_of_them_says_how_the_last_run_ended(
    places: list[RunPlace], *, clean: bool, missing: int | None
) -> None:
    ran(places, clean=clean)
    there = [place for place in places if place.drive != missing]
    state = read_pool_run(there, Syscalls())
    assert (state.clean, state.trusted) == (clean, True)
    assert (state.logged, state.index_dir) == ((7, "") if clean else (0, _INDEX))


@pytest.mark.parametrize("clean", [True, False])
@pytest.mark.parametrize("away", [0, 1, 2])
def test_one_that_was_away_is_not_believed_nor_are_the_others(
    places: list[RunPlace], *, clean: bool, away: int
) -> None:
    """Whichever of the two sides was stopped cleanly."""
    ran(places, clean=True)
    ran([place for place in places if place.drive != away], clean=clean)
    state = read_pool_run(places, Syscalls())
    assert not state.trusted
    assert state.logged == 0
    assert not state.moved
    run = ran(places, clean=clean)
    assert run.stale == {away}, "the later run counts"
    state = read_pool_run(places, Syscalls())
    assert (state.trusted, state.clean) == (True, clean), "the index knows what is there since"
    stale = run.stale
    run = ran(places, clean=clean)
    assert run.stale == stale, "what was away is not swept yet"
    run.believe(0)
    assert not run.stale
    assert not stale_drives(places, Syscalls())
    assert read_pool_run(places, Syscalls()).trusted, "they have run together since"


def test_one_that_was_alone_is_right_about_itself(places: list[RunPlace]) -> None:
    ran(places, clean=True)
    ran(places[1:], clean=False)
    assert read_pool_run(places[:1], Syscalls()).clean


@pytest.mark.parametrize("drive", [0, 1, 2])
@pytest.mark.parametrize("harm", [b"", b"{}", b"not json", None])
def test_one_that_cannot_be_read_makes_all_distrusted(
    places: list[RunPlace], drive: int, harm: bytes | None
) -> None:
    ran(places, clean=True)
    run_of(places, drive).unlink() if harm is None else run_of(places, drive).write_bytes(harm)
    assert not read_pool_run(places, Syscalls()).trusted


@pytest.mark.parametrize("drive", [0, 1, 2])
def test_a_stop_that_is_cut_short_was_clean(places: list[RunPlace], drive: int) -> None:
    """The first RUN is written when everything else is on the drives."""
    ran(places, clean=False)
    before = run_of(places, drive).read_bytes()
    former = read_pool_run(places, Syscalls())
    run = PoolRun(places, Syscalls(), former.doubtful_below, _INDEX)
    run.begin(0, follows=True)
    run.write(0, clean=True, logged=7)
    run_of(places, drive).write_bytes(before)
    assert read_pool_run(places, Syscalls()).clean


@pytest.mark.parametrize("drive", [0, 1, 2])
def test_a_start_that_is_cut_short_trusts_nothing(places: list[RunPlace], drive: int) -> None:
    ran(places, clean=True)
    before = run_of(places, drive).read_bytes()
    ran(places, clean=False)
    run_of(places, drive).write_bytes(before)
    assert not read_pool_run(places, Syscalls()).trusted


def test_a_server_that_follows_is_of_the_same_run(places: list[RunPlace]) -> None:
    ran(places, clean=False)
    run = said(places, 0)["run"]
    follower = PoolRun(places, Syscalls(), read_pool_run(places, Syscalls()).doubtful_below, _INDEX)
    follower.begin(5, follows=True)
    assert {said(places, drive)["run"] for drive in range(_DRIVES)} == {run}


@pytest.mark.parametrize("failed", [0, 1, 2])
@pytest.mark.parametrize("clean", [True, False])
def test_one_that_failed_meanwhile_is_not_believed(
    places: list[RunPlace], failed: int, *, clean: bool
) -> None:
    """One of the others that says so is enough."""
    lost: set[DriveNo] = set()
    run = ran(places, clean=False, lost=lost)
    lost.add(DriveNo(failed))
    told = next(place for place in places if place.drive != failed)
    stamp = run.stamp
    run.note_lost(told.drive, 0)
    assert (run.stamp != stamp) == (told.drive == (0 if failed else 1))
    if clean:
        run.write(0, clean=True, logged=7)
    assert stale_drives(places, Syscalls()) == {failed}
    state = read_pool_run(places, Syscalls())
    assert (state.trusted, state.lost) == (False, (failed,))
    others = [place for place in places if place.drive != failed]
    state = read_pool_run(others, Syscalls())
    assert (state.trusted, state.clean) == (True, clean), "the others were there all the time"
    assert latest_places(places, Syscalls()) == others
    run = ran(places, clean=False)
    assert run.stale == {failed}
    run.believe(0)
    assert not stale_drives(places, Syscalls())


def test_after_the_stop_nothing_is_noted(places: list[RunPlace]) -> None:
    lost: set[DriveNo] = set()
    run = ran(places, clean=True, lost=lost)
    lost.add(DriveNo(2))
    run.note_lost(DriveNo(1), 0)
    assert read_pool_run(places, Syscalls()).clean


def test_a_server_that_follows_says_which_drives_are_lost(places: list[RunPlace]) -> None:
    lost: set[DriveNo] = set()
    run = ran(places, clean=False, lost=lost)
    lost.add(DriveNo(0))
    for place in places[1:]:
        run.note_lost(place.drive, 0)
    former = read_pool_run(places[1:], Syscalls())
    before = run_of(places, 1).read_bytes()
    follower = PoolRun(places[1:], Syscalls(), former.doubtful_below, _INDEX, set(), [DriveNo(0)])
    follower.begin(0, follows=True)
    assert run_of(places, 1).read_bytes() == before, "nothing is new"
    assert stale_drives(places, Syscalls()) == {0}


def test_of_two_halves_that_ran_alone_the_later_counts(places: list[RunPlace]) -> None:
    ran(places, clean=True)
    ran(places[1:], clean=True)
    run = ran([places[0], places[2]], clean=True)
    assert stale_drives(places, Syscalls()) == {0, 1}, "one was not swept yet"
    run.believe(0)
    assert stale_drives(places, Syscalls()) == stale_drives(places[:2], Syscalls()) == {1}


def test_what_is_distrusted_says_still_which_run_it_is_of(places: list[RunPlace]) -> None:
    ran(places, clean=True)
    ran(places[1:], clean=False)
    distrust_index(places[1:], Syscalls())
    assert stale_drives(places, Syscalls()) == {0}
    assert not read_pool_run(places[1:], Syscalls()).trusted


def test_distrust_is_for_all_of_them(places: list[RunPlace]) -> None:
    ran(places, clean=False)
    distrust_index(places, Syscalls())
    for place in places:
        assert not read_pool_run([place], Syscalls()).trusted
    ran(places, clean=True)
    distrust_index(places, Syscalls())
    assert read_pool_run(places, Syscalls()).clean, "of a clean stop nothing is in doubt"


def test_a_drive_that_fails_is_left_out(places: list[RunPlace]) -> None:
    lost: set[DriveNo] = set()
    run = ran(places, clean=False, lost=lost)
    before = said(places, 0)
    lost.add(DriveNo(0))
    run.write(0, clean=True, strays=True, logged=7)
    assert said(places, 0) == before
    state = read_pool_run(places[1:], Syscalls())
    assert state.clean
    assert state.strays
    assert not read_pool_run(places, Syscalls()).trusted, "it may have lost what it had"


def test_the_version_before_wrote_one_of_them(places: list[RunPlace]) -> None:
    ran(places[:1], clean=True)
    assert "run" not in said(places, 0)
    assert read_pool_run(places, Syscalls()).clean
    ran(places, clean=True)
    ran(places[:1], clean=True)  # again, since
    assert not read_pool_run(places, Syscalls()).trusted


# ---- a store ----


@pytest.fixture
def pool() -> Iterator[Host]:
    with host(others_bytes=[64 * MIB] * (_DRIVES - 1)) as made:
        made.settings = replace(made.settings, index_log_s=3600.0)
        yield made


@pytest.mark.parametrize("away", [0, 1, 2])
def test_a_drive_whose_run_is_older_is_compared(pool: Host, away: int) -> None:
    """What is on it is found all the same, since its files say so."""
    store = pool.start()
    for number in range(9):
        put(store, ROOT_INODE, b"%d" % number, b"%d" % number * 5000)
    pool.stop()
    former = (pool.drives[away] / "RUN").read_bytes()
    expected = tree(pool.start())
    pool.stop()
    (pool.drives[away] / "RUN").write_bytes(former)
    store = pool.start()
    assert store.describe()["reconcile"]["share"] < 1.0
    assert tree(store) == expected
    settle(store)
    pool.stop()
    assert not pool.check().problems


def test_a_repair_believes_nothing_of_a_drive_that_was_away(pool: Host, tmp_path: Path) -> None:
    """What was removed meanwhile does not come back, though its files are whole there."""
    store = pool.start()
    for number in range(9):
        put(store, ROOT_INODE, b"%d" % number, b"%d" % number * 5000)
    pool.stop()
    away = pool.drives[2]
    shutil.copytree(away, tmp_path / "away")
    store = pool.start()
    for number in range(9):
        store.unlink(ROOT_INODE, b"%d" % number)
    put(store, ROOT_INODE, b"later", b"l" * 5000)
    expected = tree(store)
    settle(store)
    pool.stop()
    shutil.copytree(tmp_path / "away", away, dirs_exist_ok=True)
    assert any((away / "extents").glob("??/*"))
    for drive in pool.drives:
        for log in drive.glob("log/*"):
            log.unlink()
    assert pool.check(repair=True).repaired
    store = pool.start()
    assert tree(store) == expected
    settle(store)
    pool.stop()


class RefusingRun(Syscalls):
    """One drive refuses a new RUN, once it is told to."""

    below = ""

    def rename(self, old: str, new: str, *, src_dir_fd: int, dst_dir_fd: int) -> None:
        """Refuse it, if it is for that drive."""
        if new == "RUN" and os.readlink(f"/proc/self/fd/{dst_dir_fd}") == self.below:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        super().rename(old, new, src_dir_fd=src_dir_fd, dst_dir_fd=dst_dir_fd)


@pytest.mark.parametrize("drive", [0, 1, 2])
def test_a_stop_that_one_drive_refuses_is_clean_for_the_others(
    pool: Host, drive: int, caplog: pytest.LogCaptureFixture
) -> None:
    refusing = RefusingRun()
    store = pool.start(refusing)
    put(store, ROOT_INODE, b"block", b"x" * 5000)
    refusing.below = str(pool.drives[drive])
    pool.stop()
    assert f"drive {drive}: RUN is as it was" in caplog.text
    store = pool.start()
    assert store.describe()["reconcile"]["share"] == 1.0
    assert tree(store) == {b"/block": b"x" * 5000}
