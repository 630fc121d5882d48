"""A store of three drives, mounted without one of them; and the drive that comes back."""

import contextlib
import shutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import hypothesis
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvfs.core.drives import Numbering
from kvfs.core.errors import NotFound, SourceMissing, UsageError
from kvfs.core.types import ROOT_INODE, InodeNo
from kvfs.devices import open_drives
from tests.support.clients.stepping import until
from tests.support.store.driven import Driven
from tests.support.store.loop_guard import LoopGuard
from tests.support.store.serving import Serving
from tests.support.store.stores import (
    MIB,
    Host,
    assert_exact,
    assert_no_strays,
    get,
    host,
    make_directory,
    put,
    settle,
    tree,
)
from tests.support.store.three_drives import DRIVES, store_nine, three_drives

pytestmark = pytest.mark.usefixtures("caplog")


@pytest.fixture
def pool() -> Iterator[Host]:
    with three_drives(LoopGuard()) as made:
        yield made


class Away:
    """Drives of a stopped pool that are taken away, and brought back."""

    def __init__(self, pool: Host) -> None:
        self._pool = pool

    def _place(self, drive: int) -> Path:
        return self._pool.drives[drive].with_suffix(".away")

    def take(self, drive: int) -> None:
        self._pool.drives[drive].rename(self._place(drive))

    def bring_back(self, drive: int) -> None:
        here = self._pool.drives[drive]
        if here.exists():
            here.rmdir()
        self._place(drive).rename(here)


def without(found: dict[int, dict[bytes, bytes]], drive: int) -> dict[bytes, object]:
    """Return all paths that are not on *drive*."""
    return {path: data for at in found if at != drive for path, data in found[at].items()}


def drops_all(pool: Host) -> None:
    """Let ticks pass until nothing is left of the blocks of drives that are missing."""

    def dropped() -> bool:
        pool.store.tick()
        pool.store.run_all()
        return pool.store.drives_going == 0

    until(dropped, "all rows are gone")


def log_all(store: Driven) -> None:
    """Make all durable, and have it in the log of the index."""
    store.sync()
    store.log_index()


def drives_of(inos: list[InodeNo]) -> set[int]:
    return set(map(Numbering(DRIVES).drive, inos))


@pytest.mark.parametrize("end", ["stop", "kill", "lose_power"])
@pytest.mark.parametrize("drive", [0, 1, 2])
def test_without_a_drive_the_rest_is_there(pool: Host, drive: int, end: str) -> None:
    found, away = store_nine(pool), Away(pool)
    pool.store.sync()
    getattr(pool, end)()
    away.take(drive)
    store = pool.start()
    assert store.drive_states[drive] == "missing"
    for path in found[drive]:
        with pytest.raises(NotFound):
            store.lookup(ROOT_INODE, path[1:])
    assert tree(store) == without(found, drive)
    drops_all(pool)
    more = [put(store, ROOT_INODE, b"more %d" % number, b"x") for number in range(6)]
    assert drives_of(more) == {0, 1, 2} - {drive}
    store.sync()
    figures = store.describe()
    assert figures["background_failures"] == 0
    assert figures["blocks"] == 12
    assert figures["capacity_bytes"] == 2 * 64 * MIB
    assert figures["drives"][str(drive)]["blocks"] == 0
    pool.stop()
    assert set(tree(pool.start())) == {*without(found, drive), *(b"/more %d" % n for n in range(6))}


@pytest.mark.parametrize("end", ["stop", "kill"])
@pytest.mark.parametrize("drops", [True, False])
@pytest.mark.parametrize("drive", [0, 2])
def test_a_drive_that_comes_back_is_swept_against_the_index(
    pool: Host, drive: int, end: str, *, drops: bool
) -> None:
    """What was replaced, removed or looked for while it was away stays as it is without it."""
    found, away = store_nine(pool), Away(pool)
    last = max(pool.store.lookup(ROOT_INODE, path[1:]) for path in found[drive])
    pool.stop()
    away.take(drive)
    store = pool.start()
    replaced, removed, missed = (path[1:] for path in found[drive])
    put(store, ROOT_INODE, replaced, b"new")
    with pytest.raises(NotFound):
        store.unlink(ROOT_INODE, removed)
    with pytest.raises(NotFound):
        store.lookup(ROOT_INODE, missed)
    if drops:
        drops_all(pool)
    store.sync()
    getattr(pool, end)()
    away.bring_back(drive)
    store = pool.start()
    kept = without(found, drive) | {b"/" + replaced: b"new"}
    assert tree(store) == kept
    settle(store)
    assert not pool.extent(InodeNo(last)).exists()
    assert not any((pool.drives[drive] / "strays").glob("*"))
    assert_exact(pool)
    assert_no_strays(store)
    more = [put(store, ROOT_INODE, b"more %d" % number, b"x") for number in range(6)]
    assert drives_of(more) == {0, 1, 2}
    serial = Numbering(DRIVES).serial
    assert min(map(serial, more)) > serial(last), "no number is given out twice"
    pool.stop()
    assert not pool.check().problems


@pytest.mark.parametrize("drive", [0, 1])
def test_a_blank_drive_is_a_missing_one(pool: Host, drive: int) -> None:
    found = store_nine(pool)
    pool.stop()
    shutil.rmtree(pool.drives[drive])
    pool.drives[drive].mkdir()
    assert tree(pool.start()) == without(found, drive)
    assert not any(pool.drives[drive].iterdir()), "nothing is written there"


@pytest.mark.parametrize("end", ["stop", "kill", "lose_power"])
def test_directories_outlive_the_first_drive(pool: Host, end: str) -> None:
    """Their files are there: what the index says of them counts, when it is back, too."""
    pool.stop()
    pool.settings, away = replace(pool.settings, index_log_s=0.001), Away(pool)
    store = pool.start()
    kept, gone = make_directory(pool, b"kept"), make_directory(pool, b"gone")
    for number in range(6):
        put(store, kept, b"%d" % number, b"x" * 5000)
    store.set_xattr(kept, b"user.of", b"before")
    log_all(store)
    getattr(pool, end)()
    away.take(0)
    store = pool.start()
    there = {path for path in tree(store) if path.startswith(b"/kept/")}
    assert len(there) == 4
    store.rename(ROOT_INODE, b"kept", ROOT_INODE, b"renamed")
    store.set_xattr(kept, b"user.of", b"since")
    store.rmdir(ROOT_INODE, b"gone")
    later = make_directory(pool, b"later")
    put(store, later, b"block", b"y" * 5000)
    drops_all(pool)
    expected = tree(store)
    log_all(store)
    getattr(pool, end)()
    for back in (False, True):
        if back:
            pool.stop()
            away.bring_back(0)
        store = pool.start()
        assert tree(store) == expected
        if back:
            settle(store)
        assert store.lookup(ROOT_INODE, b"renamed") == kept
        assert store.xattr(kept, b"user.of") == b"since"
        with pytest.raises(NotFound):
            store.lookup(ROOT_INODE, b"gone")
    name = f"{gone:016x}"
    assert not any((pool.drives[0] / "identities" / name[-2:]).glob(name))
    pool.stop()
    assert not pool.check().problems
    for drive in pool.drives:
        for log in drive.glob("log/*"):
            log.unlink()
    assert pool.check(repair=True).repaired
    assert tree(pool.start()) == expected, "the files say what the index said"


def test_a_pool_that_was_never_mounted_needs_no_first_drive() -> None:
    with host(others_bytes=[64 * MIB] * (DRIVES - 1)) as made:
        Away(made).take(0)
        store = made.start()
        put(store, ROOT_INODE, b"block", b"x" * 5000)
        made.stop()
        assert tree(made.start()) == {b"/block": b"x" * 5000}


@pytest.mark.parametrize("end", ["stop", "kill"])
def test_an_index_in_the_pool_is_on_the_first_drive_that_is_there(end: str) -> None:
    with host(others_bytes=[64 * MIB] * (DRIVES - 1)) as made:
        made.settings, away = replace(made.settings, index_place="pool"), Away(made)
        made.start()
        found = store_nine(made)
        made.store.sync()
        for missing, home in (((), 0), ((0,), 1), ((0, 1), 2), ((), 0)):
            getattr(made, end)()
            for drive in missing:
                away.take(drive)
            store = made.start()
            expected = {path for at in found if at not in missing for path in found[at]}
            if missing:
                found = {at: {} if at in missing else found[at] for at in found}
            assert tree(store).keys() == expected
            there = [(drive / "index").exists() for drive in made.drives]
            assert there == [drive == home for drive in range(DRIVES)]
            drops_all(made)
            store.sync()
            if missing:
                getattr(made, end)()
                for drive in missing:
                    away.bring_back(drive)
                store = made.start()
                assert tree(store).keys() == expected
                settle(store)


@pytest.mark.parametrize("left", [0, 1, 2])
def test_all_drives_but_one_may_be_missing(pool: Host, left: int) -> None:
    found, away = store_nine(pool), Away(pool)
    pool.stop()
    gone = {0, 1, 2} - {left}
    for drive in gone:
        away.take(drive)
    store = pool.start()
    assert tree(store) == found[left]
    drops_all(pool)
    counted = left < 2  # the third has no log, so that no row of the others is there
    assert store.describe()["lost_blocks"] == counted * sum(len(found[drive]) for drive in gone)
    assert store.describe()["background_failures"] == 0
    put(store, ROOT_INODE, b"new", b"x")
    assert get(store, ROOT_INODE, b"new") == b"x"


def test_if_all_drives_are_wanted_nothing_is_opened(pool: Host) -> None:
    store_nine(pool)
    pool.stop()
    away, sources = Away(pool), [*map(str, pool.drives)]
    away.take(0)
    with pytest.raises(SourceMissing, match=r"drive 0 \(UUID .*\) cannot be found"):
        open_drives(sources, all_drives=True)
    away.bring_back(0)
    away.take(1)
    with pytest.raises(SourceMissing, match=r"drive 1 \(UUID .*\) cannot be found: .*No such file"):
        open_drives(sources, all_drives=True)
    with pytest.raises(SourceMissing, match="No such file"):
        open_drives([*sources, str(pool.path / "other"), str(pool.path / "another")])


def test_a_drive_of_another_pool_is_refused(pool: Host) -> None:
    store_nine(pool)
    pool.stop()
    with host(others_bytes=[64 * MIB]) as other:
        other.start()
        other.stop()
        with pytest.raises(UsageError, match="is of another pool than"):
            open_drives([str(pool.drives[0]), str(other.drives[1])])


@pytest.mark.parametrize("drive", [0, 1])
def test_a_read_only_store_has_the_rest(pool: Host, drive: int) -> None:
    found, away = store_nine(pool), Away(pool)
    pool.stop()
    away.take(drive)
    store = pool.start(settings=pool.read_only())
    for path, data in without(found, drive).items():
        assert get(store, ROOT_INODE, path[1:]) == data
    pool.stop()
    away.bring_back(drive)
    assert tree(pool.start()) == without(found, -1), "nothing was given up"


@pytest.mark.parametrize("repair", [False, True])
@pytest.mark.parametrize("drive", [0, 1])
def test_fsck_checks_the_rest(pool: Host, drive: int, *, repair: bool) -> None:
    found, away = store_nine(pool), Away(pool)
    pool.stop()
    away.take(drive)
    report = pool.check(repair=repair)
    assert not report.problems
    assert [number for number, _ in report.missing] == [drive]
    assert (report.blocks, report.unchecked) == (9, 3)
    away.bring_back(drive)
    assert tree(pool.start()) == without(found, -1), "nothing was given up"


@pytest.mark.parametrize("drive", [0, 1])
def test_while_requests_are_served_the_rest_goes_on(pool: Host, drive: int) -> None:
    found, away = store_nine(pool), Away(pool)
    pool.stop()
    away.take(drive)
    client = Serving(pool)
    for path in found[drive]:
        with pytest.raises(NotFound):
            client.get(path[1:])
    for path, data in without(found, drive).items():
        assert client.get(path[1:]) == data
        client.put(b"more " + path[1:], path)
    client.tick_until(lambda: client.store.drives_going == 0, "all rows are gone")
    for path in without(found, drive):
        assert client.get(b"more " + path[1:]) == path
    client.stop_serving()
    assert client.store.describe()["background_failures"] == 0


@given(
    st.lists(
        st.tuples(
            st.sets(st.integers(0, DRIVES - 1), max_size=1),
            st.lists(st.tuples(st.sampled_from(["put", "remove", "tick"]), st.integers(0, 7))),
            st.sampled_from(["stop", "kill", "lose_power"]),
        ),
        min_size=2,
        max_size=5,
    )
)
@hypothesis.settings(max_examples=12, deadline=None)
def test_whatever_drives_are_away_no_block_is_wrong_and_none_comes_back(
    mounts: list[tuple[set[int], list[tuple[str, int]], str]],
) -> None:
    with host(others_bytes=[64 * MIB] * (DRIVES - 1)) as made:
        made.settings = replace(made.settings, index_log_s=0.001)
        away, model, drive_of = Away(made), dict[bytes, bytes](), dict[bytes, int]()
        for at, (missing, steps, end) in enumerate(mounts):
            for drive in missing:
                away.take(drive)
            store = made.start()
            for name in [name for name, drive in drive_of.items() if drive in missing]:
                with pytest.raises(NotFound):
                    store.lookup(ROOT_INODE, name)
                del model[name], drive_of[name]
            for step, number in steps:
                name, data = b"%d" % number, b"%d %d" % (at, number) * 700
                if step == "put":
                    if name in model:
                        store.unlink(ROOT_INODE, name)
                    drive_of[name] = Numbering(DRIVES).drive(put(store, ROOT_INODE, name, data))
                    model[name] = data
                elif step == "remove" and name in model:
                    store.unlink(ROOT_INODE, name)
                    del model[name], drive_of[name]
                elif step == "tick":
                    store.tick()
            assert tree(store) == {b"/" + name: data for name, data in model.items()}
            log_all(store)
            getattr(made, end)()
            for drive in missing:
                away.bring_back(drive)
        store = made.start()
        assert tree(store) == {b"/" + name: data for name, data in model.items()}
        settle(store)
        assert_exact(made)
        with contextlib.suppress(NotFound):
            store.unlink(ROOT_INODE, b"0")
        made.stop()
        assert not made.check().problems
